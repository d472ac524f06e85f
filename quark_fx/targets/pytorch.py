"""PyTorch, which runs the quantized graph itself and supports every spec. Quantizers are placed as for ONNX Runtime."""

from __future__ import annotations

from quark_fx.config.target import OnnxFiles, Target
from quark_fx.targets.onnxruntime import PLACEMENT

TORCH = Target(name="torch", placement=PLACEMENT, onnx=OnnxFiles(runtime="onnxruntime"), latency_runtime="compile")
