"""Run a sample of the tests with the oldest releases that `pyproject.toml` allows.

    python -m benchmarks.oldest            # builds the environment, some 4 GB, and runs the sample
    python -m benchmarks.oldest --venv DIR # keeps it there, and uses it again

Exits with pytest's status. Requirements without a lower bound are installed as the registry has them.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("onnx", "hf")
TOOLS = ("pytest", "hypothesis", "torchvision")
"""What the sample imports besides the package."""
SAMPLE = (
    *(
        "tests/numbers/test_formats.py",
        "tests/system/test_isolation.py",
        "tests/test_newcomers.py",
        "tests/model/test_serialization.py",
    ),
    *(
        "tests/export/test_export.py::test_every_preset_agrees_with_onnx_runtime_for_every_batch_size",
        "tests/passes/test_hqq.py",
    ),
)
LEFT_OUT = "not wrapped_model_of_transformers and not recurrent"
"""torch 2.11 does not take shapes for what reaches a model through `**kwargs`, and translates a recurrent layer of
varying length to a slice that ONNX Runtime 1.24 refuses."""


def floors(pyproject: str) -> list[str]:
    """Return the requirements of the package and `EXTRAS`, each at its lower bound."""
    project = tomllib.loads(pyproject)["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(item for extra in EXTRAS for item in extras[extra])]
    return [re.sub(r"^([\w-]+)>=([\w.]+).*", r"\1==\2", item) for item in wanted]


def main() -> int:
    """Build the environment if there is none, say what it holds, and run the sample."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, help="where the environment is kept")
    given = parser.parse_args().venv
    with tempfile.TemporaryDirectory() as folder:
        venv = given or Path(folder, "venv")
        python = venv / ("Scripts" if os.name == "nt" else "bin") / "python"
        wanted = floors((ROOT / "pyproject.toml").read_text())
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *wanted, *TOOLS], check=True)
        print(f"python {sys.version.split()[0]}:", ", ".join(wanted), flush=True)
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", LEFT_OUT, *SAMPLE]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
