"""Random models through the whole pipeline: `python -m benchmarks.random_models --count 1000`.

Each seed is a model of `tests/random_models.py`, a preset with more or fewer operators left out, and a format of ONNX
file: captured, quantized, saved and loaded (odd seeds), exported and compared with torch. Prints how many were right,
refused by name, wrong, or ended in an exception that is not ours; the seed of each that was not right; and how many
models with each preset, in each format and with each row of the operator table came through.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

import quark_fx as qfx
from benchmarks.experiment import experiment
from quark_fx.config.quant_config import Override, QuantConfig, Target
from quark_fx.export.to_onnx import formats as onnx_formats
from quark_fx.graph.nodes import target_name
from quark_fx.graph.operators import MOTIONS, TARGETS
from quark_fx.presets import PRESETS
from quark_fx.targets.onnxruntime import ARITHMETIC

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from random_models import random_model  # noqa: E402 (beside the tests)

COMMON = ("int8_static",) * 6 + (
    "int8_static_mse",
    "int8_dynamic",
    "int8_dynamic",
    "int4_weight_only",
    "xint8",
    "xint8",
)
"""Presets that are drawn more often than once in a round."""
FORMATS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("int8_static", "int8_static_mse", "int8_dynamic"), ("qdq", "qdq", "qoperator")),
    **dict.fromkeys(("int8_weight_only", "int4_weight_only"), ("qdq", "matmul_nbits")),
    **dict.fromkeys((name for name in PRESETS if name.startswith("w4a16")), ("qdq", "matmul_nbits")),
    "xint8": ("qdq", "qdq", "qoperator", "vitis"),
    "bfp16": ("qdq", "vitis"),
}
"""Formats that hold a preset, drawn nine times in ten; otherwise any is, and may be refused. Not listed: `qdq`."""
STEPS = 1.001
"""Steps a value may be off by: two right kernels may round what lies between two codes either way."""


@dataclass(frozen=True)
class Outcome:
    """How a seed ends.

    Attributes:
        what: `right`, `refused`, `wrong` or `raw`.
        words: what there is to say of it.
        preset: the preset's name.
        format: of the ONNX file.
        operators: that its graph calls; empty if it ended before there was one.
    """

    what: str
    words: str
    preset: str
    format: str
    operators: frozenset[str] = frozenset()


def drawn(seed: int) -> tuple[str, QuantConfig, str]:
    """Return the preset of a seed, its configuration and the format of its file."""
    dice = random.Random(seed)
    name = dice.choice([*PRESETS, *COMMON])
    config = PRESETS[name]
    if dice.random() < 0.7:  # the last matrix product of these models would be taken for the head
        config = config.replace(exclude=tuple(pattern for pattern in config.exclude if pattern != "op:head"))
    if config.exclude == () and dice.random() < 0.2:
        config = config.replace(
            exclude=(dice.choice(("layers.0", "layers.1", "op:conv", "op:linear", "op:embedding")),)
        )
    if config.target is not Target.DPU and dice.random() < 0.2:
        config = config.replace(overrides=(*config.overrides, Override(pattern="op:matmul")))
    of_preset = FORMATS.get(name, ("qdq",))
    return name, config, dice.choice(of_preset if dice.random() < 0.9 else tuple(onnx_formats.FORMATS))


def outcome(seed: int, folder: Path) -> Outcome:
    """Return how a seed ends."""
    preset, config, form = drawn(seed)
    operators: frozenset[str] = frozenset()
    words = ""

    def ended(what: str, why: object) -> Outcome:
        return Outcome(what, f"{preset}, {form}; {words}: {' '.join(str(why).split())[:300]}", preset, form, operators)

    try:
        case = random_model(seed)
        words = case.words
        qmodel = qfx.quantize(case.model, config, case.batches[:2], progress=False)
        operators = frozenset(target_name(node) for node in qmodel.graph_module.graph.nodes)
        shapes = [_shapes(qmodel(*batch)) for batch in case.batches]
        if shapes != [_shapes(case.model(*batch)) for batch in case.batches]:
            return ended("wrong", "shapes differ from the model's")
        if seed % 2:
            qmodel.save(folder / str(seed))
            qmodel = qfx.load(folder / str(seed))
        path = qfx.export.onnx(qmodel, folder / "model.onnx", format=form)
        ends = qfx.verify(qmodel, path, case.batches)
        nodes = ends if ends.max_steps <= STEPS else qfx.verify(qmodel, path, case.batches, per_node=True)
        if nodes.max_steps > STEPS:
            return ended("wrong", f"{nodes.max_steps:.3g} steps")
    except qfx.QuarkError as error:
        runs = "does not run" not in str(error) and "does not load" not in str(error)
        return ended("refused" if runs else "wrong", f"{type(error).__name__}: {error}")
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        return ended("raw", f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}: {error}")
    return Outcome("right", "", preset, form, operators)


def _shapes(result: object) -> list[torch.Size]:
    return [leaf.shape for leaf in torch.utils._pytree.tree_leaves(result)]


@experiment()
def main(
    count: Annotated[int, "how many seeds"] = 100,
    first: Annotated[int, "the first of them"] = 0,
    seconds: Annotated[float, "stop after that many"] = float("inf"),
) -> None:
    """Run the seeds and print the table."""
    start, found = time.monotonic(), list[Outcome]()
    with tempfile.TemporaryDirectory() as folder, suppress(KeyboardInterrupt):  # which ends it with what was seen
        for seed in range(first, first + count):
            if time.monotonic() - start > seconds:
                break
            found.append(outcome(seed, Path(folder)))
            if found[-1].words:
                print(f"{seed:6} {found[-1].what:8} {found[-1].words}", flush=True)
    counts = Counter(one.what for one in found)
    right = [one for one in found if one.what == "right"]
    print(f"\nSeeds {first} to {first + len(found) - 1}, {time.monotonic() - start:.0f} s.\n")
    print("| seeds | right | refused by name | wrong | raw exception |\n|---|---|---|---|---|")
    print(f"| {len(found)} | {' | '.join(str(counts[what]) for what in ('right', 'refused', 'wrong', 'raw'))} |")
    print("\nOf those that were right:")
    _say("presets", PRESETS, Counter(one.preset for one in right))
    _say("formats", onnx_formats.FORMATS, Counter(one.format for one in right))
    operators = Counter(name for one in right for name in one.operators)
    _say("operators with weights", sorted(TARGETS), operators)
    _say("operators that move data or have integer kernels", sorted(ARITHMETIC.union(MOTIONS)), operators)


def _say(what: str, names: Iterable[str], count: Counter[str]) -> None:
    print(f"{what}: {', '.join(f'{name} {count[name]}' for name in names)}")


if __name__ == "__main__":
    main()
