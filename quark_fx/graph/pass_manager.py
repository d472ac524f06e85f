"""Graph passes: what one is, and how a list of them is run.

A pass rewrites the graph it is given and returns how often it did. It is a function decorated with
`@graph_pass`, or, when it has options, a frozen dataclass decorated with it. Parameters are shared with
the caller's model: a pass adds a new attribute (`quark_fx.graph.nodes.set_parameter`), it never writes into one.

A pass with a parameter called `context` gets the `Context` of the run: calibration data, cache, where to note what it
changed. One whose `stage` is `CALIBRATED` runs between calibration and conversion and changes scales, not the graph;
one whose `stage` is `QUANTIZED` runs after conversion, on the graph of codes, next to the float graph.
"""

from __future__ import annotations

import inspect
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
from quark_fx.graph.nodes import output_node, stored_tensors
from quark_fx.graph.provenance import Notes, digest
from quark_fx.system.isolation import isolated
from quark_fx.system.names import Stored, unknown
from quark_fx.system.options import checked, checked_call
from quark_fx.system.registry import Registry
from quark_fx.system.untrusted import brief

GraphPass = Callable[..., int]
"""`pass(graph)`, or `pass(graph, context=...)`, returns the number of rewrites."""
Check = Callable[[GraphModule], None]
"""A condition on a graph: raises, naming the node, where it does not hold."""

P = TypeVar("P")


class Stage(StrEnum):
    """Which graph a pass rewrites."""

    FLOAT = "float"
    """The captured graph, before anything is quantized."""
    PLANNED = "planned"
    """The final float graph. One pass, `insert_observers`, plans what is quantized."""
    OBSERVED = "observed"
    """The graph with observers in it. One pass, `calibrate`, runs the data and takes them out again."""
    CALIBRATED = "calibrated"
    """The graph with the plan and the scales it was calibrated to, which can be changed yet."""
    SETTLED = "settled"
    """The same when the scales are final. One pass, `convert`, makes it a graph of codes."""
    QUANTIZED = "quantized"
    """The graph of codes."""

    @property
    def is_single(self) -> bool:
        """Whether exactly one pass runs at this stage: that of the configuration, or quark_fx's own."""
        return self in (Stage.PLANNED, Stage.OBSERVED, Stage.SETTLED)


@dataclass(frozen=True)
class Promise:
    """What a pass keeps.

    Attributes:
        exact: the function the graph computes is unchanged up to float rounding.
        requires: conditions on the graph before.
        ensures: conditions on the graph after.
        stage: the graph it rewrites.
        after: names of passes that, listed as well, have to be listed before it.
        distributed: it runs on several ranks: it adds up what it measures, and all ranks end with the same graph.
        targets: names of the targets it is for; empty for any.
        validated: it keeps a change only where that lowers the error on batches it did not learn from, and notes that
            error; otherwise what it notes is the error on the data it learned from.
        branches: it computes something beside operators, for which checkpoints have no place.
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
    """What a pass did to one operator or site.

    Attributes:
        name: module path, or the paths of a site's operators.
        what: in a few words.
        changed: whether it did anything.
        before: what it minimizes, a relative squared error unless the pass says otherwise (0 is exact);
            `PassRecord.validated` says on which data.
        after: the same with what was kept.
        seconds: what it took; NaN of a loaded model.
        all_samples: after it was accepted, it was learned again from all samples, those of validation included.
    """

    name: str
    what: str
    changed: bool = True
    before: float | None = None
    after: float | None = None
    seconds: float = field(default=0.0, compare=False)
    all_samples: bool = False


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: its name, the number of rewrites, seconds, and a row for each operator or site.

    Attributes:
        seconds: what it took, also where runs on a session share what it made; NaN of a loaded model.
        validated: the errors of the rows are on data that was not learned from: the pass judges by it
            (`Promise.validated`), there was more than a single sample, and no pass before learned from all of them.
        remark: what else could be done, in a few words.
    """

    name: str
    rewrites: int
    seconds: float = field(compare=False)
    changes: tuple[Change, ...] = ()
    validated: bool = True
    remark: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        changes = tuple(Change(**row) for row in data.get("changes", ()))
        return cls(**{**data, "changes": changes})


PASSES: Registry[Any, GraphPass] = Registry("pass", answers={"promise": Promise()})
"""Every registered pass by name: the function, or the dataclass of options."""
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

    The options of a class are checked by their annotations (`system.options`). A pass can be defined again, as a
    notebook cell does that runs twice.

    Raises:
        ConfigError: If another pass has the name, `stage` is unknown, or a class of passes with options is not a
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
    """Return the name a pass is registered under."""
    return p.name if isinstance(p, Stored) else getattr(p, "__name__", type(p).__name__)


def pass_stage(p: GraphPass) -> Stage:
    """Return the stage a pass promised; the float graph's for one that promised nothing."""
    promise: Promise = getattr(p, "promise", Promise())
    return promise.stage


def pass_targets(p: GraphPass) -> tuple[str, ...]:
    """Return the names of the targets a pass is for, none if it is for any."""
    promise: Promise = getattr(p, "promise", Promise())
    return promise.targets


def require_order(passes: Sequence[GraphPass]) -> None:
    """Raise `ConfigError` if a pass is listed before one that has to run first; the message names both."""
    passes = [p for p in passes if not isinstance(p, Stored)]  # whose promises are not known
    for late, p in enumerate(passes):
        for early in passes[:late]:
            before: Promise = getattr(early, "promise", Promise())
            if pass_stage(p).is_single and pass_stage(early) is pass_stage(p):
                raise ConfigError(
                    f"passes {pass_name(early)} and {pass_name(p)} both rewrite the {pass_stage(p)} graph, which one "
                    "pass does; drop one of them"
                )
            if pass_stage(early) is Stage.QUANTIZED and pass_stage(p) is not Stage.QUANTIZED:
                raise ConfigError(
                    f"pass {pass_name(p)} rewrites the {pass_stage(p)} graph and is listed after {pass_name(early)}, "
                    "which runs on the quantized one; list it before"
                )
            if pass_name(p) in before.after:
                raise ConfigError(
                    f"pass {pass_name(early)} is listed before {pass_name(p)}, and in this order one of them finds "
                    f"little or nothing to do; list {pass_name(p)} first"
                )


def takes_context(p: GraphPass) -> bool:
    """Tell whether a pass asks for the context of the run: by a parameter of that name."""
    return "context" in _parameters(p)


def needs_context(p: GraphPass) -> bool:
    """Tell whether a pass, or a class of passes, cannot do without the context of the run."""
    parameter = _parameters(p).get("context")
    return parameter is not None and parameter.default is parameter.empty


def learns_from_data(p: GraphPass) -> bool:
    """Tell whether a pass chooses something that has to be judged on data it did not see."""
    return needs_context(p) and not pass_stage(p).is_single


def is_ours(value: Any) -> bool:
    """Tell whether a pass or an observer, and every option it has, is defined in this package alone.

    Other code may read globals, closures or files that change between two calls.
    """
    if isinstance(value, FunctionType):
        return _in_package(value) and value.__closure__ is None
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
    # Unlike `__module__`, which `functools.wraps` copies, the globals are those that the code reads.
    root = str(function.__globals__.get("__name__")).partition(".")[0]
    return root == "quark_fx" or root in sys.stdlib_module_names  # where dataclasses and typing write methods


def _parameters(p: GraphPass) -> Mapping[str, inspect.Parameter]:
    # Of a class, the call of its instances counts, not the constructor, which takes options.
    return inspect.signature(p.__call__ if isinstance(p, type) else p).parameters


def require_callable(p: GraphPass) -> None:
    """Raise `ConfigError` if a pass cannot be called with a graph and `context`, or takes the name of another one."""
    if isinstance(p, type):
        raise ConfigError(f"passes: {p.__name__} is a class; write {p.__name__}()")
    if not callable(p):
        raise ConfigError(f"passes: {brief(p)} is no pass; give a function or an instance of a class of passes")
    try:
        inspect.signature(p).bind(None, **({"context": None} if takes_context(p) else {}))
    except TypeError as error:
        raise ConfigError(
            f"pass {pass_name(p)}{inspect.signature(p)} cannot be called with a graph: {error}; a pass takes the "
            "graph, and what it asks of the run in a parameter called `context`"
        ) from error
    PASSES.name_of(p)


pass_to_dict = PASSES.plain
"""Returns `{"name": ..., option: value, ...}`."""
pass_from_dict = PASSES.make
"""Builds a pass from its name or from what `pass_to_dict` returned; the error lists the valid ones."""


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

    What a pass changes is noted on the graph: see `quark_fx.graph.provenance`.

    Args:
        gm: the graph; left as it is, unless `in_place`.
        passes: what to run.
        verify_inputs: a real batch (positional arguments of `gm`). When given, every pass that promises
            to be exact is held to it: the outputs may differ by the rounding of a reordered sum, `1e-4` of
            the largest output in float32, 8 steps of the mantissa in half precision.
        context: a `quark_fx.engine.context.Context`, for the passes that take one.
        in_place: rewrite `gm` itself, so that nothing keeps the tensors that passes replace.

    Returns:
        The rewritten copy and a record of each pass.

    Raises:
        PassError: naming the pass, if it left an invalid graph or broke a promise.
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
                    f"pass {name} learns from data; run it through `quantize`, or give `run_passes` a context"
                )
            notes = None if promise.stage.is_single else Notes(gm)  # such passes leave the calls of modules as they are
            weights = _Unwritten(gm, p, getattr(context, "calibrated", None))
            rewrites = p(gm, context=context) if takes_context(p) else p(gm)
            if type(rewrites) is not int or rewrites < 0:
                raise PassError(f"pass {name} returned {rewrites!r}; a pass returns how often it rewrote the graph")
            weights.check(name)
            _lint(gm, name)
            if notes is not None:
                notes.take(gm, name)
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
            validated = context.data.has_validation and promise.validated and not context.all_samples_learned
            context.all_samples_learned |= any(change.all_samples for change in changes)
            records.append(PassRecord(name, rewrites, seconds, changes, validated, remark))
    return gm, records


class _Unwritten:
    """Holds a pass to leaving the tensors alone that the graph shares with the caller's model.

    Torch counts writes that it sees. It does not see those through `tensor.data`, so the bytes are compared as well, of
    passes that are not part of this package: a gigabyte takes about a second.
    """

    def __init__(self, gm: GraphModule, p: GraphPass, calibrated: Any = None) -> None:
        # Once there is a float graph, the caller's tensors are in it, and the other graph has codes of ours.
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
        """Raise `PassError` if a tensor was written to since."""
        written = {
            key: owner
            for key, owner, tensor, version, before in self.watched
            if tensor._version != version or (before is not None and digest(tensor) != before)
        }
        if written:
            names, owner = ", ".join(list(written)[:3]), next(iter(written.values()))
            raise PassError(
                f"pass {name} wrote into {names}, which {owner} shares and now holds changed; store a new tensor with "
                "quark_fx.graph.nodes.set_parameter, and make the model anew"
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
        gm: a graph.
        lazy: generate its Python code on the first call, which a graph that is only rewritten never needs.
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
        # Where both are the same infinity or NaN (a mask's) nothing moved.
        moved = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs()).max().item()
        largest = a.abs().nan_to_num(posinf=0.0).max().item()
        if not moved <= max(1e-4, 8 * torch.finfo(a.dtype).eps) * largest:
            raise PassError(
                f"pass {name} promises to keep the function, but output {index} moved by {moved:.3g} "
                f"(largest value {largest:.3g}); mark it exact=False or mend it"
            )
