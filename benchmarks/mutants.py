"""Mutation check: change one line of the package, and see whether a test fails.

    python -m benchmarks.mutants [--count 60] [--seed 0]

1. Run the tests of `pytest -m quick` (`--record` names other ones) and record which lines of `quark_fx` each executes.
2. Draw lines of consequence by seed, from one room after the other, and one mutation for each: a comparison, an
   operator, a condition, a constant, swapped arguments, or a dropped statement. Lines that only write messages, and
   lines outside of functions, are not drawn.
3. For each mutant, run the recorded tests that execute the line, shortest first, then the tests in `tests/ROOM` and in
   files that import its room, closest first: files that name the mutated function, its module, or its file. All run
   within `--seconds` of CPU time. Stop at the first test that fails and passes without the mutation. A mutant that
   crashes the process, or that uses the CPU time up in one test, counts as caught.

All tests are collected once. Each mutant is a fork of that process with the code object of one function replaced, so
code that tests run in other processes is not mutated. Exits with 1 if fewer than 95 % are caught.
"""

from __future__ import annotations

import ast
import copy
import gc
import json
import os
import random
import signal
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from _pytest.runner import runtestprotocol

from benchmarks.common import ROOT, table
from benchmarks.experiment import Pages, experiment

PACKAGE = ROOT / "quark_fx"
GOAL = 0.95
"""The share of mutants that tests have to catch."""

Line = tuple[str, int]
"""A path relative to `quark_fx`, and a line number."""

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.MatMult: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}


@dataclass(frozen=True)
class Mutant:
    """A changed line."""

    file: str
    line: int
    mutation: str
    function: tuple[str, int]
    """Qualified name and first line of the outermost function that holds the line."""
    code: types.CodeType
    """What replaces the code of that function."""

    @property
    def room(self) -> str:
        """The folder of `quark_fx` that holds the file, or the file."""
        return self.file.partition("/")[0]


# Drawing -------------------------------------------------------------------------------------------------------------


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the mutations of one node, and what replaces it."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare() if type(new.ops[0]) in _COMPARISONS:
            new.ops[0] = _COMPARISONS[type(new.ops[0])]()
            yield "comparison", new
        case ast.BinOp() if type(new.op) in _OPERATORS and not isinstance(new.left, ast.JoinedStr):
            new.op = _OPERATORS[type(new.op)]()
            yield "operator", new
        case ast.AugAssign() if type(new.op) in _OPERATORS:
            new.op = _OPERATORS[type(new.op)]()
            yield "operator", new
        case ast.BoolOp():
            new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
            yield "and / or", new
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "sign or not dropped", new.operand
        case ast.If() | ast.While() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
            yield "condition negated", new
        case ast.Constant(value=bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(value=float(value)):
            yield "constant", ast.Constant(2 * value + 1)
        case ast.Call() if len(new.args) >= 2 and not any(isinstance(arg, ast.Starred) for arg in new.args[:2]):
            if ast.dump(new.args[0]) != ast.dump(new.args[1]):
                new.args[:2] = new.args[1::-1]
                yield "arguments swapped", new
        case ast.Expr(value=ast.Call()):
            yield "statement dropped", ast.Pass()


def _nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function whose values matter: no messages, annotations, assertions, or nested defaults."""
    for name, value in ast.iter_fields(function):
        if name in ("annotation", "returns", "decorator_list", "type_params", "args") and not isinstance(
            function, ast.Call
        ):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr):
                yield child
                yield from _nodes(child)


def _outermost(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods that no other function holds, by their qualified names."""

    def walk(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for statement in body:
            if isinstance(statement, ast.FunctionDef):
                if statement.name not in ("__repr__", "__str__"):
                    yield prefix + statement.name, statement
            elif isinstance(statement, ast.ClassDef):
                yield from walk(statement.body, f"{prefix}{statement.name}.")

    yield from walk(tree.body, "")


def _code_of(module: types.CodeType, name: str, line: int) -> types.CodeType | None:
    """Return the code object of a function of a compiled module."""
    for constant in module.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_qualname == name and constant.co_firstlineno == line:
                return constant
            if name.startswith(f"{constant.co_qualname}.") and (found := _code_of(constant, name, line)):
                return found
    return None


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return ast.copy_location(self.new, node) if node is self.old else self.generic_visit(node)


def mutant_of(file: str, line: int, draw: random.Random) -> Mutant | None:
    """Return a mutant of the line, or None if nothing on it can be mutated."""
    path = PACKAGE / file
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source)
    for name, function in _outermost(tree):
        if not function.lineno <= line <= (function.end_lineno or 0):
            continue
        choices = [
            (kind, node, new)
            for node in _nodes(function)
            if getattr(node, "lineno", 0) == line
            for kind, new in _variants(node)
        ]
        draw.shuffle(choices)
        for kind, node, new in choices[:1]:
            old_text = ast.unparse(node).splitlines()[0]
            changed = ast.fix_missing_locations(_Replace(node, new).visit(tree))
            new_text = ast.unparse(new).splitlines()[0]
            first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
            code = _code_of(compile(changed, str(path), "exec"), name, first)
            if code is None:
                return None
            return Mutant(file, line, f"{kind}: `{old_text[:60]}` → `{new_text[:60]}`", (name, first), code)
    return None


def drawn(lines: Sequence[Line], count: int, seed: int) -> list[Mutant]:
    """Return mutants, one room after the other."""
    draw = random.Random(seed)
    rooms: dict[str, list[Line]] = defaultdict(list)
    for file, line in sorted(lines):
        rooms[file.partition("/")[0]].append((file, line))
    order = sorted(rooms)
    draw.shuffle(order)
    for room in order:
        draw.shuffle(rooms[room])
    chosen: list[Mutant] = []
    while len(chosen) < count and any(rooms.values()):
        for room in order:
            while rooms[room] and len(chosen) < count:
                if mutant := mutant_of(*rooms[room].pop(), draw):
                    chosen.append(mutant)
                    break
    return chosen


# Running -------------------------------------------------------------------------------------------------------------


@contextmanager
def _recording(lines: set[Line]) -> Iterator[None]:
    """Add the lines of the package that this thread executes."""
    prefix = f"{PACKAGE}{os.sep}"

    def local(frame: types.FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename.removeprefix(prefix), frame.f_lineno))
        return local

    def enter(frame: types.FrameType, event: str, _: object) -> Any:
        return local if frame.f_code.co_filename.startswith(prefix) else None

    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(None)


def _forked(work: Callable[[Callable[[object], None]], None]) -> tuple[list[Any], str]:
    """Run `work` in a fork, and return what it sent and how it ended: "", "TIME" by its timer, or "CRASH"."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(reading)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            work(lambda value: _send(writing, value))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        sent = [json.loads(line) for line in pipe]
    _, status = os.waitpid(child, 0)
    timed_out = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return sent, "TIME" if timed_out else "CRASH" if status else ""


def _send(pipe: int, value: object) -> None:
    data = f"{json.dumps(value)}\n".encode()
    while data:
        data = data[os.write(pipe, data) :]


def _passes(item: pytest.Item, seconds: float) -> bool:
    """Run one test and say whether it passed or was skipped; end the process after `seconds` of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    reports = runtestprotocol(item, nextitem=None, log=False)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return not any(report.failed for report in reports)


def _apply(mutant: Mutant) -> int:
    """Replace the code of the function wherever it is held; return how many functions that changes."""
    path, (name, line), changed = str(PACKAGE / mutant.file), mutant.function, 0
    for candidate in gc.get_objects():
        if isinstance(candidate, types.FunctionType):
            code = candidate.__code__
            if code.co_filename == path and code.co_qualname == name and code.co_firstlineno == line:
                candidate.__code__ = mutant.code
                changed += 1
    return changed


class Check:
    """A pytest plugin that runs mutants in place of the tests."""

    def __init__(self, count: int, seed: int, seconds: float, record: Sequence[str], kept: Path | None) -> None:
        self.count, self.seed, self.seconds, self.files, self.kept = count, seed, seconds, tuple(record), kept
        self.executed = 0
        """How many lines the recorded tests execute."""
        self.rows: list[tuple[Mutant, str, bool]] = []
        """Each mutant, the test that catches it or what became of it, and whether it is caught."""
        self._sound: dict[str, bool] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Record, draw, and run."""
        gc.unfreeze()  # `gc.get_objects` has to see the functions
        torch.set_num_threads(1)
        items = {item.nodeid: item for item in session.items}
        records = self._records([item for item in session.items if self._is_recorded(item)])
        readers: dict[Line, list[str]] = defaultdict(list)
        for test, (_, lines) in sorted(records.items(), key=lambda entry: entry[1][0]):
            for line in lines:
                readers[line].append(test)
        self.executed = len(readers)
        print(f"{len(records)} tests execute {len(readers)} lines", flush=True)
        for mutant in drawn(list(readers), self.count, self.seed):
            near = [items[test] for test in readers[mutant.file, mutant.line] if test in items]
            room = [item for item in session.items if _is_of_room(item, mutant.room.removesuffix(".py"))]
            room.sort(key=lambda item: -_closeness(item, mutant))
            verdict, caught = self._verdict(mutant, {item.nodeid: item for item in (*near, *room)})
            self.rows.append((mutant, verdict, caught))
            print(f"{mutant.file}:{mutant.line}  {mutant.mutation}\n    {verdict}", flush=True)
        return True

    def _is_recorded(self, item: pytest.Item) -> bool:
        if self.files:
            return item.nodeid.startswith(self.files)
        return item.get_closest_marker("quick") is not None

    def _records(self, items: Sequence[pytest.Item]) -> dict[str, tuple[float, list[Line]]]:
        """Return the CPU seconds and the lines of each test that passes."""
        if self.kept and self.kept.exists():
            stored = json.loads(self.kept.read_text(encoding="utf-8"))
            return {
                test: (seconds, [(file, line) for file, line in lines]) for test, (seconds, lines) in stored.items()
            }
        records: dict[str, tuple[float, list[Line]]] = {}
        for item in items:
            sent, end = _forked(lambda send, item=item: send(_record(item, self.seconds)))  # type: ignore[misc]
            passed, seconds, lines = sent[0] if sent else (False, 0.0, [])
            if passed:
                records[item.nodeid] = seconds, [(file, line) for file, line in lines]
            else:
                print(f"not recorded: {item.nodeid} {end or 'failed'}", flush=True)
        if self.kept:
            self.kept.write_text(json.dumps(records), encoding="utf-8")
        return records

    def _verdict(self, mutant: Mutant, tests: Mapping[str, pytest.Item]) -> tuple[str, bool]:
        """Return the test that catches the mutant, or what became of it, and whether it is caught."""
        unsound: set[str] = set()
        while True:

            def work(send: Callable[[object], None]) -> None:
                if not _apply(mutant):
                    raise RuntimeError(f"no function {mutant.function} in {mutant.file}")
                for test, item in tests.items():
                    if test in unsound:
                        continue
                    if time.process_time() > self.seconds:
                        break
                    send(test)
                    if not _passes(item, self.seconds):
                        send("failed")
                        return
                send("survived")

            sent, end = _forked(work)
            if not sent:
                return "not applied", False
            if sent[-1] == "survived":
                return f"SURVIVED {len(sent) - 1} of {len(tests)} tests", False
            test = sent[-2] if sent[-1] == "failed" else sent[-1]
            if self._passes_alone(tests[test]):
                return f"{test}{f' ({end})' if end else ''}", True
            unsound.add(test)

    def _passes_alone(self, item: pytest.Item) -> bool:
        """Return whether the test passes without a mutation."""
        if item.nodeid not in self._sound:
            sent, _ = _forked(lambda send: send(_passes(item, self.seconds)))
            self._sound[item.nodeid] = sent == [True]
        return self._sound[item.nodeid]


def _is_of_room(item: pytest.Item, room: str) -> bool:
    """Return whether the test is in the folder of the room, or its file imports the room."""
    return item.nodeid.startswith(f"tests/{room}/") or f"quark_fx.{room}" in _source(item.path)


def _closeness(item: pytest.Item, mutant: Mutant) -> int:
    """Return how many of these the test's file names: the mutated function, its module, and the module's file."""
    module, name = Path(mutant.file).with_suffix(""), mutant.function[0].rpartition(".")[2]
    source = _source(item.path)
    return sum((name.strip("_") in source, ".".join(module.parts) in source, module.name in item.path.stem))


@cache
def _source(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _record(item: pytest.Item, seconds: float) -> tuple[bool, float, list[Line]]:
    """Run a test, and return whether it passed, its CPU seconds, and the lines it executes."""
    lines: set[Line] = set()
    start = time.process_time()
    with _recording(lines):
        passed = _passes(item, seconds)
    return passed, time.process_time() - start, sorted(lines)


@experiment(page="mutants.md")
def main(
    count: Annotated[int, "how many mutants"] = 60,
    seed: Annotated[int, "of the draw"] = 0,
    seconds: Annotated[float, "CPU seconds of the tests of one mutant"] = 120,
    record: Annotated[Sequence[str], "beginnings of names of the recorded tests; default: `-m quick`"] = (),
    kept: Annotated[Path | None, "file for the recorded lines, read if it is there"] = None,
) -> Pages:
    """Yield the page and return 1 if too many mutants survive."""
    check = Check(count, seed, seconds, record, kept)
    pytest.main(["-s", "-p", "no:cacheprovider", f"--rootdir={ROOT}", *_TESTS], plugins=[check])
    caught = sum(caught for *_, caught in check.rows)
    rows = [(f"{one.file}:{one.line}", one.mutation.replace("|", "\\|"), verdict) for one, verdict, _ in check.rows]
    yield f"""# Mutation check

Written by `python -m benchmarks.mutants --count {count} --seed {seed} --write`, whose docstring says what is measured.
{caught} of {len(rows)} mutants are caught; the goal is {GOAL:.0%}. The recorded tests execute {check.executed:,} lines.

{table(("line", "mutation", "caught by"), rows)}
"""
    return int(not rows or caught < GOAL * len(rows))


_TESTS = (str(PACKAGE), str(ROOT / "tests"))

if __name__ == "__main__":
    main()
