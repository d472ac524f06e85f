"""Directions in float beside quantized operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from zoo import ZOO

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.config.selection import NOT_SELECTED
from quark_fx.config.target import TARGETS
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.operators import BRANCH
from quark_fx.numbers.formats import FP16, INT4, INT8, INT16
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import GPTQ, LowRank, Rotate, SmoothQuant
from quark_fx.passes.low_rank import _directions, _left
from quark_fx.presets import INT8_STATIC

WIDTH = 64
FEW = 4
"""Directions in which activations are large."""

PER_TOKEN = TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True, symmetry=Symmetry.SYMMETRIC_FULL)
IN_FOUR_BITS = QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL), input=PER_TOKEN)


class Mlp(nn.Module):
    """Two matrices read a norm's output, and a third what they make."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96, bias=False)
        self.down = nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out: Tensor = self.down(torch.relu(self.gate(y)) * self.up(y)) + x
        return out


def data(count: int = 8, seed: int = 1, width: int = WIDTH) -> list[Tensor]:
    """Return batches that are largest in a few directions, none of them a channel."""
    basis = torch.linalg.qr(rand(width, width, seed=77))[0]
    sizes = torch.ones(width)
    sizes[:FEW] = 12.0
    return [rand(4, 6, width, seed=seed + i) * sizes @ basis.T for i in range(count)]


def configured(*passes: Any, **specs: Any) -> QuantConfig:
    return IN_FOUR_BITS.replace(passes=passes, **specs)


def lost(model: nn.Module, config: QuantConfig) -> float:
    """Return the relative squared error on data that nothing is calibrated on."""
    qmodel, (x,) = quantize(model, config, data()), data(1, seed=99)
    with torch.no_grad():
        difference, expected = qmodel(x) - model(x), model(x)
    return float(difference.square().sum() / expected.square().sum())


def changes(qmodel: qfx.QuantizedModel) -> dict[str, Any]:
    return {change.name: change for change in record_of(qmodel, "LowRank").changes}


# The directions.


@pytest.mark.parametrize("seed", range(3))
def test_the_directions_leave_the_least_product_of_traces(seed: int) -> None:
    """No other directions near by, nor those of one side alone, leave less."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.randn(32, 32, generator=generator) * torch.logspace(0, -2, 32) for _ in range(2)]
    x, w = (root @ root.T for root in roots)
    found = _directions(x, w, 5)
    torch.testing.assert_close(found.T @ found, torch.eye(5), atol=1e-5, rtol=0)

    def left(directions: Tensor) -> float:
        return float(_left(x, directions) * _left(w, directions))

    best = left(found)
    assert best < min(left(torch.linalg.eigh(form)[1][:, -5:]) for form in (x, w))
    for size in (0.3, 0.03):
        for _ in range(20):
            moved = found + size * torch.randn(32, 5, generator=generator) / 32**0.5
            assert left(torch.linalg.qr(moved)[0]) > best * (1 - 1e-4)


def test_the_directions_of_outliers_are_found_and_what_is_left_is_reported() -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, 96)))
    qmodel = quantize(model, configured(LowRank(rank=FEW)), data())
    (change,) = record_of(qmodel, "LowRank").changes
    (into,) = (t for name, t in stored_tensors(qmodel.graph_module).items() if name.endswith("_into"))
    rows = torch.cat(data()).flatten(0, 1)
    judged = torch.cat(data()[-1:]).flatten(0, 1)  # the last eighth
    weight = next(p for p in model.parameters() if p.dim() == 2).detach()
    rest = torch.eye(WIDTH) - into.T @ into
    expected = (judged @ rest).square().sum() / judged.square().sum()
    expected *= (weight @ rest).square().sum() / weight.square().sum()
    assert change.before == 1
    assert change.after == pytest.approx(float(expected), rel=1e-3)
    assert float((rows @ rest).square().sum() / rows.square().sum()) < 0.2


# The graph.


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BLOOM", "ViT", "Swin", "Mixtral", "BERT", "T5 encoder"])
def test_the_float_function_is_unchanged(name: str) -> None:
    case = ZOO[name]
    wide = TensorSpec(format=qfx.formats.INT16, granularity=Granularity.CHANNEL)
    config = QuantConfig(weight=wide, input=None, passes=(LowRank(rank=2, overhead=9),), exclude=("op:embedding",))
    model = seeded(case.make())
    qmodel = quantize(model, config, list(case.batches)[:2], verify=True)
    assert record_of(qmodel, "LowRank").rewrites > 0


def test_quantized_models_lose_less_by_what_the_report_says() -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, 96)))
    behind = (Rotate(streams=False, overhead=9),)
    plain, split = lost(model, configured(*behind)), lost(model, configured(LowRank(rank=FEW), *behind))
    (change,) = record_of(quantize(model, configured(LowRank(rank=FEW)), data()), "LowRank").changes
    assert change.after is not None
    assert change.after < 0.3
    assert split / plain == pytest.approx(change.after, rel=0.4)


def test_all_four_bits_lose_less_with_scales_and_error_feedback_as_well() -> None:
    model = seeded(Mlp())
    others = (Rotate(streams=False, overhead=9), GPTQ())
    plain = lost(model, configured(SmoothQuant(rms=True), *others))
    assert lost(model, configured(SmoothQuant(rms=True), LowRank(rank=8), *others)) < 0.6 * plain


def test_readers_of_one_value_share_its_directions() -> None:
    qmodel = quantize(seeded(Mlp()), configured(LowRank(rank=8)), data())
    assert {name for name, change in changes(qmodel).items() if change.changed} == {"gate, up", "down"}
    stored = stored_tensors(qmodel.graph_module)
    assert sorted(tuple(t.shape) for name, t in stored.items() if name.endswith("_into")) == [(8, 64), (8, 96)]
    assert sorted(tuple(t.shape) for name, t in stored.items() if name.endswith("_branch")) == [
        *((64, 8), (96, 8), (96, 8)),
    ]
    rows = {row.name: row for row in qmodel.report().rows}
    assert {row.weight for row in rows.values()} == {str(IN_FOUR_BITS.weight)}  # branches are no operators
    plain = {row.name: row for row in quantize(seeded(Mlp()), configured(), data()).report().rows}
    more = {name: row.bytes_after - plain[name].bytes_after for name, row in rows.items()}
    assert more == {"gate": 4 * 8 * (64 + 64 + 96), "up": 4 * 8 * 96, "down": 4 * 8 * (96 + 96 + 64)}


def test_blocks_are_cut_as_without() -> None:
    config = configured(LowRank(rank=8), GPTQ())
    graph = quantize(seeded(Mlp()), config, data()).graph_module
    assert any(BRANCH in node.meta for node in graph.graph.nodes)
    names = [change.name for change in record_of(quantize(seeded(Mlp()), config, data()), "GPTQ").changes]
    assert names == ["gate", "up", "down"]


def test_an_operator_is_still_the_head_of_the_model_and_a_router_still_routes() -> None:
    case = ZOO["Mixtral"]
    config = IN_FOUR_BITS.replace(
        passes=(LowRank(rank=2, overhead=9),),
        exclude=("op:embedding", "op:router"),
        overrides=(qfx.Override(pattern="op:head", weight=TensorSpec(format=INT8)),),
    )
    qmodel = quantize(seeded(case.make()), config, list(case.batches)[:1])
    rows = {row.name: row for row in qmodel.report().rows}
    assert changes(qmodel)["lm_head"].changed
    assert rows["lm_head"].weight == str(TensorSpec(format=INT8))
    assert all("router" in row.reason for name, row in rows.items() if name.endswith(("gate", "router")))


# Files.


def test_files_compute_the_same_and_modules_refuse_by_name(tmp_path: Path) -> None:
    model, (x,) = seeded(Mlp()), data(1, seed=99)
    qmodel = quantize(model, INT8_STATIC.replace(passes=(*INT8_STATIC.passes, LowRank(rank=8))), data())
    qmodel.save(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(qfx.load(tmp_path / "model")(x), qmodel(x))
        torch.testing.assert_close(qmodel.compile()(x), qmodel(x), rtol=1e-3, atol=1e-3)
    qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, tmp_path / "model.onnx", [x]).max_steps <= 1
    with pytest.raises(qfx.QuarkError, match="quantize without LowRank"):
        qmodel.eager()


def test_where_servers_compute_nothing_beside_a_layer_nothing_is_split() -> None:
    assert {name for name, target in TARGETS.items() if not target.checkpoints.branches} == {"vllm", "sglang"}
    weight = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
    config = QuantConfig(weight=weight, input=None, passes=(LowRank(rank=8),), target=TARGETS["vllm"])
    found = changes(quantize(seeded(Mlp()), config, data()))
    assert {change.what for change in found.values()} == {"skipped: target='vllm' computes nothing beside a layer"}


# What is left as it is.


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.relu(self.one(x)))
        return out


def test_what_is_not_split_has_a_reason() -> None:
    found = changes(quantize(seeded(Mlp()), configured(LowRank(rank=8, only=("down",))), data()))
    assert found["gate"].what == found["up"].what == NOT_SELECTED
    assert found["down"].changed
    found = changes(quantize(seeded(Mlp()), configured(LowRank(rank=48)), data()))
    assert found["gate, up"].what == ("skipped: a branch of rank 48 would cost 125% of the products (overhead=0.5)")
    found = changes(quantize(seeded(Tied()), configured(LowRank(rank=8)), data()))
    assert all("its weight is shared with" in change.what for change in found.values())
    conv = seeded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 64)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(LowRank(rank=2),))
    found = changes(quantize(conv, config, [rand(16, 3, 6, 6)]))
    assert found["0"].what == "skipped: it is no product with one matrix"
    assert found["3"].changed
    casts = QuantConfig(weight=TensorSpec(format=FP16), input=None, passes=(LowRank(rank=8),))
    assert {c.what for c in changes(quantize(seeded(Mlp()), casts, data())).values()} == {
        "skipped: its weight has no codes"
    }


@pytest.mark.parametrize("size", [0.0, 1e30])
def test_values_without_a_direction_are_left(size: float) -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    qmodel = quantize(model, configured(LowRank(rank=4), input=None), [size * x for x in data(4)])
    (change,) = record_of(qmodel, "LowRank").changes
    assert not change.changed
    assert change.what == (
        "skipped: what it reads, or its weight, is zero"
        if size == 0
        else "skipped: what it reads, or its weight, is too large to be squared"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_keep_their_function(dtype: torch.dtype) -> None:
    """Directions are rounded, too; what is lost is no more than a few roundings of the model's own."""
    model, config = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))), configured(LowRank(rank=8), input=None)
    half = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))).to(dtype)
    config = config.replace(weight=TensorSpec(format=INT16, granularity=Granularity.CHANNEL))
    qmodel = quantize(half, config, [x.to(dtype) for x in data()])
    (change,) = record_of(qmodel, "LowRank").changes
    assert change.changed
    (x,) = data(1, seed=99)
    with torch.no_grad():
        found, own, expected = qmodel(x.to(dtype)), half(x.to(dtype)), model(x)
    assert found.dtype == dtype
    assert float((found.float() - expected).norm()) < 2 * float((own.float() - expected).norm())


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(qfx.ConfigError, match="rank"):
        LowRank(rank=rank)
