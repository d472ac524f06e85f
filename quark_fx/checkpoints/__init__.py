"""Checkpoints: readers of weight files, tensors that stay on disk, and models larger than memory."""
