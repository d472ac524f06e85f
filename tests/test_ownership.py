"""A quantized model owns what it holds, and says so when it is called for something it was not captured for."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny import calls, images, quantize, rand, seeded
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT32, UINT8
from quark_fx.numbers.qparams import Scheme, Symmetry, affine_qparams
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.observers import MinMax, Mse
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import FP16, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8


def test_training_the_original_does_not_move_the_quantized_model() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    x = rand(5, 4)
    qmodel = quantize(model, INT8_STATIC, [x])
    before = qmodel(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    torch.testing.assert_close(qmodel(x), before, rtol=0, atol=0)
    qmodel(x).sum()
    assert not {p.data_ptr() for p in model.parameters()} & {b.data_ptr() for b in qmodel.buffers()}


def test_a_copy_computes_the_same_and_is_its_own() -> None:
    x = rand(5, 4)
    qmodel = quantize(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).eval(), INT8_STATIC, [x])
    twin = copy.deepcopy(qmodel)
    torch.testing.assert_close(twin(x), qmodel(x), rtol=0, atol=0)
    for buffer in twin.buffers():
        buffer.zero_()
    assert qmodel(x).abs().sum() > 0


def test_a_quantized_model_keeps_its_dtype() -> None:
    qmodel = quantize(nn.Linear(4, 4).eval(), INT8_STATIC, [rand(5, 4)])
    with pytest.raises(RuntimeError, match="float32"):
        qmodel.half()
    assert not any(module.training for module in qmodel.modules())


def test_it_cannot_be_quantized_twice() -> None:
    qmodel = quantize(nn.Linear(4, 4).eval(), INT8_STATIC, [rand(5, 4)])
    with pytest.raises(qfx.ConfigError, match="already"):
        quantize(qmodel, INT8_STATIC, [rand(5, 4)])


class Difference(nn.Module):
    def forward(self, pair: dict[str, Tensor]) -> Tensor:
        return pair["a"] - pair["b"]


def test_nested_keys_may_come_in_any_order_and_must_be_the_same() -> None:
    a, b = rand(3, 4), rand(3, 4) + 9
    module = qfx.capture_graph(Difference().eval(), {"pair": {"a": a, "b": b}})
    flat = module.signature.flatten((), {"pair": {"b": b, "a": a}})
    torch.testing.assert_close(module.module(*flat)[0], a - b)
    for wrong in ({"a": a, "c": b}, [a, b]):
        with pytest.raises(qfx.QuarkError, match="different structure"):
            module.signature.flatten((), {"pair": wrong})


class BySize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 4 else x * 30


def test_a_size_for_which_the_code_takes_another_path_is_refused() -> None:
    signature = qfx.capture_graph(BySize().eval(), rand(8, 3)).signature
    signature.flatten((rand(5, 3),), {})
    with pytest.raises(qfx.QuarkError, match="another path"):
        signature.flatten((rand(2, 3),), {})


def test_dropout_that_is_always_on_is_refused() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x, 0.5, training=True)

    with pytest.raises(qfx.CaptureError, match="applies dropout"):
        qfx.capture_graph(Noisy().eval(), rand(3, 4))


def test_a_dimension_the_model_fixes_is_fixed_in_the_signature() -> None:
    assert qfx.capture_graph(nn.Linear(4, 3).eval(), rand(2, 4)).signature.input_shapes == ((None, 4),)


def test_strings_mean_their_enum_members_and_formats() -> None:
    spec = TensorSpec(format="uint8", symmetry="asymmetric", granularity="channel", observer="mse")  # type: ignore[arg-type]
    assert spec == TensorSpec(
        format=UINT8, symmetry=Symmetry.ASYMMETRIC, granularity=Granularity.CHANNEL, observer=Mse()
    )
    assert spec.symmetry is Symmetry.ASYMMETRIC


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: INT8_STATIC.replace(exclude="op:conv*"),
            r"exclude .* must be a tuple whose items are each a string, not .*; write exclude=\('op:conv\*',\)",
        ),
        (lambda: INT8_STATIC.replace(exclude=(0,)), r"each a string, not \(0,\)"),
        (
            lambda: Override(pattern="a", weight="int8"),  # type: ignore[arg-type]
            r"must be a TensorSpec\(format=...\), its dict, INHERIT or None, not 'int8'",
        ),
        (lambda: TensorSpec(format=UINT8, dynamic=True, observer=Mse()), "drop the observer"),
        (lambda: INT8_STATIC.replace(bias=TensorSpec(format=INT32, observer=Mse())), "drop its other options"),
        (lambda: INT8_STATIC.replace(input=TensorSpec(format=qfx.formats.SM5)), "sm5 has no ONNX type"),
        (lambda: QuantConfig.from_yaml("config.yaml"), "pass Path"),
    ],
)
def test_options_that_would_mean_nothing_are_refused(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(qfx.ConfigError, match=message):
        build()


def test_lists_in_a_configuration_become_tuples() -> None:
    assert INT8_STATIC.replace(exclude=["a"]) == INT8_STATIC.replace(exclude=("a",))


def test_verification_without_a_batch_is_refused() -> None:
    program = torch.export.export(nn.Linear(4, 4).eval(), (rand(2, 4),))
    with pytest.raises(qfx.CalibrationError, match="verify=True"):
        qfx.quantize(program, INT8_WEIGHT_ONLY, verify=True)


def test_channels_without_bias_keep_their_scale_under_power_of_two_scales() -> None:
    model = seeded(nn.Linear(8, 4))
    with torch.no_grad():
        model.weight.mul_(0.01)
        model.bias.copy_(torch.tensor([0.0, 1.0, 0.0, -1.0]))
    weight = TensorSpec(format=INT8, granularity=Granularity.CHANNEL, scale=POWER_OF_TWO)
    (row,) = quantize(model, INT8_STATIC.replace(weight=weight), [rand(16, 8)]).report()
    assert row.sqnr is not None
    assert row.sqnr > 25


def test_a_bias_stays_in_float_where_an_override_keeps_the_input_in_float() -> None:
    config = XINT8.replace(overrides=(Override(pattern="*", input=None, output=None),))
    qmodel = quantize(nn.Linear(4, 2).eval(), config, [rand(6, 4)])
    assert len(calls(qmodel, "quark_fx.dequantize")) == 1


def test_zero_points_on_a_tie_are_those_of_the_exact_scale() -> None:
    quantizer = pytest.importorskip("onnxruntime.quantization.quant_utils")
    import numpy as np

    for amax in torch.linspace(0.1, 9, 200).tolist():
        expected, _ = quantizer.compute_scale_zp(
            np.array(-amax, np.float32), np.array(amax, np.float32), np.array(0, np.uint8), np.array(255, np.uint8)
        )
        low, high = torch.tensor([-amax]), torch.tensor([amax])
        found = affine_qparams(low, high, Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC))
        assert int(found.zero_point) == int(expected)


def test_tokens_may_vary_in_number_under_per_token_scales() -> None:
    spec = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
    qmodel = quantize(nn.Linear(4, 3).eval(), INT8_DYNAMIC.replace(input=spec), [rand(2, 5, 4)])
    assert qmodel(rand(2, 9, 4)).shape == (2, 9, 3)
    with pytest.raises(qfx.ConfigError, match="convolution"):
        quantize(nn.Conv1d(4, 3, 1).eval(), INT8_DYNAMIC.replace(input=spec), [rand(2, 4, 5)])


def test_a_normalized_weight_is_folded_and_quantized() -> None:
    model = nn.Sequential(weight_norm(nn.Conv1d(4, 8, 3)), nn.ReLU(), weight_norm(nn.Linear(6, 2))).eval()
    rows = list(quantize(model, INT8_STATIC, [rand(3, 4, 8)]).report())
    assert [(row.kind, row.reason) for row in rows] == [("conv", ""), ("linear", "")]
    assert [row.name for row in rows] == ["0", "2"]


def test_a_constant_selection_of_an_embedding_is_quantized_like_others() -> None:
    class Positions(nn.Module):
        index: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(6, 4)
            self.register_buffer("index", torch.arange(6))

        def forward(self, x: Tensor) -> Tensor:
            selected: Tensor = self.table(self.index)
            return x + selected

    (row,) = quantize(seeded(Positions()), INT8_STATIC, [rand(2, 6, 4)]).report()
    assert (row.kind, row.reason) == ("embedding", "")


def test_nothing_quantized_is_said_aloud() -> None:
    with pytest.warns(UserWarning, match="nothing was quantized"):
        quantize(nn.LSTM(4, 4, batch_first=True).eval(), INT8_STATIC.replace(exclude=("*",)), [rand(2, 3, 4)])


def test_a_weight_that_overflows_float16_is_named() -> None:
    model = nn.Linear(4, 4).eval()
    model.weight.data[0, 0] = 1e6
    with pytest.raises(qfx.CalibrationError, match=r"weight.*overflows fp16"):
        quantize(model, FP16, [rand(2, 4)])


def test_a_mask_of_infinities_is_no_bad_data() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return torch.softmax(self.linear(x) + mask, -1)

    mask = torch.zeros(3, 4)
    mask[:, 2] = -torch.inf
    assert quantize(seeded(Masked()), INT8_STATIC, [(rand(3, 4), mask)])(rand(3, 4), mask).isfinite().all()


def test_histograms_of_groups_stay_small() -> None:
    spec = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=8, observer=Mse(bins=64))
    chunked = quantize_tensor(rand(1100, 64), spec)
    assert chunked.scale.shape == (1100, 8)
    plain = quantize_tensor(rand(1100, 64), spec.replace(observer=MinMax()))
    assert (chunked.scale <= plain.scale * 1.001).all()


def test_the_squared_error_of_8_bit_floats_with_few_bins() -> None:
    x = rand(1, 500)
    low, high = Mse(bins=64).observe(x).range(Scheme(format=FP8_E4M3))
    assert float(x.min()) <= float(low) < 0 < float(high) <= float(x.max())


def test_a_recurrent_model_survives_storage_and_a_later_export(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4, batch_first=True)).eval()
    x = rand(2, 3, 4)
    qmodel = quantize(model, INT8_STATIC, [x])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path)
    torch.testing.assert_close(loaded(x), qmodel(x), rtol=0, atol=0)
    file = qfx.export.onnx(loaded, tmp_path / "model.onnx")
    assert qfx.verify(loaded, file, [rand(3, 3, 4)]).max_steps < 0.01


def test_4_bit_activations_load_in_onnx_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    spec = TensorSpec(format=qfx.formats.UINT4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
    qmodel = quantize(model, INT8_STATIC.replace(input=spec, output=spec), images())
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, path, images()).max_steps <= 1


def test_unlisted_operator_libraries_are_not_called_on_loading(tmp_path: Path) -> None:
    library = torch.library.Library("quark_fx_unlisted", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.quark_fx_unlisted.twice(self.linear(x))  # type: ignore[no-any-return]

    x = rand(2, 4)
    qmodel = quantize(seeded(Model()), QuantConfig(weight=TensorSpec(format=INT8), target=Target.TORCH), [x])
    qmodel.save(tmp_path)
    with pytest.raises(qfx.QuarkError, match="namespaces="):
        qfx.load(tmp_path)
    loaded = qfx.load(tmp_path, namespaces=("quark_fx_unlisted",))
    torch.testing.assert_close(loaded(x), qmodel(x), rtol=0, atol=0)


class KeepsTables(nn.Module):
    """Makes a table in its first call, and keeps it in one of several ways."""

    shared: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, way: str) -> None:
        super().__init__()
        self.out, self.way = nn.Linear(4, 4), way
        self.tables: dict[int, Tensor] = {}
        self.made: list[Tensor] = []
        self.table: Tensor | None = None
        self.empty: Tensor | None
        self.register_buffer("empty", None)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x * self.kept(x)[: x.shape[1]].cos())  # type: ignore[no-any-return]

    def kept(self, x: Tensor) -> Tensor:
        table = torch.arange(16.0)[:, None] * x.detach().abs().amax((0, 1))  # of the first batch
        if self.way == "buffer" and not hasattr(self, "late"):
            self.register_buffer("late", table, persistent=False)
        elif self.way == "empty buffer" and self.empty is None:
            self.empty = table
        elif self.way == "attribute" and self.table is None:
            self.table = table
        elif self.way == "dict":
            self.tables.setdefault(0, table)
        elif self.way == "class":
            self.shared.setdefault(0, table)
        elif self.way == "list" and not self.made:
            self.made.append(table)
        places = {"buffer": "late", "empty buffer": "empty", "attribute": "table"}
        in_containers = {"dict": self.tables.get(0), "class": self.shared.get(0), "list": next(iter(self.made), None)}
        found = getattr(self, places[self.way]) if self.way in places else in_containers[self.way]
        assert isinstance(found, Tensor)
        return found


@pytest.mark.parametrize("way", ["buffer", "empty buffer", "attribute", "dict", "class", "list"])
def test_tables_made_in_the_first_call_are_constants_and_stay_out_of_the_model(way: str) -> None:
    model, batches = seeded(KeepsTables(way)), [rand(2, 8, 4), 3 * rand(3, 12, 4)]
    twin = copy.deepcopy(model)
    before, buffers = dict(vars(model)), dict(model._buffers)
    qmodel = quantize(model, INT8_WEIGHT_ONLY, batches)
    assert list(vars(model)) == list(before)
    assert all(vars(model)[name] is value for name, value in before.items())
    assert dict(model._buffers) == buffers
    assert (model.tables, model.made, KeepsTables.shared) == ({}, [], {})
    try:
        for x in batches:
            torch.testing.assert_close(qmodel(x), twin(x), rtol=0.02, atol=0.05)
    finally:
        KeepsTables.shared.clear()


class StopsAfterWriting(nn.Module):
    count: Tensor

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.error, self.seen, self.tables = error, set[int](), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.add(1)
        self.tables[0] = self.last = x * 2
        self.register_forward_hook(lambda *_: None)
        raise self.error("stop")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_model_that_cannot_be_captured_stays_as_it_was(error: type[BaseException]) -> None:
    model = StopsAfterWriting(error).eval()
    before = list(vars(model).items())
    for call in (quantize, qfx.predict, partial(qfx.check, export="qdq")):
        with pytest.raises(error if error is KeyboardInterrupt else qfx.CaptureError):
            call(model, INT8_WEIGHT_ONLY, [rand(2, 4)])
        assert list(vars(model)) == [name for name, _ in before]
        assert all(vars(model)[name] is value for name, value in before)
        assert (float(model.count), model.seen, model.tables, len(model._forward_hooks)) == (0, set(), {}, 0)
