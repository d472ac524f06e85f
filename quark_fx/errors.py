"""Errors of the package. Each message names the failure, its place, and the next step."""

from __future__ import annotations


class QuarkError(Exception):
    """Base class of every error that quark_fx raises about a model, its data, or a target.

    A bad *argument* (an unknown preset, a contradictory option) is also a `ValueError`, as in any Python library:
    `ConfigError` derives from both.
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
    """A stored model that is damaged, incomplete, or mislabeled, or a disk without space for one."""


class Declined(Exception):  # noqa: N818
    """A decision to leave something unchanged, with the reason: nothing failed, and the caller reports it.

    A function returns its result or raises this. A rule of a user may raise it, too; no function of the API does.
    """

    @property
    def reason(self) -> str:
        """The reason, as a part of a sentence about the thing that stays."""
        return str(self)


class ExportError(QuarkError):
    """A graph that the chosen target cannot express, or an artifact that failed its check."""
