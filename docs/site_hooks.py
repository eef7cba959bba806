"""Hooks of mkdocs: pages and files of the repository that are not in docs/ become a part of the site.

In the repository, README.md links to `docs/plan.md`, and docs/plan.md links to `../README.md`.  On the site all pages
are side by side.  So the hooks add the files under their own names and adapt the links.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINKED = ("LICENSE", "dkm/app/recipes/*.toml", "examples/*.py")  # what pages link to


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and the files that pages link to."""
    linked = [path for pattern in LINKED for path in sorted(ROOT.glob(pattern))]
    for path in [*(ROOT / name for name in PAGES), *linked]:
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Adapt the links to the one folder of the site, and leave out comments, which hold set-up for the tests."""
    markdown = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    above = "docs/" if page.file.src_uri in PAGES else "../"
    return re.sub(rf"(\]\(){re.escape(above)}", r"\1", markdown)
