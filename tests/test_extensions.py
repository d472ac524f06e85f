"""What one file outside of the package adds: found by name, judged, reported, predicted, resumed, run by ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from extensions.refit_scales import RefitScales
from test_gptq import RTN, Attention, errors, ids, relative_error
from tiny import quantize, seeded

import quark_fx as qfx
from quark_fx.passes import GPTQ
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal, Solver, solver

FILE = Path(__file__).parent / "extensions" / "refit_scales.py"


def test_a_solver_is_one_short_file() -> None:
    assert len(FILE.read_text().splitlines()) <= 60


def test_refitted_scales_lower_the_error_on_unseen_data() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16, 16, 16)
    plain, refitted = (quantize(model, RTN.replace(passes=passes), data[:4]) for passes in ((), (RefitScales(),)))
    assert relative_error(refitted, model, data[4:]) < 0.9 * relative_error(plain, model, data[4:])
    found = errors(refitted)
    assert list(found) == ["into", "back", "gate", "lift", "down", "words"]
    assert all(after <= before for before, after in found.values())
    assert any(change.what == "scales" for change in refitted.report().passes[-1].changes)
    assert refitted.report().passes[-1].held_out


def test_it_keeps_the_codes_of_gptq() -> None:
    model, data = seeded(Attention()), ids(16, 16)
    one, both = (quantize(model, RTN.replace(passes=p), data) for p in ((GPTQ(),), (GPTQ(), RefitScales())))
    tensors, others = one.graph_module.state_dict(), both.graph_module.state_dict()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_codes"))
    assert not all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_scale"))


def test_a_solver_is_found_by_name_and_its_needs_are_predicted() -> None:
    config = qfx.QuantConfig.from_dict(RTN.replace(passes=(RefitScales(damping=0.1),)).to_dict())
    assert config.passes == (RefitScales(damping=0.1),)
    model, data = seeded(Attention()), ids(16, 16)
    stages = [name for name, _, _ in qfx.predict(model, config, data).stages]
    assert "RefitScales" in stages
    assert not qfx.predict(model, config, data).unknown


@solver
@dataclass(frozen=True, kw_only=True)
class Spoil(Solver):
    """Halve every scale, which saturates every large weight."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        assert weight.columns is not None
        return Proposal(weight.with_scales(torch.full((*weight.real.shape[:2], weight.columns.count), 0.5)))


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_worse_is_dropped(count: int) -> None:
    """Also where one sample is all there is to judge by."""
    model, data = seeded(Attention()), ids(*(count * [1]))
    plain, spoiled = (quantize(model, RTN.replace(passes=passes), data) for passes in ((), (Spoil(),)))
    tensors, others = (q.graph_module.state_dict() for q in (plain, spoiled))
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    changes = [change.what for change in spoiled.report().passes[-1].changes if change.before is not None]
    data_of = {1: "the calibration data", 2: "validation data"}[count]
    assert changes == [f"left: no better on {data_of}"] * 6
