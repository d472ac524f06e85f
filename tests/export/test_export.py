"""The ONNX file: what it holds, that it runs, and that ONNX Runtime fuses what it should."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, numpy_helper
from tiny import WHOLE_PRESETS, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import ZOO

import quark_fx as qfx
import quark_fx.export.to_onnx.lowering  # fills the table
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.export.to_onnx.translation import LOWERINGS, translate, translation_table
from quark_fx.numbers.formats import INT4, SM5, UINT4
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, PRESETS

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "cnn": (cnn, images),
    "mlp": (mlp, tokens),
}
everywhere = pytest.mark.parametrize(("name", "preset"), [(m, p) for m in MODELS for p in WHOLE_PRESETS])


def exported(qmodel: qfx.QuantizedModel, directory: Path, **options: Any) -> tuple[Path, onnx.ModelProto]:
    path = qfx.export.onnx(qmodel, directory / "model.onnx", **options)
    return path, onnx.load(path)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[qfx.QuantizedModel, Path]]:
    """Return the quantized model and its file, made once per pair of model and preset."""
    made: dict[tuple[str, str], tuple[qfx.QuantizedModel, Path]] = {}

    def make(name: str, preset: str) -> tuple[qfx.QuantizedModel, Path]:
        if (name, preset) not in made:
            model, data = MODELS[name]
            qmodel = quantize(model(), preset, data())
            made[name, preset] = qmodel, exported(qmodel, tmp_path_factory.mktemp(f"{name}-{preset}"))[0]
        return made[name, preset]

    return make


Exports = Callable[[str, str], tuple[qfx.QuantizedModel, Path]]


def session(path: Path, *, optimize: bool = True, optimized: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    options.log_severity_level = 4
    if optimized is not None:
        options.optimized_model_filepath = str(optimized)
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def kernels(path: Path) -> Counter[str]:
    """Return how often each operator is in the graph ONNX Runtime runs."""
    target = path.with_suffix(".optimized.onnx")
    session(path, optimized=target)
    return Counter(node.op_type for node in onnx.load(target).graph.node)


@everywhere
def test_every_preset_agrees_with_onnx_runtime_for_every_batch_size(name: str, preset: str, exports: Exports) -> None:
    qmodel, path = exports(name, preset)
    data = MODELS[name][1](4, 1, 7)
    # As it stands the file is the graph: sums in another order, which may move a value across a rounding boundary.
    assert qfx.verify(qmodel, path, data, optimize=False).max_steps <= 1
    # Fused kernels add in integers where torch adds in float32; E4M3 fusions are not implemented on CPUs.
    if not preset.startswith("fp8"):
        assert qfx.verify(qmodel, path, data, optimize=True).max_steps <= 1


@everywhere
def test_the_file_is_valid_and_of_the_pinned_versions(name: str, preset: str, exports: Exports) -> None:
    model = onnx.load(exports(name, preset)[1])
    onnx.checker.check_model(model, full_check=True)
    assert model.ir_version == 10
    assert {o.domain: o.version for o in model.opset_import}[""] == 21


@everywhere
def test_no_float_copy_of_a_quantized_weight_is_stored(name: str, preset: str, exports: Exports) -> None:
    model = onnx.load(exports(name, preset)[1])
    floats = {TensorProto.FLOAT, TensorProto.DOUBLE}
    if preset not in ("fp16", "bf16"):
        floats |= {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    originals = {tuple(sorted(p.shape)) for p in MODELS[name][0]().parameters() if p.dim() > 1}
    for tensor in model.graph.initializer:
        if tensor.data_type in floats:
            assert tuple(sorted(tensor.dims)) not in originals, tensor.name
    constants = [n for n in model.graph.node if n.op_type == "Constant"]
    assert all(
        np.prod(numpy_helper.to_array(a.t).shape) <= 8 for n in constants for a in n.attribute if a.HasField("t")
    )
    assert not {"Identity", "Dropout"} & {n.op_type for n in model.graph.node}


def another_order(terms: int) -> float:
    """Return what sums of so many terms in another order may differ by, in steps of a 255th of the range."""
    return 255 * terms * 2**-24


WEIGHT_TYPES = {
    "int8_static": {TensorProto.INT8},
    "int8_dynamic": {TensorProto.INT8},
    "int8_static_mse": {TensorProto.INT8},
    "int8_weight_only": {TensorProto.INT8},
    "int16_act_int8_weight": {TensorProto.INT8},
    "fp8_static": {TensorProto.FLOAT8E4M3FN},
    "fp16": {TensorProto.FLOAT16},
    "bf16": {TensorProto.BFLOAT16},
    "xint8": {TensorProto.INT8},
}


@everywhere
def test_weights_are_stored_in_the_type_of_their_format(name: str, preset: str, exports: Exports) -> None:
    model = onnx.load(exports(name, preset)[1])
    shapes = [tuple(sorted(p.shape)) for p in MODELS[name][0]().parameters() if p.dim() > 1]
    stored = [t for t in model.graph.initializer if tuple(sorted(t.dims)) in shapes]
    assert sorted(tuple(sorted(t.dims)) for t in stored) == sorted(shapes)
    types = {t.data_type for t in stored}
    if preset == "int4_weight_only":
        expected = {TensorProto.INT4, TensorProto.INT8}
        packed = [t for t in stored if t.data_type == TensorProto.INT4]
        assert all(len(t.raw_data) == (int(np.prod(t.dims)) + 1) // 2 for t in packed)
    else:
        expected = WEIGHT_TYPES[preset]
    assert types == expected


def test_names_and_dynamic_dimensions_are_kept(exports: Exports) -> None:
    (given,) = session(exports("mlp", "int8_static")[1]).get_inputs()
    assert given.name == "ids"
    assert all(isinstance(d, str) for d in given.shape)
    (image,) = session(exports("cnn", "int8_static")[1]).get_inputs()
    assert (image.name, image.shape[1:]) == ("x", [3, 8, 8])
    assert isinstance(image.shape[0], str)


def test_outputs_are_named_by_the_keys_of_the_result_or_as_asked(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = self.linear(x)
            return {"logits": y, "states": (x * 2, y + 1)}

    qmodel = quantize(seeded(Model()), "int8_static", [rand(6, 4)])
    path, _ = exported(qmodel, tmp_path)
    assert [o.name for o in session(path).get_outputs()] == ["logits", "states.0", "states.1"]
    assert qfx.verify(qmodel, path, [rand(3, 4)]).max_steps <= another_order(4)
    path, _ = exported(qmodel, tmp_path, input_names=["pixels"], output_names=["a", "b", "c"])
    assert [o.name for o in session(path).get_outputs()] == ["a", "b", "c"]
    assert [i.name for i in session(path).get_inputs()] == ["pixels"]


@pytest.mark.parametrize("result", ["input", "twice", "constant"])
def test_an_output_that_no_operator_computes_is_exported(result: str, tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y = self.linear(x)
            return y, {"input": x, "twice": y, "constant": self.linear.bias}[result]

    qmodel = quantize(seeded(Model()), "int8_static", [rand(6, 4)])
    path, _ = exported(qmodel, tmp_path)
    assert len(session(path).get_outputs()) == 2
    assert qfx.verify(qmodel, path, [rand(3, 4)]).max_steps <= another_order(4)


def test_a_model_in_half_precision_is_exported(tmp_path: Path) -> None:
    model, x = seeded(nn.Linear(32, 3)).half(), rand(6, 32).half()
    for preset in ("int8_static", "int8_dynamic", "int8_weight_only", "int4_weight_only"):
        qmodel = quantize(model, preset, [x])
        path, _ = exported(qmodel, tmp_path)
        (got,) = session(path, optimize=False).run(None, {"input": x.numpy()})
        assert got.dtype == np.float16
        # float16 sums of 32 products, in two orders.
        np.testing.assert_allclose(got, qmodel(x).detach().numpy(), rtol=0, atol=32 * 2**-11)


def test_per_token_scales_are_exported(tmp_path: Path) -> None:
    for symmetric in (True, False):
        fmt = "int8" if symmetric else "uint8"
        spec = TensorSpec.from_dict({"format": fmt, "granularity": "token", "dynamic": True})
        x = rand(3, 5, 8)
        qmodel = quantize(seeded(nn.Linear(8, 4)), INT8_DYNAMIC.replace(input=spec), [x])
        path, _ = exported(qmodel, tmp_path)
        data = [x, rand(1, 2, 8, seed=3) * torch.tensor([1e-3, 1e3])[None, :, None]]
        assert qfx.verify(qmodel, path, data).max_steps <= another_order(8)


@pytest.mark.parametrize("granularity", ["tensor", "token"])
@pytest.mark.parametrize("symmetry", ["symmetric", "symmetric_full", "asymmetric"])
@pytest.mark.parametrize("fmt", ["int4", "uint4", "int2", "uint2"])
def test_codes_of_less_than_a_byte_may_be_measured_at_run_time(
    fmt: str, symmetry: str, granularity: str, tmp_path: Path
) -> None:
    """They are held in bytes, which no opset is too old for."""
    spec = TensorSpec.from_dict({"format": fmt, "symmetry": symmetry, "granularity": granularity, "dynamic": True})
    data = [rand(3, 8), rand(1, 8, seed=3) * 1e3]
    qmodel = quantize(seeded(nn.Linear(8, 4)), INT8_DYNAMIC.replace(input=spec), data)
    for opset in (21, 17):
        path = qfx.export.onnx(qmodel, tmp_path / f"{opset}.onnx", opset=opset)
        assert qfx.verify(qmodel, path, data).max_steps <= another_order(8)


@pytest.mark.parametrize("fmt", [INT4, UINT4], ids=str)
@pytest.mark.parametrize("features", [33, 70])
def test_ragged_groups_are_exported(fmt: Any, features: int, tmp_path: Path) -> None:
    spec = TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=32)
    qmodel = quantize(seeded(nn.Linear(features, 6)), QuantConfig(weight=spec), [rand(4, features)])
    path, model = exported(qmodel, tmp_path)
    stored = {t.data_type for t in model.graph.initializer}
    assert (TensorProto.INT4 if fmt == INT4 else TensorProto.UINT4) in stored
    assert qfx.verify(qmodel, path, [rand(5, features)], optimize=False).max_steps <= another_order(features)


@pytest.mark.parametrize("size", ["small", "large"])
def test_external_data_is_written_beside_the_file_and_read_back(size: str, tmp_path: Path) -> None:
    model = seeded(nn.Linear(8, 4) if size == "small" else nn.Linear(512, 64))
    x = rand(4, model.in_features)
    qmodel = quantize(model, "int8_static", [x])
    path, _ = exported(qmodel, tmp_path, external_data=True)
    if size == "large":
        assert (tmp_path / "model.onnx.data").stat().st_size >= 512 * 64
        assert path.stat().st_size < 512 * 64
    assert qfx.verify(qmodel, path, [x]).max_steps <= another_order(model.in_features)
    exported(qmodel, tmp_path, external_data=False)
    assert path.stat().st_size >= (512 * 64 if size == "large" else 0)


def test_leftovers_of_a_killed_export_go_with_the_next(tmp_path: Path) -> None:
    for name in (".m.onnx-0123456789abcdef", ".m.onnx-ab1_cde2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.onnx.data").write_bytes(b"half")
    qfx.export.onnx(quantize(mlp(), INT8_STATIC, tokens()), tmp_path / "m.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_the_file_is_about_a_quarter_of_the_float_one(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 64)))
    floats = sum(p.numel() * 4 for p in model.parameters())
    for preset, share in (
        ("int8_static", 0.27),
        ("int8_dynamic", 0.27),
        ("int4_weight_only", 0.17),
        ("fp8_static", 0.27),
    ):
        path, _ = exported(quantize(model, preset, [rand(4, 256)]), tmp_path)
        assert path.stat().st_size < share * floats + 16384, preset  # 16 KiB of graph


# Fusions: what of the graph ONNX Runtime runs in integers -----------------------------------------------------------


class Chain(nn.Module):
    """Three convolutions with relus, a residual add, a max pool and a classifier: all of it has integer kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.pool, self.head = nn.Conv2d(8, 8, 1), nn.MaxPool2d(2), nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = torch.relu(self.b(x) + self.c(x))
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


def test_a_static_cnn_runs_in_integer_kernels_from_end_to_end(tmp_path: Path) -> None:
    qmodel = quantize(seeded(Chain()), "int8_static", images(4, 4))
    path, model = exported(qmodel, tmp_path)
    written = Counter(node.op_type for node in model.graph.node)
    assert written["Relu"] == 0  # saturation at the zero point performs them
    run = kernels(path)
    assert run["QLinearConv"] == written["Conv"] == 3
    assert run["QLinearAdd"] == 1
    assert run["QGemm"] == 1
    assert (run["Conv"], run["Gemm"], run["Add"], run["FusedConv"]) == (0, 0, 0, 0)
    assert run["QuantizeLinear"] == 1  # of the input
    assert run["DequantizeLinear"] == 0  # the last product writes floats


def test_static_linears_over_sequences_become_integer_products(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8, bias=False)))
    path, _ = exported(quantize(model, "int8_static", [rand(2, 3, 16)]), tmp_path)
    run = kernels(path)
    assert run["MatMulIntegerToFloat"] == 2
    assert run["MatMul"] + run["Gemm"] == 0


class Product(nn.Module):
    """An operator of an activation, a weight, and a bias, and another one after it."""

    def __init__(self, call: Callable[..., Tensor], *size: int) -> None:
        super().__init__()
        self.call, self.weight, self.bias = call, nn.Parameter(torch.zeros(size)), nn.Parameter(torch.zeros(8))
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.call(x, self.weight, self.bias)))
        return y


PRODUCTS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], bool]] = {
    "linear of a matrix": (F.linear, (8, 16), (4, 16), True),
    "linear of a sequence": (F.linear, (8, 16), (2, 3, 16), True),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), (16, 8), (4, 16), True),
    "addmm of a factor": (lambda x, w, b: torch.addmm(b, x, w, alpha=2), (16, 8), (4, 16), False),
    "addmm of a share of the bias": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5), (16, 8), (4, 16), False),
    "addmm of a transposed weight": (lambda x, w, b: torch.addmm(b, x, w.t()), (8, 16), (4, 16), True),
    "mm": (lambda x, w, b: x.mm(w), (16, 8), (4, 16), True),
    "matmul of a sequence": (lambda x, w, b: x @ w, (16, 8), (2, 3, 16), True),
    "matmul of a transposed weight": (lambda x, w, b: x @ w.T, (8, 16), (2, 3, 16), True),
    "linear of a transposed weight": (lambda x, w, b: F.linear(x, w.T), (16, 8), (4, 16), True),
    "a weight that is read twice": (lambda x, w, b: F.linear(x, w) * F.linear(x + 1, w), (8, 16), (4, 16), False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_dynamic_products_become_one_kernel_each(name: str, tmp_path: Path) -> None:
    call, size, shape, integer = PRODUCTS[name]
    x = rand(*shape)
    qmodel = quantize(seeded(Product(call, *size)), "int8_dynamic", [x])
    path, model = exported(qmodel, tmp_path)
    run, written = kernels(path), Counter(node.op_type for node in model.graph.node)
    assert written["MatMulInteger"] == run["DynamicQuantizeMatMul"] + run["MatMulIntegerToFloat"] == 1 + integer
    assert written["MatMul"] + written["Gemm"] == (0 if integer else 1 + ("twice" in name))
    assert written["QuantizeLinear"] == written["Transpose"] == 0
    result = qfx.verify(qmodel, path, [x, rand(*shape, seed=1)], per_node=True)
    assert [difference.name for difference in result.differences] == ["output"]  # codes are measured twice
    assert result.max_steps <= 1
    if "twice" not in name:  # the option does not support constants that are read twice
        options = onnxruntime.SessionOptions()
        options.add_session_config_entry("session.x64quantprecision", "1")
        safe = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        np.testing.assert_allclose(safe.run(None, {"x": x.numpy()})[0], qmodel(x).detach(), rtol=0, atol=1e-4)


def test_two_linears_of_one_input_measure_it_once(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.q(x) * self.k(x)
            return out

    path, model = exported(quantize(seeded(Model()), "int8_dynamic", [rand(4, 16)]), tmp_path)
    assert Counter(n.op_type for n in model.graph.node)["DynamicQuantizeLinear"] == 1
    assert kernels(path)["MatMulIntegerToFloat"] == 2


class Residual(nn.Module):
    """A normalization of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x + self.linear(x))
        return y


def test_a_dimension_that_a_weight_settles_is_a_number(tmp_path: Path) -> None:
    path, _ = exported(quantize(seeded(Residual()), "int8_static", [rand(4, 6, 32)]), tmp_path)
    (given,) = session(path).get_inputs()
    assert [isinstance(size, str) for size in given.shape] == [True, True, False]
    assert given.shape[2] == 32


@pytest.mark.parametrize("format", ["qdq", "qoperator"])
def test_a_sum_is_not_fused_with_its_norm_by_a_slower_kernel(format: str, tmp_path: Path) -> None:
    data = [rand(4, 6, 32, seed=seed) for seed in (1, 2)]
    qmodel = quantize(seeded(Residual()), "int8_static", data)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    run = kernels(path)
    assert run["LayerNormalization"] == 1
    assert not run["SkipLayerNormalization"]
    assert qfx.verify(qmodel, path, data).max_steps <= 1


@pytest.mark.parametrize("shape", [(4, 64), (2, 3, 64)], ids=["matrix", "sequence"])
def test_int4_linears_become_matmul_n_bits(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 8, bias=False)))
    config = PRESETS["int4_weight_only"].replace(group_size=16)
    qmodel = quantize(model, config, [rand(*shape)])
    path, _ = exported(qmodel, tmp_path)
    run = kernels(path)
    assert run["MatMulNBits"] == 2
    assert run["MatMul"] + run["Gemm"] + run["DequantizeLinear"] == 0


# Refusals -----------------------------------------------------------------------------------------------------------


def test_a_format_without_an_onnx_type_is_refused_with_the_users_line(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(self.linear(x))
            return out

    config = QuantConfig(weight=TensorSpec(format=INT4), input=TensorSpec(format=SM5), target=Target.TORCH)
    qmodel = quantize(seeded(Model()), config, [rand(4, 4)])
    line = Model.forward.__code__.co_firstlineno + 1
    with pytest.raises(qfx.ExportError, match=rf"sm5: quark_fx.quantize.*test_export.py:{line}, module linear\)"):
        exported(qmodel, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unknown_operator() -> Any:
    torch_library: Any = torch.library
    library = torch_library.Library("quark_fx_test", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: x + 1, "CompositeExplicitAutograd")
    library.impl("mystery", lambda x: torch.empty_like(x), "Meta")
    yield torch.ops.quark_fx_test.mystery
    library._destroy()


def test_every_operator_without_a_lowering_is_listed_with_the_users_line(
    unknown_operator: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = unknown_operator(x)
            y = self.linear(x)
            return unknown_operator(y)

    qmodel = quantize(seeded(Model()), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ExportError) as caught:
        exported(qmodel, tmp_path)
    message, first = str(caught.value), Model.forward.__code__.co_firstlineno
    assert message.startswith("2 node(s) have no ONNX lowering")
    for line in (first + 1, first + 3):
        assert (
            f"quark_fx_test.mystery.default at %mystery{'_1' if line > first + 1 else ''} ({__file__}:{line})"
            in message
        )
    assert "quark_fx.export.lowers" in message


class Modulated(nn.Module):
    """A convolution with a kernel for each sample, which is a group."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.style = nn.Parameter(torch.zeros(6, 4, 3, 3)), nn.Linear(5, 4)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        n, (h, w) = x.shape[0], x.shape[2:]
        kernels = self.kernel[None] * self.style(z)[:, None, :, None, None]
        return nn.functional.conv2d(x.reshape(1, n * 4, h, w), kernels.flatten(0, 1), groups=n, padding=1).view(
            n, 6, h, w
        )


def test_groups_that_vary_with_the_batch_are_refused_with_the_shapes_that_fix_them(tmp_path: Path) -> None:
    model, batch = seeded(Modulated()), (rand(2, 4, 6, 7), rand(2, 5))
    free = {"x": {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}, "z": {0: Dim.AUTO}}
    qmodel = quantize(model, "int8_static", [batch], dynamic_shapes=free)
    with pytest.raises(qfx.ExportError) as raised:
        qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    message = str(raised.value)
    assert message.startswith("the number of groups of 1 convolution(s) varies with the inputs")
    assert "aten.conv2d.default at %conv2d" in message
    fixed = eval(message.partition("dynamic_shapes=")[2])
    assert fixed == {"x": {2: Dim.AUTO, 3: Dim.AUTO}, "z": {0: Dim.AUTO}}
    qmodel = quantize(model, "int8_static", [batch], dynamic_shapes=fixed)
    file = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    assert qfx.verify(qmodel, file, [(rand(2, 4, 3, 9), rand(2, 5))]).max_steps < 1e-3


def test_a_lowering_that_is_registered_is_used(
    unknown_operator: Callable[[Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxscript import opset21 as op

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return unknown_operator(self.linear(x))

    def mystery(x: Any) -> Any:
        return op.Add(x, op.Constant(value_float=1.0))

    monkeypatch.setitem(LOWERINGS, "quark_fx_test.mystery.default", mystery)
    qmodel = quantize(seeded(Model()), "int8_static", [rand(4, 4)])
    path, _ = exported(qmodel, tmp_path)
    assert qfx.verify(qmodel, path, [rand(3, 4)]).max_steps <= another_order(4)


def misfit() -> None: ...


def broken(x: Any) -> Any:
    raise KeyError("oops")


def forgetful(x: Any) -> None: ...


def generous(x: Any) -> Any:
    return x, x


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (misfit, r"TypeError: misfit\(\) takes 0 positional arguments but 1 was given"),
        (broken, r"KeyError: 'oops'"),
        (forgetful, r"TypeError: it returns NoneType, but the operator has 1 output"),
        (generous, r"TypeError: it returns 2 values, but the operator has 1 output"),
    ],
)
def test_a_lowering_that_fails_is_named_with_its_node_and_its_error(
    function: Callable[..., Any], cause: str, unknown_operator: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return unknown_operator(unknown_operator(self.linear(x)))

    qfx.export.lowers("quark_fx_test.mystery.default")(function)
    qmodel = quantize(seeded(Model()), "int8_static", [rand(4, 4)])
    line = Model.forward.__code__.co_firstlineno + 1
    with pytest.raises(
        qfx.ExportError,
        match=rf"^the ONNX lowering {__name__}\.{function.__name__} fails:\n"
        rf"  quark_fx_test\.mystery\.default at %mystery \({re.escape(__file__)}:{line}\)\n"
        rf"  {cause}.*\nCorrect the function",
    ):
        exported(qmodel, tmp_path)


def test_operators_without_a_lowering_are_listed_as_the_model_has_them(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.special.bessel_j0(self.linear(x))
            values: Tensor = torch.linalg.eigvalsh(y)
            return values

    qmodel = quantize(seeded(Model()), "int8_static", [rand(4, 4)])
    line = Model.forward.__code__.co_firstlineno + 1
    with pytest.raises(qfx.ExportError) as caught:
        exported(qmodel, tmp_path)
    first, *rows, remedy = str(caught.value).splitlines()
    assert first == "2 node(s) have no ONNX lowering:"
    assert rows == [
        f"  aten.special_bessel_j0.default at %special_bessel_j0 ({__file__}:{line}), which torch decomposes into "
        "prims.bessel_j0.default",
        f"  aten.linalg_eigvalsh.default at %linalg_eigvalsh ({__file__}:{line + 1}), which torch decomposes into "
        "aten._linalg_eigh.default",
    ]
    assert "quark_fx.export.lowers" in remedy


def test_a_lowering_of_a_misspelled_operator_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        qfx.ExportError, match=r"torch has no operator aten\.relo\.default; .*mean 'aten\.relu\.default'"
    ):
        qfx.export.lowers("aten.relo.default")(misfit)
    name = "library_that_is_imported_later.mystery.default"
    qfx.export.lowers(name)(misfit)
    assert LOWERINGS[name] is misfit


@pytest.mark.parametrize("name", sorted(LOWERINGS))
def test_every_lowering_is_of_an_operator_that_exists(name: str) -> None:
    if name.startswith("transformers"):
        pytest.importorskip("transformers")
        pytest.skip("registered by transformers when it is needed")
    namespace, packet, overload = name.split(".")
    assert getattr(getattr(getattr(torch.ops, namespace), packet), overload) in translation_table()


def test_a_missing_directory_is_refused_before_any_work(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ExportError, match=r"the directory .*nowhere does not exist; create it first"):
        qfx.export.onnx(qmodel, tmp_path / "nowhere" / "model.onnx")


def test_a_directory_or_an_unwritable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ExportError, match="is a directory, a device or a pipe"):
        qfx.export.onnx(qmodel, tmp_path)
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may write everywhere
    with pytest.raises(qfx.ExportError, match=r"cannot be written: .* is not writable; choose another path"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")


@pytest.mark.parametrize("name", [f"{'n' * 300}.onnx", "a\0b.onnx"])
def test_a_path_that_there_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ExportError, match=r"cannot be written: .*; choose another path"):
        qfx.export.onnx(qmodel, tmp_path / name)


def test_whether_data_are_external_is_true_or_false(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ConfigError, match="external_data of onnx must be True or False or None, not 'yes'"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", external_data="yes")  # type: ignore[arg-type]


def test_an_argument_that_there_is_not_is_named_with_the_nearest(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    with pytest.raises(qfx.ConfigError, match=r"onnx has no argument formats; it has qmodel, path, .*mean 'format'"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", formats="qdq")  # type: ignore[call-arg]
    with pytest.raises(qfx.ConfigError, match=r"verify has no argument per_nodes; .*did you mean 'per_node'"):
        qfx.verify(qmodel, tmp_path / "m.onnx", [], per_nodes=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"onnx\(\) missing 1 required positional argument: 'path'"):
        qfx.export.onnx(qmodel)  # type: ignore[call-arg]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_what_is_no_file_is_not_replaced_by_one(name: str, tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    os.mkfifo(tmp_path / name)
    with pytest.raises(qfx.ExportError, match=rf"{name} is a directory, a device or a pipe"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", external_data=True)
    assert (tmp_path / name).is_fifo()
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_plain_string_is_a_path(tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.Linear(4, 3)), "int8_static", [rand(4, 4)])
    assert qfx.export.onnx(qmodel, str(tmp_path / "m.onnx")) == tmp_path / "m.onnx"


def test_exporting_leaves_the_quantized_model_as_it_was(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    before, x = str(qmodel.graph_module.graph), images(3)[0]
    expected = qmodel(x)
    exported(qmodel, tmp_path)
    assert str(qmodel.graph_module.graph) == before
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=0)
    first = (tmp_path / "model.onnx").read_bytes()
    exported(qmodel, tmp_path)
    assert (tmp_path / "model.onnx").read_bytes() == first  # the same file every time


# Moved codes ---------------------------------------------------------------------------------------------------------


MOVES: dict[str, Callable[[Tensor], Any]] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "reshape": lambda x: x.reshape(x.shape[0], 2, 2, 64),
    "flatten": lambda x: x.flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "slice": lambda x: x[:, 1:, :, ::2],
    "max_pool": lambda x: nn.functional.max_pool2d(x, 2),
    "two moves": lambda x: nn.functional.max_pool2d(x, 2).permute(0, 2, 3, 1),
    "output and input of a sum": lambda x: (x.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1) + 1),
    "one output twice": lambda x: (x.flatten(2), x.flatten(2)),
}


class Moved(nn.Module):
    """A convolution whose values leave the graph, moved."""

    def __init__(self, move: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.conv, self.move = nn.Conv2d(3, 4, 1), move

    def forward(self, x: Tensor) -> Any:
        return self.move(self.conv(x))


@pytest.mark.parametrize("preset", ["xint8", "int16_act_int8_weight"])
@pytest.mark.parametrize("move", MOVES)
def test_moved_codes_of_a_signed_type_may_leave_the_graph(move: str, preset: str, tmp_path: Path) -> None:
    x = images(4)
    qmodel = quantize(seeded(Moved(MOVES[move])), preset, x)
    path, model = exported(qmodel, tmp_path)
    assert [value.name for value in model.graph.output] == list(qmodel.signature.output_names)
    assert qfx.verify(qmodel, path, x).max_steps < 0.01


class Differences(nn.Module):
    """`torch.diff` in all its forms, and batch norms that no convolution takes up, one without an affine map."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm, self.plain = nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.plain(torch.relu(self.norm(torch.relu(self.linear(x)))))
        return (
            torch.diff(x),
            torch.diff(x, dim=0),
            torch.diff(x, dim=1, prepend=x[:, :1] + 1, append=x[:, 1:3]),
            torch.diff(x > 0).float(),
            torch.diff((x * 9).to(torch.int64), append=torch.zeros_like(x[:, :1], dtype=torch.int64)),
            torch.diff(x, n=2),
        )


def test_a_lone_sample_of_a_transposed_convolution_is_exported(tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Linear(6, 6), nn.ConvTranspose1d(3, 4, 3, stride=2, padding=1)))
    qmodel = qfx.quantize(model, "int8_weight_only", [rand(3, 6)], dynamic_shapes={"input": None}, progress=False)
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    assert qfx.verify(qmodel, path, [rand(3, 6)]).max_steps < 0.01


def test_differences_and_norms_are_those_of_torch(tmp_path: Path) -> None:
    qmodel = quantize(seeded(Differences()), "int8_weight_only", [rand(4, 6)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx")
    assert qfx.verify(qmodel, path, [rand(4, 6), rand(7, 6, seed=2)]).max_steps < 0.01


def language_model() -> tuple[nn.Module, Any]:
    """Return a Llama as users call it, with tokens alone: transformers takes differences of their positions."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, use_cache=False))
    return model, {"input_ids": tokens()[0] % 32}


def transposed() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.ConvTranspose2d(3, 4, 3, 2, 1, 1), nn.ConvTranspose2d(4, 2, 2)), images(2)[0]


MADE = {"language model": language_model, "transposed": transposed}


@pytest.mark.parametrize("name", ["language model", "Mixtral", "DenseNet", "transposed"])
def test_no_operator_has_the_whole_graph_decomposed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch decomposes a graph by tracing it again, which takes several times as long as translating it."""

    def translated(*args: Any, decompose: bool, **options: Any) -> Any:
        assert not decompose, "an operator has no lowering"
        return translate(*args, decompose=decompose, **options)

    monkeypatch.setattr("quark_fx.export.to_onnx.export_onnx.translate", translated)
    model, batch = (ZOO[name].make(), ZOO[name].batches[0]) if name in ZOO else MADE[name]()
    qfx.export.onnx(quantize(seeded(model), "int8_weight_only", [batch]), tmp_path / "m.onnx")


def test_only_operands_of_several_dtypes_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX multiplies values of one dtype; for the cast, torch computes a whole graph again."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x)) * torch.arange(6)

    computed, call = [], torch.fx.Interpreter.call_function

    def counted(self: Any, target: Any, args: Any, kwargs: Any) -> Any:
        computed.append(str(target))
        return call(self, target, args, kwargs)

    qmodel = quantize(seeded(Scaled()), "int8_static", [rand(4, 6)])
    monkeypatch.setattr(torch.fx.Interpreter, "call_function", counted)
    path, _ = exported(qmodel, tmp_path)
    monkeypatch.undo()
    assert computed == ["prims.convert_element_type.default", "aten.mul.Tensor"]
    assert qfx.verify(qmodel, path, [rand(4, 6)]).max_steps <= 1


def test_data_that_protobuf_does_not_hold_are_external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quark_fx.export.to_onnx.edit.stored_bytes", lambda model: 2**31)
    qfx.export.onnx(quantize(mlp(), "int8_weight_only", tokens()), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").exists()
