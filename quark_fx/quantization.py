"""The one call: capture, rewrite, calibrate, convert."""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.capture.capture import Captured, capture_graph
from quark_fx.checkpoints.files import CheckpointFiles
from quark_fx.checkpoints.open_checkpoint import open_checkpoint
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.engine.activation_cache import ActivationCache, CacheBudget
from quark_fx.engine.calibration import planned
from quark_fx.engine.context import Checkpoint, Context, fingerprint, require_resources
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.engine.resources import Resources, expect, parse_bytes, require_room
from quark_fx.errors import CalibrationError, ConfigError, PassError, QuarkError
from quark_fx.export import gguf, huggingface, onnx
from quark_fx.graph.nodes import (
    EMBEDDING,
    device_of,
    own_tensors,
    placeholders,
    static_size,
    stored_tensors,
    target_name,
    tensor_of,
    value_of,
)
from quark_fx.graph.pass_manager import (
    GraphPass,
    PassRecord,
    Promise,
    Stage,
    copy_graph,
    learns_from_data,
    needs_context,
    pass_name,
    pass_stage,
    run_passes,
)
from quark_fx.graph.provenance import kept_tensors
from quark_fx.graph.signature import batch_shape, split_batch
from quark_fx.model.correspondence import shell_of
from quark_fx.model.eager import is_eager
from quark_fx.model.output_directory import clear, kept_blocks, work_directory
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.passes import calibrate, convert, insert_observers
from quark_fx.plan.report import Row
from quark_fx.presets import preset
from quark_fx.system.isolation import as_called, isolated, warn
from quark_fx.system.memory import give_back_at_once, occupied

logger = logging.getLogger(__name__)


@isolated
def quantize(
    model: nn.Module | ExportedProgram | str | Path,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    verify: bool = False,
    progress: bool = True,
    device: str | torch.device | None = None,
    cache: CacheBudget | None = None,
    checkpoint: str | Path | None = None,
    output_dir: str | Path | None = None,
    distributed: bool = False,
    memory: int | str | None = None,
    disk: int | str | None = None,
) -> QuantizedModel:
    """Quantize any PyTorch model. The model itself is not changed.

    Several threads may call this: one call runs at a time, and gives the bits it gives alone. It runs without autocast,
    inference mode and default device of its caller; a generator that makes `calibration_data` keeps them.

    Args:
        model: a module in eval mode, a Hugging Face model or the directory of its checkpoint, or an `ExportedProgram`.
        config: a preset's name, a `QuantConfig`, or its `to_dict()`.
        calibration_data: batches: tensors, tuples of positional inputs, or mappings of keywords. The
            first one is also what the model is captured with. A configuration without static ranges
            needs one batch only, and none for an `ExportedProgram`.
        dynamic_shapes: passed to `torch.export.export`; default: batch and sequence dimensions vary.
        verify: check on the first batch that every pass that promises to keep the function does.
        progress: show a progress bar.
        device: where blocks run, their weights on it only meanwhile; default: where the model is.
        cache: memory that cached activations may take before they go to disk; default: as much as there is.
        checkpoint: a directory for finished blocks of AWQ and of passes that round weights. The same call with the
            same directory continues where an interrupted one stopped, with the same result.
        output_dir: where to save the result (`QuantizedModel.save`). The model then needs less memory than it has
            weights: it runs block by block, and what passes make of its weights is kept in files of this directory,
            like finished blocks, until the result is complete. See `open_checkpoint`.
        distributed: all processes of a job make this call, with the same arguments, and share the work: the process
            group is the one there is, or that of torchrun's environment. Directories are on a file system they share.
        memory: what the process may take, in bytes or as `"6GiB"`: activations that do not fit go to disk, and a run
            that is expected to need more is refused before it begins. See `predict`.
        disk: what the files of a run with `output_dir` may take at once, likewise.

    Returns:
        A model called like the original; with `output_dir`, its tensors are read from files when they are used.

    Raises:
        ConfigError: for an unknown preset or option, a device, cache, checkpoint or output that cannot be used, or a
            budget that is too small.
        CheckpointError: if the files of a checkpoint are not what they should be, or there is no room for the result.
        CaptureError: if the model cannot be captured.
        CalibrationError: if calibration data or weights are unusable.
        PassError: if a pass broke its promise (`verify=True`).
    """
    config = resolve(config)
    require_resources(device, cache)
    _require_path(output_dir, "output_dir")
    _require_path(checkpoint, "checkpoint")
    memory, disk = parse_bytes(memory, "memory"), parse_bytes(disk, "disk")
    ranks = Ranks.current() if distributed else ALONE
    _require_distributed(config, ranks)
    progress = progress and ranks.index == 0
    if isinstance(model, str | Path):
        CheckpointFiles.of(model)  # before anything is made
    if output_dir is not None or memory is not None:
        give_back_at_once()
    with work_directory(output_dir, checkpoint, ranks) as (folder, checkpoint):
        shelf = Shelf(folder) if folder is not None else None
        if isinstance(model, str | Path):
            model = open_checkpoint(model, scratch=shelf.directory if shelf is not None else None)
        first, batches = peek(calibration_data)
        if verify and first is None:
            raise CalibrationError("verify=True compares the passes on a batch; pass at least one as calibration_data")
        captured, context, batches = begun(
            model, config, first, batches, dynamic_shapes, device, cache, shelf, ranks, memory=memory
        )
        context.progress = progress
        inputs = tuple(_flatten(captured, first)) if verify else None
        with closing(context.cache):
            gm, rows, records = _transformed(captured, context, batches, inputs, checkpoint, memory, disk)
        if rows and all(row.reason for row in rows):
            warn(f"nothing was quantized: {len(rows)} operators stay in float, see report()")
        # The copy holds only what the graph reads, and nothing of the user's model.
        kept = kept_tensors(gm, stored_tensors(captured.module))
        source = _source(model, gm, kept) if isinstance(model, nn.Module) else None
        names = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else None
        gm = copy_graph(gm)
        if shelf is None:
            own_tensors(gm, stored_tensors(captured.module).values())
        known = None if names is None else frozenset(name for name, _ in names)
        qmodel = QuantizedModel(
            *(gm, captured.signature, config, rows, records, source),
            histograms=context.histograms,
            kept=kept,
            parameter_names=known,
        )
        if output_dir is not None:
            del gm.meta["shelf"]
            ranks.wait()  # for those that still put things in the folder which goes
            if ranks.index == 0:
                qmodel.save(output_dir)
                clear(output_dir)
            ranks.wait()
    return qmodel


def _transformed(
    captured: Captured,
    context: Context,
    batches: Iterable[Any],
    verify_inputs: tuple[Any, ...] | None,
    checkpoint: str | Path | None,
    memory: int | None,
    disk: int | None,
) -> tuple[GraphModule, list[Row], list[PassRecord]]:
    """Run the passes of each stage, calibration and conversion between them; return the graph and what to report.

    Args:
        captured: the model.
        context: of the run.
        batches: the calibration data, unless the context has it.
        verify_inputs: what exact passes are held to.
        checkpoint: where finished blocks are kept.
        memory: that may be taken.
        disk: that may be taken.
    """
    config, progress, ranks, shelf = context.config, context.progress, context.ranks, captured.module.meta["shelf"]
    rewrites, others = divided(config.passes)
    gm, records = run_passes(captured.module, rewrites, verify_inputs=verify_inputs, context=context)
    learns = bool(context.batches)
    if memory is not None or disk is not None or (learns and progress):
        expected = expect(gm, config, context, others, shelf=shelf is not None)
        if memory is not None or disk is not None:
            expected = replace(expected, before=max(ranks.gather(expected.before)))  # one advice for all ranks
        require_room(expected, memory, disk)
        if memory is not None:
            context.cache.limit_further(expected.room_for_cache(memory))
        if learns and progress:
            tqdm.write(str(expected), file=sys.stderr)
    if checkpoint is not None or not ranks.alone:
        run = fingerprint(captured.module, context)
        ranks.require_same(run)
        context.keep_share()
        context.checkpoint = _shared_checkpoint(checkpoint, run, ranks) if checkpoint is not None else None
    if not learns:
        context.unread = flat_batches(captured, batches)
    floats = [p for p in others if pass_stage(p) is Stage.FLOAT]
    gm, rewritten = run_passes(gm, floats, verify_inputs=verify_inputs, context=context, in_place=True)
    gm, done = run_passes(gm, others[len(floats) :], context=context, in_place=True)
    rows = context.rows
    if not rows and planned(context).plan.operators:
        raise PassError("the pass of the settled stage made no report; call `quark_fx.passes.convert` in it")
    if any(pass_stage(p) is Stage.QUANTIZED for p in others):
        rows = _with_learned_weights(rows, gm, context)
    return gm, rows, [*records, *rewritten, *done]


_OWN = (insert_observers, calibrate, convert)
"""What runs at stages of a single pass, unless the configuration has another."""


def divided(passes: Sequence[GraphPass]) -> tuple[list[GraphPass], list[GraphPass]]:
    """Return all passes in the order of their stages: those before the first one that needs data, and the others."""
    given = {pass_stage(p) for p in passes}
    passes = [*passes, *(own for own in _OWN if pass_stage(own) not in given)]
    ordered = sorted(passes, key=lambda p: list(Stage).index(pass_stage(p)))
    rewrites = list(itertools.takewhile(lambda p: not needs_context(p), ordered))
    return rewrites, ordered[len(rewrites) :]


@isolated
def predict(
    model: nn.Module | ExportedProgram | str | Path,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    device: str | torch.device | None = None,
    streamed: bool = False,
) -> Resources:
    """Return what `quantize` is expected to take, without running the model: arguments are its.

    Args:
        model: as for `quantize`.
        config: as for `quantize`.
        calibration_data: all of the batches that will be used.
        dynamic_shapes: as for `quantize`.
        device: as for `quantize`.
        streamed: with an `output_dir`.

    Returns:
        Peaks of memory and disk, and a lower bound of the time. Memory is that of a run with a budget (`memory=`) or an
        `output_dir`, which gives back at once what it does not need; others take up to a half more.

    Raises:
        QuarkError: as `quantize` does, for what can be known beforehand.
    """
    config = resolve(config)
    require_resources(device, None)
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(folder) if streamed else None
        if isinstance(model, str | Path):
            model = open_checkpoint(model, scratch=folder)
        first, batches = peek(calibration_data)
        captured, context, batches = begun(model, config, first, batches, dynamic_shapes, device, None, shelf)
        try:
            shapes = [batch_shape(leaves) for leaves in flat_batches(captured, batches)]
            rewrites, others = divided(config.passes)
            gm, _ = run_passes(captured.module, rewrites, context=context)
            return expect(gm, config, context, others, shelf=streamed, shapes=shapes)
        finally:
            context.cache.close()


def needs_data(config: QuantConfig) -> bool:
    """Tell whether calibration data change the result: ranges of activations are found, or a pass learns from data.

    >>> needs_data(preset("int8_static")), needs_data(preset("int8_dynamic"))
    (True, False)
    """
    specs = [config.input, config.output, *(spec for o in config.overrides for spec in (o.input, o.output))]
    ranges = any(isinstance(spec, TensorSpec) and not spec.dynamic and not spec.is_cast for spec in specs)
    return ranges or any(map(learns_from_data, config.passes))


@isolated
def check(
    model: nn.Module | str | Path,
    config: str | QuantConfig | Mapping[str, Any],
    calibration_data: Iterable[Any],
    *,
    export: str = "compressed-tensors",
    dynamic_shapes: Any = None,
) -> None:
    """Raise if what `quantize` would make cannot be exported: in the time that round-to-nearest takes, on one batch.

    The export itself is asked, with codes that nothing was learned for: passes that need data are left out. A layer
    that such a pass rewrites (`SmoothQuant(explicit=True)`) is therefore not found here.

    Args:
        model: as for `quantize`.
        config: as for `quantize`.
        calibration_data: the first batch is used.
        export: `"compressed-tensors"`, `"gptq"`, `"gptq_v2"` or `"awq"` (`quark_fx.export.huggingface`), `"gguf"`, or
            `"qdq"`, `"qoperator"`, `"matmul_nbits"` or `"vitis"` (`quark_fx.export.onnx`).

    Raises:
        ExportError: naming every layer that the format cannot hold, which can be left in float with `exclude`.
        QuarkError: as `quantize` does, for the model, the configuration and the batch.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
    >>> check(model, "int8_static", [torch.ones(2, 8)], export="qdq")
    """
    if export not in _EXPORTS:
        raise ConfigError(f"unknown export {export!r}; choose one of {', '.join(_EXPORTS)}")
    config = resolve(config)
    config = config.replace(passes=tuple(p for p in config.passes if not needs_context(p)))
    first, _ = peek(calibration_data)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, str | Path):
            model = open_checkpoint(model, scratch=folder)
        batches = [] if first is None else [first]
        qmodel = quantize(model, config, batches, dynamic_shapes=dynamic_shapes, progress=False)
        _EXPORTS[export](qmodel, Path(folder, "checked"))


_EXPORTS: dict[str, Callable[..., Any]] = {
    **{name: partial(huggingface, format=name) for name in ("compressed-tensors", "gptq", "gptq_v2", "awq")},
    "gguf": gguf,
    **{name: partial(onnx, format=name) for name in ("qdq", "qoperator", "matmul_nbits", "vitis")},
}
"""What writes a quantized model to a path, by the name of its format."""


def begun(
    model: nn.Module | ExportedProgram,
    config: QuantConfig,
    first: Any,
    batches: Iterable[Any],
    dynamic_shapes: Any,
    device: str | torch.device | None = None,
    cache: CacheBudget | None = None,
    shelf: Shelf | None = None,
    ranks: Ranks = ALONE,
    *,
    memory: int | None = None,
    keep: bool = False,
) -> tuple[Captured, Context, Iterable[Any]]:
    """Capture the model; return it, the context, and the batches, unless they are read more than once and kept there.

    Data may come from a generator, or in another order each time. With `keep` it is kept in any case.

    Raises:
        ConfigError: if the model is quantized already.
        CalibrationError: if there is no batch, or one is unusable.
    """
    if isinstance(model, QuantizedModel):
        raise ConfigError("the model is quantized already; quantize the float model it came from")
    if isinstance(model, nn.Module) and is_eager(model):
        raise ConfigError("the model is what eager() made of a quantized one; quantize the float model it came from")
    if first is None and not isinstance(model, ExportedProgram):
        raise CalibrationError(
            "calibration_data is missing or empty; pass batches of real inputs, the first of which the model is "
            "captured with (a generator that was read before has none left: make it anew)"
        )
    captured = capture_graph(model, first, dynamic_shapes=dynamic_shapes)
    captured.module.meta["shelf"] = shelf
    home = device_of(captured.module)
    place = home if device is None else torch.empty(0, device=device, dtype=torch.float32).device  # with its index
    if shelf is not None and home.type != "cpu":
        raise ConfigError(
            f"a run with output_dir reads weights from files of the host, and the model is on {home}; load it on the "
            f'CPU and pass device="{home}", where its blocks then run'
        )
    by_block = place != home or shelf is not None
    names = captured.signature.input_names
    context = Context(config, ActivationCache(cache, place), place, names=names, ranks=ranks, by_block=by_block)
    if shelf is not None and context.cache.budget.directory is None:
        context.cache.budget = replace(context.cache.budget, directory=shelf.directory)
    if memory is not None:
        context.cache.limit_further(max(0, memory - occupied()) // 2)  # what data may take before the rest is known
    parted = any(map(learns_from_data, config.passes)) and divisible(captured)
    if keep or by_block or not ranks.alone or any(map(needs_context, config.passes)):
        try:
            context.add_batches(flat_batches(captured, batches), divisible=parted)
        except BaseException:
            context.cache.close()
            raise
        batches = ()
    return captured, context, batches


def _require_path(path: str | Path | None, name: str) -> None:
    if path is not None and not (isinstance(path, str | Path) and str(path)):
        raise ConfigError(f"{name} is the path of a directory, not {path!r}")


def _require_distributed(config: QuantConfig, ranks: Ranks) -> None:
    """Raise `ConfigError` if a pass would learn something else on every rank."""
    promises = {pass_name(p): getattr(p, "promise", Promise()) for p in config.passes if needs_context(p)}
    names = [name for name, promise in promises.items() if not promise.distributed]
    if names and not ranks.alone:
        raise ConfigError(
            f"{', '.join(names)} cannot share data between {ranks.count} ranks; run in one process, or leave it out"
        )


def _shared_checkpoint(directory: str | Path, fingerprint: Mapping[str, str], ranks: Ranks) -> Checkpoint:
    """Return a checkpoint whose directory the first rank makes."""
    output = kept_blocks(directory)
    ranks.first(lambda: Checkpoint(directory, fingerprint, output))
    return Checkpoint(directory, fingerprint, output)


def _source(model: nn.Module, gm: GraphModule, kept: Mapping[str, Tensor]) -> nn.Module | None:
    try:
        return shell_of(model, gm, kept)
    except Exception as error:  # what the model's own code raises when it is copied
        logger.debug("the model cannot be copied, so eager() will ask for one: %s", error)
        return None


def _with_learned_weights(rows: list[Row], gm: GraphModule, context: Context) -> list[Row]:
    """Return the rows with the scales and the noise of the weights as passes on the quantized graph left them."""
    assert context.float_graph is not None
    now: dict[tuple[str, str], dict[str, float]] = {}
    for weight in quantized_weights(gm, context.plan):
        scale, real = weight.scale(gm), tensor_of(context.float_graph, weight.weight).detach()
        ends = {"scale_min": float(scale.min()), "scale_max": float(scale.max())}
        now[weight.name, weight.weight] = {"sqnr": weight.sqnr(gm, real), **ends}
    return [replace(row, **now.get((row.name, row.parameter), {})) for row in rows]  # type: ignore[arg-type]


def divisible(captured: Captured) -> bool:
    """Tell whether dimension 0 of every tensor input is the same one that varies: it then counts samples."""
    values = [node.meta["val"] for node in placeholders(captured.module)]
    sizes = [value.shape[0] if value.dim() else 1 for value in values if isinstance(value, torch.Tensor)]
    alike = len({str(size) for size in sizes}) == 1 and all(static_size(size) is None for size in sizes)
    # The parts of a batch need not be multiples of what the model takes.
    return alike and not any(dim == 0 for _, dim, _ in captured.signature.input_multiples)


def resolve(config: str | QuantConfig | Mapping[str, Any]) -> QuantConfig:
    """Return the configuration that a preset's name, a `QuantConfig` or its `to_dict()` stands for.

    Raises:
        ConfigError: for an unknown preset or option.
    """
    if isinstance(config, str):
        return preset(config)
    if isinstance(config, QuantConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(f"config is a preset's name, a QuantConfig or its dict, not {type(config).__name__}")
    return QuantConfig.from_dict(config)


def peek(data: Any, purpose: str = "calibration") -> tuple[Any, Iterable[Any]]:
    """Return the first batch (or `None`) and an iterable over all of them; messages name the purpose."""
    if data is None:
        return None, ()
    several = isinstance(data, Iterable) or hasattr(data, "__getitem__")  # a dataset may have nothing else
    if (
        isinstance(data, torch.Tensor | Mapping | str)
        or hasattr(data, "keys")
        or hasattr(data, "__array__")
        or not several
    ):
        remedy = "pass what it returns: call it" if callable(data) else "wrap a single batch in a list"
        raise CalibrationError(f"{purpose}_data is an iterable of batches, not one {type(data).__name__}; {remedy}")
    iterator = as_called(data)
    for first in iterator:
        if first is None:
            raise CalibrationError(f"{purpose} batch 0 is None; pass tensors, tuples of inputs or dicts of keywords")
        return first, data if isinstance(data, list | tuple) else itertools.chain([first], iterator)
    return None, ()


def flat_batches(captured: Captured, batches: Iterable[Any], purpose: str = "calibration") -> Iterator[list[Any]]:
    """Yield the flat inputs of every batch.

    Args:
        captured: the model that reads them.
        batches: as they were given.
        purpose: what they are for, for messages.

    Raises:
        CalibrationError: if one does not fit, or holds an index no table has; the message names the batch's index.
    """
    rows = _rows_selected(captured.module)
    for index, batch in enumerate(batches):
        try:
            leaves = _flatten(captured, batch)
        except QuarkError as error:
            several = (
                "; a tuple is read as several batches: one batch of several inputs is [(x, y)]"
                if isinstance(batches, tuple)
                else ""
            )
            raise CalibrationError(f"{purpose} batch {index} does not fit: {error}{several}") from error
        for name, leaf in zip(captured.signature.input_names, leaves, strict=True):
            if isinstance(leaf, Tensor) and not leaf.numel():
                raise CalibrationError(
                    f"{purpose} batch {index}: input {name} is empty, shape {tuple(leaf.shape)}; leave it out"
                )
        for position, count in rows.items():
            leaf = leaves[position]
            if isinstance(leaf, Tensor) and leaf.numel() and not 0 <= int(leaf.min()) <= int(leaf.max()) < count:
                raise CalibrationError(
                    f"{purpose} batch {index}: input {captured.signature.input_names[position]} holds "
                    f"{int(leaf.min())} to {int(leaf.max())} and selects from a table of {count} rows; tokenize with "
                    "the model's own tokenizer, without marks for positions that are to be ignored"
                )
        yield leaves


def _rows_selected(gm: GraphModule) -> dict[int, int]:
    """Return how many rows the table has that an input selects from, as it is, by the position of the input."""
    positions = {node: position for position, node in enumerate(placeholders(gm))}
    found: dict[int, int] = {}
    for node in gm.graph.nodes:
        if target_name(node).partition(".default")[0] in _SAME_VALUES and node.args[0] in positions:
            positions[node] = positions[node.args[0]]
        if target_name(node) == EMBEDDING and node.args[1] in positions:
            rows = int(value_of(gm, node.args[0]).shape[0])
            position = positions[node.args[1]]
            found[position] = min(rows, found.get(position, rows))
    return found


_SAME_VALUES = {
    *(f"aten.{name}" for name in ("view", "reshape", "unsqueeze", "contiguous", "clone", "alias", "detach")),
    *("aten.to.dtype", "aten.flatten.using_ints", "aten.squeeze.dim"),
}
"""Operators whose result holds the numbers of their first argument."""


def _flatten(captured: Captured, batch: Any) -> list[Any]:
    return captured.signature.flatten(*split_batch(batch))
