"""Context length of a language model, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def context_length(config: Any) -> int | None:
    """Return the context length of a language model in tokens; `None` if its configuration does not contain one.

    Args:
        config: Configuration of a transformers model, or the JSON object of a checkpoint. For a multimodal model, the
            configuration of the text part is used.
    """
    if isinstance(config, Mapping):
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        lengths = [config.get(name) for name in _NAMES]
    else:
        text = config.get_text_config(decoder=True)
        lengths = [getattr(text, name, None) for name in _NAMES]
    return next((length for length in lengths if isinstance(length, int)), None)


__all__ = ["context_length"]
