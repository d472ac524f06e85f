"""Evaluate scales by the sums of squares of channels, in activations and in weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.engine.blocks import Unit
from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.calibration_data import without_padding
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import named_nodes
from quark_fx.plan.placement import Coded
from quark_fx.rescale.components import Means, per_element
from quark_fx.rescale.planned_sites import NOT_WHOLE, SHARED_SCALE, PlannedSite, Reader, reads_whole
from quark_fx.solvers.scaling import ScaleOf, Trial

_Squares = Mapping[tuple[Node, int], Tensor]
"""Sums of squares of each channel, of calibration and of validation data, by value and dimension of the channels;
shape (2, channels)."""


class EnergyTrial(Trial[Linear]):
    """A site and the sums of squares of its channels, in activations `x` and weights `w`.

    Suppose rounding adds an error of the same size to every channel, proportional to the root mean square over all
    channels. With scales `s`, the squared error of the output is then proportional to `sum (s w)**2 * sum (x / s)**2`,
    whether activations or weights are rounded. After a rotation this holds; with a range per token or small group it
    holds approximately. The error here is that product over `n * sum (w x)**2`, for n channels. For one operator, it is
    smallest at `s = sqrt(x / w)`: 1 if all channels contribute equally, less otherwise. Padding is excluded.

    Source:
        Ours; Chen et al. 2025 (WUSH) minimize the same error over all matrices, and this is the diagonal case.
    """

    unread = NOT_WHOLE

    def __init__(self, gm: GraphModule, site: PlannedSite[Linear], measurements: _Squares) -> None:
        self.readers = tuple(_Squared.of(gm, reader, measurements) for reader in site.readers)
        self.seen = EnergySite(site.site.channels, self.readers)
        if not all(bool(reader.activation.isfinite().all()) for reader in self.readers):
            self.refusal = "its input is too large to be squared"
        elif site.shares_scale:
            self.refusal = SHARED_SCALE

    @classmethod
    def reads(cls, operator: Coded) -> Linear | None:
        """Return an operator's linear map if its weight is quantized and it reads all channels, else `None`."""
        return reads_whole(operator)

    @classmethod
    def measured(
        cls, gm: GraphModule, sites: Mapping[int, PlannedSite[Linear]], context: Context, label: str
    ) -> Iterator[tuple[int, _Squares]]:
        """Sum squares in one forward pass."""
        context.data.require_batches()
        read = {(r.scaled.value, r.scaled.axis) for site in sites.values() for r in site.readers}
        parts = [frozenset(context.data.calibration), frozenset(context.data.validation)]
        watches = {key: _Watch(key[1], parts, context) for key in read}
        nodes = named_nodes(gm)
        with watching(gm, ((nodes[value.name], watch) for (value, _), watch in watches.items())):
            run_batches(gm, context)
        squares = dict[tuple[Node, int], Tensor]()
        del gm  # a scaled site replaces tensors, and `gm` would keep the old ones alive
        for key in sorted(watches, key=lambda key: (key[0].name, key[1])):  # in the same order on all ranks
            sums, channels = watches[key].squares, key[0].meta["val"].shape[key[1]]
            zero = torch.zeros(int(channels), dtype=torch.float32, device=context.device)
            squares[key] = torch.stack([zero if part is None else part for part in sums])
            context.ranks.add(squares[key])
        yield from ((number, squares) for number in sites)

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return the needs of a run: one forward pass, and the squares of a weight."""
        tried = max((2 * FLOAT32 * m.values for m in sizes.matrices.values()), default=0)
        scaled = sum(m.values * m.itemsize for m in sizes.matrices.values())
        operations = int(sizes.batches * sum(block.operations for block in sizes.blocks(Unit.BLOCK)))
        return Need((Moment(max(sizes.forward, scaled + tried)),), held=scaled, operations=operations)

    def errors(self, scales: Sequence[ScaleOf]) -> list[float]:
        """Return the errors on calibration data, averaged over the readers."""
        return [self._error(scale_of, 0) for scale_of in scales]

    def verdicts(self, scales: Sequence[ScaleOf]) -> list[list[float]]:
        """Return the errors on validation data, averaged over the readers."""
        judged = any(bool(reader.activation[1].any()) for reader in self.readers)
        return [[self._error(scale_of, int(judged))] for scale_of in scales]

    def _error(self, scale_of: ScaleOf, part: int) -> float:
        scale = scale_of(self.seen)
        return sum(reader.error(scale, part) for reader in self.readers) / len(self.readers)


@dataclass(frozen=True, eq=False)
class _Squared:
    """Sums of squares of an operator's input and weight, by channel.

    Attributes:
        labels: Component of the scale for each channel.
        activation: Sums of calibration and of validation data, shape (2, channels); all tensors here are on the CPU.
        weight: Sums of the weight, shape (channels,).
    """

    labels: Tensor
    activation: Tensor
    weight: Tensor

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader[Linear], measurements: _Squares) -> _Squared:
        """Return the sums of a reader, from the measurements."""
        scaled = reader.scaled
        weight = reader.value(gm).float().square().movedim(scaled.linear.input_axis, 0).flatten(1).sum(1)
        return cls(scaled.labels, measurements[scaled.value, scaled.axis].cpu(), weight.cpu())

    def error(self, scale: Tensor, part: int) -> float:
        """Return the error of `EnergyTrial` for a scale, on one part of the data."""
        x, s = self.activation[part].double(), per_element(self.labels, scale).double().square()
        w = self.weight.double()
        alike = len(x) * (w * x).sum()
        return float((w * s).sum() * (x / s).sum() / alike.clamp_min(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, eq=False)
class EnergySite:
    """Measurements of a site from sums of squares; tensors of shape (components,), each up to a common factor.

    Attributes:
        components: Number of components of the site.
        readers: Sums of squares of each reader.
    """

    components: int
    readers: tuple[_Squared, ...]

    @property
    def activation(self) -> Tensor:
        """Root mean square of the activation."""
        return self._root([(reader.labels, reader.activation[0]) for reader in self.readers])

    @property
    def weight(self) -> Tensor:
        """Root mean square of the weights."""
        return self._root([(reader.labels, reader.weight) for reader in self.readers])

    def _root(self, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        means = Means.of_none(self.components)
        for labels, squares in pairs:
            means.add(labels, squares)
        return means.means.sqrt()


class _Watch(nn.Module):
    """Sums the squares of each channel while batches run in order.

    Args:
        axis: Dimension of the channels.
        parts: Numbers of the batches in each part of the data.
        context: Context of the run.

    Attributes:
        squares: Sums of each part, float32, shape (channels,); `None` before its first batch.
    """

    def __init__(self, axis: int, parts: list[frozenset[int]], context: Context) -> None:
        super().__init__()
        self.axis, self.parts, self.context, self.batches = axis, parts, context, 0
        self.squares: list[Tensor | None] = [None for _ in parts]

    def forward(self, x: Tensor) -> None:
        for i, part in enumerate(self.parts):
            if self.batches in part:
                rows = without_padding(x.movedim(self.axis, -1), self.context.data.kept_positions(self.batches))
                squares = rows.float().square().sum(0)
                total = self.squares[i]
                self.squares[i] = squares if total is None else total + squares
        self.batches += 1


__all__ = ["EnergySite", "EnergyTrial"]
