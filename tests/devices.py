"""The devices a numeric test runs on: the CPU, a GPU where there is one, and the pretend GPU where it is loaded."""

from __future__ import annotations

import sys

import pytest
import torch

_GPUS = [
    pytest.param(
        torch.device("cuda"), id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
    ),
    *([pytest.param(torch.device("pretend"), id="pretend")] if "pretend_gpu" in sys.modules else ()),
]

on_devices = pytest.mark.parametrize("device", [pytest.param(torch.device("cpu"), id="cpu"), *_GPUS])
"""Runs a test once per device, passed as `device`."""

on_gpus = pytest.mark.parametrize("device", _GPUS)
"""The same without the CPU."""
