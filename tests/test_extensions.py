"""What one file outside of the package adds: found by name, judged, reported, predicted, resumed, run by ranks."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import extensions.fold_constant_scales
import onnx_ir as ir
import pytest
import torch
from extensions.clip_activations import ClipActivations
from extensions.deviation_scales import DeviationScales
from extensions.fixed_span import Counts, Span
from extensions.fold_constant_scales import fold_constant_scales
from extensions.learned_clipping import LearnedClipping
from extensions.qronos import Qronos
from extensions.quick_gelu import fuse_quick_gelu
from extensions.refit_scales import RefitScales
from extensions.shift_channels import ShiftChannels, Shifted
from extensions.tensorrt_like import TENSORRT_LIKE
from extensions.unpacked_weights import DOMAIN, UNPACK
from test_gptq import RTN, Attention, errors, ids, relative_error
from test_resume import Branches
from tiny import calls, cnn, constant, images, quantize, rand, record_of, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.config.target import TARGETS
from quark_fx.engine.blocks import Unit
from quark_fx.errors import CalibrationError, ConfigError, Declined, ExportError, PassError
from quark_fx.export.to_onnx.edit import array_of
from quark_fx.export.to_onnx.formats import FORMATS
from quark_fx.export.to_onnx.rules import onnx_rule
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import Change, Stage, pass_stage, run_passes
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, UINT4, UINT8, Format
from quark_fx.numbers.grid import Grid
from quark_fx.numbers.qparams import QParams, Scheme, Symmetry
from quark_fx.observers import MinMax, Percentile
from quark_fx.passes import GPTQ
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8
from quark_fx.solvers.gradient_solver import GradientSolver
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.sampled_scaling import SampledScaling, SampleStatistics
from quark_fx.solvers.scaling import ScalingSolver, scaling_solver
from quark_fx.solvers.solver import Activation, Bias, Input, InputHessian, OutputError, Proposal, Skip, Solver, solver
from quark_fx.system.names import Stored
from quark_fx.targets import OnnxFiles, Placement, Refusal, Target, register_target

EXTENSIONS = sorted((Path(__file__).parent / "extensions").glob("[!_]*.py"))

FOUR_BITS = INT8_STATIC.replace(input=TensorSpec(format=UINT4), output=TensorSpec(format=UINT4))
"""Activations of so few bits that where they are clipped matters."""


def learned(model: nn.Module, config: QuantConfig, data: list[Tensor], *passes: Any) -> qfx.QuantizedModel:
    return quantize(model, config.replace(passes=(*config.passes, *passes)), data)


def changes(qmodel: qfx.QuantizedModel) -> list[Change]:
    return list(qmodel.report().passes[-1].changes)


def refused_error(what: str, data: str) -> float:
    """Return the error that a report names for a proposal that is no better on some data."""
    told = re.fullmatch(rf"skipped: no better on {data} \((.*)\)", what)
    assert told is not None, what
    return float(told[1])


def same(one: qfx.QuantizedModel, other: qfx.QuantizedModel) -> bool:
    tensors, others = (stored_tensors(q.graph_module) for q in (one, other))
    return all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize("file", EXTENSIONS, ids=lambda file: file.stem)
def test_an_extension_is_one_short_file(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "p",
    [RefitScales(damping=0.1), ClipActivations(steps=8), Qronos(alpha=1e-3)],
    ids=lambda p: type(p).__name__,
)
def test_a_solver_is_found_by_name_and_its_needs_are_predicted(p: Solver) -> None:
    config = QuantConfig.from_dict(FOUR_BITS.replace(passes=(p,)).to_dict())
    assert config.passes == (p,)
    found = qfx.predict(seeded(Attention()), config, ids(16, 16))
    assert type(p).__name__ in [name for name, _, _ in found.stages]
    assert not found.unknown


# Weights.


def test_refitted_scales_lower_the_error_on_unseen_data() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16, 16, 16)
    plain, refitted = (learned(model, RTN, data[:4], *passes) for passes in ((), (RefitScales(),)))
    assert relative_error(refitted, model, data[4:]) < 0.9 * relative_error(plain, model, data[4:])
    found = errors(refitted)
    assert list(found) == ["into", "back", "gate", "lift", "down", "words"]
    assert all(after <= before for before, after in found.values())
    assert any(change.what == "scales" for change in changes(refitted))
    assert refitted.report().passes[-1].validated


def test_it_keeps_the_codes_of_gptq() -> None:
    model, data = seeded(Attention()), ids(16, 16)
    one, both = (learned(model, RTN, data, *passes) for passes in ((GPTQ(),), (GPTQ(), RefitScales())))
    tensors, others = one.graph_module.state_dict(), both.graph_module.state_dict()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_codes"))
    assert not all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_scale"))


def shrunk(weight: QuantizedMatrix, ratio: float) -> QuantizedMatrix:
    assert weight.columns is not None
    return weight.with_scales(torch.full((*weight.real.shape[:2], weight.columns.count), ratio))


@solver
@dataclass(frozen=True, kw_only=True)
class Spoil(Solver):
    """Halve every scale, which saturates every large weight."""

    def solve(self, now: QuantizedMatrix, seen: Hessian) -> Proposal:
        return Proposal(shrunk(now, 0.5))


@solver
@dataclass(frozen=True, kw_only=True)
class ShrinkBy(Solver):
    """Shrink every scale and round anew, by what an observer saw, which says nothing of the operator's error."""

    ratio: float

    @property
    def reads(self) -> Input:
        return Input(MinMax())

    def solve(self, now: QuantizedMatrix, seen: MinMax) -> Proposal:
        assert seen.high is not None
        return Proposal(shrunk(now, self.ratio).nearest(), f"up to {float(seen.high):.3g}")


@pytest.mark.parametrize("weight_format", [INT4, FP8_E4M3], ids=str)
def test_codes_between_and_beyond_those_of_the_format_are_rounded(weight_format: Format) -> None:
    same = []

    @solver
    @dataclass(frozen=True, kw_only=True)
    class Unrounded(Solver):
        def solve(self, now: QuantizedMatrix, seen: Hessian) -> Proposal:
            half = shrunk(now, 0.5)
            positions = half.grid().position(half.real.float())
            proposed = half.with_codes(positions)
            same.append(
                torch.equal(proposed.codes.float(), half.nearest().codes.float())
                and not torch.equal(positions, half.codes.float())
            )
            return Proposal(proposed)

    spec = TensorSpec(format=weight_format, granularity=qfx.Granularity.GROUP, group_size=16)
    learned(seeded(Attention()), QuantConfig(weight=spec, target=TARGETS["torch"]), ids(16, 16, 16), Unrounded())
    assert same
    assert all(same)


def test_weights_that_are_learned_from_something_else_are_judged_by_what_the_block_makes() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16)
    plain = learned(model, RTN, data)
    better = learned(model, RTN, data, ShrinkBy(ratio=0.95))
    found = {change.name: change for change in changes(better) if change.before is not None}
    assert list(found) == ["into", "back", "gate", "lift", "down", "words"]
    accepted = [change for change in found.values() if change.changed]
    assert accepted
    assert all("scales and " in change.what and "of the codes; up to " in change.what for change in accepted)
    assert all(change.after < change.before for change in accepted)  # type: ignore[operator]
    # What operators that read one value saw is measured once.
    assert found["gate"].what.split("up to")[-1:] == found["lift"].what.split("up to")[-1:] or not (
        found["gate"].changed and found["lift"].changed
    )
    assert same(plain, learned(model, RTN, data, ShrinkBy(ratio=0.3)))


# Activations.


@pytest.mark.parametrize(
    ("make", "data"),
    [
        (lambda: seeded(Attention()), ids(16, 16, 16, 16, 16)),
        (cnn, [x**3 for x in images(8, 8, 8, 8, 8, 8)]),
    ],
    ids=["attention", "cnn"],
)
def test_clipped_activations_lower_the_error_on_unseen_data(make: Callable[[], nn.Module], data: list[Tensor]) -> None:
    """Measured: to 0.45 and 0.13 of what it was."""
    model = make()
    plain, clipped = (learned(model, FOUR_BITS, data[:-1], *passes) for passes in ((), (ClipActivations(),)))
    assert relative_error(clipped, model, data[-1:]) < 0.6 * relative_error(plain, model, data[-1:])
    before, after = (stored_tensors(q.graph_module) for q in (plain, clipped))
    assert list(before) == list(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    ends = ("_quantizer_scale", "_quantizer_zero_point", "bias_codes", "bias_scale")
    assert all(name.endswith(ends) for name in changed)
    record = clipped.report().passes[-1]
    assert record.validated
    assert record.rewrites == sum(change.changed for change in record.changes) > 1
    for change in record.changes:
        assert change.what.startswith("scale" if change.changed else "skipped: no better on validation data")
        assert (change.after < change.before) == change.changed  # type: ignore[operator]


def biases_lie_on_their_grids(qmodel: qfx.QuantizedModel) -> int:
    """Hold the scale of every int32 bias to that of its operator's input times that of its weight; count them."""
    found = 0
    for node in calls(qmodel, "aten."):
        activation, weight, bias = (node.args[i] if len(node.args) > 2 else None for i in range(3))
        if all(getattr(arg, "op", "") == "call_function" for arg in (activation, weight, bias)):
            scales = [constant(qmodel, arg.args[1]) for arg in (activation, weight, bias)]  # type: ignore[union-attr]
            assert torch.equal(scales[0] * scales[1].flatten(), scales[2])
            found += 1
    return found


def test_int32_biases_follow_the_scales_of_activations_in_later_blocks_too() -> None:
    """Where the value is made is not where it is read last: `d` reads it after `b` and `c`."""
    data = [rand(32, 8, seed=i) for i in range(4)]
    plain, clipped = (learned(seeded(Branches()), FOUR_BITS, data, *p) for p in ((), (ClipActivations(),)))
    assert biases_lie_on_their_grids(plain) == biases_lie_on_their_grids(clipped) == 4
    name = "tanh_quantizer_scale"
    assert not torch.equal(stored_tensors(plain.graph_module)[name], stored_tensors(clipped.graph_module)[name])


@solver
@dataclass(frozen=True, kw_only=True)
class Rerange(Solver):
    """Propose one range for every activation."""

    chooses: ClassVar = Activation
    low: float
    high: float
    as_it_is: bool = False

    @property
    def reads(self) -> Input:
        return Input(MinMax())

    def solve(self, now: Activation, seen: MinMax) -> Proposal:
        found = now.with_range(self.low, self.high)
        return Proposal(replace(now, low=-math.inf, high=math.inf).with_range(-1, 1) if self.as_it_is else found)


def test_scales_that_spoil_are_dropped() -> None:
    data = [rand(32, 8, seed=i) for i in range(4)]
    plain = learned(seeded(Branches()), INT8_STATIC, data)
    for spoiled in (Rerange(low=-1e9, high=1e9), Rerange(low=-1e-6, high=1e-6)):
        qmodel = learned(seeded(Branches()), INT8_STATIC, data, spoiled)
        assert same(plain, qmodel)
        reasons = ("skipped: no better on validation data (", "skipped: an int32 bias would overflow")
        assert all(change.what.startswith(reasons) for change in changes(qmodel))
        assert len({change.name for change in changes(qmodel)}) == len(changes(qmodel)) == 3  # each is chosen once


def test_a_clamp_that_saturation_performs_is_kept() -> None:
    """A range does not go beyond the clamp, and parameters that would let through what it cuts are refused."""
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU6(), nn.Linear(8, 8)))
    data = [8 * rand(32, 8, seed=i) for i in range(4)]
    beyond, through = (
        learned(model, INT8_STATIC, data, p)
        for p in (Rerange(low=-20, high=20), Rerange(low=-20, high=20, as_it_is=True))
    )
    found = stored_tensors(beyond.graph_module)
    name = next(name for name in found if name.endswith("_quantizer_scale") and name.startswith(("hardtanh", "relu6")))
    assert float(found[name]) <= 6 / 254.5
    assert int(found[name.replace("scale", "zero_point")]) == 0
    reasons = {change.name: change.what for change in changes(through)}
    assert (
        reasons[name.removesuffix("_quantizer_scale")]
        == "skipped: its range would no longer perform the clamp that saturation replaces"
    )


class Rearranged(nn.Module):
    """A value that is rounded with one scale in two blocks: as it is made, and in another shape where it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        out: Tensor = self.c(y.flatten(1)[:, :64]) + self.b(y).mean()
        return out


def test_a_scale_that_an_earlier_block_computed_with_does_not_change() -> None:
    data = [x**3 for x in images(8, 8, 8, 8)]
    qmodel = learned(seeded(Rearranged()), FOUR_BITS, data, ClipActivations())
    readers = [node for node in calls(qmodel, "quark_fx.quantize") if node.args[1].target == "relu_quantizer_scale"]  # type: ignore[union-attr]
    assert len(readers) == 2
    assert [change.name for change in changes(qmodel)] == ["x", "relu", "conv2d_1"]


class Joined(nn.Module):
    """Values of two blocks that are rounded with the scale of what they are joined to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x * x))], 1))
        return out


def test_activations_that_may_not_be_chosen_are_left_with_the_reason() -> None:
    data = [rand(32, 8, seed=i) for i in range(4)]
    powers = learned(seeded(Branches()), XINT8, data, ClipActivations())
    assert {change.what for change in changes(powers)} == {
        "skipped: its scale is restricted to certain values by the option `scale`"
    }
    some = learned(seeded(Branches()), FOUR_BITS, data, ClipActivations(only=("c",)))
    rows = {change.name: change.what for change in changes(some)}
    assert [name for name, what in rows.items() if what != "skipped: not selected"] == ["tanh_1"]
    joined = learned(seeded(Joined()), FOUR_BITS, [x**3 for x in images(8, 8, 8)], ClipActivations())
    rows = {change.name: change.what for change in changes(joined)}
    assert list(rows) == ["x", "cat", "mul", "conv2d_2"]
    assert rows["cat"] == "skipped: it is computed from values of several blocks"


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_parameters_that_are_none_are_refused(scale: float) -> None:
    scheme = TensorSpec(format=UINT4).scheme
    with pytest.raises(ValueError, match=r"x: uint4 cannot have the scale .* with zero point 3"):
        Activation("x", scheme, QParams(torch.tensor(scale), torch.tensor(3)))
    with pytest.raises(ValueError, match="zero point 16"):
        Activation("x", scheme, QParams(torch.tensor(1.0), torch.tensor(16)))


# Biases.


@solver
@dataclass(frozen=True, kw_only=True)
class AddToBias(Solver):
    """Add a number to every bias."""

    chooses: ClassVar = Bias
    number: float

    @property
    def reads(self) -> OutputError:
        return OutputError(MinMax())

    def solve(self, now: Bias, seen: MinMax) -> Proposal:
        assert seen.low is not None
        assert seen.low.shape == now.value.shape
        return Proposal(replace(now, value=now.value + self.number))


@pytest.mark.parametrize("number", [100.0, math.inf])
def test_a_bias_that_spoils_is_dropped_even_if_what_the_block_makes_is_not_finite(number: float) -> None:
    data = [rand(32, 8, seed=i) for i in range(4)]
    plain, spoiled = (
        learned(seeded(Branches()), INT8_WEIGHT_ONLY, data, *p) for p in ((), (AddToBias(number=number),))
    )
    assert same(plain, spoiled)
    assert len(changes(spoiled)) == 4
    infinite = re.compile(r"skipped: after quantization, .* computes non-finite values")
    failed = [change for change in changes(spoiled) if infinite.match(change.what)]
    assert bool(failed) == math.isinf(number)
    for change in changes(spoiled):
        assert change.before is not None
        assert change in failed or refused_error(change.what, "validation data") > change.before


# Every solver.


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_worse_is_dropped(count: int) -> None:
    """Also where one sample is all there is to judge by."""
    model, data = seeded(Attention()), ids(*(count * [1]))
    plain, spoiled = (learned(model, RTN, data, *passes) for passes in ((), (Spoil(),)))
    assert same(plain, spoiled)
    found = [change.what for change in changes(spoiled) if change.before is not None]
    data_of = {1: "the calibration data", 2: "validation data"}[count]
    assert len([refused_error(what, data_of) for what in found]) == 6


@solver
@dataclass(frozen=True, kw_only=True)
class Mistaken(Solver):
    """Read what there is not."""

    chooses: ClassVar = Bias

    @property
    def reads(self) -> InputHessian:
        return InputHessian()

    def solve(self, now: Bias, seen: Hessian) -> Proposal:
        return Proposal(now)


@solver
@dataclass(frozen=True, kw_only=True)
class Asking(Solver):
    """Read what the test says."""

    chooses: ClassVar = Activation
    what: Any = None

    @property
    def reads(self) -> Any:
        return self.what

    def solve(self, now: Activation, seen: Any) -> Proposal:
        return Proposal(now)


@solver
@dataclass(frozen=True, kw_only=True)
class Helpless(Solver):
    """Fail."""

    chooses: ClassVar = Activation

    @property
    def reads(self) -> Input:
        return Input(MinMax())

    def solve(self, now: Activation, seen: MinMax) -> Proposal:
        raise CalibrationError("it is too hard")


@pytest.mark.parametrize(
    ("failing", "error", "message"),
    [
        (
            Mistaken(),
            ConfigError,
            "Mistaken chooses Bias, but InputHessian has no data for that choice; set reads to Input",
        ),
        (
            Asking(what=OutputError()),
            ConfigError,
            "Asking chooses Activation, but OutputError has no data for that choice; set reads to Input",
        ),
        (
            Asking(what=Input),
            ConfigError,
            r"reads of Asking must be InputHessian\(\), .* or OutputError\(\), not <class",
        ),
        (Helpless(), CalibrationError, "x: it is too hard; check the calibration data"),
    ],
    ids=["reads what there is not", "reads another thing", "reads a class", "fails"],
)
def test_what_a_solver_fails_at_is_named(failing: Solver, error: type[Exception], message: str) -> None:
    data = [rand(32, 8, seed=i) for i in range(4)]
    with pytest.raises(error, match=message):
        learned(seeded(Branches()), INT8_STATIC, data, failing)


@pytest.mark.parametrize("chosen", ["weights", Bias("fc", torch.zeros(1)), Tensor, None], ids=str)
def test_a_solver_that_chooses_what_there_is_not_is_refused(chosen: Any) -> None:
    class Chooser(Solver):
        chooses: ClassVar = chosen

    with pytest.raises(ConfigError, match=r"Chooser\.chooses must be one of the classes QuantizedMatrix, Bias, Activ"):
        solver(Chooser)


@pytest.mark.parametrize("reading", [Input, OutputError])
@pytest.mark.parametrize("fold", [MinMax, "min_max", None], ids=str)
def test_what_folds_no_data_is_not_read(reading: type[Input | OutputError], fold: Any) -> None:
    with pytest.raises(
        ConfigError, match=rf"{reading.__name__} takes an observer, such as MinMax\(\), or another fold, not"
    ):
        reading(fold)


# Float passes.


class Scaled(nn.Module):
    """Constants before operators: a chain, one whose product is read twice, and a quotient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv1d(8, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x * 0.5 * 3)
        z = y * 2
        out: Tensor = self.c((self.b(z) + z).mT / 7)
        return out


def test_a_float_pass_is_found_by_name_reported_and_held_to_its_promise() -> None:
    model, x = seeded(Scaled()), rand(4, 5, 8)
    floats = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gm = qfx.capture_graph(model, (x,)).module
    rewritten, (record,) = qfx.run_passes(gm, [fold_constant_scales], verify_inputs=(x,))
    assert record.rewrites == 3
    assert len(calls(rewritten, "aten.mul")) == 1
    assert not calls(rewritten, "aten.div")
    config = QuantConfig.from_dict(INT8_WEIGHT_ONLY.replace(passes=(fold_constant_scales,)).to_dict())
    qmodel = quantize(model, config, [x])
    assert record_of(qmodel, "fold_constant_scales").rewrites == 3
    assert [row.name for row in qmodel.report()] == ["a", "b", "c"]
    assert relative_error(qmodel, model, [x]) < 1e-3
    assert all(torch.equal(tensor, floats[name]) for name, tensor in model.state_dict().items())


def test_a_float_pass_that_breaks_its_promise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(Scaled()), rand(4, 5, 8)
    gm = qfx.capture_graph(model, (x,)).module
    right = extensions.fold_constant_scales._factor
    wrong = lambda linear: None if (factor := right(linear)) is None else 2 * factor  # noqa: E731
    monkeypatch.setattr(extensions.fold_constant_scales, "_factor", wrong)
    with pytest.raises(PassError, match="pass fold_constant_scales is declared exact, but it changed output 0"):
        qfx.run_passes(gm, [fold_constant_scales], verify_inputs=(x,))


# A scaling solver: deviation_scales.


def uneven() -> nn.Module:
    """A norm and a linear whose weights make up for the norm's."""
    model = seeded(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 4)))
    with torch.no_grad():
        sizes = torch.logspace(-1, 1, 32)
        model[0].weight.mul_(sizes)  # type: ignore[operator]
        model[1].weight.div_(sizes)  # type: ignore[operator]
    return model


ROWS = [rand(16, 32, seed=i) for i in range(8)]
SCALED = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, DeviationScales(powers=(0.0, 0.5))))


def test_a_scaling_solver_lowers_the_error_on_unseen_data() -> None:
    model, unseen = uneven(), [rand(256, 32, seed=9)]
    plain, scaled = (quantize(model, config, ROWS) for config in (INT8_STATIC, SCALED))
    assert relative_error(scaled, model, unseen) < 0.5 * relative_error(plain, model, unseen)
    record = record_of(scaled, "DeviationScales")
    row = record.changes[-1]
    assert (row.name, row.what, row.changed) == ("1", "power 0.5", True)
    assert row.before is not None
    assert row.after is not None
    assert row.after < 0.5 * row.before
    assert record.rewrites == 1
    assert record.validated
    assert record.remark == "explicit=True could multiply for 1 more"


def test_a_scaling_solver_is_found_by_name_and_its_needs_are_predicted() -> None:
    assert qfx.QuantConfig.from_dict(SCALED.to_dict()) == SCALED
    found = qfx.predict(uneven(), SCALED, ROWS)
    (need,) = [need for name, _, need in found.stages if name == "DeviationScales"]
    assert need.moments[0].working > 4 * 32 * 16 * 8  # half of what both layers read is remembered at the least
    assert not found.unknown


@scaling_solver
@dataclass(frozen=True, kw_only=True)
class SpoilScales(SampledScaling):
    """Make one channel a thousand times as large as the others."""

    @property
    def grid(self) -> dict[str, tuple[float, ...]]:
        return {"size": (1000.0,)}

    def scale(self, statistics: SampleStatistics, values: tuple[float, ...]) -> Tensor:
        scale = torch.ones_like(statistics.largest)
        scale[0] = values[0]
        return scale


def test_a_scale_on_samples_has_to_be_better_by_more_than_chance() -> None:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, DeviationScales(powers=(0.05,))))
    (change,) = [c for c in record_of(quantize(uneven(), config, ROWS), "DeviationScales").changes if c.before]
    assert change.what.startswith("skipped: less than 15% better (")


@pytest.mark.parametrize("count", [1, 2])
def test_a_scale_that_is_worse_is_dropped(count: int) -> None:
    model, data = uneven(), [rand(1, 32, seed=i) for i in range(count)]
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, SpoilScales()))
    plain, spoiled = (quantize(model, c, data) for c in (INT8_STATIC, config))
    tensors, others = (q.graph_module.state_dict() for q in (plain, spoiled))
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    data_of = {1: "the calibration data", 2: "validation data"}[count]
    (change,) = [change for change in record_of(spoiled, "SpoilScales").changes if change.before is not None]
    assert change.before is not None
    assert refused_error(change.what, data_of) > change.before
    assert change.after == change.before


# A target: tensorrt_like.

INT8_TENSORRT = """
target: tensorrt_like
weight: {format: int8, granularity: channel}
input: {format: int8}
output: {format: int8}
passes: [fold_batch_norm]
"""


def tensorrt() -> qfx.QuantConfig:
    return qfx.QuantConfig.from_yaml(INT8_TENSORRT)


def test_a_target_is_found_by_name_and_written_by_name() -> None:
    assert qfx.QuantConfig(target="tensorrt_like").target is TENSORRT_LIKE  # type: ignore[arg-type]
    assert tensorrt().target is TENSORRT_LIKE
    assert tensorrt().to_dict()["target"] == "tensorrt_like"
    assert qfx.QuantConfig.from_yaml(tensorrt().to_yaml()) == tensorrt()
    assert copy.deepcopy(tensorrt()) == pickle.loads(pickle.dumps(tensorrt())) == tensorrt()
    unknown = replace(TENSORRT_LIKE, name="unknown")
    assert copy.deepcopy(unknown) is unknown, "a value that nothing has registered is a target, too"
    with pytest.raises(
        qfx.ConfigError, match=r"unknown target 'tensorrt_lik'; choose one of onnx, .*; did you mean 'tensorrt_"
    ):
        qfx.QuantConfig(target="tensorrt_lik")  # type: ignore[arg-type]


def test_its_files_have_symmetric_int8_and_float_biases(tmp_path: Path) -> None:
    """The same model for ONNX Runtime has uint8, int32 and zero points, so that each of them could be here."""
    data = images(8, 8)
    both = {}
    for name, config in (("ours", qfx.presets.INT8_STATIC), ("theirs", tensorrt())):
        qmodel = quantize(cnn(), config, data)
        both[name] = file = qfx.export.onnx(qmodel, tmp_path / f"{name}.onnx")
        assert qfx.verify(qmodel, file, data, per_node=True).max_steps <= 1
        assert all(not row.reason for row in qmodel.report().rows)
    assert codes_of(both["theirs"]) == {("int8", True)}
    assert codes_of(both["ours"]) >= {("int8", True), ("int32", True), ("uint8", False)}
    biases = [array_of(node.inputs[2]) for node in ir.load(both["theirs"]).graph if node.op_type in ("Conv", "Gemm")]
    assert [bias.dtype.name for bias in biases if bias is not None] == ["float32"] * 3


def codes_of(file: Path) -> set[tuple[str, bool]]:
    """Return the types of codes in a file, and whether their zero points are 0."""
    found = set()
    for node in ir.load(file).graph:
        if node.op_type == "DequantizeLinear":
            codes, points = node.inputs[0], array_of(node.inputs[2]) if len(node.inputs) > 2 else None
            kind = array_of(codes) if array_of(codes) is not None else points
            assert kind is not None
            found.add((kind.dtype.name, points is None or not points.any()))
    return found


def test_arithmetic_is_rounded_where_a_target_says() -> None:
    """The residual addition, but not the pool, which ONNX Runtime has an integer kernel for."""
    names = [str(node.args[0]) for node in calls(quantize(cnn(), tensorrt(), images(8)), "quark_fx.quantize.default")]
    assert "x" in names
    assert len(names) < len(calls(quantize(cnn(), qfx.presets.INT8_STATIC, images(8)), "quark_fx.quantize.default"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unsigned activations": ({"input": {"format": "uint8"}}, "int8, not uint8; set format='int8'"),
    "zero points": ({"input": {"format": "int8", "symmetry": "asymmetric"}}, "no zero points; set symmetry"),
    "scales of groups": (
        {"weight": {"format": "int8", "granularity": "group", "group_size": 16}},
        "per tensor or channel, not per group; set granularity",
    ),
    "ranges at run time": ({"input": {"format": "int8", "dynamic": True}, "output": None}, "drop dynamic=True"),
    "int32 biases": ({"bias": {"format": "int32"}}, "`bias`: TensorRT adds biases in float; set bias=None"),
    "an override": (
        {"overrides": [{"pattern": "head", "weight": {"format": "int4"}}]},
        r"not int4; set format='int8' \(override 'head'\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_target_refuses_is_an_error_that_names_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(qfx.ConfigError, match=message):
        qfx.QuantConfig.from_dict(tensorrt().to_dict() | changes)
    qfx.QuantConfig.from_dict(tensorrt().to_dict() | changes | {"target": "onnx"})


def test_a_target_reads_its_formats_and_opsets_only(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), tensorrt(), images(8))
    with pytest.raises(
        qfx.ExportError, match=r"target='tensorrt_like' does not support format='qoperator'; choose one of qdq"
    ):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator")
    with pytest.raises(qfx.ExportError, match=r"opset 17 cannot be written for target='tensorrt_like'; use 21"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", opset=17)


def test_a_file_that_a_target_does_not_read_is_not_written(tmp_path: Path) -> None:
    """Quantized for another target, whose codes it has."""
    config = qfx.presets.INT8_STATIC.replace()
    qmodel = quantize(cnn(), config, images(8))
    object.__setattr__(config, "target", TENSORRT_LIKE)
    with pytest.raises(qfx.ExportError, match=r"TensorRT does not read\n  codes of UINT8 at"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_stored_model_runs_without_the_code_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(8)[0]
    made = quantize(cnn(), tensorrt(), [x])
    made.save(tmp_path / "model")
    assert qfx.load(tmp_path / "model").config == tensorrt()
    monkeypatch.delitem(qfx.targets.TARGETS, "tensorrt_like")
    loaded = qfx.load(tmp_path / "model")
    assert isinstance(loaded.config.target, Stored)
    assert loaded.config.to_dict() == made.config.to_dict()
    assert torch.equal(loaded(x), made(x))
    loaded.save(tmp_path / "again")
    needed = "target 'tensorrt_like' is known .*; import the module that registers it and load the model again, or"
    for use in (
        lambda: qfx.export.onnx(loaded, tmp_path / "model.onnx"),
        lambda: qfx.prepare_qat(loaded),
        lambda: quantize(cnn(), loaded.config, [x]),
    ):
        with pytest.raises(qfx.ConfigError, match=needed):
            use()
    loaded.config = loaded.config.replace(target="onnx")  # as the message says
    assert loaded.config.target is qfx.Target.ONNX
    assert qfx.export.onnx(loaded, tmp_path / "model.onnx").exists()
    monkeypatch.setitem(qfx.targets.TARGETS, "tensorrt_like", TENSORRT_LIKE)
    assert qfx.export.onnx(qfx.load(tmp_path / "again"), tmp_path / "model.onnx").exists()


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Target, {"limits_pairs": "no"}, "limits_pairs of Target must be True or False, not 'no'"),
        (Target, {"refuses": ["int4"]}, r"refuses of Target must be a tuple .* a Refusal"),
        (Target, {"placement": "anywhere"}, "placement of Target must be a Placement, not 'anywhere'"),
        (Target, {"nmae": "mine"}, r"Target has no field nmae; .*did you mean 'name'"),
        (Placement, {"arithmetic": "add"}, "arithmetic of Placement must be a frozenset whose items are each a string"),
        (Placement, {"rounds_output": True}, "rounds_output of Placement must be a function, not True"),
        (Refusal, {"when": "int4", "why": "no"}, "when of Refusal must be a function, not 'int4'"),
        (Refusal, {"when": bool, "why": "no {spec.fmt}"}, "why='no {spec.fmt}' of a Refusal is not a valid template"),
        (
            Refusal,
            {"when": bool, "why": "no {other}"},
            r"is not a valid template: 'other'; write it like .* {spec.format}",
        ),
        (OnnxFiles, {"formats": ()}, "formats of OnnxFiles is empty; name at least one"),
        (OnnxFiles, {"opsets": 21}, "opsets of OnnxFiles must be a tuple of an integer and an integer"),
        (OnnxFiles, {"opsets": (17, 19)}, r"opset=21 of OnnxFiles is outside of opsets=\(17, 19\)"),
        (OnnxFiles, {"check": "strict"}, "check of OnnxFiles must be a function or None, not 'strict'"),
        (register_target, {"target": "mine"}, r"'mine' is not a Target; write register_target\(Target\(name=...\)\)"),
    ],
)
def test_a_target_that_cannot_be_is_refused_when_it_is_made(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**({"name": "mine"} if make is Target else {}), **options)
    assert "mine" not in TARGETS


@pytest.mark.parametrize("kind", [set, list, tuple, frozenset])
def test_operators_of_a_placement_may_be_any_collection(kind: Any) -> None:
    assert Placement(arithmetic=kind(["aten.add.Tensor"])).arithmetic == frozenset({"aten.add.Tensor"})


# A rule of ONNX files: quick_gelu.


class Gates(torch.nn.Module):
    """One product that is a quick gelu, and one with a factor per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.factors = torch.nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        x = x * torch.sigmoid(x * 1.702)
        return self.down(x * torch.sigmoid(x * self.factors))  # type: ignore[no-any-return]


def test_a_rule_of_the_user_rewrites_what_it_can_and_says_what_it_declined(tmp_path: Path) -> None:
    data = [rand(8, 8)]
    qmodel = quantize(seeded(Gates()), "int8_weight_only", data)
    plain = qfx.export.onnx(qmodel, tmp_path / "plain.onnx")
    file = qfx.export.onnx(qmodel, tmp_path / "fused.onnx", rules=[fuse_quick_gelu])
    kinds = [[node.op_type for node in ir.load(path).graph] for path in (plain, file)]
    assert [kind.count("Sigmoid") for kind in kinds] == [2, 1]
    assert [kind.count("QuickGelu") for kind in kinds] == [0, 1]
    assert ir.load(file).opset_imports["com.microsoft"] == 1
    assert not plain.kept
    (declined,) = file.kept
    assert (declined.operator, declined.rule) == ("Mul", "FuseQuickGelu")
    assert declined.reason == "it has 16 factors, and the kernel takes one"
    assert f"declined by FuseQuickGelu: {declined.name} (Mul): it has 16 factors" in str(file.report())
    assert qfx.verify(qmodel, file, data).max_steps <= 1


@onnx_rule("Sigmoid")
def harden_sigmoid(model: ir.Model, node: ir.Node) -> bool:
    if node.outputs[0].is_graph_output():
        raise Declined("it leaves the graph")
    node.op_type = "HardSigmoid"
    return True


def test_a_rule_may_be_a_function_of_a_node_and_belong_to_a_target(tmp_path: Path) -> None:
    files = replace(TENSORRT_LIKE.onnx, rules=(harden_sigmoid,))
    config = qfx.QuantConfig(
        weight=qfx.TensorSpec(format=INT8), target=replace(TENSORRT_LIKE, name="hardened", onnx=files)
    )

    class Squashed(Gates):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(super().forward(x))

    file = qfx.export.onnx(quantize(seeded(Squashed()), config, [rand(8, 8)]), tmp_path / "model.onnx")
    kinds = [node.op_type for node in ir.load(file).graph]
    assert [kinds.count(kind) for kind in ("HardSigmoid", "Sigmoid")] == [2, 1]
    assert [(left.operator, left.reason, left.rule) for left in file.kept] == [
        ("Sigmoid", "it leaves the graph", "harden_sigmoid")
    ]


@pytest.mark.parametrize("returned", [None, 1])
def test_a_rule_that_does_not_say_whether_it_rewrote_is_named(returned: Any, tmp_path: Path) -> None:
    forgets = onnx_rule("Gemm", "MatMul")(lambda model, node: returned)
    forgets = replace(forgets, name="forgets")
    qmodel = quantize(seeded(nn.Linear(8, 4)), "int8_weight_only", [rand(4, 8)])
    with pytest.raises(
        qfx.ExportError, match=rf"rule forgets returned {returned} for (Gemm|MatMul) .*; return True if"
    ):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", rules=[forgets])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("operators", [(), (len,)], ids=["no type", "without parentheses"])
def test_a_rule_says_which_nodes_it_is_for(operators: tuple[Any, ...]) -> None:
    with pytest.raises(qfx.ExportError, match=r'write @onnx_rule\("Relu"\)'):
        onnx_rule(*operators)


def test_what_is_no_rule_is_refused(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), "int8_weight_only", images(4))
    with pytest.raises(qfx.ExportError, match="is not an ONNX rule; decorate a function"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", rules=[print])
    assert not list(tmp_path.iterdir())


# A gradient solver.

COARSE = INT8_STATIC.replace(weight=TensorSpec(format=INT4, granularity=qfx.Granularity.CHANNEL))


def dependent(*sizes: int) -> list[Tensor]:
    """Return images of one sign: the errors of weights add up where inputs depend on each other."""
    return [x.abs() for x in images(*sizes)]


@pytest.mark.parametrize("unit", Unit)
def test_shifted_channels_lower_the_error_on_unseen_data(unit: Unit) -> None:
    model, data = cnn(), dependent(16, 16, 16, 64)
    plain, shifted = (learned(model, COARSE, data[:3], *passes) for passes in ((), (ShiftChannels(unit=unit),)))
    assert relative_error(shifted, model, data[3:]) < 0.95 * relative_error(plain, model, data[3:])
    found = changes(shifted)
    assert [change.name for change in found] == [row.name for row in plain.report()]
    for change in found:
        assert change.before is not None
        assert change.after is not None
        assert change.after <= change.before
    assert any("of the codes" in change.what and change.changed for change in found)
    assert shifted.report().passes[-1].validated


FOUR_BIT_RANGES = INT8_STATIC.replace(
    weight=TensorSpec(format=UINT4, symmetry=qfx.Symmetry.ASYMMETRIC, granularity=qfx.Granularity.GROUP, group_size=16),
    target=TARGETS["torch"],
)


def heavy_tailed() -> nn.Module:
    """Return a model whose ranges are better narrower than the extremes of the weights."""
    model = seeded(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 8)))
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(20 * layer.weight**3)
    return model


def test_learned_clip_ends_change_scales_and_zero_points_and_lower_the_error_on_unseen_data() -> None:
    model, data = heavy_tailed(), [rand(64, 32, seed=i).abs() for i in range(5)]
    plain, clipped = (learned(model, FOUR_BIT_RANGES, data[:4], *p) for p in ((), (LearnedClipping(unit=Unit.BLOCK),)))
    assert relative_error(clipped, model, data[4:]) < 0.9 * relative_error(plain, model, data[4:])
    assert all("of the codes, scales, zero points" in change.what for change in changes(clipped))
    before, after = (stored_tensors(q.graph_module) for q in (plain, clipped))
    points = [name for name in before if name.endswith("weight_zero_point")]
    assert points
    for name in points:
        assert before[name].dtype == after[name].dtype
        assert not torch.equal(before[name], after[name])
        assert 0 <= int(after[name].min()) <= int(after[name].max()) <= 15


def test_a_weight_that_a_gradient_solver_declines_keeps_its_codes_with_the_reason() -> None:
    data = dependent(8, 8)
    plain, kept = (learned(cnn(), COARSE, data, *passes) for passes in ((), (LearnedClipping(iterations=2),)))
    assert same(plain, kept)
    reason = "its zero points are fixed; set symmetry='asymmetric'"
    assert {change.what for change in changes(kept)} == {f"0.0% of the codes; not learned: {reason}"}


@solver
@dataclass(frozen=True, kw_only=True)
class MovePoints(Solver):
    """Choose for each output the best of some shares of the range from its smallest to its largest weights."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal | Skip:
        if weight.columns is None or weight.free.zero_points is None:
            return Skip("its zero points are fixed")
        real, grid, members = weight.real.float(), weight.grid(), weight.columns.members(weight.real.device)
        low = torch.stack([real[..., m].amin(-1) for m in members], -1).clamp_max(0)
        high = torch.stack([real[..., m].amax(-1) for m in members], -1).clamp_min(0)
        now = torch.stack([grid.scale[..., m][..., 0] for m in members], -1)
        first, last = grid.limits
        ends = [(below * low, above * high) for below, above in product((1.0, 0.9, 0.8, 0.7), repeat=2)]
        scales = torch.stack([(high - low) / (last - first) for low, high in ends])
        points = torch.stack([first - low / scale for (low, _), scale in zip(ends, scales, strict=True)])
        errors = []
        for scale, point in zip(scales, points, strict=True):
            tried = weight.with_scales(scale / now).with_zero_points(point).nearest()
            lost = tried.grid().value(tried.codes.float()) - real
            errors.append(((lost @ seen.h) * lost).sum(-1))
        best = torch.stack(errors).argmin(0)[None, ..., None].expand(1, *low.shape)
        scale, point = (values.gather(0, best)[0] for values in (scales, points))
        return Proposal(weight.with_scales(scale / now).with_zero_points(point).nearest())


def test_a_solver_chooses_zero_points_and_the_report_names_them() -> None:
    data = [rand(64, 32, seed=i).abs() for i in range(4)]
    qmodel = learned(heavy_tailed(), FOUR_BIT_RANGES, data, MovePoints())
    accepted = [change.what for change in changes(qmodel) if change.changed]
    assert accepted
    assert all(what.startswith("scales and zero points and ") for what in accepted), accepted
    skipped = learned(cnn(), COARSE, dependent(8, 8), MovePoints())
    assert {change.what for change in changes(skipped)} == {"skipped: its zero points are fixed"}


def test_a_gradient_solver_is_found_by_name_and_its_needs_are_predicted() -> None:
    config = QuantConfig.from_dict(COARSE.replace(passes=(ShiftChannels(iterations=3, drop=0.1),)).to_dict())
    assert config.passes == (ShiftChannels(iterations=3, drop=0.1),)
    expected = qfx.predict(cnn(), config, dependent(8, 8))
    assert "ShiftChannels" in [name for name, _, _ in expected.stages]
    assert not expected.unknown


@solver
@dataclass(frozen=True, kw_only=True)
class ShiftTooFar(ShiftChannels):
    """Begin with offsets of three codes."""

    def begin(self, grid: Grid, weight: Tensor, start: Tensor) -> Shifted:
        shifted = super().begin(grid, weight, start)
        with torch.no_grad():
            shifted.offset += 3
        return shifted


def test_learned_codes_that_are_worse_are_dropped() -> None:
    data = dependent(8, 8)
    plain, spoiled = (learned(cnn(), COARSE, data, *passes) for passes in ((), (ShiftTooFar(iterations=2),)))
    assert same(plain, spoiled)
    assert {change.what for change in changes(spoiled)} == {"0.0% of the codes"}


@solver
@dataclass(frozen=True, kw_only=True)
class Overwrite(Solver):
    """Write into the float weight."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Skip:
        weight.real.data.mul_(0)
        return Skip("it is gone")


@solver
@dataclass(frozen=True, kw_only=True)
class OverwriteCodes(Solver):
    """Write into the codes."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Skip:
        weight.stored.codes.zero_()
        return Skip("they are gone")


@solver
@dataclass(frozen=True, kw_only=True)
class Silent(Solver):
    """Answer nothing."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Any:
        return None


@pytest.mark.parametrize(
    ("writer", "message"),
    [
        (Overwrite(), r"pass Overwrite wrote into .*weight, which the caller's model also uses"),
        (
            OverwriteCodes(),
            r"pass OverwriteCodes wrote into .*weight_codes, which every block that is finished also uses",
        ),
    ],
    ids=["weights", "codes"],
)
def test_a_solver_that_writes_in_place_is_named(writer: Solver, message: str) -> None:
    with pytest.raises(PassError, match=message):
        quantize(seeded(Attention()), RTN.replace(passes=(writer,)), ids(16, 16))


def test_a_solver_that_answers_nothing_is_told_what_to_answer() -> None:
    with pytest.raises(
        PassError,
        match=r"^Silent failed on into: solve must return a Proposal of a QuantizedMatrix, or a Skip .*, not NoneType",
    ):
        quantize(seeded(Attention()), RTN.replace(passes=(Silent(),)), ids(16, 16))


@solver
@dataclass(frozen=True, kw_only=True)
class SilentOnBiases(Silent):
    """Answer nothing about biases."""

    chooses: ClassVar = Bias
    reads: ClassVar = OutputError()


def test_a_solver_of_biases_that_answers_nothing_is_told_what_to_answer() -> None:
    with pytest.raises(PassError, match=r"^SilentOnBiases failed on .+: solve must return a Proposal of a Bias, or a"):
        quantize(cnn(), INT8_STATIC.replace(passes=(SilentOnBiases(),)), images())


def undecorated(base: type) -> Any:
    """Return an instance of a subclass without the decorator of its base class."""
    methods = {name: lambda *_: None for name in base.__abstractmethods__}  # type: ignore[attr-defined]
    return type("Mine", (base,), methods)()


@pytest.mark.parametrize(
    ("base", "decorator"),
    [
        (Solver, "solver"),
        (GradientSolver, "solver"),
        (ScalingSolver, "scaling_solver"),
        (SampledScaling, "scaling_solver"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_solver_without_its_decorator_is_refused(base: type, decorator: str) -> None:
    message = f"^the solver Mine has no stage; decorate the class with @{decorator}"
    with pytest.raises(ConfigError, match=message):
        RTN.replace(passes=(undecorated(base),))
    with pytest.raises(ConfigError, match=message):
        run_passes(torch.fx.symbolic_trace(nn.Linear(4, 4)), [undecorated(base)])


def test_a_subclass_of_a_decorated_solver_runs_at_its_stage() -> None:
    class Mine(GPTQ):
        pass

    assert pass_stage(RTN.replace(passes=(Mine(),)).passes[0]) is Stage.QUANTIZED


@pytest.mark.parametrize("count", [1, 6])
def test_errors_after_a_pass_that_learned_from_all_samples_are_not_called_validated(count: int) -> None:
    """Of few samples GPTQ learns again from all, and what a later pass judges by is not unseen then."""
    config = RTN.replace(passes=(GPTQ(), RefitScales()))
    data = ids(16, 16) if count == 1 else ids(*(60 * [16]))
    first, second = quantize(seeded(Attention()), config, data).report().passes[-2:]
    assert first.validated
    assert second.validated == (not any(change.all_samples for change in first.changes))
    assert any(change.all_samples for change in first.changes) == (count == 1)


# Grids and formats of files.


@pytest.mark.parametrize("skip_zeros", [False, True])
def test_a_grid_from_outside_counts_as_the_built_in_one(skip_zeros: bool) -> None:
    """Within a bin; half of the values are zeros, and a few are beyond the span."""
    x = torch.cat([rand(3, 4000), torch.zeros(3, 4000), torch.full((3, 1), 9.0)], 1)
    scheme, ends = Scheme(format=INT8, symmetry=Symmetry.SYMMETRIC), {}
    for grid in ("span_8", "dyadic"):
        whole = Percentile(percentile=99.0, bins=1024, grid=grid, skip_zeros=skip_zeros).observe(x)
        first, second = (replace(whole, histogram=None).observe(part) for part in x.split(5000, 1))
        ends[grid] = torch.stack(whole.range(scheme))
        assert torch.equal(ends[grid], torch.stack(first.merge(second).range(scheme)))
        assert bool((ends[grid].abs() < 8).all())
    width = 2 * 16 / 1024
    torch.testing.assert_close(ends["span_8"], ends["dyadic"], rtol=0, atol=width)
    counts = Span(8.0).count(None, x, 1024, skip_zeros=skip_zeros)
    assert isinstance(counts, Counts)
    assert int(counts.counts.sum()) == (x != 0).sum() if skip_zeros else x.numel()


def test_a_configuration_names_a_grid_from_outside() -> None:
    observer = Percentile(percentile=99.9, grid="span_8")
    config = INT8_STATIC.replace(input=TensorSpec(format=UINT8, observer=observer))
    assert QuantConfig.from_yaml(config.to_yaml()) == config
    with pytest.raises(ConfigError, match=r"unknown grid 'span_9'.*did you mean 'span_8'"):
        Percentile(grid="span_9")


def test_a_format_from_outside_is_written_and_verified(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="unpack")
    unpacked = [node for node in ir.load(file).graph if node.domain == DOMAIN]
    assert {node.op_type for node in unpacked} == {"Unpack"}
    assert len(unpacked) == 6  # the weights and biases of two convolutions and a linear
    assert file.kept == ()
    assert any("it has no kernels for com.example" in str(reason) for reason in file.not_run)
    assert qfx.verify(qmodel, file, images()).max_steps < 1.001
    blocks = qfx.export.onnx(quantize(cnn(), INT4_WEIGHT_ONLY, images()), tmp_path / "blocks.onnx", format="unpack")
    (kept,) = blocks.kept  # the convolutions are int8 per channel
    assert (kept.name, kept.reason) == ("head.weight_codes", "Unpack has one scale per channel, not per block")
    with pytest.raises(ExportError, match=r"format='unpack' does not support domain='com.other'"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="unpack", domain="com.other")
    assert FORMATS["unpack"] is UNPACK
