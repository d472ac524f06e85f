"""A directory with a stored model: a graph, and tensors in a file named after its digest.

One rename replaces a model, so the directory always holds the old model or the new one: the new tensors are stored next
to the old ones until `graph.json`, which contains the SHA-256 of its tensor file, is replaced. Several processes may
save at once; the last rename wins.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quark_fx.checkpoints.files import GRAPH_FILE, TORCH_DTYPES, header_of
from quark_fx.errors import QuarkError
from quark_fx.system.untrusted import brief, parse_json, read_bytes, require_regular
from quark_fx.system.writable import abandoned, locked, new_file, sync_directory

FORMAT_VERSION = 4
GRAPH_LIMIT = 1 << 27
"""Size limit of a graph in bytes, for reading and writing."""
_TENSORS = re.compile(r"tensors-[0-9a-f]{32}\.safetensors")
_SAVING = ".saving-"
_UNFINISHED = re.compile(re.escape(_SAVING) + r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_OLD_TENSORS = "model.safetensors"
"""Tensor file of format versions 1 and 2."""
_PIECE = 1 << 24


def is_model_file(name: str) -> bool:
    """Tell whether `save` writes a file with this name, finished or unfinished."""
    return name == GRAPH_FILE or bool(_TENSORS.fullmatch(name) or _UNFINISHED.fullmatch(name))


def tensor_file(directory: Path) -> Path:
    """Return the tensor file of the model in a directory; raises the errors of `read_model`."""
    return read_model(directory)[1]


def write_model(directory: Path, tensors: Mapping[str, Tensor], model: dict[str, Any]) -> None:
    """Write a model to a directory, replacing an earlier one; equal arguments produce equal bytes.

    Args:
        directory: Directory; created if it does not exist.
        tensors: Tensors, keyed by their names; written one at a time.
        model: Graph as plain data, to which the digest of the tensor file is added.

    Raises:
        OSError: If there is not enough space, or another file is in the way.
        QuarkError: If the graph is too large, or the file format does not support the dtype of a tensor.
    """
    directory.mkdir(parents=True, exist_ok=True)
    place = directory / GRAPH_FILE
    with new_file(place, _SAVING) as (tensors_file, tensors_path), new_file(place, _SAVING) as (graph_file, graph_path):
        digest = _write_tensors(tensors_file, tensors)
        text = document_text({**model, "tensor_file": digest})
        if len(text) > GRAPH_LIMIT:
            raise QuarkError(
                f"the graph takes {len(text) / 2**20:.0f} MiB, more than quark_fx.load can read, so the model cannot "
                "be saved"
            )
        graph_file.write(text.encode("ascii"))
        for file in (tensors_file, graph_file):
            file.flush()
            os.fsync(file.fileno())
        with locked(directory):
            for file in (tensors_file, graph_file):
                file.close()  # closing releases the lock, and Windows renames only closed files
            stale = _stale_names(directory) - {_tensor_name(digest)}
            tensors_path.replace(directory / _tensor_name(digest))
            sync_directory(directory)
            graph_path.replace(directory / GRAPH_FILE)
            sync_directory(directory)
            for name in stale:
                with suppress(OSError):
                    (directory / name).unlink()


def document_text(model: Mapping[str, Any]) -> str:
    """Return the content of a model's `graph.json`: ASCII, equal for equal data."""
    document = {"version": FORMAT_VERSION, "sha256": _digest(model), "model": model}
    return json.dumps(document, indent=1, allow_nan=False)


def _digest(model: Any) -> str:
    text = json.dumps(model, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _tensor_name(digest: str) -> str:
    return f"tensors-{digest[:32]}.safetensors"


def read_model(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the data of the model in a directory, and its tensor file, after a check of both digests.

    Raises:
        OSError: If a file cannot be read, or is a pipe or a device.
        ValueError: If `graph.json` is not JSON, too large, or nested too deep.
        QuarkError: If the format version is not supported, or a digest does not match the data.
    """
    content = b""
    for _ in range(100):  # retries if another process replaces the model meanwhile
        before, content = content, read_bytes(directory / GRAPH_FILE, GRAPH_LIMIT)
        model = _checked(parse_json(content), directory)
        path = directory / _tensor_name(model["tensor_file"])
        try:
            require_regular(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            if before == content:
                raise
            continue
        if digest != model["tensor_file"]:
            raise QuarkError(
                f"{path} is damaged: its SHA-256 differs from the one in {GRAPH_FILE}; copy the model again"
            )
        return model, path
    raise OSError(f"another process keeps replacing {directory}; wait until it is done")


def _checked(document: Any, directory: Path) -> dict[str, Any]:
    if not isinstance(document, dict) or "version" not in document:
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: it contains no graph")
    version = document["version"]
    if type(version) is not int or version != FORMAT_VERSION:
        remedy = (
            "update quark_fx"
            if isinstance(version, int) and version > FORMAT_VERSION
            else "save the model again, if necessary with the quark_fx version that wrote it"
        )
        raise QuarkError(
            f"{directory} has format version {brief(version)}, but this quark_fx reads version {FORMAT_VERSION}; "
            f"{remedy}"
        )
    model = document.get("model")
    if not isinstance(model, dict) or document.get("sha256") != _digest(model):
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: its SHA-256 does not match its data")
    if not isinstance(model.get("tensor_file"), str) or not _DIGEST.fullmatch(model["tensor_file"]):
        raise QuarkError(f"{directory / GRAPH_FILE} is damaged: it does not name the file of the tensors")
    return model


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor]) -> str:
    """Write a safetensors file, one tensor at a time, and return its SHA-256."""
    if rare := next((t.dtype for t in tensors.values() if t.dtype not in TORCH_DTYPES), None):
        raise QuarkError(f"a tensor of type {rare} cannot be stored")
    # Dtypes with larger elements come first, so that all tensors are aligned.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    digest = hashlib.sha256()

    def write(content: Any) -> None:
        digest.update(content)
        file.write(content)

    write(header_of({name: (TORCH_DTYPES[tensors[name].dtype], tensors[name].shape) for name in order}, {}))
    for name in order:
        values = tensors[name].detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        for piece in values.split(_PIECE):  # from a device or a mapped file, without a copy of the whole tensor
            write(piece.cpu().numpy().data)
    return digest.hexdigest()


def _stale_names(directory: Path) -> set[str]:
    """Return the tensor files of earlier models, and files of killed processes; the directory is locked."""
    names = {path.name for path in directory.iterdir()}
    stale = {name for name in names if _TENSORS.fullmatch(name)}
    stale |= abandoned(directory, _SAVING)
    if _OLD_TENSORS in names and GRAPH_FILE in names:
        with suppress(OSError, ValueError):
            document = parse_json(read_bytes(directory / GRAPH_FILE, GRAPH_LIMIT))
            if isinstance(document, dict) and document.get("version") in (1, 2):
                stale.add(_OLD_TENSORS)
    return stale


__all__ = [
    *("FORMAT_VERSION", "document_text", "is_model_file", "read_model", "tensor_file", "write_model"),
]
