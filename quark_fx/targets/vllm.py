"""vLLM, which loads the checkpoints of `quark_fx.export.huggingface`, on any processor.

vLLM's documentation lists the processors that have kernels for each format (https://docs.vllm.ai, "Quantization").
`benchmarks.in_vllm` runs vLLM on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from quark_fx.config.target import CheckpointFiles, Target
from quark_fx.targets.servers import placement, refusals, unread

_LARGEST = 1024
"""Size of the largest rotation. vLLM multiplies by the whole matrix, and the graph by its two Kronecker factors."""


def _unrotated(kinds: Sequence[str], has_bias: bool, size: int) -> str:
    if "linear" not in kinds or "head" in kinds:
        return "vLLM rotates inputs of linear layers at run time, but not of output heads, experts, or attention keys"
    if has_bias:
        return "vLLM does not rotate inputs of layers with a bias at run time"
    if size > _LARGEST:
        return f"vLLM supports rotations of size up to {_LARGEST} at run time, not {size}; set block=64 in Rotate"
    return ""


VLLM = Target(
    name="vllm",
    refuses=refusals(
        "vLLM", "int2 to int8 per channel or in groups, fp8_e4m3 (in blocks, of 128x128), NVFP4, MXFP4 or MXFP8"
    ),
    placement=placement("vLLM"),
    checkpoints=CheckpointFiles(refuses=unread, stacks=False, unrotated=_unrotated),
)

__all__ = ["VLLM"]
