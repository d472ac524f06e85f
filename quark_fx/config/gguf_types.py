"""Weight types of llama.cpp as plain `TensorSpec` values, under llama.cpp's names, and its mixtures of types.

A graph computes with exactly the values that llama.cpp reads from the file: scales and offsets are rounded to their
stored formats before codes are chosen. The length of a row must be a multiple of 256 for types whose names end in K,
and of 32 for other types.

>>> str(Q4_K), str(Q6_K)
('uint4 group 256/32 uint6_float16 offset', 'int6 group 256/16 int8_float16')

Source:
    `ggml-common.h` and `dequantize_row_*` of `ggml-quants.c`, https://github.com/ggml-org/llama.cpp.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Literal

from torch import nn

from quark_fx.config.quant_config import Override, QuantConfig, Target
from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.numbers.formats import INT3, INT4, INT5, INT6, INT8, UINT2, UINT4, UINT5, UINT6
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT16, QuantizedScale
from quark_fx.system.names import unknown

Q8_0 = TensorSpec(format=INT8, granularity=Granularity.GROUP, group_size=32, scale=FLOAT16)
"""8-bit integers, blocks of 32 with a float16 scale: 8.5 bits per weight."""

Q5_0 = Q8_0.replace(format=INT5, symmetry=Symmetry.SIGN_AWARE)
"""5-bit integers, blocks of 32 with a float16 scale of either sign: 5.5 bits per weight."""

Q4_0 = Q5_0.replace(format=INT4)
"""4-bit integers, otherwise the same as `Q5_0`: 4.5 bits per weight."""

Q5_1 = Q8_0.replace(format=UINT5, symmetry=Symmetry.OFFSET)
"""5-bit codes, blocks of 32 with a float16 scale and a float16 offset: 6 bits per weight."""

Q4_1 = Q5_1.replace(format=UINT4)
"""4-bit codes, otherwise the same as `Q5_1`: 5 bits per weight."""

Q4_K = TensorSpec(
    format=UINT4,
    granularity=Granularity.GROUP,
    group_size=32,
    symmetry=Symmetry.OFFSET,
    scale=QuantizedScale(UINT6, group_size=8, scale=FLOAT16),
)
"""4-bit codes, blocks of 256 in 8 groups of 32: 4.5 bits per weight. Each group has a 6-bit scale and a 6-bit offset,
multiples of two float16 numbers per block."""

Q5_K = Q4_K.replace(format=UINT5, symmetry=Symmetry.OFFSET)
"""5-bit codes, otherwise the same as `Q4_K`: 5.5 bits per weight."""

Q2_K = Q4_K.replace(format=UINT2, symmetry=Symmetry.OFFSET, group_size=16, scale=QuantizedScale(UINT4, 16, FLOAT16))
"""2-bit codes, blocks of 256 in 16 groups with a 4-bit scale and a 4-bit offset each: 2.625 bits per weight."""

Q6_K = Q2_K.replace(format=INT6, symmetry=Symmetry.SIGN_AWARE, scale=QuantizedScale(INT8, 16, FLOAT16))
"""6-bit integers, blocks of 256 in 16 groups with a signed 8-bit scale each: 6.5625 bits per weight."""

Q3_K = Q6_K.replace(format=INT3, symmetry=Symmetry.SIGN_AWARE, scale=QuantizedScale(INT6, 16, FLOAT16))
"""3-bit integers, blocks of 256 in 16 groups with a signed 6-bit scale each: 3.4375 bits per weight."""

GGUF_TYPES: dict[str, TensorSpec] = {
    name: value for name, value in list(globals().items()) if isinstance(value, TensorSpec)
}
"""Every spec above by its name."""

_MIXTURES = {"Q4_K_M": Q4_K, "Q5_K_M": Q5_K}

_SMALLER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""Type that llama.cpp uses instead of each K type if the length of a row is not a multiple of 256."""

_MORE_BITS = frozenset({"v_proj", "down_proj"})
"""Names of the projections that get more bits in some layers."""

_WITH_EIGHT_EXPERTS = {"k_proj": Q8_0, "v_proj": Q8_0, "o_proj": Q5_K}
"""Types of attention layers in models with eight experts per layer, where experts hold most of the weights."""

_IN_LAYER = re.compile(r"\.(\d+)\.(?:.*\.)?(\w+)$")


def mixed(model: nn.Module, name: Literal["Q4_K_M", "Q5_K_M"]) -> QuantConfig:
    """Return the configuration of llama.cpp's mixture of types for a language model of transformers.

    Linear layers and experts are Q4_K (or Q5_K). The head, and an embedding tied to it, are Q6_K. The value and down
    projections, including those in experts, are Q6_K in the first and last eighth of the layers, and in every third
    layer between. In models with 8 experts per layer, the key and value projections are Q8_0, and the attention output
    projection is Q5_K. Matrices whose row length is not a multiple of 256 use types with blocks of 32. Matrices whose
    row length is not a multiple of 32, routers, and matrices with one row stay in float. llama.cpp's exceptions for
    models with 70B parameters are not included. The configuration does not list passes; add them with
    `.replace(passes=...)`.

    Args:
        model: Model with numbered layers, linear layers with Llama's names, and stacked experts.
        name: Name of the mixture in llama.cpp.

    Raises:
        ConfigError: If `name` is not one of the two mixtures.

    Source:
        `llama_tensor_get_type_impl` of llama.cpp's `llama-quant.cpp`.
    """
    if name not in _MIXTURES:
        raise unknown("mixture", name, _MIXTURES)
    base = _MIXTURES[name]
    weights = {p: m.weight for p, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
    heads = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    stacks = {name: p for name, p in model.named_parameters() if p.dim() == 3 and not name.endswith(".weight")}
    weights |= stacks
    places = {path: _IN_LAYER.search(path) for path in weights}
    layers = 1 + max((int(place[1]) for place in places.values() if place), default=0)
    tied = len({id(weights[path]) for path, place in places.items() if not place}) == 1
    exceptions = _WITH_EIGHT_EXPERTS if any(len(stack) == 8 for stack in stacks.values()) else {}
    specs: dict[str, dict[str, TensorSpec | None]] = {}
    for path, weight in weights.items():
        place = places[path]
        if place is None:
            spec = Q6_K if tied or path in heads else base
        else:
            more = place[2] in _MORE_BITS and _has_more_bits(int(place[1]), layers)
            spec = exceptions.get(place[2], Q6_K if more else base)
        pattern = f"*.{place[2]}" if place else path
        specs.setdefault(pattern, {})[path] = _dividing(spec, weight.shape[-1]) if len(weight) > 1 else None
    overrides = []
    for pattern, members in specs.items():
        usual = Counter(map(_key, members.values())).most_common(1)[0][0]
        first = next(spec for spec in members.values() if _key(spec) == usual)
        overrides += [Override(pattern=pattern, weight=first)] if first != base else []
        overrides += [Override(pattern=path, weight=spec) for path, spec in members.items() if spec != first]
    return QuantConfig(weight=base, overrides=tuple(overrides), exclude=("op:router",), target=Target.TORCH)


def _has_more_bits(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _dividing(spec: TensorSpec, inputs: int) -> TensorSpec | None:
    """Return `spec`, or its replacement in llama.cpp, for rows of `inputs` values; `None` keeps them in float."""
    name = next(name for name, value in GGUF_TYPES.items() if value == spec)
    if inputs % 256 == 0:
        return spec
    return GGUF_TYPES[_SMALLER.get(name, name)] if inputs % 32 == 0 else None


def _key(spec: TensorSpec | None) -> str:
    return str(spec)


__all__ = ["GGUF_TYPES", "Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "mixed"]
