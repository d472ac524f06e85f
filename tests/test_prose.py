"""Docstrings, comments, and most messages are in plain words; in finished folders, names of variables are, too."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PAGES = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if path.stem != "on_gpu")
"""Pages in plain words."""

FINISHED = (
    *("README.md", *PAGES),
    "quark_fx/analysis",
    "quark_fx/capture",
    "quark_fx/checkpoints",
    "quark_fx/command_line",
    "quark_fx/config",
    "quark_fx/data",
    "quark_fx/engine",
    "quark_fx/errors.py",
    "quark_fx/export/checkpoints",
    "quark_fx/export/generation",
    "quark_fx/export/runtime",
    "quark_fx/evaluation",
    "quark_fx/from_pretrained.py",
    "quark_fx/graph",
    "quark_fx/inspection",
    "quark_fx/mixed_precision",
    "quark_fx/model",
    "quark_fx/numbers",
    "quark_fx/observers",
    "quark_fx/parity",
    "quark_fx/passes",
    "quark_fx/plan",
    "quark_fx/presets.py",
    "quark_fx/quantization.py",
    "quark_fx/rescale",
    "quark_fx/session.py",
    "quark_fx/solvers",
    "quark_fx/system",
    "quark_fx/targets",
    "quark_fx/vendors",
)
"""Files and folders whose docstrings, comments, messages, and names of variables are in plain words."""

PACKAGE = sorted(
    f"quark_fx/{path.name}" for path in (ROOT / "quark_fx").iterdir() if path.suffix == ".py" or list(path.glob("*.py"))
)
"""All files and folders of the package; their docstrings and comments are in plain words."""

MESSAGES = tuple(place for place in PACKAGE if place not in FINISHED and place != "quark_fx/export")
"""Files and folders whose messages are in plain words, too: the strings that are not docstrings."""

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


def lines_of(strings: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield the lines of nodes that are strings of several words, with their numbers."""
    for node in strings:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value.strip():
            yield from ((node.lineno + row, line.strip()) for row, line in enumerate(node.value.splitlines()))


def documentation(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of docstrings and comments of a module, with their numbers."""
    yield from lines_of(node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr))
    for number, line in enumerate(source.splitlines(), 1):
        if comment := re.search(r"(?:^|\s)# (.*)", line):
            yield number, comment[1]


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of strings of a module that are not docstrings, with their numbers."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    yield from lines_of(node for node in nodes if id(node) not in docstrings)


def page_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a Markdown page outside of code and tables, with their numbers."""
    code = False
    for number, line in enumerate(source.splitlines(), 1):
        code ^= line.startswith("```")
        if not code and not line.startswith("|"):
            yield number, line.strip()


def hard_phrases(lines: Iterable[tuple[int, str]]) -> tuple[list[str], int]:
    """Return the hard phrases of lines with their numbers, and the number of words."""
    phrases, words = list[str](), 0
    for number, line in lines:
        words += len(re.findall(r"[A-Za-z]{2,}", line))
        phrases += [f"{number}: {match[0]!r} in {line}" for phrase in PHRASES for match in phrase.finditer(line)]
    return phrases, words


def hard_names(source: str) -> list[str]:
    """Return the variables of a module whose names do not say what they hold, with their lines."""
    names = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    return [f"{name.lineno}: the name {name.id!r}" for name in names if NAMES.fullmatch(name.id)]


def require_plain(place: str, read: Callable[[Path, str], tuple[list[str], int]]) -> None:
    """Fail if the files of a place have more hard phrases and names, which `read` returns, than the limit."""
    root, offending, total = ROOT / place, list[str](), 0
    for file in [root] if root.is_file() else sorted(root.rglob("*.py")):
        lines, words = read(file, file.read_text(encoding="utf-8"))
        offending += [f"{file.name}:{line}" for line in lines]
        total += words
    share = 100 * len(offending) / max(1, total)
    assert share <= LIMIT, f"{share:.2f} hard phrases per 100 words in {place}:\n" + "\n".join(offending)


def all_prose(file: Path, source: str) -> tuple[list[str], int]:
    """Return the hard phrases and names of a module or page, and the number of words in its prose."""
    if file.suffix == ".md":
        return hard_phrases(page_texts(source))
    phrases, words = hard_phrases([*documentation(source), *messages(source)])
    return phrases + hard_names(source), words


@pytest.mark.parametrize("place", FINISHED)
def test_finished_folders_are_in_plain_words(place: str) -> None:
    require_plain(place, all_prose)


@pytest.mark.parametrize("place", [place for place in PACKAGE if place not in FINISHED])
def test_docstrings_and_comments_are_in_plain_words(place: str) -> None:
    require_plain(place, lambda _, source: hard_phrases(documentation(source)))


@pytest.mark.parametrize("place", MESSAGES)
def test_messages_are_in_plain_words(place: str) -> None:
    require_plain(place, lambda _, source: hard_phrases(messages(source)))


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
    lines, _ = all_prose(Path("module.py"), line)
    assert "1: " in "".join(lines)


def test_plain_lines_pass() -> None:
    source = (
        '"""Return the scale of `weight`.\n\nscale: Scale per group, such as 0.5.\n"""\nscale = 1  # fixed per tensor\n'
    )
    assert all_prose(Path("module.py"), source) == ([], 14)


def test_each_line_is_a_docstring_a_comment_or_a_message() -> None:
    source = '"""What is kept."""\nfound = 1  # behind it\nraise ValueError("what is kept")\n'
    read = {kind: hard_phrases(kind(source)) for kind in (documentation, messages)}
    lines = {kind: [phrase.partition(":")[0] for phrase in phrases] for kind, (phrases, _) in read.items()}
    assert lines == {documentation: ["1", "1", "2"], messages: ["3"]}
    assert {kind: words for kind, (_, words) in read.items()} == {documentation: 5, messages: 3}
