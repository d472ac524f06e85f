"""The presets `nvfp4_best` and `mxfp4_best`, their parts, and llm-compressor: divergence of trained language models.

    python -m benchmarks.fp4 [--models llama llama_outliers ...] [--llm-compressor llmc/bin/python] [--jobs FOLDER]
        [--write]

Weights and activations are in 4 bits; embedding, head and routers stay in float. The models are those of
`benchmarks.language_models`, calibrated on 64 windows of their training text, judged on 40,800 tokens of files that
nothing else is taken from. Rows are a preset to nearest, with each part of the best preset alone, the best preset, and
with the other way to spread outliers in its place.

llm-compressor runs in a process of its own (`benchmarks/peers/language.py`), on the same checkpoint and tokens; its own
model, with its own rounding of activations, predicts the held-out tokens, and this program computes the divergence as
it does for ours. Without its option the rows are left out.

Results of ours are kept beside the models, so that an interrupted run continues; to measure again, remove that folder.
`--jobs` keeps those of the peer. `--write` updates the sections of `benchmarks/results/fp4.md` that were measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import textwrap
import warnings
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import RESULTS, environment, publish, table
from benchmarks.language_models import Trained
from benchmarks.language_peers import Row, Subject
from quark_fx import QuantConfig
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.passes import GPTQ, Rotate, SmoothQuant
from quark_fx.presets import PRESETS

BEST = {"nvfp4": "nvfp4_best", "mxfp4": "mxfp4_best"}

_ROTATED = (SmoothQuant(rms=True), Rotate(streams=False))

INSTEAD: dict[str, tuple[GraphPass, ...]] = {"nvfp4": _ROTATED, "mxfp4": (Rotate(),)}
"""The way to spread outliers that the best preset has not."""

PEERS = {"nvfp4": ("NVFP4", "NVFP4, GPTQ", "NVFP4, SmoothQuant, GPTQ"), "mxfp4": ()}
"""Scheme and modifiers of llm-compressor."""

BESIDE = ("llama", "llama_outliers")
"""Models that llm-compressor is run on."""

PAGE = RESULTS / "fp4.md"


def configs(preset: str) -> dict[str, QuantConfig]:
    """Return the rows of a format by name: to nearest, each part of the best preset, the best preset, the other way."""
    plain, best = PRESETS[preset], PRESETS[BEST[preset]]
    parts = [part for part in best.passes if part not in plain.passes]
    found = {preset: plain}
    for part in parts:
        found[f"{preset}, {_said(part)}"] = plain.replace(passes=(*plain.passes, part))
    found[BEST[preset]] = best
    solver = next(part for part in parts if isinstance(part, GPTQ))
    other = (*INSTEAD[preset], solver)
    return found | {", ".join([preset, *map(_said, other)]): plain.replace(passes=(*plain.passes, *other))}


def _said(part: Any) -> str:
    """Return a pass with the options that are not the default."""
    options = {f.name: getattr(part, f.name) for f in fields(part) if getattr(part, f.name) != f.default}
    return f"{type(part).__name__}({', '.join(f'{name}={value}' for name, value in options.items())})"


def result(model: str, name: str, config: QuantConfig) -> dict[str, float]:
    """Return perplexity and divergence of a row, kept from an earlier run if there is one."""
    folder = language_models.cache_folder() / "fp4"
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{model}-{name}.json"
    if not file.exists():
        trained = language_models.load(model)
        found = trained.figures(qfx.quantize(trained.model, config, trained.calibration, progress=False))
        file.write_text(json.dumps(found))
        print(model, name, found, flush=True)
    kept: dict[str, float] = json.loads(file.read_text())
    return kept


def peers(name: str, trained: Trained, formats: list[str], python: Path, folder: Path) -> dict[str, dict[str, float]]:
    """Return perplexity and divergence of llm-compressor's rows."""
    subject, found = Subject(name, trained, folder / name, weights=None, held_out=True), {}
    for method in (method for preset in formats for method in PEERS[preset]):
        scheme, *modifiers = method.split(", ")
        options = {"scheme": scheme} | {modifier.lower(): True for modifier in modifiers}
        judged = subject.judge(subject.run(Row("llm-compressor", method, options), 0, python))
        found[f"llm-compressor, {method}"] = {"KL": judged.divergence, "perplexity": judged.perplexity}
        print(name, method, found[f"llm-compressor, {method}"], flush=True)
    return found


def section(model: str, trained: Trained, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Return the table of a model, and what it says of the presets."""
    rows = [(name, f"{found['KL']:.5f}", f"{found['perplexity']:.3f}") for name, found in figures.items()]
    said = [_verdict(preset, figures) for preset in BEST if preset in figures]
    title = f"## `{model}`, float {trained.perplexity():.3f}"
    return f"{title}\n\n{table(('row', 'KL', 'perplexity'), rows)}\n\n{textwrap.fill(' '.join(said), 120)}\n"


def _verdict(preset: str, figures: Mapping[str, Mapping[str, float]]) -> str:
    """Say how the best preset compares with its parts and with the peer's best."""
    best = figures[BEST[preset]]["KL"]
    parts = min(figures[name]["KL"] for name in configs(preset) if name != BEST[preset])
    said = f"`{BEST[preset]}` has {best / figures[preset]['KL']:.2f} of the divergence of `{preset}`, and "
    said += f"{best / parts:.2f} of that of the best other row"
    theirs = [figures[f"llm-compressor, {m}"]["KL"] for m in PEERS[preset] if f"llm-compressor, {m}" in figures]
    return f"{said}; of llm-compressor's best it has {best / min(theirs):.2f}." if theirs else f"{said}."


def page(sections: Mapping[str, str]) -> str:
    """Return the page."""
    shown = "\n".join(sections[name] for name in language_models.MODELS if name in sections)
    return f"""# NVFP4 and MXFP4

Weights and activations in 4 bits: blocks of 16 with E4M3 scales (NVFP4), of 32 with powers of two (MXFP4); activations
are rounded at run time. KL is the mean divergence of the predictions from the float model's in nats per token; smaller
is better. Small models trained here; embedding, head and routers stay in float. Each of ours is quantized and judged in
PyTorch; llm-compressor's model predicts in its own environment, and the same program computes its divergence. Reproduce
with `python -m benchmarks.fp4 --llm-compressor llmc/bin/python`.

{shown}
{environment()}
"""


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(language_models.MODELS), choices=language_models.MODELS)
    parser.add_argument("--formats", nargs="+", default=list(BEST), choices=list(BEST))
    parser.add_argument("--llm-compressor", type=Path, metavar="PYTHON", help="its Python; default: no rows of it")
    parser.add_argument("--jobs", type=Path, help="folder for the peer's runs, kept; default: a temporary one")
    parser.add_argument("--write", action="store_true", help="update benchmarks/results/fp4.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    sections: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in arguments.models:
            trained = language_models.load(model)
            rows = {name: config for preset in arguments.formats for name, config in configs(preset).items()}
            figures = {name: result(model, name, config) for name, config in rows.items()}
            if arguments.llm_compressor and model in BESIDE:
                folder = arguments.jobs or Path(temporary)
                figures |= peers(model, trained, arguments.formats, arguments.llm_compressor, folder)
            sections[model] = section(model, trained, figures)
            if arguments.write:
                PAGE.write_text(page(_written() | sections), encoding="utf-8")
    publish(page(sections), None)


def _written() -> dict[str, str]:
    """Return the sections of the page by model."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = [f"## {part}" for part in text.split("\n## ")[1:]]
    if parts:
        parts[-1] = parts[-1].rsplit("\n\n", 1)[0] + "\n"  # without the environment
    return {part.split("`")[1]: part for part in parts}


if __name__ == "__main__":
    main()
