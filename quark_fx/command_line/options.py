"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

from quark_fx.config.quant_config import QuantConfig
from quark_fx.config.target import TARGETS
from quark_fx.export.checkpoints.to_huggingface import FORMATS as CHECKPOINTS
from quark_fx.export.to_onnx.formats import FORMATS
from quark_fx.presets import PRESETS, preset

Json = Annotated[bool, typer.Option("--json", help="Print only JSON on stdout.")]

Html = Annotated[Path | None, typer.Option("--html", help="HTML file for a page of charts and tables.")]

Metric = Annotated[
    Literal["error", "kl"],
    typer.Option(help="error: relative error of the outputs; kl: divergence of the classes, in nats."),
]

AnyModel = Annotated[
    str, typer.Argument(help="An .onnx or .gguf file, a quantized model, a checkpoint, or package.module:function.")
]

FloatModel = Annotated[
    str,
    typer.Argument(
        help="The directory of a Hugging Face checkpoint; a GGUF file; or package.module:function, which returns a "
        "module, or a module and a batch of example inputs."
    ),
]


def _completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function for shell completion: from the beginning of a name to the names that begin with it."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


Outputs = Annotated[
    list[Path],
    typer.Option(
        "--output",
        "-o",
        help="An .onnx or .gguf file; or a directory: a checkpoint with --format compressed-tensors, gptq, gptq_v2, "
        "awq, modelopt or mxfp4, otherwise a model that quark_fx loads again. Repeatable.",
    ),
]

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help=f"Formats of outputs. ONNX: {', '.join(FORMATS)}; by default the first that the target reads. "
        f"Checkpoints: {', '.join(CHECKPOINTS)}.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options that select the data for calibration or evaluation and tell how to read it."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="A text file; a .json, .jsonl, or .csv file of texts or conversations; a text of an installed "
            "package, such as pydoc_data.topics:topics; a folder of images; or a .npy, .npz or .safetensors file of "
            "model inputs."
        ),
    ] = None
    samples: Annotated[
        int, typer.Option(min=1, help="Number of samples, spread evenly over the data: windows, lines, or images.")
    ] = 128
    batch_size: Annotated[int, typer.Option(min=1, help="Samples of a batch.")] = 8
    length: Annotated[int, typer.Option(min=2, help="Text: tokens of a sample.")] = 512
    lines: Annotated[
        bool | None,
        typer.Option(
            "--lines/--windows",
            help="Text: each line is a sample, or the text is cut into windows; default: windows for language models.",
        ),
    ] = None
    tokenizer: Annotated[
        Path | None, typer.Option(help="Text: the directory of the tokenizer; default: the checkpoint's own.")
    ] = None
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Images: pixels of a side; the shorter side is scaled, the rest cut off.")
    ] = None
    mean: Annotated[
        str | None, typer.Option(help='Images: mean of each color from 0 to 1; default: ImageNet, "0.485,..."')
    ] = None
    std: Annotated[
        str | None, typer.Option(help="Images: standard deviation of each color from 0 to 1; default: ImageNet.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Options that select a configuration: a preset or a file, and changes."""

    preset: Annotated[
        str | None, typer.Option(help="One of `quark-fx presets`.", autocompletion=_completing(PRESETS))
    ] = None
    config: Annotated[Path | None, typer.Option(help="A YAML file; `preset: NAME` in it starts from a preset.")] = None
    exclude: Annotated[
        list[str] | None,
        typer.Option(help='Operators that stay in float: a glob on names, or "op:" and a glob on kinds. Repeatable.'),
    ] = None
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale.")] = None
    target: Annotated[
        str | None,
        typer.Option(
            help="Runtime or device of the result; default: the target of the configuration.",
            autocompletion=_completing(TARGETS),
        ),
    ] = None

    @property
    def changes(self) -> dict[str, Any]:
        """The fields of the configuration that options override, and their values; `exclude` only adds patterns."""
        options = {"group_size": self.group_size, "target": self.target}
        return {name: value for name, value in options.items() if value is not None}

    def chosen(self) -> QuantConfig:
        """Return the configuration.

        Raises:
            typer.BadParameter: If both a preset and a file are given, or neither.
            ConfigError: If a preset is unknown, or a file cannot be read or contradicts itself.
        """
        if (self.preset is None) == (self.config is None):
            raise typer.BadParameter("pass either --preset NAME or --config FILE")
        chosen = preset(self.preset) if self.preset is not None else QuantConfig.from_yaml(self.config or Path())
        chosen = chosen.replace(**self.changes)
        return chosen.replace(exclude=(*chosen.exclude, *self.exclude)) if self.exclude else chosen


_SHARED = (Reading, ConfigOptions)


def shares_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command in which each `Reading` or `ConfigOptions` argument is replaced by the options of its fields."""
    hints = get_type_hints(command, include_extras=True)
    groups, parameters = dict[str, type[Any]](), list[inspect.Parameter]()
    for name, parameter in inspect.signature(command).parameters.items():
        if hints[name] in _SHARED:
            groups[name] = hints[name]
            types = get_type_hints(hints[name], include_extras=True)
            defaults = {f.name: f.default for f in fields(hints[name])}
        else:
            types, defaults = hints, {name: parameter.default}
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters += [inspect.Parameter(n, keyword, default=d, annotation=types[n]) for n, d in defaults.items()]

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        instances = {
            name: group(**{f.name: arguments.pop(f.name) for f in fields(group)}) for name, group in groups.items()
        }
        command(**arguments, **instances)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run
