"""`target="sglang"` refuses what SGLang cannot read, and names what stays in float as SGLang looks for it.

These tests look at rules and files; `benchmarks.in_sglang` has SGLang's own code read them.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import quantize, seeded

import quark_fx as qfx
from quark_fx.config.block_formats import MXFP4, MXFP8_E4M3, NVFP4
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.export.checkpoints.values import fused_names
from quark_fx.numbers.formats import FP8_E4M3, INT3, INT4, INT8, UINT8
from quark_fx.numbers.scales import FLOAT16
from quark_fx.presets import FP8_DYNAMIC, FP8_STATIC, W4A16_RTN, W8A8_DYNAMIC
from quark_fx.targets import SGLANG, VLLM

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip


@cache
def session(mixture: bool) -> qfx.Session:
    if mixture:
        config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
        made: Any = transformers.MixtralForCausalLM(config)
    else:
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    return qfx.Session(seeded(made), [{"input_ids": torch.arange(8)[None]}])


HALF = W4A16_RTN.replace(
    target="sglang",
    weight=W4A16_RTN.weight.replace(scale=FLOAT16, group_size=32),  # type: ignore[union-attr]
)
ATTENTION = "model.layers.0.self_attn"
CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)


def written(folder: Path, config: QuantConfig, form: str, mixture: bool = False) -> dict[str, Any]:
    qfx.export.huggingface(quantize(session(mixture), config), folder, format=form)
    return json.loads((folder / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def looks_up(told: dict[str, Any], form: str, name: str) -> bool:
    """Tell whether a layer stays in float, as SGLang finds out where a model has no mapping of fused layers."""
    if form == "gptq":
        return any(re.match(pattern.removeprefix("-:"), name) for pattern in told["dynamic"])
    if form == "awq":
        return any(part in name for part in told["modules_to_not_convert"])
    return any(name == entry or name.endswith(f".{entry}") for entry in told["ignore"])


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq"])
def test_fused_layers_in_float_have_the_name_that_sglang_looks_for(form: str, tmp_path: Path) -> None:
    config = HALF.replace(exclude=(*HALF.exclude, "*.self_attn.[qkv]_proj"))
    told = written(tmp_path / "ours", config, form)
    assert looks_up(told, form, f"{ATTENTION}.qkv_proj")
    assert looks_up(told, form, f"{ATTENTION}.k_proj")
    assert not looks_up(told, form, f"{ATTENTION}.o_proj")
    assert not looks_up(told, form, "model.layers.0.mlp.gate_up_proj")
    told = written(tmp_path / "vllm", config.replace(target="vllm"), form)
    assert not looks_up(told, form, f"{ATTENTION}.qkv_proj")


def test_a_fused_name_needs_all_of_its_parts() -> None:
    fused = SGLANG.checkpoints.fused
    assert fused_names(["a.gate_proj", "b.up_proj"], fused) == []
    assert fused_names(["a.gate_proj", "b.up_proj", "a.up_proj"], fused) == ["a.gate_up_proj"]


def test_transformers_reads_a_checkpoint_with_fused_names(tmp_path: Path) -> None:
    config = HALF.replace(exclude=(*HALF.exclude, "*.self_attn.[qkv]_proj"))
    qmodel = quantize(session(False), config)
    qfx.export.huggingface(qmodel, tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, qmodel(input_ids=ids).logits)


def test_layers_that_are_quantized_have_no_fused_name(tmp_path: Path) -> None:
    told = written(tmp_path, HALF.replace(exclude=(*HALF.exclude, "*.down_proj")), "compressed-tensors")
    assert told["ignore"] == ["model.layers.0.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("weight", "read", "message"),
    [
        (MXFP4, None, "SGLang does not support weights in fp4_e2m1"),
        (MXFP8_E4M3, None, "SGLang does not support weights in fp8_e4m3"),
        (HALF.weight.replace(format=INT3), None, "SGLang does not support weights in int3"),  # type: ignore[union-attr]
        (CHANNEL, TensorSpec(format=INT8), "SGLang does not support activations in int8;"),
        (CHANNEL, TensorSpec(format=UINT8), "SGLang does not support activations in uint8;"),
    ],
    ids=["MXFP4", "MXFP8", "int3", "int8 read", "uint8 read"],
)
def test_specs_that_vllm_has_and_sglang_has_not_are_refused(
    weight: TensorSpec, read: TensorSpec | None, message: str
) -> None:
    with pytest.raises(qfx.ConfigError, match=message):
        QuantConfig(weight=weight, input=read, target=SGLANG)
    assert QuantConfig(weight=weight, input=read, target=VLLM)


def test_what_sglang_has_is_taken() -> None:
    for preset in (W4A16_RTN, W8A8_DYNAMIC, FP8_DYNAMIC, FP8_STATIC):
        assert preset.replace(target="sglang").target is SGLANG
    for weight in (NVFP4, CHANNEL, TensorSpec(format=FP8_E4M3)):
        assert QuantConfig(weight=weight, target="sglang", kv_cache=TensorSpec(format=FP8_E4M3))  # type: ignore[arg-type]
    with pytest.raises(qfx.ConfigError, match="SGLang supports caches in fp8_e4m3 tensor, not fp8_e4m3 head"):
        QuantConfig(kv_cache=TensorSpec(format=FP8_E4M3, granularity=Granularity.HEAD), target="sglang")  # type: ignore[arg-type]


def test_layouts_that_sglang_loads_wrongly_are_refused(tmp_path: Path) -> None:
    left = HALF.replace(exclude=("op:head", "op:experts"))
    with pytest.raises(
        qfx.ExportError, match="target='sglang' does not support GPTQ with experts in float; use format="
    ):
        written(tmp_path / "gptq", left, "gptq", mixture=True)
    with pytest.raises(
        qfx.ExportError, match="target='sglang' does not support AWQ with a quantized head; add 'op:head'"
    ):
        written(tmp_path / "head", HALF.replace(exclude=()), "awq")
    small = HALF.replace(weight=HALF.weight.replace(group_size=16))  # type: ignore[union-attr]
    with pytest.raises(qfx.ExportError, match="target='sglang' does not support GPTQ in groups of 16"):
        written(tmp_path / "small", small, "gptq")
    assert not list(tmp_path.glob("*/*.json"))
    for form in ("awq", "compressed-tensors"):
        written(tmp_path / form, left, form, mixture=True)
    written(tmp_path / "dense", HALF, "gptq")


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq", "compressed-tensors"])
def test_a_row_as_long_as_the_groups_of_other_layers_is_a_group(form: str, tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 128}
    model = seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    config = HALF.replace(weight=HALF.weight.replace(group_size=64))  # type: ignore[union-attr]
    qmodel = quantize(model, config, [{"input_ids": torch.arange(8)[None]}])
    qfx.export.huggingface(qmodel, tmp_path, format=form)
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    if form == "compressed-tensors":
        (group,) = told["config_groups"].values()
        assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("group", 64)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        ids = torch.arange(8)[None]
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=ids).logits, qmodel(input_ids=ids).logits)
    else:
        assert told["group_size"] == 64


def test_one_scale_and_experts_per_channel_stay_beside_groups(tmp_path: Path) -> None:
    sizes, ids = SIZES | {"intermediate_size": 128}, torch.arange(8)[None]
    model = seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)))
    config = HALF.replace(weight=HALF.weight.replace(group_size=64), target="torch")  # type: ignore[union-attr]
    whole = TensorSpec(format=INT4)
    config = config.replace(overrides=(Override(pattern="*.o_proj", weight=whole),))
    small = SIZES | {"intermediate_size": 32}
    mixture = transformers.MixtralConfig(**small, num_local_experts=2, num_experts_per_tok=1)
    experts = HALF.replace(
        target="torch", overrides=(Override(pattern="op:experts", weight=CHANNEL.replace(format=INT4)),)
    )
    for name, made, how in (
        ("one", model, config),
        ("experts", seeded(transformers.MixtralForCausalLM(mixture)), experts),
    ):
        qmodel = quantize(made, how, [{"input_ids": ids}])
        qfx.export.huggingface(qmodel, tmp_path / name)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=ids).logits, qmodel(input_ids=ids).logits)


def test_groups_that_do_not_divide_the_inputs_are_refused_before_calibration() -> None:
    weight = HALF.weight.replace(group_size=48)  # type: ignore[union-attr]
    with pytest.raises(qfx.ConfigError, match=r"down_proj: 64 inputs are not a multiple .* 48; set group_size=64"):
        quantize(session(False), HALF.replace(weight=weight))


def test_what_is_no_tokenizer_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    qmodel = quantize(session(False), HALF)
    with pytest.raises(qfx.ExportError, match="tokenizer is a str; pass a tokenizer from transformers"):
        qfx.export.huggingface(qmodel, tmp_path / "hf", tokenizer="gpt2")
    with pytest.raises(qfx.ExportError, match="tokenizer is a str; pass a tokenizer from transformers"):
        qfx.export.gguf(qmodel, tmp_path / "a.gguf", tokenizer="gpt2")
    assert not list(tmp_path.iterdir())
