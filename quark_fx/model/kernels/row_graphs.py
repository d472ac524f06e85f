"""Graphs that compute one product of a quantized graph each, for a matrix of rows, with torch's kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.nn import functional as F

from quark_fx.errors import Declined
from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, call, get_attr, is_parameter, parameter, target_name
from quark_fx.graph.operators import argument
from quark_fx.model.kernels.lowering import KernelRow, rule_of, use_kernels
from quark_fx.model.kernels.one_row import compiled, finds_compiler
from quark_fx.model.kernels.product import Product
from quark_fx.model.kernels.spelling import Traced
from quark_fx.model.kernels.weight_only import code_product, code_values

_AXES = {QUANTIZE: 4, DEQUANTIZE: 4, "quark_fx.dynamic_qparams.default": 3}
"""Position of the argument with the dimension along which scales vary."""


class RowGraphs:
    """A builder of graphs whose input is a matrix of rows.

    The graphs share the symbol for the number of rows, so that traces can be reused.
    """

    def __init__(self) -> None:
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

        self._mode = FakeTensorMode(shape_env=ShapeEnv(duck_shape=False), allow_non_fake_inputs=True)
        context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
        (self._rows,) = self._mode.from_tensor(torch.empty(3, dtype=torch.float32), symbolic_context=context).shape
        self._traced: Traced = {}

    def of(self, product: Product) -> tuple[GraphModule | None, KernelRow]:
        """Return a graph with a kernel for a product, or `None`, and the product's row of the report.

        The graph's input has the shape `(rows, inputs)`.

        Args:
            product: Product of a quantized graph, with rows of inputs as activation and rows of outputs as result.
        """
        name, kind = product.name, product.row.kind
        try:
            rule_of(product)  # rejects unsupported scales before the activation is reshaped to rows
            gm = self._alone(product)
        except Declined as declined:
            return None, KernelRow(name, kind, "", declined.reason)
        gm, (row,) = use_kernels(gm, self._traced, packs=False)
        loops = [node for node in gm.graph.nodes if node.target is code_product]
        reason = row.reason
        if loops and not finds_compiler():
            reason = "this kernel is built with torch.compile, which needs a C++ compiler"
        if reason:
            return None, KernelRow(name, kind, "", reason)
        for node in loops:
            node.target = loop_product
        gm.recompile()
        return gm, KernelRow(name, kind, row.kernel)

    def _alone(self, product: Product) -> GraphModule:
        """Return a graph that rounds a matrix of rows like the activation of a product, and computes the product.

        Raises:
            Declined: If the activation lacks a batch dimension, or is already quantized by another operator.
        """
        rounded, source = product.rounded, product.activation
        if rounded is not None:
            if target_name(rounded.codes) != QUANTIZE:
                raise Declined("its activation is already quantized")
            source = argument(rounded.codes, 0)
        value: Tensor = source.meta["val"]
        if value.dim() < 2:
            raise Declined("its activation lacks a batch dimension")
        needed, pending = {product.node}, [product.node]
        while pending:
            for read in pending.pop().all_input_nodes:
                if read is not source and read not in needed:
                    needed.add(read)
                    pending.append(read)
        gm = GraphModule(torch.nn.Module(), Graph(), class_name="Product")
        gm.meta["fake_mode"] = self._mode
        copies = {source: gm.graph.placeholder("x")}
        with self._mode:
            copies[source].meta["val"] = torch.empty(
                (self._rows, int(value.shape[-1])), dtype=value.dtype, device=value.device
            )
        of_rows = {source}
        for node in product.gm.graph.nodes:
            if node not in needed:
                continue
            if is_parameter(node):
                copies[node] = get_attr(gm, "constant", parameter(product.gm, node))
                continue
            args: Any = list(torch.fx.map_arg(node.args, copies.__getitem__))
            if not of_rows.isdisjoint(node.all_input_nodes):
                of_rows.add(node)
                axis = _AXES.get(target_name(node))
                if axis is not None and len(args) > axis and args[axis] is not None:
                    args[axis] = -1  # the only dimension along which scales of rows vary
            copies[node] = call(gm, node.target, *args, like=node, **node.kwargs)
        gm.graph.output((copies[product.node],))
        gm.recompile()
        return gm


def loop_product(x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor, packed: bool) -> Tensor:
    """Compute `code_product`; outside of compiled code, a compiled loop dequantizes the weight for several rows."""
    if torch.compiler.is_compiling() or x.numel() == x.shape[-1]:
        return code_product(x, codes, scale, zero_point, packed)
    weight = compiled(code_values, packed)(codes, scale, zero_point)
    return F.linear(x, weight.to(x.dtype))


__all__ = ["RowGraphs"]
