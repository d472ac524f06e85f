"""Storage on disk of weights that several graphs of an export share."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from quark_fx.errors import ExportError
from quark_fx.system.untrusted import brief, read_json
from quark_fx.system.writable import new_folder, writing

if TYPE_CHECKING:
    import onnx_ir as ir

_MANIFEST_LIMIT = 1 << 24
"""Largest size of `export.json`, in bytes."""

Places = dict[bytes, "ir.ExternalTensor"]
"""Tensors on disk; keys are SHA-256 digests of their bytes."""


def share_weights(folder: str | os.PathLike[str]) -> int:
    """Store each tensor that several graphs of an export share only once, and return the number of bytes saved.

    The first graph keeps its data file. Each later graph reads the tensors that it shares with earlier graphs from
    their files, and has a file for its other tensors. `ExportedModel.from_pretrained` reads the folder as before. A
    graph and its data are replaced together or not at all.

    Args:
        folder: Folder that `ExportedModel.save_pretrained` wrote ONNX graphs to.

    Raises:
        ExportError: If the folder lacks ONNX graphs, a graph or its data is not a regular file, or a path is a link
            or points outside of the folder.
    """
    from quark_fx.export.whole_files import require_regular

    folder = Path(folder)
    try:
        manifest = read_json(folder / "export.json", _MANIFEST_LIMIT)
        paths = [folder / _plain_name(entry["file"]) for entry in manifest["components"].values()]
    except (OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ExportError(f"{folder} does not hold an export from transformers: {error}") from error
    if len(set(paths)) < len(paths):
        raise ExportError(f"{folder / 'export.json'} names a graph twice")
    if any(path.suffix != ".onnx" for path in paths):
        raise ExportError(f"the graphs in {folder} are not ONNX: {', '.join(path.name for path in paths)}")
    data = [path.with_name(f"{path.name}.data") for path in paths]
    require_regular(*paths, *data)
    for path in (*paths, *data):
        if path.is_symlink():
            raise ExportError(f"{path} is a link to another file; replace the link with a copy of that file")
    models = [_loaded(path, {file.name for file in data}) for path in paths]
    places: Places = {}
    saved = 0
    for path, model in zip(paths, models, strict=True):
        try:
            saved += _rewrite(path, model, places)
        except (ExportError, OSError):
            raise
        except Exception as error:  # onnx_ir raises various errors for graphs that it can read but not write
            raise ExportError(f"{path} cannot be written: {type(error).__name__}: {brief(str(error))}") from error
    return saved


def _plain_name(name: object) -> str:
    """Return `name`, checked to be the plain name of a file.

    Raises:
        ValueError: If it is not a string, or it is a path that may point outside of the folder.
    """
    if not isinstance(name, str) or not name or Path(name).name != name or "\\" in name or "\0" in name:
        raise ValueError(f"{brief(name)} is not the name of a file in this folder")
    return name


def _loaded(path: Path, data_files: set[str]) -> ir.Model:
    """Load a graph whose external tensors are all in the data files of the export.

    Raises:
        ExportError: If the file is not a graph, or a tensor is in another file or beyond the end of its file.
    """
    import onnx_ir as ir

    from quark_fx.export.whole_files import external_tensors

    try:
        model = ir.load(path)
        tensors = list(external_tensors(model))
        sizes = {name: (path.parent / name).stat().st_size for name in data_files if (path.parent / name).exists()}
    except Exception as error:  # protobuf and onnx_ir raise various errors for files that are not graphs
        raise ExportError(f"{path} is not an ONNX graph: {type(error).__name__}: {brief(str(error))}") from error
    for tensor in tensors:
        if str(tensor.location) not in sizes:
            raise ExportError(
                f"{path} reads its tensor {brief(tensor.name)} from {brief(str(tensor.location))}, which is not one of "
                "the data files of this export; export it again"
            )
        start, length = tensor.offset or 0, tensor.length
        end = start + (tensor.nbytes if length is None else length)
        if start < 0 or end < start or end > sizes[str(tensor.location)] or length not in (None, tensor.nbytes):
            raise ExportError(
                f"{path} reads its tensor {brief(tensor.name)} from beyond the end of {tensor.location}; export again"
            )
    return model


def _rewrite(path: Path, model: ir.Model, places: Places) -> int:
    """Make a graph read the tensors in `places` from their files; add its other tensors to `places`.

    Returns:
        Number of bytes saved.
    """
    import onnx_ir as ir

    from quark_fx.export.whole_files import relocated

    data = path.with_name(f"{path.name}.data")
    inner = [value.name for graph in model.graph.subgraphs() for value in graph.initializers.values()]
    if inner:
        raise ExportError(
            f"{path} holds tensors in subgraphs ({inner[0]}), which cannot be shared; keep this export as it is"
        )
    shared, values = 0, []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor):
            continue
        digest = hashlib.sha256(tensor.tobytes()).digest()
        tensor_there = places.get(digest)
        if tensor_there is None:
            values.append((digest, value))
        else:
            value.const_value = relocated(tensor, tensor_there.location, tensor_there, tensor_there.base_dir)
            shared += 1
    before = data.stat().st_size if data.exists() else 0
    if shared:
        _save(model, path, data, [value for _, value in values])
    for digest, value in values:
        assert isinstance(value.const_value, ir.ExternalTensor)
        places[digest] = value.const_value
    return before - (data.stat().st_size if data.exists() else 0)


def _save(model: ir.Model, path: Path, data: Path, values: list[ir.Value]) -> None:
    """Write a graph, and the tensors of `values` to `data`; readers need this file even if it is empty."""
    import onnx_ir as ir

    from quark_fx.export.whole_files import put_in_place, relocated

    tensors = [value.const_value for value in values if value.const_value is not None]
    with writing(path), new_folder(path.parent, f".{path.name}-") as staging:
        (staging / data.name).touch()
        written = ir.external_data.convert_tensors_to_external(tensors, staging, data.name)
        for value, tensor in zip(values, written, strict=True):
            assert isinstance(tensor, ir.ExternalTensor)
            value.const_value = relocated(tensor, data.name, tensor, path.parent)
        ir.save(model, staging / path.name)
        put_in_place(staging / path.name, path)


__all__ = ["share_weights"]
