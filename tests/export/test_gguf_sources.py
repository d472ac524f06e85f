"""GGUF files are opened as sources: their values bit for bit, one tensor at a time, or refused by name."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf import EXACT, config, wide_llama
from test_gguf_architectures import in_pairs, written
from test_huggingface import IDS, logits, quantized

import quark_fx as qfx
from quark_fx.checkpoints.gguf_source import GgufSource
from quark_fx.config.quant_config import Override
from quark_fx.errors import CheckpointError, ConfigError

package = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

Q4_0, Q8_0 = EXACT["Q4_0"], EXACT["Q8_0"]
MIXTURE = config(Q4_0).replace(overrides=(Override(pattern="*.down_proj", weight=Q8_0),))
KINDS = {"Q4_0": config(Q4_0), "Q8_0": config(Q8_0), "mixture": MIXTURE}


@cache
def model(kind: str) -> qfx.QuantizedModel:
    return quantized(KINDS[kind], wide_llama())


def changed(
    source: Path,
    path: Path,
    values: dict[str, Any] | None = None,
    tensors: Callable[[str], str | None] = lambda name: name,
    extra: dict[str, np.ndarray[Any, Any]] | None = None,
) -> Path:
    """Write a GGUF file again, with other values of keys, other names of tensors (`None` for none), or more tensors."""
    file = package.GGUFReader(source)
    contents = {key: field for key, field in file.fields.items() if not key.startswith("GGUF.")}
    writer = package.GGUFWriter(path, contents.pop("general.architecture").contents())
    for key, value in (values or {}).items():
        contents.pop(key, None)
        if key == "general.architecture":
            writer.kv_data[0][key].value = value
        elif value is not None:
            writer.add_key_value(key, value, package.GGUFValueType.get_type(value))
    for key, field in contents.items():
        writer.add_key_value(key, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in file.tensors:
        if (name := tensors(tensor.name)) is not None:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    for name, data in (extra or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_what_the_package_decodes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    path = qfx.export.gguf(model(kind), tmp_path / "model.gguf")
    opened: Any = qfx.open_checkpoint(path)
    tensors = {t.name: t for t in package.GGUFReader(path).tensors}
    types = {t.tensor_type.name for t in tensors.values()}
    assert types == {"F32", "Q4_0", "Q8_0"} if kind == "mixture" else {"F32", kind}
    assert len(tensors) == len(dict(opened.named_parameters()))
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"}
    names |= {"ffn_down": "mlp.down_proj", "ffn_up": "mlp.up_proj", "ffn_norm": "post_attention_layernorm"}
    for theirs, ours in names.items():
        stored = tensors[f"blk.1.{theirs}.weight"]
        expected = torch.from_numpy(package.quants.dequantize(stored.data, stored.tensor_type).copy())
        parameter = opened.get_parameter(f"model.layers.1.{ours}.weight")
        heads = {"attn_q": 4, "attn_k": 2}.get(theirs)
        assert torch.equal(parameter if heads is None else in_pairs(parameter, heads), expected), theirs
        assert parameter.dtype is torch.float32
    torch.testing.assert_close(logits(opened), logits(model(kind)), rtol=1e-5, atol=1e-5)


def test_a_quantized_file_can_be_quantized_again_and_the_report_says_so(tmp_path: Path) -> None:
    path = qfx.export.gguf(model("Q8_0"), tmp_path / "model.gguf")
    again = qfx.quantize(path, config(Q4_0), [{"input_ids": IDS}], progress=False)
    assert "already rounded by gguf" in str(again.report())
    qfx.export.gguf(again, tmp_path / "again.gguf")
    torch.testing.assert_close(logits(qfx.open_checkpoint(tmp_path / "again.gguf")), logits(again))
    qfx.export.huggingface(again, tmp_path / "checkpoint")
    assert "already rounded by gguf" in (tmp_path / "checkpoint" / "README.md").read_text()
    halves = qfx.open_checkpoint(path, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in halves.parameters()} == {torch.bfloat16}


def test_a_file_of_floats_was_not_rounded(tmp_path: Path) -> None:
    everything = KINDS["Q8_0"].replace(exclude=("*layers.1*", *KINDS["Q8_0"].exclude))
    path = qfx.export.gguf(quantized(everything, wide_llama()), tmp_path / "model.gguf")
    assert GgufSource.of(path).method == "gguf"
    floats = changed(path, tmp_path / "floats.gguf", {"llama.block_count": 1}, _last)
    assert GgufSource.of(floats).method == ""
    assert "already rounded" not in str(
        qfx.quantize(floats, config(Q4_0), [{"input_ids": IDS}], progress=False).report()
    )


def _last(name: str) -> str | None:
    """Return the name of a tensor of the second layer as one of the first, and none for those of the first."""
    return None if name.startswith("blk.0.") else name.replace("blk.1.", "blk.0.")


@pytest.mark.parametrize(("layers", "scale"), [(2, 256), (46, 16)])
def test_scores_of_gemma_are_scaled_as_in_llama_cpp(layers: int, scale: int, tmp_path: Path) -> None:
    """The file has no key: llama.cpp takes the width of a head, and for 46 layers the hidden size for each head."""
    written("Gemma2", {"head_dim": 256, "sliding_window": 8}, tmp_path / "model.gguf")
    deep = {f"blk.{n}.{name}": t for n in range(1, layers) for name, t in _layer(tmp_path / "model.gguf").items()}
    path = changed(tmp_path / "model.gguf", tmp_path / "deep.gguf", {"gemma2.block_count": layers}, extra=deep)
    assert GgufSource.of(path).config["query_pre_attn_scalar"] == scale


def _layer(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return zeros in the shapes of the tensors of the first layer; keys are their names in the layer."""
    tensors = package.GGUFReader(path).tensors
    shapes = {t.name.removeprefix("blk.0."): t.shape[::-1] for t in tensors if t.name.startswith("blk.0.")}
    return {name: np.zeros(tuple(map(int, shape)), np.float32) for name, shape in shapes.items()}


def test_only_one_tensor_is_decoded_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None is kept while the next one is decoded."""
    path = qfx.export.gguf(model("Q4_0"), tmp_path / "model.gguf")
    earlier, decode = list[weakref.ref[torch.Tensor]](), GgufSource.tensor

    def tensor(self: GgufSource, name: str) -> torch.Tensor:
        assert all(one() is None for one in earlier), name
        values = decode(self, name)
        earlier.append(weakref.ref(values))
        return values

    monkeypatch.setattr(GgufSource, "tensor", tensor)
    opened = qfx.open_checkpoint(path, scratch=tmp_path / "scratch")
    assert len(earlier) == len(dict(opened.named_parameters()))
    assert not list((tmp_path / "scratch").iterdir())


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qfx.export.gguf(model("Q8_0"), tmp_path_factory.mktemp("file") / "model.gguf")


def test_positions_and_sizes_come_from_the_file(file: Path, tmp_path: Path) -> None:
    values = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    opened: Any = qfx.open_checkpoint(changed(file, tmp_path / "linear.gguf", values))
    expected = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    assert opened.config.rope_parameters == expected
    plain: Any = wide_llama().model
    assert torch.equal(opened.model.rotary_emb.inv_freq * 4, plain.model.rotary_emb.inv_freq)
    written("StableLm", {}, tmp_path / "stablelm.gguf")
    path = changed(tmp_path / "stablelm.gguf", tmp_path / "half.gguf", {"stablelm.rope.dimension_count": 8})
    assert GgufSource.of(path).config["rope_parameters"]["partial_rotary_factor"] == 0.5


OTHER_FREQUENCIES = {"rope_freqs.weight": np.array([1, 3, 2, 5, 1, 1, 1, 8], np.float32)}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown architecture": (
        {"values": {"general.architecture": "nobody"}},
        r"architecture 'nobody', which open_checkpoint does not support \(supported: .*granite.*llama.*\); pass the",
    ),
    "another architecture of llama.cpp": (
        {"values": {"general.architecture": "t5"}},
        "models of type t5 are not causal language models",
    ),
    "a part": ({"values": {"split.count": 3}}, r"one of 3 parts .* llama-gguf-split --merge"),
    "a missing tensor": (
        {"tensors": lambda name: None if name == "blk.1.attn_q.weight" else name},
        r"lacks weights for model.layers.1.self_attn.q_proj.weight of the LlamaForCausalLM .* copy or export",
    ),
    "too many layers": ({"values": {"llama.block_count": 10**6}}, "asks for num_hidden_layers=1000000, but the"),
    "wrong sizes": ({"values": {"llama.feed_forward_length": 64}}, r"mlp.gate_proj.weight with shape \(128, 64\), and"),
    "no size": ({"values": {"llama.attention.head_count": 0}}, "does not describe a language model"),
    "heads of no channels": (
        {"values": {"llama.attention.key_length": None, "llama.embedding_length": "wide"}},
        "has an invalid header: |does not describe a language model",
    ),
    "a text for a number": ({"values": {"split.count": "3"}}, "has an invalid header: TypeError"),
    "channels that do not turn": ({"values": {"llama.rope.dimension_count": 8}}, "rotates 8 of 16 channels of a head"),
    "biases": (
        {"extra": {"blk.0.attn_q.bias": np.ones(64, np.float32)}},
        "holds blk.0.attn_q.bias, which LlamaForCausalLM does not have; pass the checkpoint",
    ),
    "divisors and a method": (
        {"extra": OTHER_FREQUENCIES, "values": {"llama.rope.scaling.type": "yarn"}},
        "scales positions in a way that",
    ),
    "positions of another method": ({"values": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type 'yarn'"),
    "other frequencies": ({"extra": OTHER_FREQUENCIES}, "scales positions in a way that"),
    "factors of frequencies": (
        {"extra": {"rope_factors_long.weight": np.ones(8, np.float32)}},
        "scales positions in a way that",
    ),
    "an undecoded type": (
        {"extra": {"a": np.ones(32, np.int8)}},
        "tensors of type I8, which the package gguf does not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_opened_is_refused_by_name(name: str, file: Path, tmp_path: Path) -> None:
    changes, message = REFUSED[name]
    path = changed(file, tmp_path / "model.gguf", **changes)
    with pytest.raises(CheckpointError, match=message) as error:
        qfx.open_checkpoint(path, scratch=tmp_path / "scratch")
    assert str(path) in str(error.value)
    assert not (tmp_path / "scratch").exists(), "nothing was decoded"


def test_a_factor_of_positions_is_linear_without_a_type(file: Path, tmp_path: Path) -> None:
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        path = changed(file, tmp_path / f"{key}.gguf", {f"llama.{key}": 4.0})
        assert GgufSource.of(path).config["rope_parameters"]["factor"] == 4.0
        assert GgufSource.of(path).config["rope_parameters"]["rope_type"] == "linear"


def test_softcaps_are_read(tmp_path: Path) -> None:
    written("Gemma2", {"head_dim": 256, "sliding_window": 8}, tmp_path / "model.gguf")
    values = {"gemma2.attn_logit_softcapping": 7.0, "gemma2.final_logit_softcapping": 3.0}
    config = GgufSource.of(changed(tmp_path / "model.gguf", tmp_path / "other.gguf", values)).config
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (7.0, 3.0)


def test_changed_headers_are_read_or_refused(file: Path, tmp_path: Path) -> None:
    generator, whole = np.random.default_rng(0), np.frombuffer(file.read_bytes(), np.uint8)
    header = int(min(tensor.data_offset for tensor in package.GGUFReader(file).tensors))
    refused = 0
    for number in range(60):
        content = whole.copy()
        places = generator.integers(0, header, 1 + number % 4)
        content[places] = generator.integers(0, 256, len(places))
        (tmp_path / "changed.gguf").write_bytes(content.tobytes())
        try:
            GgufSource.of(tmp_path / "changed.gguf")
        except CheckpointError:
            refused += 1
    assert 0 < refused < 60


def test_damaged_files_and_tensors_that_the_model_lacks_are_named(file: Path, tmp_path: Path) -> None:
    content = file.read_bytes()
    for name, damaged in {"short": content[:-4096], "header": content[:100], "text": b"hello"}.items():
        (tmp_path / f"{name}.gguf").write_bytes(damaged)
        with pytest.raises(CheckpointError, match=rf"{name}.gguf cannot be read as a GGUF file: .*; copy or export"):
            qfx.quantize(tmp_path / f"{name}.gguf", config(Q4_0), [{"input_ids": IDS}], progress=False)
    path = changed(file, tmp_path / "more.gguf", extra={"more.weight": np.ones(8, np.float32)})
    with pytest.warns(UserWarning, match=r"more.gguf holds 1 tensors that the model does not have: more.weight"):
        qfx.open_checkpoint(path)
    with pytest.raises(ConfigError, match="omit factory"):
        qfx.open_checkpoint(file, lambda: torch.nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"model.gguf is a GGUF file; pass it to quantize, or to open_checkpoint"):
        qfx.convert(file, "fp8_dynamic", tmp_path / "out", progress=False)


def test_the_command_line_quantizes_a_file(file: Path, tmp_path: Path) -> None:
    from quark_fx.command_line.subjects import float_subject

    subject = float_subject(str(file))
    assert (subject.gguf, subject.dtype, subject.reads_lines) == (file, "float32", False)
    assert subject.made_up() is not None
    assert json.dumps(subject.config)
