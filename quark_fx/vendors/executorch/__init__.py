"""ExecuTorch: the target `executorch`."""

from quark_fx.vendors.executorch import target as target
