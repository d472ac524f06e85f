"""Random models through the whole pipeline: `python -m benchmarks.random_models --count 1000`.

Each seed is a model of `tests/random_models.py` and a preset: captured, quantized, saved and loaded (odd seeds),
exported and compared with torch. Prints how many were right, refused by name, wrong, or ended in an exception that is
not ours, and the seed of each that was not right.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

import quark_fx as qfx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from random_models import random_model  # noqa: E402 (beside the tests)

PRESETS = (
    *("int8_static", "int8_static", "int8_static_mse", "int8_dynamic", "int8_weight_only", "int16_act_int8_weight"),
    *("int4_weight_only", "fp8_static", "fp16", "bf16", "xint8", "w8a8_dynamic", "mxfp8_e4m3", "mxint8", "bfp16"),
)
STEPS = 1.001
"""Steps a value may be off by: two right kernels may round what lies between two codes either way."""


def outcome(seed: int, folder: Path) -> tuple[str, str]:
    """Return how a seed ends, `right`, `refused`, `wrong` or `raw`, and what there is to say of it."""
    preset = random.Random(seed).choice(PRESETS)
    try:
        case = random_model(seed)
        qmodel = qfx.quantize(case.model, preset, case.batches[:2], progress=False)
        shapes = [_shapes(qmodel(*batch)) for batch in case.batches]
        if shapes != [_shapes(case.model(*batch)) for batch in case.batches]:
            return "wrong", f"{preset}; {case.words}: shapes differ from the model's"
        if seed % 2:
            qmodel.save(folder / str(seed))
            qmodel = qfx.load(folder / str(seed))
        path = qfx.export.onnx(qmodel, folder / "model.onnx")
        ends = qfx.verify(qmodel, path, case.batches)
        nodes = ends if ends.max_steps <= STEPS else qfx.verify(qmodel, path, case.batches, per_node=True)
        if nodes.max_steps > STEPS:
            return "wrong", f"{preset}; {case.words}: {nodes.max_steps:.3g} steps"
    except qfx.QuarkError as error:
        if "does not run" in str(error) or "does not load" in str(error):
            return "wrong", f"{preset}; {case.words}; {' '.join(str(error).split())[:300]}"
        return "refused", f"{preset}; {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        words = " ".join(str(error).split())[:300]
        return "raw", f"{preset}; {type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {words}"
    return "right", ""


def _shapes(result: object) -> list[torch.Size]:
    return [leaf.shape for leaf in torch.utils._pytree.tree_leaves(result)]


def main() -> None:
    """Run the seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after that many")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    start, count = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.first, options.first + options.count):
            if time.monotonic() - start > options.seconds:
                break
            what, words = outcome(seed, Path(folder))
            count[what] += 1
            if words:
                print(f"{seed:6} {what:8} {words}", flush=True)
    print(f"\n| seeds | {' | '.join(('right', 'refused by name', 'wrong', 'raw exception'))} |\n|---|---|---|---|---|")
    print(f"| {count.total()} | {' | '.join(str(count[what]) for what in ('right', 'refused', 'wrong', 'raw'))} |")


if __name__ == "__main__":
    main()
