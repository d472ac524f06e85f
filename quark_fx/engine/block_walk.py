"""Run each block on all calibration batches before the next block, in float and quantized side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from tqdm.auto import tqdm

from quark_fx.engine.blocks import Block, Unit, carriers, extract, find_blocks
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import activation_scales
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import (
    DEQUANTIZE,
    get_attr,
    is_parameter,
    named_nodes,
    parameter,
    placeholders,
    results_of,
    set_parameter,
    stored_tensors,
    target_name,
    tensor_of,
)
from quark_fx.graph.pass_manager import Change
from quark_fx.plan.placement import Coded
from quark_fx.system import accelerator
from quark_fx.system.memory import give_back


@dataclass
class BlockRun:
    """State of one block while the walk visits it.

    Attributes:
        block: Description of the block.
        index: Position of the block, from 0.
        reference: Float module of the block, on the device.
        module: Quantized module of the block, on the device. `store` changes it; later blocks see its state at the end
            of the visit.
        finished: True if the block was loaded from a checkpoint, with its changes, so that learning is complete.
        free_scales: Names of the activation scales that may change, because no earlier block used them.
    """

    block: Block
    index: int
    reference: GraphModule
    module: GraphModule
    finished: bool
    free_scales: tuple[str, ...]
    _streams: Streams
    _whole: GraphModule
    _context: Context
    _learned: dict[str, Tensor] = field(default_factory=dict)
    _undo: dict[str, Tensor] | None = None

    def reference_inputs(self, batch: int) -> list[Any]:
        """Return the float inputs of the block."""
        return self._streams.values("float", self.block.inputs, batch)

    def inputs(self, batch: int) -> list[Any]:
        """Return the inputs of the block as the quantized blocks before it compute them."""
        return self._streams.values("quantized", self.block.inputs, batch)

    def targets(self, batch: int) -> list[Any]:
        """Return the float values that the block computes (`Block.made`), in order."""
        return self._streams.values("float", self.block.made, batch)

    def rows(self, batch: int) -> int:
        """Return the size of dimension 0 of the first target, without reading the targets."""
        return self._streams.cache.rows(("float", self.block.made[0], batch)) if self.block.made else 0

    def outputs(self, batch: int) -> list[Any]:
        """Return the current outputs of the quantized block on its quantized inputs, in the order of `targets`."""
        with torch.no_grad(), running(self._context.data.number_of(batch)):
            return self.made(self.module(*self.inputs(batch)))

    def made(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the entries of `outputs` that the block itself computes (`Block.made`)."""
        by_name = dict(zip(self.block.outputs, outputs, strict=True))
        return [by_name[name] for name in self.block.made]

    def validation_error(
        self, outputs: Callable[[int], Sequence[Any]] | None = None, training: Tensor | None = None
    ) -> float:
        """Return the relative squared error of the block's outputs on validation batches.

        Squares are summed over the batches of all ranks before the division, so the result does not depend on how
        samples are split into batches and ranks. Collective: every rank must call it, and gets the same number.

        Args:
            outputs: Function from a batch to the outputs of a version of the block, in the order of `targets`; default:
                the current block.
            training: Reconstruction error of the last gradient step, shape (), read in the same device transfer.

        Raises:
            CalibrationError: If either error is not finite; the message names the block's operators.
        """
        # Columns: squared error, squared target, and number of batches in which the output is a floating-point tensor.
        sums = torch.zeros(len(self.block.made), 3, dtype=torch.float64, device=self._context.device)

        def squares(batch: int) -> list[tuple[int, Tensor]]:
            terms = _squares((outputs or self.outputs)(batch), self.targets(batch))
            return [(i, torch.stack((noise, signal, torch.ones_like(noise)))) for i, noise, signal in terms]

        with torch.no_grad():
            for batch in self._context.data.validation:
                for i, triple in self._context.with_room(partial(squares, batch)):
                    sums[i] += triple
        self._context.ranks.add(sums)
        read = torch.cat((sums.flatten(), sums.new_zeros(1) if training is None else training.view(1))).cpu()
        if not math.isfinite(trained := float(read[-1])):
            raise CalibrationError(
                f"the reconstruction error of {self.operators} became {trained} during learning; lower the "
                "learning rate, or exclude the operators"
            )
        noise, signal, count = read[:-1].view(-1, 3).unbind(1)
        errors = (noise / signal.clamp_min(_NOTHING))[count > 0]
        error = float(errors.mean()) if len(errors) else 0.0
        if not math.isfinite(error):
            raise CalibrationError(
                f"after quantization, {self.operators} computes non-finite values from finite inputs; exclude it, or "
                "check its weights"
            )
        return error

    @property
    def operators(self) -> str:
        """Modules of the block's operators, for messages."""
        plan = self._context.plan
        return ", ".join(plan[name].name if name in plan else name for name in self.block.operators)

    def store(self, name: str, value: Tensor) -> None:
        """Replace the tensor `name` in the block and in the whole graph."""
        self.store_all({name: value})

    def store_all(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace several tensors, by their names; the host waits for the device only once."""
        # Use the strides that a checkpoint restores, because the rounding of a convolution depends on the memory
        # layout. `contiguous` leaves strides of dimensions of size 1 unchanged; `view` resets them.
        values = {name: x.detach().contiguous().view(-1).view(x.shape) for name, x in tensors.items()}
        before = {name: tensor_of(self._whole, name) for name in values}
        if self._undo is not None:
            self._undo.update({name: x for name, x in before.items() if name not in self._undo})
        for device in {x.device for x in before.values()}:
            _set_all(self._whole, {name: x for name, x in values.items() if before[name].device == device}, device)
        _set_all(self.module, values, self._context.device)
        self._learned |= values

    def attempt(self, change: Callable[[], object], best: float) -> tuple[float, str]:
        """Call `change`, which stores tensors; restore the old tensors unless the validation error falls below `best`.

        Args:
            change: Function that stores tensors. If it raises `OverflowError`, because a value does not fit its type,
                the old tensors are restored as well.
            best: Error to improve on; an error that is not finite is never an improvement.

        Returns:
            The validation error after the change and an empty text, or infinity and the reason for it.
        """
        replaced = self._undo = {}
        error, failure = math.inf, ""
        try:
            change()
        except OverflowError as cause:
            failure = str(cause)
        else:
            try:
                error = self.validation_error()
            except CalibrationError as cause:
                failure = str(cause)
        self._undo = None
        if not error < best:
            self.store_all(replaced)
        return error, failure

    @property
    def learned(self) -> dict[str, Tensor]:
        """Tensors stored during this visit, by their names."""
        return self._learned


def _set_all(gm: GraphModule, tensors: Mapping[str, Tensor], device: torch.device) -> None:
    """Replace parameters by `tensors`; tensors on other devices are copied to `device` together."""
    away = [name for name, x in tensors.items() if x.device != device]
    copied = accelerator.moved([tensors[name] for name in away], device, copy=True) if away else []
    for name, x in {**tensors, **dict(zip(away, copied, strict=True))}.items():
        set_parameter(gm, name, x)


_NOTHING = 1e-12
"""Lower limit of the sum of squared targets that an error is divided by."""


def energies(targets: Sequence[Any], device: torch.device) -> Tensor:
    """Return the sum of squares of each target, float32, on `device`; 0 for anything but a floating-point tensor."""
    sums = torch.zeros(len(targets), device=device, dtype=torch.float32)
    for i, _, signal in _squares(targets, targets):
        sums[i] = signal
    return sums


def relative_error(outputs: Sequence[Any], targets: Sequence[Any], signals: Tensor | None = None) -> Tensor:
    """Return the squared error relative to the squared targets, averaged over the floating-point targets.

    Positions where a target is not finite are ignored.

    Args:
        outputs: Outputs, one for each target.
        targets: Desired outputs.
        signals: Sum of squares of each target, to divide by; default: `energies(targets)`. If a batch is split into
            parts and `signals` are the sums of the whole batch, the errors of the parts add up to the batch's error.
    """
    squares = _squares(outputs, targets)
    errors = [e / (signal if signals is None else signals[i]).clamp_min(_NOTHING) for i, e, signal in squares]
    return torch.stack(errors).mean() if errors else torch.zeros((), dtype=torch.float32)


def _squares(outputs: Sequence[Any], targets: Sequence[Any]) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the position, the sum of squared errors, and the sum of squares of each floating-point target."""
    for i, (y, target) in enumerate(zip(outputs, targets, strict=True)):
        if isinstance(target, Tensor) and target.is_floating_point():
            t = target.float()
            finite = t.isfinite()  # a model may return masked values
            noise, signal = (torch.where(finite, x, 0.0).square().sum() for x in (y.float() - t, t))
            yield i, noise, signal


@contextmanager
def running(batch: int) -> Iterator[None]:
    """Within the context, where a graph runs on a batch, turn an `IndexError` into a `CalibrationError`."""
    try:
        yield
    except IndexError as error:
        raise CalibrationError(
            f"calibration batch {batch} contains an index outside of an embedding table ({error}): a token outside of "
            "the vocabulary, or a sequence longer than the position table; remove or shorten that sample"
        ) from error


class Streams:
    """Values of batches at the current cut of a graph, in one stream for float values and one for quantized values.

    Args:
        gm: Graph; its inputs are read from the calibration data.
        context: Context with the calibration data and the cache.
        batches: Indices of the batches.
        names: Names of the streams.
    """

    def __init__(
        self,
        gm: GraphModule,
        context: Context,
        batches: Sequence[int],
        names: tuple[str, ...] = ("float", "quantized"),
    ) -> None:
        self.context, self.cache = context, context.cache
        self.batches, self.names = batches, names
        # A quantized graph has the same inputs as the float graph, which are cached already.
        self.inputs = {node.name: position for position, node in enumerate(placeholders(gm))}
        self.shared = set(self.inputs)
        self._last: dict[str, int] = {}

    def values(self, stream: str, names: Sequence[str], batch: int) -> list[Any]:
        """Return the values called `names` in a stream, `"float"` or `"quantized"`, for a batch.

        If batches are read in order, the values of the next batch are prefetched to the device.
        """
        values = [self.value(stream, name, batch) for name in names]
        follows = batch in (self._last.get(stream, batch) + 1, self.batches[0])
        self._last[stream] = batch
        if follows and batch + 1 in self.batches:
            self.cache.prefetch(self._key(stream, name, batch + 1) for name in names)
        return values

    def value(self, stream: str, name: str, batch: int) -> Any:
        """Return the value called `name` in a stream for a batch."""
        if name in self.inputs:
            return self.context.data.input(batch, self.inputs[name])
        return self.cache.get(self._key(stream, name, batch))

    def _key(self, stream: str, name: str, batch: int) -> Hashable:
        if name in self.inputs:
            return self.context.data.key_of_input(batch, self.inputs[name])
        return "float" if name in self.shared else stream, name, batch

    def advance(self, stream: str, block: Block, module: GraphModule) -> None:
        """Compute the block's outputs from its inputs, batch by batch, and cache them."""
        new = {name for name in block.outputs if name not in block.inputs}
        with torch.no_grad():
            for batch in self.batches:
                give_back()
                for watch in module.modules():
                    if isinstance(watch, _Once):
                        watch.is_done = False
                with running(self.context.data.number_of(batch)):
                    outputs = self.context.with_room(
                        lambda batch=batch: module(*self.values(stream, block.inputs, batch)),  # type: ignore[misc]
                    )
                for name, value in zip(block.outputs, outputs, strict=True):
                    if name in new and not (stream == "quantized" and name in self.shared):
                        self.context.with_room(partial(self.cache.put, (stream, name, batch), value))

    def forget(self, names: set[str]) -> None:
        """Drop the values called `names` from all streams."""
        for key in itertools.product(self.names, names, self.batches):
            self.cache.drop(key)


def walk_blocks(
    gm: GraphModule,
    context: Context,
    *,
    unit: Unit = Unit.BLOCK,
    label: str = "blocks",
    side_by_side: bool = True,
    runs: bool = True,
) -> Iterator[BlockRun]:
    """Visit the blocks of a quantized graph in order; inputs of a block reflect the changes to earlier blocks.

    The float outputs of a block are computed before its visit, the quantized outputs after it, each once per batch. A
    walk therefore costs two forward passes over the data however many blocks there are, and stores the values at one
    cut at a time. It ends with the last block that has a quantized weight. Only the tensors of the visited block are on
    `context.device`. A block from `context.checkpoint` has its changes applied, and is marked as finished.

    Args:
        gm: Quantized graph, changed by `BlockRun.store`.
        context: Context of the run; `gm` was converted from its `float_graph`.
        unit: Granularity of the cuts.
        label: Label of the progress bar.
        side_by_side: Whether to compute the float values as well. Without them, a walk costs one forward pass, and a
            `BlockRun` provides only the quantized inputs and the modules.
        runs: Whether to run the blocks on the data. Without a run, a `BlockRun` provides only the modules.

    Raises:
        CalibrationError: If calibration data is missing, and the blocks run.
    """
    if runs:
        context.data.require_batches()
    reference = context.float_graph
    walk = context.next_walk()
    blocks = _learning(find_blocks(reference, unit), context)
    streams = Streams(reference, context, range(len(context.data.batches) if runs else 0))
    float_nodes, quantized_nodes = named_nodes(reference), carriers(gm)
    settled = set[str]()
    try:
        bar = tqdm(blocks, desc=label, unit="block", disable=not context.progress, leave=False)
        for index, block in enumerate(bar):
            give_back()
            part = context.with_room(partial(lift, reference, block, float_nodes, context.device))
            if side_by_side:
                streams.shared |= block.shared
                streams.advance("float", block, part)
            module = context.with_room(partial(lift, gm, block, quantized_nodes, context.device))
            record = context.checkpoint.load(walk, index) if context.checkpoint is not None else None
            free = tuple(name for name in activation_scales(module) if name not in settled)
            settled.update(free)
            run = BlockRun(block, index, part, module, record is not None, free, streams, gm, context)
            for name, value in (record[0] if record else {}).items():
                run.store(name, value)
            for change in record[1] if record else ():
                context.note(change)
            before = len(context.changes)
            yield run
            if record is None:
                _exchange(run, context, before)
            if record is None:
                context.keep_block(walk, index, run.learned, context.changes[before:])
            if runs and index + 1 < len(blocks):
                values = context.with_room(partial(_with_weights, run.module))
                streams.advance("quantized", block, values)
                release(values)
                streams.forget(set(block.inputs) - set(block.outputs))
            release(part)
            release(module)
    finally:
        streams.forget({name for block in blocks for name in (*block.inputs, *block.outputs)})


def _exchange(run: BlockRun, context: Context, before: int) -> None:
    """Fetch the tensors that other ranks stored and the changes they noted in this visit.

    Ranks may store the same tensor, because they computed it together: the first rank's copy is used. A change that
    several ranks noted is reported once.

    Args:
        run: Visited block.
        context: Context of the run.
        before: Number of `context.changes` before the visit.
    """
    if context.ranks.alone:
        return
    ranks = context.ranks
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in run.learned.items()}
    owners: dict[str, int] = {}
    changes: list[Change] = []
    by_rank = ranks.gather((shapes, context.changes[before:]))
    for rank, (theirs, notes) in enumerate(by_rank):
        earlier_changes = set(changes)
        owners = dict.fromkeys(theirs, rank) | owners
        changes += [change for change in notes if change not in earlier_changes]
    for name, owner in owners.items():
        shape, dtype = by_rank[owner][0][name]
        empty = torch.empty(shape, dtype=dtype, device=ranks.device)
        value = run.learned[name].to(ranks.device) if owner == ranks.index else empty
        ranks.broadcast(value, owner)
        if owner != ranks.index:
            run.store(name, value)
    order = {operator.name: position for position, operator in enumerate(context.plan.values())}
    context.changes[before:] = sorted(changes, key=lambda change: order.get(change.name, len(order)))


def _learning(blocks: Sequence[Block], context: Context) -> Sequence[Block]:
    """Return the blocks up to the last one with a quantized weight; outputs of later blocks are not needed."""
    weights = {name for name, operator in context.plan.items() if isinstance(operator, Coded)}
    count = max((i for i, block in enumerate(blocks, 1) if not weights.isdisjoint(block.operators)), default=0)
    return blocks[:count]


@dataclass(frozen=True)
class FloatRun:
    """State of one block of a float graph while the walk visits it.

    Attributes:
        block: Description of the block.
        module: Module of the block, on the device.
    """

    block: Block
    module: GraphModule
    _streams: Streams

    def inputs(self, batch: int) -> list[Any]:
        """Return the inputs of the block for a batch."""
        return self._streams.values("float", self.block.inputs, batch)


def walk_float_blocks(
    gm: GraphModule,
    context: Context,
    *,
    unit: Unit = Unit.BLOCK,
    label: str = "blocks",
    watched: Mapping[str, Node] | None = None,
) -> Iterator[FloatRun]:
    """Visit the blocks of a graph in order, with their inputs for every batch, in one forward pass over the data.

    Only the tensors of the visited block are on `context.device`.

    Args:
        gm: Graph that does not change during the walk.
        context: Context with the batches.
        unit: Granularity of the cuts.
        label: Label of the progress bar.
        watched: Calls whose results nothing reads, by their names; each runs once per batch, in the first block that
            contains its argument.
    """
    context.data.require_batches()
    blocks = find_blocks(gm, unit)
    streams = Streams(gm, context, range(len(context.data.batches)))
    nodes, watches = named_nodes(gm), dict(watched or {})
    try:
        for index, block in enumerate(
            tqdm(blocks, desc=label, unit="block", disable=not context.progress, leave=False)
        ):
            give_back()
            streams.shared |= block.shared
            part = context.with_room(partial(lift, gm, block, nodes, context.device, watches.values()))
            for name, watch in list(part.named_children()):
                if any(node.op == "call_module" and node.target == name for node in part.graph.nodes):
                    part.add_module(name, _Once(watch))
            yield FloatRun(block, part, streams)
            if watched is not None or index + 1 < len(blocks):
                streams.advance("float", block, part)
            # The inputs of a block were watched in the block that computed them.
            watches = {name: node for name, node in watches.items() if name not in named_nodes(part)}
            release(part)
            streams.forget(set(block.inputs) - set(block.outputs))
    finally:
        streams.forget({name for block in blocks for name in (*block.inputs, *block.outputs)})


class _Once(nn.Module):
    """Module that passes a value to a watch once per batch, even if its block runs again after a memory shortage."""

    def __init__(self, watch: nn.Module) -> None:
        super().__init__()
        self.watch, self.is_done = watch, False

    def forward(self, x: Tensor) -> None:
        if not self.is_done:
            self.watch(x)
            self.is_done = True


def lift(
    gm: GraphModule,
    block: Block,
    nodes: Mapping[str, Node],
    device: torch.device,
    watches: Iterable[Node] = (),
    also: Sequence[str] = (),
    moved: Callable[[str, Tensor], Tensor] | None = None,
) -> GraphModule:
    """Return a block as a module with its tensors on the device; the graph's own tensors stay where they are.

    Args:
        gm: Graph of the block.
        block: Block to extract.
        nodes: Nodes of the graph, by their names.
        device: Device of the tensors.
        watches: Calls whose results nothing reads; each is included if the block contains its argument.
        also: Names of values in the block to return after its outputs.
        moved: Function from a tensor's name and the tensor to the tensor on the device; default: `Tensor.to`.
    """
    inputs, outputs = ([nodes[name] for name in names] for names in (block.inputs, (*block.outputs, *also)))
    part = extract(gm, inputs, outputs, watches=watches)
    for name, tensor in stored_tensors(part).items():
        on_device = tensor.to(device) if moved is None else moved(name, tensor)
        if on_device is not tensor:
            set_parameter(part, name, on_device)
    for node in part.graph.nodes:
        if "device" in node.kwargs:
            node.update_kwarg("device", device)
    part.recompile()
    return part


def _with_weights(module: GraphModule) -> GraphModule:
    """Return a copy of a block whose weights are dequantized once, instead of for every batch."""
    module = extract(module, placeholders(module), results_of(module))
    compute_weights(module)
    return module


def compute_weights(gm: GraphModule) -> None:
    """Replace quantized constants by their dequantized values."""
    for node in list(gm.graph.nodes):
        if target_name(node) == DEQUANTIZE and all(is_parameter(source) for source in node.all_input_nodes):
            value = node.target(*(parameter(gm, a) if isinstance(a, Node) else a for a in node.args))
            with gm.graph.inserting_before(node):
                node.replace_all_uses_with(get_attr(gm, f"{node.name}_value", value))
            gm.graph.erase_node(node)
    gm.recompile()


def release(module: GraphModule) -> None:
    """Release a module's tensors now; its graph is a reference cycle, so they would wait for the garbage collector."""
    for owner in module.modules():
        owner._parameters.clear()
        owner._buffers.clear()


__all__ = [
    "BlockRun",
    "FloatRun",
    "Streams",
    "compute_weights",
    "energies",
    "lift",
    "relative_error",
    "release",
    "running",
    "walk_blocks",
    "walk_float_blocks",
]
