"""Budget of a search."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from quark_fx.engine.resources import parse_bytes
from quark_fx.errors import ConfigError
from quark_fx.system.options import Interval, checked

Output = Literal["report", "onnx", "checkpoint", "gguf", "saved"]

_MILLISECONDS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


@checked
@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit on one quantity: bits per weight, bytes, the latency of a call, or the error.

    Args:
        bits: Largest average number of bits, over all weights that at least one candidate quantizes.
        size: Limit in bytes, or text such as `"60MiB"`, on the size that `output` selects.
        output: Kind of size to limit. `"report"`: the weights in `QuantizedModel.report()`, that is, packed codes,
            scales, and zero points, each weight once. Files can be larger, because they may pack codes differently,
            store a tied table twice, and contain norms and a graph. `"onnx"`, `"checkpoint"` (Hugging Face), `"gguf"`,
            or `"saved"` (`qmodel.save`): all bytes that this export writes with its default arguments, without a
            tokenizer. Each configuration that is tried is written once to a temporary directory.
        latency: Limit on the latency of one call in the target's runtime on this machine: a fraction of the float
            model's latency, at most 1, such as `0.6`; or a time, such as `"12ms"`.
        error: Largest accepted error, in the metric of the search; the search then minimizes the size.

    Raises:
        ConfigError: If there is not exactly one limit, `output` is given without a size, or a fraction for the latency
            is above 1.

    >>> print(Budget(bits=4.5), Budget(size="1KiB"), Budget(error=0.01), sep="; ")
    at most 4.5 bits per weight; at most 1,024 bytes of weights in the report; an error of at most 0.01
    >>> print(Budget(size="1KiB", output="onnx"))
    at most 1,024 bytes as onnx
    >>> print(Budget(latency=0.6), Budget(latency="1.5s"), sep="; ")
    at most 0.6 times the latency of float; at most 1,500 ms
    """

    bits: Annotated[float, Interval("(0, inf)")] | None = None
    size: int | str | None = None
    latency: float | str | None = None
    error: Annotated[float, Interval("(0, inf)")] | None = None
    output: Output = "report"

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.bits, self.size, self.latency, self.error)) != 1:
            raise ConfigError(
                "a budget is exactly one of bits=4.5, size='60MiB', latency=0.6, and error=0.01; pass one of them"
            )
        if self.size is None and self.output != "report":
            raise ConfigError(
                f"output={self.output!r} applies only to a budget with size=; set a size: Budget(size='60MiB', ...)"
            )
        parse_bytes(self.size, "size")
        _parse_latency(self.latency)

    @property
    def nbytes(self) -> int | None:
        """`size` in bytes; `None` without a limit on the size."""
        return parse_bytes(self.size, "size")

    def milliseconds(self, of_float: float) -> float:
        """Return the largest latency in milliseconds; infinite if the budget is not a latency.

        Args:
            of_float: Latency of the float model, in milliseconds.
        """
        if self.latency is None:
            return math.inf
        number, is_share = _parse_latency(self.latency)
        return number * of_float if is_share else number

    def __str__(self) -> str:
        if self.error is not None:
            return f"an error of at most {self.error:g}"
        if self.latency is not None:
            number, is_share = _parse_latency(self.latency)
            return f"at most {number:g} times the latency of float" if is_share else f"at most {number:,g} ms"
        if self.bits is not None:
            return f"at most {self.bits:g} bits per weight"
        what = "of weights in the report" if self.output == "report" else f"as {self.output}"
        return f"at most {self.nbytes:,} bytes {what}"


def _parse_latency(latency: float | str | None) -> tuple[float, bool]:
    """Return a number, and True if it is a fraction of the float model's latency, False if it is in milliseconds.

    Raises:
        ConfigError: If text lacks a unit, a fraction is above 1, or the latency is not positive and finite.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s)\s*", latency) if isinstance(latency, str) else None
    if isinstance(latency, str) and match is None:
        raise ConfigError(f'latency must be a fraction of float, such as 0.6, or text like "12ms", not {latency!r}')
    number = 1.0 if latency is None else float(match[1]) * _MILLISECONDS[match[2]] if match else float(latency)
    if not 0 < number < math.inf:
        raise ConfigError(f"latency must be positive and finite, not {latency!r}")
    if match is None and number > 1:
        raise ConfigError(
            f"latency={number:g} is {number:g} times the float model's latency; for milliseconds, write "
            f'"{number:g}ms"; a fraction must be at most 1, such as 0.6'
        )
    return number, match is None


__all__ = ["Budget"]
