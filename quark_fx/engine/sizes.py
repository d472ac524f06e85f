"""Compute memory and operations of a graph's values from shapes alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.engine.blocks import Block, Unit, between, find_blocks
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import is_getitem, named_nodes, placeholders, value_of
from quark_fx.graph.operators import operator_row, stored_weights
from quark_fx.graph.signature import BatchShape
from quark_fx.plan.placement import Coded, PlannedOperator

FLOAT32 = 4
"""Bytes of a float32 value; solvers compute in float32."""


@dataclass(frozen=True)
class Moment:
    """Bytes at one moment of a stage, in addition to tensors held throughout.

    Attributes:
        working: Bytes on the device that blocks run on.
        cached: Bytes of cached activations, which may be stored on disk instead.
        read: Bytes of cached activations that are read back at once if they are on disk.
    """

    working: int
    cached: int = 0
    read: int = 0


@dataclass(frozen=True)
class Need:
    """Needs of a stage of a run.

    Attributes:
        moments: Moments of the stage; the largest is its peak.
        held: Bytes of the new tensors that remain after the stage.
        operations: Floating-point operations; a multiplication and an addition count as two.
        blocks: Number of blocks that the stage visits.
    """

    moments: tuple[Moment, ...] = (Moment(0),)
    held: int = 0
    operations: int = 0
    blocks: int = 0

    def __add__(self, other: Need) -> Need:
        """Return the needs of both stages, one after the other."""
        held_bytes, operations = self.held + other.held, self.operations + other.operations
        return Need((*self.moments, *other.moments), held_bytes, operations, self.blocks + other.blocks)


@dataclass(frozen=True)
class Matrices:
    """Sizes of an operator's quantized weight.

    Attributes:
        groups, outputs, inputs: Shape of the weight as a stack of matrices.
        itemsize: Bytes per value.
        rows: Input rows in one batch.
        apart: Result of `has_scales_apart`.
    """

    groups: int
    outputs: int
    inputs: int
    itemsize: int
    rows: int
    apart: bool = True

    @property
    def values(self) -> int:
        """Number of values."""
        return self.groups * self.outputs * self.inputs

    @property
    def moment(self) -> int:
        """Bytes of the input's Hessian in float32."""
        return FLOAT32 * self.groups * self.inputs**2

    @property
    def target(self) -> int:
        """Bytes of the weight in float32."""
        return FLOAT32 * self.values


@dataclass(frozen=True)
class BlockSize:
    """Memory and operations of a block.

    Attributes:
        matrices: Quantized weights of the block's operators.
        forward: Peak bytes of the block's values in a run on one batch, without its inputs.
        entrances: Peak bytes of a run that computes only the inputs of the block's weighted operators.
        every_value: Total bytes of all values in the block, which a backward pass needs at once.
        entering: Bytes of the block's inputs for one batch, without inputs of the model.
        leaving: Bytes of the block's new outputs for one batch.
        operations: Floating-point operations for one batch.
    """

    matrices: tuple[Matrices, ...]
    forward: int
    entrances: int
    every_value: int
    entering: int
    leaving: int
    operations: int

    @property
    def weights(self) -> int:
        """Bytes of the block's dequantized weights in float32."""
        return sum(m.target for m in self.matrices)


@dataclass
class Sizes:
    """Sizes of a captured graph's values, for batches as large as the calibration batches.

    Args:
        gm: Captured graph.
        operators: Planned operators of the graph.
        batches: Number of batches of the largest size that hold as many values as all data.
        largest: Shapes of the largest batch's inputs; default: the captured shapes.
    """

    gm: GraphModule
    operators: Sequence[PlannedOperator]
    batches: float
    largest: BatchShape = ()
    _lengths: dict[Any, int] = field(default_factory=dict)
    _blocks: dict[Unit, tuple[BlockSize, ...]] = field(default_factory=dict)

    def count(self, node: Node) -> int:
        """Return the number of values of a node."""
        return sum(n for n, _ in self._tensors(node))

    def nbytes(self, node: Node) -> int:
        """Return the size of a node's value in bytes; 0 for a view or a parameter."""
        if node.op in ("get_attr", "placeholder", "output") or _views(node):
            return 0
        return self._whole(node)

    def _tensors(self, node: Node) -> list[tuple[int, int]]:
        value = value_of(self.gm, node)
        leaves = value if isinstance(value, tuple | list) else (value,)
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return [(math.prod(map(self._length, tensor.shape)), tensor.itemsize) for tensor in tensors]

    def _length(self, size: int | torch.SymInt) -> int:
        """Return the size of a dimension in the largest batch."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._lengths:
            length: Any = expression.subs(self._symbols)
            self._lengths[expression] = int(length) if length.is_number else int(size.node.hint or 1)
        return self._lengths[expression]

    @cached_property
    def _symbols(self) -> dict[Any, int]:
        """Dynamic dimensions of the inputs, with their sizes."""
        lengths: dict[Any, int] = {}
        for node, shape in zip(placeholders(self.gm), self.largest, strict=bool(self.largest)):
            value = value_of(self.gm, node)
            sizes: Sequence[Any] = value.shape if isinstance(value, Tensor) else ()
            varying = (
                (size, length) for size, length in zip(sizes, shape, strict=True) if isinstance(size, torch.SymInt)
            )
            lengths |= {size.node.expr: length for size, length in varying if size.node.expr.is_Symbol}
        return lengths

    def live(self, nodes: Collection[Node], kept: Iterable[Node] = ()) -> int:
        """Return the peak of live bytes while `nodes` run in order; values of `kept` stay alive until the end."""
        order = list(nodes)
        owner = {node: node for node in order}
        for node in order:
            source = node.args[0] if _views(node) and node.args else None
            owner[node] = owner.get(source, node) if isinstance(source, Node) else node
        last = {owner[node]: i for i, node in enumerate(order)}
        for i, node in enumerate(order):
            for source in node.all_input_nodes:
                if source in owner:
                    last[owner[source]] = max(last[owner[source]], i)
        last |= {owner[node]: len(order) for node in kept if node in owner}
        ends: dict[int, int] = {}
        alive = peak = 0
        for i, node in enumerate(order):
            taken = self.nbytes(node)
            alive += taken
            peak = max(peak, alive)
            if owner[node] is node:
                ends[last[node]] = ends.get(last[node], 0) + taken
            alive -= ends.pop(i, 0)
        return peak

    @cached_property
    def forward(self) -> int:
        """Peak bytes of a run of the whole graph on one batch."""
        return self.live(list(self.gm.graph.nodes))

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights of `matrices` in float."""
        return sum(m.values * m.itemsize for m in self.matrices.values())

    @property
    def forward_operations(self) -> int:
        """Operations of a forward pass over all batches."""
        return int(self.batches * sum(block.operations for block in self.blocks(Unit.BLOCK)))

    @property
    def coded(self) -> list[Coded]:
        """Operators with quantized weights."""
        return [op for op in self.operators if isinstance(op, Coded)]

    @cached_property
    def matrices(self) -> dict[str, Matrices]:
        """Quantized weights that multiply rows, by the name of their operator's node."""
        return {op.node.name: matrices for op in self.coded if (matrices := self._matrices(op)) is not None}

    def _matrices(self, op: Coded) -> Matrices | None:
        mapping = op.linear.matrices if op.linear is not None else None
        if mapping is None:
            return None
        weight = value_of(self.gm, op.weight_node)
        groups, outputs, inputs = (int(size) for size in mapping.matrix(weight).shape)
        stacked = 1 if mapping.offsets is not None else groups
        rows = self.count(op.node) // max(1, stacked * outputs)
        return Matrices(groups, outputs, inputs, weight.itemsize, rows, has_scales_apart(op.weight, mapping))

    @cached_property
    def codes(self) -> int:
        """Bytes of all codes and scales."""
        return sum(self._stored)

    @property
    def largest_codes(self) -> int:
        """Bytes of the codes and scales of the largest weight."""
        return max(self._stored, default=0)

    @cached_property
    def _stored(self) -> list[int]:
        weights = {op.weight_node.target: op for op in self.coded}
        return [_stored(value_of(self.gm, op.weight_node), op.weight) for op in weights.values()]

    @cached_property
    def floats(self) -> int:
        """Bytes of the parameters that are not quantized."""
        names = {op.weight_node.target for op in self.coded}
        nodes = {n.target: n for n in self.gm.graph.nodes if n.op == "get_attr" and n.target not in names}
        return sum(self._whole(node) for node in nodes.values())

    def blocks(self, unit: Unit) -> tuple[BlockSize, ...]:
        """Return the blocks of the graph."""
        if unit not in self._blocks:
            nodes = named_nodes(self.gm)
            self._blocks[unit] = tuple(self._block(block, nodes) for block in find_blocks(self.gm, unit))
        return self._blocks[unit]

    def _block(self, block: Block, nodes: dict[str, Node]) -> BlockSize:
        inputs, outputs = ([nodes[name] for name in names] for names in (block.inputs, block.outputs))
        inside = between(self.gm, inputs, outputs)
        read = [node for name in block.operators if isinstance(node := nodes[name].args[0], Node)]
        graph_inputs = set(placeholders(self.gm))
        return BlockSize(
            matrices=tuple(self.matrices[name] for name in block.operators if name in self.matrices),
            forward=self.live(inside, outputs),
            entrances=self.live(between(self.gm, inputs, read), read),
            every_value=sum(self.nbytes(node) for node in inside),
            entering=sum(self._whole(node) for node in inputs if node not in graph_inputs),
            leaving=sum(self._whole(node) for node in outputs if node not in inputs),
            operations=sum(self._operations(node) for node in inside),
        )

    def _whole(self, node: Node) -> int:
        """Return the bytes of a value that is stored separately, even if it is a view."""
        return sum(n * itemsize for n, itemsize in self._tensors(node))

    def _operations(self, node: Node) -> int:
        row = operator_row(node)
        if row is None or not row.activations:
            return 0
        if (linear := Linear.of(node)) is not None:
            stack = math.prod(linear.shape[:-2]) if linear.stacked else 1
            return 2 * self.count(node) * math.prod(linear.shape) // max(1, linear.shape[linear.output_axis] * stack)
        if row.weight is not None:  # a recurrent layer, which multiplies by all its weights at every step
            value, weights = node.all_input_nodes[0], stored_weights(node, row)
            steps = self.count(value) // max(1, self._length(value_of(self.gm, value).shape[-1]))
            return 2 * steps * sum(self.count(weight.node) for weight in weights)
        factor = node.args[1]
        if not isinstance(factor, Node):
            return 0
        shape = value_of(self.gm, factor).shape
        groups = self._length(shape[0]) if len(shape) == 3 else 1
        return 2 * self.count(node) * self.count(factor) // max(1, self._length(shape[-1]) * groups)

    def back_walk(self) -> Need:
        """Return the needs of a forward and backward pass per batch (`quark_fx.engine.back_walk`)."""
        blocks = self.blocks(Unit.BLOCK)
        cached = sum(block.entering for block in blocks)
        moments = (
            # All values of a block, and its gradients, whose peak equals the peak of values in a forward pass.
            Moment(block.every_value + block.forward, cached, 2 * block.entering)
            for block in blocks
        )
        operations = 4 * self.batches * sum(block.operations for block in blocks)
        return Need(tuple(moments), operations=int(operations), blocks=2 * len(blocks))

    def walk(
        self,
        unit: Unit,
        turn: Callable[[BlockSize], int],
        *,
        streams: int = 1,
        held: int = 0,
        to_end: bool = False,
        work: Callable[[BlockSize], float] = lambda block: 0,
    ) -> Need:
        """Return the needs of a walk over the blocks (`quark_fx.engine.block_walk`).

        Args:
            unit: Granularity of the cuts.
            turn: Function that returns the peak bytes of the work on a block, before its outputs are computed.
            streams: Number of value streams computed side by side, 1 or 2.
            held: Bytes of the new tensors that remain after the walk.
            to_end: Whether to run the whole graph; otherwise the outputs of the last block with quantized weights are
                not computed.
            work: Function that returns the operations of the work on a block, not counting one run per stream.
        """
        blocks, moments = self.blocks(unit), []
        if not to_end:
            blocks = blocks[: max((i for i, block in enumerate(blocks, 1) if block.matrices), default=0)]
        for index, block in enumerate(blocks):
            times = self.batches * streams
            read = 2 * block.entering  # the contents of a file, and the tensor restored from it
            moments.append(Moment(turn(block), int(times * block.entering), read))
            if to_end or index + 1 < len(blocks):
                cache_bytes = int(times * (block.entering + block.leaving))
                moments.append(Moment(block.weights + block.forward, cache_bytes, read))
        operations = int(sum(streams * self.batches * block.operations + work(block) for block in blocks))
        return Need(tuple(moments) or (Moment(0),), held, operations, len(blocks))


def has_scales_apart(weight: TensorSpec, mapping: LinearMap) -> bool:
    """Return whether some outputs of a weight can be quantized, in matrix form, without the others."""
    return weight.granularity is not Granularity.TENSOR and (mapping.stacked or mapping.groups == 1)


def _views(node: Node) -> bool:
    """Return whether a node's result shares memory with its first argument."""
    if is_getitem(node):
        return True
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def _stored(weight: Tensor, spec: TensorSpec) -> int:
    """Return the bytes of a weight's codes, which take whole bytes in memory, and of its scales."""
    values = weight.numel()
    scales = values // spec.group_size if spec.group_size else 0
    return values // spec.format.vector * spec.format.dtype.itemsize + FLOAT32 * scales


__all__ = ["FLOAT32", "BlockSize", "Matrices", "Moment", "Need", "Sizes", "has_scales_apart"]
