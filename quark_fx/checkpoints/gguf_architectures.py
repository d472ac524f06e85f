"""Architectures that llama.cpp reads and transformers' GGUF reader does not, with their keys and transforms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.dimension_count": "head_dim",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_LAYER_NORM = {"attention.layer_norm_epsilon": "layer_norm_eps"}

_PAIRS, _EXPERTS = "LlamaTensorProcessor", "Qwen2MoeTensorProcessor"
"""Classes of transformers' GGUF reader for the order of the rows of queries and keys, and for stacks of experts."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        name: Name in GGUF; the package `gguf` lists the names of its tensors.
        fields: Names of configuration fields; keys are keys of the file.
        steps: Names of the classes of transformers' GGUF reader that transform the tensors, in order.
        assumed: Values that llama.cpp assumes for fields without a key, where they differ from transformers' defaults.
    """

    name: str
    fields: Mapping[str, str]
    steps: tuple[str, ...] = ()
    assumed: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def has_experts(self) -> bool:
        """True if files of the architecture hold experts."""
        return "expert_count" in self.fields

    def processor(self, reading: Any, config: dict[str, Any]) -> Any:
        """Return a tensor processor for transformers' GGUF reader that applies all steps in order."""
        steps = [getattr(reading, name)(config) for name in ("TensorProcessor", *self.steps)]

        def process(weights: Any, name: str, **options: Any) -> Any:
            for step in steps:
                result = step.process(weights, name, **options)
                weights = result.weights
            return result

        last = steps[-1]
        return SimpleNamespace(
            process=process,
            preprocess_name=last.preprocess_name,
            perform_fallback_tensor_mapping=last.perform_fallback_tensor_mapping,
        )


ARCHITECTURES = {
    "mistral": Architecture("llama", {**_COMMON, **_RMS}, (_PAIRS,), {"sliding_window": None}),
    "mixtral": Architecture(
        "llama",
        {**_COMMON, **_RMS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        (_PAIRS, _EXPERTS),
    ),
    "granite": Architecture(
        "granite",
        {
            **_COMMON,
            **_RMS,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        (_PAIRS,),
    ),
    "cohere": Architecture("command-r", {**_COMMON, **_LAYER_NORM, "logit_scale": "logit_scale"}),
    "cohere2": Architecture(
        "cohere2",
        {**_COMMON, **_LAYER_NORM, "logit_scale": "logit_scale", "attention.sliding_window": "sliding_window"},
    ),
    "olmo2": Architecture("olmo2", {**_COMMON, **_RMS}),
    "smollm3": Architecture("smollm3", {**_COMMON, **_RMS}, (_PAIRS,)),
}
"""Architectures; keys are the `model_type` of configurations."""


__all__ = ["ARCHITECTURES", "Architecture"]
