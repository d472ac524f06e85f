"""Rotations that are learned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from devices import on_devices
from gated_mlp import WIDTH, Mlp
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from zoo import ZOO

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.config import block_formats
from quark_fx.config.selection import NOT_SELECTED
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers import ops
from quark_fx.numbers.formats import INT4, INT8, INT16, UINT4
from quark_fx.numbers.rotation import Rotation
from quark_fx.passes import AWQ, GPTQ, LearnRotations, LowRank, NormalizeColumns, Rotate, SmoothQuant
from quark_fx.passes.learn_rotations import _cayley, _rounded

PER_TOKEN = TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True)
WIDE = TensorSpec(format=INT16, granularity=Granularity.CHANNEL)
CONFIG = QuantConfig(weight=WIDE, input=PER_TOKEN)
"""Only activations lose anything."""

LEARN, ROTATE = LearnRotations(streams=False, overhead=9, iterations=60), Rotate(streams=False, overhead=9)
LEARN_LONGER = replace(LEARN, iterations=150)


def data(count: int = 8, seed: int = 1) -> list[Tensor]:
    """Return batches that are largest in some directions, with an outlier in each row, which random matrices mix."""
    basis = torch.linalg.qr(rand(WIDTH, WIDTH, seed=77))[0]
    sizes = torch.logspace(1, -1, WIDTH)
    return [rand(8, 16, WIDTH, seed=seed + i) * sizes @ basis.T for i in range(count)]


def lost(model: nn.Module, config: QuantConfig, *passes: Any) -> float:
    """Return the relative squared error on data that nothing is calibrated on."""
    return lost_by(model, quantize(model, config.replace(passes=passes), data()))


def lost_by(model: nn.Module, qmodel: qfx.QuantizedModel) -> float:
    """Return the relative squared error of a quantized model on data that nothing is calibrated on."""
    (x,) = data(1, seed=99)
    with torch.no_grad():
        difference, expected = qmodel(x) - model(x), model(x)
    return float(difference.square().sum() / expected.square().sum())


def changes(qmodel: qfx.QuantizedModel) -> dict[str, Any]:
    return {change.name: change for change in record_of(qmodel, "LearnRotations").changes}


@cache
def learned_mlp() -> qfx.QuantizedModel:
    """Return a block of two learned matrices, which several tests read."""
    return quantize(seeded(Mlp(nn.RMSNorm)), CONFIG.replace(passes=(LEARN,)), data())


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (PER_TOKEN, 0.93),
        (TensorSpec(format=UINT4, granularity=Granularity.TOKEN, dynamic=True), 0.95),
        (TensorSpec(format=INT4, dynamic=True), 0.9),
        (TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16, dynamic=True), 0.95),
        # Steps of floats are as large as values, and scales are powers of two: a range says less.
        (block_formats.MXFP4.replace(dynamic=True), 1.0),
    ],
    ids=["int4 per token", "uint4 per token", "int4", "int4 in groups", "MXFP4"],
)
def test_learned_matrices_lose_less_than_drawn_ones(spec: TensorSpec, share: float) -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, 96)))
    config = CONFIG.replace(input=spec)
    drawn, learned = (quantize(model, config.replace(passes=(p,)), data()) for p in (ROTATE, LEARN_LONGER))
    assert lost_by(model, learned) < share * lost_by(model, drawn)
    (change,) = changes(learned).values()
    assert change.after < share * change.before
    assert change.what.startswith("learned; ")
    assert record_of(learned, "LearnRotations").validated
    assert record_of(drawn, "Rotate").rewrites == record_of(learned, "LearnRotations").rewrites == 1


def test_the_report_has_the_errors_of_what_is_read() -> None:
    """Every row of the last eighth, rounded as the operator reads it, relative to its squares."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, 96)))
    qmodel = quantize(model, CONFIG.replace(passes=(LEARN,)), data())
    (change,) = changes(qmodel).values()
    x = data()[-1].flatten(0, 1)
    drawn = Rotation.random(WIDTH, torch.Generator().manual_seed(0))
    stored = stored_tensors(qmodel.graph_module)
    (left,), (right,) = ([t for n, t in stored.items() if n.endswith(side)] for side in ("_left", "_right"))
    for rotation, said in ((drawn, change.before), (Rotation(left.double(), right.double()), change.after)):
        turned = rotation.apply(x)
        step = turned.abs().amax(1, keepdim=True) / 7
        rounded = (turned / step).round() * step
        assert said == pytest.approx(float((rounded - turned).square().sum() / x.square().sum()), rel=1e-3)
    for factor in (left, right):
        torch.testing.assert_close(factor.T @ factor, torch.eye(len(factor)), atol=1e-6, rtol=0)


def test_cayley_turns_any_matrix_into_an_orthogonal_one() -> None:
    turned = _cayley(3 * rand(12, 12).double())
    torch.testing.assert_close(turned.T @ turned, torch.eye(12, dtype=torch.float64), atol=1e-12, rtol=0)
    assert torch.equal(_cayley(torch.zeros(5, 5)), torch.eye(5))
    small = torch.tensor([[0.0, 0.01], [-0.01, 0.0]])  # an angle, in radians
    torch.testing.assert_close(_cayley(small), torch.eye(2) + small, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "spec",
    [PER_TOKEN, TensorSpec(format=UINT4, granularity=Granularity.TOKEN, dynamic=True), block_formats.NVFP4],
    ids=["symmetric", "asymmetric", "blocks"],
)
def test_what_is_rounded_has_the_values_that_operators_read_and_the_gradient_of_its_range(spec: TensorSpec) -> None:
    x, spec = rand(6, 32, seed=3), spec.replace(dynamic=True)
    measured = ops.dynamic_qparams(x, *spec.measurement(1))
    name, _, axis, block, *_ = spec.measurement(1)
    expected = ops.fake_quantize(x, *measured, name, axis, block)
    torch.testing.assert_close(_rounded(x, spec), expected)
    # Rounding errors grow as what is rounded does; with a range that is held, the gradient would be of the values.
    x.requires_grad_()
    noise = (_rounded(x, spec) - x).square().sum()
    (gradient,) = torch.autograd.grad(noise, x)
    assert float((gradient * x).sum()) == pytest.approx(2 * float(noise), rel=1e-3)


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        *(("Llama", True), ("GPT-2", True), ("Swin", True), ("Mixtral", True), ("ViT", False)),
        *(pytest.param(name, True, marks=pytest.mark.whole) for name in ("ViT", "BERT", "T5 encoder")),
        pytest.param("Llama", False, marks=pytest.mark.whole),
    ],
)
def test_the_float_function_is_unchanged(name: str, streams: bool) -> None:
    case = ZOO[name]
    passes = (LearnRotations(overhead=9, streams=streams, iterations=3, learning_rate=0.6),)
    spec = TensorSpec(format=INT16, granularity=Granularity.TOKEN, dynamic=True)
    config = QuantConfig(weight=WIDE, input=spec, passes=passes, exclude=("op:embedding", "op:conv*"))
    qmodel = quantize(seeded(case.make()), config, list(case.batches)[:2], verify=True)
    assert record_of(qmodel, "LearnRotations").rewrites > 0


def test_streams_are_learned_from_what_is_read_without_the_factors_of_norms() -> None:
    """A site whose matrix weights absorb; one that read the factors would not know what it rounds."""
    config = ZOO["Llama"]
    model: Any = seeded(config.make())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.logspace(-1, 1, len(parameter)))
    batches = list(config.batches)[:4]
    learned = LearnRotations(overhead=0, iterations=100)
    setup = QuantConfig(weight=WIDE, input=PER_TOKEN, passes=(learned,), exclude=("op:embedding", "op:head"))
    stream = next(c for c in changes(quantize(model, setup, batches)).values() if "q_proj" in c.name)
    # What norms make without their factors has rows of one length; INT4 loses about 1/50 of their squares.
    assert 0.005 < stream.after < stream.before < 0.05


@on_devices
def test_matrices_are_learned_on_any_device(device: torch.device) -> None:
    model, (x,) = seeded(Mlp(nn.RMSNorm)).to(device), data(1, seed=99)
    expected = lost_by(seeded(Mlp(nn.RMSNorm)), learned_mlp())
    qmodel = quantize(model, CONFIG.replace(passes=(LEARN,)), [batch.to(device) for batch in data()])
    with torch.no_grad():
        difference, y = qmodel(x.to(device)) - model(x.to(device)), model(x.to(device))
    assert float(difference.square().sum() / y.square().sum()) == pytest.approx(expected, rel=0.1)


def test_it_goes_with_scales_branches_and_error_feedback() -> None:
    model = seeded(Mlp(nn.RMSNorm))
    config = CONFIG.replace(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL))
    before, behind = (SmoothQuant(rms=True), LowRank(rank=8)), (GPTQ(),)
    assert lost(model, config, *before, LEARN_LONGER, *behind) < lost(model, config, *before, ROTATE, *behind)
    for early in (SmoothQuant(rms=True), AWQ(), NormalizeColumns(), LowRank(rank=8)):
        with pytest.raises(qfx.ConfigError, match=r"; list \w+ first"):
            quantize(model, config.replace(passes=(LEARN, early)), data())


def test_readers_of_one_value_share_its_matrix_and_patterns_choose() -> None:
    found = changes(learned_mlp())
    assert {name: change.changed for name, change in found.items()} == {"gate and 1 more": True, "down": True}
    only = LearnRotations(streams=False, overhead=9, only=("down",))
    found = changes(quantize(seeded(Mlp(nn.RMSNorm)), CONFIG.replace(passes=(only,)), data()))
    assert found["gate and 1 more"].what == f"skipped: {NOT_SELECTED}"
    assert found["down"].before is not None


def test_where_nothing_can_be_learned_the_drawn_matrix_stays_and_the_report_says_why() -> None:
    model, static = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))), TensorSpec(format=INT8)
    for spec in (static, None):
        learned, drawn = (quantize(model, CONFIG.replace(input=spec, passes=(p,)), data()) for p in (LEARN, ROTATE))
        (change,) = changes(learned).values()
        assert change.changed
        assert change.what.startswith("as drawn, no operator that reads it quantizes it dynamically; ")
        with torch.no_grad():
            assert torch.equal(learned(data()[0]), drawn(data()[0]))
    normed = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    found = changes(quantize(normed, CONFIG.replace(passes=(LearnRotations(overhead=9),)), data()))
    assert any(
        change.what.startswith(
            "as drawn, the rotation must preserve the mean of each vector, which the norm subtracts; "
        )
        for change in found.values()
    )


def test_a_matrix_that_validation_data_does_not_confirm_stays_as_it_was_drawn() -> None:
    """One batch to learn from, of four rows; the others are of another kind."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    few = [rand(1, 4, WIDTH, seed=1) * torch.logspace(1, -1, WIDTH) for _ in range(7)] + [rand(4, 64, WIDTH, seed=9)]
    longer = LearnRotations(streams=False, overhead=9)  # long enough to overfit these rows
    drawn, learned = (quantize(model, CONFIG.replace(passes=(p,)), few) for p in (ROTATE, longer))
    (change,) = changes(learned).values()
    assert change.what.startswith("as drawn, no better on validation data (")
    assert change.before == change.after
    with torch.no_grad():
        assert torch.equal(learned(data()[0]), drawn(data()[0]))


class Both(nn.Module):
    """A layer whose inputs and outputs are rotated by one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, WIDTH)
        self.two, self.head = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        one, other = self.two(x).chunk(2, -1)
        out: Tensor = self.head(x + one + other)
        return out


def test_a_weight_that_absorbs_a_matrix_on_both_sides_reads_its_inputs() -> None:
    tokens = [torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    config = CONFIG.replace(passes=(LearnRotations(overhead=0, iterations=20),), exclude=("op:embedding",))
    qmodel = quantize(seeded(Both()), config, tokens, verify=True)
    assert any(change.before is not None for change in changes(qmodel).values())


@pytest.mark.parametrize("stored", [(WIDTH, 48), (48, WIDTH)])
def test_weights_that_the_model_transposes_are_learned_for(stored: tuple[int, int]) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(rand(*stored))

        def forward(self, x: Tensor) -> Tensor:
            return x @ (self.weight if stored[0] == WIDTH else self.weight.T)

    qmodel = quantize(seeded(Product()), CONFIG.replace(passes=(LEARN,)), data(), verify=True)
    (change,) = changes(qmodel).values()
    assert change.after < 0.97 * change.before
    assert record_of(qmodel, "LearnRotations").remark.startswith("1 of 1 matrices are learned; ")


def test_readers_in_several_formats_all_count() -> None:
    wide = qfx.Override(pattern="gate", input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True))
    found = changes(quantize(seeded(Mlp(nn.RMSNorm)), CONFIG.replace(passes=(LEARN,), overrides=(wide,)), data()))
    share = found["gate and 1 more"].before / changes(learned_mlp())["gate and 1 more"].before
    assert 0.3 < share < 0.7  # half of it from int4, and next to nothing from int8


def test_a_norm_whose_factor_is_zero_somewhere_keeps_the_drawn_matrix() -> None:
    case = ZOO["Llama"]
    model: Any = seeded(case.make())
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 0
    setup = CONFIG.replace(passes=(LearnRotations(overhead=0),), exclude=("op:embedding", "op:head"))
    found = changes(quantize(model, setup, list(case.batches)[:2]))
    (what,) = {c.what.partition("; ")[0] for n, c in found.items() if "q_proj" in n}
    assert what == "as drawn, a factor of its norm is zero"


class Masked(nn.Module):
    """A layer whose mask says which positions are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * attention_mask[..., None]
        return out


def test_padding_is_not_learned_from() -> None:
    model = seeded(Masked())
    config = CONFIG.replace(passes=(LEARN,))
    mask = torch.ones(8, 16, dtype=torch.long)
    mask[:, 8:] = 0
    clean = [{"x": x, "attention_mask": mask} for x in data()]
    padded = [{"x": torch.where(mask[..., None] > 0, x, 1e3 * rand(WIDTH)), "attention_mask": mask} for x in data()]
    one, other = (next(iter(changes(quantize(model, config, batches)).values())) for batches in (clean, padded))
    assert (one.before, one.after) == (other.before, other.after)
    assert one.what.startswith("learned; ")


@pytest.mark.parametrize("spec", [PER_TOKEN, TensorSpec(format=INT4, dynamic=True)], ids=["per token", "per tensor"])
def test_batches_of_nothing_but_padding_judge_nothing(spec: TensorSpec) -> None:
    ones, zeros = torch.ones(8, 16, dtype=torch.long), torch.zeros(8, 16, dtype=torch.long)
    batches = [{"x": x, "attention_mask": ones} for x in data()]
    batches[-1]["attention_mask"] = zeros
    (change,) = changes(quantize(seeded(Masked()), CONFIG.replace(input=spec, passes=(LEARN,)), batches)).values()
    assert change.after < change.before


def test_rows_of_large_batches_come_from_everywhere() -> None:
    """The first position of each batch is of another kind; what is judged has none of that."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    batches = [torch.cat(data(4, seed=10 * i + 1)).flatten(0, 1) for i in range(12)]
    for x in batches:
        x[0] = 30 * rand(WIDTH, seed=5)
    (change,) = changes(quantize(model, CONFIG.replace(passes=(LEARN,)), batches)).values()
    assert change.after < 0.9 * change.before


def test_all_values_of_a_site_count() -> None:
    """A stream is read twice; the second time in 16 bits, which lose nothing."""
    tokens = [torch.randint(32, (8, 16), generator=torch.Generator().manual_seed(i)) for i in range(8)]
    wide = qfx.Override(pattern="head", input=TensorSpec(format=INT16, granularity=Granularity.TOKEN, dynamic=True))
    config = CONFIG.replace(passes=(LearnRotations(overhead=0, iterations=20),), exclude=("op:embedding",))
    (both,), (one,) = (
        [c for c in changes(quantize(seeded(Both()), chosen, tokens)).values() if c.before is not None]
        for chosen in (config, config.replace(overrides=(wide,)))
    )
    assert 0.3 < one.before / both.before < 0.7


def test_one_batch_teaches_and_judges_and_blocks_are_learned() -> None:
    learned = LearnRotations(streams=False, overhead=9, block=16)
    config = CONFIG.replace(passes=(learned,))
    (change,) = changes(quantize(seeded(nn.Sequential(nn.Linear(WIDTH, 8))), config, data(1)[:1])).values()
    assert "in blocks by a matrix of size 16" in change.what
    assert change.after < change.before


@pytest.mark.parametrize("between", [(), (LowRank(rank=4),)], ids=["alone", "a split between"])
def test_what_is_rotated_at_run_time_is_not_rotated_again(between: tuple[Any, ...]) -> None:
    qmodel = quantize(Mlp(nn.RMSNorm).eval(), CONFIG.replace(passes=(ROTATE, *between, LEARN)), data())
    assert {change.what for change in changes(qmodel).values()} == {"skipped: its input is already rotated at run time"}


class Flattened(nn.Module):
    """Returns the shape that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(torch.relu(self.one(x.reshape(-1, WIDTH)))).reshape(x.shape)
        return out


def test_a_reader_of_a_size_does_not_hinder_modules() -> None:
    qmodel, (x,) = quantize(seeded(Flattened()), CONFIG.replace(passes=(ROTATE,)), data()), data(1, seed=99)
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(x), qmodel(x))


def test_it_needs_data() -> None:
    program = torch.export.export(seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))), (data()[0],))
    with pytest.raises(qfx.CalibrationError, match="learns from data"):
        qfx.quantize(program, CONFIG.replace(passes=(LEARN,)), None, progress=False)


def test_what_it_takes_is_known_before() -> None:
    made = LearnRotations(streams=False, overhead=9, iterations=150)
    known = qfx.predict(seeded(Mlp(nn.RMSNorm)), CONFIG.replace(passes=(made,)), data(), dynamic_shapes=None)
    (need,) = [need for name, _, need in known.stages if name == "LearnRotations"]
    assert max(moment.working for moment in need.moments) >= 4 * WIDTH * 2048
    assert need.operations > 150 * 256 * WIDTH * 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_in_half_precision_are_learned_too(dtype: torch.dtype) -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))).to(dtype)
    (change,) = changes(quantize(model, CONFIG.replace(passes=(LEARN,)), [x.to(dtype) for x in data()])).values()
    assert change.after < 0.97 * change.before
