"""Split global average pools whose kernel a device is too small for."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import GraphModule

from quark_fx.context import Context
from quark_fx.errors import ConfigError
from quark_fx.graph import call, static_size, target_name, value_of
from quark_fx.operators import argument
from quark_fx.pass_manager import Change, graph_pass
from quark_fx.placement import module_name

_aten = torch.ops.aten


@graph_pass(after=("pool_means",))
@dataclass(frozen=True)
class SplitLargePools:
    """Rewrite a global average pool of more than `largest` values to a pool of averages and a smaller global one.

    A side `n` is divided by its largest divisor up to `sqrt(n)`; every window has the same size, so that the mean of
    their means is the mean. A pool whose sides have no such divisors stays, as does one over a size that varies.

    Args:
        largest: values under the kernel that the device can do.

    Raises:
        ConfigError: if it is not positive.

    Source:
        AMD Quark for ONNX, `SplitLargeKernelPool`; 512 is what it has for the DPU.
    """

    largest: int = 512

    def __post_init__(self) -> None:
        if self.largest < 1:
            raise ConfigError(f"a kernel has at least one value, not largest={self.largest}")

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Split the pools of `gm`, note those that cannot be, and return how many were."""
        done = 0
        for node in list(gm.graph.nodes):
            if target_name(node) != "aten.adaptive_avg_pool2d.default" or list(argument(node, 1)) != [1, 1]:
                continue
            sides = [static_size(size) for size in value_of(gm, node.args[0]).shape[-2:]]
            if None not in sides and math.prod(s for s in sides if s) <= self.largest:
                continue
            windows = [_divisor(side) for side in sides if side]
            rest = [side // window for side, window in zip(sides, windows, strict=False) if side]
            fits = None not in sides and max(math.prod(windows), math.prod(rest)) <= self.largest
            if context is not None:
                what = f"{sides[0]}×{sides[1]}" if None not in sides else "over sizes that vary"
                rewritten = (
                    f"split into {windows[0]}×{windows[1]} and {rest[0]}×{rest[1]}" if fits else "left: no divisors"
                )
                context.note(Change(module_name(node), f"pool {what} {rewritten}", fits))
            if fits:
                with gm.graph.inserting_before(node):
                    small = call(gm, _aten.avg_pool2d.default, node.args[0], windows, windows, like=node)
                node.replace_input_with(node.args[0], small)
                done += 1
        return done


def _divisor(side: int) -> int:
    return next(d for d in range(math.isqrt(side), 0, -1) if side % d == 0)
