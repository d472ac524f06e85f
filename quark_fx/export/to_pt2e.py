"""Export of a quantized graph to PT2E's operators, `quantized_decomposed`, which back ends of PyTorch read.

Source:
    `torch/ao/quantization/fx/_decomposed.py` of PyTorch; https://docs.pytorch.org/ao, "PyTorch 2 Export Quantization".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from quark_fx.errors import Declined, ExportError
from quark_fx.export.program import to_exported_program
from quark_fx.graph.nodes import (
    DEQUANTIZE,
    QUANTIZE,
    call,
    describe,
    erase_dead,
    get_attr,
    own_tensors,
    parameter,
    target_name,
)
from quark_fx.graph.operators import argument, measured_share
from quark_fx.graph.pass_manager import copy_graph
from quark_fx.model.constants import Constant, constant_of, table_of
from quark_fx.model.kernels.product import Activation, Rounded
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.numbers.formats import INT8, INT32, UINT8, Format, parse_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT32
from quark_fx.system.isolation import isolated


@isolated
def pt2e(qmodel: QuantizedModel) -> ExportedProgram:
    """Return `qmodel` as a program in PT2E's operators, for ExecuTorch, torchao, Inductor, and other back ends.

    Weights are stored as codes. 8-bit activations have signed codes, which back ends expect: unsigned codes and their
    zero points are shifted by 128, so the values are the same. int32 biases are stored as floats, which back ends round
    to the same codes. The program reads the model's inputs by position if they are the first parameters of `forward`,
    and by keyword otherwise. It supports the same sizes as the model.

    A value halfway between two codes may be rounded to the other code than in `qmodel`, because PT2E multiplies by the
    reciprocal of a scale. Ranges at run time are measured by PT2E's rule, whose zero points may differ by one.

    Args:
        qmodel: Result of `quantize`.

    Raises:
        ExportError: If PT2E lacks an operator for a quantization of the model; the message lists the nodes.
    """
    if not isinstance(qmodel, QuantizedModel):
        raise ExportError(f"expected the result of quantize(), not {type(qmodel).__name__}")
    importlib.import_module("torch.ao.quantization.fx._decomposed")  # registers PT2E's operators
    gm = own_tensors(copy_graph(qmodel.graph_module))
    erase_dead(gm)
    rules, bad = _Lowering(gm).rules, []
    for node in list(gm.graph.nodes):
        if not node.users or (rule := rules.get(target_name(node))) is None:
            continue
        with gm.graph.inserting_before(node):
            try:
                node.replace_all_uses_with(rule(node))
            except Declined as declined:
                bad.append(f"  {declined.reason}: {describe(node)}")
    if bad:
        raise ExportError(
            "PT2E has no operators for these roundings:\n"
            + "\n".join(bad)
            + "\nUse integers of up to 16 bits with one "
            "scale per tensor, channel, group of a matrix or (asymmetric int8) token."
        )
    erase_dead(gm)
    _one_reader_each(gm)
    gm.graph.lint()
    return to_exported_program(gm, signature=qmodel.signature)


@dataclass
class _Lowering:
    """The replacements for the nodes of a graph, which are inserted at the graph's insertion point.

    Attributes:
        gm: Graph that is rewritten.
        stored: First node that reads a stored constant, by the constant's name.
    """

    gm: GraphModule
    stored: dict[str, Node] = field(default_factory=dict)

    @property
    def rules(self) -> dict[str, Callable[[Node], Node]]:
        """Functions that return the replacement of a node, by its target; they raise `Declined` if PT2E has none."""
        return {
            QUANTIZE: self._quantize,
            DEQUANTIZE: self._dequantize,
            "quark_fx.dynamic_qparams.default": self._measure,
        }

    def _quantize(self, node: Node) -> Node:
        x, rounded = node.all_input_nodes[0], _rounded(node)
        _require_float32_or_less(x)
        if rounded.kind is Activation.STATIC:
            return call(self.gm, _OPS.quantize_per_tensor.default, x, *self._known(rounded), like=node)
        token = rounded.kind is Activation.TOKEN
        op = _OPS.quantize_per_token.default if token else _OPS.quantize_per_tensor.tensor
        return call(self.gm, op, x, rounded.scale, rounded.zero_point, *_limits(rounded.format), like=node)

    def _dequantize(self, node: Node) -> Node:
        if (constant := constant_of(self.gm, node)) is not None:
            return self._weight(node, constant)
        if (table := table_of(self.gm, node)) is not None:
            lookup, constant = table
            return call(self.gm, lookup.target, self._weight(node, constant), *lookup.args[1:], like=node)
        rounded, dtype = _rounded(node), node.meta["val"].dtype
        codes, out = rounded.codes, _out_dtype(dtype)
        if rounded.kind is Activation.STATIC:
            return call(self.gm, _OPS.dequantize_per_tensor.default, codes, *self._known(rounded), like=node, **out)
        given = codes, rounded.scale, rounded.zero_point, *_limits(rounded.format)
        if rounded.kind is Activation.TOKEN:
            return call(self.gm, _OPS.dequantize_per_token.default, *given, dtype, like=node)
        return call(self.gm, _OPS.dequantize_per_tensor.tensor, *given, like=node, **out)

    def _measure(self, node: Node) -> Node:
        x, name, symmetry, axis, block, scale_type = (argument(node, position) for position in range(6))
        whole = axis is None or (axis % x.meta["val"].dim() == x.meta["val"].dim() - 1 and block == -1)
        known = parse_format(name) in (INT8, UINT8) and symmetry == Symmetry.ASYMMETRIC
        share = measured_share(node) != 1
        if not (whole and known and scale_type in (None, str(FLOAT32))) or share:
            how = " in groups" * (not whole) + " in part of the range (drop the observer)" * share
            raise Declined(f"{symmetry} {name} measured at run time{how}")
        _require_float32_or_less(x)
        if axis is not None:
            return call(self.gm, _OPS.choose_qparams_per_token_asymmetric.default, x, torch.int8, like=node)
        smallest = torch.finfo(torch.float32).tiny
        return call(self.gm, _OPS.choose_qparams.tensor, x, INT8.qmin, INT8.qmax, smallest, torch.int8, like=node)

    def _weight(self, node: Node, constant: Constant) -> Node:
        """Return a node that computes the values of a quantized constant from its codes."""
        weight, name = constant.quantized, constant.names[0]
        if weight is None or weight.format == INT32:
            return self._constant(f"{name}_values", constant.value())
        if weight.has_offsets:
            raise Declined("offsets (symmetry='offset')")
        fmt, axis = _integers(weight.format), weight.axis
        if axis is not None and weight.block_size and weight.codes.shape[axis] % weight.block_size:
            raise Declined(f"groups of {weight.block_size} that do not divide {weight.codes.shape[axis]} values")
        limits, out = (fmt.qmin, fmt.qmax, fmt.dtype), _out_dtype(constant.dtype)
        if axis is None:
            fixed = float(weight.scale), int(weight.zero_point)
            codes = self._constant(name, weight.codes)
            return call(self.gm, _OPS.dequantize_per_tensor.default, codes, *fixed, *limits, like=node, **out)
        parts = {
            name: weight.codes,
            f"{name}_scale": weight.scale,
            f"{name}_zero_point": weight.zero_point.to(torch.int64).expand_as(weight.scale),
        }
        if not weight.block_size:
            given = [self._constant(*part) for part in parts.items()]
            return call(self.gm, _OPS.dequantize_per_channel.default, *given, axis, *limits, like=node, **out)
        # Groups are along the last dimension of a matrix.
        shape, order = list(weight.codes.movedim(axis, -1).shape), list(range(weight.codes.dim()))
        order.insert(axis, order.pop())
        given = [self._constant(name, part.movedim(axis, -1).flatten(0, -2)) for name, part in parts.items()]
        grouped = _OPS.dequantize_per_channel_group.default
        values = call(self.gm, grouped, *given, *limits, weight.block_size, constant.dtype, like=node)
        if len(shape) > 2:
            values = call(self.gm, torch.ops.aten.reshape.default, values, shape, like=node)
        if axis == len(shape) - 1:
            return values
        return call(self.gm, torch.ops.aten.permute.default, values, order, like=node)

    def _constant(self, name: str, value: Tensor) -> Node:
        """Return a node that reads `value`; the value is stored once per name."""
        if name not in self.stored:
            self.stored[name] = get_attr(self.gm, name, value.contiguous())
            return self.stored[name]
        node = self.gm.graph.get_attr(str(self.stored[name].target))
        node.meta["val"] = self.stored[name].meta["val"]
        return node

    def _known(self, rounded: Rounded) -> tuple[Any, ...]:
        """Return scale, zero point, limits, and dtype of an activation's codes with one calibrated scale."""
        scale, zero_point = (parameter(self.gm, node) for node in (rounded.scale, rounded.zero_point))
        return float(scale), int(zero_point) - _half(_integers(rounded.format)), *_limits(rounded.format)


def _rounded(node: Node) -> Rounded:
    """Return the rounding of a `quantize` or `dequantize` node with one scale per tensor or per token."""
    rounded = Rounded.of(node)
    assert rounded is not None
    _integers(rounded.format)
    if rounded.kind is Activation.OTHER:
        raise Declined("an activation with scales per group or channel")
    return rounded


def _limits(fmt: Format) -> tuple[int, int, torch.dtype]:
    """Return the smallest code, the largest code, and the dtype of an activation's codes."""
    fmt = _integers(fmt)
    half = _half(fmt)
    return fmt.qmin - half, fmt.qmax - half, torch.int8 if half else fmt.dtype


def _integers(fmt: Format) -> Format:
    if not fmt.is_integer or fmt.bits > 16 or fmt.sign_magnitude:
        raise Declined(f"codes in {fmt}")
    return fmt


def _half(fmt: Format) -> int:
    """Return the number that is subtracted from unsigned codes of up to 8 bits to make them signed."""
    return 0 if fmt.signed or fmt.bits > 8 else 1 << (fmt.bits - 1)


def _out_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    return {} if dtype == torch.float32 else {"out_dtype": dtype}


def _require_float32_or_less(x: Node) -> None:
    if (dtype := x.meta["val"].dtype) == torch.float64:
        raise Declined(f"an activation in {dtype}")


def _one_reader_each(gm: GraphModule) -> None:
    """Give each consumer of a quantized value a separate `dequantize`: back ends match each with one operator."""
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and str(node.target).startswith("quantized_decomposed.dequantize"):
            for reader in list(node.users)[1:]:
                with gm.graph.inserting_before(reader):
                    reader.replace_input_with(node, gm.graph.node_copy(node))


_OPS = torch.ops.quantized_decomposed

__all__ = ["pt2e"]
