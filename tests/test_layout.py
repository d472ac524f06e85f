"""The shape of the project: one package, layers that import downwards only, a pinned public list."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import quark_fx

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "quark_fx"
LINKS = ("passes", "observers", "export")

ROOMS = (
    "errors",
    "system",
    "checkpoints",
    "data",
    "numbers",
    "observers",
    "graph",
    "config",
    "targets",
    "capture",
    "plan",
    "engine",
    "rescale",
    "solvers",
    "passes",
    "presets",
    "model",
    "export",
    "inspection",
    "evaluation",
    "session",
    "quantization",
    "conversion",
    "from_pretrained",
    "analysis",
    "mixed_precision",
    "parity",
    "vendors",
    "__init__",
    "command_line",
    "__main__",
)
"""Folders and top-level modules, ground floor first: each imports those before it, late imports included."""

HEAVY = ("sympy", "scipy", "transformers", "onnx", "onnxscript", "onnxruntime", "openvino", "torchvision", "matplotlib")

FLOOR = {name: floor for floor, name in enumerate(ROOMS)}


@cache
def parts() -> dict[str, set[str]]:
    """Return, for every part of the package, the other parts it imports when it is imported."""
    found: dict[str, set[str]] = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        found.setdefault(part, set()).update(imported_parts(file.read_text()) - {part})
    return found


def imported_parts(source: str) -> set[str]:
    """Return the parts of `quark_fx` a source imports, in functions, too, but not for type checkers alone."""
    names = set()
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "quark_fx" else set()
            names |= {node.module or ""}
    dotted = [name.split(".") for name in names if name.split(".")[0] == "quark_fx"]
    return {path[1] for path in dotted if len(path) > 1}


def test_every_part_has_a_floor() -> None:
    assert set(parts()) == set(FLOOR)


@pytest.mark.parametrize("part", sorted(FLOOR))
def test_imports_go_down(part: str) -> None:
    upward = {other for other in parts()[part] if FLOOR[other] > FLOOR[part]}
    assert not upward, f"{part} (floor {FLOOR[part]}) imports {', '.join(sorted(upward))} from above"


def test_rooms_of_vendors_and_peers_register_themselves() -> None:
    """Nothing but `quark_fx` imports them, and none imports another."""
    assert {part for part, imported in parts().items() if {"parity", "vendors"} & imported} == {"__init__"}
    for file in (PACKAGE / "vendors").glob("*/**/*.py"):
        vendor = file.relative_to(PACKAGE / "vendors").parts[0]
        others = {name for name in re.findall(r"quark_fx\.vendors\.(\w+)", file.read_text()) if name != vendor}
        assert not others, f"{file} imports {others}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch, quark_fx.model.quantized_model as m", {"model"}),
        ("from quark_fx.export.to_onnx.lowering import lowers", {"export"}),
        ("from quark_fx import passes, presets", {"passes", "presets"}),
        ("if True:\n    from quark_fx.graph.nodes import call", {"graph"}),
        ("class A:\n    from quark_fx.config.quant_config import Target", {"config"}),
        ("def f():\n    from quark_fx.model.quantized_model import QuantizedModel", {"model"}),
        ("if TYPE_CHECKING:\n    from quark_fx.model.quantized_model import QuantizedModel", set()),
    ],
)
def test_the_guard_sees_imports(source: str, expected: set[str]) -> None:
    assert imported_parts(source) == expected


@pytest.mark.parametrize("name", LINKS)
def test_the_root_links_lead_into_the_package(name: str) -> None:
    link = ROOT / name
    if link.is_file():
        # A checkout without symbolic links holds the target as text.
        assert link.read_text().strip() == f"quark_fx/{name}"
    else:
        assert link.is_symlink()
        assert link.resolve() == PACKAGE / name


def test_no_module_is_imported_through_a_root_link() -> None:
    modules = [m.name for m in pkgutil.walk_packages([str(PACKAGE)], "quark_fx.")]
    assert "quark_fx.passes.convert" in modules
    for name in modules:
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] in LINKS]


def test_no_source_imports_a_root_link() -> None:
    files = (file for directory in ("quark_fx", "tests", "examples") for file in (ROOT / directory).rglob("*.py"))
    found = [f"{file}: {name}" for file in files for name in imported_links(file.read_text())]
    assert not found


def imported_links(source: str) -> list[str]:
    """Return the modules that a source imports through a root link. Only a source that could is parsed."""
    if not re.search(rf"(?:\b(?:import|from)[\s\\]+|,[\s\\]*)(?:{'|'.join(LINKS)})\b", source):
        return []
    names = []
    for node in ast.walk(ast.parse(source)):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return [name for name in names if name.split(".")[0] in LINKS]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import passes", True),
        ("import os, export.to_onnx", True),
        ("import os,passes", True),
        ("def f():\n    from observers.minmax import MinMax", True),
        ("import os, \\\n    passes", True),
        ("from quark_fx import passes, export", False),
        ("from quark_fx.passes import Rotate", False),
    ],
)
def test_imports_of_root_links_are_seen(source: str, found: bool) -> None:
    assert bool(imported_links(source)) is found


def test_the_public_list_is_pinned() -> None:
    assert quark_fx.__all__ == [
        "INHERIT",
        "Analysis",
        "Budget",
        "CacheBudget",
        "CalibrationError",
        "CaptureError",
        "CheckpointError",
        "ConfigError",
        "Conversion",
        "ExportError",
        "Granularity",
        "Inspection",
        "Override",
        "PassError",
        "Prediction",
        "QuantConfig",
        "QuantizedModel",
        "QuantizedScale",
        "QuarkError",
        "Resources",
        "Scheme",
        "Search",
        "Session",
        "Symmetry",
        "Target",
        "TensorSpec",
        "analyze",
        "block_formats",
        "capture_graph",
        "check",
        "convert",
        "data",
        "evaluate",
        "evaluation",
        "export",
        "formats",
        "gguf_types",
        "graph_pass",
        "graph_rule",
        "inspect",
        "load",
        "observers",
        "open_checkpoint",
        "ops",
        "passes",
        "predict",
        "prepare_qat",
        "presets",
        "quantize",
        "run_passes",
        "search",
        "targets",
        "verify",
    ]
    assert all(hasattr(quark_fx, name) for name in quark_fx.__all__)


def test_the_package_imports_nothing_heavy_that_it_may_not_need() -> None:
    """Typed commands wait for it; sympy alone took as long as the package."""
    program = f"import sys, quark_fx, quark_fx.command_line.app; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_workers_of_other_tools_import_nothing_of_this_package() -> None:
    """Their environments lack it, and their seconds are compared with ours."""
    program = (
        "import sys, benchmarks.peers.language, benchmarks.peers.reading, benchmarks.peers.job,"
        " benchmarks.peers.vitis_session;"
        "sys.exit(any(name.partition('.')[0] == 'quark_fx' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_a_checkout_without_symbolic_links_imports_and_collects(tmp_path: Path) -> None:
    """Git writes the target of a link as text where links are not allowed."""
    for name in ("quark_fx", "conftest.py", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in LINKS:
        (tmp_path / name).write_text(f"quark_fx/{name}")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("import quark_fx.passes\n\ndef test_one() -> None: ...\n")
    options = ["-p", "no:cacheprovider", "--collect-only", "-q", "--ignore=quark_fx"]
    command = [sys.executable, "-m", "pytest", *options, "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert done.stdout.split() == ["tests/test_one.py:", "1"]
