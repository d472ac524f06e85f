"""What `quantize` is expected to take beside what it takes: peak memory, disk and time of models of several kinds.

    python -m benchmarks.predicted [--only NAME ...] [--write]

Seeded random weights: memory does not depend on values. Of each model one process asks `predict`, and another one
quantizes with a limit of memory far above need, so that it gives back memory as the prediction assumes. *Peak* is of
the process's own memory (`RssAnon`, seen every 10 ms), of which python, torch, transformers and the model take what
the column *before* says; *beyond* compares what was added to that, the harder question. The last row is streamed from a
checkpoint to an output directory, whose disk is watched too: by the room that is left on it, to which other processes
add noise. One thread. `--write` updates `results/predicted.md`.
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import torchvision
import transformers
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import apart_from_others, images, table
from benchmarks.experiment import HIDDEN, Option, experiment
from benchmarks.watch import Watch
from quark_fx.passes import AdaRound
from quark_fx.presets import INT8_STATIC

VOCABULARY = 16000


def _tokens(count: int, batch: int, length: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.randint(0, VOCABULARY, (batch, length))} for _ in range(count)]


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        vocab_size=VOCABULARY,
    )
    return cast(nn.Module, transformers.LlamaForCausalLM(config))


def _moe() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        num_experts=8,
        num_experts_per_tok=2,
        num_key_value_heads=4,
        head_dim=64,
        hidden_size=512,
        moe_intermediate_size=640,
        num_attention_heads=8,
        num_hidden_layers=8,
        vocab_size=VOCABULARY,
    )
    return cast(nn.Module, transformers.Qwen3MoeForCausalLM(config))


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        hidden_size=768, ffn_dim=3072, num_hidden_layers=4, vocab_size=VOCABULARY, word_embed_proj_dim=768
    )
    return cast(nn.Module, transformers.OPTForCausalLM(config))


def _bert() -> nn.Module:
    return cast(nn.Module, transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY)))


LEARNED = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, AdaRound(iterations=10)))

CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], list[Any]]]] = {
    "ResNet-50, int8_static": (torchvision.models.resnet50, "int8_static", lambda: images(32, 8, 224, seed=1)),
    "MobileNetV2, int8_static, batches of 32": (
        torchvision.models.mobilenet_v2,
        "int8_static",
        lambda: images(64, 32, 224, seed=1),
    ),
    "ResNet-18, int8_static and AdaRound": (torchvision.models.resnet18, LEARNED, lambda: images(16, 8, 224, seed=1)),
    "ViT-B/16, int8_static_mse": (torchvision.models.vit_b_16, "int8_static_mse", lambda: images(16, 4, 224, seed=1)),
    "BERT-base, int8_static": (_bert, "int8_static", lambda: _tokens(4, 8, 128)),
    "Llama of 110 M, w4a16_gptq": (_llama, "w4a16_gptq", lambda: _tokens(4, 4, 256)),
    "MoE of 85 M, w4a16_gptq": (_moe, "w4a16_gptq", lambda: _tokens(4, 4, 256)),
    "OPT of 40 M, w4a16_awq": (_opt, "w4a16_awq", lambda: _tokens(4, 4, 256)),
}
"""Model, configuration and calibration batches by row."""

STREAMED = "Llama of 110 M, w4a16_gptq, streamed"


def _child(name: str, job: str, folder: str) -> None:
    """Print the prediction (`predict`) or the measurement (`measure`) of a row."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    streamed = name == STREAMED
    build, config, data = CASES[name.removesuffix(", streamed")]
    model = str(Path(folder, "checkpoint")) if streamed else build().eval()
    batches = data()
    output = str(Path(folder, "output")) if streamed else None
    if job == "predict":
        found = qfx.predict(model, config, batches, resources=qfx.Resources(output_dir=output))
        print(json.dumps({"host": found.host, "disk": found.disk, "seconds": found.seconds}))
        return
    free, began = shutil.disk_usage(folder).free, time.perf_counter()
    with Watch(folder) as watch:
        qfx.quantize(model, config, batches, progress=False, resources=qfx.Resources(memory="1TiB", output_dir=output))
    seconds = time.perf_counter() - began
    print(json.dumps({"before": watch.before, "peak": watch.peak, "disk": free - watch.least_free, "seconds": seconds}))


def _ask(name: str, job: str, folder: str) -> dict[str, float]:
    found: dict[str, float] = apart_from_others("benchmarks.predicted", "--child", name, job, folder)
    return found


def _row(name: str, folder: str) -> tuple[str, ...]:
    told, seen = (_ask(name, job, folder) for job in ("predict", "measure"))
    mib, added = 2**20, seen["peak"] - seen["before"]
    disk = (f"{told['disk'] / mib:.0f}", f"{seen['disk'] / mib:.0f}") if name == STREAMED else ("–", "–")
    return (
        name,
        f"{seen['before'] / mib:.0f}",
        f"{told['host'] / mib:.0f}",
        f"{seen['peak'] / mib:.0f}",
        f"{told['host'] / seen['peak']:.2f}",
        f"{(told['host'] - seen['before']) / added:.2f}",
        *disk,
        f"{told['seconds']:.0f}",
        f"{seen['seconds']:.0f}",
    )


@experiment(page="predicted.md")
def main(
    only: Annotated[Sequence[str], Option(choices=(*CASES, STREAMED), metavar="NAME")] = (*CASES, STREAMED),
    child: Annotated[tuple[str, str, str] | None, HIDDEN] = None,
) -> str | None:
    """Measure, and return the page."""
    if child:
        _child(*child)
        return None
    with tempfile.TemporaryDirectory() as folder:
        if STREAMED in only:
            torch.manual_seed(0)
            model = cast(transformers.PreTrainedModel, _llama()).bfloat16()
            model.save_pretrained(Path(folder, "checkpoint"), max_shard_size="50MB")
        rows = [_row(name, folder) for name in only]
    header = (
        "run",
        "before",
        "expected, MiB",
        "peak, MiB",
        "ratio",
        "beyond",
        "disk expected",
        "disk",
        "s, at least",
        "s",
    )
    return f"""# Predicted and measured

Written by `python -m benchmarks.predicted --write`, whose docstring says what is measured.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
