"""A solver proposes new values; the framework accepts or rejects them, and does everything else.

A solver declares the values it chooses (`chooses`: weights, biases, or scales of activations) and the data it needs
(`reads`). The framework walks the blocks, measures that data across ranks, shares it among operators with the same
input, and evaluates each proposal on validation data; a proposal that is not better there is rejected.
If data is scarce, accepted weights are solved again with the validation data included. The framework reports errors,
resumes interrupted runs, and predicts memory.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import BlockRun, walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.calibration_data import refusal
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.sizes import FLOAT32, BlockSize, Matrices, Need, Sizes
from quark_fx.errors import CalibrationError, ConfigError, Declined, PassError, QuarkError
from quark_fx.graph.pass_manager import Change, Stage, graph_pass
from quark_fx.solvers.folds import Input, OutputError
from quark_fx.solvers.hessian import Hessian, InputHessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix, relative_errors
from quark_fx.solvers.slots import Activation, Bias, Reading, Slot, WeightSlot, slots_of
from quark_fx.system import accelerator
from quark_fx.system.memory import give_back, is_shortage
from quark_fx.system.untrusted import brief

S = TypeVar("S", bound=type)

_PLENTY = 64
"""Number of calibration rows per input that is enough: the excess error relative to infinite data is about
inputs / rows, so an eighth more rows changes the error by less than 0.3 %. With fewer rows, an accepted operator is
solved again with the validation rows included; the report keeps the errors measured before that."""

_DAMPING = 1e-3
"""Damping of the Hessian of the validation rows, used to compute the target of an asymmetric proposal."""


@dataclass(frozen=True)
class Proposal:
    """New value proposed by a solver.

    Attributes:
        value: Replacement for the current value, of the same type: `QuantizedMatrix`, `Bias`, or `Activation`.
        remark: Text appended to the value's row in the report.
        asymmetry: For solvers that use `Hessian.shift`, the position of the target that a weight is compared with: 0
            is the float weight's output on quantized inputs, 1 the float model's output on its own inputs.
    """

    value: Any
    remark: str = ""
    asymmetry: float = 0.0


@dataclass(frozen=True)
class Skip:
    """Answer of a solver that proposes nothing, with the reason for the report."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Solver(Selective, ABC):
    """Base class of passes that choose weights, biases, or scales of activations, one after another, from data.

    A subclass is a frozen dataclass of options with a `solve` method, decorated with `solver`. It is a pass of the
    quantized stage, named after its class.

    Attributes:
        chooses: `QuantizedMatrix` (codes and scales of weights), `Bias`, or `Activation` (static scales and zero
            points).
        registered_by: Name of the decorator.
    """

    registered_by: ClassVar[str] = "solver"
    chooses: ClassVar[type[QuantizedMatrix | Bias | Activation]] = QuantizedMatrix

    @property
    def reads(self) -> Reading:
        """Data that `solve` gets: `InputHessian()`, `Input(observer)`, or `OutputError()`."""
        return InputHessian()

    @property
    def learns(self) -> bool:
        """True if `reads` measures calibration data."""
        return True

    @abstractmethod
    def solve(self, now: Any, seen: Any) -> Proposal | Skip:
        """Return a proposal to replace `now`, or a reason to skip it.

        Args:
            now: Current value: a `QuantizedMatrix` with the float weight, a `Bias`, or an `Activation`.
            seen: Data that `reads` measured on the calibration batches of all ranks, with everything before the
                operator quantized. Operators with the same input get the same object, unless the data is guided.

        Raises:
            CalibrationError: For data that cannot be used; the engine adds the names of the operators.
        """

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes that `solve` needs besides its data; default: six float32 copies of a weight."""
        return 6 * FLOAT32 * matrices.values

    def working_operations(self, matrices: Matrices) -> float:
        """Return the number of multiplications in `solve`; default: those of the weight times the Hessian."""
        return matrices.inputs * matrices.values

    @property
    def _reading(self) -> Reading:
        """Data that `solve` gets, after a check.

        Raises:
            ConfigError: If `reads` is not a `Reading`, or does not fit `chooses`.
        """
        name, reads, chosen = type(self).__name__, self.reads, self.chooses.__name__
        if not isinstance(reads, Reading):
            raise ConfigError(
                f"reads of {name} must be InputHessian(), Input(observer) or OutputError(), not {brief(reads)}"
            )
        if self.chooses not in reads.choices:
            names = ", ".join(r.__name__ for r in (InputHessian, Input, OutputError) if self.chooses in r.choices)
            raise ConfigError(
                f"{name} chooses {chosen}, but {type(reads).__name__} has no data for that choice; set reads to {names}"
            )
        return reads

    @property
    def _form(self) -> InputHessian | None:
        """Quadratic form that proposals are evaluated by, or `None` if it does not cover their whole effect."""
        reads = self._reading
        return reads if self.chooses is QuantizedMatrix and isinstance(reads, InputHessian) else None

    @property
    def _side_by_side(self) -> bool:
        """True if values of the float model are computed as well."""
        return self._form is None or self._form.shifted

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Choose better values in `gm`; return how many values changed."""
        reads, form, find = self._reading, self._form, slots_of(self.chooses, gm, context, self)
        judge = _BlockJudge(self, reads, context) if form is None else _FormJudge(self, form, context)
        label = type(self).__name__
        if form is not None:
            form.guidance(context)  # before blocks and their inputs take memory
        how = {"side_by_side": self._side_by_side, "runs": self.learns}
        for run in walk_blocks(gm, context, unit=Unit.OPERATOR, label=label, **how):
            for slots in () if run.finished else find(run):
                for group in [slots] if reads.shared else [(slot,) for slot in slots]:
                    judge.choose(run, group)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: Hessians of both parts of the data, or runs of blocks, and `working_bytes`."""
        sizes = sizes if self.learns else replace(sizes, batches=0.0)
        by_form, hessians = self._form is not None, 2 * (1 + self._side_by_side)
        guided, two_sided = (form.guided, form.two_sided) if (form := self._form) is not None else (False, False)

        def measuring(block: BlockSize) -> int:
            # Rows of another dtype and weighted rows are copied.
            copies = [guided + (m.itemsize != FLOAT32) for m in block.matrices]
            copied = (FLOAT32 * m.rows * m.inputs * n for m, n in zip(block.matrices, copies, strict=True))
            pairs = zip(block.matrices, copied, strict=True)
            measured = (hessians * m.moment + block.entrances + rows for m, rows in pairs)
            solved = (hessians * m.moment + self.working_bytes(m) for m in block.matrices)
            return max((*measured, *solved), default=0)

        def running(block: BlockSize) -> int:
            weights = block.matrices if self.chooses is QuantizedMatrix else ()
            return max((2 * block.forward, *map(self.working_bytes, weights)))

        def work(block: BlockSize) -> float:
            if self.chooses is not QuantizedMatrix:
                return 0.0
            measured = (m.inputs * m.inputs * m.rows * sizes.batches * by_form for m in block.matrices)
            return sum(measured) + sum(map(self.working_operations, block.matrices))

        turn = measuring if by_form else running
        before = sizes.back_walk() if guided or two_sided else Need(())
        need = before + sizes.walk(Unit.OPERATOR, turn, streams=1 + self._side_by_side, work=work)
        if not two_sided:
            return need
        matrices = sizes.matrices.values()  # `Guidance.outputs` stays in memory until the end
        outputs = sum(map(together_bytes, matrices)) + max(
            (2 * FLOAT32 * m.rows * m.outputs for m in matrices), default=0
        )
        operations = need.operations + int(sum(m.rows * together_bytes(m) / 2 for m in matrices) * sizes.batches)
        moments = tuple(replace(moment, working=moment.working + outputs) for moment in need.moments)
        return replace(need, moments=moments, operations=operations)


def solver(cls: S) -> S:
    """Register a `Solver` or `GradientSolver` as a pass under its name.

    Raises:
        ConfigError: If `chooses` is not a class that solvers can choose.
    """
    kinds, chosen = (QuantizedMatrix, Bias, Activation), getattr(cls, "chooses", QuantizedMatrix)
    if chosen not in kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise ConfigError(f"{cls.__name__}.chooses must be one of the classes {names}, not {brief(chosen)}")
    register: Any = graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True, validated=True)
    registered: S = register(cls)
    return registered


@dataclass
class _FormJudge:
    """Evaluator of weights by the quadratic form of an operator's error on validation data; ranks divide the operators.

    On a device, the host waits once for all operators with the same input, and once more if they are solved again.
    """

    solver: Solver
    reading: InputHessian
    context: Context
    _loads: list[float] = field(default_factory=list)

    def choose(self, run: BlockRun, slots: Sequence[Slot]) -> None:
        """Choose the weights of operators that have the same input."""
        context, ranks, began = self.context, self.context.ranks, time.perf_counter()
        weights = [slot for slot in slots if isinstance(slot, WeightSlot)]
        try:
            calibration, validation = self.reading.measure_parts(weights, context)
        except Declined as declined:
            for slot in weights:
                context.note(Change.skipped(slot.name, declined.reason))
            return
        self._loads = self._loads or [0.0] * ranks.count
        owners = ranks.owners([slot.real.numel() * calibration.h.shape[-1] for slot in weights], self._loads)
        assigned = [slot for slot, owner in zip(weights, owners, strict=True) if owner == ranks.index]
        changes = list[Change]()
        failed: QuarkError | None = None
        try:
            answers = dict(zip(assigned, self._answers(assigned, calibration, validation), strict=True))
            accepted = [slot for slot, a in answers.items() if isinstance(a, _Offer) and a.after < a.before]
            wider = dict[WeightSlot, _Offer | Skip]()
            few = int(calibration.rows.sum()) < _PLENTY * calibration.rows.numel() * calibration.h.shape[-1]
            if few and validation is not calibration:
                calibration.add_rows_of(validation)
                del validation
                wider = dict(zip(accepted, self._answers(accepted, calibration), strict=True)) if accepted else {}
            changes = [self._change(slot, answer, wider.get(slot)) for slot, answer in answers.items()]
        except CalibrationError as error:
            failed = blamed((slot.name for slot in weights), error)
        except PassError as error:
            failed = error
        ranks.raise_first(failed)
        seconds = (time.perf_counter() - began) / max(1, len(assigned))
        for change in changes:
            context.note(replace(change, seconds=seconds))

    def _answers(
        self, slots: Sequence[WeightSlot], hessian: Hessian, validation: Hessian | None = None
    ) -> list[_Offer | Skip]:
        """Return the solver's answer for each operator, with its errors if there is validation data.

        Waits for the device once, unless a factor needs more damping.
        """
        hessians = [hessian] if validation is None else [hessian, validation]
        for one in hessians:
            one.put_off_failures()
        while True:
            answers = [self.context.with_room(partial(self._answer, slot, hessian, validation)) for slot in slots]
            checks = [(slot, *check) for slot, (*_, checks) in zip(slots, answers, strict=True) for check in checks]
            failures = [flag for one in hessians for flag in one.failures or ()]
            flags = [*(one.not_finite() for one in hessians), *failures, *(~fine for _, fine, _ in checks)]
            read = torch.cat([*(numbers for _, numbers, _ in answers), torch.stack(flags).double()]).tolist()
            numbers, wrong = iter(read), iter(read[-len(flags) :])
            infinite, invalid, unmet = (list(islice(wrong, len(part))) for part in (hessians, failures, checks))
            if any(infinite):
                raise CalibrationError("its input on the calibration data is not finite")
            if not any(invalid):
                break
            for one in hessians:
                one.wait_for_factors()
        for (slot, _, error), fails in zip(checks, unmet, strict=True):
            if fails:
                with naming_failures(self.solver, slot.name):
                    raise error()
        return [answer if isinstance(answer, Skip) else _Offer(answer, *islice(numbers, 5)) for answer, *_ in answers]

    def _answer(
        self, slot: WeightSlot, hessian: Hessian, validation: Hessian | None
    ) -> tuple[Proposal | Skip, Tensor, list[accelerator.Check]]:
        """Return the solver's answer, the numbers of its `_Offer` on the device, and deferred checks."""
        give_back()
        now = self.reading.now(slot, self.context)
        with naming_failures(self.solver, slot.name), accelerator.checked_later() as checks:
            answer = _proposed(self.solver, self.solver.solve(now, hessian), slot.name, now)
            if isinstance(answer, Skip):
                return answer, hessian.h.new_empty(0, dtype=torch.float64), []
            errors = hessian.h.new_zeros(2)
            if validation is not None:
                target = now.real
                if answer.asymmetry:
                    factors = validation.factors(damping=_DAMPING, by_activation=False)
                    target = validation.target(now.real, answer.asymmetry, factors)
                errors = relative_errors((now, answer.value), target, validation.h)
            return answer, torch.cat((errors.double(), slot.difference(answer.value))), checks

    def _change(self, slot: WeightSlot, answer: _Offer | Skip, wider: _Offer | Skip | None) -> Change:
        """Store an operator's accepted weight, preferably the one solved from all rows; return the change to report."""
        if isinstance(answer, Skip):
            return Change.skipped(slot.name, answer.reason)
        if not answer.after < answer.before:
            reason = refusal(self.reading.judged_on(self.context), answer.after)
            return Change.skipped(slot.name, reason, answer.before)
        reason, errors = "", (answer.before, answer.after)
        for offer in (wider, answer):
            if isinstance(offer, _Offer):
                try:
                    slot.store(offer.proposal.value)
                except OverflowError as error:
                    reason = str(error)
                    continue
                changed = slot.changed_parts(offer.codes, offer.scales, offer.zero_points)
                what = _what(changed, offer.proposal)
                return Change(slot.name, what, bool(changed), *errors, all_samples=offer is wider)
        return Change.skipped(slot.name, reason, answer.before)


@dataclass(frozen=True)
class _Offer:
    """Proposed weight with its errors.

    Attributes:
        proposal: Answer of the solver.
        before, after: Errors on validation data without and with the proposal.
        codes, scales, zero_points: Elements of `WeightSlot.difference` for the proposed weight.
    """

    proposal: Proposal
    before: float
    after: float
    codes: float
    scales: float
    zero_points: float


@dataclass
class _BlockJudge:
    """Evaluator of any proposal by the block's output on validation data, with earlier accepted proposals applied.

    The first rank solves; all ranks evaluate.
    """

    solver: Solver
    reading: Reading
    context: Context
    _run: BlockRun | None = None
    _error: float = math.inf

    def choose(self, run: BlockRun, slots: Sequence[Slot]) -> None:
        """Choose the values of slots that have the same input, one after another."""
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
        answer = self.context.ranks.first(lambda: self.context.with_room(lambda: self._answer(slot, data)))
        if isinstance(answer, Skip):
            return Change.skipped(slot.name, answer.reason)
        tensors, what = answer
        error, failure = run.attempt(lambda: run.store_all(tensors), before)
        if error < before:
            return Change(slot.name, what, before=before, after=error)
        return Change.skipped(slot.name, failure or self.context.data.refusal(error), before)

    def _answer(self, slot: Slot, data: object) -> tuple[dict[str, Tensor], str] | Skip:
        """Return the tensors that a proposal changes, and the text to report if it is accepted."""
        try:
            with naming_failures(self.solver, slot.name):
                answer = self.solver.solve(slot.now, data)
            answer = _proposed(self.solver, answer, slot.name, slot.now)
            if isinstance(answer, Skip):
                return answer
            tensors = slot.tensors(answer.value)
        except OverflowError as error:
            return Skip(str(error))
        except (CalibrationError, ValueError) as error:
            raise blamed([slot.name], error) from error
        return {name: tensor.cpu() for name, tensor in tensors.items()}, _what(slot.changed(answer.value), answer)


def _proposed(solver: Solver, answer: object, operator: str, now: object) -> Proposal | Skip:
    """Return a solver's answer after checking its type.

    Raises:
        PassError: If it is neither a `Skip` nor a `Proposal` of the right type.
    """
    if isinstance(answer, Skip) or (isinstance(answer, Proposal) and type(answer.value) is type(now)):
        return answer
    got = f"Proposal({type(answer.value).__name__})" if isinstance(answer, Proposal) else type(answer).__name__
    expected = f"a Proposal of a {type(now).__name__}, or a Skip with a reason"
    raise _failure(solver, operator, f"solve must return {expected}, not {got}")


def _what(changed: Sequence[str], answer: Proposal) -> str:
    """Return a description of the change, with the solver's remark."""
    return "; ".join(filter(None, (" and ".join(changed) or "nothing", answer.remark)))


@contextmanager
def naming_failures(solver: object, operators: str) -> Iterator[None]:
    """Turn an unexpected exception into a `PassError` that names the solver and the operators.

    A `QuarkError` passes unchanged, because it names them already, and so does an `OverflowError`, which means that a
    proposal does not fit its type.
    """
    try:
        yield
    except (QuarkError, OverflowError):
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise _failure(solver, operators, f"{type(error).__name__}: {error}") from error


def _failure(solver: object, operators: str, what: str) -> PassError:
    return PassError(f"{type(solver).__name__} failed on {operators}: {what}")


def blamed(operators: Iterable[str], error: Exception) -> CalibrationError:
    """Return an error that names the operators and suggests a fix."""
    return CalibrationError(f"{', '.join(operators)}: {error}; check the calibration data, or exclude the operator")


__all__ = [
    "Activation",
    "Bias",
    "Input",
    "InputHessian",
    "OutputError",
    "Proposal",
    "QuantizedMatrix",
    "Skip",
    "Solver",
    "blamed",
    "naming_failures",
    "solver",
]
