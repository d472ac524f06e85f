"""`verify` says how far ONNX Runtime is from torch, and notices a file that is not the model's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from tiny import calls, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import TensorSpec
from quark_fx.errors import ExportError
from quark_fx.export.runtime.rounding_noise import RoundingNoise, disturbed_outputs
from quark_fx.export.runtime.runners import OnnxRuntimeRunner
from quark_fx.export.runtime.verification import Difference, Verification
from quark_fx.graph.nodes import tensor_of
from quark_fx.graph.random_draws import random_draws
from quark_fx.numbers.qparams import Symmetry
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC


@pytest.fixture
def exported(tmp_path: Path) -> tuple[qfx.QuantizedModel, Path]:
    qmodel = quantize(cnn(), "int8_static", images())
    return qmodel, qfx.export.onnx(qmodel, tmp_path / "cnn.onnx")


def tamper(path: Path, wanted: Callable[[onnx.TensorProto], bool], change: Callable[[Any], Any]) -> str:
    model = onnx.load(path)
    tensor = next(t for t in model.graph.initializer if wanted(t))
    old = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(change(old.copy()), dtype=old.dtype), tensor.name))
    onnx.save(model, path)
    return str(tensor.name)


def test_a_faithful_file_is_within_a_step(exported: tuple[qfx.QuantizedModel, Path]) -> None:
    qmodel, path = exported
    result = qfx.verify(qmodel, path, images(4, 1))
    (difference,) = result.differences
    assert difference.name == "output"
    assert 0 <= result.max_steps <= 1
    assert difference.sqnr > 40
    with pytest.raises(qfx.ExportError, match="batch 0: input 0 holds NaN in sample 0"):
        qfx.verify(qmodel, path, [images(4, 1)[0] * float("nan")])


TAMPERING: dict[str, tuple[Callable[[onnx.TensorProto], bool], Callable[[Any], Any]]] = {
    "a weight": (lambda t: t.data_type == onnx.TensorProto.INT8 and len(t.dims) > 1, lambda w: -w),
    "a scale": (lambda t: t.data_type == onnx.TensorProto.FLOAT and not t.dims, lambda s: s * 1.5),
    "a bias": (lambda t: t.data_type == onnx.TensorProto.INT32, lambda b: b + 100_000),
}


@pytest.mark.parametrize("what", TAMPERING)
@pytest.mark.parametrize("per_node", [False, True])
def test_a_file_that_was_tampered_with_is_noticed(
    what: str, per_node: bool, exported: tuple[qfx.QuantizedModel, Path]
) -> None:
    qmodel, path = exported
    tamper(path, *TAMPERING[what])
    assert qfx.verify(qmodel, path, images(4), per_node=per_node).max_steps > 1


def test_per_node_compares_every_quantized_value_and_finds_the_one_at_fault(
    exported: tuple[qfx.QuantizedModel, Path],
) -> None:
    qmodel, path = exported
    quantizers = [node.name for node in calls(qmodel, "quark_fx.quantize")]
    clean = qfx.verify(qmodel, path, images(4, 2), per_node=True)
    assert {d.name for d in clean.differences} == {*quantizers, "output"}
    assert clean.max_steps <= 1
    # A wrong weight of the second convolution moves the value after it, not the one after the first.
    second = calls(qmodel, "aten.conv2d")[1]
    codes = str(second.args[1].args[0].target)  # type: ignore[union-attr]
    tamper(path, lambda t: t.name == codes, lambda w: -w)
    broken = qfx.verify(qmodel, path, images(4, 2), per_node=True)
    wrong = [d.name for d in broken.differences if d.steps > 1]
    (after,) = [u.name for u in second.users]
    assert wrong == [after]


@pytest.mark.parametrize("preset", ["int8_dynamic", "int8_static", "int4_weight_only", "fp8_static"])
def test_per_node_works_for_every_kind_of_quantizer(preset: str, tmp_path: Path) -> None:
    qmodel = quantize(mlp(), preset, tokens())
    path = qfx.export.onnx(qmodel, tmp_path / "mlp.onnx")
    assert qfx.verify(qmodel, path, tokens(3), per_node=True, optimize=False).max_steps <= 1


@pytest.mark.parametrize("fmt", ["uint8", "uint4"])
def test_unsigned_symmetric_codes_in_dynamic_groups_are_compared_by_value(fmt: str, tmp_path: Path) -> None:
    spec = TensorSpec.from_dict({"format": fmt, "granularity": "group", "group_size": 16, "dynamic": True})
    spec = spec.replace(symmetry=Symmetry.SYMMETRIC)
    qmodel = quantize(seeded(nn.Linear(40, 4)), INT8_DYNAMIC.replace(input=spec), [rand(4, 40)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    result = qfx.verify(qmodel, path, [rand(3, 40)], per_node=True)
    (rounded, output) = result.differences
    assert rounded.steps == 0
    assert output.steps <= 255 * 40 * 2**-24  # sums of 40 products in another order


@pytest.mark.parametrize("fmt", ["fp8_e5m2", "fp8_e4m3"])
def test_what_cannot_be_compared_is_named(fmt: str, tmp_path: Path) -> None:
    spec = TensorSpec.from_dict({"format": fmt})
    qmodel = quantize(seeded(nn.Linear(8, 4)), INT8_STATIC.replace(input=spec, output=spec), [rand(4, 8)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    result = qfx.verify(qmodel, path, [rand(4, 8)], per_node=True)
    quantizers = tuple(node.name for node in calls(qmodel, "quark_fx.quantize"))
    assert [d.name for d in result.differences] == ["output"]
    assert result.skipped == quantizers
    assert str(result).splitlines()[-2:] == [f"not compared: {', '.join(quantizers)}", "verdict: correct"]
    assert qfx.verify(qmodel, path, [rand(4, 8)]).skipped == ()


def test_an_output_may_be_called_like_a_quantizer(tmp_path: Path) -> None:
    qmodel = quantize(mlp(), "int8_static", tokens())
    first, *others = [node.name for node in calls(qmodel, "quark_fx.quantize")]
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", output_names=[first])
    result = qfx.verify(qmodel, path, tokens(3), per_node=True)
    assert result.skipped == (first,)
    assert [d.name for d in result.differences] == [*others, first]
    assert result.max_steps <= 1
    assert result[first].step == pytest.approx(qfx.verify(qmodel, path, tokens(3))[first].step)
    assert result[first].step < 1


def test_the_table_has_a_line_per_value(exported: tuple[qfx.QuantizedModel, Path]) -> None:
    qmodel, path = exported
    result = qfx.verify(qmodel, path, images(4), per_node=True)
    header, *lines, verdict = str(result).splitlines()
    assert header.split()[0] == "name"
    assert verdict == "verdict: correct"
    assert [line.split()[0] for line in lines] == [d.name for d in result.differences]
    assert result["output"].name == "output"


def test_the_numbers_are_what_they_are_called() -> None:
    """Outputs of 0 … 254 in torch, one of them three off in the file: one 255th of the range is about one step."""
    d = Difference(name="y", max_abs=3.0, step=2.0, share=0.5, sqnr=10.0)
    assert d.steps == 1.5
    assert Difference(name="y", max_abs=3.0, step=0.0, share=0.0, sqnr=0.0).steps == 0


def test_a_difference_is_measured(tmp_path: Path) -> None:
    model = nn.Linear(4, 4, bias=False).eval()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    qmodel = quantize(model, "int8_weight_only", [rand(6, 4)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    name = tamper(path, lambda t: t.data_type == onnx.TensorProto.FLOAT, lambda s: s * 2)
    assert "scale" in name
    x = torch.tensor([[0.0, 255.0, 10.0, 4.0]])
    (d,) = qfx.verify(qmodel, path, [x], optimize=False).differences
    assert d.max_abs == pytest.approx(255.0, rel=1e-6)  # twice the value
    assert d.step == pytest.approx(1.0, rel=1e-6)  # one 255th of the range 0 … 255
    assert d.steps == pytest.approx(255.0, rel=1e-6)
    assert d.share == 0.75  # all but the zero
    assert d.sqnr == pytest.approx(0.0, abs=1e-5)  # as much noise as signal


def test_names_chosen_at_export_do_not_matter(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x) + y, self.linear(x - y.sum())

    qmodel = quantize(seeded(Model()), "int8_static", [(rand(6, 4), rand(6, 3))])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", input_names=["p", "q"], output_names=["r", "s"])
    for per_node in (False, True):
        result = qfx.verify(qmodel, path, [(rand(5, 4), rand(5, 3))], per_node=per_node)
        assert result.max_steps <= 1
        assert len(result.differences) >= 2


def test_per_node_reads_external_data(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(512, 64)), "int8_static", [rand(4, 512)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", external_data=True)
    assert qfx.verify(qmodel, path, [rand(4, 512)], per_node=True).max_steps <= 255 * 512 * 2**-24


def test_a_nan_that_torch_does_not_compute_is_noticed_whichever_output_it_is_in(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    qmodel = quantize(seeded(Model()), "int8_weight_only", [rand(6, 4)])
    for name in ("a", "b"):
        path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
        tamper(path, lambda t: t.name == f"{name}.weight_scale", lambda s: s * np.nan)  # noqa: B023 (used at once)
        assert qfx.verify(qmodel, path, [rand(6, 4)]).max_steps == np.inf


def test_values_that_are_nan_on_both_sides_are_counted_and_not_called_equal(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y.log(), y

    qmodel = quantize(seeded(Model()), "int8_weight_only", [rand(6, 4)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", output_names=["log", "plain"])
    count = int(sum(qmodel(x)[0].isnan().sum() for x in (rand(6, 4), rand(5, 4))))
    assert 0 < count < 33
    with pytest.warns(
        UserWarning, match=rf"NaN in torch and in the file were not compared: {{'\w+': {count}}}"
    ) as found:
        result = qfx.verify(qmodel, path, [rand(6, 4), rand(5, 4)])
    assert [warning.filename for warning in found] == [__file__]
    assert [d.uncompared for d in result.differences] == [count, 0]
    assert result.max_steps <= 1
    assert f": {count} values not compared, NaN in both\nverdict: correct" in str(result)


def test_noise_where_torch_computes_zero_is_not_a_perfect_signal(tmp_path: Path) -> None:
    model = nn.Linear(4, 3).eval()
    nn.init.zeros_(model.bias)
    qmodel = quantize(model, "int8_weight_only", [rand(6, 4)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    assert qfx.verify(qmodel, path, [torch.zeros(2, 4)]).differences[0].sqnr == np.inf
    for wrong in (1.0, np.nan):
        tamper(path, lambda t: t.name == "bias", lambda b: b * 0 + wrong)  # noqa: B023 (used at once)
        assert qfx.verify(qmodel, path, [torch.zeros(2, 4)]).differences[0].sqnr == -np.inf


def test_an_empty_batch_is_refused(exported: tuple[qfx.QuantizedModel, Path]) -> None:
    with pytest.raises(qfx.ExportError, match=r"batch 1: input 0 is empty, shape \(0, 3, "):
        qfx.verify(*exported, [images(2)[0], images(2)[0][:0]])


def test_a_file_with_other_inputs_is_refused(exported: tuple[qfx.QuantizedModel, Path], tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.linear(x) + y
            return out

    other = quantize(seeded(Model()), "int8_static", [(rand(6, 4), rand(6, 3))])
    with pytest.raises(qfx.ExportError, match="has 1 inputs, but the model has 2: it is not this model's export"):
        qfx.verify(other, exported[1], [(rand(6, 4), rand(6, 3))])


def test_a_file_with_other_outputs_is_refused(tmp_path: Path) -> None:
    models = [nn.Linear(4, 3), nn.Linear(4, 5)]
    qmodels = [quantize(seeded(m), "int8_static", [rand(6, 4)]) for m in models]
    path = qfx.export.onnx(qmodels[0], tmp_path / "m.onnx")
    with pytest.raises(qfx.ExportError, match=r"shape \(6, 3\) in the file and \(6, 5\) in torch"):
        qfx.verify(qmodels[1], path, [rand(6, 4)])


@pytest.mark.parametrize("per_node", [False, True])
def test_what_is_no_file_of_a_graph_is_refused(
    per_node: bool, exported: tuple[qfx.QuantizedModel, Path], tmp_path: Path
) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\xff\xff")
    (tmp_path / "empty.onnx").touch()
    for name, message in {
        "": "only apply to ONNX Runtime" if per_node else r"has no config\.json; .*, or a \.gguf file",
        "missing.onnx": r"No such file.*; export it first with qfx\.export\.onnx",
        "n" * 300: "cannot be read: .*too long",
        "a\0b": "cannot be read: .*null",
        "broken.onnx": r"broken\.onnx cannot be loaded: .*; export it again with qfx\.export\.onnx",
        "empty.onnx": r"empty\.onnx cannot be loaded: ",
    }.items():
        with pytest.raises(qfx.ExportError, match=message):
            qfx.verify(exported[0], tmp_path / name, images(2), per_node=per_node)
    with pytest.raises(qfx.ExportError, match=r"^'missing\.onnx' cannot be read"):
        qfx.verify(exported[0], Path("missing.onnx"), images(2), per_node=per_node)


def test_no_batch_is_refused(exported: tuple[qfx.QuantizedModel, Path]) -> None:
    with pytest.raises(qfx.ExportError, match="no batch to verify with"):
        qfx.verify(*exported, [])


def test_a_batch_that_does_not_fit_is_refused(exported: tuple[qfx.QuantizedModel, Path]) -> None:
    with pytest.raises(qfx.QuarkError, match="captured for"):
        qfx.verify(*exported, [rand(2, 3, 9, 9)])


def test_session_options_may_be_given(exported: tuple[qfx.QuantizedModel, Path], tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "seen.onnx")
    assert qfx.verify(*exported, images(2), session_options=options).max_steps <= 1
    assert (tmp_path / "seen.onnx").exists()


def test_per_node_reports_a_file_whose_kernels_are_others_than_with_codes_shown(
    exported: tuple[qfx.QuantizedModel, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ONNX Runtime fuses what it does not where codes are outputs; here the file as it is has another weight."""
    qmodel, path = exported
    other = tmp_path / "other.onnx"
    other.write_bytes(path.read_bytes())
    tamper(other, *TAMPERING["a weight"])

    def opened(file: Path, *args: Any, edit: Any = None, **options: Any) -> OnnxRuntimeRunner:
        return OnnxRuntimeRunner(other if edit is None else file, *args, edit=edit, **options)

    clean = qfx.verify(qmodel, path, images(4), per_node=True)
    assert clean.shipped == ()
    monkeypatch.setattr("quark_fx.export.runtime.verification.OnnxRuntimeRunner", opened)
    result = qfx.verify(qmodel, path, images(4), per_node=True)
    assert max(difference.steps for difference in result.differences) <= 1
    assert [difference.name for difference in result.shipped] == ["output"]
    assert result.max_steps == result.shipped[0].steps > 1
    assert "file without per-node outputs" in str(result)
    assert "file without per-node outputs" not in str(clean)


@pytest.mark.parametrize("per_node", [False, True])
def test_a_file_that_does_not_run_is_named(per_node: bool, tmp_path: Path) -> None:
    of_tokens = quantize(seeded(nn.Embedding(9, 3)), "int8_static", [torch.ones(6, 4, dtype=torch.int64)])
    path = qfx.export.onnx(of_tokens, tmp_path / "m.onnx")
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(6, 4)])
    with pytest.raises(qfx.ExportError, match=r"m\.onnx does not run on batch 0: .*Unexpected input data type"):
        qfx.verify(qmodel, path, [rand(6, 4)], per_node=per_node)


def test_a_file_that_computes_something_else_is_said_to_be_of_another_model(tmp_path: Path) -> None:
    own, other = (quantize(seeded(nn.Linear(4, 3), seed), "int8_static", [rand(64, 4)]) for seed in (0, 1))
    path = qfx.export.onnx(own, tmp_path / "m.onnx")
    found = qfx.verify(other, path, [rand(64, 4)])
    assert found.unrelated
    assert "the file may be of another model" in str(found)
    assert not qfx.verify(own, path, [rand(64, 4)]).unrelated


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_file_of_other_sizes_or_of_another_model_is_named(
    runtime: Literal["onnxruntime", "openvino"], tmp_path: Path
) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    model = seeded(nn.Linear(4, 3))
    varies = quantize(model, "int8_static", [rand(6, 4)])
    fixed = quantize(model, "int8_static", [rand(6, 4)], dynamic_shapes={"input": None})
    path = qfx.export.onnx(fixed, tmp_path / "m.onnx")
    assert qfx.verify(varies, path, [rand(6, 4)], runtime=runtime).runtime == runtime
    with pytest.raises(
        qfx.ExportError, match=r"batch 1: .*shape \(6, 4\), .* shape \(5, 4\): the file is from another model"
    ):
        qfx.verify(varies, path, [rand(6, 4), rand(5, 4)], runtime=runtime)
    other = quantize(seeded(nn.Conv2d(4, 3, 1)), "int8_static", [rand(6, 4, 5, 5)])
    with pytest.raises(qfx.ExportError, match=r"batch 0: .*shape \(6, 4\), .*from another model, .*qfx\.export\.onnx"):
        qfx.verify(other, path, [rand(6, 4, 5, 5)], runtime=runtime)


def test_rounding_of_a_constant_output_is_no_difference(tmp_path: Path) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 40)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            return y, torch.softmax(y, -1).sum(-1)

    x = rand(8, 16)
    qmodel = quantize(seeded(Sums()), INT8_STATIC, [x])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, file, [x]).max_steps < 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Any:
        return self.a(x), self.b(x)


@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "quantize.* has shape"),
        (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 5)), "output has shape"),
        (Pair(), "has 2 outputs, but the model has 1"),
    ],
    ids=["wider inside", "other outputs", "more outputs"],
)
def test_the_file_of_another_model_is_refused_by_name(
    other: nn.Module, words: str, per_node: bool, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [rand(4, 8)]
    own, others = (quantize(m.eval(), qfx.presets.INT8_STATIC, batches) for m in (model, other))
    qfx.export.onnx(others, tmp_path / "other.onnx")
    if "quantize" in words and not per_node:
        assert qfx.verify(own, tmp_path / "other.onnx", batches).max_steps > 1  # from the outside they look alike
        return
    with pytest.raises(qfx.ExportError, match=rf"{words}.*not this model's export; export it again"):
        qfx.verify(own, tmp_path / "other.onnx", batches, per_node=per_node)


def test_an_output_that_was_not_compared_is_named() -> None:
    difference = Difference("logits", max_abs=0.0, step=1.0, share=0.0, sqnr=90.0)
    verification = Verification((difference,))
    assert verification["logits"] is difference
    with pytest.raises(
        qfx.ConfigError, match=r"unknown output or node 'logit'; choose one of logits; did you mean 'log"
    ):
        verification["logit"]


class Calculates(nn.Module):
    """A linear layer, and what a function makes of it and the input."""

    def __init__(self, function: Callable[[nn.Linear, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.linear, x)


def verified(model: nn.Module, batches: list[Tensor], path: Path, **options: Any) -> Verification:
    qmodel = quantize(model, "int8_static", batches)
    return qfx.verify(qmodel, qfx.export.onnx(qmodel, path), batches, **options)


@pytest.mark.parametrize("per_node", [False, True])
def test_an_output_of_random_numbers_is_not_comparable(per_node: bool, tmp_path: Path) -> None:
    batches = [rand(5, 6)]
    noisy = seeded(Calculates(lambda linear, x: linear(x) + torch.randn_like(x[:, :4])))
    found = verified(noisy, batches, tmp_path / "m.onnx", per_node=per_node)
    where = "the model draws random numbers in aten.randn_like.default at %randn_like"
    nothing_else = f"not comparable: {where}"
    assert found.verdict.startswith(f"correct; not comparable are output: {where}" if per_node else nothing_else)
    assert str(found).endswith(f"verdict: {found.verdict}")
    assert not found.unrelated
    assert found.first_wrong is None
    both = seeded(Calculates(lambda linear, x: (linear(x), linear(x) * torch.rand_like(x[:, :4]))))
    found = verified(both, batches, tmp_path / "m.onnx", per_node=per_node)
    assert found.verdict.startswith("correct; not comparable are output_1: the model draws")
    off = seeded(Calculates(lambda linear, x: nn.functional.scaled_dot_product_attention(*[linear(x)[None]] * 3)))
    assert verified(off, batches, tmp_path / "m.onnx", per_node=per_node).verdict == "correct"


def test_an_output_of_rounding_noise_alone_is_correct(tmp_path: Path) -> None:
    """A norm of one value is 0 but for rounding, which differs; a layer that computes something else is still wrong."""
    for model, batch in (
        (nn.GroupNorm(1, 1), rand(4, 1, 1, 1)),
        (nn.GroupNorm(1, 1), rand(4, 1, 1, 1, seed=2)),
        (Calculates(lambda linear, x: linear(x).softmax(-1).sum(-1)), rand(5, 6)),
    ):
        found = verified(nn.Sequential(model).eval(), [batch], tmp_path / "m.onnx")
        assert found.max_steps <= 1
        assert found.verdict == "correct"


def deep() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for index in range(30):
        convolution = nn.Conv2d(16 if index else 3, 16, 3, padding=1)
        nn.init.kaiming_normal_(convolution.weight)
        layers += [convolution, nn.ReLU()]
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_deep_network_is_judged_by_its_nodes_and_by_what_rounding_moves(
    runtime: Literal["onnxruntime", "openvino"], tmp_path: Path
) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    batches = [rand(2, 3, 16, 16, seed=i) for i in range(2)]
    qmodel = quantize(deep(), "int8_static", batches)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    found = qfx.verify(qmodel, path, batches, runtime=runtime)
    assert found.max_steps > 1
    assert found.verdict == "correct up to rounding in a deep network"

    def turned(codes: Any) -> Any:
        codes[3] = -codes[3]
        return codes

    tamper(path, lambda t: t.name == "10.weight_codes", turned)
    found = qfx.verify(qmodel, path, batches, runtime=runtime)
    assert not found.unrelated
    # The codes that the sixth convolution makes are the seventh that are made.
    assert found.verdict == f"wrong, from {calls(qmodel, 'quark_fx.quantize')[6].name} on"


def test_parts_of_a_joint_output_are_judged_by_their_own_range(tmp_path: Path) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.box, self.score = nn.Linear(8, 4), nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.box(x).exp() * 160, self.score(x).sigmoid()], -1)

    batches = [rand(8, 8)]
    qmodel = quantize(seeded(Head()), "int8_static", batches)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    found = qfx.verify(qmodel, path, batches)
    assert found.verdict == "correct"
    tamper(path, lambda t: t.name == "score.weight_codes", lambda codes: codes[::-1])
    found = qfx.verify(qmodel, path, batches)
    assert found["output"].steps > 20
    assert found["output"].step < 0.01
    assert found.verdict == "wrong, from output on"


def test_what_follows_an_order_of_equal_scores_is_not_wrong_by_itself(tmp_path: Path) -> None:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.score, self.box = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.stem(x).relu()
            scores, index = self.score(x).squeeze(-1).clamp(max=0.0).topk(20, 1)
            return {"scores": scores, "boxes": self.box(x).gather(1, index[..., None].expand(-1, -1, 4))}

    batches = [rand(2, 300, 8)]
    qmodel = quantize(seeded(Detector()), "int8_static", batches)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    found = qfx.verify(qmodel, path, batches)
    assert found["scores"].steps <= 1
    assert found["boxes"].max_abs > 0.1
    assert found.verdict.startswith("correct")
    tamper(path, lambda t: t.name == "stem.weight_codes", lambda codes: codes[::-1])
    assert qfx.verify(qmodel, path, batches).verdict.startswith("wrong, from ")


@pytest.mark.parametrize("preset", ["fp8_static", "mxfp4"])
def test_rounding_noise_leaves_codes_of_small_floats_alone(preset: str) -> None:
    qmodel = quantize(seeded(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))), preset, [rand(4, 32)])
    (moved,) = disturbed_outputs(qmodel.graph_module, [rand(4, 32)], 0)
    assert moved.shape == (4, 8)
    assert not torch.equal(moved, qmodel(rand(4, 32)))


@pytest.mark.parametrize(
    ("preset", "format", "runtime"),
    [
        ("int8_static", "qdq", "onnxruntime"),
        ("int8_static", "qoperator", "onnxruntime"),
        ("int4_weight_only", "matmul_nbits", "onnxruntime"),
        ("int8_static", "qdq", "openvino"),
    ],
)
def test_every_kind_of_file_is_called_correct_and_wrong_once_a_scale_is_another(
    preset: str, format: str, runtime: Any, tmp_path: Path
) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    config = qfx.presets.preset(preset).replace(target=runtime if runtime == "openvino" else "onnx")
    qmodel = quantize(mlp(), config, tokens())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    assert qfx.verify(qmodel, path, tokens(3), runtime=runtime).verdict.startswith("correct")
    tamper(path, lambda t: t.data_type == onnx.TensorProto.FLOAT and "scale" in t.name, lambda scale: scale * 2)
    assert qfx.verify(qmodel, path, tokens(3), runtime=runtime).verdict.startswith("wrong, from ")


def test_a_saved_model_gets_a_verdict_and_its_first_wrong_node(tmp_path: Path) -> None:
    qmodel = quantize(mlp(), "int8_static", tokens())
    qmodel.save(tmp_path)
    found = qfx.verify(qmodel, tmp_path, tokens(3))
    assert (found.runtime, found.verdict, found.max_steps) == ("torch", "correct", 0.0)
    other = copy.deepcopy(qmodel)
    weight: Any = calls(other, "aten.linear")[1].args[1]
    codes = tensor_of(other.graph_module, str(weight.args[0].target))
    codes[0] = -codes[0]
    other.save(tmp_path)
    found = qfx.verify(qmodel, tmp_path, tokens(3))
    assert found.verdict == f"wrong, from {weight.name} on"
    quantize(nn.Linear(8, 3).eval(), "int8_static", [rand(2, 8)]).save(tmp_path)
    with pytest.raises(ExportError, match="was saved from another model"):
        qfx.verify(qmodel, tmp_path, tokens(3))


def test_a_saved_model_that_draws_random_numbers_is_not_comparable(tmp_path: Path) -> None:
    qmodel = quantize(
        seeded(Calculates(lambda linear, x: linear(x + torch.randn_like(x)))), "int8_static", [rand(5, 6)]
    )
    qmodel.save(tmp_path)
    assert qfx.verify(qmodel, tmp_path, [rand(5, 6)]).verdict.startswith("not comparable: the model draws")


def test_a_trained_model_is_compared_with_the_files_of_its_conversion(tmp_path: Path) -> None:
    qat = qfx.prepare_qat(quantize(mlp(), "int8_static", tokens()))
    with torch.no_grad():
        for parameter in qat.parameters():
            parameter.add_(0.01)
    path = qfx.export.onnx(qat.convert(), tmp_path / "m.onnx")
    assert qfx.verify(qat, path, tokens(3)).verdict == "correct"
    assert qfx.verify(qat.quantized, path, tokens(3)).verdict.startswith("wrong, from ")
    qat.convert().save(tmp_path / "saved")
    assert qfx.verify(qat, tmp_path / "saved", tokens(3)).verdict == "correct"


def test_outputs_called_like_nodes_stand_for_themselves() -> None:
    class Swapped(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"randn_like": x * 2, "mul": x + torch.randn_like(x)}

    qmodel = quantize(Swapped().eval(), "int8_static", [rand(5, 6)])
    draws = random_draws(qmodel.graph_module, qmodel.signature.output_names, ["mul", "randn_like", "add"])
    where = "aten.randn_like.default at %randn_like"
    assert {name: value.partition(" (")[0] for name, value in draws.items()} == {"mul": where, "add": where}


def test_noise_on_operators_leaves_views_integers_and_the_largest_numbers() -> None:
    x, largest = rand(4, 6), torch.tensor(torch.finfo(torch.float32).min)
    with RoundingNoise(0):
        view, whole, masked, product = x.view(6, 4), x.int(), largest * 1.0, x * 1.0
        x.mul_(2.0)
    assert torch.equal(x.view(6, 4), view)
    assert whole.dtype == torch.int32
    assert masked.isfinite()
    assert 0 < float((product * 2 - x).abs().max()) < 1e-5
