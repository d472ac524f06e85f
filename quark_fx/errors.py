"""Errors of the package. Each message names the failure, its place, and the next step to take."""

from __future__ import annotations


class QuarkError(Exception):
    """Base class of every error that quark_fx raises about a model, its data, or a target.

    An error about an invalid *argument* (an unknown preset, a contradictory option) is also a `ValueError`, which is
    usual in Python: `ConfigError` derives from both classes.
    """


class ConfigError(QuarkError, ValueError):
    """Error about a configuration that contradicts itself or names something that does not exist."""


class CaptureError(QuarkError):
    """Error about a model that could not be captured as a single functional graph."""


class CalibrationError(QuarkError):
    """Error about calibration data that is empty, malformed, or not finite."""


class PassError(QuarkError):
    """Error about a pass that broke a promise: an invalid graph, an unmet condition, or a changed function."""


class CheckpointError(QuarkError):
    """Error about a stored model that is damaged, incomplete, or mislabeled, or about a disk that is full."""


class Declined(Exception):  # noqa: N818
    """Signal that something was left unchanged for a reason, which the caller reports; it is not a failure.

    Internal functions raise it instead of returning a result, and so may users' rules. Functions of the API do not.
    """

    @property
    def reason(self) -> str:
        """The reason, as a clause for a sentence about the thing that was left unchanged."""
        return str(self)


class ExportError(QuarkError):
    """Error about a graph that the chosen target or format does not support, or about a file that failed its check."""
