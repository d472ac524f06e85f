"""Attention is found by what it computes, with its keys and values as a cache holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.graph.attention import Attention, find_attentions

HEADS, CHANNELS = 4, 8
WIDTH = HEADS * CHANNELS


class Attend(nn.Module):
    """Self-attention of some heads of keys and values, computed as `mix` says."""

    def __init__(self, mix: Callable[[Tensor, Tensor, Tensor], Tensor], kv_heads: int = HEADS) -> None:
        super().__init__()
        self.mix, self.groups = mix, HEADS // kv_heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * CHANNELS) for n in (HEADS, kv_heads, kv_heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.groups > 1:
            k, v = (t[:, :, None].expand(-1, -1, self.groups, -1, -1).flatten(1, 2) for t in (k, v))
        y: Tensor = self.mix(q, k, v).transpose(1, 2).flatten(2)
        return y


def spelled_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y: Tensor = (q @ k.transpose(-1, -2) * CHANNELS**-0.5).softmax(-1) @ v
    return y


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), -1e9)
    y: Tensor = scores.float().softmax(-1).to(v.dtype) @ v
    return y


def by_columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores transposed: keys are rows, and values on the left of their product."""
    weights = (k @ q.mT).softmax(-2)
    y: Tensor = (v.mT @ weights).mT
    return y


def with_sink(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores = torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)
    y: Tensor = scores.softmax(-1)[..., :-1] @ v
    return y


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y: Tensor = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return y


def in_batches(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    flat = [t.flatten(0, 1) for t in (q, k, v)]
    bias = torch.zeros(1, 1, 1)
    scores = torch.baddbmm(bias, flat[0], flat[1].mT)
    y: Tensor = torch.bmm(scores.softmax(-1), flat[2]).unflatten(0, (-1, HEADS))
    return y


def attentions(model: nn.Module, *inputs: Tensor) -> list[Attention]:
    return list(find_attentions(qfx.capture_graph(model.eval(), inputs).module.graph))


FORMS: dict[str, tuple[Any, int]] = {
    "fused": (F.scaled_dot_product_attention, HEADS),
    "fused, groups": (F.scaled_dot_product_attention, 2),
    "fused, one head": (F.scaled_dot_product_attention, 1),
    "spelled out": (spelled_out, HEADS),
    "spelled out, groups": (spelled_out, 2),
    "spelled out, one head": (spelled_out, 1),
    "masked": (masked, 2),
    "by columns": (by_columns, HEADS),
    "sink": (with_sink, 2),
}


@pytest.mark.parametrize("form", FORMS)
def test_keys_and_values_are_found_before_their_heads_are_repeated(form: str) -> None:
    mix, heads = FORMS[form]
    (found,) = attentions(Attend(mix, heads), torch.randn(2, 5, WIDTH))
    assert found.cached is not None
    for cached in found.cached:
        shape = cached.value.meta["val"].shape
        assert (shape[1], shape[cached.channels]) == (heads, CHANNELS)
        assert (cached.tokens, cached.channels) == (2, 3)
        assert cached.value in cached.reader.all_input_nodes
    keys, values = found.cached
    assert keys.value is not values.value


def test_groups_that_the_operator_repeats_itself_are_not_repeated() -> None:
    model = Attend(grouped, 2)
    model.groups = 1
    (found,) = attentions(model, torch.randn(2, 5, WIDTH))
    assert found.cached is not None
    assert [c.value.meta["val"].shape[1] for c in found.cached] == [2, 2]


def test_heads_in_the_batch_are_found() -> None:
    (found,) = attentions(Attend(in_batches), torch.randn(2, 5, WIDTH))
    assert found.cached is not None
    assert [(c.tokens % 4, c.channels % 4) for c in found.cached] == [(1, 2), (1, 2)]


class Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y: Tensor = self.attention(x, memory, memory, need_weights=False)[0]
        return y


def test_encoders_and_cross_attention_are_found() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True)
    x = torch.randn(2, 5, WIDTH)
    for found in (*attentions(layer, x), *attentions(Cross(), x, torch.randn(2, 7, WIDTH))):
        assert found.cached is not None
        assert [c.value.meta["val"].shape[c.channels] for c in found.cached] == [CHANNELS, CHANNELS]


class OfChannels(nn.Module):
    """Attention of an image's places, whose channels come before them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.conv(x).flatten(2).unflatten(1, (2, 12)).split(4, 2)
        weights = (q.mT @ k).softmax(-1)
        y: Tensor = v @ weights.mT
        return y


def test_channels_may_come_before_tokens() -> None:
    (found,) = attentions(OfChannels(), torch.randn(2, 8, 4, 4))
    assert found.cached is not None
    assert [(c.tokens, c.channels) for c in found.cached] == [(3, 2), (3, 2)]


class Learned(nn.Module):
    """Attends to learned keys."""

    def __init__(self) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.scaled_dot_product_attention(x, self.keys.expand(x.shape[0], -1, -1), x[:, :6])
        return y


class Summed(nn.Module):
    """Scores by content and by place."""

    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (x @ x.mT + x @ self.place(x).mT).softmax(-1) @ x
        return y


class ByLetters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        scores = torch.einsum("bqd,bkd->bqk", x, x)
        y: Tensor = torch.einsum("bqk,bkd->bqd", scores.softmax(-1), x)
        return y


@pytest.mark.parametrize(
    ("model", "reason"),
    [(Learned, "keys are constants"), (Summed, "sum of several products"), (ByLetters, "einsum")],
)
def test_what_a_cache_cannot_hold_has_a_reason(model: type[nn.Module], reason: str) -> None:
    (found,) = attentions(model(), torch.randn(2, 8, WIDTH))
    assert reason in found.reason
    assert found.cached is None


class Pooled(nn.Module):
    """Weights tokens by scores of their own: nothing is a key."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.score(x).mT.softmax(-1) @ x
        return y


def test_pooling_is_no_attention() -> None:
    assert not attentions(Pooled(), torch.randn(2, 5, WIDTH))
