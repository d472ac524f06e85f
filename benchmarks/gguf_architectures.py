"""GGUF files of the architectures that people convert, compared with llama.cpp's logits.

    pip install --no-deps xllamacpp        (in an environment of its own: llama.cpp, built)
    python -m benchmarks.gguf_architectures --llama-cpp PYTHON [ARCHITECTURE …] [--write]

Each model is a causal language model of transformers with a few layers and seeded random weights, large enough that its
predictions depend on what it attends to. Linear layers are Q8_0, and embeddings, heads, and routers stay in float.
llama.cpp rounds activations to 8 bits and caches to float16, so its logits differ a little: the divergence is compared
with the one of Llama, whose file transformers reads exactly. Rounding also changes which experts a router chooses. *Top
token* is the fraction of tokens with the same prediction.

`--write` updates `results/gguf_architectures.md`.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

import quark_fx as qfx
from benchmarks.common import environment, peer_job, publish, table
from quark_fx.config.quant_config import QuantConfig, Target
from quark_fx.errors import ExportError

_COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GEMMA = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 8, "num_hidden_layers": 6}
_SCALED = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", {}),
    "Llama, scaled positions": (
        "LlamaConfig",
        {"rope_parameters": {**_SCALED, "original_max_position_embeddings": 64}},
    ),
    "Mistral": ("MistralConfig", {"sliding_window": None}),
    "Mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Phi-3": ("Phi3Config", {"sliding_window": None}),
    "Gemma 2": ("Gemma2Config", _GEMMA),
    "Gemma 3": ("Gemma3TextConfig", _GEMMA),
    "Qwen2": ("Qwen2Config", {}),
    "Qwen2-MoE": ("Qwen2MoeConfig", _EXPERTS | {"shared_expert_intermediate_size": 32}),
    "Qwen3": ("Qwen3Config", {"head_dim": 16}),
    "Qwen3-MoE": ("Qwen3MoeConfig", _EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "Granite": (
        "GraniteConfig",
        {"embedding_multiplier": 4.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "Cohere": ("CohereConfig", {"logit_scale": 1.0}),
    "Cohere 2": ("Cohere2Config", {"logit_scale": 1.0, "sliding_window": 8}),
    "OLMo2": ("Olmo2Config", {}),
    "SmolLM3": ("SmolLM3Config", {}),
}
"""The configuration class of each architecture, and options besides the common ones."""


def byte_tokens() -> Any:
    """Return a tokenizer of bytes, and one pair, because llama.cpp loads no file without merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {token: number for number, token in enumerate(["<|endoftext|>", *alphabet, alphabet[0] + alphabet[1]])}
    pairs = Tokenizer(models.BPE(words, [(alphabet[0], alphabet[1])]))
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token="<|endoftext|>")


def model_of(name: str, vocab_size: int) -> Any:
    """Return a model with random weights."""
    kind, options = ARCHITECTURES[name]
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM
    model = make.from_config(getattr(transformers, kind)(**_COMMON | {"vocab_size": vocab_size} | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 1.2 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(0.1 * torch.rand_like(parameter))
    return model


def main() -> None:
    """Compare, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", choices=[*ARCHITECTURES, []], help="default: all")
    parser.add_argument("--llama-cpp", type=Path, required=True, help="python of an environment with xllamacpp")
    parser.add_argument("--write", action="store_true", help="update results/gguf_architectures.md")
    arguments = parser.parse_args()
    if arguments.write and arguments.architectures:
        parser.error("--write is for all architectures")
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    tokenizer = byte_tokens()
    size = len(tokenizer)
    tokens = torch.randint(3, size, (1, 48), generator=torch.Generator().manual_seed(0))
    config = QuantConfig(
        weight=qfx.gguf_types.Q8_0, exclude=("op:embedding", "op:head", "op:router"), target=Target.TORCH
    )
    expected, refused = dict[str, torch.Tensor](), dict[str, str]()
    with tempfile.TemporaryDirectory() as name:
        folder, files = Path(name), dict[str, str]()
        for architecture in arguments.architectures or ARCHITECTURES:
            qmodel = qfx.quantize(model_of(architecture, size), config, [{"input_ids": tokens}], progress=False)
            try:
                path = qfx.export.gguf(qmodel, folder / f"{len(files)}.gguf", tokenizer=tokenizer)
            except ExportError as error:
                refused[architecture] = str(error).splitlines()[0][:100]
                continue
            files[architecture] = str(path)
            with torch.no_grad():
                expected[architecture] = qmodel.eager()(input_ids=tokens).logits[0].log_softmax(-1)
        job = {"files": files, "tokens": tokens[0].tolist(), "size": size, "output": str(folder / "logits.json")}
        peer_job(arguments.llama_cpp, "llama_cpp_logits", job, folder)
        logits = json.loads((folder / "logits.json").read_text(encoding="utf-8"))
    rows = []
    for architecture, ours in expected.items():
        if not logits[architecture]:
            rows.append([architecture, "not loaded", "–", "–"])
            continue
        theirs = torch.tensor(logits[architecture]).log_softmax(-1)
        divergence = F.kl_div(theirs, ours, log_target=True, reduction="batchmean")
        same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
        rows.append([architecture, f"{divergence:.1e}", f"{(theirs - ours).abs().max():.2f}", f"{same:.2f}"])
    rows += [[architecture, f"refused: {why}", "–", "–"] for architecture, why in refused.items()]
    header = ("architecture", "divergence from torch", "largest difference of log probabilities", "top token")
    text = (
        "# GGUF files in llama.cpp, by architecture\n\nWritten by `python -m benchmarks.gguf_architectures "
        "--llama-cpp PYTHON --write`. The docstring of the command says what is measured.\n\n"
        f"{table(header, rows)}\n\n{environment()}"
    )
    publish(text, "gguf_architectures.md" if arguments.write else None)


if __name__ == "__main__":
    main()
