"""Batches: the same whoever reads them, and a problem in a worker is one sentence as well."""

from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from dkm.app.errors import Problem
from dkm.app.settings import Settings
from dkm.app.tasks import open_task
from dkm.app.tasks.batches import batches


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Ten pictures of noise of each class."""
    rng = np.random.default_rng(0)
    for name in "abc":
        for i in range(10):
            path = tmp_path / name / f"{i}.png"
            path.parent.mkdir(exist_ok=True)
            PIL.Image.fromarray(rng.integers(0, 255, (16, 16, 3), np.uint8)).save(path)
    return tmp_path


def settings(data: Path, **options) -> Settings:
    return Settings(model="resnet18", data=(str(data),), image_size=4, resize=4, **options)


def test_what_an_example_draws_depends_on_its_seed_alone(images: Path):
    chosen = settings(images, augment="imagenet")
    task = open_task(chosen)

    def read(keys: list, workers: int) -> torch.Tensor:
        options = Settings(workers=workers)
        return torch.cat([x for x, _ in batches(task, task.train, keys, options)])

    alone = read([[(7, 0)]], 0)[0]
    assert torch.equal(read([[(1, 0), (2, 3)], [(7, 0)]], 0)[2], alone)
    assert torch.equal(read([[(1, 0)], [(7, 0)]], 2)[1], alone)
    assert not torch.equal(read([[(8, 0)]], 0)[0], alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(images: Path, workers: int):
    (images / "b" / "3.png").write_bytes(b"not a picture")
    task = open_task(settings(images))
    keys = [[(0, i) for i in range(task.train_count)]]
    with pytest.raises(Problem, match=r"cannot read the image .*b.3\.png: it is no image"):
        list(batches(task, task.train, keys, Settings(workers=workers)))
