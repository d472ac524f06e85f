"""The runner of benchmarks: options come from a signature, pages from what the function returns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch

from benchmarks import common
from benchmarks.experiment import HIDDEN, Experiment, Option, Pages, experiment

SEEN: dict[str, Any] = {}


@experiment(page="page.md")
def whole(
    *names: Annotated[str, Option("which", choices=("a", "b"))],
    folder: Annotated[Path, "of the files"],
    rounds: int = 3,
    sizes: Annotated[Sequence[float], "in MiB"] = (1.0, 2.0),
    only_fast: Annotated[bool, "leave out the rest"] = False,
    child: Annotated[tuple[str, int] | None, HIDDEN] = None,
    write: bool = False,
) -> str:
    """Keep the options."""
    SEEN.update(locals(), drawn=float(torch.rand(())))
    return "# Title\n"


@experiment(page="page.md", own_environment=True)
def growing(rows: int = 2) -> Pages:
    """Yield the page as it grows."""
    yield from (f"# {row}" for row in range(rows))
    return 3


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    return tmp_path / "page.md"


def test_each_parameter_is_an_option_of_its_type(page: Path) -> None:
    whole(["b", "a", "--folder", "f", "--sizes", "4", "0.5", "--only-fast", "--rounds", "7"])
    assert (SEEN["names"], SEEN["folder"], SEEN["rounds"]) == (("b", "a"), Path("f"), 7)
    assert (SEEN["sizes"], SEEN["only_fast"], SEEN["child"], SEEN["write"]) == ([4.0, 0.5], True, None, False)
    assert not page.exists()
    whole(["--folder", "f"])
    assert (SEEN["names"], SEEN["sizes"], SEEN["only_fast"]) == ((), (1.0, 2.0), False)


def test_a_page_ends_with_versions_and_processor_and_draws_from_one_seed(page: Path) -> None:
    whole(["--folder", "f", "--write"])
    assert SEEN["write"]
    title, below = page.read_text().strip().split("\n\n")
    assert title == "# Title"
    assert below.startswith("Python ")
    first = SEEN["drawn"]
    whole(["--folder", "f"])
    assert SEEN["drawn"] == first


def test_pages_that_grow_are_written_each_time_and_the_status_is_that_of_the_process(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        growing(["--write"])
    assert left.value.code == 3
    assert page.read_text() == "# 1\n"
    assert capsys.readouterr().out == "# 0\n# 1\n"


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (whole, [], "--folder"),
        (whole, ["c", "--folder", "f"], "invalid choice: 'c'"),
        (whole, ["--folder", "f", "--child", "x"], "expected 2 arguments"),
        (growing, ["--rows", "many"], "invalid int value"),
    ],
)
def test_a_wrong_command_line_is_refused(
    command: Experiment, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command(arguments)
    assert message in capsys.readouterr().err


def test_the_help_is_the_docstring_of_the_module_without_hidden_options() -> None:
    text = whole.parser().format_help()
    assert "The runner of benchmarks" in text
    assert "--child" not in text
    assert "--write" in text
