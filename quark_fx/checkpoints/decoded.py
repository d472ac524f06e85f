"""Values of the tensors in a checkpoint, which stores either the values or codes with scales."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quark_fx.checkpoints.configuration import NO_CODES, is_rotated, quantized_by
from quark_fx.checkpoints.files import (
    DTYPES,
    TORCH_DTYPES,
    CheckpointFiles,
    MappedFiles,
    Shapes,
    header_of,
    is_float,
    some_of,
    stored_bytes,
)
from quark_fx.checkpoints.words import unpack, unpack_awq
from quark_fx.errors import CheckpointError
from quark_fx.system.untrusted import brief

_NAMES = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items() if is_float(dtype)}
"""Safetensors names of float dtypes; keys are the names in configurations, such as `bfloat16`."""

_SCALES = ("weight_scale", "weight_scale_inv")
"""Names of scales; both are factors of codes."""

_BESIDE = ("weight_zero_point", "weight_shape", "weight_global_scale", "weight_scale_2", "weight_g_idx")
"""Names of the other tensors that belong to codes."""

_UNUSED = ("input_scale", "input_zero_point", "input_global_scale", "k_scale", "v_scale", "q_scale")
"""Names of the quantization parameters of activations, which are not needed to decode weights."""

_BLOCKS, _EXPONENTS = "_blocks", "_scales"
"""Endings of the names of a stack of experts in MXFP4: bytes with two codes each, and exponents."""

_FLOATS = ("F16", "BF16", "F32")

_KINDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("qweight", "qzeros"), ("I32",)),
    **dict.fromkeys(("g_idx", "weight_g_idx", "weight_shape"), ("I32", "I64")),
    **dict.fromkeys((_BLOCKS, _EXPONENTS), ("U8",)),
    "scales": _FLOATS,
    "weight_packed": ("I32", "U8"),
    "weight": ("F8_E4M3", "I8"),
    "weight_scale": (*_FLOATS, "F8_E4M3", "F8_E8M0", "U8"),
    "weight_scale_inv": (*_FLOATS, "F8_E8M0"),
    "weight_zero_point": ("I32", "I8", "U8"),
    "weight_global_scale": _FLOATS,
    "weight_scale_2": _FLOATS,
}
"""Allowed dtypes of the tensors that make up quantized weights; keys are the last parts of their names."""

_FORMS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mxfp8-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized"),
)
"""Names of the layouts of compressed-tensors that this module decodes."""

_MODELOPT: Mapping[tuple[str, str], tuple[str, int]] = {
    ("U8", "F8_E4M3"): ("nvfp4-pack-quantized", 4),
    ("U8", "U8"): ("mxfp4-pack-quantized", 4),
    ("F8_E4M3", "U8"): ("mxfp8-quantized", 8),
    **{("F8_E4M3", kind): ("fp8", 8) for kind in _FLOATS},
}
"""Layout and bits of ModelOpt's codes; keys are the dtypes of codes and scales."""

_WORDS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "gptq": ("gptq", (2, 3, 4, 8)),
    "gptq_v2": ("gptq", (2, 3, 4, 8)),
    "gemm": ("awq", (4,)),
}
"""Method and supported bit widths of each layout of 32-bit words; keys are the names of layouts in configurations."""

_BLOCK = 128
"""Number of rows and of columns of a ModelOpt block."""

_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), dtype=torch.float32)


@dataclass(frozen=True)
class Within:
    """The place of an expert's matrix in a stack.

    Attributes:
        index: Index of the expert.
        rows: Index of the matrix's first row, and of the row after its last.
        transposed: Whether the stack holds the transposed matrix.
    """

    index: int
    rows: tuple[int, int]
    transposed: bool


@dataclass(frozen=True)
class DecodedTensor:
    """A tensor of values, which a checkpoint stores as values or as codes.

    Attributes:
        shape: Shape of the values.
        dtype: Safetensors name of the dtype of the values; for codes, the dtype of the model.
        parts: Names of the stored tensors; keys are the last parts of these names.
        bytes: Size of the stored tensors, in bytes.
        form: Layout of the codes: a layout of compressed-tensors, `"fp8"`, `"gptq"`, `"gptq_v2"`, `"gemm"` of AWQ, or
            `"mxfp4"`; empty if values are stored.
        bits: Number of bits of a code.
        block: Numbers of rows and columns that share a scale.
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
        """True if the values are floats of at least 16 bits."""
        return self.dtype in _NAMES.values()

    @property
    def ranges(self) -> list[slice]:
        """Ranges of the first dimension (rows, or experts of a stack) that are decoded together."""
        count, step = self.shape[0], _ROWS if len(self.shape) == 2 else 1
        return [slice(first, min(first + step, count)) for first in range(0, count, step)]


@dataclass(frozen=True)
class DecodedFiles:
    """The tensors of a checkpoint, decoded to values when they are read.

    Attributes:
        files: Files of the checkpoint.
        tensors: Tensors; keys are names. A quantized layer has only a `weight`, without tensors for scales.
        method: Name of the method that quantized the checkpoint; empty if it holds floats.
    """

    files: CheckpointFiles
    tensors: Mapping[str, DecodedTensor] = field(repr=False)
    method: str

    @classmethod
    def of(cls, files: CheckpointFiles, config: dict[str, Any]) -> DecodedFiles:
        """Read the headers of the files and the configuration, but not the tensors.

        Args:
            files: Files of the checkpoint.
            config: Content of `config.json`.

        Raises:
            CheckpointError: If the files hold codes that this module does not decode or that do not match the
                configuration.
        """
        key, quantization = quantized_by(config), config
        for step in key.split(".") if key else ():
            quantization = quantization.get(step) or {} if isinstance(quantization, dict) else {}
        method = str(quantization.get("quant_method")) if key and isinstance(quantization, dict) else ""
        if key and method not in _MATRICES:
            raise CheckpointError(
                f"{files.path} is quantized by {brief(method)} ({key} in config.json), which quark_fx does not decode "
                f"(supported: {_DECODED}); pass the original float checkpoint, or load this one with transformers "
                "(dequantize=True, if its configuration has this option) and store it with save_pretrained"
            )
        if is_rotated(config):
            raise CheckpointError(
                f"{files.path} rotates activations, so its weights are rotated; pass the original float checkpoint"
            )
        headers = files.headers
        dtype = _NAMES.get(str(config.get("dtype", config.get("torch_dtype"))), "BF16")
        layers = dict[str, dict[str, str]]()
        for name in headers:
            owner, dot, leaf = name.rpartition(".")
            layers.setdefault(owner + dot, {})[leaf] = name
        tensors: dict[str, DecodedTensor] = {}
        try:
            source = _Source(files, method, quantization, dtype)
            for owner, leaves in layers.items():
                coded = dict(_MATRICES[method](source, owner[:-1], leaves)) if method else {}
                tensors |= {f"{owner}{leaf}": matrix for leaf, matrix in coded.items()}
                used = {name for matrix in coded.values() for name in matrix.parts.values()}
                for leaf, name in leaves.items():
                    if name not in used and not (method and leaf in _UNUSED):
                        kind, shape = headers[name]
                        tensors[name] = DecodedTensor(tuple(shape), kind, {leaf: name}, stored_bytes(kind, shape))
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, re.error) as error:
            raise CheckpointError(
                f"{files.path}: config.json in {key} does not match the tensors: {type(error).__name__}: {error}; "
                "fetch the files again"
            ) from error
        codes = [
            n for n, t in tensors.items() if n.endswith(".weight") and t.dtype not in NO_CODES and len(t.shape) > 1
        ]
        codes += [n for n in tensors if n.endswith((".weight_packed", ".qweight", _BLOCKS))]
        if method:  # in a float checkpoint, any tensor may have these names
            codes += [n for n in tensors if n.rpartition(".")[2] in _KINDS.keys() - {"weight"}]
            codes += [n for n, t in tensors.items() if n.endswith(_EXPONENTS) and t.dtype == "U8"]
        if codes:
            raise CheckpointError(
                f"{files.path} holds codes without scales, scales without codes, or no configuration for them: "
                f"{some_of(codes)}; supported are {_DECODED}; fetch the files again, or pass the float checkpoint"
            )
        if method and not any(tensor.form for tensor in tensors.values()):
            raise CheckpointError(
                f"{files.path} holds no codes of {method}, which config.json names in {key}; fetch the files again"
            )
        return cls(files, tensors, method)

    def read(self, name: str, files: MappedFiles) -> Tensor:
        """Return the values of a tensor: memory-mapped if the file stores values, or else decoded to float32.

        Args:
            name: Name of the tensor.
            files: Open files; a memory-mapped result keeps the mapping of its file alive.

        Raises:
            CheckpointError: If a file cannot be read, or codes and scales contradict each other.
        """
        place = self.tensors[name].within
        (values,) = self._pieces(name, files, None if place is None else [slice(place.index, place.index + 1)])
        if place is None:
            return values
        return (values[0].t() if place.transposed else values[0])[slice(*place.rows)]

    def tensor(self, name: str) -> Tensor:
        """Return the values of a tensor in its own dtype."""
        return torch.cat(list(self.pieces(name, MappedFiles())))

    def pieces(self, name: str, files: MappedFiles, dtype: torch.dtype | None = None) -> Iterator[Tensor]:
        """Yield the values of a tensor in consecutive pieces along the first dimension.

        Args:
            name: Name of the tensor.
            files: Open files; see `read`.
            dtype: Dtype of decoded values; `None` for the dtype of the tensor. Stored values keep their dtype.
        """
        tensor = self.tensors[name]
        whole = tensor.within is not None or not tensor.form
        for values in [self.read(name, files)] if whole else self._pieces(name, files, tensor.ranges):
            yield values.to(dtype or DTYPES[tensor.dtype]) if tensor.form else values

    def stored(self, folder: Path, dtype: torch.dtype | None) -> CheckpointFiles:
        """Write the values to safetensors files, tensor by tensor.

        Args:
            folder: Empty directory.
            dtype: Dtype of decoded values; `None` for the dtype of the model.

        Raises:
            CheckpointError: If codes and scales contradict each other, or the disk is full.
        """
        kinds = {n: TORCH_DTYPES[dtype] if t.form and dtype is not None else t.dtype for n, t in self.tensors.items()}
        headers = {name: (kinds[name], tensor.shape) for name, tensor in self.tensors.items()}
        return write_values(self.files.path, folder, headers, lambda name, mapped: self.pieces(name, mapped, dtype))

    def _pieces(self, name: str, files: MappedFiles, ranges: Sequence[slice] | None) -> Iterator[Tensor]:
        """Yield the values of a tensor in ranges of the first dimension, or all at once if `ranges` is `None`."""
        tensor = self.tensors[name]
        parts = {leaf: files.tensor(self.files.files[stored], stored) for leaf, stored in tensor.parts.items()}
        try:
            if not tensor.form:
                (stored,) = parts.values()
                yield from [stored] if ranges is None else [stored[some] for some in ranges]
                return
            decode = _stack(parts) if tensor.form == "mxfp4" else _matrix(tensor, parts)
            if ranges is not None:
                yield from map(decode, ranges)
                return
            values = torch.empty(tensor.shape, dtype=torch.float32)
            for some in tensor.ranges:
                values[some] = decode(some)
            yield values
        except (LookupError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{name} in {self.files.path} cannot be decoded: {brief(str(error))}") from error


def write_values(
    path: Path, folder: Path, headers: Shapes, pieces: Callable[[str, MappedFiles], Iterable[Tensor]]
) -> CheckpointFiles:
    """Write tensors to safetensors files, one by one, and return these files.

    Args:
        path: Checkpoint that the tensors come from.
        folder: Empty directory.
        headers: Dtypes and shapes of the tensors.
        pieces: Function from the name of a tensor, and open files, to its values in consecutive pieces.

    Raises:
        CheckpointError: If the disk is full.
    """
    shards, filled = list[list[str]](), 0
    for name, header in headers.items():
        if not shards or filled > _SHARD:
            shards, filled = [*shards, []], 0
        shards[-1].append(name)
        filled += stored_bytes(*header)
    files = dict[str, Path]()
    for number, names in enumerate(shards):
        file, mapped = folder / f"{number}.safetensors", MappedFiles()
        try:
            with file.open("wb") as stream:
                stream.write(header_of({name: headers[name] for name in names}, {"format": "pt"}))
                for name in names:
                    for values in pieces(name, mapped):
                        stream.write(values.contiguous().flatten().view(torch.uint8).numpy().data)
                        del values  # before the next tensor is decoded
        except OSError as error:
            raise CheckpointError(
                f"decoding {path} to {folder.parent} failed: {error}; free disk space there, or pass another "
                "directory as scratch"
            ) from error
        files |= dict.fromkeys(names, file)
    return CheckpointFiles(path, files)


_Leaves = Mapping[str, str]
"""Full names of the tensors of a layer; keys are the last parts of these names."""


@dataclass(frozen=True)
class _Source:
    """A quantized checkpoint, with methods that find the tensors of each layer's codes and scales.

    Attributes:
        files: Files of the checkpoint.
        method: Name of the method that quantized the checkpoint.
        quantization: Configuration of the method.
        dtype: Safetensors name of the dtype of the model.
    """

    files: CheckpointFiles
    method: str
    quantization: Mapping[str, Any]
    dtype: str

    def scaled(self, layer: str, leaves: _Leaves) -> Iterator[tuple[str, DecodedTensor]]:
        """Yield `"weight"` and the matrix of a layer with codes and scales (FP8, compressed-tensors, or ModelOpt)."""
        if not any(scale in leaves for scale in _SCALES):
            return
        headers, quantization = self.files.headers, self.quantization
        codes = "weight_packed" if "weight_packed" in leaves else "weight"
        parts = {leaf: leaves[leaf] for leaf in (codes, *_SCALES, *_BESIDE) if leaf in leaves}
        rows, columns = headers[leaves[codes]][1]
        _, shape = headers[leaves[next(leaf for leaf in _SCALES if leaf in leaves)]]
        form, bits, block = "fp8", 8, quantization.get("weight_block_size")
        if self.method.startswith("modelopt"):
            form, bits = self._of_modelopt(layer, leaves)
            columns *= 8 // bits
            if len(shape) > 2:  # scales per block, of shape (row blocks, 1, column blocks, 1)
                block = (_BLOCK, _BLOCK)
            elif len(shape) == 2:
                block = (1, columns // shape[1])
            if bits == 4:  # the name in compressed-tensors' layout
                parts["weight_packed"] = parts.pop("weight")
        elif self.method != "fp8":
            scheme = group_of(layer, quantization)
            weights, form = scheme["weights"], str(scheme.get("format") or quantization["format"])
            bits, block = int(weights["num_bits"]), weights.get("block_structure")
            if form not in _FORMS or not 1 <= bits <= 8:
                raise CheckpointError(
                    f"{layer} has {bits} bits in {brief(form)}, which quark_fx does not decode; pass the original "
                    "float checkpoint"
                )
            if "weight_shape" in parts:
                rows, columns = self.files.tensor(parts["weight_shape"]).tolist()
            elif codes == "weight_packed":
                columns *= 8 // bits
            if weights["strategy"] in ("group", "tensor_group"):
                block = (1, int(weights["group_size"]))
        elif "weight_scale" in leaves:
            block = None  # one scale for the matrix, or one scale per row
        if block is None:
            block = (rows, columns) if math.prod(shape) == 1 else (1, columns)
        high, wide = int(block[0]), int(block[1])
        stored, words = headers[leaves[codes]][1]
        most = words * 32 // bits if form == "pack-quantized" else words * (8 // bits)
        if min(high, wide) < 1 or rows != stored or columns > most:
            raise ValueError(
                f"{layer} has {stored} rows of {most} codes, not {rows} of {columns} in blocks of {high}x{wide}"
            )
        if high == 1 and self.method != "fp8":
            _require_groups(layer, columns, wide)
        if math.prod(shape) != -(-rows // high) * -(-columns // wide):
            raise ValueError(f"{layer} has scales of shape {shape}, not one per block of {high}x{wide}")
        yield "weight", self._tensor((rows, columns), parts, form, bits, (high, wide))

    def _of_modelopt(self, layer: str, leaves: _Leaves) -> tuple[str, int]:
        """Return the layout and the bits of the codes of a ModelOpt layer."""
        kind, scale = (self.files.headers[leaves[leaf]][0] for leaf in ("weight", "weight_scale"))
        if (kind, scale) not in _MODELOPT or "pre_quant_scale" in leaves:
            raise CheckpointError(
                f"{layer} has ModelOpt codes of type {kind} with scales of type {scale}"
                + " and scales of its inputs" * ("pre_quant_scale" in leaves)
                + ", which quark_fx does not decode; pass the original float checkpoint"
            )
        return _MODELOPT[kind, scale]

    def words(self, layer: str, leaves: _Leaves) -> Iterator[tuple[str, DecodedTensor]]:
        """Yield `"weight"` and the matrix of a GPTQ or AWQ layer: 32-bit words, stored as (inputs, outputs)."""
        if "qweight" not in leaves:
            return
        overrides = [
            v for k, v in (self.quantization.get("dynamic") or {}).items() if re.match(k.removeprefix("+:"), layer)
        ]
        settings = {**self.quantization, **(overrides[0] if overrides else {})}
        named = [settings.get(key) for key in ("checkpoint_format", "format", "version")]
        form = str(
            next((name for name in named if isinstance(name, str)), "gemm" * (self.method == "awq") or "gptq")
        ).lower()
        bits, group = int(settings["bits"]), int(settings["group_size"])
        method, widths = _WORDS.get(form, ("", ()))
        if method != self.method or bits not in widths:
            raise CheckpointError(
                f"{layer} has {bits} bits in the layout {brief(form)} of {self.method}, which quark_fx does not "
                "decode; pass the original float checkpoint"
            )
        headers = self.files.headers
        parts = {leaf: leaves[leaf] for leaf in ("qweight", "qzeros", "scales")}
        words, outputs = headers[leaves["qweight"]][1]
        if method == "awq":
            inputs, outputs = words, outputs * 8
        else:
            parts |= {"g_idx": leaves["g_idx"]} if "g_idx" in leaves else {}
            inputs = headers[leaves["g_idx"]][1][0] if "g_idx" in leaves else words * 32 // bits
            self._require(layer, parts, "qweight", (-(-inputs * bits // 32), outputs))
        wide = inputs if group == -1 else group
        if wide < 1:
            raise ValueError(f"{layer} has groups of {group} inputs")
        if method == "awq":
            _require_groups(layer, inputs, wide)
        groups = -(-inputs // wide)
        self._require(layer, parts, "qzeros", (groups, -(-outputs * bits // 32)))
        self._require(layer, parts, "scales", (groups, outputs))
        yield "weight", self._tensor((outputs, inputs), parts, form, bits, (1, wide))

    def stacks(self, layer: str, leaves: _Leaves) -> Iterator[tuple[str, DecodedTensor]]:
        """Yield the name and tensor of each stack of MXFP4 experts.

        Codes are stored as (experts, outputs, inputs); the values have the shape (experts, inputs, outputs).
        """
        for leaf in leaves:
            stem = leaf.removesuffix(_BLOCKS)
            if stem != leaf:
                parts = {end: leaves[f"{stem}{end}"] for end in (_BLOCKS, _EXPONENTS)}
                experts, outputs, groups, half = self.files.headers[leaves[leaf]][1]
                self._require(layer, parts, _EXPONENTS, (experts, outputs, groups))
                yield stem, self._tensor((experts, 2 * half * groups, outputs), parts, "mxfp4", 4, (1, 2 * half))

    def _require(self, layer: str, parts: _Leaves, leaf: str, shape: tuple[int, ...]) -> None:
        if (stored := tuple(self.files.headers[parts[leaf]][1])) != shape:
            raise ValueError(f"{layer} has {leaf} of shape {stored}, not {shape}")

    def _tensor(
        self, shape: tuple[int, ...], parts: _Leaves, form: str, bits: int, block: tuple[int, int]
    ) -> DecodedTensor:
        headers = {leaf: self.files.headers[name] for leaf, name in parts.items()}
        if wrong := [f"{parts[leaf]} of {kind}" for leaf, (kind, _) in headers.items() if kind not in _KINDS[leaf]]:
            raise ValueError(f"codes or scales have unexpected dtypes: {some_of(wrong)}")
        return DecodedTensor(
            shape, self.dtype, parts, sum(stored_bytes(*h) for h in headers.values()), form, bits, block
        )


_MATRICES: Mapping[str, Callable[[_Source, str, _Leaves], Iterator[tuple[str, DecodedTensor]]]] = {
    "fp8": _Source.scaled,
    "compressed-tensors": _Source.scaled,
    **dict.fromkeys(("modelopt", "modelopt_fp4"), _Source.scaled),
    "gptq": _Source.words,
    "awq": _Source.words,
    "mxfp4": _Source.stacks,
}
"""Functions that yield the name and matrix of each weight of a layer; keys are names of methods."""

_DECODED = ", ".join(_MATRICES)


def _require_groups(layer: str, inputs: int, size: int) -> None:
    if inputs % size:
        raise ValueError(f"{layer} has {inputs} inputs, not a multiple of the group size {size}")


def group_of(layer: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config group of compressed-tensors that applies to a layer.

    >>> targets = {"any": ["Linear"], "pattern": ["re:.*up"], "name": ["a.up"]}
    >>> groups = {"config_groups": {name: {"targets": part, "format": name} for name, part in targets.items()}}
    >>> [group_of(layer, groups)["format"] for layer in ("a.up", "b.up", "b.down")]
    ['name', 'pattern', 'any']
    """
    groups = [group for group in (quantization.get("config_groups") or {}).values() if isinstance(group, dict)]
    for fits in (layer.__eq__, lambda target: names_layer(target, layer)):  # names take precedence over patterns
        for group in groups:
            if any(map(fits, group.get("targets", ()))):
                return group
    return next((group for group in groups if "Linear" in group.get("targets", ())), groups[0] if groups else {})


def names_layer(target: Any, layer: str) -> bool:
    """Tell whether a name or pattern of compressed-tensors matches a layer."""
    return target == layer or (str(target).startswith("re:") and re.match(str(target)[3:], layer) is not None)


_SHARD = 5 * 10**9
"""Approximate size of a file with decoded values, in bytes."""

_ROWS = 64
"""Number of rows that are decoded together, a multiple of the eight channels in an AWQ word."""


def _matrix(tensor: DecodedTensor, parts: Mapping[str, Tensor]) -> Callable[[slice], Tensor]:
    """Return a function that decodes a slice of the rows of a matrix to float32."""
    (rows, columns), (high, wide) = tensor.shape, tensor.block
    zero: Tensor | None
    if "qweight" in parts:
        scale, words = parts["scales"].float().t(), parts["qzeros"]
        zero = unpack_awq(words) if tensor.form == "gemm" else unpack(words, tensor.bits, rows)
        zero = zero.t().float().add_(int(tensor.form == "gptq"))  # "gptq" stores zero points minus one
    else:
        scale = next(parts[leaf] for leaf in _SCALES if leaf in parts)
        scale = _powers(scale) if scale.dtype == torch.uint8 else scale.float()
        scale = scale.reshape(-(-rows // high), -(-columns // wide))
        if (whole := parts.get("weight_global_scale")) is not None:
            scale = scale / whole.float()
        if (factor := parts.get("weight_scale_2")) is not None:
            scale = scale * factor.float()
        zero = parts.get("weight_zero_point")
        if zero is not None and tensor.form == "pack-quantized":
            zero = unpack(zero.t(), tensor.bits, rows).t().float().sub_(1 << tensor.bits - 1)
        zero = None if zero is None else zero.float().reshape(scale.shape)
    place = parts.get("g_idx", parts.get("weight_g_idx"))
    column = torch.arange(columns) // wide if place is None else place.long()
    if column.shape != (columns,) or bool((column < 0).any()) or bool((column >= scale.shape[1]).any()):
        raise ValueError(f"its g_idx does not assign its {columns} inputs to its {scale.shape[1]} groups")

    def decode(some: slice) -> Tensor:
        part = _codes(tensor, parts, some, columns)
        row = torch.arange(some.start, some.start + len(part)) // high
        if zero is not None:
            part -= zero[row][:, column]
        return part.mul_(scale[row][:, column])

    return decode


def _codes(tensor: DecodedTensor, parts: Mapping[str, Tensor], rows: slice, columns: int) -> Tensor:
    """Return a range of rows of codes, float32 of shape (rows, columns)."""
    if tensor.form == "gemm":
        return unpack_awq(parts["qweight"][:, rows.start // 8 : -(-rows.stop // 8)]).t().float()
    if "qweight" in parts:
        return unpack(parts["qweight"][:, rows].t(), tensor.bits, columns).float()
    if "weight_packed" not in parts:
        return parts["weight"][rows].float()
    packed = parts["weight_packed"][rows]
    if tensor.form == "pack-quantized":
        return unpack(packed, tensor.bits, columns).float().sub_(1 << tensor.bits - 1)
    return _nibbles(packed)[:, :columns]


def _stack(parts: Mapping[str, Tensor]) -> Callable[[slice], Tensor]:
    """Return a function that decodes a slice of the experts of an MXFP4 stack to float32."""
    blocks, scales = parts[_BLOCKS], parts[_EXPONENTS]
    return lambda some: _nibbles(blocks[some]).mul_(_powers(scales[some]).unsqueeze(-1)).flatten(-2).mT


def _nibbles(packed: Tensor) -> Tensor:
    """Return the values of packed FP4 E2M1 codes, two per byte; float32."""
    return torch.cat([_E2M1, -_E2M1])[unpack(packed, 4, 2 * packed.shape[-1]).int()]


def _powers(exponents: Tensor) -> Tensor:
    return torch.ldexp(torch.ones(exponents.shape, dtype=torch.float32), exponents.int() - 127)


__all__ = ["DecodedFiles", "DecodedTensor", "Within", "group_of", "names_layer", "write_values"]
