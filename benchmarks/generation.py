"""Generation in ONNX Runtime with a KV cache: the tokens that torch generates, and how many a second.

    python -m benchmarks.generation [--prompts 8] [--rounds 3] [--parameters 300] [--write]

Tokens: the Llama of `benchmarks.language_models`, prompts of 32 held-out tokens, 64 more chosen greedily by
`qmodel.eager()` in torch and by the exported prefill and decode graphs (`ort_fusions="cpu"`, accuracy level 0). Where
they differ first, the lead of the chosen token in torch is printed: activations that are rounded at run time can round
the other way after a sum in another order. Perplexity of the held-out text is torch's; with an int8 cache every token
reads the keys and values before it, and its own, rounded.

Speed: a Llama of random weights, larger than the caches of a processor; prompts of 32 tokens; seconds of 24 tokens
after the first. All models are in one process and take turns, after a warm-up of each. `--write` updates
`results/generation.md`.
"""

from __future__ import annotations

import gc
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LlamaConfig
from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import environment, spread, table
from benchmarks.experiment import experiment
from quark_fx.export import CacheScales, GenerationQuantizer, generator, share_weights

PROMPT, TOKENS, TIMED = 32, 64, 24
"""Tokens of a prompt, generated to be compared, and generated to be timed."""


class Rounded(DynamicCache):  # type: ignore[misc]
    """A cache of torch's that holds what int8 codes stand for.

    Args:
        scales: of the codes.
        always: the tokens that start it read their own keys and values rounded, too; the graphs' do not.
    """

    def __init__(self, scales: CacheScales, *, always: bool = False) -> None:
        super().__init__()
        self.scales, self.always = scales, always

    def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append and return all."""
        first, name = not self.get_seq_length(layer), f"layers.{layer}."
        rounded = self.scales.round(f"{name}keys", keys), self.scales.round(f"{name}values", values)
        result: tuple[Tensor, Tensor] = super().update(*rounded, layer, *args, **kwargs)
        return (keys, values) if first and not self.always else result


def export(model: Any, folder: Path, quantizer: GenerationQuantizer | None) -> Path:
    """Export both graphs into `folder`, and return it."""
    prompt = {"input_ids": torch.arange(2 * PROMPT).reshape(2, -1) % model.config.vocab_size}
    config = OnnxConfig(dynamic=True, ort_fusions="cpu", quantizer=quantizer)
    exported = OnnxExporter().export_for_generation(model, prompt, config, generation_config=_generation_config())
    exported.save_pretrained(folder)
    share_weights(folder)
    return folder


def _generation_config(tokens: int = TOKENS) -> Any:
    return GenerationConfig(do_sample=False, use_cache=True, max_new_tokens=tokens, min_new_tokens=tokens)


def read(folder: Path, threads: int) -> Any:
    """Return a model of the graphs in `folder`."""
    return generator(ExportedModel.from_pretrained(folder), threads=threads)


# Tokens --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """One way to quantize the trained model.

    Attributes:
        name: of a preset; empty for float.
        quantizer: how its graphs are written.
        cache: keys and values are int8.
    """

    name: str
    quantizer: dict[str, Any]
    cache: bool = False


ARMS = (
    Arm("", {}),
    Arm("int8_weight_only", {"format": "matmul_nbits"}),
    Arm("int8_dynamic", {"format": "qdq"}),
    Arm("int4_weight_only", {"format": "matmul_nbits"}),
    Arm("w4a16_gptq", {"format": "matmul_nbits"}),
    Arm("w4a16_gptq", {"format": "matmul_nbits"}, cache=True),
)


def compare(arm: Arm, count: int) -> tuple[object, ...]:
    """Return a row of the table of tokens."""
    trained = language_models.load("llama")
    model: Any = qfx.quantize(trained.model, arm.name, trained.calibration).eager() if arm.name else trained.model
    scales = CacheScales.measure(model, trained.calibration) if arm.cache else None
    quantizer = GenerationQuantizer(**arm.quantizer, cache=scales) if arm.name else None
    with tempfile.TemporaryDirectory() as folder:
        runs = read(export(model, Path(folder), quantizer), threads=1)
        prompts = torch.cat([batch["input_ids"] for batch in trained.held_out])[:count, :PROMPT]
        pairs = [(_generate(model, prompt[None], scales), _generate(runs, prompt[None])) for prompt in prompts]
    equal = [bool(torch.equal(a, b)) for a, b in pairs]
    leads = [_lead(model, a[0], b[0], scales) for a, b in pairs if not torch.equal(a, b)]

    def judged(**batch: Tensor) -> Any:
        cache = {"past_key_values": Rounded(scales, always=True), "use_cache": True} if scales is not None else {}
        return model(**batch, **cache)

    name = (arm.name or "float32") + (", int8 cache" if arm.cache else "")
    return (
        name,
        arm.quantizer.get("format", "-"),
        f"{sum(equal)} of {len(equal)}",
        ", ".join(f"{lead:.3f}" for lead in leads) or "-",
        f"{trained.perplexity(judged):.3f}",
        f"{trained.divergence(judged):.5f}",
    )


def _generate(model: Any, prompt: Tensor, scales: CacheScales | None = None) -> Tensor:
    cache = {} if scales is None else {"past_key_values": Rounded(scales)}
    result: Tensor = model.generate(prompt, generation_config=_generation_config(), **cache)
    return result


def _lead(model: Any, ours: Tensor, theirs: Tensor, scales: CacheScales | None) -> float:
    """Return by how much torch's logit is larger where the tokens differ first."""
    at = int((ours != theirs).nonzero()[0])
    cache = {} if scales is None else {"past_key_values": Rounded(scales), "use_cache": True}
    with torch.no_grad():
        logits = model(input_ids=ours[None, :at], **cache).logits[0, -1]
    return float(logits[ours[at]] - logits[theirs[at]])


# Speed ---------------------------------------------------------------------------------------------------------------


def large(millions: int) -> Any:
    """Return a Llama of random weights with about so many parameters in its layers."""
    layers = max(1, round(millions / 45.1))
    config = LlamaConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def races(rounds: int, millions: int, root: Path) -> tuple[str, list[tuple[object, ...]]]:
    """Return the size of the large model, and the rows of the table of speeds."""
    model = large(millions)
    size = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f} million parameters"
    folders = {"float32": export(model, root / "float32", None)}
    qmodel = qfx.quantize(model, "w4a16_rtn", [{"input_ids": torch.arange(2 * PROMPT).reshape(2, -1)}])
    rounded = qmodel.eager()
    del model, qmodel
    for level in (0, 4):
        quantizer = GenerationQuantizer("matmul_nbits", accuracy_level=level)
        folders[f"int4, level {level}"] = export(rounded, root / str(level), quantizer)
    del rounded
    gc.collect()
    rows: list[tuple[object, ...]] = []
    for threads in (1, 2):
        rows += race(folders, threads, rounds)
    return size, rows


def race(folders: dict[str, Path], threads: int, rounds: int) -> list[tuple[object, ...]]:
    """Return a row for each model."""
    models = {name: read(folder, threads) for name, folder in folders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 1):
        for name, model in models.items():
            found = decoding_seconds(model)
            if turn:
                seconds[name].append(found)
    rows: list[tuple[object, ...]] = []
    for name, folder in folders.items():
        rates = [TIMED / s for s in seconds[name]]
        ratios = [s / own for s, own in zip(seconds["float32"], seconds[name], strict=True)]
        rows.append((name, threads, spread(rates, 1), spread(ratios, 2), f"{_megabytes(folder):.0f}"))
    return rows


def decoding_seconds(model: Any) -> float:
    """Return what `TIMED` tokens take after the first."""
    prompt = torch.arange(PROMPT)[None]

    def generate(tokens: int) -> float:
        start = time.perf_counter()
        model.generate(prompt, generation_config=_generation_config(tokens))
        return time.perf_counter() - start

    return generate(1 + TIMED) - generate(1)


def _megabytes(folder: Path) -> float:
    """Return the size of what the folder holds."""
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


@experiment(page="generation.md", own_environment=True)
def main(
    prompts: int = 8,
    rounds: int = 3,
    parameters: Annotated[int, "of the layers of the large model, in millions"] = 300,
) -> str:
    """Measure, and return the page."""
    compared = [compare(arm, prompts) for arm in ARMS]
    print(table(TOKEN_HEADER, compared), flush=True)
    with tempfile.TemporaryDirectory() as root:
        size, raced = races(rounds, parameters, Path(root))
    return page(compared, size, raced, (prompts, rounds, parameters))


TOKEN_HEADER = ("weights", "format", "equal prompts", "torch's lead where they differ", "perplexity", "divergence")
SPEED_HEADER = ("weights", "threads", "tokens a second", "times float32", "MB on disk")


def page(
    compared: list[tuple[object, ...]], size: str, raced: list[tuple[object, ...]], given: tuple[int, int, int]
) -> str:
    """Return the text of the page."""
    prompts, rounds, parameters = given
    return f"""# Generation with a KV cache

{environment()} Command: `python -m benchmarks.generation --prompts {prompts} --rounds {rounds} \
--parameters {parameters} --write`.

Greedy generation of {TOKENS} tokens after {PROMPT} by the small trained Llama, ONNX Runtime beside `qmodel.eager()`:

{table(TOKEN_HEADER, compared)}

A Llama of {size} with random weights, embedding and head in float, greedy generation after a prompt
of {PROMPT} tokens; rounds: {rounds}, median (smallest to largest), the ratio taken within each round:

{table(SPEED_HEADER, raced)}
"""


if __name__ == "__main__":
    main()
