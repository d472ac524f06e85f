"""The original model again, of its own class, computes what the quantized graph computes, or an error says why not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny import images, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

import quark_fx as qfx
from quark_fx.config import Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.correspondence import correspond
from quark_fx.formats import FP8_E4M3, INT4, INT8
from quark_fx.graph import target_name
from quark_fx.passes import AWQ, CrossLayerEqualization, SmoothQuant
from quark_fx.presets import BF16, FP8_STATIC, INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY

PER_TOKEN = INT8_DYNAMIC.replace(input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True))


class Layer(nn.Module):
    """A residual block with its own parameters under names no attribute syntax spells, and a stored product."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in-0": nn.Linear(16, 24), "out_0": nn.Linear(24, 16)})
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(x)
        return x + self.parts["out_0"](torch.relu(self.parts["in-0"](h)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Embedding, two blocks, a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def language(*, tied: bool = False) -> Language:
    return seeded(Language(tied=tied))


def require_same(qmodel: qfx.QuantizedModel, model: nn.Module, *batches: Any) -> None:
    """Equal to the bit: the same operators run on the same values."""
    for batch in batches:
        with torch.no_grad():
            torch.testing.assert_close(model(batch), qmodel(batch), rtol=0, atol=0)


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.state_dict().items() if name.endswith(".original") and p.dtype == torch.int8}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        *(INT8_WEIGHT_ONLY, INT4_WEIGHT_ONLY, INT8_DYNAMIC, PER_TOKEN, INT8_STATIC, FP8_STATIC, BF16),
        INT8_STATIC.replace(passes=(*INT8_STATIC.passes, SmoothQuant(), CrossLayerEqualization())),
        INT4_WEIGHT_ONLY.replace(passes=(*INT4_WEIGHT_ONLY.passes, AWQ())),
    ],
    ids=["w8", "w4", "dynamic", "token", "static", "fp8", "bf16", "equalized", "awq"],
)
def test_the_model_computes_what_the_graph_computes(config: QuantConfig, tied: bool) -> None:
    model = language(tied=tied)
    qmodel = quantize(model, config, tokens())
    eager = qmodel.eager()
    assert type(eager) is Language
    assert not eager.training
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    assert all(p.shape == shapes[name] for name, p in eager.state_dict().items() if name in shapes)
    require_same(qmodel, eager, *tokens(4, 1, 6))


def test_the_state_holds_codes_and_the_float_weights_are_gone() -> None:
    model = language()
    eager = quantize(model, INT8_WEIGHT_ONLY, tokens()).eager()
    assert len(codes_of(eager)) == 6
    assert not {
        name for name, p in eager.state_dict().items() if p.is_floating_point() and p.dim() > 1 and p.shape[1] > 1
    }
    assert {p.data_ptr() for p in eager.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_it_is_its_own_whatever_happens_to_the_model_and_the_graph() -> None:
    model = language()
    qmodel = quantize(model, INT8_WEIGHT_ONLY, tokens())
    eager, expected = qmodel.eager(), qmodel(tokens()[0])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    require_same(qmodel, qmodel.eager(), tokens()[0])
    for buffer in qmodel.buffers():
        buffer.zero_()
    torch.testing.assert_close(eager(tokens()[0]), expected, rtol=0, atol=0)


def test_a_copy_knows_its_module_and_a_loaded_model_takes_one(tmp_path: Path) -> None:
    qmodel = quantize(language(tied=True), INT8_STATIC, tokens())
    require_same(qmodel, copy.deepcopy(qmodel).eager(), tokens()[0])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path)
    with pytest.raises(qfx.QuarkError, match="float model of the same architecture"):
        loaded.eager()
    require_same(qmodel, loaded.eager(seeded(Language(tied=True), 7)), *tokens(4, 1))
    with pytest.raises(qfx.QuarkError):
        loaded.eager(nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)).eval())


def test_a_tied_weight_parts_where_its_readers_differ() -> None:
    for override in (
        Override(pattern="op:embedding", weight=None),
        Override(pattern="op:embedding", weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL)),
        Override(pattern="op:linear", weight=None),
    ):
        qmodel = quantize(language(tied=True), INT8_WEIGHT_ONLY.replace(overrides=(override,)), tokens())
        eager: Any = qmodel.eager()
        require_same(qmodel, eager, *tokens(4, 1))
        assert not torch.equal(eager.embed.weight, eager.head.weight)


def test_tied_codes_are_stored_once() -> None:
    eager: Any = quantize(language(tied=True), INT8_WEIGHT_ONLY, tokens()).eager()
    codes = [module.parametrizations.weight.original for module in (eager.embed, eager.head)]
    assert codes[0] is codes[1]


class Borrowed(nn.Module):
    """The head is the embedding's own parameter, read by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.embed(ids)) @ self.embed.weight.t()  # type: ignore[no-any-return]


def test_a_parameter_that_cannot_be_two_things_is_refused() -> None:
    model = seeded(Borrowed())
    qmodel = quantize(model, INT8_WEIGHT_ONLY, tokens())
    require_same(qmodel, qmodel.eager(), *tokens(4, 1))
    for weight in (None, TensorSpec(format=INT8)):
        override = Override(pattern="op:embedding", weight=weight)
        qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(overrides=(override,)), tokens())
        with pytest.raises(qfx.QuarkError, match=r"embed\.weight.*same specs"):
            qmodel.eager()


class Shared(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


def test_a_module_called_twice_has_one_weight_but_may_not_have_two_input_ranges() -> None:
    model = seeded(Shared())
    for config in (INT8_WEIGHT_ONLY, PER_TOKEN):
        qmodel = quantize(model, config, [rand(4, 8)])
        require_same(qmodel, qmodel.eager(), rand(3, 8))
    with pytest.raises(qfx.QuarkError, match=r"linear.*every call"):
        quantize(model, INT8_STATIC.replace(bias=None), [rand(4, 8)]).eager()


class Functional(nn.Module):
    """A product with a parameter of its own, beside a use of the input in float."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.matrix)


def test_rounding_what_a_module_also_reads_in_float_is_refused() -> None:
    model = nn.Sequential(seeded(Functional()), nn.Linear(8, 8)).eval()
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)])
    require_same(qmodel, qmodel.eager(), rand(3, 8))
    with pytest.raises(qfx.QuarkError, match=r"aten\.linear.*test_eager\.py.*module 0.*not the only input.*input=None"):
        quantize(model, PER_TOKEN, [rand(4, 8)]).eager()


def test_a_multiplication_that_a_pass_inserted_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sigmoid(), nn.Linear(16, 4)).eval()
    x = [rand(64, 16) * torch.logspace(-2, 2, 16) for _ in range(4)]
    qmodel = quantize(model, INT8_STATIC.replace(passes=(SmoothQuant(explicit=True),)), x)
    assert [n for n in qmodel.graph_module.graph.nodes if target_name(n) == "aten.mul.Tensor"]
    with pytest.raises(qfx.QuarkError, match=r"multiplication.*explicit=True"):
        qmodel.eager()


def test_folded_batch_norms_disappear_into_convolutions_with_or_without_bias() -> None:
    layers = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model = seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)))
    for config in (INT8_WEIGHT_ONLY, INT8_DYNAMIC.replace(exclude=("op:conv",))):
        qmodel = quantize(model, config, images())
        require_same(qmodel, qmodel.eager(), *images(2, 1))
    assert isinstance(model[1], nn.BatchNorm2d)


class OffsetNorm(nn.Module):
    """A norm whose factor is `1 + weight`, which is folded to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


def test_a_constant_that_was_folded_and_scaled_goes_back_to_its_parameter() -> None:
    model = seeded(nn.Sequential(OffsetNorm(), nn.Linear(16, 8)))
    x = [rand(64, 16, seed=i) * torch.logspace(-2, 2, 16) for i in range(4)]
    for passes in ((), (SmoothQuant(alphas=(0.5,)),)):
        qmodel = quantize(model, PER_TOKEN.replace(passes=(*PER_TOKEN.passes, *passes)), x)
        eager: Any = qmodel.eager()
        assert torch.equal(eager[0].weight, model[0].weight) == (not passes)  # type: ignore[arg-type]
        # `1 + (g - 1)` rounds once more than `g`, which may move a code by one step of a token.
        step = 2 * float(x[0].abs().max()) / 127 * float(eager[1].weight.abs().max())
        torch.testing.assert_close(eager(x[0]), qmodel(x[0]), rtol=0, atol=step if passes else 0)


def test_a_parametrized_weight_is_refused_with_the_remedy() -> None:
    model = seeded(nn.Sequential(weight_norm(nn.Linear(8, 8))))
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)])
    with pytest.raises(qfx.QuarkError, match="remove the parametrization"):
        qmodel.eager()


def test_stacked_experts_are_stored_as_codes() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ParameterList([torch.zeros(3, 8, 6)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.stack[0])

    model = seeded(Experts())
    config = QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=4))
    qmodel = quantize(model, config, [rand(3, 5, 8)])
    eager: Any = qmodel.eager()
    require_same(qmodel, eager, rand(3, 5, 8, seed=3))
    assert parametrize.is_parametrized(eager.stack, "0")


def test_export_shows_the_operators_and_compile_runs_them() -> None:
    eager = quantize(language(), PER_TOKEN, tokens()).eager()
    x = tokens()[0]
    graph = torch.export.export(eager, (x,)).graph
    names = [target_name(node) for node in graph.nodes]
    assert names.count("quark_fx.dequantize.default") == 6 + 5
    assert names.count("quark_fx.quantize.default") == 5
    compiled = torch.compile(eager, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))


class Fused(nn.BatchNorm2d):
    """A batch norm that does more than its operator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_a_batch_norm_that_does_more_is_refused() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), Fused(4)))
    with pytest.raises(qfx.QuarkError, match=r"batch_norm.*module 1.*conv2d"):
        quantize(model, INT8_WEIGHT_ONLY, images()).eager()


class Locked(nn.Linear):
    """A module that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("locked")


def test_a_module_that_cannot_be_copied_quantizes_all_the_same() -> None:
    qmodel = quantize(Locked(4, 4).eval(), INT8_WEIGHT_ONLY, [rand(2, 4)])
    with pytest.raises(qfx.QuarkError, match="cannot be copied"):
        qmodel.eager()


def test_the_dtype_stays() -> None:
    eager = quantize(language(), PER_TOKEN, tokens()).eager()
    with pytest.raises(RuntimeError, match="before quantizing"):
        eager.half()


def test_float8_per_channel_on_another_target() -> None:
    config = QuantConfig(weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL), target=Target.TORCH)
    qmodel = quantize(language(), config, tokens())
    require_same(qmodel, qmodel.eager(), tokens()[0])


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, **options,
    )  # fmt: skip
    return seeded(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("config", [INT4_WEIGHT_ONLY, PER_TOKEN], ids=["w4", "w8a8"])
def test_a_language_model_generates(config: QuantConfig) -> None:
    model = llama(tie_word_embeddings=True)
    ids = torch.arange(1, 13).reshape(2, 6)
    qmodel = quantize(model, config, [{"input_ids": ids}])
    eager: Any = qmodel.eager()
    assert type(eager) is transformers.LlamaForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(eager(input_ids=ids).logits, qmodel(input_ids=ids).logits, rtol=0, atol=0)
        # With a cache every step reads one token; without one the whole text, as the graph does.
        text = ids
        for _ in range(5):
            text = torch.cat([text, qmodel(input_ids=text).logits[:, -1:].argmax(-1)], 1)
        generated = eager.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    torch.testing.assert_close(generated, text)


def test_what_the_walk_finds_is_plain_data() -> None:
    qmodel = quantize(language(), INT8_STATIC, tokens())
    assert qmodel.source is not None
    found = correspond(qmodel.source, qmodel.graph_module)
    assert set(found.inputs) == {*(f"layers.{i}.parts.{p}" for i in (0, 1) for p in ("in-0", "out_0")), "head"}
    assert {c.format for name, c in found.constants.items() if name.endswith("weight") and not c.is_float} == {"int8"}
