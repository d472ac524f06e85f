"""Measurements behind the figures in `docs/`; run each with `python -m benchmarks.<name>` from the repository root."""
