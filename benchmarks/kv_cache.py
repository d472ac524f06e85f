"""What a KV cache in few bits costs: perplexity and divergence of trained models, alone and with weights in 4 bits.

    python -m benchmarks.kv_cache [--models llama smollm2] [--write]

`llama` is that of `benchmarks.language_models`, `smollm2` that of `benchmarks.real`, judged on fewer windows here.
Results are kept beside the trained models, so that an interrupted run continues; to measure again, remove that folder.
`--write` updates `results/kv_cache.md`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Annotated, Any

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import table
from benchmarks.experiment import Option, experiment
from benchmarks.real import smollm2
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, UINT4
from quark_fx.numbers.scales import CALIBRATED_E4M3_SCALES
from quark_fx.passes import LowRank, Rotate, fold_constants
from quark_fx.presets import W4A4_DYNAMIC, W4A16_BEST, W4A16_RTN

_MEASURED: dict[str, Any] = {"granularity": Granularity.TOKEN, "dynamic": True}

CACHES: dict[str, TensorSpec] = {
    "int8, static, per head and channel": TensorSpec(format=INT8, granularity=Granularity.CHANNEL),
    "int8, static, per tensor": TensorSpec(format=INT8),
    "fp8, static, per tensor": TensorSpec(format=FP8_E4M3),
    "fp8, static, per head": TensorSpec(format=FP8_E4M3, granularity=Granularity.HEAD),
    "nvfp4": TensorSpec(
        format=FP4_E2M1,
        granularity=Granularity.GROUP,
        group_size=16,
        scale=CALIBRATED_E4M3_SCALES,
        dynamic=True,
    ),
    "int4, static, per head and channel": TensorSpec(format=INT4, granularity=Granularity.CHANNEL),
    "int4, per token and head": TensorSpec(format=INT4, **_MEASURED),
    "uint4, per token and head": TensorSpec(format=UINT4, **_MEASURED),
}
"""Keys and values by themselves."""

KV4 = CACHES["uint4, per token and head"]
"""The cache of 4 bits that is put beside weights and activations."""


def _rotated(spec: TensorSpec) -> QuantConfig:
    return QuantConfig(kv_cache=spec, passes=(fold_constants, Rotate()))


def _unrotated_keys(config: QuantConfig) -> QuantConfig:
    passes = tuple(replace(p, keys=False) if isinstance(p, Rotate) else p for p in config.passes)
    return config.replace(passes=passes)


GROUPS_OF_64 = 64
"""Inputs of a weight's group: SmolLM2 has 576, which 128 does not divide."""


def _in_groups(config: QuantConfig) -> QuantConfig:
    return config.replace(group_size=GROUPS_OF_64)


def _branched(config: QuantConfig) -> QuantConfig:
    return config.replace(passes=(*config.passes[:-1], LowRank(rank=32), config.passes[-1]))


ROWS: dict[str, QuantConfig] = {
    **{f"KV {name}": QuantConfig(kv_cache=spec) for name, spec in CACHES.items()},
    **{f"KV {name}, keys rotated": _rotated(spec) for name, spec in CACHES.items() if "4, per" in name},
    "w4a16_rtn": _in_groups(W4A16_RTN),
    "w4a16_best": _in_groups(W4A16_BEST),
    "w4a4_dynamic": _in_groups(W4A4_DYNAMIC),
    "w4a4_dynamic, KV uint4": _unrotated_keys(_in_groups(W4A4_DYNAMIC).replace(kv_cache=KV4)),
    "w4a4_dynamic, KV uint4, keys rotated": _in_groups(W4A4_DYNAMIC).replace(kv_cache=KV4),
    "LowRank(rank=32), w4a4_dynamic, KV uint4, keys rotated": _branched(_in_groups(W4A4_DYNAMIC).replace(kv_cache=KV4)),
}
"""What is measured, by the name of its row."""

Judge = Callable[[Any], Mapping[str, float]]


@cache
def _load(model: str) -> tuple[Any, Iterable[Any], Judge]:
    """Return a model, what it is calibrated on, and what returns its `perplexity` and `KL`."""
    if model == "llama":
        trained = language_models.load(model)
        return trained.model, trained.calibration, trained.figures
    real = smollm2.load(calibration=8, judged=4)
    return real.model, real.calibration, real.judge


def measure(model: str, row: str | None) -> dict[str, float]:
    """Return perplexity and divergence of a row; of the float model without one."""
    loaded, calibration, judge = _load(model)
    runnable = loaded if row is None else qfx.quantize(loaded, ROWS[row], calibration, progress=False)
    return dict(judge(runnable))


def result(model: str, row: str | None) -> dict[str, float]:
    """Return what `measure` does, kept from an earlier run if there is one."""
    folder = language_models.cache_folder() / "kv_cache"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{model}-{row}.json"
    if not file.exists():
        file.write_text(json.dumps(measure(model, row)))
        print(model, row, file.read_text(), flush=True)
    found: dict[str, float] = json.loads(file.read_text())
    return found


def page(models: Sequence[str]) -> str:
    """Return the tables."""
    parts = []
    for model in models:
        plain = result(model, None)["perplexity"]
        rows = []
        for row in ROWS:
            found = result(model, row)
            rows.append(
                (row, f"{found['perplexity']:.3f}", f"{found['perplexity'] - plain:+.3f}", f"{found['KL']:.5f}")
            )
        header = ("configuration", "perplexity", "distance from float", "KL")
        parts.append(f"## `{model}`, float {plain:.3f}\n\n{table(header, rows)}\n")
    return f"""# What a KV cache in few bits costs

Perplexity of text that nothing else is taken from, its distance from the float model's, and the mean divergence (KL,
nats per token) of the predictions from the float model's. `llama` is a small model trained here, judged on 40,800
tokens; `smollm2` is SmolLM2-135M-Instruct, calibrated on 8 windows of 512 tokens and judged on 4, so on 2,044
predictions, which settle the order of rows that are far apart and no more. *Keys rotated* is `Rotate()`: queries and
keys are multiplied by a random Hadamard matrix behind the rotary embedding. Weights are in groups of {GROUPS_OF_64}.
`LowRank(rank=32)` computes 32 directions of what operators read in float, which takes bits beside the codes.
Reproduce with `python -m benchmarks.kv_cache`.

{chr(10).join(parts)}
"""


@experiment(page="kv_cache.md")
def main(
    models: Annotated[Sequence[str], Option(choices=("llama", "smollm2"))] = ("llama", "smollm2"),
) -> str:
    """Measure, and return the page."""
    return page(models)


if __name__ == "__main__":
    main()
