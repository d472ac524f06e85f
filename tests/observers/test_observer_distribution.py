"""The standard deviation as a scale, against ONNX Runtime's."""

from __future__ import annotations

import pytest
import torch
from onnx import TensorProto
from onnxruntime.quantization.calibrate import HistogramCollector
from onnxruntime.quantization.quant_utils import compute_scale_zp_float8
from torch import Tensor

from quark_fx.config.quant_config import TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, FP8_E5M2, FP16, INT8
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.observers import Distribution, MinMax

E4M3 = Scheme(format=FP8_E4M3)


def sample(seed: int) -> list[Tensor]:
    """Two batches of which the second is wider; normal, heavy-tailed, one-sided, or off zero, by turns."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(1, size, generator=generator) * size / 1000 for size in (1500, 2500)]
    by_turns = (lambda x: x, lambda x: x**3, lambda x: x.relu(), lambda x: x + 0.7)
    return [by_turns[seed % 4](part) for part in parts]


def theirs_and_ours(seed: int, bins: int, scenario: str) -> tuple[Tensor, Tensor]:
    theirs = HistogramCollector("distribution", False, bins, 128, 99.999, scenario)
    ours = Distribution(grid="onnxruntime", bins=bins, scenario=scenario)
    for batch in sample(seed):
        theirs.collect({"x": batch.numpy()})
        ours = ours.observe(batch)
    _, deviation = theirs.compute_distribution()["x"].avg_std
    _, scale = compute_scale_zp_float8(TensorProto.FLOAT8E4M3FN, deviation)
    return torch.tensor(scale).reshape(1), ours.qparams(E4M3).scale


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bins", [512, 2048])
def test_scale_is_onnxruntimes(seed: int, bins: int) -> None:
    theirs, ours = theirs_and_ours(seed, bins, "same")
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("bins", [512, 2049])
def test_scale_from_cube_roots_is_onnxruntimes_but_for_the_power_in_float32(seed: int, bins: int) -> None:
    theirs, ours = theirs_and_ours(seed, bins, "p3")
    assert (ours.view(torch.int32) - theirs.view(torch.int32)).abs() <= 2


def test_deviation_on_our_grid_is_that_of_the_values() -> None:
    x = torch.cat(sample(0), dim=1)
    scale = Distribution().observe(x).qparams(E4M3).scale
    # Values are up to half a bin from its center, and a bin is at most 1/1024 of the largest.
    levels = FP8_E4M3.levels()
    deviation = torch.cat((levels, levels.new_zeros(1))).std(correction=0)
    assert abs(float(scale * deviation) - float(x.std(correction=0))) < float(x.abs().max()) / 2048


@pytest.mark.parametrize("fmt", [FP8_E4M3, FP8_E5M2, FP4_E2M1], ids=str)
def test_range_ends_at_the_largest_code(fmt: object) -> None:
    scheme = Scheme(format=fmt)  # type: ignore[arg-type]
    seen = Distribution().observe(torch.randn(3, 200))
    low, high = seen.range(scheme)
    assert torch.equal(high, seen.qparams(scheme).scale * scheme.largest)
    assert torch.equal(low, -high)


def test_one_value_has_no_deviation_and_is_scaled_as_by_min_max() -> None:
    x = torch.tensor([[1000.0, 1000.0], [-3.0, -3.0], [0.0, 0.0]])
    found, wanted = (observer.observe(x).qparams(E4M3) for observer in (Distribution(), MinMax()))
    assert torch.equal(found.scale, wanted.scale)


@pytest.mark.parametrize("options", [{"scenario": "p2"}, {"grid": "modelopt"}, {"grid": "onnxruntime_absolute"}])
def test_impossible_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"scenario|signs"):
        Distribution(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("fmt", [INT8, FP16], ids=str)
def test_only_small_floats_have_a_distribution(fmt: object) -> None:
    with pytest.raises(ConfigError, match=r"floats of 4 to 8 bits|needs no range"):
        TensorSpec(format=fmt, observer=Distribution())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floats of 4 to 8 bits"):
        Distribution().observe(torch.ones(1, 2)).qparams(Scheme(format=fmt, symmetry=Symmetry.SYMMETRIC))  # type: ignore[arg-type]
