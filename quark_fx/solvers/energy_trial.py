"""Judge a scale by the sums of squares of channels, in activations and in weights."""

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
"""The sums of squares of each channel, of calibration and of validation data, by value and dimension of the channels;
shape (2, channels)."""


class EnergyTrial(Trial[Linear]):
    """A site and the squares of its channels, in activations `x` and weights `w`.

    Suppose rounding adds an error of the same size to every channel, proportional to the root mean square over all
    channels. With scales `s`, the squared error of the output is then proportional to `sum (s w)**2 * sum (x / s)**2`,
    whether activations or weights are rounded. Behind a rotation this holds; with a range for each token or small group
    it holds roughly. The error here is that product over `n * sum (w x)**2`, for n channels. For one operator, it is
    smallest at `s = sqrt(x / w)`: 1 if all channels contribute alike, less otherwise. Padding does not count.

    Source:
        Ours; Chen et al. 2025 (WUSH) minimize the same over all matrices, of which this is the diagonal one.
    """

    unread = NOT_WHOLE

    def __init__(self, gm: GraphModule, site: PlannedSite[Linear], found: _Squares) -> None:
        self.readers = tuple(_Squared.of(gm, reader, found) for reader in site.readers)
        self.seen = EnergySite(site.site.channels, self.readers)
        if not all(bool(reader.activation.isfinite().all()) for reader in self.readers):
            self.refusal = "what it reads is too large to be squared"
        elif site.shares_scale:
            self.refusal = SHARED_SCALE

    @classmethod
    def reads(cls, operator: Coded) -> Linear | None:
        """Return an operator whose weights have codes and read all channels, `None` for another."""
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
        found = dict[tuple[Node, int], Tensor]()
        del gm  # what scales replace is not kept
        for key in sorted(watches, key=lambda key: (key[0].name, key[1])):  # alike on all ranks
            seen, channels = watches[key].squares, key[0].meta["val"].shape[key[1]]
            zero = torch.zeros(int(channels), dtype=torch.float32, device=context.device)
            found[key] = torch.stack([zero if part is None else part for part in seen])
            context.ranks.add(found[key])
        yield from ((number, found) for number in sites)

    @classmethod
    def needs(cls, sizes: Sizes) -> Need:
        """Return what a run takes: one forward pass, and the squares of a weight."""
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
    """The sums of squares of what one operator reads and of its weight, by channel.

    Attributes:
        labels: the scale's component of each channel.
        activation: of calibration and of validation data, shape (2, channels), on the CPU as all here.
        weight: shape (channels,).
    """

    labels: Tensor
    activation: Tensor
    weight: Tensor

    @classmethod
    def of(cls, gm: GraphModule, reader: Reader[Linear], found: _Squares) -> _Squared:
        """Return those of a reader, from what was measured."""
        scaled = reader.scaled
        weight = reader.value(gm).float().square().movedim(scaled.linear.input_axis, 0).flatten(1).sum(1)
        return cls(scaled.labels, found[scaled.value, scaled.axis].cpu(), weight.cpu())

    def error(self, scale: Tensor, part: int) -> float:
        """Return `EnergyTrial`'s error with a scale, on a part of the data."""
        x, s = self.activation[part].double(), per_element(self.labels, scale).double().square()
        w = self.weight.double()
        alike = len(x) * (w * x).sum()
        return float((w * s).sum() * (x / s).sum() / alike.clamp_min(torch.finfo(torch.float32).tiny))


@dataclass(frozen=True, eq=False)
class EnergySite:
    """What is seen of a site, by squares; tensors of shape (components,), each up to a common factor.

    Attributes:
        components: of the site.
        readers: what reads it.
    """

    components: int
    readers: tuple[_Squared, ...]

    @property
    def activation(self) -> Tensor:
        """The root mean square of the activation."""
        return self._root([(reader.labels, reader.activation[0]) for reader in self.readers])

    @property
    def weight(self) -> Tensor:
        """The root mean square of the weights."""
        return self._root([(reader.labels, reader.weight) for reader in self.readers])

    def _root(self, found: list[tuple[Tensor, Tensor]]) -> Tensor:
        means = Means.of_none(self.components)
        for labels, squares in found:
            means.add(labels, squares)
        return means.means.sqrt()


class _Watch(nn.Module):
    """Sums the squares of each channel as batches run, which come in order.

    Args:
        axis: dimension of the channels.
        parts: the numbers of the batches of each part of the data.
        context: of the run.

    Attributes:
        squares: of each part, float32, shape (channels,); `None` before the first batch of it.
    """

    def __init__(self, axis: int, parts: list[frozenset[int]], context: Context) -> None:
        super().__init__()
        self.axis, self.parts, self.context, self.batches = axis, parts, context, 0
        self.squares: list[Tensor | None] = [None for _ in parts]

    def forward(self, x: Tensor) -> None:
        for i, part in enumerate(self.parts):
            if self.batches in part:
                rows = without_padding(x.movedim(self.axis, -1), self.context.data.kept_positions(self.batches))
                found = rows.float().square().sum(0)
                known = self.squares[i]
                self.squares[i] = found if known is None else known + found
        self.batches += 1


__all__ = ["EnergySite", "EnergyTrial"]
