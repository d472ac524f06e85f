"""Text and conversations as tokens: windows packed from one row of them, or a line a sample."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quark_fx.data.batches import in_batches, spread
from quark_fx.errors import CalibrationError
from quark_fx.system.options import PositiveInt, checked_call


@checked_call
def text_windows(
    text: str | Iterable[str],
    tokenizer: Any,
    *,
    length: PositiveInt = 512,
    count: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
) -> list[dict[str, Tensor]]:
    """Return windows of a text's tokens, without padding and without overlap: what language models are calibrated on.

    Args:
        text: one text, or documents, behind each of which the tokenizer's end of text is put.
        tokenizer: of transformers, or any whose call returns `input_ids`.
        length: tokens of a window.
        count: windows, spread evenly over the text; default: all.
        batch_size: windows of a batch.

    Returns:
        Batches `{"input_ids": (batch_size, length)}` in int64; the last one may have fewer windows.

    Raises:
        CalibrationError: if the text has fewer tokens than one window.
    """
    if isinstance(text, str):
        tokens = list(_tokens(text, tokenizer))
    else:
        end = getattr(tokenizer, "eos_token_id", None)
        ends = () if end is None else (end,)
        tokens = [token for document in text for token in (*_tokens(document, tokenizer), *ends)]
    return _windows(tokens, length, count, batch_size)


@checked_call
def chat_windows(
    conversations: Iterable[Sequence[Mapping[str, Any]]],
    tokenizer: Any,
    *,
    length: PositiveInt = 512,
    count: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
) -> list[dict[str, Tensor]]:
    """Return windows of conversations in the tokenizer's chat template, packed as `text_windows` packs documents.

    What a model reads in use is not plain text: its template puts roles and special tokens around every message.

    Args:
        conversations: lists of messages, `{"role": "user", "content": "..."}`, as the template takes them.
        tokenizer: of transformers, with a chat template.
        length: tokens of a window.
        count: windows, spread evenly over all; default: all.
        batch_size: windows of a batch.

    Returns:
        Batches `{"input_ids": (batch_size, length)}` in int64; the last one may have fewer windows.

    Raises:
        CalibrationError: if the tokenizer has no chat template, the template refuses a conversation, or there are fewer
            tokens than one window.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            "the tokenizer has no chat template; set its chat_template, or pass the messages' texts to text_windows"
        )
    tokens: list[int] = []
    for index, conversation in enumerate(conversations):
        if isinstance(conversation, Mapping | str):
            raise CalibrationError(
                f"chat_windows takes a list of conversations, each a list of messages, and item {index} is a "
                f"{'message' if isinstance(conversation, Mapping) else 'string'}; put the messages into one more list"
            )
        try:
            made = tokenizer.apply_chat_template(list(conversation), tokenize=True, return_dict=True)
        except Exception as error:  # whatever a template raises
            raise CalibrationError(f"the chat template refuses conversation {index}: {error}") from error
        tokens += made["input_ids"]
    return _windows(tokens, length, count, batch_size)


def _windows(tokens: list[int], length: int, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
    if len(tokens) < length:
        raise CalibrationError(
            f"the text has {len(tokens)} tokens, and a window {length}; give more text, or windows of fewer tokens"
        )
    windows = torch.tensor(tokens, dtype=torch.int64).unfold(0, length, length)
    chosen = windows[torch.tensor(spread(range(len(windows)), count), dtype=torch.int64)]
    return [{"input_ids": batch} for batch in chosen.split(batch_size)]


@checked_call
def text_lines(
    lines: str | Iterable[str],
    tokenizer: Any,
    *,
    length: PositiveInt = 512,
    count: PositiveInt | None = None,
    batch_size: PositiveInt = 8,
) -> list[dict[str, Tensor]]:
    """Return a sample for each line, padded to the longest of its batch: what encoders of text are calibrated on.

    Args:
        lines: Texts, or one text that is split into its lines; empty ones are left out.
        tokenizer: of transformers.
        length: tokens that a line is cut to.
        count: lines, spread evenly over all; default: all.
        batch_size: lines of a batch.

    Returns:
        Batches with all that the tokenizer makes: `input_ids`, `attention_mask`, ..., `(batch_size, tokens)` each.

    Raises:
        CalibrationError: if there is no line, or the tokenizer cannot pad.
    """
    texts = spread([line for line in _split(lines) if line.strip()], count)
    if not texts:
        raise CalibrationError("the text has no line with words; give one sample a line")
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    try:
        return [dict(tokenizer(list(part), **options)) for part in in_batches(texts, batch_size)]
    except ValueError as error:
        raise CalibrationError(f"the tokenizer cannot make a batch of several lines: {error}") from error


def _split(lines: str | Iterable[str]) -> Iterable[str]:
    return lines.splitlines() if isinstance(lines, str) else lines


def _tokens(text: str, tokenizer: Any) -> Iterable[int]:
    # A tokenizer of transformers warns of texts longer than its model reads, which windows are not.
    quiet = {"verbose": False} if hasattr(tokenizer, "eos_token_id") else {}
    tokens: Iterable[int] = tokenizer(text, **quiet)["input_ids"]
    return tokens


__all__ = ["chat_windows", "text_lines", "text_windows"]
