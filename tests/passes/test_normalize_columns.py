"""Columns of weights of one size, for error feedback behind a rotation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from zoo import ZOO

from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.formats import INT4, INT8
from quark_fx.passes import GPTQ, NormalizeColumns, Rotate, SmoothQuant

WIDTH = 32


class Normed(nn.Module):
    """A norm that two matrices read."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 48, bias=False), nn.Linear(WIDTH, 16, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        return self.first(y), self.second(y)


def normed(factors: Tensor | None = None) -> Any:
    """Return a model whose channels are scaled in a way that leaves its function as it is."""
    model: Any = seeded(Normed())
    with torch.no_grad():
        model.norm.weight *= torch.logspace(-0.5, 0.5, WIDTH)
        if factors is not None:
            model.norm.weight /= factors
            model.first.weight *= factors
            model.second.weight *= factors
    return model


def configured(*passes: Any) -> QuantConfig:
    return QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL), input=None, passes=passes)


def data(count: int = 8) -> list[Tensor]:
    return [rand(4, 6, WIDTH, seed=seed) for seed in range(1, count + 1)]


SOLVE = (Rotate(streams=False, overhead=9), GPTQ())


def lost(model: Any, *passes: Any) -> float:
    """Return the relative squared error on data that nothing is calibrated on."""
    qmodel, x = quantize(model, configured(*passes), data()), rand(16, 6, WIDTH, seed=99)
    with torch.no_grad():
        pairs = list(zip(qmodel(x), model(x), strict=True))
    return sum(float((a - b).square().sum() / b.square().sum()) for a, b in pairs)


def columns(tensors: dict[str, Tensor]) -> Tensor:
    """Return the mean squares of the columns of both matrices, each element counted once."""
    return torch.cat([tensors["first.weight"], tensors["second.weight"]]).square().mean(0)


def test_all_columns_get_one_size_and_the_report_has_what_it_was() -> None:
    model = normed(torch.logspace(1, -1, WIDTH))
    before = columns(model.state_dict())
    qmodel = quantize(model, QuantConfig(weight=TensorSpec(format=INT8, granularity=Granularity.CHANNEL), input=None,
                                         passes=(NormalizeColumns(),)), data(1))  # fmt: skip
    (change,) = record_of(qmodel, "NormalizeColumns").changes
    assert change.changed
    said = float(change.what.rpartition("loss of error feedback multiplied by ")[2])
    assert said == pytest.approx(float(before.log().mean().exp() / before.mean()), rel=5e-3)
    scale = model.norm.weight / stored_tensors(qmodel.graph_module)["norm.weight"]
    after = before * scale.square()
    assert float(after.max() / after.min()) == pytest.approx(1, rel=1e-4)


def test_channels_made_large_on_the_way_change_nothing() -> None:
    """A model scaled channel by channel, function kept, is rounded to the same: powers of two leave every bit."""
    factors = 2.0 ** torch.randint(-3, 4, (WIDTH,), generator=torch.Generator().manual_seed(5))
    passes, x = (NormalizeColumns(), *SOLVE), rand(16, 6, WIDTH, seed=99)
    plain, scaled = (quantize(model, configured(*passes), data()) for model in (normed(), normed(factors)))
    with torch.no_grad():
        torch.testing.assert_close(plain(x), scaled(x), rtol=1e-4, atol=1e-4)
    assert lost(normed(factors), *SOLVE) > 1.5 * lost(normed(factors), *passes)


def test_error_feedback_behind_a_rotation_loses_less_than_with_scales_for_rounding_to_nearest() -> None:
    model = normed(torch.logspace(1, -1, WIDTH))
    found = lost(model, NormalizeColumns(), *SOLVE)
    assert found < 0.7 * lost(model, *SOLVE)
    assert found < lost(model, SmoothQuant(rms=True), *SOLVE)


def test_a_channel_that_no_weight_reads_stays_finite() -> None:
    model = normed()
    with torch.no_grad():
        model.first.weight[:, 7] = 0
        model.second.weight[:, 7] = 0
    assert lost(model, NormalizeColumns(), *SOLVE) < 1.1 * lost(model, *SOLVE)
    qmodel = quantize(model, configured(NormalizeColumns()), data())
    factors = stored_tensors(qmodel.graph_module)["norm.weight"]
    scale = model.norm.weight.detach() / factors
    assert float(scale[7] / scale.median()) == pytest.approx(1e4, rel=0.5)
    (change,) = record_of(qmodel, "NormalizeColumns").changes
    assert float(change.what.rpartition("multiplied by ")[2]) > 0.5


def test_weights_that_are_all_zero_are_left() -> None:
    model = normed()
    with torch.no_grad():
        model.first.weight.zero_()
        model.second.weight.zero_()
    qmodel = quantize(model, configured(NormalizeColumns()), data())
    (change,) = record_of(qmodel, "NormalizeColumns").changes
    assert (change.what, change.changed) == ("skipped: the weights of all its consumers are zero", False)
    assert bool(stored_tensors(qmodel.graph_module)["norm.weight"].isfinite().all())


def test_every_weight_that_reads_a_channel_counts_once() -> None:
    """Channels that more rows read are not scaled for that."""

    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, half = nn.RMSNorm(WIDTH), WIDTH // 2
            self.few, self.many = nn.Linear(half, 4, bias=False), nn.Linear(half, 256, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            first, second = self.norm(x).chunk(2, -1)
            return self.few(first), self.many(second)

    model: Any = seeded(Parts())
    qmodel = quantize(model, configured(NormalizeColumns()), data())
    scale = model.norm.weight.detach() / stored_tensors(qmodel.graph_module)["norm.weight"]
    assert float(scale[:16].median() / scale[16:].median()) == pytest.approx(1, rel=0.3)


def test_groups_of_channels_and_casts_have_a_reason() -> None:
    model = seeded(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=4)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(NormalizeColumns(),))
    record = record_of(quantize(model, config, [rand(2, 8, 6, 6)]), "NormalizeColumns")
    assert ["not every operator that reads it" in change.what for change in record.changes] == [True]


def test_explicit_multiplies_where_nothing_absorbs_the_scale() -> None:
    model, x = seeded(nn.Linear(WIDTH, 8)), rand(4, 6, WIDTH)
    with torch.no_grad():
        model.weight *= torch.logspace(-1, 1, WIDTH)
    for explicit in (False, True):
        record = record_of(quantize(model, configured(NormalizeColumns(explicit=explicit)), [x]), "NormalizeColumns")
        assert any(change.changed for change in record.changes) is explicit


def test_experts_and_the_operators_around_them_are_scaled() -> None:
    case = ZOO["Mixtral"]
    config = configured(NormalizeColumns()).replace(exclude=("op:embedding", "op:head"))
    record = record_of(quantize(seeded(case.make()), config, list(case.batches)[:1]), "NormalizeColumns")
    assert any("experts" in change.name and change.changed for change in record.changes)


def test_weights_that_share_one_scale_are_not_divided() -> None:
    model = seeded(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(NormalizeColumns(),))
    record = record_of(quantize(model, config, [rand(16, 32)]), "NormalizeColumns")
    assert "skipped: the weights that produce it share one scale" in [change.what for change in record.changes]
