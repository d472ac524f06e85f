"""`analyze`: which operators make the error of a configuration, and what would make it smaller."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from quark_fx.analysis.remedies import Estimates
from quark_fx.analysis.report import Analysis, Contribution
from quark_fx.analysis.switches import RoundedValue, SwitchedGraph
from quark_fx.analysis.trials import Trials, metric_of, parts_of, samples_in
from quark_fx.config.named import PRESETS
from quark_fx.config.quant_config import QuantConfig, takes_configuration
from quark_fx.errors import ConfigError
from quark_fx.plan.placement import Plan
from quark_fx.quantization import resolve
from quark_fx.session import Session, divisible
from quark_fx.system.isolation import isolated

_NOTABLE = 0.02
"""Share of the error below which an operator gets no remedy."""

_CULPRIT = 1.5
"""Times the average of all operators that one adds before leaving it in float is proposed."""


@isolated
@takes_configuration
def analyze(
    model: nn.Module | ExportedProgram | str | Path | Session,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    metric: str = "error",
    samples: int = 32,
    top: int = 3,
    dynamic_shapes: Any = None,
) -> Analysis:
    """Return where the error that `quantize` would make comes from, operator by operator, and what helps.

    The model is captured and calibrated once. One forward and backward pass with everything rounded gives the
    derivative of the error by how far each value and each weight is rounded, which says what each adds to the error.
    These are estimates, for all operators, and as good as the model is linear in its rounding errors. Measured are, for
    the `top` of them, the error of their roundings alone and the error without them (`in_float`), and the error of the
    configuration that is proposed. What other remedies gain is estimated by what the operator alone makes of a few
    samples.

    Passes on the float graph run as in `quantize`. Passes that learn codes (`GPTQ`, `AdaRound`, …) do not: the
    analysis is of rounding to nearest, which says where learning is needed.

    Args:
        model: as for `quantize`.
        config: as for `quantize`.
        calibration_data: as for `quantize`; ranges are measured on all of it.
        metric: `"error"`, the squared error of the outputs over their square, averaged over outputs, or `"kl"`, the
            divergence of the classes that the first output's logits say.
        samples: that errors are measured on, the last ones; whole batches where these cannot be divided.
        top: how many operators are measured and get remedies.
        dynamic_shapes: as for `quantize`.

    Raises:
        ConfigError: for an unknown metric, `samples` or `top` that are no counts, a model that returns no floats that
            depend on its inputs, a quantized one whose outputs are not finite, and as `quantize`.
        CalibrationError: if there is no data, it is unusable, or the float model's outputs on it are not finite.
        CaptureError: if the model cannot be captured.

    Source:
        The derivative along the line from float to rounded is the attribution of Sundararajan et al. 2017, with one
        step; for an error that is quadratic in the roundings one step is exact.
    """
    measure = metric_of(metric)
    for name, count in (("samples", samples), ("top", top)):
        if type(count) is not int or count < 1:
            raise ConfigError(f"{name} is a number of at least 1, not {count!r}")
    preset = next((name for name in PRESETS if isinstance(config, str) and PRESETS[name] == resolve(config)), "")
    config = resolve(config)
    lacking = "analyze compares outputs on data; pass calibration_data, real inputs"
    session = Session.of(model, calibration_data, dynamic_shapes, lacking=lacking)
    with session.run(config) as context:
        trials = Trials(session, context, measure, *parts_of(context, samples, divisible=divisible(session.captured)))
        start = time.perf_counter()
        found = _analyzed(trials, config, top)
        seconds = time.perf_counter() - start
    return replace(found, metric=metric, preset=preset, seconds=seconds, forward_seconds=trials.forward_seconds)


def _analyzed(trials: Trials, config: QuantConfig, top: int) -> Analysis:
    trials.targets()
    base = trials.convert(config)
    graph = SwitchedGraph(base.float_graph, base.gm, base.plan)
    error, errors = _estimated(trials, graph)
    rows = _rows(base.plan, graph.rounded, errors)
    estimates = Estimates(base.float_graph, config, graph.rounded, errors, trials.parts[0], trials.kept[0])
    looked_at = [row for row in rows[:top] if row[0].error >= _NOTABLE * error]
    found = [estimates.remedies(operators, row.name) for row, operators, _ in looked_at]
    everything = set(range(len(graph.rounded)))
    ended = [estimates.ended(next(r.exclude for r in remedies if r.exclude)) for remedies in found]
    alone = trials.compare(graph.only(()), [graph.only(places) for *_, places in looked_at])
    without = trials.compare(graph.only(everything), [graph.only(everything - places) for places in ended])
    proposed = config
    for i, (row, operators, places) in enumerate(looked_at):
        best = found[i][0]
        if not best.exclude or row.error >= _CULPRIT * error / len(rows):
            with suppress(ConfigError):  # what two remedies ask for may not go together
                proposed = best.applied(proposed)
        measured = (replace(r, measured=error - without[i]) if r.exclude else r for r in found[i])
        rows[i] = replace(row, alone=alone[i], remedies=tuple(measured)), operators, places
    remedied = error if proposed == config else trials.error(proposed)
    if remedied > error:
        proposed, remedied = config, error
    return Analysis(
        error=error,
        rows=tuple(row for row, *_ in rows),
        config=proposed,
        remedied=remedied,
        samples=sum(map(samples_in, trials.parts)),
    )


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


_Row = tuple[Contribution, list[str], list[int]]
"""An operator, its node unless none has weights, and the places of what counts to it."""


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
