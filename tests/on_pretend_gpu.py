"""What runs on the pretend GPU: transfers, where activations are kept, and whole runs beside those of the CPU.

`test_pretend_gpu.py` runs these tests in a process of their own: `pytest -p pretend_gpu tests/on_pretend_gpu.py`.
"""

from __future__ import annotations

import pytest
import torch
from pretend_gpu import DEVICE, PretendGPU, RaceError
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import passes
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.presets import PRESETS
from quark_fx.solvers import scaling
from quark_fx.system.accelerator import Transfers

LINEAR = 3
"""Weighted operators of `Net`."""


class Net(nn.Module):
    """Two layers that read one value, and one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        y: Tensor = self.c(torch.relu(self.a(x)) * self.b(x))
        return y


def batches(count: int) -> list[Tensor]:
    return [rand(4, 32, seed=seed) for seed in range(count)]


def quantized(config: QuantConfig, count: int, device: torch.device | None) -> qfx.QuantizedModel:
    return qfx.quantize(seeded(Net()), config, batches(count), device=device, progress=False)


def counts(gpu: PretendGPU, config: QuantConfig, count: int) -> tuple[int, int]:
    """Return the waits and copies of a run on so many batches."""
    gpu.waits.clear()
    gpu.copies.clear()
    quantized(config, count, DEVICE)
    return gpu.waits.total(), gpu.copies.total()


def test_what_a_stream_copies_is_read_only_after_it_was_waited_for(pretend_gpu: PretendGPU) -> None:
    x = rand(3, 4).to(DEVICE).mT.clone()
    transfers = Transfers(DEVICE)
    waits = pretend_gpu.waits.total()
    room = transfers.to_host(x)
    with pytest.raises(RaceError):
        room.sum()  # by the host
    arriving = transfers.to_device(room)
    with pytest.raises(RaceError):
        arriving.value.sum()
    back = transfers.received(arriving)
    assert pretend_gpu.waits.total() == waits
    assert (back.stride(), pretend_gpu.streamed.total()) == (x.stride(), 2)
    assert torch.equal(back.cpu(), x.cpu())
    room.sum()  # the host has waited


def test_memory_that_a_stream_still_reads_is_not_used_again(pretend_gpu: PretendGPU) -> None:
    x, stream = rand(3).to(DEVICE), pretend_gpu.new_stream(DEVICE)
    stream.wait_stream(pretend_gpu.stream)
    with stream:
        y = x + 1
    del x
    assert len(pretend_gpu.races) == 1
    pretend_gpu.races.clear()
    pretend_gpu.stream.wait_stream(stream)
    del y


def test_the_device_the_host_and_the_disk_are_filled_in_this_order(pretend_gpu: PretendGPU) -> None:
    cache = ActivationCache(CacheBudget(device_bytes=80, host_bytes=40), DEVICE)
    values = [rand(10, seed=i) for i in range(5)]
    for i, value in enumerate(values):
        cache.put(i, value.to(DEVICE))
    assert (cache.peak_host_bytes, cache.spilled_bytes) == (40, 80)
    waits = pretend_gpu.waits.total()
    cache.prefetch(range(5))
    found = [cache.get(i) for i in range(3)]
    assert pretend_gpu.waits.total() == waits  # only the disk is waited for
    for value, got in zip(values, [*found, cache.get(3), cache.get(4)], strict=True):
        assert got.device.type == DEVICE.type
        assert torch.equal(got.cpu(), value)
    assert cache.offload() == 80
    assert torch.equal(cache.get(0).cpu(), values[0])
    cache.close()


def test_half_of_the_free_memory_keeps_activations() -> None:
    with PretendGPU(total_bytes=1000):
        cache = ActivationCache(device=DEVICE)
        assert cache.budget.device_bytes == 500
        for i in range(6):
            cache.put(i, torch.zeros(25, device=DEVICE))
        assert cache.peak_host_bytes == 100
        cache.close()


@pytest.mark.parametrize("name", ["w4a16_gptq", "w4a16_awq", "fit"])
def test_waits_and_copies_do_not_grow_with_the_batches(
    name: str, pretend_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many scales AWQ tries follows from their errors, so let it try one.
    monkeypatch.setattr(scaling, "search", lambda errors, sizes: (errors([(9, 9)]), (9, 9))[1])
    base = PRESETS["w4a16_gptq"]
    config = base.replace(passes=(passes.FitScales(),)) if name == "fit" else PRESETS[name]
    few, many = counts(pretend_gpu, config, 8), counts(pretend_gpu, config, 12)
    assert few[0] == many[0] <= (3 + 1) * LINEAR  # and one to store a weight where the model is
    assert many[1] - few[1] == 4


@pytest.mark.parametrize("spilled", [False, True], ids=["on the device", "spilled"])
def test_codes_are_those_of_the_cpu(spilled: bool) -> None:
    learned = PRESETS["w4a16_gptq"].replace(passes=(passes.AutoRound(iterations=2),))
    configs = {"learned": learned} if spilled else {}
    for name in ("w4a16_gptq", "w4a16_awq", "int8_static", "w4a4_dynamic", "mxfp4_best"):
        configs[name] = PRESETS[name]
    for name, config in configs.items():
        cache = CacheBudget(device_bytes=0) if spilled else None
        ours = quantized(config, 4, None).graph_module.state_dict()
        there = qfx.quantize(seeded(Net()), config, batches(4), device=DEVICE, cache=cache, progress=False)
        theirs = there.graph_module.state_dict()
        assert ours.keys() == theirs.keys(), name
        for key, value in ours.items():
            assert torch.equal(value, theirs[key].cpu()), (name, key)
