"""The target `tensorrt`: TensorRT on NVIDIA GPUs, which reads ONNX files with pairs of quantizers and dequantizers.

TensorRT does not support zero points. Weights and activations are int8. Weights of matrix products can be int4 in
blocks of 64 or 128 inputs instead, with float activations.

No file of this target has been run in TensorRT: the rules come from its documentation, and `check` tests a file against
the rules.

Source: "Working with Quantized Types" and "Quantization Schemes" of its documentation, for int4 ("The supported block
sizes are {64, 128}. The block dimension should be one of the last two dimensions. TensorRT only supports INT4 for
weight quantization", https://docs.nvidia.com/deeplearning/tensorrt); `docs/operators.md` of
onnx-tensorrt 10.15 for operators and their restrictions; `IQuantizeLayer` and `IDequantizeLayer` for scales;
https://github.com/NVIDIA/TensorRT/issues/2380 for the axis of transposed convolutions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.config.target import OnnxFiles, Operand, Placement, Refusal, Target, register_target, undivided_groups
from quark_fx.errors import ExportError
from quark_fx.graph.operators import RECURRENT
from quark_fx.numbers.formats import INT4, INT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT32
from quark_fx.targets.onnxruntime import MOVES

if TYPE_CHECKING:
    import onnx_ir as ir

    from quark_fx.graph.linear import Linear

_READ = """
Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool BatchNormalization BlackmanWindow
Cast CastLike Ceil Celu Clip Concat Constant ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DeformConv
DepthToSpace DequantizeLinear Div Dropout Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather
GatherElements GatherND Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If ImageScaler
InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log LogSoftmax Loop
LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min Mish Mod Mul Neg NonMaxSuppression
NonZero Not OneHot Or PRelu Pad ParametricSoftplus Pow QuantizeLinear RMSNormalization RNN RandomNormal
RandomNormalLike RandomUniform RandomUniformLike Range Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp
ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
RotaryEmbedding Round STFT ScaledTanh Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid Sign Sin Sinh
Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum Tan Tanh TensorScatter ThresholdedRelu
Tile TopK Transpose Trilu Unsqueeze Upsample Where Xor
"""

OPERATORS = frozenset(_READ.split())
"""ONNX operators that TensorRT's parser supports."""

OPSETS = (9, 24)
"""Oldest and newest opset that TensorRT supports."""

_CODES = ("INT8", "INT4", "FLOAT8E4M3FN", "FLOAT4E2M1")
_BLOCKS = ("INT4", "FLOAT4E2M1")
"""Supported types of codes, and types of codes that can have a scale per block."""

_BLOCK_SIZES = (64, 128)
"""Supported numbers of int4 weights per scale."""

_ATTRIBUTES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("LSTM", "input_forget"): (0,),
    ("LSTM", "layout"): (0,),
    ("Resize", "antialias"): (0,),
    ("Resize", "keep_aspect_ratio_policy"): ("stretch",),
    ("Resize", "mode"): ("nearest", "linear"),
    ("ScatterND", "reduction"): ("none",),
    ("TopK", "sorted"): (1,),
}
"""Supported values of attributes, by operator and attribute; all default values are supported."""

_DILATED, _ONE_OUTPUT = ("AveragePool", "LpPool", "MaxPool"), ("LayerNormalization", "MaxPool")
"""Operators that TensorRT supports only without dilations, and operators that it supports only with one output."""

_MATRIX_PRODUCTS = ("Gemm", "MatMul")
_PRODUCTS = ("Conv", "ConvTranspose", *_MATRIX_PRODUCTS)


def check(model: ir.Model) -> None:
    """Raise `ExportError` for a model that TensorRT does not support, according to its documentation.

        Target.TENSORRT.onnx.check(onnx_ir.load("model.onnx"))

    Args:
        model: ONNX model from any tool.

    Raises:
        ExportError: If TensorRT does not support the model; the message names every such node and the reason.
    """
    if lines := list(offenses(model)):
        raise ExportError(
            "TensorRT does not support\n  " + "\n  ".join(lines) + "\nQuantize with target='tensorrt', and keep "
            "operators without a kernel in float with an override."
        )


def offenses(model: ir.Model) -> Iterator[str]:
    """Yield a line for each node of a model that breaks a rule of the documentation."""
    opset = model.opset_imports.get("")
    if opset is not None and not OPSETS[0] <= opset <= OPSETS[1]:
        yield f"opset {opset}: it supports {OPSETS[0]} to {OPSETS[1]}"
    functions = {(function.domain, function.name) for function in model.functions.values()}
    for owner in (model.graph, *model.functions.values()):
        for node in owner.all_nodes():
            if (node.domain, node.op_type) not in functions and (why := _offense(node)):
                yield f"{node.op_type} {node.name or node.outputs[0].name}: {why}"


def _offense(node: ir.Node) -> str | None:
    """Return a message about the first rule that a node breaks; `None` if it breaks none."""
    if node.domain not in ("", "ai.onnx"):
        return f"an operator of {node.domain}, not of ONNX"
    if node.op_type not in OPERATORS:
        return "its parser does not have this operator"
    for (operator, name), allowed in _ATTRIBUTES.items():
        if operator == node.op_type and name in node.attributes and _value(node, name) not in allowed:
            return f"{name}={_value(node, name)}; it supports {' or '.join(map(str, allowed))}"
    if node.op_type in _DILATED and any(size != 1 for size in node.attributes.get_ints("dilations", [])):
        return "a pool with dilations"
    if node.op_type in _ONE_OUTPUT and any(_is_read(output) for output in node.outputs[1:]):
        return "an output after the first"
    if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
        return _pair(node)
    return _product(node) if node.op_type in _PRODUCTS else None


def _value(node: ir.Node, name: str) -> Any:
    value = node.attributes[name].value
    return value.decode() if isinstance(value, bytes) else value


def _is_read(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


# Pairs ---------------------------------------------------------------------------------------------------------------


def _pair(node: ir.Node) -> str | None:
    """Return the unsupported property of a quantizer or dequantizer; `None` if TensorRT supports it."""
    codes, scale = _code_type(node), _array(_input(node, 1))
    if codes not in _CODES:
        return f"codes of {codes}; it supports {', '.join(_CODES)}"
    if (points := _input(node, 2)) is not None:
        zeros = _array(points)
        if zeros is None or zeros.astype("f4").any():
            return "zero points that are not constant zeros"
    if scale is None:
        return "a scale that is not a constant"
    if not (scale.astype("f4") > 0).all():
        return "scales that are not positive"
    if codes == "INT4":
        return _int4(node, scale)
    if scale.ndim > 1 or node.attributes.get_int("block_size", 0):
        return None if codes in _BLOCKS else f"{codes} in blocks; it supports {' and '.join(_BLOCKS)} in blocks"
    if scale.size > 1 and _array(_input(node, 0)) is None and not _is_of_weight(node):
        return "an activation with a scale per channel; it supports one per tensor"
    return None


def _int4(node: ir.Node, scale: Any) -> str | None:
    """Return the unsupported property of an int4 quantizer or dequantizer; `None` if TensorRT supports it."""
    if _array(_input(node, 0)) is None and not _is_of_weight(node):
        return "an activation in INT4, which it supports only for weights"
    size, rank = node.attributes.get_int("block_size", 0), scale.ndim
    if size not in _BLOCK_SIZES:
        what = f"blocks of {size}" if size else "no blocks"
        return f"INT4 with {what}; it supports blocks of {' or '.join(map(str, _BLOCK_SIZES))}"
    if not rank:
        return f"INT4 in blocks of {size} with one scale; it needs a scale per block"
    axis = node.attributes.get_int("axis", 1) % rank
    if axis < rank - 2:
        return "INT4 in blocks along another dimension than the last two"
    read = _input(node, 0)
    length = read.shape[axis] if read is not None and read.shape is not None else None
    return (
        f"INT4 in blocks of {size}, which do not divide {length}" if isinstance(length, int) and length % size else None
    )


def _code_type(node: ir.Node) -> str:
    """Return the name of the type of the codes that a node writes or reads."""
    import onnx_ir as ir

    points = _input(node, 2)
    if node.op_type == "DequantizeLinear" and (read := _input(node, 0)) is not None and read.dtype is not None:
        return str(read.dtype.name)
    if points is not None and points.dtype is not None:
        return str(points.dtype.name)
    # TensorRT replaces ONNX's default, uint8, by int8, which would change the results of the file.
    return str(ir.DataType(node.attributes.get_int("output_dtype", 0) or ir.DataType.UINT8).name)


def _is_of_weight(node: ir.Node) -> bool:
    """Tell whether a dequantizer reads a quantized constant."""
    quantizer = _producer(_input(node, 0), "QuantizeLinear")
    return quantizer is not None and _array(_input(quantizer, 0)) is not None


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _moved(value: ir.Value | None) -> ir.Value | None:
    """Return the value before operators of `MOVES`, which quantizers can be moved across."""
    while value is not None and (node := value.producer()) is not None and node.op_type in MOVES:
        value = _input(node, 0)
    return value


def _array(value: ir.Value | None) -> Any:
    """Return the array of a constant (an initializer or the output of a `Constant`); `None` for other values."""
    import onnx_ir as ir

    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


# Products ------------------------------------------------------------------------------------------------------------


def _product(node: ir.Node) -> str | None:
    """Return the unsupported property of a product with a dequantized weight: an operand or the axis of its scales."""
    weight, order = _input(node, 1), None
    if (turned := _producer(weight, "Transpose")) is not None:
        weight, order = _input(turned, 0), turned.attributes.get_ints("perm", [])
    codes = _producer(weight, "DequantizeLinear")
    if codes is None or (_array(_input(codes, 0)) is None and not _is_of_weight(codes)):
        return None
    if _code_type(codes) == "INT4":
        if node.op_type not in _MATRIX_PRODUCTS:
            return f"an int4 weight, which it supports for {' and '.join(_MATRIX_PRODUCTS)}"
        rounded = _producer(_moved(_input(node, 0)), "DequantizeLinear") is not None
        return "an int4 weight with a quantized activation; it supports float activations only" if rounded else None
    if _code_type(codes) == "INT8" and _producer(_moved(_input(node, 0)), "DequantizeLinear") is None:
        return "an int8 weight with a float activation; it supports weight-only quantization in int4"
    scale, shape = _array(_input(codes, 1)), weight.shape if weight is not None else None
    if scale is None or scale.size < 2 or scale.ndim != 1 or codes.attributes.get_int("block_size", 0):
        return None
    rank = len(shape) if shape is not None else 2
    axis = codes.attributes.get_int("axis", 1) % rank
    axis = list(order or range(rank)[::-1]).index(axis) if order is not None else axis
    expected = _axis(node, rank)
    if axis == expected:
        return None
    kind = "input" if node.op_type == "ConvTranspose" else "output"
    return (
        f"a weight with scales along axis {axis}; its kernels need scales per {kind} channel, along axis {expected}, "
        "or one scale (granularity='tensor')"
    )


def _axis(node: ir.Node, rank: int) -> int:
    """Return the dimension of a weight along which TensorRT supports scales."""
    if node.op_type == "MatMul":
        return rank - 1
    if node.op_type == "Gemm":
        return 0 if node.attributes.get_int("transB", 0) else 1
    return 0


# Configurations ------------------------------------------------------------------------------------------------------


def _is_bias(spec: TensorSpec, operand: Operand) -> bool:
    return operand is Operand.BIAS


def _is_other_format(spec: TensorSpec, operand: Operand) -> bool:
    is_supported = spec.format == INT8 or (spec.format == INT4 and operand is Operand.WEIGHT)
    return not is_supported or spec.scale.is_8_bit


def _has_other_blocks(spec: TensorSpec, operand: Operand) -> bool:
    in_blocks = spec.granularity is Granularity.GROUP and spec.group_size in _BLOCK_SIZES
    return spec.format == INT4 and not (in_blocks and spec.scale.group_size is None)


def _has_computed_scales(spec: TensorSpec, operand: Operand) -> bool:
    return spec.scale != FLOAT32


def _has_zero_points(spec: TensorSpec, operand: Operand) -> bool:
    return not spec.scheme.symmetric


def _has_signed_scales(spec: TensorSpec, operand: Operand) -> bool:
    return spec.symmetry is Symmetry.SIGN_AWARE


def _has_other_scales(spec: TensorSpec, operand: Operand) -> bool:
    supported = (Granularity.TENSOR, Granularity.CHANNEL) if operand is Operand.WEIGHT else (Granularity.TENSOR,)
    return spec.format == INT8 and spec.granularity not in supported


def _is_measured(spec: TensorSpec, operand: Operand) -> bool:
    return spec.dynamic


def _refuses(kind: str, weight: TensorSpec, read: TensorSpec | None, linear: Linear | None) -> str:
    """Return the reason why TensorRT cannot multiply a weight by an activation; empty if it can."""
    if weight.format != INT4:
        if read is None:
            return "TensorRT multiplies int8 weights by int8 activations only; set an input in int8, or weight=None"
        return _scales_by_output(weight, linear) if kind == "conv_transpose" else ""
    if kind != "linear":
        return (
            "TensorRT supports int4 weights only in matrix products; set weight=None for it, or int8 with an input in "
            "int8"
        )
    if read is not None:
        return "TensorRT multiplies int4 weights by activations in float; set input=None"
    return undivided_groups(weight, linear, _BLOCK_SIZES, "set weight=None for it", shorter=False)


def _scales_by_output(weight: TensorSpec, linear: Linear | None) -> str:
    """Return the reason why TensorRT does not support the scales of a transposed convolution; empty if it does."""
    if weight.granularity is Granularity.TENSOR or linear is None:
        return ""
    # With groups, dimension 0 of the weight, which has the input channels, also separates output channels.
    if linear.output_groups > 1 or linear.shape[linear.output_axis] == 1:
        return ""
    return (
        "TensorRT needs the scales of a transposed convolution along its inputs; set granularity='tensor' for its "
        "weight (Override(pattern=..., weight=config.weight.replace(granularity='tensor')))"
    )


TENSORRT = Target(
    name="tensorrt",
    refuses=(
        Refusal(_is_bias, "TensorRT adds biases in float; set bias=None"),
        Refusal(
            _is_other_format,
            "TensorRT supports int8, and int4 for weights, not {spec.format}; set format='int8', or 'int4' for weights",
        ),
        Refusal(_has_zero_points, "TensorRT does not support zero points; set symmetry='symmetric'"),
        Refusal(_has_signed_scales, "TensorRT does not support negative scales; set symmetry='symmetric'"),
        Refusal(
            _has_other_scales,
            "TensorRT supports int8 scales per tensor, and per channel for weights, not per {spec.granularity}; set "
            "granularity='tensor', or 'channel' for weights",
        ),
        Refusal(
            _has_other_blocks,
            "TensorRT needs int4 weights in blocks of 64 or 128; set granularity='group', and group_size=128",
        ),
        Refusal(
            _has_computed_scales,
            "scales in {spec.scale} are cast in the file, and TensorRT needs constants; set scale='float32'",
        ),
        Refusal(_is_measured, "TensorRT needs constant scales in the file; calibrate them (drop dynamic=True)"),
    ),
    placement=Placement(
        arithmetic=frozenset({"aten.add.Tensor", "aten.avg_pool2d.default", "aten.adaptive_avg_pool2d.default"}),
        in_float=RECURRENT | {"embedding"},
        refuses=_refuses,
    ),
    # Every release of TensorRT 10 supports opset 20; int4 needs opset 21.
    onnx=OnnxFiles(formats=("qdq",), opset=20, opsets=(14, OPSETS[1]), check=check),
)
register_target(TENSORRT)

__all__ = ["OPERATORS", "OPSETS", "TENSORRT", "check", "offenses"]
