"""Put a graph, and the file of its tensors, in the place of others: at no moment does a graph read another's data."""

from __future__ import annotations

import os
import shutil
import tempfile
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
        target: may exist, with data of its own.

    Raises:
        ExportError: if something else than a file is at either place.
    """
    data, place = (path.with_name(f"{target.name}.data") for path in (written, target))
    require_regular(target, *([place] if data.exists() else []))
    aside = f".{target.name}-*.data"
    if data.exists() and target.exists() and place.exists():
        # The old graph reads what lies where the new data belong: meanwhile the new graph reads them elsewhere.
        handle, name = tempfile.mkstemp(prefix=aside.split("*")[0], suffix=".data", dir=target.parent)
        os.close(handle)
        data.replace(name)
        between = written.with_name("between.onnx")
        ir.save(_reading(written, data.name, Path(name).name), between)
        between.replace(target)
        _duplicate(Path(name), data)
    if data.exists():
        data.replace(place)
    written.replace(target)
    for unread in target.parent.glob(aside):
        unread.unlink()


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


__all__ = ["put_in_place", "relocated", "require_regular"]
