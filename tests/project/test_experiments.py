"""The experiments run, on a few random images; what they find is in the documentation."""

import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from experiments import allocators, coding, fewshot_cifar, methods_cifar, target_cifar, tau_cifar
from experiments.cifar import Cifar10, ResNet


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with random images in the form of CIFAR-10, in two parts, and a network with random weights."""
    random = np.random.default_rng(0)

    def images(n: int) -> dict[str, np.ndarray]:
        return dict(x=random.integers(256, size=(n, 32, 32, 3), dtype=np.uint8), y=random.integers(10, size=n))

    np.savez(tmp_path / "part0.npz", **images(20))
    test = {f"{name}_test": array for name, array in images(30).items()}
    np.savez(tmp_path / "part1.npz", **images(12), **test)
    safetensors.torch.save_file(ResNet().state_dict(), tmp_path / "resnet20.safetensors")
    return tmp_path


def test_resnet20_is_hes():
    """0.27 million parameters: table 6."""
    with torch.device("meta"):
        model = ResNet()
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 269_722


def test_a_batch_is_crops_half_of_them_mirrored(folder: Path):
    data = Cifar10.load(folder, "cpu")
    index = torch.arange(32).repeat(10)
    x, y = data.batch(index, torch.Generator().manual_seed(0))
    assert torch.equal(y, data.y[index])
    crops = data.normalize(data.x).unfold(2, 32, 1).unfold(3, 32, 1)  # (n, 3, 9, 9, 32, 32)
    straight, mirrored = (
        (crops[index] == images[:, :, None, None]).all(-1).all(-1).all(1).flatten(1).any(1) for images in (x, x.flip(3))
    )
    assert (straight ^ mirrored).all()
    assert 100 < int(mirrored.sum()) < 220


def test_tau_cifar(folder: Path, capsys: pytest.CaptureFixture):
    def run(*runs: str) -> list[dict]:
        options = dict(
            data=folder, weights=folder / "resnet20.safetensors", out=folder / "results.jsonl", epochs=2, batch=16
        )
        texts = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        tau_cifar.main([*texts, "--device", "cpu", *(text for name in runs for text in ("--run", name))])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    first = run("2/1:auto:0", "4/4:geometric:3:0.05:1")
    assert all(1 <= record["iterations"] <= 5 for record in first)
    assert [(row["plan"], row["tau"], row["seed"]) for row in first] == [
        ("2/1", "auto", 0),
        ("4/4", "geometric:3:0.05", 1),
    ]
    assert all(0 <= row["accuracy"] <= 100 and row["seconds"] > 0 for row in first)
    second = run("2/1:auto:0", "1/1:learn:0")
    assert [row["tau"] for row in second] == ["learn"]  # the other one is there already
    assert [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()] == first + second


@pytest.mark.parametrize("text", ["2/1", "2/1:auto", "2/1:auto:x", "2/1:warm:0"])
def test_tau_cifar_names_a_bad_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        tau_cifar.main(["--data", str(tmp_path), "--weights", "w", "--out", "o", "--run", text])
    assert text.split(":")[-2 if "warm" in text else 0] in capsys.readouterr().err


def test_target_cifar(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(target_cifar, "CANDIDATES", [(1, 1), (2, 2), (4, 4), (4, 8)])

    def run(*texts: str) -> list[dict]:
        options = dict(data=folder, weights=folder / "resnet20.safetensors", out=folder / "target.jsonl", batch=16)
        texts += tuple(text for name, value in options.items() for text in (f"--{name}", str(value)))
        target_cifar.main([*texts, "--device", "cpu", "--epochs", "1"])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]

    listed = run("--uniform", "40KiB")
    # not all:b/d, which has 8 bits for most of the layers
    assert {row["plan"] for row in listed} == {
        f"{s}:{c}" for s in ("*", "layer*") for c in ("1/1", "2/2", "4/4", "4/8")
    }
    assert all(row["bytes"] <= 40 * 1024 for row in listed)
    costs = [row["divergence"] for row in listed]
    assert costs == sorted(costs)

    rows = run("--run", "size=30KiB,rounds=0:0", "--run", "*:4/8:1", "--run", "size=30KiB,rounds=0:2")
    assert [(row["plan"], row["seed"]) for row in rows] == [
        ("size=30KiB,rounds=0", 0),
        ("*:4/8", 1),
        ("size=30KiB,rounds=0", 2),
    ]
    assert rows[0]["text"] == rows[2]["text"]
    assert rows[0]["bytes"] <= 30 * 1024
    assert all(0 <= row[name] <= 100 for row in rows for name in ("accuracy", "recalibrated"))
    assert not run("--run", "*:4/8:1")  # it is there already


@pytest.mark.parametrize("text", ["size=40kB", "size=40qB:0", "conf:4:0", "size=40kB,rounds=x:0"])
def test_target_cifar_names_a_bad_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        target_cifar.main(["--data", str(tmp_path), "--weights", "w", "--out", "o", "--run", text])
    assert text.split(":")[0].removeprefix("size=").split(",rounds=")[-1] in capsys.readouterr().err


def test_allocators(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(allocators, "CANDIDATES", [(1, 1), (2, 2), (4, 4), (4, 8)])
    sizes, names = ["30kB"], ["hawq", "haq"]
    allocators.main(["--sizes", *sizes, "--allocators", *names, "--epochs", "1", "--short", "0", "--episodes", "2"])
    first, *rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert 0 < first["uncompressed"] <= 100
    assert [(row["size"], row["allocator"]) for row in rows] == [("30kB", "hawq"), ("30kB", "haq")]
    assert all(row["bytes"] <= 30_000 and row["snapped"] == row["trained"] for row in rows)


def test_coding(tmp_path: Path, capsys: pytest.CaptureFixture):
    network = "from torch import nn\n\ndef network():\n    return nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))\n"
    (tmp_path / "network.py").write_text(network)
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight.normal_().pow_(5)  # a few centroids get most of the codes
    safetensors.torch.save_file(model.state_dict(), tmp_path / "weights.safetensors")
    given = dict(
        model=f"{tmp_path}/network.py:network", weights=tmp_path / "weights.safetensors", out=tmp_path / "m.dkm"
    )
    coding.main(["--plan", "0:3, 1:3", *(text for name, value in given.items() for text in (f"--{name}", str(value)))])
    last = capsys.readouterr().out.splitlines()[-1]
    plan, packed, coded, least, _, count, *files = last.replace(",", "").strip("| ").split(" | ")
    assert plan.strip() == "`0:3 1:3`"
    assert int(coded) < int(packed) == (64 * 32 + 32 * 3) * 3 // 8
    assert int(coded) <= sum(map(int, least.split(" + "))) + 8
    assert count.strip() == "1 of 2"
    assert int(files[1]) == (tmp_path / "m.dkm").stat().st_size < int(files[0])
    coding.main(["--file", str(tmp_path / "m.dkm")])
    assert capsys.readouterr().out.splitlines()[-1].split("|")[2:] == last.split("|")[2:]
    with pytest.raises(SystemExit):
        coding.main(["--file", str(tmp_path / "m.dkm"), "--plan", "0:3"])


def test_onnx_models(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    pytest.importorskip("onnxruntime")
    from experiments import onnx_models

    def small() -> onnx_models.Network:
        return onnx_models.Network(nn.Sequential(nn.Flatten(), nn.Linear(48, 300)), torch.randn(1, 3, 4, 4))

    monkeypatch.setattr(onnx_models, "networks", lambda: {"small": small})
    onnx_models.main(["--plan", "2/1", "--plan", "4/4 scaled"])
    head, _, dense, *rows = [
        [cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()
    ]
    found = [dict(zip(head, row, strict=True)) for row in rows]
    assert dense[2] == "dense"
    assert [each["plan"] for each in found] == ["2/1", "4/4 scaled"]
    for each in found:
        assert float(each["difference"]) <= 1e-4
        # sums of 48 products of numbers below 10: 48 roundings of 2^-24 each are far from reached
        assert all(float(each[of]) < 1e-5 for of in ("PyTorch", "onnxruntime"))
        assert 0 < float(each["rounded"]) <= 2**-24 * 4  # half a last bit of numbers below 8, once
        assert 0.5 < float(each["tensors / .dkm"]) < 1


def test_methods_cifar(folder: Path, capsys: pytest.CaptureFixture):
    options = dict(data=folder, weights=folder / "resnet20.safetensors", out=folder / "methods.jsonl", batch=16)
    texts = [text for name, value in options.items() for text in (f"--{name}", str(value))]

    def run(*runs: str) -> tuple[list[dict], str]:
        more = ["--device", "cpu", "--epochs", "1", "--test-images", "8"]
        methods_cifar.main([*texts, *more, *(text for name in runs for text in ("--run", name))])
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")], "\n".join(lines)

    rows, printed = run(
        "dkm 1/1 0 tau=geometric:2:0.1", "dkm 1/1 1 tau=geometric:2:0.1", "rps 1/1 0 lr=0.5", "bwn 4/4 0"
    )
    assert [(row["method"], row["seed"], row["lr"]) for row in rows] == [
        ("dkm", 0, 0.02), ("dkm", 1, 0.02), ("rps", 0, 0.5),
    ]  # fmt: skip
    mean = sum(row["recalibrated"] for row in rows[:2]) / 2
    assert f"{mean:.2f} ± " in printed
    assert "bwn at 4/4: it clusters single weights" in printed
    rows, again = run("dkm 1/1 0 tau=geometric:2:0.1", "dkm 1/1 1 tau=geometric:2:0.1")
    assert not rows  # they are there already
    assert f"{mean:.2f} ± " in again


def test_held_out_images_are_not_trained_on(folder: Path):
    data = Cifar10.load(folder, "cpu")
    divided = methods_cifar.divided(data, argparse.Namespace(held_out=10, images=None, test_images=None))
    assert (len(divided.x), len(divided.x_test)) == (22, 10)
    assert torch.equal(divided.x_test, data.x[22:, 4:36, 4:36])
    assert torch.equal(divided.y_test, data.y[22:])
    few = methods_cifar.divided(data, argparse.Namespace(held_out=0, images=5, test_images=3))
    assert torch.equal(few.x, data.x[:5])
    assert torch.equal(few.x_test, data.x_test[:3])


@pytest.mark.parametrize("text", ["dkm 1/1", "dkm 1/1 x", "dkn 1/1 0", "dkm 99/1 0", "hard 1/1 0 tau=1"])
def test_methods_cifar_names_a_bad_run(text: str, tmp_path: Path, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        methods_cifar.main(["--data", str(tmp_path), "--weights", "w", "--out", "o", "--run", text])
    said = capsys.readouterr().err
    assert any(word in said for word in (text, "dkn", "99", "takes no tau"))


def test_fewshot_cifar(folder: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    options = dict(
        data=folder, weights=folder / "resnet20.safetensors", out=folder / "few.jsonl", epochs=1, batch=8, images=16
    )
    texts = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    runs = [text for way in fewshot_cifar.WAYS for text in ("--run", f"{way}:2/1:0")]
    monkeypatch.setattr(fewshot_cifar, "HELD_OUT", 10)
    fewshot_cifar.main([*texts, "--device", "cpu", *runs, "--held-out"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["way"] for record in records] == list(fewshot_cifar.WAYS)
    assert all(0 <= record["accuracy"] <= 100 for record in records)


def test_fewshot_images(tmp_path: Path, capsys: pytest.CaptureFixture):
    pytest.importorskip("accelerate")
    pytest.importorskip("typer")
    from small_run import make_place

    from experiments import fewshot_images

    place = make_place(tmp_path)
    paths = dict(model=f"{place / 'network.py'}:network", weights=place / "weights.safetensors", data=place / "images")
    given = dict(**paths, out=place / "runs", plan="4:4/2", count=54, images=54, passes=2) | {
        "eval-data": place / "images"
    }
    texts = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    fewshot_images.main([*texts, "--", "--device", "cpu", "--image-size", "12", "--batch-size", "9"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [record["way"] for record in records] == list(fewshot_images.WAYS)
    assert [record["blocks"] is None for record in records] == [True, True, False, False]
    assert records[2]["blocks"]["examples"] == 27
