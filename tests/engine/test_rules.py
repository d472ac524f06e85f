"""Tests of `graph_rule`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

import quark_fx as qfx
from quark_fx.engine.rules import graph_rule
from quark_fx.errors import ConfigError, Declined
from quark_fx.graph.nodes import call, get_attr, parameter, target_name


@pytest.mark.parametrize("target", [torch.ops.aten.silu.default, torch.nn.functional.silu, 3])
def test_targets_are_names(target: Any) -> None:
    with pytest.raises(ConfigError, match="takes the names of operators, not"):
        graph_rule(target)


def test_a_decorator_without_parentheses_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write @graph_rule\('aten.silu.default'\)"):

        @graph_rule  # type: ignore[arg-type]
        def rule(gm: GraphModule, node: Node) -> Node:
            return node


def test_each_call_has_its_row() -> None:
    """The second of two calls is declined; replaced nodes are gone, and the report says why the other stays."""

    @graph_rule("aten.silu.default", exact=False)
    def first_silu_to_tanh(gm: GraphModule, node: Node) -> Node:
        if "silu_1" in node.name:
            raise Declined("it is the second")
        return call(gm, torch.ops.aten.tanh.default, node.args[0], like=node)

    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2)).eval()
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    config = qfx.presets.INT8_STATIC.replace(passes=(first_silu_to_tanh,))
    qmodel = qfx.quantize(model, config, [batch], progress=False)
    names = [str(node.target) for node in qmodel.graph_module.graph.nodes]
    assert names.count("aten.tanh.default") == 1
    assert names.count("aten.silu.default") == 1
    (record,) = (r for r in qmodel.report().passes if r.name == "first_silu_to_tanh")
    assert record.rewrites == 1
    assert [(c.name, c.what, c.changed) for c in record.changes] == [
        ("1", "aten.silu.default → aten.tanh.default", True),
        ("3", "skipped: it is the second", False),
    ]


def test_operators_that_a_pass_no_longer_needs_are_gone() -> None:
    """The rule merges two layers; the first one, which nothing reads any more, is neither quantized nor reported."""

    @graph_rule("aten.linear.default", exact=False)
    def merge_linears(gm: GraphModule, node: Node) -> Node | None:
        first = node.args[0]
        if not isinstance(first, Node) or target_name(first) != "aten.linear.default":
            return None
        (_, second_weight), (_, first_weight) = (one.all_input_nodes for one in (node, first))
        with gm.graph.inserting_before(node):
            weight = get_attr(gm, "merged", parameter(gm, second_weight) @ parameter(gm, first_weight))
        with gm.graph.inserting_after(weight):
            return call(gm, torch.ops.aten.linear.default, first.args[0], weight, like=node)

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 2)).eval()
    batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    preset = qfx.presets.INT8_STATIC
    for passes in ((merge_linears, *preset.passes), (*preset.passes, merge_linears)):
        qmodel = qfx.quantize(model, preset.replace(passes=passes), [batch], progress=False)
        assert [row.name for row in qmodel.report()] == ["1", "3"]
        assert "0.weight" not in qmodel.state_dict()
