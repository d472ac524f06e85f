"""What solvers read: parts equal the whole, and padding does not count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import pytest
import torch
from test_gptq import RTN, Attention, ids
from tiny import quantize, rand, seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quark_fx.passes import GPTQ
from quark_fx.solvers.folds import Mean
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.solver import Input, QuantizedMatrix, Skip, Solver, solver


def test_parts_make_the_mean_of_the_whole() -> None:
    x = rand(3, 40)
    parts = [Mean().observe(part) for part in x.split((7, 20, 13), dim=1)]
    merged = Mean().merge(parts[0]).merge(parts[1]).merge(Mean()).merge(parts[2])
    torch.testing.assert_close(merged.value, x.mean(1))
    assert merged.count == 40
    with pytest.raises(ValueError, match="nothing was observed"):
        Mean().value  # noqa: B018


@dataclass(frozen=True)
class Count:
    """How many values there were, in how many batches."""

    values: int = 0
    batches: int = 0

    def observe(self, x: Tensor) -> Self:
        assert x.shape[0] == 1
        return replace(self, values=self.values + x.numel(), batches=self.batches + 1)

    def merge(self, other: Self) -> Self:
        return replace(self, values=self.values + other.values, batches=self.batches + other.batches)


@solver
@dataclass(frozen=True, kw_only=True)
class Counting(Solver):
    """Say what was seen."""

    @property
    def reads(self) -> Input:
        return Input(Count())

    def solve(self, now: QuantizedMatrix, seen: Count) -> Skip:
        return Skip(f"{seen.values} in {seen.batches}")


def test_padding_is_looked_up_once_for_all_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is waited for where a mask says how many rows there are."""
    looked_up, nonzero = [], Tensor.nonzero

    def counting(self: Tensor) -> Tensor:
        looked_up.append(self.shape)
        return nonzero(self)

    class NoMasks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.index.Tensor:
                assert not any(i is not None and i.dtype == torch.bool for i in args[1])
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(Tensor, "nonzero", counting)
    batch = ids(8)[0]
    data = [{"ids": batch, "attention_mask": (batch > 20).long()}] * 2
    measure = Hessian.measure.__func__  # type: ignore[attr-defined]

    def measured(*args: Any, **options: Any) -> Hessian:
        with NoMasks():  # type: ignore[no-untyped-call]
            found: Hessian = measure(*args, **options)
        return found

    monkeypatch.setattr(Hessian, "measure", classmethod(measured))
    qmodel = quantize(seeded(Attention()), RTN.replace(passes=(GPTQ(),)), data)
    assert sum(change.changed for change in qmodel.report().passes[-1].changes) == 6
    assert looked_up == [torch.Size([size * 24]) for size in (8, 6, 2)]


def test_any_fold_sees_calibration_batches_without_padding() -> None:
    """Seven samples of eight are learned from; each has 24 tokens, of which six are padding."""
    batch = ids(8)[0]
    mask = torch.ones_like(batch)
    mask[:, 18:] = 0
    found: list[Any] = []
    for data in (batch, {"ids": batch, "attention_mask": mask}):
        qmodel = quantize(seeded(Attention()), RTN.replace(passes=(Counting(),)), [data])
        found.append({change.name: change.what for change in qmodel.report().passes[-1].changes})
    whole, masked = found
    assert whole["into"] == f"skipped: {7 * 24 * 32} in 1"
    assert masked["into"] == f"skipped: {7 * 18 * 32} in 1"
    assert masked["down"] == f"skipped: {7 * 18 * 96} in 1"
