"""Histograms against NumPy's and ONNX Runtime's, and percentiles against ONNX Runtime's and ModelOpt's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT8, UINT8
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.observers import Histogram, MinMax, Percentile
from quark_fx.parity import LinearHistogram

DOCUMENT = Path(__file__).parents[2] / "docs" / "observers.md"
SYMMETRIC = Scheme(format=INT8)
ASYMMETRIC = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)


def collector(method: str, *, symmetric: bool, bins: int, levels: int = 128, percentile: float = 99.999) -> Any:
    return HistogramCollector(method, symmetric, bins, levels, percentile, "same")


def batches(seed: int, *, relu: bool = False) -> list[Tensor]:
    """Five ragged batches whose range grows twice; half of the seeds begin with a batch of zeros.

    ONNX Runtime's first bins are then 1 / 64 wide, so that the others must stay below 16.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = [
        torch.randn(1, size, generator=generator) * scale
        for size, scale in ((900, 1), (300, 2), (70, 1), (500, 3), (9, 0.1))
    ]
    parts = [part.relu() if relu else part + 0.3 for part in parts]
    return [torch.zeros(1, 50), *parts] if seed % 2 else parts


def test_dyadic_bins_are_those_of_numpy(device: torch.device) -> None:
    x = torch.randn(3, 70_000, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [1e-6], [1e6]])
    histogram = Histogram.of(x.to(device), 512, sums=True)
    assert histogram.sums is not None
    bins = histogram.bins(absolute=False)
    for row in range(3):
        values, edges = x[row].double().numpy(), bins.edges[row].cpu().numpy()
        largest = np.abs(values).max()
        assert edges[-1] == -edges[0]
        assert edges[-1] / 2 <= largest < edges[-1]
        assert np.array_equal(np.histogram(values, edges)[0], histogram.counts[row].cpu().numpy())
        np.testing.assert_allclose(np.histogram(values, edges, weights=values)[0], histogram.sums[row].cpu(), rtol=1e-9)
    magnitudes = histogram.bins(absolute=True)
    assert torch.equal(magnitudes.counts.sum(1), bins.counts.sum(1))
    assert torch.equal(magnitudes.edges[:, 0], torch.zeros_like(magnitudes.edges[:, 0]))


def test_growth_joins_neighbors_exactly() -> None:
    fine = Histogram.of(torch.tensor([[-1.0, -0.26, -0.01, 0.0, 0.24, 0.26]]), 4)
    coarse = fine.merge(Histogram.of(torch.tensor([[3.0]]), 4))
    assert fine.exponent.item() == -1
    assert fine.counts.tolist() == [[0, 0, 1, 2, 3, 0, 0, 0]]
    assert coarse.exponent.item() == 0
    assert coarse.counts.tolist() == [[0, 0, 0, 3, 3, 0, 0, 1]]


def test_mass_below_zero_survives_growth_to_the_left() -> None:
    """Quark adds the old counts at the left end of the new grid: 1666 values below zero where 667 are."""
    generator = torch.Generator().manual_seed(0)
    first = torch.rand(1, 1000, generator=generator)
    second = torch.cat(
        (-torch.rand(1, 667, generator=generator) * 2 - 0.01, torch.rand(1, 333, generator=generator)), 1
    )
    exact = Percentile().observe(first).observe(second).collected()
    assert exact.counts[exact.edges[:, 1:] <= 0].sum() == 667
    # This grid has no edge at zero: one bin of 4 values may fall on either side.
    linear = Percentile(grid="quark", bins=256).observe(first).observe(second).collected()
    assert linear.counts[linear.edges[:, 1:] <= 1 / 256].sum() == pytest.approx(667, abs=8)
    assert exact.counts.sum() == linear.counts.sum() == 2000


def test_skipped_zeros_are_not_counted() -> None:
    x = torch.tensor([[0.0, 0.0, -0.0, 1e-3, -1e-3, 4.0]])
    for grid in ("dyadic", "onnxruntime", "onnxruntime_absolute", "modelopt", "quark"):
        kept = Percentile(grid=grid, bins=64).observe(x).observe(x)
        skipped = Percentile(grid=grid, bins=64, skip_zeros=True).observe(x).observe(x)
        assert kept.collected().counts.sum() == 12
        assert skipped.collected().counts.sum() == 6


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("symmetric", [True, False])
def test_linear_grid_and_percentile_are_onnxruntimes(seed: int, relu: bool, symmetric: bool) -> None:
    data = batches(seed, relu=relu)
    grid = "onnxruntime_absolute" if symmetric else "onnxruntime"
    theirs = collector("percentile", symmetric=symmetric, bins=64)
    ours = Percentile(grid=grid, bins=64)
    for batch in data:
        theirs.collect({"x": [batch.numpy()]})
        ours = ours.observe(batch)
    counts, edges, *_ = theirs.histogram_dict["x"]
    assert isinstance(ours.histogram, LinearHistogram)
    bins = ours.collected()
    used = len(counts)
    assert np.array_equal(bins.counts[0].numpy(), counts)
    np.testing.assert_array_equal(bins.edges[0, : used + 1].numpy(), edges.astype(np.float64))
    for percentile in (100.0, 99.999, 99.0, 75.0, 50.0, 10.0):
        theirs.percentile = percentile
        low, high, *_ = theirs.compute_percentile()["x"]
        found = Percentile(grid=grid, bins=64, percentile=percentile, histogram=ours.histogram).range(SYMMETRIC)
        assert [float(bound) for bound in found] == [float(low), float(high)]


def modelopt_percentile(data: list[NDArray[np.float64]], bins: int, percentile: float) -> float:
    """`HistogramCalibrator.collect` with `torch_hist`, then `compute_amax("percentile")`, in float64."""
    counts = edges = np.zeros(0)
    for x in data:
        x = np.abs(x)
        if not len(edges):
            edges = np.linspace(0, x.max(), bins + 1)
        elif x.max() > edges[-1]:
            width = edges[1] - edges[0]
            edges = width * np.arange(int(np.ceil(x.max() / width)) + 1)
        new = np.histogram(x, edges)[0].astype(np.float64)
        new[: len(counts)] += counts
        counts = new
    cumulated = np.cumsum(counts / counts.sum())
    return float(edges[np.searchsorted(cumulated, percentile / 100)])


@pytest.mark.parametrize("seed", range(0, 12, 2))
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("percentile", [99.99, 99.0, 50.0])
def test_percentile_is_modelopts(seed: int, relu: bool, percentile: float) -> None:
    data = batches(seed, relu=relu)
    ours = Percentile(grid="modelopt", bins=512, percentile=percentile)
    for batch in data:
        ours = ours.observe(batch)
    expected = modelopt_percentile([batch[0].double().numpy() for batch in data], 512, percentile)
    low, high = ours.range(ASYMMETRIC)
    assert max(-float(low), float(high)) == pytest.approx(expected, rel=1e-5)


def numpy_histogram(data: list[NDArray[np.float64]], bins: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """`HistogramCalibrator.collect` of magnitudes with `torch_hist=False` and `skip_zeros=True`."""
    counts, edges = np.histogram(np.abs(data[0][data[0] != 0]), bins)
    for x in data[1:]:
        x = np.abs(x[x != 0])
        width = edges[1] - edges[0]
        if len(x) and x.max() > edges[-1]:
            edges = np.hstack((edges, np.arange(edges[-1] + width, x.max() + width, width)))
        new = np.histogram(x, edges)[0]
        new[: len(counts)] += counts
        counts = new
    return counts.astype(np.float64), edges


@pytest.mark.parametrize("seed", range(0, 12, 2))
@pytest.mark.parametrize("zeros", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("percentile", [99.99, 75.0, 20.0])
def test_a_grid_without_zeros_begins_where_the_values_do(seed: int, zeros: float, percentile: float) -> None:
    data = [batch.abs() + 0.5 for batch in batches(seed)]
    generator = torch.Generator().manual_seed(seed)
    for batch in data[: 1 if zeros == 1 else len(data)]:
        batch[torch.rand(batch.shape, generator=generator) < zeros] = 0.0
    ours = Percentile(grid="onnxruntime_absolute", bins=64, percentile=percentile, skip_zeros=True)
    for batch in data:
        ours = ours.observe(batch)
    counts, edges = numpy_histogram([batch[0].double().numpy() for batch in data], 64)
    assert ours.histogram is not None
    assert int(ours.collected().counts.sum()) == int(counts.sum())
    expected = float(edges[np.searchsorted(np.cumsum(counts / counts.sum()), percentile / 100)])
    assert float(ours.range(SYMMETRIC)[1]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("zeros", [0.0, 0.4])
def test_the_spelling_of_quarks_percentile_gives_its_numbers(zeros: float) -> None:
    """4,200 bins from 0 to the largest magnitude, zeros left out; the left edge of the bin that reaches the share."""
    x = torch.randn(1, 20_000, generator=torch.Generator().manual_seed(3))
    x[torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < zeros] = 0.0
    (row,) = (line for line in DOCUMENT.read_text().splitlines() if "PerTensorPercentileObserver" in line)
    (spelling,) = re.findall(r"`(Percentile\(.*\))`", row)
    found = eval(spelling, {"Percentile": Percentile}).observe(x)
    magnitudes = x[x != 0].abs()
    counts = torch.histc(magnitudes, 4200, 0, float(magnitudes.max())).double()
    edges = torch.linspace(0, float(magnitudes.max()), 4201)
    reached = ((counts / counts.sum()).cumsum(0).float() >= min(1.0, 99.99999999 / 100)).nonzero()[0]
    assert float(found.range(SYMMETRIC)[1]) == pytest.approx(float(edges[reached]), rel=1e-5)


def test_modelopt_grid_starts_afresh_after_a_batch_of_zeros() -> None:
    """ModelOpt stops with an OverflowError here: a batch of zeros gives bins no width."""
    zeros, x = torch.zeros(1, 50), torch.linspace(0, 4, 1000)[None]
    seen = Percentile(grid="modelopt", percentile=90.0).observe(zeros).observe(x)
    assert float(seen.range(SYMMETRIC)[1]) == pytest.approx(4 * (0.9 * 1050 - 50) / 1000, rel=2e-3)


@pytest.mark.parametrize("percentile", [100.0, 99.9, 95.0, 60.0])
@pytest.mark.parametrize("offset", [0.0, 3.0, -9.0])
def test_dyadic_percentile_is_numpys_up_to_a_bin(percentile: float, offset: float, device: torch.device) -> None:
    x = torch.randn(1, 50_000, generator=torch.Generator().manual_seed(1)) + offset
    seen = Percentile(percentile=percentile).observe(x[:, :30_000].to(device)).observe(x[:, 30_000:].to(device))
    width = 2 * float(x.abs().max()) / 2048
    values = x[0].double().numpy()
    low, high = (float(bound) for bound in seen.range(ASYMMETRIC))
    cut = (100 - percentile) / 2
    assert low == pytest.approx(np.percentile(values, cut), abs=1.1 * width)
    assert high == pytest.approx(np.percentile(values, 100 - cut), abs=1.1 * width)
    assert ((values >= low) & (values <= high)).mean() >= percentile / 100 - 1e-9
    _, amax = seen.range(SYMMETRIC)
    expected = min(float(np.percentile(np.abs(values), percentile)), float(values.max()))
    assert float(amax) == pytest.approx(expected, abs=1.1 * width)


def test_all_values_are_the_extremes(device: torch.device) -> None:
    x = torch.randn(4, 999, device=device)
    for scheme in (SYMMETRIC, ASYMMETRIC):
        found, expected = (observer.observe(x).qparams(scheme) for observer in (Percentile(percentile=100.0), MinMax()))
        assert torch.equal(found.scale, expected.scale)
        assert torch.equal(found.zero_point, expected.zero_point)


def test_asymmetric_percentile_has_two_ends() -> None:
    """Quark's asymmetric percentile returns the leftmost edge for both ends."""
    low, high = Percentile().observe(torch.randn(1, 10_000)).range(ASYMMETRIC)
    assert low < -2
    assert high > 2


def test_linear_grids_merge_only_when_they_are_one() -> None:
    observer = Percentile(grid="onnxruntime", bins=32)
    first, more = torch.tensor([[-1.0, 0.4, 1.0]]), torch.tensor([[0.1, 1.0, 0.7, -0.2]])
    merged = observer.observe(first).merge(observer.observe(more))
    whole = observer.observe(first).observe(more)
    assert torch.equal(merged.collected().counts, whole.collected().counts)
    assert torch.equal(merged.range(ASYMMETRIC)[1], whole.range(ASYMMETRIC)[1])
    assert torch.equal(whole.merge(observer.observe(first)).collected().counts.sum(), torch.tensor(10.0).double())
    with pytest.raises(ValueError, match='use grid="dyadic"'):
        observer.observe(first).merge(observer.observe(2 * first))


@pytest.mark.parametrize("grid", ["onnxruntime", "onnxruntime_absolute", "modelopt", "quark"])
def test_outgrowing_the_linear_grid_is_said(grid: str) -> None:
    first = torch.tensor([[0.1, -1.0, 1.0]])
    seen = Percentile(grid=grid, bins=32).observe(first).observe(10 * first)
    assert seen.range(SYMMETRIC)[1] > 5
    with pytest.raises(ValueError, match='the limit is 512: use grid="dyadic"'):
        seen.observe(1000 * first).range(SYMMETRIC)
    with pytest.raises(ValueError, match="the limit is 512"):
        seen.observe(1e30 * first).observe(first).range(SYMMETRIC)


def test_rows_grow_apart_on_a_linear_grid() -> None:
    x = torch.tensor([[1.0, -0.5, 0.2], [2.0, 1.0, -2.0]])
    y = torch.tensor([[9.0, 0.0, 0.1], [0.1, -1.0, 0.3]])
    both = Percentile(grid="quark", bins=16, percentile=80.0).observe(x).observe(y)
    for row in range(2):
        alone = Percentile(grid="quark", bins=16, percentile=80.0).observe(x[row : row + 1]).observe(y[row : row + 1])
        for a, b in zip(both.range(ASYMMETRIC), alone.range(ASYMMETRIC), strict=True):
            assert a[row] == b[0]


@pytest.mark.parametrize(
    "options",
    [
        {"grid": "log"},
        {"bins": 1000},
        {"bins": 0},
        {"grid": "quark", "bins": 1},
        {"percentile": 0.0},
        {"percentile": 101},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Percentile(**options)
