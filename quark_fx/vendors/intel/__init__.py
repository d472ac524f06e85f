"""Intel's OpenVINO: the target `openvino`, its runner, and workarounds for its defects."""

from quark_fx.vendors.intel import openvino as openvino
from quark_fx.vendors.intel import runner as runner
