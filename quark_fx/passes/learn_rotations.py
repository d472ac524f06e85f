"""Rotate activations by matrices learned from the inputs of operators."""

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
from quark_fx.numbers.sampling import spread_indices
from quark_fx.passes.rotate import Drawn, Rotating
from quark_fx.plan.placement import Coded
from quark_fx.rescale.components import per_element
from quark_fx.rescale.rotation_sites import apply_rotation
from quark_fx.solvers.hessian import Entrance
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.system.options import Interval, PositiveInt

_ROWS, _AT_ONCE, _FEW = 2048, 256, 32
"""Number of rows that a matrix is learned from, of rows per step, and smallest number of a value's rows in a step."""

_TINY = torch.finfo(torch.float32).tiny

_BEFORE = ("fold_constants", "fold_batch_norm", "SmoothQuant", "NormalizeColumns", "AWQ", "LowRank")
"""Passes that must run first because they change the inputs of operators."""


@graph_pass(after=_BEFORE, distributed=True, validated=True)
@dataclass(frozen=True, kw_only=True)
class LearnRotations(Rotating):
    """`Rotate` with learned matrices, which reduce the rounding error of operators' inputs.

    Both Kronecker factors of a matrix start as `Rotate` draws them. Each factor is multiplied by the Cayley transform
    of a skew-symmetric matrix, which is orthogonal, so the graph's function is preserved, up to rounding. Adam steps on
    the skew-symmetric matrix minimize the squared rounding error of input rows, relative to the squares of all rows.
    The learned matrix of a site is accepted if it lowers that error on validation data.

    A site keeps the drawn matrix if its operators read floats or values with calibrated ranges, or if the matrix must
    preserve means. Matrices of keys are drawn, too, not learned. If one range is measured for a whole tensor, the range
    of the sampled rows approximates it.

    Args:
        iterations: Number of steps for each site.
        learning_rate: Angle, in radians, by which the first step rotates two channels of a factor; decays to zero.

    Source:
        Liu et al. 2024 (SpinQuant) learn rotations that weights absorb, by steepest descent with Cayley transforms on
        the loss of the whole model. Here each site minimizes its own error, and matrices that are multiplied at run
        time are learned as well.
    """

    iterations: PositiveInt = 150
    learning_rate: Annotated[float, Interval("(0, 1]")] = 0.04

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Rotate the inputs of operators that will be quantized; return the number of rotated sites.

        Raises:
            CalibrationError: If calibration data is missing.
        """
        rotated = self.rotate(gm, context)
        learned = sum(change.before != change.after for change in context.changes)
        context.remark = "; ".join(filter(None, (f"{learned} of {rotated} matrices are learned", context.remark)))
        return rotated

    def turn(
        self, gm: GraphModule, drawn: Sequence[Drawn], names: Mapping[Node, Named], context: Context | None
    ) -> None:
        """Learn the matrix of each site, and rotate the site."""
        assert context is not None  # this pass needs one
        sites = [_Site.of(gm, one, names, context.device) for one in drawn]

        def chosen(pending: Mapping[int, _Site]) -> Iterator[Chosen]:
            return self._learned(copy_graph(gm), pending, context)

        choose_in_turn(
            sites, context, chosen, lambda site, packed: apply_rotation(gm, site.drawn.site, site.unpack(packed))
        )

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: sampled input rows, and memory for their gradients."""

        def turn(block: BlockSize) -> int:
            widest = max((m.inputs for m in block.matrices), default=0)
            return block.entrances + FLOAT32 * widest * (2 * _ROWS + 12 * _AT_ONCE)

        def work(block: BlockSize) -> float:
            each = 4 * 3 * self.iterations * _AT_ONCE
            return sum(each * m.inputs * math.isqrt(m.inputs) for m in block.matrices[:1])

        return sizes.walk(Unit.OPERATOR, turn, held=sizes.weight_bytes, work=work)

    def _learned(self, gm: GraphModule, sites: Mapping[int, _Site], context: Context) -> Iterator[Chosen]:
        """Yield the matrix of each site; the data runs through the unchanged graph."""
        for number, site in sites.items():
            if site.kept:
                change = Change(site.drawn.name, f"as drawn, {site.kept}; {site.drawn.what}")
                yield number, site.pack(site.drawn.rotation), change
        waiting = {number: site for number, site in sites.items() if not site.kept}
        for run in walk_float_blocks(gm, context, unit=Unit.OPERATOR, label=LearnRotations.__name__) if waiting else ():
            nodes = named_nodes(run.module)
            for number, site in list(waiting.items()):
                for value in site.values:
                    if value.linear.node.name in run.block.operators:
                        linear = value.linear.at(nodes[value.linear.node.name])
                        entrance = Entrance(run.module, linear, value.mapping, run.inputs)
                        value.sample(context, entrance, max(_FEW, _ROWS // len(site.values)))
                if all(value.rows for value in site.values):
                    del waiting[number]
                    choice = self._settle(site, context)
                    for value in site.values:
                        value.rows.clear()
                    yield number, *context.ranks.gather(choice)[0]  # results may differ between processors

    def _settle(self, site: _Site, context: Context) -> tuple[Tensor, Change]:
        """Return the learned matrix of a site, or the drawn matrix if that is not worse, and the change to report."""
        began, drawn = time.perf_counter(), site.drawn
        if not all(len(value.rows["learned"]) for value in site.values):
            why = "all positions of the calibration data are padding"
            return site.pack(drawn.rotation), Change(drawn.name, f"as drawn, {why}; {drawn.what}")
        with torch.enable_grad():
            learned = self._learn(site)
        before, after = (site.judge(rotation) for rotation in (drawn.rotation, learned))
        is_better = after < before  # false if either is NaN
        what = f"{'learned' if is_better else f'as drawn, {context.data.refusal(after)}'}; {drawn.what}"
        seconds = time.perf_counter() - began
        change = Change(drawn.name, what, True, before, after if is_better else before, seconds)
        return site.pack(learned if is_better else drawn.rotation), change

    def _learn(self, site: _Site) -> Rotation:
        """Return the drawn matrix after gradient steps."""
        device = site.values[0].rows["learned"].device
        left, right = (m.to(device, torch.float32) for m in (site.drawn.rotation.left, site.drawn.rotation.right))
        turns = [torch.zeros_like(m).requires_grad_(len(m) > 1) for m in (left, right)]
        optimizer = torch.optim.Adam([t for t in turns if t.requires_grad], lr=self.learning_rate)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.iterations)
        for step in range(self.iterations):
            optimizer.zero_grad(set_to_none=True)
            factors = (m @ _cayley(t) for m, t in zip((left, right), turns, strict=True))
            site.error(Rotation(*factors), step).backward()
            optimizer.step()
            decay.step()
        # In float64, the matrix is orthogonal to a higher precision than the model has.
        exact = (_cayley(t.detach().cpu().double()) for t in turns)
        return Rotation(
            *(m @ t for m, t in zip((site.drawn.rotation.left, site.drawn.rotation.right), exact, strict=True))
        )


@dataclass(frozen=True, eq=False)
class _Value:
    """A value that operators read in quantized form.

    Attributes:
        linear: First of the operators.
        mapping: View of that operator as a matrix product.
        spec: Spec of the quantization.
        runs: Channels in order, on the device; the matrix multiplies each run of n consecutive entries.
        factor: Factor per channel that a folded norm no longer applies to the value, on the device; `None` without one.
        rows: Samples of the value, `"learned"` for training and `"judged"` for validation, float32, shape (rows,
            channels).
    """

    linear: Linear
    mapping: LinearMap
    spec: TensorSpec
    runs: Tensor
    factor: Tensor | None
    rows: dict[str, Tensor] = field(default_factory=dict)

    @torch.no_grad()
    def sample(self, context: Context, entrance: Entrance, row_count: int) -> None:
        """Sample about `row_count` rows from the batches of all ranks, in random order.

        The rows are spread over each batch, at different positions in each batch.
        """
        generator = torch.Generator().manual_seed(0)
        for what, batches in (("learned", context.data.calibration), ("judged", context.data.validation)):
            by_batch, total = context.data.numbered(batches)
            each, numbers = -(-row_count // max(1, total)), spread_indices(total, row_count).tolist()
            numbered = [(batch, number) for batch, number in by_batch.items() if number in numbers]
            pieces, chosen = list[Tensor](), dict[int, Tensor]()
            for i, (batch, _) in enumerate(numbered):
                (rows,) = entrance.rows(batch, context)
                if (count := len(rows)) not in chosen:  # one copy for all batches of this length
                    indices = [spread_indices(count, each, seed=number) for _, number in numbered]
                    chosen[count] = torch.stack(indices).to(context.device)
                rows = rows[chosen[count][i]]
                pieces.append(rows if self.factor is None else rows / self.factor)
            empty = torch.empty(0, entrance.shape[1], device=context.device, dtype=torch.float32)
            by_rank = context.ranks.gather(torch.cat([*pieces, empty]))
            rows = torch.cat([rows.to(context.device) for rows in by_rank])
            self.rows[what] = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
        if not len(self.rows["judged"]):
            self.rows["judged"] = self.rows["learned"]

    def error(self, rotation: Rotation, rows: Tensor) -> Tensor:
        """Return the squared rounding error of rotated rows, relative to their squares."""
        noise = torch.stack([self._noise(rotation, chunk) for chunk in rows.split(_AT_ONCE)]).sum()
        return noise / rows.square().sum().clamp_min(_TINY)

    def _noise(self, rotation: Rotation, rows: Tensor) -> Tensor:
        factors = (m.to(rows) for m in (rotation.left, rotation.right))
        turned = torch.ops.quark_fx.rotate(rows[:, self.runs], *factors)
        x = rows.index_copy(1, self.runs, turned)
        return (_rounded(x, self.spec) - x).square().sum()


@dataclass(frozen=True, eq=False)
class _Site:
    """A site with the values that operators read there.

    Attributes:
        drawn: Site with its drawn matrix.
        values: Values in graph order.
        kept: Reason for keeping the drawn matrix; empty if a matrix is learned.
    """

    drawn: Drawn
    values: tuple[_Value, ...]
    kept: str

    @classmethod
    def of(cls, gm: GraphModule, drawn: Drawn, names: Mapping[Node, Named], device: torch.device) -> _Site:
        """Return the site with the values that operators read in quantized form."""
        site, values = drawn.site, dict[tuple[Node, TensorSpec], _Value]()
        reason, zeros = "no operator that reads it quantizes it dynamically", False
        runs = {(absorber.parameter, absorber.axis): absorber.runs for absorber in site.absorbers}
        factors = {a.node: (folded, labels) for folded in site.norms for a, labels in folded.readers}
        for linear in site.readers:
            op, mapping = names.get(linear.node), linear.matrices
            if not isinstance(op, Coded) or op.input is None or not op.input.dynamic:
                continue
            along = runs.get((op.weight_node, linear.input_axis - len(linear.shape)))
            if along is None or mapping is None or mapping.stacked or mapping.kernel or mapping.offsets:
                reason = "rotations are learned only for products of rows and one matrix"
                continue
            factor = None
            if linear.node in factors:
                folded, labels = factors[linear.node]
                factor = per_element(labels.flatten(), parameter(gm, folded.norm.factor).detach().float().flatten())
                zeros = zeros or not bool(factor.all())
                factor = factor.to(device)
            value = _Value(linear, mapping, op.input, along.flatten().to(device), factor)
            values.setdefault((linear.activation, op.input), value)
        if site.keeps_mean:
            reason = "the rotation must preserve the mean of each vector, which the norm subtracts"
        elif zeros:
            reason = "a factor of its norm is zero"
        elif values:
            reason = ""
        return cls(drawn, tuple(values.values()), reason)

    def error(self, rotation: Rotation, step: int) -> Tensor:
        """Return the mean relative error of all values, on the rows of a step."""
        errors, count = [], max(_FEW, _AT_ONCE // len(self.values))
        for value in self.values:
            rows = value.rows["learned"]
            if count < len(rows):
                rows = rows[torch.arange(step * count, (step + 1) * count, device=rows.device) % len(rows)]
            errors.append(value.error(rotation, rows))
        return torch.stack(errors).mean()

    @torch.no_grad()
    def judge(self, rotation: Rotation) -> float:
        """Return the mean relative error of all values, on the validation rows."""
        return float(torch.stack([value.error(rotation, value.rows["judged"]) for value in self.values]).mean())

    def pack(self, rotation: Rotation) -> Tensor:
        """Return both factors in one tensor."""
        return torch.cat([rotation.left.flatten(), rotation.right.flatten()])

    def unpack(self, packed: Tensor) -> Rotation:
        """Return the matrix from the result of `pack`."""
        left, right = self.drawn.rotation.left, self.drawn.rotation.right
        one, other = packed.split([left.numel(), right.numel()])
        return Rotation(one.reshape(left.shape), other.reshape(right.shape))


def _cayley(turn: Tensor) -> Tensor:
    """Return the orthogonal matrix `(1 - s / 2)^-1 (1 + s / 2)` of the skew-symmetric part `s` of a matrix."""
    skew = (turn - turn.T) / 4
    one = torch.eye(len(turn), device=turn.device, dtype=turn.dtype)
    turned: Tensor = torch.linalg.solve_ex(one - skew, one + skew)[0]  # never singular, so no check is needed
    return turned


def _rounded(x: Tensor, spec: TensorSpec) -> Tensor:
    """Return quantized rows, with straight-through gradients for the rows and gradients for their measured range."""
    name, _, axis, block, *_ = measurement = spec.measurement(1)
    with torch.no_grad():
        scale, zero_point = ops.dynamic_qparams(x, *measurement)
    low, high = ops.extremes(x, axis, block)
    width = torch.maximum(-low, high) if spec.scheme.symmetric else high - low
    # `grows` is 1, with the gradient of the range; for a row of zeros, the gradient is zero.
    grows = torch.where(width > 0, width / width.detach().clamp_min(_TINY), 1)
    scale = ops.spread(scale * grows, x, axis, block)
    ones = torch.ones_like(zero_point, dtype=torch.float32)
    rounded: Tensor = ops.fake_quantize(x / scale, ones, zero_point, name, axis, block)
    return rounded * scale


__all__ = ["LearnRotations"]
