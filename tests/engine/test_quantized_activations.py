"""Activation scales, and the int32 biases that follow them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_resume import Branches
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch import nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.config.quant_config import TensorSpec
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import (
    QuantizedActivation,
    activation_scales,
    quantized_activations,
    scale_limits,
)
from quark_fx.graph.nodes import set_parameter
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.numbers.formats import INT32, UINT8
from quark_fx.numbers.qparams import QParams
from quark_fx.passes import AdaQuant
from quark_fx.plan.placement import Rounding
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, XINT8


@pytest.mark.parametrize("config", [INT8_STATIC, INT8_DYNAMIC, XINT8], ids=["static", "dynamic", "dpu"])
def test_every_static_scale_is_that_of_an_activation(config: qfx.QuantConfig) -> None:
    for model, data in ((cnn(), images(4, 4)), (mlp(), tokens(4, 4))):
        gm = quantize(model, config, data).graph_module
        assert [a.scale_name for a in quantized_activations(gm)] == activation_scales(gm)
        assert bool(activation_scales(gm)) == (config is not INT8_DYNAMIC)


def test_a_scale_at_which_a_bias_would_overflow_is_refused() -> None:
    """A hundredth below the least one; at it, codes reach 99 % of what int32 holds."""
    seen = []

    @graph_pass(exact=False, stage=Stage.QUANTIZED)
    def look(gm: GraphModule, context: Context) -> int:
        for activation in quantized_activations(gm):
            now = activation.qparams(gm)
            ((least, most),) = scale_limits(gm, context.plan, [activation.scale_name]).values()
            assert most == math.inf  # no clamp was dropped
            assert 0 < least < now.scale
            with pytest.raises(OverflowError, match="an int32 bias would overflow"):
                activation.tensors(gm, context.plan, replace(now, scale=torch.tensor(0.99 * least)))
            tensors = activation.tensors(gm, context.plan, replace(now, scale=torch.tensor(1.001 * least)))
            biases = [tensor for name, tensor in tensors.items() if name.endswith("bias_codes")]
            assert 0.98 * INT32.qmax < max(int(codes.abs().max()) for codes in biases) < INT32.qmax
            seen.append((activation.rounding.value, len(biases)))
        return 0

    quantize(seeded(Branches()), INT8_STATIC.replace(passes=(look,)), [rand(32, 8, seed=i) for i in range(3)])
    assert seen == [("x", 1), ("tanh", 2), ("tanh_1", 1)]


@pytest.mark.parametrize(
    ("zero_point", "low", "high"), [(0, 0.0, 6.0), (37, -1.0, 6.0), (128, -1.0, 1.0), (255, -3.0, 0.0)]
)
def test_the_largest_scale_is_where_saturation_stops_to_perform_a_clamp(
    zero_point: int, low: float, high: float
) -> None:
    gm = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    set_parameter(gm, "zero_point", torch.tensor(zero_point, dtype=torch.uint8))
    spec = TensorSpec(format=UINT8)
    most = QuantizedActivation(Rounding("x", spec, low, high), "scale", "zero_point").most(gm)
    for share, kept in ((0.1, True), (1.0, True), (1.00001, False), (2.0, False)):
        qparams = QParams(torch.tensor(share * most), torch.tensor(zero_point, dtype=torch.int32))
        assert qparams.saturates(low, high, spec.scheme) == kept


def test_learned_scales_keep_to_the_clamps_that_saturation_performs() -> None:
    """Without the limit, the scale becomes one that lets 6.01 through."""
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU6(), nn.Linear(8, 8)), 3)
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, AdaQuant(iterations=60, scale_rate=0.2)))
    gm = quantize(model, config, [8 * rand(32, 8, seed=i) for i in range(4)]).graph_module
    (found,) = (activation for activation in quantized_activations(gm) if activation.rounding.high == 6)
    assert found.qparams(gm).saturates(0, 6, found.rounding.spec.scheme)
