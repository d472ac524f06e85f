"""What runs between the float graph and the graph of codes is passes: listed, timed, and replaced by others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.context import Context
from quark_fx.errors import CalibrationError, ConfigError, PassError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import PASSES, Stage, graph_pass, pass_stage
from quark_fx.passes import AdaRound, calibrate, convert, insert_observers
from quark_fx.passes.calibrate import watches_in
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC

OWN = ["insert_observers", "calibrate", "convert"]


@graph_pass(stage=Stage.OBSERVED, distributed=True)
@dataclass(frozen=True, kw_only=True)
class CalibrateOnFirst:
    """Calibrate on the first batches, and make every scale wider."""

    batches: int = 1
    wider: float = 1.0

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Observe; return the number of observers."""
        given = context.data.flat_batches

        def first(device: torch.device) -> Iterator[list[object]]:
            return islice(given(device), self.batches)

        with mock.patch.object(context.data, "flat_batches", first):
            count = calibrate(gm, context)
        assert context.calibrated is not None
        values = context.calibrated.values
        context.calibrated.values = {k: replace(q, scale=q.scale * self.wider) for k, q in values.items()}
        return count


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))


def data() -> list[Tensor]:
    return [rand(4, 8, seed=seed) * seed for seed in (1, 2, 3)]


def scales(qmodel: qfx.QuantizedModel) -> dict[str, Tensor]:
    found = stored_tensors(qmodel.graph_module)
    return {name: tensor for name, tensor in found.items() if name.endswith("quantizer_scale")}


def test_each_stage_is_listed_and_timed() -> None:
    records = quantize(mlp(), INT8_STATIC, data()).report().passes
    assert [record.name for record in records][-3:] == OWN
    observed, calibrated, converted = records[-3:]
    assert observed.rewrites == calibrated.rewrites == len(scales(quantize(mlp(), INT8_STATIC, data()))) > 0
    assert converted.rewrites == sum(not row.reason for row in quantize(mlp(), INT8_STATIC, data()).report().rows)
    assert all(record.seconds > 0 for record in records[-3:])


def test_without_observers_no_data_is_read() -> None:
    def batches() -> Iterator[Tensor]:
        yield data()[0]
        raise AssertionError("a second batch was read")

    records = quantize(mlp(), INT4_WEIGHT_ONLY, batches()).report().passes
    assert [(r.name, r.rewrites) for r in records if r.name in OWN[:2]] == [(OWN[0], 0), (OWN[1], 0)]


@pytest.mark.parametrize("listed", [insert_observers, calibrate, convert])
def test_a_stage_that_is_listed_runs_once(listed: object) -> None:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, listed))
    names = [record.name for record in quantize(mlp(), config, data()).report().passes]
    assert names[-3:] == OWN
    assert len(names) == len(INT8_STATIC.passes) + 3


def test_another_calibration_takes_its_place() -> None:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, CalibrateOnFirst(batches=1)))
    qmodel, first, every = (
        quantize(mlp(), *given) for given in ((config, data()), (INT8_STATIC, data()[:1]), (INT8_STATIC, data()))
    )
    assert [record.name for record in qmodel.report().passes][-3:] == [OWN[0], "CalibrateOnFirst", OWN[2]]
    assert all(torch.equal(scale, scales(first)[name]) for name, scale in scales(qmodel).items())
    assert not all(torch.equal(scale, scales(every)[name]) for name, scale in scales(qmodel).items())
    wide = quantize(mlp(), config.replace(passes=(*INT8_STATIC.passes, CalibrateOnFirst(wider=2.0))), data())
    assert all(torch.equal(scale, 2 * scales(first)[name]) for name, scale in scales(wide).items())
    assert QuantConfig.from_dict(config.to_dict()) == config
    assert "CalibrateOnFirst" in [name for name, _, _ in qfx.predict(mlp(), config, data()).stages]


def test_two_of_one_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"passes calibrate and CalibrateOnFirst both rewrite the observed graph"):
        INT8_STATIC.replace(passes=(calibrate, CalibrateOnFirst()))


@graph_pass(stage=Stage.OBSERVED, distributed=True)
def forget_to_calibrate(gm: GraphModule, context: Context) -> int:
    """Leave the observers where they are."""
    return len(watches_in(gm))


def test_a_calibration_that_leaves_its_work_is_named() -> None:
    with pytest.raises(
        PassError, match=r"scales of .* are missing, and observers of .* are left in the graph; the pass of the"
    ):
        quantize(mlp(), INT8_STATIC.replace(passes=(forget_to_calibrate,)), data())


@graph_pass(stage=Stage.PLANNED)
def plan_nothing(gm: GraphModule, context: Context) -> int:
    """Make no plan."""
    return 0


@graph_pass(stage=Stage.SETTLED, exact=False)
def convert_nothing(gm: GraphModule, context: Context) -> int:
    """Leave the graph in float."""
    return 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (plan_nothing, "the plan is missing; a pass of the planned stage"),
        (convert_nothing, "reported no operators; call"),
    ],
    ids=["planned", "settled"],
)
def test_a_stage_that_leaves_its_work_is_named(other: Any, message: str) -> None:
    with pytest.raises(PassError, match=message):
        quantize(mlp(), INT8_STATIC.replace(passes=(other,)), data())


def test_a_stage_goes_by_its_name_and_a_class_with_options_is_a_dataclass() -> None:
    with pytest.raises(ConfigError, match=r"unknown stage 'quantised'; .*'quantized'"):
        graph_pass(stage="quantised")
    try:
        named = graph_pass(stage="quantized", exact=False)(lambda gm: 0)
        assert pass_stage(named) is Stage.QUANTIZED
    finally:
        PASSES.pop("<lambda>", None)

    class Loses:
        def __init__(self, share: float) -> None:
            self.share = share

        def __call__(self, gm: GraphModule) -> int:
            return 0

    with pytest.raises(ConfigError, match=r"pass Loses is a class with options; put @dataclass"):
        graph_pass()(Loses)


def test_a_batch_goes_by_its_number_though_one_before_it_is_divided() -> None:
    far = [torch.full((8, 8), 2.0), torch.full((8, 8), 2.0), torch.full((1, 8), torch.inf)]
    config = INT8_STATIC.replace(passes=(AdaRound(iterations=0),))
    with pytest.raises(CalibrationError, match="calibration batch 2: input"):
        quantize(nn.Sequential(nn.Linear(8, 4)).eval(), config, far)
