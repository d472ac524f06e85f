"""Docstrings, messages, and comments of finished folders are in plain words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

FINISHED = (
    "README.md",
    "docs/configuration.md",
    "docs/extend.md",
    "docs/observers.md",
    "quark_fx/analysis",
    "quark_fx/checkpoints",
    "quark_fx/config",
    "quark_fx/data",
    "quark_fx/errors.py",
    "quark_fx/evaluation",
    "quark_fx/from_pretrained.py",
    "quark_fx/numbers",
    "quark_fx/observers",
    "quark_fx/presets.py",
    "quark_fx/quantization.py",
    "quark_fx/session.py",
    "quark_fx/system",
    "quark_fx/targets",
)
"""Files and folders whose prose is in plain words."""

LIMIT = 0.3
"""Hard phrases and names allowed per 100 words."""

PHRASES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?i)\bwhat \w+",  # a clause in place of a noun
        r"^(What|Where|How|Which|Whether)\b",  # a summary or entry that begins with a question word
        r"^\w+(, \w+)*: (of|what|how|as|where|by|in|likewise|that|which|whose|from|for|to|with|at|on|whether|than)\b",
        r"\b(is|are|was|were|be|has|have|reads?|takes?|makes?) no(ne)? (?!longer|more)",
        r", as (?!(an?|the|it|they|if|in|well|long|soon|to|is|are|was|much|many)\b)[a-z`\"]",
        r"\b(of whom|of which|(that|those|the ones?) (of|that)|of (its|their|one's) own)\b",
        r"(?i)\b(beside|behind|mend(s|ed|ing)?|judge[sd]?|figures?|likewise|lies|whole numbers?)\b",
        r"\b(in turn|foretold|made of|tell whether|otherwise than|at hand|by name)\b",
        r"\b(that|those|all|(no|some|any)thing) (found|known|kept|made|held|given|left|seen|wanted)\b",
        r"\b(that|those|all|(no|some|any)thing) (rounded|turned|lent|taken|learned|stored|read)\b",
    )
)
"""Phrases that readers stop at."""

NAMES = re.compile("found|known|kept|made|own|some|wanted|left|seen|given|held|others|here|there")
"""Names of variables that do not say what the variable holds."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of strings and comments of a module, with their numbers."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield from ((node.lineno + row, line.strip()) for row, line in enumerate(node.value.splitlines()))
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)# (.*)", line):
            yield number, comment[1]


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page outside of code and tables, with their numbers."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.startswith("```")
        if not code and not line.startswith("|"):
            yield number, line.strip()


def hard_lines(source: str, *, page: bool = False) -> tuple[list[str], int]:
    """Return the lines of a module or page that are hard to read, and the number of words in its prose."""
    lines, words = list[str](), 0
    for number, line in (page_texts if page else texts)(source):
        words += len(re.findall(r"[A-Za-z]{2,}", line))
        lines += [f"{number}: {match[0]!r} in {line}" for phrase in PHRASES for match in phrase.finditer(line)]
    for node in () if page else ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and NAMES.fullmatch(node.id):
            lines.append(f"{node.lineno}: the name {node.id!r}")
    return lines, words


@pytest.mark.parametrize("place", FINISHED)
def test_finished_folders_are_in_plain_words(place: str) -> None:
    root, offending, total = Path(__file__).parents[1] / place, list[str](), 0
    for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
        lines, words = hard_lines(file.read_text(encoding="utf-8"), page=file.suffix == ".md")
        offending += [f"{file.name}:{line}" for line in lines]
        total += words
    assert total > 0
    share = 100 * len(offending) / total
    assert share <= LIMIT, f"{share:.2f} hard phrases per 100 words in {place}:\n" + "\n".join(offending)


@pytest.mark.parametrize(
    "line",
    [
        '"""What is kept of it."""',
        '"""Return what the cache holds."""',
        '"""scale: as in the other class."""',
        '"""The format has no offsets, so none is read."""',
        "# Behind a rotation, all columns are alike.",
        "found = 1",
        'raise ValueError("offsets are whole numbers")',
    ],
)
def test_hard_lines_are_found(line: str) -> None:
    lines, _ = hard_lines(line)
    assert "1: " in "".join(lines)


def test_plain_lines_pass() -> None:
    source = (
        '"""Return the scale of `weight`.\n\nscale: Scale per group, such as 0.5.\n"""\nscale = 1  # fixed per tensor\n'
    )
    assert hard_lines(source) == ([], 14)
