"""Utilities for all other packages: checked options, registries, locks, memory, devices, and untrusted files."""
