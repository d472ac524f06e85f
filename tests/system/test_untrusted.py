"""Files that anyone may have written are refused by name: large, deep, elsewhere, or no files at all."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import quark_fx as qfx
from quark_fx.checkpoints.files import CheckpointFiles
from quark_fx.checkpoints.gguf_file import open_gguf
from quark_fx.errors import CheckpointError, ConfigError, ExportError
from quark_fx.system.untrusted import MAX_DEPTH, YAML_LIMIT, brief, parse_json, parse_yaml

needs_pipes = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")


def bomb(levels: int) -> str:
    """Return YAML of a line a level, that says nine times as much with each."""
    names = "abcdefghijkl"
    lines = [f"  {b}1: &{b} [{','.join(['*' + a] * 9)}]" for a, b in pairwise(names[: levels + 1])]
    return "\n".join(["passes:", "  x: &a [x,x,x,x,x,x,x,x,x]", *lines])


YAML = {
    "aliases of aliases": bomb(9),
    "a list that holds itself": "passes: &a [*a]",
    "nested lists": "[" * 10_000,
    "nested lists that end": "[" * 200 + "]" * 200,
    "nested mappings": "{a: " * 10_000,
    "a date that there is not": "weight: 2001-99-99",
    "a number of many digits": "weight: " + "9" * 5000,
    "a number of many hexadecimal digits": "exclude: [0x" + "f" * 4000 + "]",
    "a key of many hexadecimal digits": "0x" + "f" * 4000 + ": 1",
    "a size of many hexadecimal digits": "weight: {format: int4, granularity: group, group_size: 0x" + "f" * 4000 + "}",
    "a number of many octal digits": "weight: 0" + "7" * 9000,
    "a number of many binary digits": "weight: 0b" + "1" * 99_000,
    "a number of many minutes": "weight: 1" + ":59" * 9000,
    "a truth value that is none": "weight: !!bool maybe",
    "an empty number": "weight: !!int ''",
    "a key twice": "weight: {format: int8}\nweight: {format: int4}",
    "a key twice, deeper": "overrides: [{pattern: a, weight: {format: int8, format: int4}}]",
    "a call": "weight: !!python/object/apply:os.system [ls]",
    "a key that is a list": "{[1]: 2}",
    "a key that is a number": "{1: 2}",
    "no mapping": "just words",
    "much text": "# " + "x" * YAML_LIMIT,
    "a binary": "weight: !!binary |\n  a",
}


@pytest.mark.parametrize("name", YAML)
def test_yaml_that_no_configuration_is_is_refused_in_a_short_message(name: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as caught:
        qfx.QuantConfig.from_yaml(YAML[name])
    assert len(str(caught.value)) < 2000
    assert time.process_time() - began < 20


def test_a_key_that_is_there_twice_is_named_with_its_lines() -> None:
    with pytest.raises(ConfigError, match="key 'exclude' occurs in lines 2 and 4; keep one of them"):
        qfx.QuantConfig.from_yaml("preset: int8_static\nexclude: [a]\ntarget: onnx\nexclude: [b]\n")


def test_aliases_that_say_little_are_read() -> None:
    text = "weight: &w {format: int8}\noverrides:\n- {pattern: a, weight: *w}\n- {pattern: b, weight: *w}"
    config = qfx.QuantConfig.from_yaml(text)
    assert [override.weight for override in config.overrides] == [config.weight] * 2


FILES: dict[str, Callable[[Path], Any]] = {
    "latin-1": lambda file: file.write_bytes("weight: {format: int8} # \xfc".encode("latin-1")),
    "a directory": lambda file: file.mkdir(),
    "nothing": lambda file: None,
    "zeros": lambda file: file.write_bytes(bytes(100)),
    "much": lambda file: file.write_bytes(b"#" * (YAML_LIMIT + 1)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_configuration_file_that_cannot_be_read_is_named(name: str, tmp_path: Path) -> None:
    FILES[name](tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        qfx.QuantConfig.from_yaml(tmp_path / "config.yaml")


@needs_pipes
def test_a_pipe_for_a_configuration_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        qfx.QuantConfig.from_yaml(tmp_path / "config.yaml")


WRONG: list[Any] = [
    {"weight": 5},
    {"weight": {"format": []}},
    {"weight": {"format": "int8", "observer": {"name": "percentile", "percentile": "x"}}},
    {"weight": {"format": "int8", "observer": {"name": []}}},
    {"weight": {"format": "int8", "observer": [1]}},
    {"weight": {"format": "int8", "granularity": {}}},
    {"passes": [{"name": {}}]},
    {"passes": [{"name": "SmoothQuant", "colour": 1}]},
    {"overrides": [5]},
    {"overrides": [{"pattern": "a", "weight": "int8"}]},
    {"exclude": 5},
    {"target": []},
    {1: 2},
    [],
    None,
]


@pytest.mark.parametrize("data", WRONG, ids=str)
def test_configurations_of_other_types_are_refused_by_name(data: Any) -> None:
    for stored in (False, True):
        if stored and isinstance(data, dict) and ("passes" in data or "percentile" in str(data)):
            continue  # kept as data, if there is a name
        with pytest.raises(ConfigError):
            qfx.QuantConfig.from_dict(data, stored=stored)


def test_json_is_as_deep_as_it_may_be_and_no_deeper() -> None:
    for depth in (MAX_DEPTH, MAX_DEPTH + 1):
        text = "[" * depth + "]" * depth
        if depth == MAX_DEPTH:
            parse_json(text)
            parse_yaml(text)
            continue
        for parse in (parse_json, parse_yaml):
            with pytest.raises(ValueError, match=f"is nested more than {MAX_DEPTH} levels deep"):
                parse(text)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_that_python_does_not_write_is_refused_wherever_it_is(sign: int) -> None:
    huge = sign << 20_000
    for build in (
        lambda: qfx.TensorSpec(format=qfx.formats.INT4, granularity=qfx.Granularity.GROUP, group_size=(huge,)),  # type: ignore[arg-type]
        lambda: qfx.formats.IntFormat(bits=huge),
        lambda: qfx.observers.Percentile(percentile=huge),
        lambda: qfx.observers.Percentile(bins=-abs(huge)),
        lambda: qfx.QuantConfig(exclude=huge),  # type: ignore[arg-type]
        lambda: qfx.QuantConfig.from_dict({"weight": huge}),
        lambda: qfx.QuantConfig.from_dict({"passes": [huge]}),
    ):
        with pytest.raises(ConfigError) as caught:
            build()
        assert len(str(caught.value)) < 400
    assert brief([huge, 3]) == "[a number of 20001 bits, 3]"


def test_a_message_is_short_whatever_it_is_about() -> None:
    nested: Any = "x" * 100_000
    for _ in range(200):
        nested = {"a": [nested] * 50}
    assert len(brief(nested)) < 3000


INDEXES: dict[str, str] = {
    "nested": "[" * 100_000,
    "a list": '{"weight_map": []}',
    "names that are none": '{"weight_map": {"a": 5}}',
    "a path": '{"weight_map": {"a": "../secret.safetensors"}}',
    "an absolute path": '{"weight_map": {"a": "/etc/passwd.safetensors"}}',
    "an empty name": '{"weight_map": {"a": ""}}',
    "a name with a zero": '{"weight_map": {"a": "a\\u0000.safetensors"}}',
    "a long name": json.dumps({"weight_map": {"a": "a" * 5000 + ".safetensors"}}),
}


@pytest.mark.parametrize("name", INDEXES)
def test_an_index_that_leads_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(INDEXES[name])
    with pytest.raises(CheckpointError) as caught:
        CheckpointFiles.of(tmp_path)
    assert len(str(caught.value)) < 2000 + len(str(tmp_path)) + len(INDEXES["a long name"])


@needs_pipes
def test_a_pipe_among_shards_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        CheckpointFiles.of(tmp_path)
    with pytest.raises(CheckpointError, match="is neither file nor directory; pass a directory"):
        CheckpointFiles.of(tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text("[" * 100_000)
    (tmp_path / "a.safetensors").unlink()
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"config\.json does not say which model this is"):
        qfx.open_checkpoint(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not tell what is mapped")
def test_a_shard_is_mapped_once_however_many_tensors_it_has(tmp_path: Path) -> None:
    count = 3000
    save_file({f"experts.{i}.w": torch.full((1,), float(i)) for i in range(count)}, tmp_path / "a.safetensors")
    before = len(Path("/proc/self/maps").read_text().splitlines())
    files = CheckpointFiles.of(tmp_path)
    tensors = {name: files.tensor(name) for name in files.files}
    del files
    assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100
    for i in range(0, count, 100):
        assert float(tensors[f"experts.{i}.w"]) == i
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    assert len(memory) == count, "tensors of a shard share a map, not their memory"


def graph(path: Path, tensors: list[tuple[str, str, int, int]], where: str = "initializer") -> None:
    """Write an ONNX graph that reads bytes from files: name, location, offset and length of each."""
    onnx = pytest.importorskip("onnx")
    found = []
    for name, location, offset, length in tensors:
        tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.UINT8, data_location=onnx.TensorProto.EXTERNAL)
        tensor.dims.append(32)
        for key, value in (("location", location), ("offset", offset), ("length", length)):
            entry = tensor.external_data.add()
            entry.key, entry.value = key, str(value)
        found.append(tensor)
    if where == "constant":
        nodes = [onnx.helper.make_node("Constant", [], ["y"], value=found.pop())]
    else:
        nodes = [onnx.helper.make_node("Identity", [found[0].name], ["y"])]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, [32])
    made = onnx.helper.make_graph(nodes, "g", [], [result], found)
    path.write_bytes(onnx.helper.make_model(made).SerializeToString())


@pytest.fixture
def export(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (tmp_path / "secret.key").write_bytes(b"PRIVATE KEY 0123456789ABCDEF....")
    for name in ("a", "b"):
        (folder / f"{name}.onnx.data").write_bytes(bytes(range(64)))
        graph(folder / f"{name}.onnx", [("w", f"{name}.onnx.data", 0, 32)])
    manifest = {"components": {"prefill": {"file": "a.onnx"}, "decode": {"file": "b.onnx"}}}
    (folder / "export.json").write_text(json.dumps(manifest))
    return folder


def test_weights_are_shared_within_an_export(export: Path) -> None:
    assert qfx.export.share_weights(export) == 64


def test_a_graph_that_is_read_and_cannot_be_written_is_left_alone(
    export: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **options: Any) -> None:
        raise RuntimeError("this graph has no name")

    monkeypatch.setattr("onnx_ir.save", stop)
    before = {file: file.read_bytes() for file in export.iterdir()}
    with pytest.raises(ExportError, match=r"b\.onnx cannot be written: RuntimeError: 'this graph has no name'"):
        qfx.export.share_weights(export)
    assert {file: file.read_bytes() for file in export.iterdir()} == before


def linked(folder: Path) -> None:
    (folder / "b.onnx.data").unlink()
    (folder / "b.onnx.data").symlink_to(folder.parent / "secret.key")


def twice(folder: Path) -> None:
    manifest = {"components": {"a": {"file": "a.onnx"}, "b": {"file": "a.onnx"}}}
    (folder / "export.json").write_text(json.dumps(manifest))


def named(name: str) -> Callable[[Path], Any]:
    def change(folder: Path) -> None:
        (folder / "export.json").write_text(json.dumps({"components": {"a": {"file": name}}}))

    return change


def reading(location: str, offset: int = 0, length: int = 32, where: str = "initializer") -> Callable[[Path], Any]:
    return lambda folder: graph(folder / "b.onnx", [("w", location, offset, length)], where)


EXPORTS: dict[str, Callable[[Path], Any]] = {
    "a location above": reading("../secret.key"),
    "an absolute location": reading("/etc/passwd"),
    "a location of a constant": reading("../secret.key", where="constant"),
    "a link": linked,
    "beyond the end": reading("b.onnx.data", offset=40),
    "another length": reading("b.onnx.data", length=64),
    "a negative offset": reading("b.onnx.data", offset=-8),
    "a graph above": named("../export/b.onnx"),
    "a graph elsewhere": named("/tmp/b.onnx"),
    "a graph of no name": named(""),
    "a graph twice": twice,
    "a nested manifest": lambda folder: (folder / "export.json").write_text("[" * 100_000),
    "a list for a manifest": lambda folder: (folder / "export.json").write_text("[]"),
    "no graph": lambda folder: (folder / "b.onnx").write_bytes(b"\xff" * 100),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_that_leads_elsewhere_is_left_alone(name: str, export: Path) -> None:
    EXPORTS[name](export)
    before = {file: file.read_bytes() for file in export.parent.rglob("*") if file.is_file()}
    with pytest.raises(ExportError):
        qfx.export.share_weights(export)
    assert {file: file.read_bytes() for file in export.parent.rglob("*") if file.is_file()} == before


def gguf(*parts: int | bytes, tensors: int = 0, entries: int = 1) -> bytes:
    """Return the beginning of a GGUF file; numbers have 8 bytes."""
    head = b"GGUF" + (3).to_bytes(4, "little") + tensors.to_bytes(8, "little") + entries.to_bytes(8, "little")
    return head + b"".join(part if isinstance(part, bytes) else part.to_bytes(8, "little") for part in parts)


KEY, ARRAY, STRING, U8 = (1, b"a"), b"\x09\0\0\0", b"\x08\0\0\0", b"\0\0\0\0"
GGUF: dict[str, bytes] = {
    "nothing": b"",
    "another kind": b"GGML" + bytes(96),
    "many entries": gguf(bytes(76), entries=1 << 62),
    "many tensors": gguf(bytes(76), tensors=1 << 62, entries=0),
    "a long key": gguf(1 << 62, bytes(68)),
    "a long string": gguf(*KEY, STRING, 1 << 62, bytes(50)),
    "a long array": gguf(*KEY, ARRAY, U8, 1 << 62, bytes(50)),
    "an array of many strings": gguf(*KEY, ARRAY, STRING, 1 << 40, bytes(50)),
    "an array of arrays": gguf(*KEY, ARRAY, ARRAY, 1 << 40, bytes(50)),
    "a type that there is not": gguf(*KEY, b"\x63\0\0\0", bytes(50)),
    "a tensor of many dimensions": gguf(*KEY, b"\xff" * 4, bytes(60), tensors=1, entries=0),
    "a tensor of a large shape": gguf(*KEY, b"\2\0\0\0", 1 << 62, 1 << 62, bytes(60), tensors=1, entries=0),
    "the other order of bytes": b"GGUF" + (3).to_bytes(4, "big") + bytes(8) + (1 << 62).to_bytes(8, "big") + bytes(76),
    "many values": gguf(*KEY, ARRAY, U8, (1 << 23) + 1, bytes((1 << 23) + 64)),
}


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_that_describes_more_than_it_holds_is_refused_at_once(name: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    file = tmp_path / "m.gguf"
    file.write_bytes(GGUF[name])
    began = time.process_time()
    with pytest.raises(CheckpointError, match=r"m\.gguf cannot be read as a GGUF file: "):
        open_gguf(file)
    assert time.process_time() - began < 5


@needs_pipes
@pytest.mark.parametrize("name", ["m.gguf", "m.onnx", "m.safetensors", "m"])
def test_inspecting_a_pipe_does_not_wait(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(qfx.QuarkError, match=rf"{name} "):
        qfx.inspect(tmp_path / name)
    with pytest.raises(qfx.QuarkError, match=rf"{name} "):
        open_gguf(tmp_path / name)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "cpu:x"])
def test_a_device_that_there_is_not_is_named(device: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"device='{device}' cannot be used: .*; choose another one"):
        qfx.load(tmp_path, device=device)
