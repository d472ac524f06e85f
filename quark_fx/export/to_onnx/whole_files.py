"""Put a graph, and the file of its tensors, in the place of others: at no moment does a graph read another's data."""

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
    """Raise `ExportError` if a place is taken by what is no file: a rename would put one where a device was."""
    for place in places:
        if place.exists() and not place.is_file():
            raise ExportError(
                f"{place} is a directory, a device or a pipe, and no file to replace; choose another path"
            )


def put_in_place(written: Path, target: Path) -> None:
    """Move an ONNX file, and `<its name>.data` beside it if there is one, to `target` and beside it.

    An interruption leaves the old graph with its data or the new one with its own, and perhaps a file that no graph
    reads, which the next call removes. Each step is a rename.

    Args:
        written: in a folder of the same file system, under the name of `target`.
        target: may exist, with data of its own, which go if the new graph has none.

    Raises:
        ExportError: if something else than a file is at either place, or a file that is no data of `target`'s lies
            where the new data belong.
    """
    data, place = (path.with_name(f"{target.name}.data") for path in (written, target))
    require_regular(target, *([place] if data.exists() else []))
    aside = f".{target.name}-"
    own = _is_own(place, target, aside)
    if not own and data.exists():
        raise ExportError(f"{place} is no data of {target.name}'s, and would be replaced; move it away")
    outdated = own and place.exists() and not data.exists()
    if data.exists() or outdated:
        # A file of this name also says, after an interruption, that what lies in `place` is ours.
        handle, name = tempfile.mkstemp(prefix=aside, suffix=".data", dir=target.parent)
        os.close(handle)
    if data.exists():
        # The old graph may read what lies where the new data belong: meanwhile the new graph reads them elsewhere.
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
    """Tell whether what lies in `place`, if anything, is data that the graph `target` reads, or left by a call."""
    if not place.exists() or not place.stat().st_size or _asides(target, aside):
        return True
    try:
        return place in data_files(ir.load(target), target.parent)
    except Exception:  # no graph, or none there
        return False


def _asides(target: Path, aside: str) -> list[Path]:
    return list(target.parent.glob(f"{glob.escape(aside)}*.data"))


def data_files(model: ir.Model, folder: Path) -> set[Path]:
    """Return the files from which a graph in `folder` reads its tensors."""
    return {folder / tensor.location for tensor in external_tensors(model)}


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield every tensor that a graph reads from other files: of its weights, inner graphs, functions and constants."""
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
    """Return the graph in `path`, reading from `new` what it reads from `old`."""
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
    """Return `tensor`, read from the file `location` in `folder`, from where `place` is in its own."""
    layout = {"shape": tensor.shape, "name": tensor.name or "", "base_dir": folder}
    return ir.ExternalTensor(location, place.offset, place.length, tensor.dtype, **layout)


def _duplicate(source: Path, link: Path) -> None:
    """Give a file a second name, or copy it where there are no links."""
    try:
        link.hardlink_to(source)
    except OSError:
        shutil.copyfile(source, link)


__all__ = ["data_files", "external_tensors", "put_in_place", "relocated", "require_regular"]
