"""Passes that rewrite a graph, one per file."""

from collections.abc import Callable
from typing import Any

from quark_fx.graph.pass_manager import PASSES
from quark_fx.passes.absorb_high_bias import AbsorbHighBias
from quark_fx.passes.adaquant import AdaQuant
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.autoround import AutoRound
from quark_fx.passes.awq import AWQ
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.passes.block_ap import BlockAP
from quark_fx.passes.calibrate import calibrate, insert_observers
from quark_fx.passes.convert import convert
from quark_fx.passes.cross_layer_equalization import CrossLayerEqualization
from quark_fx.passes.fit_scales import FitScales
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.passes.gptq import GPTQ
from quark_fx.passes.learn_rotations import LearnRotations
from quark_fx.passes.low_rank import LowRank
from quark_fx.passes.normalize_columns import NormalizeColumns
from quark_fx.passes.rotate import Rotate
from quark_fx.passes.smooth_quant import SmoothQuant
from quark_fx.passes.tune_scales import TuneScales


def __getattr__(name: str) -> Callable[..., Any]:
    """Return a pass that another module registers; for its exact type, import it from that module."""
    entry: Callable[..., Any] = PASSES.attribute(name)
    return entry


__all__ = [
    "AWQ",
    "GPTQ",
    "AbsorbHighBias",
    "AdaQuant",
    "AdaRound",
    "AutoRound",
    "BiasCorrection",
    "BlockAP",
    "CrossLayerEqualization",
    "FitScales",
    "LearnRotations",
    "LowRank",
    "NormalizeColumns",
    "Rotate",
    "SmoothQuant",
    "TuneScales",
    "calibrate",
    "convert",
    "fold_batch_norm",
    "fold_constants",
    "insert_observers",
]
