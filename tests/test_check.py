"""Whether a result can be exported is said before anything is calibrated or learned, by the export itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx

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
        qfx.check(model, "int8_weight_only", [rand(2, 8)], export="gptq")
    with pytest.raises(qfx.ConfigError, match=r"unknown export 'gguff'; choose one of .*gguf"):
        qfx.check(model, "int8_weight_only", [rand(2, 8)], export="gguff")


def test_hooks_of_the_model_are_refused_where_only_weights_are_stored(tmp_path: Path) -> None:
    t = transformers()
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = t.LlamaConfig(**shape, vocab_size=32, eos_token_id=1, pad_token_id=0)
    model, batches = t.LlamaForCausalLM(config).eval(), [{"input_ids": torch.arange(1, 9)[None]}]
    norm = model.model.norm

    def patch() -> None:
        norm.forward = lambda x: x

    def pre(module: nn.Module, inputs: Any) -> None: ...

    def post(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output + 1

    attached: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("forward hook", lambda: norm.register_forward_hook(post)),
        ("forward pre-hook", lambda: norm.register_forward_pre_hook(pre)),
        ("patched forward", patch),
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
