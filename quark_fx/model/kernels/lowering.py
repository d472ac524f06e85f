"""Lowering of a quantized graph to torch's kernels: the table of rules for operators."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from quark_fx.errors import Declined
from quark_fx.graph.nodes import describe, own_tensors
from quark_fx.graph.operators import argument, row_by_target
from quark_fx.graph.pass_manager import copy_graph
from quark_fx.model.constants import constant_of, parameter_name
from quark_fx.model.kernels.gpu_products import gpu_linear
from quark_fx.model.kernels.integer_products import integer_convolution, integer_linear, token_linear
from quark_fx.model.kernels.product import Activation, Product
from quark_fx.model.kernels.spelling import Traced, spell_out
from quark_fx.model.kernels.weight_only import weight_only_linear
from quark_fx.plan.placement import module_name
from quark_fx.plan.table import Column, Table
from quark_fx.system import accelerator
from quark_fx.system.isolation import isolated

logger = logging.getLogger(__name__)

Rule = Callable[[Product], str]
"""Function that replaces an operator with a kernel and returns the kernel's name, or raises `Declined` first."""

_FOLDED = "int8 layers in this model require constant freezing, which would dequantize this weight back to float"

RULES: dict[tuple[str, str, Activation], Rule] = {
    ("cpu", "linear", Activation.STATIC): integer_linear,
    ("cpu", "linear", Activation.DYNAMIC): integer_linear,
    ("cpu", "linear", Activation.TOKEN): token_linear,
    ("cpu", "conv", Activation.STATIC): integer_convolution,
    ("cpu", "conv", Activation.DYNAMIC): integer_convolution,
    ("cpu", "linear", Activation.FLOAT): weight_only_linear,
    **{("gpu", "linear", rounding): gpu_linear for rounding in Activation},
}
"""Rules, keyed by device, operator family, and rounding of the activation; integer kernels first."""


@dataclass(frozen=True)
class KernelRow:
    """A report row for an operator with a quantized weight.

    Attributes:
        name: Module path.
        kind: Operator family.
        kernel: Name of the kernel; empty if the operator runs in floating point on dequantized values.
        reason: Reason for the lack of a kernel; empty if the operator has a kernel.
    """

    name: str
    kind: str
    kernel: str = ""
    reason: str = ""

    @property
    def integer(self) -> bool:
        """True if the kernel multiplies integers."""
        return self.packed or self.kernel == "aten._int_mm"

    @property
    def packed(self) -> bool:
        """True if `compile()` freezes the weight that the kernel packs."""
        return self.kernel.startswith("onednn.")


_KERNELS: tuple[Column[KernelRow], ...] = (
    Column("name", lambda row: row.name),
    Column("op", lambda row: row.kind),
    Column("kernel", lambda row: row.kernel or None),
    Column("in floats because", lambda row: row.reason),
)


@dataclass(frozen=True)
class KernelReport:
    """The kernels of a compiled model. `str(report)` is a table."""

    rows: tuple[KernelRow, ...]

    def __iter__(self) -> Iterator[KernelRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        lines = Table("Kernels", _KERNELS, self.rows).lines()
        count = Counter(row.kernel for row in self.rows if row.kernel)
        kernels = ", ".join(f"{n} {kernel}" for kernel, n in count.most_common()) or "none"
        return "\n".join([*lines, f"{count.total()} of {len(self.rows)} operators with a kernel ({kernels})"])


@isolated
def use_kernels(
    gm: GraphModule, traced: Traced | None = None, *, packs: bool = True
) -> tuple[GraphModule, KernelReport]:
    """Return a copy of a quantized graph with torch's kernels and float operators, and a report on the kernels.

    The copy is a snapshot: it has its own tensors, and later changes of `gm` do not affect it.

    Args:
        gm: The quantized graph.
        traced: See `spell_out`.
        packs: Whether weights may be packed, which `torch.compile` supports only for frozen constants.
    """
    gm = own_tensors(copy_graph(gm))
    products = [product for node in gm.graph.nodes if (product := Product.of(gm, node, packs=packs)) is not None]
    rows = rows_of_lists(gm)
    for product in sorted(products, key=lambda product: product.rounding is Activation.FLOAT):
        name, kernel, reason = product.node.name, "", ""
        try:
            if product.rounding is Activation.FLOAT and any(row.packed for row in rows.values()):
                raise Declined(_FOLDED)
            kernel = rule_of(product)(product)
        except Declined as declined:
            reason = declined.reason
            logger.debug("no kernel for %s: %s", describe(product.node), reason)
        rows[name] = KernelRow(product.name, product.row.kind, kernel, reason)
    report = KernelReport(tuple(rows[node.name] for node in gm.graph.nodes if node.name in rows))
    spell_out(gm, traced)
    gm.graph.lint()
    return copy_graph(gm), report  # without the tensors that kernels replaced


def rows_of_lists(gm: GraphModule) -> dict[str, KernelRow]:
    """Return report rows for recurrent layers with at least one quantized weight in their lists, keyed by node name."""
    rows = {}
    for node in gm.graph.nodes:
        row = row_by_target(node)
        weights = None if row is None or row.weight is None else argument(node, row.weight)
        if row is None or not isinstance(weights, list | tuple):
            continue
        constants = [constant_of(gm, weight) for weight in weights if isinstance(weight, Node)]
        coded = [constant for constant in constants if constant is not None and constant.quantized is not None]
        if coded:
            name = module_name(node, parameter_name(gm, coded[0].names[0]))
            rows[node.name] = KernelRow(
                name, row.kind, "", f"torch has no kernel for {row.kind} with quantized weights"
            )
    return rows


def rule_of(product: Product) -> Rule:
    """Return the rule for a product.

    Raises:
        Declined: If the table lacks a rule for it.
    """
    device = product.weight.codes.device
    if not has_rules(device):
        raise Declined(f"its weight is on {device}; there are kernels for CPUs and NVIDIA GPUs")
    rule = RULES.get(("cpu" if device.type == "cpu" else "gpu", product.row.kind, product.rounding))
    if rule is None:
        raise Declined(f"torch has no kernel for {product.row.kind} with {_WORDS[product.rounding]}")
    return rule


def has_rules(device: torch.device) -> bool:
    """Tell whether there are kernels for a device: a CPU or an NVIDIA GPU."""
    return device.type == "cpu" or accelerator.capability(device) is not None


_WORDS = {
    Activation.FLOAT: "an activation in float",
    Activation.STATIC: "one calibrated scale of the activation",
    Activation.DYNAMIC: "one measured scale of the activation",
    Activation.TOKEN: "a scale for each token",
    Activation.OTHER: "scales of groups or channels of the activation",
}

__all__ = ["RULES", "KernelReport", "KernelRow", "Rule", "has_rules", "rows_of_lists", "rule_of", "use_kernels"]
