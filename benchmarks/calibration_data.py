"""What GPTQ learns from text, from the model's own samples, and from random tokens.

    python -m benchmarks.calibration_data [--data random ...] [--write]

SmolLM2-135M of `benchmarks.real`, int4 weights in groups of 64, rounded by GPTQ on 16 windows of 512 tokens; judged on
8,176 tokens of other documents of the same source as the text. Seeds are fixed. Goal: own samples do better than random
tokens, and not much worse than text, which is of the kind that judges.

`--write` updates the rows of `results/calibration_data.md` that were measured, after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import torch

import quark_fx as qfx
from benchmarks.common import one_thread, rows_of, table, text_of
from benchmarks.experiment import Option, experiment
from benchmarks.real import smollm2
from quark_fx.data import generated_windows

PAGE = "calibration_data.md"

WINDOWS, LENGTH = 16, smollm2.WINDOW

_HEADER = ("calibrated on", "perplexity", "KL", "data, s", "quantize, s")


def text() -> list[Any]:
    """Return windows of Wikipedia."""
    return smollm2.load(WINDOWS).calibration


def own() -> list[Any]:
    """Return windows that the model generates."""
    model = smollm2.load(WINDOWS).model
    return generated_windows(model, length=LENGTH, count=WINDOWS, batch_size=WINDOWS)


def random() -> list[Any]:
    """Return windows of tokens drawn evenly from the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    config: Any = smollm2.load(WINDOWS).model.config
    return [{"input_ids": torch.randint(config.vocab_size, (WINDOWS, LENGTH), generator=generator)}]


DATA: dict[str, tuple[str, Callable[[], list[Any]] | None]] = {
    "none": ("nothing: to nearest", None),
    "text": ("text of Wikipedia", text),
    "own": ("own samples", own),
    "random": ("random tokens", random),
}


def measured(name: str) -> tuple[str, ...]:
    """Return the row of a kind of data."""
    title, make = DATA[name]
    real = smollm2.load(WINDOWS)
    start = time.process_time()
    batches = text() if make is None else make()
    batches = [{"input_ids": part} for batch in batches for part in batch["input_ids"].split(4)]
    made = time.process_time()
    preset = qfx.presets.W4A16_RTN if make is None else qfx.presets.W4A16_GPTQ
    qmodel = qfx.quantize(real.model, preset.replace(group_size=64), batches, progress=False)
    done = time.process_time()
    figures = real.judge(qmodel)
    return (
        title,
        f"{figures['perplexity']:.2f}",
        f"{figures['KL']:.4f}",
        "–" if make in (None, text) else f"{made - start:.0f}",
        f"{done - made:.0f}",
    )


def kept() -> dict[str, tuple[str, ...]]:
    """Return the rows of the page that there is, by what they were calibrated on."""
    return {row[0]: tuple(row) for row in rows_of(text_of(PAGE))}


def page(rows: dict[str, tuple[str, ...]]) -> str:
    """Return the page; rows are in the order of the benchmark."""
    ordered = [rows[title] for title, _ in (("float", None), *DATA.values()) if title in rows]
    return f"""# Calibration without text

Where there is no text, a language model can be calibrated on what it generates itself (`qfx.data.generated_windows`).
SmolLM2-135M-Instruct, int4 weights in groups of 64, rounded by GPTQ on {WINDOWS} windows of {LENGTH} tokens; perplexity
and the mean divergence from the float model (KL, nats per token) on 8,176 tokens of Wikipedia that nothing was
calibrated on. The text that calibrates is of the same source as the text that judges, which favors it. Times are
processor seconds on one thread. Reproduce with `python -m benchmarks.calibration_data`;
[Accuracy on models with real weights](real.md) says which packages that needs.

{table(_HEADER, ordered)}
"""


@experiment(page=PAGE)
def main(data: Annotated[Sequence[str], Option(choices=DATA)] = tuple(DATA), write: bool = False) -> Iterator[str]:
    """Measure, and yield the page as it grows."""
    rows = kept() if write else {}
    with one_thread():
        figures = smollm2.load(WINDOWS).judge(smollm2.load(WINDOWS).model)
        rows["float"] = ("float", f"{figures['perplexity']:.2f}", f"{figures['KL']:.4f}", "–", "–")
        for name in data:
            row = measured(name)
            rows[row[0]] = row
            yield page(rows)


if __name__ == "__main__":
    main()
