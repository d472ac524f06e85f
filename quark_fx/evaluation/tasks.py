"""What a model is judged by: figures by name, the same for every form of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from quark_fx.engine.context import require_no_nan
from quark_fx.errors import QuarkError
from quark_fx.evaluation.runs import Run, main_tensor, run_of

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
            tokens are skipped: none of them is predicted, and nothing is predicted from one.
        reference: the float model, in any form that `evaluate` takes.
    """

    batches: Iterable[Mapping[str, Tensor]]
    reference: Any = None

    def __call__(self, run: Run) -> dict[str, float]:
        reference = None if self.reference is None else run_of(self.reference)
        loss, divergence, tokens = 0.0, 0.0, 0
        for batch in self.batches:
            _require_tokens(batch)
            found, expected = run(batch), None if reference is None else reference(batch)
            mask = batch.get("attention_mask")
            for row, ids in enumerate(batch["input_ids"]):  # one by one, as the logits of a vocabulary are large
                ones = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[row].bool()
                kept = ones[1:] & ones[:-1]  # with padding on the left, its last position would predict the first token
                log_probs, tokens_of = _predictions(found, row, kept), ids[1:][kept]
                if len(tokens_of) and int(tokens_of.max()) >= log_probs.shape[-1]:
                    raise QuarkError(
                        f"the text has token {int(tokens_of.max())}, and the model predicts {log_probs.shape[-1]}; "
                        "tokenize with the model's own tokenizer"
                    )
                loss += float(F.nll_loss(log_probs, tokens_of, reduction="sum"))
                tokens += len(tokens_of)
                if expected is not None:
                    divergence += float(divergence_of(log_probs, _predictions(expected, row, kept)))
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
        batches: pairs of inputs, as calibration data has them, and labels, `(samples,)`; read by each evaluation.
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
            if found.shape[:-1] != labels.shape:
                raise QuarkError(
                    f"the model returns {tuple(found.shape)} for labels {tuple(labels.shape)}; a classifier returns "
                    "one row of logits for each label"
                )
            _require_classes(labels, found.shape[-1])
            right += int((found.argmax(-1) == labels).sum())
            samples += labels.numel()
            if reference is not None:
                expected = _log_probs(main_tensor(reference(inputs), "logits"))
                same += int((found.argmax(-1) == expected.argmax(-1)).sum())
                divergence += float(divergence_of(found, expected))
        _require(samples, "samples")
        figures = {"accuracy": right / samples}
        return figures if reference is None else figures | {"agreement": same / samples, "KL": divergence / samples}


@dataclass(frozen=True)
class Embedding:
    """How near the vectors that a model makes of its inputs are to the reference's.

    Figures: `cosine`, their mean cosine similarity. What a model makes of each token is averaged, without those whose
    `attention_mask` is 0; any other result is one vector for each sample.

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


def _numbers(output: Tensor) -> Tensor:
    """Return what a model makes, in float32; refuse NaN."""
    if bool(output.isnan().any()):
        raise QuarkError("the model returns NaN; check what it reads, and its weights")
    return output.float()


def _labeled(batch: Any) -> tuple[Any, Tensor]:
    """Return the inputs and the labels of a batch."""
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        raise QuarkError(
            "Classification takes pairs of inputs and labels, as [(images, labels), ...]; got one "
            f"{type(batch).__name__}"
        )
    return _with_numbers(batch)[0], batch[1]


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
    value = _numbers(torch.where(weight[..., None] == 0, 0.0, value))  # NaN where the mask is 0 does not count
    return (value * weight[..., None]).sum(1) / weight.sum(1, keepdim=True)


def _require_tokens(batch: Any) -> None:
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dim() != 2:
        raise QuarkError("language modeling takes batches {'input_ids': (rows, tokens)} of whole numbers")


def _require(count: int, what: str) -> None:
    if not count:
        raise QuarkError(f"the task has no {what}; give batches that can be read again, as a list can")


__all__ = ["Classification", "Embedding", "LanguageModeling", "Task", "divergence_of", "evaluate"]
