"""Rotations as a pass: what they are worth, what they cost, and that everything behind them still works."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quantize, rand, record_of, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from zoo import ZOO

import quark_fx as qfx
from quark_fx import Granularity, TensorSpec
from quark_fx.graph.attention import find_attentions
from quark_fx.graph.nodes import target_name, value_of
from quark_fx.numbers.formats import INT4, INT16
from quark_fx.numbers.rotation import Rotation
from quark_fx.passes import GPTQ, Rotate, SmoothQuant
from quark_fx.passes.rotate import _channels_of_keys, _multiply_keys
from quark_fx.presets import INT8_STATIC, W4A16_RTN, W8A8_DYNAMIC

TOKENS = {"input_ids": torch.arange(48).reshape(4, 12) % 32}

W4A4 = W4A16_RTN.replace(
    weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL),
    input=TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True),
)


def llama(*, tied: bool = True) -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=32, use_cache=False, tie_word_embeddings=tied)
    model: nn.Module = LlamaForCausalLM(config)
    return seeded(model)


@cache
def tied_llama() -> qfx.Session:
    """Capture the model that several tests quantize as it is."""
    return qfx.Session(llama(), [TOKENS])


def with_outliers(model: Any) -> nn.Module:
    """Let two channels of what norms make be fifty times as large as others, and be read by as much less."""
    readers = {
        "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    }
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, names in readers.items():
                layer.get_submodule(norm).weight[[3, 17]] *= 50
                for name in names:
                    layer.get_submodule(name).weight[:, [3, 17]] /= 50
    return model  # type: ignore[no-any-return]


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(**TOKENS).logits
    return found


def losses(model: nn.Module, *configs: qfx.QuantConfig) -> list[float]:
    """Return the relative squared error of the logits with each configuration."""
    expected, session = logits(model), qfx.Session(model, [TOKENS])
    found = [logits(quantize(session, config)) for config in configs]
    return [float((f - expected).square().sum() / expected.square().sum()) for f in found]


KV4 = qfx.QuantConfig(kv_cache=TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True))


def rotating(config: qfx.QuantConfig, **options: Any) -> qfx.QuantConfig:
    return config.replace(passes=(*config.passes, Rotate(**options)))


def test_outliers_are_spread() -> None:
    model = with_outliers(llama(tied=False))
    after, before = losses(model, rotating(W4A4), W4A4)
    assert after < 0.5 * before


def test_the_factors_of_norms_lose_less_in_activations_than_in_weights() -> None:
    """Those of a trained norm differ: folded into weights, they leave channels of activations as unlike as they are."""
    model = llama(tied=False)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                parameter.mul_(4 * rand(32).abs() + 0.05)
            if name == "model.embed_tokens.weight":
                parameter.div_(4 * rand(32).abs() + 0.05)
    apart, whole = losses(model, rotating(W4A4, overhead=9, streams=False), rotating(W4A4, overhead=9))
    assert apart < 0.8 * whole


def test_scales_before_a_rotation_are_worth_more() -> None:
    model = with_outliers(llama(tied=False))
    passes = (*W4A4.passes, SmoothQuant(rms=True), Rotate(overhead=9, streams=False))
    scaled, rotated = losses(model, W4A4.replace(passes=passes), rotating(W4A4, overhead=9, streams=False))
    assert scaled < 0.5 * rotated


def test_weights_alone_profit_where_nothing_runs_at_run_time() -> None:
    model = llama(tied=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("q_proj.weight", "v_proj.weight", "gate_proj.weight")):
                p[:, 5] *= 8
    plain = W4A16_RTN.replace(weight=W4A4.weight)
    after, before = losses(model, rotating(plain, overhead=0), plain)
    assert after < 0.8 * before


@pytest.mark.parametrize(
    ("config", "tied", "streams"),
    [(W8A8_DYNAMIC, True, True), (INT8_STATIC, False, True), (W4A4, True, True), (W4A4, True, False)],
    ids=["w8a8_dynamic", "int8_static", "w4a4", "w4a4, inputs"],
)
def test_the_rotated_model_is_itself_everywhere(
    config: qfx.QuantConfig, tied: bool, streams: bool, tmp_path: Path
) -> None:
    model = llama(tied=tied)
    passes = tuple(p for p in config.passes if not isinstance(p, SmoothQuant))
    config = rotating(config.replace(passes=passes), overhead=9, streams=streams)
    qmodel = qfx.quantize(model, config, [TOKENS], progress=False, verify=True)
    expected = logits(qmodel)
    assert torch.equal(logits(qmodel.eager()), expected)
    qmodel.save(tmp_path / "stored")
    loaded = qfx.load(tmp_path / "stored")
    assert torch.equal(logits(loaded), expected)
    assert torch.equal(logits(loaded.eager(llama(tied=tied))), expected)
    file = qfx.export.onnx(loaded, tmp_path / "model.onnx")
    assert qfx.verify(loaded, file, [TOKENS]).max_steps <= 1


@pytest.mark.parametrize("name", ["GPT-2", "BERT"])
def test_a_rotated_value_that_is_rounded_for_some_readers_is_the_same_in_modules(name: str) -> None:
    model, batch = seeded(ZOO[name].make()), ZOO[name].batches[0]
    qmodel = quantize(model, rotating(W8A8_DYNAMIC.replace(passes=()), overhead=99), [batch])
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(**batch)[0], qmodel(**batch)[0])


class GatedNorm(nn.Module):
    """Multiplies by a gate and normalizes, as Mamba2 does before it projects."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        x = x * F.silu(gate)
        normal: Tensor = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
        return normal


class Mixer(nn.Module):
    """A projection, what no weight can absorb a rotation of, and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(8, 32), GatedNorm(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.enter(x).chunk(2, dim=-1)
        y: Tensor = self.leave(self.norm(x, gate))
        return y


def test_what_nothing_absorbs_is_rotated_behind_its_norm_where_a_module_reads_it() -> None:
    qmodel = quantize(seeded(Mixer()), rotating(W4A4.replace(exclude=()), overhead=99), [rand(2, 5, 8)])
    assert record_of(qmodel, "Rotate").remark == "2 values are rotated at run time"
    with torch.no_grad():
        assert torch.equal(qmodel.eager()(rand(3, 5, 8)), qmodel(rand(3, 5, 8)))


def test_what_no_module_can_multiply_is_said_so() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.branch, self.leave = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.enter(x))
            y: Tensor = self.leave(x + self.branch(x))
            return y

    qmodel = quantize(seeded(Sums()), rotating(W8A8_DYNAMIC.replace(passes=()), overhead=99), [rand(2, 5, 6)])
    with pytest.raises(qfx.QuarkError, match=r"that a pass multiplies at run time.* overhead=0 in the pass"):
        qmodel.eager()


def test_the_report_says_what_runs_when() -> None:
    qmodel = quantize(tied_llama(), rotating(W4A4, overhead=0))
    record = record_of(qmodel, "Rotate")
    rows = {change.name: change for change in record.changes}
    assert record.rewrites == 2
    assert not record.remark
    assert rows["model.layers.0.self_attn.o_proj"].what == "rotated by a matrix of size 8"
    refused = rows["model.layers.0.mlp.down_proj"]
    assert not refused.changed
    assert refused.what.startswith("skipped: rotating at run time would cost")
    record = record_of(quantize(tied_llama(), rotating(W4A4, overhead=9)), "Rotate")
    assert record.remark == "4 values are rotated at run time"
    record = record_of(quantize(tied_llama(), rotating(W4A4, overhead=9, streams=False)), "Rotate")
    assert record.remark == "6 values are rotated at run time"


def test_blocks_are_rotated_by_one_matrix_of_the_largest_size_that_divides() -> None:
    record = record_of(quantize(tied_llama(), rotating(W4A4, overhead=9, block=14)), "Rotate")
    sizes = {change.name: change.what for change in record.changes if change.changed}
    said = "rotated in blocks by a matrix of size 12, at run time"
    assert sizes["model.layers.0.mlp.down_proj"].startswith(said)  # of 48
    assert sizes["model.layers.0.self_attn.o_proj"] == "rotated by a matrix of size 8"  # of 8
    model = seeded(nn.Sequential(nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 8)))
    weight = W4A4.weight
    config = qfx.QuantConfig(weight=weight, input=W4A4.input, passes=(Rotate(block=4, overhead=99),))
    record = record_of(quantize(model, config, [rand(4, 8)]), "Rotate")
    assert {change.name: change.what for change in record.changes}["2"] == (
        "skipped: 7 channels do not divide into blocks of at most 4; raise block"
    )


def test_operators_are_chosen_by_pattern() -> None:
    record = record_of(quantize(tied_llama(), rotating(W4A4, only=("*.o_proj",))), "Rotate")
    assert {change.name for change in record.changes if change.changed} == {
        "model.layers.0.self_attn.o_proj",
        "model.layers.1.self_attn.o_proj",
    }


def test_what_is_left_in_float_is_not_rotated() -> None:
    config = rotating(W4A4.replace(exclude=(*W4A4.exclude, "*.down_proj")), overhead=9)
    record = record_of(quantize(tied_llama(), config), "Rotate")
    assert not any("down_proj" in change.name for change in record.changes)


def test_seeds_draw_other_matrices() -> None:
    config = W4A4.replace(input=None)
    first, again, other = (logits(quantize(tied_llama(), rotating(config, seed=s))) for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_learning_passes_follow() -> None:
    model = with_outliers(llama(tied=False))
    config = rotating(W4A4)
    after, before = losses(model, config.replace(passes=(*config.passes, GPTQ())), config)
    assert after < before


def test_a_checkpoint_holds_what_weights_absorbed_and_refuses_what_runs_at_run_time(tmp_path: Path) -> None:
    config = W4A16_RTN.replace(weight=W4A4.weight)
    session = qfx.Session(llama(tied=False), [TOKENS])
    held = quantize(session, rotating(config, overhead=0))
    qfx.export.huggingface(held, tmp_path / "held")
    with pytest.raises(qfx.QuarkError, match="overhead=0 in the pass that rotates"):
        qfx.export.huggingface(quantize(session, rotating(config, overhead=9)), tmp_path / "refused")


def test_gradients_flow_through_a_rotation() -> None:
    x = rand(3, 12).double().requires_grad_()
    left, right = rand(3, 3, seed=2).double().requires_grad_(), rand(4, 4, seed=3).double().requires_grad_()
    assert torch.autograd.gradcheck(torch.ops.quark_fx.rotate, (x, left, right))


@pytest.mark.parametrize("fused", [True, False])
def test_rotated_keys_leave_attention_what_it_is(fused: bool) -> None:
    model: Any = llama()
    model.set_attn_implementation("sdpa" if fused else "eager")
    # The largest integers: what is left is what rotating adds.
    exact = qfx.QuantConfig(kv_cache=TensorSpec(format=INT16, granularity=Granularity.TOKEN, dynamic=True))
    session = qfx.Session(model, [TOKENS])
    qmodel = quantize(session, rotating(exact))
    assert [change.what for change in record_of(qmodel, "Rotate").changes] == [
        "rotated queries and keys by a matrix of size 8, at run time"
    ] * 2
    rotations = [node for node in qmodel.graph_module.graph.nodes if target_name(node) == "quark_fx.rotate.default"]
    assert len(rotations) == 4
    torch.testing.assert_close(logits(qmodel), logits(quantize(session, exact)), rtol=0, atol=2e-4)
    # Queries of four heads, and keys of two, before they are repeated.
    assert sorted(value_of(qmodel.graph_module, node).shape[1] for node in rotations) == [2, 2, 4, 4]


def test_rotated_keys_are_exact_to_float_rounding() -> None:
    model = llama()
    captured = qfx.capture_graph(model, TOKENS).module
    before, found = captured(TOKENS["input_ids"]), list(find_attentions(captured.graph))
    for attention in found:
        size = _channels_of_keys(captured, attention)
        assert size == 8
        _multiply_keys(captured, attention, Rotation.random(size, torch.Generator().manual_seed(0)))
    captured.recompile()
    after = captured(TOKENS["input_ids"])
    assert not torch.equal(after[0], before[0])
    torch.testing.assert_close(after[0], before[0], rtol=1e-5, atol=1e-5)


def test_keys_are_rotated_only_where_they_are_quantized() -> None:
    def changed(config: qfx.QuantConfig, **options: Any) -> list[str]:
        changes = record_of(quantize(tied_llama(), rotating(config, **options)), "Rotate").changes
        return [change.name for change in changes if change.changed]

    names = [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert changed(KV4) == names
    assert changed(KV4, keys=False) == changed(KV4, overhead=0) == []
    assert changed(KV4.replace(exclude=("*.0.self_attn",))) == names[1:]
    assert changed(KV4, only=("*.0.*",)) == names[:1]
    assert not {*names} & {*changed(W4A4)}


def test_an_outlier_of_keys_is_spread() -> None:
    model: Any = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 4
            layer.self_attn.k_proj.weight[3::8] *= 30
            layer.self_attn.q_proj.weight[3::8] /= 30
    after, before = losses(model, rotating(KV4), KV4)
    assert after < 0.5 * before


class Odd(nn.Module):
    """An attention whose keys cannot be rotated."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.p, self.kind = nn.Linear(8, 8), kind
        self.asked = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Any:
        k = self.p(x)
        if self.kind == "its keys and values are the same tensor":
            return F.scaled_dot_product_attention(x, k, k)
        if self.kind == "its keys and queries are the same tensor":
            return F.scaled_dot_product_attention(k, k, x)
        if self.kind == "its queries are constants of the model":
            return F.scaled_dot_product_attention(self.asked, k, x)
        if self.kind == "its keys are an output of the model":
            return F.scaled_dot_product_attention(x, k, x), k
        return x.mT @ (k @ x.mT).softmax(-2)


@pytest.mark.parametrize(
    "reason",
    [
        "its keys and values are the same tensor",
        "its keys and queries are the same tensor",
        "its queries are constants of the model",
        "its keys are an output of the model",
        "the channels of its queries and keys are not their last dimension",
    ],
)
def test_keys_that_stay_as_they_are_have_a_reason(reason: str) -> None:
    qmodel = quantize(Odd(reason).eval(), rotating(KV4), [rand(2, 5, 8)])
    assert [change.what for change in record_of(qmodel, "Rotate").changes] == [f"skipped: {reason}"]


def test_rotated_keys_enter_a_cache_once() -> None:
    qmodel = quantize(tied_llama(), rotating(KV4))
    eager: Any = qmodel.eager()
    ids, expected = TOKENS["input_ids"], logits(qmodel)
    torch.testing.assert_close(eager(ids).logits, expected, rtol=1e-5, atol=1e-5)
    begun = eager(ids[:, :7], use_cache=True).past_key_values
    rest = eager(ids[:, 7:], past_key_values=begun, use_cache=True).logits
    torch.testing.assert_close(rest, expected[:, 7:], rtol=1e-4, atol=1e-4)
