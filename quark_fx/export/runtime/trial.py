"""Run an exported file once in ONNX Runtime and in its target's runtime, before it is renamed to its final path."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from quark_fx.errors import ExportError
from quark_fx.export.runtime.runners import RUNNERS, FileRunner, OnnxRuntimeRunner
from quark_fx.graph.nodes import describe, device_of, results_of
from quark_fx.graph.sample import made_up_sample
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.memory import available

if TYPE_CHECKING:
    import onnx_ir as ir

_KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""Domains of operators for which ONNX Runtime has kernels."""

_COPIES = 2
"""Copies of the weights that a runtime holds in memory while it loads a file: one as stored, one for its kernels."""

_TOO_NEW = ("Current official support for domain", "Unsupported model IR version")
"""Parts of the error messages of an ONNX Runtime that is too old for the opset of a file."""

_NEXT = "Replace the operator, or exclude a layer next to it from quantization"
"""Next step after a runtime fails to load or run a file."""


@dataclass(frozen=True)
class NotRun:
    """A runtime that did not run a file when it was written.

    Attributes:
        runtime: Name of the runtime, or of the target.
        reason: Reason why the runtime did not run the file, and the next step.
        loads: Whether the runtime loaded the file.
    """

    runtime: str
    reason: str
    loads: bool = False

    def __str__(self) -> str:
        return f"not run in {self.runtime}: {self.reason}"


def run_once(path: Path, model: ir.Model, qmodel: QuantizedModel) -> tuple[NotRun, ...]:
    """Run a file on one sample in ONNX Runtime and the target's runtime; return the runtimes that did not run it.

    Raises:
        ExportError: If a runtime fails to load or run the file; the message names the node and the user's line.
    """
    runtime = qmodel.config.target.onnx.runtime
    results = [_in_onnx_runtime(path, model, qmodel)]
    if not runtime:
        results.append(NotRun(str(qmodel.config.target), "only this target's own runtime runs the file; test it there"))
    elif runtime in RUNNERS and RUNNERS[runtime] is not OnnxRuntimeRunner:
        results.append(_in_runtime(RUNNERS[runtime], path, model, qmodel))
    return tuple(reason for reason in results if reason is not None)


def _in_onnx_runtime(path: Path, model: ir.Model, qmodel: QuantizedModel) -> NotRun | None:
    from quark_fx.export.to_onnx.formats import vendor_formats

    name = OnnxRuntimeRunner.title
    try:
        import onnxruntime
    except ImportError:
        return NotRun(name, f"it is not installed; {OnnxRuntimeRunner.installation()}")
    gm = qmodel.graph_module
    functions = {function.domain for function in model.functions.values()}
    vendor = vendor_formats(model).keys()
    if custom := model.opset_imports.keys() - _KNOWN_DOMAINS - functions - vendor:
        operators = ", ".join(sorted(custom))
        return NotRun(name, f"it has no operators of the domain {operators}; run the file in a runtime that has them")
    if reason := _too_large(model):
        return NotRun(name, reason)
    try:
        runner = OnnxRuntimeRunner(path)
    except Exception as error:
        if any(text in str(error) for text in _TOO_NEW):
            opset = model.opset_imports[""]
            return NotRun(name, f"version {onnxruntime.__version__} does not read opset {opset}; install a newer one")
        raise ExportError(
            f"{path.name} does not load in {name} {onnxruntime.__version__}: {error}{_where(error, model, gm)}"
            + _dtype_hint(gm)
        ) from error
    if vendor:
        return NotRun(name, f"it has no kernels for {', '.join(vendor)}; use the vendor's tools to check support")
    reason = _run(runner, f"{path.name} fails in {name} {onnxruntime.__version__}", model, qmodel)
    return NotRun(name, reason, loads=True) if reason else None


def _in_runtime(runner_class: type[FileRunner], path: Path, model: ir.Model, qmodel: QuantizedModel) -> NotRun | None:
    name = runner_class.title
    try:
        package = import_module(runner_class.runtime)
    except ImportError:
        return NotRun(name, f"it is not installed; {runner_class.installation()}")
    if reason := _too_large(model):
        return NotRun(name, reason)
    version = str(getattr(package, "__version__", "of an unknown version")).partition("-")[0]
    try:
        runner = runner_class(path)
    except Exception as error:
        where = _where(error, model, qmodel.graph_module)
        raise ExportError(f"{path.name} does not load in {name} {version}: {error}{where}\n{_NEXT}") from error
    reason = _run(runner, f"{path.name} fails in {name} {version}", model, qmodel)
    return NotRun(name, reason, loads=True) if reason else None


def _too_large(model: ir.Model) -> str:
    """Return the reason why memory may be too small for a runtime to load a file; empty if it is large enough."""
    from quark_fx.export.to_onnx.edit import stored_bytes

    size, free = stored_bytes(model), available()
    if free is None or _COPIES * size <= free:
        return ""
    return f"loading its weights takes {_COPIES} times {size >> 20} MiB, but only {free >> 20} MiB of memory are free"


def _run(runner: FileRunner, failure: str, model: ir.Model, qmodel: QuantizedModel) -> str:
    """Run a file on the sample of its model; return the reason if it cannot be run on one, or an empty string."""
    gm = qmodel.graph_module
    sample = made_up_sample(gm) if qmodel.sample is None else qmodel.sample
    if qmodel.sample is None and not _runs_in_torch(gm, sample):
        return "the loaded model has no sample, and made-up inputs do not fit; run qfx.verify with a batch"
    tensors = [leaf for leaf in sample if isinstance(leaf, Tensor)]
    if any(leaf.dtype == torch.bfloat16 for leaf in tensors):
        return "its inputs are bfloat16, which numpy does not support; run it where it is deployed"
    try:
        runner.run_in_order(tensors)
    except Exception as error:
        if not _runs_in_torch(gm, sample):
            return "the sample does not run in torch either; run qfx.verify with a batch"
        raise ExportError(f"{failure} on one sample: {error}{_where(error, model, gm)}\n{_NEXT}") from error
    return ""


def _runs_in_torch(gm: GraphModule, sample: tuple[Any, ...]) -> bool:
    """Tell whether a model runs on a sample in torch; zeros in a generated sample may be divisors or lengths."""
    device = device_of(gm)
    try:
        with torch.no_grad():
            gm(*(leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in sample))
    except Exception:  # any error of an operator
        return False
    return True


_FAILING = (
    r"""(?:Name:'|with name '|(?<!<)[Nn]ode ?\(|In Node, \("|<Node\(\w+\): )([^'")>]+)""",  # a node or its output
    r"rule found for operations: (\w+)-",  # an operator that the runtime lacks, which makes other nodes fail
    r"in the (\w+) operator",
)
"""Patterns in messages of runtimes: names of nodes or of their outputs, operators without a kernel, and operators."""


def _where(error: Exception, model: ir.Model, gm: GraphModule) -> str:
    """Return the user's source lines for the nodes that an error of a runtime names; empty if it names none."""
    sources = _sources(model, gm)
    names, unknown, kinds = (set(re.findall(pattern, str(error))) for pattern in _FAILING)
    nodes = list(model.graph.all_nodes())
    failing = [node for node in nodes if node.op_type in unknown]
    failing = failing or [node for node in nodes if names & {node.name, *(value.name for value in node.outputs)}]
    failing = failing or [node for node in nodes if node.op_type in kinds]
    lines = dict.fromkeys(source for node in failing if (source := _made_for(node, sources)) is not None)
    return "".join(f"\n  {describe(node)}" for node in lines)


def _sources(model: ir.Model, gm: GraphModule) -> dict[str | None, Node]:
    """Return the nodes of a graph by the names that their values have in the file."""
    results = (node for node in results_of(gm) if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor))
    outputs = zip((value.name for value in model.graph.outputs), results, strict=False)
    return {node.name: node for node in gm.graph.nodes if node.op == "call_function"} | dict(outputs)


def _made_for(node: ir.Node, sources: Mapping[str | None, Node]) -> Node | None:
    """Return the graph's node for a node of the file: the node with the name of its output or of a later value."""
    pending, visited = [node], set[int]()
    for one in pending:
        if (source := next((sources[value.name] for value in one.outputs if value.name in sources), None)) is not None:
            return source
        readers = [reader for value in one.outputs for reader, _ in value.uses() if id(reader) not in visited]
        visited.update(map(id, readers))
        pending += readers
    return None


def _dtype_hint(gm: GraphModule) -> str:
    values = (node.meta.get("val") for node in gm.graph.nodes)
    dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    rare = dtypes & {torch.bfloat16, torch.float64}
    return f"\nThe model computes in {', '.join(map(str, rare))}; quantize model.float() instead" if rare else ""
