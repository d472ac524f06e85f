"""Small language models that quantization can hurt: four architectures trained on the text that comes with Python.

    python -m benchmarks.language_models

They read the standard library: its docstrings, the source of a quarter of its files and the language reference behind
`help()`, in tokens of 1,024 byte pairs; every eighth file is held out whole. Vectors of 256 channels, 4 layers, 256
tokens of context. After 1.3 million tokens their perplexity on held-out ones is 35 to 56; more than 32 tokens of
context hardly lower it. Rounding the Llama's weights to the nearest of 4, 3 and 2 bits in groups of 128 raises its
perplexity by 0.3, 1.2 and 34 %. No channel of the residual stream stands out (the largest is 4.4 times the median), but
some of the MLPs' do; of the last layers' experts some read one token in 100. `llama_outliers` is that Llama with six
channels of what each norm writes 10 to 40 times as large, and the weights that read them as much smaller: its function
is unchanged.

A model is trained on one thread the first time it is loaded, in five to eight minutes, and kept in the folder named by
`QUARK_FX_CACHE` (default: `~/.cache/quark_fx`). The command trains all that are missing.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import math
import os
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any
from zlib import crc32

import torch
from safetensors import safe_open
from safetensors.torch import load_model, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

import quark_fx as qfx
from benchmarks.common import one_thread, table
from benchmarks.experiment import experiment
from quark_fx.evaluation import LanguageModeling

RECIPE = 1
"""Part of the cached files' path: raise it with every change to text, tokens, models or training."""

CONTEXT, VOCABULARY, END = 256, 1024, "<|endoftext|>"

HELD_OUT = 160
"""Windows to be judged by, 40,800 predicted tokens."""

_PLANTED = 6
"""Outlier channels of a norm."""

_BATCH = 8
"""Windows in a batch of calibration and of judging."""

Runnable = Callable[..., Any]
"""What is called with the keywords of a batch, as a model of `transformers`, and returns logits."""


@dataclass(frozen=True)
class Trained:
    """A trained model with the text it may be calibrated on and the text it is judged by.

    Attributes:
        model: in eval mode, float32, without key-value cache unless `generate` is told to use one.
        tokenizer: the byte pairs it reads.
        calibration: 8 batches `{"input_ids": (8, 256)}` of the training text.
        held_out: 20 such batches of files that nothing else is taken from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    calibration: list[dict[str, Tensor]]
    held_out: list[dict[str, Tensor]]

    def loss(self, runnable: Runnable | None = None) -> float:
        """Return the mean cross entropy of the held-out tokens in nats, of the model's logits by default."""
        return math.log(self.perplexity(runnable))

    def perplexity(self, runnable: Runnable | None = None) -> float:
        """Return e to the power of the mean cross entropy of the held-out tokens."""
        return qfx.evaluate(runnable or self.model, LanguageModeling(self.held_out))["perplexity"]

    def bits_per_byte(self, runnable: Runnable | None = None) -> float:
        """Return `loss` in bits, divided by the mean length of a held-out token in bytes, an end counting none."""
        # Byte-level pairs spell each byte as one character.
        lengths = torch.tensor(
            [0 if t == END else len(t) for t in self.tokenizer.convert_ids_to_tokens(range(VOCABULARY))]
        )
        tokens = torch.cat([batch["input_ids"][:, 1:] for batch in self.held_out])
        return self.loss(runnable) / math.log(2) / float(lengths[tokens].double().mean())

    def figures(self, runnable: Runnable) -> dict[str, float]:
        """Return `perplexity` and `KL`, the mean divergence of predictions from the model's, in nats per token."""
        return qfx.evaluate(runnable, LanguageModeling(self.held_out, reference=self._reference))

    def divergence(self, runnable: Runnable) -> float:
        """Return `KL` of `figures`."""
        return self.figures(runnable)["KL"]

    def _reference(self, input_ids: Tensor) -> Tensor:
        return self._expected[id(input_ids)]

    @cached_property
    def _expected(self) -> dict[int, Tensor]:
        # Half precision for memory's sake: 84 MB. Whoever reads them normalizes them again.
        with torch.no_grad():
            logits = ((batch["input_ids"], self.model(**batch).logits) for batch in self.held_out)
            return {id(ids): found.float().log_softmax(-1).half() for ids, found in logits}


@cache
def load(name: str, seed: int = 0) -> Trained:
    """Return a model from the cache, trained now if it is not there or read another Python's text.

    Callers leave it as it is.

    Raises:
        KeyError: if `name` is not in `MODELS`.
    """
    if name == OUTLIERS:
        plain = load("llama", seed)
        found = replace(plain, model=copy.deepcopy(plain.model))
        _plant_outliers(found.model)
        return found
    config = _CONFIGS[name]
    file = cache_folder() / f"{name}-{seed}.safetensors"
    if not file.exists() or _metadata(file).get("text") != data().digest:
        start = time.process_time()
        model = train(config, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        # Renaming is atomic: whoever reads meanwhile finds the whole file or none.
        partial = file.with_suffix(f".{os.getpid()}")
        seconds = f"{time.process_time() - start:.0f}"
        save_model(model, str(partial), metadata={"text": data().digest, "seconds": seconds})
        partial.replace(file)
    model = _build(config, seed)
    load_model(model, file)
    return Trained(model.eval(), data().tokenizer, _batches(data().calibration), _batches(data().held_out))


def _plant_outliers(model: PreTrainedModel) -> None:
    """Make some channels that norms write larger, and the weights that read them as much smaller."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                channels = torch.randperm(len(norm.weight), generator=generator)[:_PLANTED]
                factors = torch.empty(_PLANTED, dtype=torch.float32).uniform_(10, 40, generator=generator)
                norm.weight[channels] *= factors
                for reader in readers:
                    reader.weight[:, channels] /= factors


def seconds(name: str, seed: int = 0) -> float:
    """Return the processor time that training a cached model took."""
    return float(_metadata(cache_folder() / f"{name}-{seed}.safetensors")["seconds"])


def _metadata(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def cache_folder() -> Path:
    """Return the folder of the current recipe's models, which need not exist."""
    root = os.environ.get("QUARK_FX_CACHE") or Path.home() / ".cache" / "quark_fx"
    return Path(root) / "language_models" / f"v{RECIPE}"


@dataclass(frozen=True)
class Data:
    """What all models and seeds share.

    Attributes:
        tokenizer: trained on the training text.
        digest: of the whole text, which differs from Python to Python.
        training: the training tokens in one row, `(tokens,)`.
        calibration: windows of the training tokens, `(64, 256)`.
        held_out: windows of the held-out files, `(160, 256)`, that do not overlap.
    """

    tokenizer: PreTrainedTokenizerFast
    digest: str
    training: Tensor
    calibration: Tensor
    held_out: Tensor


@cache
def data() -> Data:
    """Read and split the text, train the tokenizer, and choose the windows to calibrate on and to judge by."""
    documents = list(_documents())
    training = [*topics.values(), *(text for text, held_out in documents if text and not held_out)]
    judged = [text for text, held_out in documents if text and held_out]
    tokenizer = _tokenizer(training)

    def tokens(texts: list[str]) -> Tensor:
        return torch.tensor([i for text in texts for i in (*tokenizer.encode(text), tokenizer.eos_token_id)])

    row = tokens(training)
    starts = torch.randint(len(row) - CONTEXT, (64, 1), generator=torch.Generator().manual_seed(0))
    windows = tokens(judged).unfold(0, CONTEXT, CONTEXT)
    spread = torch.arange(HELD_OUT) * len(windows) // HELD_OUT
    digest = hashlib.sha256("\0".join([*training, *judged]).encode()).hexdigest()
    return Data(tokenizer, digest, row, row[starts + torch.arange(CONTEXT)], windows[spread])


def _documents() -> Iterator[tuple[str, bool]]:
    """Yield the docstrings of every file, and the source of every fourth, and whether the file is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    # Tables of characters, the reference that `topics` holds already, and what differs from installation to
    # installation.
    skipped = {"encodings", "pydoc_data", "site-packages", "dist-packages", "test", "tests", "__pycache__"}
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if skipped.intersection(path.parts) or path.parts[0].startswith(("_sysconfigdata", "config-", "sitecustomize")):
            continue
        kind, held_out = divmod(crc32(path.as_posix().encode()), 8)
        source = file.read_text(encoding="utf-8", errors="replace")
        yield _docstrings(source), held_out == 0
        if kind % 4 == 0:
            yield source, held_out == 0


def _docstrings(source: str) -> str:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    # An escape may stand for half a surrogate pair, which is no text.
    return "\n\n".join(filter(None, map(ast.get_docstring, nodes))).encode(errors="replace").decode()


def _tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pairs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    pairs.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=pairs, bos_token=END, eos_token=END, pad_token=END, model_max_length=10**9
    )


def _batches(windows: Tensor) -> list[dict[str, Tensor]]:
    return [{"input_ids": batch} for batch in windows.split(_BATCH)]


_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.05,
    "use_cache": False,
}


def llama() -> PretrainedConfig:
    """Return a Llama of two key-value heads for four heads."""
    return LlamaConfig(**_SHARED, intermediate_size=768, num_key_value_heads=2)


def gpt2() -> PretrainedConfig:
    """Return a GPT-2, whose linear layers are `Conv1D` modules and whose head is its embedding."""
    return GPT2Config(**_SHARED, n_inner=768, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def opt() -> PretrainedConfig:
    """Return an OPT: biases everywhere, ReLU, and a head that is its embedding."""
    return OPTConfig(**_SHARED, word_embed_proj_dim=256, ffn_dim=768, dropout=0.0, init_std=0.05)


def qwen3_moe() -> PretrainedConfig:
    """Return a Qwen3-MoE of eight experts, two of which read a token, with norms of queries and keys."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    return Qwen3MoeConfig(**_SHARED, **experts, intermediate_size=768, num_key_value_heads=2, head_dim=64)


_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {"llama": llama, "gpt2": gpt2, "opt": opt, "qwen3_moe": qwen3_moe}

OUTLIERS = "llama_outliers"
"""The Llama with outlier channels."""

MODELS = (*_CONFIGS, OUTLIERS)
"""The names `load` knows."""

STEPS, WINDOWS, RATE = 2500, 2, 2e-3
"""Steps of training, windows in each, and the largest learning rate."""

_ENDS = ("o_proj", "out_proj", "down_proj", "c_proj", "fc2")
"""Modules and parameters that end a branch beside the residual stream."""


def _build(config: Callable[[], PretrainedConfig], seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config(), dtype=torch.float32)


def train(config: Callable[[], PretrainedConfig], seed: int) -> PreTrainedModel:
    """Build and train a model; the same seed gives the same one on the same kind of processor."""
    row, generator = data().training, torch.Generator().manual_seed(1 + seed)
    # Twice as fast where the processor has it, many times slower where it does not.
    half = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    with one_thread():
        model = _build(config, seed).train()
        # Branches that add nothing at first learn faster: perplexity 43.0 instead of 44.5 in the end.
        for name, parameter in model.named_parameters():
            if set(_ENDS) & set(name.split(".")):
                nn.init.zeros_(parameter)
        optimizer = torch.optim.AdamW(_groups(model), betas=(0.9, 0.95), fused=True)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, RATE, total_steps=STEPS, pct_start=0.1, cycle_momentum=False
        )
        for _ in range(STEPS):
            starts = torch.randint(len(row) - CONTEXT, (WINDOWS, 1), generator=generator)
            window = row[starts + torch.arange(CONTEXT + 1)]
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = model(input_ids=window[:, :-1]).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Only matrices decay."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


@experiment()
def main() -> None:
    """Train what is missing and print how well all predict."""
    rows = []
    for name in _CONFIGS:
        trained = load(name)
        parameters = sum(parameter.numel() for parameter in trained.model.parameters())
        measures = (f"{trained.perplexity():.2f}", f"{trained.bits_per_byte():.3f}")
        rows.append((name, f"{parameters:,}", f"{seconds(name):.0f}", *measures))
        print(*rows[-1], flush=True)
    print(table(("model", "parameters", "training, s", "perplexity", "bits per byte"), rows))


if __name__ == "__main__":
    main()
