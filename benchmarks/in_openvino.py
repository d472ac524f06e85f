"""int8 files in OpenVINO: accuracy beside torch, what runs in integers, time beside float and beside NNCF.

    python -m venv /tmp/nncf && /tmp/nncf/bin/pip install nncf openvino
    python -m benchmarks.in_openvino [--nncf /tmp/nncf/bin/python] [--networks cnn BERT …] [--rounds 30] [--write]

`cnn`, `mobilenet` and `vit` are trained on digits (`tests/networks.py`) and MiniLM is the sentence encoder; the others
have random weights. *torch* and *OpenVINO* are the SQNR of the first output against the float model, on inputs that
were not calibrated on; *apart* is the difference between the two. *In integers* counts convolutions and products that
OpenVINO's profiler names as counting in 8 bits. *Time* is for one sample on one thread, the files in turn; a
ratio is the median over the rounds. NNCF quantizes the same float file with the same batches, with its default
settings, in an environment of its own; without `--nncf` its rows are left out. `--write` updates `results/openvino.md`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

import quark_fx as qfx
from benchmarks.common import environment, one_core, sqnr, table
from benchmarks.experiment import Option, experiment
from benchmarks.judged import Network, digits, random_weights, ratio
from benchmarks.models import float_bytes
from benchmarks.onnx_sessions import latencies
from quark_fx.evaluation.runs import main_tensor
from quark_fx.graph.signature import split_batch
from quark_fx.numbers.formats import INT8
from quark_fx.presets import INT8_STATIC
from quark_fx.vendors.intel.runner import OpenVinoRunner

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import sentences
import test_trained as judge

ROOT = Path(__file__).resolve().parent.parent
_PRODUCTS = ("Convolution", "GroupConvolution", "FullyConnected")
_TRANSFORMERS = ("vit", "MiniLM", "BERT")

_ACTIVATION = qfx.TensorSpec(format=INT8)

FILES = {
    "int8_static, target='openvino'": INT8_STATIC.replace(target="openvino"),
    "the same, int8 activations": INT8_STATIC.replace(target="openvino", input=_ACTIVATION, output=None),
    "int8_static, target='onnx'": INT8_STATIC,
}
"""Our files by row; the last is made for ONNX Runtime."""


def _minilm() -> Network:
    model, tokenizer = judge.encoder()
    judged = qfx.data.text_lines(sentences.HELD_OUT[:16], tokenizer, batch_size=16)
    return Network(model, qfx.data.text_lines(sentences.CALIBRATION, tokenizer, batch_size=8), judged[0])


NETWORKS: Mapping[str, Callable[[], Network]] = {
    **{name: digits(name) for name in ("cnn", "mobilenet", "vit")},
    "MiniLM": _minilm,
    **{name: random_weights(name) for name in ("ResNet-18", "ResNet-50", "MobileNetV2", "BERT")},
}


def _counted(value: Tensor, batch: Any) -> Tensor:
    """Return the rows of a result that are not of padding."""
    return value[batch["attention_mask"].bool()] if isinstance(batch, Mapping) and "attention_mask" in batch else value


def _feed(qmodel: qfx.QuantizedModel, batch: Any) -> list[np.ndarray]:
    leaves = qmodel.signature.flatten(*split_batch(batch))
    return [leaf.numpy() for leaf in leaves if isinstance(leaf, Tensor)]


def _run(runner: OpenVinoRunner, arrays: list[np.ndarray]) -> Tensor:
    return next(iter(runner.run_in_order(map(torch.from_numpy, arrays)).values()))


def measure(name: str, folder: Path, nncf: str | None, rounds: int) -> Iterator[list[str]]:
    """Yield the rows of one network."""
    network = NETWORKS[name]()
    args, kwargs = split_batch(network.judged)
    with torch.no_grad():
        expected = _counted(main_tensor(network.model(*args, **kwargs)), network.judged)
    paths, ours = {"float": folder / f"{name}.float.onnx"}, dict[str, float]()
    float_bytes(network.model, qfx.capture_graph(network.model, network.calibration[0]).module, paths["float"])
    for row, config in FILES.items():
        if config.output is None and name not in _TRANSFORMERS:
            continue
        qmodel = qfx.quantize(network.model, config, network.calibration, progress=False)
        paths[row] = folder / f"{name}.{len(paths)}.onnx"
        qfx.export.onnx(qmodel, paths[row])
        with torch.no_grad():
            ours[row] = sqnr(expected, _counted(main_tensor(qmodel(*args, **kwargs)), network.judged))
    if nncf is not None:
        batches = [_feed(qmodel, batch) for batch in network.calibration]
        arrays: dict[str, Any] = {f"{b}.{i}": x for b, batch in enumerate(batches) for i, x in enumerate(batch)}
        np.savez(folder / f"{name}.npz", **arrays)
        if name in _TRANSFORMERS:
            (folder / f"{name}.transformer").touch()
        subprocess.run(
            [nncf, "-m", "benchmarks.peers.nncf_quantize", folder], cwd=ROOT, check=True, capture_output=True
        )
        paths["NNCF"] = folder / f"{name}.nncf.xml"
    sessions = {row: OpenVinoRunner(path, 1, profile=True) for row, path in paths.items()}
    judged = _feed(qmodel, network.judged)
    found = {row: sqnr(expected, _counted(_run(session, judged), network.judged)) for row, session in sessions.items()}
    times = latencies(paths, [torch.from_numpy(array[:1]) for array in judged], 1, rounds, OpenVinoRunner)
    for row, session in sessions.items():
        if row == "float":
            continue
        kernels = [kernel for kernel in session.kernels() if kernel.kind.startswith(_PRODUCTS)]
        ratios = [ratio(times[row], times[other]) if other in times else "–" for other in ("float", "NNCF")]
        own = [f"{ours[row]:.2f}", f"{found[row]:.2f}", f"{found[row] - ours[row]:+.2f}"] if row in ours else None
        yield [
            name,
            row,
            f"{sum(kernel.in_integers for kernel in kernels)} of {len(kernels)}",
            *(own or ["–", f"{found[row]:.2f}", "–"]),
            *ratios,
        ]


@experiment(page="openvino.md", own_environment=True)
def main(
    nncf: Annotated[str | None, "a python with nncf and openvino"] = None,
    networks: Annotated[Sequence[str], Option(choices=list(NETWORKS), metavar="NETWORK")] = tuple(NETWORKS),
    rounds: int = 30,
) -> str:
    """Measure, and return the page."""
    rows: list[list[str]] = []
    with one_core():
        for name in networks:
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(name, Path(folder), nncf, rounds):
                    print(*row, file=sys.stderr, flush=True)
                    rows.append(row)
    header = (
        *("network", "file", "in integers", "torch, dB", "OpenVINO, dB", "apart, dB"),
        *("time / float", "time / NNCF"),
    )
    peer = ""
    if nncf:
        shown = subprocess.run([nncf, "-m", "pip", "show", "nncf"], capture_output=True, text=True, check=True)
        peer = f"NNCF {shown.stdout.split('Version: ')[1].splitlines()[0]}. "
    return f"""# In OpenVINO

Files of `target="openvino"`. *The same, int8 activations* has symmetric codes
for what transformers multiply: `input=TensorSpec(format="int8"), output=None`. Reproduce with
`python -m benchmarks.in_openvino`, whose docstring says what is measured.

{table(header, rows)}

{peer}{environment()}
"""


if __name__ == "__main__":
    main()
