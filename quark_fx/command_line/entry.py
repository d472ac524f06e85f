"""Entry point of `quark-fx`, which reports missing packages."""

from __future__ import annotations

import os
import sys


def main() -> None:
    """Run the command line."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # hide progress bars of short reads
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"error: the command line needs {error.name}: pip install 'quark_fx[cli]'")
    from quark_fx.command_line.app import app

    app()
