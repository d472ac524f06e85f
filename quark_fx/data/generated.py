"""Calibration text that a language model generates itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quark_fx.data.context import context_length
from quark_fx.errors import CalibrationError
from quark_fx.system.options import PositiveInt, checked_call

_GREEDY = 4
"""Number of greedily chosen tokens after the first one, so that a text begins in a typical way."""


@checked_call
def generated_windows(
    model: nn.Module, *, length: PositiveInt = 512, count: PositiveInt = 128, batch_size: PositiveInt = 8, seed: int = 0
) -> list[dict[str, Tensor]]:
    """Return windows of text that the model itself generates, for calibration when no text is available.

    The first token is drawn at random from the vocabulary, the next four are the most probable ones, and the rest are
    sampled at temperature 1 (LLM-QAT, https://arxiv.org/abs/2305.17888, section 2.1). Every window begins with the
    model's beginning-of-text token, if there is one.

    Args:
        model: Causal language model of transformers in eval mode, on any device.
        length: Tokens per window, including the beginning-of-text token.
        count: Number of windows.
        batch_size: Windows per batch.
        seed: Seed of the sampling; torch's random state is restored afterwards.

    Returns:
        Batches `{"input_ids": (batch_size, length)}` in int64 on the CPU; the last batch may have fewer windows.

    Raises:
        CalibrationError: If the model does not generate text, is in training mode, or does not support windows of
            `length`.
    """
    config = getattr(model, "config", None)
    can = getattr(model, "can_generate", None)
    if config is None or can is None or not can() or config.is_encoder_decoder:
        raise CalibrationError(
            f"{type(model).__name__} cannot generate text; pass a causal language model of transformers"
        )
    if training := [name for name, module in model.named_modules() if module.training]:
        raise CalibrationError(
            f"the {type(model).__name__} has modules in training mode, first {training[0] or 'the model itself'}; call "
            "model.eval()"
        )
    if length > (longest := context_length(config) or length):
        raise CalibrationError(f"length={length} exceeds the {longest} positions of the model; choose a smaller length")
    config = config.get_text_config()
    begin = () if config.bos_token_id is None else (config.bos_token_id,)
    if length < len(begin) + 2 + _GREEDY:
        raise CalibrationError(f"length={length} is too short; generate at least {len(begin) + 2 + _GREEDY} tokens")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(config.vocab_size, (count, 1), generator=generator)
    starts = torch.cat((torch.tensor(begin, dtype=torch.int64).expand(count, -1), drawn), 1)
    batches = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        for start in starts.split(batch_size):
            tokens = _continued(model, start.to(device), _GREEDY, sample=False)
            tokens = _continued(model, tokens, length - tokens.shape[1], sample=True)
            batches.append({"input_ids": tokens.cpu()})
    return batches


def _continued(model: Any, tokens: Tensor, more: int, *, sample: bool) -> Tensor:
    """Append exactly `more` generated tokens to `tokens`; end-of-text tokens and the model's settings are ignored."""
    import transformers

    settings, plain = (
        model.generation_config,
        transformers.GenerationConfig(
            max_new_tokens=more, min_new_tokens=more, do_sample=sample, temperature=1.0, top_k=0, top_p=1.0
        ),
    )
    plain.eos_token_id, plain.pad_token_id = settings.eos_token_id, 0
    model.generation_config = transformers.GenerationConfig()  # `generate` reads missing settings from the model
    try:
        generated: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=plain)
    except (RuntimeError, IndexError, ValueError) as error:  # errors of torch and transformers
        raise CalibrationError(f"the generate() method of {type(model).__name__} failed: {error}") from error
    finally:
        model.generation_config = settings
    return generated


__all__ = ["generated_windows"]
