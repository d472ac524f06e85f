"""Convert a graph module to an `ExportedProgram` without tracing it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from quark_fx.graph.signature import Signature

if TYPE_CHECKING:
    import sympy
    from torch.utils._sympy.value_ranges import ValueRanges


def to_exported_program(gm: GraphModule, *, signature: Signature | None = None) -> ExportedProgram:
    """Return `gm` (flat inputs, tuple of flat outputs) as an `ExportedProgram` that shares its tensors.

    Args:
        gm: Functional graph in which every node has a fake value.
        signature: Arguments and results of the program; default: flat inputs, and the flat outputs that are tensors.
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
            # Without a signature, only tensors are outputs; the caller restores results of other types.
            whole: Any = copied.args[0]
            results = tuple(r for r in whole if signature is not None or _is_tensor(r))
            copied.args = (results,)
            outputs = [OutputSpec(OutputKind.USER_OUTPUT, _argument(r), None) for r in results]
    if signature is None:
        arity = sum(spec.kind is InputKind.USER_INPUT for spec in inputs)
        in_spec, out_spec = pytree.tree_structure(((0,) * arity, {})), pytree.tree_structure((0,) * len(outputs))
    else:
        in_spec, out_spec = signature.positional_spec, signature.out_spec
    return ExportedProgram(
        root=torch.nn.Module(),
        graph=graph,
        graph_signature=ExportGraphSignature(inputs, outputs),
        state_dict=state,
        range_constraints=_ranges(graph),
        module_call_graph=[ModuleCallEntry("", ModuleCallSignature([], [], in_spec, out_spec))],
    )


def _ranges(graph: Graph) -> dict[sympy.Symbol, ValueRanges[Any]]:
    """Return the range of every varying size of the inputs, by its symbol."""
    values = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    sizes = [size for value in values if isinstance(value, Tensor) for size in value.shape]
    found: dict[sympy.Symbol, ValueRanges[Any]] = {}
    for size in sizes:
        node: Any = getattr(size, "node", None)  # a fixed size is an int, without a node
        if node is not None:
            known = node.shape_env.var_to_range
            found |= {symbol: known[symbol] for symbol in node.expr.free_symbols if symbol in known}
    return found


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _argument(value: Any) -> Any:
    if isinstance(value, Node):
        meta = value.meta.get("val")
        if isinstance(meta, Tensor):
            return TensorArgument(value.name)
        if isinstance(meta, torch.SymInt):
            return SymIntArgument(value.name)
        return ConstantArgument(value.name, meta)
    return ConstantArgument("", value)
