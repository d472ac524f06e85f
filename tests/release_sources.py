"""Checkpoints with the tensor names, dtypes, and configurations of published releases, with a few small layers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from seeded_models import seeded
from torch import Tensor

_INDEX = "model.safetensors.index.json"

_SIZES = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 384, "max_position_embeddings": 128}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 2}

_DEEPSEEK = {**_SIZES, "num_key_value_heads": 4, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_group": 2}
_DEEPSEEK |= {"topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 128}
_DEEPSEEK |= {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}

_QWEN = {**_SIZES, "num_hidden_layers": 4, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 128}
_QWEN |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
_QWEN |= {"linear_value_head_dim": 32, "shared_expert_intermediate_size": 128}

_GPT_OSS = {**_SIZES, "num_hidden_layers": 2, "head_dim": 32, "num_local_experts": 4, "sliding_window": 8}


def _floats(folder: Path, model: transformers.PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors that transformers stores for a seeded model, bfloat16, and its configuration."""
    seeded(model).bfloat16().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors, json.loads((folder / "config.json").read_text())


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write tensors to three shards with an index, next to the configuration and files that are only copied."""
    names = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    index = {name: names[i * 3 // len(tensors)] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: tensor.contiguous() for name, tensor in tensors.items() if index[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    (folder / _INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def _drafts(tensors: Mapping[str, Tensor], layer: str, draft: str) -> dict[str, Tensor]:
    """Return tensors of a draft layer with the shapes of another layer."""
    same = {name.replace(layer, draft): tensor for name, tensor in tensors.items() if name.startswith(layer)}
    return {name: tensor.flip(-1).contiguous() for name, tensor in same.items()}


def _deepseek_floats(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors of DeepSeek-V3 with its draft layer, whose number follows the others."""
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**_DEEPSEEK))
    tensors, config = _floats(folder, model)
    tensors = {name: t.float() if "correction_bias" in name else t for name, t in tensors.items()}
    draft, width = f"model.layers.{_DEEPSEEK['num_hidden_layers']}.", _SIZES["hidden_size"]
    tensors |= _drafts(tensors, "model.layers.2.", draft)
    generator = torch.Generator().manual_seed(1)
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{draft}{name}.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{draft}eh_proj.weight"] = torch.randn(width, 2 * width, generator=generator).bfloat16()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{draft}{name}.weight"] = torch.rand(width, generator=generator).bfloat16()
    return tensors, config


def _layers(tensors: Iterable[str], *others: str) -> list[str]:
    """Return the matrices of layers but embeddings, heads, routers, norms, and those whose names contain `others`."""
    floats = ("embed", "head", "norm", "mlp.gate.", "gate.weight", "conv1d", "eh_proj", "router", *others)
    return [name for name in tensors if name.endswith(".weight") and not any(part in name for part in floats)]


def deepseek_v3(folder: Path) -> dict[str, Tensor]:
    """Write DeepSeek-V3 in FP8 blocks, and return the values of its tensors.

    Source:
        README_WEIGHTS.md and inference/fp8_cast_bf16.py of deepseek-ai/DeepSeek-V3.
    """
    tensors, config = _deepseek_floats(folder)
    values = dict(tensors)
    for name in _layers(values):
        rows, columns = values[name].shape
        spread = torch.arange(rows)[:, None] // 128, torch.arange(columns)[None] // 128
        scale = torch.zeros(-(-rows // 128), -(-columns // 128))
        for i in range(scale.shape[0]):
            for j in range(scale.shape[1]):
                block = values[name][128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)]
                scale[i, j] = block.abs().amax().float() / 448
        codes = (values[name].float() / scale[spread]).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scale}
        values[name] = codes.float() * scale[spread]
    settings = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    _write(folder, tensors, {**config, "quantization_config": settings})
    return values


def gpt_oss(folder: Path) -> dict[str, Tensor]:
    """Write GPT-OSS with experts in MXFP4, and return the values of its tensors as transformers decodes them.

    Its stacks store (experts, outputs, groups, 16 bytes), and transformers computes with (experts, inputs, outputs).
    """
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**_GPT_OSS))
    tensors, config = _floats(folder, model)
    values = dict(tensors)
    decode = importlib.import_module("transformers.integrations.mxfp4").convert_moe_packed_tensors
    generator = torch.Generator().manual_seed(2)
    for name in [name for name in values if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).byte()
        scales = torch.randint(117, 123, (experts, outputs, inputs // 32), generator=generator).byte()
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = decode(blocks, scales)
    floats = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": floats}
    _write(folder, tensors, {**config, "quantization_config": settings})
    return values


def qwen3_next(folder: Path) -> dict[str, Tensor]:
    """Write Qwen3-Next in bfloat16 with the tensors of its draft layer, and return its tensors."""
    tensors, config = _floats(folder, transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**_QWEN)))
    width, generator = _SIZES["hidden_size"], torch.Generator().manual_seed(3)
    tensors |= _drafts(tensors, "model.layers.3.", "mtp.layers.0.")
    tensors["mtp.fc.weight"] = torch.randn(width, 2 * width, generator=generator).bfloat16()
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.rand(width, generator=generator).bfloat16()
    _write(folder, tensors, config)
    return tensors


def _nvfp4(packed: Tensor, scale: Tensor) -> Tensor:
    """Return values of NVFP4, float32."""
    helpers = importlib.import_module("compressed_tensors.compressors.nvfp4.helpers")
    rows, columns = packed.shape
    codes: Tensor = helpers.unpack_fp4_from_uint8(packed, rows, 2 * columns, torch.float32)
    return codes * scale.repeat_interleave(16, -1)


def _compressed(
    values: dict[str, Tensor], names: Iterable[str], form: str, weights: dict[str, Any], group: int
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return tensors with some matrices compressed by compressed-tensors, and the scheme; update their values.

    Layers of one owner share a global scale, as servers need for fused layers.
    """
    package = importlib.import_module("compressed_tensors.compressors.base")
    schema = importlib.import_module("compressed_tensors.quantization")
    scheme = schema.QuantizationScheme(targets=["Linear"], format=form, weights=schema.QuantizationArgs(**weights))
    compressor = package.BaseCompressor.get_value_from_registry(form)
    names = list(names)
    tensors = {name: tensor for name, tensor in values.items() if name not in names}
    for name in names:
        owner = name.rpartition(".")[0].rpartition(".")[0]
        largest = values[name].float().unflatten(-1, (-1, group)).abs().amax(-1)
        parts = {"weight": values[name], "weight_scale": (largest / 7.5).bfloat16()}
        if form == "nvfp4-pack-quantized":
            whole = max(float(values[n].abs().amax()) for n in names if n.startswith(owner))
            parts["weight_global_scale"] = torch.tensor([448 * 6 / whole])
            parts["weight_scale"] = (largest / 6 * parts["weight_global_scale"]).to(torch.float8_e4m3fn).float()
        else:
            parts["weight_zero_point"] = torch.zeros(parts["weight_scale"].shape, dtype=torch.int8)
        stored = compressor.compress(parts, scheme)
        stored = {leaf: tensor for leaf, tensor in stored.items() if tensor is not None}
        precise = {**stored, "weight_scale": stored["weight_scale"].float()}
        if form == "nvfp4-pack-quantized":  # compressed-tensors rounds its values to bfloat16
            values[name] = _nvfp4(stored["weight_packed"], precise["weight_scale"] / stored["weight_global_scale"])
        else:
            values[name] = compressor.decompress(precise, scheme)["weight"]
        tensors |= {f"{name.removesuffix('weight')}{leaf}": tensor for leaf, tensor in stored.items()}
    return tensors, scheme.model_dump(mode="json")


def kimi_k2(folder: Path) -> dict[str, Tensor]:
    """Write DeepSeek-V3 with routed experts in int4, as Kimi-K2-Thinking is published, and return its values."""
    values, config = _deepseek_floats(folder)
    names = [name for name in values if ".experts." in name and "layers.3." not in name]
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    tensors, scheme = _compressed(values, names, "pack-quantized", weights, 32)
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    ignore.append("re:model[.]layers[.]3[.].*")
    settings: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore}
    settings |= {"config_groups": {"group_0": scheme}, "kv_cache_scheme": None, "quantization_status": "compressed"}
    _write(folder, tensors, {**config, "quantization_config": settings})
    return values


def nvfp4(folder: Path) -> dict[str, Tensor]:
    """Write Qwen3-Next in NVFP4 as llm-compressor publishes it, with scales of activations, and return its values."""
    values = qwen3_next(folder)
    config = json.loads((folder / "config.json").read_text())
    names = _layers(values, "mtp.", "linear_attn.", "self_attn.")
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
    weights |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": "torch.float8_e4m3fn"}
    tensors, scheme = _compressed(values, names, "nvfp4-pack-quantized", weights, 16)
    scheme["input_activations"] = {**scheme["weights"], "dynamic": "local"}
    tensors |= {f"{name.removesuffix('weight')}input_global_scale": torch.tensor([128.0]) for name in names}
    ignore = ["lm_head", "re:.*linear_attn.*", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_expert_gate$"]
    settings: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": [*ignore, "re:^mtp.*"],
    }
    settings |= {"config_groups": {"group_0": scheme}, "kv_cache_scheme": None, "quantization_status": "compressed"}
    _write(folder, tensors, {**config, "quantization_config": settings})
    return values


def modelopt_nvfp4(folder: Path) -> dict[str, Tensor]:
    """Write Qwen3-Next in NVFP4 as NVIDIA publishes it, and return its values: `weight_scale_2` multiplies."""
    values = nvfp4(folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t for file in sorted(folder.glob("*.safetensors")) for n, t in load_file(file).items()}
    names = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
    ends = {name: name.rpartition(".") for name in tensors}
    tensors = {
        f"{owner}.{names.get(leaf, leaf)}": 1 / tensors[name].squeeze() if "global" in leaf else tensors[name]
        for name, (owner, _, leaf) in ends.items()
    }
    for name in [name for name in tensors if name.endswith("weight_scale_2")]:
        weight = name.removesuffix("_scale_2")
        values[weight] = _nvfp4(tensors[weight], tensors[f"{weight}_scale"].float() * tensors[name])
    activations = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}
    settings["ignore"] = ["lm_head", "mtp*", "*linear_attn*", "*self_attn*", "*.mlp.gate", "*.shared_expert_gate"]
    settings["config_groups"] = {
        "group_0": {"targets": ["Linear"], "weights": activations, "input_activations": activations}
    }
    _write(folder, tensors, {**config, "quantization_config": settings})
    return values


RELEASES: Mapping[str, Callable[[Path], dict[str, Tensor]]] = {
    "DeepSeek-V3, FP8 blocks": deepseek_v3,
    "GPT-OSS, MXFP4": gpt_oss,
    "Qwen3-Next, bfloat16": qwen3_next,
    "Kimi-K2-Thinking, int4": kimi_k2,
    "Qwen3-Next, NVFP4": nvfp4,
    "Qwen3-Next, NVFP4 of ModelOpt": modelopt_nvfp4,
}
"""Functions that write a release to a folder, and return the values of its tensors."""

DRAFTS = ("mtp.", f"model.layers.{_DEEPSEEK['num_hidden_layers']}.")
"""Beginnings of names of tensors of draft layers; the layers of Qwen3-Next end before the second."""


def is_draft(name: str, release: str) -> bool:
    """Tell whether a tensor belongs to a draft layer of a release."""
    return name.startswith(DRAFTS[0] if "Qwen" in release else DRAFTS[1])


__all__ = ["RELEASES", "is_draft"]
