"""Configurations by name. `quark_fx.presets` enters those of the package."""

from __future__ import annotations

import difflib

from quark_fx.config.quant_config import QuantConfig
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import LONG_NAMES
from quark_fx.system.options import checked_call

PRESETS: dict[str, QuantConfig] = {}
"""Every preset by its name in lower case."""


@checked_call
def preset(name: str) -> QuantConfig:
    """Return the preset called `name`, in any case; `float16` and `bfloat16` are names, too.

    Raises:
        ConfigError: if there is none; the message lists the nearest and all names.
    """
    found = PRESETS.get(LONG_NAMES.get(name.lower(), name.lower()))
    if found is None:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"unknown preset {name!r}{hint} Presets: {', '.join(PRESETS)}")
    return found


__all__ = ["PRESETS", "preset"]
