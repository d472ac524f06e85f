"""A sample of `benchmarks.computed_weights`: ways to compute a weight, operators that read it, and forms."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.computed_weights import FORMS, READERS, WAYS, cases, model_of, verdicts

SAMPLE = [
    ("slice", "conv1d"),
    ("chunk", "matmul"),
    ("of a stack", "bmm"),
    ("concatenation", "addmm"),
    ("LoRA", "einsum"),
    ("permuted", "embedding"),
    ("by batch norm", "conv2d"),
    ("weight norm, old", "linear"),
    ("repeated", "depthwise"),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("way", "name"), SAMPLE)
def test_a_computed_weight_has_its_codes_in_every_form(way: str, name: str) -> None:
    assert verdicts(way, name, ("eager", "save", "onnx")) == dict.fromkeys(("eager", "save", "onnx"), "codes")


@pytest.mark.parametrize(
    ("way", "name"),
    [("as stored", "linear"), ("LoRA", "linear"), ("orthogonal", "linear"), ("concatenation", "embedding")],
)
def test_checkpoints_hold_the_codes_of_parametrized_modules(way: str, name: str) -> None:
    pytest.importorskip("compressed_tensors")
    assert verdicts(way, name, FORMS[3:])["checkpoint"] == "codes"


def test_checkpoints_refuse_computed_weights_that_no_module_stores() -> None:
    pytest.importorskip("compressed_tensors")
    refused = verdicts("LoRA", "matmul", FORMS[3:])["checkpoint"]
    assert "its weight is computed from inner.computed.w, inner.computed.a, inner.computed.b; before" in refused
    assert "inner.weight: the kernel of a convolution" in verdicts("weight norm", "conv2d", FORMS[3:])["checkpoint"]


def test_the_cases_cover_every_operator_in_every_way() -> None:
    counts = Counter(way for way, _ in cases())
    assert all(counts[way] == len(READERS) for way in WAYS)
    assert {name for _, name in cases()} == set(READERS)
    assert not model_of("as stored", "linear").training
