"""The quantized operators of a block that multiply the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from quark_fx.block_walk import BlockRun
from quark_fx.context import Context
from quark_fx.error_feedback import Factor, at_once, factor, made_up_for, round_with_feedback, solve
from quark_fx.errors import CalibrationError
from quark_fx.graph import named_nodes, tensor_of
from quark_fx.grid import Grid
from quark_fx.layout import Columns
from quark_fx.linear_map import LinearMap
from quark_fx.pass_manager import Change
from quark_fx.qparams import ScaleType, constrain_scale, recover_global_scale
from quark_fx.quantized_tensor import decode
from quark_fx.quantized_weights import QuantizedWeight
from quark_fx.scale_search import fit_scales, fit_scales_to_feedback
from quark_fx.second_moment import Entrance, SecondMoment

R = TypeVar("R")

_SAMPLED = 64
"""Output channels, about, that errors are measured on: on all it would cost as much as the rest."""


Factors = Callable[[], Iterable[tuple[slice, Factor]]]
"""Returns the factors of a second moment, each with the matrices of a stack that it is of."""


@dataclass(frozen=True)
class Part:
    """One operator of a product. Its matrices have the shape (groups, outputs, inputs).

    Attributes:
        run: the block it is in.
        weight: its own.
        mapping: how it multiplies.
        real: the float weight as matrices.
    """

    run: BlockRun
    weight: QuantizedWeight
    mapping: LinearMap
    real: Tensor

    def codes(self) -> Tensor:
        """Return the codes that are stored now, as matrices."""
        return self.mapping.matrix(tensor_of(self.run.module, self.weight.codes))

    def grid(self, matrices: slice = slice(None)) -> Grid:
        """Return what the codes stand for, as matrices; of a stack, those of `matrices`."""
        found = self.weight.grid(self.run.module, matrices if self.mapping.stacked else slice(None))
        scale, zero_point = (self.mapping.matrix(p) for p in (found.scale, found.zero_point))
        return replace(found, scale=scale, zero_point=zero_point, layout=None, movable=False)

    def error(self, target: Tensor, h: Tensor) -> float:
        """Return the squared error of the output over its square, for some output channels.

        Args:
            target: the weight that would make none, the shape of `real`.
            h: sum of `x x'` of what is multiplied, shape (groups, inputs, inputs).
        """
        some, codes = slice(None, None, max(1, target.shape[1] // _SAMPLED)), self.codes()
        noise, signal = torch.zeros(2, device=h.device, dtype=torch.float32)
        for matrices in [slice(i, i + 1) for i in range(len(h))] if self.mapping.stacked else [slice(None)]:
            grid, aim = self.grid(matrices), target[matrices, some]
            scale, zero_point = (p.expand_as(target[matrices])[:, some] for p in (grid.scale, grid.zero_point))
            lost = decode(codes[matrices, some].float(), scale, zero_point) - aim
            noise += ((lost @ h[matrices]) * lost).sum()
            signal += ((aim.float() @ h[matrices]) * aim).sum()
        return float(noise / signal.clamp_min(torch.finfo(torch.float32).tiny))

    def keep_if_lower(self, target: Tensor, h: Tensor, change: Callable[[], R]) -> tuple[R, float, float, bool]:
        """Take back what `change` stores if the error on the data behind `h` is higher with it.

        Returns:
            What `change` returned, the error before, the error of what was kept, and whether it was.
        """
        module, names = self.run.module, (self.weight.codes, self.weight.scale_name)
        old, was = {name: tensor_of(module, name) for name in names}, self.error(target, h)
        result = change()
        now = self.error(target, h)
        if now <= was:
            return result, was, now, True
        for name, tensor in old.items():
            if tensor_of(module, name) is not tensor:
                self.run.store(name, tensor)
        return result, was, was, False

    def store(self, codes: Tensor) -> None:
        """Store codes, given as matrices."""
        old = tensor_of(self.run.module, self.weight.codes)
        codes = self.mapping.restore(codes.to(old.dtype), old)
        self.run.store(self.weight.codes, self.weight.storable(self.run.module, codes))

    def target(self, moment: SecondMoment, factors: Factors, share: float) -> Tensor:
        """Return the weight to round: its own, moved towards what the float model makes of its own inputs.

        Args:
            moment: of what is multiplied.
            factors: of it.
            share: of the way, 0 to 1; where the moment was not shifted there is none to go.
        """
        if moment.shift is None:
            return self.real
        ((_, found),) = factors()
        return self.real + share * solve(found, self.real.float() @ moment.shift)

    def round(self, target: Tensor, factors: Factors) -> float:
        """Round `target` with error feedback and store its codes; return the damping that was needed.

        Args:
            target: the shape of `real`.
            factors: of the moment of what is multiplied.
        """
        codes, damping = torch.empty_like(self.codes()), 0.0
        for matrices, found in factors():
            codes[matrices] = round_with_feedback(target[matrices], found, self.grid(matrices), codes.dtype)
            damping = max(damping, found.damping)
        self.store(codes)
        return damping

    def made_up_for(self, target: Tensor, factors: Factors) -> Tensor:
        """Return what the codes that `round` stored are nearest to, arguments as it had them."""
        wanted, codes = torch.empty_like(target, dtype=torch.float32), self.codes()
        for matrices, found in factors():
            value = self.grid(matrices).value(codes[matrices].float())
            wanted[matrices] = made_up_for(target[matrices].float(), value, found)
        return wanted

    def fit_scales(self, h: Tensor) -> bool:
        """Shrink and store scales where that brings the outputs nearer, `h` being the moment of what is multiplied.

        Scales per tensor, powers of two, those of sub-groups, and those that a bias follows stay: then it is false.
        """
        return self._shrink(lambda grid, columns, allowed: fit_scales(self.real.float(), h, grid, columns, allowed))

    def fit_scales_to_feedback(self, target: Tensor, factors: Factors) -> bool:
        """Shrink and store scales where `round`, called with the same arguments, then loses less.

        Which stay, and what is returned, is as `fit_scales` has it.
        """

        def ratios(grid: Grid, columns: Columns, allowed: Callable[[Tensor], Tensor] | None) -> Tensor:
            ratio = []
            for matrices, found in factors():
                scale, zero_point = (p.expand_as(target)[matrices] for p in (grid.scale, grid.zero_point))
                part = replace(grid, scale=scale, zero_point=zero_point)
                ratio.append(fit_scales_to_feedback(target[matrices].float(), found, part, columns, allowed))
            return torch.cat(ratio)

        return self._shrink(ratios)

    def _shrink(self, ratios: Callable[[Grid, Columns, Callable[[Tensor], Tensor] | None], Tensor]) -> bool:
        """Multiply the stored scales by what `ratios` returns, if they are free to change; return whether they are."""
        weight, layout = self.weight, self.weight.layout(self.run.module)
        columns = layout.columns(self.mapping)
        if columns is None or not _fits_scales(weight):
            return False
        old = weight.scale(self.run.module)
        kind, constrain = weight.scheme.scale_type, _constrained(weight, old)
        ratio = ratios(self.grid(), columns, constrain if kind.is_8_bit else None)
        ratio = layout.restore(ratio, self.mapping)
        self.run.store(weight.scale_name, old.sign() * constrain((old.abs() * ratio).double()))
        return True


@dataclass(frozen=True)
class Product:
    """Operators that read one value and multiply it alike: what is computed of that value serves them all."""

    parts: tuple[Part, ...]

    @property
    def names(self) -> str:
        """The modules the operators come from, for messages."""
        return ", ".join(part.weight.name for part in self.parts)

    def second_moment(
        self, context: Context, *, shifted: bool = False, batches: Sequence[int] | None = None
    ) -> SecondMoment:
        """Return the sums over what enters the product, everything before quantized.

        Args:
            context: of the run.
            batches: of calibration; default: all.
            shifted: compare with what enters it in float, too; not where data chooses the rows: the float model may
                route other tokens to an expert than the quantized one, and its rows have no counterparts.
        """
        first = self.parts[0]
        weight, mapping, run = first.weight, first.mapping, first.run
        groups, _, inputs = first.real.shape
        entrance = Entrance(run.module, weight.linear, mapping, run.inputs)
        reference = None
        if shifted and mapping.offsets is None:
            real = named_nodes(run.reference)[weight.node.name]
            reference = Entrance(run.reference, weight.linear.at(real), mapping, run.reference_inputs)
        return SecondMoment.measure(context, (groups, inputs), entrance, reference, batches=batches)

    def factors(self, moment: SecondMoment, *, damping: float, by_activation: bool) -> Factors:
        """Return the factors of `moment`.

        What serves all parts is made once; the factors of a long stack, which would fill the memory, as they come.

        Args:
            moment: of what enters the product.
            damping, by_activation: as `quark_fx.error_feedback.factor` takes them.

        Raises:
            CalibrationError: for a moment that has no factor; the message names the operators.
        """
        stack = self.parts[0].mapping.stacked and moment.shift is None
        slices = at_once(moment.h) if stack else [slice(None)]

        def make() -> Iterator[tuple[slice, Factor]]:
            for matrices in slices:
                try:
                    yield matrices, factor(moment.h[matrices], damping=damping, by_activation=by_activation)
                except CalibrationError as error:
                    raise CalibrationError(
                        f"{self.names}: {error}; check the calibration data, or exclude the operator"
                    ) from error

        if len(slices) > 1:
            return make
        common = list(make())
        return lambda: common


def _fits_scales(weight: QuantizedWeight) -> bool:
    """Tell whether each stored scale of a weight may shrink by itself."""
    spec = weight.operator.weight
    assert spec is not None
    free = spec.scale_type is not ScaleType.POWER_OF_TWO and spec.sub_group_size is None
    return free and not weight.bias_scale_follows


def _constrained(weight: QuantizedWeight, stored: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what makes of wanted scales those of the weight's kind, below the global scale that it has."""
    kind = weight.scheme.scale_type
    unit = recover_global_scale(stored) if kind is ScaleType.FP8_E4M3 else None
    return partial(constrain_scale, scale_type=kind, global_scale=unit)


def find_products(run: BlockRun, weights: Iterable[QuantizedWeight], context: Context | None) -> list[Product]:
    """Return the products of a block in order.

    Args:
        run: the block.
        weights: of the operators.
        context: where an operator that multiplies in an unknown way is noted as left alone; `None`: nowhere.
    """
    found: dict[object, list[Part]] = {}
    for weight in weights:
        stored = tensor_of(run.reference, weight.weight).detach()
        mapping = weight.linear.matrices
        if mapping is None:
            if context is not None:
                context.note(Change(weight.name, "left: how it multiplies is not known", changed=False))
            continue
        part = Part(run, weight, mapping, mapping.matrix(stored))
        found.setdefault((weight.linear.activation, replace(mapping, transposed=False)), []).append(part)
    return [Product(tuple(parts)) for parts in found.values()]


__all__ = ["Factors", "Part", "Product", "find_products"]
