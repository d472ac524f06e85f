"""What a process keeps that nobody uses."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext

import pytest
import torch
from forked import run_program
from tiny import quantize
from torch import nn

from quark_fx.engine.resources import Resources
from quark_fx.errors import ConfigError
from quark_fx.system.memory import Slabs, is_shortage

_PRODUCTS = """
import sys, torch
from quark_fx.system.memory import occupied, short_memory
weight, before = torch.rand(256, 256, dtype=torch.bfloat16), occupied()
with short_memory("short" in sys.argv):
    for rows in range(1, 801):
        torch.rand(rows, 256, dtype=torch.bfloat16) @ weight
print(occupied() - before >> 20)
"""


def kept(*arguments: str) -> int:
    """Return the MiB that products of 800 shapes leave in a process of their own."""
    return int(run_program(_PRODUCTS, *arguments).stdout)


@pytest.mark.slow
def test_kernels_of_shapes_that_do_not_come_again_are_dropped_where_memory_is_short() -> None:
    if (usually := kept()) < 100:
        pytest.skip("no kernels are generated for these products here")
    assert kept("short") < usually / 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_with_a_budget_leaves_environment_variables_alone(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    budget = "1KiB" if fails else "64GiB"
    with pytest.raises(ConfigError) if fails else nullcontext():
        quantize(nn.Linear(4, 4).eval(), "int8_weight_only", [torch.ones(2, 4)], resources=Resources(memory=budget))
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert "ONEDNN_PRIMITIVE_CACHE_CAPACITY" not in os.environ


_SAMPLED = """
from pathlib import Path
import torch
from torch import nn
import quark_fx as qfx
from quark_fx.passes.smooth_quant import SmoothQuant
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) >> 10
torch.manual_seed(0)
model = nn.Sequential(*(m for _ in range(24) for m in (nn.LayerNorm(256), nn.Linear(256, 256)))).eval()
batches = [torch.randn(8, 512, 256) for _ in range(8)]
qfx.quantize(model, qfx.presets.W8A8_DYNAMIC.replace(passes=()), batches, progress=False)
before = peak()
qfx.quantize(model, qfx.presets.W8A8_DYNAMIC.replace(passes=(SmoothQuant(),)), batches, progress=False)
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_samples_that_stay_do_not_cost_the_values_that_they_are_of() -> None:
    """24 values of 4 MiB in each of 8 batches, of which 384 positions of 4096 are remembered, about 9 MiB in all.

    Each sample and each range used to keep a value: more than 800 MiB. A forward pass itself takes some 60.
    """
    assert int(run_program(_SAMPLED).stdout) < 150


def test_what_lies_in_slabs_is_apart() -> None:
    slabs = Slabs()
    kept = [slabs.empty_like(torch.empty(shape)).fill_(i) for i, shape in enumerate(((3, 5), (0,), (7,), ()))]
    assert [tensor.unique().tolist() for tensor in kept] == [[0.0], [], [2.0], [3.0]]
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == 1
    assert all(tensor.data_ptr() % 64 == 0 for tensor in kept)
    whole = slabs.empty_like(torch.empty(1 << 25))
    assert whole.untyped_storage().data_ptr() != kept[0].untyped_storage().data_ptr()
    assert slabs.empty_like(torch.empty(2, dtype=torch.float64)).dtype == torch.float64


def test_a_shortage_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert is_shortage(short.value)
    assert is_shortage(torch.OutOfMemoryError())
    assert is_shortage(MemoryError())
    assert not is_shortage(other.value)
