"""Write the notebooks of the examples: their scripts in cells.

    python examples/notebooks.py
    pip install nbclient ipykernel && python examples/notebooks.py --run deploy

The docstring of a script is the first cell; imports and definitions follow, one a cell. In `main` each comment that
begins a paragraph begins a cell, and a figure that a cell saves is shown. `--run` also runs the notebooks that it
names, which then hold what they print and draw.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import textwrap
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

NAMES = ("deploy", "huggingface", "research")
"""The scripts that have notebooks: a docstring, imports, definitions, `main(directory, *, ...)` and what calls it."""


def notebook(script: Path) -> dict[str, Any]:
    """Return the notebook of a script, without outputs; the cell tagged `parameters` sets the arguments of `main`."""
    source = script.read_text(encoding="utf-8")
    document, *statements = ast.parse(source).body
    title, text = str(ast.literal_eval(document.value)).split("\n", 1)  # type: ignore[attr-defined]
    cells = [_cell("markdown", f"# {title.removesuffix('.')}\n{text}")]
    lines, end, imports = source.splitlines(), document.end_lineno or 0, []
    for node in statements:
        code = "\n".join(lines[end : node.end_lineno])
        end = node.end_lineno or 0
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(code.rstrip())
        elif isinstance(node, ast.FunctionDef) and node.name == "main":
            main = node
        elif not isinstance(node, ast.If):
            cells.append(_cell("code", code))
    cells.insert(1, _cell("code", "\n".join([*imports, "\n%matplotlib inline"])))
    defaults = zip(main.args.kwonlyargs, main.args.kw_defaults, strict=True)
    options = [f"{argument.arg} = {ast.unparse(value)}" for argument, value in defaults if value is not None]
    parameters = ["import tempfile", "", "directory = Path(tempfile.mkdtemp())", *options]
    cells.append(_cell("code", "\n".join(parameters), tags=["parameters"]))
    body = textwrap.dedent("\n".join(lines[main.body[0].lineno - 1 : main.end_lineno]))
    for part in re.split(r"\n\n(?=# )", body):
        comment, code = re.fullmatch(r"((?:# [^\n]*\n)*)(.*)", part, re.DOTALL).groups()  # type: ignore[union-attr]
        if comment:
            cells.append(_cell("markdown", re.sub("^# ", "", comment, flags=re.MULTILINE)))
        saved = re.search(r"\n(\w+)\.savefig\(.*\)\s*$", code)
        cells.append(_cell("code", f"{code}\n{saved[1]}" if saved else code))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    cells = [{"id": f"cell-{i}", **cell} for i, cell in enumerate(cells)]
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def _cell(kind: str, text: str, **metadata: Any) -> dict[str, Any]:
    cell = {"cell_type": kind, "metadata": metadata, "source": text.strip("\n").splitlines(keepends=True)}
    return cell | {"execution_count": None, "outputs": []} if kind == "code" else cell


def without_outputs(stored: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook as it was before it was run."""
    ran: dict[str, Any] = {"execution_count": None, "outputs": []}
    cells = [cell | ran if cell["cell_type"] == "code" else cell for cell in stored["cells"]]
    return stored | {"cells": cells}


def run(made: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with its outputs, cell by cell."""
    import nbformat  # pyright: ignore[reportMissingImports]
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    document = nbformat.reads(json.dumps(made), as_version=4)
    NotebookClient(document, timeout=None, resources={"metadata": {"path": str(HERE)}}, record_timing=False).execute()
    found: dict[str, Any] = json.loads(nbformat.writes(document))
    cells = []
    for before, after in zip(made["cells"], found["cells"], strict=True):
        # Bars of progress and warnings are for those who wait.
        kept = [output for output in after.get("outputs", []) if output.get("name") != "stderr"]
        ran = {"execution_count": after.get("execution_count"), "outputs": kept}
        cells.append(before | ran if before["cell_type"] == "code" else before)
    return made | {"cells": cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", default=[], choices=NAMES, help="notebooks that are run")
    asked = parser.parse_args().run
    for name in NAMES:
        made, path = notebook(HERE / f"{name}.py"), HERE / f"{name}.ipynb"
        if name in asked:
            made = run(made)
        elif path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            made = stored if without_outputs(stored) == made else made
        path.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
