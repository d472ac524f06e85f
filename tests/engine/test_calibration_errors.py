"""Calibration data that cannot be used is refused with the batch, the value and the remedy."""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from devices import on_devices
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quark_fx as qfx
from quark_fx.errors import CalibrationError
from quark_fx.numbers.qparams import Scheme
from quark_fx.observers import MinMax, Percentile, observer
from quark_fx.passes import AdaRound, BiasCorrection, SmoothQuant
from quark_fx.presets import INT8_STATIC, INT8_WEIGHT_ONLY, PRESETS
from quark_fx.system import accelerator

STATIC = [n for n, c in PRESETS.items() if c.input is not None and not c.input.dynamic and not c.input.is_cast]


def model() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)))


@on_devices
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("index", [0, 2])
def test_a_value_that_is_not_finite_names_its_batch(bad: float, index: int, device: torch.device) -> None:
    data = [rand(5, 4, seed=i).to(device) for i in range(3)]
    data[index][3, 1] = bad
    with pytest.raises(
        qfx.CalibrationError, match=f"calibration batch {index}: input .* or infinity in sample 3; remove"
    ):
        quantize(model().to(device), "int8_static", data)


def test_a_sample_of_a_part_is_named_as_in_its_batch() -> None:
    """One batch is divided into parts to learn from and to validate with."""
    data = [rand(16, 4)]
    data[0][14, 1] = torch.inf
    config = INT8_STATIC.replace(passes=(AdaRound(iterations=2),))
    with pytest.raises(qfx.CalibrationError, match=r"calibration batch 0: input .* or infinity in sample 14; remove"):
        quantize(model(), config, data)


@pytest.mark.parametrize("preset", STATIC)
def test_a_value_that_becomes_infinite_inside_names_its_operator(preset: str) -> None:
    net = model()
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(1e30)
    with pytest.raises(qfx.CalibrationError, match=r"cannot be quantized: .*not finite") as caught:
        quantize(net, preset, [rand(5, 4) * 1e30])
    assert "aten." in str(caught.value)


@pytest.mark.parametrize("data", [[], (), iter([]), DataLoader(TensorDataset(torch.empty(0, 4)))], ids=type)
def test_no_batch_at_all_is_refused(data: Any) -> None:
    with pytest.raises(qfx.CalibrationError, match="missing or empty; pass batches of real inputs"):
        quantize(model(), "int8_static", data)


def test_a_dataset_that_can_only_be_indexed_is_read() -> None:
    data: Any = TensorDataset(rand(3, 2, 4))
    assert not hasattr(data, "__iter__")
    quantize(model(), "int8_static", data)


@pytest.mark.parametrize("part", ["input", "weight"])
def test_an_observer_that_turns_its_range_around_is_named_with_the_operator(part: str) -> None:
    @dataclass(frozen=True)
    class Reversed(MinMax):
        def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
            low, high = super().range(scheme)
            return high, low

    spec = getattr(INT8_STATIC, part).replace(observer=Reversed())
    with pytest.raises(
        qfx.CalibrationError,
        match=r"cannot be quantized: the range ends below .* \(observer Reversed\); fix the observer,",
    ):
        quantize(cnn(), INT8_STATIC.replace(**{part: spec}), images())


def test_a_value_that_is_not_finite_is_named_before_what_an_observer_made_of_it() -> None:
    @dataclass(frozen=True)
    class Whole(MinMax):
        def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
            low, high = super().range(scheme)
            return low, torch.full_like(high, math.ceil(high))

    assert INT8_STATIC.weight is not None
    with pytest.raises(ValueError, match="observed values are not finite: those for scale 0 of 1"):
        Whole().observe(torch.tensor([[1.0, math.nan]])).qparams(INT8_STATIC.weight.scheme)


def test_no_data_is_refused() -> None:
    with pytest.raises(qfx.CalibrationError, match="missing or empty"):
        quantize(model(), "int8_static", None)


def test_an_exported_program_with_ranges_to_find_needs_data_too() -> None:
    program = torch.export.export(model(), (rand(5, 4),))
    with pytest.raises(qfx.CalibrationError, match="contains no batch"):
        qfx.quantize(program, "int8_static", None, progress=False)


def test_an_empty_batch_is_refused_wherever_it_comes() -> None:
    with pytest.raises(qfx.QuarkError, match=r"is empty, shape \(0, 4\)"):
        quantize(model(), "int8_static", [torch.empty(0, 4)])
    with pytest.raises(qfx.CalibrationError, match=r"calibration batch 1: .* is empty, shape \(0, 4\)"):
        quantize(model(), "int8_static", [rand(5, 4), torch.empty(0, 4)])


@pytest.mark.parametrize("data", [rand(5, 4), {"x": rand(5, 4)}, "text", 3], ids=["tensor", "dict", "str", "int"])
def test_one_batch_in_place_of_many_is_refused_with_the_remedy(data: Any) -> None:
    with pytest.raises(
        qfx.CalibrationError, match=f"not a single {type(data).__name__}; wrap a single batch in a list"
    ):
        quantize(model(), "int8_static", data)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rand(5, 7), r"shape \(5, 7\); the graph was captured for \(any, 4\)"),
        (rand(4), r"shape \(4,\)"),
        (rand(5, 4).double(), "dtype torch.float64"),
        ((rand(5, 4), torch.zeros(5)), "input"),
        ({"pixels": rand(5, 4)}, "lacks .* adds pixels|lacks .*pixels|adds pixels"),
        ({}, "lacks input"),
        ("text", "is a str"),
    ],
    ids=["size", "rank", "dtype", "pair", "names", "nothing", "type"],
)
def test_a_batch_that_does_not_fit_is_named_with_the_reason(wrong: Any, message: str) -> None:
    with pytest.raises(qfx.CalibrationError, match=message) as caught:
        quantize(model(), "int8_static", [rand(5, 4), rand(5, 4), wrong])
    assert "batch 2" in str(caught.value)


def test_a_generator_is_read_once_and_gives_what_a_list_gives() -> None:
    seen = []

    def batches() -> Iterator[Tensor]:
        for i, x in enumerate(images(4, 2, 5)):
            seen.append(i)
            yield x

    x = images(3)[0]
    got = quantize(cnn(), "int8_static", batches())(x)
    assert seen == [0, 1, 2]
    torch.testing.assert_close(got, quantize(cnn(), "int8_static", images(4, 2, 5))(x), rtol=0, atol=0)


def test_a_loader_is_data() -> None:
    loader = DataLoader(TensorDataset(rand(10, 4)), batch_size=4)  # yields lists of one tensor
    x = rand(3, 4)
    expected = quantize(model(), "int8_static", [rand(10, 4)])(x)
    torch.testing.assert_close(quantize(model(), "int8_static", loader)(x), expected, rtol=0, atol=0)


def test_every_batch_counts_and_their_order_does_not() -> None:
    data = [rand(5, 4), rand(5, 4, seed=2) * 10, rand(5, 4, seed=3)]
    a, b = (quantize(model(), "int8_static", d) for d in (data, [data[2], data[0], data[1]]))
    torch.testing.assert_close(a(data[1]), b(data[1]), rtol=0, atol=0)
    few = quantize(model(), "int8_static", data[:1])
    with torch.no_grad():
        expected = model()(data[1])
    assert (a(data[1]) - expected).abs().max() < 0.1 * (few(data[1]) - expected).abs().max()


def test_a_failed_calibration_leaves_the_model_as_it_was() -> None:
    net = model()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(qfx.CalibrationError):
        quantize(net, "int8_static", [rand(5, 4), torch.full((5, 4), torch.nan)])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    quantize(net, "int8_static", [rand(5, 4)])


@pytest.mark.parametrize("preset", ["int8_dynamic", "int8_weight_only"])
def test_a_preset_without_static_ranges_reads_one_batch(preset: str) -> None:
    data = iter([rand(5, 4), rand(5, 4)])
    quantize(model(), preset, data)
    assert len(list(data)) == 1


def test_observers_are_gone_from_the_result() -> None:
    qmodel = quantize(model(), INT8_STATIC, [rand(5, 4)])
    assert not [n for n, m in qmodel.graph_module.named_modules() if type(m).__name__ == "_Watch"]
    assert not [n for n in qmodel.graph_module.graph.nodes if n.op == "call_module"]


@pytest.mark.parametrize("learner", [SmoothQuant(), AdaRound(iterations=1), BiasCorrection()], ids=str)
def test_nan_is_named_where_passes_learn(learner: Any) -> None:
    data = [rand(5, 4, seed=i) for i in range(3)]
    data[1][2, 3] = torch.nan
    with pytest.raises(qfx.CalibrationError, match="calibration batch 1: input input holds NaN in sample 2; remove"):
        quantize(model(), INT8_STATIC.replace(passes=(learner,)), data)


def test_infinities_in_a_mask_are_learned_through() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            out: Tensor = self.down(torch.softmax(self.up(x) + mask, -1))
            return out

    mask = torch.zeros(5, 4)
    mask[:, 3] = -torch.inf
    config = INT8_STATIC.replace(passes=(BiasCorrection(),), exclude=("op:add",))
    qmodel = quantize(seeded(Masked()), config, [(rand(5, 4, seed=i), mask) for i in range(3)])
    assert qmodel.report().totals["quantized"] == 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("net", [model(), cnn()], ids=["linear", "conv"])
def test_batches_of_another_precision_are_refused_with_both(dtype: torch.dtype, net: nn.Module) -> None:
    """The capture itself would take them."""
    x = rand(5, 4) if len(list(net.children())) == 3 and isinstance(net, nn.Sequential) else images()[0]
    with pytest.raises(qfx.QuarkError, match=rf"input \[0\] is {dtype}, the model torch.float32.*convert the batch"):
        quantize(net, "int8_static", [x.to(dtype)])


def test_a_model_that_converts_its_input_takes_another_precision() -> None:
    class Converts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x.float())
            return out

    assert quantize(seeded(Converts()), "int8_static", [rand(5, 4).double()]).report().totals["quantized"] == 1


@pytest.mark.parametrize("preset", ["int8_static", "w4a16_gptq"])
@pytest.mark.parametrize("index", [-100, 11])
def test_an_index_that_no_table_has_is_named(index: int, preset: str) -> None:
    bad = tokens(4)[0].clone()
    bad[1, 2] = index
    low, high = min(index, int(bad.min())), max(index, int(bad.max()))
    with pytest.raises(
        qfx.CalibrationError,
        match=f"1: input ids contains indices from {low} to {high}, but selects from a table of 11 rows",
    ):
        quantize(mlp(), preset, [tokens(4)[0], bad])


class Positions(nn.Module):
    """Tokens that reach their table by way of a cast, a view and transpositions, and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(11, 8), nn.Parameter(torch.ones(6, 8))
        self.linear = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        y: Tensor = self.linear(self.tokens(ids.mT.long().view(ids.shape[1], -1).t()) + self.places[places])
        return y


@pytest.mark.parametrize("preset", ["int8_static", "w4a16_gptq", "w4a16_awq"])
def test_an_index_that_is_found_out_on_the_way_names_its_batch(preset: str) -> None:
    model = seeded(Positions())
    with pytest.raises(
        qfx.CalibrationError, match=r"calibration batch 1: input ids contains indices from . to 11, but selects"
    ):
        quantize(model, preset, [batch.int() for batch in (tokens(4)[0], tokens(4)[0] + 1)])
    long = torch.zeros(4, 9, dtype=torch.int64)
    with pytest.raises(
        qfx.CalibrationError, match="calibration batch 1 contains an index outside of an embedding table"
    ):
        quantize(model, preset, [tokens(4)[0], long], dynamic_shapes=({1: torch.export.Dim.DYNAMIC},))


CASTS = {
    "of integers that wrap": lambda ids: ids.to(torch.uint8).long(),
    "to booleans": lambda ids: ids.bool().long(),
    "of floats that round": lambda ids: (ids / 4).long(),
}


@pytest.mark.parametrize("how", CASTS)
def test_casts_that_change_indices_are_followed_by_no_check_of_inputs(how: str) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(6, 8), nn.Linear(8, 8)

        def forward(self, ids: Tensor) -> Tensor:
            y: Tensor = self.linear(self.table(CASTS[how](ids)))
            return y

    ids = torch.tensor([[0, 1, 5], [1, 2, 3]])
    ids = ids + 256 if how == "of integers that wrap" else ids.float() * 4 if how == "of floats that round" else 9 * ids
    assert quantize(seeded(Cast()), "int8_static", [ids]).report().totals["quantized"]


class Table(nn.Module):
    """A table that is indexed, not embedded, before the first weighted operator."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Parameter(torch.ones(11, 8)), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.linear(self.table[ids])
        return y


@pytest.mark.parametrize("preset", ["int8_static", "w4a16_gptq", "w4a16_awq"])
def test_an_index_beyond_a_table_in_front_names_its_batch(preset: str) -> None:
    with pytest.raises(
        qfx.CalibrationError, match="calibration batch 1 contains an index outside of an embedding table"
    ):
        quantize(seeded(Table()), preset, [tokens(4)[0], tokens(4)[0] + 11])
    whole = tokens(4)[0]
    whole[-1] += 11  # in the part of the batch that is held out for validation
    with pytest.raises(qfx.CalibrationError, match="calibration batch 0 contains an index outside of"):
        quantize(seeded(Table()), preset, [whole])


@pytest.mark.parametrize("preset", ["int8_static", "w4a16_gptq"])
def test_an_empty_batch_is_named_before_anything_is_learned(preset: str) -> None:
    with pytest.raises(qfx.CalibrationError, match=r"batch 1: input ids is empty, shape \(0, 5\); omit this batch"):
        quantize(mlp(), preset, [tokens(4)[0], tokens(4)[0][:0]])


def test_a_mask_that_leaves_out_everything_is_refused() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            y: Tensor = self.inner(ids) * attention_mask[..., None]
            return y

    data = [{"ids": ids, "attention_mask": torch.zeros_like(ids)} for ids in tokens(4, 4)]
    with pytest.raises(qfx.CalibrationError, match="attention_mask masks every position of all calibration data"):
        quantize(Masked().eval(), "w4a16_gptq", data)
    data[1]["attention_mask"][0] = 1
    quantize(Masked().eval(), "w4a16_gptq", data)


def test_ranks_that_saw_ranges_which_do_not_go_together_are_told_where() -> None:
    gm = qfx.capture_graph(mlp(), tokens(4)[0]).module
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    observer = Percentile(grid="onnxruntime", bins=32)
    first = torch.tensor([[-1.0, 0.4, 1.0]])
    with pytest.raises(
        qfx.CalibrationError,
        match=r"aten\.embedding\.default at .*the observations of the ranks cannot.*first batches differed",
    ):
        import_module("quark_fx.passes.calibrate")._merge(
            [node], [observer.observe(first)], [observer.observe(2 * first)]
        )


def test_checked_batches_are_not_held_and_a_reused_buffer_is_named_right() -> None:
    """Checks of all batches are read together, after the loader has filled its buffer again."""
    buffer, alive = torch.empty(4, 8), list[weakref.ref[Tensor]]()

    def refilled() -> Iterator[Tensor]:
        for index in range(4):
            buffer.normal_()
            buffer[2, 3] = float("nan") if index == 1 else 0.0
            yield buffer

    def fresh() -> Iterator[Tensor]:
        for _ in range(12):
            batch = torch.randn(4, 8)
            alive.append(weakref.ref(batch))
            most.append(sum(one() is not None for one in alive))
            yield batch
            del batch

    model, most = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval(), list[int]()
    with pytest.raises(qfx.CalibrationError, match="calibration batch 1: input input holds NaN in sample 2"):
        quantize(model, "w4a16_gptq", refilled())
    quantize(model, "w4a16_gptq", fresh())
    assert max(most) <= 4


@dataclass(frozen=True)
class Fails(MinMax):
    """Observer with a fault of its code."""

    where: str = ""

    def observe(self, x: Tensor) -> Any:
        if self.where == "observe":
            raise KeyError("gain")
        return None if self.where == "nothing" else super().observe(x)

    def range(self, scheme: Scheme) -> tuple[Tensor, Tensor]:
        if self.where == "range":
            raise RuntimeError("no gain")
        low, high = super().range(scheme)
        return (low.repeat(2), high.repeat(2)) if self.where == "shape" else (low, high)


@pytest.mark.parametrize("part", ["input", "weight"])
@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("observe", "observer Fails raised KeyError: 'gain'"),
        ("range", "observer Fails raised RuntimeError: no gain"),
        ("nothing", "observe of Fails returned NoneType instead of an observer"),
        ("shape", "range of Fails has shape"),
    ],
)
def test_an_observer_that_fails_is_named_with_the_value_it_watched(part: str, where: str, words: str) -> None:
    spec = replace(getattr(INT8_STATIC, part), observer=observer(Fails)(where=where))
    place = {"input": "input input", "weight": "weight '0.weight' of aten.linear.default at .*module 0"}[part]
    words = re.escape(words)
    if where == "shape":
        words += {"input": r" \(2,\) instead of \(1,\)", "weight": r" \(8,\) instead of \(4,\)"}[part]
    remedy = "; fix the observer, choose another one, or exclude the operator(\n|$)"
    with pytest.raises(CalibrationError, match=f"{place}.* cannot be quantized: {words}{remedy}"):
        quantize(seeded(nn.Sequential(nn.Linear(8, 4))), INT8_STATIC.replace(**{part: spec}), [rand(4, 8)])


def test_a_deferred_check_comes_before_an_error_of_a_later_step() -> None:
    def first_and_later(fine: bool) -> None:
        with accelerator.checked_later():
            accelerator.require(torch.tensor(fine), lambda: ValueError("first"))
            raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        first_and_later(fine=True)
    with pytest.raises(ValueError, match="first"):
        first_and_later(fine=False)


def test_a_weight_that_is_not_finite_is_named_though_a_later_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: Any) -> Tensor:
        raise ValueError("a later step")

    monkeypatch.setattr("quark_fx.plan.weights.encode", encode)
    model = seeded(nn.Sequential(nn.Linear(8, 4)))
    with pytest.raises(CalibrationError, match=r"'0\.weight' .*: a later step; exclude the operator"):
        quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)])
    with torch.no_grad():
        model.get_parameter("0.weight")[0, 0] = math.nan
    with pytest.raises(CalibrationError, match=r"'0\.weight' .*not finite.*; fix the model's weights"):
        quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)])
