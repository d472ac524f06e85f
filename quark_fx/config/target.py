"""What a quantized graph has to run on: one frozen value a backend, found by name. `quark_fx.targets` has our own.

To add one: build a `Target` and hand it to `register_target`. Configurations, YAML and stored models then find it by
name. Nothing asks which target it is: configurations, placement, training and export ask the value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final

from torch.fx import Node

from quark_fx.config.specs import TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.graph.linear import Linear
from quark_fx.numbers.formats import INT8
from quark_fx.system.names import keeping_stored
from quark_fx.system.options import checked, parsed
from quark_fx.system.registry import Registry
from quark_fx.system.untrusted import brief


class Operand(StrEnum):
    """The tensors of an operator that have a spec, called as the fields of a configuration."""

    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    BIAS = "bias"
    KV_CACHE = "kv_cache"


@checked
@dataclass(frozen=True)
class Refusal:
    """Specs that a backend does not take.

    Attributes:
        when: whether the backend refuses a spec for an operand.
        why: the message of the error, which names the fix. `{spec.format}` and the like are filled in.

    Raises:
        ConfigError: if `why` has a field that no spec can fill in.
    """

    when: Callable[[TensorSpec, Operand], bool]
    why: str

    def __post_init__(self) -> None:
        try:
            self.why.format(spec=TensorSpec(format=INT8))
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(
                f"why={self.why!r} of a Refusal cannot be filled in: {error}; write it as {_WHY!r}"
            ) from None


_WHY = "this backend reads no {spec.format}; set format='int8'"


def _no(*_: object) -> bool:
    return False


def _yes(*_: object) -> bool:
    return True


def _taken(*_: object) -> str:
    return ""


@checked
@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where quantizers belong, besides the inputs of operators with weights.

    Attributes:
        arithmetic: operators without weights that run in integers, such as `"aten.add.Tensor"`.
        anywhere: they do so wherever their inputs are in integers; otherwise only between quantized operators.
        rounds_output: whether what an operator with a weight makes is rounded, whatever reads it; otherwise it is where
            everything that reads it does so in integers.
        in_float: kinds (such as `"lstm"`) and roles (such as `"router"`) of operators whose weights stay in float.
        rounds_input: whether an operator of a kind whose weight gets codes reads its activation as a spec says;
            otherwise it reads it in float.
        continues: whether a node works on the value it reads before that is rounded, as the activation function does
            that a kernel applies to its sums.
        refuses: says why the backend cannot run an operator, and what to do instead; empty if it can. Its arguments are
            the kind, the spec of the weight, that of the input (`None`: float), and the geometry (`None` for recurrent
            layers and embeddings).
        fuses: whether the backend runs siblings (`quark_fx.plan.siblings`) as one kernel, so that all have the same
            specs, or all stay in float.
        branches: whether it computes in float what a pass puts beside an operator. `LowRank` changes nothing where it
            does not.
    """

    arithmetic: frozenset[str] = frozenset()
    anywhere: bool = False
    rounds_output: Callable[[Linear], bool] = _no
    in_float: frozenset[str] = frozenset()
    rounds_input: Callable[[str, TensorSpec], bool] = _yes
    continues: Callable[[Node, Node], bool] = _no
    refuses: Callable[[str, TensorSpec, TensorSpec | None, Linear | None], str] = _taken
    fuses: bool = False
    branches: bool = True


@checked
@dataclass(frozen=True, kw_only=True)
class OnnxFiles:
    """How a graph is written as an ONNX file.

    Attributes:
        formats: those of `quark_fx.export.onnx` that the backend reads, its default first.
        opset: the default.
        opsets: the oldest and the newest that the backend reads.
        runtime: whose mistakes the file is written around: `quark_fx.export.to_onnx.rules` has rules for
            `"onnxruntime"` that other backends do without.
        rules: rewrites for this backend alone, which run last: see `quark_fx.export.onnx`.
        check: raises `ExportError` for an `onnx_ir.Model` that the backend does not load. Every file passes
            `onnx.checker`, and ONNX Runtime loads it, before that.

    Raises:
        ConfigError: if there is no format, or the default opset is not one that the backend reads.
    """

    formats: tuple[str, ...] = ("qdq", "qoperator", "matmul_nbits", "vitis")
    opset: int = 21
    opsets: tuple[int, int] = (14, 25)
    runtime: str = ""
    rules: tuple[Any, ...] = ()
    check: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if not self.formats:
            raise ConfigError("formats of OnnxFiles is empty; name at least one, such as 'qdq'")
        oldest, newest = self.opsets
        if not oldest <= self.opset <= newest:
            raise ConfigError(
                f"opset={self.opset} of OnnxFiles is not within opsets={self.opsets}; opsets are the oldest and the "
                "newest that the backend reads"
            )


Unrotated = Callable[[Sequence[str], bool, int], str]
"""Says why a backend does not rotate what an operator reads: see `CheckpointFiles`."""


@checked
@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """How a graph is written as a checkpoint.

    Attributes:
        refuses: says why the backend does not read a format of `quark_fx.export.huggingface`, and what to do instead;
            empty if it does. Its arguments are the format, its `quantization_config`, and the names of experts'
            modules that stay in float.
        stacks: whether compressed-tensors stores experts that stay in float as stacks, where transformers looks for
            them beside quantized layers; otherwise each expert has its own matrices, as in a float checkpoint.
        fused: the backend's names of fused layers, each with the names of the layers that it fuses. Where all of these
            stay in float, the checkpoint lists the fused name as well.
        unrotated: says why the backend does not rotate what an operator reads at run time, as compressed-tensors'
            `transform_config` has it, and what to do instead; empty if it does. Its arguments are the kinds of the
            operator that patterns know, whether it has a bias, and the size of the matrix. `Rotate` skips what it
            refuses. `None`: nothing is known, so checkpoints with rotations are refused.
    """

    refuses: Callable[[str, Mapping[str, Any], Sequence[str]], str] = _taken
    stacks: bool = True
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unrotated: Unrotated | None = None


@checked
@dataclass(frozen=True, kw_only=True, repr=False)
class Target:
    """A backend: what it accepts, where it rounds, how it counts and how its files are spelled.

    Attributes:
        name: in configurations. Two targets of one name are equal.
        refuses: what `QuantConfig` refuses for it; the first that applies is the error.
        placement: where quantizers belong.
        limits_pairs: weight codes are limited so that two products of 8 bits, added in 16 bits, never saturate
            (`quark_fx.plan.pair_sums`).
        onnx: how its ONNX files are written.
        checkpoints: how those of `quark_fx.export.huggingface` are written.
        latency_runtime: what `quark_fx.search` measures latency in: `"onnxruntime"`, `"compile"`
            (`QuantizedModel.compile`), or empty where the backend is on another machine.
    """

    name: str
    refuses: tuple[Refusal, ...] = field(default=(), compare=False)
    placement: Placement = field(default=Placement(), compare=False)
    limits_pairs: bool = field(default=False, compare=False)
    onnx: OnnxFiles = field(default=OnnxFiles(), compare=False)
    checkpoints: CheckpointFiles = field(default=CheckpointFiles(), compare=False)
    latency_runtime: str = field(default="", compare=False)

    ONNX: ClassVar[Target]
    """ONNX Runtime on any x64 or ARM processor: int8 weights are limited so that sums of two products fit 16 bits."""
    ONNX_VNNI: ClassVar[Target]
    """ONNX Runtime on processors that add 8-bit products in 32 bits (x64 with VNNI, ARM): all codes of int8 weights."""
    OPENVINO: ClassVar[Target]
    """OpenVINO on any x64 or ARM processor, which reads ONNX files and sums in integers what is calibrated."""
    TENSORRT: ClassVar[Target]
    """TensorRT: ONNX files in int8 or with int4 weights; its `onnx.check` holds any file to the documentation."""
    EXECUTORCH: ClassVar[Target]
    """ExecuTorch's XNNPACK kernels, which return quantized outputs; see `quark_fx.export.pt2e`."""
    VLLM: ClassVar[Target]
    """vLLM, which reads the checkpoints of `quark_fx.export.huggingface` and fuses layers that read one value."""
    SGLANG: ClassVar[Target]
    """SGLang, which reads the checkpoints of `quark_fx.export.huggingface` and fuses layers that read one value."""
    TORCH: ClassVar[Target]
    """Anything the graph can express, to be run by PyTorch."""
    DPU: ClassVar[Target]
    """AMD's DPU, by way of ONNX: it multiplies by shifts, and rounds what every operator makes."""

    def refusal(self, spec: TensorSpec | None, operand: Operand) -> str | None:
        """Return why the backend does not take a spec; `None` if it does, or if there is no spec."""
        reasons = (r.why.format(spec=spec) for r in self.refuses if spec is not None and r.when(spec, operand))
        return next(reasons, None)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __deepcopy__(self, memo: object) -> Target:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return stored_target, (self.name,)  # another process has functions of its own


DEFAULT: Final = "onnx"
"""The target of configurations that name none."""

TARGETS: Final[Registry[Target, Target]] = Registry(
    "target",
    by_name=True,
    answers={"refusal": lambda *_: None, "checkpoints": CheckpointFiles()},
    remedy=f", or replace it: qmodel.config = qmodel.config.replace(target={DEFAULT!r})",
)
"""Every registered target by its name."""
_add = TARGETS.add


def register_target(target: Target) -> Target:
    """Let configurations find a target by its name. A module can register one again, as a notebook cell does.

    Raises:
        ConfigError: For anything but a `Target`, or the name of a target that another module registered.
    """
    if not isinstance(target, Target):
        raise ConfigError(f"{brief(target)} is not a Target; write register_target(Target(name=...))")
    return _add(target, target.name, depth=2)


find_target = TARGETS.find
"""Returns the target of a name; the error lists the closest one and all names."""


def stored_target(name: str) -> Target:
    """Return the target of a stored model: the registered one, or a `Stored` value in its place."""
    with keeping_stored():
        return TARGETS.make(name)


def undivided_groups(
    weight: TensorSpec, linear: Linear | None, sizes: Iterable[int], otherwise: str, *, shorter: bool = True
) -> str:
    """Return why a backend cannot run groups that do not divide the inputs of an operator; empty if they do.

    Args:
        weight: in groups or not.
        linear: the operator's geometry.
        sizes: the group sizes the backend has, of which the first that divides the inputs is proposed.
        otherwise: what to do if none does.
        shorter: whether it takes rows shorter than a group.
    """
    size, inputs = weight.group_size, 0 if linear is None else linear.shape[linear.input_axis]
    if size is None or inputs % size == 0 or (shorter and inputs < size):
        return ""
    instead = next((f"set group_size={other} for it" for other in sizes if inputs % other == 0), otherwise)
    return f"{inputs} inputs are not a multiple of the group size {size}; {instead}"


parsed(Target, ("a Target", "its name"), str, TARGETS.make, str)

__all__ = [
    *(
        "DEFAULT",
        "TARGETS",
        "CheckpointFiles",
        "OnnxFiles",
        "Operand",
        "Placement",
        "Refusal",
        "Target",
    ),
    *("find_target", "register_target", "stored_target", "undivided_groups"),
]
