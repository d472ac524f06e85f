"""Heads, and adapters next to other operators: structure decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from test_placement import build
from tiny import quantize, rand
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from benchmarks import heads
from quark_fx.plan.placement import plan_quantization
from quark_fx.presets import INT8_STATIC, INT8_WEIGHT_ONLY, W4A16_RTN

RETURNED: dict[str, tuple[bool, Callable[[Any, Tensor], Any]]] = {
    "as it is": (True, lambda m, x: x),
    "the last token": (True, lambda m, x: x[torch.arange(len(x)), x[:, :, 0].argmax(-1)]),
    "a slice": (True, lambda m, x: x[:, -1]),
    "gathered": (True, lambda m, x: x.gather(1, torch.zeros_like(x[:, :1], dtype=torch.long))),
    "chosen by a mask": (True, lambda m, x: x[x[:, :, 0] > 0]),
    "parts": (True, lambda m, x: [part.squeeze(-1) for part in x.split(1, -1)]),
    "twice": (True, lambda m, x: {"logits": x, "probabilities": x.softmax(-1)}),
    "with a bias of its own": (True, lambda m, x: x + m.shift),
    "masked": (True, lambda m, x: x.masked_fill(x < 0, -1e9)),
    "capped": (True, lambda m, x: F.relu(torch.tanh(x / 30) * 30)),
    "its largest": (True, lambda m, x: x.topk(2, -1).values),
    "sorted": (True, lambda m, x: x.sort(-1)),
    "its index": (True, lambda m, x: x.argmax(-1)),
    "summed": (True, lambda m, x: (x.sum(1), x.mean())),
    "pooled": (True, lambda m, x: (x.amax(1), x.max(1).values, x.logsumexp(-1))),
    "where": (True, lambda m, x: torch.where(x > 0, x, -1e9)),
    "where, zeros": (True, lambda m, x: torch.where(x > 0, x, torch.zeros_like(x))),
    "where, another value": (False, lambda m, x: torch.where(x > 0, x, m.read)),
    "with a loss": (True, lambda m, x: (x, F.cross_entropy(x[:, 0], torch.zeros_like(x[:, 0, 0]).long()))),
    "with an adapter": (True, lambda m, x: x + m.up(m.down(m.read)) * 2),
    "read again": (False, lambda m, x: (x, m.again(x))),
    "added to another value": (False, lambda m, x: x + m.read),
    "a norm": (False, lambda m, x: F.layer_norm(x, (8,))),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_layer_that_makes_an_output_is_a_head(name: str) -> None:
    is_head, function = RETURNED[name]

    def run(m: Any, x: Tensor) -> Any:
        m.__dict__["read"] = torch.relu(m.body(x))
        return function(m, m.head(m.read))

    layers = {name: nn.Linear(8, 8) for name in ("body", "head", "again")}
    model = build(run, **layers, down=nn.Linear(8, 2), up=nn.Linear(2, 8))
    model.shift = nn.Parameter(rand(8))
    operators = plan_quantization(qfx.capture_graph(model, rand(3, 5, 8)).module, INT8_STATIC, quiet=True).operators
    assert ("head" in next(op for op in operators if op.name == "head").kinds) == is_head
    assert "head" not in next(op for op in operators if op.name == "body").kinds


@pytest.mark.parametrize(
    ("function", "routes"),
    [
        (lambda scores: scores.topk(1, -1).indices.squeeze(-1), True),
        (lambda scores: scores.softmax(-1).max(-1).indices, True),
        (lambda scores: scores.sort(-1, descending=True).indices[..., 0], True),
        (lambda scores: scores.min(-1).indices, False),
        (lambda scores: scores.argmin(-1), False),
        (lambda scores: scores.kthvalue(2, -1).indices, False),
    ],
    ids=["topk", "max", "sort", "min", "argmin", "kthvalue"],
)
def test_what_chooses_the_largest_scores_routes(function: Callable[[Tensor], Tensor], routes: bool) -> None:
    """The nearest entry of a table is no route: its distances are computed in low precision like other values."""
    layers = {name: nn.Linear(8, 8) for name in ("scores", "head")}
    model = build(lambda m, x: m.head(m.table(function(m.scores(x)))), **layers, table=nn.Embedding(8, 8))
    operators = plan_quantization(qfx.capture_graph(model, rand(3, 5, 8)).module, INT8_STATIC, quiet=True).operators
    assert ("router" in next(op for op in operators if op.name == "scores").kinds) == routes


SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("LlamaForSequenceClassification", ["score"]),
        ("BertForQuestionAnswering", ["qa_outputs"]),
        ("BertForPreTraining", ["cls.predictions.decoder", "cls.seq_relationship"]),
        ("ElectraForPreTraining", ["discriminator_predictions.dense_prediction"]),
    ],
)
def test_heads_of_transformers_stay_in_float(kind: str, heads: list[str]) -> None:
    model = getattr(transformers, kind)
    model = model(model.config_class(**SHAPE)).eval()
    batch = {"input_ids": torch.randint(1, 64, (2, 6))}
    plan = plan_quantization(qfx.capture_graph(model, batch).module, W4A16_RTN, quiet=True)
    found = {op.name: getattr(op, "reason", "") for op in plan.operators if "head" in op.kinds}
    assert found == dict.fromkeys(heads, "excluded by 'op:head'")


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("mistral", "MistralForSequenceClassification"),
        ("gpt2", "GPT2ForTokenClassification"),
        ("albert", "AlbertForPreTraining"),
        ("vit", "ViTForMaskedImageModeling"),
    ],
)
def test_what_autograd_records_as_a_head_stays_in_float(family: str, kind: str) -> None:
    found = heads.measured(family, kind)
    assert found.names
    assert found.others
    assert not found.quantized


def test_every_class_of_a_family_has_heads_to_measure() -> None:
    assert len(heads.FAMILIES) >= 10
    assert {"bert", "llama", "vit"} <= {family for family, _ in heads.cases()}
    model, inputs = heads.model_of("bert", heads.classes("bert")["BertForPreTraining"]), heads.inputs_of("bert", "")
    assert set(heads.heads_of(model, inputs)) == {
        "cls.seq_relationship.weight",
        "bert.embeddings.word_embeddings.weight",
    }


def test_an_adapter_stays_in_float_next_to_its_operator() -> None:
    model = build(
        lambda m, x: m.head(F.relu(m.base(x) + m.up(m.down(x)) * 2)),
        base=nn.Linear(8, 8),
        down=nn.Linear(8, 2, bias=False),
        up=nn.Linear(2, 8, bias=False),
        head=nn.Linear(8, 4),
    )
    rows = {row.name: row for row in quantize(model, INT8_STATIC, [rand(4, 8)]).report()}
    assert (rows["base"].weight, rows["head"].weight) == ("int8 channel", "int8 channel")
    assert all("low-rank branch next to base" in rows[name].reason for name in ("down", "up"))
    selected = INT8_STATIC.replace(overrides=(qfx.Override(pattern="op:adapter", weight=INT8_STATIC.weight),))
    assert all(not row.reason for row in quantize(model, selected, [rand(4, 8)]).report())


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: m.base(x) + m.up(F.relu(m.down(x))),  # a branch of two layers
        lambda m, x: m.base(F.relu(x)) + m.up(m.down(x)),  # of another value
        lambda m, x: m.base(x) * m.up(m.down(x)),  # a gate
        lambda m, x: m.base(x) + m.wide(m.same(x)),  # not of low rank
    ],
)
def test_other_branches_are_not_adapters(function: Callable[..., Any]) -> None:
    layers = {name: nn.Linear(8, 8) for name in ("base", "wide", "same")}
    model = build(function, **layers, down=nn.Linear(8, 2), up=nn.Linear(2, 8))
    assert all(not row.reason for row in quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)]).report())
