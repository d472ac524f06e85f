"""What people try first either works or is refused in words that say what to do."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_program
from tiny import cnn, images, quantize, rand
from torch import Tensor, nn
from torch.export import Dim

import quark_fx as qfx
from quark_fx.observers import Percentile

INT8 = qfx.presets.INT8_STATIC


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x))


class Branch(Two):
    def forward(self, x: Tensor) -> Any:
        return self.a(x) if x.sum() > 0 else self.b(x)


class Cond(Two):
    def forward(self, x: Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: self.a(x), lambda x: self.b(x), (x,))


class Autocast(Two):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.b(self.a(x))


def test_the_advice_about_a_branch_is_not_what_the_next_call_refuses() -> None:
    with pytest.raises(qfx.CaptureError, match=r"use torch\.where") as error:
        quantize(Branch().eval(), INT8, [rand(4, 8)])
    assert "torch.cond" not in str(error.value)


def test_torch_cond_is_refused_by_name() -> None:
    with pytest.raises(qfx.CaptureError, match=r"cond at %cond .*\n.*choose with torch\.where"):
        quantize(Cond().eval(), INT8, [rand(4, 8)])


def test_a_region_under_autocast_is_refused_by_name() -> None:
    with pytest.raises(qfx.CaptureError, match=r"runs under torch\.autocast: remove that from forward"):
        quantize(Autocast().eval(), INT8, [rand(4, 8)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
@pytest.mark.parametrize("preset", ["int8_static", "int8_weight_only"])
def test_integers_where_a_model_multiplies_floats_are_refused_when_it_is_captured(
    preset: str, dtype: torch.dtype
) -> None:
    with pytest.raises(qfx.CaptureError, match=rf"input x is {dtype}, and aten.linear.*convert the batch first"):
        quantize(Two().eval(), preset, [torch.ones(4, 8, dtype=dtype)])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ("hello", "is text"),
        (["a", "b"], "is text"),
        ({"x": "hello"}, "is text"),
        (3, "contains no tensor, only 3"),
        ({"use_cache": False}, "contains no tensor; pass"),
    ],
)
def test_a_batch_without_a_tensor_is_called_what_it_is(batch: Any, words: str) -> None:
    with pytest.raises(qfx.CaptureError, match=words):
        quantize(Two().eval(), INT8, [batch])


def test_options_that_are_no_tensors_may_accompany_tensors() -> None:
    class Options(Two):
        def forward(self, x: Tensor, mode: str = "a", twice: bool = False) -> Any:
            return (self.a(x) if mode == "a" else self.b(x)) * (2 if twice else 1)

    model, x = Options().eval(), rand(4, 8)
    qmodel = quantize(model, "int8_weight_only", [(x, "b", True)])
    torch.testing.assert_close(qmodel(x, "b", True), model(x, "b", True), rtol=0, atol=0.1)


@pytest.mark.parametrize("name", ["graph", "meta", "code", "class", 'q"q'])
def test_a_module_that_a_graph_cannot_name_is_refused_by_name(name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Any:
            return self._modules[name](x)  # type: ignore[misc]

    with pytest.raises(qfx.CaptureError, match=rf"first '{name}\.weight'.*rename such tensors"):
        quantize(Named().eval(), INT8, [rand(4, 8)])


def test_an_inner_module_may_be_called_like_an_attribute_of_graphs() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.code, self.graph = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            return self.graph(self.code(x))

    names = [row.name for row in quantize(nn.Sequential(Inner()).eval(), INT8, [rand(4, 8)]).report().rows]
    assert names == ["0.code", "0.graph"]


def test_a_fraction_is_not_taken_for_a_percentile() -> None:
    with pytest.raises(qfx.ConfigError, match=r"0\.999 must be a percentage.*99\.9 keeps"):
        Percentile(percentile=0.999)


def test_the_class_of_an_observer_is_not_taken_for_one() -> None:
    observer: Any = Percentile
    with pytest.raises(qfx.ConfigError, match=r"observer of TensorSpec must be an Observer.*; write Percentile\(\)"):
        qfx.TensorSpec(format="int8", observer=observer)  # type: ignore[arg-type]


def test_data_that_is_zero_everywhere_is_remarked_on() -> None:
    with pytest.warns(
        UserWarning, match="input x is all zeros in the calibration data, so its range cannot be calibrated"
    ):
        quantize(Two().eval(), INT8, [torch.zeros(4, 8), torch.zeros(2, 8)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(Two().eval(), INT8, [torch.zeros(4, 8), rand(2, 8)])


@pytest.mark.parametrize("preset", ["int8_static", "int8_dynamic", "int8_weight_only"])
def test_gradients_reach_the_input_of_a_quantized_model(preset: str) -> None:
    model, x = Two().eval(), (rand(4, 8) / 2).requires_grad_()  # well within the clip ranges
    qmodel = quantize(model, preset, [rand(4, 8)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = qmodel(x)
    assert torch.equal(y, qmodel(x.detach()))
    (found,), (wanted,) = (torch.autograd.grad(made.sum(), x) for made in (y, model(x)))
    assert float(torch.cosine_similarity(found.flatten(), wanted.flatten(), 0)) > 0.99


def test_pickling_names_what_to_call_instead_and_copies_work() -> None:
    x = images(2)[0]
    qmodel = quantize(cnn(), INT8, [x])
    with pytest.raises(qfx.QuarkError, match=r"write it with qmodel\.save\(directory\)"):
        torch.save(qmodel, io.BytesIO())
    for made in (copy.copy(qmodel), copy.deepcopy(qmodel)):
        assert torch.equal(made(x), qmodel(x))
        assert made.report().rows == qmodel.report().rows


class Same(nn.Module):
    """What diffusers' UNets do: the input and the output have one name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, sample: Tensor) -> Any:
        return {"sample": self.conv(sample)}


def test_an_output_called_like_an_input_gets_a_name_of_its_own(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    qmodel = quantize(Same().eval(), INT8, [{"sample": rand(2, 3, 8, 8)}])
    qfx.export.onnx(qmodel, tmp_path / "unet.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "unet.onnx"), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["sample"]
    assert [value.name for value in session.get_outputs()] == ["sample_out"]
    with pytest.raises(qfx.ExportError, match="two inputs or outputs are called x"):
        qfx.export.onnx(qmodel, tmp_path / "other.onnx", input_names=["x"], output_names=["x"])


def test_a_preset_is_a_key_of_a_configuration() -> None:
    text = "preset: int8_static\nexclude: ['head*']\n"
    assert qfx.QuantConfig.from_yaml(text) == INT8.replace(exclude=("head*",))
    assert qfx.QuantConfig.from_dict({"preset": "int8_static"}) == INT8
    assert qfx.QuantConfig.from_dict({"preset": "int8_static", "passes": []}).passes == ()
    weight = {"format": "int8", "granularity": "channel"}
    found = qfx.QuantConfig.from_dict({"preset": "int8_static", "weight": weight})
    assert found == INT8.replace(weight=qfx.TensorSpec.from_dict(weight))
    partly = qfx.QuantConfig.from_yaml("preset: int8_static\nweight: {reduce_range: true}\n")
    assert INT8.weight is not None
    assert partly == INT8.replace(weight=INT8.weight.replace(reduce_range=True))
    for wrong, words in (
        ("int8_statik", "did you mean 'int8_static'"),
        (8, "preset must be the name of a preset, not 8"),
    ):
        with pytest.raises(qfx.ConfigError, match=words):
            qfx.QuantConfig.from_dict({"preset": wrong})


_WRAPPED = """
import torch, quark_fx as qfx
from transformers import LlamaConfig, LlamaForCausalLM
small = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=64)
class Wrapper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.base_model = LlamaForCausalLM(small)
    def forward(self, *args, **kwargs):
        return self.base_model(*args, **kwargs)
model = Wrapper().eval()
q = qfx.quantize(model, "int8_weight_only", [{"input_ids": torch.randint(1, 64, (2, 8))}], progress=False)
assert model.base_model.config.use_cache
print(sorted(q(input_ids=torch.randint(1, 64, (2, 8)))))
"""


def test_a_wrapped_model_of_transformers_needs_none_to_be_quantized_before_it() -> None:
    """As a PeftModel wraps one: in a fresh process nothing has told torch of its cache."""
    pytest.importorskip("transformers")
    done = run_program(_WRAPPED)
    assert done.stdout.strip() == "['logits']", done.stderr[-2000:]


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Any = None) -> Any:
        return self.layer(x)


X = torch.ones(4, 8)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            [{"x": X, "label": X}],
            r"the batch has the keys x, label: pass only the keys that forward accepts: .* for key in \['x'\]",
        ),
        ([{"input": X}], "missing a required argument: 'x'; the batch has the keys input: rename input"),
        ([(X, X, X)], "too many positional arguments; if the loader yields"),
        ([X, X.numpy()], "batch 1 .* is a ndarray; .* convert it with torch.from_numpy"),
        ([X.numpy()], "is a ndarray; convert it with torch.from_numpy"),
        (X.numpy(), "not a single ndarray; wrap a single batch in a list"),
        (lambda: [X], "not a single function; call it and pass the result"),
        (iter([]), "missing or empty; .*a generator can be read only once; create a new one"),
        ([None], "calibration batch 0 is None"),
        ((X, torch.arange(4)), r"a tuple is read as several batches: one batch of several inputs is \[\(x, y\)\]"),
        ([X, torch.ones(2, 4, 8)], r"captured for \(any, 8\), 2 dimension\(s\): give every batch as many"),
        (
            [X, torch.ones(4, 9)],
            r"cut dimension 1 to 8, or, .* \{'x': \{0: Dim\.AUTO, 1: Dim\.AUTO\}\}\. If it is dynamic",
        ),
        ([torch.ones(4, 9)], r"Keywords itself does not run on the first batch \(x: \(4, 9\) float32\): RuntimeError"),
        ([torch.ones(9)], r"itself does not run on the first batch \(x: \(9,\) float32\)"),
    ],
)
def test_batches_that_do_not_fit_are_answered_with_what_to_change(batches: Any, words: str) -> None:
    with pytest.raises(qfx.QuarkError, match=words):
        quantize(Keywords().eval(), INT8, batches)


class Fixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).reshape(4, 4)


@pytest.mark.parametrize(
    ("model", "shapes", "words"),
    [
        (Keywords(), {"input": {0: Dim("batch")}}, r"whose inputs are x: \(4, 8\) float32: .*\['input'\]"),
        (Keywords(), {0: Dim("batch")}, "top-level keys must be the arg names"),
        (Keywords(), "batch", "expected dynamic_shapes to be dict, tuple, or list"),
        (Keywords(), {"x": {1: Dim("features")}}, r"specialized it to be a constant \(8\)"),
        (Fixed(), {"x": {0: Dim("batch")}}, r"specialized it to be a constant \(4\)"),
        (Keywords(), True, "dynamic_shapes does not fit Keywords"),
        (Keywords(), {"x": {"batch": 0}}, "dynamic_shapes does not fit Keywords"),
    ],
)
def test_what_is_wrong_with_dynamic_shapes_is_said_and_how_to_write_them(
    model: nn.Module, shapes: Any, words: str
) -> None:
    with pytest.raises(qfx.CaptureError, match=words) as caught:
        quantize(model.eval(), INT8, [X], dynamic_shapes=shapes)
    assert "as {'x': {0: Dim.AUTO}}, with None" in str(caught.value)
    assert "pass `dynamic_shapes`" not in str(caught.value)
    quantize(model.eval(), INT8, [X], dynamic_shapes={"x": {0: Dim.AUTO}})


@pytest.mark.parametrize("size", [Dim.AUTO, Dim("batch")], ids=["auto", "named"])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "in order"])
def test_a_dimension_that_an_input_does_not_have_is_named(size: Any, by_name: bool) -> None:
    with pytest.raises(
        qfx.CaptureError, match=r"dimension 5 of x, whose shape is \(4, 8\); dimensions count from 0 to 1"
    ):
        quantize(Keywords().eval(), INT8, [X], dynamic_shapes={"x": {5: size}} if by_name else ({5: size},))


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, given: dict[str, Any]) -> Any:
        return self.linear(given["parts"][1])


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        return self.linear(x).sum(-1) + other.sum()


def test_the_advice_on_sizes_names_every_input_and_works() -> None:
    first, second = (X, torch.zeros(4, 3, 5, 5)), (X, torch.zeros(4, 3, 7, 5))
    qmodel = quantize(Pair().eval(), INT8, [first])
    with pytest.raises(qfx.QuarkError, match="pad or cut dimension 2") as caught:
        qmodel(*second)
    written = str(caught.value).partition("quantize(), ")[2].partition(". If it is dynamic already")[0]
    shapes = eval(written, {"Dim": Dim})
    assert shapes.keys() == {"x", "other"}
    quantize(Pair().eval(), INT8, [first], dynamic_shapes=shapes)(*second)
    with pytest.raises(qfx.CaptureError, match="top-level keys must be") as caught:
        quantize(Nested().eval(), INT8, [({"parts": [torch.zeros(1), X]},)], dynamic_shapes={"given ": None})
    assert "whose inputs are given['parts'][0]: (1,)" in str(caught.value)
    written = str(caught.value).partition(", as ")[2].partition(", with None")[0]
    batch = ({"parts": [torch.zeros(2), X]},)
    quantize(Nested().eval(), INT8, [batch], dynamic_shapes=eval(written, {"Dim": Dim}))


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, pair: tuple[Tensor, Tensor], *others: Tensor) -> Any:
        return self.linear(pair[0]) + self.linear(pair[1]) + sum(others)


def test_the_advice_on_sizes_has_the_types_of_the_inputs() -> None:
    batch = ((X, X), torch.zeros(4, 4))
    with pytest.raises(qfx.CaptureError, match="top-level keys must be") as caught:
        quantize(Parts().eval(), INT8, [batch], dynamic_shapes={"pairs": None})
    written = str(caught.value).partition(", as ")[2].partition(", with None")[0]
    assert written == "{'pair': ({0: Dim.AUTO}, {0: Dim.AUTO},), 'others': ({0: Dim.AUTO},)}"
    quantize(Parts().eval(), INT8, [batch], dynamic_shapes=eval(written, {"Dim": Dim}))


def test_an_error_of_the_model_is_none_of_dynamic_shapes() -> None:
    code = """def forward(self, x):
    return self.layer(x) if not torch.compiler.is_exporting() else {}["mode"]
"""
    names: dict[str, Any] = {"torch": torch}
    exec(compile(code, "exporter/pytree.py", "exec"), names)
    model = type("Failing", (Keywords,), {"forward": names["forward"]})()
    with pytest.raises(qfx.CaptureError, match="KeyError: 'mode'") as caught:
        quantize(model.eval(), INT8, [X], dynamic_shapes={"x": {0: Dim.AUTO}})
    assert "dynamic_shapes does not fit" not in str(caught.value)


def test_a_size_that_a_length_divides_is_captured() -> None:
    model = nn.Sequential(nn.Conv1d(2, 6, 3, stride=2, dilation=2), nn.Flatten(), nn.Linear(6 * 18, 5))
    x = torch.zeros(3, 2, 40)
    qmodel = quantize(model.eval(), INT8, [x])
    assert qmodel(x[:2]).shape == (2, 5)


def test_a_dimension_that_a_part_of_an_input_does_not_have_is_named() -> None:
    shapes: list[Any] = [{"parts": [{}, {0: Dim.AUTO}]}, {"parts": [{}, {2: Dim.AUTO}]}]
    batch = ({"parts": [torch.zeros(1), X]},)
    quantize(Nested().eval(), INT8, [batch], dynamic_shapes={"given": shapes[0]})
    with pytest.raises(qfx.CaptureError, match=r"dimension 2 of given\['parts'\]\[1\], whose shape is \(4, 8\)"):
        quantize(Nested().eval(), INT8, [batch], dynamic_shapes={"given": shapes[1]})


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: dict[str, list[Tensor]], scale: float = 2.0) -> Any:
        return self.a(x) + scale * cache["k"][0].mean((1, 2, 3))[:, None] + cache["k"][1].mean((1, 2, 3))[:, None]


def test_a_size_of_a_part_of_an_input_is_named_as_it_is_reached_with_a_remedy_that_works() -> None:
    def batch(size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return {"x": X, "cache": {"k": [rand(len(X), 3, 4, 4), rand(len(X), 3, size, 4).to(dtype)]}, "scale": 2.0}

    qmodel = quantize(Cached().eval(), INT8, [batch(4)])
    with pytest.raises(qfx.QuarkError, match=r"input cache\['k'\]\[1\] has dtype torch.float64"):
        qmodel(**batch(4, torch.float64))
    with pytest.raises(qfx.QuarkError, match="pad or cut dimension 2 to 4") as caught:
        qmodel(**batch(5))
    assert str(caught.value).startswith(
        f"input cache['k'][1] has shape ({len(X)}, 3, 5, 4); the graph was captured for"
    )
    written = str(caught.value).partition("of quantize(), ")[2].partition(". If it is dynamic already")[0]
    assert written.startswith("{'x': {0: Dim.AUTO}, 'cache': {'k': [{0: Dim.AUTO}, {0: Dim.AUTO, 2: Dim.AUTO}]}")
    shapes = eval(written, {"Dim": Dim})
    assert quantize(Cached().eval(), INT8, [batch(4)], dynamic_shapes=shapes)(**batch(5)).shape == X.shape


@pytest.mark.parametrize("call", [qfx.quantize, qfx.predict, qfx.check, qfx.analyze, qfx.search])
def test_what_belongs_in_a_configuration_is_said_where_it_is_passed_beside_it(call: Any) -> None:
    with pytest.raises(
        qfx.ConfigError, match=r"has no argument batch_size, target; .*write INT8_STATIC\.replace\(target=\.\.\.\)"
    ):
        call(Keywords().eval(), INT8, [X], batch_size=2, target="openvino")
    with pytest.raises(qfx.ConfigError, match=r"has no argument dynamic_shape; .*did you mean 'dynamic_shapes'"):
        call(Keywords().eval(), INT8, [X], dynamic_shape=None)


def test_a_fixed_dimension_of_one_is_said_to_be_the_reason() -> None:
    with pytest.raises(qfx.CaptureError, match="a dimension of size 1 in the example is always fixed: capture with 2"):
        quantize(Keywords().eval(), INT8, [X[:1]], dynamic_shapes={"x": {0: Dim("batch")}})


def test_an_assertion_of_the_models_own_code_is_not_blamed_on_dynamic_shapes() -> None:
    class Asserts(Keywords):
        def forward(self, x: Tensor, mask: Any = None) -> Any:
            assert not torch.compiler.is_exporting()
            return self.layer(x)

    with pytest.raises(qfx.CaptureError, match="could not be captured: AssertionError"):
        quantize(Asserts().eval(), INT8, [X], dynamic_shapes={"x": {0: Dim.AUTO}})
