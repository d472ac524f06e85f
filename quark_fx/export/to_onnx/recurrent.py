"""Recurrent layers in the layout of ONNX: one node per layer, ONNX's gate order, and both directions in one tensor.

torch's exporter writes nodes that split the weights into gates and join them again; for quantized weights, a runtime
repeats that in every run. Here, the codes are rearranged before export, so that the file has them in ONNX's layout.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.quantized_weights import stored_tensor
from quark_fx.graph.nodes import (
    CAST,
    DEQUANTIZE,
    call,
    fresh_name,
    get_attr,
    is_getitem,
    is_parameter,
    parameter,
    set_parameter,
    target_name,
    tensor_names,
    value_of,
)
from quark_fx.graph.operators import measured_share, named_argument
from quark_fx.graph.straight_through import quantize_of
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor

aten, ops = torch.ops.aten, torch.ops.quark_fx

_LIBRARY = torch.library.Library("quark_fx", "FRAGMENT")
_ARGUMENTS = "Tensor x, Tensor w, Tensor r, Tensor? b, Tensor? h, {}int directions"
_LIBRARY.define(f"onnx_lstm({_ARGUMENTS.format('Tensor? c, ')}, bool measured) -> (Tensor, Tensor, Tensor)")
_LIBRARY.define(f"onnx_gru({_ARGUMENTS.format('')}) -> (Tensor, Tensor)")
_LIBRARY.define(f"onnx_rnn({_ARGUMENTS.format('')}, str activation) -> (Tensor, Tensor)")

MEASURED = "measured"
"""Metadata key of an `LSTM` node: whether its inputs are all quantized at run time."""


def _state(x: Tensor, w: Tensor, r: Tensor, b: Any, h: Any, directions: int, *_: Any) -> tuple[Tensor, Tensor]:
    steps, batch, hidden = x.shape[0], x.shape[1], r.shape[1]
    return x.new_empty(steps, directions, batch, hidden), x.new_empty(directions, batch, hidden)


def _states(
    x: Tensor, w: Tensor, r: Tensor, b: Any, h: Any, c: Any, directions: int, measured: bool
) -> tuple[Tensor, Tensor, Tensor]:
    output, state = _state(x, w, r, b, h, directions)
    return output, state, torch.empty_like(state)


torch.library.register_fake("quark_fx::onnx_lstm", _states, lib=_LIBRARY)
torch.library.register_fake("quark_fx::onnx_gru", _state, lib=_LIBRARY)
torch.library.register_fake("quark_fx::onnx_rnn", _state, lib=_LIBRARY)


@dataclass(frozen=True)
class _Kind:
    """The replacement of a recurrent operator of ATen.

    Attributes:
        target: Operator of one layer that replaces it.
        gates: Position in ATen of each gate, in the order of ONNX.
        options: Further arguments of `target`.
    """

    target: Any
    gates: tuple[int, ...]
    options: tuple[Any, ...] = ()


KINDS = {
    "aten.lstm.input": _Kind(ops.onnx_lstm.default, (0, 3, 1, 2)),
    "aten.gru.input": _Kind(ops.onnx_gru.default, (1, 0, 2)),
    "aten.rnn_tanh.input": _Kind(ops.onnx_rnn.default, (0,), ("Tanh",)),
    "aten.rnn_relu.input": _Kind(ops.onnx_rnn.default, (0,), ("Relu",)),
}
"""Replacements of all recurrent operators, by target."""


class _Direction(NamedTuple):
    """The weights and biases of a layer in one direction, for its input (`w`) and its state (`r`)."""

    w: Node
    r: Node
    w_bias: Node | None = None
    r_bias: Node | None = None


def spell_out_layers(gm: GraphModule, node: Node) -> tuple[Node, ...]:
    """Insert one operator per layer of a recurrent operator; return the output and the final states of all layers."""
    kind = KINDS[target_name(node)]
    x, states, params, biased, layers, two, first = (
        named_argument(node, name)
        for name in ("input", "hx", "params", "has_biases", "num_layers", "bidirectional", "batch_first")
    )
    directions, width = 2 if two else 1, 4 if biased else 2
    states = states if isinstance(states, list | tuple) else [states]
    options = (*kind.options, *([_is_measured(x)] if len(states) == 2 else []))
    ends: list[list[Node]] = [[] for _ in states]
    x = call(gm, aten.transpose.int, x, 0, 1, like=node) if first else x
    for layer in range(layers):
        start = layer * directions * width
        parts = [_Direction(*params[i : i + width]) for i in range(start, start + directions * width, width)]
        begin = [_of_layer(gm, state, layer, layers, directions, node) for state in states]
        outputs = call(gm, kind.target, x, *_weights(gm, parts, kind, node), *begin, directions, *options, like=node)
        results = [_result(gm, outputs, i) for i in range(1 + len(states))]
        for end, state in zip(ends, results[1:], strict=True):
            end.append(state)
        if two:
            x = call(gm, aten.permute.default, results[0], [0, 2, 1, 3], like=node)
            x = call(gm, aten.flatten.using_ints, x, 2, 3, like=node)
        else:
            x = call(gm, aten.squeeze.dim, results[0], 1, like=node)
    x = call(gm, aten.transpose.int, x, 0, 1, like=node) if first else x
    return (x, *(call(gm, aten.cat.default, end, 0, like=node) if layers > 1 else end[0] for end in ends))


def _is_measured(x: Node) -> bool:
    """Tell whether a value is quantized at run time in the same way as the input of `DynamicQuantizeLSTM`."""
    pair = quantize_of(x)
    scale: Any = None if pair is None else pair.args[1]
    measure = scale.args[0] if scale is not None and is_getitem(scale) else None
    if measure is None or measured_share(measure) != 1:
        return False
    return measure.args[1:5] == ("uint8", str(Symmetry.ASYMMETRIC), None, 0)  # type: ignore[no-any-return]


def _result(gm: GraphModule, outputs: Node, index: int) -> Node:
    node = gm.graph.call_function(operator.getitem, (outputs, index))
    node.meta |= {key: outputs.meta[key] for key in ("nn_module_stack", "stack_trace") if key in outputs.meta}
    node.meta["val"] = outputs.meta["val"][index]
    return node


def _of_layer(gm: GraphModule, state: Node, layer: int, layers: int, directions: int, like: Node) -> Node | None:
    """Return the initial state of a layer; `None` for zeros."""
    if target_name(state) == "aten.zeros.default":
        return None
    start = layer * directions
    return state if layers == 1 else call(gm, aten.slice.Tensor, state, 0, start, start + directions, like=like)


def _weights(gm: GraphModule, parts: list[_Direction], kind: _Kind, like: Node) -> tuple[Node, Node, Node | None]:
    """Return the parameters of a layer in ONNX's gate order.

    Returns:
        Weight of the input and weight of the state, each with the rows of all directions, and biases, one row per
        direction (`None` for a layer without biases).
    """
    hidden = value_of(gm, parts[0].w).shape[0] // len(kind.gates)
    rows = torch.cat([torch.arange(gate * hidden, (gate + 1) * hidden) for gate in kind.gates])
    w, r = ([getattr(part, name) for part in parts] for name in ("w", "r"))
    biases = [bias for part in parts for bias in (part.w_bias, part.r_bias) if bias is not None]
    both = _joined(gm, biases, rows, like) if biases else None
    if is_parameter(both):
        both = _kept(gm, biases[0], parameter(gm, both).reshape(len(parts), -1))
    elif both is not None:
        both = call(gm, aten.reshape.default, both, [len(parts), -1], like=like)
    return _joined(gm, w, rows, like), _joined(gm, r, rows, like), both


def _joined(gm: GraphModule, values: list[Node], rows: Tensor, like: Node) -> Node:
    """Select `rows` of each value and concatenate them; for quantized values, select and concatenate codes."""
    first, kinds = values[0], {(target_name(value), value.args[3:], *value.kwargs.items()) for value in values}
    alike = len(kinds) == 1
    if alike and is_parameter(first):
        return _kept(gm, first, torch.cat([parameter(gm, value)[rows] for value in values]))
    if alike and target_name(first) == CAST and all(is_parameter(value.args[0]) for value in values):
        codes = _joined(gm, [value.args[0] for value in values], rows, like)  # type: ignore[misc]
        return call(gm, first.target, codes, like=like, **first.kwargs)
    if alike and target_name(first) == DEQUANTIZE and all(all(map(is_parameter, v.args[:3])) for v in values):
        joined = _joined_codes([stored_tensor(gm, value.args) for value in values], rows)
        parts = (joined.codes, joined.scale, joined.zero_point)
        stored = [_kept(gm, node, part) for node, part in zip(first.args[:3], parts, strict=True)]  # type: ignore[arg-type]
        layout = (joined.axis, joined.block_size)
        return call(gm, first.target, *stored, first.args[3], *layout, *first.args[6:], like=like, **first.kwargs)
    index = get_attr(gm, "gates", rows)
    parts_of = [call(gm, aten.index_select.default, value, 0, index, like=like) for value in values]
    return call(gm, aten.cat.default, parts_of, 0, like=like)


def _joined_codes(stored: list[QuantizedTensor], rows: Tensor) -> QuantizedTensor:
    first, each = stored[0], len(rows)

    def of_rows(parameters: list[Tensor]) -> Tensor:
        if not any(p.dim() for p in parameters) and all(torch.equal(p, parameters[0]) for p in parameters):
            return parameters[0]
        return torch.cat([p[rows] if p.dim() else p.expand(each) for p in parameters])

    scale, zero_point = of_rows([s.scale for s in stored]), of_rows([s.zero_point for s in stored])
    axis = 0 if first.axis is None and scale.dim() else first.axis
    codes = torch.cat([s.codes[rows] for s in stored])
    return QuantizedTensor.of(codes, scale, zero_point, first.format, axis, first.block_size)


def _kept(gm: GraphModule, like: Node, value: Tensor) -> Node:
    """Return a node that reads `value`, named after `like`; layers with equal values share one parameter."""
    tensors = gm.meta.setdefault("rearranged", {})
    name = str(like.target)
    name = f"{tensor_names(gm).get(name) or name}_onnx"
    same = (n for n, tensor in tensors.items() if n.startswith(name) and _equal(tensor, value))
    stored = next(same, None)
    if stored is None:
        tensors[stored := fresh_name(gm, name)] = value
        set_parameter(gm, stored, value)
    node = gm.graph.get_attr(stored)
    value_of(gm, node)
    return node


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (a, b)))  # torch does not compare 8-bit floats
