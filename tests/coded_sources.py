"""Small checkpoints in the layouts of codes of other tools, written as their own scripts describe them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LAYER = "model.layers.0.mlp.gate_proj"


def words_of(codes: Tensor, bits: int) -> Tensor:
    """Return the columns of a matrix of codes as 32-bit words, one after the other, as GPTQ's scripts describe them."""
    words = []
    for column in codes.t().tolist():
        text = sum(code << bits * place for place, code in enumerate(column))
        count = -(-bits * len(column) // 32)
        words.append([(text >> 32 * i & 0xFFFFFFFF) - (1 << 32) * (text >> 32 * i + 31 & 1) for i in range(count)])
    return torch.tensor(words, dtype=torch.int32).t().contiguous()


def gptq(
    folder: Path,
    bits: int = 4,
    *,
    version: int = 1,
    group: int = 32,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> Tensor:
    """Write a layer of GPTQ with inputs in any order of groups, next to floats, and return its values."""
    generator = torch.Generator().manual_seed(bits)
    inputs, outputs = 64, 96
    codes = torch.randint(0, 1 << bits, (inputs, outputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (inputs // group, outputs), generator=generator)
    scales = torch.rand(inputs // group, outputs, generator=generator).half()
    g_idx = (torch.arange(inputs) // group)[torch.randperm(inputs, generator=generator)].int()
    folder.mkdir(exist_ok=True)
    tensors = {
        f"{LAYER}.qweight": words_of(codes, bits),
        f"{LAYER}.qzeros": words_of((zeros - int(version == 1)).t(), bits).t().contiguous(),
        f"{LAYER}.scales": scales,
        f"{LAYER}.g_idx": g_idx,
        f"{LAYER}.bias": torch.ones(outputs),
        "model.norm.weight": torch.ones(inputs),
    }
    save_file(tensors, folder / "model.safetensors")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": True, "sym": False}
    settings |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"} | dict(config)
    described = {"architectures": ["LlamaForCausalLM"], "dtype": "float16", "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(described))
    return ((codes - zeros[g_idx.long()]) * scales.float()[g_idx.long()]).t()


def awq(folder: Path) -> None:
    """Write a layer of random codes of AWQ."""
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(-(1 << 31), 1 << 31, (rows, 12), generator=generator).int() for rows in (64, 2)]
    tensors = {f"{LAYER}.qweight": words[0], f"{LAYER}.qzeros": words[1]}
    tensors[f"{LAYER}.scales"] = torch.rand(2, 96, generator=generator).half()
    settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))


def modelopt(source: Path, folder: Path) -> None:
    """Write a source in NVFP4 of compressed-tensors as ModelOpt does: its global scales multiply."""
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        renamed = name.replace("weight_packed", "weight").replace("weight_global_scale", "weight_scale_2")
        tensors[renamed] = 1 / tensor.squeeze() if "global" in name else tensor
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def mxfp4(folder: Path) -> dict[str, Tensor]:
    """Write stacks of experts as GPT-OSS does, and return their tensors."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir(exist_ok=True)
    tensors = {}
    for name, outputs, inputs in (("gate_up_proj", 128, 64), ("down_proj", 64, 64)):
        blocks, scales = (3, outputs, inputs // 32, 16), (3, outputs, inputs // 32)
        tensors[f"experts.{name}_blocks"] = torch.randint(0, 256, blocks, generator=generator).byte()
        tensors[f"experts.{name}_scales"] = torch.randint(115, 130, scales, generator=generator).byte()
        tensors[f"experts.{name}_bias"] = torch.ones(3, outputs).bfloat16()
    tensors["self_attn.q_proj.weight"] = torch.randn(64, 64, generator=generator).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    described: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16"}
    described |= {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(described))
    return tensors
