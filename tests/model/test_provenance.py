"""What a graph remembers of its model is enough for a model of other weights to compute what the graph computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import Residual, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.nodes import get_attr, parameter, set_parameter, stored_tensors, tensor_of
from quark_fx.graph.pass_manager import graph_pass, run_passes
from quark_fx.graph.provenance import Kind, Rewrite, rewrites
from quark_fx.model.model_directory import document_text
from quark_fx.numbers.formats import INT4, INT8
from quark_fx.passes import (
    AWQ,
    AbsorbHighBias,
    BiasCorrection,
    CrossLayerEqualization,
    SmoothQuant,
    fold_batch_norm,
    fold_constants,
)
from quark_fx.presets import BF16, FP8_STATIC, INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8

GROUPS = QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=8))
PER_TOKEN = INT8_DYNAMIC.replace(input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True))


def network() -> nn.Sequential:
    """Batch norms after convolutions with and without bias, bounds that equalization divides, a residual sum."""
    layers = (
        *(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU6(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        *(nn.ReLU(inplace=True), nn.MaxPool2d(2), Residual(4), nn.SiLU()),
    )
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))


class Experts(nn.Module):
    """A stack of matrices between two norms whose factors are computed from parameters."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(8))
        self.stack = nn.Parameter(torch.zeros(3, 8, 8))
        self.register_buffer("offset", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, (8,)) * (1.0 + self.scale) + self.offset
        return torch.bmm(x, self.stack)


def llama(*, tied: bool) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, tie_word_embeddings=tied,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def text(count: int = 2) -> list[Any]:
    return [{"input_ids": torch.arange(i, i + 12).reshape(2, 6)} for i in range(1, 1 + count)]


def passes(config: QuantConfig, *added: Any) -> QuantConfig:
    return config.replace(passes=(*config.passes, *added))


CASES: dict[str, tuple[Callable[[], nn.Module], QuantConfig, list[Any]]] = {
    "conv int8": (network, passes(INT8_STATIC, CrossLayerEqualization(), AbsorbHighBias()), images()),
    "conv corrected": (network, passes(INT8_STATIC, BiasCorrection()), images(8, 8)),
    "conv dpu": (network, XINT8, images()),
    "conv weights": (network, INT8_WEIGHT_ONLY, images()),
    "mlp": (mlp, passes(INT8_STATIC, SmoothQuant()), tokens()),
    "experts": (Experts, GROUPS, [rand(3, 5, 8)]),
    "llama tied awq": (lambda: llama(tied=True), passes(INT4_WEIGHT_ONLY, AWQ()), text()),
    "llama smooth": (lambda: llama(tied=False), passes(PER_TOKEN, SmoothQuant()), text()),
    "llama explicit": (lambda: llama(tied=False), passes(INT8_STATIC, SmoothQuant(explicit=True)), text()),
    "llama fp8": (lambda: llama(tied=True), FP8_STATIC, text(1)),
    "llama bf16": (lambda: llama(tied=True), BF16, text(1)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stored_model_becomes_a_model_of_other_weights(case: str, tmp_path: Path) -> None:
    make, config, batches = CASES[case]
    torch.manual_seed(0)
    qmodel = quantize(seeded(make()), config, batches)
    expected = qmodel.run_batch(batches[0])
    qmodel.save(tmp_path)
    fresh = seeded(make(), 7)
    before = {name: p.clone() for name, p in fresh.state_dict().items()}
    loaded = qfx.load(tmp_path)
    for eager in (qmodel.eager(), loaded.eager(fresh)):
        with torch.no_grad():
            got = eager(**batches[0], use_cache=False) if isinstance(batches[0], dict) else eager(batches[0])
        for a, b in zip(*(torch.utils._pytree.tree_leaves(x) for x in (got, expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(torch.equal(p, before[name]) for name, p in fresh.state_dict().items())
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again" / "graph.json").read_bytes() == (tmp_path / "graph.json").read_bytes()


def test_a_model_of_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    quantize(seeded(network()), INT8_WEIGHT_ONLY, images()).save(tmp_path)
    loaded = qfx.load(tmp_path)

    def changed(index: int, module: nn.Module) -> Any:
        model: Any = seeded(network())
        model[index] = module.eval()
        return model

    for other, complaint in (
        (changed(8, nn.Tanh()), "module 8 was a SiLU and is Tanh"),
        (changed(0, nn.Conv2d(3, 4, 3)), r"differ in the parameters 0\.bias"),
        (changed(3, nn.Conv2d(4, 4, 1)), r"shape \(4, 4, 3, 3\) that has the shape \(4, 4, 1, 1\)"),
        (seeded(network()[:9]), "module 9 was a AdaptiveAvgPool2d and is missing"),
    ):
        with pytest.raises(qfx.QuarkError, match=complaint):
            loaded.eager(other)


@graph_pass()
def drop_tanh(gm: Any) -> int:
    """Read what is before each tanh, which is wrong, and not what is asked here."""
    found = [node for node in gm.graph.nodes if str(node.target) == "aten.tanh.default"]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)
    return len(found)


@graph_pass()
def read_the_input(gm: Any) -> int:
    """Let the last linear read the input of the graph."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    last = [node for node in gm.graph.nodes if str(node.target) == "aten.linear.default"][-1]
    last.replace_input_with(last.args[0], inputs[0])
    return 1


@graph_pass(exact=False)
def halve_weights(gm: Any) -> int:
    """Store half of each weight under another name."""
    found = [node for node in gm.graph.nodes if str(node.target) == "aten.linear.default"]
    for node in found:
        with gm.graph.inserting_before(node):
            node.replace_input_with(node.args[1], get_attr(gm, "half", parameter(gm, node.args[1]).detach() / 2))
    return len(found)


def test_a_tensor_in_the_place_of_a_parameter_is_that_parameter() -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    for config in (INT8_WEIGHT_ONLY, INT8_WEIGHT_ONLY.replace(exclude=("0",))):
        qmodel = quantize(model, config.replace(passes=(halve_weights,)), [rand(4, 8)])
        torch.testing.assert_close(qmodel.eager()(rand(4, 8)), qmodel(rand(4, 8)), rtol=0, atol=0)


class Bounded(nn.Module):
    """A residual block after a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 4, 3), nn.Hardtanh(0, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.a(x))
        return self.b(y) + y  # type: ignore[no-any-return]


def test_a_clamp_that_saturation_performs_comes_before_its_rounding() -> None:
    """The largest value that its codes stand for may be half a step above the bound."""
    x = [100 * image for image in images()]
    qmodel = quantize(seeded(Bounded()), INT8_STATIC, x)
    quantizer = next(node for node in qmodel.graph_module.graph.nodes if node.meta.get("absorbed"))
    assert [name for name, _ in quantizer.meta["absorbed"]] == ["hardtanh"]
    scale = str(quantizer.args[1].target)
    set_parameter(qmodel.graph_module, scale, tensor_of(qmodel.graph_module, scale) * (1 + 1 / 1024))
    eager: Any = qmodel.eager()
    assert float(eager.act(torch.tensor([9.0]))) > 1
    torch.testing.assert_close(eager(x[0]), qmodel(x[0]), rtol=0, atol=0)


class Parent(nn.Module):
    """A tanh of a module of its own, and one that the parent computes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def test_a_pass_of_anybody_leaves_notes() -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(passes=(drop_tanh,)), [rand(4, 8)])
    assert rewrites(qmodel.graph_module) == (Rewrite("1", "drop_tanh", Kind.LEFT_OUT, "aten.tanh.default"),)
    torch.testing.assert_close(qmodel.eager()(rand(4, 8)), qmodel(rand(4, 8)), rtol=0, atol=0)
    for pass_, other, kind, change in (
        (
            drop_tanh,
            seeded(Parent()),
            Kind.REPLACED,
            r"made module b read a value other than .*test_provenance\.py:\d+\);",
        ),
        (read_the_input, model, Kind.REROUTED, r"made module 2 read a value other than .*activation\.py:\d+\);"),
    ):
        qmodel = quantize(other, INT8_WEIGHT_ONLY.replace(passes=(pass_,)), [rand(4, 8)])
        assert kind in {rewrite.kind for rewrite in rewrites(qmodel.graph_module)}
        with pytest.raises(qfx.QuarkError, match=rf"pass {pass_.__name__} {change}") as raised:
            qmodel.eager()
        assert "aten.tanh.default (" in str(raised.value)


def test_batch_norms_are_left_out_and_their_weights_are_known() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4)))
    graph = quantize(model, INT8_WEIGHT_ONLY.replace(exclude=("*",)), images()).graph_module
    assert [(r.path, r.kind) for r in rewrites(graph)] == [("1", Kind.LEFT_OUT)]
    again, _ = run_passes(graph, [fold_batch_norm, fold_constants])
    assert rewrites(again) == rewrites(graph)


class Attribute(nn.Module):
    """A tensor that is neither parameter nor buffer, multiplied by or added."""

    def __init__(self, *, product: bool) -> None:
        super().__init__()
        self.a, self.matrix, self.product = nn.Linear(8, 8), rand(8, 8, seed=3), product

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.a(x), self.matrix) if self.product else self.a(x).tanh() + self.matrix[0]


def test_a_tensor_that_is_no_parameter_has_to_stay(tmp_path: Path) -> None:
    with pytest.raises(qfx.QuarkError, match="changed the tensor matrix, which is not a parameter of the model"):
        quantize(seeded(Attribute(product=True)), INT8_WEIGHT_ONLY, [rand(4, 8)]).eager()
    qmodel = quantize(seeded(Attribute(product=False)), INT8_WEIGHT_ONLY, [rand(4, 8)])
    qmodel.save(tmp_path)
    loaded, fresh = qfx.load(tmp_path), seeded(Attribute(product=False), 7)
    torch.testing.assert_close(loaded.eager(fresh)(rand(4, 8)), qmodel(rand(4, 8)), rtol=0, atol=0)
    changed = next(name for name, t in stored_tensors(loaded.graph_module).items() if torch.equal(t, fresh.matrix))
    set_parameter(loaded.graph_module, changed, torch.zeros(8, 8))
    with pytest.raises(qfx.QuarkError, match="tensor matrix"):
        loaded.eager(fresh)


def test_a_parametrized_weight_that_stays_in_float_is_kept(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return seeded(nn.Sequential(weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8)))

    model = make()
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(exclude=("0",)), [rand(4, 8)])
    assert sorted(qmodel.kept) == [f"0.parametrizations.weight.original{i}" for i in (0, 1)]
    qmodel.save(tmp_path)
    fresh = make()
    with torch.no_grad():
        for p in fresh.parameters():
            p.mul_(1.5)
    torch.testing.assert_close(qfx.load(tmp_path).eager(fresh)(rand(4, 8)), qmodel(rand(4, 8)), rtol=0, atol=0)


def change(notes: Any, key: str, value: Any) -> None:
    notes[key] = value


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda d: change(d["provenance"]["calls"][1], 0, 5), "module call 1 of the stored graph has the parent 5"),  # type: ignore[arg-type]
        (lambda d: change(d["provenance"], "calls", [[i - 1, "a", "A"] for i in range(300)]), "more than 256"),
        (lambda d: change(d["nodes"][-2], "call", 99), "module call 99"),
        (lambda d: change(d["provenance"], "rewrites", [["a", "b", "c", "d"]]), "'c' is not a valid Kind"),
        (lambda d: change(d["provenance"], "kept", {"t99": "a"}), "t99"),
        (lambda d: change(d["provenance"], "parameters", [1]), "in place of a name"),
        (
            lambda d: change(d["provenance"]["tensors"], "t0", {"folded": {"tensors": ["a"], "undo": []}}),
            "computed constant without",
        ),
        (lambda d: change(d["provenance"]["tensors"], "t0", {"digest": "a"}), "digest 'a'"),
    ],
)
def test_notes_are_held_to_what_is_written(spoil: Callable[[Any], None], complaint: str, tmp_path: Path) -> None:
    quantize(cnn(), INT8_WEIGHT_ONLY, images()).save(tmp_path)
    document = json.loads((tmp_path / "graph.json").read_text())["model"]
    spoil(document)
    (tmp_path / "graph.json").write_text(document_text(document))
    with pytest.raises(qfx.QuarkError, match=complaint):
        qfx.load(tmp_path)


def test_notes_that_do_not_fit_the_model_are_refused_by_name(tmp_path: Path) -> None:
    quantize(cnn(), INT8_WEIGHT_ONLY, images()).save(tmp_path)
    document = json.loads((tmp_path / "graph.json").read_text())["model"]
    for rewrite in (["no.such", "p", "left out", ""], ["", "p", "replaced", ""]):
        document["provenance"]["rewrites"] = [rewrite]
        (tmp_path / "graph.json").write_text(document_text(document))
        with pytest.raises(qfx.QuarkError, match=r"pass p "):
            qfx.load(tmp_path).eager(cnn())


def test_a_deep_network_takes_no_deep_recursion() -> None:
    layers = [layer for _ in range(150) for layer in (nn.Conv2d(2, 2, 1, bias=False), nn.BatchNorm2d(2), nn.ReLU())]
    model = nn.Sequential(*layers).eval()
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(2, 2, 2, 2)], dynamic_shapes=({},))
    assert len(qmodel.report().rows) == 150
