"""The values of a checkpoint, whether it stores them or codes with scales: FP8 in blocks, and compressed-tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quark_fx.checkpoints.files import DTYPES, CheckpointFiles, MappedFiles, is_float, some_of, stored_bytes
from quark_fx.checkpoints.open_checkpoint import NO_CODES, quantized_by
from quark_fx.errors import CheckpointError
from quark_fx.system.untrusted import brief

_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items() if is_float(dtype)}
"""Names in safetensors of dtypes of values, by their names in configurations."""

_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales; codes are multiplied by either."""

_BESIDE = ("weight_zero_point", "weight_shape", "weight_global_scale", "weight_g_idx")
"""Names of tensors that belong to codes with scales."""

_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale")
"""Names of scales of activations in a quantized checkpoint, which its values do not need."""

_DECODED = "FP8 in blocks (quant_method fp8) and compressed-tensors"

_FORMS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized"),
)
"""Forms of compressed-tensors that are decoded."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Within:
    """The place of a matrix in a stack.

    Attributes:
        index: Index of its expert.
        rows: First row, and the row after the last.
        transposed: Whether the stack holds its transpose.
    """

    index: int
    rows: tuple[int, int]
    transposed: bool


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor by its values.

    Attributes:
        shape: Shape of the values.
        dtype: Dtype of the values in safetensors' spelling; the dtype of the model if codes are stored.
        parts: Names of the stored tensors, by the ends of their names.
        bytes: Bytes of the stored tensors.
        form: Form of codes in compressed-tensors, `"fp8"`, or empty for values.
        bits: Bits of a packed code.
        block: Rows and columns that share a scale.
        within: Place of the matrix in a stack of experts; `None` for a whole tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: Mapping[str, str]
    bytes: int
    form: str = ""
    bits: int = 0
    block: tuple[int, int] = (1, 1)
    within: Within | None = None

    @property
    def is_float(self) -> bool:
        """True if it holds floats of at least 16 bits."""
        return self.dtype in _NAMES.values()


@dataclass(frozen=True)
class DecodedFiles:
    """The tensors of a checkpoint by their values.

    Attributes:
        files: Files of the checkpoint.
        tensors: Tensors by name; a quantized layer has only its `weight`.
        method: Name of the method that quantized the checkpoint; empty for floats.
    """

    files: CheckpointFiles
    tensors: Mapping[str, DecodedTensor] = field(repr=False)
    method: str

    @classmethod
    def of(cls, files: CheckpointFiles, config: dict[str, Any]) -> DecodedFiles:
        """Read headers and configuration, but no tensor.

        Raises:
            CheckpointError: If codes are stored that this module does not decode, or do not match the configuration.
        """
        key, quantization = quantized_by(config), config
        for step in key.split(".") if key else ():
            quantization = quantization.get(step) or {} if isinstance(quantization, dict) else {}
        method = str(quantization.get("quant_method")) if key and isinstance(quantization, dict) else ""
        if key and method not in ("fp8", "compressed-tensors"):
            raise CheckpointError(
                f"{files.path} is quantized by {brief(method)}, whose codes quark_fx does not decode (it decodes "
                f"{_DECODED}); pass the float checkpoint that it was made from, or load it with transformers "
                "(dequantize=True, where its configuration has that), and store it with save_pretrained"
            )
        headers = files.headers
        dtype = _NAMES.get(str(config.get("dtype", config.get("torch_dtype"))), "BF16")
        layers = dict[str, dict[str, str]]()
        for name in headers:
            owner, dot, leaf = name.rpartition(".")
            layers.setdefault(owner + dot, {})[leaf] = name
        tensors: dict[str, DecodedTensor] = {}
        try:
            for owner, leaves in layers.items():
                parts, coded = dict(leaves), None
                if method and any(scale in leaves for scale in _SCALES):
                    coded = _coded(owner[:-1], leaves, files, method, quantization, dtype)
                    parts = {k: v for k, v in leaves.items() if k not in coded.parts}
                    tensors[f"{owner}weight"] = coded
                for leaf, name in parts.items():
                    if not (method and leaf in _UNUSED):
                        kind, shape = headers[name]
                        tensors[name] = DecodedTensor(tuple(shape), kind, {leaf: name}, stored_bytes(kind, shape))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{files.path}: config.json in {key} does not match the tensors: {type(error).__name__}: {error}; "
                "fetch the files again"
            ) from error
        codes = [
            n for n, t in tensors.items() if n.endswith(".weight") and t.dtype not in NO_CODES and len(t.shape) > 1
        ]
        codes += [n for n in tensors if n.endswith((".weight_packed", ".qweight", "_blocks"))]
        if codes:
            raise CheckpointError(
                f"{files.path} holds codes without scales or a configuration of them: {some_of(codes)}; decoded are "
                f"{_DECODED}; pass the float checkpoint"
            )
        return cls(files, tensors, method)

    def read(self, name: str, files: MappedFiles) -> Tensor:
        """Return the values of a tensor: memory-mapped if they are stored, otherwise float32.

        Args:
            name: Name of the tensor.
            files: Open files; a tensor of values keeps the mapping of its file.

        Raises:
            CheckpointError: If a file cannot be read, or codes and scales contradict each other.
        """
        tensor = self.tensors[name]
        parts = {leaf: files.tensor(self.files.files[stored], stored) for leaf, stored in tensor.parts.items()}
        if (place := tensor.within) is not None:
            matrix = next(iter(parts.values()))[place.index]
            return (matrix.t() if place.transposed else matrix)[slice(*place.rows)]
        if not tensor.form:
            return next(iter(parts.values()))
        try:
            return _decode(tensor, parts)
        except (LookupError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{name} in {self.files.path} cannot be decoded: {brief(str(error))}") from error


def _coded(
    layer: str,
    leaves: Mapping[str, str],
    files: CheckpointFiles,
    method: str,
    quantization: Mapping[str, Any],
    dtype: str,
) -> DecodedTensor:
    """Return the matrix of a layer of codes."""
    headers = files.headers
    codes = "weight_packed" if "weight_packed" in leaves else "weight"
    parts = {leaf: leaves[leaf] for leaf in (codes, *_SCALES, *_BESIDE) if leaf in leaves}
    rows, columns = headers[leaves[codes]][1]
    form, bits, block = "fp8", 8, quantization.get("weight_block_size")
    if method != "fp8":
        scheme = group_of(layer, quantization)
        weights, form = scheme["weights"], str(scheme.get("format") or quantization["format"])
        bits, block = int(weights["num_bits"]), weights.get("block_structure")
        if form not in _FORMS or not 1 <= bits <= 8:
            raise CheckpointError(
                f"{layer} has {bits} bits in {brief(form)}, which is not decoded; pass the float source"
            )
        if "weight_shape" in parts:
            rows, columns = files.tensor(parts["weight_shape"]).tolist()
        elif codes == "weight_packed":
            columns *= 8 // bits
        if weights["strategy"] in ("group", "tensor_group"):
            block = (1, int(weights["group_size"]))
    elif "weight_scale" in leaves:
        block = None  # one scale for the matrix, or one per row
    _, shape = headers[leaves[next(leaf for leaf in _SCALES if leaf in leaves)]]
    if block is None:
        block = (rows, columns) if math.prod(shape) == 1 else (1, columns)
    high, wide = int(block[0]), int(block[1])
    stored, words = headers[leaves[codes]][1]
    most = words * 32 // bits if form == "pack-quantized" else words * (8 // bits)
    if min(high, wide) < 1 or rows != stored or columns > most:
        raise ValueError(
            f"{layer} has {stored} rows of {most} codes, not {rows} of {columns} in blocks of {high}x{wide}"
        )
    if math.prod(shape) != -(-rows // high) * -(-columns // wide):
        raise ValueError(f"{layer} has scales of shape {shape}, not one per block of {high}x{wide}")
    size = sum(stored_bytes(*headers[name]) for name in parts.values())
    return DecodedTensor((rows, columns), dtype, parts, size, form, bits, (high, wide))


def group_of(layer: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the group in a configuration of compressed-tensors that contains a layer."""
    groups = [group for group in (quantization.get("config_groups") or {}).values() if isinstance(group, dict)]
    for fits in (layer.__eq__, lambda target: names_layer(target, layer)):  # names take precedence over patterns
        for group in groups:
            if any(map(fits, group.get("targets", ()))):
                return group
    return next((group for group in groups if "Linear" in group.get("targets", ())), groups[0] if groups else {})


def names_layer(target: Any, layer: str) -> bool:
    """Tell whether a name or pattern of compressed-tensors matches a layer."""
    return target == layer or (str(target).startswith("re:") and re.match(str(target)[3:], layer) is not None)


def _decode(tensor: DecodedTensor, parts: Mapping[str, Tensor]) -> Tensor:
    (rows, columns), (high, wide) = tensor.shape, tensor.block
    scale = next(parts[leaf] for leaf in _SCALES if leaf in parts)
    scale = _powers(scale) if scale.dtype == torch.uint8 else scale.float()
    scale = scale.reshape(-(-rows // high), -(-columns // wide))
    if (whole := parts.get("weight_global_scale")) is not None:
        scale = scale / whole.float()
    zero, place = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zero is not None and tensor.form == "pack-quantized":
        zero = _unpacked(zero.t(), tensor.bits, rows).t()
    if zero is not None:
        zero = zero.float().sub(1 << tensor.bits - 1 if tensor.form == "pack-quantized" else 0).reshape(scale.shape)
    column = torch.arange(columns) // wide if place is None else place.long()
    values = torch.empty(rows, columns, dtype=torch.float32)
    step = high * -(-_ROWS // high)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = _codes(tensor, parts, slice(first, last), columns)
        row = torch.arange(first, last) // high
        if zero is not None:
            part -= zero[row][:, column]
        values[first:last] = part.mul_(scale[row][:, column])
    return values


_ROWS = 64
"""Rows that are decoded together, at least."""


def _codes(tensor: DecodedTensor, parts: Mapping[str, Tensor], rows: slice, columns: int) -> Tensor:
    """Return some rows of codes, float32."""
    if "weight_packed" not in parts:
        return parts["weight"][rows].float()
    packed = parts["weight_packed"][rows]
    if tensor.form == "pack-quantized":
        return _unpacked(packed, tensor.bits, columns).sub_(1 << tensor.bits - 1)
    nibbles = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[:, :columns]
    values = torch.tensor((*_E2M1, *(-value for value in _E2M1)), dtype=torch.float32)
    return values[nibbles.int()]


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the codes, float32, that `pack` of quark_fx.export.packing put into the last dimension."""
    planes = ((words.contiguous().view(torch.uint8).unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(
        -2
    )
    places = planes[..., : count * bits].unflatten(-1, (count, bits))
    codes: Tensor = (places * (1 << torch.arange(bits)).to(torch.uint8)).sum(-1, dtype=torch.float32)
    return codes


__all__ = ["DecodedFiles", "DecodedTensor", "Within", "group_of", "names_layer"]
