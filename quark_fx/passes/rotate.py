"""Rotate activations and their readers' weights, so that outlier channels are spread out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch.fx import GraphModule, Node

from quark_fx.config.selection import Named, Selective
from quark_fx.config.target import Unrotated
from quark_fx.engine.context import Context
from quark_fx.errors import Declined
from quark_fx.graph.attention import Attention, Cached
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, output_node, static_size, value_of
from quark_fx.graph.operators import argument
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.numbers.rotation import Rotation
from quark_fx.plan.placement import Attending, Quantized, names_of, plan_quantization
from quark_fx.plan.roles import Uses
from quark_fx.rescale.rotation_sites import RotationSite, apply_rotation, find_rotation_sites, insert_rotation
from quark_fx.system.options import Interval


@dataclass(frozen=True, eq=False)
class Drawn:
    """A site with its matrix, its name, and the text to report."""

    name: str
    site: RotationSite
    rotation: Rotation
    what: str


@dataclass(frozen=True, kw_only=True)
class Rotating(Selective, ABC):
    """Base class of passes that rotate the sites with quantized readers, and quantized keys.

    Args:
        overhead: Largest number of multiplications at run time for a rotation, as a fraction of the multiplications in
            the rotated value's readers. With 0, only sites that weights absorb completely are rotated, and no keys.
        streams: Whether to rotate residual streams as a whole. Otherwise the outputs of norms are rotated where
            operators read them, at run time. The factors of norms then stay in the activations instead of moving into
            the weights. That loses less at 4 bits, and `SmoothQuant(rms=True)` can change these factors.
        block: Largest number of channels in a block, if blocks of channels are rotated instead of all channels
            together. All blocks of a site have the same matrix, and the largest size up to `block` that divides the
            channels. Rotating at run time then costs less, and groups of that size (MXFP4, NVFP4) keep independent
            scales. Keys are rotated as a whole.
        keys: Whether to rotate quantized keys and their queries.
        seed: Seed of the random signs.
    """

    overhead: Annotated[float, Interval("[0, inf)")] = 0.5
    streams: bool = True
    block: Annotated[int, Interval("[2, inf)")] | None = None
    keys: bool = True
    seed: Annotated[int, Interval("[0, 2147483647]")] = 0

    def rotate(self, gm: GraphModule, context: Context | None) -> int:
        """Rotate the inputs of operators that will be quantized (without a context, of all); return the site count."""
        names, note = _names(gm, context), context.note if context is not None else lambda change: None
        unrotated = context.config.target.checkpoints.unrotated if context is not None else None
        generator = torch.Generator().manual_seed(self.seed)
        drawn = self._draw(gm, names, unrotated, generator, note)
        self.turn(gm, drawn, names, context)
        rotated, at_run_time = len(drawn), sum(len(one.site.at_run_time) for one in drawn)
        if self.keys and self.overhead > 0:
            attending = [op for op in names.values() if isinstance(op, Attending)]
            changes = [self._rotate_keys(gm, op, generator, unrotated) for op in attending]
            rotated += sum(change.changed for change in changes)
            at_run_time += 2 * sum(change.changed for change in changes)
            for change in changes:
                note(change)
        if context is not None and at_run_time:
            context.remark = f"{at_run_time} values are rotated at run time"
        gm.recompile()
        return rotated

    @abstractmethod
    def turn(
        self, gm: GraphModule, drawn: Sequence[Drawn], names: Mapping[Node, Named], context: Context | None
    ) -> None:
        """Rotate sites of a graph and report them.

        Args:
            gm: Graph to rotate.
            drawn: Sites, with a matrix each.
            names: Names of the operators that will be quantized; with a context, the values are `Quantized`.
            context: Context of the run, or `None`.
        """

    def _draw(
        self,
        gm: GraphModule,
        names: Mapping[Node, Named],
        unrotated: Unrotated | None,
        generator: torch.Generator,
        note: Callable[[Change], None],
    ) -> list[Drawn]:
        """Return the sites to rotate, with random matrices, in graph order; report why other sites are skipped."""
        analysis, drawn = find_rotation_sites(gm, streams=self.streams), list[Drawn]()
        for node, reason in analysis.reasons.items():
            if node in names:
                note(Change.skipped(names[node].name, self.why_not(names[node]) or reason))
        for candidate in analysis.sites:
            readers = [names[linear.node] for linear in candidate.readers if linear.node in names]
            if not readers:
                continue
            site = candidate if self.block is None else candidate.in_blocks(self.block)
            name = readers[0].name + f" and {len(readers) - 1} more" * (len(readers) > 1)
            rotation = site.draw(generator)
            share = site.overhead(rotation)
            if why := self.why_not(*readers):
                pass
            elif site.size == 1:
                why = f"{candidate.size} channels do not divide into blocks of at most {self.block}; raise block"
            elif share > self.overhead:
                why = f"rotating at run time would cost {share:.0%} of the products (overhead={self.overhead:g})"
            elif site.at_run_time and unrotated is not None:
                why = _unrotated(site, unrotated)
            if not why:
                drawn.append(Drawn(name, site, rotation, _said(site, share, in_blocks=site.size < candidate.size)))
                continue
            note(Change.skipped(name, why))
        return drawn

    def _rotate_keys(
        self, gm: GraphModule, op: Attending, generator: torch.Generator, unrotated: Unrotated | None
    ) -> Change:
        """Rotate the keys and queries of an attention, or report the reason for skipping it."""
        try:
            self.require_selected(op)
            size = _channels_of_keys(gm, op.attention)
        except Declined as declined:
            return Change.skipped(op.name, declined.reason)
        if unrotated is not None and (why := unrotated(op.kinds, False, size)):
            return Change.skipped(op.name, why)
        _multiply_keys(gm, op.attention, Rotation.random(size, generator))
        return Change(op.name, f"rotated queries and keys by a matrix of size {size}, at run time")


@graph_pass(after=("fold_constants", "fold_batch_norm"))
@dataclass(frozen=True, kw_only=True)
class Rotate(Rotating):
    """Multiply the inputs of quantized operators by random Hadamard matrices, and their weights by the inverses.

    A sum of many channels with random signs has a nearly normal distribution, so outliers are spread over all channels
    of activations and weights. The residual stream is rotated as a whole, and the values of attention head by head.
    Weights absorb a matrix where possible, and the factors of norms are folded into the operators after them.
    Elsewhere, such as before the down projection of an MLP, the model multiplies by two Kronecker factors at run time.
    The graph's function is preserved, up to rounding. The pass needs no data.

    Rotations that the target does not support at run time are skipped, with a reason.

    Quantized keys (`QuantConfig.kv_cache`) and their queries are rotated head by head at run time, after rotary
    embeddings.

    Source:
        Ashkboos et al. 2024 (QuaRot): rotations R1, R2, R3 (keys), and R4; Chee et al. 2023 for the reason. LayerNorm
        stays, with matrices that preserve means, instead of being replaced with RMSNorm.
    """

    def __call__(self, gm: GraphModule, context: Context | None = None) -> int:
        """Rotate the inputs of operators that will be quantized (without a context, of all); return the site count."""
        return self.rotate(gm, context)

    def turn(
        self, gm: GraphModule, drawn: Sequence[Drawn], names: Mapping[Node, Named], context: Context | None
    ) -> None:
        """Rotate sites and report them."""
        for one in drawn:
            apply_rotation(gm, one.site, one.rotation)
            if context is not None:
                context.note(Change(one.name, one.what))


def _names(gm: GraphModule, context: Context | None) -> Mapping[Node, Named]:
    """Return the names, for patterns, of the operators that will be quantized."""
    if context is None:
        uses = Uses(gm.graph)
        return {node: names_of(node, uses) for node in gm.graph.nodes if Linear.of(node) is not None}
    operators = plan_quantization(gm, context.config, quiet=True).operators
    return {op.node: op for op in operators if isinstance(op, Quantized)}


def _unrotated(site: RotationSite, unrotated: Unrotated) -> str:
    """Return the reason why a target cannot multiply by a site's matrix at run time; empty if it can."""
    if site.read:
        return "other operators read this value unrotated, and no runtime rotates it back for them; set streams=False"
    reasons = (unrotated(names_of(r.node).kinds, r.bias is not None, site.size) for r in site.readers)
    return next(filter(None, reasons), "")


def _said(site: RotationSite, share: float, *, in_blocks: bool) -> str:
    online = f", at run time for {share:.1%} of the products" if site.at_run_time else ""
    return f"rotated{' in blocks' * in_blocks} by a matrix of size {site.size}{online}"


def _channels_of_keys(gm: GraphModule, attention: Attention) -> int:
    """Return the number of channels in the queries and keys of a head.

    Raises:
        Declined: If the queries and keys cannot be rotated.
    """
    keys, values, query = attention.keys, attention.values, _query(attention)
    if not isinstance(keys, Cached):
        raise Declined(keys)
    if isinstance(values, Cached) and (keys.value, keys.reader) == (values.value, values.reader):
        raise Declined("its keys and values are the same tensor")
    if query is keys.value and keys.reader is attention.scores:
        raise Declined("its keys and queries are the same tensor")
    if is_parameter(query):
        raise Declined("its queries are constants of the model")
    if output_node(gm) in keys.value.users:
        raise Declined("its keys are an output of the model")
    shape = value_of(gm, keys.value).shape
    fused = attention.node is attention.scores
    if keys.channels != len(shape) - 1 or not (fused or keys.across == -2):
        raise Declined("the channels of its queries and keys are not their last dimension")
    size = static_size(shape[-1])
    if size is None or size == 1:
        raise Declined(f"its heads have {shape[-1]} channels")
    return size


def _multiply_keys(gm: GraphModule, attention: Attention, rotation: Rotation) -> None:
    """Multiply the queries and keys of an attention by a matrix of the size that `_channels_of_keys` returns."""
    keys, query = attention.keys, _query(attention)
    assert isinstance(keys, Cached)
    insert_rotation(gm, keys.value, rotation, [keys.reader])
    insert_rotation(gm, query, rotation, [attention.scores])


def _query(attention: Attention) -> Node:
    query: Node = argument(attention.scores, attention.query)
    return query


__all__ = ["Drawn", "Rotate", "Rotating"]
