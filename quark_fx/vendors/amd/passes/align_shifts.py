"""Adjust calibrated power-of-two scales to the shifts that a DPU supports, before weights are rounded with them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.context import Calibrated, Context
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, parameter, target_name
from quark_fx.graph.operators import PADS, is_average, moves
from quark_fx.graph.pass_manager import Change, Stage, graph_pass
from quark_fx.numbers.qparams import QParams
from quark_fx.plan.placement import Coded, Point, module_name
from quark_fx.system.names import unknown
from quark_fx.vendors.amd.passes import shifts
from quark_fx.vendors.amd.passes.shifts import System

RULES = ("concat", "pool", "pad", "read", "write", "hard_sigmoid", "swish", "cut", "bias")
"""Names of all rules, which `docs/dpu.md` describes."""

Value = tuple[Node, TensorSpec]
Constant = tuple[Node, Node]
"""Pair of an operator and its weight or bias."""


@graph_pass(exact=False, stage=Stage.CALIBRATED, targets=("dpu",), distributed=True)
@dataclass(frozen=True)
class AlignShifts:
    """Change the positions of tensors (a scale is `2**-position`) so that a DPU supports the shifts between them.

    Weights and biases are rounded afterwards, with the resulting scales. `docs/dpu.md` lists the rules and the changes
    that satisfy them. Positions are lowered, which costs bits, rather than raised, which saturates values.

    Args:
        rules: Names of the rules to satisfy; default: all rules.

    Raises:
        ConfigError: If a rule is unknown.

    Source:
        AMD Quark for ONNX, `quark.onnx.refine`.
    """

    rules: tuple[str, ...] = RULES

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise unknown("rule", rule, RULES)

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Change the calibrated scales in `context`, report each change, and return the number of changes."""
        if context is None or context.calibrated is None:
            raise ConfigError("AlignShifts changes scales that calibration found; run it through `quantize`")
        calibration = context.calibrated
        builder = _Builder(gm, calibration, context.config.bias, frozenset(self.rules))
        settled = shifts.settle(builder.build())
        for variable, rules in settled.reasons.items():
            before, after = builder.system.positions[variable], settled.positions[variable]
            context.note(Change(builder.names[variable], f"2**{-before} → 2**{-after}: {', '.join(rules)}"))
        for variable, position in settled.positions.items():
            builder.store(variable, position)
        return len(settled.reasons)


class _Builder:
    """Builder of the `System` for a plan: the positions of its tensors and the constraints of its operators."""

    def __init__(
        self, gm: GraphModule, calibration: Calibrated, bias: TensorSpec | None, rules: frozenset[str]
    ) -> None:
        self.gm, self.calibration, self.bias, self.rules = gm, calibration, bias, rules
        self.names: dict[shifts.Name, str] = {}
        self.constants: dict[Constant, QParams] = {}
        self.points: dict[Node, list[Point]] = {}
        for point in calibration.plan.points.values():
            self.points.setdefault(point.value, []).append(point)
        self.system = System({}, rules=rules & {"cut", "bias"})

    def build(self) -> System:
        for (source, spec), qparams in self.calibration.values.items():
            self.system.positions[source, spec] = _position(qparams.scale)
            self.names[source, spec] = module_name(source) + (" input" if source.op == "placeholder" else " output")
        for points in self.points.values():
            for point in points:
                self._tie_concatenation(point)
        for node in self.gm.graph.nodes:
            self._add_arithmetic(node)
        for op in self.calibration.plan.operators:
            if isinstance(op, Coded) and op.linear is not None:
                self._add_product(op, op.linear)
        return self.system

    def store(self, variable: shifts.Name, position: int) -> None:
        """Set the scale of a tensor to `2**-position`."""
        if abs(position) > 126:
            raise CalibrationError(f"{self.names[variable]} needs the scale 2**{-position}, which is not a float32")
        values = self.calibration.values
        if variable in values:
            values[variable] = _moved(values[variable], position)
        else:
            self.calibration.constants[variable] = _moved(self.constants[variable], position)

    def _read(self, node: Node, value: object) -> Value | None:
        """Return the source and spec of the rounded value that an operator reads for `value`; `None` if not rounded."""
        points = self.points.get(value, []) if isinstance(value, Node) else []
        own_points = [p for p in points if p.readers is not None and node in p.readers]
        return next(
            ((p.source, p.spec) for p in (*own_points, *points) if p.readers is None or node in p.readers), None
        )

    def _made(self, node: Node) -> Value | None:
        """Return the source and spec with which an operator's output is rounded; `None` if it is not rounded."""
        value = self.calibration.plan.outputs.get(node)
        points = self.points.get(value, []) if value is not None else []
        return next(((p.source, p.spec) for p in points if p.readers is None), None)

    def _tie_concatenation(self, point: Point) -> None:
        """Tie the result of a data movement to all its inputs; with a single input, the two share a scale anyway."""
        if "concat" in self.rules and moves(point.value) and point.source is point.value:
            self._tie("concat", (point.source, point.spec), *self._parts(point.value))

    def _parts(self, value: Node) -> Iterator[Value]:
        for part in value.all_input_nodes:
            points = [p for p in self.points.get(part, []) if p.readers is None]
            yield from ((p.source, p.spec) for p in points)
            if not points and moves(part):
                yield from self._parts(part)

    def _tie(self, rule: str, *values: Value | None) -> None:
        members = [value for value in values if value is not None]
        if rule in self.rules and len(members) > 1:
            self.system.ties.append((rule, tuple(members)))

    def _add_arithmetic(self, node: Node) -> None:
        name = target_name(node)
        if is_average(node):
            self._tie("pool", self._read(node, node.args[0]), self._made(node))
        elif name in PADS:
            self._tie("pad", self._read(node, node.args[0]), self._made(node))
        elif name in ("aten.add.Tensor", "aten.sub.Tensor", "aten.mul.Tensor"):
            inputs = [self._read(node, value) for value in node.args[:2]]
            if inputs[0] is not None and inputs[1] is not None:
                self._add_pair(node, inputs[0], inputs[1])
        elif name == "aten.hardsigmoid.default" and "hard_sigmoid" in self.rules:
            read = self._read(node, node.args[0])
            limits, floors = shifts.sigmoid_limits(read, self._made(node)) if read is not None else ([], [])
            self.system.limits += limits
            self.system.floors += floors

    def _add_pair(self, node: Node, a: Value, b: Value) -> None:
        output = self._made(node)
        if target_name(node) != "aten.mul.Tensor":
            # The compiler restricts the shift to the output ("write") only for additions.
            rules = self.rules - ({"write"} if target_name(node) == "aten.sub.Tensor" else set())
            self.system.limits += shifts.sum_limits((a, b), output, rules)
            return
        rule, most = ("swish", shifts.SWISH) if self._is_swish(node) else ("write", shifts.WRITE_PRODUCT)
        if output is not None and rule in self.rules:
            self.system.limits += shifts.product_limits((a, b), output, rule, most)

    def _is_swish(self, node: Node) -> bool:
        """Tell whether one factor of a product is the hard sigmoid of the other factor."""
        for gate, value in (node.args[:2], node.args[1::-1]):
            while isinstance(gate, Node) and target_name(gate) == "aten.mul.Scalar":
                gate = gate.args[0]
            if isinstance(gate, Node) and target_name(gate) == "aten.hardsigmoid.default" and gate.args[0] is value:
                return True
        return False

    def _add_product(self, op: Coded, linear: Linear) -> None:
        node = op.node
        read, output, weight = self._read(node, linear.activation), self._made(node), (node, op.weight_node)
        if read is None or output is None or not self._add_constant(weight, op.weight):
            return
        self.names[weight] = f"{op.name} weight"
        bias_node, bias = linear.bias, None
        if is_parameter(bias_node) and self.bias is not None:
            bias = (node, bias_node) if self._add_constant((node, bias_node), self.bias) else None
        if bias is not None:
            self.names[bias] = f"{op.name} bias"
        leaky = any(target_name(user) == "aten.leaky_relu.default" for user in node.users)
        self.system.products.append(shifts.Product(read, weight, bias, output, leaky))

    def _add_constant(self, key: Constant, spec: TensorSpec) -> bool:
        """Observe a weight or bias; return `False` if it is not finite, which conversion reports later."""
        value = parameter(self.gm, key[1]).detach()
        if not bool(torch.isfinite(value).all()):
            return False
        qparams = spec.new_observer.of_constant(value.reshape(1, -1), spec.scheme)
        self.constants[key] = QParams(qparams.scale.reshape(()), qparams.zero_point.reshape(()))
        self.system.positions[key] = _position(qparams.scale)
        return True


def _position(scale: Tensor) -> int:
    mantissa, exponent = math.frexp(float(scale))
    assert mantissa == 0.5, "the configuration allows powers of two only"
    return 1 - exponent


def _moved(qparams: QParams, position: int) -> QParams:
    return QParams(torch.full_like(qparams.scale, 2.0**-position), qparams.zero_point)


__all__ = ["RULES", "AlignShifts"]
