"""vLLM, which reads the checkpoints of `quark_fx.export.huggingface`, on any processor.

Which format has a kernel on which processor, its documentation says (https://docs.vllm.ai, "Quantization").
`benchmarks.in_vllm` runs it on a CPU.
"""

from __future__ import annotations

from quark_fx.config.target import CheckpointFiles, Refusal, Target
from quark_fx.targets.servers import ELSE, no_weight, placement, refusals, unread

VLLM = Target(
    name="vllm",
    refuses=(
        Refusal(
            no_weight,
            "vLLM has no weights in {spec.format} with such scales or offsets; use int2 to int8, fp8_e4m3, NVFP4, "
            "MXFP4 or MXFP8, " + ELSE,
        ),
        *refusals("vLLM"),
    ),
    placement=placement("vLLM"),
    checkpoints=CheckpointFiles(refuses=unread, stacks=False, rotates=True),
)

__all__ = ["VLLM"]
