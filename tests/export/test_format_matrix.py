"""The table of formats in ONNX has a row for every number format and preset, or says why not."""

from __future__ import annotations

import pytest

pytest.importorskip("torchvision")

from benchmarks import format_matrix
from quark_fx.presets import PRESETS


def test_every_number_format_and_preset_has_a_row_or_a_reason() -> None:
    assert format_matrix.without_row() == format_matrix.ELSEWHERE


def test_a_format_without_a_row_or_a_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {label: row for label, row in format_matrix.FORMATS.items() if "uint2" not in label}
    monkeypatch.setattr(format_matrix, "FORMATS", rows)
    with pytest.raises(KeyError, match="'uint2'"):
        format_matrix.without_row()


def test_changes_are_to_weights_and_inputs_alone() -> None:
    for row in format_matrix.FORMATS.values():
        preset, config = PRESETS[row.preset], row.config
        for own, given in ((config.weight, preset.weight), (config.input, preset.input)):
            assert own == (given and given.replace(**row.changes))
        assert config.replace(weight=preset.weight, input=preset.input) == preset
