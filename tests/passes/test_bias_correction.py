"""Correction takes the mean of an error out of the biases, and nothing that unseen data would miss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import trained
from tiny import calls, cnn, constant, divided, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import Change
from quark_fx.numbers.formats import INT4
from quark_fx.passes import BiasCorrection
from quark_fx.passes.bias_correction import Means, _clamped_mean
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY

W4 = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
WEIGHT_ONLY, STATIC = INT8_WEIGHT_ONLY.replace(weight=W4), INT8_STATIC.replace(weight=W4)
EMPIRICAL, ANALYTIC = BiasCorrection(), BiasCorrection(means=Means.ANALYTIC)


def corrected(model: nn.Module, config: QuantConfig, data: Any, how: BiasCorrection = EMPIRICAL) -> qfx.QuantizedModel:
    return quantize(model, config.replace(passes=(*config.passes, how)), data)


def changes(qmodel: qfx.QuantizedModel) -> list[Change]:
    return list(qmodel.report().passes[-1].changes)


def outputs(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(batch)
    return out


def mean_error(model: nn.Module, qmodel: nn.Module, batches: list[Tensor], dim: int) -> Tensor:
    """Return the mean of float minus quantized outputs per channel, in float64."""
    error = torch.cat(
        [(outputs(model, x).double() - outputs(qmodel, x).double()).movedim(dim, 0).flatten(1) for x in batches], 1
    )
    return error.mean(1)


def bias_of(qmodel: qfx.QuantizedModel, index: int = 0) -> Tensor:
    """Return the bias that a weighted operator adds, in float64."""
    node = [n for n in qmodel.graph_module.graph.nodes if str(n.target).startswith(("aten.conv", "aten.linear"))][index]
    bias: Any = node.args[2]
    if bias.op == "get_attr":
        return constant(qmodel, bias).double()
    codes, scale, point = (constant(qmodel, arg).double() for arg in bias.args[:3])
    return (codes - point) * scale


# On data.

SHIFTED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], int]] = {
    "linear": (lambda: nn.Linear(16, 8), lambda seed: rand(32, 16, seed=seed) + 3, -1),
    "linear over tokens": (lambda: nn.Linear(16, 8), lambda seed: rand(8, 5, 16, seed=seed) + 3, -1),
    "signals": (lambda: nn.Conv1d(3, 4, 3), lambda seed: rand(8, 3, 20, seed=seed) + 3, 1),
    "images": (lambda: nn.Conv2d(3, 4, 3), lambda seed: rand(8, 3, 8, 8, seed=seed) + 3, 1),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), lambda seed: rand(8, 4, 8, 8, seed=seed) + 3, 1),
    "transposed": (lambda: nn.ConvTranspose2d(16, 6, 3, 2, groups=2), lambda seed: rand(8, 16, 6, 6, seed=seed) + 3, 1),
    "three dimensions": (lambda: nn.Conv3d(3, 4, 2), lambda seed: rand(4, 3, 4, 4, 4, seed=seed) + 3, 1),
}


@on_devices
@pytest.mark.parametrize("config", [WEIGHT_ONLY, STATIC], ids=["weight only", "static"])
@pytest.mark.parametrize("name", SHIFTED)
def test_the_mean_error_on_the_data_it_learned_from_is_gone(
    name: str, config: QuantConfig, device: torch.device
) -> None:
    """A float bias takes all of it but the rounding of sums; an int32 one all but half a step.

    The output stays in float here, so that what is corrected can be seen.
    """
    make, batch, dim = SHIFTED[name]
    model, data = seeded(make()).to(device), [batch(seed).to(device) for seed in range(9)]
    config = config.replace(output=None)
    before = quantize(model, config, data)
    after = corrected(model, config, data)
    (change,) = changes(after)
    assert change.what == "bias"
    planted, left = (mean_error(model, q, [divided(data)[0]], dim).abs() for q in (before, after))
    largest = float(outputs(model, data[0]).abs().max())
    step = torch.zeros(1, device=device)
    bias = calls(after, "aten.")[-1].args[2]
    if bias.op != "get_attr":  # type: ignore[union-attr]
        step = constant(after, bias.args[1])  # type: ignore[union-attr]
    assert planted.max() > 0.01 * largest
    assert (left <= 0.5 * step + 1e-6 * largest).all()


def test_each_operator_is_corrected_on_what_those_before_it_make() -> None:
    """So the mean error at the end is gone, too."""
    model = seeded(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)))
    data = [rand(32, 16, seed=seed) + 1 for seed in range(9)]
    qmodel = corrected(model, WEIGHT_ONLY, data)
    assert [change.what for change in changes(qmodel)] == ["bias"] * 3
    assert mean_error(model, quantize(model, WEIGHT_ONLY, data), [divided(data)[0]], 1).abs().max() > 0.02
    assert mean_error(model, qmodel, [divided(data)[0]], 1).abs().max() < 1e-5


def test_what_unseen_batches_disagree_with_is_left() -> None:
    """The data to judge by has the opposite mean."""
    model = seeded(nn.Linear(16, 8))
    data = [rand(32, 16, seed=0) + 3, rand(32, 16, seed=1) + 3, rand(32, 16, seed=2) - 3]
    before, after = quantize(model, WEIGHT_ONLY, data), corrected(model, WEIGHT_ONLY, data)
    (change,) = changes(after)
    assert change.what.startswith("skipped: no better on validation data (")
    assert change.before == change.after
    assert after.report().passes[-1].rewrites == 0
    assert torch.equal(bias_of(after), bias_of(before))


def test_operators_that_share_a_weight_are_left_alone() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.a(torch.relu(self.a(x)))))
            return out

    qmodel = corrected(seeded(Twice()), WEIGHT_ONLY, [rand(32, 8, seed=seed) + 3 for seed in range(4)])
    assert {row.name for row in changes(qmodel) if not row.what.startswith("skipped")} == {"b"}


@pytest.mark.parametrize("config", [WEIGHT_ONLY, STATIC, INT8_DYNAMIC], ids=["weight only", "static", "dynamic"])
def test_only_biases_change_and_no_error_rises(config: QuantConfig) -> None:
    model, data = cnn(), [x + 1 for x in images(8, 8, 8, 8)]
    floats = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain, qmodel = quantize(model, config, data), corrected(model, config, data)
    before, after = (stored_tensors(q.graph_module) for q in (plain, qmodel))
    assert list(before) == list(after)
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed
    assert all(key.endswith(("bias", "bias_codes")) for key in changed)
    rows = changes(qmodel)
    assert [row.name for row in rows] == [row.name for row in qmodel.report()]
    assert len(changed) == qmodel.report().passes[-1].rewrites == sum(row.what == "bias" for row in rows)
    for row in rows:
        assert row.before is not None
        assert row.after is not None
        assert row.after <= row.before
        assert (row.after < row.before) == (row.what == "bias")
    assert all(torch.equal(tensor, floats[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_models_in_half_precision_are_corrected(dtype: torch.dtype) -> None:
    data = tokens(8, 8, 8)
    qmodel = corrected(mlp().to(dtype), WEIGHT_ONLY, data)
    assert {row.name for row in changes(qmodel)} == {"up", "down"}
    assert outputs(qmodel, data[0]).dtype == dtype


# Operators without a bias.


def kernels(qmodel: qfx.QuantizedModel, directory: Path) -> list[str]:
    """Return the operators ONNX Runtime runs."""
    import onnx
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(directory / "optimized.onnx")
    onnxruntime.InferenceSession(qfx.export.onnx(qmodel, directory / "m.onnx"), options, ["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(directory / "optimized.onnx").graph.node]


@pytest.mark.parametrize("how", Means)
def test_operators_without_a_bias_are_left_with_the_reason(how: Means) -> None:
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False)))
    data = [x + 1 for x in images(8, 8, 8, 8)]
    plain, qmodel = quantize(model, STATIC, data), corrected(model, STATIC, data, BiasCorrection(means=how))
    assert {row.what for row in changes(qmodel)} == {"skipped: it does not have a stored bias"}
    assert qmodel.report().passes[-1].rewrites == 0
    before, after = stored_tensors(plain.graph_module), stored_tensors(qmodel.graph_module)
    assert list(before) == list(after)
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_what_ran_in_integers_still_does(tmp_path: Path) -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten())
    model = seeded(nn.Sequential(*layers, nn.Linear(64, 5)))
    qmodel = corrected(model, INT8_STATIC, [x + 1 for x in images(8, 8, 8, 8)])
    assert [row.what for row in changes(qmodel)].count("bias") >= 1
    found = kernels(qmodel, tmp_path)
    assert found.count("QLinearConv") == 2
    assert found.count("QGemm") == 1
    assert qfx.verify(qmodel, tmp_path / "m.onnx", images(4)).max_steps <= 1


def test_a_product_without_a_place_for_a_bias_is_left() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    qmodel = corrected(seeded(Product()), WEIGHT_ONLY, [rand(32, 8, seed=seed) + 3 for seed in range(4)])
    assert not [row for row in changes(qmodel) if not row.what.startswith("skipped")]
    assert qmodel.report().passes[-1].rewrites == 0


@pytest.mark.parametrize("how", Means)
def test_a_bias_that_is_computed_is_left(how: Means) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.weight = nn.Linear(8, 8), nn.Parameter(torch.zeros(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.a(x), x, self.weight)

    qmodel = corrected(
        seeded(Model()), WEIGHT_ONLY, [rand(32, 8, seed=s) + 3 for s in range(4)], BiasCorrection(means=how)
    )
    assert [row.name for row in changes(qmodel) if row.what.startswith(("bias", "corrected"))] in (["a"], [])


# The mean of a clamped normal variable.


def reference_mean(mean: float, deviation: float, low: float | None, high: float | None) -> float:
    """Return it by quadrature: the mean of what is above a point, minus that of what is below."""
    if deviation == 0:
        return min(max(mean, -float("inf") if low is None else low), float("inf") if high is None else high)
    from scipy import integrate, stats

    normal = stats.norm(mean, deviation)
    far = 40 * deviation
    a, b = mean - far if low is None else low, mean + far if high is None else high
    # The distribution function varies near the mean alone: tell the quadrature.
    points = sorted({p for k in (-9, -3, 0, 3, 9) if a < (p := mean + k * deviation) < b})
    above, _ = integrate.quad(normal.sf, a, b, points=points or None, limit=200)
    return float(a + above)


@given(
    mean=st.floats(-10, 10),
    deviation=st.sampled_from([0.0, 1e-3, 0.1, 1.0, 5.0]),
    bounds=st.sampled_from([(0.0, None), (0.0, 6.0), (None, None), (None, 1.0), (-1.0, 1.0), (2.0, 3.0), (-3.0, -2.0)]),
)
@settings(deadline=None, max_examples=200)
def test_the_mean_of_a_clamped_normal_is_that_of_quadrature(
    mean: float, deviation: float, bounds: tuple[float | None, float | None]
) -> None:
    """In float32: a few roundings of the largest term."""
    limits = torch.finfo(torch.float32)
    got = _clamped_mean(torch.tensor([mean]), torch.tensor([deviation]), *bounds)
    expected = reference_mean(float(torch.tensor(mean)), float(torch.tensor(deviation)), *bounds)
    largest = abs(mean) + deviation + max((abs(b) for b in bounds if b is not None), default=0.0)
    assert float(got) == pytest.approx(expected, abs=8 * limits.eps * largest + limits.tiny)


def test_a_deviation_may_have_either_sign_and_bounds_may_differ_by_channel() -> None:
    mean, deviation = rand(20, seed=4) * 3, rand(20, seed=5)
    assert torch.equal(_clamped_mean(mean, deviation, 0.0, 6.0), _clamped_mean(mean, -deviation, 0.0, 6.0))
    high = rand(20, seed=6).abs() * 3
    together = _clamped_mean(mean, deviation, torch.zeros(20), high)
    alone = [_clamped_mean(mean[i : i + 1], deviation[i : i + 1], 0.0, float(high[i])) for i in range(20)]
    torch.testing.assert_close(together, torch.cat(alone))


@pytest.mark.parametrize("bounds", [(0.0, None), (0.0, 6.0), (None, None), (-1.0, 1.0)])
def test_the_mean_of_a_clamped_normal_is_that_of_samples(bounds: tuple[float | None, float | None]) -> None:
    mean, deviation = rand(20, seed=4) * 3, rand(20, seed=5).abs() + 0.1
    samples = mean + deviation * rand(100_000, 20, seed=6)
    clamped = samples if bounds == (None, None) else samples.clamp(*bounds)
    error = (_clamped_mean(mean, deviation, *bounds) - clamped.mean(0)).abs()
    assert (error <= 5 * deviation / 100_000**0.5).all()  # clamping only narrows


# Without data.


class Normed(nn.Module):
    """A 1×1 convolution with a batch norm that knows its statistics, an activation, and what is corrected."""

    def __init__(self, activation: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 6, 1, bias=False), nn.BatchNorm2d(6)
        self.activation, self.then = activation, then

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.then(self.activation(self.norm(self.first(x))))
        return out


def normed(activation: nn.Module, then: nn.Module) -> nn.Module:
    """Return such a model; of normal inputs with mean 0 and deviation 1 what `norm` makes is normal, too."""
    model = seeded(Normed(activation, then))
    with torch.no_grad():
        model.norm.running_mean.zero_()  # type: ignore[union-attr]
        model.norm.running_var.copy_(model.first.weight.square().sum((1, 2, 3)))  # type: ignore[union-attr]
        model.norm.eps = 0.0
        model.norm.bias.mul_(2)
        model.norm.weight[1] *= -1
    return model


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "clamp": lambda: nn.Hardtanh(-0.5, 1.0),
    "none": nn.Identity,
}
THEN: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: nn.Conv2d(6, 8, 1),
    "a larger kernel": lambda: nn.Conv2d(6, 8, 3),
    "grouped": lambda: nn.Conv2d(6, 8, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("then", THEN)
def test_both_means_agree_where_activations_are_normal(then: str, activation: str) -> None:
    """Up to the deviation of a mean of samples, of which 2048 at least do not depend on each other, and rounding."""
    model = normed(ACTIVATIONS[activation](), THEN[then]())
    config = WEIGHT_ONLY.replace(exclude=("first",))
    data = [rand(64, 4, 8, 8, seed=seed) for seed in range(9)]
    plain = quantize(model, config, data)
    analytic = corrected(model, config, data, ANALYTIC)
    assert [row.what[:9] for row in changes(analytic)] == ["corrected"], changes(analytic)
    errors = torch.cat([outputs(model, x) - outputs(plain, x) for x in data]).double().movedim(1, 0).flatten(1)
    shift = bias_of(analytic, 1) - bias_of(plain, 1)
    allowed = 5 * errors.std(1) / 2048**0.5 + 1e-6 * outputs(model, data[0]).abs().max()
    assert (allowed < 0.5 * errors.mean(1).abs()).any()
    assert ((shift - errors.mean(1)).abs() <= allowed).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_transposed_convolution_is_corrected_on_data_alone(stride: int, groups: int) -> None:
    """Its positions add up different parts of the kernel."""
    model = normed(nn.ReLU(), nn.ConvTranspose2d(6, 8, 2, stride, groups=groups))
    data = [rand(16, 4, 8, 8, seed=seed) for seed in range(4)]
    rows = {
        how: {row.name: row.what for row in changes(corrected(model, WEIGHT_ONLY, data, how))}
        for how in (EMPIRICAL, ANALYTIC)
    }
    assert rows[EMPIRICAL]["then"] == "bias"
    assert rows[ANALYTIC]["then"].startswith("skipped")


def test_what_has_no_batch_norm_before_it_is_left_with_the_reason() -> None:
    qmodel = corrected(cnn(), STATIC, images(4, 4), ANALYTIC)
    rows = {row.name: row.what for row in changes(qmodel)}
    left = "skipped: no batch norm (and at most a clamp) before it"
    assert rows == {"stem.0": left, "block.conv": left, "head": left}  # a pool and a sum lie between
    assert qmodel.report().passes[-1].rewrites == 0


def test_the_analytic_mean_needs_no_data() -> None:
    program = torch.export.export(normed(nn.ReLU(), nn.Conv2d(6, 8, 1)), (rand(2, 4, 8, 8),))
    config = WEIGHT_ONLY.replace(passes=(*WEIGHT_ONLY.passes, ANALYTIC))
    qmodel = qfx.quantize(program, config, progress=False)
    assert {row.name: row.what.split()[0] for row in changes(qmodel)} == {"first": "skipped:", "then": "corrected"}


def test_the_empirical_mean_says_that_it_needs_data() -> None:
    program = torch.export.export(nn.Linear(8, 8), (rand(4, 8),))
    with pytest.raises(CalibrationError, match="pass calibration_data"):
        qfx.quantize(program, WEIGHT_ONLY.replace(passes=(*WEIGHT_ONLY.passes, EMPIRICAL)), progress=False)


@pytest.mark.parametrize("how", Means)
def test_a_bias_that_two_operators_share_is_corrected_for_neither_or_once(how: Means) -> None:
    """A module that is called twice, after different batch norms: its bias takes no more than the larger shift."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(4, 6, 1), nn.Conv2d(4, 6, 1)
            self.norm_a, self.norm_b, self.then = nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return (
                self.then(torch.relu(self.norm_a(self.a(x)))),
                self.then(torch.relu(self.norm_b(self.b(x)))),
            )

    model = seeded(Shared())
    data = [rand(8, 4, 4, 4, seed=seed) for seed in range(4)]
    plain, qmodel = quantize(model, WEIGHT_ONLY, data), corrected(model, WEIGHT_ONLY, data, BiasCorrection(means=how))
    shift = (
        (stored_tensors(qmodel.graph_module)["then.bias"] - stored_tensors(plain.graph_module)["then.bias"]).abs().max()
    )
    noted = [float(row.what.split()[-1]) for row in changes(qmodel) if row.name == "then" and row.what[0] == "c"]
    assert float(shift) <= max(noted, default=0.0) * 1.01


# Trained networks, and options.


@pytest.mark.parametrize("name", ["cnn", "mobilenet", "vit"])
def test_four_bit_networks_are_nearer_to_the_float_ones(name: str) -> None:
    """Squared error of the logits of images that nothing was learned from; measured: 0.40, 0.68 and 0.75."""
    network = trained(name)
    expected = outputs(network.model, network.images)

    def error(*passes: BiasCorrection) -> float:
        config = STATIC.replace(passes=(*STATIC.passes, *passes))
        qmodel = quantize(network.model, config, network.calibration[:6])
        return float((outputs(qmodel, network.images) - expected).square().sum())

    assert error(EMPIRICAL) <= 0.9 * error()


@pytest.mark.parametrize("means", ["guessed", "", None])
def test_other_means_are_refused(means: Any) -> None:
    with pytest.raises(ConfigError, match=r"empirical'?(,| or) '?analytic"):
        BiasCorrection(means=means)
