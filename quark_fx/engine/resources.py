"""Resources of a run: device, limits of memory and disk, and directories."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

import torch

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.config.quant_config import IN_CONFIGURATION
from quark_fx.engine.activation_cache import CacheBudget
from quark_fx.engine.checkpoint import Checkpoint
from quark_fx.errors import ConfigError, ExportError
from quark_fx.system.options import checked, checked_names
from quark_fx.system.writable import require_possible


@checked
@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a run: device, limits of memory and disk, and directories.

    Args:
        device: Device that blocks run on; it holds their weights only while they run. Default: device of the model.
        cache: Limits on the memory of cached activations; activations beyond them go to disk. Default: `CacheBudget()`.
        memory: Limit on the process's memory, in bytes or as `"6GiB"`. Activations that do not fit go to disk. A run
            that is predicted to need more raises `ConfigError` before it begins. See `predict`.
        disk: Limit on the size of all files that a run with `output_dir` holds at once, in bytes or as `"6GiB"`.
        checkpoint: Directory for finished blocks of passes that learn from data. The same call with the same directory
            continues an interrupted run, with the same result.
        output_dir: Directory that the result is saved to (`QuantizedModel.save`). The run then needs less memory than
            the model's weights: the model runs block by block, and changed weights and finished blocks stay in files of
            this directory until the result is complete. See `open_checkpoint`.
        distributed: Whether all processes of a job make the same call and share the work. The process group is the
            current one, or is created from torchrun's environment; directories must be on a shared file system.

    Raises:
        ConfigError: For a limit that is not a positive number of bytes, or an empty path.

    >>> Resources(device="cpu", memory="2GiB").memory_bytes
    2147483648
    """

    device: str | torch.device | None = None
    cache: CacheBudget | None = None
    memory: int | str | None = None
    disk: int | str | None = None
    checkpoint: str | Path | None = None
    output_dir: str | Path | None = None
    distributed: bool = False

    def __post_init__(self) -> None:
        _ = self.memory_bytes, self.disk_bytes
        for name in ("checkpoint", "output_dir"):
            if (path := getattr(self, name)) is not None and not str(path):
                raise ConfigError(f"{name} must be the path of a directory, not {path!r}")

    @property
    def memory_bytes(self) -> int | None:
        """Limit on the process's memory in bytes, `None` for no limit."""
        return parse_bytes(self.memory, "memory")

    @property
    def disk_bytes(self) -> int | None:
        """Limit on the size of all files in bytes, `None` for no limit."""
        return parse_bytes(self.disk, "disk")

    def given(self, names: Collection[str]) -> list[str]:
        """Return the fields in `names` that are set."""
        return [name for name in names if getattr(self, name) not in (None, False)]


OF_SESSION: Final = ("device", "cache")
"""Fields of `Resources` that belong to captured models and their data; the others belong to one run of `quantize`."""


def require_usable(resources: Resources, owner: str = "quantize", names: Collection[str] = ()) -> None:
    """Raise `ConfigError` for resources that cannot be used; create the directory of the cache.

    Args:
        resources: Value that the user gave.
        owner: Name of the call, for the message.
        names: Fields that the call accepts. Default: all fields.
    """
    if not isinstance(resources, Resources):
        raise ConfigError(f"resources must be a Resources, not {resources!r}; write Resources(device=..., memory=...)")
    if names and (extras := resources.given([field.name for field in fields(Resources) if field.name not in names])):
        raise ConfigError(
            f"{owner} takes {', '.join(names)} of Resources, not {', '.join(extras)}; pass these to quantize"
        )
    if resources.cache is not None and resources.cache.directory is not None:
        try:
            Path(resources.cache.directory).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=resources.cache.directory).close()
        except OSError as error:
            raise ConfigError(
                f"the directory {resources.cache.directory} of the CacheBudget cannot be used: {error}; choose another "
                "one"
            ) from error
    usable_device(resources)
    for name in ("output_dir", "checkpoint"):
        if (path := getattr(resources, name)) is not None:
            try:
                require_possible(Path(path))
            except ExportError as error:
                raise ConfigError(f"{name} {error}") from error
    if resources.checkpoint is not None and not Checkpoint.is_begun(resources.checkpoint):
        files = (name for name in ("config.json", GRAPH_FILE) if Path(resources.checkpoint, name).exists())
        if file := next(files, None):
            raise ConfigError(
                f"checkpoint directory {resources.checkpoint} holds a model ({file}); choose another directory for "
                "finished blocks"
            )


def usable_device(resources: Resources) -> torch.device | None:
    """Return the device of this process, with its index; `None` for the device of the model.

    In a distributed run `"cuda"` is the GPU whose number is `LOCAL_RANK`, if the process sees that many: NCCL refuses
    two processes on one GPU.

    Raises:
        ConfigError: If the device cannot be used, or `LOCAL_RANK` is not a number.
    """
    device = resources.device
    if device is None:
        return None
    try:
        if resources.distributed and torch.device(device) == torch.device("cuda"):
            device = _gpu_of_rank()
        return torch.empty(0, device=device, dtype=torch.float32).device
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"device={str(device)!r} cannot be used: {reason}; choose another one, or None") from error


def _gpu_of_rank() -> torch.device:
    rank = os.environ.get("LOCAL_RANK")
    if rank is None:
        return torch.device("cuda")
    if not re.fullmatch("[0-9]+", rank):
        raise ConfigError(
            f"the environment variable LOCAL_RANK must be the number of the process on its machine, not {rank!r}; "
            'start the script with torchrun, or pass device="cuda:0" with the number of the GPU'
        )
    return torch.device(f"cuda:{int(rank)}" if int(rank) < torch.cuda.device_count() else "cuda")


_UNITS = {
    f"{letter}{binary}B": (1024 if binary else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary in ("", "i")
} | {"": 1}


def parse_bytes(limit: int | str | None, name: str) -> int | None:
    """Return the number of bytes of a limit: a positive integer, text with a unit, or `None`.

    Raises:
        ConfigError: For any other value.
    """
    if limit is None or (isinstance(limit, int) and not isinstance(limit, bool) and limit > 0):
        return limit
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]i?B)?)\s*", limit) if isinstance(limit, str) else None
    if match is None:
        raise ConfigError(
            f'{name} must be a number of bytes, or text like "6GiB" or "800 MB" in {", ".join(filter(None, _UNITS))}, '
            f"not {limit!r}"
        )
    if not (size := int(float(match[1]) * _UNITS[match[2]])):
        raise ConfigError(f"{name} must be at least one byte, not {limit!r}")
    return size


IN_RESOURCES: Final = {
    field.name: f"; {field.name} belongs in the resources: write resources=Resources({field.name}=...)"
    for field in fields(Resources)
} | {"streamed": "; to stream the run, write resources=Resources(output_dir=...)"}
"""Hints for arguments that are fields of `Resources`, by argument name."""


takes_run: Final = checked_names(IN_CONFIGURATION | IN_RESOURCES)
"""Decorator that rejects unknown arguments, with a hint for fields of the configuration or the resources."""


__all__ = [
    "IN_RESOURCES",
    "OF_SESSION",
    "Resources",
    "parse_bytes",
    "require_usable",
    "takes_run",
    "usable_device",
]
