"""Values computed from parameters alone are weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_placement import build
from tiny import calls, constant, quantize, rand, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.graph.pass_manager import run_passes
from quark_fx.passes import fold_constants
from quark_fx.presets import INT8_STATIC, INT8_WEIGHT_ONLY

parametrizations: Any = nn.utils.parametrizations
old: Any = nn.utils

WAYS: dict[str, tuple[str, Callable[[Any], Tensor]]] = {
    "a slice": ("w", lambda m: m.w[:8, :8]),
    "a chunk": ("w", lambda m: m.w.chunk(2, 1)[1][:8]),
    "one of a stack": ("cube", lambda m: m.cube[1]),
    "an expansion": ("row", lambda m: m.row.expand(8, 8)),
    "a concatenation": ("w", lambda m: torch.cat([m.w[:4, :8], m.v[:4]])),
    "a product": ("v, down", lambda m: m.v + (m.down.mT @ m.down) * 0.5),
    "a product of parameters alone": ("down", lambda m: m.down.mT @ m.down),
    "standardized": ("v", lambda m: (m.v - m.v.mean(1, keepdim=True)) / m.v.std(1, keepdim=True)),
    "normalized by batch norm": ("v", lambda m: F.batch_norm(m.v[None], None, None, training=True)[0]),
    "masked from sizes": ("v", lambda m: m.v * torch.ones(8, 8).tril()),
    "read twice": ("v", lambda m: m.v.mT + m.v.mT),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_value_computed_from_parameters_is_a_weight(name: str) -> None:
    source, compute = WAYS[name]
    model = build(lambda m, x: F.linear(x, compute(m), m.bias[4:]) @ compute(m).mT)
    model.w, model.v, model.cube = nn.Parameter(rand(8, 16)), nn.Parameter(rand(8, 8)), nn.Parameter(rand(2, 8, 8))
    model.row, model.down, model.bias = nn.Parameter(rand(1, 8)), nn.Parameter(rand(2, 8)), nn.Parameter(rand(12))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    gm, _ = run_passes(qfx.capture_graph(model, rand(4, 8)).module, [fold_constants])
    torch.testing.assert_close(gm(rand(4, 8))[0], model(rand(4, 8)))
    named_after = {node.meta["parameter"] for node in gm.graph.nodes if "folded" in node.meta}
    assert named_after
    assert named_after <= before.keys()
    qmodel = quantize(model, INT8_STATIC, [rand(4, 8)])
    assert [row.reason for row in qmodel.report()] == ["", ""]
    assert all(row.computed_from.startswith(source) for row in qmodel.report())
    assert f"is computed from {source}" in str(qmodel.report())
    assert len(calls(qmodel, "quark_fx.dequantize")) == 3 + 2  # the bias follows the first weight
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("pick", [lambda w, i: w[i], lambda w, i: w.index_select(0, i)])
def test_rows_that_a_constant_picks_are_one_constant(pick: Any) -> None:
    model = build(lambda m, x: x + pick(m.w, m.order)[None])
    model.w, model.order = nn.Parameter(rand(3, 8)), nn.Buffer(torch.tensor([2, 0]))
    gm, _ = run_passes(qfx.capture_graph(model, rand(4, 2, 8)).module, [fold_constants])
    assert not any("index" in str(node.target) for node in gm.graph.nodes)
    assert torch.equal(gm(rand(4, 2, 8))[0], model(rand(4, 2, 8)))


MODULES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weight norm": (lambda: parametrizations.weight_norm(nn.Conv2d(3, 4, 3)), rand(2, 3, 5, 5)),
    "spectral norm": (lambda: parametrizations.spectral_norm(nn.ConvTranspose1d(3, 4, 3)), rand(2, 3, 5)),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 4), orthogonal_map="householder"), rand(3, 6)),
    "old weight norm": (lambda: old.weight_norm(nn.Linear(6, 4)), rand(3, 6)),
    "old spectral norm": (lambda: old.spectral_norm(nn.Conv3d(2, 4, 2)), rand(2, 2, 3, 3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
def test_a_weight_of_torchs_parametrizations_has_codes(name: str) -> None:
    make, x = MODULES[name]
    (row,) = quantize(seeded(nn.Sequential(make())), INT8_STATIC, [x]).report()
    assert (row.name, row.weight, row.reason) == ("0", "int8 channel", "")


class Attends(nn.Module):
    """Attention between values of other widths, with a learned key."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y: Tensor = self.attend(q, k, v, need_weights=False)[0]
        return y


@pytest.mark.parametrize(
    ("options", "same", "weights"),
    [
        ({}, (True, True), 2),
        ({}, (False, True), 3),
        ({}, (False, False), 4),
        ({"kdim": 6, "vdim": 5}, (False, False), 4),
        ({"add_bias_kv": True}, (False, False), 4),
    ],
    ids=["self", "encoder", "cross", "widths", "learned key"],
)
def test_all_weights_of_an_attention_have_codes(options: dict[str, Any], same: tuple[bool, bool], weights: int) -> None:
    model = seeded(Attends(**options))

    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            k = q if same[0] else k
            return self.inner(q, k, k if same[1] else v)

    widths = (8, options.get("kdim", 8), options.get("vdim", 8))
    batch = tuple(rand(2, 5, width, seed=i) for i, width in enumerate(widths))
    report = quantize(seeded(Calls()), INT8_STATIC, [batch]).report()
    assert [row.reason for row in report] == [""] * weights
    assert {row.name for row in report} == {"inner.attend", "inner.attend.out_proj"} or "kdim" in options
    assert sum(row.bytes_before for row in report) == sum(
        p.nbytes for name, p in model.named_parameters() if p.dim() == 2 and "weight" in name
    )


def test_a_transposed_table_stays_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.table(x)) @ self.table.weight.t()

    qmodel = quantize(seeded(Tied()), INT8_WEIGHT_ONLY, [torch.arange(8).reshape(2, 4)])
    codes = {str(n.target) for n in qmodel.graph_module.graph.nodes if n.op == "get_attr" and "codes" in str(n.target)}
    assert len(codes) == 1
    assert constant(qmodel, next(n for n in qmodel.graph_module.graph.nodes if str(n.target) in codes)).shape == (9, 6)
