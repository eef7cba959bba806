"""Images in folders and tar files; what is wrong with them, in a sentence."""

import os
import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from torch import nn

from dkm.app.errors import Problem
from dkm.app.settings import Settings
from dkm.app.tasks import open_task

CLASSES = ("a", "b", "c")


def picture(path: Path, value: int, size: tuple[int, int] = (8, 8)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    PIL.Image.fromarray(np.full((*size, 3), value, np.uint8)).save(path)
    return path


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Ten of each class; the pixels tell the class."""
    for label, name in enumerate(CLASSES):
        for i in range(10):
            picture(tmp_path / "images" / name / f"{i}.png", 50 * label)
    return tmp_path / "images"


def settings(*data: Path | str, **options) -> Settings:
    return Settings(model="resnet18", data=tuple(map(str, data)), image_size=4, resize=4, **options)


def labels(dataset) -> list[int]:
    return [dataset[i][1] for i in range(len(dataset))]


def test_a_tenth_of_each_class_is_held_out(images: Path):
    data = open_task(settings(images))
    assert (len(data.train), len(data.eval), data.classes) == (27, 3, 3)
    assert labels(data.eval) == [0, 1, 2]
    assert {image for image, _ in data.train.examples}.isdisjoint(image for image, _ in data.eval.examples)


def test_the_image_is_normalised(images: Path):
    x, _ = open_task(settings(images)).eval[1]  # all 50
    wanted = (50 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(x, wanted.view(3, 1, 1).expand(3, 4, 4))


def test_grey_images_for_a_model_of_one_channel(images: Path):
    """A picture of three equal channels is as bright as each of them; the weights of the channels add up to 1."""
    PIL.Image.new("RGB", (8, 8), (200, 100, 0)).save(images / "a" / "9.png")
    data = open_task(settings(images))
    data.suit(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 3)))
    mean = 0.299 * 0.485 + 0.587 * 0.456 + 0.114 * 0.406
    std = 0.299 * 0.229 + 0.587 * 0.224 + 0.114 * 0.225
    brightness = torch.tensor([round(0.299 * 200 + 0.587 * 100), 50]).view(2, 1, 1, 1)
    wanted = ((brightness / 255 - mean) / std).expand(2, 1, 4, 4)
    # Pillow rounds the brightness to a whole number, one of 255, which may be the next one.
    torch.testing.assert_close(torch.stack([data.eval[0][0], data.eval[1][0]]), wanted, rtol=0, atol=1.01 / 255 / std)
    assert data.train[0][0].shape == (1, 4, 4)


@pytest.mark.parametrize(
    ("model", "channels"),
    [
        (nn.Conv2d(3, 4, 3), 3),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), 1),
        (nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), 3),
        (nn.ReLU(), 3),
    ],
)
def test_the_channels_that_a_model_takes(images: Path, model: nn.Module, channels: int):
    data = open_task(settings(images))
    data.suit(model)
    assert data.eval[0][0].shape == (channels, 4, 4)


def test_train_and_val_folders(images: Path, tmp_path: Path):
    images.rename(tmp_path / "train")
    picture(tmp_path / "val" / "b" / "0.png", 50)
    data = open_task(settings(tmp_path))
    assert (len(data.train), labels(data.eval)) == (30, [1])


def test_tar_files_hold_the_same_as_the_folder(images: Path, tmp_path: Path):
    parts = []
    for part in (0, 1):  # each class in both
        parts.append(tmp_path / f"part{part}.tar")
        with tarfile.open(parts[-1], "w") as archive:
            for file in sorted(images.rglob("*.png")):
                if int(file.stem) % 2 == part:
                    archive.add(file, f"train/{file.parent.name}/{file.name}")
    picture(tmp_path / "val" / "a" / "x.png", 0)
    packed = open_task(settings(*parts, eval_data=(str(tmp_path / "val"),)))
    assert len(packed.train) == 30
    for x, label in (packed.train[i] for i in range(30)):
        expected = (50 * label / 255 - 0.485) / 0.229
        assert x[0].eq(x[0, 0, 0]).all()
        assert float(x[0, 0, 0]) == pytest.approx(expected, abs=1e-5)


def test_an_empty_class(images: Path):
    (images / "d").mkdir()
    with pytest.raises(Problem, match=r"the class 'd' in .* has no images"):
        open_task(settings(images))


def test_an_empty_class_in_a_tar_file(images: Path, tmp_path: Path):
    (images / "d").mkdir()
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(images, "train")
    with pytest.raises(Problem, match=r"the class 'd' in .* has no images"):
        open_task(settings(tmp_path / "all.tar"))


def test_a_folder_without_classes(tmp_path: Path):
    picture(tmp_path / "flat" / "0.png", 0)
    with pytest.raises(Problem, match="no class folders: it must hold a folder for each class"):
        open_task(settings(tmp_path / "flat"))


def test_a_missing_folder(tmp_path: Path):
    with pytest.raises(Problem, match=r"there is no folder or file .*nowhere"):
        open_task(settings(tmp_path / "nowhere"))


def test_a_class_that_training_does_not_know(images: Path, tmp_path: Path):
    picture(tmp_path / "val" / "z" / "0.png", 0)
    with pytest.raises(Problem, match=r"the class 'z', which .*images has not"):
        open_task(settings(images, eval_data=(str(tmp_path / "val"),)))


def png_of(width: int, height: int) -> bytes:
    """The beginning of a PNG file of this size; its few bytes stand for as many pixels as one likes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [60_000, 2**31 - 1])
def test_a_picture_of_far_too_many_pixels(images: Path, side: int):
    (images / "a" / "9.png").write_bytes(png_of(side, side))
    with pytest.raises(Problem, match=r"cannot read the image .*9\.png: .*pixels.*; repair it or take it away"):
        open_task(settings(images)).eval[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_pipe_is_no_image(images: Path, tmp_path: Path):
    os.mkfifo(images / "a" / "x.png")
    os.mkfifo(tmp_path / "pipe.png")
    data = open_task(settings(images))
    assert (len(data.train), len(data.eval)) == (27, 3)
    with pytest.raises(Problem, match=r"pipe\.png is neither a folder nor an ordinary file"):
        open_task(settings(tmp_path / "pipe.png"))


def test_images_in_deeper_folders(images: Path):
    deep = picture(images / "a" / "more" / "x.png", 0)
    (images / "a" / "link.png").symlink_to(deep)
    found = open_task(settings(images)).train.examples
    assert {"x.png", "link.png"} <= {Path(image.path).name for image, _ in found}


def test_a_compressed_tar_file(images: Path, tmp_path: Path):
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(images, "train")
    with pytest.raises(Problem, match="compressed or damaged tar file: unpack it"):
        open_task(settings(tmp_path / "all.tar.gz"))
