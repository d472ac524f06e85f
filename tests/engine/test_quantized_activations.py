"""Activation scales, and the int32 biases that follow them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_resume import Branches
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_activations import activation_scales, least_scales, quantized_activations
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.numbers.formats import INT32
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
            (least,) = least_scales(gm, context.plan, [activation.scale_name]).values()
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
