"""`Shelf`: tensors backed by files that are read when the tensors are used, for graphs larger than memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quark_fx.errors import CheckpointError

_SMALL = 1 << 16
"""Size in bytes below which a tensor stays in memory, because a file takes whole pages and a memory mapping."""


class Shelf:
    """Storage of tensors on disk: the system loads pages when they are read, and drops them when memory is short.

    Each file is deleted right after it is mapped, so that its space is free again as soon as the tensor is deleted or
    the process ends, even by a crash.

    Args:
        directory: Directory on a disk with space for the tensors; created if it does not exist.

    Raises:
        CheckpointError: If the directory cannot be created.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"{directory} cannot be created: {error}; choose another directory") from error

    def put(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor on the CPU, backed by a file unless the tensor is small.

        Writing to the result changes memory, not the file.

        Raises:
            CheckpointError: If the file cannot be written, for example because the disk is full.
        """
        tensor = tensor.detach().cpu().contiguous()
        if tensor.nbytes < _SMALL:
            return tensor.clone()
        try:
            with tempfile.NamedTemporaryFile(dir=self.directory, buffering=0) as file:
                rest = tensor.flatten().view(torch.uint8).numpy().data
                while rest:  # one call writes at most 2 GiB
                    rest = rest[file.write(rest) :]
                # Unlike Python's mmap, torch's does not keep the file open: a model may have more tensors than a
                # process may have open files.
                pages = torch.from_file(file.name, shared=False, size=tensor.nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot write {tensor.nbytes / 2**20:.1f} MiB to {self.directory}: {error}; free disk space there "
                "and run again"
            ) from error
        return pages.view(tensor.dtype).reshape(tensor.shape)


__all__ = ["Shelf"]
