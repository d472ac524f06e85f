"""Time of quantized models in PyTorch: by `qmodel.compile()`, beside float ones, eager and by `torch.compile`.

    python -m benchmarks.compiled [--rounds 15] [--sections resnet bert ...] [--write]

torchvision's ResNet-50 at 3 x 224 x 224, a BERT of base size at 128 tokens, and Llamas of 135M and of 1.1B parameters
at one token, with seeded random weights: time does not depend on values. The large one takes 16 GB of memory, and is
not compiled with frozen weights, which are a copy. The int8 networks run once more on the kernels that torch has for
processors with AVX2 and without VNNI. Every case runs in a process of its own on one thread, its models in turn; a row
gives the median over the rounds and the quartiles of the ratios within a round. The networks of `tests/networks.py`,
trained on digits, show the accuracy. The last table is of `generate` by the Llama, as a model of transformers: in
float, simulated by `eager()`, and with `eager(kernels=True)`. `--sections` measures some; `--write` updates them in
`results/compiled.md`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
from torch import Tensor, nn
from torch._inductor import config as inductor
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import quark_fx as qfx
from benchmarks.common import (
    apart_from_others,
    environment,
    estimate_batch_norm,
    images,
    sections_of,
    spread,
    sqnr,
    table,
    timed,
)
from benchmarks.experiment import Option, experiment
from quark_fx.evaluation.runs import main_tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from networks import trained

EAGER, COMPILED, FROZEN, OURS = "float", "float, torch.compile", "float, torch.compile, frozen", "compile()"

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A network, how it is quantized and measured; `goal` is what is asked of float's time over ours."""

    name: str
    build: Callable[[], tuple[nn.Module, list[Batch]]]
    preset: str
    batch: Callable[[int], Batch]
    sizes: tuple[int, ...]
    goal: float = 2.0
    frozen: bool = True


def _resnet() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    model, data = torchvision.models.resnet50().eval(), images(8, 4, 224, seed=1)
    estimate_batch_norm(model, data)
    return model, [{"x": batch} for batch in data]


def _tokens(rows: int, length: int, vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(rows)
    return {"input_ids": torch.randint(vocabulary, (rows, length), generator=generator)}


def _masked(rows: int) -> Batch:
    return _tokens(rows, 128, 30522) | {"attention_mask": torch.ones(rows, 128, dtype=torch.int64)}


def _bert() -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    return BertModel(BertConfig(), add_pooling_layer=False).eval(), [_masked(2), _masked(3)]


def llama_135m() -> tuple[nn.Module, list[Batch]]:
    """Return a Llama of 135M parameters with seeded random weights, and a batch of tokens."""
    return _llama(576, 1536, layers=30, heads=9, key_value_heads=3, vocabulary=49152, tied=True)


def llama_1b() -> tuple[nn.Module, list[Batch]]:
    """Return a Llama of 1.1B parameters, with TinyLlama's shapes."""
    return _llama(2048, 5632, layers=22, heads=32, key_value_heads=4, vocabulary=32000, tied=False)


def _llama(
    width: int, inner: int, *, layers: int, heads: int, key_value_heads: int, vocabulary: int, tied: bool
) -> tuple[nn.Module, list[Batch]]:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).eval(), [_tokens(2, 16, vocabulary)]


def _images(rows: int) -> Batch:
    return {"x": images(rows, rows, 224, seed=2)[0]}


CASES = {
    "resnet": Case("ResNet-50", _resnet, "int8_static", _images, (1, 32)),
    "bert": Case("BERT-base, 128 tokens", _bert, "int8_static", _masked, (1, 32)),
    "llama": Case("Llama 135M, one token", llama_135m, "int4_weight_only", lambda rows: _tokens(rows, 1, 49152), (1,)),
    "llama_1b": Case(
        *("Llama 1.1B, one token", llama_1b, "int4_weight_only", lambda rows: _tokens(rows, 1, 32000), (1,)),
        frozen=False,
    ),
}


def _for_inductor(preset: str) -> dict[str, str]:
    return {"preset": preset, "target": "inductor"}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Return milliseconds by batch size and model, agreement with the simulated graph, and kernels."""
    model, data = case.build()
    qmodel = qfx.quantize(model, _for_inductor(case.preset), data, progress=False)
    compiled = qmodel.compile()
    plain, frozen = torch.compile(model), torch.compile(model)
    found: dict[str, Any] = {"kernels": str(compiled.report()).splitlines()[-1], "times": {}, "agreement": {}}

    def run_frozen(**batch: Tensor) -> object:
        with inductor.patch(freezing=True):
            return frozen(**batch)

    for size in case.sizes:
        batch = case.batch(size)
        with torch.no_grad():
            runs: dict[str, Callable[..., Any]] = {EAGER: model, COMPILED: plain}
            runs |= ({FROZEN: run_frozen} if case.frozen else {}) | {OURS: compiled}
            for run in runs.values():
                run(**batch)
            times: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(rounds if size == 1 else 3):
                for name, run in runs.items():
                    if size == 1:
                        run(**batch)  # what others left in the caches is theirs
                    times[name].append(1e3 * timed(partial(run, **batch)).wall)
            simulated, ours = (main_tensor(m(**batch)) for m in (qmodel, compiled))
        found["times"][size] = times
        found["agreement"][size] = sqnr(simulated, ours), float((simulated - ours).abs().max() / simulated.abs().max())
        torch._dynamo.reset()
    return found


def _section(case: Case, found: dict[str, Any]) -> str:
    lines, notes = [], []
    for size, times in found["times"].items():
        for name, own in times.items():
            cells = [size, name, f"{statistics.median(own):.1f}"]
            for other in (EAGER, COMPILED):
                ratios = [a / b for a, b in zip(times[other], own, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            lines.append(cells)
        decibels, largest = found["agreement"][size]
        notes.append(
            f"Batch {size}: {decibels:.0f} dB from the simulated graph, largest difference {largest:.1e} of the range."
        )
    header = ("batch", "model", "ms", "eager float over it", "compiled float over it")
    ours = f"`{case.preset}`, {found['kernels']}; asked of both floats over `compile()`: {case.goal}."
    return "\n\n".join([ours, table(header, lines), "  \n".join(notes)])


def _accuracy() -> str:
    """Return the section of trained networks: the graph as `quantize` returns it, and compiled."""
    rows = []
    for name in ("cnn", "mobilenet", "vit"):
        network = trained(name)
        qmodel = qfx.quantize(network.model, _for_inductor("int8_static"), network.calibration, progress=False)
        compiled = qmodel.compile()
        with torch.no_grad():
            expected, simulated, ours = (m(network.images) for m in (network.model, qmodel, compiled))
        decibels = (f"{sqnr(expected, made):.2f}" for made in (simulated, ours))
        right = (f"{network.accuracy(model):.2f}" for model in (network.model, qmodel, compiled))
        rows.append((name, *decibels, f"{sqnr(simulated, ours):.1f}", *right))
        torch._dynamo.reset()
    header = ("network", "SQNR, quantized", "compile()", "apart, dB", "right, float", "quantized", "compile()")
    return table(header, rows)


AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Variables that limit torch, oneDNN and MKL to kernels for AVX2, which have no VNNI."""

_AVX2_GOAL = 1.2
"""Goal for float's time over that of int8 on the kernels for AVX2."""

GENERATED = ("int4_weight_only", "int8_weight_only", "int8_dynamic")
FLOAT, SIMULATED, KERNELS = "float", "eager()", "eager(kernels=True)"
PROMPT, NEW, ROUNDS = 32, 32, 5


def generated(preset: str) -> dict[str, Any]:
    """Return seconds of greedy generation by model, which tokens are those of the simulated one, and kernels."""
    model, data = llama_135m()
    qmodel = qfx.quantize(model, preset, data, progress=False)
    models: dict[str, Any] = {FLOAT: model, SIMULATED: qmodel.eager(), KERNELS: qmodel.eager(kernels=True)}
    prompt = _tokens(1, PROMPT, 49152)["input_ids"]
    tokens: dict[str, Tensor] = {}

    def run(name: str) -> None:
        tokens[name] = models[name].generate(
            prompt, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
        )

    for name in models:
        run(name)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name in models:
            times[name].append(timed(partial(run, name)).wall)
    same = (tokens[SIMULATED] == tokens[KERNELS])[:, PROMPT:]
    return {
        "times": times,
        "same": int(same.sum()),
        "kernels": str(models[KERNELS].kernel_report).splitlines()[-1],
    }


def _generation() -> str:
    """Return the section of generation."""
    rows, notes = [], []
    for preset in GENERATED:
        found = apart_from_others("benchmarks.compiled", "--generate", preset)
        for name, own in found["times"].items():
            speeds = [NEW / seconds for seconds in own]
            ratios = (spread([b / a for a, b in zip(own, found["times"][o], strict=True)]) for o in (FLOAT, SIMULATED))
            rows.append((preset, name, f"{statistics.median(speeds):.1f}", *ratios))
        notes.append(
            f"`{preset}`: {found['kernels']}; {found['same']} of {NEW} tokens are those of the simulated model."
        )
    header = ("preset", "model", "tokens a second", "speed over float", "over eager()")
    text = f"""`generate` with its cache, greedy, {NEW} tokens after {PROMPT}, batch 1, the prompt's time among them;
not compiled as a whole. Models in turn in one process; medians of {ROUNDS} rounds, smallest and largest ratio of a
round in parentheses. Compilation is not timed."""
    return "\n\n".join([text, table(header, rows), "  \n".join(notes)])


def all_sections() -> dict[str, tuple[str, Callable[[int], str]]]:
    """Return title and measurement, of some rounds, of each section by the name of its option."""

    def of(case: Case, name: str, variables: dict[str, str]) -> tuple[str, Callable[[int], str]]:
        def measured(rounds: int) -> str:
            own = ("benchmarks.compiled", "--rounds", str(rounds), "--case", name)
            found = _section(case, apart_from_others(*own, **variables))
            return f"{found}\n\n{rounds} rounds at batch 1, 3 at larger ones."

        return case.name, measured

    found = {name: of(case, name, {}) for name, case in CASES.items()}
    for name, case in CASES.items():
        if case.preset == "int8_static":
            older = replace(case, name=f"{case.name}, kernels for AVX2 without VNNI", goal=_AVX2_GOAL)
            found[f"{name}_avx2"] = of(older, name, AVX2)
    found["trained"] = "Trained networks, `int8_static`", lambda _: _accuracy()
    found["generation"] = "Llama 135M, generation", lambda _: _generation()
    return found


@experiment(page="compiled.md", own_environment=True)
def main(
    rounds: Annotated[int, "rounds of one run of each model at batch 1"] = 15,
    case: Annotated[str | None, Option("run one case in this process and print its figures", choices=CASES)] = None,
    generate: Annotated[str | None, Option("generate in this process and print the figures", choices=GENERATED)] = None,
    sections: Annotated[Sequence[str], Option("those to measure; default: all", choices=all_sections())] = tuple(
        all_sections()
    ),
    write: bool = False,
) -> Iterator[str]:
    """Measure, and yield the page as it grows."""
    if case:
        if AVX2.items() <= os.environ.items():
            inductor.cpp.simdlen = 256
        print(json.dumps(measure(CASES[case], rounds)))
        return
    if generate:
        print(json.dumps(generated(generate)))
        return
    found = sections_of("compiled.md") if write else {}
    known = all_sections()
    for name in sections:
        title, measured = known[name]
        found[title] = f"## {title}\n\n{measured(rounds)}\n\n{environment()}\n"
        yield page(found)


def page(found: dict[str, str]) -> str:
    """Return the page of sections by title."""
    shown = "\n".join(found[title] for title, _ in all_sections().values() if title in found)
    return f"""# Quantized models in PyTorch

[Speed in PyTorch](../../docs/speed.md) says how to get them.

Networks with seeded random weights on one thread: the float model, eager, by `torch.compile`, and by `torch.compile`
with frozen weights, and what `qmodel.compile()` returns. They are run in turn; medians over rounds, quartiles of the
ratios within a round in parentheses. Random weights amplify a code that is one step off through the layers; networks
trained on digits show what that is worth: SQNR of the logits in dB against the float model, how far apart the quantized
model and its compiled form are, and the percentage of 897 images that are classified correctly. Models are quantized
for `target="inductor"`. Kernels for AVX2 are those that torch and oneDNN take when they are told that the processor has
no more. Reproduce with `python -m benchmarks.compiled`.

{shown}"""


if __name__ == "__main__":
    main()
