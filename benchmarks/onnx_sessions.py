"""What measurements beside ONNX Runtime's quantizer share: its reader of batches, sessions, and their latencies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnxruntime
from onnxruntime.quantization import CalibrationDataReader
from torch import Tensor

_PAUSE = 0.2
"""Seconds before each file's turn, in which the threads of the one before stop spinning: on as many cores as threads
they would take one of them."""


class Reader(CalibrationDataReader):  # type: ignore[misc]
    """Hands calibration batches, tensors by input, to the quantizer."""

    def __init__(self, batches: Sequence[Mapping[str, Tensor]]) -> None:
        self.batches: Iterator[Mapping[str, Tensor]] = iter(batches)

    def get_next(self) -> dict[str, Any] | None:
        """Return the next batch, `None` after the last."""
        batch = next(self.batches, None)
        return None if batch is None else {name: value.numpy() for name, value in batch.items()}


def session(path: Path, threads: int) -> onnxruntime.InferenceSession:
    """Return a session with default settings and `threads` threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def latencies(
    paths: Mapping[str, Path],
    inputs: Sequence[Tensor],
    threads: int,
    rounds: int,
    opened: Callable[[Path, int], Any] = session,
) -> dict[str, list[float]]:
    """Return, for every file, the median milliseconds of 5 runs, `rounds` times, the files in turn.

    Args:
        paths: by row.
        inputs: of every file.
        threads: of a run.
        rounds: after one that warms up.
        opened: returns a session, in another runtime perhaps.
    """
    sessions = {row: opened(path, threads) for row, path in paths.items()}
    result: dict[str, list[float]] = {row: [] for row in sessions}
    for round_ in range(rounds + 1):
        for row, run in sessions.items():
            feed = {i.name: value.numpy() for i, value in zip(run.get_inputs(), inputs, strict=True)}
            time.sleep(_PAUSE)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                run.run(None, feed)
                times.append(1e3 * (time.perf_counter() - start))
            if round_:  # the first one warms up
                result[row].append(statistics.median(times))
    return result
