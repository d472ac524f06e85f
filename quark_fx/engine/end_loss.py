"""The loss at the end of a model: how far its predictions are from those it makes in float."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.calibration_data import Positions
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

_NOTHING = 1e-12
"""What sums are divided by at least."""

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

        Of logits, the mean is the Fisher matrix `diag(p) - p p'` of the predictions `p`: the gradient is random signs
        times its factor `diag(sqrt(p)) - p sqrt(p)'`. Of other values: random signs, relative to the root mean square.

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
                signs = _signs(rows, generator)
                out.copy_(_times_fisher_factor(signs, rows) if logits else signs)
            if (counted := _counted(kept, gradient.shape[:-1], gradient.device)) is not None:
                gradient *= counted[..., None]
            if not logits:
                gradient.masked_fill_(~(value.abs() < _MASKED), 0)  # a model may mask what it returns
                gradient /= _root_mean_square(value, gradient != 0)
            found.append(gradient)
        return found

    def compared(
        self, results: Sequence[Any], wanted: Sequence[Any], kept: Positions | None
    ) -> tuple[Tensor, list[Any]]:
        """Return the loss of results against those of the float graph, and its gradients.

        The loss is the sum, over results, of the first column over the second, and so it is of several batches, of
        which these are added first: of logits, KL divergences and their number; of other values, squared errors and
        the squares of what is wanted. Padding does not count, nor what a model masks.

        Args:
            results: of a batch.
            wanted: what the float graph makes of it.
            kept: positions that are no padding.

        Returns:
            Float32, shape (results, 2), and gradients, as `sampled` has them, of the loss of this batch.
        """
        sums, found = list[Tensor](), list[Any]()
        for logits, value, aim in zip(self.predictions, results, wanted, strict=True):
            if logits is None:
                found.append(None)
                continue
            gradient = torch.empty_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
            compare = _divergence if logits else _squares
            rows = torch.cat([compare(*pieces) for pieces in _pieces(value, aim, gradient)])
            if (counted := _counted(kept, gradient.shape[:-1], gradient.device)) is not None:
                rows *= counted.view(-1, 1)
                gradient *= counted[..., None]
            sums.append(rows.sum(0))
            found.append(gradient.div_(sums[-1][1].clamp_min(_NOTHING)))
        return torch.stack(sums), found


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


def _pieces(value: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield rows of a value and of others of its shape, as float32; of a contiguous float32 one, views to fill in."""
    columns = value.shape[-1] if value.dim() else 1
    pieces = (tensor.reshape(-1, columns).split(_ROWS) for tensor in (value, *others))
    for rows in zip(*pieces, strict=True):
        yield tuple(part.float() for part in rows)


def _times_fisher_factor(signs: Tensor, logits: Tensor) -> Tensor:
    """Return a factor of the predictions' Fisher matrix times signs; it spreads less than a drawn label's gradient."""
    probabilities = logits.softmax(-1)
    rooted = probabilities.sqrt().mul_(signs)
    return torch.addcmul(rooted, probabilities, rooted.sum(-1, keepdim=True), value=-1)


def _signs(rows: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(rows).bernoulli_(0.5, generator=generator) * 2 - 1


def _root_mean_square(value: Tensor, counted: Tensor) -> Tensor:
    squares = torch.where(counted, value.float(), 0.0).square().sum()
    return (squares / counted.sum().clamp_min(1)).sqrt().clamp_min(1e-12)


def _divergence(logits: Tensor, wanted: Tensor, gradient: Tensor) -> Tensor:
    """Return the KL divergence of each row from what is wanted, in nats, beside ones; fill in the gradient."""
    now, aim = logits.log_softmax(-1), wanted.log_softmax(-1)
    probabilities = aim.exp()
    torch.sub(now.exp(), probabilities, out=gradient)
    lost = torch.where(aim.isneginf(), 0.0, probabilities * (aim - now)).sum(-1)  # a model may mask classes
    return torch.stack((lost, torch.ones_like(lost)), -1)


def _squares(values: Tensor, wanted: Tensor, gradient: Tensor) -> Tensor:
    """Return the squared error of each row beside the squares of what is wanted; fill in the gradient."""
    known = wanted.abs() < _MASKED
    lost = torch.where(known, values - wanted, 0.0)
    torch.mul(lost, 2, out=gradient)
    return torch.stack((lost.square().sum(-1), torch.where(known, wanted, 0.0).square().sum(-1)), -1)


def _counted(kept: Positions | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Return 1 for rows that count and 0 for padding, float32; `None` if all count, or rows are no positions."""
    if kept is None or shape != kept.shape:
        return None
    counted = torch.zeros(kept.shape.numel(), dtype=torch.float32, device=device)
    return counted.index_fill_(0, kept.rows, 1.0).view(kept.shape)


__all__ = ["EndLoss"]
