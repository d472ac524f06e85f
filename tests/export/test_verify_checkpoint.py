"""`verify` of checkpoints: transformers loads what was written, and its outputs are compared with the graph's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoint_readers import read_checkpoints_here
from safetensors.torch import load_file, save_file
from test_huggingface import FLOAT_ENDS, IDS, quantized
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig
from quark_fx.errors import ExportError
from quark_fx.export.runtime import checkpoint_process
from quark_fx.export.runtime.checkpoint_runners import CHECKPOINT_RUNNERS, LlamaCppRunner, TransformersRunner
from quark_fx.export.runtime.rounding_noise import runs_with_noise, runs_with_rounded_inputs
from quark_fx.export.runtime.verification import Difference, Verification, _judged
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_WEIGHT_ONLY

CONFIG: QuantConfig = INT4_WEIGHT_ONLY.replace(group_size=32, exclude=FLOAT_ENDS)
BATCHES = [{"input_ids": IDS}, {"input_ids": IDS[:1, :7]}]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    read_checkpoints_here(monkeypatch)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return qfx.export.huggingface(quantized(CONFIG), tmp_path / "checkpoint")


def test_a_checkpoint_computes_what_the_graph_computes(here: None, checkpoint: Path) -> None:
    found = qfx.verify(quantized(CONFIG), checkpoint, BATCHES)
    assert [d.name for d in found.differences] == ["logits"]
    assert found.max_steps < 0.01
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight_scale"][:5] *= 2
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert qfx.verify(quantized(CONFIG), checkpoint, BATCHES).max_steps > 1


def test_a_checkpoint_that_needs_a_later_reader_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["version"]
    for installed, message in (("0.9.11", f"needs compressed-tensors {needed}, but 0.9.11 is installed"), (needed, "")):
        monkeypatch.setattr("quark_fx.export.runtime.checkpoint_runners.version", lambda _, found=installed: found)
        if message:
            with pytest.raises(ExportError, match=message):
                TransformersRunner(checkpoint)
        else:
            TransformersRunner(checkpoint)


SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
OF_OTHER_RANKS: dict[str, tuple[Any, str]] = {
    "2 dimensions": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)),
        "bert.pooler.dense",
    ),
    "4 dimensions": (
        lambda: transformers.DeepseekV3ForCausalLM(
            transformers.DeepseekV3Config(**SIZES, **LATENT, num_key_value_heads=4, first_k_dense_replace=1)
        ),
        "model.layers.0.self_attn.kv_b_proj",
    ),
}


@pytest.mark.parametrize("name", OF_OTHER_RANKS)
@pytest.mark.parametrize("preset", ["fp8_dynamic", "w8a8_dynamic"])
def test_tokens_of_inputs_of_any_rank_have_their_own_scales(name: str, preset: str, here: None, tmp_path: Path) -> None:
    """compressed-tensors measures one scale for all tokens of a sequence, or one for all samples of a batch."""
    build, layer = OF_OTHER_RANKS[name]
    config = qfx.presets.preset(preset)
    assert config.input is not None
    read = config.input.replace(symmetry="symmetric_full") if preset == "w8a8_dynamic" else config.input
    qmodel = quantize(seeded(build()), config.replace(input=read, exclude=(*config.exclude, "op:head")), BATCHES)
    with pytest.warns(UserWarning, match=rf"one scale for several tokens .* 2 or 4 dimensions: {layer}[.] This model"):
        qfx.export.huggingface(qmodel, tmp_path / "checkpoint")
    assert qfx.verify(qmodel, tmp_path / "checkpoint", BATCHES).verdict == "correct"


def test_a_gguf_file_computes_what_the_graph_computes(here: None, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = qfx.export.gguf(quantized(CONFIG), tmp_path / "model.gguf")
    assert qfx.verify(quantized(CONFIG), path, BATCHES).max_steps < 0.1


def test_what_cannot_be_compared_is_named(here: None, checkpoint: Path, tmp_path: Path) -> None:
    qmodel = quantized(CONFIG)
    with pytest.raises(ExportError, match=r"has no config\.json; pass a directory that qfx\.export\.huggingface"):
        qfx.verify(qmodel, tmp_path, BATCHES)
    qmodel.save(tmp_path / "saved")
    with pytest.raises(ExportError, match=r"saved was written by qmodel\.save, and transformers cannot read it; drop"):
        qfx.verify(qmodel, tmp_path / "saved", BATCHES, runtime="transformers")
    (tmp_path / "a.onnx").touch()
    with pytest.raises(ExportError, match=r"a\.onnx is neither a directory nor a \.gguf file"):
        qfx.verify(qmodel, tmp_path / "a.onnx", BATCHES, runtime="transformers")
    with pytest.raises(ExportError, match=r"gone\.gguf does not exist; write it with qfx\.export\.gguf"):
        qfx.verify(qmodel, tmp_path / "gone.gguf", BATCHES)
    with pytest.raises(ExportError, match="no batch to verify with"):
        qfx.verify(qmodel, checkpoint, [])
    with pytest.raises(ExportError, match="input 0 is empty"):
        qfx.verify(qmodel, checkpoint, [{"input_ids": IDS[:0]}])
    with pytest.raises(qfx.QuarkError, match="input_ids"):
        qfx.verify(qmodel, checkpoint, [{"ids": IDS}])
    with pytest.raises(ExportError, match="only apply to ONNX Runtime"):
        qfx.verify(qmodel, checkpoint, BATCHES, per_node=True)
    with pytest.raises(ExportError, match="does not return a single tensor; pass the model that was exported to it"):
        qfx.verify(quantize(nn.Embedding(64, 8).eval(), "int8_weight_only", [IDS]), checkpoint, [IDS])
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForNobody"]}))
    with pytest.raises(ExportError, match=r"does not load or run .*\n.*\n?AttributeError: .*LlamaForNobody"):
        qfx.verify(qmodel, checkpoint, BATCHES)


@pytest.mark.parametrize(
    ("reason", "hint"),
    [
        ("RuntimeError: q_norm has another size", r"If the file is for llama\.cpp"),
        (
            "ValueError: GGUF model with architecture smollm3 is not supported yet.",
            "transformers does not support GGUF files of",
        ),
    ],
)
def test_a_gguf_file_that_transformers_does_not_read_may_still_be_right(
    reason: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm.gguf").touch()
    failed = CompletedProcess([], 1, "", f"{reason}\n")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: failed)
    with pytest.raises(ExportError, match=rf"does not load or run .*\n{reason}\n{hint}"):
        TransformersRunner(tmp_path / "llm.gguf")(IDS)


class Llama:
    """A stand-in for `llama_cpp.Llama`: transformers computes, and inputs of matrices are rounded to 8 bits."""

    factor = 1.0  # of the last matrix

    def __init__(
        self, path: str, *, n_ctx: int, n_threads: int, n_threads_batch: int, logits_all: bool, verbose: bool
    ) -> None:
        assert logits_all
        assert n_threads_batch == n_threads
        assert verbose  # its log says why a file does not load
        self.model = checkpoint_process._load(Path(path)).eval()
        self.scores = np.zeros((n_ctx, self.model.config.vocab_size), dtype=np.float32)
        self.tokens: list[int] = []
        for module in self.model.modules():
            if isinstance(module, nn.Linear) and module is not self.model.lm_head:  # the head is in float
                module.register_forward_pre_hook(lambda module, read: (self.rounded(read[0]),))
        self.model.lm_head.weight.data *= self.factor

    @staticmethod
    def rounded(x: Tensor, block_size: int = 32) -> Tensor:
        """Round each block with torch's own quantizer: 127 steps on each side of 0."""
        rows = x.detach().reshape(-1, block_size)
        scales = rows.abs().amax(-1) / 127
        zeros = torch.zeros(len(rows), dtype=torch.int32)
        rounded: Tensor = torch.fake_quantize_per_channel_affine(rows, scales, zeros, 0, -127, 127)
        return rounded.reshape(x.shape)

    def reset(self) -> None:
        self.tokens = []

    def eval(self, tokens: list[int]) -> None:
        assert not self.tokens  # each sequence starts anew
        self.tokens = tokens
        self.scores[: len(tokens)] = self.model(torch.tensor([tokens])).logits[0].detach().numpy()


@pytest.fixture
def llama_cpp(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))


def test_llama_cpp_may_round_its_inputs_but_not_compute_other_values(
    llama_cpp: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    qmodel = quantized(CONFIG)
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    runner = qfx.evaluation.runner_of(path, "llama.cpp")
    logits = runner({"input_ids": IDS})["logits"]
    found = qfx.verify(qmodel, path, BATCHES, runtime="llama.cpp")
    assert (found.runtime, [d.name for d in found.differences]) == ("llama.cpp", ["logits"])
    assert found["logits"].max_abs > 1e-4  # of the rounding
    assert found.verdict.startswith("correct")
    torch.testing.assert_close(logits, qmodel(IDS).logits, atol=found["logits"].max_abs, rtol=0)
    monkeypatch.setattr(Llama, "factor", 1.1)
    assert qfx.verify(qmodel, path, BATCHES, runtime="llama.cpp").verdict == "wrong, from logits on"


def test_inputs_of_quantized_matrices_alone_are_rounded() -> None:
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.small = nn.Linear(256, 64, bias=False), nn.Linear(96, 8, bias=False)
            self.odd, self.left = nn.Linear(24, 8, bias=False), nn.Linear(256, 8, bias=False)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
            return self.linear(x), self.small(y), self.odd(z), self.left(x), x @ x.mT

    x, y, z = rand(4, 256), rand(4, 96), rand(4, 24)  # 256 divides the first row only, 32 the second too
    qmodel = quantize(seeded(Products()), INT8_WEIGHT_ONLY.replace(exclude=("left",)), [(x, y, z)])
    with torch.no_grad():
        exact = qmodel(x, y, z)
        expected = qmodel(Llama.rounded(x, 256), Llama.rounded(y), z)[:2] + exact[2:]
        assert not any(torch.equal(a, b) for a, b in zip(expected[:2], exact[:2], strict=True))
    ((leaves, outputs),) = runs_with_rounded_inputs(qmodel.graph_module, [[x, y, z]], 256)
    assert len(leaves) == 3
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_counts_of_tokens_are_exact_under_noise() -> None:
    class Counts(nn.Module):
        def forward(self, chosen: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            counts = torch.histc(chosen.float(), bins=8, min=0, max=7)
            return torch.cumsum(counts, 0, dtype=torch.int32), x * 2

    chosen, x = torch.arange(32) % 8, rand(8)
    qmodel = quantize(Counts().eval(), "int8_weight_only", [(chosen, x)])
    for _, (ends, doubled) in runs_with_noise(qmodel.graph_module, [[chosen, x]]):
        assert torch.equal(ends, torch.arange(4, 36, 4, dtype=torch.int32))
        assert not torch.equal(doubled, x * 2)


def test_unrelated_outputs_are_wrong_however_large_the_noise_is() -> None:
    def difference(sqnr: float) -> Difference:
        return Difference("logits", max_abs=9.0, step=1.0, share=1.0, sqnr=sqnr)

    for noise, sqnr, wrong in ((6.5, -3.0, "logits"), (6.5, 4.0, ""), (1.0, -3.0, "logits"), (40.0, 20.0, "logits")):
        found = _judged(Verification((difference(sqnr),)), {"logits": difference(noise)}, (), own_steps=False)
        assert found.wrong == wrong


def test_llama_cpp_runs_token_ids_without_padding(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"model\.gguf does not exist; write it with qfx\.export\.gguf first"):
        LlamaCppRunner(tmp_path / "model.gguf")
    with pytest.raises(ExportError, match=r"is not a \.gguf file, so llama\.cpp cannot read it"):
        LlamaCppRunner(tmp_path)
    (tmp_path / "model.gguf").touch()
    runner = LlamaCppRunner(tmp_path / "model.gguf")
    ones = torch.ones_like(IDS)
    assert (
        runner.arguments((IDS, ones))
        == runner.arguments({"input_ids": IDS, "use_cache": False})
        == ((), {"input_ids": IDS})
    )
    for batch, message in (
        ({"input_ids": IDS, "attention_mask": ones.tril()}, "does not run padded batches"),
        ({"input_ids": IDS, "position_ids": IDS}, "the batch has position_ids; pass batches of input_ids"),
        ((IDS, ones, IDS), "the batch has 3 arguments"),
        (rand(2, 3), "token ids; pass batches of input_ids of shape"),
        ({"inputs_embeds": rand(1, 2, 3)}, "the batch has inputs_embeds"),
    ):
        with pytest.raises(ExportError, match=message):
            runner.arguments(batch)


@pytest.mark.parametrize(
    ("code", "said", "hint"),
    [
        (1, "ModuleNotFoundError: No module named 'llama_cpp'", "Install llama.cpp: pip install llama-cpp-python"),
        (1, "ValueError: Failed to load model from file", "loads only files with a tokenizer: pass tokenizer= to"),
        (1, "RuntimeError: llama_decode returned 1", ""),
        (-4, "", "ended by signal 4, an illegal instruction: .* CMAKE_ARGS=-DGGML_NATIVE=OFF pip install"),
        (-6, "GGML_ASSERT failed", r"ended by signal 6, after a failed check, which the lines above name\."),
        (-9, "", r"ended by signal 9, often because memory ran out\."),
        (-11, "", r"ended by signal 11\."),
    ],
)
def test_an_error_of_llama_cpp_has_a_next_step(
    code: int, said: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llm.gguf").touch()
    monkeypatch.setattr("subprocess.run", lambda *_, **__: CompletedProcess([], code, "", said))
    with pytest.raises(ExportError) as error:
        LlamaCppRunner(tmp_path / "llm.gguf")(IDS)
    first, *lines = str(error.value).splitlines()
    assert first == f"llama.cpp does not load or run {tmp_path / 'llm.gguf'}:"
    assert lines[: bool(said)] == [said] * bool(said)
    assert re.search(hint, lines[-1]) if hint else lines == [said]


def test_outputs_have_names() -> None:
    x, y = rand(2, 3), rand(2)
    found = checkpoint_process.named_tensors({"a": (x, [y, 3]), "b": None})
    assert found.keys() == {"a.0", "a.1.0"}
    assert torch.equal(found["a.1.0"], y)
    assert [*checkpoint_process.named_tensors(x)] == [""]


@pytest.mark.parametrize(("change", "verdict"), [(1.0, "correct"), (-1.0, "wrong, from logits on")])
def test_rounding_noise_alone_is_correct_and_a_wrong_output_is_wrong(
    change: float, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"logits": y, "noise": y * 3 - y - y * 2}

    x = rand(4, 16)
    qmodel = quantize(seeded(Twice()), "int8_weight_only", [x])
    answer = {name: value.clone() for name, value in qmodel(x).items()}
    answer["logits"] *= change
    answer["noise"] += 2e-7
    runner = SimpleNamespace(
        runtime="transformers", outputs=None, results=lambda batches: [answer], runs=runs_with_noise
    )
    monkeypatch.setitem(CHECKPOINT_RUNNERS, "transformers", lambda path: runner)
    assert qfx.verify(qmodel, tmp_path, [x], runtime="transformers").verdict == verdict
