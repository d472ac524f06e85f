"""int8 programs in ExecuTorch: accuracy beside torch, what is left outside of XNNPACK, time beside float.

    pip install executorch
    python -m benchmarks.in_executorch [--networks cnn vit …] [--rounds 30] [--write]

`cnn`, `mobilenet` and `vit` are trained on digits (`tests/networks.py`); the others have random weights. Ours is
`int8_static` with `target="executorch"`, by way of `quark_fx.export.pt2e`. *XNNPACKQuantizer* is ExecuTorch's own, with
torchao's `prepare_pt2e` and `convert_pt2e` on the same batches. *torch* and *ExecuTorch* are the SQNR of the output
against the float model, of the program in torch and of the `.pte` file, on inputs that were not calibrated on.
*Steps* is the largest difference between these two in steps of the output's last quantizer. *Outside* counts the
operators that XNNPACK did not take. *Time* is for one sample, the files in turn; a ratio is the median over the rounds.
`--write` updates `results/executorch.md`.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.export import ExportedProgram

import quark_fx as qfx
from benchmarks.common import one_core, sqnr, table
from benchmarks.experiment import Option, experiment
from benchmarks.judged import Network, digits, random_weights, ratio
from benchmarks.onnx_sessions import latencies
from quark_fx.export.runtime.runners import FileInput, FileRunner
from quark_fx.presets import INT8_STATIC

JUDGED = 64
"""Samples; a program plans its memory for as many."""


NETWORKS = {
    **{name: digits(name, JUDGED) for name in ("cnn", "mobilenet", "vit")},
    **{name: random_weights(name) for name in ("ResNet-18", "MobileNetV2")},
}


def ours(network: Network) -> ExportedProgram:
    """Return the program of this package."""
    batch = torch.export.Dim("batch", max=len(network.judged))
    config = INT8_STATIC.replace(target="executorch")
    shapes = {next(iter(inspect.signature(network.model.forward).parameters)): {0: batch}}
    qmodel = qfx.quantize(network.model, config, network.calibration, dynamic_shapes=shapes, progress=False)
    return qfx.export.pt2e(qmodel)


def theirs(network: Network) -> ExportedProgram:
    """Return the program of ExecuTorch's quantizer."""
    from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
        XNNPACKQuantizer,
        get_symmetric_quantization_config,
    )
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    observed = prepare_pt2e(floats(network).module(), quantizer)
    for batch in network.calibration:
        observed(batch)
    converted = convert_pt2e(observed)
    return torch.export.export(converted, (network.calibration[0],), dynamic_shapes=_shapes(network))


def floats(network: Network) -> ExportedProgram:
    """Return the program of the model itself."""
    return torch.export.export(network.model, (network.calibration[0],), dynamic_shapes=_shapes(network))


def _shapes(network: Network) -> Any:
    return ({0: torch.export.Dim("batch", max=len(network.judged))},)


class ProgramRunner(FileRunner):
    """A `.pte` file of one input."""

    title = "ExecuTorch"

    def __init__(self, path: Path, threads: int) -> None:
        from executorch.runtime import Runtime

        self.path, self.inputs = path, (FileInput("x"),)
        self._program = Runtime.get().load_program(path)  # the method reads it without owning it
        self._method = self._program.load_method("forward")

    def run_arrays(self, feed: Mapping[str, Any]) -> list[Any]:
        return [output.numpy() for output in self._method.execute([torch.from_numpy(feed["x"])])]


def _write(program: ExportedProgram, path: Path) -> int:
    """Write the file of a program, and return how many operators XNNPACK did not take."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    path.write_bytes(lowered.buffer)
    names = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    return sum(name.startswith(("aten.", "quantized_decomposed.")) for name in names)


def measure(name: str, folder: Path, rounds: int) -> Iterator[list[str]]:
    """Yield the rows of one network."""
    network = NETWORKS[name]()
    with torch.no_grad():
        expected = network.model(network.judged)
    programs = {row: make(network) for row, make in PROGRAMS.items()}
    paths = {row: folder / f"{i}.pte" for i, row in enumerate(programs)}
    outside = {row: _write(program, paths[row]) for row, program in programs.items()}
    times = latencies(paths, [network.judged[:1]], 1, rounds, ProgramRunner)  # see the page: one size for each method
    for row in (QUANTIZED, PEER):
        with torch.no_grad():
            simulated = programs[row].module()(network.judged)
        (array,) = ProgramRunner(paths[row], 1).run_arrays({"x": network.judged.numpy()})
        found = torch.from_numpy(array)
        yield [
            name,
            row,
            str(outside[row]),
            f"{sqnr(expected, simulated):.2f}",
            f"{sqnr(expected, found):.2f}",
            f"{float((found - simulated).abs().max()) / _step(programs[row]):.1f}",
            *(ratio(times[row], times[other]) for other in ("float", PEER)),
        ]


QUANTIZED, PEER = "int8_static, target='executorch'", "XNNPACKQuantizer"

PROGRAMS: dict[str, Callable[[Network], ExportedProgram]] = {QUANTIZED: ours, PEER: theirs, "float": floats}
"""What makes the programs, by row."""


def _step(program: ExportedProgram) -> float:
    """Return the scale of the last activation that is rounded."""
    scales = [node.args[1] for node in program.graph.nodes if "quantize_per_tensor.default" in str(node.target)]
    return float(scales[-1])


@experiment(page="executorch.md")
def main(
    networks: Annotated[Sequence[str], Option(choices=list(NETWORKS), metavar="NETWORK")] = tuple(NETWORKS),
    rounds: int = 30,
) -> str:
    """Measure, and return the page."""
    rows: list[list[str]] = []
    with one_core():
        for name in networks:
            with tempfile.TemporaryDirectory() as folder:
                for row in measure(name, Path(folder), rounds):
                    print(*row, file=sys.stderr, flush=True)
                    rows.append(row)
    header = (
        *("network", "program", "outside", "torch, dB", "ExecuTorch, dB", "steps", "time / float"),
        "time / XNNPACKQuantizer",
    )
    return f"""# In ExecuTorch

Measured by `python -m benchmarks.in_executorch --write`, whose docstring says what the columns are:

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
