"""Graph-to-graph passes, one per file."""

from quark_fx.passes.absorb_high_bias import AbsorbHighBias
from quark_fx.passes.adaquant import AdaQuant
from quark_fx.passes.adaround import AdaRound
from quark_fx.passes.autoround import AutoRound
from quark_fx.passes.awq import AWQ
from quark_fx.passes.bias_correction import BiasCorrection
from quark_fx.passes.block_ap import BlockAP
from quark_fx.passes.calibrate import calibrate
from quark_fx.passes.convert import convert
from quark_fx.passes.cross_layer_equalization import CrossLayerEqualization
from quark_fx.passes.dpu.align_shifts import AlignShifts
from quark_fx.passes.dpu.average import use_dpu_averages
from quark_fx.passes.dpu.clip import use_dpu_clips
from quark_fx.passes.dpu.hard_sigmoid import use_dpu_hard_sigmoids
from quark_fx.passes.dpu.leaky_relu import use_dpu_slopes
from quark_fx.passes.dpu.softmax import use_dpu_softmax
from quark_fx.passes.fit_scales import FitScales
from quark_fx.passes.fold_batch_norm import fold_batch_norm
from quark_fx.passes.fold_constants import fold_constants
from quark_fx.passes.global_mean import pool_means
from quark_fx.passes.gptq import GPTQ
from quark_fx.passes.hard_sigmoid import harden_sigmoids
from quark_fx.passes.insert_observers import insert_observers
from quark_fx.passes.large_pool import SplitLargePools
from quark_fx.passes.learn_rotations import LearnRotations
from quark_fx.passes.low_rank import LowRank
from quark_fx.passes.normalize_columns import NormalizeColumns
from quark_fx.passes.rotate import Rotate
from quark_fx.passes.smooth_quant import SmoothQuant
from quark_fx.passes.split_to_slice import slice_splits
from quark_fx.passes.swish import spell_out_swish
from quark_fx.passes.tune_scales import TuneScales

__all__ = [
    "AWQ",
    "GPTQ",
    "AbsorbHighBias",
    "AdaQuant",
    "AdaRound",
    "AlignShifts",
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
    "SplitLargePools",
    "TuneScales",
    "calibrate",
    "convert",
    "fold_batch_norm",
    "fold_constants",
    "harden_sigmoids",
    "insert_observers",
    "pool_means",
    "slice_splits",
    "spell_out_swish",
    "use_dpu_averages",
    "use_dpu_clips",
    "use_dpu_hard_sigmoids",
    "use_dpu_slopes",
    "use_dpu_softmax",
]
