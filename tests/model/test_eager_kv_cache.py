"""`eager()` rounds keys and values where attention reads them, and as they enter a cache of transformers."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.errors import QuarkError
from quark_fx.numbers.formats import BF16, FP4_E2M1, FP8_E4M3, INT4, INT8, UINT4
from quark_fx.numbers.scales import CALIBRATED_E4M3_SCALES

transformers = pytest.importorskip("transformers")

IDS = torch.arange(16).reshape(2, 8) * 7 % 64

SPECS = {
    "fp8 per head": TensorSpec(format=FP8_E4M3, granularity=Granularity.HEAD),
    "int8 per head and channel": TensorSpec(format=INT8, granularity=Granularity.CHANNEL),
    "fp8": TensorSpec(format=FP8_E4M3),
    "bf16": TensorSpec(format=BF16),
    "nvfp4": TensorSpec(
        format=FP4_E2M1, granularity=Granularity.GROUP, group_size=16, scale=CALIBRATED_E4M3_SCALES, dynamic=True
    ),
    "uint4 per token": TensorSpec(format=UINT4, granularity=Granularity.TOKEN, dynamic=True),
    "int4 in groups": TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=4, dynamic=True),
}
TOKEN = SPECS["uint4 per token"]


def llama(implementation: str = "sdpa") -> Any:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        attn_implementation=implementation,
    )
    return seeded(transformers.LlamaForCausalLM(config))


@cache
def captured(implementation: str) -> qfx.Session:
    return qfx.Session(llama(implementation), [{"input_ids": IDS}])


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = seeded(transformers.T5ForConditionalGeneration(config))
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_model_with_its_cache_computes_what_the_graph_does(spec: str, implementation: str) -> None:
    qmodel = quantize(captured(implementation), QuantConfig(kv_cache=SPECS[spec]))
    expected, eager = qmodel(input_ids=IDS).logits, qmodel.eager()
    assert not torch.allclose(expected, llama(implementation)(IDS).logits, atol=1e-3)
    for use_cache in (True, False):
        torch.testing.assert_close(eager(IDS, use_cache=use_cache).logits, expected, rtol=0, atol=0)
    begun = eager(IDS[:, :5])
    rest = eager(IDS[:, 5:], past_key_values=begun.past_key_values).logits
    torch.testing.assert_close(rest, expected[:, 5:], rtol=1e-5, atol=1e-5)


def test_what_enters_the_cache_is_rounded_and_stays_as_it_is() -> None:
    qmodel = quantize(captured("sdpa"), QuantConfig(kv_cache=TOKEN))
    eager: Any = copy.deepcopy(qmodel.eager())
    cache = eager(IDS[:, :5]).past_key_values
    layer = cache.layers[0]
    for held in (layer.keys, layer.values):
        levels = [row.unique().numel() for row in held.flatten(0, 2)]
        assert max(levels) <= 16 < eager.model.config.head_dim * 4
    before = [layer.keys.clone(), layer.values.clone()]
    eager(IDS[:, 5:], past_key_values=cache)
    assert "update" not in vars(cache)
    for held, now in zip(before, (layer.keys, layer.values), strict=True):
        torch.testing.assert_close(now[:, :, :5], held, rtol=0, atol=0)


def generated(qmodel: Any, start: Tensor, **inputs: Tensor) -> Tensor:
    """Return what the graph itself generates, greedily, from the whole text each time."""
    name = "decoder_input_ids" if inputs else "input_ids"
    for _ in range(6):
        logits = qmodel(**inputs, **{name: start}).logits
        start = torch.cat([start, logits[:, -1:].argmax(-1)], 1)
    return start


def test_generate_continues_as_the_graph_does() -> None:
    qmodel = quantize(captured("sdpa"), QuantConfig(kv_cache=TOKEN))
    eager: Any = qmodel.eager()
    found = eager.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, do_sample=False)
    assert torch.equal(found, generated(qmodel, IDS)[:, : found.shape[1]])


def test_cross_attention_reads_a_cache_that_was_rounded_once() -> None:
    inputs = {"input_ids": IDS, "decoder_input_ids": IDS[:, :4]}
    qmodel = quantize(t5(), QuantConfig(kv_cache=TOKEN), [inputs])
    assert [row.activation for row in qmodel.report() if row.kind == "attention"] == [str(TOKEN)] * 6
    eager: Any = qmodel.eager()
    # The graph's views are copies, which products read in another order.
    torch.testing.assert_close(eager(**inputs).logits, qmodel(**inputs).logits, rtol=1e-5, atol=1e-5)
    found = eager.generate(IDS, max_new_tokens=6, min_new_tokens=6, do_sample=False, eos_token_id=63)
    assert torch.equal(found, generated(qmodel, torch.zeros(2, 1, dtype=torch.long), input_ids=IDS))


def test_a_stored_model_rounds_in_a_model_that_is_passed(tmp_path: Path) -> None:
    qmodel = quantize(captured("sdpa"), QuantConfig(kv_cache=SPECS["int8 per head and channel"]))
    qmodel.save(tmp_path / "saved")
    eager = qfx.load(tmp_path / "saved").eager(llama())
    torch.testing.assert_close(eager(IDS).logits, qmodel(input_ids=IDS).logits, rtol=0, atol=0)


def test_another_implementation_of_attention_is_refused() -> None:
    eager: Any = quantize(captured("sdpa"), QuantConfig(kv_cache=TOKEN)).eager()
    eager.set_attn_implementation("eager")
    with pytest.raises(QuarkError, match="2 products of activations, but the captured model has 1"):
        eager(IDS)
    eager.set_attn_implementation("sdpa")
    eager(IDS)  # the error left nothing behind


class OfTorch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


def test_products_within_functions_of_torch_are_not_taken_for_none() -> None:
    x = rand(2, 5, 8)
    eager = quantize(seeded(OfTorch()), QuantConfig(kv_cache=TOKEN), [x]).eager()
    with pytest.raises(QuarkError, match="0 products of activations, but the captured model has 1"):
        eager(x)


class Attend(nn.Module):
    """Attention of its own after another one, both in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        y = torch.matmul(q.mul(0.5), k.transpose(2, 3)).softmax(-1).matmul(v)
        y = F.scaled_dot_product_attention(key=y, value=v, query=q)
        return torch.baddbmm(y.flatten(0, 1), y.flatten(0, 1), torch.bmm(y.flatten(0, 1).mT, y.flatten(0, 1)))


@pytest.mark.parametrize("spec", ["int8 per head and channel", "uint4 per token"])
def test_a_module_of_any_kind_with_several_attentions_rounds_each(spec: str) -> None:
    x = rand(2, 5, 8)
    qmodel = quantize(seeded(nn.Sequential(Attend())), QuantConfig(kv_cache=SPECS[spec]), [x])
    assert len([row for row in qmodel.report() if row.kind == "attention" and not row.reason]) == 2
    torch.testing.assert_close(qmodel.eager()(x), qmodel(x), rtol=0, atol=0)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()
        self.after = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(x).unflatten(0, (-1, 2)).transpose(1, 2).flatten(2)
        z: Tensor = self.attend(y)
        return z


def test_calls_with_scales_of_their_own_are_refused_and_measured_ones_are_not() -> None:
    x = rand(2, 5, 8)
    with pytest.raises(QuarkError, match="the calls of module attend round keys and values in different ways"):
        quantize(seeded(Shared()), QuantConfig(kv_cache=SPECS["fp8"]), [x]).eager()
    qmodel = quantize(seeded(Shared()), QuantConfig(kv_cache=TOKEN), [x])
    torch.testing.assert_close(qmodel.eager()(x), qmodel(x), rtol=0, atol=0)


def test_gradients_reach_what_makes_keys_and_values() -> None:
    qmodel = quantize(captured("sdpa"), QuantConfig(kv_cache=SPECS["int8 per head and channel"]))
    eager: Any = qmodel.eager()
    eager.train()
    eager(IDS).logits.square().mean().backward()
    for name in ("k_proj", "v_proj"):
        assert bool(getattr(eager.model.layers[0].self_attn, name).weight.grad.abs().sum() > 0)


class WithCache(nn.Module):
    """Attention with a cache, and `change` between the cache and the product."""

    def __init__(self, change: Any = None, updates: bool = True) -> None:
        super().__init__()
        self.p, self.change, self.updates = nn.Linear(16, 48), change, updates

    def forward(self, x: Tensor, past_key_values: Any = None, again: Any = None) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None and self.updates:
            k, v = past_key_values.update(k, v, 0)
        k = k if self.change is None else self.change(k)
        return F.scaled_dot_product_attention(q, k, v)


class Caching(nn.Module):
    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attend = WithCache(**settings)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        y: Tensor = self.attend(x, past_key_values=past_key_values, again=past_key_values)
        return y


X = rand(2, 5, 16)


def caching(spec: TensorSpec = TOKEN, **settings: Any) -> tuple[Any, Any]:
    qmodel = quantize(seeded(Caching(**settings)), QuantConfig(kv_cache=spec), [X])
    return qmodel, qmodel.eager()


@pytest.mark.parametrize("spec", SPECS)
def test_a_cache_without_a_configuration_given_twice_is_rounded_once(spec: str) -> None:
    qmodel, eager = caching(SPECS[spec])
    cache = transformers.DynamicCache()
    torch.testing.assert_close(eager(X, past_key_values=cache), qmodel(X), rtol=1e-5, atol=1e-5)
    assert "update" not in vars(cache)


def test_keys_that_change_between_the_cache_and_the_product_are_refused() -> None:
    qmodel, eager = caching(TensorSpec(format=INT8), change=lambda k: k * 0.1)
    with pytest.raises(
        QuarkError, match=r"attend changes its keys and values .*Override\(pattern='attend', kv_cache=None"
    ):
        eager(X, past_key_values=transformers.DynamicCache())
    torch.testing.assert_close(eager(X), qmodel(X), rtol=0, atol=0)


class Latent(WithCache):
    """Caches half of what becomes its keys and values."""

    def forward(self, x: Tensor, past_key_values: Any = None, again: Any = None) -> Tensor:
        q, k, v = self.p(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        k, v = k[..., :4], v[..., :4]
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, 0)
        return F.scaled_dot_product_attention(q, torch.cat([k, -k], -1), torch.cat([v, -v], -1))


@pytest.mark.parametrize("spec", ["int8 per head and channel", "uint4 per token"])
def test_a_cache_of_something_else_than_keys_is_refused(spec: str) -> None:
    model = Caching()
    model.attend = Latent()
    qmodel = quantize(seeded(model), QuantConfig(kv_cache=SPECS[spec]), [X])
    eager: Any = qmodel.eager()
    with pytest.raises(
        QuarkError, match="attend caches 2 heads of 4 channels, but the cache at capture had 2 heads of 8"
    ):
        eager(X, past_key_values=transformers.DynamicCache())
    torch.testing.assert_close(eager(X), qmodel(X), rtol=0, atol=0)


def test_keys_that_are_not_of_the_cache_are_rounded_beside_a_cache_that_is_not_empty() -> None:
    qmodel, eager = caching(updates=False)
    cache = transformers.DynamicCache()
    cache.update(rand(2, 2, 3, 8), rand(2, 2, 3, 8), 0)
    torch.testing.assert_close(eager(X, past_key_values=cache), qmodel(X), rtol=0, atol=0)


def test_an_interrupt_leaves_nothing_behind() -> None:
    qmodel, eager = caching()
    q, k, v = rand(3, 2, 2, 5, 8).unbind()
    expected, cache = F.scaled_dot_product_attention(q, k, v), transformers.DynamicCache()

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = eager.attend.p.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        eager(X, past_key_values=cache)
    handle.remove()
    assert "update" not in vars(cache)
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), expected, rtol=0, atol=0)
    torch.testing.assert_close(eager(X), qmodel(X), rtol=0, atol=0)


def test_calls_of_two_threads_that_overlap_do_not_end_each_other() -> None:
    qmodel, eager = caching()
    expected, inside = qmodel(X), threading.Barrier(2, timeout=30)

    def meet(*_: Any) -> None:
        inside.wait()

    eager.attend.p.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(eager, (X, X)):
            # a thread may split sums otherwise than the first one does
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
