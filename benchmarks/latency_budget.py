"""What `search` finds under a budget of latency, beside the candidates for all operators.

    python -m benchmarks.latency_budget [--shares 0.5 0.7] [--write]

The encoder all-MiniLM-L6-v2 with its own weights, from int8_static and float for each operator, at shares of the time
that float takes. A call is 16 sentences, on one thread. The search estimates and measures errors on calibration
sentences; the cosine between the vectors of the quantized and the float model is that of 64 others. Goal: every mixture
keeps its budget, and is nearer to float than int8 everywhere. `--write` updates `results/latency_budget.md`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import quark_fx as qfx
from benchmarks.common import RESULTS, one_thread, table
from benchmarks.experiment import experiment
from benchmarks.real import minilm

PAGE = RESULTS / "latency_budget.md"

CANDIDATES = ["int8_static", "float"]


def measure(shares: Sequence[float]) -> str:
    """Return the page."""
    subject = minilm.load()
    rows: list[tuple[str, ...]] = []
    lines: list[str] = []
    for share in shares:
        found = qfx.search(
            subject.model,
            CANDIDATES,
            budget=qfx.Budget(latency=share),
            data=subject.calibration,
            timed_batch=subject.judged[0],
        )
        print(found, flush=True)
        assert found.float_latency is not None
        for one in found.verified:
            assert one.latency is not None
            cosine = ""
            if one is found.found:
                qmodel = qfx.quantize(subject.model, found.config, subject.calibration, progress=False)
                cosine = f"{subject.judge(qmodel)['cosine']:.4f}"
            ratio = one.latency / found.float_latency
            rows.append((f"{share:g}", one.name, f"{one.latency:.1f}", f"{ratio:.3f}", f"{one.error:.5f}", cosine))
        counts = Counter[str]()
        for choice in found:
            counts[choice.candidate] += len(choice.operators)
        got = ", ".join(f"{count} in {name}" for name, count in sorted(counts.items()))
        kept = "keeps it" if found.found.fits else "does not"
        lines.append(f"- {share:g}: {found.winner}, {got}; {kept}. The search took {found.seconds:.0f} s.")
    header = ("budget", "formats", "ms", "of float", "error", "cosine, other data")
    return f"""# The least error for a latency, measured

`search` under a budget of latency, as a share of what the float model takes in ONNX Runtime: all-MiniLM-L6-v2, 16
sentences a call, one thread, from {" and ".join(CANDIDATES)} for each operator. Latencies are medians of ratios to the
float model, which runs in turn; on one thread they are CPU time of its thread. The error is relative to the outputs'
square, on validation data of the search. The first row of a budget is what the search returned. Reproduce with
`python -m benchmarks.latency_budget`.

{table(header, rows)}

{chr(10).join(lines)}
"""


@experiment(page=PAGE.name)
def main(shares: Annotated[Sequence[float], "of the latency of float"] = (0.5, 0.7)) -> str:
    """Measure, and return the page."""
    with one_thread():
        return measure(shares)


if __name__ == "__main__":
    main()
