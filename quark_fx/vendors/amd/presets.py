"""The preset `xint8` for AMD's DPU."""

from __future__ import annotations

from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.numbers.formats import INT8
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.observers import PowerOfTwoMinMse
from quark_fx.passes import fold_batch_norm, fold_constants
from quark_fx.presets import PRESETS
from quark_fx.vendors.amd.dpu import DPU
from quark_fx.vendors.amd.passes import (
    AlignShifts,
    SplitLargePools,
    pool_means,
    slice_splits,
    spell_out_swish,
    use_dpu_averages,
    use_dpu_hard_sigmoids,
    use_dpu_slopes,
)

_POWER_OF_TWO = TensorSpec(format=INT8, scale=POWER_OF_TWO, observer=PowerOfTwoMinMse())

XINT8 = QuantConfig(
    weight=_POWER_OF_TWO,
    input=_POWER_OF_TWO,
    output=_POWER_OF_TWO,
    bias=_POWER_OF_TWO,
    passes=(
        fold_constants,
        fold_batch_norm,
        pool_means,
        SplitLargePools(),
        slice_splits,
        spell_out_swish,
        use_dpu_averages,
        use_dpu_slopes,
        use_dpu_hard_sigmoids,
        AlignShifts(),
    ),
    target=DPU,
)
"""Configuration with int8 per tensor for weights, activations, and biases. Scales are powers of two that minimize the
squared error, for accelerators that shift instead of multiply. The rules of AMD's DPU determine which values are
rounded and which share a scale (`docs/dpu.md`)."""

PRESETS.add(XINT8, "xint8")
