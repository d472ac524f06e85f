"""What learning scales from the whole model's predictions adds to error feedback: divergence, and processor time.

    python -m benchmarks.tuned [--models llama gpt2 smollm2] [--bits 4 3 2] [--untuned] [--write]

`w4a16_best_asym` at several widths, and with `TuneScales` after it. `llama` and the others are the trained models of
`benchmarks.language_models`: groups of 128, 64 windows of 256 tokens in batches of 4, which learn four times each.
`smollm2` has real weights (`benchmarks.real.smollm2`): groups of 64, 128 windows of 512 tokens in batches of 4, which
learn three times. Goals there: a divergence of at most 0.06 at 4 bits, of at most 0.20 at 3. One run measures both:
what the scales were before `TuneScales` is put back into its result. Time is that of `quantize`, of one thread, in
processor seconds, to the end of the passes before `TuneScales` and to the end. `--untuned` leaves `TuneScales` out.
`--write` updates the rows of these models and widths in `results/tuned.md`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from torch.fx import GraphModule

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import environment, one_thread, rows_of, sections_of, table
from benchmarks.experiment import Option, experiment
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.graph.nodes import set_parameter, tensor_of
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.passes import TuneScales
from quark_fx.presets import W4A16_BEST_ASYM

REAL = "smollm2"
"""The model with real weights."""

WINDOWS = 128
"""Windows that calibrate it."""

SMALL = "trained for these measurements, groups of 128, 64 windows of 256 tokens"
REAL_WEIGHTS = "SmolLM2-135M, groups of 64, 128 windows of 512 tokens"

Judged = tuple[Any, list[Any], Any, int, int]
"""A model, its calibration batches, what judges it, the size of groups, and how often a batch is learned from."""


def judged(name: str) -> Judged:
    """Return a model with its data, and how it is measured."""
    if name == REAL:
        from benchmarks.real import smollm2

        real = smollm2.load(calibration=WINDOWS)
        return real.model, real.calibration, real.judge, 64, 3
    trained = language_models.load(name)
    batches = [{"input_ids": ids} for batch in trained.calibration for ids in batch["input_ids"].split(4)]
    return trained.model, batches, trained.figures, 128, 4


@graph_pass(exact=True, stage=Stage.QUANTIZED)
class Before:
    """What `TuneScales` starts from: the scales, and the processor time when they were known."""

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Copy the scales of `gm`."""
        names = {weight.scale_name for weight in quantized_weights(gm, context.plan)}
        self.scales = {name: tensor_of(gm, name).detach().clone() for name in names}
        self.time = time.process_time()
        return 0

    def restore(self, qmodel: qfx.QuantizedModel) -> None:
        """Put the scales back."""
        for name, scale in self.scales.items():
            set_parameter(qmodel.graph_module, name, scale)


def rows(name: str, bits: Sequence[int], *, tuned: bool) -> list[tuple[str, ...]]:
    """Return a row for each width, without and, if asked, with the scales learned."""
    model, batches, judge, group, epochs = judged(name)
    found, weight = list[tuple[str, ...]](), W4A16_BEST_ASYM.weight
    assert weight is not None
    steps = epochs * (len(batches) - max(1, len(batches) // 8))
    for width in bits:
        learned = (TuneScales(iterations=steps),) if tuned else ()
        passes = (*W4A16_BEST_ASYM.passes, before := Before(), *learned)
        config = W4A16_BEST_ASYM.replace(weight=weight.replace(format=f"int{width}", group_size=group), passes=passes)
        start = time.process_time()
        qmodel = qfx.quantize(model, config, batches, progress=False)
        end, last = time.process_time(), judge(qmodel)
        before.restore(qmodel)
        made = [("", judge(qmodel), before.time), (f", TuneScales, {steps} steps", last, end)]
        for method, figures, until in made if tuned else made[:1]:
            kl, seconds = f"{figures['KL']:.5f}", f"{until - start:.0f}"
            found.append((str(width), f"w4a16_best_asym{method}", f"{figures['perplexity']:.2f}", kl, seconds))
            print(name, *found[-1], flush=True)
    return found


@experiment(page="tuned.md", own_environment=True)
def main(
    models: Annotated[Sequence[str], Option(choices=(*language_models.MODELS, REAL))] = ("llama", REAL),
    bits: Sequence[int] = (4, 3, 2),
    untuned: Annotated[bool, "leave TuneScales out"] = False,
    write: bool = False,
) -> str:
    """Measure, and return the page."""
    header = ("bits", "method", "perplexity", "KL", "quantize, CPU s")
    sections = sections_of("tuned.md") if write else {}
    with one_thread():
        for name in models:
            title = f"`{name}`: {SMALL if name != REAL else REAL_WEIGHTS}"
            (earlier,) = [text for of, text in sections.items() if of.startswith(f"`{name}`")] or [""]
            measured = list(map(str, bits))
            made = {line.partition(" ")[0]: line for line in earlier.splitlines() if " bits: Python " in line}
            every: list[tuple[str, ...]] = [tuple(row) for row in rows_of(earlier) if row[0] not in measured]
            every += rows(name, bits, tuned=not untuned)
            made |= {one: f"{one} bits: {environment()}" for one in measured}
            sections = {of: text for of, text in sections.items() if text != earlier}
            every.sort(key=lambda row: -int(row[0]))
            ends = "\n\n".join(line for _, line in sorted(made.items(), reverse=True))
            sections[title] = f"## {title}\n\n{table(header, every)}\n\n{ends}\n"
    return f"""# Scales learned from the whole model's predictions

`w4a16_best_asym` chooses codes operator by operator; [`TuneScales`](../../docs/algorithms.md#tunescales) then learns
scales, and codes stay. Perplexity of held-out text, and the mean divergence (KL, nats per token) of the predictions
from the float model's. One thread. Reproduce with `python -m benchmarks.tuned`.

{chr(10).join(text for _, text in sorted(sections.items()))}"""


if __name__ == "__main__":
    main()
