"""Models larger than memory: weights that stay in files, results that are written there, files that lie."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model
from test_resume import assert_same, outcome
from tiny import all_but, images, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.checkpoints import shelf
from quark_fx.checkpoints.configuration import limited_modules
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.config.quant_config import QuantConfig
from quark_fx.engine.checkpoint import Checkpoint
from quark_fx.errors import CheckpointError, ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.model.model_directory import tensor_file
from quark_fx.presets import INT8_STATIC, W4A16_AWQ, W4A16_GPTQ

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 64}
EXPERTS = {**LLAMA, "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS |= {"head_dim": 8}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS)),
}
"""A model whose tensors are stored as it has them, one that has one of them twice, one whose experts are stacked."""

IDS = [{"input_ids": torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(i))} for i in range(3)]


@pytest.fixture(autouse=True)
def everything_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors stay in memory otherwise, and all tensors here are small."""
    monkeypatch.setattr(shelf, "_SMALL", 1)


def stored(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Write the shards of a model, and return it."""
    model = seeded(MODELS[name]()).to(dtype)
    model.save_pretrained(directory, max_shard_size="40KB")
    return model


def is_mapped(tensor: Tensor) -> bool:
    """Tell whether a tensor's memory is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last, inode = re.match(r"(\w+)-(\w+) \S+ \S+ \S+ (\d+)", line).groups()  # type: ignore[union-attr]
        if int(first, 16) <= tensor.data_ptr() < int(last, 16):
            return inode != "0"
    return False


needs_maps = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (70, 90)])
def test_a_shelf_gives_back_what_was_put(dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path) -> None:
    tensor = (10 * torch.randn(shape)).to(dtype)
    found = Shelf(tmp_path / "new").put(tensor.mT if len(shape) > 1 else tensor)
    assert torch.equal(found, tensor.mT if len(shape) > 1 else tensor)
    assert found.dtype == dtype
    assert not list((tmp_path / "new").iterdir()), "the file has a name"


@needs_maps
def test_a_shelf_keeps_nothing_in_memory_but_what_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_mapped(Shelf(tmp_path).put(torch.ones(1000)))
    monkeypatch.setattr(shelf, "_SMALL", 4001)
    assert not is_mapped(Shelf(tmp_path).put(torch.ones(1000)))


def test_writing_to_what_is_on_a_shelf_harms_nobody(tmp_path: Path) -> None:
    found = Shelf(tmp_path).put(torch.ones(1000))
    found[0] = 2
    assert found[0] == 2


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Let no file grow beyond `room` bytes meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with full_disk(2000), pytest.raises(CheckpointError, match=f"cannot write .* MiB to {tmp_path}.* free disk space"):
        Shelf(tmp_path).put(torch.ones(1000))
    with pytest.raises(CheckpointError, match="cannot be created"):
        Shelf(Path(__file__) / "below")


@needs_maps
@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_opened_without_its_weights(name: str, tmp_path: Path) -> None:
    model = stored(name, tmp_path / "model")
    found = qfx.open_checkpoint(tmp_path / "model", scratch=tmp_path / "scratch")
    assert type(found) is type(model)
    assert not found.training
    parameters = dict(found.named_parameters())
    assert parameters.keys() == dict(model.named_parameters()).keys(), "what is tied is one parameter"
    assert all(is_mapped(p) for p in parameters.values())
    with torch.no_grad():
        assert torch.equal(found(**IDS[0]).logits, model(**IDS[0]).logits)
    assert not list((tmp_path / "scratch").iterdir())


class Patches(nn.Module):
    """A small vision transformer with a buffer of its own and one that is not stored."""

    scale: Tensor
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, stride=4)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("steps", torch.arange(4.0)[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).mT * self.scale + self.steps
        out: Tensor = self.head(self.norm(self.layer(tokens).mean(1)))
        return out


@needs_maps
def test_any_model_is_opened_by_its_factory(tmp_path: Path) -> None:
    model = seeded(Patches())
    model.scale.fill_(3.0)
    save_model(model, str(tmp_path / "any name.safetensors"))
    for path in (tmp_path, tmp_path / "any name.safetensors"):
        found = qfx.open_checkpoint(path, Patches)
        assert all(is_mapped(p) for p in found.parameters())
        with torch.no_grad():
            assert torch.equal(found(rand(2, 3, 8, 8)), model(rand(2, 3, 8, 8)))


def test_weights_of_another_dtype_become_the_model_s(tmp_path: Path) -> None:
    model = stored("llama", tmp_path)
    shard = next(tmp_path.glob("*.safetensors"))
    save_file({name: t.double() for name, t in load_file(shard).items()}, shard, {"format": "pt"})
    found = qfx.open_checkpoint(tmp_path)
    assert {p.dtype for p in found.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(found(**IDS[0]).logits, model(**IDS[0]).logits)


CASES: dict[str, tuple[str, Any, torch.dtype]] = {
    "gptq": ("llama, tied", W4A16_GPTQ, torch.float32),
    "gptq of experts": ("qwen3 moe", W4A16_GPTQ, torch.float32),
    "awq": ("llama", W4A16_AWQ, torch.float32),
    "awq of experts": ("qwen3 moe", W4A16_AWQ, torch.bfloat16),
}


@needs_maps
@pytest.mark.parametrize("case", all_but(CASES, ["awq"]))
def test_streamed_and_in_memory_are_the_same_bits(case: str, tmp_path: Path) -> None:
    name, config, dtype = CASES[case]
    stored(name, tmp_path / "model", dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto").eval()
    config = config.replace(weight=config.weight.replace(group_size=16))
    streamed = quantize(tmp_path / "model", config, IDS, resources=qfx.Resources(output_dir=tmp_path / "out"))  # type: ignore[arg-type]
    assert_same(outcome(streamed), outcome(quantize(model, config, IDS)))
    assert all(is_mapped(t) for t in stored_tensors(streamed.graph_module).values() if t.dim() > 1)
    out = tmp_path / "out"
    assert sorted(file.name for file in out.iterdir()) == ["graph.json", tensor_file(out).name]
    loaded = qfx.load(tmp_path / "out")
    assert torch.equal(loaded(**IDS[0]).logits, streamed(**IDS[0]).logits)


def test_any_model_streams(tmp_path: Path) -> None:
    save_model(seeded(Patches()), str(tmp_path / "model.safetensors"))
    model, data = qfx.open_checkpoint(tmp_path, Patches), images(4, 4)
    streamed = quantize(model, INT8_STATIC, data, resources=qfx.Resources(output_dir=tmp_path / "out"))
    in_memory = quantize(seeded(Patches()), INT8_STATIC, data)
    assert_same(outcome(streamed), outcome(in_memory))


@pytest.mark.parametrize(
    ("finished", "config"), [(0, W4A16_GPTQ), (5, W4A16_GPTQ), (5, W4A16_AWQ)], ids=["0-gptq", "5-gptq", "5-awq"]
)
def test_an_interrupted_stream_is_continued(
    finished: int, config: QuantConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("llama", tmp_path / "model")
    saved, most, save = list[Any](), finished, Checkpoint.save

    def keep(self: Checkpoint, *args: Any) -> None:
        if len(saved) == most:
            raise KeyboardInterrupt
        saved.append(args[:2])
        save(self, *args)

    monkeypatch.setattr(Checkpoint, "save", keep)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "model", config, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    if finished:
        assert [file.name for file in out.iterdir()] == ["unfinished"], "nothing there looks finished"
        with pytest.raises(
            ConfigError,
            match=r"output_dir .* contains finished blocks of a run with different data.*delete .*unfinished and",
        ):
            quantize(tmp_path / "model", config, IDS[1:], resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    else:
        assert not out.exists(), "a run that did nothing left something"
    with pytest.raises(qfx.QuarkError, match="holds no readable quantized model"):
        qfx.load(out)
    most = -1
    continued = quantize(tmp_path / "model", config, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    undisturbed = quantize(tmp_path / "model", config, IDS, resources=qfx.Resources(output_dir=tmp_path / "other"))  # type: ignore[arg-type]
    assert_same(outcome(continued), outcome(undisturbed))
    assert len(saved) == 2 * len(set(saved)), "a finished block was learned again"


def test_an_interruption_after_saving_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("llama", tmp_path / "model")
    out = tmp_path / "out"

    def stop(*_: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quark_fx.quantization.clear", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "model", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    monkeypatch.undo()
    assert {file.name for file in out.iterdir()} == {"graph.json", tensor_file(out).name, "unfinished"}
    (out / ".saving-0123456789abcdef").touch()  # as a saver leaves when it is killed
    continued = quantize(tmp_path / "model", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    assert {file.name for file in out.iterdir()} == {"graph.json", tensor_file(out).name}
    undisturbed = quantize(tmp_path / "model", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=tmp_path / "other"))  # type: ignore[arg-type]
    assert_same(outcome(continued), outcome(undisturbed))


def test_an_interruption_while_saving_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("llama", tmp_path / "model")
    out, sync = tmp_path / "out", os.fsync

    def stop(descriptor: int) -> None:
        sync(descriptor)
        if any(out.glob(".saving-*")):  # finished blocks are synced before
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "model", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    assert [file.name for file in out.iterdir()] == ["unfinished"]
    monkeypatch.setattr(os, "fsync", sync)
    quantize(tmp_path / "model", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=out))  # type: ignore[arg-type]
    assert sorted(file.name for file in out.iterdir()) == ["graph.json", tensor_file(out).name]


def test_a_shelf_keeps_no_file_open(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        kept = [Shelf(tmp_path).put(torch.full((100,), float(i))) for i in range(300)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert [float(t[-1]) for t in kept] == list(range(300))


def test_modules_that_are_there_twice_have_their_own_weights(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
            self.b = self.a

    model = seeded(Both())
    save_model(model, str(tmp_path / "model.safetensors"))
    found = qfx.open_checkpoint(tmp_path, Both)
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), model.parameters(), strict=True))


def test_tensors_that_the_model_does_not_have_are_named(tmp_path: Path) -> None:
    stored("llama", tmp_path / "model")
    configured(tmp_path / "model", num_hidden_layers=1)
    with pytest.warns(UserWarning, match=r"holds 9 tensors that the model does not have: model.layers.1"):
        qfx.open_checkpoint(tmp_path / "model")
    save_model(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), str(tmp_path / "three.safetensors"))
    with pytest.warns(UserWarning, match="holds 2 tensors that the model does not have: 2.bias, 2.weight"):
        qfx.open_checkpoint(tmp_path / "three.safetensors", lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_an_output_directory_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "graph.json").write_text("mine")
    with pytest.raises(ConfigError, match=r"output_dir .* already contains graph.json"):
        quantize(seeded(Patches()), INT8_STATIC, images(4), resources=qfx.Resources(output_dir=tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["graph.json"]


def first_shard(directory: Path) -> Path:
    return min(directory.glob("*.safetensors"))


def change_index(directory: Path, change: Callable[[dict[str, str]], Any]) -> None:
    file = directory / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def truncate(directory: Path) -> None:
    shard = first_shard(directory)
    shard.write_bytes(shard.read_bytes()[:-1000])


def swap_shards(directory: Path) -> None:
    a, b, *_ = sorted(directory.glob("*.safetensors"))
    a.rename(directory / "c"), b.rename(a), (directory / "c").rename(b)


def hold_twice(directory: Path) -> None:
    a, b, *_ = sorted(directory.glob("*.safetensors"))
    save_file(load_file(a) | load_file(b), b, {"format": "pt"})


def widen(directory: Path) -> None:
    shard = first_shard(directory)
    save_file({name: torch.cat([t, t]) for name, t in load_file(shard).items()}, shard, {"format": "pt"})


def drop_tensor(directory: Path) -> None:
    shard = first_shard(directory)
    name, *rest = sorted(load_file(shard))
    save_file({n: t for n, t in load_file(shard).items() if n in rest}, shard, {"format": "pt"})
    change_index(directory, lambda index: index.pop(name))


def pickled(directory: Path) -> None:
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, directory / "pytorch_model.bin")


def configured(directory: Path, **values: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def generating(directory: Path, content: bytes) -> None:
    (directory / "generation_config.json").write_bytes(content)


def escape_kernel(directory: Path) -> None:
    configured(directory, attn_implementation="some/kernel")
    file = directory / "config.json"
    file.write_text(file.read_text().replace("attn_impl", "attn_\\u0069mpl"))


LIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (truncate, "is damaged or truncated"),
    "header": (lambda d: first_shard(d).write_bytes(b"\xff" * 400), "is damaged or truncated"),
    "empty": (lambda d: first_shard(d).write_bytes(b""), "is damaged or truncated"),
    "missing": (lambda d: first_shard(d).unlink(), "is missing; fetch it again"),
    "mislabelled": (swap_shards, r"lacks .*, which the index lists for it"),
    "twice": (hold_twice, r"both hold"),
    "unlisted": (lambda d: change_index(d, lambda index: index.popitem()), r"does not list .*, which the shards hold"),
    "outside": (
        lambda d: change_index(d, lambda index: index.update({"x": "../../etc/passwd.safetensors"})),
        r"names the shard '\.\./\.\./etc/passwd.safetensors', which is not a safetensors file next to it",
    ),
    "absolute": (lambda d: change_index(d, lambda i: i.update({"x": "/etc/passwd.safetensors"})), "names the shard"),
    "other kind": (lambda d: change_index(d, lambda index: index.update({"x": "shard.bin"})), "names the shard"),
    "no table": (lambda d: (d / "model.safetensors.index.json").write_text("[]"), "index.json is damaged"),
    "index": (lambda d: (d / "model.safetensors.index.json").write_text("{"), "index.json is damaged"),
    "pickled": (pickled, "holds only pickled weights, which may run code"),
    "no model": (lambda d: (d / "config.json").unlink(), "does not say which model this is"),
    "class": (lambda d: configured(d, architectures=["Nobody"]), "names 'Nobody', which transformers"),
    "function": (lambda d: configured(d, architectures=["pipeline"]), "names 'pipeline', which transformers"),
    "kernel": (
        lambda d: configured(d, attn_implementation="some/kernel"),
        "asks transformers to fetch code: some/kernel",
    ),
    "kernel of a part": (
        lambda d: configured(d, _attn_implementation={"": "some/kernel"}),
        "to fetch code: some/kernel",
    ),
    "kernel of experts": (lambda d: configured(d, parts=[{"experts_implementation": "a/b"}]), "to fetch code: a/b"),
    "kernel in escapes": (escape_kernel, "asks transformers to fetch code: some/kernel"),
    "quantized": (
        lambda d: configured(d, quantization_config={"bits": 4}),
        "is quantized by .*; pass the original float",
    ),
    "quantized part": (
        lambda d: configured(d, text_config={"quantization_config": {"quant_method": "fp8"}}),
        "holds no codes of fp8, which config.json names in text_config.quantization_config; fetch",
    ),
    "result": (lambda d: (d / "graph.json").write_text("{}"), "holds graph.json, so .*; read it with qfx.load"),
    "versions": (lambda d: configured(d, configuration_files=["config.1.0.json"]), "refers to"),
    "shape": (widen, "is not a checkpoint of LlamaForCausalLM|expects"),
    "tensor": (drop_tensor, "lacks "),
    "many layers": (lambda d: configured(d, num_hidden_layers=100_000), "asks for num_hidden_layers=100000, but the"),
    "layers beyond memory": (lambda d: configured(d, num_hidden_layers=10**15), "asks for num_hidden_layers=1000000"),
    "a long generation": (lambda d: generating(d, b"[" * 200_000), "generation_config.json cannot be read: .*nested"),
    "a large generation": (lambda d: generating(d, b" " * (1 << 24) + b"{}"), "generation_config.json cannot be read"),
    "a generation of bytes": (lambda d: generating(d, b"\xff"), "generation_config.json cannot be read"),
    "layers": (lambda d: configured(d, num_hidden_layers=3), "lacks .*layers.2"),
}


@pytest.mark.parametrize("lie", LIES)
def test_files_that_lie_are_named(lie: str, tmp_path: Path) -> None:
    stored("llama", tmp_path)
    change, message = LIES[lie]
    change(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        qfx.open_checkpoint(tmp_path)


def test_weights_that_may_not_be_read_are_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("llama", tmp_path)

    def refused(path: Path, *_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(
        CheckpointError, match=r"cannot be read: .*Permission denied.*; change its permissions, or copy it"
    ):
        qfx.open_checkpoint(first_shard(tmp_path))


def open_any(path: str | Path, *args: Any, **options: Any) -> Any:
    return qfx.open_checkpoint(path, *args, **options)


def index_to(directory: Path, file: str) -> None:
    """Tell transformers to read an index, all of whose tensors are in a file beside or outside of the directory."""
    whole = load_file(directory / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(whole, file)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    configured(directory, transformers_weights="model.safetensors.index.json")


DECOYS: dict[str, Callable[[Path], Any]] = {
    "index": lambda d: index_to(d, "other.safetensors"),
    "outside": lambda d: index_to(d, "../other.safetensors"),
    "pickle": lambda d: index_to(d, "other.bin"),
    "file": lambda d: configured(d, transformers_weights="other.safetensors"),
    "adapter": lambda d: (d / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "x"}'
    ),
}


@pytest.mark.parametrize("decoy", DECOYS)
def test_only_files_that_were_checked_are_read(decoy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "model"
    model = seeded(MODELS["llama"]())
    model.save_pretrained(directory)
    other = {name: torch.zeros_like(t) for name, t in load_file(directory / "model.safetensors").items()}
    for file in (directory / "other.safetensors", tmp_path / "other.safetensors"):
        save_file(other, file, {"format": "pt"})
    torch.save(other, directory / "other.bin")
    DECOYS[decoy](directory)
    seen = list[set[str]]()
    read = transformers.LlamaForCausalLM.from_pretrained

    def look(folder: Path, **options: Any) -> Any:
        seen.append({file.name for file in folder.iterdir()})
        return read(folder, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", look)
    found = open_any(directory, scratch=tmp_path / "scratch")
    assert torch.equal(found.lm_head.weight, model.lm_head.weight)
    index, shard = "model.safetensors.index.json", "model-00001-of-00001.safetensors"
    assert seen == [{"config.json", "generation_config.json", index, shard}]
    assert found.config.name_or_path == found.model.name_or_path == str(directory)
    assert str(tmp_path / "scratch") not in str(found.config)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_file_given_by_name_is_read_alone(tmp_path: Path) -> None:
    whole, sharded = tmp_path / "whole", tmp_path / "sharded"
    model = seeded(MODELS["llama"]())
    model.save_pretrained(whole)
    other = seeded(MODELS["llama"](), 1)
    save_model(other, str(whole / "finetuned.safetensors"), {"format": "pt"})
    assert torch.equal(open_any(whole / "finetuned.safetensors").lm_head.weight, other.lm_head.weight)
    assert torch.equal(open_any(whole).lm_head.weight, model.lm_head.weight)
    (whole / "finetuned.safetensors").rename(whole / "blob")  # transformers would unpickle it
    assert torch.equal(open_any(whole / "blob").lm_head.weight, other.lm_head.weight)
    stored("llama", sharded)
    change_index(sharded, lambda index: index.update(dict.fromkeys(index, "../../outside.bin")))
    with pytest.raises(CheckpointError, match=rf"{first_shard(sharded)} lacks "):
        open_any(first_shard(sharded))


@pytest.mark.parametrize("index", ["lost", "without metadata", "lost, and other names"])
def test_shards_are_found_by_any_index_or_none(index: str, tmp_path: Path) -> None:
    model = stored("llama, tied", tmp_path)
    file = tmp_path / "model.safetensors.index.json"
    if index == "without metadata":
        file.write_text(json.dumps({"weight_map": json.loads(file.read_text())["weight_map"]}))
    else:
        file.unlink()
    for i, shard in enumerate(sorted(tmp_path.glob("*.safetensors")) if "names" in index else ()):
        shard.rename(tmp_path / f"part {i}.safetensors")
    with torch.no_grad():
        assert torch.equal(open_any(tmp_path)(**IDS[0]).logits, model(**IDS[0]).logits)


def test_a_path_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored("llama", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    found = open_any("model", scratch="scratch")
    assert found.config.name_or_path == "model"


def test_scratch_that_takes_no_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError("no links here")

    stored("llama", tmp_path / "model")
    for link in ("symlink_to", "hardlink_to"):
        monkeypatch.setattr(Path, link, refuse)
    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(CheckpointError, match=r"scratch cannot hold links to .*model: no links here; pass another"):
        qfx.open_checkpoint(tmp_path / "model", scratch=tmp_path / "scratch")


def recode(directory: Path, ending: str, dtype: torch.dtype) -> str:
    """Store the tensors whose names end so in another dtype, and return the first of them."""
    named = list[str]()
    for shard in sorted(directory.glob("*.safetensors")):
        tensors = load_file(shard)
        named += [name for name in sorted(tensors) if name.endswith(ending)]
        codes = {name: t.to(dtype) if name.endswith(ending) else t for name, t in tensors.items()}
        save_file(codes, shard, {"format": "pt"})
    return named[0]


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("model", "ending"),
    [("llama", "q_proj.weight"), ("qwen3 moe", "q_proj.weight"), ("qwen3 moe", "experts.1.up_proj.weight")],
)
def test_codes_are_not_weights(model: str, ending: str, dtype: torch.dtype, tmp_path: Path) -> None:
    stored(model, tmp_path)
    recode(tmp_path, ending, dtype)
    with pytest.raises(CheckpointError, match=rf"holds \S*{ending} in \S*, but .* computes with floats: .*; pass the"):
        qfx.open_checkpoint(tmp_path)


def test_masks_of_earlier_versions_are_no_codes(tmp_path: Path) -> None:
    model = seeded(transformers.GPT2Model(transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4)))
    model.save_pretrained(tmp_path)
    mask = {"h.0.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.uint8)}
    save_file(load_file(tmp_path / "model.safetensors") | mask, tmp_path / "model.safetensors", {"format": "pt"})
    assert torch.equal(open_any(tmp_path).wte.weight, model.wte.weight)


def test_codes_are_not_the_weights_of_a_factory_s_model(tmp_path: Path) -> None:
    save_model(seeded(Patches()), str(tmp_path / "model.safetensors"))
    recode(tmp_path, "norm.running_var", torch.int8)
    with pytest.raises(CheckpointError, match=r"holds norm.running_var in int8, but Patches computes with floats"):
        qfx.open_checkpoint(tmp_path, Patches)


def test_what_quark_fx_wrote_is_not_a_checkpoint(tmp_path: Path) -> None:
    quantize(seeded(Patches()), INT8_STATIC, images(4), resources=qfx.Resources(output_dir=tmp_path))
    with pytest.raises(CheckpointError, match=r"read it with qfx.load"):
        qfx.open_checkpoint(tmp_path, Patches)


class Tied(nn.Module):
    """A table that is embedding and head, a parameter with two names, and one with an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.emb.weight
        shared = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.a = shared
        self.b = shared
        marked = nn.Parameter(torch.zeros(4))
        marked.mark = "kept"  # type: ignore[attr-defined]
        self.c = marked
        self.none = None
        self.register_parameter("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.emb(x) * self.a + self.b + self.c)
        return out


@pytest.mark.parametrize("both", [False, True])
def test_what_a_factory_ties_stays_tied(both: bool, tmp_path: Path) -> None:
    model = seeded(Tied())
    if both:
        save_file({name: t.clone() for name, t in model.state_dict().items()}, tmp_path / "model.safetensors")
    else:
        save_model(model, str(tmp_path / "model.safetensors"))
    found = open_any(tmp_path, Tied)
    assert found.head.weight is found.emb.weight
    assert found.a is found.b
    assert found.c is not found.a
    assert len(list(found.parameters())) == 3
    assert torch.equal(found(torch.arange(8)), model(torch.arange(8)))


def test_a_factory_s_parameters_keep_what_they_are(tmp_path: Path) -> None:
    class Special(nn.Parameter):
        pass

    made = list[Any]()

    def factory() -> nn.Module:
        model = Tied()
        model.head.weight = Special(torch.zeros(8, 4), requires_grad=False)
        made.append((model, type(model.head.weight), model.head.weight.requires_grad, model.c.requires_grad))
        assert model.c.mark == "kept"  # type: ignore[attr-defined]
        assert all(p.is_meta for p in model.parameters())
        return model

    save_model(seeded(Tied()), str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match="lacks 1 of the 5 tensors of Tied"):
        open_any(tmp_path, factory)
    assert made[0][1:] == (Special, False, True)
    assert not any(p.is_meta for p in Tied().parameters()), "modules made later are as before"


@needs_maps
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_weights_are_read_in_the_dtype_asked_for(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = stored(name, tmp_path / "model", torch.bfloat16)
    found = open_any(tmp_path / "model", dtype=dtype)
    assert {p.dtype for p in found.parameters()} == {dtype}
    assert found.config.dtype == dtype
    assert all(is_mapped(p) for p in found.parameters())
    assert all(torch.equal(p, q.to(dtype)) for p, q in zip(found.parameters(), model.parameters(), strict=True))
    assert found(**IDS[0]).logits.dtype == dtype


@needs_maps
def test_a_factory_s_model_is_read_in_the_dtype_asked_for(tmp_path: Path) -> None:
    class Waves(Patches):
        def __init__(self) -> None:
            super().__init__()
            self.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    model = seeded(Waves()).bfloat16()
    model.waves = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    save_model(model, str(tmp_path / "model.safetensors"))
    found = open_any(tmp_path, Waves, dtype=torch.float16)
    assert all(is_mapped(p) for p in found.parameters())
    assert {name: t.dtype for name, t in found.state_dict().items() if t.dtype != torch.float16} == {
        "waves": torch.complex64,
        "norm.num_batches_tracked": torch.int64,
    }
    assert found.steps.dtype == torch.float16
    assert found(rand(2, 3, 8, 8).half()).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64, "float32"])
def test_a_dtype_that_weights_cannot_have_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype is .*; pass torch.float32, torch.float16|must be a dtype or None"):
        qfx.open_checkpoint(tmp_path, dtype=dtype)


def test_what_is_missing_comes_with_a_remedy(tmp_path: Path) -> None:
    stored("llama", tmp_path)
    shard = first_shard(tmp_path)
    with pytest.raises(
        CheckpointError, match=rf"{shard} lacks .*; if the checkpoint has several files, pass .*{tmp_path}"
    ):
        qfx.open_checkpoint(shard)
    (tmp_path / "model.safetensors").write_bytes(shard.read_bytes())
    hides = r"lacks .* of the 21 tensors of LlamaForCausalLM: .*safetensors was read instead of .*index.json: remove"
    with pytest.raises(CheckpointError, match=hides):
        qfx.open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=hides):
        qfx.open_checkpoint(tmp_path, MODELS["llama"])
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks .* more; fetch its files again, or pass a checkpoint of this model"
    ):
        qfx.open_checkpoint(tmp_path)


def test_files_that_are_no_safetensors_are_named(tmp_path: Path) -> None:
    stored("llama", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(CheckpointError, match=rf"{index} holds no tensors; pass its directory, {tmp_path}"):
        qfx.open_checkpoint(index)
    torch.save({}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"model.pt holds pickled weights, which may run code .*save_pretrained"):
        qfx.open_checkpoint(tmp_path / "model.pt")


def test_a_factory_that_cannot_be_called_so_is_refused(tmp_path: Path) -> None:
    save_model(seeded(Tied()), str(tmp_path / "model.safetensors"))

    def reads() -> nn.Module:
        model = Tied()
        model.none = float(model.c.detach().abs().max())  # type: ignore[assignment]
        return model

    def fails() -> nn.Module:
        raise KeyError("metadata")

    with pytest.raises(
        CheckpointError, match=r"factory is a Tied; pass a function that returns one, such as lambda: Tied\(...\)"
    ):
        open_any(tmp_path, Tied())
    with pytest.raises(CheckpointError, match=r"factory reads weights .*meta.*; .* after open_checkpoint"):
        open_any(tmp_path, reads)
    with pytest.raises(KeyError, match="metadata"):
        open_any(tmp_path, fails)


def test_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    stored("llama", tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('run')")
    configured(tmp_path, auto_map={"AutoModelForCausalLM": "mine.Model", "AutoConfig": "mine.Config"})
    qfx.open_checkpoint(tmp_path)
    assert not any(name.rpartition(".")[-1] == "mine" for name in sys.modules)


def test_a_factory_of_another_model_is_refused(tmp_path: Path) -> None:
    save_model(seeded(Patches()), str(tmp_path / "model.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks 4 of the 4 tensors of Sequential: 0.weight"):
        qfx.open_checkpoint(tmp_path, lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def wide() -> nn.Module:
        model = Patches()
        model.head = nn.Linear(16, 7)
        return model

    with pytest.raises(CheckpointError, match=r"holds head.bias|holds head.weight with shape \(5, 16\)"):
        qfx.open_checkpoint(tmp_path, wide)
    with pytest.raises(CheckpointError, match=r"factory returned NoneType; it has to return an nn.Module"):
        qfx.open_checkpoint(tmp_path, lambda: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(CheckpointError, match="does not exist"):
        quantize(tmp_path / "nowhere", W4A16_GPTQ, IDS, resources=qfx.Resources(output_dir=tmp_path / "out"))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("refused", [("symlink_to",), ("symlink_to", "hardlink_to")], ids=" ".join)
def test_a_checkpoint_is_opened_where_links_are_not_allowed(
    refused: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows asks for a right of its own for symbolic links, and some file systems have no links at all."""
    model = stored("llama", tmp_path / "checkpoint")

    def no_right(self: Path, target: Path, target_is_directory: bool = False) -> None:
        raise OSError(1314, "A required privilege is not held by the client")

    for link in refused:
        monkeypatch.setattr(Path, link, no_right)
    opened = qfx.open_checkpoint(tmp_path / "checkpoint")
    for name, tensor in model.state_dict().items():
        assert torch.equal(opened.state_dict()[name], tensor), name


def test_parts_without_end_are_not_made(tmp_path: Path) -> None:
    """Experts and other parts have as many names in configurations as there are models; what is made is counted."""
    made = 0

    class Part(nn.Module):
        def __init__(self) -> None:
            nonlocal made
            super().__init__()
            self.act = nn.Identity()
            made += 1

    message = r"describes more than 4736 modules and parameters, .* has 10 tensors"
    config = {"experts": 10**9, "layer_norm_eps": 1e9, "max_layers": 3}
    with pytest.raises(CheckpointError, match=message), limited_modules(config, 10):
        nn.ModuleList(Part() for _ in range(10**6))
    assert made < 5000
    assert len(nn.ModuleList(Part() for _ in range(5000))) == 5000
    with limited_modules({}, 10), ThreadPoolExecutor(1) as other:
        other.submit(lambda: [Part() for _ in range(5000)]).result()
