"""What is stored comes back bit for bit, nothing is pickled, and nothing a file says is executed."""

from __future__ import annotations

import json
import struct
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from devices import on_devices
from forked import run_program
from safetensors.torch import load_file
from stored import edit, replace_tensors
from tiny import calls, cnn, images, mlp, quantize, rand, seeded, thinned, tokens
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import quark_fx as qfx
from quark_fx.graph.nodes import placeholders, stored_tensors, tensor_names
from quark_fx.model import serialization
from quark_fx.model.model_directory import read_model, tensor_file
from quark_fx.model.stored_operators import _ATEN
from quark_fx.presets import INT8_DYNAMIC, INT8_WEIGHT_ONLY, PRESETS

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]]]] = {
    "cnn": (cnn, images),
    "mlp": (mlp, tokens),
}
everywhere = pytest.mark.parametrize(
    ("name", "preset"),
    # Each preset with one model, the first ones with both.
    thinned(MODELS, PRESETS, lambda name, preset: preset in [*PRESETS][:6] or (name == "mlp") == ("w4" in preset)),
)


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
    assert shape(loaded) == shape(qmodel)
    assert set(tensor_names(loaded.graph_module).values()) == set(stored_tensors(qmodel.graph_module))


def shape(qmodel: qfx.QuantizedModel) -> list[Any]:
    """Return the nodes of a graph, without the names of its tensors."""
    nodes = qmodel.graph_module.graph.nodes
    return [(n.name, n.op, n.op == "get_attr" or n.target, str(n.args), str(n.kwargs)) for n in nodes]


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
    done = run_program(code)
    assert done.stdout.strip() == str(qmodel.signature.output_names), done.stderr
    for name in ("transformers.modeling_outputs.NoOutput", "transformers.models.none.modeling_none.NoOutput"):
        edit(tmp_path, lambda d, name=name: d["signature"]["out_structure"].update(name=name))  # type: ignore[misc]
        assert list(qfx.load(tmp_path)(rand(3, 4))) == ["last_hidden_state"]  # a dict


def test_a_type_that_nothing_registered_is_named(stored: Path) -> None:
    structure = {"kind": "registered", "name": "somebody.Elses", "context": [], "items": [None]}
    edit(stored, lambda d: d["signature"].update(out_structure=structure))
    with pytest.raises(qfx.QuarkError, match=r"an unregistered type: .*somebody.Elses.*; import the"):
        qfx.load(stored)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    quantize(seeded(nn.Sequential(nn.Linear(4, 3), nn.ReLU())), INT8_DYNAMIC, [rand(6, 4)]).save(tmp_path)
    return tmp_path


def test_only_json_and_safetensors_are_written_and_nothing_is_pickled(stored: Path) -> None:
    assert {p.name for p in stored.iterdir()} == {"graph.json", tensor_file(stored).name}
    json.loads((stored / "graph.json").read_text())
    raw = tensor_file(stored).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert json.loads(raw[8 : 8 + length])
    for path in stored.iterdir():
        content = path.read_bytes()
        assert not content.startswith((b"\x80", b"PK")), "a pickle or a zip of one"


@pytest.mark.parametrize("name", ["graph", "tensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "binary"])
def test_a_damaged_file_is_named(name: str, damage: str, stored: Path) -> None:
    path = stored / "graph.json" if name == "graph" else tensor_file(stored)
    if damage == "missing":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(
            {"empty": b"", "truncated": content[: len(content) // 2], "binary": b"\xff\xfe\x00" * 99}[damage]
        )
    with pytest.raises(qfx.QuarkError, match=r"holds no readable quantized model|is damaged: its SHA") as caught:
        qfx.load(stored)
    assert str(stored) in str(caught.value)


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, why in (("nowhere", "it does not exist"), ("file", ".*Not a directory.*"), ("", ".*No such file.*")):
        remedy = rf"{name} holds no readable quantized model: {why}; pass a directory that QuantizedModel\.save wrote"
        with pytest.raises(qfx.QuarkError, match=remedy):
            qfx.load(tmp_path / name)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    qmodel = quantize(seeded(nn.Linear(4, 3)), INT8_DYNAMIC, [rand(6, 4)])
    with pytest.raises(
        qfx.QuarkError, match=r"cannot be written: .*; remove the file that is in the way, or choose another"
    ):
        qmodel.save(tmp_path / "file")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"], ids=["long", "null"])
def test_a_name_that_no_directory_can_have_is_refused(name: str, tmp_path: Path) -> None:
    model, data, place = seeded(nn.Linear(4, 3)), [rand(6, 4)], tmp_path / name
    qmodel = quantize(model, INT8_WEIGHT_ONLY, data)
    for write in (qmodel.save, partial(qfx.export.huggingface, qmodel), partial(qfx.export.gguf, qmodel)):
        with pytest.raises(qfx.ExportError, match=r"cannot be written: .*; choose another path"):
            write(place)
    for option, resources in (
        ("output_dir", qfx.Resources(output_dir=place)),
        ("checkpoint", qfx.Resources(checkpoint=place)),
    ):
        with pytest.raises(qfx.ConfigError, match=rf"{option} .* cannot be written: .*; choose another path"):
            quantize(model, INT8_WEIGHT_ONLY, data, resources=resources)
    with pytest.raises(qfx.QuarkError, match="holds no readable quantized model"):
        qfx.load(place)
    with pytest.raises(qfx.CheckpointError, match="does not exist"):
        qfx.open_checkpoint(place)


@pytest.mark.parametrize(("version", "remedy"), [(99, "update quark_fx"), (3, "save the model again"), ("4", "save")])
def test_another_version_is_refused(version: Any, remedy: str, stored: Path) -> None:
    document = json.loads((stored / "graph.json").read_text())
    (stored / "graph.json").write_text(json.dumps(document | {"version": version}))
    with pytest.raises(
        qfx.QuarkError, match=rf"format version '?{version}'?, but this quark_fx reads version 4; {remedy}"
    ):
        qfx.load(stored)


def node(document: dict[str, Any], op: str) -> Any:
    return next(n for n in document["nodes"] if n["op"] == op)


def limit(document: dict[str, Any], field: str, beyond: int, *numbers: Any) -> None:
    """Limit the sizes of the last dimension of the first input, or of one `beyond` it."""
    last = len(document["inputs"][0]["shape"]) - 1
    document["signature"][field] = [[document["signature"]["input_names"][0], last + beyond, *numbers]]


def compare(document: dict[str, Any], text: str) -> None:
    """Store a condition on sizes, in which `{x}` is the name of the first input."""
    name = document["signature"]["input_names"][0]
    document["signature"]["input_conditions"] = [[text.replace("{x}", name), "model.py:1"]]


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
    "structure that is none": lambda d: d["signature"].update(in_structure="[]"),
    "structure without its keywords": lambda d: d["signature"].update(in_structure={"kind": "tuple", "items": [None]}),
    "one result of two": lambda d: d["signature"].update(out_structure={"kind": "list", "items": [None, None]}),
    "tensor without a name": lambda d: d["tensors"].popitem(),
    "name without a tensor": lambda d: d["tensors"].update(t99="a"),
    "name that is no text": lambda d: d["tensors"].update(t0=[]),
    "size that varies by a size that is not known": lambda d: d["inputs"][0].update(shape=[{"symbol": 7}, 4]),
    "row of another type": lambda d: d["rows"][0].update(bytes_before="many"),
    "graph that ends twice": lambda d: d["nodes"].append(node(d, "output")),
    "graph without an end": lambda d: d["nodes"].pop(),
    "two nodes of a name": lambda d: d["nodes"].insert(0, node(d, "get_attr")),
    "too many arguments": lambda d: node(d, "call_function")["args"].extend([0] * 9),
    "argument of another type": lambda d: node(d, "call_function")["args"].__setitem__(1, 8),
    "keyword that the operator has not": lambda d: node(d, "call_function").update(kwargs={"colour": 1}),
    "shapes that do not fit": lambda d: d["inputs"][0].update(shape=[4, 5]),
    "limit of a dimension that the input has not": lambda d: limit(d, "input_limits", 1, 1, 9),
    "limit of an input that does not exist": lambda d: d["signature"].update(input_limits=[["ghost", 0, 1, 9]]),
    "limit that is no number": lambda d: limit(d, "input_limits", 0, 1, "9"),
    "comparison of a dimension that the input has not": lambda d: compare(d, "{x}.shape[9] > 3"),
    "comparison of an input that does not exist": lambda d: compare(d, "ghost.shape[0] > 3"),
    "comparison that is code": lambda d: compare(d, "__import__('os').getpid() > 3"),
    "comparison of an attribute": lambda d: compare(d, "{x}.numel() > 3"),
    "comparison that is no expression": lambda d: compare(d, "{x}.shape[0] >"),
    "comparison of long numbers": lambda d: compare(d, "(" * 6 + "9" + ")**8" * 6 + " > 3"),
    "comparison of a large power": lambda d: compare(d, "{x}.shape[0]**99999 > 3"),
    "comparison that hides another": lambda d: compare(d, "1 // 0 > 3 and ghost.shape[0] > 3"),
    "comparison of any depth": lambda d: compare(d, "(" * 900 + "1" + ")" * 900),
    "comparison without a place": lambda d: d["signature"].update(input_conditions=[[]]),
    "comparison that is a number": lambda d: d["signature"].update(input_conditions=[[1, 2]]),
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
    "node name of a second line": lambda d, code: node(d, "get_attr").update(name=f"x\r{code}\ry"),
    "string argument": lambda d, code: node(d, "call_function").update(args=[f'") or {code} or ("']),
    "unknown kind of node": lambda d, code: node(d, "call_function").update(op=f"call_function or {code}"),
    "output structure": lambda d, code: d["signature"].update(out_structure=code),
}


@pytest.mark.parametrize("place", INJECTIONS)
def test_code_in_a_stored_graph_is_never_run(place: str, stored: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    edit(stored, lambda d: INJECTIONS[place](d, CODE.format(path=str(victim))))
    with pytest.raises(qfx.QuarkError):
        qfx.load(stored)(rand(3, 4))
    assert not victim.exists()


def breaking_out(victim: Path) -> str:
    """Return a name that ends the line of source it is pasted in, and goes on with one that makes a file.

    A carriage return ends a line of Python, but not one that torch.fx indents; a name may hold no dots.
    """
    code = "+".join(f"chr({ord(letter)})" for letter in f"touch {victim}")
    return f'a", 0)\rgetattr(__import__("os"), "system")({code})\rdef g(self, input):\r    b = ("'


def test_the_name_of_a_tensor_is_text(stored: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    name = breaking_out(victim)
    edit(stored, lambda d: d["tensors"].update(t0=name))
    loaded = qfx.load(stored)
    loaded(rand(3, 4))
    qfx.export.onnx(loaded, tmp_path / "a.onnx")
    assert name in {tensor.name for tensor in onnx.load(tmp_path / "a.onnx").graph.initializer}
    loaded.save(tmp_path / "again")
    assert not victim.exists()
    tensors = load_file(tensor_file(stored))
    replace_tensors(stored, {name: tensors.pop("t0"), **tensors})
    edit(
        stored, lambda d: (d["tensors"].update({name: d["tensors"].pop("t0")}), node(d, "get_attr").update(target=name))
    )
    with pytest.raises(qfx.QuarkError, match="must list the same tensors"):
        qfx.load(stored)
    assert not victim.exists()


STRUCTURES: dict[str, Any] = {
    "enum": {"kind": "dict", "keys": [{"__enum__": True, "fqn": "quark_fx_victim:A", "name": "b"}], "items": [None]},
    "factory": {"kind": "defaultdict", "factory": "quark_fx_victim.a", "keys": ["y"], "items": [None]},
    "registered": {"kind": "registered", "name": "quark_fx_victim.A", "context": [], "items": [None]},
    "registered by torch": {
        "kind": "registered",
        "name": "collections.defaultdict",
        "items": [None],
        "context": {
            "default_factory_module": "quark_fx_victim",
            "default_factory_name": "b",
            "dict_context": ["y"],
        },
    },
    "output": {"kind": "model_output", "name": "quark_fx_victim.A", "keys": ["y"], "items": [None]},
    "output of transformers": {
        "kind": "model_output",
        "name": "transformers.models.quark_fx_victim.A",
        "keys": ["y"],
        "items": [None],
    },
}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_no_module_is_imported_to_rebuild_a_structure(
    kind: str, stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quark_fx_victim.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    edit(stored, lambda d: d["signature"].update(out_structure=STRUCTURES[kind]))
    with pytest.raises(qfx.QuarkError):
        qfx.load(stored)
    assert "quark_fx_victim" not in sys.modules


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


SHAPES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "upsampling": (nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(4, 4, 1)), (4, 4, 6, 7)),
    "response norm": (nn.Sequential(nn.LocalResponseNorm(2), nn.Conv2d(4, 4, 1)), (4, 4, 6, 7)),
    "same padding of an even kernel": (nn.Conv2d(4, 4, 2, padding="same"), (4, 4, 6, 7)),
    "a sequence as long as the batch": (nn.Sequential(nn.Linear(8, 8), nn.Softmax(1)), (4, 4, 8)),
    "a recurrent layer": (nn.LSTM(4, 4, batch_first=True), (4, 5, 4)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 5, 8)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_dimension_that_varies_still_does_in_the_export_of_a_loaded_model(name: str, tmp_path: Path) -> None:
    model, shape = SHAPES[name]
    qmodel = quantize(seeded(model), "int8_weight_only", [rand(*shape)])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path)
    batch = rand(7, *shape[1:])
    files = [tmp_path / "first.onnx", tmp_path / "again.onnx"]
    for one, file in zip((qmodel, loaded), files, strict=True):
        qfx.export.onnx(one, file)
    sizes, results = [], []
    for file in files:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        sizes.append([[d if isinstance(d, int) else None for d in i.shape] for i in session.get_inputs()])
        results.append(session.run(None, {session.get_inputs()[0].name: batch.numpy()})[0])
    assert sizes[0] == sizes[1]
    assert sizes[0][0][0] is None
    assert (results[0] == results[1]).all()
    names = [{tensor.name for tensor in onnx.load(file).graph.initializer} for file in files]
    assert set(stored_tensors(qmodel.graph_module)) & names[0] <= names[1]


def test_sizes_that_are_equal_stay_equal(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x) + y, z * 2

    quantize(seeded(Both()), "int8_weight_only", [(rand(4, 4), rand(4, 3), rand(4, 3))]).save(tmp_path)
    sizes = [p.meta["val"].shape[0].node.expr for p in placeholders(qfx.load(tmp_path).graph_module)]
    assert sizes[0] == sizes[1] != sizes[2]


def test_a_dimension_that_this_torch_fixes_is_named_at_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize(seeded(SHAPES["upsampling"][0]), "int8_weight_only", [rand(4, 4, 6, 7)]).save(tmp_path)
    # Without torch's own rules the compiled ones ask for numbers.
    monkeypatch.setattr("quark_fx.graph.nodes.enable_python_dispatcher", nullcontext)
    loaded = qfx.load(tmp_path)
    assert loaded(rand(2, 4, 6, 7)).shape == (2, 4, 12, 14)
    with pytest.raises(qfx.QuarkError, match=r"upsample_nearest2d.vec at %.*only one size of a variable dimension"):
        qfx.export.onnx(loaded, tmp_path / "a.onnx")


def call_of(target: str, *args: Any, **kwargs: Any) -> Callable[[dict[str, Any]], Any]:
    """Return a change that makes a call the result of a stored model, in the place of its own."""

    def change(document: dict[str, Any]) -> None:
        own = node(document, "call_function")["args"][0]

        def given(value: Any) -> Any:
            if isinstance(value, list):
                return [given(item) for item in value]
            return own if value is X else value

        call = {"name": "hostile", "op": "call_function", "target": target, "args": given(list(args))}
        document["nodes"].insert(-1, call | {"kwargs": {key: given(value) for key, value in kwargs.items()}})
        node(document, "output").update(args=[[{"node": "hostile"}]])

    return change


def graph_of(*steps: tuple[str, list[Any]]) -> Callable[[dict[str, Any]], Any]:
    """Return a change that inserts calls: the texts "0", "1", … in their arguments are results of earlier ones."""

    def change(document: dict[str, Any]) -> None:
        def given(value: Any) -> Any:
            if isinstance(value, list):
                return [given(item) for item in value]
            return {"node": f"n{value}"} if isinstance(value, str) else value

        for i, (target, args) in enumerate(steps):
            call = {"name": f"n{i}", "op": "call_function", "target": target, "args": given(args)}
            document["nodes"].insert(-1, call)
        node(document, "output").update(args=[[{"node": f"n{len(steps) - 1}"}]])

    return change


def zeros(*shape: int) -> tuple[str, list[Any]]:
    return "aten.zeros.default", [list(shape)]


def recurrent(name: str, *weights: tuple[int, ...]) -> Callable[[dict[str, Any]], Any]:
    """Return a change to one layer of 5 inputs and 6 values, with weights of these shapes."""
    states = ["1", "2"] if name == "lstm" else "1"
    params = [str(i) for i in range(3, 3 + len(weights))]
    call = (f"aten.{name}.input", ["0", states, params, len(weights) == 4, 1, 0.0, False, False, False])
    tensors = [zeros(3, 2, 5), zeros(1, 2, 6), zeros(1, 2, 6), *(zeros(*shape) for shape in weights)]
    return graph_of(*tensors, call, ("python.getitem", [str(len(tensors)), 0]))


X = object()
"""Stands for the input of a stored model, in `call_of`."""

UNSAFE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a sparse tensor of places that nobody checks": (
        call_of("aten._sparse_coo_tensor_unsafe.default", X, X, [4]),
        "is not allowed",
    ),
    "a view of other memory": (call_of("aten.as_strided.default", X, [9], [1 << 40]), "is not allowed"),
    "memory as it is": (call_of("aten.empty_strided.default", [9], [1]), "is not allowed"),
    "a file": (call_of("aten.from_file.default", "/etc/passwd"), "is not allowed"),
    "an operator that writes": (call_of("aten.add_.Tensor", X, X), "is not allowed"),
    "an overload that writes": (call_of("aten.add.out", X, X, out=X), "writes into its arguments"),
    "any bytes as truth values": (call_of("aten.view.dtype", X, {"torch": "bool"}), "is not allowed"),
    "another layout": (call_of("aten.zeros.default", [2], layout={"torch": "sparse_coo"}), "the unknown argument"),
    "terabytes": (call_of("aten.full.default", [1 << 50], 0), "computes a tensor of shape"),
    "terabytes by views": (call_of("aten.expand.default", X, [1 << 41, -1, -1]), "computes a tensor of shape"),
    "a power without end": (call_of("python.pow", 9, 1 << 60), "raises to the power"),
    "a product of lists": (call_of("python.mul", X, 1 << 60), "uses tensors as sizes"),
    "a number without end": (call_of("aten.add.Scalar", X, 10**300), "which is not of type number"),
    "a tensor for a text": (call_of("aten.einsum.default", X, [X]), "which is not of type str"),
    "a list for a tensor": (call_of("aten.relu.default", [X]), "which is not of type Tensor"),
    "a generator": (call_of("aten.rand.generator", [2], generator=1), "which is not of type Optional"),
    "a weight norm": (
        graph_of(zeros(40, 4), zeros(1), ("aten._weight_norm.default", ["0", "1", 0])),
        "is not allowed",
    ),
    **{
        f"a fused batch norm: {name}": (
            graph_of(zeros(2, 40, 3), zeros(1), (f"aten.{name}", ["0", *["1"] * n, *more, 0.1, 1e-5])),
            "is not allowed",
        )
        for name, n, more in (
            ("native_batch_norm.default", 4, [False]),
            ("_native_batch_norm_legit.no_stats", 2, [True]),
            ("_native_batch_norm_legit_no_training.default", 4, []),
        )
    },
    **{
        f"biases of one value: {name}": (recurrent(name, (g * 6, 5), (g * 6, 6), (1,), (1,)), "which are not")
        for name, g in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1))
    },
    "a short weight of an LSTM": (recurrent("lstm", (24, 5), (6, 6), (24,), (24,)), "which are not"),
    "weights of an LSTM that lack": (recurrent("lstm", (24, 5)), "which are not"),
    **{
        f"a size and another scale: {name}": (
            graph_of(zeros(1, 1, *[8] * d), (f"aten.{name}.default", ["0", [4] * d, *[1e-30] * d])),
            "is not allowed",
        )
        for name, d in (("upsample_nearest1d", 1), ("upsample_nearest2d", 2), ("_upsample_nearest_exact2d", 2))
    },
    "offsets of a deformed convolution": (
        call_of("torchvision.deform_conv2d.default", X, X, X, X, X),
        "is not allowed",
    ),
    **{
        f"{name} of modes {modes}": (
            graph_of(zeros(1, 1, *[4] * d), zeros(1, *[3] * d, d), (f"aten.{name}.default", ["0", "1", *modes, False])),
            "which is not one of 0, 1",
        )
        for name, d in (("grid_sampler", 2), ("grid_sampler_2d", 2), ("grid_sampler_3d", 3))
        for modes in ((7, 0), (0, 9), (-1, 0))
    },
    "a grouped product of another kind": (
        graph_of(zeros(8, 16), zeros(16, 8), ("aten._grouped_mm.default", ["0", "1"])),
        "only the grouped form is allowed",
    ),
    "pinned memory": (call_of("aten.zeros.default", [2], pin_memory=True), "which is not of type Optional"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_an_operator_that_trusts_its_arguments_is_refused(name: str, stored: Path) -> None:
    change, why = UNSAFE[name]
    edit(stored, change)
    with pytest.raises(qfx.QuarkError, match=why):
        qfx.load(stored)


def test_a_listed_operator_is_not_refused(stored: Path) -> None:
    edit(stored, call_of("aten.sum.dim_IntList", X, [-1], True))
    x = rand(3, 4)
    torch.testing.assert_close(qfx.load(stored)(x), x.sum(-1, True))


def test_memory_that_nobody_has_written_is_not_returned(stored: Path) -> None:
    for target in ("aten.empty_like.default", "aten.empty.memory_format", "aten.new_empty.default"):
        edit(stored, call_of(target, *([] if "memory" in target else [X]), *([] if "like" in target else [[3, 4]])))
        assert torch.equal(qfx.load(stored)(rand(3, 4)), torch.zeros(3, 4))
        edit(stored, lambda d: d["nodes"].pop(-2))


def test_rows_that_no_group_has_are_zero(stored: Path) -> None:
    weight = ("aten.ones.default", [[2, 16, 16]])
    # Memory that was in use before: without a value it would be returned.
    for end in (3, 0, -2):
        change = graph_of(
            ("aten.ones.default", [[300, 16]]),
            weight,
            ("aten.full.default", [[2], end]),
            ("aten._to_copy.default", ["2"]),
            ("aten._grouped_mm.default", ["0", "1", "3"]),
        )
        edit(stored, change)
        edit(
            stored,
            lambda d: next(n for n in d["nodes"] if n["name"] == "n3").update(kwargs={"dtype": {"torch": "int32"}}),
        )
        loaded = qfx.load(stored)
        used = [torch.full((300, 16), 7.0) for _ in range(50)]
        del used
        expected = torch.zeros(300, 16)
        expected[: max(end, 0)] = 16
        assert torch.equal(loaded(rand(3, 4)), expected)
        edit(stored, lambda d: [d["nodes"].pop(-2) for _ in range(5)])


@pytest.mark.parametrize(("name", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)])
def test_a_recurrent_layer_of_fitting_sizes_is_not_refused(name: str, gates: int, stored: Path) -> None:
    edit(stored, recurrent(name, (gates * 6, 5), (gates * 6, 6), (gates * 6,), (gates * 6,)))
    assert torch.equal(qfx.load(stored)(rand(3, 4)), torch.zeros(3, 2, 6))


@pytest.mark.parametrize("options", [{"num_layers": 2, "bidirectional": True}, {"proj_size": 3, "bias": False}])
def test_layers_directions_and_projections_of_an_lstm_are_read_back(options: dict[str, Any], tmp_path: Path) -> None:
    qmodel = quantize(seeded(nn.LSTM(4, 5, batch_first=True, **options)), "int8_weight_only", [rand(4, 5, 4)])
    qmodel.save(tmp_path)
    x = rand(3, 5, 4)
    torch.testing.assert_close(qfx.load(tmp_path)(x), qmodel(x), rtol=0, atol=0)


def test_every_listed_name_is_an_operator() -> None:
    names = {name.partition(".")[0] for name in _ATEN}
    assert not [name for name in names if not torch._C._jit_get_schemas_for_operator(f"aten::{name}")]


def test_a_model_that_is_replaced_while_it_is_opened_is_read_again(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_model
    other = quantize(seeded(nn.Linear(4, 2)), INT8_DYNAMIC, [rand(6, 4)])
    reads = []

    def replaced(directory: Path) -> Any:
        reads.append(found(directory))
        if len(reads) == 1:
            other.save(directory)
        return reads[-1]

    monkeypatch.setattr(serialization, "read_model", replaced)
    x = rand(3, 4)
    torch.testing.assert_close(qfx.load(stored)(x), other(x), rtol=0, atol=0)
    assert len(reads) == 2


def test_truth_values_are_0_or_1(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mask", torch.tensor([True, False, True, True]))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            mask = self.mask
            assert isinstance(mask, Tensor)
            return y.masked_fill(mask, 0.0)

    quantize(seeded(Masked()), "int8_weight_only", [rand(6, 4)]).save(tmp_path)
    tensors = load_file(tensor_file(tmp_path))
    (mask,) = (tensor for tensor in tensors.values() if tensor.dtype is torch.bool)
    mask.view(torch.uint8)[1] = 255
    replace_tensors(tmp_path, tensors)
    with pytest.raises(qfx.QuarkError, match="contains booleans whose bytes are not 0 or 1"):
        qfx.load(tmp_path)


OWN = """
import sys, torch, quark_fx as qfx
from dataclasses import dataclass
from quark_fx.observers.base import observer
from quark_fx.observers import MinMax

@qfx.graph_pass()
def my_pass(gm):
    return 0

@qfx.graph_pass()
@dataclass(frozen=True)
class MyOptions:
    strength: float = 0.5
    names: tuple = ("a",)
    def __call__(self, gm):
        return 0

@observer
@dataclass(frozen=True)
class MyObserver(MinMax):
    tail: int = 3

linear = torch.nn.Sequential(torch.nn.Linear(8, 8)).eval()
spec = qfx.presets.INT8_STATIC.input.replace(observer=MyObserver(tail=4))
config = qfx.presets.INT8_STATIC.replace(input=spec, output=None, passes=(my_pass, MyOptions(float("inf"))))
qfx.quantize(linear, config, [torch.randn(4, 8)], progress=False).save(sys.argv[1])
"""


def test_a_model_needs_no_code_of_what_made_it(tmp_path: Path) -> None:
    done = run_program(OWN, tmp_path)
    assert not done.returncode, done.stderr
    loaded = qfx.load(tmp_path)
    x = rand(3, 8)
    assert loaded(x).shape == (3, 8)
    config = loaded.config
    assert config.to_dict()["passes"][1] == {"name": "MyOptions", "strength": {"float": "inf"}, "names": ["a"]}
    assert config.input is not None
    assert config.input.to_dict()["observer"] == {"name": "my_observer", "tail": 4}
    assert str(loaded.report())
    loaded.save(tmp_path / "again")
    assert qfx.load(tmp_path / "again").config == config
    with pytest.raises(
        qfx.QuarkError, match="pass 'my_pass' is known only by its name, from a stored model; import the module"
    ):
        quantize(seeded(nn.Linear(8, 8)), config, [x])
    with pytest.raises(
        qfx.QuarkError, match="observer 'my_observer' is known only by its name, from a stored model; import the"
    ):
        quantize(seeded(nn.Linear(8, 8)), config.replace(passes=()), [x])
    with pytest.raises(qfx.ConfigError, match="unknown observer 'my_observer'"):
        qfx.QuantConfig.from_dict(config.to_dict())


class Deep(nn.Module):
    """A module in modules of one name."""

    def __init__(self, depth: int, name: str) -> None:
        super().__init__()
        self.add_module(name, Deep(depth - 1, name) if depth else nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        (inner,) = self.children()
        return inner(x)  # type: ignore[no-any-return]


class Called(nn.Module):
    """Modules of the given names, one after another."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.children():
            x = inner(x)
        return x


class Keyed(nn.Module):
    """A model of a dictionary, whose keys name inputs and outputs."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.linear = key, nn.Linear(4, 4)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.key: self.linear(x[self.key])}


NAMED: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "nested": lambda: (Deep(32, "submodule_number"), rand(3, 4)),
    "long": lambda: (Called("a" * 5000, "a" * 4999 + "b"), rand(3, 4)),
    "cases": lambda: (Called("Layer", "layer", "LAYER"), rand(3, 4)),
    "escaped": lambda: (Called("a b", "a_b", "a-b", "a__b", "a_b_1", "größe", "日本"), rand(3, 4)),
    "long key": lambda: (Keyed("k" * 700), ({"k" * 700: rand(3, 4)},)),
    "odd key": lambda: (Keyed("a b/ü"), ({"a b/ü": rand(3, 4)},)),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_is_saved_loads_whatever_it_is_called(case: str, tmp_path: Path) -> None:
    model, x = NAMED[case]()
    qmodel = quantize(seeded(model), "int8_static", [x])
    qmodel.save(tmp_path / "model")
    loaded = qfx.load(tmp_path / "model")
    call = x if isinstance(x, tuple) else (x,)
    for ours, theirs in zip(tree_leaves(loaded(*call)), tree_leaves(qmodel(*call)), strict=True):
        assert torch.equal(ours, theirs)
    assert [row.name for row in loaded.report().rows] == [row.name for row in qmodel.report().rows]
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again/graph.json").read_bytes() == (tmp_path / "model/graph.json").read_bytes()
    assert torch.equal(tree_leaves(loaded.eager(model)(*call))[0], tree_leaves(qmodel(*call))[0])


class Inside(nn.Module):
    """A linear layer on a tensor in nested lists."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.levels, self.layer = levels, nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        for _ in range(self.levels):
            x = x[0]
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_structure_that_load_refuses_is_not_saved(tmp_path: Path) -> None:

    def refusal(qmodel: qfx.QuantizedModel, directory: Path) -> str:
        try:
            qmodel.save(directory)
        except qfx.QuarkError as error:
            return str(error)
        return ""

    refusals = []
    for levels in (20, 27, 28, 29, 30, 31, 32, 33, 60):
        batch: Any = rand(2, 4)
        for _ in range(levels):
            batch = [batch]
        qmodel = quantize(Inside(levels).eval(), INT8_WEIGHT_ONLY, [(batch,)])
        refusals.append(refusal(qmodel, tmp_path / str(levels)))
        if refusals[-1]:
            assert "nested more than 64 levels deep" in refusals[-1]
            assert not (tmp_path / str(levels)).exists()
        else:
            assert torch.equal(qfx.load(tmp_path / str(levels))(batch), qmodel(batch))
    assert not refusals[0]
    assert refusals[-1]
