"""Images in class folders or tar files, tables of texts, or a function of your own -> examples to train on."""

import csv
import os
import random
import signal
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from . import models
from .settings import Problem, Settings

IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
TABLES = (".parquet", ".tsv", ".csv")
HELD_OUT = 10  # one in so many, of each class, where nothing was given to evaluate on


@dataclass(frozen=True)
class Data:
    """Examples: `(x, label)`, or dicts of what a model takes, with "labels".

    `train` may draw random numbers.
    """

    train: Dataset
    eval: Dataset
    classes: int | None
    unit: str  # what an example is called: images, texts, examples
    collate: Callable[[list], Any] = default_collate


def open_data(settings: Settings) -> Data:
    """What `--data` and `--eval-data` name.  Reads names and tables, not yet images."""
    if not settings.data:
        raise Problem("no data: give --data FOLDER, a .tar file of class folders, a table, or FILE.py:FUNCTION")
    own = models.function(settings.data[0]) if len(settings.data) == 1 else None
    if own is not None:
        return _own(own, settings)
    for path in (*settings.data, *settings.eval_data):
        if not Path(path).exists():
            raise Problem(f"there is no folder or file {path}")
    table = _table_in(settings.data[0], "train")
    if table is not None:
        return _texts(settings)
    return _images(settings)


def _own(make: Callable[[], Any], settings: Settings) -> Data:
    if settings.eval_data:
        raise Problem(f"{settings.data[0]} gives the data to evaluate on, too: leave out --eval-data")
    pair = make()
    if not isinstance(pair, tuple) or len(pair) != 2 or not all(hasattr(part, "__getitem__") for part in pair):
        raise Problem(f"{settings.data[0]} must return two datasets, (train, eval), each with len() and [index]")
    train, evaluation = pair
    if not len(train) or not len(evaluation):
        raise Problem(f"{settings.data[0]} gave an empty dataset: both, train and eval, need examples")
    return Data(train, evaluation, settings.classes, "examples")


# --- images --------------------------------------------------------------------------------------


class Image(NamedTuple):
    """Where an image lies: a file, or a stretch of a tar file."""

    path: str
    start: int
    size: int  # -1: to the end
    name: str

    def read(self) -> bytes:
        with open(self.path, "rb") as stream:
            stream.seek(self.start)
            return stream.read(self.size)


class Images(Dataset):
    def __init__(self, examples: Sequence[tuple[Image, int]], transform: Callable):
        self.examples, self.transform = examples, transform

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import PIL.Image

        image, label = self.examples[index]
        try:
            picture = PIL.Image.open(BytesIO(image.read())).convert("RGB")
        except (OSError, SyntaxError, ValueError, EOFError) as error:
            what = "it is no image" if isinstance(error, PIL.UnidentifiedImageError) else error
            raise Problem(f"cannot read the image {image.name}: {what}; repair it or take it away") from None
        return self.transform(picture), label


def _images(settings: Settings) -> Data:
    train_at, eval_at = list(settings.data), list(settings.eval_data)
    for part in ("train", "training"):
        inner = Path(train_at[0], part)
        if len(train_at) == 1 and inner.is_dir():  # ImageNet's layout
            train_at = [str(inner)]
            if not eval_at:
                found = [inner.with_name(name) for name in ("val", "valid", "validation", "test")]
                eval_at = [str(folder) for folder in found if folder.is_dir()][:1]
            break
    train = _by_class(train_at, 2)
    classes = {name: label for label, name in enumerate(sorted(train))}
    if eval_at:
        evaluation = _by_class(eval_at)
        unknown = sorted(set(evaluation) - set(classes))
        if unknown:
            raise Problem(f"{eval_at[0]} has the class '{unknown[0]}', which {train_at[0]} has not")
    else:
        evaluation = {name: held for name, images in train.items() if (held := _held_out(images))}
        held = {image for images in evaluation.values() for image in images}
        train = {name: [image for image in images if image not in held] for name, images in train.items()}
        if not evaluation:
            raise Problem(f"{train_at[0]} has one image a class, too few to hold some out: give --eval-data as well")
    train, evaluation = (
        [(image, classes[name]) for name in sorted(part) for image in part[name]] for part in (train, evaluation)
    )
    looks = models.pixels(settings.model)
    return Data(
        Images(train, transform(settings, looks, settings.augment)),
        Images(evaluation, transform(settings, looks, "none")),
        len(classes),
        "images",
    )


def _held_out(of_a_class: list) -> list:
    """The last of every ten, in their order: the same ones every time."""
    return of_a_class[HELD_OUT - 1 :: HELD_OUT] or of_a_class[1:][-1:]


def transform(settings: Settings, looks: models.Pixels, augment: str) -> Callable:
    """A picture -> the tensor that the model sees."""
    from torchvision.transforms import v2

    size, resize = settings.image_size, settings.resize or round(settings.image_size * 8 / 7)
    if resize < size:
        raise Problem(f"--resize {resize} is less than --image-size {size}: nothing is left to crop")
    how = v2.InterpolationMode(looks.interpolation if looks.interpolation != "random" else "bilinear")
    steps = {
        "none": [v2.Resize(resize, how), v2.CenterCrop(size)],
        "light": [v2.Resize(resize, how), v2.RandomCrop(size), v2.RandomHorizontalFlip()],
        "medium": [v2.RandomResizedCrop(size, (0.35, 1), interpolation=how), v2.RandomHorizontalFlip()],
        "imagenet": [v2.RandomResizedCrop(size, (0.08, 1), interpolation=how), v2.RandomHorizontalFlip()],
    }
    end = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(looks.mean, looks.std)]
    return v2.Compose([*steps[augment], *end])


def _by_class(paths: list[str], least: int = 1) -> dict[str, list[Image]]:
    """Class -> its images, sorted by name; at least so many classes."""
    classes: dict[str, list[Image]] = {}
    for path in paths:
        found = (_in_folder if Path(path).is_dir() else _in_tar)(Path(path))
        if not found:
            raise Problem(f"{path} has no class folders: it must hold a folder for each class, with its images")
        for name, images in found.items():
            if not images:
                raise Problem(f"the class '{name}' in {path} has no images: fill it or take it away")
            classes.setdefault(name, []).extend(images)
    if len(classes) < least:
        name = next(iter(classes))
        raise Problem(f"{paths[0]} has the class '{name}' only: it must hold a folder for each class, with its images")
    return classes


def _in_folder(root: Path) -> dict[str, list[Image]]:
    folders = sorted(folder for folder in root.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    return {
        folder.name: [
            Image(str(file), 0, -1, str(file))
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in IMAGES and not file.name.startswith(".")
        ]
        for folder in folders
    }


def _in_tar(path: Path) -> dict[str, list[Image]]:
    if not tarfile.is_tarfile(path):
        raise Problem(f"{path} is neither a folder, a .tar file nor a table ({', '.join(TABLES)})")
    try:
        with tarfile.open(path, "r:") as archive:
            members = sorted(archive.getmembers(), key=lambda member: member.name)
    except tarfile.TarError:
        raise Problem(f"{path} is a compressed or damaged tar file: unpack it, images are compressed already") from None
    classes: dict[str, list[Image]] = {}
    for member in members:
        inside = Path(member.name)
        if member.isfile() and inside.suffix.lower() in IMAGES and not inside.name.startswith("."):
            image = Image(str(path), member.offset_data, member.size, f"{member.name} in {path}")
            classes.setdefault(inside.parent.name, []).append(image)
    # a folder with nothing in it, neither images nor folders
    parents = {str(Path(member.name).parent) for member in members}
    for member in members:
        if member.isdir() and str(Path(member.name)) not in parents:
            classes.setdefault(Path(member.name).name, [])
    return classes


# --- texts ---------------------------------------------------------------------------------------


class Texts(Dataset):
    def __init__(self, tokens: list[dict[str, list[int]]], labels: list[int]):
        self.tokens, self.labels = tokens, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.tokens[index], "labels": self.labels[index]}


class _Pad:
    """Texts -> a batch, as long as the longest; a class, so that it can be sent to worker processes."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return dict(self.tokenizer.pad(items, return_tensors="pt"))


def _table_in(path: str, *stems: str) -> Path | None:
    """The table that a path is, or that lies in that folder under one of these names."""
    if Path(path).suffix in TABLES:
        return Path(path)
    found = [Path(path, stem + ending) for stem in stems for ending in TABLES]
    return next((file for file in found if file.is_file()), None)


def _texts(settings: Settings) -> Data:
    train_at = [_table_in(path, "train") for path in settings.data]
    eval_at = [_table_in(path, "dev", "validation", "val", "valid") for path in settings.eval_data or settings.data[:1]]
    for paths, given in ((train_at, settings.data), (eval_at, settings.eval_data)):
        if None in paths:
            raise Problem(f"{given[paths.index(None)]} is not a table ({', '.join(TABLES)})")
    if not models.is_transformer(settings.model):
        raise Problem(f"texts need a transformers model: {settings.model} is not a folder with its files")
    try:
        import transformers
    except ImportError:
        raise Problem("texts need transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model, local_files_only=True)
        config = transformers.AutoConfig.from_pretrained(settings.model, local_files_only=True)
    except (OSError, ValueError) as error:
        line = str(error).strip().splitlines()[0]
        raise Problem(f"cannot read the tokenizer in {settings.model}: {line}") from None

    train = [row for path in train_at for row in read_table(path, settings)]
    if eval_at == train_at[:1]:
        held = rows_held_out([label for _, label in train])
        evaluation, train = ([row for i, row in enumerate(train) if (i in held) is part] for part in (True, False))
    else:
        evaluation = [row for path in eval_at for row in read_table(path, settings)]
    if not train or not evaluation:
        raise Problem(f"{(train_at if not train else eval_at)[0]} has too few rows")
    ids = _label_ids({label for _, label in train}, config, train_at[0])
    unknown = [label for _, label in evaluation if label not in ids]
    if unknown:
        raise Problem(f"{eval_at[0]} has the label {unknown[0]!r}, which {train_at[0]} has not")

    def encode(rows: list[tuple[tuple[str, ...], Any]]) -> Texts:
        columns = [list(column) for column in zip(*(texts for texts, _ in rows), strict=True)]
        encoded = tokenizer(*columns, truncation=True, max_length=settings.max_length)
        tokens = [{key: encoded[key][i] for key in encoded} for i in range(len(rows))]
        return Texts(tokens, [ids[label] for _, label in rows])

    made = encode(train)
    return Data(made, encode(evaluation), max(ids.values()) + 1, "texts", _Pad(tokenizer))


def rows_held_out(labels: Sequence) -> set[int]:
    """Of each label the last of every ten rows."""
    of_label: dict[Any, list[int]] = {}
    for row, label in enumerate(labels):
        of_label.setdefault(label, []).append(row)
    return {row for rows in of_label.values() for row in _held_out(rows)}


def _label_ids(labels: set, config: Any, path: Path) -> dict[Any, int]:
    """Label -> index: a number is its own, a name is where the model's config has it, or in the order of names."""
    if all(isinstance(label, int) for label in labels):
        if min(labels) < 0:
            raise Problem(f"{path} has the label {min(labels)}: rows without a label cannot be trained on")
        return {label: label for label in range(max(labels) + 1)}
    known = getattr(config, "label2id", None) or {}
    if all(label in known for label in labels):
        return dict(known)
    return {label: index for index, label in enumerate(sorted(labels))}


def read_table(path: Path, settings: Settings) -> list[tuple[tuple[str, ...], Any]]:
    """Rows of (texts, label); labels are whole numbers where they look like it, names otherwise."""
    columns = _columns(path)
    if settings.label_column not in columns:
        has = f"it has {', '.join(columns)}: --label-column" if columns else "it has none at all"
        raise Problem(f"{path} has no column '{settings.label_column}'; {has}")
    labels = columns[settings.label_column]
    if settings.text_columns is None:
        names = [
            name
            for name, values in columns.items()
            if name != settings.label_column and values and not all(_is_number(value) for value in values)
        ]
    else:
        names = [name.strip() for name in settings.text_columns.split(",")]
    for name in names:
        if name not in columns:
            raise Problem(f"{path} has no column '{name}'; it has {', '.join(columns)}: --text-columns")
    if labels and not 1 <= len(names) <= 2:
        raise Problem(
            f"{path} has {len(names)} columns of text ({', '.join(names)}): name one or two of them, --text-columns"
        )
    for row, label in enumerate(labels):
        if label is None or label == "" or any(columns[name][row] is None for name in names):
            raise Problem(f"row {row + 1} of {path} is not complete: fill it or take it away")
    if all(_is_number(label) for label in labels):
        labels = [int(label) for label in labels]
    texts = zip(*([str(value) for value in columns[name]] for name in names), strict=True)
    return list(zip(texts, labels, strict=True))


def _columns(path: Path) -> dict[str, list]:
    if path.suffix == ".parquet":
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise Problem(f"{path} needs pyarrow: pip install pyarrow") from None
        try:
            return pyarrow.parquet.read_table(path).to_pydict()
        except pyarrow.ArrowInvalid as error:
            raise Problem(f"{path} is not a parquet file, or is cut off: {str(error).splitlines()[0]}") from None
    # GLUE's .tsv files hold quotation marks that quote nothing
    how = dict(delimiter="\t", quoting=csv.QUOTE_NONE) if path.suffix == ".tsv" else {}
    try:
        with open(path, newline="", encoding="utf-8") as stream:
            rows = csv.DictReader(stream, **how)
            columns: dict[str, list] = {name: [] for name in rows.fieldnames or ()}
            for row in rows:
                if None in row or None in row.values():
                    raise Problem(
                        f"line {rows.line_num} of {path} does not have the {len(columns)} columns of the first"
                    )
                for name, value in row.items():
                    columns[name].append(value)
    except (UnicodeDecodeError, csv.Error) as error:
        raise Problem(f"{path} is not a table of text: {error}") from None
    return columns


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and value.lstrip("-").isdigit())


# --- batches -------------------------------------------------------------------------------------


class _Examples(Dataset):
    """Examples by (random seed, index): what an example draws depends on these alone, not on the process that
    reads it or on what was read before.  A problem is an item, because an exception would arrive as a traceback."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        seed, index = key
        state, others = torch.get_rng_state(), random.getstate()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        try:
            return self.dataset[index]
        except Problem as problem:
            return problem
        finally:
            torch.set_rng_state(state)
            random.setstate(others)


class _Collate:
    def __init__(self, collate: Callable):
        self.collate = collate

    def __call__(self, items: list) -> Any:
        problem = next((item for item in items if isinstance(item, Problem)), None)
        return self.collate(items) if problem is None else problem


def _stand_apart(worker: int) -> None:
    """Signals for all processes of a run, such as Ctrl-C's, are for the one that trains; it ends its workers."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def batches(dataset: Dataset, keys: Sequence[list[tuple[int, int]]], data: Data, settings: Settings) -> Iterator[Any]:
    """Batches of these (seed, index) pairs."""
    loader = DataLoader(
        _Examples(dataset),
        batch_sampler=keys,
        num_workers=settings.workers,
        collate_fn=_Collate(data.collate),
        worker_init_fn=_stand_apart,
        pin_memory=torch.cuda.is_available() and settings.device != "cpu",
    )
    for batch in loader:
        if isinstance(batch, Problem):
            raise batch
        yield batch
