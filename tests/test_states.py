"""A sample of the matrix of model states and outputs; `python -m benchmarks.states` has all of it."""

from __future__ import annotations

import pytest
import torch
from checkpoint_readers import read_checkpoints_here
from torch import nn

from benchmarks.states import Model, contents, difference, outcome

RIGHT = [
    *(("plain", "Ctrl-C in search"), ("hooked", "onnx"), ("patched", "onnx"), ("lazy", "save"), ("lazy", "Ctrl-C")),
    *(("tied", "eager"), ("parametrized", "quantize"), ("wrapped", "qat"), ("float16", "onnx"), ("float64", "eager")),
    *(("adapter", "onnx"), ("adapter merged in place", "search"), ("frozen", "error"), ("plain", "qat")),
]


@pytest.mark.parametrize(("state", "action"), RIGHT)
def test_a_result_is_right_and_the_model_unchanged(state: str, action: str) -> None:
    assert outcome(state, action) == "right"


@pytest.mark.parametrize(("state", "action"), [("lazy", "checkpoint"), ("tied", "gguf")])
def test_transformers_reads_what_a_changed_model_wrote(
    state: str, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf" if action == "gguf" else "compressed_tensors")
    pytest.importorskip("transformers")
    read_checkpoints_here(monkeypatch)
    assert outcome(state, action) == "right"


@pytest.mark.parametrize(
    ("state", "action", "words"),
    [
        ("adapter", "checkpoint", "q_proj: benchmarks.states.Adapter instead of torch.nn"),
        ("training", "check", "training mode"),
        ("traced", "save", "TorchScript"),
        ("offloaded", "onnx", "meta device"),
    ],
)
def test_a_refusal_names_the_cause_and_leaves_all_unchanged(state: str, action: str, words: str) -> None:
    if action == "checkpoint":
        pytest.importorskip("transformers")
    said = outcome(state, action)
    assert words in said
    assert "WRONG" not in said


def test_each_kind_of_change_is_found() -> None:
    def write(model: Model) -> None:
        model.offset[0] = 2

    def replace(model: Model) -> None:
        model.q_proj.weight = nn.Parameter(model.q_proj.weight.detach().clone())

    def attach(model: Model) -> None:
        model.k_proj.register_forward_hook(lambda module, args, output: output)

    def keep(model: Model) -> None:
        model.cache["x"] = torch.ones(1)

    def count(model: Model) -> None:
        model.seen.append(1)

    def differentiate(model: Model) -> None:
        model.q_proj(torch.ones(32)).sum().backward()

    def freeze(model: Model) -> None:
        model.q_proj.weight.requires_grad_(False)

    for change in (write, replace, attach, keep, count, differentiate, freeze):
        model = Model()
        before = contents(model)
        assert not difference(before, contents(model))
        change(model)
        assert difference(before, contents(model)), change.__name__
