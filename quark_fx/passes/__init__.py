"""Graph to graph, one file a pass."""

from quark_fx.passes.fold_batch_norm import fold_batch_norm

__all__ = ["fold_batch_norm"]
