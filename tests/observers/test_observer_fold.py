"""What every observer promises: a fold over batches that merges, per row, without synchronizing."""

from __future__ import annotations

import dataclasses
from functools import reduce
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP8_E4M3, FP8_E5M2, FP16, INT4, INT8, INT16, UINT8
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.observers import (
    OBSERVERS,
    Adjusted,
    Distribution,
    Entropy,
    HistogramL2,
    MinMax,
    MovingAverage,
    Mse,
    NonOverflow,
    Observer,
    Percentile,
    Placeholder,
    PowerOfTwoMinMse,
    observer_from_dict,
    observer_to_dict,
)

SYMMETRIC = Scheme(format=INT8)
ASYMMETRIC = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)

UNORDERED: list[Observer] = [
    MinMax(),
    NonOverflow(),
    NonOverflow(rounding="nearest"),
    Percentile(percentile=90.0, bins=256),
    Percentile(percentile=90.0, bins=256, skip_zeros=True),
    Mse(bins=256),
    Mse(bins=256, stride=3, start_bin=5),
    HistogramL2(bins=256, candidates=16),
    Distribution(bins=256),
    Adjusted(ratio=0.995),
    Adjusted(observer=Percentile(percentile=90.0, bins=256), eps=1e-6),
    Distribution(bins=256, scenario="p3"),
    Entropy(bins=256, quantized_bins=32),
    Entropy(bins=256, quantized_bins=32, method="onnxruntime", stride=4),
    PowerOfTwoMinMse(),
    PowerOfTwoMinMse(mode="percentile", percentile=95.0),
]
VOTING = PowerOfTwoMinMse(mode="most_common")
STREAMING = [*UNORDERED, MovingAverage(), MovingAverage(0.5), MovingAverage(1.0), VOTING]
LINEAR: list[Observer] = [
    Percentile(grid="onnxruntime", bins=64),
    Percentile(grid="onnxruntime_absolute", bins=64),
    Percentile(grid="modelopt", bins=64),
    Percentile(grid="quark", bins=64),
    PowerOfTwoMinMse(bins=64),
    Distribution(grid="onnxruntime", bins=64),
]
ALL = [*STREAMING, *LINEAR]


def name(value: Any) -> str:
    return repr(value)


def schemes(observer: Observer) -> list[Scheme]:
    if isinstance(observer, Distribution):
        return [Scheme(format=FP8_E4M3)]
    one_kind = isinstance(observer, PowerOfTwoMinMse) and (observer.mode == "most_common" or observer.bins > 0)
    return [SYMMETRIC] if one_kind else [SYMMETRIC, ASYMMETRIC]


@st.composite
def ragged(draw: st.DrawFn) -> list[Tensor]:
    """One to five batches of two channels, sizes and magnitudes far apart, zeros and ties among the values."""
    batches = []
    for seed in draw(st.lists(st.integers(0, 1000), min_size=1, max_size=5)):
        generator = torch.Generator().manual_seed(seed)
        size = draw(st.integers(1, 40))
        scale = draw(st.sampled_from((0.0, 1e-20, 1e-3, 1.0, 1e4)))
        values = torch.randn(2, size, generator=generator)
        coarse = (values * 4).round() / 4
        batches.append(torch.where(torch.rand(2, size, generator=generator) < 0.3, coarse, values) * scale)
    return batches


def fold(observer: Observer, batches: list[Tensor]) -> Observer:
    return reduce(lambda seen, batch: seen.observe(batch), batches, observer)


def state_of(observer: Observer | None) -> list[Tensor]:
    if observer is None:
        return []
    if isinstance(observer, Adjusted):
        return state_of(observer.collected)
    parts = [getattr(observer, f.name) for f in dataclasses.fields(observer) if f.metadata.get("state")]
    return [tensor for tensor in torch.utils._pytree.tree_leaves(parts) if tensor is not None]


def same(one: Observer, other: Observer) -> None:
    assert one == other
    for a, b in zip(state_of(one), state_of(other), strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.float64:  # sums of values: exact up to the order of addition
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12 * float(a.abs().max()))
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("observer", [*UNORDERED, VOTING], ids=name)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches=ragged(), cut=st.integers(0, 5), seed=st.integers(0, 100))
def test_merge_of_two_parts_is_the_whole_in_any_order(
    observer: Observer, batches: list[Tensor], cut: int, seed: int
) -> None:
    whole = fold(observer, batches)
    same(fold(observer, batches[:cut]).merge(fold(observer, batches[cut:])), whole)
    order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(seed))
    same(fold(observer, [batches[i] for i in order]), whole)


@pytest.mark.parametrize("observer", UNORDERED, ids=name)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(batches=ragged())
def test_batch_boundaries_do_not_matter(observer: Observer, batches: list[Tensor]) -> None:
    same(observer.observe(torch.cat(batches, dim=1)), fold(observer, batches))


COARSE: list[Observer] = [
    *(cls(grid=grid, bins=bins) for cls in (Percentile, Mse) for grid in ("dyadic", "quark") for bins in (2, 8)),
    HistogramL2(bins=4, candidates=4),
    Percentile(percentile=50.0, bins=2),
]


@pytest.mark.parametrize("observer", [*ALL, *COARSE], ids=name)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    values=st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=5),
    exponent=st.sampled_from((-44, -38, -20, 0, 10)),
    offset=st.sampled_from((0.0, 3.0, -3.0)),
)
def test_a_range_never_ends_below_its_beginning(
    observer: Observer, values: list[float], exponent: int, offset: float
) -> None:
    """Not where all values lie in one bin, between two thresholds of it, nor where they are subnormal."""
    x = (torch.tensor([values], dtype=torch.float64) + offset).mul(10.0**exponent).float()
    for scheme in schemes(observer):
        low, high = observer.observe(x).range(scheme)
        assert bool((low <= high).all())
        assert bool(observer.observe(x).qparams(scheme).scale.isfinite().all())


@pytest.mark.parametrize("constant", [0.01, 0.5, 1.0])
@settings(max_examples=50, deadline=None, derandomize=True)
@given(batches=ragged(), cut=st.integers(0, 5))
def test_moving_average_merges_in_order(constant: float, batches: list[Tensor], cut: int) -> None:
    observer = MovingAverage(constant)
    whole = fold(observer, batches).range(SYMMETRIC)
    parts = fold(observer, batches[:cut]).merge(fold(observer, batches[cut:])).range(SYMMETRIC)
    reference = torch.stack((batches[0].amin(1), batches[0].amax(1))).double()
    for batch in batches[1:]:
        reference = (1 - constant) * reference + constant * torch.stack((batch.amin(1), batch.amax(1)))
    size = max(float(batch.abs().max()) for batch in batches)
    for found in (torch.stack(whole), torch.stack(parts)):
        torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-6 * size)


def test_moving_average_is_no_mean_of_the_extremes() -> None:
    """Quark's average of 0.01 and of 0.9 are one and the same: the plain mean, here 2.0."""
    batches = [torch.tensor([[0.0, high]]) for high in (1.0, 2.0, 3.0)]
    assert float(fold(MovingAverage(0.9), batches).range(SYMMETRIC)[1]) == pytest.approx(2.89)
    assert float(fold(MovingAverage(0.01), batches).range(SYMMETRIC)[1]) == pytest.approx(1.0299)


@pytest.mark.parametrize("constant", [0.0, -1.0, 1.5, float("nan")])
def test_moving_average_refuses_a_constant_out_of_range(constant: float) -> None:
    with pytest.raises(ConfigError, match=f"a number above 0 and at most 1, not {constant}"):
        MovingAverage(constant)


@pytest.mark.parametrize("observer", ALL, ids=name)
def test_channels_are_independent(observer: Observer, device: torch.device) -> None:
    torch.manual_seed(0)
    scale = torch.tensor([[1e-4], [1.0], [300.0]])
    batches = [(torch.randn(3, size) * scale).to(device) for size in (50, 7, 80)]
    together = fold(observer, batches)
    for scheme in schemes(observer):
        found = together.qparams(scheme)
        assert found.scale.device == batches[0].device
        for row in range(3):
            alone = fold(observer, [batch[row : row + 1] for batch in batches]).qparams(scheme)
            torch.testing.assert_close(found.scale[row], alone.scale[0], rtol=0, atol=0)
            assert found.zero_point[row] == alone.zero_point[0]


@pytest.mark.parametrize("observer", ALL, ids=name)
def test_an_observer_without_data_has_no_range_and_merges_as_nothing(observer: Observer) -> None:
    with pytest.raises(ValueError, match="nothing was observed"):
        observer.range(SYMMETRIC)
    with pytest.raises(ValueError, match="nothing was observed"):
        observer.qparams(SYMMETRIC)
    seen = observer.observe(torch.randn(2, 9))
    same(observer.merge(seen), seen)
    same(seen.merge(observer), seen)
    same(seen.observe(torch.empty(2, 0)), seen)
    assert state_of(observer) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("observer", ALL, ids=name)
def test_a_value_that_is_not_finite_is_remembered(observer: Observer, bad: float, device: torch.device) -> None:
    good = torch.randn(2, 30, device=device)
    spoilt = good.clone()
    spoilt[1, 3] = bad
    for seen in (observer.observe(spoilt).observe(good), observer.observe(good).observe(spoilt)):
        with pytest.raises(ValueError, match="not finite"):
            seen.range(SYMMETRIC)
        with pytest.raises(ValueError, match="not finite"):
            seen.qparams(SYMMETRIC)


@pytest.mark.parametrize("observer", STREAMING, ids=name)
@pytest.mark.parametrize("value", [0.0, 1.0, -3.7, 1e-38, 1e-45, -1e-20, 3e38], ids=str)
def test_one_value_alone_is_represented(observer: Observer, value: float, device: torch.device) -> None:
    if abs(value) < 1e-30 and isinstance(observer, PowerOfTwoMinMse):
        pytest.skip("a scale of 2**-126 is the smallest there is")
    for batch in (torch.full((1, 1), value, device=device), torch.full((1, 100), value, device=device)):
        seen = observer.observe(batch).observe(batch)
        for scheme in schemes(observer):
            found = seen.qparams(scheme)
            scale, zero_point = float(found.scale), int(found.zero_point)
            smallest, largest = scheme.limits
            code = min(max(round(value / scale) + zero_point, smallest), largest)
            assert scale > 0
            if abs(value) > 1e-30:
                assert (code - zero_point) * scale == pytest.approx(value, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("observer", ALL, ids=name)
def test_narrow_floats_give_the_same_float32_parameters(observer: Observer, dtype: torch.dtype) -> None:
    batches = [torch.randn(2, size).to(torch.bfloat16).to(dtype) for size in (40, 40)]
    batches = [batch.clamp(-2, 2) for batch in batches]
    for scheme in schemes(observer):
        found = fold(observer, batches).qparams(scheme)
        wide = fold(observer, [batch.float() for batch in batches]).qparams(scheme)
        assert found.scale.dtype == torch.float32
        assert torch.equal(found.scale, wide.scale)
        assert torch.equal(found.zero_point, wide.zero_point)


@pytest.mark.parametrize("observer", ALL, ids=name)
def test_observing_never_synchronizes(observer: Observer) -> None:
    """Reading a fake tensor's value raises; the fake device is not the CPU, whose path may read freely."""
    with FakeTensorMode():
        x = torch.empty(3, 500, device="cuda")
        with pytest.raises(DataDependentOutputException):
            x.amax().item()
        seen = observer.observe(x).observe(torch.empty(3, 20, device="cuda"))
        assert all(tensor.device.type == "cuda" for tensor in state_of(seen))


@pytest.mark.parametrize("observer", ALL, ids=name)
def test_the_device_independent_path_counts_the_same(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [torch.randn(3, size) for size in (200, 31)]
    fast = fold(observer, batches)
    monkeypatch.setattr("quark_fx.observers.histogram.on_host", lambda x: False)
    same(fold(observer, batches), fast)


@pytest.mark.parametrize("observer", ALL, ids=name)
def test_data_is_neither_written_nor_kept(observer: Observer) -> None:
    x = torch.randn(2, 60)
    before = x.clone()
    sizes = []
    seen = observer
    for _ in range(4):
        seen = seen.observe(x)
        sizes.append(sum(tensor.numel() for tensor in state_of(seen)))
    assert torch.equal(x, before)
    assert sizes[1] == sizes[2] == sizes[3]


@pytest.mark.parametrize("observer", [*ALL, Placeholder()], ids=name)
def test_round_trip_through_plain_data(observer: Observer) -> None:
    data = observer_to_dict(observer)
    assert observer_from_dict(data) == observer
    assert OBSERVERS[data["name"]] is type(observer)


def test_placeholder_has_no_range() -> None:
    seen = Placeholder().observe(torch.randn(1, 3)).merge(Placeholder())
    with pytest.raises(ValueError, match="fp16 needs one"):
        seen.range(Scheme(format=FP16))
    with pytest.raises(ValueError, match="choose another observer"):
        seen.qparams(SYMMETRIC)


@pytest.mark.parametrize("fmt", [INT4, INT8, INT16, UINT8, FP8_E4M3, FP8_E5M2], ids=str)
@pytest.mark.parametrize("symmetry", list(Symmetry))
def test_every_format_and_symmetry_has_a_range_within_the_data(fmt: Any, symmetry: Symmetry) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 400) + torch.tensor([[0.0], [3.0]])
    scheme = Scheme(format=fmt, symmetry=symmetry)
    for observer in (Percentile(), Mse(), HistogramL2(), Entropy(quantized_bins=64)):
        low, high = observer.observe(x).range(scheme)
        assert bool((low >= x.amin(1)).all())
        assert bool((high <= x.amax(1)).all())
        assert bool((high > 0).all())
