"""Queries of an ATen graph, and the edits that every pass needs."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from quark_fx.errors import QuarkError
from quark_fx.numbers.formats import Format, parse_format
from quark_fx.numbers.ops import SHAPES

_OWN_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


QUANTIZE, DEQUANTIZE = "quark_fx.quantize.default", "quark_fx.dequantize.default"
CAST, EMBEDDING = "aten._to_copy.default", "aten.embedding.default"
ROTATE = "quark_fx.rotate.default"


def target_name(node: Node) -> str:
    """Return the qualified operator name of a call (`"aten.conv2d.default"`), or the node's op."""
    if node.op != "call_function":
        return node.op
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else f"python.{_function_name(node)}"


def _function_name(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target))


def parameter(gm: GraphModule, node: Node) -> Tensor:
    """Return the tensor that a `get_attr` node reads."""
    return tensor_of(gm, str(node.target))


def tensor_of(gm: GraphModule, name: str) -> Tensor:
    """Return the tensor stored under a dotted `name`."""
    value: Any = gm
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, Tensor)
    return value


_PIECE = 1 << 26
"""Number of values that are checked at once."""


def is_finite(x: Tensor) -> bool:
    """Tell whether all values are finite."""
    return bool(all_finite(x))


def all_finite(x: Tensor) -> Tensor:
    """Return whether all values are finite, bool, shape (), without a copy as large as `x`."""
    if not x.is_floating_point() or not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    rows = x.detach().reshape(1) if x.dim() == 0 else x.detach()
    pieces = rows.split(max(1, _PIECE * len(rows) // rows.numel()))
    # The minimum or maximum is NaN or infinite if a value is; `aminmax` does not support 8-bit floats.
    ends = [torch.stack(torch.aminmax(piece if piece.element_size() > 1 else piece.half())) for piece in pieces]
    return torch.stack(ends).isfinite().all()


def is_parameter(node: Any) -> TypeGuard[Node]:
    """Tell whether `node` reads a parameter, buffer or constant."""
    return isinstance(node, Node) and node.op == "get_attr"


def set_parameter(gm: GraphModule, name: str, value: Tensor) -> None:
    """Store `value` in `gm` under the dotted `name`, replacing any tensor there; the user's model does not change.

    A graph with a `Shelf` (`gm.meta["shelf"]`) keeps the tensor in a file.
    """
    shelf = gm.meta.get("shelf")
    value = value.detach() if shelf is None else shelf.put(value)
    *path, leaf = name.split(".")
    owner: nn.Module = gm
    for part in path:
        if not isinstance(getattr(owner, part, None), nn.Module):
            setattr(owner, part, nn.Module())
        owner = getattr(owner, part)
    owner._parameters.pop(leaf, None)
    owner._buffers.pop(leaf, None)
    owner.__dict__.pop(leaf, None)
    owner.register_buffer(leaf, value)


def fresh_name(gm: GraphModule, name: str) -> str:
    """Return `name`, or `name_1`, `name_2`, … if `gm` already has an attribute with that name."""
    candidates = (name if not i else f"{name}_{i}" for i in range(1 << 20))
    return next(candidate for candidate in candidates if not _has_attribute(gm, candidate))


def _has_attribute(gm: GraphModule, name: str) -> bool:
    value: Any = gm
    for part in name.split("."):
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def get_attr(gm: GraphModule, name: str, value: Tensor) -> Node:
    """Store `value` under a fresh `name` and return a node that reads it, at the graph's insertion point."""
    name = fresh_name(gm, name)
    set_parameter(gm, name, value)
    node = gm.graph.get_attr(name)
    with fake_mode(gm):  # faster than `from_tensor`, which also describes storage, views and gradients
        node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return node


def call(gm: GraphModule, target: Any, *args: Any, like: Node | None = None, **kwargs: Any) -> Node:
    """Insert a call at the graph's insertion point, with its fake value (`meta["val"]`).

    Args:
        gm: Module of the graph.
        target: An `OpOverload`.
        args: Nodes or constants.
        like: Node that the call comes from; it provides the source line and module stack.
        kwargs: Constants.
    """
    node = gm.graph.call_function(target, args, kwargs)
    node.meta |= {"nn_module_stack": {}, "stack_trace": ""}
    if like is not None:
        node.meta |= {k: like.meta[k] for k in ("stack_trace", "nn_module_stack") if k in like.meta}
    # Torch's Python rules for composite operators keep dynamic sizes; its compiled rules turn them into fixed numbers.
    with fake_mode(gm), enable_python_dispatcher():
        node.meta["val"] = SHAPES.get(target, target)(*(_values(gm, args)), **kwargs)
    return node


def cast(gm: GraphModule, value: Node, dtype: torch.dtype, like: Node) -> Node:
    """Insert a cast to `dtype` at the graph's insertion point."""
    return call(gm, torch.ops.aten._to_copy.default, value, dtype=dtype, like=like)


def _values(gm: GraphModule, args: Iterable[Any]) -> Any:
    return map_arg(tuple(args), lambda node: value_of(gm, node))


def value_of(gm: GraphModule, node: Node) -> Any:
    """Return the fake value (shape, dtype, device) of a node."""
    if "val" not in node.meta and node.op == "get_attr":
        node.meta["val"] = fake_mode(gm).from_tensor(parameter(gm, node), static_shapes=True)
    return node.meta.get("val")


def fake_mode(gm: GraphModule) -> FakeTensorMode:
    """Return the mode that the graph's fake values belong to (kept for the lifetime of the graph)."""
    mode = gm.meta.get("fake_mode")
    if mode is None:
        fakes = (v for n in gm.graph.nodes for v in _leaves(n.meta.get("val")) if isinstance(v, FakeTensor))
        first = next(fakes, None)
        mode = gm.meta["fake_mode"] = first.fake_mode if first is not None else FakeTensorMode()
    return mode


def _leaves(value: Any) -> Iterator[Any]:
    yield from value if isinstance(value, tuple | list) else (value,)


def buffer_names(gm: GraphModule) -> frozenset[str]:
    """Return the names of tensors that were not parameters of the captured model: statistics, masks, tables."""
    return gm.meta.get("buffers", frozenset())  # type: ignore[no-any-return]


def stored_tensors(gm: GraphModule) -> dict[str, Tensor]:
    """Return every tensor that the graph reads, keyed by its dotted name."""
    return {str(node.target): parameter(gm, node) for node in gm.graph.nodes if node.op == "get_attr"}


def device_of(gm: GraphModule) -> torch.device:
    """Return the device of the graph's tensors; the CPU for a graph without tensors."""
    return next((tensor.device for tensor in stored_tensors(gm).values()), torch.device("cpu"))


def own_tensors(gm: GraphModule, shared: Iterable[Tensor] | None = None) -> GraphModule:
    """Give `gm` its own copy of every tensor that it reads; return `gm`.

    Args:
        gm: Graph.
        shared: Tensors; only tensors that share memory with them are copied. Default: copy all.
    """
    memory = None if shared is None else {tensor.untyped_storage().data_ptr() for tensor in shared}
    for name, tensor in stored_tensors(gm).items():
        if memory is None or tensor.untyped_storage().data_ptr() in memory:
            set_parameter(gm, name, tensor.detach().clone())
    return gm


def code_format(node: Node) -> Format | None:
    """Return the format of the codes that a `quantize` returns or a `dequantize` reads; `None` for any other node."""
    if target_name(node) not in (QUANTIZE, DEQUANTIZE):
        return None
    return parse_format(next(argument for argument in node.args if isinstance(argument, str)))


def placeholders(gm: GraphModule) -> list[Node]:
    """Return the nodes of the graph's inputs, in order."""
    return [node for node in gm.graph.nodes if node.op == "placeholder"]


def named_nodes(gm: GraphModule) -> dict[str, Node]:
    """Return every node, keyed by its name."""
    return {node.name: node for node in gm.graph.nodes}


def output_node(gm: GraphModule) -> Node:
    """Return the output node."""
    node: Node = next(iter(reversed(gm.graph.nodes)))
    return node


def results_of(gm: GraphModule) -> tuple[Any, ...]:
    """Return the flat results of a captured graph: nodes and constants."""
    results: Any = output_node(gm).args[0]
    return tuple(results)


def static_size(size: int | torch.SymInt) -> int | None:
    """Return a dimension's size, or `None` if it is dynamic; torch wraps some fixed sizes in `SymInt`, too."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.symbolic_shapes import is_concrete_int  # imports sympy, which takes half a second

    return int(size) if is_concrete_int(size) else None


def is_known(comparison: bool | torch.SymBool) -> bool:
    """Tell whether a comparison of sizes holds for every size."""
    if isinstance(comparison, bool):
        return comparison
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # imports sympy: half a second

    return statically_known_true(comparison)


def is_floating(gm: GraphModule, node: Node) -> bool:
    """Tell whether the node's value is a floating-point tensor."""
    value = value_of(gm, node)
    return isinstance(value, Tensor) and value.is_floating_point()


def source_line(node: Node) -> str:
    """Return `file:line` of the user's code for the node, or `"?"`.

    The innermost frame outside of torch is the user's; captured stack traces already omit torch itself.
    """
    frames = _OWN_FRAME.findall(node.meta.get("stack_trace") or "")
    user_frames = [frame for frame in frames if "/torch/" not in frame[0]] or frames
    return f"{user_frames[-1][0]}:{user_frames[-1][1]}" if user_frames else "?"


def describe(node: Node) -> str:
    """Return `operator at %name (file:line, module path)`, or the name of an input, for error messages."""
    if node.op == "placeholder":
        return f"input {node.target}"
    module = module_path(node)
    return f"{target_name(node)} at %{node.name} ({source_line(node)}{f', module {module}' if module else ''})"


def module_calls(node: Node) -> dict[str, str]:
    """Return the paths of the modules whose calls contain the node, keyed by call, outermost first."""
    return {k: path for k, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if not k.startswith("_empty")}


def module_path(node: Node) -> str:
    """Return the path of the innermost module whose `forward` called the node; empty if there is none."""
    return next(reversed(module_calls(node).values()), "")


def module_classes(gm: GraphModule) -> dict[str, str]:
    """Return the class names of the graph's modules, by path."""
    classes: dict[str, str] = {}
    for node in gm.graph.nodes:
        for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
            if not key.startswith("_empty"):
                classes[path] = str(kind).rpartition(".")[2]
    return classes


def is_activation(node: Node) -> bool:
    """Tell whether the node computes a floating-point tensor and is not a parameter."""
    value = node.meta.get("val")
    return node.op != "get_attr" and isinstance(value, Tensor) and value.is_floating_point()


def erase_dead(gm: GraphModule) -> int:
    """Erase calls and attribute reads without consumers; return their number."""
    dead = 0
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and node.op in ("call_function", "get_attr"):
            gm.graph.erase_node(node)
            dead += 1
    return dead


def is_getitem(node: Node) -> bool:
    """Tell whether the node selects one result of a call with several results."""
    return node.op == "call_function" and node.target is operator.getitem


def tensor_names(gm: GraphModule) -> Mapping[str, str]:
    """Return the original names of a loaded graph's tensors, keyed by the names that its nodes use.

    The original names come from a file; use them in messages and as names of tensors in other files.
    """
    return gm.meta.get("tensor_names", {})  # type: ignore[no-any-return]


def restore_values(
    gm: GraphModule,
    inputs: Sequence[Tensor | None],
    symbols: Sequence[Mapping[int, int]],
    check: Callable[[Node, Sequence[Any]], None] = lambda node, values: None,
    *,
    device: torch.device | None = None,
) -> None:
    """Give every node its fake value (`meta["val"]`) by running the graph on fakes of `inputs`.

    Args:
        gm: Functional graph.
        inputs: One tensor per input, `None` for an input that is not a tensor.
        symbols: Dynamic dimensions of each input, mapped to numbers for their sizes: equal sizes have equal numbers.
        check: Function that gets a node and fake values: before every call, the call's arguments; after every node, its
            value. It raises an error to stop.
        device: Device that `inputs` on the meta device represent; default: their own device.

    Raises:
        QuarkError: If an operator supports only the sizes of `inputs` in a dynamic dimension.
    """
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    env = ShapeEnv(duck_shape=False)
    # With fallback kernels, torch would run an operator without a shape rule on zeros.
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, allow_fallback_kernels=False)
    gm.meta["fake_mode"] = mode
    sizes: dict[int, torch.SymInt] = {}

    def fake(x: Tensor | None, dims: Mapping[int, int]) -> Tensor | None:
        if x is None:
            return None
        dynamic = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(x.dim())]
        value = mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))
        if device is not None:
            value.fake_device = device
        for dim, symbol in dims.items():
            size: Any = value.shape[dim]
            bool(size == sizes.setdefault(symbol, size))  # tells the shape environment that the sizes are equal
        return value

    def require_free(node: Node) -> None:
        symbols = [size.node.expr for size in sizes.values()]
        if any(static_size(size) is not None for size in sizes.values()) or len(set(symbols)) < len(symbols):
            raise QuarkError(
                f"{describe(node)} computes its shape for only one size of a variable dimension with this version of "
                "torch"
            )

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            if n.op == "call_function":
                check(n, pytree.tree_leaves(self.fetch_args_kwargs_from_env(n)))
            value = value_of(gm, n) if n.op == "get_attr" else super().run_node(n)
            if n.op != "output":
                check(n, pytree.tree_leaves(value))
                n.meta["val"] = value
                require_free(n)
            return value

    # Torch's Python rules for composite operators keep symbolic sizes; its compiled rules need numbers.
    with torch.no_grad(), mode, enable_python_dispatcher():
        Recorder(gm).run(*(fake(x, dims) for x, dims in zip(inputs, symbols, strict=True)))
