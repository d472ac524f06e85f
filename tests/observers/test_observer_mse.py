"""The search for the smallest squared error against brute force on the raw values."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP8_E4M3, FP8_E5M2, FP16, INT4, INT8, INT16, UINT4, UINT8, FloatFormat
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry, affine_qparams
from quark_fx.observers import HistogramL2, MinMax, Mse, Percentile
from quark_fx.observers.squared_error import Moments, squared_error

SYMMETRIC = Scheme(format=INT8)
ASYMMETRIC = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)


def raw_error(x: Tensor, low: float, high: float, scheme: Scheme) -> float:
    """Sum of squared errors of quantizing every value, float64."""
    found = affine_qparams(torch.tensor([low]), torch.tensor([high]), scheme)
    scaled = x.double() / found.scale.double()
    if isinstance(scheme.format, FloatFormat):
        codes = scaled.clamp(-scheme.format.max, scheme.format.max).to(scheme.format.dtype).double()
    else:
        codes = (scaled.round() + found.zero_point).clamp(scheme.qmin, scheme.qmax) - found.zero_point
    return float(((codes * found.scale.double() - x) ** 2).sum())


@pytest.mark.parametrize("fmt", [INT4, INT8, UINT8, FP8_E4M3, FP8_E5M2], ids=str)
@pytest.mark.parametrize("symmetry", [s for s in Symmetry if s not in (Symmetry.SIGN_AWARE, Symmetry.OFFSET)])
def test_error_by_prefix_sums_is_the_error_of_every_center(fmt: object, symmetry: Symmetry) -> None:
    scheme = Scheme(format=fmt, symmetry=symmetry)  # type: ignore[arg-type]
    observer = Mse(bins=512).observe(torch.randn(1, 3000, generator=torch.Generator().manual_seed(0)))
    bins = observer.collected()
    centers = bins.centers[0].repeat_interleave(bins.counts[0].long())
    tried = [(-3.0, 3.0), (-1.1, 1.1), (-0.4, 2.3), (0.0, 0.7)]
    low, high = (torch.tensor([side]) for side in zip(*tried, strict=True))
    found = squared_error(Moments.of(bins), affine_qparams(low, high, scheme), scheme)[0]
    for value, (a, b) in zip(found.tolist(), tried, strict=True):
        assert value == pytest.approx(raw_error(centers, a, b, scheme), rel=1e-9)


def test_error_of_levels_finer_than_bins_is_their_noise() -> None:
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(0))
    scheme = Scheme(format=INT16)
    observer = Mse().observe(x)
    amax = float(x.abs().max())
    for share in (1.0, 0.5):
        low, high = torch.tensor([[-amax * share]]), torch.tensor([[amax * share]])
        found = squared_error(Moments.of(observer.collected()), affine_qparams(low, high, scheme), scheme)
        assert float(found) == pytest.approx(raw_error(x, -amax * share, amax * share, scheme), rel=0.02)
    assert float(observer.qparams(scheme).scale) == pytest.approx(amax / 32767, rel=1e-6)


@pytest.mark.parametrize("fmt", [INT4, INT8, FP8_E4M3], ids=str)
@pytest.mark.parametrize("tail", ["normal", "outlier", "laplace"])
def test_symmetric_search_finds_the_best_of_all_thresholds(fmt: object, tail: str, device: torch.device) -> None:
    scheme = Scheme(format=fmt)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4000, generator=generator)
    if tail == "outlier":
        x[0, 7] = 20.0
    if tail == "laplace":
        x = x.sign() * -torch.rand(x.shape, generator=generator).clamp(min=1e-6).log()
    amax = float(x.abs().max())
    found = float(Mse().observe(x.to(device)).qparams(scheme).scale)
    largest = fmt.max if isinstance(fmt, FloatFormat) else scheme.qmax
    best = min(raw_error(x, -t, t, scheme) for t in torch.linspace(amax / 500, amax, 500).tolist())
    # A float format's smallest steps are finer than the bins, whose centers then misjudge them.
    slack = 1.02 if isinstance(fmt, FloatFormat) else 1.003
    assert raw_error(x, -found * largest, found * largest, scheme) <= best * slack


def test_a_normal_tensor_is_clipped_where_theory_says() -> None:
    """ModelOpt's shipped search returns its first candidate, 0.286 here, with a mean squared error of 6.2e-1."""
    x = torch.randn(1, 200_000, generator=torch.Generator().manual_seed(0))
    for observer in (Mse(), Mse(grid="modelopt", start_bin=128)):
        _, amax = observer.observe(x).range(SYMMETRIC)
        assert float(amax) == pytest.approx(4.0, abs=0.2)
        assert raw_error(x, -float(amax), float(amax), SYMMETRIC) / x.numel() == pytest.approx(9.1e-5, rel=0.1)


def test_the_search_starts_at_the_first_bin() -> None:
    """Quark tries the last 3 of 2048 centers: 99.88 for an outlier of 100, where the whole sweep ends at 65.4."""
    scheme = Scheme(format=INT8, symmetry=Symmetry.SYMMETRIC_FULL)
    x = torch.randn(1, 100_000, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 100.0
    _, quark = Mse(grid="modelopt", start_bin=2045).observe(x).range(scheme)
    assert float(quark) == pytest.approx(99.88, abs=0.005)
    _, whole = Mse(grid="modelopt").observe(x).range(scheme)
    assert float(whole) == pytest.approx(65.4, abs=0.05)
    assert raw_error(x, -65.4, 65.4, scheme) < 0.8 * raw_error(x, -99.88, 99.88, scheme)
    _, ours = Mse().observe(x).range(scheme)
    # A sixteenth wide, the bins judge steps of half a unit to within a few thousandths.
    assert raw_error(x, -float(ours), float(ours), scheme) < raw_error(x, -65.4, 65.4, scheme) * 1.005


@pytest.mark.parametrize("observer", [Mse(), HistogramL2()], ids=repr)
@pytest.mark.parametrize("fmt", [UINT8, INT8, INT4], ids=str)
def test_asymmetric_search_is_close_to_the_best_pair(observer: Mse | HistogramL2, fmt: object) -> None:
    scheme = Scheme(format=fmt, symmetry=Symmetry.ASYMMETRIC)  # type: ignore[arg-type]
    x = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    x[0, :2] = torch.tensor([-9.0, 14.0])
    low, high = (float(bound) for bound in observer.observe(x).range(scheme))
    shares = [i / 25 for i in range(1, 26)]
    best = min(raw_error(x, -9 * a, 14 * b, scheme) for a, b in itertools.product(shares, shares))
    found = raw_error(x, low, high, scheme)
    assert found <= best * 1.05
    assert found < raw_error(x, -9, 14, scheme)


@pytest.mark.parametrize("observer", [Mse(), HistogramL2()], ids=repr)
def test_asymmetric_negatives_survive(observer: Mse | HistogramL2) -> None:
    """Quark's asymmetric search fixes the minimum at 0 and clips every negative value."""
    low, high = observer.observe(torch.randn(1, 5000)).range(ASYMMETRIC)
    assert low < -2
    assert high > 2


def test_positive_data_keeps_its_side() -> None:
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(0)).relu()
    for observer in (Mse(), HistogramL2(), Mse(grid="onnxruntime"), Mse(grid="quark")):
        low, high = observer.observe(x).range(ASYMMETRIC)
        assert low == 0
        assert 2 < float(high) <= float(x.max())


def test_candidates_lie_every_stride_from_the_start() -> None:
    x = torch.cat((torch.randn(1, 1000, generator=torch.Generator().manual_seed(0)) / 10, torch.tensor([[1.0]])), 1)
    scheme = Scheme(format=INT4)
    every = float(Mse(grid="modelopt", bins=64).observe(x).range(scheme)[1])
    late = float(Mse(grid="modelopt", bins=64, start_bin=40).observe(x).range(scheme)[1])
    sparse = float(Mse(grid="modelopt", bins=64, start_bin=3, stride=20).observe(x).range(scheme)[1])
    assert late >= 40.5 / 64 > every
    assert min(abs(sparse - (i + 0.5) / 64) for i in (3, 23, 43, 63)) < 1e-6
    with pytest.raises(ConfigError):
        Mse(stride=0)
    with pytest.raises(ConfigError):
        Mse(start_bin=2048)
    with pytest.raises(ConfigError):
        HistogramL2(candidates=0)


def test_a_cast_needs_no_search() -> None:
    with pytest.raises(ValueError, match="placeholder"):
        Mse().observe(torch.randn(1, 9)).range(Scheme(format=FP16))


def test_mse_is_never_worse_than_its_neighbors() -> None:
    x = torch.distributions.StudentT(3.0).sample((1, 20_000))

    def error(found: QParams) -> float:
        amax = float(found.scale) * 127
        return raw_error(x, -amax, amax, SYMMETRIC)

    ours = error(Mse().observe(x).qparams(SYMMETRIC))
    for other in (MinMax(), Percentile(), HistogramL2()):
        assert ours <= error(other.observe(x).qparams(SYMMETRIC)) * 1.01


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_the_asymmetric_search_moves_the_end_with_the_outlier(side: float) -> None:
    """An outlier on one side only: nearly the best pair of all, far from the extremes, and the other end whole."""
    x = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0))
    x[0, :1200], x[0, -1] = 1.0, -2.0
    x *= side
    scheme = Scheme(format=UINT4, symmetry=Symmetry.ASYMMETRIC)
    low, high = (float(end) for end in Mse().observe(x).range(scheme))
    extremes = float(x.min()), float(x.max())
    shares = [i / 40 for i in range(1, 41)]
    tried = min(raw_error(x, extremes[0] * a, extremes[1] * b, scheme) for a in shares for b in shares)
    assert raw_error(x, low, high, scheme) <= 1.05 * tried
    assert raw_error(x, low, high, scheme) < 0.8 * raw_error(x, *extremes, scheme)
