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
from quark_fx.solvers.proposals import Proposal, Skip, blamed, naming_failures
from quark_fx.solvers.quantized_matrix import relative_errors
from quark_fx.solvers.slots import Slot, WeightSlot
from quark_fx.system import accelerator
from quark_fx.system.memory import give_back

Solve = Callable[[Any, Any], Proposal | Skip]
"""`Solver.solve`."""

_Check = tuple[WeightSlot, Tensor, Callable[[], Exception]]
"""A weight, a condition of its proposal, and the error if that is false (`accelerator.Check`)."""

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

    def choose(self, run: BlockRun, slots: Sequence[Slot]) -> None:
        """Choose the weights of operators that have the same input."""
        context, ranks, began = self.context, self.context.ranks, time.perf_counter()
        weights = [slot for slot in slots if isinstance(slot, WeightSlot)]
        calibration, validation = self.reading.measure_parts(weights, context)
        calibration.put_off_failures()
        validation.put_off_failures()
        self._loads = self._loads or [0.0] * ranks.count
        owners = ranks.owners([slot.real.numel() * calibration.h.shape[-1] for slot in weights], self._loads)
        assigned = [slot for slot, owner in zip(weights, owners, strict=True) if owner == ranks.index]
        changes = list[Change]()
        failed: QuarkError | None = None
        try:
            judged = self._judged(assigned, calibration, validation)
            few = int(calibration.rows.sum()) < _PLENTY * calibration.rows.numel() * calibration.h.shape[-1]
            again = few and validation is not calibration
            if again:
                calibration.add_rows_of(validation)
            del validation
            changes = self._kept(judged, calibration if again else None)
        except CalibrationError as error:
            failed = blamed((slot.name for slot in weights), error)
        except PassError as error:
            failed = error
        ranks.raise_first(failed)
        seconds = (time.perf_counter() - began) / max(1, len(assigned))
        for change in changes:
            context.note(replace(change, seconds=seconds))

    def _answer(self, slot: WeightSlot, calibration: Hessian, validation: Hessian) -> _Answer | Skip:
        """Return the proposal for an operator and its errors, which stay on the device."""
        give_back()
        now = self.reading.now(slot, self.context)
        with _naming(self.solve, slot.name), accelerator.checked_later() as checks:
            answer = _proposed(_solved(self.solve, slot, now, calibration), now)
            if isinstance(answer, Skip):
                return answer
            target = now.real
            if answer.asymmetry:
                factors = validation.factors(damping=_DAMPING, by_activation=False)
                target = validation.target(now.real, answer.asymmetry, factors)
            errors = relative_errors((now, answer.value), target, validation.h)
        return _Answer(answer, errors, checks)

    def _judged(
        self, slots: Sequence[WeightSlot], calibration: Hessian, validation: Hessian
    ) -> list[tuple[WeightSlot, _Judged | Change]]:
        """Return each proposal that is better on validation data, or the rejection to report.

        Waits for the device once, unless a factor needs more damping.
        """
        hessians = calibration, validation
        answers = [(slot, with_room(self.context, partial(self._answer, slot, *hessians))) for slot in slots]
        proposals = [(slot, answer) for slot, answer in answers if isinstance(answer, _Answer)]
        checks = [(slot, *check) for slot, answer in proposals for check in answer.checks]
        failures = [flag for hessian in hessians for flag in hessian.failures or ()]
        flags = [*(hessian.not_finite() for hessian in hessians), *failures, *(~fine for _, fine, _ in checks)]
        numbers = torch.cat(
            [*(answer.errors for _, answer in proposals), torch.stack(flags).to(torch.float32)]
        ).tolist()
        errors, wrong = iter(numbers[: 2 * len(proposals)]), numbers[2 * len(proposals) :]
        if any(wrong[:2]):
            raise CalibrationError("its input on the calibration data is not finite")
        if any(wrong[2 : 2 + len(failures)]):
            for hessian in hessians:
                hessian.wait_for_factors()
            return self._judged(slots, calibration, validation)
        self._require(checks, wrong[2 + len(failures) :])
        results = list[tuple[WeightSlot, _Judged | Change]]()
        for slot, answer in answers:
            if isinstance(answer, Skip):
                results.append((slot, Change.skipped(slot.name, answer.reason)))
                continue
            before, after = next(errors), next(errors)
            if after < before:
                results.append((slot, _Judged(answer.proposal, before, after)))
            else:
                results.append((slot, Change.skipped(slot.name, self.context.data.refusal(after), before)))
        return results

    def _require(self, checks: Sequence[_Check], wrong: Sequence[float]) -> None:
        """Raise the error of the first deferred check of a solver that failed."""
        for (slot, _, error), fails in zip(checks, wrong, strict=True):
            if fails:
                with _naming(self.solve, slot.name):
                    raise error()

    def _solved(self, slot: WeightSlot, calibration: Hessian) -> tuple[object, list[accelerator.Check]]:
        with _naming(self.solve, slot.name), accelerator.checked_later() as checks:
            return _solved(self.solve, slot, self.reading.now(slot, self.context), calibration), checks

    def _kept(self, judged: Sequence[tuple[WeightSlot, _Judged | Change]], all_rows: Hessian | None) -> list[Change]:
        """Store the accepted proposals, solved again from `all_rows` if given; return the changes to report."""
        accepted = [(slot, answer) for slot, answer in judged if isinstance(answer, _Judged)]
        wider, checks = list[object](), list[_Check]()
        for slot, _ in accepted:
            give_back()
            offer, asked = None, list[accelerator.Check]()
            if all_rows is not None:
                offer, asked = with_room(self.context, partial(self._solved, slot, all_rows))
            wider.append(offer)
            checks += [(slot, *check) for check in asked]
        offers = [
            (slot, offer)
            for (slot, answer), wide in zip(accepted, wider, strict=True)
            for offer in (wide, answer.answer)
            if isinstance(offer, Proposal)
        ]
        failures = [] if all_rows is None else list(all_rows.failures or ())
        differences = [slot.difference(offer.value) for slot, offer in offers]
        flags = [*failures, *(~condition for _, condition, _ in checks)]
        numbers = torch.cat([*differences, *(flag.double().view(1) for flag in flags)]).tolist() if offers else []
        wrong = numbers[3 * len(offers) :]
        if all_rows is not None and any(wrong[: len(failures)]):
            all_rows.wait_for_factors()
            return self._kept(judged, all_rows)
        self._require(checks, wrong[len(failures) :])
        new = {id(offer): WeightSlot.changed_parts(*numbers[3 * i : 3 * i + 3]) for i, (_, offer) in enumerate(offers)}
        wide = iter(wider)
        return [a if isinstance(a, Change) else _stored(slot, a, next(wide), new) for slot, a in judged]


def _stored(slot: WeightSlot, accepted: _Judged, wider: object, told: Mapping[int, list[str]]) -> Change:
    """Store the first proposal that can be stored; return the change to report.

    Args:
        slot: Operator of the weight.
        accepted: Accepted proposal.
        wider: Proposal solved from all rows, tried first.
        told: Parts of the weight that are new, by the identity of the proposal.
    """
    reason = ""
    for answer in (wider, accepted.answer):
        if not isinstance(answer, Proposal):
            continue
        changed = told[id(answer)]
        try:
            slot.store(answer.value)
        except OverflowError as error:
            reason = str(error)
            continue
        errors, is_wider = (accepted.before, accepted.after), answer is wider
        return Change(slot.name, _what(changed, answer), bool(changed), *errors, all_samples=is_wider)
    return Change.skipped(slot.name, reason, accepted.before)


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

    def choose(self, run: BlockRun, slots: Sequence[Slot]) -> None:
        """Choose for slots that have the same input, one after the other."""
        if run is not self._run:
            self._run, self._error = run, run.validation_error()
        began = time.perf_counter()
        try:
            data = self.reading.measure(slots, self.context, self.context.data.calibration)
        except (CalibrationError, ValueError) as error:
            raise blamed((slot.name for slot in slots), error) from error
        for slot in slots:
            change = self._tried(run, slot, data, self._error)
            self._error = self._error if change.after is None else change.after
            now = time.perf_counter()
            if self.context.ranks.index == 0:
                self.context.note(replace(change, seconds=now - began))
            began = now

    def _tried(self, run: BlockRun, slot: Slot, data: object, before: float) -> Change:
        """Store a proposal if it improves the block; return the change to report."""
        give_back()
        answer = self.context.ranks.first(lambda: with_room(self.context, lambda: self._answer(slot, data)))
        if isinstance(answer, Skip):
            return Change.skipped(slot.name, answer.reason)
        tensors, what = answer
        attempt = run.attempt(lambda: run.store_all(tensors), before)
        if attempt.error < before:
            return Change(slot.name, what, before=before, after=attempt.error)
        return Change.skipped(slot.name, attempt.failure or self.context.data.refusal(attempt.error), before)

    def _answer(self, slot: Slot, data: object) -> tuple[dict[str, Tensor], str] | Skip:
        """Return the tensors that a proposal changes, and the text to report if it is accepted."""
        try:
            answer = _proposed(_solved(self.solve, slot, slot.now, data), slot.now)
            if isinstance(answer, Skip):
                return answer
            tensors = slot.tensors(answer.value)
        except OverflowError as error:
            return Skip(str(error))
        except (CalibrationError, ValueError) as error:
            raise blamed([slot.name], error) from error
        return {name: tensor.cpu() for name, tensor in tensors.items()}, _what(slot.changed(answer.value), answer)


def _solved(solve: Solve, slot: Slot, now: object, data: object) -> object:
    with _naming(solve, slot.name):
        return solve(now, data)


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


def _what(changed: Sequence[str], answer: Proposal) -> str:
    """Return a description of the change, with the solver's remark."""
    return "; ".join(filter(None, (" and ".join(changed) or "nothing", answer.remark)))


__all__ = ["BlockJudge", "FormJudge", "Solve"]
