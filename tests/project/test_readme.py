"""The documentation's own code: every python block runs, file by file, in order, in one namespace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A block of text right after a block of code is what that code prints.
BLOCK = re.compile(
    r"(?P<skip><!-- no-run -->\n)?^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    text, namespace = page.read_text(encoding="utf-8"), {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        if block["skip"] is not None:
            continue
        above = "\n" * text.count("\n", 0, block.start("code"))  # an error names the line of the page
        exec(compile(above + block["code"], page, "exec"), namespace)
        printed = capsys.readouterr().out
        if block["printed"] is not None:
            assert printed.strip() == block["printed"].strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_is_formatted(page: Path):
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        command = [sys.executable, "-m", "ruff", "format", "--diff", "--line-length=120", "-"]
        result = subprocess.run(command, input=block["code"], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def test_the_pages_are_there():
    assert {page.name for page in PAGES} >= {"README.md", "plan.md", "file-format.md", "how-it-works.md", "recipes.md"}


def test_the_first_block_of_the_readme_needs_nothing_before_it(tmp_path: Path):
    """Pasted into Python line by line: no set-up hides above it, and a blank line ends each indented block."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!--" not in text
    code = BLOCK.search(text)["code"]
    command = [sys.executable, "-i", "-c", ""]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"}
    result = subprocess.run(command, input=code, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert "Error" not in result.stderr, result.stderr
    assert (tmp_path / "model.dkm").exists()
