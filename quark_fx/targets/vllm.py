"""vLLM, which reads the checkpoints of `quark_fx.export.huggingface`, on any processor.

Which format has a kernel on which processor, its documentation says (https://docs.vllm.ai, "Quantization").
`benchmarks.in_vllm` runs it on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from quark_fx.config.target import CheckpointFiles, Refusal, Target
from quark_fx.targets.servers import ELSE, no_weight, placement, refusals, unread

_LARGEST = 1024
"""The largest matrix that it multiplies by. It takes matrices as a whole, where the graph has two factors of one."""


def _unrotated(kinds: Sequence[str], has_bias: bool, size: int) -> str:
    if "linear" not in kinds or "head" in kinds:
        return "vLLM rotates at run time what linear layers read, but no heads, experts or keys"
    if has_bias:
        return "vLLM rotates nothing at run time that a layer with a bias reads"
    if size > _LARGEST:
        return f"vLLM has no matrix of size {size} at run time, only up to {_LARGEST}; set block=64 of Rotate"
    return ""


VLLM = Target(
    name="vllm",
    refuses=(
        Refusal(
            no_weight,
            "vLLM has no weights in {spec.format} with such scales or offsets; use int2 to int8, fp8_e4m3 (in "
            "blocks, of 128x128), NVFP4, MXFP4 or MXFP8, " + ELSE,
        ),
        *refusals("vLLM"),
    ),
    placement=placement("vLLM"),
    checkpoints=CheckpointFiles(refuses=unread, stacks=False, unrotated=_unrotated),
)

__all__ = ["VLLM"]
