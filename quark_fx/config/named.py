"""Registry of named configurations. `quark_fx.presets` registers the built-in presets."""

from __future__ import annotations

from quark_fx.config.quant_config import QuantConfig
from quark_fx.numbers.formats import LONG_NAMES
from quark_fx.system.options import checked_call
from quark_fx.system.registry import Registry

PRESETS: Registry[QuantConfig, QuantConfig] = Registry("preset", spelled=str.lower)
"""Every preset by its lowercase name."""

SCHEMES: dict[str, QuantConfig] = {}
"""The 32 schemes of compressed-tensors by their lowercase names, such as `"w3a8"`; weights are rounded to nearest."""


@checked_call
def preset(name: str) -> QuantConfig:
    """Return the preset called `name`, ignoring case; `float16`, `bfloat16`, and the names of `SCHEMES` work, too.

    Raises:
        ConfigError: If the name is unknown; the message lists all names and the closest one.
    """
    name = LONG_NAMES.get(name.lower(), name.lower())
    value = PRESETS.get(name, SCHEMES.get(name))
    if value is None:
        raise PRESETS.unknown(name)
    return value


__all__ = ["PRESETS", "SCHEMES", "preset"]
