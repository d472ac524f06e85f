"""Which values and weights are quantized, with which parameters, and the report on them."""
