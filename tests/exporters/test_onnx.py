"""Target `onnx`: onnxruntime computes what the model computes, from codes."""

import sys
from pathlib import Path

import pytest
import torch
from samples import tied
from torch import Tensor, nn

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
import onnx
import onnxruntime

import dkm
from dkm.exporters import TARGETS, Job
from dkm.formats.dkm_file import read_tensors


class Network(nn.Module):
    """Convolutions with batch normalisation, a linear layer whose weight is transposed, a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.linear = nn.Linear(8, 8, bias=False)
        self.unused = nn.Linear(8, 8)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.norm(self.conv(image)).relu().flatten(2).mT
        return self.recurrent(hidden)[0] @ self.linear.weight


def network(plan: str) -> nn.Module:
    torch.manual_seed(0)
    model = Network()
    with torch.no_grad():
        for tensor in (*model.parameters(), model.norm.running_mean):
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    dkm.compress_(model, plan, tau=1.0)
    return model


PLAN = "conv.weight:3/2, recurrent.weight_*:4 per row, linear.weight:2 scaled, unused.weight:2"
IMAGE = torch.linspace(-1, 1, 3 * 4 * 5).view(1, 3, 4, 5)


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    feed = {name: each.numpy() for name, each in zip(names, inputs, strict=True)}
    return [torch.from_numpy(each) for each in session.run(None, feed)]


def stored(path: Path) -> dict[str, tuple[int, ...]]:
    return {each.name: tuple(each.dims) for each in onnx.load(path).graph.initializer}


def test_outputs_and_what_is_stored(tmp_path: Path):
    model = network(PLAN)
    report = dkm.export(model, tmp_path / "out.onnx", to="onnx", example=IMAGE)
    assert report.checked.difference < 1e-4
    plain = dkm.snap_(model).eval()
    (found,) = run(tmp_path / "out.onnx", IMAGE)
    torch.testing.assert_close(found, plain(IMAGE), atol=1e-4, rtol=0)
    rows = {row.name: row for row in report.rows}
    for name in ("conv.weight", "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "linear.weight"):
        assert "codes" in rows[name].written
        assert f"{name}/codes" in stored(tmp_path / "out.onnx")
    # what is neither ours nor a small constant would be a folded tensor; the largest is a state of the recurrent layer
    others = [shape for name, shape in stored(tmp_path / "out.onnx").items() if name.partition("/")[0] not in rows]
    assert max(torch.Size(shape).numel() for shape in others) <= 8
    assert rows["unused.weight"].why == "the outputs do not depend on it"
    assert "not written: unused.weight" in report.summary()
    assert not report.dense
    assert rows["conv.bias"].written == "float16"
    assert sum(row.bytes for row in report.rows) < report.bytes


def test_the_file_is_standard(tmp_path: Path):
    dkm.export(network(PLAN), tmp_path / "out.onnx", to="onnx", example=IMAGE)
    model = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert {(each.domain, each.version <= 25) for each in model.opset_import} == {("", True)}
    assert not model.functions
    assert __file__.encode() not in (tmp_path / "out.onnx").read_bytes()  # torch.onnx would add stack traces


def test_a_model_and_its_file_give_the_same_bytes(tmp_path: Path):
    model = network(PLAN)
    dkm.save(model, tmp_path / "model.dkm")
    dkm.export(model, tmp_path / "a", to="onnx", example=IMAGE)
    dkm.export(tmp_path / "model.dkm", tmp_path / "b", to="onnx", model=Network(), example=IMAGE)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_tied_weights_are_stored_once_and_bfloat16_runs(tmp_path: Path):
    model = tied()
    report = dkm.export(model, tmp_path / "out.onnx", to="onnx", example=torch.arange(11))
    codes = [name for name in stored(tmp_path / "out.onnx") if name.endswith("/codes")]
    assert len(codes) == 1
    assert model.embedding.weight.dtype == torch.bfloat16  # the caller's model stays as it is
    assert report.checked.difference < 1e-4


def test_dynamic_axes(tmp_path: Path):
    model = network(PLAN)
    dkm.export(model, tmp_path / "fixed.onnx", to="onnx", example=IMAGE)
    with pytest.raises(Exception, match="invalid dimensions"):
        run(tmp_path / "fixed.onnx", IMAGE.expand(5, -1, -1, -1).contiguous())
    report = dkm.export(model, tmp_path / "out.onnx", to="onnx", example=IMAGE, dynamic="batch")
    assert "with a larger batch" in report.checked.how
    plain = dkm.snap_(model).eval()
    for size in (1, 2, 5):
        images = torch.randn(size, 3, 4, 5)
        (found,) = run(tmp_path / "out.onnx", images)
        torch.testing.assert_close(found, plain(images), atol=1e-4, rtol=0)


def test_inputs_by_name(tmp_path: Path):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
            return {"difference": self.linear(a) - b, "sum": a + b}

    model = Two()
    dkm.compress_(model, "all:2", tau=1.0)
    example = {"b": torch.ones(1, 4), "a": torch.arange(4.0).view(1, 4)}
    assert dkm.export(model, tmp_path / "out", to="onnx", example=example, dynamic="batch").checked.difference < 1e-4
    names = [each.name for each in onnx.load(tmp_path / "out").graph.input]
    assert sorted(names) == ["a", "b"]


def test_a_weight_that_is_an_output(tmp_path: Path):
    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), self.linear.weight

    model = Weight()
    dkm.compress_(model, "linear.weight:2", tau=1.0)
    dkm.export(model, tmp_path / "out", to="onnx", example=torch.ones(1, 4))
    assert torch.equal(run(tmp_path / "out", torch.ones(1, 4))[1], dkm.snap_(model).linear.weight)


class Listed(nn.Module):
    """Has its weight a second time where torch does not look for parameters."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.weights = [self.linear.weight.detach().T if view else self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights[0]


def test_a_weight_in_a_list(tmp_path: Path):
    compressed = nn.ModuleDict({"linear": nn.Linear(16, 16)})
    dkm.compress_(compressed, "linear.weight:2", tau=1.0)
    dkm.save(compressed, tmp_path / "model.dkm")
    example = torch.ones(1, 16)
    report = dkm.export(tmp_path / "model.dkm", tmp_path / "out", to="onnx", model=Listed(False), example=example)
    assert [row.written for row in report.rows if row.name == "linear.weight"] == ["2-bit codes"]
    assert "linear.weight/codes" in stored(tmp_path / "out")
    model = Listed(True)
    model.linear.weight.data[:] = compressed.linear.weight
    job = Job(tuple(read_tensors(tmp_path / "model.dkm")), model, (example,))
    with pytest.raises(dkm.ExportError, match=r"a view of linear\.weight that it made before forward"):
        TARGETS["onnx"]().write(job, tmp_path / "view")


def test_what_cannot_be_exported(tmp_path: Path):
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            while x.sum() > 0:  # depends on values
                x = self.linear(x) - 1
            return x

    model = Loop()
    dkm.compress_(model, "linear.weight:2", tau=1.0)
    with pytest.raises(dkm.ExportError, match=r"torch\.onnx cannot export the model: .+"):
        dkm.export(model, tmp_path / "out", to="onnx", example=torch.ones(1, 4))
    assert not list(tmp_path.iterdir())


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = network(PLAN)
    for dynamic in ("rows", 1):
        with pytest.raises(ValueError, match=f'dynamic= must be "batch", .* got {dynamic!r}'):
            dkm.export(model, tmp_path / "out", to="onnx", example=IMAGE, dynamic=dynamic)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(dkm.ExportError, match=r'needs onnxruntime: pip install "torch-dkm\[onnx\]"'):
        dkm.export(model, tmp_path / "out", to="onnx", example=IMAGE)
    assert not list(tmp_path.iterdir())
