"""Candidates of a search, and the mixed configuration that combines them."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import INHERIT, OperatorSpecs, Override, QuantConfig, TensorSpec
from quark_fx.config.selection import Named, matches, without_numbers
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FORMATS, as_format, parse_format
from quark_fx.quantization import resolve
from quark_fx.system.names import unknown

FLOAT = "float"
"""Name of the candidate that keeps all operators in float."""


@dataclass(frozen=True)
class Candidate:
    """A configuration whose specs an operator can get.

    Attributes:
        name: Name of the preset or format, or description of the weight spec.
        config: Configuration for all operators.
    """

    name: str
    config: QuantConfig

    def specs(self, operator: Named) -> OperatorSpecs | None:
        """Return the specs of an operator; `None` if it stays in float."""
        return specs_of(self.config, operator)

    @property
    def preset(self) -> str:
        """Name of the preset with this configuration; empty if it is not a preset."""
        return self.name if PRESETS.get(self.name) == self.config else ""


def specs_of(config: QuantConfig, operator: Named) -> OperatorSpecs | None:
    """Return the specs of an operator; `None` if it stays in float."""
    if config.exclusion(operator.name, *operator.kinds):
        return None
    return config.specs_for(operator.name, *operator.kinds)


def float_config(config: QuantConfig) -> QuantConfig:
    """Return the configuration with all operators in float and the same settings for the whole model."""
    return config.replace(exclude=("*",), overrides=())


def candidates_of(descriptions: Sequence[Any]) -> list[Candidate]:
    """Return the candidates that names of presets, configurations, number formats, weight specs, or `"float"` describe.

    A format or spec replaces the spec of the weights in the first configuration, or in `int8_weight_only` if there is
    none.

    Raises:
        ConfigError: If there are fewer than two candidates, two are equal, or their settings for the whole model
            differ.
    """
    if isinstance(descriptions, str | Mapping) or not isinstance(descriptions, Sequence):
        raise ConfigError(f'candidates must be a list, such as ["w4a16_rtn", "int8"], not {descriptions!r}')
    whole = {i: _configuration(one) for i, one in enumerate(descriptions)}
    first = next((config for config in whole.values() if config is not None), PRESETS["int8_weight_only"])
    candidates = [_candidate(one, whole[i], first) for i, one in enumerate(descriptions)]
    for key in ("passes", "bias", "target", "kv_cache"):
        values = [getattr(candidate.config, key) for candidate in candidates]
        for other, value in zip(candidates, values, strict=True):
            if value != values[0]:
                raise ConfigError(
                    f"the candidates {candidates[0].name!r} and {other.name!r} differ in `{key}`, but a model can have "
                    f"only one; set the same value in both: `config.replace({key}=...)`"
                )
    for place, candidate in enumerate(candidates):
        if any(candidate.config == other.config for other in candidates[:place]):
            raise ConfigError(f"the candidate {candidate.name!r} is listed twice; remove one")
    if len(candidates) < 2:
        raise ConfigError("a search needs at least two candidates to choose from")
    names = Counter(candidate.name for candidate in candidates)
    numbered = Counter[str]()
    for place, candidate in enumerate(candidates):
        if names[candidate.name] > 1:
            numbered[candidate.name] += 1
            candidates[place] = Candidate(f"{candidate.name} ({numbered[candidate.name]})", candidate.config)
    return candidates


def _configuration(description: Any) -> QuantConfig | None:
    """Return the configuration that `description` names; `None` for a spec, a number format, or `"float"`."""
    preset = isinstance(description, str) and description in PRESETS
    if not preset and (
        isinstance(description, TensorSpec) or description == FLOAT or as_format(description) is not None
    ):
        return None
    try:
        return resolve(description)
    except ConfigError as error:
        if isinstance(description, str):
            raise unknown("preset or number format", description, (*PRESETS, *FORMATS)) from error
        raise


def _candidate(description: Any, whole: QuantConfig | None, first: QuantConfig) -> Candidate:
    if whole is not None:
        names = (name for name, config in PRESETS.items() if config == whole)
        return Candidate(next(names, str(whole.weight or FLOAT)), whole)
    if description == FLOAT:
        return Candidate(FLOAT, float_config(first))
    if isinstance(description, TensorSpec):
        return Candidate(str(description), first.replace(weight=description))
    fmt = parse_format(description) if isinstance(description, str) else description
    spec = (first.weight or PRESETS["int8_weight_only"].weight or TensorSpec(format=fmt)).replace(format=fmt)
    return Candidate(str(spec), first.replace(weight=spec))


def is_expressible(candidate: Candidate, operators: Sequence[Named]) -> bool:
    """Return True if overrides can express a candidate: operators with the same name must have the same specs."""
    specs_by_name: dict[str, OperatorSpecs | None] = {}
    return all(specs_by_name.setdefault(op.name, specs) == specs for op in operators for specs in [candidate.specs(op)])


def base_of(candidates: Sequence[Candidate], chosen: Sequence[int]) -> Candidate:
    """Return the most frequent candidate of a choice, a candidate index per operator."""
    return candidates[Counter(chosen).most_common(1)[0][0]]


def mixed(candidates: Sequence[Candidate], operators: Sequence[Named], chosen: Sequence[int]) -> QuantConfig:
    """Return the configuration that gives each operator the specs of its candidate.

    The result is the most frequent candidate's configuration with overrides and exclusions for the other operators.

    Args:
        candidates: Candidates with the same settings for the whole model.
        operators: Operators of the model.
        chosen: Index of each operator's candidate.
    """
    base = base_of(candidates, chosen).config
    pairs = [(op, candidates[i].specs(op)) for op, i in zip(operators, chosen, strict=True)]
    quantized = [op for op, specs in pairs if specs is not None]
    patterns = tuple(p for p in base.exclude if not any(matches(p, op.name, *op.kinds) for op in quantized))
    base = base.replace(exclude=patterns)
    excluded, changed = list[str](), dict[Override, list[str]]()
    for op, specs in pairs:
        now = specs_of(base, op)
        if specs is None and now is not None:
            excluded.append(op.name)
        elif specs is not None and now is not None and specs != now:
            specs_by_key = {key: getattr(specs, key) for key in ("weight", "input", "output")}
            same = (key for key, value in specs_by_key.items() if value == getattr(now, key) == getattr(base, key))
            changed.setdefault(Override(pattern="", **specs_by_key | dict.fromkeys(same, INHERIT)), []).append(op.name)
    overrides = (
        replace(override, pattern=pattern)
        for override, names in changed.items()
        for pattern in _patterns(names, operators)
    )
    return base.replace(exclude=(*patterns, *_patterns(excluded, operators)), overrides=(*base.overrides, *overrides))


def _patterns(names: Sequence[str], operators: Sequence[Named]) -> list[str]:
    """Return globs that match only the given modules; names that differ only in numbers share a glob if possible."""
    modules = {*names}
    alike = {name: without_numbers(name) for name in names}
    only = {one: all(op.name in modules for op in operators if matches(one, op.name)) for one in {*alike.values()}}
    return [*dict.fromkeys(alike[name] if only[alike[name]] else glob.escape(name) for name in names)]


__all__ = ["FLOAT", "Candidate", "base_of", "candidates_of", "float_config", "is_expressible", "mixed", "specs_of"]
