"""`quark-fx export`, which writes a quantized model in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import quark_fx as qfx
from quark_fx.command_line.options import Formats, Json, Outputs, Reading
from quark_fx.command_line.outputs import outputs_of, require_room_for, write
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import find_tokenizer
from quark_fx.command_line.subjects import float_subject, subject
from quark_fx.errors import ExportError
from quark_fx.inspection.inspect import written_bytes
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.memory import bytes_text


def export(
    model: Annotated[str, typer.Argument(help="The directory of a quantized model of quark_fx.")],
    output: Outputs,
    format: Formats = None,
    float_model: Annotated[
        str | None,
        typer.Option("--float", help="Checkpoints and GGUF: the float checkpoint or factory that was quantized."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer to write next to it; default: the one next to the model.")
    ] = None,
    opset: Annotated[int | None, typer.Option(help="ONNX: 14 to 25.")] = None,
    json: Json = False,
) -> None:
    """Write a quantized model as an ONNX file, a GGUF file, or a checkpoint."""
    outputs = outputs_of(output, format or [])
    for one in outputs:
        require_room_for(one)
    quantized = subject(model)
    if not isinstance(quantized.model, QuantizedModel):
        raise ExportError(f"{model} is not a quantized model of quark_fx; pass the directory that quantize wrote")
    original = None
    if any(one.kind in ("checkpoint", "GGUF") for one in outputs):
        if float_model is None:
            raise ExportError(
                "exporting a checkpoint or GGUF file requires the float model: pass it as --float DIRECTORY"
            )
        source = float_subject(float_model)
        original = qfx.open_checkpoint(source.model) if isinstance(source.model, Path) else source.model
    tokenizer_to_write = find_tokenizer(Reading(tokenizer=tokenizer), quantized)
    written = []
    for one in outputs:
        write(quantized.model, one, tokenizer=tokenizer_to_write, model=original, opset=opset)
        written.append({"path": str(one.path), "kind": one.kind, "bytes": written_bytes(one.path)})
    lines = [
        f"wrote {w['path']} ({w['kind']}, {bytes_text(written_bytes(one.path))})"
        for w, one in zip(written, outputs, strict=True)
    ]
    show(json, {"written": written}, *lines)
