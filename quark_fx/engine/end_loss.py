"""Loss at the end of a model: the difference between its predictions and the float model's."""

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
from quark_fx.graph.operators import KEEPS_ORDER, Motion, argument, motion, moved_inputs, permutation

_MOVING_ROWS = KEEPS_ORDER | {Motion.SLICE, Motion.SELECT, Motion.PERMUTE, Motion.EXPAND}
"""Kinds of data movement that move whole rows of logits, provided that the last dimension stays last."""

_SCALING = frozenset({CAST, *(f"aten.{n}" for n in ("tanh.default", "mul.Tensor", "div.Tensor", "mul.Scalar"))})
"""Elementwise operators whose results still count as logits if their inputs are logits."""

_MASKED = 1e18
"""Smallest magnitude of a value that counts as a mask."""

_NOTHING = 1e-12
"""Lower limit of divisors."""

_ROWS = 512
"""Rows of predictions per piece, to save memory: each row has a float32 probability per word of the vocabulary."""


@dataclass(frozen=True)
class EndLoss:
    """Loss of a graph's results: the divergence of predictions in nats, and the relative squared error of other values.

    A result holds logits (predictions) if it comes from a matrix product with at least two columns, followed by at most
    scaling, capping, or moving of rows. A result that ends in another operator, such as a softmax, counts as values; an
    embedding that ends in a matrix product counts as logits.

    Attributes:
        predictions: For each result, whether it holds logits; `None` for anything but a floating-point tensor.
    """

    predictions: tuple[bool | None, ...]

    @classmethod
    def of(cls, gm: GraphModule) -> EndLoss:
        """Return the loss for the results of a float graph."""
        return cls(tuple(_holds_logits(gm, node) for node in results_of(gm)))

    def sampled(self, results: Sequence[Any], positions: Positions | None, generator: torch.Generator) -> list[Any]:
        """Return random gradients whose mean outer product is the loss's second derivative at these results.

        For logits, the mean is the Fisher matrix `diag(p) - p p'` of the predictions `p`: the gradient is
        `diag(sqrt(p)) - p sqrt(p)'`, a factor of this matrix, times random signs. For other values, the gradient is
        random signs divided by the root mean square of the values.

        Args:
            results: Results of a batch.
            positions: Positions that are not padding.
            generator: Random generator on the device of the results.
        """
        gradients: list[Any] = []
        for logits, value in zip(self.predictions, results, strict=True):
            if logits is None:
                gradients.append(None)
                continue
            gradient = torch.empty_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
            for rows, out in _pieces(value, gradient):
                signs = _signs(rows, generator)
                out.copy_(_times_fisher_factor(signs, rows) if logits else signs)
            if (counted := _counted(positions, gradient.shape[:-1], gradient.device)) is not None:
                gradient *= counted[..., None]
            if not logits:
                gradient.masked_fill_(~(value.abs() < _MASKED), 0)  # a model may return masked values
                gradient /= _root_mean_square(value, gradient != 0)
            gradients.append(gradient)
        return gradients

    def compared(
        self, results: Sequence[Any], float_results: Sequence[Any], positions: Positions | None
    ) -> tuple[Tensor, list[Any]]:
        """Return the loss relative to the float graph, in two columns per result, and its gradients.

        The loss is the sum, over results, of the first column divided by the second. For several batches, add their
        columns first. For logits, the columns are the sum and the number of KL divergences; for other values, the sum
        of squared errors and the sum of squared float values. Padding and masked values are excluded.

        Args:
            results: Results of a batch.
            float_results: Results of the float graph for the batch.
            positions: Positions that are not padding.

        Returns:
            Columns, float32, shape (results, 2), and gradients of this batch's loss, in the form of `sampled`.
        """
        sums, gradients = list[Tensor](), list[Any]()
        for logits, value, aim in zip(self.predictions, results, float_results, strict=True):
            if logits is None:
                gradients.append(None)
                continue
            gradient = torch.empty_like(value, dtype=torch.float32, memory_format=torch.contiguous_format)
            compare = _divergence if logits else _squares
            rows = torch.cat([compare(*pieces) for pieces in _pieces(value, aim, gradient)])
            if (counted := _counted(positions, gradient.shape[:-1], gradient.device)) is not None:
                rows *= counted.view(-1, 1)
                gradient *= counted[..., None]
            sums.append(rows.sum(0))
            gradients.append(gradient.div_(sums[-1][1].clamp_min(_NOTHING)))
        return torch.stack(sums), gradients


def _holds_logits(gm: GraphModule, node: Any) -> bool | None:
    if not isinstance(node, Node) or not is_floating(gm, node):
        return None
    columns = value_of(gm, node).shape[-1:]
    while (target_name(node) in _SCALING or _moves_rows(node)) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
        if value_of(gm, node).shape[-1:] != columns:
            return False
    linear = Linear.of(node)
    return linear is not None and not linear.kernel and linear.shape[linear.output_axis] > 1


def _moves_rows(node: Node) -> bool:
    """Return whether a node moves data and leaves the last dimension last, provided that its size does not change."""
    if motion(node) not in _MOVING_ROWS:
        return False
    (source,), order = moved_inputs(node), permutation(node)
    last = int(source.meta["val"].dim()) - 1
    if motion(node) is Motion.SELECT:
        return bool(argument(node, 1) % (last + 1) != last)
    return order is None or order[-1] == last


def _pieces(value: Tensor, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield up to `_ROWS` rows at a time of tensors of one shape, in float32; contiguous float32 tensors give views."""
    columns = value.shape[-1] if value.dim() else 1
    pieces = (tensor.reshape(-1, columns).split(_ROWS) for tensor in (value, *tensors))
    for rows in zip(*pieces, strict=True):
        yield tuple(part.float() for part in rows)


def _times_fisher_factor(signs: Tensor, logits: Tensor) -> Tensor:
    """Return `A @ signs`, where `A @ A.T` is the Fisher matrix of the predictions.

    With random signs, the result has a lower variance than the gradient for a sampled label.
    """
    probabilities = logits.softmax(-1)
    rooted = probabilities.sqrt().mul_(signs)
    return torch.addcmul(rooted, probabilities, rooted.sum(-1, keepdim=True), value=-1)


def _signs(rows: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty_like(rows).bernoulli_(0.5, generator=generator) * 2 - 1


def _root_mean_square(value: Tensor, counted: Tensor) -> Tensor:
    squares = torch.where(counted, value.float(), 0.0).square().sum()
    return (squares / counted.sum().clamp_min(1)).sqrt().clamp_min(1e-12)


def _divergence(logits: Tensor, float_logits: Tensor, gradient: Tensor) -> Tensor:
    """Return a column of KL divergences from the float logits, in nats, and a column of ones; fill `gradient`."""
    now, aim = logits.log_softmax(-1), float_logits.log_softmax(-1)
    probabilities = aim.exp()
    torch.sub(now.exp(), probabilities, out=gradient)
    lost = torch.where(aim.isneginf(), 0.0, probabilities * (aim - now)).sum(-1)  # a model may mask classes
    return torch.stack((lost, torch.ones_like(lost)), -1)


def _squares(values: Tensor, float_values: Tensor, gradient: Tensor) -> Tensor:
    """Return each row's squared error and the sum of its squared float values, as two columns; fill `gradient`."""
    unmasked = float_values.abs() < _MASKED
    lost = torch.where(unmasked, values - float_values, 0.0)
    torch.mul(lost, 2, out=gradient)
    return torch.stack((lost.square().sum(-1), torch.where(unmasked, float_values, 0.0).square().sum(-1)), -1)


def _counted(positions: Positions | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    """Return 1 for rows that count and 0 for padding, float32; `None` without a mask of this `shape`."""
    if positions is None or shape != positions.shape:
        return None
    counted = torch.zeros(positions.shape.numel(), dtype=torch.float32, device=device)
    return counted.index_fill_(0, positions.rows, 1.0).view(positions.shape)


__all__ = ["EndLoss"]
