"""Formats of ONNX files in ONNX Runtime: time of a run, nodes in integers, and the difference to torch.

    python -m benchmarks.onnx_formats [--write]

Random weights, one image or row, one thread; times are those of the fastest of 30 runs. `--write` updates
`results/onnx_formats.md`.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import table
from benchmarks.experiment import experiment
from quark_fx.config.quant_config import Granularity
from quark_fx.numbers.formats import INT2, INT4, INT8, IntFormat

PRESETS = ("int8_static", "xint8", "int8_dynamic")
FORMATS = ("qdq", "qoperator")
WEIGHTS = ((INT4, 32), (INT4, 128), (INT8, 128), (INT2, 32))
"""Format of the codes, and the size of a group."""

RUNS = 30


def milliseconds(file: Path, x: Tensor) -> float:
    """Return the time of the fastest run on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options)
    feed = {session.get_inputs()[0].name: x.numpy().astype(np.float32)}
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def operators(preset: str, folder: Path) -> tuple[str, ...]:
    """Return the row of a preset for ResNet-18."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    data = [torch.randn(2, 3, 224, 224) for _ in range(2)]
    qmodel = qfx.quantize(model, preset, data, progress=False)
    times, shares, steps = [], [], []
    for name in FORMATS:
        file = qfx.export.onnx(qmodel, folder / f"{name}.onnx", format=name)
        report = file.report()
        times.append(f"{milliseconds(file, data[0][:1]):.0f}")
        shares.append(f"{len(report.quantized)} of {len(report.nodes)}")
        steps.append(f"{qfx.verify(qmodel, file, [data[0][:1]]).max_steps:.2g}")
    return f"`{preset}`", *times, ", ".join(shares), ", ".join(steps)


def levels(codes: IntFormat, size: int, folder: Path) -> tuple[str, ...]:
    """Return the row of weights in groups for two matrix products."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)).eval()
    data = [torch.randn(8, 2048)]
    config = qfx.QuantConfig(weight=qfx.TensorSpec(format=codes, granularity=Granularity.GROUP, group_size=size))
    qmodel = qfx.quantize(model, config, data, progress=False)
    times, steps, bytes_ = [], [], 0
    for level in (0, 4):
        file = qfx.export.onnx(qmodel, folder / f"{level}.onnx", format="matmul_nbits", accuracy_level=level)
        times.append(f"{milliseconds(file, data[0][:1]):.2g}")
        steps.append(f"{qfx.verify(qmodel, file, data).max_steps:.2g}")
        bytes_ = file.stat().st_size
    return f"{codes} in groups of {size}", *times, *steps, f"{bytes_ / 2**20:.1f}"


@experiment(page="onnx_formats.md")
def main() -> str:
    """Measure, and return the page."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [operators(preset, Path(folder)) for preset in PRESETS]
        weights = [levels(codes, size, Path(folder)) for codes, size in WEIGHTS]
    first = ("preset", '`"qdq"`, ms', '`"qoperator"`, ms', "nodes in integers", "difference, steps")
    second = ("weights", "level 0, ms", "level 4, ms", "difference at 0", "difference at 4", "file, MiB")
    return f"""# Integer operators and weight-only kernels

Time of the fastest of {RUNS} runs in ONNX Runtime on one thread, and the largest difference of an output to torch.
Weights are random. Reproduce with `python -m benchmarks.onnx_formats`.

## Pairs and integer operators

ResNet-18, one image of 224 × 224. More integers are not always faster: signed activations (`xint8`) and `ConvInteger`
(`int8_dynamic`) lack fast kernels. Nodes and differences are given for `"qdq"`, then for `"qoperator"`; a difference is
in quantization steps, or in 255ths of the output's range if the output is in float.

{table(first, rows)}

## Accuracy levels of MatMulNBits

Two matrix products of 2048 × 2048, one row, `format="matmul_nbits"`. Differences are in 255ths of the output's range.

{table(second, weights)}
"""


if __name__ == "__main__":
    main()
