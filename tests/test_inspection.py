"""`inspect` and tables of results."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from tiny import mlp, quantize, tokens

import quark_fx as qfx
from quark_fx.plan.table import Column, Table


def test_a_table_is_text_a_section_and_plain_data_of_the_same_columns() -> None:
    columns: list[Column[tuple[str, float | None]]] = [
        Column("name", lambda item: item[0]),
        Column("error", lambda item: item[1], ".2f"),
        Column("per mille", lambda item: item[1], lambda item: f"{1000 * (item[1] or 0):.0f} ‰"),
    ]
    table = Table("Errors", columns, [("</script>", 0.125), ("b", None), ("c", math.inf)])
    assert table.lines() == [
        "name       error  per mille",
        "─────────  ─────  ─────────",
        "</script>   0.12      125 ‰",
        "b              -          -",
        "c            inf      inf ‰",
    ]
    section = table.html()
    assert section.count("</script>") == 1
    data = json.loads(re.findall(r'<script type="application/json">(.*)</script>', section)[0])
    assert data == {"header": table.header, "rows": table.rows}
    assert table.records()[0] == {"name": "</script>", "error": 0.125, "per mille": 0.125}
    assert table.rows[2] == ["c", None, None]  # JSON has no infinity


@pytest.mark.parametrize("form", ["onnx", "saved"])
def test_the_contents_of_a_file_are_those_of_its_model(form: str, tmp_path: Path) -> None:
    qmodel = quantize(mlp(), "int8_static", tokens())
    path = tmp_path / "model.onnx" if form == "onnx" else tmp_path / "saved"
    _ = qfx.export.onnx(qmodel, path) if form == "onnx" else qmodel.save(path)
    found = qfx.inspect(str(path))
    quantized = [row for row in qmodel.report() if not row.reason]
    held = [part.weight.split()[0] for part in found.parts if not part.weight.startswith("float")]
    assert held == [row.weight.split()[0] for row in quantized]
    assert found.bytes == sum(file.stat().st_size for file in ([path] if form == "onnx" else path.iterdir()))
    assert next(iter(found.bytes_by_format)).startswith("int8")
    assert sum(found.bytes_by_format.values()) == sum(part.bytes for part in found.parts)
    if form == "saved":
        for part, row in zip(found.parts, qmodel.report(), strict=True):
            least = row.bytes_before if row.reason else row.bytes_before / 4  # int8 for float32, and scales
            assert least <= part.bytes <= (least if row.reason else 2 * least)
    assert (found.runtime is not None) == (form == "onnx")
    data = json.loads(json.dumps(found.to_dict()))
    assert len(data["operators"]) == len(found.parts)
    assert len(found.to_dict(every=False)["operators"]) == len(found.operators().items)
    for line in ("operator ", "weights in ", *(["exact"] if form == "onnx" else [])):
        assert line in str(found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(qfx.QuarkError, match=r"gone does not exist; pass an \.onnx or \.gguf file"):
        qfx.inspect(tmp_path / "gone")
    with pytest.raises(qfx.QuarkError, match=r"does not exist"):
        qfx.inspect("x" * 5000)
    with pytest.raises(qfx.ConfigError, match=r"path"):
        qfx.inspect(3)  # type: ignore[arg-type]
