"""The wheel: what it holds, and that the command runs from it where the repository is not at hand."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from command_place import make_place

ROOT = Path(__file__).parents[2]


def run(*words: str | Path, cwd: Path) -> str:
    """What a program prints; it sees nothing of the environment that could lead it back to the repository."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PIP"))}
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=kept | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because building leaves folders behind."""
    folder = tmp_path_factory.mktemp("wheel")
    (folder / "source").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    shutil.copytree(ROOT / "dkm", folder / "source" / "dkm", ignore=shutil.ignore_patterns("__pycache__"))
    build = "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"
    run(sys.executable, *build, "--wheel-dir", folder, folder / "source", cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def test_it_holds_every_file_of_the_package(wheel: Path):
    """Templates, styles and recipes too, which setuptools takes only where it is told to."""
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dkm").rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as packed:
        assert set(packed.namelist()) >= {name for name in files if "__pycache__" not in name}


def test_the_command_runs_from_it(wheel: Path, tmp_path: Path):
    """In an environment that has the wheel alone; torch and the like come from the one that runs the tests."""
    venv.create(tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=tmp_path).strip())
    installer = sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet"
    run(*installer, wheel, cwd=tmp_path)
    # A plain folder in a .pth file: what that folder links to in turn, such as this repository, is not followed.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    place = tmp_path / "place"
    place.mkdir()
    make_place(place)
    program = python.with_name("dkm")
    assert run(python, "-c", "import dkm; print(dkm.__file__)", cwd=place).startswith(str(site))
    assert "resnet50-6-6" in run(program, "recipes", cwd=place)
    words = ["--recipe", "mobilenet-v1-4-4", "--weights", "none", "--data", "images", "--out", "run"]
    words += ["--epochs", "0", "--image-size", "32", "--resize", "32", "--workers", "0", "--device", "cpu"]
    printed = run(program, "compress", *words, cwd=place)
    assert "run/report.html" in printed
    assert "</html>" in (place / "run" / "report.html").read_text(encoding="utf-8")
