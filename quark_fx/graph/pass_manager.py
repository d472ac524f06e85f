"""Graph passes: their interface, and the function that runs a list of them.

A pass rewrites the graph it gets and returns the number of rewrites. It is a function decorated with `@graph_pass`, or,
if it has options, a frozen dataclass decorated with it. Parameters are shared with the caller's model: a pass adds a
new attribute (`quark_fx.graph.nodes.set_parameter`) and never writes into a parameter.

A pass with a parameter called `context` gets the `Context` of the run: calibration data, cache, and a place to record
changes. A pass whose `stage` is `CALIBRATED` runs between calibration and conversion and changes scales, not the graph;
a pass whose `stage` is `QUANTIZED` runs after conversion, on the graph of codes, with access to the float graph.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from types import FunctionType
from typing import Any, Self, TypeVar, overload

import torch
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils import _pytree as pytree

from quark_fx.errors import ConfigError, PassError
from quark_fx.graph.nodes import erase_dead, output_node, stored_tensors
from quark_fx.graph.provenance import Notes, digest
from quark_fx.system.isolation import isolated
from quark_fx.system.names import Stored, unknown
from quark_fx.system.options import checked, checked_call
from quark_fx.system.registry import Registry
from quark_fx.system.untrusted import brief

GraphPass = Callable[..., int]
"""`pass(graph)`, or `pass(graph, context=...)`, returns the number of rewrites."""
Check = Callable[[GraphModule], None]
"""A function that checks a condition on a graph, and raises an error that names the node if the condition fails."""

P = TypeVar("P")


class Stage(StrEnum):
    """The graph that a pass rewrites."""

    FLOAT = "float"
    """The captured graph, before anything is quantized."""
    PLANNED = "planned"
    """The final float graph. One pass, `insert_observers`, plans the quantization."""
    OBSERVED = "observed"
    """The graph with observers. One pass, `calibrate`, runs the calibration data and removes the observers."""
    CALIBRATED = "calibrated"
    """The graph with the plan and the calibrated scales, which can still change."""
    SETTLED = "settled"
    """The graph with the plan and final scales. One pass, `convert`, turns it into a graph of codes."""
    QUANTIZED = "quantized"
    """The graph of codes."""

    @property
    def is_single(self) -> bool:
        """True if exactly one pass runs at this stage: the one in the configuration, or the default."""
        return self in (Stage.PLANNED, Stage.OBSERVED, Stage.SETTLED)


@dataclass(frozen=True)
class Promise:
    """The properties that a pass declares.

    Attributes:
        exact: Whether the function that the graph computes is unchanged up to float rounding.
        requires: Conditions on the graph before the pass.
        ensures: Conditions on the graph after the pass.
        stage: Graph that the pass rewrites.
        after: Names of passes that must precede this pass if they are also listed.
        distributed: Whether the pass supports several ranks: it sums its measurements over ranks, and all ranks end
            with the same graph.
        targets: Names of the targets that the pass is for; empty for any.
        validated: Whether the pass keeps a change only if it lowers the error on batches held out from fitting, and
            records that error; otherwise it records the error on the data it was fitted to.
        branches: Whether the pass adds computations parallel to operators, which checkpoints do not store.
    """

    exact: bool = True
    requires: tuple[Check, ...] = ()
    ensures: tuple[Check, ...] = ()
    stage: Stage = Stage.FLOAT
    after: tuple[str, ...] = ()
    distributed: bool = False
    targets: tuple[str, ...] = ()
    validated: bool = False
    branches: bool = False


@dataclass(frozen=True)
class Change:
    """The effect of a pass on one operator or site.

    Attributes:
        name: Module path, or the paths of a site's operators.
        what: Short description.
        changed: Whether the pass changed anything.
        before: Value of the objective before, a relative squared error unless the pass says otherwise (0 is exact);
            `PassRecord.validated` tells which data it was measured on.
        after: Value of the objective after the pass.
        seconds: Duration; NaN in a loaded model.
        all_samples: Whether the change, once accepted, was fitted again to all samples, including validation samples.
    """

    name: str
    what: str
    changed: bool = True
    before: float | None = None
    after: float | None = None
    seconds: float = field(default=0.0, compare=False)
    all_samples: bool = False

    @classmethod
    def skipped(cls, name: str, reason: str, error: float | None = None) -> Self:
        """Return the row for an operator that stays as it is, with its error if the error was measured."""
        return cls(name, f"skipped: {reason}", changed=False, before=error, after=error)


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass: name, number of rewrites, seconds, and a row for each operator or site.

    Attributes:
        seconds: Duration, also if runs of a session share the result; NaN in a loaded model.
        validated: Whether the errors of the rows are on held-out data: the pass validates
            (`Promise.validated`), there was more than one sample, and no earlier pass was fitted to all samples.
        remark: Short note about possible improvements.
    """

    name: str
    rewrites: int
    seconds: float = field(compare=False)
    changes: tuple[Change, ...] = ()
    validated: bool = True
    remark: str = ""

    @property
    def summary(self) -> str:
        """One line about a pass that recorded changes; `Report.pass_table` has the rest."""
        judged = [(c.before, c.after) for c in self.changes if c.before is not None and c.after is not None]
        error = ""
        if judged:
            before, after = (sum(values) / len(judged) for values in zip(*judged, strict=True))
            where = "validation data" if self.validated else "the data it was learned from"
            error = f", mean error {before:.3g} → {after:.3g} on {where}"
        remark = f"; {self.remark}" if self.remark else ""
        seconds = "" if math.isnan(self.seconds) else f", {self.seconds:.1f} s"
        return f"{self.name}: {self.rewrites} changed of {len(self.changes)}{error}{seconds}{remark}"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build a record from the result of `dataclasses.asdict`."""
        changes = tuple(Change(**row) for row in data.get("changes", ()))
        return cls(**{**data, "changes": changes})


PASSES: Registry[Any, GraphPass] = Registry("pass", answers={"promise": Promise()})
"""Registered passes under their names: functions, and dataclasses of options."""
_register = PASSES.add


@overload
def graph_pass(target: P, /) -> P: ...
@overload
def graph_pass(
    *,
    exact: bool = True,
    requires: tuple[Check, ...] = (),
    ensures: tuple[Check, ...] = (),
    stage: str = Stage.FLOAT,
    after: tuple[str, ...] = (),
    distributed: bool = False,
    targets: tuple[str, ...] = (),
    validated: bool = False,
    branches: bool = False,
) -> Callable[[P], P]: ...
@checked_call
def graph_pass(
    target: Any = None,
    /,
    *,
    exact: bool = True,
    requires: tuple[Check, ...] = (),
    ensures: tuple[Check, ...] = (),
    stage: str = Stage.FLOAT,
    after: tuple[str, ...] = (),
    distributed: bool = False,
    targets: tuple[str, ...] = (),
    validated: bool = False,
    branches: bool = False,
) -> Any:
    """Register a pass under its name and attach its `Promise`: `@graph_pass`, or `@graph_pass(stage="quantized")`.

    The options of a class are checked by their annotations (`system.options`). A pass can be defined again, for example
    if a notebook cell runs twice.

    Args:
        target: Function or class to register.
        exact: Whether the function that the graph computes is unchanged up to float rounding.
        requires: Conditions on the graph before the pass: functions that raise an error if a graph does not meet them.
        ensures: Conditions on the graph after the pass.
        stage: Graph that the pass rewrites: `"float"`, `"calibrated"`, or `"quantized"`.
        after: Names of passes that must precede this pass if they are also listed.
        distributed: Whether the pass supports several ranks: it sums its measurements over ranks, and all ranks end
            with the same graph.
        targets: Names of the targets that the pass is for; empty for any.
        validated: Whether the pass keeps a change only if it lowers the error on batches held out from fitting, and
            records that error.
        branches: Whether the pass adds computations parallel to operators, which checkpoints do not store.

    Raises:
        ConfigError: If another pass has the same name, `stage` is unknown, or a class of passes with options is not a
            dataclass.
    """
    try:
        stage = Stage(stage)
    except ValueError:
        raise unknown("stage", stage, Stage) from None

    def register(target: P) -> P:
        name: str = target.__name__  # type: ignore[attr-defined]
        if isinstance(target, type) and _has_options(target) and "__dataclass_fields__" not in vars(target):
            raise ConfigError(
                f"pass {name} is a class with options; put @dataclass(frozen=True) below @graph_pass(), so that "
                "configurations can store them"
            )
        _register(target)
        target.promise = Promise(  # type: ignore[attr-defined]
            exact, requires, ensures, stage, after, distributed, targets, validated, branches
        )
        return checked(target) if isinstance(target, type) else target

    return register if target is None else register(target)


def _has_options(cls: type) -> bool:
    return cls.__init__ is not object.__init__ or bool(inspect.get_annotations(cls))  # type: ignore[misc]


def pass_name(p: GraphPass) -> str:
    """Return the registered name of a pass."""
    return p.name if isinstance(p, Stored) else getattr(p, "__name__", type(p).__name__)


def pass_stage(p: GraphPass) -> Stage:
    """Return the stage of a pass; `Stage.FLOAT` for a pass without a `Promise`."""
    promise: Promise = getattr(p, "promise", Promise())
    return promise.stage


def pass_targets(p: GraphPass) -> tuple[str, ...]:
    """Return the names of the targets that a pass is for; empty for any target."""
    promise: Promise = getattr(p, "promise", Promise())
    return promise.targets


def require_order(passes: Sequence[GraphPass]) -> None:
    """Raise `ConfigError` if a pass is listed before another pass that must precede it; the message names both."""
    passes = [p for p in passes if not isinstance(p, Stored)]  # the promises of stored passes are unknown
    for late, p in enumerate(passes):
        for early in passes[:late]:
            before: Promise = getattr(early, "promise", Promise())
            if pass_stage(p).is_single and pass_stage(early) is pass_stage(p):
                raise ConfigError(
                    f"passes {pass_name(early)} and {pass_name(p)} both rewrite the {pass_stage(p)} graph, and "
                    "only one pass may do that; drop one of them"
                )
            if pass_stage(early) is Stage.QUANTIZED and pass_stage(p) is not Stage.QUANTIZED:
                raise ConfigError(
                    f"pass {pass_name(p)} rewrites the {pass_stage(p)} graph and is listed after {pass_name(early)}, "
                    "which runs on the quantized graph; list it earlier"
                )
            if pass_name(p) in before.after:
                raise ConfigError(
                    f"pass {pass_name(early)} is listed before {pass_name(p)}, but in this order one of them has "
                    f"little or no effect; list {pass_name(p)} first"
                )


def takes_context(p: GraphPass) -> bool:
    """Tell whether a pass has a parameter for the context of the run, called `context`."""
    return "context" in _parameters(p)


def needs_context(p: GraphPass) -> bool:
    """Tell whether a pass, or a class of passes, requires the context of the run."""
    parameter = _parameters(p).get("context")
    return parameter is not None and parameter.default is parameter.empty


def learns_from_data(p: GraphPass) -> bool:
    """Tell whether a pass learns from the calibration data, and validates what it learns on held-out data."""
    return needs_context(p) and not pass_stage(p).is_single and getattr(p, "learns", True)


def is_ours(value: Any) -> bool:
    """Tell whether a pass or an observer, and all of its options, are defined in this package alone.

    Other code may read globals, closures, or files that change between two calls.
    """
    if isinstance(value, FunctionType):
        return _in_package(value) and all(is_ours(cell.cell_contents) for cell in value.__closure__ or ())
    if isinstance(value, tuple):
        return all(map(is_ours, value))
    if not is_dataclass(value):
        return not callable(value)
    kind: type = type(value)
    classes = [cls for cls in kind.__mro__ if is_dataclass(cls)]
    methods = [method for cls in classes for method in vars(cls).values() if isinstance(method, FunctionType)]
    return (
        all(cls.__module__.startswith("quark_fx.") for cls in classes)
        and all(map(_in_package, methods))
        and all(is_ours(getattr(value, option.name)) for option in fields(value))
    )


def _in_package(function: FunctionType) -> bool:
    # Unlike `__module__`, which `functools.wraps` copies, these globals belong to the code itself.
    root = str(function.__globals__.get("__name__")).partition(".")[0]
    return root == "quark_fx" or root in sys.stdlib_module_names  # dataclasses and typing define methods, too


def _parameters(p: GraphPass) -> Mapping[str, inspect.Parameter]:
    # The options of a class belong to its constructor; passes are called through the instance.
    return inspect.signature(p.__call__ if isinstance(p, type) else p).parameters


def require_callable(p: GraphPass) -> None:
    """Raise `ConfigError` if a pass cannot be called with a graph and `context`, lacks a stage, or reuses a name."""
    if isinstance(p, type):
        raise ConfigError(f"passes: {p.__name__} is a class; write {p.__name__}()")
    if not callable(p):
        raise ConfigError(f"passes: {brief(p)} is not a pass; pass a function or an instance of a pass class")
    try:
        inspect.signature(p).bind(None, **({"context": None} if takes_context(p) else {}))
    except TypeError as error:
        raise ConfigError(
            f"pass {pass_name(p)}{inspect.signature(p)} cannot be called with a graph: {error}; a pass takes the "
            "graph, and optionally a parameter called `context`"
        ) from error
    if not hasattr(p, "promise") and (decorator := getattr(p, "registered_by", "")):
        raise ConfigError(f"the solver {pass_name(p)} has no stage; decorate the class with @{decorator}")
    PASSES.name_of(p)


pass_to_dict = PASSES.plain
"""Return `{"name": ..., option: value, ...}`."""
pass_from_dict = PASSES.make
"""Build a pass from its name or from the result of `pass_to_dict`; the error lists valid names."""


@checked_call
@isolated
def run_passes(
    gm: GraphModule,
    passes: Sequence[GraphPass],
    *,
    verify_inputs: tuple[Any, ...] | None = None,
    context: Any = None,
    in_place: bool = False,
) -> tuple[GraphModule, list[PassRecord]]:
    """Run `passes` in order on a copy of `gm` that shares its parameters.

    Changes are recorded on the graph: see `quark_fx.graph.provenance`.

    Args:
        gm: Graph; unchanged unless `in_place`.
        passes: Passes to run.
        verify_inputs: Real batch (positional arguments of `gm`). If given, passes that promise to be exact are
            checked: outputs may differ by the rounding of a reordered sum, `1e-4` of the largest output in float32,
            8 steps of the mantissa in half precision.
        context: A `quark_fx.engine.context.Context`, for passes that take a context.
        in_place: Whether to rewrite `gm` itself, so that tensors replaced by passes are freed.

    Returns:
        The rewritten copy and a record of each pass.

    Raises:
        PassError: If a pass left an invalid graph or broke a promise; the message names the pass.
    """
    for p in passes:
        require_callable(p)
    gm = gm if in_place else copy_graph(gm, lazy=True)
    records = []
    expected = _outputs(gm, verify_inputs) if verify_inputs is not None else None
    for p in passes:
        promise: Promise = getattr(p, "promise", Promise(exact=False))
        name = pass_name(p)
        start = time.perf_counter()
        try:
            for check in promise.requires:
                check(gm)
            if context is None and needs_context(p):
                raise ConfigError(
                    f"pass {name} learns from data; run it through `quantize`, or pass a context to `run_passes`"
                )
            notes = None if promise.stage.is_single else Notes(gm)  # such passes do not change module calls
            weights = _Unwritten(gm, p, getattr(context, "calibrated", None))
            rewrites = p(gm, context=context) if takes_context(p) else p(gm)
            if type(rewrites) is not int or rewrites < 0:
                raise PassError(
                    f"pass {name} returned {rewrites!r}; a pass must return the number of its rewrites as an int"
                )
            weights.check(name)
            _lint(gm, name)
            if notes is not None:
                notes.take(gm, name)
            if promise.stage == Stage.FLOAT and erase_dead(gm):  # later passes and the report look at every operator
                gm.recompile()
            for check in promise.ensures:
                check(gm)
        except Exception as error:
            error.add_note(f"in pass {name}")
            raise
        seconds = time.perf_counter() - start
        if expected is not None:
            got = _outputs(gm, verify_inputs)
            if promise.exact:
                _require_equal(name, expected, got)
            expected = got
        if context is None:
            records.append(PassRecord(name, rewrites, seconds))
        else:
            changes, context.remark, remark = tuple(context.take_changes()), "", context.remark
            validated = context.data.has_validation and promise.validated and learns_from_data(p)
            validated = validated and not context.all_samples_learned
            context.all_samples_learned |= any(change.all_samples for change in changes)
            records.append(PassRecord(name, rewrites, seconds, changes, validated, remark))
    return gm, records


class _Unwritten:
    """Guard against a pass that writes into tensors that the graph shares with the caller's model.

    Torch counts the writes to a tensor, except writes through `tensor.data`. For passes from outside of this package,
    the bytes are compared as well, which takes about a second per gigabyte.
    """

    def __init__(self, gm: GraphModule, p: GraphPass, calibrated: Any = None) -> None:
        # After calibration, the float graph holds the caller's tensors, and `gm` may hold our codes.
        callers = stored_tensors(gm if calibrated is None else calibrated.float_graph)
        ours = {name: t for name, t in stored_tensors(gm).items() if t is not callers.get(name)}
        foreign = not is_ours(p)
        self.watched = [
            (name, owner, tensor, tensor._version, digest(tensor) if foreign else None)
            for owner, tensors in (("the caller's model", callers), ("every block that is finished", ours))
            for name, tensor in tensors.items()
            if not tensor.is_inference() and not tensor.is_meta
        ]

    def check(self, name: str) -> None:
        """Raise `PassError` if a tensor was written to since construction."""
        written = {
            key: owner
            for key, owner, tensor, version, before in self.watched
            if tensor._version != version or (before is not None and digest(tensor) != before)
        }
        if written:
            names, owner = ", ".join(list(written)[:3]), next(iter(written.values()))
            raise PassError(
                f"pass {name} wrote into {names}, which {owner} also uses and which is now changed; fix the "
                "pass to store a new tensor with quark_fx.graph.nodes.set_parameter, and recreate the model"
            )


def _lint(gm: GraphModule, name: str) -> None:
    try:
        gm.graph.lint()
    except RuntimeError as error:
        raise PassError(f"pass {name} left an invalid graph: {error}") from error
    gm.recompile()


def copy_graph(gm: GraphModule, *, lazy: bool = False) -> GraphModule:
    """Return a copy of `gm` with its own graph and attribute containers, sharing every tensor.

    Args:
        gm: Graph.
        lazy: Whether to generate the copy's Python code on its first call; a graph that never runs needs no code.
    """
    graph = torch.fx.Graph()
    result = graph.graph_copy(gm.graph, {})
    old_output = output_node(gm)
    graph.output(result).meta = dict(old_output.meta)
    made_by = _LazyGraphModule if lazy else GraphModule
    copy = made_by(gm, graph, class_name=type(gm).__name__)
    copy.meta.update(gm.meta)
    return copy


def _outputs(gm: GraphModule, inputs: tuple[Any, ...] | None) -> list[torch.Tensor]:
    with torch.no_grad():
        leaves = pytree.tree_leaves(gm(*(inputs or ())))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _require_equal(name: str, expected: list[torch.Tensor], got: list[torch.Tensor]) -> None:
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        if not a.numel():
            continue
        # Equal infinities, and NaN in both (from a mask), do not count as a difference.
        moved = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max().item()
        largest = a.abs().nan_to_num(posinf=0.0).max().item()
        if not moved <= max(1e-4, 8 * torch.finfo(a.dtype).eps) * largest:
            raise PassError(
                f"pass {name} is declared exact, but it changed output {index} by {moved:.3g} (largest value "
                f"{largest:.3g}); declare the pass exact=False, or fix it"
            )
