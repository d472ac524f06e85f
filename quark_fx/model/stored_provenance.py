"""The provenance notes of a graph in a stored model.

The notes name modules and tensors, for messages and for lookups in a model that the user passes; the graph runs without
them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.errors import QuarkError
from quark_fx.graph.absorbed import AbsorbedMap
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import BRANCH
from quark_fx.graph.provenance import FACTORS, MAPS, Folded, Kind, Rewrite, rewrites
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.stored_data import listed, mapping, text, texts
from quark_fx.model.stored_operators import DTYPES
from quark_fx.system.untrusted import brief

_DEEPEST = 256
"""Maximum depth of nested module calls."""

Stack = dict[str, tuple[str, str]]


class Stacks:
    """Numbered module calls, each with the number of the call around it, the path of the module, and its class."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str, str]] = []
        self._numbers: dict[tuple[int, str], int] = {}

    def number(self, stack: Mapping[str, tuple[str, Any]] | None) -> int | None:
        """Return the number of the innermost call of a stack; `None` for an empty stack."""
        number = -1
        for key, (path, kind) in (stack or {}).items():
            if key.startswith("_empty"):
                continue
            if (number, key) not in self._numbers:
                self._numbers[number, key] = len(self.calls)
                self.calls.append((number, path, str(kind)))
            number = self._numbers[number, key]
        return None if number < 0 else number


def notes_to_data(node: Node, stacks: Stacks) -> dict[str, Any]:
    """Return the notes on a node, without the notes on the tensor that it reads."""
    data: dict[str, Any] = {}
    if (call := stacks.number(node.meta.get("nn_module_stack"))) is not None:
        data["call"] = call
    if name := node.meta.get("made_by"):
        data["made_by"] = name
    if absorbed := node.meta.get("absorbed"):
        data["absorbed"] = [[name, stacks.number(stack)] for name, stack in absorbed]
    if node.meta.get("factor"):
        data["factor"] = True
    if maps := node.meta.get(MAPS):
        data["maps"] = [[entry.before, list(entry.factor), list(entry.offset), entry.calls] for entry in maps]
    if branch := node.meta.get(BRANCH):
        data["branch"] = branch
    return data


def provenance_to_data(
    qmodel: QuantizedModel, ids: Mapping[str, str], kept_ids: Mapping[str, str], stacks: Stacks
) -> dict[str, Any]:
    """Return the notes on tensors and modules.

    Args:
        qmodel: Quantized model.
        ids: Names in the file, keyed by the names of the graph's tensors.
        kept_ids: Names in the file, keyed by the names in `qmodel.kept`.
        stacks: Module calls that nodes refer to.
    """
    gm = qmodel.graph_module
    tensors: dict[str, dict[str, Any]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and (notes := _tensor_notes(node)):
            tensors[ids[str(node.target)]] = notes
    return {
        "calls": [list(call) for call in stacks.calls],
        "tensors": tensors,
        "rewrites": [[r.path, r.made_by, str(r.kind), r.operator] for r in rewrites(gm)],
        "kept": {number: name for name, number in kept_ids.items()},
        "parameters": None if qmodel.parameter_names is None else sorted(qmodel.parameter_names),
    }


def _tensor_notes(node: Node) -> dict[str, Any]:
    notes: dict[str, Any] = {note: node.meta[note] for note in ("parameter", "digest") if note in node.meta}
    if "folded" in node.meta:
        undo = node.meta["folded"].undo
        steps = None if undo is None else [step if isinstance(step, float) else str(step)[6:] for step in undo]
        notes["folded"] = {"tensors": list(node.meta["folded"].tensors), "undo": steps}
        if (view := node.meta["folded"].view) is not None:
            notes["folded"]["view"] = [list(view[0]), list(view[1]), view[2]]
    return notes


@dataclass(frozen=True)
class Provenance:
    """The validated notes on tensors and modules.

    Attributes:
        stacks: Module stacks, indexed by the number of the innermost call.
        notes: Notes on tensors, keyed by their names in the file.
        rewrites: See `quark_fx.graph.provenance`.
        kept: See `QuantizedModel`.
        parameter_names: See `QuantizedModel`.
        graph_tensors: Tensors of the file that the graph may read.
    """

    stacks: list[Stack]
    notes: Mapping[str, Mapping[str, Any]]
    rewrites: tuple[Rewrite, ...]
    kept: Mapping[str, Tensor]
    parameter_names: frozenset[str] | None
    graph_tensors: dict[str, Tensor]

    @classmethod
    def of(cls, data: Any, tensors: Mapping[str, Tensor]) -> Provenance:
        """Read the notes of a stored model.

        Raises:
            QuarkError: If the notes do not have the form that `provenance_to_data` writes.
        """
        data = mapping(data)
        kept_ids = {text(name): number for number, name in mapping(data["kept"]).items()}
        parameters = data["parameters"]
        return cls(
            stacks=_stacks(listed(data["calls"])),
            notes={name: _notes(mapping(notes)) for name, notes in mapping(data["tensors"]).items()},
            rewrites=tuple(_rewrite(rewrite) for rewrite in listed(data["rewrites"])),
            kept={name: tensors[number] for name, number in kept_ids.items()},
            parameter_names=None if parameters is None else frozenset(texts(parameters)),
            graph_tensors={name: tensor for name, tensor in tensors.items() if name not in kept_ids.values()},
        )

    def annotate(self, node: Node, data: Mapping[str, Any]) -> None:
        """Put the notes on a node created from `data`."""
        node.meta["nn_module_stack"] = self._stack(data.get("call"))
        if "made_by" in data:
            node.meta["made_by"] = text(data["made_by"])
        absorbed = [listed(entry) for entry in listed(data.get("absorbed", []))]
        if absorbed:
            node.meta["absorbed"] = tuple((text(name), self._stack(call)) for name, call in absorbed)
        if data.get("factor") is True and len(node.all_input_nodes) == 1 + FACTORS.get(target_name(node), -1):
            node.meta["factor"] = True
        if "maps" in data:
            node.meta[MAPS] = tuple(_absorbed_map(listed(entry)) for entry in listed(data["maps"]))
        if "branch" in data:
            node.meta[BRANCH] = text(data["branch"])
        if node.op == "get_attr":
            node.meta |= self.notes.get(str(node.target), {})

    def _stack(self, number: Any) -> Stack:
        if number is None:
            return {}
        if type(number) is not int or not 0 <= number < len(self.stacks):
            raise QuarkError(f"the stored graph has a node that refers to the unknown module call {brief(number)}")
        return self.stacks[number]


def _stacks(calls: list[Any]) -> list[Stack]:
    stacks: list[Stack] = []
    for number, call in enumerate(calls):
        parent, path, kind = listed(call)
        if type(parent) is not int or not -1 <= parent < number:
            raise QuarkError(
                f"module call {number} of the stored graph has the parent {brief(parent)}, which is not an earlier call"
            )
        outer = stacks[parent] if parent >= 0 else {}
        if len(outer) >= _DEEPEST:
            raise QuarkError(f"the stored graph nests module calls more than {_DEEPEST} levels deep")
        stacks.append({**outer, f"call_{number}": (text(path), text(kind))})
    return stacks


def _notes(data: Mapping[str, Any]) -> dict[str, Any]:
    notes: dict[str, Any] = {}
    if "parameter" in data:
        notes["parameter"] = text(data["parameter"])
    if "digest" in data:
        notes["digest"] = data["digest"]
        if type(data["digest"]) is not int:
            raise QuarkError(
                f"the stored graph has a tensor with the digest {brief(data['digest'])}, which is not an integer"
            )
    if "folded" in data:
        folded = mapping(data["folded"])
        names, undo = texts(folded["tensors"]), folded["undo"]
        if not names or "digest" not in data:
            raise QuarkError(
                "the stored graph has a computed constant without the names of its tensors or without a digest"
            )
        view = _view(folded["view"]) if "view" in folded else None
        notes["folded"] = Folded(names, None if undo is None else tuple(map(_step, listed(undo))), view)
    return notes


def _view(data: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    size, stride, offset = (listed(data) + [None] * 3)[:3]
    numbers = [*listed(size), *listed(stride), offset]
    if len(listed(data)) != 3 or len(size) != len(stride) or not all(type(n) is int and n >= 0 for n in numbers):
        raise QuarkError(
            f"the stored graph describes a constant as the view {brief(data)} of a parameter, which is not a valid view"
        )
    return tuple(size), tuple(stride), offset


def _absorbed_map(data: list[Any]) -> AbsorbedMap:
    before, factor, offset, calls = data
    factor, offset = listed(factor), listed(offset)
    numbers = all(type(number) is float and math.isfinite(number) for number in (*factor, *offset))
    counted = type(calls) is int and 0 <= calls <= _DEEPEST
    if type(before) is not bool or not numbers or not counted or len(factor) != len(offset) or 0.0 in factor:
        raise QuarkError(f"the stored graph has an operator with the affine map {brief(data)}, which cannot be undone")
    return AbsorbedMap(before, tuple(factor), tuple(offset), calls)


def _step(step: Any) -> float | torch.dtype:
    if isinstance(step, float) or (isinstance(step, str) and step in DTYPES):
        return DTYPES[step] if isinstance(step, str) else step
    raise QuarkError(f"the stored graph restores a constant with the unknown step {brief(step)}")


def _rewrite(data: Any) -> Rewrite:
    path, made_by, kind, operator = texts(data)
    return Rewrite(path, made_by, Kind(kind), operator)


__all__ = ["Provenance", "Stack", "Stacks", "notes_to_data", "provenance_to_data"]
