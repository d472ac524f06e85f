"""Capture of a PyTorch model as one normalized ATen graph."""
