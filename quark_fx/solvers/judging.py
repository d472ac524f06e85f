"""Whether a proposal is better, and what becomes of it then: two judges."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.context import Context
from quark_fx.errors import CalibrationError, PassError, QuarkError
from quark_fx.graph.pass_manager import Change
from quark_fx.solvers.folds import InputHessian, Reading
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.places import Place, blamed
from quark_fx.solvers.products import Part
from quark_fx.solvers.proposals import Proposal, Skip, naming_failures
from quark_fx.system.memory import give_back

Solve = Callable[[Any, Any], Proposal | Skip]
"""`Solver.solve`."""

_PLENTY = 64
"""Calibration rows per input that are enough: the excess error over infinite data is about inputs / rows, so an eighth
more rows changes the error by less than 0.3 %. With fewer rows, an accepted operator is solved once more with the
validation rows included; the report keeps the errors measured before that."""

_DAMPING = 1e-3
"""Of the Hessian of the validation rows, where a target is solved for."""


@dataclass
class FormJudge:
    """Judges weights by the quadratic form of the operator's error on validation data; ranks divide the operators.

    Args:
        solve: proposes weights.
        reading: measures their Hessian.
        context: of the run.
    """

    solve: Solve
    reading: InputHessian
    context: Context
    _loads: list[float] = field(default_factory=list)

    def choose(self, run: BlockRun, places: Sequence[Place]) -> None:
        """Choose the weights of operators that read one value."""
        context, began = self.context, time.perf_counter()
        parts = [place for place in places if isinstance(place, Part)]
        seen = judge = self.reading.measure(parts, context, context.calibration)
        if context.has_validation:
            judge = self.reading.measure(parts, context, context.validation)
        self._loads = self._loads or [0.0] * context.ranks.count
        owners = context.ranks.owners([part.real.numel() * seen.h.shape[-1] for part in parts], self._loads)
        own = [part for part, owner in zip(parts, owners, strict=True) if owner == context.ranks.index]
        changes = list[Change]()
        failed: QuarkError | None = None
        try:
            answers = [(part, self._judged(part, seen, judge)) for part in own]
            few = int(seen.rows.sum()) < _PLENTY * seen.rows.numel() * seen.h.shape[-1]
            again = context.has_validation and few
            if again:
                seen.add_rows_of(judge)
            del judge
            changes = [self._kept(part, answer, seen if again else None) for part, answer in answers]
        except CalibrationError as error:
            failed = blamed(parts, error)
        except PassError as error:
            failed = error
        context.ranks.raise_first(failed)
        seconds = (time.perf_counter() - began) / max(1, len(own))
        for change in changes:
            context.note(replace(change, seconds=seconds))

    def _judged(self, part: Part, seen: Hessian, judge: Hessian) -> _Judged | Change:
        """Return the proposal for an operator if it is better on validation data, else what to note."""
        give_back()
        now = self.reading.now(part, self.context)
        answer = _proposed(_solved(self.solve, part, now, seen), now)
        if isinstance(answer, Skip):
            return _skipped(part, answer)
        target = now.real
        if answer.asymmetry:
            target = judge.target(now.real, answer.asymmetry, judge.factors(damping=_DAMPING, by_activation=False))
        before, after = (matrix.error(target, judge.h) for matrix in (now, answer.value))
        if not after < before:
            return Change(now.name, f"skipped: no better on {self.context.judged_on}", False, before, before)
        return _Judged(answer, before, after)

    def _kept(self, part: Part, judged: _Judged | Change, all_rows: Hessian | None) -> Change:
        """Store what was accepted, learned once more from `all_rows` if that is given; return what to note."""
        if isinstance(judged, Change):
            return judged
        give_back()
        now, reason = self.reading.now(part, self.context), ""
        wider = None if all_rows is None else _solved(self.solve, part, now, all_rows)
        for answer in (wider, judged.answer):
            if not isinstance(answer, Proposal):
                continue
            changed = part.changed(answer.value)
            try:
                part.store(answer.value)
            except OverflowError as error:
                reason = str(error)
                continue
            what, every = _what(changed, answer), answer is wider
            return Change(now.name, what, bool(changed), judged.before, judged.after, all_samples=every)
        return Change(now.name, f"skipped: {reason}", False, judged.before, judged.before)


@dataclass(frozen=True)
class _Judged:
    """A proposal that is better on validation data, and the errors there."""

    answer: Proposal
    before: float
    after: float


@dataclass
class BlockJudge:
    """Judges anything by what the block makes of validation data with it, and with what was accepted before.

    The first rank solves, all of them judge.

    Args:
        solve: proposes.
        reading: measures what it reads.
        context: of the run.
    """

    solve: Solve
    reading: Reading
    context: Context
    _run: BlockRun | None = None
    _error: float = math.inf

    def choose(self, run: BlockRun, places: Sequence[Place]) -> None:
        """Choose for places that read one value, one after the other."""
        if run is not self._run:
            self._run, self._error = run, run.validation_error()
        began = time.perf_counter()
        try:
            seen = self.reading.measure(places, self.context, self.context.calibration)
        except (CalibrationError, ValueError) as error:
            raise blamed(places, error) from error
        for place in places:
            change = self._tried(run, place, seen, self._error)
            self._error = self._error if change.after is None else change.after
            now = time.perf_counter()
            if self.context.ranks.index == 0:
                self.context.note(replace(change, seconds=now - began))
            began = now

    def _tried(self, run: BlockRun, place: Place, seen: object, before: float) -> Change:
        """Store a proposal if the block is better with it; return what to note."""
        give_back()
        answer = self.context.ranks.first(lambda: self._answer(place, seen))
        if isinstance(answer, Skip):
            return _skipped(place, answer)
        tensors, what = answer
        after = run.attempt(lambda: run.store_all(tensors), before)
        better = after < before
        refused = f"skipped: no better on {self.context.judged_on}"
        return Change(place.name, what if better else refused, better, before, after)

    def _answer(self, place: Place, seen: object) -> tuple[dict[str, Tensor], str] | Skip:
        """Return the tensors that a proposal changes, and what to note if it is accepted."""
        try:
            answer = _proposed(_solved(self.solve, place, place.now, seen), place.now)
            if isinstance(answer, Skip):
                return answer
            tensors = place.tensors(answer.value)
        except OverflowError as error:
            return Skip(str(error))
        except (CalibrationError, ValueError) as error:
            raise blamed([place], error) from error
        return {name: tensor.cpu() for name, tensor in tensors.items()}, _what(place.changed(answer.value), answer)


def _solved(solve: Solve, place: Place, now: object, seen: object) -> object:
    with naming_failures(getattr(solve, "__self__", solve), place.name):
        return solve(now, seen)


def _proposed(answer: object, now: object) -> Proposal | Skip:
    """Return what a solver answered.

    Raises:
        PassError: if that is no answer.
    """
    if isinstance(answer, Skip) or (isinstance(answer, Proposal) and type(answer.value) is type(now)):
        return answer
    got = f"Proposal({type(answer.value).__name__})" if isinstance(answer, Proposal) else type(answer).__name__
    raise PassError(f"solve returns a Proposal of a {type(now).__name__}, or a Skip with a reason, not {got}")


def _skipped(place: Place, answer: Skip) -> Change:
    return Change(place.name, f"skipped: {answer.reason}", changed=False)


def _what(changed: Sequence[str], answer: Proposal) -> str:
    """Say what changed, and what the solver says of it."""
    return "; ".join(filter(None, (" and ".join(changed) or "nothing", answer.remark)))


__all__ = ["BlockJudge", "FormJudge", "Solve"]
