"""Directions in float beside quantized operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_devices
from gated_mlp import WIDTH, Mlp
from tiny import all_but, quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from zoo import ZOO

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.config.selection import NOT_SELECTED
from quark_fx.config.target import TARGETS
from quark_fx.engine.blocks import Unit, find_blocks
from quark_fx.graph.nodes import DEQUANTIZE, stored_tensors, target_name
from quark_fx.graph.operators import BRANCH
from quark_fx.numbers.formats import FP16, INT4, INT8, INT16
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import AWQ, GPTQ, CrossLayerEqualization, LowRank, NormalizeColumns, Rotate, SmoothQuant
from quark_fx.passes.low_rank import _directions, _left
from quark_fx.presets import INT8_STATIC

FEW = 4
"""Directions in which activations are large."""

PER_TOKEN = TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True, symmetry=Symmetry.SYMMETRIC_FULL)
IN_FOUR_BITS = QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL), input=PER_TOKEN)


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


def left(change: Any) -> float:
    """Return what the error of a change is multiplied by."""
    assert change.changed
    return float(change.what.rpartition("error multiplied by ")[2])


def changes(qmodel: qfx.QuantizedModel) -> dict[str, Any]:
    return {change.name: change for change in record_of(qmodel, "LowRank").changes}


# The directions.


@pytest.mark.parametrize("seed", range(3))
def test_the_directions_leave_the_least_product_of_traces(seed: int) -> None:
    """No others near by, nor those of either side alone, leave less."""
    generator = torch.Generator().manual_seed(seed)
    roots = [torch.randn(32, 32, generator=generator) * torch.logspace(0, -2, 32) for _ in range(2)]
    x, w = (root @ root.T for root in roots)
    found = _directions(x, w, 5)
    torch.testing.assert_close(found.T @ found, torch.eye(5), atol=1e-5, rtol=0)

    def product(directions: Tensor) -> float:
        return float(_left(x, directions) * _left(w, directions))

    best = product(found)
    assert best < min(product(torch.linalg.eigh(form)[1][:, -5:]) for form in (x, w))
    for size in (0.3, 0.03):
        for _ in range(20):
            moved = found + size * torch.randn(32, 5, generator=generator) / 32**0.5
            assert product(torch.linalg.qr(moved)[0]) > best * (1 - 1e-4)


def test_a_minimum_that_both_sides_together_lead_past_is_found() -> None:
    """One direction has 0.3 of both sides, another 0.55 of one side: without the latter, less is left."""
    x = torch.diag(torch.tensor([0.30, 0.55, *[0.15 / 14] * 14]))
    w = torch.diag(torch.tensor([0.30, 0.00, *[0.70 / 14] * 14]))
    for one, other in ((x, w), (w, x)):
        found = _directions(one, other, 1)
        assert float(_left(one, found) * _left(other, found)) == pytest.approx(0.45, rel=1e-3)


class Normed(nn.Module):
    """Two matrices of different directions and sizes read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


def test_the_directions_of_outliers_are_found_and_what_is_left_is_reported() -> None:
    model: Any = seeded(Normed())
    with torch.no_grad():
        model.one.weight.copy_(4 * rand(96, 2, seed=3) @ rand(2, WIDTH, seed=4))
    qmodel = quantize(model, configured(LowRank(rank=FEW)), data())
    (change,) = record_of(qmodel, "LowRank").changes
    (into,) = (t for name, t in stored_tensors(qmodel.graph_module).items() if name.endswith("_into"))
    judged = torch.cat(data()[-1:]).flatten(0, 1)  # the last eighth
    weight = torch.cat([model.one.weight, model.other.weight]).detach()
    rest = torch.eye(WIDTH) - into.T @ into
    expected = (judged @ rest).square().sum() / judged.square().sum()
    expected *= (weight @ rest).square().sum() / weight.square().sum()
    assert left(change) == pytest.approx(float(expected), rel=0.05)  # two digits
    assert left(change) < 0.01


# The graph.


@pytest.mark.parametrize(
    "name",
    all_but(
        ["Llama", "GPT-2", "BLOOM", "ViT", "Swin", "Mixtral", "BERT", "T5 encoder"],
        ["BLOOM", "ViT", "BERT", "T5 encoder"],
    ),
)
def test_the_float_function_is_unchanged(name: str) -> None:
    case = ZOO[name]
    wide = TensorSpec(format=qfx.formats.INT16, granularity=Granularity.CHANNEL)
    config = QuantConfig(weight=wide, input=None, passes=(LowRank(rank=2, overhead=9),), exclude=("op:embedding",))
    model = seeded(case.make())
    qmodel = quantize(model, config, list(case.batches)[:2], verify=True)
    assert record_of(qmodel, "LowRank").rewrites > 0


@on_devices
def test_quantized_models_lose_on_any_device_what_they_lose_on_the_cpu(device: torch.device) -> None:
    model, config = seeded(Mlp()).to(device), configured(LowRank(rank=8), Rotate(streams=False, overhead=9))
    expected, (x,) = lost(seeded(Mlp()), config), data(1, seed=99)
    qmodel = quantize(model, config, [batch.to(device) for batch in data()])
    with torch.no_grad():
        difference, y = qmodel(x.to(device)) - model(x.to(device)), model(x.to(device))
    assert float(difference.square().sum() / y.square().sum()) == pytest.approx(expected, rel=0.1)


def test_quantized_models_lose_less_by_what_the_report_says() -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, 96)))
    behind = (Rotate(streams=False, overhead=9),)
    plain, split = lost(model, configured(*behind)), lost(model, configured(LowRank(rank=FEW), *behind))
    (change,) = record_of(quantize(model, configured(LowRank(rank=FEW)), data()), "LowRank").changes
    assert left(change) < 0.3
    assert split / plain == pytest.approx(left(change), rel=0.4)


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
    plain, split = (quantize(seeded(Mlp()), configured(*p), data()).graph_module for p in ((), (LowRank(rank=8),)))
    assert any(BRANCH in node.meta for node in split.graph.nodes)
    assert [b.operators for b in find_blocks(split, Unit.OPERATOR)] == [
        b.operators for b in find_blocks(plain, Unit.OPERATOR)
    ]


def test_branches_stay_in_float_where_everything_else_has_integers() -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    config = INT8_STATIC.replace(
        passes=(*INT8_STATIC.passes, LowRank(rank=8)), exclude=(), target=TARGETS["executorch"]
    )
    graph = quantize(model, config, data(64)).graph_module.graph
    sums = [n for n in graph.nodes if BRANCH in n.meta and target_name(n) in ("aten.add.Tensor", "aten.sub.Tensor")]
    assert sums
    own = {n.meta[BRANCH] for n in sums}
    assert all(target_name(read) != DEQUANTIZE or read.name in own for n in sums for read in n.all_input_nodes[1:])


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


def test_files_and_modules_compute_the_same(tmp_path: Path) -> None:
    model, (x,) = seeded(Mlp()), data(1, seed=99)
    qmodel = quantize(model, INT8_STATIC.replace(passes=(*INT8_STATIC.passes, LowRank(rank=8))), data(32))
    qmodel.save(tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(qfx.load(tmp_path / "model")(x), qmodel(x))
        # Inductor, which compiles for 15 seconds, is tested in `model/test_compile.py`.
        torch.testing.assert_close(qmodel.compile(backend="aot_eager")(x), qmodel(x), rtol=1e-3, atol=1e-3)
    qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, tmp_path / "model.onnx", [x]).max_steps <= 1
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(x), qmodel(x))
        assert torch.equal(qfx.load(tmp_path / "model").eager(model)(x), qmodel(x))
        torch.testing.assert_close(qmodel.eager(kernels=True)(x), qmodel(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "config",
    [
        IN_FOUR_BITS.replace(input=None, passes=(LowRank(rank=8),)),
        configured(SmoothQuant(rms=True), LowRank(rank=8), Rotate(streams=False), GPTQ()),
        configured(Rotate(streams=False), LowRank(rank=8)),
        configured(LowRank(rank=8, only=("up", "down"))),
    ],
    ids=["weights alone", "rotated rest", "rotated before", "one of two readers"],
)
def test_modules_split_what_they_read(config: QuantConfig) -> None:
    model, (x,) = seeded(Mlp()), data(1, seed=99)
    qmodel = quantize(model, config, data())
    assert any(BRANCH in node.meta for node in qmodel.graph_module.graph.nodes)
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(x), qmodel(x))


@pytest.mark.parametrize("name", all_but(["BERT", "GPT-2", "BLOOM", "Llama", "T5 encoder"], ["BLOOM", "T5 encoder"]))
def test_modules_of_transformers_compute_branches(name: str) -> None:
    case = ZOO[name]
    config = IN_FOUR_BITS.replace(passes=(LowRank(rank=2, overhead=9),), exclude=("op:embedding",))
    batch = next(iter(case.batches))
    qmodel = quantize(seeded(case.make()), config, [batch])
    with torch.no_grad():
        found, expected = (pytree.tree_leaves(run(**batch)) for run in (qmodel.eager(), qmodel))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


class Mixed(nn.Module):
    """A module of two matrices that reads one value."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(rand(32, WIDTH)), nn.Parameter(rand(32, WIDTH, seed=2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(x, self.one), F.linear(x, self.other)], -1)


def test_a_module_that_computes_more_than_the_operator_is_refused_by_name() -> None:
    qmodel = quantize(nn.Sequential(seeded(Mlp()), Mixed()).eval(), configured(LowRank(rank=8)), data())
    with pytest.raises(qfx.QuarkError, match=r"has a float branch, but its module \(1\) also computes something else"):
        qmodel.eager()


class Reshaped(nn.Module):
    """Owns a matrix, reshapes what it reads and what it makes, and has an attribute of any name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.branch = nn.Parameter(rand(96, WIDTH)), True

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.reshape(-1, WIDTH), self.weight).unsqueeze(1)


def test_the_branch_of_a_module_has_the_shape_of_its_result() -> None:
    qmodel, (x,) = quantize(nn.Sequential(Reshaped()).eval(), configured(LowRank(rank=8)), data()), data(1, seed=99)
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(x), qmodel(x))


def test_a_product_that_is_rounded_before_the_branch_is_added() -> None:
    config = INT8_STATIC.replace(target=TARGETS["executorch"], passes=(*INT8_STATIC.passes, LowRank(rank=8)))
    qmodel, (x,) = quantize(seeded(Mlp()), config, data(32)), data(1, seed=99)
    (whole, *_) = (
        n for n in qmodel.graph_module.graph.nodes if BRANCH in n.meta and target_name(n) == "aten.add.Tensor"
    )
    assert target_name(whole.args[0]) == DEQUANTIZE
    qat = qfx.prepare_qat(qmodel)
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(x), qmodel(x))
        assert torch.equal(qat.eager()(x), qat(x))


def test_torch_compile_traces_branches_as_one_graph() -> None:
    qmodel, (x,) = quantize(seeded(Mlp()), configured(LowRank(rank=8)), data()), data(1, seed=99)
    with torch.no_grad():
        compiled = torch.compile(qmodel.eager(), backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), qmodel(x), rtol=1e-5, atol=1e-5)


def test_nothing_is_split_twice() -> None:
    qmodel = quantize(seeded(Mlp()), configured(LowRank(rank=8), LowRank(rank=4, only=("down", "gate"))), data())
    second = {change.name: change.what for change in record_of(qmodel, "LowRank").changes}
    again = "skipped: an earlier LowRank split its input; set a larger rank in that one"
    assert second == {"gate": again, "up": f"skipped: {NOT_SELECTED}", "down": again}


@pytest.mark.parametrize("made", [LowRank(rank=8), Rotate(streams=False, overhead=9)], ids=["branches", "rotations"])
def test_training_leaves_what_passes_multiply_by_as_it_is(made: Any) -> None:
    qat, (x,) = qfx.prepare_qat(quantize(seeded(Mlp()), configured(made), data())), data(1, seed=99)
    module = qat.eager()
    for parameter in qat.parameters():
        parameter.data.mul_(1.01)
    assert torch.equal(module(x), qat(x))
    assert torch.equal(qat.eager()(x), qat(x))
    assert torch.equal(qat.convert().eager()(x), qat(x))


def test_checkpoints_refuse_branches_by_the_layer(tmp_path: Path) -> None:
    case = ZOO["Llama"]
    weight = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=8)
    config = QuantConfig(weight=weight, passes=(LowRank(rank=2, overhead=9),), exclude=("op:embedding", "op:head"))
    qmodel = quantize(seeded(case.make()), config, list(case.batches)[:1])
    with pytest.raises(qfx.ExportError, match=r"cannot store the float branches that LowRank adds to model"):
        qfx.export.huggingface(qmodel, tmp_path)


@pytest.mark.parametrize("export", ["compressed-tensors", "gptq", "gguf"])
def test_what_holds_no_branches_is_said_before_it_begins(export: str) -> None:
    with pytest.raises(qfx.ExportError, match="cannot store the float branches that LowRank adds to layers"):
        qfx.check(seeded(Mlp()), configured(LowRank(rank=8)), data(), export=export)
    qfx.check(seeded(Mlp()), INT8_STATIC.replace(passes=(*INT8_STATIC.passes, LowRank(rank=8))), data(), export="qdq")


def test_where_servers_compute_nothing_beside_a_layer_nothing_is_split() -> None:
    ours = {"onnx", "onnx_vnni", "openvino", "tensorrt", "executorch", "torch", "inductor", "vllm", "sglang", "dpu"}
    without = {name for name, target in TARGETS.items() if not target.placement.branches}
    assert without & ours == {"vllm", "sglang", "dpu"}
    weight = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
    config = QuantConfig(weight=weight, input=None, passes=(LowRank(rank=8),), target=TARGETS["vllm"])
    qmodel = quantize(seeded(Mlp()), config, data())
    why = "target='vllm' does not compute in float next to a layer"
    assert {change.what for change in changes(qmodel).values()} == {f"skipped: {why}"}
    assert record_of(qmodel, "LowRank").remark == why


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


class Scaled(nn.Module):
    """A product that is multiplied by a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.layer.bias, x, self.layer.weight.T, alpha=0.5)


def test_weights_that_are_not_finite_are_refused_and_huge_ones_skipped() -> None:
    model: Any = seeded(Mlp())
    with torch.no_grad():
        model.down.weight[0, 0] = 1e25
    found = changes(quantize(model, configured(LowRank(rank=8)), data()))
    assert found["down"].what == "skipped: its input or weight is infinite or too large to be squared"
    assert found["gate, up"].changed
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    with pytest.raises(qfx.CalibrationError, match=r"down\.weight"):
        quantize(model, configured(LowRank(rank=8)), data())


def test_validation_data_that_is_too_large_is_no_proof() -> None:
    model, batches = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH))), data()
    batches[-1] = batches[-1] * 1e25
    (change,) = record_of(quantize(model, configured(LowRank(rank=4)), batches), "LowRank").changes
    assert change.what == "skipped: its input or weight is infinite or too large to be squared"


def test_the_memory_that_is_said_is_what_forms_and_weights_take() -> None:
    model = seeded(nn.Sequential(nn.Linear(512, 64)))
    x = [rand(64, 512, seed=i) for i in range(4)]
    known = qfx.predict(model, configured(LowRank(rank=8)), x, dynamic_shapes=None)
    (need,) = [need for name, _, need in known.stages if name == "LowRank"]
    assert 3 * 4 * 512**2 <= max(moment.working for moment in need.moments) < 2 * 3 * 4 * 512**2
    assert need.operations >= 512**2 * 256


def test_what_is_not_split_has_a_reason() -> None:
    found = changes(quantize(seeded(Mlp()), configured(LowRank(rank=8, only=("down",))), data()))
    assert found["gate"].what == found["up"].what == f"skipped: {NOT_SELECTED}"
    assert found["down"].changed
    found = changes(quantize(seeded(Mlp()), configured(LowRank(rank=48)), data()))
    assert found["gate, up"].what == (
        "skipped: a branch of rank 48 would cost 125% of the multiplications (overhead=0.5)"
    )
    found = changes(quantize(seeded(Tied()), configured(LowRank(rank=8)), data()))
    assert all("its weight is shared with" in change.what for change in found.values())
    conv = seeded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 64)))
    config = QuantConfig(weight=TensorSpec(format=INT8), input=None, passes=(LowRank(rank=2),))
    found = changes(quantize(conv, config, [rand(16, 3, 6, 6)]))
    assert found["0"].what.startswith("skipped: LowRank splits only products of rows and one matrix")
    assert found["3"].changed
    found = changes(quantize(seeded(Scaled()), configured(LowRank(rank=8)), [x.flatten(0, 1) for x in data()]))
    assert found["layer"].what.startswith("skipped: LowRank splits only products of rows and one matrix")
    casts = QuantConfig(weight=TensorSpec(format=FP16), input=None, passes=(LowRank(rank=8),))
    assert {c.what for c in changes(quantize(seeded(Mlp()), casts, data())).values()} == {
        "skipped: its weight is cast, not quantized"
    }


@pytest.mark.parametrize("rank", [64, 200])
def test_a_rank_of_all_directions_is_skipped(rank: int) -> None:
    found = changes(quantize(seeded(Mlp()), configured(LowRank(rank=rank, overhead=99)), data()))
    assert found["gate, up"].what == f"skipped: rank {rank} is not below its 64 channels; set a smaller rank"


@pytest.mark.parametrize(("rows", "split"), [(64, False), (2048, True)])
def test_calibrated_ranges_need_directions_that_other_data_confirms(rows: int, split: bool) -> None:
    """Ranges come from the data that directions fit best, so other data is clipped."""
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, LowRank(rank=16, overhead=1)))
    batches = list(rand(rows, WIDTH, seed=5).split(rows // 8))
    (change,) = record_of(quantize(model, config, batches), "LowRank").changes
    assert change.changed is split
    assert split or change.what.endswith("of the validation data unexplained; pass more data")
    dynamic = configured(LowRank(rank=16, overhead=1))
    assert record_of(quantize(model, dynamic, batches), "LowRank").changes[0].changed


@pytest.mark.parametrize("early", [SmoothQuant(rms=True), AWQ(), NormalizeColumns(), CrossLayerEqualization()])
def test_what_scales_channels_comes_first(early: Any) -> None:
    with pytest.raises(qfx.ConfigError, match=r"; list \w+ first"):
        quantize(seeded(Mlp()), configured(LowRank(rank=8), early), data())
    assert record_of(quantize(seeded(Mlp()), configured(early, LowRank(rank=8)), data()), "LowRank").rewrites


@pytest.mark.parametrize("size", [0.0, 1e30])
def test_values_without_a_direction_are_left(size: float) -> None:
    model = seeded(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    qmodel = quantize(model, configured(LowRank(rank=4), input=None), [size * x for x in data(4)])
    (change,) = record_of(qmodel, "LowRank").changes
    assert not change.changed
    assert change.what == (
        "skipped: its input or weight is zero"
        if size == 0
        else "skipped: its input or weight is infinite or too large to be squared"
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
