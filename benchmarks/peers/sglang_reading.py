"""SGLang reads checkpoints in a process of its own, as for a GPU but on a CPU; started by `benchmarks.in_sglang`.

    sglang/bin/python -m benchmarks.peers.sglang_reading job.json

Its environment needs SGLang, not quark_fx. SGLang's own code reads `config.json`, builds the model, chooses a scheme
for each layer and loads the weights. It does not repack them and computes nothing. To that end the process

- answers for an NVIDIA GPU of compute capability 9.0 where torch is asked for one, since the choice depends on it;
- puts stubs in place of `sgl_kernel`, whose native code needs CUDA, of one kernel in CuTe, which needs `cuda.bindings`,
  and of `torchvision`, which fails beside a torch without CUDA. They only satisfy imports. `sgl_kernel.scalar_type`,
  which is Python, is SGLang's own where it is installed.

A job is a JSON object; checkpoints and results lie in its folder. Each result is written as soon as it is known.

    checkpoints  list of names of folders

Results are `name.json`: `error`, or

    layers       scheme by the name of each linear layer, of the head and of the attention
    unfilled     names of parameters with a row or column that no tensor of the checkpoint came to; not `g_idx`,
                 which SGLang sets after loading where the checkpoint has none
    unread       names of tensors of the checkpoint that came to no parameter
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from torch import Tensor, nn

from benchmarks.peers.worker import work

STUBS = ("sgl_kernel", "sglang.kernels.ops.gemm.cutedsl_dual_gemm", "torchvision")
"""Modules whose names are found, and do nothing."""

CAPABILITY = (9, 0)

_FILLS = (0xA5, 0x5A)
"""Each byte of a parameter before it is loaded, once and then again: a weight may have one of them, not both."""


class _Stub(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of `STUBS`."""

    def __init__(self) -> None:
        kernels = importlib.util.find_spec("sgl_kernel")
        folders = list(kernels.submodule_search_locations or ()) if kernels else []
        self.types = next((path for folder in folders if (path := Path(folder) / "scalar_type.py").exists()), None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "sgl_kernel.scalar_type" and self.types is not None:
            return importlib.util.spec_from_file_location(fullname, self.types)
        stub = any(f"{fullname}.".startswith(f"{name}.") for name in STUBS)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if stub else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def pretend() -> None:
    """Make torch answer for a GPU, and put the stubs in place."""
    import transformers  # type: ignore[import-untyped, unused-ignore]
    import triton  # type: ignore[import-untyped, import-not-found, unused-ignore] # noqa: F401

    # It remembers that there is no torchvision.
    transformers.utils.is_torchvision_available()
    major, minor = CAPABILITY
    device = types.SimpleNamespace(
        name="none", major=major, minor=minor, multi_processor_count=1, total_memory=1 << 36, warp_size=32
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": CAPABILITY,
        "get_device_name": device.name,
        "get_device_properties": device,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.version.cuda = "13.0"
    sys.meta_path.insert(0, _Stubs())


def read(folder: Path) -> dict[str, Any]:
    """Build the model of a checkpoint, load its weights and return the result."""
    from safetensors.torch import load_file
    from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
    from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
    from sglang.srt.model_loader import loader  # type: ignore[import-not-found]

    config, options = ModelConfig(model_path=str(folder), dtype="bfloat16"), LoadConfig()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = loader._initialize_model(config, options, loader._get_quantization_config(config, options))
    finally:
        torch.set_default_dtype(torch.float32)
    layers = {name: found for name, module in model.named_modules() if (found := _scheme(module))}
    weights = {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}
    blanks = [_load(model, weights, fill) for fill in _FILLS]
    unfilled = [name for name in blanks[0] if "g_idx" not in name and _has_gap(blanks[0][name] & blanks[1][name])]
    unread = []
    for name, weight in weights.items():
        if all(bool(blank.all()) for blank in _load(model, {name: weight}, _FILLS[0]).values()):
            unread.append(name)
    return {"layers": layers, "unfilled": unfilled, "unread": unread}


def _load(model: Any, weights: dict[str, Tensor], fill: int) -> dict[str, Tensor]:
    """Load weights; tell which bytes of each parameter are as they were, as rows of its first dimension."""
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
    """Tell whether a whole row or column is blank: what a tensor fills is one or the other."""
    return bool(blank.all(1).any() or blank.all(0).any())


def _scheme(module: nn.Module) -> str:
    """Return the name of what multiplies by a layer's weights; empty for what is no such layer."""
    method = getattr(module, "quant_method", None)
    if method is None:
        return ""
    scheme = getattr(module, "scheme", None)
    return type(method if scheme is None else scheme).__name__


def _reason(error: BaseException) -> str:
    said = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {said}".rstrip(": ")


def _join_alone(folder: Path) -> None:
    """Set up what SGLang's layers ask for: arguments of a server, and a group of one process."""
    from sglang.srt.distributed import parallel_state  # type: ignore[import-not-found]
    from sglang.srt.runtime_context import SpawnRanks, publish  # type: ignore[import-not-found]
    from sglang.srt.server_args import ServerArgs  # type: ignore[import-not-found]

    publish(ServerArgs(model_path="none"), role="test", ranks=SpawnRanks(world_rank=0))
    parallel_state._group_coordinator_device = lambda _: torch.device("cpu")
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder / 'group'}"
    )
    parallel_state.initialize_model_parallel(backend="gloo")


def run(path: Path) -> None:
    """Do the job of the JSON file at `path`."""
    pretend()
    _join_alone(path.parent)
    for name in json.loads(path.read_text(encoding="utf-8"))["checkpoints"]:
        try:
            found = read(path.parent / name)
        except Exception as error:  # whatever it does not read is a result
            found = {"error": _reason(error)}
        (path.parent / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    work(__doc__, run)
