"""State of the analysis for `quark_fx.rescale.scale_sites`: the values of a graph that must have equal scales.

Every value that the analysis reaches has *labels*: a tensor of the value's rank, of size 1 along dimensions in which
labels do not change, with the number of a scale *component* for each element, or -1 for elements without a request (a
scale of one). The value may be divided by the scales of its components. Rules (`rescale.scale_rules`) derive labels of
one value from labels of another. Labels only gain components, and the scales of components only become equal (*tied*)
or one (*frozen*, with a reason), so the order of the rules does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import describe, is_floating, is_getitem, parameter, static_size, value_of
from quark_fx.rescale.components import Components

_SMALL = 2
"""Size used for dynamic dimensions when a rearrangement is evaluated, unless it is too small; the result is the same
for every size."""


@dataclass(frozen=True, eq=False)
class Absorption:
    """A parameter that absorbs scales.

    Attributes:
        node: Operator that reads the parameter.
        position: Position of the parameter among the operator's arguments, directly or through a transposition; -1 for
            other paths.
        parameter: The `get_attr` node of the parameter.
        labels: Scale component of each element, -1 for a scale of one; broadcastable with the parameter, which is
            expanded to the common shape.
        divides: Whether the parameter is divided by the scales of its components; otherwise it is multiplied.
    """

    node: Node
    position: int
    parameter: Node
    labels: Tensor
    divides: bool


@dataclass(frozen=True, eq=False)
class ScaledInput:
    """An activation that is divided, as the input of a weighted operator.

    Attributes:
        linear: The operator.
        value: The activation.
        axis: Channel dimension of the activation, counted from 0.
        labels: Scale component of each channel, -1 for a scale of one; shape `(channels of the value,)`.
    """

    linear: Linear
    value: Node
    axis: int
    labels: Tensor

    @property
    def reader(self) -> Node:
        """Call of the operator."""
        return self.linear.node


class Walk:
    """Labels of values, parameters that absorb scales, and the nodes whose rules must still run."""

    def __init__(self, gm: GraphModule) -> None:
        self.gm = gm
        self.components = Components()
        self.labels: dict[Node, Tensor] = {}
        self.pending: dict[Node, None] = {}
        self.absorptions: dict[Node, list[Absorption]] = {}
        self.bounds: dict[Node, Tensor] = {}
        self.inputs: dict[Node, ScaledInput] = {}
        self.products: dict[Node, Tensor] = {}
        self.reasons: list[tuple[Node | None, str]] = [(None, "")]
        self._known: dict[str, Any] = {}
        self._symbols = _small_sizes(gm)
        self._sizes: dict[Any, int] = {}
        self._readers: dict[Any, list[Node]] = {}
        for node in gm.graph.nodes:
            if node.op == "get_attr":
                self._readers.setdefault(_identity(parameter(gm, node)), []).extend(node.users)

    def shape(self, value: Node) -> torch.Size:
        """Return the (symbolic) shape of a node's value."""
        shape: torch.Size = value_of(self.gm, value).shape
        return shape

    def sharer(self, node: Node, reader: Node) -> Node | None:
        """Return another consumer of a `get_attr` node's constant, or `None`; `reader` itself if it reads it twice."""
        readers = self._readers[_identity(parameter(self.gm, node))]
        other = next((other for other in readers if other is not reader), None)
        return reader if other is None and len(readers) > 1 else other

    def join(self, value: Node, labels: Tensor) -> None:
        """Request the scales `labels`, broadcastable to `value`; components requested for the same element are tied."""
        labels = self._uniform(labels, [d for d, size in enumerate(self.shape(value)) if _varies(size)])
        old = self.labels.get(value)
        if old is None:
            old = torch.full([1] * labels.dim(), -1)
        old, labels = torch.broadcast_tensors(old, labels)
        both = (old >= 0) & (labels >= 0)
        self.components.tie(old[both], labels[both])
        # A frozen component requests nothing, because elements without a request are not scaled, either.
        new = (old < 0) & (labels >= 0) & (self.components.reasons(labels) == 0)
        if bool(new.any()):
            self.labels[value] = _narrow(self.components.roots(torch.where(new, labels, old)))
            self.pending[value] = None
            self.pending.update(dict.fromkeys(value.users))

    def _uniform(self, labels: Tensor, dims: Iterable[int]) -> Tensor:
        for dim in dims:
            if labels.shape[dim] > 1:
                first = labels.amax(dim, keepdim=True)
                asked = labels >= 0
                self.components.tie(labels[asked], first.expand_as(labels)[asked])
                labels = first
        return labels

    def uniform(self, value: Node, dims: Iterable[int]) -> Tensor | None:
        """Tie the components of `value` along `dims`; return its labels, of size 1 along `dims`, if it has labels."""
        labels = self.labels.get(value)
        if labels is None:
            return None
        labels = self._uniform(labels, [d % labels.dim() for d in dims])
        self.join(value, labels)
        return labels

    def fixed(self, value: Node) -> Tensor | None:
        """Tie the components of `value` along dynamic dimensions; return its labels."""
        return self.uniform(value, [d for d, size in enumerate(self.shape(value)) if static_size(size) is None])

    def along(self, value: Node, dims: Sequence[int]) -> Tensor | None:
        """Let `value` vary along `dims` only; return its components along `dims`, in that shape."""
        rank = len(self.shape(value))
        axes = [dim % rank for dim in dims]
        labels = self.uniform(value, [d for d in range(rank) if d not in axes])
        if labels is None:
            return None
        sizes = [self.concrete(self.shape(value)[d]) if d in axes else 1 for d in range(rank)]
        return labels.expand(sizes).reshape([sizes[d] for d in axes])

    def broadcast(self, values: Sequence[Node], output: Node) -> None:
        """Tie each element of `output` to the elements of `values` that are broadcast to it."""
        rank = len(self.shape(output))
        for value in values:
            if value in self.labels:
                self.join(output, lift(self.labels[value], rank))
        if output in self.labels:
            for value in values:
                self.join(value, self.fit(self.labels[output], value))

    def fit(self, labels: Tensor, value: Node) -> Tensor:
        """Return the labels that `value` has if it is broadcast to a result with `labels`."""
        shape = self.shape(value)
        extra = labels.dim() - len(shape)
        ones = [d for d in range(labels.dim()) if d < extra or static_size(shape[d - extra]) == 1]
        fitted = self._uniform(labels, ones)
        return fitted.reshape(fitted.shape[extra:])

    def link(
        self,
        sources: Sequence[Node],
        output: Node,
        key: str,
        positions: Callable[[], Tensor],
        *,
        uniform: Sequence[int] = (),
    ) -> None:
        """Tie each element of `output` to the element of `sources` that it copies.

        Args:
            sources: Values; their elements are numbered consecutively.
            output: Result of rearranging the elements of `sources`.
            key: Text that, with the shapes of `sources` and `output`, identifies the result of `positions`.
            positions: Function that returns, in the shape of `output`, the number of the source element of each
                element, or -1 for a zero.
            uniform: Dimensions along which sources must not vary.
        """
        for source in sources:
            self.uniform(source, uniform)
        shapes = [self.sizes(source) for source in sources]
        labels_of = [
            self.labels.get(s, torch.full([1] * len(shape), -1)) for s, shape in zip(sources, shapes, strict=True)
        ]
        key = f"{key} {shapes} {self.sizes(output)}"
        if any(source in self.labels for source in sources):
            # Layers repeat, so the movement of labels is computed once for labels that vary along the same dimensions.
            which = self._once(
                f"forward {key} {[list(labels.shape) for labels in labels_of]}",
                lambda: _forward(labels_of, shapes, self._once(key, positions)),
            )
            flat = torch.cat([labels.flatten() for labels in labels_of])
            self.join(output, torch.where(which >= 0, flat[which.clamp(min=0)], -1))
        if output not in self.labels:
            return
        labels = self.labels[output]
        back, tied = self._once(
            f"backward {key} {list(labels.shape)}", lambda: _backward(labels, shapes, self._once(key, positions))
        )
        flat = labels.flatten()
        # A source element with several copies in the output gets the scale of a copy that requests one; all are tied.
        top = flat.scatter_reduce(0, tied[0], flat[tied[1]], "amax")
        ends = torch.cat([tied[0], tied[1]])
        asked = flat[ends] >= 0
        self.components.tie(flat[ends][asked], top[tied[0]].repeat(2)[asked])
        flat = top
        for source, where in zip(sources, back, strict=True):
            labels_back = torch.where(where >= 0, flat[where.clamp(min=0)], -1)
            self.join(source, self._uniform(labels_back, [d % labels_back.dim() for d in uniform]))

    def _once(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = compute()
        return self._known[key]

    def freeze(self, values: Iterable[Node], reason: str) -> None:
        """Fix the scale of `values` to one; `reason` completes the sentence "its input ..."."""
        for value in values:
            if value in self.labels and self.components.freeze(self.labels[value], len(self.reasons)):
                self.reasons.append((value, reason))

    def stop_read(self, node: Node, values: Iterable[Node], how: str = "", *, shared_with: Node | None = None) -> None:
        """Record that `node` reads `values` in a way that stops every scale.

        Args:
            node: The consumer.
            values: Inputs of the consumer.
            how: Text that completes the reason.
            shared_with: Another consumer of the node's parameter, if sharing is the reason.
        """
        self.freeze(values, f"{read_by(node, shared_with)}{how}")

    def stop_made(self, node: Node, *, shared_with: Node | None = None) -> None:
        """Record that `node` computes a value that it cannot scale; for `shared_with`, see `stop_read`."""
        self.freeze([node], made_by(node, shared_with))

    def stop(self, node: Node, *, inputs: bool = True) -> None:
        """Stop every scale at an operator."""
        if inputs:
            self.stop_read(node, node.all_input_nodes)
        self.stop_made(node)

    def concrete(self, size: Any) -> int:
        """Return a size, or a small size in place of a dynamic one.

        Raises:
            Declined: If no valid small size exists.
        """
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression: Any = size.node.expr
        if expression not in self._sizes:
            sizes = {symbol: self._symbols.get(symbol, _SMALL) for symbol in expression.free_symbols}
            self._sizes[expression] = int(expression.subs(sizes))
        if self._sizes[expression] < 1:
            raise Declined(f"{expression} is not positive")
        return self._sizes[expression]

    def sizes(self, value: Node) -> list[int]:
        """Return the shape of a value, with small sizes in place of dynamic ones."""
        return [self.concrete(size) for size in self.shape(value)]

    def numbered(self, value: Node, first: int = 0) -> Tensor:
        """Return the numbers of the elements of `value`: `first`, `first + 1`, ... in its shape."""
        sizes = self.sizes(value)
        return torch.arange(first, first + math.prod(sizes)).reshape(sizes)

    def ask(self, value: Node, asked: Tensor) -> None:
        """Give a component to elements of `value` without one where the broadcastable mask `asked` is true."""
        is_asked = self.fit(torch.where(asked, 0, -1), value) >= 0
        present = self.labels.get(value)
        missing = is_asked if present is None else is_asked & (present < 0)
        fresh = torch.full(missing.shape, -1)
        fresh[missing] = self.components.fresh(int(missing.sum()))
        self.join(value, fresh)

    def move(self, node: Node, arguments: tuple[Any, ...] | None = None, *, uniform: Sequence[int] = ()) -> None:
        """Tie the elements of a rearrangement to the elements of its floating-point inputs; its index inputs are zero.

        Args:
            node: The call, or the selection of one of its results.
            arguments: Replacement for the call's positional arguments.
            uniform: Dimensions along which the inputs must not vary.

        Raises:
            Declined: If the call does not run with the sizes chosen for dynamic dimensions.
        """
        call: Any = node.args[0] if is_getitem(node) else node
        positional = call.args if arguments is None else arguments
        sources = [n for n in call.all_input_nodes if is_floating(self.gm, n)]
        first = dict(zip(sources, accumulate((math.prod(self.sizes(n)) for n in sources), initial=0), strict=False))

        def plain(n: Node) -> Any:
            value = value_of(self.gm, n)
            if not isinstance(value, Tensor):
                return self.concrete(value)
            # Some rearrangements, such as reflection padding, do not support integers.
            return self.numbered(n, first[n]).double() if n in first else torch.zeros(self.sizes(n), dtype=torch.long)

        def positions() -> Tensor:
            args, kwargs = map_arg((positional, call.kwargs), plain)
            try:
                result = call.target(*args, **kwargs)
            except Exception as error:
                raise Declined(str(error)) from error
            result = result[node.args[1]] if call is not node else result
            if list(result.shape) != self.sizes(node):
                raise Declined(f"{list(result.shape)} is not {self.sizes(node)}")
            return result.long()  # type: ignore[no-any-return]

        which = node.args[1:] if call is not node else ()
        given_sizes = map_arg((positional, call.kwargs), lambda n: first[n] if n in first else self._size(n))
        self.link(sources, node, f"{call.target} {which} {given_sizes}", positions, uniform=uniform)

    def _size(self, node: Node) -> Any:
        value = value_of(self.gm, node)
        return self.sizes(node) if isinstance(value, Tensor) else self.concrete(value)


def read_by(node: Node, sharer: Node | None = None) -> str:
    """Complete the sentence "its input …" about a consumer; `sharer` is another consumer of its parameter."""
    return "is an output of the model" if node.op == "output" else f"is read by {describe(node)}{_shared(sharer)}"


def made_by(node: Node, sharer: Node | None = None) -> str:
    """Complete the sentence "its input …" about a producer; for `sharer`, see `read_by`."""
    if node.op == "get_attr" and sharer is not None:
        return f"is the constant {node.target}, which {describe(sharer)} reads, too"
    return "is an input of the model" if node.op == "placeholder" else f"is made by {describe(node)}{_shared(sharer)}"


def _shared(sharer: Node | None) -> str:
    return "" if sharer is None else f", whose parameters are shared with {describe(sharer)}"


def _forward(labels: Sequence[Tensor], shapes: Sequence[list[int]], positions: Tensor) -> Tensor:
    """Return, for labels that vary like `labels`, the index of the label for each element of the output, or -1."""
    numbers, first = [], 0
    for source, shape in zip(labels, shapes, strict=True):
        numbers.append((torch.arange(source.numel()) + first).reshape(source.shape).expand(shape).flatten())
        first += source.numel()
    return _narrow(torch.where(positions >= 0, torch.cat(numbers)[positions.clamp(min=0)], -1))


def _backward(labels: Tensor, shapes: Sequence[list[int]], positions: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return, for labels that vary like `labels`, the index of the label for each source element, and tied pairs."""
    numbers = torch.arange(labels.numel()).reshape(labels.shape).expand(positions.shape)
    read = positions >= 0
    where, which = positions[read], numbers[read]
    back = torch.full((sum(math.prod(shape) for shape in shapes),), -1)
    back[where] = which
    several = back[where] != which
    pairs = torch.unique(torch.stack([back[where[several]], which[several]]), dim=1)
    parts = back.split([math.prod(shape) for shape in shapes])
    return [_narrow(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)], pairs


def _small_sizes(gm: GraphModule) -> dict[Any, int]:
    """Return a small size for each symbol so that no value of the graph is empty."""
    shapes: list[Any] = [v.shape for node in gm.graph.nodes if isinstance(v := value_of(gm, node), Tensor)]
    sizes = {size.node.expr: size.node.hint for shape in shapes for size in shape if isinstance(size, torch.SymInt)}
    hints = {expression: hint for expression, hint in sizes.items() if expression.is_Symbol and hint is not None}
    small: dict[Any, int] = {}
    for at_least in (_SMALL, 16, 256, 4096, math.inf):
        small = {symbol: int(min(int(hint), at_least)) for symbol, hint in hints.items()}
        if all(expression.subs(small).is_positive is not False for expression in sizes):
            break
    return small


def _varies(size: Any) -> bool:
    """Tell whether a size is dynamic without a constant factor (batch size times number of heads has one)."""
    return static_size(size) is None and int(size.node.expr.as_coeff_Mul()[0]) in (0, 1)


def lift(labels: Tensor, rank: int) -> Tensor:
    """Return labels of rank `rank`, with leading dimensions of size 1."""
    return labels.reshape([1] * (rank - labels.dim()) + list(labels.shape))


def _narrow(labels: Tensor) -> Tensor:
    """Reduce dimensions along which labels do not vary to size 1."""
    for dim in range(labels.dim()):
        first = labels.narrow(dim, 0, 1) if labels.shape[dim] > 1 else labels
        if labels.shape[dim] > 1 and bool((labels == first).all()):
            labels = first
    return labels


def _identity(tensor: Tensor) -> Any:
    """Return a key that is equal for all names of the same constant."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel()
