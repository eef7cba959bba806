"""Images on the disk: a folder for each class, or tar files of such folders."""

import os
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import Problem
from .tables import TABLES

IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


class ImageFile(NamedTuple):
    """Where an image lies: in a file of its own, or in a part of a tar file."""

    path: str
    start: int
    size: int  # -1: to the end of the file
    name: str  # for messages

    def read(self) -> bytes:
        """The bytes of the image, still compressed."""
        with open(self.path, "rb") as stream:
            stream.seek(self.start)
            return stream.read(self.size)

    def picture(self, mode: str) -> Any:
        """The image as one of Pillow, "RGB" or "L"; Problem where it cannot be read."""
        import PIL.Image

        try:
            return PIL.Image.open(BytesIO(self.read())).convert(mode)
        except Exception as error:  # Pillow raises many kinds, such as its own for a picture of far too many pixels
            what = (
                "it is no image"
                if isinstance(error, PIL.UnidentifiedImageError)
                else str(error) or type(error).__name__
            )
            raise Problem(
                f"cannot read the image {self.name}: {what}; repair it or take it away, or give --skip-bad-images"
            ) from None


Classes = dict[str, list[ImageFile]]  # the name of each class -> its images, sorted by name


def find_images(paths: list[str], least_classes: int = 1) -> Classes:
    """The images in these folders and tar files; Problem where a class is empty, or there are too few classes."""
    classes: Classes = {}
    for path in paths:
        found = _in_folder(Path(path)) if Path(path).is_dir() else _in_tar(Path(path))
        if not found:
            raise Problem(f"{path} has no class folders: it must hold a folder for each class, with its images")
        for name, images in found.items():
            if not images:
                raise Problem(f"the class '{name}' in {path} has no images: fill it or take it away")
            classes.setdefault(name, []).extend(images)
    if len(classes) < least_classes:
        name = next(iter(classes))
        raise Problem(f"{paths[0]} has the class '{name}' only: it must hold a folder for each class, with its images")
    return classes


def _in_folder(root: Path) -> Classes:
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return {
        folder.name: [
            ImageFile(str(file), 0, -1, str(file)) for file in sorted(_files(folder)) if _looks_like_an_image(file)
        ]
        for folder in folders
    }


def _files(folder: Path) -> Iterator[Path]:
    """The ordinary files in a folder and the folders in it.  Pipes, sockets and devices are left out: reading one could
    take for ever."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(Path(entry.path))
            elif entry.is_file():
                yield Path(entry.path)


def _in_tar(path: Path) -> Classes:
    if not tarfile.is_tarfile(path):
        raise Problem(f"{path} is neither a folder, a .tar file nor a table ({', '.join(TABLES)})")
    try:
        with tarfile.open(path, "r:") as archive:
            members = sorted(archive.getmembers(), key=lambda member: member.name)
    except tarfile.TarError:
        raise Problem(f"{path} is a compressed or damaged tar file: unpack it, images are compressed already") from None
    classes: Classes = {}
    for member in members:
        inside = Path(member.name)
        if member.isfile() and _looks_like_an_image(inside):
            image = ImageFile(str(path), member.offset_data, member.size, f"{member.name} in {path}")
            classes.setdefault(inside.parent.name, []).append(image)
    # A folder that holds neither images nor folders is a class without images.
    parents = {str(Path(member.name).parent) for member in members}
    for member in members:
        if member.isdir() and str(Path(member.name)) not in parents:
            classes.setdefault(Path(member.name).name, [])
    return classes


def _looks_like_an_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_ENDINGS and not file.name.startswith(".")
