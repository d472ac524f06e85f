"""Load checkpoints on a CPU with the code of servers, as for a GPU, and report the tensors that were read.

The servers choose schemes and kernels by the GPU, so torch answers for one that is not there. Stubs take the place of
modules whose native code needs CUDA; they only satisfy imports.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

_FILLS = (0xA5, 0x5A)
"""Each byte of a parameter before it is loaded, once and then again: a weight may have one of them, not both."""


class _Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of some names as stubs, but those in `files` as Python files."""

    def __init__(self, names: Collection[str], files: Mapping[str, Path]) -> None:
        self.names, self.files = names, files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in self.files:
            return importlib.util.spec_from_file_location(fullname, self.files[fullname])
        stub = any(f"{fullname}.".startswith(f"{name}.") for name in self.names)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pretend(capability: Sequence[int], stubs: Collection[str], files: Mapping[str, Path] | None = None) -> None:
    """Make torch answer for an NVIDIA GPU, and put the stubs in place.

    Args:
        capability: Major and minor compute capability of the GPU.
        stubs: Names of modules to replace by modules that do nothing.
        files: Python files of modules within `stubs` to import unchanged.
    """
    import transformers  # type: ignore[import-untyped, unused-ignore]
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore] # noqa: F401

    # transformers stores the answer that torchvision is missing.
    transformers.utils.is_torchvision_available()
    major, minor = capability
    device = types.SimpleNamespace(
        name="none", major=major, minor=minor, multi_processor_count=1, total_memory=1 << 36, warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (major, minor),
        "get_device_name": device.name,
        "get_device_properties": device,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"
    sys.meta_path.insert(0, _Stubs(stubs, files or {}))


def loaded(model: Any, folder: Path, defaults: Sequence[str]) -> dict[str, Any]:
    """Load the weights of a checkpoint into a model of a server, and return the result.

    Args:
        model: Model that the server built.
        folder: Folder of the checkpoint.
        defaults: Last parts of the names of parameters that the server sets if the checkpoint lacks them.

    Returns:
        `layers`: schemes of the linear layers, the head, and the attention, by name. `unfilled`: names of parameters,
        except `defaults`, with a row or column that no tensor of the checkpoint filled. `unread`: names of tensors of
        the checkpoint that filled no parameter.
    """
    from safetensors.torch import load_file

    layers = {name: chosen for name, module in model.named_modules() if (chosen := _scheme(module))}
    weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    blanks = [_load(model, weights, fill) for fill in _FILLS]
    set_otherwise = tuple(f".{name}" for name in defaults)
    needed = [name for name in blanks[0] if not name.endswith(set_otherwise)]
    unfilled = [name for name in needed if _has_gap(blanks[0][name] & blanks[1][name])]
    unread = [
        name
        for name, weight in weights.items()
        if all(bool(blank.all()) for blank in _load(model, {name: weight}, _FILLS[0]).values())
    ]
    return {"layers": layers, "unfilled": unfilled, "unread": unread}


def _scheme(module: nn.Module) -> str:
    """Return the name of the class that multiplies by a layer's weights or stores its cache, or an empty string."""
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    return "" if method is None else type(method if scheme is None else scheme).__name__


def _load(model: Any, weights: dict[str, Tensor], fill: int) -> dict[str, Tensor]:
    """Load weights; tell which bytes of each parameter did not change, by rows of its first dimension."""
    for parameter in model.parameters():
        _bytes(parameter).fill_(fill)
    model.load_weights(weights.items())
    return {
        name: _bytes(parameter).view(len(parameter) if parameter.dim() else 1, -1) == fill
        for name, parameter in model.named_parameters()
    }


def _bytes(parameter: Tensor) -> Tensor:
    return parameter.data.view(-1).view(torch.uint8) if parameter.dim() else parameter.data.view(1).view(torch.uint8)


def _has_gap(blank: Tensor) -> bool:
    """Tell whether a whole row or column is blank; a tensor fills whole rows or whole columns."""
    return bool(blank.all(1).any() or blank.all(0).any())


def reason(error: BaseException) -> str:
    """Return the first cause of an error, in one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # The second line of a validation error has the reason.
    said = (
        lines[1].partition(" [type=")[0] if lines and "validation error" in lines[0] and lines[1:] else " ".join(lines)
    )
    return f"{type(error).__name__}: {said.partition(' Reasons:')[0]}".rstrip(": ")
