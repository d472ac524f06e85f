"""Built-in backends, one file each. To add a backend outside of the package, call `register_target` in your module."""

from quark_fx.config.target import (
    TARGETS,
    CheckpointFiles,
    OnnxFiles,
    Operand,
    Placement,
    Refusal,
    Target,
    find_target,
    register_target,
)
from quark_fx.targets.inductor import INDUCTOR, INDUCTOR_VNNI
from quark_fx.targets.onnxruntime import ONNX, ONNX_VNNI
from quark_fx.targets.pytorch import TORCH
from quark_fx.targets.sglang import SGLANG
from quark_fx.targets.vllm import VLLM

for target in (ONNX, ONNX_VNNI, VLLM, SGLANG, INDUCTOR, INDUCTOR_VNNI, TORCH):
    register_target(target)


def __getattr__(name: str) -> Target:
    """Return a registered target by its name in upper case."""
    return TARGETS.attribute(name)


__all__ = [
    "INDUCTOR",
    "INDUCTOR_VNNI",
    "ONNX",
    "ONNX_VNNI",
    "SGLANG",
    "TARGETS",
    "TORCH",
    "VLLM",
    "CheckpointFiles",
    "OnnxFiles",
    "Operand",
    "Placement",
    "Refusal",
    "Target",
    "find_target",
    "register_target",
]
