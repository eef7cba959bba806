"""Images, to be classified."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from .. import models
from ..errors import Problem
from ..settings import Settings
from .class_folders import Numbered, differing, not_listed, number_classes
from .image_files import Classes, ImageFile, find_images
from .task import Task, check_that_paths_exist, held_out


class ImageTask(Task):
    """Images in class folders or tar files.  All of them are cropped to one size."""

    unit: ClassVar[str] = "images"
    batches_have_one_shape = True
    hint: ClassVar[str] = "give another --image-size, or a model for such images"

    def __init__(self, train: "Images", evaluation: "Images", numbered: Numbered, settings: Settings):
        super().__init__(train, evaluation, numbered.classes)
        self.images = {"train": train, "eval": evaluation}
        self.numbered, self.settings = numbered, settings
        self.notes = list(numbered.notes)

    @classmethod
    def recognizes(cls, settings: Settings) -> bool:
        """Everything: a folder or file that is no other kind of data should hold images."""
        return True

    @classmethod
    def open(cls, settings: Settings) -> Self:
        """Find the images, without reading them yet."""
        check_that_paths_exist(settings)
        places = _places(settings)
        known = settings.class_list is not None or settings.classes is not None  # which classes there could be
        train = find_images(places.train, least_classes=1 if known else 2)
        found = train if places.eval in ([], places.train) else find_images(places.eval)
        numbered = number_classes(train, found, outputs=settings.classes, file=settings.class_list)
        unknown = sorted(set(found) - set(numbered.labels))
        if unknown and settings.class_list is not None:
            raise not_listed(unknown[0], numbered.labels, settings.class_list)
        if unknown:
            raise Problem(f"{places.eval[0]} has the class '{unknown[0]}', which {places.train[0]} has not")
        evaluation = found
        if not places.eval:
            evaluation = {name: list(held) for name, images in train.items() if (held := held_out(images))}
            kept_back = {image for images in evaluation.values() for image in images}
            train = {name: [image for image in images if image not in kept_back] for name, images in train.items()}
            if not evaluation:
                raise Problem(
                    f"{places.train[0]} has one image a class, too few to hold some out: give --eval-data as well"
                )
        assert settings.model is not None
        looks, labels = models.pixels(settings.model), numbered.labels
        task = cls(
            Images(_labelled(train, labels), transform(settings, looks, settings.augment)),
            Images(_labelled(evaluation, labels), transform(settings, looks, "none")),
            numbered,
            settings,
        )
        task.measured_places, task.is_held_out = places.eval or places.train, not places.eval
        return task

    def suit(self, model: nn.Module) -> None:
        """Give a model of one channel grey images."""
        if not models.takes_grey(model, self.settings.image_size):
            return
        looks = models.grey(models.pixels(str(self.settings.model)))
        for name, augment in (("train", self.settings.augment), ("eval", "none")):
            self.images[name].mode = "L"
            self.images[name].transform = transform(self.settings, looks, augment)

    def check_outputs(self, outputs: int) -> str | None:
        """Where `--classes` did not say it: whether the model has as many outputs as there are class folders."""
        folders = len(self.numbered.labels)
        if self.settings.classes is not None or outputs == self.numbered.classes:
            return None
        if self.numbered.classes > outputs:
            raise Problem(f"there are {folders} classes, and the model has {outputs} outputs: give data of its classes")
        if not self.numbered.by_name:
            return None
        return differing(folders, outputs) + f", or --classes {outputs} where the names are the numbers of outputs"


class Images(Dataset):
    """`(tensor, label)` for each image; it is read when it is asked for."""

    def __init__(self, examples: Sequence[tuple[ImageFile, int]], transform: Callable[..., Tensor]):
        self.examples, self.transform = examples, transform
        self.mode = "RGB"  # or "L", grey

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.examples[index]
        return self.transform(image.picture(self.mode)), label

    def is_bad(self, index: int) -> bool:
        """Whether an image cannot be read."""
        try:
            self.examples[index][0].picture(self.mode)
        except Problem:
            return True
        return False

    def leave_out(self, indices: Sequence[int]) -> None:
        """Take the images of these numbers away."""
        bad = set(indices)
        self.examples = [example for index, example in enumerate(self.examples) if index not in bad]


class _Places(NamedTuple):
    """The folders and tar files with the images to train on and to evaluate on."""

    train: list[str]
    eval: list[str]  # empty: a part of those to train on is held out


def _places(settings: Settings) -> _Places:
    """What the user names; of one folder with `train` and `val` in it, ImageNet's layout, these two.

    Where both are to be the same, that is all of it, unless it has a `val` of its own.
    """
    train, evaluation = list(settings.data), list(settings.eval_data)
    train_inside, _ = _parts(train)
    _, eval_inside = _parts(evaluation or train)
    if evaluation == train:
        evaluation = train_inside or train
    return _Places(train_inside or train, eval_inside or evaluation)


def _parts(paths: list[str]) -> tuple[list[str], list[str]]:
    """The folder to train on and the one to evaluate on in the only one of these, where it has the former."""
    folders = [path for name in ("train", "training") if len(paths) == 1 and (path := Path(paths[0], name)).is_dir()]
    beside = ("val", "valid", "validation", "test")
    found = [path for name in beside if folders and (path := Path(paths[0], name)).is_dir()]
    return [str(path) for path in folders[:1]], [str(path) for path in found[:1]]


def _labelled(classes: Classes, labels: dict[str, int]) -> list[tuple[ImageFile, int]]:
    return [(image, labels[name]) for name in sorted(classes) for image in classes[name]]


def transform(settings: Settings, looks: models.Pixels, augment: str) -> Callable[..., Tensor]:
    """The function from a PIL image to the `(channels, size, size)` tensor that the model sees."""
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
