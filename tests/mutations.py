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
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from tiny import cnn, images, mlp, quantize, seeded, tokens
from torch import nn

import quark_fx as qfx
from quark_fx.checkpoint_files import CheckpointFiles
from quark_fx.errors import QuarkError
from quark_fx.model_directory import document_text, tensor_file
from quark_fx.presets import PRESETS
from quark_fx.stored_operators import PYTHON

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


def make(folder: Path) -> None:
    """Write the files that are changed."""
    quantize(cnn(), "int8_static", images(4, 4)).save(folder / "cnn")
    quantize(mlp(), "int8_dynamic", tokens()).save(folder / "mlp")
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    tensors = {
        name: t.clone() for name, t in seeded(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).state_dict().items()
    }
    save_file(tensors, checkpoint / "a.safetensors")
    index = {"metadata": {"total_size": 160}, "weight_map": dict.fromkeys(tensors, "a.safetensors")}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
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
        (place / "graph.json").write_text(json.dumps({"version": 3, "sha256": "", "model": model}))
    return lambda: _run(place, name)


def _run(place: Path, name: str) -> str:
    loaded = qfx.load(place)
    try:
        loaded((images if name == "cnn" else tokens)(3)[0])
    except QuarkError:
        return "loaded, and its call refused"
    except (RuntimeError, IndexError, ValueError, TypeError, ZeroDivisionError, NotImplementedError) as error:
        return f"loaded, and torch refused its call: {type(error).__name__}"
    return "loaded and called"


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
    "bytes of a stored graph": (_graph_bytes, 3),
    "bytes of stored tensors": (_tensors, 3),
    "index or shard": (_index, 4),
    "manifest or ONNX graph": (_export, 3),
    "YAML": (_yaml, 4),
    "configuration": (_config, 4),
}
"""Kinds of files: what changes and reads one, and how many of 31 cases are of it."""


class Hang(BaseException):
    """Reading took longer than it may."""


def outcome(case: int, source: Path) -> tuple[str, str]:
    """Return the kind of a case and what reading it came to: a result, `refused`, or what went wrong in capitals."""
    rng = random.Random(case)
    kind = rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    with tempfile.TemporaryDirectory() as folder:
        read = KINDS[kind][0](source, Path(folder, "file"), rng)
        try:
            return kind, read()
        except QuarkError as error:
            return kind, "refused" if len(str(error)) < 50_000 else "LONG MESSAGE"
        except Hang:
            return kind, "HANG"
        except BaseException as error:
            return kind, f"RAISED {type(error).__name__}: {str(error)[:200]}"


def main(source: str, first: str, count: str) -> None:
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
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (1 << 35, 1 << 35))
    signal.signal(signal.SIGALRM, hang)
    qfx.load(Path(source, "cnn"))  # what is imported and forked once
    sys.addaudithook(guard)
    for case in range(int(first), int(first) + int(count)):
        print(json.dumps([case]), flush=True)
        signal.alarm(60)
        found = outcome(case, Path(source))
        signal.alarm(0)
        print(json.dumps([case, *found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
