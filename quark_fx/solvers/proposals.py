"""Values that solvers choose, and their answers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quark_fx.errors import CalibrationError, PassError, QuarkError
from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.system.memory import is_shortage


@dataclass(frozen=True, eq=False)
class Bias:
    """Bias that an operator adds.

    Attributes:
        name: Module of the operator.
        value: Bias of each output channel, float32; an int32 bias is rounded when it is stored.
    """

    name: str
    value: Tensor


@dataclass(frozen=True, eq=False)
class Activation:
    """Static quantization of an activation to integers.

    Attributes:
        name: Name of the value in the captured graph.
        scheme: Scheme that limits scale and zero point.
        qparams: Static scale and zero point, shape `()`.
        low, high: Bounds of a clamp that saturation replaces; ranges are clipped to them.

    Raises:
        ValueError: If the scale is not positive and finite, or the zero point is not a code.
    """

    name: str
    scheme: Scheme
    qparams: QParams
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        scale, zero_point = float(self.qparams.scale), int(self.qparams.zero_point)
        if not (0 < scale < math.inf and self.scheme.qmin <= zero_point <= self.scheme.qmax):
            raise ValueError(
                f"{self.name}: {self.scheme.format} cannot have the scale {scale:g} with zero point {zero_point}"
            )

    def with_range(self, low: Tensor | float, high: Tensor | float) -> Activation:
        """Return the activation with scale and zero point for the real range `[low, high]`, a number each."""
        like = self.qparams.scale.double()
        low, high = (like.new_tensor(float(end)).clamp(self.low, self.high) for end in (low, high))
        return replace(self, qparams=affine_qparams(low, high, self.scheme))


@dataclass(frozen=True)
class Proposal:
    """New value proposed by a solver.

    Attributes:
        value: Replacement for the current value, of the same type: `QuantizedMatrix`, `Bias`, or `Activation`.
        remark: Text appended to its row in the report.
        asymmetry: For solvers that use `Hessian.shift`, the position of the target that a weight is compared with: 0
            is the float weight's output on quantized inputs, 1 the float model's output on its own inputs.
    """

    value: Any
    remark: str = ""
    asymmetry: float = 0.0


@dataclass(frozen=True)
class Skip:
    """Answer of a solver that proposes nothing, with the reason."""

    reason: str


@contextmanager
def naming_failures(solver: object, operators: str) -> Iterator[None]:
    """Turn an unexpected exception into a `PassError` that names the solver and the operators.

    Errors of quark_fx name them already; an `OverflowError` means that a proposal does not fit its type.
    """
    try:
        yield
    except (QuarkError, OverflowError):
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise PassError(f"{type(solver).__name__} failed on {operators}: {type(error).__name__}: {error}") from error


def blamed(operators: Iterable[str], error: Exception) -> CalibrationError:
    """Return an error that names the operators and suggests a fix."""
    return CalibrationError(f"{', '.join(operators)}: {error}; check the calibration data, or exclude the operator")


__all__ = ["Activation", "Bias", "Proposal", "Skip", "blamed", "naming_failures"]
