"""Trained models from packages that pip installs, one file each: `load()` returns the model and what judges it."""
