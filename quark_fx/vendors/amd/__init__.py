"""AMD's DPU and Vitis AI: the target `dpu`, its passes and preset (`docs/dpu.md`), and the ONNX format `vitis`."""

from quark_fx.vendors.amd import formats as formats
from quark_fx.vendors.amd import presets as presets
