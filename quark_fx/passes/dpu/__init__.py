"""Passes for DPUs, whose scales are powers of two."""
