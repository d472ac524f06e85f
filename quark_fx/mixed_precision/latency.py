"""Latency of a call in a target's runtime, for whole models and for single operators in each candidate's formats."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from quark_fx.config.quant_config import OperatorSpecs, QuantConfig
from quark_fx.config.target import Target
from quark_fx.errors import ConfigError, QuarkError
from quark_fx.export.runtime.session import open_session
from quark_fx.export.to_onnx.export_onnx import onnx
from quark_fx.mixed_precision.candidates import Candidate, float_config
from quark_fx.mixed_precision.groups import Group
from quark_fx.mixed_precision.isolated_operators import IsolatedOperator, isolate_operators
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.plan.placement import PlannedOperator
from quark_fx.quantization import quantize
from quark_fx.session import Session
from quark_fx.system.isolation import without_warnings

_ROUNDS = 11
"""Number of rounds. Each round times every model once; the median ignores rounds that other processes slow down."""

_TIME_SLICE = 4e-3
"""Seconds per model in each round; the fastest call in this time slice is used."""

_CALLS = 20
"""Largest number of calls in a time slice."""

Call = Callable[[], object]
"""Function that runs a model once."""


@dataclass
class Clock:
    """Timer for configurations of a model on the same inputs.

    Attributes:
        session: Model and its data.
        leaves: Flat inputs of a call.
        config: Configuration of a candidate, whose target runs the models.
        milliseconds: Latency of the float model in milliseconds.
    """

    session: Session
    leaves: Sequence[Any]
    config: QuantConfig

    def __post_init__(self) -> None:
        """Prepare the float model.

        Raises:
            ConfigError: If the target's runtime is not available.
        """
        require_timed(self.config.target)
        self._float = self._call(quietly(self.session, float_config(self.config).replace(passes=())))
        (times,) = time_interleaved([self._float])
        self.milliseconds = statistics.median(times)

    def time(self, qmodel: QuantizedModel) -> float:
        """Return the latency of a model in milliseconds.

        Time slices of the model alternate with time slices of the float model. The result is the float model's
        `milliseconds` times the median ratio of the two, which makes all timed models comparable, even on a busy
        machine.
        """
        float_times, times = time_interleaved([self._float, self._call(qmodel)])
        return self.milliseconds * statistics.median(b / a for a, b in zip(float_times, times, strict=True))

    def _call(self, qmodel: QuantizedModel) -> Call:
        return call_of(qmodel, self.leaves)


def require_timed(target: Target) -> None:
    """Raise `ConfigError` if the target does not have a runtime on this machine."""
    if target.latency_runtime not in _OPENED:
        raise ConfigError(
            f"cannot measure latency for target {target.name!r} on this machine; use a budget of bits, size, or error, "
            "or candidates whose target is 'onnx', 'onnx_vnni' (ONNX Runtime) or 'inductor' (compile())"
        )


def quietly(model: Any, config: QuantConfig, data: Any = None) -> QuantizedModel:
    """Quantize a model without a progress bar or warnings, because the user did not request these runs."""
    with without_warnings():
        return quantize(model, config, data, progress=False)


def call_of(qmodel: QuantizedModel, leaves: Sequence[Any]) -> Call:
    """Return a function that runs a model once in the runtime of its target, on as many threads as torch uses.

    Here, the threads of an ONNX Runtime session sleep between calls; by default, they spin for a while, which would
    slow the next model. If there are several threads, every call therefore has to wake them, unlike in applications
    whose calls follow each other closely.
    """
    return _OPENED[qmodel.config.target.latency_runtime](qmodel, leaves)


def _in_onnxruntime(qmodel: QuantizedModel, leaves: Sequence[Any]) -> Call:
    def configure(options: Any) -> None:
        options.intra_op_num_threads = torch.get_num_threads()
        options.add_session_config_entry("session.force_spinning_stop", "1")  # spinning threads slow the next model

    with tempfile.TemporaryDirectory() as folder:
        opened = open_session(onnx(qmodel, Path(folder, "timed.onnx")), configure=configure)
    tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
    feed = {value.name: leaf.numpy(force=True) for value, leaf in zip(opened.get_inputs(), tensors, strict=True)}
    return lambda: opened.run(None, feed)


def _compiled(qmodel: QuantizedModel, leaves: Sequence[Any]) -> Call:
    compiled = qmodel.compile()
    args, kwargs = pytree.tree_unflatten(leaves, qmodel.signature.in_spec)
    return lambda: compiled(*args, **kwargs)


_OPENED: Mapping[str, Callable[[QuantizedModel, Sequence[Any]], Call]] = {
    "onnxruntime": _in_onnxruntime,
    "compile": _compiled,
}
"""Functions that open a model, by `Target.latency_runtime`."""


def time_interleaved(calls: Sequence[Call]) -> list[list[float]]:
    """Time calls in alternation; return the milliseconds of each call: one value per round, the fastest of a slice."""
    counts = []
    for call in calls:
        call()  # the first call allocates memory
        counts.append(min(_CALLS, max(2, int(_TIME_SLICE / max(_timed(call), 1e-6)))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(_ROUNDS):
        for call, count, of_call in zip(calls, counts, times, strict=True):
            of_call.append(1e3 * min(_timed(call) for _ in range(count)))
    return times


def _timed(call: Call) -> float:
    """Return the seconds of a call; on one thread, the CPU time, which excludes other work on the machine."""
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = now()
    call()
    return now() - start


def operator_latencies(
    gm: GraphModule,
    leaves: Sequence[Any],
    candidates: Sequence[Candidate],
    operators: Sequence[PlannedOperator],
    groups: Sequence[Group],
) -> list[list[float]]:
    """Return the latency of each group's operators in milliseconds, by group and candidate.

    Each operator runs as a separate model, in alternation with the same operator in other candidates' formats. Of
    several operators with the same computation on tensors of the same shapes, only one is timed. The times include
    conversions of inputs and outputs.

    Args:
        gm: Float graph.
        leaves: Flat inputs of the graph.
        candidates: Candidates.
        operators: Operators of the graph.
        groups: Groups of these operators.
    """
    places = sorted({place for group in groups for place in group.places})
    parts = isolate_operators(gm, dict.fromkeys(operators[place].node for place in places), leaves)
    times_by_key: dict[str, list[float]] = {}
    by_place: dict[int, list[float]] = {}
    for place in places:
        op = operators[place]
        part, specs = parts[op.node], [candidate.specs(op) for candidate in candidates]
        key = f"{part.key} {specs}"
        if key not in times_by_key:
            try:
                times_by_key[key] = _times(part, candidates, specs)
            except QuarkError as error:
                error.add_note(f"while measuring the latency of {op.name!r} by itself")
                raise
        by_place[place] = times_by_key[key]
    # A recurrent layer is one node with several weights; count it once.
    once = [{operators[place].node: by_place[place] for place in group.places} for group in groups]
    return [[sum(times[i] for times in of_group.values()) for i in range(len(candidates))] for of_group in once]


def _times(
    part: IsolatedOperator, candidates: Sequence[Candidate], specs: Sequence[OperatorSpecs | None]
) -> list[float]:
    program = torch.export.export(part.module, part.inputs)
    configs = [_config_of(candidate.config, op_specs) for candidate, op_specs in zip(candidates, specs, strict=True)]
    calls = [call_of(quietly(program, config, [part.inputs]), part.inputs) for config in configs]
    return [statistics.median(times) for times in time_interleaved(calls)]


def _config_of(config: QuantConfig, specs: OperatorSpecs | None) -> QuantConfig:
    """Return the configuration of a model whose single operator gets `specs`; `None` keeps it in float."""
    if specs is None:
        return float_config(config).replace(passes=())
    return config.replace(
        weight=specs.weight, input=specs.input, output=specs.output, exclude=(), overrides=(), passes=()
    )


__all__ = ["Clock", "operator_latencies", "require_timed"]
