"""Gradients that go back block by block are those of the whole graph, and weights of rows those of its predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import on_devices
from test_block_walk import case, of_all_cases, walk
from tiny import divided, images, quantize, rand, record_of, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule

from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.engine.back_walk import BackWalk
from quark_fx.engine.blocks import Unit, find_blocks
from quark_fx.engine.calibration_data import Positions
from quark_fx.engine.context import Context
from quark_fx.engine.end_loss import EndLoss
from quark_fx.engine.guidance import Guidance
from quark_fx.graph.nodes import named_nodes, stored_tensors
from quark_fx.numbers.formats import INT4
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import GPTQ, FitScales
from quark_fx.presets import INT8_WEIGHT_ONLY, W4A16_RTN
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.solver import InputHessian, QuantizedMatrix, Skip, Solver, solver
from quark_fx.system import accelerator

GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16, symmetry=Symmetry.SYMMETRIC_FULL)


def operators(context: Context) -> list[str]:
    return [op.node.name for op in context.plan.values()]


def signs(results: Any) -> list[Tensor | None]:
    """Return a gradient for each result that has one."""
    return [
        torch.arange(1.0, r.numel() + 1, device=r.device).sin().view(r.shape) if r.is_floating_point() else None
        for r in results
    ]


@on_devices
@of_all_cases
@pytest.mark.parametrize("unit", Unit)
def test_gradients_of_a_float_graph(name: str, unit: Unit, device: torch.device) -> None:
    def look(_: GraphModule, context: Context) -> None:
        gm = context.float_graph
        assert gm is not None
        nodes, watched = named_nodes(gm), operators(context)
        blocks = find_blocks(gm, unit)
        back = BackWalk(gm, blocks, nodes, context, watched=frozenset(watched))
        results = back.forward(0)
        got = dict(back.backward(signs(results)))
        values: dict[str, Tensor] = {}

        class Recording(torch.fx.Interpreter):
            def run_node(self, n: torch.fx.Node) -> Any:
                value = super().run_node(n)
                if n.name in watched:
                    value = values[n.name] = value.detach().requires_grad_() if not value.requires_grad else value
                return value

        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() if _floats(x) else x for x in context.data.inputs(0)]
            made = Recording(gm).run(*inputs)
        torch.testing.assert_close(list(results), [r.detach() if isinstance(r, Tensor) else r for r in made])
        ends = [(r, s) for r, s in zip(made, signs(results), strict=True) if s is not None]
        expected = torch.autograd.grad([r for r, _ in ends], list(values.values()), [s for _, s in ends])
        assert set(got) == set(values)
        for name, gradient in zip(values, expected, strict=True):
            torch.testing.assert_close(got[name], gradient)

    model, batches = case(name, device)
    walk(model, batches, look)


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


# What the end loss says of rows.


class Sentences(nn.Module):
    """Tokens in, logits of 11 classes for each out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.first(self.table(ids))))
        return logits


def of_context(model: nn.Module, batches: list[Any], look: Any, **options: Any) -> Any:
    return walk(model, batches, look, W4A16_RTN.replace(weight=GROUPS.replace(group_size=4)), **options)


def losses(model: nn.Module, data: list[Tensor]) -> tuple[EndLoss, list[str]]:
    """Return the loss of a model, and what guided GPTQ notes."""
    found: list[EndLoss] = []

    def look(_: GraphModule, context: Context) -> None:
        found.append(EndLoss.of(context.float_graph))

    config = INT8_WEIGHT_ONLY.replace(passes=(*INT8_WEIGHT_ONLY.passes, GPTQ(guided=True)))
    qmodel = walk(model, data, look, config)
    return found[0], [change.what for change in record_of(qmodel, "GPTQ").changes]


class Ends(nn.Module):
    """A matrix product, and what a model makes of it at its end."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self.first, self.head, self.end = nn.Linear(8, 8), nn.Linear(8, 6), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.head(torch.relu(self.first(x))))


ENDS: dict[str, tuple[Any, tuple[bool, ...]]] = {
    "logits": (lambda y: y, (True,)),
    "capped": (lambda y: torch.tanh(y / 30) * 30, (True,)),
    "the last rows": (lambda y: y[:, -20:], (True,)),
    "one half of the rows": (lambda y: y.flatten(0, 1).unflatten(0, (-1, 2, 20))[:, 1], (True,)),
    "the last rows of each class": (lambda y: y[:, -6:].transpose(1, 2), (False,)),
    "classes before positions": (lambda y: y.transpose(1, 2), (False,)),
    "heads": (lambda y: y.unflatten(-1, (2, 3)).transpose(1, 2), (False,)),
    "masked": (lambda y: y.masked_fill(torch.arange(6) > 4, torch.finfo(torch.float32).min), (True,)),
    "probabilities": (lambda y: y.softmax(-1), (False,)),
    "logits and values": (lambda y: (y, y.unflatten(-1, (2, 3)).transpose(1, 2)), (True, False)),
}


@pytest.mark.parametrize("name", ENDS)
def test_results_are_logits_or_values(name: str) -> None:
    end, expected = ENDS[name]
    loss, notes = losses(seeded(Ends(end)), [rand(16, 40, 8, seed=i) for i in range(2)])
    assert loss.predictions == expected
    assert len(notes) == 2
    assert not any("unguided" in note for note in notes)


def test_what_few_rows_decide_is_named() -> None:
    model = seeded(Ends(lambda y: y[:, :1]))
    _, notes = losses(model, [rand(16, 40, 8, seed=i) for i in range(2)])
    assert all(note.endswith("unguided: predictions depend on too few rows") for note in notes if "skipped" not in note)


@torch.library.custom_op("quark_fx_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """Halve a tensor; it has no derivative."""
    return x / 2


@halved.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_rows_weigh_the_same_where_the_gradient_does_not_pass() -> None:
    _, notes = losses(seeded(Ends(halved)), [rand(16, 40, 8, seed=i) for i in range(2)])
    reason = "unguided: the gradient of the model's predictions cannot be computed through "
    changed = [note for note in notes if "skipped" not in note]
    assert changed
    assert all(reason in note for note in changed), notes


@on_devices
def test_mean_outer_product_is_the_second_derivative_of_the_loss(device: torch.device) -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0], [0.1, 0.0, -0.3]], device=device, dtype=torch.float32)
    values = torch.tensor([[1.0, -2.0], [0.5, 1.0]], device=device, dtype=torch.float32)
    loss = EndLoss((True, False))
    generator = accelerator.new_generator(device).manual_seed(0)
    many = [t.repeat(40_000, 1, 1) for t in (logits, values)]
    drawn = loss.sampled(many, None, generator)
    for position, (value, target) in enumerate(((logits, logits), (values, values))):
        rows = drawn[position]
        found = torch.einsum("nri,nrj->rij", rows, rows) / len(rows)
        one = EndLoss((position == 0,))

        def of(x: Tensor, one: EndLoss = one, target: Tensor = target) -> Tensor:
            if one.predictions == (True,):
                return (target.softmax(-1) * (target.log_softmax(-1) - x.log_softmax(-1))).sum()
            return (x - target).square().sum() / target.square().mean() / 2

        whole = torch.autograd.functional.hessian(of, value)
        for row in range(len(value)):
            torch.testing.assert_close(found[row], whole[row, :, row], rtol=0.02, atol=0.01)


@on_devices
def test_the_loss_and_its_gradient_are_those_of_the_formulas(device: torch.device) -> None:
    shape = torch.Size((2, 700))
    logits, values = (rand(*shape, 5, seed=i).to(device) * 3 for i in range(2))
    aims = [logits + rand(*shape, 5, seed=2).to(device), values + 0.1 * rand(*shape, 5, seed=3).to(device)]
    aims[0][..., 2] = -math.inf  # a model may mask classes
    aims[1][0, 3] = -1e30
    masked = [logits.clone(), values.clone()]
    masked[0][..., 2] = -math.inf
    kept = torch.arange(1390, device=device)
    sums, gradients = EndLoss((True, None, False)).compared(
        [masked[0], 7, masked[1]], [aims[0], 7, aims[1]], Positions(shape, kept)
    )
    rows = [x.flatten(0, 1).double()[:1390].requires_grad_() for x in masked]
    p, t = (aim.flatten(0, 1).double()[:1390] for aim in aims)
    known = [0, 1, 3, 4]
    divergence = (p.softmax(-1) * (p.log_softmax(-1) - rows[0].log_softmax(-1)))[:, known].sum()
    counts = t.abs() < 1e18
    squares, whole = torch.where(counts, rows[1] - t, 0.0).square().sum(), t[counts].square().sum()
    expected_sums = (
        torch.stack([divergence, torch.tensor(1390.0, device=device), squares, whole]).float().detach().view(2, 2)
    )
    torch.testing.assert_close(sums.cpu(), expected_sums.cpu(), rtol=1e-5, atol=0)
    expected = torch.autograd.grad(divergence / 1390 + squares / whole, rows)
    assert gradients[1] is None
    for gradient, wanted, aside in zip((gradients[0], gradients[2]), expected, (known, range(5)), strict=True):
        found = gradient.flatten(0, 1)[:, list(aside)]
        torch.testing.assert_close(found[:1390].double(), wanted[:, list(aside)], rtol=1e-4, atol=1e-8)
        assert not found[1390:].any()


def measured(context: Context) -> Guidance:
    guidance = InputHessian(guided=True).guidance(context)
    assert guidance is not None
    return guidance


def test_weights_of_rows() -> None:
    """They are powers, at which enough rows count, of the squared gradients that its predictions give, 1 on average."""
    mask = torch.ones(20, 5, dtype=torch.int64)
    mask[0, 3:] = 0
    batches = [{"ids": ids, "attention_mask": mask} for ids in tokens(20, 20)]

    def look(_: GraphModule, context: Context) -> None:
        gm = context.float_graph
        assert gm is not None
        guidance = measured(context)
        assert measured(context) is guidance
        (name,) = [op.node.name for op in context.plan.values() if op.name == "first"]
        first = [guidance.of(name, batch) for batch in range(len(context.data.batches))]
        assert all(found is not None for found in first)
        whole = torch.cat([found.flatten() for found in first if found is not None])
        torch.testing.assert_close(whole.mean(), torch.tensor(1.0))
        assert first[0] is not None
        torch.testing.assert_close(first[0][0, 3:], torch.zeros(2))
        # The same signs, drawn again, and torch's own gradient.
        generator, expected = torch.Generator(), list[Tensor]()
        for batch in range(len(context.data.batches)):
            generator.manual_seed(batch)
            ids, _ = context.data.inputs(batch)
            loss = EndLoss.of(gm)
            with torch.enable_grad():
                made = model.first(model.table(ids)).detach().requires_grad_()
                logits = model.head(torch.tanh(made))
                (gradient,) = loss.sampled([logits.detach()], context.data.kept_positions(batch), generator)
                expected.append(torch.autograd.grad(logits, made, gradient)[0].square().mean(-1).flatten())
        found = torch.cat(expected)
        assert _effective(found.sqrt()) < 8 * 8, "rows per input"
        power = next(p for p in (0.375, 0.25, 0.125) if _effective(found**p) > 8 * 8)
        torch.testing.assert_close(whole, found**power / (found**power).mean())

    model = seeded(Sentences())
    with torch.no_grad():
        model.table.weight[:9] *= 60  # whose predictions are sure, so that few tokens have nearly all of the weight
    of_context(model, batches, look)


def _effective(weights: Tensor) -> float:
    return float(weights.sum() ** 2 / weights.square().sum())


class Mixed(nn.Module):
    """A convolution whose patches a linear reads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.head = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.relu(self.conv(x)).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(torch.relu(self.linear(rows)))
        return logits


@on_devices
@pytest.mark.parametrize("shifted", [False, True])
def test_a_guided_hessian_weights_its_rows(shifted: bool, device: torch.device) -> None:
    found: dict[str, tuple[Tensor, Tensor | None]] = {}

    @solver
    @dataclass(frozen=True, kw_only=True)
    class Looking(Solver):
        """Keeps the Hessians it is given, and changes nothing."""

        @property
        def reads(self) -> InputHessian:
            return InputHessian(shifted=shifted, guided=True)

        def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Skip:
            found[weight.name] = seen.h.clone(), None if seen.shift is None else seen.shift.clone()
            return Skip("only looked")

    weights: dict[str, list[Tensor]] = {}

    def look(_: GraphModule, context: Context) -> None:
        guidance = measured(context)
        for op in context.plan.values():
            weights[op.name] = [w for b in context.data.calibration if (w := guidance.of(op.node.name, b)) is not None]

    model = seeded(Mixed()).to(device)
    data = [x.to(device) for x in images(40, 40)]
    config = INT8_WEIGHT_ONLY.replace(passes=(*INT8_WEIGHT_ONLY.passes, Looking()))
    walk(model, data, look, config)
    x = divided(data)[0]
    columns = nn.functional.unfold(x, 3, padding=1, stride=2).transpose(0, 1).flatten(1)
    expected = (columns * torch.cat([w.flatten() for w in weights["conv"]])) @ columns.T
    torch.testing.assert_close(found["conv"][0][0], expected, rtol=1e-4, atol=1e-4)
    if shifted:  # the first operator reads the same in float and quantized
        assert found["conv"][1] is not None
        torch.testing.assert_close(found["conv"][1][0], torch.zeros_like(expected))
    assert found["linear"][0].shape == (1, 8, 8)
    assert all(bool((w >= 0).all()) for each in weights.values() for w in each)


@pytest.mark.parametrize("solver", [GPTQ, FitScales])
def test_rows_that_no_prediction_depends_on_do_not_count(solver: type[GPTQ | FitScales]) -> None:
    """The weights that guided solvers choose depend on the rows that are read, however large the others are."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 7)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.relu(self.first(x))[:, :3])
            return logits

    def codes(batch: Tensor, *, guided: bool) -> Tensor:
        config = QuantConfig(weight=GROUPS, passes=(solver(guided=guided),), exclude=("head",))
        qmodel = quantize(seeded(Half()), config, list(batch.split(32)))
        return next(t for n, t in stored_tensors(qmodel.graph_module).items() if n.endswith("codes"))

    batch = rand(64, 6, 16) @ rand(16, 16)
    other = batch.clone()
    other[:, 3:] = 10 * rand(64, 3, 16, seed=9)
    assert torch.equal(codes(batch, guided=True), codes(other, guided=True))
    assert not torch.equal(codes(batch, guided=False), codes(other, guided=False))


@pytest.mark.parametrize("solver", [GPTQ, FitScales])
def test_what_no_prediction_depends_on_is_named(solver: type[GPTQ | FitScales]) -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 7)

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.head(torch.argsort(self.first(x), -1).float())
            return logits

    config = QuantConfig(weight=GROUPS, passes=(solver(guided=True),))
    qmodel = quantize(seeded(Sorted()), config, [rand(512, 16) @ rand(16, 16)])
    first, head = record_of(qmodel, solver.__name__).changes
    assert first.changed
    assert first.what.endswith("unguided: no prediction depends on it")
    assert "unguided" not in head.what
