"""A walk over blocks sees what the whole graphs compute, in float and in codes, and holds no more in a deeper one."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_devices
from tiny import Residual, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.engine.block_walk import BlockRun, relative_error, walk_blocks
from quark_fx.engine.blocks import Block, Unit, carriers, extract
from quark_fx.engine.calibration import run_batches, watching
from quark_fx.engine.calibration_data import CalibrationData
from quark_fx.engine.context import Context
from quark_fx.engine.quantized_weights import quantized_weights, shared_tensors
from quark_fx.engine.resources import Resources
from quark_fx.errors import CalibrationError
from quark_fx.graph.nodes import placeholders, stored_tensors, tensor_of
from quark_fx.graph.pass_manager import Change, Promise, Stage, copy_graph
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.presets import INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8

ADAROUND = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, AdaRound(iterations=20, batch_size=2)))
CORRECTION = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, BiasCorrection()))

of_both_units = pytest.mark.parametrize("unit", Unit)


class Function(nn.Module):
    """Modules by name, and the function that calls them."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self.function = function

    def forward(self, x: Tensor, *rest: Any) -> Any:
        return self.function(self, x, *rest)


def build(function: Callable[..., Any], **modules: nn.Module) -> nn.Module:
    return seeded(Function(function, **modules))


def attention(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """Two layers that read the same mask."""
    for layer in ("first", "second"):
        q, k, v = getattr(m, layer)(m.norm(x)).chunk(3, -1)
        x = x + m.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    return x


def pyramid(m: Any, x: Tensor) -> Tensor:
    """An image, and a smaller one that is read further on."""
    small = F.avg_pool2d(x, 2)
    out: Tensor = m.c(torch.cat([F.avg_pool2d(torch.relu(m.a(x)), 2), m.b(small)], 1))
    return out


def skips(m: Any, x: Tensor) -> Any:
    """A value that is read far away, and two results."""
    first = torch.relu(m.a(x))
    second = torch.relu(m.b(F.max_pool2d(first, 2)))
    out = m.c(torch.cat([first, F.interpolate(second, scale_factor=2)], 1))
    return out, second.mean((2, 3))


def numbers(m: Any, x: Tensor, ids: Tensor, factor: int) -> Any:
    """A float, indices and a number come in; the indices go out as they came."""
    return m.b(torch.relu(m.a(x * factor)) + m.table(ids)), ids


def turned(m: Any, x: Tensor) -> Tensor:
    """Patches: what lies between the convolution and the linears is a transposed view."""
    y = m.patches(x).flatten(2).transpose(1, 2)
    out: Tensor = m.b(torch.relu(m.a(y))).transpose(1, 2)
    return out


def conv(inputs: int, outputs: int, size: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, size, padding=size // 2)


def masks(*sizes: int) -> list[Any]:
    return [(rand(n, 5, 8, seed=n), (rand(n, 5, 5) > 0) | torch.eye(5, dtype=torch.bool)) for n in sizes]


CASES: dict[str, Callable[[], tuple[nn.Module, list[Any]]]] = {
    "cnn": lambda: (cnn(), images(4, 4, 3)),
    "mlp": lambda: (mlp(), tokens(4, 4, 3)),
    "attention": lambda: (
        build(
            attention,
            first=nn.Linear(8, 24),
            second=nn.Linear(8, 24),
            out=nn.Linear(8, 8),
            norm=nn.LayerNorm(8),
        ),
        masks(4, 3),
    ),
    "pyramid": lambda: (build(pyramid, a=conv(3, 4), b=conv(3, 4), c=conv(8, 2)), images(4, 3)),
    "skips": lambda: (build(skips, a=conv(3, 4, 3), b=conv(4, 4, 3), c=conv(8, 2, 3)), images(4, 3)),
    "numbers": lambda: (
        build(numbers, a=nn.Linear(8, 8), b=nn.Linear(8, 4), table=nn.Embedding(11, 8)),
        [(rand(n, 5, 8, seed=n), ids, 2) for n, ids in zip((4, 3), tokens(4, 3), strict=True)],
    ),
    "turned": lambda: (
        build(turned, patches=nn.Conv2d(3, 8, 4, 4), a=nn.Linear(8, 16), b=nn.Linear(16, 8)),
        images(4, 3),
    ),
}

of_all_cases = pytest.mark.parametrize("name", CASES)


def case(name: str, device: torch.device | None = None) -> tuple[nn.Module, list[Any]]:
    model, batches = CASES[name]()
    place = torch.device("cpu") if device is None else device
    return model.to(place), pytree.tree_map_only(Tensor, lambda x: x.to(place), batches)


Look = Callable[[GraphModule, Context], None]


def looking(look: Look, config: QuantConfig = INT8_STATIC) -> QuantConfig:
    """Return `config` with a last pass that looks at the quantized graph and its context."""

    def visit(gm: GraphModule, context: Context) -> int:
        look(gm, context)
        return 0

    visit.promise = Promise(exact=False, stage=Stage.QUANTIZED)  # type: ignore[attr-defined]
    return config.replace(passes=(*config.passes, visit))


def walk(model: nn.Module, batches: Any, look: Look, config: QuantConfig = INT8_STATIC, **options: Any) -> Any:
    """Quantize a model and look at the result from within; `look` has been called when this returns."""
    looked = []

    def once(gm: GraphModule, context: Context) -> None:
        look(gm, context)
        looked.append(True)

    qmodel = quantize(model, looking(once, config), batches, **options)
    assert looked == [True]
    return qmodel


def values(gm: GraphModule, names: Sequence[str], inputs: Sequence[Any]) -> list[Any]:
    """Return values within a whole graph, what is produced in codes as the real numbers they stand for."""
    nodes = carriers(gm)
    with torch.no_grad():
        found: list[Any] = extract(gm, placeholders(gm), [nodes[name] for name in names])(*inputs)
    return list(found)


def assert_identical(got: Any, expected: Any) -> None:
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        if isinstance(b, Tensor):
            assert (a.dtype, a.device) == (b.dtype, b.device)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def tensors(qmodel: qfx.QuantizedModel) -> dict[str, Tensor]:
    return stored_tensors(qmodel.graph_module)


def changes(qmodel: qfx.QuantizedModel) -> list[Change]:
    """Return what the passes noted, but not how long it took."""
    return [replace(change, seconds=0.0) for record in qmodel.report().passes for change in record.changes]


def assert_same_result(got: qfx.QuantizedModel, expected: qfx.QuantizedModel) -> None:
    assert_identical(tensors(got), tensors(expected))
    assert changes(got) == changes(expected)
    assert changes(expected)


def files(directory: Path) -> int:
    return sum(path.is_file() for path in directory.rglob("*"))


# What a walk sees.


@on_devices
@pytest.mark.parametrize(
    "config",
    [INT8_STATIC, INT8_DYNAMIC, XINT8],
    ids=["int8_static", "int8_dynamic", "xint8"],
)
@of_all_cases
def test_a_walk_sees_the_values_of_the_whole_graphs(name: str, config: QuantConfig, device: torch.device) -> None:
    def look(gm: GraphModule, context: Context) -> None:
        real, quantized = context.float_graph, copy_graph(gm)
        for unit in Unit:
            visited: list[Block] = []
            for run in walk_blocks(gm, context, unit=unit):
                assert run.index == len(visited)
                visited += [run.block]
                for batch in range(len(context.data.batches)):
                    given = context.data.inputs(batch)
                    assert_identical(run.reference_inputs(batch), values(real, run.block.inputs, given))
                    assert_identical(run.targets(batch), values(real, run.block.made, given))
                    assert_identical(run.inputs(batch), values(quantized, run.block.inputs, given))
                    assert_identical(run.outputs(batch), values(quantized, run.block.made, given))
            assert len(visited) > 1

    model, batches = case(name, device)
    walk(model, batches, look, config)


@of_all_cases
def test_a_walk_that_changes_nothing_leaves_the_graph_as_it_is(name: str) -> None:
    def look(gm: GraphModule, context: Context) -> None:
        before, graph = stored_tensors(gm), str(gm.graph)
        for run in walk_blocks(gm, context):
            assert run.learned == {}
        after = stored_tensors(gm)
        assert list(after) == list(before)
        assert all(after[tensor] is before[tensor] for tensor in before)
        assert str(gm.graph) == graph

    model, batches = case(name)
    qmodel = walk(model, batches, look)
    # Not `quantize(model, INT8_STATIC, batches)`: without a pass that takes the context no sample is held out, the last
    # batch is calibrated on whole, and a matrix product of more rows may add up in another order.
    assert_identical(tensors(qmodel), tensors(walk(model, batches, lambda *_: None)))


def test_what_is_stored_lies_in_memory_as_a_checkpoint_gives_it_back() -> None:
    stored = []

    def look(gm: GraphModule, context: Context) -> None:
        for run in walk_blocks(gm, context):
            for weight in quantized_weights(run.module, context.plan):
                codes = tensor_of(run.module, weight.codes).clone(memory_format=torch.channels_last)
                run.store(weight.codes, codes)
                stored.append(codes)
                for module in (run.module, gm):
                    assert tensor_of(module, weight.codes).stride() == torch.empty(codes.shape).stride()

    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 3)))
    walk(model, [rand(4, 3, 6, 6), rand(4, 3, 6, 6)], look)
    assert all(codes.stride() != torch.empty(codes.shape).stride() for codes in stored)


@on_devices
@of_both_units
@pytest.mark.parametrize("name", ["cnn", "attention", "skips", "turned"])
def test_a_change_in_a_block_is_seen_by_those_after_it(name: str, unit: Unit, device: torch.device) -> None:
    changed: dict[str, Tensor] = {}

    def look(gm: GraphModule, context: Context) -> None:
        unchanged, shared = copy_graph(gm), shared_tensors(gm)
        seen = 0
        for run in walk_blocks(gm, context, unit=unit):
            given = context.data.inputs(1)
            assert_identical(run.reference_inputs(1), values(context.float_graph, run.block.inputs, given))
            assert_identical(run.inputs(1), values(gm, run.block.inputs, given))
            seen += differ(run.inputs(1), values(unchanged, run.block.inputs, given))
            outputs = run.outputs(1)
            weights = [weight for weight in quantized_weights(run.module, context.plan) if weight.codes not in shared]
            for weight in weights:
                codes = stored_tensors(run.module)[weight.codes]
                run.store(weight.codes, codes // 2)
                changed[weight.codes] = codes // 2
            assert_identical(run.learned, {name: stored_tensors(run.module)[name] for name in run.learned})
            assert differ(run.outputs(1), outputs) is bool(weights)
            assert_identical(run.outputs(1), values(gm, run.block.made, given))
        assert seen
        assert_identical({codes: stored_tensors(gm)[codes] for codes in changed}, changed)

    model, batches = case(name, device)
    qmodel = walk(model, batches, look)
    assert changed
    assert_identical({codes: tensors(qmodel)[codes] for codes in changed}, changed)


def differ(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return any(isinstance(x, Tensor) and not torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_validation_error_is_that_of_what_the_block_makes() -> None:
    def look(gm: GraphModule, context: Context) -> None:
        for run in walk_blocks(gm, context):
            (batch,) = context.data.validation
            (y,), (t,) = run.outputs(batch), run.targets(batch)
            expected = float((y - t).square().sum() / t.square().sum())
            assert run.validation_error() == pytest.approx(expected)
            assert run.validation_error(run.targets) == 0.0
            assert run.validation_error(lambda b: [2 * x for x in run.targets(b)]) == pytest.approx(1)  # noqa: B023

    walk(cnn(), images(4, 4, 4), look)


def test_the_validation_error_does_not_depend_on_how_samples_are_divided_into_batches() -> None:
    """Of the two samples that are not learned from, the last one is small, and its relative error large."""
    samples = torch.cat([images(15)[0], 0.05 * images(1)[0]])
    found: list[list[float]] = []

    def look(gm: GraphModule, context: Context) -> None:
        found.append([run.validation_error() for run in walk_blocks(gm, context)])

    for sizes in ((14, 2), (15, 1)):
        walk(cnn(), list(samples.split(sizes)), look, INT8_STATIC)
    whole, apart = found
    assert whole == pytest.approx(apart, rel=1e-3)  # a sum in another order may round a value to another code


def test_an_error_counts_every_floating_point_value_alike() -> None:
    targets = [torch.tensor([1.0, 0.0]), torch.tensor([3, 4]), torch.tensor([100.0])]
    outputs = [torch.tensor([1.0, 0.5]), torch.tensor([0, 0]), torch.tensor([50.0])]
    assert float(relative_error(outputs, targets)) == 0.25
    assert float(relative_error([7], [8])) == 0.0


def test_values_that_are_not_finite_are_reported_with_their_operators() -> None:
    def look(gm: GraphModule, context: Context) -> None:
        for run in walk_blocks(gm, context):
            if run.index == 1:
                (weight,) = quantized_weights(run.module, context.plan)
                run.store(weight.codes.replace("codes", "scale"), weight.scale(run.module) * torch.inf)
                run.validation_error()

    with pytest.raises(CalibrationError, match=r"after quantization, block\.conv computes non-finite values"):
        walk(cnn(), images(4, 4), look, INT8_WEIGHT_ONLY)


class Keep(nn.Module):
    """Keeps the values it watches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> None:
        self.seen.append(x.clone())


@on_devices
@of_all_cases
def test_every_value_is_watched_once_a_batch_also_block_by_block(name: str, device: torch.device) -> None:
    def look(_: GraphModule, context: Context) -> None:
        gm = context.float_graph
        watched = [node for node in gm.graph.nodes if isinstance(node.meta.get("val"), Tensor) and node.op != "output"]
        kept: list[list[list[Tensor]]] = []
        for by_block in (False, True):
            keep = [Keep() for _ in watched]
            with watching(gm, zip(watched, keep, strict=True)), torch.no_grad():
                if by_block:
                    context.by_block = True
                    run_batches(gm, context)
                else:
                    for batch in range(len(context.data.batches)):
                        gm(*context.data.inputs(batch))
            kept.append([watch.seen for watch in keep])
        assert_identical(kept[1], kept[0])

    model, batches = case(name, device)
    walk(model, batches, look)


# What a walk costs.


def chain(depth: int) -> nn.Module:
    return seeded(nn.Sequential(*(Residual(4) for _ in range(depth))))


def features(*sizes: int) -> list[Tensor]:
    return [rand(n, 4, 8, 8, seed=i) for i, n in enumerate(sizes)]


@of_both_units
def test_what_the_cache_holds_does_not_grow_with_depth(unit: Unit) -> None:
    batches = features(4, 4)
    given = sum(batch.nbytes for batch in batches)

    def peak(depth: int) -> int:
        found = []

        def look(gm: GraphModule, context: Context) -> None:
            assert len(list(walk_blocks(gm, context, unit=unit))) == depth
            found.append(context.cache.peak_host_bytes)

        walk(chain(depth), batches, look)
        return found[0]

    # The batches, and both ends of a block in float and in codes.
    assert peak(4) == peak(8) == 5 * given


class Count(TorchDispatchMode):
    """Counts convolutions."""

    convolutions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.convolutions += "convolution" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("depth", [2, 8])
def test_a_walk_runs_every_operator_once_in_float_and_once_in_codes(depth: int) -> None:
    def look(gm: GraphModule, context: Context) -> None:
        with Count() as count:  # type: ignore[no-untyped-call]
            for _ in walk_blocks(gm, context):
                pass
        # Nobody reads what the last one makes of codes. One of the three batches is divided.
        assert count.convolutions == 4 * (2 * depth - 1)

    walk(chain(depth), features(4, 4, 4), look)


@pytest.mark.parametrize("leave", [False, True], ids=["finished", "left"])
def test_a_walk_leaves_nothing_in_the_cache(leave: bool, tmp_path: Path) -> None:
    def look(gm: GraphModule, context: Context) -> None:
        before = files(tmp_path)
        assert before == 2
        visit = walk_blocks(gm, context)
        assert isinstance(visit, Generator)
        for run in visit:
            if leave and run.index == 2:
                assert files(tmp_path) > before
                break
        visit.close()
        assert files(tmp_path) == before

    walk(chain(4), features(4, 4), look, resources=Resources(cache=CacheBudget(host_bytes=0, directory=tmp_path)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_only_the_block_whose_turn_it_is_is_on_the_device() -> None:
    def look(gm: GraphModule, context: Context) -> None:
        for run in walk_blocks(gm, context):
            for part in (run.reference, run.module):
                assert all(tensor.is_cuda for tensor in stored_tensors(part).values())
            assert all(x.is_cuda for x in (*run.inputs(0), *run.targets(0), *run.outputs(0)))
            (weight,) = quantized_weights(run.module, context.plan)
            run.store(weight.codes, stored_tensors(run.module)[weight.codes] // 2)
            for whole in (context.float_graph, gm):
                assert not any(tensor.is_cuda for tensor in stored_tensors(whole).values())

    walk(chain(3), features(4, 4), look, resources=Resources(device="cuda"))


@on_devices
@pytest.mark.parametrize("config", [ADAROUND, CORRECTION], ids=["adaround", "bias correction"])
@pytest.mark.parametrize("name", ["cnn", "mlp", "turned", "attention"])
def test_what_is_learned_does_not_depend_on_the_budget(
    name: str, config: QuantConfig, device: torch.device, tmp_path: Path
) -> None:
    """With a share of the memory of the host that would be used, the rest goes to disk."""
    model, batches = case(name, device)
    peak, spilled = list[int](), list[int]()
    on_host = Resources(cache=CacheBudget(device_bytes=0))
    unlimited = walk(
        model, batches, lambda _, context: peak.append(context.cache.peak_host_bytes), config, resources=on_host
    )
    for share in (0.0, 0.3):
        limits = Resources(cache=CacheBudget(device_bytes=0, host_bytes=int(share * peak[0]), directory=tmp_path))
        limited = walk(
            model, batches, lambda _, context: spilled.append(context.cache.spilled_bytes), config, resources=limits
        )
        assert_same_result(limited, unlimited)
    assert spilled[0] > spilled[1] > 0


# What it is given.


def context_of(batches: Sequence[Sequence[Any]], *, divisible: bool = True) -> Context:
    context = Context(INT8_STATIC, CalibrationData(ActivationCache()), torch.device("cpu"))
    context.data.add_batches(batches, divisible=divisible)
    return context


def sizes(context: Context) -> list[int]:
    """Return how many samples each batch has."""
    return [len(context.data.inputs(i)[0]) for i in range(len(context.data.batches))]


@pytest.mark.parametrize(
    ("size", "parts"), [(2, [1, 1]), (7, [6, 1]), (8, [7, 1]), (16, [14, 2]), (17, [15, 2]), (64, [56, 8])]
)
def test_a_single_batch_is_divided_so_that_some_of_it_is_validation_data(size: int, parts: list[int]) -> None:
    x, y = rand(size, 3), rand(size, 2) > 0
    context = context_of([[x, 7, y, torch.tensor(2.0), None]])
    assert (sizes(context), context.data.calibration, context.data.validation) == (parts, [0], [1])
    first, second = context.data.inputs(0), context.data.inputs(1)
    assert_identical([torch.cat(pair) for pair in zip(first[::2][:2], second[::2][:2], strict=True)], [x, y])
    assert_identical([first[1], *first[3:]], [7, torch.tensor(2.0), None])
    given = list(context.data.flat_batches(torch.device("cpu")))
    assert_identical(given[0], first)
    assert_identical(given[1], second)


def test_a_single_sample_is_learned_from_and_judged_by() -> None:
    context = context_of([[rand(1, 3)]])
    assert (sizes(context), context.data.calibration, context.data.validation) == ([1], [0], [0])


def test_inputs_that_do_not_count_the_same_samples_are_not_divided() -> None:
    context = context_of([[rand(8, 3), rand(5, 5)]])
    assert (sizes(context), context.data.calibration, context.data.validation) == ([8], [0], [0])


@pytest.mark.parametrize("count", [1, 3])
def test_a_mask_that_all_samples_share_is_left_whole_even_if_it_has_as_many_rows(count: int) -> None:
    model, _ = case("attention")
    mask = (rand(5, 5) > 0) | torch.eye(5, dtype=torch.bool)
    qmodel = quantize(model, ADAROUND, [(rand(5, 5, 8, seed=i), mask) for i in range(count)])
    assert {change.name for change in changes(qmodel) if change.before is not None} == {"first", "second"}


@pytest.mark.parametrize("count", [2, 3, 8, 9, 15, 16, 17, 24])
def test_one_batch_in_eight_is_validation_data_where_batches_cannot_be_divided(count: int) -> None:
    context = context_of([[rand(2, 3, seed=i)] for i in range(count)], divisible=False)
    assert sizes(context) == [2] * count
    assert [*context.data.calibration, *context.data.validation] == list(range(count))
    assert len(context.data.validation) == max(1, count // 8)


@pytest.mark.parametrize("size", [1, 2, 5, 16, 48])
def test_one_sample_in_eight_is_validation_data_however_they_are_divided(size: int) -> None:
    samples = rand(48, 3)
    context = context_of([[batch] for batch in samples.split(size)])
    learned, validation = (
        torch.cat([context.data.inputs(batch)[0] for batch in batches])
        for batches in (context.data.calibration, context.data.validation)
    )
    assert torch.equal(learned, samples[:42])
    assert torch.equal(validation, samples[42:])


@pytest.mark.parametrize(("options", "parts"), [({}, [7, 1]), ({"dynamic_shapes": ({},)}, [8])], ids=["any", "fixed"])
def test_a_batch_is_divided_only_if_the_model_takes_any_number_of_samples(options: Any, parts: list[int]) -> None:
    def look(gm: GraphModule, context: Context) -> None:
        assert sizes(context) == parts
        for run in walk_blocks(gm, context):
            assert run.validation_error() > 0

    walk(cnn(), images(8), look, **options)


@on_devices
@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize("config", [ADAROUND, CORRECTION], ids=["adaround", "bias correction"])
def test_a_single_batch_is_enough(size: int, config: QuantConfig, device: torch.device) -> None:
    model, batch = cnn().to(device), images(size)[0].to(device)
    qmodel = quantize(model, config, [batch])
    assert changes(qmodel)
    assert qmodel(batch).isfinite().all()


def test_batches_of_different_sizes_are_learned_from() -> None:
    qmodel = quantize(cnn(), ADAROUND, images(5, 1, 3))
    assert [change.name for change in changes(qmodel)] == ["stem.0", "block.conv", "head"]


def test_without_data_a_pass_that_learns_says_what_it_lacks() -> None:
    program = torch.export.export(cnn(), (images(2)[0],))
    with pytest.raises(CalibrationError, match="pass calibration_data"):
        qfx.quantize(
            program, looking(lambda _, context: print(context.data.inputs(0)), INT8_WEIGHT_ONLY), progress=False
        )


def test_data_may_come_from_a_generator() -> None:
    def batches() -> Iterator[Tensor]:
        yield from images(4, 4, 4)

    assert_same_result(quantize(cnn(), ADAROUND, batches()), quantize(cnn(), ADAROUND, images(4, 4, 4)))


def test_data_may_come_in_one_buffer_that_is_filled_again() -> None:
    def batches() -> Iterator[Tensor]:
        buffer = torch.empty(4, 3, 8, 8)
        for batch in images(4, 4, 4):
            buffer.copy_(batch)
            yield buffer

    assert_same_result(quantize(cnn(), ADAROUND, batches()), quantize(cnn(), ADAROUND, images(4, 4, 4)))


class Recorder:
    """A loader that keeps what it gave."""

    def __init__(self, loader: DataLoader[Tensor]) -> None:
        self.loader = loader
        self.given: list[Tensor] = []

    def __iter__(self) -> Iterator[Tensor]:
        for batch in self.loader:
            self.given.append(batch)
            yield batch


def test_a_loader_that_shuffles_is_read_once() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = list(images(12)[0])
    loader = Recorder(DataLoader(samples, batch_size=4, shuffle=True, generator=generator))  # type: ignore[arg-type]
    qmodel = quantize(cnn(), ADAROUND, loader)
    assert len(loader.given) == 3
    assert not torch.equal(torch.cat(loader.given), images(12)[0])
    assert_same_result(qmodel, quantize(cnn(), ADAROUND, loader.given))


def test_the_messages_of_a_run_name_modules() -> None:
    def look(gm: GraphModule, context: Context) -> None:
        runs: list[BlockRun] = list(walk_blocks(gm, context))
        assert [run.operators for run in runs] == ["stem.0", "block.conv", "head"]

    walk(cnn(), images(4, 4), look)
