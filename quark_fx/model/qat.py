"""Quantization-aware training: a quantized graph whose weights are float parameters again.

Every forward pass rounds the parameters exactly as `convert` does, so the trained and the converted model compute the
same, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from quark_fx.config.specs import Granularity, TensorSpec
from quark_fx.engine.quantized_weights import share_changed
from quark_fx.errors import CalibrationError, QuarkError
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import (
    CAST,
    EMBEDDING,
    QUANTIZE,
    buffer_names,
    describe,
    device_of,
    erase_dead,
    fresh_name,
    is_finite,
    own_tensors,
    set_parameter,
    stored_tensors,
    target_name,
    tensor_of,
)
from quark_fx.graph.operators import BRANCH, argument, operator_row, set_argument, stored_weights
from quark_fx.graph.pass_manager import Change, PassRecord, copy_graph
from quark_fx.graph.straight_through import quantize_of
from quark_fx.model.constants import Constant, constant_of, parameter_name, table_of
from quark_fx.model.fake_quantize import Cast, FakeQuantize, Trained, require_float32
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.numbers.formats import INT32, parse_format
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.numbers.scales import FLOAT32
from quark_fx.plan.pair_sums import PairBound, pair_bound
from quark_fx.plan.report import Measured, Row, with_measured
from quark_fx.system.isolation import warn

ops = torch.ops.quark_fx


def prepare_qat(qmodel: QuantizedModel, *, scales: bool = False) -> QATModel:
    """Return a copy of a quantized model to fine-tune: its weights are float parameters that every forward pass rounds.

    >>> from quark_fx import quantize
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> batch = torch.randn(16, 4)
    >>> qat = prepare_qat(quantize(model, "int8_static", [batch], progress=False))
    >>> optimizer = torch.optim.AdamW(qat.parameters(), lr=1e-3)
    >>> qat(batch).square().mean().backward()
    >>> optimizer.step()
    >>> torch.equal(qat.convert()(batch), qat(batch))
    True

    Args:
        qmodel: Model from `quantize` or `load`; it does not change.
        scales: Whether to learn the scales of weights and static activations, too, if any float32 scale is allowed.
            The scales have the gradients of LSQ and need a separate learning rate, about a hundredth of their size.

    Raises:
        QuarkError: If `qmodel` is not a quantized model.

    Source:
        Jacob et al. 2018, section 3; Esser et al. 2020 for scales.
    """
    if not isinstance(qmodel, QuantizedModel):
        raise QuarkError(f"expected the result of quantize(), not {type(qmodel).__name__}")
    return QATModel(qmodel, scales=scales)


class QATModel(nn.Module):
    """A quantized model that can be trained: `prepare_qat` creates it, and `convert` returns a quantized model again.

    It has the parameters of the original model: quantized weights and biases as float32 values, all others
    unchanged. Learned scales are also parameters. The graph is the inference graph: batch norms are folded or keep
    their statistics, dropout is removed, and `train()` changes nothing. `eager()` trains the same parameters in the
    original code.

    Attributes:
        quantized: Quantized model from which this model was created; training does not change it.
        graph_module: Graph with flat inputs and outputs.
        signature: Call signature of the model.
    """

    quantized: QuantizedModel

    def __init__(self, qmodel: QuantizedModel, *, scales: bool = False) -> None:
        super().__init__()
        object.__setattr__(self, "quantized", qmodel)  # not a submodule: its codes are not state of this model
        self.signature = qmodel.signature
        prepared = _Preparation(qmodel, scales)
        self._weights, self._floats = prepared.weights, prepared.floats
        self._activations, self._points = prepared.activations, prepared.points
        self.graph_module = prepared.gm

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph; inputs and outputs have the same structure as in the original model.

        Raises:
            QuarkError: If the inputs differ in structure, rank, fixed dimensions, or dtype.
        """
        return self.signature.unflatten(self.graph_module(*self.signature.flatten(args, kwargs)))

    @torch.no_grad()
    def convert(self) -> QuantizedModel:
        """Return the quantized model for the current state; it computes the same as this model, bit for bit.

        The state consists of this object's parameters, scales, zero points, and buffers, including values from
        `load_state_dict`, from a copy, or from an average of several models.

        Raises:
            CalibrationError: If a parameter is not finite; the message names it.
        """
        _require_finite(self)
        trained, report = self._trained(), self.quantized.report()
        gm = own_tensors(self._current_graph(trained.buffers))
        rows, changes, measured = report.rows, list[Change](), dict[int, Measured]()
        for name, weight in self._weights.items():
            value, quantizer = trained.weights[name]
            codes = quantizer.codes(value)
            set_parameter(gm, name, codes)
            if isinstance(quantizer, FakeQuantize):
                set_parameter(gm, weight.constant.names[1], quantizer.step().clone())
                set_parameter(gm, weight.constant.names[2], quantizer.point().clone())
            share = float(share_changed(weight.constant.tensor.to(codes.device), codes))
            changes.append(Change(weight.name, f"{share:.1%} of the codes", share > 0, seconds=math.nan))
            now = _measured(value, quantizer)
            measured |= {i: now for i, row in enumerate(rows) if weight.is_of(row)}
        for name, parameter in trained.floats.items():
            set_parameter(gm, name, parameter.detach().clone())
        for name, quantizer in trained.activations.items():
            set_parameter(gm, name, quantizer.step().clone())
            set_parameter(gm, self._points[name], quantizer.point().clone())
        record = PassRecord("QAT", sum(c.changed for c in changes), math.nan, tuple(changes), validated=False)
        result = self.quantized.with_graph(gm, with_measured(rows, measured), (*report.passes, record))
        return result.to(device_of(self.graph_module))

    def eager(self, model: nn.Module | None = None) -> nn.Module:
        """Return a model of the original class that shares the parameters of this model, which `convert` stores.

        In training mode its dropout is active, and so are other features of its code, such as gradient checkpointing.

        Args:
            model: Float model with the same architecture, if the quantized model was loaded.

        Raises:
            QuarkError: If the graph contains a computation that no module performs; the message names the operator.
        """
        from quark_fx.model.eager import eager

        trained = self._trained()
        return eager(self.quantized.with_graph(self._current_graph(trained.buffers)), model, trained=trained)

    def _current_graph(self, buffers: Mapping[str, Tensor]) -> GraphModule:
        """Return a copy of the quantized graph that reads the current buffers."""
        gm = copy_graph(self.quantized.graph_module)
        for name in stored_tensors(gm).keys() & buffers.keys():
            set_parameter(gm, name, buffers[name])
        return gm

    def _trained(self) -> Trained:
        gm = self.graph_module
        weights: dict[str, Any] = {
            name: (tensor_of(gm, weight.parameter), gm.get_submodule(weight.quantizer))
            for name, weight in self._weights.items()
        }
        activations: dict[str, Any] = {name: gm.get_submodule(path) for name, path in self._activations.items()}
        floats: dict[str, Any] = {name: tensor_of(gm, name) for name in self._floats}
        buffers = {n: t for n, t in stored_tensors(gm).items() if not isinstance(t, nn.Parameter)}
        return Trained(weights, floats, activations, buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QATModel:
        require_float32(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


@dataclass(frozen=True)
class _Weight:
    """A quantized constant that becomes a parameter.

    Attributes:
        constant: The constant in the quantized graph.
        name: Name of the tensor in reports.
        parameter: Name of the parameter.
        quantizer: Path of the module that rounds the parameter.
    """

    constant: Constant
    name: str
    parameter: str
    quantizer: str

    def is_of(self, row: Row) -> bool:
        """Tell whether a row of the report describes this constant."""
        stored = self.constant.quantized
        return stored is not None and row.parameter == self.name and row.weight.split(" ")[0] == str(stored.format)


def _require_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not is_finite(parameter):
            raise CalibrationError(
                f"parameter {name} holds NaN or infinity: training diverged; lower the learning rate, and continue "
                "from an earlier state"
            )


def _measured(value: Tensor, quantizer: nn.Module) -> Measured:
    """Return the current quantization noise and scale of a weight."""
    noise = value.float() - quantizer(value).float()
    norms = [torch.linalg.vector_norm(x) for x in (value.float(), noise)]
    return Measured.of(norms, quantizer.step() if isinstance(quantizer, FakeQuantize) else None)


class _Preparation:
    """The rewrite of a quantized graph to a graph of parameters and fake quantizers."""

    def __init__(self, qmodel: QuantizedModel, scales: bool) -> None:
        self.config, self.scales = qmodel.config, scales
        self.gm = own_tensors(copy_graph(qmodel.graph_module))
        self.weights: dict[str, _Weight] = {}
        self.floats: list[str] = []
        self.activations: dict[str, str] = {}
        self.points: dict[str, str] = {}  # names of zero points, keyed by the names of the scales
        self.steps: dict[str, Tensor] = {}
        self.buffers, self.read_as_is = buffer_names(self.gm), self._read_as_is()
        self._expose_values(qmodel.graph_module)
        bounds, factors = self._pair_bounds(), self._bias_factors()
        self._round_activations()
        self._round_values(bounds, factors)
        erase_dead(self.gm)
        self.gm.graph.lint()
        self.gm = GraphModule(self.gm, self.gm.graph, class_name="TrainedGraph")
        self._register_floats()
        if cut := [describe(node) for node in self.gm.graph.nodes if target_name(node) == QUANTIZE]:
            warn(
                f"no gradient flows through {', '.join(cut)}, because the graph uses the codes there without "
                "dequantizing them"
            )

    # First, each quantized constant becomes a parameter that operators read, so that the operator table finds it.

    def _expose_values(self, original: GraphModule) -> None:
        for node in list(self.gm.graph.nodes):
            if (table := table_of(self.gm, node)) is not None:
                lookup, constant = table
                if self._is_stored(constant):
                    with self.gm.graph.inserting_before(node):
                        value = self._read(constant, original)
                        rows = self.gm.graph.node_copy(lookup)
                    set_argument(rows, 0, value)
                    rows.meta["val"] = node.meta.get("val")
                    node.replace_all_uses_with(rows)
            elif (stored := constant_of(self.gm, node)) is not None and self._is_stored(stored):
                with self.gm.graph.inserting_before(node):
                    value = self._read(stored, original)
                value.meta |= node.meta
                node.replace_all_uses_with(value)
        erase_dead(self.gm)

    def _read_as_is(self) -> frozenset[str]:
        """Return the names of tensors that a consumer reads without a cast, directly or after a lookup of rows."""
        names: set[str] = set()
        for node in self.gm.graph.nodes:
            if node.op == "get_attr":
                lookups = [user for user in node.users if target_name(user) == EMBEDDING]
                readers = [user for user in node.users if user not in lookups] + [u for n in lookups for u in n.users]
                if any(target_name(user) != CAST for user in readers):
                    names.add(str(node.target))
        return frozenset(names)

    def _is_stored(self, constant: Constant) -> bool:
        """Return whether a constant is quantized, or is a parameter stored in 16-bit floats and cast to float32."""
        if constant.quantized is not None:
            return True
        half = constant.tensor.dtype in (torch.float16, torch.bfloat16) and constant.dtype == torch.float32
        return half and constant.names[0] not in self.buffers | self.read_as_is

    def _read(self, constant: Constant, original: GraphModule) -> Node:
        """Insert a node that reads the values of a constant, which becomes a parameter."""
        codes = constant.names[0]
        if codes not in self.weights:
            name = fresh_name(self.gm, codes.removesuffix("_codes"))
            value = replace(constant, dtype=torch.float32).value().clone()
            _register(self.gm, name, nn.Parameter(value))
            whole, tensor = constant.stored, tensor_of(original, codes)
            stored = replace(whole, codes=tensor) if isinstance(whole, QuantizedTensor) else tensor
            constant = replace(constant, stored=stored)
            self.weights[codes] = _Weight(constant, parameter_name(self.gm, codes), name, f"{name}_quantizer")
        return self.gm.graph.get_attr(self.weights[codes].parameter)

    def _by_parameter(self) -> dict[str, _Weight]:
        return {weight.parameter: weight for weight in self.weights.values()}

    def _pair_bounds(self) -> dict[str, PairBound]:
        """Return bounds for pairs of codes whose products the target adds in 16 bits, keyed by the codes' names."""
        bounds: dict[str, PairBound] = {}
        by_parameter = self._by_parameter()
        for node in self.gm.graph.nodes if self.config.target.limits_pairs else ():
            row = operator_row(node)
            for read in stored_weights(node, row) if row is not None and row.activations else ():
                weight = by_parameter.get(str(read.node.target))
                if row is None or weight is None or (stored := weight.constant.quantized) is None:
                    continue
                activation = _activation_spec(argument(node, row.activations[0]))
                bound = pair_bound(row.kind, Linear.of(node), _spec_of(stored), activation)
                # Codes that exceed the bound were computed for another kernel.
                if bound is not None and not bool(bound.exceeded(stored.codes).any()):
                    bounds[weight.constant.names[0]] = bound
        return bounds

    def _bias_factors(self) -> dict[str, tuple[str, str]]:
        """Return the activation scale and the weight codes that determine an int32 bias's scale, keyed by its codes."""
        factors: dict[str, tuple[str, str]] = {}
        by_parameter = self._by_parameter()
        for node in self.gm.graph.nodes:
            if (linear := Linear.of(node)) is None or linear.bias is None:
                continue
            bias, weight = (by_parameter.get(str(n.target)) for n in (linear.bias, linear.stored.node))
            pair = quantize_of(linear.activation)
            scale: Any = pair.args[1] if pair is not None else None
            if bias is None or weight is None or scale is None or scale.op != "get_attr":
                continue
            sums, stored = bias.constant.quantized, weight.constant.quantized
            if sums is None or stored is None or sums.format != INT32:
                continue
            if torch.equal(tensor_of(self.gm, str(scale.target)) * stored.scale, sums.scale):
                factors[bias.constant.names[0]] = str(scale.target), weight.constant.names[0]
        return factors

    def _round_values(self, bounds: dict[str, PairBound], factors: dict[str, tuple[str, str]]) -> None:
        """Insert a rounding module after each parameter."""
        modules: dict[str, FakeQuantize | Cast] = {}
        for codes, weight in sorted(self.weights.items(), key=lambda item: item[0] in factors):
            constant, quantizers = weight.constant, None
            if (stored := constant.quantized) is None:
                modules[codes] = Cast(constant.tensor.dtype, constant.dtype)
                continue
            if codes in factors:
                scale, other = factors[codes]
                product = self.gm.get_submodule(self.activations[scale]), modules[other]
                quantizers = product if all(isinstance(part, FakeQuantize) for part in product) else None
            specs = [self.config.weight, *(o.weight for o in self.config.overrides), self.config.bias]
            modules[codes] = FakeQuantize(
                self._step(constant.names[1], str(stored.format), specs),
                stored.zero_point,
                _scheme(stored, specs),
                stored.axis,
                stored.block_size,
                dtype=constant.dtype,
                pairs=bounds.get(codes),
                factors=quantizers,  # type: ignore[arg-type]
            )
        by_parameter = self._by_parameter()
        for codes, weight in self.weights.items():
            self.gm.add_submodule(weight.quantizer, modules[codes])
        rounded: dict[str, Node] = {}
        for node in list(self.gm.graph.nodes):
            name = str(node.target)
            if node.op != "get_attr" or name not in by_parameter:
                continue
            first = rounded.get(name)
            if first is None:
                with self.gm.graph.inserting_after(node):
                    first = rounded[name] = self.gm.graph.call_module(by_parameter[name].quantizer, ())
            node.replace_all_uses_with(first)
            if not first.args:
                first.args = (node,)

    # Activations

    def _round_activations(self) -> None:
        """Replace each pair of `quantize` and `dequantize` with one operator that has a gradient."""
        config, graph = self.config, self.gm.graph
        specs = [config.input, config.output, *(s for o in config.overrides for s in (o.input, o.output))]
        for node in list(graph.nodes):
            pair = quantize_of(node)
            if pair is None:
                continue
            arguments: Any = pair.args
            x, scale, zero_point, fmt, *layout = arguments
            dtype: Any = node.kwargs.get("dtype", node.args[6] if len(node.args) > 6 else torch.float32)
            with graph.inserting_before(node):
                if scale.op == "get_attr":
                    path = self._quantizer(str(scale.target), str(zero_point.target), fmt, dtype, specs, *layout)
                    rounded = graph.call_module(path, (x,))
                else:
                    wide = graph.call_method("float", (x,))
                    value = graph.call_function(ops.fake_quantize.default, (wide, scale, zero_point, fmt, *layout))
                    rounded = graph.call_method("to", (value, dtype))
            rounded.meta["val"] = node.meta.get("val")
            node.replace_all_uses_with(rounded)
        erase_dead(self.gm)

    def _quantizer(
        self,
        scale: str,
        zero_point: str,
        fmt: str,
        dtype: torch.dtype,
        specs: Iterable[Any],
        axis: int | None = None,
        block_size: int = 0,
    ) -> str:
        """Return the path of the module that rounds with the stored scale `scale`; add the module if it is missing."""
        if scale not in self.activations:
            path = fresh_name(
                self.gm, scale.removesuffix("_scale") if scale.endswith("_scale") else f"{scale}_quantizer"
            )
            scheme = Scheme(format=parse_format(fmt), symmetry=Symmetry.SYMMETRIC_FULL)
            step, point = self._step(scale, fmt, specs), tensor_of(self.gm, zero_point)
            self.gm.add_submodule(path, FakeQuantize(step, point, scheme, axis, block_size, dtype=dtype))
            self.activations[scale], self.points[scale] = path, zero_point
        return self.activations[scale]

    def _step(self, name: str, fmt: str, specs: Iterable[Any]) -> Tensor:
        """Return the tensor of a scale, which all its users share; a learned scale is a parameter."""
        if name not in self.steps:
            alike = [s for s in specs if isinstance(s, TensorSpec) and str(s.format) == fmt]
            free = bool(alike) and all(s.scale == FLOAT32 and s.group_rows == 1 for s in alike)
            value = tensor_of(self.gm, name).detach().clone()
            learned = self.scales and free and fmt != str(INT32)
            self.steps[name] = nn.Parameter(value) if learned else value
        return self.steps[name]

    def _register_floats(self) -> None:
        for node in self.gm.graph.nodes:
            name = str(node.target)
            if node.op != "get_attr" or name in self.buffers or isinstance(tensor_of(self.gm, name), nn.Parameter):
                continue
            value = tensor_of(self.gm, name)
            made_up = any(u.meta.get("factor") or BRANCH in u.meta for u in node.users)  # eager() lacks such parameters
            if value.is_floating_point() and not made_up and not any(u.target in _WITH_CODES for u in node.users):
                _register(self.gm, name, nn.Parameter(value))
                self.floats.append(name)


_WITH_CODES = (ops.quantize.default, ops.dequantize.default)


def _register(gm: GraphModule, name: str, parameter: nn.Parameter) -> None:
    """Register `parameter` in place of the tensor of `gm` with the dotted name `name`."""
    set_parameter(gm, name, parameter)
    path, _, leaf = name.rpartition(".")
    owner = gm.get_submodule(path)
    del owner._buffers[leaf]
    owner.register_parameter(leaf, parameter)


def _scheme(stored: QuantizedTensor, specs: Iterable[TensorSpec | Any]) -> Scheme:
    """Return the narrowest scheme of `specs` that contains all codes of a constant; the whole format if none does."""
    fmt = stored.format
    whole = Scheme(format=fmt, symmetry=Symmetry.SYMMETRIC_FULL)
    if not fmt.is_integer:
        return whole
    least, most = (int(end) for end in torch.aminmax(stored.codes.to(torch.int64)))
    schemes = [spec.scheme for spec in specs if isinstance(spec, TensorSpec) and spec.format == fmt]
    holding = [s for s in schemes if s.limits[0] <= least and most <= s.limits[1]]
    return min(holding, key=lambda s: s.limits[1] - s.limits[0], default=whole)


def _spec_of(stored: QuantizedTensor) -> TensorSpec:
    """Return a spec of the format and granularity of a weight."""
    size = stored.layout.shape[stored.axis] if stored.axis is not None else 0
    if 0 < stored.block_size < size:
        return TensorSpec(format=stored.format, granularity=Granularity.GROUP, group_size=stored.block_size)
    return TensorSpec(format=stored.format, granularity=Granularity.CHANNEL)


def _activation_spec(read: Node) -> TensorSpec | None:
    """Return a spec with the format and granularity of an operator's activation; `None` if it is in float."""
    pair = quantize_of(read)
    if pair is None:
        return None
    arguments: Any = pair.args
    scale, axis = arguments[1], arguments[4] if len(arguments) > 4 else None
    return TensorSpec(
        format=parse_format(str(arguments[3])),
        granularity=Granularity.TENSOR if axis is None else Granularity.TOKEN,
        dynamic=scale.op != "get_attr",
    )


__all__ = ["QATModel", "prepare_qat"]
