"""A checkpoint that was written is what transformers loads, and computes what the quantized graph computes."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
import yaml
from checkpoint_readers import read_checkpoints_here
from safetensors.torch import load_file, save_file
from tiny import quantize, rand, seeded
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

import quark_fx as qfx
from quark_fx.checkpoints.words import pack, pack_awq, pack_columns
from quark_fx.config.block_formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, NVFP4
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.data.cache_names import returned_cache
from quark_fx.export.checkpoints.experts import as_saved
from quark_fx.export.checkpoints.model_card import model_card
from quark_fx.export.checkpoints.values import unholdable
from quark_fx.numbers import ops
from quark_fx.numbers.formats import (
    FP4_E2M1,
    FP6_E2M3,
    FP8_E4M3,
    FP8_E5M2,
    INT3,
    INT4,
    INT8,
    INT16,
    UINT4,
    UINT8,
    Codebook,
    register_format,
)
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import FLOAT16, FLOAT32
from quark_fx.passes import GPTQ, Rotate
from quark_fx.presets import (
    BF16,
    FP8_BLOCK,
    FP8_DYNAMIC,
    FP8_STATIC,
    INT4_WEIGHT_ONLY,
    INT8_DYNAMIC,
    INT8_STATIC,
    INT8_WEIGHT_ONLY,
    W4A4_DYNAMIC,
    preset,
)
from quark_fx.presets import SCHEMES as SCHEMES_OF_READERS

pytest.importorskip("compressed_tensors")

from compressed_tensors.modeling import initialize_hooked_kv_cache
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, initialize_module_for_quantization
from compressed_tensors.quantization.lifecycle.forward import fake_quantize, forward_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

from benchmarks import schemes

IDS = torch.randint(1, 64, (2, 10), generator=torch.Generator().manual_seed(0))


def llama(**options: Any) -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64}
    return seeded(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | options)))


@cache
def captured(layers: int = 1) -> qfx.Session:
    """Capture the model that most tests quantize; that takes longer than the rest."""
    return qfx.Session(llama(num_hidden_layers=layers), [{"input_ids": IDS}])


def quantized(config: QuantConfig, model: Any = None, *, layers: int = 1) -> qfx.QuantizedModel:
    session = captured(layers) if model is None else model
    return quantize(session, config, None if isinstance(session, qfx.Session) else [{"input_ids": IDS}])


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits  # type: ignore[no-any-return]


def load(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def quantization(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


# Ranges that are measured at run time are halved by 127.5 where the checkpoint is read.
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True, symmetry=Symmetry.SYMMETRIC_FULL)
FLOAT_ENDS = ("op:embedding", "lm_head")
FOURS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
W8A8 = INT8_STATIC.replace(output=None, bias=None)

SCHEMES: dict[str, tuple[QuantConfig, str]] = {
    "int4 in groups": (INT4_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS), "pack-quantized"),
    "int4, scales of either sign": (
        QuantConfig(weight=FOURS.replace(symmetry=Symmetry.SIGN_AWARE), exclude=FLOAT_ENDS),
        "pack-quantized",
    ),
    "uint4 in groups": (
        QuantConfig(
            weight=TensorSpec(format=UINT4, granularity=Granularity.GROUP, group_size=32), exclude=("op:embedding",)
        ),
        "pack-quantized",
    ),
    "int3 with zero points": (
        QuantConfig(
            weight=TensorSpec(format=INT3, granularity=Granularity.CHANNEL, symmetry=Symmetry.ASYMMETRIC),
            exclude=FLOAT_ENDS,
        ),
        "pack-quantized",
    ),
    "int4, int8 embedding": (INT4_WEIGHT_ONLY, "mixed-precision"),
    "int8 per channel": (INT8_WEIGHT_ONLY.replace(exclude=("op:embedding", "*.1.mlp.up_proj")), "pack-quantized"),
    "int8 per tensor": (
        INT8_WEIGHT_ONLY.replace(weight=TensorSpec(format=INT8), exclude=("op:embedding",)),
        "pack-quantized",
    ),
    "int8, int8 per token": (INT8_DYNAMIC.replace(input=TOKEN, exclude=FLOAT_ENDS), "int-quantized"),
    "int8, uint8 measured": (INT8_DYNAMIC.replace(exclude=FLOAT_ENDS), "int-quantized"),
    "int8, uint8 calibrated": (W8A8.replace(exclude=FLOAT_ENDS), "int-quantized"),
    "int8, int8 calibrated": (W8A8.replace(input=TensorSpec(format=INT8), exclude=FLOAT_ENDS), "int-quantized"),
    "float8 calibrated": (FP8_STATIC.replace(exclude=FLOAT_ENDS), "float-quantized"),
    "float8 per token": (
        FP8_STATIC.replace(
            input=TensorSpec(format=FP8_E4M3, granularity=Granularity.TOKEN, dynamic=True), exclude=("op:embedding",)
        ),
        "float-quantized",
    ),
    "float8 weights": (FP8_STATIC.replace(input=None), "naive-quantized"),
    "int4 in groups, int8 per token": (
        QuantConfig(weight=FOURS, input=TOKEN, exclude=FLOAT_ENDS),
        "pack-quantized",
    ),
    "int3 in groups, float8 per token": (
        QuantConfig(weight=FOURS.replace(format=INT3), input=FP8_DYNAMIC.input, exclude=FLOAT_ENDS),
        "pack-quantized",
    ),
    "int3 per channel, int4 per token": (
        QuantConfig(
            weight=TensorSpec(format=INT3, granularity=Granularity.CHANNEL),
            input=TOKEN.replace(format=INT4),
            exclude=FLOAT_ENDS,
        ),
        "pack-quantized",
    ),
    "int4 in groups, uint8 calibrated": (W8A8.replace(weight=FOURS, exclude=FLOAT_ENDS), "pack-quantized"),
    "int8, float8 in groups": (
        QuantConfig(
            weight=TensorSpec(format=INT8, granularity=Granularity.CHANNEL),
            input=TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=32, dynamic=True),
            exclude=FLOAT_ENDS,
        ),
        "int-quantized",
    ),
    "two schemes": (
        INT4_WEIGHT_ONLY.replace(
            overrides=(
                Override(pattern="op:embedding", weight=None),
                Override(pattern="*.mlp.*", weight=TensorSpec(format=INT8, granularity=Granularity.CHANNEL)),
            )
        ),
        "pack-quantized",
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_computes_what_the_graph_computes(name: str, tmp_path: Path) -> None:
    config, kind = SCHEMES[name]
    # Two layers where the layers differ, and where the modules of a scheme are listed.
    qmodel = quantized(
        config, layers=2 if kind == "mixed-precision" or name in ("int8 per channel", "two schemes") else 1
    )
    qfx.export.huggingface(qmodel, tmp_path / "deep" / "checkpoint")
    loaded = load(tmp_path / "deep" / "checkpoint")
    # The same values in the same operators; where an activation lies between two codes, `round(x / s + z)` may differ
    # from `round(x / s) + z`, so the data here holds no ties.
    torch.testing.assert_close(logits(loaded), logits(qmodel), rtol=0, atol=2e-6)
    assert quantization(tmp_path / "deep" / "checkpoint")["format"] == kind


@pytest.mark.parametrize(
    ("read", "equal", "said"),
    [
        (TOKEN, {}, ""),
        (
            TOKEN,
            {"symmetry": "symmetric"},
            "127.5, but this model and other readers divide by 127, so transformers rounds its int8 activations",
        ),
        (
            TOKEN.replace(format=INT4),
            {"symmetry": "symmetric"},
            "7.5, but this model and other readers divide by 7, so",
        ),
        (MXFP8_E4M3.replace(dynamic=True), {"scale": "e8m0_ceil"}, ""),
        (
            MXFP8_E4M3.replace(dynamic=True),
            {},
            "fp8_e4m3 activations by the rule e8m0_ceil, but this model by e8m0_even",
        ),
        (MXFP4.replace(dynamic=True), {}, ""),
        (MXFP4.replace(dynamic=True), {"scale": "e8m0_floor"}, "by the rule e8m0_even, but this model by e8m0_floor"),
    ],
)
def test_a_scale_that_transformers_measures_otherwise_is_said(
    read: TensorSpec, equal: dict[str, Any], said: str, tmp_path: Path
) -> None:
    qmodel = quantized(QuantConfig(weight=FOURS, input=read.replace(**equal), exclude=FLOAT_ENDS))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qfx.export.huggingface(qmodel, tmp_path)
    found = [str(w.message) for w in caught if "on `input`" in str(w.message)]
    assert len(found) == bool(said)
    assert not said or said in found[0]


@pytest.mark.parametrize("both", [True, False])
def test_tied_weights_part_where_one_is_quantized(both: bool, tmp_path: Path) -> None:
    config = INT8_WEIGHT_ONLY if both else INT8_WEIGHT_ONLY.replace(exclude=("op:embedding",))
    qmodel = quantized(config, llama(tie_word_embeddings=True))
    qfx.export.huggingface(qmodel, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    torch.testing.assert_close(logits(load(tmp_path)), logits(qmodel), rtol=0, atol=2e-6)


def test_tied_weights_in_float_stay_tied(tmp_path: Path) -> None:
    qmodel = quantized(INT8_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS), llama(tie_word_embeddings=True))
    qfx.export.huggingface(qmodel, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert len({"lm_head.weight", "model.embed_tokens.weight"} & set(stored)) == 1
    torch.testing.assert_close(logits(load(tmp_path)), logits(qmodel), rtol=0, atol=2e-6)


def test_the_file_is_as_small_as_its_codes(tmp_path: Path) -> None:
    config = INT4_WEIGHT_ONLY.replace(exclude=("op:embedding",), overrides=())
    qfx.export.huggingface(quantized(config), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    assert {n.removeprefix(f"{name}.") for n in stored if n.startswith(name)} == {
        *("weight_packed", "weight_scale", "weight_shape")
    }
    assert stored[f"{name}.weight_packed"].shape == (96, 64 // 8)
    assert stored[f"{name}.weight_scale"].shape == (96, 2)
    assert not [n for n in stored if "inv_freq" in n]


def test_a_loaded_model_is_exported_with_a_float_model(tmp_path: Path) -> None:
    qmodel = quantized(SCHEMES["int4 in groups"][0])
    qmodel.save(tmp_path / "own")
    qfx.export.huggingface(qfx.load(tmp_path / "own"), tmp_path / "hf", model=llama())
    torch.testing.assert_close(logits(load(tmp_path / "hf")), logits(qmodel), rtol=0, atol=2e-6)


class Tokenizer:
    def save_pretrained(self, directory: Path) -> None:
        (Path(directory) / "tokenizer.json").write_text("{}")


def test_the_tokenizer_and_the_generation_config_lie_beside_it(tmp_path: Path) -> None:
    qfx.export.huggingface(quantized(INT8_WEIGHT_ONLY), tmp_path, tokenizer=Tokenizer())
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= {
        file.name for file in tmp_path.iterdir()
    }


def test_the_card_names_recipe_data_and_errors(tmp_path: Path) -> None:
    qmodel = quantized(INT8_WEIGHT_ONLY)
    qmodel.save(tmp_path / "own")
    for place, model in (("new", qmodel), ("loaded", qfx.load(tmp_path / "own"))):
        float_model = None if model is qmodel else llama()
        card = (qfx.export.huggingface(model, tmp_path / place, model=float_model) / "README.md").read_text()
        metadata, text = yaml.safe_load(card.split("---")[1]), card.split("---", 2)[2]
        assert metadata == {"library_name": "transformers", "tags": ["quark_fx", "compressed-tensors"]}
        assert "# LlamaForCausalLM, quantized" in text or model is not qmodel
        recipe = text.split("```yaml\n")[1].split("```")[0]
        assert QuantConfig.from_yaml(recipe) == qmodel.config
        assert "None: this recipe reads no data." in text
        least = min(row.sqnr for row in qmodel.report() if row.sqnr is not None)
        assert f"{least:.1f} dB or more" in text
    assert "base_model: owner/model" in model_card(qmodel, "owner/model", "gptq")
    calibrated = model_card(quantize(captured(), FP8_STATIC.replace(exclude=FLOAT_ENDS)), "", "compressed-tensors")
    assert "Batches: 1; the first holds input_ids of shape (2, 10)" in calibrated


def test_a_card_of_somebody_else_stays(tmp_path: Path) -> None:
    directory = qfx.export.huggingface(quantized(INT8_WEIGHT_ONLY), tmp_path)
    own = (directory / "README.md").read_text()
    (directory / "README.md").write_text(own.replace("quantized", "rewritten"))
    qfx.export.huggingface(quantized(INT8_WEIGHT_ONLY), tmp_path)
    assert (directory / "README.md").read_text() == own
    (directory / "README.md").write_text("---\ntags: [mine]\n---\n# Mine")
    qfx.export.huggingface(quantized(INT8_WEIGHT_ONLY), tmp_path)
    assert (directory / "README.md").read_text().endswith("# Mine")


REFUSED: dict[str, tuple[str, QuantConfig, str]] = {
    "zero points of an embedding": (
        "compressed-tensors",
        QuantConfig(weight=TensorSpec(format=UINT4, granularity=Granularity.GROUP, group_size=32)),
        "embed_tokens: compressed-tensors supports zero points only",
    ),
    "zero points beside activations": (
        "compressed-tensors",
        W8A8.replace(weight=TensorSpec(format=UINT8, granularity=Granularity.CHANNEL), exclude=FLOAT_ENDS),
        "up_proj: compressed-tensors supports zero points only",
    ),
    "zero points beside other weights": (
        "compressed-tensors",
        QuantConfig(
            weight=FOURS.replace(symmetry=Symmetry.ASYMMETRIC),
            overrides=(Override(pattern="*.q_proj", weight=FOURS),),
            exclude=FLOAT_ENDS,
        ),
        "with zero points; if any layer has zero points, transformers needs one scheme",
    ),
    "zero points of a tensor": (
        "compressed-tensors",
        QuantConfig(weight=TensorSpec(format=UINT8), exclude=FLOAT_ENDS),
        "up_proj: compressed-tensors supports zero points only",
    ),
    "ragged groups": (
        "compressed-tensors",
        INT4_WEIGHT_ONLY.replace(group_size=48),
        "64 inputs are not a multiple of the group size 48",
    ),
    "another float": (
        "compressed-tensors",
        FP8_STATIC.replace(weight=TensorSpec(format=FP8_E5M2, granularity=Granularity.CHANNEL), exclude=FLOAT_ENDS),
        "fp8_e5m2; compressed-tensors supports only fp8_e4m3",
    ),
    "activations in another float": (
        "compressed-tensors",
        FP8_STATIC.replace(input=TensorSpec(format=FP8_E5M2), output=None, exclude=FLOAT_ENDS),
        "activations in fp8_e5m2; compressed-tensors supports integers of at most 8 bits, and fp4_e2m1",
    ),
    "casts": ("compressed-tensors", BF16, "only as matrices of codes"),
    "wide activations": (
        "compressed-tensors",
        W8A8.replace(input=TensorSpec(format=INT16), exclude=FLOAT_ENDS),
        "activations in int16; compressed-tensors supports integers of at most 8 bits",
    ),
    "ragged activations": (
        "compressed-tensors",
        FP8_DYNAMIC.replace(input=FP8_BLOCK.input, exclude=FLOAT_ENDS),
        "activations of 64 channels, which are not a multiple of the group size 128",
    ),
    "exponents of smaller groups": (
        "compressed-tensors",
        QuantConfig(weight=FOURS, input=MXFP4.replace(group_size=16, dynamic=True), exclude=FLOAT_ENDS),
        "activations with scales in e8m0_even; compressed-tensors supports float32, ",
    ),
    "a share of activations": (
        "compressed-tensors",
        W4A4_DYNAMIC.replace(group_size=32, passes=()),
        "activations that use part of the range",
    ),
    "activations": ("gptq", W8A8.replace(exclude=FLOAT_ENDS), "cannot store quantized activations"),
    "embeddings": ("gptq", INT8_WEIGHT_ONLY, "model.embed_tokens: GPTQ supports only"),
    "bits": ("awq", INT8_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS), "4-bit"),
    "sizes": (
        "awq",
        INT4_WEIGHT_ONLY.replace(
            exclude=FLOAT_ENDS,
            overrides=(Override(pattern="*.q_proj", weight=FOURS.replace(group_size=16)),),
        ),
        "q_proj: AWQ needs one bit width and one group size for all layers; most have 4 bits and a group size of 32",
    ),
    "nothing": ("awq", QuantConfig(), "no weight is quantized"),
}


@pytest.mark.filterwarnings("ignore:nothing was quantized")
@pytest.mark.parametrize("name", REFUSED)
def test_what_a_format_cannot_hold_is_refused_by_name(name: str, tmp_path: Path) -> None:
    form, config, message = REFUSED[name]
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.huggingface(quantized(config), tmp_path, format=form)
    assert not list(tmp_path.iterdir())


def test_a_long_list_of_layers_has_a_line_and_a_pattern_for_those_that_differ_in_numbers() -> None:
    names = [f"layers.{n}.{part}" for n in range(9) for part in ("up", "down")]
    held = ["layers.9.down"]
    message = str(unholdable([f"{name}: no: room" for name in names], names, held))
    assert message.splitlines()[1:3] == ["  layers.*.up: no: room (9 of them)", "  layers.*.down: no: room (9 of them)"]
    left = message.partition("(*config.exclude, ")[2].rstrip(")")
    assert left.split(", ") == ["'layers.*.up'", *(f"'layers.{n}.down'" for n in range(9))]
    few = str(unholdable([f"{name}: no room" for name in names[:4]], names[:4]))
    assert all(f"  {name}: no room" in few and repr(name) in few for name in names[:4])


def test_other_models_and_formats_are_refused(tmp_path: Path) -> None:
    qmodel = quantize(nn.Linear(8, 8).eval(), INT8_WEIGHT_ONLY, [rand(2, 8)])
    with pytest.raises(qfx.ExportError, match="not a Transformers model"):
        qfx.export.huggingface(qmodel, tmp_path)
    with pytest.raises(qfx.ExportError, match="choose one of compressed-tensors, gptq"):
        qfx.export.huggingface(qmodel, tmp_path, format="gguf")


class Recurrent(transformers.PreTrainedModel):  # type: ignore[misc]
    config_class = transformers.PretrainedConfig
    main_input_name = "x"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.cells, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 4)
        self.post_init()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cells(x)[0])


def test_a_recurrent_layer_is_refused_with_the_pattern_that_leaves_it_in_float(tmp_path: Path) -> None:
    model, batches = seeded(Recurrent(transformers.PretrainedConfig())), [{"x": rand(2, 5, 8)}]
    refusal = r"the parameter weight_ih_l0, .* in LSTM(.|\n)*exclude, 'cells'\)\)"
    with pytest.raises(qfx.ExportError, match=refusal):
        qfx.export.huggingface(quantize(model, INT8_WEIGHT_ONLY, batches), tmp_path)
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(exclude=("cells",)), batches)
    assert [row.weight for row in qmodel.report()] == ["", "", "int8 channel"]


def test_attention_of_torch_is_refused_with_the_patterns_that_leave_it_in_float(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes of layers in a module that has a parameter of three dimensions, the probe, are read as codes."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=16, patch_size=8)
    model, batches = seeded(transformers.SiglipVisionModel(config)), [{"pixel_values": rand(2, 3, 16, 16)}]
    static = INT8_STATIC.replace(exclude=("*patch_embedding*",))
    with pytest.raises(qfx.ExportError, match=r"Override\(pattern='head.attention\*', input=None, output=None\)"):
        qfx.check(model, static, batches)
    static = static.replace(overrides=(Override(pattern="head.attention*", input=None, output=None),))
    with pytest.raises(
        qfx.ExportError, match=r"MultiheadAttention(.|\n)*, 'head.attention.out_proj', 'head.attention'\)"
    ):
        qfx.check(model, static, batches)
    static = static.replace(exclude=(*static.exclude, "head.attention.out_proj", "head.attention"))
    qmodel = quantize(model, static, batches)
    rows = {row.name: row for row in qmodel.report()}
    assert rows["head.attention.out_proj"].reason == "excluded by 'head.attention.out_proj'"
    assert rows["head.mlp.fc1"].weight == "int8 channel"
    qfx.export.huggingface(qmodel, tmp_path)
    read_checkpoints_here(monkeypatch)
    assert qfx.verify(qmodel, tmp_path, batches).verdict.startswith("correct")


def test_transposed_weights_and_experts_are_named(tmp_path: Path) -> None:
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=32, eos_token_id=0, bos_token_id=0
        )
    )
    qmodel = quantized(INT8_WEIGHT_ONLY.replace(exclude=("op:embedding",)), seeded(gpt2))
    with pytest.raises(qfx.ExportError, match=r"c_attn\.weight.*Conv1D"):
        qfx.export.huggingface(qmodel, tmp_path)
    with pytest.raises(qfx.ExportError, match=r"mlp\.gate\.weight.*MixtralTopKRouter"):
        qfx.export.huggingface(quantized(INT8_WEIGHT_ONLY, captured_mixture("Mixtral")), tmp_path)


def mixture(name: str = "Mixtral", *, width: int = 128, experts: int = 3, layers: int = 2) -> Any:
    """Return a model with experts; of one kind its checkpoints have other names for the modules."""
    config = getattr(transformers, f"{name}Config")(
        hidden_size=64, intermediate_size=width, moe_intermediate_size=width, num_local_experts=experts,
        num_experts=experts, num_experts_per_tok=min(2, experts), num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=64, pad_token_id=None,
    )  # fmt: skip
    return seeded(getattr(transformers, f"{name}ForCausalLM")(config))


@cache
def captured_mixture(name: str, **sizes: int) -> qfx.Session:
    return qfx.Session(mixture(name, **sizes), [{"input_ids": IDS}])


ROUTED = (*FLOAT_ENDS, "op:router")
INT8_EXPERTS = Override(pattern="*.experts*", weight=TensorSpec(format=INT8, granularity=Granularity.CHANNEL))

EXPERTS: dict[str, tuple[QuantConfig, float]] = {
    "int4 in groups": (INT4_WEIGHT_ONLY.replace(group_size=32, exclude=ROUTED), 2e-6),
    "int4, in groups and per channel": (INT4_WEIGHT_ONLY.replace(group_size=64, exclude=ROUTED), 2e-6),
    "int4, int8 embedding": (INT4_WEIGHT_ONLY.replace(group_size=32, exclude=("op:router",)), 2e-6),
    "int8 per channel": (INT8_WEIGHT_ONLY.replace(exclude=ROUTED), 2e-6),
    "int8 beside int4": (INT4_WEIGHT_ONLY.replace(exclude=ROUTED, overrides=(INT8_EXPERTS,)), 2e-6),
    "int8 alone": (QuantConfig(overrides=(INT8_EXPERTS,)), 2e-6),
    "float8 per channel": (FP8_STATIC.replace(input=None, exclude=ROUTED), 2e-6),
    # Read in bfloat16, in which activations are rounded, too.
    "mxfp4": (QuantConfig(weight=MXFP4, exclude=ROUTED, target=Target.TORCH), 0.05),
}


@pytest.mark.parametrize(("model", "dequantized"), [("Mixtral", True), ("Qwen3Moe", False)])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_lie_apart_and_are_read_back(name: str, model: str, dequantized: bool, tmp_path: Path) -> None:
    if dequantized and name == "int4, int8 embedding":
        pytest.skip("transformers dequantizes all but experts by the first of the schemes")
    config, tolerance = EXPERTS[name]
    qmodel = quantized(config, captured_mixture(model))
    qfx.export.huggingface(qmodel, tmp_path / "quantized")
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if dequantized else {}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", dtype="auto", **options)
    torch.testing.assert_close(logits(loaded).float(), logits(qmodel), rtol=0, atol=tolerance)
    mixture(model).save_pretrained(tmp_path / "float")
    stored, expected = (load_file(tmp_path / n / "model.safetensors") for n in ("quantized", "float"))
    modules = {key.removesuffix(".weight") for key in expected}
    assert {key.rpartition(".")[0] for key in stored} == modules
    assert sum("experts" in key for key in modules) == 2 * 3 * 3


@pytest.mark.parametrize(("group", "width", "experts"), [(64, 32, 3), (32, 32, 3), (32, 64, 1)])
def test_experts_of_any_width_are_read_back(group: int, width: int, experts: int, tmp_path: Path) -> None:
    """Where a row of one of the projections is one group, or a stack holds one expert."""
    config = INT4_WEIGHT_ONLY.replace(group_size=group, exclude=ROUTED)
    qmodel = quantized(config, captured_mixture("Qwen3Moe", width=width, experts=experts, layers=1))
    qfx.export.huggingface(qmodel, tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(qmodel), rtol=0, atol=2e-6)


def test_codes_that_would_be_torn_from_their_scales_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qmodel = quantized(INT4_WEIGHT_ONLY.replace(group_size=32, exclude=ROUTED), captured_mixture("Mixtral"))

    def turned(model: Any, tensors: Any) -> Any:
        return as_saved(model, {name: tensor.flip(-1) for name, tensor in tensors.items()})

    monkeypatch.setattr("quark_fx.export.checkpoints.experts.as_saved", turned)
    with pytest.raises(
        qfx.ExportError, match=r"down_proj: transformers changes this stack .* that would break its codes"
    ):
        qfx.export.huggingface(qmodel, tmp_path)


def test_experts_that_would_not_be_read_back_are_refused(tmp_path: Path) -> None:
    mixed = INT4_WEIGHT_ONLY.replace(
        group_size=32, exclude=ROUTED, overrides=(Override(pattern="*.0.*experts*", weight=INT8_EXPERTS.weight),)
    )
    with pytest.raises(qfx.ExportError, match=r"0\.mlp\.experts\.down_proj: .*\[8, .*all experts .* the same"):
        qfx.export.huggingface(quantized(mixed, captured_mixture("Mixtral")), tmp_path)
    groups = Override(pattern="*.0.*experts*", weight=FOURS.replace(group_size=16))
    config = INT4_WEIGHT_ONLY.replace(group_size=32, exclude=ROUTED, overrides=(groups,))
    with pytest.raises(
        qfx.ExportError, match=r"0\.mlp\.experts\.down_proj: .*, 16\]; all experts .* must use the same"
    ):
        qfx.export.huggingface(quantized(config, captured_mixture("Mixtral")), tmp_path)
    for spec in (NVFP4, MXFP8_E4M3):
        config = QuantConfig(weight=spec, exclude=ROUTED, target=Target.TORCH)
        with pytest.raises(qfx.ExportError, match=r"transformers reads experts in \S+ incorrectly") as refused:
            qfx.export.huggingface(quantized(config, captured_mixture("Mixtral")), tmp_path)
        assert str(refused.value).count("experts in") == 4  # a line for each stack, not for each expert
    with pytest.raises(qfx.ExportError, match=r"experts\.down_proj: GPTQ supports .* no experts"):
        qfx.export.huggingface(
            quantized(EXPERTS["int4 in groups"][0], captured_mixture("Mixtral")), tmp_path, format="gptq"
        )
    one_scale = Override(pattern="*.experts*", weight=TensorSpec(format=INT8))
    with pytest.raises(qfx.ExportError, match=r"experts\.down_proj: the scales of this stack are not"):
        qfx.export.huggingface(quantized(QuantConfig(overrides=(one_scale,)), mixture()), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("left", ["*.0.*experts*", "*.experts*", "*.experts.down_proj"])
@pytest.mark.parametrize("model", ["Mixtral", "Qwen3Moe"])
def test_experts_in_float_are_read_back_and_servers_told(model: str, left: str, tmp_path: Path) -> None:
    config = INT4_WEIGHT_ONLY.replace(group_size=32, exclude=(*ROUTED, left))
    qmodel = quantized(config, captured_mixture(model))
    qfx.export.huggingface(qmodel, tmp_path / "quantized")
    torch.testing.assert_close(logits(load(tmp_path / "quantized")), logits(qmodel), rtol=0, atol=2e-6)
    ignored = quantization(tmp_path / "quantized")["ignore"]
    routers = {"mlp.gate"} | ({"block_sparse_moe.gate"} if model == "Mixtral" else set())
    assert {"lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in routers)} <= set(ignored)
    patterns = [re.compile(name.removeprefix("re:")) for name in ignored if name.startswith("re:")]
    mixture(model).save_pretrained(tmp_path / "float")
    stored, whole = (load_file(tmp_path / name / "model.safetensors") for name in ("quantized", "float"))
    experts = {name.removesuffix(".weight") for name in whole if ".experts." in name}
    named = {name for name in experts if any(p.match(name) for p in patterns)}
    assert named == {name for name in experts if f"{name}.weight_packed" not in stored}
    assert 0 < len(named) <= 18


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_other_forms_name_experts_in_float_their_way(form: str, tmp_path: Path) -> None:
    config = QuantConfig(weight=FOURS.replace(scale=FLOAT16), exclude=(*ROUTED, "op:experts"))
    qfx.export.huggingface(quantized(config, captured_mixture("Qwen3Moe")), tmp_path, format=form)
    names = [name.removesuffix(".weight") for name in load_file(tmp_path / "model.safetensors")]
    told = quantization(tmp_path)["dynamic" if form == "gptq" else "modules_to_not_convert"]
    for name in names:
        if ".experts." in name or name.endswith("mlp.gate"):
            assert any(re.match(key.removeprefix("-:"), name) for key in told)
        elif name.endswith("qweight"):
            assert not any(re.match(key.removeprefix("-:"), name.removesuffix(".qweight")) for key in told)
    assert sum(".experts." in name for name in names) == 18


def test_a_checkpoint_whose_weights_would_be_made_up_is_not_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(model: Any, tensors: Any) -> Any:
        saved = as_saved(model, tensors)
        return {name: tensor for name, tensor in saved.items() if not name.endswith("0.mlp.up_proj.weight_packed")}

    monkeypatch.setattr("quark_fx.export.checkpoints.to_huggingface.as_saved", forgetful)
    with pytest.raises(
        qfx.ExportError, match=r"it cannot find the tensors model\.layers\.0\.mlp\.up_proj\.weight_packed; "
    ):
        qfx.export.huggingface(quantized(INT4_WEIGHT_ONLY), tmp_path)
    assert not [file for file in tmp_path.iterdir() if file.name in ("config.json", "model.safetensors")]


def test_an_eager_model_is_neither_saved_nor_quantized_again(tmp_path: Path) -> None:
    eager: Any = quantized(INT4_WEIGHT_ONLY).eager()
    with pytest.raises(qfx.ExportError, match=r"quark_fx\.export\.huggingface"):
        eager.save_pretrained(tmp_path)
    with pytest.raises(qfx.ConfigError, match=r"result of eager\(\) on a quantized model"):
        quantized(INT4_WEIGHT_ONLY, eager)
    assert not list(tmp_path.iterdir())


def test_rounded_activations_of_experts_are_named_with_what_leaves_them(tmp_path: Path) -> None:
    config = FP8_DYNAMIC.replace(exclude=ROUTED)
    with pytest.raises(qfx.ExportError, match=r"pattern='model\.layers\.\*\.mlp\.experts\*', input=None"):
        qfx.export.huggingface(quantized(config, captured_mixture("Mixtral")), tmp_path)
    told = Override(pattern="model.layers.*.mlp.experts*", input=None, output=None)
    qmodel = quantized(config.replace(overrides=(*config.overrides, told)), mixture())
    qfx.export.huggingface(qmodel, tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(qmodel), rtol=0, atol=2e-6)


def unpacked(words: Tensor, bits: int) -> np.ndarray[Any, Any]:
    """Return the codes of each row of words, read bit by bit."""
    stream = np.unpackbits(words.numpy().view(np.uint8), axis=-1, bitorder="little")
    stream = stream[..., : stream.shape[-1] // bits * bits].reshape(*stream.shape[:-1], -1, bits)
    return (stream * (1 << np.arange(bits))).sum(-1)  # type: ignore[no-any-return]


def decode(stored: dict[str, Tensor], name: str, form: str, bits: int) -> np.ndarray[Any, Any]:
    """Return a weight (outputs, inputs) as the formats' descriptions say, without any code of ours."""
    qweight, qzeros, scales = (stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    zeros = unpacked(qzeros.contiguous(), bits)
    if form == "awq":
        order = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])
        codes = unpacked(qweight, bits)
        codes, zeros = (a.reshape(len(a), -1, 8)[..., order].reshape(len(a), -1) for a in (codes, zeros))
        rows = np.arange(len(codes)) // (len(codes) // len(zeros))
    else:
        codes = unpacked(qweight.t().contiguous(), bits).T
        rows = stored[f"{name}.g_idx"].numpy()
        zeros = zeros + 1 if form == "gptq" else zeros
    return ((codes - zeros[rows]) * scales.float().numpy()[rows]).T  # type: ignore[no-any-return]


@pytest.mark.parametrize("form", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(
    "weight",
    [
        FOURS.replace(scale=FLOAT16, symmetry=Symmetry.SIGN_AWARE),
        TensorSpec(format=UINT4, granularity=Granularity.GROUP, group_size=16, scale=FLOAT16),
        TensorSpec(format=INT4, granularity=Granularity.CHANNEL, scale=FLOAT16),
        TensorSpec(format=UINT8, granularity=Granularity.CHANNEL, scale=FLOAT16),
    ],
    ids=["int4 32", "uint4 16", "int4", "uint8"],
)
def test_gptq_and_awq_decode_to_the_weights(form: str, weight: TensorSpec, tmp_path: Path) -> None:
    if form == "awq" and weight.format.bits == 8:
        pytest.skip("AWQ holds 4 bits")
    qmodel = quantized(QuantConfig(weight=weight, exclude=(*FLOAT_ENDS, "*.0.mlp.up_proj")), layers=2)
    qfx.export.huggingface(qmodel, tmp_path, format=form)
    stored, config, eager = load_file(tmp_path / "model.safetensors"), quantization(tmp_path), qmodel.eager()
    assert (config["bits"], config["group_size"]) == (weight.format.bits, weight.group_size or -1)
    for name in ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"):
        expected = eager.get_submodule(name).weight
        found = decode(stored, name, form, weight.format.bits)
        assert isinstance(expected, Tensor)
        np.testing.assert_array_equal(found, expected.detach().numpy())
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert "model.layers.0.mlp.up_proj" in str(config).replace("\\", "")


def test_a_scale_beyond_float16_is_refused(tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight *= 1e-7
    qmodel = quantized(INT4_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS), model)
    with pytest.raises(qfx.ExportError, match="up_proj: a scale does not fit float16"):
        qfx.export.huggingface(qmodel, tmp_path, format="gptq")


@pytest.mark.parametrize("bits", range(1, 9))
def test_words_are_those_of_compressed_tensors(bits: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(0, 1 << bits, (5, 37), generator=torch.Generator().manual_seed(bits))
    theirs = pack_to_int32((codes - (1 << (bits - 1))).to(torch.int8), bits)
    torch.testing.assert_close(pack(codes, bits), theirs, rtol=0, atol=0)
    np.testing.assert_array_equal(unpacked(pack(codes, bits), bits)[:, :37], codes.numpy())


def test_words_hold_codes_where_the_formats_say() -> None:
    codes = torch.arange(16).reshape(2, 8)
    assert [hex(int(w) & 0xFFFFFFFF) for w in pack(codes, 4)[:, 0]] == ["0x76543210", "0xfedcba98"]
    assert [hex(int(w) & 0xFFFFFFFF) for w in pack_awq(codes)[:, 0]] == ["0x75316420", "0xfdb9eca8"]
    torch.testing.assert_close(pack_columns(codes.t(), 4), pack(codes, 4).t())


SMALL_FLOATS = {
    "nvfp4-pack-quantized": NVFP4,
    "mxfp4-pack-quantized": MXFP4,
    "mxfp6-pack-quantized": MXFP6_E2M3,
    "mxfp8-quantized": MXFP8_E4M3,
}


def small_floats(spec: TensorSpec) -> QuantConfig:
    return QuantConfig(weight=spec, exclude=FLOAT_ENDS, target=Target.TORCH)


@pytest.mark.parametrize("form", SMALL_FLOATS)
def test_small_floats_in_groups_are_read_back(form: str, tmp_path: Path) -> None:
    """Their readers compute in bfloat16, which holds every MX value; NVFP4's product of two scales is rounded."""
    qmodel = quantized(small_floats(SMALL_FLOATS[form]))
    qfx.export.huggingface(qmodel, tmp_path)
    assert quantization(tmp_path)["format"] == form
    values = transformers.CompressedTensorsConfig(dequantize=True)
    reader = transformers.AutoModelForCausalLM.from_pretrained
    read = reader(tmp_path, dtype=torch.bfloat16, quantization_config=values).state_dict()
    ours = qmodel.eager()
    names = [name for name in read if name.endswith("_proj.weight")]
    assert len(names) == 7
    for name in names:
        expected = ours.get_submodule(name.removesuffix(".weight")).weight
        torch.testing.assert_close(read[name].float(), expected, rtol=2**-7 if "nvfp4" in form else 0, atol=0, msg=name)
    packed = reader(tmp_path, dtype=torch.bfloat16)
    assert (logits(packed).float() - logits(qmodel)).abs().max() < 0.02 * logits(qmodel).abs().max()


@pytest.mark.parametrize(("size", "dynamic"), [(32, False), (32, True), (64, True)])
def test_square_blocks_of_floats_are_read_back(size: int, dynamic: bool, tmp_path: Path) -> None:
    """The last block of 80 outputs is not full; a block of 64 has all inputs."""
    read = TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=size, dynamic=True)
    config = small_floats(read.replace(dynamic=False, group_rows=size)).replace(exclude=(*FLOAT_ENDS, "*.down_proj"))
    qmodel = quantized(config.replace(input=read if dynamic else None), llama(intermediate_size=80))
    qfx.export.huggingface(qmodel, tmp_path)
    (scheme,) = quantization(tmp_path)["config_groups"].values()
    assert scheme["weights"]["block_structure"] == [size, size]
    assert (scheme["input_activations"] or {}).get("group_size") == (size if dynamic else None)
    scale = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert (scale.dtype, scale.shape) == (torch.float32, (-(-80 // size), -(-64 // size)))
    found, ours = load(tmp_path), qmodel.eager()
    assert (logits(found) - logits(qmodel)).abs().max() < 0.02 * logits(qmodel).abs().max()
    values = transformers.CompressedTensorsConfig(dequantize=True)
    reader = transformers.AutoModelForCausalLM.from_pretrained
    weights = reader(tmp_path, dtype=torch.float32, quantization_config=values).state_dict()
    names = [name for name in weights if name.endswith("_proj.weight")]
    assert len(names) == 7
    for name in names:
        expected = ours.get_submodule(name.removesuffix(".weight")).weight
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=0, msg=name)


def test_activations_beside_square_blocks_are_in_such_groups(tmp_path: Path) -> None:
    weight = TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=32, group_rows=32)
    for read in (FP8_DYNAMIC.input, weight.replace(group_size=16, group_rows=1, dynamic=True)):
        with pytest.raises(qfx.ExportError, match="or with a float32 scale per group of"):
            qfx.export.huggingface(quantized(small_floats(weight).replace(input=read)), tmp_path)


@cache
def wide() -> qfx.Session:
    """Capture a model whose channels groups of 128 divide."""
    model = llama(hidden_size=256, intermediate_size=128)
    return qfx.Session(model, [{"input_ids": IDS}])


def test_schemes_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """Its own code decompresses our weights, and rounds activations as ours; `benchmarks.schemes` runs all."""
    x = torch.randn(3, 4, 256, generator=torch.Generator().manual_seed(0)) * 10 ** torch.linspace(-3, 2, 256)
    for name in ("fp8_block", "w2a8", "w7a8", "w4afp8", "nvfp4", "mxfp4", "mxfp4xfp8", "mxfp6a8", "mxfp8"):
        config = SCHEMES_OF_READERS[name]
        qmodel = quantize(wide(), config)
        directory = qfx.export.huggingface(qmodel, tmp_path / name)
        assert not schemes.differing(qmodel, directory), name
        assert schemes.as_asked(name, directory, None), name
        assert preset(name.upper()) == config
        (told,) = quantization(directory)["config_groups"].values()
        args = QuantizationArgs.model_validate(told["input_activations"])
        if args.type == "float":
            stored = load_file(directory / "model.safetensors")
            whole = {"global_scale": stored.get("model.layers.0.self_attn.q_proj.input_global_scale")}
            theirs = fake_quantize(x, *compute_dynamic_scales_and_zp(x, args, nn.Module(), **whole), args, **whole)
            nodes = (node for node in qmodel.graph_module.graph.nodes if "dynamic_qparams" in str(node.target))
            fmt, symmetry, _, block, *rest = next(nodes).args[1:]
            scale, zero_point = ops.dynamic_qparams(x, fmt, symmetry, -1, block, *rest)
            ours = ops.fake_quantize(x, scale, zero_point, fmt, -1, block)
            # Readers divide by the reciprocal of the scale of NVFP4's scales.
            torch.testing.assert_close(theirs, ours, rtol=2**-22 if name == "nvfp4" else 0, atol=0, msg=name)


@pytest.mark.parametrize("passes", [(), (GPTQ(static_groups=False),)], ids=["nearest", "scales chosen"])
def test_linears_that_servers_fuse_share_the_global_scale(passes: tuple[GPTQ, ...], tmp_path: Path) -> None:
    """Of linears with weights of different sizes the smaller ones could have one of their own."""
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.weight *= 11
            layer.mlp.up_proj.weight *= 5
    qmodel = quantized(small_floats(NVFP4).replace(passes=passes), model)
    qfx.export.huggingface(qmodel, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    layer = "model.layers.0."
    for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
        scales = {float(stored[f"{layer}{name}.weight_global_scale"]) for name in fused}
        assert len(scales) == 1
    down = stored[f"{layer}mlp.down_proj.weight_scale"]
    assert down.dtype == torch.float8_e4m3fn
    assert down.float().max() == 448 or passes


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (MXFP6_E3M2, "fp6_e3m2 in groups of 32; compressed-tensors supports fp4_e2m1 in groups of 16 or 32"),
        (MXFP8_E4M3.replace(group_size=16), "fp8_e4m3 in groups of 16; compressed-tensors supports"),
        (MXFP8_E4M3.replace(scale=FLOAT32), "scales that are not powers of two; use an MX format"),
        (MXFP4.replace(group_size=16, scale=FLOAT32), "not E4M3 floats times one global scale; use"),
    ],
    ids=["format", "group", "float scales", "float scales in groups of NVFP4"],
)
def test_groups_of_floats_that_have_no_schema_are_refused(weight: TensorSpec, message: str, tmp_path: Path) -> None:
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.huggingface(quantized(small_floats(weight)), tmp_path)


def test_tables_are_refused(tmp_path: Path) -> None:
    book = register_format(Codebook("sixteen", tuple(i / 8 - 1 for i in range(16))))
    for spec, form, message in (
        (
            TensorSpec(format=book, granularity=Granularity.GROUP, group_size=32),
            "compressed-tensors",
            "sixteen in groups of 32; compressed-tensors supports",
        ),
        (
            TensorSpec(format=book, granularity=Granularity.CHANNEL),
            "compressed-tensors",
            "sixteen in groups of None; compressed-tensors supports",
        ),
        (TensorSpec(format=book, granularity=Granularity.GROUP, group_size=32), "gptq", "GPTQ supports only"),
    ):
        with pytest.raises(qfx.ExportError, match=message):
            qfx.export.huggingface(quantized(small_floats(spec)), tmp_path, format=form)


def test_patterns_are_the_bits_of_small_floats() -> None:
    """Against the types of `ml_dtypes`, every code, both zeros among them."""
    for fmt, kind in ((FP4_E2M1, ml_dtypes.float4_e2m1fn), (FP6_E2M3, ml_dtypes.float6_e2m3fn)):
        every = np.arange(1 << fmt.bits, dtype=np.uint8)
        values = torch.from_numpy(every.view(kind).astype(np.float32))[None]
        assert fmt.patterns(values.to(torch.float8_e4m3fn))[0].tolist() == every.tolist()


def test_what_is_there_is_not_broken(tmp_path: Path) -> None:
    qmodel = quantized(INT4_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS))
    (tmp_path / "file").write_text("x")
    with pytest.raises(qfx.ExportError, match="file is a file; choose another directory"):
        qfx.export.huggingface(qmodel, tmp_path / "file")
    qmodel.save(tmp_path / "saved")
    with pytest.raises(qfx.ExportError, match=r"holds a model from qmodel.save"):
        qfx.export.huggingface(qmodel, tmp_path / "saved")
    qfx.export.huggingface(qmodel, tmp_path / "checkpoint")
    with pytest.raises(qfx.QuarkError, match="contains a checkpoint, whose tensors would be overwritten"):
        qmodel.save(tmp_path / "checkpoint")
    qfx.export.huggingface(qmodel, tmp_path / "checkpoint")  # replaces an earlier one
    llama().save_pretrained(tmp_path / "float")
    weights = (tmp_path / "float" / "model.safetensors").read_bytes()
    for _ in range(2):  # with and without config.json
        with pytest.raises(
            qfx.ExportError,
            match=r"float holds model\.safetensors, which would be lost, and no config\.json there marks",
        ):
            qfx.export.huggingface(qmodel, tmp_path / "float")
        (tmp_path / "float" / "config.json").unlink(missing_ok=True)
    assert (tmp_path / "float" / "model.safetensors").read_bytes() == weights
    assert torch.equal(logits(qfx.load(tmp_path / "saved")), logits(qmodel))


@pytest.mark.parametrize("form", SMALL_FLOATS)
def test_checkpoints_of_small_floats_run_as_they_are_loaded(form: str, tmp_path: Path) -> None:
    qfx.export.huggingface(quantized(small_floats(SMALL_FLOATS[form])), tmp_path)
    found = logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))
    assert found.dtype == torch.bfloat16
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("error", [ImportError, TypeError])
def test_where_there_is_no_reader_a_checkpoint_is_left_unread(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qmodel = quantized(INT4_WEIGHT_ONLY)

    def fail(*_: Any, **__: Any) -> None:
        raise error("no reader")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", fail)
    if error is ImportError:
        qfx.export.huggingface(qmodel, tmp_path)
    else:
        with pytest.raises(qfx.ExportError, match="TypeError: no reader; "):
            qfx.export.huggingface(qmodel, tmp_path)
    assert (tmp_path / "model.safetensors").exists() == (error is ImportError)


def test_check_says_what_of_a_speech_model_has_to_stay_in_float() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_mel_bins": 8, "vocab_size": 64}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 16, "max_target_positions": 16}
    model = transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(**sizes, **heads, **marks, **lengths)
    ).eval()
    batch = {"input_features": rand(2, 8, 32), "decoder_input_ids": torch.arange(3, 11).reshape(2, 4)}
    config = qfx.presets.W4A16_RTN.replace(group_size=16)
    with pytest.raises(qfx.ExportError, match=r"conv1\.weight: the kernel of a convolution .*") as caught:
        qfx.check(model, config, [batch])
    remedy = str(caught.value).rpartition("To leave these weights in float: ")[2]
    qfx.check(model, eval(remedy, {"config": config}), [batch])


NVFP4_CACHE = SCHEMES_OF_READERS["nvfp4"].input

FP8_CACHE = INT8_WEIGHT_ONLY.replace(kv_cache=TensorSpec(format=FP8_E4M3), exclude=("op:embedding", "op:head"))


@pytest.mark.parametrize("shared", ["tensor", "head"])
@pytest.mark.parametrize("format", [FP8_E4M3, INT8], ids=str)
def test_a_checkpoint_has_the_scales_of_its_cache(format: Any, shared: Any, tmp_path: Path) -> None:
    qmodel = quantized(FP8_CACHE.replace(kv_cache=TensorSpec(format=format, granularity=shared)), layers=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        qfx.export.huggingface(qmodel, tmp_path)
    assert any("vLLM does not support int8 caches" in str(w.message) for w in caught) == (format is INT8)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"model.layers.{i}.self_attn.{which}_scale" for i in (0, 1) for which in "kv"]
    assert {name for name in tensors if "self_attn." in name and name.count(".") == 4} == {*names}
    shape = (2, 1, 1) if shared == "head" else (1,)
    assert all(tensors[name].shape == shape and bool((tensors[name] > 0).all()) for name in names)
    scheme = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    kind = "float" if format is FP8_E4M3 else "int"
    strategy = "attn_head" if shared == "head" else "tensor"
    assert scheme == {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False}
    eager: Any = qmodel.eager()
    for i, layer in enumerate(eager.model.layers):
        for which, entering in zip("kv", layer.self_attn.round_attention.entering, strict=True):
            held = tensors[f"model.layers.{i}.self_attn.{which}_scale"]
            torch.testing.assert_close(held, entering.scale.reshape(shape), rtol=0, atol=0)
    taken = inspect.signature(modeling_llama.LlamaAttention.forward).parameters
    if "past_key_values" in taken:  # the name by which compressed-tensors finds attentions
        loaded = load(tmp_path)
        torch.testing.assert_close(logits(loaded), logits(qmodel), rtol=0, atol=1e-6)
    unrounded = quantized(FP8_CACHE.replace(kv_cache=None), layers=2)
    assert float((logits(qmodel) - logits(unrounded)).abs().max()) > 1e-3


FP8_HEADS = TensorSpec(format=FP8_E4M3, granularity=Granularity.HEAD)


def in_second(cache: TensorSpec | None) -> dict[str, Any]:
    """Return the override that gives the second layer another cache."""
    return {"overrides": (Override(pattern="*.1.self_attn", kv_cache=cache),)}


@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (4, 1), (2, 2)])
def test_scales_per_head_are_those_of_the_keys_and_values_of_each_head(heads: int, groups: int, tmp_path: Path) -> None:
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 8 * heads}
    model = llama(**sizes)
    (layer,) = returned_cache(model(IDS, use_cache=True)).layers
    qfx.export.huggingface(quantized(FP8_CACHE.replace(kv_cache=FP8_HEADS), model), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, values in (("k", layer.keys), ("v", layer.values)):
        expected = values.abs().amax((0, 2, 3)).reshape(groups, 1, 1) / 448
        torch.testing.assert_close(tensors[f"model.layers.0.self_attn.{name}_scale"], expected)


class CachedAttention(nn.Module):
    """Attention as compressed-tensors finds it: by the name of the class, a projection, and the name of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.k_proj = nn.Linear(1, 1)

    def forward(self, x: Tensor, past_key_values: Any = None) -> None: ...


@pytest.mark.parametrize("format", [FP8_E4M3, INT8], ids=str)
def test_compressed_tensors_rounds_keys_with_scales_per_head_as_the_model_does(format: Any, tmp_path: Path) -> None:
    spec = TensorSpec(format=format, granularity=Granularity.HEAD)
    qmodel = quantized(FP8_CACHE.replace(kv_cache=spec))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "vLLM does not support int8 caches")
        qfx.export.huggingface(qmodel, tmp_path)
    loaded, prefix = load(tmp_path), "model.layers.0.self_attn."
    arguments = QuantizationArgs(**quantization(tmp_path)["kv_cache_scheme"])
    scheme = QuantizationScheme(targets=["CachedAttention"], input_activations=arguments)
    attention = CachedAttention()
    initialize_hooked_kv_cache(loaded, attention)
    initialize_module_for_quantization(attention, scheme)
    stored = load_file(tmp_path / "model.safetensors")
    scales = {f"{x}_scale": stored[f"{prefix}{x}_scale"] for x in "kv"}
    assert not attention.load_state_dict(scales, strict=False).unexpected_keys  # it raises for other shapes
    eager: Any = qmodel.eager()
    for name, entering in zip("kv", eager.model.layers[0].self_attn.round_attention.entering, strict=True):
        x = rand(2, 2, 5, 16)
        torch.testing.assert_close(forward_quantize(attention, x, name, arguments), entering(x), rtol=0, atol=0)


def test_layers_with_another_number_of_heads_than_the_configuration_are_refused(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    settings = transformers.Gemma4TextConfig(
        **sizes,
        **heads,
        vocab_size=64,
        head_dim=8,
        global_head_dim=8,
        hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"],
    )
    model = seeded(transformers.Gemma4ForCausalLM(settings))
    with pytest.raises(qfx.ExportError, match=r"layers.1.self_attn: 1 heads, but readers expect .*=2 from") as caught:
        qfx.check(model, FP8_CACHE.replace(kv_cache=FP8_HEADS), [{"input_ids": IDS}])
    assert "layers.0" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": TensorSpec(format=INT8, granularity=Granularity.CHANNEL)}, "keys or values in int8 per channel;"),
        ({"kv_cache": TensorSpec(format=INT4, granularity=Granularity.TOKEN, dynamic=True)}, "keys or values in int4;"),
        ({"kv_cache": TensorSpec(format=INT8, symmetry=Symmetry.ASYMMETRIC)}, "values in int8 with zero points;"),
        ({"kv_cache": TensorSpec.from_dict({"format": "bf16"})}, "keys or values in torch.bfloat16;"),
        ({"kv_cache": TensorSpec(format=FP8_E5M2)}, "keys or values in fp8_e5m2 per tensor;"),
        (
            {"kv_cache": NVFP4_CACHE},
            "under a calibrated scale; .*: export with format='modelopt', or set kv_cache=TensorSpec",
        ),
        (in_second(None), "layers.1.self_attn: its keys and values"),
        (
            in_second(TensorSpec(format=INT8)),
            "fp8_e4m3 per tensor and int8 per tensor; all layers must use the same cache",
        ),
        (in_second(FP8_HEADS), "fp8_e4m3 per tensor and fp8_e4m3 per head; all layers must use the same cache"),
        ({"passes": (Rotate(only=("*.self_attn",)),)}, "a pass rotates its keys"),
    ],
)
def test_caches_that_a_server_does_not_have_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(qfx.ExportError, match=message):
        qfx.export.huggingface(quantized(FP8_CACHE.replace(**changes), layers=2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_whose_cache_holds_latents_is_refused_by_check() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    ranks = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
    settings = transformers.DeepseekV3Config(
        **sizes, **ranks, vocab_size=64, num_key_value_heads=4, first_k_dense_replace=1, head_dim=8
    )
    model = seeded(transformers.DeepseekV3ForCausalLM(settings))
    with pytest.raises(qfx.ExportError, match="self_attn: servers cache latents"):
        qfx.check(model, FP8_CACHE, [{"input_ids": IDS}])


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_formats_without_a_place_for_caches_say_so(format: str, tmp_path: Path) -> None:
    with pytest.raises(qfx.ExportError, match=r"layers\.0\.self_attn: \w+ cannot store quantized keys and values"):
        qfx.export.huggingface(quantized(FP8_CACHE), tmp_path, format=format)


WRITERS: dict[str, Callable[[qfx.QuantizedModel, Path], Any]] = {
    **{name: partial(qfx.export.huggingface, format=name) for name in ("compressed-tensors", "gptq", "awq")},
    "gguf": qfx.export.gguf,
    "save": qfx.QuantizedModel.save,
    "page": lambda qmodel, place: qmodel.report().html(place),
    "onnx": qfx.export.onnx,
    "onnx and data": partial(qfx.export.onnx, external_data=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_earlier_output_and_other_files(name: str, tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    pytest.importorskip("gguf" if name == "gguf" else "matplotlib" if name == "page" else "torch")
    config = INT4_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS)
    if name == "awq":
        config = config.replace(weight=FOURS.replace(format=UINT4))
    linear = nn.Sequential(nn.Linear(64, 256)).eval()
    qmodel = quantize(linear, INT8_DYNAMIC, [rand(2, 64)]) if "onnx" in name else quantized(config)
    place = tmp_path / ("ü" * 100)
    WRITERS[name](qmodel, place)
    beside = place if place.is_dir() else tmp_path
    (beside / "notes.txt").write_text("mine")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest in (1, 8000):
        for output in (place, tmp_path / "other"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, unlimited[1]))
            try:
                with pytest.raises(
                    qfx.QuarkError, match=rf"{output} cannot be written: .*; free disk space, or choose"
                ):
                    WRITERS[name](qmodel, output)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    WRITERS[name](qmodel, place)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_a_generation_config_that_transformers_refuses_to_save_is_kept(tmp_path: Path) -> None:
    model = llama()
    model.generation_config = transformers.GenerationConfig(do_sample=False, max_new_tokens=7)
    model.generation_config.temperature = 0.5
    with pytest.raises(ValueError, match="temperature"):
        model.generation_config.save_pretrained(tmp_path)
    qmodel = quantized(INT4_WEIGHT_ONLY, model)
    qfx.export.huggingface(qmodel, tmp_path)
    found = json.loads((tmp_path / "generation_config.json").read_text())
    assert (found["temperature"], found["max_new_tokens"]) == (0.5, 7)
    assert load(tmp_path).generation_config.max_new_tokens == 7
    assert model.generation_config.temperature == 0.5


def test_tensors_that_modules_share_without_a_declaration_are_stored_under_each_name(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=2)
    parts = ("input_layernorm", "mlp.up_proj")
    shared = [tuple(model.model.layers[i].get_submodule(part) for i in range(2)) for part in parts]
    for first, second in shared:
        second.weight = first.weight
    qmodel = quantized(INT4_WEIGHT_ONLY.replace(exclude=(*FLOAT_ENDS, "*.up_proj")), model)
    qfx.export.huggingface(qmodel, tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(qmodel), rtol=0, atol=1e-5)
    stored = load_file(tmp_path / "model.safetensors")
    for part, (first, second) in zip(parts, shared, strict=True):
        assert first.weight is second.weight
        for i in range(2):
            assert torch.equal(stored[f"model.layers.{i}.{part}.weight"], first.weight)


DRAFT = {"mtp.fc.weight": rand(64, 128), "mtp.norm.weight": rand(64), "mtp.steps": torch.arange(3)}
"""Tensors of a part that the class of the model does not have."""


def with_draft(directory: Path, files: str, **options: Any) -> Path:
    """Write a float checkpoint that also has the tensors in `DRAFT`."""
    model = llama(**options)
    model.save_pretrained(directory, max_shard_size="40KB" if files == "shards" else "1GB")
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()} | DRAFT
    if files == "bin":
        (directory / "model.safetensors").unlink()
        torch.save(tensors, directory / "pytorch_model.bin")
    elif files == "one":
        if options:
            del tensors["lm_head.weight"]
        save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    else:
        save_file(DRAFT, directory / "model-draft.safetensors", {"format": "pt"})
        index = json.loads((directory / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(DRAFT, "model-draft.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize(("files", "form"), [("one", "compressed-tensors"), ("shards", "gptq"), ("tied", "awq")])
def test_tensors_that_the_class_does_not_have_are_kept(files: str, form: str, tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True} if files == "tied" else {}
    source = with_draft(tmp_path / "float", "one" if files == "tied" else files, **tied)
    with pytest.warns(UserWarning, match="3 tensors that the model does not have"):
        model = qfx.open_checkpoint(source)
    qmodel, place = quantized(QuantConfig(weight=FOURS, exclude=FLOAT_ENDS), model), tmp_path / "checkpoint"
    qfx.export.huggingface(qmodel, place, format=form)
    found = load_file(place / "model.safetensors")
    for name, tensor in DRAFT.items():
        assert torch.equal(found[name], tensor)
    said = quantization(place)
    left = str(said.get("ignore") or said.get("modules_to_not_convert") or said["dynamic"])
    assert "mtp.fc" in left.replace("\\", "")
    if form == "compressed-tensors":
        torch.testing.assert_close(logits(load(place)), logits(qmodel), rtol=0, atol=1e-5)
        with pytest.warns(UserWarning, match=r"the GGUF file omits 3 tensors .* mtp\.fc\.weight"):
            qfx.export.gguf(qmodel, tmp_path / "m.gguf")


@pytest.mark.parametrize("files", ["one", "shards", "bin"])
def test_tensors_of_a_loaded_model_that_are_not_kept_are_listed(files: str, tmp_path: Path) -> None:
    source, place = with_draft(tmp_path / "float", files), tmp_path / "checkpoint"
    qmodel = quantized(INT4_WEIGHT_ONLY.replace(exclude=FLOAT_ENDS), load(source).eval())
    with pytest.warns(UserWarning, match=r"holds 3 tensors .*: mtp\.fc\.weight, mtp\.norm\.weight, .*pass the dir"):
        qfx.export.huggingface(qmodel, place)
    assert not DRAFT.keys() & load_file(place / "model.safetensors").keys()


def test_a_checkpoint_without_other_tensors_is_not_mentioned(tmp_path: Path) -> None:
    for tied in (False, True):
        llama(tie_word_embeddings=tied).save_pretrained(tmp_path / "float")
        qmodel = quantized(QuantConfig(weight=FOURS, exclude=FLOAT_ENDS), load(tmp_path / "float").eval())
        with warnings.catch_warnings(action="error"):
            qfx.export.huggingface(qmodel, tmp_path / str(tied))


class Parametrized(transformers.PreTrainedModel):  # type: ignore[misc]
    """A model whose linear layers may be parametrized when it is constructed."""

    config_class = transformers.PretrainedConfig
    main_input_name = "x"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed, self.inner, self.head = nn.Embedding(8, 16), nn.Linear(16, 16), nn.Linear(16, 4, bias=False)
        if getattr(config, "parametrized", False):
            nn.utils.parametrizations.weight_norm(self.inner)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(self.embed(x)).relu())
        return y


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_the_codes_of_a_parametrized_weight_take_the_place_of_its_sources(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    norms = nn.utils.parametrizations, nn.utils.parametrizations, nn.utils
    tokens = torch.tensor([[0, 3, 5], [7, 1, 2]])
    int4 = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=8)
    configs = [INT8_WEIGHT_ONLY, INT8_WEIGHT_ONLY.replace(weight=int4), INT8_WEIGHT_ONLY]
    for index, (module, config) in enumerate(zip(norms, configs, strict=True)):
        model: Any = seeded(Parametrized(transformers.PretrainedConfig()))
        module.weight_norm(model.inner)
        if index:
            module.spectral_norm(model.head)
        model.eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        qmodel, path = quantize(model, config, [tokens]), tmp_path / str(index)
        with pytest.warns(
            UserWarning, match=r"inner\.weight for inner\.(parametrizations\.weight\.original1|weight_v)"
        ):
            qfx.export.huggingface(qmodel, path)
        stored = load_file(path / "model.safetensors")
        assert {name for name in stored if "weight" in name and name.startswith("inner")} <= {
            *("inner.weight_packed", "inner.weight_scale", "inner.weight_shape"),
        }
        read = Parametrized.from_pretrained(path, dtype=torch.float32).eval()
        torch.testing.assert_close(read(tokens), qmodel(tokens))
        eager: Any = qmodel.eager()
        torch.testing.assert_close(eager(tokens), qmodel(tokens), rtol=0, atol=0)
        torch.testing.assert_close(read.inner.weight, eager.inner.weight, rtol=0, atol=0)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])


def test_a_class_that_parametrizes_weights_itself_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    model = seeded(Parametrized(transformers.PretrainedConfig(parametrized=True)))
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [torch.tensor([[0, 3, 5]])])
    with pytest.raises(qfx.QuarkError, match=r"change the class to build inner\.weight without parametrizations"):
        qfx.export.huggingface(qmodel, tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_parametrization_whose_tensors_something_else_reads_stays(tmp_path: Path) -> None:
    class Reads(Parametrized):
        def forward(self, x: Tensor) -> Tensor:
            inner: Any = self.inner
            y: Tensor = self.head(self.inner(self.embed(x)) * inner.parametrizations.weight.original0.mean())
            return y

    model = seeded(Reads(transformers.PretrainedConfig(parametrized=True)))
    tokens = torch.tensor([[0, 3, 5]])
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [tokens])
    torch.testing.assert_close(qmodel.eager()(tokens), qmodel(tokens))
    with pytest.raises(qfx.QuarkError, match="inner: its weight is computed from"):
        qfx.export.huggingface(qmodel, tmp_path)
    model = seeded(Parametrized(transformers.PretrainedConfig()))
    nn.utils.parametrizations.weight_norm(model.inner).eval()
    qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(passes=()), [tokens])
    with pytest.raises(qfx.QuarkError, match=r"remove the parametrizations of inner\.weight before quantizing"):
        qfx.export.huggingface(qmodel, tmp_path)
