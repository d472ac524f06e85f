"""Random models end right, or with an error that names what is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_models import random_model
from tiny import all_but

from benchmarks.random_models import outcome


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", all_but(range(12), range(8, 12)))
def test_a_random_model_is_right_or_refused_by_name(seed: int, tmp_path: Path) -> None:
    found = outcome(seed, tmp_path)
    assert found.what in ("right", "refused"), found.words


def test_a_seed_is_one_model() -> None:
    first, again = random_model(7), random_model(7)
    assert first.words == again.words
    for a, b in zip(first.batches, again.batches, strict=True):
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    for p, q in zip(first.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_seeds_reach_every_kind_of_operator() -> None:
    words = " ".join(random_model(seed).words for seed in range(150))
    kinds = (
        "conv1d",
        "conv2d",
        "conv3d",
        "transposed2d",
        "linear",
        "product",
        "embedding",
        "attention",
        "LSTM",
        "GRU",
        "experts",
        "stack",
        "addmm",
    )
    assert all(kind in words for kind in (*kinds, "depthwise", "grouped", "dilated", "shared layer", "concat", "add"))
