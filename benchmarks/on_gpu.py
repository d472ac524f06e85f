"""Measure quark_fx on a GPU within five minutes, most important steps first.

    PYTHONPATH=. python -m benchmarks.on_gpu [--results on_gpu.jsonl] [--seconds 290] [--only STEP ...] [--write]

It needs the repository, torch, transformers, safetensors, numpy, tqdm and pyyaml, no network and no files of models:
all weights are random. Device tests need pytest and hypothesis, installed or as wheels in the folder `wheels`, 3 MB in
all: `pip download -d wheels pytest hypothesis`, with the version of Python of the machine.

Each step runs in a worker process under a time limit and appends one line of JSON to the results file at once. A step
that fails says why, and the next one runs; a worker that hangs or crashes is replaced. Another call with the same file
runs the steps that are missing or failed. `--write` makes `docs/on_gpu_results.md` of the file.

`--device pretend --small` runs everything on the pretend GPU of the tests, `--device cpu --small` on the CPU. Times on
two blocks of an 8B shape are extrapolated to its 32 blocks, and marked so. The page begins with the goals, and what of
them was met.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "on_gpu_results.md"

WHEELS = ROOT / "wheels"
INSTALLED = WHEELS / "installed"
"""Wheels for a machine without network, and what is installed from them."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights.

    Attributes:
        name: of the model it is a part of.
        hidden, intermediate, heads, key_value_heads, vocabulary: its sizes.
        layers: that are measured.
        of: layers of the whole model.
        samples, tokens: of the calibration data.
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
        """Return the memory of the layers measured, what enters and leaves one, and the Hessians of one.

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


TINY = Shape("tiny", 64, 128, 4, 2, 64, 2, 2, 8, 16, 2)
SMALL = Shape("small", 512, 1024, 8, 4, 1024, 2, 2, 16, 128)
ONE = Shape("1B", 2048, 8192, 32, 8, 32000, 4, 16, 64, 512)
EIGHT = Shape("8B", 4096, 14336, 32, 8, 32000, 2, 32, 128, 2048)


@dataclass(frozen=True)
class Place:
    """Where a worker measures.

    Attributes:
        device: name of the device.
        small: measure tiny shapes, for tests of this script.
    """

    device: str
    small: bool

    def of(self, shape: Shape) -> Shape:
        """Return a shape, or the tiny one under its name."""
        return replace(TINY, name=shape.name, layers=1, samples=4) if self.small else shape

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


@contextlib.contextmanager
def measured(place: Place) -> Iterator[Result]:
    """Add seconds, peak device memory, and the share of time that the GPU was busy to the result it yields."""
    result: Result = {}
    cuda = place.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    place.synchronize()
    began = time.perf_counter()
    with busy_share(result) if cuda else contextlib.nullcontext():
        yield result
        place.synchronize()
    result["seconds"] = round(time.perf_counter() - began, 3)
    if cuda:
        result["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 3)


@contextlib.contextmanager
def busy_share(result: Result) -> Iterator[None]:
    """Sample `nvidia-smi` ten times a second; note the mean share of time that a kernel ran."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield
        return
    samples: list[float] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                samples.append(float(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        reader.join(2)
        result["GPU busy"] = round(sum(samples) / len(samples) / 100, 3) if samples else None


def codes_of(qmodel: Any) -> dict[str, Tensor]:
    """Return the integer tensors of a quantized model, on the host."""
    stored: dict[str, Tensor] = qmodel.graph_module.state_dict()
    return {name: t.cpu() for name, t in stored.items() if not t.is_floating_point() and t.numel() > 1}


def errors_of(qmodel: Any) -> list[float]:
    """Return the errors after each change that the passes report."""
    return [c.after for record in qmodel.report().passes for c in record.changes if c.after is not None]


def quantized(model: nn.Module, config: Any, batches: Any, device: str | None = None) -> Any:
    """Quantize without a progress bar and warnings."""
    import quark_fx as qfx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return qfx.quantize(model, config, batches, resources=qfx.Resources(device=device), progress=False)


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

    found: Result = {"python": platform.python_version(), "torch": torch.__version__, "cpu threads": os.cpu_count()}
    found["transformers"] = transformers.__version__
    with contextlib.suppress(ImportError):
        import triton

        found["triton"] = triton.__version__
    if place.device != "cuda":
        return {**found, "device": place.device}
    properties = torch.cuda.get_device_properties(0)
    found |= {
        "device": properties.name,
        "capability": f"sm{properties.major}{properties.minor}",
        "GiB": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    found["copy TB/s"] = round(2 * a.numel() / median_seconds(lambda: b.copy_(a)) / 1e12, 2)
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    found["bf16 product TFLOP/s"] = round(2 * 8192**3 / median_seconds(lambda: x @ x) / 1e12)
    y = torch.randn(4096, 4096, device="cuda")
    found["float32 product TFLOP/s"] = round(2 * 4096**3 / median_seconds(lambda: y @ y) / 1e12, 1)
    return found


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
    found: Result = {}
    shape = place.of(SMALL)
    model, batches = shape.model("cpu", torch.float32), shape.batches()
    for name in names:
        try:
            here, there = quantized(model, name, batches), quantized(model, name, batches, place.device)
            ours, theirs = codes_of(here), codes_of(there)
            same = sum(int((ours[n] == theirs[n]).sum()) for n in ours)
            count = sum(t.numel() for t in ours.values())
            pairs = zip(errors_of(here), errors_of(there), strict=True)
            gap = max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs), default=0.0)
            found[name] = {"same codes": same / max(1, count), "largest relative gap of an error": gap}
        except Exception as error:
            found[name] = said(error)
    return found


def step_tests(place: Place) -> Result:
    """Run the device tests of the repository."""
    install_from_wheels("pytest", "hypothesis")
    files = [
        *("solvers/test_error_feedback.py", "solvers/test_rounding.py", "solvers/test_group_feedback.py"),
        *("passes/test_gptq.py", "engine/test_activation_cache.py", "engine/test_block_walk.py"),
        *("passes/test_smooth_quant.py", "passes/test_hqq.py", "numbers/test_qparams.py", "numbers/test_ops.py"),
        *("numbers/test_float_grids.py", "passes/test_autoround.py", "passes/test_bias_correction.py"),
        *("engine/test_resume.py", "plan/test_convert.py", "model/test_qat.py", "model/test_gpu_kernels.py"),
    ]
    if place.small:
        files = files[:1]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=line", "-rf", "-k", place.device]
    if place.device == "pretend":
        command += ["-p", "pretend_gpu"]
    paths = [str(ROOT / "tests" / file) for file in files]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"), str(INSTALLED)))}
    try:
        done = subprocess.run(
            [*command, *paths], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=75, check=False
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else str(error.stdout)
        return {"timeout": True, "failed before": output.count("F"), "passed before": output.count(".")}
    lines = done.stdout.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith(("FAILED", "ERROR"))]
    last = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)", line)), "")
    return {"code": done.returncode, "summary": last or done.stderr[-300:], "failed": failed[:40]}


def install_from_wheels(*names: str) -> None:
    """Install packages into a folder of their own, unless Python has them.

    Raises:
        ModuleNotFoundError: If there are no wheels of them.
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
    """Forbid waits in calibration and in a forward pass; count the waits of whole runs by line."""
    if place.device != "cuda":
        return {"skipped": "torch.cuda.set_sync_debug_mode needs CUDA"}
    import quark_fx.engine.calibration as calibration

    found: Result = {}
    shape = place.of(SMALL)
    model, on_device = shape.model("cuda", torch.float32), shape.batches("cuda")
    run = calibration.run_batches

    def strict(*args: Any, **kwargs: Any) -> None:
        with sync_mode("error"):
            run(*args, **kwargs)

    try:
        calibration.run_batches = strict
        qmodel = quantized(model, "int8_static", on_device)
        found["calibration"] = "no wait"
    except Exception as error:
        found["calibration"] = said(error)
        calibration.run_batches = run
        qmodel = quantized(model, "int8_static", on_device)
    finally:
        calibration.run_batches = run
    for name, run_model in (("int8_static", qmodel), ("w4a4_dynamic", quantized(model, "w4a4_dynamic", on_device))):
        try:
            with torch.no_grad(), sync_mode("error"):
                run_model(**on_device[0])
            found[f"forward {name}"] = "no wait"
        except Exception as error:
            found[f"forward {name}"] = said(error)
    for name in ("w4a16_gptq", "w4a16_awq"):
        found[name] = waits_of(lambda name=name: quantized(model, name, on_device))  # type: ignore[misc]
    return found


@contextlib.contextmanager
def sync_mode(mode: str) -> Iterator[None]:
    """Let CUDA raise, or warn, when the host waits."""
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of(function: Callable[[], object]) -> Result:
    """Count the warnings of waits by the line of the package that caused them."""
    counts: Counter[str] = Counter()
    package = str(ROOT / "quark_fx")

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not frame.f_code.co_filename.startswith(package):
                frame = frame.f_back
            counts[f"{frame.f_code.co_filename[len(package) + 1 :]}:{frame.f_lineno}" if frame else "outside"] += 1

    with sync_mode("warn"), warnings.catch_warnings():
        warnings.simplefilter("always")
        setattr(warnings, "showwarning", note)  # noqa: B010
        function()
    return {"waits": counts.total(), "by line": dict(counts.most_common(8))}


def step_triton(place: Place) -> Result:
    """Compare the Triton kernel of error feedback with the loop in torch, and time both."""
    if place.device != "cuda":
        return {"skipped": "Triton compiles for GPUs; tests run the kernel in its interpreter"}
    from quark_fx.numbers.formats import FP4_E2M1, INT4
    from quark_fx.numbers.grid import Grid
    from quark_fx.solvers import error_feedback, error_feedback_kernel

    found: Result = {}
    torch.manual_seed(0)
    size = 4096
    weight = torch.randn(1, size, size, device="cuda")
    x = torch.randn(2 * size, size, device="cuda")
    factor = error_feedback.factor((x.T @ x)[None], damping=0.01, by_activation=True)
    for name, fmt in (("int4", INT4), ("fp4", FP4_E2M1)):
        try:
            scale = (weight.abs().amax(-1, keepdim=True) / (7.0 if name == "int4" else 6.0)).float()
            grid = grid_for(Grid, fmt, scale)
            rounded = partial(error_feedback.round_with_feedback, weight, factor, grid)
            kernel = rounded()
            runs = error_feedback._runs
            error_feedback._runs = lambda like, grid: (error_feedback.round_run, error_feedback._LEAF)
            try:
                loop, loop_seconds = rounded(), median_seconds(rounded, 3)
            finally:
                error_feedback._runs = runs
            seconds = median_seconds(rounded, 3)
            same = float((kernel == loop).double().mean())
            found[name] = {"same codes": same, "kernel seconds": seconds, "loop seconds": loop_seconds}
        except Exception as error:
            found[name] = said(error)
    found["columns"] = error_feedback_kernel.COLUMNS
    return found


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
        with measured(place) as result:
            qmodel = quantized(model, solver_config(name, place), batches)
        if "peak GiB" in result:
            result["peak GiB of two blocks"] = round(result["peak GiB"] - gib_beside_blocks(model), 3)
            result["goal GiB of two blocks"] = round(chosen.goal_gib(), 3)
        report = qmodel.report()
        by_pass = {record.name: round(record.seconds, 3) for record in report.passes if record.seconds > 0.05}
        solving = sum(by_pass.values())
        errors = errors_of(qmodel)
        result |= {
            "layers": chosen.layers,
            "of layers": chosen.of,
            "tokens": chosen.samples * chosen.tokens,
            "seconds by pass": by_pass,
            "seconds of all layers (extrapolated)": round(solving * chosen.of / chosen.layers, 1),
            "mean error": sum(errors) / len(errors) if errors else None,
        }
        return result

    return step


def gib_beside_blocks(model: Any) -> float:
    """Return the memory of the embedding, the head, and the last norm."""
    blocks = {id(p) for p in model.model.layers.parameters()}
    return float(sum(p.nbytes for p in model.parameters() if id(p) not in blocks) / 2**30)


def step_plain_gptq(place: Place) -> Result:
    """Run the textbook GPTQ on the same two blocks as the baseline."""
    shape = place.of(EIGHT)
    model, batches = shape.model(place.device), shape.batches(place.device)
    with measured(place) as result, torch.no_grad():
        errors = plain_gptq(model, batches)
    result |= {
        "layers": shape.layers,
        "of layers": shape.of,
        "seconds of all layers (extrapolated)": round(result["seconds"] * shape.of / shape.layers, 1),
        "mean error": sum(errors) / len(errors),
    }
    return result


def plain_gptq(model: Any, batches: list[dict[str, Tensor]]) -> list[float]:
    """Round all linear layers of the blocks to int4 in groups of 128; return the relative error of each output.

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
    for layer in layers:
        linears = [m for m in layer.modules() if isinstance(m, nn.Linear)]
        hessians = {m: torch.zeros(m.in_features, m.in_features, device=m.weight.device) for m in linears}

        def add(module: Any, args: Any, hessians: dict[Any, Tensor] = hessians) -> None:
            x = args[0].reshape(-1, args[0].shape[-1]).float()
            hessians[module].addmm_(x.T, x)

        handles = [m.register_forward_pre_hook(add) for m in linears]
        for x, kwargs in states:
            layer(x, **kwargs)
        for h in handles:
            h.remove()
        for m in linears:
            errors.append(plain_round(m, hessians.pop(m)))
        states = [(out[0] if isinstance(out := layer(x, **kwargs), tuple) else out, kwargs) for x, kwargs in states]
    return errors


def plain_round(module: nn.Linear, h: Tensor, group: int = 128, block: int = 128) -> float:
    """Round the weight of one layer in place."""
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
        some, errors = weight[:, first:last].clone(), weight.new_zeros(weight.shape[0], last - first)
        part = inverse[first:last, first:last]
        for k in range(last - first):
            if (first + k) % group == 0:
                scale = (weight[:, first + k : first + k + group].abs().amax(1) / 7).clamp_min(1e-9)
            column = some[:, k]
            rounded = (column / scale).round().clamp(-8, 7) * scale
            result[:, first + k] = rounded
            error = (column - rounded) / part[k, k]
            some[:, k:] -= error[:, None] * part[k, k:][None]
            errors[:, k] = error
        weight[:, last:] -= errors @ inverse[first:last, last:]
    lost = result - real
    module.weight.data = result.to(module.weight.dtype)
    return float(((lost @ h) * lost).sum() / ((real @ h) * real).sum())


def step_kernels(place: Place) -> Result:
    """Compare the products of `eager(kernels=True)` and `compile()` with the simulated ones, and time them.

    Of one layer of an 8B shape, by kind of product, and of a small Llama; the reports say why others are refused.
    """
    inputs, outputs, many = (128, 256, 40) if place.small else (4096, 14336, 2048)
    layer = nn.Linear(inputs, outputs, device=place.device, dtype=torch.bfloat16)
    data = [torch.randn(1, rows, inputs).to(place.device, torch.bfloat16) for rows in (many, 1)]
    float_seconds = [seconds_of(place, partial(layer, x)) for x in data]
    found: Result = {"rows": [many, 1], "float seconds": float_seconds}
    model = nn.Sequential(layer).eval()
    for name, config in product_configs().items():
        try:
            qmodel = quantized(model, config, data[:1])
            found[name] = compared(place, qmodel.eager(), qmodel.eager(kernels=True), data)
        except Exception as error:
            found[name] = said(error)
    shape = replace(place.of(SMALL), layers=1)
    llama, batches = shape.model(place.device), shape.batches(place.device)
    for name in ("w8a8_dynamic", "fp8_dynamic")[: 1 if place.small else 2]:
        try:
            qmodel = quantized(llama, name, batches)
            found[f"Llama, {name}"] = compared(place, qmodel.eager(), qmodel.eager(kernels=True), batches[:1])
            if place.device == "cuda":
                compiled = qmodel.compile()
                compiled.kernel_report = compiled.report()
                found[f"Llama, {name}, compile()"] = compared(place, qmodel.eager(), compiled, batches[:1])
        except Exception as error:
            found[f"Llama, {name}, failed"] = said(error)
    return found


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
    "device": (step_device, 40),
    "codes": (step_codes, 40),
    "tests": (step_tests, 80),
    "syncs": (step_syncs, 60),
    "triton": (step_triton, 60),
    "w4a16_gptq 1B": (algorithm_step("w4a16_gptq", ONE), 60),
    "w4a16_gptq 8B": (algorithm_step("w4a16_gptq", EIGHT), 120),
    "w4a16_awq 1B": (algorithm_step("w4a16_awq", ONE), 60),
    "w4a16_awq 8B": (algorithm_step("w4a16_awq", EIGHT), 120),
    "plain GPTQ 8B": (step_plain_gptq, 90),
    "kernels": (step_kernels, 120),
    **{f"{name} 1B": (algorithm_step(name, ONE), 120) for name in ALGORITHMS[2:]},
    **{f"{name} 8B": (algorithm_step(name, EIGHT), 240) for name in ALGORITHMS[2:]},
    **{f"codes {name}": (partial(step_codes, names=(name,)), 60) for name in OTHERS},
}
"""Each step, in order of importance, and the seconds after which it is given up."""


# --- running them ----------------------------------------------------------------------------------------------------


_PATIENCE = 10
"""Tests of this script run beside others, on slow machines."""


def append(results: Path, row: Mapping[str, Any]) -> None:
    """Write one line, to the disk."""
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(results: Path, start: int = 0) -> dict[str, Result]:
    """Return the last line of each step, of those after `start` bytes."""
    rows: dict[str, Result] = {}
    for line in results.read_bytes()[start:].splitlines() if results.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):  # a machine that was taken away while it was written
            row = json.loads(line)
            rows[row["step"]] = row
    return rows


def work(place: Place, steps: list[str], results: Path) -> None:
    """Run steps one after the other in this process."""
    gpu: Any = contextlib.nullcontext()
    if place.device == "pretend":
        sys.path.insert(0, str(ROOT / "tests"))
        from pretend_gpu import PretendGPU

        gpu = PretendGPU()
    with gpu:
        for name in steps:
            append(results, {"step": name, "state": "begun"})
            began = time.perf_counter()
            try:
                result: Result = {"state": "done", **STEPS[name][0](place)}
            except BaseException as error:
                result = {"state": "failed", **said(error)}
            append(results, {"step": name, "took": round(time.perf_counter() - began, 2), **result})
            print(f"{name}: {json.dumps(result)[:300]}", flush=True)
            if result["state"] == "failed" and "CUDA error" in str(result):
                sys.exit(3)  # the context is broken; the next worker has its own
            if place.device == "cuda":
                torch.cuda.empty_cache()


def supervise(place: Place, names: list[str], results: Path, seconds: float) -> None:
    """Start workers until every step was tried or the time is over."""
    deadline = time.monotonic() + seconds
    left = [name for name in names if read(results).get(name, {}).get("state") != "done"]
    start = results.stat().st_size if results.exists() else 0  # what earlier calls began is not running now
    while left and time.monotonic() < deadline:
        command = [sys.executable, "-m", "benchmarks.on_gpu", "--work", *left, "--results", str(results)]
        command += ["--device", place.device, *["--small"] * place.small]
        paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": paths, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
        worker = subprocess.Popen(command, cwd=ROOT, env=environment)
        tried, current, since = set[str](), "", time.monotonic()
        while worker.poll() is None:
            time.sleep(0.2)
            rows = read(results, start)
            begun = [name for name in left if rows.get(name, {}).get("state") == "begun"]
            if begun and begun[-1] != current:
                current, since = begun[-1], time.monotonic()
            limit = (STEPS[current][1] if current else 60) * (_PATIENCE if place.small else 1)
            if time.monotonic() > deadline or time.monotonic() - since > limit:
                worker.kill()
                worker.wait()
        rows = read(results, start)
        for name in left:
            state = rows.get(name, {}).get("state")
            if state == "begun":
                over = time.monotonic() > deadline
                why = "the time of this call was over" if over else f"the worker ended or took over {STEPS[name][1]} s"
                append(results, {"step": name, "state": "failed", "error": why})
                tried.add(name)
            elif state in ("done", "failed"):
                tried.add(name)
        if not tried:
            append(results, {"step": left[0], "state": "failed", "error": f"the worker ended with {worker.returncode}"})
            tried.add(left[0])
        left = [name for name in left if name not in tried]


GOALS = (
    ("8B int4 GPTQ, extrapolated", "w4a16_gptq 8B", "seconds of all layers (extrapolated)", "at most", 120.0),
    ("8B int4 AWQ, extrapolated", "w4a16_awq 8B", "seconds of all layers (extrapolated)", "at most", 180.0),
    ("GPU busy while GPTQ solves", "w4a16_gptq 8B", "GPU busy", "at least", 0.8),
    ("GPU busy while AWQ solves", "w4a16_awq 8B", "GPU busy", "at least", 0.8),
    ("Memory of two blocks, GiB, GPTQ", "w4a16_gptq 8B", "peak GiB of two blocks", "at most", "goal GiB of two blocks"),
    ("Memory of two blocks, GiB, AWQ", "w4a16_awq 8B", "peak GiB of two blocks", "at most", "goal GiB of two blocks"),
    ("Codes of GPTQ that are those of the CPU", "codes", "w4a16_gptq/same codes", "at least", 0.999),
    ("Errors beside those of the CPU", "codes", "w4a16_gptq/largest relative gap of an error", "at most", 1e-4),
)
"""What is to be reached: a step, a number in its result, and its limit, a number or the name of one there."""


def judged(rows: Mapping[str, Result]) -> list[tuple[str, str, str, str]]:
    """Return for each goal what it is about, its limit, what was measured, and whether it is met."""
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
    """Run what is missing."""
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
