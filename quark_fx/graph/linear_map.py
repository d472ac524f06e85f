"""A weighted operator as a matrix product: its weight as matrices, its activation as rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from quark_fx.numbers.sampling import spread_indices


@dataclass(frozen=True)
class LinearMap:
    """An operator as a matrix product: its weight as matrices, its activation as rows.

    Attributes:
        groups: Number of independent channel groups.
        kernel: Spatial size of the kernel, empty for a matrix product.
        stride: Stride of a convolution.
        padding: Padding of a convolution, before and after each spatial dimension.
        dilation: Dilation of a convolution.
        transposed: Whether the weight is stored as (inputs, outputs).
        stacked: Whether the weight is a stack of matrices, one per group.
        offsets: Node with the offsets at which the rows of each group end; `None` if the activation is a stack, too.
    """

    groups: int = 1
    kernel: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    transposed: bool = False
    stacked: bool = False
    offsets: Node | None = None

    def row_dims(self, rank: int) -> tuple[int, ...]:
        """Return the dimensions of a stored weight of rank `rank` that index matrices and their rows."""
        rows = rank - 1 if self.transposed else rank - 2 if self.stacked else 0
        return (0, rows) if self.stacked else (rows,)

    def matrix(self, weight: Tensor) -> Tensor:
        """Return the weight in the shape (groups, outputs per group, inputs per group * kernel)."""
        if self.transposed:
            weight = weight.mT
        return weight if self.stacked else weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def restore(self, matrix: Tensor, like: Tensor) -> Tensor:
        """Return `matrix` in the shape of the weight `like`; the inverse of `matrix()`."""
        weight = matrix.reshape(like.mT.shape if self.transposed else like.shape)
        return (weight.mT if self.transposed else weight).contiguous()

    def rows(self, x: Tensor, y: Tensor, *, most: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the inputs from which each output position is computed, and the outputs at these positions.

        Args:
            x: Activation of the operator.
            y: Tensor of the shape of the operator's output.
            most: Approximate number of output positions to use. In an image, they form a lattice shifted by `seed`.
            seed: Seed of the choice of positions.

        Returns:
            Shapes (groups, inputs per group * kernel, positions) and (groups, outputs per group, positions).
        """
        if not self.kernel:
            rows, outputs = (v.reshape(-1, v.shape[-1]) for v in (x, y))
            if len(rows) > most:  # indices are drawn on the host and copied
                chosen = spread_indices(len(rows), most, seed).to(x.device)
                rows, outputs = rows[chosen], outputs[chosen]
            return rows.t().unsqueeze(0), outputs.t().unsqueeze(0)
        if len(self.kernel) == 1:
            x, y = x.unsqueeze(-2), y.unsqueeze(-2)
        missing = (1,) * (2 - len(self.kernel))
        kernel, stride, dilation = (missing + sizes for sizes in (self.kernel, self.stride, self.dilation))
        padding = ((0, 0),) * len(missing) + self.padding
        height, width = y.shape[-2:]
        thinning = max(1.0, y.shape[0] * height * width / most)
        down = max(1, min(height, int(thinning**0.5)))
        steps = down, max(1, min(width, int(thinning / down)))
        offsets = seed % steps[0], (seed // steps[0]) % steps[1]
        x = F.pad(x, (*padding[1], *padding[0]))
        x = x[..., offsets[0] * stride[0] :, offsets[1] * stride[1] :]
        columns = F.unfold(x, kernel, dilation, 0, tuple(s * t for s, t in zip(stride, steps, strict=True)))
        outputs = y[..., offsets[0] :: steps[0], offsets[1] :: steps[1]]
        count = x.shape[0] * outputs.shape[-2] * outputs.shape[-1]
        columns = columns.transpose(0, 1).reshape(self.groups, -1, count)
        return columns, outputs.transpose(0, 1).reshape(self.groups, -1, count)


__all__ = ["LinearMap"]
