"""A quantized block as a differentiable function of its weights, biases, and activation scales."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.blocks import extract
from quark_fx.engine.quantized_weights import QuantizedWeight
from quark_fx.graph.nodes import results_of
from quark_fx.graph.straight_through import quantize_of
from quark_fx.numbers import ops


class LearnedWeight(ABC):
    """Weight that is being learned, before it is stored as codes.

    Attributes:
        parameters: Tensors that gradient steps change, float32 leaves that require a gradient.
    """

    parameters: Sequence[Tensor]

    @property
    def ratio(self) -> Tensor | None:
        """Factors of the grid's adjustable scales, in their shape; `None` if scales are not learned."""
        return None

    @property
    def zero_points(self) -> Tensor | None:
        """Values that are rounded to zero points (`Grid.with_zero_points`), in the shape of `grid.free.zero_points`.

        `None` if zero points are not learned.
        """
        return None

    @abstractmethod
    def weight(self) -> Tensor:
        """Return the weight that the block currently computes with."""

    def penalty(self, progress: float) -> Tensor | float:
        """Return the penalty that pulls toward codes, after the fraction `progress` of the steps (0 to 1)."""
        return 0.0

    @abstractmethod
    def codes(self) -> Tensor:
        """Return the codes of the current state, in float32, without a gradient."""


@dataclass(frozen=True)
class Trainable:
    """Block with its learned tensors as arguments.

    Attributes:
        module: Module that takes the block's inputs, drop rate, random generator, weights, biases, and scales.
        made: Positions of the block's outputs (`Block.made`) among its results.
        dtypes: Dtypes of the weights.
        scales: Names of the activation scales that are arguments.
    """

    module: GraphModule
    made: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    scales: tuple[str, ...]

    @classmethod
    def of(
        cls, run: BlockRun, weights: Sequence[QuantizedWeight], *, biases: bool = False, scales: Sequence[str] = ()
    ) -> Trainable:
        """Return the quantized block of `run` with `quantize` and `dequantize` replaced by differentiable operations.

        Args:
            run: Block to convert.
            weights: Weights that become arguments; others stay as they are.
            biases: Whether the biases of `weights` become arguments.
            scales: Names of the activation scales that become arguments.
        """
        results = results_of(run.module)
        places = [node for node in run.module.graph.nodes if node.op == "placeholder"]
        module = extract(run.module, places, [node for node in results if isinstance(node, Node)])
        graph = module.graph
        named = {node.name: node for node in graph.nodes}
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            drop, generator = graph.placeholder("drop"), graph.placeholder("generator")
            arguments = [graph.placeholder(f"weight_{i}") for i in range(len(weights))]
            for weight, argument in zip(weights, arguments, strict=True):
                named[weight.dequantize.name].replace_all_uses_with(argument)
            for i, weight in enumerate(weights if biases else ()):
                if weight.bias is not None:
                    named[weight.node.name].replace_input_with(
                        named[weight.bias.node.name], graph.placeholder(f"bias_{i}")
                    )
            places_of = {name: graph.placeholder(f"scale_{i}") for i, name in enumerate(scales)}
        for node in list(graph.nodes):
            if (source := quantize_of(node)) is not None:
                _differentiable(graph, node, source, {"drop": drop, "generator": generator}, places_of)
        graph.eliminate_dead_code()
        module.recompile()
        positions = [i for i, name in enumerate(run.block.outputs) if name in run.block.made]
        dtypes = tuple(weight.dequantize.meta["val"].dtype for weight in weights)
        return cls(module, tuple(positions), dtypes, tuple(scales))

    def __call__(
        self,
        inputs: Sequence[object],
        weights: Sequence[Tensor],
        biases: Sequence[Tensor] = (),
        scales: Sequence[Tensor] = (),
        drop: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> list[Tensor]:
        """Return the outputs of the block, in the order of `Block.made`.

        Args:
            inputs: Inputs of the block.
            weights: Dequantized or soft weights, one per learned weight.
            biases: Biases, one for each learned weight that has a bias, if biases are learned.
            scales: Activation scales in the order of `scales`, shape `()`.
            drop: Probability that a value of an activation stays in float.
            generator: Generator of the dropped values; default: the global one.
        """
        weights = [weight.to(dtype) for weight, dtype in zip(weights, self.dtypes, strict=True)]
        biases = [bias.to(self.dtypes[0]) for bias in biases]
        results = self.module(*inputs, drop, generator, *weights, *biases, *scales)
        return [results[i] for i in self.made]


def _differentiable(
    graph: torch.fx.Graph, node: Node, source: Node, options: dict[str, Any], scales: dict[str, Node]
) -> None:
    x, scale, *rest = source.args
    if isinstance(scale, Node) and scale.op == "get_attr":
        scale = scales.get(str(scale.target), scale)
    with graph.inserting_before(node):
        new = graph.call_function(_fake_quantize, (x, scale, *rest), options)
    node.replace_all_uses_with(new)


def _fake_quantize(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    format: str,
    axis: int | None = None,
    block_size: int = 0,
    *,
    drop: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return `quark_fx.numbers.ops.fake_quantize(x)`, with some values left in float.

    Args:
        x, scale, zero_point, format, axis, block_size: Arguments of `quark_fx.numbers.ops`.
        drop: Probability that a value stays unchanged (QDrop, Wei et al. 2022).
        generator: Generator of the dropped values; default: the global one.
    """
    y: Tensor = ops.fake_quantize(x, scale, zero_point, format, axis, block_size)
    if drop <= 0:
        return y
    chance = torch.rand(x.shape, generator=generator, dtype=x.dtype, device=x.device)
    return torch.where(chance < drop, x, y)


__all__ = ["LearnedWeight", "Trainable"]
