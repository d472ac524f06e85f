"""Checkpoints in ModelOpt's layout hold the values of the quantized model, under the names that vLLM reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import quantize, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.checkpoints.decoded import DecodedFiles
from quark_fx.checkpoints.files import CheckpointFiles, MappedFiles
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.data.cache_names import returned_cache
from quark_fx.export.checkpoints.modelopt import require_read
from quark_fx.numbers.formats import FP8_E4M3, INT8
from quark_fx.presets import FP8_BLOCK, FP8_STATIC, INT8_DYNAMIC, SCHEMES, preset

IDS = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(0))
ENDS = ("op:embedding", "lm_head")
NIBBLES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

TENSOR = TensorSpec(format=FP8_E4M3, granularity=Granularity.TENSOR)

# What vLLM's methods multiply by (`ModelOpt*LinearMethod.create_weights`), and its algorithm.
ALGORITHMS: dict[str, tuple[QuantConfig, dict[str, Any]]] = {
    "FP8": (
        FP8_STATIC.replace(exclude=ENDS, output=None, bias=None, weight=TENSOR),
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32, "input_scale": torch.float32},
    ),
    "FP8_PER_CHANNEL_PER_TOKEN": (
        preset("fp8_dynamic").replace(exclude=ENDS),
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    ),
    "FP8_PB_WO": (
        FP8_BLOCK.replace(exclude=ENDS),
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.float32},
    ),
    "NVFP4": (
        SCHEMES["nvfp4"].replace(exclude=ENDS),
        {
            "weight": torch.uint8,
            "weight_scale": torch.float8_e4m3fn,
            "weight_scale_2": torch.float32,
            "input_scale": torch.float32,
        },
    ),
    "W4A16_NVFP4": (
        SCHEMES["nvfp4a16"].replace(exclude=ENDS),
        {"weight": torch.uint8, "weight_scale": torch.float8_e4m3fn, "weight_scale_2": torch.float32},
    ),
    "MXFP8": (
        SCHEMES["mxfp8"].replace(exclude=ENDS),
        {"weight": torch.float8_e4m3fn, "weight_scale": torch.uint8},
    ),
}


def llama(**sizes: Any) -> Any:
    usual = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 2}
    usual |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    return seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual | sizes)))


@pytest.fixture(scope="module")
def session() -> qfx.Session:
    return qfx.Session(llama(), [{"input_ids": IDS}])


def value(algorithm: str, parts: dict[str, Tensor]) -> Tensor:
    """Return a weight as vLLM's kernels multiply by it; scales multiply."""
    weight, scale = parts["weight"], parts["weight_scale"]
    if "NVFP4" in algorithm:
        codes = torch.stack((weight & 15, weight >> 4), -1).flatten(1)
        scales = (scale.float() * parts["weight_scale_2"]).repeat_interleave(16, 1)
        return NIBBLES[codes.long()] * scales
    if algorithm == "MXFP8":
        return weight.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    if algorithm == "FP8_PB_WO":
        scale = scale.squeeze(3).squeeze(1).repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * (scale if scale.numel() != len(weight) else scale.reshape(-1, 1))


def shape(algorithm: str, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of `weight_scale` that vLLM allocates (`create_weights`); one scale may have any rank."""
    return {
        "FP8": (1,),
        "FP8_PER_CHANNEL_PER_TOKEN": (rows,),
        "FP8_PB_WO": (rows // 128, 1, columns // 128, 1),
        "MXFP8": (rows, columns // 32),
    }.get(algorithm, (rows, columns // 16))


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "FP8"])
def test_a_layer_of_zeros_has_scales_of_the_same_shape(algorithm: str, tmp_path: Path) -> None:
    model = llama()
    torch.nn.init.zeros_(model.model.layers[0].self_attn.o_proj.weight)
    qmodel = quantize(model, ALGORITHMS[algorithm][0], [{"input_ids": IDS}])
    stored = load_file(qfx.export.huggingface(qmodel, tmp_path, format="modelopt") / "model.safetensors")
    scale = stored["model.layers.0.self_attn.o_proj.weight_scale"]
    assert tuple(scale.shape) == shape(algorithm, 128, 128)


def test_blocks_at_an_edge_and_integer_caches_are_refused(session: qfx.Session, tmp_path: Path) -> None:
    model = llama(num_key_value_heads=1)
    with pytest.raises(qfx.ExportError, match=r"the shape \(64, 128\) is not a multiple of 128"):
        qfx.export.huggingface(
            quantize(model, ALGORITHMS["FP8_PB_WO"][0], [{"input_ids": IDS}]), tmp_path / "out", format="modelopt"
        )
    for cache in (TensorSpec(format=INT8), TENSOR.replace(granularity=Granularity.HEAD)):
        qmodel = quantize(session, ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"][0].replace(kv_cache=cache))
        held = f"in {cache.format} per {cache.granularity}; this format supports .*: export with format='compressed-"
        with pytest.raises(qfx.ExportError, match=held):
            qfx.export.huggingface(qmodel, tmp_path / "out", format="modelopt")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_values_are_those_of_the_model(algorithm: str, session: qfx.Session, tmp_path: Path) -> None:
    config, dtypes = ALGORITHMS[algorithm]
    qmodel = quantize(session, config)
    qfx.export.huggingface(qmodel, tmp_path, format="modelopt")
    described = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert (described["quant_method"], described["quant_algo"]) == ("modelopt", algorithm)
    assert described["ignore"] == ["lm_head"]
    stored, eager = load_file(tmp_path / "model.safetensors"), qmodel.eager()
    decoded = DecodedFiles.of(CheckpointFiles.of(tmp_path), json.loads((tmp_path / "config.json").read_text()))
    for name, module in eager.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        parts = {n.rpartition(".")[2]: t for n, t in stored.items() if n.startswith(f"{name}.")}
        assert {leaf: tensor.dtype for leaf, tensor in parts.items()} == dtypes
        assert torch.equal(value(algorithm, parts), module.weight.detach().float())
        assert tuple(parts["weight_scale"].shape) == shape(algorithm, *module.weight.shape)
        assert torch.equal(decoded.read(f"{name}.weight", MappedFiles()), module.weight.detach().float())
    qkv = [stored.get(f"model.layers.0.self_attn.{x}_proj.weight_scale_2") for x in "qkv"]
    assert len({float(unit) for unit in qkv if unit is not None}) <= 1, "vLLM fuses them under the largest"


def test_a_cache_is_described_as_in_compressed_tensors(session: qfx.Session, tmp_path: Path) -> None:
    config, _ = ALGORITHMS["FP8"]
    qfx.export.huggingface(quantize(session, config.replace(kv_cache=TENSOR)), tmp_path, format="modelopt")
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert (scheme["type"], scheme["num_bits"]) == ("float", 8)
    assert {"model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"} <= set(
        load_file(tmp_path / "model.safetensors")
    )


NVFP4_CACHE = SCHEMES["nvfp4"].input


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_the_scale_of_a_cache_in_nvfp4_is_its_largest_magnitude_over_that_of_fp4_and_e4m3(
    algorithm: str, tmp_path: Path
) -> None:
    """The dtype of the cache in vLLM 0.32 follows `kv_cache_scheme` (`get_kv_cache_quant_algo_string`)."""
    config = ALGORITHMS[algorithm][0].replace(kv_cache=NVFP4_CACHE)
    if algorithm == "NVFP4":  # vLLM rounds FP8 weights per tensor again
        config = config.replace(target="vllm")
    model = llama()
    (layer,) = returned_cache(model(IDS, use_cache=True)).layers
    qfx.export.huggingface(quantize(model, config, [{"input_ids": IDS}]), tmp_path, format="modelopt")
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] == "NVFP4"
    stored = load_file(tmp_path / "model.safetensors")
    for name, values in (("k", layer.keys), ("v", layer.values)):
        scale = stored[f"model.layers.0.self_attn.{name}_scale"]
        torch.testing.assert_close(scale, values.abs().max().reshape(1) / (6 * 448))
    attention = next(part for part in qfx.inspect(tmp_path).parts if part.kind == "attention")
    assert attention.activation == "nvfp4"


def test_heads_that_groups_of_16_channels_do_not_divide_are_refused_by_check() -> None:
    config = ALGORITHMS["FP8"][0].replace(kv_cache=NVFP4_CACHE)
    with pytest.raises(qfx.ExportError, match="heads of 8 channels, which are not a multiple of 16"):
        qfx.check(llama(head_dim=8), config, [{"input_ids": IDS}], export="modelopt")


MIXED = ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"][0].replace(
    overrides=(Override(pattern="*down_proj", weight=ALGORITHMS["FP8"][0].weight, input=ALGORITHMS["FP8"][0].input),)
)


REFUSED: dict[str, tuple[QuantConfig, str]] = {
    "integers": (INT8_DYNAMIC.replace(exclude=ENDS), "int-quantized channel tensor; the ModelOpt layout supports"),
    "two algorithms": (
        MIXED,
        "layers use FP8_PER_CHANNEL_PER_TOKEN and FP8; ModelOpt needs the same algorithm in all layers",
    ),
    "an embedding": (
        ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"][0].replace(exclude=("lm_head",), input=None),
        "in linear layers, but not in experts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_would_read_otherwise_is_refused(name: str, session: qfx.Session, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    qmodel = quantize(session, config)
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.huggingface(qmodel, tmp_path / "out", format="modelopt")
    assert not (tmp_path / "out").exists()


def test_a_layer_whose_name_contains_that_of_a_float_layer_is_refused() -> None:
    """`ModelOptQuantConfigBase.is_layer_excluded` looks for each name of `ignore` in the name of the layer."""
    require_read("layers.0.mlp.gate_proj", ["layers.0.mlp.gate_up", "lm_head"])
    with pytest.raises(qfx.ExportError, match=r"whose names contain 'layers.0.mlp.gate'"):
        require_read("layers.0.mlp.gate_proj", ["layers.0.mlp.gate"])
    with pytest.raises(qfx.ExportError, match="whose names contain 'visual'"):
        require_read("visual.blocks.0.fc1", [])


def test_sglang_gets_another_layout(session: qfx.Session, tmp_path: Path) -> None:
    config = ALGORITHMS["FP8_PER_CHANNEL_PER_TOKEN"][0].replace(target="sglang")
    with pytest.raises(qfx.ExportError, match="target='sglang' does not support the ModelOpt layout"):
        qfx.export.huggingface(quantize(session, config), tmp_path / "out", format="modelopt")
