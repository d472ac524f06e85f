"""Orthogonal matrices that spread outliers, and the operator that multiplies by them at run time.

A matrix of size `n` is held as two orthogonal factors of sizes `a * b = n` and stands for their Kronecker product: an
activation is multiplied by it in `n * (a + b)` multiplications, not `n * n`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("quark_fx", "FRAGMENT")
_LIBRARY.define("rotate(Tensor x, Tensor left, Tensor right) -> Tensor")


def _rotate(x: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Multiply each run of `a * b` values along the last dimension of `x` by the Kronecker product of two matrices.

    Args:
        x: Floats; the last dimension is a multiple of `a * b`.
        left: Matrix of shape (a, a), in the type of `x`.
        right: Matrix of shape (b, b), in the type of `x`.
    """
    a, b = left.shape[0], right.shape[0]
    runs = x.reshape(*x.shape[:-1], x.shape[-1] // (a * b), a, b)
    return (left.t() @ (runs @ right)).reshape(x.shape)


# Composite, so that gradients with respect to all three follow.
_LIBRARY.impl("rotate", _rotate, "CompositeImplicitAutograd")


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix, the Kronecker product of two.

    Attributes:
        left: Matrix of shape (a, a), float64.
        right: Matrix of shape (b, b), float64.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def random(cls, size: int, generator: torch.Generator, *, keeps_mean: bool = False, whole: bool = False) -> Self:
        """Return a random Hadamard matrix of a size, or a random orthogonal one where `hadamard` constructs none.

        Args:
            size: Number of rows, at least 1.
            generator: Generator of signs, and of factors that are not Hadamard matrices.
            keeps_mean: Keep the mean of a vector, so that LayerNorm commutes.
            whole: Use one factor: matrices that keep means spread outliers better when they are large.

        Source:
            Random Hadamard matrices: Ashkboos et al. 2024 (QuaRot). `keeps_mean` is ours: a reflection takes the image
            of the vector of ones back to itself.
        """
        left, right = (_random(n, generator, keeps_mean=keeps_mean) for n in ((1, size) if whole else factors(size)))
        return cls(left, right)

    @property
    def size(self) -> int:
        """The matrix has n rows and columns."""
        return len(self.left) * len(self.right)

    @property
    def cost(self) -> int:
        """Multiplications of a row of n values."""
        return self.size * sum(len(m) for m in (self.left, self.right) if len(m) > 1)

    @property
    def keeps_mean(self) -> bool:
        """True if vectors keep the mean of their entries: the rows add up to one."""
        whole = torch.outer(self.left.sum(1), self.right.sum(1))
        return bool(((whole - 1).abs() < 1e-6).all())

    @property
    def inverse(self) -> Rotation:
        """The transposed matrix."""
        return Rotation(self.left.t().contiguous(), self.right.t().contiguous())

    def apply(self, x: Tensor) -> Tensor:
        """Return `x`, its last dimension multiplied by the matrix in runs of n, in float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rotated: Tensor = torch.ops.quark_fx.rotate(
            x.to(wide), *(m.to(x.device, wide) for m in (self.left, self.right))
        )
        return rotated.to(x.dtype)


_WORTH = 4
"""Largest cost of a pair of Hadamard matrices, in costs of the cheapest pair of factors."""


def factors(size: int) -> tuple[int, int]:
    """Return two factors of a size: `hadamard` constructs both if that is not too costly, and their sum is small."""
    pairs = [(a, size // a) for a in range(1, math.isqrt(size) + 1) if size % a == 0]
    most = _WORTH * min(map(sum, pairs))
    return min(
        (pair for pair in pairs if sum(pair) <= most),
        key=lambda pair: (sum(not _constructible(n) for n in pair), sum(pair)),
    )


def hadamard(size: int) -> Tensor | None:
    """Return a matrix of ones and minus ones with orthogonal rows, float32; `None` where none is constructed.

    Source:
        Sylvester's doubling, and both of Paley's constructions, of prime orders.
    """
    if not _constructible(size):
        return None
    two = _matrix([1.0, 1.0], [1.0, -1.0])
    if size <= 2:
        return two[:size, :size]
    if first := _first_paley(size):
        return torch.eye(size, dtype=torch.float32) + _bordered(first, -1.0)
    if second := _second_paley(size):
        between = torch.eye(second + 1, dtype=torch.float32)
        return torch.kron(_bordered(second, 1.0), two) + torch.kron(between, _matrix([1.0, -1.0], [-1.0, -1.0]))
    half = hadamard(size // 2)
    return None if half is None else torch.kron(two, half)


def _constructible(size: int) -> bool:
    """Tell whether `hadamard` constructs a matrix of a size, without doing so: large ones take gigabytes."""
    if size <= 2 or size % 4:
        return size <= 2
    return bool(_first_paley(size) or _second_paley(size)) or _constructible(size // 2)


def _first_paley(size: int) -> int:
    """Return the prime of Paley's first construction, 3 modulo 4; 0 if there is none."""
    return size - 1 if size % 4 == 0 and _is_prime(size - 1) else 0


def _second_paley(size: int) -> int:
    """Return the prime of Paley's second construction, 1 modulo 4; 0 if there is none."""
    return size // 2 - 1 if size % 8 == 4 and _is_prime(size // 2 - 1) else 0


def _matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _bordered(prime: int, sign: float) -> Tensor:
    """Return Jacobsthal's matrix of a prime with a row of ones and a column of `sign` before it, and 0 between."""
    squares = torch.zeros(prime, dtype=torch.bool)
    squares[(torch.arange(1, prime) ** 2) % prime] = True
    numbers = torch.arange(prime)
    difference = (numbers[:, None] - numbers[None]) % prime
    matrix = torch.ones(prime + 1, prime + 1, dtype=torch.float32)
    matrix[0, 0], matrix[1:, 0] = 0, sign
    matrix[1:, 1:] = torch.where(squares[difference], 1.0, -1.0)
    matrix[1:, 1:].fill_diagonal_(0)
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _random(size: int, generator: torch.Generator, *, keeps_mean: bool) -> Tensor:
    constructed = hadamard(size)
    if size == 1:
        matrix: Any = torch.ones(1, 1, dtype=torch.float64)
    elif constructed is None:
        matrix = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    else:
        signs = torch.randint(2, (size, 1), generator=generator, dtype=torch.float64) * 2 - 1
        matrix = signs * constructed.double() / math.sqrt(size)
    if keeps_mean:
        ones = torch.full((size,), 1 / math.sqrt(size), dtype=torch.float64)
        normal = matrix @ ones - ones
        if (length := float(normal @ normal)) > 1e-12:
            matrix = matrix - torch.outer(normal, normal @ matrix) * (2 / length)
    return matrix.contiguous()  # type: ignore[no-any-return]


__all__ = ["Rotation", "factors", "hadamard"]
