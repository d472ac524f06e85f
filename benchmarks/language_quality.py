"""What the ways to round a language model's weights are worth: perplexity and divergence of trained models.

    python -m benchmarks.language_quality [--models llama gpt2 opt qwen3_moe llama_outliers] [--write]

The models are those of `benchmarks.language_models`, calibrated on 64 windows of their training text, judged on 40,800
tokens of files that nothing else is taken from. Results are kept beside the models, so that an interrupted run
continues; to measure again, remove that folder. `--write` updates `results/language_quality.md`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import table
from benchmarks.experiment import Option, experiment
from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.numbers.formats import INT2, INT3, INT4, IntFormat
from quark_fx.numbers.qparams import Symmetry
from quark_fx.observers import Hqq
from quark_fx.passes import AWQ, GPTQ, AutoRound, FitScales
from quark_fx.presets import W4A16_BEST, W4A16_BEST_ASYM

FORMATS: dict[str, IntFormat] = {"4 bits": INT4, "3 bits": INT3, "2 bits": INT2}
GROUPS: dict[str, int | None] = {"groups of 32": 32, "groups of 128": 128, "per channel": None}

_PLAIN: dict[str, Any] = {"symmetry": Symmetry.SYMMETRIC_FULL}
_SIGNED: dict[str, Any] = {"symmetry": Symmetry.SIGN_AWARE}

METHODS: dict[str, tuple[dict[str, Any], Sequence[GraphPass]]] = {
    "RTN": (_PLAIN, ()),
    "RTN, sign-aware": (_SIGNED, ()),
    "HQQ": ({"symmetry": Symmetry.ASYMMETRIC, "observer": Hqq()}, ()),
    "AWQ": (_PLAIN, (AWQ(),)),
    "AWQ + FitScales": (_PLAIN, (AWQ(), FitScales())),
    "GPTQ": (_PLAIN, (GPTQ(),)),
    "asymmetric GPTQ": (_PLAIN, (GPTQ(asymmetry=1.0),)),
    "AWQ + GPTQ": (_PLAIN, (AWQ(), GPTQ())),
    "best": (_SIGNED, (GPTQ(asymmetry=0.5, fit_scales=True),)),
    "best, guided": (_SIGNED, (GPTQ(asymmetry=0.5, fit_scales=True, guided=True),)),
    "w4a16_best": (_SIGNED, W4A16_BEST.passes[-2:]),
    "w4a16_best_asym": ({"symmetry": Symmetry.ASYMMETRIC}, W4A16_BEST_ASYM.passes[-2:]),
    "AutoRound, sign-aware": (_SIGNED, (AutoRound(),)),
}
"""Fields of the weights' spec, and passes."""

ONE_GROUP = ("gpt2", "opt", "qwen3_moe", "llama_outliers")
"""Models that are measured in groups of 128 only."""


def config(bits: str, groups: str, method: str) -> QuantConfig:
    """Return the configuration of one cell; embeddings and head stay in float."""
    fields, passes = METHODS[method]
    size = GROUPS[groups]
    granularity = Granularity.GROUP if size else Granularity.CHANNEL
    weight = TensorSpec(format=FORMATS[bits], granularity=granularity, group_size=size).replace(**fields)
    return QuantConfig(weight=weight, passes=tuple(passes), exclude=("op:embedding", "op:head"), target=Target.TORCH)


def measure(model: str, bits: str, groups: str, method: str) -> tuple[float, float]:
    """Return perplexity and divergence of one cell."""
    trained = language_models.load(model)
    qmodel = qfx.quantize(trained.model, config(bits, groups, method), trained.calibration, progress=False)
    figures = trained.figures(qmodel)
    return figures["perplexity"], figures["KL"]


def result(model: str, bits: str, groups: str, method: str) -> tuple[float, float]:
    """Return what `measure` does, kept from an earlier run if there is one."""
    folder = language_models.cache_folder() / "quality"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{model}-{bits}-{groups}-{method}.json"
    if not file.exists():
        file.write_text(json.dumps(measure(model, bits, groups, method)))
        print(model, bits, groups, method, file.read_text(), flush=True)
    perplexity, divergence = json.loads(file.read_text())
    return perplexity, divergence


def page(models: Sequence[str]) -> str:
    """Return the tables."""
    parts = []
    for model in models:
        trained = language_models.load(model)
        rows = []
        for groups in GROUPS if model not in ONE_GROUP else ("groups of 128",):
            for method in METHODS:
                cells = (result(model, bits, groups, method) for bits in FORMATS)
                rows.append((groups, method, *(f"{ppl:.2f} ({kl:.4f})" for ppl, kl in cells)))
        parameters = sum(p.numel() for p in trained.model.parameters())
        title = f"## `{model}`, {parameters / 1e6:.1f} M parameters, float {trained.perplexity():.2f}"
        parts.append(f"{title}\n\n{table(('scales', 'method', *FORMATS), rows)}\n")
    return f"""# Language models: what the ways to round weights are worth

Perplexity of held-out text, and in brackets the mean divergence (KL, nats per token) of the predictions from the float
model's. Small models trained here on the text that comes with Python; embeddings and head stay in float. Scales are
symmetric and use every code (HQQ: asymmetric; *best*: sign-aware, `GPTQ(asymmetry=0.5, fit_scales=True)`;
*guided*: with `guided=True`; the preset `w4a16_best`: *best, guided* with `two_sided=True`, after `AWQ(feedback=True)`;
`w4a16_best_asym`: the same with zero points). Reproduce with
`python -m benchmarks.language_quality`.

{chr(10).join(parts)}
"""


@experiment(page="language_quality.md")
def main(
    models: Annotated[Sequence[str], Option(choices=language_models.MODELS)] = tuple(language_models.MODELS),
) -> str:
    """Measure, and return the page."""
    return page(models)


if __name__ == "__main__":
    main()
