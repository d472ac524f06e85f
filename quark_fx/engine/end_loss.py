"""The loss at the end of a model: how far its predictions are from its own in float, and which way that pulls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.engine.context import Positions
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import CAST, is_floating, results_of, target_name
from quark_fx.graph.operators import MOVING

_CAPPING = MOVING | {
    CAST,
    *(f"aten.{n}" for n in ("tanh.default", "mul.Tensor", "div.Tensor", "mul.Scalar", "div.Scalar")),
}
"""What models do to logits that leaves them logits."""

_ROWS = 512
"""Predictions at a time: a vocabulary's probabilities in float32 are large."""


@dataclass(frozen=True)
class EndLoss:
    """The loss of a graph's results: the divergence of predictions in nats, the relative squared error of other values.

    Results that a matrix product makes last, with at least two columns, are predictions (logits); what is done to them
    afterwards, as a softmax, makes them other values.

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
            gradient = torch.empty_like(value, dtype=torch.float32)
            for rows, out in _pieces(value, gradient):
                out.copy_(_of_drawn_labels(rows, generator) if logits else _signs(rows, generator))
            if not logits:
                gradient /= value.float().square().mean().sqrt().clamp_min(1e-12)
            found.append(_without_padding(gradient, kept))
        return found

    def divergence(
        self, results: Sequence[Any], targets: Sequence[Any], kept: Positions | None
    ) -> tuple[Tensor, list[Any]]:
        """Return the loss of a batch, summed over rows, and its gradients with respect to the results.

        Args:
            results: of the quantized model.
            targets: of the float model.
            kept: positions that are no padding.

        Returns:
            The loss, float32, on the device of the results: of logits in nats, summed over rows; of other values the
            squared error over the mean square, halved and summed.
        """
        total, found = None, list[Any]()
        for logits, value, target in zip(self.predictions, results, targets, strict=True):
            if logits is None:
                found.append(None)
                continue
            mask = _kept_rows(value, kept)
            gradient = torch.empty_like(value, dtype=torch.float32)
            scale = None if logits else target.float().square().mean().clamp_min(1e-12)
            for (rows, out), (wanted, _), counts in zip(
                _pieces(value, gradient), _pieces(target, gradient), mask.split(_ROWS), strict=True
            ):
                loss = _diverged(rows, wanted, out) if scale is None else _missed(rows, wanted, scale, out)
                out *= counts[:, None]
                total = (loss * counts).sum() + (0 if total is None else total)
            found.append(gradient)
        return torch.zeros((), dtype=torch.float32) if total is None else total, found

    def rows(self, results: Sequence[Any], kept: Positions | None) -> int:
        """Return how many rows of the results count."""
        pairs = zip(self.predictions, results, strict=True)
        return sum(_count(value, kept) for logits, value in pairs if logits is not None)


def _holds_logits(gm: GraphModule, node: Any) -> bool | None:
    if not isinstance(node, Node) or not is_floating(gm, node):
        return None
    while target_name(node) in _CAPPING and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
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


def _diverged(rows: Tensor, targets: Tensor, out: Tensor) -> Tensor:
    ours, theirs = rows.log_softmax(-1), targets.log_softmax(-1)
    share = theirs.exp()
    torch.sub(ours.exp(), share, out=out)
    return (share * (theirs - ours)).sum(-1)


def _missed(rows: Tensor, targets: Tensor, scale: Tensor, out: Tensor) -> Tensor:
    error = rows - targets
    torch.div(error, scale, out=out)
    return (error.square() / scale).sum(-1) / 2


def _fits(value: Tensor, kept: Positions | None) -> bool:
    return kept is not None and value.shape[:-1] == kept.shape


def _kept_rows(value: Tensor, kept: Positions | None) -> Tensor:
    """Return 1 for each row that counts, 0 for padding, float32."""
    count = value[..., 0].numel() if value.dim() else 1
    if not _fits(value, kept):
        return torch.ones(count, dtype=torch.float32, device=value.device)
    assert kept is not None
    return torch.zeros(count, dtype=torch.float32, device=value.device).index_fill_(0, kept.rows, 1.0)


def _without_padding(gradient: Tensor, kept: Positions | None) -> Tensor:
    if not _fits(gradient, kept):
        return gradient
    return gradient * _kept_rows(gradient, kept).view(gradient.shape[:-1])[..., None]


def _count(value: Tensor, kept: Positions | None) -> int:
    if kept is not None and _fits(value, kept):
        return len(kept.rows)
    return value[..., 0].numel() if value.dim() else 1


__all__ = ["EndLoss"]
