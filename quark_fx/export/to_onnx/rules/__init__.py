"""Rewrites of ONNX graphs, one per file, in the order they run. To add one for a file, see `quark_fx.export.onnx`."""

from quark_fx.export.to_onnx.rules.average_pools import settle_average_pool
from quark_fx.export.to_onnx.rules.bfloat16_arithmetic import compute_bfloat16_in_float
from quark_fx.export.to_onnx.rules.cast_likes import fold_cast_like
from quark_fx.export.to_onnx.rules.circular_pads import spell_out_circular_pad
from quark_fx.export.to_onnx.rules.code_types import type_codes
from quark_fx.export.to_onnx.rules.convolved_codes import store_convolution_inputs_unsigned
from quark_fx.export.to_onnx.rules.cubic_resizes import keep_transpose_from_resize
from quark_fx.export.to_onnx.rules.default_attributes import drop_default_attributes
from quark_fx.export.to_onnx.rules.dynamic_codes import fuse_dynamic_quantization
from quark_fx.export.to_onnx.rules.dynamic_gemms import split_dynamic_gemm
from quark_fx.export.to_onnx.rules.float_weights import keep_floats
from quark_fx.export.to_onnx.rules.initializer_casts import fold_initializer_cast
from quark_fx.export.to_onnx.rules.integer_products import multiply_integers
from quark_fx.export.to_onnx.rules.moved_pairs import repeat_moved_pair
from quark_fx.export.to_onnx.rules.padding_before_pools import keep_padding_from_pool
from quark_fx.export.to_onnx.rules.patterns import apply_rule
from quark_fx.export.to_onnx.rules.products_before_activations import (
    keep_product_from_activation,
    keep_product_from_sum,
)
from quark_fx.export.to_onnx.rules.recurrent_weights import dequantize_once
from quark_fx.export.to_onnx.rules.resized_concats import keep_resize_from_concat
from quark_fx.export.to_onnx.rules.row_scales import spell_out_row_scales
from quark_fx.export.to_onnx.rules.rule import DeclinedError, OnnxRule, onnx_rule
from quark_fx.export.to_onnx.rules.sums_before_norms import keep_sum_from_norm
from quark_fx.export.to_onnx.rules.transposed_weights import drop_idle_transpose, transpose_weight
from quark_fx.export.to_onnx.rules.vanishing_biases import give_every_convolution_a_bias
from quark_fx.export.to_onnx.rules.zero_biases import drop_zero_bias
from quark_fx.export.to_onnx.rules.zero_points import settle_zero_point

TRANSLATED: tuple[OnnxRule, ...] = (
    fold_initializer_cast,
    fold_cast_like,
    drop_zero_bias,
    type_codes,
    drop_idle_transpose,
    transpose_weight,
    settle_zero_point,
    split_dynamic_gemm,
    fuse_dynamic_quantization,
    multiply_integers,
    spell_out_row_scales,
    settle_average_pool,
    repeat_moved_pair,
    drop_default_attributes,
)
"""Rules that run on a translated graph, before it is converted to a format."""

FORMATTED: tuple[OnnxRule, ...] = (
    compute_bfloat16_in_float,
    keep_sum_from_norm,
    keep_product_from_activation,
    keep_padding_from_pool,
    keep_transpose_from_resize,
    keep_product_from_sum,
    dequantize_once,
    give_every_convolution_a_bias,
    store_convolution_inputs_unsigned,
    keep_resize_from_concat,
    spell_out_circular_pad,
)
"""Rules that run on a graph in a format for which runtimes have kernels."""

__all__ = [
    "FORMATTED",
    "TRANSLATED",
    "DeclinedError",
    "OnnxRule",
    "apply_rule",
    "keep_floats",
    "onnx_rule",
]
