"""`inspect`: the contents of any file; start with `inspect.py`."""
