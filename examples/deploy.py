"""Deploy a CNN in int8: report, verification, latency, mixed precision, processors without VNNI.

    pip install -e ".[examples]"
    python examples/deploy.py [directory]

The network is that of quickstart.py, trained on scikit-learn's digits when the script starts. Files are written to
`directory` (default: a temporary one).
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import onnxruntime
import torch
from quickstart import train
from sklearn.datasets import load_digits
from torch import Tensor

import quark_fx as qfx
from quark_fx.evaluation import Classification


def main(directory: Path, *, epochs: int = 12) -> None:
    torch.manual_seed(0)
    data, target = load_digits(return_X_y=True)
    images, labels = torch.from_numpy(data).float().reshape(-1, 1, 8, 8) / 16, torch.from_numpy(target)
    order = torch.randperm(len(images))
    training, validation = order[:900], order[900:]
    model = train(images[training], labels[training], epochs)
    calibration, batches = images[training].split(60), images[validation].split(60)
    task = Classification([(images[validation], labels[validation])])

    # 1. int8: what is quantized, what runs in integers, and whether ONNX Runtime computes what PyTorch does.
    qmodel = qfx.quantize(model, "int8_static", calibration)
    print(qmodel.report())
    file = qfx.export.onnx(qmodel, directory / "int8.onnx")
    print(file.report())
    print("\nlargest difference of a value to PyTorch, in steps:", end=" ")
    print(f"{qfx.verify(qmodel, file, batches[:2], per_node=True).max_steps:.2f}")

    # 2. Latency beside float.
    any_batch = ({0: torch.export.Dim.DYNAMIC},)
    float_file = directory / "float.onnx"
    torch.onnx.export(model, (images[:2],), float_file, dynamic_shapes=any_batch, external_data=False, verbose=False)
    ms = latency([float_file, directory / "int8.onnx"], images[:1])
    print(f"\nms per image on one thread: float {ms[0]:.3f}, int8 {ms[1]:.3f}, {ms[0] / ms[1]:.1f} times as fast")

    # 3. Mixed precision: 2 bits everywhere lose accuracy. `analyze` says where, `search` spends 3.5 bits on average.
    int2 = qfx.QuantConfig.from_dict({"preset": "int8_static", "weight": {"format": "int2"}})
    analysis = qfx.analyze(model, int2, calibration)
    print(
        "\nint2 loses most in "
        + ", ".join(f"{row.name} ({row.error / analysis.error:.0%} of the error)" for row in analysis.rows[:3])
    )
    mixed = qfx.search(model, ["int8_static", "int4", "int2"], budget=qfx.Budget(bits=3.5), data=calibration)
    print(mixed)
    for name, config in (("int8", qfx.presets.INT8_STATIC), ("int2", int2), ("mixed", mixed.config)):
        q = qfx.quantize(model, config, calibration, progress=False)
        accuracy = qfx.evaluate(q, task)["accuracy"]
        print(f"{name:6} accuracy {accuracy:.2%}   {str(q.report()).splitlines()[-1]}")

    # The least error that any mixture of these formats has, by its bits, and what was measured.
    figure = mixed.figures()["curve"]
    figure.savefig(directory / "curve.png")

    # 4. Processors without VNNI: int8_static is exact there. With all codes of int8 some nodes are not.
    vnni = qfx.quantize(model, {"preset": "int8_static", "target": "onnx_vnni"}, calibration, progress=False)
    for name, q in (("onnx", qmodel), ("onnx_vnni", vnni)):
        saturating = qfx.export.onnx(q, directory / f"{name}.onnx").report().saturating
        print(f"target={name!r}: {len(saturating)} nodes can be wrong without VNNI")


def latency(files: list[Path], x: Tensor, rounds: int = 20) -> list[float]:
    """Return the milliseconds that each file takes for `x` on one thread: the median of rounds that run all in turn."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    sessions = [onnxruntime.InferenceSession(str(file), options) for file in files]
    feeds = [{session.get_inputs()[0].name: x.numpy()} for session in sessions]
    times: list[list[float]] = [[] for _ in files]
    for _ in range(rounds):
        for session, feed, taken in zip(sessions, feeds, times, strict=True):
            start = time.perf_counter()
            for _ in range(20):
                session.run(None, feed)
            taken.append((time.perf_counter() - start) * 1000 / 20)
    return [statistics.median(taken) for taken in times]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        target_directory = Path(sys.argv[1])
        target_directory.mkdir(parents=True, exist_ok=True)
        main(target_directory)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
