"""`inspect`: the contents of any model file; start with `inspect.py`."""
