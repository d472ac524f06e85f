"""SGLang, which loads the checkpoints of `quark_fx.export.huggingface` on GPUs.

The rules follow SGLang 0.5.23: `CompressedTensorsConfig`, `GPTQMarlinConfig`, `AWQMarlinConfig`, and the layers that
these classes create. `benchmarks.in_sglang` loads checkpoints with SGLang's code, without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quark_fx.config.target import CheckpointFiles, Target
from quark_fx.targets.servers import placement, refusals, unread

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Names of SGLang's fused layers, each with the layers that it fuses (`stacked_params_mapping` of the models)."""


def _unread(form: str, config: Mapping[str, Any], left_experts: Sequence[str]) -> str:
    if form == "awq" and config["lm_head"]:
        return "AWQ with a quantized head; add 'op:head' to exclude, or use format='compressed-tensors'"
    if form.startswith("gptq") and left_experts:
        # SGLang loads all experts as quantized experts, even if `dynamic` in the configuration excludes them.
        return "GPTQ with experts in float; use format='compressed-tensors' or 'awq'"
    if form == "modelopt":
        return "the ModelOpt layout that quark_fx writes for vLLM; use format='compressed-tensors'"
    return unread(form, config, left_experts)


def _unrotated(*_: object) -> str:
    return "SGLang does not rotate inputs at run time, but target='vllm' does"


SGLANG = Target(
    name="sglang",
    refuses=refusals(
        "SGLang", "int4 or int8 per channel or in groups, fp8_e4m3 per channel or in blocks of 128x128, or NVFP4"
    ),
    placement=placement("SGLang"),
    checkpoints=CheckpointFiles(refuses=_unread, stacks=False, fused=_FUSED, unrotated=_unrotated),
)

__all__ = ["SGLANG"]
