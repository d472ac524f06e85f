"""What conversion leaves in the graph: integer weights, integer biases, and activations in the right places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_devices
from tiny import WHOLE_PRESETS, calls, cnn, constant, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import Node

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import is_finite
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT32, UINT8, IntFormat, parse_format
from quark_fx.numbers.qparams import Symmetry
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, PRESETS, XINT8

INTEGER_PRESETS = [
    name for name in WHOLE_PRESETS if (weight := PRESETS[name].weight) and isinstance(weight.format, IntFormat)
]


def linear(out: int = 3, bias: bool = True, features: int = 4) -> nn.Linear:
    model = seeded(nn.Linear(features, out, bias=bias))
    assert isinstance(model, nn.Linear)
    return model


def weight_and_bias(qmodel: qfx.QuantizedModel, name: str) -> tuple[Node, Any]:
    (node,) = calls(qmodel, name)
    return node.args[1], node.args[2] if len(node.args) > 2 else None  # type: ignore[return-value]


def dequantized(qmodel: qfx.QuantizedModel, node: Any) -> Tensor:
    codes, scale, zero, *rest = node.args
    parts = [constant(qmodel, part) for part in (codes, scale, zero)]
    out: Tensor = torch.ops.quark_fx.dequantize(*parts, *rest)
    return out


@pytest.mark.parametrize("preset", INTEGER_PRESETS)
@pytest.mark.parametrize(("model", "data"), [(cnn(), images()), (mlp(), tokens())], ids=["cnn", "mlp"])
def test_weights_are_codes_in_the_graph_and_no_float_copy_is_left(
    preset: str, model: nn.Module, data: list[Tensor]
) -> None:
    qmodel = quantize(model, preset, data)
    for row in qmodel.report():
        assert not row.reason, row
    matrices = {str(n.target): constant(qmodel, n) for n in qmodel.graph_module.graph.nodes if n.op == "get_attr"}
    for name, value in matrices.items():
        # Scales of groups are matrices; every other matrix holds codes.
        assert value.dim() < 2 or not value.is_floating_point() or name.endswith("_scale"), name
    codes = {name.removesuffix("_codes"): v for name, v in matrices.items() if name.endswith("weight_codes")}
    assert codes.keys() == {n for n, p in model.named_parameters() if p.dim() > 1}
    expected = {str(row.weight).split()[0] for row in qmodel.report()}
    assert {str(v.dtype) for v in codes.values()} <= {str(parse_format(f).dtype) for f in expected}
    held = dict(qmodel.graph_module.named_parameters()) | dict(qmodel.graph_module.named_buffers())
    assert not {name for name in held if name in codes}, "the float weights are still held"


@on_devices
@pytest.mark.parametrize("axis", ["tensor", "channel"])
def test_an_int32_bias_has_the_scale_of_the_products_it_is_added_to(axis: str, device: torch.device) -> None:
    model, x = linear().to(device), rand(16, 4).to(device)
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT8, granularity=Granularity(axis)))
    qmodel = quantize(model, config, [x])
    (node,) = calls(qmodel, "aten.linear")
    activation, weight, bias = node.args
    scales = [constant(qmodel, part.args[1]) for part in (activation, weight, bias)]  # type: ignore[union-attr]
    torch.testing.assert_close(scales[2], scales[0] * scales[1], rtol=2**-23, atol=0)
    assert constant(qmodel, bias.args[0]).dtype == torch.int32  # type: ignore[union-attr]
    assert not constant(qmodel, bias.args[2]).any()  # type: ignore[union-attr]
    # Half a step of the bias, and the float32 rounding of the product `code * scale`.
    error = (dequantized(qmodel, bias) - model.bias).abs()
    assert bool((error <= scales[2] / 2 + model.bias.abs() * 2**-22).all())


@on_devices
@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_channel_of_tiny_weights_with_a_large_bias_does_not_overflow_the_int32_bias(
    granularity: str, device: torch.device
) -> None:
    """At its own scale the bias would need `1e3 / (s_x * 1e-12)` codes; the weight's scale has to give way."""
    model = linear().to(device)
    with torch.no_grad():
        model.weight.mul_(1e-12) if granularity == "tensor" else model.weight[1].mul_(1e-12)
        model.bias.copy_(torch.tensor([1.0, 1e3, -1e3]))
    x = rand(16, 4).to(device)
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT8, granularity=Granularity(granularity)))
    qmodel = quantize(model, config, [x])
    _, bias = weight_and_bias(qmodel, "aten.linear")
    codes = constant(qmodel, bias.args[0])
    assert int(codes.abs().max()) < INT32.qmax
    step = constant(qmodel, bias.args[1])
    assert bool(((dequantized(qmodel, bias) - model.bias).abs() <= step / 2 + model.bias.abs() * 2**-22).all())
    # The tiny channel is its bias, exactly; the others keep the precision of their own scale.
    with torch.no_grad():
        error = (qmodel(x) - model(x)).abs().amax(0)
    assert error[1] <= 1e3 * 1e-5
    if granularity == "channel":
        assert error[0] <= 0.1


ZEROED: dict[str, Callable[[], nn.Conv2d | nn.Linear]] = {
    "conv": lambda: nn.Conv2d(3, 4, 3),
    "depthwise": lambda: nn.Conv2d(3, 3, 3, groups=3),
    "linear": lambda: nn.Linear(6, 4),
}


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
@pytest.mark.parametrize("size", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("kind", ZEROED)
def test_a_channel_of_zeros_keeps_its_bias(kind: str, size: float, granularity: str, tmp_path: Path) -> None:
    """The int32 bias is a multiple of input scale times weight scale, and zeros have any weight scale."""
    model = seeded(ZEROED[kind]())
    with torch.no_grad():
        model.weight.mul_(0.02 * (granularity == "channel"))
        model.weight[0] = 0
        model.bias = nn.Parameter(torch.linspace(0.1, 0.3, len(model.weight)))
    # Of a positive input the uint8 codes have no room for others; of zeros alone its scale says nothing.
    data = [rand(*((4, 3, 8, 8) if kind != "linear" else (4, 6)), seed=i).abs() * size for i in range(2)]
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT8, granularity=Granularity(granularity)))
    qmodel = quantize(model, config, data)
    with torch.no_grad():
        got, real = qmodel(data[0])[:, 0], model(data[0])[:, 0]
        step = (model(torch.cat(data)).amax() - min(0, model(torch.cat(data)).amin())) / 255
    assert float((got - real).abs().max()) <= 0.51 * float(step)
    _, bias = weight_and_bias(qmodel, "aten.linear" if kind == "linear" else "aten.conv2d")
    assert constant(qmodel, bias.args[0]).dtype == torch.int32
    assert int(constant(qmodel, bias.args[0]).abs().max()) < INT32.qmax // 2
    qfx.export.onnx(qmodel, tmp_path / "zeros.onnx")
    assert qfx.verify(qmodel, tmp_path / "zeros.onnx", data, optimize=False).max_steps <= 1e-3


def test_operators_that_share_a_channel_of_zeros_keep_both_biases() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        second.weight = first.weight
        first.weight[2] = 0
        first.bias.fill_(1e-3)
        second.bias.fill_(10.0)
    qmodel = quantize(nn.Sequential(first, second).eval(), INT8_STATIC, [rand(8, 4)])
    for call, wanted in zip(calls(qmodel, "aten.linear"), (1e-3, 10.0), strict=True):
        torch.testing.assert_close(dequantized(qmodel, call.args[2])[2], torch.tensor(wanted), rtol=1e-5, atol=0)


@pytest.mark.parametrize("preset", INTEGER_PRESETS)
def test_a_channel_of_zeros_stays_zero(preset: str) -> None:
    model = linear(bias=False, features=32)
    with torch.no_grad():
        model.weight[1] = 0
    qmodel = quantize(model, preset, [rand(8, 32)])
    out = qmodel(rand(5, 32, seed=3))
    assert out.isfinite().all()
    assert not out[:, 1].any()


@pytest.mark.parametrize("preset", list(PRESETS))
@pytest.mark.parametrize("value", [0.0, 2.5, -3.0])
def test_a_constant_activation_is_represented(preset: str, value: float) -> None:
    """A range of a single point, widened to zero, has its ends on codes."""
    model = nn.Linear(4, 3, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4)[:3])
    x = torch.full((6, 4), value)
    out = quantize(model, preset, [x])(x)
    config = PRESETS[preset]
    fmt = config.input.format if config.input is not None else config.weight.format  # type: ignore[union-attr]
    steps = (fmt.qmax - fmt.qmin) / 2 if isinstance(fmt, IntFormat) else 2 ** (fmt.mantissa + 1)
    # An end of the range is off by half a step at most; a power-of-two step is up to twice as long.
    torch.testing.assert_close(out, torch.full((6, 3), value), rtol=1.01 / min(steps, 100), atol=0)


@pytest.mark.parametrize("preset", WHOLE_PRESETS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_weight_that_is_not_finite_is_named(preset: str, bad: float) -> None:
    model = nn.Sequential(linear(4), nn.ReLU(), linear(3)).eval()
    with torch.no_grad():
        model.get_parameter("2.weight")[1, 1] = bad
    with pytest.raises(qfx.CalibrationError, match=r"weight '2\.weight' of aten.linear"):
        quantize(model, preset, [rand(8, 4)])


@pytest.mark.parametrize("preset", ["int8_static", "xint8", "fp16", "int8_weight_only"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bias_that_is_not_finite_is_named(preset: str, bad: float) -> None:
    model = linear()
    with torch.no_grad():
        model.bias[1] = bad
    with pytest.raises(qfx.CalibrationError, match=r"bias 'bias' of aten.linear"):
        quantize(model, preset, [rand(8, 4)])


@pytest.mark.parametrize("preset", ["mxfp4", "bfp16", "fp8_dynamic", "w4a16_rtn"])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_weight_or_a_bias_in_float_that_is_not_finite_is_named(preset: str, bad: float) -> None:
    config = PRESETS[preset].replace(exclude=("2",))
    for name in ("weight", "bias"):
        model = nn.Sequential(linear(32, features=32), nn.ReLU(), linear(3, features=32)).eval()
        with torch.no_grad():
            model.get_parameter(f"2.{name}").view(-1)[1] = bad
        with pytest.raises(qfx.CalibrationError, match=rf"{name} '2\.{name}' of aten.linear.* fix the model's"):
            quantize(model, config, [rand(8, 32)])


def test_every_parameter_of_a_recurrent_layer_is_looked_at() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.linear = nn.LSTM(4, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(self.lstm(x)[0])
            return out

    model = seeded(Model())
    with torch.no_grad():
        model.get_parameter("lstm.bias_hh_l0")[3] = torch.nan
    with pytest.raises(qfx.CalibrationError, match=r"bias 'lstm\.bias_hh_l0' of aten.lstm"):
        quantize(model, "int8_weight_only", [rand(5, 2, 4)])


def test_a_mask_may_hold_infinities() -> None:
    class Model(nn.Module):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))

        def forward(self, x: Tensor, row: Tensor) -> Tensor:
            masked: Tensor = self.linear(x) + self.mask[row]
            return masked.softmax(-1)

    model, (x, row) = seeded(Model()), (rand(2, 4), torch.tensor([0, 3]))
    assert quantize(model, "int8_weight_only", [(x, row)])(x, row).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_a_tensor_is_searched_to_its_end(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_fx.graph.nodes._PIECE", 8)
    assert is_finite(torch.empty(0, 3, dtype=dtype))
    for bad in (torch.nan, torch.inf, -torch.inf):
        for shape in ((), (40,), (10, 4), (2, 20)):
            x = torch.ones(shape)
            assert is_finite(x.to(dtype))
            x.view(-1)[-1] = bad
            assert not is_finite(x.to(dtype))
            assert not is_finite(x.to(dtype).movedim(0, -1) if shape else x.to(dtype))


class Biased(nn.Module):
    """A linear over matrices, one over sequences, and a transposed convolution: only the first takes an int32 bias."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence, self.matrix = nn.Linear(4, 4), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.transposed = nn.ConvTranspose1d(4, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.sequence(x)
        return self.matrix(y.mean(1)), self.transposed(self.conv(y.transpose(1, 2)))


def test_biases_are_integers_only_where_a_kernel_takes_them() -> None:
    qmodel = quantize(seeded(Biased()), "int8_static", [rand(6, 5, 4)])
    kinds = {}
    for node in (*calls(qmodel, "aten.linear"), *calls(qmodel, "aten.conv")):
        bias = node.args[2]
        assert isinstance(bias, Node)
        kinds[str(bias.target) if bias.op == "get_attr" else str(bias.args[0]).removesuffix("_codes")] = bias.op
    assert kinds == {
        "sequence.bias": "get_attr",
        "matrix_bias": "call_function",
        "conv_bias": "call_function",
        "transposed.bias": "get_attr",
    }


@pytest.mark.parametrize("preset", ["int8_dynamic", "int8_weight_only", "int4_weight_only", "fp8_static", "fp16"])
def test_biases_stay_in_float_without_static_integer_inputs(preset: str) -> None:
    _, bias = weight_and_bias(quantize(linear(), preset, [rand(8, 4)]), "aten.linear")
    assert bias.op == "get_attr"


def test_a_bias_of_its_own_format_has_its_own_range() -> None:
    config = INT8_STATIC.replace(bias=TensorSpec(format=INT8))
    model = linear()
    qmodel = quantize(model, config, [rand(8, 4)])
    _, bias = weight_and_bias(qmodel, "aten.linear")
    scale = constant(qmodel, bias.args[1])
    torch.testing.assert_close(scale, model.bias.abs().max().detach() / 127)
    assert constant(qmodel, bias.args[0]).dtype == torch.int8


@on_devices
def test_dynamic_activations_are_measured_at_run_time(device: torch.device) -> None:
    model = linear(features=8).to(device)
    qmodel = quantize(model, INT8_DYNAMIC, [rand(4, 8).to(device)])
    assert len(calls(qmodel, "quark_fx.dynamic_qparams")) == 1
    for factor in (1e-3, 1.0, 1e3):
        x = rand(6, 8, seed=9).to(device) * factor
        span = float(x.max() - x.min())
        with torch.no_grad():
            error = (qmodel(x) - model(x)).abs().max()
        # Half an input step times the row's 1-norm, plus half a weight step times the input's.
        bound = (
            0.5 * span / 255 * model.weight.abs().sum(1).max()
            + 0.5 * model.weight.abs().max() / 127 * 8 * x.abs().max()
        )
        assert error <= bound


@on_devices
def test_per_token_scales_keep_a_small_token_beside_a_large_one(device: torch.device) -> None:
    spec = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
    config = INT8_DYNAMIC.replace(input=spec)
    model = linear(features=8, bias=False).to(device)
    x = rand(2, 3, 8).to(device)
    x[0, 1] *= 1e-4
    token, tensor = (quantize(model, c, [x])(x) for c in (config, INT8_DYNAMIC))
    with torch.no_grad():
        expected = model(x)
    small = (0, 1)
    assert (token[small] - expected[small]).abs().max() < 0.05 * expected[small].abs().max()
    assert (tensor[small] - expected[small]).abs().max() > 0.2 * expected[small].abs().max()
    torch.testing.assert_close(token[1:], quantize(model, config, [x])(x[1:]), rtol=0, atol=0)  # rows are independent


@pytest.mark.parametrize(("preset", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@on_devices
def test_a_cast_preset_rounds_weights_and_inputs_to_16_bits(
    preset: str, dtype: torch.dtype, device: torch.device
) -> None:
    model, x = linear().to(device), rand(6, 4).to(device)
    qmodel = quantize(model, preset, [x])
    (node,) = calls(qmodel, "aten.linear")
    stored = constant(qmodel, node.args[1].args[0])  # type: ignore[union-attr]
    assert stored.dtype == dtype
    expected = nn.functional.linear(x.to(dtype).float(), model.weight.to(dtype).float(), model.bias)
    torch.testing.assert_close(qmodel(x), expected.detach(), rtol=0, atol=0)


@on_devices
def test_every_scale_of_xint8_is_a_power_of_two(device: torch.device) -> None:
    qmodel = quantize(cnn().to(device), "xint8", [x.to(device) for x in images()])
    scales = [
        constant(qmodel, n)
        for n in qmodel.graph_module.graph.nodes
        if n.op == "get_attr" and str(n.target).endswith("scale")
    ]
    assert len(scales) >= 8
    for scale in scales:
        assert bool((torch.frexp(scale)[0] == 0.5).all())


@on_devices
@pytest.mark.parametrize("features", [64, 70, 33, 31, 5])
def test_groups_of_int4_weights_have_their_own_scales_down_to_a_ragged_tail(
    features: int, device: torch.device
) -> None:
    model = linear(bias=False, features=features).to(device)
    with torch.no_grad():
        model.weight[:, 32:64] *= 100
    qmodel = quantize(model, INT4_WEIGHT_ONLY, [rand(4, features).to(device)])
    weight, _ = weight_and_bias(qmodel, "aten.linear")
    codes, scale, got = constant(qmodel, weight.args[0]), constant(qmodel, weight.args[1]), dequantized(qmodel, weight)
    groups = torch.split(model.weight.detach(), 32, 1)
    expected = torch.stack([g.abs().amax(1) / 7 for g in groups], 1)
    torch.testing.assert_close(scale, expected)
    assert codes.abs().max() <= 7
    for group, real, step in zip(groups, torch.split(got, 32, 1), scale.unbind(1), strict=True):
        assert bool(((group - real).abs() <= step[:, None] * 0.5 * (1 + 1e-6)).all())


@on_devices
@pytest.mark.parametrize("kind", ["conv", "depthwise", "transposed", "transposed_groups", "linear", "addmm", "matmul"])
def test_each_output_channel_has_its_own_scale(kind: str, device: torch.device) -> None:
    """Scaling one output channel by 1000 must leave the codes of every other one alone."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(4, 6)), nn.Parameter(torch.empty(6))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight if kind == "matmul" else torch.addmm(self.bias, x, self.weight)

    model: nn.Module = {
        "conv": lambda: nn.Conv2d(4, 6, 3),
        "depthwise": lambda: nn.Conv2d(4, 8, 3, groups=4),
        "transposed": lambda: nn.ConvTranspose2d(4, 6, 3),
        "transposed_groups": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
        "linear": lambda: nn.Linear(4, 6),
        "addmm": Product,
        "matmul": Product,
    }[kind]()
    model = seeded(model).to(device)
    axis = 0 if kind in ("conv", "depthwise", "linear") else 1
    assert isinstance(model.weight, nn.Parameter)
    before = _codes(model, kind, device)
    with torch.no_grad():
        model.weight.select(axis, 1).mul_(1024)
    after = _codes(model, kind, device)
    assert torch.equal(before, after)


@pytest.mark.parametrize("symmetry", [Symmetry.SYMMETRIC, Symmetry.ASYMMETRIC])
@pytest.mark.parametrize(("inputs", "outputs", "groups"), [(6, 6, 6), (6, 12, 6), (8, 12, 4), (8, 4, 4)])
@pytest.mark.parametrize("rank", [1, 2])
def test_channels_of_a_grouped_transposed_convolution_have_scales_of_their_own(
    inputs: int, outputs: int, groups: int, rank: int, symmetry: Symmetry, tmp_path: Path
) -> None:
    """Its weight counts the channels of one group; those of others are others. Against each channel by itself."""
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d)[rank - 1]
    model = seeded(kind(inputs, outputs, 3, groups=groups))
    with torch.no_grad():
        model.weight.mul_(
            torch.logspace(0, -3, groups).repeat_interleave(inputs // groups).reshape(-1, *[1] * (rank + 1))
        )
    spec = TensorSpec(format=INT8, granularity=Granularity.CHANNEL, symmetry=symmetry)
    x = rand(2, inputs, *[5] * rank)
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(weight=spec), [x])
    (call,) = calls(qmodel, "aten.conv_transpose")
    got = dequantized(qmodel, call.args[1]).unflatten(0, (groups, -1))
    real = model.weight.detach().unflatten(0, (groups, -1))
    for group in range(groups):
        for channel in range(outputs // groups):
            alone = real[group, :, channel]
            expected = quantize_tensor(alone, spec.replace(granularity=Granularity.TENSOR)).dequantize()
            assert torch.equal(got[group, :, channel], expected)
    qfx.export.onnx(qmodel, tmp_path / "transposed.onnx")
    (difference,) = qfx.verify(qmodel, tmp_path / "transposed.onnx", [x]).differences
    assert difference.max_abs <= 1e-6 * float(qmodel(x).abs().max())


def _codes(model: nn.Module, kind: str, device: torch.device) -> Tensor:
    x = rand(5, 4, 6, 6).to(device) if "conv" in kind or kind[0] in "dt" else rand(5, 4).to(device)
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [x])
    names = [
        n for n in qmodel.graph_module.graph.nodes if n.op == "get_attr" and str(n.target).endswith("weight_codes")
    ]
    assert len(names) == 1
    return constant(qmodel, names[0])


def test_the_outputs_are_close_to_the_float_models() -> None:
    """The nearest thing to a sum of all of the above: 8 bits keep 20 dB on every model, 4 bits 8 dB."""
    for model, data in ((cnn(), images()), (mlp(), tokens())):
        for preset in WHOLE_PRESETS:
            with torch.no_grad():
                expected = model(data[0])
            noise = (quantize(model, preset, data)(data[0]) - expected).square().sum()
            decibels = float((10 * torch.log10(expected.square().sum() / noise)).detach())
            assert decibels > (8 if preset.startswith("int4") else 20), preset


def test_a_quantized_model_is_called_like_the_original() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
            return {"y": self.linear(x) * mask}

    x, mask = rand(6, 4), rand(6, 1, seed=5)
    qmodel = quantize(seeded(Model()), "int8_static", [{"x": x, "mask": mask}])
    expected = qmodel(x, mask)["y"]
    for got in (
        qmodel(x, mask=mask),
        qmodel(mask=mask, x=x),
        qmodel.run_batch((x, mask)),
        qmodel.run_batch([x, mask]),
        qmodel.run_batch({"mask": mask, "x": x}),
    ):
        torch.testing.assert_close(got["y"], expected, rtol=0, atol=0)


def test_a_quantized_model_stays_in_eval_mode() -> None:
    qmodel = quantize(linear(), "int8_static", [rand(4, 4)])
    assert not qmodel.training
    assert qmodel.eval() is qmodel
    with pytest.raises(RuntimeError, match=r"to train it, call quark_fx\.prepare_qat"):
        qmodel.train()


@pytest.mark.parametrize(
    "config",
    ["int8_static", "INT8_STATIC", INT8_STATIC, INT8_STATIC.to_dict()],
    ids=["lower case", "upper case", "value", "data"],
)
def test_a_configuration_may_be_a_name_a_value_or_plain_data(config: Any) -> None:
    assert quantize(linear(), config, [rand(4, 4)]).config == INT8_STATIC


def test_an_exported_program_needs_no_data_for_a_configuration_without_ranges() -> None:
    model, x = linear(), rand(4, 4)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(
        quantize(program, "int8_weight_only", None)(x),
        quantize(model, "int8_weight_only", [x])(x),
    )


def test_unsigned_weights_have_zero_points() -> None:
    model, x = linear(bias=False), rand(8, 4)
    with torch.no_grad():
        model.weight.abs_().add_(1)
    config = QuantConfig(
        weight=TensorSpec(format=UINT8, granularity=Granularity.CHANNEL), input=TensorSpec(format=UINT8)
    )
    qmodel = quantize(model, config, [x])
    weight, _ = weight_and_bias(qmodel, "aten.linear")
    step = constant(qmodel, weight.args[1])[:, None]
    assert bool(((dequantized(qmodel, weight) - model.weight).abs() <= step * 0.5 * (1 + 1e-5)).all())
    assert int(constant(qmodel, weight.args[0]).min()) > 100  # zero is in range, and far below every weight


def test_a_model_in_half_precision_is_quantized_in_its_own_dtype() -> None:
    model, x = linear().half(), rand(8, 4).half()
    for preset in ("int8_static", "int8_dynamic", "int4_weight_only", "fp8_static"):
        out = quantize(model, preset, [x])(x)
        assert out.dtype == torch.float16
        with torch.no_grad():
            torch.testing.assert_close(out, model(x), rtol=0, atol=0.3 if "int4" in preset else 0.15)


def test_the_embedding_is_looked_up_in_codes() -> None:
    qmodel = quantize(mlp(), "int8_static", tokens())
    node = calls(qmodel, "aten.embedding")[0]
    assert constant(qmodel, node.args[0]).dtype == torch.int8


@pytest.mark.parametrize("spec", [TensorSpec(format=INT4), TensorSpec(format=FP8_E4M3), TensorSpec(format=INT8)])
@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_an_embedding_gives_the_rows_of_its_dequantized_table(spec: TensorSpec, granularity: str) -> None:
    model = seeded(nn.Embedding(7, 10))
    spec = spec.replace(granularity=Granularity(granularity), group_size=4 if granularity == "group" else None)
    qmodel = quantize(model, QuantConfig(weight=spec), [torch.arange(6).reshape(2, 3)])
    ids = torch.tensor([[0, 6, 3], [1, 1, 5]])
    got = qmodel(ids)
    from quark_fx.plan.weights import quantize_tensor

    assert isinstance(model.weight, Tensor)
    expected = quantize_tensor(model.weight.detach(), spec).dequantize()[ids]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_xint8_biases_are_int8_with_a_power_of_two_scale() -> None:
    qmodel = quantize(linear(), XINT8, [rand(8, 4)])
    _, bias = weight_and_bias(qmodel, "aten.linear")
    assert constant(qmodel, bias.args[0]).dtype == torch.int8
    assert float(torch.frexp(constant(qmodel, bias.args[1]))[0]) == 0.5


@pytest.mark.parametrize("largest", [-1.0, 1.0])
def test_an_integer_bias_follows_a_negative_scale(largest: float) -> None:
    """Where the largest weight of a channel is positive, a sign-aware scale is negative."""
    model = linear(out=6, features=8)
    with torch.no_grad():
        model.weight.copy_(model.weight.abs() * largest)
    spec = TensorSpec(format=INT8, granularity=Granularity.CHANNEL, symmetry=Symmetry.SIGN_AWARE)
    data = [rand(64, 8)]
    qmodel = quantize(model, INT8_STATIC.replace(weight=spec), data)
    weight, bias = weight_and_bias(qmodel, "aten.linear.default")
    assert bias.args[3] == str(INT32)
    assert bool((constant(qmodel, weight.args[1]).sign() == -largest).all())
    expected = model(data[0])
    assert float((qmodel(data[0]) - expected).norm() / expected.norm()) < 0.02
