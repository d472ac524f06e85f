"""A quantized graph in operators that torch has kernels for: a table of rules (`lowering.py`), and what they share."""
