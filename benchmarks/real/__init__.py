"""Trained models from packages that pip installs, one file each: `load()` returns the model and what judges it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))  # of the sentences
