"""From a graph with attributes to the `ExportedProgram` that `torch.onnx.export` takes, without a retrace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.exported_program import ModuleCallEntry, ModuleCallSignature
from torch.export.graph_signature import (
    ConstantArgument,
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from quark_fx.graph.nodes import parameter, value_of


class LoweredProgram(ExportedProgram):
    """A program whose operators all have a lowering: decomposing it would retrace it to find nothing to do."""

    def run_decompositions(self, decomp_table: Any = None, **options: Any) -> ExportedProgram:
        """Return the program itself."""
        return self


def to_exported_program(gm: GraphModule, *, decomposed: bool) -> ExportedProgram:
    """Return `gm` (flat inputs, tuple of flat outputs) as an `ExportedProgram` that shares its tensors.

    Args:
        gm: a functional graph in which every node has a fake value.
        decomposed: every operator is known to have a lowering, so `run_decompositions` may do nothing.
    """
    graph = Graph()
    names: dict[Node, Node] = {}
    inputs: list[InputSpec] = []
    state: dict[str, Tensor] = {}
    constants: dict[str, Node] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        target = str(node.target)
        if target not in constants:
            lifted = constants[target] = graph.placeholder(f"b_{node.name}")
            lifted.meta["val"] = value_of(gm, node)
            state[target] = parameter(gm, node)
            inputs.append(InputSpec(InputKind.BUFFER, TensorArgument(lifted.name), target, persistent=True))
        names[node] = constants[target]
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            continue
        names[node] = copied = graph.node_copy(node, names.__getitem__)
        if node.op == "placeholder":
            inputs.append(InputSpec(InputKind.USER_INPUT, _argument(copied), None))
        elif node.op == "output":
            # A file holds tensors: constants in the result (None, numbers) are the signature's to restore.
            results = tuple(r for r in copied.args[0] if isinstance(r, Node))  # type: ignore[union-attr]
            copied.args = (results,)
            outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(r), None) for r in results]
    arity = sum(spec.kind is InputKind.USER_INPUT for spec in inputs)
    in_spec = pytree.tree_structure(((0,) * arity, {}))
    out_spec = pytree.tree_structure((0,) * len(outputs))
    return (LoweredProgram if decomposed else ExportedProgram)(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints={},
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
    )


def _argument(value: Any) -> Any:
    if isinstance(value, Node):
        meta = value.meta.get("val")
        if isinstance(meta, Tensor):
            return TensorArgument(value.name)
        if isinstance(meta, torch.SymInt):
            return SymIntArgument(value.name)
        return ConstantArgument(value.name, meta)
    return ConstantArgument("", value)
