"""Passes that prepare a graph for AMD's DPU, whose scales are powers of two."""

from quark_fx.vendors.amd.passes.align_shifts import AlignShifts
from quark_fx.vendors.amd.passes.average import use_dpu_averages
from quark_fx.vendors.amd.passes.clip import use_dpu_clips
from quark_fx.vendors.amd.passes.global_mean import pool_means
from quark_fx.vendors.amd.passes.hard_sigmoid import harden_sigmoids, use_dpu_hard_sigmoids
from quark_fx.vendors.amd.passes.large_pool import SplitLargePools
from quark_fx.vendors.amd.passes.leaky_relu import use_dpu_slopes
from quark_fx.vendors.amd.passes.softmax import use_dpu_softmax
from quark_fx.vendors.amd.passes.split_to_slice import slice_splits
from quark_fx.vendors.amd.passes.swish import spell_out_swish

__all__ = [
    "AlignShifts",
    "SplitLargePools",
    "harden_sigmoids",
    "pool_means",
    "slice_splits",
    "spell_out_swish",
    "use_dpu_averages",
    "use_dpu_clips",
    "use_dpu_hard_sigmoids",
    "use_dpu_slopes",
    "use_dpu_softmax",
]
