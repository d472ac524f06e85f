"""Rotations that do not change the function of a graph: the sites, and the function that applies a rotation.

A *site* is a set of values that one orthogonal matrix multiplies along their channels, `x -> x R`. Weights that produce
or read the values absorb the matrix; elsewhere, a multiplication is inserted (`made`, `read`).

Source:
    Ashkboos et al. 2024 (QuaRot): residual stream, values of heads, rotations at run time. The search for sites in any
    graph, and rotations that preserve LayerNorm (`Rotation.random`), are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.errors import Declined
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    CAST,
    ROTATE,
    call,
    describe,
    get_attr,
    is_parameter,
    module_calls,
    parameter,
    target_name,
    value_of,
)
from quark_fx.graph.operators import BRANCH, Motion, motion, moved_inputs, moves
from quark_fx.numbers.rotation import Rotation
from quark_fx.rescale.components import per_element
from quark_fx.rescale.rotation_walk import Norm, RotationWalk
from quark_fx.rescale.scale_rules import weight_sharer
from quark_fx.rescale.scale_sites import replace_parameter, rescale
from quark_fx.rescale.scale_walk import Absorption


def _unsplit(value: Node) -> Node:
    """Return a value before passes split directions off it; the value itself if none did."""
    while BRANCH in value.meta:
        value = cast(Node, value.args[0])
    return value


@dataclass(frozen=True, eq=False)
class _Rotated:
    """A parameter that absorbs a rotation.

    Attributes:
        parameter: The `get_attr` node of the parameter.
        axis: Channel dimension, counted from the last (-1).
        channels: Size of the channel dimension after expansion; a constant that is equal for all channels may have
            size 1 before it.
        runs: Indices along the channel dimension, shape (runs, n); the matrix multiplies the n channels of each run.
    """

    parameter: Node
    axis: int
    channels: int
    runs: Tensor


@dataclass(frozen=True, eq=False)
class _Folded:
    """A norm's factor, and the weights it is folded into.

    Attributes:
        norm: Norm whose factor becomes one.
        readers: Consumers of the norm's output, with the norm's channel for each of their input channels.
        into_biases: Whether the offset is added to the biases of `readers`; otherwise it is divided by the factor, and
            rotated.
    """

    norm: Norm
    readers: tuple[tuple[Absorption, Tensor], ...]
    into_biases: bool


@dataclass(frozen=True, eq=False)
class RotationSite:
    """Values that one orthogonal matrix multiplies.

    Attributes:
        size: Size n of the matrix.
        readers: Operators whose inputs are rotated, in graph order.
        absorbers: Parameters that absorb the rotation.
        norms: Norms whose factors are folded.
        made: Values that are rotated at run time, after the operator that computes them.
        read: Values that are rotated back at run time, each with its consumers that need the original value.
        keeps_mean: Whether the matrix must preserve means.
        rotated_channels: Number of channels of each value that is rotated at run time.
    """

    size: int
    readers: tuple[Linear, ...]
    absorbers: tuple[_Rotated, ...]
    norms: tuple[_Folded, ...] = ()
    made: tuple[Node, ...] = ()
    read: tuple[tuple[Node, tuple[Node, ...]], ...] = ()
    keeps_mean: bool = False
    rotated_channels: tuple[int, ...] = ()

    @property
    def at_run_time(self) -> tuple[Node, ...]:
        """The values that are multiplied when the model runs."""
        return (*self.made, *(value for value, _ in self.read))

    def in_blocks(self, most: int) -> RotationSite:
        """Return the site with one matrix for all blocks of channels, of the largest size up to `most` that fits."""
        size = next(size for size in range(min(most, self.size), 0, -1) if self.size % size == 0)
        absorbers = tuple(replace(absorber, runs=absorber.runs.reshape(-1, size)) for absorber in self.absorbers)
        return replace(self, size=size, absorbers=absorbers)

    def draw(self, generator: torch.Generator) -> Rotation:
        """Return a random matrix for the site."""
        whole = self.keeps_mean and not self.at_run_time
        return Rotation.random(self.size, generator, keeps_mean=self.keeps_mean, whole=whole)

    def overhead(self, rotation: Rotation) -> float:
        """Return the ratio of multiplications at run time to multiplications of the readers, per row of channels."""
        added = sum(self.rotated_channels) // self.size * rotation.cost
        products = (reader.shape[reader.input_axis] * reader.shape[reader.output_axis] for reader in self.readers)
        return added / max(1, sum(products))


@dataclass(frozen=True)
class RotationAnalysis:
    """The sites of a graph, and the reason for each operator whose input no site rotates."""

    sites: tuple[RotationSite, ...]
    reasons: dict[Node, str] = field(default_factory=dict)


def find_rotation_sites(gm: GraphModule, *, streams: bool = True) -> RotationAnalysis:
    """Find all sites of a graph; rotating any subset of them leaves the function unchanged up to rounding.

    Args:
        gm: Captured graph; it is not changed.
        streams: Whether to fold the factors of norms into the next operators, so that rotations pass through norms and
            whole residual streams are rotated. Otherwise a norm's output is a separate site, rotated at run time.
    """
    walk, reasons = RotationWalk(gm), dict[Node, str]()
    readers = [linear for node in gm.graph.nodes if (linear := Linear.of(node)) is not None]
    for linear in readers:
        value = linear.activation
        if (sharer := weight_sharer(walk, linear)) is not None:
            reasons[linear.node] = f"its weight is shared with {describe(sharer)}"
        elif linear.groups > 1:
            reasons[linear.node] = "it has groups of channels"
        elif target_name(_unsplit(value)) == ROTATE:
            reasons[linear.node] = "its input is already rotated at run time"
        elif isinstance(value, Node):
            rank = len(walk.shape(value))
            axis = linear.channel_dim(rank)
            fresh = walk.components.fresh(walk.concrete(walk.shape(value)[axis]))
            walk.join(value, fresh.reshape([-1 if d == axis else 1 for d in range(rank)]))
    walk.run()
    rotated = [linear for linear in readers if linear.node not in reasons]
    return _Sites(walk, rotated, reasons, streams=streams).found()


class _Sites:
    """Coordinates of a finished walk, grouped into sites."""

    def __init__(self, walk: RotationWalk, readers: list[Linear], reasons: dict[Node, str], *, streams: bool) -> None:
        self.walk, self.reasons = walk, reasons
        self.roots = walk.components.roots(torch.arange(walk.components.count))
        self.folded = self._fold_norms(streams=streams)
        table = torch.arange(walk.components.count)
        for folded in self.folded:
            table[self.roots[folded.norm.outputs]] = self.roots[folded.norm.inputs]
        self.coordinate = table[self.roots]
        self.readers = {
            linear: self.of(walk.inputs[linear.node].labels) for linear in readers if linear.node in walk.inputs
        }

    def of(self, labels: Tensor) -> Tensor:
        """Return the coordinate of each label, -1 for label -1."""
        return torch.where(labels >= 0, self.coordinate[labels.clamp(min=0)], -1)

    def found(self) -> RotationAnalysis:
        walk, sites = self.walk, []
        mixed = walk.mixes(self.coordinate)
        order = {node: i for i, node in enumerate(walk.gm.graph.nodes)}
        for coordinates, readers in self._groups(mixed):
            try:
                sites.append(self._site(coordinates, readers))
            except Declined as declined:
                self.reasons |= {linear.node: declined.reason for linear in readers}
        sites.sort(key=lambda site: order[site.readers[0].node])
        return RotationAnalysis(tuple(sites), self.reasons)

    def _fold_norms(self, *, streams: bool) -> list[_Folded]:
        """Return the norms whose consumers can all absorb the factor; other norms stop rotations on both sides."""
        walk, count = self.walk, self.walk.components.count
        other = torch.zeros(count, dtype=torch.bool)
        consumers: dict[int, list[Absorption]] = {}
        for absorption in (a for absorptions in walk.absorptions.values() for a in absorptions):
            used = self.roots[torch.unique(absorption.labels[absorption.labels >= 0])]
            if absorption.divides or Linear.of(absorption.node) is None:
                other[used] = True
            for root in used.tolist():
                consumers.setdefault(root, []).append(absorption)
        stopped = (walk.labels[value] for value in (*walk.made, *(value for value, _ in walk.read)))
        for labels in (*stopped, *walk.measured):
            other[self.roots[labels[labels >= 0]]] = True
        sides = [self.roots[side[side >= 0]] for norm in walk.norms.values() for side in (norm.inputs, norm.outputs)]
        # Number of norms with each coordinate in their input or output: a coordinate of two norms absorbs no factor.
        several = torch.zeros(count, dtype=torch.long)
        for side in sides:
            several[side] += 1
        folded = []
        for norm in walk.norms.values():
            complete = bool((norm.outputs >= 0).all()) and bool((norm.inputs >= 0).all())
            roots = self.roots[norm.outputs.clamp(min=0)]
            inputs = self.roots[norm.inputs.clamp(min=0)]
            # If nothing absorbs a rotation of the norm's input, only a single value after the norm would be rotated.
            gains = complete and (bool((several[inputs] > 1).any()) or any(i in consumers for i in inputs.tolist()))
            alone = streams and gains and not bool(other[roots].any()) and bool((several[roots] == 1).all())
            fold = self._folded(norm, roots, consumers) if alone and len(roots.unique()) == len(roots) else None
            if fold is not None:
                folded.append(fold)
            else:
                walk.stop_read(norm.node, [norm.value])
                walk.stop_made(norm.node)
        return folded

    def _folded(self, norm: Norm, roots: Tensor, consumers: Mapping[int, list[Absorption]]) -> _Folded | None:
        absorptions = {id(a): a for root in roots.tolist() for a in consumers.get(root, [])}
        channel = torch.full((self.walk.components.count,), -1)
        channel[roots] = torch.arange(len(roots))
        readers = tuple(
            (a, torch.where(a.labels >= 0, channel[self.roots[a.labels.clamp(min=0)]], -1))
            for a in absorptions.values()
        )
        if not readers:
            return None
        if norm.offset is None:
            return _Folded(norm, readers, into_biases=False)
        if all(self._takes_bias(a, norm.node) for a, _ in readers):
            return _Folded(norm, readers, into_biases=True)
        factor = parameter(self.walk.gm, norm.factor).detach().float().abs()
        return _Folded(norm, readers, into_biases=False) if bool((factor > 1e-3 * factor.max()).all()) else None

    def _takes_bias(self, absorption: Absorption, norm: Node) -> bool:
        """Tell whether the bias of an operator can absorb the contribution of a norm's offset to all of its rows."""
        linear = Linear.of(absorption.node)
        if linear is None or not is_parameter(linear.bias) or self.walk.sharer(linear.bias, linear.node) is not None:
            return False
        value = linear.activation
        while value is not norm:
            if not (target_name(value) == CAST or motion(value) in _WHOLE):
                return False
            (value,) = moved_inputs(value)
        whole = parameter(self.walk.gm, linear.bias).numel() == linear.shape[linear.output_axis]
        matches = absorption.labels.numel() == linear.shape[linear.input_axis]
        return whole and matches and not linear.kernel and not linear.stacked and not linear.has_factors

    def _groups(self, mixed: Tensor) -> Iterator[tuple[Tensor, list[Linear]]]:
        """Yield the coordinates of each site, shape (k, n), with the operators that consume them."""
        first: dict[int, dict[int, None]] = {}
        for vector in self.readers.values():
            signatures = torch.unique(vector[vector >= 0])
            for coordinate, signature in zip(signatures.tolist(), mixed[signatures].tolist(), strict=True):
                first.setdefault(signature, {})[coordinate] = None
        group_of = {c: signature for signature, members in first.items() for c in members}
        parent = {signature: signature for signature in first}

        def root(signature: int) -> int:
            while parent[signature] != signature:
                signature = parent[signature]
            return signature

        touched: dict[Linear, list[int]] = {}
        for linear, vector in self.readers.items():
            signatures = list(dict.fromkeys(group_of[c] for c in vector[vector >= 0].tolist()))
            touched[linear] = signatures
            largest: dict[int, int] = {}
            for signature in signatures:
                size = len(first[signature])
                parent[root(signature)] = root(largest.setdefault(size, signature))
        sites: dict[int, list[int]] = {}
        for signature in first:
            sites.setdefault(root(signature), []).append(signature)
        for key, members in sites.items():
            readers = [linear for linear, of_reader in touched.items() if any(root(s) == key for s in of_reader)]
            ordered = sorted(sorted(first[signature]) for signature in members)
            yield torch.tensor(ordered, dtype=torch.long), readers

    def _site(self, groups: Tensor, readers: list[Linear]) -> RotationSite:
        """Return the site of the coordinates `groups`, shape (k, n); raise `Declined` if they cannot be rotated."""
        walk = self.walk
        if groups.shape[1] < 2:
            raise Declined(self._why(readers[0].activation, readers))
        place = torch.full((walk.components.count + 1,), -1)
        place[groups.flatten()] = torch.arange(groups.numel())
        norms = tuple(folded for folded in self.folded if bool((place[self.of(folded.norm.inputs)] >= 0).any()))
        absorptions = [a for absorptions in walk.absorptions.values() for a in absorptions]
        # An offset that is not folded into biases is added to a rotated value, and must be rotated as well.
        absorptions += [
            Absorption(norm.node, -1, norm.offset, norm.inputs, divides=True)
            for norm in (folded.norm for folded in norms if not folded.into_biases)
            if norm.offset is not None
        ]
        absorbers = []
        for absorption in absorptions:
            places = place[self.of(absorption.labels)]
            if not bool((places >= 0).any()):
                continue
            runs = _rotated(absorption, places, groups.shape)
            if runs is None:
                raise Declined(f"the channels of {absorption.parameter.target} do not form complete blocks")
            absorbers.append(runs)
        stopped = (self._laid_out(place, v, groups.shape[1]) for v in walk.made if self._within(place, v))
        values = list(dict.fromkeys(stopped))
        back: dict[Node, list[Node]] = {}
        for value, reader in walk.read:
            if self._within(place, value):
                value, consumers = self._lifted(value, reader)
                back.setdefault(value, []).extend(other for other in consumers if other not in back.get(value, []))
        for value in (*values, *back):
            if not self._in_runs(place, value, groups.shape[1]):
                raise Declined(self._why(value, readers))
        for value in [value for value in values if set(value.users) <= set(back.get(value, ()))]:
            values.remove(value)  # all consumers read the original value
            del back[value]
        centered = [*walk.centering, *(f.norm.inputs for f in norms if f.norm.centers)]
        return RotationSite(
            groups.shape[1],
            tuple(readers),
            tuple(absorbers),
            norms,
            tuple(values),
            tuple((value, tuple(users)) for value, users in back.items()),
            any(bool((place[self.of(labels)] >= 0).any()) for labels in centered),
            tuple(walk.labels[value].numel() for value in (*values, *back)),
        )

    def _why(self, value: Node, readers: list[Linear]) -> str:
        """Return the reason why a value cannot be rotated in place: the producer or consumer that stops a rotation."""
        text = self.walk.made.get(value) or next((t for (v, _), t in self.walk.read.items() if v is value), "")
        if not text:
            return "no two channels of its input are treated alike"
        is_input = any(linear.activation is value for linear in readers)
        return f"its input {text}" if is_input else f"its input is tied to %{value.name}, which {text}"

    def _within(self, place: Tensor, value: Node) -> bool:
        return bool((place[self.of(self.walk.labels[value])] >= 0).any())

    def _in_runs(self, place: Tensor, value: Node, size: int) -> bool:
        """Tell whether whole groups are contiguous and in order along the last dimension of a value."""
        if value not in self.walk.labels:
            return False
        labels, sizes = self.of(self.walk.labels[value]), self.walk.sizes(value)
        if labels.shape[-1] != sizes[-1] or sizes[-1] % size:
            return False
        places = place[labels].reshape(-1, size)
        first = places[:, :1]
        return (
            bool((first >= 0).all())
            and bool((first % size == 0).all())
            and torch.equal(places, first + torch.arange(size))
        )

    def _laid_out(self, place: Tensor, value: Node, size: int) -> Node:
        """Follow the data movement of a value; return the last result with its channels last and in order."""
        last, moved = value, value
        while len(moved.users) == 1 and moves(user := next(iter(moved.users))) and moved_inputs(user) == (moved,):
            moved = user
            last = moved if self._in_runs(place, moved, size) else last
        return last

    def _lifted(self, value: Node, reader: Node) -> tuple[Node, list[Node]]:
        """Return a value to rotate back, and its consumers: the input of the norm's module, or else the arguments."""
        key, chain = next(reversed(module_calls(reader)), None), [value]
        while key is not None and key in module_calls(chain[-1]) and target_name(chain[-1]) in _KEEPING:
            sources = [n for n in chain[-1].all_input_nodes if n in self.walk.labels and not is_parameter(n)]
            if len(sources) != 1:
                return value, [reader]
            chain.append(sources[0])
        start = chain[-1]
        readers = [user for user in start.users if key is not None and key in module_calls(user)]
        # A consumer outside of the module that needs one of these values rotated prevents this.
        inside = {reader, *chain}
        consumers = {user for node in chain[:-1] for user in node.users} | set(readers)
        alone = all(user in inside or not self._is_rotated_for(user) for user in consumers)
        return (start, readers) if alone and readers else (value, [reader])

    def _is_rotated_for(self, user: Node) -> bool:
        return user in self.walk.labels or user in self.walk.inputs


_KEEPING = ("aten.mul.Tensor", CAST)
"""Steps of a norm that commute with a rotation: the rotation can be undone before them."""

_WHOLE = frozenset(Motion) - {Motion.JOIN, Motion.SCATTER, Motion.CHOOSE}
"""Data movement after which every row still contains the offset of a norm, or a slice of the offset."""


def _rotated(absorption: Absorption, places: Tensor, shape: torch.Size) -> _Rotated | None:
    """Return the runs of a parameter's channels; `None` if some are incomplete.

    Args:
        absorption: Parameter with its labels.
        places: Position in the groups of each label's coordinate, -1 for a coordinate outside of the groups.
        shape: Shape of the groups, (k, n).
    """
    axes = [d for d, size in enumerate(places.shape) if size > 1]
    if len(axes) != 1:
        return None
    vector, (count, size) = places.flatten(), shape
    times = torch.bincount(vector[vector >= 0], minlength=count * size).reshape(count, size)
    if not torch.equal(times, times[:, :1].expand_as(times)):
        return None
    columns = torch.argsort(vector, stable=True)[int((vector < 0).sum()) :]
    runs = [part.reshape(size, -1).T for part in columns.split((times.sum(1)).tolist())]
    order = torch.cat(runs)
    # With several copies of a run, stable sorting assigns channels to the right copies only if runs are evenly spaced.
    steps = order.diff(dim=1)
    if len(order) > count and not torch.equal(steps, steps[:, :1].expand_as(steps)):
        return None
    return _Rotated(absorption.parameter, axes[0] - places.dim(), len(vector), order)


def apply_rotation(gm: GraphModule, site: RotationSite, rotation: Rotation) -> None:
    """Rotate a site: replace its tensors and insert multiplications.

    Args:
        gm: Graph in which the site was found; other sites may have been applied since.
        site: Site from `find_rotation_sites`.
        rotation: Rotation of size `site.size`, which preserves means if `site.keeps_mean`.

    Raises:
        ValueError: If the matrix has another size, or does not preserve means although the site requires it.
    """
    if rotation.size != site.size:
        raise ValueError(f"the site takes a matrix of size {site.size}, not {rotation.size}")
    if site.keeps_mean and not rotation.keeps_mean:
        raise ValueError("the site has a norm that subtracts means; pass Rotation.random(..., keeps_mean=True)")
    for folded in site.norms:
        _fold(gm, folded)
    for absorber in site.absorbers:
        _replace(gm, absorber.parameter, partial(_mixed, absorber=absorber, rotation=rotation))
    back = {value: set(users) for value, users in site.read}
    for value in site.made:
        keep = back.get(value, set())
        after = [user for user in value.users if user not in keep]
        insert_rotation(gm, value, rotation, after)
    for value, users in site.read:
        if value not in site.made:
            insert_rotation(gm, value, rotation.inverse, list(users))


def _mixed(weight: Tensor, *, absorber: _Rotated, rotation: Rotation) -> Tensor:
    sizes = [1] * (-absorber.axis - weight.dim()) + list(weight.shape)
    sizes[absorber.axis] = absorber.channels
    last = weight.expand(sizes).movedim(absorber.axis, -1)
    runs = absorber.runs.to(weight.device)
    rotated = rotation.apply(last[..., runs.flatten()])
    result = last.clone(memory_format=torch.contiguous_format)
    result[..., runs.flatten()] = rotated
    return result.movedim(-1, absorber.axis).contiguous()


def _fold(gm: GraphModule, folded: _Folded) -> None:
    """Multiply the readers' weights by a norm's factor, and adjust its offset."""
    norm = folded.norm
    factor = parameter(gm, norm.factor).detach()
    offset = None if norm.offset is None else parameter(gm, norm.offset).detach()
    for absorption, labels in folded.readers:
        linear = Linear.of(absorption.node)
        if offset is not None and folded.into_biases and linear is not None and is_parameter(linear.bias):
            added = per_element(labels.flatten(), offset.flatten()) * (labels.flatten() >= 0)
            shift = linear.response(parameter(gm, absorption.parameter), added)
            assert shift is not None  # `into_biases` is only for operators with a response
            _replace(gm, linear.bias, lambda bias, shift=shift: bias + shift.reshape(bias.shape))  # type: ignore[misc]
        rescale(gm, absorption.parameter, labels, factor.flatten())
    _replace(gm, norm.factor, torch.ones_like)
    if norm.offset is not None:
        _replace(gm, norm.offset, torch.zeros_like if folded.into_biases else lambda offset: offset / factor)


def _replace(gm: GraphModule, node: Node, change: Callable[[Tensor], Tensor]) -> None:
    """Replace a parameter with the result of `change`, computed in float32 or wider."""
    old = parameter(gm, node).detach()
    wide = torch.promote_types(old.dtype, torch.float32)
    replace_parameter(gm, node, change(old.to(wide)).to(old.dtype))


def insert_rotation(gm: GraphModule, value: Node, rotation: Rotation, users: list[Node]) -> None:
    """Insert a rotation between a value and its consumers `users`, except consumers of its size alone."""
    users = [user for user in users if target_name(user) != "aten.sym_size.int"]
    if not users:
        return
    fake = value_of(gm, value)
    after = value if value.op != "placeholder" else max(n for n in gm.graph.nodes if n.op == "placeholder")
    with gm.graph.inserting_after(after):
        names = (f"{value.name}_left", f"{value.name}_right")
        left, right = (m.to(device=fake.device, dtype=fake.dtype) for m in (rotation.left, rotation.right))
        one = get_attr(gm, names[0], left)
    with gm.graph.inserting_after(one):
        other = get_attr(gm, names[1], right)
    with gm.graph.inserting_after(other):
        rotated = call(gm, torch.ops.quark_fx.rotate.default, value, one, other, like=users[0])
    for user in users:
        user.replace_input_with(value, rotated)


__all__ = [
    *("RotationAnalysis", "RotationSite"),
    *("apply_rotation", "find_rotation_sites", "insert_rotation"),
]
