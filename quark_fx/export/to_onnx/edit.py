"""Small edits of an `onnx_ir` graph, and a record of each part that a rewrite leaves unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from quark_fx.errors import Declined, ExportError, QuarkError


@dataclass(frozen=True)
class Kept:
    """A part of the graph that a format left as `QuantizeLinear` / `DequantizeLinear` pairs, or that a rule declined.

    Attributes:
        name: Name of the weight or node.
        operator: ONNX operator of the node, or of the node that reads the weight.
        reason: Reason why the part is unchanged.
        rule: Name of the rule that declined; empty for a format.
    """

    name: str
    operator: str
    reason: str
    rule: str = ""


@contextmanager
def naming_failures(what: Callable[[], str], node: ir.Node) -> Iterator[None]:
    """Name the node in any error of a function of `what()`; a `QuarkError` and `Declined` pass unchanged.

    Raises:
        ExportError: If the function fails.
    """
    try:
        yield
    except (QuarkError, Declined):
        raise
    except Exception as error:  # functions from outside may raise any error
        raise ExportError(
            f"{what()} fails at {node.op_type} {node.name}: {type(error).__name__}: {error}; correct its functions"
        ) from error


def add_initializer(model: ir.Model, name: str, tensor: ir.Tensor) -> ir.Value:
    """Store `tensor` as the initializer `name`, replacing any initializer of that name."""
    value = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    model.graph.initializers[name] = value
    return value


def add_array(model: ir.Model, name: str, array: np.ndarray[Any, Any]) -> ir.Value:
    """Store an array as the initializer `name`, or as `name_1`, `name_2`, … if a different array has that name."""
    array = np.asarray(array, order="C")  # ascontiguousarray would turn a scalar into a vector
    for candidate in (name if not i else f"{name}_{i}" for i in range(1 << 20)):
        initializer = model.graph.initializers.get(candidate)
        if initializer is None:
            return add_initializer(model, candidate, ir.Tensor(array, name=candidate))
        stored = array_of(initializer)
        if stored is not None and stored.dtype == array.dtype and np.array_equal(stored, array):
            return initializer
    raise AssertionError("unreachable")


def replace_node(node: ir.Node, value: ir.Value) -> None:
    """Replace the only output of `node` with `value`, and remove the node."""
    output = node.outputs[0]
    if output.is_graph_output():
        value.name = output.name
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    remove_node(node)


def remove_node(node: ir.Node) -> None:
    """Remove a node without consumers from its graph."""
    assert node.graph is not None
    node.graph.remove(node, safe=True)


def put_node(old: ir.Node, new: ir.Node) -> None:
    """Replace the node `old` by `new`, whose output gets the name, shape, and type of the output of `old`."""
    output = new.outputs[0]
    output.name, output.shape, output.type = old.outputs[0].name, old.outputs[0].shape, old.outputs[0].type
    old.prepend(new)
    replace_node(old, output)


def put_same_behind(value: ir.Value) -> ir.Value:
    """Insert a `Max` with `value` as its only operand, which changes nothing, after its producer; return the result."""
    same = ir.node("Max", [value])
    same.outputs[0].shape, same.outputs[0].type = value.shape, value.type
    producer_of(value).append(same)
    return same.outputs[0]


def without_trailing_none(inputs: Sequence[ir.Value | None]) -> list[ir.Value | None]:
    """Return the inputs without the omitted optional inputs at the end."""
    result = list(inputs)
    while result and result[-1] is None:
        result.pop()
    return result


def erase_unread(model: ir.Model) -> None:
    """Remove nodes without consumers, then initializers without consumers."""
    for node in reversed(list(model.graph)):
        if not any(value.uses() or value.is_graph_output() for value in node.outputs):
            model.graph.remove(node, safe=True)
    drop_unused_initializers(model)


def stored_bytes(model: ir.Model) -> int:
    """Return the total size of a model's initializers, in bytes."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def drop_unused_initializers(model: ir.Model) -> None:
    """Remove initializers without consumers."""
    for name, value in list(model.graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del model.graph.initializers[name]


def keep_names_apart(model: ir.Model) -> None:
    """Rename inner values that have the name of an input or output, because the user may have chosen the latter."""
    graph = model.graph
    outside = {*graph.inputs, *graph.outputs}
    inside = [*graph.initializers.values(), *(value for node in graph for value in node.outputs)]
    taken = {value.name for value in outside}
    names = taken | {value.name for value in inside}
    for value in inside:
        if value not in outside and value.name in taken:
            candidates = (f"{value.name}_{i}" for i in range(1, 1 << 20))
            value.name = next(name for name in candidates if name not in names)
            names.add(value.name)


def producer_of(value: ir.Value) -> ir.Node:
    """Return the node that computes a value inside the graph."""
    producer = value.producer()
    assert producer is not None
    return producer


def operand(node: ir.Node, index: int = 0) -> ir.Value:
    """Return input number `index` of a node, which its operator requires."""
    value = node.inputs[index]
    assert value is not None
    return value


def shape_of(value: ir.Value) -> ir.Shape:
    """Return the shape of a value; the exporter sets the shape of every value."""
    assert value.shape is not None
    return value.shape


def dtype_of(value: ir.Value) -> ir.DataType:
    """Return the element type of a value; the exporter sets the type of every value."""
    assert value.dtype is not None
    return value.dtype


def made_by(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """Return the node that computes `value` if its operator is one of `operators`, or else `None`."""
    producer = value.producer() if value is not None else None
    return producer if producer is not None and producer.op_type in operators else None


def permutation(transpose: ir.Node, rank: int) -> tuple[int, ...]:
    """Return the input axis of each output axis of a `Transpose`, which reverses the axes by default."""
    return tuple(transpose.attributes.get_ints("perm", ())) or tuple(reversed(range(rank)))


def narrowed(value: ir.Value | None) -> str | None:
    """Return the reason to decline an activation that is dequantized and cast to 16-bit floats; `None` for others."""
    cast = made_by(value, "Cast")
    if cast is None or made_by(cast.inputs[0], "DequantizeLinear") is None:
        return None
    dtype = ir.DataType(cast.attributes["to"].as_int())
    if not dtype.is_floating_point() or dtype == ir.DataType.FLOAT:
        return None
    return f"the model computes in {dtype.name.lower()}; quantize model.float()"


def array_of(value: ir.Value | None) -> np.ndarray[Any, Any] | None:
    """Return the array of an initializer or of the output of a `Constant`; `None` for other values."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return tensor.numpy() if tensor is not None else None


def stored_array(value: ir.Value | None) -> np.ndarray[Any, Any]:
    """Return the array of a value that must be constant."""
    array = array_of(value)
    assert array is not None
    return array


def only_reader(value: ir.Value) -> ir.Node | None:
    """Return the only consumer of `value`; `None` if it has several uses, or none, or is an output of the graph."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def added_vector(model: ir.Model, node: ir.Node, channels: int | None) -> tuple[ir.Value | None, ir.Node]:
    """Return the constant vector that an `Add`, as the only reader of the output of `node`, adds to it.

    Args:
        model: Model, in which a quantized vector is stored again in float.
        node: Node that computes the product.
        channels: Length of the vector.

    Returns:
        Vector and `Add` node; `None` and `node` itself if no such vector is added.
    """
    reader = only_reader(node.outputs[0])
    if reader is None or reader.op_type != "Add":
        return None, node
    for value in reader.inputs:
        array = array_of(value)
        if value is not None and array is not None and array.shape == (channels,):
            return value, reader
        dequantize = made_by(value, "DequantizeLinear")
        real = _dequantized(dequantize) if dequantize is not None else None
        if real is not None and real.shape == (channels,):
            return add_array(model, f"{node.name}_bias", real), reader
    return None, node


def _dequantized(node: ir.Node) -> np.ndarray[Any, Any] | None:
    """Return the values of a constant vector of codes, computed like `DequantizeLinear`; `None` for other inputs."""
    codes, scale, zero_point = (array_of(value) for value in (*node.inputs, None)[:3])
    if codes is None or scale is None or codes.ndim != 1:
        return None
    whole = codes.astype(np.int64) - (0 if zero_point is None else zero_point.astype(np.int64))
    return np.asarray(whole.astype(np.float32) * scale)
