"""Integer divisions of a loaded graph overflow for no values, and are otherwise those of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quantize, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.model.stored_operators import _OPERATORS, resolve


class Divided(nn.Module):
    """Integers divided in every way that a model can spell, next to a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = nn.Buffer(torch.tensor([3, -2, 5, 7]))

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        narrow = a.to(torch.int32)
        return (
            self.linear(x),
            torch.div(a, b, rounding_mode="trunc"),
            torch.div(a, -1, rounding_mode="trunc"),
            torch.div(narrow, b.to(torch.int32), rounding_mode="trunc"),
            a // b,
            torch.remainder(a, b),
            torch.fmod(a, b),
            torch.lcm(narrow // 1000, b.to(torch.int32)),
            a // self.table,
            a % 7,
        )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[qfx.QuantizedModel, Path]:
    x, a = torch.randn(5, 4), torch.randint(-99, 99, (5, 4))
    qmodel = quantize(seeded(Divided()), "int8_static", [(x, a, a.clamp(min=1))])
    path = tmp_path_factory.mktemp("divided")
    qmodel.save(path)
    return qmodel, path


def clamps(qmodel: qfx.QuantizedModel) -> int:
    return sum(n.target is torch.ops.aten.clamp.default for n in qmodel.graph_module.graph.nodes)


def test_a_loaded_model_divides_as_the_model_does(saved: tuple[qfx.QuantizedModel, Path], tmp_path: Path) -> None:
    qmodel, path = saved
    loaded = qfx.load(path)
    assert clamps(loaded) == 8, "one for each runtime divisor, two for lcm, one for -1, none for tables and constants"
    a = torch.tensor([[7, -7, 0, 2**40], [-(2**63) + 1, 2**63 - 1, 1, -1]])
    b = torch.tensor([[2, -2, -1, 3], [-1, -1, 5, -7]])
    x = torch.randn(2, 4)
    for ours, theirs in zip(loaded(x, a, b), qmodel(x, a, b), strict=True):
        assert torch.equal(ours, theirs)
    loaded.save(tmp_path)
    assert clamps(qfx.load(tmp_path)) == 8, "guarded once"
    assert torch.equal(loaded.eager(Divided())(x, a, b)[1], qmodel(x, a, b)[1])


def test_the_most_negative_integer_ends_no_process(saved: tuple[qfx.QuantizedModel, Path]) -> None:
    """Without the guard this test does not fail: it ends the tests. `test_mutations.py` looks at it from outside."""
    loaded = qfx.load(saved[1])
    a = torch.full((2, 4), -(2**63))
    a[1] = -(2**31)
    found: Any = loaded(torch.randn(2, 4), a, torch.full((2, 4), -1))
    assert (found[1][0] == 2**63 - 1).all()
    assert (found[1][1] == 2**31).all()
    assert (found[3][1] == 2**31 - 1).all()


def test_instructions_of_torchscript_are_refused() -> None:
    """They compute with Python numbers while shapes are found, and take any number for a type."""
    refused = 0
    for namespace, names in _OPERATORS.items():
        for packet in {name.partition(".")[0] for name in names}:
            for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{packet}"):
                name = f"{namespace}.{packet}.{schema.overload_name or 'default'}"
                try:
                    torch._C._dispatch_find_schema_or_throw(f"{namespace}::{packet}", schema.overload_name)
                except RuntimeError:
                    with pytest.raises(qfx.QuarkError, match="not allowed"):
                        resolve(name, {"aten"} if f"{packet}.{schema.overload_name}" not in names else ())
                    refused += 1
    assert refused > 250
    for name in ("aten.to.prim_dtype", "aten.remainder.int", "aten.index.Tensor_hacked_twin"):
        with pytest.raises(qfx.QuarkError, match="TorchScript"):
            resolve(name)
