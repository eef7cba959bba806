"""The documentation's own code: every python block runs, file by file, in order, in one namespace."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?P<skip><!-- no-run -->\n)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#]+)(?:#[^)]*)?\)")


def code(page: Path) -> str:
    """A page's blocks as one program, each at the line it has in the page, so that errors point there."""
    text, lines = page.read_text(encoding="utf-8"), []
    for block in BLOCK.finditer(text):
        if block["skip"] is None:
            first = text.count("\n", 0, block.start("code"))
            lines += [""] * (first - len(lines)) + block["code"].splitlines()
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code(page), page, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_is_formatted(page: Path):
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        command = [sys.executable, "-m", "ruff", "format", "--diff", "--line-length=120", "-"]
        result = subprocess.run(command, input=block["code"], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path):
    targets = [match["target"] for match in LINK.finditer(page.read_text(encoding="utf-8"))]
    missing = [t for t in targets if not t.startswith("http") and not os.path.exists(page.parent / t)]
    assert not missing


def test_the_pages_are_there():
    assert {page.name for page in PAGES} >= {"README.md", "plan.md", "file-format.md", "how-it-works.md", "recipes.md"}
