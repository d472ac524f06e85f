"""`analyze`: which operators make the error of a configuration, and what would make it smaller."""

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
"""Share of the error below which an operator gets no remedy."""

_HELPS = 0.01
"""Share of the error that a change has to take away to be proposed."""

_MUCH = 0.5
"""Share of the error that 16-bit activations may leave to be worth a word."""

_CULPRIT = 1.5
"""Times the average of all operators that one adds before leaving it in float is proposed."""


_Row = tuple[Contribution, list[str], list[int]]
"""An operator, its node unless none has weights, and the places of what counts to it."""


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
    """Return where the error that `quantize` would make comes from, operator by operator, and what helps.

    The model is captured and calibrated once. One forward and backward pass with everything rounded gives the
    derivative of the error by how far each value and each weight is rounded, which says what each adds to the error.
    These are estimates, for all operators, and as good as the model is linear in its rounding errors. Measured are, for
    the `top` of them, the error of their roundings alone and the error without them (`in_float`). What other remedies
    gain is estimated by what the operator alone makes of a few samples. The configuration that is proposed has only
    changes that were measured to help, each on top of those before it. `advice` says whether to analyze again, and what
    16-bit activations would bring.

    Passes on the float graph run as in `quantize`. Passes that learn codes (`GPTQ`, `AdaRound`, …) do not: the
    analysis is of rounding to nearest, which says where learning is needed.

    Args:
        model: as for `quantize`.
        config: as for `quantize`.
        calibration_data: as for `quantize`; ranges are measured on all of it.
        metric: `"error"`, the squared error of the outputs over their square, averaged over outputs, or `"kl"`, the
            divergence of the classes that the first output's logits say; or a function of two lists, the tensors of the
            outputs and those of the float model, that returns a differentiable scalar. With a function, parts of one
            output can be weighted, such as boxes and scores.
        samples: that errors are measured on, the last ones; whole batches where these cannot be divided.
        top: how many operators are measured and get remedies.
        resources: As for `quantize`; only `device` and `cache` apply.
        dynamic_shapes: as for `quantize`.
        progress: Show how many configurations were measured.

    Raises:
        ConfigError: for an unknown metric, or one without a derivative, `samples` or `top` that are no counts, a model
            that returns no floats that depend on its inputs, a quantized one whose outputs are not finite, and as
            `quantize`.
        CalibrationError: if there is no data, it is unusable, or the float model's outputs on it are not finite.
        CaptureError: if the model cannot be captured.

    Source:
        The derivative along the line from float to rounded is the attribution of Sundararajan et al. 2017, with one
        step; for an error that is quadratic in the roundings one step is exact.
    """
    require_usable(resources, "analyze", OF_SESSION)
    metric, measure = metric_of(metric)
    for name, count in (("samples", samples), ("top", top)):
        if type(count) is not int or count < 1:
            raise ConfigError(f"{name} is a number of at least 1, not {count!r}")
    preset = next((name for name in PRESETS if isinstance(config, str) and PRESETS[name] == resolve(config)), "")
    config = resolve(config)
    missing = "analyze compares outputs on data; pass calibration_data, real inputs"
    session = Session.of(model, calibration_data, dynamic_shapes, resources, missing=missing)
    shown = "{desc}: {n_fmt} configurations measured [{elapsed}]"
    bar = tqdm(desc="analyze", bar_format=shown, disable=not progress, leave=False)
    with bar, session.run(config) as context:
        trials = Trials(session, context, measure, *parts_of(context, samples, divisible=divisible(session.captured)))
        start = time.perf_counter()
        found = _analyzed(trials, config, top, bar.update)
        seconds = time.perf_counter() - start
    return replace(found, metric=metric, preset=preset, seconds=seconds, forward_seconds=trials.forward_seconds)


def _analyzed(trials: Trials, config: QuantConfig, top: int, measured: Callable[[], object]) -> Analysis:
    trials.targets()
    base = trials.convert(config)
    graph = SwitchedGraph(base.float_graph, base.gm, base.plan)
    error, errors = _estimated(trials, graph)
    measured()
    rows = _rows(base.plan, graph.rounded, errors)
    estimates = Estimates(base.float_graph, config, graph.rounded, errors, trials.parts[0], trials.kept[0])
    looked_at = [row for row in rows[:top] if row[0].error >= _NOTABLE * error]
    found = [estimates.remedies(operators, row.name) for row, operators, _ in looked_at]
    everything = set(range(len(graph.rounded)))
    ended = [estimates.ended(next(r.exclude for r in remedies if r.exclude)) for remedies in found]
    alone = trials.compare(graph.only(()), [graph.only(places) for *_, places in looked_at])
    without = trials.compare(graph.only(everything), [graph.only(everything - places) for places in ended])
    proposed, remedied = config, error
    for i, (row, operators, places) in enumerate(looked_at):
        remedies = [replace(r, measured=error - without[i]) if r.exclude else r for r in found[i]]
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
    left = [row for row, *_ in rows[len(looked_at) :] if row.error >= _NOTABLE * remedied > 0]
    return Analysis(
        error=error,
        rows=tuple(row for row, *_ in rows),
        config=proposed,
        remedied=remedied,
        advice=(*_again(len(left), top, proposed != config), *_wider(trials, proposed, remedied, rows, measured)),
        samples=sum(map(samples_in, trials.parts)),
    )


def _applied(remedy: Remedy, config: QuantConfig) -> QuantConfig | None:
    """Return a configuration with a remedy; `None` if it has it, or does not go together with it."""
    try:
        changed = remedy.applied(config)
    except ConfigError:
        return None
    return None if changed == config else changed


def _again(left: int, top: int, changed: bool) -> Iterator[str]:
    """Yield what to do about operators that were not looked at and add much of what is left."""
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
    """Yield what 16-bit activations would bring, if they bring much."""
    if sum(row.activation for row, *_ in rows) <= sum(row.weight for row, *_ in rows):
        return
    with suppress(ConfigError):  # the target has none
        wide = config.replace(
            **{key: _in_16_bits(getattr(config, key)) for key in ("input", "output")},
            overrides=tuple(
                replace(o, input=_in_16_bits(o.input), output=_in_16_bits(o.output)) for o in config.overrides
            ),
        )
        if wide != config:
            found = trials.error(wide)
            measured()
            if found <= _MUCH * error:
                yield (
                    f"16-bit activations everywhere bring the error to {found:.3g} ({found / error:.1%} of what is "
                    "left, measured): give `input` and `output` format='int16', or take them where most is added"
                )


def _in_16_bits(spec: Any) -> Any:
    narrow = isinstance(spec, TensorSpec) and spec.format.is_integer and spec.format.bits < INT16.bits
    return spec.replace(format=INT16) if narrow else spec


def _estimated(trials: Trials, graph: SwitchedGraph) -> tuple[float, list[float]]:
    """Return the error with everything rounded, and what each value adds to it."""
    error, slopes = trials.slopes(graph)
    added = float(slopes.sum())
    if not (math.isfinite(error) and math.isfinite(added)):
        raise ConfigError(
            "the quantized model's output, or its derivative, is not finite on the calibration data, so no operator "
            "can be told from another; choose formats of a wider range, or exclude operators whose values are too large"
        )
    # The derivative of a square is twice itself; the rest of the factor is what is not linear.
    return error, (slopes * (error / added if added > 0 else 0.0)).tolist()


def _rows(plan: Plan, rounded: Sequence[RoundedValue], errors: Sequence[float]) -> list[_Row]:
    """Return what is rounded by the operator it counts to, the one that adds most first."""
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
