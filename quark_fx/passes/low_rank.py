"""Compute the directions in which activations and weights are largest in float, next to quantized operators."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Selective
from quark_fx.engine.block_walk import walk_float_blocks
from quark_fx.engine.blocks import Unit
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import BlockSize, Need, Sizes
from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.linear_map import LinearMap
from quark_fx.graph.nodes import call, describe, get_attr, named_nodes, parameter, value_of
from quark_fx.graph.operators import BRANCH, set_argument
from quark_fx.graph.pass_manager import Change, copy_graph, graph_pass
from quark_fx.plan.placement import Coded, plan_quantization
from quark_fx.rescale.scale_rules import weight_sharer
from quark_fx.rescale.scale_sites import replace_parameter
from quark_fx.rescale.scale_walk import Walk
from quark_fx.solvers.hessian import Entrance, Hessian
from quark_fx.solvers.in_turn import Chosen, choose_in_turn
from quark_fx.system.options import Interval, PositiveInt

_MORE, _ROUNDS = 8, 12
"""Number of extra directions in the iteration, and of its rounds; more rounds improve the result by less than 1 %."""

_LEAST = 1e-6
"""Smallest fraction of the squares that is assumed to remain."""

_CONFIRMED = 1.25
"""Largest allowed ratio of the fraction of squares that remains on validation data to the fraction that remains on
calibration data. Directions fit the calibration data best, so its ranges would clip new data."""

_BEFORE = ("fold_constants", "fold_batch_norm", "CrossLayerEqualization", "SmoothQuant", "NormalizeColumns", "AWQ")
"""Passes that must run first, because they cannot scale a graph with branches."""


@graph_pass(after=_BEFORE, distributed=True, branches=True)
@dataclass(frozen=True, kw_only=True)
class LowRank(Selective):
    """Split `rank` directions off the inputs of quantized operators, and multiply them in float.

    With orthonormal columns `U`, `W x = W' (x - U U' x) + (W U) (U' x)`, where `W' = W - W U U'`. `W'` and `x - U U' x`
    are quantized; the second product is computed in float. Operators with the same input share `U`. The graph's
    function is preserved, up to rounding.

    Rounding errors of activations are proportional to the root mean square of the rounded values, and multiply weights;
    rounding errors of weights are proportional to the root mean square of the weights, and multiply activations. Either
    way, the squared error of the output is proportional to the product of the two mean squares. `U` minimizes that
    product after its directions are removed from both. The report gives the factor of the error on validation data. If
    ranges of activations are calibrated, a value is skipped if `U` leaves a much larger fraction of the validation data
    than of the calibration data.

    Run it after `SmoothQuant(rms=True)`, whose scales reduce the same error, and before `GPTQ`. The quantized model,
    `compile()`, `eager()`, and ONNX files compute branches; checkpoints do not.

    Args:
        rank: Number of directions, less than the number of an operator's inputs. A branch stores
            `rank * (2 * inputs + outputs)` floats, and computes as many multiplications for each row.
        overhead: Largest number of multiplications in a branch, as a fraction of the multiplications in the value's
            readers.

    Source:
        Ours. Li et al. 2024 (SVDQuant) compute the largest directions of weights in float, and Saxena et al. 2024
        (ResQ) the largest directions of activations in 8 bits. Scetbon and Hensman 2024 (LRC) fit low-rank float
        matrices, which multiply activations that are not rounded, to the error of rounded ones; here directions are
        split off first, share `U`, and preserve the function.
    """

    rank: PositiveInt = 32
    overhead: Annotated[float, Interval("[0, inf)")] = 0.5

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Split the inputs of quantized operators, value by value; return the number of split values.

        Raises:
            CalibrationError: If calibration data is missing.
        """

        def chosen(pending: Mapping[int, _Site]) -> Iterator[Chosen]:
            return _measured(gm, copy_graph(gm), pending, context, self.rank)

        sites = self._sites(gm, context)
        changed = choose_in_turn(sites, context, chosen, lambda site, directions: _split(gm, site, directions))
        gm.recompile()
        return changed

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: both Hessians of the input, and the old and new weights of its readers."""

        def turn(block: BlockSize) -> int:
            forms = 3 * max((m.moment for m in block.matrices), default=0)  # of both kinds of data, and of the weights
            return forms + max(block.entrances, 3 * max((m.target for m in block.matrices), default=0))

        def work(block: BlockSize) -> float:
            steps = 4 * 3 * _ROUNDS * (self.rank + _MORE)  # from three starts, two products with two forms
            return sum(m.inputs**2 * (m.rows * sizes.batches + m.outputs + 2 * steps) for m in block.matrices)

        branches = sum(self.rank * (2 * m.inputs + m.outputs) * m.itemsize for m in sizes.matrices.values())
        return sizes.walk(Unit.OPERATOR, turn, held=sizes.weight_bytes + branches, work=work)

    def _sites(self, gm: GraphModule, context: Context) -> list[_Site]:
        """Return the values to split, in graph order; report the reasons for operators that are skipped."""
        target = context.config.target
        beside = f"target={str(target)!r} does not compute in float next to a layer"
        context.remark = refused = "" if target.placement.branches else beside
        planned = [op for op in plan_quantization(gm, context.config, quiet=True).operators if isinstance(op, Coded)]
        walk, readers_of = Walk(gm), dict[Node, list[_Reader]]()
        for op in planned:
            try:
                self.require_selected(op)
                reader = self._reader(op, walk, refused=refused)
                readers_of.setdefault(reader.linear.activation, []).append(reader)
            except Declined as declined:
                context.note(Change.skipped(op.name, declined.reason))
        sites = []
        for readers in readers_of.values():
            site = _Site(tuple(readers))
            if self.rank >= site.inputs:
                what = f"rank {self.rank} is not below its {site.inputs} channels; set a smaller rank"
                context.note(Change.skipped(site.name, what))
            elif (share := site.overhead(self.rank)) > self.overhead:
                cost = f"a branch of rank {self.rank} would cost {share:.0%} of the multiplications"
                context.note(Change.skipped(site.name, f"{cost} (overhead={self.overhead:g})"))
            else:
                sites.append(site)
        return sites

    def _reader(self, op: Coded, walk: Walk, *, refused: str) -> _Reader:
        """Return an operator whose input can be split.

        Args:
            op: Planned operator.
            walk: Traversal of the graph.
            refused: Reason why the target does not support branches; empty if it does.

        Raises:
            Declined: If the input of the operator cannot be split.
        """
        linear, mapping = op.linear, None if op.linear is None else op.linear.matrices
        if refused:
            raise Declined(refused)
        if linear is None or mapping is None or mapping.kernel or mapping.stacked or linear.has_factors:
            raise Declined("LowRank splits only products of rows and one matrix, not convolutions, stacks, or tables")
        if BRANCH in linear.activation.meta:
            raise Declined("an earlier LowRank split its input; set a larger rank in that one")
        if op.weight.is_cast:
            raise Declined("its weight is cast, not quantized")
        sharer = weight_sharer(walk, linear)
        if sharer is not None:
            raise Declined(f"its weight is shared with {describe(sharer)}")
        return _Reader(op, linear, mapping)


@dataclass(frozen=True, eq=False)
class _Reader:
    """An operator that multiplies rows by one matrix."""

    operator: Coded
    linear: Linear
    mapping: LinearMap

    def matrix(self, gm: GraphModule) -> Tensor:
        """Return the operator's weight in float32, shape (outputs, inputs)."""
        return self.mapping.matrix(parameter(gm, self.operator.weight_node).detach())[0].float()


@dataclass(frozen=True, eq=False)
class _Site:
    """A value to split, given by its consumers."""

    readers: tuple[_Reader, ...]

    @property
    def name(self) -> str:
        """Modules of the operators."""
        return ", ".join(reader.operator.name for reader in self.readers)

    @property
    def inputs(self) -> int:
        """Number of channels of the input."""
        first = self.readers[0].linear
        return first.shape[first.input_axis]

    @property
    def is_calibrated(self) -> bool:
        """True if an operator's input range is calibrated."""
        specs = (reader.operator.input for reader in self.readers)
        return any(spec is not None and spec.is_calibrated for spec in specs)

    def overhead(self, rank: int) -> float:
        """Return the number of multiplications in a branch, relative to the number in the operators."""
        outputs = sum(reader.linear.shape[reader.linear.output_axis] for reader in self.readers)
        return rank * (2 * self.inputs + outputs) / (self.inputs * outputs)


def _measured(
    gm: GraphModule, before: GraphModule, sites: Mapping[int, _Site], context: Context, rank: int
) -> Iterator[Chosen]:
    """Yield the directions of each site, shape (inputs, rank); the data runs through the unchanged graph."""
    for run in walk_float_blocks(before, context, unit=Unit.OPERATOR, label=LowRank.__name__):
        nodes = named_nodes(run.module)
        for number, site in sites.items():
            first = site.readers[0]
            if first.linear.node.name not in run.block.operators:
                continue
            linear = first.linear.at(nodes[first.linear.node.name])
            learned, judge = Hessian.of_parts(context, Entrance(run.module, linear, first.mapping, run.inputs))
            settled = context.with_room(partial(_settled, gm, site, learned.h[0], judge.h[0], rank))
            yield number, *context.ranks.gather(settled)[0]  # results may differ between processors


def _settled(gm: GraphModule, site: _Site, learned: Tensor, judge: Tensor, rank: int) -> tuple[Tensor | None, Change]:
    """Return the directions to split off a value, or `None`, and the change to report."""
    began = time.perf_counter()
    weights = torch.zeros_like(learned)
    for reader in site.readers:
        matrix = reader.matrix(gm).to(learned.device)
        weights.addmm_(matrix.T, matrix)
    if not all(bool(form.isfinite().all()) for form in (learned, judge, weights)):
        return None, Change.skipped(site.name, "its input or weight is infinite or too large to be squared")
    if not bool((learned.trace() > 0) & (weights.trace() > 0)):
        return None, Change.skipped(site.name, "its input or weight is zero")
    directions = _directions(learned, weights, rank)
    judge = judge if bool(judge.trace() > 0) else learned
    rest, other, columns = (
        max(0.0, float(_left(form, directions) / form.trace())) for form in (learned, judge, weights)
    )
    if site.is_calibrated and other > _CONFIRMED * rest:
        reason = (
            f"the chosen directions leave {rest:.0%} of the calibration data but {other:.0%} of the validation data "
            "unexplained; pass more data"
        )
        return None, Change.skipped(site.name, reason)
    what = f"rank {rank}, adds {site.overhead(rank):.1%} multiplications; error multiplied by {other * columns:.2g}"
    return directions.cpu().contiguous(), Change(site.name, what, seconds=time.perf_counter() - began)


def _directions(x: Tensor, w: Tensor, rank: int) -> Tensor:
    """Return orthonormal columns `U`, shape (n, rank), that make `tr(P x) tr(P w)` small, with `P = 1 - U U'`.

    At a minimum, the columns span the leading eigenvectors of `x / tr(P x) + w / tr(P w)`. Subspace iteration finds
    such columns while the two traces converge, and reduces the product in every round. It starts from each form alone,
    and from both; the best of the three minima is returned.

    Args:
        x, w: Positive semidefinite, nonzero forms, shape (n, n).
        rank: Number of directions, less than n.
    """
    generator, n = torch.Generator().manual_seed(0), len(x)
    start = torch.randn(n, min(n, rank + _MORE), generator=generator, dtype=torch.float32).to(x.device)
    one, other = 1 / x.trace(), 1 / w.trace()
    best, least = start[:, :rank], torch.full_like(one, torch.inf)
    for of_x, of_w in ((one, other), (one, 0 * other), (0 * one, other)):
        basis = start
        for _ in range(_ROUNDS):
            basis = torch.linalg.qr(of_x * (x @ basis) + of_w * (w @ basis))[0]
            products = x @ basis, w @ basis
            _, turned = torch.linalg.eigh(basis.T @ (of_x * products[0] + of_w * products[1]))
            vectors = turned[:, -rank:]  # eigenvalues ascend
            residuals = [
                (form.trace() - ((basis @ vectors) * (product @ vectors)).sum()).clamp_min(_LEAST * form.trace())
                for form, product in zip((x, w), products, strict=True)
            ]
            of_x, of_w = 1 / residuals[0], 1 / residuals[1]
        if bool(one * residuals[0] * other * residuals[1] < least):
            best, least = basis @ vectors, one * residuals[0] * other * residuals[1]
    return best


def _left(form: Tensor, directions: Tensor) -> Tensor:
    """Return the trace of a form after the columns of `directions` are removed from it."""
    return form.trace() - (directions * (form @ directions)).sum()


def _split(gm: GraphModule, site: _Site, directions: Tensor) -> None:
    """Split the columns of `directions` off the value that the operators of a site read."""
    first, value = site.readers[0].linear.node, site.readers[0].linear.activation
    linear, like = torch.ops.aten.linear.default, value_of(gm, value)

    def added(target: object, *args: Node, beside: Node) -> Node:
        node = call(gm, target, *args, like=beside)
        node.meta[BRANCH] = beside.name
        return node

    def stored(name: str, tensor: Tensor) -> Node:
        return get_attr(gm, name, tensor.to(device=like.device, dtype=like.dtype).contiguous())

    with gm.graph.inserting_before(first):
        into, back = stored(f"{first.name}_into", directions.T), stored(f"{first.name}_back", directions)
        parts = added(linear, value, into, beside=first)
        rest = added(torch.ops.aten.sub.Tensor, value, added(linear, parts, back, beside=first), beside=first)
    for reader in site.readers:
        node, weight = reader.linear.node, reader.operator.weight_node
        matrix, old = reader.matrix(gm), parameter(gm, weight).detach()
        columns = matrix @ directions.to(matrix)
        residual = (matrix - columns @ directions.to(matrix).T).unsqueeze(0).to(old.dtype)
        replace_parameter(gm, weight, reader.mapping.restore(residual, old))
        set_argument(node, reader.linear.activation_at, rest)
        with gm.graph.inserting_before(node.next):
            beside = added(linear, parts, stored(f"{node.name}_branch", columns), beside=node)
            whole = added(torch.ops.aten.add.Tensor, node, beside, beside=node)
        for user in [user for user in node.users if user is not whole]:
            user.replace_input_with(node, whole)


__all__ = ["LowRank"]
