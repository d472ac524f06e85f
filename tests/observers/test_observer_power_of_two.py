"""Power-of-two scales against Quark's rules, written out on raw values in NumPy."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, UINT8
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry
from quark_fx.observers import NonOverflow, PowerOfTwoMinMse

SYMMETRIC = Scheme(format=INT8)
FULL = Scheme(format=INT8, symmetry=Symmetry.SYMMETRIC_FULL)
ASYMMETRIC = Scheme(format=INT8, symmetry=Symmetry.ASYMMETRIC)
UNSIGNED = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)
UNSIGNED_MIDDLE = Scheme(format=UINT8)
NARROW = Scheme(format=INT4, symmetry=Symmetry.ASYMMETRIC)
SCHEMES = [SYMMETRIC, FULL, ASYMMETRIC, UNSIGNED, UNSIGNED_MIDDLE, NARROW]
QUARK_OFFSETS = (-1, 0, 1, 2, 3)


def quark_position(x: NDArray[np.float64], scheme: Scheme) -> tuple[int, int]:
    """`-log2` of the nearest power of two, and the zero point: SEMANTICS 2.1 and 2.2 on raw values."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if scheme.symmetric:
        high = max(-low, high)
        low = -high
    scale = float(np.float32((high - low) / (scheme.qmax - scheme.qmin)))
    zero_point = scheme.middle
    if scale < np.finfo(np.float32).tiny:
        scale = 1.0
        zero_point = scheme.middle if scheme.symmetric else scheme.qmin
    elif not scheme.symmetric:
        zero_point = int(np.clip(np.round(scheme.qmin - low / scale), scheme.qmin, scheme.qmax))
    return int(np.rint(-np.log2(scale))), zero_point


def is_tied_zero_point(candidate: int, x: NDArray[np.float64], scheme: Scheme) -> bool:
    """Tell whether the exact zero point lies half way between two integers of which `candidate` is one."""
    low, high = min(float(x.min()), 0.0), max(float(x.max()), 0.0)
    if scheme.symmetric or low == high:
        return False
    exact = scheme.qmin - low * (scheme.qmax - scheme.qmin) / (high - low)
    return abs(abs(exact - candidate) - 0.5) < 1e-9


def quark_errors(
    x: NDArray[np.float64], scheme: Scheme, offsets: tuple[int, ...], tie: int | None = None
) -> tuple[list[float], list[float], int]:
    """The scales Quark tries, in order, and the squared error of each; of two zero points as near, that of `tie`."""
    position, zero_point = quark_position(x, scheme)
    if tie is not None and is_tied_zero_point(tie, x, scheme):  # how float32 rounds the scale decides
        zero_point = tie
    scales = [2.0 ** -(position + offset) for offset in offsets]
    errors = []
    for scale in scales:
        codes = np.clip(np.round(x / scale) + zero_point, scheme.qmin, scheme.qmax)
        errors.append(float((((codes - zero_point) * scale - x) ** 2).sum()))
    return scales, errors, zero_point


def check(found: QParams, x: NDArray[np.float64], scheme: Scheme, offsets: tuple[int, ...] = QUARK_OFFSETS) -> None:
    scales, errors, zero_point = quark_errors(x, scheme, offsets, int(found.zero_point))
    assert int(found.zero_point) == zero_point
    best = min(errors)
    # Scales whose errors agree up to the rounding of the sums are ties for either side.
    tied = [scale for scale, error in zip(scales, errors, strict=True) if error <= best + 1e-12 * float((x**2).sum())]
    assert float(found.scale) in tied
    if best == 0:
        assert float(found.scale) == scales[errors.index(0)]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    magnitude=st.floats(-30, 30),
    power=st.sampled_from((0.2, 1.0, 3.0)),
    size=st.integers(1, 300),
    cut=st.integers(0, 300),
)
def test_search_on_a_stream_is_the_search_on_raw_values(
    scheme: Scheme, seed: int, magnitude: float, power: float, size: int, cut: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, size, generator=generator)
    x = x.sign() * x.abs() ** power * 2.0**magnitude
    seen = PowerOfTwoMinMse().observe(x[:, :cut]).observe(x[:, cut:])
    check(seen.qparams(scheme), x[0].double().numpy(), scheme)
    torch_like = PowerOfTwoMinMse(offsets=(-2, -1, 0, 1, 2)).observe(x)
    check(torch_like.qparams(scheme), x[0].double().numpy(), scheme, (-2, -1, 0, 1, 2))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(codes=st.lists(st.integers(-300, 300), min_size=1, max_size=50), exponent=st.integers(-20, 20))
@example(codes=[300, -300], exponent=0)  # a zero point of -0.5
def test_ties_keep_the_larger_scale(scheme: Scheme, codes: list[int], exponent: int) -> None:
    """Integers times a power of two: errors vanish or lie on rounding ties."""
    x = torch.tensor([codes]).float() * 2.0**exponent / 2
    check(PowerOfTwoMinMse().observe(x).qparams(scheme), x[0].double().numpy(), scheme)


def test_a_tensor_of_zeros() -> None:
    x = torch.zeros(1, 9)
    assert float(NonOverflow(rounding="nearest").observe(x).qparams(SYMMETRIC).scale) == 1.0
    assert float(NonOverflow().observe(x).qparams(SYMMETRIC).scale) == 1.0
    assert float(PowerOfTwoMinMse().observe(x).qparams(SYMMETRIC).scale) == 2.0


@pytest.mark.parametrize("amax", [127.0, 127.1, 128.0, 150.0, 179.0, 180.0, 254.0, 255.0])
def test_ceil_never_overflows_and_nearest_does_by_up_to_the_square_root_of_two(amax: float) -> None:
    x = torch.tensor([[-1.0, amax]])
    ceil = float(NonOverflow().observe(x).qparams(SYMMETRIC).scale)
    assert ceil * 127 >= amax
    assert ceil / 2 * 127 < amax
    nearest = float(NonOverflow(rounding="nearest").observe(x).qparams(SYMMETRIC).scale)
    assert nearest == (1.0 if amax < 179.6 else 2.0)
    assert amax / (nearest * 127) < 2**0.5


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(low=st.floats(-1e4, 1e4, width=16), high=st.floats(-1e4, 1e4, width=16))
def test_nearest_is_quarks(scheme: Scheme, low: float, high: float) -> None:
    x = torch.tensor([[low, high]])
    found = NonOverflow(rounding="nearest").observe(x).qparams(scheme)
    position, zero_point = quark_position(x[0].double().numpy(), scheme)
    assert float(found.scale) == 2.0**-position
    assert int(found.zero_point) == zero_point


def test_range_is_what_the_scale_represents() -> None:
    seen = PowerOfTwoMinMse().observe(torch.randn(1, 500) + 1)
    for scheme in SCHEMES:
        found, (low, high) = seen.qparams(scheme), seen.range(scheme)
        assert float(low) == (scheme.qmin - int(found.zero_point)) * float(found.scale)
        assert float(high) == (scheme.qmax - int(found.zero_point)) * float(found.scale)


@pytest.mark.parametrize("seed", range(5))
def test_most_common_counts_the_batches_votes(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(1, 200, generator=generator) * 2.0 ** float(i % 3) for i in range(8)]
    seen = PowerOfTwoMinMse(mode="most_common")
    votes: Counter[float] = Counter()
    for batch in batches:
        seen = seen.observe(batch)
        scales, errors, _ = quark_errors(batch[0].double().numpy(), SYMMETRIC, QUARK_OFFSETS)
        votes[scales[int(np.argmin(errors))]] += 1
    winners = [scale for scale, count in votes.items() if count == max(votes.values())]
    assert float(seen.qparams(SYMMETRIC).scale) == min(winners)


def test_a_tied_vote_goes_to_the_smaller_scale() -> None:
    small, large = torch.full((1, 9), 100.0), torch.full((1, 9), 1600.0)
    for batches in ((small, large), (large, small)):
        seen = PowerOfTwoMinMse(mode="most_common").observe(batches[0]).observe(batches[1])
        alone = PowerOfTwoMinMse(mode="most_common").observe(small)
        assert torch.equal(seen.qparams(SYMMETRIC).scale, alone.qparams(SYMMETRIC).scale)


def test_votes_are_for_one_format() -> None:
    seen = PowerOfTwoMinMse(mode="most_common").observe(torch.randn(1, 50))
    with pytest.raises(ValueError, match='set vote="uint8"'):
        seen.qparams(UNSIGNED_MIDDLE)
    with pytest.raises(ValueError, match='vote_symmetry="symmetric_full"'):
        seen.qparams(FULL)
    voted = PowerOfTwoMinMse(mode="most_common", vote="uint8").observe(torch.randn(1, 50))
    assert int(voted.qparams(UNSIGNED_MIDDLE).zero_point) == 128


def test_percentile_mode_drops_outliers_first() -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    x[0, :3] = 500.0
    kept = PowerOfTwoMinMse(mode="percentile", percentile=99.9).observe(x).qparams(SYMMETRIC)
    assert float(kept.scale) == 2.0**-5
    check(PowerOfTwoMinMse().observe(x).qparams(SYMMETRIC), x[0].double().numpy(), SYMMETRIC)
    assert float(PowerOfTwoMinMse().observe(x).qparams(SYMMETRIC).scale) == 4.0
    values = x[0].double().numpy()
    values = values[np.abs(values) <= np.percentile(np.abs(values), 99.9)]
    check(kept, values, SYMMETRIC)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    size=st.integers(300, 2000),
    shift=st.floats(-2, 2),
    percentile=st.sampled_from((99.999, 99.9, 99.0, 90.0)),
)
def test_percentile_mode_is_quarks_on_raw_values(
    scheme: Scheme, seed: int, size: int, shift: float, percentile: float
) -> None:
    """Of magnitudes up to the percentile; of values of an asymmetric format half of the rest goes on each side."""
    x = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) + shift
    seen = (
        PowerOfTwoMinMse(mode="percentile", percentile=percentile).observe(x[:, : size // 3]).observe(x[:, size // 3 :])
    )
    values = x[0].double().numpy()
    if scheme.symmetric:
        kept = np.abs(values) <= np.percentile(np.abs(values), percentile)
    else:
        cut = (100 - percentile) / 2
        kept = (values >= np.percentile(values, cut)) & (values <= np.percentile(values, 100 - cut))
    # Values of one bin stay or go together: bins are a 2**-13th of the range wide.
    found, width = seen.qparams(scheme), 2.0 ** (np.ceil(np.log2(np.abs(values).max())) - 13)
    edges = values[kept].min() - width, values[kept].max() + width
    near = [values[kept], values[(values >= edges[0]) & (values <= edges[1])]]
    scales = []
    for raw in near:
        tried, errors, zero_point = quark_errors(raw, scheme, QUARK_OFFSETS, int(found.zero_point))
        scales += [s for s, error in zip(tried, errors, strict=True) if error <= min(errors) * (1 + 1e-3) + 1e-12]
        assert abs(int(found.zero_point) - zero_point) <= (0 if len(near[0]) == len(near[1]) else 1)
    assert float(found.scale) in scales


def test_percentile_mode_cuts_each_side_of_an_asymmetric_format_by_itself() -> None:
    """All of the outliers are on one side: the percentile of magnitudes would leave the other side whole."""
    x = torch.linspace(0, 1, 10_001)[None] ** 2 * 8
    x[0, -40:] = 900.0
    kept = PowerOfTwoMinMse(mode="percentile", percentile=99.0).observe(x).qparams(UNSIGNED)
    values = x[0].double().numpy()
    cut = np.percentile(values, (0.5, 99.5))
    check(kept, values[(values >= cut[0]) & (values <= cut[1])], UNSIGNED)
    assert float(kept.scale) == 2.0**-5


def binned_reference(batches: list[Tensor], bins: int) -> float:
    """Quark 0.13: first batch's extremes in `bins` bins, more of that width later; MinMSE of the centers."""
    first = batches[0].double().numpy()
    low, high = first.min(), first.max()
    width = (high - low) / bins
    data = np.concatenate([batch.double().numpy().ravel() for batch in batches])
    left, right = int(np.ceil(max(low - data.min(), 0) / width)), int(np.ceil(max(data.max() - high, 0) / width))
    edges = (low - left * width) + width * np.arange(left + bins + right + 1)
    counts, _ = np.histogram(data, edges)
    centers = (edges[1:] + edges[:-1]) / 2
    position, _ = quark_position(data, SYMMETRIC)
    scales = [2.0 ** -(position + offset) for offset in QUARK_OFFSETS]
    errors = [((np.clip(np.round(centers / s), -127, 127) * s - centers) ** 2 * counts).sum() for s in scales]
    return scales[int(np.argmin(errors))]


@pytest.mark.parametrize("seed", range(6))
def test_binned_search_is_quarks(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.randn(1, size, generator=generator) ** 3 for size in (2000, 300, 900)]
    seen = PowerOfTwoMinMse(bins=2048)
    for batch in batches:
        seen = seen.observe(batch)
    assert float(seen.qparams(SYMMETRIC).scale) == binned_reference(batches, 2048)
    with pytest.raises(ValueError, match="set bins=0"):
        seen.qparams(ASYMMETRIC)


def test_wide_formats_keep_their_range() -> None:
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)) * 3
    found = PowerOfTwoMinMse().observe(x).qparams(Scheme(format=INT16))
    check(found, x[0].double().numpy(), Scheme(format=INT16))


def test_float_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="integer format, not fp8_e4m3"):
        PowerOfTwoMinMse().observe(torch.randn(1, 9)).qparams(Scheme(format=FP8_E4M3))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "none"},
        {"offsets": ()},
        {"offsets": (9,)},
        {"mode": "percentile", "percentile": 0},
        {"bins": 1},
        {"bins": 2048, "mode": "percentile"},
        {"mode": "most_common", "vote": "fp16"},
        {"mode": "most_common", "vote_symmetry": "asymmetric"},
        {"percentile": 99.9},
        {"vote": "uint8"},
        {"mode": "percentile", "vote_symmetry": "symmetric_full"},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        PowerOfTwoMinMse(**options)
    with pytest.raises(ConfigError, match="rounding"):
        NonOverflow(rounding="floor")
