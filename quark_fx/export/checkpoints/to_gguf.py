"""Write a quantized language model as a GGUF file, which llama.cpp and transformers read."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quark_fx.errors import ExportError
from quark_fx.export.checkpoints.gguf_blocks import blocks
from quark_fx.export.checkpoints.values import Checkpoint, Layer, refuse_caches, take_apart, unholdable
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.system.isolation import isolated
from quark_fx.system.options import checked_call
from quark_fx.system.writable import require_possible

Array = np.ndarray[Any, Any]


@checked_call
@isolated
def gguf(qmodel: QuantizedModel, path: str | Path, *, tokenizer: Any = None, model: nn.Module | None = None) -> Path:
    """Write `qmodel`, made of a Hugging Face language model, as a GGUF file.

    Weights in one of `quark_fx.gguf_types` are stored as that type, and llama.cpp reads the values that `qmodel`
    computes with. Other weights of 4 bits become Q4_0, or Q4_1 with zero points, those of 5 bits Q5_0 or Q5_1, those of
    8 bits Q8_0: blocks of 32 inputs with a float16 scale, so that groups are 32 or a multiple, or the whole row.
    Everything else is stored in float32. Names of tensors are those of the `gguf` package; what readers do to a tensor
    (llama.cpp keeps the rows of queries and keys in another order) is what transformers' reader does, undone.

    Args:
        qmodel: from `quantize`. Scales that float16 does not hold are rounded to it; `scale_type="float16"` is exact.
        path: the file to write.
        tokenizer: a fast tokenizer with byte-level merges, written into the file; llama.cpp needs it. How it splits
            text before merging (`tokenizer.ggml.pre`) is written as "default", which llama.cpp may do otherwise.
        model: a float model of the same architecture, if `qmodel` was loaded.

    Returns:
        The path.

    Raises:
        ExportError: if GGUF cannot hold how an operator is quantized (all are listed), does not know the architecture
            or one of its tensors, or the file cannot be written.

    Source:
        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and `ggml-quants.c` for the blocks.
    """
    try:
        import gguf as package
    except ImportError as error:
        raise ExportError("GGUF export needs the package gguf: pip install 'quark_fx[hf]'") from error
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    require_possible(partial)
    checkpoint = take_apart(qmodel, model)
    refuse_caches(checkpoint, "GGUF")
    reader = Reader.of(checkpoint.shell, package)
    try:
        writer = package.GGUFWriter(partial, reader.architecture)
        writer.add_quantization_version(package.GGML_QUANT_VERSION)
        for key, value in reader.metadata():
            _add(writer, package, key, value)
        if tokenizer is not None:
            _add_tokenizer(writer, package, tokenizer, checkpoint.shell.config.vocab_size)
        for name, (data, kind) in _tensors(checkpoint, reader, package).items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    except OSError as error:
        raise ExportError(f"{path} cannot be written: {error}; choose another path") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


@dataclass(frozen=True)
class Reader:
    """What transformers' reader of GGUF knows of an architecture.

    Attributes:
        architecture: its name in GGUF.
        config: of the model.
        keys: fields of the configuration by key of the file.
        names: of the model's tensors by name in the file.
        processor: what changes tensors as they are read.
    """

    architecture: str
    config: Any
    keys: Mapping[str, str | None]
    names: Mapping[str, str]
    processor: Any

    @classmethod
    def of(cls, model: Any, package: Any) -> Reader:
        """Look the model's architecture up.

        Raises:
            ExportError: if it is unknown.
        """
        reading = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
        kind = model.config.model_type
        written = {_plain(name): name for name in package.MODEL_ARCH_NAMES.values()}
        fields = {_plain(name): keys for name, keys in reading.GGUF_CONFIG_MAPPING.items()}
        architecture, keys = written.get(_plain(kind)), fields.get(_plain(kind))
        if architecture is None or keys is None:
            known = ", ".join(sorted(written[name] for name in fields if name in written))
            raise ExportError(f"models of type {kind} are not written as GGUF; known to its reader are {known}")
        rope = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope != "default":
            raise ExportError(
                f"positions are scaled (rope_type {rope!r}), which is not written yet; choose a checkpoint"
            )
        processor = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)(model.config.to_dict())
        names = reading.get_gguf_hf_weights_map(model, processor)
        return cls(architecture, model.config, keys, names, processor)

    def metadata(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the file and their values."""
        rope = getattr(self.config, "rope_parameters", None) or {}
        heads = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
        for key, field in {**heads, **self.keys}.items():
            value = rope.get(field, getattr(self.config, field, None)) if field else None
            if value is not None:
                yield f"{self.architecture}.{key}", value

    def read(self, name: str, stored: Array) -> Array:
        """Return what is read where `stored` is in the file."""
        found: Array = self.processor.process(
            weights=stored.copy(), name=name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
        ).weights
        return found

    def undo(self, name: str, tensor: Tensor) -> Array:
        """Return what has to be in the file for `tensor` to be read: its elements moved, and shifted.

        Raises:
            ExportError: if reading does more than that.
        """
        wanted = tensor.float().numpy()
        for shape in (wanted.shape, wanted.shape[::-1]):
            index = self.read(name, np.arange(wanted.size, dtype=np.float64).reshape(shape))
            if index.shape == wanted.shape:
                shift = index.min()
                stored: Array = np.empty(wanted.size, np.float32)
                stored[(index - shift).astype(np.int64).flatten()] = wanted.flatten() - np.float32(shift)
                stored = stored.reshape(shape)
                if np.allclose(self.read(name, stored), wanted, atol=1e-6):
                    return stored
        raise ExportError("what readers do to it, be it in float, cannot be undone; choose another checkpoint format")

    def rows(self, name: str, matrix: Tensor) -> Tensor:
        """Return which rows of a matrix are stored, in order; errors as `undo`."""
        index = torch.arange(len(matrix), dtype=torch.float32)[:, None].expand(matrix.shape)
        stored = self.undo(name, index)
        if stored.shape != tuple(matrix.shape) or (stored != stored[:, :1]).any():
            raise ExportError("readers of GGUF take its rows apart, and blocks lie in rows; leave it in float")
        return torch.from_numpy(stored[:, 0]).long()


def _plain(name: str) -> str:
    return name.removesuffix("_text").replace("-", "").replace("_", "")


def _tensors(checkpoint: Checkpoint, reader: Reader, package: Any) -> dict[str, tuple[Array, Any]]:
    """Return data and type of every tensor by its name in the file, or one error about all that has no place."""
    layers = {f"{layer.name}.weight": layer for layer in checkpoint.layers}
    names = {theirs: ours for ours, theirs in reader.names.items()}
    tied = checkpoint.shell.config.tie_word_embeddings
    repeats = dict(checkpoint.shell._tied_weights_keys or {})
    skipped = {theirs for theirs, first in repeats.items() if tied or _are_equal(layers, theirs, first)}
    tensors, errors = {}, dict[str, None]()
    for theirs in (*checkpoint.tensors, *layers):
        ours = names.get(theirs)
        try:
            if theirs in skipped:
                continue
            if theirs in layers and layers[theirs].stack:
                theirs = layers[theirs].stack  # one error for all experts
                raise ExportError("quantized experts are not written as GGUF; leave them in float (op:experts)")
            if ours is None:
                raise ExportError("the architecture has no tensor of that name in GGUF")
            if theirs in layers:
                tensors[ours] = _quantized(layers[theirs], reader, ours, package.GGMLQuantizationType)
            else:
                tensor = checkpoint.tensors[theirs].detach()
                tensors[ours] = reader.undo(ours, tensor), package.GGMLQuantizationType.F32
        except ExportError as error:
            errors[f"{theirs}: {error}"] = None
    if errors:
        raise unholdable(list(errors))
    return tensors


def _are_equal(layers: dict[str, Layer], one: str, other: str) -> bool:
    """Tell whether two layers have the same codes: one tensor serves both."""
    if not (one in layers and other in layers):
        return False
    a, b = layers[one].weight, layers[other].weight
    return all(torch.equal(getattr(a, part), getattr(b, part)) for part in ("codes", "scale", "zero_point"))


def _quantized(layer: Layer, reader: Reader, name: str, kinds: Any) -> tuple[Array, Any]:
    if layer.input is not None:
        raise ExportError("GGUF has no place for quantized activations")
    data, kind = blocks(layer.weight)
    return data[reader.rows(name, layer.weight.codes)].numpy(), kinds[kind]


def _add(writer: Any, package: Any, key: str, value: Any) -> None:
    types = package.GGUFValueType
    # Counts are unsigned, which the package would not guess.
    kind = types.UINT32 if isinstance(value, int) and not isinstance(value, bool) else types.get_type(value)
    writer.add_key_value(key, value, kind, types.get_type(value[0]) if isinstance(value, list) else None)


def _add_tokenizer(writer: Any, package: Any, tokenizer: Any, size: int) -> None:
    """Write tokens, merges, and which tokens are special; up to `size` tokens."""
    if len(tokenizer) > size:
        raise ExportError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {size}; pass the model's own tokenizer"
        )
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = package.SpecialVocab(folder, load_merges=True, n_vocab=size)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not special.merges or "ByteLevel" not in str(getattr(backend, "pre_tokenizer", "")):
        raise ExportError(f"{type(tokenizer).__name__} has no merges of byte pairs; pass tokenizer=None")
    tokens = {index: token for token, index in tokenizer.get_vocab().items()}
    control = set(tokenizer.all_special_ids)
    kinds = package.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens.get(i, f"[PAD{i}]") for i in range(size)])
    writer.add_token_types(
        [kinds.CONTROL if i in control else kinds.NORMAL if i in tokens else kinds.UNUSED for i in range(size)]
    )
    special.add_to_gguf(writer, quiet=True)


__all__ = ["Reader", "gguf"]
