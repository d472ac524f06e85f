"""Inner loop of `quark_fx.solvers.error_feedback` as one kernel, which rounds a block of columns in registers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from quark_fx.numbers.grid import Grid

COLUMNS = 64
"""Number of columns in a block; longer blocks do not fit into the registers."""

_ROWS = 32
"""Number of rows of the weight in one block; rows are independent."""

OPTIONS: dict[str, Any] = {"columns": COLUMNS, "rows": _ROWS, "enable_fp_fusion": True}
"""Launch options. With fusion, a product and a sum are rounded once, like `torch.addcmul` on most processors."""


@triton.jit  # type: ignore[untyped-decorator]
def _quantize_block(
    wanted: tl.tensor,
    real: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    feedback: tl.tensor,
    outputs: int,
    stride: int,
    count: int,
    low: float,
    high: float,
    lowest_power: float,
    highest_power: float,
    shift: float,
    columns: tl.constexpr,
    rows: tl.constexpr,
) -> None:
    """Round `count` columns of `rows` outputs; inputs except `feedback` start at the block, shape (inputs, outputs)."""
    group = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, columns)
    o = tl.program_id(0) * rows + tl.arange(0, rows)
    known = (k[:, None] < count) & (o[None, :] < outputs)
    at = group * stride + k[:, None] * outputs + o[None, :]
    w = tl.load(wanted + at, known, 0.0)
    s = tl.load(scale + at, known, 1.0)
    z = tl.load(zero + at, known, 0.0)
    b = tl.load(real + at, known, 0.0) + z * s
    i = tl.div_rn(1.0, s)
    c = tl.zeros_like(w)
    e = tl.zeros_like(w)
    for j in range(count):
        this = k[:, None] == j
        position = tl.sum(tl.where(this, w * i + z, 0.0), 0)
        code = tl.minimum(tl.maximum(position, low), high)
        # Adding and subtracting 1.5 * 2**23 steps rounds a float32 of up to 22 bits to the nearest step, half to even.
        # The step of a small float grows with the power of two below its magnitude, which the exponent bits represent.
        power = (code.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        far = tl.minimum(tl.maximum(power, lowest_power), highest_power) * shift
        code = (code + far) - far
        code = tl.expand_dims(code, 0)
        left = tl.expand_dims(tl.sum(tl.where(this, b - code * s, 0.0), 0), 0)
        c = tl.where(this, code, c)
        e = tl.where(this, left, e)
        row = tl.load(feedback + group * columns * columns + j * columns + k)
        w += row[:, None] * left
    tl.store(wanted + at, e, known)
    tl.store(real + at, c, known)


def quantize_block(columns: Sequence[Tensor], feedback: Tensor, grid: Grid) -> None:
    """Round a block of columns in place, like `quark_fx.solvers.error_feedback.quantize_block`.

    Each of `columns` is a slice of a contiguous tensor, with at most `COLUMNS` columns.
    """
    groups, count, outputs = columns[0].shape
    padding = COLUMNS - count
    square = F.pad(feedback, (0, padding, 0, padding)).contiguous()
    launch: Any = _quantize_block[triton.cdiv(outputs, _ROWS), groups]
    strides = outputs, columns[0].stride(0), count
    with torch.cuda.device_of(columns[0]):  # may differ from the current device
        launch(*columns, square, *strides, *map(float, grid.limits), *_steps(grid), **OPTIONS)


def _steps(grid: Grid) -> tuple[float, float, float]:
    """Return the smallest and the largest power of two at which steps grow, and 1.5 * 2**23 steps per power."""
    fmt = grid.format
    return 2.0**fmt.min_exponent, 2.0**fmt.max_exponent, 1.5 * 2.0 ** (23 - fmt.mantissa)


__all__ = ["COLUMNS", "quantize_block"]
