"""Lowering of a quantized graph to torch's kernels: a table of rules (`lowering.py`), and their common parts."""
