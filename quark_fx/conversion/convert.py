"""`convert`, which quantizes a checkpoint tensor by tensor, in several processes, and can continue after an abort."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch import Tensor
from tqdm.auto import tqdm

from quark_fx.checkpoints.configuration import without_codes
from quark_fx.checkpoints.decoded import DecodedFiles
from quark_fx.checkpoints.files import CheckpointFiles, MappedFiles, Shapes, header_of, stored_bytes
from quark_fx.config.quant_config import QuantConfig
from quark_fx.conversion.plan import (
    Conversion,
    PlannedTensor,
    layer_of,
    plan,
    require_data_free,
    rounded,
    unstacked,
)
from quark_fx.errors import CheckpointError, ConfigError, ExportError
from quark_fx.export.checkpoints.compressed_tensors import compressed, decompress_to_bfloat16
from quark_fx.quantization import resolve
from quark_fx.system.isolation import isolated
from quark_fx.system.memory import bytes_text
from quark_fx.system.options import PositiveInt, checked_call
from quark_fx.system.untrusted import read_json, require_regular
from quark_fx.system.writable import lock, require_possible, sync_directory, sync_tree, writing

T = TypeVar("T")

_LIMIT = 1 << 24
"""Largest size of `config.json`, in bytes."""

_SHARD = 5 * 10**9
"""Largest size of the tensors in a file of the result, in bytes, unless one tensor is larger."""

_UNIT = 1 << 26
"""Largest size, in bytes, of the tensors of the source in a unit of work, unless a group of fused layers is larger."""

_METADATA = {"format": "pt"}
"""Metadata that transformers requires in each safetensors file."""

_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"

_OTHER_FORMS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".onnx_data", ".tflite"})
"""Suffixes of files that hold the same weights in another format; they are not copied."""

_OTHER_WEIGHTS = re.compile(
    r"(consolidated.*|model(-\d+-of-\d+)?)[.]safetensors|.*[.]index[.]json|(hf_quant|quant|quantize)_config[.]json"
)
"""Pattern of the paths of other files that are not copied: weights in the layout of another library, safetensors files
and indices that the checkpoint does not use, and descriptions of the source's quantization."""


@checked_call
@isolated
def convert(
    source: str | Path,
    scheme: str | QuantConfig | Mapping[str, Any],
    output: str | Path,
    *,
    ignore: Sequence[str] = (),
    processes: PositiveInt = 1,
    dry_run: bool = False,
    progress: bool = True,
) -> Conversion:
    """Quantize a Hugging Face checkpoint to compressed-tensors, without building the model or running code of it.

    Float matrices whose names end in `.weight` are quantized. Heads, embeddings, routers, and draft (MTP) layers stay
    in float, as in other checkpoints for servers. Layers that servers fuse get the same scheme and global scale. All
    other tensors and files are copied. Sources in FP8 blocks, compressed-tensors, GPTQ, AWQ, MXFP4, or ModelOpt's
    layout are decoded tensor by tensor.

    An interrupted call leaves a directory with the name of `output` and the suffix `.unfinished`. The same call then
    continues, and writes the same bytes as a call without an interruption.

    Args:
        source: Directory with safetensors files and `config.json`, of any architecture.
        scheme: Name of a preset that needs no data, such as `"fp8_block"` or `"w4a16"`, a `QuantConfig`, or its dict.
        output: Directory to create.
        ignore: Patterns of additional layers that stay in float: globs on names (`"*router*"`), or `"re:"` and a
            regular expression.
        processes: Number of processes. With several, a script needs `if __name__ == "__main__":` around the call.
        dry_run: Whether to return the plan without writing anything.
        progress: Whether to show a progress bar.

    Returns:
        Plan of the conversion, which describes the tensors of the result.

    Raises:
        ConfigError: If the scheme needs data or a model, or nothing is left to quantize.
        CheckpointError: If the source is damaged, or holds codes that quark_fx does not decode.
        ExportError: If compressed-tensors does not support a layer, or matrices are stored as (inputs, outputs) (all
            such layers are listed), or the output cannot be written.
    """
    if isinstance(ignore, str) or not all(isinstance(pattern, str) for pattern in ignore):
        raise ConfigError(f"ignore must be a list of patterns, such as ignore=['*router*'], not {ignore!r}")
    config, source, output = resolve(scheme), Path(source), Path(output)
    require_data_free(config, repr(scheme) if isinstance(scheme, str) else "of this configuration")
    require_possible(output)
    files = CheckpointFiles.of(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is one file of a checkpoint; pass its directory, {files.directory}")
    description = _configuration(files.directory)
    decoded = unstacked(DecodedFiles.of(files, description), description, config, ignore)
    other_files, left_out = _other_files(files)
    conversion = plan(decoded, description, config, tuple(ignore), output, left_out)
    _require_place(files.directory, output)
    if not dry_run:
        _run(_Job.of(conversion, decoded), description, other_files, processes, progress)
    return conversion


def _configuration(directory: Path) -> dict[str, Any]:
    file = directory / "config.json"
    try:
        description = read_json(file, _LIMIT)
        if not isinstance(description, dict):
            raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}; pass the directory of a Hugging Face checkpoint, or fetch the file again"
        ) from error
    return description


def _other_files(files: CheckpointFiles) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a checkpoint's directory to copy, and the paths of the files that are left out.

    Keys, like the paths, are relative to the directory. Neither contains the weights, their index, or `config.json`.
    """
    weights, paths, left_out = {file.name for file in files.files.values()}, dict[str, Path](), list[str]()
    for folder, folders, names in os.walk(files.directory):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            path = file.relative_to(files.directory).as_posix()
            if path in weights or path in (_INDEX, "config.json"):
                continue
            if file.suffix in _OTHER_FORMS or _OTHER_WEIGHTS.fullmatch(path) or not file.is_file():
                left_out.append(path)
            else:
                paths[path] = file
    return paths, left_out


def _require_place(source: Path, output: Path) -> None:
    """Raise `ExportError` unless the output is a new directory outside of the source."""
    one, other = source.resolve(), output.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise ExportError(f"output {output} and source {source} contain each other; choose another directory as output")
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ExportError(f"{output} exists already; remove it, or choose another directory")


def _batches(items: Iterable[T], size: Callable[[T], int], most: int) -> list[list[T]]:
    """Divide items into lists of consecutive items that have at most `most` bytes each; a larger item is alone.

    Args:
        items: Items in order.
        size: Function that returns the size of an item, in bytes.
        most: Largest size of a list, in bytes.
    """
    batches, filled = list[list[T]](), most
    for item in items:
        if filled + size(item) > most or not batches:
            batches.append([])
            filled = 0
        batches[-1].append(item)
        filled += size(item)
    return batches


@dataclass(frozen=True)
class _Job:
    """The work of a conversion, which can be sent to other processes.

    Attributes:
        conversion: Plan of the conversion.
        source: Tensors of the source.
        units: Lists of tensors that are finished together; fused layers are in the same list.
        shards: Dtypes and shapes of the tensors of each file, in the order of the file; keys are names of files.
    """

    conversion: Conversion
    source: DecodedFiles
    units: list[list[PlannedTensor]]
    shards: Mapping[str, Shapes]

    @classmethod
    def of(cls, conversion: Conversion, source: DecodedFiles) -> _Job:
        tensors = {tensor.name: tensor for tensor in conversion.tensors}
        groups = {frozenset((t.name, *t.shared)): [t, *(tensors[name] for name in t.shared)] for t in tensors.values()}
        units = _batches(groups.values(), lambda group: sum(t.bytes_before for t in group), _UNIT)
        shards = _batches(tensors.values(), lambda tensor: tensor.bytes_after, _SHARD)
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
        outputs = [{name: header for tensor in shard for name, header in tensor.outputs.items()} for shard in shards]
        # Bytes of large elements come first, so that every tensor is aligned.
        ordered = [dict(sorted(o.items(), key=lambda item: (-stored_bytes(item[1][0], ()), item[0]))) for o in outputs]
        files = dict(zip(names if len(shards) > 1 else [_WHOLE], ordered, strict=True))
        return cls(conversion, source, [[tensor for group in unit for tensor in group] for unit in units], files)

    @property
    def unfinished(self) -> Path:
        """The folder of an unfinished conversion."""
        output = self.conversion.output
        return output.with_name(f"{output.name}.unfinished")

    @property
    def result(self) -> Path:
        """The folder in `unfinished` that becomes the output."""
        return self.unfinished / "result"

    @property
    def identity(self) -> str:
        """A digest of the plan and of the source files' sizes and times: another conversion has another digest."""
        files = sorted(set(self.source.files.files.values()))
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        counts = [len(unit) for unit in self.units], {file: len(tensors) for file, tensors in self.shards.items()}
        parts = (self.conversion.tensors, self.conversion.configuration, stats, counts)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def places(self) -> dict[str, tuple[str, int, tuple[int, ...]]]:
        """Return the name of the file, the offset in bytes, and the shape of each tensor of the result."""
        places = {}
        for file, tensors in self.shards.items():
            position = len(header_of(tensors, _METADATA))
            for name, header in tensors.items():
                places[name] = (file, position, tuple(header[1]))
                position += stored_bytes(*header)
        return places


def _run(job: _Job, description: dict[str, Any], others: Mapping[str, Path], processes: int, progress: bool) -> None:
    with writing(job.conversion.output), _taken(job) as done:
        for file, tensors in job.shards.items():
            header = header_of(tensors, _METADATA)
            with (job.result / file).open("r+b" if (job.result / file).exists() else "wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + sum(stored_bytes(*t) for t in tensors.values()))
        rest = [index for index in range(len(job.units)) if index not in done]
        if processes == 1 or len(rest) < 2:
            _fill(job, rest, progress)
        else:
            _fill_in_processes(job, rest, processes, progress)
        _write_others(job, description, others)
        sync_tree(job.result)
        if job.conversion.output.exists():
            job.conversion.output.rmdir()
        job.result.replace(job.conversion.output)
        sync_directory(job.conversion.output.parent)
    shutil.rmtree(job.unfinished, ignore_errors=True)


_DONE, _IDENTITY, _LOCK, _STOP = "done", "identity", "lock", "stop"


@contextmanager
def _taken(job: _Job) -> Iterator[set[int]]:
    """Create the unfinished folder, or continue with an existing one, and yield the indices of finished units.

    Raises:
        ExportError: If the folder belongs to another conversion, another process writes to it, or the disk does not
            have enough space.
    """
    folder, output = job.unfinished, job.conversion.output
    identity = folder / _IDENTITY
    if folder.exists() and not identity.is_file() and any(path.name != _LOCK for path in folder.iterdir()):
        raise ExportError(f"{folder} is in the way of {output}; move it, or choose another output")
    needed = sum(t.bytes_after for t in job.conversion.tensors)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / _LOCK).open("a+b") as file:
        if not lock(file.fileno(), wait=False) and os.name == "posix":
            raise ExportError(f"another process is converting to {output}; wait until it has ended")
        if identity.is_file() and identity.read_text(errors="replace") != job.identity:
            raise ExportError(
                f"{folder} holds an unfinished conversion of another source or scheme; repeat that call to finish it, "
                "or remove the folder"
            )
        if not identity.is_file() and (free := shutil.disk_usage(folder).free) < needed:
            shutil.rmtree(folder)
            raise ExportError(
                f"{output} needs {bytes_text(needed)}, but {bytes_text(free)} are free; free disk space there"
            )
        job.result.mkdir(exist_ok=True)
        identity.write_text(job.identity)
        log = folder / _DONE
        log.touch()
        (folder / _STOP).unlink(missing_ok=True)
        try:
            *lines, _ = log.read_text().split("\n")  # the last line is empty or incomplete
            yield set(map(int, lines))
        except BaseException:
            if not log.stat().st_size:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _fill_in_processes(job: _Job, units: Sequence[int], processes: int, progress: bool) -> None:
    """Divide the units among processes, and wait until all are finished.

    Raises:
        CheckpointError: If a process ends early; finished units are kept.
    """
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    count = min(processes, len(units))
    with ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_parent) as pool:
        futures = [pool.submit(_fill, job, units[i::count], progress and i == 0, count) for i in range(count)]
        try:
            for future in futures:
                future.result()
        except BrokenProcessPool as error:
            raise CheckpointError(
                "a conversion process ended early, perhaps for lack of memory; repeat the call with fewer processes: "
                "the conversion continues where it stopped"
            ) from error
        finally:
            (job.unfinished / _STOP).touch()  # tells processes not to begin another unit


def _end_with_parent() -> None:
    """End this process as soon as its parent process ends, because its results are not needed then."""

    def wait() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_MAPPED = 1 << 21
"""Number of bytes to read from open files before they are closed and opened again.

Pages of a mapping that have been read count as memory of the process until the mapping is closed.
"""


class _Reader:
    """A reader of a source's tensors that reopens the files after every `_MAPPED` bytes."""

    def __init__(self, source: DecodedFiles) -> None:
        self.tensors = source.tensors
        self._source, self._files, self._bytes = source, MappedFiles(), 0

    def read(self, name: str) -> Tensor:
        """Return the values of a tensor."""
        return self._source.read(name, self._opened(name))

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Yield the values of a tensor piece by piece."""
        return self._source.pieces(name, self._opened(name))

    def _opened(self, name: str) -> MappedFiles:
        if self._bytes >= _MAPPED:
            self._files, self._bytes = MappedFiles(), 0
        self._bytes += self.tensors[name].bytes
        return self._files


def _fill(job: _Job, units: Sequence[int], progress: bool, processes: int = 0) -> None:
    """Write the tensors of some units into the files of the result.

    Args:
        job: Work of the conversion.
        units: Indices of the units.
        progress: Whether to show a progress bar.
        processes: Number of processes that share the CPU; 0 in the caller's own process.
    """
    if processes:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    places, source, opened = job.places(), _Reader(job.source), dict[str, BinaryIO]()
    with ExitStack() as stack, torch.no_grad():
        log = stack.enter_context((job.unfinished / _DONE).open("ab", buffering=0))
        for index in tqdm(units, disable=not progress, desc="convert"):
            if (job.unfinished / _STOP).exists():
                break
            sizes: dict[tuple[str, ...], Tensor] = {}
            for tensor in job.units[index]:
                for name, pieces in _converted(source, tensor, sizes):
                    file, position, shape = places[name]
                    if file not in opened:
                        opened[file] = stack.enter_context((job.result / file).open("r+b"))
                    opened[file].seek(position)
                    count = 0
                    for piece in pieces:
                        opened[file].write(piece.contiguous().flatten().view(torch.uint8).numpy().data)
                        count += piece.numel()
                    assert count == math.prod(shape)
            for stream in opened.values():
                stream.flush()
                os.fsync(stream.fileno())
            log.write(f"{index}\n".encode())


def _converted(
    source: _Reader, tensor: PlannedTensor, sizes: dict[tuple[str, ...], Tensor]
) -> Iterator[tuple[str, Iterable[Tensor]]]:
    """Yield the name and the pieces of each tensor of the result that comes from a tensor of the source.

    Args:
        source: Reader of the source.
        tensor: Plan of the tensor.
        sizes: Largest magnitude, shape (), of each group of layers with the same global scale; keys are names of all
            tensors of a group. The function adds entries.
    """
    if tensor.weight is None or tensor.scheme is None:
        yield tensor.name, source.pieces(tensor.name)
        return
    values = source.read(tensor.name)
    try:
        amax = unit = None
        if tensor.weight.scale.has_unit:
            group = tuple(sorted((tensor.name, *tensor.shared)))
            if group not in sizes:
                ends = [torch.stack(source.read(name).aminmax()).abs().amax().float() for name in group]
                sizes[group] = torch.stack(ends).amax()
            amax = sizes[group]
            unit = getattr(tensor.weight.scale.of_tensor(amax, tensor.weight.scheme), "unit", None)
        name = tensor.name.removesuffix(".weight")
        layer = layer_of(name, rounded(values, tensor.weight, amax), tensor.read, unit)
        parts = compressed(layer, tensor.scheme)
    except (ValueError, ExportError) as error:
        raise CheckpointError(
            f"{tensor.name} cannot be quantized: {error}; fetch the checkpoint again, or add {tensor.name!r} to ignore"
        ) from error
    yield from ((f"{name}.{leaf}", [part]) for leaf, part in parts.items())


def _write_others(job: _Job, description: dict[str, Any], others: Mapping[str, Path]) -> None:
    """Write the index, the configuration, and copies of the files `others`, which are keyed by their relative paths."""
    for path, file in others.items():
        require_regular(file)
        (job.result / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, job.result / path)
    if len(job.shards) > 1:
        total = sum(t.bytes_after for t in job.conversion.tensors)
        weights = {name: file for name, (file, _, _) in job.places().items()}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
        (job.result / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (job.result / "config.json").write_text(json.dumps(_described(description, job), indent=2) + "\n", encoding="utf-8")


def _described(description: dict[str, Any], job: _Job) -> dict[str, Any]:
    """Return the content of the result's `config.json`."""
    description = without_codes(description)
    if decompress_to_bfloat16(job.conversion.configuration):
        description["dtype" if "dtype" in description else "torch_dtype"] = "bfloat16"
    return {**description, "quantization_config": job.conversion.configuration}


__all__ = ["convert"]
