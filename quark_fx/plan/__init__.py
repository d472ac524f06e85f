"""The plan: quantized values and weights with their parameters, and the report on them."""
