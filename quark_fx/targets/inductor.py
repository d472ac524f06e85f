"""Inductor on x64 processors: quantizers are where the kernels of `QuantizedModel.compile` read codes.

oneDNN's integer kernels return floats as well as codes, so a result that anything reads in float is not rounded.
Additions and pools between quantized operators run in loops that Inductor fuses, which read and write a quarter of the
bytes in codes.
"""

from __future__ import annotations

from dataclasses import replace

from quark_fx.config.specs import TensorSpec
from quark_fx.config.target import OnnxFiles, Placement, Target
from quark_fx.graph.operators import RECURRENT
from quark_fx.targets.onnxruntime import ARITHMETIC


def _has_kernel(kind: str, spec: TensorSpec) -> bool:
    return kind not in RECURRENT


INDUCTOR = Target(
    name="inductor",
    placement=Placement(arithmetic=ARITHMETIC, rounds_input=_has_kernel),
    limits_pairs=True,
    onnx=OnnxFiles(runtime="onnxruntime"),
    latency_runtime="compile",
)

INDUCTOR_VNNI = replace(INDUCTOR, name="inductor_vnni", limits_pairs=False)

__all__ = ["INDUCTOR", "INDUCTOR_VNNI"]
