"""Histograms and thresholds that reproduce the numbers of other tools, on grids that the first batch fixes.

Importing this package registers them as values of `grid` and `method` of observers, whose room does not import it.
"""

from quark_fx import observers
from quark_fx.parity import entropy as entropy
from quark_fx.parity.linear_histogram import SPANS, LinearHistogram

for _name, _value in (("SPANS", SPANS), ("LinearHistogram", LinearHistogram)):
    setattr(observers, _name, _value)  # their public names

__all__ = ["SPANS", "LinearHistogram"]
