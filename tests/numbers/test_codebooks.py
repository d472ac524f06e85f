"""Tables of numbers and of vectors as formats: what a code stands for, and models that use them."""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path

import onnxruntime
import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import QuantConfig, TensorSpec, ops
from quark_fx.config.quant_config import Granularity
from quark_fx.errors import CalibrationError, ConfigError, ExportError
from quark_fx.numbers.formats import FORMATS, INT4, Codebook, Format, parse_format, register_format
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.observers.histogram import Bins
from quark_fx.observers.squared_error import Moments, squared_error
from quark_fx.passes import GPTQ, AdaRound, AutoRound, FitScales
from quark_fx.plan.weights import quantize_tensor
from quark_fx.solvers.starts import Start
from quark_fx.targets import ONNX, TORCH

TABLE = torch.randint(1, 8, (16, 8), generator=torch.Generator().manual_seed(0)).float() / 4
VECTORS = Codebook("vectors8", tuple(map(tuple, (TABLE - 1).tolist())))
SIGNED = Codebook("signed8", tuple(map(tuple, TABLE.tolist())), signs=True)


@pytest.fixture(autouse=True)
def nf4() -> Codebook:
    """Register the formats for one test: other files run over all that are registered."""
    book: Codebook = importlib.import_module("extensions.normal_float").NF4
    for fmt in (VECTORS, SIGNED, *([] if "nf4" in FORMATS else [book])):
        register_format(fmt)
    return book


def groups(fmt: Format, size: int = 32) -> TensorSpec:
    return TensorSpec(format=fmt, granularity=Granularity.GROUP, group_size=size)


def mlp() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8)))


def batches() -> list[Tensor]:
    mix = rand(64, 64) * torch.logspace(-1, 1, 64)
    return [rand(32, 64) @ mix for _ in range(3)]


@pytest.mark.parametrize("fmt", ["nf4", VECTORS, SIGNED], ids=str)
def test_nan_is_refused_before_a_table_hides_it(fmt: Format) -> None:
    model = mlp()
    with torch.no_grad():
        model.get_parameter("0.weight")[3, 5] = torch.nan
    with pytest.raises(CalibrationError, match=r"not finite|NaN or infinity"):
        quantize(model, QuantConfig(weight=groups(fmt), target=TORCH), batches())
    with pytest.raises(ValueError, match=r"not finite|NaN or infinity"):
        quantize_tensor(model.get_parameter("0.weight"), groups(fmt))


def test_a_number_becomes_the_nearest_in_the_table(nf4: Codebook) -> None:
    levels = torch.tensor(nf4.values)
    x = torch.cat((rand(500) * 3, levels, torch.tensor([torch.inf, -torch.inf])))
    codes = nf4.encode(x.clone())
    assert codes.dtype == torch.uint8
    assert nf4.bits == 4
    nearest = (x.clamp(-1, 1).unsqueeze(1) - levels).abs().amin(1)
    assert torch.equal((nf4.decode(codes) - x.clamp(-1, 1)).abs(), nearest)
    assert torch.equal(nf4.decode(nf4.encode(levels.clone())), levels)
    assert torch.equal(nf4.pattern_values()[nf4.patterns(codes)], nf4.decode(codes))


@pytest.mark.parametrize("name", ["nf4", "vectors8", "signed8"])
def test_what_is_not_finite_becomes_what_its_code_stands_for(name: str) -> None:
    fmt, x = parse_format(name), rand(3, 8)
    x[0, 2], x[1, 1], x[2, 7] = torch.nan, torch.inf, -torch.inf
    wanted = fmt.decode(fmt.encode(x.clone()))
    assert bool(wanted.isfinite().all())
    assert torch.equal(fmt.round_(x.clone()), wanted)


def test_a_table_first_read_while_tracing_or_in_inference_mode_is_read_by_later_calls() -> None:
    class Rounds(nn.Module):
        def __init__(self, *values: float) -> None:
            super().__init__()
            self.book = Codebook(f"table{values}", values)

        def forward(self, x: Tensor) -> Tensor:
            return self.book.round_(x.clone()) * x + self.book.above(x)

    x, model = rand(3, 4), Rounds(-1.0, 0.5, 3.0)
    program = torch.export.export(model, (x,), strict=False)
    other = Rounds(0.0, 0.5)
    with torch._subclasses.FakeTensorMode() as mode:
        assert other(mode.from_tensor(x)).shape == x.shape
    with torch.inference_mode():
        other(x)
    for module in (model, other):
        module(x.requires_grad_()).sum().backward()
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


def test_positions_reach_half_a_step_beyond_either_end() -> None:
    book = Codebook("uneven", (-4.0, -1.0, 0.0, 0.5, 0.75))
    grid = Grid(torch.ones(1), torch.zeros(1), book.limits, format=book)
    x = torch.tensor([-9.0, -5.0, 0.2, 0.8, 2.0], requires_grad=True)
    reached = grid.within_reach(x)
    torch.testing.assert_close(reached.detach(), torch.tensor([-5.5, -5.0, 0.2, 0.8, 0.875]))
    register_format(book)
    value = ops.fake_quantize(x, torch.ones(()), torch.zeros((), dtype=torch.int32), "uneven")
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (value, reached)))


def test_a_range_is_judged_by_the_numbers_in_a_table_of_vectors_not_by_its_codes() -> None:
    edges = torch.linspace(-3, 3, 257, dtype=torch.float64)[None]
    moments = Moments.of(Bins(edges, rand(1, 256).abs().double()))
    numbers = Codebook("numbers", tuple(SIGNED.levels().tolist()))
    qparams = QParams(torch.tensor([[0.5, 1.0, 2.0]]), torch.zeros(1, 3))
    found, wanted = (squared_error(moments, qparams, Scheme(format=fmt)) for fmt in (SIGNED, numbers))
    assert torch.equal(found, wanted)


def test_neighbors_are_those_of_the_table_and_one_gap_beyond_its_ends(nf4: Codebook) -> None:
    levels = torch.tensor(nf4.values)
    above, below = nf4.above(levels), nf4.below(levels)
    assert torch.equal(above[:-1], levels[1:])
    assert torch.equal(below[1:], levels[:-1])
    torch.testing.assert_close(above[-1], 2 * levels[-1] - levels[-2], rtol=1e-6, atol=0)
    torch.testing.assert_close(below[0], 2 * levels[0] - levels[1], rtol=1e-6, atol=0)
    between = (levels[1:] + levels[:-1]) / 2
    torch.testing.assert_close(nf4.step(between), levels.diff(), rtol=0, atol=0)


@pytest.mark.parametrize("fmt", [VECTORS, SIGNED], ids=str)
def test_vectors_become_the_nearest_of_all_codes(fmt: Codebook) -> None:
    x = rand(6, 24) * 2
    codes = fmt.encode(x.clone())
    assert codes.shape == (6, 3)
    assert fmt.bits == (4 + 7 if fmt.signs else 4)
    rows = fmt.pattern_values()
    assert len(rows) == 1 << fmt.bits
    if fmt.signs:  # all magnitudes with each even number of minus signs
        signs = [s for s in itertools.product((1.0, -1.0), repeat=8) if s.count(-1.0) % 2 == 0]
        wanted = (TABLE[:, None] * torch.tensor(signs)).flatten(0, 1)
        assert torch.equal(rows.unique(dim=0), wanted.unique(dim=0))
    least = (x.view(-1, 1, 8) - rows).square().sum(-1).amin(1)
    values = fmt.decode(codes)
    assert torch.equal(values.view(-1, 8), rows[fmt.patterns(codes).flatten()])
    torch.testing.assert_close((x - values).view(-1, 8).square().sum(-1), least, rtol=1e-5, atol=1e-5)
    assert torch.equal(fmt.encode(values.clone()), codes)


@pytest.mark.parametrize("name", ["nf4", "vectors8", "signed8"])
def test_operators_round_to_a_table(name: str) -> None:
    fmt, x = parse_format(name), rand(5, 64).requires_grad_()
    scale, zero = (rand(5, 2).abs() + 0.5).requires_grad_(), torch.zeros((), dtype=torch.int32)
    steps = x.detach() / scale.detach().repeat_interleave(32, 1)
    wanted = fmt.decode(fmt.encode(steps)) * scale.detach().repeat_interleave(32, 1)
    codes = ops.quantize(x.detach(), scale.detach(), zero, name, 1, 32)
    value = ops.fake_quantize(x, scale, zero, name, 1, 32)
    assert torch.equal(value, wanted)
    assert torch.equal(ops.dequantize(codes, scale.detach(), zero, name, 1, 32), wanted)
    value.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.any())
    assert scale.grad is not None
    assert bool(scale.grad.isfinite().all())
    with torch._subclasses.FakeTensorMode():
        empty = torch.empty(5, 2)
        assert ops.quantize(torch.empty(5, 64), empty, empty, name, 1, 32).shape == codes.shape
        assert ops.dequantize(torch.empty(codes.shape), empty, empty, name, 1, 32).shape == x.shape


@pytest.mark.parametrize(
    "p",
    [None, GPTQ(), FitScales(), AutoRound(iterations=20, start=Start.CODES), AdaRound(iterations=10)],
    ids=lambda p: type(p).__name__,
)
def test_weights_in_nf4_are_learned_and_stay_in_the_table(nf4: Codebook, p: object) -> None:
    model, data = mlp(), batches()
    qmodel = quantize(model, QuantConfig(weight=groups(nf4), passes=() if p is None else (p,), target=TORCH), data)  # type: ignore[arg-type]
    assert bool((qmodel(data[0]) - model(data[0])).norm() < 0.15 * model(data[0]).norm())
    if p is not None:
        assert any(change.changed for row in qmodel.report().passes for change in row.changes)


def test_a_model_in_vectors_is_saved_and_loaded(tmp_path: Path) -> None:
    model, data = mlp(), batches()
    config = QuantConfig(weight=groups(SIGNED), target=TORCH)
    qmodel = quantize(model, config.replace(passes=(GPTQ(),)), data)
    notes = [change.what for row in qmodel.report().passes for change in row.changes]
    assert notes
    assert all("8 values in each code" in note for note in notes)
    with pytest.raises(ExportError, match="without an ONNX type"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    qmodel.save(tmp_path / "model")
    again = qfx.load(tmp_path / "model")
    assert torch.equal(again(data[0]), qmodel(data[0]))
    weight = quantize_tensor(model[0].weight.detach(), config.weight)  # type: ignore[index, arg-type]
    assert weight.codes.shape == (96, 8)
    assert torch.equal(weight[slice(8, 24)].dequantize(), weight.dequantize()[8:24])


def test_onnx_files_hold_tables_of_up_to_8_bits(nf4: Codebook, tmp_path: Path) -> None:
    model, data = mlp(), batches()
    sizes = ((2, 1), (5, 3), (20, 5), (200, 8), (257, 9))
    books = [Codebook(f"table{bits}", tuple(torch.linspace(-1, 1, count).tolist())) for count, bits in sizes]
    for book in (nf4, *map(register_format, books)):
        if book.bits > 8:
            with pytest.raises(ConfigError, match="no ONNX type"):
                QuantConfig(weight=groups(book), target=ONNX)
            continue
        qmodel = quantize(model, QuantConfig(weight=groups(book), target=ONNX), data)
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
        (name,) = (i.name for i in session.get_inputs())
        result = torch.from_numpy(session.run(None, {name: data[0].numpy()})[0])
        torch.testing.assert_close(result, qmodel(data[0]), rtol=1e-4, atol=1e-4)


def test_tables_that_are_none_are_refused() -> None:
    for values, signs, message in (
        ((1.0,), False, "two or more"),
        ((0.0, torch.inf), False, "finite"),
        ((1.0, 0.0), False, "must increase"),
        (((1.0, -1.0), (0.0, 1.0)), True, "magnitudes"),
        ((0.0, 1.0), True, "vectors"),
    ):
        with pytest.raises(ConfigError, match=message):
            Codebook("wrong", values, signs)
    with pytest.raises(ConfigError, match=r"not registered: call quark_fx\.formats\.register_format"):
        TensorSpec(format=Codebook("unknown", (-1.0, 1.0)))
    with pytest.raises(ConfigError, match="already uses that name"):
        FORMATS.add(Codebook("int4", (-1.0, 1.0)), "int4")
    with pytest.raises(ConfigError, match="multiple of 8"):
        groups(VECTORS, 12)
    with pytest.raises(ConfigError, match="no ONNX type"):
        QuantConfig(weight=groups(VECTORS), target=ONNX)
    assert parse_format("int4") == INT4
    with pytest.raises(ValueError, match="has 8 values"):
        VECTORS.codes_shape((3, 12))
