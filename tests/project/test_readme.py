"""The documentation's own code: every python block runs, file by file, in order, in one namespace."""

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
LINK = re.compile(r"\[[^\]]*\]\((?P<file>[^)#]*)(?:#(?P<heading>[^)]*))?\)")


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


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path):
    for link in LINK.finditer(prose(page)):
        if link["file"].startswith("http"):
            continue
        target = page.parent / link["file"] if link["file"] else page
        assert target.exists(), link[0]
        assert link["heading"] is None or link["heading"] in anchors(target), link[0]


def test_the_pages_are_there():
    assert {page.name for page in PAGES} >= {"README.md", "plan.md", "file-format.md", "how-it-works.md", "recipes.md"}
