"""Rules common to vLLM and SGLang, two servers that load the checkpoints of `quark_fx.export.huggingface`.

The rules follow vLLM 0.32: its configuration parsers (`CompressedTensorsConfig`, `AutoGPTQConfig`, `AutoAWQConfig`) and
the layers that they create. `benchmarks.schemes` has the servers' own code load checkpoints as for GPUs, and compares
what they do with these rules. `benchmarks.in_sglang` shows how SGLang loads checkpoints that these rules refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import Operand, Placement, Refusal, undivided_groups
from quark_fx.graph.linear import Linear
from quark_fx.graph.operators import ATTENTION, KINDS
from quark_fx.numbers.qparams import Symmetry

_CHANNEL = "granularity='channel'"

ELSE = "or target='torch'"
"""Alternative to propose in error messages."""

_FLOAT = "float"


@dataclass(frozen=True)
class Product:
    """A combination of weight and activation formats that a server can multiply.

    Attributes:
        weight: Glob for the `kind_of` a weight.
        reads: Globs for the `kind_of` an activation.
        vllm: Lowest compute capability of an NVIDIA GPU on which vLLM loads the weights; in parentheses, the lowest on
            which it also rounds the activations. Empty if vLLM does not load them.
        sglang: Lowest compute capabilities for SGLang, in the same form as `vllm`.
    """

    weight: str
    reads: tuple[str, ...]
    vllm: str
    sglang: str

    def has(self, operand: Operand, spec: TensorSpec | None) -> bool:
        """Return True if the operand's patterns match the spec."""
        patterns = self.reads if operand is Operand.INPUT else (self.weight,)
        return any(fnmatchcase(kind_of(spec), pattern) for pattern in patterns)

    def on(self, server: str) -> str:
        """Return the lowest compute capability for a server, `"vLLM"` or `"SGLang"`; empty if it is not supported."""
        return self.vllm if server == "vLLM" else self.sglang


_FP8_READ = ("fp8_e4m3 token dynamic", "fp8_e4m3 tensor")

PRODUCTS = (
    Product("*int[48] channel", (_FLOAT,), "7.5", "8.0"),
    Product("*int[48] group *", (_FLOAT,), "7.5", "8.0"),
    Product("*int[23567] channel", (_FLOAT,), "7.5", ""),
    Product("*int[23567] group *", (_FLOAT,), "7.5", ""),
    Product("int8 channel", ("int8 token dynamic", "uint8 token dynamic"), "7.5", "8.0"),
    Product("int8 channel", ("int8 tensor", "uint8 tensor"), "7.5", ""),  # SGLang: a fused layer stores one scale
    Product("int[2-8] channel", ("int8 token dynamic", "int4 token dynamic"), "7.5", ""),
    Product("int[2-8] group *", ("int8 token dynamic", "int4 token dynamic"), "7.5", ""),
    Product("int4 group 128", ("fp8_e4m3 token dynamic",), "9.0 alone", ""),
    Product("fp8_e4m3 tensor", (_FLOAT,), "7.5", "8.0"),
    Product("fp8_e4m3 tensor", _FP8_READ, "7.5 (8.9)", "8.0 (8.9)"),
    Product("fp8_e4m3 channel", (_FLOAT,), "7.5", "8.0"),
    Product("fp8_e4m3 channel", _FP8_READ, "7.5 (8.9)", "8.0 (8.9)"),
    Product("fp8_e4m3 group 128x128", ("fp8_e4m3 group 128 dynamic",), "7.5 (8.9)", "8.9"),
    Product("fp4_e2m1 group 16 e4m3", (_FLOAT,), "7.5", "8.0"),
    Product("fp4_e2m1 group 16 e4m3", ("fp4_e2m1 group 16 e4m3 dynamic",), "7.5 (10.0)", "8.0 (10.0)"),
    Product("fp4_e2m1 group 32 e8m0", (_FLOAT, "fp4_e2m1 group 32 e8m0 dynamic"), "8.0 (10.0)", ""),
    Product("fp4_e2m1 group 32 e8m0", ("fp8_e4m3 token dynamic", "fp8_e4m3 group 128 dynamic"), "8.0", ""),
    Product("fp8_e4m3 group 32 e8m0", (_FLOAT, "fp8_e4m3 group 32 e8m0 dynamic"), "7.5 (10.0)", ""),
)
"""Products that vLLM 0.32 (`CompressedTensorsConfig._get_scheme_from_parts`) and SGLang 0.5.23 support, with the
compute capabilities of their schemes and kernels. vLLM packs integers of fewer than 8 bits, and all integers in groups,
like `export.huggingface`. From compute capability 10.0 on, vLLM rounds the activations of MX weights even if the
checkpoint does not request it."""


def kind_of(spec: TensorSpec | None) -> str:
    """Describe the properties of a spec that determine the choice of a kernel.

    >>> kind_of(TensorSpec(format="int4", granularity="group", group_size=128)), kind_of(None)
    ('int4 group 128', 'float')
    """
    if spec is None:
        return _FLOAT
    rows = f"{spec.group_rows}x" if spec.group_rows > 1 else ""
    shared = f"group {rows}{spec.group_size}" if spec.group_size else str(spec.granularity)
    # A server measures E4M3 scales only if their second scale is calibrated.
    scales = (
        "e4m3" if spec.scale.has_unit and spec.dynamic == spec.scale.calibrated else "e8m0" if spec.scale.rule else ""
    )
    other = "+" * (spec.symmetry is Symmetry.OFFSET or spec.scale.multiples is not None)
    words = (f"{spec.format}{other}", shared, scales, "dynamic" if spec.dynamic else "")
    return " ".join(word for word in words if word)


def capability(server: str, weight: TensorSpec | None, read: TensorSpec | None) -> str:
    """Return the lowest compute capability of NVIDIA GPUs on which a server multiplies a weight by an activation.

    Args:
        server: Name of the server, `"vLLM"` or `"SGLang"`.
        weight: Spec of the weight; `None` means float.
        read: Spec of the activation; `None` means float.

    Returns:
        Compute capability as in `Product`; empty if the server does not support the combination.

    >>> capability("vLLM", TensorSpec(format="int4", granularity="group", group_size=128), None)
    '7.5'
    """
    rows = (row for row in PRODUCTS if row.has(Operand.WEIGHT, weight) and row.has(Operand.INPUT, read))
    return next((least for row in rows if (least := row.on(server))), "")


def _measures_a_share(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.INPUT and spec.measures_a_share


def _is_rounded_late(spec: TensorSpec, operand: Operand) -> bool:
    return operand in (Operand.OUTPUT, Operand.BIAS)


_CACHES = {
    "vLLM": ("fp8_e4m3 tensor", "fp8_e4m3 head", "fp4_e2m1 group 16 e4m3 dynamic"),
    "SGLang": ("fp8_e4m3 tensor",),
}
"""Formats of keys and values that a server can cache. vLLM reads scales per head from compressed-tensors, for
FlashAttention 3 or 4 (compute capability 9.0), and NVFP4 from ModelOpt's layout, for FlashInfer (8.0)."""


def _caches_otherwise(server: str) -> Callable[[TensorSpec, Operand], bool]:
    """Return a function that returns True for a KV cache spec that the server does not support."""
    return lambda spec, operand: operand is Operand.KV_CACHE and kind_of(spec) not in _CACHES[server]


def _lacks(server: str, operand: Operand) -> Callable[[TensorSpec, Operand], bool]:
    """Return a function that returns True for a spec of the operand that none of the server's products has."""

    def lacks(spec: TensorSpec, place: Operand) -> bool:
        return place is operand and not any(row.on(server) and row.has(operand, spec) for row in PRODUCTS)

    return lacks


def refusals(server: str, weights: str) -> tuple[Refusal, ...]:
    """Return the rules for specs that a server does not support.

    Args:
        server: Name of the server, `"vLLM"` or `"SGLang"`.
        weights: Description of the supported weights, for the message.
    """
    reads = dict.fromkeys(kind for row in PRODUCTS if row.on(server) for kind in row.reads if kind != _FLOAT)
    return (
        Refusal(
            _lacks(server, Operand.WEIGHT), f"{server} does not support weights in {{spec}}; use {weights}, {ELSE}"
        ),
        Refusal(
            _lacks(server, Operand.INPUT),
            f"{server} does not support activations in {{spec}}; use {', '.join(reads)}; or set input=None, {ELSE}",
        ),
        Refusal(
            _measures_a_share,
            f"{server} always uses the whole range that it measures at run time; drop the observer, {ELSE}",
        ),
        Refusal(
            _is_rounded_late,
            f"{server} rounds only the inputs of operators, not outputs or biases; set output=None and bias=None",
        ),
        Refusal(
            _caches_otherwise(server),
            f"{server} supports caches in {', '.join(_CACHES[server])}, not {{spec}}; set "
            "kv_cache=TensorSpec(format='fp8_e4m3')",
        ),
    )


def placement(server: str) -> Placement:
    """Return the placement of a server: embeddings and routers stay in float, and fused layers have the same scheme."""
    # In many models of the servers, embeddings and routers are in float, whatever the configuration says.
    in_float = (KINDS - {"linear", "experts", ATTENTION.kind}) | {"router"}
    return Placement(in_float=in_float, refuses=_refuses(server), fuses=True, branches=False)


def _refuses(server: str) -> Callable[[str, TensorSpec, TensorSpec | None, Linear | None], str]:
    def refuses(kind: str, weight: TensorSpec, read: TensorSpec | None, linear: Linear | None) -> str:
        """Return why the server cannot multiply a weight by an activation; empty if it can."""
        is_float = not weight.format.is_integer
        square = weight.group_size if weight.group_rows > 1 else None
        if kind == "experts" and (read is not None or square):
            return f"experts of a checkpoint need float activations and no square blocks; set input=None and {_CHANNEL}"
        otherwise = "exclude it, or use fp8_e4m3" if is_float else f"set {_CHANNEL} for it"
        sizes = () if linear is None else (linear.shape[linear.output_axis], linear.shape[linear.input_axis])
        if square and any(size % square for size in sizes):
            return f"its outputs or inputs are not a multiple of {square}; exclude it, or set granularity='channel'"
        if why := undivided_groups(weight, linear, () if is_float else (128, 64, 32), otherwise):
            return why
        if read is not None and (why := undivided_groups(read, linear, (), "exclude it", shorter=False)):
            return why
        if not capability(server, weight, read):
            rows = [row for row in PRODUCTS if row.on(server) and row.has(Operand.WEIGHT, weight)]
            reads = ", ".join(dict.fromkeys(kind for row in rows for kind in row.reads))
            return (
                f"{server} cannot multiply {weight} weights by {read or _FLOAT} activations; these weights need "
                f"activations in {reads}; change input= or weight="
            )
        if read is None:
            return ""
        if not weight.scheme.symmetric:
            return "weights must not have zero points if activations are rounded; set symmetry='symmetric'"
        if not read.scheme.symmetric and (weight.group_size or weight.format.bits < 8):
            return "activations must not have zero points with packed weights; set format='int8' in input"
        # A fused layer has one scale for all of its weights.
        again = is_float and weight.granularity is Granularity.TENSOR
        return f"{server} rounds per-tensor FP8 weights again when it fuses them; set granularity='channel'" * again

    return refuses


def unread(form: str, config: Mapping[str, Any], left_experts: Sequence[str]) -> str:
    """Return why vLLM and SGLang do not load a checkpoint with this `quantization_config`; empty if one of them does.

    Args:
        form: Format of `quark_fx.export.huggingface`.
        config: The checkpoint's `quantization_config`.
        left_experts: Names of the experts' modules that stay in float.
    """
    if not form.startswith("gptq"):
        return ""
    if not config["sym"]:
        return "GPTQ with zero points; use format='awq', or symmetry='symmetric'"
    if config["bits"] not in (4, 8):
        return f"GPTQ in {config['bits']} bits; use 4 or 8, or format='compressed-tensors'"
    if config["group_size"] not in (-1, 32, 64, 128):
        return f"GPTQ in groups of {config['group_size']}; use 32, 64 or 128, or granularity='channel'"
    return ""


__all__ = ["PRODUCTS", "Product", "capability", "kind_of", "placement", "refusals", "unread"]
