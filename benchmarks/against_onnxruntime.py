"""Side by side with `onnxruntime.quantization.quantize_static` on ResNet-18: cost, memory, accuracy, latency.

    python -m benchmarks.against_onnxruntime [--rounds 3] [--latency-rounds 40] [--write]

torchvision's ResNet-18 with seeded random weights and batch norm statistics of its data, 32 calibration images of
3 x 224 x 224 in batches of 8, int8 weights. "From module to file" is `quantize` and `export.onnx` for quark_fx, and
`torch.onnx.export` (defaults, and a dynamic batch as ours has) and `quantize_static` for the peer: both start from
the same `nn.Module` and end with a QDQ file. Both run in one process, in turn (A B A B …) after one warm-up of each,
bound to one core, so that CPU seconds are work and not the spinning of idle pools. Peak memory is `ru_maxrss` of a
process that does one of the two and nothing else. Accuracy is the SQNR of the file's logits in ONNX Runtime against
the float model's on 32 images not calibrated with. Latency is batch 1 in ONNX Runtime with its default settings,
the files in turn. The peer's rows beside its defaults are measured once. `--write` updates
`results/against_onnxruntime.md`.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
from onnxruntime import quantization as peer
from torch import Tensor

import quark_fx as qfx
from benchmarks.common import (
    Seconds,
    estimate_batch_norm,
    images,
    one_core,
    spread,
    table,
    timed,
)
from benchmarks.experiment import Option, experiment
from benchmarks.onnx_sessions import Reader, latencies
from quark_fx.evaluation import compare

OURS, PEER = "quark_fx int8_static", "quantize_static, defaults"
PER_CHANNEL = {"per_channel": True, "activation_type": peer.QuantType.QUInt8}
PEERS: dict[str, dict[str, Any]] = {
    PEER: {},
    "quantize_static, per_channel, QUInt8": PER_CHANNEL,
    "quantize_static, per_channel, QUInt8, Percentile": {
        **PER_CHANNEL,
        "calibrate_method": peer.CalibrationMethod.Percentile,
    },
}
"""Options of the peer by row."""


def network(*, estimate: bool = True) -> tuple[torch.nn.Module, list[Tensor]]:
    """Return ResNet-18 and its calibration batches; without batch norm statistics if only its size matters."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18().eval()
    data = images(32, 8, 224, seed=1)
    if estimate:
        estimate_batch_norm(model, data)
    return model, data


def by_us(model: torch.nn.Module, data: Sequence[Tensor], path: Path) -> None:
    """Write the quantized `model` to `path` with quark_fx."""
    qfx.export.onnx(qfx.quantize(model, "int8_static", data, progress=False), path)


def by_peer(model: torch.nn.Module, data: Sequence[Tensor], path: Path, options: Mapping[str, Any]) -> None:
    """Write the quantized `model` to `path` with ONNX Runtime's quantizer."""
    exported = path.with_suffix(".float.onnx")
    batch = torch.export.Dim.DYNAMIC
    torch.onnx.export(model, (data[0],), exported, dynamic_shapes={"x": {0: batch}}, verbose=False)
    peer.quantize_static(exported, path, Reader([{"x": batch} for batch in data]), **options)


def writers(model: torch.nn.Module, data: Sequence[Tensor], directory: Path) -> dict[str, Callable[[], None]]:
    """Return, by row, what writes the file of that row, which is `path_of(directory, row)`."""
    result: dict[str, Callable[[], None]] = {OURS: lambda: by_us(model, data, path_of(directory, OURS))}
    for row, options in PEERS.items():
        result[row] = lambda row=row, options=options: by_peer(model, data, path_of(directory, row), options)  # type: ignore[misc]
    return result


def path_of(directory: Path, row: str) -> Path:
    """Return the file a row writes."""
    return directory / f"{''.join(c if c.isalnum() else '_' for c in row)}.onnx"


def peak_memory(row: str) -> float:
    """Return the peak resident memory in MiB of a process that writes the file of `row` ("" for none) once."""
    command = [sys.executable, "-m", "benchmarks.against_onnxruntime", "--memory", row]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]) / 1024


def accuracy(model: torch.nn.Module, path: Path) -> float:
    """Return the SQNR in dB of the file's logits on images that were not calibrated with."""
    (logits,) = compare(model, path, images(32, 8, 224, seed=2))
    return logits.sqnr


def measure(directory: Path, rounds: int, latency_rounds: int) -> str:
    """Return the tables."""
    # First, as a child's ru_maxrss is at least what its parent occupied when it started.
    empty, memory = peak_memory(""), {row: peak_memory(row) for row in (OURS, *PEERS)}
    model, data = network()
    write = writers(model, data, directory)
    cost: dict[str, list[Seconds]] = {row: [] for row in write}
    with one_core():
        for row in (OURS, PEER):
            timed(write[row])
        for _ in range(rounds):
            for row in (OURS, PEER):
                cost[row].append(timed(write[row]))
        for row in write:
            if not cost[row]:
                cost[row].append(timed(write[row]))
    paths = {row: path_of(directory, row) for row in write}
    paths["float"] = path_of(directory, PEER).with_suffix(".float.onnx")
    sample = images(1, 1, 224, seed=3)
    latency = {threads: latencies(paths, sample, threads, latency_rounds) for threads in (1, 2)}
    rows = []
    for row, path in paths.items():
        external = path.with_name(f"{path.name}.data")
        size = path.stat().st_size + (external.stat().st_size if external.exists() else 0)
        rows.append(
            [
                row if row != "float" else "float, as exported for the peer",
                spread([c.cpu for c in cost[row]], 1) if row in cost else "–",
                spread([c.wall for c in cost[row]], 1) if row in cost else "–",
                f"{memory[row]:.0f}" if row in memory else "–",
                f"{accuracy(model, path):.1f}",
                f"{size / 2**20:.1f}",
                *(f"{statistics.median(latency[threads][row]):.1f}" for threads in latency),
            ]
        )
    header = ("quantizer", "CPU s", "wall s", "peak MiB", "SQNR dB", "file MiB", "ms, 1 thread", "ms, 2 threads")
    ratios = [
        ["CPU time, module to file", spread([a.cpu / b.cpu for a, b in zip(cost[OURS], cost[PEER], strict=True)])],
        ["wall time, module to file", spread([a.wall / b.wall for a, b in zip(cost[OURS], cost[PEER], strict=True)])],
        ["peak memory", f"{memory[OURS] / memory[PEER]:.2f}"],
        ["peak memory above imports and model", f"{(memory[OURS] - empty) / (memory[PEER] - empty):.2f}"],
    ]
    for threads, times in latency.items():
        for row in PEERS:
            paired = [a / b for a, b in zip(times[OURS], times[row], strict=True)]
            middle = statistics.median(times[OURS]) / statistics.median(times[row])
            low, _, high = statistics.quantiles(paired, n=4)
            ratios.append(
                [f"latency, {threads} thread(s), over {row}", f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"]
            )
    heading = "Ours over the peer's (its defaults unless named):"
    return "\n\n".join([table(header, rows), heading, table(("what", "ratio"), ratios)])


@experiment(page="against_onnxruntime.md")
def main(
    rounds: Annotated[int, "conversions of each, after one warm-up"] = 3,
    latency_rounds: Annotated[int, "rounds of 5 runs for each file"] = 40,
    memory: Annotated[
        str | None, Option("write one row's file and print the peak memory in KiB", metavar="ROW")
    ] = None,
) -> str | None:
    """Measure, and return the page."""
    with tempfile.TemporaryDirectory() as directory:
        if memory is not None:
            torch.set_num_threads(1)
            # Estimating statistics takes a forward pass, whose memory would hide that of calibration.
            model, data = network(estimate=False)
            if memory:
                writers(model, data, Path(directory))[memory]()
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
            return None
        text = measure(Path(directory), rounds, latency_rounds)
    return f"""# Side by side with ONNX Runtime's quantizer

torchvision's ResNet-18 at 3 x 224 x 224, seeded random weights, batch norm statistics of its data, 32 calibration
images in batches of 8. From `nn.Module` to QDQ file: `quantize` and `export.onnx` here, `torch.onnx.export` (with a
dynamic batch) and `quantize_static` there, in one process, in turn, bound to one core; median and range of
{rounds} rounds after a warm-up, one round for the rows beside the peer's defaults. Peak memory is that of a
process that does nothing else. SQNR is of the logits in ONNX Runtime against the float model's on 32 other images.
Latency is of batch 1 in ONNX Runtime with its default settings, the files in turn. Reproduce with
`python -m benchmarks.against_onnxruntime`.

{text}
"""


if __name__ == "__main__":
    main()
