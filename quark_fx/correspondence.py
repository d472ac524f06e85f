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

from quark_fx.errors import QuarkError
from quark_fx.graph import describe, is_parameter, parameter, results_of, stored_tensors, target_name, value_of
from quark_fx.operators import MOVING, argument, clamp_bounds, operator_row
from quark_fx.ops import dequantize

_QUANTIZE, _DEQUANTIZE, _CAST = "quark_fx.quantize.default", "quark_fx.dequantize.default", "aten._to_copy.default"
_EMBEDDING, _BATCH_NORM = "aten.embedding.default", "aten.batch_norm.default"


@dataclass(frozen=True)
class Constant:
    """What a parameter is in the quantized graph.

    Attributes:
        names: of the tensors it is made of, in the quantized graph; operators share it if they share these.
        tensor: its values, or codes.
        scale: of the codes, `None` for values and for codes that a cast turns into values.
        zero_point: of the codes.
        format: name of the codes' format, empty for values.
        axis: see `quark_fx.ops`.
        block_size: see `quark_fx.ops`.
        dtype: of the values.
    """

    names: tuple[str, ...]
    tensor: Tensor
    dtype: torch.dtype
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    format: str = ""
    axis: int | None = None
    block_size: int = 0

    @property
    def is_float(self) -> bool:
        """Whether the tensor holds the values themselves."""
        return self.scale is None and self.tensor.dtype == self.dtype

    def value(self) -> Tensor:
        """Return the values."""
        if self.scale is None or self.zero_point is None:
            return self.tensor.to(self.dtype)
        layout = (self.format, self.axis, self.block_size, self.dtype)
        value: Tensor = dequantize(self.tensor, self.scale, self.zero_point, *layout)
        return value


@dataclass(frozen=True)
class Activation:
    """How an activation is rounded.

    Attributes:
        format: name of the format, empty for a cast.
        scale: static scale, shape `()`; `None` if it is measured at run time.
        zero_point: likewise.
        symmetry: of a range that is measured at run time.
        axis: dimension that measured scales vary along, counted from the last (-1); `None` for one scale.
        block_size: values per measured scale, see `quark_fx.ops`.
        scale_type: of measured scales.
        group_size: of them, see `quark_fx.ops.dynamic_qparams`.
        cast: the 16-bit float it is cast to and back.
    """

    format: str = ""
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    symmetry: str = ""
    axis: int | None = None
    block_size: int = 0
    scale_type: str = "float32"
    group_size: int = 0
    cast: torch.dtype | None = None

    @property
    def layout(self) -> tuple[int | None, int]:
        """The granularity, as `quark_fx.ops` has it."""
        return self.axis, self.block_size

    @property
    def measurement(self) -> tuple[str, str, int | None, int, str, int]:
        """The arguments of `quark_fx.ops.dynamic_qparams` behind the tensor."""
        return self.format, self.symmetry, *self.layout, self.scale_type, self.group_size

    @property
    def per_token(self) -> bool:
        """Whether each row of the last dimension is measured."""
        return self.axis == -1 and self.block_size < 0

    def same_as(self, other: Activation) -> bool:
        """Tell whether both round every value alike."""
        tensors = ((self.scale, other.scale), (self.zero_point, other.zero_point))
        kinds = [(a.measurement, a.cast) for a in (self, other)]
        return kinds[0] == kinds[1] and all(
            a is b or (a is not None and b is not None and bool((a == b).all())) for a, b in tensors
        )


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
        constants = {n: t for n, t in stored_tensors(captured).items() if n not in named}
        return cls(copy.deepcopy(model, memo), graph, constants)


@dataclass
class Correspondence:
    """What to put into the original model.

    Attributes:
        constants: by the name of a parameter or buffer, what it is in the quantized graph.
        inputs: by module path, how the module's floating-point input is rounded.
        identities: paths of batch norms that are folded into operators.
    """

    constants: dict[str, Constant] = field(default_factory=dict)
    inputs: dict[str, Activation] = field(default_factory=dict)
    identities: set[str] = field(default_factory=set)


def correspond(source: Source, quantized: GraphModule) -> Correspondence:
    """Find the module behind every constant and every rounded activation of a quantized graph.

    Raises:
        QuarkError: naming the operator, where the graph computes what no module of the model does.
    """
    walk = _Walk(source, quantized)
    walk.run()
    found = Correspondence(identities=walk.identities)
    _place_constants(source, walk, found)
    _place_inputs(walk, found)
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
                raise _differs(theirs, ours)
            elif not self._read(ours, theirs, reader) and (ours, theirs) not in seen:
                seen.add((ours, theirs))
                self._pair_calls(ours, theirs, reader)

    def _pair_values(self, ours: Any, theirs: Any, reader: Node) -> None:
        if isinstance(theirs, tuple | list):
            if not isinstance(ours, tuple | list) or len(ours) != len(theirs):
                raise _differs(reader, ours)
            self.pending += [(a, b, reader) for a, b in zip(ours, theirs, strict=True)]
        elif isinstance(theirs, slice):
            self._pair_values([ours.start, ours.stop, ours.step], [theirs.start, theirs.stop, theirs.step], reader)
        elif theirs is None and isinstance(ours, Node) and (added := self._constant(ours)) is not None:
            row = operator_row(reader)
            if row is None or row.bias is None:
                raise _differs(reader, ours)
            self.readers.setdefault(f"{module_path(reader)}.bias".lstrip("."), {})[reader] = added
        elif type(ours) is not type(theirs) or ours != theirs:
            raise _differs(reader, ours)

    def _read(self, ours: Node, theirs: Node, reader: Node) -> bool:
        """Note a constant or a rounded activation that `reader` reads; tell whether there was one."""
        if theirs.op == "get_attr":
            constant = self._constant(ours)
            if constant is None:
                raise _differs(theirs, ours)
            self.readers.setdefault(str(theirs.target), {})[reader] = constant
            return True
        weight = theirs.args[0] if target_name(theirs) == _EMBEDDING else None
        if is_parameter(weight) and (table := self._table(ours)) is not None:
            codes, constant = table
            self.readers.setdefault(str(weight.target), {})[theirs] = constant
            self.pending.append((argument(codes, 1), argument(theirs, 1), theirs))
            return True
        if (found := self._activation(ours, theirs)) is not None:
            value, activation = found
            known = self.rounded.setdefault((theirs, reader), activation)
            if not known.same_as(activation):
                raise _differs(theirs, ours)
            while clamp_bounds(theirs) is not None and target_name(value) != target_name(theirs):
                theirs = theirs.args[0]  # type: ignore[assignment]
            self.pending.append((value, theirs, reader))
            return True
        same = ours.op == theirs.op and ours.target == theirs.target
        if not same and _is_constant(theirs) and (constant := self._constant(ours)) is not None:
            self.folded.append((theirs, reader, constant))
            return True
        return False

    def _pair_calls(self, ours: Node, theirs: Node, reader: Node) -> None:
        if target_name(theirs) == _BATCH_NORM != target_name(ours):
            path = module_path(theirs)
            if [n for n in self.source.graph.nodes if path in _stack(n).values()] != [theirs]:
                raise _differs(theirs, ours)  # the module does more, or several times
            self.identities.add(path)
            self.pending.append((ours, theirs.args[0], reader))
            return
        if theirs.op != "call_function" or ours.op != theirs.op or ours.target != theirs.target:
            raise _differs(theirs, ours)
        schema = getattr(theirs.target, "_schema", None)
        count = len(schema.arguments) if schema is not None else max(len(ours.args), len(theirs.args))
        if target_name(theirs) == _EMBEDDING:
            count = 2  # the rest is for training
        for position in range(count):
            default = schema.arguments[position].default_value if schema is not None else None
            a, b = (argument(n, position) if schema is not None else n.args[position] for n in (ours, theirs))
            self.pending.append((default if a is None else a, default if b is None else b, theirs))

    def _constant(self, node: Node) -> Constant | None:
        if node.op == "get_attr":
            value = parameter(self.gm, node)
            return Constant((str(node.target),), value, value.dtype)
        if target_name(node) == _CAST and is_parameter(node.args[0]):
            inner = self._constant(node.args[0])
            return inner and replace(inner, dtype=value_of(self.gm, node).dtype)
        if target_name(node) != _DEQUANTIZE or not all(is_parameter(n) for n in node.args[:3]):
            return None
        return self._codes(*node.args)

    def _codes(self, *args: Any) -> Constant:
        defaults: tuple[Any, ...] = (None, 0, torch.float32)
        codes, scale, zero_point, fmt, axis, block, dtype = args + defaults[len(args) - 4 :]
        tensors = [parameter(self.gm, n) for n in (codes, scale, zero_point)]
        names = tuple(str(n.target) for n in (codes, scale, zero_point))
        return Constant(names, tensors[0], dtype, tensors[1], tensors[2], fmt, axis, block)

    def _table(self, node: Node) -> tuple[Node, Constant] | None:
        """Return the look-up of codes, and the table, behind rows that are dequantized after they were found."""
        codes: Any = node.args[0] if target_name(node) in (_DEQUANTIZE, _CAST) else None
        if codes is None or target_name(codes) != _EMBEDDING or not is_parameter(codes.args[0]):
            return None
        if target_name(node) == _CAST:
            table = self._constant(codes.args[0])
            assert table is not None
            return codes, replace(table, dtype=value_of(self.gm, node).dtype)
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
        return codes, self._codes(codes.args[0], *tables, arguments[3], axis, block, *arguments[6:])

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


def _is_constant(node: Node) -> bool:
    inputs = node.all_input_nodes
    return node.op == "call_function" and bool(inputs) and all(n.op == "get_attr" or _is_constant(n) for n in inputs)


def _differs(theirs: Node, ours: Any) -> QuarkError:
    if isinstance(ours, Node) and target_name(ours) == "aten.mul.Tensor" != target_name(theirs):
        return QuarkError(
            f"{describe(theirs)} is read through a multiplication that a pass inserted, which no module of the model "
            "performs; call the quantized model itself, or quantize without explicit=True"
        )
    what = target_name(ours) if isinstance(ours, Node) else repr(ours)
    return QuarkError(
        f"{describe(theirs)} became {what} in the quantized graph, which no module of the model computes; call the "
        "quantized model itself, or quantize without the pass that rewrites it"
    )


def module_path(node: Node) -> str:
    """Return the path of the innermost module whose forward made the node."""
    return next(reversed(_stack(node).values()), "")


def _stack(node: Node) -> dict[str, str]:
    """Return the calls of modules the node is part of, outermost first: a key for each call, and the path."""
    return {k: path for k, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if not k.startswith("_empty")}


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
    return replace(constant, tensor=constant.tensor.reshape(like.shape))


def _alias(aliases: list[str], reader: Node) -> str:
    """Return the name under which `reader` knows a tied parameter: that of a module it is part of."""
    for path in reversed(_stack(reader).values()):
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


def _place_inputs(walk: _Walk, found: Correspondence) -> None:
    """Find the modules whose own inputs are the rounded activations."""
    calls: dict[str, set[str]] = {}
    regions: dict[str, list[Node]] = {}
    for node in walk.source.graph.nodes:
        for key, path in _stack(node).items():
            calls.setdefault(path, set()).add(key)
            regions.setdefault(key, []).append(node)
    hooked: dict[str, set[str]] = {}
    for (value, reader), activation in walk.rounded.items():
        kept = activation.scale is not None or activation.cast is not None
        if kept and _commutes(reader, activation) and _all_round(reader, reader.users, activation, walk.rounded):
            continue  # moved, and rounded again to the same codes
        key, path = next(reversed(_stack(reader).items()), ("", ""))
        entry = value
        while key in _stack(entry) and _commutes(entry, activation) and len(entry.all_input_nodes) == 1:
            entry = entry.all_input_nodes[0]
        region = regions.get(key, [])
        entering = {n for node in region for n in node.all_input_nodes if key not in _stack(n) and _is_activation(n)}
        inside = [user for user in entry.users if key in _stack(user)]
        if entering != {entry} or not _all_round(entry, inside, activation, walk.rounded):
            raise _not_an_input(reader, path)
        hooked.setdefault(path, set()).add(key)
        if not found.inputs.setdefault(path, activation).same_as(activation):
            raise _not_an_input(reader, path)
    for _, reader in walk.rounded:
        path = module_path(reader)
        if hooked.get(path, calls.get(path)) != calls.get(path):
            raise _not_an_input(reader, path)


def _not_an_input(reader: Node, path: str) -> QuarkError:
    return QuarkError(
        f"{describe(reader)} reads a rounded activation that is not the only input of its module ({path or 'the model'}"
        "), or not in every call of it; call the quantized model itself, or keep that activation in float with "
        f"Override(pattern=..., input=None, output=None)"
    )


def _all_round(value: Node, users: Any, activation: Activation, rounded: Mapping[Any, Activation]) -> bool:
    """Tell whether all of `users` read `value` rounded like `activation`, perhaps after moving it."""
    return bool(users) and all(
        rounded[value, user].same_as(activation)
        if (value, user) in rounded
        else _commutes(user, activation) and _all_round(user, user.users, activation, rounded)
        for user in users
    )


def _is_activation(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op != "get_attr" and isinstance(value, Tensor) and value.is_floating_point()


def _commutes(node: Node, activation: Activation) -> bool:
    """Tell whether rounding before the node is rounding after it."""
    if target_name(node) not in MOVING:
        return False
    if activation.scale is not None or activation.cast is not None:
        return True
    shapes = [n.meta["val"].shape for n in (node, node.all_input_nodes[0]) if isinstance(n.meta.get("val"), Tensor)]
    same_rows = len(shapes) == 2 and bool(shapes[0][-1:]) and shapes[0][-1] == shapes[1][-1]
    whole = activation.axis is None or (activation.axis == -1 and same_rows)
    return target_name(node) in _RESHAPING and whole


_RESHAPING = ("aten.reshape.default", "aten.flatten.using_ints", "aten.unflatten.int", "aten.unsqueeze.default")
"""Data movement that keeps the order of values."""
