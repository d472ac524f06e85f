"""The devices a numeric test runs on: the CPU, and a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

on_devices = pytest.mark.parametrize(
    "device",
    [
        pytest.param(torch.device("cpu"), id="cpu"),
        pytest.param(
            torch.device("cuda"),
            id="cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
        ),
    ],
)
"""Runs a test once per device, passed as `device`."""
