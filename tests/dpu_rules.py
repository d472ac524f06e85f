"""The rules of a DPU, read off an ONNX file alone: what its compiler would see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import numpy_helper

Violation = tuple[str, str, int]
"""Rule, node, and the shift that is not allowed."""

_FUSED = ("Relu", "LeakyRelu", "Clip", "Mul")
_MOVES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "MaxPool", "Concat", "Resize")


@dataclass
class File:
    """Nodes by what they make and by what they read, and the constants."""

    model: onnx.ModelProto

    def __post_init__(self) -> None:
        self.made = {o: n for n in self.model.graph.node for o in n.output}
        self.constants = {t.name: numpy_helper.to_array(t) for t in self.model.graph.initializer}
        for node in self.model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)

    def users(self, value: str) -> list[onnx.NodeProto]:
        return [n for n in self.model.graph.node if value in n.input]

    def scale(self, node: onnx.NodeProto) -> int:
        scale = float(self.constants[node.input[1]])
        position = -math.log2(scale)
        assert position == int(position), f"{node.name}: {scale} is no power of two"
        return int(position)

    def read(self, value: str) -> int | None:
        """Return the position a value is read with."""
        node = self.made.get(value)
        if node is not None and node.op_type == "DequantizeLinear":
            return self.scale(node)
        if node is not None and node.op_type in _MOVES and node.op_type != "Concat":
            return self.read(node.input[0])
        return None

    def written(self, node: onnx.NodeProto) -> int | None:
        """Return the position the output of a node is rounded to, after what is fused with it."""
        value = node.output[0]
        while True:
            users = self.users(value)
            quantizers = [u for u in users if u.op_type == "QuantizeLinear"]
            if quantizers:
                return self.scale(quantizers[0])
            if len(users) != 1 or users[0].op_type not in (*_FUSED, *_MOVES):
                return None
            if users[0].op_type == "Mul" and not any(i in self.constants for i in users[0].input):
                return None
            value = users[0].output[0]


def violations(path: Path) -> tuple[list[Violation], dict[str, int]]:
    """Return what breaks a rule, and how often each rule was looked at."""
    file = File(onnx.load(path))
    broken, looked = [], dict[str, int]()
    for rule, name, shift, low, high in _shifts(file):
        looked[rule] = looked.get(rule, 0) + 1
        if not low <= shift <= high:
            broken.append((rule, name, shift))
    return broken, looked


def _shifts(file: File) -> Iterator[tuple[str, str, int, int, int]]:
    for node in file.model.graph.node:
        inputs = [file.read(i) for i in node.input]
        known = [i for i in inputs if i is not None]
        out = file.written(node) if node.output else None
        name, kind = node.name, node.op_type
        if kind in ("Conv", "ConvTranspose", "Gemm") and out is not None and len(known) == len(inputs):
            cut = known[0] + known[1] - out
            yield "cut", name, cut, 0, 16
            if len(known) > 2:
                leaky = any(u.op_type == "LeakyRelu" for u in file.users(node.output[0]))
                yield "bias", name, known[0] + known[1] - known[2], 0 if leaky else min(0, cut - 16), 15
        elif kind in ("Add", "Sub") and len(known) == 2:
            yield "read", name, max(known) - min(known), 0, 7
            if kind == "Add" and out is not None:
                yield "write", name, min(known) - out, -7, 25
        elif kind == "Mul" and len(known) == 2 and out is not None:
            swish = any(_gate(file, i) for i in node.input)
            yield ("swish" if swish else "write"), name, sum(known) - out, 0, 15 if swish else 32
        elif kind == "HardSigmoid" and known and out is not None:
            yield "hard_sigmoid", name, known[0], 0, 15
            yield "hard_sigmoid", name, out, 7, 14 + known[0]
        elif kind == "Concat" and out is not None and len(known) == len(inputs):
            yield "concat", name, max(known) - min(known), 0, 0
            yield "concat", name, min(known) - out, 0, 0
        elif kind in ("AveragePool", "GlobalAveragePool", "MaxPool", "Pad") and known and out is not None:
            yield ("pad" if kind == "Pad" else "pool"), name, known[0] - out, 0, 0


def _gate(file: File, value: str) -> bool:
    """Tell whether a value is a hard sigmoid, rounded."""
    node = file.made.get(value)
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear", "Mul"):
        node = file.made.get(node.input[0])
    return node is not None and node.op_type == "HardSigmoid"
