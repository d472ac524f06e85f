"""Configure ONNX Runtime to compute the arithmetic of the graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule, Node

from quark_fx.graph.nodes import QUANTIZE, code_format, target_name

if TYPE_CHECKING:
    import onnx_ir as ir


def runtime_options(gm: GraphModule, *, optimize: bool | None = None) -> Any:
    """Return `onnxruntime.SessionOptions` for the export of a quantized graph.

    Args:
        gm: Quantized graph.
        optimize: Whether ONNX Runtime may fuse integer kernels; default: result of `may_optimize`.
    """
    return session_options(optimize=may_optimize(gm) if optimize is None else optimize)


def may_optimize(gm: GraphModule) -> bool:
    """Tell whether ONNX Runtime's CPU kernels implement its fusions; not for 8-bit floats and 32-bit activations."""
    return not any(_fuses_wrongly(node) for node in gm.graph.nodes)


def file_may_optimize(path: Path) -> bool:
    """Tell whether ONNX Runtime's CPU kernels implement its fusions of a file; see `may_optimize`."""
    import onnx_ir as ir

    made = (node for node in ir.load(path).graph.all_nodes() if node.op_type == "QuantizeLinear")
    types = {code_type(node) for node in made if not node.attributes.get_int("block_size", 0)}
    return not any(dtype.is_floating_point() or dtype.itemsize > 2 for dtype in types)


def code_type(quantizer: ir.Node) -> ir.DataType:
    """Return the type of the codes of a `QuantizeLinear`."""
    import onnx_ir as ir

    zero_point = quantizer.inputs[2] if len(quantizer.inputs) > 2 else None
    if zero_point is not None and zero_point.dtype is not None:
        return zero_point.dtype
    return ir.DataType(quantizer.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)


def session_options(*, optimize: bool) -> Any:
    """Return `onnxruntime.SessionOptions` that preserve the graph's arithmetic."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # Blocked weights are fused to MatMulNBits, which by default rounds activations to int8, unlike the graph.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return options


@cache
def adds_pairs_in_16_bits() -> bool:
    """Tell whether ONNX Runtime saturates sums of two 8-bit products on this processor (x64 without VNNI).

    It multiplies two activations of 255 by two weights of 127; a sum in 32 bits is 64770.
    """
    import numpy as np
    import onnx_ir as ir
    import onnxruntime

    codes = ir.Value(name="codes", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape((1, 2)))
    weight = ir.tensor(np.full((2, 1), 127, np.int8), name="weight")
    constant = ir.Value(name="weight", const_value=weight, type=ir.TensorType(weight.dtype), shape=ir.Shape((2, 1)))
    product = ir.node("MatMulInteger", [codes, constant])
    product.outputs[0].name, product.outputs[0].dtype = "sum", ir.DataType.INT32
    graph = ir.Graph([codes], product.outputs, nodes=[product], initializers=[constant], opset_imports={"": 21})
    source = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    session = onnxruntime.InferenceSession(source, session_options(optimize=False), providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"codes": np.full((1, 2), 255, np.uint8)})
    return int(np.asarray(made).item()) < 2 * 255 * 127


def open_session(path: Path, options: Any, edit: Callable[[ir.Model], None] | None = None) -> Any:
    """Return an `onnxruntime.InferenceSession` of a file on the CPU.

    Args:
        path: File. Vendors' quantizers in it are replaced by standard ones.
        options: Session options; they may be modified.
        edit: Function that edits the graph first.
    """
    import onnx_ir as ir
    import onnxruntime

    from quark_fx.export.to_onnx.vitis import PREFIXES, with_standard_nodes

    providers = ["CPUExecutionProvider"]
    path = path.resolve()  # the target of a link, whose folder has the external data
    model = ir.load(path)
    if edit is None and not PREFIXES.keys() & model.opset_imports.keys():
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    if edit is not None:
        edit(model)
    # The graph is passed as bytes, without a folder for external data.
    folder = str(path.parent)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    source = ir.to_proto(with_standard_nodes(model)).SerializeToString()
    return onnxruntime.InferenceSession(source, options, providers=providers)


def _fuses_wrongly(node: Node) -> bool:
    fmt = code_format(node)
    if fmt is None or (len(node.args) > 5 and node.args[5]):
        return False  # ONNX Runtime does not fuse operators on blocks
    return not fmt.is_integer or (target_name(node) == QUANTIZE and fmt.activation_container.bits not in (8, 16))
