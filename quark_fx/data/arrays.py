"""Batches from numpy and safetensors files."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from quark_fx.data.batches import spread
from quark_fx.errors import CalibrationError
from quark_fx.system.options import PositiveInt, checked_call
from quark_fx.system.untrusted import require_regular

ARRAY_SUFFIXES = (".npy", ".npz", ".safetensors")
"""File suffixes that `read_arrays` supports."""


@checked_call
def read_arrays(
    path: str | Path, *, count: PositiveInt | None = None, batch_size: PositiveInt = 8
) -> list[Tensor] | list[dict[str, Tensor]]:
    """Read the samples of a file, indexed by the first dimension of its arrays, in batches. Pickled data is refused.

    Args:
        path: File with suffix `.npy`, `.npz`, or `.safetensors`.
        count: Number of samples, spread evenly over all samples. Default: all.
        batch_size: Samples per batch.

    Returns:
        Tensors if the file holds one array; otherwise, dictionaries of tensors by array name, the keyword arguments of
        the model. float64, numpy's default, becomes float32.

    Raises:
        CalibrationError: If the file cannot be read, is empty, or holds Python objects, or if its arrays have different
            numbers of samples.
    """
    path = Path(path)
    tensors = {name: t.float() if t.dtype == torch.float64 else t for name, t in _read(path).items()}
    lengths = {name: len(tensor) if tensor.dim() else 0 for name, tensor in tensors.items()}
    if not tensors or not all(lengths.values()):
        empty = ", ".join(name for name, length in lengths.items() if not length)
        raise CalibrationError(
            f"{path} holds no samples{f' in {empty}' if empty else ''}; the first dimension of each array must be the "
            "number of samples"
        )
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise CalibrationError(
            f"the arrays of {path} differ in their number of samples ({shown}); store arrays of the same length"
        )
    chosen = torch.tensor(spread(range(next(iter(lengths.values()))), count), dtype=torch.int64)
    parts = [{name: tensor[part] for name, tensor in tensors.items()} for part in chosen.split(batch_size)]
    return [next(iter(part.values())) for part in parts] if len(tensors) == 1 else parts


def _read(path: Path) -> dict[str, Tensor]:
    try:
        require_regular(path)
        if path.suffix == ".safetensors":
            tensors: dict[str, Tensor] = load_file(path)
            return tensors
        content = np.load(path, allow_pickle=False)
        arrays = {"": content} if isinstance(content, np.ndarray) else dict(content)
        return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, SafetensorError) as error:
        raise CalibrationError(
            f"{path} cannot be read: {error}; save numbers with numpy.save, numpy.savez or safetensors"
        ) from error


__all__ = ["ARRAY_SUFFIXES", "read_arrays"]
