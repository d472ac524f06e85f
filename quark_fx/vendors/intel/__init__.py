"""Intel's OpenVINO: the target `openvino`, a runner, and workarounds for faults of the runtime."""

from quark_fx.vendors.intel import openvino as openvino
from quark_fx.vendors.intel import runner as runner
