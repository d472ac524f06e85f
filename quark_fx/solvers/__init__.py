"""Numerics that learn codes and scales from data: GPTQ error feedback, coordinate descent, gradient steps."""
