"""Which module of the original model holds what a quantized graph computes with.

Two graphs are walked side by side from their results: the one that was captured and the quantized one made of it. They
may differ in constants (codes behind a `dequantize`, other values), in activations sent through `quantize` and
`dequantize`, in clamps that saturation performs, and in batch norms that are folded away. Nothing else is accepted, so
a model with the constants and quantizers found here computes what the quantized graph computes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from quark_fx.engine.quantized_weights import stored_tensor
from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import (
    describe,
    is_parameter,
    module_calls,
    module_path,
    parameter,
    results_of,
    stored_tensors,
    target_name,
    value_of,
)
from quark_fx.graph.operators import argument, clamp_bounds, operator_row
from quark_fx.model.module_slices import ModuleCall, ModuleSlice, calls_without_parameters, slice_of
from quark_fx.model.rounded_modules import Activation, RoundedModules, place_rounding
from quark_fx.numbers.quantized_tensor import QuantizedTensor

_QUANTIZE, _DEQUANTIZE, _CAST = "quark_fx.quantize.default", "quark_fx.dequantize.default", "aten._to_copy.default"
_EMBEDDING, _BATCH_NORM = "aten.embedding.default", "aten.batch_norm.default"


@dataclass(frozen=True)
class Constant:
    """What a parameter is in the quantized graph.

    Attributes:
        names: of the tensors it is made of, in the quantized graph; operators share it if they share these.
        stored: its values, perhaps in another floating-point type, or what it is quantized to.
        dtype: of the values.
    """

    names: tuple[str, ...]
    stored: Tensor | QuantizedTensor
    dtype: torch.dtype

    @property
    def quantized(self) -> QuantizedTensor | None:
        """What the values are quantized to, `None` for values and for those that are cast."""
        return self.stored if isinstance(self.stored, QuantizedTensor) else None

    @property
    def tensor(self) -> Tensor:
        """The values, or the codes."""
        return self.stored.codes if isinstance(self.stored, QuantizedTensor) else self.stored

    @property
    def is_float(self) -> bool:
        """Whether the tensor holds the values themselves."""
        return isinstance(self.stored, Tensor) and self.stored.dtype == self.dtype

    def value(self) -> Tensor:
        """Return the values."""
        if isinstance(self.stored, QuantizedTensor):
            return self.stored.dequantize(self.dtype)
        return self.stored.to(self.dtype)


@dataclass(frozen=True)
class Source:
    """The model that was quantized: its modules, and the graph that was captured.

    Attributes:
        model: a copy; parameters that the quantized graph has are on the meta device.
        graph: as captured, without tensors.
        constants: tensors of that graph that are no parameters.
    """

    model: nn.Module
    graph: Graph
    constants: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, captured: GraphModule, quantized: GraphModule) -> Source:
        """Copy what is needed of `model`, none of the weights the quantized graph has."""
        kept = stored_tensors(quantized)
        names = {n.removesuffix("_codes") for n in kept} | {n.rpartition("_codes_")[0] for n in kept}
        memo: dict[int, Any] = {}
        aliases: dict[int, bool] = {}
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, p in named.items():
            aliases[id(p)] = aliases.get(id(p), False) or name in names
        for p in named.values():
            if aliases[id(p)] and id(p) not in memo:
                memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        graph = Graph()
        graph.output(graph.graph_copy(captured.graph, {}))
        _name_modules_once(model, graph)
        constants = {n: t for n, t in stored_tensors(captured).items() if n not in named}
        return cls(copy.deepcopy(model, memo), graph, constants)


def _name_modules_once(model: nn.Module, graph: Graph) -> None:
    """Let calls of a module with parameters that has several names carry the first: it is one module, called often."""
    first: dict[int, str] = {}
    names = {}
    for path, module in model.named_modules(remove_duplicate=False):
        shared = next(module.parameters(), None) is not None
        names[path] = first.setdefault(id(module), path) if shared else path
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack") or {}
        node.meta["nn_module_stack"] = {key: (names.get(path, path), kind) for key, (path, kind) in stack.items()}


@dataclass
class Correspondence:
    """What to put into the original model.

    Attributes:
        constants: by the name of a parameter or buffer, what it is in the quantized graph.
        rounding: the modules that round what they read or make.
        identities: paths of batch norms that are folded into operators.
        slices: by the path of a module that a pass rewrote, what computes its call now.
    """

    constants: dict[str, Constant] = field(default_factory=dict)
    rounding: RoundedModules = field(default_factory=RoundedModules)
    identities: set[str] = field(default_factory=set)
    slices: dict[str, tuple[ModuleCall, ModuleSlice]] = field(default_factory=dict)


def correspond(source: Source, quantized: GraphModule) -> Correspondence:
    """Find the module behind every constant and every rounded activation of a quantized graph.

    Raises:
        QuarkError: naming the operator, where the graph computes what no module of the model does.
    """
    walk = _Walk(source, quantized)
    walk.run()
    found = Correspondence(identities=walk.identities, slices=walk.slices)
    _place_constants(source, walk, found)
    found.rounding = place_rounding(source.graph, walk.rounded)
    return found


class _Walk:
    """The walk over both graphs, and what it met."""

    def __init__(self, source: Source, gm: GraphModule) -> None:
        self.source = source
        self.gm = gm
        self.readers: dict[str, dict[Node, Constant]] = {}
        self.rounded: dict[tuple[Node, Node], Activation] = {}
        self.identities: set[str] = set()
        self.folded: list[tuple[Node, Node, Constant]] = []
        self.pending: list[tuple[Any, Any, Node]] = []
        self.calls = calls_without_parameters(source.graph)
        self.slices: dict[str, tuple[ModuleCall, ModuleSlice]] = {}
        self.partners: dict[Node, Node] = {}

    def run(self) -> None:
        output = next(iter(reversed(self.source.graph.nodes)))
        self.pending = [(results_of(self.gm), tuple(output.args[0]), output)]
        places = [n for g in (self.gm.graph, self.source.graph) for n in g.nodes if n.op == "placeholder"]
        half = len(places) // 2
        seen: set[tuple[Node, Node]] = set(zip(places[:half], places[half:], strict=True))
        while self.pending:
            ours, theirs, reader = self.pending.pop()
            if not isinstance(theirs, Node):
                self._pair_values(ours, theirs, reader)
            elif not isinstance(ours, Node):
                raise self._differs(theirs, ours)
            elif not self._read(ours, theirs, reader) and (ours, theirs) not in seen:
                seen.add((ours, theirs))
                self._pair_calls(ours, theirs, reader)

    def _pair_values(self, ours: Any, theirs: Any, reader: Node) -> None:
        if isinstance(theirs, tuple | list):
            if not isinstance(ours, tuple | list) or len(ours) != len(theirs):
                raise self._differs(reader, ours)
            self.pending += [(a, b, reader) for a, b in zip(ours, theirs, strict=True)]
        elif isinstance(theirs, slice):
            self._pair_values([ours.start, ours.stop, ours.step], [theirs.start, theirs.stop, theirs.step], reader)
        elif theirs is None and isinstance(ours, Node) and (added := constant_of(self.gm, ours)) is not None:
            row = operator_row(reader)
            if row is None or row.bias is None:
                raise self._differs(reader, ours)
            self.readers.setdefault(f"{module_path(reader)}.bias".lstrip("."), {})[reader] = added
        elif type(ours) is not type(theirs) or ours != theirs:
            raise self._differs(reader, ours)

    def _read(self, ours: Node, theirs: Node, reader: Node) -> bool:
        """Note a constant or a rounded activation that `reader` reads; tell whether there was one."""
        if theirs.op == "get_attr":
            constant = constant_of(self.gm, ours)
            if constant is None:
                raise self._differs(theirs, ours)
            self.readers.setdefault(str(theirs.target), {})[reader] = constant
            return True
        weight = theirs.args[0] if target_name(theirs) == _EMBEDDING else None
        if is_parameter(weight) and (table := table_of(self.gm, ours)) is not None:
            codes, constant = table
            self.readers.setdefault(str(weight.target), {})[theirs] = constant
            self.pending.append((argument(codes, 1), argument(theirs, 1), theirs))
            return True
        if (found := self._activation(ours, theirs)) is not None:
            value, activation = found
            known = self.rounded.setdefault((theirs, reader), activation)
            if not known.same_as(activation):
                raise self._differs(theirs, ours)
            while clamp_bounds(theirs) is not None and target_name(value) != target_name(theirs):
                theirs = theirs.args[0]  # type: ignore[assignment]
            self.pending.append((value, theirs, reader))
            return True
        same = ours.op == theirs.op and ours.target == theirs.target
        if not same and _is_constant(theirs) and (constant := constant_of(self.gm, ours)) is not None:
            self.folded.append((theirs, reader, constant))
            return True
        return False

    def _pair_calls(self, ours: Node, theirs: Node, reader: Node) -> None:
        self.partners[theirs] = ours
        if self._replace_module(ours, theirs):
            return
        if target_name(theirs) == _BATCH_NORM != target_name(ours):
            path = module_path(theirs)
            if [n for n in self.source.graph.nodes if path in module_calls(n).values()] != [theirs]:
                raise self._differs(theirs, ours)  # the module does more, or several times
            self.identities.add(path)
            self.pending.append((ours, theirs.args[0], reader))
            return
        if theirs.op != "call_function" or ours.op != theirs.op or ours.target != theirs.target:
            raise self._differs(theirs, ours)
        schema = getattr(theirs.target, "_schema", None)
        count = len(schema.arguments) if schema is not None else max(len(ours.args), len(theirs.args))
        if target_name(theirs) == _EMBEDDING:
            count = 2  # the rest is for training
        for position in range(count):
            default = schema.arguments[position].default_value if schema is not None else None
            a, b = (argument(n, position) if schema is not None else n.args[position] for n in (ours, theirs))
            self.pending.append((default if a is None else a, default if b is None else b, theirs))

    def _replace_module(self, ours: Node, theirs: Node) -> bool:
        """Note the slice that computes a whole call of a module in another way; tell whether there is one."""
        call = self.calls.get(theirs)
        if call is None or self._count(call.path) > 1:
            return False
        piece = slice_of(ours, call.path)
        if piece is None or piece.computes(call):
            return False
        if self.slices.setdefault(call.path, (call, piece)) != (call, piece):
            raise self._differs(theirs, ours)
        self.pending += [(piece.entry, call.entry, user) for user in call.readers]
        return True

    def _activation(self, node: Node, theirs: Node) -> tuple[Node, Activation] | None:
        inner: Any = node.args[0] if target_name(node) in (_DEQUANTIZE, _CAST) else None
        if target_name(node) == _CAST == target_name(inner) and target_name(theirs) != _CAST:
            return inner.args[0], Activation(cast=value_of(self.gm, inner).dtype)
        if target_name(node) != _DEQUANTIZE or target_name(inner) != _QUANTIZE:
            return None
        arguments: Any = inner.args[:4]
        value, scale, zero_point, fmt = arguments
        if is_parameter(scale) and is_parameter(zero_point):
            return value, Activation(fmt, parameter(self.gm, scale), parameter(self.gm, zero_point))
        measured: Any = scale.args[0]
        _, _, symmetry, axis, *rest = measured.args
        from_last = None if axis is None else axis - value_of(self.gm, value).dim()
        return value, Activation(fmt, None, None, symmetry, from_last, *rest)

    def _count(self, path: str) -> int:
        """Return how often a module is called."""
        return len({key for n in self.source.graph.nodes for key, p in module_calls(n).items() if p == path})

    def _differs(self, theirs: Node, ours: Any) -> QuarkError:
        return _differs(theirs, ours, self.partners.get(theirs), self._count(module_path(theirs)))


def constant_of(gm: GraphModule, node: Node) -> Constant | None:
    """Return the constant that a node is: a tensor, one that is cast, or codes that are dequantized; else `None`."""
    if node.op == "get_attr":
        value = parameter(gm, node)
        return Constant((str(node.target),), value, value.dtype)
    if target_name(node) == _CAST and is_parameter(node.args[0]):
        inner = constant_of(gm, node.args[0])
        return inner and replace(inner, dtype=value_of(gm, node).dtype)
    if target_name(node) != _DEQUANTIZE or not all(is_parameter(n) for n in node.args[:3]):
        return None
    return _codes(gm, *node.args)


def _codes(gm: GraphModule, *args: Any) -> Constant:
    dtype = args[6] if len(args) > 6 else torch.float32
    return Constant(tuple(str(n.target) for n in args[:3]), stored_tensor(gm, args), dtype)


def table_of(gm: GraphModule, node: Node) -> tuple[Node, Constant] | None:
    """Return the look-up of codes, and the table, behind rows that are dequantized after they were found."""
    codes: Any = node.args[0] if target_name(node) in (_DEQUANTIZE, _CAST) else None
    if codes is None or target_name(codes) != _EMBEDDING or not is_parameter(codes.args[0]):
        return None
    if target_name(node) == _CAST:
        table = constant_of(gm, codes.args[0])
        assert table is not None
        return codes, replace(table, dtype=value_of(gm, node).dtype)
    axis: int | None = None
    tables = []
    for rows in node.args[1:3]:
        assert isinstance(rows, Node)
        per_row = target_name(rows) == _EMBEDDING
        table_node: Any = rows.args[0] if per_row else rows
        whole = is_parameter(table_node)
        if per_row:
            axis = 1 if whole else 0
        tables.append(table_node if whole else table_node.args[0])
    block = int(node.args[5]) if axis == 1 and len(node.args) > 5 else 0  # type: ignore[arg-type]
    arguments: Any = node.args
    return codes, _codes(gm, codes.args[0], *tables, arguments[3], axis, block, *arguments[6:])


def _is_constant(node: Node) -> bool:
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(n.op == "get_attr" or _is_constant(n) for n in inputs)


_EXPLICIT = ("SmoothQuant", "AWQ")
"""Passes that insert multiplications, as an option."""


def _differs(theirs: Node, ours: Any, partner: Node | None = None, calls: int = 1) -> QuarkError:
    """Return the error for an operator that no module computes.

    Args:
        theirs: the operator of the captured graph.
        ours: what the quantized graph has in its place, or in the place of one of its arguments.
        partner: the operator of the quantized graph whose argument that is.
        calls: of the module that computes the operator.
    """
    made = ours if isinstance(ours, Node) else partner
    by = made.meta.get("made_by", "") if made is not None else ""
    what = target_name(ours) if isinstance(ours, Node) else repr(ours)
    if by in _EXPLICIT:
        return QuarkError(
            f"{describe(theirs)} is read through a multiplication that pass {by} inserted, which no module of the "
            f"model performs; call the quantized model itself, or quantize without explicit=True of {by}"
        )
    path = module_path(theirs)
    if not by:
        remedy = "quantize without the pass that rewrites it"
    elif calls > 1:
        remedy = f"give each of the {calls} calls of module {path} a module of its own"
    else:
        remedy = (
            "let a module that computes nothing else, from one input, call it (as `nn.SiLU` does for `silu`), or "
            f"quantize without {by}"
        )
    return QuarkError(
        f"{describe(theirs)} became {what} in the quantized graph{f' (pass {by})' if by else ''}, which no module of "
        f"the model computes; call the quantized model itself, or {remedy}"
    )


def _place_constants(source: Source, walk: _Walk, found: Correspondence) -> None:
    """Find the parameters that hold the constants; tied ones part where their readers differ."""
    tensors: dict[str, Tensor | None] = dict(source.model.named_parameters(remove_duplicate=False))
    tensors |= dict(source.model.named_buffers(remove_duplicate=False))
    for name, readers in walk.readers.items():
        if name not in tensors and name in source.constants:
            if not all(c.is_float and torch.equal(c.tensor, source.constants[name]) for c in readers.values()):
                raise QuarkError(f"the tensor {name}, which is no parameter of the model, changed; call the graph")
            continue
        if name not in tensors:
            owner, _, leaf = name.rpartition(".")
            if getattr(source.model.get_submodule(owner), leaf, 0) is not None:
                raise _differs(next(iter(readers)), "another operator")
            tensors[name] = None
        aliases = [n for n, t in tensors.items() if n == name or (t is tensors[name] is not None)]
        alike = len({constant.names for constant in readers.values()}) == 1
        for reader, given in readers.items():
            constant = _shaped(given, tensors[name], reader)
            for alias in aliases if alike else [_alias(aliases, reader)]:
                if found.constants.setdefault(alias, constant).names != constant.names:
                    raise QuarkError(
                        f"parameter {alias} is stored in several ways, one of them for {describe(reader)}; give all "
                        "operators that read it the same specs, or a parameter of their own"
                    )
    for expression, reader, constant in walk.folded:
        _unfold(expression, reader, constant, {**source.constants, **tensors}, found.constants)


def _shaped(constant: Constant, like: Tensor | None, reader: Node) -> Constant:
    """Return the constant in the parameter's shape: a scaled one may have got dimensions of size 1 in front."""
    if like is None or constant.tensor.shape == like.shape:
        return constant
    extra = constant.tensor.dim() - like.dim()
    if not constant.is_float or extra < 0 or constant.tensor.shape != (1,) * extra + like.shape:
        raise QuarkError(
            f"{describe(reader)} reads a parameter of shape {tuple(constant.tensor.shape)} that has the shape "
            f"{tuple(like.shape)} in the model; call the quantized model itself, or quantize without the pass that "
            "rescales it"
        )
    return replace(constant, stored=constant.tensor.reshape(like.shape))


def _alias(aliases: list[str], reader: Node) -> str:
    """Return the name under which `reader` knows a tied parameter: that of a module it is part of."""
    for path in reversed(module_calls(reader).values()):
        own = [alias for alias in aliases if alias.rpartition(".")[0] == path]
        if len(own) == 1:
            return own[0]
    raise QuarkError(
        f"{describe(reader)} reads the parameter {' = '.join(aliases)} of another module, in another format than that "
        "module does; give all operators that read it the same specs, or a parameter of their own"
    )


def _unfold(
    node: Node, reader: Node, constant: Constant, tensors: Mapping[str, Any], constants: dict[str, Constant]
) -> None:
    """Give the parameter that `node` is computed from the value that makes it what it is in the quantized graph."""

    def evaluate(n: Node) -> Any:
        if n.op == "get_attr":
            name = str(n.target)
            return constants[name].value() if name in constants else tensors[name]
        args, kwargs = map_arg((n.args, n.kwargs), evaluate)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    value = constant.value()
    with torch.no_grad():
        if constant.is_float and torch.equal(evaluate(node), value):
            return
        base = node
        while constant.is_float and base.op != "get_attr":
            inner: Any = base.args[0]
            added: Any = base.args[1] if target_name(base) == "aten.add.Tensor" else None
            if isinstance(added, int | float):
                value = value - added
            elif target_name(base) == _CAST:
                value = value.to(inner.meta["val"].dtype)
            else:
                break
            base = inner
    if base.op != "get_attr" or str(base.target) in constants:
        raise QuarkError(
            f"{describe(node)} computes a constant for {describe(reader)} that the quantized graph holds in another "
            "form; remove the parametrization from the model before quantizing it, or call the quantized model itself"
        )
    unfolded = Constant((f"{base.target} of {constant.names[0]}",), value, value.dtype)
    constants[str(base.target)] = _shaped(unfolded, tensors[str(base.target)], reader)
