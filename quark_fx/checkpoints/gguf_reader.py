"""Names, configuration keys, and inverse transforms of an architecture, taken from transformers' GGUF reader."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quark_fx.checkpoints.gguf_architectures import ARCHITECTURES, Architecture
from quark_fx.errors import ExportError

Array = np.ndarray[Any, Any]

_WEIGHT, _BIAS = ".weight", ".bias"

_MARK = 2.0**40
"""Offset that distinguishes element indices from padding zeros; float64 represents the sums exactly."""

_IGNORED = (
    # Names, token ids, training options, and output options.
    *("_*", "architectures", "chunk_size_feed_forward", "dtype", "id2label", "initializer_*", "is_encoder_decoder"),
    *("label2id", "model_type", "output_*", "pretraining_tp", "problem_type", "quantization_config", "return_dict"),
    *(
        "*_token_id",
        "*dropout*",
        "*_pdrop",
        "router_*_coef",
        "router_jitter_noise",
        "transformers_version",
        "use_cache",
    ),
    # Already contained in layer_types, or not read if positions are not scaled.
    *("max_window_layers", "original_max_position_embeddings"),
    # Derived from the tensors of the file.
    *("tie_word_embeddings", "use_parallel_residual", "use_qkv_bias"),
    # Sizes of tensors: transformers raises an error if they differ, and llama.cpp has keys for them.
    *("head_dim", "*intermediate_size", "vocab_size"),
)
"""Patterns of configuration fields whose values cannot silently change the results of a reader."""

_REQUIRED = ("context_length", "block_count", "embedding_length", "feed_forward_length", "attention.head_count")
"""Keys that llama.cpp needs to open a file."""

_EPSILONS = ("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
"""Alternative keys; llama.cpp needs at least one."""


@dataclass(frozen=True)
class Place:
    """A tensor of the file, and the rows of the model's tensor that it contains.

    Attributes:
        name: Name in the file.
        shape: Shape in the file, outermost dimension first.
        width: Number of elements in a row.
        rows: Indices of the rows that the file contains, in its order; the model's tensor is cut into rows of `width`
            elements.
        shift: Constant that readers add to all elements.
    """

    name: str
    shape: tuple[int, ...]
    width: int
    rows: Tensor
    shift: float

    def values(self, tensor: Tensor, some: slice = slice(None)) -> Tensor:
        """Return the values that the file stores for a tensor of the model.

        Args:
            tensor: Tensor of the model.
            some: Range of the rows to return.

        Returns:
            Values of shape (rows, width), float32.
        """
        picked = tensor.detach().reshape(-1, self.width)[self.rows[some]].float()
        return picked - self.shift if self.shift else picked


@dataclass(frozen=True)
class Known:
    """Keys and transforms of an architecture that transformers' GGUF reader knows, or a row of `ARCHITECTURES`.

    Attributes:
        architecture: Name of the architecture in GGUF.
        keys: Names of configuration fields, or `None` if transformers ignores the key; keys are keys of the file.
        assumed: Values that llama.cpp assumes for fields without a key.
        row: Row of `ARCHITECTURES`; `None` if transformers knows the architecture.
    """

    architecture: str
    keys: Mapping[str, str | None]
    assumed: Mapping[str, Any]
    row: Architecture | None

    @classmethod
    def of(cls, model_type: str, package: Any) -> Known | None:
        """Return what is known about models of a type; `None` if nothing is.

        Args:
            model_type: `model_type` of a configuration.
            package: Module `gguf`.
        """
        if row := ARCHITECTURES.get(model_type):
            return cls(row.name, row.fields, row.assumed, row)
        name, reading = plain_name(model_type), _reading()
        written = {plain_name(name): name for name in package.MODEL_ARCH_NAMES.values()}
        fields = {plain_name(name): name for name in reading.GGUF_CONFIG_MAPPING}
        if name not in written or name not in fields:
            return None
        assumed = reading.GGUF_CONFIG_DEFAULTS_MAPPING.get(fields[name], {})
        return cls(written[name], reading.GGUF_CONFIG_MAPPING[fields[name]], assumed, None)

    @classmethod
    def of_model(cls, model: Any, package: Any) -> Known:
        """Return what is known about a model of transformers; `package` is the module `gguf`.

        Raises:
            ExportError: If nothing is known about models of its type.
        """
        if known := cls.of(model.config.model_type, package):
            return known
        raise ExportError(
            f"export.gguf does not support models of type {model.config.model_type}; supported: "
            f"{', '.join(architectures(package))}"
        )

    def reading(self, model: Any) -> tuple[Any, dict[str, str]]:
        """Return the object that transforms the tensors of a file, and the names of the model's tensors.

        Keys of the names are names in the file, without the ending `.weight` for stacks.
        """
        reading, row, config = _reading(), self.row, model.config.to_dict()
        if row is not None:
            processor = row.processor(reading, config)
        else:
            processor = reading.TENSOR_PROCESSORS.get(self.architecture, reading.TensorProcessor)(config)
        return processor, reading.get_gguf_hf_weights_map(model, processor, None if row is None else row.name)


def architectures(package: Any) -> list[str]:
    """Return the names of all known architectures; `package` is the module `gguf`."""
    written = {plain_name(name): name for name in package.MODEL_ARCH_NAMES.values()}
    return sorted(
        {*ARCHITECTURES, *(written[n] for n in map(plain_name, _reading().GGUF_CONFIG_MAPPING) if n in written)}
    )


def _reading() -> Any:
    return importlib.import_module("transformers.modeling_gguf_pytorch_utils")


@dataclass(frozen=True)
class Reader:
    """Names, keys, and transforms of an architecture in transformers' GGUF reader.

    Attributes:
        architecture: Name of the architecture in GGUF.
        config: Configuration of the model.
        keys: Names of configuration fields; keys are keys of the file.
        names: Names of the model's tensors; keys are names in the file, without the ending `.weight` for stacks.
        processor: Object that transforms the tensors of a file when transformers reads them.
        extra: Values that do not come from a field of the configuration; keys are keys of the file.
        tensors: Tensors of the file without a corresponding tensor in the model; keys are names in the file.
    """

    architecture: str
    config: Any
    keys: Mapping[str, str]
    names: Mapping[str, str]
    processor: Any
    extra: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, model: Any, package: Any) -> Reader:
        """Return the names, keys, and transforms of the model's architecture.

        Args:
            model: Float model of transformers.
            package: Module `gguf`.

        Raises:
            ExportError: If the architecture is unknown, the configuration lacks a value for a key that llama.cpp needs,
                or readers would build a different model.
        """
        config = model.config
        known = Known.of_model(model, package)
        keys = {key: field for key, field in known.keys.items() if field}
        tensors = _frequencies(config, known.architecture, package)
        assumed = {**known.assumed, "rope_parameters": config.rope_parameters} if tensors else known.assumed
        processor, names = known.reading(model)
        extra = _width_of_experts(model, names, package) | _gating(config, keys, package)
        extra |= _extra(config, keys, package)
        reader = cls(known.architecture, config, _fields(package) | keys, names, processor, extra, tensors)
        reader._require_keys()
        scale = scale_of_scores(known.architecture, config.to_dict())
        for values in (assumed, {**assumed, **scale}):  # of transformers, and of llama.cpp
            reader._require_alike(keys.values(), values)
        return reader

    def metadata(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys of the file and their values."""
        values = {**{key: self._value(field) for key, field in self.keys.items()}, **self.extra}
        for key, value in values.items():
            if value is not None:
                yield f"{self.architecture}.{key}", value

    def places(self, name: str, shape: Sequence[int]) -> list[Place]:
        """Return the tensors of the file that hold a tensor of the model.

        There are two for the gate and up projections of experts, and one for any other tensor.

        Args:
            name: Name in the model.
            shape: Shape in the model.

        Raises:
            ExportError: If GGUF lacks a name for the tensor, or readers do more than move elements or add a constant to
                all of them.
        """
        stems = [ours for ours, theirs in self.names.items() if theirs == name]
        if not stems:
            raise ExportError("GGUF has no name for this tensor in this architecture; use export.huggingface")
        places = [place for stem in stems if (place := self._place(stem, tuple(shape), len(stems))) is not None]
        rows = torch.cat([place.rows for place in places]) if places else torch.empty(0, dtype=torch.int64)
        width = places[0].width if places else 1
        if len(places) < len(stems) or not torch.equal(rows.sort().values, torch.arange(math.prod(shape) // width)):
            raise ExportError(
                "the GGUF reader transforms this tensor in a way that cannot be inverted, even in float; "
                "choose another checkpoint format"
            )
        return places

    def _value(self, field: str) -> Any:
        return rope_of(self.config).get(field, getattr(self.config, field, None))

    def _place(self, stem: str, shape: tuple[int, ...], parts: int) -> Place | None:
        """Return the place of one of the `parts` tensors that hold a tensor of the model; `None` if none fits."""
        # If a name in the model lacks an ending (.weight or .bias), so does the name in `names`, but not llama.cpp's.
        names = [stem] if stem.endswith((_WEIGHT, _BIAS)) else [f"{stem}{_WEIGHT}", stem]
        # First try rows of two elements, which quickly show where whole rows move. If this fails, track each element.
        widths = [shape[-1], 1] if len(shape) > 1 else [1]
        for width in widths:
            probed = (*shape[:-1], 2) if width > 1 else shape
            for stored in _shapes(probed, parts):
                for name in names:
                    if (move := self._moved(name, probed, stored)) is None:
                        continue
                    index, shift = move
                    if width > 1:
                        pairs = index.reshape(-1, 2)
                        if stored[-1] != 2 or (pairs % 2 != [0, 1]).any() or (pairs[:, 0] + 1 != pairs[:, 1]).any():
                            continue
                        index, stored = pairs[:, 0] // 2, (*stored[:-1], width)
                    return Place(name, stored, width, torch.from_numpy(index), shift)
        return None

    def _moved(self, name: str, shape: tuple[int, ...], stored: tuple[int, ...]) -> tuple[Array, float] | None:
        """Return the index in the model's tensor of each element of the file, and the constant that readers add.

        Args:
            name: Name in the file.
            shape: Shape in the model.
            stored: Shape in the file.

        Returns:
            Flat indices, int64, one per element of the file, and the constant; `None` if the reader does not return one
            tensor of this shape, or does more than move elements and add a constant.
        """
        size, into = math.prod(stored), dict[str, Any]()
        numbered = np.arange(size, dtype=np.float64).reshape(stored) + _MARK
        try:
            result = self.processor.process(
                weights=numbered, name=name, tensor_key_mapping=self.names, parsed_parameters={"tensors": into}
            )
        except Exception:  # the reader's code may raise any error for unexpected shapes
            return None
        if result.name in self.names:
            into[self.names[result.name]] = result.weights
        read = [np.asarray(tensor) for tensor in into.values()]
        if len(read) != 1 or read[0].shape != shape:
            return None
        (filled,) = np.nonzero(read[0].flatten() > _MARK / 2)
        values = read[0].flatten()[filled]
        if len(values) != size:
            return None
        shift = float(values.min() - _MARK)
        source = (values - _MARK - shift).astype(np.int64)
        if not np.array_equal(np.sort(source), np.arange(size)):
            return None
        index = np.empty(size, np.int64)
        index[source] = filled
        return index, shift

    def _require_keys(self) -> None:
        """Raise `ExportError` if the file would lack a key that llama.cpp requires."""
        keys = {key.removeprefix(f"{self.architecture}.") for key, _ in self.metadata()}
        missing = [key for key in _REQUIRED if key not in keys]
        if not keys & set(_EPSILONS):
            missing.append(" or ".join(_EPSILONS))
        if missing:
            raise ExportError(
                f"llama.cpp needs values for {', '.join(missing)} of {self.architecture}, but the configuration does "
                "not give them; use export.huggingface"
            )

    def _require_alike(self, fields: Iterable[str], defaults: Mapping[str, Any]) -> None:
        """Raise `ExportError` if readers assume a value for a field without a key, and the model's value differs."""
        values = {field: value for field in fields if (value := self._value(field)) is not None}
        mine, theirs = (config.to_dict() for config in (self.config, type(self.config)(**values, **defaults)))
        differ = [
            f"{field} ({value!r}, but {mine[field]!r} in this model)"
            for field, value in theirs.items()
            # The model's code does not read fields that its class lacks.
            if field in mine and mine[field] != value and not any(fnmatch(field, pattern) for pattern in _IGNORED)
        ]
        if differ:
            raise ExportError(
                f"GGUF cannot store some fields of {self.architecture}, and its readers assume other values: "
                f"{', '.join(differ)}; use export.huggingface instead"
            )


def _fields(package: Any) -> dict[str, str]:
    """Return the keys of configuration fields whose defaults differ between llama.cpp and transformers' reader."""
    keys = package.Keys
    named = {
        keys.Attention.KEY_LENGTH: "head_dim",
        keys.Attention.VALUE_LENGTH: "head_dim",
        keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: "shared_expert_intermediate_size",
    }
    return {key.removeprefix("{arch}."): field for key, field in named.items()}


_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the models with 27 billion parameters; keys are architectures."""


def scale_of_scores(architecture: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value that llama.cpp assumes for `query_pre_attn_scalar`, which has no key; empty for other models.

    Args:
        architecture: Name of the architecture in GGUF.
        fields: Fields of the configuration.

    Source:
        llama.cpp, `f_attention_scale` in `load_hparams` of gemma2 and gemma3.
    """
    if architecture not in _LARGEST:
        return {}
    width = fields["hidden_size"] // fields["num_attention_heads"]
    largest = fields["num_hidden_layers"] == _LARGEST[architecture]
    return {"query_pre_attn_scalar": width if largest else fields.get("head_dim") or width}


def file_fields(known: Known, values: Mapping[str, Any], package: Any) -> dict[str, str]:
    """Return the name of the configuration field that each key of a GGUF file sets.

    Args:
        known: Keys of the architecture.
        values: Values of the file; keys are keys of the file.
        package: Module `gguf`.
    """
    llm, more = package.Keys.LLM, _fields(package)
    more |= {
        llm.VOCAB_SIZE.removeprefix("{arch}."): "vocab_size",
        package.Keys.Rope.FREQ_BASE.removeprefix("{arch}."): "rope_theta",
        llm.EXPERT_FEED_FORWARD_LENGTH.removeprefix("{arch}."): "moe_intermediate_size",
        llm.ATTN_LOGIT_SOFTCAPPING.removeprefix("{arch}."): "attn_logit_softcapping",
        llm.FINAL_LOGIT_SOFTCAPPING.removeprefix("{arch}."): "final_logit_softcapping",
    }
    del more[package.Keys.Attention.VALUE_LENGTH.removeprefix("{arch}.")]
    fields = {**known.keys, **{key: field for key, field in more.items() if key not in known.keys}}
    for key, other in (_EPSILONS, _EPSILONS[::-1]):
        if fields.get(key) and key not in values:
            fields[other] = fields[key]
    return {key: field for key, field in fields.items() if field}


def _extra(config: Any, keys: Mapping[str, str], package: Any) -> dict[str, Any]:
    """Return the values of keys that llama.cpp reads and transformers' GGUF reader ignores in favor of its defaults."""
    rope, both = package.Keys.Rope, rope_of(config)
    theta, share = (both.get(name, getattr(config, name, None)) for name in ("rope_theta", "partial_rotary_factor"))
    values = {package.Keys.LLM.VOCAB_SIZE: config.vocab_size, rope.FREQ_BASE: theta}
    if share is not None and share != 1:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        values[rope.DIMENSION_COUNT] = int(width * share)
    entries = {key.removeprefix("{arch}."): value for key, value in values.items()}
    for key, other in (_EPSILONS, _EPSILONS[::-1]):  # transformers has one key for all norms, llama.cpp one per kind
        if other in keys:
            entries[key] = getattr(config, keys[other], None)
    return {key: value for key, value in entries.items() if key not in keys}


def rope_of(config: Any) -> dict[str, Any]:
    """Return the parameters of rotary embeddings; if layers differ, the parameters of layers with full attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("full_attention") or parameters


def frequencies_name(package: Any) -> str:
    """Return the name of the tensor with the divisors of rotary frequencies; `package` is the module `gguf`."""
    return f"{package.TENSOR_NAMES[package.MODEL_TENSOR.ROPE_FREQS]}{_WEIGHT}"


def _frequencies(config: Any, architecture: str, package: Any) -> dict[str, Tensor]:
    """Return the tensor from which llama.cpp reads the divisors of rotary frequencies; empty without scaling.

    Raises:
        ExportError: If frequencies are scaled by another method than Llama 3's.
    """
    rope = rope_of(config)
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return {}
    if kind != "llama3" or architecture != "llama":
        raise ExportError(
            f"positions are scaled (rope_type {kind!r}), which GGUF export does not support; use export.huggingface"
        )
    utilities = importlib.import_module("transformers.modeling_rope_utils")
    scaled, _ = utilities.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(len(scaled), dtype=torch.float32) / len(scaled))
    return {frequencies_name(package): plain / scaled}


def _width_of_experts(model: Any, names: Mapping[str, str], package: Any) -> dict[str, int]:
    """Return the key and value of the input size of an expert's down projection.

    The size comes from the weight, because its field has different names in different configurations.
    """
    down = package.TENSOR_NAMES[package.MODEL_TENSOR.FFN_DOWN_EXP]
    stacks = (names.get(down.format(bid=layer)) for layer in range(model.config.num_hidden_layers))
    stack = next((model.get_parameter(name) for name in stacks if name), None)
    key = package.Keys.LLM.EXPERT_FEED_FORWARD_LENGTH.removeprefix("{arch}.")
    return {} if stack is None else {key: stack.shape[-1]}


def _gating(config: Any, keys: Mapping[str, str], package: Any) -> dict[str, int]:
    """Return the key and the number of the function that turns a router's scores into weights."""
    key = package.Keys.LLM.EXPERT_GATING_FUNC.removeprefix("{arch}.")
    name = getattr(config, keys[key], None) if key in keys else None
    return {} if name is None else {key: int(package.ExpertGatingFuncType[str(name).upper()])}


def _shapes(shape: tuple[int, ...], parts: int) -> list[tuple[int, ...]]:
    """Return the possible shapes in the file of one of the `parts` tensors that hold a tensor of this shape.

    A single tensor may have the same shape, the reversed shape, or the shape without dimensions of size 1. Two or more
    divide the second to last dimension equally.
    """
    if parts > 1:
        return [(*shape[:-2], shape[-2] // parts, shape[-1])] if len(shape) > 2 and shape[-2] % parts == 0 else []
    return list(dict.fromkeys([shape, shape[::-1], tuple(size for size in shape if size != 1)]))


def plain_name(name: str) -> str:
    """Return the name of an architecture without the characters in which llama.cpp and transformers differ."""
    return name.removesuffix("_text").replace("-", "").replace("_", "")


__all__ = [
    "Known",
    "Place",
    "Reader",
    "architectures",
    "file_fields",
    "frequencies_name",
    "plain_name",
    "rope_of",
    "scale_of_scores",
]
