"""Structures that models return, by the values in them: names and number of outputs in torch, and in ONNX files.

    python -m benchmarks.output_structures [STRUCTURE …]

For each structure and each pair of values (one tensor twice, the input as it is, a view, a parameter, a constant,
`None`, a Python number, a size) the quantized model and the saved one must return the model's own structure. The ONNX
file must have one output for each tensor, under the names of the signature, with the right values. `verify` must accept
that file, and refuse it once its outputs have changed names or places.
"""

from __future__ import annotations

import itertools
import tempfile
from collections import Counter, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import onnx
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import quark_fx as qfx
from benchmarks.common import judged
from benchmarks.experiment import Option, experiment

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
Pair = namedtuple("Pair", ["one", "other"])


@dataclass
class Record:
    """A result of two parts."""

    one: Any
    other: Any


Registered = namedtuple("Registered", ["one", "other"])
pytree._register_namedtuple(Registered, serialized_type_name="benchmarks.Registered")
torch.export.register_dataclass(Record, serialized_type_name="benchmarks.Record")

STRUCTURES: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"one": a, "other": b},
    "nested dict": lambda a, b: {"one": {"two": a, "three": [b, a]}, "other": (b, None)},
    "named tuple": Pair,
    "registered named tuple": Registered,
    "dataclass": Record,
}

VALUES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "result": lambda m, x, y: y,
    "input": lambda m, x, y: x,
    "view of the result": lambda m, x, y: y.view(-1, 4, 4),
    "slice of the input": lambda m, x, y: x[:, :8],
    "quantized weight": lambda m, x, y: m.linear.weight,
    "buffer": lambda m, x, y: m.table,
    "constant": lambda m, x, y: torch.tensor(2.5),
    "whole numbers": lambda m, x, y: y.argmax(-1),
    "None": lambda m, x, y: None,
    "Python number": lambda m, x, y: 2.5,
    "size": lambda m, x, y: x.shape[0],
}

PAIRS = list(itertools.combinations_with_replacement(VALUES, 2))


class Returns(nn.Module):
    """A linear, and a structure of two values as its result."""

    def __init__(self, structure: str, one: str, other: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)
        self.register_buffer("table", torch.arange(3.0))
        self.made, self.values = STRUCTURES[structure], (VALUES[one], VALUES[other])

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return {"y": y.sum(), "rest": self.made(*(value(self, x, y) for value in self.values))}


def _leaves(result: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the values of a structure by the way to them, as types, keys, and positions."""
    kind = type(result).__name__
    if isinstance(result, dict):
        parts = list(result.items())
    elif is_dataclass(result):
        parts = [(field.name, getattr(result, field.name)) for field in fields(result)]
    elif isinstance(result, tuple | list):
        parts = list(enumerate(result))
    else:
        return [(name, result)]
    return [leaf for key, part in parts for leaf in _leaves(part, f"{name}.{kind}:{key}")]


def _require_same(own: Any, result: Any, where: str) -> None:
    expected, found = _leaves(own), _leaves(result)
    assert [name for name, _ in expected] == [name for name, _ in found], f"{where} returns {found}"
    for (name, one), (_, other) in zip(expected, found, strict=True):
        if isinstance(one, Tensor):
            same = isinstance(other, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)
            same = same and bool((one.double() - other.double()).norm() <= 0.02 * one.double().norm())
        else:
            same = type(one) is type(other) and one == other
        assert same, f"{where}: {name} is {other!r}, not {one!r}"


def require_right(structure: str, one: str, other: str) -> None:
    """Raise `AssertionError` with what is wrong of a structure of two values."""
    model = Returns(structure, one, other).eval()
    qmodel = qfx.quantize(model, "int8_weight_only", [X], progress=False)
    own = model(X)
    _require_same(own, qmodel(X), "the quantized model")
    with tempfile.TemporaryDirectory() as place:
        path = qfx.export.onnx(qmodel, Path(place) / "m.onnx")
        file = onnx.load(path)
        outputs = [value.name for value in file.graph.output]
        # Tensors are outputs, under the names of the graph's own results.
        leaves = zip(qmodel.signature.output_names, pytree.tree_leaves(own), strict=True)
        expected = [name for name, leaf in leaves if isinstance(leaf, Tensor)]
        assert all(part.isidentifier() or part.isdigit() for name in expected for part in name.split(".")), expected
        assert outputs == expected, f"the file has {outputs}, not {expected}"
        found = qfx.verify(qmodel, path, [X])
        assert [d.name for d in found.differences] == expected
        assert found.verdict == "correct", found.verdict
        for change in (_exchange, _rename, _drop):
            changed = onnx.load(path)
            if change(changed):
                onnx.save(changed, Path(place) / "changed.onnx")
                assert _is_refused(qmodel, Path(place) / "changed.onnx"), f"verify accepts {change.__name__}"
        qmodel.save(Path(place) / "saved")
        _require_same(own, qfx.load(Path(place) / "saved")(X), "the loaded model")


def _is_refused(qmodel: qfx.QuantizedModel, path: Path) -> bool:
    try:
        qfx.verify(qmodel, path, [X])
    except qfx.ExportError as error:
        return "outputs" in str(error)
    return False


def _exchange(file: Any) -> bool:
    outputs = [*file.graph.output]
    del file.graph.output[:]
    file.graph.output.extend(reversed(outputs))
    return len(outputs) > 1


def _rename(file: Any) -> bool:
    name = file.graph.output[0].name
    for node in file.graph.node:
        for names in (node.input, node.output):
            names[:] = ["other" if one == name else one for one in names]
    file.graph.output[0].name = "other"
    return True


def _drop(file: Any) -> bool:
    outputs = len(file.graph.output)
    del file.graph.output[-1]
    return outputs > 1


@experiment()
def main(*structures: Annotated[str, Option(", ".join(STRUCTURES), metavar="STRUCTURE")]) -> int:
    """Print each structure that is wrong, and how many are right; return 1 if one is wrong."""
    counts: Counter[str] = Counter()
    for structure, (one, other) in itertools.product(structures or STRUCTURES, PAIRS):
        try:
            require_right(structure, one, other)
            said = "right"
        except AssertionError as error:
            said = f"WRONG: {error}"
        except qfx.QuarkError as error:
            said = f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
        counts[said.partition(":")[0].lower()] += 1
        print(f"{structure:24}{one}, {other}: {said}", flush=True)
    return judged(counts)


if __name__ == "__main__":
    main()
