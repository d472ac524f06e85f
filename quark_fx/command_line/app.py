"""The application with all commands, which turns user errors into messages and exit codes."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import quark_fx
from quark_fx.command_line.analyze import analyze
from quark_fx.command_line.compare import compare
from quark_fx.command_line.convert import convert
from quark_fx.command_line.doctor import doctor
from quark_fx.command_line.evaluate import evaluate
from quark_fx.command_line.export import export
from quark_fx.command_line.inspect import inspect
from quark_fx.command_line.presets import presets
from quark_fx.command_line.quantize import quantize
from quark_fx.command_line.search import search
from quark_fx.command_line.verify import verify
from quark_fx.errors import QuarkError


class Commands(TyperGroup):
    """Command group that prints a user error as a message and exits with code 1; other errors keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the requested command."""
        as_json = "--json" in ctx.args
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except QuarkError as error:
                notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
                typer.echo(f"error: {error}{notes}", err=True)
                if as_json:
                    details = {"type": type(error).__name__, "message": f"{error}{notes}"}
                    typer.echo(json.dumps({"error": details}, indent=2))
                raise typer.Exit(1) from None


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _version(flag: bool) -> None:
    if flag:
        typer.echo(f"quark_fx {quark_fx.__version__}")
        raise typer.Exit


app = typer.Typer(
    name="quark-fx",
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Quantize PyTorch models and Hugging Face checkpoints; export, verify, and evaluate the result."""


for _command in (quantize, convert, analyze, search, presets, inspect, verify, doctor, evaluate, export, compare):
    app.command()(_command)
