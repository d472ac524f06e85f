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

from quark_fx.export.runtime.runners import FileRunner, OnnxRuntimeRunner

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


def _opened(path: Path, threads: int) -> FileRunner:
    """Return the file in ONNX Runtime with default settings and `threads` threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return OnnxRuntimeRunner(path, options)


def latencies(
    paths: Mapping[str, Path],
    inputs: Sequence[Tensor],
    threads: int,
    rounds: int,
    opened: Callable[[Path, int], FileRunner] = _opened,
) -> dict[str, list[float]]:
    """Return, for every file, the median milliseconds of 5 runs, `rounds` times, the files in turn.

    Args:
        paths: by row.
        inputs: of every file.
        threads: of a run.
        rounds: after one that warms up.
        opened: returns a runner, of another runtime perhaps.
    """
    runners = {row: opened(path, threads) for row, path in paths.items()}
    result: dict[str, list[float]] = {row: [] for row in runners}
    for round_ in range(rounds + 1):
        for row, runner in runners.items():
            feed = {i.name: value.numpy() for i, value in zip(runner.inputs, inputs, strict=True)}
            time.sleep(_PAUSE)
            times = []
            for _ in range(5):
                start = time.perf_counter()
                runner.run_arrays(feed)
                times.append(1e3 * (time.perf_counter() - start))
            if round_:  # the first one warms up
                result[row].append(statistics.median(times))
    return result
