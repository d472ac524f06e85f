"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from quark_fx.config.quant_config import QuantConfig
from quark_fx.presets import PRESETS, preset

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")]

Html = Annotated[Path | None, typer.Option("--html", help="Where a page of figures and tables is written.")]

AnyModel = Annotated[
    str, typer.Argument(help="An .onnx or .gguf file, a quantized model, a checkpoint, or package.module:function.")
]

FloatModel = Annotated[
    str,
    typer.Argument(
        help="The directory of a Hugging Face checkpoint; or package.module:function, which returns a module, or a "
        "module and a batch of example inputs."
    ),
]


def _preset_names(incomplete: str) -> list[str]:
    return [name for name in PRESETS if name.startswith(incomplete)]


Preset = Annotated[str | None, typer.Option(help="One of `quark-fx presets`.", autocompletion=_preset_names)]

Config = Annotated[Path | None, typer.Option(help="A YAML file; `preset: NAME` in it starts from a preset.")]

Exclude = Annotated[
    list[str] | None,
    typer.Option(help='Operators that stay in float: a glob on names, or "op:" and one on kinds. Repeatable.'),
]

GroupSize = Annotated[int | None, typer.Option(help="Weights that share a scale.")]

Outputs = Annotated[
    list[Path],
    typer.Option(
        "--output",
        "-o",
        help="An .onnx or .gguf file; or a directory: of a checkpoint with --format compressed-tensors, gptq, gptq_v2 "
        "or awq, else what quark_fx loads again. Give several to write several.",
    ),
]

Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="How outputs are spelled. ONNX: qdq (the default), qoperator, matmul_nbits, vitis. "
        "Checkpoints: compressed-tensors, gptq, gptq_v2, awq.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The data for calibration or evaluation, and how to read it."""

    data: Annotated[
        Path | None,
        typer.Option(
            help="A text file; a .jsonl file of texts or conversations; a text of an installed package, as "
            "pydoc_data.topics:topics; a folder of images; or a .npy, .npz or .safetensors file of model inputs."
        ),
    ] = None
    samples: Annotated[
        int, typer.Option(min=1, help="Samples that are taken, spread evenly over the data: windows, lines, images.")
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
        str | None, typer.Option(help='Images: mean of each color from 0 to 1; default: that of ImageNet, "0.485,..."')
    ] = None
    std: Annotated[str | None, typer.Option(help="Images: standard deviation of each color, likewise.")] = None


def reads_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of `Reading` in the place of its argument `reading`."""
    signature, hints = inspect.signature(command), get_type_hints(command, include_extras=True)
    own = {name: p.replace(annotation=hints[name]) for name, p in signature.parameters.items() if name != "reading"}
    types = get_type_hints(Reading, include_extras=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    shared = {
        f.name: inspect.Parameter(f.name, keyword, default=f.default, annotation=types[f.name]) for f in fields(Reading)
    }

    @functools.wraps(command)
    def run(**given: Any) -> None:
        reading = Reading(**{name: given.pop(name) for name in shared})
        command(**given, reading=reading)

    parameters = [p.replace(kind=keyword) for p in own.values()] + list(shared.values())
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def configuration(
    name: str | None, file: Path | None, exclude: list[str] | None, group_size: int | None
) -> QuantConfig:
    """Return what `--preset` or `--config` names, with what the other options change.

    Raises:
        typer.BadParameter: if neither is given, or both.
        ConfigError: for an unknown preset, or a file that cannot be read or contradicts itself.
    """
    if (name is None) == (file is None):
        raise typer.BadParameter("give --preset NAME or --config FILE, one of them")
    chosen = preset(name) if name is not None else QuantConfig.from_yaml(file or Path())
    if group_size is not None:
        chosen = chosen.replace(group_size=group_size)
    return chosen.replace(exclude=(*chosen.exclude, *exclude)) if exclude else chosen
