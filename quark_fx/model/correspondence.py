"""Correspondence between the original model's modules and the operands of a quantized graph.

It is derived from the notes that capture, passes, and conversion left on the graph (`quark_fx.graph.provenance`).
A computation that the notes do not explain raises an error, so a model with the resulting constants and quantizers
computes the same as the graph.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.errors import QuarkError
from quark_fx.graph.absorbed import AbsorbedMap
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import describe, is_activation, module_calls, module_path
from quark_fx.graph.operators import argument, operator_row
from quark_fx.graph.provenance import MAPS, Folded, Kind, Rewrite, digest, rewrites
from quark_fx.model.constants import Constant
from quark_fx.model.float_view import FloatView
from quark_fx.model.module_slices import ModuleCall, ModuleSlice, calls_around, calls_without_parameters, slice_of
from quark_fx.model.parts import Part, whole_of
from quark_fx.model.rounded_attention import RoundedAttention, place_attentions
from quark_fx.model.rounded_modules import RoundedModules, place_rounding
from quark_fx.model.stored_weights import ComputedParameter, storable, with_stored_weights


@dataclass
class Correspondence:
    """The changes that make the original model compute the quantized graph.

    Attributes:
        constants: Forms of parameters and buffers in the quantized graph, keyed by path.
        rounding: Modules that round their inputs or outputs.
        identities: Paths of modules that no longer compute anything, such as batch norms folded into operators.
        slices: Call of each module that a piece of the quantized graph replaces, and that piece, keyed by module path.
        attentions: Rounding of keys and values, keyed by the path of the attention module.
        borrowed: Names of parameters that are read by operators outside of their module.
        computed: Names of the parameters that weights are computed from, keyed by the path of a module in `slices`
            whose parameters cannot hold the quantized weights; empty if a folded map or a new bias is the reason.
        parts: Names of parameters that the graph stores as several constants.
        stored: Computed parameters that the model must store, keyed by path; see `quark_fx.model.stored_weights`.
        maps: Affine maps that are folded into the only operator of a module but that the model's code still applies:
            module path, operator, and map, in the order of folding.
    """

    constants: dict[str, Constant] = field(default_factory=dict)
    rounding: RoundedModules = field(default_factory=RoundedModules)
    identities: set[str] = field(default_factory=set)
    slices: dict[str, tuple[ModuleCall, ModuleSlice]] = field(default_factory=dict)
    attentions: dict[str, RoundedAttention] = field(default_factory=dict)
    borrowed: set[str] = field(default_factory=set)
    computed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    stored: dict[str, ComputedParameter] = field(default_factory=dict)
    maps: list[tuple[str, Linear, AbsorbedMap]] = field(default_factory=list)


def shell_of(model: nn.Module, gm: GraphModule, kept: Mapping[str, Tensor]) -> nn.Module:
    """Return a copy of a model in which parameters that the quantized graph stores are on the meta device.

    Args:
        model: The float model.
        gm: The quantized graph.
        kept: See `QuantizedModel.kept`.
    """
    names = {node.meta.get("parameter") for node in gm.graph.nodes if node.op == "get_attr"} | kept.keys()
    named = dict(model.named_parameters(remove_duplicate=False))
    parameter_ids = {id(p) for name, p in named.items() if name in names}
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in named.values()
        if id(p) in parameter_ids
    }
    for module in model.modules():
        # The older parametrizations of torch.nn.utils store computed weights; torch cannot deepcopy non-leaf tensors.
        memo |= {id(t): t.detach() for t in vars(module).values() if isinstance(t, Tensor) and t.grad_fn is not None}
    return copy.deepcopy(model, memo)


def correspond(
    model: nn.Module, gm: GraphModule, kept: Mapping[str, Tensor], *, at_readers: bool = False
) -> Correspondence:
    """Find the module of every constant and every rounded activation of a quantized graph.

    Args:
        model: The original model, or one with the same architecture.
        gm: The quantized graph.
        kept: See `QuantizedModel.kept`.
        at_readers: See `place_rounding`.

    Raises:
        QuarkError: If the graph contains a computation that no module performs; the message names the operator.
    """
    view = FloatView(gm)
    _name_modules_once(model, view)
    changes = Correspondence(stored=storable(model, view))
    model = with_stored_weights(model, changes.stored)
    wholes, computed = _folded_codes(model, view)
    _place_rewrites(model, view, gm, changes)
    _place_computed(view, computed, changes)
    _place_maps(model, view, changes)
    _place_constants(model, view, kept, changes, wholes)
    inside = {node: path for path, (call, _) in changes.slices.items() for node in call.nodes}
    for node, path in inside.items():
        _keep_outer_calls(node, path)
    within = {edge for edge in view.rounded if edge[0] in inside and inside[edge[0]] == inside.get(edge[1])}
    changes.attentions, attended = place_attentions(view.graph, view.rounded)
    rest = {edge: a for edge, a in view.rounded.items() if edge not in within | attended}
    changes.rounding = place_rounding(view.graph, rest, view.branches, at_readers=at_readers)
    return changes


def _keep_outer_calls(node: Node, path: str) -> None:
    """Drop the calls inside a replaced module from a node: the submodules do not run, so they cannot round values."""
    stack = node.meta.get("nn_module_stack") or {}
    outer = [key for key, (at, _) in stack.items() if f"{path}.".startswith(f"{at}.") or not at]
    node.meta["nn_module_stack"] = {key: stack[key] for key in outer}


def _name_modules_once(model: nn.Module, view: FloatView) -> None:
    """Give all calls of a module that has parameters and several names the first of the names."""
    first: dict[int, str] = {}
    names = {}
    for path, module in model.named_modules(remove_duplicate=False):
        shared = next(module.parameters(), None) is not None
        names[path] = first.setdefault(id(module), path) if shared else path
    for node in view.graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (names.get(path, path), kind) for key, (path, kind) in stack.items()}


def _place_rewrites(model: nn.Module, view: FloatView, gm: GraphModule, changes: Correspondence) -> None:
    """Find the modules that passes rewrote, and modules with rounding between their operators."""
    paths: dict[str, dict[str, None]] = {}  # the calls of each module
    for node in view.graph.nodes:
        for key, path in module_calls(node).items():
            paths.setdefault(path, {})[key] = None
    calls = calls_without_parameters(view.graph)
    single = {call.path: call for call in calls.values() if len(paths[call.path]) == 1}
    inside = {node: call.path for call in single.values() for node in call.nodes}
    targets = {inside[value]: None for value, reader in view.rounded if inside.get(value, 0) == inside.get(reader, 1)}
    module_names = dict(model.named_modules(remove_duplicate=False)).keys() - {""}
    for rewrite in rewrites(gm):
        if rewrite.kind is Kind.LEFT_OUT and rewrite.path in module_names - paths.keys():
            changes.identities.add(rewrite.path)
        elif rewrite.kind is Kind.REPLACED and rewrite.path in module_names & single.keys():
            targets[rewrite.path] = None
        else:
            raise _not_computed(model, rewrite, len(paths.get(rewrite.path, ())))
    for path in targets.keys() & module_names:
        call = single[path]
        piece = slice_of(view.originals[call.result], path)
        if piece is None or view.value_of(piece.entry) is not call.entry:
            raise QuarkError(
                f"module {path} computes {describe(call.result)} from more than one input in the quantized graph, but "
                "takes only one input in the float model; call the quantized model itself"
            )
        changes.slices[path] = call, piece


def _folded_codes(model: nn.Module, view: FloatView) -> tuple[dict[str, tuple[Node, Constant]], list[Node]]:
    """Return the parameters that can be assembled from constants, each with a consumer, and other changed constants.

    The other constants are computed from parameters, and no parameter values would produce them.
    """
    parts: dict[str, list[tuple[Node, Part]]] = {}
    computed: list[Node] = []
    for node, constant in view.constants.items():
        folded = node.meta.get("folded")
        if folded is None or (constant.is_float and folded.undo is not None):
            continue
        if folded.view is not None:
            parts.setdefault(folded.tensors[0], []).append((node, Part(constant, folded.view)))
        elif not _is_unchanged(node, constant):
            computed.append(node)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    wholes: dict[str, tuple[Node, Constant]] = {}
    for name, pairs in parts.items():
        if all(_is_unchanged(node, part.constant) for node, part in pairs):
            continue
        whole = whole_of(tensors[name].shape, [part for _, part in pairs]) if name in tensors else None
        if whole is None:
            computed += [node for node, part in pairs if not _is_unchanged(node, part.constant)]
        else:
            wholes[name] = next(iter(pairs[0][0].users)), whole
    return wholes, computed


def _place_computed(view: FloatView, computed: list[Node], changes: Correspondence) -> None:
    """Find the module calls to replace because no parameter of the model can hold their quantized weights.

    Raises:
        QuarkError: If a call has several inputs or results, or its module has several calls.
    """
    for node in computed:
        for reader in node.users:
            if any(reader in call.nodes for call, _ in changes.slices.values()):
                continue
            if not _compute_around(view, reader, changes):
                raise QuarkError(
                    f"{describe(reader)} reads a weight that is computed from "
                    f"{', '.join(node.meta['folded'].tensors)}, in a module with several inputs, results, or calls; "
                    "store the computed weight as a parameter before quantizing (remove the parametrization, or merge "
                    "the adapter), or call the quantized model itself"
                )
    for path, (call, _) in changes.slices.items():
        names = [n for node in computed if not call.nodes.isdisjoint(node.users) for n in node.meta["folded"].tensors]
        if names:
            changes.computed[path] = tuple(dict.fromkeys(names))


def _compute_around(view: FloatView, node: Node, changes: Correspondence, outermost: int | None = None) -> bool:
    """Record the innermost module around `node` that a piece of the quantized graph can replace; false if none."""
    for call in calls_around(view.graph, node, outermost):
        piece = slice_of(view.originals[call.result], call.path)
        if piece is not None and view.value_of(piece.entry) is call.entry:
            inner = [path for path, (other, _) in changes.slices.items() if other.nodes <= call.nodes]
            for path in inner:
                del changes.slices[path]
                changes.computed.pop(path, None)
            changes.slices[call.path], changes.computed[call.path] = (call, piece), ()
            return True
    return False


def _not_computed(model: nn.Module, rewrite: Rewrite, calls: int) -> QuarkError:
    """Return the error for an operator whose rewritten form no module computes."""
    operator = rewrite.operator or "an operator"
    place = f"{operator} ({rewrite.line})" if rewrite.line else operator
    where = _called(rewrite.path)
    remedy = f"call the quantized model itself, or quantize without {rewrite.made_by}"
    if rewrite.kind is Kind.REROUTED:
        change = f"made {where} read a value other than {place}"
    else:
        change = f"rewrote {place} in {where}"
        if calls > 1:
            remedy += f", or give each of the {calls} calls of {where} a separate module"
        elif (module := dict(model.named_modules()).get(rewrite.path)) is None or not module._parameters:
            remedy += ", or call the operator in a module that computes nothing else (as `nn.SiLU` does for `silu`)"
    return QuarkError(
        f"pass {rewrite.made_by} {change}; eager() can only rewrite modules without parameters that have one call, "
        f"one input, and one result; {remedy}"
    )


def _called(path: str) -> str:
    return f"module {path}" if path else "the model"


def _place_constants(
    model: nn.Module,
    view: FloatView,
    kept: Mapping[str, Tensor],
    changes: Correspondence,
    wholes: Mapping[str, tuple[Node, Constant]],
) -> None:
    """Assign each constant to a parameter; untie tied parameters if their consumers read different constants."""
    tensors: dict[str, Tensor | None] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    readers: dict[str, dict[Node, Constant]] = {}
    folded: list[tuple[Node, Node, Constant]] = []
    replaced = {node for call, _ in changes.slices.values() for node in call.nodes}
    computing = {node for path in changes.computed for node in changes.slices[path][0].nodes}
    parted: list[list[str]] = []
    for node, constant in view.constants.items():
        for reader in node.users:
            name = node.meta.get("parameter")
            if reader in computing or (name in wholes and "folded" in node.meta):
                continue
            if "folded" in node.meta:
                folded.append((node, reader, constant))
            elif name in tensors:
                readers.setdefault(name, {})[reader] = constant
            elif "digest" in node.meta:
                _require_unchanged(node, constant)
            elif _is_bias(reader, node):
                if not _takes_bias(model, reader):
                    raise QuarkError(
                        f"{describe(reader)} has a bias in the quantized graph, and {_called(module_path(reader))} has "
                        "none in the float model; call the quantized model itself"
                    )
                readers.setdefault(f"{module_path(reader)}.bias".lstrip("."), {})[reader] = constant
            elif name is not None:
                raise QuarkError(
                    f"the model has no parameter {name}; pass a model of the architecture that was quantized"
                )
            elif reader not in replaced:
                raise QuarkError(
                    f"{describe(reader)} reads a tensor that a pass added, and no module of the float model has such a "
                    "tensor; call the quantized model itself"
                )
    for name, by_reader in readers.items():
        if name not in tensors:
            tensors[name] = None
        aliases = [n for n, t in tensors.items() if n == name or (t is tensors[name] is not None)]
        if {module_path(reader) for reader in by_reader} - {alias.rpartition(".")[0] for alias in aliases}:
            changes.borrowed.update(aliases)
        alike = len({constant.names for constant in by_reader.values()}) == 1
        if not alike:
            parted.append(aliases)
        for reader, constant in by_reader.items():
            constant = _shaped(constant, tensors[name], reader)
            for alias in aliases if alike else [_alias(aliases, reader)]:
                _put(changes, alias, constant, reader)
    for aliases in parted:
        _place_unread(model, aliases, changes)
    for name, (reader, constant) in wholes.items():
        for alias in [n for n, t in tensors.items() if n == name or (t is tensors[name] is not None)]:
            changes.borrowed.add(alias)
            changes.parts.add(alias)
            previous = changes.constants.get(alias)
            if previous is None or not torch.equal(previous.value(), constant.value()):
                _put(changes, alias, constant, reader)
    for node, reader, constant in folded:
        changes.borrowed.update(node.meta["folded"].tensors)
        for name, one in _unfolded(node, reader, constant, kept).items():
            previous = changes.constants.get(name)
            same = previous is not None and previous.is_float and torch.equal(previous.tensor, one.tensor)
            if name in tensors and not same:
                _put(changes, name, _shaped(one, tensors[name], reader), reader)
    for name, tensor in kept.items():
        if name in tensors:
            aliases = [n for n, t in tensors.items() if t is tensors[name]]
            changes.constants |= {n: _as_it_was(name, tensor) for n in aliases if n not in changes.constants}
        else:
            _require_same(model, name, tensor)


def _place_maps(model: nn.Module, view: FloatView, changes: Correspondence) -> None:
    """Find the modules that undo the maps folded into their operators, or that a piece of the graph replaces.

    Raises:
        QuarkError: If no such module exists for a map.
    """
    calls: dict[str, set[str]] = {}
    regions: dict[str, list[Node]] = {}
    for node in view.graph.nodes:
        for key, path in module_calls(node).items():
            calls.setdefault(path, set()).add(key)
            regions.setdefault(key, []).append(node)

    def is_undone(linear: Linear, absorbed: AbsorbedMap) -> bool:
        key, path = next(reversed(module_calls(linear.node).items()))
        region = regions[key]
        read = {n for member in region for n in member.all_input_nodes if n not in region and is_activation(n)}
        results = [n for n in region if any(key not in module_calls(user) for user in n.users)]
        apart = read == {linear.activation} if absorbed.before else results == [linear.node]
        return apart and bool(absorbed.factor) and len(calls[path]) == 1

    linears = [linear for node in view.graph.nodes if (linear := Linear.of(node)) is not None]
    pending = True
    while pending:
        changes.maps, pending = [], False
        for linear in linears:  # not all nodes with notes: quantizers inherit the notes of the values they round
            paths = list(module_calls(linear.node).values())
            around = next((path for path, (call, _) in changes.slices.items() if linear.node in call.nodes), None)
            depth = len(paths) if around is None else paths.index(around)
            outside = [absorbed for absorbed in linear.node.meta.get(MAPS, ()) if absorbed.calls <= depth]
            rest = [x for x in outside if depth < len(paths) - 1 or not is_undone(linear, x)]
            changes.maps += [(paths[-1], linear, absorbed) for absorbed in outside if absorbed not in rest]
            limits = [absorbed.calls for absorbed in rest]
            if around is None and _is_fresh_bias(linear) and not _takes_bias(model, linear.node):
                limits.append(depth)
            if not limits:
                continue
            pending = _compute_around(view, linear.node, changes, min(limits))
            if rest and not pending:
                raise QuarkError(
                    f"{describe(linear.node)} includes neighboring operations that fold_batch_norm merged into it, and "
                    "no module that contains all of them has one input, one result, and one call; call the quantized "
                    "model itself, move the operator to a module (such as nn.Conv2d), or quantize without "
                    "fold_batch_norm"
                )
            if pending:
                break


def _is_fresh_bias(linear: Linear) -> bool:
    bias = linear.bias
    return bias is not None and bias.op == "get_attr" and not {"parameter", "folded", "digest"} & bias.meta.keys()


def _takes_bias(model: nn.Module, reader: Node) -> bool:
    """Tell whether the module of an operator accepts a bias."""
    return getattr(model.get_submodule(module_path(reader)), "bias", 0) is None


def _require_same(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Raise `QuarkError` if a tensor that is not a parameter of the model has changed since the graph was created."""
    owner, _, leaf = name.rpartition(".")
    try:
        attribute = getattr(model.get_submodule(owner), leaf)
    except AttributeError:  # a number that the model's code turns into a tensor
        return
    if isinstance(attribute, Tensor) and not torch.equal(attribute.to(tensor.device), tensor):
        raise QuarkError(
            f"the tensor {name} of the model has changed since the graph was captured, and is not a parameter; make "
            "it a parameter or buffer, or call the quantized model instead"
        )


def _as_it_was(name: str, tensor: Tensor) -> Constant:
    return Constant((f"{name} as it was",), tensor, tensor.dtype)


def _place_unread(model: nn.Module, aliases: list[str], changes: Correspondence) -> None:
    """Give each tied parameter without a consumer the constant of an alias, if possible in a module of its class."""
    kinds = {alias: type(model.get_submodule(alias.rpartition(".")[0])) for alias in aliases}
    read = [alias for alias in aliases if alias in changes.constants]
    for alias in (alias for alias in aliases if alias not in read):
        source = next((other for other in read if kinds[other] is kinds[alias]), read[0])
        changes.constants[alias] = changes.constants[source]


def _put(changes: Correspondence, name: str, constant: Constant, reader: Node) -> None:
    if changes.constants.setdefault(name, constant).names != constant.names:
        raise QuarkError(
            f"parameter {name} would have to be stored in several formats, one of them for {describe(reader)}; use the "
            "same specs for all operators that read it, or give them separate parameters"
        )


def _is_bias(reader: Node, constant: Node) -> bool:
    row = operator_row(reader)
    return row is not None and row.bias is not None and argument(reader, row.bias) is constant


def _require_unchanged(node: Node, constant: Constant) -> None:
    """Raise `QuarkError` if a tensor that is not a parameter of the model has changed."""
    if not constant.is_float or digest(constant.tensor) != node.meta["digest"]:
        raise QuarkError(
            f"quantization changed the tensor {node.meta['parameter']}, which is not a parameter of the model, so the "
            "model cannot store the change; make it a parameter or buffer, or call the quantized model instead"
        )


def _shaped(constant: Constant, like: Tensor | None, reader: Node) -> Constant:
    """Return the constant in the parameter's shape: a rescaled constant may have more leading dimensions of 1."""
    if like is None or constant.tensor.shape == like.shape:
        return constant
    extra = constant.tensor.dim() - like.dim()
    if not constant.is_float or extra < 0 or constant.tensor.shape != (1,) * extra + like.shape:
        raise QuarkError(
            f"{describe(reader)} reads a parameter of shape {tuple(constant.tensor.shape)} that has the shape "
            f"{tuple(like.shape)} in the model; pass a model of the architecture that was quantized, call the "
            "quantized model itself, or quantize without the pass that rescales it"
        )
    return replace(constant, stored=constant.tensor.reshape(like.shape))


def _alias(aliases: list[str], reader: Node) -> str:
    """Return the name that `reader` uses for a tied parameter: the name in a module that contains the reader."""
    for path in reversed(module_calls(reader).values()):
        local_names = [alias for alias in aliases if alias.rpartition(".")[0] == path]
        if len(local_names) == 1:
            return local_names[0]
    raise QuarkError(
        f"{describe(reader)} reads the parameter {' = '.join(aliases)} of another module in a different format than "
        "that module; use the same specs for all operators that read it, or give them separate parameters"
    )


def _is_unchanged(node: Node, constant: Constant) -> bool:
    return constant.is_float and digest(constant.tensor) == node.meta["digest"]


def _unfolded(node: Node, reader: Node, constant: Constant, kept: Mapping[str, Tensor]) -> dict[str, Constant]:
    """Return the values of the parameters that produce a constant, keyed by parameter."""
    folded: Folded = node.meta["folded"]
    if _is_unchanged(node, constant):
        if missing := [name for name in folded.tensors if name not in kept]:
            raise QuarkError(
                f"{describe(reader)} reads a constant computed from {', '.join(missing)}, which the quantized model "
                "does not store; call the quantized model itself"
            )
        return {name: _as_it_was(name, kept[name]) for name in folded.tensors}
    value = folded.undone(constant.tensor)
    assert value is not None  # `_folded_codes` returns all other constants
    return {folded.tensors[0]: Constant((f"{folded.tensors[0]} of {constant.names[0]}",), value, value.dtype)}


__all__ = ["Correspondence", "correspond", "shell_of"]
