"""What is the same for every target: names and options, the check before anything appears, the report, the command."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from samples import tied
from torch import nn

import dkm
from dkm.exporters import TARGETS, Checked, Job, Row, Target, named, register
from dkm.exporters.target import largest_difference


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> str:
    """A target that writes the state dict, and can do wrong."""
    monkeypatch.setattr("dkm.exporters.target.TARGETS", TARGETS)
    before = dict(TARGETS)

    @register("sample")
    @dataclass(frozen=True)
    class Sample(Target):
        suffix: ClassVar[str] = ".pt"
        offset: float = 0.0
        lost: bool = False
        folder: bool = False

        def write(self, job: Job, path: Path) -> list[Row]:
            if self.folder:
                path.mkdir()
                path = path / "weights"
            path.write_bytes(b"weights")
            rows = [Row.of(each, "codes", 1) for each in job.tensors]
            return rows[1:] if self.lost else rows

        def check(self, job: Job, path: Path) -> Checked:
            return Checked(job.furthest([output + self.offset for output in job.outputs]), "sample")

    yield "sample"
    TARGETS.clear()
    TARGETS.update(before)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 4))


def layers() -> nn.Module:
    model = plain()
    dkm.compress_(model, "0.weight:2, 2.weight:3/5", tau=1.0)
    return model


EXAMPLE = torch.linspace(-1, 1, 10).view(2, 5)


def test_a_model_and_its_file_give_the_same(target: str, tmp_path: Path):
    model = layers().train()
    dkm.save(model, tmp_path / "model.dkm")
    architecture = plain()
    before = {name: value.clone() for name, value in architecture.state_dict().items()}
    jobs = []
    kind = TARGETS[target]
    check = kind.check
    kind.check = lambda self, job, path: jobs.append(job) or check(self, job, path)
    a = dkm.export(model, tmp_path / "a", to=target, example=EXAMPLE)
    b = dkm.export(tmp_path / "model.dkm", tmp_path / "b", to=target, model=architecture, example=(EXAMPLE,))
    assert {(row.name, row.source) for row in a.rows} == {(row.name, row.source) for row in b.rows}
    mine, other = (job.plain_model.state_dict() for job in jobs)
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    assert model.training
    assert "0.weight" not in dict(model.named_parameters())  # it is still compressed
    assert all(torch.equal(before[name], value) for name, value in architecture.state_dict().items())
    assert a.bytes == 7
    assert a.checked == Checked(0.0, "sample")


@pytest.mark.parametrize("folder", [False, True])
def test_nothing_is_written_that_differs(target: str, tmp_path: Path, folder: bool):
    with pytest.raises(dkm.ExportError, match=r"differs from the model by up to 0\.5 .*nothing was written"):
        dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE, offset=0.5, folder=folder)
    assert not list(tmp_path.iterdir())
    with pytest.raises(dkm.ExportError, match="by up to inf"):
        dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE, offset=math.nan, folder=folder)
    assert not list(tmp_path.iterdir())
    report = dkm.export(
        layers(), tmp_path / "out", to=target, example=EXAMPLE, offset=0.5, folder=folder, tolerance=0.6
    )
    assert report.bytes == 7
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_tensor_without_a_row_is_a_fault(target: str, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"0\.weight|0\.bias"):
        dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE, lost=True)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_stays(target: str, tmp_path: Path):
    (tmp_path / "out").mkdir()
    dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE, folder=True)
    with pytest.raises(dkm.ExportError, match="not empty"):
        dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE, folder=True)
    with pytest.raises(dkm.ExportError, match="cannot write"):
        dkm.export(layers(), tmp_path / "absent" / "out", to=target, example=EXAMPLE)


def test_what_a_killed_process_left_is_removed(target: str, tmp_path: Path):
    left = tmp_path / f".out.folder.{'0' * 16}.partial"
    left.mkdir()
    (left / "out").write_text("half")
    dkm.export(layers(), tmp_path / "out", to=target, example=EXAMPLE)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


MISTAKES = {
    "a target": (dict(to="onxx"), ValueError, r"to= must be one of .*safetensors.*, got 'onxx'"),
    "an option": (dict(ofset=1), TypeError, 'to="sample" has no option ofset: it takes offset, lost, folder; did you'),
    "an example": (dict(example=None), TypeError, "give example="),
    "its kind": (dict(example=3), TypeError, "example must be a tensor, .* got int"),
    "its content": (dict(example=(EXAMPLE, None)), TypeError, "got tuple with NoneType"),
    "nothing in it": (dict(example=()), TypeError, "example must be a tensor"),
    "a model too many": (dict(model=plain()), TypeError, "leave model= out"),
    "a tolerance": (dict(tolerance=-1), ValueError, "tolerance must be a number of at least 0, got -1"),
    "a source": (dict(source=3), TypeError, "the source must be a model or the path"),
    "a path": (dict(path=3), TypeError, "the path must be a string or a Path, got int"),
    "no model": (dict(source="model.dkm"), TypeError, "needs the architecture: give model="),
    "model": (dict(source="model.dkm", model="x"), TypeError, "model= must be a torch.nn.Module, got str"),
    "not compressed": (dict(source=plain()), dkm.FileError, "no clustered tensor"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes(case: str, target: str, tmp_path: Path):
    given, error, message = MISTAKES[case]
    call = dict(source=layers(), path=tmp_path / "out", to=target, example=EXAMPLE) | given
    with pytest.raises(error, match=message):
        dkm.export(**call)
    assert not list(tmp_path.iterdir())


def test_a_target_without_options_says_so():
    with pytest.raises(TypeError, match='to="safetensors" has no option opset: it takes no options'):
        named("safetensors", {"opset": 21})


def test_differences():
    inf, nan = math.inf, math.nan
    for a, b, difference in (
        ([1.0, 2.0], [1.0, 2.5], 0.5),
        ([inf, nan], [inf, nan], 0.0),
        ([inf], [-inf], inf),
        ([nan], [1.0], inf),
        ([], [], 0.0),
    ):
        assert largest_difference(torch.tensor(a), torch.tensor(b)) == difference
    assert largest_difference(torch.tensor([True]), torch.tensor([False])) == 1.0


def test_outputs_of_other_shapes_are_infinitely_far():
    job = Job((), plain().eval(), (EXAMPLE,))
    assert job.furthest(job.outputs) == 0
    assert job.furthest([]) == math.inf
    assert job.furthest([job.outputs[0].T]) == math.inf


def test_the_report(tmp_path: Path):
    report = dkm.export(tied(), tmp_path / "out.safetensors", to="safetensors")
    text = str(report)
    assert "0 of 1 clustered tensors are written as codes" in text
    assert "dense: embedding.weight, this format has dense tensors only" in text
    assert [row.name for row in report.dense] == ["embedding.weight"]
    assert f"{report.bytes:,} bytes" in text
    assert "bfloat16" in report.table()
