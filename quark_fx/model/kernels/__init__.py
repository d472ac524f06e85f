"""A quantized graph in operators with kernels in torch: a table of rules (`lowering.py`), and their common parts."""
