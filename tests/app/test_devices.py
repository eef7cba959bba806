"""--device: where to compute, and what is said where that is not there."""

import pytest
import torch

pytest.importorskip("accelerate")
from dkm.app import settings
from dkm.app.errors import Problem
from dkm.app.run.stage import runs_on_cpu


def on(device: str) -> bool:
    return runs_on_cpu(settings.make({"device": device}))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:one", "cuda1", "cuda:-1", "CUDA", "tpu", ""])
def test_a_typo(device: str):
    with pytest.raises(Problem, match=r"--device must be auto, cpu, cuda, or cuda:1 for a GPU by its number, and not"):
        settings.make({"device": device})


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
def test_a_machine_without_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(Problem, match=f"^--device {device}: PyTorch finds no GPU here; give --device cpu"):
        on(device)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(Problem, match=f"^--device {device}: PyTorch, which was built without CUDA, finds no GPU here"):
        on(device)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("device", "cpu"), [("auto", False), ("cuda", False), ("cuda:1", False), ("cpu", True)])
def test_what_is_there(device: str, cpu: bool):
    assert on(device) is cpu


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_too_many(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(Problem, match=r"^--device cuda:2: there is no such GPU here, but cuda:0 to cuda:1$"):
        on("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Problem, match=r"^--device cuda:1: there is no such GPU here, but cuda:0 only$"):
        on("cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_several_processes_have_a_gpu_each(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Problem, match=r"^--device cuda:1: each process takes a GPU of its own"):
        on("cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_the_gpu_is_chosen_before_accelerate_takes_one(tmp_path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("typer")
    from small_run import forget_the_last_run, make_place
    from small_run import settings as small_settings

    from dkm.app.run import Listener, open_stage

    class Reached(Exception):
        pass

    def accelerator(**options):
        raise Reached(chosen, options["cpu"])

    chosen: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr("accelerate.Accelerator", accelerator)
    forget_the_last_run()
    with pytest.raises(Reached) as reached:
        open_stage(small_settings(make_place(tmp_path), tmp_path / "run", device="cuda:1"), Listener())
    assert reached.value.args == (["cuda:1"], False)


def test_the_command(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys):
    pytest.importorskip("typer")
    from command_place import call, flags, make_place

    monkeypatch.chdir(tmp_path)
    make_place(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    call("compress", *flags(device="cuda:1"), code=2)
    call("compress", *flags(device="cude"), code=2)
    missing, typo = capsys.readouterr().err.splitlines()
    assert missing.startswith("dkm: --device cuda:1: PyTorch")
    assert typo == "dkm: --device must be auto, cpu, cuda, or cuda:1 for a GPU by its number, and not 'cude'"
