"""Graphs with a KV cache, written through the exporters of `transformers`, generate what torch generates."""

from __future__ import annotations

import copy
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from interruptions import interrupted
from tiny import all_but
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter
from transformers.exporters.quantizers import ExportQuantizer

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, TensorSpec
from quark_fx.data.cache_names import CACHE_NAMES, held_in_cache, returned_cache
from quark_fx.errors import CalibrationError, ExportError
from quark_fx.export import CacheScales, GenerationQuantizer, generator, share_weights
from quark_fx.export.generation.generator import _options
from quark_fx.export.generation.int8_cache import use_int8_cache
from quark_fx.export.generation.quantizer import _hook_into_transformers, _with_our_lowerings
from quark_fx.export.generation.traced_weights import look_up_codes, split_fused_products
from quark_fx.export.runtime.session import session_options
from quark_fx.numbers.formats import INT4, INT8
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_WEIGHT_ONLY

SHARED: dict[str, Any] = {"vocab_size": 96, "max_position_embeddings": 96, "bos_token_id": 0, "eos_token_id": 0}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}
PROMPT = torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(0))


def llama() -> PretrainedConfig:
    """Four heads share two keys; the head is the embedding."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    tied = {"tie_word_embeddings": True, "num_key_value_heads": 2}
    return LlamaConfig(**SHARED, **sizes, **tied, pad_token_id=None, initializer_range=0.2)


def qwen3() -> PretrainedConfig:
    """Norms of queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen3Config(**SHARED, **sizes, num_key_value_heads=1, head_dim=16, initializer_range=0.2)


def gpt2() -> PretrainedConfig:
    """Transposed weights with biases, positions that are looked up, a head that is the embedding."""
    return GPT2Config(**SHARED, n_embd=32, n_layer=1, n_head=2, n_inner=64, initializer_range=0.2)


def opt() -> PretrainedConfig:
    """Biases everywhere; positions are counted from the mask."""
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return OPTConfig(**SHARED, **sizes, word_embed_proj_dim=32, pad_token_id=1, init_std=0.2)


@cache
def captured(config: Callable[[], PretrainedConfig]) -> qfx.Session:
    """Capture a model of random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config()).eval()
    return qfx.Session(model, [{"input_ids": PROMPT}])


def eager(config: Callable[[], PretrainedConfig], preset: Any) -> Any:
    """Return a quantized model of random weights."""
    return qfx.quantize(captured(config), preset).eager()


def export(model: Any, quantizer: GenerationQuantizer, fusions: str | None = None, **inputs: Tensor) -> Any:
    """Export prefill and decode."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    config = OnnxConfig(dynamic=True, ort_fusions=fusions, quantizer=quantizer)
    return OnnxExporter().export_for_generation(model, inputs or {"input_ids": PROMPT}, config)


def operators(program: ir.Model) -> Counter[str]:
    """Count the operators of a graph."""
    return Counter(node.op_type for node in program.graph)


def require_same_codes(runs: Any, model: Any, scales: CacheScales) -> None:
    """Raise if the codes that graphs return are not those of torch's keys and values, but for ties."""
    rounded, past = scales.cache(), None
    for ids, positions in ((PROMPT, torch.arange(9)), (PROMPT[:, :1], torch.tensor([9]))):
        inputs = {"input_ids": ids, "position_ids": positions.expand(2, -1), "use_cache": True}
        with torch.no_grad():
            model(**inputs, past_key_values=rounded)
        past, again = [returned_cache(runs(**inputs, **{name: past})) for name in CACHE_NAMES]
        assert all(torch.equal(one.keys, other.keys) for one, other in zip(past.layers, again.layers, strict=True))
        for index, (ours, theirs) in enumerate(zip(past.layers, rounded.layers, strict=True)):
            for kind in ("keys", "values"):
                expected = scales.quantize(f"layers.{index}.{kind}", getattr(theirs, kind))
                codes = getattr(ours, kind)
                assert codes.dtype == torch.int8
                assert (codes != expected).float().mean() < 0.01


@pytest.mark.parametrize("turned", [0, 1])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_a_fused_product_is_split_where_its_weight_is_quantized(turned: int, alpha: float) -> None:
    draw = np.random.default_rng(0)
    constants = [_stored("codes", draw.integers(-9, 9, (4, 4), np.int8)), _stored("scale", np.float32(0.5))]
    weight = ir.node("DequantizeLinear", constants)
    x = _input("x", [3, 4])
    attributes = {"transB": turned, "alpha": alpha}
    product = ir.node("FusedMatMul", [x, weight.outputs[0]], attributes, domain="com.microsoft", name="product")
    model = _model([x], [weight, product], constants)
    feed = draw.integers(-9, 9, (3, 4)).astype(np.float32)  # whole numbers: sums are exact in any order
    expected = _run(model, x=feed)
    assert split_fused_products(model) == 1
    assert not operators(model)["FusedMatMul"]
    np.testing.assert_array_equal(_run(model, x=feed), expected)


# Whole models --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fused() -> SimpleNamespace:
    """A Llama of int4 weights, whose head is the embedding, in ONNX Runtime's fused operators."""
    qmodel = qfx.quantize(captured(llama), INT4_WEIGHT_ONLY.replace(overrides=()))
    model: Any = qmodel.eager()
    exported = export(model, GenerationQuantizer("matmul_nbits"), "cpu")
    return SimpleNamespace(qmodel=qmodel, model=model, exported=exported)


def test_a_fused_llama_of_int4_weights_generates_what_torch_generates(fused: SimpleNamespace) -> None:
    for component in fused.exported.components.values():
        found = operators(component.program)
        assert found["MatMulNBits"] == 15
        assert found["GatherBlockQuantized"] == 1
        assert found["GroupQueryAttention"] == 2
        assert not found["DequantizeLinear"] + found["FusedMatMul"] + found["MatMul"]
    expected = fused.model.generate(PROMPT[:1], **GREEDY)
    assert len(set(expected[0].tolist())) > 8, "a sequence that repeats itself proves little"
    assert torch.equal(generator(fused.exported, threads=1).generate(PROMPT[:1], **GREEDY), expected)


def test_both_graphs_have_the_same_weights_under_the_names_of_the_parameters(fused: SimpleNamespace) -> None:
    prefill, decode = (fused.exported.components[name].program.graph for name in ("prefill", "decode"))
    weights = [name for name in prefill.initializers if ".weight_" in name]
    assert "model.layers.1.mlp.down_proj.weight_blocks" in weights
    assert len(weights) == 29
    for name in weights:
        arrays = [graph.initializers[name].const_value for graph in (prefill, decode)]
        np.testing.assert_array_equal(*(array.numpy() for array in arrays if array is not None))


def test_the_weights_are_once_on_disk_and_what_is_read_generates_the_same(
    fused: SimpleNamespace, tmp_path: Path
) -> None:
    fused.exported.save_pretrained(tmp_path)
    data = [tmp_path / f"{name}.onnx.data" for name in ("prefill", "decode")]
    first, second = (file.stat().st_size for file in data)
    saved = share_weights(tmp_path)
    assert [file.stat().st_size for file in data] == [first, second - saved]
    assert saved > 0.9 * second
    assert share_weights(tmp_path) == 0, "there is nothing left to share"
    assert {file.name for file in tmp_path.glob("*.onnx*")} == {
        f"{name}.onnx{end}" for name in ("prefill", "decode") for end in ("", ".data")
    }
    assert not list(tmp_path.glob(".shared-*"))
    model = generator(ExportedModel.from_pretrained(tmp_path), threads=1)
    assert torch.equal(model.generate(PROMPT, **GREEDY), fused.model.generate(PROMPT, **GREEDY))


def test_equal_weights_of_two_graphs_take_their_space_once(fused: SimpleNamespace, tmp_path: Path) -> None:
    large = ir.Tensor(np.arange(1 << 18, dtype=np.float32), name="large")
    exported = copy.copy(fused.exported)
    exported.components = {name: replace(c, program=_constant(large)) for name, c in fused.exported.components.items()}
    exported.save_pretrained(tmp_path)
    assert share_weights(tmp_path) == large.nbytes
    for name in exported.components:
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx")
        np.testing.assert_array_equal(session.run(None, {})[0], large.numpy())


def test_a_graph_is_replaced_with_its_data_or_not_at_all(fused: SimpleNamespace, tmp_path: Path) -> None:
    expected = fused.model.generate(PROMPT, **GREEDY)
    for moment in range(32):
        folder = tmp_path / str(moment)
        fused.exported.save_pretrained(folder)
        with interrupted(moment) as steps:
            share_weights(folder)
        model = generator(ExportedModel.from_pretrained(folder), threads=1)
        assert torch.equal(model.generate(PROMPT, **GREEDY), expected)
        share_weights(folder)  # goes on where it was
        assert len(list(folder.glob("*.onnx*"))) + len(list(folder.glob(".decode*"))) == 4
        if not steps.exceeded:
            break
    assert moment > 4


def test_embeddings_in_eight_bit_floats_generate() -> None:
    model = eager(llama, "fp8_static")
    assert model.dtype == torch.float32, "transformers makes caches and masks of this type"
    expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(model.generate(PROMPT, **GREEDY, cache_implementation="static"), expected)


def test_a_tied_table_of_codes_is_stored_once(fused: SimpleNamespace, tmp_path: Path) -> None:
    path = qfx.export.onnx(fused.qmodel, tmp_path / "m.onnx", format="matmul_nbits")
    graphs = [ir.load(path), *(component.program for component in fused.exported.components.values())]
    for graph in graphs:
        stored = [value.const_value for value in graph.graph.initializers.values()]
        # Of the table, and of the three matrices of the MLP in each of two layers, which are as large.
        assert [tensor.nbytes for tensor in stored if tensor is not None].count(96 * 64 // 2) == 7
    assert qfx.verify(fused.qmodel, path, [{"input_ids": PROMPT}]).max_steps < 0.1


def test_an_int8_cache_is_what_group_query_attention_reads(fused: SimpleNamespace) -> None:
    scales = CacheScales.measure(fused.model, [{"input_ids": PROMPT}])
    exported = copy.copy(fused.exported)
    exported.components = {
        name: replace(c, program=ir.from_proto(ir.to_proto(c.program))) for name, c in fused.exported.components.items()
    }
    for component in exported.components.values():
        assert use_int8_cache(component.program, scales) == 4
    expected = fused.model.generate(PROMPT[:1], past_key_values=scales.cache(), **GREEDY)
    model = generator(exported, threads=1)
    require_same_codes(model, fused.model, scales)
    assert torch.equal(model.generate(PROMPT[:1], **GREEDY), expected)
    assert not torch.equal(fused.model.generate(PROMPT[:1], **GREEDY), expected), "else rounding is not seen"


def test_a_padded_batch_is_refused_by_graphs_without_a_mask(fused: SimpleNamespace) -> None:
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    with pytest.raises(ExportError, match="export with a padded example"):
        generator(fused.exported, threads=1).generate(PROMPT, attention_mask=mask, pad_token_id=0, **GREEDY)


def test_generate_goes_by_what_the_export_was_told(fused: SimpleNamespace) -> None:
    exported = copy.copy(fused.exported)
    exported.generation_config = GenerationConfig(max_new_tokens=3, min_new_tokens=3)
    assert generator(exported, threads=1).generate(PROMPT).shape == (2, 12)


@pytest.mark.whole
def test_rounded_activations_are_multiplied_in_integers() -> None:
    model = eager(qwen3, "int8_dynamic")
    exported = export(model, GenerationQuantizer(), "cpu")
    for component in exported.components.values():
        found = operators(component.program)
        assert found["MatMulInteger"] == 8
        assert found["DynamicQuantizeLinear"] == 5, "one for each activation, however many weights read it"
    assert torch.equal(
        generator(exported, threads=1).generate(PROMPT[:1], **GREEDY), model.generate(PROMPT[:1], **GREEDY)
    )


def test_codes_are_appended_to_codes_and_looked_up_as_codes() -> None:
    model = eager(gpt2, "int8_weight_only")
    scales = CacheScales.measure(model, [{"input_ids": PROMPT}])
    exported = export(model, GenerationQuantizer(cache=scales))
    decode = exported.components["decode"].program
    tables = [node.inputs[0] for node in decode.graph if node.op_type == "Gather"]
    assert [t.name for t in tables if t is not None and t.dtype == ir.DataType.INT8] == [
        "transformer.wte.weight_codes",
        "transformer.wpe.weight_codes",
    ]
    past = {v.name: v.dtype for v in (*decode.graph.inputs, *decode.graph.outputs) if held_in_cache(v.name)}
    assert len(past) == 4
    assert set(past.values()) == {ir.DataType.INT8}
    expected = model.generate(PROMPT[:1], past_key_values=scales.cache(), **GREEDY)
    runs = generator(exported, threads=1)
    require_same_codes(runs, model, scales)
    assert torch.equal(runs.generate(PROMPT[:1], **GREEDY), expected)
    assert not torch.equal(model.generate(PROMPT[:1], **GREEDY), expected), "else rounding is not seen"


@pytest.mark.parametrize("shared", [Granularity.CHANNEL, Granularity.HEAD])
def test_the_scales_of_a_configured_cache_are_those_that_are_measured(shared: Granularity) -> None:
    scales = CacheScales.of(eager(qwen3, INT8_DYNAMIC.replace(kv_cache=TensorSpec(format=INT8, granularity=shared))))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        unrounded = AutoModelForCausalLM.from_config(qwen3()).eval()
    measured = CacheScales.measure(unrounded, [{"input_ids": PROMPT}])
    assert scales.scales.keys() == measured.scales.keys()
    for name, scale in scales.scales.items():
        expected = measured.scales[name]
        if shared is Granularity.HEAD:
            expected = expected.amax(-1, keepdim=True).expand_as(expected)
        torch.testing.assert_close(scale, expected)


@pytest.mark.parametrize("shared", all_but([Granularity.CHANNEL, Granularity.HEAD], [Granularity.HEAD]))
def test_rounded_activations_are_multiplied_in_integers_beside_an_int8_cache_of_the_configuration(
    shared: Granularity,
) -> None:
    model = eager(qwen3, INT8_DYNAMIC.replace(kv_cache=TensorSpec(format=INT8, granularity=shared)))
    exported = export(model, GenerationQuantizer(cache=CacheScales.of(model)), "cpu")
    for component in exported.components.values():
        found = operators(component.program)
        assert found["MatMulInteger"] == 8
        assert found["DynamicQuantizeLinear"] == 5, "one for each activation, however many weights read it"
    inputs = exported.components["decode"].program.graph.inputs
    assert [v.dtype for v in inputs if held_in_cache(v.name)] == [ir.DataType.INT8] * 2
    runs, prompts = generator(exported, threads=1), PROMPT if shared is Granularity.CHANNEL else PROMPT[:1]
    assert torch.equal(runs.generate(prompts, **GREEDY), model.generate(prompts, **GREEDY))


def test_scales_of_other_caches_are_refused() -> None:
    spec = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
    for other, message in (
        (spec.replace(format=INT4), "rounds its keys differently"),
        (spec.replace(symmetry="asymmetric"), "symmetric and without rotated keys"),
        (None, "does not round keys"),
    ):
        with pytest.raises(ExportError, match=message):
            CacheScales.of(eager(llama, INT8_WEIGHT_ONLY.replace(kv_cache=other)))
    model = eager(llama, INT8_WEIGHT_ONLY.replace(kv_cache=spec))
    model.model.layers[1].self_attn.layer_idx = None
    with pytest.raises(ExportError, match="self_attn has no layer_idx"):
        CacheScales.of(model)


def test_a_padded_batch_generates_what_torch_generates() -> None:
    model = eager(opt, "int8_weight_only")
    mask = torch.ones_like(PROMPT)
    mask[0, :3] = 0
    batch = {"input_ids": PROMPT.where(mask.bool(), 1), "attention_mask": mask}
    runs = generator(export(model, GenerationQuantizer("matmul_nbits"), "cpu", **batch), threads=1)
    assert torch.equal(runs.generate(**batch, **GREEDY), model.generate(**batch, **GREEDY))


# Rewrites ------------------------------------------------------------------------------------------------------------


def _constant(tensor: ir.Tensor) -> ir.Model:
    """Return a graph that returns a constant."""
    value = ir.Value(name="large", shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    return _model([], [ir.node("Identity", [value])], [value])


def _input(name: str, shape: list[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))


def _stored(name: str, array: Any) -> ir.Value:
    tensor = ir.Tensor(np.asarray(array), name=name)
    return ir.Value(name=name, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)


def _model(inputs: list[ir.Value], nodes: list[ir.Node], constants: list[ir.Value]) -> ir.Model:
    output = nodes[-1].outputs[0]
    output.name, output.dtype = "y", ir.DataType.FLOAT
    domains = {"": 21, "com.microsoft": 1}
    graph = ir.Graph(inputs, [output], nodes=nodes, initializers=constants, opset_imports=domains, name="g")
    return ir.Model(graph, ir_version=10)


def _run(model: ir.Model, **feeds: Any) -> Any:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), session_options(optimize=False))
    return session.run(None, feeds)[0]


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("shifted", [False, True])
def test_looked_up_rows_are_dequantized_alone(axis: int | None, shifted: bool) -> None:
    draw = np.random.default_rng(0)
    rows = 7 if axis == 0 else ()
    constants = [
        _stored("codes", draw.integers(0, 256, (7, 5), np.uint8)),
        _stored("scale", draw.random(rows, np.float32) + np.float32(0.5)),
        *([_stored("zero", np.asarray(draw.integers(0, 256, rows), np.uint8))] if shifted else []),
    ]
    table = ir.node("DequantizeLinear", constants, {} if axis is None else {"axis": axis})
    gather = ir.node("Gather", [table.outputs[0], _input("ids", [2, 3], ir.DataType.INT64)])
    index = gather.inputs[1]
    assert index is not None
    model = _model([index], [table, gather], constants)
    ids = draw.integers(0, 7, (2, 3))
    expected = _run(model, ids=ids)
    assert look_up_codes(model) == 1
    assert not operators(model)["DequantizeLinear"]
    np.testing.assert_array_equal(_run(model, ids=ids), expected)


@pytest.mark.parametrize("dtype", [ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.float8_e4m3fn])
def test_codes_that_no_runtime_looks_up_are_left(dtype: Any) -> None:
    constants = [_stored("codes", np.ones((7, 5), dtype)), _stored("scale", np.float32(0.5))]
    table = ir.node("DequantizeLinear", constants)
    index = _input("ids", [2, 3], ir.DataType.INT64)
    model = _model([index], [table, ir.node("Gather", [table.outputs[0], index])], constants)
    assert look_up_codes(model) == 0
    assert operators(model)["DequantizeLinear"] == 1


@pytest.mark.parametrize("turned", [0, 1])
def test_a_fused_product_with_a_stack_of_weights_is_split(turned: int) -> None:
    draw = np.random.default_rng(0)
    shape = (2, 5, 4) if turned else (2, 4, 5)
    constants = [_stored("codes", draw.integers(-9, 9, shape, np.int8)), _stored("scale", np.float32(0.5))]
    weight = ir.node("DequantizeLinear", constants)
    x = _input("x", [2, 3, 4])
    attributes = {"transB": turned, "alpha": 0.5}
    product = ir.node("FusedMatMul", [x, weight.outputs[0]], attributes, domain="com.microsoft", name="product")
    model = _model([x], [weight, product], constants)
    feed = draw.integers(-9, 9, (2, 3, 4)).astype(np.float32)
    expected = _run(model, x=feed)
    assert split_fused_products(model) == 1
    np.testing.assert_array_equal(_run(model, x=feed), expected)


# Refusals ------------------------------------------------------------------------------------------------------------


def test_the_quantizer_is_one_of_transformers() -> None:
    quantizer = GenerationQuantizer()
    assert isinstance(quantizer, ExportQuantizer)
    assert quantizer.with_calibration([{}]) is quantizer
    with pytest.raises(ExportError, match="not dynamo; use OnnxExporter"):
        quantizer.validate_environment("dynamo")


def test_programs_without_our_operators_are_translated_as_ever() -> None:
    def translate(program: Any, **options: Any) -> dict[str, Any]:
        return options

    class Double(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * x

    class Rounding(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale, zero = torch.ones(()), torch.zeros((), dtype=torch.int8)
            result: Tensor = torch.ops.quark_fx.quantize(x, scale, zero, "int8")
            return result

    patched, table = _with_our_lowerings(translate), {"theirs": 1}
    plain, ours = (torch.export.export(module, (torch.ones(2),)) for module in (Double(), Rounding()))
    assert patched(plain, custom_translation_table=table, opset_version=None) == {
        "custom_translation_table": table,
        "opset_version": None,
    }
    options = patched(ours, custom_translation_table=table, opset_version=None)
    assert options["opset_version"] == 21
    assert {"theirs", torch.ops.quark_fx.quantize.default} <= options["custom_translation_table"].keys()
    assert patched(ours, opset_version=23)["opset_version"] == 23


def test_transformers_without_quantizers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.exporters.quantizers.base", None)
    with pytest.raises(
        ExportError, match=r"generation needs onnx_ir, and a transformers version whose.*pip install -U"
    ):
        _hook_into_transformers.__wrapped__()


def test_an_opset_that_is_too_old_is_refused() -> None:
    x = _input("x", [3, 4])
    constants = [_stored("codes", np.zeros((4, 4), np.int8)), _stored("scale", np.ones((1, 4), np.float32))]
    weight = ir.node("DequantizeLinear", constants, {"axis": 0, "block_size": 4})
    model = _model([x], [weight, ir.node("MatMul", [x, weight.outputs[0]])], constants)
    model.opset_imports[""] = 20
    with pytest.raises(ExportError, match="opset 20 is too old for"):
        GenerationQuantizer().quantize(model, {}, "onnx")


@pytest.mark.parametrize(
    ("dtype", "level"), [("UINT8", "ENABLE_ALL"), ("INT4", "DISABLE_ALL"), ("FLOAT8E4M3FN", "DISABLE_ALL")]
)
def test_sessions_fuse_only_what_runtimes_implement(dtype: str, level: str) -> None:
    x, scale = _input("x", [3]), _stored("scale", np.float32(1))
    codes = ir.node("QuantizeLinear", [x, scale], {"output_dtype": int(ir.DataType[dtype])})
    codes.outputs[0].dtype = ir.DataType[dtype]
    real = ir.node("DequantizeLinear", [codes.outputs[0], scale])
    exported = SimpleNamespace(components={"decode": SimpleNamespace(program=_model([x], [codes, real], [scale]))})
    options = _options(exported, threads=3)
    assert options.graph_optimization_level == getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    assert options.intra_op_num_threads == 3
    assert options.get_session_config_entry("session.qdq_matmulnbits_accuracy_level") == "0"


def test_a_model_that_is_not_quantized_is_refused() -> None:
    x = _input("x", [2])
    with pytest.raises(ExportError, match=r"no quantized weights: export `qmodel.eager\(\)`"):
        GenerationQuantizer().quantize(_model([x], [ir.node("Identity", [x])], []), {}, "onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("vitis",), "no kernels for format='vitis'"),
        (("qdq", 4), "format='qdq' has no accuracy_level"),
        (("matmul_nbits", 9), "accuracy_level=9"),
        (("gguf",), "unknown ONNX format 'gguf'"),
    ],
)
def test_a_format_that_does_not_run_is_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        GenerationQuantizer(*options)


def _cached(taken: str, operator: str) -> ir.Model:
    past, new = _input(f"input.past_key_values.{taken}", [1, 2, 3, 4]), _input("new", [1, 2, 3, 4])
    node = ir.node(operator, [past, new], {"axis": 2} if operator == "Concat" else {})
    model = _model([past, new], [node], [])
    node.outputs[0].name = f"output.past_key_values.{taken}"
    return model


def test_a_cache_that_was_not_measured_or_does_not_grow_is_refused() -> None:
    scales = CacheScales({"layers.0.keys": torch.ones(1, 2, 1, 4)})
    with pytest.raises(ExportError, match=r"layers.0.keys, layers.5.keys; measure the cache of this model"):
        use_int8_cache(_cached("layers.5.keys", "Concat"), scales)
    with pytest.raises(ExportError, match="keys with Add, which does not append tokens"):
        use_int8_cache(_cached("layers.0.keys", "Add"), scales)
    along_heads = _cached("layers.0.keys", "Concat")
    along_heads.graph[0].attributes["axis"] = ir.AttrInt64("axis", 1)
    with pytest.raises(ExportError, match="keys with Concat, which does not append tokens"):
        use_int8_cache(along_heads, scales)
    half = _cached("layers.0.keys", "Concat")
    half.graph.outputs[0].dtype = ir.DataType.FLOAT16
    with pytest.raises(ExportError, match="is FLOAT16; an int8 cache is for float32 models"):
        use_int8_cache(half, scales)
    apart = _cached("layers.0.keys", "Concat")
    apart.graph.append(ir.node("Neg", [apart.graph.inputs[0]]))
    with pytest.raises(ExportError, match=r"the graph does more with .* than append to it"):
        use_int8_cache(apart, scales)


def test_a_cache_is_measured_on_batches_that_are_finite() -> None:
    def model(values: Tensor, use_cache: bool) -> Any:
        assert use_cache
        return SimpleNamespace(cache=DynamicCache([(values, -2 * values)]))

    batches = [
        {"values": torch.tensor([[[[1.0, -3.0]], [[0.0, 2.0]]]])},
        {"values": torch.tensor([[[[0.0, -4.0]], [[0.0, 0.0]]]])},
    ]
    scales = CacheScales.measure(model, batches).scales
    largest = torch.tensor([[[[1.0, 4.0]], [[127.0, 2.0]]]])  # a channel without values is scaled by 1
    torch.testing.assert_close(scales["layers.0.keys"], largest / 127)
    twice = torch.tensor([[[[2.0, 8.0]], [[127.0, 4.0]]]])
    torch.testing.assert_close(scales["layers.0.values"], twice / 127)
    with pytest.raises(CalibrationError, match="pass at least one"):
        CacheScales.measure(model, [])
    with pytest.raises(CalibrationError, match=r"infinite values in layers.0.keys"):
        CacheScales.measure(model, [{"values": torch.full((1, 2, 4, 2), torch.nan)}])


def test_a_folder_without_an_export_has_nothing_to_share(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="does not hold an export from transformers"):
        share_weights(tmp_path)
    (tmp_path / "export.json").write_text('{"components": {"model": {"file": "model.pt2"}}}')
    with pytest.raises(ExportError, match=r"are not ONNX: model.pt2"):
        share_weights(tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_a_pipe_in_place_of_a_graph_is_neither_read_nor_replaced(name: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text('{"components": {"model": {"file": "model.onnx"}}}')
    ir.save(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 21}), ir_version=10), tmp_path / "model.onnx")
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ExportError, match=rf"{name} is a directory, a device or a pipe"):
        share_weights(tmp_path)
    assert (tmp_path / name).is_fifo()


def test_an_export_of_one_graph_cannot_generate() -> None:
    with pytest.raises(ExportError, match="no decode and prefill graph, only model"):
        generator(ExportedModel({"model": None}, "onnx"))
