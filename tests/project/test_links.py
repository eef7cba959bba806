"""Links between the pages: every relative link and every anchor leads somewhere.  No network."""

import re
from pathlib import Path

import pytest

import dkm

ROOT = Path(__file__).parents[2]
NAMES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in NAMES), *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^(?P<fence>`{3,}).*?^(?P=fence)$", re.DOTALL | re.MULTILINE)
INLINE_CODE = re.compile(r"(?P<ticks>`+)(?!`).+?(?<!`)(?P=ticks)(?!`)", re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\((?P<file>[^)#\s]*)(?:#(?P<anchor>[^)\s]*))?\)")
PATH = re.compile(r"`((?:dkm|tests|docs|benchmarks|experiments|examples|recipes)/(?:[\w./-]*/|[\w./-]+\.\w+)?)`")


def prose(page: Path) -> str:
    """The page without its fenced blocks of code."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> list[str]:
    """The headings of a page as links name them: the n-th repetition of a heading gets `-n`, as GitHub does it."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w -]", "", text.lower()).strip().replace(" ", "-")
        repeated = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", other) is not None for other in found)
        found.append(f"{name}-{repeated}" if repeated else name)
    return found


def broken(page: Path) -> list[str]:
    """The relative links of a page that lead nowhere."""
    # Code may hold brackets that only look like a link, but the text of a link may be code.
    text = INLINE_CODE.sub("code", prose(page))
    found = []
    for link in LINK.finditer(text):
        if re.match(r"[a-z]+:", link["file"]):
            continue
        target = (page.parent / link["file"]).resolve() if link["file"] else page
        if not target.is_file():
            found.append(f"{link[0]}: there is no such file")
        elif link["anchor"] is not None and (target.suffix != ".md" or link["anchor"] not in anchors(target)):
            found.append(f"{link[0]}: there is no such heading")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    assert broken(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_text_exist(page: Path):
    missing = [path for path in PATH.findall(prose(page)) if not (ROOT / path).exists()]
    assert missing == []


def test_broken_links_are_found(tmp_path: Path):
    (tmp_path / "other.md").write_text("# A heading: `code`, twice\n\n# A heading: `code`, twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#a-heading-code-twice) [c](other.md#a-heading-code-twice-1) [`d[0]`](other.md)\n"
        "[far](https://example.org/x#y) `[no](link.md)`\n\n```\n[no](link.md)\n```\n"
    )
    assert broken(page) == []
    page.write_text("[a](gone.md) [b](other.md#gone) [c\nd](#gone) [e](.)\n")
    assert len(broken(page)) == 4


def test_the_reference_has_every_public_name():
    reference = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^::: dkm\.(\w+)$", reference, re.MULTILINE)
    assert sorted(documented) == sorted(dkm.__all__)
