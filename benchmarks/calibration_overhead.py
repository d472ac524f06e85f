"""What observing costs: calibration against plain forward passes of the same captured graph.

    python -m benchmarks.calibration_overhead [--threads 1] [--rounds 5] [--write]

Every observer watches every quantized activation of the `int8_static` preset. A measurement is a plain pass over
the 32 samples and then the pass `calibrate` over the same, in one process, in turn (A B A B …) after one warm-up of
each; the ratio is that of neighbors. `calibrate` includes checking the inputs and reading the ranges off at the end;
"reading" is the last part alone, a fixed cost that more data does not raise.

Goals: at most 1.2 for min-max observers, at most 1.5 for histograms. `--write` updates
`results/calibration_overhead.md`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torchvision
from torch.fx import GraphModule

from benchmarks.common import Seconds, estimate_batch_norm, images, spread, table, timed
from benchmarks.experiment import experiment
from quark_fx import QuantConfig, observers, presets
from quark_fx.capture.capture import capture_graph
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.graph.pass_manager import run_passes
from quark_fx.passes import calibrate, insert_observers
from quark_fx.passes.calibrate import observe_batches, read_observers, watches_in

OBSERVERS: dict[str, tuple[observers.Observer, float]] = {
    "MinMax": (observers.MinMax(), 1.2),
    "Percentile": (observers.Percentile(), 1.5),
    "Mse": (observers.Mse(), 1.5),
    "Entropy": (observers.Entropy(), 1.5),
}
"""Each observer and the largest ratio that is good enough."""


def resnet() -> tuple[torch.nn.Module, list[Any]]:
    """Return ResNet-18 and 32 images of 224 x 224 in batches of 8."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    data = images(32, 8, 224, seed=1)
    estimate_batch_norm(model, data[:1])
    return model, [(x,) for x in data]


def minilm() -> tuple[torch.nn.Module, list[Any]]:
    """Return an encoder of MiniLM-L6's size and 32 sequences of 128 tokens in batches of 8."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536, vocab_size=30522
    )
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (32, 128), generator=torch.Generator().manual_seed(1))
    return model, [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in torch.split(ids, 8)]


MODELS = {"ResNet-18, 224": resnet, "MiniLM-L6, 128 tokens": minilm}


def with_observer(observer: observers.Observer) -> QuantConfig:
    """Return `int8_static` with `observer` on every activation."""
    base = presets.INT8_STATIC
    assert base.input is not None
    spec = base.input.replace(observer=observer)
    return base.replace(input=spec, output=spec)


def measure(name: str, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each observer."""
    model, data = MODELS[name]()
    captured = capture_graph(model, data[0])
    gm, _ = run_passes(captured.module, presets.INT8_STATIC.passes)
    batches = [captured.signature.flatten(*((), b) if isinstance(b, dict) else (b, {})) for b in data]

    def plain() -> None:
        with torch.no_grad():
            for batch in batches:
                gm(*batch)

    timed(plain)
    for observer, _ in OBSERVERS.values():
        observed(gm, observer, batches)
    pairs: dict[str, list[tuple[Seconds, Seconds]]] = {key: [] for key in OBSERVERS}
    for _ in range(rounds):
        for key, (observer, _) in OBSERVERS.items():
            pairs[key].append((timed(plain), observed(gm, observer, batches)))
    for key, (observer, _) in OBSERVERS.items():
        ratios = [b.cpu / a.cpu for a, b in pairs[key]]
        limit = OBSERVERS[key][1]
        yield [
            name,
            key,
            str(len(watches_in(watched(gm, observer, batches)[0]))),
            f"{statistics.median(a.cpu for a, _ in pairs[key]):.2f}",
            spread(ratios),
            spread([b.wall / a.wall for a, b in pairs[key]]),
            f"{reading(gm, observer, batches).cpu:.2f}",
            f"{limit}, {'met' if statistics.median(ratios) <= limit else 'missed'}",
        ]


def watched(gm: GraphModule, observer: observers.Observer, batches: list[list[Any]]) -> tuple[GraphModule, Context]:
    """Return a graph with observers in it, and the context that has the batches."""
    cpu = torch.device("cpu")
    context = Context(with_observer(observer), CalibrationData(ActivationCache(), unread=map(list, batches)), cpu)
    return run_passes(gm, [insert_observers], context=context)[0], context


def observed(gm: GraphModule, observer: observers.Observer, batches: list[list[Any]]) -> Seconds:
    """Return how long calibration takes."""
    graph, context = watched(gm, observer, batches)
    return timed(lambda: calibrate(graph, context))


def reading(gm: GraphModule, observer: observers.Observer, batches: list[list[Any]]) -> Seconds:
    """Return how long the ranges of all observers take to be read off."""
    graph, context = watched(gm, observer, batches)
    observe_batches(graph, context)
    assert context.calibrated is not None
    plan = context.calibrated.plan
    return timed(lambda: read_observers(graph, plan))


@experiment(page="calibration_overhead.md")
def main(
    threads: Annotated[int, "torch threads"] = 1,
    rounds: Annotated[int, "measurements of each ratio"] = 5,
) -> str:
    """Measure, and return the page."""
    torch.set_num_threads(threads)
    rows = [row for name in MODELS for row in measure(name, rounds)]
    header = (
        *("model", "observer", "observers", "plain CPU s", "CPU, calibrate / plain", "wall, calibrate / plain"),
        *("reading CPU s", "goal"),
    )
    return f"""# What observing costs

Calibration of every quantized activation of `int8_static` against plain forward passes of the same captured graph over
the same 32 samples in batches of 8, in one process, in turn; ratios of neighbors, median and range of
{rounds} rounds, {threads} thread(s). `calibrate` includes reading the ranges off at the end, a
fixed cost shown by itself as well. It lays convolutions out channels-last, which the plain passes do not: on ResNet-18
that saves more than observing costs. Reproduce with `python -m benchmarks.calibration_overhead`.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
