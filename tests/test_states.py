"""A sample of the matrix of model states and outputs; `python -m benchmarks.states` has all of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from benchmarks.states import Model, contents, difference, outcome

RIGHT = [
    *(("plain", "interrupt"), ("hooked", "onnx"), ("patched", "onnx"), ("lazy", "save"), ("lazy", "interrupt")),
    *(("tied", "eager"), ("parametrized", "quantize"), ("wrapped", "qat")),
]


@pytest.mark.parametrize(("state", "action"), RIGHT)
def test_a_result_is_right_and_the_model_unchanged(state: str, action: str) -> None:
    assert outcome(state, action) == "right"


@pytest.mark.parametrize(
    ("state", "action", "words"),
    [
        ("lazy", "checkpoint", "not a Transformers model"),
        ("training", "check", "training mode"),
        ("traced", "save", "TorchScript"),
        ("offloaded", "onnx", "meta device"),
    ],
)
def test_a_refusal_names_the_cause_and_leaves_all_unchanged(state: str, action: str, words: str) -> None:
    said = outcome(state, action)
    assert words in said
    assert "WRONG" not in said


def test_each_kind_of_change_is_found() -> None:
    def write(model: Model) -> None:
        model.offset[0] = 2

    def replace(model: Model) -> None:
        model.first.weight = nn.Parameter(model.first.weight.detach().clone())

    def attach(model: Model) -> None:
        model.second.register_forward_hook(lambda module, args, output: output)

    def keep(model: Model) -> None:
        model.cache["x"] = torch.ones(1)

    def count(model: Model) -> None:
        model.seen.append(1)

    for change in (write, replace, attach, keep, count):
        model = Model()
        before = dict(contents(model))
        assert not difference(before, dict(contents(model)))
        held: list[Tensor] = [model.first.weight]
        change(model)
        assert difference(before, dict(contents(model))), change.__name__
        del held
