"""Safetensors files from untrusted sources, read without unpickling and without leaving the directory."""

from __future__ import annotations

import json
import math
import os
import pickle
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quark_fx.errors import CheckpointError
from quark_fx.system.untrusted import brief, read_json, require_regular

_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt"})
_DANGER = "pickled weights, which may run code when they are read"
_STORE = "store the model with save_pretrained, or safetensors.torch.save_model"
_OTHERS = {
    ".onnx": "an ONNX graph; pass the nn.Module that it was exported from",
    ".tflite": "a LiteRT graph; pass the nn.Module that it was exported from",
    ".pt2": "an exported program; pass torch.export.load(path)",
    ".gguf": "a GGUF file; pass it to quantize, or to open_checkpoint without factory",
    ".py": "Python code; pass the nn.Module that it creates (on the command line: package.module:name)",
}
"""Messages about files that users often pass instead of a checkpoint, with the right argument; keys are suffixes."""
_INDEX_LIMIT = 1 << 27
"""Largest size of an index, in bytes."""
GRAPH_FILE = "graph.json"
"""Name of the file that `QuantizedModel.save` writes next to its tensors."""


def link_or_copy(source: Path, place: Path) -> None:
    """Create a link `place` to a file, or a copy where links are not allowed (Windows requires a privilege).

    Raises:
        OSError: If the disk is too full for a copy, or the folder cannot be written.
    """
    for link in (Path.symlink_to, Path.hardlink_to):
        try:
            link(place, source)
        except (OSError, NotImplementedError):
            continue
        return
    shutil.copyfile(source, place)


@dataclass(frozen=True)
class CheckpointFiles:
    """The tensors of a checkpoint and their files.

    Attributes:
        path: File or directory that the user passed.
        files: File of each tensor; keys are names of tensors.
    """

    path: Path
    files: dict[str, Path]

    @property
    def directory(self) -> Path:
        """The directory that contains the files, their index, and the configuration."""
        return self.path.parent if self.path.is_file() else self.path

    @classmethod
    def of(cls, path: str | Path) -> CheckpointFiles:
        """Read the index and the headers of a checkpoint, but not its weights.

        Args:
            path: Safetensors file, which is read without its neighbors, or directory with `model.safetensors`, with
                `model.safetensors.index.json` and the shards that it lists, or with any safetensors files.

        Raises:
            CheckpointError: If a file is missing, truncated, or damaged, the index points outside of the directory or
                contradicts the shards, all weights are pickled, or `QuantizedModel.save` wrote the directory.
        """
        path = Path(path)
        if not os.path.exists(path):  # Path.exists raises an error for names that are too long
            raise CheckpointError(f"{path} does not exist; pass a directory with safetensors files")
        if path.is_file():
            _require_tensors(path)
            return cls(path, dict.fromkeys(_names(path), path))
        if not path.is_dir():
            raise CheckpointError(f"{path} is neither file nor directory; pass a directory with safetensors files")
        if (path / GRAPH_FILE).exists():
            raise CheckpointError(
                f"{path} holds {GRAPH_FILE}, so quark_fx has quantized this model; read it with qfx.load, or pass the "
                "directory of its float checkpoint"
            )
        if (path / _INDEX).exists() and not (path / _WHOLE).exists():  # transformers has the same precedence
            return cls(path, _indexed(path))
        shards = [path / _WHOLE] if (path / _WHOLE).exists() else sorted(path.glob("*.safetensors"))
        if not shards:
            pickled = any(file.suffix in _PICKLES for file in path.iterdir())
            raise CheckpointError(f"{path} holds {f'only {_DANGER}' if pickled else 'no safetensors file'}; {_STORE}")
        files: dict[str, Path] = {}
        for file in shards:
            _add(files, _names(file), file)
        return cls(path, files)

    def lacking(self, missing: Sequence[str], total: int, model: str) -> CheckpointError:
        """Return an error that lists tensors of a model that the checkpoint lacks and suggests a remedy.

        Args:
            missing: Names of these tensors.
            total: Number of all tensors of the model.
            model: Name of the model's class.
        """
        if self.path.is_file():
            remedy = f"if the checkpoint has several files, pass their directory, {self.directory}"
        elif (self.path / _WHOLE).exists() and (self.path / _INDEX).exists():
            remedy = f"{_WHOLE} was read instead of {_INDEX}: remove the one that does not belong to this checkpoint"
        else:
            remedy = "fetch its files again, or pass a checkpoint of this model"
        return CheckpointError(
            f"{self.path} lacks {len(missing)} of the {total} tensors of {model}: {some_of(missing)}; {remedy}"
        )

    def link(self, folder: Path) -> None:
        """Fill a directory with links to these files, and with an index for transformers.

        Raises:
            OSError: If neither a link nor a copy can be created.
        """
        shards = list(dict.fromkeys(self.files.values()))
        # The links have new names, because transformers unpickles files whose suffix is not .safetensors.
        links = {file: f"model-{i:05}-of-{len(shards):05}.safetensors" for i, file in enumerate(shards, 1)}
        for file, link in links.items():
            link_or_copy(file.absolute(), folder / link)
        index = {"metadata": {}, "weight_map": {name: links[file] for name, file in self.files.items()}}
        (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")

    @cached_property
    def headers(self) -> dict[str, tuple[str, list[int]]]:
        """The safetensors name of the dtype and the shape of each tensor; keys are names of tensors."""
        headers: dict[str, tuple[str, list[int]]] = {}
        for file in dict.fromkeys(self.files.values()):
            with safe_open(file, "pt") as stored:
                slices = ((name, stored.get_slice(name)) for name in stored.keys())  # noqa: SIM118 (not a mapping)
                headers |= {name: (part.get_dtype(), part.get_shape()) for name, part in slices if name in self.files}
        return headers

    def dtypes(self, names: Collection[str]) -> dict[str, str]:
        """Return the safetensors names of the dtypes of the tensors `names`."""
        return {name: self.headers[name][0] for name in names}

    def tensor(self, name: str) -> Tensor:
        """Return a memory-mapped tensor, whose values are read when they are used."""
        return self._reader.tensor(self.files[name], name)

    @cached_property
    def _reader(self) -> MappedFiles:
        return MappedFiles()


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Torch dtypes; keys are their names in safetensors."""
TORCH_DTYPES = {dtype: name for name, dtype in DTYPES.items()}
"""Safetensors names of dtypes; keys are torch dtypes."""
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6} | {name: 8 * dtype.itemsize for name, dtype in DTYPES.items()}

Shapes = Mapping[str, tuple[str, Sequence[int]]]
"""Safetensors name of the dtype, and the shape, of each tensor; keys are names of tensors."""


def stored_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the size in bytes of a tensor, from the safetensors name of its dtype and its shape."""
    return math.prod(shape) * _BITS.get(dtype, 8) // 8


def header_of(tensors: Shapes, metadata: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file, in which the tensors follow in order, without gaps.

    The header has a multiple of 8 bytes.

    Args:
        tensors: Dtype and shape of each tensor, in the order of the file.
        metadata: Entries of `__metadata__`.
    """
    entries, start = dict[str, Any](), 0
    for name, (dtype, shape) in tensors.items():
        end = start + stored_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
        start = end
    content = {"__metadata__": dict(metadata), **entries} if metadata else entries
    text = json.dumps(content, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def is_float(dtype: torch.dtype) -> bool:
    """Tell whether a dtype is a float of at least 16 bits; smaller floats are codes, which need a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


class MappedFiles:
    """Safetensors files that are opened and mapped once each; the values of tensors are read when they are used.

    Tensors keep the mapping of their file alive. There is one mapping per file, not per tensor.
    """

    def __init__(self) -> None:
        self._open: dict[Path, Any] = {}

    def __reduce__(self) -> tuple[type[MappedFiles], tuple[()]]:
        """Leave out the mappings when copying or pickling; the copy opens the files again."""
        return MappedFiles, ()

    def tensor(self, file: Path, name: str) -> Tensor:
        """Return a tensor of a file.

        Raises:
            CheckpointError: If the file cannot be read, or lacks the tensor.
        """
        try:
            if file not in self._open:
                require_regular(file)
                self._open[file] = safe_open(file, "pt").__enter__()  # type: ignore[no-untyped-call]
            tensor: Tensor = self._open[file].get_tensor(name)
        except (OSError, SafetensorError, TypeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(f"{file} cannot be read: {brief(str(error))}") from error
        return tensor


def _require_tensors(file: Path) -> None:
    if file.suffix == ".json":
        raise CheckpointError(f"{file} holds no tensors; pass its directory, {file.parent}")
    if file.suffix in _PICKLES:
        raise CheckpointError(f"{file} holds {_DANGER}; {_STORE}")
    if other := _OTHERS.get(file.suffix.lower()):
        raise CheckpointError(f"{file} is {other}")


def _indexed(directory: Path) -> dict[str, Path]:
    try:
        table = read_json(directory / _INDEX, _INDEX_LIMIT)["weight_map"]
        named = {str(name): str(file) for name, file in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / _INDEX} is damaged: {type(error).__name__}: {error}; fetch the checkpoint again"
        ) from error
    files: dict[str, Path] = {}
    for shard in dict.fromkeys(named.values()):
        # A link may point outside of the directory, for example in the cache of the model hub; a name may not.
        plain = Path(shard).name == shard and not {"\\", "\0"} & set(shard) and len(shard) < 256
        if not plain or not shard.endswith(".safetensors"):
            raise CheckpointError(
                f"{directory / _INDEX} names the shard {brief(shard)}, which is not a safetensors file next to it"
            )
        names = _names(directory / shard)
        expected = {name for name, file in named.items() if file == shard}
        if missing := sorted(expected - names):
            raise CheckpointError(
                f"{directory / shard} lacks {some_of(missing)}, which the index lists for it; fetch the shard again"
            )
        _add(files, names, directory / shard)
    if unlisted := sorted(set(files) - set(named)):
        raise CheckpointError(f"{directory / _INDEX} does not list {some_of(unlisted)}, which the shards hold")
    return files


def _add(files: dict[str, Path], names: set[str], file: Path) -> None:
    if twice := sorted(names & set(files)):
        raise CheckpointError(f"{file} and {files[twice[0]]} both hold {some_of(twice)}; remove one of them")
    files.update(dict.fromkeys(names, file))


def _names(file: Path) -> set[str]:
    """Return the names of the tensors in a file; safetensors checks that the header fits the file's size."""
    if not file.exists():
        raise CheckpointError(f"{file} is missing; fetch it again")
    try:
        require_regular(file)
        with file.open("rb"):  # safetensors reports a file without read permission as missing
            pass
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}; change its permissions, or copy it") from error
    try:
        with safe_open(file, "pt") as stored:
            return set(stored.keys())
    except (OSError, SafetensorError, ValueError) as error:
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{file} is not a safetensors file ({error}); {_STORE}") from error
        raise CheckpointError(f"{file} is damaged or truncated: {error}; fetch it again") from error


def stored_names(directory: Path) -> set[str]:
    """Return the names of all tensors in a checkpoint that transformers has loaded, in safetensors or pickled files.

    Raises:
        CheckpointError: If the names cannot be read.
    """
    pickled = (directory / _PICKLED).exists() or (directory / _PICKLED_INDEX).exists()
    if not pickled or (directory / _WHOLE).exists() or (directory / _INDEX).exists():  # same precedence as transformers
        return set(CheckpointFiles.of(directory).files)
    try:
        if (directory / _PICKLED).exists():
            return set(torch.load(directory / _PICKLED, map_location="meta", weights_only=True, mmap=True))
        return set(read_json(directory / _PICKLED_INDEX, _INDEX_LIMIT)["weight_map"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{directory} cannot be read: {brief(str(error))}") from error


def some_of(names: Sequence[str]) -> str:
    """Return text for a message: the first three names, shortened, and the number of remaining names."""
    return ", ".join(name[:200] for name in names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


__all__ = [
    "DTYPES",
    "GRAPH_FILE",
    "TORCH_DTYPES",
    "CheckpointFiles",
    "MappedFiles",
    "Shapes",
    "header_of",
    "is_float",
    "link_or_copy",
    "some_of",
    "stored_bytes",
    "stored_names",
]
