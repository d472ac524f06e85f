"""Weights of experts, which models hold in stacks and checkpoints apart: a matrix for each projection of each expert.

What transformers does to a stack when it saves a model is done to codes and scales alike.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quark_fx.correspondence import Constant
from quark_fx.errors import ExportError
from quark_fx.export.packing import Matrix

_SUFFIX = ".weight"


def as_saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of a model of transformers as its checkpoints have them, stacks taken apart."""
    models, loading = (importlib.import_module(f"transformers.{n}") for n in ("modeling_utils", "core_model_loading"))
    once = models.remove_tied_weights_from_state_dict(dict(tensors), model)
    saved: dict[str, Tensor] = loading.revert_weight_conversion(model, once)
    return saved


def taken_apart(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the matrices that a checkpoint has for the stack `name`, by the modules they belong to; empty if none."""
    if tensor.dim() != 3:
        return {}
    parts = as_saved(model, {name: tensor})
    apart = len(parts) > 1 and all(key.endswith(_SUFFIX) and part.dim() == 2 for key, part in parts.items())
    return {key.removesuffix(_SUFFIX): part for key, part in parts.items()} if apart else {}


def matrices(model: Any, name: str, constant: Constant) -> dict[str, Matrix]:
    """Return the matrices of a quantized stack by the modules they belong to; empty if checkpoints hold no stack.

    Raises:
        ExportError: if a checkpoint cannot hold them.
    """
    codes = taken_apart(model, name, constant.tensor)
    if not codes or constant.scale is None or constant.zero_point is None:
        return {}
    if constant.scale.dim() != 3:
        raise ExportError("a stack with one scale; choose scales per channel or in groups")
    scales, zero_points, values = (
        taken_apart(model, name, t)
        for t in (constant.scale, constant.zero_point.expand_as(constant.scale), constant.value())
    )
    found = {}
    for key, part in codes.items():
        some = replace(constant, tensor=part, scale=scales[key], zero_point=zero_points[key], axis=1)
        found[key] = Matrix.of(some)
        if not torch.equal(found[key].value().to(constant.dtype), values[key]):
            raise ExportError("what transformers does to this stack as it saves it cannot be done to its codes")
    return found


def name_patterns(names: Iterable[str]) -> list[str]:
    r"""Return regular expressions that match the names of experts' modules, whichever the expert.

    >>> print(*name_patterns(["layers.0.experts.0.up", "layers.0.experts.1.up"]))
    ^layers[.]0[.]experts[.]\d+[.]up$
    """
    return list(dict.fromkeys(rf"^{_literal(before)}[.]\d+[.]{_literal(after)}$" for before, after in map(_cut, names)))


def common_paths(names: Iterable[str]) -> list[str]:
    """Return what the names of experts' modules begin with, whichever the expert.

    >>> common_paths(["layers.0.experts.0.up", "layers.0.experts.1.down"])
    ['layers.0.experts']
    """
    return list(dict.fromkeys(before for before, _ in map(_cut, names)))


def _cut(name: str) -> tuple[str, str]:
    """Return what is before and after the number of the expert."""
    parts = name.split(".")
    expert = max((i for i, part in enumerate(parts) if part.isdigit()), default=0)
    return ".".join(parts[:expert]), ".".join(parts[expert + 1 :])


def _literal(name: str) -> str:
    return "[.]".join(map(re.escape, name.split(".")))


__all__ = ["as_saved", "common_paths", "matrices", "name_patterns", "taken_apart"]
