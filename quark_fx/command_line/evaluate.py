"""`quark-fx evaluate`, which measures the quality of a model in any form."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import torch
import typer
from torch.utils import _pytree as pytree

import quark_fx as qfx
from quark_fx.command_line.options import AnyModel, Json, Reading, shares_options
from quark_fx.command_line.printing import show
from quark_fx.command_line.reading import has_labels, is_text, read_batches, read_labeled
from quark_fx.command_line.subjects import Subject, subject
from quark_fx.errors import CalibrationError
from quark_fx.evaluation import Classification, Embedding, LanguageModeling
from quark_fx.plan.table import Column, Table


class Task(StrEnum):
    """The task on which a model is evaluated."""

    LANGUAGE_MODELING = "language-modeling"
    CLASSIFICATION = "classification"
    EMBEDDING = "embedding"


@shares_options
def evaluate(
    model: AnyModel,
    reading: Reading,
    task: Annotated[
        Task | None,
        typer.Option(help="Default: depends on the data (windows of text, samples with labels, or anything else)."),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(help="The float model, in any form: for KL, agreement and cosine.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure perplexity, accuracy, or cosine of float, quantized, and exported models."""
    original = None if reference is None else subject(reference)
    model_subject = subject(model).completed_by(original)
    task = task or _task(reading, model_subject)
    evaluation = _evaluation(task, reading, model_subject, None if original is None else original.model)
    metrics, samples = qfx.evaluate(model_subject.model, evaluation), sum(map(_samples, evaluation.batches))
    columns: list[Column[tuple[str, float]]] = [
        Column(str(task), lambda row: row[0]),
        Column(model, lambda row: row[1], ".6g"),
    ]
    rows = [*metrics.items(), ("samples", samples)]
    document = {"model": model, "task": str(task), "figures": metrics, "samples": samples}
    show(json, document, Table("Metrics", columns, rows))


def _samples(batch: Any) -> int:
    """Return the number of samples in a batch."""
    tensors = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim())
    return len(next(tensors, ()))


def _task(reading: Reading, model_subject: Subject) -> Task:
    if is_text(reading):
        lines = model_subject.reads_lines if reading.lines is None else reading.lines
        return Task.EMBEDDING if lines else Task.LANGUAGE_MODELING
    return Task.CLASSIFICATION if has_labels(reading) else Task.EMBEDDING


def _evaluation(task: Task, reading: Reading, model_subject: Subject, reference: Any) -> Any:
    if task is Task.CLASSIFICATION:
        return Classification(read_labeled(reading, model_subject), reference)
    batches = read_batches(reading, model_subject)
    if task is Task.LANGUAGE_MODELING:
        named = [b if isinstance(b, dict) else {"input_ids": b} for b in batches]
        return LanguageModeling(named, reference)
    if reference is None:
        raise CalibrationError(
            "the cosine metric compares vectors with those of the float model: pass the float model as --reference"
        )
    return Embedding(batches, reference)
