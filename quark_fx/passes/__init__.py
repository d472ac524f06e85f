"""Graph to graph, one file a pass."""

from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants

__all__ = ["fold_batch_norm", "fold_constants"]
