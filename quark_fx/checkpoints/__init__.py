"""Checkpoints: files of weights, tensors that stay on disk, and models larger than memory."""
