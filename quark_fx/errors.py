"""The one family of errors: what happened, where, and what to do now."""

from __future__ import annotations


class QuarkError(Exception):
    """Base class of every error quark_fx raises about a model, its data or a target.

    A bad *argument* (an unknown preset, a contradictory option) is a `ValueError` as in any Python
    library; `ConfigError` is both, so either `except` clause finds it.
    """


class ConfigError(QuarkError, ValueError):
    """A configuration that contradicts itself or names something that does not exist."""


class CaptureError(QuarkError):
    """A model that could not be turned into one functional graph."""


class CalibrationError(QuarkError):
    """Calibration data that is empty, malformed or not finite."""


class PassError(QuarkError):
    """A pass that broke a promise: invalid graph, unmet condition, or a changed function."""


class CheckpointError(QuarkError):
    """A stored model that is damaged, incomplete or not what it says, or a directory without room for one."""


class ExportError(QuarkError):
    """A graph that the chosen target cannot express, or an artifact that failed its check."""
