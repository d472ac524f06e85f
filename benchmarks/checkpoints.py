"""Checkpoints written here, read by the programs they are for: how far the readers' logits are from ours.

    python -m benchmarks.checkpoints [--gptqmodel gptqm/bin/python] [--llm-compressor llmc/bin/python]
        [--llama-cpp llamacpp/bin/python] [--write]

The trained models of `benchmarks.language_models`, weights rounded to nearest. A reader runs in a process and an
environment of its own (see `benchmarks/peers/reading.py`); without its `--` option its rows are left out. `--write`
updates `results/checkpoints.md`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import environment, peer_job, publish, sqnr, table
from benchmarks.language_models import Trained
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.numbers.formats import INT4, INT8, UINT4
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT16
from quark_fx.presets import (
    FP8_DYNAMIC,
    INT8_WEIGHT_ONLY,
    MXFP4_WEIGHT_ONLY,
    NVFP4_WEIGHT_ONLY,
    W4A16_RTN,
    W8A8_DYNAMIC,
)

WINDOWS = 2
"""Held-out windows of 256 tokens that are compared."""

Write = Callable[[qfx.QuantizedModel, Trained, Path], Path]


@dataclass(frozen=True)
class Row:
    """A checkpoint and who reads it.

    Attributes:
        model: of `benchmarks.language_models`.
        form: of the checkpoint.
        what: is stored.
        config: of the quantization.
        write: writes the checkpoint to a folder; returns what a reader is given.
        readers: keys of `benchmarks.peers.reading.READERS`, or `"llm-compressor"`: transformers of its environment.
        refused: part of what a reader says that is known not to load it.
    """

    model: str
    form: str
    what: str
    config: QuantConfig
    write: Write
    readers: tuple[str, ...]
    refused: str = ""


def _huggingface(form: str) -> Write:
    def write(qmodel: qfx.QuantizedModel, trained: Trained, folder: Path) -> Path:
        return qfx.export.huggingface(qmodel, folder, format=form, tokenizer=trained.tokenizer)

    return write


def _gguf(qmodel: qfx.QuantizedModel, trained: Trained, folder: Path) -> Path:
    folder.mkdir()
    return qfx.export.gguf(qmodel, folder / "model.gguf", tokenizer=trained.tokenizer)


def _weights(spec: TensorSpec) -> QuantConfig:
    return W4A16_RTN.replace(weight=spec.replace(scale=FLOAT16))


def _groups(spec: TensorSpec, size: int) -> TensorSpec:
    return spec.replace(granularity=Granularity.GROUP, group_size=size)


SYMMETRIC = TensorSpec(format=INT4, symmetry=Symmetry.SIGN_AWARE)
ASYMMETRIC = TensorSpec(format=UINT4, symmetry=Symmetry.ASYMMETRIC)
BYTES = TensorSpec(format=INT8)
# Transformers divides by half of 255 what is measured at run time.
PER_TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True, symmetry=Symmetry.SYMMETRIC_FULL)

HUGGING_FACE = ("transformers", "llm-compressor")

ROWS = (
    *(
        Row("llama", form, what, _weights(_groups(spec, 128)), _huggingface(form), ("GPTQModel",), refused)
        for form in ("gptq", "gptq_v2", "awq")
        for what, spec, refused in (
            ("int4, groups of 128", SYMMETRIC, ""),
            ("uint4 with zero points, groups of 128", ASYMMETRIC, "sym=False" if form == "gptq" else ""),
        )
    ),
    *(
        Row(model, "compressed-tensors", what, config, _huggingface("compressed-tensors"), HUGGING_FACE)
        for model, what, config in (
            ("llama", "int4, groups of 128", W4A16_RTN),
            ("llama", "int8 per channel, embedding and head too", INT8_WEIGHT_ONLY),
            ("llama", "int8, activations int8 per token", W8A8_DYNAMIC.replace(input=PER_TOKEN)),
            ("llama", "FP8, activations FP8 per token", FP8_DYNAMIC),
            ("llama", "MXFP4", MXFP4_WEIGHT_ONLY),
            ("llama", "NVFP4", NVFP4_WEIGHT_ONLY),
            ("qwen3_moe", "int4, groups of 32, experts too", W4A16_RTN.replace(weight=_groups(SYMMETRIC, 32))),
            ("qwen3_moe", "MXFP4, experts too", MXFP4_WEIGHT_ONLY),
        )
    ),
    *(
        Row("llama", "GGUF", f"{kind}, groups of 32", _weights(_groups(spec, 32)), _gguf, ("llama.cpp",))
        for kind, spec in (("Q4_0", SYMMETRIC), ("Q4_1", ASYMMETRIC), ("Q8_0", BYTES))
    ),
)


@dataclass(frozen=True)
class Environments:
    """The Pythons of the readers there are."""

    pythons: dict[str, Path]

    def read(self, reader: str, folder: Path, checkpoint: Path) -> Tensor:
        """Return a reader's logits.

        Raises:
            RuntimeError: if it fails; with the end of its log.
        """
        name = "transformers" if reader == "llm-compressor" else reader
        job = {"reader": name, "checkpoint": str(checkpoint), "tokens": "tokens.safetensors", "output": "read"}
        peer_job(self.pythons[reader], "reading", job, folder)
        logits: Tensor = load_file(folder / "read")["logits"]
        return logits


def measure(row: Row, environments: Environments, folder: Path) -> Iterator[list[str]]:
    """Write a checkpoint, let its readers read it, and yield a line for each."""
    trained = language_models.load(row.model)
    tokens = trained.held_out[0]["input_ids"][:WINDOWS]
    qmodel = qfx.quantize(trained.model, row.config, trained.calibration[:1], progress=False)
    checkpoint = row.write(qmodel, trained, folder / "checkpoint")
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    with torch.no_grad():
        exact, ours = trained.model(input_ids=tokens).logits, qmodel(input_ids=tokens).logits
    weights = (file for file in (folder / "checkpoint").iterdir() if file.suffix in (".safetensors", ".gguf"))
    size = sum(file.stat().st_size for file in weights)
    for reader in row.readers:
        if reader not in environments.pythons:
            continue
        try:
            theirs = environments.read(reader, folder, checkpoint)
        except RuntimeError as error:
            if not row.refused or row.refused not in str(error):
                raise
            agreement = "does not load"
        else:
            agreement = "equal" if torch.equal(theirs, ours) else f"{sqnr(ours, theirs):.0f} dB"
        yield [row.model, row.form, row.what, f"{size / 2**20:.1f}", f"{sqnr(exact, ours):.0f} dB", reader, agreement]


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--gptqmodel", "--llm-compressor", "--llama-cpp"):
        parser.add_argument(option, type=Path, metavar="PYTHON", help="its Python; default: no rows of it")
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose form contains one of these")
    parser.add_argument("--write", action="store_true", help="update results/checkpoints.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    given = {
        "transformers": Path(sys.executable),
        "GPTQModel": arguments.gptqmodel,
        "llm-compressor": arguments.llm_compressor,
        "llama.cpp": arguments.llama_cpp,
    }
    environments = Environments({name: path for name, path in given.items() if path is not None})
    lines = []
    for row in ROWS:
        if any(part in row.form for part in arguments.only):
            with tempfile.TemporaryDirectory() as folder:
                for line in measure(row, environments, Path(folder)):
                    print(" | ".join(line), file=sys.stderr, flush=True)
                    lines.append(line)
    publish(page(lines), "checkpoints.md" if arguments.write else None)


HEADER = ("model", "checkpoint", "what", "MiB", "quantized to float", "reader", "reader to ours")


def page(lines: list[list[str]]) -> str:
    """Return the page."""
    return f"""# Checkpoints, and what their readers make of them

Trained models, weights rounded to nearest, written in each form and read by a program it is for, in a process of its
own. "Reader to ours" is how far its logits on {WINDOWS} windows of held-out text are from those of the quantized graph,
"quantized to float" how far those are from the float model's: what rounding costs. GPTQModel computes in float16, and
loads version 1 of GPTQ with zero points only of its own making; MXFP4 and NVFP4 are read in bfloat16; llama.cpp rounds
activations to 8 bits in groups.

{table(HEADER, lines)}

Reproduce with `python -m benchmarks.checkpoints --gptqmodel PYTHON --llm-compressor PYTHON --llama-cpp PYTHON`.

{environment()}
"""


if __name__ == "__main__":
    main()
