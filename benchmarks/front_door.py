"""Count changes of file: of the model and the data through `quantize`, and of one weight through GPTQ.

    PYTHONPATH=.:tests python -m benchmarks.front_door
    PYTHONPATH=.:tests python -m benchmarks.front_door --weight  # print every call of the third trace

Traces runs of `w4a16_gptq` on linear layers, the last of which stays in float. For the model and the data, a stop is a
call of a function in quark_fx that receives as an argument the model, or the list of batches or its first batch; a
generator that continues is not called again. A move is a stop in another file than the previous stop. A climb is a move
to a higher room. Rooms are the folders and modules that `tests/test_layout.py` orders; a room imports only rooms below
it.

For the weight, a stop is any call of a named function in quark_fx while the walk over the blocks waits for GPTQ at the
second layer: 32 x 64 weights, measured on three parts of two batches, and changed. The last line counts the public
functions and classes of some rooms that at most one other module of the package imports. Names that users import are
counted apart, because they need no importer in the package: those on `docs/api.md`, and those that a room exports from
its `__init__`, which are the registered passes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import CO_GENERATOR
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Annotated, Any

import torch
from test_layout import FLOOR
from torch import nn

import quark_fx as qfx
from benchmarks.experiment import experiment
from quark_fx.engine.block_walk import walk_blocks

_PACKAGE = Path(qfx.__file__).parent

_WALK: CodeType = walk_blocks.__code__
"""A generator."""

_ROOMS = ("engine", "solvers", "rescale", "passes")

_API = _PACKAGE.parent / "docs" / "api.md"


def stops(run: Callable[[], object], tracked: Sequence[object]) -> list[tuple[str, str]]:
    """Return file and function of each call that receives one of `tracked`, in order."""

    def receives(frame: FrameType) -> bool:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return any(frame.f_locals.get(name) is one for name in names for one in tracked)

    return _calls(run, receives)


def stops_of_weight(run: Callable[[], object]) -> list[tuple[str, str]]:
    """Return file and function of each call while `walk_blocks` waits at its second block, in order."""
    blocks, waiting = 0, False

    def look(frame: FrameType, event: str, result: object) -> None:
        nonlocal blocks, waiting
        if frame.f_code is _WALK:
            waiting = event == "return" and result is not None  # a generator that yields a block
            blocks += waiting

    return _calls(run, lambda frame: waiting and blocks == 2, look)


def _calls(
    run: Callable[[], object],
    counts: Callable[[FrameType], bool],
    look: Callable[[FrameType, str, object], None] = lambda frame, event, result: None,
) -> list[tuple[str, str]]:
    path: list[tuple[str, str]] = []
    seen: list[FrameType] = []  # of generators

    def profile(frame: FrameType, event: str, result: Any) -> None:
        look(frame, event, result)
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(str(_PACKAGE)) or code.co_name.startswith("<"):
            return
        if code.co_flags & CO_GENERATOR:
            if any(frame is one for one in seen):
                return
            seen.append(frame)
        if counts(frame):
            path.append((str(Path(code.co_filename).relative_to(_PACKAGE)), code.co_name))

    sys.setprofile(profile)
    try:
        run()
    finally:
        sys.setprofile(None)
    return path


def importers() -> dict[tuple[str, str], int]:
    """Return how many other modules of the package import each public function and class of `_ROOMS`."""
    modules = {path.relative_to(_PACKAGE.parent): ast.parse(path.read_text()) for path in _PACKAGE.rglob("*.py")}
    counts = dict[tuple[str, str], int]()
    for path, tree in modules.items():
        if path.parts[1] in _ROOMS:
            names = [node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
            module = ".".join(path.with_suffix("").parts)
            counts |= {(module, name): 0 for name in names if not name.startswith("_")}
    for tree in modules.values():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        for one in {(node.module or "", alias.name) for node in imports for alias in node.names} & counts.keys():
            counts[one] += 1
    return counts


def entry_points() -> set[str]:
    """Return the names of `_ROOMS` that users import."""
    documented = re.findall(rf"^::: quark_fx\.(?:{'|'.join(_ROOMS)})\.[\w.]*\b(\w+)$", _API.read_text(), re.MULTILINE)
    exported = (getattr(import_module(f"quark_fx.{room}"), "__all__", ()) for room in _ROOMS)
    return {*documented, *(name for names in exported for name in names)}


@experiment()
def main(weight: Annotated[bool, "print every call that one weight causes"] = False) -> None:
    """Print the moves of the model and the data, the changes of file of a weight, and the count of names."""
    layers = (nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    model, mixing = nn.Sequential(*layers).eval(), torch.randn(64, 64)
    data = [torch.randn(2400, 64) @ mixing for _ in range(2)]  # enough rows to solve once

    def run() -> object:
        return qfx.quantize(model, "w4a16_gptq", data, progress=False)

    run()  # late imports are not part of the path
    for name, tracked in (("model", [model]), ("data", [data, data[0]])):
        path = stops(run, tracked)
        path = [stop for i, stop in enumerate(path) if not i or stop[0] != path[i - 1][0]]
        floors = [FLOOR[Path(file).parts[0].removesuffix(".py")] for file, _ in path]
        climbs = [below < above for below, above in pairwise(floors)]
        print(f"{name}: {len(climbs)} moves, {sum(climbs)} climbs")
        for (file, function), climb in zip(path, [False, *climbs], strict=True):
            print(f"  {'^' if climb else ' '} {file}:{function}")
    path = stops_of_weight(run)
    changes = [before[0] != after[0] for before, after in pairwise(path)]
    print(f"one weight: {sum(changes)} changes of file over {len({file for file, _ in path})} files, {len(path)} calls")
    if weight:
        for (file, function), change in zip(path, [True, *changes], strict=True):
            print(f"  {'*' if change else ' '} {file}:{function}")
    counts = importers()
    alone, for_users = [name for (_, name), count in counts.items() if count <= 1], entry_points()
    print(f"public names with at most one importer in {', '.join(_ROOMS)}: {len(alone)} of {len(counts)}")
    print(f"  of these for users: {sum(name in for_users for name in alone)}")


if __name__ == "__main__":
    main()
