"""Conversion of an exported program to a functional graph with one spelling for every operator.

The graph computes in eval mode, without in-place operators, asserts, no-op casts, copies, or dropout; parameters are
`get_attr` nodes under their original names; inputs and outputs are flat (their structure is the `Signature`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from quark_fx.capture.einsum import spell_out_products
from quark_fx.capture.guards import size_conditions, sizes_of
from quark_fx.capture.in_place import make_functional
from quark_fx.errors import CaptureError, Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    call,
    cast,
    describe,
    erase_dead,
    output_node,
    source_line,
    static_size,
    stored_tensors,
    target_name,
)
from quark_fx.graph.operators import KEEPS_ORDER, MOTIONS, Motion, argument, motion, permutation
from quark_fx.graph.provenance import note_tensors
from quark_fx.graph.signature import Signature, leaf_names

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph (flat inputs, tuple of flat outputs) and the model's call signature."""

    module: GraphModule
    signature: Signature


def normalize(program: ExportedProgram, parameters: tuple[str, ...]) -> Captured:
    """Convert a fresh `ExportedProgram` to a `Captured`."""
    _require_operators(program)
    gm = _functional_module(program)
    _drop_no_ops(gm)
    _drop_undone_reshapes(gm)
    spell_out_products(gm)
    spec = program.call_spec
    gm.graph.set_codegen(CodeGen())
    output = output_node(gm)
    output.args = (tuple(pytree.tree_leaves(output.args[0])),)
    erase_dead(gm)
    plain = GraphModule(gm, gm.graph, class_name="CapturedGraph")
    plain.graph.lint()
    stored = stored_tensors(plain)
    plain.meta["buffers"] = frozenset(name for name, tensor in stored.items() if not isinstance(tensor, nn.Parameter))
    note_tensors(plain)
    _require_floats(plain)
    inputs = [node for node in plain.graph.nodes if node.op == "placeholder"]
    values = [node.meta.get("val") for node in inputs]
    assert spec.in_spec is not None
    assert spec.out_spec is not None
    signature = Signature(
        in_spec=spec.in_spec,
        out_spec=spec.out_spec,
        parameters=parameters,
        input_names=tuple(str(node.target) for node in inputs),
        output_names=tuple(leaf_names(spec.out_spec)),
        input_shapes=tuple(tuple(static_size(d) for d in v.shape) if isinstance(v, Tensor) else None for v in values),
        input_dtypes=tuple(v.dtype if isinstance(v, Tensor) else None for v in values),
        input_limits=_limits(program, inputs),
        input_conditions=size_conditions(inputs),
        input_constants={
            str(node.target): v
            for node, v in zip(inputs, values, strict=True)
            if v is None or isinstance(v, bool | int | float | str)
        },
    )
    return Captured(plain, signature)


_REGIONS = {
    "wrap_with_autocast": "a part of the model runs under torch.autocast: remove that from forward, and convert the "
    "model (model.to(torch.bfloat16)) or let it compute in float32",
    "wrap_with_set_grad_enabled": "a part of the model turns gradients on: remove that call from forward",
    "cond": "one graph holds both branches of torch.cond as functions: compute both and choose with torch.where, or "
    "quantize the branches as separate models",
    "flex_attention": "flex_attention takes a Python function as an argument: load the model with "
    "attn_implementation='sdpa'",
}
"""Advice for operators that contain graphs, keyed by operator name."""


def _require_operators(program: ExportedProgram) -> None:
    """Raise `CaptureError` for calls that contain a graph; the message names all of them."""
    nodes = [n for n in program.graph.nodes if isinstance(n.target, torch._ops.HigherOrderOperator)]
    if nodes:
        names = dict.fromkeys(str(node.target).rpartition(".")[2] for node in nodes)
        other = "rewrite that code without control flow over tensors, or quantize the modules around it separately"
        raise CaptureError(
            "the captured graph contains nested graphs, which passes cannot rewrite:\n"
            + "\n".join(f"  {node.target} at %{node.name} ({source_line(node)})" for node in nodes)
            + "".join(f"\n{_REGIONS.get(name, other)}" for name in names)
        )


def _require_floats(gm: GraphModule) -> None:
    """Raise `CaptureError` if an operator multiplies integers by a float weight, which torch.export does not check."""
    for node in gm.graph.nodes:
        if (linear := Linear.of(node)) is None:
            continue
        x = linear.activation
        values = [v.meta.get("val") if isinstance(v, Node) else None for v in (x, linear.weight)]
        if not all(isinstance(value, Tensor) for value in values):
            continue
        input_dtype, weight_dtype = (value.dtype for value in values)  # type: ignore[union-attr]
        if weight_dtype.is_floating_point and not (input_dtype.is_floating_point or input_dtype.is_complex):
            source = f"input {x.target} is" if x.op == "placeholder" else f"{x.name} is"
            raise CaptureError(
                f"{source} {input_dtype}, and {describe(node)} multiplies it by weights in {weight_dtype}; convert "
                f"the batch first, and scale it as in training, such as x.to({weight_dtype}) / 255 for pixels"
            )


def _limits(program: ExportedProgram, inputs: list[Node]) -> tuple[tuple[str, int, int, int | None], ...]:
    """Return the sizes of dynamic dimensions for which the captured path through the model's code is valid."""
    ranges: list[tuple[str, int, int, int | None]] = []
    constraints: dict[Any, Any] = dict(program.range_constraints)
    for node in inputs:
        for dim, size in enumerate(sizes_of(node)):
            limits = constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if limits is None:
                continue
            low, high = int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None
            low = 1 if low <= 2 else low  # torch assumes at least 2 for every dynamic dimension, but 1 works
            if low > 1 or high is not None:
                ranges.append((str(node.target), dim, low, high))
    return tuple(ranges)


def _functional_module(program: ExportedProgram) -> GraphModule:
    """Return the program as a module without in-place operators.

    If `make_functional` cannot follow an operator, torch replaces the in-place operators and traces the program again.
    """
    mutated = [spec.target for spec in program.graph_signature.output_specs if spec.kind.name == "BUFFER_MUTATION"]
    if mutated:
        raise CaptureError(
            f"the model writes to its buffer(s) {', '.join(str(name) for name in mutated[:3])} during forward; a "
            "quantized graph is a function of its inputs: make that state an input and an output of the model (a "
            "functional cache), or disable it"
        )
    try:
        return _module(program)
    except Declined as declined:
        logger.debug("the program is traced once more because of %s", declined.reason)
    try:
        return _module(program.run_decompositions({}))
    except Declined as declined:
        raise CaptureError(
            f"{declined.reason} has no out-of-place form; replace this operator in the model's code with an "
            "out-of-place one"
        ) from None


def _module(program: ExportedProgram) -> GraphModule:
    gm = program.module(check_guards=False)
    for node in list(gm.graph.nodes):
        if node.op == "call_module":  # leftover guard calls
            gm.graph.erase_node(node)
    make_functional(gm)
    return gm


_CASTS = (
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten.to.prim_Device"),
    *("aten.type_as.default", "aten._to_copy.default"),
)
"""Spellings of a cast; casts that change something become `_to_copy`."""

_DROPOUTS = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")

_NO_OPS: dict[str, Callable[[Node], bool]] = {
    **dict.fromkeys(_DROPOUTS, lambda node: not argument(node, 2) or argument(node, 1) == 0),
    **dict.fromkeys(
        (
            *(name for name, how in MOTIONS.items() if how is Motion.COPY),
            *("aten.lift_fresh_copy.default", "aten.lift_fresh.default", "aten.positive.default"),
        ),
        lambda node: True,
    ),
    **dict.fromkeys(_CASTS, lambda node: _same_kind(node.args[0], node)),
    "aten.squeeze.dim": lambda node: _size_at(node.args[0], argument(node, 1)) not in (1, None),
}
"""Operators that change no value in a functional eval-mode graph, and the conditions for that."""

_aten = torch.ops.aten
_SPELLINGS = {
    # A view requires a memory layout, which rewrites do not preserve.
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), _aten.reshape.default),
    "aten.min.other": _aten.minimum.default,
    "aten.max.other": _aten.maximum.default,
    **{
        f"aten.{alias}.{overload}": getattr(getattr(_aten, name), overload)
        for alias, name, overloads in (
            *((f"__{name}__", f"bitwise_{name}", "Tensor Scalar") for name in ("and", "or", "xor")),
            *(("multiply", "mul", "Tensor Scalar"), ("subtract", "sub", "Tensor Scalar")),
            *(("divide", "div", "Tensor Scalar Tensor_mode Scalar_mode"), ("true_divide", "div", "Tensor Scalar")),
            *(("clip", "clamp", "default Tensor"), ("negative", "neg", "default"), ("absolute", "abs", "default")),
            *(("concat", "cat", "default"), ("concatenate", "cat", "default"), ("row_stack", "vstack", "default")),
            *(("broadcast_to", "expand", "default"), ("unsafe_chunk", "chunk", "default")),
            *(("unsafe_split", "split", "Tensor"), ("unsafe_split_with_sizes", "split_with_sizes", "default")),
        )
        for overload in overloads.split()
    },
}
"""Operators to use in place of other spellings, keyed by the name of the other spelling."""

_TRANSPOSITIONS = frozenset(
    f"aten.{name}" for name in ("permute.default", "transpose.int", "t.default", "numpy_T.default")
)
"""Spellings of a transposition that stay; the others become `permute`."""

_ASSERTIONS = frozenset(
    {
        *("aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_scalar.default"),
        *("aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default"),
    }
)


def _size_at(value: Any, dim: int) -> int | None:
    """Return the size of a dimension, `None` if it is dynamic or does not exist."""
    shape = value.meta["val"].shape
    return static_size(shape[dim]) if len(shape) else None


def _same_kind(a: Any, b: Node) -> bool:
    x, y = a.meta.get("val"), b.meta.get("val")
    return isinstance(x, Tensor) and isinstance(y, Tensor) and (x.dtype, x.device) == (y.dtype, y.device)


def _moves(node: Node) -> bool:
    source: Any = node.args[0]
    return bool(source.meta["val"].device != node.meta["val"].device)


def _drop_no_ops(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        name = target_name(node)
        if name in _ASSERTIONS:
            gm.graph.erase_node(node)
        elif name in _SPELLINGS:
            node.target = _SPELLINGS[name]
        elif motion(node) is Motion.PERMUTE and name not in _TRANSPOSITIONS and not node.meta["val"].is_complex():
            # Some spellings conjugate complex tensors.
            order = list(permutation(node) or ())
            node.target, node.args, node.kwargs = _aten.permute.default, (node.args[0], order), {}
        elif name == "aten.sort.default":
            # The order of equal values is undefined; a runtime must choose the same order as torch.
            arguments = dict(zip(("dim", "descending"), node.args[1:], strict=False))
            node.target, node.args = _aten.sort.stable, node.args[:1]
            node.kwargs = {"stable": True, **arguments, **node.kwargs}
        elif name == "aten.histc.default" and not node.meta["val"].is_floating_point():
            _count_floats(gm, node)
        elif name in _NO_OPS and isinstance(node.args[0], Node) and _NO_OPS[name](node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif name in _DROPOUTS:
            raise CaptureError(
                f"{describe(node)} applies dropout although the model is in eval mode; pass training=False to it"
            )
        elif name in _CASTS:
            value = node.meta["val"]
            node.target, node.args = torch.ops.aten._to_copy.default, (node.args[0],)
            node.kwargs = {"dtype": value.dtype, "device": value.device} if _moves(node) else {"dtype": value.dtype}


def _count_floats(gm: GraphModule, node: Node) -> None:
    """Make `histc` count floats, because on CPUs it does not count integers.

    On a GPU, transformers counts the rows of each expert as integers.
    """
    (x, *rest), dtype = node.args, node.meta["val"].dtype
    assert isinstance(x, Node)
    with gm.graph.inserting_before(node):
        counted = call(gm, node.target, cast(gm, x, torch.float32, like=node), *rest, like=node, **node.kwargs)
        node.replace_all_uses_with(cast(gm, counted, dtype, like=node))
    gm.graph.erase_node(node)


def _drop_undone_reshapes(gm: GraphModule) -> None:
    """Remove reshapes that undo earlier ones: their consumers get the original value.

    A function that takes the kernel of a depthwise convolution as a matrix adds back the dimension that its caller
    removed; with these reshapes, the kernel would not be the weight of an operator.
    """
    for node in list(gm.graph.nodes):
        if motion(node) not in KEEPS_ORDER or (shape := _fixed_shape(node)) is None:
            continue
        source = node
        while motion(source) in KEEPS_ORDER and isinstance(source.args[0], Node):
            source = source.args[0]
            if _fixed_shape(source) == shape:
                if source.op == "get_attr":
                    for reader in node.users:
                        reader.meta["reshaped"] = True
                node.replace_all_uses_with(source)
                gm.graph.erase_node(node)
                break


def _fixed_shape(node: Node) -> list[int | None] | None:
    """Return the shape of a tensor, `None` if a size is dynamic or the value is not a tensor."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    shape = [static_size(size) for size in value.shape]
    return None if None in shape else shape
