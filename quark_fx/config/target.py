"""`Target`: one frozen value per backend, in a registry. `quark_fx.targets` holds the targets of the package.

To add a backend, pass a `Target` to `register_target`. Configurations, YAML, and stored models then refer to it by its
name. No code tests for a specific target: configurations, placement, training, and export read the value's fields.
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
    """The tensors of an operator that have a spec, named after the fields of a configuration."""

    WEIGHT = "weight"
    INPUT = "input"
    OUTPUT = "output"
    BIAS = "bias"
    KV_CACHE = "kv_cache"


@checked
@dataclass(frozen=True)
class Refusal:
    """Specs that a backend does not support.

    Attributes:
        when: Function that tells whether the backend refuses a spec for an operand.
        why: Message of the error, which names the fix. Fields such as `{spec.format}` are filled in.

    Raises:
        ConfigError: If `why` has a field that no spec can fill in.
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
        anywhere: Whether these run in integers wherever their inputs are in integers; otherwise, they do so only
            between quantized operators.
        rounds_output: Function that tells whether the output of an operator with a weight is always rounded; otherwise,
            it is rounded only if all its consumers read it in integers.
        in_float: Kinds (such as `"lstm"`) and roles (such as `"router"`) of operators whose weights stay in float.
        rounds_input: Function that tells whether an operator of a kind with a quantized weight reads its activation
            with a given spec; otherwise, it reads it in float.
        continues: Function that tells whether a node works on the value it reads before rounding, such as an activation
            function that a kernel applies to its sums.
        refuses: Function that returns why the backend cannot run an operator, with the fix; empty if it can. Its
            arguments are the kind, the spec of the weight, the spec of the input (`None`: float), and the geometry
            (`None` for recurrent layers and embeddings).
        fuses: Whether the backend runs siblings (`quark_fx.plan.siblings`) as one kernel, so that all have the same
            specs, or all stay in float.
        branches: Whether the backend computes float branches that a pass adds next to an operator. `LowRank` changes
            nothing if it does not.
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
        formats: Formats of `quark_fx.export.onnx` that the backend reads, its default first. Default: every format, and
            `"qdq"` first.
        opset: Default opset.
        opsets: Oldest and newest opset that the backend reads.
        runtime: Runtime whose defects the file works around: `"onnxruntime"`, or a name for which `register_workaround`
            adds rows. Without a runtime, a file has no workarounds, and ONNX Runtime may compute other values from it.
        rules: Rewrites for this backend alone, which run last: see `quark_fx.export.onnx`.
        check: Function that raises `ExportError` for an `onnx_ir.Model` that the backend does not load. It need not
            repeat two general checks of every file: `onnx.checker` accepts it, and ONNX Runtime loads it.

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
                f"opset={self.opset} of OnnxFiles is not within opsets={self.opsets}; opsets are the oldest and the "
                "newest that the backend reads"
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
        stacks: Whether compressed-tensors stores experts that stay in float as stacks, where transformers looks for
            them if other layers are quantized; otherwise, each expert has its own matrices, as in a float checkpoint.
        fused: Names of the backend's fused layers, each with the names of the layers that it fuses. If all of these
            stay in float, the checkpoint also lists the fused name.
        unrotated: Function that returns why the backend does not rotate the input of an operator at run time (the
            `transform_config` of compressed-tensors), with the fix; empty if it does. Its arguments are the kinds of
            the operator in patterns, whether it has a bias, and the size of the matrix. `Rotate` skips operators that
            it refuses. `None` means that the backend's support is unknown: checkpoints with rotations are refused.
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
    """Class of `Target`, whose attributes include the registered targets, such as `Target.ONNX`."""

    def __getattr__(cls, name: str) -> Target:
        return TARGETS.attribute(name)


@checked
@dataclass(frozen=True, kw_only=True, repr=False)
class Target(metaclass=_Named):
    """A backend: the specs it supports, its placement of quantizers, its integer limits, and its files.

    Every registered target is an attribute in upper case, such as `Target.ONNX`.

    Attributes:
        name: Name in configurations. Targets with the same name are equal.
        refuses: Specs that `QuantConfig` refuses for it; the first one that applies gives the error.
        placement: Positions of quantizers.
        limits_pairs: Whether weight codes are limited so that two products of 8 bits, added in 16 bits, never saturate
            (`quark_fx.plan.pair_sums`).
        onnx: Options of its ONNX files.
        checkpoints: Options of its checkpoints (`quark_fx.export.huggingface`).
        latency_runtime: Runtime that `quark_fx.search` measures latency in: `"onnxruntime"`, `"compile"`
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
    """Register a target by its name. A module can register a name again, for example from a notebook cell.

    Raises:
        ConfigError: For a value that is not a `Target`, or the name of a target that another module registered.
    """
    if not isinstance(target, Target):
        raise ConfigError(f"{brief(target)} is not a Target; write register_target(Target(name=...))")
    return _add(target, target.name, depth=2)


find_target = TARGETS.find
"""Returns the target with a name; the error lists the closest name and all names."""


def stored_target(name: str) -> Target:
    """Return the target of a stored model: the registered one, or a `Stored` value in its place."""
    with keeping_stored():
        return TARGETS.make(name)


def undivided_groups(
    weight: TensorSpec, linear: Linear | None, sizes: Iterable[int], otherwise: str, *, shorter: bool = True
) -> str:
    """Return why a backend cannot run groups that do not divide an operator's inputs; empty if it can.

    Args:
        weight: Spec of the weight, with or without groups.
        linear: Geometry of the operator.
        sizes: Group sizes that the backend supports; the first one that divides the inputs is proposed.
        otherwise: Fix to propose if none does.
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
