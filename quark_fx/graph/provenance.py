"""Provenance of a graph: notes by capture, passes, and conversion about its relation to the model.

On nodes, in `node.meta`:

- `nn_module_stack`: the module calls that computed the node, in the form of `torch.export`.
- `made_by`: the pass that added or changed the node; `CONVERT` for codes and quantizers.
- `parameter` (of `get_attr`): the model's parameter or buffer whose values, or codes, the tensor holds.
- `digest` (of `get_attr`): checksum of a tensor that was not a parameter when it was captured or folded.
- `folded` (of `get_attr`): the source of the tensor, a `Folded`.
- `reshaped` (of operators): true if the model's code reshaped a parameter, and restored its shape, before the operator.
- `absorbed_maps` (of operators), `passed` (of removed calls): see `quark_fx.graph.absorbed`.
- `absorbed` (of `quantize`): names and module stacks of the clamps that its saturation performs, in order.

On the graph, in `gm.meta["rewrites"]`: module calls whose computation changed, each a `Rewrite`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quark_fx.graph.nodes import (
    CAST,
    ROTATE,
    is_activation,
    is_parameter,
    module_calls,
    module_path,
    parameter,
    source_line,
    target_name,
)
from quark_fx.graph.operators import BRANCH, moves

CONVERT = "convert"
"""Value of `made_by` for codes and quantizers."""

FACTORS = {"aten.mul.Tensor": 1, ROTATE: 2}
"""Operators with which passes multiply an input or output of a module, and the number of constants they take."""

MAPS, PASSED, CODE_READS = "absorbed_maps", "passed", "code_reads"
"""Notes of `quark_fx.graph.absorbed`: on an operator, on a call that is no longer in the graph, and on the graph."""

_NOTES = ("parameter", "digest", "folded")
"""Notes that a tensor inherits from the tensor it replaces."""

_PIECE = 1 << 26
"""Number of bytes that are read at once."""


class Kind(StrEnum):
    """Kind of change to a module call."""

    REPLACED = "replaced"
    """Other nodes, all within the same call, compute its result."""
    LEFT_OUT = "left out"
    """No node computes its result; consumers of the result read the input of the call."""
    REROUTED = "rerouted"
    """A consumer reads another value than before."""


@dataclass(frozen=True)
class Rewrite:
    """A module call that a pass rewrote.

    Attributes:
        path: Path of the module.
        made_by: Name of the pass.
        kind: Kind of change to the call.
        operator: Operator of the call that was removed; empty if unknown.
        line: Line of the user's code that called the operator; empty if unknown, and in a loaded model.
    """

    path: str
    made_by: str
    kind: Kind
    operator: str = ""
    line: str = field(default="", compare=False)


@dataclass(frozen=True)
class Folded:
    """The source of a constant.

    Attributes:
        tensors: Names of the parameters and buffers that the constant was computed from.
        undo: Steps that turn the constant back into the only source, last step first: a number to subtract, or a
            dtype to cast to; `None` if no such steps exist.
        view: Size, stride, and offset of the constant in the only source, stored contiguously, if data movement alone
            computed it; each element of the constant is then a different element of the source.
        name: Name that the constant would have as a parameter of the module that computes it.
    """

    tensors: tuple[str, ...]
    undo: tuple[float | torch.dtype, ...] | None
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None = None
    name: str = ""

    def undone(self, value: Tensor) -> Tensor | None:
        """Return the source tensor for which the constant equals `value`; `None` if unknown."""
        if self.undo is None:
            return None
        for step in self.undo:
            value = value.to(step) if isinstance(step, torch.dtype) else value - step
        return value


def digest(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes; a gigabyte takes about a second."""
    rows = tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    checksum = 0
    for piece in rows.split(_PIECE):
        checksum = zlib.crc32(piece.cpu().numpy().data, checksum)
    return checksum


def note_tensors(gm: GraphModule) -> None:
    """Note on every `get_attr` of a captured graph the name of its tensor, and a checksum if it is not a parameter."""
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            node.meta["parameter"] = str(node.target)
            tensor = parameter(gm, node)
            if not isinstance(tensor, torch.nn.Parameter) and not tensor.is_meta:
                node.meta["digest"] = digest(tensor)


def note_folded(gm: GraphModule, constant: Node, calls: Sequence[Node], main: Node, name: str) -> None:
    """Note the source of a constant.

    Args:
        gm: Graph.
        constant: Node that reads the constant.
        calls: Calls that compute the constant, in order; the constant replaces the last call.
        main: Parameter that the constant is named after.
        name: Value of `Folded.name`.
    """
    inputs = dict.fromkeys([main, *(n for call in calls for n in call.all_input_nodes if is_parameter(n))])
    before = [n.meta.get("folded") or Folded((n.meta.get("parameter", str(n.target)),), (), name="") for n in inputs]
    names = tuple(dict.fromkeys(tensor for folded in before for tensor in folded.tensors))
    steps = [_inverse(call) for call in reversed(calls)]
    alone = len(before) == 1 and all(len(call.all_input_nodes) == 1 for call in calls)
    inverses = [step for step in steps if step is not None]
    undo = (
        (*inverses, *before[0].undo) if alone and len(inverses) == len(steps) and before[0].undo is not None else None
    )
    stored = next(iter(inputs))
    view = _view(parameter(gm, stored), calls) if alone and "folded" not in stored.meta else None
    constant.meta["folded"] = Folded(names, undo, view, name)
    constant.meta["parameter"] = main.meta.get("parameter", str(main.target))
    constant.meta["digest"] = digest(parameter(gm, constant))


def _view(stored: Tensor, calls: Sequence[Node]) -> tuple[tuple[int, ...], tuple[int, ...], int] | None:
    """Return `Folded.view` of the result of `calls` on `stored`; `None` if they copy, repeat, or compute elements."""
    if not all(map(moves, calls)):
        return None
    origin: Any = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
    values: dict[Node, Any] = {}
    for call in calls:
        args, kwargs = map_arg((call.args, call.kwargs), lambda n: values.get(n, origin))
        values[call] = call.target(*args, **kwargs)  # type: ignore[operator]
    value: Tensor = values[calls[-1]]
    repeats = any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))
    if repeats or value.untyped_storage()._cdata != origin.untyped_storage()._cdata:
        return None
    return tuple(value.shape), value.stride(), int(value.storage_offset())


def _inverse(node: Node) -> float | torch.dtype | None:
    """Return the step that undoes a node: see `Folded.undo`."""
    if target_name(node) == "aten.add.Tensor" and isinstance(node.args[1], int | float) and not node.kwargs:
        return float(node.args[1])
    if target_name(node) == CAST and set(node.kwargs) == {"dtype"}:
        return node.all_input_nodes[0].meta["val"].dtype  # type: ignore[no-any-return]
    return None


def inherit(tensor: Node, old: Node) -> None:
    """Copy the notes of `old` to the tensor that replaces it."""
    if "parameter" not in tensor.meta:
        tensor.meta |= {note: old.meta[note] for note in _NOTES if note in old.meta}


def kept_tensors(gm: GraphModule, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the model's tensors that its code reads but the graph does not hold, with their names.

    They are the sources of constants that no pass changed, and of folded affine maps (`quark_fx.graph.absorbed`).

    Args:
        gm: Graph.
        tensors: Tensors of the captured graph.
    """
    folded = [node for node in gm.graph.nodes if node.op == "get_attr" and "folded" in node.meta]
    same = [node for node in folded if digest(parameter(gm, node)) == node.meta["digest"]]
    names = dict.fromkeys(name for node in same for name in node.meta["folded"].tensors)
    copies = {name: tensors[name].detach().clone() for name in names if name in tensors}
    for name, value in gm.meta.get(CODE_READS, {}).items():
        copies[name] = (
            tensors[name].detach().clone() if value is None else torch.full_like(tensors[name].detach(), value)
        )
    return copies


def rewrites(gm: GraphModule) -> tuple[Rewrite, ...]:
    """Return the module calls that passes rewrote."""
    return gm.meta.get("rewrites", ())  # type: ignore[no-any-return]


class Notes:
    """Recorder of the changes of one pass: construct it before the pass runs, and call `take` afterwards.

    Args:
        gm: Graph that the pass will rewrite.
    """

    def __init__(self, gm: GraphModule) -> None:
        self.operations = {node: _operation(node) for node in gm.graph.nodes}
        self.names = {node: target_name(node) for node in gm.graph.nodes}
        self.leaves = {node: _leaves(node) for node in gm.graph.nodes}
        self.readers: dict[Node, list[Node]] = {}
        for node, leaves in self.leaves.items():
            for leaf in leaves:
                if isinstance(leaf, Node):
                    self.readers.setdefault(leaf, []).append(node)
        self.constants: set[Node] = set()
        for node, leaves in self.leaves.items():
            read = [leaf for leaf in leaves if isinstance(leaf, Node)]
            if node.op == "call_function" and all(leaf.op == "get_attr" or leaf in self.constants for leaf in read):
                self.constants.add(node)
        self.calls: dict[str, list[Node]] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function":
                self.calls.setdefault(_call(node), []).append(node)

    def take(self, gm: GraphModule, name: str) -> None:
        """Record on `gm` the changes of the pass `name`."""
        nodes = set(gm.graph.nodes)
        live = {call for node in nodes for call in module_calls(node)}
        changed = [node for node in gm.graph.nodes if self.operations.get(node) != _operation(node)]
        for node in changed:
            node.meta["made_by"] = name
        ends = {result: entry for call in self.calls.keys() - live for result, entry in self._ends(call)}
        ends |= {node: node.meta[PASSED] for node in self.operations if PASSED in node.meta}
        passed, replaced = set[Node](), dict[Node, Node]()
        changed_by_place: dict[tuple[str, Kind], Node | None] = {}
        for node, old, new in self._moved(gm):
            if is_parameter(old) and is_parameter(new) and new not in self.operations:
                inherit(new, old)
            elif is_parameter(new) and old in self.constants:
                continue  # the constant is now computed in advance
            elif BRANCH in new.meta:
                continue  # the remainder of a value, or the sum of an operator and its branch
            elif new not in self.operations and _is_factor(new, old):
                new.meta["factor"] = True
            elif (skipped := _skipped(old, new, ends)) is not None:
                passed |= skipped
            elif self._stays_within(node, old, new):
                replaced[new] = old
            else:
                changed_by_place[module_path(node), Kind.REROUTED] = old
        for call, members in self.calls.items():
            if erased := [
                node for node in members if node not in nodes and self._is_value(node) and PASSED not in node.meta
            ]:
                left_out = call not in live and not passed.isdisjoint(erased)
                kind = Kind.LEFT_OUT if left_out else Kind.REPLACED
                changed_by_place.setdefault((module_path(erased[0]), kind), erased[0])
        for node in changed:
            if node.op == "call_function" and "factor" not in node.meta and BRANCH not in node.meta:
                key = module_path(node), Kind.REPLACED
                own = node if node in self.names else replaced.get(node)
                changed_by_place[key] = changed_by_place.get(key) or own
        if changed_by_place:
            listed = (
                Rewrite(path, name, kind) if node is None else Rewrite(path, name, kind, self.names[node], _line(node))
                for (path, kind), node in changed_by_place.items()
            )
            gm.meta["rewrites"] = (*rewrites(gm), *listed)

    def _moved(self, gm: GraphModule) -> Iterator[tuple[Node, Node, Node]]:
        """Yield every consumer whose input changed, with the old and the new input."""
        for node in gm.graph.nodes:
            before, after = self.leaves.get(node, []), _leaves(node)
            for old, new in zip(before, after, strict=False):
                if isinstance(old, Node) and isinstance(new, Node) and old is not new:
                    yield node, old, new

    def _stays_within(self, reader: Node, old: Node, new: Node) -> bool:
        """Tell whether a rewrite of one call explains that a consumer reads `new` instead of `old`."""
        reader_call = _call(reader)
        if is_parameter(old) or is_parameter(new):
            return False
        if _call(old) == _call(new):
            return True
        return _call(old) == reader_call and any(new in self.leaves[node] for node in self.calls[reader_call])

    def _ends(self, call: str) -> list[tuple[Node, Node]]:
        """Return the result and the input of a call; empty if it has several results or several inputs."""
        nodes = set(self.calls[call])
        results = [node for node in nodes if not nodes.issuperset(self.readers.get(node, []))]
        read = {n for node in nodes for n in self.leaves[node] if isinstance(n, Node) and n.op != "get_attr"} - nodes
        return [(results[0], read.pop())] if len(results) == len(read) == 1 else []

    def _is_value(self, node: Node) -> bool:
        """Tell whether the node had consumers and computed floats from inputs of the model."""
        return node in self.readers and is_activation(node) and node not in self.constants


def _skipped(old: Node, new: Node, ends: Mapping[Node, Node]) -> set[Node] | None:
    """Return the results of removed calls between `new` and `old`; `None` if no removed calls lead from `new` to `old`.

    Args:
        old: Earlier input of a consumer.
        new: Input that replaces `old`.
        ends: Inputs of removed calls, keyed by their results.
    """
    passed = set[Node]()
    while old in ends and old is not new:
        passed.add(old)
        old = ends[old]
    return passed if old is new else None


def _is_factor(node: Node, value: Node) -> bool:
    """Tell whether a node multiplies `value` by constants that are not part of the model."""
    if target_name(node) not in FACTORS or node.args[0] is not value:
        return False
    return all(is_parameter(factor) and "parameter" not in factor.meta for factor in node.args[1:])


def _call(node: Node) -> str:
    """Return the key of the innermost module call that contains the node."""
    return next(reversed(module_calls(node)), "")


def _line(node: Node) -> str:
    line = source_line(node)
    return "" if line == "?" else line


def _leaves(node: Node) -> list[Any]:
    return pytree.tree_leaves((node.args, node.kwargs))


def _operation(node: Node) -> tuple[Any, ...]:
    """Return the operator of a node and its constant arguments, without its inputs."""
    return node.target, *(repr(leaf) for leaf in _leaves(node) if leaf is not None and not isinstance(leaf, Node))


__all__ = [
    *("CONVERT", "FACTORS", "Folded", "Kind", "Notes", "Rewrite"),
    *("digest", "inherit", "kept_tensors", "note_folded", "note_tensors", "rewrites"),
]
