"""Experts in GGUF files, files of models that stay on disk, and what is refused before anything is learned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_gguf import load, of_weight
from test_huggingface import FLOAT_ENDS, IDS, ROUTED, logits, quantized
from tiny import seeded
from torch import Tensor

import quark_fx as qfx
from quark_fx.checkpoints.gguf_reader import Reader
from quark_fx.config.quant_config import Override, QuantConfig, Target
from quark_fx.errors import ExportError

package = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

types = qfx.gguf_types
SIZES = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
ENDS = {"pad_token_id": None, "bos_token_id": 0, "eos_token_id": 0}


def qwen3(**options: Any) -> Any:
    """Return a model whose experts are as wide as transformers takes those of any file for."""
    sizes = {**SIZES, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 768, "head_dim": 128}
    config = {**sizes, "num_experts": 3, "num_experts_per_tok": 2, "norm_topk_prob": True, **ENDS, **options}
    return seeded(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**config)))


def qwen2() -> Any:
    sizes = {**SIZES, "hidden_size": 64, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
    config = transformers.Qwen2MoeConfig(**sizes, num_experts=3, num_experts_per_tok=2, **ENDS)
    return seeded(transformers.Qwen2MoeForCausalLM(config))


@cache
def session(name: str) -> qfx.Session:
    """Capture a model once."""
    return qfx.Session({"qwen3": qwen3, "qwen2": qwen2}[name](), [{"input_ids": IDS}])


MIXED = QuantConfig(
    weight=types.Q4_K,
    overrides=(Override(pattern="*.down_proj", weight=types.Q6_K),),
    exclude=ROUTED,
    target=Target.TORCH,
)
EIGHTS = QuantConfig(weight=types.Q8_0, exclude=(*ROUTED, "*.shared_expert_gate"), target=Target.TORCH)


def test_experts_are_one_tensor_for_each_projection_bit_for_bit(tmp_path: Path) -> None:
    qmodel = quantized(MIXED, session("qwen3"))
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    tensors = {t.name: t for t in package.GGUFReader(path).tensors}
    found = {name: t.tensor_type.name for name, t in tensors.items() if "_exps" in name}
    names = [f"blk.0.ffn_{name}_exps.weight" for name in ("gate", "up", "down")]
    assert found == dict(zip(names, ("Q4_K", "Q4_K", "Q6_K"), strict=True))
    layer: Any = qmodel.eager().get_submodule("model.layers.0.mlp.experts")
    expected = (*layer.gate_up_proj.chunk(2, 1), layer.down_proj)
    for name, stack in zip(names, expected, strict=True):
        read = package.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
        assert torch.equal(torch.from_numpy(read), stack)
    fields = package.GGUFReader(path).fields
    keys = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 768}
    assert {key: fields[f"qwen3moe.{key}"].contents() for key in keys} == keys
    torch.testing.assert_close(logits(load(path)), logits(qmodel), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("left", [(), ("*.gate_up_proj",), ("op:experts",)], ids=["none", "gates and ups", "all"])
def test_experts_in_float_lie_beside_a_shared_one(left: tuple[str, ...], tmp_path: Path) -> None:
    qmodel = quantized(EIGHTS.replace(exclude=(*EIGHTS.exclude, *left)), session("qwen2"))
    path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    kinds = {t.name: t.tensor_type.name for t in package.GGUFReader(path).tensors}
    assert kinds["blk.0.ffn_up_exps.weight"] == ("F32" if left else "Q8_0")
    assert kinds["blk.0.ffn_up_shexp.weight"] == "Q8_0"
    assert package.GGUFReader(path).fields["qwen2moe.expert_shared_feed_forward_length"].contents() == 5632
    torch.testing.assert_close(logits(load(path)), logits(qmodel), rtol=1e-5, atol=1e-5)


def test_what_no_type_holds_of_experts_is_named_before_calibration() -> None:
    def batches() -> Iterator[Any]:
        yield {"input_ids": IDS}
        pytest.fail("a second batch is not needed")

    with pytest.raises(ExportError) as error:
        qfx.check(qwen3(moe_intermediate_size=96), MIXED.replace(overrides=()), batches(), export="gguf")
    assert "experts.down_proj: 96 inputs are not a multiple of 256, the block of Q4_K; use Q5_0" in str(error.value)
    assert str(error.value).count("experts") == 1, "a line for the stack, not for each expert"


ALIKE: dict[str, dict[str, Any]] = {
    r"fields of qwen3moe, .* hidden_act \('silu', .* 'gelu' .*\), norm_topk_prob \(True, .* False .*\)": {
        "norm_topk_prob": False,
        "hidden_act": "gelu",
    },
    r"mlp_only_layers \(\[\], but \[0\] in this model\)": {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
    },
}


@pytest.mark.parametrize("message", ALIKE)
def test_models_that_readers_take_for_others_are_refused(message: str) -> None:
    with torch.device("meta"), pytest.raises(ExportError, match=message):
        Reader.of(qwen3(**ALIKE[message]), package)


def test_mixtures_that_its_reader_does_not_know_are_refused() -> None:
    config = transformers.OlmoeConfig(**SIZES, hidden_size=64, intermediate_size=64, num_experts=2)
    with (
        torch.device("meta"),
        pytest.raises(ExportError, match=r"does not support models of type olmoe; supported: .*qwen3moe"),
    ):
        Reader.of(transformers.OlmoeForCausalLM(config), package)


def test_how_routers_score_is_a_number() -> None:
    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "num_local_experts": 2, **ENDS}
    config = transformers.MiniMaxM2Config(**sizes, head_dim=32, rotary_dim=16, scoring_func="sigmoid")
    with torch.device("meta"):
        found = dict(Reader.of(transformers.MiniMaxM2ForCausalLM(config), package).metadata())
    assert found["minimax-m2.expert_gating_func"] == package.ExpertGatingFuncType.SIGMOID
    assert found["minimax-m2.expert_feed_forward_length"] == 96


class Scaled:
    """A reader that does more than move what it reads, or reads less of it."""

    def __init__(self, step: int, factor: float) -> None:
        self.step, self.factor = step, factor

    def process(self, weights: np.ndarray[Any, Any], name: str, **_: Any) -> Any:
        from transformers.modeling_gguf_pytorch_utils import GGUFTensor

        return GGUFTensor(weights[:: self.step] * self.factor, name, {})


@pytest.mark.parametrize(("step", "factor"), [(1, 2.0), (1, -1.0), (2, 1.0)])
def test_what_cannot_be_undone_is_refused(step: int, factor: float) -> None:
    reader = Reader("any", None, {}, {"w.weight": "w"}, Scaled(step, factor), {}, {})
    with pytest.raises(ExportError, match="transforms this tensor in a way that cannot be inverted"):
        reader.places("w", (4, 6))
    (place,) = Reader("any", None, {}, {"w.weight": "w"}, Scaled(-1, 1.0), {}, {}).places("w", (4, 6))
    assert place.rows.tolist() == [3, 2, 1, 0]
    assert place.width == 6


@pytest.mark.parametrize("experts", [8, 16])
def test_the_mixture_of_experts_is_llama_cpps(experts: int) -> None:
    """The types are those `llama_tensor_get_type_impl` chooses; eight experts are a case of their own there."""
    with torch.device("meta"):
        model = qwen3(num_experts=experts, num_hidden_layers=8)
    found = types.mixed(model, "Q4_K_M")
    more = [i in (0, 3, 6, 7) for i in range(8)]
    for i, wide in enumerate(more):
        layer = f"model.layers.{i}"
        assert of_weight(found, f"{layer}.mlp.experts.gate_up_proj") == types.Q4_K
        assert of_weight(found, f"{layer}.mlp.experts.down_proj") == (types.Q6_K if wide else types.Q4_K)
        eight = experts == 8
        value = types.Q6_K if wide else types.Q4_K
        assert of_weight(found, f"{layer}.self_attn.v_proj") == (types.Q8_0 if eight else value)
        assert of_weight(found, f"{layer}.self_attn.k_proj") == (types.Q8_0 if eight else types.Q4_K)
        assert of_weight(found, f"{layer}.self_attn.o_proj") == (types.Q5_K if eight else types.Q4_K)
        assert of_weight(found, f"{layer}.self_attn.q_proj") == types.Q4_K
    with torch.device("meta"):
        shared = types.mixed(qwen2(), "Q5_K_M")
    assert of_weight(shared, "model.layers.0.mlp.shared_expert_gate") is None, "one row, which is no matrix there"
    assert of_weight(shared, "model.layers.0.mlp.shared_expert.down_proj") == types.Q6_K
    assert of_weight(shared, "model.layers.0.mlp.shared_expert.up_proj") == types.Q5_1


@contextmanager
def peak_of_tensors() -> Iterator[list[int]]:
    """Append the largest bytes of tensors that are allocated in the block and alive at once.

    Unlike resident memory, it does not depend on what the allocator keeps or has kept.
    """
    peak = list[int]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield peak
    profiler: Any = profile.profiler
    changes = [(e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    peak.append(max(accumulate(size for _, size in sorted(changes, key=lambda change: change[0]))))


def test_a_model_on_disk_becomes_a_file_without_being_held(tmp_path: Path) -> None:
    """The largest stack of codes, 3 MiB, and a piece of it are alive at once: less than half of the file, 15 MiB."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 768, "num_hidden_layers": 3, "num_experts": 8}
    torch.set_default_dtype(torch.bfloat16)
    try:
        qwen3(**sizes).save_pretrained(tmp_path / "model", max_shard_size="20MB")
    finally:
        torch.set_default_dtype(torch.float32)
    config = EIGHTS.replace(exclude=(*FLOAT_ENDS, "op:router"))
    qmodel = qfx.quantize(
        tmp_path / "model",
        config,
        [{"input_ids": IDS}],
        resources=qfx.Resources(output_dir=tmp_path / "q"),
        progress=False,
    )
    with peak_of_tensors() as peak:
        path = qfx.export.gguf(qmodel, tmp_path / "model.gguf")
    stack, file = 8 * 2 * 768 * 256, path.stat().st_size
    assert file > 4 * stack
    assert stack <= peak[0] < file / 2
    reader = package.GGUFReader(path)
    (last,) = (t for t in reader.tensors if t.name == "blk.2.ffn_down_exps.weight")
    parameter: Tensor = qmodel.eager().get_parameter("model.layers.2.mlp.experts.parametrizations.down_proj.original")
    assert np.array_equal(last.data.reshape(8, 256, -1)[3, 5, 2:34].view(np.int8), parameter[3, 5, :32].numpy())
