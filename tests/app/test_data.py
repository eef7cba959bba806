"""Folders, tar files and tables -> examples; what is wrong with them, in a sentence."""

import tarfile
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from dkm.app.data import batches, open_data, read_table, rows_held_out
from dkm.app.settings import Problem, Settings

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
    data = open_data(settings(images))
    assert (len(data.train), len(data.eval), data.classes) == (27, 3, 3)
    assert labels(data.eval) == [0, 1, 2]
    assert {image for image, _ in data.train.examples}.isdisjoint(image for image, _ in data.eval.examples)


def test_the_image_is_normalised(images: Path):
    x, _ = open_data(settings(images)).eval[1]  # all 50
    wanted = (50 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(x, wanted.view(3, 1, 1).expand(3, 4, 4))


def test_train_and_val_folders(images: Path, tmp_path: Path):
    images.rename(tmp_path / "train")
    picture(tmp_path / "val" / "b" / "0.png", 50)
    data = open_data(settings(tmp_path))
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
    packed = open_data(settings(*parts, eval_data=(str(tmp_path / "val"),)))
    assert len(packed.train) == 30
    for x, label in (packed.train[i] for i in range(30)):
        expected = (50 * label / 255 - 0.485) / 0.229
        assert x[0].eq(x[0, 0, 0]).all()
        assert float(x[0, 0, 0]) == pytest.approx(expected, abs=1e-5)


def test_what_an_example_draws_depends_on_its_seed_alone(images: Path):
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (16, 16, 3), np.uint8)
    PIL.Image.fromarray(noise).save(images / "a" / "0.png")
    chosen = settings(images, augment="imagenet")
    data = open_data(chosen)

    def read(keys: list, workers: int) -> torch.Tensor:
        options = Settings(workers=workers)
        return torch.cat([x for x, _ in batches(data.train, keys, data, options)])

    alone = read([[(7, 0)]], 0)[0]
    assert torch.equal(read([[(1, 0), (2, 3)], [(7, 0)]], 0)[2], alone)
    assert torch.equal(read([[(1, 0)], [(7, 0)]], 2)[1], alone)
    assert not torch.equal(read([[(8, 0)]], 0)[0], alone)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_named(images: Path, workers: int):
    (images / "b" / "3.png").write_bytes(b"not a picture")
    data = open_data(settings(images))
    keys = [[(0, i) for i in range(len(data.train))]]
    with pytest.raises(Problem, match=r"cannot read the image .*b.3\.png: it is no image"):
        list(batches(data.train, keys, data, Settings(workers=workers)))


def test_an_empty_class(images: Path):
    (images / "d").mkdir()
    with pytest.raises(Problem, match=r"the class 'd' in .* has no images"):
        open_data(settings(images))


def test_an_empty_class_in_a_tar_file(images: Path, tmp_path: Path):
    (images / "d").mkdir()
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        archive.add(images, "train")
    with pytest.raises(Problem, match=r"the class 'd' in .* has no images"):
        open_data(settings(tmp_path / "all.tar"))


def test_a_folder_without_classes(tmp_path: Path):
    picture(tmp_path / "flat" / "0.png", 0)
    with pytest.raises(Problem, match="no class folders: it must hold a folder for each class"):
        open_data(settings(tmp_path / "flat"))


def test_a_missing_folder(tmp_path: Path):
    with pytest.raises(Problem, match=r"there is no folder or file .*nowhere"):
        open_data(settings(tmp_path / "nowhere"))


def test_a_class_that_training_does_not_know(images: Path, tmp_path: Path):
    picture(tmp_path / "val" / "z" / "0.png", 0)
    with pytest.raises(Problem, match=r"the class 'z', which .*images has not"):
        open_data(settings(images, eval_data=(str(tmp_path / "val"),)))


def test_a_compressed_tar_file(images: Path, tmp_path: Path):
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as archive:
        archive.add(images, "train")
    with pytest.raises(Problem, match="compressed or damaged tar file: unpack it"):
        open_data(settings(tmp_path / "all.tar.gz"))


# --- tables --------------------------------------------------------------------------------------


def test_a_tenth_of_each_label_is_held_out():
    assert rows_held_out([0, 1] * 20) == {18, 38, 19, 39}
    assert rows_held_out(["a"] * 3 + ["b"]) == {2}


def test_csv_tsv_and_parquet_say_the_same(tmp_path: Path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    (tmp_path / "t.csv").write_text('idx,question,sentence,label\n0,"who, me?",yes,1\n1,why,no,0\n')
    (tmp_path / "t.tsv").write_text("idx\tquestion\tsentence\tlabel\n0\twho, me?\tyes\t1\n1\twhy\tno\t0\n")
    columns = {"idx": [0, 1], "question": ["who, me?", "why"], "sentence": ["yes", "no"], "label": [1, 0]}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "t.parquet")
    wanted = [(("who, me?", "yes"), 1), (("why", "no"), 0)]
    for ending in ("csv", "tsv", "parquet"):
        assert read_table(tmp_path / f"t.{ending}", Settings()) == wanted
    one = read_table(tmp_path / "t.csv", Settings(text_columns="sentence"))
    assert one == [(("yes",), 1), (("no",), 0)]


def test_a_quotation_mark_in_a_tsv_quotes_nothing(tmp_path: Path):
    (tmp_path / "t.tsv").write_text('sentence\tlabel\n"so what\t0\nfine"\t1\n')
    assert read_table(tmp_path / "t.tsv", Settings()) == [(('"so what',), 0), (('fine"',), 1)]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("sentence,stars\nx,1\n", {}, "has no column 'label'; it has sentence, stars: --label-column"),
        ("sentence,label\nx,1\n", {"text_columns": "text"}, "has no column 'text'; it has sentence, label"),
        ("a,b,c,label\nx,y,z,1\n", {}, "3 columns of text .*: name one or two of them, --text-columns"),
        ("sentence,label\nx,\n", {}, "row 1 of .* is not complete"),
        ("sentence,label\nx,1,2\n", {}, "line 2 of .* does not have the 2 columns"),
    ],
)
def test_tables_with_problems(tmp_path: Path, text: str, options: dict, sentence: str):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(Problem, match=sentence):
        read_table(tmp_path / "t.csv", Settings(**options))
