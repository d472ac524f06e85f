"""Random changes to files that quark_fx reads, and what reading them comes to: a result, or an error of ours.

A case is a number: it chooses the kind of file, the change, and every random choice in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.config
import yaml
from coded_sources import awq, gptq, modelopt, mxfp4
from safetensors.torch import save_file
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.checkpoints.files import CheckpointFiles
from quark_fx.errors import QuarkError
from quark_fx.model.model_directory import document_text, tensor_file
from quark_fx.model.stored_operators import _OPERATORS as ALLOWED
from quark_fx.model.stored_operators import DTYPES, PYTHON
from quark_fx.presets import PRESETS

_WHOLE = "model.safetensors"
VICTIM = "quark_fx_victim"
"""A module that files name and nothing may import."""
_CODE = f'__import__("{VICTIM}")'
_NEST: list[Any] = []
for _ in range(100):
    _NEST = [_NEST]
_OPERATORS = sorted(
    {f"{s.name.replace('::', '.')}.{s.overload_name or 'default'}" for s in torch._C._jit_get_all_schemas()}
    | {f"python.{name}" for name in PYTHON}
)
HOSTILE: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        255,
        1 << 31,
        1 << 40,
        1 << 62,
        -(1 << 63),
        10**300,
        0.5,
        -0.0,
        1e308,
        float("inf"),
    ),
    *(
        "",
        "x",
        "self",
        "class",
        "__class__",
        "__import__",
        "forward",
        "t0",
        "t1",
        "input",
        "\ud800",
        "größe",
        "a" * 9000,
    ),
    *(
        _CODE,
        f'x", 0)\r{_CODE}\r("',
        f"{VICTIM}.A",
        f"transformers.{VICTIM}",
        "../../../etc/passwd",
        "/etc/passwd",
        "\0",
    ),
    *(
        [],
        {},
        [[]],
        _NEST,
        [1, 2],
        {"node": "input_1"},
        {"torch": "save"},
        {"float": "nan"},
        {"symbol": 0},
        {"slice": [0]},
    ),
    *({"kind": "defaultdict", "factory": VICTIM, "keys": ["a"], "items": [None]}, {"name": VICTIM}, {"repr": _CODE}),
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every list or mapping in a document with each of its keys."""
    found, rest = [], [value]
    while rest:
        outer = rest.pop()
        keys = list(outer) if isinstance(outer, dict) else range(len(outer))
        found += [(outer, key) for key in keys]
        rest += [outer[key] for key in keys if isinstance(outer[key], dict | list) and outer[key] is not _NEST]
    return found


def mutate(value: Any, rng: random.Random) -> Any:
    """Change a JSON document in one to three places."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = _places(value)
        if not places:
            return rng.choice(HOSTILE)
        outer, key = rng.choice(places)
        inner = outer[key]
        what = rng.randrange(7)
        if what == 0:
            del outer[key]
        elif what == 1 and isinstance(outer, list):
            outer.insert(rng.randrange(len(outer) + 1), json.loads(json.dumps(inner)))
        elif what == 2:
            other, place = rng.choice(places)
            outer[key], other[place] = json.loads(json.dumps(other[place])), json.loads(json.dumps(inner))
        elif what == 3 and isinstance(outer, dict):
            new = rng.choice([item for item in HOSTILE if isinstance(item, str)])
            outer[new] = outer.pop(key)
        elif what == 4 and isinstance(inner, int | float):
            outer[key] = rng.choice((inner + 1, inner - 1, -inner, inner * 3, inner / 2, inner * 1_000_003))
        elif what == 5 and isinstance(inner, str) and "." in inner:
            outer[key] = rng.choice(_OPERATORS)
        else:
            outer[key] = json.loads(json.dumps(rng.choice(HOSTILE)))
    return value


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(data) + 1)
        what = rng.randrange(5)
        if what == 0 and data:
            data[place % len(data)] ^= 1 << rng.randrange(8)
        elif what == 1:
            data = data[:place]
        elif what == 2:
            data[place:place] = rng.choice((b"[" * 3000, b"\xff\xfe", b"\0" * 9, b'"', b"{", b"9" * 5000, b"*a"))
        elif what == 3:
            data[place : place + rng.randrange(40)] = b""
        else:
            data[place : place + 8] = rng.randbytes(8)
    return bytes(data)


def _linear() -> nn.Module:
    return seeded(nn.Linear(8, 4))


def _rows(*sizes: int) -> list[Tensor]:
    return [rand(size, 8) for size in sizes]


_STORED: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Tensor]], str]] = {
    "cnn": (cnn, images, "int8_static"),
    "mlp": (mlp, tokens, "int8_dynamic"),
    "linear": (_linear, _rows, "int8_dynamic"),
}
"""Stored models, with network, batches of given sizes, and preset; calls of operators join the smallest one."""


def make(folder: Path) -> None:
    """Write the files that are changed."""
    for name, (network, batches, preset) in _STORED.items():
        quantize(network(), preset, batches(4, 4)).save(folder / name)
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    tensors = {
        name: t.clone() for name, t in seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict().items()
    }
    save_file(tensors, checkpoint / "a.safetensors")
    index = {"metadata": {"total_size": 160}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    fp8 = folder / "fp8"
    fp8.mkdir()
    codes = {"a.q_proj.weight": torch.zeros(40, 64).to(torch.float8_e4m3fn), "mtp.fc.weight": torch.ones(8, 32)}
    save_file(codes | {"a.q_proj.weight_scale_inv": torch.ones(2, 2), "b.weight": torch.eye(32)}, fp8 / _WHOLE)
    quantized = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    (fp8 / "config.json").write_text(json.dumps({"vocab_size": 9, "num_hidden_layers": 1, **quantized}))
    groups = qfx.presets.W4A16_RTN.replace(group_size=32)
    groups = groups.replace(weight=groups.weight.replace(symmetry="asymmetric"))  # type: ignore[union-attr]
    qfx.convert(fp8, groups, folder / "int4", progress=False)
    gptq(folder / "gptq", 3)
    awq(folder / "awq")
    mxfp4(folder / "mxfp4")
    qfx.convert(fp8, "nvfp4_weight_only", folder / "nvfp4", progress=False)
    modelopt(folder / "nvfp4", folder / "modelopt")
    export = folder / "export"
    export.mkdir()
    for name in ("a", "b"):
        qfx.export.onnx(quantize(mlp(), "int8_weight_only", tokens()), export / f"{name}.onnx", external_data=True)
    manifest = {"components": {"prefill": {"file": "a.onnx"}, "decode": {"file": "b.onnx"}}}
    (export / "export.json").write_text(json.dumps(manifest))


def _graph(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    name = rng.choice(("cnn", "mlp"))
    shutil.copytree(source / name, place)
    model = mutate(json.loads((place / "graph.json").read_text())["model"], rng)
    try:
        (place / "graph.json").write_text(document_text(model))
    except (ValueError, AttributeError):  # what JSON does not say
        (place / "graph.json").write_text(json.dumps({"version": 4, "sha256": "", "model": model}))
    return lambda: _run(place, name)


def _run(place: Path, name: str) -> str:
    loaded, (network, batches, _) = qfx.load(place), _STORED[name]
    with suppress(QuarkError):
        loaded.eager(network())
    try:
        loaded(batches(3)[0])
    except QuarkError:
        return "loaded, and its call refused"
    except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, NotImplementedError) as error:
        return f"loaded, and torch refused its call: {type(error).__name__}"
    return "loaded and called"


_OVERLOADS = sorted(
    (schema.name.replace("::", "."), schema.overload_name or "default")
    for namespace, names in ALLOWED.items()
    for name in names
    for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name.partition('.')[0]}")
)
"""Every overload of a name that a stored graph may call, those that it may not call included."""
_CALLABLE = sorted(
    (schema.name.replace("::", "."), schema.overload_name or "default")
    for namespace, names in ALLOWED.items()
    for name in names
    for schema in torch._C._jit_get_schemas_for_operator(f"{namespace}::{name.partition('.')[0]}")
    if name.partition(".")[2] in ("", schema.overload_name)
    and not schema.is_mutable
    and any("Tensor" in str(argument.type) for argument in (*schema.arguments, *schema.returns))
)
"""Every overload on tensors that a stored graph may call: packet and overload."""
_SHAPES: list[list[int]] = [
    [4],
    [3, 4],
    [2, 3, 4],
    [1, 2, 6, 6],
    [1, 2, 4, 4, 4],
    [4, 4],
    [],
    [0],
    [2, 0, 3],
    [1, 1, 1, 1],
]
_TYPES = (
    ["float32"] * 6 + ["int64"] * 4 + ["bool", "int8", "uint8", "int32", "float16", "bfloat16", "float64", "complex64"]
)
_INTEGERS = [0, 1, 1, 2, 2, 3, 4, -1, -1, -2, 7, 100, 1 << 20, 1 << 31, 1 << 40, -(1 << 31), (1 << 63) - 1, -(1 << 63)]
_NUMBERS: list[Any] = [0.0, 0.5, 1.0, -1.0, 1e-30, 1e30, {"float": "nan"}, {"float": "inf"}, *_INTEGERS]
_EDGES = [127, 255, -129, 1 << 31, (1 << 63) - 1, -(1 << 63), -1, 0, 46]
"""Numbers that are too large for something: a type's number, a dimension, a size, a quotient."""
_TEXTS = ["mean", "sum", "none", "zeros", "reflect", "constant", "ij", "xy", "same", "tanh", "ab,bc->ac", "linear", "x"]


def _within(dtype: str, value: int) -> int:
    if dtype == "bool":
        return value % 2
    limits = torch.iinfo(getattr(torch, dtype))
    return min(max(value, limits.min), limits.max)


class _Calls:
    """Draws the arguments of a call, and calls that make its tensors."""

    def __init__(self, rng: random.Random, *, edges: bool = False) -> None:
        self.rng, self.nodes = rng, list[dict[str, Any]]()
        self.types: list[str] = sorted(DTYPES) if edges else _TYPES
        self.integers = _EDGES if edges else _INTEGERS
        self.numbers: list[Any] = [*_EDGES, {"float": "nan"}, -1.0] if edges else _NUMBERS
        self.shape = rng.choice(_SHAPES)

    def tensor(self) -> Any:
        """Return a tensor of one value, or of the numbers from one on, of any shape and type."""
        rng, name = self.rng, f"made_{len(self.nodes)}"
        shape = self.shape if rng.random() < 0.7 else rng.choice(_SHAPES)
        dtype = rng.choice(self.types)
        floats = dtype.startswith(("float", "bfloat", "complex"))
        value: Any = rng.choice(self.numbers if floats else self.integers)
        if dtype != "int64" and not floats:
            value = int(value) % 100 if self.types is _TYPES else _within(dtype, value)
        call = {"target": "aten.full.default", "args": [shape, value], "kwargs": {"dtype": {"torch": dtype}}}
        self.nodes.append({"name": name, "op": "call_function", **call})
        return {"node": name}

    def argument(self, kind: str) -> Any:
        """Return a value of a schema's type."""
        rng = self.rng
        if kind.startswith("Optional["):
            return None if rng.random() < 0.5 else self.argument(kind[9:-1])
        if kind.startswith("List["):
            return [self.argument(kind[5:-1]) for _ in range(rng.choice((0, 1, 1, 2, 2, 2, 3, 4)))]
        draw: dict[str, Callable[[], Any]] = {
            "Tensor": self.tensor,
            "int": lambda: rng.choice(self.integers),
            "SymInt": lambda: rng.choice(self.integers),
            "float": lambda: rng.choice(self.numbers),
            "number": lambda: rng.choice(self.numbers),
            "bool": lambda: rng.random() < 0.5,
            "str": lambda: rng.choice(_TEXTS),
            "ScalarType": lambda: {"torch": rng.choice(self.types)},
            "MemoryFormat": lambda: {"torch": rng.choice(("contiguous_format", "channels_last"))},
        }
        return draw.get(kind, lambda: None)()

    def of(self, packet: str, overload: str) -> None:
        """Add the call of an operator, and its first result where it has several."""
        schemas = torch._C._jit_get_schemas_for_operator(packet.replace(".", "::"))
        schema = next(one for one in schemas if (one.overload_name or "default") == overload)
        args, kwargs = list[Any](), dict[str, Any]()
        for argument in schema.arguments:
            if argument.has_default_value() and self.rng.random() < 0.5:
                if argument.kwarg_only:
                    continue
                value = json.loads(json.dumps(argument.default_value, default=lambda _: None))
            else:
                value = self.argument(str(argument.real_type))
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        self.nodes.append(
            {"name": "call", "op": "call_function", "target": f"{packet}.{overload}", "args": args, "kwargs": kwargs}
        )
        if len(schema.returns) != 1 or "List" in str(schema.returns[0].type):
            first = {"target": "python.getitem", "args": [{"node": "call"}, 0]}
            self.nodes.append({"name": "first", "op": "call_function", **first})


def _call(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    """Store a graph that calls any operator it may with arguments of the types that it takes, whatever their values."""
    shutil.copytree(source / "linear", place)
    calls = _Calls(rng)
    calls.of(*rng.choice(_CALLABLE))
    return _returned(place, calls)


def _returned(place: Path, calls: _Calls) -> Callable[[], Any]:
    """Store a graph that returns the last of some calls."""
    model = json.loads((place / "graph.json").read_text())["model"]
    output = model["nodes"].pop()
    output["args"] = [[{"node": calls.nodes[-1]["name"]}]]
    model["nodes"] += [*calls.nodes, output]
    (place / "graph.json").write_text(document_text(model))
    return lambda: _run(place, "linear")


_QUOTIENTS = [
    (f"{name}.{overload}", mode)
    for name, overloads in {
        "div": ("Tensor_mode", "Scalar_mode"),
        "divide": ("Tensor_mode", "Scalar_mode"),
        "floor_divide": ("default", "Scalar"),
        "remainder": ("Tensor", "Scalar", "Scalar_Tensor", "int"),
        "fmod": ("Tensor", "Scalar", "int"),
        "lcm": ("default",),
        "gcd": ("default", "int"),
    }.items()
    for overload in overloads
    for mode in (("trunc", "floor") if overload.endswith("_mode") else ("",))
]
_DIVIDED = [
    (*quotient, dtype, divisor)
    for quotient in _QUOTIENTS
    for dtype in ("int64", "int32", "int16", "int8")
    for divisor in (-1, 0, 7)
]
"""Divisions of the most negative integer: its quotient by -1 does not fit its type; `lcm` with 7 divides by -1, too."""
FIRST_ATTACK = 10**9
"""Cases from this number on are attacks that were chosen, not drawn."""
DIVISIONS = len(_DIVIDED)
"""How many of them divide; there is one more for each overload."""


def _attack(number: int, source: Path, place: Path) -> Callable[[], Any]:
    """Store a graph that divides what cannot be divided, or calls any overload with numbers at the edges of types."""
    shutil.copytree(source / "linear", place)
    if number >= DIVISIONS:
        calls = _Calls(random.Random(number), edges=True)
        calls.of(*_OVERLOADS[(number - DIVISIONS) % len(_OVERLOADS)])
        return _returned(place, calls)
    target, mode, dtype, divisor = _DIVIDED[number]
    calls = _Calls(random.Random(number))
    lowest = torch.iinfo(getattr(torch, dtype)).min
    for name, value in (("dividend", lowest), ("divisor", divisor)):
        call = {"target": "aten.full.default", "args": [[40], value], "kwargs": {"dtype": {"torch": dtype}}}
        calls.nodes.append({"name": name, "op": "call_function", **call})
    overload = target.partition(".")[2]
    left: Any = lowest if overload in ("Scalar_Tensor", "int") else {"node": "dividend"}
    right: Any = divisor if overload.startswith("Scalar") and overload != "Scalar_Tensor" else {"node": "divisor"}
    right = divisor if overload == "int" else right
    kwargs = {"rounding_mode": mode} if mode else {}
    call = {"target": f"aten.{target}", "args": [left, right], "kwargs": kwargs}
    calls.nodes.append({"name": "call", "op": "call_function", **call})
    return _returned(place, calls)


def _tensors(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    name = rng.choice(("cnn", "mlp"))
    shutil.copytree(source / name, place)
    content = mutate_bytes(tensor_file(place).read_bytes(), rng)
    digest = hashlib.sha256(content).hexdigest()
    model = json.loads((place / "graph.json").read_text())["model"]
    if rng.randrange(4):  # by one who keeps the digest right, or not
        (place / "graph.json").write_text(document_text({**model, "tensor_file": digest}))
        (place / f"tensors-{digest[:32]}.safetensors").write_bytes(content)
    else:
        (place / f"tensors-{model['tensor_file'][:32]}.safetensors").write_bytes(content)
    return lambda: _run(place, name)


def _graph_bytes(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    shutil.copytree(source / "cnn", place)
    file = place / "graph.json"
    file.write_bytes(mutate_bytes(file.read_bytes(), rng))
    return lambda: _run(place, "cnn")


def _index(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    shutil.copytree(source / "checkpoint", place)
    file = place / rng.choice(("model.safetensors.index.json", "model.safetensors.index.json", "a.safetensors"))
    if file.suffix == ".json" and rng.randrange(3):
        file.write_text(json.dumps(mutate(json.loads(file.read_text()), rng)))
    else:
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))

    def read() -> str:
        files = CheckpointFiles.of(place)
        for name in files.files:
            files.tensor(name)
        return "read"

    return read


def _converted(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    shutil.copytree(source / rng.choice(("fp8", "int4", "gptq", "awq", "mxfp4", "nvfp4", "modelopt")), place)
    file = place / rng.choice(("config.json", _WHOLE))
    if file.suffix == ".json" and rng.randrange(3):
        file.write_text(json.dumps(mutate(json.loads(file.read_text()), rng)))
    else:
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))
    made = place.with_name("converted")
    return lambda: f"converted: {len(qfx.convert(place, 'fp8_dynamic', made, progress=False).tensors) > 0}"


def _export(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    shutil.copytree(source / "export", place)
    file = place / rng.choice(("export.json", "a.onnx", "b.onnx"))
    if file.suffix == ".json" and rng.randrange(3):
        file.write_text(json.dumps(mutate(json.loads(file.read_text()), rng)))
    else:
        file.write_bytes(mutate_bytes(file.read_bytes(), rng))
    return lambda: f"shared: {qfx.export.share_weights(place) >= 0}"


def _yaml(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    text = PRESETS[rng.choice(sorted(PRESETS))].to_yaml()
    if rng.randrange(2):
        place.write_text(json.dumps(mutate(yaml.safe_load(text), rng)))
    else:
        place.write_bytes(mutate_bytes(text.encode(), rng))
    return lambda: f"read: {bool(qfx.QuantConfig.from_yaml(place))}"


def _config(source: Path, place: Path, rng: random.Random) -> Callable[[], Any]:
    data = mutate(json.loads(json.dumps(PRESETS[rng.choice(sorted(PRESETS))].to_dict())), rng)
    return lambda: f"read: {bool(qfx.QuantConfig.from_dict(data, stored=rng.random() < 0.5))}"


KINDS = {
    "stored graph": (_graph, 10),
    "call of an operator": (_call, 9),
    "bytes of a stored graph": (_graph_bytes, 3),
    "bytes of stored tensors": (_tensors, 3),
    "index or shard": (_index, 4),
    "checkpoint to convert": (_converted, 6),
    "manifest or ONNX graph": (_export, 3),
    "YAML": (_yaml, 4),
    "configuration": (_config, 4),
}
"""Kinds of files: what changes and reads one, and how many of 46 cases are of it."""


class Hang(BaseException):
    """Reading took longer than it may."""


def outcome(case: int, source: Path) -> tuple[str, str]:
    """Return the kind of a case and what reading it came to: a result, `refused`, or what went wrong in capitals."""
    rng = random.Random(case)
    chosen = case - FIRST_ATTACK
    kind = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0] if chosen < 0 else "chosen attack"
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "file")
        read = KINDS[kind][0](source, place, rng) if chosen < 0 else _attack(chosen, source, place)
        try:
            return kind, read()
        except QuarkError as error:
            return kind, "refused" if len(str(error)) < 50_000 else "LONG MESSAGE"
        except Hang:
            return kind, "HANG"
        except BaseException as error:
            return kind, f"RAISED {type(error).__name__}: {str(error)[:200]}"


def main(source: str, *cases: str) -> None:
    """Print the outcome of each case; the process ends with 77 when code of a file runs or a module is imported."""

    def guard(event: str, args: tuple[Any, ...]) -> None:
        if event in (
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "subprocess.Popen",
            "os.fork",
            "socket.connect",
            "pickle.find_class",
        ) or (event == "import" and VICTIM in str(args[0])):
            os._exit(77)

    def hang(*_: Any) -> None:
        raise Hang

    torch.set_num_threads(1)
    torch._dynamo.config.fake_tensor_cache_enabled = False  # graphs of few operators: looking up takes longer
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33))
    signal.signal(signal.SIGALRM, hang)
    qfx.load(Path(source, "cnn"))  # what is imported and forked once
    sys.addaudithook(guard)
    for case in map(int, cases):
        print(json.dumps([case]), flush=True)
        signal.alarm(60)
        found = outcome(case, Path(source))
        signal.alarm(0)
        print(json.dumps([case, *found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
