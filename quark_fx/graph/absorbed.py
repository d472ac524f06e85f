"""Notes that keep a model's own code consistent with a graph in which a pass folded affine maps into operators.

`eager()` and checkpoints use the model's own code, which still multiplies and adds. Each folded map is handled in one
of three ways:

- If a module is called once, and the call computes nothing but the map (a batch norm), the module is left out.
- If the constants of the map are parameters, they are set to 1 or 0, so that the code changes nothing.
- Otherwise the operator's module undoes the map (`node.meta["absorbed_maps"]`), and the code outside of the module
  applies the map again with its original tensors. If no module undoes the map, the note is the same, and a module whose
  code includes the map is replaced by a piece of the graph.

`gm.meta["code_reads"]` maps the name of each tensor of a folded map to the value that all of its elements are set to,
or to `None` if the tensor stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.graph.affine import Step
from quark_fx.graph.computed import is_constant
from quark_fx.graph.nodes import is_parameter, module_calls, parameter
from quark_fx.graph.operators import moves, permutation
from quark_fx.graph.provenance import CODE_READS, MAPS, PASSED


@dataclass(frozen=True)
class AbsorbedMap:
    """An affine map, with one factor and one offset per channel, that was folded into an operator.

    Attributes:
        before: Whether the map comes before the operator.
        factor: Factor of each channel, all nonzero; empty if no module undoes the map.
        offset: Offset of each channel; empty if `factor` is empty.
        calls: Number of module calls around the operator, from the outermost, whose code also computes the map.
    """

    before: bool
    factor: tuple[float, ...]
    offset: tuple[float, ...]
    calls: int


class AbsorbedMaps:
    """Recorder of the effect that folded maps have on the modules of a graph.

    Args:
        gm: Graph before any map is folded.
        constants: Computed constants of the graph.
    """

    def __init__(self, gm: GraphModule, constants: Collection[Node]) -> None:
        self.gm, self.constants = gm, constants
        self.calls: dict[str, list[Node]] = {}
        self.keys: dict[str, set[str]] = {}
        for node in gm.graph.nodes:
            for key, path in module_calls(node).items():
                self.calls.setdefault(key, []).append(node)
                self.keys.setdefault(path, set()).add(key)

    def note(self, node: Node, steps: Sequence[Step], factor: Tensor, offset: Tensor, *, before: bool) -> None:
        """Record that an operator now computes a chain of maps, whose nodes are still in the graph."""
        chain = {node for step in steps for node in step.nodes}
        neutral: dict[str, float] = {}
        passed: list[Step] = []
        for step in steps:
            values = self._neutral(step)
            if values is not None:
                neutral |= values
                passed.append(step)
            elif not all(self._is_left_out(entry, chain) for entry in step.nodes):
                break
        else:
            self._pass(passed, neutral)
            return
        calls = list(module_calls(node))
        shared = [key for key in calls if all(key in module_calls(entry) for entry in chain)]
        if not calls:
            return
        undone = not any(calls[-1] in module_calls(entry) for entry in chain) and bool((factor.float() != 0).all())
        numbers = (tuple(factor.tolist()), tuple(offset.tolist())) if undone else ((), ())
        node.meta[MAPS] = (*node.meta.get(MAPS, ()), AbsorbedMap(before, *numbers, len(shared)))
        self._pass(steps, dict.fromkeys(self._tensors(steps)))

    def cancel_transpositions(self) -> None:
        """Drop pairs of adjacent transpositions that cancel; the model's code still has them."""
        for node in list(self.gm.graph.nodes):
            first = node.args[0] if permutation(node) is not None else None
            before, after = (permutation(n) if isinstance(n, Node) else None for n in (first, node))
            if before is not None and after is not None and [before[d] for d in after] == [*range(len(after))]:
                value: Node = first.args[0]  # type: ignore[union-attr]
                node.meta[PASSED], first.meta[PASSED] = first, value  # type: ignore[union-attr]
                node.replace_all_uses_with(value)

    def _pass(self, steps: Sequence[Step], tensors: Mapping[str, float | None]) -> None:
        for step in steps:
            for node in step.nodes:
                node.meta[PASSED] = step.value
        self.gm.meta[CODE_READS] = {**self.gm.meta.get(CODE_READS, {}), **tensors}

    def _tensors(self, steps: Sequence[Step]) -> Iterator[str]:
        """Yield the names of the model's tensors from which the constants of maps are computed."""
        members = {entry for step in steps for entry in (step.value, *step.nodes)}
        pending = [
            entry for step in steps for node in step.nodes for entry in node.all_input_nodes if entry not in members
        ]
        while pending:
            entry = pending.pop()
            pending += [n for n in entry.all_input_nodes if is_constant(n, self.constants)]
            if "folded" in entry.meta:
                yield from entry.meta["folded"].tensors
            elif is_parameter(entry):
                yield entry.meta.get("parameter", str(entry.target))

    def _is_left_out(self, node: Node, chain: set[Node]) -> bool:
        """Tell whether a node's module is called once, and the call only computes `chain` and uses its result."""
        calls = module_calls(node)
        if not calls:
            return False
        key, path = next(reversed(calls.items()))
        rest = {n for n in self.calls[key] if n not in chain and not is_constant(n, self.constants)}
        return len(self.keys[path]) == 1 and all(chain.union(rest).issuperset(n.all_input_nodes) for n in rest)

    def _neutral(self, step: Step) -> dict[str, float] | None:
        """Return parameter values with which a step returns its input unchanged; `None` if no such values exist."""
        *earlier, node = step.nodes
        if earlier or step.statistics is not None:
            return None
        operands = [entry for entry in node.args if isinstance(entry, Node) and entry is not step.value]
        names = [self._own_parameter(entry) for entry in operands]
        parameters = [name for name in names if name is not None]
        if not parameters or len(set(parameters)) < len(names):
            return None
        x = torch.arange(3, dtype=torch.float32)
        for values in itertools.product((0.0, 1.0), repeat=len(parameters)):
            scalars = torch.tensor(values, dtype=torch.float32).unbind()
            inputs = {step.value: x, **dict(zip(operands, scalars, strict=True))}
            args = map_arg(node.args, inputs.__getitem__)
            if torch.equal(node.target(*args, **node.kwargs), x):  # type: ignore[operator]
                return dict(zip(parameters, values, strict=True))
        return None

    def _own_parameter(self, operand: Node) -> str | None:
        """Return the name of the parameter that data movement turns into an operand, if nothing else uses it."""
        node = operand
        while len(node.users) == 1 and moves(node) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        if not is_parameter(node) or len(node.users) > 1 or "folded" in node.meta or "parameter" not in node.meta:
            return None
        name, tensor = str(node.meta["parameter"]), parameter(self.gm, node)
        if not isinstance(tensor, nn.Parameter) or name in self.gm.meta.get(CODE_READS, {}):
            return None
        constants = [n for n in self.gm.graph.find_nodes(op="get_attr", sort=False) if n is not node]
        shared = any(name in n.meta["folded"].tensors for n in constants if "folded" in n.meta)
        return None if shared or any(parameter(self.gm, n) is tensor for n in constants) else name


__all__ = ["AbsorbedMap", "AbsorbedMaps"]
