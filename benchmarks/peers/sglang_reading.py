"""SGLang reads checkpoints in a process of its own, as for a GPU but on a CPU; started by `benchmarks.in_sglang`.

    sglang/bin/python -m benchmarks.peers.sglang_reading job.json

Its environment needs SGLang, not quark_fx. SGLang's own code reads `config.json`, builds the model, chooses a scheme
for each layer and loads the weights. It does not repack them and computes nothing. To that end the process

- answers for an NVIDIA GPU where torch is asked for one, since the choice depends on it;
- puts stubs in place of `sgl_kernel`, whose native code needs CUDA, of one kernel in CuTe, which needs `cuda.bindings`,
  and of `torchvision`, which fails beside a torch without CUDA. They only satisfy imports. `sgl_kernel.scalar_type`,
  which is Python, is SGLang's own where it is installed.

A job is a JSON object; checkpoints and results lie in its folder. Each result is written as soon as it is known.

    capability   compute capability of the GPU, major and minor
    checkpoints  list of names of folders

Results are `name.json`: `error`, or what `benchmarks.peers.loading.loaded` returns.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.peers.loading import loaded, pretend, reason
from benchmarks.peers.worker import work

STUBS = ("sgl_kernel", "sglang.kernels.ops.gemm.cutedsl_dual_gemm", "torchvision")
"""Modules whose names are found, and do nothing."""


def _scalar_types() -> dict[str, Path]:
    """Return the file of `sgl_kernel.scalar_type`, which is Python, where it is installed."""
    kernels = importlib.util.find_spec("sgl_kernel")
    folders = list(kernels.submodule_search_locations or ()) if kernels else []
    path = next((path for folder in folders if (path := Path(folder) / "scalar_type.py").exists()), None)
    return {} if path is None else {"sgl_kernel.scalar_type": path}


def read(folder: Path) -> dict[str, Any]:
    """Build the model of a checkpoint, load its weights and return the result."""
    from sglang.srt.configs.load_config import LoadConfig  # type: ignore[import-not-found]
    from sglang.srt.configs.model_config import ModelConfig  # type: ignore[import-not-found]
    from sglang.srt.model_loader import loader  # type: ignore[import-not-found]

    config, options = ModelConfig(model_path=str(folder), dtype="bfloat16"), LoadConfig()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model: nn.Module = loader._initialize_model(config, options, loader._get_quantization_config(config, options))
    finally:
        torch.set_default_dtype(torch.float32)
    return loaded(model, folder, ("g_idx",))


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
    job = json.loads(path.read_text(encoding="utf-8"))
    pretend(job["capability"], STUBS, _scalar_types())
    _join_alone(path.parent)
    for name in job["checkpoints"]:
        try:
            found = read(path.parent / name)
        except Exception as error:  # whatever it does not read is a result
            found = {"error": reason(error)}
        (path.parent / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    work(__doc__, run)
