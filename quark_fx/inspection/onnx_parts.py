"""The operators with weights of any ONNX file, and the number formats of their operands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.runtime.session import code_type
from quark_fx.inspection.parts import NO_WEIGHT, Part
from quark_fx.numbers.formats import FORMATS
from quark_fx.targets.onnxruntime import MOVERS

_OPERANDS = {
    **dict.fromkeys(
        ("Conv", "FusedConv", "ConvTranspose", "ConvInteger", "MatMulInteger", "DynamicQuantizeMatMul"), (0, 1)
    ),
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm", "FusedGemm", "MatMulIntegerToFloat", "MatMulNBits"), (0, 1)),
    **dict.fromkeys(("LSTM", "GRU", "RNN", "QAttention", "DynamicQuantizeLSTM"), (0, 1)),
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), (0, 3)),
    **dict.fromkeys(("Gather", "GatherBlockQuantized"), (1, 0)),
}
"""Positions of the activation and of the weight among an operator's inputs."""

_PARAMETERS = {
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm"), (4, 5)),
    **dict.fromkeys(("DynamicQuantizeMatMul", "GatherBlockQuantized"), (2, 3)),
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (3,)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (2,)),
    "MatMulNBits": (2, 3, 4),
    "MatMulIntegerToFloat": (3, 5),
    "QAttention": (4, 7),
    "DynamicQuantizeLSTM": (2, 8, 9, 10, 11),
}
"""Positions of a weight's scales and zero points, and of a recurrent layer's second weight, among the inputs."""

_SCALE = {
    **dict.fromkeys(("QLinearConv", "QLinearMatMul", "QGemm", "QAttention"), 4),
    "DynamicQuantizeMatMul": 2,
    "MatMulIntegerToFloat": 3,
    "DynamicQuantizeLSTM": 8,
}
"""Position of the scale of a quantized weight among the inputs."""

_MEASURED = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
"""Operators that measure the range of an activation at run time."""

_SCALED_AFTER = frozenset({"MatMulInteger", "ConvInteger"})
"""Operators whose integer results later operators scale."""

_NAMES = {
    "float": "float32",
    "double": "float64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8e4m3fn": "fp8_e4m3",
    "float8e5m2": "fp8_e5m2",
}


def onnx_parts(path: Path) -> list[Part]:
    """Return the operators with weights, and the products of two activations, of an ONNX file.

    Raises:
        ExportError: If the file cannot be read as an ONNX file.
    """
    try:
        model = ir.load(path)
        return [part for node in model.graph.all_nodes() if (part := _part(node)) is not None]
    except Exception as error:  # errors of protobuf, and of reading a damaged graph
        raise ExportError(f"{path} cannot be read as an ONNX file: {error}") from error


def _part(node: ir.Node) -> Part | None:
    if node.op_type not in _OPERANDS:
        return None
    activation, weight = (node.inputs[i] if i < len(node.inputs) else None for i in _OPERANDS[node.op_type])
    selects, leaves = node.op_type.startswith("Gather"), _leaves(weight)
    if selects and (not leaves or _is_index(leaves[0])):
        return None  # it selects sizes or indices, not rows of a weight
    if not leaves:  # the weight may be the left factor
        leaves = _leaves(activation)
        activation, weight = (weight, activation) if leaves else (activation, weight)
    return Part(
        name=(leaves[0].name if leaves else node.name) or "",
        kind=node.op_type,
        weight=_format(node, weight, leaves) if leaves else NO_WEIGHT,
        activation="-" if selects else _activation(node, activation),
        bytes=_bytes(node, leaves),
        stored=(leaves[0].name if leaves else None) or "",
    )


def _bytes(node: ir.Node, leaves: tuple[ir.Value, ...]) -> int:
    """Return the total size in bytes of a weight, its scales and zero points, and the operator's second weight."""
    parameters = [_leaves(node.inputs[i]) for i in _PARAMETERS.get(node.op_type, ()) if i < len(node.inputs)]
    after = _scales_after(node) if node.op_type in _SCALED_AFTER else ()
    constants = {id(leaf): leaf for part in (leaves, *parameters, after) for leaf in part} if leaves else {}
    return sum(leaf.const_value.nbytes for leaf in constants.values() if leaf.const_value is not None)


def _is_index(leaf: ir.Value) -> bool:
    return leaf.dtype is None or (leaf.dtype.is_integer() and leaf.dtype.itemsize > 2)


def _leaves(value: ir.Value | None) -> tuple[ir.Value, ...]:
    """Return the constants from which a value is computed, the largest first; empty if it depends on model inputs."""
    if value is None:
        return ()
    constants, pending, visited = list[ir.Value](), [value], set[int]()
    while pending:
        current = pending.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if current.const_value is not None:
            constants.append(current)
            continue
        producer = current.producer()
        if producer is None or producer.op_type == "Shape":
            return ()
        constant = ir.convenience.get_const_tensor(current)
        if constant is not None:
            current.const_value = constant
            constants.append(current)
            continue
        pending += [source for source in producer.inputs if source is not None]
    return tuple(sorted(constants, key=_length, reverse=True))


def _length(leaf: ir.Value) -> int:
    return int(leaf.const_value.size) if leaf.const_value is not None else 0


def _format(node: ir.Node, weight: ir.Value | None, leaves: tuple[ir.Value, ...]) -> str:
    """Return the number format of a weight and the granularity of its scales, such as `"int8 channel"`."""
    codes, scales = leaves[0], leaves[1:]
    if bits := node.attributes.get_int("bits", 0):
        signed = len(node.inputs) < 4 or node.inputs[3] is None  # no zero points
        return f"{'' if signed else 'u'}int{bits} group {node.attributes.get_int('block_size', 128)}"
    name = next((fmt for p in _producers(weight) if (fmt := _block_format(p, "Values"))), _name(codes.dtype))
    if codes.dtype is None or (codes.dtype.is_floating_point() and codes.dtype.itemsize > 1):
        return name
    group = next((n for producer in _producers(weight) if (n := producer.attributes.get_int("block_size", 0))), 0)
    if group:
        return f"{name} group {group}"
    if node.op_type in _SCALED_AFTER:
        scales = _scales_after(node)
    elif (place := _SCALE.get(node.op_type)) is not None:
        scales = tuple(scale for scale in node.inputs[place : place + 1] if scale is not None)
    numbers = max(map(_length, scales), default=1)
    if numbers == 1:
        return name
    shape = codes.shape.numpy() if codes.shape is not None else ()
    return f"{name} channel" if numbers in shape else f"{name} group {_length(codes) // numbers}"


def _scales_after(node: ir.Node) -> tuple[ir.Value, ...]:
    """Return the constants that scale the result of an integer operator, directly or multiplied by another factor."""
    readers = [use.node for output in node.outputs for use in output.uses()]
    readers += [use.node for cast in readers if cast.op_type == "Cast" for use in cast.outputs[0].uses()]
    factors = [value for reader in readers if reader.op_type == "Mul" for value in reader.inputs]
    producers = [value.producer() for value in factors if value is not None]
    factors += [value for p in producers if p is not None and p.op_type == "Mul" for value in p.inputs]
    return tuple(leaf for factor in factors for leaf in _leaves(factor))


def _block_format(node: ir.Node, act: str) -> str:
    """Return the number format in the name of a `quark_fx` function on blocks; empty for any other operator.

    >>> _block_format(ir.node("Values_fp4_e2m1", [], domain="quark_fx"), "Values")
    'fp4_e2m1'
    >>> _block_format(ir.node("Round_int32_float32", [], domain="quark_fx"), "Round")  # not int3, which begins alike
    'int32'
    """
    kind, _, rest = node.op_type.partition("_")
    if node.domain != "quark_fx" or kind != act:
        return ""
    return next((name for name in sorted(FORMATS, key=len, reverse=True) if rest.startswith(name)), "")


def _producers(value: ir.Value | None) -> Iterator[ir.Node]:
    """Yield the producer of a value, then the producer of that node's first input, and so on."""
    while value is not None and (producer := value.producer()) is not None:
        yield producer
        value = producer.inputs[0] if producer.inputs else None


def _activation(node: ir.Node, value: ir.Value | None) -> str:
    if node.op_type in _MEASURED:
        return "uint8 dynamic"
    for producer in _producers(value):
        if name := _block_format(producer, "Round"):
            return f"{name} blocks dynamic"
        if producer.op_type == "Cast":
            to = ir.DataType(producer.attributes.get_int("to", 0))
            if to in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
                return _name(to)
            continue
        if producer.op_type == "DequantizeLinear":
            value = producer.inputs[0]
            continue
        if producer.op_type in _MEASURED:
            return "uint8 dynamic"
        if producer.op_type == "QuantizeLinear":
            fmt = _name(code_type(producer))
            return fmt if _leaves(producer.inputs[1]) else f"{fmt} dynamic"
        if producer.op_type not in MOVERS or _leaves(producer.inputs[0]):
            break  # the value is not a quantized activation, such as rows of a table
    if value is not None and value.dtype is not None and value.dtype.is_integer():
        return _name(value.dtype)
    if node.op_type.startswith("QLinear") or node.op_type in ("QGemm", "MatMulInteger", "ConvInteger"):
        zero = node.inputs[2] if len(node.inputs) > 2 else None
        return _name(zero.dtype) if zero is not None else "uint8"
    return "fp16" if value is not None and value.dtype == ir.DataType.FLOAT16 else "float"


def _name(dtype: ir.DataType | None) -> str:
    plain = str(dtype).lower().rpartition(".")[2] if dtype is not None else "float"
    return _NAMES.get(plain, plain)
