"""From any PyTorch model to one functional, normalised ATen graph.

Normalised means: eval mode, no in-place operators, no asserts, no no-op casts, copies or dropout;
`linear`, `conv`, `scaled_dot_product_attention` whole; parameters are `get_attr` nodes under their
original names; inputs and outputs flat (their structure is the `Signature`).
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils import _pytree as pytree

from quark_fx.errors import CaptureError
from quark_fx.graph import describe, erase_dead, is_getitem, is_parameter, output_node, static_size, target_name
from quark_fx.operators import argument
from quark_fx.signature import Signature, bind, leaf_names, parameter_names, split_batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Captured:
    """A captured model: the graph (flat inputs, tuple of flat outputs) and how the model is called."""

    module: GraphModule
    signature: Signature


def capture_graph(
    model: nn.Module | ExportedProgram, example_batch: Any = None, *, dynamic_shapes: Any = None
) -> Captured:
    """Capture `model` as a functional, normalised ATen graph. The model is left as it was.

    Args:
        model: a module in eval mode, a Hugging Face model, or an `ExportedProgram`.
        example_batch: a tensor, a tuple or list of positional inputs, or a mapping of keywords. Batch and
            sequence dimensions (`dynamic_dimensions`) become dynamic.
            Not needed for an `ExportedProgram`.
        dynamic_shapes: passed to `torch.export.export` instead of those defaults.

    Raises:
        CaptureError: if the model is in training mode or on several devices, if the batch does not fit it, or if
            `torch.export` cannot trace it; the message names the user's source line and what to do.
    """
    if isinstance(model, ExportedProgram):
        return _normalise(model, tuple(str(name) for name in model.graph_signature.user_inputs))
    _check_model(model)
    args, kwargs = split_batch(example_batch)
    bound = bind(model.forward, args, kwargs)
    _check_inputs(model, (args, kwargs))
    if bound is not None:
        args, kwargs = (), bound
    args, kwargs = _told_apart((args, kwargs))
    names = parameter_names(model.forward)
    captured = _normalise(_capture_program(model, args, kwargs, dynamic_shapes), names)
    kept = set(captured.signature.in_spec.children()[1].context or ())
    fixed = {name: value for name, value in kwargs.items() if name not in kept}
    return replace(captured, signature=replace(captured.signature, fixed_arguments=fixed))


def _capture_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    if dynamic_shapes is not None:
        return _export(model, args, kwargs, dynamic_shapes)
    # torch.export specialises a dynamic dimension of size 1 in the example, so it is repeated: in every dynamic
    # dimension, or, where the model does not take that (an only channel), in the batch alone.
    for dimensions in (range(3), range(1)):
        try:
            return _export(model, *_widen_ones(args, kwargs, dimensions), None)
        except CaptureError as error:
            logger.debug("capture with the batch widened in dimensions %s failed: %s", dimensions, error)
    return _export(model, args, kwargs, None)


def dynamic_dimensions(x: Tensor) -> dict[int, Any]:
    """Return the dimensions that are dynamic by default: the batch, and of up to rank 3 those that may be a sequence.

    `(batch, tokens)`, `(batch, tokens, features)` and `(batch, channels, time)` cannot be told apart beforehand;
    a dimension the model fixes stays fixed. Of images only the batch varies.
    """
    return dict.fromkeys(range(x.dim() if x.dim() <= 3 else 1), Dim.AUTO)


def _told_apart(batch: Any) -> Any:
    # torch.export takes one tensor given twice, as attention's query and key are, for one input.
    seen: set[int] = set()

    def distinct(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) not in seen:
            seen.add(id(x))
            return x
        return x.clone()

    return pytree.tree_map(distinct, batch)


def _widen_ones(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dimensions: Collection[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Repeat tensors once in those of `dimensions` that are dynamic and have size 1."""

    def widen(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        ones = [dim for dim in dynamic_dimensions(x) if dim in dimensions and x.shape[dim] == 1]
        return x.repeat([2 if dim in ones else 1 for dim in range(x.dim())]) if ones else x

    return pytree.tree_map(widen, (args, dict(kwargs)))  # type: ignore[no-any-return]


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    transformers = sys.modules.get("transformers")
    hugging_face = transformers is not None and isinstance(model, transformers.PreTrainedModel) and not args
    try:
        with torch.no_grad(), _quiet():
            if hugging_face and (program := _export_hugging_face(model, kwargs, dynamic_shapes)) is not None:
                return program
            if dynamic_shapes is None:
                dynamic_shapes = ShapesCollection()
                for leaf in pytree.tree_leaves((args, kwargs)):
                    if isinstance(leaf, Tensor) and leaf.dim():
                        dynamic_shapes[leaf] = dynamic_dimensions(leaf)
            return torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # whatever the model's own code raises while traced
        raise CaptureError(_explain(error, model) + _dtype_hint(model, (args, kwargs))) from error


def _export_hugging_face(model: Any, kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram | None:
    try:
        exporters: Any = importlib.import_module("transformers.exporters")
    except ImportError:
        return None
    if dynamic_shapes is None:
        # The exporter takes flags such as `use_cache` out of the inputs.
        tensors = {k: v for k, v in kwargs.items() if v is not None and not isinstance(v, bool | int | float | str)}
        dynamic_shapes = pytree.tree_map(
            lambda leaf: dynamic_dimensions(leaf) if isinstance(leaf, Tensor) else None, tensors
        )
    with _quiet():
        config = exporters.DynamoConfig(dynamic=True, dynamic_shapes=dynamic_shapes)
        exported = exporters.DynamoExporter().export(model, dict(kwargs), config=config)
    return exported if isinstance(exported, ExportedProgram) else exported.program


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence logging: torch prints whole graphs about errors that are explained here in a line."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(previous)


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module or an ExportedProgram, not {type(model).__name__}")
    training = [name or "(the model)" for name, module in model.named_modules() if module.training]
    if training:
        raise CaptureError(
            f"{len(training)} module(s) are in training mode, first {training[0]} ({type(model).__name__}): dropout "
            "and batch norm would be captured as they train; call model.eval() first"
        )
    tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
    devices = Counter(str(t.device) for t in tensors.values())
    if len(devices) > 1:
        rare = min(devices, key=lambda d: devices[d])
        first = next(name for name, t in tensors.items() if str(t.device) == rare)
        raise CaptureError(
            f"the model is spread over {', '.join(f'{d} ({n} tensors)' for d, n in devices.items())}, first on {rare}: "
            f"{first}; move it to one device with model.to(device)"
        )


def _check_inputs(model: nn.Module, batch: Any) -> None:
    device = next((p.device for p in itertools.chain(model.parameters(), model.buffers())), None)
    for path, leaf in pytree.tree_flatten_with_path(batch)[0]:
        if not isinstance(leaf, Tensor):
            if hasattr(leaf, "__array__"):
                raise CaptureError(
                    f"input {pytree.keystr(path[1:])} is a {type(leaf).__name__}; convert it with torch.from_numpy"
                )
            continue
        if device is not None and leaf.device != device:
            raise CaptureError(
                f"input {pytree.keystr(path[1:])} is on {leaf.device}, the model on {device}; move one to the other"
            )
        if 0 in leaf.shape:
            raise CaptureError(
                f"input {pytree.keystr(path[1:])} is empty, shape {tuple(leaf.shape)}; every dimension of "
                "a batch needs at least one value"
            )


def _explain(error: Exception, model: nn.Module) -> str:
    names = {id(module): name for name, module in model.named_modules()}
    where, module_name = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        own = code.co_argcount and frame.f_locals.get(code.co_varnames[0])
        if isinstance(own, nn.Module) and id(own) in names:
            module_name = names[id(own)] or type(model).__name__
        library = "/torch/" in code.co_filename or "<" in code.co_filename or code.co_filename == __file__
        if not library and code.co_name != "_export":
            where = f"{code.co_filename}:{line} in {code.co_name}"
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"{type(model).__name__} could not be captured: {type(error).__name__}: {reason}\n"
        f"  at {where or 'an unknown line'}{f', module {module_name}' if module_name else ''}\n"
        f"{_advice(type(error).__name__ + str(error))}"
    )


def _dtype_hint(model: nn.Module, batch: Any) -> str:
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    inputs = {x.dtype for x in pytree.tree_leaves(batch) if isinstance(x, Tensor)}
    if own and (inputs & {torch.float64, torch.float32, torch.float16, torch.bfloat16}) - own:
        names = ", ".join(map(str, sorted(inputs, key=str)))
        return f"\nThe batch is {names}, the model {', '.join(map(str, own))}: convert the batch first"
    return ""


def _advice(message: str) -> str:
    if "data-dependent" in message or "DataDependent" in message:
        return (
            "Python control flow depends on the values of a tensor, which one graph cannot hold: use torch.where or "
            "torch.cond there, or quantize the submodules on either side"
        )
    if "dynamic" in message and ("constraint" in message.lower() or "specializ" in message):
        return "a dimension cannot vary as requested: pass `dynamic_shapes` that leave it fixed (see torch.export)"
    return (
        "torch.export must be able to trace the model: mend that line, quantize a submodule, or pass an "
        "ExportedProgram of your own"
    )


def _normalise(program: ExportedProgram, parameters: tuple[str, ...]) -> Captured:
    """Turn a fresh `ExportedProgram` into a `Captured`."""
    program = _functionalise(program)
    gm = program.module(check_guards=False)
    assert isinstance(gm, GraphModule)
    for node in list(gm.graph.nodes):
        if node.op == "call_module":  # leftover guard calls
            gm.graph.erase_node(node)
    _make_functional(gm)
    _drop_no_ops(gm)
    spec = program.call_spec
    gm.graph.set_codegen(CodeGen())
    output = output_node(gm)
    output.args = (tuple(pytree.tree_leaves(output.args[0])),)
    erase_dead(gm)
    plain = GraphModule(gm, gm.graph, class_name="CapturedGraph")
    plain.graph.lint()
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
        input_constants={
            str(node.target): v
            for node, v in zip(inputs, values, strict=True)
            if v is None or isinstance(v, bool | int | float | str)
        },
    )
    return Captured(plain, signature)


def _limits(program: ExportedProgram, inputs: list[Node]) -> tuple[tuple[str, int, int, int | None], ...]:
    """Return the sizes of dynamic dimensions for which the captured path through the model's code holds."""
    found: list[tuple[str, int, int, int | None]] = []
    for node in inputs:
        value = node.meta.get("val")
        sizes: list[Any] = list(value.shape) if isinstance(value, Tensor) else []
        for dim, size in enumerate(sizes):
            limits = program.range_constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
            if limits is None:
                continue
            low, high = int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None
            if low > 2 or high is not None:  # torch assumes 2 of every dynamic dimension, and 1 works
                found.append((str(node.target), dim, low, high))
    return tuple(found)


def _functionalise(program: ExportedProgram) -> ExportedProgram:
    """Return the program with mutations of views and aliases resolved by torch, if it has any.

    Most in-place operators overwrite a value nobody else can see; those are renamed by
    `_make_functional` in one walk, which saves a retrace.
    """
    mutated = [spec.target for spec in program.graph_signature.output_specs if spec.kind.name == "BUFFER_MUTATION"]
    if mutated:
        raise CaptureError(
            f"the model writes to its buffer(s) {', '.join(str(name) for name in mutated[:3])} during forward; a "
            "quantized graph is a function of its inputs: pass that state as an input and return it (a functional "
            "cache), or disable it"
        )
    nodes = program.graph_module.graph.nodes
    order = {node: i for i, node in enumerate(nodes)}
    visible = any(_is_mutation(node) and not _is_private(node, order) for node in nodes if node.op == "call_function")
    return program.run_decompositions({}) if visible else program


def _is_mutation(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_private(node: Node, order: Mapping[Node, int]) -> bool:
    """Tell whether nothing but the in-place `node` itself still reads what it overwrites, under any alias."""
    family, pending = set(), [node.args[0]]
    while pending:
        value = pending.pop()
        if not isinstance(value, Node) or value in family:
            continue
        family.add(value)
        if value.op in ("placeholder", "get_attr"):
            return target_name(node) == "aten.detach_.default"
        aliases = [value.args[0]] if _is_view(value) else []
        pending += aliases + [user for user in value.users if user is not node and _is_view(user)]
    return len(family) == 1 or all(order[user] <= order[node] for value in family for user in value.users)


def _is_view(node: Node) -> bool:
    if is_getitem(node):  # of one part of a split, which is a view too
        return _is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _make_functional(gm: GraphModule) -> None:
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not _is_mutation(node):
            continue
        overwritten = node.args[0]
        name, overload = node.target._schema.name.split("::")[1], node.target._overloadname
        functional = getattr(getattr(torch.ops.aten, name.removesuffix("_"), None), overload, None)
        if is_parameter(overwritten) and name != "detach_":
            raise CaptureError(f"{describe(node)} overwrites the parameter or buffer {overwritten.target}")
        if functional is None:
            raise CaptureError(f"{describe(node)} has no functional form; replace it by an out-of-place operator")
        node.target = functional
        overwritten.replace_all_uses_with(
            node, delete_user_cb=lambda user, node=node: user is not node and _comes_after(user, node)
        )


def _comes_after(user: Node, node: Node) -> bool:
    return node < user


_CASTS = (
    *("aten.to.dtype", "aten.to.device", "aten.to.dtype_layout", "aten.to.other", "aten.to.prim_Device"),
    *("aten.type_as.default", "aten._to_copy.default"),
)
"""The spellings of a cast; those that change something become `_to_copy`."""

_DROPOUTS = ("aten.dropout.default", "aten.feature_dropout.default", "aten.alpha_dropout.default")

_NO_OPS: dict[str, Callable[[Node], bool]] = {
    **dict.fromkeys(_DROPOUTS, lambda node: not argument(node, 2) or argument(node, 1) == 0),
    **dict.fromkeys(
        (
            *("aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default"),
            *("aten.clone.default", "aten.contiguous.default"),
        ),
        lambda node: True,
    ),
    **dict.fromkeys(_CASTS, lambda node: _same_kind(node.args[0], node)),
}
"""Operators that change no value in a functional eval-mode graph, and when."""

_aten = torch.ops.aten
_SPELLINGS = {
    # A view asks for a memory layout, which rewrites do not keep.
    **dict.fromkeys(("aten.view.default", "aten._unsafe_view.default"), _aten.reshape.default),
    **{f"aten.__{name}__.Tensor": getattr(_aten, f"bitwise_{name}").Tensor for name in ("and", "or", "xor")},
    "aten.min.other": _aten.minimum.default,
    "aten.max.other": _aten.maximum.default,
    **{f"aten.__{name}__.Scalar": getattr(_aten, f"bitwise_{name}").Scalar for name in ("and", "or", "xor")},
}
"""Operators with two names, and the one that stays."""

_ASSERTIONS = frozenset(
    {
        *("aten._assert_tensor_metadata.default", "aten._assert_async.msg", "aten._assert_scalar.default"),
        *("aten.sym_constrain_range_for_size.default", "aten.sym_constrain_range.default"),
    }
)


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
        elif name == "aten.sort.default":
            # Which of two equal values comes first is open; a runtime must not answer differently from torch.
            arguments = dict(zip(("dim", "descending"), node.args[1:], strict=False))
            node.target, node.args = _aten.sort.stable, node.args[:1]
            node.kwargs = {"stable": True, **arguments, **node.kwargs}
        elif name in _NO_OPS and isinstance(node.args[0], Node) and _NO_OPS[name](node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        elif name in _DROPOUTS:
            raise CaptureError(f"{describe(node)} drops values though the model is in eval mode; pass training=False")
        elif name in _CASTS:
            value = node.meta["val"]
            node.target, node.args = torch.ops.aten._to_copy.default, (node.args[0],)
            node.kwargs = {"dtype": value.dtype, "device": value.device} if _moves(node) else {"dtype": value.dtype}


__all__ = ["Captured", "capture_graph", "dynamic_dimensions"]
