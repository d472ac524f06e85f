"""Export of quantized language models as GGUF files for llama.cpp and transformers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quark_fx.checkpoints.files import some_of
from quark_fx.checkpoints.gguf_reader import Place, Reader
from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.gguf_blocks import blocks_of, type_of
from quark_fx.export.checkpoints.values import (
    Checkpoint,
    Layer,
    require_tokenizer,
    require_weights_alone,
    take_apart,
    unholdable,
)
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.system.isolation import isolated, warn
from quark_fx.system.options import checked_call
from quark_fx.system.writable import new_file, replace_synced, require_possible, writing

_AT_ONCE = 1 << 20
"""Approximate number of values that are packed and written at once, which takes tens of megabytes of memory."""

_FLOATS = ("freq_base", "epsilon", "scale", "scaling.factor", "softcapping")
"""Substrings of the keys that llama.cpp reads as float32, even if the configuration's value is an integer."""


@checked_call
@isolated
def gguf(qmodel: QuantizedModel, path: str | Path, *, tokenizer: Any = None, model: nn.Module | None = None) -> Path:
    """Write `qmodel`, a quantized Hugging Face language model, as a GGUF file.

    Weights in one of `quark_fx.gguf_types` are stored as that type, and llama.cpp reads exactly the values of `qmodel`.
    Other weights of 4 bits become Q4_0, or Q4_1 with zero points; 5 bits become Q5_0 or Q5_1, and 8 bits Q8_0. These
    types have blocks of 32 inputs with a float16 scale, so groups must be 32, a multiple of 32, or the whole row. All
    other tensors are stored in float32. The experts of a layer are stored as one tensor per projection, in any of these
    types. Names of tensors come from the `gguf` package. Transforms that transformers' reader applies to tensors are
    inverted in the file (llama.cpp orders the rows of queries and keys differently).

    Tensors are packed and written piece by piece: a model whose weights stay in files (`Resources(output_dir=...)`) is
    never in memory as a whole.

    Args:
        qmodel: Result of `quantize`. Scales are rounded to float16; `scale="float16"` makes this exact.
        path: File to write.
        tokenizer: Fast tokenizer with byte-level merges to write into the file; llama.cpp needs it. The rule for
            splitting text before merging (`tokenizer.ggml.pre`) is written as "default", which llama.cpp may apply
            differently; a warning says so.
        model: Float model of the same architecture, if `qmodel` was loaded from a file.

    Returns:
        Path of the file.

    Raises:
        ExportError: If GGUF does not support the quantization of an operator (all such operators are listed), the
            architecture, or one of its tensors; if the configuration lacks a value for a key that llama.cpp needs; if
            GGUF lacks a key for a field whose value differs from the value that readers assume (all such fields are
            listed); or if the file cannot be written.

    Source:
        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and `ggml-quants.c` for the blocks.
    """
    try:
        import gguf as package
    except ImportError as error:
        raise ExportError("GGUF export needs the package gguf: pip install 'quark_fx[hf]'") from error
    path = Path(path)
    require_possible(path)
    require_tokenizer(tokenizer)
    checkpoint = take_apart(qmodel, model)
    require_weights_alone(checkpoint, "GGUF")
    if names := sorted(checkpoint.unread):
        warn(f"the GGUF file omits {len(names)} tensors of the source that the class does not read: {some_of(names)}")
    reader = Reader.of(checkpoint.shell, package)
    tensors, errors = _tensors(checkpoint, reader, package)
    if errors:
        raise unholdable([f"{name}: {error}" for name, error in errors])
    with writing(path), new_file(path, f".{path.name}.quark_fx-") as (_, unfinished):
        writer = package.GGUFWriter(unfinished, reader.architecture)
        try:
            _write_file(writer, package, reader, tensors, tokenizer, checkpoint.shell.config.vocab_size)
        finally:
            writer.close()
        replace_synced(unfinished, path)
    return path


def _write_file(
    writer: Any, package: Any, reader: Reader, tensors: list[Stored], tokenizer: Any, vocab_size: int
) -> None:
    writer.add_quantization_version(package.GGML_QUANT_VERSION)
    for key, value in reader.metadata():
        _add(writer, package, key, value)
    if tokenizer is not None:
        _add_tokenizer(writer, package, tokenizer, vocab_size)
    for tensor in tensors:
        writer.add_tensor_info(tensor.place.name, tensor.stored, np.dtype(np.uint8), tensor.nbytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if errors := _write(tensors, writer):
        raise unholdable([f"{name}: {error}" for name, error in errors])


@dataclass(frozen=True)
class Stored:
    """A tensor of the file, whose data is computed when it is written.

    Attributes:
        source: Name of the model's tensor, or stack of experts, that the data comes from.
        place: Place in the file.
        kind: GGUF type of the tensor.
        stored: Shape in the file, with the last dimension in bytes.
        open: Function that loads the data and returns a function from a slice of rows to their bytes, uint8.
    """

    source: str
    place: Place
    kind: Any
    stored: tuple[int, ...]
    open: Callable[[], Callable[[slice], Tensor]]

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return math.prod(self.stored)

    def pieces(self) -> Iterator[Tensor]:
        """Yield the bytes of consecutive ranges of rows."""
        rows, step = self.open(), max(1, _AT_ONCE // self.place.width)
        for first in range(0, len(self.place.rows), step):
            yield rows(slice(first, first + step))


def _write(tensors: list[Stored], writer: Any) -> list[tuple[str, str]]:
    """Write the data of all tensors after the header; stop writing at the first error, and return all errors.

    An error is the name of a tensor's source and the message.
    """
    (file,) = writer.fout
    writer.write_padding(file, file.tell())
    errors = dict[tuple[str, str], None]()
    for tensor in tensors:
        try:
            for piece in tensor.pieces():
                if not errors:
                    file.write(piece.contiguous().numpy().data)
            writer.write_padding(file, tensor.nbytes)
        except ExportError as error:
            errors[tensor.source, str(error)] = None
    return list(errors)


def _tensors(checkpoint: Checkpoint, reader: Reader, package: Any) -> tuple[list[Stored], list[tuple[str, str]]]:
    """Return all tensors of the file, and the name and error of each tensor that GGUF does not support."""
    layers = {f"{layer.name}.weight": layer for layer in checkpoint.layers if not layer.stack}
    tied = checkpoint.shell.config.tie_word_embeddings
    repeats = dict(checkpoint.shell._tied_weights_keys or {})
    skipped = {theirs for theirs, first in repeats.items() if tied or _are_equal(layers, theirs, first)}
    tensors, errors = [_extra(name, tensor, package) for name, tensor in reader.tensors.items()], []
    for name in (*checkpoint.tensors, *layers, *checkpoint.rows):
        try:
            if name in skipped:
                continue
            if name in checkpoint.tensors:
                tensors += _floats(name, checkpoint.tensors[name], reader, package)
            elif name in layers:
                if layers[name].input is not None:
                    raise ExportError("GGUF cannot store quantized activations; quantize with input=None")
                tensors += _quantized(name, layers[name].matrix, None, reader, package)
            else:
                shape = tuple(checkpoint.shell.get_parameter(name).shape)
                tensors += _quantized(name, checkpoint.rows[name], shape, reader, package)
        except ExportError as error:
            errors.append((name, str(error)))
    return tensors, errors


def _floats(name: str, tensor: Tensor, reader: Reader, package: Any) -> Iterator[Stored]:
    """Yield the tensors of the file that hold a float tensor of the model."""
    for place in reader.places(name, tensor.shape):
        stored = (*place.shape[:-1], 4 * place.shape[-1]) if place.shape else (4,)
        yield Stored(name, place, package.GGMLQuantizationType.F32, stored, partial(_float_rows, tensor, place))


def _extra(name: str, tensor: Tensor, package: Any) -> Stored:
    """Return the entry for a 1-D tensor of the file that the model does not have."""
    place = Place(name, tuple(tensor.shape), 1, torch.arange(len(tensor)), 0)
    stored = (4 * len(tensor),)
    return Stored(name, place, package.GGMLQuantizationType.F32, stored, partial(_float_rows, tensor, place))


def _float_rows(tensor: Tensor, place: Place) -> Callable[[slice], Tensor]:
    return lambda rows: place.values(tensor, rows).view(torch.uint8)


def _quantized(
    name: str, make: Callable[[], QuantizedTensor], shape: tuple[int, ...] | None, reader: Reader, package: Any
) -> Iterator[Stored]:
    """Yield the tensors of the file that hold a quantized weight of the model.

    Args:
        name: Name in the model.
        make: Function that returns one matrix with all rows of the weight.
        shape: Shape of the weight in the model; `None` if it is the shape of the matrix.
        reader: Names and transforms of the architecture.
        package: Module `gguf`.
    """
    matrix = make()
    kind, (_, inputs) = type_of(matrix), matrix.codes.shape
    places = reader.places(name, matrix.codes.shape if shape is None else shape)
    del matrix  # it is computed again for writing
    for place in places:
        if place.width != inputs or place.shape[-1] != inputs:
            raise ExportError("GGUF readers split the rows of this tensor, and so its blocks; leave it in float")
        number = package.GGMLQuantizationType[kind]
        stored = tuple(package.quant_shape_to_byte_shape(place.shape, number))
        yield Stored(name, place, number, stored, partial(_block_rows, make, place, kind))


def _block_rows(make: Callable[[], QuantizedTensor], place: Place, kind: str) -> Callable[[slice], Tensor]:
    matrix = make()
    return lambda rows: blocks_of(_rows(matrix, place.rows[rows]), kind)


def _rows(matrix: QuantizedTensor, rows: Tensor) -> QuantizedTensor:
    """Return the matrix with the rows at the indices `rows`, in that order."""
    codes = matrix.codes[rows]
    scale, zero_point = (p[rows] if len(p) > 1 else p for p in (matrix.scale, matrix.zero_point))
    return replace(matrix, codes=codes, scale=scale, zero_point=zero_point, layout=matrix.layout.of_shape(codes.shape))


def _are_equal(layers: dict[str, Layer], one: str, other: str) -> bool:
    """Tell whether two layers have the same codes, so that one tensor serves both."""
    if not (one in layers and other in layers):
        return False
    a, b = layers[one].weight, layers[other].weight
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scale", "zero_point"))


def _add(writer: Any, package: Any, key: str, value: Any) -> None:
    types = package.GGUFValueType
    # llama.cpp rejects unexpected types, and expects unsigned counts; the package would choose a signed type.
    if isinstance(value, int) and not isinstance(value, bool):
        is_float = any(part in key for part in _FLOATS)
        kind, value = (types.FLOAT32, float(value)) if is_float else (types.UINT32, value)
    else:
        kind = types.get_type(value)
    writer.add_key_value(key, value, kind, types.get_type(value[0]) if isinstance(value, list) else None)


def _add_tokenizer(writer: Any, package: Any, tokenizer: Any, size: int) -> None:
    """Write `size` tokens with their types, the merges, and the ids of special tokens."""
    if len(tokenizer) > size:
        raise ExportError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has {size}; pass the model's own tokenizer"
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = package.SpecialVocab(folder, load_merges=True, n_vocab=size)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not special.merges or "ByteLevel" not in str(getattr(backend, "pre_tokenizer", "")):
        raise ExportError(
            f"{type(tokenizer).__name__} is not a byte-level BPE tokenizer, as GGUF export needs; pass tokenizer=None"
        )
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    control = set(tokenizer.all_special_ids)
    kinds = package.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    warn(
        'tokenizer.ggml.pre is written as "default", and llama.cpp may split text differently from '
        f"{type(tokenizer).__name__}; compare the token ids of a few texts, and set another pre-tokenizer with "
        "gguf-new-metadata --pre-tokenizer"
    )
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(
        [kinds.CONTROL if i in control else kinds.NORMAL if i in tokens else kinds.UNUSED for i in range(size)]
    )
    special.add_to_gguf(writer, quiet=True)


__all__ = ["gguf"]
