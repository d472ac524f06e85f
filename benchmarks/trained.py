"""What quantization costs in accuracy: every preset on trained networks, in torch and in ONNX Runtime.

    python -m benchmarks.trained [--presets xint8 ...] [--write]

The networks are those of the tests: a residual, a depthwise and an attention network trained on scikit-learn's digits
(accuracy on 897 held-out images), and the sentence encoder all-MiniLM-L6-v2 (mean cosine between the embeddings of 64
held-out sentences before and after). Nothing is measured on what it was calibrated with. `xint8, unaligned` is the
preset without `AlignShifts`. `--write` updates `results/trained.md`; rows of presets that were not measured stay.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import quark_fx as qfx
from benchmarks.common import rows_of, table, text_of
from benchmarks.experiment import Option, experiment
from quark_fx.config.quant_config import QuantConfig
from quark_fx.evaluation import Embedding
from quark_fx.graph.pass_manager import pass_name
from quark_fx.presets import PRESETS, XINT8

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge
from networks import NETWORKS, trained

UNALIGNED = XINT8.replace(passes=tuple(p for p in XINT8.passes if pass_name(p) != "AlignShifts"))
CONFIGS: dict[str, QuantConfig] = PRESETS | {"xint8, unaligned": UNALIGNED}


def digits(name: str, preset: str, folder: Path) -> tuple[float, float]:
    """Return the accuracy in percent of a network in torch and in ONNX Runtime."""
    network = trained(name)
    qmodel = qfx.quantize(network.model, CONFIGS[preset], network.calibration, progress=False)
    return network.accuracy(qmodel), network.accuracy(qfx.export.onnx(qmodel, folder / "model.onnx"))


def sentence_similarity(preset: str, folder: Path) -> tuple[float, float]:
    """Return the mean cosine between float and quantized embeddings in torch and in ONNX Runtime."""
    model, tokenizer = judge.encoder()
    task = Embedding(judge.token_batches(tokenizer, sentences.HELD_OUT), reference=model)
    qmodel = qfx.quantize(model, CONFIGS[preset], judge.token_batches(tokenizer, sentences.CALIBRATION), progress=False)
    file = qfx.export.onnx(qmodel, folder / "model.onnx")
    return qfx.evaluate(qmodel, task)["cosine"], qfx.evaluate(file, task)["cosine"]


def merged(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Return the rows and, where they are of some presets only, those of the page for the others."""
    known = {row[0]: tuple(row) for row in rows_of(text_of("trained.md"))} | {row[0]: row for row in rows}
    return [known[name] for name in ("float", *CONFIGS) if name in known]


@experiment(page="trained.md")
def main(
    presets: Annotated[Sequence[str], Option(choices=list(CONFIGS), metavar="PRESET")] = tuple(CONFIGS),
    write: bool = False,
) -> str:
    """Measure, and return the page."""
    floats = [f"{trained(name).accuracy(trained(name).model):.2f}" for name in NETWORKS]
    rows: list[tuple[str, ...]] = [("float", *floats, "1")]
    with tempfile.TemporaryDirectory() as folder:
        for preset in presets:
            pairs = [digits(name, preset, Path(folder)) for name in NETWORKS]
            cosine = sentence_similarity(preset, Path(folder))
            rows.append((preset, *(f"{a:.2f} / {b:.2f}" for a, b in pairs), "{:.4f} / {:.4f}".format(*cosine)))
            print(*rows[-1], flush=True)
    if write:
        rows = merged(rows)
    header = ("preset", *(f"{name}, %" for name in NETWORKS), "MiniLM, cosine")
    return f"""# Accuracy on trained networks

Torch / ONNX Runtime. `cnn`, `mobilenet` (depthwise, ReLU6) and `vit` were trained on scikit-learn's digits; accuracy
is on 897 held-out images, one of which is 0.11 %. MiniLM is the sentence encoder all-MiniLM-L6-v2; its figure is the
mean cosine between the embeddings of 64 held-out sentences before and after. Calibration uses other data throughout.
Reproduce with `python -m benchmarks.trained`.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
