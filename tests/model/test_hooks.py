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


class ImportedByItsModule(nn.Module):
    forward = seeded_models.images


@pytest.mark.parametrize("kind", [Imported, ImportedByItsModule])
def test_a_class_may_import_its_forward(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not foreign_hooks(kind())
    monkeypatch.setattr(kind, "forward", importlib.import_module("colorsys").rgb_to_hsv)
    (found,) = foreign_hooks(kind())
    assert found.endswith(f"forward of {kind.__name__} patched with rgb_to_hsv")
