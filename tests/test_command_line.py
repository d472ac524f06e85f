"""The command line: what it writes can be used, and every mistake of a user ends in a message and an exit code."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sentences
import torch
from byte_pairs import byte_pairs
from checkpoint_readers import read_checkpoints_here
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
from PIL import Image
from safetensors.torch import save_file
from tiny import rand
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner, Result

import quark_fx as qfx
from quark_fx.command_line.app import app
from quark_fx.command_line.doctor import EXTRAS
from quark_fx.command_line.entry import main
from quark_fx.passes import LowRank
from quark_fx.presets import PRESETS

ROOT = Path(__file__).resolve().parent.parent

PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")

FACTORIES = """
import torch
from torch import nn


def cnn():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))


def with_example():
    return cnn(), torch.randn(2, 3, 8, 8)


def broken():
    raise ValueError("no weights here")


def number():
    return 3


def of_size(pixels):
    return cnn()


SIZE = 8


class First(nn.Module):
    def forward(self, pair):
        return pair[0]
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer and 320 byte pairs, with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "llm"
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=320, max_position_embeddings=32)).save_pretrained(folder)
    byte_pairs().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a module of factories, a text, arrays and images."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "text.txt").write_text("\n".join(sentences.CALIBRATION))
    np.save(tmp_path / "x.npy", rand(12, 3, 8, 8).numpy())
    labels = torch.arange(12) % 4
    np.savez(tmp_path / "labeled.npz", x=rand(12, 3, 8, 8).double().numpy(), labels=labels.numpy())
    pixels = np.random.default_rng(0).integers(0, 255, (12, 8, 8, 3), dtype=np.uint8)
    for index, values in enumerate(pixels):
        place = tmp_path / "images" / str(index % 4)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(place / f"{index}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return tmp_path


def call(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result


def answer(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json").stdout)


def test_a_pass_that_changed_nothing_is_said(checkpoint: Path) -> None:
    config = qfx.presets.W4A16_RTN.replace(passes=(LowRank(rank=2, overhead=9),), target="vllm")
    Path("c.json").write_text(json.dumps(config.to_dict()))
    data = ("--data", "text.txt", "--length", 16, "--samples", 8)
    why = "skipped: target='vllm' does not compute in float next to a layer"
    arguments = ("quantize", checkpoint, "--config", "c.json", "--group-size", 32, *data, "-o", "saved")
    assert f"LowRank changed nothing: {why}" in call(*arguments).stdout
    assert answer(*arguments)["idle"] == {"LowRank": why}


def test_a_checkpoint_becomes_a_verified_file_a_saved_model_and_a_checkpoint_by_commands_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ("--data", "text.txt", "--length", 16, "--samples", 24)
    made = answer(
        "quantize", checkpoint, "--preset", "w4a16_gptq", "--group-size", 32, *data, "-o", "a.onnx", "-o", "q"
    )
    assert [(w["path"], w["kind"]) for w in made["written"]] == [("a.onnx", "ONNX"), ("q", "saved")]
    assert made["written"][0]["max_steps"] < 0.01
    assert made["written"][0]["bytes"] == Path("a.onnx").stat().st_size
    assert made["data"] == {"batches": 3, "first": "input_ids (8, 16)"}
    assert {p["weight"] for p in made["operators"]} == {"int4 group 32", "float"}
    assert answer("verify", "a.onnx", "q", *data)["max_steps"] < 0.01
    call("export", "q", "--float", checkpoint, "--format", "compressed-tensors", "-o", "ct")
    assert (Path("ct") / "tokenizer.json").is_file()
    found = answer("verify", "ct", "q", *data)
    assert found["max_steps"] < 0.01
    assert [w["runtime"] for w in made["written"]] == ["onnxruntime", None]
    assert found["runtime"] == "transformers"
    read_checkpoints_here(monkeypatch)
    judged = [answer("evaluate", m, *data, "--reference", checkpoint)["figures"] for m in ("a.onnx", "q", "ct")]
    assert all(figures["perplexity"] == pytest.approx(judged[0]["perplexity"], rel=1e-5) for figures in judged)
    assert all(0 < figures["KL"] < 1 for figures in judged)
    (logits,) = answer("compare", "a.onnx", "ct", *data)["outputs"]
    assert logits["name"] == "logits"
    assert logits["sqnr"] > 100
    call("quantize", checkpoint, "--preset", "w4a16_rtn", "--group-size", 32, "-o", "b.gguf", "-o", "r")
    (in_file,), (saved,) = (answer("compare", checkpoint, m, *data)["outputs"] for m in ("b.gguf", "r"))
    assert in_file["sqnr"] == pytest.approx(saved["sqnr"], abs=1)
    alone = answer("evaluate", "b.gguf", *data)  # on windows that the tokenizer in the file makes
    assert (alone["task"], alone["samples"]) == ("language-modeling", 24)
    for path, kind in (
        ("a.onnx", "ONNX file"),
        ("q", "quantized model of quark_fx"),
        ("ct", "checkpoint (compressed-tensors, pack-quantized)"),
    ):
        seen = answer("inspect", path)
        assert seen["kind"] == kind
        assert seen["bytes_by_format"].keys() == (
            {"int4 group 32", "float"} if path == "q" else {"int4 group 32", "float32"}
        )


def test_an_encoder_reads_lines_and_its_cosine_is_that_with_the_float_model(folder: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(**sizes, vocab_size=320)).save_pretrained("bert")
    byte_pairs().save_pretrained("bert")
    data = ("--data", "text.txt", "--samples", 16)
    call("quantize", "bert", "--preset", "int8_static", *data, "-o", "bert.onnx", "--no-verify")
    figures = answer("evaluate", "bert.onnx", *data, "--reference", "bert")["figures"]
    assert 0.9 < figures["cosine"] < 0.99999


def test_a_dry_run_says_what_is_going_to_happen_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    made = answer(
        "quantize", "factories:cnn", "--preset", "int8_static", "--data", "x.npy", "-o", "a.onnx", "--dry-run"
    )
    assert made["outputs"] == [{"path": "a.onnx", "kind": "ONNX", "format": None}]
    assert made["data"] == {"batches": 2, "first": "(8, 3, 8, 8)"}
    assert made["expected"]["memory"] > 0
    assert made["expected"]["seconds"] > 0
    assert made["config"] == PRESETS["int8_static"].to_dict()
    assert sorted(p for p in folder.iterdir() if p.name != "__pycache__") == before


def test_a_dry_run_asks_the_format_and_errors_are_json(folder: Path) -> None:
    before = sorted(folder.iterdir())
    options = ("--preset", "int8_static", "--data", "x.npy", "-o", "q", "--format", "gptq", "--dry-run")
    result = call("quantize", "factories:cnn", *options, "--json", code=1)
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "ExportError"
    assert "is not a Transformers model" in error["message"]
    assert error["message"] in result.stderr
    assert not call("quantize", "factories:cnn", *options, code=1).stdout
    assert sorted(p for p in folder.iterdir() if p.name != "__pycache__") == before


def test_a_target_is_quantized_for_and_the_file_verified_in_its_runtime(folder: Path) -> None:
    pytest.importorskip("openvino")
    options = ("--preset", "int8_static", "--data", "x.npy", "--target", "openvino")
    made = answer("quantize", "factories:cnn", *options, "-o", "a.onnx", "-o", "q")
    assert made["config"]["target"] == "openvino"
    found = answer("verify", "a.onnx", "q", "--data", "x.npy", "--runtime", "openvino")
    assert found["runtime"] == "openvino"
    assert found["max_steps"] <= 1
    line = call("quantize", "factories:cnn", *options, "-o", "a.onnx").stdout
    assert re.search(r"wrote a\.onnx .*verified: in openvino at most \d\.\d+ quantization steps", line), line
    assert made["written"][0]["runtime"] == "openvino"
    refused = call("quantize", "factories:cnn", *options[:-1], "tensorrt", "-o", "a.onnx", code=1)
    assert "TensorRT" in refused.stderr


def test_a_checkpoint_in_bfloat16_is_read_in_what_onnx_runtime_computes(checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained("narrow")
    options = ("--preset", "w4a16_rtn", "--group-size", 32)
    assert answer("quantize", "narrow", *options, "-o", "q", "--dry-run")["dtype"] == "bfloat16"
    made = answer("quantize", "narrow", *options, "-o", "a.onnx")
    assert made["dtype"] == "float32"
    assert made["written"][0]["max_steps"] < 0.01


def test_a_streamed_run_writes_a_saved_model_with_its_tokenizer(checkpoint: Path) -> None:
    options = ("--preset", "w4a16_gptq", "--group-size", 32, "--data", "text.txt", "--length", 16, "--samples", 16)
    call("quantize", checkpoint, *options, "-o", "streamed", "--stream")
    call("quantize", checkpoint, *options, "-o", "q", "--resume", "blocks")
    (logits,) = answer("compare", "streamed", "q", "--data", "text.txt", "--length", 16)["outputs"]
    assert logits["max_abs"] == 0


def test_conversations_and_texts_of_installed_packages_are_data(checkpoint: Path, folder: Path) -> None:
    shutil.copytree(checkpoint, "chat")
    Path("chat/chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    messages = [{"role": "user", "content": sentence} for sentence in sentences.CALIBRATION]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": messages}))
    (folder / "package_of_text").mkdir()
    (folder / "package_of_text" / "text.txt").write_text("\n".join(sentences.CALIBRATION))
    dry = ("--preset", "w4a16_gptq", "--group-size", 32, "--length", 16, "--samples", 8, "-o", "q", "--dry-run")
    for data in ("chats.jsonl", "package_of_text:text.txt"):
        made = answer("quantize", "chat", *dry, "--data", data)
        assert made["data"] == {"batches": 1, "first": "input_ids (8, 16)"}
    judged = answer("evaluate", "chat", "--data", "package_of_text:text.txt", "--length", 16, "--samples", 4)
    assert judged["figures"].keys() == {"perplexity"}


@pytest.mark.parametrize("data", ["x.npy", "images", "x.safetensors", ""])
def test_a_factory_is_quantized_on_data_of_any_kind_or_on_its_own_example(data: str) -> None:
    save_file({"x": rand(6, 3, 8, 8)}, "x.safetensors")
    options = ("--data", data) if data else ()
    name = f"factories:{'cnn' if data else 'with_example'}"
    said = call("quantize", name, "--preset", "int8_static", *options, "-o", "q").stderr
    assert (f"warning: no --data: calibrating only on the example batch of {name};" in said) == (not data)
    assert "no --data" not in call("quantize", "factories:with_example", "--preset", "fp16", "-o", "h").stderr
    expected = answer("inspect", "q")["operators"]
    assert [(p["name"], p["weight"], p["activation"]) for p in expected] == [
        ("0", "int8 channel", "uint8"),
        ("3", "int8 channel", "uint8"),
    ]


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Hands the array to ONNX Runtime's quantizer."""

    def __init__(self) -> None:
        self.batches = iter([{"x": np.load("x.npy")}])

    def get_next(self) -> Any:
        return next(self.batches, None)


def test_sizes_are_those_of_all_that_an_operator_holds(folder: Path) -> None:
    """Of recurrent weights, and of scales and zero points, wherever an operator has them."""
    import factories  # type: ignore[import-not-found]

    network = nn.Sequential(nn.LSTM(16, 16), factories.First(), nn.Linear(16, 32))
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(network.eval(), (rand(2, 2, 16),), "float.onnx", dynamo=False, input_names=["x"])
    quantize_dynamic("float.onnx", "dynamic.onnx", per_channel=True)
    blocks = MatMulNBitsQuantizer("float.onnx", bits=4, block_size=16, is_symmetric=False)
    blocks.process()
    blocks.model.save_model_to_file("blocks.onnx")
    sizes = {
        path: [p["bytes"] for p in answer("inspect", path)["operators"]] for path in ("float.onnx", "dynamic.onnx")
    }
    recurrent, linear = 2 * 4 * 16 * 16, 16 * 32
    assert sizes["float.onnx"] == [4 * recurrent, 4 * linear]
    # A scale and a zero point for each output: 4 bytes and 1.
    assert sizes["dynamic.onnx"] == [recurrent + 2 * 4 * 16 * 5, linear + 32 * 5]
    assert formats_in("dynamic.onnx") == [("int8 channel", "uint8 dynamic")] * 2
    (_, packed) = answer("inspect", "blocks.onnx")["operators"]
    assert (packed["weight"], packed["bytes"]) == ("uint4 group 16", linear // 2 + 32 * 4 + 32)


def test_a_weight_that_two_operators_read_counts_once() -> None:
    weight = onnx.numpy_helper.from_array(np.ones((8, 8), np.float32), "shared")
    nodes = [onnx.helper.make_node("MatMul", [a, "shared"], [b], name=b) for a, b in (("x", "y"), ("y", "z"))]
    x, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 8]) for name in "xz")
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [z], [weight])), "shared.onnx")
    seen = answer("inspect", "shared.onnx")
    assert sum(part["count"] for part in seen["operators"]) == 2
    assert seen["bytes_by_format"] == {"float32": 4 * 8 * 8}


@pytest.mark.parametrize(("mover", "extra"), [("MaxPool", []), ("Tile", ["ones"]), ("Gather", ["zero"])])
def test_codes_are_seen_through_operators_that_move_them(mover: str, extra: list[str]) -> None:
    """A pool of windows of one value, a single copy, and one image."""
    node, shape = onnx.helper.make_node, {"kernel_shape": [1, 1]} if mover == "MaxPool" else {}
    arrays = {"scale": np.float32(0.1), "at": np.uint8(3), "w": np.ones((8, 8), np.float32)}
    arrays |= {"ones": np.ones(4, np.int64), "zero": np.zeros(1, np.int64)}
    nodes = [
        node("QuantizeLinear", ["x", "scale", "at"], ["codes"]),
        node("DequantizeLinear", ["codes", "scale", "at"], ["rounded"]),
        node(mover, ["rounded", *extra], ["moved"], **shape),
        node("MatMul", ["moved", "w"], ["z"]),
    ]
    x, z = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 8, 8]) for name in "xz")
    constants = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "g", [x], [z], constants)), "moved.onnx")
    assert formats_in("moved.onnx") == [("float32", "uint8")]


def formats_in(path: str) -> list[tuple[str, str]]:
    return [(part["weight"], part["activation"]) for part in answer("inspect", path)["operators"]]


def test_files_of_onnx_runtimes_own_quantizer_are_read(folder: Path) -> None:
    import factories

    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(factories.cnn().eval(), (rand(12, 3, 8, 8),), "float.onnx", dynamo=False, input_names=["x"])
    quantize_dynamic("float.onnx", "dynamic.onnx")
    quantize_static("float.onnx", "qdq.onnx", Reader(), per_channel=True)
    quantize_static("float.onnx", "integers.onnx", Reader(), quant_format=QuantFormat.QOperator)
    assert formats_in("float.onnx") == [("float32", "float")] * 2
    assert formats_in("dynamic.onnx") == [("int8", "uint8 dynamic")] * 2
    assert formats_in("qdq.onnx") == [("int8 channel", "int8")] * 2
    assert formats_in("integers.onnx") == [("int8", "int8")] * 2
    seen = answer("inspect", "qdq.onnx")["runtime"]
    assert {k["kernel"] for k in seen["kernels"] if k["in_integers"]} >= {"QLinearConv"}


@pytest.mark.parametrize(
    ("preset", "format", "expected"),
    [
        ("int8_static", "qoperator", [("int8 channel", "uint8")] * 2),
        ("int8_dynamic", "qdq", [("int8 channel", "uint8 dynamic")] * 2),
        ("int8_dynamic", "qoperator", [("int8 channel", "uint8 dynamic")] * 2),
        ("int4_weight_only", "matmul_nbits", [("int8 channel", "float"), ("int4 group 32", "float")]),
        ("fp8_static", "qdq", [("fp8_e4m3 channel", "fp8_e4m3")] * 2),
        ("fp16", "qdq", [("fp16", "fp16")] * 2),
        ("mxfp4", "qdq", [("fp4_e2m1 group 3", "fp4_e2m1 blocks dynamic"), ("float32", "float")]),
    ],
)
def test_files_of_every_kind_of_ours_are_read(preset: str, format: str, expected: list[tuple[str, str]]) -> None:
    call(
        "quantize", "factories:with_example", "--preset", preset, "--format", format, "-o", "a.onnx", "--data", "x.npy"
    )
    assert formats_in("a.onnx") == expected


@pytest.mark.parametrize("format", ["gptq", "awq", "gguf"])
def test_checkpoints_of_other_layouts_are_read(format: str, checkpoint: Path) -> None:
    path = "a.gguf" if format == "gguf" else "a"
    spelled = () if format == "gguf" else ("--format", format)
    call("quantize", checkpoint, "--preset", "w4a16_rtn", "--group-size", 32, *spelled, "-o", path, "--no-verify")
    seen = answer("inspect", path)["bytes_by_format"]
    assert (
        seen.keys()
        == {
            "gptq": {"int4 group 32", "float32"},
            "awq": {"uint4 group 32", "float32"},  # it has zero points, whatever they are
            "gguf": {"Q4_0", "F32"},
        }[format]
    )


GROUP = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "group_size": None, "dynamic": True}
NVFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
BLOCKS = FP8 | {"strategy": "block", "block_structure": [128, 128]}
E4M3 = torch.float8_e4m3fn
Stored = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def compressed(spelled: str, weights: object, inputs: object = None, **said: object) -> dict[str, object]:
    """Return what llm-compressor writes of one group of layers."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": spelled}
    kept = {"ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors", "format": spelled}
    return {"config_groups": {"group_0": group}, **kept, **said}


def gptq(**said: object) -> dict[str, object]:
    """Return what GPTQModel writes."""
    return {
        "quant_method": "gptq",
        "format": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "lm_head": False,
        **said,
    }


def packed(bits: int, groups: int) -> Stored:
    """Return the tensors of a layer of GPTQ, 128 to 64 features."""
    return {
        "qweight": (torch.int32, (128 * bits // 32, 64)),
        "qzeros": (torch.int32, (groups, 64 * bits // 32)),
        "scales": (torch.float16, (groups, 64)),
        "g_idx": (torch.int32, (128,)),
    }


BYTES: Stored = {"weight": (E4M3, (64, 128))}
CODES: Stored = {"weight_packed": (torch.uint8, (64, 64)), "weight_scale": (E4M3, (64, 8))}

OTHERS: dict[str, tuple[dict[str, object], Stored, str, str, str]] = {
    "W4A16": (
        compressed("pack-quantized", GROUP),
        {"weight_packed": (torch.int32, (64, 16)), "weight_scale": (torch.bfloat16, (64, 4))},
        "compressed-tensors, pack-quantized",
        "int4 group 32",
        "float",
    ),
    "W8A8": (
        compressed("int-quantized", TOKEN | {"strategy": "channel", "dynamic": False}, TOKEN),
        {"weight": (torch.int8, (64, 128)), "weight_scale": (torch.bfloat16, (64, 1))},
        "compressed-tensors, int-quantized",
        "int8 channel",
        "int8 token dynamic",
    ),
    "NVFP4": (
        compressed("nvfp4-pack-quantized", NVFP4, NVFP4 | {"scale_dtype": "torch.float8_e4m3fn", "dynamic": "local"}),
        CODES,
        "compressed-tensors, nvfp4-pack-quantized",
        "fp4_e2m1 group 16 e4m3 scales",
        "fp4_e2m1 group 16 e4m3 scales dynamic",
    ),
    "MXFP4A16": (
        compressed("mxfp4-pack-quantized", MXFP4),
        {"weight_packed": (torch.uint8, (64, 64)), "weight_scale": (torch.uint8, (64, 4))},
        "compressed-tensors, mxfp4-pack-quantized",
        "fp4_e2m1 group 32 e8m0 scales",
        "float",
    ),
    "FP8_BLOCK": (
        compressed("float-quantized", BLOCKS),
        {**BYTES, "weight_scale": (torch.bfloat16, (1, 1))},
        "compressed-tensors, float-quantized",
        "fp8_e4m3 block 128x128",
        "float",
    ),
    "GPTQ": (gptq(), packed(4, 4), "gptq", "int4 group 32", "float"),
    "GPTQ, asymmetric": (gptq(sym=False, group_size=-1), packed(4, 1), "gptq", "uint4 channel", "float"),
    "GPTQ v2, 3 bits": (gptq(format="gptq_v2", bits=3), packed(3, 4), "gptq, gptq_v2", "int3 group 32", "float"),
    "GPTQ, bits of a layer": (
        gptq(dynamic={"-:.*other.*": {}, r"+:.*\.proj": {"bits": 8, "group_size": 64, "sym": False}}),
        packed(8, 2),
        "gptq",
        "uint8 group 64",
        "float",
    ),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "modules_to_not_convert": ["lm_head"]},
        {**packed(4, 4), "qweight": (torch.int32, (128, 8))},
        "awq",
        "uint4 group 32",
        "float",
    ),
}
"""What a tool writes: its configuration, the tensors of a layer, and what is reported of them."""


def others(said: dict[str, object], tensors: Stored) -> str:
    """Write a checkpoint of one layer and a head in float."""
    Path("other").mkdir()
    layer = {f"model.layers.0.proj.{name}": torch.zeros(shape).to(dtype) for name, (dtype, shape) in tensors.items()}
    head = {"lm_head.weight": torch.zeros(8, 64), "model.layers.0.self_attn.k_scale": torch.zeros(1)}
    save_file(layer | head, "other/model.safetensors")
    configured(said)
    return "other"


def configured(said: dict[str, object]) -> None:
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    Path("other/config.json").write_text(json.dumps(known | {"quantization_config": said}))


@pytest.mark.parametrize("name", OTHERS)
def test_checkpoints_of_llm_compressor_and_gptqmodel_are_read(name: str) -> None:
    said, tensors, kind, weight, activation = OTHERS[name]
    seen = answer("inspect", others(said, tensors))
    layer, head = sorted(seen["operators"], key=lambda part: part["name"], reverse=True)
    assert seen["kind"] == f"checkpoint ({kind})"
    assert (layer["weight"], layer["activation"], layer["reason"]) == (weight, activation, "")
    assert layer["bytes"] == sum(torch.Size(shape).numel() * dtype.itemsize for dtype, shape in tensors.values())
    assert (head["weight"], head["bytes"]) == ("float32", 2048)
    assert head["reason"].endswith("its config.json")


def test_rounded_keys_and_values_and_layers_that_were_left_out_are_reported() -> None:
    said = compressed("float-quantized", FP8, FP8, kv_cache_scheme=FP8)
    parts = answer("inspect", others(said, {**BYTES, "weight_scale": (torch.float32, (1,))}))["operators"]
    assert [(p["name"], p["kind"], p["weight"], p["activation"]) for p in parts] == [
        ("lm_head", "layer", "float32", "float"),
        ("model.layers.0.proj", "layer", "fp8_e4m3", "fp8_e4m3"),
        ("model.layers.0.self_attn", "attention", "none", "fp8_e4m3"),
    ]
    configured(gptq(dynamic={"-:lm_.*": {}}, lm_head=True))
    (head, *_) = answer("inspect", "other")["operators"]
    assert head["reason"] == "left out by dynamic in its config.json"


def test_yaml_starts_from_a_preset_and_options_change_it(folder: Path) -> None:
    (folder / "config.yaml").write_text("preset: int8_static\nweight: {format: int4}\n")
    call("quantize", "factories:with_example", "--config", "config.yaml", "--exclude", "op:head", "-o", "q")
    found = {row.name: row.weight for row in qfx.load("q").report()}
    assert found == {"0": "int4 channel", "3": ""}


def test_what_analyze_proposes_is_a_configuration_of_less_error() -> None:
    found = answer(
        "analyze",
        "factories:cnn",
        "--preset",
        "int4_weight_only",
        "--data",
        "x.npy",
        "-o",
        "less.yaml",
        "--html",
        "a.html",
    )
    assert {row["name"] for row in found["rows"]} == {"0", "3"}
    assert found["remedied"] < found["error"]
    assert found["config"]["preset"] == "int4_weight_only"
    call("quantize", "factories:cnn", "--config", "less.yaml", "--data", "x.npy", "-o", "q", "--html", "q.html")
    assert all("<html" in Path(page).read_text(encoding="utf-8") for page in ("a.html", "q.html"))
    assert qfx.load("q").config == qfx.QuantConfig.from_dict(found["config"])


def test_what_search_finds_is_a_configuration_that_keeps_the_budget() -> None:
    data = ("--data", "x.npy", "--batch-size", 4)
    candidates = ("--candidate", "int8_weight_only", "--candidate", "int3", "--candidate", "other.yml")
    Path("other.yml").write_text("preset: int8_weight_only\nweight: {format: int5}\n")
    found = answer("search", "factories:cnn", *candidates, *data, "--bits", 7, "-o", "found.yaml", "--html", "f.html")
    assert found["candidates"] == ["int8_weight_only", "int3 channel", "int5 channel"]
    assert found["verified"][0]["fits"]
    call("quantize", "factories:cnn", "--config", "found.yaml", *data, "-o", "q")
    totals = qfx.load("q").report().totals
    assert totals["bytes_after"] == found["verified"][0]["size"]
    assert 8 * totals["bytes_after"] / (3 * 8 * 9 + 288 * 4) <= 7
    assert "<html" in Path("f.html").read_text(encoding="utf-8")


def test_the_float_and_the_exported_model_have_an_accuracy_on_labeled_data() -> None:
    call("quantize", "factories:cnn", "--preset", "int8_static", "--data", "x.npy", "-o", "a.onnx")
    stored = np.load("labeled.npz")
    import factories

    model = factories.cnn().eval()
    right = model(torch.from_numpy(stored["x"]).float()).argmax(1) == torch.from_numpy(stored["labels"])
    found = answer("evaluate", "factories:cnn", "--data", "labeled.npz")["figures"]
    assert found == {"accuracy": float(right.double().mean())}
    figures = answer("evaluate", "a.onnx", "--data", "labeled.npz", "--reference", "factories:cnn")["figures"]
    assert figures.keys() == {"accuracy", "agreement", "KL"}
    assert 0 < figures["KL"] < 0.1
    assert answer("evaluate", "a.onnx", "--data", "images")["task"] == "classification"


def test_the_commands_of_the_documentation_run(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```console\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    commands = [line.split()[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) == PAGE.count("\nquark-fx ") == 12
    Path("llm").symlink_to(checkpoint)
    Path("heldout.txt").symlink_to("text.txt")
    Path("heldout").symlink_to("images")
    network = "from torch import nn\n\ndef digits():\n    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 4))\n"
    written("networks.py", network)
    monkeypatch.setitem(sys.modules, "networks", sys)  # so that the one of other tests, or none, is there again
    monkeypatch.delitem(sys.modules, "networks")
    for command in commands:
        call(*command)
    assert {path.name for path in folder.iterdir()} >= {"int4.onnx", "int4", "int4-checkpoint", "digits.onnx"}


def factory(name: str) -> tuple[object, ...]:
    return ("quantize", f"factories:{name}", "--preset", "int8_static", "-o", "a.onnx")


def taken() -> str:
    """Return the path of a file where a directory is to be."""
    Path("taken").touch()
    return "taken"


MISTAKES: dict[str, tuple[Callable[[Path], tuple[object, ...]], str]] = {
    "no checkpoint": (
        lambda _: ("quantize", "gone", "--preset", "fp16", "-o", "q"),
        r"gone does not exist; pass the dir",
    ),
    "a preset": (
        lambda _: ("quantize", "factories:cnn", "--preset", "int8_statik", "-o", "q"),
        r"unknown preset 'int8_statik'; .*did you mean 'int8_static'\?",
    ),
    "a factory that raises": (
        lambda _: factory("broken"),
        r"factories:broken raised ValueError: no weights here at .*:16",
    ),
    "an opset": (
        lambda _: ("quantize", "gone", "--preset", "fp16", "-o", "q.onnx", "--opset", 99),
        r"opset 99 cannot be written for target='onnx'; choose one from 14 to 25",
    ),
    "a factory of nothing": (lambda _: factory("number"), r"factories:number returned a int; return a module"),
    "no factory": (lambda _: factory("cnnn"), r"factories has no 'cnnn'; did you mean 'cnn'\?"),
    "a factory with arguments": (
        lambda _: factory("of_size"),
        r"factories:of_size must be callable without .*'pixels'; add",
    ),
    "a file of Python": (
        lambda _: ("quantize", "factories.py:cnn", "--preset", "fp16", "-o", "q"),
        r"factories.py is a file; write the function as package.module:name, such as factories:name",
    ),
    "no function": (lambda _: factory("SIZE"), r"factories:SIZE is a int; name a function"),
    "no module": (
        lambda _: ("quantize", "gone.models:cnn", "--preset", "fp16", "-o", "q"),
        r"module 'gone' is neither in .* nor installed",
    ),
    "a device": (
        lambda _: ("quantize", "gone", "--preset", "fp16", "-o", "q", "--device", "cudaa"),
        r"device='cudaa' cannot be used",
    ),
    "no data": (lambda _: factory("cnn"), r"this configuration needs data: pass --data"),
    "a latency without a unit": (
        lambda _: ("search", "factories:cnn", "--candidate", "int4", "--candidate", "int8", "--latency", "12m"),
        r"latency must be a fraction of float, such as 0.6, or text like \"12ms\", not '12m'",
    ),
    "a latency of many times that of float": (
        lambda _: ("search", "factories:cnn", "--candidate", "int4", "--candidate", "int8", "--latency", 12),
        r"latency=12 is 12 times the float model's latency; for milliseconds, write \"12ms\"",
    ),
    "a latency without data": (
        lambda _: ("search", "factories:cnn", "--candidate", "int4", "--candidate", "int8", "--latency", 0.6),
        r"this configuration needs data: pass --data",
    ),
    "missing data": (lambda _: (*factory("cnn"), "--data", "gone.npy"), r"the data gone.npy does not exist"),
    "text without a tokenizer": (
        lambda llm: ("quantize", bare(llm), "--preset", "w4a16_rtn", "--data", "text.txt", "-o", "q"),
        r"text.txt is text, but no tokenizer was found in bare; pass --tokenizer DIRECTORY",
    ),
    "a text too short": (
        lambda llm: ("quantize", llm, "--preset", "fp16", "--data", written("short.txt", "Hello."), "-o", "q"),
        r"the text has \d tokens, fewer than a window of 32; pass more text",
    ),
    "no text": (
        lambda llm: ("quantize", llm, "--preset", "fp16", "--data", binary("noise.txt"), "-o", "q"),
        r"noise.txt cannot be read as text",
    ),
    "images of several sizes": (
        lambda _: (*factory("cnn"), "--data", odd_image()),
        r"images/9.png has 9 x 10 pixels, but the images before it have 8 x 8; set a common size .*--image-size",
    ),
    "images of another size": (
        lambda _: (*factory("cnn"), "--data", "images", "--image-size", 12),
        r"shape|mat1|size",
    ),
    "how images are read, for arrays": (
        lambda _: (*factory("cnn"), "--data", "x.npy", "--image-size", 8, "--std", "1,1,1"),
        r"x.npy is not a folder of images; drop --image-size, --std",
    ),
    "how text is read, for images": (
        lambda _: (*factory("cnn"), "--data", "images", "--windows"),
        r"images is not text; drop --windows",
    ),
    "a damaged image": (
        lambda _: (*factory("cnn"), "--data", damaged_image()),
        r"the image images/0/0.png cannot be read",
    ),
    "a folder without images": (lambda _: (*factory("cnn"), "--data", empty()), r"empty holds no images"),
    "numbers": (lambda _: (*factory("cnn"), "--data", "images", "--mean", "a,b"), r"'a,b' is not a list of numbers"),
    "a pickle": (lambda _: (*factory("cnn"), "--data", pickled()), r"objects.npy cannot be read: Object arrays"),
    "no directory": (lambda _: (*factory("with_example")[:-1], "gone/a.onnx"), r"the directory gone does not exist"),
    "a file in the way": (lambda _: (*factory("with_example")[:-1], taken()), r"taken is a file, but this output"),
    "blocks among a model": (
        lambda llm: ("quantize", llm, "--preset", "w4a16_rtn", "-o", "q", "--resume", llm),
        r"checkpoint directory .*llm holds a model \(config.json\); choose another directory for finished blocks",
    ),
    "all operators excluded": (
        lambda _: (*factory("with_example"), "--exclude", "*"),
        r"nothing was quantized: all \d operators stay in float \(excluded by '\*'\)",
    ),
    "an output of a long name": (
        lambda _: (*factory("with_example")[:-1], "n" * 300),
        r"cannot be written: .*too long",
    ),
    "a model of a long name": (lambda _: ("inspect", "n" * 300), r"n+ does not exist"),
    "a page in no directory": (lambda _: (*factory("with_example"), "--html", "gone/a.html"), r"gone does not exist"),
    "a page of a long name": (
        lambda _: (*factory("with_example"), "--html", "n" * 300),
        r"cannot be written: .*too long",
    ),
    "a page below a file": (
        lambda _: (*factory("with_example"), "--html", "text.txt/page.html"),
        r"text.txt/page.html cannot be written: .*text.txt is a file",
    ),
    "its own weights": (
        lambda llm: ("quantize", llm, "--preset", "w4a16_rtn", "--format", "compressed-tensors", "-o", llm),
        r"llm holds model.safetensors, which would be lost, and no config.json there marks it as quantized",
    ),
    "a GGUF file as a model": (
        lambda _: ("quantize", written("llm.gguf", ""), "--preset", "fp16", "-o", "q"),
        r"llm.gguf cannot be read as a GGUF file: .*; copy or export it again",
    ),
    "a GGUF file to run": (
        lambda llm: ("evaluate", written("llm.gguf", ""), "--data", "text.txt", "--tokenizer", llm),
        r"llm.gguf cannot be read as a GGUF file: .*; copy or export it again",
    ),
    "a quantized checkpoint": (
        lambda llm: ("quantize", quantized(llm), "--preset", "fp16", "-o", "q"),
        r"quantized is quantized by .?bitsandbytes.* \(quantization_config in config.json\)",
    ),
    "a format that cannot": (
        lambda llm: ("quantize", llm, "--preset", "int8_static", "--data", "text.txt", "--format", "gptq", "-o", "q"),
        r"cannot hold|holds weights only|gptq",
    ),
    "a yaml": (
        lambda _: ("quantize", "factories:with_example", "--config", written("c.yaml", "wait: 3"), "-o", "q"),
        r"QuantConfig has no field wait; it has .*did you mean",
    ),
    "no yaml": (
        lambda _: ("quantize", "factories:with_example", "--config", "gone.yaml", "-o", "q"),
        r"the configuration gone.yaml cannot be read",
    ),
    "nothing to inspect": (lambda _: ("inspect", "gone.onnx"), r"gone.onnx does not exist"),
    "no ONNX": (lambda _: ("inspect", written("text.onnx", "hello")), r"text.onnx cannot be read as an ONNX file"),
    "no chat template": (
        lambda checkpoint: (
            "quantize",
            checkpoint,
            *("--preset", "w4a16_rtn", "-o", "q"),
            *("--data", written("chats.jsonl", '{"messages": [{"role": "user", "content": "a"}]}')),
        ),
        r"the tokenizer lacks a chat template",
    ),
    "no such package": (
        lambda checkpoint: ("quantize", checkpoint, "--preset", "w4a16_rtn", "-o", "q", "--data", "not_here.at:all"),
        r"file not_here.at:all does not exist, and package not_here.at is not installed",
    ),
    "damaged settings": (
        lambda _: ("inspect", others(gptq(dynamic={"+:(": {}}), packed(4, 4))),
        r"other: config.json in quantization_config does not match the tensors",
    ),
    "no GGUF": (lambda _: ("inspect", written("text.gguf", "hello")), r"text.gguf cannot be read as a GGUF file"),
    "no quantized model": (
        lambda llm: ("verify", "a.onnx", llm, "--data", "text.txt"),
        r"llm is not a quantized model of quark_fx",
    ),
    "no reference": (
        lambda _: ("evaluate", "factories:cnn", "--data", "x.npy"),
        r"the cosine metric compares vectors with those of the float model: pass the float model as --reference",
    ),
    "no labels": (
        lambda _: ("evaluate", "factories:cnn", "--data", "x.npy", "--task", "classification"),
        r"x.npy contains no array called `labels`",
    ),
    "images for another network": (
        lambda _: ("evaluate", "factories:cnn", "--data", "images", "--image-size", 12),
        r"the Sequential does not run on a batch: (addmm: )?mat1 and mat2",
    ),
    "images as text": (
        lambda _: ("evaluate", "factories:cnn", "--data", "x.npy", "--task", "language-modeling"),
        r"language modeling takes batches \{'input_ids'",
    ),
    "budget": (
        lambda _: (*factory("with_example"), "--memory", "lots"),
        r"memory must be a number of bytes, or text like",
    ),
}


def bare(llm: Path) -> str:
    Path("bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (Path("bare") / name).symlink_to(llm / name)
    return "bare"


def quantized(llm: Path) -> str:
    config = json.loads((llm / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}
    }
    shutil.copytree(llm, "quantized")
    (Path("quantized") / "config.json").write_text(json.dumps(config))
    return "quantized"


def written(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def binary(name: str) -> str:
    Path(name).write_bytes(b"\xff\xfe\x00\x81" * 9)
    return name


def odd_image() -> str:
    Image.fromarray(np.zeros((10, 9, 3), dtype=np.uint8)).save("images/9.png")
    return "images"


def damaged_image() -> str:
    Path("images/0/0.png").write_bytes(b"\x89PNG nothing")
    return "images"


def empty() -> str:
    Path("empty").mkdir()
    return "empty"


def pickled() -> str:
    np.save("objects.npy", np.array([{}, []], dtype=object), allow_pickle=True)
    return "objects.npy"


@pytest.mark.parametrize("mistake", list(MISTAKES))
def test_a_mistake_ends_in_a_message_and_code_1(mistake: str, checkpoint: Path) -> None:
    arguments, words = MISTAKES[mistake]
    result = call(*arguments(checkpoint), code=1)
    assert result.stderr.count("error: ") == 1
    assert re.search(words, result.stderr), result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


@pytest.mark.parametrize("place", ["a.onnx", "folder", "new/folder"])
def test_a_place_that_cannot_be_written_is_named_before_the_work(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be allowed to write everywhere."""
    monkeypatch.setattr("quark_fx.system.writable.os.access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(qfx, "quantize", lambda *_, **__: pytest.fail("the work was done"))
    result = call("quantize", "factories:with_example", "--preset", "fp16", "-o", place, code=1)
    assert re.search(rf"{place} cannot be written: .* is not writable; choose another path", result.stderr)


USAGE = {
    "no output": (("quantize", "factories:cnn", "--preset", "fp16"), "--output"),
    "neither preset nor file": (("quantize", "factories:cnn", "-o", "q"), "--preset NAME or --config"),
    "both": (("quantize", "a:b", "--preset", "fp16", "--config", "c", "-o", "q"), "--preset NAME or --config"),
    "a format": (("quantize", "a:b", "--preset", "fp16", "-o", "q", "--format", "gptk"), "did you mean 'gptq'?"),
    "a format of files": (("quantize", "a:b", "--preset", "fp16", "-o", "q", "--format", "qdq"), "ends with .onnx"),
    "two formats": (
        ("quantize", "a:b", "--preset", "fp16", "-o", "q", "--format", "awq", "--format", "gptq"),
        "both formats of",
    ),
    "a file that nothing writes": (
        ("quantize", "a:b", "--preset", "fp16", "-o", "q.TXT"),
        "q.TXT: write to .onnx, .gguf, or a directory",
    ),
    "a program": (
        ("quantize", "a:b", "--preset", "fp16", "-o", "q.pte"),
        "q.pte: write to .onnx, .gguf, or a directory",
    ),
    "an output twice": (("quantize", "a:b", "--preset", "fp16", "-o", "q", "-o", "./q"), "is passed as --output twice"),
    "an opset of a directory": (("quantize", "a:b", "--preset", "fp16", "-o", "q", "--opset", "21"), "ends with .onnx"),
    "streams to a file": (
        ("quantize", "a:b", "--preset", "fp16", "-o", "a.onnx", "--stream"),
        "--stream can only write a dir",
    ),
    "a dtype": (
        ("quantize", "a:b", "--preset", "fp16", "-o", "q", "--dtype", "float8"),
        "'float8' is not one of",
    ),
    "a metric": (("analyze", "a:b", "--preset", "int8_static", "--metric", "klx"), "'klx' is not one of"),
    "a metric of a search": (
        ("search", "a:b", "--candidate", "int4", "--bits", "5", "--metric", "klx"),
        "'klx' is not one of",
    ),
    "a task": (("evaluate", "a:b", "--task", "chess"), "chess"),
    "no budget": (("search", "a:b", "--candidate", "int4", "--candidate", "int8"), "--bits 4.5"),
    "a command": (("quantise",), "quantise"),
}


@pytest.mark.parametrize("mistake", list(USAGE))
def test_a_call_that_cannot_be_meant_ends_with_code_2(mistake: str) -> None:
    arguments, words = USAGE[mistake]
    result = call(*arguments, code=2)
    assert words in re.sub(r"\s+│?\s*│?\s*", " ", result.stderr), result.stderr
    assert "Traceback" not in result.output


def test_what_nobody_expected_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(qfx, "quantize", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        call(*factory("with_example"))


def test_a_file_of_another_model_is_told_from_its_own() -> None:
    for preset, name in (("int8_static", "a"), ("int8_weight_only", "b")):
        call("quantize", "factories:with_example", "--preset", preset, "-o", name, "-o", f"{name}.onnx")
    call("verify", "a.onnx", "a", "--data", "x.npy")
    other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 4)).eval()
    qfx.export.onnx(qfx.quantize(other, "int8_static", [torch.rand(4, 3, 8, 8)], progress=False), "other.onnx")
    result = call("verify", "other.onnx", "a", "--data", "x.npy", code=1)
    assert re.search(
        "its outputs do not resemble the outputs of torch: check that the file was exported", result.stderr
    )
    result = call("verify", "b.onnx", "a", "--data", "x.npy", "--limit", 0.1, code=1)
    assert re.search(
        r"b.onnx in onnxruntime is [\d.]+ quantization steps from a, more than 0.1; pass --per-node", result.stderr
    )


def test_presets_are_all_there_and_say_what_the_documentation_says_of_data() -> None:
    found = {row["preset"]: row["needs_data"] for row in answer("presets")}
    page = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z0-9_]+)` \|(.*)\|$", page, re.MULTILINE)
    assert found == {name: "calibration set" in cells for name, cells in rows}
    assert "Rotate" in call("presets").stdout


def test_doctor_knows_every_extra_of_the_project_and_its_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["optional-dependencies"]
    for extra, (_, packages) in EXTRAS.items():
        assert [re.split(r"[<>=]", package)[0] for package in declared[extra]] == list(packages)
    assert declared.keys() - EXTRAS.keys() == {"examples", "test", "docs", "dev"}, "made of the others"
    assert answer("doctor")["torch"] == torch.__version__


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=env)


def test_the_module_is_the_command() -> None:
    done = run("-m", "quark_fx", "presets", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["preset"] for row in json.loads(done.stdout)} == set(PRESETS)


def test_json_is_all_there_is_on_stdout(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["quark-fx", *map(str, factory("with_example")), "--json"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert json.loads(capfd.readouterr().out)["totals"]["quantized"] == 2


def test_an_error_is_one_line_on_stderr(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setattr(sys, "argv", ["quark-fx", *map(str, factory("broken"))])
    with pytest.raises(SystemExit, match="1"):
        main()
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: factories:broken raised ValueError")
    assert "Traceback" not in err


def test_the_package_imports_neither_typer_nor_rich_and_the_command_names_what_is_missing() -> None:
    program = (
        "import sys; sys.modules['typer'] = None\nimport quark_fx\nassert 'rich' not in sys.modules\n"
        "from quark_fx.command_line.entry import main\nmain()"
    )
    done = run("-c", program)
    assert done.returncode == 1
    assert done.stderr == "error: the command line needs typer: pip install 'quark_fx[cli]'\n"


def test_the_console_script_leads_to_the_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"quark-fx": "quark_fx.command_line.entry:main"}
