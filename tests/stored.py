"""Changes to a stored model by somebody who keeps its digests right, as an attacker would."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor

from quark_fx.model.model_directory import document_text, tensor_file


def read(directory: Path) -> dict[str, Any]:
    """Return what `graph.json` says about a model."""
    model: dict[str, Any] = json.loads((directory / "graph.json").read_text())["model"]
    return model


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change what `graph.json` says, and its digest."""
    model = read(directory)
    change(model)
    (directory / "graph.json").write_text(document_text(model))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return the stored tensors by the names the model had for them."""
    names = read(directory)["tensors"]
    return {names[name]: tensor for name, tensor in load_file(tensor_file(directory)).items()}


def replace_tensors(directory: Path, content: dict[str, Tensor] | bytes) -> None:
    """Put other tensors, by their names in the graph, or other bytes in the place of a model's."""
    content = content if isinstance(content, bytes) else save(content)
    digest = hashlib.sha256(content).hexdigest()
    (directory / f"tensors-{digest[:32]}.safetensors").write_bytes(content)
    edit(directory, lambda model: model.update(tensor_file=digest))


__all__ = ["edit", "read", "replace_tensors", "tensors_of"]
