"""Hooks of MkDocs: files of the root and of `benchmarks/results` are pages of the site, and the README is its home."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md"} | {name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")}
EXAMPLES = {"examples/quickstart.py": "quickstart.md"} | {
    f"examples/{name}.py": f"journey_{name}.md" for name in ("deploy", "huggingface", "research")
}
"""The page that an example is on."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages and the results, with links as the site needs them. The search leaves results out."""
    for path in (ROOT / "benchmarks" / "results").glob("*.md"):
        text = (
            path.read_text(encoding="utf-8")
            .replace("](../../docs/", "](../")
            .replace("](../../README.md", "](../index.md")
        )
        files.append(
            File.generated(config, f"results/{path.name}", content=f"---\nsearch: {{exclude: true}}\n---\n{text}")
        )
    for name, page in PAGES.items():
        text = (
            (ROOT / name)
            .read_text(encoding="utf-8")
            .replace("](docs/", "](")
            .replace("](benchmarks/results/", "](results/")
        )
        for target, place in (PAGES | EXAMPLES).items():
            text = text.replace(f"]({target})", f"]({place})")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links to files outside `docs` with links to pages of the site."""
    if page.file.src_uri.startswith("results/"):
        return markdown
    markdown = markdown.replace("](../benchmarks/results/", "](results/")
    return re.sub(r"\]\(\.\./(\w+\.md)\)", lambda link: f"]({PAGES.get(link[1], link[1])})", markdown)


class Doctests(Extension):
    """An extension of Griffe: examples in docstrings are blocks of code, not quotations."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Fence runs of lines that begin with `>>>`."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^>>> .*(?:\n(?!\s*$).*)*", lambda run: f"\n```pycon\n{run[0]}\n```\n", obj.docstring.value, flags=re.M
            )
