"""Quantized operators of a block with the same input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import Guidance
from quark_fx.engine.quantized_weights import QuantizedWeight, share_changed
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, tensor_of
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.places import OperatorPlace
from quark_fx.solvers.quantized_matrix import QuantizedMatrix


@dataclass(frozen=True)
class Part(OperatorPlace):
    """The weight of one operator of a product.

    Attributes:
        mapping: Mapping from the operator to matrix products.
        real: Float weight in the shape it is stored in.
    """

    mapping: LinearMap
    real: Tensor

    @property
    def now(self) -> QuantizedMatrix:
        """Current quantized weight."""
        weight, module = self.weight, self.run.module
        stored, real = weight.stored(module), self.mapping.matrix(self.real)
        movable, ranges = weight.movable(module), weight.storable_ranges(module)
        return QuantizedMatrix(weight.name, real, stored, weight.scheme, self.mapping, movable, weight.limited, ranges)

    def tensors(self, new: QuantizedMatrix) -> dict[str, Tensor]:
        """Return the codes, scales, and offsets that are new; an int32 bias follows its scales.

        Raises:
            OverflowError: If that bias overflows at the new scales.
        """
        weight, old, found = self.weight, self.weight.stored(self.run.module), dict[str, Tensor]()
        if new.stored.scale is not old.scale:
            found[weight.scale_name] = new.stored.scale
            if (bias := weight.int32_bias) is not None:
                found |= bias.rescaled(self.run.module, new.stored.scale / old.scale)
        if new.stored.zero_point is not old.zero_point:
            found[weight.zero_point_name] = new.stored.zero_point
        if new.stored.codes is not old.codes:
            found[weight.codes] = new.stored.codes
        return found

    def difference(self, new: QuantizedMatrix) -> Tensor:
        """Return the fraction of codes that are new, and whether scales are, float64, shape (2,)."""
        old, stored = self.weight.stored(self.run.module), new.stored
        return torch.stack((share_changed(old.codes, stored.codes), (old.scale != stored.scale).any().double()))

    def changed(self, new: QuantizedMatrix) -> list[str]:
        """Return the names of the parts that `new` changes."""
        return changed_parts(*self.difference(new).tolist())

    def store(self, new: QuantizedMatrix) -> None:
        """Store another quantized weight; raises the errors of `tensors`."""
        self.run.store_all(self.tensors(new))


@dataclass(frozen=True)
class Product:
    """Operators that multiply the same rows, so that statistics of those rows serve them all."""

    parts: tuple[Part, ...]

    def hessian(
        self,
        context: Context,
        *,
        shifted: bool = False,
        guidance: Guidance | None = None,
        batches: Sequence[int] | None = None,
    ) -> Hessian:
        """Return the sums over the product's input rows, with everything before it quantized.

        Args:
            context: Context of the run.
            shifted: Compare with the float input as well. Ignored if data chooses the rows: the float model may route
                other tokens to an expert than the quantized model, so rows do not correspond.
            guidance: Weights of the rows, for a product of one operator.
            batches: Calibration batches; default: all.
        """
        first = self.parts[0]
        weight, mapping, run = first.weight, first.mapping, first.run
        entrance = Entrance(run.module, weight.linear, mapping, run.inputs)
        reference = None
        if shifted and mapping.offsets is None:
            real = named_nodes(run.reference)[weight.linear.node.name]
            reference = Entrance(run.reference, weight.linear.at(real), mapping, run.reference_inputs)
        unguided = "" if guidance is None else guidance.missing(weight.linear)
        weights = None if guidance is None or unguided else partial(guidance.of, weight.linear.node.name)
        found = Hessian.measure(context, entrance, reference, batches=batches, weights=weights)
        found.unguided = f"unguided: {unguided}" * bool(unguided)
        return found


def changed_parts(share: float, scales: float) -> list[str]:
    """Return the names of a weight's new parts, given its `Part.difference`."""
    return ["scales"] * bool(scales) + [f"{share:.1%} of the codes"] * bool(share)


def find_products(run: BlockRun, weights: Iterable[QuantizedWeight]) -> list[Product]:
    """Return the products of a block in order, without operators of an unsupported weight layout.

    Args:
        run: Block to search.
        weights: Weights of its operators.
    """
    found: dict[object, list[Part]] = {}
    for weight in weights:
        if (mapping := weight.linear.matrices) is not None:
            real = tensor_of(run.reference, weight.weight).detach()
            found.setdefault(Entrance.key(weight.linear, mapping), []).append(Part(run, weight, mapping, real))
    return [Product(tuple(parts)) for parts in found.values()]


__all__ = ["Part", "Product", "changed_parts", "find_products"]
