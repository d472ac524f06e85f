"""`from_pretrained` of transformers, quantizing what it loads."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import rand, record_of
from torch import Tensor

import quark_fx as qfx

transformers = pytest.importorskip("transformers")

from quark_fx import from_pretrained  # noqa: E402
from quark_fx.from_pretrained import QuarkFxConfig  # noqa: E402

IDS = torch.arange(2 * 9, dtype=torch.int64).reshape(2, 9) % 31 + 1
GROUPS = qfx.presets.W4A16_RTN.weight
assert GROUPS is not None
INT4 = qfx.presets.W4A16_RTN.replace(weight=GROUPS.replace(group_size=16))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a tiny Llama."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    directory = tmp_path_factory.mktemp("llama")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)).save_pretrained(directory)
    return directory


def loaded(directory: Path, *arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    given = {"quantization_config": QuarkFxConfig(*arguments, **options, progress=False)} if arguments else {}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **given, dtype=dtype)


def logits(model: Any, ids: Tensor = IDS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def test_what_is_loaded_computes_what_quantize_makes_of_the_model(llama: Path, tmp_path: Path) -> None:
    """It is the class that was asked for, generates, and its checkpoint is one that transformers reads alone."""
    plain, model = loaded(llama), loaded(llama, INT4)
    assert type(model) is type(plain)
    expected = qfx.quantize(plain, INT4, [{"input_ids": IDS}], progress=False)
    assert torch.equal(logits(model), logits(expected))
    assert not torch.equal(logits(model), logits(plain))
    assert len(model.hf_quantizer.qmodel.report()) == len(expected.report())
    assert model.generate(IDS[:1], max_new_tokens=3, pad_token_id=0).shape == (1, 12)
    assert torch.equal(logits(copy.deepcopy(model)), logits(model))
    with pytest.raises(qfx.ExportError, match=r"write the quantized model with quark_fx\.export\.huggingface"):
        model.save_pretrained(tmp_path / "saved")
    with pytest.raises(qfx.QuarkError, match="resize the float model and quantize it again"):
        model.resize_token_embeddings(40)
    qfx.export.huggingface(model.hf_quantizer.qmodel, tmp_path / "exported")
    assert torch.equal(logits(loaded(tmp_path / "exported")), logits(model))
    with pytest.raises(ValueError, match="quantized with CompressedTensorsConfig but you are passing a QuarkFxConfig"):
        loaded(tmp_path / "exported", INT4)


def test_kernels_run_what_is_loaded(llama: Path) -> None:
    model = loaded(llama, "int8_dynamic", kernels=True)
    assert any(row.integer for row in model.kernel_report)
    torch.testing.assert_close(logits(model), logits(model.hf_quantizer.qmodel), rtol=1e-4, atol=1e-5)


def test_calibration_data_are_learned_from(llama: Path) -> None:
    batches = [{"input_ids": IDS}, {"input_ids": IDS.flip(0, 1)}]
    config = INT4.replace(passes=(qfx.passes.GPTQ(),))
    model = loaded(llama, config, batches)
    expected = qfx.quantize(loaded(llama), config, batches, progress=False)
    assert torch.equal(logits(model), logits(expected))
    assert any(change.changed for change in record_of(model.hf_quantizer.qmodel, "GPTQ").changes)


def test_the_configuration_of_the_model_says_how_it_was_quantized(llama: Path) -> None:
    model = loaded(llama, INT4, dtype=torch.bfloat16)
    assert model.dtype is torch.bfloat16
    shown = model.config.to_dict()["quantization_config"]
    assert shown["quant_method"] == "quark_fx"
    assert qfx.QuantConfig.from_dict(shown["config"]) == INT4
    assert '"quant_method": "quark_fx"' in str(model.config)
    assert QuarkFxConfig.from_dict(shown).to_dict() == shown


def test_a_dictionary_is_a_configuration(llama: Path) -> None:
    """As transformers reads it from the `config.json` of a checkpoint."""
    given = {"quant_method": "quark_fx", "config": "int8_dynamic"}
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=given)
    assert model.hf_quantizer.qmodel.config == qfx.presets.INT8_DYNAMIC


def test_options_are_those_of_quantize() -> None:
    assert {*from_pretrained._OPTIONS} < {*inspect.signature(qfx.quantize).parameters}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (
            ("w4a16_gptq",),
            {},
            qfx.CalibrationError,
            r"needs calibration data: pass batches, as in QuarkFxConfig\(config, b",
        ),
        (("w4a16_rtm",), {}, qfx.ConfigError, "unknown preset 'w4a16_rtm'"),
        ((INT4,), {"kernel": True}, qfx.ConfigError, "has no argument kernel; it has .*did you mean 'kernels'"),
        (
            (INT4,),
            {"memory": "1GiB"},
            qfx.ConfigError,
            r"has no argument memory; .*resources=Resources\(memory=\.\.\.\)",
        ),
        (
            (INT4,),
            {"resources": qfx.Resources(output_dir="x")},
            qfx.ConfigError,
            "takes device, cache, checkpoint, memory of Resources, not output_dir; pass these to quantize",
        ),
        ((INT4,), {"kernels": 1}, qfx.ConfigError, "kernels of QuarkFxConfig must be True or False, not 1"),
    ],
)
def test_arguments_are_refused_before_weights_are_read(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        QuarkFxConfig(*arguments, **options)


@pytest.mark.parametrize("places", ["auto", {"model": "cpu", "lm_head": "cpu"}], ids=["auto", "spelled"])
def test_a_map_to_one_device_is_taken(places: Any, llama: Path) -> None:
    pytest.importorskip("accelerate")
    if torch.cuda.is_available() and places == "auto":
        pytest.skip("the map may name the GPU")
    given = QuarkFxConfig(INT4, progress=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, quantization_config=given, device_map=places)
    assert any(row.weight for row in model.hf_quantizer.qmodel.report())


def test_a_model_over_several_devices_is_refused(llama: Path) -> None:
    pytest.importorskip("accelerate")
    places = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(
        qfx.ConfigError, match=r"over cpu, disk,.*QuarkFxConfig\(\.\.\., resources=Resources\(device='cuda'\)\)"
    ):
        transformers.AutoModelForCausalLM.from_pretrained(
            llama, quantization_config=QuarkFxConfig(INT4), device_map=places
        )


@pytest.mark.parametrize(("modalities", "encodes"), [(("image", "text"), False), ("text", True)])
def test_a_model_that_reads_tokens_and_more_needs_a_batch(modalities: Any, encodes: bool) -> None:
    config = SimpleNamespace(is_encoder_decoder=encodes)
    model: Any = SimpleNamespace(main_input_name="input_ids", input_modalities=modalities, config=config)
    with pytest.raises(
        qfx.CalibrationError, match="takes inputs other than tokens: pass an example batch of its inputs"
    ):
        from_pretrained._example(model)


def test_a_model_that_reads_no_tokens_needs_a_batch(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4)
    transformers.ViTModel(config).save_pretrained(tmp_path)
    read = transformers.ViTModel.from_pretrained
    with pytest.raises(
        qfx.CalibrationError, match="ViTModel takes inputs other than tokens: pass an example batch of its inputs"
    ):
        read(tmp_path, quantization_config=QuarkFxConfig("int8_dynamic", progress=False))
    batch = {"pixel_values": rand(2, 3, 8, 8)}
    model = read(tmp_path, quantization_config=QuarkFxConfig("int8_dynamic", [batch], progress=False))
    assert any(row.weight for row in model.hf_quantizer.qmodel.report())
