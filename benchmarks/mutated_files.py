"""Read files that were changed at random: stored models, checkpoints, manifests, configurations.

    python -m benchmarks.mutated_files [--count COUNT] [--first FIRST]

Each case changes fields or bytes of a good file, or makes a stored graph that calls an operator with arguments of any
values (`tests/mutations.py`); reads it in a process with a limit on memory, and calls the result. A process that ends
is counted as a crash and continued after the case. Capitals mark faults: an exception other
than `QuarkError`, a crash, more than 60 seconds, code of a file that runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from benchmarks.experiment import experiment

_TESTS = Path(__file__).resolve().parent.parent / "tests"
_BATCH = 1000


def run(source: Path, cases: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the kind of each case and its result.

    Args:
        source: Folder of the good files, made by `mutations.make`.
        cases: Numbers of the cases.
    """
    results: dict[int, tuple[str, str]] = {}
    path = os.pathsep.join([str(_TESTS), str(_TESTS.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pending = list(cases)
    while pending:
        now = pending[:_BATCH]
        command = [sys.executable, str(_TESTS / "mutations.py"), str(source), *map(str, now)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=120 + 30 * len(now)
            )
            output, status = done.stdout, f"CRASHED with {done.returncode}: {done.stderr[-300:]}"
        except subprocess.TimeoutExpired as error:
            output, status = (error.stdout or b"").decode(), "HANG"
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
        results |= {line[0]: (line[1], line[2]) for line in lines if len(line) == 3}
        begun = [line[0] for line in lines if len(line) == 1]
        if not begun:
            raise RuntimeError(status)
        if begun[-1] not in results:
            results[begun[-1]] = ("unknown", status)
        pending = pending[len(begun) :]
    return results


@experiment()
def main(
    count: int = 10_000,
    first: Annotated[int, "from 1000000000 on: attacks that were chosen"] = 0,
) -> None:
    """Run the cases and print the counts."""
    with tempfile.TemporaryDirectory() as folder:
        code = "import sys; from pathlib import Path; from mutations import make; make(Path(sys.argv[1]))"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_TESTS), str(_TESTS.parent)])}
        subprocess.run([sys.executable, "-c", code, folder], env=environment, check=True, capture_output=True)
        results = run(Path(folder), range(first, first + count))
    counts = Counter((kind, outcome.partition(":")[0]) for kind, outcome in results.values())
    for (kind, outcome), number in sorted(counts.items()):
        print(f"{number:6} {kind}: {outcome}")
    wrong = {case: outcome for case, (_, outcome) in results.items() if outcome[:1].isupper()}
    for case, outcome in sorted(wrong.items())[:50]:
        print(f"case {case}: {outcome}")
    print(f"{len(results)} changed files, {len(wrong)} wrong")


if __name__ == "__main__":
    main()
