"""Whether a result can be exported is said before anything is calibrated or learned, by the export itself."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.export.checkpoints.plain_model import require_plain

W4 = qfx.presets.W4A16_GPTQ.replace(group_size=16)
IDS = torch.arange(3, 19).reshape(2, 8)


def transformers() -> Any:
    return pytest.importorskip("transformers")


def gpt_oss() -> Any:
    t = transformers()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = t.GptOssConfig(
        vocab_size=64, num_hidden_layers=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, **sizes
    )
    return seeded(t.GptOssForCausalLM(config))


def t5() -> Any:
    t = transformers()
    return seeded(
        t.T5ForConditionalGeneration(t.T5Config(vocab_size=64, d_model=32, d_ff=48, d_kv=16, num_layers=1, num_heads=2))
    )


def test_a_stack_that_no_checkpoint_takes_apart_is_named_before_calibration() -> None:
    def batches() -> Iterator[Any]:
        yield {"input_ids": IDS}
        pytest.fail("a second batch is not needed")

    with pytest.raises(qfx.ExportError, match=r"mlp\.experts\.down_proj: a stack"):
        qfx.check(gpt_oss(), W4, batches())
    qfx.check(gpt_oss(), W4.replace(exclude=(*W4.exclude, "*experts*")), batches())


def test_a_layer_whose_weight_the_code_of_a_model_reads_is_named() -> None:
    with pytest.raises(qfx.ExportError, match=r"the code of T5Attention reads weights of encoder\.block\.0\S*\.\*"):
        qfx.check(t5(), W4, [{"input_ids": IDS, "decoder_input_ids": IDS}])


def test_what_can_be_exported_is_let_pass_and_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    linear = nn.Linear(8, 4)
    model = nn.Sequential(linear).eval()
    before = linear.weight.detach().clone()
    qfx.check(model, "int8_static", [rand(2, 8)], export="qdq")
    assert not list(tmp_path.iterdir())
    assert torch.equal(linear.weight, before)


def test_a_format_that_does_not_hold_the_configuration_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    with pytest.raises(qfx.ExportError, match="not a Transformers model"):
        qfx.check(model, "int8_weight_only", None, export="gptq")  # before capture, which would ask for data
    with pytest.raises(qfx.ConfigError, match=r"unknown export 'gguff'; choose one of .*gguf"):
        qfx.check(model, "int8_weight_only", [rand(2, 8)], export="gguff")
    with pytest.raises(qfx.ConfigError, match=r"unknown export \['gguf'\]; choose one of .*gguf"):
        qfx.check(model, "int8_weight_only", [rand(2, 8)], export=["gguf"])  # type: ignore[arg-type]


# Functions of a module pickle, so captures of a model that holds them are kept (tests/captured_once.py).
def _pre(module: nn.Module, inputs: Any) -> None: ...


def _post(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output + 1


def _unchanged(x: Tensor) -> Tensor:
    return x


def test_hooks_of_the_model_are_refused_where_only_weights_are_stored(tmp_path: Path) -> None:
    t = transformers()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = t.LlamaConfig(**shape, vocab_size=32, eos_token_id=1, pad_token_id=0)
    model, batches = t.LlamaForCausalLM(config).eval(), [{"input_ids": torch.arange(1, 9)[None]}]
    norm = model.model.norm
    attached: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("forward hook", lambda: norm.register_forward_hook(_post)),
        ("forward pre-hook", lambda: norm.register_forward_pre_hook(_pre)),
        ("patched forward", lambda: setattr(norm, "forward", _unchanged)),
    )
    rounded = W4.replace(passes=())
    for kind, attach in attached:
        handle = attach()
        says = rf"model\.norm: {kind} .*Remove them"
        with pytest.raises(qfx.ExportError, match=says):
            qfx.check(model, rounded, batches)
        qmodel = qfx.quantize(model, rounded, batches, progress=False)
        exports: tuple[Callable[..., Any], ...] = (qfx.export.huggingface, qfx.export.gguf, qfx.export.genai)
        for index, export in enumerate(exports):
            with pytest.raises(qfx.ExportError, match=says):
                export(qmodel, tmp_path / str(index))
        assert not list(tmp_path.iterdir())
        if handle is None:
            del norm.forward
        else:
            handle.remove()
    # Those that transformers or torch attach come back with the model's class.
    model(**batches[0], output_hidden_states=True)
    qfx.check(model, rounded, batches)


def small_llama(kind: Any = None) -> Any:
    t = transformers()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = t.LlamaConfig(**shape, vocab_size=32, eos_token_id=1, pad_token_id=0, use_cache=False)
    return seeded((kind or t.LlamaForCausalLM)(config))


def with_adapter(model: Any) -> Any:
    """Return a model like those of PEFT, which may not be installed."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_model, self.config = model, model.config

        def save_pretrained(self) -> None: ...

        def merge_and_unload(self) -> Any:
            return self.base_model

        def forward(self, input_ids: Tensor) -> Any:
            return self.base_model(input_ids=input_ids)

    return Adapted().eval()


def with_other_epsilon(model: Any) -> Any:
    model.model.norm.variance_epsilon = 0.5
    return model


def with_other_activation(model: Any) -> Any:
    model.model.layers[0].mlp.act_fn = nn.ReLU()
    return model.eval()


def with_longer_head(model: Any) -> Any:
    model.lm_head = nn.Sequential(seeded(nn.Linear(32, 32)), model.lm_head)
    return model.eval()


def with_parameter(model: Any) -> Any:
    model.model.layers[0].mlp.gain = nn.Parameter(torch.ones(3))
    return model


def with_other_frequencies(model: Any) -> Any:
    model.model.rotary_emb.inv_freq.mul_(2)
    return model


def with_own_attention(model: Any) -> Any:
    def softer(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        llama = sys.modules["transformers.models.llama.modeling_llama"]
        return llama.eager_attention_forward(module, query / 2, *args, **kwargs)

    transformers().AttentionInterface.register("softer", softer)
    model.config._attn_implementation = "softer"
    return model


BATCH = [{"input_ids": torch.arange(1, 9)[None]}]
DIFFERENCES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "adapter": (with_adapter, r"has adapters, .* model\.merge_and_unload\(\) returns"),
    "epsilon": (with_other_epsilon, r"model\.norm\.variance_epsilon: 0\.5 instead of 1e-06"),
    "activation": (with_other_activation, r"act_fn: torch\.nn\S*ReLU instead of \S*SiLU"),
    "head": (with_longer_head, r"lm_head: torch\.nn\S*Sequential instead of \S*Linear\n(?!.*lm_head\.0)"),
    "frequencies": (with_other_frequencies, r"model\.rotary_emb\.inv_freq: other values"),
    "attention": (with_own_attention, r"attention implementation 'softer' with .*set_attn_implementation\('sdpa'\)"),
    "parameter": (with_parameter, r"mlp\.gain: shape \(3,\) instead of None"),
}


@pytest.mark.parametrize("export", ["compressed-tensors", "gguf"])
@pytest.mark.parametrize("name", DIFFERENCES)
def test_models_that_readers_build_in_another_way_are_refused(name: str, export: str) -> None:
    change, message = DIFFERENCES[name]
    model, config = change(small_llama()), qfx.presets.W4A16_RTN.replace(group_size=32)
    with pytest.raises(qfx.ExportError, match=message):
        qfx.check(model, config, BATCH, export=export)
    if name == "attention":
        model.set_attn_implementation("sdpa")
        qfx.check(model, config, BATCH, export=export)  # the remedy
    if name == "adapter":
        qfx.check(model.merge_and_unload(), config, BATCH, export=export)  # the remedy


def test_a_model_larger_than_memory_is_compared_without_its_weights() -> None:
    t = transformers()
    config = t.MixtralConfig(hidden_size=2**14, intermediate_size=2**17, num_hidden_layers=1, vocab_size=8)
    config.num_local_experts = 2**10  # 16 TiB
    with torch.device("meta"):
        model = t.MixtralForCausalLM(config)
    require_plain(model)
    model.model.norm.variance_epsilon = 0.5
    with pytest.raises(qfx.ExportError, match=r"norm\.variance_epsilon"):
        require_plain(model)


def test_settings_of_torchs_modules_that_the_configuration_does_not_have_are_refused() -> None:
    t = transformers()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = t.ViTForImageClassification(t.ViTConfig(**sizes, image_size=8, patch_size=4)).eval()
    require_plain(model)
    projection = model.vit.embeddings.patch_embeddings.projection
    for name, value in (("stride", (2, 2)), ("padding", (1, 1)), ("groups", 2), ("padding_mode", "circular")):
        before = getattr(projection, name)
        setattr(projection, name, value)
        with pytest.raises(qfx.ExportError) as refused:
            require_plain(model)
        assert f"projection.{name}: {value!r} instead of {before!r}" in str(refused.value)
        setattr(projection, name, before)
    require_plain(model)


def test_a_class_that_readers_do_not_find_is_refused_unless_it_is_registered() -> None:
    t = transformers()

    class Doubled(t.LlamaForCausalLM):  # type: ignore[misc, name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            found = super().forward(*args, **kwargs)
            found.logits = found.logits * 2
            return found

    config = qfx.presets.W4A16_RTN.replace(group_size=32)
    with pytest.raises(qfx.ExportError, match=r"cannot find the class \S*Doubled; register it"):
        qfx.check(small_llama(Doubled), config, BATCH)
    mapping = t.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    t.AutoModelForCausalLM.register(t.LlamaConfig, Doubled, exist_ok=True)
    try:
        qfx.check(small_llama(Doubled), config, BATCH)
    finally:
        mapping._extra_content.clear()


def test_a_forward_that_replaces_the_one_of_a_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = transformers().models.llama.modeling_llama.LlamaMLP
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * 2)
    with pytest.raises(qfx.ExportError, match="forward of LlamaMLP patched with"):
        qfx.check(small_llama(), qfx.presets.W4A16_RTN.replace(group_size=32), BATCH)


def test_a_function_of_a_file_of_transformers_that_was_replaced_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_llama()
    file = sys.modules["transformers.models.llama.modeling_llama"]

    def rotate_twice(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return q * 2, k

    monkeypatch.setattr(file, "apply_rotary_pos_emb", rotate_twice)
    with pytest.raises(
        qfx.ExportError, match=r"apply_rotary_pos_emb of \S*modeling_llama replaced with \S*rotate_twice"
    ):
        qfx.check(model, qfx.presets.W4A16_RTN.replace(group_size=32), BATCH)


@pytest.mark.parametrize(
    "last", [nn.Identity(), nn.LayerNorm(8), nn.Softmax(-1), nn.GELU()], ids=lambda module: type(module).__name__
)
def test_a_bfloat16_model_is_refused_by_check_as_by_export(last: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    model, data = nn.Sequential(nn.Linear(8, 8), last).bfloat16().eval(), [rand(3, 8).bfloat16()]
    with pytest.raises(qfx.ExportError, match=r"quantize model\.float\(\) instead") as checked:
        qfx.check(model, "int8_static", data, export="qdq")
    with pytest.raises(qfx.ExportError) as exported:
        qfx.export.onnx(qfx.quantize(model, "int8_static", data, progress=False), tmp_path / "checked")
    assert str(checked.value) == str(exported.value)
    assert not [*tmp_path.iterdir()]
    qfx.check(model.float(), "int8_static", [data[0].float()], export="qdq")
