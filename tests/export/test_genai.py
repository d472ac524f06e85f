"""Folders for ONNX Runtime GenAI: what they hold, what they generate, and what they are refused for."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from tiny import mlp, quantize, tokens
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    PretrainedConfig,
    Qwen3NextConfig,
    T5Config,
    T5ForConditionalGeneration,
)

import quark_fx as qfx
from quark_fx.data.cache_names import CACHE_NAMES
from quark_fx.errors import ExportError
from quark_fx.export import CacheScales
from quark_fx.export.generation.genai_config import genai_config, name_cache
from quark_fx.export.generation.to_genai import require_generator

pytestmark = pytest.mark.slow

PAD = 7
PROMPT = torch.tensor([[5, 12, 40, 3, 44, 9, PAD]])
STEPS = 12
GREEDY: dict[str, Any] = {"use_cache": True, "do_sample": False, "max_new_tokens": STEPS, "min_new_tokens": STEPS}

needs_genai = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None, reason="onnxruntime-genai is not installed"
)


def gpt2() -> PretrainedConfig:
    """A model that reads all tokens before."""
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_inner": 32, "n_positions": 32, "vocab_size": 48}
    return GPT2Config(**sizes, initializer_range=0.5, bos_token_id=0, eos_token_id=0, pad_token_id=PAD)


def mistral() -> PretrainedConfig:
    """A model whose window is shorter than the prompt."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "vocab_size": 48, "max_position_embeddings": 32, "sliding_window": 4}
    return MistralConfig(**sizes, **more, initializer_range=0.5, bos_token_id=0, eos_token_id=0, pad_token_id=PAD)


def written_as(config: PretrainedConfig, folder: Path, *, cached: bool = False) -> SimpleNamespace:
    """Return a folder, and the model in torch; the prompt ends in the token that the model pads with."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    model.config.use_cache = model.generation_config.use_cache = False  # as models are often calibrated
    qmodel = quantize(model, "int8_weight_only", [{"input_ids": PROMPT}])
    eager: Any = qmodel.eager()
    scales = CacheScales.measure(eager, [{"input_ids": PROMPT}]) if cached else None
    folder = qfx.export.genai(qmodel, folder, format="qdq", cache=scales)
    expected = eager.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)[0].tolist()
    assert len(set(expected)) > 6, "a sequence that repeats itself proves little"
    return SimpleNamespace(
        folder=folder,
        qmodel=qmodel,
        eager=eager,
        expected=expected,
        config=json.loads((folder / "genai_config.json").read_text()),
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder of a model that reads all tokens before."""
    return written_as(gpt2(), tmp_path_factory.mktemp("genai") / "new")


def test_a_folder_holds_the_graph_its_data_and_the_configuration(written: SimpleNamespace) -> None:
    names = {file.name for file in written.folder.iterdir()}
    assert names == {"model.onnx", "model.onnx.data", "genai_config.json"}
    model = written.config["model"]
    assert {key: model[key] for key in ("context_length", "vocab_size", "bos_token_id", "eos_token_id")} == {
        "context_length": 32,
        "vocab_size": 48,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    sizes = ("num_hidden_layers", "num_key_value_heads", "head_size", "num_attention_heads", "hidden_size")
    assert [model["decoder"][size] for size in sizes] == [1, 2, 8, 2, 16]


def test_what_genai_feeds_by_the_configuration_generates_what_torch_generates(written: SimpleNamespace) -> None:
    """Prompt first, then single tokens, each after what the graph returned."""
    decoder = written.config["model"]["decoder"]
    session = onnxruntime.InferenceSession(written.folder / decoder["filename"])
    inputs, outputs = decoder["inputs"], decoder["outputs"]
    layers = range(decoder["num_hidden_layers"])
    past = [inputs[name] % i for i in layers for name in ("past_key_names", "past_value_names")]
    present = [outputs[name] % i for i in layers for name in ("present_key_names", "present_value_names")]
    assert {value.name for value in session.get_inputs()} == {inputs["input_ids"], inputs["position_ids"], *past}
    cache = [np.zeros((1, decoder["num_key_value_heads"], 0, decoder["head_size"]), np.float32)] * len(past)
    found, new = PROMPT[0].tolist(), PROMPT.numpy()
    for _ in range(STEPS):
        positions = np.arange(len(found) - new.shape[1], len(found))[None]
        feed = {inputs["input_ids"]: new, inputs["position_ids"]: positions} | dict(zip(past, cache, strict=True))
        logits, *cache = session.run([outputs["logits"], *present], feed)
        found.append(int(logits[0, -1].argmax()))
        new = np.array([found[-1:]])
    assert found == written.expected


def test_a_sliding_window_is_in_the_graph_and_the_cache_holds_all_tokens(tmp_path: Path) -> None:
    sliding = written_as(mistral(), tmp_path, cached=True)
    assert "sliding_window" not in sliding.config["model"]["decoder"], "else GenAI cuts the cache"
    inputs = ir.load(sliding.folder / "model.onnx").graph.inputs
    assert [value.dtype for value in inputs if "past" in str(value.name)] == [ir.DataType.INT8] * 2
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[0, :3] = 0
    prompts = [{"input_ids": PROMPT.repeat(2, 1), "attention_mask": mask}, {"input_ids": PROMPT[:, :1]}]
    assert qfx.verify(sliding.qmodel, sliding.folder, prompts, decode_steps=20).max_steps < 0.01


def test_the_first_wrong_step_of_a_folder_is_named(written: SimpleNamespace, tmp_path: Path) -> None:
    """The last position that is read has another embedding."""
    assert qfx.verify(written.qmodel, written.folder, [PROMPT], decode_steps=5).first_wrong is None
    model = copy.deepcopy(written.eager)
    with torch.no_grad():
        model.transformer.wpe.parametrizations.weight.original[9] = 1
    wrong = qfx.verify(model, written.folder, [PROMPT], decode_steps=5).first_wrong
    assert wrong is not None
    assert wrong.name == "step 3"
    config = written.config["model"]["decoder"] | {"filename": "other.onnx"}
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {"decoder": config}}))
    with pytest.raises(ExportError, match=r"names a graph other than model\.onnx"):
        qfx.verify(written.qmodel, tmp_path, [PROMPT])
    (tmp_path / "genai_config.json").write_text("{}")
    with pytest.raises(ExportError, match="cannot be loaded"):
        qfx.verify(written.qmodel, tmp_path, [PROMPT])


@needs_genai
def test_genai_generates_what_torch_generates(written: SimpleNamespace) -> None:
    import onnxruntime_genai

    model = onnxruntime_genai.Model(str(written.folder))
    params = onnxruntime_genai.GeneratorParams(model)
    length = len(written.expected)
    params.set_search_options(min_length=length, max_length=length)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(PROMPT[0].tolist())
    while not generator.is_done():
        generator.generate_next_token()
    assert [int(token) for token in generator.get_sequence(0)] == written.expected


# What is refused -----------------------------------------------------------------------------------------------------

_TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 16,
}  # fmt: skip


def _llava() -> Any:
    vision = {**_TINY, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"}
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config={**_TINY, "model_type": "llama"}, image_token_index=1)
    )


REFUSED: dict[str, Callable[[], Any]] = {
    "is not a Transformers model": mlp,
    "BertModel is not a decoder-only language model": lambda: BertModel(BertConfig(**_TINY)),
    "T5ForConditionalGeneration is not a decoder-only language model": lambda: T5ForConditionalGeneration(
        T5Config(d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2, vocab_size=16)
    ),
    "LlavaForConditionalGeneration has inputs other than tokens": _llava,
    "GPT2LMHeadModel has no eos_token_id": lambda: _of(GPT2Config(n_layer=1, eos_token_id=None), eos_token_id=None),
    "GPT2LMHeadModel does not give a context length": lambda: _of(BloomConfig(hidden_size=8, n_layer=1, n_head=1)),
    "of the 2 cache layers of .* these differ: 1 LinearAttentionLayer;": lambda: _of(
        Qwen3NextConfig(**_TINY, num_key_value_heads=1, layer_types=["linear_attention", "full_attention"])
    ),
}


def _of(config: PretrainedConfig, **asked: Any) -> Any:
    """Return a model of which only the configuration is read, and what it is asked to generate."""
    make: Any = GPT2LMHeadModel
    model = make(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8))
    model.config = config
    for name, value in asked.items():
        setattr(model.generation_config, name, value)
    return model


@pytest.mark.parametrize("message", REFUSED)
def test_models_that_genai_does_not_run_are_refused_by_name(message: str) -> None:
    with torch.device("meta"), pytest.raises(ExportError, match=message):
        require_generator(REFUSED[message]())


def test_nothing_is_done_before_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel = quantize(mlp(), "int8_weight_only", tokens())
    monkeypatch.setattr(qfx.QuantizedModel, "eager", None)
    with pytest.raises(ExportError, match=r"Mlp is not a Transformers model; use export\.onnx"):
        qfx.export.genai(qmodel, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ExportError, match="no kernels for format='vitis'"):
        qfx.export.genai(qmodel, tmp_path / "new", format="vitis")
    (tmp_path / "file").touch()
    with pytest.raises(ExportError, match="file is a file"):
        qfx.export.genai(qmodel, tmp_path / "file")
    qmodel.save(tmp_path / "saved")
    with pytest.raises(ExportError, match=r"saved holds a model from qmodel\.save"):
        qfx.export.genai(qmodel, tmp_path / "saved")


# Names and configuration ---------------------------------------------------------------------------------------------


def graph(**shapes: tuple[Any, ...]) -> ir.Graph:
    """Return a graph as `transformers` calls what it takes and gives; `__` stands for a dot, outputs begin with `o`."""
    values = [ir.Value(name=name.replace("__", "."), shape=ir.Shape(shape)) for name, shape in shapes.items()]
    outputs = [value for value in values if str(value.name).startswith(("output", "logits"))]
    inputs = {value.name: value for value in values if value not in outputs}
    appended = [(inputs[f"input{value.name[6:]}"], value) for value in outputs if value.name and value.name[0] == "o"]
    nodes = [ir.node("Concat", [past, past], {"axis": 2}, outputs=[value]) for past, value in appended]
    return ir.Graph([*inputs.values()], outputs, nodes=nodes, opset_imports={"": 21})


def cache(*layers: int, values: int = 8, name: str = "cache") -> dict[str, tuple[Any, ...]]:
    """Return the shapes of the caches of some layers: 3 heads (a number written as a symbol), 8 channels of keys."""
    return {
        f"{side}__{name}__layers__{layer}__{kind}s": (1, "3", "n", 8 if kind == "key" else values)
        for layer in layers
        for side in ("input", "output")
        for kind in ("key", "value")
    }


SEEN: dict[str, tuple[Any, ...]] = {"input_ids": (1, "t"), "logits": (1, "t", 50)}


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_caches_get_the_names_of_the_configuration(name: str) -> None:
    found = graph(**SEEN, **cache(0, 10, name=name))
    assert name_cache(found) == 2
    names = {str(value.name) for value in (*found.inputs, *found.outputs)}
    assert names == {"input_ids", "logits"} | {
        f"{prefix}.{layer}.{kind}"
        for prefix in ("past_key_values", "present")
        for layer in (0, 10)
        for kind in ("key", "value")
    }


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (graph(**SEEN), "this model has no cache"),
        (graph(**SEEN, **cache(0), cache_position=(1,)), "this model has cache_position"),
        (graph(**SEEN, **cache(0), **cache(4, values=6)), "this model has keys and values of other sizes in layer 4;"),
        (
            graph(**SEEN, **{name: s for name, s in cache(3).items() if "__keys" in name}),
            "this model has keys and values of other sizes in layer 3;",
        ),
    ],
    ids=["no cache", "another input", "values of another size", "keys alone"],
)
def test_graphs_that_genai_cannot_feed_are_refused(found: ir.Graph, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        name_cache(found)


def configured(found: ir.Graph, **asked: Any) -> dict[str, Any]:
    """Return the configuration of a graph, of a model that is asked to generate so."""
    sizes = {"n_embd": 24, "n_layer": 1, "n_head": 3, "n_positions": 64}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=2)
    name_cache(found)
    return genai_config(
        found, "model.onnx", SimpleNamespace(config=config, generation_config=GenerationConfig(**asked))
    )


def test_the_configuration_says_what_the_model_was_told_of_generation() -> None:
    found = configured(graph(**SEEN, **cache(0)), eos_token_id=[3, 4], do_sample=True, temperature=0.5, top_k=7)
    assert found["model"]["eos_token_id"] == [3, 4]
    assert "bos_token_id" not in found["model"]
    assert found["search"] == {
        "past_present_share_buffer": False,
        "max_length": 64,
        "do_sample": True,
        "temperature": 0.5,
        "top_k": 7,
    }
    assert configured(graph(**SEEN, **cache(0)))["model"]["eos_token_id"] == 2
    assert [found["model"]["decoder"][name] for name in ("num_key_value_heads", "head_size")] == [3, 8]
    assert found["model"]["decoder"]["inputs"].keys() == {"input_ids", "past_key_names", "past_value_names"}
    masked = configured(graph(**SEEN, **cache(0), attention_mask=(1, "t")))
    assert masked["model"]["decoder"]["inputs"]["attention_mask"] == "attention_mask"


def test_sessions_keep_to_the_arithmetic_of_the_graph() -> None:
    found = graph(**SEEN, **cache(0))
    options = configured(found)["model"]["decoder"]["session_options"]
    assert options == {"provider_options": [], "session.qdq_matmulnbits_accuracy_level": "0"}
    found = graph(**SEEN, **cache(0))
    small = ir.node("QuantizeLinear", [found.inputs[0], found.inputs[1]])
    small.outputs[0].dtype = ir.DataType.FLOAT8E4M3FN
    found.append(small)
    assert configured(found)["model"]["decoder"]["session_options"]["graph_optimization_level"] == "ORT_DISABLE_ALL"
