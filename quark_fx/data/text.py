"""Batches of tokens from text and conversations: packed windows, or one line per sample."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Split a text's tokens into windows without padding or overlap, to calibrate language models.

    Args:
        text: One text, or several documents; the tokenizer's end-of-text token is added after each document.
        tokenizer: Tokenizer of transformers, or a function from a text to a mapping with `input_ids`.
        length: Tokens per window.
        count: Number of windows, spread evenly over the text. Default: all.
        batch_size: Windows per batch.

    Returns:
        Batches `{"input_ids": (batch_size, length)}` in int64; the last batch may have fewer windows.

    Raises:
        CalibrationError: If the text has fewer tokens than one window.
    """
    if isinstance(text, str):
        tokens = list(_tokens(text, tokenizer))
    else:
        end = getattr(tokenizer, "eos_token_id", None)
        ends = () if end is None else (end,)
        tokens = [token for document in _texts(text) for token in (*_tokens(document, tokenizer), *ends)]
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
    """Format conversations with the tokenizer's chat template, and split their tokens into windows.

    Chat models do not read plain text: the template puts roles and special tokens around every message. Conversations
    are packed like documents in `text_windows`.

    Args:
        conversations: Lists of messages, `{"role": "user", "content": "..."}`, in the form that the template expects.
        tokenizer: Tokenizer of transformers with a chat template.
        length: Tokens per window.
        count: Number of windows, spread evenly over all windows. Default: all.
        batch_size: Windows per batch.

    Returns:
        Batches `{"input_ids": (batch_size, length)}` in int64; the last batch may have fewer windows.

    Raises:
        CalibrationError: If the tokenizer lacks a chat template, the template refuses a conversation, or the
            conversations have fewer tokens than one window.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise CalibrationError(
            "the tokenizer lacks a chat template; set its chat_template, or pass the text of the messages to "
            "text_windows"
        )
    tokens: list[int] = []
    for index, conversation in enumerate(conversations):
        if isinstance(conversation, Mapping | str):
            raise CalibrationError(
                f"chat_windows takes a list of conversations, each of them a list of messages, but item {index} is a "
                f"{'message' if isinstance(conversation, Mapping) else 'string'}; wrap the messages of each "
                "conversation in a list"
            )
        try:
            encoding = tokenizer.apply_chat_template(list(conversation), tokenize=True, return_dict=True)
        except Exception as error:  # a template can raise any error
            raise CalibrationError(f"the chat template rejects conversation {index}: {error}") from error
        tokens += encoding["input_ids"]
    return _windows(tokens, length, count, batch_size)


def _windows(tokens: list[int], length: int, count: int | None, batch_size: int) -> list[dict[str, Tensor]]:
    if len(tokens) < length:
        raise CalibrationError(
            f"the text has {len(tokens)} tokens, fewer than a window of {length}; pass more text, or a shorter length"
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
    """Tokenize one sample per line, padded to the longest sample of its batch, to calibrate text encoders.

    Args:
        lines: Texts, or one text that is split into lines; empty lines are skipped.
        tokenizer: Tokenizer of transformers.
        length: Maximum number of tokens; longer lines are truncated.
        count: Number of lines, spread evenly over all lines. Default: all.
        batch_size: Lines per batch.

    Returns:
        Batches with all results of the tokenizer, such as `input_ids` and `attention_mask`, each `(batch_size,
        tokens)`.

    Raises:
        CalibrationError: If all lines are empty, or the tokenizer cannot pad.
    """
    texts = spread([line for line in _split(lines) if line.strip()], count)
    if not texts:
        raise CalibrationError("all lines of the text are empty; write one sample per line")
    options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": length, "return_tensors": "pt"}
    try:
        return [dict(tokenizer(list(part), **options)) for part in in_batches(texts, batch_size)]
    except ValueError as error:
        raise CalibrationError(f"the tokenizer cannot make a batch of several lines: {error}") from error


def _split(lines: str | Iterable[str]) -> Iterable[str]:
    return lines.splitlines() if isinstance(lines, str) else _texts(lines)


def _texts(items: Iterable[Any]) -> Iterator[str]:
    """Yield the items; raise `CalibrationError` for an item that is not a string."""
    if isinstance(items, bytes | bytearray | Mapping):
        remedy = "pass its values" if isinstance(items, Mapping) else "decode it (text.decode('utf-8'))"
        raise CalibrationError(f"texts must be strings, not a {type(items).__name__}; {remedy}")
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise CalibrationError(
                f"texts must be strings, but item {index} is {reprlib.repr(item)}, a {type(item).__name__}; pass a "
                "list of strings, such as [row['text'] for row in rows] of a dataset, or qfx.data.read_text(path)"
            )
        yield item


def _tokens(text: str, tokenizer: Any) -> Iterable[int]:
    # Tokenizers of transformers warn about texts longer than the context of the model, but windows are shorter.
    quiet = {"verbose": False} if hasattr(tokenizer, "eos_token_id") else {}
    tokens: Iterable[int] = tokenizer(text, **quiet)["input_ids"]
    return tokens


__all__ = ["chat_windows", "text_lines", "text_windows"]
