"""What quantization costs in accuracy: every preset on trained networks, in torch and in ONNX Runtime.

    python -m benchmarks.trained [--write]

The networks are those of the tests: a residual, a depthwise and an attention network trained on scikit-learn's digits
(accuracy on 897 held-out images), and the sentence encoder all-MiniLM-L6-v2 (mean cosine between the embeddings of 64
held-out sentences before and after). Nothing is measured on what it was calibrated with. `--write` updates
`docs/trained.md`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import quark_fx as qfx
from benchmarks.common import environment, publish, table
from quark_fx.presets import PRESETS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge
from networks import NETWORKS, trained


def digits(name: str, preset: str, folder: Path) -> tuple[float, float]:
    """Return the accuracy in percent of a network in torch and in ONNX Runtime."""
    network = trained(name)
    qmodel = qfx.quantize(network.model, preset, network.calibration, progress=False)
    run = judge.onnx_runtime(qfx.export.onnx(qmodel, folder / "model.onnx"), optimize=preset != "fp8_static")
    return network.accuracy(qmodel), network.accuracy(lambda x: run(x)[0])


def sentence_similarity(preset: str, folder: Path) -> tuple[float, float]:
    """Return the mean cosine between float and quantized embeddings in torch and in ONNX Runtime."""
    model, tokenizer = judge.encoder()
    held_out = judge.token_batches(tokenizer, sentences.HELD_OUT)
    with torch.no_grad():
        expected = [judge.embedding(model(**batch).last_hidden_state, batch) for batch in held_out]

    def similarity(run: Callable[[dict[str, Tensor]], Tensor]) -> float:
        found = [judge.embedding(run(batch), batch) for batch in held_out]
        return float(torch.cat([(a * b).sum(1) for a, b in zip(expected, found, strict=True)]).mean())

    qmodel = qfx.quantize(model, preset, judge.token_batches(tokenizer, sentences.CALIBRATION), progress=False)
    run = judge.onnx_runtime(qfx.export.onnx(qmodel, folder / "model.onnx"), optimize=preset != "fp8_static")
    names = qmodel.signature.input_names
    return (
        similarity(lambda batch: qmodel.run_batch(batch).last_hidden_state),
        similarity(lambda batch: run(*(batch[name] for name in names))[0]),
    )


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="update docs/trained.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    floats = [f"{trained(name).accuracy(trained(name).model):.2f}" for name in NETWORKS]
    rows = [("float", *floats, "1")]
    with tempfile.TemporaryDirectory() as folder:
        for preset in PRESETS:
            pairs = [digits(name, preset, Path(folder)) for name in NETWORKS]
            cosine = sentence_similarity(preset, Path(folder))
            rows.append((preset, *(f"{a:.2f} / {b:.2f}" for a, b in pairs), "{:.4f} / {:.4f}".format(*cosine)))
            print(*rows[-1], flush=True)
    header = ("preset", *(f"{name}, %" for name in NETWORKS), "MiniLM, cosine")
    page = f"""# Accuracy on trained networks

Torch / ONNX Runtime. `cnn`, `mobilenet` (depthwise, ReLU6) and `vit` were trained on scikit-learn's digits; accuracy
is on 897 held-out images, one of which is 0.11 %. MiniLM is the sentence encoder all-MiniLM-L6-v2; its figure is the
mean cosine between the embeddings of 64 held-out sentences before and after. Calibration uses other data throughout.
Reproduce with `python -m benchmarks.trained`.

{table(header, rows)}

{environment()}
"""
    publish(page, "trained.md" if arguments.write else None)


if __name__ == "__main__":
    main()
