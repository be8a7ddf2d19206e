"""A hook of mkdocs: pages that lie at the root of the project are pages of the site, too.

README.md is the site's first page. The files stay where they are; their links to docs/ are turned
into links within the site when it is built, and so are links from docs/ to them.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
}
_LINK = re.compile(r"(?<=\]\()(?P<folder>docs/|\.\./)?(?P<file>[\w./-]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root to those of docs/."""
    for file, page in PAGES.items():
        text = _LINK.sub(_from_root, (ROOT / file).read_text("utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links from docs/ to the root at the pages that were added."""
    return _LINK.sub(_from_docs, markdown) if "/" not in page.file.src_uri else markdown


def _from_root(link: re.Match[str]) -> str:
    """`docs/RUN.md` is RUN.md, README.md is index.md; the rest is left to mkdocs to refuse."""
    if link["folder"] == "docs/":
        return link["file"]
    return PAGES.get(link["file"], link[0])


def _from_docs(link: re.Match[str]) -> str:
    return PAGES.get(link["file"], link[0]) if link["folder"] == "../" else link[0]
