"""dkm completion: bash completes words from the script alone."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("typer")
from command_place import call

from dkm.app import models, recipes, settings
from dkm.modelling.methods import METHODS

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="there is no bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "dkm"
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("builtins.print", lambda *texts, **_: printed.append("".join(texts)))
        call("completion", "bash")
    path.write_text("".join(printed))
    return path


def completed(script: Path, line: str) -> list[str]:
    """What bash offers for the last word of a line.  There is no program that the script could start."""
    words = line.replace("=", " = ").split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    program = f'source "{script}"; COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _dkm; echo "${{COMPREPLY[*]}}"'
    assert BASH is not None
    done = subprocess.run([BASH, "-u", "-c", program], env={"PATH": "/nowhere"}, capture_output=True, text=True)
    assert not done.stderr
    return done.stdout.split()


CASES = {
    "dkm comp": ["compress", "compare", "completion"],
    "dkm compress --no": ["--no-training"],
    "dkm compress --model resnet18 --dry": ["--dry-run"],
    "dkm eval run --js": ["--json"],
    "dkm compress --method ": list(METHODS),
    "dkm compress --method=q": ["quant_noise"],
    "dkm sweep --out runs --coding e": ["entropy"],
    "dkm compress --recipe resnet18-6": [name for name in recipes.RECIPES if name.startswith("resnet18-6")],
    "dkm recipes albert-qnli-4": ["albert-qnli-4-4"],
    "dkm plan mobilenet_v": ["mobilenet_v1", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"],
    "dkm export run --to o": ["onnx"],
    "dkm compress --out ": [],  # bash goes on with the names of files
    "dkm inspect ": [],
    "dkm completion ": ["bash", "zsh"],
}


@pytest.mark.parametrize("line", CASES)
def test_a_word_is_completed(script: Path, line: str):
    assert completed(script, line) == CASES[line]


def test_every_flag_and_choice_is_there(script: Path):
    assert completed(script, "dkm compress -") == completed(script, "dkm compress ")
    assert set(completed(script, "dkm compress -")) >= {settings.flag(name) for name in settings.FIELDS}
    assert completed(script, "dkm compress --model ") == models.known_names()
    for name, declared in settings.FIELDS.items():
        if declared.metadata["choices"]:
            assert completed(script, f"dkm compress {settings.flag(name)} ") == list(declared.metadata["choices"])


def test_zsh_reads_the_script_by_its_emulation_of_bash(capsys: pytest.CaptureFixture, script: Path):
    call("completion", "zsh")
    printed = capsys.readouterr().out
    assert printed.endswith(script.read_text().replace("completion bash", "completion zsh"))
    assert "bashcompinit" in printed
    call("completion", "tcsh", code=2)
    assert "completion for bash and zsh, and not for 'tcsh'" in capsys.readouterr().err
