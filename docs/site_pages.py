"""A hook of MkDocs: the Markdown files of the repository's root are pages of the site, and the README is its home."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
EXAMPLES = {"examples/quickstart.py": "quickstart.md"}
"""The page that an example is on."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, their links turned to where the site has them."""
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for target, place in (PAGES | EXAMPLES).items():
            text = text.replace(f"]({target})", f"]({place})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to the root's pages, which are files beside `docs`, to pages of the site."""
    return re.sub(r"\]\(\.\./(\w+\.md)\)", lambda link: f"]({PAGES.get(link[1], link[1])})", markdown)
