"""`QuantConfig` and `Override`: configurations as frozen and validated values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import yaml

from quark_fx.config.selection import Selective, matches
from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import DEFAULT, Operand, Target, find_target
from quark_fx.errors import ConfigError
from quark_fx.graph.pass_manager import (
    PASSES,
    GraphPass,
    pass_name,
    pass_targets,
    require_callable,
    require_order,
)
from quark_fx.numbers.formats import INT32
from quark_fx.numbers.qparams import Symmetry
from quark_fx.system.names import keeping_stored
from quark_fx.system.options import checked, checked_call, known_fields, parsed, plain_fields
from quark_fx.system.untrusted import YAML_LIMIT, brief, parse_yaml, read_bytes


class _Inherit:
    """Type of `INHERIT`, the value of an override's field that keeps the configuration's spec."""

    def __repr__(self) -> str:
        return "INHERIT"


INHERIT: Final = _Inherit()
parsed(_Inherit, ("INHERIT",), (), lambda _: INHERIT, repr)
SpecOrInherit = TensorSpec | _Inherit | None


@checked
@dataclass(frozen=True, kw_only=True)
class Override:
    """Specs for the operators that a pattern selects; they replace the configuration's specs.

    Args:
        pattern: Glob on the module name (`"encoder.layer.0.*"`), or `"op:"` followed by a glob on the operator kind of
            `quark_fx.graph.operators` (`"op:embedding"`). `"op:head"` selects the operator that computes the output of
            the model; `"op:router"` an operator followed by a top-k, which sends tokens to experts; `"op:depthwise"` a
            depthwise convolution; `"op:adapter"` the two operators of a low-rank branch that is added to another
            operator.
        weight: Spec of the weight; `INHERIT` keeps the configuration's spec, `None` keeps the weight in float.
        input: Spec of the input, with the same special values.
        output: Spec of the output, with the same special values.
        kv_cache: Spec of the KV cache, with the same special values. Patterns match the name of the module that
            computes the attention, and `"op:attention"`.
    """

    pattern: str
    weight: SpecOrInherit = INHERIT
    input: SpecOrInherit = INHERIT
    output: SpecOrInherit = INHERIT
    kv_cache: SpecOrInherit = INHERIT

    @property
    def quantizes(self) -> bool:
        """True if the override quantizes an operand; False if it only keeps operands in float."""
        return any(isinstance(getattr(self, key), TensorSpec) for key in _PER_OPERATOR)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; inherited fields are omitted."""
        return {"pattern": self.pattern, **plain_fields(self, Override(pattern=self.pattern))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build an override from plain data, the inverse of `to_dict`; raises `ConfigError` for unknown keys."""
        values = known_fields(cls, data)
        if "pattern" not in values:
            raise ConfigError(f"an override needs a pattern: {brief(dict(data))}")
        return cls(**values)


parsed(Override, ("an Override",), Mapping, Override.from_dict, Override.to_dict)


@dataclass(frozen=True, kw_only=True)
class OperatorSpecs:
    """Specs of one operator after all overrides; `None` means float."""

    weight: TensorSpec | None
    input: TensorSpec | None
    output: TensorSpec | None
    kv_cache: TensorSpec | None


_PER_OPERATOR = tuple(f.name for f in fields(OperatorSpecs))
"""Names of the specs that overrides can change."""


@checked
@dataclass(frozen=True, kw_only=True)
class QuantConfig:
    """Configuration of a run: specs, passes, overrides, exclusions, and target.

    Args:
        weight: Spec of the weights; `None` keeps them in float.
        input: Spec of the activations that enter quantized operators; `None` means weight-only quantization.
        output: Spec of the outputs of quantized operators that an integer kernel or another quantized operator reads in
            integers; `None` keeps outputs in float.
        bias: Spec of the biases. INT32 uses the scale `input scale * weight scale`; any other format has a separate
            range.
        kv_cache: Spec of the keys and values in the cache that attention reads; `None` keeps them in float.
            `granularity="head"` means one scale per head, `"channel"` one per head and channel, `"token"` one per token
            and head, measured at run time.
        passes: Graph passes, in order. Passes on the float graph run before calibration; passes on the quantized graph
            run after conversion.
        overrides: Specs for some operators; if several overrides match, the last one wins.
        exclude: Patterns (as in `Override`) of operators that stay in float; they win over overrides.
        target: Backend that runs the result: a `quark_fx.Target`, or its name.

    Raises:
        ConfigError: If the fields contradict each other; the message names the fix.
    """

    weight: TensorSpec | None = None
    input: TensorSpec | None = None
    output: TensorSpec | None = None
    bias: TensorSpec | None = None
    kv_cache: TensorSpec | None = None
    passes: tuple[GraphPass, ...] = ()
    overrides: tuple[Override, ...] = ()
    exclude: tuple[str, ...] = ()
    target: Target = field(default_factory=partial(find_target, DEFAULT))

    def __post_init__(self) -> None:
        for item in self.passes:
            require_callable(item)
        require_order(self.passes)
        for override in (None, *self.overrides):
            self._check(self._apply(override) if override else self._specs(), override)
        if self.bias is not None and (self.bias.dynamic or self.bias.granularity is not Granularity.TENSOR):
            raise ConfigError(
                "a bias is static and per tensor (an INT32 bias follows the weight's channels automatically)"
            )
        if self.bias is not None and (self.input is None or self.input.dynamic or self.input.is_cast):
            raise ConfigError(
                "an integer bias requires statically quantized inputs; set `input` to a static spec, or bias=None"
            )
        if self.bias is not None and self.bias.format == INT32 and self.bias != TensorSpec(format=INT32):
            raise ConfigError("an INT32 bias takes its scale from input and weight; drop its other options")
        for p in self.passes:
            if (targets := pass_targets(p)) and self.target.name not in targets:
                raise ConfigError(
                    f"pass {pass_name(p)} is for target={' or '.join(map(repr, map(str, targets)))}, not "
                    f"'{self.target}'; set the target, or drop the pass"
                )

    def _specs(self) -> OperatorSpecs:
        return OperatorSpecs(**{key: getattr(self, key) for key in _PER_OPERATOR})

    def _apply(self, override: Override, specs: OperatorSpecs | None = None) -> OperatorSpecs:
        changes = {k: getattr(override, k) for k in _PER_OPERATOR}
        return replace(specs or self._specs(), **{k: v for k, v in changes.items() if v is not INHERIT})

    def _check(self, specs: OperatorSpecs, override: Override | None) -> None:
        where = f" (override {override.pattern!r})" if override else ""
        weight, input, output, cache = specs.weight, specs.input, specs.output, specs.kv_cache
        read = [spec for spec in (input, output) if spec is not None]
        activations = read if cache is None else [*read, cache]
        for wrong, message in (
            (
                weight is not None and weight.dynamic,
                "weights cannot be dynamic, because they are known before the model runs; drop dynamic=True from "
                "`weight`",
            ),
            (
                any(s.granularity is Granularity.HEAD for s in (weight, *read) if s is not None),
                "granularity='head' is for keys and values; set it on `kv_cache`, or use 'channel' or 'tensor'",
            ),
            (
                any(s.granularity is Granularity.CHANNEL for s in read),
                "activations are quantized per tensor, token or group; per channel is for weights",
            ),
            (
                any(s.granularity is Granularity.GROUP and not s.dynamic for s in activations),
                "scales of activations per group are measured at run time; set dynamic=True",
            ),
            (
                any(s.observer and s.observer.weights_only for s in activations),
                "this observer works only for weights; choose another one for activations, which are observed batch by "
                "batch",
            ),
            (
                any(s.symmetry is Symmetry.SIGN_AWARE for s in activations),
                "symmetry='sign_aware' is only for weights, because the sign of an activation is not known in advance",
            ),
            (
                output is not None and input is None,
                "`output` is set without `input`, but no kernel has integers only at its output; set `input`, or "
                "output=None",
            ),
            (
                any(s.reduce_range for s in activations),
                "reduce_range is only for weights (it keeps sums of products from saturating); drop it from "
                "activations",
            ),
            (output is not None and output.dynamic, "only inputs can be dynamic; set output=None"),
            (
                cache is not None and cache.dynamic and cache.granularity is Granularity.TENSOR,
                "a dynamic per-tensor range changes with every token, which would change the tokens already in the "
                "cache; set granularity='token' on `kv_cache`, or drop dynamic=True",
            ),
        ):
            if wrong:
                raise ConfigError(message + where)
        operands = [Operand(name) for name in (_PER_OPERATOR if override else _SPECS)]
        spec_of = {operand: getattr(self if operand is Operand.BIAS else specs, operand) for operand in operands}
        refused = dict[str, list[str]]()
        for operand, spec in spec_of.items():
            if reason := self.target.refusal(spec, operand):
                refused.setdefault(reason, []).append(f"`{operand}`")
        if refused:
            raise ConfigError("\n".join(f"{', '.join(names)}: {reason}{where}" for reason, names in refused.items()))

    def specs_for(self, name: str, *kinds: str) -> OperatorSpecs:
        """Return the specs of the operator of module `name` and the given kinds, after all overrides."""
        specs = self._specs()
        for override in self.overrides:
            if matches(override.pattern, name, *kinds):
                specs = self._apply(override, specs)
                self._check(specs, override)
        return specs

    def exclusion(self, name: str, *kinds: str) -> str:
        """Return why the operator of module `name` is excluded, or an empty string if it is not.

        `exclude` wins over `overrides`; the reason names the last override that would have quantized the operator.
        """
        pattern = next((pattern for pattern in self.exclude if matches(pattern, name, *kinds)), None)
        if pattern is None:
            return ""
        overruled = [o.pattern for o in self.overrides if o.quantizes and matches(o.pattern, name, *kinds)]
        return f"excluded by {pattern!r}" + (
            f", which takes precedence over override {overruled[-1]!r}" if overruled else ""
        )

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every pattern in `exclude`, `overrides`, and `passes`."""
        passes: tuple[object, ...] = self.passes
        limited = (pattern for p in passes if isinstance(p, Selective) for pattern in p.only)
        return (*self.exclude, *(override.pattern for override in self.overrides), *limited)

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with `changes`; `group_size=...` changes the group size of `weight`.

        Raises:
            ConfigError: If a field is unknown, or the fields of the result contradict each other.
        """
        if "group_size" in changes:
            if self.weight is None:
                raise ConfigError("group_size needs a `weight` spec, which this configuration lacks")
            weight = changes.get("weight", self.weight)
            changes["weight"] = weight.replace(group_size=changes.pop("group_size"), granularity=Granularity.GROUP)
        known_fields(type(self), changes)
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON and YAML; fields with their default value are omitted."""
        passes = {"passes": list(map(PASSES.plain, self.passes))} if self.passes else {}
        return plain_fields(self, QuantConfig()) | passes

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, stored: bool = False) -> Self:
        """Build a configuration from plain data, the inverse of `to_dict`.

        If `data` names a `preset`, its other fields replace fields of the preset. A spec that the preset also has keeps
        the fields that `data` does not set.

        Args:
            data: Plain data.
            stored: Whether to keep unregistered passes, observers, and targets as data (`Stored`). A stored model loads
                without the code of its custom passes.

        Raises:
            ConfigError: For an unknown key or value; the message lists the valid ones.
        """
        try:
            with keeping_stored(stored):
                return cls._from_dict(data)
        except ConfigError:
            raise
        except Exception as error:  # passes and observers may raise any error for an option of the wrong type
            raise ConfigError(
                f"the configuration {brief(data)} cannot be read: {type(error).__name__}: {brief(str(error))}"
            ) from error

    @classmethod
    def _from_dict(cls, data: Mapping[str, Any]) -> Self:
        if not isinstance(data, Mapping):
            raise ConfigError(f"a configuration is a mapping, not {brief(data)}")
        data = dict(data)
        base = _preset(data.pop("preset")) if "preset" in data else None
        values = known_fields(cls, data)
        for key in _SPECS:
            if (value := values.get(key)) is not None:
                spec: TensorSpec | None = getattr(base, key, None)
                values[key] = (
                    spec.replace(**value) if spec and isinstance(value, Mapping) else TensorSpec.from_dict(value)
                )
        for key in ("passes", "overrides"):
            if not isinstance(value := values.get(key) or (), list | tuple):
                raise ConfigError(f"{key} is a list, not {brief(value)}; write [{brief(value)}]")
        parsers = {"passes": PASSES.make, "overrides": Override.from_dict}
        values |= {key: tuple(map(parse, values[key] or ())) for key, parse in parsers.items() if key in values}
        values |= {"exclude": values["exclude"] or ()} if "exclude" in values else {}
        return cls(**values) if base is None else base.replace(**values)  # type: ignore[return-value]

    def to_yaml(self) -> str:
        """Return `to_dict` as YAML text.

        Raises:
            ConfigError: If an option of a pass or observer is not plain data.
        """
        try:
            return yaml.safe_dump(self.to_dict(), sort_keys=False)
        except yaml.representer.RepresenterError as error:
            raise ConfigError(
                f"an option of this configuration, {brief(error.args[-1])}, cannot be written as YAML; let the pass or "
                "observer take a number, text, a list, or a dataclass instead"
            ) from error

    @classmethod
    @checked_call
    def from_yaml(cls, source: str | Path) -> Self:
        """Build a configuration from YAML text, or from the file at a `Path`; raises the errors of `from_dict`."""
        try:
            text = read_bytes(source, YAML_LIMIT).decode("utf-8") if isinstance(source, Path) else source
            data = parse_yaml(text)
        except (OSError, ValueError) as error:
            name = str(source) if isinstance(source, Path) else brief(source)
            raise ConfigError(f"the configuration {name} cannot be read: {error}") from error
        if not isinstance(data, Mapping):
            hint = "; to read a file, pass Path(...)" if isinstance(source, str) else ""
            raise ConfigError(f"a configuration is a mapping, not {type(data).__name__}{hint}")
        return cls.from_dict(data)


_SPECS = ("weight", "input", "output", "bias", "kv_cache")
"""Names of the fields of a configuration that hold a spec."""


def _preset(name: Any) -> QuantConfig:
    from quark_fx.config.named import preset  # imports this module

    if not isinstance(name, str):
        raise ConfigError(f"preset must be the name of a preset, not {brief(name)}")
    return preset(name)


IN_CONFIGURATION: Final = {
    name: f"; {name} belongs in the configuration: write INT8_STATIC.replace({name}=...), or `.replace` on another "
    "preset"
    for name in (*(field.name for field in fields(QuantConfig)), "group_size")
}
"""Hints for arguments that are fields of a configuration, by argument name."""


__all__ = [
    "INHERIT",
    "IN_CONFIGURATION",
    "Granularity",
    "OperatorSpecs",
    "Override",
    "QuantConfig",
    "Target",
    "TensorSpec",
    "matches",
]
