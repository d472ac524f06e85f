"""Vendor support, one package per vendor: on import, each registers targets, passes, presets, formats, and runtimes.

No other package imports or names a vendor; `quark_fx` imports this package last.
"""

from quark_fx.vendors import amd as amd
from quark_fx.vendors import executorch as executorch
from quark_fx.vendors import intel as intel
from quark_fx.vendors import nvidia as nvidia
