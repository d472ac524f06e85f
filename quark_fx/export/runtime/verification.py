"""Compare a quantized model with its export, output by output or node by node."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from quark_fx.checkpoints.files import GRAPH_FILE
from quark_fx.config.target import TARGETS
from quark_fx.engine.calibration_data import first_sample, require_batches
from quark_fx.errors import ExportError
from quark_fx.export.runtime.checkpoint_process import named_tensors
from quark_fx.export.runtime.checkpoint_runners import (
    CHECKPOINT_RUNNERS,
    CheckpointRunner,
    is_checkpoint,
)
from quark_fx.export.runtime.decoding import decoded_steps, is_generation_folder
from quark_fx.export.runtime.rounding_noise import ROUNDINGS, Run, orderings, runs_with_noise
from quark_fx.export.runtime.runners import RUNNERS, FileInput, FileRunner, OnnxRuntimeRunner
from quark_fx.export.runtime.session import adds_pairs_in_16_bits
from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, device_of, parameter, results_of, static_size, target_name
from quark_fx.graph.operators import argument
from quark_fx.graph.random_draws import random_draws
from quark_fx.graph.signature import split_batch
from quark_fx.model.qat import QATModel
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.serialization import load
from quark_fx.numbers.formats import parse_format
from quark_fx.numbers.ops import dequantize, spread
from quark_fx.system.isolation import as_called, isolated, warn
from quark_fx.system.names import unknown
from quark_fx.system.options import checked_call

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Difference:
    """The difference between the file and torch in one value.

    Attributes:
        name: Name of the output or node.
        max_abs: Largest absolute difference.
        step: Quantization step of the value: its scale if the graph quantizes it, or else 1/255 of its range over
            the batches, but at least 64 times the float32 machine epsilon times its largest magnitude.
        share: Share of elements that differ by more than half a step, from 0 to 1.
        sqnr: Signal-to-noise ratio of the file's value against torch's value, in dB.
        uncompared: Number of elements that are NaN in both, which cannot be compared.
    """

    name: str
    max_abs: float
    step: float
    share: float
    sqnr: float
    uncompared: int = 0

    @property
    def steps(self) -> float:
        """Largest difference, in quantization steps."""
        return self.max_abs / self.step if self.step else 0.0


@dataclass(frozen=True)
class Verification:
    """The differences of all outputs (or nodes), in graph order. Its `str` is a table.

    Attributes:
        differences: Differences of the compared values.
        skipped: Names of quantized values that could not be compared separately: ONNX Runtime does not output 4-bit
            codes, codes of 8-bit floats, or codes inside a kernel. For llama.cpp, names of outputs other than logits.
        cause: Effect of this processor's arithmetic that explains a difference of more than one step; empty if none.
        runtime: Name of the runtime that ran the file.
        decode_steps: Number of decode steps after the prompts, for a generation folder; `differences` has an entry for
            each step.
        shipped: Differences of the outputs of the unmodified file, for outputs that change when the codes become
            outputs, too: ONNX Runtime then fuses less, so some kernels compared by node do not run in the file.
        draws: Node that draws the random numbers on which an output depends, by output.
        wrong: Name of the first value whose difference rounding does not explain; empty if there is none.
    """

    differences: tuple[Difference, ...]
    skipped: tuple[str, ...] = ()
    cause: str = ""
    shipped: tuple[Difference, ...] = ()
    runtime: str = "onnxruntime"
    decode_steps: int = 0
    draws: Mapping[str, str] = field(default_factory=dict)
    wrong: str = ""

    @property
    def comparable(self) -> tuple[Difference, ...]:
        """Differences of values that do not depend on random numbers."""
        return tuple(d for d in (*self.differences, *self.shipped) if d.name not in self.draws)

    @property
    def first_wrong(self) -> Difference | None:
        """First difference of more than one quantization step; `None` if none is that large."""
        return next((d for d in self.comparable if not d.steps <= 1), None)

    @property
    def verdict(self) -> str:
        """`"correct"`, `"correct up to rounding in a deep network"`, `"wrong"`, or `"not comparable"`, and why.

        A difference of more than one quantization step counts as rounding under two conditions: each quantized value
        whose codes the runtime outputs is within a step of torch's result from the same codes, and torch's outputs
        change as much if every operator rounds slightly differently, or, for llama.cpp, if the inputs of quantized
        matrices are rounded to 8 bits.
        """
        drawn = f"the model draws random numbers in {', '.join(dict.fromkeys(self.draws.values()))}"
        if not self.comparable:
            return f"not comparable: {drawn}"
        if self.wrong:
            return f"wrong, from {self.wrong} on"
        verdict = "correct" if self.first_wrong is None else "correct up to rounding in a deep network"
        random = [d.name for d in self.differences if d.name in self.draws]
        return f"{verdict}; not comparable are {', '.join(random)}: {drawn}" if random else verdict

    @property
    def max_steps(self) -> float:
        """Largest difference in quantization steps, of the file with codes as outputs or of the unmodified file."""
        return max((d.steps for d in (*self.differences, *self.shipped)), default=0.0)

    @property
    def unrelated(self) -> bool:
        """Tell whether no value of the file resembles torch's value, without a known cause."""
        apart = all(d.sqnr < _UNRELATED_BELOW_DB for d in self.comparable)
        return apart and bool(self.wrong) and not self.cause

    def __getitem__(self, name: str) -> Difference:
        """Return the difference of an output or node; raise `ConfigError` for a name that was not compared."""
        names = [difference.name for difference in self.differences]
        if name not in names:
            raise unknown("output or node", name, names)
        return self.differences[names.index(name)]

    def __str__(self) -> str:
        width = max([4, *(len(d.name) for d in (*self.differences, *self.shipped))])
        header = f"{'name'.ljust(width)}  {'max |Δ|':>10}  {'step':>10}  {'steps':>7}  {'>½ step':>8}  {'SQNR dB':>8}"
        lines, as_shipped = (
            [
                f"{d.name.ljust(width)}  {d.max_abs:10.3g}  {d.step:10.3g}  {d.steps:7.3f}  {d.share:8.2%}"
                f"  {d.sqnr:8.1f}"
                for d in differences
            ]
            for differences in (self.differences, self.shipped)
        )
        if as_shipped:
            lines += ["file without per-node outputs, which may run other kernels:", *as_shipped]
        if self.decode_steps:
            first = f"{self.first_wrong.name} is the first to differ" if self.first_wrong else "none differs"
            lines.append(
                f"{self.decode_steps} decode steps after the prompts: {first} by more than a quantization step"
            )
        skipped = [f"not compared: {', '.join(self.skipped)}"] if self.skipped else []
        skipped += ["no output resembles the results of torch: the file may be of another model"] * self.unrelated
        left_out = [
            f"{d.name}: {d.uncompared} values not compared, NaN in both" for d in self.differences if d.uncompared
        ]
        verdict = f"verdict: {self.verdict}"
        return "\n".join([header, *lines, *left_out, *skipped, *([self.cause] if self.cause else []), verdict])


@checked_call
@isolated
def verify(
    qmodel: QuantizedModel | nn.Module,
    path: str | os.PathLike[str],
    batches: Iterable[Any],
    *,
    per_node: bool = False,
    optimize: bool | None = None,
    session_options: Any = None,
    runtime: str | None = None,
    decode_steps: int = 32,
) -> Verification:
    """Run the same batches in torch and in the runtime of the file, and compare the outputs.

    Two correct kernels may round a value between two codes differently, and a deep network propagates the change, so
    the difference of an output says little about the operators. Outputs after `topk`, `argmax`, or `sort` say even
    less: ties between equal codes are broken differently. Values that are NaN in both are not compared; a warning gives
    their number. A value that is NaN in only one counts as an infinite difference.

    With `per_node`, every quantized value whose codes the runtime can output is compared separately: torch computes it
    from the codes that ONNX Runtime computed before it, so differences do not add up from kernel to kernel. All other
    quantized values are in `skipped`. The unmodified file also runs: outputs that differ from the run with codes as
    outputs are in `shipped`, and affect the verdict.

    Checkpoints and GGUF files are loaded by transformers, or with `runtime="llama.cpp"` by llama.cpp
    (llama-cpp-python), in a separate process. llama.cpp rounds the inputs of quantized matrices to 8 bits; the verdict
    allows for the difference that this makes in torch. Results of `QuantizedModel.save` are loaded by `quark_fx.load`
    and run in torch.

    For a folder of graphs with a KV cache, torch decodes greedily, and the folder decodes the same tokens. The logits
    of each step are compared: `prompt`, `step 1`, and so on.

    Args:
        qmodel: Exported model, or a `QATModel` whose conversion was exported. For a folder that decodes, the float
            model or a model from `eager()` also work.
        path: ONNX file, directory of a checkpoint or of `QuantizedModel.save`, GGUF file, or folder written by
            `ExportedModel.save_pretrained` or `quark_fx.export.genai`.
        batches: Batches in the form of calibration data; prompts for a folder that decodes.
        per_node: Whether to compare every quantized value and output separately, each computed from the same codes.
        optimize: Whether ONNX Runtime may fuse integer kernels; default: yes, except for 8-bit floats and 32-bit
            activations, whose fusions its CPU kernels do not implement.
        session_options: `onnxruntime.SessionOptions` that override `optimize`.
        runtime: Runtime of the file, on the CPU: `"onnxruntime"`; or `"transformers"`, `"llama.cpp"`, `"torch"`, or a
            runtime of another target, for which `per_node`, `optimize`, and `session_options` do not apply. Default:
            transformers for checkpoints and GGUF files, torch for saved models, and ONNX Runtime for all other files.
        decode_steps: Number of tokens to decode after each batch of prompts, in a folder that decodes.

    Raises:
        ConfigError: If `runtime` is unknown.
        ExportError: If the options do not apply to the runtime, batches are missing or empty, or the file
            cannot be loaded or has other inputs or outputs than the model.
    """
    if runtime is not None and runtime not in (runtimes := (*RUNNERS, *CHECKPOINT_RUNNERS, "torch")):
        raise unknown("runtime", runtime, runtimes, also=", or add one with register_runner")
    require_batches(batches, "batches", ExportError)
    if isinstance(qmodel, QATModel):
        qmodel = qmodel.convert()
    if is_generation_folder(Path(path)):
        if per_node or optimize is not None or session_options is not None or runtime not in (None, "onnxruntime"):
            raise ExportError(
                f"{path} holds graphs with a KV cache, which ONNX Runtime runs step by step; drop per_node, optimize, "
                "session_options and runtime"
            )
        return _verify_decoding(qmodel, Path(path), as_called(batches), decode_steps)
    if not isinstance(qmodel, QuantizedModel):
        raise ExportError(f"expected the result of quantize(), not {type(qmodel).__name__}")
    if runtime is None:
        saved = os.path.isfile(Path(path) / GRAPH_FILE)
        runtime = "torch" if saved else "transformers" if is_checkpoint(Path(path)) else "onnxruntime"
    if runtime != "onnxruntime" and (per_node or optimize is not None or session_options is not None):
        raise ExportError(
            "per_node, optimize and session_options only apply to ONNX Runtime; drop them, or use runtime='onnxruntime'"
        )
    if runtime == "torch":
        return _verify_saved(qmodel, Path(path), as_called(batches))
    if runtime in CHECKPOINT_RUNNERS:
        return _verify_checkpoint(qmodel, CHECKPOINT_RUNNERS[runtime](Path(path)), [*as_called(batches)])
    _require_file(path)
    quantizers, shown = _quantizers(qmodel) if per_node else [], set[str]()
    try:
        opened: Callable[..., FileRunner] = partial(RUNNERS[runtime], Path(path))
        if runtime == "onnxruntime":
            opened = partial(OnnxRuntimeRunner, Path(path), session_options, optimize=optimize)
        as_it_is = opened()
        runner = opened(edit=partial(_show_codes, quantizers, shown)) if per_node else as_it_is
    except ExportError:
        raise
    except Exception as error:  # errors of protobuf and the runtimes
        targets = [name for name, target in TARGETS.items() if target.onnx.runtime == runtime]
        again = _AGAIN + f", quantized with target={targets[0]!r}" * (len(targets) == 1)
        raise ExportError(f"{path} cannot be loaded: {error}; {again}") from error
    names = [name for name in runner.outputs if name not in shown]  # in the order of the model's outputs
    _require_output_names(names, runner.metadata, qmodel, path)
    steps, parts = _known_steps(qmodel) | dict.fromkeys(shown, 1.0), _joined_parts(qmodel)
    compared, shipped = _Comparison(steps, parts), _Comparison(steps, parts)
    count = 0
    first: list[Any] = []
    for batch in as_called(batches):
        leaves = qmodel.signature.leaves_of(batch)
        first = first or leaves
        feed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        _require_values(feed, count)
        if len(runner.inputs) != len(feed):
            raise ExportError(
                f"{path} has {len(runner.inputs)} inputs, but the model has {len(feed)}: it is not this model's "
                f"export; {_AGAIN}"
            )
        _require_shapes(runner.inputs, feed, path, count)
        results = _run(runner, feed, count)
        codes = {name: value for name, value in results.items() if name in shown}
        with torch.no_grad():
            follower = _Follower(qmodel.graph_module, codes)
            expected = [value for value in follower.run(*leaves) if isinstance(value, Tensor)]
        for name, (ours, theirs) in follower.compared.items():
            compared.add(name, ours, theirs)
        for name, ours in zip(names, expected, strict=True):
            compared.add(name, ours, results[name])
        if per_node:
            shipped_results = _run(as_it_is, feed, count)
            for name, ours in zip(names, expected, strict=True):
                shipped.add(name, ours, shipped_results[name])
        count += 1
    if not count:
        raise ExportError(_NO_BATCH)
    differences = compared.differences()
    result = Verification(
        differences,
        tuple(name for name in quantizers if name not in shown),
        shipped=tuple(d for d in shipped.differences() if d not in differences),
        runtime=runtime,
        draws=random_draws(qmodel.graph_module, qmodel.signature.output_names, _quantizers(qmodel)),
    )
    if result.first_wrong is not None:
        moved = _moved(qmodel, names, runs_with_noise(qmodel.graph_module, [first]))
        nodes = () if per_node else _first_batch_by_node(qmodel, first, opened)
        result = _judged(result, moved, nodes, orderings(qmodel.graph_module, qmodel.signature.output_names))
    if runtime == "onnxruntime" and result.max_steps > 1 and (cause := _saturation(Path(path), optimize)):
        result = replace(result, cause=cause)
    if unsaid := {d.name: d.uncompared for d in result.differences if d.uncompared}:
        warn(f"values that are NaN in torch and in the file were not compared: {unsaid}")
    return result


def _moved(qmodel: QuantizedModel, names: Sequence[str], runs: Iterable[Run]) -> dict[str, Difference]:
    """Return the difference of each output in torch from the outputs of runs with other arithmetic."""
    moved = _Comparison({}, _joined_parts(qmodel))
    for leaves, outputs in runs:
        with torch.no_grad():
            ours = [value for value in qmodel.graph_module(*leaves) if isinstance(value, Tensor)]
        for name, one, other in zip(names, ours, (v for v in outputs if isinstance(v, Tensor)), strict=True):
            moved.add(name, one, other)
    return {difference.name: difference for difference in moved.differences()}


def _first_batch_by_node(
    qmodel: QuantizedModel, leaves: list[Any], opened: Callable[..., FileRunner]
) -> tuple[Difference, ...]:
    """Return the differences of all quantized values and outputs of a batch, each computed from the same codes."""
    shown = set[str]()
    feed = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    try:
        results = opened(edit=partial(_show_codes, _quantizers(qmodel), shown)).run_in_order(feed)
    except Exception:  # any error of a runtime that cannot output the codes
        return ()
    codes = {name: value for name, value in results.items() if name in shown}
    compared = _Comparison(_known_steps(qmodel) | dict.fromkeys(shown, 1.0), _joined_parts(qmodel))
    follower = _Follower(qmodel.graph_module, codes)
    try:
        with torch.no_grad():
            expected = [value for value in follower.run(*leaves) if isinstance(value, Tensor)]
    except ExportError:  # codes of other sizes: the file belongs to another model, which its outputs show
        return ()
    for name, (ours, theirs) in follower.compared.items():
        compared.add(name, ours, theirs)
    for name, ours in zip([name for name in results if name not in shown], expected, strict=True):
        compared.add(name, ours, results[name])
    return compared.differences()


def _judged(
    result: Verification,
    moved: Mapping[str, Difference],
    nodes: Sequence[Difference],
    ordered: Collection[str] = (),
    *,
    own_steps: bool = True,
) -> Verification:
    """Return a result whose `wrong` names the first value with a difference that rounding does not explain.

    The range of an output that consists of rounding noise does not give a useful step; its step is at least twice the
    change that noise causes in torch.

    Args:
        result: Differences of the outputs.
        moved: Difference of each output in torch that rounding noise causes.
        nodes: Differences of quantized values and outputs, each computed from the same codes. They must be at most one
            step, except for outputs in `ordered`.
        ordered: Names of outputs that depend on the order of equal values (`orderings`).
        own_steps: Whether an output that consists of noise gets a step of its own; without it, such an output is wrong.
    """

    def with_own_step(difference: Difference) -> Difference:
        noise = moved.get(difference.name)
        if noise is None or noise.sqnr >= _UNRELATED_BELOW_DB or not own_steps:
            return difference
        return replace(difference, step=max(difference.step, 2 * noise.max_abs))

    def is_rounding(difference: Difference) -> bool:
        noise = moved.get(difference.name)
        if difference.steps <= 1 or noise is None:
            return difference.steps <= 1
        return difference.sqnr >= max(min(noise.sqnr, _EXACT_FROM_DB) - _SPREAD_DB, _UNRELATED_BELOW_DB)

    result = replace(
        result,
        differences=tuple(map(with_own_step, result.differences)),
        shipped=tuple(map(with_own_step, result.shipped)),
    )
    by_node = [with_own_step(d) for d in nodes if d.name not in result.draws]
    wrong = next((d.name for d in by_node if not (is_rounding(d) if d.name in ordered else d.steps <= 1)), "")
    return replace(result, wrong=wrong or next((d.name for d in result.comparable if not is_rounding(d)), ""))


def _verify_checkpoint(qmodel: QuantizedModel, runner: CheckpointRunner, batches: list[Any]) -> Verification:
    """Compare every output with the output of the model that another library loads from a checkpoint."""
    if not batches:
        raise ExportError(_NO_BATCH)
    flat = [qmodel.signature.flatten(*split_batch(batch)) for batch in batches]
    for number, leaves in enumerate(flat):  # before starting a process
        _require_values([leaf for leaf in leaves if isinstance(leaf, Tensor)], number)
    compared = _Comparison(_known_steps(qmodel))
    names, missing = dict[str, None](), dict[str, None]()
    for batch, results in zip(batches, runner.results(batches), strict=True):
        for name, ours in named_tensors(qmodel.run_batch(batch)).items():
            names[name or "output"] = None
            if name in results:
                compared.add(name or "output", ours, results[name])
            elif runner.outputs is None:
                raise ExportError(
                    f"the model in {runner.path} does not return {name or 'a single tensor'}; pass the model that was "
                    "exported to it"
                )
            else:
                missing[name or "output"] = None
    if not compared.pairs:
        raise ExportError(
            f"{runner.runtime} returns {', '.join(runner.outputs or ())}, but the model returns "
            f"{', '.join(missing)}; pass the model that was exported to {runner.path}"
        )
    gm = qmodel.graph_module
    draws = random_draws(gm, qmodel.signature.output_names)
    result = Verification(compared.differences(), tuple(missing), runtime=runner.runtime, draws=draws)
    if result.first_wrong is None:
        return result
    moved = _moved(qmodel, [*names], runner.runs(gm, flat))
    return _judged(result, moved, (), own_steps=runner.outputs is None)


def _verify_decoding(model: nn.Module, path: Path, batches: Iterable[Any], decode_steps: int) -> Verification:
    """Compare the logits of a folder's graphs with the logits of torch after every decode step."""
    if decode_steps < 1:
        raise ExportError(f"decode_steps={decode_steps} must be at least 1")
    compared, moved = _Comparison({}), _Comparison({})
    first = None
    for pairs, disturbed in decoded_steps(model, path, batches, decode_steps):
        first = first or (pairs, disturbed)
        for name, (ours, theirs) in pairs.items():
            compared.add(name, ours, theirs)
    if first is None:
        raise ExportError(_NO_BATCH)
    result = Verification(compared.differences(), decode_steps=decode_steps)
    if result.first_wrong is None:
        return result
    pairs, disturbed = first
    for seed in range(ROUNDINGS):
        for (name, (ours, _)), other in zip(pairs.items(), disturbed(seed), strict=True):
            moved.add(name, ours, other)
    return _judged(result, {difference.name: difference for difference in moved.differences()}, ())


def _verify_saved(qmodel: QuantizedModel, path: Path, batches: Iterable[Any]) -> Verification:
    """Compare every output with the output of the model that `load` reads; for the first batch, compare every node."""
    gm = qmodel.graph_module
    saved = load(path, device=device_of(gm)).graph_module
    named = [node.name for node in gm.graph.nodes if node.op == "call_function"]
    compared = _Comparison(_known_steps(qmodel), _joined_parts(qmodel))
    by_node = _Comparison(dict.fromkeys(_quantizers(qmodel), 1.0))
    count = 0
    for batch in batches:
        leaves = qmodel.signature.leaves_of(batch)
        _require_values([leaf for leaf in leaves if isinstance(leaf, Tensor)], count)
        ours, outputs = _values(gm, leaves)
        try:
            theirs, saved_outputs = _values(saved, leaves)
        except Exception as error:  # any error of an operator in another model's graph
            raise ExportError(f"{path} does not run on batch {count}: {error}; {_SAVE_AGAIN}") from error
        if outputs.keys() != saved_outputs.keys():
            raise ExportError(
                f"{path} has {len(saved_outputs)} outputs, but the model has {len(outputs)}; {_SAVE_AGAIN}"
            )
        for place, value in outputs.items():
            compared.add(qmodel.signature.output_names[place], value, saved_outputs[place])
        if not count:
            for name in named:
                if name in ours and name in theirs and ours[name].shape == theirs[name].shape:
                    by_node.add(name, ours[name], theirs[name])
        count += 1
    if not count:
        raise ExportError(_NO_BATCH)
    draws = random_draws(gm, qmodel.signature.output_names, named)
    result = Verification(compared.differences(), runtime="torch", draws=draws)
    return result if result.first_wrong is None else _judged(result, {}, by_node.differences())


def _values(gm: torch.fx.GraphModule, leaves: list[Any]) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
    """Return the tensors that a graph computes for a batch, by node, and the tensors that it outputs, by position."""
    recorder = _Recorder(gm)
    with torch.no_grad():
        outputs = recorder.run(*leaves)
    return recorder.values, {place: value for place, value in enumerate(outputs) if isinstance(value, Tensor)}


class _Recorder(Interpreter):
    """Interpreter that runs a graph and stores the tensors that its nodes compute."""

    def __init__(self, gm: torch.fx.GraphModule) -> None:
        super().__init__(gm)
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and isinstance(value, Tensor) and not value.is_complex():
            self.values[n.name] = value
        return value


def _saturation(path: Path, optimize: bool | None) -> str:
    """Return a message that names the kernels of a file that saturate on this processor; empty if none does."""
    from quark_fx.export.runtime.report import saturating_kernels

    if not adds_pairs_in_16_bits():
        return ""
    try:
        names = saturating_kernels(path, optimize=optimize)
    except ExportError:  # the file runs only with the caller's session options
        return ""
    if not names:
        return ""
    return (
        f"this processor (x64 without VNNI) adds pairs of 8-bit products in 16 bits, which saturates in "
        f"{len(names)} kernels: {', '.join(names[:5])}{', …' * (len(names) > 5)}; quantize with target='onnx' and "
        "int8 weights, or with uint8 weights"
    )


def _run(runner: FileRunner, feed: Sequence[Tensor], batch: int) -> dict[str, Tensor]:
    """Return the named outputs of a file for a batch."""
    try:
        return runner.run_in_order(feed)
    except Exception as error:  # errors of the runtime
        raise ExportError(
            f"{runner.path} does not run on batch {batch}: {error}; pass batches of the sizes and types that the "
            "model accepts, or exclude the operator named above from quantization"
        ) from error


_UNRELATED_BELOW_DB = 3.0
"""Signal-to-noise ratio in dB below which two values count as unrelated: the noise has half of the signal's power."""

_EXACT_FROM_DB = 60.0
"""Signal-to-noise ratio in dB at and above which the effect of rounding counts as none."""

_SPREAD_DB = 10.0
"""Margin in dB by which rounding may change an output more in the compared batches than in the runs with noise."""

_AGAIN = "export it again with qfx.export.onnx"
_SAVE_AGAIN = "it was saved from another model; save this model again"
_NO_BATCH = "no batch to verify with; pass at least one"


def _require_file(path: str | os.PathLike[str]) -> None:
    try:
        os.stat(path)
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{os.fspath(path)!r} cannot be read: {error}; export it first with qfx.export.onnx, huggingface, or gguf"
        ) from error
    if not os.path.isfile(path):
        raise ExportError(f"{path} is a directory or a device; pass the file that qfx.export.onnx wrote")


def _require_output_names(
    names: Sequence[str], metadata: Mapping[str, str], qmodel: QuantizedModel, path: str | os.PathLike[str]
) -> None:
    """Raise `ExportError` if the names of the file's outputs are not those that were written, or in another order."""
    from quark_fx.export.to_onnx.export_onnx import CHOSEN_NAMES, named_apart

    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ExportError(f"{path} has several outputs named {', '.join(repeated)}; {_AGAIN}")
    signature = qmodel.signature
    results = zip(
        named_apart(signature.output_names, signature.input_names), results_of(qmodel.graph_module), strict=True
    )
    expected = [name for name, node in results if isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)]
    if len(names) != len(expected):
        raise ExportError(
            f"{path} has {len(names)} outputs, but the model has {len(expected)}: it is not this model's export; "
            f"{_AGAIN}"
        )
    try:
        chosen = json.loads(metadata[CHOSEN_NAMES]) if CHOSEN_NAMES in metadata else expected
    except ValueError as error:
        raise ExportError(f"{path} has damaged metadata {CHOSEN_NAMES!r}; {_AGAIN}") from error
    if list(names) != chosen:
        raise ExportError(
            f"{path} has the outputs {', '.join(names)}, but the model has {', '.join(expected)}; {_AGAIN}"
        )


def _require_shapes(
    inputs: Sequence[FileInput], feed: Sequence[Tensor], path: str | os.PathLike[str], batch: int
) -> None:
    """Raise `ExportError` if an input does not have the sizes that the file requires, even if torch accepts it."""
    for value, tensor in zip(inputs, feed, strict=True):
        if value.shape is None:
            continue
        fits = len(value.shape) == tensor.dim()
        if not fits or any(f not in (None, size) for f, size in zip(value.shape, tensor.shape, strict=True)):
            sizes = ", ".join("any" if size is None else str(size) for size in value.shape)
            raise ExportError(
                f"batch {batch}: {path} has an input {value.name!r} of shape ({sizes}), but the batch has shape "
                f"{tuple(tensor.shape)}: the file is from another model, or from this one with fixed sizes; {_AGAIN}, "
                "or pass batches of the file's sizes"
            )


def _require_values(feed: list[Tensor], batch: int) -> None:
    """Raise `ExportError` if an input is empty, or contains NaN, which a quantizer would turn into a number."""
    for position, leaf in enumerate(feed):
        if (sample := int(first_sample(leaf.isnan()))) >= 0:
            raise ExportError(f"batch {batch}: input {position} holds NaN in sample {sample}; pass batches without NaN")
        if not leaf.numel():
            shape = tuple(leaf.shape)
            raise ExportError(f"batch {batch}: input {position} is empty, shape {shape}; pass batches with values")


class _Follower(Interpreter):
    """Interpreter that compares every quantized value with the codes of a runtime, and continues with those codes."""

    def __init__(self, gm: torch.fx.GraphModule, codes: dict[str, Tensor]) -> None:
        super().__init__(gm)
        self.codes = codes
        self.compared: dict[str, tuple[Tensor, Tensor]] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if target_name(n) == DEQUANTIZE and isinstance(n.args[0], Node):
            return self._rounded(n, value)
        theirs = self.codes.get(n.name)
        if theirs is None:
            return value
        if (theirs.dtype, value.dtype) == (torch.uint8, torch.int8):  # from `store_convolution_inputs_unsigned`
            theirs = theirs.to(torch.int16) - 128
        if theirs.shape != value.shape:
            shapes = f"{tuple(theirs.shape)} in the file and {tuple(value.shape)} in the model"
            raise ExportError(f"{n.name} has shape {shapes}: the file is not this model's export; {_AGAIN}")
        if _in_blocks(n):
            step, (_, scale, zero_point, *layout) = self._steps(n, value), n.args
            ours = dequantize(value, self.env[scale], self.env[zero_point], *layout)  # type: ignore[index]
            self.compared[n.name] = (ours / step, theirs / step)
            return value
        self.compared[n.name] = (value, theirs)
        return theirs.to(value)

    def _rounded(self, n: Node, ours: Tensor) -> Tensor:
        """Return ONNX Runtime's values if it rounded them to blocks, which does not yield codes, or else `ours`."""
        source = n.all_input_nodes[0]
        theirs = self.codes.get(source.name) if _in_blocks(source) else None
        return ours if theirs is None else theirs.to(ours)

    def _scale(self, n: Node, codes: Tensor) -> Tensor:
        scale, axis, block = self.env[n.args[1]], n.args[4], n.args[5]  # type: ignore[index]
        return spread(scale, codes, axis, block)  # type: ignore[arg-type]

    def _steps(self, n: Node, codes: Tensor) -> Tensor:
        """Return the distance between neighboring representable values, at the position of each of `codes`."""
        fmt, scale = parse_format(str(n.args[3])), self._scale(n, codes)
        return scale if fmt.is_integer else scale * fmt.step(codes.float())


class _Comparison:
    """Differences of named values, accumulated over batches.

    Args:
        steps: Quantization step of each value for which it is known.
        parts: Dimension and sizes of the parts of each output that is a concatenation. Each part has a separate range;
            the part that differs most represents the output.
    """

    def __init__(self, steps: Mapping[str, float], parts: Mapping[str, tuple[int, list[int]]] | None = None) -> None:
        self.steps, self.parts = steps, parts or {}
        self.pairs: dict[str, list[list[tuple[Tensor, Tensor]]]] = {}

    def add(self, name: str, expected: Tensor, got: Tensor) -> None:
        if got.shape != expected.shape:
            shapes = f"{tuple(got.shape)} in the file and {tuple(expected.shape)} in torch"
            raise ExportError(f"{name} has shape {shapes}: the file is not this model's export; export it again")
        dim, sizes = self.parts.get(name, (0, expected.shape[:1] if expected.dim() else ()))
        both = [(value,) if not expected.dim() else value.split(list(sizes), dim) for value in (expected, got)]
        parts = self.pairs.setdefault(name, [[] for _ in both[0]])
        for part, ours, theirs in zip(parts, *both, strict=True):
            part.append((ours.detach().cpu().double().flatten(), theirs.cpu().double().flatten()))

    def differences(self) -> tuple[Difference, ...]:
        return tuple(
            max((self._difference(name, pairs) for pairs in parts), key=lambda difference: difference.steps)
            for name, parts in self.pairs.items()
        )

    def _difference(self, name: str, pairs: list[tuple[Tensor, Tensor]]) -> Difference:
        a, b = (torch.cat(side) for side in zip(*pairs, strict=True))
        # Equal infinities, as in a mask, do not differ. If only one value is NaN, the difference is infinite rather
        # than NaN.
        comparable = ~(a.isnan() & b.isnan())
        uncompared, a, b = int((~comparable).sum()), a[comparable], b[comparable]
        gap = torch.where(a == b, 0.0, (a - b).abs().nan_to_num(nan=torch.inf))
        finite = a[a.isfinite()]
        spread = (
            max(float(finite.max() - finite.min()) / 255, _NOISE * float(finite.abs().max())) if len(finite) else 0.0
        )
        step = self.steps.get(name) or spread or 1.0
        noise, signal = float(gap.square().sum()), float(finite.square().sum())
        return Difference(
            name=name,
            max_abs=float(gap.max()) if gap.numel() else 0.0,
            step=step,
            share=float((gap > step / 2).double().mean()) if gap.numel() else 0.0,
            sqnr=_decibels(signal, noise),
            uncompared=uncompared,
        )


_NOISE = 64 * torch.finfo(torch.float32).eps
"""Lower bound of a step relative to the largest magnitude: float32 sums in another order differ in their last bits."""


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * (math.log10(signal) - math.log10(noise)) if signal > 0 else -math.inf


def _in_blocks(n: Node) -> bool:
    """Tell whether a node quantizes to groups, which the file rounds in a function that does not output codes."""
    return target_name(n) == QUANTIZE and len(n.args) > 5 and int(str(n.args[5])) > 0


def _quantizers(qmodel: QuantizedModel) -> list[str]:
    nodes = qmodel.graph_module.graph.nodes
    return [node.name for node in nodes if target_name(node) == QUANTIZE]


def _known_steps(qmodel: QuantizedModel) -> dict[str, float]:
    """Return the quantization step of every output that is dequantized with one static scale."""
    gm, steps = qmodel.graph_module, {}
    for name, node in zip(qmodel.signature.output_names, results_of(gm), strict=True):
        if isinstance(node, Node) and target_name(node) == DEQUANTIZE:
            scale: Any = node.args[1]
            if scale.op == "get_attr" and parameter(gm, scale).numel() == 1:
                steps[name] = float(parameter(gm, scale))
    return steps


def _joined_parts(qmodel: QuantizedModel) -> dict[str, tuple[int, list[int]]]:
    """Return, by output, the dimension and sizes of the parts that it concatenates, such as boxes and scores."""
    parts: dict[str, tuple[int, list[int]]] = {}
    for name, node in zip(qmodel.signature.output_names, results_of(qmodel.graph_module), strict=True):
        if isinstance(node, Node) and target_name(node) == "aten.cat.default":
            dim = argument(node, 1) or 0
            sizes = [static_size(part.meta["val"].shape[dim]) for part in argument(node, 0)]
            lengths = [size for size in sizes if size is not None]
            if len(lengths) == len(sizes):
                parts[name] = (dim, lengths)
    return parts


def _show_codes(quantizers: list[str], shown: set[str], model: ir.Model) -> None:
    """Add the codes of `quantizers` to the outputs of a graph, and their names to `shown`.

    Codes without a numpy type are left out, and so are values that already are outputs.
    """
    import onnx_ir as ir

    for value in [value for node in model.graph for value in node.outputs]:
        # numpy does not have 4-bit and 8-bit float types for codes.
        dtype = value.dtype
        read = dtype is not None and (dtype == ir.DataType.FLOAT or (dtype.is_integer() and dtype.itemsize >= 1))
        if read and value.name is not None and value.name in quantizers and not value.is_graph_output():
            model.graph.outputs.append(value)
            shown.add(value.name)
