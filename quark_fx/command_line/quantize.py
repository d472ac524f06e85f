"""`quark-fx quantize`, which quantizes a float model and writes it to files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

import quark_fx as qfx
from quark_fx.checkpoints.configuration import is_rotated, read_configuration
from quark_fx.command_line.options import (
    ConfigOptions,
    FloatModel,
    Formats,
    Html,
    Json,
    Outputs,
    Reading,
    shares_options,
)
from quark_fx.command_line.outputs import (
    Output,
    outputs_of,
    require_opset,
    require_room_for,
    write,
    write_tokenizer,
)
from quark_fx.command_line.printing import say, show
from quark_fx.command_line.reading import calibration, find_tokenizer
from quark_fx.command_line.subjects import Subject, float_subject
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.resources import require_usable
from quark_fx.errors import ConfigError
from quark_fx.export.runtime.runners import RUNNERS
from quark_fx.graph.pass_manager import learns_from_data, pass_name
from quark_fx.graph.signature import split_batch
from quark_fx.inspection.inspect import written_bytes
from quark_fx.inspection.parts import grouped, parts_of, parts_table
from quark_fx.plan.report import Report
from quark_fx.plan.table import tuples
from quark_fx.quantization import needs_data
from quark_fx.system.memory import bytes_text
from quark_fx.system.writable import require_file_place


@shares_options
def quantize(
    model: FloatModel,
    options: ConfigOptions,
    output: Outputs,
    reading: Reading,
    format: Formats = None,
    opset: Annotated[int | None, typer.Option(help="ONNX: 14 to 25.")] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="Checkpoints: dtype of the loaded weights; default: as stored, but float32 for ONNX."),
    ] = None,
    device: Annotated[str | None, typer.Option(help='Device that runs the blocks, such as "cuda".')] = None,
    memory: Annotated[str | None, typer.Option(help='Memory limit of the process, such as "6GiB".')] = None,
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Keep weights on disk: for models larger than memory. The output is a directory."
        ),
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="A directory for finished blocks: the same call continues where it stopped.")
    ] = None,
    verify: Annotated[bool, typer.Option(help="Compare files and checkpoints with torch on the first batch.")] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print the plan, the expected memory use of the run, and a lower bound on its time."
        ),
    ] = False,
    html: Html = None,
    json: Json = False,
) -> None:
    """Quantize a model and write it as an ONNX file, a GGUF file, a checkpoint, or a directory that quark_fx loads."""
    chosen = options.chosen()
    outputs = outputs_of(output, format or [])
    if stream and [o.kind for o in outputs] != ["saved"]:
        raise typer.BadParameter(
            "--stream can only write a directory that quark_fx loads again; pass one directory as --output, without a "
            "checkpoint format"
        )
    for one in outputs:
        require_room_for(one)
    if html is not None:
        require_file_place(html)
    require_opset(opset, outputs, chosen.target)
    output_dir = outputs[0].path if stream else None
    resources = qfx.Resources(device=device, memory=memory, checkpoint=resume, output_dir=output_dir)
    require_usable(resources)
    source = float_subject(model)
    batches = calibration(reading, source, needed=needs_data(chosen))
    with tempfile.TemporaryDirectory() as scratch:
        dtype = dtype or ("float32" if _too_narrow(source, outputs) else None)
        plan = Plan(source, chosen, batches, outputs, dtype)
        opened = _opened(source, dtype, scratch)
        learns = any(map(learns_from_data, chosen.passes))
        # Check before a long run that formats support the result. ONNX files are quick to write after calibration.
        asked = [one for one in outputs if learns or dry_run or (one.kind != "ONNX" and needs_data(chosen))]
        _require_formats(opened, chosen, batches, asked)
        if dry_run:
            expected = qfx.predict(opened, chosen, batches, resources=resources)
            data = plan.to_dict() | {
                "expected": {"memory": expected.host, "disk": expected.disk, "seconds": expected.seconds}
            }
            show(json, data, plan.table(), str(expected))
            return
        qmodel = qfx.quantize(opened, chosen, batches, resources=resources)
        _require_quantized(qmodel.report())
        tokenizer = find_tokenizer(reading, source)
        written = [_finished(qmodel, one, tokenizer, stream, opset, batches[0] if verify else None) for one in outputs]
    if html is not None:
        qmodel.report().html(html)
    parts, totals = grouped(parts_of(qmodel.report())), qmodel.report().totals
    idle = qmodel.report().idle
    data = plan.to_dict() | {"operators": [asdict(part) for part in parts], "totals": totals, "idle": idle}
    data |= {"draws": dict(qmodel.report().draws), "written": written}
    show(
        json,
        data,
        parts_table(parts),
        f"{totals['quantized']} of {totals['operators']} operators quantized; weights "
        f"{bytes_text(totals['bytes_before'])} → {bytes_text(totals['bytes_after'])}",
        *(f"{name} changed nothing: {reason}" for name, reason in idle.items()),
        *qmodel.report().random,
        *(_line(one) for one in written),
    )


def _require_quantized(report: Report) -> None:
    """Raise `ConfigError` if no operator was quantized, because a script would overlook the warning of `quantize`."""
    if not report.totals["quantized"]:
        reasons = ", ".join(sorted({row.reason for row in report})[:3]) or "none of them has weights"
        raise ConfigError(
            f"nothing was quantized: all {len(report)} operators stay in float ({reasons}); change --exclude or the "
            "configuration, and check the plan with --dry-run"
        )


@dataclass(frozen=True)
class Plan:
    """The plan of a call, which `--dry-run` prints.

    Attributes:
        source: Float model.
        config: Configuration.
        batches: Calibration data.
        outputs: Files and directories to write.
        dtype: Name of the dtype in which a checkpoint is read; `None` for its own dtype.
    """

    source: Subject
    config: QuantConfig
    batches: list[Any]
    outputs: list[Output]
    dtype: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "model": self.source.name,
            "dtype": self.dtype or self.source.dtype or None,
            "config": self.config.to_dict(),
            "data": {"batches": len(self.batches), "first": _shapes(self.batches[0])},
            "outputs": [{"path": str(o.path), "kind": o.kind, "format": o.format} for o in self.outputs],
        }

    def table(self) -> Any:
        """Return the plan as a table."""
        c = self.config
        learning = [pass_name(p) for p in c.passes if learns_from_data(p)]
        rows = [
            ("model", self.source.name),
            ("read in", self.dtype or self.source.dtype or "its own dtype"),
            ("weights", c.weight or "float"),
            ("activations", c.input or "float"),
            ("passes that learn", ", ".join(learning) or "none"),
            ("stay in float", ", ".join(c.exclude) or "operators that are not selected"),
            ("data", f"{len(self.batches)} batches, the first {_shapes(self.batches[0])}"),
            *(("output", one) for one in self.outputs),
        ]
        return tuples("Plan", ("plan", ""), rows)


def _too_narrow(source: Subject, outputs: Iterable[Output]) -> bool:
    """Tell whether an output is an ONNX file and the source is in bfloat16, in which ONNX Runtime does not compute."""
    return source.dtype.endswith("bfloat16") and any(output.kind == "ONNX" for output in outputs)


def _opened(source: Subject, dtype: str | None, scratch: str) -> Any:
    if dtype is None:
        return source.model
    if not isinstance(source.model, Path):
        raise typer.BadParameter(
            "--dtype applies only to checkpoints; have your function return the module in that dtype instead"
        )
    return qfx.open_checkpoint(source.model, dtype=getattr(torch, dtype), scratch=scratch)


def _require_formats(model: Any, config: QuantConfig, batches: list[Any], outputs: Iterable[Output]) -> None:
    """Raise an error before calibration if the format of an output does not support the result."""
    for output in outputs:
        if output.checked is not None:
            say(f"checking that {output} can hold the result")
            qfx.check(model, config, batches[:1], export=output.checked)


def _finished(
    qmodel: qfx.QuantizedModel, output: Output, tokenizer: Any, stream: bool, opset: int | None, batch: Any
) -> dict[str, Any]:
    """Write an output, and return its path, its size in bytes, and its difference from torch in quantization steps."""
    path = output.path
    if not stream:
        say(f"writing {output}")
        write(qmodel, output, tokenizer=tokenizer, opset=opset)
    else:
        write_tokenizer(tokenizer, path)
    verification = None
    if batch is not None and output.can_be_verified and _has_a_reader(qmodel, output):
        verification = qfx.verify(qmodel, path, [batch], runtime=_runtime(qmodel, output))
    return {
        "path": str(path),
        "kind": output.kind,
        "bytes": written_bytes(path),
        "max_steps": None if verification is None else verification.max_steps,
        "runtime": None if verification is None else verification.runtime,
    }


def _runtime(qmodel: qfx.QuantizedModel, output: Output) -> str | None:
    """Return the target's runtime for an ONNX file, if it is supported and installed; `None` selects the default."""
    runtime = qmodel.config.target.onnx.runtime
    return runtime if output.kind == "ONNX" and runtime in RUNNERS and find_spec(runtime) is not None else None


def _has_a_reader(qmodel: qfx.QuantizedModel, output: Output) -> bool:
    """Tell whether `verify` can read an output.

    transformers reads neither checkpoints with rotations nor float experts that are stored one by one.
    """
    if output.kind == "checkpoint" and is_rotated(read_configuration(output.path)):
        return False
    in_float = any(row.kind == "experts" and row.reason for row in qmodel.report())
    return output.kind != "checkpoint" or qmodel.config.target.checkpoints.stacks or not in_float


def _line(written: dict[str, Any]) -> str:
    steps = written["max_steps"]
    verified = ""
    if steps is not None:
        verified = f", verified: in {written['runtime']} at most {steps:.3f} quantization steps from torch on one batch"
    return f"wrote {written['path']} ({written['kind']}, {bytes_text(written['bytes'])}{verified})"


def _shapes(batch: Any) -> str:
    args, kwargs = split_batch(batch)
    named = [("", value) for value in args] + [(f"{name} ", value) for name, value in kwargs.items()]
    return ", ".join(
        f"{name}{tuple(value.shape)}" if isinstance(value, Tensor) else f"{name}{value!r}" for name, value in named
    )
