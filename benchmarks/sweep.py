"""What ten configurations of one model cost on a `Session`, over one alone.

    python -m benchmarks.sweep [--cases "GPTQ" …] [--rounds 3] [--write]

A round quantizes with each of ten configurations alone, then makes a session and quantizes with all ten on it, in one
process on one thread after a warm-up; the two are neighbors. *One* is the mean of the ten alone. Every tensor of every
result is compared: the two ways have to agree bit for bit. ResNet-18 has 32 random images of 224 x 224, the network of
the tests 900 images of digits it was trained on, the Llama (4 layers of 256, random weights) 32 windows of 256
random tokens. Nothing of what GPTQ and AWQ do is shared but capture and data.

Goal: at most 3 times one, for ranges and for weights that are rounded to nearest. `--write` updates `results/sweep.md`
after each case.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

import quark_fx as qfx
from benchmarks.calibration_overhead import resnet
from benchmarks.common import one_thread, spread, table, timed
from benchmarks.experiment import Option, experiment
from quark_fx.numbers.formats import INT3, INT4, INT8, INT16
from quark_fx.observers import Entropy, MovingAverage, Mse, Observer, Percentile
from quark_fx.passes import AWQ, GPTQ
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, INT8_WEIGHT_ONLY, MXFP4_WEIGHT_ONLY

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

GOAL = 3.0
"""Cost of ten on a session over that of one alone."""


def _activations(observer: Observer | None = None, **changes: Any) -> qfx.QuantConfig:
    assert INT8_STATIC.input is not None
    spec = INT8_STATIC.input.replace(**changes)
    spec = spec if observer is None else spec.replace(observer=observer)
    return INT8_STATIC.replace(input=spec, output=spec)


_TENSOR = qfx.TensorSpec(format=INT8)

STATIC = (
    INT8_STATIC,
    _activations(MovingAverage()),
    _activations(Percentile(percentile=99.9)),
    _activations(Percentile(percentile=99.99)),
    _activations(Mse()),
    _activations(Percentile(percentile=99.999)),
    _activations(Entropy()),
    _activations(format=INT8),
    _activations(format=INT16, symmetry="symmetric"),
    _activations(Percentile(percentile=99.99)).replace(weight=_TENSOR),
)
"""int8 weights; observers, formats of activations, and granularity of weights."""


def _grouped(group_size: int, *passes: Any, fmt: Any = INT4, **changes: Any) -> qfx.QuantConfig:
    assert INT4_WEIGHT_ONLY.weight is not None
    base = INT4_WEIGHT_ONLY.replace(weight=INT4_WEIGHT_ONLY.weight.replace(format=fmt, **changes))
    return base.replace(group_size=group_size, passes=(*base.passes, *passes))


WEIGHTS = (
    INT8_WEIGHT_ONLY,
    *(_grouped(size) for size in (32, 64, 128)),
    *(_grouped(size, fmt=INT3) for size in (32, 64)),
    _grouped(32, symmetry="asymmetric"),
    _grouped(32, observer=Mse()),
    MXFP4_WEIGHT_ONLY,
    INT4_WEIGHT_ONLY.replace(weight=qfx.TensorSpec(format=INT4, granularity=qfx.Granularity.CHANNEL)),
)
"""Formats, sizes of groups and observers of weights that are rounded to nearest."""

_SIZES = [(size, fmt) for fmt in (INT4, INT3) for size in (16, 32, 64, 128, 256)]


def network() -> tuple[nn.Module, Sequence[Any]]:
    """Return the residual network of the tests, and the images it was trained on."""
    from networks import trained

    found = trained("cnn")
    return found.model, found.calibration


def llama() -> tuple[nn.Module, Sequence[Any]]:
    """Return a small Llama, and random tokens in batches of 4 windows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=1024,
    )
    tokens = torch.randint(1024, (32, 256), generator=torch.Generator().manual_seed(1))
    return LlamaForCausalLM(config).eval(), [{"input_ids": batch} for batch in tokens.split(4)]


_Case = tuple[str, Callable[[], tuple[nn.Module, Sequence[Any]]], tuple[qfx.QuantConfig, ...], bool]

CASES: dict[str, _Case] = {
    "int8 static": ("ResNet-18", resnet, STATIC, True),
    "int8 static, small": ("residual network, digits", network, STATIC, True),
    "weight-only": ("Llama, 4 layers", llama, WEIGHTS, True),
    "GPTQ": ("Llama, 4 layers", llama, tuple(_grouped(size, GPTQ(), fmt=fmt) for size, fmt in _SIZES), False),
    "AWQ": ("Llama, 4 layers", llama, tuple(_grouped(size, AWQ(), fmt=fmt) for size, fmt in _SIZES), False),
}
"""By name: the model, what makes it and its data, configurations, and whether the goal is theirs."""


def measure(name: str, rounds: int) -> Iterator[str]:
    """Yield the cells of a row."""
    title, make, configs, has_goal = CASES[name]
    model, data = make()
    qfx.quantize(model, configs[0], data, progress=False)
    ones, sessions, ratios = list[float](), list[float](), list[float]()
    for _ in range(rounds if has_goal else 1):
        found: dict[bool, list[qfx.QuantizedModel]] = {True: [], False: []}

        def alone(into: list[qfx.QuantizedModel] = found[False]) -> None:
            into += [qfx.quantize(model, config, data, progress=False) for config in configs]

        def together(into: list[qfx.QuantizedModel] = found[True]) -> None:
            session = qfx.Session(model, data)
            into += [qfx.quantize(session, config, progress=False) for config in configs]

        ones.append(timed(alone).cpu / len(configs))
        sessions.append(timed(together).cpu)
        ratios.append(sessions[-1] / ones[-1])
        for a, b in zip(found[True], found[False], strict=True):
            assert a.state_dict().keys() == b.state_dict().keys()
            assert all(torch.equal(x, b.state_dict()[key]) for key, x in a.state_dict().items()), a.config
    met = "met" if statistics.median(ratios) <= GOAL else "missed"
    yield from (name, title, f"{statistics.median(ones):.2f}", f"{statistics.median(sessions):.2f}", spread(ratios))
    yield f"{GOAL:.0f}, {met}" if has_goal else "–"


@experiment(page="sweep.md")
def main(
    cases: Annotated[Sequence[str], Option(choices=list(CASES), metavar="CASE")] = tuple(CASES),
    rounds: Annotated[int, "measurements of each ratio"] = 3,
) -> Iterator[str]:
    """Measure, and yield the page as it grows."""
    rows: list[list[str]] = []
    with one_thread():
        for name in cases:
            rows.append([*measure(name, rounds)])
            yield page(rows, rounds)


def page(rows: Sequence[Sequence[str]], rounds: int) -> str:
    """Return the page of what is measured so far."""
    header = ("ten configurations", "model", "one alone, CPU s", "ten on a session, CPU s", "ten / one", "goal")
    return f"""# Several configurations of one model

Ten configurations on one [`Session`](../../docs/configuration.md#several-configurations), over the mean of the ten
alone: in one process on one thread, neighbors, median (range) of {rounds} round(s), one of GPTQ and of AWQ. Every
tensor of every result is the same in both ways. Static configurations differ in observers, formats of activations and
granularity of weights, weight-only ones in formats, sizes of groups and observers; of GPTQ and AWQ, which read the
quantized model, capture and data are shared. Reproduce with `python -m benchmarks.sweep`.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
