"""Quantize a checkpoint file to file: no model is built, and no code of the checkpoint runs."""
