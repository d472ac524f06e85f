"""A GGUF file that was written is what its package and transformers read."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from test_huggingface import FLOAT_ENDS, IDS, llama, logits, quantized
from tiny import quantize, rand, seeded
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.errors import ConfigError, ExportError
from quark_fx.export.checkpoints import to_gguf
from quark_fx.export.checkpoints.gguf_blocks import blocks
from quark_fx.export.packing import matrix_of
from quark_fx.model.constants import Constant
from quark_fx.numbers import ops
from quark_fx.numbers.formats import FP8_E4M3, INT3, INT4, INT8, UINT4, UINT8, Format
from quark_fx.numbers.qparams import QParams, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import FLOAT16, FLOAT32
from quark_fx.passes import FitScales
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import INT8_DYNAMIC

package = pytest.importorskip("gguf")
pytest.importorskip("accelerate")


def spec(fmt: Format, size: int | None = 32, **options: Any) -> TensorSpec:
    options = {"scale": FLOAT16, **options}
    granularity = Granularity.GROUP if size else Granularity.CHANNEL
    return TensorSpec(format=fmt, granularity=granularity, group_size=size, **options)


def config(weight: TensorSpec) -> QuantConfig:
    return QuantConfig(weight=weight, exclude=FLOAT_ENDS, target=Target.TORCH)


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXACT = {
    "Q4_0": spec(INT4, symmetry=Symmetry.SYMMETRIC_FULL),
    "Q4_0 of wider groups": spec(INT4, 64),
    "Q8_0": spec(INT8),
    "Q8_0 per channel": spec(INT8, None),
}


@cache
def wide_llama() -> qfx.Session:
    sizes = {**SMALL, "intermediate_size": 128}
    return qfx.Session(seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))), [{"input_ids": IDS}])


@pytest.mark.parametrize("name", EXACT)
def test_transformers_reads_the_same_model(name: str, tmp_path: Path) -> None:
    """Rows of queries and keys lie in another order in the file; scales are in float16 here already."""
    qmodel = quantized(config(EXACT[name]), wide_llama())
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    kinds = {t.name: t.tensor_type.name for t in package.GGUFReader(path).tensors}
    assert kinds["blk.1.attn_k.weight"] == name[:4]
    assert package.GGUFReader(path).fields["general.quantization_version"].contents() == package.GGML_QUANT_VERSION
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    torch.testing.assert_close(logits(load(path)), logits(qmodel), rtol=1e-5, atol=1e-5)


def test_a_model_that_was_read_from_a_file_becomes_a_checkpoint(tmp_path: Path) -> None:
    read = load(qfx.export.gguf(quantized(config(EXACT["Q8_0"])), tmp_path / "model.gguf"))
    qmodel = quantized(config(EXACT["Q4_0"]), read)
    qfx.export.huggingface(qmodel, tmp_path / "checkpoint")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    torch.testing.assert_close(logits(found), logits(qmodel), rtol=1e-5, atol=1e-5)


def test_scales_and_smallest_values_are_rounded_to_float16(tmp_path: Path) -> None:
    for weight in (spec(INT4, symmetry=Symmetry.SIGN_AWARE, scale=FLOAT32), spec(UINT4)):
        qmodel = quantized(config(weight))
        loaded, ours = logits(load(qfx.export.gguf(qmodel, tmp_path / "model.gguf"))), logits(qmodel)
        assert 0 < (loaded - ours).abs().max() < 2e-3 * ours.abs().max()


SHALLOW: dict[str, Any] = {**SMALL, "num_hidden_layers": 1}
MODELS = {
    "heads wider than the model": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SHALLOW, head_dim=128)
    ),
    "norms counted from one, tied": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**SHALLOW, head_dim=256, sliding_window=32)
    ),
    "biases": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**SHALLOW, "num_key_value_heads": 4})),
    "tied": lambda: llama(tie_word_embeddings=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_readers_do_to_tensors_is_undone(name: str, tmp_path: Path) -> None:
    model = seeded(MODELS[name]())
    with torch.no_grad():
        for parameter in model.parameters():  # no norm or bias is that of a new model
            if parameter.dim() == 1:
                parameter += 0.1 * rand(*parameter.shape)
    qmodel = quantized(config(EXACT["Q8_0"]), model)
    loaded = load(qfx.export.gguf(qmodel, tmp_path / "model.gguf"))
    torch.testing.assert_close(logits(loaded), logits(qmodel), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("weight", [spec(INT4), spec(INT8), spec(UINT4), spec(INT4, symmetry=Symmetry.SIGN_AWARE)])
def test_blocks_are_what_the_package_dequantizes(weight: TensorSpec) -> None:
    model: Any = seeded(nn.Sequential(nn.Linear(96, 24)))
    qmodel = quantize(model, QuantConfig(weight=weight, target=Target.TORCH), [rand(4, 96)])
    tensors = qmodel.graph_module.state_dict()
    codes, scale, zero = (tensors[f"0.weight_{part}"] for part in ("codes", "scale", "zero_point"))
    stored = QuantizedTensor.of(codes, scale, zero, weight.format, 1, 32)
    matrix = matrix_of(Constant(("",), stored, torch.float32))
    data, kind = blocks(matrix)
    assert data.shape == (24, package.quant_shape_to_byte_shape((24, 96), package.GGMLQuantizationType[kind])[1])
    found = package.quants.dequantize(data.numpy(), package.GGMLQuantizationType[kind])
    # The smallest value, up to 15 steps, is rounded to float16.
    bound = 15 * scale.max() * 2**-11 if kind == "Q4_1" else 0.0
    assert (torch.from_numpy(found) - matrix.dequantize()).abs().max() <= bound


@pytest.mark.parametrize("name", qfx.gguf_types.GGUF_TYPES)
def test_the_package_reads_the_values_of_every_type_bit_for_bit(name: str) -> None:
    kind, x = qfx.gguf_types.GGUF_TYPES[name], rand(24, 768)
    x[3, 32:64], x[4], x[5, :256], x[6, :16] = 0, 0, 1e-9, 20.0
    stored = quantize_tensor(x, kind)
    if name.endswith("_K"):  # values of the outer bits of every field
        spread = torch.arange(24 * stored.scale.shape[1]).reshape(24, -1) % 61 + 1.0
        low = 0 if stored.has_offsets else 30
        limit = (kind.scale.multiples or INT8).qmax
        unit = 1025 * 2.0**-19  # of all bits of a float16
        scale = (spread - low).clamp(-limit, limit) * unit
        scale = torch.where(scale == 0, unit, scale)
        zero = -spread.flip(1).clamp(max=limit) * 4 * unit if stored.has_offsets else stored.zero_point
        stored = replace(stored, scale=scale, zero_point=zero)
        stored = replace(stored, codes=ops.encode(x, QParams(scale, zero), kind.scheme, 1, stored.block_size))
    matrix = matrix_of(Constant(("",), stored, torch.float32))
    data, found = blocks(matrix)
    assert found == name
    assert data.numel() == sum(package.quant_shape_to_byte_shape(x.shape, package.GGMLQuantizationType[name])[1:]) * 24
    read = package.quants.dequantize(data.numpy(), package.GGMLQuantizationType[name])
    assert torch.equal(torch.from_numpy(read), stored.dequantize())
    assert len(stored.codes.unique()) > 0.9 * 2**kind.format.bits


def tied_model() -> Any:
    """Return a model whose rows K-quants divide, with the embedding for its head."""
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    return seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True)))


def test_a_mixed_file_holds_the_weights_of_the_graph(tmp_path: Path) -> None:
    """The tied embedding is one tensor; transformers computes what the graph does with what it reads."""
    types = qfx.gguf_types
    config = QuantConfig(
        weight=types.Q4_K,
        overrides=(
            Override(pattern="op:embedding", weight=types.Q6_K),
            Override(pattern="op:head", weight=types.Q6_K),
            Override(pattern="*.v_proj", weight=types.Q5_K),
            Override(pattern="*.o_proj", weight=types.Q5_1),
        ),
        passes=(FitScales(),),
        target=Target.TORCH,
    )
    qmodel = quantized(config, tied_model())
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    tensors = {t.name: t for t in package.GGUFReader(path).tensors}
    kinds = {name: t.tensor_type.name for name, t in tensors.items() if len(t.shape) > 1}
    assert kinds == {
        "token_embd.weight": "Q6_K",
        **{f"blk.0.{name}.weight": "Q4_K" for name in ("attn_q", "attn_k", "ffn_gate", "ffn_up", "ffn_down")},
        "blk.0.attn_v.weight": "Q5_K",
        "blk.0.attn_output.weight": "Q5_1",
    }
    layer = qmodel.eager().get_submodule("model.layers.0")
    names = {"attn_v": "self_attn.v_proj", "ffn_down": "mlp.down_proj", "attn_output": "self_attn.o_proj"}
    for theirs, ours in names.items():
        stored = tensors[f"blk.0.{theirs}.weight"]
        read = torch.from_numpy(package.quants.dequantize(stored.data, stored.tensor_type))
        assert torch.equal(read, cast(Tensor, layer.get_submodule(ours).weight))
    torch.testing.assert_close(logits(load(path)), logits(qmodel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (qfx.gguf_types.Q4_K, "64 inputs are not a multiple of 256, the block of Q4_K; use Q5_0"),
        (qfx.gguf_types.Q6_K, "64 inputs are not a multiple of 256, the block of Q6_K; use Q8_0"),
        (qfx.gguf_types.Q4_1.replace(scale=FLOAT32), "not a multiple of 256, the block of Q4_K"),
    ],
)
def test_rows_that_no_block_divides_are_refused_with_what_takes_them(
    weight: TensorSpec, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=message):
        qfx.export.gguf(quantized(config(weight)), tmp_path / "model.gguf")


@pytest.mark.parametrize("name", qfx.gguf_types.GGUF_TYPES)
def test_weights_of_zeros_are_held_by_every_type(name: str) -> None:
    """And so are those whose scales float16 holds as subnormal numbers alone."""
    for x in (torch.zeros(4, 256), rand(4, 256) * 1e-6):
        stored = quantize_tensor(x, qfx.gguf_types.GGUF_TYPES[name])
        matrix = matrix_of(Constant(("w",), stored, torch.float32))
        data, kind = blocks(matrix)
        read = package.quants.dequantize(data.numpy(), package.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(read, matrix.dequantize().numpy())


def test_other_files_have_no_place_for_offsets(tmp_path: Path) -> None:
    qmodel = quantized(config(qfx.gguf_types.Q4_1))
    for form in ("compressed-tensors", "gptq", "awq"):
        with pytest.raises(ExportError, match=r"offsets \(symmetry='offset'\)"):
            qfx.export.huggingface(qmodel, tmp_path / form, format=form)
    with pytest.raises(ExportError, match=r"uint4 with offsets \(symmetry='offset'\)"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"offsets \(symmetry='offset'\)"):
        qfx.export.pt2e(qmodel)
    with pytest.raises(ConfigError, match="ONNX cannot store offsets"):
        QuantConfig(weight=qfx.gguf_types.Q4_1)


def test_compiled_products_take_offsets() -> None:
    weight = qfx.gguf_types.Q4_1.replace(group_size=16)
    qmodel = quantize(seeded(nn.Linear(32, 8)), QuantConfig(weight=weight, target=Target.TORCH), [rand(4, 32)])
    graph = qmodel.compile().graph_module  # before torch.compile, which is not asked
    assert any("code_product" in str(node.target) for node in graph.graph.nodes)
    (found,) = graph(rand(4, 32))
    torch.testing.assert_close(found, qmodel(rand(4, 32)), rtol=1e-4, atol=1e-5)


def test_a_tokenizer_goes_into_the_file(tmp_path: Path) -> None:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<end>"], show_progress=False)
    bpe.train_from_iterator(["a banana and an ananas"] * 8, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>")
    qmodel = quantized(config(EXACT["Q8_0"]))
    with pytest.warns(UserWarning, match='tokenizer.ggml.pre is written as "default"'):
        path = qfx.export.gguf(qmodel, tmp_path / "model.gguf", tokenizer=tokenizer)
    fields = package.GGUFReader(path).fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 64
    assert tokens[: len(tokenizer)] == sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    assert fields["tokenizer.ggml.token_type"].contents()[0] == package.TokenType.CONTROL
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 0
    assert len(fields["tokenizer.ggml.merges"].contents()) > 0


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (spec(INT3), "GGUF supports int4, int5, int8"),
        (spec(UINT8), "GGUF supports int4, int5, int8"),
        (TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL), "GGUF supports int4, int5, int8"),
        (spec(INT4, 16), "inputs in groups of 16 do not fit GGUF's blocks of 32; set a group_size"),
    ],
)
def test_what_no_block_holds_is_refused_with_every_layer(weight: TensorSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message) as error:
        qfx.export.gguf(quantized(config(weight), wide_llama()), tmp_path / "model.gguf")
    assert "model.layers.1.mlp.down_proj.weight" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_quantized_activations_and_unknown_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cannot store quantized activations"):
        qfx.export.gguf(quantized(INT8_DYNAMIC.replace(exclude=FLOAT_ENDS)), tmp_path / "model.gguf")
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64}
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, word_embed_proj_dim=32, pad_token_id=0))
    with pytest.raises(ExportError, match=r"export.gguf does not support models of type opt; supported: .*llama"):
        qfx.export.gguf(quantized(config(EXACT["Q8_0"]), seeded(opt)), tmp_path / "model.gguf")
    scaled = llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    with pytest.raises(ExportError, match=r"positions are scaled .rope_type 'linear'"):
        qfx.export.gguf(quantized(config(EXACT["Q8_0"]), scaled), tmp_path / "model.gguf")
    with pytest.raises(ExportError, match="Linear is not a Transformers model"):
        qfx.export.gguf(
            quantize(seeded(nn.Linear(32, 4)), config(EXACT["Q8_0"]), [rand(2, 32)]), tmp_path / "model.gguf"
        )


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    qmodel = quantized(config(EXACT["Q8_0"]))
    with pytest.raises(ExportError, match="cannot be written"):
        qfx.export.gguf(qmodel, tmp_path / "missing" / "model.gguf")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    words = Tokenizer(models.WordLevel({"a": 0}, "a"))
    spaces = Tokenizer(models.BPE({"a": 0, "\u2581": 1, "\u2581a": 2}, [("\u2581", "a")]))
    spaces.pre_tokenizer = pre_tokenizers.Metaspace()
    for backend in (words, spaces):
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        with pytest.raises(ExportError, match=r"is not a byte-level BPE tokenizer, .*; pass tokenizer=None"):
            qfx.export.gguf(qmodel, path, tokenizer=tokenizer)
    assert path.read_bytes() == b"old"
    assert qfx.export.gguf(qmodel, path) == path
    assert list(tmp_path.iterdir()) == [path]


def of_weight(config: QuantConfig, name: str) -> TensorSpec | None:
    """Return the spec of a module's weight."""
    found = [o.weight for o in config.overrides if fnmatch(name, o.pattern)]
    return cast("TensorSpec | None", found[-1] if found else config.weight)


def test_the_mixture_is_llama_cpps() -> None:
    """The types are those `llama_tensor_get_type_impl` chooses for 12 layers with rows of 256 and 96."""
    sizes = {**SMALL, "hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 12}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        small = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**sizes, "hidden_size": 40, "num_attention_heads": 2}, tie_word_embeddings=True)
        )
    types, layers = qfx.gguf_types, [f"model.layers.{i}" for i in range(12)]
    found = types.mixed(model, "Q4_K_M")
    more = [i in (0, 3, 6, 9, 10, 11) for i in range(12)]
    values = [of_weight(found, f"{layer}.self_attn.v_proj") for layer in layers]
    assert values == [types.Q6_K if wide else types.Q4_K for wide in more]
    down = [of_weight(found, f"{layer}.mlp.down_proj") for layer in layers]
    assert down == [types.Q8_0 if wide else types.Q5_0 for wide in more]
    assert of_weight(found, "model.layers.3.self_attn.q_proj") == types.Q4_K
    assert of_weight(found, "model.embed_tokens") == types.Q4_K
    assert of_weight(found, "lm_head") == types.Q6_K
    larger = types.mixed(model, "Q5_K_M")
    assert of_weight(larger, "model.layers.1.mlp.down_proj") == types.Q5_1
    assert of_weight(larger, "model.layers.1.mlp.up_proj") == types.Q5_K
    tied = types.mixed(small, "Q4_K_M")
    assert of_weight(tied, "model.layers.0.self_attn.q_proj") is of_weight(tied, "model.embed_tokens") is None
    assert of_weight(tied, "model.layers.1.mlp.down_proj") == types.Q5_0
    assert of_weight(types.mixed(tied_model(), "Q4_K_M"), "model.embed_tokens") == types.Q6_K


DRAWN: dict[str, tuple[str, dict[str, Any], bool]] = {
    "theta of a whole number, epsilon": (
        "Llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}, "rms_norm_eps": 1e-2},
        True,
    ),
    "theta": ("StableLm", {"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.25}}, False),
    "part that turns": ("StableLm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, False),
    "activation": ("Llama", {"hidden_act": "gelu"}, False),
    "softcap, scores": ("Gemma2", {"final_logit_softcapping": 3.0, "query_pre_attn_scalar": 3}, False),
    "window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}, False),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_changed_field_is_read_or_refused(name: str, tmp_path: Path) -> None:
    family, changed, is_written = DRAWN[name]
    sizes = {**SHALLOW, "pad_token_id": 0, **({"head_dim": 256} if family == "Gemma2" else {})}
    made = getattr(transformers, f"{family}Config")(**{**sizes, **changed})
    qmodel = quantized(config(EXACT["Q8_0"]), seeded(getattr(transformers, f"{family}ForCausalLM")(made)))
    if not is_written:
        with pytest.raises(ExportError, match=f"fields of {family.lower()}, ") as refused:
            qfx.export.gguf(qmodel, tmp_path / "model.gguf")
        for field in changed if name != "window" else ["use_sliding_window"]:
            assert f" {field} " in str(refused.value)
        return
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    kinds = {key: field.types for key, field in package.GGUFReader(path).fields.items()}
    assert kinds["llama.rope.freq_base"] == [package.GGUFValueType.FLOAT32]
    assert kinds["llama.block_count"] == [package.GGUFValueType.UINT32]
    torch.testing.assert_close(logits(load(path)), logits(qmodel), rtol=1e-4, atol=1e-4)


FLOAT_KEYS = (
    "gemma2.attn_logit_softcapping",
    "gemma2.final_logit_softcapping",
    "gemma2.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.scaling.factor",
    "granite.logit_scale",
    "granite.attention.scale",
)


def test_a_whole_number_that_llama_cpp_reads_as_float_is_written_as_one() -> None:
    """llama.cpp refuses a file with another type; a configuration may say 30 for 30.0."""
    kinds = package.GGUFValueType
    writer = package.GGUFWriter(None, "gemma2")
    for key in (*FLOAT_KEYS, "llama.block_count"):
        to_gguf._add(writer, package, key, 30)
    written = writer.kv_data[0]
    assert {key: written[key].type for key in FLOAT_KEYS} == dict.fromkeys(FLOAT_KEYS, kinds.FLOAT32)
    assert written["llama.block_count"].type == kinds.UINT32


def test_a_file_that_llama_cpp_would_not_open_is_refused() -> None:
    from quark_fx.checkpoints.gguf_reader import Reader

    with torch.device("meta"), pytest.raises(ExportError, match="context_length, feed_forward_length of bloom"):
        Reader.of(transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=64, n_layer=1)), package)


def test_what_llama_cpp_reads_beside_transformers_is_written() -> None:
    from quark_fx.checkpoints.gguf_reader import Reader

    with torch.device("meta"):
        model = transformers.NemotronForCausalLM(transformers.NemotronConfig(**SMALL))
    found = dict(Reader.of(model, package).metadata())
    assert found["nemotron.rope.dimension_count"] == 8
    assert found["nemotron.attention.layer_norm_epsilon"] == model.config.norm_eps
