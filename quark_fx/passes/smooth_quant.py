"""Move outliers from activations into the weights that read them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.blocks import extract
from quark_fx.calibration import run_batches, watching
from quark_fx.config import Granularity
from quark_fx.context import Context
from quark_fx.errors import ConfigError
from quark_fx.graph import device_of, parameter, set_parameter
from quark_fx.observers import MinMax
from quark_fx.ops import dequantize, dynamic_qparams, encode, quantize
from quark_fx.pass_manager import Change, graph_pass
from quark_fx.placement import PlannedOperator, plan_quantization
from quark_fx.qparams import QParams, affine_qparams
from quark_fx.scale_sites import ScaledInput, ScaleSite, apply_scale, find_scale_sites
from quark_fx.specs import TensorSpec
from quark_fx.weights import quantize_tensor

_SAMPLES = 2
"""Samples of a tuning batch, and of a held-out one, that strengths are compared on."""

_PARTS = ("tuning", "held_out")

_SMALLEST, _LARGEST = 1e-4, 1e4


@graph_pass()
@dataclass(frozen=True, kw_only=True)
class SmoothQuant:
    """Divide the channels of quantized activations by `s = a ** alpha / w ** (1 - alpha)` and multiply weights by `s`.

    `a` and `w` are the largest magnitudes, per channel, of the activation over the calibration data and of the weights
    that read it. A site's strength is the one whose quantized outputs are nearest to the float ones on some tuning
    samples; it is kept if samples that were not tuned on agree that it beats leaving the site alone.

    Args:
        alphas: strengths to choose from; leaving the site alone is always one more.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; the search is ours.
    """

    alphas: tuple[float, ...] = (0.35, 0.5, 0.65, 0.8)
    explicit: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "alphas", tuple(self.alphas))
        if not self.alphas or not all(0 <= alpha <= 1 for alpha in self.alphas):
            raise ConfigError(f"alphas are one or more strengths between 0 and 1, not {self.alphas}")

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Smooth the sites of `gm` that quantized operators read; return how many changed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the plan of the final graph says it again
            planned = {op.node: op for op in plan_quantization(gm, context.config).operators}
        analysis = find_scale_sites(gm, explicit=self.explicit)
        for node, reason in analysis.reasons.items():
            if node in planned:
                context.note(Change(planned[node].name, f"left: {reason}", changed=False))
        sites = []
        for site in analysis.sites:
            if _is_quantized(site, planned):
                sites.append(site)
            else:
                reason = "left: not every operator that reads it multiplies codes by codes"
                context.note(Change(_name(site, planned), reason, changed=False))
        seen = _watch(gm, sites, context)
        return sum(self._smooth(gm, site, planned, seen, context) for site in sites)

    def _smooth(
        self,
        gm: GraphModule,
        site: ScaleSite,
        planned: dict[Node, PlannedOperator],
        seen: dict[Node, Seen],
        context: Context,
    ) -> bool:
        began = time.perf_counter()
        trial = _Trial(gm, site, planned, seen)
        none = torch.ones(site.channels, device=device_of(gm))
        scales = {alpha: trial.scale(alpha) for alpha in self.alphas}
        errors = {alpha: trial.errors(scale, ["tuning"])[0] for alpha, scale in scales.items()}
        best = min(errors, key=lambda alpha: errors[alpha])
        alone, before = trial.errors(none, ["tuning", "held_out"])
        (after,) = trial.errors(scales[best], ["held_out"]) if errors[best] < alone else (before,)
        kept = after < before
        if kept:
            apply_scale(gm, site, scales[best])
        what = f"alpha {best:g}" if kept else "left: no strength is better on unseen samples"
        seconds = time.perf_counter() - began
        context.note(Change(_name(site, planned), what, kept, before, after if kept else before, seconds))
        return kept


def _name(site: ScaleSite, planned: dict[Node, PlannedOperator]) -> str:
    return ", ".join(planned[found.reader].name for found in site.inputs)


def _is_quantized(site: ScaleSite, planned: dict[Node, PlannedOperator]) -> bool:
    """Tell whether every operator that reads the site multiplies codes by codes."""
    found = [planned.get(scaled.reader) for scaled in site.inputs]
    return bool(found) and all(
        op is not None and op.weight is not None and op.input is not None and not op.input.is_cast for op in found
    )


@dataclass
class Seen:
    """What is remembered of an activation.

    Attributes:
        low: smallest value per channel in the batches that are tuned on, shape (channels,).
        high: largest value per channel.
        tuning: some samples of it.
        held_out: samples of a batch that is not tuned on.
    """

    low: Tensor
    high: Tensor
    tuning: Tensor
    held_out: Tensor


class _Watch(nn.Module):
    """Remembers the range of each channel, and samples of some batches.

    Args:
        axis: dimension of the channels.
        kept: what the samples of a batch are kept as, by its index; batches come in order.
        tuning: the batches whose values count for the range.
    """

    def __init__(self, axis: int, kept: dict[int, str], tuning: Collection[int]) -> None:
        super().__init__()
        self.axis = axis
        self.tuning = tuning
        self.kept = kept
        self.batches = 0
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self.samples: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> None:
        if self.batches in self.tuning:
            dims = [dim for dim in range(x.dim()) if dim != self.axis]
            low, high = x.amin(dims), x.amax(dims)
            self.low = low if self.low is None else torch.minimum(self.low, low)
            self.high = high if self.high is None else torch.maximum(self.high, high)
        if (part := self.kept.get(self.batches)) is not None:
            self.samples[part] = x[:_SAMPLES].clone()
        self.batches += 1


def _watch(gm: GraphModule, sites: Sequence[ScaleSite], context: Context) -> dict[Node, Seen]:
    """Run the calibration batches once, and return what the sites' readers saw."""
    axes = {scaled.value: scaled.axis for site in sites for scaled in site.inputs}
    if not axes:
        return {}
    context.require_batches()
    kept = {context.tuning[0]: "tuning", context.held_out[0]: "held_out"}
    watches = {value: _Watch(axis, kept, set(context.tuning)) for value, axis in axes.items()}
    with watching(gm, watches.items()):
        run_batches(gm, context)
    home = device_of(gm)
    found = {}
    for value, watch in watches.items():
        assert watch.low is not None
        assert watch.high is not None
        held_out = watch.samples["held_out"].to(home)
        tuning = watch.samples["tuning"].to(home) if "tuning" in watch.samples else held_out
        found[value] = Seen(watch.low.float().to(home), watch.high.float().to(home), tuning, held_out)
    return found


@dataclass
class _Reader:
    """One operator that reads a site: a module that computes it, and how it is quantized."""

    scaled: ScaledInput
    operator: PlannedOperator
    module: GraphModule
    weight: Tensor
    labels: Tensor
    seen: Seen
    outputs: dict[str, Tensor] = field(default_factory=dict)


class _Trial:
    """A site, and what its quantized outputs would be for a scale."""

    def __init__(
        self, gm: GraphModule, site: ScaleSite, planned: dict[Node, PlannedOperator], seen: dict[Node, Seen]
    ) -> None:
        self.site = site
        self.weights = [
            (planned[a.node], parameter(gm, a.parameter).detach(), a.labels)
            for a in site.producers
            if a.node in planned and planned[a.node].weight_node is a.parameter
        ]
        labels = {a.parameter: a.labels for a in site.consumers}
        self.readers = []
        for scaled in site.inputs:
            operator = planned[scaled.reader]
            node = operator.weight_node
            assert node is not None
            module = extract(gm, [scaled.value], [scaled.reader])
            reader = _Reader(scaled, operator, module, parameter(gm, node).detach(), labels[node], seen[scaled.value])
            for part in _PARTS:
                with torch.no_grad():
                    (reader.outputs[part],) = module(getattr(reader.seen, part))
            self.readers.append(reader)
        self.magnitudes = self._magnitudes()

    def _magnitudes(self) -> tuple[Tensor, Tensor]:
        """Return the largest magnitudes of the activation and of the weights that read it, each shape (channels,)."""
        a, w = (torch.zeros(self.site.channels, device=self.readers[0].weight.device) for _ in range(2))
        for reader in self.readers:
            _raise(a, reader.scaled.labels, torch.maximum(-reader.seen.low, reader.seen.high))
            alike = [dim for dim, size in enumerate(reader.labels.shape) if size == 1]
            magnitude = reader.weight.abs().float()
            _raise(w, reader.labels, magnitude.amax(alike, keepdim=True) if alike else magnitude)
        return a, w

    def scale(self, alpha: float) -> Tensor:
        """Return the scales of a strength, shape (channels,); 1 where the activation or the weights are zero."""
        a, w = self.magnitudes
        scale = (a**alpha / w ** (1 - alpha)).clamp(_SMALLEST, _LARGEST)
        return torch.where((a > 0) & (w > 0), scale, 1.0)

    def errors(self, scale: Tensor, parts: Sequence[str]) -> list[float]:
        """Return, for each part of the samples, the relative squared error that quantization at this scale makes.

        It is that of the outputs, and of weights that make the activation where these share one scale.
        """
        totals = [0.0] * len(parts)
        for reader in self.readers:
            spec = reader.operator.weight
            assert spec is not None
            weight = reader.weight.float() * _spread(reader.labels, scale)
            rounded = _rounded(weight, reader.operator).to(reader.weight.dtype)
            assert reader.operator.weight_node is not None
            set_parameter(reader.module, str(reader.operator.weight_node.target), rounded)
            for i, part in enumerate(parts):
                with torch.no_grad():
                    (got,) = reader.module(_activation(reader, scale, part))
                totals[i] += _relative(got, reader.outputs[part])
        for operator, weight, labels in self.weights:
            factor = _spread(labels, scale)
            if operator.weight is not None and operator.weight.granularity is Granularity.TENSOR:
                made = _relative(_rounded(weight.float() / factor, operator) * factor, weight)
                totals = [total + made for total in totals]
        return totals


def _activation(reader: _Reader, scale: Tensor, part: str) -> Tensor:
    """Return the samples divided by the scale, through the codes the operator would read."""
    spec, seen = reader.operator.input, reader.seen
    assert spec is not None
    x: Tensor = getattr(seen, part)
    per_channel = _spread(reader.scaled.labels, scale)
    shape = [-1 if dim == reader.scaled.axis else 1 for dim in range(x.dim())]
    scaled = x.float() / per_channel.reshape(shape)
    fmt = str(spec.format)
    if spec.dynamic:
        per_token = spec.granularity is Granularity.TOKEN
        s, z = dynamic_qparams(scaled, fmt, str(spec.symmetry), per_token)
        axis, block = (x.dim() - 1, -1) if per_token else (None, 0)
        codes = quantize(scaled, s, z, fmt, axis, block)
        rounded: Tensor = dequantize(codes, s, z, fmt, axis, block)
        return rounded.to(x.dtype)
    qparams = _range(reader, per_channel, shape, spec)
    codes = encode(scaled, qparams, spec.scheme)
    rounded = dequantize(codes, qparams.scale, qparams.zero_point, fmt)
    return rounded.to(x.dtype)


def _range(reader: _Reader, per_channel: Tensor, shape: list[int], spec: TensorSpec) -> QParams:
    """Return the parameters calibration would find for the divided activation, about."""
    assert spec.observer is not None
    seen = reader.seen
    if isinstance(spec.observer, MinMax):
        return affine_qparams((seen.low / per_channel).min(), (seen.high / per_channel).max(), spec.scheme)
    scaled = seen.tuning.float() / per_channel.reshape(shape)
    found = spec.observer.observe(scaled.reshape(1, -1)).qparams(spec.scheme)
    return QParams(found.scale.reshape(()), found.zero_point.reshape(()))


def _rounded(weight: Tensor, operator: PlannedOperator) -> Tensor:
    """Return the values of a weight's codes."""
    assert operator.row is not None
    assert operator.weight is not None
    return quantize_tensor(
        weight,
        operator.weight,
        output_axis=operator.row.output_axis,
        input_axis=operator.row.input_axis,
        stacked=weight.dim() > 2 and not operator.kind.startswith("conv"),
    ).dequantize()


def _spread(labels: Tensor, scale: Tensor) -> Tensor:
    """Return the scale of each element, 1 where it has none."""
    labels = labels.to(scale.device)
    return torch.where(labels >= 0, scale[labels.clamp(min=0)], 1.0)


def _raise(largest: Tensor, labels: Tensor, values: Tensor) -> None:
    """Raise `largest`, in place, to the largest of `values` per component."""
    labels = labels.to(values.device).expand(values.shape)
    known = labels >= 0
    largest.scatter_reduce_(0, labels[known], values[known], "amax")


def _relative(values: Tensor, reference: Tensor) -> float:
    noise = (values.float() - reference.float()).square().sum()
    return float(noise / reference.float().square().sum().clamp_min(torch.finfo(torch.float32).tiny))


__all__ = ["SmoothQuant"]
