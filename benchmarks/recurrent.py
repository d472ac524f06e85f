"""Recurrent layers in ONNX Runtime: the time of int8 weights and of integer kernels over that of float.

    python -m benchmarks.recurrent [--rounds 5] [--write]

One layer of hidden size 256 over 80 steps, seeded random weights, one thread. Sessions run in turn; a cell is the
median ratio of a round's latencies. *int8 weights* is `int8_weight_only`, *integers* is `int8_dynamic` with
`format="qoperator"`, which only LSTMs have. `--write` updates `results/recurrent.md`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import quark_fx as qfx
from benchmarks.common import environment, publish, table
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


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="update results/recurrent.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    header = ("layer", "batch", "float, ms", "int8 weights over float", "integers over float")
    text = f"""# Recurrent layers in ONNX Runtime

One layer of hidden size 256 over 80 steps, one thread; below 1 is faster than float. Reproduce with
`python -m benchmarks.recurrent`.

{table(header, list(_rows(arguments.rounds)))}

{environment()}
"""
    publish(text, "recurrent.md" if arguments.write else None)


if __name__ == "__main__":
    main()
