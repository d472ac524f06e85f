"""What a model is judged by: figures by name, the same for every form of it."""

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

from quark_fx.engine.calibration_data import require_no_nan
from quark_fx.errors import QuarkError
from quark_fx.evaluation.runs import Run, main_tensor, run_of

IGNORED = -100
"""Label of tokens that do not count, in torch and in transformers."""

_LARGEST_LOSS = 700.0
"""Nats, above which a perplexity is no float."""

Task = Callable[[Run], dict[str, float]]
"""Runs batches of its own and returns figures by name."""


def evaluate(model: Any, task: Task) -> dict[str, float]:
    """Return the figures of a model.

    Args:
        model: a module in eval mode, what `quantize` or `eager()` returned, the path of an ONNX or GGUF file, of a
            directory that `save` wrote or of a checkpoint, or any function that is called like the model.
        task: `LanguageModeling`, `Classification` or `Embedding`, or a function of your own: it gets what runs a batch
            and returns figures by name.

    Raises:
        QuarkError: if the model cannot be read or run, or returns nothing that the task can judge.

    >>> from quark_fx.evaluation import Classification
    >>> evaluate(lambda x: x, Classification([(torch.eye(3), torch.tensor([0, 1, 1]))]))
    {'accuracy': 0.6666666666666666}
    """
    if not callable(task):
        raise QuarkError(f"a task is LanguageModeling, Classification or Embedding of some batches, not {task!r}")
    with torch.no_grad():
        return task(run_of(model))


@dataclass(frozen=True)
class LanguageModeling:
    """How well the next token is predicted.

    Figures: `perplexity`, e to the power of the mean cross entropy of the tokens after the first of each row, and, with
    a reference, `KL`, the mean Kullback-Leibler divergence of the predictions from the reference's, in nats per token.

    Args:
        batches: `{"input_ids": (rows, tokens), ...}`, read again by each evaluation; where an `attention_mask` is 0,
            tokens are skipped: none of them is predicted, and nothing is predicted from one. `labels` of the same shape
            are predicted instead of `input_ids`; those of -100 do not count. Models that take no labels get none.
        reference: the float model, in any form that `evaluate` takes.
    """

    batches: Iterable[Mapping[str, Tensor]]
    reference: Any = None

    def __call__(self, run: Run) -> dict[str, float]:
        reference = None if self.reference is None else run_of(self.reference)
        loss, divergence, tokens = 0.0, 0.0, 0
        for batch in self.batches:
            _require_tokens(batch)
            found, expected = _run(run, batch), None if reference is None else _run(reference, batch)
            mask, labels = batch.get("attention_mask"), batch.get("labels", batch["input_ids"])
            for row, ids in enumerate(labels):  # one by one, as the logits of a vocabulary are large
                ones = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[row].bool()
                kept = ones[1:] & ones[:-1]  # with padding on the left, its last position would predict the first token
                kept &= ids[1:] != IGNORED
                log_probs, tokens_of = _predictions(found, row, kept), ids[1:][kept]
                _require_vocabulary(tokens_of, log_probs.shape[-1])
                loss += float(F.nll_loss(log_probs, tokens_of, reduction="sum"))
                tokens += len(tokens_of)
                if expected is not None:
                    divergence += _divergence(log_probs, _predictions(expected, row, kept))
        _require(tokens, "tokens")
        mean = loss / tokens
        figures = {"perplexity": math.exp(mean) if mean < _LARGEST_LOSS else math.inf}
        return figures if reference is None else figures | {"KL": divergence / tokens}


@dataclass(frozen=True)
class Classification:
    """How often the largest logit is that of the right class.

    Figures: `accuracy`, from 0 to 1, and, with a reference, `agreement`, how often both have the same largest logit,
    and `KL`, the mean divergence of the classes' probabilities from the reference's, in nats.

    Args:
        batches: pairs of inputs, as calibration data has them, and labels, `(samples,)`; read by each evaluation. With
            a label for each token, `(samples, tokens)`, those of -100 do not count.
        reference: the float model, in any form that `evaluate` takes.
    """

    batches: Iterable[tuple[Any, Tensor]]
    reference: Any = None

    def __call__(self, run: Run) -> dict[str, float]:
        reference = None if self.reference is None else run_of(self.reference)
        right, same, divergence, samples = 0, 0, 0.0, 0
        for batch in self.batches:
            inputs, labels = _labeled(batch)
            found = _log_probs(main_tensor(run(inputs), "logits"))
            labels = labels.to(found.device)
            _require_logits(found, labels)
            kept = labels != IGNORED if labels.dim() > 1 else torch.ones_like(labels, dtype=torch.bool)
            found, labels = found[kept], labels[kept]
            _require_classes(labels, found.shape[-1])
            right += int((found.argmax(-1) == labels).sum())
            samples += labels.numel()
            if reference is not None:
                expected = _log_probs(main_tensor(reference(inputs), "logits"))
                _require_logits(expected, kept)
                expected = expected[kept]
                divergence += _divergence(found, expected)
                same += int((found.argmax(-1) == expected.argmax(-1)).sum())
        _require(samples, "samples")
        figures = {"accuracy": right / samples}
        return figures if reference is None else figures | {"agreement": same / samples, "KL": divergence / samples}


@dataclass(frozen=True)
class Embedding:
    """How near the vectors that a model makes of its inputs are to the reference's.

    Figures: `cosine`, their mean cosine similarity. What a model makes of each token is averaged, without those whose
    `attention_mask` is 0; any other result is one vector for each sample. Rows of padding alone do not count.

    Args:
        batches: as calibration data, read by each evaluation.
        reference: the float model, in any form that `evaluate` takes.
    """

    batches: Iterable[Any]
    reference: Any

    def __call__(self, run: Run) -> dict[str, float]:
        reference = run_of(self.reference)
        cosines = [
            F.cosine_similarity(_vectors(run(batch), batch), _vectors(reference(batch), batch), dim=-1)
            for batch in map(_with_numbers, self.batches)
        ]
        _require(sum(map(len, cosines)), "samples")
        return {"cosine": float(torch.cat(cosines).double().mean())}


def _log_probs(logits: Tensor) -> Tensor:
    """Return the logarithms of the probabilities that logits stand for."""
    return _numbers(logits).log_softmax(-1)


def _predictions(output: Any, row: int, kept: Tensor) -> Tensor:
    """Return the logarithms of the probabilities of a row's tokens but the first, each from those before it.

    Args:
        output: of the model.
        row: of the batch.
        kept: which of these tokens count, (tokens - 1,).
    """
    logits, tokens = main_tensor(output, "logits"), len(kept) + 1
    if logits.dim() != 3 or logits.shape[1] != tokens:
        raise QuarkError(
            f"the model returns {tuple(logits.shape)} for {tokens} tokens in a row; language modeling takes logits "
            "(rows, tokens, vocabulary) for every token"
        )
    return _log_probs(logits[row, :-1][kept])


def divergence_of(found: Tensor, expected: Tensor) -> Tensor:
    """Return the sum over rows of the Kullback-Leibler divergence of predictions from what is expected, in nats.

    Args:
        found: logarithms of probabilities, any shape; the last dimension counts classes.
        expected: the same of the reference; a class that it excludes adds nothing.
    """
    terms = expected.exp() * (expected - found)
    return torch.where(expected == -math.inf, 0.0, terms).sum()


def _divergence(found: Tensor, expected: Tensor) -> float:
    """Return the divergence of predictions; refuse those of a reference that counts other classes."""
    if found.shape[-1] != expected.shape[-1]:
        raise QuarkError(
            f"the model predicts {found.shape[-1]} classes, and the reference {expected.shape[-1]}; compare models of "
            "the same classes, or of the same vocabulary"
        )
    return float(divergence_of(found, expected))


def _run(run: Run, batch: Mapping[str, Tensor]) -> Any:
    """Return what a model makes of tokens; it gets the labels only if it does not run without them."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    try:
        return run(inputs)
    except QuarkError as error:
        if len(inputs) < len(batch):
            with suppress(QuarkError):  # the first error says more of a model that does not run with them either
                return run(batch)
        error.add_note(
            f"The largest token id of the batch is {int(batch['input_ids'].max())}; the model may have fewer: "
            "tokenize with its own tokenizer."
        )
        raise


def _numbers(output: Tensor) -> Tensor:
    """Return what a model makes, in float32; refuse NaN."""
    if bool(output.isnan().any()):
        raise QuarkError("the model returns NaN; check what it reads, and its weights")
    return output.float()


def _labeled(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and the labels of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise QuarkError(
            "Classification takes pairs of inputs and labels, as [(images, labels), ...]; got one "
            f"{type(batch).__name__}"
        )
    try:
        labels = batch[1] if isinstance(batch[1], Tensor) else torch.from_numpy(np.asarray(batch[1]))
    except (TypeError, ValueError, RuntimeError):
        raise QuarkError(
            f"labels are numbers of classes, and these are {reprlib.repr(batch[1])}; map names to the numbers that the "
            "model was trained with (label2id of its config, or class_to_idx of labeled_images)"
        ) from None
    if not torch.equal(labels, labels.trunc() if labels.is_floating_point() else labels):
        raise QuarkError(
            f"labels are numbers of classes, and these are not whole ({labels.dtype}, {tuple(labels.shape)}); pass "
            "labels.argmax(-1) for probabilities"
        )
    return _with_numbers(batch)[0], labels.long()


def _require_logits(logits: Tensor, labels: Tensor) -> None:
    """Raise unless there is a row of several logits for each label."""
    if logits.shape[-1:] == (1,) or (logits.dim() == 1 and logits.shape == labels.shape):
        raise QuarkError(
            f"the model returns one logit per sample, {tuple(logits.shape)}, which a largest logit cannot be chosen "
            "from; for a binary classifier, wrap it to return two: torch.stack((torch.zeros_like(y), y), -1) of "
            "y = logits.flatten()"
        )
    if logits.shape == labels.shape:
        raise QuarkError(
            f"labels of shape {tuple(labels.shape)} are one-hot, one for each logit; pass labels.argmax(-1)"
        )
    if logits.shape[:-1] != labels.shape:
        raise QuarkError(
            f"the model returns {tuple(logits.shape)} for labels {tuple(labels.shape)}; a classifier returns "
            "one row of logits for each label"
        )


def _with_numbers(batch: Any) -> Any:
    """Return a batch; refuse NaN, which a quantizer turns into a number."""
    require_no_nan(pytree.tree_leaves(batch), (), "a batch that the model is judged by")
    return batch


def _require_classes(labels: Tensor, classes: int) -> None:
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise QuarkError(
            f"labels run from {int(labels.min())} to {int(labels.max())}, and the model has {classes} classes, counted "
            "from 0; give the numbers that it was trained with"
        )


def _vectors(output: Any, batch: Any) -> Tensor:
    """Return a vector for each sample."""
    value = main_tensor(output, "sentence_embedding", "last_hidden_state").float()
    if value.dim() < 2:
        raise QuarkError(f"the model returns {tuple(value.shape)}, no vector for each sample; judge it by another task")
    if value.dim() != 3:
        return _numbers(value).flatten(1)
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    weight = value.new_ones(value.shape[:2]) if mask is None else mask.to(value)
    filled = weight.sum(1) > 0
    value, weight = value[filled], weight[filled]
    value = _numbers(torch.where(weight[..., None] == 0, 0.0, value))  # NaN where the mask is 0 does not count
    return (value * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)


def _require_vocabulary(tokens: Tensor, size: int) -> None:
    if not len(tokens):
        return
    least, most = int(tokens.min()), int(tokens.max())
    if least < 0 or most >= size:
        raise QuarkError(
            f"the text has token {most if most >= size else least}, and the model predicts {size}; tokenize with the "
            f"model's own tokenizer, and use {IGNORED} for labels that do not count"
        )


def _require_tokens(batch: Any) -> None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        raise QuarkError("language modeling takes batches {'input_ids': (rows, tokens)} of whole numbers")
    labels = batch.get("labels", ids)
    shape = tuple(labels.shape) if isinstance(labels, Tensor) else ()
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != ids.shape:
        raise QuarkError(
            f"the labels are {type(labels).__name__} {shape} and the tokens {tuple(ids.shape)}; give one "
            f"label for each token, as transformers does, {IGNORED} for those that do not count"
        )


def _require(count: int, what: str) -> None:
    if not count:
        raise QuarkError(f"the task has no {what}; give batches that can be read again, as a list can")


__all__ = ["Classification", "Embedding", "LanguageModeling", "Task", "divergence_of", "evaluate"]
