"""Measure quark_fx on a GPU within five minutes, most important steps first.

    PYTHONPATH=. python -m benchmarks.on_gpu [--results on_gpu.jsonl] [--seconds 290] [--only STEP ...] [--write]

It needs the repository, torch, transformers, safetensors, numpy, tqdm and pyyaml, no network and no files of models:
all weights are random. Device tests need pytest and hypothesis, installed or as wheels in the folder `wheels`, 3 MB in
all: `pip download -d wheels pytest hypothesis`, with the version of Python of the machine.

Each step runs in a worker process under a time limit and appends one line of JSON to the results file at once. A step
that fails says why, and the next one runs. A worker that hangs or crashes is replaced; the results of its step so far
are kept. Another call with the same file runs the steps that are missing, then those that failed; those that were cut
off get twice the time. `--write` makes `results/on_gpu.md` of the file.

`--device pretend --small` runs everything on the pretend GPU of the tests, `--device cpu --small` on the CPU. Times on
two blocks of an 8B shape are extrapolated to its 32 blocks by the last one, and marked so. The page begins with the
goals, and what of them was met.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "benchmarks" / "results" / "on_gpu.md"

WHEELS = ROOT / "wheels"
INSTALLED = WHEELS / "installed"
"""Wheels for a machine without network, and the packages installed from them."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights.

    Attributes:
        name: Name of the whole model.
        hidden, intermediate, heads, key_value_heads, vocabulary: its sizes.
        layers: Number of layers that are measured.
        of: layers of the whole model.
        samples, tokens: Sizes of the calibration data.
        batch: samples of a batch.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    vocabulary: int
    layers: int
    of: int
    samples: int
    tokens: int
    batch: int = 4

    def model(self, device: str, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
        """Return the model in eval mode, made on the device."""
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=self.tokens,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device if device == "cuda" else "cpu"):
                model: nn.Module = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
        return model.to(device)

    def goal_gib(self) -> float:
        """Return the memory of the measured layers, of inputs and outputs of one, and of its Hessians.

        Values are in bfloat16, in float and quantized; operators that read one value share a Hessian.
        """
        head = self.hidden // self.heads
        attention = self.hidden * head * 2 * (self.heads + self.key_value_heads)
        weights = 2 * self.layers * (attention + 3 * self.hidden * self.intermediate)
        values = 2 * 2 * 2 * self.samples * self.tokens * self.hidden
        hessians = 4 * (2 * self.hidden**2 + (self.heads * head) ** 2 + self.intermediate**2)
        return (weights + values + hessians) / 2**30

    def batches(self, device: str = "cpu") -> list[dict[str, Tensor]]:
        """Return seeded token batches."""
        generator = torch.Generator().manual_seed(1)
        drawn = torch.randint(0, self.vocabulary, (self.samples, self.tokens), generator=generator)
        return [{"input_ids": part.to(device)} for part in drawn.split(self.batch)]


TINY = Shape("tiny", 32, 64, 2, 1, 64, 2, 2, 8, 16, 2)
SMALL = Shape("small", 512, 1024, 8, 4, 1024, 2, 2, 16, 128)
ONE = Shape("1B", 2048, 8192, 32, 8, 32000, 4, 16, 64, 512)
EIGHT = Shape("8B", 4096, 14336, 32, 8, 32000, 2, 32, 128, 2048)


@dataclass(frozen=True)
class Place:
    """A place where a worker measures.

    Attributes:
        device: name of the device.
        small: measure tiny shapes, for tests of this script.
        note: Function that writes the results of a step so far, in case it is cut off.
    """

    device: str
    small: bool
    note: Callable[[Result], None] = lambda found: None

    def of(self, shape: Shape) -> Shape:
        """Return a shape, or the tiny one under its name."""
        return replace(TINY, name=shape.name, layers=1, samples=4) if self.small else shape

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


class Measure:
    """Seconds, peak device memory, and the share of time that the GPU was busy, of a run over layers of one shape.

    Args:
        place: Place of the run.
        shape: Shape with the layers.

    Attributes:
        result: Measurements; the peak is of the whole run, the rest of the passes alone.
    """

    def __init__(self, place: Place, shape: Shape) -> None:
        self.place, self.shape, self.result = place, shape, Result()
        self._by_layer: dict[int, float] = {}
        self._in_turns = 0.0
        self._sampler: Sampler | None = None

    def __enter__(self) -> Measure:
        if self.place.device == "cuda":
            gc.collect()  # graphs of earlier steps are cycles
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._sampler = Sampler.of_gpu()
        return self

    def __exit__(self, *raised: object) -> None:
        if self._sampler is not None:
            self._sampler.stop()
        self.result |= self._peak()

    def _peak(self) -> Result:
        cuda = self.place.device == "cuda"
        return {"peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 3)} if cuda else {}

    @contextlib.contextmanager
    def solving(self) -> Iterator[None]:
        """Measure the block under `with`."""
        self.place.synchronize()
        began = time.perf_counter()
        yield
        self.place.synchronize()
        ended = time.perf_counter()
        if self._sampler is not None:
            self.result["GPU busy"] = self._sampler.share(began, ended)
        seconds, shape = ended - began, self.shape
        layer = self._by_layer.get(shape.layers - 1, 0.0) + (seconds - self._in_turns) / shape.layers
        self.result |= {
            "layers": shape.layers,
            "of layers": shape.of,
            "tokens": shape.samples * shape.tokens,
            "seconds": round(seconds, 3),
            "seconds by layer": self._rounded(),
            "seconds of all layers (extrapolated)": round(seconds + (shape.of - shape.layers) * layer, 1),
        }

    def turns(self, items: Iterable[Any], layer_of: Callable[[Any], int | None]) -> Iterator[Any]:
        """Yield blocks, and add the time of each turn to its layer; `None` stands for operators outside of the layers.

        A whole model is extrapolated by the last layer, since the first one compiles kernels.
        """
        for item in items:
            began = time.perf_counter()
            yield item
            self.place.synchronize()
            seconds, layer = time.perf_counter() - began, layer_of(item)
            self._in_turns += seconds
            if layer is not None:
                self._by_layer[layer] = self._by_layer.get(layer, 0.0) + seconds
            self.place.note({"seconds by layer": self._rounded(), **self._peak()})

    def _rounded(self) -> dict[str, float]:
        return {str(layer): round(seconds, 3) for layer, seconds in self._by_layer.items()}

    @contextlib.contextmanager
    def of_passes(self) -> Iterator[None]:
        """Measure the passes of `quantize`, without the capture of the model before them."""
        from quark_fx import quantization
        from quark_fx.engine import block_walk

        run = quantization._transformed

        def measured(*args: Any) -> Any:
            with self.solving():
                return run(*args)

        def turns(blocks: Any, **_: Any) -> Iterator[Any]:
            return self.turns(blocks, layer_of)

        with patch.object(quantization, "_transformed", measured), patch.object(block_walk, "tqdm", turns):
            yield


def layer_of(block: Any) -> int | None:
    """Return the layer of a Llama that a block is a part of: each has seven products."""
    numbers = (re.fullmatch(r"linear(?:_(\d+))?", name) for name in block.operators)
    return next((int(number[1] or 0) // 7 for number in numbers if number), None)


class Sampler:
    """A process that prints how busy a GPU is, in percent, several times a second.

    Args:
        command: Command of the process.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._samples: list[tuple[float, float]] = []
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._begun = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._begun.wait(5)

    @classmethod
    def of_gpu(cls) -> Sampler | None:
        """Return the one for the GPU of this process, `None` without `nvidia-smi`."""
        gpu = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        asked = ("--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100")
        try:
            return cls(["nvidia-smi", "-i", gpu, *asked])
        except OSError:
            return None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                self._samples.append((time.perf_counter(), float(line)))
                self._begun.set()
        self._begun.set()

    def share(self, began: float, ended: float) -> float | None:
        """Return the mean share of time that a kernel ran, `None` without samples."""
        shares = [busy for when, busy in self._samples if began <= when <= ended]
        return round(sum(shares) / len(shares) / 100, 3) if shares else None

    def stop(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()
        self._reader.join(2)


def codes_of(qmodel: Any) -> dict[str, Tensor]:
    """Return the tensors of codes of a quantized model, integers and bytes of 8-bit floats, on the host."""
    stored: dict[str, Tensor] = qmodel.graph_module.state_dict()
    stored = {name: t.cpu().view(torch.uint8) if t.element_size() == 1 else t.cpu() for name, t in stored.items()}
    return {name: t for name, t in stored.items() if not t.is_floating_point() and t.numel() > 1}


def errors_of(qmodel: Any) -> list[float]:
    """Return the errors after each change that the passes report."""
    return [c.after for record in qmodel.report().passes for c in record.changes if c.after is not None]


def quantized(model: Any, config: Any, batches: Any = None, device: str | None = None) -> Any:
    """Quantize a model, or a session with its batches, without a progress bar and warnings, except of waits."""
    import quark_fx as qfx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", message=_WAIT)
        return qfx.quantize(model, config, batches, resources=qfx.Resources(device=device), progress=False)


_WAIT = ".*synchronizing CUDA operation"
"""Message of a warning of `torch.cuda.set_sync_debug_mode`."""


def solver_config(name: str, place: Place) -> Any:
    """Return the configuration of an algorithm: a preset, or int4 in groups with the pass of that name."""
    from quark_fx import passes
    from quark_fx.presets import PRESETS

    if name in PRESETS:
        return PRESETS[name]
    steps = {"iterations": 4} if place.small else {}
    return PRESETS["w4a16_gptq"].replace(passes=(getattr(passes, name)(**steps),))


# --- the steps -------------------------------------------------------------------------------------------------------


def step_device(place: Place) -> Result:
    """Name the device and the versions; measure the rates of a copy and a product."""
    import transformers

    outcome: Result = {"python": platform.python_version(), "torch": torch.__version__, "cpu threads": os.cpu_count()}
    outcome["transformers"] = transformers.__version__
    with contextlib.suppress(ImportError):
        import triton

        outcome["triton"] = triton.__version__
    if place.device != "cuda":
        return {**outcome, "device": place.device}
    properties = torch.cuda.get_device_properties(0)
    outcome |= {
        "device": properties.name,
        "capability": f"sm{properties.major}{properties.minor}",
        "GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    outcome["copy TB/s"] = round(2 * a.numel() / median_seconds(lambda: b.copy_(a)) / 1e12, 2)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    outcome["bf16 product TFLOP/s"] = round(2 * 8192**3 / median_seconds(lambda: x @ x) / 1e12)
    y = torch.randn(4096, 4096, device="cuda")
    outcome["float32 product TFLOP/s"] = round(2 * 4096**3 / median_seconds(lambda: y @ y) / 1e12, 1)
    return outcome


def median_seconds(function: Callable[[], object], rounds: int = 10) -> float:
    """Return the median time of a call, by device events, after two that are not counted."""
    times = []
    for _ in range(rounds + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return float(sorted(times[2:])[rounds // 2])


def step_codes(place: Place, names: Sequence[str] = ("w4a16_gptq",)) -> Result:
    """Compare the codes and errors of presets on the device with those on the CPU."""
    outcome: Result = {}
    shape = place.of(SMALL)
    model, batches = shape.model("cpu", torch.float32), shape.batches()
    for name in names:
        try:
            on_cpu, on_accelerator = quantized(model, name, batches), quantized(model, name, batches, place.device)
            ours, theirs = codes_of(on_cpu), codes_of(on_accelerator)
            same = sum(int((ours[n] == theirs[n]).sum()) for n in ours)
            count = sum(t.numel() for t in ours.values())
            pairs = zip(errors_of(on_cpu), errors_of(on_accelerator), strict=True)
            gap = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)
            outcome[name] = {"same codes": same / max(1, count), "largest relative gap of an error": gap}
        except Exception as error:
            outcome[name] = said(error)
    return outcome


DEVICE_TESTS = (
    *("solvers/test_error_feedback.py", "solvers/test_rounding.py", "solvers/test_group_feedback.py"),
    *("passes/test_gptq.py", "engine/test_activation_cache.py", "engine/test_block_walk.py"),
    *("passes/test_smooth_quant.py", "passes/test_hqq.py", "numbers/test_qparams.py", "numbers/test_ops.py"),
    *("numbers/test_float_grids.py", "passes/test_autoround.py", "passes/test_bias_correction.py"),
    *("engine/test_resume.py", "plan/test_convert.py", "model/test_qat.py", "model/test_gpu_kernels.py"),
)
"""Test files in order of importance. They import nothing that a bare machine lacks."""

SMALL_TESTS = ("numbers/test_qparams.py",)
"""What `--small` runs of these; `tests/test_pretend_gpu.py` runs others on the pretend GPU."""


def step_tests(place: Place) -> Result:
    """Run the device tests of the repository."""
    install_from_wheels("pytest", "hypothesis")
    files = SMALL_TESTS if place.small else DEVICE_TESTS
    # Not `-v`: the `-q` in pyproject.toml cancels it, and the names of tests are read below.
    command = [sys.executable, "-m", "pytest", "--verbosity=1", "-p", "no:cacheprovider", "--tb=line"]
    command += ["-k", place.device]
    if place.device == "pretend":
        command += ["-p", "pretend_gpu"]
    paths = [str(ROOT / "tests" / file) for file in files]
    known = filter(None, (str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH"), str(INSTALLED)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(known)}
    process = subprocess.Popen(
        [*command, *paths], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    passed, failed, lines = 0, list[str](), list[str]()
    for line in map(str.strip, process.stdout):
        lines.append(line)
        passed += " PASSED" in line
        if re.search(" (FAILED|ERROR)", line):
            failed.append(line)
        if failed[-1:] == [line] or (" PASSED" in line and passed % 20 == 0):
            place.note({"passed": passed, "failed": failed[:40]})
    outcome: Result = {"passed": passed, "failed": failed[:40]}
    if process.wait() or not passed:
        outcome["error"] = f"pytest ended with {process.returncode}: {' | '.join(lines[-3:])}"
    return outcome


def install_from_wheels(*names: str) -> None:
    """Install packages into a separate folder, unless Python has them.

    Raises:
        ModuleNotFoundError: If no wheels exist for this platform.
    """
    if all(importlib.util.find_spec(name) for name in names):
        return
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--find-links", str(WHEELS)]
    done = subprocess.run(
        [*command, "--upgrade", "--target", str(INSTALLED), *names], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ModuleNotFoundError(f"{' and '.join(names)} are not installed, nor in {WHEELS}: {done.stderr[-300:]}")


def step_syncs(place: Place) -> Result:
    """Forbid waits in calibration and in a forward pass; count the waits of whole runs by line.

    A copy that the host waits for counts, too: to or from pageable memory, unless it does not block.
    """
    if place.device == "cpu":
        return {"skipped": "torch.cuda.set_sync_debug_mode needs CUDA"}
    from quark_fx import Session, session

    counted = waits_of(place, lambda: torch.ones(2, device=place.device)[0].item())
    if counted["waits and blocking copies"] != 1:
        raise RuntimeError(f"one .item() counts as {counted}")
    outcome: Result = {}
    shape = place.of(SMALL)
    model, on_device = shape.model(place.device, torch.float32), shape.batches(place.device)
    calibration = importlib.import_module("quark_fx.passes.calibrate")  # `passes.calibrate` is the pass in it
    run, flat, captured = calibration.run_batches, session.flat_batches, Session(model, on_device)

    def checked(*args: Any) -> Iterator[Any]:
        return iter(list(flat(*args)))  # `quantize` reads each batch on the host, to check its indices

    def strict(*args: Any, **kwargs: Any) -> None:
        with sync_mode(place, "error"):
            run(*args, **kwargs)

    try:
        with patch.object(calibration, "run_batches", strict), patch.object(session, "flat_batches", checked):
            qmodel = quantized(captured, "int8_static")
        outcome["calibration"] = "no wait"
    except Exception as error:
        outcome["calibration"] = said(error)
        qmodel = quantized(captured, "int8_static")
    for name, run_model in (("int8_static", qmodel), ("w4a4_dynamic", quantized(captured, "w4a4_dynamic"))):
        try:
            with torch.no_grad(), sync_mode(place, "error"):
                run_model(**on_device[0])
            outcome[f"forward {name}"] = "no wait"
        except Exception as error:
            outcome[f"forward {name}"] = said(error)
    for name in ("w4a16_gptq", "w4a16_awq")[: 1 if place.small else 2]:
        outcome[name] = waits_of(place, partial(quantized, model, name, on_device))
    return outcome


@contextlib.contextmanager
def sync_mode(place: Place, mode: str) -> Iterator[None]:
    """Let the device raise (`"error"`), or warn (`"warn"`), when the host waits."""
    if place.device == "pretend":
        from pretend_gpu import PretendGPU

        with patch.object(PretendGPU.now(), "sync_debug_mode", mode):
            yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of(place: Place, function: Callable[[], object]) -> Result:
    """Count the warnings of waits by the line of the package that caused them."""
    counts: Counter[str] = Counter()
    package = str(ROOT / "quark_fx")

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if re.match(_WAIT, str(message)):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(package):
                frame = frame.f_back
            counts[f"{frame.f_code.co_filename[len(package) + 1 :]}:{frame.f_lineno}" if frame else "outside"] += 1

    with sync_mode(place, "warn"), warnings.catch_warnings():
        warnings.simplefilter("always")
        setattr(warnings, "showwarning", note)  # noqa: B010
        function()
    return {"waits and blocking copies": counts.total(), "by line": dict(counts.most_common(8))}


def step_triton(place: Place) -> Result:
    """Compare the Triton kernel of error feedback with the loop in torch, and time both."""
    if place.device != "cuda":
        return {"skipped": "Triton compiles for GPUs; tests run the kernel in its interpreter"}
    from quark_fx.numbers.formats import FP4_E2M1, INT4
    from quark_fx.numbers.grid import Grid
    from quark_fx.solvers import error_feedback, error_feedback_kernel

    outcome: Result = {}
    torch.manual_seed(0)
    size = 4096
    weight = torch.randn(1, size, size, device="cuda")
    x = torch.randn(2 * size, size, device="cuda")
    factor = error_feedback.factor((x.T @ x)[None], damping=0.01, by_activation=True)
    for name, fmt in (("int4", INT4), ("fp4", FP4_E2M1)):
        try:
            scale = (weight.abs().amax(-1, keepdim=True) / (7.0 if name == "int4" else 6.0)).float()
            grid = grid_for(Grid, fmt, scale)
            rounded = partial(error_feedback.gptq_round, weight, factor, grid)
            kernel = rounded()
            runs = error_feedback._block_function
            error_feedback._block_function = lambda like, grid: (error_feedback.quantize_block, error_feedback._BLOCK)
            try:
                loop, loop_seconds = rounded(), median_seconds(rounded, 3)
            finally:
                error_feedback._block_function = runs
            seconds = median_seconds(rounded, 3)
            same = float((kernel == loop).double().mean())
            outcome[name] = {"same codes": same, "kernel seconds": seconds, "loop seconds": loop_seconds}
        except Exception as error:
            outcome[name] = said(error)
    outcome["columns"] = error_feedback_kernel.COLUMNS
    return outcome


def grid_for(grid: Any, fmt: Any, scale: Tensor) -> Any:
    """Return a grid of codes around zero."""
    from quark_fx.numbers.formats import FloatFormat

    if isinstance(fmt, FloatFormat):
        return grid(scale, torch.zeros_like(scale), (-fmt.max, fmt.max), None, fmt)
    return grid(scale, torch.zeros_like(scale), (fmt.qmin, fmt.qmax))


def algorithm_step(name: str, shape: Shape) -> Callable[[Place], Result]:
    """Return the step that quantizes a shape with an algorithm."""

    def step(place: Place) -> Result:
        chosen = place.of(shape)
        model, batches = chosen.model(place.device), chosen.batches(place.device)
        with Measure(place, chosen) as measure, measure.of_passes():
            qmodel = quantized(model, solver_config(name, place), batches)
        result, report, errors = measure.result, qmodel.report(), errors_of(qmodel)
        if "peak GiB" in result:
            result["peak GiB of two blocks"] = round(result["peak GiB"] - gib_beside_blocks(model), 3)
            result["goal GiB of two blocks"] = round(chosen.goal_gib(), 3)
        by_pass = {record.name: round(record.seconds, 3) for record in report.passes if record.seconds > 0.05}
        return result | {"seconds by pass": by_pass, "mean error": sum(errors) / len(errors) if errors else None}

    return step


def gib_beside_blocks(model: Any) -> float:
    """Return the memory of the embedding, the head, and the last norm."""
    blocks = {id(p) for p in model.model.layers.parameters()}
    return float(sum(p.nbytes for p in model.parameters() if id(p) not in blocks) / 2**30)


def step_plain_gptq(place: Place) -> Result:
    """Run the textbook GPTQ on the same two blocks as the baseline, and measure its error on the same samples."""
    shape = place.of(EIGHT)
    model, batches = shape.model(place.device), shape.batches(place.device)
    with Measure(place, shape) as measure, measure.solving(), torch.no_grad():
        errors = plain_gptq(model, batches, measure)
    return measure.result | {"mean error": sum(errors) / len(errors)}


def plain_gptq(model: Any, batches: list[dict[str, Tensor]], measure: Measure) -> list[float]:
    """Round all linear layers of the blocks to int4 in groups of 128; return the relative error of each output.

    As in `quantize`, the last eighth of the batches is validation data: errors are measured on it alone.

    Source:
        Frantar et al. 2023 (GPTQ), algorithm 1, as its authors' code: one pass over the data per block, activation
        order off, blocks of 128 columns.
    """
    states: list[tuple[Tensor, Any]] = []
    errors: list[float] = []
    layers = model.model.layers

    def catch(module: Any, args: Any, kwargs: Any) -> None:
        states.append((args[0] if args else kwargs.pop("hidden_states"), kwargs))
        raise StopIteration

    handle = layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    for batch in batches:
        with contextlib.suppress(StopIteration):
            model(**batch, use_cache=False)
    handle.remove()
    learned = len(batches) - max(1, len(batches) // 8)
    for _, layer in measure.turns(enumerate(layers), lambda item: int(item[0])):
        linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        calibration, judge = (hessians(layer, linears, part) for part in (states[:learned], states[learned:]))
        errors += [plain_round(m, calibration.pop(m), judge.pop(m)) for m in linears]
        states = [(out[0] if isinstance(out := layer(x, **kwargs), tuple) else out, kwargs) for x, kwargs in states]
    return errors


def hessians(layer: Any, linears: list[nn.Linear], states: Sequence[tuple[Tensor, Any]]) -> dict[nn.Linear, Tensor]:
    """Return the sums of `x x'` over inputs of linear layers."""
    moments = {m: torch.zeros(m.in_features, m.in_features, device=m.weight.device) for m in linears}

    def add(module: Any, args: Any) -> None:
        x = args[0].reshape(-1, args[0].shape[-1]).float()
        moments[module].addmm_(x.T, x)

    handles = [m.register_forward_pre_hook(add) for m in linears]
    for x, kwargs in states:
        layer(x, **kwargs)
    for handle in handles:
        handle.remove()
    return moments


def plain_round(module: nn.Linear, h: Tensor, judge: Tensor, group: int = 128, block: int = 128) -> float:
    """Round the weight of one layer in place; return its error by the Hessian of validation data."""
    weight = module.weight.detach().float()
    real, size = weight.clone(), weight.shape[1]
    group, block = min(group, size), min(block, size)
    diagonal = torch.arange(size, device=h.device)
    damped = h.clone()
    damped[diagonal, diagonal] += 0.01 * h.diagonal().mean()
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    result, scale = torch.empty_like(weight), weight.new_ones(weight.shape[0])
    for first in range(0, size, block):
        last = min(first + block, size)
        panel, errors = weight[:, first:last].clone(), weight.new_zeros(weight.shape[0], last - first)
        part = inverse[first:last, first:last]
        for k in range(last - first):
            if (first + k) % group == 0:
                scale = (weight[:, first + k : first + k + group].abs().amax(1) / 7).clamp_min(1e-9)
            column = panel[:, k]
            rounded = (column / scale).round().clamp(-8, 7) * scale
            result[:, first + k] = rounded
            error = (column - rounded) / part[k, k]
            panel[:, k:] -= error[:, None] * part[k, k:][None]
            errors[:, k] = error
        weight[:, last:] -= errors @ inverse[first:last, last:]
    lost = result - real
    module.weight.data = result.to(module.weight.dtype)
    return float(((lost @ judge) * lost).sum() / ((real @ judge) * real).sum())


def step_kernels(place: Place) -> Result:
    """Compare the products of `eager(kernels=True)` and `compile()` with the simulated ones, and time them.

    Of one layer of an 8B shape, by kind of product, and of a small Llama; the reports say why others are refused.
    """
    from quark_fx import Session

    inputs, outputs, many = (128, 256, 40) if place.small else (4096, 14336, 2048)
    layer = nn.Linear(inputs, outputs, device=place.device, dtype=torch.bfloat16)
    data = [torch.randn(1, rows, inputs).to(place.device, torch.bfloat16) for rows in (many, 1)]
    float_seconds = [seconds_of(place, partial(layer, x)) for x in data]
    outcome: Result = {"rows": [many, 1], "float seconds": float_seconds}
    captured = Session(nn.Sequential(layer).eval(), data[:1])
    for name, config in product_configs().items():
        try:
            qmodel = quantized(captured, config)
            outcome[name] = compared(place, qmodel.eager(), qmodel.eager(kernels=True), data)
        except Exception as error:
            outcome[name] = said(error)
    shape = replace(place.of(SMALL), layers=1)
    llama, batches = shape.model(place.device), shape.batches(place.device)
    for name in ("w8a8_dynamic", "fp8_dynamic")[: 1 if place.small else 2]:
        try:
            qmodel = quantized(llama, name, batches)
            outcome[f"Llama, {name}"] = compared(place, qmodel.eager(), qmodel.eager(kernels=True), batches[:1])
            if place.device == "cuda":
                compiled = qmodel.compile()
                compiled.kernel_report = compiled.report()
                outcome[f"Llama, {name}, compile()"] = compared(place, qmodel.eager(), compiled, batches[:1])
        except Exception as error:
            outcome[f"Llama, {name}, failed"] = said(error)
    return outcome


def product_configs() -> dict[str, Any]:
    """Return configurations that take each product of torch on GPUs, and three that Hopper lacks."""
    from quark_fx import QuantConfig, TensorSpec
    from quark_fx.config.quant_config import Granularity
    from quark_fx.numbers.formats import FP8_E4M3
    from quark_fx.presets import PRESETS

    fp8 = TensorSpec(format=FP8_E4M3)
    group = fp8.replace(granularity=Granularity.GROUP, group_size=128)
    tokens = group.replace(dynamic=True)
    presets = ("w4a16_rtn", "w8a8_dynamic", "int8_static", "fp8_static", "fp8_dynamic", "nvfp4", "mxfp4", "mxfp8_e4m3")
    return {
        **{name: QuantConfig(weight=PRESETS[name].weight, input=PRESETS[name].input) for name in presets},
        "fp8, one scale": QuantConfig(weight=fp8, input=fp8),
        "fp8, 1x128": QuantConfig(weight=group, input=tokens),
        "fp8, 128x128": QuantConfig(weight=group.replace(group_rows=128), input=tokens),
    }


def compared(place: Place, simulated: Any, fast: Any, data: list[Any]) -> Result:
    """Return the kernels of a model, how far its results are from the simulated ones, and its times."""
    with torch.no_grad():
        pairs = [(result_of(simulated, x), result_of(fast, x)) for x in data]
        seconds = [seconds_of(place, partial(result_of, fast, x)) for x in data]
    rows = list(fast.kernel_report)
    print(fast.kernel_report)
    return {
        "kernels": dict(Counter(row.kernel for row in rows if row.kernel)),
        "reasons": dict(Counter(row.reason for row in rows if row.reason).most_common(3)),
        "relative error to the simulated": max(float((a - b).norm() / a.norm()) for a, b in pairs),
        "seconds": seconds,
    }


def result_of(model: Any, x: Any) -> Tensor:
    """Return the result of a model, or its logits, float32."""
    result = model(**x) if isinstance(x, dict) else model(x)
    values: Tensor = getattr(result, "logits", result).float()
    return values


def seconds_of(place: Place, function: Callable[[], object]) -> float | None:
    """Return the time of a call on a GPU."""
    return median_seconds(function) if place.device == "cuda" else None


def said(error: BaseException) -> Result:
    """Return the type and message of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((f for f in reversed(frames) if "/quark_fx/" in f.filename), frames[-1] if frames else None)
    line = f"{Path(where.filename).name}:{where.lineno}" if where else ""
    return {"error": f"{type(error).__name__}: {str(error)[:400]}", "at": line}


ALGORITHMS = ("w4a16_gptq", "w4a16_awq", "w4a16_best", "AdaRound", "AutoRound")

OTHERS = ("w4a16_awq", "int8_static", "w4a4_dynamic", "nvfp4_best", "mxfp4_best")
"""Presets whose codes are compared last."""

STEPS: dict[str, tuple[Callable[[Place], Result], int]] = {
    "device": (step_device, 12),
    "codes": (step_codes, 20),
    "tests": (step_tests, 40),
    "syncs": (step_syncs, 15),
    "triton": (step_triton, 15),
    **{
        f"{name} {shape.name}": (algorithm_step(name, shape), seconds)
        for name, limits in zip(ALGORITHMS, ((10, 20), (10, 20), (12, 20), (12, 20), (12, 20)), strict=True)
        for shape, seconds in zip((ONE, EIGHT), limits, strict=True)
    },
    "plain GPTQ 8B": (step_plain_gptq, 15),
    "kernels": (step_kernels, 15),
    **{f"codes {name}": (partial(step_codes, names=(name,)), 60) for name in OTHERS},
}
"""Each step, in order of importance, and the seconds after which it is given up: all but the last ones fit in a call.

A step that was cut off has twice the time in the next call.
"""


# --- running them ----------------------------------------------------------------------------------------------------


_PATIENCE = 10
"""Tests of this script run at the same time as others, on slow machines."""


def append(results: Path, row: Mapping[str, Any]) -> None:
    """Write one line, to the disk."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def rows_of(results: Path, start: int = 0) -> Iterator[Result]:
    """Yield the lines after `start` bytes."""
    for line in results.read_bytes()[start:].splitlines() if results.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a machine that was taken away while it was written
            yield json.loads(line)


def read(results: Path, start: int = 0) -> dict[str, Result]:
    """Return the last line of each step, of those after `start` bytes."""
    return {row["step"]: row for row in rows_of(results, start)}


def cut_off(results: Path) -> Counter[str]:
    """Return how often each step was cut off."""
    return Counter(row["step"] for row in rows_of(results) if row.get("state") == "cut off")


def fails(found: Any) -> bool:
    """Tell whether a result, or a part of it, is an error."""
    if not isinstance(found, dict):
        return False
    return "error" in found or any(fails(part) for part in found.values())


def work(place: Place, steps: list[str], results: Path) -> None:
    """Run steps one after the other in this process."""
    gpu: Any = contextlib.nullcontext()
    if place.device == "pretend":
        sys.path.insert(0, str(ROOT / "tests"))
        from captured_once import CAPTURES
        from pretend_gpu import PretendGPU

        from quark_fx import session

        gpu = contextlib.ExitStack()
        gpu.enter_context(PretendGPU())
        gpu.enter_context(patch.object(session, "capture_graph", CAPTURES))  # as in tests
    with gpu:
        for name in steps:
            begun = {"step": name, "state": "begun"}
            append(results, begun)
            noting = replace(place, note=lambda found, begun=begun: append(results, begun | found))  # type: ignore[misc]
            began = time.perf_counter()
            try:
                result = STEPS[name][0](noting)
            except BaseException as error:
                result = said(error)
            state = {"step": name, "state": "failed" if fails(result) else "done"}
            append(results, state | {"took": round(time.perf_counter() - began, 2)} | result)
            print(f"{name}: {json.dumps(state | result)[:300]}", flush=True)
            if "CUDA error" in str(result):
                sys.exit(3)  # the context is broken; the next worker has its own
            if place.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()


def supervise(place: Place, names: list[str], results: Path, seconds: float) -> None:
    """Start workers until every step was tried or the time is over: steps that never ran first."""
    deadline = time.monotonic() + seconds
    state, cut = read(results), cut_off(results)
    pending = sorted((name for name in names if state.get(name, {}).get("state") != "done"), key=lambda n: n in state)
    start = results.stat().st_size if results.exists() else 0  # what earlier calls began is not running now
    while pending and time.monotonic() < deadline:
        command = [sys.executable, "-m", "benchmarks.on_gpu", "--work", *pending, "--results", str(results)]
        command += ["--device", place.device, *["--small"] * place.small]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        worker = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        tried, current, since = set[str](), "", time.monotonic()
        while worker.poll() is None:
            time.sleep(0.2)
            rows = read(results, start)
            begun = [name for name in pending if rows.get(name, {}).get("state") == "begun"]
            if begun and begun[-1] != current:
                current, since = begun[-1], time.monotonic()
            limit = STEPS[current][1] << cut[current] if current else 60
            if time.monotonic() > min(deadline, since + limit * (_PATIENCE if place.small else 1)):
                os.killpg(worker.pid, signal.SIGKILL)  # with its children
                worker.wait()
        rows = read(results, start)
        for name in pending:
            row = rows.get(name, {})
            if row.get("state") == "begun":
                over = time.monotonic() > deadline
                limit = STEPS[name][1] << cut[name]
                why = "the time of this call was over" if over else f"the worker ended or took over {limit} s"
                append(results, {**row, "state": "cut off", "error": why})
                tried.add(name)
            elif row:
                tried.add(name)
        if not tried:
            append(
                results, {"step": pending[0], "state": "failed", "error": f"the worker ended with {worker.returncode}"}
            )
            tried.add(pending[0])
        pending = [name for name in pending if name not in tried]


GOALS = (
    ("8B int4 GPTQ, extrapolated", "w4a16_gptq 8B", "seconds of all layers (extrapolated)", "at most", 120.0),
    ("8B int4 AWQ, extrapolated", "w4a16_awq 8B", "seconds of all layers (extrapolated)", "at most", 180.0),
    ("GPU busy while GPTQ solves", "w4a16_gptq 8B", "GPU busy", "at least", 0.8),
    ("GPU busy while AWQ solves", "w4a16_awq 8B", "GPU busy", "at least", 0.8),
    ("Memory of two blocks, GiB, GPTQ", "w4a16_gptq 8B", "peak GiB of two blocks", "at most", "goal GiB of two blocks"),
    ("Memory of two blocks, GiB, AWQ", "w4a16_awq 8B", "peak GiB of two blocks", "at most", "goal GiB of two blocks"),
    ("Codes of GPTQ equal to the CPU's", "codes", "w4a16_gptq/same codes", "at least", 0.999),
    ("Errors compared with the CPU's", "codes", "w4a16_gptq/largest relative gap of an error", "at most", 1e-4),
)
"""Goals: a step, a number in its result, and its limit: a number or the name of one in the result."""


def judged(rows: Mapping[str, Result]) -> list[tuple[str, str, str, str]]:
    """Return for each goal its topic, its limit, the measurement, and whether it is met."""
    found = []
    for what, step, key, sense, limit in GOALS:
        row = rows.get(step, {})
        value: Any = row
        for part in key.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        bound = row.get(limit) if isinstance(limit, str) else limit
        if value is None or bound is None:
            why = str(row.get("error", row.get("state", "not run")))
            found.append((what, f"{sense} {bound}", "not measured", why))
            continue
        met = value <= bound if sense == "at most" else value >= bound
        found.append((what, f"{sense} {bound:g}", f"{value:g}", "met" if met else "missed"))
    return found


def page(rows: Mapping[str, Result]) -> str:
    """Return the results as Markdown."""
    device = rows.get("device", {})
    lines = [f"# Measured on {device.get('device', 'an unknown device')}", ""]
    lines += [
        "Written by `python -m benchmarks.on_gpu --write`. Weights are random. Times of whole models are extrapolated",
        "from the layers that were measured.",
        "",
        "| goal | limit | measured | |",
        "| --- | --- | ---: | --- |",
        *(f"| {' | '.join(cells)} |" for cells in judged(rows)),
        "",
    ]
    for name in STEPS:
        row = {k: v for k, v in rows.get(name, {"state": "not run"}).items() if k != "step"}
        lines += [f"## {name}", "", "```json", json.dumps(row, indent=1), "```", ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run the missing steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "on_gpu.jsonl", help="file of results (default: %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=290, help="time of this call (default: %(default)s)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "pretend", "cpu"))
    parser.add_argument("--small", action="store_true", help="tiny shapes, to test this script")
    parser.add_argument("--only", nargs="+", choices=STEPS, metavar="STEP", help="steps to run")
    parser.add_argument("--work", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--write", action="store_true", help="make the page of the results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not options.work and not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU here; --device pretend --small runs the script without one")
    place, results = Place(options.device, options.small), options.results.absolute()
    if options.work:
        work(place, options.work, results)
        return
    supervise(place, options.only or list(STEPS), results, options.seconds)
    rows = read(results)
    for name in STEPS:
        print(f"{name}: {rows.get(name, {}).get('state', 'not run')}")
    if options.write:
        PAGE.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
