"""Rules common to vLLM and SGLang, servers that load the checkpoints of `quark_fx.export.huggingface`.

The rules follow vLLM 0.32: its configuration parsers (`CompressedTensorsConfig`, `AutoGPTQConfig`, `AutoAWQConfig`) and
the layers that it builds. `benchmarks.in_sglang` shows how SGLang loads checkpoints that these rules refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import Operand, Placement, Refusal, undivided_groups
from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import ATTENTION, KINDS
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT8, UINT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT32

_CHANNEL = "granularity='channel'"

_SQUARE = 128
"""Outputs and inputs of a block of FP8 weights, and the group size of their activations."""

ELSE = "or target='torch'"
"""Alternative that every error names."""


def no_weight(spec: TensorSpec, operand: Operand) -> bool:
    """Tell whether a weight has a format, scales, or offsets that no server supports."""
    if operand is not Operand.WEIGHT:
        return False
    if spec.group_rows > 1:
        return (spec.format, spec.group_size, spec.group_rows, spec.scale) != (FP8_E4M3, _SQUARE, _SQUARE, FLOAT32)
    if not spec.format.is_integer:
        if spec.group_size is None:
            return spec.format != FP8_E4M3
        if spec.scale.rule:
            return spec.format not in (FP4_E2M1, FP8_E4M3) or spec.group_size != 32
        return spec.format != FP4_E2M1 or spec.group_size != 16 or not spec.scale.is_8_bit
    return not 2 <= spec.format.bits <= 8 or spec.scale.is_8_bit or spec.symmetry is Symmetry.OFFSET


def _is_no_activation(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.INPUT and spec.format not in (INT8, UINT8, FP8_E4M3)


def _is_measured_otherwise(spec: TensorSpec, operand: Operand) -> bool:
    """Tell whether an activation has other scales than one calibrated scale, or the dynamic scales of servers."""
    grouped = spec.dynamic and (spec.format, spec.group_size) == (FP8_E4M3, _SQUARE)
    supported = grouped or spec.granularity is (Granularity.TOKEN if spec.dynamic else Granularity.TENSOR)
    return operand is Operand.INPUT and (spec.scale.is_8_bit or not supported)


def _measures_a_share(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.INPUT and spec.measures_a_share


def _is_rounded_late(spec: TensorSpec, operand: Operand) -> bool:
    return operand in (Operand.OUTPUT, Operand.BIAS)


def _is_no_cache(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.KV_CACHE and (
        spec.format != FP8_E4M3 or spec.granularity is not Granularity.TENSOR or spec.dynamic
    )


def refusals(server: str) -> tuple[Refusal, ...]:
    """Return the specs of activations, biases, and caches that a server does not support."""
    return (
        Refusal(
            _is_no_activation,
            f"{server} does not support activations in {{spec.format}}; use int8, uint8, fp8_e4m3, input=None, {ELSE}",
        ),
        Refusal(
            _is_measured_otherwise,
            f"{server} supports activations with one calibrated scale, or with dynamic float32 scales per token, or "
            f"per group of {_SQUARE} in fp8_e4m3; set granularity='tensor', or 'token' with dynamic=True, or 'group' "
            f"with group_size={_SQUARE} next to weights in blocks of {_SQUARE}x{_SQUARE}, and drop scale",
        ),
        Refusal(
            _measures_a_share,
            f"{server} measures the whole range at run time; drop the observer, {ELSE}",
        ),
        Refusal(
            _is_rounded_late,
            f"{server} rounds only the inputs of operators, not outputs or biases; set output=None and bias=None",
        ),
        Refusal(
            _is_no_cache,
            f"{server} supports caches in fp8_e4m3 with one calibrated scale for keys and one for values, not "
            "{spec.format} per {spec.granularity}; set kv_cache=TensorSpec(format='fp8_e4m3')",
        ),
    )


def placement(server: str) -> Placement:
    """Return the placement of a server: embeddings and routers in float, one scheme for layers that it fuses."""
    # Many models of the servers build embeddings and routers in float, whatever the configuration says.
    in_float = (KINDS - {"linear", "experts", ATTENTION.kind}) | {"router"}
    return Placement(in_float=in_float, refuses=_refuses(server), fuses=True, branches=False)


def _refuses(server: str) -> Callable[[str, TensorSpec, TensorSpec | None, Linear | None], str]:
    def refuses(kind: str, weight: TensorSpec, read: TensorSpec | None, linear: Linear | None) -> str:
        """Return why the server cannot multiply a weight by an activation; empty if it can."""
        is_float = not weight.format.is_integer
        square = weight.group_size if weight.group_rows > 1 else None
        if kind == "experts" and (read is not None or square):
            return (
                f"experts of a checkpoint read float activations, without square blocks; set input=None and {_CHANNEL}"
            )
        otherwise = "exclude it, or use fp8_e4m3" if is_float else f"set {_CHANNEL} for it"
        sizes = () if linear is None else (linear.shape[linear.output_axis], linear.shape[linear.input_axis])
        if square and any(size % square for size in sizes):
            return f"its outputs or inputs are not a multiple of {square}; exclude it, or use granularity='channel'"
        if why := undivided_groups(weight, linear, () if is_float else (128, 64, 32), otherwise):
            return why
        if square and (read is None or read.group_size != square):
            return (
                f"{server} multiplies square blocks by activations in groups; set input=TensorSpec(format='fp8_e4m3', "
                f"granularity='group', group_size={square}, dynamic=True)"
            )
        if square:
            return ""
        if read is None:
            whole = not is_float and weight.granularity is Granularity.TENSOR
            return f"{server} needs integer weights per channel or group; set granularity='channel'" if whole else ""
        groups = weight.group_size or read.group_size
        if groups is not None or weight.format.bits != 8 or is_float is read.format.is_integer:
            return (
                f"{server} cannot multiply {weight.format} weights per {weight.granularity} by {read.format} "
                f"activations per {read.granularity}: both must be int8 or fp8_e4m3, with weights per channel; set "
                "input=None, or another weight"
            )
        if not weight.scheme.symmetric:
            return "weights must not have zero points if activations are integers; set symmetry='symmetric'"
        # A fused layer has one scale for all of its weights.
        again = is_float and weight.granularity is Granularity.TENSOR
        return f"{server} rounds FP8 weights per tensor again when it fuses them; set granularity='channel'" * again

    return refuses


def unread(form: str, config: Mapping[str, Any], left_experts: Sequence[str]) -> str:
    """Return why no server loads a checkpoint with this `quantization_config`; empty if one does."""
    if not form.startswith("gptq"):
        return ""
    if not config["sym"]:
        return "GPTQ with zero points; use format='awq', or symmetry='symmetric'"
    if config["bits"] not in (4, 8):
        return f"GPTQ in {config['bits']} bits; use 4 or 8, or format='compressed-tensors'"
    if config["group_size"] not in (-1, 32, 64, 128):
        return f"GPTQ in groups of {config['group_size']}; use 32, 64 or 128, or granularity='channel'"
    return ""


__all__ = ["ELSE", "no_weight", "placement", "refusals", "unread"]
