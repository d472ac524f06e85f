"""Orthogonal matrices that spread outliers, and the operator that multiplies by them at run time.

A rotation of size `n` is stored as two orthogonal matrices of sizes `a` and `b`, `a * b = n`. The rotation is their
Kronecker product; applying it to an activation takes `n * (a + b)` multiplications instead of `n * n`.
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
    """Multiply every `a * b` consecutive values in the last dimension of `x` by the Kronecker product of two matrices.

    Args:
        x: Floats; the last dimension is a multiple of `a * b`.
        left: Matrix of shape (a, a), in the dtype of `x`.
        right: Matrix of shape (b, b), in the dtype of `x`.
    """
    a, b = left.shape[0], right.shape[0]
    runs = x.reshape(*x.shape[:-1], x.shape[-1] // (a * b), a, b)
    return (left.t() @ (runs @ right)).reshape(x.shape)


# A composite operator: autograd derives the gradients of x, left, and right.
_LIBRARY.impl("rotate", _rotate, "CompositeImplicitAutograd")


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix, stored as the two factors of a Kronecker product.

    Attributes:
        left: Matrix of shape (a, a), float64.
        right: Matrix of shape (b, b), float64.
    """

    left: Tensor
    right: Tensor

    @classmethod
    def random(cls, size: int, generator: torch.Generator, *, keeps_mean: bool = False, whole: bool = False) -> Self:
        """Return a random rotation; each factor is a Hadamard matrix if `hadamard` can construct one of its size.

        Args:
            size: Number of rows, at least 1.
            generator: Random generator for the signs, and for the factors that are not Hadamard matrices.
            keeps_mean: Whether the rotation preserves the mean of a vector, so that it commutes with LayerNorm.
            whole: Whether to use a single factor: mean-preserving factors spread outliers better when they are large.

        Source:
            Random Hadamard matrices: Ashkboos et al. 2024 (QuaRot). `keeps_mean` is ours: a reflection maps the image
            of the all-ones vector back to that vector.
        """
        left, right = (_random(n, generator, keeps_mean=keeps_mean) for n in ((1, size) if whole else factors(size)))
        return cls(left, right)

    @property
    def size(self) -> int:
        """Number n of rows and columns."""
        return len(self.left) * len(self.right)

    @property
    def cost(self) -> int:
        """Number of multiplications to rotate n values."""
        return self.size * sum(len(m) for m in (self.left, self.right) if len(m) > 1)

    @property
    def keeps_mean(self) -> bool:
        """True if the rotation preserves the mean of a vector: every row sums to one."""
        whole = torch.outer(self.left.sum(1), self.right.sum(1))
        return bool(((whole - 1).abs() < 1e-6).all())

    @property
    def inverse(self) -> Rotation:
        """Inverse rotation: the transpose."""
        return Rotation(self.left.t().contiguous(), self.right.t().contiguous())

    def apply(self, x: Tensor) -> Tensor:
        """Rotate every n consecutive values in the last dimension of `x`, computing in float32 or wider."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rotated: Tensor = torch.ops.quark_fx.rotate(
            x.to(wide), *(m.to(x.device, wide) for m in (self.left, self.right))
        )
        return rotated.to(x.dtype)


_WORTH = 4
"""Largest cost of a pair of Hadamard matrices, as a multiple of the cost of the cheapest pair of factors."""


def factors(size: int) -> tuple[int, int]:
    """Return two factors of `size` with a small sum, preferably both of sizes that `hadamard` can construct."""
    pairs = [(a, size // a) for a in range(1, math.isqrt(size) + 1) if size % a == 0]
    most = _WORTH * min(map(sum, pairs))
    return min(
        (pair for pair in pairs if sum(pair) <= most),
        key=lambda pair: (sum(not _constructible(n) for n in pair), sum(pair)),
    )


def hadamard(size: int) -> Tensor | None:
    """Return a Hadamard matrix of ones and minus ones, float32; `None` if the constructions below do not reach `size`.

    Source:
        Sylvester's doubling, and both of Paley's constructions for prime orders.
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
    """Return True if `hadamard` can construct a matrix of `size`, without allocating it: large ones take gigabytes."""
    if size <= 2 or size % 4:
        return size <= 2
    return bool(_first_paley(size) or _second_paley(size)) or _constructible(size // 2)


def _first_paley(size: int) -> int:
    """Return the prime, 3 modulo 4, for Paley's first construction of a matrix of `size`; 0 if there is none."""
    return size - 1 if size % 4 == 0 and _is_prime(size - 1) else 0


def _second_paley(size: int) -> int:
    """Return the prime, 1 modulo 4, for Paley's second construction of a matrix of `size`; 0 if there is none."""
    return size // 2 - 1 if size % 8 == 4 and _is_prime(size // 2 - 1) else 0


def _matrix(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def _bordered(prime: int, sign: float) -> Tensor:
    """Return the Jacobsthal matrix of a prime, with a first row of ones, a first column of `sign`, and 0 in the corner.

    The shape is (prime + 1, prime + 1).
    """
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
