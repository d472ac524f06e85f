"""Inductor on x64 processors: quantizers are where the kernels of `QuantizedModel.compile` read codes.

oneDNN's integer kernels return floats as well as codes, so a result that anything reads in float is not rounded.
One operand of an addition stays in the sums of the convolution that makes it, if one does: the kernel adds the codes of
the other. Other additions and pools between quantized operators run in loops that Inductor fuses, which read and write
a quarter of the bytes in codes.
"""

from __future__ import annotations

from dataclasses import replace

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
    """Tell whether a kernel computes `user`, an addition, on what it has of the convolution `node` before rounding it.

    Of two convolutions whose results are added, the later one does.
    """
    row = row_by_target(node)
    if target_name(user) != "aten.add.Tensor" or row is None or row.kind != "conv" or len(node.users) != 1:
        return False
    first, second, *_ = user.args
    other = second if first is node else first
    if user.kwargs.get("alpha", 1) != 1 or not isinstance(other, Node) or other is node:
        return False
    value, added = (given.meta.get("val") for given in (node, other))
    if not isinstance(added, Tensor) or value is None or value.dim() != 4 or value.shape != added.shape:
        return False
    return not adds_to_sums(other, user) if other > node else True


INDUCTOR = Target(
    name="inductor",
    placement=Placement(arithmetic=ARITHMETIC, rounds_input=_has_kernel, continues=adds_to_sums),
    limits_pairs=True,
    onnx=OnnxFiles(runtime="onnxruntime"),
    latency_runtime="compile",
)

INDUCTOR_VNNI = replace(INDUCTOR, name="inductor_vnni", limits_pairs=False)

__all__ = ["INDUCTOR", "INDUCTOR_VNNI", "adds_to_sums"]
