"""`quark-fx presets`, which lists the presets."""

from __future__ import annotations

from quark_fx.command_line.options import Json
from quark_fx.command_line.printing import show
from quark_fx.config.selection import Selective
from quark_fx.plan.table import tuples
from quark_fx.presets import PRESETS
from quark_fx.quantization import needs_data


def presets(json: Json = False) -> None:
    """List the presets with their number formats, their passes, and the operators that stay in float."""
    header = ("preset", "weights", "activations", "passes", "stays in float", "data", "target")
    rows = [
        (
            name,
            str(config.weight or "float"),
            str(config.input or "float"),
            ", ".join(type(p).__name__ for p in config.passes if isinstance(p, Selective)),
            ", ".join(config.exclude),
            "calibration set" if needs_data(config) else "one batch",
            str(config.target),
        )
        for name, config in PRESETS.items()
    ]
    data = [
        {"preset": name, "needs_data": needs_data(config), "config": config.to_dict()}
        for name, config in PRESETS.items()
    ]
    show(json, data, tuples("Presets", header, rows))
