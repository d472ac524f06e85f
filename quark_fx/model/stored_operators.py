"""The calls that a stored graph may contain: a list of operators, with arguments of the types in their schemas.

The list has the operators that capture and the passes produce. It excludes operators that do not check arguments that
address memory (`as_strided`, unchecked sparse and nested constructors, packed sequences), access files or devices,
write into their arguments, or exist for training.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from quark_fx.errors import QuarkError
from quark_fx.graph.nodes import static_size
from quark_fx.system.untrusted import brief

PYTHON: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv", "truediv", "mod", "neg")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "not_", "pow")},
    **{f"sym_{name}": getattr(torch, f"sym_{name}") for name in ("max", "min", "float", "int", "ite", "not", "sqrt")},
    **{f"math_{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
}
"""Functions on sizes, and the function that selects one of several results."""

_ATEN_BY_KIND = {
    "value by value": """
        abs absolute acos acosh add addcdiv addcmul __and__ angle arccos arccosh arcsin arcsinh arctan arctan2
        arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or
        bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip conj conj_physical copysign cos
        cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide
        fmax fmin fmod frac frexp gcd ge gelu glu greater greater_equal gt hardshrink hardsigmoid hardswish
        hardtanh heaviside hypot i0 igamma igammac imag isclose isfinite isinf isnan isneginf isposinf isreal
        lcm ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 log_sigmoid logaddexp
        logaddexp2 logical_and logical_not logical_or logical_xor logit __lshift__ lt masked_fill maximum
        minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal __or__ polar polygamma
        positive pow prelu _prelu_kernel rad2deg real reciprocal relu relu6 remainder round rrelu __rshift__
        rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_digamma
        special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit
        special_expm1 special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p
        special_log_ndtr special_log_softmax special_logit special_logsumexp special_ndtr special_ndtri
        special_psi special_round special_sinc special_softmax special_xlog1py special_xlogy special_zeta sqrt
        square sub subtract tan tanh threshold true_divide trunc where xlogy __xor__
    """,
    "the same values in another type or place": """
        alias alias_copy clone _conj _conj_physical contiguous copy detach detach_copy fill lift lift_fresh
        lift_fresh_copy resolve_conj resolve_neg to _to_copy type_as zero
    """,
    "sums and orders": """
        all amax amin aminmax any argmax argmin argsort bincount bucketize count_nonzero cummax cummin cumprod
        cumsum cumulative_trapezoid frobenius_norm histc isin kthvalue linalg_matrix_norm linalg_norm
        linalg_vector_norm logcumsumexp logsumexp max mean median min mode msort nanmean nanmedian nanquantile
        nansum norm prod quantile searchsorted sort std std_mean sum topk trace trapezoid trapz
        unique_consecutive var var_mean
    """,
    "products": """
        addbmm addmm addmv addr baddbmm bilinear bmm cdist _cdist_forward chain_matmul conv1d conv2d conv3d
        conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d _convolution convolution _convolution_mode
        cosine_similarity cross det dist dot einsum _euclidean_dist ger _grouped_mm gru.input gru_cell inner
        inverse kron linalg_cholesky linalg_cross linalg_det linalg_inv linalg_inv_ex linalg_matmul
        linalg_matrix_power linalg_multi_dot linalg_solve linalg_vecdot linear _log_softmax log_softmax
        lstm.input lstm_cell matmul matrix_power mm mv outer pairwise_distance pdist rnn_relu.input
        rnn_relu_cell rnn_tanh.input rnn_tanh_cell _safe_softmax scaled_dot_product_attention
        _scaled_dot_product_attention_math _softmax softmax tensordot _trilinear vdot
    """,
    "normalization": """
        alpha_dropout batch_norm dropout feature_alpha_dropout feature_dropout _fused_rms_norm group_norm
        instance_norm layer_norm native_dropout native_group_norm native_layer_norm norm_except_dim renorm rms_norm
    """,
    "windows and sampling": """
        adaptive_avg_pool1d adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool1d avg_pool2d
        avg_pool3d channel_shuffle col2im constant_pad_nd grid_sampler grid_sampler_2d grid_sampler_3d im2col
        max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
        max_unpool2d max_unpool3d native_channel_shuffle pad _pad_circular _pad_enum pixel_shuffle
        pixel_unshuffle reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
        replication_pad3d upsample_bicubic2d.vec _upsample_bicubic2d_aa.vec upsample_bilinear2d.vec
        _upsample_bilinear2d_aa.vec upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec
        upsample_nearest3d.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec
        _upsample_nearest_exact3d.vec upsample_trilinear3d.vec
    """,
    "movement": """
        adjoint atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors broadcast_to cartesian_prod cat
        chunk column_stack combinations complex concat concatenate diag diag_embed diagflat diagonal
        diagonal_copy diagonal_scatter diff dsplit dstack expand expand_as expand_copy flatten flip fliplr
        flipud hsplit hstack mH mT matrix_H meshgrid moveaxis movedim narrow narrow_copy numpy_T pad_sequence
        permute permute_copy ravel repeat repeat_interleave reshape reshape_as roll rot90 row_stack select
        select_copy slice slice_copy split split_copy split_with_sizes split_with_sizes_copy squeeze
        squeeze_copy stack swapaxes swapdims t t_copy tensor_split tile transpose transpose_copy tril triu
        unbind unbind_copy unflatten unfold unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes
        _unsafe_view unsqueeze unsqueeze_copy view view_as view_as_complex view_as_real view_copy vsplit vstack
    """,
    "places given by values, which the kernels check": """
        argwhere embedding embedding_bag gather index index_add index_copy index_fill index_put index_reduce
        index_select masked_scatter masked_select nonzero nonzero_static one_hot put scatter scatter_add
        scatter_reduce select_scatter slice_scatter take take_along_dim
    """,
    "new values": """
        arange bartlett_window bernoulli blackman_window empty.memory_format empty_like eye full full_like
        hamming_window hann_window linspace logspace new_empty new_full new_ones new_zeros ones ones_like rand
        rand_like randint randint_like randn randn_like randperm range scalar_tensor tril_indices triu_indices
        zeros zeros_like
    """,
    "transforms and losses": """
        binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss fft_fft
        fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
        fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn huber_loss istft kl_div
        l1_loss mse_loss nll_loss nll_loss_nd smooth_l1_loss stft
    """,
    "sizes": """
        item _local_scalar_dense sym_constrain_range sym_constrain_range_for_size sym_numel sym_size sym_stride
    """,
}
_ATEN = frozenset(" ".join(_ATEN_BY_KIND.values()).split())
"""Operators of ATen: every functional overload of a name, or the named overload only."""

_OPERATORS: dict[str, frozenset[str]] = {
    "aten": _ATEN,
    "quark_fx": frozenset({"quantize", "dequantize", "dynamic_qparams", "grouped_mm", "rotate"}),
    "transformers": frozenset({"grouped_mm_fallback"}),
    # Excluded: operators on regions of interest, which do not check the image index of a region, and deform_conv2d,
    # which uses NaN offsets.
    "torchvision": frozenset({"nms"}),
}

_DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
DTYPES = {name: getattr(torch, name) for name in _DTYPES if hasattr(torch, name)}
"""Dtypes, keyed by their names."""

MEMORY_FORMATS = {
    name: getattr(torch, name) for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
}
"""Memory formats, keyed by their names."""

_LIMIT = 1 << 63


def resolve(name: Any, namespaces: Collection[str] = ()) -> Callable[..., Any]:
    """Return the function that a stored graph calls `name` (`"aten.linear.default"`, `"python.add"`).

    Args:
        name: Name from `operator_name`.
        namespaces: Libraries from which any functional operator may be called.

    Raises:
        QuarkError: If a stored graph may not call the function, or it is not registered.
    """
    parts = name.split(".") if isinstance(name, str) else []
    if len(parts) == 2 and parts[0] == "python" and parts[1] in PYTHON:
        return PYTHON[parts[1]]
    if len(parts) != 3 or not all(part.isidentifier() and not part.startswith("__") for part in parts[::2]):
        raise QuarkError(f"the stored graph calls {brief(name)}, which is not allowed")
    namespace, packet, overload = parts
    listed = {packet, f"{packet}.{overload}"} & _OPERATORS.get(namespace, frozenset())
    if not listed and namespace not in namespaces:
        raise QuarkError(
            f"the stored graph calls {brief(name)}, which is not allowed; if you trust the source of this model and "
            f"know the operator, pass load(..., namespaces=({namespace!r},))"
        )
    schema = _schema(namespace, packet, overload)
    if schema is None:
        raise QuarkError(f"the stored graph calls {name}, which is not registered; import the library that defines it")
    if not _is_dispatched(namespace, packet, overload):
        raise QuarkError(
            f"the stored graph calls {name}, which only TorchScript uses; exported graphs do not contain it, and it is "
            "not allowed"
        )
    if schema.is_mutable:
        raise QuarkError(f"the stored graph calls {name}, which writes into its arguments and is not allowed")
    function = getattr(getattr(getattr(torch.ops, namespace), packet), overload)
    assert isinstance(function, torch._ops.OpOverload)
    return function


_WRITTEN: dict[Any, Callable[..., Any]] = {
    # Fake tensors keep the results of `lift` operators as constants, so computing shapes would run real kernels.
    torch.ops.aten.lift.default: torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh.default: torch.ops.aten.alias.default,
    torch.ops.aten.lift_fresh_copy.default: torch.ops.aten.clone.default,
    torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


def written(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Return an equivalent call that initializes all memory it returns, and runs no kernel while shapes are computed.

    Uninitialized memory can hold another user's data.

    Raises:
        QuarkError: If a grouped product does not multiply rows by a stack of matrices.
    """
    if target is torch.ops.aten._grouped_mm.default:
        arguments = arguments_of(target, args, kwargs)
        parts = tuple(arguments.pop(name, None) for name in ("self", "mat2", "offs"))
        if not all(isinstance(part, Node) for part in parts) or any(value is not None for value in arguments.values()):
            raise QuarkError(
                f"the stored graph calls {target} with {brief([*args])} and {brief(sorted(kwargs))}; only the grouped "
                "form is allowed: rows, a stack of matrices, and offs, without bias and out_dtype"
            )
        return torch.ops.quark_fx.grouped_mm.default, parts, {}
    replacement: Any = _WRITTEN.get(target)
    if replacement is None:
        return target, args, kwargs
    names = {argument.name for argument in replacement._schema.arguments}
    return replacement, args, {name: value for name, value in kwargs.items() if name in names}


def arguments_of(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments given in a call, keyed by their names in the schema."""
    return dict(zip((argument.name for argument in target._schema.arguments), args, strict=False)) | dict(kwargs)


def _schema(namespace: str, packet: str, overload: str) -> Any:
    """Return the schema of a registered operator without an attribute lookup of a stored name."""
    schemas = torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}")
    overload_name = "" if overload == "default" else overload
    return next((schema for schema in schemas if schema.overload_name == overload_name), None)


def _is_dispatched(namespace: str, packet: str, overload: str) -> bool:
    """Tell whether an overload is an operator of the dispatcher, like all operators that capture records.

    Other overloads are instructions of TorchScript: `to.prim_dtype` accepts any number as a dtype, `remainder.int`
    divides Python numbers.
    """
    try:
        torch._C._dispatch_find_schema_or_throw(f"{namespace}::{packet}", "" if overload == "default" else overload)
    except RuntimeError:
        return False
    return True


def operator_name(target: Any) -> str | None:
    """Return the name of a function in stored graphs; `None` if they cannot call the function."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return next((f"python.{name}" for name, function in PYTHON.items() if function is target), None)


def require_fitting(target: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `QuarkError` unless the arguments, nodes and constants, have the types that `target` takes."""
    if not isinstance(target, torch._ops.OpOverload):
        numbers = all(_fits(value, "number") or isinstance(value, slice) for value in args)
        if kwargs or not 1 <= len(args) <= 3 or not numbers:
            raise QuarkError(
                f"the stored graph calls {operator_name(target)} with {brief(list(args))}; it takes 1 to 3 numbers"
            )
        return
    schema = target._schema
    names = [argument.name for argument in schema.arguments]
    positional = [argument for argument in schema.arguments if not argument.kwarg_only]
    unknown = [key for key in kwargs if key not in names[len(args) :]]
    passed_names = {*names[: len(args)], *kwargs}
    missing = [a.name for a in schema.arguments if a.name not in passed_names and not a.has_default_value()]
    if len(args) > len(positional) or unknown or missing:
        raise QuarkError(
            f"the stored graph calls {target} with {len(args)} arguments and {brief(sorted(kwargs))}; it takes "
            f"{', '.join(names)}"
        )
    by_name = {argument.name: argument for argument in schema.arguments}
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        kind = str(by_name[name].real_type)
        if not _fits(value, kind) or (name == "pin_memory" and value):
            raise QuarkError(f"the stored graph calls {target} with {name}={brief(value)}, which is not of type {kind}")
    # Memory with booleans other than 0 and 1 makes kernels read out of bounds.
    if target._opname in ("view", "view_copy") and torch.bool in [*args, *kwargs.values()]:
        raise QuarkError(f"the stored graph calls {target} with dtype=torch.bool, which is not allowed")
    # Kernels write no result for the number of an unknown mode.
    if target.namespace == "aten" and target._opname.startswith("grid_sampler"):
        bound = arguments_of(target, args, kwargs)
        modes = {"interpolation_mode": range(2 if target._opname.endswith("3d") else 3), "padding_mode": range(3)}
        for mode, choices in modes.items():
            if type(bound[mode]) is not int or bound[mode] not in choices:
                raise QuarkError(
                    f"the stored graph calls {target} with {mode}={brief(bound[mode])}, which is not one of "
                    f"{', '.join(map(str, choices))}"
                )


_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def require_recurrent_sizes(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `QuarkError` if the states, weights, or biases of a recurrent layer do not fit its input.

    Args:
        target: Any function; only recurrent operators are checked.
        args: Positional arguments; nodes have their values in `meta["val"]`.
        kwargs: Keyword arguments.
    """
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or target._opname not in _GATES:
        return
    arguments = arguments_of(target, args, kwargs)
    gates, hx, params = _GATES[target._opname], arguments["hx"], arguments["params"]
    states = hx if isinstance(hx, list | tuple) else [hx]
    layers, two, biased = arguments["num_layers"], arguments["bidirectional"], arguments["has_biases"]
    if not (
        target._overloadname == "input"
        and type(layers) is int
        and layers > 0
        and type(two) is type(biased) is bool
        and len(states) == 1 + (target._opname == "lstm")
        and isinstance(params, list | tuple)
    ):
        raise QuarkError(f"the stored graph calls {target} with arguments that are not layers, states, and weights")
    shapes = [_shape(item) for item in (arguments["input"], *states, *params)]
    x, first, *rest = shapes
    last, rest = (rest[0], rest[1:]) if target._opname == "lstm" else (first, rest)
    runs = 2 if two else 1
    if not len(x) == len(first) == len(last) == 3 or not first[0] == last[0] == layers * runs:
        raise QuarkError(
            f"the stored graph calls {target} with an input and states of shapes {brief([x, first, last])}; all need "
            f"3 dimensions, and the first size of the states must be {layers * runs}"
        )
    out, hidden = first[2], last[2]
    expected: list[tuple[Any, ...]] = []
    for layer in range(min(layers, len(rest))):
        width = x[2] if layer == 0 else runs * out
        one: list[tuple[Any, ...]] = [(gates * hidden, width), (gates * hidden, out)]
        one += [(gates * hidden,)] * (2 * biased)
        one += [(out, hidden)] * (out != hidden)  # the projection of the outputs
        expected += one * runs
    if None in (x[2], out, hidden) or rest != expected:
        raise QuarkError(
            f"the stored graph calls {target} with weights of shapes {brief(rest)}, which are not {brief(expected)}"
        )


def _shape(value: Any) -> tuple[Any, ...]:
    """Return the shape of a node, with `None` for a dynamic size; empty for any other value."""
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    sizes: list[Any] = list(tensor.shape) if isinstance(tensor, torch.Tensor) else []
    return tuple(static_size(size) for size in sizes)


def _fits(value: Any, kind: str) -> bool:
    """Tell whether a node or constant may be an argument of type `kind`, in the spelling of schemas."""
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1])
    if kind.startswith("List["):
        inner = kind[5:-1]
        if isinstance(value, list | tuple):
            return all(_fits(item, inner) for item in value)
        return isinstance(value, Node) or (inner in ("int", "float", "number") and _fits(value, inner))
    number = isinstance(value, Node) or (isinstance(value, bool | int | float) and not _is_huge(value))
    checks: dict[str, bool] = {
        "Tensor": number,
        "number": number,
        "float": number,
        "int": isinstance(value, Node) or (isinstance(value, int) and not _is_huge(value)),
        "bool": isinstance(value, Node | bool),
        "str": isinstance(value, str),
        "ScalarType": isinstance(value, torch.dtype),
        "Layout": value is torch.strided,
        "MemoryFormat": isinstance(value, torch.memory_format),
        "Device": isinstance(value, torch.device),
    }
    return checks.get(kind, False)


def _is_huge(value: float) -> bool:
    return isinstance(value, int) and not -_LIMIT <= value < _LIMIT


def require_small(value: Any) -> None:
    """Raise `QuarkError` for an integer of more than 64 bits, since computing with it could take unlimited time."""
    if type(value) is int and _is_huge(value):
        raise QuarkError(f"the stored graph computes with the number {brief(value)}, which is too large")


__all__ = [
    *("DTYPES", "MEMORY_FORMATS", "PYTHON", "arguments_of", "operator_name", "require_fitting"),
    *("require_recurrent_sizes", "require_small", "resolve", "written"),
]
