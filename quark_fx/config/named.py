"""Registry of named configurations. `quark_fx.presets` registers the presets of the package."""

from __future__ import annotations

from quark_fx.config.quant_config import QuantConfig
from quark_fx.numbers.formats import LONG_NAMES
from quark_fx.system.options import checked_call
from quark_fx.system.registry import Registry

PRESETS: Registry[QuantConfig, QuantConfig] = Registry("preset")
"""Every preset by its name in lower case."""


@checked_call
def preset(name: str) -> QuantConfig:
    """Return the preset called `name`, in any case; `float16` and `bfloat16` are accepted, too.

    Raises:
        ConfigError: If the name is unknown; the message lists all names and the closest one.
    """
    value = PRESETS.get(LONG_NAMES.get(name.lower(), name.lower()))
    if value is None:
        raise PRESETS.unknown(name)
    return value


__all__ = ["PRESETS", "preset"]
