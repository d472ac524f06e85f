"""`quark-fx verify`, which compares an exported file or checkpoint with its model."""

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
from quark_fx.export.runtime.checkpoint_runners import CHECKPOINT_RUNNERS
from quark_fx.export.runtime.decoding import is_generation_folder
from quark_fx.export.runtime.runners import RUNNERS
from quark_fx.model.quantized_model import QuantizedModel


@shares_options
def verify(
    file: Annotated[
        Path,
        typer.Argument(
            help="The .onnx or .gguf file, or the directory of a checkpoint or of prefill and decode graphs."
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            help="The directory of the quantized model that was exported; for decode graphs, a float checkpoint too."
        ),
    ],
    reading: Reading,
    per_node: Annotated[
        bool, typer.Option("--per-node", help="Compare every quantized value, to see where a difference comes from.")
    ] = False,
    limit: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Quantization steps above which the command ends with code 1; default: 1; for llama.cpp, "
            "as many as its 8-bit inputs of quantized matrices explain.",
        ),
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            help=f"Runtime of the file: {', '.join((*RUNNERS, *CHECKPOINT_RUNNERS))}, or torch; default: "
            "transformers for checkpoints and .gguf, else onnxruntime."
        ),
    ] = None,
    decode_steps: Annotated[
        int, typer.Option("--decode-steps", min=1, help="Tokens to decode after each prompt, for decode graphs.")
    ] = 32,
    json: Json = False,
) -> None:
    """Run the same data in torch and in the runtime of the file, and compare outputs in quantization steps."""
    reference = subject(model)
    if not isinstance(reference.model, QuantizedModel) and not is_generation_folder(file):
        raise ExportError(f"{model} is not a quantized model of quark_fx; pass the directory that quantize wrote")
    batches = read_batches(reading, reference)
    verification = qfx.verify(
        reference.model, file, batches, per_node=per_node, runtime=runtime, decode_steps=decode_steps
    )
    if limit is None and (verification.runtime != "llama.cpp" or verification.wrong):
        limit = 1.0
    data = {
        "runtime": verification.runtime,
        "max_steps": verification.max_steps,
        "limit": limit,
        "verdict": verification.verdict,
        "cause": verification.cause,
        "skipped": verification.skipped,
        "decode_steps": verification.decode_steps,
        "first_wrong": verification.first_wrong.name if verification.first_wrong else None,
        "differences": [asdict(d) | {"steps": d.steps} for d in (*verification.differences, *verification.shipped)],
    }
    show(json, data, str(verification))
    if limit is not None and not verification.max_steps <= limit:
        if not verification.comparable:
            why = verification.verdict
        elif verification.unrelated:
            why = "its outputs do not resemble the outputs of torch: check that the file was exported from this model"
        elif verification.decode_steps:
            why = (
                f"the first above the limit is {next(d.name for d in verification.differences if not d.steps <= limit)}"
            )
        elif verification.runtime == "llama.cpp":
            why = (
                "8-bit inputs of quantized matrices do not explain it: check that the file was exported from this model"
            )
        elif verification.runtime == "onnxruntime" and not per_node:
            why = (
                "pass --per-node to see where the difference starts (a value halfway between two codes may be rounded "
                "either way, and the difference can grow in a deep network)"
            )
        else:
            why = (
                "a value halfway between codes may be rounded either way, and the difference can grow in a deep network"
            )
        raise ExportError(
            f"{file} in {verification.runtime} is {verification.max_steps:.3g} quantization steps from {model}, more "
            f"than {limit:g}; {why}"
        )
