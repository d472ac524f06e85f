"""Choose and apply a tensor for each site of a float graph, one after another; resume an interrupted run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from quark_fx.engine.context import Context
from quark_fx.graph.pass_manager import Change

S = TypeVar("S")

Chosen = tuple[int, Tensor | None, Change]
"""Number of a site, the chosen tensor (`None` to leave the site alone), and the change to report."""


def choose_in_turn(
    sites: Sequence[S],
    context: Context,
    choose: Callable[[Mapping[int, S]], Iterable[Chosen]],
    apply: Callable[[S, Tensor], None],
) -> int:
    """Choose a tensor for each site; return the number of sites that changed.

    Choices in the checkpoint of an interrupted run are applied first.

    Args:
        sites: Sites of a graph.
        context: Context of the run.
        choose: Function that is called with the remaining sites, by number, before the graph changes; it yields choices
            in an order that is the same in every run.
        apply: Function that changes the graph at a site.
    """
    numbered, walk = dict(enumerate(sites)), context.next_walk()
    choices = list(_known(walk, context))
    pending = {number: site for number, site in numbered.items() if number not in {n for n, _, _ in choices}}
    changed = 0
    for index, (number, tensor, change) in enumerate(itertools.chain(choices, choose(pending) if pending else ())):
        if tensor is not None:
            apply(numbered[number], tensor)
        changed += change.changed
        context.note(change)
        if index >= len(choices):
            learned = {str(number): torch.empty(0, dtype=torch.float32) if tensor is None else tensor}
            context.keep_block(walk, index, learned, [change])
    return changed


def _known(walk: int, context: Context) -> Iterator[Chosen]:
    """Yield the choices of an interrupted run, in their order."""
    if context.checkpoint is not None:
        for index in itertools.count():
            if (stored := context.checkpoint.load(walk, index)) is None:
                return
            ((number, tensor),), (change,) = stored[0].items(), stored[1]
            yield int(number), tensor if tensor.numel() else None, change


__all__ = ["Chosen", "choose_in_turn"]
