"""The quantized operators of a block that multiply the same rows, as one product: weights one under the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from quark_fx.block_walk import BlockRun
from quark_fx.context import Context
from quark_fx.graph import named_nodes, tensor_of
from quark_fx.grid import Grid
from quark_fx.linear_map import LinearMap, linear_map
from quark_fx.operators import argument
from quark_fx.pass_manager import Change
from quark_fx.qparams import ScaleType, constrain_scale, recover_global_scale
from quark_fx.quantized_weights import QuantizedWeight
from quark_fx.scale_search import fit_scales
from quark_fx.second_moment import Entrance, SecondMoment


@dataclass(frozen=True)
class Product:
    """Operators that read one value and multiply it alike: what is computed of that value serves them all.

    Matrices have the shape (groups, outputs of all operators, inputs).

    Attributes:
        run: the block they are in.
        weights: theirs.
        mappings: how each multiplies; they differ in how the weight is stored at most.
        real: the float weights as matrices, float32.
    """

    run: BlockRun
    weights: tuple[QuantizedWeight, ...]
    mappings: tuple[LinearMap, ...]
    real: Tensor

    @property
    def names(self) -> str:
        """The modules the operators come from, for messages."""
        return ", ".join(weight.name for weight in self.weights)

    def _grid(self, scale: Tensor, zero_point: Tensor) -> Grid:
        first = self.weights[0]
        return Grid(scale, zero_point, first.scheme.limits, format=first.float_format)

    def codes(self) -> Tensor:
        """Return the codes that are stored now, as float32 matrices."""
        return self._matrices([tensor_of(self.run.module, weight.codes).float() for weight in self.weights])

    def grid(self) -> Grid:
        """Return what the codes stand for, as matrices."""
        grids = [weight.grid(self.run.module) for weight in self.weights]
        stored = [tensor_of(self.run.module, weight.codes) for weight in self.weights]
        scale, zero_point = (
            self._matrices([p.expand_as(like) for p, like in zip(parameters, stored, strict=True)])
            for parameters in ([grid.scale for grid in grids], [grid.zero_point for grid in grids])
        )
        return self._grid(scale, zero_point)

    def split(self, matrices: Tensor) -> tuple[Tensor, ...]:
        """Return the part of each operator."""
        sizes = [tensor_of(self.run.module, w.codes).numel() // self.real[:, 0].numel() for w in self.weights]
        return tuple(torch.split(matrices, sizes, 1))

    def store(self, codes: Tensor) -> None:
        """Store the codes of all operators, given as matrices."""
        for weight, mapping, part in zip(self.weights, self.mappings, self.split(codes), strict=True):
            old = tensor_of(self.run.module, weight.codes)
            self.run.store(weight.codes, mapping.restore(part, old).to(old.dtype))

    def fit_scales(self, h: Tensor) -> list[QuantizedWeight]:
        """Shrink and store scales where that brings the outputs nearer, `h` being the moment of what is multiplied.

        Scales per tensor, powers of two, those of sub-groups, and those that a bias follows stay; the operators that
        have such are returned.
        """
        left = []
        parts = zip(self.weights, self.mappings, self.split(self.real), strict=True)
        for weight, mapping, real in parts:
            if not _fits_scales(weight):
                left.append(weight)
                continue
            old = weight.scale(self.run.module)
            kind, constrain = weight.scheme.scale_type, _constrained(weight, old)
            block = weight.block_size if weight.block_size > 0 else real.shape[-1]
            found = weight.grid(self.run.module)
            stored = tensor_of(self.run.module, weight.codes)
            scale, zero_point = (mapping.matrix(p.expand_as(stored)) for p in (found.scale, found.zero_point))
            ratio = fit_scales(real, h, self._grid(scale, zero_point), block, constrain if kind.is_8_bit else None)
            # Scales lie as the weight does, with fewer inputs; one per channel as a vector.
            ratio = mapping.restore(ratio, old) if old.dim() > 1 else ratio.reshape(-1)
            self.run.store(weight.scale_name, old.sign() * constrain((old.abs() * ratio).double()))
        return left

    def second_moment(self, context: Context, *, shifted: bool = False) -> SecondMoment:
        """Return the sums over what enters the product, of all calibration batches, everything before quantized.

        Args:
            context: of the run.
            shifted: compare with what enters it in float, too; not where data chooses the rows: the float model may
                route other tokens to an expert than the quantized one, and its rows have no counterparts.
        """
        weight, mapping, run = self.weights[0], self.mappings[0], self.run
        groups, _, inputs = self.real.shape
        entrance = Entrance(run.module, weight.node, weight.row, mapping, run.inputs)
        reference = None
        if shifted and mapping.offsets is None:
            real = named_nodes(run.reference)[weight.node.name]
            reference = Entrance(run.reference, real, weight.row, mapping, run.reference_inputs)
        return SecondMoment.measure(context, (groups, inputs), entrance, reference)

    def _matrices(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([mapping.matrix(t) for mapping, t in zip(self.mappings, tensors, strict=True)], 1)


def _fits_scales(weight: QuantizedWeight) -> bool:
    """Tell whether each stored scale of a weight may shrink by itself."""
    spec = weight.operator.weight
    assert spec is not None
    free = spec.scale_type is not ScaleType.POWER_OF_TWO and spec.sub_group_size is None
    return free and weight.axis is not None and not weight.bias_scale_follows


def _constrained(weight: QuantizedWeight, stored: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what makes of wanted scales those of the weight's kind, below the global scale that it has."""
    kind = weight.scheme.scale_type
    unit = recover_global_scale(stored) if kind is ScaleType.FP8_E4M3 else None
    return partial(constrain_scale, scale_type=kind, global_scale=unit)


def find_products(run: BlockRun, weights: Iterable[QuantizedWeight], context: Context) -> list[Product]:
    """Return the products of a block in order; an operator that multiplies in an unknown way is noted as left alone."""
    found: dict[object, list[tuple[QuantizedWeight, LinearMap, Tensor]]] = {}
    for weight in weights:
        stored = tensor_of(run.reference, weight.weight).detach().float()
        mapping = linear_map(weight.node, weight.row, stored)
        if mapping is None:
            context.note(Change(weight.name, "left: how it multiplies is not known", changed=False))
            continue
        activation, scheme = argument(weight.node, weight.row.activations[0]), weight.scheme
        key = activation, replace(mapping, transposed=False), scheme.format, scheme.limits
        found.setdefault(key, []).append((weight, mapping, mapping.matrix(stored)))
    return [
        Product(run, tuple(weights), tuple(mappings), torch.cat(list(matrices), 1))
        for weights, mappings, matrices in (zip(*parts, strict=True) for parts in found.values())
    ]


__all__ = ["Product", "find_products"]
