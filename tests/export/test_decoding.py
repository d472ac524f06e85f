"""Folders of prefill and decode graphs decode what torch decodes, across sliding windows; `verify` compares them."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from tiny import mlp
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GenerationConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
)
from transformers.exporters import ExportedModel, OnnxConfig, OnnxExporter
from typer.testing import CliRunner

import quark_fx as qfx
from quark_fx.command_line.app import app
from quark_fx.data.cache_names import held_in_cache, returned_cache
from quark_fx.errors import ExportError
from quark_fx.export import CacheScales, GenerationQuantizer, generator, share_weights
from quark_fx.export.generation.generator import cut_layers
from quark_fx.export.runtime import verification
from quark_fx.export.runtime.decoding import decoded_steps

pytestmark = pytest.mark.slow

WINDOW = 8
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": WINDOW,
}  # fmt: skip
QUIET: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "min_new_tokens": 16}


def model_of(config: PretrainedConfig) -> Any:
    """Return a model of random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def qwen2(**other: Any) -> Any:
    """A layer of full attention, and one with a window."""
    return model_of(Qwen2Config(**SIZES | other, use_sliding_window=True, max_window_layers=1))


def draw(rows: int, length: int, padded: int = 0) -> dict[str, Tensor]:
    """Return a prompt whose first row is padded on the left."""
    ids = torch.randint(3, 96, (rows, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


PROMPTS = [draw(2, 5, padded=2), draw(3, 12, padded=7), draw(1, 1)]
"""Shorter than the window, which is crossed while decoding; longer; a single token."""


def written(model: Any, folder: Path, quantizer: Any = None, fusions: str | None = None, **options: Any) -> Path:
    """Export prefill and decode graphs to a folder, traced with a prompt that is shorter than the window."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    config = OnnxConfig(dynamic=True, ort_fusions=fusions, quantizer=quantizer)
    OnnxExporter().export_for_generation(model, draw(2, 5, padded=1), config, **options).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A float model of both kinds of layers; its decode graph reads any number of tokens."""
    model = qwen2()
    return SimpleNamespace(
        model=model, folder=written(model, tmp_path_factory.mktemp("mixed"), multi_token_decode=True)
    )


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A model of int4 weights whose layers all have a window, with an int8 cache, in fused operators."""
    qmodel = qfx.quantize(
        model_of(MistralConfig(**SIZES | {"num_hidden_layers": 1})), "int4_weight_only", [draw(2, 24)], progress=False
    )
    eager = qmodel.eager()
    quantizer = GenerationQuantizer("matmul_nbits", cache=CacheScales.measure(eager, [draw(2, 24)]))
    folder = written(eager, tmp_path_factory.mktemp("coded"), quantizer, "cpu")
    share_weights(folder)
    return SimpleNamespace(qmodel=qmodel, folder=folder, scales=quantizer.cache)


# Decoding --------------------------------------------------------------------------------------------------------


def test_mixed_layers_decode_across_the_window(mixed: SimpleNamespace) -> None:
    found = qfx.verify(mixed.model, mixed.folder, PROMPTS)
    assert [d.name for d in found.differences] == ["prompt", *(f"step {step}" for step in range(1, 33))]
    assert found.decode_steps == 32
    assert found.first_wrong is None
    assert found.max_steps < 0.01
    assert "32 decode steps after the prompts: none differs" in str(found)


def test_beams_and_caches_that_are_continued_decode_as_in_torch(mixed: SimpleNamespace) -> None:
    folder = generator(ExportedModel.from_pretrained(mixed.folder), threads=1)
    for model in (folder, mixed.model):  # a window has passed the first prompt
        model.answer = model.generate(**PROMPTS[0], **QUIET, num_beams=3)
        model.begun = model.generate(draw(2, 5)["input_ids"], **QUIET, return_dict_in_generate=True)
        longer = torch.cat([model.begun.sequences, draw(2, 4)["input_ids"]], 1)
        model.continued = model.generate(longer, past_key_values=returned_cache(model.begun), **QUIET)
    assert torch.equal(folder.answer, mixed.model.answer)
    assert returned_cache(folder.begun).get_seq_length() == 5 + 15
    assert torch.equal(folder.continued, mixed.model.continued)


def test_codes_of_weights_and_of_the_cache_decode_across_the_window(coded: SimpleNamespace, tmp_path: Path) -> None:
    decode = ir.load(coded.folder / "decode.onnx").graph
    assert sum(value.dtype == ir.DataType.INT8 for value in decode.inputs if held_in_cache(value.name)) == 2
    operators = [node.op_type for node in decode]
    assert operators.count("GatherBlockQuantized") == 1, "of the embedding; the head has another weight"
    assert operators.count("MatMulNBits") == 8
    assert qfx.verify(coded.qmodel, coded.folder, PROMPTS, decode_steps=12).max_steps < 0.01
    coded.qmodel.save(tmp_path / "saved")  # a loaded model is not told its class
    assert qfx.verify(qfx.load(tmp_path / "saved"), coded.folder, PROMPTS[:1], decode_steps=12).max_steps < 0.01


def test_a_cache_that_the_model_drops_while_decoding_is_replaced_by_one_that_rounds(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    sizes = SIZES | {"num_hidden_layers": 1, "sliding_window": None}
    phi3 = model_of(Phi3Config(**sizes, original_max_position_embeddings=10, rope_parameters=rope))
    model: Any = qfx.quantize(phi3, "int4_weight_only", [draw(2, 24)], progress=False).eager()
    scales = CacheScales.measure(model, [draw(2, 24)])
    folder = written(model, tmp_path, GenerationQuantizer(cache=scales))
    found = qfx.verify(model, folder, [draw(2, 8, padded=2)], decode_steps=6)  # the long factors begin at step 3
    assert found.max_steps < 0.01
    assert not model._forward_pre_hooks


def test_a_cache_is_measured_on_tokens_that_left_the_window(coded: SimpleNamespace) -> None:
    with torch.no_grad():
        found = coded.qmodel.eager()(**draw(2, 24), use_cache=True, past_key_values=DynamicCache())
    (layer,) = returned_cache(found).layers
    assert layer.keys.shape[-2] == 24 > WINDOW
    largest = layer.keys.abs().amax((0, 2), keepdim=True) / 127
    torch.testing.assert_close(coded.scales.scales["layers.0.keys"], largest)


def test_the_command_line_decodes_too(coded: SimpleNamespace, tmp_path: Path) -> None:
    coded.qmodel.save(tmp_path / "saved")
    save_file(PROMPTS[1], tmp_path / "prompts.safetensors")
    options = ["--data", str(tmp_path / "prompts.safetensors"), "--decode-steps", "9", "--json"]
    done = CliRunner().invoke(app, ["verify", str(coded.folder), str(tmp_path / "saved"), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["decode_steps"], found["first_wrong"], len(found["differences"])) == (9, None, 10)
    assert found["max_steps"] < 0.01


# Refusals -------------------------------------------------------------------------------------------------------


def test_the_first_wrong_step_is_named(mixed: SimpleNamespace) -> None:
    """A wider window reads more once a token leaves the narrow one: with 5 tokens before, in step 4."""
    wider = qwen2(sliding_window=WINDOW + 1)
    found = qfx.verify(wider, mixed.folder, [draw(2, 5)], decode_steps=6)
    assert found.first_wrong is not None
    assert found.first_wrong.name == "step 4"
    assert "step 4 is the first to differ" in str(found)
    assert found.verdict == "wrong, from step 4 on"


def test_steps_are_judged_by_what_rounding_moves(mixed: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ((pairs, disturbed),) = decoded_steps(mixed.model, mixed.folder, [draw(2, 5)], 3)
    for (own, _), moved in zip(pairs.values(), disturbed(0), strict=True):
        assert 0 < float((own - moved).abs().max()) < 1e-4
    # As if the model were deep: rounding moves its logits by several steps.
    noise = {name: 0.05 * own.roll(1) for name, (own, _) in pairs.items()}
    far = [own + noise[name] for name, (own, _) in pairs.items()]
    for factor, verdict in ((1.0, "correct up to rounding in a deep network"), (9.0, "wrong, from prompt on")):
        theirs = {name: (own, own - factor * noise[name]) for name, (own, _) in pairs.items()}
        monkeypatch.setattr(verification, "decoded_steps", lambda *_, given=theirs: [(given, lambda seed: far)])
        found = qfx.verify(mixed.model, mixed.folder, [draw(2, 5)], decode_steps=3)
        assert found.max_steps > 1
        assert found.verdict == verdict


def test_graphs_that_cut_a_sliding_cache_are_refused(mixed: SimpleNamespace, tmp_path: Path) -> None:
    folder = shutil.copytree(mixed.folder, tmp_path / "cut")
    program = ir.load(folder / "decode.onnx")
    assert not cut_layers(program.graph)
    keys = next(value for value in program.graph.outputs if held_in_cache(value.name) == "layers.1.keys")
    start, end, axis = (ir.node("Constant", [], {"value_ints": [number]}) for number in (1 - WINDOW, 1 << 40, 2))
    cut = ir.node("Slice", [keys, start.outputs[0], end.outputs[0], axis.outputs[0]])
    cut.outputs[0].type, cut.outputs[0].shape = keys.type, keys.shape
    program.graph.extend([start, end, axis, cut])
    cut.outputs[0].name, keys.name = keys.name, "whole"
    program.graph.outputs[list(program.graph.outputs).index(keys)] = cut.outputs[0]
    ir.save(program, folder / "decode.onnx")
    for read in (lambda: generator(ExportedModel.from_pretrained(folder)), lambda: qfx.verify(mixed.model, folder, [])):
        with pytest.raises(ExportError, match="cuts the cache of the sliding layers 1 to their window"):
            read()


def test_graphs_without_a_cache_are_refused(mixed: SimpleNamespace) -> None:
    exported = ExportedModel.from_pretrained(mixed.folder)
    exported.components = exported.components | {"decode": exported.components["prefill"]}
    with pytest.raises(ExportError, match=r"keep no cache.*set model\.generation_config\.use_cache = True"):
        generator(exported)


def test_a_decode_graph_of_single_tokens_says_so(coded: SimpleNamespace) -> None:
    folder = generator(ExportedModel.from_pretrained(coded.folder), threads=1)
    begun = folder.generate(**PROMPTS[2], **QUIET, return_dict_in_generate=True)
    longer = torch.cat([begun.sequences, draw(1, 4)["input_ids"]], 1)
    with pytest.raises(ExportError, match=r"reads one token at a time, but got 5 after.*multi_token_decode=True"):
        folder.generate(longer, past_key_values=returned_cache(begun), **QUIET)
    with pytest.raises(ExportError, match="pass input_ids"):
        folder(inputs_embeds=torch.zeros(1, 2, 32))


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "batch 0 has no prompts": (lambda model: (model, [{"attention_mask": torch.ones(1, 3)}]), {}),
    "no batch to verify with": (lambda model: (model, []), {}),
    "decode_steps=0 must be at least 1": (lambda model: (model, PROMPTS), {"decode_steps": 0}),
    "a Mlp has no generate method": (lambda model: (mlp(), PROMPTS), {}),
    "is in training mode": (lambda model: (copy.copy(model).train(), PROMPTS), {}),
    "drop per_node, optimize": (lambda model: (model, PROMPTS), {"per_node": True}),
    "torch does not decode 4 steps after 3 tokens": (
        lambda model: (model, [{"input_ids": torch.full((1, 3), 999)}]),
        {"decode_steps": 4},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_decoded_is_refused(message: str, mixed: SimpleNamespace) -> None:
    make, options = REFUSED[message]
    model, prompts = make(mixed.model)
    try:
        with pytest.raises(ExportError, match=message):
            qfx.verify(model, mixed.folder, prompts, **options)
    finally:
        mixed.model.eval()


def test_a_float_model_is_compared_with_folders_that_decode_only(mixed: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="expected the result of quantize"):
        qfx.verify(mixed.model, tmp_path, PROMPTS)
    (tmp_path / "export.json").write_text("{}")
    with pytest.raises(ExportError, match="cannot be loaded"):
        qfx.verify(mixed.model, tmp_path, PROMPTS)


def test_what_a_model_was_told_to_generate_changes_nothing(mixed: SimpleNamespace) -> None:
    told = copy.copy(mixed.model)
    told.generation_config = GenerationConfig(
        num_beams=4, use_cache=False, do_sample=True, pad_token_id=0, max_length=3
    )
    assert qfx.verify(told, mixed.folder, PROMPTS[:1], decode_steps=3).max_steps < 0.01
