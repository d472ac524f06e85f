"""What the passes that equalize, correct and learn are worth: accuracy on trained networks at 8 bits and below.

    python -m benchmarks.learned [--networks resnet depthwise vit minilm "vit, letters" ...] [--seeds 5] [--kept]
        [--write]

The networks are those of `benchmarks.composed_digits` (100 classes, 4,000 held-out images, one of which is 0.025 %) and
the sentence encoder all-MiniLM-L6-v2 (100 times the mean cosine between the embeddings of 64 held-out sentences before
and after). Results are kept beside the networks, so that an interrupted run continues and several may run at once; to
measure again, remove that folder. `--write` updates the sections of these networks in `results/learned.md`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from torch import nn

import quark_fx as qfx
from benchmarks import composed_digits
from benchmarks.common import environment, sections_of, table
from benchmarks.experiment import Option, experiment
from quark_fx import Granularity, Override, QuantConfig, Symmetry, Target, TensorSpec
from quark_fx.engine.blocks import Unit
from quark_fx.evaluation import Embedding
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.numbers.formats import INT2, INT3, INT4, INT8, UINT3, UINT4, UINT8, IntFormat
from quark_fx.observers import MinMax, Mse, Observer
from quark_fx.passes import AdaQuant, AdaRound, BiasCorrection, CrossLayerEqualization, SmoothQuant
from quark_fx.presets import INT8_STATIC, XINT8

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge

_PER_TENSOR = INT8_STATIC.replace(weight=TensorSpec(format=INT8))
_POWER_OF_TWO = XINT8.weight
_SHIFTED = XINT8.replace(passes=INT8_STATIC.passes, target=Target.ONNX)
"""Power-of-two scales alone, without what is peculiar to a DPU."""


def _with_activations(config: QuantConfig, spec: TensorSpec | None) -> QuantConfig:
    return config.replace(input=spec, output=spec)


def _low(weight: IntFormat, activation: IntFormat, observer: Observer) -> QuantConfig:
    """Return weights per channel, and activations where a weighted operator reads them."""
    channel, asymmetric = Granularity.CHANNEL, Symmetry.ASYMMETRIC
    return INT8_STATIC.replace(
        weight=TensorSpec(format=weight, granularity=channel, symmetry=asymmetric, observer=observer),
        input=TensorSpec(format=activation, observer=observer),
        output=None,
        bias=None,
        target=Target.TORCH,
    )


CONFIGS: dict[str, QuantConfig] = {
    "W8A8 per tensor": _PER_TENSOR,
    "W8A8 per tensor, MSE": _with_activations(_PER_TENSOR, TensorSpec(format=UINT8, observer=Mse())),
    "W8A8 power of two": _SHIFTED,
    "W8A8 power of two, MSE": _with_activations(_SHIFTED, _POWER_OF_TWO),
    "W4A8": _low(INT4, UINT8, Mse()),
    "W4A4, min-max": _low(INT4, UINT4, MinMax()),
    "W4A4": _low(INT4, UINT4, Mse()),
    "W3A3": _low(INT3, UINT3, Mse()),
    "W2A8": _low(INT2, UINT8, Mse()),
}
"""Ranges are of smallest squared error below 8 bits and where it says so, minimum and maximum elsewhere."""

CLE = CrossLayerEqualization()

PASSES: dict[str, tuple[GraphPass, ...]] = {
    "none": (),
    "SmoothQuant": (SmoothQuant(),),
    "CLE": (CLE,),
    "CLE + bias": (CLE, BiasCorrection()),
    "CLE + AdaRound": (CLE, AdaRound()),
    "AdaQuant": (AdaQuant(unit=Unit.BLOCK),),
    "QDrop": (CLE, AdaRound(unit=Unit.BLOCK, drop=0.5, scale_rate=0.01, iterations=250)),
}

_LEARNED = ("none", "CLE + AdaRound")
_ALL = (*_LEARNED, "AdaQuant", "QDrop")

CELLS: dict[str, dict[str, Sequence[str]]] = {
    "depthwise": {
        "W8A8 per tensor": ("none", "CLE", "CLE + bias", "CLE + AdaRound"),
        "W8A8 power of two": ("none", "CLE"),
        "W8A8 power of two, MSE": ("none", "CLE + bias", "CLE + AdaRound"),
        "W4A8": _LEARNED,
        "W4A4, min-max": ("none",),
        "W4A4": ("none", "CLE", "CLE + AdaRound", "AdaQuant", "QDrop"),
        "W3A3": _LEARNED,
        "W2A8": _LEARNED,
    },
    "resnet": {
        "W8A8 per tensor": ("none", "CLE"),
        "W8A8 power of two, MSE": ("none", "CLE + bias"),
        "W4A8": _LEARNED,
        "W4A4, min-max": ("none",),
        "W4A4": _LEARNED,
        "W3A3": _ALL,
        "W2A8": _ALL,
    },
    "vit": {
        "W8A8 per tensor": ("none", "SmoothQuant"),
        "W8A8 power of two, MSE": ("none", "CLE + bias"),
        "W4A8": _LEARNED,
        "W4A4, min-max": ("none",),
        "W4A4": _ALL,
        "W3A3": _LEARNED,
        "W2A8": _ALL,
    },
    "depthwise, letters": {
        "W8A8 power of two, MSE": ("none", "CLE + bias", "CLE + AdaRound"),
        "W4A4": ("none", "CLE + AdaRound", "QDrop"),
    },
    "resnet, letters": {"W4A4": _LEARNED, "W2A8": _LEARNED},
    "vit, letters": {"W8A8 power of two, MSE": ("none", "CLE + bias"), "W4A4": _LEARNED, "W2A8": _ALL},
    "minilm": {
        "W8A8 per tensor": ("none", "SmoothQuant"),
        "W8A8 power of two, MSE": ("none", "CLE + bias"),
        "W4A8": _LEARNED,
        "W4A4": _LEARNED,
    },
}
"""What is measured of each network: where 8 bits lose nothing, there is little to compare."""


def ends_at_eight_bits(config: QuantConfig, model: nn.Module) -> QuantConfig:
    """Keep the first and the last operator at 8 bits, as BRECQ, QDrop and AdaQuant do."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    weight = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
    ends = (names[0], names[-1])
    overrides = tuple(Override(pattern=name, weight=weight, input=TensorSpec(format=UINT8)) for name in ends)
    return config.replace(overrides=overrides)


def measure(network: str, seed: int, config: str, passes: str) -> float:
    """Return the accuracy, or 100 times the cosine, of one network quantized in one way."""
    chosen = CONFIGS[config].replace(passes=(*CONFIGS[config].passes, *PASSES[passes]))
    if network == "minilm":
        return _similarity(chosen)
    trained = composed_digits.load(network, seed)
    if "W8" not in config:
        chosen = ends_at_eight_bits(chosen, trained.model)
    return trained.accuracy(qfx.quantize(trained.model, chosen, trained.calibration, progress=False))


def _similarity(config: QuantConfig) -> float:
    model, tokenizer = judge.encoder()
    qmodel = qfx.quantize(model, config, judge.token_batches(tokenizer, sentences.CALIBRATION), progress=False)
    task = Embedding(judge.token_batches(tokenizer, sentences.HELD_OUT), reference=model)
    return 100 * qfx.evaluate(qmodel, task)["cosine"]


def results(
    networks: Sequence[str], seeds: int, wanted: Sequence[str], *, kept: bool
) -> dict[tuple[str, str, str], list[float]]:
    """Return the values of all seeds by (network, config, passes); measure, or leave out, what was not kept before."""
    folder = composed_digits.cache_folder() / "learned"
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str, str], list[float]] = {}
    for seed in range(seeds):
        for network in networks:
            for config, columns in CELLS[network].items():
                for passes in columns:
                    if passes not in wanted or (network == "minilm" and seed):
                        continue
                    file = folder / f"{network}-{seed}-{config}-{passes}.json"
                    if kept and not file.exists():
                        continue
                    if not file.exists():
                        start = time.perf_counter()
                        value = measure(network, seed, config, passes)
                        file.write_text(json.dumps(value))
                        print(
                            network,
                            seed,
                            config,
                            passes,
                            f"{value:.2f}",
                            f"{time.perf_counter() - start:.0f} s",
                            flush=True,
                        )
                    found.setdefault((network, config, passes), []).append(json.loads(file.read_text()))
    return found


def sections(networks: Sequence[str], seeds: int, wanted: Sequence[str], *, kept: bool) -> dict[str, str]:
    """Return the tables by title: points below float, mean over the seeds, and the largest."""
    found, made = results(networks, seeds, wanted, kept=kept), dict[str, str]()
    for network in networks:
        floats = [100.0] if network == "minilm" else [composed_digits.load(network, s).accuracy() for s in range(seeds)]
        rows = []
        for config, columns in CELLS[network].items():
            cells = {}
            for passes in columns:
                if (values := found.get((network, config, passes))) is not None:
                    # An interrupted run has measured the first seeds of some cells only, and the page says so.
                    lost = [real - value for real, value in zip(floats, values, strict=False)]
                    worst = f" ({max(lost):.2f})" if len(lost) > 1 else ""
                    fewer = f" of {len(lost)}" if len(lost) < len(floats) else ""
                    cells[passes] = f"{statistics.mean(lost):.2f}{worst}{fewer}"
            rows.append((config, *(cells.get(passes, "") for passes in PASSES)))
        trainings = f", {seeds} trainings" if len(floats) > 1 else ""
        title = f"`{network}`, float {statistics.mean(floats):.2f}{trainings}"
        made[title] = f"## {title}\n\n{table(('points lost', *PASSES), rows)}\n\n{environment()}\n"
    return made


def page(found: dict[str, str]) -> str:
    """Return the page with these sections."""
    order = {f"`{network}`": place for place, network in enumerate(CELLS)}
    parts = [found[title] for title in sorted(found, key=lambda title: order[_network(title)])]
    return f"""# What equalization, correction and learning are worth

Points of accuracy below float on held-out data, the mean of several trainings and in brackets the worst (*of n*: of the
first n only; `minilm`: one training, 100 times 1 - cosine). Nothing is measured on data it was tuned on. `resnet`,
`depthwise` (a MobileNetV2 whose batch-norm factors spread over three decades) and `vit` read two noisy digits, 100
classes; 1,024 images calibrate. Below 8 bits weights have one scale per channel, activations are quantized where a
weighted operator reads them, ranges have the smallest squared error, and the first and last operator keep 8 bits (not
so for `minilm`). *Letters* are networks trained on another kind of data, letters in many fonts, held out by font; no
option was chosen by them. At 8 bits weights have one scale per tensor. `QDrop` is block reconstruction with dropped
quantization and learned activation scales, after CLE; `AdaQuant` learns blocks, too. Reproduce with `python -m
benchmarks.learned`.

{chr(10).join(parts)}"""


def _network(title: str) -> str:
    """Return the network of a section, in backticks."""
    return f"`{title.split('`')[1]}`"


@experiment(page="learned.md", own_environment=True)
def main(
    networks: Sequence[str] = (*composed_digits.NETWORKS, "minilm"),
    seeds: int = len(composed_digits.SEEDS),
    passes: Annotated[Sequence[str], Option("columns; the rest stay empty", choices=PASSES)] = tuple(PASSES),
    kept: Annotated[bool, "show what earlier runs measured, measure nothing"] = False,
    write: bool = False,
) -> str:
    """Measure, and return the page."""
    made = sections(networks, seeds, passes, kept=kept)
    there = sections_of("learned.md") if write else {}
    again = {_network(title) for title in made}
    return page({title: text for title, text in there.items() if _network(title) not in again} | made)


if __name__ == "__main__":
    main()
