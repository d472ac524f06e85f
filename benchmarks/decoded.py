"""Decoder families in ONNX Runtime with KV caches, compared with torch for 32 decode steps.

    python -m benchmarks.decoded [FAMILY …] [--weights float int4] [--write]

Each family is a causal language model of transformers with two layers and seeded random weights. The exporters of
transformers trace prefill and decode graphs with prompts of 5 tokens; `qfx.verify` decodes after prompts of 6, 12 and 1
tokens, in batches of 2, 3 and 1, two of them padded on the left. Windows have 8 tokens, so that one prompt is longer
than the window, and the others cross it while decoding. *int4* has int4 weights (`int4_weight_only`), fused operators
of ONNX Runtime, and an int8 cache.

*Right* is the number of steps until the first one that differs by more than a quantization step, one 255th of the range
of its logits; *difference* is the largest of all steps, in quantization steps. `--write` updates the sections of
`results/decoded.md` for the given weights.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import torch
import transformers
from transformers.cache_utils import DynamicCache

import quark_fx as qfx
from benchmarks.common import environment, judged, sections_of, table
from benchmarks.experiment import Option, Pages, experiment
from quark_fx.export import CacheScales, GenerationQuantizer

STEPS, WINDOW = 32, 8

_COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SLIDING = {"sliding_window": WINDOW}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", _SLIDING),
    "mixtral": ("MixtralConfig", _SLIDING | _EXPERTS),
    "qwen2": ("Qwen2Config", {}),
    "qwen2 sliding": ("Qwen2Config", _SLIDING | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", _HEADS),
    "qwen3_moe": ("Qwen3MoeConfig", _HEADS | _EXPERTS | {"num_experts": 4, "moe_intermediate_size": 16}),
    "gemma": ("GemmaConfig", _HEADS),
    "gemma2": ("Gemma2Config", _HEADS | _SLIDING | {"query_pre_attn_scalar": 8}),
    "gemma3_text": ("Gemma3TextConfig", _HEADS | _MIXED | {"query_pre_attn_scalar": 8}),
    "phi": ("PhiConfig", {}),
    "phi3": ("Phi3Config", _SLIDING),
    "gpt2": ("GPT2Config", _GPT),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    ),
    "opt": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", {}),
    "falcon alibi": ("FalconConfig", {"alibi": True, "multi_query": False}),
    "mpt": ("MptConfig", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", _SLIDING),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", _MIXED),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", _MIXED),
    "granite": ("GraniteConfig", {}),
    "gpt_oss": ("GptOssConfig", _HEADS | _MIXED | _EXPERTS),
    "smollm3": ("SmolLM3Config", _MIXED | {"use_sliding_window": True}),
    "exaone4": ("Exaone4Config", _MIXED),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "glm4": ("Glm4Config", _HEADS),
    "phi3 longrope": (
        "Phi3Config",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [4.0] * 4,
            },
        },
    ),
    "llama dynamic rope": (
        "LlamaConfig",
        {
            "max_position_embeddings": 16,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        },
    ),
}
"""The configuration class of each family, and options besides the common ones."""


def model_of(family: str) -> Any:
    """Return a model with random weights, large enough that its predictions depend on what it attends to."""
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_config(getattr(transformers, name)(**_COMMON | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5)
    model.generation_config.use_cache = True  # MPT's configuration has no cache unless told
    return model


def prompt(rows: int, length: int, padded: int = 0) -> dict[str, torch.Tensor]:
    """Return a seeded prompt whose first row is padded on the left."""
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def compared(family: str, weights: str, folder: str) -> dict[str, Any]:
    """Export a family to a folder and return how far its decode steps are from torch."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    model = exported = model_of(family)
    layers = DynamicCache(config=model.config).layers
    found: dict[str, Any] = {"windows": sum(layer.is_sliding for layer in layers if hasattr(layer, "is_sliding"))}
    try:
        config = OnnxConfig(dynamic=True)
        if weights == "int4":
            data = [prompt(4, 24)]
            model = qfx.quantize(model, "int4_weight_only", data, progress=False)
            exported = model.eager()
            cache = CacheScales.measure(exported, data)
            config = OnnxConfig(
                dynamic=True, ort_fusions="cpu", quantizer=GenerationQuantizer("matmul_nbits", cache=cache)
            )
        OnnxExporter().export_for_generation(exported, prompt(2, 5, 1), config).save_pretrained(folder)
        result = qfx.verify(model, folder, [prompt(2, 6, 2), prompt(3, 12, 5), prompt(1, 1)], decode_steps=STEPS)
    except Exception as error:  # whatever refuses it; the page says what
        cause = error.__cause__ or error
        return found | {"refused": f"{type(cause).__name__}: {cause}".splitlines()[0][:120]}
    names = [difference.name for difference in result.differences]
    right = names.index(result.first_wrong.name) - 1 if result.first_wrong else STEPS
    return found | {"right": right, "steps": result.max_steps}


def _rows(families: list[str], weights: str) -> Iterator[list[str]]:
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            found = compared(family, weights, folder)
        windows = str(found["windows"] or "–")
        if "refused" in found:
            row = [family, windows, "refused", found["refused"]]
        else:
            row = [family, windows, f"{found['right']} of {STEPS}", f"{found['steps']:.4f}"]
        print(weights, *row, sep=" | ", file=sys.stderr, flush=True)
        yield row


@experiment(page="decoded.md", own_environment=True)
def main(
    *families: Annotated[str, Option("default: all", choices=FAMILIES)],
    weights: Annotated[Sequence[str], Option(choices=["float", "int4"])] = ("float", "int4"),
    write: bool = False,
) -> Pages:
    """Measure, and yield the page; return 1 if a cell is wrong."""
    if write and families:
        sys.exit("--write is for all families")
    torch.set_num_threads(1)
    sections = sections_of("decoded.md") if write else {}
    outcomes = {"refused": "refused", f"{STEPS} of {STEPS}": "right"}
    counts: Counter[str] = Counter()
    for form in weights:
        rows = list(_rows([*families] or [*FAMILIES], form))
        counts.update(outcomes.get(row[2], "wrong") for row in rows)
        header = ("family", "layers with a window", "right", "difference, or why it is refused")
        sections[form] = f"## {form}\n\n{table(header, rows)}\n\n{environment()}\n"
        heading = (
            "# Decoder families\n\nWritten by `python -m benchmarks.decoded --write`; `--weights` chooses sections.\n"
            "The docstring of the command says what is measured.\n"
        )
        yield "\n".join([heading, *sections.values()])
    return judged(counts)


if __name__ == "__main__":
    main()
