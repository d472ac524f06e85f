"""What is stored comes back bit for bit, nothing is pickled, and nothing a file says is executed."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from devices import on_devices
from tiny import calls, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.presets import INT8_DYNAMIC, PRESETS

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "cnn": (cnn, images),
    "mlp": (mlp, tokens),
}
everywhere = pytest.mark.parametrize(("name", "preset"), [(m, p) for m in MODELS for p in PRESETS])


@everywhere
def test_a_loaded_model_computes_the_same_bits(name: str, preset: str, tmp_path: Path) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), preset, data())
    qmodel.save(tmp_path / "deep" / "q")
    loaded = qfx.load(tmp_path / "deep" / "q")
    for batch in data(4, 1, 6):
        torch.testing.assert_close(loaded(batch), qmodel(batch), rtol=0, atol=0)
    assert loaded.config == qmodel.config
    assert loaded.signature == qmodel.signature
    assert loaded.report() == qmodel.report()
    assert str(loaded.graph_module.graph) == str(qmodel.graph_module.graph)


@pytest.mark.parametrize(
    ("name", "preset"), [("cnn", "int8_static"), ("mlp", "int8_dynamic"), ("mlp", "int4_weight_only")]
)
def test_the_export_of_a_loaded_model_computes_what_the_first_export_does(
    name: str, preset: str, tmp_path: Path
) -> None:
    model, data = MODELS[name]
    qmodel = quantize(model(), preset, data())
    qmodel.save(tmp_path / "q")
    files = [qfx.export.onnx(m, tmp_path / f"{i}.onnx") for i, m in enumerate((qmodel, qfx.load(tmp_path / "q")))]
    batch = data(3)[0].numpy()
    results = []
    for file in files:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        results.append(session.run(None, {session.get_inputs()[0].name: batch})[0])
    assert (results[0] == results[1]).all()


@on_devices
def test_a_model_is_loaded_onto_a_device(device: torch.device, tmp_path: Path) -> None:
    x = rand(6, 8)
    qmodel = quantize(seeded(nn.Linear(8, 4)), "int8_dynamic", [x])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path, device=device)
    assert {b.device.type for b in loaded.buffers()} == {device.type}
    torch.testing.assert_close(loaded(x.to(device)).cpu(), qmodel(x))


def test_structures_constants_and_source_lines_survive(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, mask: Tensor | None = None, negate: bool = False) -> dict[str, Any]:
            y = self.linear(x).clamp(-torch.inf, 1e9)
            return {"y": -y if negate else y, "more": [y[:, 1:], (x.to(torch.float64),)]}

    x = rand(6, 4)
    qmodel = quantize(seeded(Model()), "int8_static", [{"x": x, "mask": None, "negate": True}])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path)
    torch.testing.assert_close(loaded(x, None, negate=True), qmodel(x, None, True), rtol=0, atol=0)
    for wrong in ({"negate": False}, {"negate": True, "mask": x}):
        with pytest.raises(qfx.QuarkError, match="constant"):
            loaded(x, **({"mask": None} | wrong))
    (a,), (b,) = calls(qmodel, "aten.linear"), calls(loaded, "aten.linear")
    assert a.meta["stack_trace"] != ""
    assert b.meta["stack_trace"] == ""  # it names directories of the user's


def test_a_hugging_face_output_survives(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return outputs.BaseModelOutput(last_hidden_state=self.linear(x))

    qmodel = quantize(seeded(Model()), "int8_static", [rand(6, 4)])
    qmodel.save(tmp_path)
    assert isinstance(qfx.load(tmp_path)(rand(3, 4)), outputs.BaseModelOutput)
    # A process that has not seen transformers yet.
    code = f"import quark_fx; print(quark_fx.load({str(tmp_path)!r}).signature.output_names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str(qmodel.signature.output_names), done.stderr
    edit(tmp_path, lambda d: d["signature"].update(out_spec=d["signature"]["out_spec"].replace("modeling_", "no_")))
    with pytest.raises(qfx.QuarkError, match=r"a type of transformers\.no_outputs, which is not installed here"):
        qfx.load(tmp_path)


def test_a_type_that_nothing_registered_is_named(stored: Path) -> None:
    spec = json.dumps([1, {"type": "somebody.Elses", "context": "[]", "children_spec": []}])
    edit(stored, lambda d: d["signature"].update(out_spec=spec))
    with pytest.raises(qfx.QuarkError, match=r"nothing has registered: .*somebody.Elses.*; import the"):
        qfx.load(stored)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    quantize(seeded(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), INT8_DYNAMIC, [rand(6, 4)]).save(tmp_path)
    return tmp_path


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "graph.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_only_json_and_safetensors_are_written_and_nothing_is_pickled(stored: Path) -> None:
    assert {p.name for p in stored.iterdir()} == {"graph.json", "model.safetensors"}
    json.loads((stored / "graph.json").read_text())
    raw = (stored / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert json.loads(raw[8 : 8 + length])
    for path in stored.iterdir():
        content = path.read_bytes()
        assert not content.startswith((b"\x80", b"PK")), "a pickle or a zip of one"


@pytest.mark.parametrize("name", ["graph.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "binary"])
def test_a_damaged_file_is_named(name: str, damage: str, stored: Path) -> None:
    path = stored / name
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(
            {"empty": b"", "truncated": content[: len(content) // 2], "binary": b"\xff\xfe\x00" * 99}[damage]
        )
    with pytest.raises(qfx.QuarkError, match="holds no readable quantized model") as caught:
        qfx.load(stored)
    assert str(stored) in str(caught.value)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(qfx.QuarkError, match="nowhere"):
        qfx.load(tmp_path / "nowhere")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    qmodel = quantize(seeded(nn.Linear(4, 3)), INT8_DYNAMIC, [rand(6, 4)])
    with pytest.raises(qfx.QuarkError, match=r"cannot be written: .*; a file is in the way, or choose another"):
        qmodel.save(tmp_path / "file")


def test_a_newer_version_is_refused(stored: Path) -> None:
    edit(stored, lambda d: d.update(version=99))
    with pytest.raises(qfx.QuarkError, match="format version 99, this quark_fx reads 2; update quark_fx"):
        qfx.load(stored)


def node(document: dict[str, Any], op: str) -> Any:
    return next(n for n in document["nodes"] if n["op"] == op)


DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no nodes": lambda d: d.pop("nodes"),
    "no signature": lambda d: d.pop("signature"),
    "unknown row field": lambda d: d["rows"][0].update(colour="red"),
    "unknown configuration field": lambda d: d["config"].update(colour="red"),
    "reader of a node that does not exist": lambda d: node(d, "output").update(args=[[{"node": "ghost"}]]),
    "argument of an unknown kind": lambda d: node(d, "call_function").update(args=[{"pickle": "x"}]),
    "argument with two kinds": lambda d: node(d, "call_function").update(args=[{"node": "x", "float": "1"}]),
    "float that is none": lambda d: node(d, "call_function").update(args=[{"float": "many"}]),
    "dtype that is none": lambda d: node(d, "call_function").update(args=[{"torch": "save"}]),
    "dtype that does not exist": lambda d: node(d, "call_function").update(args=[{"torch": "float7"}]),
    "tensor that is not stored": lambda d: node(d, "get_attr").update(target="ghost.weight"),
    "too few arguments": lambda d: node(d, "call_function").update(args=[]),
    "shape of strings": lambda d: d["inputs"][0].update(shape=["a"]),
    "structure that is none": lambda d: d["signature"].update(in_spec="[]"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_graph_is_refused_with_our_error(damage: str, stored: Path) -> None:
    edit(stored, DAMAGE[damage])
    with pytest.raises(qfx.QuarkError):
        qfx.load(stored)


def test_a_document_that_is_no_mapping_is_refused(stored: Path) -> None:
    (stored / "graph.json").write_text("[1, 2]")
    with pytest.raises(qfx.QuarkError):
        qfx.load(stored)


TARGETS = [
    *("python.system", "os.system", "builtins.eval", "python.__import__", "torch.load", "aten.__class__.mro"),
    *("posix.system.default", "aten.add", "quark_fx.nothing.default", "operator.methodcaller", "", "aten"),
    "aten.from_file.default",
]


@pytest.mark.parametrize("target", TARGETS)
def test_a_call_of_anything_but_an_operator_is_refused(target: str, stored: Path) -> None:
    edit(stored, lambda d: node(d, "call_function").update(target=target))
    with pytest.raises(qfx.QuarkError, match="the stored graph calls"):
        qfx.load(stored)


# Everything that torch.fx would paste into the source code of `forward`.
CODE = '__import__("pathlib").Path({path!r}).touch()'
INJECTIONS: dict[str, Callable[[dict[str, Any], str], Any]] = {
    "method name": lambda d, code: node(d, "call_function").update(op="call_method", target=f"t() and {code} and x.t"),
    "module name": lambda d, code: node(d, "call_function").update(op="call_module", target=f'x") and {code}; ("'),
    "attribute name": lambda d, code: node(d, "get_attr").update(target=f'x", {code}) and ("'),
    "input name": lambda d, code: node(d, "placeholder").update(target=f"x={code}"),
    "keyword": lambda d, code: node(d, "call_function").update(kwargs={f"a={code}, b": 1}),
    "node name": lambda d, code: node(d, "get_attr").update(name=f"x = {code}; y"),
    "string argument": lambda d, code: node(d, "call_function").update(args=[f'") or {code} or ("']),
    "unknown kind of node": lambda d, code: node(d, "call_function").update(op=f"call_function or {code}"),
    "output structure": lambda d, code: d["signature"].update(out_spec=code),
}


@pytest.mark.parametrize("place", INJECTIONS)
def test_code_in_a_stored_graph_is_never_run(place: str, stored: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    edit(stored, lambda d: INJECTIONS[place](d, CODE.format(path=str(victim))))
    with pytest.raises(qfx.QuarkError):
        qfx.load(stored)(rand(3, 4))
    assert not victim.exists()


def test_no_module_is_imported_to_rebuild_a_structure(stored: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "quark_fx_victim.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    for context in (
        {"__enum__": True, "fqn": "quark_fx_victim:A", "name": "b"},
        {"default_factory_module": "quark_fx_victim", "default_factory_name": "b", "dict_context": []},
    ):
        kind = "builtins.dict" if "fqn" in context else "collections.defaultdict"
        text = json.dumps(context) if "fqn" in context else context
        spec = json.dumps([1, {"type": kind, "context": text, "children_spec": []}])
        edit(stored, lambda d, spec=spec: d["signature"].update(out_spec=spec))  # type: ignore[misc]
        with pytest.raises(qfx.QuarkError, match="import that module first"):
            qfx.load(stored)


def test_a_default_dictionary_of_a_known_type_survives(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return defaultdict(list, y=self.linear(x))

    qmodel = quantize(seeded(Model()), "int8_static", [rand(6, 4)])
    qmodel.save(tmp_path)
    got = qfx.load(tmp_path)(rand(3, 4))
    assert (type(got), got.default_factory, list(got)) == (defaultdict, list, ["y"])
