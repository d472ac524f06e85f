"""Codes of other tools are decoded to their values, tensor by tensor, or refused by name."""

from __future__ import annotations

import copy
import importlib
import json
import operator
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import transformers
from coded_sources import LAYER, awq, gptq, mxfp4
from release_sources import RELEASES, is_draft
from safetensors.torch import load_file, save_file
from seeded_models import seeded
from tiny import quantize
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.checkpoints.decoded import DecodedFiles
from quark_fx.checkpoints.files import CheckpointFiles, MappedFiles, stored_bytes
from quark_fx.checkpoints.open_checkpoint import unread_tensors
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.errors import CheckpointError, ConfigError
from quark_fx.numbers.formats import INT4, UINT4
from quark_fx.numbers.scales import FLOAT16
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import W4A16_RTN

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "vocab_size": 80, "max_position_embeddings": 64}
IDS = torch.arange(12).reshape(2, 6)
WEIGHT = TensorSpec(format=UINT4, granularity=Granularity.GROUP, group_size=32, scale=FLOAT16)
ZERO_POINTS = W4A16_RTN.replace(weight=WEIGHT)
SYMMETRIC = W4A16_RTN.replace(weight=WEIGHT.replace(format=INT4))


def values(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint by their values."""
    config = json.loads((folder / "config.json").read_text())
    decoded = DecodedFiles.of(CheckpointFiles.of(folder), config)
    return {name: decoded.read(name, MappedFiles()) for name in decoded.tensors}


@pytest.fixture(scope="module")
def llama() -> qfx.Session:
    model = seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    return qfx.Session(model, [{"input_ids": IDS}])


def test_decoded_values_fill_a_file_up_to_its_limit(
    llama: qfx.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qfx.export.huggingface(quantize(llama, SYMMETRIC), tmp_path / "codes", format="gptq")
    config = json.loads((tmp_path / "codes" / "config.json").read_text())
    decoded = DecodedFiles.of(CheckpointFiles.of(tmp_path / "codes"), config)
    first, second, third, *_ = decoded.tensors
    size = stored_bytes(decoded.tensors[first].dtype, decoded.tensors[first].shape)
    monkeypatch.setattr("quark_fx.checkpoints.decoded._SHARD", size)
    (tmp_path / "values").mkdir()
    files = decoded.stored(tmp_path / "values", None).files
    assert files[first] == files[second] != files[third]


@pytest.mark.parametrize(
    ("form", "config"),
    [("gptq", SYMMETRIC), ("gptq_v2", ZERO_POINTS), ("awq", ZERO_POINTS), ("compressed-tensors", ZERO_POINTS)],
)
def test_what_the_exporters_write_is_decoded_bit_for_bit(
    form: Literal["gptq", "gptq_v2", "awq", "compressed-tensors"],
    config: QuantConfig,
    llama: qfx.Session,
    tmp_path: Path,
) -> None:
    qmodel = quantize(llama, config)
    qfx.export.huggingface(qmodel, tmp_path / "codes", format=form)
    decoded, spec = values(tmp_path / "codes"), config.weight
    assert spec is not None
    assert isinstance(llama.model, nn.Module)
    for name in ("mlp.gate_proj", "mlp.down_proj", "self_attn.k_proj"):
        original = llama.model.get_parameter(f"model.layers.0.{name}.weight").detach()
        assert torch.equal(decoded[f"model.layers.0.{name}.weight"], quantize_tensor(original, spec).dequantize())
    model = qfx.open_checkpoint(tmp_path / "codes", dtype=torch.float32)
    with torch.no_grad():
        expected = qmodel.eager()(input_ids=IDS).logits
        torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=0, atol=4 * _rounding(expected))
    again = quantize(model, "int8_weight_only", [{"input_ids": IDS}])
    assert "the source was already rounded by" in str(again.report())
    again.save(tmp_path / "saved")
    assert "the source was already rounded by" in str(qfx.load(tmp_path / "saved").report())
    qfx.export.huggingface(again, tmp_path / "again")
    assert "The source was already rounded by" in (tmp_path / "again" / "README.md").read_text()
    assert "the source was" not in str(qmodel.report())


def _rounding(logits: Tensor) -> float:
    """Return a bound of the rounding of two orders of summation."""
    return float(logits.abs().amax()) * torch.finfo(logits.dtype).eps * LLAMA["intermediate_size"]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_with_reordered_inputs_and_zero_points(bits: int, version: int, tmp_path: Path) -> None:
    expected = gptq(tmp_path, bits, version=version)
    decoded = values(tmp_path)
    assert torch.equal(decoded[f"{LAYER}.weight"], expected)
    assert {name.removeprefix(f"{LAYER}.") for name in decoded} == {"weight", "bias", "model.norm.weight"}


def test_a_layer_of_gptq_has_its_own_number_of_bits(tmp_path: Path) -> None:
    other = {rf"+:.*\.{name}": {"bits": bits} for name, bits in (("up_proj", 2), ("gate_proj", 8))}
    expected = gptq(tmp_path, 8, config={"dynamic": other, "bits": 4})
    assert torch.equal(values(tmp_path)[f"{LAYER}.weight"], expected)


def test_a_group_size_of_minus_one_means_all_inputs(tmp_path: Path) -> None:
    expected = gptq(tmp_path, group=64, config={"group_size": -1})
    assert torch.equal(values(tmp_path)[f"{LAYER}.weight"], expected)


def test_experts_of_mxfp4_have_the_values_that_transformers_decodes(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    tensors, decoded = mxfp4(tmp_path / "source"), values(tmp_path / "source")
    qfx.convert(tmp_path / "source", "fp8_dynamic", tmp_path / "out", progress=False)
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("experts.gate_up_proj", "experts.down_proj"):
        expected = module.convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert torch.equal(decoded[name].bfloat16(), expected)
        assert torch.equal(written[name], expected)
        assert torch.equal(decoded[f"{name}_bias"], tensors[f"{name}_bias"])
    assert written["self_attn.q_proj.weight"].dtype is torch.float8_e4m3fn


def test_a_factory_reads_codes_too(tmp_path: Path) -> None:
    expected = gptq(tmp_path)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Module()
            self.model.norm = nn.RMSNorm(64)
            self.model.layers = nn.ModuleList([nn.Module()])
            self.model.layers[0].mlp = nn.ModuleDict({"gate_proj": nn.Linear(64, 96)})

    model = qfx.open_checkpoint(tmp_path, Model, scratch=tmp_path / "scratch")
    assert torch.equal(model.get_parameter(f"{LAYER}.weight"), expected.half().float())
    assert not any((tmp_path / "scratch").iterdir())


@pytest.mark.parametrize("method", ["gptq", "bitsandbytes", None])
def test_a_file_of_floats_next_to_the_configuration_of_codes_is_read_alone(method: str | None, tmp_path: Path) -> None:
    layer = seeded(nn.Linear(8, 4))
    save_file(dict(layer.state_dict()), tmp_path / "adapter.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": method, "bits": 4}}))
    model = qfx.open_checkpoint(tmp_path / "adapter.safetensors", lambda: nn.Linear(8, 4))
    assert torch.equal(model.get_parameter("weight"), layer.weight)


def changed(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def replaced(leaf: str, change: Callable[[Tensor], Tensor]) -> Callable[[Path], None]:
    def apply(tensors: dict[str, Tensor]) -> None:
        tensors[f"{LAYER}.{leaf}"] = change(tensors[f"{LAYER}.{leaf}"])

    return lambda folder: changed(folder, apply)


def without(leaf: str) -> Callable[[Path], None]:
    return lambda folder: changed(folder, lambda tensors: operator.delitem(tensors, f"{LAYER}.{leaf}"))


def configured(**settings: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= settings
        (folder / "config.json").write_text(json.dumps(config))

    return apply


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "unknown bits": (configured(bits=5), "5 bits in the layout 'gptq' of gptq, which quark_fx does not decode"),
    "bits of other words": (configured(bits=8), "g_idx|qweight of shape"),
    "unknown layout": (configured(checkpoint_format="marlin"), "layout 'marlin' of gptq"),
    "layout of another method": (configured(checkpoint_format="gemm"), "layout 'gemm' of gptq"),
    "other groups": (configured(group_size=16), "qzeros of shape"),
    "no groups": (configured(group_size=0), "groups of 0 inputs"),
    "no bits": (configured(bits=None), "does not match the tensors"),
    "damaged pattern": (configured(dynamic={"+:(": {}}), "does not match the tensors"),
    "scales of codes": (replaced("scales", lambda t: t.int()), "scales of I32"),
    "floats as codes": (replaced("qweight", lambda t: t.float()), "qweight of F32"),
    "narrow codes": (replaced("qweight", lambda t: t[:, :-1]), "scales of shape"),
    "short codes": (replaced("qweight", lambda t: t[:-1]), "qweight of shape"),
    "zero points of other groups": (replaced("qzeros", lambda t: t[:1]), "qzeros of shape"),
    "scales of other groups": (replaced("scales", lambda t: t[:1]), "scales of shape"),
    "a group too far": (replaced("g_idx", lambda t: t + 1), "g_idx does not assign"),
    "a negative group": (replaced("g_idx", lambda t: t - 1), "g_idx does not assign"),
    "no zero points": (without("qzeros"), "KeyError: 'qzeros'"),
    "no scales": (without("scales"), "KeyError: 'scales'"),
    "no codes": (without("qweight"), "scales without codes"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_codes_are_refused(name: str, tmp_path: Path) -> None:
    gptq(tmp_path)
    change, message = MALFORMED[name]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        values(tmp_path)
    with pytest.raises(CheckpointError):
        qfx.open_checkpoint(tmp_path)


@pytest.mark.parametrize("kind", ["weights", "inputs"])
def test_other_codes_of_modelopt_are_refused(kind: str, tmp_path: Path) -> None:
    """Its int4 has the dtype of its NVFP4; its AWQ scales inputs."""
    scale = torch.ones(32, 2) if kind == "weights" else torch.ones(32, 2).to(torch.float8_e4m3fn)
    tensors = {"a.weight": torch.zeros(32, 16).byte(), "a.weight_scale": scale, "a.weight_scale_2": torch.ones(())}
    tensors |= {"a.pre_quant_scale": torch.ones(32)} if kind == "inputs" else {}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    message = {"weights": "codes of type U8 with scales of type F32", "inputs": "F8_E4M3 and scales of its inputs"}[
        kind
    ]
    with pytest.raises(
        CheckpointError, match=f"a has ModelOpt .*{message}, which quark_fx does not decode; pass the original float"
    ):
        values(tmp_path)


ALIKE = ("GPT-OSS, MXFP4", "Qwen3-Next, bfloat16", "Qwen3-Next, NVFP4")
"""Releases whose codes, and whose draft layers, other tests decode."""


@pytest.mark.parametrize("release", [pytest.param(r, marks=[pytest.mark.whole] * (r in ALIKE)) for r in RELEASES])
def test_releases_are_decoded_and_keep_their_drafts(release: str, tmp_path: Path) -> None:
    """Values are those of other libraries and of published formulas; experts of drafts, too, stay tensor by tensor."""
    pytest.importorskip("compressed_tensors")
    expected = RELEASES[release](tmp_path)
    for name, value in values(tmp_path).items():
        assert torch.equal(value.to(expected[name].dtype), expected[name])
    with warnings.catch_warnings(action="ignore"):  # the draft layer of the small DeepSeek has another number
        model = qfx.open_checkpoint(tmp_path, dtype=torch.float32)
    unread = unread_tensors(copy.deepcopy(model))
    assert unread is not None
    assert unread.keys() == {name for name in expected if is_draft(name, release)}
    assert all(torch.equal(read(), expected[name].to(read().dtype)) for name, read in unread.items())
    for name, parameter in model.named_parameters():
        if name in expected:
            assert torch.equal(parameter, expected[name].float())


@pytest.mark.parametrize("method", ["awq", "compressed-tensors"])
def test_groups_of_another_size_are_refused_if_their_number_is_equal(method: str, tmp_path: Path) -> None:
    if method == "awq":
        awq(tmp_path)
        configured(group_size=33)(tmp_path)
    else:
        codes = {"a.weight": torch.zeros(4, 64, dtype=torch.int8), "a.weight_scale": torch.ones(4, 2)}
        save_file(codes, tmp_path / "model.safetensors")
        weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 33}
        settings = {"quant_method": method, "format": "int-quantized", "config_groups": {"0": {"weights": weights}}}
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    with pytest.raises(CheckpointError, match="64 inputs, not a multiple of the group size 33"):
        values(tmp_path)


def test_malformed_stacks_are_refused(tmp_path: Path) -> None:
    mxfp4(tmp_path)
    changed(tmp_path, lambda tensors: operator.delitem(tensors, "experts.down_proj_scales"))
    with pytest.raises(CheckpointError, match="KeyError: 'down_proj_scales'"):
        values(tmp_path)
    mxfp4(tmp_path)
    changed(tmp_path, lambda tensors: operator.delitem(tensors, "experts.down_proj_blocks"))
    with pytest.raises(CheckpointError, match="scales without codes"):
        values(tmp_path)


METHODS = sorted(importlib.import_module("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING)


@pytest.mark.parametrize("method", [method for method in METHODS if method not in ("quark_fx", "gguf")])
def test_a_model_that_transformers_loaded_from_codes_is_refused(method: str) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    mapping = importlib.import_module("transformers.quantizers.auto").AUTO_QUANTIZATION_CONFIG_MAPPING
    settings = mapping[method].__new__(mapping[method])
    settings.quant_method = method
    for stored in (settings, {"quant_method": method}):
        model.config.quantization_config = stored
        with pytest.raises(ConfigError, match=f"loaded with weights quantized by {method}; pass the directory"):
            qfx.quantize(model, "int8_dynamic", [{"input_ids": IDS}], progress=False)


@pytest.mark.parametrize(
    "settings",
    [{}, {"bits": 4}, {"quant_method": None}, "int8", object()],
    ids=["empty", "bits", "null", "text", "object"],
)
def test_a_model_whose_configuration_names_no_method_is_float(settings: object) -> None:
    model = seeded(nn.Sequential(nn.Linear(8, 4)))
    model.config = SimpleNamespace(quantization_config=settings)  # type: ignore[assignment]
    qmodel = qfx.quantize(model, "int8_dynamic", [torch.ones(2, 8)], progress=False)
    assert "already rounded" not in str(qmodel.report())


def test_weights_that_are_quantized_when_they_are_loaded_are_floats(tmp_path: Path) -> None:
    """They are read as floats, and not lost to a checkpoint that is written over them."""
    model = seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "quark_fx", "config": "int8_dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = qfx.open_checkpoint(tmp_path)
    assert torch.equal(opened(IDS).logits, model(IDS).logits)
    qmodel = qfx.quantize(opened, "int4_weight_only", [{"input_ids": IDS}], progress=False)
    assert "already rounded" not in str(qmodel.report())
    with pytest.raises(qfx.ExportError, match="would be lost"):
        qfx.export.huggingface(qmodel, tmp_path)
