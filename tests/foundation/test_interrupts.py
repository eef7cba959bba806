"""Ctrl-C while the command is being imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import dkm

SLOW = "import time\ntry:\n    print('importing', flush=True)\n    time.sleep(600)\nexcept BaseException:\n    pass\n"


def start(folder: Path, module: str, *command: str) -> subprocess.Popen:
    """A program in which this module takes for ever to import, and catches whatever is raised meanwhile."""
    (folder / "stubs").mkdir()
    (folder / "stubs" / f"{module}.py").write_text(SLOW)
    path = [str(folder / "stubs"), str(Path(dkm.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGINT to send")
@pytest.mark.parametrize("module", ["torch", "jinja2"])  # of the library, and of the command alone
@pytest.mark.parametrize("form", ["module", "script"])
def test_ctrl_c_during_the_imports(tmp_path: Path, module: str, form: str):
    script = tmp_path / "dkm"
    script.write_text("import sys\nfrom dkm.app.cli import main\nsys.exit(main())\n")  # as installers write it
    command = [sys.executable, "-m", "dkm"] if form == "module" else [sys.executable, "-P", str(script)]
    process = start(tmp_path, module, *command, "--version")
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=120)
    assert (process.returncode, printed, errors) == (130, "", "dkm: stopped\n")


@pytest.mark.skipif(os.name != "posix", reason="there is no SIGINT to send")
def test_in_another_program_ctrl_c_is_an_exception(tmp_path: Path):
    process = start(tmp_path, "torch", sys.executable, "-c", "import dkm")
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 130
    assert "Traceback" in errors  # of what a torch lacks that was not imported to the end
    assert "dkm: stopped" not in errors
