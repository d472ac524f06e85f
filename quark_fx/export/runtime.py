"""How ONNX Runtime has to be set up to compute what the graph says."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from quark_fx.formats import FloatFormat
from quark_fx.graph import code_format, target_name


def runtime_options(gm: GraphModule, *, optimize: bool | None = None) -> Any:
    """Return `onnxruntime.SessionOptions` for the export of a quantized graph.

    Args:
        gm: the quantized graph.
        optimize: let ONNX Runtime fuse integer kernels; default: yes, except for 8-bit floats and 4-bit activations,
            whose fusions its CPU kernels do not implement.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if optimize is None:
        optimize = not any(_fuses_wrongly(node) for node in gm.graph.nodes)
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # Blocked weights are fused to MatMulNBits; its default rounds activations to int8, which is not the graph's maths.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
    return options


def _fuses_wrongly(node: Node) -> bool:
    fmt = code_format(node)
    if fmt is None:
        return False
    return isinstance(fmt, FloatFormat) or (target_name(node) == "quark_fx.quantize.default" and fmt.bits < 8)
