"""Every ATen operator with an ONNX lowering at extreme inputs: the file beside torch, both compared with float64.

    python -m benchmarks.extreme_inputs [NAME …] [--types float32 float16 int64 int32 int8 uint8]

The list of operators is the lowering table of the exporter. Each is called with arguments drawn from its schema or
listed in `ARGUMENTS`; the functions of `FUNCTIONS` are added. A cell is one function on one kind of input, in one type.
It is wrong where torch's result is finite and the file's is not, or the other way round unless the file is right (it
has the result of float64, or its infinity in the type), and where the file's error against float64 is more than ten
times torch's own plus a few roundings of the largest value. Integers must be equal where the result fits the type, or
nearest to the result of float64; interpolated bytes may differ by one where height or width varies in the file
(docs/limits.md). The command prints the wrong cells, the functions that export refuses, and the
operators without arguments. It leaves out those that make, move, or draw values.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import onnxruntime
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import judged
from benchmarks.experiment import experiment
from quark_fx.export.to_onnx.resized_bytes import INTERPOLATIONS
from quark_fx.presets import INT8_STATIC

Function = Callable[[Tensor], Any]
aten = torch.ops.aten
GAIN, SHIFT = torch.linspace(0.5, 1.5, 4), torch.linspace(-1, 1, 4)

FUNCTIONS: dict[str, Function] = {
    "log_sigmoid": F.logsigmoid,
    "logaddexp": lambda x: torch.logaddexp(x, x.flip(0)),
    "logaddexp of equals": lambda x: torch.logaddexp(x, x),
    "logaddexp2": lambda x: torch.logaddexp2(x, x.flip(0)),
    "softplus": F.softplus,
    "softplus, steep": lambda x: F.softplus(x, beta=2.0, threshold=5),
    "logsumexp": lambda x: torch.logsumexp(x, (0, 2)),
    "logcumsumexp": lambda x: torch.logcumsumexp(x, -1),
    "logcumsumexp, first axis": lambda x: torch.logcumsumexp(x, 0),
    "softmax": lambda x: F.softmax(x, -1),
    "softmax, masked": lambda x: F.softmax(x.masked_fill(torch.eye(4, 6).bool(), -torch.inf), -1),
    "softmin": lambda x: F.softmin(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "tanhshrink": F.tanhshrink,
    "silu": F.silu,
    "mish": F.mish,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu": lambda x: F.elu(x, 0.7),
    "elu, all arguments": lambda x: aten.elu(x, 0.3, 1.1, 2.0),
    "celu": lambda x: F.celu(x, 0.7),
    "selu": F.selu,
    "erfc": torch.special.erfc,
    "erfcx": torch.special.erfcx,
    "logdet": lambda x: torch.logdet(x[:, :, :4]),
    "maximum of all": lambda x: x.amax(),
    "mean of all": lambda x: x.mean(None),
    "expm1": lambda x: torch.expm1(-x.abs()),
    "expm1, small": lambda x: torch.expm1(x * 1e-6),
    "log1p": lambda x: torch.log1p(x.abs()),
    "log1p, small": lambda x: torch.log1p(x.abs() * 1e-6),
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "reciprocal": torch.reciprocal,
    "power": lambda x: x.abs().pow(-0.5),
    "division": lambda x: x / x.flip(0),
    "remainder": lambda x: torch.remainder(x, 3.7),
    "remainder, negative": lambda x: torch.remainder(x, -0.3),
    "group_norm": lambda x: F.group_norm(x, 2, GAIN.to(x), SHIFT.to(x)),
    "group_norm, one group": lambda x: F.group_norm(x[..., None], 1),
    "instance_norm": lambda x: F.instance_norm(x, weight=GAIN.to(x), bias=SHIFT.to(x)),
    "layer_norm": lambda x: F.layer_norm(x, (4, 6)),
    "rms_norm": lambda x: F.rms_norm(x, (6,), eps=1e-6),
    "batch_norm, training": lambda x: F.batch_norm(x, None, None, GAIN.to(x), SHIFT.to(x), training=True),
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "var": lambda x: x.var((0, 2), correction=0),
    "std": lambda x: x.std(-1),
    "std of all": lambda x: x.std(),
    "std_mean": lambda x: torch.std_mean(x, (1, 2), correction=0, keepdim=True)[0],
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "cross entropy of logits": lambda x: F.binary_cross_entropy_with_logits(x, 0.3 * torch.ones_like(x)),
    "cross entropy, weighted": lambda x: F.binary_cross_entropy_with_logits(
        x, torch.ones_like(x), GAIN.to(x)[:, None], pos_weight=torch.full((6,), 2.0).to(x), reduction="none"
    ),
}
"""Functions that models call; the tests try each on every kind of input in float32."""


def _each(call: Callable[[Any, Any, Tensor], Any], *values: Any) -> list[Callable[[Any, Tensor], Any]]:
    return [functools.partial(call, value) for value in values]


ARGUMENTS: dict[str, list[Callable[[Any, Tensor], Any]]] = {
    "_log_softmax": [lambda op, x: op(x, 1, False)],
    "_softmax": [lambda op, x: op(x, 1, False)],
    "_native_batch_norm_legit.no_stats": [lambda op, x: op(x, GAIN.to(x), SHIFT.to(x), True, 0.1, 1e-5)[0]],
    "_native_batch_norm_legit_no_training": [
        lambda op, x: op(x, GAIN.to(x), SHIFT.to(x), SHIFT.to(x), GAIN.to(x), 0.1, 1e-5)[0]
    ],
    "_native_batch_norm_legit": [lambda op, x: op(x, GAIN.to(x), None, SHIFT.to(x), GAIN.to(x), False, 0.1, 1e-5)[0]],
    "_native_batch_norm_legit_functional": [
        lambda op, x: op(x, GAIN.to(x), None, SHIFT.to(x), GAIN.to(x), False, 0.1, 1e-5)[0]
    ],
    "native_batch_norm": [lambda op, x: op(x, GAIN.to(x), None, SHIFT.to(x), GAIN.to(x), False, 0.1, 1e-5)[0]],
    "native_group_norm": [lambda op, x: op(x, GAIN.to(x), SHIFT.to(x), 4, 4, 6, 2, 1e-5)[0]],
    "native_layer_norm": [lambda op, x: op(x, [6], None, None, 1e-5)[0]],
    "instance_norm": [lambda op, x: op(x, None, None, None, None, True, 0.1, 1e-5, False)],
    "group_norm": [lambda op, x: op(x, 2), lambda op, x: op(x, 4, GAIN.to(x), SHIFT.to(x), 1e-3)],
    "layer_norm": [lambda op, x: op(x, [6]), lambda op, x: op(x, [4, 6])],
    "adaptive_avg_pool1d": [lambda op, x: op(x, [4])],
    "adaptive_avg_pool2d": [lambda op, x: op(x, [3, 4])],
    "adaptive_avg_pool3d": [lambda op, x: op(x[None], [3, 2, 4])],
    "_adaptive_avg_pool3d": [lambda op, x: op(x[None], [3, 2, 4])],
    "avg_pool1d": [lambda op, x: op(x, [3])],
    "avg_pool2d": [lambda op, x: op(x, [3, 3], [1, 1], [1, 1], False, False)],
    "avg_pool3d": [lambda op, x: op(x[None], [2, 2, 2])],
    "max_pool1d": [lambda op, x: op(x, [3], [1], [1])],
    "max_pool2d": [lambda op, x: op(x, [3, 3], [1, 1], [1, 1])],
    "max_pool3d": [lambda op, x: op(x[None], [3, 3, 3], [1, 1, 1], [1, 1, 1])],
    "max_pool1d_with_indices": [lambda op, x: op(x, [3], [1], [1])[0]],
    "max_pool2d_with_indices": [lambda op, x: op(x, [3, 3], [1, 1], [1, 1])[0]],
    "max_pool3d_with_indices": [lambda op, x: op(x[None], [3, 3, 3], [1, 1, 1], [1, 1, 1])[0]],
    "logsumexp": [lambda op, x: op(x, [0, 2]), lambda op, x: op(x, [1], True)],
    "mean.dim": [lambda op, x: op(x, [0, -1]), lambda op, x: op(x, None)],
    "std.dim": [lambda op, x: op(x, [0, -1]), lambda op, x: op(x, None, False)],
    "sum.dim_IntList": [lambda op, x: op(x, [0, -1]), lambda op, x: op(x, None)],
    "linalg_vector_norm": _each(lambda order, op, x: op(x, order, [-1]), 2, 1, 0, 3, -1, 0.5, torch.inf, -torch.inf),
    "dot": [lambda op, x: op(x[0, 0], x[1, 0])],
    "mv": [lambda op, x: op(x[0], x[1, 0])],
    "mm": [lambda op, x: op(x[0], x[1].mT)],
    "bmm": [lambda op, x: op(x, x.mT)],
    "matmul": [lambda op, x: op(x, x.mT)],
    "linear": [lambda op, x: op(x, x[0])],
    "addmm": [lambda op, x: op(x[0, :, :4], x[1], x[2].mT, beta=0.5, alpha=2)],
    "addmv": [lambda op, x: op(x[0, :, 0], x[1], x[2, 0])],
    "addr": [lambda op, x: op(x[0], x[1, :, 0], x[2, 0])],
    "addbmm": [lambda op, x: op(x[0, :, :4], x, x.mT)],
    "baddbmm": [lambda op, x: op(x[:, :, :4], x, x.mT)],
    "addcdiv": [lambda op, x: op(x, x.flip(0), x.flip(1), value=0.5)],
    "addcmul": [lambda op, x: op(x, x.flip(0), x.flip(1), value=0.5)],
    "lerp.Scalar": [lambda op, x: op(x, x.flip(0), 0.3)],
    "lerp.Tensor": [lambda op, x: op(x, x.flip(0), torch.full_like(x, 0.3))],
    "bilinear": [lambda op, x: op(x[0], x[1], x[2][None].mT @ x[3][None])],
    "conv1d": [lambda op, x: op(x, x[:, :, :3])],
    "conv2d": [lambda op, x: op(x, x[:, None, :3, :3], None, [1, 1], [0, 0], [1, 1], 1)],
    "conv3d": [lambda op, x: op(x[None], x[None, None, :2, :2, :2])],
    "convolution": [lambda op, x: op(x, x[:, :, :3], None, [1], [1], [1], False, [0], 1)],
    "cross": [lambda op, x: op(x[:, :3], x.flip(0)[:, :3], 1)],
    "linalg_cross": [lambda op, x: op(x[:, :3], x.flip(0)[:, :3], dim=1)],
    "scaled_dot_product_attention": [lambda op, x: op(x, x, x), lambda op, x: op(x, x, x, None, 0.0, True)],
    "mse_loss": [lambda op, x: op(x, x.flip(0)), lambda op, x: op(x, x.flip(0), 0)],
    "nll_loss": [lambda op, x: op(x[0], torch.tensor([0, 1, 5, 2]))],
    "cross_entropy_loss": [
        lambda op, x: op(x[0], torch.tensor([0, 1, 5, 2])),
        lambda op, x: op(x[0], torch.tensor([0, 1, 5, 2]), None, 1, -100, 0.1),
    ],
    "binary_cross_entropy_with_logits": [lambda op, x: op(x, torch.full_like(x, 0.3))],
    "prelu": [lambda op, x: op(x, GAIN.to(x))],
    "_prelu_kernel": [lambda op, x: op(x, GAIN.to(x)[:, None])],
    "div.Tensor_mode": _each(lambda mode, op, x: op(x, x.flip(0), rounding_mode=mode), "floor", "trunc", None),
    "div.Scalar_mode": _each(
        lambda how, op, x: op(x, how[0], rounding_mode=how[1]), *itertools.product((3, -3, 7), ("floor", "trunc"))
    ),
    "round.decimals": [lambda op, x: op(x, decimals=2), lambda op, x: op(x, decimals=-2)],
    "pow.Tensor_Scalar": _each(lambda power, op, x: op(x, power), 2, 3, -1, -2, 0.5, -0.5, 0, 1, 1.5, 0.1),
    "pow.Scalar": _each(lambda base, op, x: op(base, x), 2.0, 0.5, 1.0, 10.0),
    "pow.Tensor_Tensor": [lambda op, x: op(x.abs(), x.flip(0)), lambda op, x: op(x, torch.full_like(x, 3))],
    "log_sigmoid": [lambda op, x: op(x)],
    "hardtanh_backward": [lambda op, x: op(x, x.flip(0), -1, 1)],
    "celu": [lambda op, x: op(x), lambda op, x: op(x, 0.3)],
    "elu": [lambda op, x: op(x), lambda op, x: op(x, 0.3, 1.1, 2.0)],
    "gelu": [lambda op, x: op(x), lambda op, x: op(x, approximate="tanh")],
    "softplus": [lambda op, x: op(x), lambda op, x: op(x, 0.1), lambda op, x: op(x, 10, 3)],
    "leaky_relu": [lambda op, x: op(x, 0.2)],
    "logit": [lambda op, x: op(x.frac().abs()), lambda op, x: op(x, 1e-3)],
    "clamp": [lambda op, x: op(x, -1, 1)],
    "clamp.Tensor": [lambda op, x: op(x, -x.abs(), x.flip(0).abs())],
    "addmm.activation": [],
    "sub.Tensor": [lambda op, x: op(x, x.flip(0), alpha=2)],
    "add.Tensor": [lambda op, x: op(x, x.flip(0), alpha=-2)],
    "std.correction": [
        lambda op, x: op(x, [-1], correction=0),
        lambda op, x: op(x, [0, 1], keepdim=True),
        lambda op, x: op(x),
        lambda op, x: op(x, [2], correction=2),
    ],
    "std_mean.correction": [lambda op, x: op(x, [1], correction=1)[0], lambda op, x: op(x, [1])[1]],
    "max.dim": [lambda op, x: op(x, 1)],
    "min.dim": [lambda op, x: op(x, 1)],
    "topk": [lambda op, x: op(x, 2)[0]],
    "sort": [lambda op, x: op(x)[0]],
    "sort.stable": [lambda op, x: op(x, stable=True)[0]],
    "index_put": [lambda op, x: op(x, [torch.tensor([0, 0])], x[2:], True)],
    "scatter_add": [lambda op, x: op(x, 0, torch.zeros(4, 4, 6, dtype=torch.int64), x)],
    "scatter_reduce.two": _each(
        lambda how, op, x: op(x, 0, torch.zeros(4, 4, 6, dtype=torch.int64), x, how), "sum", "prod", "amax", "amin"
    ),
    "embedding_bag": [],
    "einsum": [lambda op, x: op("abc,abd->acd", [x, x])],
    "where.self": [lambda op, x: op(x > 0, x, x.flip(0) / x)],
    "masked_fill.Scalar": [lambda op, x: op(x, x > 0, -torch.inf)],
    "upsample_bilinear2d": [lambda op, x: op(x[None], [7, 5], False), lambda op, x: op(x[None], [7, 5], True)],
    "upsample_bicubic2d": [lambda op, x: op(x[None], [7, 5], False), lambda op, x: op(x[None], [3, 5], True)],
    "upsample_linear1d": [lambda op, x: op(x, [9], False)],
    "upsample_trilinear3d": [lambda op, x: op(x[None, None], [5, 7, 9], False)],
    "_upsample_bilinear2d_aa": [lambda op, x: op(x[None], [7, 5], False), lambda op, x: op(x[None], [3, 4], False)],
    "_upsample_bicubic2d_aa": [lambda op, x: op(x[None], [7, 5], False)],
    "upsample_bilinear2d.vec": [lambda op, x: op(x[None], None, False, [1.5, 2.0])],
    "upsample_bicubic2d.vec": [lambda op, x: op(x[None], None, False, [1.5, 2.0])],
    "upsample_trilinear3d.vec": [lambda op, x: op(x[None, None], [5, 7, 9], False, None)],
    "grid_sampler": [lambda op, x: op(x[None], x[None, :, :, :2].tanh(), 0, 0, False)],
    "grid_sampler_2d": [lambda op, x: op(x[None], x[None, :, :, :2].tanh(), 0, 1, True)],
    "col2im": [lambda op, x: op(x[0][None].mT, [4, 3], [2, 3], [1, 1], [1, 0], [1, 1])],
    "xlogy.Tensor": [lambda op, x: op(x.flip(0), x.abs())],
    "xlogy.Scalar_Self": [lambda op, x: op(2.0, x.abs())],
    "xlogy.Scalar_Other": [lambda op, x: op(x, 2.0)],
    "heaviside": [lambda op, x: op(x, x.flip(0))],
    "logdet": [lambda op, x: op(x[:, :, :4])],
    "det": [lambda op, x: op(x[:, :, :4])],
    "linalg_det": [lambda op, x: op(x[:, :, :4])],
    "_linalg_det": [lambda op, x: op(x[:, :, :4])[0]],
}
"""Calls of operators whose schema does not determine the arguments; an empty list leaves the operator out."""

_DRAWN: dict[tuple[str, ...], list[Callable[[Any, Tensor], Any]]] = {
    ("Tensor",): [lambda op, x: op(x), lambda op, x: op(x.abs())],
    ("Tensor", "Tensor"): [lambda op, x: op(x, x.flip(0)), lambda op, x: op(x.abs(), x)],
    ("Tensor", "number"): [lambda op, x: op(x, 3), lambda op, x: op(x, -2)],
    ("number", "Tensor"): [lambda op, x: op(3, x), lambda op, x: op(-2, x)],
    ("Tensor", "int"): [lambda op, x: op(x, -1), lambda op, x: op(x, 0)],
}
"""Calls by the types of the arguments that have no default."""

_NO_ARITHMETIC = """
__lshift__ __rshift__ _conj _embedding_bag _embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c _grouped_mm
_local_scalar_dense _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu _to_copy _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_view
alias allclose angle arange as_strided atleast_1d atleast_2d atleast_3d bernoulli bincount bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window broadcast_to cat chunk clone
complex concat concatenate conj constant_pad_nd contiguous copy detach diagonal diagonal_copy dropout embedding
embedding_bag embedding_renorm empty empty_like empty_strided equal expand expand_as fake_quantize_per_channel_affine
fake_quantize_per_tensor_affine fill flatten flip full full_like gather gru hamming_window hann_window histc im2col
index index_select is_nonzero isclose lift_fresh_copy linspace lstm mH mT masked_scatter multinomial narrow
native_dropout new_empty new_empty_strided new_full new_ones new_zeros nll_loss_forward nonzero normal
normal_functional ones ones_like pad permute pixel_shuffle pixel_unshuffle polar rand rand_like randint randint_like
randn randn_like reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
replication_pad2d replication_pad3d reshape resolve_conj resolve_neg roll scalar_tensor scatter select select_scatter
slice slice_scatter split split_with_sizes squeeze stack stft sym_size sym_storage_offset t tensor tile transpose tril
triu type_as unbind unflatten unfold unique_consecutive unique_dim unsafe_split unsqueeze upsample_nearest1d
upsample_nearest2d upsample_nearest3d view view_as view_as_complex view_as_complex_copy view_as_real view_as_real_copy
view_copy zeros zeros_like
"""
_SKIPPED = frozenset(_NO_ARITHMETIC.split())


_BY_SIGMOID = frozenset({"sigmoid", "silu", "glu"})
"""ONNX Runtime's `Sigmoid` has an absolute error of up to 1.7e-7, however small its result (docs/onnx.md)."""


def kinds_of(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return inputs of shape (4, 4, 6) in a type, by kind."""
    drawn = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(4))
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        edges = torch.tensor([limits.max, limits.min + 1, limits.max - 1, -1 if limits.min else 3, 7])
        uneven = (drawn * 40).round().clamp(max(limits.min, -99), 99) + (0 if limits.min else 99)
        uneven = torch.where(uneven == 0, 5, uneven)
        return {"small": uneven.to(dtype), "limits": edges.repeat(20)[:96].reshape(4, 4, 6).to(dtype)}
    limit = torch.finfo(dtype)
    edge = 0.999 * torch.tensor(limit.max, dtype=torch.float64).log()
    mixed = torch.tensor([0.0, 0.0, 1e4, -1e4, limit.tiny, 1.0]).repeat(4, 1).expand(4, 4, 6) * drawn.abs()
    kinds = {
        "normal": drawn,
        "1e4": drawn * 1e4,
        "1e4 only": drawn.abs() + 1e4,
        "-1e4 only": -drawn.abs() - 1e4,
        "above 88": drawn.abs() + 100,
        "below -88": -drawn.abs() - 100,
        "edge of exp": edge - drawn.abs() / 100,
        "edge of exp, negative": -edge + drawn / 100,
        "a mean of 1,000 deviations": drawn + 1000,
        "a mean of -1,000 deviations": drawn / 10 - 100,
        "smallest normal numbers": drawn * 1.02 * limit.tiny,
        "small": drawn * 1e-4,
        "from 4": drawn.abs() + 4,
        "below -4": -drawn.abs() - 4,
        "zeros": drawn.abs() * 0,
        "mixed": mixed,
    }
    if limit.max > 1e30:
        kinds["1e15"] = drawn * 1e15
    return {kind: x.to(dtype) for kind, x in kinds.items()}


def of_operators(chosen: Callable[[str], bool]) -> tuple[dict[str, Function], list[str]]:
    """Return calls of the operators that have a lowering, and the operators that there are no arguments for."""
    from quark_fx.export.to_onnx.translation import _registry, translation_table

    registry = _registry(21, tuple(translation_table().items()))
    named = sorted(name.removeprefix("aten::") for name in registry.functions if str(name).startswith("aten::"))
    functions: dict[str, Function] = {}
    unknown: list[str] = []
    for name in filter(chosen, named):
        packet, _, overload = name.partition(".")
        if packet in _SKIPPED:
            continue
        op = getattr(getattr(aten, packet), overload or "default", None)
        if op is None or {str(argument.type) for argument in op._schema.arguments} <= {"number", "int", "float"}:
            continue
        required = tuple(str(a.type) for a in op._schema.arguments if not a.has_default_value())
        calls = ARGUMENTS.get(name, _DRAWN.get(required))
        if calls is None:
            unknown.append(name)
        for number, call in enumerate(calls or ()):
            functions[f"aten.{name} {number}"] = functools.partial(call, op)
    return functions, unknown


class Functions(nn.Module):
    """Computes each function of one input."""

    def __init__(self, functions: Mapping[str, Function]) -> None:
        super().__init__()
        self.functions = dict(functions)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in self.functions.items()}


def differences(functions: Mapping[str, Function], session: onnxruntime.InferenceSession, x: Tensor) -> dict[str, str]:
    """Return the faults of the file of `Functions(functions)` for an input, by function.

    Args:
        functions: Functions in the file.
        session: Session of the file.
        x: Input of shape (4, 4, 6).
    """
    (taken,), names = session.get_inputs(), [output.name for output in session.get_outputs()]
    made = dict(zip(names, session.run(names, {taken.name: x.numpy()}), strict=True))
    varies = not all(isinstance(size, int) for size in taken.shape[-2:])
    wrong = {}
    for name, function in functions.items():
        torchs, exact = function(x), function(x.double())
        for key in [key for key in made if key == name or key.startswith(f"{name}.")]:
            place = int(key.rpartition(".")[2]) if key != name else None
            known = (value if place is None else value[place] for value in (torchs, exact))
            through = name.removeprefix("aten.").split()[0] in _BY_SIGMOID
            absolute = 2e-7 * max(1.0, float(x.abs().max())) if through else 0.0
            if varies and x.dtype == torch.uint8 and _overload(name) in INTERPOLATIONS:
                absolute = 1.0
            found = _difference(torch.from_numpy(made[key]), *known, absolute=absolute)
            if found:
                wrong[name] = found
    return wrong


def _overload(name: str) -> str:
    """Return the operator that a name of `of_operators` calls, with its overload."""
    operator = name.split()[0]
    return operator if operator.count(".") > 1 else f"{operator}.default"


def _difference(file: Tensor, torchs: Tensor, exact: Tensor, *, absolute: float) -> str:
    if file.shape != torchs.shape or file.dtype != torchs.dtype:
        return f"{file.dtype} {list(file.shape)} instead of {torchs.dtype} {list(torchs.shape)}"
    if not torchs.is_floating_point():
        right = file == torchs
        if torchs.dtype != torch.bool and exact.is_floating_point():
            right |= ~(exact.abs() < torch.iinfo(torchs.dtype).max)
            # Torch interpolates bytes in fixed point; the nearest integer is right. Float64 is exact up to 2**52.
            right |= (exact.abs() < 2**52) & ((file.double() - exact).abs() <= 0.5)
        if absolute:
            right |= (file.double() - torchs.double()).abs() <= absolute
        different = int((~right).sum())
        return f"{different} of {file.numel()} differ" if different else ""
    limit = torch.finfo(torchs.dtype)
    rounded = exact.to(torchs.dtype).double()
    file, torchs, exact = file.double(), torchs.double(), exact.double()
    same = (file == torchs) | (file.isnan() & torchs.isnan())
    finite = torchs.isfinite()
    if bool((finite & ~file.isfinite()).any()):
        return f"{file[finite & ~file.isfinite()][0]} where torch has {torchs[finite & ~file.isfinite()][0]:.4g}"
    known = finite & exact.isfinite()
    scale = torchs[known].abs().amax() if known.any() else torch.zeros(())
    # Ten times torch's own rounding, and a few roundings of the largest value or of a subnormal number.
    allowed = 10 * (torchs - exact)[known].abs().amax() if known.any() else torch.zeros(())
    allowed = allowed + 80 * limit.eps * scale + limit.tiny * limit.eps * 1e4 + absolute
    error = (file - exact).abs()
    # Torch overflows on the way to a result; the file has that result, or its infinity.
    better = exact.isfinite() & ((file == rounded) | (file.isfinite() & (error <= 1e-3 * exact.abs())))
    if bool((~finite & ~same & ~better).any()):
        place = ~finite & ~same & ~better
        return f"{file[place][0]:.4g} where torch has {torchs[place][0]}, and float64 {exact[place][0]:.4g}"
    worst = error[known].amax() if known.any() else torch.zeros(())
    return f"off by {worst:.3g}, torch by {(torchs - exact)[known].abs().amax():.3g}" if worst > allowed else ""


def exported(
    functions: Mapping[str, Function], x: Tensor, folder: str
) -> tuple[list[tuple[dict[str, Function], onnxruntime.InferenceSession]], dict[str, str]]:
    """Return files of the functions, as many in each as can be in one, and why others are refused."""
    if not functions:
        return [], {}
    try:
        config = INT8_STATIC.replace(exclude=("*",))
        qmodel = qfx.quantize(Functions(functions).eval(), config, [x], progress=False)
        file = qfx.export.onnx(qmodel, Path(folder) / "model.onnx")
        return [(dict(functions), onnxruntime.InferenceSession(file))], {}
    except Exception as error:  # the command prints the reason
        if len(functions) == 1:
            return [], {next(iter(functions)): f"{type(error).__name__}: {error}".splitlines()[0][:160]}
    files: list[tuple[dict[str, Function], onnxruntime.InferenceSession]] = []
    refused: dict[str, str] = {}
    names = list(functions)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        more, also = exported({name: functions[name] for name in part}, x, folder)
        files += more
        refused |= also
    return files, refused


def _runs(function: Function, x: Tensor) -> bool:
    """Tell whether torch computes a function in a type and in float64, to tensors of real numbers."""
    try:
        function(x.double())
        made = function(x)
    except Exception:  # no kernel, or no meaning in this type
        return False
    return all(
        isinstance(y, Tensor) and not y.is_complex() for y in (made if isinstance(made, tuple | list) else [made])
    )


@experiment()
def main(
    *names: Annotated[str, "parts of names of operators and functions; default: all"],
    types: Sequence[str] = ("float32", "float16", "int64", "int32", "int8", "uint8"),
) -> int:
    """Compare, and print the wrong cells; return 1 if there is one."""
    torch.set_num_threads(1)

    def chosen(name: str) -> bool:
        return not names or any(part in name for part in names)

    operators, unknown = of_operators(chosen)
    print(f"no arguments for: {', '.join(unknown) or 'none'}", flush=True)
    counts: Counter[str] = Counter()
    for dtype in types:
        kinds = kinds_of(getattr(torch, dtype))
        first = next(iter(kinds.values()))
        functions = {name: function for name, function in FUNCTIONS.items() if chosen(name)} | operators
        functions = {name: function for name, function in functions.items() if _runs(function, first)}
        with tempfile.TemporaryDirectory() as folder:
            keys, files, refused = list(functions), list[Any](), dict[str, str]()
            for start in range(0, len(keys), 32):
                some, also = exported({name: functions[name] for name in keys[start : start + 32]}, first, folder)
                files += some
                refused |= also
        for name, reason in refused.items():
            print(f"{dtype} | {name} | refused: {reason}", flush=True)
        counts["refused"] += len(refused) * len(kinds)
        for kind, x in kinds.items():
            for held, session in files:
                wrong = differences(held, session, x)
                counts.update(right=len(held) - len(wrong), wrong=len(wrong))
                for name, found in wrong.items():
                    print(f"{dtype} | {name} | {kind} | {found}", flush=True)
    return judged(counts)


if __name__ == "__main__":
    main()
