"""A quantized weight in the form of its operator's matrices; solvers read it and propose a new weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from quark_fx.graph.linear_map import LinearMap
from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.numbers.quantized_tensor import QuantizedTensor, decode

_AT_ONCE = 1 << 21
"""Approximate number of weights rounded together."""

_SUMS = 512
"""Number of sums of rows that errors are measured on; measuring each row would double the cost."""

_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """Quantized weight of one operator, as matrices of shape (groups, outputs, inputs).

    Attributes:
        name: Module of the operator.
        real: Float weight as matrices.
        stored: Current quantized weight.
        scheme: Scheme of the codes.
        mapping: Mapping from the operator to matrix products.
        movable: True if scales can change individually.
        storable: Function that limits codes to values that the target can store (`Coded.pairs`), in the shape of
            `stored`.
        ranges: Function that rounds two-level scales, or scales with offsets, to storable values, in the shape of the
            scales in `stored`; `None` for other scales.
        outputs: Weighting of the errors of output channels (`Guidance.outputs`), shape (runs, n, n) for runs of `n`
            channels; `None` if every channel counts separately.
        one_sided: Reason that `outputs` is missing although it was requested; empty otherwise.
    """

    name: str
    real: Tensor
    stored: QuantizedTensor
    scheme: Scheme
    mapping: LinearMap
    movable: bool
    storable: Callable[[Tensor], Tensor]
    ranges: Callable[[QParams], QParams] | None = None
    outputs: Tensor | None = None
    one_sided: str = ""

    @property
    def codes(self) -> Tensor:
        """Values of the codes as matrices, in any dtype."""
        return self.mapping.matrix(self.stored.format.values_of(self.stored.codes))

    def grid(self, matrices: slice = slice(None)) -> Grid:
        """Return the grid of the codes with parameters as matrices; `matrices` selects some matrices of a stack."""
        stacked = self.mapping.stacked
        grid = Grid.of(self.stored[matrices] if stacked else self.stored, self.scheme)
        scale, zero_point = (self.mapping.matrix(p) for p in (grid.scale, grid.zero_point))
        if not stacked:
            scale, zero_point = scale[matrices], zero_point[matrices]
        return replace(grid, scale=scale, zero_point=zero_point)

    @property
    def columns(self) -> Columns | None:
        """Inputs that share a scale, in the order of `with_scales`; `None` if scales cannot change individually."""
        return self.stored.layout.columns(self.mapping) if self.movable else None

    @property
    def allowed(self) -> Callable[[Tensor], Tensor] | None:
        """Function that rounds scales to values of an 8-bit scale format; `None` if scales have another format."""
        kind = self.scheme.scale
        return kind.allowed(self.stored.scale) if kind.is_8_bit else None

    @property
    def free(self) -> FreeScales:
        """Scales of the weight, and zero points if the scheme is asymmetric; they can change if it is `movable`."""
        return FreeScales.of(self.stored, self.scheme)

    def with_codes(self, codes: Tensor) -> QuantizedMatrix:
        """Return the matrix with other codes.

        Args:
            codes: Values as matrices. Each is rounded to the nearest value of the format within the limits of the
                scheme; `storable` then lowers pairs that exceed the target's limit.
        """
        old = self.stored
        values = self.mapping.restore(codes, old.codes.new_empty(()).expand(old.layout.shape))
        values = old.format.round_(values.to(torch.float32, copy=True), self.scheme.limits)
        return replace(self, stored=replace(old, codes=self.storable(old.format.codes_of(values))))

    def with_scales(self, ratio: Tensor) -> QuantizedMatrix:
        """Return the matrix with every scale multiplied by `ratio`, shape (groups, outputs, scales of a row)."""
        scale = self.free.times(self.stored.layout.restore(ratio, self.mapping))
        return replace(self, stored=replace(self.stored, scale=scale))

    def with_zero_points(self, zero_points: Tensor) -> QuantizedMatrix:
        """Return the matrix with other zero points, rounded to integers within the limits of the scheme.

        The scheme must be asymmetric (`free.zero_points` is not `None`) and the matrix `movable`. The codes stay as
        they are; `nearest` rounds the weight again.

        Args:
            zero_points: Values of shape (groups, outputs, scales of a row).
        """
        values = self.stored.layout.restore(zero_points, self.mapping)
        rounded = self.free.rounded_zero_points(values, self.scheme.limits)
        return replace(self, stored=replace(self.stored, zero_point=rounded))

    @property
    def ranged_columns(self) -> Columns | None:
        """Inputs that share a scale and an offset, in the order of `with_ranges`; `None` without `ranges`."""
        return None if self.ranges is None else self.stored.layout.columns(self.mapping)

    def with_ranges(self, scale: Tensor, offset: Tensor | None) -> QuantizedMatrix:
        """Return the matrix with other scales, and offsets if it has offsets, rounded to storable values.

        Both arguments have shape (groups, outputs, scales of a row).
        """
        assert self.ranges is not None
        old, layout = self.stored, self.stored.layout
        zero_point = old.zero_point if offset is None else layout.restore(offset, self.mapping)
        qparams = self.ranges(QParams(layout.restore(scale, self.mapping), zero_point))
        return replace(self, stored=replace(old, scale=qparams.scale, zero_point=qparams.zero_point))

    def nearest(self) -> QuantizedMatrix:
        """Return the matrix with the float weight rounded to nearest."""
        codes = torch.empty_like(self.codes)
        groups, outputs, inputs = codes.shape
        step = max(1, _AT_ONCE // (outputs * inputs))  # a long stack is rounded a few matrices at a time
        for matrices in (slice(first, first + step) for first in range(0, groups, step)):
            grid = self.grid(matrices)
            codes[matrices] = grid.round_(grid.position(self.real[matrices].float())).to(codes.dtype)
        return self.with_codes(codes)

    def error(self, target: Tensor, h: Tensor) -> Tensor:
        """Return the relative squared error of the output, shape (), without waiting for the device.

        For more than 512 output channels, the result is an unbiased estimate: the rows are added with random signs in
        512 sums, whose squares are measured. Products of different rows cancel in expectation.

        Args:
            target: Weight to compare with, of the shape of `real`.
            h: Sum of `x x'` over the operator's inputs, shape (groups, inputs, inputs).

        Source:
            Alon, Matias, Szegedy 1999 (squares of sums with random signs).
        """
        return relative_errors([self], target, h)[0]


def relative_errors(matrices: Sequence[QuantizedMatrix], target: Tensor, h: Tensor) -> Tensor:
    """Return `QuantizedMatrix.error` of several versions of one weight, shape (versions,).

    Args:
        matrices: Versions of the weight, which can differ in codes and scales.
        target, h: Arguments of `QuantizedMatrix.error`.
    """
    first = matrices[0]
    if first.outputs is not None:
        losses = [_form(first.outputs, m.grid().value(m.codes.float()) - target, h) for m in matrices]
        return torch.stack(losses) / _form(first.outputs, target, h).clamp_min(_TINY)
    outputs = target.shape[1]
    signs = torch.randint(2, (outputs, 1), generator=torch.Generator().manual_seed(0)).mul_(2).sub_(1).to(h)
    totals = torch.zeros(len(matrices) + 1, device=h.device, dtype=torch.float32)
    codes = [m.codes for m in matrices]
    for group in [slice(i, i + 1) for i in range(len(h))] if first.mapping.stacked else [slice(None)]:
        real, grids = target[group], [first.grid(group)]
        for old, new in pairwise(m.stored for m in matrices):
            same = new.scale is old.scale and new.zero_point is old.zero_point
            grids.append(grids[-1] if same else matrices[len(grids)].grid(group))
        sums = h.new_zeros(len(matrices) + 1, len(real), min(outputs, _SUMS), real.shape[-1])
        for rows in (slice(start, start + _SUMS) for start in range(0, outputs, _SUMS)):
            values, sign = real[:, rows].float(), signs[rows]
            sums[0, :, : len(sign)].addcmul_(values, sign)
            for total, code, grid in zip(sums[1:], codes, grids, strict=True):
                scale, zero_point = (p.expand_as(real)[:, rows] for p in (grid.scale, grid.zero_point))
                lost = decode(code[group, rows].float(), scale, zero_point).sub_(values)
                total[:, : len(sign)].addcmul_(lost, sign)
        totals += torch.stack([((total @ h[group]) * total).sum() for total in sums])
    errors: Tensor = totals[1:] / totals[0].clamp_min(_TINY)
    return errors


def _form(outputs: Tensor, weight: Tensor, h: Tensor) -> Tensor:
    """Return `tr(outputs W h W')` of a weight of one matrix, shape ()."""
    rows = weight.float().view(len(outputs), -1, weight.shape[-1])
    return ((outputs @ rows) * (rows @ h)).sum()


__all__ = ["QuantizedMatrix", "relative_errors"]
