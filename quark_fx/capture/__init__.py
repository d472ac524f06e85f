"""A PyTorch model becomes one normalized ATen graph."""
