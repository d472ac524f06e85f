"""`analyze`: attribute the error of a configuration to operators, and propose remedies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from tqdm import tqdm

from quark_fx.analysis.remedies import Estimates
from quark_fx.analysis.report import Analysis, Contribution, Remedy
from quark_fx.analysis.switches import RoundedValue, SwitchedGraph
from quark_fx.analysis.trials import Metric, Trials, metric_of, parts_of, samples_in
from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.engine.resources import OF_SESSION, Resources, require_usable, takes_run
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT16
from quark_fx.plan.placement import Plan
from quark_fx.quantization import resolve
from quark_fx.session import Session, divisible
from quark_fx.system.isolation import isolated

_NOTABLE = 0.02
"""Fraction of the error that an operator must contribute for remedies to be tried."""

_HELPS = 0.01
"""Fraction of the error that a change must remove to be proposed."""

_MUCH = 0.5
"""Largest fraction of the error that may remain with 16-bit activations if they are recommended."""

_CULPRIT = 1.5
"""Contribution of an operator, relative to the average, above which leaving it in float is proposed."""


_Row = tuple[Contribution, list[str], list[int]]
"""Contribution of an operator, the name of its node (in a list, empty for a value without an operator), and the indices
of its rounded values."""


@isolated
@takes_run
def analyze(
    model: nn.Module | ExportedProgram | str | Path | Session,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    metric: str | Metric = "error",
    samples: int = 32,
    top: int = 3,
    resources: Resources = Resources(),
    dynamic_shapes: Any = None,
    progress: bool = True,
) -> Analysis:
    """Attribute the error of quantization to operators, and propose a better configuration.

    The model is captured and calibrated once. One forward and backward pass with all values rounded gives the
    derivative of the error with respect to the rounding of each value and each weight. The derivatives estimate the
    contributions of all operators; the estimates are accurate if the model is nearly linear in its rounding errors. For
    each of the `top` operators, two errors are measured: the error with only the operator's values rounded, and the
    error with all other values rounded (`in_float`). Gains of other remedies are estimated from the operator's output
    on a few samples. The proposed configuration contains only changes that reduced the measured error, each added to
    the previous changes. `advice` says whether to analyze again, and how much 16-bit activations would gain.

    Passes on the float graph run as in `quantize`. Passes that learn codes (`GPTQ`, `AdaRound`, …) do not run: the
    analysis covers rounding to nearest, and shows where learning is needed.

    Args:
        model: Model; see `quantize`.
        config: Configuration; see `quantize`.
        calibration_data: Batches; see `quantize`. Ranges are measured on all batches.
        metric: `"error"`, the squared error of the outputs relative to their square, averaged over outputs; `"kl"`, the
            KL divergence of the class probabilities from the first output's logits; or a function of two lists of
            tensors, the outputs of the quantized and of the float model, that returns a differentiable scalar. A
            function can weight parts of one output, such as boxes and scores.
        samples: Number of samples on which errors are measured, taken from the end of the data; whole batches if
            batches cannot be divided.
        top: Number of operators that are measured and get remedies.
        resources: Resources; see `quantize`. Only `device` and `cache` apply.
        dynamic_shapes: Dimensions whose size varies; see `quantize`.
        progress: Whether to show the number of measured configurations.

    Raises:
        ConfigError: If the metric is unknown or not differentiable, `samples` or `top` is below 1, the model does not
            have float outputs that depend on its inputs, or the quantized model's outputs are not finite; and for
            errors of `quantize`.
        CalibrationError: If data is missing or unusable, or the float model's outputs on the data are not finite.
        CaptureError: If the model cannot be captured.

    Source:
        The derivative along the line from float to rounded values is the attribution of Sundararajan et al. 2017
        (integrated gradients) with one step; for an error that is quadratic in the rounding errors, one step is exact.
    """
    require_usable(resources, "analyze", OF_SESSION)
    metric, measure = metric_of(metric)
    for name, count in (("samples", samples), ("top", top)):
        if type(count) is not int or count < 1:
            raise ConfigError(f"{name} must be an integer of at least 1, not {count!r}")
    preset = next((name for name in PRESETS if isinstance(config, str) and PRESETS[name] == resolve(config)), "")
    config = resolve(config)
    missing = "analyze compares outputs on data; pass batches of real inputs as calibration_data"
    session = Session.of(model, calibration_data, dynamic_shapes, resources, missing=missing)
    shown = "{desc}: {n_fmt} configurations measured [{elapsed}]"
    bar = tqdm(desc="analyze", bar_format=shown, disable=not progress, leave=False)
    with bar, session.run(config) as context:
        trials = Trials(session, context, measure, *parts_of(context, samples, divisible=divisible(session.captured)))
        start = time.perf_counter()
        analysis = _analyzed(trials, config, top, bar.update)
        seconds = time.perf_counter() - start
    return replace(analysis, metric=metric, preset=preset, seconds=seconds, forward_seconds=trials.forward_seconds)


def _analyzed(trials: Trials, config: QuantConfig, top: int, measured: Callable[[], object]) -> Analysis:
    trials.targets()
    base = trials.convert(config)
    graph = SwitchedGraph(base.float_graph, base.gm, base.plan)
    error, errors = _estimated(trials, graph)
    measured()
    rows = _rows(base.plan, graph.rounded, errors)
    estimates = Estimates(base.float_graph, config, graph.rounded, errors, trials.parts[0], trials.positions[0])
    examined = [row for row in rows[:top] if row[0].error >= _NOTABLE * error]
    candidates = [estimates.remedies(operators, row.name) for row, operators, _ in examined]
    everything = set(range(len(graph.rounded)))
    ended = [estimates.ended(next(r.exclude for r in remedies if r.exclude)) for remedies in candidates]
    alone = trials.compare(graph.only(()), [graph.only(places) for *_, places in examined])
    without = trials.compare(graph.only(everything), [graph.only(everything - places) for places in ended])
    proposed, remedied = config, error
    for i, (row, operators, places) in enumerate(examined):
        remedies = [replace(r, measured=error - without[i]) if r.exclude else r for r in candidates[i]]
        for place, remedy in enumerate(remedies):
            harmless = not remedy.exclude or (row.error >= _CULPRIT * error / len(rows) and remedy.best_known > 0)
            changed = _applied(remedy, proposed)
            if changed is None or not harmless:
                continue
            tried = trials.error(changed)
            measured()
            if not remedy.exclude:
                remedies[place] = replace(remedy, measured=remedied - tried)
            if tried <= (1 - _HELPS) * remedied:
                proposed, remedied = changed, tried
                remedies.insert(0, remedies.pop(place))
                break
        rows[i] = replace(row, alone=alone[i], remedies=tuple(remedies)), operators, places
    notable = [row for row, *_ in rows[len(examined) :] if row.error >= _NOTABLE * remedied > 0]
    return Analysis(
        error=error,
        rows=tuple(row for row, *_ in rows),
        config=proposed,
        remedied=remedied,
        advice=(*_again(len(notable), top, proposed != config), *_wider(trials, proposed, remedied, rows, measured)),
        samples=sum(map(samples_in, trials.parts)),
    )


def _applied(remedy: Remedy, config: QuantConfig) -> QuantConfig | None:
    """Add a remedy to a configuration; return `None` if the configuration already has it or does not allow it."""
    try:
        changed = remedy.applied(config)
    except ConfigError:
        return None
    return None if changed == config else changed


def _again(left: int, top: int, changed: bool) -> Iterator[str]:
    """Yield advice about operators that were not measured and add much of the remaining error.

    Args:
        left: Number of these operators.
        top: Number of operators that were measured.
        changed: Whether the proposed configuration differs from the analyzed one.
    """
    if left:
        what = (
            f"{left} more operator{'s add' if left > 1 else ' adds'} at least {_NOTABLE:.0%} of the error that is left"
        )
        how = (
            "analyze the proposed configuration: analyze(model, analysis.config, data)"
            if changed
            else f"top={top + left}"
        )
        yield f"{what}; to look at more, {how if changed else f'call analyze again with {how}'}"


def _wider(
    trials: Trials, config: QuantConfig, error: float, rows: Sequence[_Row], measured: Callable[[], object]
) -> Iterator[str]:
    """Yield the advice to use 16-bit activations, if they remove much of the error."""
    if sum(row.activation for row, *_ in rows) <= sum(row.weight for row, *_ in rows):
        return
    with suppress(ConfigError):  # the target may not support 16-bit activations
        wide = config.replace(
            **{key: _in_16_bits(getattr(config, key)) for key in ("input", "output")},
            overrides=tuple(
                replace(o, input=_in_16_bits(o.input), output=_in_16_bits(o.output)) for o in config.overrides
            ),
        )
        if wide != config:
            remaining = trials.error(wide)
            measured()
            if remaining <= _MUCH * error:
                yield (
                    f"16-bit activations everywhere bring the error to {remaining:.3g} ({remaining / error:.1%} of the "
                    "rest, measured): give `input` and `output` format='int16', or use them for the operators that add "
                    "most"
                )


def _in_16_bits(spec: Any) -> Any:
    narrow = isinstance(spec, TensorSpec) and spec.format.is_integer and spec.format.bits < INT16.bits
    return spec.replace(format=INT16) if narrow else spec


def _estimated(trials: Trials, graph: SwitchedGraph) -> tuple[float, list[float]]:
    """Return the error with all values rounded, and the estimated contribution of each value."""
    error, slopes = trials.slopes(graph)
    added = float(slopes.sum())
    if not (math.isfinite(error) and math.isfinite(added)):
        raise ConfigError(
            "the quantized model's output, or its derivative, is not finite on the calibration data, so its error "
            "cannot be attributed to operators; choose formats with a wider range, or exclude operators whose values "
            "are too large"
        )
    # The factor makes contributions add up to the error; it is 1/2 if the error is quadratic in the rounding errors.
    return error, (slopes * (error / added if added > 0 else 0.0)).tolist()


def _rows(plan: Plan, rounded: Sequence[RoundedValue], errors: Sequence[float]) -> list[_Row]:
    """Return one row per operator with its rounded values, the largest contribution first."""
    planned = {op.node.name: op for op in plan.operators}
    parts: dict[tuple[str, str, str], list[float]] = {}
    places: dict[tuple[str, str, str], list[int]] = {}
    for place, (value, error) in enumerate(zip(rounded, errors, strict=True)):
        names = [(name, planned[name].name, planned[name].kind) for name in value.operators]
        for key in names or [("", value.module, value.kind)]:
            parts.setdefault(key, [0.0, 0.0])[not value.is_weight] += error / max(1, len(names))
            places.setdefault(key, []).append(place)
    rows = []
    for i, ((node, name, kind), (weight, activation)) in enumerate(parts.items()):
        row = Contribution(name=name, kind=kind, place=i, weight=weight, activation=activation)
        rows.append((row, [node] * bool(node), places[node, name, kind]))
    return sorted(rows, key=lambda row: -row[0].error)


__all__ = ["analyze"]
