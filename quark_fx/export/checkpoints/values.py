"""Contents of a checkpoint: the layers with quantized weights, and all other tensors."""

from __future__ import annotations

import copy
import fnmatch
import glob
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.files import some_of, stored_names
from quark_fx.checkpoints.open_checkpoint import unread_tensors
from quark_fx.checkpoints.shelf import Shelf
from quark_fx.config.selection import without_numbers
from quark_fx.config.target import Unrotated
from quark_fx.errors import CheckpointError, ExportError, QuarkError
from quark_fx.export.checkpoints.experts import as_saved, matrices, stacked_rows, taken_apart
from quark_fx.export.checkpoints.plain_model import require_plain, require_reader
from quark_fx.export.packing import matrix_of
from quark_fx.graph.operators import ATTENTION
from quark_fx.model.correspondence import Correspondence
from quark_fx.model.eager import placed
from quark_fx.model.hooks import foreign_hooks
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.rounded_attention import RoundedAttention
from quark_fx.model.rounded_modules import UNROTATED, Activation, Factor
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.plan.roles import HEAD
from quark_fx.system.isolation import warn

_CLASSES = (nn.Linear, nn.Embedding)
"""Modules whose weights checkpoint formats support."""


@dataclass(frozen=True)
class Layer:
    """A module with a quantized weight, or a projection of an expert.

    Attributes:
        name: Name in the checkpoint.
        module: Module with the weight; for an expert, the module with all experts.
        matrix: Function that returns the quantized weight, a matrix or a stack of matrices.
        input: Rounding of the layer's input; `None` if the input is not rounded.
        stack: Name of the stack that contains an expert's weight, or that is the weight; empty for other layers.
        unit: Global scale, which multiplies all E4M3 scales; `None` to compute it from the scales.
    """

    name: str
    module: nn.Module
    matrix: Callable[[], QuantizedTensor]
    input: Activation | None
    stack: str = ""
    unit: float | None = None

    @property
    def weight(self) -> QuantizedTensor:
        """The quantized weight, computed on each access."""
        return self.matrix()

    @property
    def is_linear(self) -> bool:
        """Tell whether the layer is linear; otherwise, it is an embedding."""
        return bool(self.stack) or isinstance(self.module, nn.Linear)


Written = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors of the quantized layers by their names, and the `quantization_config`."""


@dataclass(frozen=True)
class Checkpoint:
    """The parts of a quantized transformers model.

    Attributes:
        shell: Copy of the float model, for its configuration; its weights are not stored.
        layers: Layers with quantized weights.
        tensors: All other tensors of the model's state, in float; keys are names.
        stacks: Names of the modules that a checkpoint stores for each float stack of experts; keys are names of stacks.
        rows: Functions that return one matrix with the rows of all experts of a quantized stack; keys are names of
            stacks.
        rotations: Matrices of shape (n, n) that rotate each n consecutive channels of a linear layer's input; keys are
            paths of layers.
        caches: Rounding of the keys and values of an attention; keys are paths of modules.
        float_caches: Names of the attention modules whose keys and values stay in float; the report gives the reasons.
        fused: Value of `CheckpointFiles.fused`.
        unread: Functions that load the tensors of the source checkpoint that the model's class does not have; keys are
            names of tensors.
        computed: Names of the tensors that are left out because the checkpoint stores the weight computed from them;
            keys are names of such weights.
    """

    shell: Any
    layers: list[Layer]
    tensors: dict[str, Tensor]
    stacks: dict[str, list[str]]
    rows: Mapping[str, Callable[[], QuantizedTensor]]
    rotations: dict[str, Tensor]
    caches: dict[str, RoundedAttention]
    float_caches: list[str]
    fused: Mapping[str, tuple[str, ...]]
    unread: Mapping[str, Callable[[], Tensor]]
    computed: Mapping[str, tuple[str, ...]]

    @property
    def head(self) -> str:
        """The name of the module that projects to the vocabulary; empty if there is none."""
        return _head(self.shell)

    @property
    def left(self) -> list[str]:
        """The names of the modules, except experts, that stay in float and that a reader may treat as linear layers."""
        quantized, weights = {layer.name for layer in self.layers}, dict[str, Tensor]()
        for name, module in self.shell.named_modules():
            weight = self.tensors.get(f"{name}.weight")
            if weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
                weights |= {} if name in quantized else {f"{name}.weight": weight}
        unread = [name for name in self.unread if name.endswith(".weight")]
        names = dict.fromkeys(
            name.removesuffix(".weight") for name in (*weights, *as_saved(self.shell, weights), *unread)
        )
        return [*names, *fused_names(names, self.fused)]

    @property
    def left_stacks(self) -> list[str]:
        """The names of the modules with 3-D float parameters that a checkpoint does not split.

        Parameters named `weight` (kernels of convolutions) and modules that contain quantized layers are not listed.
        """
        stacks = (name.rpartition(".") for name, t in self.tensors.items() if t.dim() == 3 and name not in self.stacks)
        paths = dict.fromkeys(path for path, _, leaf in stacks if leaf != "weight")
        return [path for path in paths if not any(layer.name.startswith(f"{path}.") for layer in self.layers)]

    @property
    def experts(self) -> list[str]:
        """The names of the quantized modules of experts."""
        return [layer.name for layer in self.layers if layer.stack]

    @property
    def left_experts(self) -> list[str]:
        """The names of the modules of experts that stay in float."""
        return [name for names in self.stacks.values() for name in names]


STACKED = ("gpt_oss",)
"""Model types whose readers load stacks of experts, each as one pair of tensors (`mxfp4`)."""


def is_stacked(model: Any) -> bool:
    """Tell whether the type of a model is in `STACKED`."""
    return model.config.get_text_config().model_type in STACKED


def take_apart(qmodel: QuantizedModel, model: nn.Module | None, *, stacks_whole: bool = False) -> Checkpoint:
    """Return the contents of a checkpoint of `qmodel`.

    Args:
        qmodel: Result of `quantize`.
        model: Float model of the same architecture, if `qmodel` was loaded from a file.
        stacks_whole: Whether the format supports the stacks of experts of the model types in `STACKED`.

    Raises:
        ExportError: If no checkpoint format supports the quantization of an operator (all such operators are listed),
            or the model is not from transformers.
    """
    try:
        float_model = qmodel.source if model is None else model
        if float_model is not None:
            require_reader(float_model)
        require_no_hooks(qmodel, model)
        source, correspondence = placed(qmodel, model, at_readers=True)
    except QuarkError as error:
        raise ExportError(str(error)) from error
    if branched := sorted(correspondence.rounding.branches):
        raise ExportError(
            "checkpoints cannot store the float branches that LowRank adds to "
            f"{', '.join(branched)}; save() the quantized model, export it to ONNX, or quantize without LowRank"
        )
    files = qmodel.config.target.checkpoints
    head, whole = _head(source), stacks_whole and is_stacked(source)
    layers = _layers(source, correspondence, head=head, unrotated=files.unrotated, stacks_whole=whole)
    require_plain(source)
    read = correspondence.rounding.inputs.items()
    rotations = {path: _whole(activation.factors[0]) for path, activation in read if activation.factors}
    shell: Any = copy.deepcopy(source)
    state = shell.state_dict(keep_vars=True)
    taken = {n: c.value() for n, c in correspondence.constants.items() if c.is_float and n in state}
    tensors = {n: t for n, t in state.items() if not t.is_meta} | taken
    tied = _tied(shell)
    if any(layer.name in tied for layer in layers):
        shell.config.tie_word_embeddings = False
    tensors = _apart_unless_declared(shell, tensors)
    apart = {name: list(taken_apart(shell, name, tensor)) for name, tensor in tensors.items()}
    stacks = {name: names for name, names in apart.items() if names}
    rows = {
        layer.stack: partial(stacked_rows, correspondence.constants[layer.stack]) for layer in layers if layer.stack
    }
    floats = [row.name for row in qmodel.report() if row.kind == ATTENTION.kind and row.reason]
    computed = {name: stored.sources for name, stored in correspondence.stored.items()}
    if computed:
        shown = [f"{name} for {', '.join(sources)}" for name, sources in computed.items()]
        warn(
            f"the checkpoint stores computed weights, not their sources: {some_of(shown)}; load it into "
            "the class without these parametrizations"
        )
    left_out = {name for sources in computed.values() for name in sources}
    unread = {name: read for name, read in _unread(shell, state).items() if name not in left_out}
    return Checkpoint(
        *(
            shell,
            layers,
            tensors,
            stacks,
            rows,
            rotations,
            correspondence.attentions,
            floats,
            files.fused,
            unread,
            computed,
        )
    )


def _unread(shell: Any, state: dict[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """Return functions that load the tensors of the source that the model's class lacks; warn if tensors are lost."""
    if (opened := unread_tensors(shell)) is not None:
        return {name: read for name, read in opened.items() if name not in state}
    directory = _directory_of(shell)
    try:
        stored = stored_names(directory) if directory is not None else set[str]()
    except CheckpointError:
        return {}
    # Only the first name of each tensor: transformers rejects ties that a model does not declare.
    once = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    saved = as_saved(shell, {name: state[name].detach().to("meta") for name in once.values()}).keys()
    unread = sorted(stored - saved - state.keys())
    if unread and saved <= stored:  # otherwise, the file names the tensors differently
        warn(
            f"{directory} holds {len(unread)} tensors that {type(shell).__name__} does not read, so the output will "
            f"not contain them: {some_of(unread)}; to keep them in a checkpoint, pass the directory itself to quantize"
        )
    return {}


def _directory_of(model: Any) -> Path | None:
    """Return the directory that a model was loaded from; `None` if the directory is unknown or no longer exists."""
    name = str(getattr(model, "name_or_path", "") or "")
    if name and not Path(name, "config.json").is_file():
        hub = importlib.import_module("huggingface_hub")
        with suppress(ValueError):  # `name` is not a repository
            file = hub.try_to_load_from_cache(name, "config.json")
            return Path(file).parent if isinstance(file, str) else None
    return Path(name) if name and Path(name, "config.json").is_file() else None


def require_no_hooks(qmodel: QuantizedModel, model: nn.Module | None) -> None:
    """Raise `ExportError` if the float model computes values in hooks, which files of weights do not contain.

    Args:
        qmodel: Result of `quantize`.
        model: Float model that was passed to the export, if any.
    """
    hooks = [hook for source in (qmodel.source, model) if source is not None for hook in foreign_hooks(source)]
    if hooks:
        raise ExportError(
            f"the model has {len(hooks)} hook(s), which this format does not store: {'; '.join(hooks[:3])}"
            f"{'; ...' * (len(hooks) > 3)}. Remove them from the float model (handle.remove(), del module.forward, "
            "accelerate.hooks.remove_hook_from_module(model, recurse=True), or model.set_attn_implementation('sdpa')) "
            "and quantize again, or use export.onnx or qmodel.save(directory), which store what they compute"
        )


def fused_names(names: Iterable[str], fused: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the names of the server's fused layers whose parts are all in `names`.

    >>> fused_names(["layers.0.q", "layers.0.k", "layers.1.q"], {"qk": ("q", "k")})
    ['layers.0.qk']
    """
    owned = dict[str, set[str]]()
    for name in names:
        owner, dot, leaf = name.rpartition(".")
        owned.setdefault(owner + dot, set()).add(leaf)
    return [owner + whole for owner, leaves in owned.items() for whole, parts in fused.items() if leaves >= {*parts}]


def require_tokenizer(tokenizer: object) -> None:
    """Raise `ExportError` unless the argument is a tokenizer of transformers or `None`."""
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ExportError(f"tokenizer is a {type(tokenizer).__name__}; pass a tokenizer from transformers")


def _head(model: Any) -> str:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), "")


def require_weights_alone(checkpoint: Checkpoint, form: str) -> None:
    """Raise `ExportError` if keys or values are rounded or activations are rotated, which `form` does not support."""
    errors = [f"{path}: {form} cannot store quantized keys and values" for path in checkpoint.caches]
    errors += [
        f"{path}: {form} cannot store the matrix that rotates its input; use format='compressed-tensors'"
        for path in checkpoint.rotations
    ]
    if errors:
        raise unholdable(errors)


def _whole(factor: Factor) -> Tensor:
    """Return the full matrix of a rotation, the Kronecker product of its two factors, in float32."""
    first, second = factor.tensors
    return torch.kron(first.float(), second.float())


def _layers(
    model: nn.Module, correspondence: Correspondence, *, head: str, unrotated: Unrotated | None, stacks_whole: bool
) -> list[Layer]:
    """Return the modules with quantized weights; raise one error that lists all unsupported operators.

    Args:
        model: Original model.
        correspondence: Constants and rounding of the model's modules.
        head: Path of the module that projects to the vocabulary; empty if there is none.
        unrotated: Value of `CheckpointFiles.unrotated`.
        stacks_whole: Whether to return stacks of experts as one layer each.
    """
    layers: list[Layer] = []
    errors, names = [], list[str]()

    @lru_cache(maxsize=1)  # splitting copies a stack; its matrices are requested one after another
    def apart(name: str) -> dict[str, QuantizedTensor]:
        return matrices(model, name, correspondence.constants[name])

    def of_expert(name: str, key: str) -> QuantizedTensor:
        return apart(name)[key]

    def of_stack(name: str) -> QuantizedTensor:
        stored = correspondence.constants[name].quantized
        assert stored is not None  # see `is_stack`
        return stored

    paths = {
        path: name
        for name, c in correspondence.constants.items()
        if not c.is_float
        for path in [name.rpartition(".")[0]]
    }
    for name, constant in correspondence.constants.items():
        if constant.is_float:
            continue
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        try:
            experts, shape = apart(name), tuple(constant.tensor.shape)
            is_kernel = "Conv" in type(module).__name__
            is_stack = stacks_whole and constant.quantized is not None and len(shape) == 3 and not is_kernel
            if (experts or is_stack) and path in correspondence.rounding.inputs:
                raise ExportError("the activations of experts are quantized or rotated; keep them in float")
            if is_stack:
                layers.append(Layer(name, module, partial(of_stack, name), None, name))
                continue
            if experts:
                layers += [Layer(key, module, partial(of_expert, name, key), None, name) for key in experts]
                continue
            if any(
                isinstance(m, nn.MultiheadAttention) for m in (module, model.get_submodule(path.rpartition(".")[0]))
            ):
                raise ExportError(
                    "nn.MultiheadAttention uses this parameter directly, so the parameter has to stay in float"
                )
            simple = isinstance(module, _CLASSES) and len(inspect.signature(module.forward).parameters) == 1
            if len(shape) > 2:
                what = "the kernel of a convolution" if is_kernel else "a stack"
                also = ", or quantize nothing but experts, to MXFP4, and use format='mxfp4'" * is_stacked(model)
                raise ExportError(
                    f"{what} {shape} that transformers does not split into matrices; leave it in float{also}"
                )
            if leaf != "weight" or not simple:
                raise ExportError(
                    "checkpoints store only weights of nn.Linear and nn.Embedding with one input, but this is the "
                    f"parameter {leaf}, shape {shape}, in {type(module).__name__}; leave it in float"
                )
            matrix_of(constant)  # raises now if the weight is unsupported
            read = correspondence.rounding.inputs.get(path)
            rounded = read if read is not None and read.rounds else None
            layers.append(Layer(path, module, partial(matrix_of, constant), rounded))
        except ExportError as error:
            errors.append(f"{name}: {error}")
            names.append(
                path if isinstance(module, nn.RNNBase | nn.MultiheadAttention) else name.removesuffix(".weight")
            )
    errors += [
        f"{p}: its activation is quantized, but its weight is not"
        for p, activation in correspondence.rounding.inputs.items()
        if activation.rounds and p not in paths
    ]
    for p, activation in correspondence.rounding.outputs.items():
        what = "quantized" if activation.rounds else f"multiplied by a pass at run time; {_UNROTATED}"
        errors.append(f"{p or 'the model'}: its result is {what}")
    errors += [
        f"{p}: a pass rewrote its computation" for p in correspondence.slices.keys() - correspondence.computed.keys()
    ]
    for p, sources in correspondence.computed.items():
        why = "its code multiplies or adds a value that fold_batch_norm folded into weights; quantize without that pass"
        if sources:
            why = (
                f"its weight is computed from {', '.join(sources)}; before quantizing, store it as the module's "
                "weight: torch.nn.utils.parametrize.remove_parametrizations, or merge the adapter"
            )
        errors.append(f"{p or 'the model'}: {why}")
    errors += [f"{p}: a pass folded it into its neighbor" for p in correspondence.identities]
    errors += [
        f"{p}: fold_batch_norm gave it a factor or offset that the model's code applies; quantize without that pass"
        for p, _, _ in correspondence.maps
    ]
    errors += [
        f"{p}: {why}"
        for p, activation in correspondence.rounding.inputs.items()
        if activation.factors
        and (why := _unrotatable(model.get_submodule(p), activation, unrotated, is_head=p == head))
    ]
    if errors:
        raise unholdable(errors, names, [layer.stack or layer.name for layer in layers])
    if not layers:
        raise ExportError("no weight is quantized; save the float model instead")
    return layers


_UNROTATED = f"{UNROTATED}, or leave this layer out with the pass's only="


def _unrotatable(module: nn.Module, activation: Activation, unrotated: Unrotated | None, *, is_head: bool) -> str:
    """Return the reason why a checkpoint does not support the rotations or scales of a module's input, or ""."""
    rotations = [factor for factor in activation.factors if factor.by_rows]
    if len(activation.factors) > len(rotations):
        return "a pass multiplies its input; quantize without explicit=True in that pass"
    if unrotated is None:
        return (
            f"a pass rotates its input at run time; {UNROTATED}, or quantize for target='vllm' and "
            "format='compressed-tensors'"
        )
    if len(rotations) > 1:
        return f"its input is rotated more than once; {_UNROTATED}"
    kinds = ["linear"] * isinstance(module, nn.Linear) + [HEAD] * is_head
    bias: Tensor | None = getattr(module, "bias", None)
    size = math.prod(len(tensor) for tensor in rotations[0].tensors)
    why = unrotated(kinds, bias is not None, size)
    return f"its input is rotated, but {why}; {_UNROTATED}" if why else ""


_EXCLUDE = "config.replace(exclude=(*config.exclude, {}))"


def unholdable(
    errors: list[str], names: Iterable[str] = (), held: Sequence[str] = (), remedy: str = _EXCLUDE
) -> ExportError:
    """Return an error that lists the operators that a checkpoint format does not support, and the remedy.

    If there are many errors, layers whose names differ only in numbers share one line.

    Args:
        errors: Lines of the form "name: reason".
        names: Names of the weights to exclude. Long lists become patterns that match no name in `held`.
        held: Names of the layers that the format supports.
        remedy: Call that leaves weights in float, with `{}` for their names.
    """
    names, lines = list(dict.fromkeys(names)), errors
    if len(errors) > _LISTED:
        alike = Counter((without_numbers(name), why) for name, _, why in (error.partition(": ") for error in errors))
        lines = [f"{name}: {why}" + f" ({count} of them)" * (count > 1) for (name, why), count in alike.items()]
        safe = {name: without_numbers(name) for name in names if not fnmatch.filter(held, without_numbers(name))}
        names = list(dict.fromkeys(safe.get(name, glob.escape(name)) for name in names))
    call = remedy.format(", ".join(map(repr, names)))
    way = "exclude them (exclude=, Override)" if remedy == _EXCLUDE else "leave them in float"
    return ExportError(
        f"the checkpoint format does not support these quantized weights; {way} or change "
        "their specs:\n  " + "\n  ".join(lines) + f"\nTo leave these weights in float: {call}" * bool(names)
    )


_LISTED = 16
"""Largest number of error lines for which each line names one layer."""


def _apart_unless_declared(shell: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with copies of those that share memory although readers do not tie them."""
    ties = getattr(shell.config.get_text_config(), "tie_word_embeddings", False)
    declared = dict(shell.all_tied_weights_keys) if ties else {}
    tied, places, separate = {*declared, *declared.values()}, set[int](), dict[str, Tensor]()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.detach().clone() if place in places and name not in tied else tensor
        places.add(place)
    return separate


def _tied(model: nn.Module) -> set[str]:
    """Return the paths of the modules that share a parameter with another module."""
    named = [(n, id(p)) for n, p in model.named_parameters(remove_duplicate=False)]
    counts = Counter(identity for _, identity in named)
    return {name.rpartition(".")[0] for name, identity in named if counts[identity] > 1}


def each_layer(layers: list[Layer], write: Callable[[Layer], dict[str, Tensor]], shelf: Shelf) -> dict[str, Tensor]:
    """Return the tensors that `write` returns for all layers, put on the shelf, keyed by full name.

    Raises:
        ExportError: If `write` raises it for a layer; all such layers are listed.
    """
    tensors: dict[str, Tensor] = {}
    errors: dict[str, None] = {}  # one per stack of experts
    for layer in layers:
        try:
            tensors |= {f"{layer.name}.{part}": shelf.put(tensor) for part, tensor in write(layer).items()}
        except ExportError as error:
            errors[f"{layer.stack or layer.name}: {error}"] = None
    if errors:
        raise unholdable(list(errors))
    return tensors


__all__ = [
    *("STACKED", "Checkpoint", "Layer", "each_layer", "fused_names", "is_stacked"),
    *("require_no_hooks", "require_tokenizer"),
    *("require_weights_alone", "take_apart", "unholdable"),
]
