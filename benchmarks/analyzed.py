"""What `analyze` costs, and whether what it predicts comes true.

    python -m benchmarks.analyzed [--write]

Cost: ResNet-50 on 64 images, in forward passes of the float model over them, by CPU time of one thread on one core; of
the whole call, the capture of the model included. Goal: below 10 for each format.

Gains: networks with real weights (MiniLM, EasyOCR's recognizer, Resemblyzer's encoder of speakers; see
`benchmarks.real`), the networks of the tests, trained on digits, and ResNet-50 with random weights. For the three
operators that add most, what leaving each in float was predicted to gain beside what it gained. Goal: within a factor
of two for the first one.

`--write` updates `results/analyzed.md`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import estimate_batch_norm, images, one_core, table, timed
from benchmarks.experiment import experiment

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

FORMATS = ("int8_static", "int8_dynamic", "int4_weight_only")
"""Presets that are analyzed."""


def resnet() -> tuple[nn.Module, list[Tensor]]:
    """Return ResNet-50 and 64 images of 224 x 224 in batches of 16."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    data = images(64, 16, 224, seed=1)
    estimate_batch_norm(model, data[:1])
    return model.eval(), data


def networks() -> Iterator[tuple[str, nn.Module, list[Any]]]:
    """Yield trained networks and their data."""
    from networks import NETWORKS, trained

    from benchmarks.real import crnn, minilm, speaker

    for title, module in (("MiniLM", minilm), ("recognizer", crnn), ("speaker encoder", speaker)):
        real = module.load()
        yield title, real.model, real.calibration[:4]
    for name in NETWORKS:
        network = trained(name)
        yield f"{name}, digits", network.model, network.calibration[:4]


def passes(model: nn.Module, data: list[Tensor]) -> float:
    """Return the CPU seconds of a forward pass over the data."""

    def run() -> None:
        with torch.no_grad():
            for x in data:
                model(x)

    run()
    return timed(run).cpu


@experiment(page="analyzed.md")
def main() -> str:
    """Measure, and return the page."""
    costs, gains, firsts = [], [], dict[bool, list[bool]]({True: [], False: []})
    with one_core():
        model, data = resnet()
        once = passes(model, data)
        for name, network, batches in [*networks(), ("ResNet-50, 224", model, data)]:
            for preset in FORMATS:
                start = time.process_time()
                found = qfx.analyze(network, preset, batches)
                taken = time.process_time() - start
                print(found, flush=True)
                if network is model:
                    costs.append([name, preset, f"{once:.1f}", f"{taken:.1f}", f"{taken / once:.1f}"])
                for place, row in enumerate(found.rows[:3]):
                    if (gained := row.in_float) is not None and gained.measured is not None:
                        share, real = gained.gain / found.error, gained.measured / found.error
                        if not place:
                            firsts[network is not model].append(share / 2 <= real <= 2 * share)
                        gains.append([name, preset, row.name, f"{share:.1%}", f"{real:.1%}", gained.what])
    return f"""# What an analysis costs, and what comes true

`analyze` with its defaults: three operators measured, errors on the last 32 samples, ranges on all of the data.
Reproduce with `python -m benchmarks.analyzed`.

CPU seconds of one thread on one core, the capture of the model included; a forward pass is that of the float model over
the 64 images. Goal: fewer than 10.

{table(("model", "preset", "forward pass CPU s", "analysis CPU s", "forward passes"), costs)}

What leaving the operators in float that add most was predicted to gain, and what it gained, of the whole error. The
first operator's gain is within a factor of two of its prediction in {sum(firsts[True])} of {len(firsts[True])} analyses
of trained networks, and in {sum(firsts[False])} of {len(firsts[False])} of ResNet-50; the goal is all. Where many
operators add a few per cent each, gains of single ones are as large as what their roundings do by chance to those of
the others. ResNet-50 has random weights: it amplifies what is rounded first, which leaving out one operator does not
end.

{table(("model", "preset", "operator", "predicted", "measured", "left"), gains)}
"""


if __name__ == "__main__":
    main()
