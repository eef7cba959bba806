"""The help pages: they fit a terminal, and their examples are command lines that the command understands."""

import itertools
import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("typer")
pytest.importorskip("accelerate")
import typer.main
from command_place import call

from dkm.app import recipes, settings
from dkm.app.commands import app
from dkm.app.meanings import MEANINGS
from dkm.app.sweep import SWEPT, Sweep
from dkm.clustering import temperature
from dkm.clustering.options import GRADIENTS
from dkm.modelling.methods import METHODS
from dkm.plans.language import parse

ALL = typer.main.get_command(app)
COMMANDS = list(ALL.list_commands(ALL.make_context("dkm", [], resilient_parsing=True)))


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def page_of(name: str, capsys: pytest.CaptureFixture) -> str:
    call(*([name] if name else []), "--help")
    return capsys.readouterr().out


def examples_on(page: str) -> list[list[str]]:
    """The command lines as words, put together where they go on in the next line."""
    (_, text) = page.split("\nExamples:\n")
    lines = [line.partition(" > ")[0] for line in text.replace("\\\n", " ").splitlines()]  # not where it is written to
    return [shlex.split(line) for line in lines if line.strip()]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_page_fits_80_columns(name: str, capsys: pytest.CaptureFixture):
    page = page_of(name, capsys)
    assert max(map(len, page.splitlines())) <= 80
    assert "…" not in page  # nothing is cut
    assert "\x1b" not in page  # no colours: this is not a terminal
    assert page.startswith(f"Usage: dkm {name or 'COMMAND'}")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_is_explained(name: str, capsys: pytest.CaptureFixture):
    page = page_of(name, capsys)
    command = ALL.get_command(ALL.make_context("dkm", [], resilient_parsing=True), name)
    for param in command.params:
        shown = param.metavar if param.param_type_name == "argument" else param.opts[0]
        assert param.help
        if param.param_type_name == "option" and not param.is_flag:
            shown += f" {param.metavar}"
            assert param.metavar, f"{shown} does not say what its value is"
        assert re.search(rf"^  {re.escape(shown)}( |$)", page, re.MULTILINE), shown


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_the_examples_are_understood(name: str, capsys: pytest.CaptureFixture):
    """As far as the command goes without files: its flags exist, and their values are such as it takes."""
    examples = examples_on(page_of(name, capsys))
    assert len(examples) >= 2
    for program, command, *words in examples:
        assert program == "dkm"
        assert name in ("", command)
        if "--help" in words:
            continue
        values = ALL.get_command(ALL.make_context("dkm", [], resilient_parsing=True), command).make_context(
            command, words
        ).params  # fmt: skip
        given = {key: value for key, value in values.items() if value and key in settings.FIELDS}
        plans = given.pop("plan", [])
        for plan in [plans] if isinstance(plans, str) else plans:
            assert parse(plan)
        if command == "sweep":
            swept = {name: list(values[name] or []) for name in SWEPT}
            Sweep(Path("runs"), swept, {name: value for name, value in given.items() if name not in SWEPT}).check()
        elif command == "compress":
            settings.make(given)
        if values.get("recipe"):
            assert values["recipe"] in recipes.RECIPES


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_command_lines_of_the_documentation_are_understood():
    """Those in the blocks that a reader copies: their flags exist."""
    blocks = [block for page in PAGES for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.S | re.M)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [shlex.split(re.split(r" [>|] ", line)[0], comments=True) for line in lines if line.startswith("dkm ")]
    assert len(found) >= 15
    for _, command, *words in found:
        if words[-1:] != ["..."]:
            parsed = ALL.get_command(ALL.make_context("dkm", [], resilient_parsing=True), command)
            parsed.make_context(command, words)


def test_the_wider_page_is_not_wider_than_can_be_read(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert 80 < max(map(len, page_of("compress", capsys).splitlines())) <= 100


def test_every_value_has_a_meaning(capsys: pytest.CaptureFixture):
    choices = {name: declared.metadata["choices"] for name, declared in settings.FIELDS.items()}
    choices |= {"method": tuple(METHODS), "gradient": GRADIENTS, "tau": tuple(MEANINGS["tau"])}
    choices |= {"tracker": (*settings.TRACKERS, "FILE.py:FUNCTION")}
    for name, meanings in MEANINGS.items():
        assert tuple(meanings) == choices[name]
    assert all(temperature.parse(value) is not None for value in MEANINGS["tau"])
    page = page_of("compress", capsys)
    for value, meaning in itertools.chain.from_iterable(meanings.items() for meanings in MEANINGS.values()):
        assert re.search(rf"^ +{re.escape(value)} +{meaning.split()[0]}", page, re.MULTILINE)


def test_the_words_of_the_output_are_explained(capsys: pytest.CaptureFixture):
    page = page_of("compress", capsys)
    for word in ("plan", "centroids", "train-time", "snapped", "k-means"):
        assert re.search(rf"^  {word}  +\w", page, re.MULTILINE)
    assert "docs/plan.md" in page
    assert (Path(__file__).parents[2] / "docs" / "plan.md").exists()


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture):
    call(code=2)
    printed = capsys.readouterr()
    assert all(re.search(rf"^  {name} ", printed.out, re.MULTILINE) for name in COMMANDS)
    assert not printed.err
