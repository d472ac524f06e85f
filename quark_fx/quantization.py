"""`quantize`, which captures, rewrites, calibrates, and converts a model, and its companions `predict` and `check`."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from tqdm.auto import tqdm

from quark_fx.capture.capture import unwrapped
from quark_fx.checkpoints.open_checkpoint import open_checkpoint, require_readable
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.config.quant_config import Override, QuantConfig, TensorSpec
from quark_fx.engine.checkpoint import Checkpoint, fingerprint
from quark_fx.engine.context import Context
from quark_fx.engine.prediction import Prediction, expect, require_room
from quark_fx.engine.quantized_weights import quantized_weights
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.engine.resources import OF_SESSION, Resources, require_usable, takes_run, usable_device
from quark_fx.errors import CalibrationError, ConfigError, ExportError, PassError
from quark_fx.export import gguf, huggingface, onnx, pt2e
from quark_fx.export.checkpoints.plain_model import require_reader
from quark_fx.export.checkpoints.to_huggingface import FORMATS as CHECKPOINTS
from quark_fx.export.to_onnx.formats import FORMATS
from quark_fx.graph.nodes import own_tensors, stored_tensors, tensor_of
from quark_fx.graph.pass_manager import (
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
from quark_fx.graph.sample import sample_of
from quark_fx.graph.signature import batch_shape
from quark_fx.model.correspondence import shell_of
from quark_fx.model.output_directory import clear, kept_blocks, work_directory
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.plan.report import Measured, Row, with_measured
from quark_fx.presets import preset
from quark_fx.session import Session, divided, peek, reads_data_often, require_of_session
from quark_fx.system.isolation import isolated, warn
from quark_fx.system.memory import short_memory
from quark_fx.system.names import unknown

logger = logging.getLogger(__name__)


@isolated
@takes_run
def quantize(
    model: nn.Module | ExportedProgram | str | Path | Session,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    resources: Resources = Resources(),
    dynamic_shapes: Any = None,
    verify: bool = False,
    progress: bool = True,
) -> QuantizedModel:
    """Quantize any PyTorch model. The model itself is not changed.

    Several threads may call this function. Calls run one at a time, and each returns the same bits as if it ran alone.
    The caller's autocast, inference mode, and default device are off during the call; they still apply to a generator
    that is passed as `calibration_data`.

    Args:
        model: Module in eval mode, Hugging Face model or the directory of its checkpoint, or `ExportedProgram`; or a
            `Session`, which holds such a model and its data for several configurations.
        config: Name of a preset, a `QuantConfig`, or its `to_dict()`.
        calibration_data: Batches: tensors, tuples of positional inputs, or mappings of keyword arguments. The model is
            captured with the first batch. If the configuration learns nothing from data, this batch is enough, and an
            `ExportedProgram` does not need a batch.
        resources: Device that blocks run on, limits of memory and disk, and directories of files.
        dynamic_shapes: Argument of `torch.export.export`. Default: batch and sequence dimensions vary.
        verify: Whether to compare outputs on the first batch after every pass that promises to keep the function.
        progress: Whether to show a progress bar.

    Returns:
        Quantized model, which is called like the original. With an output directory, its tensors are read from files
        when they are used.

    Raises:
        ConfigError: If a preset or an option is unknown, a device or directory cannot be used, or a limit is too small.
        QuarkError: If the model of a session was changed after the session began.
        CheckpointError: If the files of a checkpoint are invalid, or the disk is too full for the result.
        CaptureError: If the model cannot be captured.
        CalibrationError: If calibration data or weights are unusable.
        PassError: If a pass broke its promise (`verify=True`).
    """
    config = resolve(config)
    require_usable(resources)
    output_dir = resources.output_dir
    ranks = Ranks.current(usable_device(resources)) if resources.distributed else ALONE
    _require_distributed(config, ranks)
    progress = progress and ranks.index == 0
    if isinstance(model, Session):
        require_of_session(calibration_data, dynamic_shapes, resources)
    if isinstance(model, str | Path):
        require_readable(model)  # fails before any directory is created
    short = short_memory(output_dir is not None or resources.memory is not None)
    with (
        ranks.telling_failures(),
        short,
        work_directory(output_dir, resources.checkpoint, ranks) as (folder, checkpoint),
    ):
        shelf = Shelf(folder) if folder is not None else None
        if isinstance(model, Session):
            session = model
        else:
            first, batches = peek(calibration_data)
            session = Session.of_one_run(model, config, first, batches, dynamic_shapes, resources, shelf, ranks)
        example = session.example()
        if verify and example is None:
            raise CalibrationError(
                "verify=True compares the model before and after each pass on a batch; pass at least one batch as "
                "calibration_data"
            )
        captured, model = session.captured, session.model
        sample = None if example is None else sample_of(captured.module, captured.signature, example)
        inputs, example = example if verify else None, None  # drop the batch, which may be large
        with session.run(config, shelf) as context:
            context.progress = progress
            gm, rows, records = _transformed(session, context, shelf, inputs, checkpoint, resources)
        if rows and all(row.reason for row in rows):
            warn(f"nothing was quantized: {len(rows)} operators stay in float; see report() for the reasons")
        # The copy holds only tensors that the graph reads, and shares none with the user's model.
        unchanged = kept_tensors(gm, stored_tensors(captured.module))
        source = _source(model, gm, unchanged) if isinstance(model, nn.Module) else None
        names = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else None
        gm = copy_graph(gm)
        if shelf is None:
            own_tensors(gm, session.shared())
        parameters = None if names is None else frozenset(name for name, _ in names)
        qmodel = QuantizedModel(
            *(gm, captured.signature, config, rows, records, source),
            histograms=context.histograms,
            kept=unchanged,
            parameter_names=parameters,
            sample=sample,
            data=context.data.described if needs_data(config) else "",
        )
        if output_dir is not None:
            del gm.meta["shelf"]
            ranks.wait()  # other ranks may still write into the folder that is removed
            if ranks.index == 0:
                qmodel.save(output_dir)
                clear(output_dir)
            ranks.wait()
    return qmodel


def _transformed(
    session: Session,
    context: Context,
    shelf: Shelf | None,
    verify_inputs: tuple[Any, ...] | None,
    checkpoint: str | Path | None,
    resources: Resources,
) -> tuple[GraphModule, list[Row], list[PassRecord]]:
    """Run all passes in the order of their stages; return the graph, the rows of the report, and a record per pass.

    Observer insertion, calibration, and conversion are also passes; see `divided`.
    """
    config, progress, ranks = context.config, context.progress, context.ranks
    memory, disk = resources.memory_bytes, resources.disk_bytes
    gm, records = session.rewritten(context, shelf, verify_inputs)
    _, later = divided(config.passes)
    learns = reads_data_often(config, ranks, by_block=context.by_block) and bool(context.data.batches)
    if memory is not None or disk is not None or (learns and progress):
        expected = expect(gm, config, context, later, shelf=shelf is not None)
        if memory is not None or disk is not None:
            expected = replace(expected, before=max(ranks.gather(expected.before)))  # equal advice on all ranks
        require_room(expected, memory, disk)
        if memory is not None:
            context.cache.limit_further(expected.room_for_cache(memory))
        if learns and progress:
            tqdm.write(str(expected), file=sys.stderr)
    if checkpoint is not None or not ranks.alone:
        run = fingerprint(session.captured.module, config, context.data)
        ranks.require_same(run)
        context.data.keep_share()
        context.checkpoint = _shared_checkpoint(checkpoint, run, ranks) if checkpoint is not None else None
    floats = [p for p in later if pass_stage(p) is Stage.FLOAT]
    gm, rewritten = run_passes(gm, floats, verify_inputs=verify_inputs, context=context, in_place=True)
    gm, done = run_passes(gm, later[len(floats) :], context=context, in_place=True)
    rows = context.rows
    if not rows and context.planned.plan.operators:
        raise PassError(
            "the pass of the settled stage reported no operators; call `quark_fx.passes.convert` in that pass"
        )
    if any(pass_stage(p) is Stage.QUANTIZED for p in later):
        rows = _with_learned_weights(rows, gm, context)
    return gm, rows, [*records, *rewritten, *done]


@isolated
@takes_run
def predict(
    model: nn.Module | ExportedProgram | str | Path | Session,
    config: str | QuantConfig | Mapping[str, Any] = "int8_static",
    calibration_data: Iterable[Any] | None = None,
    *,
    resources: Resources = Resources(),
    dynamic_shapes: Any = None,
) -> Prediction:
    """Predict the memory, disk space, and time that `quantize` needs, without running the model.

    Args:
        model: Same as in `quantize`.
        config: Same as in `quantize`.
        calibration_data: All batches that `quantize` will get.
        resources: Same as in `quantize`, without `cache` and `distributed`. Only the device and the presence of
            `output_dir` change the prediction; nothing is written to that directory.
        dynamic_shapes: Same as in `quantize`.

    Returns:
        Peaks of memory and disk space, and a lower bound of the time. The peak of memory holds for runs with a memory
        limit or an output directory, which free tensors as soon as they no longer need them; other runs need up to 50
        percent more.

    Raises:
        QuarkError: If `quantize` would raise an error that can be detected without a run.
    """
    config = resolve(config)
    require_usable(resources, "predict", ("device", "memory", "disk", "checkpoint", "output_dir"))
    streamed = resources.output_dir is not None
    with tempfile.TemporaryDirectory() as folder:
        shelf = Shelf(folder) if streamed else None
        if isinstance(model, Session):
            require_of_session(calibration_data, dynamic_shapes, resources)
            session = model
        else:
            first, batches = peek(calibration_data)
            placed = Resources(device=resources.device)
            session = Session.of_one_run(model, config, first, batches, dynamic_shapes, placed, shelf)
        with session.run(config, shelf) as context:
            shapes = [] if context.data.batches else [batch_shape(leaves) for leaves in context.data.unread]
            gm, _ = session.rewritten(context, shelf)
            return expect(gm, config, context, divided(config.passes)[1], shelf=streamed, shapes=shapes)


def needs_data(config: QuantConfig) -> bool:
    """Tell whether calibration data affects the result, through static ranges of activations or passes that learn.

    >>> needs_data(preset("int8_static")), needs_data(preset("int8_dynamic"))
    (True, False)
    """
    parts: tuple[QuantConfig | Override, ...] = (config, *config.overrides)
    specs = [spec for part in parts for spec in (part.input, part.output, part.kv_cache)]
    ranges = any(isinstance(spec, TensorSpec) and spec.is_calibrated for spec in specs)
    return ranges or any(map(learns_from_data, config.passes))


@isolated
@takes_run
def check(
    model: nn.Module | str | Path | Session,
    config: str | QuantConfig | Mapping[str, Any],
    calibration_data: Iterable[Any] | None = None,
    *,
    export: str = "compressed-tensors",
    resources: Resources = Resources(),
    dynamic_shapes: Any = None,
) -> None:
    """Raise an error if the result of `quantize` cannot be exported; takes as long as round-to-nearest with one batch.

    The model is quantized without the passes that learn from data, and exported to a temporary directory. Rewrites of
    these passes, such as the factors of `SmoothQuant(explicit=True)`, are therefore not checked.

    Args:
        model: Same as in `quantize`.
        config: Same as in `quantize`.
        calibration_data: Batches; only the first one is used.
        export: Name of a format: `"compressed-tensors"`, `"gptq"`, `"gptq_v2"`, `"awq"`, `"modelopt"`, or
            `"mxfp4"` (`quark_fx.export.huggingface`); `"gguf"`; a format of `quark_fx.export.onnx`, such as
            `"qdq"`; or `"pt2e"`.
        resources: Same as in `quantize`; only `device` and `cache` apply.
        dynamic_shapes: Same as in `quantize`.

    Raises:
        ExportError: If the format does not support some layers; the message names each layer, so that `exclude` can
            keep it in float.
        QuarkError: If `quantize` raises an error about the model, the configuration, or the batch.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(8, 4)).eval()
    >>> check(model, "int8_static", [torch.ones(2, 8)], export="qdq")
    """
    exports = _exports()
    if export not in [*exports]:
        raise unknown("export", export, exports)
    require_usable(resources, "check", OF_SESSION)
    config = resolve(config)
    if export in _WITHOUT_BRANCHES and (
        branching := [p for p in config.passes if getattr(p, "promise", Promise()).branches]
    ):
        raise ExportError(
            f"export={export!r} cannot store the float branches that {pass_name(branching[0])} adds to layers; drop "
            "that pass, or export an ONNX file"
        )
    given = model.model if isinstance(model, Session) else model
    if export in _WITHOUT_BRANCHES and isinstance(given, nn.Module):
        require_reader(unwrapped(given))  # checked before capture, which takes longer
    config = config.replace(passes=tuple(p for p in config.passes if not learns_from_data(p)))
    first, _ = peek(calibration_data)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(model, str | Path):
            model = open_checkpoint(model, scratch=folder)
        batches = None if first is None else [first]
        qmodel = quantize(model, config, batches, resources=resources, dynamic_shapes=dynamic_shapes, progress=False)
        exports[export](qmodel, Path(folder, "checked"))


_WITHOUT_BRANCHES = (*CHECKPOINTS, "gguf")
"""Names of formats that do not support float branches next to layers."""


def _exports() -> dict[str, Callable[..., Any]]:
    """Return the functions that write a quantized model to a path; keys are names of formats."""
    return {
        **{name: partial(huggingface, format=name) for name in CHECKPOINTS},
        "gguf": gguf,
        **{name: partial(onnx, format=name) for name in FORMATS},
        "pt2e": lambda qmodel, _: pt2e(qmodel),
    }


def _require_distributed(config: QuantConfig, ranks: Ranks) -> None:
    """Raise `ConfigError` if a pass would learn different values on each rank."""
    promises = {pass_name(p): getattr(p, "promise", Promise()) for p in config.passes if needs_context(p)}
    names = [name for name, promise in promises.items() if not promise.distributed]
    if names and not ranks.alone:
        raise ConfigError(
            f"{', '.join(names)} cannot divide data among {ranks.count} ranks; run in a single process, or drop these "
            "passes"
        )


def _shared_checkpoint(directory: str | Path, fingerprint: Mapping[str, str], ranks: Ranks) -> Checkpoint:
    """Return the checkpoint of a run for each rank; the first rank creates its directory.

    Args:
        directory: Directory for finished blocks.
        fingerprint: Digests that identify the run.
        ranks: Processes that share the run.
    """
    output = kept_blocks(directory)
    ranks.first(lambda: Checkpoint(directory, fingerprint, output))
    return Checkpoint(directory, fingerprint, output)


def _source(model: nn.Module, gm: GraphModule, unchanged: Mapping[str, Tensor]) -> nn.Module | None:
    try:
        return shell_of(model, gm, unchanged)
    except Exception as error:  # copying runs the model's own code, which may raise any error
        logger.debug("the model cannot be copied, so eager() will ask for one: %s", error)
        return None


def _with_learned_weights(rows: list[Row], gm: GraphModule, context: Context) -> list[Row]:
    """Return the rows, with scales and noise of weights measured again after the passes on the quantized graph."""
    now: dict[tuple[str, str], Measured] = {}
    for weight in quantized_weights(gm, context.plan):
        real = tensor_of(context.float_graph, weight.weight).detach()
        stored = weight.stored(gm).to(real.device)
        now[weight.name, weight.weight] = Measured.of(stored.norms(real), stored.scale)
    places = {i: (row.name, row.parameter) for i, row in enumerate(rows)}
    return with_measured(rows, {i: now[place] for i, place in places.items() if place in now})


def resolve(config: str | QuantConfig | Mapping[str, Any]) -> QuantConfig:
    """Return the configuration that the name of a preset, a `QuantConfig`, or its `to_dict()` describes.

    Raises:
        ConfigError: If a preset or an option is unknown.
    """
    if isinstance(config, str):
        return preset(config)
    if isinstance(config, QuantConfig):
        return config
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"config must be the name of a preset, a QuantConfig, or its dict, not {type(config).__name__}"
        )
    return QuantConfig.from_dict(config)
