"""Where the packages are that ship weights and data."""

from __future__ import annotations

import importlib.util
from pathlib import Path


class MissingPackageError(ImportError):
    """A package with weights or data is not installed; the message says how to install it."""


def package(name: str, install: str) -> Path:
    """Return the folder of an installed package without importing it.

    Args:
        name: as it is imported.
        install: what follows `pip install`; without `--no-deps` most of these packages pull other frameworks in.

    Raises:
        MissingPackageError: if there is no such package.
    """
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(f"{name} is not installed; run: pip install --no-deps {install}")
    return Path(found.submodule_search_locations[0])
