"""Every number format that goes to ONNX on five models: does the file hold, how far from torch, how large, how fast.

    python -m benchmarks.format_matrix [--only vit,llama] [--formats mxfp4] [--write]

ResNet-18 and MobileNetV2 (torchvision, seeded random weights, batch norm statistics of their data) and a reduced vision
transformer (4 layers of 128 channels, patches of 8) see images of 64 x 64; all-MiniLM-L6-v2 comes with its trained
weights, the Llama is the one `benchmarks.language_models` trains. Two batches of 4 calibrate, a third is compared.
Files pass `onnx.checker` with full checks and are loaded by ONNX Runtime; those of a vendor's nodes are run with the
nodes defined by standard operators, and not timed. Latency is that of the quantized file over the float one's
(`torch.onnx.export(dynamo=True, optimize=True)`), both run in turn on one thread, the median of the pairs' ratios.

A cell is measured once and kept in the cache folder (`QUARK_FX_CACHE`, default `~/.cache/quark_fx`), so that a run that
was stopped goes on. `--write` updates `results/format_matrix.md`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import onnx
import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import estimate_batch_norm, images, one_core, table
from benchmarks.experiment import experiment
from benchmarks.models import float_bytes
from quark_fx.export.runtime.session import open_session
from quark_fx.graph.signature import split_batch
from quark_fx.numbers.formats import FORMATS as NUMBER_FORMATS
from quark_fx.observers import MinMax
from quark_fx.presets import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge

RECIPE = 2
"""Part of the cells' names: raise it with every change to models, data or what is measured."""

PAIRS = 15
"""Runs of either file for its latency."""


@dataclass(frozen=True)
class Format:
    """A row of the table.

    Attributes:
        preset: the configuration it starts from.
        options: of `export.onnx`.
        changes: to the specs of weights and inputs.
    """

    preset: str
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> qfx.QuantConfig:
        """The configuration."""
        config = PRESETS[self.preset]
        specs = {"weight": config.weight, "input": config.input} if self.changes else {}
        return config.replace(**{name: spec and spec.replace(**self.changes) for name, spec in specs.items()})


_BLOCKS = [name for name in PRESETS if name.removesuffix("_weight_only") in qfx.block_formats.BLOCK_FORMATS]
_VITIS = {"format": "vitis"}
_FLOOR = {"scale": "e8m0_floor", "observer": MinMax()}
"""What the vendor's nodes compute: exponents of the largest magnitudes."""

FORMATS: dict[str, Format] = {
    **{
        preset: Format(preset)
        for preset in (
            *("int8_static", "int8_dynamic", "int8_weight_only", "int16_act_int8_weight", "int4_weight_only"),
            *("fp8_static", "xint8", "fp16", "bf16"),
        )
    },
    "int8_static, qoperator": Format("int8_static", {"format": "qoperator"}),
    "int4_weight_only, matmul_nbits": Format("int4_weight_only", {"format": "matmul_nbits"}),
    "xint8, vitis": Format("xint8", _VITIS),
    **{name: Format(name) for name in _BLOCKS},
    **{f"{name}, vitis": Format(name, _VITIS) for name in ("bfp16", "mx9", "mx6", "mx4", "mxint8")},
    **{
        f"{name} e8m0_floor, vitis": Format(name, _VITIS, _FLOOR)
        for name in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "mxint8")
    },
    **{preset: Format(preset) for preset in ("w4a16_rtn", "w8a8_dynamic", "w4a4_dynamic", "fp8_dynamic")},
    **{
        f"int8_weight_only {fmt}": Format("int8_weight_only", {"opset": 25} if "2" in fmt else {}, {"format": fmt})
        for fmt in ("int2", "uint2", "uint4", "uint8", "int16", "uint16")
    },
}
"""The rows, by what the table calls them."""

ELSEWHERE = {
    **dict.fromkeys(("int3", "uint3"), "weights alone, stored as those of 4 bits"),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in (5, 6, 7)), "stored as those of 8 bits"),
    "int32": "of biases: in `int8_static`; of others with the vendor's nodes alone",
    "uint32": "its zero points do not fit int32; the configuration refuses it",
    "int8_static_mse": "other scales than `int8_static`",
    **dict.fromkeys(("w4a16_gptq", "w4a16_awq", "w4a16_best"), "other codes and scales than `w4a16_rtn`"),
    "fp8_block": "codes of `fp8_dynamic`; a block's scale is repeated for its rows",
    **dict.fromkeys(("w4a8", "w4afp8"), "weights of `w4a16_rtn` beside activations of `w8a8_dynamic` or `fp8_dynamic`"),
    "nvfp4_best": "other codes and scales than `nvfp4`",
    "mxfp4_best": "other codes and scales than `mxfp4`, and a rotation at run time",
    "w4a16_rotated": "other codes and scales than `w4a16_rtn`, and rotations at run time",
    "w4a16_best_asym": "zero points beside the codes and scales of `w4a16_rtn`",
}
"""Why a number format or a preset has no row."""


def without_row() -> dict[str, str]:
    """Return every number format and every preset that has no row, with the reason.

    Raises:
        KeyError: if one has neither.
    """
    used = {row.preset for row in FORMATS.values() if not row.changes}
    for row in FORMATS.values():
        config = row.config
        overrides = [spec for override in config.overrides for spec in (override.weight, override.input)]
        specs = (config.weight, config.input, config.output, *overrides)
        used |= {str(spec.format) for spec in specs if isinstance(spec, qfx.TensorSpec)}
    return {name: ELSEWHERE[name] for name in (*NUMBER_FORMATS, *PRESETS) if name not in used}


@dataclass(frozen=True)
class Cell:
    """What was measured of one format on one model; `error` alone where it is refused.

    Attributes:
        error: the first line of the reason.
        output: largest difference of an output to torch, in steps.
        value: the same of a quantized value computed from the same codes; `None` if none is shown.
        worst: which value.
        share: of that value's elements that differ by more than half a step.
        bytes: of the file.
        size: over that of the float file.
        latency: over that of the float file.
    """

    error: str = ""
    output: float | None = None
    value: float | None = None
    worst: str = ""
    share: float | None = None
    bytes: int = 0
    size: float | None = None
    latency: float | None = None


Made = tuple[nn.Module, list[Any]]


def _vision(make: Callable[[], nn.Module]) -> Made:
    torch.manual_seed(0)
    model, batches = make(), images(12, 4, 64, seed=1)
    estimate_batch_norm(model, batches[:2])
    return model.eval(), batches


def _vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(64, 8, 4, 4, 128, 512, num_classes=100)
    nn.init.normal_(model.heads.head.weight, std=128**-0.5)  # zeros, by default
    module: nn.Module = model
    return module


def _minilm() -> Made:
    model, tokenizer = judge.encoder()
    return model, qfx.data.text_lines(sentences.CALIBRATION[:12], tokenizer, batch_size=4)


def _llama() -> Made:
    trained = language_models.load("llama")
    return trained.model, [{"input_ids": batch["input_ids"][:4, :64]} for batch in trained.calibration[:3]]


MODELS: dict[str, Callable[[], Made]] = {
    "resnet18": lambda: _vision(torchvision.models.resnet18),
    "mobilenet_v2": lambda: _vision(torchvision.models.mobilenet_v2),
    "vit": lambda: _vision(_vit),
    "minilm": _minilm,
    "llama": _llama,
}


@dataclass(frozen=True)
class Float:
    """A model, its batches and its float file."""

    model: nn.Module
    batches: list[Any]
    path: Path
    bytes: int


@cache
def prepared(name: str, folder: Path) -> Float:
    """Make a model and write its float file."""
    model, batches = MODELS[name]()
    graph = qfx.capture_graph(model, batches[0]).module
    path = folder / f"{name}.onnx"
    size, exported = float_bytes(model, graph, path)
    assert exported, f"{name} has no float file"
    return Float(model, batches, path, size)


def measure(name: str, row: Format, folder: Path) -> Cell:
    """Quantize, export, check, compare and time one model in one format."""
    given = prepared(name, folder)
    path = folder / "quantized.onnx"
    try:
        qmodel = qfx.quantize(given.model, row.config, given.batches[:2], progress=False)
        qfx.export.onnx(qmodel, path, **row.options)
    except qfx.QuarkError as error:
        return Cell(error=" ".join(str(error).split())[:300])
    onnx.checker.check_model(str(path), full_check=True)
    held_out = given.batches[2:]
    output = qfx.verify(qmodel, path, held_out).max_steps
    outputs = set(qmodel.signature.output_names)
    values = [d for d in qfx.verify(qmodel, path, held_out, per_node=True).differences if d.name not in outputs]
    worst = max(values, key=lambda d: d.steps, default=None)
    size = path.stat().st_size
    return Cell(
        output=output,
        value=worst.steps if worst else None,
        worst=worst.name if worst and worst.steps else "",
        share=worst.share if worst else None,
        bytes=size,
        size=size / given.bytes,
        latency=None if row.options.get("format") == "vitis" else latency(given, qmodel, path),
    )


def latency(given: Float, qmodel: qfx.QuantizedModel, path: Path) -> float:
    """Return the median ratio of the quantized file's time to the float file's, run in turn."""
    leaves = [leaf for leaf in qmodel.signature.flatten(*split_batch(given.batches[2])) if isinstance(leaf, Tensor)]

    def one_thread(options: Any) -> None:
        options.intra_op_num_threads = 1

    def runner(file: Path) -> Callable[[], object]:
        session = open_session(file, configure=one_thread)
        feed = {i.name: leaf.numpy() for i, leaf in zip(session.get_inputs(), leaves, strict=True)}
        return lambda: session.run(None, feed)

    ours, theirs = runner(path), runner(given.path)
    ours(), theirs()
    return statistics.median(_seconds(ours) / _seconds(theirs) for _ in range(PAIRS))


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _cell_file(name: str, label: str) -> Path:
    row = FORMATS[label]
    text = json.dumps([RECIPE, name, row.config.to_dict(), row.options, torch.__version__, onnxruntime.__version__])
    folder = language_models.cache_folder().parents[1] / "format_matrix"
    return folder / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def cells(names: list[str], labels: list[str], *, fresh: bool) -> Iterator[tuple[str, str, Cell | None]]:
    """Yield every cell, measured now if it is not kept and `fresh`; `None` if it is missing."""
    with tempfile.TemporaryDirectory() as folder, one_core() if fresh else contextlib.nullcontext():
        for name in names:
            for label in labels:
                file = _cell_file(name, label)
                if not file.exists() and fresh:
                    start = time.perf_counter()
                    cell = measure(name, FORMATS[label], Path(folder))
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text(json.dumps(asdict(cell)))
                    print(f"{name}, {label}: {cell}, {time.perf_counter() - start:.0f} s", flush=True)
                yield name, label, Cell(**json.loads(file.read_text())) if file.exists() else None


def _steps(steps: float | None) -> str:
    if steps is None:
        return "–"
    return "0" if steps == 0 else f"{steps:.2g}" if steps >= 0.01 else "< 0.01"


def page(results: list[tuple[str, str, Cell | None]]) -> str:
    """Return the page of the results."""
    notes: list[str] = []
    parts = []
    for name in dict.fromkeys(name for name, _, _ in results):
        rows = []
        for _, label, cell in (result for result in results if result[0] == name):
            if cell is None:
                rows.append((label, "not measured", "", "", ""))
            elif cell.error:
                if cell.error not in notes:
                    notes.append(cell.error)
                rows.append((label, f"refused [{notes.index(cell.error) + 1}]", "", "", ""))
            else:
                assert cell.size is not None
                speed = f"{cell.latency:.2f}" if cell.latency else "–"
                rows.append((label, _steps(cell.output), _steps(cell.value), f"{cell.size:.3f}", speed))
        header = ("format", "output, steps", "worst value, steps", "size / float", "latency / float")
        parts.append(f"## {name}\n\n{table(header, rows)}")
    footnotes = "\n".join(f"{i}. {note}" for i, note in enumerate(notes, 1)) or "None."
    reasons: dict[str, list[str]] = {}
    for missing, reason in without_row().items():
        reasons.setdefault(reason, []).append(f"`{missing}`")
    absent = "\n".join(f"- {', '.join(names)}: {reason}." for reason, names in reasons.items())
    return f"""# Formats in ONNX

Every number format that goes to ONNX; a row without a name of a format is `format="qdq"`. Every file passes
`onnx.checker` with full checks and loads in ONNX Runtime; the vendor's nodes run as functions of standard operators.
ResNet-18 and MobileNetV2 have random weights, images are 64 × 64; `vit` is a vision transformer of 4 layers and 128
channels; MiniLM is the sentence encoder; the Llama is a small one trained for these measurements. A batch of 4, one
thread. Reproduce with `python -m benchmarks.format_matrix`.

- *output, steps*: largest difference of an output between ONNX Runtime and torch, in steps of its quantizer or 255ths
  of its range; differences of values add up on the way there.
- *worst value, steps*: of the quantized values, each computed from the same codes, the one that differs most. `1`: sums
  in another order fell on the other side of a tie. `–`: the format shows no codes. Thousands for MXFP8 E5M2 on MiniLM
  are `Gelu` far below zero, whose kernels differ by a millionth of the largest value of the block: E5M2 resolves 2⁻³².
- *size*, *latency*: of the file and of a run, over those of the float model's file. The presets of block formats leave
  embedding and head in float; the vendor's nodes for blocks round float weights when they run, so that such files stay
  as large.

{chr(10).join(f"{part}{chr(10)}" for part in parts)}
## Refused

{footnotes}

## Without a row

{absent}

A cell is measured once and kept; the load average is that when this page was written.
"""


@experiment(page="format_matrix.md")
def main(
    only: Annotated[str | None, "models, separated by commas"] = None,
    formats: Annotated[str | None, "formats, separated by semicolons"] = None,
    kept: Annotated[bool, "measure nothing"] = False,
) -> str:
    """Measure, and return the page."""
    names = only.split(",") if only else list(MODELS)
    labels = formats.split(";") if formats else list(FORMATS)
    results = list(cells(names, labels, fresh=not kept))
    return page(results)


if __name__ == "__main__":
    main()
