"""Scales that are whole numbers times a float16, and offsets: what is stored is what is computed with."""

from __future__ import annotations

import pytest
import torch
from tiny import rand

from quark_fx import TensorSpec, block_formats, gguf_types
from quark_fx.errors import ConfigError
from quark_fx.numbers import ops
from quark_fx.numbers.formats import INT6, INT8, UINT4, UINT6
from quark_fx.numbers.qparams import QParams
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import FLOAT16, QuantizedScale
from quark_fx.plan.weights import quantize_tensor, storable, stored_bytes

BITS = {
    "Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.5625,
    "Q4_0": 4.5, "Q4_1": 5, "Q5_0": 5.5, "Q5_1": 6, "Q8_0": 8.5,
}  # fmt: skip
KINDS = [QuantizedScale(fmt, 8, FLOAT16) for fmt in (UINT4, UINT6, INT6, INT8)]


@pytest.mark.parametrize("name", ["NVFP4", "MX9"])
def test_scales_that_are_no_multiples_stay_what_they_are(name: str) -> None:
    spec: TensorSpec = getattr(block_formats, name)
    kept = spec.scale.nearest(rand(6, 16).abs().double() + 0.01)
    found = storable(QParams(kept, torch.zeros(6, 16, dtype=torch.int32)), spec, 1)
    assert torch.equal(found.scale, kept)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_values_are_whole_numbers_times_a_float16(kind: QuantizedScale) -> None:
    fmt, count = kind.format, 8
    scale = rand(6, 2 * count) if fmt.signed else rand(6, 2 * count).abs() + 0.01
    offset = -rand(6, 2 * count, seed=2).abs()
    offset[0] = 0
    scale[1] *= 1e-9  # below float16: its smallest value has to do
    scale[2, 0], scale[2, 1:8] = 1.0, 1e-12  # beside a large one the others are the smallest multiple
    found = kind.in_groups(scale, 1)
    for values in (found,) if fmt.signed else (found, kind.in_groups(offset, 1, offsets=True)):
        stored = kind.quantized(values, 1)
        assert stored.format == fmt
        assert torch.equal(stored.scale.half().float(), stored.scale)
        assert torch.equal(stored.dequantize(), values)
        assert fmt.qmin <= stored.codes.min()
        assert stored.codes.max() <= fmt.qmax
    assert bool((found != 0).all())
    unit, whole = (p.unflatten(1, (2, -1)) for p in (kind.quantized(found, 1).scale, kind.quantized(found, 1).codes))
    steps = ((found - scale).unflatten(1, (-1, count)) / unit).abs()[[0, 3, 4, 5]]
    # None is zero, so that the smallest may be raised to one step; the outermost is nearest but for float16's rounding.
    assert steps.max() < 1
    assert steps[whole[[0, 3, 4, 5]].abs() > 1].max() < 0.57
    assert torch.equal(kind.in_groups(found, 1), found)


def test_a_short_last_group_has_a_factor_of_its_own() -> None:
    scale = torch.cat([torch.full((1, 8), 100.0), torch.full((1, 3), 1e-3)], 1)
    found = QuantizedScale(INT8, 8, FLOAT16).in_groups(scale, 1)
    assert found.shape == scale.shape
    assert torch.allclose(found, scale, rtol=2e-3)
    kind = QuantizedScale(INT8, 8, FLOAT16)
    for values, axis in ((found, 1), (found.mT, 0)):
        stored = kind.quantized(values, axis)
        assert stored.scale.shape == tuple(2 if d == axis else 1 for d in range(2))
        assert torch.equal(stored.dequantize(), values)


def test_scales_that_are_no_such_products_are_found_out() -> None:
    with pytest.raises(ValueError, match="1 groups have scales that are not 6-bit integers times a float16"):
        QuantizedScale(UINT6, 4, FLOAT16).quantized(
            torch.tensor([[1.0, 2.0, 3.0, 1.0 + 2.0**-20], [1.0, 2.0, 3.0, 4.0]])
        )


@pytest.mark.parametrize("name", ["Q4_1", "Q4_K", "Q2_K"])
def test_operators_compute_with_offsets(name: str) -> None:
    spec, x = gguf_types.GGUF_TYPES[name], rand(4, 512) + 0.3
    stored = quantize_tensor(x, spec)
    layout = str(spec.format), 1, spec.group_size or 0
    spread = stored.layout.spread
    expected = stored.codes.float() * spread(stored.scale) + spread(stored.zero_point)
    assert stored.has_offsets
    assert not stored.is_symmetric
    assert torch.equal(stored.dequantize(), expected)
    assert torch.equal(ops.dequantize(stored.codes, stored.scale, stored.zero_point, *layout), expected)
    assert torch.equal(ops.quantize(x, stored.scale, stored.zero_point, *layout), stored.codes)
    # Each code is the nearest there is, or the outermost.
    lost, inside = (x - expected).abs(), (stored.codes > 0) & (stored.codes < spec.scheme.qmax)
    assert bool((lost <= spread(stored.scale) * 0.5001)[inside].all())
    assert stored.sqnr(x) > {"Q4_1": 20, "Q4_K": 20, "Q2_K": 7}[name]
    tracked = x.clone().requires_grad_()
    scale = stored.scale.clone().requires_grad_()
    value = ops.fake_quantize(tracked, scale, stored.zero_point, *layout)
    assert torch.equal(value, expected)
    value.sum().backward()
    assert tracked.grad is not None
    assert set(tracked.grad.unique().tolist()) <= {0.0, 1.0}
    assert tracked.grad.mean() > 0.8
    again = stored.scale.clone().requires_grad_()
    ops.dequantize(stored.codes, again, stored.zero_point, *layout).sum().backward()
    assert again.grad is not None
    assert torch.equal(again.grad, stored.layout.total(stored.codes.float(), again.shape))


@pytest.mark.parametrize("name", gguf_types.GGUF_TYPES)
def test_a_type_has_the_bytes_and_rounds_as_well_as_its_bits_allow(name: str) -> None:
    spec, x = gguf_types.GGUF_TYPES[name], rand(8, 512)
    x[1] = 0
    x[2, :64] = 0
    stored = quantize_tensor(x, spec)
    assert torch.isfinite(stored.dequantize()).all()
    assert not stored.dequantize()[1].any()
    assert not stored.dequantize()[2, :64].any()
    assert stored.sqnr(x) > 6 * spec.format.bits - 6
    assert stored_bytes(stored, spec) == x.numel() * BITS[name] / 8
    assert TensorSpec.from_dict(spec.to_dict()) == spec
    assert isinstance(stored[2:4], QuantizedTensor)
    assert torch.equal(stored[2:4].dequantize(), stored.dequantize()[2:4])


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        ("Q4_K", {"granularity": "channel", "group_size": None}, "set granularity='group' and group_size"),
        ("Q4_K", {"symmetry": "asymmetric"}, "needs symmetry='offset'"),
        ("Q6_K", {"symmetry": "symmetric"}, "needs symmetry='sign_aware'"),
        ("Q4_1", {"format": "int4", "symmetry": "offset"}, "weights in unsigned integers, in groups"),
        ("Q4_1", {"granularity": "channel", "group_size": None}, "weights in unsigned integers, in groups"),
        ("Q4_1", {"observer": "mse"}, "drop the observer"),
        ("Q4_1", {"scale": "power_of_two"}, "does not support offsets"),
        ("Q4_1", {"dynamic": True}, "weights in unsigned integers"),
    ],
)
def test_what_contradicts_itself_is_refused(base: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        gguf_types.GGUF_TYPES[base].replace(**changes)
