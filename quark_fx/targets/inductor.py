"""Inductor on x64 processors: quantizers are placed where the kernels of `QuantizedModel.compile` read codes.

oneDNN's integer kernels return floats or codes, so a result with a float consumer is not rounded. If a convolution
feeds an addition, the output of the convolution is not rounded before the addition: its kernel adds the codes of the
other operand to its sums. Other additions and poolings between quantized operators run in loops that Inductor fuses;
with codes, they need a quarter of the memory traffic.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Placement, Target
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import RECURRENT, row_by_target
from quark_fx.targets.onnxruntime import ARITHMETIC


def _has_kernel(kind: str, spec: TensorSpec) -> bool:
    return kind not in RECURRENT


def adds_to_sums(node: Node, user: Node) -> bool:
    """Return True if the kernel of the convolution `node` also computes the addition `user`.

    The other operand must be computed first; if both operands are convolutions, the kernel of the later convolution
    computes the addition.
    """
    row = row_by_target(node)
    if target_name(user) != "aten.add.Tensor" or row is None or row.kind != "conv" or len(node.users) != 1:
        return False
    first, second, *_ = user.args
    other = second if first is node else first
    if user.kwargs.get("alpha", 1) != 1 or not isinstance(other, Node) or not other < node:
        return False
    value, added = (operand.meta.get("val") for operand in (node, other))
    if not isinstance(value, Tensor) or not isinstance(added, Tensor) or value.dtype != torch.float32:
        return False
    return value.dim() == 4 and value.shape == added.shape


INDUCTOR = Target(
    name="inductor",
    placement=Placement(arithmetic=ARITHMETIC, rounds_input=_has_kernel, continues=adds_to_sums),
    limits_pairs=True,
    onnx=OnnxFiles(runtime="onnxruntime"),
    latency_runtime="compile",
)

INDUCTOR_VNNI = replace(INDUCTOR, name="inductor_vnni", limits_pairs=False)

__all__ = ["INDUCTOR", "INDUCTOR_VNNI", "adds_to_sums"]
