"""What runs on the pretend GPU: transfers, where activations are kept, and whole runs beside those of the CPU.

`test_pretend_gpu.py` runs these tests in a process of their own: `pytest -p pretend_gpu tests/on_pretend_gpu.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_gpu import DEVICE, PretendGPU, RaceError
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import passes
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.engine.ranks import Ranks
from quark_fx.graph.linear_map import LinearMap
from quark_fx.numbers import quantized_tensor
from quark_fx.numbers.formats import Codebook
from quark_fx.presets import PRESETS
from quark_fx.solvers import solver
from quark_fx.system import accelerator
from quark_fx.system.accelerator import Transfers


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
    return qfx.quantize(seeded(Net()), config, batches(count), resources=qfx.Resources(device=device), progress=False)


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


def test_values_that_are_asked_for_twice_are_copied_once(pretend_gpu: PretendGPU) -> None:
    cache = ActivationCache(CacheBudget(device_bytes=0), DEVICE)
    cache.put("x", rand(10).to(DEVICE))
    streamed = pretend_gpu.streamed.total()
    for _ in range(2):
        cache.prefetch("x")
    cache.get("x")
    assert pretend_gpu.streamed.total() == streamed + 1
    cache.close()


def test_few_values_are_in_flight_while_the_host_runs_ahead(pretend_gpu: PretendGPU) -> None:
    cache, waits = ActivationCache(CacheBudget(device_bytes=0), DEVICE), pretend_gpu.waits.total()
    for i in range(12):
        cache.put(i, torch.full((256,), float(i), device=DEVICE))
    for i in range(12):
        x = cache.get(i)
        cache.prefetch([i + 1] if i < 11 else [])
        cache.put(("twice", i), x * 2)
        del x
    assert pretend_gpu.waits.total() == waits
    assert pretend_gpu.peak_bytes <= 6 * 1024
    assert [float(cache.get(("twice", i))[0]) for i in range(12)] == [2.0 * i for i in range(12)]
    cache.prefetch([0])
    cache.close()


def test_without_pinned_memory_values_lie_in_other_host_memory_or_on_disk(
    pretend_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "pinned_bytes", lambda count: None)
    cache, values = ActivationCache(CacheBudget(device_bytes=2048), DEVICE), [rand(256, seed=i) for i in range(4)]
    for i in range(3):
        cache.put(i, values[i].to(DEVICE))
    real, moved = Tensor.cpu, list[Tensor]()

    def full(x: Tensor) -> Tensor:
        moved.append(x)
        if len(moved) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return real(x)

    monkeypatch.setattr(Tensor, "cpu", full)
    cache.put(3, values[3].to(DEVICE))
    assert cache.spilled_bytes == 1024
    monkeypatch.setattr(Tensor, "cpu", real)
    monkeypatch.setattr(cache, "_on_host", lambda value: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cache.offload()
    for i, value in enumerate(values):
        assert torch.equal(cache.get(i).cpu(), value)
    cache.close()


def test_a_table_is_copied_to_the_device_once(pretend_gpu: PretendGPU) -> None:
    book, x = Codebook("few", (-2.0, -0.5, 0.0, 1.0)), rand(4, 8).to(DEVICE)
    book.round_(x.clone())
    copies = pretend_gpu.copies.total()
    for column in x.unbind(1):
        assert book.round_(column.clone()).isfinite().all()
        book.above(column)
    assert pretend_gpu.copies.total() == copies


def test_lists_are_copied_to_the_device(pretend_gpu: PretendGPU) -> None:
    x = rand(3, 4)
    y, copies = x.to(DEVICE), pretend_gpu.copies.total()
    parts = y[:, [0, 2]], y[1, [True, False, False, True]], y[[]]
    y[[0, 1]] = 2.0
    numbers = y.new_tensor([1, 2])
    assert (pretend_gpu.copies.total() - copies, numbers.device.type) == (5, DEVICE.type)
    for found, expected in zip(parts, (x[:, [0, 2]], x[1, [0, 3]], x[[]]), strict=True):
        assert torch.equal(found.cpu(), expected)
    assert torch.equal(y[:2].cpu(), torch.full((2, 4), 2.0))
    assert torch.equal(numbers.cpu(), x.new_tensor([1, 2]))


@pytest.mark.parametrize(("most", "copies"), [(11, 1), (12, 0)])
def test_rows_are_chosen_by_copied_indices_only_if_there_are_too_many(
    most: int, copies: int, pretend_gpu: PretendGPU
) -> None:
    x, y = rand(3, 4, 8).to(DEVICE), rand(3, 4, 6).to(DEVICE)
    before = pretend_gpu.copies.total()
    columns, outputs = LinearMap().rows(x, y, most=most, seed=0)
    assert (columns.shape, outputs.shape) == ((1, 8, most), (1, 6, most))
    assert pretend_gpu.copies.total() == before + copies


def test_half_of_the_free_memory_keeps_activations() -> None:
    with PretendGPU(total_bytes=1000):
        cache = ActivationCache(device=DEVICE)
        assert cache.budget.device_bytes == 500
        for i in range(6):
            cache.put(i, torch.zeros(25, device=DEVICE))
        assert cache.peak_host_bytes == 100
        cache.close()


@pytest.mark.parametrize(
    ("name", "most"),
    # Two more store a weight where the model is; calibration waits for the ranges of activations.
    [
        *(("w4a16_gptq", 6), ("w4a16_awq", 3), ("guided", 8), ("nvfp4_best", 21)),
        *(("fit", 12), ("smooth", 9), ("tune", 27), ("learn", 8)),
    ],
)
def test_waits_and_copies_do_not_grow_with_the_batches(
    name: str, most: int, pretend_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is stored follows from errors, so let each weight that is proposed have half the error of the one before it.
    errors = partial(torch.arange, 2.0, 0.0, -1.0)
    monkeypatch.setattr(solver, "relative_errors", lambda matrices, target, h: errors(device=h.device))
    w4, static = PRESETS["w4a16_gptq"], PRESETS["int8_static"]
    with_pass = {
        "guided": w4.replace(passes=PRESETS["w4a16_best"].passes[-1:]),
        "fit": w4.replace(passes=(passes.FitScales(),)),
        "smooth": static.replace(passes=(*static.passes, passes.SmoothQuant())),
        "tune": w4.replace(passes=(passes.TuneScales(iterations=4),)),
        "learn": PRESETS["w4a4_dynamic"].replace(passes=(passes.LearnRotations(iterations=2),)),
    }
    few, more = (8, 8) if name == "learn" else (3, 2)  # rows of a cut batch are chosen by indices of their own
    one, other = (counts(pretend_gpu, with_pass.get(name) or PRESETS[name], count) for count in (few, few + more))
    assert one[0] == other[0] <= most
    assert other[1] - one[1] == more


@pytest.mark.parametrize("name", ["w4a16_rtn", "w4a16_gptq", "w4a16_awq"])
def test_a_model_on_the_device_waits_for_operators_not_for_batches_or_checks(
    name: str, pretend_gpu: PretendGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches, weights, and their ranges are checked together: at most three waits per operator, and a few in all."""
    errors = partial(torch.arange, 2.0, 0.0, -1.0)
    monkeypatch.setattr(solver, "relative_errors", lambda matrices, target, h: errors(device=h.device))

    def waits(count: int) -> int:
        model, data = seeded(Net()).to(DEVICE), [batch.to(DEVICE) for batch in batches(count)]
        pretend_gpu.waits.clear()
        qfx.quantize(model, PRESETS[name], data, progress=False)
        return pretend_gpu.waits.total()

    waits(1)  # the first capture is kept (tests/captured_once.py), which reads constants
    assert waits(3) == waits(5) <= (8 if name == "w4a16_rtn" else 8 + 3 * 3)


class Raised(nn.Module):
    """A layer whose output is raised by ones on its device, which the code names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        y: Tensor = self.b(torch.relu(x * 2 + torch.ones_like(x, device=x.device)))
        return y


def test_maps_of_a_model_on_the_device_fold(pretend_gpu: PretendGPU) -> None:
    x = rand(8, 32)
    expected = qfx.quantize(seeded(Raised()), PRESETS["int8_static"], [x], progress=False)(x)
    model = seeded(Raised()).to(DEVICE)
    qmodel = qfx.quantize(model, PRESETS["int8_static"], [x.to(DEVICE)], progress=False)
    assert torch.equal(qmodel(x.to(DEVICE)).cpu(), expected)
    names = [str(node.target) for node in qmodel.graph_module.graph.nodes]
    assert not any(name.startswith(("aten.mul", "aten.add", "aten.ones_like")) for name in names)


FORMAT_APART = (
    *("int8_weight_only", "int16_act_int8_weight", "bf16", "w4a16_best_asym", "fp8_dynamic", "w4a8", "w4afp8"),
    *("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_weight_only", "mxfp4_best", "nvfp4_weight_only"),
    *("mx6", "mx4"),
)
"""Presets that run the code of others: they differ from one in number formats of one kind, or in symmetry."""


@cache
def configurations() -> dict[str, QuantConfig]:
    """Return every preset, and a configuration with each pass that no preset has."""
    static, w4 = PRESETS["int8_static"], PRESETS["w4a16_rtn"]
    few: dict[str, Any] = {"iterations": 2}
    on_static = [passes.AdaQuant(**few), passes.AdaRound(iterations=1), passes.BiasCorrection(), passes.SmoothQuant()]
    on_static += [passes.CrossLayerEqualization(), passes.AbsorbHighBias()]
    on_w4 = [passes.AutoRound(**few), passes.BlockAP(**few), passes.FitScales(), passes.TuneScales(**few)]
    on_w4 += [passes.NormalizeColumns(), passes.LowRank(rank=4), passes.Rotate()]
    on_w4 += [passes.AWQ(feedback=True), passes.GPTQ(asymmetry=1.0)]
    learned = passes.LearnRotations(**few)
    found = {**PRESETS}
    found |= {str(learned): PRESETS["w4a4_dynamic"].replace(passes=(learned,))}
    found |= {str(one): static.replace(passes=(*static.passes, one)) for one in on_static}
    return found | {str(one): w4.replace(passes=(one,)) for one in on_w4}


@cache
def on_cpu(name: str) -> qfx.QuantizedModel:
    """Return what a configuration makes of `Net` and four batches on the CPU."""
    return qfx.quantize(cpu_session(), configurations()[name], progress=False)


@cache
def cpu_session() -> qfx.Session:
    return qfx.Session(seeded(Net()), batches(4))


def assert_same_tensors(ours: qfx.QuantizedModel, theirs: qfx.QuantizedModel, name: str) -> None:
    one, other = ours.graph_module.state_dict(), theirs.graph_module.state_dict()
    assert one.keys() == other.keys(), name
    for key, value in one.items():
        assert torch.equal(value.cpu(), other[key].cpu()), (name, key)


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=pytest.mark.whole)])
def test_every_preset_and_solver_makes_the_tensors_of_the_cpu(apart: bool, pretend_gpu: PretendGPU) -> None:
    assert PRESETS.keys() >= {*FORMAT_APART}
    session = qfx.Session(seeded(Net()), batches(4), resources=qfx.Resources(device=DEVICE))
    chosen = {name: config for name, config in configurations().items() if (name in FORMAT_APART) == apart}
    for name, config in chosen.items():
        assert_same_tensors(on_cpu(name), qfx.quantize(session, config, progress=False), name)
    assert pretend_gpu.waits.total() > len(chosen)  # they ran there


def test_spilled_activations_make_the_same_tensors(pretend_gpu: PretendGPU) -> None:
    cache = CacheBudget(device_bytes=0)
    session = qfx.Session(seeded(Net()), batches(4), resources=qfx.Resources(device=DEVICE, cache=cache))
    for name in ("w4a16_best", "int8_static", str(passes.AdaRound(iterations=1))):
        config, streamed = configurations()[name], pretend_gpu.streamed.total()
        made = qfx.quantize(session, config, progress=False)
        assert name == "int8_static" or pretend_gpu.streamed.total() > streamed
        assert_same_tensors(on_cpu(name), made, name)


def test_modules_and_training_on_the_device_are_those_of_the_cpu() -> None:
    """What a model on the device computes, in `eager()` as well, and what it is after three steps of training."""
    found: dict[str, list[list[Tensor]]] = {"cpu": [], DEVICE.type: []}
    for device in found:
        session = qfx.Session(seeded(Net()).to(device), [x.to(device) for x in batches(4)])
        x = batches(1)[0].to(device)
        for name in ("w4a16_rtn", "int8_dynamic", "mxfp4"):
            qmodel = qfx.quantize(session, name, progress=False)
            found[device].append([qmodel(x), qmodel.eager()(x)])
        trained = qfx.prepare_qat(qfx.quantize(session, "int8_static", progress=False), scales=True)
        optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
        for batch in batches(3):
            optimizer.zero_grad()
            trained(batch.to(device)).square().mean().backward()
            optimizer.step()
        found[device].append([*trained.convert().graph_module.state_dict().values()])
    for ours, theirs in zip(*found.values(), strict=True):
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(ours, theirs, strict=True))


def test_numbers_of_a_report_are_read_with_one_wait_for_all_weights(pretend_gpu: PretendGPU) -> None:
    session = qfx.Session(seeded(Net()).to(DEVICE), [x.to(DEVICE) for x in batches(1)])

    def reads(work: Callable[[], qfx.QuantizedModel]) -> tuple[int, int]:
        """Return the waits for several numbers at once, and the weights in the report."""
        before = pretend_gpu.waits.copy()
        weights = sum(row.sqnr is not None for row in work().report().rows)
        files = Counter(line.split(":")[0] for line in (pretend_gpu.waits - before).elements())
        assert not files.keys() & {"plan/report.py", "quantization.py"}
        return files["system/accelerator.py"], weights

    # One more for each weight: whether its range is finite.
    assert reads(lambda: qfx.quantize(session, "w4a16_rtn", progress=False)) == (3, 2)
    # The ranges are known. The solver waits twice for both weights, and what it learned is reported, too.
    assert reads(lambda: qfx.quantize(session, "w4a16_gptq", progress=False)) == (4, 2)
    trained = qfx.prepare_qat(qfx.quantize(session, "int8_static", progress=False))
    assert reads(trained.convert) == (1, 3)


class Counting(nn.Module):
    """Counts as transformers counts the rows of experts: on a GPU, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        chosen = y.argmax(-1)
        counts = torch.histc(chosen.float() if chosen.is_cpu else chosen.int(), bins=4, min=0, max=3)
        return y, torch.cumsum(counts, 0, dtype=torch.int32)


def test_a_model_that_counts_integers_on_the_device_runs_on_the_cpu(tmp_path: Path) -> None:
    x = rand(16, 8)
    qfx.quantize(seeded(Counting()).to(DEVICE), "w4a16_rtn", [x.to(DEVICE)], progress=False).save(tmp_path)
    expected = qfx.quantize(seeded(Counting()), "w4a16_rtn", [x], progress=False)(x)
    for device in ("cpu", DEVICE):
        found = qfx.load(tmp_path, device=device)(x.to(device))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))


class Deep(nn.Module):
    """Blocks that are small beside all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_a_model_larger_than_the_device_is_quantized_block_by_block() -> None:
    data = [rand(2, 64, seed=seed) for seed in range(4)]
    here = qfx.quantize(seeded(Deep()), "w4a16_gptq", data, progress=False)
    size = sum(p.nbytes for p in Deep().parameters())
    with PretendGPU(total_bytes=int(0.8 * size)) as gpu:
        there = qfx.quantize(seeded(Deep()), "w4a16_gptq", data, resources=qfx.Resources(device=DEVICE), progress=False)
        assert_same_tensors(here, there, "w4a16_gptq")
        assert 0 < gpu.peak_bytes < 0.8 * size


def require_same_on_ranks() -> None:
    """Be a rank that quantizes on the CPU and on the device, to the same tensors.

    On the device, one of the ranks has too little memory twice in each run, which the others do not notice.
    """
    for name, before in (("w4a16_gptq", 12), (str(passes.AdaRound(iterations=1)), 30)):
        made = []
        for device in (None, DEVICE):
            resources = qfx.Resources(device=device, distributed=True)
            with PretendGPU() as gpu:
                gpu.refused = [before, 0] * (device is not None and Ranks.current().index == 1)
                made.append(
                    qfx.quantize(seeded(Net()), configurations()[name], batches(4), resources=resources, progress=False)
                )
                assert gpu.refused == []
                assert (gpu.waits.total() > 0) == (device is not None)
        assert_same_tensors(made[0], made[1], name)


def test_weights_are_encoded_in_smaller_pieces_where_the_device_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_tensor, "AT_ONCE", 1 << 9)
    here = qfx.quantize(seeded(nn.Linear(256, 512)), "int8_weight_only", [rand(2, 256)], progress=False)
    with PretendGPU() as gpu:
        model = seeded(nn.Linear(256, 512)).to(DEVICE)
        gpu.total_bytes = int(2.9 * model.weight.nbytes)
        there = qfx.quantize(model, "int8_weight_only", [rand(2, 256).to(DEVICE)], progress=False)
        assert_same_tensors(here, there, "int8_weight_only")
    told = [c.what for record in there.report().passes for c in record.changes if c.name == "device memory"]
    assert told[-1] == "full; weights are rounded in pieces of 1/2 the size"


@pytest.mark.parametrize(("name", "before"), [("w4a16_best", 40), (str(passes.AdaRound(iterations=1)), 60)])
def test_a_run_continues_where_the_device_is_full(name: str, before: int, pretend_gpu: PretendGPU) -> None:
    pretend_gpu.refused = [before, 0]  # that allocation, and the next
    there = quantized(configurations()[name], 4, DEVICE)
    assert pretend_gpu.refused == []
    assert_same_tensors(on_cpu(name), there, name)
    told = [c.what for record in there.report().passes for c in record.changes if c.name == "device memory"]
    assert len(told) == 2
    assert "of activations moved to the host" in told[0]
    assert "pieces of 1/2 the size" in told[1]
