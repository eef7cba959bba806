"""Images, to be classified."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import Dataset

from .. import models
from ..errors import Problem
from ..settings import Settings
from .image_files import Classes, ImageFile, find_images
from .task import Task, check_that_paths_exist, held_out


class ImageTask(Task):
    """Images in class folders or tar files.  All of them are cropped to one size."""

    unit: ClassVar[str] = "images"
    batches_have_one_shape = True

    @classmethod
    def recognizes(cls, settings: Settings) -> bool:
        """Everything: a folder or file that is no other kind of data should hold images."""
        return True

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Find the images, without reading them yet."""
        check_that_paths_exist(settings)
        places = _places(settings)
        train = find_images(places.train, least_classes=2)
        labels = {name: label for label, name in enumerate(sorted(train))}
        if places.eval:
            evaluation = find_images(places.eval)
            unknown = sorted(set(evaluation) - set(labels))
            if unknown:
                raise Problem(f"{places.eval[0]} has the class '{unknown[0]}', which {places.train[0]} has not")
        else:
            evaluation = {name: list(held) for name, images in train.items() if (held := held_out(images))}
            kept_back = {image for images in evaluation.values() for image in images}
            train = {name: [image for image in images if image not in kept_back] for name, images in train.items()}
            if not evaluation:
                raise Problem(
                    f"{places.train[0]} has one image a class, too few to hold some out: give --eval-data as well"
                )
        assert settings.model is not None
        looks = models.pixels(settings.model)
        return cls(
            Images(_labelled(train, labels), transform(settings, looks, settings.augment)),
            Images(_labelled(evaluation, labels), transform(settings, looks, "none")),
            len(labels),
        )


class Images(Dataset):
    """`(tensor, label)` for each image; it is read when it is asked for."""

    def __init__(self, examples: Sequence[tuple[ImageFile, int]], transform: Callable[..., Tensor]):
        self.examples, self.transform = examples, transform

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import PIL.Image

        image, label = self.examples[index]
        try:
            picture = PIL.Image.open(BytesIO(image.read())).convert("RGB")
        except Exception as error:  # Pillow raises many kinds, such as its own for a picture of far too many pixels
            what = (
                "it is no image"
                if isinstance(error, PIL.UnidentifiedImageError)
                else str(error) or type(error).__name__
            )
            raise Problem(f"cannot read the image {image.name}: {what}; repair it or take it away") from None
        return self.transform(picture), label


class _Places(NamedTuple):
    """The folders and tar files with the images to train on and to evaluate on."""

    train: list[str]
    eval: list[str]  # empty: a part of those to train on is held out


def _places(settings: Settings) -> _Places:
    """What the user names; of one folder with `train` and `val` in it, ImageNet's layout, these two."""
    train, evaluation = list(settings.data), list(settings.eval_data)
    for name in ("train", "training"):
        inner = Path(train[0], name)
        if len(train) == 1 and inner.is_dir():
            train = [str(inner)]
            if not evaluation:
                found = [inner.with_name(other) for other in ("val", "valid", "validation", "test")]
                evaluation = [str(folder) for folder in found if folder.is_dir()][:1]
            break
    return _Places(train, evaluation)


def _labelled(classes: Classes, labels: dict[str, int]) -> list[tuple[ImageFile, int]]:
    return [(image, labels[name]) for name in sorted(classes) for image in classes[name]]


def transform(settings: Settings, looks: models.Pixels, augment: str) -> Callable[..., Tensor]:
    """The function from a PIL image to the `(3, size, size)` tensor that the model sees."""
    from torchvision.transforms import v2

    size, resize = settings.image_size, settings.resize or round(settings.image_size * 8 / 7)
    if resize < size:
        raise Problem(f"--resize {resize} is less than --image-size {size}: nothing is left to crop")
    how = v2.InterpolationMode(looks.interpolation if looks.interpolation != "random" else "bilinear")
    crops = {
        "none": [v2.Resize(resize, how), v2.CenterCrop(size)],
        "light": [v2.Resize(resize, how), v2.RandomCrop(size), v2.RandomHorizontalFlip()],
        "medium": [v2.RandomResizedCrop(size, (0.35, 1), interpolation=how), v2.RandomHorizontalFlip()],
        "imagenet": [v2.RandomResizedCrop(size, (0.08, 1), interpolation=how), v2.RandomHorizontalFlip()],
    }
    to_tensor = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(looks.mean, looks.std)]
    return v2.Compose([*crops[augment], *to_tensor])
