"""Histograms and thresholds that reproduce the numbers of other tools, on grids that the first batch fixes.

Importing this package registers the histograms and thresholds as values of the observers' options `grid` and `method`;
`quark_fx.observers` does not import it.
"""

from quark_fx import observers
from quark_fx.parity import entropy as entropy
from quark_fx.parity.linear_histogram import SPANS, LinearHistogram

for _name, _value in (("SPANS", SPANS), ("LinearHistogram", LinearHistogram)):
    setattr(observers, _name, _value)  # public names

__all__ = ["SPANS", "LinearHistogram"]
