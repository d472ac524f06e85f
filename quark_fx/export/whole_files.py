"""Replace an ONNX file and its data file so that, at every moment, the graph on disk reads its own data."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx_ir as ir

from quark_fx.errors import ExportError


def require_regular(*places: Path) -> None:
    """Raise `ExportError` if a path exists and is not a regular file: a rename would replace a device by a file."""
    for place in places:
        if place.exists() and not place.is_file():
            raise ExportError(f"{place} is a directory, a device or a pipe, not a file to replace; choose another path")


def put_in_place(written: Path, target: Path) -> None:
    """Move an ONNX file to `target`, and its `<name>.data`, if that exists, to the folder of `target`.

    Each step is a rename. After an interruption, `target` is either the old graph with its data or the new graph with
    its data. A file that no graph reads may remain; the next call removes it.

    Args:
        written: File to move, in a folder of the same file system, with the name of `target`.
        target: Destination. It may exist and have data, which is removed if the new graph has none.

    Raises:
        ExportError: If a destination exists and is not a file, or the destination of the data is a file that does not
            belong to `target`.
    """
    data, place = (path.with_name(f"{target.name}.data") for path in (written, target))
    require_regular(target, *([place] if data.exists() else []))
    aside = f".{target.name}-"
    own = _is_own(place, target, aside)
    if not own and data.exists():
        raise ExportError(f"{place} does not belong to {target.name}, but would be replaced; move {place} away")
    outdated = own and place.exists() and not data.exists()
    if data.exists() or outdated:
        # After an interruption, a file of this name also marks the data in `place` as data of `target`.
        handle, name = tempfile.mkstemp(prefix=aside, suffix=".data", dir=target.parent)
        os.close(handle)
    if data.exists():
        # The old graph may read `place`. Until the new data are in place, the new graph reads them under another name.
        data.replace(name)
        between = written.with_name("between.onnx")
        ir.save(_reading(written, data.name, Path(name).name), between)
        between.replace(target)
        _duplicate(Path(name), data)
        data.replace(place)
    written.replace(target)
    if outdated:
        place.unlink()
    for unread in _asides(target, aside):
        unread.unlink()


def _is_own(place: Path, target: Path, aside: str) -> bool:
    """Tell whether `place` is missing or empty, holds data of the graph `target`, or remained from an interruption."""
    if not place.exists() or not place.stat().st_size or _asides(target, aside):
        return True
    try:
        return place in data_files(ir.load(target), target.parent)
    except Exception:  # `target` is missing or not an ONNX file
        return False


def _asides(target: Path, aside: str) -> list[Path]:
    return list(target.parent.glob(f"{glob.escape(aside)}*.data"))


def data_files(model: ir.Model, folder: Path) -> set[Path]:
    """Return the data files of a graph in `folder`."""
    return {folder / tensor.location for tensor in external_tensors(model)}


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield every tensor that a model reads from data files, including tensors of subgraphs and functions."""
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
    for owner in (model.graph, *model.functions.values()):
        for node in owner.all_nodes():
            for attribute in node.attributes.values():
                found = attribute.value if isinstance(attribute.value, list | tuple) else [attribute.value]
                yield from (tensor for tensor in found if isinstance(tensor, ir.ExternalTensor))


def _reading(path: Path, old: str, new: str) -> ir.Model:
    """Return the graph in `path`, with its data file `old` replaced by `new`."""
    model = ir.load(path)
    for graph in (model.graph, *model.graph.subgraphs()):
        for value in graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor) and tensor.location == old:
                value.const_value = relocated(tensor, new, tensor, tensor.base_dir)
    return model


def relocated(
    tensor: ir.ExternalTensor,
    location: str | os.PathLike[str],
    place: ir.ExternalTensor,
    folder: str | os.PathLike[str],
) -> ir.ExternalTensor:
    """Return `tensor` with its data in the file `location` of `folder`, at the offset and length of `place`."""
    layout = {"shape": tensor.shape, "name": tensor.name or "", "base_dir": folder}
    return ir.ExternalTensor(location, place.offset, place.length, tensor.dtype, **layout)


def _duplicate(source: Path, link: Path) -> None:
    """Create `link` as a hard link to the file `source`, or as a copy if the file system does not support links."""
    try:
        link.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, link)


__all__ = ["data_files", "external_tensors", "put_in_place", "relocated", "require_regular"]
