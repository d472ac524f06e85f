"""`TensorSpec`: the quantization of one tensor, as a frozen and validated value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar, Self

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import Format, as_format
from quark_fx.numbers.ops import Measurement
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import FLOAT20, FLOAT32, POWER_OF_TWO, ScaleFormat, scale_format
from quark_fx.observers import Adjusted, Distribution, MinMax, NonOverflow, Observer, Placeholder, PowerOfTwoMinMse
from quark_fx.observers.base import OBSERVERS
from quark_fx.system.options import PositiveInt, checked, known_fields, parsed, plain_fields
from quark_fx.system.untrusted import brief


class Granularity(StrEnum):
    """Set of values that share one scale."""

    TENSOR = "tensor"
    CHANNEL = "channel"
    """One scale per output channel of a weight, or per head and channel of a KV cache."""
    GROUP = "group"
    """One scale per `group_size` values along the reduction dimension. For a weight, these are input channels. For an
    activation, they are values of the last dimension, or channels in a convolution, and scales are measured at run
    time."""
    HEAD = "head"
    """One scale per head of a KV cache."""
    TOKEN = "token"
    """One scale per row of the last dimension of an activation, or per token and head of a KV cache, measured at run
    time."""


@checked
@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Quantization of one tensor.

    Args:
        format: Number format of the codes.
        granularity: Set of values that share a scale.
        group_size: Number of values per group, for `Granularity.GROUP` (the last group may be shorter).
        group_rows: Number of output channels of a weight that share the scales of their groups: with group_size=128 and
            group_rows=128, one scale per block of 128x128 (the last blocks can be smaller). Solvers keep these scales.
        symmetry: Symmetry of the codes. Default: symmetric for signed formats, asymmetric for unsigned ones.
        scale: Format of the scales: a name such as "float16" or "e8m0_even", or a `QuantizedScale`.
        observer: Observer that determines the range. Default: `MinMax`, or `Placeholder` for 16-bit floats.
        dynamic: Whether the range is measured at run time instead of by calibration (activations only). The observer
            `Adjusted(ratio=...)` uses a fraction of that range.
        reduce_range: Whether to use 7 bits of an 8-bit integer format, or 15 bits of a 16-bit format: -64 to 64 of
            int8, 0 to 127 of uint8 (weights only).

    Raises:
        ConfigError: If the fields contradict each other; the message names the fix.
    """

    format: Format
    granularity: Granularity = Granularity.TENSOR
    group_size: PositiveInt | None = None
    group_rows: PositiveInt = 1
    symmetry: Symmetry | None = None
    scale: ScaleFormat = FLOAT32
    observer: Observer | None = None
    dynamic: bool = False
    reduce_range: bool = False

    earlier_fields: ClassVar[Mapping[str, str]] = {
        "sub_group_size": "sub_group_size=n with group_size=m is now group_size=n and "
        "scale=QuantizedScale(format, group_size=m // n, scale=...)",
    }
    """Advice for fields of earlier versions, by field name."""

    def __post_init__(self) -> None:
        cast = self.is_cast
        if as_format(str(self.format)) != self.format:
            raise ConfigError(
                f"format {self.format} is not registered: call quark_fx.formats.register_format with it first"
            )
        object.__setattr__(self, "symmetry", self.scheme.symmetry)
        object.__setattr__(self, "observer", self.new_observer)
        OBSERVERS.name_of(self.observer)  # raises an error if two observers have the same name
        finder = self.observer.observer if isinstance(self.observer, Adjusted) else self.observer
        for wrong, message in (
            (
                (self.granularity is Granularity.GROUP) != (self.group_size is not None),
                "`group_size` and `granularity='group'` go together: give both or neither",
            ),
            (
                self.group_rows > 1 and (not self.group_size or self.dynamic),
                "`group_rows` is for weights in groups: set granularity='group' and group_size, or drop it",
            ),
            (
                self.group_rows > 1 and (self.scale.group_size is not None or self.symmetry is Symmetry.OFFSET),
                "blocks of several rows do not support scales in groups or offsets; drop `group_rows`",
            ),
            (
                self.scale == FLOAT20,
                "scale='float20' is for the scales of a QuantizedScale; use 'float32', or 'fp8_e4m3' for E4M3 scales",
            ),
            (
                self.scale.format is not None and self.granularity is not Granularity.GROUP,
                f"scale='{self.scale}' quantizes the scales of groups; set granularity='group' and group_size",
            ),
            (
                self.scale.multiples is not None and self.dynamic,
                f"scale='{self.scale}' is for weights; use 'float32', or an 8-bit scale format such as 'e8m0_even'",
            ),
            (
                self.symmetry is Symmetry.OFFSET and (self.format.signed or self.dynamic or not self.group_size),
                "symmetry='offset' is for weights in unsigned integers, in groups: set format='uint4' and group_size",
            ),
            (
                self.symmetry is Symmetry.OFFSET and self.observer != MinMax(),
                "offsets always start at the smallest value; drop the observer, or use a pass that fits offsets "
                "(FitScales)",
            ),
            (
                self.symmetry is Symmetry.OFFSET and not self.scale.has_offsets,
                f"scale='{self.scale}' does not support offsets; use scale='float16', uint6 scales, or another "
                "symmetry",
            ),
            (
                self.scale.multiples is not None and self.symmetry is not self._symmetry_of_levels,
                f"scale='{self.scale}' needs symmetry='{self._symmetry_of_levels}'",
            ),
            (
                self.scale.is_8_bit and self.symmetry not in (Symmetry.SYMMETRIC, Symmetry.SYMMETRIC_FULL),
                f"scale='{self.scale}' does not support zero points; set symmetry='symmetric'",
            ),
            (
                not self.format.is_integer and self.symmetry is Symmetry.ASYMMETRIC,
                f"{self.format} is symmetric; drop symmetry='asymmetric' or choose an integer format",
            ),
            (
                self.symmetry is Symmetry.SIGN_AWARE
                and (self.dynamic or not self.format.is_integer or not self.format.signed),
                "symmetry='sign_aware' is for weights in signed integers",
            ),
            (
                cast and (self.granularity is not Granularity.TENSOR or self.scale != FLOAT32),
                f"{self.format} is a cast without scales; drop granularity and scale",
            ),
            (
                cast != isinstance(self.observer, Placeholder),
                f"{self.format} {'needs no range: use' if cast else 'needs a range: do not use'} the observer "
                "'placeholder'",
            ),
            (
                isinstance(finder, NonOverflow | PowerOfTwoMinMse) and self.scale != POWER_OF_TWO,
                f"observer {type(finder).__name__} chooses power-of-two scales; set scale='power_of_two'",
            ),
            (
                isinstance(finder, Distribution) and (cast or self.format.is_integer),
                f"observer Distribution fits floats of 4 to 8 bits, not {self.format}; choose another observer",
            ),
            (
                self.granularity is Granularity.TOKEN and not self.dynamic,
                "per-token scales are measured at run time; set dynamic=True",
            ),
            (
                self.dynamic and self.granularity in (Granularity.CHANNEL, Granularity.HEAD),
                f"a dynamic range is per tensor, token or group, not per {self.granularity}",
            ),
            (
                self.dynamic and self.scale != FLOAT32 and not self.scale.is_8_bit,
                "a dynamic range needs float32 scales, or 8-bit scales such as 'e8m0_even'; drop `scale`",
            ),
            (
                not self.format.signed and self.format.bits > 16,
                "unsigned codes have at most 16 bits, because zero points are int32; use uint16, or "
                f"int{self.format.bits} with target='torch'",
            ),
            (
                self.reduce_range and (self.dynamic or not self.format.is_integer or self.format.bits not in (8, 16)),
                f"reduce_range is for weights in integers of 8 or 16 bits, not {self.format}; drop it",
            ),
            (
                self.format.vector > 1 and (self.dynamic or (self.group_size or 0) % self.format.vector != 0),
                f"{self.format} is for weights, in groups of a multiple of {self.format.vector} values; set group_size",
            ),
            (self.dynamic and cast, f"{self.format} is a cast and needs no range; drop dynamic=True"),
            (
                self.scale.calibrated and not self.dynamic,
                f"scale='{self.scale}' is for activations; set dynamic=True, or scale='fp8_e4m3' for a weight",
            ),
            (
                self.dynamic
                and not self.scale.calibrated
                and self.observer not in (MinMax(), Adjusted(ratio=self.ratio)),
                "a dynamic range spans the minimum and maximum at run time, or a fraction of them; drop the observer, "
                "or use Adjusted(ratio=0.9)",
            ),
            (
                self.scale.is_8_bit and self.measures_a_share,
                f"scale='{self.scale}' always uses the full range at run time; drop the observer",
            ),
        ):
            if wrong:
                raise ConfigError(message)

    @property
    def _symmetry_of_levels(self) -> Symmetry | None:
        """Symmetry that quantized scales with integer codes require; `None` for other scales."""
        multiples = self.scale.multiples
        return None if multiples is None else Symmetry.SIGN_AWARE if multiples.signed else Symmetry.OFFSET

    @cached_property
    def scheme(self) -> Scheme:
        """Fields that determine the arithmetic: format, symmetry, scale format, and reduced range."""
        return Scheme(
            format=self.format,
            symmetry=self.symmetry or (Symmetry.SYMMETRIC if self.format.signed else Symmetry.ASYMMETRIC),
            scale=self.scale,
            reduce_range=self.reduce_range,
        )

    @property
    def new_observer(self) -> Observer:
        """Observer that determines the range, in its initial state."""
        return self.observer or (Placeholder() if self.is_cast else MinMax())

    @property
    def is_cast(self) -> bool:
        """True if the format needs only a cast and not a scale."""
        return not self.format.needs_scale

    @property
    def is_calibrated(self) -> bool:
        """True if the scales of an activation, or the second scale of its scales, come from calibration data."""
        return (not self.dynamic or self.scale.calibrated) and not self.is_cast

    @property
    def ratio(self) -> float:
        """Fraction of the range that `Adjusted` keeps; 1 for other observers."""
        return self.observer.ratio if isinstance(self.observer, Adjusted) else 1.0

    @property
    def measures_a_share(self) -> bool:
        """True if the scale covers only a fraction of the range that is measured at run time."""
        return self.dynamic and self.ratio != 1

    def measurement(self, dim: int) -> Measurement:
        """Return the arguments of `quark_fx.numbers.ops.dynamic_qparams` after the tensor, for a dynamic spec.

        Args:
            dim: Reduction dimension of the activation, which holds the groups and the channels of a token.
        """
        axis, block = None, 0
        if self.granularity is Granularity.TOKEN:
            axis, block = dim, -1
        elif self.group_size is not None:
            axis, block = dim, self.group_size
        group = block * (self.scale.group_size or 0)
        return str(self.format), str(self.symmetry), axis, block, str(self.scale), group, self.ratio

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with `changes`.

        If the format changes, a symmetry or observer that was the default becomes the default of the new format.

        Raises:
            ConfigError: If a field is unknown, or the fields of the result contradict each other.
        """
        known_fields(type(self), changes)
        if "format" in changes:
            default = TensorSpec(format=self.format)
            follow = [key for key in ("symmetry", "observer") if getattr(self, key) == getattr(default, key)]
            changes = dict.fromkeys(follow) | changes
        return replace(self, **changes)

    def __str__(self) -> str:
        rows = f"{self.group_rows}x" if self.group_rows > 1 else ""
        size = self.group_size or 0
        group = f"group {rows}" + (f"{size * self.scale.group_size}/{size}" if self.scale.group_size else f"{size}")
        shared = {Granularity.TENSOR: "", Granularity.GROUP: group}
        scales = {
            "power_of_two": "pow2",
            "fp8_e4m3": "e4m3 scales",
            "float32": "",
            "float16": "",
            "fp8_e4m3_calibrated": "e4m3 scales",
        }
        return " ".join(
            word
            for word in (
                str(self.format),
                shared.get(self.granularity, str(self.granularity)),
                scales.get(str(self.scale), str(self.scale)),
                "offset" if self.symmetry is Symmetry.OFFSET else "",
                "calibrated" if self.scale.calibrated else "",
                "dynamic" if self.dynamic else "",
                "reduced range" if self.reduce_range else "",
            )
            if word
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; fields with their default value are omitted."""
        return {"format": str(self.format), **plain_fields(self, TensorSpec(format=self.format))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a spec from plain data, the inverse of `to_dict`.

        Data of earlier versions can contain `scale_type`, the name of the scale format, and `sub_group_size`, the
        number of values per scale if groups of scales share a second scale.

        Raises:
            ConfigError: For an unknown key or value; the message lists the valid ones.
        """
        values = known_fields(cls, _with_scale(data))
        if "format" not in values:
            raise ConfigError(f"a tensor spec needs a format: {brief(dict(data))}")
        return cls(**values)


def _with_scale(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a spec, with fields of earlier versions converted to `scale` and `group_size`."""
    earlier = [key for key in ("scale_type", "sub_group_size") if isinstance(data, Mapping) and key in data]
    if not earlier:
        return data
    if "scale" in data:
        raise ConfigError(
            f"pass either scale or {earlier[0]}, not both; scale replaces the older fields scale_type and "
            "sub_group_size"
        )
    values = dict(data)
    name, group, sub = values.pop("scale_type", "float32"), values.get("group_size"), values.pop("sub_group_size", None)
    if not isinstance(name, str):
        raise ConfigError(f"scale_type is the name of a format of scales, such as 'float16', not {brief(name)}")
    if sub is None:
        return values | {"scale": scale_format(name, None)}
    if not (isinstance(sub, int) and isinstance(group, int) and sub > 0 and group % sub == 0):
        raise ConfigError(f"sub_group_size={brief(sub)} must divide group_size={brief(group)}")
    return values | {"group_size": sub, "scale": scale_format(name, group // sub)}


parsed(TensorSpec, ("a TensorSpec(format=...)", "its dict"), Mapping, TensorSpec.from_dict, TensorSpec.to_dict)
