"""Integer operators beside pairs: time in ONNX Runtime, nodes in integers, and the difference to torch.

    python -m benchmarks.onnx_formats [--write]

ResNet-18 at 224 × 224 with random weights, one image, one thread; the fastest of 30 runs. `--write` updates the table
in `docs/onnx.md`.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime
import torch
import torchvision

import quark_fx as qfx
from benchmarks.common import ROOT, environment, table

PRESETS = ("int8_static", "xint8", "int8_dynamic")
FORMATS = ("qdq", "qoperator")
RUNS = 30


def milliseconds(file: Path) -> float:
    """Return the time of the fastest run on one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(file), options)
    feed = {session.get_inputs()[0].name: np.random.default_rng(0).standard_normal((1, 3, 224, 224), np.float32)}
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def measure(preset: str, folder: Path) -> tuple[str, ...]:
    """Return the row of a preset."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    data = [torch.randn(2, 3, 224, 224) for _ in range(2)]
    qmodel = qfx.quantize(model, preset, data, progress=False)
    times, shares, steps = [], [], []
    for name in FORMATS:
        file = qfx.export.onnx(qmodel, folder / f"{name}.onnx", format=name)
        report = file.report()
        times.append(f"{milliseconds(file):.0f}")
        shares.append(f"{len(report.quantized)} of {len(report.nodes)}")
        steps.append(f"{qfx.verify(qmodel, file, [data[0][:1]]).max_steps:.2g}")
    return f"`{preset}`", *times, ", ".join(shares), ", ".join(steps)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/onnx.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measure(preset, Path(folder)) for preset in PRESETS]
    text = table(("preset", '`"qdq"`', '`"qoperator"`', "nodes in integers", "difference"), rows)
    print(text, environment(), sep="\n\n")
    if arguments.write:
        page = ROOT / "docs" / "onnx.md"
        pattern = re.compile(r'^\| preset +\| `"qdq"`.*?(?=\n\n)', re.DOTALL | re.MULTILINE)
        page.write_text(pattern.sub(lambda _: text, page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
