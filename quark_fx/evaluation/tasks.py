"""`evaluate` and its tasks, which compute the same metrics for every form of a model."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from quark_fx.engine.calibration_data import require_batches, require_no_nan
from quark_fx.errors import QuarkError
from quark_fx.evaluation.runs import Run, main_tensor, runner_of

IGNORED = -100
"""Label of tokens to ignore, as in torch and transformers."""

_LARGEST_LOSS = 700.0
"""Loss in nats above which the perplexity overflows a float."""

Task = Callable[[Run], dict[str, float]]
"""Function that runs batches through a model and returns a dictionary of metrics."""


def evaluate(model: Any, task: Task) -> dict[str, float]:
    """Return the metrics of a model.

    Args:
        model: Module in eval mode; result of `quantize` or `eager()`; path of an ONNX file, a GGUF file, a checkpoint,
            or a directory that `save` wrote; or a function that is called like the model.
        task: `LanguageModeling`, `Classification`, `Embedding`, or a function. The function receives a function that
            runs a batch, and returns a dictionary of metrics.

    Raises:
        QuarkError: If the model cannot be read or run, or its results do not fit the task.

    >>> from quark_fx.evaluation import Classification
    >>> evaluate(lambda x: x, Classification([(torch.eye(3), torch.tensor([0, 1, 1]))]))
    {'accuracy': 0.6666666666666666}
    """
    if not callable(task):
        raise QuarkError(
            f"a task must be LanguageModeling(batches), Classification(batches), or Embedding(batches), not {task!r}"
        )
    with torch.no_grad():
        return task(runner_of(model))


@dataclass(frozen=True)
class LanguageModeling:
    """Prediction of the next token.

    Metrics: `perplexity`, e to the power of the mean cross entropy over all tokens except the first of each row; and
    with a reference, `KL`, the mean Kullback-Leibler divergence from the reference's predictions, in nats per token.

    Args:
        batches: Batches `{"input_ids": (rows, tokens), ...}`, read again by each evaluation. Tokens with an
            `attention_mask` of 0 are skipped, both as predicted tokens and as context. If there are `labels`, of the
            same shape, they are predicted instead of `input_ids`; labels of -100 are ignored. Models get the labels
            only if they do not run without them.
        reference: Float model, in any form that `evaluate` accepts.
    """

    batches: Iterable[Mapping[str, Tensor]]
    reference: Any = None

    def __post_init__(self) -> None:
        require_batches(self.batches, "batches of LanguageModeling")

    def __call__(self, run: Run) -> dict[str, float]:
        reference = None if self.reference is None else runner_of(self.reference)
        loss, divergence, tokens = 0.0, 0.0, 0
        for batch in self.batches:
            _require_tokens(batch)
            output, expected = _run(run, batch), None if reference is None else _run(reference, batch)
            mask, labels = batch.get("attention_mask"), batch.get("labels", batch["input_ids"])
            for row, ids in enumerate(labels):  # row by row, because the logits of a vocabulary are large
                ones = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[row].bool()
                counts = ones[1:] & ones[:-1]  # the last position of left padding must not predict a token
                counts &= ids[1:] != IGNORED
                log_probs, tokens_of = _predictions(output, row, counts), ids[1:][counts]
                _require_vocabulary(tokens_of, log_probs.shape[-1])
                loss += float(F.nll_loss(log_probs, tokens_of, reduction="sum"))
                tokens += len(tokens_of)
                if expected is not None:
                    divergence += _divergence(log_probs, _predictions(expected, row, counts))
        _require(tokens, "tokens")
        mean = loss / tokens
        metrics = {"perplexity": math.exp(mean) if mean < _LARGEST_LOSS else math.inf}
        return metrics if reference is None else metrics | {"KL": divergence / tokens}


@dataclass(frozen=True)
class Classification:
    """Classification by the largest logit.

    Metrics: `accuracy`, from 0 to 1; and with a reference, `agreement`, the fraction of samples with the same largest
    logit, and `KL`, the mean divergence from the reference's probabilities, in nats.

    Args:
        batches: Pairs of inputs, in the form of calibration data, and labels, `(samples,)`; read again by each
            evaluation. Labels can also be per token, `(samples, tokens)`; labels of -100 are then ignored.
        reference: Float model, in any form that `evaluate` accepts.
    """

    batches: Iterable[tuple[Any, Tensor]]
    reference: Any = None

    def __post_init__(self) -> None:
        require_batches(self.batches, "batches of Classification")

    def __call__(self, run: Run) -> dict[str, float]:
        reference = None if self.reference is None else runner_of(self.reference)
        right, same, divergence, samples = 0, 0, 0.0, 0
        for batch in self.batches:
            inputs, labels = _labeled(batch)
            log_probs = _log_probs(main_tensor(run(inputs), "logits"))
            labels = labels.to(log_probs.device)
            _require_logits(log_probs, labels)
            counts = labels != IGNORED if labels.dim() > 1 else torch.ones_like(labels, dtype=torch.bool)
            log_probs, labels = log_probs[counts], labels[counts]
            _require_classes(labels, log_probs.shape[-1])
            right += int((log_probs.argmax(-1) == labels).sum())
            samples += labels.numel()
            if reference is not None:
                expected = _log_probs(main_tensor(reference(inputs), "logits"))
                _require_logits(expected, counts)
                expected = expected[counts]
                divergence += _divergence(log_probs, expected)
                same += int((log_probs.argmax(-1) == expected.argmax(-1)).sum())
        _require(samples, "samples")
        metrics = {"accuracy": right / samples}
        return metrics if reference is None else metrics | {"agreement": same / samples, "KL": divergence / samples}


@dataclass(frozen=True)
class Embedding:
    """Similarity of a model's embeddings to the embeddings of a reference.

    Metric: `cosine`, the mean cosine similarity. If the model returns one vector per token, vectors are averaged over
    the tokens with an `attention_mask` of 1; other results are one vector per sample. Rows that contain only padding
    are ignored.

    Args:
        batches: Batches in the form of calibration data, read again by each evaluation.
        reference: Float model, in any form that `evaluate` accepts.
    """

    batches: Iterable[Any]
    reference: Any

    def __post_init__(self) -> None:
        require_batches(self.batches, "batches of Embedding")

    def __call__(self, run: Run) -> dict[str, float]:
        reference = runner_of(self.reference)
        cosines = [
            F.cosine_similarity(_vectors(run(batch), batch), _vectors(reference(batch), batch), dim=-1)
            for batch in map(_with_numbers, self.batches)
        ]
        _require(sum(map(len, cosines)), "samples")
        return {"cosine": float(torch.cat(cosines).double().mean())}


def _log_probs(logits: Tensor) -> Tensor:
    """Return the log probabilities of logits, float32; raise an error for NaN."""
    return _numbers(logits).log_softmax(-1)


def _predictions(output: Any, row: int, counts: Tensor) -> Tensor:
    """Return the log probabilities that predict a row's tokens, from the second token on.

    Args:
        output: Result of the model.
        row: Index of the row in the batch.
        counts: Mask of the predicted tokens, shape (tokens - 1,).

    Returns:
        Log probabilities, shape (masked tokens, vocabulary).
    """
    logits, tokens = main_tensor(output, "logits"), len(counts) + 1
    if logits.dim() != 3 or logits.shape[1] != tokens:
        raise QuarkError(
            f"the model returns logits of shape {tuple(logits.shape)} for rows of {tokens} tokens; language modeling "
            "needs the shape (rows, tokens, vocabulary)"
        )
    return _log_probs(logits[row, :-1][counts])


def divergence_of(predicted: Tensor, expected: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of predictions from a reference, in nats, summed over rows.

    Args:
        predicted: Log probabilities, any shape; classes are along the last dimension.
        expected: Log probabilities of the reference; a class with probability 0 adds nothing.
    """
    terms = expected.exp() * (expected - predicted)
    return torch.where(expected == -math.inf, 0.0, terms).sum()


def _divergence(predicted: Tensor, expected: Tensor) -> float:
    """Return the divergence of predictions; raise an error if the reference has a different number of classes."""
    if predicted.shape[-1] != expected.shape[-1]:
        raise QuarkError(
            f"the model predicts {predicted.shape[-1]} classes, but the reference predicts {expected.shape[-1]}; "
            "compare models with the same classes or vocabulary"
        )
    return float(divergence_of(predicted, expected))


def _run(run: Run, batch: Mapping[str, Tensor]) -> Any:
    """Run a model on a batch of tokens; the model gets the labels only if it does not run without them."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    try:
        return run(inputs)
    except QuarkError as error:
        if len(inputs) < len(batch):
            with suppress(QuarkError):  # if the model fails with labels, too, the first error is more useful
                return run(batch)
        error.add_note(
            f"The largest token id of the batch is {int(batch['input_ids'].max())}; the model's vocabulary may be "
            "smaller: tokenize with the model's own tokenizer."
        )
        raise


def _numbers(output: Tensor) -> Tensor:
    """Convert a model's result to float32; raise an error for NaN."""
    if bool(output.isnan().any()):
        raise QuarkError("the model returns NaN; check its inputs and its weights")
    return output.float()


def _labeled(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and the labels, int64, of a batch; raise an error if they cannot be used."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise QuarkError(
            "Classification takes pairs of inputs and labels, such as [(images, labels), ...]; this "
            f"batch is of type {type(batch).__name__}"
        )
    try:
        labels = batch[1] if isinstance(batch[1], Tensor) else torch.from_numpy(np.asarray(batch[1]))
    except (TypeError, ValueError, RuntimeError):
        raise QuarkError(
            f"labels must be class numbers, not {reprlib.repr(batch[1])}; map class names to the numbers that the "
            "model was trained with (label2id of its config, or class_to_idx of labeled_images)"
        ) from None
    if not torch.equal(labels, labels.trunc() if labels.is_floating_point() else labels):
        raise QuarkError(
            f"labels must be class numbers, but these are not integers ({labels.dtype}, {tuple(labels.shape)}); if "
            "they are probabilities, pass labels.argmax(-1)"
        )
    return _with_numbers(batch)[0], labels.long()


def _require_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise `QuarkError` unless each label has a row of several logits."""
    if logits.shape[-1:] == (1,) or (logits.dim() == 1 and logits.shape == labels.shape):
        raise QuarkError(
            f"the model returns one logit per sample, {tuple(logits.shape)}, but a classifier needs several; for a "
            "binary classifier, wrap it to return two: torch.stack((torch.zeros_like(y), y), -1), where y = "
            "logits.flatten()"
        )
    if logits.shape == labels.shape:
        raise QuarkError(
            f"labels have the shape of the logits, {tuple(labels.shape)}, as one-hot labels do; pass labels.argmax(-1)"
        )
    if logits.shape[:-1] != labels.shape:
        raise QuarkError(
            f"the model returns logits of shape {tuple(logits.shape)} for labels of shape {tuple(labels.shape)}; a "
            "classifier must return one row of logits for each label"
        )


def _with_numbers(batch: Any) -> Any:
    """Return the batch; raise an error if it contains NaN, which a quantizer would turn into a number."""
    require_no_nan(pytree.tree_leaves(batch), (), "an evaluation batch")
    return batch


def _require_classes(labels: Tensor, classes: int) -> None:
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise QuarkError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, but the model has {classes} classes, counted "
            "from 0; pass the class numbers that the model was trained with"
        )


def _vectors(output: Any, batch: Any) -> Tensor:
    """Return one vector per sample, float32, shape (samples, features)."""
    value = main_tensor(output, "sentence_embedding", "last_hidden_state").float()
    if value.dim() < 2:
        raise QuarkError(
            f"the model returns a tensor of shape {tuple(value.shape)}, not one vector per sample; use another task"
        )
    if value.dim() != 3:
        return _numbers(value).flatten(1)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    weight = value.new_ones(value.shape[:2]) if mask is None else mask.to(value)
    filled = weight.sum(1) > 0
    value, weight = value[filled], weight[filled]
    value = _numbers(torch.where(weight[..., None] == 0, 0.0, value))  # ignore NaN where the mask is 0
    return (value * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)


def _require_vocabulary(tokens: Tensor, size: int) -> None:
    if not len(tokens):
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= size:
        raise QuarkError(
            f"the tokens or labels contain token {most if most >= size else least}, but the model predicts {size} "
            f"tokens; tokenize with the model's own tokenizer, and use {IGNORED} for labels to ignore"
        )


def _require_tokens(batch: Any) -> None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        raise QuarkError("language modeling takes batches {'input_ids': (rows, tokens)} of integers")
    labels = batch.get("labels", ids)
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else ()
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != ids.shape:
        raise QuarkError(
            f"the labels are {type(labels).__name__} {shape}, but the tokens have shape {tuple(ids.shape)}; pass one "
            f"label per token, as in transformers, and {IGNORED} for tokens to ignore"
        )


def _require(count: int, what: str) -> None:
    if not count:
        raise QuarkError(
            f"the task received no {what} to score; pass batches that can be read again, such as a list, with labels "
            f"other than {IGNORED} and an attention mask of 1"
        )


__all__ = ["Classification", "Embedding", "LanguageModeling", "Task", "divergence_of", "evaluate"]
