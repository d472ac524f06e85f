"""Compare the results of two commits on this machine: plans, stored tensors, files, checkpoints, reports, and errors.

    python -m benchmarks.golden COMMIT [--against COMMIT] [--all] [--only PATTERN …] [--show]

Each commit quantizes the same models with the same seeds in processes of its own. The second commit is by default this
checkout with its uncommitted changes. `--all` adds models and presets to the quick subset, which takes at most ten
minutes. `--only` selects cases by patterns such as `cnn/*` or `*/xint8`. A case is compared aspect by aspect:

- *graph*: the converted graph as text, which shows each quantizer, each fold, and each rewrite;
- *tensors*: each stored tensor, bit by bit;
- *report*, *warnings*, and *outputs* of the quantized model, of the one that was saved and loaded, and of `eager()`;
- *onnx FORMAT*: nodes, initializers, the report of the file, and the outputs of ONNX Runtime;
- *checkpoint FORMAT*: each file and each tensor of the directory;
- the message, wherever one of these raises.

Sums differ between processors, so no digest is committed: both sides run on the same machine. The exit status is 1
if any aspect differs; `--show` prints the differences. A commit that moves a row explains it in its message.
"""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ROOT = Path(__file__).resolve().parent.parent

if "--child" in sys.argv:
    sys.path.remove(str(ROOT / "benchmarks"))  # files of both folders have the same names
    sys.path += [str(ROOT), str(ROOT / "tests")]  # after the package, which PYTHONPATH selects
else:
    sys.path.insert(0, str(ROOT / "tests"))

Made = tuple[nn.Module, list[Any]]
"""A model in eval mode and its calibration batches."""

ONNX_FORMATS = ("qdq", "qoperator", "matmul_nbits", "vitis")
CHECKPOINT_FORMATS = ("compressed-tensors", "gptq", "awq")

_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
_MLP = {"intermediate_size": 96}
_KEY_HEADS = {"num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}


def _tiny(name: str) -> Made:
    import seeded_models

    if name == "cnn":
        return seeded_models.cnn(), seeded_models.images(8, 8, 8)
    return seeded_models.mlp(), seeded_models.tokens(8, 8, 8)


def _random(name: str) -> Made:
    from random_models import random_model

    case = random_model(int(name.removeprefix("random ")))
    return case.model, case.batches


def _language(name: str) -> Made:
    import transformers

    kind, more = {
        "llama": ("LlamaForCausalLM", _MLP | _KEY_HEADS),
        "llama tied": ("LlamaForCausalLM", _MLP | {"tie_word_embeddings": True}),
        "gpt2": ("GPT2LMHeadModel", {}),
        "opt": ("OPTForCausalLM", {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64}),
        "bert": ("BertForSequenceClassification", _MLP),
        "qwen3_moe": ("Qwen3MoeForCausalLM", _MLP | _KEY_HEADS | _EXPERTS),
        "gemma3": ("Gemma3ForCausalLM", _MLP | _KEY_HEADS | {"head_dim": 16, "sliding_window": 8}),
        "mamba": ("MambaForCausalLM", {"state_size": 4}),
        "t5": ("T5ForConditionalGeneration", {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": 2}),
    }[name]
    factory = getattr(transformers, kind)
    options = _SIZES | more | {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    model = factory(factory.config_class(**options)).eval()
    generator = torch.Generator().manual_seed(0)
    batches = [{"input_ids": torch.randint(3, 96, (2, 12), generator=generator)} for _ in range(3)]
    if name == "t5":
        batches = [batch | {"decoder_input_ids": batch["input_ids"][:, :5]} for batch in batches]
    return model, batches


def _vision(name: str) -> Made:
    import torchvision

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(weights=None).eval()
    generator = torch.Generator().manual_seed(0)
    return model, [torch.randn(2, 3, 64, 64, generator=generator) for _ in range(2)]


FAMILIES: dict[str, Callable[[str], Made]] = {
    **dict.fromkeys(("cnn", "mlp"), _tiny),
    **dict.fromkeys(("llama", "llama tied", "gpt2", "opt", "bert", "qwen3_moe", "gemma3", "mamba", "t5"), _language),
    **dict.fromkeys(("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1"), _vision),
}
"""Models by name; `random SEED` is one of `tests/random_models.py`."""

SOLVERS: dict[str, tuple[str, str]] = {
    "SmoothQuant()": ("int8_static", "SmoothQuant()"),
    "BiasCorrection()": ("int8_static", "BiasCorrection()"),
    "CrossLayerEqualization()": ("int8_static", "CrossLayerEqualization()"),
    "AdaRound()": ("int8_static", "AdaRound(iterations=20)"),
    "AdaQuant()": ("int8_static", "AdaQuant(iterations=20)"),
    "FitScales()": ("w4a16_rtn", "FitScales()"),
    "GPTQ()": ("w4a16_rtn", "GPTQ()"),
    "GPTQ(asymmetry=1)": ("w4a16_rtn", "GPTQ(asymmetry=1.0)"),
    "AWQ()": ("w4a16_rtn", "AWQ()"),
    "AutoRound()": ("w4a16_rtn", "AutoRound(iterations=20)"),
    "TuneScales()": ("w4a16_rtn", "TuneScales(iterations=4)"),
    "LowRank()": ("w4a16_rtn", "LowRank(rank=4)"),
    "Rotate()": ("w4a16_rtn", "Rotate()"),
}
"""Configurations with one solver: a preset and the pass that follows its own, as Python."""

_QUICK_PRESETS = ("int8_static", "int8_dynamic", "xint8", "w4a16_gptq", "fp8_static", "nvfp4")
_QUICK_SOLVERS = ("AdaRound()", "AWQ()", "SmoothQuant()", "AutoRound()")


@dataclass(frozen=True)
class Case:
    """A model and a configuration.

    Attributes:
        model: Name in `FAMILIES`, or `random SEED`.
        config: Name of a preset or of a row of `SOLVERS`.
    """

    model: str
    config: str

    def __str__(self) -> str:
        """Return `model/config`."""
        return f"{self.model}/{self.config}"


def cases(*, everything: bool) -> list[Case]:
    """Return the cases of the quick subset or of the full run."""
    from quark_fx.presets import PRESETS

    names = [name for name, _ in sorted(PRESETS.items())]
    chosen = [Case(model, config) for model in ("cnn", "mlp") for config in (*names, *SOLVERS)]
    chosen += [Case("llama", config) for config in (names if everything else _QUICK_PRESETS)]
    rest = [model for model in FAMILIES if model not in ("cnn", "mlp", "llama")]
    if everything:
        chosen += [Case("llama", config) for config in SOLVERS]
        chosen += [Case(model, config) for model in rest for config in _QUICK_PRESETS]
    else:
        chosen += [Case("llama", config) for config in _QUICK_SOLVERS]
        chosen += [Case(model, "int8_static") for model in ("gpt2", "bert", "mobilenet_v3_small")]
        chosen += [Case("qwen3_moe", "w4a16_rtn")]
    chosen += [Case(f"random {seed}", names[seed % len(names)]) for seed in range(300 if everything else 60)]
    return chosen


# Recording.


class _Record:
    """Texts and tensors of a case, by aspect."""

    def __init__(self, folder: Path) -> None:
        self.texts: dict[str, str] = {}
        self.tensors: dict[str, Tensor] = {}
        self.folder = folder

    def text(self, aspect: str, value: object) -> None:
        self.texts[aspect] = without_accidents(str(value))

    def add(self, aspect: str, tensors: Mapping[str, Tensor]) -> None:
        self.tensors |= {f"{aspect}: {name}": tensor for name, tensor in tensors.items()}

    def attempt(self, aspect: str, act: Callable[[], None]) -> None:
        """Run `act`; a failure is an aspect as well."""
        torch.manual_seed(0)
        try:
            act()
        except Exception as error:
            self.text(aspect, f"{type(error).__name__}: {error}")

    def write(self) -> None:
        self.folder.mkdir(parents=True)
        torch.save(self.tensors, self.folder / "tensors.pt")
        (self.folder / "texts.json").write_text(json.dumps(self.texts))


def without_accidents(text: str) -> str:
    """Remove what differs between two runs of one program: temporary paths, addresses, and seconds."""
    text = re.sub(r"(/[\w.+-]+)*/golden-[\w-]+/", "", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x", text)
    text = re.sub(r"(/[\w.+-]+)+/quark_fx/(?=[\w/]+\.py)", "quark_fx/", text)
    return re.sub(r"\b\d+(\.\d+)?(e-?\d+)? ?(s|ms|min)\b", "0 s", text)


def without_order(report: str) -> str:
    """Remove the numbers and the order of nodes that ONNX Runtime adds, which differ between runs, from a report."""
    return "\n".join(sorted(re.sub(" {2,}", "  ", re.sub(r"_token_\d+", "", line)) for line in report.splitlines()))


def _leaves(value: Any) -> dict[str, Tensor]:
    if hasattr(value, "to_tuple"):
        value = value.to_tuple()
    return {
        str(i): leaf.detach().clone() for i, leaf in enumerate(pytree.tree_leaves(value)) if isinstance(leaf, Tensor)
    }


def _run(model: Callable[..., Any], batch: Any) -> dict[str, Tensor]:
    with torch.no_grad():
        if isinstance(batch, Mapping):
            return _leaves(model(**batch))
        return _leaves(model(*batch) if isinstance(batch, tuple | list) else model(batch))


def _config(name: str) -> Any:
    import quark_fx as qfx
    from quark_fx import passes

    if name not in SOLVERS:
        return name
    base, text = SOLVERS[name]
    config = qfx.presets.PRESETS[base]
    return config.replace(passes=(*config.passes, eval(text, vars(passes))))


def record_case(case: Case, folder: Path) -> None:
    """Quantize one model, export it in each format, and write the record."""
    import quark_fx as qfx

    record = _Record(folder / str(case).replace("/", "__"))
    with tempfile.TemporaryDirectory(prefix="golden-") as scratch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        results: list[tuple[Any, Any]] = []

        def quantize() -> None:
            make = FAMILIES.get(case.model, _random)
            model, batches = make(case.model)
            torch.manual_seed(0)
            results.append((qfx.quantize(model, _config(case.config), batches, progress=False), batches[0]))

        record.attempt("quantize", quantize)
        if results:
            _record_model(record, *results[0], Path(scratch))
    ours = [w for w in warned if "quark_fx" in w.filename or "quark_fx" in str(w.category)]
    record.text("warnings", "\n".join(f"{w.category.__name__}: {w.message}" for w in ours))
    record.write()


def _record_model(record: _Record, qmodel: Any, batch: Any, scratch: Path) -> None:
    import quark_fx as qfx

    graph = qmodel.graph_module
    record.text("graph", graph.graph)
    record.add("tensors", {name: tensor.detach() for name, tensor in _stored(graph)})
    record.text("report", qmodel.report())
    record.attempt("outputs", lambda: record.add("outputs", _run(qmodel, batch)))

    def load() -> None:
        qmodel.save(scratch / "saved")
        record.add("loaded", _run(qfx.load(scratch / "saved"), batch))

    record.attempt("loaded", load)
    record.attempt("eager", lambda: record.add("eager", _run(qmodel.eager(), batch)))
    for name in ONNX_FORMATS:
        record.attempt(f"onnx {name}", partial(_record_onnx, record, qmodel, batch, scratch, name))
    for name in CHECKPOINT_FORMATS:
        record.attempt(f"checkpoint {name}", partial(_record_checkpoint, record, qmodel, scratch, name))

    def gguf() -> None:
        file = scratch / "model.gguf"
        qfx.export.gguf(qmodel, file)
        record.add("checkpoint gguf", {"bytes": torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8)})

    record.attempt("checkpoint gguf", gguf)


def _stored(graph: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from graph.named_parameters(remove_duplicate=False)
    yield from graph.named_buffers(remove_duplicate=False)


def _record_onnx(record: _Record, qmodel: Any, batch: Any, scratch: Path, name: str) -> None:
    import onnx
    import onnxruntime as ort
    from onnx import numpy_helper

    import quark_fx as qfx

    aspect = f"onnx {name}"
    path = scratch / f"{name}.onnx"
    file = qfx.export.onnx(qmodel, path, format=name)
    model = onnx.load(path)
    record.text(f"{aspect}: nodes", "\n".join(_lines(model.graph)))
    stored = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    record.add(aspect, {key: torch.from_numpy(_bytes(value)) for key, value in stored.items()})
    record.attempt(f"{aspect}: report", lambda: record.text(f"{aspect}: report", without_order(str(file.report()))))

    def run() -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        leaves = [leaf.numpy() for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        outputs = session.run(None, dict(zip((i.name for i in session.get_inputs()), leaves, strict=False)))
        record.add(f"{aspect}: outputs", {str(i): torch.from_numpy(_bytes(x)) for i, x in enumerate(outputs)})

    record.attempt(f"{aspect}: outputs", run)


def _bytes(array: Any) -> Any:
    """Return an array that torch can hold: types it does not know as their bytes."""
    import numpy as np

    readable = array.dtype.kind in "if" and array.dtype.name in (
        "float32",
        "float64",
        "float16",
        "int8",
        "int32",
        "int64",
    )
    return np.array(array) if readable else np.frombuffer(bytearray(array.tobytes()), np.uint8)


def _lines(graph: Any, indent: str = "") -> Iterator[str]:
    """Yield a line per input, node, and output of an ONNX graph; subgraphs are indented."""
    import onnx
    from onnx import numpy_helper
    from onnx.helper import printable_attribute, printable_value_info

    for value in graph.input:
        yield f"{indent}input {printable_value_info(value)}"
    for node in graph.node:
        skipped = (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS)
        attributes = [
            f"{a.name} = {numpy_helper.to_array(a.t).tolist()}"
            if a.type == onnx.AttributeProto.TENSOR
            else printable_attribute(a)
            for a in node.attribute
            if a.type not in skipped
        ]
        operands, results = ", ".join(node.input), ", ".join(node.output)
        yield f"{indent}{node.domain}.{node.op_type}({operands}) -> {results} {sorted(attributes)}"
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from _lines(attribute.g, indent + "  ")
    for value in graph.output:
        yield f"{indent}output {printable_value_info(value)}"


def _record_checkpoint(record: _Record, qmodel: Any, scratch: Path, name: str) -> None:
    from safetensors.torch import load_file

    import quark_fx as qfx

    folder = scratch / name
    qfx.export.huggingface(qmodel, folder, format=name)
    aspect = f"checkpoint {name}"
    for file in sorted(folder.rglob("*")):
        if file.suffix == ".safetensors":
            record.add(aspect, load_file(file))
        elif file.is_file():
            record.text(f"{aspect}: {file.relative_to(folder)}", file.read_text(errors="replace"))


# Comparison.


@dataclass(frozen=True)
class Difference:
    """One aspect of a case that two commits disagree about.

    Attributes:
        aspect: Such as `graph` or `onnx qdq`.
        summary: One line.
        details: Lines of a text difference, or one line per tensor.
    """

    aspect: str
    summary: str
    details: tuple[str, ...]


def compared(before: Path, after: Path) -> list[Difference]:
    """Return the aspects of one case that differ between two recorded folders."""
    if not (before / "texts.json").exists() or not (after / "texts.json").exists():
        missing = [side for side, path in (("before", before), ("after", after)) if not (path / "texts.json").exists()]
        return [Difference("process", f"no record {' and '.join(missing)}: the process died", ())]
    texts = [json.loads((path / "texts.json").read_text()) for path in (before, after)]
    differences = []
    for aspect in sorted(texts[0].keys() | texts[1].keys()):
        a, b = (side.get(aspect) for side in texts)
        if a == b:
            continue
        lines = list(difflib.unified_diff((a or "").splitlines(), (b or "").splitlines(), lineterm="", n=0))[2:]
        changed = sum(line[0] in "+-" for line in lines)
        what = "only after" if a is None else "only before" if b is None else f"{changed} lines"
        differences.append(Difference(aspect, f"{what}: {lines[1] if len(lines) > 1 else ''}"[:200], tuple(lines)))
    old, new = (torch.load(path / "tensors.pt") for path in (before, after))
    tensors: dict[str, list[str]] = {}
    for name in sorted(old.keys() | new.keys()):
        aspect, _, tensor = name.rpartition(": ")
        if difference := _tensor_difference(old.get(name), new.get(name)):
            tensors.setdefault(aspect, []).append(f"{tensor}: {difference}")
    for aspect, details in tensors.items():
        differences.append(Difference(aspect, f"{len(details)} tensors: {details[0]}"[:200], tuple(details)))
    return differences


def _tensor_difference(before: Tensor | None, after: Tensor | None) -> str:
    """Return how two tensors differ, or an empty string."""
    if before is None or after is None:
        return "only after" if before is None else "only before"
    if before.dtype != after.dtype or before.shape != after.shape:
        return f"{before.dtype} {tuple(before.shape)} is now {after.dtype} {tuple(after.shape)}"
    if torch.equal(_raw(before), _raw(after)):
        return ""
    a, b = (
        t.double() if t.dtype.itemsize > 1 or not t.is_floating_point() else t.float().double() for t in (before, after)
    )
    other = (a != b) & ~(a.isnan() & b.isnan())
    if not other.any():
        return "bits of zeros or NaN alone"
    return f"{int(other.sum())} of {other.numel()} values, by at most {float((a - b).abs().max()):.3g}"


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else tensor.flatten()


def _work(tree: Path, chunk: list[Case], folder: Path) -> subprocess.Popen[str]:
    """Start a process that records some cases of the package in `tree`."""
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", str(folder), *map(str, chunk)]
    return subprocess.Popen(command, env=environment, cwd=folder, text=True, stderr=subprocess.PIPE)


def record(trees: Iterable[Path], chosen: list[Case], folder: Path) -> list[Path]:
    """Record the cases of each tree, one process per tree at a time; return the folders."""
    folders = [folder / str(number) for number in range(len(list(trees)))]
    for path in folders:
        path.mkdir(parents=True)
    for start in range(0, len(chosen), _CHUNK):
        chunk = chosen[start : start + _CHUNK]
        running = [_work(tree, chunk, path) for tree, path in zip(trees, folders, strict=True)]
        for process in running:
            _, errors = process.communicate()
            if process.returncode:
                print(errors[-2000:], file=sys.stderr)
        print(f"{min(start + _CHUNK, len(chosen))} of {len(chosen)} cases", file=sys.stderr)
    return folders


_CHUNK = 40
"""Cases per process: importing takes seconds, and a process that dies loses the rest of its cases."""


def _child(folder: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        record_case(Case(*name.split("/")), Path(folder))


def main() -> int:
    """Record both commits, print the differences, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit to compare with")
    parser.add_argument("--against", help="the other commit (default: this checkout)")
    parser.add_argument("--all", action="store_true", help="all models and presets")
    parser.add_argument("--only", nargs="*", metavar="PATTERN", help="cases such as 'cnn/*'")
    parser.add_argument("--show", action="store_true", help="print each difference whole")
    arguments = parser.parse_args()
    chosen = cases(everything=arguments.all)
    if arguments.only:
        chosen = [case for case in chosen if any(fnmatch.fnmatch(str(case), p) for p in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        trees = [Path(folder, "before")] + ([Path(folder, "after")] if arguments.against else [])
        try:
            for tree, commit in zip(trees, (arguments.commit, arguments.against), strict=False):
                subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
            sides = trees if arguments.against else [*trees, ROOT]
            before, after = record(sides, chosen, Path(folder, "records"))
        finally:
            for tree in trees:
                subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
        return _print(chosen, before, after, show=arguments.show)


def _print(chosen: list[Case], before: Path, after: Path, *, show: bool) -> int:
    moved = Counter[str]()
    for case in chosen:
        name = str(case).replace("/", "__")
        differences = compared(before / name, after / name)
        moved["cases"] += bool(differences)
        for difference in differences:
            moved[difference.aspect.split(":")[0]] += 1
            print(f"{case}  {difference.aspect}  {difference.summary}")
            if show:
                print(*("    " + line for line in difference.details), sep="\n")
    print(f"{moved.pop('cases')} of {len(chosen)} cases differ")
    for aspect, count in sorted(moved.items()):
        print(f"  {aspect}: {count}")
    return int(bool(moved))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(main())
