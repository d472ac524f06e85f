"""Blocks, run one after another, are the graph; and they lie where the rules of `quark_fx.engine.blocks` say."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import calls, cnn, images, mlp, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import quark_fx as qfx
from quark_fx.engine.blocks import Block, Unit, extract, find_blocks
from quark_fx.graph.nodes import named_nodes, placeholders, restore_values, results_of
from quark_fx.graph.operators import argument, operator_row, stored_weight

torchvision = pytest.importorskip("torchvision")
pytest.importorskip("transformers")

from torchvision.models.densenet import DenseNet  # noqa: E402
from torchvision.models.googlenet import Inception  # noqa: E402
from torchvision.models.mobilenetv2 import MobileNetV2  # noqa: E402
from torchvision.models.resnet import BasicBlock, ResNet  # noqa: E402
from torchvision.models.swin_transformer import SwinTransformer  # noqa: E402
from torchvision.models.vision_transformer import VisionTransformer  # noqa: E402

from benchmarks.models import Made, text  # noqa: E402

LARGEST_BLOCK = 16


class UNet(nn.Module):
    """Two levels down, two up; the convolutions of a level are what its skip connection spans."""

    def __init__(self, convolutions: int) -> None:
        super().__init__()
        shapes = [(3, 4), (4, 8), (8, 8), (16, 4), (8, 4)]
        self.first, self.second, self.bottom, self.third, self.last = (
            nn.Sequential(*(self.layer(a if not i else b, b) for i in range(convolutions))) for a, b in shapes
        )

    @staticmethod
    def layer(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        second = self.second(F.max_pool2d(first, 2))
        x = F.interpolate(self.bottom(F.max_pool2d(second, 2)), scale_factor=2)
        x = F.interpolate(self.third(torch.cat([x, second], 1)), scale_factor=2)
        out: Tensor = self.last(torch.cat([x, first], 1))
        return out


class Gated(nn.Module):
    """A layer whose up projection is split into a gate and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        out: Tensor = x + self.down(torch.sigmoid(gate) * value)
        return out


def inception() -> nn.Module:
    modules = [Inception(8, 4, 4, 4, 2, 4, 4), Inception(16, 4, 4, 4, 2, 4, 4)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *modules, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3))


def image(model: Callable[[], nn.Module], size: int) -> Callable[[], Made]:
    return lambda: (model(), [rand(2, 3, size, size)])


def t5() -> Made:
    import transformers

    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    generator = torch.Generator().manual_seed(1)
    source, target = (torch.randint(3, 32, (2, n), generator=generator) for n in (7, 5))
    mask = torch.ones_like(source)
    return transformers.T5Model(config), [{"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}]


_SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA = {**_SMALL, "num_key_value_heads": 1}

ZOO: dict[str, Callable[[], Made]] = {
    "cnn": lambda: (cnn(), images(2)),
    "mlp": lambda: (mlp(), tokens(2)),
    "resnet": image(lambda: ResNet(BasicBlock, [2, 1, 1, 1], num_classes=4), 32),
    "mobilenet": image(
        lambda: MobileNetV2(4, 0.25, inverted_residual_setting=[[1, 8, 1, 1], [6, 8, 2, 2], [6, 16, 1, 2]]), 32
    ),
    "densenet": image(lambda: DenseNet(4, (6, 12), 8, num_classes=4), 32),
    "inception": image(inception, 16),
    "unet": image(lambda: UNet(2), 16),
    "deep unet": image(lambda: UNet(5), 16),
    "vit": image(lambda: VisionTransformer(16, 4, 2, 2, 16, 32, num_classes=3), 16),
    "swin": image(lambda: SwinTransformer([2, 2], 8, [2, 2], [1, 2], [4, 4], num_classes=3), 16),
    "gated": lambda: (nn.Sequential(Gated(), Gated()), [rand(2, 3, 8)]),
    "bert": text("BertModel", "BertConfig", **_SMALL),
    "t5": t5,
    "llama": text("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
    "mixtral": text("MixtralForCausalLM", "MixtralConfig", **_LLAMA, num_local_experts=4),
}
"""Small versions of what the rules are for, each with a batch."""

of_the_zoo = pytest.mark.parametrize("name", ZOO)
of_both_units = pytest.mark.parametrize("unit", Unit)


class Case(NamedTuple):
    """A captured graph, and its flat inputs."""

    gm: GraphModule
    inputs: list[Any]


def case(name: str, device: str | torch.device = "cpu") -> Case:
    return _captured(name, str(device))


@cache
def _captured(name: str, device: str) -> Case:
    model, batches = ZOO[name]()
    batch = pytree.tree_map(lambda x: x.to(device), batches[0])
    return capture(seeded(model).to(device), batch)


def capture(model: nn.Module, batch: Any) -> Case:
    captured = qfx.capture_graph(model, batch)
    args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
    return Case(captured.module, captured.signature.flatten(args, kwargs))


def run_blocks(gm: GraphModule, blocks: Iterable[Block], inputs: Sequence[Any]) -> list[Any]:
    """Run the blocks one after another, keeping nothing but what leaves the last one; return the graph's results."""
    nodes = named_nodes(gm)
    values = {node.name: value for node, value in zip(placeholders(gm), inputs, strict=True)}
    with torch.no_grad():
        for block in blocks:
            part = extract(gm, [nodes[name] for name in block.inputs], [nodes[name] for name in block.outputs])
            values = dict(zip(block.outputs, part(*(values[name] for name in block.inputs)), strict=True))
    return [values[result.name] if isinstance(result, Node) else result for result in results_of(gm)]


def assert_composed(gm: GraphModule, blocks: Sequence[Block], inputs: Sequence[Any]) -> None:
    with torch.no_grad():
        expected = gm(*inputs)
    torch.testing.assert_close(run_blocks(gm, blocks, inputs), list(expected), rtol=0, atol=0, equal_nan=True)


def weighted(gm: GraphModule) -> list[Node]:
    rows = [(node, operator_row(node)) for node in gm.graph.nodes]
    return [node for node, row in rows if row is not None and row.weight is not None]


def activation(node: Node) -> Node | None:
    """Return what a weighted operator reads, `None` for one that reads indices."""
    row = operator_row(node)
    assert row is not None
    return argument(node, row.activations[0]) if row.activations else None


def weight(node: Node) -> str:
    """Return the name of a weighted operator's weight."""
    row = operator_row(node)
    assert row is not None
    stored = stored_weight(node, row)
    assert stored is not None
    return str(stored.node.target)


def sources(node: Node) -> set[Node]:
    """Return `node` and all it is computed from."""
    found, pending = set[Node](), [node]
    while pending:
        if (node := pending.pop()) not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def primary(block: Block) -> list[str]:
    """Return the activations that enter the block."""
    return [name for name in block.inputs if name not in block.shared]


def of_module(blocks: Iterable[Block], prefix: str) -> list[Block]:
    return [block for block in blocks if block.name.startswith(prefix)]


@on_devices
@of_both_units
@of_the_zoo
def test_blocks_run_one_after_another_are_the_graph(name: str, unit: Unit, device: torch.device) -> None:
    gm, inputs = case(name, device)
    blocks = find_blocks(gm, unit)
    assert len(blocks) > 1
    assert [block.outputs for block in blocks[:-1]] == [block.inputs for block in blocks[1:]]
    assert_composed(gm, blocks, inputs)


@of_both_units
@of_the_zoo
def test_every_weighted_operator_is_in_one_block_in_order(name: str, unit: Unit) -> None:
    gm = case(name).gm
    found = [operator for block in find_blocks(gm, unit) for operator in block.operators]
    assert found == [node.name for node in weighted(gm)]


@of_both_units
@of_the_zoo
def test_no_block_is_larger_than_the_limit(name: str, unit: Unit) -> None:
    assert all(1 <= len(block.operators) <= LARGEST_BLOCK for block in find_blocks(case(name).gm, unit))


@of_the_zoo
def test_one_place_of_the_finer_cut_that_one_activation_crosses_separates_two_blocks(name: str) -> None:
    gm = case(name).gm
    edges = {block.inputs for block in find_blocks(gm)}
    units = find_blocks(gm, Unit.OPERATOR)
    assert edges <= {unit.inputs for unit in units}
    assert all(unit.inputs in edges for unit in units if len(primary(unit)) == 1)


@of_the_zoo
def test_operators_next_to_each_other_that_read_one_value_share_a_unit(name: str) -> None:
    gm = case(name).gm
    unit_of = {name: i for i, unit in enumerate(find_blocks(gm, Unit.OPERATOR)) for name in unit.operators}
    for before, after in itertools.pairwise(weighted(gm)):
        together = activation(before) is activation(after) is not None
        assert (unit_of[before.name] == unit_of[after.name]) is together, (before, after)


@of_both_units
@of_the_zoo
def test_what_is_shared_is_what_no_weighted_operator_had_a_part_in(name: str, unit: Unit) -> None:
    gm = case(name).gm
    nodes, operators = named_nodes(gm), set(weighted(gm))
    for block in find_blocks(gm, unit):
        interface = {*block.inputs, *block.outputs}
        assert block.shared == {name for name in interface if not sources(nodes[name]) & operators}
        made = [name for name in block.outputs if name not in block.inputs]
        assert list(block.made) == [name for name in made if sources(nodes[name]) & operators]


@of_both_units
@of_the_zoo
def test_a_value_of_several_tensors_is_never_cut_through(name: str, unit: Unit) -> None:
    gm = case(name).gm
    tuples = {node.name for node in gm.graph.nodes if isinstance(node.meta.get("val"), tuple | list)}
    assert not any(tuples & {*block.inputs, *block.outputs} for block in find_blocks(gm, unit))


@pytest.mark.parametrize("name", ["gated", "mlp"])
def test_the_zoo_has_values_of_several_tensors(name: str) -> None:
    """The test before this one means something."""
    assert bool(calls(case(name).gm, "aten.chunk")) is (name == "gated")


# Where the cuts lie.


def test_the_blocks_of_a_resnet_are_its_residual_blocks() -> None:
    blocks = find_blocks(case("resnet").gm)
    assert [block.name for block in blocks] == [
        "conv1",
        *("layer1.0", "layer1.1", "layer2.0", "layer3.0", "layer4.0"),
        "fc",
    ]
    assert [len(block.operators) for block in blocks] == [1, 2, 2, 3, 3, 3, 1]
    assert all(len(primary(block)) == 1 for block in blocks[1:])


def test_an_inverted_residual_with_a_skip_is_a_block() -> None:
    blocks = find_blocks(case("mobilenet").gm)
    large = [(block.name, len(block.operators)) for block in blocks if len(block.operators) > 1]
    assert large == [("features.1.conv", 2), ("features.3.conv", 3)]
    assert all(len(primary(block)) == 1 for block in blocks[1:])


def test_an_inception_module_is_a_block() -> None:
    blocks = find_blocks(case("inception").gm)
    assert [(block.name, len(block.operators)) for block in blocks] == [("0", 1), ("1", 6), ("2", 6), ("5", 1)]


def test_long_connections_of_a_dense_block_travel_and_short_ones_keep_it_together() -> None:
    """What is read over more than eight convolutions crosses every cut; four layers of two lie below all others."""
    blocks = find_blocks(case("densenet").gm)
    for index, layers in ((1, 6), (2, 12)):
        dense = of_module(blocks, f"features.denseblock{index}")
        assert [len(block.operators) for block in dense] == [1] * (2 * layers - 8) + [8]


def test_a_short_skip_connection_keeps_what_it_spans_together() -> None:
    """The inner skip of the smaller U-net spans two convolutions, the outer one six."""
    gm = case("unet").gm
    blocks = find_blocks(gm)
    assert all(len(primary(block)) == 1 for block in blocks[1:])
    assert max(len(block.operators) for block in blocks) >= 6


def test_a_long_skip_connection_travels_along() -> None:
    """Both skips of the deeper U-net: fifteen convolutions lie under the outer one, five under the inner one."""
    gm = case("deep unet").gm
    first = calls(gm, "aten.relu")[4].name
    under = [block for block in find_blocks(gm) if first in block.inputs and len(block.inputs) > 1]
    assert len(under) > 1
    assert all(len(primary(block)) == 2 for block in under)


@pytest.mark.parametrize(
    ("name", "layers", "halves"),
    [
        ("vit", "encoder.layers.encoder_layer_{}", [("self_attention", 2), ("mlp", 2)]),
        ("swin", "features.1.{}", [("attn", 2), ("mlp", 2)]),
        ("llama", "model.layers.{}", [("self_attn", 4), ("mlp", 3)]),
        ("mixtral", "model.layers.{}", [("self_attn", 4), ("mlp", 3)]),
    ],
)
def test_the_blocks_of_a_pre_norm_transformer_are_the_halves_of_its_layers(
    name: str, layers: str, halves: list[tuple[str, int]]
) -> None:
    for i in range(2):
        layer = layers.format(i)
        blocks = of_module(find_blocks(case(name).gm), layer)
        assert [(block.name, len(block.operators)) for block in blocks] == [(f"{layer}.{h}", n) for h, n in halves]
        assert all(len(primary(block)) == 1 for block in blocks)


def test_a_post_norm_transformer_is_cut_after_its_norms() -> None:
    gm = case("bert").gm
    blocks = of_module(find_blocks(gm), "encoder.layer")
    assert [len(block.operators) for block in blocks] == [4, 2, 4, 2]
    assert [len(primary(block)) for block in blocks] == [1] * 4
    norms = {node.name for node in calls(gm, "aten.layer_norm")}
    assert all(set(primary(block)) <= norms for block in blocks)


@pytest.mark.parametrize("name", ["bert", "llama", "mixtral"])
def test_queries_keys_and_values_share_a_unit(name: str) -> None:
    nodes = named_nodes(case(name).gm)
    units = [unit for unit in find_blocks(case(name).gm, Unit.OPERATOR) if len(unit.operators) == 3]
    modules = [[weight(nodes[operator]).split(".")[-2] for operator in unit.operators] for unit in units]
    assert [[module[0] for module in three] for three in modules] == [["q", "k", "v"]] * 2


@pytest.mark.parametrize("name", ["bert", "t5", "llama"])
def test_the_attention_mask_crosses_cuts_as_a_shared_value(name: str) -> None:
    gm = case(name).gm
    mask = argument(calls(gm, "aten.scaled_dot_product_attention")[0], 3)
    computed = {node.name for node in sources(mask) if node.op == "call_function"}
    crossed = [(computed & set(block.inputs), block) for block in find_blocks(gm) if computed & set(block.inputs)]
    assert len(crossed) > 1
    assert all(values <= block.shared for values, block in crossed)


def test_the_output_of_an_encoder_travels_along_the_decoder() -> None:
    gm = case("t5").gm
    blocks = find_blocks(gm)
    cross = [node for node in weighted(gm) if weight(node).endswith("EncDecAttention.k.weight")]
    (encoded,) = {node.name for key in cross if (node := activation(key)) is not None}
    first = next(i for i, block in enumerate(blocks) if encoded in block.outputs)
    last = max(i for i, block in enumerate(blocks) for node in cross if node.name in block.operators)
    assert last - first > 2
    assert all(encoded in block.inputs for block in blocks[first + 1 : last + 1])


# What no architecture of the zoo has.


class Function(nn.Module):
    """A model that is one function of itself and its input, with eight linear layers to use."""

    def __init__(self, function: Callable[[Any, Tensor], Any], layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layers, x)


def twice(layers: Any, x: Tensor) -> Any:
    y = layers[0](x)
    return x, y, layers[1](y).relu(), y


EDGES: dict[str, Callable[[Any, Tensor], Any]] = {
    "an input and a value within are results, one of them twice": twice,
    "a result is a constant": lambda layers, x: (layers[1](layers[0](x)), layers[2].weight),
    "a result is a number": lambda layers, x: (layers[1](layers[0](x)), 3, None),
    "a result depends on no operator": lambda layers, x: (layers[1](layers[0](x)), x.relu() + 1),
    "a weight is read twice": lambda layers, x: layers[0](layers[1](layers[0](x).relu())),
    "a tuple is held open": lambda layers, x: (
        lambda parts, y: layers[2](y) + torch.cat([parts[1], parts[0]], -1)  # the parts are taken late
    )(layers[0](x).split([1, 3], -1), layers[1](x)),
    "nothing varies": lambda layers, x: layers[1](layers[0](torch.ones(2, 4))),
}


@of_both_units
@pytest.mark.parametrize("function", EDGES.values(), ids=list(EDGES))
def test_blocks_are_the_graph_where(function: Callable[[Any, Tensor], Any], unit: Unit) -> None:
    gm, inputs = capture(seeded(Function(function)), rand(3, 4))
    blocks = find_blocks(gm, unit)
    assert [name for block in blocks for name in block.operators] == [node.name for node in weighted(gm)]
    assert all(len(set(values)) == len(values) for block in blocks for values in (block.inputs, block.outputs))
    assert_composed(gm, blocks, inputs)


@of_both_units
def test_a_graph_without_weighted_operators_is_one_block(unit: Unit) -> None:
    gm, inputs = capture(seeded(Function(lambda layers, x: (x.relu() + x, x.sum()))), rand(3, 4))
    (block,) = find_blocks(gm, unit)
    assert (block.name, block.operators, block.made) == ("", (), ())
    assert_composed(gm, [block], inputs)


def test_a_block_whose_operators_share_no_module_is_named_after_the_first() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            out: Tensor = self.second(y) * self.third(y.relu())
            return out

    blocks = find_blocks(capture(seeded(Crossed()), rand(3, 4)).gm)
    assert [(block.name, len(block.operators)) for block in blocks] == [("first", 1), ("second", 2)]


def test_a_module_that_is_called_again_is_not_a_block_of_its_own() -> None:
    gm, _ = capture(seeded(Function(lambda layers, x: layers[0](layers[1](layers[0](x))))), rand(3, 4))
    assert [block.name for block in find_blocks(gm)] == ["layers.0", "layers.1", "layers.0"]


def test_operators_that_read_one_value_do_not_keep_a_block_too_large() -> None:
    """Four operators, then fourteen that read one value, under two skip connections: there is a cut between."""

    def function(layers: Any, x: Tensor) -> Tensor:
        a, b = layers[0](x), layers[1](x.relu())
        y = layers[3](layers[2](a).relu())
        out: Tensor = sum((layer(y) for layer in layers[6:]), (layers[4](y) + a) * (layers[5](y) + b))
        return out

    gm, inputs = capture(seeded(Function(function, layers=18)), rand(3, 4))
    blocks = find_blocks(gm)
    assert max(len(block.operators) for block in blocks) <= LARGEST_BLOCK
    assert_composed(gm, blocks, inputs)


# Random graphs.

STEPS = ("linear", "linear", "linear", "relu", "add", "cat", "chunk")
Step = tuple[str, int, int]


def build(steps: Sequence[Step], inputs: int, results: int) -> Case:
    """Build a graph of ATen calls; every step names an operator and how far back its operands were made.

    Values are `(3, 4)`; a chunk leaves two halves, which are joined the other way round when the list of steps ends.
    """
    aten = torch.ops.aten
    graph, root = Graph(), nn.Module()
    values = [graph.placeholder(f"x{i}") for i in range(inputs)]
    weights = [rand(4, n, seed=i) for i, n in enumerate((4, 8))]
    for i, weight in enumerate(weights):
        root.register_buffer(f"w{i}", weight)

    def linear(x: Node, weight: int) -> Node:
        return graph.call_function(aten.linear.default, (x, graph.get_attr(f"w{weight}")))

    halves = []
    for kind, i, j in steps:
        a, b = values[-1 - i % len(values)], values[-1 - j % len(values)]
        if kind == "linear":
            values.append(linear(a, 0))
        elif kind == "relu":
            values.append(graph.call_function(aten.relu.default, (a,)))
        elif kind == "add":
            values.append(graph.call_function(aten.add.Tensor, (a, b)))
        elif kind == "cat":
            values.append(linear(graph.call_function(aten.cat.default, ([a, b], -1)), 1))
        else:
            parts = graph.call_function(aten.chunk.default, (a, 2, -1))
            halves.append([graph.call_function(operator.getitem, (parts, k)) for k in (1, 0)])
    joined = [graph.call_function(aten.cat.default, (pair, -1)) for pair in halves]
    graph.output((*values[-results:], *joined))
    gm = GraphModule(root, graph)
    data = [rand(3, 4, seed=10 + i) for i in range(inputs)]
    restore_values(gm, data, [{}] * inputs)
    return Case(gm, list(data))


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), max_size=60),
    inputs=st.integers(1, 3),
    results=st.integers(1, 3),
    unit=st.sampled_from(Unit),
)
def test_blocks_of_any_graph_are_the_graph(steps: list[Step], inputs: int, results: int, unit: Unit) -> None:
    gm, data = build(steps, inputs, results)
    blocks = find_blocks(gm, unit)
    assert_composed(gm, blocks, data)
    assert [name for block in blocks for name in block.operators] == [node.name for node in weighted(gm)]
    nodes, operators = named_nodes(gm), set(weighted(gm))
    for block in blocks:
        interface = [nodes[name] for name in (*block.inputs, *block.outputs)]
        assert not any(isinstance(node.meta["val"], tuple | list) for node in interface)
        assert block.shared == {node.name for node in interface if not sources(node) & operators}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 9), st.integers(0, 9)), min_size=20, max_size=60))
def test_a_block_of_any_graph_is_within_the_limit_or_cannot_be_cut(steps: list[Step]) -> None:
    gm = build(steps, 1, 1).gm
    units = find_blocks(gm, Unit.OPERATOR)
    for block in find_blocks(gm):
        own = [unit for unit in units if set(unit.operators) & set(block.operators)]
        assert len(block.operators) <= LARGEST_BLOCK or len(own) == 1, [len(unit.operators) for unit in own]
