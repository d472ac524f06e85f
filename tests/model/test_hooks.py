"""Which functions on a module are not of its class."""

from __future__ import annotations

import importlib

import pytest
import seeded_models
from tiny import rand
from torch import nn

from quark_fx.model.hooks import foreign_hooks


class Imported(nn.Module):
    forward = rand


def test_a_class_may_import_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not foreign_hooks(Imported())
    for function in (importlib.import_module("colorsys").rgb_to_hsv, seeded_models.images):  # this file imports one
        monkeypatch.setattr(Imported, "forward", function)
        (description,) = foreign_hooks(Imported())
        assert description.endswith(f"forward of Imported patched with {function.__name__}")
