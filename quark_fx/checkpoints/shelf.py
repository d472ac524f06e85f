"""`Shelf`: tensors in files that are read when they are used, for graphs larger than memory."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quark_fx.errors import CheckpointError

_SMALL = 1 << 16
"""Bytes below which a tensor stays in memory: a file takes whole pages and an entry of the kernel's tables."""


class Shelf:
    """Storage of tensors on disk: the system loads pages when they are read, and drops them if memory is short.

    The files are unlinked before use, so their space is free again once the tensor is deleted or the process ends, even
    by a crash.

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
        """Return a contiguous copy on the host, backed by a file unless it is small.

        Writing to the result changes memory, not the file.

        Raises:
            CheckpointError: If the disk is full.
        """
        tensor = tensor.detach().cpu().contiguous()
        if tensor.nbytes < _SMALL:
            return tensor.clone()
        try:
            with tempfile.NamedTemporaryFile(dir=self.directory, buffering=0) as file:
                rest = tensor.flatten().view(torch.uint8).numpy().data
                while rest:  # one call writes at most 2 GiB
                    rest = rest[file.write(rest) :]
                # Unlike Python's mmap, torch's keeps no file open: a model has more tensors than a process has handles.
                pages = torch.from_file(file.name, shared=False, size=tensor.nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(
                f"cannot write {tensor.nbytes / 2**20:.1f} MiB to {self.directory}: {error}; make room and run again"
            ) from error
        return pages.view(tensor.dtype).reshape(tensor.shape)


__all__ = ["Shelf"]
