"""Exact on every processor: the same files on kernels with VNNI, on AVX-512 and AVX2 without it, and what that costs.

    python -m benchmarks.processors [--models minilm ...] [--files xint8 ...] [--rounds 10] [--write]
    python -m benchmarks.processors --suite

The files are written once and run by ONNX Runtime four times: on this processor as it is; on the kernels that ONNX
Runtime has for AVX-512 and for AVX2 without VNNI, which this processor runs too when a copy of the library is told that
VNNI is missing (a changed comparison in the copy, Linux on x64 with AVX-512 and VNNI only); and on an emulated Haswell
(`qemu-x86_64` of Debian's `qemu-user`). A column that this machine cannot fill is `–`. Models have trained weights
(`cnn`, `mobilenet`, `vit`, MiniLM) or seeded random ones (torchvision's, and timm's EfficientFormer where it is
installed). SQNR is that of the first output on data that was not calibrated on, against the float model. `--write`
updates the rows of these models and files in `results/processors.md`; what exactness costs is measured with all files.
`--suite` types the README's two commands, the second of which runs all tests, into a fresh environment with the kernels
for AVX2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import torchvision
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import environment, estimate_batch_norm, images, publish, rows_of, sqnr, table, text_of
from benchmarks.models import perturb
from quark_fx.config.quant_config import QuantConfig, Target
from quark_fx.export.runtime import verification
from quark_fx.export.runtime.runners import OnnxRuntimeRunner
from quark_fx.graph.signature import split_batch
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, XINT8
from quark_fx.system.processor import this_processor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge
from networks import NETWORKS, trained
from processors import EMULATOR

ROOT = Path(__file__).resolve().parent.parent

Made = tuple[nn.Module, list[Any], Any]
"""A model, calibration batches, and the batch that is judged."""

assert INT8_STATIC.weight is not None
_STATIC_VNNI, _DYNAMIC_VNNI = (config.replace(target=Target.ONNX_VNNI) for config in (INT8_STATIC, INT8_DYNAMIC))
REDUCED = _STATIC_VNNI.replace(weight=INT8_STATIC.weight.replace(reduce_range=True))
UNSIGNED = INT8_STATIC.replace(weight=INT8_STATIC.weight.replace(format="uint8", symmetry="symmetric"))

FILES: dict[str, tuple[QuantConfig, dict[str, Any]]] = {
    "int8_static": (INT8_STATIC, {}),
    "int8_static, qoperator": (INT8_STATIC, {"format": "qoperator"}),
    "int8_dynamic": (INT8_DYNAMIC, {}),
    "xint8": (XINT8, {}),
    "int8_static, all codes": (_STATIC_VNNI, {}),
    "int8_dynamic, all codes": (_DYNAMIC_VNNI, {}),
}
"""What is run on every processor; `all codes` is `target="onnx_vnni"`."""

WEIGHTS: dict[str, QuantConfig] = {
    "all codes": _STATIC_VNNI,
    "default": INT8_STATIC,
    "reduce_range": REDUCED,
    "uint8 weights": UNSIGNED,
}
"""What int8_static can do about pairs."""


def digits(name: str) -> Made:
    """Return a network trained on scikit-learn's digits."""
    network = trained(name)
    return network.model, network.calibration, network.images[:64]


def encoder() -> Made:
    """Return the sentence encoder all-MiniLM-L6-v2."""
    model, tokenizer = judge.encoder()
    calibration, held_out = (judge.token_batches(tokenizer, s) for s in (sentences.CALIBRATION, sentences.HELD_OUT))
    return model, calibration, held_out[0]


def vision(name: str) -> Made:
    """Return a torchvision or timm classifier with seeded weights and statistics of its data."""
    torch.manual_seed(0)
    if name.startswith("efficientformer"):
        import timm  # type: ignore[import-not-found]

        model, size = timm.create_model(name, pretrained=False), 224
    else:
        model, size = getattr(torchvision.models, name)(), 96
    perturb(model)
    batches = images(12, 4, size, seed=1)
    estimate_batch_norm(model, batches[:2])
    return model.eval(), batches[:2], batches[2]


MODELS: dict[str, Callable[[], Made]] = {
    **{name: lambda name=name: digits(name) for name in NETWORKS},  # type: ignore[misc]
    "minilm": encoder,
    **{
        name: lambda name=name: vision(name)  # type: ignore[misc]
        for name in ("squeezenet1_1", "shufflenet_v2_x1_0", "resnet18", "efficientformer_l1")
    },
}


@dataclass(frozen=True)
class Processor:
    """How a file is run.

    Attributes:
        name: for the page.
        command: what comes before the interpreter.
        library: folder of the onnxruntime to import, `None` for the installed one.
    """

    name: str
    command: tuple[str, ...] = ()
    library: Path | None = None

    def run(self, script: str, *arguments: str) -> str:
        """Run a script of this project in a process of its own; return what it prints."""
        path = os.pathsep.join(str(p) for p in (self.library, ROOT) if p is not None)
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        command = [*self.command, sys.executable, script, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        return done.stdout

    def outputs(self, file: Path, feeds: Mapping[str, Any]) -> list[Any]:
        """Return what ONNX Runtime computes of a file."""
        with tempfile.TemporaryDirectory() as folder:
            np.savez(Path(folder, "0.npz"), **feeds)
            self.run(str(ROOT / "tests" / "run_files.py"), folder, str(file.resolve()))
            with np.load(Path(folder, "0.out.npz")) as arrays:
                return [arrays[name] for name in arrays.files]


HERE = Processor("as it is")


@cache
def processors(folder: Path) -> dict[str, Processor | None]:
    """Return the ways to run a file, by column."""
    return {
        "this processor": HERE,
        "AVX-512, no VNNI": _without(folder / "avx512"),
        "AVX2": _without(folder / "avx2", avx512=True),
        "Haswell, emulated": Processor("Haswell", (EMULATOR, "-cpu", "Haswell")) if EMULATOR else None,
    }


_AVX512_CORE = re.compile(rb"\x81[\xe0-\xe7](\x00\x00\x02\xc0)")
"""`and register, 0xC0020000`: the features of AVX-512 that integer kernels need."""
_VNNI = re.compile(rb"\x81[\xe0-\xe7](\x00\x08\x00\x00)")
"""`and register, 0x800`: AVX-512 VNNI, asked soon after those."""
_LIBRARY = "capi/onnxruntime_pybind11_state*.so"
_SATURATES = "from quark_fx.export.runtime.session import *; print(adds_pairs_in_16_bits())"


def _without(folder: Path, *, avx512: bool = False) -> Processor | None:
    """Return a processor whose copy of ONNX Runtime finds no VNNI (and no integer AVX-512), `None` if there is none."""
    source = Path(onnxruntime.__file__).parent
    if not list(source.glob(_LIBRARY)) or "avx512_vnni" not in this_processor()[1]:
        return None
    shutil.copytree(source, folder / "onnxruntime")
    _forget(folder / "onnxruntime", avx512=avx512)
    made = Processor(folder.name, library=folder)
    return made if made.run("-c", _SATURATES).strip() == "True" else None


def _forget(package: Path, *, avx512: bool) -> None:
    """Change the comparisons of a copy of onnxruntime, so that it finds no VNNI, and no integer AVX-512 if asked to."""
    for library in package.glob(_LIBRARY):
        code = bytearray(library.read_bytes())
        for core in _AVX512_CORE.finditer(bytes(code)):
            near = bytes(code[core.end() : core.end() + 400])
            places = [core.end() + found.start(1) for found in _VNNI.finditer(near)]
            for place in [*places, *([core.start(1)] if avx512 else [])]:
                code[place : place + 4] = bytes(4)
        library.unlink()  # pip may have linked it to its cache
        library.write_bytes(code)


class Elsewhere(OnnxRuntimeRunner):
    """A file that runs on another processor."""

    def __init__(self, file: Path, processor: Processor, options: Any, optimize: bool | None) -> None:
        super().__init__(file, options, optimize=optimize)
        self.processor = processor

    def run_arrays(self, feed: Mapping[str, Any]) -> list[Any]:
        return self.processor.outputs(self.path, feed)


@contextmanager
def verified_on(processor: Processor, folder: Path) -> Iterator[None]:
    """Let `verify` run files on another processor."""
    import onnx_ir as ir

    from quark_fx.vendors.amd.vitis import with_standard_nodes

    count = itertools.count()

    def opened(
        path: Path,
        options: Any = None,
        *,
        optimize: bool | None = None,
        edit: Callable[[ir.Model], None] | None = None,
    ) -> Elsewhere:
        model = ir.load(path)
        if edit is not None:
            edit(model)
        file = folder / f"elsewhere{next(count)}.onnx"
        ir.save(with_standard_nodes(model), file)
        return Elsewhere(file, processor, options, optimize)

    original = getattr(verification, "OnnxRuntimeRunner")  # noqa: B009
    setattr(verification, "OnnxRuntimeRunner", opened)  # noqa: B010
    try:
        yield
    finally:
        setattr(verification, "OnnxRuntimeRunner", original)  # noqa: B010


def leading(value: Any) -> Tensor:
    """Return the first tensor of an output."""
    leaves = torch.utils._pytree.tree_leaves(value)
    return next(leaf for leaf in leaves if isinstance(leaf, Tensor))


def called(model: Any, batch: Any) -> Tensor:
    """Return the first output of a model."""
    with torch.no_grad():
        return leading(model(**batch) if isinstance(batch, Mapping) else model(batch))


def exactness(name: str, folder: Path, kinds: Collection[str]) -> list[list[object]]:
    """Return a row for every file of a model: SQNR in torch and on each processor, and steps one by one."""
    model, calibration, batch = MODELS[name]()
    expected = called(model, batch)
    rows: list[list[object]] = []
    for kind, (config, options) in ((kind, made) for kind, made in FILES.items() if kind in kinds):
        qmodel = qfx.quantize(model, config, calibration, progress=False)
        file = folder / "model.onnx"
        try:
            written = qfx.export.onnx(qmodel, file, **options)
        except qfx.QuarkError as error:
            rows.append([name, kind, f"– ({str(error).splitlines()[0][:60]})", *["–"] * 6])
            continue
        leaves = qmodel.signature.flatten(*split_batch(batch))
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        feeds = {i.name: leaf.numpy() for i, leaf in zip(session.get_inputs(), leaves, strict=True)}
        row: list[object] = [name, kind, f"{sqnr(expected, called(qmodel, batch)):.2f}"]
        steps = "–"
        for processor in processors(folder).values():
            row.append(
                "–"
                if processor is None
                else f"{sqnr(expected, torch.from_numpy(processor.outputs(file, feeds)[0])):.2f}"
            )
        there = processors(folder)["Haswell, emulated"] or processors(folder)["AVX2"]
        if there is not None:
            with verified_on(there, folder):
                steps = f"{qfx.verify(qmodel, file, [batch], per_node=True).max_steps:.2f}"
        report = written.report()
        row += [steps, f"{len(report.nodes) - len(report.saturating)} of {len(report.nodes)}"]
        rows.append(row)
        print(*row, flush=True)
    return rows


def cost(name: str, folder: Path, rounds: int) -> list[list[object]]:
    """Return a row for every way to keep int8_static exact: SQNR of weights and output, and time over all codes."""
    model, calibration, batch = MODELS[name]()
    expected, files, rows = called(model, batch), {}, {}
    for kind, config in WEIGHTS.items():
        qmodel = qfx.quantize(model, config, calibration, progress=False)
        files[kind] = qfx.export.onnx(qmodel, folder / f"{kind}.onnx")
        weights = [row.sqnr for row in qmodel.report() if not row.reason and row.sqnr is not None]
        rows[kind] = [f"{statistics.mean(weights):.2f}", f"{sqnr(expected, called(qmodel, batch)):.2f}"]
    one = batch[:1] if isinstance(batch, Tensor) else {key: value[:1] for key, value in batch.items()}
    leaves = qmodel.signature.flatten(*split_batch(one))
    torch.save([leaf for leaf in leaves if isinstance(leaf, Tensor)], folder / "inputs.pt")
    for column, processor in processors(folder).items():
        if processor is None or processor.command:
            for row in rows.values():
                row += ["–"] if processor is None and not column.startswith("Haswell") else []
            continue
        given = [str(rounds), str(folder / "inputs.pt"), *(f"{k}={v}" for k, v in files.items())]
        times = json.loads(processor.run("-m", "benchmarks.processors", "--child", *given).splitlines()[-1])
        for kind, row in rows.items():
            ratios = [a / b for a, b in zip(times[kind], times["all codes"], strict=True)]
            row.append(f"{statistics.median(ratios):.2f}")
    made: list[list[object]] = [[name, kind, *row] for kind, row in rows.items()]
    for line in made:
        print(*line, flush=True)
    return made


def suite(folder: Path) -> int:
    """Type the README's commands into a clone of this checkout's last commit, on kernels for AVX2 without VNNI.

    Each command ends with a script. Before that, the ONNX Runtime that the command installed is changed as above.

    Returns:
        The number of commands that failed.

    Raises:
        RuntimeError: if ONNX Runtime still finds VNNI.
    """
    checkout, failed = folder / "checkout", 0
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in re.findall(r"^python3 -m venv .*", (checkout / "README.md").read_text(), re.MULTILINE):
        install, _, script = command.rpartition(" && ")
        print("+", install, flush=True)
        subprocess.run(["bash", "-c", install], cwd=checkout, env=environment, check=True, stdout=subprocess.DEVNULL)
        for package in checkout.glob(".venv/lib/python*/site-packages/onnxruntime"):
            _forget(package, avx512=True)
        check = [str(checkout / ".venv/bin/python"), "-c", _SATURATES]
        if (
            subprocess.run(check, cwd=checkout, env=environment, capture_output=True, text=True).stdout.strip()
            != "True"
        ):
            raise RuntimeError("ONNX Runtime still finds VNNI here; --suite needs Linux on x64")
        print("+", script, flush=True)
        failed += subprocess.run(["bash", "-c", script], cwd=checkout, env=environment).returncode != 0
    return failed


def child(rounds: str, inputs: str, *files: str) -> None:
    """Print the latencies of files, by name, on whatever ONNX Runtime this process has."""
    from benchmarks.onnx_sessions import latencies

    paths = {name: Path(path) for name, _, path in (file.partition("=") for file in files)}
    print(json.dumps(latencies(paths, torch.load(inputs), 1, int(rounds))))


def with_rows_of_others(rows: list[list[object]], columns: int) -> list[list[object]]:
    """Return rows and those that the page has, in a table of that many columns, of what was not measured."""
    measured, earlier = {(row[0], row[1]) for row in rows}, rows_of(text_of("processors.md"))
    kept: list[list[object]] = [
        [*row] for row in earlier if len(row) == columns and row[0] in MODELS and (row[0], row[1]) not in measured
    ]
    kinds = [*FILES, *WEIGHTS]
    return sorted([*kept, *rows], key=lambda row: (list(MODELS).index(str(row[0])), kinds.index(str(row[1]))))


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--files", nargs="*", default=list(FILES), choices=list(FILES), metavar="FILE")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--write", action="store_true", help="update results/processors.md")
    parser.add_argument("--suite", action="store_true", help="run the README's commands on kernels for AVX2 instead")
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(*arguments.child)
    if arguments.suite:
        with tempfile.TemporaryDirectory() as made:
            sys.exit(suite(Path(made)))
    warnings.simplefilter("ignore", UserWarning)
    exact: list[list[object]] = []
    costs: list[list[object]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in arguments.models:
            exact += exactness(name, folder, arguments.files)
            costs += cost(name, folder, arguments.rounds) if len(arguments.files) == len(FILES) else []
        columns = list(processors(folder))
    header = ("model", "file", "torch", *columns, "steps, one by one", "nodes exact by their codes")
    timed = [f"time, {column}" for column in columns[:3]]
    cost_header = ("model", "weights of int8_static", "SQNR of weights", "SQNR of output", *timed)
    if arguments.write:
        exact, costs = with_rows_of_others(exact, len(header)), with_rows_of_others(costs, len(cost_header))
    page = f"""# Processors

{EXPLANATION}

{table(header, exact)}

## What it costs

`all codes` is `int8_static` with `target="onnx_vnni"`, the codes before pairs were limited. SQNR in dB: mean of the
weights, and of the output in torch. Time is that of one sample on one thread over `all codes`, the files in turn.

{table(cost_header, costs)}

{environment()}
"""
    publish(page, "processors.md" if arguments.write else None)
    return None


EXPLANATION = """SQNR in dB of a held-out output against the float model: in torch, and of the same file in ONNX
Runtime on kernels with VNNI (this processor), without it on AVX-512 and AVX2, and on an emulated Haswell.
`steps, one by one` is the largest difference of any quantized value that torch computes from the same codes
(`verify(per_node=True)` with ONNX Runtime on the emulated Haswell). For `int8_dynamic` it is that of the outputs, as
kernels keep the codes they measure to themselves: a value between two codes that is rounded the other way moves what
follows, with VNNI as well. `xint8` is made for a DPU and its codes are not limited. `all codes`
(`target="onnx_vnni"`) shows what x64 processors without VNNI do to such codes. Reproduce with
`python -m benchmarks.processors`."""


if __name__ == "__main__":
    main()
