"""A solver proposes new values; the framework accepts or rejects them, and does everything else.

A solver declares the values it chooses (`chooses`: weights, biases, or scales of activations) and the data it needs
(`reads`). The framework walks the blocks, measures that data across ranks, shares it among operators with the same
input, and evaluates each proposal on validation data (`judging.py`); a proposal that is not better there is rejected.
If data is scarce, accepted weights are solved again from all of it. The framework reports errors, resumes interrupted
runs, and predicts memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import walk_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.guidance import together_bytes
from quark_fx.engine.sizes import FLOAT32, BlockSize, Matrices, Need, Sizes
from quark_fx.errors import ConfigError
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.solvers.folds import Input, InputHessian, OutputError, Reading
from quark_fx.solvers.judging import BlockJudge, FormJudge
from quark_fx.solvers.proposals import Activation, Bias, Proposal, Skip
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.slots import slots_of
from quark_fx.system.untrusted import brief

S = TypeVar("S", bound=type)


@dataclass(frozen=True, kw_only=True)
class Solver(Selective, ABC):
    """Base class of passes that choose weights, biases, or scales of activations, one after another, from data.

    A subclass is a frozen dataclass of options with a `solve` method, decorated with `solver`. It is a pass of the
    quantized stage, named after its class.

    Attributes:
        chooses: `QuantizedMatrix` (codes and scales of weights), `Bias`, or `Activation` (static scales and zero
            points).
    """

    chooses: ClassVar[type[QuantizedMatrix | Bias | Activation]] = QuantizedMatrix

    @property
    def reads(self) -> Reading:
        """Data that `solve` gets: `InputHessian()`, `Input(observer)`, or `OutputError()`."""
        return InputHessian()

    @abstractmethod
    def solve(self, now: Any, seen: Any) -> Proposal | Skip:
        """Return the values to store in place of `now`.

        Args:
            now: Current value: a `QuantizedMatrix` with the float weight, a `Bias`, or an `Activation`.
            seen: Data that `reads` measured on the calibration batches of all ranks, with everything before the
                operator quantized. Operators with the same input get the same object, unless it is guided.

        Raises:
            CalibrationError: For data that cannot be used; the engine adds names.
        """

    def working_bytes(self, matrices: Matrices) -> int:
        """Return the bytes that `solve` needs besides its data; default: six float32 copies of a weight."""
        return 6 * FLOAT32 * matrices.values

    def working_operations(self, matrices: Matrices) -> float:
        """Return the multiplications of `solve`; default: a product of the weight and the Hessian."""
        return matrices.inputs * matrices.values

    @property
    def _reading(self) -> Reading:
        """Data that `solve` gets, checked.

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
            raise ConfigError(f"{name} chooses {chosen}, and {type(reads).__name__} says nothing of one; read {names}")
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
        """Choose better values in `gm`; return how many changed."""
        reads, form, find = self._reading, self._form, slots_of(self.chooses, gm, context, self)
        judge = BlockJudge(self.solve, reads, context) if form is None else FormJudge(self.solve, form, context)
        label = type(self).__name__
        if form is not None:
            form.guidance(context)  # before blocks and their inputs take memory
        for run in walk_blocks(gm, context, unit=Unit.OPERATOR, label=label, side_by_side=self._side_by_side):
            for slots in () if run.finished else find(run):
                for group in [slots] if reads.shared else [(slot,) for slot in slots]:
                    judge.choose(run, group)
        return sum(change.changed for change in context.changes)

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: data of both kinds of batches, or blocks, and `working_bytes`."""
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
        matrices = sizes.matrices.values()  # measurements of their outputs stay until the end
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
        raise ConfigError(f"chooses of {cls.__name__} must be one of the classes {names}, not {brief(chosen)}")
    register: Any = graph_pass(exact=False, stage=Stage.QUANTIZED, distributed=True, validated=True)
    registered: S = register(cls)
    return registered


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
    "solver",
]
