"""Test cases that the suite skips because other cases in the same matrix run the same code.

    python -m benchmarks.matrices [ARGUMENTS OF PYTEST]

Tests mark these cases `whole`, and pytest skips them by default. This command runs them on all cores (`-m whole`).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the cases and exit with the status of pytest."""
    command = [sys.executable, "-m", "pytest", "-m", "whole", "-n", "auto", "--dist", "loadfile", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=False).returncode)


if __name__ == "__main__":
    main()
