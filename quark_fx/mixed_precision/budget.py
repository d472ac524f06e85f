"""What a search may spend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from quark_fx.engine.resources import parse_bytes
from quark_fx.errors import ConfigError
from quark_fx.system.options import Interval, checked


@checked
@dataclass(frozen=True, kw_only=True)
class Budget:
    """One limit: of bits, of bytes, or of the error.

    Bytes are those of `QuantizedModel.report()`: codes, scales and zero points, a weight that several operators read
    counted once.

    Args:
        bits: on average, of each weight that at least one candidate quantizes.
        size: of all weights of the report, in bytes or as `"60MiB"`; those that stay in float count, too.
        error: the largest that is accepted, in the metric of the search; the size is then the smallest that keeps it.

    Raises:
        ConfigError: unless exactly one is given.

    >>> print(Budget(bits=4.5), Budget(size="1KiB"), Budget(error=0.01), sep="; ")
    at most 4.5 bits per weight; at most 1,024 bytes; an error of at most 0.01
    """

    bits: Annotated[float, Interval("(0, inf)")] | None = None
    size: int | str | None = None
    error: Annotated[float, Interval("(0, inf)")] | None = None

    def __post_init__(self) -> None:
        if sum(limit is not None for limit in (self.bits, self.size, self.error)) != 1:
            raise ConfigError("a budget is one of bits=4.5, size='60MiB' and error=0.01; give one of them")
        parse_bytes(self.size, "size")

    @property
    def nbytes(self) -> int | None:
        """`size` in bytes."""
        return parse_bytes(self.size, "size")

    def __str__(self) -> str:
        if self.error is not None:
            return f"an error of at most {self.error:g}"
        return f"at most {self.nbytes:,} bytes" if self.bits is None else f"at most {self.bits:g} bits per weight"


__all__ = ["Budget"]
