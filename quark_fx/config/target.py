"""`Target`: one frozen value per backend, in a registry. `quark_fx.targets` holds the targets of the package.

To add a backend, pass a `Target` to `register_target`. Configurations, YAML, and stored models then refer to it by its
name. No code tests for a specific target: configurations, placement, training, and export read the fields of `Target`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

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
    """Tensors of an operator that can have a spec, named after the fields of `QuantConfig`."""

    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    BIAS = "bias"
    KV_CACHE = "kv_cache"


@checked
@dataclass(frozen=True)
class Refusal:
    """A rule that rejects specs that a backend does not support.

    Attributes:
        when: Function of a spec and its operand that returns True if the backend does not support the spec.
        why: Error message, which names the fix. Placeholders such as `{spec.format}` are filled in.

    Raises:
        ConfigError: If `why` has a placeholder that a spec cannot fill in.
    """

    when: Callable[[TensorSpec, Operand], bool]
    why: str

    def __post_init__(self) -> None:
        try:
            self.why.format(spec=TensorSpec(format=INT8))
        except (AttributeError, LookupError, ValueError) as error:
            raise ConfigError(
                f"why={self.why!r} of a Refusal is not a valid template: {error}; write it like {_WHY!r}"
            ) from None


_WHY = "this backend does not support {spec.format}; set format='int8'"


def _no(*_: object) -> bool:
    return False


def _yes(*_: object) -> bool:
    return True


def _taken(*_: object) -> str:
    return ""


@checked
@dataclass(frozen=True, kw_only=True)
class Placement:
    """Positions of quantizers, in addition to the inputs of operators with weights.

    Attributes:
        arithmetic: Operators without weights that run in integers, such as `"aten.add.Tensor"`.
        anywhere: Whether the operators in `arithmetic` run in integers wherever their inputs are in integers; if False,
            they do so only between quantized operators.
        rounds_output: Function that returns True if the output of an operator with a weight is always rounded. If
            False, the output is rounded only if all its consumers read it in integers.
        in_float: Kinds (such as `"lstm"`) and roles (such as `"router"`) of operators whose weights stay in float.
        rounds_input: Function of an operator's kind and an activation's spec that returns True if operators of that
            kind with a quantized weight read the activation in that spec. If False, they read it in float.
        continues: Function of two nodes that returns True if the second reads the result of the first before rounding,
            such as an activation function that a kernel applies to its sums.
        refuses: Function that returns why the backend cannot run an operator, with the fix; empty if it can. Its
            arguments are the kind, the spec of the weight, the spec of the input (`None`: float), and the geometry
            (`None` for recurrent layers and embeddings).
        fuses: Whether the backend runs siblings (`quark_fx.plan.siblings`) as one kernel, so that all siblings have the
            same specs, or all stay in float.
        branches: Whether the backend computes float branches that a pass adds next to an operator. If False, `LowRank`
            does not change anything.
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
    """Options of the backend's ONNX files.

    Attributes:
        formats: Formats of `quark_fx.export.onnx` that the backend reads, the preferred one first. Default: every
            format, with `"qdq"` first.
        opset: Default opset.
        opsets: Oldest and newest opset that the backend reads.
        runtime: Runtime whose defects the files work around: `"onnxruntime"`, or a name for which `register_workaround`
            adds rows. If empty, files have no workarounds, and ONNX Runtime may compute different values.
        rules: Rewrites for this backend alone, which run last: see `quark_fx.export.onnx`.
        check: Function that raises `ExportError` for an `onnx_ir.Model` that the backend does not load. It does not
            need to call `onnx.checker` or load the file in ONNX Runtime, because every export does both.

    Raises:
        ConfigError: If `formats` is empty, or the backend does not read the default opset.
    """

    formats: tuple[str, ...] | None = None
    opset: int = 21
    opsets: tuple[int, int] = (14, 25)
    runtime: str = ""
    rules: tuple[Any, ...] = ()
    check: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.formats == ():
            raise ConfigError("formats of OnnxFiles is empty; name at least one, such as 'qdq'")
        oldest, newest = self.opsets
        if not oldest <= self.opset <= newest:
            raise ConfigError(
                f"opset={self.opset} of OnnxFiles is outside of opsets={self.opsets}, the oldest and newest opset that "
                "the backend reads; change one of them"
            )


Unrotated = Callable[[Sequence[str], bool, int], str]
"""Function that returns why a backend does not rotate the input of an operator: see `CheckpointFiles`."""


@checked
@dataclass(frozen=True, kw_only=True)
class CheckpointFiles:
    """Options of the backend's checkpoints.

    Attributes:
        refuses: Function that returns why the backend does not read a format of `quark_fx.export.huggingface`, with the
            fix; empty if it does. Its arguments are the format, its `quantization_config`, and the names of experts'
            modules that stay in float.
        stacks: Whether compressed-tensors stores experts that stay in float as stacked tensors, which transformers
            expects if other layers are quantized. If False, each expert has separate matrices, as in a float
            checkpoint.
        fused: Names of the backend's fused layers, each with the names of the layers that it fuses. If all of these
            layers stay in float, the checkpoint also lists the fused name.
        unrotated: Function that returns why the backend does not rotate the input of an operator at run time (the
            `transform_config` of compressed-tensors), with the fix; empty if it does. Its arguments are the kinds of
            the operator in patterns, whether the operator has a bias, and the size of the matrix. `Rotate` skips
            operators for which a reason is returned. `None` means that the backend's support is unknown: checkpoints
            with rotations are refused.
    """

    refuses: Callable[[str, Mapping[str, Any], Sequence[str]], str] = _taken
    stacks: bool = True
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unrotated: Unrotated | None = None


DEFAULT: Final = "onnx"
"""Name of the default target."""

TARGETS: Final[Registry[Target, Target]] = Registry(
    "target",
    by_name=True,
    spelled=str.lower,
    answers={"refusal": lambda *_: None, "checkpoints": CheckpointFiles()},
    remedy=f", or replace it: qmodel.config = qmodel.config.replace(target={DEFAULT!r})",
)
"""Every registered target by its name."""


class _Named(type):
    """Metaclass of `Target`; makes registered targets attributes, such as `Target.ONNX`."""

    def __getattr__(cls, name: str) -> Target:
        return TARGETS.attribute(name)


@checked
@dataclass(frozen=True, kw_only=True, repr=False)
class Target(metaclass=_Named):
    """A backend: the specs it supports, its placement of quantizers, its integer limits, and its files.

    Every registered target is an uppercase attribute of this class, such as `Target.ONNX`.

    Attributes:
        name: Name in configurations. Targets with the same name are equal.
        refuses: Rules for specs that `QuantConfig` rejects; the first rule that applies gives the error message.
        placement: Positions of quantizers.
        limits_pairs: Whether weight codes are limited so that two 8-bit products, added in 16 bits, never saturate
            (`quark_fx.plan.pair_sums`).
        onnx: Options of the backend's ONNX files.
        checkpoints: Options of the backend's checkpoints (`quark_fx.export.huggingface`).
        latency_runtime: Runtime in which `quark_fx.search` measures latency: `"onnxruntime"`, `"compile"`
            (`QuantizedModel.compile`), or empty if the backend is on another machine.
    """

    name: str
    refuses: tuple[Refusal, ...] = field(default=(), compare=False)
    placement: Placement = field(default=Placement(), compare=False)
    limits_pairs: bool = field(default=False, compare=False)
    onnx: OnnxFiles = field(default=OnnxFiles(), compare=False)
    checkpoints: CheckpointFiles = field(default=CheckpointFiles(), compare=False)
    latency_runtime: str = field(default="", compare=False)

    def refusal(self, spec: TensorSpec | None, operand: Operand) -> str | None:
        """Return why the backend does not support a spec; `None` if it does, or if `spec` is `None`."""
        reasons = (r.why.format(spec=spec) for r in self.refuses if spec is not None and r.when(spec, operand))
        return next(reasons, None)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

    def __deepcopy__(self, memo: object) -> Target:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return stored_target, (self.name,)  # functions of a target are not pickled


_add = TARGETS.add


def register_target(target: Target) -> Target:
    """Register a target under its name, and return it. A module can register a name again, as in a rerun notebook cell.

    Raises:
        ConfigError: If `target` is not a `Target`, or another module registered its name.
    """
    if not isinstance(target, Target):
        raise ConfigError(f"{brief(target)} is not a Target; write register_target(Target(name=...))")
    return _add(target, target.name, depth=2)


find_target = TARGETS.find
"""Function that returns the target with a given name; its error lists the closest name and all names."""


def stored_target(name: str) -> Target:
    """Return the registered target with a stored model's target name, or a `Stored` value if there is none."""
    with keeping_stored():
        return TARGETS.make(name)


def undivided_groups(
    weight: TensorSpec, linear: Linear | None, sizes: Iterable[int], otherwise: str, *, shorter: bool = True
) -> str:
    """Return why a backend cannot run a weight whose group size does not divide the inputs; empty if it can.

    Args:
        weight: Spec of the weight, with or without groups.
        linear: Geometry of the operator.
        sizes: Group sizes that the backend supports; the first one that divides the number of inputs is proposed.
        otherwise: Fix to propose if none of `sizes` divides the number of inputs.
        shorter: Whether the backend supports rows shorter than a group.
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
