"""What a solver is asked about, and what it answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from quark_fx.errors import PassError, QuarkError
from quark_fx.numbers.qparams import QParams, Scheme, affine_qparams
from quark_fx.system.memory import is_shortage


@dataclass(frozen=True, eq=False)
class Bias:
    """What an operator adds to its product.

    Attributes:
        name: the module it comes from.
        value: one per output channel, float32; an int32 bias is rounded when it is stored.
    """

    name: str
    value: Tensor


@dataclass(frozen=True, eq=False)
class Activation:
    """How a value is rounded to integers.

    Attributes:
        name: of the value, in the captured graph.
        scheme: which parameters there can be.
        qparams: static scale and zero point, shape `()`.
        low, high: bounds of a clamp that is left to saturation; a range does not go beyond.

    Raises:
        ValueError: if the scale is no positive number, or the zero point no code.
    """

    name: str
    scheme: Scheme
    qparams: QParams
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self) -> None:
        scale, zero_point = float(self.qparams.scale), int(self.qparams.zero_point)
        if not (0 < scale < math.inf and self.scheme.qmin <= zero_point <= self.scheme.qmax):
            raise ValueError(f"{self.name}: {self.scheme.format} has no scale {scale:g} with zero point {zero_point}")

    def with_range(self, low: Tensor | float, high: Tensor | float) -> Activation:
        """Return it with scale and zero point for the real values from `low` to `high`, one number each."""
        like = self.qparams.scale.double()
        low, high = (like.new_tensor(float(end)).clamp(self.low, self.high) for end in (low, high))
        return replace(self, qparams=affine_qparams(low, high, self.scheme))


@dataclass(frozen=True)
class Proposal:
    """What a solver would have instead of what there is.

    Attributes:
        value: what it was given with something else in it: a `QuantizedMatrix`, `Bias` or `Activation`.
        remark: appended to its row in the report.
        asymmetry: of a weight, the share of the way from what the float weight makes of the quantized inputs to what
            the float model makes of its own, for those who read `Hessian.shift`: the target it is judged by.
    """

    value: Any
    remark: str = ""
    asymmetry: float = 0.0


@dataclass(frozen=True)
class Skip:
    """Why a solver proposes nothing."""

    reason: str


@contextmanager
def naming_failures(solver: object, operators: str) -> Iterator[None]:
    """Turn an unexpected exception into a `PassError` that names the solver and the operators.

    Errors of quark_fx have names already; an `OverflowError` says that a proposal does not fit its type.
    """
    try:
        yield
    except (QuarkError, OverflowError):
        raise
    except Exception as error:
        if is_shortage(error):
            raise
        raise PassError(f"{type(solver).__name__} failed on {operators}: {type(error).__name__}: {error}") from error


__all__ = ["Activation", "Bias", "Proposal", "Skip", "naming_failures"]
