"""Language models in every format, beside other tools: divergence, processor time, memory.

    python -m benchmarks.real_peers [--model smollm2] [--formats W4 W3 W2 W4A4 W4A8 W4AFP8 W8A8 FP8_BLOCK NVFP4 MXFP4]
        [--only PART ...] [--windows 64] [--judged 16] [--quark-fx quark/bin/python] [--llm-compressor llmc/bin/python]
        [--gptqmodel gptqm/bin/python] [--auto-round ar/bin/python] [--amd-quark amdquark/bin/python] [--jobs FOLDER]
        [--write]

SmolLM2-135M (`benchmarks.real.smollm2`), or a Llama of `benchmarks.language_models`, with outlier channels or without,
calibrated on 64 windows and judged on others. Integer weights are in groups of 64: symmetric at 4 bits, with zero
points at 3 and 2. Embedding and head stay in float. Each run is a process of its own on one core, as
`benchmarks.language_peers` says, which lists what the environments need. Formats of weights alone are judged by the
weights that a tool leaves, computed with in the float model, unless the model rotates activations at run time; of
W4A8, W4AFP8, and FP8_BLOCK, transformers and compressed-tensors here load the checkpoint that a tool writes, which also
round the activations; the others by what each tool's own model predicts.

AMD Quark has no rows with int4 activations: what it measures at run time is one scale for a position of all windows of
a batch, not for a token.

`--windows` and `--judged` leave out windows, for all tools alike; the section then names the numbers. `--only` runs the
rows whose tool and method contain one of the parts. `--jobs` keeps finished runs, so that rows can be
measured one after another; `--write` replaces the sections of these formats in the page of the model by the rows of
this run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks import language_models
from benchmarks.common import environment, publish, sections_of, table
from benchmarks.language_models import Trained
from benchmarks.language_peers import (
    BEST,
    PEERS,
    QUALITY,
    Measured,
    Row,
    Subject,
    Weights,
    add_pythons,
    measure,
    pythons_of,
    versions,
)

WINDOWS, ITERATIONS, GROUP = 64, 200, 64
"""Windows to calibrate on, steps of auto-round for each block, and weights of a group."""

ROTATED = "w4a16_rotated"

QUICK = {**QUALITY, "guided": True}
"""The solver of `w4a16_best`, but rows do not make up for each other."""

BOTH = {**QUICK, "two_sided": True}
"""The solver of `w4a16_best`."""

BRANCH = {"name": "LowRank", "rank": 16}
"""A branch of 16 directions."""

LEARNED = {"Rotate": [{"name": "LearnRotations", "streams": False}], "GPTQ": [QUALITY]}
"""Matrices that are learned, instead of those of `w4a4_dynamic`."""

TURNED = {"name": "Rotate", "streams": False, "block": 64}
"""The rotation of `w4a16_rotated`."""


@dataclass(frozen=True)
class Format:
    """A format and what is run in it.

    Attributes:
        title: of its section.
        weights: integer weights; None if the rows' options say what they are.
        rows: of all tools.
        activations: they are rounded too.
        written: the checkpoint that each tool writes is judged.
        data_free: scales need no calibration data.
    """

    title: str
    weights: Weights | None
    rows: tuple[Row, ...]
    activations: bool = False
    written: bool = False
    data_free: bool = False

    def predicts(self, row: Row) -> bool:
        """Tell whether a tool's own model is judged, as its weights alone do not say what it computes."""
        rotated = row.options.get("preset") == ROTATED or TURNED in row.options.get("passes", ())
        return self.activations or rotated


def _ours(method: str, **options: Any) -> Row:
    return Row("quark_fx", method, options)


def _on_less(method: str, *parts: int, **options: Any) -> list[Row]:
    """Return rows of ours that are calibrated on a half, a quarter, ... of the windows."""
    return [_ours(f"{method}, {WINDOWS // n} windows", windows=WINDOWS // n, **options) for n in parts]


def _branched(method: str, preset: str, solver: Any = "same") -> list[Row]:
    """Return rows of ours with a branch in float, which takes bits beside those of the format."""
    method, options = f"LowRank(rank=16), {method}", {"preset": preset, "instead": {"GPTQ": [BRANCH, solver]}}
    return [_ours(method, **options), *_on_less(method, 2, 4, **options)]


def _weight_only(title: str, weights: Weights, best: str) -> Format:
    """Return the rows of integer weights; `best` is the preset with such weights."""
    spelled = {"symmetry": "sign_aware"} if weights.symmetric else {}
    rows = (
        _ours("to nearest"),
        _ours("GPTQ()", passes=["GPTQ"]),
        _ours("GPTQ(asymmetry=0.5, fit_scales=True)", passes=[QUALITY], **spelled),
        *_on_less("GPTQ(asymmetry=0.5, fit_scales=True)", 2, 4, passes=[QUALITY], **spelled),
        _ours("GPTQ(asymmetry=0.5, fit_scales=True, guided=True)", passes=[QUICK], **spelled),
        _ours("GPTQ(asymmetry=0.5, fit_scales=True, guided=True, two_sided=True)", passes=[BOTH], **spelled),
        _ours(f"{ROTATED}, unguided", preset=ROTATED, instead={"GPTQ": [QUALITY]}),
        *_on_less(f"{ROTATED}, unguided", 2, 4, preset=ROTATED, instead={"GPTQ": [QUALITY]}),
        _ours(f"{ROTATED}, unguided, sweeps=4", preset=ROTATED, instead={"GPTQ": [{**QUALITY, "sweeps": 4}]}),
        _ours(ROTATED, preset=ROTATED),
        *_on_less(ROTATED, 2, 4, preset=ROTATED),
        _ours(f"NormalizeColumns(), {ROTATED}, unguided", passes=["NormalizeColumns", TURNED, QUALITY], **spelled),
        _ours(f"{best}, one-sided", preset=best, instead={"GPTQ": [QUICK]}),
        _ours(f"{best}, one-sided, sweeps=4", preset=best, instead={"GPTQ": [{**QUICK, "sweeps": 4}]}),
        _ours(best, preset=best),
        *_on_less(best, 2, 4, preset=best),
        *([] if weights.bits == 4 else [_ours(f"{best}, TuneScales()", preset=best, passes=["TuneScales"])]),
        Row("llm-compressor", "GPTQ", {"gptq": True}),
        Row("llm-compressor", "AWQ, GPTQ", {"awq": True, "gptq": True}),
        Row("GPTQModel", "GPTAQ, mse=2.4, desc_act, static_groups, damp 0.01", BEST),
        Row("auto-round", f"{ITERATIONS} iterations", {"iters": ITERATIONS}),
    )
    templates = (
        ()
        if weights.bits != 4
        else tuple(Row("AMD Quark", name, {"algorithm": name.lower()}) for name in ("GPTQ", "Qronos"))
    )
    return Format(title, weights, (*rows, *templates))


_ACTIVATIONS = {"activations": {"num_bits": 4}}


def _mixed(title: str, preset: str, kind: str) -> Format:
    """Return the rows of int4 weights and activations of 8 bits per token."""
    best = {"passes": [QUALITY], "symmetry": "sign_aware"}
    rows = (
        _ours(preset, preset=preset),
        _ours(f"{preset}, GPTQ()", preset=preset, passes=["GPTQ"]),
        _ours(f"{preset}, GPTQ(asymmetry=0.5, fit_scales=True)", preset=preset, **best),
        *_on_less(f"{preset}, GPTQ(asymmetry=0.5, fit_scales=True)", 2, 4, 8, preset=preset, **best),
        Row("llm-compressor", "to nearest", {"activations": {"num_bits": 8, "type": kind}, "data_free": True}),
        Row("llm-compressor", "GPTQ", {"activations": {"num_bits": 8, "type": kind}, "gptq": True}),
    )
    return Format(title, Weights(4, GROUP), rows, written=True)


FORMATS = {
    "W4": _weight_only("int4 weights", Weights(4, GROUP), "w4a16_best"),
    "W3": _weight_only("int3 weights with zero points", Weights(3, GROUP, symmetric=False), "w4a16_best_asym"),
    "W2": _weight_only("int2 weights with zero points", Weights(2, GROUP, symmetric=False), "w4a16_best_asym"),
    "W4A4": Format(
        "int4 weights, int4 activations per token",
        Weights(4, GROUP),
        (
            _ours("w4a4_dynamic, sweeps=0", preset="w4a4_dynamic", instead={"GPTQ": [QUALITY]}),
            *_on_less("w4a4_dynamic, sweeps=0", 2, 4, preset="w4a4_dynamic", instead={"GPTQ": [QUALITY]}),
            _ours("w4a4_dynamic", preset="w4a4_dynamic"),
            _ours("LearnRotations, sweeps=0", preset="w4a4_dynamic", instead=LEARNED),
            *_on_less("LearnRotations, sweeps=0", 2, 4, preset="w4a4_dynamic", instead=LEARNED),
            *_branched("w4a4_dynamic, sweeps=0", "w4a4_dynamic", QUALITY),
            Row("llm-compressor", "GPTQ", {"gptq": True, **_ACTIVATIONS}),
            Row("llm-compressor", "SpinQuant R1 R2, GPTQ", {"spinquant": ["R1", "R2"], "gptq": True, **_ACTIVATIONS}),
            Row(
                "llm-compressor",
                "SpinQuant R1 R2 R4, GPTQ",
                {"spinquant": ["R1", "R2", "R4"], "gptq": True, **_ACTIVATIONS},
            ),
        ),
        activations=True,
    ),
    "W4A8": _mixed("int4 weights, int8 activations per token", "w4a8", "int"),
    "W4AFP8": _mixed("int4 weights, FP8 activations per token", "w4afp8", "float"),
    "FP8_BLOCK": Format(
        f"FP8 weights in blocks of {GROUP}x{GROUP}, FP8 activations in groups of {GROUP}",
        None,
        (
            Row("quark_fx", "fp8_block", {"preset": "fp8_block", "blocks": GROUP, "windows": 1}, 2),
            Row("llm-compressor", "oneshot", {"blocks": GROUP, "data_free": True}, 2),
            Row("quark_fx", "convert, fp8_block", {"preset": "fp8_block", "blocks": GROUP, "convert": True}, 2),
            Row("llm-compressor", "model_free_ptq", {"blocks": GROUP, "model_free": True}, 2),
        ),
        written=True,
        data_free=True,
    ),
    "W8A8": Format(
        "int8 weights per channel, int8 activations per token",
        None,
        (
            _ours("w8a8_dynamic", preset="w8a8_dynamic"),
            Row("llm-compressor", "to nearest", {"scheme": "W8A8"}),
            Row("llm-compressor", "SmoothQuant, GPTQ", {"scheme": "W8A8", "smoothquant": True, "gptq": True}),
        ),
        activations=True,
    ),
    "NVFP4": Format(
        "NVFP4 weights and activations",
        None,
        (
            _ours("nvfp4", preset="nvfp4"),
            _ours("nvfp4_best", preset="nvfp4_best"),
            *_on_less("nvfp4_best", 2, 4, preset="nvfp4_best"),
            *_branched("nvfp4_best", "nvfp4_best"),
            Row("llm-compressor", "to nearest", {"scheme": "NVFP4"}),
            Row("llm-compressor", "GPTQ", {"scheme": "NVFP4", "gptq": True}),
            Row("llm-compressor", "SmoothQuant, GPTQ", {"scheme": "NVFP4", "smoothquant": True, "gptq": True}),
            Row("AMD Quark", "GPTQ", {"scheme": "nvfp4", "algorithm": "gptq"}),
        ),
        activations=True,
    ),
    "MXFP4": Format(
        "MXFP4 weights and activations",
        None,
        (
            _ours("mxfp4", preset="mxfp4"),
            _ours("mxfp4_best", preset="mxfp4_best"),
            *_on_less("mxfp4_best", 2, 4, 8, preset="mxfp4_best"),
            *_branched("mxfp4_best", "mxfp4_best"),
            Row("llm-compressor", "to nearest", {"scheme": "MXFP4"}),
            Row("llm-compressor", "GPTQ", {"scheme": "MXFP4", "gptq": True}),
            Row("AMD Quark", "GPTQ", {"scheme": "mxfp4", "algorithm": "gptq"}),
            Row("AMD Quark", "QuaRot, GPTQ", {"scheme": "mxfp4", "algorithm": ["rotation", "gptq"]}),
            Row("auto-round", f"{ITERATIONS} iterations", {"scheme": "MXFP4", "iters": ITERATIONS}),
        ),
        activations=True,
    ),
}


@dataclass(frozen=True)
class Model:
    """A model of the comparison.

    Attributes:
        page: of `docs` that has its tables.
        title: of the page.
        text: what it is, and what text calibrates and judges it.
        load: returns it with its text, as the comparisons of trained models take it.
    """

    page: str
    title: str
    text: str
    load: Callable[[], Trained]


def _smollm2() -> Trained:
    from benchmarks.real import smollm2

    real = smollm2.load(calibration=WINDOWS)
    return Trained(smollm2.writable(real.model), smollm2.tokenizer(), real.calibration, real.judged)


_TRAINED = (
    "4 layers of 256 channels, 3.7 million parameters, trained for these measurements on the documentation of Python, "
    f"calibrated on {WINDOWS} windows of 256 tokens in batches of 8, judged on others"
)

MODELS = {
    "smollm2": Model(
        "real_peers.md",
        "SmolLM2 in every format, beside other tools",
        f"SmolLM2-135M, whose weights are real, calibrated on {WINDOWS} windows of 512 tokens of Wikipedia in batches "
        "of 4, judged on 16 windows of other documents",
        cache(_smollm2),
    ),
    "llama": Model(
        "real_peers_llama.md",
        "A small Llama in every format, beside other tools",
        f"A Llama of {_TRAINED}",
        cache(lambda: language_models.load("llama")),
    ),
    "llama_outliers": Model(
        "real_peers_outliers.md",
        "A Llama with outlier channels in every format, beside other tools",
        f"A Llama of {_TRAINED}; some of its channels then made large, in a way that leaves its function as it is, as "
        "those of large models are",
        cache(lambda: language_models.load("llama_outliers")),
    ),
}


def verdict(measured: Sequence[Measured], data_free: bool) -> str:
    """Compare each tool's best row with our best row with no more bits in half of its time, or in its time."""
    part, limit = (1, "at most the same time") if data_free else (2, "at most half of that")
    said = list[str]()
    mine = [
        one for one in measured if one.row.ours and BRANCH not in one.row.options.get("instead", {}).get("GPTQ", ())
    ]
    for tool in PEERS:
        theirs = (one for one in measured if one.row.tool == tool)
        best = min(theirs, key=lambda one: (one.divergence, one.cpu), default=None)
        if best is None or not mine:
            continue
        within = [one for one in mine if one.cpu <= best.cpu / part]
        chosen = min(within or mine, key=lambda one: one.divergence if within else one.cpu)
        reached = chosen.divergence < best.divergence or (data_free and chosen.divergence == best.divergence)
        said.append(
            f"{tool}'s smallest divergence is {best.divergence:.4f} in {best.cpu:.0f} s; "
            f"{f'in {limit}' if within else f'no row here takes {limit}; the fastest'}, "
            f"`{chosen.row.method}`, has {chosen.divergence:.4f} in {chosen.cpu:.0f} s"
            f"{'' if within and reached else ': goal missed'}."
        )
    return textwrap.fill(" ".join(said), 120)


def section(name: str, measured: Sequence[Measured], trained: Trained) -> str:
    """Return the section of a format."""
    header = ["tool", "method", "KL", "perplexity", "CPU s", "wall s", "peak MiB", "MiB written"]
    rows = [
        (
            one.row.tool,
            one.row.method,
            f"{one.divergence:.4f}",
            f"{one.perplexity:.2f}",
            f"{one.cpu:.0f}",
            f"{one.wall:.0f}",
            f"{one.peak:.0f}",
            "–" if one.judged is None or one.judged.bytes is None else f"{one.judged.bytes / 2**20:.1f}",
        )
        for one in measured
    ]
    title = f"## `{name}`: {FORMATS[name].title}"
    windows, judged = (sum(len(b["input_ids"]) for b in text) for text in (trained.calibration, trained.held_out))
    data = "No data" if FORMATS[name].data_free else f"{windows} windows"
    said = f"{data} to calibrate on, {judged} windows to judge by."
    parts = (
        title,
        said,
        table(header, rows),
        verdict(measured, FORMATS[name].data_free),
        versions(measured),
        environment(),
    )
    return "\n\n".join(parts) + "\n"


def _first(trained: Trained, windows: int, judged: int | None) -> Trained:
    """Return a model with so many windows of its text, in its batches."""
    calibration, held_out = (
        text if count is None else text[: max(1, count // len(text[0]["input_ids"]))]
        for text, count in ((trained.calibration, windows), (trained.held_out, judged))
    )
    return replace(trained, calibration=calibration, held_out=held_out)


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    add_pythons(parser, {row.tool for form in FORMATS.values() for row in form.rows})
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose tool and method contain one of these")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="to calibrate on, at most")
    parser.add_argument("--judged", type=int, help="windows to judge by; default: all of the model")
    parser.add_argument("--jobs", type=Path, help="folder for the runs, kept; default: a temporary one")
    parser.add_argument("--write", action="store_true", help="update the page of the model")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pythons, model = pythons_of(arguments), MODELS[arguments.model]
    trained = _first(model.load(), arguments.windows, arguments.judged)
    sections = sections_of(model.page) if arguments.write else {}
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.formats:
            form = FORMATS[name]
            chosen = [row for row in form.rows if any(part in str(row) for part in arguments.only)]
            found = dict[str, Measured]()
            for predicted, kind in ((False, "weights"), (True, "predictions")):
                folder = (arguments.jobs or Path(temporary)) / arguments.model / kind / name
                subject = Subject(name, trained, folder, form.weights, held_out=predicted, written=form.written)
                rows = [row for row in chosen if form.predicts(row) is predicted]
                found |= {str(one.row): one for one in measure(subject, rows, pythons)}
            ordered = (found[str(row)] for row in chosen if str(row) in found)
            measured = sorted(ordered, key=lambda one: (not one.row.ours, one.row.tool))
            if not measured:
                print(f"{name}: no rows", file=sys.stderr)
                continue
            made = section(name, measured, trained)
            sections = {title: text for title, text in sections.items() if not title.startswith(f"`{name}`")}
            sections[made.partition("\n")[0].removeprefix("## ")] = made
            publish(page(arguments.model, sections), model.page if arguments.write else None)


@cache
def _perplexity(name: str) -> float:
    return MODELS[name].load().perplexity()


def page(name: str, sections: dict[str, str]) -> str:
    """Return the page of a model."""
    model = MODELS[name]
    text = textwrap.fill(
        f"{model.text}, where the float model's perplexity is {_perplexity(name):.2f}. Integer weights are in "
        f"groups of {GROUP}: symmetric at 4 bits, where ours with `fit_scales` are sign-aware, and with zero points at "
        "3 and 2. Embedding and head stay in float. Every run is a process of its own on one core and reads the same "
        "checkpoint and tokens; CPU seconds, user and system, are those of the whole process: imports, loading, "
        "quantizing, writing. The machine was shared with other work: seconds vary by tens of percent. KL is the mean "
        "divergence from the float model's predictions in nats per token; smaller is better. Where activations are "
        "rounded or rotated, each tool's own model predicts, or, where it has MiB written, transformers does from its "
        "checkpoint; elsewhere its weights are read and put into the float model. "
        f"Reproduce with `python -m benchmarks.real_peers --model {name}`, whose docstring says what the environments "
        "need.",
        120,
    )
    order = {f"`{name}`": place for place, name in enumerate(FORMATS)}
    shown = "\n".join(text for title, text in sorted(sections.items(), key=lambda it: order[it[0].partition(":")[0]]))
    return f"""# {model.title}

{text}

Rows that name a number of windows are calibrated on that many, all others on {WINDOWS}. The rows of a table may be of
several runs.

The goal is a smaller divergence than each tool's best row in at most half of its time; without data, no larger one in
at most the same time. Below a table, our row is the one of smallest divergence within that time.

Rows with `LowRank(rank=16)` compute 16 directions of what operators read in float. That takes `16 (2 inputs + outputs)`
floats for each value beside the codes, on SmolLM2 0.85 bits a weight in 16 bits, so these rows do not count below.

{shown}"""


if __name__ == "__main__":
    main()
