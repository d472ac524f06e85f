"""The runner of the measurements: a function becomes a command with options, a seed, and a page of results.

```python
@experiment(page="latency.md")
def main(rounds: Annotated[int, "rounds of 5 runs for each file"] = 30) -> str:
    return f"# Latency ..."


if __name__ == "__main__":
    main()
```

Each parameter is an option, `--rounds` here; `*names` are arguments without an option. The docstring of the module is
the help. The command draws from seed 0, hides warnings, prints the text that the function returns with the versions
and the processor below, and writes it to the page if `--write` is given.
"""

from __future__ import annotations

import argparse
import inspect
import logging
import sys
import types
import warnings
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch

from benchmarks.common import environment, publish


@dataclass(frozen=True)
class Option:
    """How a parameter is given on the command line; a string in its place is `help`."""

    help: str | None = None
    choices: Collection[str] | None = None
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    """Reads a value; by default the type of the parameter does."""


HIDDEN = Option(help=argparse.SUPPRESS)
"""An option by which an experiment starts parts of itself in other processes."""

Pages = Generator[str, None, int | None]
"""Texts of an experiment that grow while it measures, and its exit status; without one, `Iterator[str]`."""


@dataclass(frozen=True)
class Experiment:
    """A measurement that is a command."""

    function: Callable[..., str | int | Iterator[str] | Pages | None]
    page: str | None
    own_environment: bool

    def __call__(self, arguments: Sequence[str] | None = None) -> None:
        """Read the command line, measure, and print or write; exit with the status if it is not 0."""
        options = vars(self.parser().parse_args(arguments))
        parameters = inspect.signature(self.function).parameters
        write = options["write"] if "write" in parameters else options.pop("write", False)
        rest = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
        positional = options.pop(rest) if rest else []
        torch.manual_seed(0)
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        found = self.function(*positional, **options)
        if isinstance(found, str):
            self._publish(found, write=write)
        elif isinstance(found, Generator):
            found = self._publish_all(found, write=write)
        if isinstance(found, int) and found:
            sys.exit(found)

    def parser(self) -> argparse.ArgumentParser:
        """Return the parser of the options."""
        module = sys.modules[self.function.__module__]
        parser = argparse.ArgumentParser(
            description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        hints = get_type_hints(self.function, include_extras=True)
        for name, parameter in inspect.signature(self.function).parameters.items():
            if name != "write":
                _add(parser, parameter, hints[name])
        if self.page is not None:
            parser.add_argument("--write", action="store_true", help=f"update benchmarks/results/{self.page}")
        return parser

    def _publish(self, text: str, *, write: bool) -> None:
        below = "" if self.own_environment else f"\n\n{environment()}\n"
        publish(text.rstrip() + below, self.page if write else None)

    def _publish_all(self, texts: Pages, *, write: bool) -> int | None:
        while True:
            try:
                self._publish(next(texts), write=write)
            except StopIteration as end:
                status: int | None = end.value
                return status


def experiment(
    *, page: str | None = None, own_environment: bool = False
) -> Callable[[Callable[..., str | int | Iterator[str] | Pages | None]], Experiment]:
    """Make a function a command.

    Args:
        page: Name in `benchmarks/results` of the page that `--write` updates; without it there is no `--write`. A
            parameter `write` of the function tells whether it was given.
        own_environment: The text names versions and processor itself, for example once for each section.

    Returns:
        A decorator of functions that return the text of the page, yield it again as it grows, or return an exit status.
    """
    return lambda function: Experiment(function, page, own_environment)


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    """Add the option of a parameter."""
    kind, option = hint, Option()
    if get_origin(hint) is Annotated:
        kind, described = get_args(hint)
        option = Option(described) if isinstance(described, str) else described
    settings: dict[str, Any] = {"help": option.help}
    if parameter.kind is parameter.VAR_POSITIONAL:
        choices = None if option.choices is None else [*option.choices, []]
        parser.add_argument(
            parameter.name,
            nargs="*",
            type=option.parse or kind,
            choices=choices,
            metavar=option.metavar,
            help=option.help,
        )
        return
    name = f"--{parameter.name.replace('_', '-')}"
    if kind is bool:
        parser.add_argument(name, action="store_true", **settings)
        return
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not types.NoneType)
    if get_origin(kind) is tuple:
        settings["nargs"] = len(get_args(kind))
    elif get_origin(kind) in (list, Sequence):
        settings["nargs"] = "+"
    if settings.get("nargs"):
        kind = get_args(kind)[0]
    if parameter.default is parameter.empty:
        settings["required"] = True
    else:
        settings["default"] = parameter.default
    parser.add_argument(
        name,
        type=option.parse or kind,
        choices=option.choices,
        metavar=option.metavar or _metavar(kind, option),
        **settings,
    )


def _metavar(kind: Any, option: Option) -> str | None:
    return "PATH" if kind is Path and option.choices is None else None
