"""The loss at the end of a model: how far its predictions are from those it makes in float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.context import Positions
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import CAST, is_floating, results_of, target_name, value_of

_SHAPING = frozenset(
    f"aten.{name}"
    for name in ("view.default", "reshape.default", "_unsafe_view.default", "unsqueeze.default", "slice.Tensor")
)
"""What moves rows of logits; of these, what leaves the last dimension as it is."""

_SCALING = frozenset({CAST, *(f"aten.{n}" for n in ("tanh.default", "mul.Tensor", "div.Tensor", "mul.Scalar"))})
"""What models do to the values of logits that leaves them logits."""

_MASKED = 1e18
"""A value of at least this magnitude is a mask."""

_ROWS = 512
"""Predictions at a time: a vocabulary's probabilities in float32 are large."""


@dataclass(frozen=True)
class EndLoss:
    """The loss of a graph's results: the divergence of predictions in nats, the relative squared error of other values.

    A result is logits (predictions) if a matrix product with at least two columns makes it and at most scaling, capping
    or moving of rows follows. A result that ends otherwise, as in a softmax, counts as values, and an embedding that a
    matrix product ends in counts as logits.

    Attributes:
        predictions: for each result whether it holds logits; `None` for one that is no floating-point tensor.
    """

    predictions: tuple[bool | None, ...]

    @classmethod
    def of(cls, gm: GraphModule) -> EndLoss:
        """Return the loss of the results of a float graph."""
        return cls(tuple(_holds_logits(gm, node) for node in results_of(gm)))

    def sampled(self, results: Sequence[Any], kept: Positions | None, generator: torch.Generator) -> list[Any]:
        """Return gradients whose mean outer product, over draws, is the loss's second derivative at these results.

        Of logits: those of the log-likelihood of labels that the model draws from its own predictions, so that the
        outer product is the Fisher matrix. Of other values: random signs, relative to the root mean square.

        Args:
            results: of a batch.
            kept: positions that are no padding.
            generator: draws, on the device of the results.
        """
        found: list[Any] = []
        for logits, value in zip(self.predictions, results, strict=True):
            if logits is None:
                found.append(None)
                continue
            gradient = torch.empty_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
            for rows, out in _pieces(value, gradient):
                out.copy_(_of_drawn_labels(rows, generator) if logits else _signs(rows, generator))
            _leave_out_padding(gradient, kept)
            if not logits:
                gradient.masked_fill_(~(value.abs() < _MASKED), 0)  # a model may mask what it returns
                gradient /= _root_mean_square(value, gradient != 0)
            found.append(gradient)
        return found


def _holds_logits(gm: GraphModule, node: Any) -> bool | None:
    if not isinstance(node, Node) or not is_floating(gm, node):
        return None
    columns = value_of(gm, node).shape[-1:]
    while target_name(node) in _SHAPING | _SCALING and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if value_of(gm, node).shape[-1:] != columns:
            return False
    linear = Linear.of(node)
    return linear is not None and not linear.kernel and linear.shape[linear.output_axis] > 1


def _pieces(value: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of a value in float32, and where their gradient goes."""
    columns = value.shape[-1] if value.dim() else 1
    for rows, out in zip(value.reshape(-1, columns).split(_ROWS), gradient.view(-1, columns).split(_ROWS), strict=True):
        yield rows.float(), out


def _of_drawn_labels(logits: Tensor, generator: torch.Generator) -> Tensor:
    probabilities = logits.softmax(-1)
    # The largest of Gumbel variables is drawn by these probabilities; on any device, without a look at them.
    noise = torch.empty_like(logits).exponential_(generator=generator)
    label = (probabilities / noise.clamp_min(1e-30)).argmax(-1, keepdim=True)
    return probabilities.scatter_add(-1, label, torch.full_like(noise[:, :1], -1.0))


def _signs(rows: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(rows).bernoulli_(0.5, generator=generator) * 2 - 1


def _root_mean_square(value: Tensor, counted: Tensor) -> Tensor:
    squares = torch.where(counted, value.float(), 0.0).square().sum()
    return (squares / counted.sum().clamp_min(1)).sqrt().clamp_min(1e-12)


def _leave_out_padding(gradient: Tensor, kept: Positions | None) -> None:
    if kept is not None and gradient.shape[:-1] == kept.shape:
        counted = torch.zeros(kept.shape.numel(), dtype=torch.float32, device=gradient.device)
        gradient *= counted.index_fill_(0, kept.rows, 1.0).view(kept.shape)[..., None]


__all__ = ["EndLoss"]
