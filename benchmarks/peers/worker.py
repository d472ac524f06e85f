"""The command line of a worker: one job, on one core, without a word from the libraries."""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import one_core


def work(description: str | None, run: Callable[[Path], None]) -> None:
    """Run the job whose file the command line names."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", type=Path)
    path = parser.parse_args().job
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with one_core():
        run(path)
