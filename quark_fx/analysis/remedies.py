"""Remedies for the error of an operator; their gains are estimated from the operator's output on a few samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.analysis.report import Remedy
from quark_fx.analysis.switches import RoundedValue
from quark_fx.analysis.trials import unpadded
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.engine.block_walk import relative_error
from quark_fx.engine.blocks import extract
from quark_fx.engine.calibration_data import Positions
from quark_fx.errors import ConfigError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes, parameter, placeholders
from quark_fx.graph.pass_manager import pass_name
from quark_fx.numbers.formats import INT8, INT16, UINT8
from quark_fx.numbers.ops import dynamic_qparams, fake_quantize
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.rotation import Rotation
from quark_fx.observers import MinMax, Mse, Percentile
from quark_fx.passes import Rotate, SmoothQuant
from quark_fx.passes.rotate import Rotating
from quark_fx.plan.placement import Coded, Plan, Quantized, names_of, plan_quantization
from quark_fx.plan.siblings import siblings
from quark_fx.plan.weights import quantize_tensor
from quark_fx.rescale.rotation_sites import RotationAnalysis, RotationSite, find_rotation_sites
from quark_fx.rescale.scale_sites import SiteAnalysis, find_scale_sites

_ENOUGH = 0.8
"""Fraction of the largest gain above which a remedy that changes less is preferred."""


@dataclass(frozen=True)
class Estimates:
    """Estimates of the gains of remedies, from the analysis of one configuration.

    Attributes:
        gm: Float graph.
        config: Analyzed configuration.
        rounded: All rounded values.
        errors: Contribution of each rounded value to the error.
        leaves: Flat inputs of a few samples.
        positions: Positions in the samples that are not padding; `None` for all positions.
    """

    gm: GraphModule
    config: QuantConfig
    rounded: Sequence[RoundedValue]
    errors: Sequence[float]
    leaves: list[Any]
    positions: Positions | None

    @cached_property
    def plan(self) -> Plan:
        """Plan of the configuration, on nodes of the float graph."""
        return plan_quantization(self.gm, self.config, quiet=True)

    @cached_property
    def operators(self) -> dict[str, Quantized]:
        """Quantized operators, by the names of their nodes."""
        return {op.node.name: op for op in self.plan.operators if isinstance(op, Quantized)}

    @cached_property
    def fused(self) -> dict[str, tuple[str, ...]]:
        """Names of the operators that the target fuses with each operator, by the operator's name.

        The fused operators, including the operator itself, have the same specs. Empty if the target does not fuse.
        """
        groups = siblings(self.plan.operators) if self.config.target.placement.fuses else ()
        return {op.name: tuple(other.name for other in group) for group in groups for op in group}

    @cached_property
    def scale_sites(self) -> SiteAnalysis:
        """Sites where channels can be scaled."""
        return find_scale_sites(self.gm)

    @cached_property
    def rotation_sites(self) -> RotationAnalysis:
        """Sites where values can be rotated."""
        return find_rotation_sites(self.gm)

    def remedies(self, names: Sequence[str], module: str) -> list[Remedy]:
        """Return the remedies for the values of some operators, the recommended one first.

        Args:
            names: Names of the operators' nodes, all in one module; empty for a value without an operator.
            module: Name of the module.
        """
        exclusion = self._in_float(names, module)
        remedies = [exclusion]
        ops = [self.operators[name] for name in names if name in self.operators]
        if len(ops) == 1 and isinstance(ops[0], Coded) and ops[0].linear is not None:
            remedies = [*self._cheaper(ops[0]), exclusion]
        most = max(remedy.gain for remedy in remedies)
        best = next(remedy for remedy in remedies if remedy.gain >= _ENOUGH * most)
        rest = sorted((r for r in remedies if r is not best and r.gain > 0), key=lambda r: -r.gain)
        return [best, *(r for r in rest if r is not exclusion), *([exclusion] if best is not exclusion else [])]

    def _in_float(self, names: Sequence[str], module: str) -> Remedy:
        """Return the remedy that leaves operators in float.

        If needed, the remedy also leaves other operators in float that round the same values.
        """
        values = {v.value: v for v in self.rounded if not v.is_weight and set(names) & set(v.operators)}
        makers = [self._pattern(node) for node, value in self.plan.outputs.items() if value.name in values]
        nodes = named_nodes(self.gm)
        readers = [self._pattern(nodes[name]) for v in values.values() for name in v.operators]
        tried = []
        for more in ([], makers, [*makers, *readers]):
            exclude = tuple(dict.fromkeys(o for name in (module, *more) for o in (name, *self.fused.get(name, ()))))
            added = exclude[1:] if len(exclude) == 2 else (f"{len(exclude) - 1} more",) * (len(exclude) > 2)
            what = "float" + "".join(f" with {other}" for other in added)
            gain = sum(self.errors[place] for place in self.ended(exclude))
            tried.append(Remedy(what=what, gain=gain, exclude=exclude))
        most = max(remedy.gain for remedy in tried)
        return next(remedy for remedy in tried if remedy.gain >= _ENOUGH * most)

    def _pattern(self, node: Node) -> str:
        return self.operators[node.name].name if node.name in self.operators else names_of(node).name

    def ended(self, exclude: tuple[str, ...]) -> set[int]:
        """Return the indices of the values that are no longer rounded if `exclude` is added to the exclusions."""
        plan = plan_quantization(self.gm, self.config.replace(exclude=(*self.config.exclude, *exclude)), quiet=True)
        quantized = {op.node.name for op in plan.operators if isinstance(op, Quantized)}
        values = {point.value.name for point in plan.points.values()}
        stay = (bool(quantized.intersection(v.operators)) if v.is_weight else v.value in values for v in self.rounded)
        return {place for place, stays in enumerate(stay) if not stays}

    def _cheaper(self, op: Coded) -> Iterator[Remedy]:
        """Yield remedies that leave an operator quantized, from the smallest change to the largest."""
        trial, name = _OperatorTrial.of(self, op), op.node.name
        pairs = zip(self.errors, self.rounded, strict=True)
        shares = [(e / len(v.operators), v.is_weight) for e, v in pairs if name in v.operators]
        error, of_weight = sum(e for e, _ in shares), sum(e for e, is_weight in shares if is_weight)
        before = trial.error(op.input, op.weight)
        if before <= 0 or error <= 0:
            return

        def remedy(what: str, local: Callable[[], float], **changes: Any) -> Iterator[Remedy]:
            candidate = Remedy(what=what, gain=0.0, **changes)
            try:
                candidate.applied(self.config)
                gain = error * (1 - local() / before)
            except (ConfigError, ValueError):  # the remedy is not possible with this target or data
                return
            if gain > 0:
                yield Remedy(what=what, gain=gain, **changes)

        specs: list[tuple[str, Callable[[], float], tuple[Override, ...], bool]] = []
        if of_weight < error / 2 and op.input is not None:
            for what, spec, wider in _other_activations(op.input):
                overrides = tuple(self._value_overrides(op, trial.linear, spec))
                specs.append((what, partial(trial.error, spec, op.weight), overrides, wider))
        else:
            for what, spec, wider in _other_weights(op.weight):
                overrides = tuple(Override(pattern=o, weight=spec) for o in self.fused.get(op.name, (op.name,)))
                specs.append((what, partial(trial.error, op.input, spec), overrides, wider))
        for bits in (False, True):
            for what, local, overrides, wider in specs:
                if wider is bits:
                    yield from remedy(what, local, overrides=overrides)
            if not bits:
                yield from self._transforms(op, trial, remedy)

    def _transforms(
        self, op: Coded, trial: _OperatorTrial, remedy: Callable[..., Iterator[Remedy]]
    ) -> Iterator[Remedy]:
        passes = {pass_name(p) for p in self.config.passes}
        names = {operator.node: operator.name for operator in self.operators.values()}
        plain = trial.linear.groups == 1 and not trial.linear.stacked
        for site in self.scale_sites.sites if plain and op.input is not None and "SmoothQuant" not in passes else ():
            readers = [reading.reader for reading in site.inputs]
            if op.node in readers:
                only = tuple(dict.fromkeys(names[node] for node in readers if node in names))
                yield from remedy("SmoothQuant", trial.smoothed, passes=(SmoothQuant(only=only),))
        rotates = any(isinstance(p, Rotating) for p in self.config.passes)
        for turned in self.rotation_sites.sites if plain and not trial.linear.kernel and not rotates else ():
            if any(linear.node is op.node for linear in turned.readers) and _covers(turned, trial.linear):
                rotation = turned.draw(torch.Generator().manual_seed(0))
                only = tuple(dict.fromkeys(names[r.node] for r in turned.readers if r.node in names))
                if turned.overhead(rotation) <= Rotate().overhead:
                    yield from remedy("Rotate", partial(trial.rotated, rotation), passes=(Rotate(only=only),))

    def _value_overrides(self, op: Coded, linear: Linear, spec: TensorSpec) -> Iterator[Override]:
        """Yield the overrides that change the spec of an operator's input value wherever that value is rounded."""
        value = linear.activation
        for other in self.operators.values():
            if other.input == op.input and value in other.node.all_input_nodes:
                yield Override(pattern=other.name, input=spec)
        for node, rounded in self.plan.outputs.items():
            if rounded is value and not spec.dynamic:
                yield Override(pattern=self._pattern(node), output=spec)


def _covers(site: RotationSite, linear: Linear) -> bool:
    """Return True if a site rotates all inputs of an operator, because a trial rotates the whole activation."""
    inputs, weight = linear.shape[linear.input_axis], linear.stored.node
    return any(absorber.parameter is weight and absorber.runs.numel() == inputs for absorber in site.absorbers)


@dataclass(frozen=True, eq=False)
class _OperatorTrial:
    """One operator, with its input and output on a few samples.

    Attributes:
        op: Operator.
        linear: Geometry of the operator.
        module: Graph from the activation and the weight to the output.
        x: Float activation.
        weight: Float weight.
        positions: Positions in the samples that are not padding; `None` for all positions.
        output: Float output.
    """

    op: Coded
    linear: Linear
    module: GraphModule
    x: Tensor
    weight: Tensor
    positions: Positions | None
    output: Tensor

    @classmethod
    def of(cls, estimates: Estimates, op: Coded) -> _OperatorTrial:
        assert op.linear is not None
        gm, value = estimates.gm, op.linear.activation
        before = extract(gm, placeholders(gm), [value])
        module = extract(gm, [value, op.weight_node], [op.node])
        weight = parameter(gm, op.weight_node).detach()
        with torch.no_grad():
            (x,) = before(*estimates.leaves)
            return cls(op, op.linear, module, x, weight, estimates.positions, module(x, weight)[0])

    def error(self, activation: TensorSpec | None, weight: TensorSpec) -> float:
        """Return the squared error of the operator's output with other specs, relative to the square of the output."""
        return self._error(_rounded(self.x, activation, self.linear), self._coded(self.weight, weight))

    def smoothed(self) -> float:
        """Return the relative error with channels scaled by SmoothQuant at strength 0.5."""
        largest = self._by_channel(self.x)
        reach = self.weight.float().abs().movedim(self.linear.input_axis, 0).flatten(1).amax(1)
        scale = torch.where((largest > 0) & (reach > 0), (largest / reach.clamp_min(1e-12)).sqrt(), 1.0)
        of_weight, of_inputs = self.linear.of_inputs(scale), self._along(scale, self.x)
        x = _rounded(self.x / of_inputs, self.op.input, self.linear)
        return self._error(x * of_inputs, self._coded(self.weight * of_weight, self.op.weight) / of_weight)

    def rotated(self, rotation: Rotation) -> float:
        """Return the relative error with a rotated activation and weight."""

        def turn(x: Tensor, axis: int, how: Rotation) -> Tensor:
            return how.apply(x.double().movedim(axis, -1)).movedim(-1, axis).to(x)

        axis, back = self.linear.input_axis, rotation.inverse
        x = _rounded(turn(self.x, -1, rotation), self.op.input, self.linear)
        weight = self._coded(turn(self.weight, axis, rotation), self.op.weight)
        return self._error(turn(x, -1, back), turn(weight, axis, back))

    def _coded(self, weight: Tensor, spec: TensorSpec) -> Tensor:
        return quantize_tensor(weight, spec, linear=self.linear, pairs=self.op.pairs).dequantize().to(weight)

    def _error(self, x: Tensor, weight: Tensor) -> float:
        with torch.no_grad():
            outputs = self.module(x.to(self.output), weight.to(self.output))
        return float(relative_error(unpadded(outputs, self.positions), unpadded([self.output], self.positions)))

    def _by_channel(self, x: Tensor) -> Tensor:
        axis = self.linear.channel_dim(x.dim())
        return x.float().abs().movedim(axis, 0).flatten(1).amax(1)

    def _along(self, scale: Tensor, x: Tensor) -> Tensor:
        shape = [1] * x.dim()
        shape[self.linear.channel_dim(x.dim())] = -1
        return scale.reshape(shape)


def _rounded(x: Tensor, spec: TensorSpec | None, linear: Linear) -> Tensor:
    """Return an activation fake-quantized with the range of `x` itself; `spec=None` leaves it in float."""
    if spec is None:
        return x
    if spec.is_cast:
        return x.to(spec.format.dtype).to(x.dtype)
    rounded: Tensor
    if spec.dynamic:
        measurement = spec.measurement(linear.channel_dim(x.dim()))
        fmt, _, axis, block, *_ = measurement
        rounded = fake_quantize(x, *dynamic_qparams(x, *measurement), fmt, axis, block)
    else:
        qparams = spec.new_observer.observe(x.reshape(1, -1)).qparams(spec.scheme)
        rounded = fake_quantize(x, qparams.scale.reshape(()), qparams.zero_point.reshape(()), str(spec.format))
    return rounded


def _other_activations(spec: TensorSpec) -> Iterator[tuple[str, TensorSpec, bool]]:
    """Yield alternative specs for an activation, each with a description and whether it needs more bits."""
    if not spec.dynamic and spec.observer == MinMax():
        yield "observer Mse", spec.replace(observer=Mse()), False
        yield "observer Percentile(99.9)", spec.replace(observer=Percentile(percentile=99.9)), False
    if spec.format.is_integer and spec.format.bits < 16 and not spec.dynamic:
        yield "int16 activation", spec.replace(format=INT16), True


def _other_weights(spec: TensorSpec) -> Iterator[tuple[str, TensorSpec, bool]]:
    """Yield alternative specs for a weight, each with a description and whether it needs more bits."""
    offsets = spec.symmetry is Symmetry.OFFSET  # requires unsigned codes, and ranges that begin at the smallest value
    if spec.observer == MinMax() and not offsets:
        yield "weight observer Mse", spec.replace(observer=Mse()), False
    if spec.granularity is Granularity.TENSOR and not spec.is_cast:
        yield "a weight scale per channel", spec.replace(granularity=Granularity.CHANNEL), False
    if spec.format.is_integer and spec.format.bits < (8 if offsets else 16):
        fmt = UINT8 if offsets else INT8 if spec.format.bits < 8 else INT16
        yield f"{fmt} weight", spec.replace(format=fmt), True


__all__ = ["Estimates"]
