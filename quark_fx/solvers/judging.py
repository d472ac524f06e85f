"""Accept or reject proposals on validation data, and store the accepted ones: by quadratic form, or by block output."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.context import Context
from quark_fx.engine.room import with_room
from quark_fx.errors import CalibrationError, PassError, QuarkError
from quark_fx.graph.pass_manager import Change
from quark_fx.solvers.folds import InputHessian, Reading
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.places import Place, blamed
from quark_fx.solvers.products import Part, changed_parts
from quark_fx.solvers.proposals import Proposal, Skip, naming_failures
from quark_fx.system import accelerator
from quark_fx.system.memory import give_back

Solve = Callable[[Any, Any], Proposal | Skip]
"""`Solver.solve`."""

_PLENTY = 64
"""Calibration rows per input that suffice: the excess error over infinite data is about inputs / rows, so an eighth
more rows changes the error by less than 0.3 %. With fewer, an accepted operator is solved again with the validation
rows included; the report keeps the errors measured before that."""

_DAMPING = 1e-3
"""Damping of the Hessian of the validation rows when a target is solved for."""


@dataclass
class FormJudge:
    """Evaluates weights by the quadratic form of the operator's error on validation data; ranks divide the operators.

    On a device, the host waits once for the errors of all operators with the same input, and once for the changes.

    Args:
        solve: Function that proposes weights.
        reading: Reading that measures their Hessian.
        context: Context of the run.
    """

    solve: Solve
    reading: InputHessian
    context: Context
    _loads: list[float] = field(default_factory=list)

    def choose(self, run: BlockRun, places: Sequence[Place]) -> None:
        """Choose the weights of operators that have the same input."""
        context, began = self.context, time.perf_counter()
        parts = [place for place in places if isinstance(place, Part)]
        seen = judge = self.reading.measure(parts, context, context.data.calibration)
        if context.data.has_validation:
            judge = self.reading.measure(parts, context, context.data.validation)
        for moment in (seen, judge):
            moment.put_off_failures()
        self._loads = self._loads or [0.0] * context.ranks.count
        owners = context.ranks.owners([part.real.numel() * seen.h.shape[-1] for part in parts], self._loads)
        own = [part for part, owner in zip(parts, owners, strict=True) if owner == context.ranks.index]
        changes = list[Change]()
        failed: QuarkError | None = None
        try:
            judged = self._judged(own, seen, judge)
            few = int(seen.rows.sum()) < _PLENTY * seen.rows.numel() * seen.h.shape[-1]
            again = context.data.has_validation and few
            if again:
                seen.add_rows_of(judge)
            del judge
            changes = self._kept(judged, seen if again else None)
        except CalibrationError as error:
            failed = blamed(parts, error)
        except PassError as error:
            failed = error
        context.ranks.raise_first(failed)
        seconds = (time.perf_counter() - began) / max(1, len(own))
        for change in changes:
            context.note(replace(change, seconds=seconds))

    def _answer(self, part: Part, seen: Hessian, judge: Hessian) -> _Answer | Skip:
        """Return the proposal for an operator and its errors, which stay on the device."""
        give_back()
        now = self.reading.now(part, self.context)
        with accelerator.checked_later() as checks:
            answer = _proposed(_solved(self.solve, part, now, seen), now)
            if isinstance(answer, Skip):
                return answer
            target = now.real
            if answer.asymmetry:
                target = judge.target(now.real, answer.asymmetry, judge.factors(damping=_DAMPING, by_activation=False))
            errors = torch.stack([matrix.error(target, judge.h) for matrix in (now, answer.value)])
        return _Answer(answer, errors, checks)

    def _judged(self, own: Sequence[Part], seen: Hessian, judge: Hessian) -> list[tuple[Part, _Judged | Change]]:
        """Return each proposal that is better on validation data, or the rejection to report.

        Waits for the device once, unless a factor needs more damping.
        """
        answers = [(part, with_room(self.context, partial(self._answer, part, seen, judge))) for part in own]
        offered = [answer for _, answer in answers if isinstance(answer, _Answer)]
        checks = [(part, *check) for part, answer in answers if isinstance(answer, _Answer) for check in answer.checks]
        flags = [seen.not_finite(), judge.not_finite(), *(seen.failures or ()), *(judge.failures or ())]
        flags += [~condition for _, condition, _ in checks]
        read = torch.cat([*(answer.errors for answer in offered), torch.stack(flags).to(torch.float32)]).tolist()
        read, (seen_fails, judge_fails, *others) = read[: 2 * len(offered)], read[2 * len(offered) :]
        if seen_fails or judge_fails:
            raise CalibrationError("its input on the calibration data is not finite")
        if any(others[: len(others) - len(checks)]):
            for moment in (seen, judge):
                moment.wait_for_factors()
            return self._judged(own, seen, judge)
        self._require(checks, others[len(others) - len(checks) :])
        pairs, found = iter(zip(read[::2], read[1::2], strict=True)), list[tuple[Part, _Judged | Change]]()
        for part, answer in answers:
            if isinstance(answer, Skip):
                found.append((part, _skipped(part, answer)))
                continue
            before, after = next(pairs)
            refused = Change(part.name, f"skipped: no better on {self.context.data.judged_on}", False, before, before)
            found.append((part, _Judged(answer.proposal, before, after) if after < before else refused))
        return found

    def _require(self, checks: Sequence[tuple[Part, Tensor, Callable[[], Exception]]], wrong: Sequence[float]) -> None:
        """Raise the error of the first deferred check of a solver that failed."""
        for (part, _, error), fails in zip(checks, wrong, strict=True):
            if fails:
                with _naming(self.solve, part.name):
                    raise error()

    def _solved(self, part: Part, seen: Hessian) -> tuple[object, list[accelerator.Check]]:
        with accelerator.checked_later() as checks:
            return _solved(self.solve, part, self.reading.now(part, self.context), seen), checks

    def _kept(self, judged: Sequence[tuple[Part, _Judged | Change]], all_rows: Hessian | None) -> list[Change]:
        """Store the accepted proposals, solved again from `all_rows` if given; return the changes to report."""
        wider, checks = dict[str, object](), list[tuple[Part, Tensor, Callable[[], Exception]]]()
        for part, answer in judged:
            if isinstance(answer, _Judged):
                give_back()
                offer, asked = None, list[accelerator.Check]()
                if all_rows is not None:
                    offer, asked = with_room(self.context, partial(self._solved, part, all_rows))
                wider[part.weight.node.name] = offer
                checks += [(part, *check) for check in asked]
        offers = [
            (part, offer)
            for part, answer in judged
            if isinstance(answer, _Judged)
            for offer in (wider[part.weight.node.name], answer.answer)
            if isinstance(offer, Proposal)
        ]
        failures = [] if all_rows is None else list(all_rows.failures or ())
        differences = [part.difference(offer.value) for part, offer in offers]
        flags = [*failures, *(~condition for _, condition, _ in checks)]
        read = torch.cat([*differences, *(flag.double().view(1) for flag in flags)]).tolist() if offers else []
        told = read[2 * len(offers) :]
        if all_rows is not None and any(told[: len(failures)]):
            all_rows.wait_for_factors()
            return self._kept(judged, all_rows)
        self._require(checks, told[len(failures) :])
        new = {id(offer): changed_parts(*read[2 * i : 2 * i + 2]) for i, (_, offer) in enumerate(offers)}
        return [
            answer if isinstance(answer, Change) else _stored(part, answer, wider[part.weight.node.name], new)
            for part, answer in judged
        ]


def _stored(part: Part, judged: _Judged, wider: object, told: Mapping[int, list[str]]) -> Change:
    """Store the first proposal that can be stored; return the change to report.

    Args:
        part: Operator of the weight.
        judged: Accepted proposal.
        wider: Proposal solved from all rows, tried first.
        told: Parts of the weight that are new, by the identity of the proposal.
    """
    reason = ""
    for answer in (wider, judged.answer):
        if not isinstance(answer, Proposal):
            continue
        changed = told[id(answer)]
        try:
            part.store(answer.value)
        except OverflowError as error:
            reason = str(error)
            continue
        every = answer is wider
        return Change(part.name, _what(changed, answer), bool(changed), judged.before, judged.after, all_samples=every)
    return Change(part.name, f"skipped: {reason}", False, judged.before, judged.before)


@dataclass(frozen=True)
class _Answer:
    """A proposal, and the errors without and with it on validation data, shape (2,).

    `checks` are deferred conditions of the proposal.
    """

    proposal: Proposal
    errors: Tensor
    checks: list[accelerator.Check]


@dataclass(frozen=True)
class _Judged:
    """A proposal that is better on validation data, with the errors there."""

    answer: Proposal
    before: float
    after: float


@dataclass
class BlockJudge:
    """Evaluates any proposal by the block's output on validation data, with earlier accepted proposals applied.

    The first rank solves; all ranks evaluate.

    Args:
        solve: Function that proposes values.
        reading: Reading that measures its data.
        context: Context of the run.
    """

    solve: Solve
    reading: Reading
    context: Context
    _run: BlockRun | None = None
    _error: float = math.inf

    def choose(self, run: BlockRun, places: Sequence[Place]) -> None:
        """Choose for places that have the same input, one after the other."""
        if run is not self._run:
            self._run, self._error = run, run.validation_error()
        began = time.perf_counter()
        try:
            seen = self.reading.measure(places, self.context, self.context.data.calibration)
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
        """Store a proposal if it improves the block; return the change to report."""
        give_back()
        answer = self.context.ranks.first(lambda: with_room(self.context, lambda: self._answer(place, seen)))
        if isinstance(answer, Skip):
            return _skipped(place, answer)
        tensors, what = answer
        after = run.attempt(lambda: run.store_all(tensors), before)
        better = after < before
        refused = f"skipped: no better on {self.context.data.judged_on}"
        return Change(place.name, what if better else refused, better, before, after)

    def _answer(self, place: Place, seen: object) -> tuple[dict[str, Tensor], str] | Skip:
        """Return the tensors that a proposal changes, and the text to report if it is accepted."""
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
    with _naming(solve, place.name):
        return solve(now, seen)


def _naming(solve: Solve, operator: str) -> AbstractContextManager[None]:
    return naming_failures(getattr(solve, "__self__", solve), operator)


def _proposed(answer: object, now: object) -> Proposal | Skip:
    """Return a solver's answer after checking its type.

    Raises:
        PassError: If it is neither a `Skip` nor a `Proposal` of the right type.
    """
    if isinstance(answer, Skip) or (isinstance(answer, Proposal) and type(answer.value) is type(now)):
        return answer
    got = f"Proposal({type(answer.value).__name__})" if isinstance(answer, Proposal) else type(answer).__name__
    raise PassError(f"solve returns a Proposal of a {type(now).__name__}, or a Skip with a reason, not {got}")


def _skipped(place: Place, answer: Skip) -> Change:
    return Change(place.name, f"skipped: {answer.reason}", changed=False)


def _what(changed: Sequence[str], answer: Proposal) -> str:
    """Return a description of the change, with the solver's remark."""
    return "; ".join(filter(None, (" and ".join(changed) or "nothing", answer.remark)))


__all__ = ["BlockJudge", "FormJudge", "Solve"]
