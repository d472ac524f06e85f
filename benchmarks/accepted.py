"""Whether what solvers keep is better on validation data, and whether the report tells what is stored.

    python -m benchmarks.accepted [--networks cnn mobilenet vit llama gpt2 opt qwen3_moe] [--write]

Every solver quantizes the networks of `tests/networks.py`, and those for weights also the language models of
`benchmarks.language_models`. *Kept* and *skipped* count changes, *worse* the kept ones whose error on validation
data rose, or was not measured; *largest ratio* is that of the error after over before, of those that were kept.
*Report* is the largest difference, in dB, between the noise of a weight as the report has it and as it is computed from
the weights of a model that was saved and loaded; passes that scale the float weights first have none. `--write`
updates `results/accepted.md`.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_eval

import quark_fx as qfx
from benchmarks import language_models
from benchmarks.common import one_thread, table
from benchmarks.experiment import Option, experiment
from quark_fx import QuantConfig
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.passes import AWQ, GPTQ, AdaQuant, AdaRound, AutoRound, BiasCorrection, FitScales, SmoothQuant, TuneScales
from quark_fx.presets import INT8_STATIC, W4A16_BEST, W4A16_RTN

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from networks import trained

VISION = ("cnn", "mobilenet", "vit")

WEIGHTS: dict[str, tuple[GraphPass, ...]] = {
    "FitScales": (FitScales(),),
    "GPTQ": (GPTQ(),),
    "GPTQ, as w4a16_best has it": W4A16_BEST.passes[-1:],
    "AWQ": (AWQ(),),
    "AWQ(feedback=True)": (AWQ(feedback=True),),
    "AutoRound": (AutoRound(iterations=50),),
    "TuneScales": (TuneScales(),),
}
"""Solvers that int4 weights in groups of 16 are quantized by."""

STATIC: dict[str, tuple[GraphPass, ...]] = {
    "SmoothQuant": (SmoothQuant(),),
    "BiasCorrection": (BiasCorrection(),),
    "AdaRound": (AdaRound(iterations=200),),
    "AdaQuant": (AdaQuant(iterations=200),),
}
"""Solvers that `int8_static` is quantized by."""

SCALING = (AWQ, SmoothQuant)


def _subject(name: str) -> tuple[nn.Module, list[Any], dict[str, tuple[QuantConfig, GraphPass]]]:
    """Return a model, its calibration batches, and the configurations with the solver that each is about."""
    group = W4A16_RTN.replace(group_size=16)
    configs = {what: (group.replace(passes=(*group.passes, *some)), some[-1]) for what, some in WEIGHTS.items()}
    if name not in VISION:
        subject = language_models.load(name)
        return subject.model, subject.calibration, configs
    network = trained(name)
    configs = {what: (config.replace(exclude=()), solver) for what, (config, solver) in configs.items()}
    for what, some in STATIC.items():
        configs[what] = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, *some)), some[-1]
    return network.model, network.calibration, configs


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights of modules, those before batch norms with these folded."""
    found, before = dict[str, Tensor](), ("", nn.Module())
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm2d) and isinstance(before[1], nn.Conv2d):
            found[before[0]] = fuse_conv_bn_eval(before[1], module).weight.detach()
        elif isinstance(getattr(module, "weight", None), Tensor):
            found[name] = module.weight.detach()
        before = name, module
    return found


def _decoding(gm: GraphModule) -> list[Any]:
    """Return the nodes that dequantize stored codes."""
    return [n for n in gm.graph.nodes if "dequantize" in str(n.target) and n.args[0].op == "get_attr"]


def _difference(model: nn.Module, qmodel: qfx.QuantizedModel) -> float:
    """Return the largest difference between the report's noise and that of the stored weights, dB."""
    real = _weights(model)
    with tempfile.TemporaryDirectory() as folder:
        qmodel.save(folder)
        loaded = qfx.load(folder)
    gm, differences = loaded.graph_module, []

    def value(argument: Any) -> Any:
        return attrgetter(str(argument.target))(gm) if isinstance(argument, Node) else argument

    # Tensors of a stored model have numbers for names; nodes come in the same order.
    pairs = zip(_decoding(qmodel.graph_module), _decoding(gm), strict=True)
    stored = {old.args[0].target: new.target(*map(value, new.args)).detach().double() for old, new in pairs}
    for row in loaded.report():
        if row.name in real and row.sqnr is not None and math.isfinite(row.sqnr):
            whole = real[row.name].double()
            noise = (whole - stored[f"{row.parameter}_codes"]).square().sum()
            differences.append(abs(row.sqnr - float(10 * (whole.square().sum() / noise).log10())))
    return max(differences)


def rows(name: str) -> Iterator[tuple[object, ...]]:
    """Yield a row for each solver."""
    model, calibration, configs = _subject(name)
    for what, (config, solver) in configs.items():
        qmodel = qfx.quantize(model, config, calibration, progress=False)
        (record,) = [r for r in qmodel.report().passes if r.name == type(solver).__name__]
        assert record.validated
        kept = [change for change in record.changes if change.changed]
        errors = [(c.before, c.after) for c in kept if c.before is not None and c.after is not None]
        worse = len(kept) - sum(after < before for before, after in errors)
        ratio = f"{max(after / before for before, after in errors):.3f}" if errors else "–"
        told = "–" if isinstance(solver, SCALING) else f"{_difference(model, qmodel):.4f}"
        yield name, what, len(kept), len(record.changes) - len(kept), worse, ratio, told


NAMES = (*VISION, *language_models.MODELS)


@experiment(page="accepted.md")
def main(networks: Annotated[Sequence[str], Option(choices=NAMES, metavar="NETWORK")] = NAMES) -> str:
    """Measure, and return the page."""
    found = []
    with one_thread():
        for name in networks:
            for row in rows(name):
                print(*row, flush=True)
                found.append(row)
    header = ("network", "solver", "kept", "skipped", "worse", "largest ratio", "report, dB")
    return f"""# What solvers keep

A change is kept if it is better on validation data. *Worse*: kept changes whose error there rose. *Largest ratio*: of
the error there after over before, of those that were kept. *Report*: the largest difference between the noise of a
weight as the report has it and as it is computed from the stored model. Solvers for weights: int4 in groups of 16;
others: `int8_static`. Reproduce with
`python -m benchmarks.accepted --networks {" ".join(networks)}`.

{table(header, found)}
"""


if __name__ == "__main__":
    main()
