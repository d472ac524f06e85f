"""Entropy calibration against ONNX Runtime's and a float64 reference of ModelOpt's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from onnxruntime.quantization.calibrate import HistogramCollector
from scipy.stats import entropy
from torch import Tensor

from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT8, INT16, UINT8
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.observers import Entropy, MinMax
from quark_fx.parity.entropy import _onnxruntime_divergence

SYMMETRIC = Scheme(format=INT8)
ASYMMETRIC = Scheme(format=UINT8, symmetry=Symmetry.ASYMMETRIC)
FLOAT32_NOISE = 5e-7
"""ONNX Runtime sums divergences in float32: it cannot tell apart candidates that differ by less."""


def sample(seed: int) -> list[Tensor]:
    """Two batches; normal, heavy-tailed, one-sided, or with an outlier, by turns."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(1, size, generator=generator) for size in (4000, 2500)]
    if seed % 4 == 1:
        parts = [part.sign() * part.abs() ** 3 for part in parts]
    if seed % 4 == 2:
        parts = [part.relu() for part in parts]
    if seed % 4 == 3:
        parts[1][0, 0] = 15.0
    return parts


def test_a_window_without_values_is_never_the_nearest() -> None:
    """Both extremes lie outside of the first window; the second one holds them."""
    counts = torch.zeros(9, dtype=torch.float64)
    counts[[0, -1]] = 5
    narrow, whole = _onnxruntime_divergence(counts, 3, torch.tensor([2, 4]))
    assert narrow == torch.inf
    assert whole.isfinite()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("bins", "levels"), [(128, 128), (512, 128), (301, 64)])
def test_threshold_is_onnxruntimes(seed: int, bins: int, levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = HistogramCollector("entropy", False, bins, levels, 99.999, "same")
    ours = Entropy(method="onnxruntime", grid="onnxruntime", bins=bins, quantized_bins=levels)
    for batch in sample(seed):
        theirs.collect({"x": [batch.numpy()]})
        ours = ours.observe(batch)
    divergences: list[NDArray[np.float64]] = []

    def argmin(values: NDArray[np.float64]) -> int:
        divergences.append(values)
        return int(values.argmin())

    with monkeypatch.context() as patch:
        patch.setattr(np, "argmin", argmin)
        low, high, *_ = theirs.compute_entropy()["x"]
    found = [float(bound) for bound in ours.range(SYMMETRIC)]
    middle, edges = len(theirs.histogram_dict["x"][0]) // 2, theirs.histogram_dict["x"][1]
    data = torch.cat(sample(seed), dim=1)
    tied = []
    for candidate in np.flatnonzero(divergences[0] <= divergences[0].min() + FLOAT32_NOISE):
        inside = levels // 2 + candidate
        ends = edges[middle - inside], edges[min(middle + inside + 1, len(edges) - 1)]
        tied.append([max(float(ends[0]), float(data.min())), min(float(ends[1]), float(data.max()))])
    assert found in tied
    assert len(tied) > 1 or found == [float(low), float(high)]
    assert len(tied) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_onnxruntimes_defaults_have_one_candidate_and_ours_many(seed: int) -> None:
    data = torch.cat(sample(seed), dim=1)
    peer = Entropy(method="onnxruntime", grid="onnxruntime", bins=128, quantized_bins=128).observe(data)
    extremes = MinMax().observe(data)
    assert torch.equal(peer.qparams(ASYMMETRIC).scale, extremes.qparams(ASYMMETRIC).scale)
    for ours in (Entropy(), Entropy(method="onnxruntime", stride=8)):
        assert float(ours.observe(data).qparams(SYMMETRIC).scale) < float(extremes.qparams(SYMMETRIC).scale)


def modelopt_divergences(histogram: list[float], levels: int, start: int, stride: int) -> list[float]:
    """ModelOpt's search bin by bin: the divergence of every candidate."""
    counts = np.array(histogram, dtype=np.float64)
    counts[0] = counts[1]
    found = []
    for i in range(start, len(counts) + 1, stride):
        cell = np.digitize(np.arange(i), np.linspace(0, i, levels + 1)) - 1
        q = np.zeros(i)
        for k in range(levels):
            members = (cell == k) & (counts[:i] > 0)
            if members.any():
                q[members] = counts[:i][members].mean()
        p = counts[:i].copy()
        p[-1] += counts[i:].sum()
        found.append(float(entropy(p, q)))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("bins", "levels", "start", "stride"), [(512, 128, 128, 1), (300, 64, 80, 7), (300, 50, 20, 3)]
)
def test_threshold_is_modelopts(seed: int, bins: int, levels: int, start: int, stride: int) -> None:
    data = torch.cat(sample(seed), dim=1)
    options: dict[str, Any] = {"quantized_bins": levels, "start_bin": start, "stride": stride}
    ours = Entropy(grid="modelopt", bins=bins, **options).observe(data)
    collected = ours.collected()
    divergences = modelopt_divergences(collected.counts[0].tolist(), levels, start, stride)
    last = len(divergences) - 1 - int(np.argmin(divergences[::-1]))
    threshold = float(collected.edges[0, start + last * stride])
    low, high = ours.range(SYMMETRIC)
    assert [float(low), float(high)] == [max(-threshold, float(data.min())), min(threshold, float(data.max()))]


def test_the_collected_histogram_is_not_changed() -> None:
    """ModelOpt overwrites the stored first bin, so that a percentile read afterwards differs."""
    seen = Entropy(bins=256, grid="modelopt").observe(sample(2)[0])
    before = seen.collected().counts.clone()
    seen.range(SYMMETRIC)
    assert torch.equal(seen.collected().counts, before)
    assert before[0, 0] > 10 * before[0, 1]


def test_unsigned_codes_have_twice_the_levels() -> None:
    data = torch.cat(sample(2), dim=1)
    unsigned = Entropy().observe(data).range(ASYMMETRIC)
    named = Entropy(quantized_bins=256).observe(data).range(SYMMETRIC)
    assert torch.equal(unsigned[1], named[1])
    assert unsigned[0] == 0


def test_degenerate_histograms_have_a_threshold() -> None:
    for data in (torch.zeros(1, 5), torch.ones(1, 5), torch.tensor([[-2.0, 0.0, 2.0]])):
        for observer in (
            Entropy(),
            Entropy(method="onnxruntime", stride=64),
            Entropy(grid="modelopt", skip_zeros=True),
        ):
            low, high = observer.observe(data).range(SYMMETRIC)
            assert float(low) <= float(high) <= float(data.max())


def test_more_levels_than_bins_is_said() -> None:
    with pytest.raises(ValueError, match="raise bins or lower quantized_bins"):
        Entropy().observe(torch.randn(1, 100)).range(Scheme(format=INT16))


@pytest.mark.parametrize(
    "options",
    [
        {"method": "kl"},
        {"stride": 0},
        {"quantized_bins": -1},
        {"start_bin": -5},
        {"method": "onnxruntime", "grid": "modelopt"},
        {"grid": "onnxruntime"},
    ],
    ids=str,
)
def test_impossible_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Entropy(**options)
