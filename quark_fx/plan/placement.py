"""The choice of operators to quantize, and of the values to quantize in the graph.

The rules follow the kernels: an integer kernel needs integer inputs; a convolution also needs an integer output; data
movement keeps the codes of its input; additions and pools run in integers only between quantized operators, or wherever
their inputs are integers. The target defines which operators have integer kernels, and when
(`quark_fx.config.target.Placement`). No rule depends on the model.
"""

from __future__ import annotations

import difflib
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch.fx import GraphModule, Node

from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.config.selection import matches
from quark_fx.config.target import TARGETS
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.attention import Attention, find_attentions, is_pointwise
from quark_fx.graph.computed import computed_constants, parameters_of, weight_arguments
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    all_finite,
    describe,
    is_floating,
    is_parameter,
    module_path,
    output_node,
    parameter,
    static_size,
    target_name,
    value_of,
)
from quark_fx.graph.operators import (
    ATTENTION,
    BRANCH,
    KINDS,
    Motion,
    Operator,
    StoredWeight,
    argument,
    clamp_bounds,
    motion,
    moved_inputs,
    moves,
    operator_row,
    row_by_target,
    stored_weights,
    unsupported_positions,
)
from quark_fx.plan.pair_sums import PairBound, pair_bound
from quark_fx.plan.roles import ADAPTER, DEPTHWISE, ROLES, Uses, base_of_adapter, roles_of
from quark_fx.plan.siblings import siblings
from quark_fx.system import accelerator
from quark_fx.system.isolation import warn


@dataclass(frozen=True, kw_only=True)
class _Operator:
    """One weighted operator, or one product of activations.

    Attributes:
        node: The call.
        name: Path of the operator's module.
        kind: Operator family, or the ATen name of an operator without a row in the operator table.
        roles: Roles of the operator (`quark_fx.plan.roles`).
    """

    node: Node
    name: str
    kind: str
    roles: tuple[str, ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds by which patterns can select the operator."""
        return _kinds(self.kind, self.roles)


@dataclass(frozen=True, kw_only=True)
class LeftInFloat(_Operator):
    """An operator that is not quantized, with the reason.

    Attributes:
        reason: Reason for staying in float.
        weight_node: The `get_attr` node of the operator's weight, `None` for a product of activations.
    """

    reason: str
    weight_node: Node | None = None


@dataclass(frozen=True, kw_only=True)
class Quantized(_Operator):
    """A quantized operator: a product of activations, or one of the subclasses `Coded` and `Attending`.

    Attributes:
        row: Row of the operator in the operator table.
        input: Spec of the operator's activations, `None` if they stay in float.
        output: Spec of the operator's output, `None` if it stays in float.
    """

    row: Operator
    input: TensorSpec | None
    output: TensorSpec | None


@dataclass(frozen=True, kw_only=True)
class Coded(Quantized):
    """A quantized operator whose weight gets codes.

    Attributes:
        weight: Spec of the weight.
        weight_node: The `get_attr` node of the weight.
        linear: View of the product; `None` for a lookup table, and for a recurrent layer, which has one planned
            operator per weight.
        pairs: Pairs of the weight's codes that the target may add in 16 bits, `None` without such sums.
    """

    weight: TensorSpec
    weight_node: Node
    linear: Linear | None
    pairs: PairBound | None


@dataclass(frozen=True, kw_only=True)
class Attending(Quantized):
    """An attention operator whose keys and values are quantized.

    Attributes:
        cache: Spec of keys and values.
        attention: Nodes of the attention, and dimensions of its keys and values.
    """

    cache: TensorSpec
    attention: Attention


PlannedOperator = LeftInFloat | Quantized
"""The entry of an operator in a plan."""


@dataclass
class Point:
    """A value that is quantized.

    Attributes:
        value: Node that computes the value.
        spec: Spec of the quantization.
        source: Node whose observer measures the range (`value` itself, except after data movement).
        readers: Operators that read the quantized value; `None` means all consumers, because the value is produced
            in integers.
        absorbed: Clamps between the operator and `value` that saturation may replace.
        reduced: Dimension that defines the layout of the scales. For a spec per group: the dimension that is split into
            groups, over which readers sum. For keys and values: the token dimension with a scale per channel, the
            dimension of heads with a scale per head, otherwise the channel dimension, unless that is the last. `None`
            for any other layout.
    """

    value: Node
    spec: TensorSpec
    source: Node
    readers: set[Node] | None
    absorbed: list[Node] = field(default_factory=list)
    reduced: int | None = None

    @property
    def separate(self) -> tuple[int, ...]:
        """Dimensions along which static scales vary; empty for one scale."""
        if self.reduced is None or self.spec.granularity not in (Granularity.HEAD, Granularity.CHANNEL):
            return ()
        if self.spec.granularity is Granularity.HEAD:
            return (self.reduced,)
        return tuple(d for d in range(1, self.value.meta["val"].dim()) if d != self.reduced)


@dataclass(frozen=True)
class Rounding:
    """Facts about a static `quantize` at conversion (`meta["rounding"]` of its node).

    Attributes:
        value: Name, in the graph before conversion, of the value whose range was observed.
        spec: Spec of the quantization.
        low: Lower bound of the clamps that were dropped because saturation performs them.
        high: Upper bound of the clamps that were dropped.
    """

    value: str
    spec: TensorSpec
    low: float = -math.inf
    high: float = math.inf


@dataclass
class Plan:
    """The operators of a graph and the values to quantize.

    Attributes:
        operators: All weighted operators.
        points: Quantized values, keyed by node, spec, and `Point.reduced`.
        outputs: For each operator with integer output, the value that is rounded: its output, or a later value.
    """

    operators: list[PlannedOperator]
    points: dict[tuple[Node, TensorSpec, int | None], Point]
    outputs: dict[Node, Node] = field(default_factory=dict)

    @property
    def observed(self) -> dict[tuple[Node, TensorSpec], tuple[int, ...]]:
        """The (source, spec) pairs that need an observer, in the order of the graph, with `Point.separate`."""
        return {(p.source, p.spec): p.separate for p in self.points.values() if p.spec.is_calibrated}


def plan_quantization(gm: GraphModule, config: QuantConfig, *, quiet: bool = False) -> Plan:
    """Decide how each weighted operator is quantized, and list the values to quantize.

    Warns about patterns of the configuration that select nothing, with the nearest names, and about a `kv_cache` in a
    model without attention. `quiet` turns both off, for plans that only inspect the model.

    Raises:
        ConfigError: If the target cannot run operators with this configuration, unless `quiet`; it names all of them.
    """
    attentions = list(_attentions(gm, config))
    operators = [*_operators(gm, config), *attentions]
    if not quiet:
        _require_kernels(config, operators)
        _warn_unmatched(config, operators)
        _warn_overruled(config, operators)
        _warn_without_cache(config, attentions)
    placement = _Placement(gm, config, operators)
    return Plan(operators, placement.points(), placement.outputs)


def module_name(node: Node, weight: Node | str | None = None) -> str:
    """Return the module path of an operator: the owner of its weight, or the caller if the caller does not contain it.

    An operator that a module applies to the weight of a submodule has the submodule's name. The weight is given as the
    node that reads it, or as its name.
    """
    caller = module_path(node)
    if weight is None:
        return caller or node.name
    weight = _weight_name(weight) if isinstance(weight, Node) else weight
    owner, _, leaf = weight.rpartition(".")
    if caller and not f"{owner}.".startswith(f"{caller}."):
        return caller
    return owner if owner and (leaf.startswith("weight") or leaf.endswith("weight")) else weight


def _weight_name(weight: Node) -> str:
    """Return the name of a weight; for a computed weight, the name that it would have as a parameter of its module."""
    folded = weight.meta.get("folded")
    return folded.name if folded is not None and folded.name else str(weight.target)


class Names(NamedTuple):
    """The names by which patterns can select an operator: its module, and its kinds."""

    name: str
    kinds: tuple[str, ...]


def names_of(node: Node, uses: Uses | None = None) -> Names:
    """Return the names by which patterns can select a weighted operator.

    Args:
        node: The operator.
        uses: Uses of the values of the operator's graph. Default: computed here, in time linear in the graph.
    """
    row = operator_row(node)
    stored = stored_weights(node, row) if row is not None else ()
    kinds = _kinds(target_name(node) if row is None else row.kind, roles_of(node, uses))
    return Names(module_name(node, stored[0].node if stored else None), kinds)


def _operators(gm: GraphModule, config: QuantConfig) -> Iterator[PlannedOperator]:
    uses, constants = Uses(gm.graph), computed_constants(gm.graph)
    for node in gm.graph.nodes:
        if node.op != "call_function" or BRANCH in node.meta or (node in constants and not _looks_up(node)):
            continue
        row = operator_row(node)
        if row is None:
            yield from _unplanned(gm, config, node, constants)
            continue
        for stored in stored_weights(node, row) or (None,):
            roles = roles_of(node, uses)
            yield _plan_operator(config, node, row, stored, roles, constants)


def _looks_up(node: Node) -> bool:
    row = row_by_target(node)
    return row is not None and not row.activations


def _unplanned(gm: GraphModule, config: QuantConfig, node: Node, constants: Collection[Node]) -> Iterator[LeftInFloat]:
    """Yield the weights of an operator without a rule, or with a weight that is not a parameter, each with a reason.

    Tables, masks, and affine parameters that are added or multiplied element by element are not weights.
    """
    row, name = row_by_target(node), target_name(node)
    kind = name if row is None else row.kind
    for value in weight_arguments(node) or _looked_up(node, constants) or _of_custom_operator(node):
        computed = parameters_of(value, constants)
        sources = [n for n in computed or _behind(value) if value_of(gm, n).dim() >= 2]
        if not sources:
            continue
        weight = max(sources, key=lambda n: parameter(gm, n).numel())
        path = module_name(node, weight)
        if value_of(gm, weight).is_complex():
            reason = "complex numbers cannot be quantized"
        elif not is_floating(gm, weight):
            continue
        elif excluded := config.exclusion(path, kind):
            reason = excluded
        elif value.op != "get_attr" and not computed:
            reason = (
                f"the weight is combined with a value computed from the input before {name} reads it; to quantize the "
                "weight, apply that value to the operator's input or output instead"
            )
        elif value.op != "get_attr" and row is not None:
            reason = _COMPUTED
        elif not weight_arguments(node) and motion(node) is Motion.LOOK_UP:
            reason = f"{name} looks up rows of a table; use torch.nn.functional.embedding instead"
            if value_of(gm, weight).dim() == 3:
                reason += ", and for stacks of experts of transformers set_experts_implementation('grouped_mm')"
        else:
            reason = f"no quantization rule for {name}; write it as torch.nn.functional.linear or torch.matmul"
        yield LeftInFloat(node=node, name=path, kind=kind, weight_node=weight, reason=reason)


_COMPUTED = (
    "this operand is computed from parameters in the graph; add quark_fx.passes.fold_constants to the passes to store "
    "it as a constant of up to 64 MiB, or twice its parameters"
)


def _looked_up(node: Node, constants: Collection[Node]) -> tuple[Node, ...]:
    """Return the table of a node that looks up rows by an input of the model; empty for any other node."""
    if motion(node) is not Motion.LOOK_UP or not isinstance(node.args[0], Node):
        return ()
    table = node.args[0]
    return (table,) if table in constants or table.op == "get_attr" else ()


def _of_custom_operator(node: Node) -> tuple[Node, ...]:
    """Return the inputs of an operator that is defined neither by torch nor by this package; else nothing."""
    custom = target_name(node).partition(".")[0] not in ("aten", "python", "prims", "quark_fx")
    return tuple(node.all_input_nodes) if custom else ()


def _behind(value: Node) -> list[Node]:
    """Return the parameters of a weight that is computed from parameters and an input value."""
    through, pending = set[Node](), [value]
    while pending:
        node = pending.pop()
        if node not in through and (is_pointwise(node) or (moves(node) and motion(node) is not Motion.LOOK_UP)):
            through.add(node)
            pending += node.all_input_nodes
    return parameters_of(value, through)


def _attentions(gm: GraphModule, config: QuantConfig) -> Iterator[PlannedOperator]:
    """Yield the plan of every attention, if the configuration quantizes the keys and values of at least one."""
    if not _asks_for_cache(config):
        return
    for attention in find_attentions(gm.graph):
        name, kind = module_name(attention.node), ATTENTION.kind
        spec = config.specs_for(name, kind).kv_cache
        in_float = "the configuration keeps its keys and values in float"
        unsuited = in_float if spec is None else attention.reason or _without_scales(attention, spec)
        reason = config.exclusion(name, kind) or unsuited
        if spec is None or reason:
            yield LeftInFloat(node=attention.node, name=name, kind=kind, reason=reason)
        else:
            yield Attending(
                node=attention.node,
                name=name,
                kind=kind,
                row=ATTENTION,
                input=None,
                output=None,
                cache=spec,
                attention=attention,
            )


def _asks_for_cache(config: QuantConfig) -> bool:
    return any(isinstance(spec, TensorSpec) for spec in (config.kv_cache, *(o.kv_cache for o in config.overrides)))


def _without_scales(attention: Attention, spec: TensorSpec) -> str:
    """Return the reason why keys or values cannot have the scales of a spec; empty if they can."""
    for cached in attention.cached or ():
        shape, why = cached.value.meta["val"].shape, ""
        sizes = [static_size(size) for d, size in enumerate(shape) if d not in (0, cached.tokens)]
        if spec.granularity is Granularity.CHANNEL and None in sizes:
            why = f"the number of heads or channels of {cached.value.name} varies"
        elif spec.granularity is Granularity.HEAD and cached.shares_channels:
            why = f"the heads of {cached.value.name} share channels, so a cache holds latents instead of heads"
        elif spec.granularity is Granularity.HEAD and len(cached.heads) != 1:
            why = f"{cached.value.name} has no dimension that holds only heads"
        elif spec.granularity is Granularity.HEAD and static_size(shape[cached.heads[0]]) is None:
            why = f"the number of heads of {cached.value.name} varies"
        if why:
            return f"{why}; use a single scale: granularity='tensor'"
    return ""


def _plan_operator(
    config: QuantConfig,
    node: Node,
    row: Operator,
    stored: StoredWeight | None,
    roles: tuple[str, ...],
    constants: Collection[Node],
) -> PlannedOperator:
    operands = (argument(node, position) for position in row.activations)
    constant = next((sources[0] for n in operands if (sources := parameters_of(n, constants))), None)
    weight = stored.node if stored is not None else constant
    name = module_name(node, weight)
    kinds = _kinds(row.kind, roles)
    specs = config.specs_for(name, *kinds)
    spec = specs.weight if stored is not None else specs.input
    selected = any(matches(o.pattern, name, *kinds) for o in config.overrides)
    if stored is None and constant is not None:
        reason = _unreadable(node, constant, row, constants)
    elif excluded := config.exclusion(name, *kinds):
        reason = excluded
    elif without := next((kind for kind in kinds if kind in config.target.placement.in_float), None):
        reason = f"target={str(config.target)!r} does not support {without} with quantized weights"
    elif not row.by_default and not selected:
        reason = "products of activations stay in float unless an override selects them"
    elif stored is not None and DEPTHWISE in roles and _is_lent(node, stored.node) and not selected:
        reason = "depthwise kernels that a module reshapes for a function stay in float unless an override selects them"
    elif stored is not None and ADAPTER in roles and not selected:
        reason = _beside(node)
    elif spec is None:
        reason = f"the configuration keeps its {'weight' if stored is not None else 'inputs'} in float"
    else:
        inputs = specs.input if row.activations else None
        if inputs is not None and not config.target.placement.rounds_input(row.kind, inputs):
            inputs = None
        operator = Quantized(
            node=node, name=name, kind=row.kind, roles=roles, row=row, input=inputs, output=inputs and specs.output
        )
        return operator if stored is None else _coded(config, operator, spec, stored.node)
    return LeftInFloat(node=node, name=name, kind=row.kind, roles=roles, weight_node=weight, reason=reason)


def _unreadable(node: Node, weight: Node, row: Operator, constants: Collection[Node]) -> str:
    """Return the reason why the product of an activation and a parameter gets no codes."""
    if weight.meta["val"].is_complex():
        return "complex numbers cannot be quantized"
    value = argument(node, row.activations[-1])
    if value in constants:
        return _COMPUTED
    return (
        "the parameter is the left operand of a product; write `weight @ x` as `(x.mT @ weight.mT).mT` to quantize it"
    )


def _beside(node: Node) -> str:
    base = base_of_adapter(node)
    assert base is not None  # by definition of the role
    return (
        f"low-rank branch next to {names_of(base).name}: adapters stay in float unless an override selects them; merge "
        "the adapter into the weight to quantize both"
    )


def _coded(config: QuantConfig, op: Quantized, weight: TensorSpec, weight_node: Node) -> Coded:
    linear = Linear.of(op.node)
    if linear is not None and linear.kernel and op.input is not None and op.input.granularity is Granularity.TOKEN:
        raise ConfigError(
            f"{op.name} is a convolution, which does not support granularity='token' (its tokens are not rows of the "
            f"last dimension): add Override(pattern={op.name!r}, input=...) with granularity='tensor', or None"
        )
    pairs = pair_bound(op.kind, linear, weight, op.input) if config.target.limits_pairs else None
    return Coded(**vars(op), weight=weight, weight_node=weight_node, linear=linear, pairs=pairs)


def _require_kernels(config: QuantConfig, operators: Sequence[PlannedOperator]) -> None:
    """Raise `ConfigError` if the target refuses a weight with its activation, or if siblings have different specs."""
    rules, refusals = config.target.placement, dict[str, None]()
    for op in operators:
        if isinstance(op, Coded) and (why := rules.refuses(op.kind, op.weight, op.input, op.linear)):
            refusals[f"{op.name}: {why}"] = None
    for group in siblings(operators) if rules.fuses else ():
        ways = {op.name: _way(op) for op in group}
        if len(set(ways.values())) > 1:
            listed = "; ".join(f"{name}: {way}" for name, way in ways.items())
            refusals[f"{listed} (they are one kernel; give all the same specs)"] = None
    if refusals:
        raise ConfigError(
            f"target={str(config.target)!r} cannot run these operators as configured:\n  "
            + "\n  ".join(refusals)
            + "\nExclude them (exclude=), or give them other specs with an Override."
        )


def _way(op: PlannedOperator) -> str:
    """Describe how an operator is quantized, from the point of view of a kernel."""
    if not isinstance(op, Coded):
        return "float"
    specs = (spec for spec in (op.weight, op.input) if spec is not None)
    return ", reads ".join(f"{spec}{'' if spec.scheme.symmetric else ' with zero points'}" for spec in specs)


def require_finite_weights(gm: GraphModule, operators: Iterable[PlannedOperator]) -> None:
    """Raise `CalibrationError`, naming the tensor, if a quantized weight or its bias holds NaN or infinity."""
    coded = [operator for operator in operators if isinstance(operator, Coded)]
    with accelerator.checked_together():
        for operator in coded:
            for what, node in (("weight", operator.weight_node), *_biases(operator)):
                _require_finite(gm, operator, what, node)


def require_finite_floats(gm: GraphModule, operators: Iterable[PlannedOperator]) -> None:
    """Raise `CalibrationError` if a weight that stays in float, or any bias, holds NaN or infinity.

    Weights that get codes are checked at conversion, so that each weight is read only once, perhaps from disk. Tables
    that are not weights, such as masks, may hold infinities.
    """
    constants: dict[object, tuple[PlannedOperator, str, Node]] = {}
    for operator in operators:
        read = _biases(operator)
        if unsupported_positions(operator.node):
            read += [("weight", node) for node in operator.node.all_input_nodes]
        elif isinstance(operator, LeftInFloat) and operator_row(operator.node) is not None:
            read.append(("weight", operator.weight_node))
        for what, node in read:
            if is_parameter(node):
                constants.setdefault(node.target, (operator, what, node))
    with accelerator.checked_together():
        for operator, what, node in constants.values():
            _require_finite(gm, operator, what, node)


def _biases(operator: PlannedOperator) -> list[tuple[str, Node | None]]:
    """Return the biases of an operator, each with its description."""
    if (linear := Linear.of(operator.node)) is not None:
        return [("bias", linear.bias)]
    row = operator_row(operator.node)
    operand = argument(operator.node, row.weight) if row is not None and row.weight is not None else None
    return (
        [("bias", node) for node in operand if node.meta["val"].dim() < 2] if isinstance(operand, list | tuple) else []
    )


def _require_finite(gm: GraphModule, operator: PlannedOperator, what: str, node: Node | None) -> None:
    if is_parameter(node):
        message = f"{what} {node.target!r} of {describe(operator.node)} holds NaN or infinity; fix the model's weights"
        accelerator.require(all_finite(parameter(gm, node)), lambda: CalibrationError(message))


def _kinds(kind: str, roles: tuple[str, ...]) -> tuple[str, ...]:
    return (kind, *roles)


def _is_lent(node: Node, weight: Node) -> bool:
    """Tell whether a module passes the weight of another module to a function that reshapes the weight.

    The operand of the function is then not the input of any module, so no module could round it. Checkpoints of
    transformers cannot hold codes for such a weight, either.
    """
    caller, owner = module_path(node), str(weight.target).rpartition(".")[0]
    return "reshaped" in node.meta and owner != caller


class _Placement:
    """The analysis of `plan_quantization`: the values that are produced or read in integers."""

    def __init__(self, gm: GraphModule, config: QuantConfig, operators: list[PlannedOperator]) -> None:
        self.gm = gm
        self.quantized = {op.node: op for op in operators if isinstance(op, Quantized)}
        self.inputs = {node: op.input for node, op in self.quantized.items() if op.input is not None}
        self.rules = config.target.placement
        self.outputs: dict[Node, Node] = {}
        self.arithmetic: dict[Node, TensorSpec] = {}
        for node in gm.graph.nodes:
            if self._computes(node) and is_floating(gm, node):
                kind = target_name(node).split(".")[1]
                name = module_name(node)
                output = config.specs_for(name, kind).output
                if output is not None and not output.is_cast and not config.exclusion(name, kind):
                    self.arithmetic[node] = output
        self._settle()

    def _computes(self, node: Node) -> bool:
        """Tell whether an operator without weights may run in integers."""
        return target_name(node) in self.rules.arithmetic or (bool(node.args) and self._goes_on(node.args[0], node))

    def _goes_on(self, value: object, user: Node) -> bool:
        """Tell whether `user` belongs to the operator that computes `value`, without rounding between them."""
        return isinstance(value, Node) and self.rules.continues(value, user)

    def _rounded(self, node: Node) -> tuple[Node, list[Node]]:
        """Return the value at which an operator's output is rounded, and the clamps before it."""
        absorbed, value = [], node
        while len(value.users) == 1:
            user = next(iter(value.users))
            if clamp_bounds(user) is not None:
                absorbed.append(user)
            elif not self._goes_on(value, user):
                break
            value = user
        return value, absorbed

    def points(self) -> dict[tuple[Node, TensorSpec, int | None], Point]:
        produced: dict[Node, Point] = {}
        for node, spec in self._produced().items():
            value, absorbed = self._rounded(node)
            self.outputs[node] = value
            produced[value] = Point(value, spec, _clamped_per_channel(value), None, absorbed)
        points = {(p.value, p.spec, p.reduced): p for p in produced.values()}
        origins = self._origins(produced)
        for reader, value, spec, reduced in self._reads():
            origin = origins[value]
            if origin is not None and produced[origin].spec == spec:
                points.setdefault((value, spec, reduced), Point(value, spec, origin, None))
            else:
                point = points.setdefault((value, spec, reduced), Point(value, spec, value, set(), reduced=reduced))
                if point.readers is not None:
                    point.readers.add(reader)
        for point in list(points.values()):
            self._share_concatenation(point, produced, origins)
        return points

    def _share_concatenation(
        self, point: Point, produced: Mapping[Node, Point], origins: Mapping[Node, Node | None]
    ) -> None:
        """Give the inputs of a concatenation the quantization parameters of its output, if nothing else reads them.

        Their values are rounded to the grid of the output anyway, and rounding once loses less than rounding twice. The
        observer of the output measures the values of all inputs.
        """
        if motion(point.value) is not Motion.JOIN or point.source is not point.value:
            return
        inputs = point.value.all_input_nodes
        parts = [produced[origin] for node in inputs if (origin := origins[node]) is not None]
        shared = len(parts) == len(inputs) and all(part.spec == point.spec for part in parts)
        if shared and all(len(node.users) == 1 for node in (*inputs, *(part.value for part in parts))):
            point.readers = None
            for part in parts:
                part.source = point.value

    def _reads(self) -> Iterator[tuple[Node, Node, TensorSpec, int | None]]:
        """Yield (operator, activation, spec, dimension of its groups) for each value that is read in integers."""
        for node, spec in self.inputs.items():
            for position in self.quantized[node].row.activations:
                value = argument(node, position)
                if isinstance(value, Node) and not is_parameter(value):
                    grouped = spec.granularity is Granularity.GROUP
                    yield node, value, spec, self._reduced(node, position, value) if grouped else None
        for op in self.quantized.values():
            if isinstance(op, Attending):
                yield from self._cached_reads(op)
        for node, spec in self.arithmetic.items():
            for value in node.all_input_nodes:
                if is_floating(self.gm, value) and not self._goes_on(value, node):
                    yield node, value, spec, None

    def _cached_reads(self, op: Attending) -> Iterator[tuple[Node, Node, TensorSpec, int | None]]:
        """Yield the reads of keys and values; a cache that the model returns also holds them rounded."""
        result = output_node(self.gm)
        for cached in op.attention.cached or ():
            if op.cache.granularity is Granularity.CHANNEL:
                dim: int | None = cached.tokens
            elif op.cache.granularity is Granularity.HEAD:
                (dim,) = cached.heads
            else:
                last = cached.channels == value_of(self.gm, cached.value).dim() - 1
                dim = None if last and op.cache.granularity is not Granularity.GROUP else cached.channels
            readers = [cached.reader] + [result] * (result in cached.value.users)
            for reader in readers:
                yield reader, cached.value, op.cache, dim

    def _reduced(self, node: Node, position: int, value: Node) -> int:
        """Return the dimension of an activation that is split into groups."""
        op, rank = self.quantized[node], int(value_of(self.gm, value).dim())
        if isinstance(op, Coded) and op.linear is not None:
            return op.linear.channel_dim(rank)
        return rank - 1 if position == op.row.activations[0] else max(rank - 2, 0)

    def _produced(self) -> dict[Node, TensorSpec]:
        """Return the operators whose output is in integers."""
        produced = {node: spec for node in self.quantized if (spec := self._integer_output(node)) is not None}
        return produced | self.arithmetic

    def _integer_output(self, node: Node) -> TensorSpec | None:
        """Return the spec of a quantized operator's output, `None` if it is in float."""
        op = self.quantized[node]
        if op.output is None or op.output.is_cast or not is_floating(self.gm, node):
            return None  # the results of a recurrent layer are rounded separately if they are read in integers
        rounds = isinstance(op, Coded) and op.linear is not None and self.rules.rounds_output(op.linear)
        return op.output if rounds or node in self.wanted else None

    def _origins(self, produced: Collection[Node]) -> dict[Node, Node | None]:
        """Return, for each value, the integer value from which data movement alone computes it, or `None`."""
        origins: dict[Node, Node | None] = {}
        for node in self.gm.graph.nodes:
            sources = [value for value in moved_inputs(node) if not is_parameter(value)] if moves(node) else []
            before = origins[sources[0]] if len(sources) == 1 else None
            origins[node] = node if node in produced else before
        return origins

    def _settle(self) -> None:
        """Find the operators that run in integers: the largest set in which every member meets its requirements.

        A node can only leave the sets `wanted`, `available`, and `arithmetic`, so this takes time linear in the graph.
        """
        nodes = list(self.gm.graph.nodes)
        self.wanted, self.available = set(nodes), set(nodes)
        pending, waiting = deque(reversed(nodes)), set(nodes)
        while pending:
            node = pending.popleft()
            waiting.discard(node)
            changed = node in self.wanted and not self._is_wanted(node)
            if changed:
                self.wanted.discard(node)
            if node in self.arithmetic and not self._has_integers(node):
                del self.arithmetic[node]
                changed = True
            if node in self.available and not self._is_available(node):
                self.available.discard(node)
                changed = True
            if changed:
                again = [n for n in (*node.all_input_nodes, *node.users) if n not in waiting]
                waiting.update(again)
                pending.extend(again)

    def _has_integers(self, node: Node) -> bool:
        """Tell whether an arithmetic node has integer inputs, and, unless the target needs none, integer consumers."""
        if not (self.rules.anywhere or node in self.wanted):
            return False
        return all(value in self.available for value in node.all_input_nodes if is_floating(self.gm, value))

    def _is_wanted(self, value: Node) -> bool:
        """Tell whether all consumers of `value` read it in integers."""
        return bool(value.users) and all(
            user in self.inputs
            or user in self.arithmetic
            or ((clamp_bounds(user) is not None or moves(user)) and user in self.wanted)
            for user in value.users
        )

    def _is_available(self, value: Node) -> bool:
        """Tell whether `value` is produced in integers, with only data movement and clamps after that."""
        if value in self.arithmetic:
            return True
        if value in self.quantized:
            return self._integer_output(value) is not None
        if clamp_bounds(value) is not None or moves(value):
            sources = [n for n in moved_inputs(value) if n.op not in ("get_attr", "placeholder")]
            return bool(sources) and all(n in self.available for n in sources if _holds_floats(self.gm, n))
        return False


def _holds_floats(gm: GraphModule, node: Node) -> bool:
    value = value_of(gm, node)
    return isinstance(value, tuple | list) or is_floating(gm, node)


def _clamped_per_channel(value: Node) -> Node:
    """Return the result of clamps with bounds per channel if they are the only consumers of a value, else the value.

    No quantizer performs such a clamp. The quantizer before the clamp gets the range of the clamp's result: it then
    saturates at the bounds, and the quantizer after the clamp keeps its codes.
    """
    while len(value.users) == 1 and target_name(user := next(iter(value.users))) == "aten.clamp.Tensor":
        value = user
    return value


def _warn_without_cache(config: QuantConfig, attentions: Sequence[PlannedOperator]) -> None:
    if not _asks_for_cache(config) or any(isinstance(op, Attending) for op in attentions):
        return
    reasons = dict.fromkeys(op.reason for op in attentions if isinstance(op, LeftInFloat))
    why = "; ".join(reasons) or "no attention was found: neither the fused operator nor a softmax between two products"
    warn(f"kv_cache has no effect: {why}")


def _warn_overruled(config: QuantConfig, operators: Sequence[PlannedOperator]) -> None:
    """Warn about overrides that change nothing, because every operator that they select is excluded."""
    for override in config.overrides:
        selected = [op for op in operators if matches(override.pattern, op.name, *op.kinds)]
        excluded = [config.exclusion(op.name, *op.kinds) for op in selected]
        if override.quantizes and selected and all(excluded):
            place = selected[0].name
            warn(f"override {override.pattern!r} changes nothing: {place} is {excluded[0]}; drop one of the two")


def _warn_unmatched(config: QuantConfig, operators: list[PlannedOperator]) -> None:
    names = sorted({op.name for op in operators} | {f"op:{kind}" for op in operators for kind in op.kinds})
    for pattern in dict.fromkeys(config.patterns):
        arithmetic = (name for target in TARGETS.values() for name in target.placement.arithmetic)
        kinds = {name.split(".")[1] for name in arithmetic} | KINDS | {*ROLES}
        if any(matches(pattern, op.name, *op.kinds) for op in operators):
            continue
        if pattern.startswith("op:") and any(matches(pattern, "", kind) for kind in kinds):
            continue  # a valid kind that this model does not have: presets name several
        near = difflib.get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
        warn(f"pattern {pattern!r} selects no operator; similar names: {', '.join(near) or 'none'}")
