"""Find the values in a graph that a solver may choose, block by block; report the reasons for skipping others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.fx import GraphModule

from quark_fx.config.selection import NOT_SELECTED, Selective
from quark_fx.engine.block_walk import BlockRun
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import quantized_activations
from quark_fx.engine.quantized_weights import (
    QuantizedWeight,
    StoredBias,
    own_weights,
    quantized_weights,
    shared_tensors,
)
from quark_fx.graph.nodes import named_nodes
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.scales import FLOAT32
from quark_fx.solvers.places import ActivationPlace, BiasPlace, Place
from quark_fx.solvers.products import find_products
from quark_fx.solvers.proposals import Activation, Bias
from quark_fx.solvers.quantized_matrix import QuantizedMatrix

Find = Callable[[BlockRun], Iterator[Sequence[Place]]]
"""Function that yields the places of a block in order; operators with the same input are yielded together."""


def places_of(
    kind: type[QuantizedMatrix | Bias | Activation], gm: GraphModule, context: Context, chooser: Selective
) -> Find:
    """Return the function that finds the places for values of a kind.

    Args:
        kind: `QuantizedMatrix`, `Bias`, or `Activation`.
        gm: Quantized graph.
        context: Context of the run, which collects the reasons for skipping.
        chooser: Selection of operators.
    """
    return {QuantizedMatrix: _weights, Bias: _biases, Activation: _activations}[kind](gm, context, chooser)


def _weights(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    own = own_weights(gm, context, chooser)
    for weight in own(gm):
        if weight.linear.matrices is None:
            context.note(Change(weight.name, "skipped: unsupported weight layout", changed=False))

    def find(run: BlockRun) -> Iterator[Sequence[Place]]:
        for product in find_products(run, own(run.module)):
            yield product.parts

    return find


def own_biases(gm: GraphModule, context: Context, chooser: Selective) -> list[tuple[QuantizedWeight, StoredBias]]:
    """Return selected operators whose stored bias no other operator adds, with the bias; report the skipped ones."""
    shared, found = shared_tensors(gm), []
    for weight in quantized_weights(gm, context.plan):
        if not chooser.selects(weight.operator):
            context.note(Change(weight.name, NOT_SELECTED, changed=False))
        elif (bias := weight.bias) is None:
            context.note(Change(weight.name, "skipped: it does not have a stored bias", changed=False))
        elif bias.name in shared:
            context.note(Change(weight.name, "skipped: several operators add its bias", changed=False))
        else:
            found.append((weight, bias))
    return found


def _biases(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    nodes = {weight.node.name for weight, _ in own_biases(gm, context, chooser)}

    def find(run: BlockRun) -> Iterator[Sequence[Place]]:
        for weight in quantized_weights(run.module, context.plan):
            if weight.node.name in nodes and weight.bias is not None:
                yield (BiasPlace(run, weight, weight.bias),)

    return find


def _activations(gm: GraphModule, context: Context, chooser: Selective) -> Find:
    read = {weight.input_scale for weight in quantized_weights(gm, chooser.selected(context.plan))}
    free = {}
    for activation in quantized_activations(gm):
        name = activation.rounding.value
        if chooser.only and activation.scale_name not in read:
            context.note(Change(name, NOT_SELECTED, changed=False))
        elif activation.rounding.spec.scale != FLOAT32:
            context.note(Change(name, "skipped: its scale may not take any value (scale)", changed=False))
        else:
            free[activation.scale_name] = activation

    def find(run: BlockRun) -> Iterator[Sequence[Place]]:
        known = named_nodes(run.reference)
        for name in run.free_scales:
            if name not in free:
                continue
            if (value := free[name].rounding.value) in known:
                yield (ActivationPlace(run, free[name], gm, context),)
            elif context.ranks.index == 0:
                context.note(Change(value, "skipped: it is computed from values of several blocks", changed=False))

    return find


__all__ = ["Find", "own_biases", "places_of"]
