"""Language models at 4 bits beside other tools: divergence, processor time, memory.

    python -m benchmarks.language_peers [--model llama|random|wide ...] [--quark-fx quark/bin/python]
        [--llm-compressor llmc/bin/python] [--gptqmodel gptqm/bin/python] [--auto-round ar/bin/python]
        [--modelopt modelopt/bin/python] [--amd-quark amdquark/bin/python] [--neural-compressor inc/bin/python]
        [--jobs FOLDER] [--write]

int4 weights in groups of 128, symmetric, embedding and head in float; the same checkpoint and the same calibration
tokens, in batches of 8, for every tool. Each run is a process of its own on one core, ours like the others: CPU seconds
are those of the whole process, from the first import to the written weights, peak memory is its own. Divergence and
perplexity are computed here, from the dequantized weights that a run leaves, put into the float model.

`llama` is the trained model of `benchmarks.language_models` with its 64 windows of 256 tokens. `random` and `wide` have
random weights, 25 and 113 million in their layers, and 32 windows of random tokens: they are there for time and memory,
of which imports and loading are most for the small one.

A peer runs in an environment of its own (see `benchmarks/peers/language.py`); without its `--` option its rows are left
out. A build of torch for GPUs takes 300 MiB more than one without: where the peers have the latter, `--quark-fx` is to
name an environment with the same. `--jobs` keeps finished runs: one with the same checkpoint, tokens, options and, if
it is ours, source is read instead of run. `--write` updates `results/language_peers.md`.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save, save_file
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks import language_models
from benchmarks.common import environment, one_core, publish, sqnr, table
from benchmarks.language_models import Trained

ROOT = Path(__file__).resolve().parent.parent

BATCH = 8
"""Windows in a calibration batch."""

AGREED = 40.0
"""dB that logits of a tool's own model agree to with those of the float model that has its weights."""

HALF = 3.0
"""dB below the float model's own agreement in bfloat16 that are accepted: some tools compute in bfloat16, where a deep
model agrees to less than `AGREED`."""

SHIFT = 0.05
"""Standard deviations that the mean of a weight may move; one step is a quarter of one or more."""


@dataclass(frozen=True)
class Row:
    """A tool and its settings.

    Attributes:
        tool: a key of `TOOLS` of the worker.
        method: in the table.
        options: of the worker.
        rounds: runs, of which the fastest counts; rows of several are run in turn.
    """

    tool: str
    method: str
    options: dict[str, Any]
    rounds: int = 1

    @property
    def ours(self) -> bool:
        """Whether the tool is this one."""
        return self.tool == "quark_fx"

    @property
    def peers_gptq(self) -> bool:
        """Whether it is GPTQ and nothing else, of another tool."""
        return not self.ours and self.method.startswith(("GPTQ", "GPTAQ"))

    def __str__(self) -> str:
        return f"{self.tool}, {self.method}"


QUALITY = {"name": "GPTQ", "asymmetry": 0.5, "fit_scales": True}
BEST = {"gptaq": 0.25, "mse": 2.4, "desc_act": True, "static_groups": True, "damp_percent": 0.01}

OURS = Row("quark_fx", "GPTQ()", {"passes": ["GPTQ"]}, 2)

COMPARED = (
    OURS,
    Row(
        "llm-compressor",
        'GPTQ, sequential_targets="Linear"',
        {"gptq": True, "arguments": {"sequential_targets": ["Linear"]}},
        2,
    ),
    Row("llm-compressor", "GPTQ", {"gptq": True}, 2),
)
"""The rows whose times are compared."""


def rows(iterations: int) -> tuple[Row, ...]:
    """Return all rows; `iterations` are those of auto-round."""
    return (
        Row("quark_fx", "to nearest", {"passes": []}),
        *COMPARED,
        Row(
            "quark_fx",
            "GPTQ(asymmetry=0.5, fit_scales=True), sign-aware",
            {"passes": [QUALITY], "symmetry": "sign_aware"},
        ),
        Row("quark_fx", "w4a16_best", {"preset": "w4a16_best"}),
        Row("quark_fx", "AWQ()", {"passes": ["AWQ"]}, 2),
        Row("quark_fx", "AWQ(), FitScales()", {"passes": ["AWQ", "FitScales"]}, 2),
        Row("quark_fx", "AWQ(), GPTQ()", {"passes": ["AWQ", "GPTQ"]}),
        Row(
            "quark_fx",
            "AWQ(), GPTQ(asymmetry=0.5, fit_scales=True), sign-aware",
            {"passes": ["AWQ", QUALITY], "symmetry": "sign_aware"},
        ),
        Row("quark_fx", "AutoRound()", {"passes": ["AutoRound"]}),
        Row("quark_fx", "AutoRound(), sign-aware", {"passes": ["AutoRound"], "symmetry": "sign_aware"}),
        Row("GPTQModel", "GPTAQ, mse=2.4, desc_act, static_groups, damp 0.01", BEST),
        Row("auto-round", f"{iterations} iterations", {"iters": iterations}),
        Row("llm-compressor", "AWQ", {"awq": True}, 2),
        Row("llm-compressor", "AWQ, GPTQ", {"awq": True, "gptq": True}),
        Row("GPTQModel", "GPTQ", {}),
        Row("ModelOpt", "GPTQ", {"algorithm": {"method": "gptq", "layerwise": {"enable": True}}}),
        Row("ModelOpt", "AWQ", {"algorithm": {"method": "awq_lite"}}),
        Row("AMD Quark", "GPTQ", {"algorithm": "gptq"}),
        Row("AMD Quark", "AWQ", {"algorithm": "awq"}),
        Row("Neural Compressor", "GPTQ", {}),
    )


def random_llama(hidden: int, intermediate: int, layers: int) -> Trained:
    """Return a Llama with random weights, 32 windows of random tokens and as many to judge by."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(2048)}, unk_token="0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1")
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=1,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tokens = torch.randint(2048, (64, 256), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": batch} for batch in tokens.split(BATCH)]
    return Trained(model, tokenizer, batches[:4], batches[4:])


LONG = ("auto-round", "AWQ", "AutoRound", "ModelOpt", "AMD Quark", "Neural Compressor")

SLOW = {"llama": (), "random": LONG, "wide": LONG}
"""What is not run on a model, as parts of the rows' names: it would take hours."""

MODELS: dict[str, Callable[[], Trained]] = {
    "llama": lambda: language_models.load("llama"),
    "random": lambda: random_llama(512, 1408, 8),
    "wide": lambda: random_llama(1536, 4096, 4),
}


@dataclass(frozen=True)
class Run:
    """What a process left behind.

    Attributes:
        cpu: seconds of all its threads, user and system.
        wall: seconds on the clock.
        peak: MiB of resident memory.
        versions: of the packages that matter.
        output: folder of its files.
    """

    cpu: float
    wall: float
    peak: float
    versions: dict[str, str]
    output: Path


@dataclass(frozen=True)
class Weights:
    """Integer weights in groups, of which each has a scale, and unless they are symmetric a zero point."""

    bits: int = 4
    group: int = 128
    symmetric: bool = True

    @property
    def levels(self) -> int:
        """The most values in a group."""
        return 1 << self.bits


@dataclass(frozen=True)
class Judged:
    """What a result is worth.

    Attributes:
        divergence: from the float model's predictions of held-out tokens, nats per token.
        perplexity: of these tokens.
        levels: the largest number of different values in a group; None if weights were not read.
        bytes: of the tensors of the checkpoint that a tool wrote; None if it wrote none.
    """

    divergence: float
    perplexity: float
    levels: int | None
    bytes: int | None = None


@dataclass(frozen=True)
class Subject:
    """A model and the folder of its jobs.

    Attributes:
        name: of the model.
        trained: the model and its text.
        folder: of the jobs.
        weights: what tools are to make of weights; None if the options of each row say it.
        held_out: every tool's own model predicts the held-out tokens, and these predictions are judged, for formats
            that round activations too; otherwise the weights that a tool leaves, in the float model.
        written: the checkpoint that each tool writes predicts, read by transformers and compressed-tensors here.
    """

    name: str
    trained: Trained
    folder: Path
    weights: Weights | None = Weights()
    held_out: bool = False
    written: bool = False

    @cached_property
    def digest(self) -> str:
        """Write the checkpoint and the calibration tokens; return what identifies both."""
        texts = {"calibration": self.trained.calibration}
        texts |= {"held_out": self.trained.held_out} if self.held_out else {}
        tokens = {name: torch.cat([batch["input_ids"] for batch in text]) for name, text in texts.items()}
        # Copies: an embedding that is the head as well is not saved.
        parameters = {name: tensor.clone() for name, tensor in self.trained.model.state_dict().items()}
        found = hashlib.sha256(save(parameters | tokens)).hexdigest()
        written = self.folder / "digest"
        if not (written.exists() and written.read_text(encoding="utf-8") == found):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.trained.model.save_pretrained(self.folder / "model")
            self.trained.tokenizer.save_pretrained(self.folder / "model")
            save_file(tokens, self.folder / "tokens.safetensors")
            written.write_text(found, encoding="utf-8")
        return found

    def run(self, row: Row, round_: int, python: Path) -> Run:
        """Run a row in a process of its own, or read what it left earlier.

        Raises:
            RuntimeError: if the process fails; with the end of its log.
        """
        slug = "".join(c if c.isalnum() else "-" for c in f"{row.tool} {row.method} {round_}")
        batch, weights = len(self.trained.calibration[0]["input_ids"]), self.weights and asdict(self.weights)
        job = {"model": "model", "tokens": "tokens.safetensors", "output": slug, "batch": batch, "weights": weights}
        job["written"] = self.written
        described = {"worker": 5, **job, "tool": row.tool, "options": row.options, "digest": self.digest}
        text = json.dumps({**described, "source": source() if row.ours else None}, indent=2)
        path, finished = self.folder / f"{slug}.json", self.folder / slug / "usage.json"
        if not (finished.exists() and path.read_text(encoding="utf-8") == text):
            for written in (finished, finished.with_name("judged.json")):
                written.unlink(missing_ok=True)
            path.write_text(text, encoding="utf-8")
            usage = _process(python, path)
            finished.write_text(json.dumps(usage), encoding="utf-8")
        usage = json.loads(finished.read_text(encoding="utf-8"))
        result = json.loads((finished.parent / "result.json").read_text(encoding="utf-8"))
        return Run(usage["cpu"], usage["wall"], result["peak_mib"], result["versions"], finished.parent)

    def judge(self, run: Run) -> Judged:
        """Judge what a run left, predictions or weights, which are removed then; or read what was found earlier.

        Raises:
            RuntimeError: if the weights are not what this comparison is about, or not what the tool's model computes
                with.
        """
        kept = run.output / "judged.json"
        if not kept.exists():
            if self.written:
                judged = self._judge_written(run)
            else:
                judged = self._judge_predictions(run) if self.held_out else self._judge_weights(run)
            kept.write_text(json.dumps(asdict(judged)), encoding="utf-8")
            for large in run.output.rglob("*.safetensors"):
                large.unlink()
        return Judged(**json.loads(kept.read_text(encoding="utf-8")))

    def _judge_weights(self, run: Run) -> Judged:
        assert self.weights is not None
        group, most = self.weights.group, self.weights.levels
        expected, tensors = self.trained.model.state_dict(), load_file(run.output / "weights.safetensors")
        quantized = {name: tensor for name, tensor in tensors.items() if name.endswith("_proj.weight")}
        levels = max(_levels(weight, group) for weight in quantized.values())
        if levels > most:
            raise RuntimeError(f"{run.output.name}: {levels} values in a group")
        for name, tensor in tensors.items():
            if name in quantized and abs(tensor.mean() - expected[name].mean()) > SHIFT * tensor.std():
                raise RuntimeError(f"{run.output.name}: {name} has another mean; its zero points were not understood")
            if name not in quantized and "norm" not in name and not torch.equal(tensor, expected[name]):
                raise RuntimeError(f"{run.output.name}: {name} was to stay in float")
        model = copy.deepcopy(self.trained.model)
        model.load_state_dict(tensors)
        with torch.no_grad():
            logits = model(input_ids=self.trained.calibration[0]["input_ids"][:1]).logits
        agreement = sqnr(logits, load_file(run.output / "logits.safetensors")["quantized"])
        if agreement < min(AGREED, self.half_precision - HALF):
            raise RuntimeError(f"{run.output.name}: the tool's model computes something else ({agreement:.0f} dB)")
        figures = self.trained.figures(model)
        return Judged(figures["KL"], figures["perplexity"], levels)

    @cached_property
    def half_precision(self) -> float:
        """The dB that logits of the float model in bfloat16 agree to with its own."""
        ids = self.trained.calibration[0]["input_ids"][:1]
        half = nn.Module.bfloat16(copy.deepcopy(self.trained.model))  # transformers has a `bfloat16` that may refuse
        with torch.no_grad():
            return sqnr(self.trained.model(input_ids=ids).logits, half(input_ids=ids).logits.float())

    def _judge_predictions(self, run: Run) -> Judged:
        logits = load_file(run.output / "logits.safetensors")["held_out"]
        held_out = [batch["input_ids"] for batch in self.trained.held_out]
        parts = dict(zip(map(id, held_out), logits.split([len(ids) for ids in held_out]), strict=True))
        figures = self.trained.figures(lambda input_ids: parts[id(input_ids)].float())
        return Judged(figures["KL"], figures["perplexity"], None)

    def _judge_written(self, run: Run) -> Judged:
        directory = run.output / "checkpoint"
        stored = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        figures = self.trained.figures(model)
        return Judged(figures["KL"], figures["perplexity"], None, stored)


def _levels(weight: Tensor, group: int) -> int:
    """Return the largest number of different values in a group."""
    ordered = weight.reshape(-1, group).sort(-1).values
    return int((ordered.diff(dim=-1) != 0).sum(-1).max()) + 1


def source() -> str:
    """Return what identifies the package that is measured."""
    files = sorted((ROOT / "quark_fx").rglob("*.py"))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


def _process(python: Path, path: Path) -> dict[str, float]:
    """Run the worker on the job at `path`; return its seconds."""
    command = [str(python.absolute()), "-m", "benchmarks.peers.language", str(path.absolute())]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    start = time.perf_counter()
    with path.with_suffix(".log").open("w", encoding="utf-8") as log, one_core():
        process = subprocess.Popen(
            command,
            cwd=path.parent,  # where a peer may leave its logs
            env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        end = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace")[-1500:]
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{end}")
    return {"cpu": usage.ru_utime + usage.ru_stime, "wall": time.perf_counter() - start}


@dataclass
class Measured:
    """A row and its runs."""

    row: Row
    runs: list[Run] = field(default_factory=list)
    judged: Judged | None = None

    @property
    def cpu(self) -> float:
        """The fewest seconds."""
        return min(run.cpu for run in self.runs)

    @property
    def wall(self) -> float:
        """The fewest seconds on the clock."""
        return min(run.wall for run in self.runs)

    @property
    def peak(self) -> float:
        """The fewest MiB."""
        return min(run.peak for run in self.runs)

    @property
    def divergence(self) -> float:
        """That of the first run."""
        assert self.judged is not None
        return self.judged.divergence

    @property
    def perplexity(self) -> float:
        """That of the first run."""
        assert self.judged is not None
        return self.judged.perplexity

    def cells(self, reference: float | None) -> list[str]:
        """Return the row of the table; `reference` are the seconds to divide by."""
        assert self.judged is not None
        return [
            self.row.tool,
            self.row.method,
            "–" if self.judged.levels is None else str(self.judged.levels),
            f"{self.divergence:.5f}",
            f"{self.perplexity:.3f}",
            f"{self.cpu:.1f}",
            f"{self.cpu / reference:.2f}" if reference else "–",
            f"{self.peak:.0f}",
        ]


HEADER = (
    *("tool", "method", "codes in use", "KL divergence", "perplexity", "CPU s", "CPU s / fastest peer's GPTQ"),
    "peak MiB",
)


def measure(subject: Subject, wanted: Sequence[Row], pythons: dict[str, Path]) -> list[Measured]:
    """Run all rows, those of several rounds in turn; a row that fails is reported and left out."""
    found = [Measured(row) for row in wanted if row.tool in pythons]
    for round_ in range(max((row.rounds for row in wanted), default=0)):
        for one in found:
            if round_ < one.row.rounds:
                try:
                    one.runs.append(subject.run(one.row, round_, pythons[one.row.tool]))
                    one.judged = one.judged or subject.judge(one.runs[0])
                except RuntimeError as error:
                    print(f"{one.row.tool}, {one.row.method}: {error}", file=sys.stderr, flush=True)
                    continue
                print(subject.name, *one.cells(None), sep=" | ", flush=True)
    return sorted((one for one in found if one.judged), key=lambda one: (not one.row.ours, one.row.tool))


def section(subject: Subject, measured: Sequence[Measured]) -> str:
    """Return the table of a model, and what it says of time and divergence."""
    reference = min((one.cpu for one in measured if one.row.peers_gptq), default=None)
    shown = table(HEADER, [one.cells(reference) for one in measured])
    return f"## {TITLES[subject.name]}\n\n{shown}\n\n{verdict(measured)}".rstrip()


def verdict(measured: Sequence[Measured]) -> str:
    """Say how our rows compare with the peers'; nothing without rows of both."""
    ours = next((one for one in measured if one.row == OURS), None)
    fastest = min((one for one in measured if one.row.peers_gptq), key=lambda one: one.cpu, default=None)
    if ours is None or fastest is None:
        return ""
    best, theirs = (
        min((one for one in measured if one.row.ours is mine), key=lambda one: one.divergence) for mine in (True, False)
    )
    return textwrap.fill(
        f"`{OURS.method}` takes {ours.cpu / fastest.cpu:.2f} of the processor time of the fastest GPTQ of a peer "
        f"({fastest.row}), at {ours.divergence / fastest.divergence:.2f} of its divergence. The smallest divergence is "
        f"{best.divergence:.5f} here ({best.row.method}; {best.cpu:.1f} s) and {theirs.divergence:.5f} there "
        f"({theirs.row}; {theirs.cpu:.1f} s).",
        120,
    )


PEERS = {
    "llm-compressor": "--llm-compressor",
    "GPTQModel": "--gptqmodel",
    "auto-round": "--auto-round",
    "ModelOpt": "--modelopt",
    "AMD Quark": "--amd-quark",
    "Neural Compressor": "--neural-compressor",
}
"""The option of each tool's Python."""


def add_pythons(parser: argparse.ArgumentParser, tools: Collection[str] = tuple(PEERS)) -> None:
    """Add an option for the Python of each of some tools."""
    parser.add_argument("--quark-fx", type=Path, metavar="PYTHON", help="one with the peers' torch; default: this one")
    for option in (option for tool, option in PEERS.items() if tool in tools):
        parser.add_argument(option, type=Path, metavar="PYTHON", help="its Python; default: no rows of it")


def pythons_of(arguments: argparse.Namespace) -> dict[str, Path]:
    """Return the Python of each tool that has one."""
    given = {tool: getattr(arguments, option[2:].replace("-", "_"), None) for tool, option in PEERS.items()}
    ours = {"quark_fx": arguments.quark_fx or Path(sys.executable)}
    return ours | {tool: python for tool, python in given.items() if python is not None}


def versions(measured: Iterable[Measured]) -> str:
    """Say what packages were in the environments."""
    used = sorted({f"{name} {number}" for one in measured for name, number in one.runs[0].versions.items()})
    return textwrap.fill(f"Versions in the environments: {', '.join(used)}.", 120)


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["llama"])
    add_pythons(parser)
    parser.add_argument("--iterations", type=int, default=200, help="of auto-round")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose tool and method contain one of these")
    parser.add_argument("--jobs", type=Path, help="folder for the runs, kept; default: a temporary one")
    parser.add_argument("--write", action="store_true", help="update results/language_peers.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pythons = pythons_of(arguments)
    wanted = [
        row for row in rows(arguments.iterations) if any(part in f"{row.tool} {row.method}" for part in arguments.only)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.jobs or Path(temporary)
        subjects = [Subject(name, MODELS[name](), folder / name) for name in arguments.model]
        chosen = [[row for row in wanted if not any(part in str(row) for part in SLOW[one.name])] for one in subjects]
        text = page(subjects, [measure(*pair, pythons) for pair in zip(subjects, chosen, strict=True)])
    publish(text, "language_peers.md" if arguments.write else None)


TITLES = {
    "llama": "Trained Llama, 4 layers of 256 channels, 64 windows of 256 tokens",
    "random": "Llama with random weights, 8 layers of 512 channels, 32 windows of 256 tokens",
    "wide": "Llama with random weights, 4 layers of 1,536 channels, 32 windows of 256 tokens",
}


def page(subjects: Sequence[Subject], measured: Sequence[Sequence[Measured]]) -> str:
    """Return the page."""
    sections = "\n\n".join(map(section, subjects, measured))
    return f"""# Language models at 4 bits, beside other tools

int4 weights in groups of 128, symmetric; embedding and head in float. Every run is a process of its own on one core;
all read the same checkpoint and the same calibration tokens, in batches of {BATCH}. CPU seconds, user and system, are
those of the whole process: imports, loading, quantizing, writing the weights. Of `GPTQ()`, `AWQ()` and
`AWQ(), FitScales()`, and of llm-compressor's GPTQ and AWQ, the faster of two runs in turn counts. The machine was
shared with other work: seconds vary by tens of per cent. Peak memory is of the process until the tool had quantized. KL
divergence (nats per token, from the float model) and perplexity are of held-out tokens and computed by one program,
from the dequantized weights that each run leaves; it also checks that no group has more than {Weights().levels} values,
that embedding and head are those of the checkpoint, and that each tool's own model computes with these weights. "Codes
in use" are the most different values in a group: 15 where the grid is symmetric to the last code.

{sections}

Reproduce with `python -m benchmarks.language_peers --model llama random wide --quark-fx quark/bin/python
--llm-compressor llmc/bin/python --gptqmodel gptqm/bin/python --auto-round ar/bin/python
--modelopt modelopt/bin/python --amd-quark amdquark/bin/python --neural-compressor inc/bin/python`.

{versions(one for rows_ in measured for one in rows_)}

{environment()}
"""


if __name__ == "__main__":
    main()
