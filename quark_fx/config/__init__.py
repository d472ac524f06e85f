"""Configurations: specs, patterns, and targets."""
