"""Evaluation of a model in any form: float, quantized, stored, a checkpoint, or an exported file."""

from quark_fx.evaluation.comparison import Distance, compare
from quark_fx.evaluation.runs import runner_of
from quark_fx.evaluation.tasks import Classification, Embedding, LanguageModeling, evaluate

__all__ = ["Classification", "Distance", "Embedding", "LanguageModeling", "compare", "evaluate", "runner_of"]
