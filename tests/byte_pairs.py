"""A tokenizer of 320 byte pairs."""

from __future__ import annotations

import sentences
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast


def byte_pairs() -> PreTrainedTokenizerFast:
    """Return a tokenizer trained on the sentences of the tests."""
    pairs = Tokenizer(models.BPE())
    pairs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), ["<|endoftext|>"]
    pairs.train_from_iterator(
        sentences.CALIBRATION, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, special_tokens=special)
    )
    return PreTrainedTokenizerFast(tokenizer_object=pairs, eos_token=special[0], pad_token=special[0])
