"""Configure ONNX Runtime to compute exactly the arithmetic that a graph specifies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


def may_optimize(graph: ir.Graph) -> bool:
    """Tell whether ONNX Runtime's CPU kernels implement the fusions that it makes in a graph.

    They do not for 8-bit floats, or for activations that have neither 8 nor 16 bits.
    """
    return not any(_fuses_wrongly(node) for node in graph.all_nodes())


def _fuses_wrongly(node: ir.Node) -> bool:
    if node.op_type not in ("QuantizeLinear", "DequantizeLinear") or node.attributes.get_int("block_size", 0):
        return False  # ONNX Runtime does not fuse operators on blocks
    if node.op_type == "QuantizeLinear":
        dtype = code_type(node)
        return dtype.is_floating_point() or dtype.itemsize not in (1, 2)
    codes = node.inputs[0]
    return codes is not None and codes.dtype is not None and codes.dtype.is_floating_point()


def code_type(quantizer: ir.Node) -> ir.DataType:
    """Return the type of the codes of a `QuantizeLinear`."""
    import onnx_ir as ir

    if (dtype := quantizer.outputs[0].dtype) is not None:
        return dtype
    zero_point = quantizer.inputs[2] if len(quantizer.inputs) > 2 else None
    if zero_point is not None and zero_point.dtype is not None:
        return zero_point.dtype
    return ir.DataType(quantizer.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8)


def session_options(*, optimize: bool) -> Any:
    """Return `onnxruntime.SessionOptions` that preserve a graph's arithmetic, with or without fusions (`optimize`)."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # errors are raised; warnings concern machines and shapes
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # Products with weights in blocks are fused to MatMulNBits, which by default rounds activations to int8, unlike the
    # graph.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return options


@cache
def adds_pairs_in_16_bits() -> bool:
    """Tell whether ONNX Runtime saturates sums of two 8-bit products on this processor (x64 without VNNI).

    The test multiplies two activations of 255 by two weights of 127; in 32 bits, the sum is 64770.
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
    (total,) = session.run(None, {"codes": np.full((1, 2), 255, np.uint8)})
    return int(np.asarray(total).item()) < 2 * 255 * 127


def open_session(
    path: Path,
    options: Any = None,
    edit: Callable[[ir.Model], None] | None = None,
    *,
    optimize: bool | None = None,
    configure: Callable[[Any], None] | None = None,
) -> Any:
    """Return an `onnxruntime.InferenceSession` for a file on the CPU.

    Args:
        path: File to load. Vendors' quantizers in the file are replaced by standard ones.
        options: Session options, which may be modified; default: the result of `session_options`.
        edit: Function that edits the graph before ONNX Runtime loads it.
        optimize: Whether ONNX Runtime may fuse integer kernels; `options` overrides it. Default: result of
            `may_optimize`.
        configure: Function that changes the session options in place.
    """
    import onnx_ir as ir
    import onnxruntime

    from quark_fx.export.to_onnx.formats import vendor_formats

    providers = ["CPUExecutionProvider"]
    path = path.resolve()  # external data are in the folder of the file to which a link points
    model = ir.load(path)
    vendors = vendor_formats(model)
    edited = edit is not None or bool(vendors)
    if edit is not None:
        edit(model)
    for standard in {row.standard for row in vendors.values() if row.standard is not None}:
        model = standard(model)
    if options is None:
        options = session_options(optimize=may_optimize(model.graph) if optimize is None else optimize)
    if configure is not None:
        configure(options)
    if not edited:
        return onnxruntime.InferenceSession(str(path), options, providers=providers)
    # The graph is passed as bytes, without a folder for external data.
    folder = str(path.parent)
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    return onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=providers)
