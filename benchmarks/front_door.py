"""Count the moves of the model and the calibration data between files, on their way through `quantize`.

    PYTHONPATH=.:tests python -m benchmarks.front_door

Traces one run of `w4a16_gptq` on two linear layers. A stop is a call of a function in quark_fx that receives as an
argument the model, or the list of batches or its first batch; a generator that continues is not called again. A move
is a stop in another file than the previous stop. A climb is a move to a higher room. Rooms are the folders and modules
that `tests/test_layout.py` orders; a room imports only rooms below it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from inspect import CO_GENERATOR
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from test_layout import FLOOR
from torch import nn

import quark_fx as qfx

_PACKAGE = str(Path(qfx.__file__).parent)


def stops(run: Callable[[], object], tracked: Sequence[object]) -> list[tuple[str, str]]:
    """Return file and function of each call that receives one of `tracked`, in order."""
    path: list[tuple[str, str]] = []
    seen: list[FrameType] = []  # of generators

    def look(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(_PACKAGE) or code.co_name.startswith("<"):
            return
        if code.co_flags & CO_GENERATOR:
            if any(frame is one for one in seen):
                return
            seen.append(frame)
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if any(frame.f_locals.get(name) is one for name in names for one in tracked):
            path.append((str(Path(code.co_filename).relative_to(_PACKAGE)), code.co_name))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return path


def main() -> None:
    """Print stops, moves, and climbs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    data = [torch.randn(4, 64) for _ in range(2)]
    qfx.quantize(model, "w4a16_gptq", data, progress=False)  # late imports are not part of the path
    for name, tracked in (("model", [model]), ("data", [data, data[0]])):
        path = stops(lambda: qfx.quantize(model, "w4a16_gptq", data, progress=False), tracked)
        path = [stop for i, stop in enumerate(path) if not i or stop[0] != path[i - 1][0]]
        floors = [FLOOR[Path(file).parts[0].removesuffix(".py")] for file, _ in path]
        climbs = [below < above for below, above in pairwise(floors)]
        print(f"{name}: {len(climbs)} moves, {sum(climbs)} climbs")
        for (file, function), climb in zip(path, [False, *climbs], strict=True):
            print(f"  {'^' if climb else ' '} {file}:{function}")


if __name__ == "__main__":
    main()
