"""Count waits of the host and copies to the device by algorithm, on the pretend GPU of the tests.

    PYTHONPATH=.:tests python -m benchmarks.device_traffic [--only NAME ...] [--before COMMIT] [--lines]
        [--accept] [--write]

Counts `quark_fx` as it was at a commit and as it is here, at 4 and 16 batches. The model is on the CPU and `device=`
is the GPU, so each weight is copied there once per walk over the blocks, and back where it changes. A wait is an
operation that makes the host wait for the device, a copy one from pageable memory to the device. The language model
is a Llama of two layers with 14 linear layers in codes; the network of images has two convolutions and a linear layer.
`--lines` shows which lines cause most. `--accept` accepts every new weight, so that as many are stored
at any number of batches. `--write` updates these rows in `docs/on_gpu.md`; counts of the commit before are kept from
that page.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import quark_fx as qfx
from benchmarks.common import ROOT, rows_of, table
from benchmarks.on_gpu import TINY
from quark_fx import passes
from quark_fx.presets import PRESETS

if importlib.util.find_spec("quark_fx.system.accelerator") is None:  # a commit before there was one
    _path = Path(__file__).parent.parent / "quark_fx" / "system" / "accelerator.py"
    _spec = importlib.util.spec_from_file_location("quark_fx.system.accelerator", _path)
    assert _spec is not None
    assert _spec.loader is not None
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["quark_fx.system.accelerator"] = _module
    _spec.loader.exec_module(_module)
    setattr(importlib.import_module("quark_fx.system"), "accelerator", _module)  # noqa: B010

    class _OnHost(torch.Generator):
        """A generator on the host, which is where the pretend GPU computes."""

        def __new__(cls, device: object = None) -> _OnHost:
            return super().__new__(cls)

    setattr(torch, "Generator", _OnHost)  # noqa: B010

from pretend_gpu import PretendGPU  # which replaces functions of that module

PAGE = ROOT / "docs" / "on_gpu.md"

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

COUNTS = (4, 16)
"""Batches of the runs."""

BEFORE = "13d7609"
"""The commit that the page compares with."""

MARKED = re.compile(r"(<!-- traffic -->\n)(.*?)(\n<!-- end -->)", re.DOTALL)
"""The table of the page between its markers."""


def image_model() -> nn.Module:
    """Return two convolutions and a linear layer."""
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10)).eval()


def accepted() -> AbstractContextManager[object]:
    """Let each weight that is proposed have half the error of the one before it."""
    errors = partial(torch.arange, 2.0, 0.0, -1.0)
    return patch("quark_fx.solvers.solver.relative_errors", lambda matrices, target, h: errors(device=h.device))


def counted(name: str, batches: int, *, accept: bool = False) -> PretendGPU:
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
    with PretendGPU() as gpu, warnings.catch_warnings(), accepted() if accept else nullcontext():
        warnings.simplefilter("ignore")
        resources: Any = {"device": "pretend"}
        if hasattr(qfx, "Resources"):  # not at the commit before
            resources = {"resources": qfx.Resources(**resources)}
        qfx.quantize(model, config, data, **resources, progress=False)
    return gpu


def count_all(names: list[str], *, lines: bool, accept: bool) -> None:
    """Print a line of JSON for each algorithm: its name, waits and copies at each count of batches."""
    for name in names:
        cells: list[str] = []
        for count in COUNTS:
            try:
                gpu = counted(name, count, accept=accept)
            except Exception as error:
                cells.append(type(error).__name__)
                continue
            cells.append(f"{gpu.waits.total():,} / {gpu.copies.total():,}")
            if lines:
                print(name, count, "waits", gpu.waits.most_common(6), "copies", gpu.copies.most_common(4), flush=True)
        print(json.dumps([name, *cells]), flush=True)


def counted_in(package: Path, names: list[str], *options: str) -> dict[str, list[str]]:
    """Count in a new process, with the `quark_fx` of a folder."""
    paths = [str(package), str(ROOT), str(ROOT / "tests")]
    command = [sys.executable, "-P", __file__, "--child", *options, "--only", *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    rows: dict[str, list[str]] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            if line.startswith("["):
                name, *cells = json.loads(line)
                rows[name] = cells
    return rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*LANGUAGE, *LEARNED]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help="default: %(default)s")
    parser.add_argument("--lines", action="store_true", help="show the lines that cause most")
    parser.add_argument("--accept", action="store_true", help="accept every new weight")
    parser.add_argument("--write", action="store_true", help="update these rows of docs/on_gpu.md")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        count_all(options.only, lines=options.lines, accept=options.accept)
        return
    asked = [f"--{name}" for name in ("lines", "accept") if getattr(options, name)]
    written = {} if options.accept or options.before != BEFORE else counted_rows(PAGE)
    before = {name: written[name][: len(COUNTS)] for name in options.only if name in written}
    if missing := [name for name in options.only if name not in before]:
        with tempfile.TemporaryDirectory() as folder:
            archive = subprocess.run(
                ["git", "archive", options.before, "quark_fx"], cwd=ROOT, check=True, capture_output=True
            )
            subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
            before |= counted_in(Path(folder), missing, *asked)
    after = counted_in(ROOT, options.only, *asked)
    failed = ["failed"] * len(COUNTS)
    rows = {name: [*before.get(name, failed), *after.get(name, failed)] for name in options.only}
    print(table_of(rows))
    if options.write:
        write(PAGE, table_of(counted_rows(PAGE) | rows))


def table_of(rows: Mapping[str, Sequence[str]]) -> str:
    """Return the table of counts, by algorithm."""
    header = ("algorithm", *(f"{when}, {count} batches" for when in ("before", "now") for count in COUNTS))
    return table(header, [(name, *cells) for name, cells in rows.items()])


def counted_rows(page: Path) -> dict[str, list[str]]:
    """Return the rows of the table between the markers of the page, by algorithm."""
    match = MARKED.search(page.read_text(encoding="utf-8"))
    assert match is not None
    return {name: cells for name, *cells in rows_of(match[2])}


def write(page: Path, text: str) -> None:
    """Replace the table between the markers of the page."""
    old = page.read_text(encoding="utf-8")
    page.write_text(MARKED.sub(lambda match: match[1] + text + match[3], old), encoding="utf-8")


if __name__ == "__main__":
    main()
