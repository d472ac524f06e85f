"""Split global average pools with kernels that are too large for a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from quark_fx.engine.rules import graph_rule
from quark_fx.errors import Declined
from quark_fx.graph.nodes import call, static_size, value_of
from quark_fx.graph.operators import argument
from quark_fx.system.options import PositiveInt


@graph_rule("aten.adaptive_avg_pool2d.default", after=("pool_means",))
@dataclass(frozen=True)
class SplitLargePools:
    """Split a global average pool over more than `largest` values into a pool with small windows and a global pool.

    A window's side is the largest divisor of the image's side `n` up to `sqrt(n)`. All windows have the same size, so
    the mean of their means is the mean. A pool without such divisors is left unchanged, and so is a pool over varying
    sizes.

    Args:
        largest: Largest number of values per window that the device supports.

    Raises:
        ConfigError: If `largest` is not positive.

    Source:
        AMD Quark for ONNX, `SplitLargeKernelPool`; its limit for the DPU is 512.
    """

    largest: PositiveInt = 512

    def __call__(self, gm: GraphModule, node: Node) -> Any:
        """Split the pool `node`."""
        image = argument(node, 0)
        height, width = (static_size(size) for size in value_of(gm, image).shape[-2:])
        small = height is not None and width is not None and height * width <= self.largest
        if small or list(argument(node, 1)) != [1, 1]:
            return None
        windows = self._windows(height, width)
        with gm.graph.inserting_before(node):
            pool = call(gm, torch.ops.aten.avg_pool2d.default, image, windows, windows, like=node)
        node.replace_input_with(image, pool)
        return node, f"pool {height}×{width} split into windows of {'×'.join(map(str, windows))}"

    def _windows(self, height: int | None, width: int | None) -> list[int]:
        """Return the height and width of the first pool's windows; raise `Declined` if the pool cannot be split."""
        if height is None or width is None:
            raise Declined("a pool over sizes that vary")
        windows = [_divisor(height), _divisor(width)]
        rest = [height // windows[0], width // windows[1]]
        if max(math.prod(windows), math.prod(rest)) <= self.largest:
            return windows
        if windows == [1, 1]:
            raise Declined(f"pool {height}×{width}, whose sides cannot be divided")
        remain = f"{rest[0]}×{rest[1]} values remain after windows of {windows[0]}×{windows[1]}"
        raise Declined(f"pool {height}×{width}: {remain}")


def _divisor(side: int) -> int:
    return next(d for d in range(math.isqrt(side), 0, -1) if side % d == 0)
