"""GGUF files of the architectures that people convert, compared with llama.cpp's logits.

    pip install llama-cpp-python           (builds llama.cpp)
    python -m benchmarks.gguf_architectures [--architectures ARCHITECTURE …] [--write]

Each model is a causal language model of transformers with a few layers and seeded random weights, large enough that its
predictions depend on what it attends to. Linear layers are Q8_0, and embeddings, heads, and routers stay in float.
llama.cpp rounds the inputs of quantized matrices to 8 bits, and caches to float16, so its logits differ a little from
the logits of torch: the divergence (KL) is shown next to the one of torch with inputs rounded in the same blocks.
Rounding also changes which experts a router chooses. *Top token* is the fraction of tokens with the same prediction.
*SQNR* and *verdict* come from `verify(…, runtime="llama.cpp")`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn import functional as F

import quark_fx as qfx
from benchmarks.common import one_thread, table
from benchmarks.experiment import Option, experiment
from quark_fx.config.quant_config import QuantConfig, Target
from quark_fx.errors import ExportError
from quark_fx.export.runtime.checkpoint_runners import LlamaCppRunner
from quark_fx.export.runtime.rounding_noise import runs_with_rounded_inputs

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


@experiment(page="gguf_architectures.md")
def main(architectures: Annotated[Sequence[str], Option(choices=ARCHITECTURES)] = tuple(ARCHITECTURES)) -> str:
    """Compare, and return the page."""
    tokenizer = byte_tokens()
    tokens = torch.randint(3, len(tokenizer), (1, 48), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens}
    config = QuantConfig(
        weight=qfx.gguf_types.Q8_0, exclude=("op:embedding", "op:head", "op:router"), target=Target.TORCH
    )
    rows = []
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(architectures):
            qmodel = qfx.quantize(model_of(name, len(tokenizer)), config, [batch], progress=False)
            try:
                path = qfx.export.gguf(qmodel, Path(folder) / f"{number}.gguf", tokenizer=tokenizer)
                found = qfx.verify(qmodel, path, [batch], runtime="llama.cpp")
            except ExportError as error:
                rows.append([name, *["–"] * 5, str(error).splitlines()[0][:100]])
                continue
            runner = LlamaCppRunner(path)
            ((_, (rounded, *_)),) = runs_with_rounded_inputs(qmodel.graph_module, [[tokens]], runner.block_size)
            ours = qmodel(**batch).logits[0].detach().log_softmax(-1)
            theirs = runner(batch)["logits"][0].log_softmax(-1)
            same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean()
            divergences = [
                F.kl_div(x, ours, log_target=True, reduction="batchmean") for x in (theirs, rounded[0].log_softmax(-1))
            ]
            largest = (theirs - ours).abs().max()
            rows.append(
                [
                    name,
                    *(f"{d:.1e}" for d in divergences),
                    f"{largest:.2f}",
                    f"{same:.2f}",
                    f"{found['logits'].sqnr:.1f}",
                    found.verdict,
                ]
            )
    header = (
        *(
            "architecture",
            "KL in llama.cpp",
            "KL with 8-bit inputs in torch",
            "largest difference of log probabilities",
        ),
        *("top token", "SQNR dB", "verdict"),
    )
    return f"""# GGUF files in llama.cpp, by architecture

Written by `python -m benchmarks.gguf_architectures --write`. The docstring of the command says what is measured.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
