"""Blocks of several output channels and inputs, as FP8 checkpoints have them: one scale each, whole or at an edge."""

from __future__ import annotations

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import QuantConfig, TensorSpec
from quark_fx.config.quant_config import Granularity
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.numbers.formats import FP8_E4M3, INT8, UINT4, Format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.observers import Mse
from quark_fx.passes import GPTQ, FitScales, TuneScales
from quark_fx.plan.weights import quantize_tensor, stored_bytes
from quark_fx.targets import ONNX, TORCH


def blocks(fmt: Format = FP8_E4M3, rows: int = 128, size: int = 128, **options: object) -> TensorSpec:
    return TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=size, group_rows=rows, **options)  # type: ignore[arg-type]


def by_hand(w: Tensor, spec: TensorSpec) -> Tensor:
    """Quantize each block as a tensor with one scale."""
    whole = TensorSpec(format=spec.format, observer=spec.observer, symmetry=spec.symmetry)
    result, (rows, size) = w.clone(), (spec.group_rows, spec.group_size or 1)
    for i in range(0, w.shape[0], rows):
        for j in range(0, w.shape[1], size):
            result[i : i + rows, j : j + size] = quantize_tensor(w[i : i + rows, j : j + size], whole).dequantize()
    return result


def test_each_block_has_the_scale_it_has_alone() -> None:
    w = rand(576, 300) * torch.exp(rand(576, 1) * 3)
    w[:128, :128] = 0  # a block of zeros
    tensor = quantize_tensor(w, spec := blocks())
    assert torch.equal(tensor.dequantize(), by_hand(w, spec))
    scale = tensor.scale
    assert scale.shape == (576, 3)
    assert scale[0, 0] == 1
    assert bool((scale[:128] == scale[0]).all())
    assert bool((scale[512:] == scale[575]).all())  # 64 rows at the edge
    assert len(scale.unique()) == 5 * 3
    assert stored_bytes(tensor, spec) == 576 * 300 + 4 * 5 * 3
    assert str(spec) == "fp8_e4m3 group 128x128"
    for other in (blocks(INT8, 5, 7), blocks(UINT4, 4, 32), blocks(INT8, 8, 16, observer=Mse())):
        part = w[100:140, :50]
        assert torch.equal(quantize_tensor(part, other).dequantize(), by_hand(part, other))


def test_nan_and_infinity_are_refused_as_elsewhere() -> None:
    for bad in (torch.nan, torch.inf):
        layer = seeded(nn.Linear(40, 30))
        model = nn.Sequential(layer).eval()
        with torch.no_grad():
            layer.weight[29, 39] = bad
        with pytest.raises(CalibrationError, match=r"not finite|NaN or infinity"):
            quantize(model, QuantConfig(weight=blocks(rows=16, size=16), target=TORCH), [rand(4, 40)])


@pytest.mark.parametrize("p", [GPTQ(), FitScales(), TuneScales(iterations=2)], ids=lambda p: type(p).__name__)
def test_solvers_keep_the_scales_of_blocks(p: object) -> None:
    model = seeded(nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 6)))
    data = [rand(32, 40) @ (rand(40, 40) * torch.logspace(-1, 1, 40)) for _ in range(2)]
    config = QuantConfig(weight=blocks(INT8, 16, 16), target=TORCH)
    plain, learned = (quantize(model, config.replace(passes=passes), data) for passes in ((), (p,)))
    for name, scale in plain.graph_module.named_buffers():
        if name.endswith("scale"):
            assert torch.equal(learned.graph_module.get_buffer(name), scale)
            assert len(scale.unique()) <= -(-len(scale) // 16) * scale.shape[1]


def test_training_learns_scales_of_channels_but_not_those_of_blocks() -> None:
    model = seeded(nn.Sequential(nn.Linear(40, 30)))
    channels = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
    for spec, learned in ((channels, True), (blocks(INT8, 16, 16), False)):
        qat = qfx.prepare_qat(quantize(model, QuantConfig(weight=spec, target=TORCH), [rand(4, 40)]), scales=True)
        assert any("scale" in name for name, _ in qat.named_parameters()) is learned


def test_a_convolution_and_a_stack_share_scales_of_output_channels() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(6, 10, 3), nn.ReLU(), nn.ConvTranspose2d(10, 6, 3)))
    qmodel = quantize(model, QuantConfig(weight=blocks(INT8, 4, 3), target=ONNX), [rand(2, 6, 8, 8)])
    first, last = (s for n, s in sorted(qmodel.graph_module.named_buffers()) if n.endswith("weight_scale"))
    assert first.shape == (10, 2, 3, 3)
    assert bool((first[:4] == first[0]).all()) and not torch.equal(first[3], first[4])  # noqa: PT018
    assert last.shape == (4, 6, 3, 3)  # of a transposed one outputs are dimension 1
    assert bool((last[:, :4] == last[:, :1]).all()) and not torch.equal(last[:, 3], last[:, 4])  # noqa: PT018


def test_a_scale_that_channels_share_is_counted_once() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Parameter(torch.empty(2, 32, 24)), nn.Parameter(torch.empty(2, 16, 24))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.up @ self.down.mT

    spec = blocks(INT8, 8, 16)
    qmodel = quantize(seeded(Experts()), QuantConfig(weight=spec, target=TORCH), [rand(2, 5, 32)])
    up, down = (row.bytes_after for row in qmodel.report().rows)
    assert up == 2 * 32 * 24 + 4 * 2 * 2 * 3
    assert down == 2 * 16 * 24 + 4 * 2 * 2 * 2
    assert stored_bytes(quantize_tensor(rand(40), spec), spec) == 40 + 4 * 3


def test_blocks_that_are_none_are_refused() -> None:
    for options, message in (
        ({"granularity": Granularity.CHANNEL}, "group_rows` is for weights"),
        ({"granularity": Granularity.GROUP, "group_size": 32, "dynamic": True}, "group_rows` is for weights"),
        ({"granularity": Granularity.GROUP, "group_size": 32, "symmetry": Symmetry.OFFSET}, "or offsets"),
    ):
        with pytest.raises(ConfigError, match=message):
            TensorSpec(format=UINT4, group_rows=8, **options)
