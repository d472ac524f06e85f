"""Models of a few hundred parameters, and the graph questions the tests ask about them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from seeded_models import Cnn, Mlp, Residual, cnn, images, mlp, rand, seeded, tokens
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import quark_fx as qfx
from quark_fx.graph.nodes import parameter, target_name
from quark_fx.graph.pass_manager import PassRecord
from quark_fx.numbers.grid import FreeScales, Grid
from quark_fx.numbers.layout import Layout
from quark_fx.presets import PRESETS

__all__ = [
    "WHOLE_PRESETS",
    "Cnn",
    "Mlp",
    "Residual",
    "all_but",
    "calls",
    "cnn",
    "constant",
    "divided",
    "free_grid",
    "images",
    "mlp",
    "quantize",
    "rand",
    "record_of",
    "seeded",
    "thinned",
    "tokens",
]

WHOLE_PRESETS = [name for name, config in PRESETS.items() if not config.exclude]
"""Presets that leave no operator in float; those for language models leave embedding and head."""


def all_but(names: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Return `names` as test parameters, and mark the members of `few` as `whole`."""
    return [pytest.param(name, marks=[pytest.mark.whole] * (name in few)) for name in names]


def thinned(rows: Iterable[Any], columns: Iterable[Any], kept: Callable[[Any, Any], bool]) -> list[Any]:
    """Return all pairs as test parameters, and mark those that are not `kept` as `whole`."""
    return [
        pytest.param(row, column, marks=[pytest.mark.whole] * (not kept(row, column)))
        for row in rows
        for column in columns
    ]


def divided(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the samples that are learned from, and the last eighth, which is validation data."""
    samples = torch.cat(list(batches))
    validation = max(1, len(samples) // 8)
    return samples[:-validation], samples[-validation:]


def record_of(qmodel: qfx.QuantizedModel, name: str) -> PassRecord:
    """Return what the last pass of that name did."""
    return [record for record in qmodel.report().passes if record.name == name][-1]


def free_grid(weight: Tensor, largest: float, limits: tuple[float, float], block: int = 4) -> Grid:
    """Return a grid with a free scale for each block of inputs, which maps its largest magnitude to a code."""
    scale = weight.reshape(len(weight), -1, block).abs().amax(-1) / largest
    spread = scale.repeat_interleave(block, 1)
    return Grid(spread, torch.zeros_like(spread), limits, FreeScales(scale, Layout.of(weight.shape, 1, block)))


def quantize(
    model: nn.Module | ExportedProgram | qfx.Session,
    config: Any,
    data: Iterable[Any] | None = None,
    **options: Any,
) -> qfx.QuantizedModel:
    """`qfx.quantize` without a progress bar; a pattern that selects nothing is the preset's business here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="pattern .* selects no operator")
        return qfx.quantize(model, config, data, progress=False, **options)


def calls(gm: GraphModule | qfx.QuantizedModel, name: str) -> list[Node]:
    """Return the calls whose qualified operator name starts with `name`, in graph order."""
    gm = gm.graph_module if isinstance(gm, qfx.QuantizedModel) else gm
    return [node for node in gm.graph.nodes if node.op == "call_function" and target_name(node).startswith(name)]


def constant(gm: GraphModule | qfx.QuantizedModel, node: Any) -> Tensor:
    """Return the tensor a `get_attr` node reads."""
    assert isinstance(node, Node)
    assert node.op == "get_attr", node.format_node()
    return parameter(gm.graph_module if isinstance(gm, qfx.QuantizedModel) else gm, node)
