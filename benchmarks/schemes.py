"""The 32 schemes of compressed-tensors: written, decompressed by its own code, and loaded in a fresh process.

    python -m benchmarks.schemes [--model smollm2] [--only mxfp4 nvfp4] [--write]
    python -m benchmarks.schemes --vllm PYTHON --sglang PYTHON [--keep FOLDER] [--servers] [--write]
    python -m benchmarks.schemes --model smollm2 --divergence [--only mxfp4 nvfp4] [--write]

Each row quantizes a model to nearest with the configuration of `quark_fx.presets.SCHEMES`, writes the checkpoint, and
compares

- *as asked*: the arguments in `config.json` with those of compressed-tensors' own scheme of that name;
- *decompressed*: each weight that compressed-tensors decompresses with the eager model's, bit for bit. Where it makes
  bfloat16, the eager model's weights are rounded to it first. A number counts the values that differ;
- *loaded*: logits of transformers in another process with those of the quantized graph. It measures int8 and int4
  activations with half a step more, and computes with small floats in groups in bfloat16;
- *KL*, or *dB* with `--model tiny`: the quantized model's error against the float model's predictions.

`--model tiny` is a Llama with random weights. Groups of 128 become groups of 64 where a model's channels need it. The
columns of servers are the least compute capabilities of NVIDIA GPUs on which `quark_fx.targets.servers` expects a
server to load a scheme.

With `--vllm` and `--sglang`, the Pythons of environments as in `benchmarks.in_vllm` and `in_sglang`, the servers' own
code then loads each checkpoint, and those of `CACHES`, as for GPUs of `--capabilities` that are not there: it parses
the configuration, chooses schemes and kernels, and loads the weights, on a CPU; no kernel runs. *As expected* compares
this with our rules. `--keep` names a folder for the checkpoints; those that it already has are read as they are.

`--servers` measures these columns alone, and `--divergence` the error alone, with the perplexity; rows of schemes that
it does not measure stay on the page. `--write` updates the sections of the model in `benchmarks/results/schemes.md`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import quark_fx as qfx
from benchmarks import in_sglang, in_vllm
from benchmarks.common import environment, one_thread, rows_of, sections_of, sqnr, table
from benchmarks.experiment import Option, experiment
from quark_fx.config.specs import Granularity
from quark_fx.export.runtime import checkpoint_process
from quark_fx.numbers.formats import FP8_E4M3, INT8
from quark_fx.presets import NVFP4, SCHEMES
from quark_fx.targets.servers import capability


@dataclass(frozen=True)
class Model:
    """A model to quantize.

    Attributes:
        session: its capture.
        batches: batches to calibrate on.
        window: a batch whose logits are compared.
        error: Name of the error in the last column, and the function that returns it for a quantized model.
        figures: returns `KL` and `perplexity` of held-out text for a model; None if the model knows no language.
    """

    session: qfx.Session
    batches: list[dict[str, Tensor]]
    window: dict[str, Tensor]
    error: tuple[str, Callable[[qfx.QuantizedModel], str]]
    figures: Callable[[Any], Mapping[str, float]] | None = None


def tiny() -> Model:
    """Return a Llama of two layers with random weights."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=256)).eval()
    ids = torch.randint(256, (3, 32))
    batches, window = [{"input_ids": ids[:2]}], {"input_ids": ids[2:]}
    with torch.no_grad():
        exact = model(**window).logits
    error = "dB", lambda qmodel: f"{sqnr(exact, qmodel(**window).logits):.1f}"
    return Model(qfx.Session(model, batches), batches, window, error)


def smollm2() -> Model:
    """Return SmolLM2-135M-Instruct, calibrated on 4 and judged on 2 windows of 512 tokens."""
    from benchmarks.real import smollm2 as real

    found = real.load(calibration=4, judged=2)
    window = {"input_ids": found.judged[0]["input_ids"][:1, :64]}
    error = "KL", lambda qmodel: f"{found.judge(qmodel)['KL']:.4f}"
    return Model(qfx.Session(found.model, found.calibration), found.calibration, window, error, found.judge)


MODELS: Mapping[str, Callable[[], Model]] = {"tiny": tiny, "smollm2": smollm2}


def fitted(config: qfx.QuantConfig, channels: int) -> qfx.QuantConfig:
    """Return a configuration whose groups divide the channels."""

    def smaller(spec: qfx.TensorSpec | None) -> qfx.TensorSpec | None:
        if spec is None or spec.group_size is None or channels % spec.group_size == 0:
            return spec
        return spec.replace(group_size=64, group_rows=min(spec.group_rows, 64))

    return config.replace(weight=smaller(config.weight), input=smaller(config.input))


def decompressed(directory: Path) -> dict[str, Tensor]:
    """Return the quantized weights of a checkpoint as compressed-tensors decompresses them, by module."""
    told = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (group,) = told["config_groups"].values()
    scheme = QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    stored = {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stored.items():
        path, _, leaf = name.rpartition(".")
        states.setdefault(path, {})[leaf] = tensor
    found = {path: state for path, state in states.items() if "weight_scale" in state}
    return {path: compressor.decompress(state, scheme)["weight"] for path, state in found.items()}


def differing(qmodel: qfx.QuantizedModel, directory: Path) -> int:
    """Return how many weights differ from the eager model's."""
    ours, found = qmodel.eager(), decompressed(directory)
    modules: dict[str, Any] = dict(ours.named_modules())
    return sum(int((modules[path].weight.to(weight.dtype) != weight).sum()) for path, weight in found.items())


def as_asked(name: str, directory: Path, size: int | None) -> bool:
    """Tell whether the scheme in `config.json` is compressed-tensors' own, but for groups of another size."""
    told = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    (group,) = told["config_groups"].values()
    found, wanted = QuantizationScheme.model_validate(group), preset_name_to_scheme(name, group["targets"])
    same = True
    for part in ("weights", "input_activations"):
        ours, theirs = getattr(found, part), getattr(wanted, part)
        if ours is None or theirs is None:
            same &= ours is theirs
            continue
        fields = ("num_bits", "type", "symmetric", "strategy", "dynamic", "scale_dtype")
        same &= all(getattr(ours, field) == getattr(theirs, field) for field in fields)
        same &= ours.group_size == theirs.group_size or (theirs.group_size == 128 and ours.group_size == size)
    return same


HEADER = ("scheme", "stored as", "needs", "as asked", "decompressed", "error", "vLLM", "SGLang", "loaded")


def measure(name: str, model: Model, directory: Path) -> tuple[list[str], Tensor]:
    """Write the checkpoint of a scheme; return its line but for the last cell, and the quantized graph's logits."""
    channels: int = model.session.model.config.hidden_size  # type: ignore[union-attr, assignment]
    config = fitted(SCHEMES[name], channels)
    qmodel = qfx.quantize(model.session, config, progress=False)
    qfx.export.huggingface(qmodel, directory)
    told = json.loads((directory / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    differs = differing(qmodel, directory)
    size = None if channels % 128 == 0 else 64
    line = [
        name.upper(),
        told["format"],
        told["version"],
        "yes" if as_asked(name, directory, size) else "no",
        f"{differs} differ" if differs else "equal",
        model.error[1](qmodel),
        *(capability(server, SCHEMES[name].weight, SCHEMES[name].input) or "–" for server in ("vLLM", "SGLang")),
    ]
    return line, qmodel(**model.window).logits


_LOAD = """
import runpy, sys, torch
from pathlib import Path
answers, folder = runpy.run_path(sys.argv[1])["answers"], Path(sys.argv[2])
batch = ((), torch.load(folder / "window.pt"))
for path in sys.argv[3:]:
    try:
        found = answers(folder / path, [batch])[0]["logits"]
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    torch.save(found, folder / f"{path}.pt")
"""


def loaded(names: list[str], window: dict[str, Tensor], folder: Path) -> dict[str, Tensor | str]:
    """Return the logits of transformers in a fresh process for each checkpoint, or its error."""
    torch.save(window, folder / "window.pt")
    subprocess.run([sys.executable, "-c", _LOAD, checkpoint_process.__file__, str(folder), *names], check=True)
    return {name: torch.load(folder / f"{name}.pt") for name in names}


_FP8 = qfx.TensorSpec(format=FP8_E4M3)

CACHES: Mapping[str, tuple[str, qfx.TensorSpec | None, str]] = {
    "FP8 cache per tensor": ("w4a16", _FP8, in_vllm.CT),
    "FP8 cache per head": ("w4a16", _FP8.replace(granularity=Granularity.HEAD), in_vllm.CT),
    "int8 cache": ("w4a16", qfx.TensorSpec(format=INT8), in_vllm.CT),
    "FP8 cache in ModelOpt's layout": ("fp8_dynamic", _FP8, "modelopt"),
    "NVFP4 cache in ModelOpt's layout": ("nvfp4", NVFP4.input, "modelopt"),
}
"""Scheme of the weights, spec of keys and values, and format, by row of the table of servers."""

CAPABILITIES = ("7.5", "8.0", "8.9", "9.0", "10.0")

SERVERS: Mapping[str, Callable[..., list[Mapping[str, Any]]]] = {"vLLM": in_vllm.loaded, "SGLang": in_sglang.loaded}


def kept(model: Model, only: Sequence[str], folder: Path) -> dict[str, str]:
    """Write the checkpoints that a folder lacks; return the names of all in the folder by row."""
    channels: int = model.session.model.config.hidden_size  # type: ignore[union-attr, assignment]
    rows = {scheme.upper(): (scheme, None, in_vllm.CT) for scheme in only} | dict(CACHES)
    names = dict[str, str]()
    for row, (scheme, cache, form) in rows.items():
        names[row] = name = scheme if cache is None else "".join(c if c.isalnum() else "-" for c in row)
        if not (folder / name).exists():
            config = fitted(SCHEMES[scheme], channels).replace(kv_cache=cache)
            qmodel = qfx.quantize(model.session, config, progress=False)
            qfx.export.huggingface(qmodel, folder / name, format=form)
    return names


def expected(server: str, row: str, capabilities: Sequence[str]) -> list[bool]:
    """Tell for which compute capabilities our rules expect a server to load the checkpoint of a row."""
    if row in CACHES:
        scheme, cache, form = CACHES[row]
        try:
            target = SCHEMES[scheme].replace(target=server.lower(), kv_cache=cache).target
        except qfx.QuarkError:
            return [False] * len(capabilities)
        assert target.checkpoints is not None
        return [not target.checkpoints.refuses(form, {}, ())] * len(capabilities)
    config = SCHEMES[row.lower()]
    least, _, alone = capability(server, config.weight, config.input).partition(" ")
    return [bool(least) and (at == least if alone == "alone" else float(at) >= float(least)) for at in capabilities]


def chosen(found: Mapping[str, Any], cache: bool) -> str:
    """Return the schemes and kernels that a server chose for the layers, or its error."""
    if "error" in found:
        return in_vllm.shortened(found["error"].partition(" for layer_name")[0], 120)
    schemes = [scheme for name, scheme in found["layers"].items() if ".layers." in name]
    names = dict.fromkeys(name for name in schemes if cache or "KVCache" not in name)
    lost = [f"{key}: {found[key][0]}" for key in ("unfilled", "unread") if found[key]]
    return ", ".join([*names, *found.get("kernels", ()), *lost])


def reads(found: Mapping[str, Any]) -> bool:
    """Tell whether a server loaded the whole checkpoint."""
    return "error" not in found and not found["unfilled"] and not found["unread"]


def served(
    pythons: Mapping[str, Path], model: Model, only: Sequence[str], folder: Path, capabilities: Sequence[str]
) -> str:
    """Let servers load checkpoints; return the table."""
    names = kept(model, only, folder)
    cells: dict[str, list[str]] = {row: [row] for row in names}
    for server, python in pythons.items():
        results: dict[str, list[Mapping[str, Any]]] = {row: [] for row in names}
        for at in capabilities:
            loads = SERVERS[server](python, folder, list(names.values()), [int(part) for part in at.split(".")])
            for row, found in zip(names, loads, strict=True):
                results[row].append(found)
                print(server, at, row, chosen(found, row in CACHES), sep=" | ", file=sys.stderr, flush=True)
        for row, answers in results.items():
            said = [chosen(each, row in CACHES) for each in answers]
            changes = [i for i, text in enumerate(said) if i == 0 or text != said[i - 1]]
            loaded = [reads(each) for each in answers]
            cells[row].append("; ".join(f"{capabilities[i]}: {said[i]}" for i in changes))
            cells[row].append("yes" if loaded == expected(server, row, capabilities) else "no")
    header = [title for server in pythons for title in (server, "as expected")]
    return table(("checkpoint", *header), list(cells.values()))


def divergences(only: Sequence[str], tested: Model, title: str) -> Iterator[str]:
    """Yield the table of the divergences of schemes after each; the page's section of that title has other rows."""
    channels: int = tested.session.model.config.hidden_size  # type: ignore[union-attr, assignment]
    assert tested.figures is not None
    rows = {cells[0]: cells for cells in rows_of(sections_of("schemes.md").get(title, ""))}
    rows["float"] = ["float", "0", f"{tested.figures(tested.session.model)['perplexity']:.2f}", "–"]
    for scheme in only:
        start = time.process_time()
        found = tested.figures(qfx.quantize(tested.session, fitted(SCHEMES[scheme], channels), progress=False))
        seconds = time.process_time() - start
        row = [scheme.upper(), f"{found['KL']:.4f}", f"{found['perplexity']:.2f}", f"{seconds:.0f}"]
        print(*row, file=sys.stderr, flush=True)
        rows[row[0]] = row
        order = ["float", *(name for name in PRESET_SCHEMES if name in rows)]
        yield table(("scheme", "KL", "perplexity", "CPU s"), [rows[name] for name in order])


@experiment(page="schemes.md", own_environment=True)
def main(
    model: Annotated[str, Option(choices=MODELS)] = "tiny",
    only: Sequence[str] = tuple(name.lower() for name in PRESET_SCHEMES if name != "UNQUANTIZED"),
    divergence: Annotated[bool, "measure the divergence alone"] = False,
    servers: Annotated[bool, "let the servers load the checkpoints alone"] = False,
    vllm: Annotated[Path | None, Option("the Python of an environment with vLLM", metavar="PYTHON")] = None,
    sglang: Annotated[Path | None, Option("the Python of an environment with SGLang", metavar="PYTHON")] = None,
    capabilities: Sequence[str] = CAPABILITIES,
    keep: Annotated[Path | None, "folder of the checkpoints that servers load"] = None,
) -> Iterator[str]:
    """Measure, and yield the page."""
    pythons = {name: python for name, python in (("vLLM", vllm), ("SGLang", sglang)) if python is not None}
    if pythons:
        with one_thread(), tempfile.TemporaryDirectory() as name:
            rows = served(pythons, MODELS[model](), only, keep or Path(name), capabilities)
        yield page(
            f"Loaded by servers: {model}",
            f"{_SERVERS.format(', '.join(capabilities), ' '.join(capabilities))}\n\n{rows}\n\n{_versions(pythons)}",
        )
    if servers:
        return
    if divergence:
        with one_thread():
            title = f"KL divergence of {model}"
            for rows in divergences(only, MODELS[model](), title):
                yield page(title, f"{_DIVERGENCE}\n\n{rows}")
        return
    with one_thread(), tempfile.TemporaryDirectory() as name:
        folder, tested, lines, logits = Path(name), MODELS[model](), {}, {}
        for scheme in only:
            lines[scheme], logits[scheme] = measure(scheme, tested, folder / scheme)
            print(" | ".join(lines[scheme]), file=sys.stderr, flush=True)
        for scheme, read in loaded(list(lines), tested.window, folder).items():
            ours = logits[scheme]
            equal = isinstance(read, Tensor) and torch.equal(read, ours)
            lines[scheme].append(
                read if isinstance(read, str) else "equal" if equal else f"{sqnr(ours, read.float()):.0f} dB"
            )
    header = [tested.error[0] if title == "error" else title for title in HEADER]
    command = f"`python -m benchmarks.schemes --model {model} --write` measures this."
    yield page(f"Written and read: {model}", f"{command}\n\n{table(header, list(lines.values()))}\n\n{_NOTES}")


def _versions(pythons: Mapping[str, Path]) -> str:
    told = {"vLLM": in_vllm.versions, "SGLang": in_sglang.versions}
    return "\n".join(f"In the environment of {server}: {told[server](python)}." for server, python in pythons.items())


_SERVERS = """Checkpoints of the schemes, and of caches, in the servers' own configuration and loading code, run as for
NVIDIA GPUs of compute capability {0}, without one: schemes and kernels that the servers choose, with the lowest
capability at which they choose them. No kernel ran. Every tensor of the checkpoint was read, and every parameter
filled, unless `unread` or `unfilled` names one. *As expected* is yes if the target accepts the row exactly where the
server loads all of it. This was measured by `python -m benchmarks.schemes --vllm PYTHON --sglang PYTHON --servers
--capabilities {1} --write`."""

_DIVERGENCE = """SmolLM2-135M, whose weights are real: the mean KL divergence from the float model's predictions, in
nats per token, of 1,022 predictions of held-out text. NVFP4 and FP8 calibrate on 4 windows of 512 tokens; the other
schemes need no data. Groups of 128 are groups of 64 here. CPU seconds include the predictions.
`python -m benchmarks.schemes --model smollm2 --divergence --write` measures this."""


_NOTES = """\
- Transformers computes with small floats in groups in bfloat16: there the decompressed weights are the proof, and
  *loaded* only shows that the checkpoint runs.
- Servers: compute capabilities of NVIDIA GPUs by the code of vLLM 0.32 and SGLang 0.5.23; no GPU was used. In brackets
  is the least on which activations are rounded, too; below, a server multiplies by float activations. vLLM has the
  products of `w4afp8` for 9.0 alone. Where there is none (–), the target refuses the scheme before calibration.
- `fp8` has one scale per tensor, which servers round again when they fuse layers; their targets ask for `fp8_static`.
- Checkpoints say that activations have E8M0 scales, not by which rule. Readers round exponents by `e8m0_even`, and of
  FP8 by `e8m0_ceil`; the export warns of other rules."""


def page(title: str, text: str) -> str:
    """Return the page with one section replaced."""
    sections = sections_of("schemes.md") | {title: f"## {title}\n\n{text}\n\n{environment()}\n"}
    shown = "\n".join(sections[name] for name in sorted(sections, reverse=True))
    return f"""# Schemes of compressed-tensors

`qfx.presets.SCHEMES` has the 32 schemes of compressed-tensors by its names in lower case; `quantize` takes them like
presets, and `export.huggingface` writes them:

``` {{.python}}
qmodel = qfx.quantize(llm, "mxfp6a8", token_batches)
qfx.export.huggingface(qmodel, "llm-mxfp6a8")
```

Weights are rounded to nearest; add passes of a preset such as `w4a16_gptq` for accuracy. The docstring of
`benchmarks.schemes` defines the columns. *needs* is the oldest version of compressed-tensors that decompresses the
weights (`"version"` in `config.json`).

{shown}"""


if __name__ == "__main__":
    main()
