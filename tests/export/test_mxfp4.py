"""Stacks of experts in MXFP4, as GPT-OSS stores them: transformers reads the values of the quantized model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from release_sources import gpt_oss
from safetensors.torch import load_file
from tiny import quantize, seeded

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.numbers.formats import FP8_E4M3, INT4
from quark_fx.presets import preset

IDS = {"input_ids": torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(0))}
STACK = preset("mxfp4_weight_only").weight
assert STACK is not None


def only(*patterns: str, weight: TensorSpec = STACK, **others: Any) -> QuantConfig:
    return QuantConfig(weight=None, overrides=tuple(Override(pattern=p, weight=weight, **others) for p in patterns))


EXPERTS = only("*.experts.*")


def model(**changes: Any) -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**{**sizes, **heads, "sliding_window": 8, "rope_scaling": None, **changes})
    return seeded(transformers.GptOssForCausalLM(config))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_reads_the_values_of_the_graph(dtype: torch.dtype, tmp_path: Path) -> None:
    qmodel = quantize(model().to(dtype), EXPERTS, [IDS])
    qfx.export.huggingface(qmodel, tmp_path, format="mxfp4")
    read, eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), qmodel.eager()
    for layer in range(2):
        ours, theirs = (network.get_submodule(f"model.layers.{layer}.mlp.experts") for network in (eager, read))
        for stack in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(ours, stack).float(), getattr(theirs, stack).float())
    assert qfx.verify(qmodel, tmp_path, [IDS]).verdict == "correct"


def test_codes_that_are_read_are_written_again(tmp_path: Path) -> None:
    gpt_oss(tmp_path / "source")
    qmodel = quantize(qfx.open_checkpoint(tmp_path / "source"), EXPERTS, [IDS])
    qfx.export.huggingface(qmodel, tmp_path / "again", format="mxfp4")
    first, again = (qfx.open_checkpoint(tmp_path / name).state_dict() for name in ("source", "again"))
    assert first.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in first.items())


def test_layers_whose_experts_stay_in_float_are_listed(tmp_path: Path) -> None:
    qmodel = quantize(model(), only("model.layers.1.*.experts.*"), [IDS])
    qfx.export.huggingface(qmodel, tmp_path, format="mxfp4")
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.1.mlp.experts.gate_up_proj_blocks"].shape == (4, 192, 2, 16)
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 64, 192)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "mxfp4"
    assert {"model.layers.0.mlp.experts", "lm_head"} <= {*config["modules_to_not_convert"]}
    assert qfx.verify(qmodel, tmp_path, [IDS]).verdict == "correct"


def moe() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    return seeded(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads)))


def llama4() -> transformers.PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "intermediate_size_mlp": 32, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_hidden_layers": 1}
    return seeded(transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, **heads)))


WIDE = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
REFUSED: dict[str, tuple[Any, QuantConfig, str]] = {
    "linear layers": (
        model,
        only("*.q_proj"),
        r"q_proj: this layout stores only experts quantized; exclude this layer",
    ),
    "integers": (
        model,
        only("*.experts.*", weight=WIDE),
        r"gate_up_proj: experts in int4; this layout needs the weights of the preset mxfp4_weight_only",
    ),
    "groups of 16": (
        model,
        only("*.experts.*", weight=STACK.replace(group_size=16)),
        "groups of 16; this layout needs group_size=32",
    ),
    "experts stored one by one": (
        moe,
        EXPERTS,
        "is for models of type gpt_oss, .* not for qwen3_moe; use format='compressed-tensors'",
    ),
    "stacks of other models": (llama4, EXPERTS, "that transformers does not split into matrices; leave it in float"),
    "channels": (
        model,
        only("*.experts.*", weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL)),
        "gate_up_proj: experts in fp8_e4m3; this layout needs",
    ),
    "activations": (model, only("*.experts.*", input=preset("mxfp4").input), "reads a rounded activation"),
    "one stack of two": (
        model,
        only("*.experts.down_proj"),
        "experts[.]gate_up_proj stays in float, but readers expect",
    ),
    "other scales": (model, only("*.experts.*", weight=STACK.replace(scale="float32")), "not powers of two"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_layout_lacks_is_refused_before_calibration(name: str, tmp_path: Path) -> None:
    build, config, message = REFUSED[name]
    with pytest.raises(qfx.ExportError, match=message):
        qfx.check(build(), config, [IDS], export="mxfp4")
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.huggingface(quantize(build(), config, [IDS]), tmp_path / "out", format="mxfp4")
    assert not (tmp_path / "out").exists()


def test_other_formats_still_refuse_such_stacks(tmp_path: Path) -> None:
    with pytest.raises(qfx.ExportError, match=r"that transformers does not split into matrices; .*format='mxfp4'"):
        qfx.export.huggingface(quantize(model(), EXPERTS, [IDS]), tmp_path / "out")
