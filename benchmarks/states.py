"""Models in every state, by every function and output: right, or refused with the model and the directory unchanged.

    python -m benchmarks.states [STATE …]

Each state changes a small model as users do: hooks, wrappers, tables built by the first call, tied, parametrized, or
offloaded weights. For each state and action the command prints `right`, or the error that names the cause, or `WRONG`.
A result is right if it equals the float model up to rounding. After each action, after `KeyboardInterrupt` in the
second batch as well, each parameter, buffer, attribute, container, and hook of the model must be the same object with
the same bits, and a refused output must leave nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import quark_fx as qfx

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


class Model(nn.Module):
    """Two linears, a table, and containers."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("offset", torch.ones(8))
        self.seen: list[int] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x) + self.offset))  # type: ignore[no-any-return]


class Lazy(Model):
    """Builds a table in the first call, and counts calls."""

    late: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x.shape))
        if "table" not in self.cache:
            self.cache["table"] = torch.arange(8.0) / 8
            self.register_buffer("late", torch.ones(8), persistent=False)
        return super().forward(x * self.late + self.cache["table"])


def _tied(model: Model) -> nn.Module:
    model.second.weight = model.first.weight
    return model


def _hooked(model: Model) -> nn.Module:
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    model.second.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return model


def _patched(model: Model) -> nn.Module:
    forward = model.first.forward
    model.first.forward = lambda x: forward(x) * 2  # type: ignore[method-assign, assignment]
    return model


def _parametrized(model: Model) -> nn.Module:
    weight_norm(model.first)
    return model


def _offloaded(model: Model) -> nn.Module:
    model.second.to("meta")
    return model


STATES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Model().eval(),
    "training": lambda: Model(),
    "frozen": lambda: Model().eval().requires_grad_(False),
    "hooked": lambda: _hooked(Model()).eval(),
    "patched": lambda: _patched(Model()).eval(),
    "lazy": lambda: Lazy().eval(),
    "tied": lambda: _tied(Model()).eval(),
    "parametrized": lambda: _parametrized(Model()).eval(),
    "compiled": lambda: torch.compile(Model().eval()),  # type: ignore[dict-item,return-value]
    "wrapped": lambda: nn.DataParallel(Model().eval()),
    "traced": lambda: torch.jit.trace(Model().eval(), BATCHES[0]),
    "float64": lambda: Model().double().eval(),
    "offloaded": lambda: _offloaded(Model()).eval(),
}

Action = Callable[[nn.Module, Any, Path], Any]
"""Calls a function with a model, its batches, and an empty folder; returns outputs for the first batch, or `None`."""


def _quantized(model: nn.Module, batches: Any) -> qfx.QuantizedModel:
    return qfx.quantize(model, "int8_weight_only", batches, progress=False)


def _saved(model: nn.Module, batches: Any, folder: Path) -> Tensor:
    _quantized(model, batches).save(folder / "m")
    return qfx.load(folder / "m")(BATCHES[0])  # type: ignore[no-any-return]


def _exported(model: nn.Module, batches: Any, folder: Path) -> Tensor:
    qmodel = _quantized(model, batches)
    qfx.export.onnx(qmodel, folder / "m.onnx")
    if qfx.verify(qmodel, folder / "m.onnx", [BATCHES[0]]).max_steps > 1:
        raise ArithmeticError("the file computes something else")
    return qmodel(BATCHES[0])  # type: ignore[no-any-return]


ACTIONS: dict[str, Action] = {
    "quantize": lambda model, batches, folder: _quantized(model, batches)(BATCHES[0]),
    "eager": lambda model, batches, folder: _quantized(model, batches).eager()(BATCHES[0]),
    "qat": lambda model, batches, folder: qfx.prepare_qat(_quantized(model, batches))(BATCHES[0]),
    "save": _saved,
    "onnx": _exported,
    "checkpoint": lambda model, batches, folder: qfx.export.huggingface(_quantized(model, batches), folder / "m"),
    "gguf": lambda model, batches, folder: qfx.export.gguf(_quantized(model, batches), folder / "m.gguf"),
    "check": lambda model, batches, folder: qfx.check(model, "int8_weight_only", batches, export="qdq"),
    "analyze": lambda model, batches, folder: qfx.analyze(model, "int8_static", batches),
    "interrupt": lambda model, batches, folder: qfx.quantize(model, "int8_static", _interrupted(), progress=False),
}


def _interrupted() -> Iterator[Tensor]:
    yield BATCHES[0]
    raise KeyboardInterrupt


def contents(item: Any, seen: dict[int, Any] | None = None, path: str = "model") -> Iterator[tuple[str, Any]]:
    """Yield each object that a model holds by its path: its identity, and the bits of a tensor."""
    seen = {} if seen is None else seen
    yield path, id(item)
    if id(item) in seen:
        return
    seen[id(item)] = item
    if isinstance(item, Tensor):
        yield f"{path}!", None if item.is_meta else item.detach().clone()
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from contents(value, seen, f"{path}[{key!r}]")
    elif isinstance(item, list | tuple):
        for index, value in enumerate(item):
            yield from contents(value, seen, f"{path}[{index}]")
    elif isinstance(item, nn.Module) and not isinstance(item, torch.jit.ScriptModule):
        yield from contents(vars(item), seen, path)


def difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return the first path at which two `contents` differ, empty if they are the same."""
    for path in {**before, **after}:
        one, other = before.get(path), after.get(path)
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            same = torch.equal(one, other)
        else:
            same = path in before and path in after and one == other
        if not same:
            return path
    return ""


def outcome(state: str, action: str) -> str:
    """Return `right`, the error that a user reads, or `WRONG` and why."""
    model = STATES[state]()
    before, keep = dict(contents(model)), {}
    keep.update(vars(model))  # objects stay alive, so that no identity is given again
    batches = [x.double() for x in BATCHES] if state == "float64" else BATCHES
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        folder = Path(place)
        try:
            found, said = ACTIONS[action](model, batches, folder), "right"
        except qfx.QuarkError as error:
            found, said = None, f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if list(folder.iterdir()):
                return f"WRONG: {said}, and files are left"
        except KeyboardInterrupt:
            found, said = None, "right"
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
        if path := difference(before, dict(contents(model))):
            return f"WRONG: {path} of the model changed"
    if isinstance(found, Tensor):
        with torch.no_grad():
            real = STATES[state]()(BATCHES[0])
        if (distance := float((found.detach() - real).norm() / real.norm())) > 0.02:
            return f"WRONG: relative error {distance:.3f}"
    return said


def main() -> int:
    """Print one line for each state and action; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", nargs="*", metavar="STATE", help=", ".join(STATES))
    wrong = 0
    for state in parser.parse_args().states or STATES:
        for action in ACTIONS:
            said = outcome(state, action)
            wrong += said.startswith("WRONG")
            print(f"{state:14}{action:12}{said[:150]}", flush=True)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
