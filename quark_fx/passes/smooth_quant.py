"""Move outliers from activations into the weights that read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity
from quark_fx.config.selection import Selective
from quark_fx.engine.blocks import Unit, extract
from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.errors import ConfigError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import device_of, parameter, set_parameter
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.numbers.ops import dequantize, dynamic_qparams, encode, quantize
from quark_fx.numbers.qparams import QParams, affine_qparams
from quark_fx.observers import MinMax
from quark_fx.plan.placement import PlannedOperator
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.planned_sites import planned_sites
from quark_fx.rescale.scale_sites import ScaledInput, ScaleSite, apply_scale
from quark_fx.system.options import Interval

_POSITIONS = {"tuning": 384, "held_out": 192}
"""Positions of either, about, that decide whether a site is scaled; of few data a sixth does, or `_FEWEST`."""

_FEWEST = 128

_CHOICE = 96
"""Positions, about, that choose between strengths: these differ by less than the best of them gains."""

_BATCHES = 16
"""Batches they come from, at most: of each at least one sample, or a window of it."""

_FOLDS = 4
"""Parts of the tuning data, each judged with scales and ranges that were measured on the others."""

_GAIN = 0.85
"""Share of the error that may be left: a smaller gain may be the luck of the samples."""

_GOLDEN = 0.618
"""Multiples of it fall evenly into the unit interval."""

_SMALLEST, _LARGEST = 1e-4, 1e4


@graph_pass(held_out=True)
@dataclass(frozen=True, kw_only=True)
class SmoothQuant(Selective):
    """Divide the channels of quantized activations by `s = a ** alpha / w ** (1 - alpha)` and multiply weights by `s`.

    `a` and `w` are the largest magnitudes, per channel, of the activation over the calibration data and of the weights
    that read it. `a` counts as no smaller than its median over the site's channels: a channel that hardly fired would
    be blown up until it is clipped when it does, and only outliers have to move. A site's strength is the one whose
    quantized outputs are nearest to the float ones on the tuning batches, each quarter of them with scales and ranges
    of the others: what equalizes channels to their extremes clips every one of them on data it has not seen. It is
    chosen by a few samples, and kept if all that are remembered, of the tuning batches and of the held-out ones, agree
    that a good part of the error is gone.

    Args:
        alphas: strengths to choose from; leaving the site alone is always one more.
        explicit: insert a multiplication where nothing before can absorb the scale.

    Source:
        Xiao et al. 2023, equation 4; floor, search and acceptance are ours.
    """

    alphas: tuple[Annotated[float, Interval("[0, 1]")], ...] = (0.35, 0.5, 0.65, 0.8)
    explicit: bool = False

    def __post_init__(self) -> None:
        if not self.alphas:
            raise ConfigError("alphas are one or more strengths from 0 to 1; write alphas=(0.5,)")

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Smooth the sites of `gm` that quantized operators read; return how many changed."""
        planned, analysis = planned_sites(gm, context, self, explicit=self.explicit)
        more = sum(planned.get(node) is not None and _is_read_in_codes(planned[node]) for node in analysis.divisible)
        context.remark = f"explicit=True could multiply for {more} more" if more else ""
        sites = []
        for site in analysis.sites:
            if _is_quantized(site, planned):
                sites.append(site)
            else:
                reason = "left: not every operator that reads it multiplies codes by codes, or data chooses its rows"
                context.note(Change(_name(site, planned), reason, changed=False))
        seen = _watch(gm, sites, planned, context)
        return sum(self._smooth(gm, site, planned, seen, context) for site in sites)

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: the samples of what all sites read, and one forward pass."""
        read = {op.node.args[0]: sizes.matrices.get(op.node.name) for op in sizes.operators if _is_read_in_codes(op)}
        most = sum(_POSITIONS.values())
        sampled = (FLOAT32 * min(sizes.batches * m.rows, most) * m.groups * m.inputs for m in read.values() if m)
        seen = int(sum(sampled))
        # A trial: the weight scaled, rounded and as it was, and what both make of the samples.
        tried = max((3 * m.target + 2 * FLOAT32 * most * m.groups * m.outputs for m in read.values() if m), default=0)
        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        operations = int(sizes.batches * sum(block.operations for block in sizes.blocks(Unit.BLOCK)))
        return Need((Moment(seen + max(sizes.forward, scaled + tried)),), held=scaled, operations=operations)

    def _smooth(
        self,
        gm: GraphModule,
        site: ScaleSite,
        planned: dict[Node, PlannedOperator],
        seen: _Watched,
        context: Context,
    ) -> bool:
        began = time.perf_counter()
        trial = _Trial(gm, site, planned, seen)
        best = self._strength(trial)
        errors, alone = (trial.errors(alpha, ["tuning", "held_out"]) for alpha in (best, None))
        free = [trial.errors(alpha, ["tuning", "held_out"], limited=False) for alpha in (best, None)]
        pairs = [*zip(errors, alone, strict=True), *zip(*free, strict=True)]
        kept = all(error < _GAIN * untouched for error, untouched in pairs)
        before, after = alone[1], errors[1]
        if kept:
            apply_scale(gm, site, trial.scale(best))
        what = f"alpha {best:g}" if kept else "left: no strength is better on unseen samples"
        seconds = time.perf_counter() - began
        context.note(Change(_name(site, planned), what, kept, before, after if kept else before, seconds))
        return kept

    def _strength(self, trial: _Trial) -> float:
        """Return the best strength: from the middle one upwards, then downwards, while the error falls."""
        tried = cache(lambda alpha: trial.errors(alpha, ["choice"], limited=False))
        alphas = sorted(self.alphas)
        at = (len(alphas) - 1) // 2
        for step in (1, -1):
            while 0 <= at + step < len(alphas) and tried(alphas[at + step]) < tried(alphas[at]):
                at += step
        return alphas[at]


def _name(site: ScaleSite, planned: dict[Node, PlannedOperator]) -> str:
    return ", ".join(planned[found.reader].name for found in site.inputs)


def _is_quantized(site: ScaleSite, planned: dict[Node, PlannedOperator]) -> bool:
    """Tell whether every operator that reads the site multiplies codes by codes."""
    found = [planned.get(scaled.reader) for scaled in site.inputs]
    return bool(found) and all(op is not None and _is_read_in_codes(op) for op in found)


def _is_read_in_codes(operator: PlannedOperator) -> bool:
    # Which rows an expert sees depends on the data, so samples of its activation are not what it would read.
    codes = operator.weight is not None and operator.input is not None and not operator.input.is_cast
    return codes and operator.kind != "experts"


@dataclass
class Seen:
    """What is remembered of an activation.

    Attributes:
        low: smallest value per fold of the tuning batches and channel, shape (folds, channels).
        high: largest value, likewise.
        samples: some of it, by part, each with the fold it is of (`None` if held out).
        divisible: their dimension 0 counts samples.
    """

    low: Tensor
    high: Tensor
    samples: dict[str, list[tuple[int | None, Tensor]]]
    divisible: bool

    def range(self, without: int | None) -> tuple[Tensor, Tensor]:
        """Return the smallest and largest value per channel, over all folds or over all but one."""
        kept = [fold for fold in range(len(self.low)) if fold != without or len(self.low) == 1]
        return self.low[kept].amin(0), self.high[kept].amax(0)


_Watched = dict[tuple[Node, int], Seen]
"""By value and dimension of the channels: a convolution and a linear that read one value count others."""


class _Watch(nn.Module):
    """Remembers the range of each channel, and samples of some batches.

    Args:
        axis: dimension of the channels.
        tuning: indices of the batches whose values count for the range; batches come in order.
        held_out: of those that are not tuned on.

    Attributes:
        divisible: dimension 0 counts samples.
        windows: for each reader the positions along the dimensions between that it computes one output from; `None`
            where it needs all of them.
    """

    def __init__(self, axis: int, tuning: Sequence[int], held_out: Sequence[int]) -> None:
        super().__init__()
        self.axis, self.divisible = axis, True
        self.windows: list[tuple[int, ...] | None] = []
        self.tuning, self.held_out = list(tuning), list(held_out)
        self.batches = 0
        self.ranges: dict[int, tuple[Tensor, Tensor]] = {}
        self.samples: dict[str, list[tuple[int | None, Tensor]]] = {part: [] for part in _POSITIONS}

    def forward(self, x: Tensor) -> None:
        if self.batches in self.tuning:
            index, count = self.tuning.index(self.batches), len(self.tuning)
            pieces = -(-_FOLDS // count) if self.divisible else 1
            for i, piece in enumerate(x.tensor_split(pieces) if pieces > 1 else (x,)):
                if len(piece):
                    fold = (index * pieces + i) * _FOLDS // (count * pieces)
                    self._widen(fold, piece)
                    self._keep("tuning", fold, piece, index, count, pieces)
        if self.batches in self.held_out:
            self._keep("held_out", None, x, self.held_out.index(self.batches), len(self.held_out), 1)
        self.batches += 1

    def _widen(self, fold: int, x: Tensor) -> None:
        dims = [dim for dim in range(x.dim()) if dim != self.axis]
        low, high = x.amin(dims), x.amax(dims)
        if fold in self.ranges:
            low, high = torch.minimum(self.ranges[fold][0], low), torch.maximum(self.ranges[fold][1], high)
        self.ranges[fold] = low, high

    def _keep(self, part: str, fold: int | None, x: Tensor, index: int, count: int, pieces: int) -> None:
        every = -(-count // _BATCHES)
        if index % every:
            return
        each = max(1, x[:1].numel() // x.shape[self.axis])
        wanted = min(_POSITIONS[part], max(_FEWEST, each * len(x) * pieces * count // 6))
        positions = wanted * every / (count * pieces)
        kept = self._window(x[: max(1, int(positions // each))], positions, index) if self.divisible else x
        self.samples[part].append((fold, kept.clone()))

    def _window(self, x: Tensor, positions: float, index: int) -> Tensor:
        """Return about so many positions of one sample, side by side, and of each batch at another place."""
        dims = [dim for dim in range(1, x.dim()) if dim != self.axis]
        share = positions * x.shape[self.axis] / x.numel()
        windows = [window for window in self.windows if window is not None]
        if share >= 1 or len(windows) < len(self.windows):
            return x
        for i, dim in enumerate(dims):
            least = max(window[i] if window else 1 for window in windows)
            size = x.shape[dim]
            kept = min(size, max(least, round(size * share ** (1 / len(dims)))))
            x = x.narrow(dim, int((size - kept + 1) * (index * _GOLDEN % 1)), kept)
        return x


def _watch(
    gm: GraphModule, sites: Sequence[ScaleSite], planned: dict[Node, PlannedOperator], context: Context
) -> _Watched:
    """Run the calibration batches once, and return what the sites' readers saw."""
    if not sites:
        return {}
    context.require_batches()
    watches: dict[tuple[Node, int], _Watch] = {}
    for scaled in (scaled for site in sites for scaled in site.inputs):
        key = scaled.value, scaled.axis
        watch = watches.setdefault(key, _Watch(scaled.axis, context.tuning, context.held_out))
        watch.divisible &= scaled.axis > 0 and not scaled.linear.stacked
        watch.windows.append(_window(scaled.linear))
    with watching(gm, ((value, watch) for (value, _), watch in watches.items())):
        run_batches(gm, context)
    home = device_of(gm)
    found = {}
    for key, watch in watches.items():
        low, high = (torch.stack(found).float().to(home) for found in zip(*watch.ranges.values(), strict=True))
        samples = {part: [(fold, x.to(home)) for fold, x in kept] for part, kept in watch.samples.items()}
        positions = sum(x.numel() // x.shape[watch.axis] for _, x in samples["tuning"])
        samples["choice"] = samples["tuning"][:: max(1, positions // _CHOICE)]
        found[key] = Seen(low, high, samples, watch.divisible)
    return found


def _window(linear: Linear) -> tuple[int, ...] | None:
    """Return how many positions along each dimension but samples and channels one output is computed from."""
    if linear.matrices is None:
        return None
    return tuple((size - 1) * step + 1 for size, step in zip(linear.kernel, linear.dilation, strict=True))


@dataclass
class _Reader:
    """One operator that reads a site: a module that computes it, and how it is quantized."""

    scaled: ScaledInput
    operator: PlannedOperator
    module: GraphModule
    weight: Tensor
    labels: Tensor
    seen: Seen
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return the operator's outputs, of all inputs at once where that is possible."""
        joined = self.seen.divisible and len({x.shape[1:] for x in inputs}) == 1
        with torch.no_grad():
            return [self.module(x)[0] for x in ([torch.cat(list(inputs))] if joined else inputs)]


class _Trial:
    """A site, and what its quantized outputs would be for a scale."""

    def __init__(self, gm: GraphModule, site: ScaleSite, planned: dict[Node, PlannedOperator], seen: _Watched) -> None:
        self.site = site
        self.scales: dict[tuple[float | None, int | None], Tensor] = {}
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
            known = seen[scaled.value, scaled.axis]
            reader = _Reader(scaled, operator, module, parameter(gm, node).detach(), labels[node], known)
            for part, samples in reader.seen.samples.items():
                reader.outputs[part] = reader.run([x for _, x in samples])
            self.readers.append(reader)
        self.largest_weights = torch.zeros(site.channels, device=self.readers[0].weight.device, dtype=torch.float32)
        for reader in self.readers:
            alike = [dim for dim, size in enumerate(reader.labels.shape) if size == 1]
            magnitude = reader.weight.abs().float()
            _raise(self.largest_weights, reader.labels, magnitude.amax(alike, keepdim=True) if alike else magnitude)

    def scale(self, alpha: float | None, without: int | None = None) -> Tensor:
        """Return the scales of a strength, shape (channels,); 1 where the activation or the weights are zero.

        Args:
            alpha: the strength; `None` leaves the site alone.
            without: a fold whose values do not count.
        """
        if (alpha, without) not in self.scales:
            self.scales[alpha, without] = self._scale(alpha, without)
        return self.scales[alpha, without]

    def _scale(self, alpha: float | None, without: int | None) -> Tensor:
        w = self.largest_weights
        a = torch.zeros_like(w)
        if alpha is None:
            return a + 1
        for reader in self.readers:
            low, high = reader.seen.range(without)
            _raise(a, reader.scaled.labels, torch.maximum(-low, high))
        used = (a > 0) & (w > 0)
        if not bool(used.any()):
            return torch.ones_like(a)
        floored = a.maximum(a[used].median())
        return torch.where(used, (floored**alpha / w ** (1 - alpha)).clamp(_SMALLEST, _LARGEST), 1.0)

    def errors(self, alpha: float | None, parts: Sequence[str], *, limited: bool = True) -> list[float]:
        """Return, for each part of the samples, the relative squared error that quantization at a strength makes.

        It is that of the outputs, and of weights that make the activation where these share one scale. Without
        `limited`, codes are those of a target that does not limit pairs of them: which pairs exceed a limit changes
        with every scale by chance, and few samples would take that for a gain.
        """
        totals, scale = [0.0] * len(parts), self.scale(alpha)
        for reader in self.readers:
            spec = reader.operator.weight
            assert spec is not None
            weight = reader.weight.float() * _spread(reader.labels, scale)
            rounded = _rounded(weight, reader.operator, limited).to(reader.weight.dtype)
            assert reader.operator.weight_node is not None
            set_parameter(reader.module, str(reader.operator.weight_node.target), rounded)
            for i, part in enumerate(parts):
                totals[i] += _relative(reader.run(list(self._activations(reader, alpha, part))), reader.outputs[part])
        for operator, weight, labels in self.weights:
            factor = _spread(labels, scale)
            if operator.weight is not None and operator.weight.granularity is Granularity.TENSOR:
                made = _relative([_rounded(weight.float() / factor, operator, limited) * factor], [weight])
                totals = [total + made for total in totals]
        return totals

    def _activations(self, reader: _Reader, alpha: float | None, part: str) -> Iterator[Tensor]:
        """Yield the samples divided by the scale, through the codes the operator would read.

        Scale and range are measured without the fold a sample is of, which then says what unseen data would.
        """
        spec, seen = reader.operator.input, reader.seen
        assert spec is not None
        fmt = str(spec.format)
        whole = self._divisor(reader, alpha, None)
        found: dict[int | None, tuple[Tensor, QParams | None]] = {}
        for fold, x in seen.samples[part]:
            if fold not in found:
                divisor = self._divisor(reader, alpha, fold)
                found[fold] = divisor, None if spec.dynamic else _range(reader, divisor, fold)
            divisor, qparams = found[fold]
            scaled = _divided(x, divisor, reader)
            axis, block = None, 0
            if qparams is None:
                measurement = spec.measurement(x.dim(), reader.scaled.axis)
                _, _, axis, block, *_ = measurement
                s, z = dynamic_qparams(scaled, *measurement)
                codes = quantize(scaled, s, z, fmt, axis, block)
            else:
                s, z = qparams.scale, qparams.zero_point
                codes = encode(scaled, qparams, spec.scheme)
            rounded: Tensor = dequantize(codes, s, z, fmt, axis, block)
            yield _divided(rounded, whole / divisor, reader).to(x.dtype)

    def _divisor(self, reader: _Reader, alpha: float | None, without: int | None) -> Tensor:
        """Return what the channels of the reader's activation are divided by."""
        return _spread(reader.scaled.labels, self.scale(alpha, without))


def _divided(x: Tensor, divisor: Tensor, reader: _Reader) -> Tensor:
    return x.float() / divisor.reshape([-1 if dim == reader.scaled.axis else 1 for dim in range(x.dim())])


def _range(reader: _Reader, divisor: Tensor, without: int | None) -> QParams:
    """Return the parameters calibration would find for the divided activation, about."""
    spec, seen = reader.operator.input, reader.seen
    assert spec is not None
    assert spec.observer is not None
    if isinstance(spec.observer, MinMax):
        low, high = seen.range(without)
        return affine_qparams((low / divisor).min(), (high / divisor).max(), spec.scheme)
    observer = spec.observer
    for fold, x in seen.samples["tuning"]:
        if fold != without or len(seen.low) == 1:
            observer = observer.observe(_divided(x, divisor, reader).reshape(1, -1))
    found = observer.qparams(spec.scheme)
    return QParams(found.scale.reshape(()), found.zero_point.reshape(()))


def _rounded(weight: Tensor, operator: PlannedOperator, limited: bool) -> Tensor:
    """Return the values of a weight's codes, `limited` to what pairs of them may add up to on the target."""
    assert operator.weight is not None
    return quantize_tensor(
        weight,
        operator.weight,
        linear=operator.linear,
        pairs=operator.pairs if limited else None,
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


def _relative(values: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    noise = sum(float((x.float() - r.float()).square().sum()) for x, r in zip(values, reference, strict=True))
    power = sum(float(r.float().square().sum()) for r in reference)
    return noise / max(power, torch.finfo(torch.float32).tiny)


__all__ = ["SmoothQuant"]
