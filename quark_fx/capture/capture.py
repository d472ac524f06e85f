"""Capture any PyTorch model as one functional, normalized ATen graph.

Normalized means: eval mode, no in-place operators, no asserts, no no-op casts, copies, or dropout; `linear`, `conv`,
and `scaled_dot_product_attention` as single operators; parameters are `get_attr` nodes under their original names;
inputs and outputs are flat (their structure is the `Signature`).
"""

from __future__ import annotations

import importlib
import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Node
from torch.utils import _pytree as pytree

from quark_fx.capture.capture_errors import (
    dtype_hint,
    explain,
    explain_dynamic_shapes,
    require_capturable,
    require_inputs_fit,
    require_repeats,
    require_runs,
    warn_of_fixed,
    warn_of_fixed_batch,
)
from quark_fx.capture.guards import fixed_dimensions
from quark_fx.capture.lengths import KnownLengths
from quark_fx.capture.model_state import ModelState, made_since, untouched
from quark_fx.capture.normalization import Captured, normalize
from quark_fx.capture.single_sizes import misread_text, with_confirmed_ones
from quark_fx.data.cache_names import CACHE_NAMES
from quark_fx.errors import CaptureError
from quark_fx.graph.nodes import static_size, target_name
from quark_fx.graph.signature import Signature, bind, parameter_names, split_batch
from quark_fx.system.isolation import isolated, quiet

logger = logging.getLogger(__name__)


@isolated
def capture_graph(
    model: nn.Module | ExportedProgram, example_batch: Any = None, *, dynamic_shapes: Any = None
) -> Captured:
    """Capture `model` as a functional, normalized ATen graph. The model is not changed.

    Args:
        model: A module in eval mode, a Hugging Face model, or an `ExportedProgram`.
        example_batch: A tensor, a tuple or list of positional inputs, or a dict of keyword arguments. Batch and
            sequence dimensions (`dynamic_dimensions`) become dynamic. A Hugging Face model is captured without its KV
            cache unless the batch has one or asks for it (`use_cache`). Not needed for an `ExportedProgram`.
        dynamic_shapes: Dynamic shapes for `torch.export.export`, in place of these defaults.

    Raises:
        CaptureError: If the model is in training mode or on several devices, if the batch does not fit it, or if
            `torch.export` cannot trace it; the message names the user's source line and the next step.
    """
    if isinstance(model, ExportedProgram):
        return normalize(model, tuple(str(name) for name in model.graph_signature.user_inputs))
    model = unwrapped(model)
    require_capturable(model)
    args, kwargs = split_batch(example_batch)
    names = parameter_names(model.forward)
    if _is_hugging_face(model) and "use_cache" in names and not {"use_cache", *CACHE_NAMES} & set(kwargs):
        # An unrequested cache would make keys and values results of the model, which no pass may rescale.
        kwargs = {**kwargs, "use_cache": False}
    require_inputs_fit(model, (args, kwargs))
    bound = bind(model.forward, args, kwargs)
    positional = [] if bound is None else [*bound][: len(args)]
    if bound is not None:
        args, kwargs = (), bound
    args, kwargs = _told_apart((args, kwargs))
    with _pass_by_position(model, positional):
        for program in _programs(model, args, kwargs, dynamic_shapes):
            captured = normalize(program, names)
            signature = captured.signature
            leaves = signature.in_spec.flatten_up_to((args, {name: kwargs[name] for name in signature.keywords}))
            captured = with_confirmed_ones(captured, model, leaves, kwargs)
            text_at = misread_text(captured, model, leaves, kwargs)
            if captured.signature.unmet(leaves) is None and not text_at:
                break
    if text_at:
        raise CaptureError(
            f"the model's code writes a size of its inputs as text at {text_at}, for example as a dictionary key; "
            "during capture that text is a symbol, so the graph would compute something else: write `str(int(size))`, "
            "which fixes the size"
        )
    if dynamic_shapes is None:
        warn_of_fixed_batch(program)
    else:
        _warn_of_requests(captured.signature, leaves, _named_dimensions(dynamic_shapes, kwargs))
    fixed = {name: value for name, value in kwargs.items() if name not in captured.signature.keywords}
    return replace(captured, signature=replace(captured.signature, fixed_arguments=fixed))


@contextmanager
def _pass_by_position(model: nn.Module, names: list[str]) -> Iterator[None]:
    """Pass arguments to the hooks of `model` by position, as the user's calls do; most hooks ignore keywords.

    Args:
        model: Model that is called with keywords.
        names: Names of the arguments that the batch has by position.
    """
    if not names or not (model._forward_hooks or model._forward_pre_hooks):
        yield
        return

    def by_position(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # An exporter may leave an argument out; later arguments are then passed by keyword.
        leading = [*itertools.takewhile(kwargs.__contains__, names)]
        return (*args, *map(kwargs.pop, leading)), kwargs

    def by_name(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        return (), {**dict(zip(names, args, strict=False)), **kwargs}

    handles = [model.register_forward_pre_hook(by_position, prepend=True, with_kwargs=True)]
    if _is_hugging_face(model):  # the exporter of transformers replaces `forward` with a function of keywords
        handles.append(model.register_forward_pre_hook(by_name, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile` and data-parallel wrappers, which computes the same function."""
    compiled: Any = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", ())  # its import takes two seconds
    inner: Any = model
    while isinstance(inner, (nn.DataParallel, nn.parallel.DistributedDataParallel, compiled)):
        inner = inner._orig_mod if isinstance(inner, compiled) else inner.module
    result: nn.Module = inner
    return result


def _programs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Iterator[ExportedProgram]:
    """Yield exported programs with fewer and fewer dynamic sizes; the last one is traced on the example itself."""
    if dynamic_shapes is not None:
        _require_dimensions(model, args, kwargs, dynamic_shapes)
        yield _export(model, args, kwargs, dynamic_shapes)
        return
    # torch.export fixes a dynamic dimension if its size in the example is 1, so the example is repeated: along every
    # such dimension, or, if the model does not support that (a single channel), along the batch alone.
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    for dimensions in (range(3), range(1)):
        if not any(_ones(x, dimensions) for x in tensors):
            continue
        try:
            program = _export(model, *_widen_ones(args, kwargs, dimensions), None)
        except CaptureError as error:
            logger.debug("capture with the batch widened in dimensions %s failed: %s", dimensions, error)
            continue
        if not any(_squeezes_what_varies(node) for node in program.graph.nodes):
            yield program
        logger.debug("capture with the batch widened in dimensions %s does not fit the batch itself", dimensions)
    yield _export(model, args, kwargs, None)


_SQUEEZES = ("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze.default")


def _squeezes_what_varies(node: Node) -> bool:
    """Tell whether a node removes dimensions of size 1 that capture assumed to be larger."""
    if target_name(node) not in _SQUEEZES:
        return False
    shape = node.args[0].meta["val"].shape  # type: ignore[union-attr]
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    return any(static_size(shape[dim]) is None for dim in (dims if isinstance(dims, list | range) else [dims]) if shape)


def dynamic_dimensions(x: Tensor) -> dict[int, Any]:
    """Return the dimensions that are dynamic by default: the batch, and up to rank 3 the possible sequence dimensions.

    `(batch, tokens)`, `(batch, tokens, features)`, and `(batch, channels, time)` cannot be told apart in advance; a
    dimension that the model fixes stays fixed. Only the batch of images is dynamic.
    """
    return dict.fromkeys(range(x.dim() if x.dim() <= 3 else 1), Dim.AUTO)


def _told_apart(batch: Any) -> Any:
    # torch.export treats a tensor that is passed twice (query and key of an attention) as one input, and does not
    # accept tensors created under inference_mode.
    ids: set[int] = set()

    def distinct(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        again = id(x) in ids
        ids.add(id(x))
        return x.clone() if again or x.is_inference() else x

    return pytree.tree_map(distinct, batch)


def _ones(x: Tensor, dimensions: Collection[int]) -> list[int]:
    """Return the dimensions in `dimensions` that are dynamic and have size 1."""
    return [dim for dim in dynamic_dimensions(x) if dim in dimensions and x.shape[dim] == 1]


def _widen_ones(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dimensions: Collection[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Double the size of every tensor along its `_ones`."""

    def widen(x: Any) -> Any:
        ones = _ones(x, dimensions) if isinstance(x, Tensor) else []
        return x.repeat([2 if dim in ones else 1 for dim in range(x.dim())]) if ones else x

    return pytree.tree_map(widen, (args, dict(kwargs)))  # type: ignore[no-any-return]


def _require_dimensions(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> None:
    """Raise `CaptureError` for a dimension that an input does not have, which torch.export silently ignores."""
    arguments = bind(model.forward, args, kwargs) or {}
    for name, x, dimension, _ in _named_dimensions(dynamic_shapes, arguments):
        if not 0 <= dimension < x.dim():
            which = (
                f"dimensions count from 0 to {x.dim() - 1}" if x.dim() else "a scalar has no dimensions: pass {} for it"
            )
            raise CaptureError(
                f"dynamic_shapes names dimension {dimension} of {name}, whose shape is {tuple(x.shape)}; {which}"
            )


def _warn_of_requests(
    signature: Signature, leaves: list[Any], dimensions: Iterable[tuple[str, Tensor, int, Any]]
) -> None:
    """Warn about dimensions that `dynamic_shapes` makes dynamic and the model fixes."""
    for name, x, dim, how in dimensions:
        shape = next((s for leaf, s in zip(leaves, signature.input_shapes, strict=True) if leaf is x), None)
        if how is Dim.AUTO and shape is not None and shape[dim] is not None:
            warn_of_fixed(name, x.shape[dim], dim=dim)


def _named_dimensions(shapes: Any, tree: Any, name: str = "") -> Iterator[tuple[str, Tensor, int, Any]]:
    """Yield name, tensor, dimension, and entry (such as a `Dim`) for each dimension that `dynamic_shapes` mentions.

    Args:
        shapes: Dynamic shapes of `tree`, or of its parts: a mapping, or a sequence in the order of the parts.
        tree: A tensor, or a structure of parts.
        name: Name of `tree`.
    """
    if isinstance(tree, Tensor):
        if isinstance(shapes, Mapping):
            yield from ((name, tree, dim, how) for dim, how in shapes.items() if isinstance(dim, int))
    elif isinstance(tree, Mapping | list | tuple):
        parts: dict[Any, Any] = dict(tree if isinstance(tree, Mapping) else enumerate(tree))
        shape_by_part = shapes if isinstance(shapes, Mapping) else {}
        if isinstance(shapes, list | tuple):
            shape_by_part = dict(zip(parts, shapes, strict=False))  # torch.export checks their number
        for part in (part for part in parts if part in shape_by_part):
            yield from _named_dimensions(shape_by_part[part], parts[part], f"{name}[{part!r}]" if name else str(part))


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    """Trace a model; if it branches on the value of a tensor, trace it again with `KnownLengths`."""
    try:
        return _with_tables(model, args, kwargs, dynamic_shapes)
    except CaptureError as error:
        if type(error.__cause__).__name__ != "GuardOnDataDependentSymNode":  # importing its module takes a second
            raise
        try:
            with KnownLengths():
                return _with_tables(model, args, kwargs, dynamic_shapes)
        except CaptureError:
            raise error from error.__cause__


def _with_tables(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Trace a model; tables that its forward computes once and stores become constants, computed from the example.

    A model whose forward changes it also runs on the example, to check that later calls return the same. Tracing runs
    in a copied context, because a variable of `contextvars` that is set cannot become unset again.
    """
    tables: list[Tensor] = []
    changed: list[str] = []
    traced: list[tuple[ModelState, dict[int, int]]] = []
    advanced: list[bool] = []

    def note_start(*_: Any) -> None:
        state = ModelState(model)
        traced.append((state, state.memory()))

    def note_changes(*_: Any) -> None:
        state, memory = traced[-1]
        tables.extend(filter(_is_table, made_since(model, state)))
        tables.extend(state.tensors[key] for key, place in state.memory().items() if place != memory[key])
        changed.extend(state.changed())
        advanced.append(state.has_advanced())

    def watch() -> None:
        # Changes count from the start to the end of the forward: torch.export swaps parameters before the start, and
        # resets some attributes after the end.
        model.register_forward_pre_hook(note_start)
        model.register_forward_hook(note_changes)

    earlier: list[Any] | None = None
    with untouched(model) as state:
        if state.holds_generators:  # generators compute their tables now, not while the model is traced
            earlier = require_runs(model, args, kwargs, state)
    try:
        with untouched(model):
            watch()
            program = copy_context().run(_traced, model, args, kwargs, dynamic_shapes)
    except CaptureError:
        with untouched(model) as state:
            require_runs(model, args, kwargs, state)
            if not made_since(model, state) and not state.writes.happened():
                raise
        program = None
    if changed or program is None:
        first_call = program.module() if program is not None and any(advanced) else None
        require_repeats(model, args, kwargs, first_call, earlier)
    if program is not None and not tables:
        return program
    with untouched(model) as state:
        require_runs(model, args, kwargs, state)
        watch()
        program = copy_context().run(_traced, model, args, kwargs, dynamic_shapes)
        before, memory = traced[-1]
        if before.memory() != memory:
            raise CaptureError(
                f"{type(model).__name__} assigns to the `data` of a parameter or buffer in every call, which a "
                "captured graph cannot reproduce; assign the attribute itself (self.table = x instead of "
                "self.table.data = x)"
            )
        for tensors in (program.state_dict, program.constants):
            state.writes.keep(tensors)
        return program


_SHAPED_LIKE = ("aten.new_", "aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
"""Operators that use only the shape and dtype of their first argument."""


def _is_table(tensor: Tensor) -> bool:
    """Tell whether a tensor that the traced forward stored is the same for other batches.

    A tensor that depends only on sizes is computed for each batch; a tensor that depends on values keeps the values of
    the first batch.
    """
    if any(static_size(size) is None for size in tensor.shape):
        return False
    proxies: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")
    mode = proxies.get_proxy_mode()
    slot = None if mode is None else proxies.get_proxy_slot(tensor, mode.tracer, None)
    pending, visited = [] if slot is None else [slot.proxy.node], set[Node]()
    while pending:
        node = pending.pop()
        if node not in visited and not target_name(node).startswith(_SHAPED_LIKE):
            visited.add(node)
            pending += [] if _is_size(node) else node.all_input_nodes
    return not any(map(_is_size, visited)) or any(node.op == "placeholder" and _varies(node) for node in visited)


def _is_size(node: Node) -> bool:
    return target_name(node).startswith("aten.sym_") or isinstance(node.meta.get("val"), torch.SymInt)


def _varies(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and any(static_size(size) is None for size in value.shape)


def _traced(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> ExportedProgram:
    from quark_fx.capture.symbolic_sizes import followed_sizes  # imports sympy, which takes half a second

    hugging_face = _is_hugging_face(model) and not args
    fixed: dict[tuple[tuple[int, ...], int], str] = {}

    def dimensions(leaf: Tensor) -> dict[int, Any]:
        return {dim: how for dim, how in dynamic_dimensions(leaf).items() if (tuple(leaf.shape), dim) not in fixed}

    def exported() -> ExportedProgram:
        if hugging_face and (program := _export_hugging_face(model, kwargs, dynamic_shapes, dimensions)) is not None:
            return program
        shapes = dynamic_shapes
        if shapes is None:
            shapes = ShapesCollection()
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.dim():
                    shapes[leaf] = dimensions(leaf)
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False)

    try:
        with torch.no_grad(), quiet(), _silent(), followed_sizes(), _no_cache_within(model, kwargs):
            program = exported()
            if fixed := fixed_dimensions(program):
                if dynamic_shapes is not None:
                    raise CaptureError(_fixed_sizes(fixed))
                for (shape, dim), name in fixed.items():
                    if dim == 0:
                        warn_of_fixed(name, shape[0])
                program = exported()
            return program
    except CaptureError:
        raise
    except Exception as error:  # the model's own code may raise any error during tracing
        asked = dynamic_shapes is not None and explain_dynamic_shapes(error, model, args, kwargs)
        raise CaptureError(asked or explain(error, model) + dtype_hint(model, (args, kwargs))) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Keep `torch.export` from printing the graph of a model that it cannot trace; `explain` names the line.

    Also silence its warning about attributes that a forward assigns, which `untouched` restores.
    """
    names = vars(importlib.import_module("torch.export._trace"))
    names["print"] = lambda *_, **__: None  # hides the built-in `print`, in that module alone
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"The tensor attributes? ")
            yield
    finally:
        names.pop("print", None)


def _is_hugging_face(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


@contextmanager
def _no_cache_within(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Keep `model`, or models of transformers inside it, from returning a cache without a request.

    A PeftModel wraps such a model, and transformers' exporter turns the argument `use_cache` into an attribute of the
    configuration; T5's decoder has a separate configuration.
    """
    transformers = sys.modules.get("transformers")
    configs: list[Any] = []
    if transformers is not None and not kwargs.get("use_cache") and not {*CACHE_NAMES} & set(kwargs):
        wrapped: list[Any] = [m.config for m in model.modules() if isinstance(m, transformers.PreTrainedModel)]
        configs = [config for config in wrapped if getattr(config, "use_cache", None)]
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True


def _fixed_sizes(fixed: Mapping[tuple[tuple[int, ...], int], str]) -> str:
    places = ", ".join(f"dimension {dim} of {name}" for (_, dim), name in fixed.items())
    return (
        f"dynamic_shapes asks for other sizes of {places}, but the model's code turns a size computed from it into a "
        "fixed number, with int(...) or a comparison: leave it out of dynamic_shapes, or change the code to compute "
        "with the size itself"
    )


def _export_hugging_face(
    model: Any, kwargs: dict[str, Any], dynamic_shapes: Any, dimensions: Callable[[Tensor], dict[int, Any]]
) -> ExportedProgram | None:
    try:
        exporters: Any = importlib.import_module("transformers.exporters")
    except ImportError:
        return None
    if dynamic_shapes is None:
        # The exporter removes flags such as `use_cache` from the inputs.
        tensors = {k: v for k, v in kwargs.items() if v is not None and not isinstance(v, bool | int | float | str)}
        dynamic_shapes = pytree.tree_map(lambda leaf: dimensions(leaf) if isinstance(leaf, Tensor) else None, tensors)
    with quiet():
        config = exporters.DynamoConfig(dynamic=True, dynamic_shapes=dynamic_shapes)
        exported = exporters.DynamoExporter().export(model, dict(kwargs), config=config)
    return exported if isinstance(exported, ExportedProgram) else exported.program


__all__ = ["Captured", "capture_graph", "dynamic_dimensions", "unwrapped"]
