"""`Session`, which captures a model and reads its data once for any number of configurations."""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from quark_fx.capture.capture import Captured, capture_graph, unwrapped
from quark_fx.checkpoints.open_checkpoint import method_of, open_checkpoint
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.config.quant_config import Override, QuantConfig, TensorSpec
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.calibration_data import CalibrationData, require_batches
from quark_fx.engine.context import Context
from quark_fx.engine.known import Known
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.engine.resources import OF_SESSION, Resources, require_usable, takes_run, usable_device
from quark_fx.errors import CalibrationError, ConfigError, QuarkError
from quark_fx.export.checkpoints.imatrix import moments_by_weight
from quark_fx.graph.nodes import (
    CAST,
    EMBEDDING,
    device_of,
    placeholders,
    static_size,
    stored_tensors,
    target_name,
    value_of,
)
from quark_fx.graph.operators import KEEPS_ORDER, Motion, motion
from quark_fx.graph.pass_manager import (
    GraphPass,
    PassRecord,
    Stage,
    copy_graph,
    is_ours,
    learns_from_data,
    needs_context,
    pass_stage,
    run_passes,
    takes_context,
)
from quark_fx.graph.provenance import digest
from quark_fx.model.eager import is_eager
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.passes import calibrate, convert, insert_observers
from quark_fx.solvers.importance import FileHessian
from quark_fx.system import accelerator
from quark_fx.system.isolation import as_called, isolated
from quark_fx.system.memory import occupied


class Session:
    """A captured model and its calibration data, for `quantize`, `predict`, `check`, `analyze`, and `search`.

    Runs on the same session share work: capture, the passes that need no data, the forward pass over the batches, and
    weights that are rounded the same way. Passes and observers that are defined outside of quark_fx run every time,
    because the data that their code reads may have changed. Every result has the same bits as without a session, and
    results do not share memory. The first run that calibrates collects histograms, from which later runs compute the
    results of their observers.

    A session keeps the batches, the last rewritten graph, and the last rounded weights. It does not copy the model's
    weights: each run compares checksums, which takes about a second per gigabyte, and raises an error if the model was
    changed. After a failed run, the session can still be used. Several threads may use a session; their runs take
    turns.

    >>> model = nn.Sequential(nn.Linear(8, 4)).eval()
    >>> session = Session(model, [torch.randn(16, 8)])
    >>> from quark_fx.quantization import quantize
    >>> for name in ("int8_static", "int4_weight_only"):
    ...     print(quantize(session, name, progress=False).report().rows[0].weight)
    int8 channel
    int4 group 32
    """

    @isolated
    @takes_run
    def __init__(
        self,
        model: nn.Module | ExportedProgram | str | Path,
        calibration_data: Iterable[Any] | None = None,
        *,
        resources: Resources = Resources(),
        dynamic_shapes: Any = None,
    ) -> None:
        """Capture a model and read all calibration data.

        Args:
            model: Same as in `quantize`.
            calibration_data: Same as in `quantize`; it may be a generator.
            resources: Device that blocks run on, and limits of cached batches and activations (`device` and `cache`).
                The other fields apply only to a single run of `quantize`.
            dynamic_shapes: Same as in `quantize`.

        Raises:
            ConfigError: If a device or a cache cannot be used.
            CaptureError: If the model cannot be captured.
            CalibrationError: If the data is missing or unusable.
        """
        require_usable(resources, "Session", OF_SESSION)
        self._share(model, *peek(calibration_data), dynamic_shapes, resources)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuarkError("a Session cannot be copied or pickled; create one in each process")

    @classmethod
    def of(
        cls,
        model: nn.Module | ExportedProgram | str | Path | Session,
        data: Iterable[Any] | None,
        dynamic_shapes: Any,
        resources: Resources,
        *,
        missing: str,
    ) -> Session:
        """Return `model` if it is a session, or else a new session for the arguments of a call.

        Args:
            model: Same as in `quantize`.
            data: Calibration data.
            dynamic_shapes: Same as in `quantize`.
            resources: Resources of the call; only `device` and `cache` apply.
            missing: Message of the error about missing data.

        Raises:
            ConfigError: If data, shapes, or resources are given together with a session.
            CalibrationError: If data is missing.
        """
        if isinstance(model, Session):
            require_of_session(data, dynamic_shapes, resources)
            if not model.data.batches:
                raise CalibrationError(missing)
            return model
        first, batches = peek(data)
        if first is None:
            raise CalibrationError(missing)
        self = cls.__new__(cls)
        self._share(model, first, batches, dynamic_shapes, resources)
        return self

    @classmethod
    def of_one_run(
        cls,
        model: nn.Module | ExportedProgram | str | Path,
        config: QuantConfig,
        first: Any,
        batches: Iterable[Any],
        dynamic_shapes: Any,
        resources: Resources,
        shelf: Shelf | None = None,
        ranks: Ranks = ALONE,
    ) -> Session:
        """Return a session for a single run, which stores the batches only if the run reads them more than once.

        Args:
            model: Same as in `quantize`.
            config: Configuration of the run.
            first: First batch, or `None`.
            batches: All batches.
            dynamic_shapes: Same as in `quantize`.
            resources: Resources of the run.
            shelf: Storage for tensors of a run with an output directory; `None` for other runs.
            ranks: Processes that share the data.

        Raises:
            ConfigError: If the model is already quantized.
            CalibrationError: If batches are missing or unusable.
        """
        self = cls.__new__(cls)
        self._begin(model, first, batches, dynamic_shapes, resources, shelf, ranks)
        if (memory := resources.memory_bytes) is not None:
            # This limits the data until the needs of the passes are known.
            self.data.cache.limit_further(max(0, memory - occupied()) // 2)
        if reads_data_often(config, ranks, by_block=self.by_block or shelf is not None):
            self._keep()
        return self

    def _share(self, model: nn.Module | ExportedProgram | str | Path, *rest: Any) -> None:
        self._begin(model, *rest)
        self._keep()
        self.shares, self._first = True, None
        self._sums = {} if isinstance(model, str | Path) else {key: _sum(t) for key, t in self._tensors().items()}

    def _begin(
        self,
        model: nn.Module | ExportedProgram | str | Path,
        first: Any,
        batches: Iterable[Any],
        dynamic_shapes: Any,
        resources: Resources,
        shelf: Shelf | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if isinstance(model, Session):
            raise ConfigError(
                "the model is already a Session; pass it to quantize directly, or create another Session from its model"
            )
        if isinstance(model, str | Path):
            model = open_checkpoint(model, scratch=shelf.directory if shelf is not None else None)
        if isinstance(model, nn.Module):
            model = unwrapped(model)
        if isinstance(model, QuantizedModel):
            raise ConfigError(_QUANTIZED)
        if isinstance(model, nn.Module) and is_eager(model):
            raise ConfigError(
                "the model is the result of eager() on a quantized model; quantize the original float model instead"
            )
        if isinstance(model, nn.Module) and (method := method_of(model)):
            raise ConfigError(
                f"the model was loaded with weights quantized by {method}; pass the directory of its checkpoint "
                f"instead, which quark_fx decodes if it can, or load the model with dequantize=True if {method} "
                "supports that"
            )
        if first is None and not isinstance(model, ExportedProgram):
            raise CalibrationError(
                "calibration_data is missing or empty; pass batches of real inputs, because the model is captured with "
                "the first batch (a generator can be read only once; create a new one)"
            )
        self.model, self.unread, self.shares, self._first = model, batches, False, first
        self.captured = capture_graph(model, first, dynamic_shapes=dynamic_shapes)
        if any(map(_computes_with_codes, self.captured.module.graph.nodes)):
            raise ConfigError(_QUANTIZED)
        self._graphs: dict[Hashable, tuple[GraphModule, list[PassRecord]]] = {}
        self._known: dict[Hashable, Known] = {}
        home = device_of(self.captured.module)
        place = usable_device(resources) or home
        self.device, self.by_block = place, place != home
        names = self.captured.signature.input_names
        self.data = CalibrationData(ActivationCache(resources.cache, place), names, ranks)
        self._place_on(shelf, self.data)

    def _place_on(self, shelf: Shelf | None, data: CalibrationData) -> None:
        """Put the cache's files into the directory of a shelf, unless the cache's budget names another directory.

        Raises:
            ConfigError: If there is a shelf and the model is not on the CPU.
        """
        if shelf is None:
            return
        home = device_of(self.captured.module)
        if home.type != "cpu":
            raise ConfigError(
                f"a run with output_dir needs a model on the CPU, but this model is on {home}; load it on "
                f'the CPU and pass resources=Resources(device="{home}", ...) to run its blocks there'
            )
        if data.cache.budget.directory is None:
            data.cache.budget = replace(data.cache.budget, directory=shelf.directory)

    def _keep(self) -> None:
        """Store the batches in the cache."""
        try:
            with accelerator.checked_together():  # check the batches after all of them are stored
                self.data.keep_batches(flat_batches(self.captured, self.unread))
        except BaseException:
            self.data.cache.close()
            raise
        self.unread = ()

    @contextmanager
    def run(self, config: QuantConfig, shelf: Shelf | None = None) -> Iterator[Context]:
        """Yield the context of a run, and close its cache at the end.

        After a failed run, the results that runs share are dropped, because they may be incomplete.

        Args:
            config: Configuration of the run.
            shelf: Storage for tensors, if any; a run with a shelf does not use results of other runs.

        Raises:
            QuarkError: If the model was changed after the session began; the message names the changed tensors.
        """
        context = self.context(config, shelf)
        try:
            yield context
        except BaseException:
            self._graphs, self._known = {}, {}
            raise
        finally:
            context.cache.close()

    def context(self, config: QuantConfig, shelf: Shelf | None = None) -> Context:
        """Return the context of a run; `run`, unlike this method, also closes the context's cache.

        Arguments and errors are the same as for `run`.
        """
        if self.shares:
            self._require_unchanged()
        data = self.data.for_another_run() if self.shares else self.data
        self._place_on(shelf, data)
        learns = any(map(learns_from_data, config.passes))
        data.divide(divisible=learns and divisible(self.captured), learns=learns)
        if not data.batches:
            data.unread = flat_batches(self.captured, self.unread)
        context = Context(config, data, self.device, by_block=self.by_block or shelf is not None)
        context.known = self.known(context) if shelf is None else None
        paths = {reads.path for p in config.passes if isinstance(reads := getattr(p, "reads", None), FileHessian)}
        context.importance = {path: moments_by_weight(self.model, path) for path in paths}
        return context

    def known(self, context: Context) -> Known | None:
        """Return the results that runs with the same float graph and batches share; `None` if this run cannot share."""
        if not self.shares or (graph := _float_graph_key(context.config)) is None:
            return None
        shared = self._known.setdefault((graph, len(context.data.batches)), Known())
        for other in self._known.values():
            if other is not shared:
                other.weights.clear()
        return shared

    def rewritten(
        self, context: Context, shelf: Shelf | None = None, verify_inputs: tuple[Any, ...] | None = None
    ) -> tuple[GraphModule, list[PassRecord]]:
        """Return a copy of the captured graph after the passes that need no data, and the records of these passes.

        Args:
            context: Context of the run.
            shelf: Storage for tensors, if any. With a shelf, results of other runs are not used.
            verify_inputs: Batch on which the outputs are compared after each exact pass, if any; see `run_passes`. With
                a batch, results of other runs are not used.
        """
        rewrites, _ = divided(context.config.passes)
        keys = _keys(rewrites, context.config)
        if not self.shares or shelf is not None or verify_inputs is not None or keys is None:
            gm = copy_graph(self.captured.module, lazy=True)
            gm.meta["shelf"] = shelf
            return run_passes(gm, rewrites, verify_inputs=verify_inputs, context=context, in_place=True)
        gm, records, graphs = self.captured.module, list[PassRecord](), dict(self._graphs)
        self._graphs = {}
        for end, p in enumerate(rewrites, 1):
            result = graphs.get(keys[:end]) or run_passes(gm, [p], context=context)
            self._graphs[keys[:end]] = result
            gm, record = result
            records += record
        return copy_graph(gm, lazy=True), records

    def example(self) -> tuple[Any, ...] | None:
        """Return the flat inputs of the first batch; `None` without batches."""
        if self.shares:
            return tuple(self.data.inputs(0)) if self.data.batches else None
        return None if self._first is None else tuple(self.captured.signature.leaves_of(self._first))

    def shared(self) -> list[Tensor]:
        """Return the tensors of the captured model, and of the rewritten graphs that runs share."""
        graphs = [self.captured.module, *(gm for gm, _ in self._graphs.values())]
        return [tensor for gm in graphs for tensor in stored_tensors(gm).values()]

    def _tensors(self) -> dict[str, Tensor]:
        """Return the current values of the model's tensors that the captured graph reads."""
        captured = {name: t for name, t in stored_tensors(self.captured.module).items() if not t.is_meta}
        if not isinstance(self.model, nn.Module):
            return captured
        current: dict[str, Tensor] = {**dict(self.model.named_parameters(remove_duplicate=False))}
        current |= dict(self.model.named_buffers(remove_duplicate=False))
        return {name: current.get(name, t) for name, t in captured.items()}

    def _require_unchanged(self) -> None:
        now = self._tensors()
        changed = [name for name, before in self._sums.items() if _sum(now[name]) != before]
        if changed:
            more = f" and {len(changed) - 3} more" * (len(changed) > 3)
            raise QuarkError(
                f"the model was changed after the Session was created, in {', '.join(changed[:3])}{more}; create a new "
                "Session from it"
            )


_QUANTIZED = "the model, or a part of it, is already quantized; quantize the original float model instead"
_ON_CODES = re.compile(r"(quark_fx|quantized|quantized_decomposed)\.|torchao\.\w*(quant|qparams|bit|int)")
"""Pattern of the names of operators that compute with codes."""


def _computes_with_codes(node: Node) -> bool:
    """Tell whether a node is an operator on codes.

    Operators of torchao also count if an operand holds codes, because some of their names do not reveal it.
    """
    name = target_name(node)
    operands = [x for one in node.all_input_nodes if isinstance(x := one.meta.get("val"), Tensor)]
    holds_codes = any(not x.dtype.is_floating_point or x.element_size() == 1 for x in operands)
    return bool(_ON_CODES.match(name)) or (name.startswith("torchao.") and holds_codes)


def _sum(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, int]:
    return tensor.shape, tensor.dtype, tensor.device, digest(tensor)


def require_of_session(data: Any, dynamic_shapes: Any, resources: Resources) -> None:
    """Raise `ConfigError` if arguments are given that a session already has, or resources that it does not support."""
    arguments = {"calibration_data": data, "dynamic_shapes": dynamic_shapes}
    names = [name for name, value in arguments.items() if value is not None]
    if names := [*names, *resources.given((*OF_SESSION, "distributed"))]:
        raise ConfigError(
            f"{', '.join(names)} cannot be passed together with a Session; pass these arguments when you create the "
            "Session, or pass the model itself"
        )


def _keys(passes: Sequence[GraphPass], config: QuantConfig) -> tuple[Hashable, ...] | None:
    """Return a key for each pass, so that equal sequences of keys mean equal graphs; `None` if that is impossible.

    Passes of this package depend only on their options, and on the configuration if they take the context. Other passes
    may read data that changes between runs.
    """
    if not all(map(is_ours, passes)):
        return None
    keys = tuple((p, config) if takes_context(p) else p for p in passes)
    try:
        hash(keys)
    except TypeError:
        return None
    return keys


def _float_graph_key(config: QuantConfig) -> Hashable:
    """Return a cache key for the float graph of a configuration; `None` if runs cannot share the graph."""
    rewrites, later = divided(config.passes)
    ours = {Stage.PLANNED: insert_observers, Stage.OBSERVED: calibrate, Stage.SETTLED: convert}
    if any(pass_stage(p) is Stage.FLOAT or ours.get(pass_stage(p), p) is not p for p in later):
        return None
    parts: tuple[QuantConfig | Override, ...] = (config, *config.overrides)
    specs = [spec for part in parts for spec in (part.weight, part.input, part.output, part.kv_cache)]
    if not all(is_ours(spec.observer) for spec in specs if isinstance(spec, TensorSpec)):
        return None
    return _keys(rewrites, config)


_DEFAULTS = (insert_observers, calibrate, convert)
"""Default passes of the stages that have exactly one pass; a configuration can replace them."""


def divided(passes: Sequence[GraphPass]) -> tuple[list[GraphPass], list[GraphPass]]:
    """Return all passes in the order of their stages, in two lists; the second begins at the first that needs data."""
    stages = {pass_stage(p) for p in passes}
    passes = [*passes, *(default for default in _DEFAULTS if pass_stage(default) not in stages)]
    ordered = sorted(passes, key=lambda p: list(Stage).index(pass_stage(p)))
    rewrites = list(itertools.takewhile(lambda p: not needs_context(p), ordered))
    return rewrites, ordered[len(rewrites) :]


def reads_data_often(config: QuantConfig, ranks: Ranks, *, by_block: bool) -> bool:
    """Tell whether a run reads its data more than once, or in parts, so that it has to store the data."""
    return by_block or not ranks.alone or any(map(needs_context, config.passes))


def divisible(captured: Captured) -> bool:
    """Tell whether dimension 0 of all tensor inputs is the same dynamic dimension, and thus the batch dimension."""
    values = [node.meta["val"] for node in placeholders(captured.module)]
    sizes = [value.shape[0] if value.dim() else 1 for value in values if isinstance(value, torch.Tensor)]
    alike = len({str(size) for size in sizes}) == 1 and all(static_size(size) is None for size in sizes)
    # If the model compares batch sizes, the captured path may not be valid for parts of a batch.
    return alike and not captured.signature.compares_batches


def peek(data: Any, purpose: str = "calibration") -> tuple[Any, Iterable[Any]]:
    """Return the first batch, or `None` without batches, and an iterable over all batches.

    Args:
        data: Batches as the user passed them.
        purpose: Purpose of the batches, for error messages.

    Raises:
        CalibrationError: If `data` is not an iterable of batches, or the first batch is `None`.
    """
    if data is None:
        return None, ()
    require_batches(data, f"{purpose}_data", CalibrationError)
    iterator = as_called(data)
    for first in iterator:
        if first is None:
            raise CalibrationError(
                f"{purpose} batch 0 is None; pass tensors, tuples of inputs, or dicts of keyword arguments"
            )
        return first, data if isinstance(data, list | tuple) else itertools.chain([first], iterator)
    return None, ()


def flat_batches(captured: Captured, batches: Iterable[Any], purpose: str = "calibration") -> Iterator[list[Any]]:
    """Yield the flat inputs of each batch.

    Args:
        captured: Model that reads the batches.
        batches: Batches as the user passed them.
        purpose: Purpose of the batches, for error messages.

    Raises:
        CalibrationError: If a batch does not fit the model, or holds an index that is out of range for its embedding
            table; the message contains the index of the batch.
    """
    rows = _rows_selected(captured.module)
    for index, batch in enumerate(batches):
        try:
            leaves = captured.signature.leaves_of(batch)
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
                    f"{purpose} batch {index}: input {name} is empty, shape {tuple(leaf.shape)}; omit this batch"
                )
        for position, count in rows.items():
            leaf = leaves[position]
            if not isinstance(leaf, Tensor):
                continue
            name = captured.signature.input_names[position]
            ends = torch.stack(leaf.aminmax())
            fits = ((ends >= 0) & (ends < count)).all()
            accelerator.require(fits, partial(_out_of_range, f"{purpose} batch {index}: input {name}", ends, count))
        yield leaves


def _out_of_range(name: str, ends: Tensor, rows: int) -> CalibrationError:
    low, high = ends.tolist()
    return CalibrationError(
        f"{name} contains indices from {low} to {high}, but selects from a table of {rows} rows; tokenize with the "
        "model's own tokenizer, and replace marks for ignored positions, such as -100"
    )


def _rows_selected(gm: GraphModule) -> dict[int, int]:
    """Return the number of rows of the embedding table that each input of indices selects from; keys are positions.

    An input counts only if it reaches the table with its values unchanged. For several tables, the smallest counts.
    """
    positions = {node: position for position, node in enumerate(placeholders(gm))}
    rows: dict[int, int] = {}
    for node in gm.graph.nodes:
        if node.args[:1] and node.args[0] in positions and _holds_all_values(gm, node):
            positions[node] = positions[node.args[0]]
        if target_name(node) == EMBEDDING and node.args[1] in positions:
            count = int(value_of(gm, node.args[0]).shape[0])
            position = positions[node.args[1]]
            rows[position] = min(count, rows.get(position, count))
    return rows


def _holds_all_values(gm: GraphModule, node: Node) -> bool:
    """Tell whether the result of a node contains the values of its first argument and no other values."""
    if target_name(node) == CAST:
        return _holds_range(value_of(gm, node.all_input_nodes[0]).dtype, value_of(gm, node).dtype)
    return motion(node) in KEEPS_ORDER | {Motion.PERMUTE, Motion.EXPAND, Motion.REPEAT}


def _holds_range(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether the integer dtype `target` represents all values of the integer dtype `source`; booleans do not."""
    if any(dtype == torch.bool or dtype.is_floating_point or dtype.is_complex for dtype in (source, target)):
        return False
    a, b = torch.iinfo(source), torch.iinfo(target)
    return b.min <= a.min and a.max <= b.max


__all__ = [
    "Session",
    "divided",
    "divisible",
    "flat_batches",
    "peek",
    "reads_data_often",
    "require_of_session",
]
