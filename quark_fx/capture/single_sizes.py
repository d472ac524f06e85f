"""Comparison of a graph with its model where torch's symbol for a size may behave differently from the number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from quark_fx.capture.capture_errors import require_runs, returns_the_same
from quark_fx.capture.guards import sizes_of
from quark_fx.capture.model_state import untouched
from quark_fx.capture.normalization import Captured
from quark_fx.errors import CaptureError
from quark_fx.graph.nodes import placeholders
from quark_fx.graph.size_condition import SizeCondition

_FORBIDS_ONE = re.compile(r"(\w+)\.shape\[(\d+)\] != 1")


def with_confirmed_ones(captured: Captured, model: nn.Module, leaves: list[Any], kwargs: Mapping[str, Any]) -> Captured:
    """Drop the conditions that forbid a size of 1 if the graph returns the same as the model for that size.

    Args:
        captured: Captured model.
        model: Model, which does not change.
        leaves: Flat inputs of the example.
        kwargs: Keyword arguments of the example, which may include more than the inputs.
    """
    signature = captured.signature
    ones = [c for c in signature.input_conditions if _FORBIDS_ONE.fullmatch(c.text)]
    if not ones:
        return captured

    equal = {c for c in ones if _agrees(captured, model, _cut_to_one(captured, leaves, c), kwargs)}
    kept = tuple(c for c in signature.input_conditions if c not in equal)
    return replace(captured, signature=replace(signature, input_conditions=kept))


def misread_text(captured: Captured, model: nn.Module, leaves: list[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the file and line where a model's code converts a size to text; empty if this does not change results.

    During capture the text is torch's symbol, such as `s27`, so code that looks up a layer by `str(size)` misses it.
    The graph is compared with the model on the example.

    Args:
        captured: Captured model.
        model: Model, which does not change.
        leaves: Flat inputs of the example.
        kwargs: Keyword arguments of the example, which may include more than the inputs.
    """
    sizes = (size for node in placeholders(captured.module) for size in sizes_of(node))
    env = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    place: str = getattr(env, "size_as_text", "")
    return "" if not place or _agrees(captured, model, leaves, kwargs) else place


def _agrees(captured: Captured, model: nn.Module, leaves: list[Any], kwargs: Mapping[str, Any]) -> bool:
    positional, keywords = pytree.tree_unflatten(leaves, captured.signature.in_spec)
    try:
        with untouched(model) as state:
            expected = require_runs(model, positional, {**kwargs, **keywords}, state)
        with torch.no_grad():
            return expected is not None and returns_the_same(model, expected, [*captured.module(*leaves)])
    except (CaptureError, RuntimeError, NotImplementedError):  # also tensors without data
        return False


def _cut_to_one(captured: Captured, leaves: list[Any], condition: SizeCondition) -> list[Any]:
    """Cut the inputs to size 1 along the dimension of a condition, and along dimensions with the same symbol."""
    match = _FORBIDS_ONE.fullmatch(condition.text)
    assert match is not None
    shapes = {str(node.target): sizes_of(node) for node in placeholders(captured.module)}
    symbol = shapes[match[1]][int(match[2])].node.expr

    def cut(leaf: Any, shape: list[Any]) -> Any:
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr == symbol:
                leaf = leaf.narrow(dim, 0, 1)
        return leaf

    return [cut(leaf, shape) for leaf, shape in zip(leaves, shapes.values(), strict=True)]


__all__ = ["misread_text", "with_confirmed_ones"]
