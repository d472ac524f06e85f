"""Rotate activations by matrices that are learned from what operators read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import TensorSpec
from quark_fx.config.selection import Named
from quark_fx.engine.block_walk import walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, BlockSize, Need, Sizes
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import named_nodes, parameter
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.numbers import ops
from quark_fx.numbers.rotation import Rotation
from quark_fx.passes.rotate import Drawn, Rotating
from quark_fx.plan.placement import Coded
from quark_fx.rescale.components import per_element
from quark_fx.rescale.rotation_sites import apply_rotation
from quark_fx.solvers.hessian import Entrance
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.system.options import Interval, PositiveInt

_ROWS, _AT_ONCE = 2048, 256
"""Rows that a matrix is learned from, and those of one step."""

_GOLDEN = 0.618
"""Multiples of it fall evenly into the unit interval."""


@graph_pass(after=("fold_constants", "fold_batch_norm", "SmoothQuant"), distributed=True, validated=True)
@dataclass(frozen=True, kw_only=True)
class LearnRotations(Rotating):
    """`Rotate` with matrices that are learned: what operators read loses less when it is rounded.

    Both Kronecker factors of a matrix begin as `Rotate` draws them. Each is multiplied by the Cayley transform of a
    skew-symmetric matrix, which is orthogonal and has a gradient, so the graph's function stays what it is. Steps of
    Adam minimize the squared rounding error of rows that operators read, relative to the squares of each row. The
    learned matrix of a site is kept where it lowers that error on validation data.

    The drawn matrix stays where operators read floats or ranges that are calibrated, and where it has to keep means.
    Matrices of keys are drawn, too.

    Args:
        iterations: steps for each site.
        learning_rate: of the first step, in radians for each pair of channels; it decays to zero.

    Source:
        Liu et al. 2024 (SpinQuant) learn rotations with Cayley steps. They minimize the loss of the whole model, and
        learn the matrices that weights absorb; here each site has its own error, and those that are multiplied at run
        time are learned.
    """

    iterations: PositiveInt = 150
    learning_rate: Annotated[float, Interval("(0, inf)")] = 0.02

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Rotate the inputs of operators that will be quantized; return how many sites.

        Raises:
            CalibrationError: if there is no data.
        """
        return self.rotate(gm, context)

    def turn(
        self, gm: GraphModule, drawn: Sequence[Drawn], names: Mapping[Node, Named], context: Context | None
    ) -> None:
        """Learn the matrix of each site, and rotate it."""
        assert context is not None  # this pass needs one
        sites = [_Site.of(gm, one, names) for one in drawn]

        def chosen(left: Mapping[int, _Site]) -> Iterator[Chosen]:
            return self._learned(copy_graph(gm), left, context)

        choose_in_turn(
            sites, context, chosen, lambda site, made: apply_rotation(gm, site.drawn.site, site.unpack(made))
        )

    def needs(self, sizes: Sizes) -> Need:
        """Return what a run takes: rows of what is read, and what their gradient needs."""

        def turn(block: BlockSize) -> int:
            widest = max((m.inputs for m in block.matrices), default=0)
            return block.entrances + FLOAT32 * widest * (2 * _ROWS + 12 * _AT_ONCE)

        def work(block: BlockSize) -> float:
            each = 4 * 3 * self.iterations * _AT_ONCE
            return sum(each * m.inputs * math.isqrt(m.inputs) for m in block.matrices[:1])

        return sizes.walk(
            Unit.OPERATOR, turn, held=sum(m.values * m.itemsize for m in sizes.matrices.values()), work=work
        )

    def _learned(self, gm: GraphModule, sites: Mapping[int, _Site], context: Context) -> Iterator[Chosen]:
        """Yield the matrix of each site; the data goes through the graph as it was before."""
        for number, site in sites.items():
            if site.kept:
                change = Change(site.drawn.name, f"{site.drawn.what}; as it was drawn: {site.kept}")
                yield number, site.pack(site.drawn.rotation), change
        waiting = {number: site for number, site in sites.items() if not site.kept}
        for run in walk_float_blocks(gm, context, unit=Unit.OPERATOR, label=LearnRotations.__name__) if waiting else ():
            nodes = named_nodes(run.module)
            for number, site in list(waiting.items()):
                for value in site.values:
                    if value.linear.node.name in run.block.operators:
                        linear = value.linear.at(nodes[value.linear.node.name])
                        value.sample(context, Entrance(run.module, linear, value.mapping, run.inputs), len(site.values))
                if all(value.rows for value in site.values):
                    del waiting[number]
                    found = self._settle(site, context)
                    for value in site.values:
                        value.rows.clear()
                    yield number, *context.ranks.gather(found)[0]  # another processor may see other matrices

    def _settle(self, site: _Site, context: Context) -> tuple[Tensor, Change]:
        """Return the learned matrix of a site, or the drawn one if it is no worse, and what to note."""
        began, drawn = time.perf_counter(), site.drawn
        with torch.enable_grad():
            learned = self._learn(site)
        before, after = (float(site.error(r, "judged")) for r in (drawn.rotation, learned))
        kept = after < before  # false if either is NaN
        what = drawn.what + ("; learned" if kept else f"; as it was drawn: no better on {context.judged_on}")
        seconds = time.perf_counter() - began
        change = Change(drawn.name, what, True, before, after if kept else before, seconds)
        return site.pack(learned if kept else drawn.rotation), change

    def _learn(self, site: _Site) -> Rotation:
        """Return the drawn matrix after gradient steps."""
        device = site.values[0].rows["learned"].device
        left, right = (m.to(device, torch.float32) for m in (site.drawn.rotation.left, site.drawn.rotation.right))
        turns = [torch.zeros_like(m).requires_grad_(len(m) > 1) for m in (left, right)]
        optimizer = torch.optim.Adam([t for t in turns if t.requires_grad], lr=self.learning_rate, foreach=False)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)
        for step in range(self.iterations):
            optimizer.zero_grad(set_to_none=True)
            factors = (m @ _cayley(t) for m, t in zip((left, right), turns, strict=True))
            site.error(Rotation(*factors), "learned", step).backward()
            optimizer.step()
            decay.step()
        # In float64, the matrix is orthogonal to more digits than the model has.
        exact = (_cayley(t.detach().cpu().double()) for t in turns)
        return Rotation(
            *(m @ t for m, t in zip((site.drawn.rotation.left, site.drawn.rotation.right), exact, strict=True))
        )


@dataclass(frozen=True, eq=False)
class _Value:
    """A value that operators read in codes.

    Attributes:
        linear: the first of them.
        mapping: how it multiplies.
        spec: of the codes.
        runs: channels, shape (runs, n): the matrix multiplies each row of them.
        factor: that a folded norm leaves out of the value, per channel; `None` for none.
        rows: samples of the value by what they are for, `"learned"` or `"judged"`, float32, shape (rows, channels).
    """

    linear: Linear
    mapping: LinearMap
    spec: TensorSpec
    runs: Tensor
    factor: Tensor | None
    rows: dict[str, Tensor] = field(default_factory=dict)

    def sample(self, context: Context, entrance: Entrance, values: int) -> None:
        """Remember some rows of each batch, about `_ROWS` of all ranks, of so many values, together."""
        for what, batches in (("learned", context.calibration), ("judged", context.validation)):
            count = sum(context.ranks.gather(len(batches)))
            each = -(-_ROWS // max(1, count * values))
            found = [self._some(entrance, batch, context, each) for batch in batches]
            empty = torch.empty(0, entrance.shape[1], device=context.device, dtype=torch.float32)
            here = context.ranks.gather(torch.cat([*found, empty]))
            self.rows[what] = torch.cat([rows.to(context.device) for rows in here])
        if not context.has_validation:
            self.rows["judged"] = self.rows["learned"]

    @torch.no_grad()
    def _some(self, entrance: Entrance, batch: int, context: Context, count: int) -> Tensor:
        (rows,) = entrance.values(batch, context.kept_positions(batch)).matrices(self.mapping)
        if count < len(rows):
            rows = rows[(torch.arange(count) * _GOLDEN % 1 * len(rows)).long().to(rows.device)]
        return rows if self.factor is None else rows / self.factor.to(rows)

    def error(self, rotation: Rotation, rows: Tensor) -> Tensor:
        """Return the squared error of rounding rotated rows, relative to their squares."""
        channels = self.runs.to(rows.device)
        turned = torch.ops.quark_fx.rotate(rows[:, channels], *(m.to(rows) for m in (rotation.left, rotation.right)))
        x = rows.index_copy(1, channels, turned)
        noise = (_rounded(x, self.spec) - x).square().sum()
        return noise / rows.square().sum().clamp_min(torch.finfo(torch.float32).tiny)


@dataclass(frozen=True, eq=False)
class _Site:
    """A site with the values that are read there.

    Attributes:
        drawn: the site.
        values: in graph order.
        kept: why the drawn matrix stays; empty if one is learned.
    """

    drawn: Drawn
    values: tuple[_Value, ...]
    kept: str

    @classmethod
    def of(cls, gm: GraphModule, drawn: Drawn, names: Mapping[Node, Named]) -> _Site:
        site, values = drawn.site, dict[Node, _Value]()
        runs = {absorber.parameter: absorber.runs for absorber in site.absorbers}
        factors = {a.node: (folded, labels) for folded in site.norms for a, labels in folded.readers}
        for linear in site.readers:
            op, mapping = names.get(linear.node), linear.matrices
            spec = op.input if isinstance(op, Coded) else None
            if (
                spec is None
                or not spec.dynamic
                or mapping is None
                or mapping.stacked
                or mapping.kernel
                or mapping.offsets
            ):
                continue
            factor = None
            if linear.node in factors:
                folded, labels = factors[linear.node]
                factor = per_element(labels.flatten(), parameter(gm, folded.norm.factor).detach().float().flatten())
            found = _Value(linear, mapping, spec, runs[linear.weight].flatten(), factor)
            values.setdefault(linear.activation, found)
        kept = "no operator reads it in codes whose range is measured at run time" if not values else ""
        return cls(drawn, tuple(values.values()), "it has to keep means" if site.keeps_mean else kept)

    def error(self, rotation: Rotation, what: str, step: int | None = None) -> Tensor:
        """Return the mean error of all values, on the rows of a step or, without one, on all."""
        errors = []
        for value in self.values:
            rows = value.rows[what]
            if step is not None:
                first = step * _AT_ONCE % max(1, len(rows))
                rows = rows[first : first + _AT_ONCE]
            errors.append(value.error(rotation, rows))
        return torch.stack(errors).mean()

    def pack(self, rotation: Rotation) -> Tensor:
        """Return both factors in one tensor."""
        return torch.cat([rotation.left.flatten(), rotation.right.flatten()])

    def unpack(self, packed: Tensor) -> Rotation:
        """Inverse of `pack`."""
        left, right = self.drawn.rotation.left, self.drawn.rotation.right
        one, other = packed.split([left.numel(), right.numel()])
        return Rotation(one.reshape(left.shape), other.reshape(right.shape))


def _cayley(turn: Tensor) -> Tensor:
    """Return the orthogonal matrix `(1 - s)^-1 (1 + s)` of the skew-symmetric part `s` of a matrix."""
    skew = (turn - turn.T) / 2
    one = torch.eye(len(turn), device=turn.device, dtype=turn.dtype)
    turned: Tensor = torch.linalg.solve_ex(one - skew, one + skew)[0]  # never singular, so nothing has to be looked at
    return turned


def _rounded(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return what is read of rows, with a straight-through gradient, and that of the range that they measure."""
    name, _, axis, block, *_ = measurement = spec.measurement(1)
    with torch.no_grad():
        scale, zero_point = ops.dynamic_qparams(x, *measurement)
    low, high = ops.extremes(x, axis, block)
    width = torch.maximum(-low, high) if spec.scheme.symmetric else high - low
    scale = ops.spread(scale * (width / width.detach()).nan_to_num(nan=1.0), x, axis, block)
    ones = torch.ones_like(zero_point, dtype=torch.float32)
    rounded: Tensor = ops.fake_quantize(x / scale, ones, zero_point, name, axis, block)
    return rounded * scale


__all__ = ["LearnRotations"]
