"""Images that cannot be read: found before the run begins, and left out, with --skip-bad-images."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ..errors import Problem
from ..run_folder import LeftOut
from ..tasks import ImageTask
from ..tasks.images import Images
from .listener import Listener

NAMED = 3  # in the note
MANY = 10_000  # images, from which on the user should know why nothing happens yet
AT_ONCE = 64  # images, after which Ctrl-C can have its way


def leave_out_bad_images(
    task: ImageTask, accelerator: Any, listener: Listener, known: LeftOut | None, *, trains: bool
) -> LeftOut:
    """Leave out the images that cannot be read, or those that are `known` from when the run began; returns which.

    Every image is read once, each by one of the processes, so all processes leave out the same.  Without `trains`,
    only the images to evaluate on are looked at.
    """
    parts = {"eval": task.images["eval"]} | ({"train": task.images["train"]} if trains else {})
    count = sum(map(len, parts.values()))
    if known is None and count >= MANY:
        listener.note(f"reading {count:,} images once, to find those that cannot be read ...")
    left_out: LeftOut = {}
    names = []
    for part, images in parts.items():
        bad = sorted(_bad_of(images, accelerator) if known is None else known.get(part, []))
        if bad and bad[-1] >= len(images):
            raise Problem("the images are others than when the run began: start it anew in another --out")
        names += [images.examples[index][0].name for index in bad]
        images.leave_out(bad)
        left_out[part] = bad
        if not len(images):
            raise Problem(f"none of the images to {'train' if part == 'train' else 'evaluate'} on can be read")
    if names:
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        listener.note(
            f"left out {len(names):,} of {count:,} images, which cannot be read: {', '.join(names[:NAMED])}{more}"
        )
    return left_out


def _bad_of(images: Images, accelerator: Any) -> list[int]:
    """The numbers of the images that cannot be read."""
    from accelerate.utils import gather_object

    mine = range(accelerator.process_index, len(images), accelerator.num_processes)
    return list(gather_object(list(_bad_among(images, mine))))


def _bad_among(images: Images, indices: range) -> Iterator[int]:
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # Pillow reads and decodes without the interpreter's lock
        for at in range(0, len(indices), AT_ONCE):
            some = indices[at : at + AT_ONCE]
            for index, is_bad in zip(some, pool.map(images.is_bad, some), strict=True):
                if is_bad:
                    yield index
