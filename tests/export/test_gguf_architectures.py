"""Files of architectures that transformers' GGUF reader lacks have the names, keys, and rows that llama.cpp reads.

`python -m benchmarks.gguf_architectures` compares the logits of llama.cpp.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoint_readers import read_checkpoints_here
from seeded_models import seeded
from test_gguf import EXACT, config
from test_huggingface import IDS, logits, quantized
from torch import Tensor

import quark_fx as qfx
from quark_fx.checkpoints.gguf_architectures import ARCHITECTURES
from quark_fx.errors import ExportError

package = pytest.importorskip("gguf")

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
DEEP = {"num_hidden_layers": 4}
"""For architectures whose fourth layer differs from the ones before it."""
HEADS = {"attn_q": 4, "attn_k": 2}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.2, "logits_scaling": 8.0}

MODELS: dict[str, tuple[str, dict[str, Any], dict[str, str], dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}, NORMS, {"llama.attention.head_count_kv": 2}),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2},
        NORMS | {"ffn_gate_inp": "mlp.gate"},
        {"llama.expert_count": 4, "llama.expert_used_count": 2},
    ),
    "granite": (
        "Granite",
        GRANITE,
        NORMS,
        {
            "granite.attention.scale": 0.1,
            "granite.embedding_scale": 12.0,
            "granite.residual_scale": 0.2,
            "granite.logit_scale": 8.0,
        },
    ),
    "cohere": (
        "Cohere",
        {"logit_scale": 0.5},
        {"attn_norm": "input_layernorm"},
        {"command-r.logit_scale": 0.5, "command-r.attention.layer_norm_epsilon": 1e-5},
    ),
    "cohere2": (
        "Cohere2",
        {"sliding_window": 8, **DEEP},
        {"attn_norm": "input_layernorm"},
        {"cohere2.attention.sliding_window": 8, "cohere2.logit_scale": 0.0625},
    ),
    "olmo2": (
        "Olmo2",
        {"rms_norm_eps": 1e-3},
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
        {"olmo2.attention.layer_norm_rms_epsilon": 1e-3},
    ),
    "smollm3": ("SmolLM3", DEEP, NORMS, {"smollm3.rope.freq_base": 2e6}),
}
"""Class, options, names of tensors in a layer besides attention and MLP, and keys of the file."""


def written(family: str, options: dict[str, Any], path: Path) -> tuple[Any, Any, Any]:
    """Return a model, the quantized one, in which all layers but one stay in float, and the reader of its file."""
    model = seeded(
        getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**SMALL | options))
    )
    with torch.no_grad():
        for parameter in model.parameters():  # no norm is that of a new model
            if parameter.dim() == 1:
                parameter += torch.arange(len(parameter)) / 100
    left = ("*self_attn*", "op:router", "*layers.[1-3]*", "*gate_proj", "*up_proj")
    base = config(EXACT["Q8_0"])
    qmodel = quantized(base.replace(exclude=(*base.exclude, *left)), model)
    return model, qmodel, package.GGUFReader(qfx.export.gguf(qmodel, path))


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any, Path]]:
    """Write a file of each row once; return the model, the quantized one, and the file."""

    @cache
    def file_of(name: str) -> tuple[Any, Any, Path]:
        path = tmp_path_factory.mktemp("row") / "model.gguf"
        model, qmodel, _ = written(*MODELS[name][:2], path)
        return model, qmodel, path

    return file_of


def in_pairs(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of each head in the order of llama.cpp: the halves that turn together alternate."""
    halves: Tensor = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).flatten(0, 2)


def test_every_row_is_tested() -> None:
    assert MODELS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", MODELS)
def test_a_row_has_the_tensors_and_keys_of_llama_cpp(name: str, row: Callable[[str], tuple[Any, Any, Path]]) -> None:
    others, keys = MODELS[name][2:]
    model, _, path = row(name)
    file = package.GGUFReader(path)
    stored = {t.name: t for t in file.tensors}
    attention = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")}
    attention["attn_output"] = "self_attn.o_proj"
    mlp = {} if name == "mixtral" else {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
    turned = "LlamaTensorProcessor" in ARCHITECTURES[name].steps
    layers = model.config.num_hidden_layers
    in_float = {**attention, **mlp, **others}
    for layer in range(0, layers, 3):
        for theirs, ours in in_float.items():
            if (layer, theirs) == (0, "ffn_down"):  # the weight of codes
                continue
            expected = model.get_parameter(f"model.layers.{layer}.{ours}.weight").detach()
            if turned and theirs in HEADS:
                expected = in_pairs(expected, HEADS[theirs])
            values = torch.from_numpy(np.array(stored[f"blk.{layer}.{theirs}.weight"].data))
            assert torch.equal(values, expected), theirs
    if name == "mixtral":
        stack = model.model.layers[0].mlp.experts.gate_up_proj.detach()
        for part, half in zip(("gate", "up"), stack.chunk(2, 1), strict=True):
            assert torch.equal(torch.from_numpy(np.array(stored[f"blk.0.ffn_{part}_exps.weight"].data)), half)
    assert stored["blk.0.ffn_down.weight" if mlp else "blk.0.ffn_down_exps.weight"].tensor_type.name == "Q8_0"
    architecture = ARCHITECTURES[name].name
    keys = keys | {f"{architecture}.block_count": layers, f"{architecture}.context_length": 64}
    contents = {key: field.contents() for key, field in file.fields.items()}
    assert contents["general.architecture"] == architecture
    assert {key: pytest.approx(contents[key]) for key in keys} == keys


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED = {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}, "max_position_embeddings": 512}


def test_positions_scaled_as_in_llama_3_are_divisors_of_frequencies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_checkpoints_here(monkeypatch)
    _, qmodel, file = written("Llama", SCALED, tmp_path / "model.gguf")
    (stored,) = (tensor.data for tensor in file.tensors if tensor.name == "rope_freqs.weight")
    expected = []
    for i in range(8):
        turns = 64 * 5e5 ** (-i / 8) / (2 * math.pi)
        smooth = min(max((turns - 1) / (4 - 1), 0), 1)
        expected.append(1 / ((1 - smooth) / 8 + smooth))
    torch.testing.assert_close(torch.tensor(stored), torch.tensor(expected), rtol=1e-5, atol=0)
    assert len(set(expected)) > 2, "one is between the ends"
    assert qfx.verify(qmodel, tmp_path / "model.gguf", [{"input_ids": IDS}]).verdict == "correct"


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads of another width": ("Llama", {"head_dim": 32}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "positions as in Llama 3": ("Llama", SCALED),
    "phi3": ("Phi3", {"sliding_window": None}),
    "gemma2": ("Gemma2", {"head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 2}),
    "gemma3": ("Gemma3", {"head_dim": 256, "sliding_window": 32}),
    "qwen2": ("Qwen2", {}),
    "qwen2moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "stablelm": ("StableLm", {}),
    "nemotron": ("Nemotron", {}),
    "starcoder2": ("Starcoder2", {}),
    "minimax": (
        "MiniMaxM2",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "rotary_dim": 16, "scoring_func": "sigmoid"},
    ),
}
"""Class and options of models of one layer, or of as many as differ; sizes are not the defaults of their classes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_every_architecture_that_is_written_is_opened(
    name: str, row: Callable[[str], tuple[Any, Any, Path]], tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    if name in MODELS:
        source, qmodel, path = row(name)
    elif name == "gemma3":
        sizes = SMALL | OTHERS[name][1]
        source = seeded(transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes)))
        qmodel = quantized(config(EXACT["Q8_0"]), source)
        qfx.export.gguf(qmodel, path)
    else:
        family, options = OTHERS[name]
        source, qmodel, _ = written(family, options, path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        opened: Any = qfx.open_checkpoint(path)
    # llama.cpp has one architecture for both.
    assert type(opened) is (transformers.LlamaForCausalLM if name == "mistral" else type(source))
    torch.testing.assert_close(logits(opened), logits(qmodel), rtol=1e-5, atol=1e-5)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "window": ("Mistral", {"sliding_window": 8}, "llama, .*sliding_window"),
    "positions": ("SmolLM3", {"no_rope_layers": [0]}, "smollm3, .*no_rope_layers"),
    "kind of layers": ("Cohere2", {"layer_types": ["full_attention"]}, "cohere2, .*layer_types"),
    "scale of scores in llama.cpp": (
        "Gemma2",
        {"head_dim": 32, "sliding_window": 8},
        "gemma2, .*query_pre_attn_scalar",
    ),
    "other scaling": (
        "Granite",
        {"rope_parameters": SCALED["rope_parameters"]},
        "positions are scaled",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_fields_without_a_key_are_refused(name: str, tmp_path: Path) -> None:
    family, options, message = WRONG[name]
    with pytest.raises(ExportError, match=message):
        written(family, options, tmp_path / "model.gguf")
