"""Conversion of the original model to a form that computes its quantized graph."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from quark_fx.capture.capture import unwrapped
from quark_fx.checkpoints.files import some_of
from quark_fx.errors import ExportError, QuarkError
from quark_fx.graph.absorbed import AbsorbedMap
from quark_fx.graph.nodes import describe, erase_dead, module_classes, stored_tensors
from quark_fx.graph.straight_through import quantize_of, records_gradients, run_with_gradients
from quark_fx.model.constants import Constant
from quark_fx.model.correspondence import Correspondence, correspond, shell_of
from quark_fx.model.eager_attention import AttentionRounding, RoundedArgument, wrap_forward
from quark_fx.model.eager_kernels import kernel_modules
from quark_fx.model.fake_quantize import Cast, FakeQuantize, Trained, require_float32
from quark_fx.model.hooks import bound_elsewhere, hooks_within
from quark_fx.model.kernels.modules import KernelLinear, KernelModule, keep_as_it_is
from quark_fx.model.module_slices import ModuleCall
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.rounded_attention import RoundedAttention, RoundedFactor
from quark_fx.model.rounded_modules import Activation, Branch, Factor
from quark_fx.model.stored_weights import drop_hooks, with_stored_weights
from quark_fx.system.isolation import isolated, warn
from quark_fx.system.untrusted import brief

logger = logging.getLogger(__name__)

ops = torch.ops.quark_fx


class Dequantize(nn.Module):
    """A parametrization that dequantizes codes.

    Args:
        constant: Constant whose codes are parametrized; scale and zero point become buffers.
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, constant: Constant) -> None:
        super().__init__()
        stored = constant.quantized
        self.register_buffer("scale", _own(None if stored is None else stored.scale))
        self.register_buffer("zero_point", _own(None if stored is None else stored.zero_point))
        layout = ("", None, 0) if stored is None else (str(stored.format), stored.axis, stored.block_size)
        self.layout = (*layout, constant.dtype)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the values of `codes`."""
        if self.scale is None:
            return codes.to(self.layout[-1])
        value: Tensor = ops.dequantize(codes, self.scale, self.zero_point, *self.layout)
        return value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Dequantize:
        require_float32(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class _Multiply(nn.Module):
    """A module that multiplies its input by the factor of a pass, whose tensors are buffers."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.operator = factor.operator
        for i, tensor in enumerate(factor.tensors):
            self.register_buffer(f"factor{i}", _own(tensor))

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` multiplied by the factor."""
        return Factor(self.operator, tuple(tensor.to(x.dtype) for tensor in self.buffers())).apply(x)


class Round(nn.Module):
    """A module whose hooks round the floating-point input or result of another module.

    It first multiplies by the factors of a pass, then calls `quantize` and `dequantize`. If gradients are recorded, one
    operator with a straight-through gradient replaces these two.

    Args:
        activation: Description of the rounding; a static scale and zero point become buffers.
        trained: Module that rounds during training, in place of these operators.
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(self, activation: Activation, trained: FakeQuantize | None = None) -> None:
        super().__init__()
        self.trained = trained
        self.register_buffer("scale", _own(activation.scale))
        self.register_buffer("zero_point", _own(activation.zero_point))
        self.factors = nn.ModuleList(_Multiply(factor) for factor in activation.factors)
        self.rounds = activation.rounds
        self.format, self.cast = activation.format, activation.cast
        self.layout, self.measurement = activation.layout, activation.measurement

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        """Return `x`, multiplied by the factors and rounded, in its dtype; with `again`, only rounded."""
        for factor in () if again else self.factors:
            x = factor(x)
        if not self.rounds:
            return x
        if self.trained is not None:
            rounded: Tensor = self.trained(x)
            return rounded
        if self.cast is not None:
            return x.to(self.cast).to(x.dtype)
        scale, zero_point = self.scale, self.zero_point
        if scale is None:
            scale, zero_point = ops.dynamic_qparams(x, *self.measurement)
        if records_gradients(x):
            straight: Tensor = ops.fake_quantize(x, scale, zero_point, self.format, *self.layout)
            return straight
        codes = ops.quantize(x, scale, zero_point, self.format, *self.layout)
        value: Tensor = ops.dequantize(codes, scale, zero_point, self.format, *self.layout, x.dtype)
        return value

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Round the one floating-point tensor among the arguments of `module`: a forward pre-hook."""
        return _with_floating(self, (args, kwargs), f"{type(module).__name__} was quantized for one input")

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Round the one floating-point tensor in the result of `module`: a forward hook."""
        return _with_floating(self, result, f"{type(module).__name__} was quantized for one result")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Round:
        require_float32(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class Branched(nn.Module):
    """A branch in float for a module: it multiplies some directions of the input and is added to the module's result.

    Args:
        path: Path of the module.
        before: Module that applies the factors before the split.
        directions: Directions that are split off the input, shape (rank, inputs).
        back: Transposed directions, shape (inputs, rank).
        after: Module that rounds the rest of the input.
        result: Module that rounds the module's result before the sum.
        columns: Weights of the directions, shape (outputs, rank).
    """

    directions: Tensor
    back: Tensor
    columns: Tensor

    def __init__(
        self, path: str, before: Round, directions: Tensor, back: Tensor, after: Round, result: Round, columns: Tensor
    ) -> None:
        super().__init__()
        self.path, self.before, self.after, self.result = path or "the model", before, after, result
        self.register_buffer("directions", _own(directions))
        self.register_buffer("back", _own(back))
        self.register_buffer("columns", _own(columns))

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward` for the rounded rest of the input, plus the branch's product."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        index = _floating(leaves, f"{self.path} was quantized for one input")
        x = self.before(leaves[index])
        parts = F.linear(x, self.directions.to(x.dtype))
        leaves[index] = self.after(x - F.linear(parts, self.back.to(x.dtype)))
        args, kwargs = pytree.tree_unflatten(leaves, spec)

        def whole(y: Tensor) -> Tensor:
            y = self.result(y)
            # The module may reshape its input or result, which keeps the order of rows.
            return y + F.linear(parts, self.columns.to(y.dtype)).reshape(y.shape)

        return _with_floating(whole, forward(*args, **kwargs), f"{self.path} was quantized for one result")


class Rewritten(nn.Module):
    """A module that computes the piece of the quantized graph that replaces another module.

    Args:
        graph_module: Graph with one input, the module's floating-point input; other arguments are fixed at capture.
        floating: Whether that input is floating-point; if false, it must be the only tensor.
    """

    def __init__(self, graph_module: GraphModule, *, floating: bool = True) -> None:
        super().__init__()
        self.graph_module, self.floating = graph_module, floating

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result for the one floating-point tensor among the arguments, or for all tensors."""
        leaves = pytree.tree_leaves((args, kwargs))
        if not self.floating:
            return self.graph_module(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        x = leaves[_floating(leaves, "a rewritten module has one input")]
        if records_gradients(x):
            return run_with_gradients(self.graph_module, x)
        return self.graph_module(x)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rewritten:
        require_float32(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class Undo(nn.Module):
    """A module that inverts an affine map that is folded into an operator, because the model's code still applies it.

    Args:
        absorbed: Affine map to invert.
        kernel: Number of dimensions after the channel dimension.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, absorbed: AbsorbedMap, kernel: int) -> None:
        super().__init__()
        for name in ("factor", "offset"):
            values = torch.tensor(getattr(absorbed, name), dtype=torch.float32)
            self.register_buffer(name, values.reshape(-1, *[1] * kernel))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input for which the map returns `x`."""
        return (x - self.offset.to(x.dtype)) / self.factor.to(x.dtype)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Apply the inverse map to the input of `module`: a forward pre-hook."""
        return _with_floating(self, (args, kwargs), f"{type(module).__name__} was quantized for one input")

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        """Apply the inverse map to the result of `module`: a forward hook."""
        return _with_floating(self, result, f"{type(module).__name__} was quantized for one result")


def _with_floating(change: Callable[[Tensor], Tensor], values: Any, expected: str) -> Any:
    """Apply `change` to the only floating-point tensor in `values`, and return the new values."""
    leaves, spec = pytree.tree_flatten(values)
    index = _floating(leaves, expected)
    leaves[index] = change(leaves[index])
    return pytree.tree_unflatten(leaves, spec)


def _floating(leaves: Sequence[Any], expected: str) -> int:
    """Return the index of the one floating-point tensor."""
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    if len(indices) != 1:
        raise QuarkError(
            f"{expected}, and this call has {len(indices)} floating-point tensors there; call the quantized model "
            "itself"
        )
    return indices[0]


@isolated
def eager(
    qmodel: QuantizedModel,
    model: nn.Module | None = None,
    *,
    trained: Trained | None = None,
    kernels: bool = False,
) -> nn.Module:
    """Return a model of the original class that computes the same as `qmodel`.

    Parametrizations dequantize the codes of quantized parameters, and hooks round the inputs or results of modules. A
    module without parameters that a pass rewrote is replaced by a module with the rewritten computation.
    `torch.nn.utils.parametrize.cached()` keeps the dequantized weights while it is active.

    Args:
        qmodel: Model from `quantize` or `load`.
        model: Float model with the same class and configuration, for a `qmodel` that was loaded or made from an
            `ExportedProgram`; the values of its parameters do not matter, and do not change.
        trained: Parameters of `qmodel` during training, and the modules that round them; the result shares them.
        kernels: Whether to replace linear layers with modules that use the kernels of `compile()`, and embeddings with
            modules that look up codes. The result has a `kernel_report`, and is for inference.

    Raises:
        QuarkError: If the graph contains a computation that no module performs; the message names the operator.
    """
    source, changes = placed(qmodel, model)
    if trained and (changes.parts or changes.computed):
        names = {
            *changes.parts,
            *(n for path, sources in changes.computed.items() for n in sources or [path or "the model"]),
        }
        raise QuarkError(
            f"the graph trains weights that are slices of {', '.join(sorted(names))} or computed from them, and no "
            "parameter of the float model corresponds to them during training; call convert() first, or train the "
            "result of prepare_qat"
        )
    result = copy.deepcopy(source)
    if functions := bound_elsewhere(result, source):
        raise QuarkError(
            f"{some_of(functions)} would still call the float model, because a function refers to the float model's "
            "modules or parameters; bind the function to its own module with types.MethodType, or call the quantized "
            "model itself"
        )
    if hooks := hooks_within(source, (*changes.identities, *changes.slices)):
        warn(
            f"eager() drops the hooks {some_of(hooks)}: the quantized graph already includes what these hooks compute; "
            "if a hook has side effects, register it again on the module that eager() returns"
        )
    shared: dict[tuple[str, ...], nn.Parameter] = {}
    for path in changes.identities:
        owner, _, leaf = path.rpartition(".")
        setattr(result.get_submodule(owner), leaf, nn.Identity().eval())
    replaced, report = kernel_modules(qmodel.graph_module, source, changes) if kernels else ({}, None)
    for path, kernel in replaced.items():
        owner, _, leaf = path.rpartition(".")
        setattr(result.get_submodule(owner), leaf, kernel)
    installed: dict[tuple[int, str], tuple[str, ...]] = {}
    fixed: list[str] = []
    for name, constant in changes.constants.items():
        owner, _, leaf = name.rpartition(".")
        if owner in replaced:
            continue
        module = result.get_submodule(owner)
        if installed.setdefault((id(module), leaf), constant.names) != constant.names:
            raise QuarkError(
                f"{name} would have to be stored in several formats; use the same specs for all operators that read it"
            )
        if parametrize.is_parametrized(module, leaf) or (trained and _install_trained(module, leaf, constant, trained)):
            continue
        _install(module, leaf, constant, shared)
        if trained and (parameter := module._parameters.get(leaf)) is not None:
            fixed.append(name)
            parameter.requires_grad_(False)
    if fixed:
        warn(
            f"{', '.join(fixed)} cannot be trained here, because the quantized graph stores them in another form; to "
            "train them, train the result of prepare_qat"
        )
    for module in result.modules():
        if isinstance(module, nn.RNNBase) and parametrize.is_parametrized(module):
            module.register_forward_pre_hook(_gather_weights)
            module.register_forward_hook(_forget_weights)
            _forget_weights(module)
    _part(
        {
            *changes.slices,
            *(path for path, _, _ in changes.maps),
            *changes.rounding.inputs,
            *changes.rounding.outputs,
            *changes.attentions,
        },
        result,
    )
    scales = {id(tensor): name for name, tensor in stored_tensors(qmodel.graph_module).items()}
    quantizers = trained.activations if trained is not None else {}

    def rounds(activation: Activation) -> Round:
        return Round(activation, quantizers.get(scales.get(id(activation.scale), "")))

    for path, (call, piece) in changes.slices.items():
        _require_tensor(result.get_submodule(path), call)
        owner, _, leaf = path.rpartition(".")
        rewritten = Rewritten(
            _with_quantizers(piece.module(qmodel.graph_module), quantizers),
            floating=bool(call.entry.meta["val"].is_floating_point()),
        )
        if path in changes.computed:
            _compute_with(result.get_submodule(path), rewritten)
        else:
            setattr(result.get_submodule(owner), leaf, rewritten)
    for i, (path, linear, absorbed) in enumerate(changes.maps):
        if absorbed.before:
            module = result.get_submodule(path)
            module.add_module(f"undo_{i}", undo := Undo(absorbed, len(linear.kernel)))
            module.register_forward_pre_hook(undo.before, with_kwargs=True)
    for path, activation in changes.rounding.inputs.items():
        module = result.get_submodule(path)
        if isinstance(module, KernelLinear) and module.rounds:
            activation = Activation(factors=activation.factors)
            if not activation.factors:
                continue
        if (at := activation.split) is not None:
            branched = _branched(path, activation, at, changes.rounding.branches[path], rounds)
            module.add_module("low_rank_branch", branched)
            wrap_forward(module, branched.run)
        else:
            module.add_module("round_input", rounding := rounds(activation))
            module.register_forward_pre_hook(rounding.before, with_kwargs=True)
    for path, activation in changes.rounding.outputs.items():
        module = result.get_submodule(path)
        module.add_module("round_output", rounding := rounds(activation))
        module.register_forward_hook(rounding.after)
    for i, (path, linear, absorbed) in reversed([*enumerate(changes.maps)]):
        if not absorbed.before:
            module = result.get_submodule(path)
            module.add_module(f"undo_{i}", undo := Undo(absorbed, len(linear.kernel)))
            module.register_forward_hook(undo.after)
    for path, attention in changes.attentions.items():
        module = result.get_submodule(path)
        module.add_module("round_attention", attending := _attention_rounding(path, attention, rounds))
        wrap_forward(module, attending.run)
    if missing := [name for name, p in result.named_parameters() if p.is_meta]:
        raise QuarkError(
            f"the quantized graph does not contain {', '.join(missing)}; pass the float model: qmodel.eager(model)"
        )
    for name, refusal in (("save_pretrained", _refuse_to_save), ("resize_token_embeddings", _refuse_to_resize)):
        if hasattr(result, name):
            vars(result)[name] = refusal
    if report is not None:
        vars(result)["kernel_report"] = report
        keep_as_it_is(result)
        result.requires_grad_(False)
    return result.eval()


def _compute_with(module: nn.Module, rewritten: Rewritten) -> None:
    """Make a module run `rewritten`, and remove its hooks and the parameters that the quantized graph stores."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.clear()
    for inner in module.modules():
        for leaf, value in inner._parameters.items():
            if value is not None and value.is_meta:
                inner._parameters[leaf] = None
        drop_hooks(inner)
    module.add_module("rewritten", rewritten)
    wrap_forward(module, lambda _, *args, **kwargs: rewritten(*args, **kwargs))


def _branched(
    path: str, activation: Activation, at: int, branch: Branch, rounds: Callable[[Activation], Round]
) -> Branched:
    """Return the module that adds a branch to the result of a module; `activation` describes the split of its input."""
    factors = activation.factors
    before, after = Activation(factors=factors[:at]), replace(activation, factors=factors[at + 1 :])
    result = Activation() if branch.rounded is None else branch.rounded
    directions, back = factors[at].tensors
    return Branched(path, rounds(before), directions, back, rounds(after), rounds(result), branch.columns)


def _attention_rounding(
    path: str, attention: RoundedAttention, rounds: Callable[[Activation], Round]
) -> AttentionRounding:
    """Return the module that rounds the keys and values of an attention, when they enter a cache or at its products."""
    modules: dict[int, Round] = {}

    def rounding(activation: Activation) -> Round:
        return modules.setdefault(id(activation), rounds(activation))

    def argument(factor: RoundedFactor) -> RoundedArgument:
        scale = factor.activation.scale
        heads = 0 if scale is None or scale.dim() < 3 else scale.shape[-3]
        return RoundedArgument(rounding(factor.activation), factor.position, factor.transposed, factor.cached, heads)

    products = [[argument(factor) for factor in product] for product in attention.products]
    entering = attention.entering
    entered = None if entering is None else (rounding(entering[0]), rounding(entering[1]))
    return AttentionRounding(path, products, entered, attention.sizes)


def is_eager(model: nn.Module) -> bool:
    """Tell whether `eager` returned the model."""
    return any(isinstance(module, _EAGER) for module in model.modules())


_EAGER = (Dequantize, FakeQuantize, Cast, Round, Rewritten, KernelModule)


def _refuse_to_resize(*_: Any, **__: Any) -> None:
    raise QuarkError("a quantized embedding cannot be resized; resize the float model and quantize it again")


def _refuse_to_save(*_: Any, **__: Any) -> None:
    raise ExportError(
        "from_pretrained could not read the weights of an eager() model; write the quantized model with "
        "quark_fx.export.huggingface"
    )


def placed(
    qmodel: QuantizedModel, model: nn.Module | None = None, *, at_readers: bool = False
) -> tuple[nn.Module, Correspondence]:
    """Return the original model, without the weights that the graph stores, and the changes to its modules.

    See `eager` for the arguments and errors, and `place_rounding` for `at_readers`.
    """
    if model is None:
        if qmodel.source is None:
            raise QuarkError(
                "this quantized model does not contain its float module (it was loaded from files, or created from an "
                "ExportedProgram or a module that cannot be copied); pass a float model of the same architecture"
            )
        changes = correspond(qmodel.source, qmodel.graph_module, qmodel.kept, at_readers=at_readers)
        return with_stored_weights(qmodel.source, changes.stored), changes
    if not isinstance(model, nn.Module):
        raise QuarkError(f"eager() takes a float model of the architecture that was quantized, not {brief(model)}")
    model = unwrapped(model)
    if "no_shapes" in qmodel.graph_module.meta:
        raise QuarkError(
            f"the shapes in this graph are not known ({qmodel.graph_module.meta['no_shapes']}); call the quantized "
            "model itself, or quantize again with this version of torch"
        )
    _require_same_modules(qmodel, model)
    try:
        source = shell_of(model, qmodel.graph_module, qmodel.kept)
        changes = correspond(source, qmodel.graph_module, qmodel.kept, at_readers=at_readers)
        return with_stored_weights(source, changes.stored), changes
    except QuarkError:
        raise
    except Exception as error:  # a damaged graph may cause any error
        raise QuarkError(
            f"the stored graph does not fit the model: {type(error).__name__}: {brief(str(error))}; "
            "save the quantized model again"
        ) from error


def _require_same_modules(qmodel: QuantizedModel, model: nn.Module) -> None:
    """Raise `QuarkError` unless a model has the modules and parameters of the captured model."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, name in module_classes(qmodel.graph_module).items():
        class_name = type(modules[path]).__name__ if path in modules else "missing"
        if class_name != name:
            raise QuarkError(
                f"module {path or 'at the top'} was a {name} and is {class_name} in the model that is passed; pass a "
                "float model of the same architecture"
            )
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if qmodel.parameter_names is not None and (other := names ^ qmodel.parameter_names):
        raise QuarkError(
            f"the passed model and the quantized model differ in the parameters "
            f"{', '.join(sorted(other)[:3])}; pass a float model of the same architecture"
        )


def _part(paths: Collection[str], model: nn.Module) -> None:
    """Give each of `paths` a separate copy of its module if the module has several names and lacks parameters."""
    names = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for path in paths:
        module = model.get_submodule(path)
        if names[id(module)] > 1 and next(module.parameters(), None) is None:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, copy.deepcopy(module))


def _require_tensor(module: nn.Module, call: ModuleCall) -> None:
    """Raise `QuarkError` unless a module returns one tensor for the input of its call."""
    sizes = [d if isinstance(d, int) else d.node.hint for d in call.entry.meta["val"].shape]
    try:
        result = copy.deepcopy(module).to("meta")(torch.empty(sizes, dtype=call.entry.meta["val"].dtype, device="meta"))
    except Exception as error:  # the module's own code may raise any error without its other arguments
        logger.debug("module %s does not run on its input alone: %s", call.path, error)
        result = None
    if not isinstance(result, Tensor):
        name = f"module {call.path}" if call.path else "the model"
        raise QuarkError(
            f"{name}, which a pass rewrote, does not map one tensor to one tensor; call the quantized model itself, or "
            f"move {describe(call.result)} to a module that does"
        )


def _install(owner: nn.Module, leaf: str, constant: Constant, shared: dict[tuple[str, ...], nn.Parameter]) -> None:
    """Make `constant` the parameter or buffer `leaf` of `owner`."""
    if leaf in owner._buffers:
        owner._buffers[leaf] = constant.value().clone()
        return
    old = owner._parameters[leaf]
    learns = constant.is_float and old is not None and old.requires_grad
    if constant.names not in shared:
        shared[constant.names] = nn.Parameter(constant.tensor.clone(), learns)
    if not constant.is_float and constant.tensor.is_floating_point():
        # transformers takes the dtype of the first floating-point parameter as the dtype of the model.
        del owner._parameters[leaf]
        owner.register_buffer(leaf, shared[constant.names].data)
    else:
        owner._parameters[leaf] = shared[constant.names]
    if not constant.is_float:
        _parametrize(owner, leaf, Dequantize(constant))


def _install_trained(owner: nn.Module, leaf: str, constant: Constant, trained: Trained) -> bool:
    """Set the attribute `leaf` of `owner` to a trained parameter or buffer; return whether there is one."""
    weight, value = trained.weights.get(constant.names[0]), trained.floats.get(constant.names[0])
    if leaf in owner._buffers:
        if shares := constant.is_float and constant.names[0] in trained.buffers:
            owner._buffers[leaf] = trained.buffers[constant.names[0]]  # the model's code may write to it
        return shares
    if weight is None and value is None:
        return False
    if value is not None and value.shape != constant.tensor.shape:
        return False
    owner._parameters[leaf] = value if weight is None else weight[0]
    if weight is not None:
        _parametrize(owner, leaf, weight[1])
    return True


def _parametrize(owner: nn.Module, leaf: str, computes: nn.Module) -> None:
    parametrize.register_parametrization(owner, leaf, computes, unsafe=True)
    # Only this module has this class. torch's own error would suggest a state_dict, which lacks the specs.
    type(owner).__getstate__ = _refuse_to_pickle  # type: ignore[method-assign]


def _refuse_to_pickle(_: Any) -> NoReturn:
    raise QuarkError(
        "the result of eager() cannot be pickled: write the quantized model with qmodel.save(directory), then recreate "
        "this one with quark_fx.load(directory).eager(model)"
    )


def _with_quantizers(gm: GraphModule, quantizers: Mapping[str, FakeQuantize]) -> GraphModule:
    """Replace quantizers of `gm` with the trained modules in `quantizers`, keyed by the names of their scales."""
    for node in list(gm.graph.nodes):
        pair = quantize_of(node)
        scale: Any = pair.args[1] if pair is not None else None
        quantizer = quantizers.get(str(scale.target)) if scale is not None and scale.op == "get_attr" else None
        if pair is None or quantizer is None:
            continue
        path = f"{node.name}_quantizer"
        gm.add_submodule(path, quantizer)
        with gm.graph.inserting_before(node):
            node.replace_all_uses_with(gm.graph.call_module(path, (pair.args[0],)))
    erase_dead(gm)
    gm.recompile()
    return gm


def _gather_weights(module: Any, *_: Any) -> None:
    """Update a recurrent layer's list of weights, which refers to the original parameters."""
    module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]


def _forget_weights(module: Any, *_: Any) -> None:
    """Free the dequantized values of a recurrent layer."""
    module._flat_weights = [None] * len(module._flat_weights_names)


def _own(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


__all__ = ["Dequantize", "Rewritten", "Round", "eager", "placed"]
