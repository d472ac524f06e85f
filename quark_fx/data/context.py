"""How many tokens a language model reads at most, as its configuration says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")


def context_length(config: Any) -> int | None:
    """Return how many tokens a language model reads at most, `None` if its configuration does not say.

    Args:
        config: of a model of transformers, or the JSON object of a checkpoint; one of several parts has it in that of
            its text.
    """
    if isinstance(config, Mapping):
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) else config
        found = [config.get(name) for name in _NAMES]
    else:
        text = config.get_text_config(decoder=True)
        found = [getattr(text, name, None) for name in _NAMES]
    return next((length for length in found if isinstance(length, int)), None)


__all__ = ["context_length"]
