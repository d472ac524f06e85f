"""Compare a quantized model with the file it was exported to, output by output or node by node."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Interpreter, Node

from quark_fx.errors import ExportError
from quark_fx.graph import parameter, target_name
from quark_fx.model import QuantizedModel
from quark_fx.signature import split_batch


@dataclass(frozen=True)
class Difference:
    """How far ONNX Runtime is from torch in one value.

    Attributes:
        name: output name, or node name.
        max_abs: largest absolute difference.
        step: the quantization step of the value: its own scale where the graph quantizes it, else one
            255th of its range over the batches.
        share: share of elements that differ by more than half a step.
        sqnr: signal to noise of ONNX Runtime's value against torch's, dB.
    """

    name: str
    max_abs: float
    step: float
    share: float
    sqnr: float

    @property
    def steps(self) -> float:
        """The largest difference in quantization steps."""
        return self.max_abs / self.step if self.step else 0.0


@dataclass(frozen=True)
class Verification:
    """The differences of every output (or node), in graph order. `str` of it is a table."""

    differences: tuple[Difference, ...]

    @property
    def max_steps(self) -> float:
        """The largest difference of any value, in quantization steps."""
        return max((d.steps for d in self.differences), default=0.0)

    def __getitem__(self, name: str) -> Difference:
        return next(d for d in self.differences if d.name == name)

    def __str__(self) -> str:
        width = max([4, *(len(d.name) for d in self.differences)])
        header = f"{'name'.ljust(width)}  {'max |Δ|':>10}  {'step':>10}  {'steps':>7}  {'>½ step':>8}  {'SQNR dB':>8}"
        lines = [
            f"{d.name.ljust(width)}  {d.max_abs:10.3g}  {d.step:10.3g}  {d.steps:7.3f}  {d.share:8.2%}  {d.sqnr:8.1f}"
            for d in self.differences
        ]
        return "\n".join([header, *lines])


def verify(
    qmodel: QuantizedModel,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    per_node: bool = False,
    optimize: bool | None = None,
    session_options: Any = None,
) -> Verification:
    """Run the same batches in torch and in ONNX Runtime and compare.

    Args:
        qmodel: what was exported.
        path: the ONNX file.
        batches: as calibration data.
        per_node: compare every intermediate value that both graphs name, not only the outputs. Reading
            them keeps ONNX Runtime from fusing, so this locates a difference; it does not time anything.
        optimize: let ONNX Runtime optimise the graph; default: yes, except for 8-bit floats, whose
            fusions its CPU kernels do not implement.
        session_options: `onnxruntime.SessionOptions` to use instead.

    Raises:
        ExportError: if there is no batch, or the file's inputs are not the model's.
    """
    import onnxruntime

    options = session_options or _session_options(qmodel, optimize)
    source: Any = _with_all_outputs(Path(path), qmodel) if per_node else str(path)
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    compared = _Comparison(qmodel)
    count = 0
    for batch in batches:
        args, kwargs = split_batch(batch)
        leaves = qmodel.signature.flatten(args, kwargs)
        feed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        inputs = session.get_inputs()
        if len(inputs) != len(feed):
            raise ExportError(f"{path} has {len(inputs)} inputs, the model {len(feed)}: it is not this model's export")
        results = session.run(names, {i.name: leaf.numpy(force=True) for i, leaf in zip(inputs, feed, strict=True)})
        expected = _torch_values(qmodel, leaves, names, per_node)
        compared.add({n: (e, r) for n, e, r in zip(names, expected, results, strict=True) if e is not None})
        count += 1
    if not count:
        raise ExportError("no batch to verify with; pass at least one")
    return compared.result()


def _torch_values(
    qmodel: QuantizedModel, leaves: Sequence[Any], names: Sequence[str], per_node: bool
) -> list[Tensor | None]:
    recorder = _Recorder(qmodel.graph_module)
    with torch.no_grad():
        outputs = recorder.run(*leaves)
    tensors = [value for value in outputs if isinstance(value, Tensor)]
    count = len(tensors)
    return [*tensors, *(recorder.values.get(name) for name in names[count:])] if per_node else [*tensors]


class _Recorder(Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.values: dict[str, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, Tensor) and value.is_floating_point() and n.op == "call_function":
            self.values[n.name] = value
        return value


class _Comparison:
    """Accumulates differences over batches."""

    def __init__(self, qmodel: QuantizedModel) -> None:
        self.steps = _known_steps(qmodel)
        self.pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, values: dict[str, tuple[Tensor, np.ndarray[Any, Any]]]) -> None:
        for name, (expected, got) in values.items():
            if got.shape != tuple(expected.shape):
                raise ExportError(f"{name} has shape {got.shape} in ONNX Runtime and {tuple(expected.shape)} in torch")
            a, b = expected.detach().cpu().double().flatten(), torch.from_numpy(np.asarray(got, dtype=np.float64))
            self.pairs.setdefault(name, []).append((a, b.flatten()))

    def result(self) -> Verification:
        return Verification(tuple(self._difference(name, pairs) for name, pairs in self.pairs.items()))

    def _difference(self, name: str, pairs: list[tuple[Tensor, Tensor]]) -> Difference:
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        # Where both are the same infinity or NaN (a mask's) there is no difference.
        gap = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        finite = a[a.isfinite()]
        spread = float(finite.max() - finite.min()) / 255 if finite.numel() else 0.0
        step = self.steps.get(name) or spread or 1.0
        noise, signal = float(gap.square().sum()), float(finite.square().sum())
        return Difference(
            name=name,
            max_abs=float(gap.max()) if gap.numel() else 0.0,
            step=step,
            share=float((gap > step / 2).double().mean()) if gap.numel() else 0.0,
            sqnr=10 * float(np.log10(signal / noise)) if noise > 0 and signal > 0 else float("inf"),
        )


def _known_steps(qmodel: QuantizedModel) -> dict[str, float]:
    """Return the scale of every value the graph dequantizes with one static scale, by node and output name."""
    gm = qmodel.graph_module
    steps: dict[str, float] = {}
    for node in gm.graph.nodes:
        if target_name(node) == "quark_fx.dequantize.default" and node.args[1].op == "get_attr":
            scale = parameter(gm, node.args[1])
            if scale.numel() == 1:
                steps[node.name] = float(scale)
    output = next(iter(reversed(gm.graph.nodes)))
    for name, node in zip(qmodel.signature.output_names, output.args[0], strict=True):
        if isinstance(node, Node) and node.name in steps:
            steps[name] = steps[node.name]
    return steps


def _session_options(qmodel: QuantizedModel, optimize: bool | None) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimize is None:
        optimize = not any("fp8" in str(node.args) for node in qmodel.graph_module.graph.nodes)
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # Blocked weights are fused to MatMulNBits; its default rounds activations to int8, which is not the graph's maths.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return options


def _with_all_outputs(path: Path, qmodel: QuantizedModel) -> bytes:
    import onnx_ir as ir

    model = ir.load(path)
    names = {node.name for node in qmodel.graph_module.graph.nodes}
    present = {output.name for output in model.graph.outputs}
    for node in model.graph:
        for value in node.outputs:
            if value.name in names and value.name not in present and value.dtype == ir.DataType.FLOAT:
                model.graph.outputs.append(value)
    return ir.to_proto(model).SerializeToString()  # type: ignore[no-any-return]
