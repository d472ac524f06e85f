"""Report which nodes of a file ONNX Runtime's CPU provider runs in integers, and which are exact on every processor.

The report is derived from the graph that ONNX Runtime writes after its fusions.
"""

from __future__ import annotations

import importlib.util
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import onnx.defs
import onnx_ir as ir
import torch

from quark_fx.errors import ExportError
from quark_fx.export.runtime.session import code_type, open_session
from quark_fx.export.runtime.trial import NotRun
from quark_fx.export.to_onnx.edit import Kept
from quark_fx.export.to_onnx.formats import vendor_formats
from quark_fx.export.whole_files import data_files
from quark_fx.plan.pair_sums import LARGEST_SUM, PairBound
from quark_fx.plan.table import Column, Table


@dataclass(frozen=True)
class RuntimeNode:
    """A node of the graph after fusion, and the kernel that runs it.

    Attributes:
        name: Name of the node.
        kernel: Operator that ONNX Runtime runs.
        quantized: Whether the kernel runs in integers. A kernel that only stores its weights in integers does not.
        reason: Reason why the kernel runs in float; empty if it runs in integers.
        saturates: Part of the kernel whose 16-bit sums may saturate for some data on x64 processors without VNNI
            (`plan.pair_sums`); empty if the kernel is exact on these processors.
    """

    name: str
    kernel: str
    quantized: bool
    reason: str = ""
    saturates: str = ""


_COLUMNS: tuple[Column[RuntimeNode], ...] = (
    Column("node", lambda node: node.name),
    Column("kernel", lambda node: node.kernel),
    Column("in integers", lambda node: "yes" if node.quantized else "no"),
    Column("exact without VNNI", lambda node: f"no: {node.saturates}" if node.saturates else "yes"),
    Column("in float because", lambda node: node.reason),
)


@dataclass(frozen=True)
class RuntimeReport:
    """The kernels that run a file, without the conversions between them. Its `str` is a table.

    Attributes:
        nodes: Kernels in the order in which they run.
        kept: Parts that the format left as `QuantizeLinear` / `DequantizeLinear` pairs, or that a rule declined.
        conversions: Number of quantizers, dequantizers, and casts between kernels.
        opset: Opset of the standard domain.
        bytes: Size of the file and its external data, in bytes.
        not_run: Runtimes that did not run the file on one sample when it was written, and why.
    """

    nodes: tuple[RuntimeNode, ...]
    kept: tuple[Kept, ...]
    conversions: int
    opset: int
    bytes: int
    not_run: tuple[NotRun, ...] = ()

    @property
    def quantized(self) -> tuple[RuntimeNode, ...]:
        """Nodes that run in integers."""
        return tuple(node for node in self.nodes if node.quantized)

    @property
    def floating(self) -> tuple[RuntimeNode, ...]:
        """Nodes that run in float."""
        return tuple(node for node in self.nodes if not node.quantized)

    @property
    def saturating(self) -> tuple[RuntimeNode, ...]:
        """Nodes that are not exact on x64 processors without VNNI."""
        return tuple(node for node in self.nodes if node.saturates)

    def __str__(self) -> str:
        lines = Table("Kernels", _COLUMNS, self.nodes).lines()
        count = Counter(node.kernel for node in self.quantized)
        kernels = ", ".join(f"{n} {kernel}" for kernel, n in count.most_common()) or "none"
        lines += [
            f"{len(self.quantized)} of {len(self.nodes)} nodes in integers ({kernels}), {self.conversions} conversions",
            f"{len(self.nodes) - len(self.saturating)} of {len(self.nodes)} nodes exact on x64 without VNNI",
            f"opset {self.opset}, {self.bytes / 1024:.1f} KiB",
            *(
                f"{f'declined by {k.rule}' if k.rule else 'left in pairs'}: {k.name} ({k.operator}): {k.reason}"
                for k in self.kept
            ),
            *map(str, self.not_run),
        ]
        return "\n".join(lines)


if TYPE_CHECKING:
    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12, only the platform's class supports subclasses


class OnnxFile(_Path):
    """The path of an exported file, with a report of the operators that run in integers.

    Attributes:
        kept: Parts that the format left as `QuantizeLinear` / `DequantizeLinear` pairs, or that a rule declined.
        not_run: Runtimes that did not run the file on one sample when it was written, and why.
    """

    kept: tuple[Kept, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    def report(self) -> RuntimeReport:
        """Return the kernels with which ONNX Runtime's CPU provider runs this file, and runtimes that did not run it.

        The report lists no kernels if ONNX Runtime did not load the file when it was written.

        Raises:
            ExportError: If ONNX Runtime loaded the file when it was written, but is now missing or does not load it.
        """
        return runtime_report(self, kept=self.kept, not_run=self.not_run)


def runtime_report(path: Path, *, kept: Iterable[Kept] = (), not_run: tuple[NotRun, ...] = ()) -> RuntimeReport:
    """Return the kernels with which ONNX Runtime runs `path`.

    Args:
        path: ONNX file.
        kept: Parts that the report lists as left in pairs or declined.
        not_run: Runtimes that did not run the file. If ONNX Runtime did not load it, the report lists no kernels.

    Raises:
        ExportError: If ONNX Runtime is not installed or does not load the file.
    """
    unloaded = any(one.runtime == "ONNX Runtime" and not one.loads for one in not_run)
    if not unloaded and importlib.util.find_spec("onnxruntime") is None:
        raise ExportError("the report needs onnxruntime: pip install 'quark_fx[onnx]'")
    original = ir.load(path)
    if not unloaded and (vendor := vendor_formats(original)):
        raise ExportError(
            f"ONNX Runtime has no kernels for {', '.join(vendor)}; use the vendor's tools to check support"
        )
    nodes, conversions = ((), 0) if unloaded else _optimized(path, original, None)
    size = sum(file.stat().st_size for file in (path, *data_files(original, path.parent)))
    return RuntimeReport(nodes, tuple(kept), conversions, original.opset_imports[""], size, not_run)


def saturating_kernels(path: Path, *, optimize: bool | None) -> list[str]:
    """Return the names of nodes whose kernels may saturate on x64 processors without VNNI.

    A vendor's quantizers in the file run as standard ones.

    Raises:
        ExportError: If ONNX Runtime does not load the file.
    """
    nodes, _ = _optimized(path, ir.load(path), optimize)
    return [node.name for node in nodes if node.saturates]


def _optimized(path: Path, original: ir.Model, optimize: bool | None) -> tuple[tuple[RuntimeNode, ...], int]:
    """Return the kernels with which ONNX Runtime runs a file, and the number of conversions between them."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "optimized.onnx")

        def configure(options: Any) -> None:
            options.optimized_model_filepath = str(written)
            file = "session.optimized_model_external_initializers_file_name"
            options.add_session_config_entry(file, "optimized.data")

        try:
            open_session(path, optimize=optimize, configure=configure)
        except Exception as error:
            raise ExportError(f"ONNX Runtime does not load {path.name}: {error}") from error
        run = ir.load(written)
        _infer_types(run)
        in_file = {(node.name, node.op_type) for node in original.graph}
        nodes = tuple(_described(node, in_file) for node in run.graph if not _is_plumbing(node))
        return nodes, sum(node.op_type in _CONVERSIONS for node in run.graph)


_CONVERSIONS = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "Cast"})
_INTEGER_KERNELS = frozenset(
    {
        *("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulInteger", "ConvInteger", "QGemm"),
        "DynamicQuantizeLSTM",
        "QAttention",
    }
)
_WEIGHT_ONLY_KERNELS = frozenset({"MatMulNBits", "GatherBlockQuantized", "QMoE"})
"""Kernels that dequantize their weights, except `MatMulNBits` with `accuracy_level=4`."""

_AT_LEVEL_ZERO = " with session.qdq_matmulnbits_accuracy_level='0'; by default, it rounds activations to int8"
"""Addition for a `MatMulNBits` that ONNX Runtime fuses from pairs, at the level of the session."""

_HAVE_INTEGER_KERNELS = frozenset(
    {
        *("Conv", "FusedConv", "MatMul", "FusedMatMul", "Gemm", "FusedGemm", "Add", "Mul", "Concat", "LeakyRelu"),
        *("Sigmoid", "Softmax", "AveragePool", "GlobalAveragePool", "MaxPool", "Resize"),
        *("Transpose", "Reshape", "Flatten"),
    }
)


_CODES_OF_FIRST = frozenset({"QGemm", "Clip"})
"""Kernels on codes, in addition to `QLinear...`, whose result has the type of their first input."""


def _infer_types(model: ir.Model) -> None:
    """Infer the types of values that ONNX Runtime omits, such as those inside expanded functions."""
    for node in model.graph:
        for index, output in enumerate(node.outputs):
            if output.dtype is None and (dtype := _type_of(model, node, index)) is not None:
                output.dtype = dtype


def _type_of(model: ir.Model, node: ir.Node, index: int) -> ir.DataType | None:
    """Return the type of an output according to the definition of its operator; `None` if unknown."""
    source = node.inputs[0].dtype if node.inputs and node.inputs[0] is not None else None
    if node.op_type == "QuantizeLinear":
        return code_type(node)
    if node.op_type == "QLinearConcat":
        return node.inputs[1].dtype if node.inputs[1] is not None else ir.DataType.UINT8
    if node.op_type.startswith("QLinear") or (node.op_type in _CODES_OF_FIRST and source is not None):
        return source
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if node.domain:  # a fused operator, or one in another memory layout: its result is float if its input is
        return source if source is not None and source.is_floating_point() else None
    try:
        schema = onnx.defs.get_schema(node.op_type, model.opset_imports.get("", 1))
    except onnx.defs.SchemaError:
        return None
    name = schema.outputs[min(index, len(schema.outputs) - 1)].type_str
    for position, value in enumerate(node.inputs):
        declared = schema.inputs[min(position, len(schema.inputs) - 1)]
        if value is not None and value.dtype is not None and declared.type_str == name:
            return value.dtype
    allowed = next((c.allowed_type_strs for c in schema.type_constraints if c.type_param_str == name), [name])
    only = re.fullmatch(r"tensor\((\w+)\)", allowed[0]) if len(allowed) == 1 else None
    return ir.DataType[only[1].upper()] if only and only[1].upper() in ir.DataType.__members__ else None


def _is_plumbing(node: ir.Node) -> bool:
    """Tell whether a node only converts types or computes shapes."""
    if node.op_type in _CONVERSIONS or node.op_type in ("Constant", "Shape"):
        return True
    types = [v.dtype for v in (*node.inputs, *node.outputs) if v is not None and v.dtype is not None]
    numbers = any(dtype.is_floating_point() for dtype in types) or any(map(_is_code, (*node.inputs, *node.outputs)))
    return bool(types) and not numbers


def _is_code(value: ir.Value | None) -> bool:
    return value is not None and value.dtype is not None and value.dtype.is_integer() and value.dtype.itemsize <= 1


def _described(node: ir.Node, in_file: Collection[tuple[str | None, str]]) -> RuntimeNode:
    kernel = f"{node.domain}.{node.op_type}" if node.domain == "com.microsoft.nchwc" else node.op_type
    if node.op_type in _WEIGHT_ONLY_KERNELS:
        quantized = _rounds_activations(node)
    else:
        in_integers = node.op_type.startswith("QLinear") or node.op_type in _INTEGER_KERNELS
        quantized = in_integers or any(map(_is_code, node.inputs))
    is_in_file = (node.name, node.op_type) in in_file
    reason = "" if quantized else _reason(node, is_in_file)
    return RuntimeNode(node.name or "", kernel, quantized, reason, _saturates(node, is_in_file))


def _rounds_activations(node: ir.Node) -> bool:
    """Tell whether a weight-only kernel rounds its activations to int8, as `MatMulNBits` does at level 4."""
    read = node.attributes.get_int
    has_kernel = (read("bits", 4), read("block_size", 0)) != (2, 16)  # ONNX Runtime 1.32 has the others
    return has_kernel and read("accuracy_level", 0) == 4


_FACTORS = {
    "QLinearConv": (0, 3),
    "QLinearMatMul": (0, 3),
    "QGemm": (0, 3),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "DynamicQuantizeMatMul": (0, 1),
    "DynamicQuantizeLSTM": (0, 1, 2),
}
"""Positions of the activation, then of the weights, among the inputs of each kernel that adds products in pairs."""


def _saturates(node: ir.Node, kept_signed: bool) -> str:
    """Return the part of a kernel that may saturate without VNNI; empty if no part does.

    Args:
        node: Node of the graph that ONNX Runtime writes.
        kept_signed: Whether signed activations stay signed. They do if the file contains the kernel; they become
            unsigned if ONNX Runtime creates the kernel by fusion.
    """
    if node.op_type not in _FACTORS:
        return ""
    activation, *weights = (node.inputs[position] for position in _FACTORS[node.op_type])
    if activation is None or (activation.dtype == ir.DataType.INT8 and kept_signed):
        return ""
    signed = [weight for weight in weights if weight is not None and weight.dtype == ir.DataType.INT8]
    over = pairs = limit = 0
    for weight in signed:
        if weight.const_value is None:
            return "both factors are activations"
        codes = torch.from_numpy(weight.const_value.numpy().copy())
        if (bound := _bound(node, codes)) is not None:
            exceeded, limit = bound.exceeded(codes), bound.limit
            over, pairs = over + int(exceeded.sum()), pairs + exceeded.numel()
    return f"{over} of {pairs} pairs of weights exceed {limit}" if over else ""


def _bound(node: ir.Node, codes: torch.Tensor) -> PairBound | None:
    """Return the bound on pairs of codes whose products a kernel adds in 16 bits; `None` if it adds in 32 bits."""
    rank, limit = codes.dim(), LARGEST_SUM // 255
    if node.op_type == "QLinearConv":
        if codes.shape[1] == 1 and node.attributes.get_int("group", 1) == codes.shape[0]:
            return None
        return PairBound.of_convolution(limit, range(2, rank), 1)
    return PairBound.of_product(limit, rank, rank - 1 if node.attributes.get_int("transB", 0) else rank - 2)


def _reason(node: ir.Node, is_in_file: bool) -> str:
    if node.op_type in _WEIGHT_ONLY_KERNELS:
        fused = node.op_type == "MatMulNBits" and not is_in_file
        return "it dequantizes its weights, and computes in float" + _AT_LEVEL_ZERO * fused
    if node.op_type not in _HAVE_INTEGER_KERNELS:
        return f"ONNX Runtime has no integer {node.op_type}"
    read = [value for value in node.inputs if value is not None and (value.dtype is None or not _is_index(value))]
    dequantized = [_dequantizer(value) for value in read]
    if not any(dequantized):
        return "none of its inputs is quantized"
    wide = [d.inputs[0].dtype for d in dequantized if d is not None and d.inputs[0] is not None]
    if any(not _is_eight_bit(dtype) for dtype in wide):
        types = ", ".join(sorted({str(dtype).lower() for dtype in wide if dtype is not None}))
        return f"ONNX Runtime has no kernel for {types or 'codes of unknown type'}"
    if not all(dequantized):
        return "not all of its inputs are quantized"
    readers = [use.node.op_type for output in node.outputs for use in output.uses()]
    if not readers or any(reader != "QuantizeLinear" for reader in readers):
        return "its output is not quantized"
    return "ONNX Runtime does not fuse it"


def _is_index(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_integer() and value.dtype.itemsize > 4


def _is_eight_bit(dtype: Any) -> bool:
    return dtype is not None and dtype.is_integer() and dtype.itemsize in (1, 4)


def _dequantizer(value: ir.Value) -> ir.Node | None:
    producer = value.producer()
    return producer if producer is not None and producer.op_type == "DequantizeLinear" else None
