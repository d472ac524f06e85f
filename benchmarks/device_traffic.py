"""Count waits of the host and copies to the device by algorithm, on the pretend GPU of the tests.

    PYTHONPATH=.:tests python -m benchmarks.device_traffic [--only NAME ...] [--batches 4 16] [--lines] [--write]

The model is on the CPU and `device=` is the GPU, so each weight is copied there once per walk over the blocks, and back
where it changes. A wait is an operation that makes the host wait for the device, a copy one from pageable memory of the
host to the device. The language model is a Llama of two layers with 14 linear layers in codes; the network of images
has two convolutions and a linear layer. `--lines` shows which lines cause most; `--write` updates `docs/on_gpu.md`.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretend_gpu import PretendGPU
from torch import nn

import quark_fx as qfx
from benchmarks.common import DOCS, table
from benchmarks.on_gpu import TINY
from quark_fx import passes
from quark_fx.presets import PRESETS

PAGE = DOCS / "on_gpu.md"

LANGUAGE = ("w4a16_gptq", "w4a16_awq", "w4a16_best", "w8a8_dynamic", "w4a4_dynamic", "nvfp4_best", "mxfp4_best")

LEARNED: dict[str, Callable[[], Any]] = {
    "AdaRound": passes.AdaRound,
    "AdaQuant": passes.AdaQuant,
    "AutoRound": passes.AutoRound,
    "BlockAP": passes.BlockAP,
    "BiasCorrection": passes.BiasCorrection,
    "SmoothQuant": passes.SmoothQuant,
    "FitScales": passes.FitScales,
    "TuneScales": passes.TuneScales,
}

BEFORE = {
    "w4a16_gptq": "243 / 335",
    "w4a16_awq": "1,296 / 709",
    "w4a16_best": "1,512 / 1,834",
    "w8a8_dynamic": "59 / 97",
    "w4a4_dynamic": "385 / 749",
    "nvfp4_best": "478 / 794",
    "mxfp4_best": "341 / 731",
    "AdaRound": "198 / 2,832",
    "AdaQuant": "221 / 6,532",
    "AutoRound": "234 / 497",
    "BlockAP": "250 / 685",
    "BiasCorrection": "75 / 125",
    "SmoothQuant": "73 / 47",
    "FitScales": "69 / 81",
    "TuneScales": "296 / 2,095",
}
"""Waits and copies at 4 batches at commit 7b8fa57, counted by this device."""


def image_model() -> nn.Module:
    """Return two convolutions and a linear layer."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)).eval()


def counted(name: str, batches: int) -> PretendGPU:
    """Quantize with an algorithm on so many batches; return the device with its counts."""
    model: Any
    data: list[Any]
    if name in LANGUAGE:
        model, config = TINY.model("cpu", torch.float32), PRESETS[name]
        data = [{"input_ids": torch.randint(0, TINY.vocabulary, (2, TINY.tokens))} for _ in range(batches)]
    else:
        model, base = image_model(), PRESETS["int8_static"]
        config = base.replace(passes=(*base.passes, LEARNED[name]()))
        data = [torch.randn(4, 3, 8, 8) for _ in range(batches)]
    with PretendGPU() as gpu, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qfx.quantize(model, config, data, device="pretend", progress=False)
    return gpu


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*LANGUAGE, *LEARNED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--lines", action="store_true", help="show the lines that cause most")
    parser.add_argument("--write", action="store_true", help="update docs/on_gpu.md")
    options = parser.parse_args()
    rows = []
    for name in options.only:
        cells = []
        for count in options.batches:
            gpu = counted(name, count)
            cells.append(f"{gpu.waits.total():,} / {gpu.copies.total():,}")
            if options.lines:
                print(name, count, "waits", gpu.waits.most_common(6), "copies", gpu.copies.most_common(4), flush=True)
        rows.append((name, BEFORE[name], *cells))
    header = ("algorithm", "before, 4 batches", *(f"{count} batches" for count in options.batches))
    text = table(header, rows)
    print(text)
    if options.write:
        write(PAGE, text)


def write(page: Path, text: str) -> None:
    """Replace the table between the markers of the page."""
    old = page.read_text(encoding="utf-8")
    marked = re.compile(r"(<!-- traffic -->\n).*?(\n<!-- end -->)", re.DOTALL)
    page.write_text(marked.sub(lambda found: found[1] + text + found[2], old), encoding="utf-8")


if __name__ == "__main__":
    main()
