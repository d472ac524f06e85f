"""Recurrent layers in ONNX Runtime: the time of int8 weights and of integer kernels over that of float.

    python -m benchmarks.recurrent [--rounds 5] [--write]

One layer of hidden size 256 over 80 steps, seeded random weights, one thread. Sessions run in turn; a cell is the
median ratio of a round's latencies. *int8 weights* is `int8_weight_only`, *integers* is `int8_dynamic` with
`format="qoperator"`, which only LSTMs have. `--write` updates `results/recurrent.md`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import quark_fx as qfx
from benchmarks.common import table
from benchmarks.experiment import experiment
from benchmarks.onnx_sessions import latencies

LAYERS: dict[str, tuple[type[nn.LSTM | nn.GRU], int, bool]] = {
    "LSTM, 40 inputs": (nn.LSTM, 40, False),
    "LSTM, 256 inputs, both directions": (nn.LSTM, 256, True),
    "GRU, 256 inputs, both directions": (nn.GRU, 256, True),
}
"""Class, inputs, and whether it runs in both directions."""

STEPS, HIDDEN, BATCHES = 80, 256, (1, 16)


def _files(layer: str, batch: torch.Tensor, folder: Path) -> dict[str, Path]:
    kind, inputs, both = LAYERS[layer]
    torch.manual_seed(0)
    model = kind(inputs, HIDDEN, bidirectional=both, batch_first=True).eval()
    weight_only = qfx.presets.INT8_WEIGHT_ONLY
    configs = {
        "float": (weight_only.replace(exclude=("*",)), None),
        "int8 weights": (weight_only, None),
        "integers": (qfx.presets.INT8_DYNAMIC, "qoperator"),
    }
    if kind is not nn.LSTM:
        del configs["integers"]
    made = {}
    for name, (config, form) in configs.items():
        qmodel = qfx.quantize(model, config, [batch], progress=False)
        made[name] = Path(qfx.export.onnx(qmodel, folder / f"{name}.onnx", format=form))
    return made


def _rows(rounds: int) -> Iterator[list[str]]:
    for layer, (_, inputs, _) in LAYERS.items():
        for size in BATCHES:
            batch = torch.randn(size, STEPS, inputs, generator=torch.Generator().manual_seed(1))
            with tempfile.TemporaryDirectory() as folder:
                found = latencies(_files(layer, batch, Path(folder)), [batch], 1, rounds)
            cells = [f"{statistics.median(found['float']):.2f}"]
            for name in ("int8 weights", "integers"):
                ratios = [b / a for a, b in zip(found["float"], found.get(name, ()), strict=False)]
                cells.append(f"{statistics.median(ratios):.2f}" if ratios else "–")
            print(layer, size, *cells, flush=True)
            yield [layer, str(size), *cells]


@experiment(page="recurrent.md")
def main(rounds: int = 5) -> str:
    """Measure, and return the page."""
    header = ("layer", "batch", "float, ms", "int8 weights over float", "integers over float")
    return f"""# Recurrent layers in ONNX Runtime

One layer of hidden size 256 over 80 steps, one thread; below 1 is faster than float. Reproduce with
`python -m benchmarks.recurrent`.

{table(header, list(_rows(rounds)))}
"""


if __name__ == "__main__":
    main()
