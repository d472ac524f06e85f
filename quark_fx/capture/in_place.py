"""Conversion of in-place operators to functional ones in one walk, including writes to views and their sources.

An overwritten value gets a new node; later reads through other views of the same memory are recomputed from that node.
Retracing the program has the same effect, but takes longer than the first trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.errors import CaptureError, Declined
from quark_fx.graph.nodes import (
    call,
    cast,
    describe,
    is_getitem,
    is_known,
    parameter,
    static_size,
    target_name,
    value_of,
)
from quark_fx.graph.operators import Motion, motion, permutation

_aten = torch.ops.aten


def make_functional(gm: GraphModule) -> None:
    """Replace the in-place operators of `gm` with functional operators.

    Raises:
        Declined: If a write goes through an operator without a known inverse; the graph is then incomplete.
        CaptureError: If a parameter or buffer is overwritten.
    """
    nodes = list(gm.graph.nodes)
    if any(_is_mutation(node) for node in nodes):
        walk = _Walk(gm, {node: i for i, node in enumerate(nodes)})
        for node in nodes:
            walk.visit(node)


def _schema(node: Node) -> Any:
    return getattr(node.target, "_schema", None) if node.op == "call_function" else None


def _is_mutation(node: Node) -> bool:
    schema = _schema(node)
    return schema is not None and schema.is_mutable


def _arguments(node: Node) -> dict[str, Any]:
    """Return the arguments of a call, keyed by their names in the schema, including defaults."""
    schema = _schema(node).arguments
    arguments = dict(zip((a.name for a in schema), node.args, strict=False)) | node.kwargs
    return {a.name: arguments.get(a.name, a.default_value) for a in schema}


def _aliases(node: Node) -> bool | None:
    """Tell whether a call returns the memory of its first argument; `None` if that depends on dynamic strides."""
    schema = _schema(node)
    if schema is None or not node.args or not any(r.alias_info is not None for r in schema.returns):
        return False
    name, source = target_name(node), node.args[0]
    if name in ("aten.lift_fresh.default", "aten.lift_fresh_copy.default") or not isinstance(source, Node):
        return False
    if name.startswith(("aten.to.", "aten.type_as.")):
        x, y = source.meta.get("val"), node.meta.get("val")
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return None
        if (x.dtype, x.device) != (y.dtype, y.device):
            return False
        arguments = _arguments(node)
        return None if arguments.get("copy") or arguments.get("memory_format") is not None else True
    if name in _COPYING:
        return True if _is_contiguous(source.meta.get("val")) else None
    return True


def _is_contiguous(value: Any) -> bool:
    expected: Any = 1
    if not isinstance(value, Tensor):
        return False
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not is_known(size == 1) and not is_known(stride == expected):
            return False
        expected = expected * size
    return True


def _same_sizes(a: Tensor, b: Tensor) -> bool:
    return a.dim() == b.dim() and all(is_known(x == y) for x, y in zip(a.shape, b.shape, strict=True))


_COPYING = frozenset(f"aten.{name}" for name in ("contiguous.default", "reshape.default", "reshape_as.default")) | {
    "aten.flatten.using_ints"
}
"""Operators that copy a value unless it is contiguous."""

_RENAMINGS = frozenset(
    f"aten.{name}_.default" for name in ("t", "unsqueeze", "squeeze", "transpose", "detach", "swapaxes", "swapdims")
) | {"aten.squeeze_.dim", "aten.squeeze_.dims"}
"""In-place operators that change the interpretation of a tensor's memory, not its contents."""


_FILLS = frozenset({"aten.copy_.default", "aten.fill_.Scalar", "aten.fill_.Tensor", "aten.zero_.default"})
"""In-place operators that ignore the old values."""


@dataclass
class _Walk:
    """The state of the walk over the nodes of a graph.

    Attributes:
        gm: Module of the graph.
        order: Position of every node in the captured graph.
        sources: Value whose memory a view shares, keyed by view.
        doubtful: Views that may be copies.
        versions: Number of times that a value with separate memory was overwritten, keyed by value.
        current: Latest computed version of a value, and the node that computes it, keyed by the value's node.
        renamed: View that replaces a value whose shape was changed in place, keyed by value.
        results: Calls of in-place operators; each represents the value that it overwrote.
    """

    gm: GraphModule
    order: dict[Node, int]
    sources: dict[Node, Node] = field(default_factory=dict)
    doubtful: set[Node] = field(default_factory=set)
    versions: dict[Node, int] = field(default_factory=dict)
    current: dict[Node, tuple[int, Node]] = field(default_factory=dict)
    renamed: dict[Node, Node] = field(default_factory=dict)
    results: set[Node] = field(default_factory=set)

    def visit(self, node: Node) -> None:
        """Make one node of the captured graph functional, with the current contents of memory as its inputs."""
        if node.op in ("placeholder", "get_attr"):
            return
        source = self._named(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        mutation, aliases = _is_mutation(node), _aliases(node)
        if self.versions or self.renamed:
            with self.gm.graph.inserting_before(node):
                node.args = map_arg(node.args, lambda n: self._now(self._named(n)))
                node.kwargs = map_arg(node.kwargs, lambda n: self._now(self._named(n)))
        if mutation:
            self._overwrite(node, source)
        elif source is not None and (aliases is not False or (is_getitem(node) and source in self.sources)):
            self.sources[node] = source
            self.current[node] = (self.versions.get(self._root(node), 0), node)
            if aliases is None:
                self.doubtful.add(node)

    def _named(self, node: Node) -> Node:
        while node in self.renamed:
            node = self.renamed[node]
        return node

    def _root(self, node: Node) -> Node:
        while node in self.sources:
            node = self.sources[node]
        return node

    def _now(self, node: Node) -> Node:
        """Return a node with the current value of `node`, inserted at the graph's insertion point if necessary."""
        version = self.versions.get(self._root(node), 0)
        value_version, value = self.current.get(node, (0, node))
        if value_version == version:
            return value
        renewed = self._now(self.sources[node])  # the value of a root is always current
        if node in self.results:
            value = renewed
        else:
            value = self.gm.graph.node_copy(node, lambda n: renewed if n is node.args[0] else n)
        self.current[node] = (version, value)
        return value

    def _overwrite(self, node: Node, target: Node | None) -> None:
        arguments = _schema(node).arguments
        written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        name, overload = node.target._schema.name.split("::")[1], node.target._overloadname  # type: ignore[union-attr]
        functional = getattr(getattr(_aten, name.removesuffix("_"), None), overload, None)
        if target is None or functional is None or not name.endswith("_") or written != [arguments[0].name]:
            raise Declined(describe(node))
        root, renames = self._root(target), target_name(node) in _RENAMINGS
        # Once filled, a buffer is like any other value.
        writes = root.op == "get_attr" and root not in self.versions and target_name(node) != "aten.detach_.default"
        if writes and not self._fills(root, target, node) and self._is_read(root):
            raise CaptureError(
                f"{describe(node)} overwrites the parameter or buffer {root.target}, so each call depends on earlier "
                "ones, but a captured graph keeps no state: compute the new value without in-place operators (seen = "
                "self.seen + 1), or make the state an argument of the model and return the new state"
            )
        self.sources[node] = target
        if renames:
            node.target = functional
            self.current[node] = (self.versions.get(root, 0), node)
            self.renamed[target] = node
            return
        self._refuse_doubts(node, target, root)
        self.results.add(node)
        with self.gm.graph.inserting_before(node.next):
            value = self._computed(node, target, functional)
            values = {node: value, target: value}
            while target in self.sources:
                target, value = self._written_back(target, value)
                values[target] = value
        version = self.versions[root] = self.versions.get(root, 0) + 1
        self.current |= {n: (version, v) for n, v in values.items()}

    def _fills(self, root: Node, target: Node, node: Node) -> bool:
        """Tell whether `node` overwrites a whole buffer that nothing has read before."""
        if target is not root or target_name(node) not in _FILLS or len(self._readers(root)) > 1:
            return False
        return all(self.order.get(user, -1) >= self.order[node] for user in root.users)

    def _is_read(self, root: Node) -> bool:
        """Tell whether an output depends on a buffer, through this call's write or an earlier one."""
        visited, ahead = set[Node](), self._readers(root)
        while ahead:
            node = ahead.pop()
            if node in visited:
                continue
            visited.add(node)
            ahead += node.users
            if node in self.results or _is_mutation(node):  # later consumers may read this memory through another node
                ahead.append(self._memory(node))
        return any(node.op == "output" for node in visited)

    def _memory(self, node: Node) -> Node:
        """Return the value whose memory a node of the captured graph returns, visited or not."""
        while isinstance(source := self.sources.get(node) or (_aliases(node) is not False and node.args[0]), Node):
            node = source
        return node

    def _readers(self, root: Node) -> list[Node]:
        """Return all `get_attr` nodes whose tensor shares memory with the tensor of `root`, including `root`."""
        place = parameter(self.gm, root).untyped_storage().data_ptr()
        parameters = [other for other in self.order if other.op == "get_attr" and other is not root]
        return [root, *(o for o in parameters if parameter(self.gm, o).untyped_storage().data_ptr() == place)]

    def _refuse_doubts(self, node: Node, target: Node, root: Node) -> None:
        """Raise an error if `node` writes through a possible copy, or a possible view of its target is read later."""
        for view in self.sources if self.doubtful else ():
            chain = [view]
            while chain[-1] in self.sources:
                chain.append(self.sources[chain[-1]])
            if chain[-1] is root and self.doubtful.intersection(chain):
                read_later = any(self.order.get(user, -1) > self.order[node] for user in view.users)
                if view is target or read_later:
                    raise Declined(f"{describe(node)} and {describe(view)}")

    def _computed(self, node: Node, target: Node, functional: Any) -> Node:
        """Make `node` compute the value that the write leaves in `target`; return the node with that value."""
        like, mine = value_of(self.gm, target), node.meta
        if functional is _aten.copy.default:
            value: Node = node.args[1]  # type: ignore[assignment]
            source = value_of(self.gm, value)
            if source.dtype != like.dtype or source.device != like.device:
                moved = {} if source.device == like.device else {"device": like.device}
                value = call(self.gm, _aten._to_copy.default, value, dtype=like.dtype, like=node, **moved)
            if not _same_sizes(source, like):
                value = self._like(_aten.expand.default, node, like, value, self._sizes(target, like))
            # The node itself has no more consumers; as an alias, it is removed.
            node.target, node.args, node.kwargs = _aten.alias.default, (value,), {}
            return value
        node.target = functional
        inputs = [v.meta.get("val") for v in node.all_input_nodes]
        if all(not isinstance(v, Tensor) or v.dtype == like.dtype for v in inputs):
            return node
        named: dict[str, Any] = dict(node.kwargs)
        trial = call(self.gm, functional, *node.args, **named)
        dtype = trial.meta["val"].dtype
        self.gm.graph.erase_node(trial)
        if dtype == like.dtype:
            return node
        # The operator computes in a wider dtype than the overwritten value has.
        node.meta = mine | {"val": mine["val"].to(dtype)}
        return cast(self.gm, node, like.dtype, node)

    def _written_back(self, view: Node, value: Node) -> tuple[Node, Node]:
        """Return the source of `view`, and a node with the source's value after `value` is written to the view."""
        source, name = self.sources[view], target_name(view)
        if view in self.results or motion(view) is Motion.COPY or name.startswith(("aten.to.", "aten.type_as.")):
            return source, value
        if is_getitem(view):
            part, source = source, self.sources[source]
            index: Any = view.args[1]
            inverse = self._part_written_back(part, index, value, source)
        else:
            inverse = self._inverse(view, name, value, source)
        return source, inverse

    def _inverse(self, view: Node, name: str, value: Node, source: Node) -> Node:
        like, arguments = value_of(self.gm, source), _arguments(view)
        dims = [arguments[key] for key in ("dim", "dim0", "dim1", "dims") if key in arguments]
        if (order := permutation(view)) is not None:
            back = [order.index(dim) for dim in range(len(order))]
            if [*order] == back and name != "aten.permute.default":
                return self._like(view.target, view, like, value, *view.args[1:])
            return self._like(_aten.permute.default, view, like, value, back)
        if name == "aten.unsqueeze.default":
            return self._like(_aten.squeeze.dim, view, like, value, dims[0])
        if name == "aten.squeeze.dim":
            same = len(value_of(self.gm, view).shape) == like.dim()
            return value if same else self._like(_aten.unsqueeze.default, view, like, value, dims[0])
        if motion(view) is Motion.RESHAPE:
            return self._like(_aten.reshape.default, view, like, value, self._sizes(source, like))
        if name == "aten.narrow.default":
            dim, start, length = (arguments[key] for key in ("dim", "start", "length"))
            now, end = self._now(source), start + length
            end = None if isinstance(start, int) and start < 0 and end == 0 else end  # 0 would be the first element
            return self._like(_aten.slice_scatter.default, view, like, now, value, dim, start, end)
        scatter = _SCATTERS.get(name)
        if scatter is None:
            raise Declined(describe(view))
        return self._like(scatter, view, like, self._now(source), value, *view.args[1:], **view.kwargs)

    def _part_written_back(self, part: Node, index: int, value: Node, source: Node) -> Node:
        like, dim = value_of(self.gm, source), _arguments(part).get("dim", 0)
        name = target_name(part)
        if name == "aten.unbind.int":
            return self._like(_aten.select_scatter.default, part, like, self._now(source), value, dim, index)
        sizes = [static_size(piece.shape[dim]) for piece in part.meta["val"][: index + 1]]
        if None in sizes or not name.startswith(("aten.split", "aten.chunk.", "aten.tensor_split")):
            raise Declined(describe(part))
        start, end = sum(sizes[:-1]), sum(sizes)  # type: ignore[arg-type]
        return self._like(_aten.slice_scatter.default, part, like, self._now(source), value, dim, start, end)

    def _sizes(self, node: Node, like: Tensor) -> list[Any]:
        """Return the sizes of a value as arguments: numbers, and nodes for dynamic sizes."""
        sizes: list[Any] = []
        for dim, size in enumerate(like.shape):
            fixed: Any = static_size(size)
            if fixed is None:
                fixed = self.gm.graph.call_function(_aten.sym_size.int, (self._now(node), dim))
                fixed.meta["val"] = size
            sizes.append(fixed)
        return sizes

    def _like(self, operation: Any, source: Node, like: Tensor, *args: Any, **kwargs: Any) -> Node:
        """Insert a call whose result has the known sizes and dtype of `like`."""
        node = self.gm.graph.call_function(operation, args, kwargs)
        node.meta = {k: source.meta[k] for k in ("stack_trace", "nn_module_stack") if k in source.meta} | {"val": like}
        return node


_SCATTERS = {
    "aten.select.int": _aten.select_scatter.default,
    "aten.slice.Tensor": _aten.slice_scatter.default,
    "aten.diagonal.default": _aten.diagonal_scatter.default,
}
"""Views of a part of a tensor, and the operators that write that part."""


__all__ = ["make_functional"]
