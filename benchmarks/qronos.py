"""Whether Qronos as it was published rounds better than `GPTQ(asymmetry=1)`: divergence of small language models.

    python -m benchmarks.qronos [--models llama llama_outliers] [--write]

The models are those of `benchmarks.language_models`; weights are in groups of 64, at 2 and 3 bits with zero points.
Qronos is the solver of `tests/extensions/qronos.py`. `--write` updates `results/qronos.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import one_thread, table
from benchmarks.experiment import Option, experiment
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.passes import GPTQ

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from extensions.qronos import Qronos

BITS = {4: "symmetric_full", 3: "asymmetric", 2: "asymmetric"}
"""How codes lie around zero, by width."""

METHODS: dict[str, GraphPass] = {
    "GPTQ(asymmetry=0.5)": GPTQ(asymmetry=0.5),
    "GPTQ(asymmetry=1)": GPTQ(asymmetry=1.0),
    "GPTQ(asymmetry=1, damping=1e-4)": GPTQ(asymmetry=1.0, damping=1e-4),
    "Qronos(alpha=1e-6)": Qronos(),
    "Qronos(alpha=1e-3)": Qronos(alpha=1e-3),
}


def divergence(model: str, bits: int, method: str) -> float:
    """Return the mean divergence of the predictions of a quantized model."""
    trained, preset = language_models.load(model), qfx.presets.W4A16_GPTQ
    assert preset.weight is not None
    weight = preset.weight.replace(format=f"int{bits}", symmetry=BITS[bits], group_size=64)
    config = preset.replace(weight=weight, passes=(*preset.passes[:-1], METHODS[method]))
    found = trained.divergence(qfx.quantize(trained.model, config, trained.calibration, progress=False))
    print(model, bits, method, f"{found:.5f}", flush=True)
    return found


@experiment(page="qronos.md")
def main(
    models: Annotated[Sequence[str], Option(choices=language_models.MODELS)] = ("llama", "llama_outliers"),
) -> str:
    """Measure, and return the page."""
    header = ("rounded by", *(f"{bits} bits" for bits in BITS))
    parts = list[str]()
    with one_thread():
        for model in models:
            rows = [(name, *(f"{divergence(model, b, name):.5f}" for b in BITS)) for name in METHODS]
            parts.append(f"## `{model}`\n\n{table(header, rows)}\n")
    return f"""# Qronos, as published

Mean divergence from the float model (KL, nats per token) of small language models, trained here on the text that comes
with Python, on 40,800 tokens that nothing was calibrated on. Weights are in groups of 64, at 2 and 3 bits with zero
points, and 64 windows of 256 tokens calibrate. `Qronos` is the published update in float64
(`tests/extensions/qronos.py`); `GPTQ(asymmetry=1)` differs in the first column and in what `damping` is a share of
([how](../../docs/algorithms.md#gptq)). Reproduce with `python -m benchmarks.qronos`.

{chr(10).join(parts)}
"""


if __name__ == "__main__":
    main()
