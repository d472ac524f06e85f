"""Scales follow the gradient of what the whole model predicts; codes stay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from devices import on_devices
from test_back_walk import Sentences
from tiny import cnn, images, quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.graph.nodes import stored_tensors, tensor_of
from quark_fx.graph.pass_manager import Stage, graph_pass
from quark_fx.graph.straight_through import run_with_gradients
from quark_fx.numbers.formats import INT3, INT4, INT8, UINT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT16
from quark_fx.passes import GPTQ, TuneScales
from quark_fx.passes.tune_scales import _SideBySide
from quark_fx.presets import INT8_STATIC, MXFP4_WEIGHT_ONLY

GROUPS = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=8)
TUNED = QuantConfig(weight=GROUPS, passes=(TuneScales(iterations=24, learning_rate=0.01),))


class Deep(nn.Module):
    """Residual blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.head = nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def deep() -> Deep:
    model = seeded(Deep())
    with torch.no_grad():
        model.head.weight *= 3
    return model


def batches(device: torch.device | None = None) -> list[Tensor]:
    return [rand(32, 5, 16, seed=i).to(device) for i in range(8)]


def divergence(model: nn.Module, qmodel: Any) -> float:
    x = rand(64, 5, 16, seed=99)
    with torch.no_grad():
        p, q = (m(x).log_softmax(-1) for m in (model, qmodel))
    return float((p.exp() * (p - q)).sum(-1).mean())


def of_passes(*passes: Any) -> qfx.QuantizedModel:
    return quantize(deep(), TUNED.replace(passes=passes), batches())


CODES = QuantConfig(
    weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL), input=TensorSpec(format=UINT8), target=Target.TORCH
)
DYNAMIC = CODES.replace(
    input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True, symmetry=Symmetry.SYMMETRIC)
)


@on_devices
@pytest.mark.parametrize("config", [TUNED, CODES, DYNAMIC], ids=["weights", "static", "dynamic"])
def test_gradients_of_scales_are_those_of_the_whole_graph(config: QuantConfig, device: torch.device) -> None:
    seen: list[str] = []

    @graph_pass(exact=False, stage=Stage.QUANTIZED)
    def look(gm: GraphModule, context: Context) -> int:
        names = [weight.scale_name for weight in quantized_weights(gm, context.plan)]
        with _SideBySide(gm, context, names) as both:
            sums, found = both.gradients(0)
            again = both.loss(0)
        left = [key for key in context.cache._values if isinstance(key, tuple) and key[0] != "batch"]
        assert not left
        for name in names:
            tensor_of(gm, name).requires_grad_()
        with torch.enable_grad():
            (q,), (p,) = run_with_gradients(gm, *context.data.inputs(0)), context.float_graph(*context.data.inputs(0))
            expected = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum()
            gradients = torch.autograd.grad(expected, [tensor_of(gm, name) for name in names])
        torch.testing.assert_close(sums, torch.stack([expected, torch.tensor(160.0)]).detach()[None])
        assert torch.equal(again, sums)
        for name, gradient in zip(names, gradients, strict=True):
            torch.testing.assert_close(found[name], gradient / 160, rtol=1e-4, atol=1e-7)
            tensor_of(gm, name).requires_grad_(False)
        seen.extend(names)
        return 0

    quantize(deep().to(device), config.replace(passes=(look,)), batches(device))
    assert len(seen) == 7


def test_predictions_on_unseen_data_come_nearer_and_codes_stay() -> None:
    plain, tuned = of_passes(GPTQ()), of_passes(GPTQ(), *TUNED.passes)
    assert divergence(deep(), tuned) < 0.9 * divergence(deep(), plain)
    before, after = stored_tensors(plain.graph_module), stored_tensors(tuned.graph_module)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert len(moved) == 7
    assert all(name.endswith("_scale") for name in moved)


def test_the_report_has_the_loss_of_the_stored_model() -> None:
    plain, tuned = of_passes(), of_passes(*TUNED.passes)
    record = record_of(tuned, "TuneScales")
    validation = batches()[7]
    model = deep()
    with torch.no_grad():
        p = model(validation).log_softmax(-1)
        now, before = (float((p.exp() * (p - q(validation).log_softmax(-1))).sum(-1).mean()) for q in (tuned, plain))
    for change in record.changes:
        assert change.before == pytest.approx(before, rel=1e-4)
        assert change.after == pytest.approx(now, rel=1e-4)
    assert record.validated
    assert now < before


def test_what_is_no_better_on_validation_data_is_left_out() -> None:
    plain, tuned = of_passes(), of_passes(TuneScales(iterations=2, learning_rate=0.9))
    assert all(
        c.what.startswith("skipped: no better on validation data (") for c in record_of(tuned, "TuneScales").changes
    )
    for name, tensor in stored_tensors(plain.graph_module).items():
        assert torch.equal(tensor, stored_tensors(tuned.graph_module)[name])


def test_a_weight_that_nothing_depends_on_is_named() -> None:
    class Dead(Deep):
        def __init__(self) -> None:
            super().__init__()
            self.dead = nn.Linear(16, 12)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.relu(self.dead(x) - 1e6)

    whats = {c.name: c.what for c in record_of(quantize(seeded(Dead()), TUNED, batches()), "TuneScales").changes}
    assert whats.pop("dead") == "skipped: the model's outputs do not depend on it"
    assert {*whats.values()} == {"scales"}


def test_biases_in_integers_follow_their_scales() -> None:
    config = INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL))
    configs = config, config.replace(passes=(*config.passes, TuneScales(iterations=8, learning_rate=0.01)))
    plain, tuned = (quantize(cnn(), c, images(8, 8, 8, 8)) for c in configs)
    assert any(c.changed for c in record_of(tuned, "TuneScales").changes)
    before, after = stored_tensors(plain.graph_module), stored_tensors(tuned.graph_module)
    biases = [name for name in before if before[name].dtype == torch.int32 and before[name].dim()]
    assert biases
    for name in biases:
        old, new = (t[f"{name.removesuffix('codes')}scale"] for t in (before, after))
        assert not torch.equal(old, new)
        values = (before[name].double() * old, after[name].double() * new)
        assert ((values[0] - values[1]).abs() <= new).all()


def test_scales_stay_of_their_type() -> None:
    qmodel = quantize(deep(), TUNED.replace(weight=GROUPS.replace(scale=FLOAT16)), batches())
    assert any(c.changed for c in record_of(qmodel, "TuneScales").changes)
    scales = [t for name, t in stored_tensors(qmodel.graph_module).items() if name.endswith("_scale")]
    assert scales
    assert all(torch.equal(scale, scale.half().float()) for scale in scales)
    coarse = quantize(deep(), MXFP4_WEIGHT_ONLY.replace(passes=TUNED.passes, exclude=()), batches())
    whats = {c.what for c in record_of(coarse, "TuneScales").changes}
    assert whats == {"skipped: its scales have 8 bits, too few for small steps"}


def test_padding_counts_for_nothing() -> None:
    mask = torch.ones(4, 6, dtype=torch.int64)
    mask[:, 4:] = 0
    ids = torch.randint(0, 11, (6, 4, 6), generator=torch.Generator().manual_seed(3))
    other = torch.where(mask.bool(), ids, 10 - ids)
    tuned = [
        quantize(seeded(Sentences()), TUNED, [{"ids": x, "attention_mask": mask} for x in batches])
        for batches in (ids, other)
    ]
    assert any(c.changed for c in record_of(tuned[0], "TuneScales").changes)
    for name, tensor in stored_tensors(tuned[0].graph_module).items():
        assert torch.equal(tensor, stored_tensors(tuned[1].graph_module)[name]), name


def test_a_model_without_numbers_has_no_loss() -> None:
    class Labels(Deep):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(-1)

    with pytest.raises(
        qfx.CalibrationError, match="returns no floating-point tensor, so an end loss cannot be computed"
    ):
        quantize(seeded(Labels()), TUNED, batches())


def test_the_prediction_covers_what_the_steps_keep() -> None:
    """What enters the last block of all batches is more than one batch's values take."""
    many = [rand(8, 5, 16, seed=i) for i in range(64)]
    few = TUNED.replace(passes=(TuneScales(iterations=1),))
    more, less = (dict(_needs(qfx.predict(deep(), few, data)))["TuneScales"] for data in (many, many[:8]))
    assert more.moments[0].cached - less.moments[0].cached >= 56 * 8 * 5 * 16 * 4


def _needs(expected: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, need) for name, _, need in expected.stages)


def test_a_loss_that_is_not_finite_is_named() -> None:
    model = deep()
    with torch.no_grad():
        model.head.weight *= 1e38
    with pytest.raises(
        qfx.CalibrationError, match="the end loss of the quantized model on validation data is nan; check"
    ):
        quantize(model, TUNED, batches())
