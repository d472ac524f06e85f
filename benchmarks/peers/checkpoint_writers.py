"""llm-compressor and GPTQModel quantize a small Llama with random weights; started by `benchmarks.inspected`.

    peer/bin/python -m benchmarks.peers.checkpoint_writers TOOL FOLDER

The environment needs transformers and the tool, `llm-compressor` or `gptqmodel`, not quark_fx. `FOLDER/float` is a
checkpoint with a tokenizer; every checkpoint that the tool writes goes to a folder beside it.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

SCHEMES = ("W4A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16", "MXFP4", "MXFP8")
"""Of llm-compressor."""

SETTINGS: dict[str, dict[str, Any]] = {
    "int4": {"bits": 4, "group_size": 32},
    "asymmetric": {"bits": 4, "group_size": 32, "sym": False},
    "gptq_v2": {"bits": 4, "group_size": 32, "format": "gptq_v2"},
    "int3": {"bits": 3, "group_size": 32},
    "dynamic": {
        "bits": 4,
        "group_size": 32,
        "dynamic": {r"+:.*\.mlp\.down_proj.*": {"bits": 8, "group_size": 64}, r"-:.*\.1\.self_attn.*": {}},
    },
}
"""Of GPTQModel."""


def llm_compressor(folder: Path) -> None:
    """Write one checkpoint for each scheme, and one with rounded keys and values."""
    from datasets import Dataset  # type: ignore[import-not-found]
    from llmcompressor import oneshot  # type: ignore[import-not-found]
    from llmcompressor.modifiers.quantization import QuantizationModifier  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = Dataset.from_dict({"input_ids": tokens().tolist(), "attention_mask": [[1] * 32] * 8})
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    settings: dict[str, dict[str, Any]] = {name: {"scheme": name} for name in SCHEMES}
    settings["FP8-cache"] = {"scheme": "FP8", "kv_cache_scheme": cache}
    for name, options in settings.items():
        model = AutoModelForCausalLM.from_pretrained(folder / "float", dtype=torch.bfloat16)
        recipe = QuantizationModifier(targets="Linear", ignore=["lm_head"], **options)
        processor = AutoTokenizer.from_pretrained(folder / "float")
        oneshot(model=model, processor=processor, dataset=data, recipe=recipe, num_calibration_samples=8)
        model.save_pretrained(folder / f"llm-compressor {name}", save_compressed=True)


def gptqmodel(folder: Path) -> None:
    """Write one checkpoint for each setting."""
    import gptqmodel as package  # type: ignore[import-not-found]

    package._default_cpu_workers = lambda: 2  # where there are few cores it gives its loaders fewer than they ask for
    data = [{"input_ids": row[None], "attention_mask": torch.ones(1, 32, dtype=torch.int64)} for row in tokens()]
    for name, options in SETTINGS.items():
        config = package.QuantizeConfig(**options, device="cpu")
        model = package.GPTQModel.load(str(folder / "float"), config)
        model.quantize(data, batch_size=4)
        model.save(str(folder / f"gptqmodel {name}"))


def tokens() -> torch.Tensor:
    """Return 8 windows of 32 tokens."""
    return torch.randint(256, (8, 32), generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"llm-compressor": llm_compressor, "gptqmodel": gptqmodel}[sys.argv[1]](Path(sys.argv[2]))
