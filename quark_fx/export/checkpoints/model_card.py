"""Model card of a checkpoint, with the recipe, the calibration data, and the measured errors."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from quark_fx.config.quant_config import QuantConfig
from quark_fx.errors import ConfigError
from quark_fx.model.quantized_model import QuantizedModel

CARD = "README.md"
"""Name of the file that model hubs show as the model card."""

_TAG = "quark_fx"


def model_card(qmodel: QuantizedModel, base: str, form: str) -> str:
    """Return a model card in Markdown, with metadata for model hubs.

    Args:
        qmodel: Quantized model.
        base: Name of the float model on the hub, or its folder; the card does not mention a folder.
        form: Name of the checkpoint format.

    Source:
        https://huggingface.co/docs/hub/model-cards
    """
    report = qmodel.report()
    about, totals = report.about, report.totals
    passes = [replace(record, seconds=math.nan).summary for record in report.passes if record.changes]
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None and not Path(base).exists()
    metadata = {"library_name": "transformers", "tags": [_TAG, form]}
    metadata |= {"base_model": base, "base_model_relation": "quantized"} if of_hub else {}
    title = base if of_hub else about.get("model", "Model")
    sizes = [f"{totals[f'bytes_{when}'] / 2**20:,.1f} MiB" for when in ("before", "after")]
    noise = [row.sqnr for row in report if row.sqnr is not None and math.isfinite(row.sqnr)]
    lines = [
        *("---", yaml.safe_dump(metadata, sort_keys=False).rstrip(), "---"),
        f"# {title}, quantized",
        "",
        f"Quantized by quark_fx {sys.modules['quark_fx'].__version__} and stored as {form}: {totals['quantized']} of "
        f"{totals['operators']} weighted operators, weights {sizes[0]} → {sizes[1]}.",
        *([f"The source was {about['source']}."] if "source" in about else []),
        *("", "## Recipe", "", f"Configuration: {about['configuration']}.", ""),
        *("```yaml", _recipe(qmodel.config), "```"),
        *("", "## Data", "", f"{about.get('data') or 'None: this recipe reads no data'}."),
        *("", "## Measured error", ""),
        f"Signal-to-noise ratio of the weights: {min(noise):.1f} dB or more." if noise else "No weight was rounded.",
        *([""] * bool(passes)),
        *(f"- {summary}" for summary in passes),
        *("", "## Operators", "", "```", *report.operators().lines(), "```", ""),
    ]
    return "\n".join(lines)


def _recipe(config: QuantConfig) -> str:
    try:
        return config.to_yaml().rstrip()
    except ConfigError as error:  # an option of a pass is not plain data
        return f"# {error}"


def is_own(card: Path) -> bool:
    """Tell whether `model_card` wrote the file `card`."""
    try:
        head = card.read_text(encoding="utf-8").split("---")[1]
        return _TAG in (yaml.safe_load(head) or {}).get("tags", ())
    except (OSError, ValueError, IndexError, AttributeError, TypeError, yaml.YAMLError):
        return False


__all__ = ["CARD", "is_own", "model_card"]
