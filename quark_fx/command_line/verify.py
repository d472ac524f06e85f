"""`quark-fx verify`: an exported file or checkpoint against the model it was made of."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import Json, Reading, shares_options
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import read_batches
from quark_fx.command_line.subjects import subject
from quark_fx.errors import ExportError
from quark_fx.export.runtime.verification import Runtime
from quark_fx.model.quantized_model import QuantizedModel


@shares_options
def verify(
    file: Annotated[Path, typer.Argument(help="The .onnx or .gguf file, or the directory of a checkpoint.")],
    model: Annotated[str, typer.Argument(help="The directory of the quantized model it was exported from.")],
    reading: Reading,
    per_node: Annotated[
        bool, typer.Option("--per-node", help="Compare every quantized value, to see where a difference comes from.")
    ] = False,
    limit: Annotated[
        float, typer.Option(min=0, help="Quantization steps above which the command ends with code 1.")
    ] = 1.0,
    runtime: Annotated[
        Runtime | None,
        typer.Option(help="What runs the file; default: transformers for checkpoints and .gguf, else onnxruntime."),
    ] = None,
    json: Json = False,
) -> None:
    """Run the same data in torch and in what reads the file, and compare outputs in quantization steps."""
    made_of = subject(model)
    if not isinstance(made_of.model, QuantizedModel):
        raise ExportError(f"{model} is no quantized model of quark_fx; give the directory that quantize wrote")
    found = qfx.verify(made_of.model, file, read_batches(reading, made_of), per_node=per_node, runtime=runtime)
    data = {
        "runtime": found.runtime,
        "max_steps": found.max_steps,
        "limit": limit,
        "cause": found.cause,
        "skipped": found.skipped,
        "differences": [asdict(d) | {"steps": d.steps} for d in (*found.differences, *found.shipped)],
    }
    show(json, data, str(found))
    if not found.max_steps <= limit:
        if found.unrelated:
            why = "nothing in it resembles what torch computes: is it the file of this model?"
        elif found.runtime == "onnxruntime":
            why = (
                "--per-node shows where that comes from (a value between two codes may be rounded either way, and a "
                "deep network carries that on)"
            )
        else:
            why = "a value between two codes may be rounded either way, and a deep network carries that on"
        raise ExportError(
            f"{file} in {found.runtime} is {found.max_steps:.3g} quantization steps from {model}, more than {limit:g}; "
            f"{why}"
        )
