"""The modules of the original model that round activations: modules that consume or produce them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.fx import Graph, Node

from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import describe, is_activation, module_calls, module_path
from quark_fx.graph.operators import KEEPS_ORDER, motion, moves
from quark_fx.numbers.ops import Measurement

SPLIT = "split"
"""Operator of a `Factor` that splits directions off an activation."""

UNROTATED = "set overhead=0 in the pass that rotates (Rotate, LearnRotations)"
"""Advice in errors about a value that cannot be multiplied at run time."""


@dataclass(frozen=True, eq=False)
class Factor:
    """The factor by which a pass multiplies an activation, or the directions that it splits off.

    Attributes:
        operator: Name of the operator in `quark_fx.graph.provenance.FACTORS`, or `SPLIT`.
        tensors: Constants of the operator; for `SPLIT`, the matrices of `LowRank`, shapes (rank, channels) and
            (channels, rank).
    """

    operator: str
    tensors: tuple[Tensor, ...]

    @property
    def by_rows(self) -> bool:
        """True if each row of the last dimension is multiplied separately, with any shape of the other dimensions."""
        return self.operator != "aten.mul.Tensor"

    def apply(self, x: Tensor) -> Tensor:
        """Return `x` multiplied by the factor; not for `SPLIT`, which the branch of a module applies."""
        if self.operator == "aten.mul.Tensor":
            return x * self.tensors[0]
        rotated: Tensor = torch.ops.quark_fx.rotate(x, *self.tensors)
        return rotated

    def same_as(self, other: Factor) -> bool:
        """Tell whether both multiply by the same values."""
        if self.operator != other.operator:
            return False
        return all(a is b or torch.equal(a, b) for a, b in zip(self.tensors, other.tensors, strict=True))


@dataclass(frozen=True)
class Activation:
    """The rounding of an activation.

    Attributes:
        format: Name of the format, empty for a cast.
        scale: Static scale, shape `()`, or the shape of a scale per head and channel; `None` if measured at run time.
        zero_point: Static zero point of the same shape, or `None`.
        symmetry: Symmetry of a range that is measured at run time.
        axis: Dimension along which scales vary, counted from the last (-1); `None` for one scale.
        block_size: Number of values per measured scale, see `quark_fx.numbers.ops`.
        scale_type: Format of measured scales.
        group_size: Group size of measured scales, see `quark_fx.numbers.ops.dynamic_qparams`.
        ratio: Fraction of the measured range, see `quark_fx.numbers.ops.dynamic_qparams`.
        cast: The 16-bit dtype to which the activation is cast and back; `None` without a cast.
        factors: Factors that are applied before the rounding, in order.
        rank: Number of dimensions of an activation whose scales are measured; `None` if unknown.
    """

    format: str = ""
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    symmetry: str = ""
    axis: int | None = None
    block_size: int = 0
    scale_type: str = "float32"
    group_size: int = 0
    ratio: float = 1.0
    cast: torch.dtype | None = None
    factors: tuple[Factor, ...] = ()
    rank: int | None = None

    @property
    def rounds(self) -> bool:
        """True if the activation is rounded, not only multiplied by factors."""
        return bool(self.format) or self.cast is not None

    @property
    def split(self) -> int | None:
        """Index of the factor that splits off directions for a branch of the module; `None` without such a factor."""
        return next((i for i, factor in enumerate(self.factors) if factor.operator == SPLIT), None)

    @property
    def is_fixed(self) -> bool:
        """True if rounding twice equals rounding once, without a measured range and without factors."""
        return not self.factors and (self.scale is not None or self.cast is not None)

    @property
    def layout(self) -> tuple[int | None, int]:
        """Granularity in the form of `quark_fx.numbers.ops`."""
        return self.axis, self.block_size

    @property
    def measurement(self) -> Measurement:
        """Arguments of `quark_fx.numbers.ops.dynamic_qparams` after the tensor."""
        return self.format, self.symmetry, *self.layout, self.scale_type, self.group_size, self.ratio

    @property
    def per_token(self) -> bool:
        """True if each row of the last dimension has a measured scale."""
        return self.axis == -1 and self.block_size < 0

    def same_as(self, other: Activation) -> bool:
        """Tell whether both round every value in the same way."""
        tensors = tuple((getattr(self, name), getattr(other, name)) for name in ("scale", "zero_point"))
        if len(self.factors) != len(other.factors):
            return False
        if not all(a.same_as(b) for a, b in zip(self.factors, other.factors, strict=True)):
            return False
        kinds = [(a.measurement, a.cast) for a in (self, other)]
        return kinds[0] == kinds[1] and all(
            a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in tensors
        )


Rounded = Mapping[tuple[Node, Node], Activation]
"""Rounding of a value for a consumer, keyed by the nodes of both in the float graph."""


@dataclass(frozen=True, eq=False)
class Branch:
    """The branch that is added to the product of an operator with a split input.

    Attributes:
        columns: Weights of the directions that are split off, shape (outputs, rank).
        rounded: Rounding of the product before the sum, or `None`.
    """

    columns: Tensor
    rounded: Activation | None


@dataclass
class RoundedModules:
    """The modules that round their input or result, or have a branch.

    Attributes:
        inputs: Rounding of the floating-point input of modules, keyed by path.
        outputs: Rounding of the floating-point result of modules, keyed by path.
        branches: Branches that are added to the results of modules, keyed by path.
    """

    inputs: dict[str, Activation] = field(default_factory=dict)
    outputs: dict[str, Activation] = field(default_factory=dict)
    branches: dict[str, Branch] = field(default_factory=dict)


def place_rounding(
    graph: Graph, rounded: Rounded, branches: Mapping[Node, Branch], *, at_readers: bool = False
) -> RoundedModules:
    """Find the modules whose input or result is a rounded activation of a graph.

    Args:
        graph: The float graph.
        rounded: Activations of the graph that are rounded or multiplied.
        branches: Branches that are added to the products of operators.
        at_readers: Whether the factors of an activation that is not rounded are applied by each consumer module, as
            checkpoints need, or, if that is impossible, by the module that computes the activation. If false, that
            module comes first, which multiplies only once.

    Raises:
        QuarkError: If an activation is neither an input nor a result of a module; the message names its consumer.
    """
    places = _Places(graph, rounded, at_readers=at_readers)
    modules = places.find()
    for node, branch in branches.items():
        places.place_branch(node, branch)
    return modules


class _Places:
    """The module calls of a graph, and the rounding assigned to them."""

    def __init__(self, graph: Graph, rounded: Rounded, *, at_readers: bool) -> None:
        self.rounded, self.at_readers = rounded, at_readers
        self.calls: dict[str, set[str]] = {}
        self.regions: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for key, path in module_calls(node).items():
                self.calls.setdefault(path, set()).add(key)
                self.regions.setdefault(key, []).append(node)
        self.hooked: dict[str, set[str]] = {}
        self.modules = RoundedModules()

    def find(self) -> RoundedModules:
        if not self.at_readers:
            for value in {value: None for value, _ in self.rounded}:
                self._place_factors(value)
        for (value, reader), activation in self.rounded.items():
            if activation.is_fixed and _commutes(reader, activation) and self._all_round(reader, activation):
                continue  # data movement; the result is rounded again to the same codes
            ways = [self._place_input, self._place_output]
            if not activation.rounds and not self.at_readers:
                ways.reverse()  # multiplies once
            if not any(place(value, reader, activation) for place in ways):
                raise _not_of_a_module(reader, activation)
        for path, hooked in self.hooked.items():
            if hooked != self.calls[path]:
                reader, activation = next((r, a) for (_, r), a in self.rounded.items() if module_path(r) == path)
                raise _not_of_a_module(reader, activation)
        return self.modules

    def _place_factors(self, value: Node) -> None:
        """Apply factors to the result of a module if all consumers apply the same factors and some do not round."""
        edges = {edge: activation for edge, activation in self.rounded.items() if edge[0] is value}
        plain = [reader for (_, reader), activation in edges.items() if activation.factors and not activation.rounds]
        if not plain or len(plain) == len(edges):
            return
        common = Activation(factors=edges[value, plain[0]].factors)
        if not all(replace(common, factors=a.factors).same_as(common) for a in edges.values()):
            return
        everything = self.rounded
        self.rounded = {**everything, **dict.fromkeys(edges, common)}
        placed = self._place_output(value, plain[0], common)
        rounding = {edge: replace(a, factors=()) for edge, a in edges.items() if a.rounds}
        self.rounded = (
            {edge: a for edge, a in everything.items() if edge not in edges} | rounding if placed else everything
        )

    def _place_input(self, value: Node, reader: Node, activation: Activation) -> bool:
        """Round the input of the module that reads `value`, if it is the only input and always rounded equally."""
        key, path = next(reversed(module_calls(reader).items()), ("", ""))
        entry = value
        while key in module_calls(entry) and _commutes(entry, activation) and len(entry.all_input_nodes) == 1:
            entry = entry.all_input_nodes[0]
        read = {n for node in self.regions.get(key, []) for n in node.all_input_nodes if key not in module_calls(n)}
        inside = [user for user in entry.users if key in module_calls(user)]
        if {n for n in read if is_activation(n)} != {entry} or not self._all_round(entry, activation, inside):
            return False
        if not self.modules.inputs.setdefault(path, activation).same_as(activation):
            return False
        self.hooked.setdefault(path, set()).add(key)
        return True

    def _place_output(self, value: Node, reader: Node, activation: Activation) -> bool:
        """Round the result of a module that computes a value for `reader`, if all other consumers round it equally.

        The module must be called once, since equal rounding in several calls would be a coincidence. Consumers that
        also round their input get rounded values, which gives the same result if the range does not depend on the
        values. Directions are split off at the operator that multiplies them.
        """
        placed = activation.split is None and (activation.is_fixed or not activation.rounds)
        calls = module_calls(value) if placed else {}
        for key, path in reversed(calls.items()):
            results = [n for n in self.regions[key] if any(key not in module_calls(user) for user in n.users)]
            outside = [user for user in value.users if key not in module_calls(user)]
            if (
                [n for n in results if is_activation(n)] == [value]
                and self.calls[path] == {key}
                and key not in module_calls(reader)
                and self._all_round(value, activation, outside)
            ):
                self.modules.outputs[path] = activation
                return True
        return False

    def place_branch(self, node: Node, branch: Branch) -> None:
        """Add a branch to the result of the module that only computes `node`.

        Raises:
            QuarkError: If the module computes something else, too.
        """
        key, path = next(reversed(module_calls(node).items()), ("", ""))
        activation = self.modules.inputs.get(path)
        result = node
        while activation is not None and len(result.users) == 1:
            (user,) = result.users
            if key not in module_calls(user) or not _commutes(user, activation):
                break
            result = user
        results = [n for n in self.regions.get(key, []) if any(key not in module_calls(user) for user in n.users)]
        if activation is None or activation.split is None or results != [result]:
            raise QuarkError(
                f"{describe(node)} has a float branch, but its module ({path or 'the model'}) also computes something "
                "else; call the quantized model itself, or exclude the layer from LowRank"
            )
        self.modules.branches[path] = branch

    def _all_round(self, value: Node, activation: Activation, users: Iterable[Node] | None = None) -> bool:
        """Tell whether all `users`, by default all consumers, read `value` with this rounding, or move it first."""
        users = value.users if users is None else users
        return bool(users) and all(
            self.rounded[value, user].same_as(activation)
            if (value, user) in self.rounded
            else _commutes(user, activation) and self._all_round(user, activation)
            for user in users
        )


def _not_of_a_module(reader: Node, activation: Activation) -> QuarkError:
    if activation.split is not None:
        return QuarkError(
            f"{describe(reader)} reads a value that LowRank split, but that value is not the only input of the "
            "operator's module; call the quantized model itself, or exclude the layer from LowRank"
        )
    if not activation.rounds:
        return QuarkError(
            f"{describe(reader)} reads a value that a pass multiplies at run time. eager() can multiply only the "
            "single input or the single output of a module, and this value is neither; call the quantized model "
            f"itself, or {UNROTATED}, or quantize without explicit=True"
        )
    alike = re.sub(r"\.\d+\.", ".*.", module_path(reader))  # the same module in every layer
    return QuarkError(
        f"{describe(reader)} reads a rounded activation. eager() can round only the single input of a module, if all "
        "of its calls round it equally, or the single output of a module that is called once, and this activation is "
        "neither; call the quantized model itself, or keep that activation in float with "
        f"Override(pattern='{alike}*', input=None, output=None)"
    )


def _commutes(node: Node, activation: Activation) -> bool:
    """Tell whether rounding before the node equals rounding after it."""
    if not moves(node):
        return False
    if activation.is_fixed:
        return True
    shapes = [n.meta["val"].shape for n in (node, node.all_input_nodes[0]) if isinstance(n.meta.get("val"), Tensor)]
    same_rows = len(shapes) == 2 and bool(shapes[0][-1:]) and shapes[0][-1] == shapes[1][-1]
    whole = activation.axis is None or (activation.axis == -1 and same_rows)
    by_rows = all(factor.by_rows for factor in activation.factors) and (same_rows or not activation.factors)
    return motion(node) in KEEPS_ORDER and whole and by_rows


__all__ = ["SPLIT", "UNROTATED", "Activation", "Branch", "Factor", "Rounded", "RoundedModules", "place_rounding"]
