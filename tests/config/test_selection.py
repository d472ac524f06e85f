"""Passes that are limited to some operators change those, and say so of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import quantize, record_of, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import QuantConfig, TensorSpec
from quark_fx.config.quant_config import Granularity
from quark_fx.config.selection import NOT_SELECTED, Selective
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import PASSES, needs_context, pass_from_dict, pass_to_dict
from quark_fx.numbers.formats import INT4, UINT8
from quark_fx.passes import (
    AWQ,
    GPTQ,
    AbsorbHighBias,
    AdaQuant,
    AdaRound,
    AutoRound,
    BiasCorrection,
    BlockAP,
    CrossLayerEqualization,
    FitScales,
    LearnRotations,
    LowRank,
    NormalizeColumns,
    Rotate,
    SmoothQuant,
    TuneScales,
    fold_batch_norm,
)

CODES = TensorSpec(format=INT4, granularity=Granularity.CHANNEL)
INTEGERS = QuantConfig(weight=CODES, input=TensorSpec(format=UINT8), passes=(fold_batch_norm,))
STEPS: dict[Any, dict[str, Any]] = {
    **{learner: {"iterations": 5} for learner in (AdaRound, AdaQuant, AutoRound, BlockAP)},
    TuneScales: {"iterations": 16},
}
ROUNDING: list[Any] = [GPTQ, FitScales, AdaRound, AdaQuant, AutoRound, BlockAP, BiasCorrection, TuneScales]
SCALING: list[Any] = [AWQ, SmoothQuant, NormalizeColumns, CrossLayerEqualization, AbsorbHighBias]


class Two(nn.Module):
    """Two stages alike, each two convolutions with a batch norm and a ReLU between, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = self._stage(3), self._stage(8)
        self.last = nn.Linear(8, 4)

    @staticmethod
    def _stage(inputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.second(torch.tanh(self.first(x))).mean((2, 3)))
        return out


def model() -> Two:
    found = seeded(Two())
    for norm in (module for module in found.modules() if isinstance(module, nn.BatchNorm2d)):
        # One channel far larger than the others, to be evened out, and one that no ReLU cuts.
        norm.weight.data = torch.tensor([0.1, *[0.3] * 6, 100.0])
        norm.bias.data[0] = 5.0
    return found


def data() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 3, 10, 10, generator=generator) for _ in range(3)]


def made(p: type[Any], **options: Any) -> Any:
    return p(**options, **STEPS.get(p, {}))


def run(*passes: Any) -> qfx.QuantizedModel:
    config = INTEGERS.replace(passes=(fold_batch_norm, *passes))
    if any(isinstance(p, FitScales) for p in passes):
        config = config.replace(input=None)  # scales that int32 biases follow stay
    return quantize(model(), config, data())


def tensors(qmodel: qfx.QuantizedModel, prefix: str) -> dict[str, Tensor]:
    return {name: t for name, t in stored_tensors(qmodel.graph_module).items() if name.startswith(prefix)}


def test_every_pass_that_reads_data_or_changes_weights_can_be_limited() -> None:
    learning = {p for p in PASSES.values() if isinstance(p, type) and p.__module__.startswith("quark_fx.passes")}
    limited = {p for p in learning if issubclass(p, Selective)}
    assert limited == {*ROUNDING, *SCALING, LearnRotations, LowRank, Rotate}
    # Shifts are settled for a whole graph, or for none of it.
    assert {p.__name__ for p in learning - limited if needs_context(p)} <= {"AlignShifts"}


@pytest.mark.parametrize("p", [*ROUNDING, *SCALING], ids=lambda p: p.__name__)
def test_a_limited_pass_changes_the_selected_operators_and_names_the_others(p: type[Any]) -> None:
    record = record_of(run(made(p, only=("second.*",))), p.__name__)
    rows = [(change.name, change.what) for change in record.changes]
    others = {name for name, what in rows if what == f"skipped: {NOT_SELECTED}"}
    assert any(change.changed for change in record.changes), rows
    assert all(change.name.startswith("second.") for change in record.changes if change.changed)
    assert {name for name in others if name.startswith("first.")}
    assert not {name for name in others if name.startswith("second.")}
    assert {name for name, _ in rows if not name.startswith("second.")} <= others


@pytest.mark.parametrize("p", ROUNDING, ids=lambda p: p.__name__)
@pytest.mark.parametrize("only", [("second.*",), ("first.3", "op:head")], ids=str)
def test_a_limited_rounding_leaves_the_tensors_of_others_as_they_are(p: type[Any], only: tuple[str, ...]) -> None:
    limited, alone = run(made(p, only=only)), run()
    if p is FitScales:
        alone = quantize(model(), INTEGERS.replace(input=None), data())
    touched = ("second.",) if only[0] == "second.*" else ("first.3", "last.")
    before, after = stored_tensors(alone.graph_module), stored_tensors(limited.graph_module)
    assert before.keys() == after.keys()
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved
    own = {name for name in moved if name.startswith(touched)}
    # Activation scales bear the name of a value; an int32 bias follows that of what it is added to.
    learned_scales = {
        name for name in moved - own if p is AdaQuant and name.endswith("_scale") and "weight" not in name
    }
    assert moved == own | learned_scales


def test_two_passes_of_one_kind_divide_a_model() -> None:
    both = run(GPTQ(only=("first.*",)), GPTQ(only=("second.*", "last"), damping=0.5))
    one = run(GPTQ(only=("first.*",)))
    for name, value in tensors(one, "first.").items():
        assert torch.equal(value, stored_tensors(both.graph_module)[name])
    changed = [{c.name for c in record.changes if c.changed} for record in both.report().passes[-2:]]
    assert all(changed)
    assert changed[0] <= {"first.0", "first.3"}
    assert changed[1] <= {"second.0", "second.3", "last"}


def test_a_site_is_scaled_when_all_that_read_it_are_selected() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 8), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x * torch.logspace(-2, 2, 16))
            out: Tensor = self.a(x) + self.b(x)
            return out

    batches = [torch.randn(16, 16) for _ in range(3)]
    weights = QuantConfig(weight=CODES)
    for only, scaled in ((("a",), False), (("a", "b"), True)):
        found = quantize(seeded(Branches()), weights.replace(passes=(AWQ(only=only),)), batches)
        (change,) = record_of(found, "AWQ").changes
        assert (change.name, change.what == f"skipped: {NOT_SELECTED}") == ("a, b", not scaled)


def test_a_pattern_of_a_pass_that_selects_nothing_is_reported() -> None:
    config = INTEGERS.replace(passes=(fold_batch_norm, GPTQ(only=("secnd.*", "last"))))
    with pytest.warns(UserWarning, match=r"pattern 'secnd\.\*' selects no operator; similar names: second\."):
        qfx.quantize(model(), config, data(), progress=False)


@pytest.mark.parametrize("p", [*ROUNDING, *SCALING], ids=lambda p: p.__name__)
def test_the_option_survives_dicts_and_yaml(p: type[Any]) -> None:
    found = p(only=["layers.*", "op:conv*"])
    assert found.only == ("layers.*", "op:conv*")
    assert pass_from_dict(pass_to_dict(found)) == found
    config = QuantConfig(weight=CODES, input=TensorSpec(format=UINT8), passes=(found,))
    assert QuantConfig.from_yaml(config.to_yaml()) == config


@pytest.mark.parametrize("p", [*ROUNDING, *SCALING], ids=lambda p: p.__name__)
@pytest.mark.parametrize("only", ["layers.*", (3,), None])
def test_what_is_no_list_of_patterns_is_refused(p: type[Any], only: Any) -> None:
    with pytest.raises(ConfigError, match=f"only of {p.__name__} must be a tuple whose items are each a string"):
        p(only=only)
