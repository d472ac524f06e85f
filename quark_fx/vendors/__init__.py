"""One package per vendor; each registers its targets, passes, presets, file formats, and runtimes on import.

No other package imports or names them; `quark_fx` imports them last.
"""

from quark_fx.vendors import amd as amd
from quark_fx.vendors import executorch as executorch
from quark_fx.vendors import intel as intel
from quark_fx.vendors import nvidia as nvidia
