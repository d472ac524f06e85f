"""`search`: choose each operator's formats for the least error under a budget."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from tqdm import tqdm

from quark_fx.analysis.trials import Metric, Trials, metric_of, parts_of, samples_in
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.block_walk import compute_weights
from quark_fx.engine.calibration_data import require_no_nan
from quark_fx.engine.resources import OF_SESSION, Resources, require_usable, takes_run
from quark_fx.errors import CalibrationError, ConfigError, QuarkError
from quark_fx.graph.pass_manager import copy_graph
from quark_fx.mixed_precision.budget import Budget
from quark_fx.mixed_precision.candidates import candidates_of
from quark_fx.mixed_precision.latency import Clock, operator_latencies, quietly, require_timed
from quark_fx.mixed_precision.program import choose
from quark_fx.mixed_precision.result import MIXED, Search, Verified
from quark_fx.mixed_precision.space import Space, least
from quark_fx.mixed_precision.written import require_room_for_trials, written_size
from quark_fx.plan.report import stored_size
from quark_fx.session import Session, divisible, flat_batches, peek
from quark_fx.system.isolation import isolated

_BETTER = 0.98
"""Ratio of errors (or sizes) below which a mixture counts as better than a uniform candidate; a smaller gain may be
luck."""

_ROUNDS = 5
"""Number of mixtures to try for a limit on error or latency; each measurement corrects the next estimate."""

_NEAR = 0.9
"""Fraction of the limit above which a measured error or latency is close enough to stop."""

_SAFE = 0.99
"""Fraction of the latency limit that the next mixture aims at, because times vary; fraction of a limit on the file size
above which a mixture is close enough to stop."""

_NOTHING = 1e-3
"""Fraction of the limit below which a measured error is treated as this fraction, to avoid a division by zero."""

_Verify = Callable[[str, QuantConfig], Verified]
"""Function of a name and a configuration that quantizes the model and measures the result."""


@isolated
@takes_run
def search(
    model: nn.Module | ExportedProgram | str | Path | Session,
    candidates: Sequence[Any],
    *,
    budget: Budget,
    data: Iterable[Any] | None = None,
    validation_data: Iterable[Any] | None = None,
    metric: str | Metric = "error",
    samples: int = 32,
    timed_batch: Any = None,
    resources: Resources = Resources(),
    dynamic_shapes: Any = None,
    progress: bool = True,
) -> Search:
    """Return the configuration with the least error under a budget; each operator gets the formats of one candidate.

    One forward and backward pass per candidate estimates the increase in error from each operator's roundings, as in
    `analyze`; an integer program then chooses one candidate per operator. Operators in one module with the same input,
    which servers fuse, get the same candidate. So do the stacks of experts of one module, and operators that share a
    weight.

    Configurations are quantized as in `quantize`, including passes that learn codes, and measured on validation data.
    Validation data does not calibrate, but decides among the configurations tried: the mixture, and each candidate that
    meets the budget for the whole model. A candidate within 2% of the mixture is returned instead. With a budget of
    the error, validation data also corrects the error allowed for the next mixture, so evaluate the result on other
    data.

    With a budget of latency, a model with each candidate is timed as a whole in the runtime of the target: the ONNX
    file of `export.onnx` in ONNX Runtime, or the result of `compile()`, on as many threads as torch uses
    (`torch.get_num_threads()`). Each operator is timed alone in the formats of each candidate, once for all operators
    of the same shapes. The integer program uses the operators' times, scaled so that their sum for a candidate is the
    time of the whole model. Mixtures are then timed as a whole, and the error of each estimate corrects the next
    mixture. The winner is timed again, because the first time of a configuration that barely meets the budget may be
    luck; it is not returned if its second time exceeds the budget.

    All times are relative to the float model, whose calls alternate with calls of the timed model, and are valid for
    this machine only. If there are several threads, ONNX Runtime's threads sleep between calls here, and every call
    wakes them. In an application whose calls follow each other closely, the threads still spin when the next call
    comes.

    Args:
        model: Model; see `quantize`.
        candidates: Names of presets, `QuantConfig`s, `"float"`, number formats, or `TensorSpec`s. A format or spec
            replaces the spec of the weights in the first configuration of the list (default: `int8_weight_only`). All
            candidates must have the same passes, biases, KV cache, and target.
        budget: Limit to meet.
        data: Batches; see `calibration_data` of `quantize`. A `Session` already has data.
        validation_data: Batches that do not calibrate but decide among the configurations tried. Default: the last
            quarter of `data`.
        metric: Metric; see `analyze`.
        samples: Number of samples on which errors are estimated, taken from the end of the calibration data.
        timed_batch: Batch for timing calls, for a budget of latency. Default: the first batch of validation data.
        resources: Resources; see `quantize`. Only `device` and `cache` apply.
        dynamic_shapes: Dimensions whose size varies; see `quantize`.
        progress: Whether to show the number of configurations measured, and the current step.

    Raises:
        ConfigError: If candidates are incompatible, their outputs are not finite, or no mixture meets the budget; see
            also `analyze`.
        CalibrationError: If data or validation data is missing, or outputs of the float model are not finite.
    """
    start = time.perf_counter()
    require_usable(resources, "search", OF_SESSION)
    metric, measure = metric_of(metric)
    if type(samples) is not int or samples < 1:
        raise ConfigError(f"samples must be an integer of at least 1, not {samples!r}")
    if not isinstance(budget, Budget):
        raise ConfigError(
            "budget must be Budget(bits=4.5), Budget(size='60MiB'), Budget(latency=0.6) or Budget(error=0.01), not "
            f"{budget!r}"
        )
    alternatives = candidates_of(candidates)
    if budget.latency is not None:
        require_timed(alternatives[0].config.target)
    elif timed_batch is not None:
        raise ConfigError("timed_batch= applies only to a latency budget; set Budget(latency=...), or omit timed_batch")
    if budget.output != "report":
        require_room_for_trials(budget.nbytes or 0)
    missing = "search compares outputs on data; pass batches of real inputs as data"
    batches, held_out = _divided(data, validation_data)
    if not isinstance(model, Session) or data is not None:
        data = batches
    session = Session.of(model, data, dynamic_shapes, resources, missing=missing)
    if not held_out:
        remedy = "pass two batches or more, or validation_data"
        if isinstance(model, Session):
            remedy = "a Session uses all of its data for calibration, so pass validation_data"
        raise CalibrationError(f"search needs validation data that is not used for calibration; {remedy}")
    captured = session.captured
    validation = [*flat_batches(captured, held_out, "validation")]
    names = [f"validation batch {index}" for index in range(len(validation))]
    for leaves, name in zip(validation, names, strict=True):
        require_no_nan(leaves, captured.signature.input_names, name)
    shown = "{desc}: {n_fmt} configurations measured [{elapsed}{postfix}]"
    bar = tqdm(desc="search", bar_format=shown, disable=not progress, leave=False)
    with bar, session.run(alternatives[0].config) as context:
        bar.set_postfix_str("estimating errors")
        trials = Trials(session, context, measure, validation, names)
        trials.targets()  # raises early if the outputs of the float model cannot be compared
        parts, of_batches = parts_of(context, samples, divisible=divisible(captured))
        space = Space.measure(Trials(session, context, measure, parts, of_batches), alternatives)

        clock = None
        if budget.latency is not None:
            timed = [*flat_batches(captured, [timed_batch], "timed")] if timed_batch is not None else validation
            clock = Clock(session, timed[0], alternatives[0].config)
        limit_ms = math.inf if clock is None else budget.milliseconds(clock.milliseconds)

        def verify(name: str, config: QuantConfig) -> Verified:
            bar.set_postfix_str(f"measuring {name}")
            qmodel = quietly(session, config)
            gm, rows = copy_graph(qmodel.graph_module), qmodel.report().rows
            compute_weights(gm)
            (error,) = trials.compare(gm, [gm])
            bits, size = space.bits_of(rows), stored_size(rows)
            if budget.output != "report":
                bar.set_postfix_str(f"writing {name}")
                try:
                    size = written_size(qmodel, budget.output)
                except QuarkError as refusal:
                    refusal.add_note(
                        f"while writing {name} as {budget.output} to measure the size that the budget limits"
                    )
                    raise
            latency = None if clock is None else clock.time(qmodel)
            fits = math.isfinite(error) and all(
                limit is None or amount <= limit
                for amount, limit in ((bits, budget.bits), (size, budget.nbytes), (error, budget.error))
            )
            fits = fits and (latency or 0.0) <= limit_ms
            bar.update()
            return Verified(name=name, bits=bits, size=size, error=error, latency=latency, fits=fits)

        if clock is not None:
            bar.set_postfix_str("timing operators")
            alone = operator_latencies(space.float_graph, clock.leaves, alternatives, space.operators, space.groups)
            space, tried = _by_latency(space, alone, budget, limit_ms, verify)
        elif budget.output != "report":
            space, tried = _by_written_size(space, budget, verify)
        else:
            tried = _by_error(space, budget.error, verify) if budget.error else _by_size(space, budget, verify)
    (winner, chosen), *_ = tried
    return Search(
        config=alternatives[chosen[0]].config if winner.name != MIXED else space.config(chosen),
        winner=winner.name,
        preset=space.preset(chosen),
        budget=budget,
        metric=metric,
        candidates=tuple(candidate.name for candidate in alternatives),
        verified=tuple(one for one, _ in tried),
        curve=tuple(space.curve()),
        choices=tuple(space.choices(chosen)),
        samples=sum(map(samples_in, parts)),
        verified_on=sum(map(samples_in, trials.parts)),
        float_latency=None if clock is None else clock.milliseconds,
        seconds=time.perf_counter() - start,
    )


def _divided(data: Any, validation_data: Any) -> tuple[list[Any], list[Any]]:
    """Split the data into batches for calibration and estimates, and batches for validation."""
    _, batches = peek(data)
    batches, (_, held_out) = [*batches], peek(validation_data, "validation")
    held_out = [*held_out]
    if validation_data is None and len(batches) > 1:
        count = max(1, len(batches) // 4)
        batches, held_out = batches[:-count], batches[-count:]
    return batches, held_out


_Tried = list[tuple[Verified, list[int]]]
"""Measurements of configurations, each with the candidate index of every group; ranked lists begin with the winner."""


def _by_size(space: Space, budget: Budget, verify: _Verify) -> _Tried:
    """Measure configurations that meet a budget of bits or bytes; return them with the least error first."""
    count = sum(space.weights.values())
    limit = math.floor(budget.bits * count / 8) if budget.bits is not None else (budget.nbytes or 0) - space.fixed
    choices = [chosen for chosen in _uniform(space) if space.total(chosen) <= limit]
    mixture = choose(space.errors, space.sizes, limit)
    if mixture is not None:
        choices += [settled] if (settled := space.settled(mixture)) not in choices else []
    if not choices:
        smallest = int(min(least(space.sizes, space.errors), *map(space.total, _uniform(space))))
        raise ConfigError(
            f"no combination of these candidates fits {budget}: the smallest takes {space.bits(smallest):.4g} bits per "
            f"weight ({space.fixed + smallest:,} bytes, {space.fixed:,} of them in weights that stay in float); raise "
            "the budget or add a candidate with fewer bits"
        )
    tried = [(_verify(space, chosen, verify), chosen) for chosen in choices]
    _require_finite(tried)
    return _ranked(tried, lambda one: one.error)


def _by_written_size(space: Space, budget: Budget, verify: _Verify) -> tuple[Space, _Tried]:
    """Return the space with written sizes, and the measurements, with the least error within the budget first.

    The candidates' files show how much larger weights are when written; the size of each mixture's file corrects the
    target for the next mixture.
    """
    limit = budget.nbytes or 0
    tried = [(_verify(space, chosen, verify), chosen) for chosen in _uniform(space)]
    space = space.written([one.size for one, _ in tried])
    target, mixtures = limit - space.fixed, _Tried()
    for _ in range(_ROUNDS):
        mixture = choose(space.errors, space.sizes, target)
        if (settled := _untried(space, mixture, [*tried, *mixtures])) is None:
            break
        one = _verify(space, settled, verify)
        mixtures.append((one, settled))
        if _SAFE * limit <= one.size <= limit:
            break
        target += limit - one.size
    _require_finite([*tried, *mixtures])
    best_mixture = sorted(mixtures, key=lambda pair: (not pair[0].fits, pair[0].error))[:1]
    ranked = _ranked([*best_mixture, *tried], lambda one: one.error)
    if not ranked[0][0].fits:
        smallest = min((one for one, _ in (*tried, *mixtures)), key=lambda one: one.size)
        raise ConfigError(
            f"no combination of these candidates fits {budget}: the smallest one written takes {smallest.size:,} bytes "
            f"({smallest.name}); raise the budget or add a candidate with fewer bits"
        )
    return space, ranked


def _by_latency(
    space: Space, alone: Sequence[Sequence[float]], budget: Budget, limit: float, verify: _Verify
) -> tuple[Space, _Tried]:
    """Return the space with latencies, and the measurements, with the least error within the budget first.

    The winner is timed twice, and its second latency counts, because ranking favors first latencies that are too low.

    Args:
        space: Space without latencies.
        alone: Latency of each group's operators, timed alone, in milliseconds, by group and candidate.
        budget: Budget of latency.
        limit: Budget in milliseconds.
        verify: Function that measures a configuration.
    """
    tried = [(_verify(space, chosen, verify), chosen) for chosen in _uniform(space)]
    space = space.timed(alone, [one.latency or 0.0 for one, _ in tried])
    target, mixtures, again = limit, _Tried(), list[list[int]]()
    for _ in range(_ROUNDS):
        # If the corrected target is below the latency of the fastest mixture, that mixture is tried.
        mixture = choose(space.errors, space.latencies, max(target, least(space.latencies, space.errors) * (1 + 1e-9)))
        if (settled := _untried(space, mixture, [*tried, *mixtures])) is None:
            break
        one = _verify(space, settled, verify)
        if one.fits and (one.latency or 0.0) >= _NEAR * limit:
            one = _verify(space, settled, verify)
            again.append(settled)
        mixtures.append((one, settled))
        if one.latency is None or _NEAR * limit <= one.latency <= limit:
            break
        target *= _SAFE * limit / one.latency
    _require_finite([*tried, *mixtures])
    while True:
        best_mixture = sorted(mixtures, key=lambda pair: (not pair[0].fits, pair[0].error))[:1]
        ranked = _ranked([*best_mixture, *tried], lambda one: one.error)
        first, chosen = ranked[0]
        if not first.fits or chosen in again:
            break
        again.append(chosen)
        pairs = mixtures if ranked[0] in mixtures else tried
        pairs[pairs.index(ranked[0])] = (_verify(space, chosen, verify), chosen)
    if not first.fits:
        fastest = min((one for one, _ in (*tried, *mixtures)), key=lambda one: one.latency or 0.0)
        raise ConfigError(
            f"no combination of these candidates fits {budget}: the fastest one measured takes {fastest.latency:.4g} "
            f"ms ({fastest.name}), but the limit is {limit:.4g} ms; raise the budget or add a faster candidate"
        )
    return space, ranked


def _by_error(space: Space, ceiling: float, verify: _Verify) -> _Tried:
    """Measure configurations for a limit on the error; return them with the smallest size within the limit first."""
    tried: _Tried = []
    target, floor = ceiling, sum(min(row) for row in space.errors)
    for _ in range(_ROUNDS):
        mixture = choose(space.sizes, space.errors, max(target, floor * (1 + 1e-9)))
        if (settled := _untried(space, mixture, tried)) is None:
            break
        one = _verify(space, settled, verify)
        tried.append((one, settled))
        if one.fits and one.error >= _NEAR * ceiling:
            break
        target *= ceiling / max(one.error, _NOTHING * ceiling)
    smallest = min((one.size for one, _ in tried if one.fits), default=math.inf)
    for chosen in _uniform(space):
        small = space.fixed + space.total(chosen) <= smallest / _BETTER
        if small and all(chosen != other for _, other in tried):
            tried.append((_verify(space, chosen, verify), chosen))
    _require_finite(tried)
    if not any(one.fits for one, _ in tried):
        best = min((one for one, _ in tried), key=lambda one: one.error)
        raise ConfigError(
            f"no combination of these candidates fits {Budget(error=ceiling)}: the smallest error measured is "
            f"{best.error:.3g} ({best.name}); raise the budget or add a candidate with more bits"
        )
    mixtures = [pair for pair in tried if pair[0].name == MIXED]
    best_mixture = sorted(mixtures, key=lambda pair: (not pair[0].fits, pair[0].size))[:1]
    return _ranked([*best_mixture, *(pair for pair in tried if pair[0].name != MIXED)], lambda one: one.size)


def _uniform(space: Space) -> Iterator[list[int]]:
    """Yield, for every candidate, the choice of that candidate for all groups."""
    for i in range(len(space.candidates)):
        yield [i] * len(space.groups)


def _untried(space: Space, mixture: Sequence[int] | None, tried: _Tried) -> list[int] | None:
    """Return `Space.settled` of a mixture; `None` if the mixture is `None` or has been measured."""
    settled = None if mixture is None else space.settled(mixture)
    return None if any(settled == chosen for _, chosen in tried) else settled


def _verify(space: Space, chosen: Sequence[int], verify: _Verify) -> Verified:
    if len({*chosen}) > 1:
        return verify(MIXED, space.config(chosen))
    return verify(space.candidates[chosen[0]].name, space.candidates[chosen[0]].config)


def _require_finite(tried: _Tried) -> None:
    if not any(math.isfinite(one.error) for one, _ in tried):
        raise ConfigError(
            f"no configuration that was tried ({', '.join(one.name for one, _ in tried)}) has finite outputs on the "
            "validation data; add a candidate with a wider range, such as 'int8_weight_only' or 'float', or raise the "
            "budget"
        )


def _ranked(tried: _Tried, quantity: Callable[[Verified], float]) -> _Tried:
    """Return the configurations that meet the budget, then the others, both sorted by `quantity`.

    A mixture precedes another configuration only if it is 2% better.
    """

    def key(pair: tuple[Verified, list[int]]) -> tuple[bool, float]:
        one, _ = pair
        return not one.fits, quantity(one) / (_BETTER if one.name == MIXED else 1.0)

    return sorted(tried, key=key)


__all__ = ["search"]
