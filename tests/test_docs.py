"""The tables of names elsewhere name what is here: calls can be made, names and options exist."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import quark_fx as qfx
from quark_fx import block_formats, observers, passes
from quark_fx.numbers import qparams
from quark_fx.passes.dpu import align_shifts
from quark_fx.presets import PRESETS

DOCS = Path(__file__).resolve().parent.parent / "docs"

NAMES: dict[str, Any] = {
    **{
        name: getattr(module, name)
        for module in (qparams, block_formats, passes, observers, qfx)
        for name in dir(module)
    },
    **PRESETS,
}
"""What a name or the start of a dotted one may be."""

_TAKE_OPTIONS = (
    *(qfx.TensorSpec, qfx.QuantConfig, qfx.quantize, qfx.export.onnx),
    *(getattr(observers, name) for name in observers.__all__ if inspect.isclass(getattr(observers, name))),
    *(getattr(passes, name) for name in passes.__all__ if inspect.isclass(getattr(passes, name))),
)
OPTIONS = {name for one in _TAKE_OPTIONS for name in inspect.signature(one).parameters}
OPTIONS |= {name for name in dir(observers.Observer) if not name.startswith("_")}

THEIRS = {"Cast", "ExtendedQuantFormat.QDQ"}
"""Words in the columns of ours that are an operator of ONNX and a newer name of another tool."""


def spans() -> list[str]:
    """Return what the right columns of the tables quote."""
    found = []
    for document in ("onnx.md", "observers.md"):
        text = (DOCS / document).read_text(encoding="utf-8")
        (table,) = re.findall(r"^## Names elsewhere\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        cells = [line.split(" | ", 1)[1] for line in table.splitlines() if line.startswith("| ")]
        found += [span for cell in cells for span in re.findall(r"`([^`]+)`", cell)]
    return sorted(set(found) - THEIRS)


def require(span: str) -> None:
    """Require that what a table quotes is here."""
    text = span.replace("…", "...")
    if text.startswith('"'):
        value = ast.literal_eval(text)
        assert value in align_shifts.RULES or value in ("bfloat16", "most_common", "percentile", "tensor")
        return
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError:  # options as one would type them, of a call or of an attribute
        owner, _, options = text.rpartition(".") if re.match(r"[A-Z]\w*\.", text) else ("", "", text)
        names = [keyword.arg for keyword in ast.parse(f"f({options})", mode="eval").body.keywords]  # type: ignore[attr-defined]
        known = OPTIONS if not owner else set(inspect.signature(NAMES[owner]).parameters)
        assert names
        assert set(names) <= known
        return
    if isinstance(node, ast.Call):
        made = NAMES[ast.unparse(node.func)]
        assert {keyword.arg for keyword in node.keywords} <= set(inspect.signature(made).parameters)
        given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords if ast.unparse(k.value) != "..."}
        if made is qfx.TensorSpec:
            given = {"format": "int8", **given}
        made(**given)
    elif isinstance(node, ast.Attribute):
        owner = NAMES[ast.unparse(node.value)]
        assert hasattr(owner, node.attr) or node.attr in inspect.signature(owner).parameters
    else:
        assert isinstance(node, ast.Name)
        assert node.id in NAMES or node.id in OPTIONS


@pytest.mark.parametrize("span", spans())
def test_a_name_in_the_tables_of_other_tools_is_here(span: str) -> None:
    require(span)


@pytest.mark.parametrize(
    "span", ["Percentil", "Percentile(share=…)", "GPTQ(dampening=…)", "Scheme.sym", "granul=1", '"cutt"']
)
def test_a_name_that_is_not_here_is_found(span: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        require(span)
