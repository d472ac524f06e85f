"""PyTorch, which runs the graph itself and refuses nothing. Quantizers are where ONNX Runtime has kernels."""

from __future__ import annotations

from quark_fx.config.target import OnnxFiles, Target
from quark_fx.targets.onnxruntime import PLACEMENT

TORCH = Target(name="torch", placement=PLACEMENT, onnx=OnnxFiles(runtime="onnxruntime"), latency_runtime="compile")
