"""Predict peak memory, disk, and time of a run from shapes; enforce its limits."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import Moment, Need, Sizes
from quark_fx.errors import ConfigError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, value_of
from quark_fx.graph.pass_manager import GraphPass, Stage, needs_context, pass_name, pass_stage
from quark_fx.graph.signature import BatchShape
from quark_fx.plan.placement import Plan, plan_quantization
from quark_fx.system.memory import bytes_text, occupied

_PROBE, _LARGE_PROBE = 512, 8192
"""Sizes of the square matrices whose product measures the speed of a CPU and of an accelerator."""

_MARGIN = 1.03
"""Ratio of the suggested limit to the predicted peak, because the process will have grown a little by the next call."""

_AT_HOME = ("convert", "result")
"""Stages that run on the device of the model."""


@dataclass(frozen=True)
class Prediction:
    """Predicted needs of a run: approximate peaks of memory and disk in bytes, and a lower bound of the time.

    Attributes:
        before: Memory of the process when the prediction was made.
        stages: Name of each stage, bytes held when the stage begins, and memory and operations that it needs.
        device: Peak memory of the device that blocks run on, 0 if that is the host.
        disk: Peak size of all files of a streamed run, 0 for other runs.
        seconds: Floating-point operations, divided by the speed of a matrix product measured at prediction time.
        streamed: Whether new tensors are stored in files.
        resident: Whether the model is on the device that blocks run on, and the device is not the CPU.
        unknown: Names of passes that do not report their needs, which are not counted.
    """

    before: int
    stages: tuple[tuple[str, int, Need], ...]
    device: int
    disk: int
    seconds: float
    streamed: bool
    resident: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def host(self) -> int:
        """The peak of the process's memory in bytes, with all cached activations in memory."""
        return self.within(None)

    @property
    def largest(self) -> str:
        """The name of the stage with the highest peak."""
        return max(self.stages, key=lambda stage: self._peak(stage, None))[0]

    @property
    def blocks(self) -> int:
        """The number of blocks that all stages visit in total."""
        return sum(need.blocks for _, _, need in self.stages)

    def within(self, cache: int | None) -> int:
        """Return the peak in bytes if at most `cache` bytes of activations are in memory (`None`: all of them)."""
        return max((self._peak(stage, cache) for stage in self.stages), default=self.before)

    def _peak(self, stage: tuple[str, int, Need], cache: int | None) -> int:
        name, held_bytes, need = stage
        moments = need.moments
        if self.device and (self.resident or name not in _AT_HOME):
            moments = tuple(replace(m, working=0, read=0) for m in moments)
        return self.before + (0 if self.resident else held_bytes) + _peak(moments, cache)

    def room_for_cache(self, memory: int) -> int:
        """Return the bytes of cached activations that fit into `memory`; negative if all else alone exceeds it."""
        return memory - self.within(0)

    def __str__(self) -> str:
        parts = [f"about {bytes_text(self.host)} of memory, {bytes_text(self.before)} of it in use already"]
        least = self.within(0)
        parts += [f"{bytes_text(least)} with activations on disk"] * (least < 0.95 * self.host)
        parts += [f"{bytes_text(self.device)} on the device"] * (self.device > 0)
        parts += [f"{bytes_text(self.disk)} on disk"] * self.streamed
        each = f" in {self.blocks} blocks" * (self.blocks > 0)
        bound = f"{max(self.seconds, 0.01):.2g} s" if self.seconds < 60 else tqdm.format_interval(self.seconds)
        parts.append(f"at least {bound}{each}")
        unknown = f" (not counting {', '.join(self.unknown)}, whose time is unknown)" if self.unknown else ""
        return f"expected: {'; '.join(parts)}{unknown}"


def expect(
    gm: GraphModule,
    config: QuantConfig,
    context: Context,
    passes: Sequence[GraphPass],
    *,
    shelf: bool,
    shapes: Sequence[BatchShape] = (),
) -> Prediction:
    """Predict the needs of the rest of a run.

    Args:
        gm: Graph after the passes that need no data.
        config: Configuration of the run.
        context: Context of the run, with the calibration batches if they are stored.
        passes: Passes that have not run yet, in order.
        shelf: Whether new tensors are stored in files.
        shapes: Shapes of each batch's inputs, for batches that the context does not store. Default: one batch with the
            shapes that the model was captured with.
    """
    plan = plan_quantization(gm, config, quiet=True)
    largest, batches = _largest(context.data.shapes or shapes)
    sizes = Sizes(gm, plan.operators, batches / context.ranks.count, largest)
    home = next((t.device for t in (value_of(gm, n) for n in gm.graph.nodes if is_parameter(n))), context.device)
    stages, held_bytes = [], 0
    for name, need in _stages(sizes, plan, context, passes, shelf=shelf):
        if name != "result" or not shelf:  # the result of a streamed run stays in files
            stages.append((name, 0 if shelf else held_bytes, need))
        held_bytes += need.held
    device, resident = 0, home == context.device and home.type != "cpu"
    if context.device.type != "cpu":
        device = max(
            held_bytes * resident + _peak(replace(m, cached=0) for m in need.moments) for _, held_bytes, need in stages
        )
        lifted = max(block.weights for block in sizes.blocks(Unit.BLOCK))
        device += _allocated(context.device) if resident else lifted
    learned = sizes.codes * sum(pass_stage(p) is Stage.QUANTIZED and hasattr(p, "needs") for p in passes)
    files = sizes.codes + sizes.floats
    disk = held_bytes + learned + files if shelf else 0
    rate = _speed(context.device)
    seconds = sum(need.operations for _, _, need in stages) / rate
    silent = (p for p in passes if needs_context(p) and not hasattr(p, "needs") and not pass_stage(p).is_single)
    unknown = tuple(map(pass_name, silent))
    return Prediction(occupied(), tuple(stages), device, disk, seconds, shelf, resident, unknown)


def _stages(
    sizes: Sizes, plan: Plan, context: Context, passes: Sequence[GraphPass], *, shelf: bool
) -> Iterator[tuple[str, Need]]:
    """Yield the name and the needs of each stage, in order."""
    for p in passes:
        stage = pass_stage(p)
        if hasattr(p, "needs"):
            yield pass_name(p), p.needs(sizes)
        elif stage is Stage.OBSERVED and plan.observed:
            yield pass_name(p), _calibration(sizes, context)
        elif stage is Stage.SETTLED:
            codes = sizes.largest_codes if shelf else sizes.codes
            yield pass_name(p), Need((Moment(codes),), held=sizes.codes)
    # The result copies the tensors that it shares with the model.
    yield "result", Need((Moment(sizes.floats),))


def _calibration(sizes: Sizes, context: Context) -> Need:
    if context.by_block:
        return sizes.walk(Unit.BLOCK, lambda block: 0, to_end=True)
    operations = int(sum(block.operations for block in sizes.blocks(Unit.BLOCK)) * sizes.batches)
    return Need((Moment(sizes.forward + _laid_out(sizes)),), operations=operations)


def _laid_out(sizes: Sizes) -> int:
    """Return the bytes of convolution weights that are copied to another memory layout while batches run."""
    linears = (Linear.of(node) for node in sizes.gm.graph.nodes)
    images = (linear for linear in linears if linear is not None and linear.kind == "conv" and len(linear.kernel) == 2)
    weights = {linear.stored.node for linear in images if max(linear.kernel) > 1}
    return sum(value_of(sizes.gm, weight).nbytes for weight in weights)


def _largest(shapes: Sequence[BatchShape]) -> tuple[BatchShape, float]:
    """Return the shapes of the largest batch, and the number of such batches that hold as many values as all data."""
    counts = {shape: sum(map(math.prod, shape)) for shape in shapes}
    most = max(counts, key=lambda shape: counts[shape], default=())
    return most, sum(counts[shape] for shape in shapes) / max(1, counts.get(most, 1)) if shapes else 1


def _allocated(device: torch.device) -> int:
    module: Any = torch.get_device_module(device)
    return int(module.memory_allocated(device)) if hasattr(module, "memory_allocated") else 0


def _speed(device: torch.device) -> float:
    """Return the floating-point operations per second of a matrix product in float32."""
    size = _PROBE if device.type == "cpu" else _LARGE_PROBE
    a = torch.ones(size, size, device=device, dtype=torch.float32)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        float((a @ a)[0, 0])  # waits for the device
        best = min(best, time.perf_counter() - began)
    return 2 * size**3 / best


def require_room(prediction: Prediction, memory: int | None, disk: int | None) -> None:
    """Raise `ConfigError` if a run exceeds its limits even with its cache on disk; the message names a larger limit."""
    if memory is not None and not prediction.before:
        raise ConfigError(
            "memory= requires a system that reports the memory of a process (/proc/self/status); omit memory= here"
        )
    if disk is not None and not prediction.streamed:
        raise ConfigError("disk= limits a run that writes to output_dir=; set output_dir= as well, or leave out disk=")
    if memory is not None and prediction.room_for_cache(memory) < 0:
        least = prediction.within(0)
        ways = [f'memory="{bytes_text(_MARGIN * least)}" or more']
        ways += [] if prediction.streamed else ["Resources(output_dir=...) or --stream, which keep results in files"]
        raise ConfigError(
            f"memory={bytes_text(memory)} is not enough: {prediction.largest} needs about {bytes_text(least)}, "
            f"{bytes_text(prediction.before)} of it in use already; pass {', or '.join(ways)}, or pass batches of "
            "fewer samples"
        )
    if disk is not None and prediction.disk > disk:
        raise ConfigError(
            f"disk={bytes_text(disk)} is not enough: files of this run take about {bytes_text(prediction.disk)} at "
            f'once; pass disk="{bytes_text(_MARGIN * prediction.disk)}"'
        )


def _peak(moments: Iterable[Moment], cache: int | None = None) -> int:
    """Return the bytes of the largest moment, with at most `cache` bytes of activations in memory (`None`: all)."""
    return max((m.working + _in_memory(m, cache) for m in moments), default=0)


def _in_memory(moment: Moment, cache: int | None) -> int:
    if cache is None or moment.cached <= cache:
        return moment.cached
    return cache + min(moment.read, moment.cached)


__all__ = ["Prediction", "expect", "require_room"]
