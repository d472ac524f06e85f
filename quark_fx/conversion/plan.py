"""Plan of `convert`, which depends on names, shapes, and a configuration, but not on the values of tensors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.checkpoints.decoded import DecodedFiles, DecodedTensor
from quark_fx.checkpoints.files import TORCH_DTYPES, Shapes, some_of, stored_bytes
from quark_fx.config.quant_config import Granularity, OperatorSpecs, QuantConfig, TensorSpec
from quark_fx.config.selection import matches
from quark_fx.conversion.names import EMBEDDING, NUMBERED_EXPERT, experts, fused, roles, transposed
from quark_fx.errors import CheckpointError, ConfigError, ExportError
from quark_fx.export.checkpoints.compressed_tensors import Schemes, compressed
from quark_fx.export.checkpoints.experts import literal, name_patterns
from quark_fx.export.checkpoints.values import Layer, fused_names, unholdable
from quark_fx.export.packing import matrix_of
from quark_fx.graph.pass_manager import pass_name
from quark_fx.model.constants import Constant
from quark_fx.model.rounded_modules import Activation
from quark_fx.numbers.formats import AT_ONCE
from quark_fx.numbers.layout import Layout
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.plan.table import Table, tuples
from quark_fx.plan.weights import quantize_tensor
from quark_fx.quantization import needs_data
from quark_fx.system.isolation import warn
from quark_fx.system.memory import bytes_text

_LINEAR = nn.Linear(1, 1, device="meta")
"""Module in the `Layer` of every matrix, because no model is built."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor of the source, and the tensors that replace it in the result.

    Attributes:
        name: Name in the source.
        weight: Spec of the quantized tensor; `None` if the tensor is copied.
        read: Spec of the input of the tensor's layer; `None` if it stays in float.
        scheme: Scheme of the layer in compressed-tensors; `None` if the tensor is copied.
        reason: Reason why the tensor is copied; empty if it is quantized.
        shared: Names of other tensors with the same global scale, because servers fuse the layers.
        outputs: Dtypes and shapes of the tensors in the result; keys are names.
        bytes_before: Size in the source, in bytes.
    """

    name: str
    weight: TensorSpec | None
    read: TensorSpec | None
    scheme: Mapping[str, Any] | None
    reason: str
    shared: tuple[str, ...]
    outputs: Shapes
    bytes_before: int

    @property
    def bytes_after(self) -> int:
        """Size in the result, in bytes."""
        return sum(stored_bytes(*output) for output in self.outputs.values())


@dataclass(frozen=True)
class Conversion:
    """The plan and result of `quark_fx.convert`, tensor by tensor.

    Attributes:
        source: Directory of the source.
        output: Directory of the result.
        tensors: Plans of all tensors of the source.
        configuration: The `quantization_config` of the result.
        notes: Facts about the source, such as that it was quantized before.
        left_out: Paths of files of the source that the result does not have.
    """

    source: Path
    output: Path
    tensors: Sequence[PlannedTensor] = field(repr=False)
    configuration: Mapping[str, Any] = field(repr=False)
    notes: Sequence[str]
    left_out: Sequence[str]

    def table(self) -> Table[Any]:
        """Return a table with one row per tensor."""
        header = ("tensor", "scheme", "shared with", "bytes before", "bytes after")
        rows = [
            (
                t.name,
                str(t.weight) if t.weight else f"stays: {t.reason}",
                ", ".join(t.shared),
                t.bytes_before,
                t.bytes_after,
            )
            for t in self.tensors
        ]
        return tuples(f"{self.source} to {self.output}", header, rows)

    def summary(self) -> list[str]:
        """Return lines with the total counts and sizes, and the notes."""
        before, after = (sum(getattr(t, f"bytes_{when}") for t in self.tensors) for when in ("before", "after"))
        count = sum(t.weight is not None for t in self.tensors)
        return [
            f"{count} of {len(self.tensors)} tensors quantized; {bytes_text(before)} → {bytes_text(after)}",
            *self.notes,
            *[f"left out: {', '.join(self.left_out)}"] * bool(self.left_out),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data for JSON."""
        return {
            "source": str(self.source),
            "output": str(self.output),
            "tensors": self.table().records(),
            "quantization_config": self.configuration,
            "notes": list(self.notes),
            "left_out": list(self.left_out),
        }


def require_data_free(config: QuantConfig, name: str) -> None:
    """Raise `ConfigError` unless a configuration can be applied to each weight by itself, without data or a model.

    Args:
        config: Configuration.
        name: Name of the scheme, for messages.
    """
    if why := _beyond_files(config):
        raise ConfigError(
            f"scheme {name} {why}, but convert does not run the model; use quantize, or choose a preset without data, "
            "such as fp8_block, fp8_dynamic, nvfp4a16, or w4a16"
        )


def _beyond_files(config: QuantConfig) -> str:
    """Return the reason why a configuration cannot be applied to files; empty if it can."""
    passes = [pass_name(p) for p in config.passes if p not in (fold_constants, fold_batch_norm)]
    if config.weight is None:
        return "rounds no weights"
    if needs_data(config):
        return "needs calibration data"
    if passes:
        return f"changes layers with {', '.join(passes)}"
    return "rounds outputs, biases, or caches" if config.output or config.bias or config.kv_cache else ""


def unstacked(
    source: DecodedFiles, description: Mapping[str, Any], config: QuantConfig, ignore: Sequence[str]
) -> DecodedFiles:
    """Replace stacks of experts by one matrix per expert and projection, which is the form that servers read.

    A stack remains if a pattern or its role keeps it in float, or if its layout is ambiguous.

    Args:
        source: Tensors of the checkpoint.
        description: Content of its `config.json`.
        config: Configuration.
        ignore: Patterns of layers that stay in float.
    """
    tensors = dict(source.tensors)
    for name, matrices in experts({n: t.shape for n, t in tensors.items()}).items():
        modules = {n.removesuffix(_WEIGHT): place.rows for n, place in matrices.items()}
        excluded = any(
            config.exclusion(n, "experts") or any(_ignores(p, n, ("experts",)) for p in ignore) for n in modules
        )
        if excluded or any(_ignores(p, name, ("experts",)) for p in ignore) or roles(modules, description):
            continue
        stack = tensors.pop(name)
        for n, place in matrices.items():
            inputs = stack.shape[1 if place.transposed else 2]
            shape = (place.rows[1] - place.rows[0], inputs)
            tensors[n] = replace(stack, shape=shape, bytes=stored_bytes(stack.dtype, shape), within=place)
    return replace(source, tensors=tensors)


def plan(
    source: DecodedFiles,
    description: Mapping[str, Any],
    config: QuantConfig,
    ignore: Sequence[str],
    output: Path,
    left_out: Sequence[str],
) -> Conversion:
    """Plan the conversion of each tensor.

    Args:
        source: Tensors of the checkpoint.
        description: Content of its `config.json`.
        config: Configuration that does not need data.
        ignore: Patterns of layers that stay in float.
        output: Directory of the result.
        left_out: Paths of files of the source that the result will not have.

    Raises:
        ExportError: If compressed-tensors does not support a layer, or a layer stores its matrix transposed (all such
            layers are listed).
        CheckpointError: If a tensor has a name that the result needs for codes or scales, or the source does not have a
            matrix of floats.
        ConfigError: If no tensor is left to quantize, or a pattern is not a valid regular expression.
    """
    shapes = {n.removesuffix(_WEIGHT): t.shape for n, t in source.tensors.items() if _is_matrix(n, t)}
    role_of, groups = roles(shapes, description), fused(shapes)
    kind_of = {name: "experts" if NUMBERED_EXPERT.search(name) else "linear" for name in shapes}
    kinds = {name: (kind, role_of[name]) if name in role_of else (kind,) for name, kind in kind_of.items()}
    specs = {name: config.specs_for(name, *kinds[name]) for name in shapes}
    names = {name.removesuffix(_WEIGHT): kinds.get(name.removesuffix(_WEIGHT), ("experts",)) for name in source.tensors}
    if unused := [p for p in ignore if not any(_ignores(p, name, kind) for name, kind in names.items())]:
        warn(f"no layer matches {', '.join(map(repr, unused))} in ignore; check the spelling")
    reasons, errors = _reasons(kinds, role_of, specs, config, ignore), dict[str, str]()
    floats = {name: [other for other in group if other in reasons] for name, group in groups.items()}
    for name, group in groups.items():  # the kernel of a fused layer has one scheme
        if floats[name]:
            reasons.setdefault(name, f"fused with {floats[name][0]}, which stays in float")
        elif other := [n for n in group if specs[n] != specs[name]]:
            errors[name] = (
                f"servers fuse this layer with {other[0]}, which has another scheme; give both the same scheme"
            )
    biases = {
        n.removesuffix(_BIAS): t.shape[0] for n, t in source.tensors.items() if n.endswith(_BIAS) and len(t.shape) == 1
    }
    errors |= {name: _TRANSPOSED for name in transposed(shapes, biases) if name not in reasons}
    matrix, layers = cache(_stand_in), dict[str, Layer]()
    for name in (name for name in shapes if name not in reasons and name not in errors):
        spec, read = specs[name].weight, specs[name].input
        assert spec is not None
        try:
            layers[name] = layer_of(name, matrix(spec, *shapes[name]), read)
        except (ExportError, ValueError) as error:
            errors[name] = str(error)
    schemes, scheme_of = Schemes(layers.values()), dict[str, Mapping[str, Any]]()
    for name, layer in layers.items():
        try:
            scheme_of[name] = schemes.add(layer)
        except ExportError as error:
            errors[name] = str(error)
    if errors:
        lines = [f"{name}: {why}" for name, why in errors.items()]
        raise unholdable(lines, errors, [*scheme_of], "ignore=[{}] (on the command line, --ignore before each)")
    if not scheme_of:
        if not reasons:
            raise CheckpointError(
                f"{source.files.path} holds {len(source.tensors)} tensors, but none is a float matrix called "
                "*.weight; pass the directory of another checkpoint, or quantize the model with quark_fx.quantize"
            )
        why = "; ".join(sorted(set(reasons.values()))[:3])
        raise ConfigError(f"nothing in {source.files.path} is left to quantize ({why}); change ignore, or the scheme")
    tensors, sizes = [], dict[tuple[Any, ...], Shapes]()
    for name, stored in source.tensors.items():
        module = name.removesuffix(_WEIGHT)
        reason = reasons.get(module, "a stack of matrices" if len(stored.shape) == 3 else "not the matrix of a layer")
        if module not in scheme_of or module == name:
            outputs: Shapes = {name: (stored.dtype, stored.shape)}
            tensors.append(PlannedTensor(name, None, None, None, reason, (), outputs, stored.bytes))
            continue
        spec, read, scheme = specs[module].weight, specs[module].input, scheme_of[module]
        assert spec is not None
        if (key := (spec, stored.shape, repr(scheme))) not in sizes:
            sizes[key] = _sizes(spec, stored.shape, scheme)
        shared = tuple(f"{n}{_WEIGHT}" for n in groups.get(module, ()) if n != module) if spec.scale.has_unit else ()
        outputs = {f"{module}.{leaf}": header for leaf, header in sizes[key].items()}
        tensors.append(PlannedTensor(name, spec, read, scheme, "", shared, outputs, stored.bytes))
    notes = [f"the source was already rounded by {source.method}: both rounding errors add up"]
    counts = Counter(name for tensor in tensors for name in tensor.outputs)
    if twice := [name for name, count in counts.items() if count > 1]:
        raise CheckpointError(
            f"{source.files.path} already holds {some_of(twice)}, where the result would store codes or scales; add "
            "the layer to ignore"
        )
    in_float = [name for name in reasons if role_of.get(name) != EMBEDDING]
    ignored = _left(in_float, scheme_of, source, config)
    if not any(re.match(_TIED_HEAD, name) for name in kinds):
        ignored.append(f"re:{_TIED_HEAD}")
    configuration = schemes.configuration(ignored)
    return Conversion(source.files.path, output, tensors, configuration, notes * bool(source.method), left_out)


_WEIGHT, _BIAS = ".weight", ".bias"

_TIED_HEAD = r"(.*[.])?(\w*lm_head|embed_out|proj_out|decoder)$"
"""Pattern of the names of heads that are tied to the embedding: files lack them, but readers build linear layers."""

_TRANSPOSED = (
    "its matrix is stored as (inputs, outputs), as the biases of layers with this name show (Conv1D of GPT-2); servers "
    "would read groups and scales along the wrong axis; load the model with transformers and call quark_fx.quantize"
)


def _reasons(
    kinds: Mapping[str, tuple[str, ...]],
    role_of: Mapping[str, str],
    specs: Mapping[str, OperatorSpecs],
    config: QuantConfig,
    ignore: Sequence[str],
) -> dict[str, str]:
    """Return the reason why each layer stays in float; keys are names, and layers to quantize are left out."""
    reasons = dict[str, str]()
    for name, layer_kinds in kinds.items():
        patterns = [pattern for pattern in ignore if _ignores(pattern, name, layer_kinds)]
        if name in role_of:
            reasons[name] = f"{role_of[name]}, which servers need in float"
        elif patterns:
            reasons[name] = f"ignored by {patterns[0]!r}"
        elif why := config.exclusion(name, *layer_kinds) or "no weight in the scheme" * (specs[name].weight is None):
            reasons[name] = why
    return reasons


def _is_matrix(name: str, stored: DecodedTensor) -> bool:
    return name.endswith(_WEIGHT) and len(stored.shape) == 2 and stored.is_float and 0 not in stored.shape


def _ignores(pattern: str, name: str, kinds: Sequence[str]) -> bool:
    if not pattern.startswith("re:"):
        return matches(pattern, name, *kinds) or matches(pattern, f"{name}{_WEIGHT}")
    try:
        return re.match(pattern[3:], name) is not None
    except re.error as error:
        raise ConfigError(f"{pattern!r} in ignore is not a regular expression: {error}; correct it") from error


def _left(left: Sequence[str], quantized: Iterable[str], source: DecodedFiles, config: QuantConfig) -> list[str]:
    """Return names and patterns of the float modules that a reader may treat as linear layers.

    Args:
        left: Names of layers that stay in float.
        quantized: Names of quantized layers, which the patterns must not match.
        source: Tensors of the checkpoint.
        config: Configuration, whose target lists fused layers.
    """
    single = [name for name in left if not NUMBERED_EXPERT.search(name)]
    patterns = name_patterns(
        [name for name in left if NUMBERED_EXPERT.search(name)],
        [name for name in quantized if NUMBERED_EXPERT.search(name)],
    )
    stacks = [n.rpartition(".")[0] for n, t in source.tensors.items() if len(t.shape) == 3 and not n.endswith(_WEIGHT)]
    return [
        *single,
        *fused_names(single, config.target.checkpoints.fused),
        *(f"re:{pattern}" for pattern in patterns),
        *(f"re:^{literal(path)}[.]" for path in dict.fromkeys(stacks)),
    ]


def layer_of(name: str, matrix: QuantizedTensor, read: TensorSpec | None, unit: float | None = None) -> Layer:
    """Return a layer for the export.

    Args:
        name: Name of the layer.
        matrix: Quantized weight, a result of `rounded`.
        read: Spec of the layer's input; `None` if it stays in float.
        unit: Global scale of the weight, if it has one.
    """
    return Layer(name, _LINEAR, lambda: matrix, None if read is None else _activation(read), unit=unit)


def _activation(spec: TensorSpec) -> Activation:
    fmt, symmetry, axis, block, scale, group, ratio = spec.measurement(-1)
    return Activation(fmt, None, None, symmetry, axis, block, scale, group, ratio)


def rounded(x: Tensor, spec: TensorSpec, amax: Tensor | None = None) -> QuantizedTensor:
    """Quantize a matrix like `quantize`, but a few rows at a time.

    Args:
        x: Matrix, shape (outputs, inputs).
        spec: Spec of the weight.
        amax: Largest magnitude, shape (), of all layers with the same global scale; `None` to measure it in `x`.
    """
    alone = Layout.of(tuple(x.shape), 0, spec.group_rows).pieces(_AT_ONCE)
    pieces = [...] if spec.granularity is Granularity.TENSOR else alone
    parts = [quantize_tensor(x[rows], spec, amax=amax) for rows in pieces]
    codes, scale, zero_point = (
        torch.cat([getattr(p, k) for p in parts]) if len(parts) > 1 else getattr(parts[0], k)
        for k in ("codes", "scale", "zero_point")
    )
    whole = QuantizedTensor.of(codes, scale, zero_point, spec.format, parts[0].axis, parts[0].block_size)
    return matrix_of(Constant((), whole, x.dtype))


_AT_ONCE = 4 * AT_ONCE


def _together(spec: TensorSpec) -> int:
    """Return a number of rows for which blocks of rows are complete and packed zero points fill 32-bit words."""
    return max(spec.group_rows, 32)


def _stand_in(spec: TensorSpec, rows: int, columns: int) -> QuantizedTensor:
    """Return a small quantized matrix that stands for a matrix with `rows` rows.

    It has the same scheme, and the export raises the same errors for it.
    """
    step = _together(spec)
    height = rows if rows < 3 * step else rows % step + step
    values = torch.arange(height * columns).reshape(height, columns).sin().add_(0.3)
    return rounded(values, spec.replace(observer=None))


def _sizes(spec: TensorSpec, shape: tuple[int, ...], scheme: Mapping[str, Any]) -> Shapes:
    """Return the dtypes and shapes of a layer's tensors in a scheme, extrapolated from small matrices.

    The first dimension of each tensor is a linear function of the number of rows.
    """
    rows, columns = shape
    step, small = _together(spec), _stand_in(spec, rows, columns)
    height = len(small.codes)
    one = compressed(layer_of("", small, None), scheme)
    shapes = {leaf: tuple(tensor.shape) for leaf, tensor in one.items()}
    if height < rows:
        more = compressed(layer_of("", _stand_in(spec, height + step, columns), None), scheme)
        for leaf, (first, *rest) in shapes.items():
            shapes[leaf] = (first + (len(more[leaf]) - first) * (rows - height) // step, *rest)
    return {leaf: (TORCH_DTYPES[tensor.dtype], shapes[leaf]) for leaf, tensor in one.items()}


__all__ = ["Conversion", "PlannedTensor", "layer_of", "plan", "require_data_free", "rounded", "unstacked"]
