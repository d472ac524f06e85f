"""Split global average pools with kernels that are too large for a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from quark_fx.engine.context import Context
from quark_fx.errors import Declined
from quark_fx.graph.nodes import call, static_size, target_name, value_of
from quark_fx.graph.operators import argument
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.plan.placement import module_name
from quark_fx.system.options import PositiveInt

_aten = torch.ops.aten


@graph_pass(after=("pool_means",))
@dataclass(frozen=True)
class SplitLargePools:
    """Rewrite a global average pool of more than `largest` values to a pool of small windows and a smaller global one.

    The windows divide a side `n` by its largest divisor up to `sqrt(n)`; all windows have the same size, so the mean of
    their means is the mean. A pool without such divisors is left alone, and so is a pool with dynamic sizes.

    Args:
        largest: Most values under a kernel that the device supports.

    Raises:
        ConfigError: If it is not positive.

    Source:
        AMD Quark for ONNX, `SplitLargeKernelPool`; its limit for the DPU is 512.
    """

    largest: PositiveInt = 512

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Split the pools of `gm`, report those that cannot be split, and return the number of split ones."""
        done = 0
        for node in list(gm.graph.nodes):
            if target_name(node) != "aten.adaptive_avg_pool2d.default" or list(argument(node, 1)) != [1, 1]:
                continue
            height, width = (static_size(size) for size in value_of(gm, node.args[0]).shape[-2:])
            if height is not None and width is not None and height * width <= self.largest:
                continue
            try:
                windows, reason = self._windows(height, width), ""
            except Declined as declined:
                windows, reason = [], declined.reason
            if windows:
                with gm.graph.inserting_before(node):
                    small = call(gm, _aten.avg_pool2d.default, node.args[0], windows, windows, like=node)
                node.replace_input_with(node.args[0], small)
                done += 1
            if context is not None:
                split = f"pool {height}×{width} split into windows of {'×'.join(map(str, windows))}"
                context.note(Change(module_name(node), f"skipped: {reason}" if reason else split, not reason))
        return done

    def _windows(self, height: int | None, width: int | None) -> list[int]:
        """Return the sides of the first pool's windows; raise `Declined` if the pool cannot be split."""
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
