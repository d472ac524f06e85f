"""Latency of exported INT8 files in ONNX Runtime, beside float and beside every setting of `quantize_static`.

    python -m benchmarks.latency [--rounds 30] [--write]

torchvision's ResNet-50 at 3 x 224 x 224 and a BERT of base size at 128 tokens, both with seeded random weights: time
does not depend on values. Every file is run with one sample on one thread and on two, the files in turn, five runs
at a time of which the median counts; a row gives the median over the rounds and the quartiles of the ratio to the
float file in the same round. The peer starts from the file that `torch.onnx.export` writes, prepared by its own
`quant_pre_process`. `--write` updates `results/latency.md`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
from onnxruntime import quantization as peer
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import Tensor, nn
from transformers import BertConfig, BertModel

import quark_fx as qfx
from benchmarks.common import estimate_batch_norm, images, table
from benchmarks.experiment import experiment
from benchmarks.onnx_sessions import Reader, latencies

OURS, FLOAT = "quark_fx int8_static", "float"
_UNSIGNED = {"activation_type": peer.QuantType.QUInt8, "weight_type": peer.QuantType.QInt8}
_PER_CHANNEL = _UNSIGNED | {"per_channel": True}
PEERS: dict[str, dict[str, Any]] = {
    "quantize_static, defaults": {},
    "quantize_static, QUInt8": _UNSIGNED,
    "quantize_static, per_channel, QUInt8": _PER_CHANNEL,
    "quantize_static, per_channel, QUInt8, products only": _PER_CHANNEL
    | {"op_types_to_quantize": ["Conv", "MatMul", "Gemm"]},
    "quantize_static, QOperator, per_channel, QUInt8": _PER_CHANNEL | {"quant_format": peer.QuantFormat.QOperator},
}
"""Options of the peer by row."""


@dataclass(frozen=True)
class Case:
    """A network and its calibration batches; `goal` is float's latency over ours that is asked for."""

    name: str
    build: Callable[[], tuple[nn.Module, list[dict[str, Tensor]]]]
    goal: float


def _resnet() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model, data = torchvision.models.resnet50().eval(), images(8, 4, 224, seed=1)
    estimate_batch_norm(model, data)
    return model, [{"x": batch} for batch in data]


def _bert() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    model = BertModel(BertConfig(), add_pooling_layer=False).eval()
    return model, [
        {"input_ids": torch.randint(0, 30522, (2, 128)), "attention_mask": torch.ones(2, 128, dtype=torch.int64)}
        for _ in range(4)
    ]


CASES = (Case("ResNet-50", _resnet, 2.5), Case("BERT-base, 128 tokens", _bert, 2.0))


def write_files(case: Case, directory: Path) -> dict[str, Path]:
    """Write the float file, ours and the peer's, and return them by row; of a setting that fails, none."""
    model, data = case.build()
    paths = {row: directory / f"{index}.onnx" for index, row in enumerate((FLOAT, OURS, *PEERS))}
    dynamic = {name: {i: torch.export.Dim.DYNAMIC for i in (0, 1) if i < 1 or name != "x"} for name in data[0]}
    torch.onnx.export(model, kwargs=data[0], f=paths[FLOAT], dynamic_shapes=dynamic, external_data=False, verbose=False)
    qfx.export.onnx(qfx.quantize(model, "int8_static", data, progress=False), paths[OURS])
    prepared = directory / "prepared.onnx"
    quant_pre_process(str(paths[FLOAT]), str(prepared), skip_symbolic_shape=True)
    for row, options in PEERS.items():
        try:
            peer.quantize_static(prepared, paths[row], Reader(data), **options)
        except Exception as error:  # whatever the peer raises is its row
            print(f"{case.name}, {row}: {type(error).__name__}: {str(error)[:200]}")
            del paths[row]
    return paths


def _row(name: str, times: Mapping[int, Mapping[str, list[float]]]) -> list[str]:
    cells = [name]
    for by_row in times.values():
        faster = [a / b for a, b in zip(by_row[FLOAT], by_row[name], strict=True)]
        low, _, high = statistics.quantiles(faster, n=4)
        cells += [
            f"{statistics.median(by_row[name]):.1f}",
            f"{statistics.median(faster):.2f} ({low:.2f} to {high:.2f})",
        ]
    return cells


def measure(case: Case, rounds: int) -> str:
    """Return the table of one network."""
    with tempfile.TemporaryDirectory() as directory:
        paths = write_files(case, Path(directory))
        sample = [value[:1] for value in case.build()[1][0].values()]
        times = {threads: latencies(paths, sample, threads, rounds) for threads in (1, 2)}
    best = {
        t: min((r for r in by_row if r not in (OURS, FLOAT)), key=lambda r: statistics.median(by_row[r]))
        for t, by_row in times.items()
    }
    lines = []
    for threads, by_row in times.items():
        over = [a / b for a, b in zip(by_row[OURS], by_row[best[threads]], strict=True)]
        low, middle, high = statistics.quantiles(over, n=4)
        lines.append(
            f"{threads} thread(s): ours over the peer's fastest ({best[threads].removeprefix('quantize_static, ')}) "
            f"{middle:.2f} ({low:.2f} to {high:.2f}); asked of float over ours: {case.goal}."
        )
    header = ("file", "ms, 1 thread", "float over it", "ms, 2 threads", "float over it")
    return "\n\n".join([f"## {case.name}", table(header, [_row(row, times) for row in paths]), "  \n".join(lines)])


@experiment(page="latency.md")
def main(rounds: Annotated[int, "rounds of 5 runs for each file"] = 30) -> str:
    """Measure, and return the page."""
    text = "\n\n".join(measure(case, rounds) for case in CASES)
    return f"""# Latency of INT8 files in ONNX Runtime

torchvision's ResNet-50 at 3 x 224 x 224 and a BERT of base size at 128 tokens, seeded random weights, one sample,
default settings of ONNX Runtime. Files are run in turn, five runs at a time of which the median counts; medians of
{rounds} rounds, quartiles of the ratios within a round in parentheses. The peer starts from the file of
`torch.onnx.export`, prepared by its `quant_pre_process`. Reproduce with `python -m benchmarks.latency`.

{text}
"""


if __name__ == "__main__":
    main()
