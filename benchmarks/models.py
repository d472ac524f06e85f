"""Which models go the whole way: capture, `int8_static`, ONNX file, ONNX Runtime, compared with torch.

    python -m benchmarks.models [--only bert,gpt2] [--jobs 1] [--write]

Every model has seeded random weights (biases and norms perturbed, batch norm statistics estimated on its data) and
runs in a process of its own; an error is a row. Two batches of 4 calibrate, a third one is compared. The size of the
float file is that of `torch.onnx.export(dynamo=True, optimize=True)` of the captured graph, or, where that fails, the
bytes of parameters and buffers (marked `*`). `--write` updates `results/models.md`.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quark_fx as qfx
from benchmarks.common import environment, estimate_batch_norm, images, sqnr, table, timed
from benchmarks.experiment import Option, experiment
from quark_fx.export.program import to_exported_program

BATCH, TOKENS = 4, 32

Made = tuple[nn.Module, list[Any]]
"""A model and three batches: two to calibrate with, one to compare on."""


@dataclass
class Result:
    """A row of the table; `error` is the only field of a model that failed besides those that came before."""

    name: str
    captured: bool = False
    operators: int = 0
    quantized: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    steps: float | None = None
    share: float | None = None
    steps_unoptimized: float | None = None
    share_unoptimized: float | None = None
    kernel_steps: float | None = None
    kernel_share: float | None = None
    kernel_steps_unoptimized: float | None = None
    kernel_share_unoptimized: float | None = None
    worst_kernel: str = ""
    sqnr: float | None = None
    bytes: int = 0
    bytes_float: int = 0
    float_exported: bool = False
    checked: bool = False
    quantize_seconds: float | None = None
    export_seconds: float | None = None
    error: str = ""


def vision(name: str, size: int) -> Callable[[], Made]:
    """Return what makes torchvision's classifier `name` with images of `size` x `size`."""
    return lambda: (getattr(torchvision.models, name)(), images(3 * BATCH, BATCH, size, seed=1))


def segmentation() -> Made:
    """Make FCN with a ResNet-50 backbone."""
    model = torchvision.models.segmentation.fcn_resnet50(weights=None, weights_backbone=None)
    return model, images(3 * BATCH, BATCH, 96, seed=1)


_COMMON = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
    "max_position_embeddings": 256,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


def text(model: str, config: str, **options: Any) -> Callable[[], Made]:
    """Return what makes the transformers class `model` from its configuration class, fed with tokens."""

    def make() -> Made:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        generator = torch.Generator().manual_seed(1)
        ids = [torch.randint(3, options["vocab_size"], (BATCH, TOKENS), generator=generator) for _ in range(3)]
        return made, [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]

    return make


def whisper() -> Made:
    """Make the Whisper encoder, fed with mel spectrograms."""
    import transformers
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=256,
        encoder_layers=4,
        encoder_attention_heads=4,
        encoder_ffn_dim=1024,
        num_mel_bins=80,
        max_source_positions=100,
    )
    generator = torch.Generator().manual_seed(1)
    return WhisperEncoder(config), [
        {"input_features": torch.randn(BATCH, 80, 200, generator=generator)} for _ in range(3)
    ]


def clip() -> Made:
    """Make the CLIP vision tower."""
    import transformers

    config = transformers.CLIPVisionConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
    )
    return transformers.CLIPVisionModel(config), [{"pixel_values": x} for x in images(3 * BATCH, BATCH, 64, seed=1)]


MODELS: dict[str, Callable[[], Made]] = {
    "ResNet-18": vision("resnet18", 96),
    "ResNet-50": vision("resnet50", 96),
    "MobileNetV2": vision("mobilenet_v2", 96),
    "MobileNetV3-L": vision("mobilenet_v3_large", 96),
    "EfficientNet-B0": vision("efficientnet_b0", 96),
    "ViT-B/16": vision("vit_b_16", 224),
    "Swin-T": vision("swin_t", 224),
    "ConvNeXt-T": vision("convnext_tiny", 96),
    "FCN-ResNet-50": segmentation,
    "BERT": text("BertModel", "BertConfig", **_COMMON),
    "GPT-2": text("GPT2LMHeadModel", "GPT2Config", vocab_size=4096, n_embd=256, n_layer=4, n_head=4, n_positions=256),
    "OPT": text(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        ffn_dim=1024,
        max_position_embeddings=256,
        word_embed_proj_dim=256,
    ),
    "Llama": text("LlamaForCausalLM", "LlamaConfig", **_GROUPED),
    "Qwen3": text("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, head_dim=64),
    "Gemma 3": text("Gemma3ForCausalLM", "Gemma3TextConfig", **_GROUPED, head_dim=64),
    "Phi-3": text("Phi3ForCausalLM", "Phi3Config", **_GROUPED, pad_token_id=0),
    "Mixtral": text("MixtralForCausalLM", "MixtralConfig", **_GROUPED, num_local_experts=4),
    "Qwen3-MoE": text(
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        **_GROUPED,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        head_dim=64,
    ),
    "Whisper encoder": whisper,
    "T5 encoder": text(
        "T5EncoderModel", "T5Config", vocab_size=4096, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4
    ),
    "CLIP vision": clip,
}
"""What is measured, in the order of the table."""


def perturb(model: nn.Module) -> None:
    """Give biases, norms and weights that start at zero or at a vanishing layer scale values that matter."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            if name.endswith("layer_scale"):
                parameter.fill_(0.5)
            elif parameter.dim() == 1:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif not parameter.any():
                parameter.normal_(std=0.02)


def prepared(name: str) -> Made:
    """Make a model in eval mode whose random weights and statistics matter, and its batches."""
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    perturb(model)
    if hasattr(model, "config"):
        setattr(model.config, "use_cache", False)  # noqa: B010
    if isinstance(batches[0], Tensor):
        estimate_batch_norm(model, batches[:2])
    return model.eval(), batches


def measure(name: str, directory: Path) -> Result:
    """Take one model all the way; whatever goes wrong ends up in the result."""
    result = Result(name)
    try:
        _measure(name, directory, result)
    except Exception as error:  # the row of a model that fails says how
        traceback.print_exc()
        result.error = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    return result


def _measure(name: str, directory: Path, result: Result) -> None:
    model, batches = prepared(name)
    made: list[qfx.QuantizedModel] = []
    path = directory / "quantized.onnx"
    captured = qfx.capture_graph(model, batches[0])
    result.captured = True
    result.quantize_seconds = timed(
        lambda: made.append(qfx.quantize(model, "int8_static", batches[:2], progress=False))
    ).cpu
    qmodel = made[0]
    totals = qmodel.report().totals
    result.operators, result.quantized = totals["operators"], totals["quantized"]
    result.reasons = dict(collections.Counter(f"{row.kind}: {row.reason}" for row in qmodel.report() if row.reason))
    result.export_seconds = timed(lambda: qfx.export.onnx(qmodel, path)).cpu
    result.bytes = written(path)
    _check(path)
    result.checked = True
    result.steps, result.share = _worst(qfx.verify(qmodel, path, batches[2:]))
    result.steps_unoptimized, result.share_unoptimized = _worst(qfx.verify(qmodel, path, batches[2:], optimize=False))
    kernels = qfx.verify(qmodel, path, batches[2:], per_node=True)
    result.kernel_steps, result.kernel_share = _worst(kernels)
    result.worst_kernel = max(kernels.differences, key=lambda d: d.steps).name
    alone = qfx.verify(qmodel, path, batches[2:], per_node=True, optimize=False)
    result.kernel_steps_unoptimized, result.kernel_share_unoptimized = _worst(alone)
    result.sqnr = _sqnr(model, qmodel, batches[2])
    path.unlink()
    result.bytes_float, result.float_exported = float_bytes(model, captured.module, directory / "float.onnx")


def _worst(verification: qfx.export.Verification) -> tuple[float, float]:
    return verification.max_steps, max(d.share for d in verification.differences)


def _sqnr(model: nn.Module, qmodel: qfx.QuantizedModel, batch: Any) -> float:
    """Return the SQNR in dB of the first output, torch's quantized model against the float one."""
    with torch.no_grad():
        pair = [m(batch) if isinstance(batch, Tensor) else m(**batch) for m in (model, qmodel)]
    expected, got = (next(x for x in pytree.tree_leaves(y) if isinstance(x, Tensor)) for y in pair)
    return sqnr(expected, got)


def written(path: Path) -> int:
    """Return the bytes of an ONNX file and of the data beside it."""
    return sum(p.stat().st_size for p in (path, path.with_name(f"{path.name}.data")) if p.exists())


def _check(path: Path) -> None:
    import onnx

    onnx.checker.check_model(str(path), full_check=True)


def float_bytes(model: nn.Module, graph: torch.fx.GraphModule, path: Path) -> tuple[int, bool]:
    """Return the bytes of the float model's ONNX file, and whether it could be written."""
    try:
        torch.onnx.export(to_exported_program(graph), (), path, dynamo=True, optimize=True, verbose=False)
    except Exception as error:  # of any kind: the exporter raises what the lowerings raise
        traceback.print_exception(error)
    else:
        return written(path), True
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.nbytes for t in tensors.values()), False


def in_own_process(name: str) -> Result:
    """Measure one model in a new process, which may die without harm."""
    command = [sys.executable, "-m", "benchmarks.models", "--child", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    except subprocess.TimeoutExpired:
        return Result(name, error="more than 15 minutes")
    with contextlib.suppress(IndexError, ValueError):
        return Result(**json.loads(done.stdout.splitlines()[-1]))
    last = next(iter(reversed(done.stderr.splitlines())), "")
    return Result(name, error=f"process ended with {done.returncode}: {last}")


def row(result: Result) -> list[str]:
    """Return a result's cells."""

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    ratio = (
        f"{result.bytes / result.bytes_float:.3f}{'' if result.float_exported else '*'}" if result.bytes_float else "–"
    )
    return [
        result.name,
        "yes" if result.captured else "no",
        f"{result.quantized} / {result.operators}",
        number(result.steps, ".2f"),
        number(result.share, ".2%"),
        number(result.steps_unoptimized, ".2f"),
        number(result.share_unoptimized, ".2%"),
        number(result.kernel_steps, ".2f"),
        number(result.kernel_share, ".3%"),
        number(result.kernel_steps_unoptimized, ".2f"),
        number(result.kernel_share_unoptimized, ".3%"),
        number(result.sqnr, ".1f"),
        f"{result.bytes / 2**20:.1f}" if result.bytes else "–",
        ratio,
        "yes" if result.checked else "no",
        number(result.quantize_seconds, ".1f"),
        number(result.export_seconds, ".1f"),
    ]


HEADER = (
    *("model", "captured", "quantized / weighted", "steps", "> ½ step", "steps, unoptimized", "> ½ step, unoptimized"),
    *("one by one", "> ½ step, one by one", "one by one, unoptimized", "> ½ step, one by one, unoptimized", "SQNR dB"),
    *("MiB", "size / float", "checker", "quantize CPU s", "export CPU s"),
)


def page(results: list[Result]) -> str:
    """Return the document."""
    reasons: dict[str, dict[str, int]] = {}
    for result in results:
        for reason, count in result.reasons.items():
            reasons.setdefault(reason, {})[result.name] = count
    left = [
        f"- {reason}: {', '.join(f'{name} ({n})' for name, n in models.items())}" for reason, models in reasons.items()
    ]
    failed = [f"- {result.name}: {result.error}" for result in results if result.error]
    sections = [
        f"""# Models

Models taken the whole way with `int8_static`: captured, quantized, exported to ONNX, run in ONNX Runtime. Weights are
random with a fixed seed, batch norm statistics estimated on the data; two batches of {BATCH} calibrate, a third one is
compared. Text models have 4 layers of width 256 and {TOKENS} tokens; images are 96 x 96 (ViT and Swin 224 x 224).
Reproduce with `python -m benchmarks.models`.

- *steps*: largest difference of any output element between torch and ONNX Runtime with its default optimizations, in
  quantization steps of that output (`quark_fx.verify`); *> ½ step*: share of elements that differ by more than half a
  step, of the output where it is largest; *unoptimized*: ONNX Runtime with its graph optimizations switched off.
- *one by one*: the same, but every quantized value is compared by itself, torch computing it from the codes ONNX
  Runtime computed before it (`verify(per_node=True)`); the largest over all values. Two correct kernels may round a
  value between two codes differently; deep networks with random weights amplify such flips, which the columns before
  these contain.
- *SQNR dB*: of the quantized model's first output against the float model's, both in torch.
- *size / float*: bytes of the file over those of the float model's, `torch.onnx.export(dynamo=True, optimize=True)`
  of the captured graph (`*`: over the bytes of its parameters and buffers).
- *checker*: `onnx.checker.check_model(full_check=True)` passes.
- CPU seconds of all threads, run with `OMP_NUM_THREADS={os.environ.get("OMP_NUM_THREADS", "")}`.""",
        table(HEADER, [row(result) for result in results]),
        *(["## Failures", "\n".join(failed)] if failed else []),
        "## Weighted operators left in float\n\nFamily, reason and where (how often):",
        "\n".join(left) or "None.",
        environment(),
    ]
    return "\n\n".join(sections)


@experiment(page="models.md", own_environment=True)
def main(
    only: Annotated[str | None, "names of models, separated by commas; default: all"] = None,
    jobs: Annotated[int, "models at a time"] = 1,
    child: Annotated[str | None, Option("measure one model here and print it as JSON", metavar="MODEL")] = None,
) -> str | None:
    """Measure, and return the page."""
    if child:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        with tempfile.TemporaryDirectory() as directory:
            print("\n" + json.dumps(asdict(measure(child, Path(directory)))))
        return None
    names = only.split(",") if only else list(MODELS)
    if unknown := set(names) - set(MODELS):
        sys.exit(f"unknown model(s) {', '.join(sorted(unknown))}; choose from {', '.join(MODELS)}")
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(in_own_process, names):
            print(" ".join(row(result)), result.worst_kernel, result.error, file=sys.stderr, flush=True)
            results.append(result)
    return page(results)


if __name__ == "__main__":
    main()
