"""What changed since an earlier commit: accuracy, bits, time, memory, and what the code consists of.

    python -m benchmarks.against_commit COMMIT [--networks cnn …] [--cases int8_static …] [--rounds 3] [--write]

Networks trained on digits (`tests/networks.py`, trained once) are quantized by the commit and by this checkout, in
turn, each time in a process of its own on one thread. Each round but the first shuffles the calibration images, which
alone moves int4 GPTQ by up to 0.5 dB. *SQNR* is that of the logits on images that were not calibrated on, *right* the
percentage of these images that are classified correctly, both means over the rounds. *CPU* is the median, over the
rounds, of the ratio of the CPU seconds of `quantize`, after over before; *MiB* is how much the process grew while it
ran, the smallest of the rounds. *Other tensors* counts the initializers of the exported ONNX file that differ in the
first round. The second table counts the code of the package: *asserts on optionals* are `assert x is not None`, classes
that *hold codes* have fields for an array of codes and for a scale, *private names* begin with an underscore,
*statements repeated* are in runs of six or more that another place has too, *of one shape* if only names and constants
differ. `--write` updates `results/against_commit.md`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import hashlib
import json
import keyword
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import torch

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__" and "--child" in sys.argv:
    sys.path.append(str(ROOT / "tests"))  # of the networks; the package is that of PYTHONPATH
else:
    sys.path.insert(0, str(ROOT / "tests"))


def _int8(*names: str) -> Callable[[], Any]:
    def make() -> Any:
        from quark_fx import passes
        from quark_fx.presets import INT8_STATIC

        return INT8_STATIC.replace(passes=(*INT8_STATIC.passes, *(getattr(passes, name)() for name in names)))

    return make


def _int4(*names: str) -> Callable[[], Any]:
    def make() -> Any:
        from quark_fx import passes
        from quark_fx.presets import W4A16_GPTQ

        made = tuple(getattr(passes, name)() for name in names)
        return W4A16_GPTQ.replace(group_size=16, exclude=()).replace(passes=made)

    return make


CASES: dict[str, Callable[[], Any]] = {
    "int8_static": lambda: "int8_static",
    "int8_dynamic": lambda: "int8_dynamic",
    "xint8": lambda: "xint8",
    "SmoothQuant": _int8("SmoothQuant"),
    "BiasCorrection": _int8("BiasCorrection"),
    "AdaRound": _int8("AdaRound"),
    "AdaQuant": _int8("AdaQuant"),
    "int4": _int4(),
    "int4 FitScales": _int4("FitScales"),
    "int4 GPTQ": _int4("GPTQ"),
    "int4 AWQ": _int4("AWQ"),
    "int4 AutoRound": _int4("AutoRound"),
}


def _child(case: str, network: str, file: str, order: int) -> None:
    """Print what one quantization gives, as JSON."""
    import warnings

    import quark_fx as qfx

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = torch.load(network, weights_only=False)
    config, calibration = CASES[case](), data.calibration
    if order:
        images = torch.cat(calibration)
        shuffled = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(order))]
        calibration = list(shuffled.split(len(calibration[0])))
    qfx.quantize(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval(), "int8_static", [torch.rand(8, 4)], progress=False)
    grown, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    qmodel = qfx.quantize(data.model, config, calibration, progress=False)
    seconds = time.process_time() - began
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    with torch.no_grad():
        want, made = data.model(data.images), qmodel(data.images)
    ratio = 10 * torch.log10(want.square().sum() / (want - made).square().sum())
    qfx.export.onnx(qmodel, file)
    tensors = {
        tensor.name: hashlib.sha256(tensor.SerializeToString()).hexdigest()
        for tensor in onnx.load(file).graph.initializer
    }
    right = 100 * float((made.argmax(-1) == data.labels).float().mean())
    print(json.dumps({"cpu": seconds, "mib": grown / 1024, "sqnr": float(ratio), "right": right, "tensors": tensors}))


def _measure(tree: Path, case: str, network: Path, folder: Path, order: int) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", case, str(network), str(folder / "model.onnx")]
    command.append(str(order))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{case} with {tree}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _rows(trees: tuple[Path, Path], networks: list[str], cases: list[str], rounds: int) -> Iterator[list[str]]:
    from networks import trained

    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name in networks:
            torch.save(trained(name), folder / f"{name}.pt")
            for case in cases:
                file = folder / f"{name}.pt"
                runs = [[_measure(tree, case, file, folder, order) for tree in trees] for order in range(rounds)]
                old, new = runs[0]
                ratio = statistics.median(after["cpu"] / before["cpu"] for before, after in runs)
                mib = [min(run[i]["mib"] for run in runs) for i in range(2)]
                sqnr, right = (
                    [statistics.mean(run[i][of] for run in runs) for i in range(2)] for of in ("sqnr", "right")
                )
                row = [name, case, *(f"{mean:.2f}" for mean in sqnr), *(f"{mean:.1f}" for mean in right)]
                row += [f"{ratio:.2f}", *(f"{m:.0f}" for m in mib)]
                differ = {name for name, _ in old["tensors"].items() ^ new["tensors"].items()}
                row.append(f"{len(differ)} of {len(old['tensors'])}")
                print(*row, file=sys.stderr)
                yield row


def counted(tree: Path) -> dict[str, float]:
    """Return what the package in `tree` consists of."""
    files = sorted((tree / "quark_fx").rglob("*.py"))
    sources = [file.read_text(encoding="utf-8") for file in files]
    parsed = [ast.parse(source) for source in sources]
    nodes = [node for one in parsed for node in ast.walk(one)]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    times = "import time, torch; began = time.process_time(); import quark_fx; print(time.process_time() - began)"
    command = [sys.executable, "-c", times]
    run = [subprocess.run(command, env=environment, capture_output=True, text=True, check=True) for _ in range(2)]
    return {
        "lines": sum(source.count("\n") for source in sources),
        "modules": len([file for file in files if file.name != "__init__.py"]),
        "modules on the top floor": len([f for f in (tree / "quark_fx").glob("*.py") if f.name != "__init__.py"]),
        "asserts on optionals": sum(_asserts_not_none(node) for node in nodes),
        "classes that hold codes": sum(_holds_codes(node) for node in nodes),
        "private names of torch and transformers": len(_longest({name for one in parsed for name in _private(one)})),
        "statements repeated, per 1,000 lines": _per_thousand(_repeated(parsed, str), sources),
        "statements repeated or of one shape, per 1,000 lines": _per_thousand(_repeated(parsed, _shape), sources),
        "CPU seconds of `import quark_fx` after torch": round(min(float(r.stdout) for r in run), 2),
    }


def _per_thousand(statements: int, sources: list[str]) -> float:
    return round(1000 * statements / sum(source.count("\n") for source in sources), 1)


RUN = 6
"""Statements in a row that count as repeated if another place has the same ones."""


def _repeated(modules: list[ast.Module], spelled: Callable[[str], str]) -> int:
    """Count the statements, without imports and docstrings, in runs that are spelled alike in more than one place."""
    places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    for number, module in enumerate(modules):
        lines = [spelled(line) for line in _statements(module)]
        for start in range(len(lines) - RUN + 1):
            places.setdefault(tuple(lines[start : start + RUN]), []).append((number, start))
    alike = [place for found in places.values() if len(found) > 1 for place in found]
    return len({(number, start + i) for number, start in alike for i in range(RUN)})


def _statements(module: ast.Module) -> Iterator[str]:
    """Yield each statement's first logical line, in the order of the file: a block's body follows it."""
    statements = [
        n for n in ast.walk(module) if isinstance(n, ast.stmt) and not isinstance(n, ast.Import | ast.ImportFrom)
    ]
    for statement in sorted(statements, key=lambda n: (n.lineno, n.col_offset)):
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        bare = copy.copy(statement)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            if hasattr(bare, block):
                setattr(bare, block, [])
        yield ast.unparse(bare)


def _shape(line: str) -> str:
    """Return a statement with its names and constants replaced by one of each."""
    line = re.sub(r"""(['"]).*?\1""", "0", line)
    return re.sub(r"\b(?!(?:%s)\b)\w+" % "|".join(keyword.kwlist), "x", line)  # noqa: UP031


def _asserts_not_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) and any(
        isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.IsNot) for part in ast.walk(node.test)
    )


def _holds_codes(node: ast.AST) -> bool:
    if not isinstance(node, ast.ClassDef):
        return False
    fields = {
        item.target.id: ast.unparse(item.annotation)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    tensors = any(re.search("Tensor|[Aa]rray", fields.get(name, "")) for name in ("codes", "code"))
    return tensors and bool(fields.keys() & {"scale", "scales"})


def _private(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in ("torch", "transformers"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if any(part.startswith("_") and not part.endswith("__") for part in name.split(".")):
                    yield name
        elif isinstance(node, ast.Attribute) and re.match(r"(torch|transformers)\._(?!_)", ast.unparse(node)):
            yield ".".join(ast.unparse(node).split(".")[:3])


def _longest(names: set[str]) -> set[str]:
    """Return the names without the modules of other names: `torch._ops` beside `torch._ops.OpOverload`."""
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def main() -> None:
    """Measure both and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?")
    parser.add_argument("--networks", nargs="*", default=["cnn", "mobilenet", "vit"])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3, help="how many orders of the calibration images")
    parser.add_argument("--write", action="store_true", help="update results/against_commit.md")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        case, network, file, order = arguments.child
        _child(case, network, file, int(order))
        return
    if arguments.commit is None:
        parser.error("name the commit to compare with")
    from benchmarks.common import environment, publish, table

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "--detach", tree, arguments.commit], cwd=ROOT, check=True, text=True)
        try:
            rows = list(_rows((tree, ROOT), arguments.networks, arguments.cases, arguments.rounds))
            before, after = counted(tree), counted(ROOT)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    header = (
        "network",
        "case",
        "SQNR before",
        "after",
        "right before",
        "after",
        "CPU",
        "MiB before",
        "after",
        "other tensors",
    )
    commits = [
        subprocess.run(["git", "rev-parse", "--short", c], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for c in (arguments.commit, "HEAD")
    ]
    code = table(("", "before", "after"), [(what, before[what], after[what]) for what in before])
    page = f"""# Since an earlier commit

Written by `python -m benchmarks.against_commit {commits[0].strip()} --networks {" ".join(arguments.networks)} --rounds
{arguments.rounds} --write` at {commits[1].strip()}; its docstring says what is measured.

{table(header, rows)}

{code}

{environment()}
"""
    publish(page, "against_commit.md" if arguments.write else None)


if __name__ == "__main__":
    main()
