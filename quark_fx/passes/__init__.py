"""Graph to graph, one file a pass."""

from quark_fx.passes.absorb_high_bias import AbsorbHighBias
from quark_fx.passes.adaquant import AdaQuant
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.autoround import AutoRound
from quark_fx.passes.awq import AWQ
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.passes.cross_layer_equalization import CrossLayerEqualization
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.passes.gptq import GPTQ
from quark_fx.passes.smooth_quant import SmoothQuant

__all__ = [
    "AWQ",
    "GPTQ",
    "AbsorbHighBias",
    "AdaQuant",
    "AdaRound",
    "AutoRound",
    "BiasCorrection",
    "CrossLayerEqualization",
    "SmoothQuant",
    "fold_batch_norm",
    "fold_constants",
]
