"""`target="vllm"` refuses what vLLM cannot read before a checkpoint is written, and writes what it looks for.

These tests look at rules and files; `benchmarks.in_vllm` runs vLLM.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tiny import quantize, record_of, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.config.block_formats import MXFP4, MXFP6_E2M3, MXFP8_E4M3, NVFP4
from quark_fx.config.gguf_types import Q4_1
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.config.target import Operand, stored_target
from quark_fx.graph.pass_manager import graph_pass
from quark_fx.mixed_precision.groups import groups_of
from quark_fx.numbers.formats import FP8_E4M3, FP8_E5M2, INT4, INT8, INT16, UINT4
from quark_fx.numbers.scales import E8M0_EVEN, FLOAT16
from quark_fx.passes import Rotate
from quark_fx.presets import FP8_DYNAMIC, FP8_STATIC, INT8_STATIC, SCHEMES, W4A4_DYNAMIC, W4A16_RTN, W8A8_DYNAMIC
from quark_fx.targets import VLLM
from quark_fx.targets.servers import capability

W4 = W4A16_RTN.replace(target="vllm", group_size=16)
CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
GROUPS = TensorSpec(format=FP8_E4M3, granularity=Granularity.GROUP, group_size=128, dynamic=True)
SQUARE = GROUPS.replace(dynamic=False, group_rows=128)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.o(nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)))
        return made


class Mixed(nn.Module):
    """An MLP whose result is scaled by a score that is looked up, as experts' are; all read the same value."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.gate = nn.Linear(32, 4, bias=False), nn.Linear(32, 64, bias=False)
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        score, place = self.router(x).softmax(-1).max(-1, keepdim=True)
        made = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        result: Tensor = made * score * (place + 1)
        return result


class Block(nn.Module):
    """Both halves read one value."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention, self.mlp = nn.Embedding(16, 32), Attention(), Mixed()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return (self.attention(x) + self.mlp(x)).tanh() + x  # type: ignore[no-any-return]


@cache
def block() -> qfx.Session:
    return qfx.Session(seeded(Block()), [torch.arange(8).reshape(1, 8)])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"exclude": ("*.k",)},
            r"attention\.q: int4 group 16; attention\.k: float; attention\.v: int4 group 16 \(they are one kernel",
        ),
        (
            {"overrides": (Override(pattern="*.up", weight=CHANNEL),)},
            r"mlp\.gate: int4 group 16; mlp\.up: int8 channel \(they are one kernel",
        ),
        (
            {"overrides": (Override(pattern="*.gate", weight=CHANNEL, input=TOKEN),)},
            r"mlp\.gate: int8 channel, reads int8 token dynamic; mlp\.up: int4",
        ),
        (
            {"overrides": (Override(pattern="*.v", weight=W4.weight.replace(format=UINT4, symmetry="asymmetric")),)},  # type: ignore[union-attr]
            r"attention\.q: int4 .*; attention\.k: int4 .*; attention\.v: uint4 group 16 with zero points",
        ),
    ],
    ids=["one in float", "two formats", "one activation", "zero points"],
)
def test_operators_that_vllm_fuses_are_named_where_they_differ(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(qfx.ConfigError, match=f"target='vllm' cannot run these operators as configured:\n  {named}"):
        quantize(block(), W4.replace(**changes))
    quantize(block(), W4.replace(**changes, target="torch"))


def test_what_reads_one_value_in_another_module_or_decides_is_apart() -> None:
    quantize(block(), W4.replace(exclude=("attention.*",)))
    reasons = {row.name: row.reason for row in quantize(block(), W4.replace(exclude=("*.down",))).report()}
    assert reasons["mlp.router"] == "target='vllm' does not support router with quantized weights"
    assert reasons["table"] == "target='vllm' does not support embedding with quantized weights"
    assert reasons["mlp.down"] == "excluded by '*.down'"
    assert not reasons["mlp.gate"]
    assert not reasons["attention.q"]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (FP8_STATIC.replace(weight=TensorSpec(format=FP8_E4M3)), r"down: vLLM rounds per-tensor FP8 weights again"),
        (
            QuantConfig(weight=W4.weight, input=TOKEN.replace(format=FP8_E4M3)),
            r"o: vLLM cannot multiply int4 group 16 weights by fp8_e4m3 token .*; .* int8 token dynamic",
        ),
        (
            QuantConfig(weight=CHANNEL, input=TOKEN.replace(format=FP8_E4M3)),
            r"o: vLLM cannot multiply int8 channel weights by fp8_e4m3 token dynamic activations",
        ),
        (
            QuantConfig(weight=MXFP4, input=GROUPS),
            r"o: 32 inputs are not a multiple of the group size 128; exclude it",
        ),
        (
            QuantConfig(weight=W4.weight.replace(symmetry="asymmetric"), input=TOKEN),  # type: ignore[union-attr]
            r"o: weights must not have zero points if activations are rounded",
        ),
        (
            QuantConfig(weight=W4.weight, input=TOKEN.replace(symmetry="asymmetric")),
            r"o: activations must not have zero points with packed weights",
        ),
        (QuantConfig(weight=SQUARE, input=GROUPS), r"o: its outputs or inputs are not a multiple of 128; exclude it"),
        (
            QuantConfig(
                weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL),
                input=MXFP8_E4M3.replace(dynamic=True),
            ),
            r"o: vLLM cannot multiply fp8_e4m3 channel weights by fp8_e4m3 group 32 e8m0_even dynamic activations",
        ),
        (
            QuantConfig(weight=CHANNEL.replace(symmetry="asymmetric"), input=TOKEN),
            r"o: weights must not have zero points if activations are rounded; set symmetry='symmetric'",
        ),
    ],
)
def test_weights_without_a_kernel_beside_their_activations_are_named(config: QuantConfig, why: str) -> None:
    with pytest.raises(qfx.ConfigError, match=why):
        quantize(block(), config.replace(target="vllm"))


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_square_blocks_are_multiplied_by_activations_in_groups(target: str) -> None:
    model, x = nn.Sequential(nn.Linear(256, 128)).eval(), [torch.randn(4, 256)]
    for read in (None, GROUPS.replace(granularity="token", group_size=None)):
        with pytest.raises(
            qfx.ConfigError, match=r"group 128x128 weights by .*; these weights need activations in fp8_e4m3 group 128"
        ):
            qfx.quantize(model, QuantConfig(weight=SQUARE, input=read, target=target), x)  # type: ignore[arg-type]
    config = QuantConfig(weight=SQUARE, input=GROUPS, target=target)  # type: ignore[arg-type]
    for inputs, outputs in ((64, 128), (200, 128), (128, 200)):
        with pytest.raises(qfx.ConfigError, match="its outputs or inputs are not a multiple of 128"):
            qfx.quantize(nn.Sequential(nn.Linear(inputs, outputs)).eval(), config, [torch.randn(4, inputs)])
    (row,) = qfx.quantize(model, config, x).report()
    assert row.weight == str(SQUARE)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "integers per tensor": ({"weight": TensorSpec(format=INT8)}, "not support weights in int8; use int2 to int8 per"),
    "5 and 2": ({"weight": TensorSpec(format=FP8_E5M2)}, "not support weights in fp8_e5m2"),
    "MXFP6": ({"weight": MXFP6_E2M3}, "not support weights in fp6_e2m3"),
    "16 bits": ({"weight": TensorSpec(format=INT16)}, "not support weights in int16"),
    "blocks of 64": (
        {"weight": MXFP4.replace(group_size=64)},
        "not support weights in fp4_e2m1 group 64",
    ),
    "other square blocks": ({"weight": SQUARE.replace(group_size=64)}, "fp8_e4m3 .in blocks, of 128x128"),
    "offsets": ({"weight": Q4_1}, "not support weights in uint4 group 32 offset"),
    "int16 read": ({"weight": CHANNEL, "input": TensorSpec(format=INT16)}, "not support activations in int16"),
    "measured for all": (
        {"weight": CHANNEL, "input": TensorSpec(format=INT8, dynamic=True)},
        "activations in int8 dynamic; use",
    ),
    "E8M0": (
        {"weight": SQUARE, "input": GROUPS.replace(scale=E8M0_EVEN)},
        "activations in fp8_e4m3 group 128 e8m0_even dynamic; use .* fp8_e4m3 group 128 dynamic",
    ),
    "one E8M0": (
        {"weight": CHANNEL, "input": TensorSpec(format=INT8, scale=E8M0_EVEN)},
        "activations in int8 e8m0_even; use",
    ),
    "groups of 64": (
        {"weight": SQUARE, "input": GROUPS.replace(group_size=64)},
        "activations in fp8_e4m3 group 64 dynamic",
    ),
    "rounded results": (
        {"weight": CHANNEL, "input": TensorSpec(format=INT8), "output": TensorSpec(format=INT8)},
        "not outputs or biases",
    ),
    "a cache in int8": (
        {"weight": CHANNEL, "kv_cache": TensorSpec(format=INT8)},
        "vLLM supports caches in fp8_e4m3 .* not int8",
    ),
    "a cache in int8 with a scale per head": (
        {"weight": CHANNEL, "kv_cache": TensorSpec(format=INT8, granularity=Granularity.HEAD)},
        "vLLM supports caches in fp8_e4m3 tensor, fp8_e4m3 head, fp4_e2m1 .* not int8 head",
    ),
    "a cache in FP4 without a calibrated scale": (
        {"weight": CHANNEL, "kv_cache": NVFP4.replace(dynamic=True)},
        "vLLM supports caches in .* not fp4_e2m1 group 16 e4m3 scales dynamic",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_specs_that_vllm_does_not_have_are_refused(name: str) -> None:
    fields, message = REFUSED[name]
    with pytest.raises(qfx.ConfigError, match=message):
        QuantConfig(**fields, target=VLLM)
    QuantConfig(**fields, target="torch")  # type: ignore[arg-type]


def test_what_vllm_has_is_taken() -> None:
    for preset in (W4A16_RTN, W8A8_DYNAMIC, FP8_DYNAMIC, FP8_STATIC, INT8_STATIC.replace(output=None, bias=None)):
        assert preset.replace(target="vllm").target is VLLM
    for weight in (MXFP4, MXFP8_E4M3, NVFP4, TensorSpec(format=FP8_E4M3)):
        for shared in (Granularity.TENSOR, Granularity.HEAD):
            assert QuantConfig(weight=weight, target=VLLM, kv_cache=TensorSpec(format=FP8_E4M3, granularity=shared))
    with pytest.raises(qfx.ConfigError, match="always uses the whole range that it measures at run time"):
        W4A4_DYNAMIC.replace(target="vllm")


LOADED = {
    "sglang": {"w4a16", "w8a16", "w4a16_asym", "w8a8", "int8", "fp8_dynamic", "fp8_block", "nvfp4", "nvfp4a16"},
    "vllm": SCHEMES.keys() - {"mxfp6a16", "mxfp6a8", "fp8"},
}
"""Of `fp8`, which has one scale per tensor, a fused layer would be rounded again."""


@pytest.mark.parametrize("name", LOADED)
def test_servers_have_the_schemes_that_their_code_multiplies(name: str) -> None:
    target, loaded = stored_target(name), set[str]()
    for scheme, config in SCHEMES.items():
        weight, read = config.weight, config.input
        assert weight is not None
        reasons = (
            target.refusal(weight, Operand.WEIGHT),
            target.refusal(read, Operand.INPUT),
            target.placement.refuses("linear", weight, read, None),
        )
        if not any(reasons):
            loaded.add(scheme)
            assert capability({"vllm": "vLLM", "sglang": "SGLang"}[name], weight, read)
    assert loaded == LOADED[name]
    measured = NVFP4.replace(dynamic=True)
    assert "fp4_e2m1 group 16 e4m3 dynamic" in str(target.refusal(measured, Operand.INPUT))


@cache
def mixtral() -> qfx.Session:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, max_position_embeddings=64, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    return qfx.Session(seeded(transformers.MixtralForCausalLM(config)), [{"input_ids": torch.arange(8)[None]}])


HALF = W4.replace(weight=W4.weight.replace(scale=FLOAT16, group_size=32))  # type: ignore[union-attr]
ZEROS = HALF.weight.replace(format=UINT4, symmetry="asymmetric")  # type: ignore[union-attr]


def written(folder: Path, config: QuantConfig, form: str = "compressed-tensors") -> dict[str, Any]:
    qfx.export.huggingface(quantize(mixtral(), config), folder, format=form)
    return json.loads((folder / "config.json").read_text())["quantization_config"]  # type: ignore[no-any-return]


def test_a_quantized_head_is_named_as_servers_look_for_it(tmp_path: Path) -> None:
    """A head is no linear layer to vLLM: it has it in codes only where it is named, or where `lm_head` says so."""
    config = HALF.replace(exclude=("op:experts",))
    (group,) = written(tmp_path / "ct", config)["config_groups"].values()
    assert group["targets"] == ["Linear", "lm_head"]
    (group,) = written(tmp_path / "ct2", HALF)["config_groups"].values()
    assert group["targets"] == ["Linear"]
    for form in ("awq", "gptq"):
        assert written(tmp_path / form, config, form)["lm_head"] is True
        left = HALF.replace(exclude=("op:head", "op:experts"))
        assert written(tmp_path / f"{form}2", left, form)["lm_head"] is False


def test_experts_in_float_lie_where_vllm_looks_for_them(tmp_path: Path) -> None:
    config = HALF.replace(exclude=("op:experts", "op:head"))
    ignored = written(tmp_path / "vllm", config)["ignore"]
    written(tmp_path / "torch", config.replace(target="torch", exclude=(*config.exclude, "op:router", "op:embedding")))
    stored, stacked = (load_file(tmp_path / name / "model.safetensors") for name in ("vllm", "torch"))
    apart = {f"model.layers.0.block_sparse_moe.experts.{i}.w{j}" for i in range(2) for j in (1, 2, 3)}
    assert {name.removesuffix(".weight") for name in stored if ".experts." in name} == apart
    assert {name.rpartition(".")[2] for name in stacked if ".experts." in name} == {"gate_up_proj", "down_proj"}
    assert all(any(re.match(p.removeprefix("re:"), name) for p in ignored if "re:" in p) for name in apart)
    # Of vLLM's modules one has all experts; its name is looked for.
    told = written(tmp_path / "gptq", config, "gptq")["dynamic"]
    names = [*apart, "model.layers.0.block_sparse_moe.experts"]
    assert all(any(re.match(p.removeprefix("-:"), name) for p in told) for name in names)


@pytest.mark.parametrize(
    ("weight", "form", "message"),
    [
        (ZEROS, "gptq", "GPTQ with zero points; use format='awq'"),
        (ZEROS, "gptq_v2", "GPTQ with zero points"),
        (HALF.weight.replace(group_size=16), "gptq", "GPTQ in groups of 16; use 32, 64 or 128"),  # type: ignore[union-attr]
    ],
    ids=["zero points", "zero points 2", "groups of 16"],
)
def test_layouts_that_vllm_does_not_read_are_refused_and_not_written(
    weight: TensorSpec, form: str, message: str, tmp_path: Path
) -> None:
    config = HALF.replace(weight=weight, exclude=("op:experts", "op:head"))
    with pytest.raises(qfx.ExportError, match=f"target='vllm' does not support {message}"):
        written(tmp_path / "folder", config, form)
    assert not list(tmp_path.glob("folder/*.json"))
    written(tmp_path / "awq", config, "awq")


def decoder(kind: str = "Llama", **fields: Any) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Return a language model of one layer and a batch."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64} | fields
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=2, num_key_value_heads=1)
    ids = torch.randint(64, (1, 16), generator=torch.Generator().manual_seed(0))
    return seeded(getattr(transformers, f"{kind}ForCausalLM")(config)), [{"input_ids": ids}]


ROTATED = W4.replace(passes=(*W4.passes, Rotate(streams=False, block=32)))


@pytest.mark.parametrize("rotate", [Rotate(streams=False, block=32), Rotate(streams=False)], ids=["blocks", "whole"])
def test_rotations_are_written_as_vllm_multiplies_by_them(rotate: Rotate, tmp_path: Path) -> None:
    """The float model computes the same with the weights times the stored matrices, over the roots of their sizes."""
    model, batches = decoder()
    qmodel = quantize(qfx.Session(model, batches), ROTATED.replace(passes=(*W4.passes, rotate)))
    with pytest.warns(UserWarning, match="only vLLM applies the rotations"):
        qfx.export.huggingface(qmodel, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["transform_config"]
    matrices = dict[str, Tensor]()
    for name, scheme in told["config_groups"].items():
        (where,) = scheme["apply"]
        assert (where["location"], where["inverse"], scheme["type"]) == ("input", False, "random-hadamard")
        for path in where["targets"]:
            matrices[path] = stored.pop(f"{path}.{name}_input.weight")
            assert len(matrices[path]) == scheme["head_dim"]
    assert not any("_input.weight" in name for name in stored)
    eager = qmodel.eager()
    with torch.no_grad():
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):
                matrix = matrices.pop(path, torch.ones(1, 1))
                weight: Any = eager.get_submodule(path).weight
                parts = weight.unflatten(1, (-1, len(matrix)))
                module.weight.copy_((parts @ matrix.T / len(matrix) ** 0.5).flatten(1))
        torch.testing.assert_close(model(**batches[0]).logits, qmodel(**batches[0])["logits"], atol=1e-5, rtol=1e-5)
    assert not matrices


def test_operators_that_read_one_value_share_a_matrix(tmp_path: Path) -> None:
    model, batches = decoder()
    with pytest.warns(UserWarning, match="only vLLM applies the rotations"):
        qfx.export.huggingface(quantize(qfx.Session(model, batches), ROTATED), tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["transform_config"]
    targets = [scheme["apply"][0]["targets"] for scheme in told["config_groups"].values()]
    leaves = [[path.rpartition(".")[2] for path in some] for some in targets]
    assert leaves == [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


@pytest.mark.parametrize(
    ("target", "form", "why"),
    [
        ("torch", "compressed-tensors", r"q_proj: a pass rotates its input .*target='vllm'"),
        ("vllm", "gptq", r"q_proj: GPTQ cannot store the matrix that rotates"),
        ("vllm", "awq", r"q_proj: AWQ cannot store the matrix that rotates"),
    ],
)
def test_rotations_without_a_place_are_refused(target: str, form: str, why: str, tmp_path: Path) -> None:
    model, batches = decoder()
    weight = HALF.weight
    qmodel = quantize(qfx.Session(model, batches), ROTATED.replace(target=target, weight=weight))
    with pytest.raises(qfx.ExportError, match=why):
        qfx.export.huggingface(qmodel, tmp_path / "folder", format=form)
    assert not list(tmp_path.glob("folder/*.json"))


def test_transformers_is_not_asked_for_what_a_rotated_checkpoint_means(tmp_path: Path) -> None:
    model, batches = decoder()
    qmodel = quantize(qfx.Session(model, batches), ROTATED)
    with pytest.warns(UserWarning, match="only vLLM applies the rotations"):
        qfx.export.huggingface(qmodel, tmp_path)
    with pytest.raises(qfx.ExportError, match="rotates activations, which transformers ignores"):
        qfx.export.verify(qmodel, tmp_path, batches)
    task = qfx.evaluation.LanguageModeling(batches)
    with pytest.raises(qfx.CheckpointError, match="rotates activations, which transformers ignores"):
        qfx.evaluate(tmp_path, task)


WHOLE = Rotate(streams=False, overhead=9)
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

HEAD = "vLLM rotates inputs of linear layers at run time, but not of output heads, experts, or attention keys"
BIAS = "vLLM does not rotate inputs of layers with a bias at run time"
LARGE = "vLLM supports rotations of size up to 1024 at run time, not 2048; set block=64 in Rotate"


@pytest.mark.parametrize(
    ("kind", "fields", "config", "skipped", "rotated"),
    [
        ("Llama", {}, ROTATED.replace(exclude=("op:embedding",)), {"lm_head": HEAD}, "q_proj"),
        ("Qwen2", {}, ROTATED, {"q_proj": BIAS}, "down_proj"),
        ("Llama", {"intermediate_size": 2048}, W4.replace(passes=(*W4.passes, WHOLE)), {"down_proj": LARGE}, "q_proj"),
        ("Qwen3Moe", EXPERTS, ROTATED, {"experts": HEAD}, "q_proj"),
        ("Llama", {}, ROTATED.replace(kv_cache=TensorSpec(format=FP8_E4M3)), {"self_attn": HEAD}, "q_proj"),
    ],
    ids=["head", "bias", "large", "experts", "keys"],
)
def test_what_vllm_does_not_rotate_is_skipped(
    kind: str, fields: Any, config: QuantConfig, skipped: dict[str, str], rotated: str, tmp_path: Path
) -> None:
    """With a reason in the report, and the checkpoint has the rest."""
    model, batches = decoder(kind, **fields)
    qmodel = quantize(qfx.Session(model, batches), config)
    changes = {change.name: change for change in record_of(qmodel, "Rotate").changes}
    for leaf, why in skipped.items():
        assert any(leaf in name and change.what == f"skipped: {why}" for name, change in changes.items())
    assert any(rotated in name and change.changed for name, change in changes.items())
    with pytest.warns(UserWarning, match="only vLLM applies the rotations"):
        qfx.export.huggingface(qmodel, tmp_path)


def test_nothing_is_rotated_at_run_time_for_sglang(tmp_path: Path) -> None:
    model, batches = decoder()
    qmodel = quantize(qfx.Session(model, batches), ROTATED.replace(target="sglang"))
    said = {change.name.rpartition(".")[2]: change for change in record_of(qmodel, "Rotate").changes}
    why = "skipped: SGLang does not rotate inputs at run time, but target='vllm' does"
    assert [name for name, change in said.items() if change.what == why] == [
        "q_proj and 2 more",
        "gate_proj and 1 more",
        "down_proj",
    ]
    assert said["o_proj"].changed  # weights absorb that
    qfx.export.huggingface(qmodel, tmp_path)


@graph_pass
def rotate_whatever_the_target(gm: GraphModule) -> int:
    """Rotate all, as a pass of a user's may."""
    return WHOLE(gm)


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("Qwen2", {}, rf"q_proj: its input is rotated, but {BIAS}; .*the pass's only="),
        ("Llama", {"intermediate_size": 2048}, f"down_proj: its input is rotated, but {LARGE}"),
        ("Llama", {"tie_word_embeddings": False}, f"lm_head: its input is rotated, but {HEAD}"),
    ],
)
def test_what_a_pass_rotates_regardless_is_refused(kind: str, fields: Any, why: str, tmp_path: Path) -> None:
    model, batches = decoder(kind, **fields)
    qmodel = quantize(qfx.Session(model, batches), W4.replace(passes=(*W4.passes, rotate_whatever_the_target)))
    with pytest.raises(qfx.ExportError, match=why):
        qfx.export.huggingface(qmodel, tmp_path / "folder")


def test_a_rotated_module_that_is_saved_under_another_name_is_refused(tmp_path: Path) -> None:
    text = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, use_cache=False,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=63)
    model = seeded(transformers.LlavaForConditionalGeneration(config))
    qmodel = quantize(qfx.Session(model, [{"input_ids": torch.arange(8)[None]}]), ROTATED)
    with pytest.raises(
        qfx.ExportError, match=r"q_proj: its input is rotated, but transformers saves this layer under another name"
    ):
        qfx.export.huggingface(qmodel, tmp_path / "folder")


def test_experts_share_a_scheme() -> None:
    with pytest.raises(qfx.ConfigError, match=r"experts\.gate_up_proj: float; .*experts\.down_proj: int4 .*one kernel"):
        quantize(mixtral(), HALF.replace(exclude=("*.gate_up_proj",)))
    told = Override(pattern="op:experts", weight=CHANNEL, input=TOKEN)
    with pytest.raises(qfx.ConfigError, match=r"gate_up_proj: experts of a checkpoint need float activations"):
        quantize(mixtral(), HALF.replace(overrides=(told,)))
    assert VLLM.checkpoints.refuses("gptq", {"sym": True, "bits": 2, "group_size": 32}, []).startswith("GPTQ in 2 bits")


def test_a_search_gives_fused_operators_one_candidate() -> None:
    _, groups = groups_of(mixtral().captured.module)
    layer = "model.layers.0."
    together = [set(group.names) for group in groups if len(group.names) > 1]
    assert {f"{layer}self_attn.{name}_proj" for name in "qkv"} in together
    assert {f"{layer}mlp.experts.{name}_proj" for name in ("gate_up", "down")} in together


def test_groups_of_int4_may_be_any() -> None:
    assert not VLLM.checkpoints.refuses("compressed-tensors", {}, [])
    assert (
        VLLM.refusal(TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16), qfx.targets.Operand.WEIGHT)
        is None
    )


def test_a_stored_model_whose_target_nobody_registered_is_written_without_its_rules() -> None:
    with pytest.raises(qfx.ConfigError, match="known only by its name, from a stored model"):
        _ = stored_target("nowhere").onnx
    assert stored_target("nowhere").checkpoints.stacks
