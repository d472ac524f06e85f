"""Rooms of vendors: each registers its targets, passes, presets, formats of files, and runtimes when it is imported.

No other room imports or names them; `quark_fx` imports them last.
"""

from quark_fx.vendors import amd as amd
from quark_fx.vendors import executorch as executorch
from quark_fx.vendors import intel as intel
from quark_fx.vendors import nvidia as nvidia
