"""The cells of the tests' matrices that the suite leaves out, because other cells run the same code.

    python -m benchmarks.matrices [ARGUMENTS OF PYTEST]

Tests mark these cells `whole`, and pytest leaves them out unless it is told `-m whole`, as it is here, on every core.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Run the cells, and exit as pytest does."""
    command = [sys.executable, "-m", "pytest", "-m", "whole", "-n", "auto", "--dist", "loadfile", *sys.argv[1:]]
    sys.exit(subprocess.run(command, cwd=Path(__file__).resolve().parent.parent, check=False).returncode)


if __name__ == "__main__":
    main()
