"""What passes that learn cost: AdaRound beside AIMET's, equalization and smoothing beside a forward pass.

    python -m benchmarks.learning_cost [--peer-python aimet/bin/python] [--rounds 3] [--write]

AdaRound: int4 weights, symmetric, a scale for each output channel, activations in float; the same float network, the
same calibration and held-out images for both tools, each bound to one core. The errors and the SQNR are computed here,
for the weights of either tool, on one float graph with its batch norms folded. The peer runs in an environment of its
own (see `benchmarks/peers`); without `--peer-python` its rows are left out. `--folder` keeps the peer's jobs: one that
is finished there, with the same options, is read instead of run.

Equalization and smoothing: the pass and one float forward pass over the same calibration batches, channels-last where
there are convolutions, in one process, in turn, after one warm-up of each.

All seconds are of the processor, of all threads of a process bound to one core. `--write` updates
`results/learning_cost.md`.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node

import quark_fx as qfx
from benchmarks import composed_digits
from benchmarks.common import environment, estimate_batch_norm, images, one_core, publish, spread, sqnr, table, timed
from quark_fx import presets
from quark_fx.capture.capture import Captured, capture_graph
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.calibration import fast_layout
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import parameter, set_parameter
from quark_fx.graph.pass_manager import GraphPass, copy_graph, run_passes
from quark_fx.graph.signature import split_batch
from quark_fx.numbers.formats import INT4
from quark_fx.observers import Mse
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.cross_layer_equalization import CrossLayerEqualization
from quark_fx.passes.smooth_quant import SmoothQuant
from quark_fx.plan.placement import Coded, plan_quantization

ROOT = Path(__file__).resolve().parent.parent

INT4_WEIGHTS = QuantConfig(
    weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL, observer=Mse()), passes=presets.INT8_STATIC.passes
)
"""What both tools round to; the peer chooses its scales by a search for the best SQNR."""

PEER_BATCH = 32
"""Images that the peer runs at once; also what its steps take."""

AGREED = 60.0
"""dB that two things computed in different ways, which are the same up to float rounding, agree to at least."""

LIMIT = 2.0
"""Forward passes that equalization or smoothing may cost."""


@dataclass(frozen=True)
class Network:
    """A network and its images.

    Attributes:
        name: in the table.
        function: "module:function" that builds it, for the peer.
        model: in eval mode.
        calibration: batches of images.
        held_out: images to judge by.
        batch: how many of them at once.
        iterations: the peer's, for each layer.
        methods: ours.
    """

    name: str
    function: str
    model: nn.Module
    calibration: list[Tensor]
    held_out: Tensor
    batch: int
    iterations: int
    methods: tuple[AdaRound, ...]


@dataclass(frozen=True)
class Rounded:
    """What a tool made.

    Attributes:
        method: the row.
        weights: by the name of the module they belong to.
        seconds: CPU seconds from module to quantized network, `None` where nothing was timed.
        learning: CPU seconds of AdaRound alone.
    """

    method: str
    weights: dict[str, Tensor]
    seconds: float | None = None
    learning: float | None = None


def small_resnet(iterations: int) -> Network:
    """Return the trained ResNet of composed digits with 1,024 and 1,000 images."""
    trained = composed_digits.load("resnet", 0)
    held_out = trained.images[:1000]
    return Network(
        name="small ResNet, 12 x 20",
        function="benchmarks.composed_digits:resnet",
        model=trained.model,
        calibration=trained.calibration,
        held_out=held_out,
        batch=64,
        iterations=iterations,
        methods=(AdaRound(iterations=0), AdaRound()),
    )


def resnet18(iterations: int, quick: bool) -> Network:
    """Return ResNet-18 with random weights and the batch norm statistics of its 32 images."""
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    whole = torch.cat(images(32, 8, 224, seed=1))
    estimate_batch_norm(model, whole.split(8))
    return Network(
        name="ResNet-18, 224 x 224",
        function="torchvision.models:resnet18",
        model=model,
        calibration=list(whole.split(16)),
        held_out=images(32, 8, 224, seed=2)[0],
        batch=8,
        iterations=iterations,
        methods=(AdaRound(iterations=0), AdaRound(iterations=iterations), *(() if quick else (AdaRound(),))),
    )


class FloatGraph:
    """The float graph, batch norms folded, that the weights of both tools are put into.

    Attributes:
        operators: those whose weights are quantized, by module name.
        expected: logits of the network as it came, for its held-out images.
    """

    def __init__(self, network: Network) -> None:
        self.network = network
        self.captured: Captured = capture_graph(network.model, network.calibration[0])
        self.gm, _ = run_passes(self.captured.module, INT4_WEIGHTS.passes)
        self.plan = {op.node.name: op for op in plan_quantization(self.gm, INT4_WEIGHTS).operators}
        self.operators = {op.name: op for op in self.plan.values() if isinstance(op, Coded)}
        with torch.no_grad():
            self.expected = torch.cat([network.model(x) for x in self._batches()])

    def weight(self, operator: Coded) -> Tensor:
        """Return the float weight of an operator."""
        return parameter(self.gm, operator.weight_node)

    def logits(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Return the logits with `weights` in place of the float ones."""
        gm = copy_graph(self.gm)
        for name, operator in self.operators.items():
            set_parameter(gm, str(operator.weight_node.target), weights[name])
        with torch.no_grad():
            return torch.cat([gm(*self._leaves(x))[0] for x in self._batches()])

    def errors(self, weights: Mapping[str, Tensor]) -> list[float]:
        """Return, for each operator, the squared error of its output for float inputs over the squared output."""
        comparison = _Comparison(self.gm, {op.node: weights[name] for name, op in self.operators.items()})
        with torch.no_grad():
            for x in self._batches():
                comparison.run(*self._leaves(x))
        return [error / square for error, square in comparison.sums.values()]

    def _batches(self) -> Iterator[Tensor]:
        yield from self.network.held_out.split(self.network.batch)

    def _leaves(self, x: Tensor) -> list[Any]:
        return self.captured.signature.flatten((x,), {})


class _Comparison(Interpreter):
    """Runs a float graph, and every operator that has another weight once more with it."""

    def __init__(self, gm: GraphModule, weights: Mapping[Node, Tensor]) -> None:
        super().__init__(gm)
        self.weights = weights
        self.sums: dict[str, tuple[float, float]] = {}

    def run_node(self, n: Node) -> Any:
        """Add the squares of the error and of the output to `sums`."""
        output = super().run_node(n)
        if n in self.weights and (linear := Linear.of(n)) is not None:
            assert callable(n.target)
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            changed = [*args[: linear.weight_at], self.weights[n], *args[linear.weight_at + 1 :]]
            got: Tensor = n.target(*changed, **kwargs)
            error, square = self.sums.get(n.name, (0.0, 0.0))
            error += float((got - output).double().square().sum())
            self.sums[n.name] = error, square + float(output.double().square().sum())
        return output


class Clocked:
    """A pass of the quantized graph whose CPU seconds are kept; `report()` has those on the clock."""

    def __init__(self, inner: AdaRound) -> None:
        self.inner, self.promise, self.cpu = inner, inner.promise, 0.0  # type: ignore[attr-defined]

    def __call__(self, gm: GraphModule, context: Context) -> int:
        start = time.process_time()
        changed = self.inner(gm, context)
        self.cpu = time.process_time() - start
        return changed


def by_us(network: Network, graph: FloatGraph, learned: AdaRound | None) -> Rounded:
    """Quantize, to nearest or with AdaRound.

    Raises:
        RuntimeError: if the quantized network is not the float graph with the weights it is judged by.
    """
    clocked = None if learned is None else Clocked(learned)
    config = INT4_WEIGHTS.replace(passes=(*INT4_WEIGHTS.passes, *([clocked] if clocked else [])))
    made: list[qfx.QuantizedModel] = []
    with one_core():
        seconds = timed(lambda: made.append(qfx.quantize(network.model, config, network.calibration, progress=False)))
    gm = made[0].graph_module
    weights = {weight.name: weight.value(gm) for weight in quantized_weights(gm, graph.plan)}
    logits = torch.cat([made[0].run_batch(x) for x in network.held_out.split(network.batch)])
    if sqnr(graph.logits(weights), logits) < AGREED:
        raise RuntimeError(f"{network.name}, {learned}: the quantized network does not compute with these weights")
    return Rounded(_method(learned), weights, seconds.cpu, None if clocked is None else clocked.cpu)


def _method(learned: AdaRound | None) -> str:
    if learned is None:
        return "quark_fx, to nearest"
    if learned == AdaRound():
        return f"quark_fx, AdaRound(): descent, {learned.iterations} iterations"
    steps = f", {learned.iterations} iterations" if learned.iterations else " alone"
    return f"quark_fx, AdaRound(iterations={learned.iterations}): descent{steps}"


def by_peer(network: Network, graph: FloatGraph, python: Path, folder: Path) -> list[Rounded]:
    """Round to nearest and learn with AIMET.

    Raises:
        RuntimeError: if the peer fails, or did not start from the same float weights.
    """
    result, output = run_peer(network, python, folder)
    original, nearest, rounded = (load_file(output / f"{name}.safetensors") for name in ("float", "nearest", "rounded"))
    for name, operator in graph.operators.items():
        float_error = sqnr(graph.weight(operator), original[f"{name}.weight"])
        if float_error < AGREED:
            raise RuntimeError(f"{network.name}: {name} is another float weight at the peer ({float_error:.0f} dB)")
    learning = result["seconds"]["adaround"]["cpu"]
    method = f"AIMET, AdaRound, {network.iterations:,} iterations"
    return [
        Rounded("AIMET, to nearest", _by_module(graph, nearest)),
        Rounded(method, _by_module(graph, rounded), learning + result["seconds"]["fold"]["cpu"], learning),
    ]


def run_peer(network: Network, python: Path, folder: Path) -> tuple[dict[str, Any], Path]:
    """Return the figures of the peer's job and the folder of its files; a finished job is not run again."""
    stem = f"{network.function.rpartition(':')[2]}_{network.iterations}"
    path, output = folder / f"{stem}.json", folder / stem
    tensors = {
        folder / f"{stem}.state.safetensors": dict(network.model.state_dict()),
        folder / f"{stem}.images.safetensors": {
            "calibration": torch.cat(network.calibration),
            "held_out": network.held_out.contiguous(),
        },
    }
    state, data = (file.name for file in tensors)
    job = {"network": network.function, "state": state, "images": data, "output": stem, "batch": PEER_BATCH}
    text = json.dumps({**job, "iterations": network.iterations, "bits": 4})
    if not (
        (output / "result.json").exists()
        and path.read_text(encoding="utf-8") == text
        and all(_holds(file, wanted) for file, wanted in tensors.items())
    ):
        folder.mkdir(parents=True, exist_ok=True)
        for file, wanted in tensors.items():
            save_file(wanted, file)
        path.write_text(text, encoding="utf-8")
        command = [str(python.absolute()), "-m", "benchmarks.peers.aimet_adaround", str(path.absolute())]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{network.name}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads((output / "result.json").read_text(encoding="utf-8")), output


def _holds(file: Path, wanted: Mapping[str, Tensor]) -> bool:
    stored = load_file(file)
    return stored.keys() == wanted.keys() and all(torch.equal(stored[name], wanted[name]) for name in wanted)


def _by_module(graph: FloatGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensors[f"{name}.weight"] for name in graph.operators}


def adaround_rows(network: Network, python: Path | None, folder: Path) -> Iterator[list[str]]:
    """Yield a row for each method of each tool."""
    graph = FloatGraph(network)
    theirs = [] if python is None else by_peer(network, graph, python, folder)
    # The first warms up.
    ours = [by_us(network, graph, method) for method in (None, *network.methods)]
    peer_seconds = theirs[-1].seconds if theirs else None
    for made in (*ours, *theirs):
        ratio = "–"
        if made in ours and made.learning is not None and peer_seconds and made.seconds is not None:
            ratio = f"{made.seconds / peer_seconds:.2f}"
        yield [
            network.name,
            made.method,
            _seconds(made.seconds),
            _seconds(made.learning),
            f"{statistics.mean(graph.errors(made.weights)):.2e}",
            f"{sqnr(graph.expected, graph.logits(made.weights)):.1f}",
            ratio,
        ]


def _seconds(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds:.1f}"


def resnet50() -> tuple[nn.Module, list[Any]]:
    """Return ResNet-50 with random weights and 32 images of 224 x 224 in batches of 8."""
    torch.manual_seed(0)
    model = torchvision.models.resnet50()
    data = images(32, 8, 224, seed=1)
    estimate_batch_norm(model, data[:1])
    return model, data


def bert() -> tuple[nn.Module, list[Any]]:
    """Return an encoder of BERT-base's size with random weights and 32 sequences of 64 tokens in batches of 8."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig()
    model = transformers.BertModel(config).eval()
    ids = torch.randint(0, config.vocab_size, (32, 64), generator=torch.Generator().manual_seed(1))
    return model, [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(8)]


MODELS: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "ResNet-50, 224 x 224": resnet50,
    "BERT-base, 64 tokens": bert,
}

PASSES: dict[str, GraphPass] = {"CrossLayerEqualization": CrossLayerEqualization(), "SmoothQuant": SmoothQuant()}


def pass_rows(name: str, rounds: int) -> Iterator[list[str]]:
    """Yield a row for each pass: its cost in forward passes over the calibration data."""
    model, data = MODELS[name]()
    captured = capture_graph(model, data[0])
    gm, _ = run_passes(captured.module, presets.INT8_STATIC.passes)
    batches = [captured.signature.flatten(*split_batch(batch)) for batch in data]
    device = torch.device("cpu")
    context = Context(presets.INT8_STATIC, CalibrationData(ActivationCache(None, device)), device)
    context.data.add_batches(batches)
    sites: dict[str, int] = {}

    def forward() -> None:
        with torch.no_grad(), fast_layout(gm) as lay_out:
            for leaves in batches:
                gm(*map(lay_out, leaves))

    def rewrite(row: str) -> None:
        _, (record,) = run_passes(gm, [PASSES[row]], context=context)
        sites[row] = record.rewrites

    taken: dict[str, list[tuple[float, float]]] = {row: [] for row in PASSES}
    with one_core():
        for round_ in range(rounds + 1):
            plain = timed(forward).cpu
            for row in PASSES:
                cost = timed(lambda row=row: rewrite(row)).cpu  # type: ignore[misc]
                if round_:  # the first warms up
                    taken[row].append((plain, cost))
    for row, pairs in taken.items():
        ratios = [cost / plain for plain, cost in pairs]
        verdict = "met" if statistics.median(ratios) < LIMIT else "missed"
        yield [
            name,
            row,
            str(sites[row]),
            f"{statistics.median(plain for plain, _ in pairs):.1f}",
            f"{statistics.median(cost for _, cost in pairs):.2f}",
            spread(ratios),
            f"below {LIMIT:g}, {verdict}",
        ]


def _shown(rows: Iterable[list[str]]) -> list[list[str]]:
    """Return the rows, each printed when it is known: all of them take minutes."""
    found = []
    for row in rows:
        print(*row, sep=" | ", flush=True)
        found.append(row)
    return found


def measure(arguments: argparse.Namespace, folder: Path) -> str:
    """Return the page."""
    networks = small_resnet(arguments.small_iterations), resnet18(arguments.iterations, arguments.quick)
    learned = _shown(row for network in networks for row in adaround_rows(network, arguments.peer_python, folder))
    passes = _shown(row for name in MODELS for row in pass_rows(name, arguments.rounds))
    earlier = "" if arguments.folder is None else f" {EARLIER}"
    return f"""# What learning costs

Seconds are of the processor, of a process bound to one core. The machine was shared with other work: seconds vary by
tens of per cent from one run to the next, and what the tables are for is the ratios.

## AdaRound

int4 weights, symmetric, a scale for each output channel; activations in float. Small ResNet: trained, from
`benchmarks.composed_digits`, 1,024 calibration images in batches of 64, 1,000 held out. ResNet-18: torchvision's,
random weights, batch norm statistics of its data, 32 calibration images in batches of 16, 8 held out. Both tools start
from the same network, calibrate on the same images and are judged by the same code here: the error is that of a layer's
output for float inputs, squared and relative to the squared output, averaged over layers; SQNR is of the logits against
the float network's. Ours are learned on the inputs that quantized layers before make: a layer's error for float inputs
is not what they minimize, and it depends on how many images they learn from. Rounding to nearest is with each tool's
own scales. "CPU s, whole" is `quantize` from module to quantized network here (capture, calibration, conversion), batch
norm folding and AdaRound there; the ratio is of the two. Here steps start from the codes of a coordinate descent, and
the last eighth of the images (on ResNet-18, 4 of 32) only judges the steps. The peer learns from all images; its own
default is 15,000 steps for each layer at 4 bits.{earlier}

{table(ADAROUND_HEADER, learned)}

## Equalization and smoothing

The pass over one float forward pass of the captured graph, batch norms folded, over the 32 calibration samples in
batches of 8 and in the layout that calibration uses, in one process, in turn; {arguments.rounds} rounds after a
warm-up, median and range. torchvision's ResNet-50 and an encoder of BERT-base's size, both with random weights, for
`int8_static`.

{table(PASS_HEADER, passes)}

Reproduce with `python -m benchmarks.learning_cost --peer-python aimet/bin/python`.

{environment()}
"""


EARLIER = "Jobs of the peer that had finished earlier, with the same inputs, were read and not run again."

ADAROUND_HEADER = (
    *("network", "tool, method", "CPU s, whole", "CPU s, AdaRound", "relative error of a layer", "logits SQNR dB"),
    "whole, ours / AIMET's",
)
PASS_HEADER = ("network", "pass", "sites changed", "forward CPU s", "pass CPU s", "pass / forward", "goal")


def main() -> None:
    """Run and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, metavar="PATH", help="AIMET's Python; default: no rows of AIMET's")
    parser.add_argument("--small-iterations", type=int, default=1000, help="AIMET's, on the small ResNet")
    parser.add_argument("--iterations", type=int, default=20, help="AIMET's, on ResNet-18")
    parser.add_argument("--quick", action="store_true", help="leave the default AdaRound() out on ResNet-18")
    parser.add_argument("--folder", type=Path, help="for the peer's jobs, kept; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each pass, after one warm-up")
    parser.add_argument("--write", action="store_true", help="update results/learning_cost.md")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        page = measure(arguments, arguments.folder or Path(temporary))
    publish(page, "learning_cost.md" if arguments.write else None)


if __name__ == "__main__":
    main()
