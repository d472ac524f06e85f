"""Weights of experts: stacked tensors in the model, one matrix per expert and projection in a checkpoint.

Codes and scales are split the way transformers splits a stack when it saves a model.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from quark_fx.errors import ExportError
from quark_fx.export.packing import matrix_of
from quark_fx.model.constants import Constant
from quark_fx.numbers.quantized_tensor import QuantizedTensor

_SUFFIX = ".weight"


def as_saved(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a transformers model as its checkpoints store them, with stacks split into matrices."""
    models, loading = (importlib.import_module(f"transformers.{n}") for n in ("modeling_utils", "core_model_loading"))
    once = models.remove_tied_weights_from_state_dict(dict(tensors), model)
    saved: dict[str, Tensor] = loading.revert_weight_conversion(model, once)
    return saved


def taken_apart(model: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the matrices that a checkpoint stores for the tensor `name`, keyed by module.

    The dictionary is empty if `tensor` is not a stack or checkpoints do not split it.
    """
    if tensor.dim() != 3:
        return {}
    parts = as_saved(model, {name: tensor})
    apart = all(key.endswith(_SUFFIX) and part.dim() == 2 for key, part in parts.items())
    return {key.removesuffix(_SUFFIX): part for key, part in parts.items()} if apart else {}


def matrices(model: Any, name: str, constant: Constant) -> dict[str, QuantizedTensor]:
    """Return the matrices of a quantized stack, keyed by module; empty if checkpoints do not split the stack.

    Raises:
        ExportError: If a checkpoint cannot represent the matrices.
    """
    stored = constant.quantized
    if stored is None:
        return {}
    codes, scale, zero_point = stored.codes, stored.scale, stored.zero_point
    if not taken_apart(model, name, scale if scale.dim() == 3 else codes):
        return {}
    if stored.axis != 2 or scale.shape[:2] != codes.shape[:2]:
        raise ExportError(
            "the scales of this stack are not per channel or group of inputs; set granularity='channel' or 'group'"
        )
    if not _moves_rows(model, name, codes):
        raise ExportError(
            "transformers changes this stack when saving in a way that would break its codes; leave the stack in float"
        )
    parts, scales, zero_points = (taken_apart(model, name, t) for t in (codes, scale, zero_point.expand_as(scale)))

    def part(key: str) -> QuantizedTensor:
        return QuantizedTensor.of(parts[key], scales[key], zero_points[key], stored.format, 1, stored.block_size)

    return {key: matrix_of(replace(constant, stored=part(key))) for key in parts}


def stacked_rows(constant: Constant) -> QuantizedTensor:
    """Return one matrix with the rows of all matrices of a stack, which `matrices` is able to split."""
    stored = constant.quantized
    assert stored is not None
    codes, scale = stored.codes.flatten(0, 1), stored.scale.flatten(0, 1)
    zero_point = stored.zero_point.expand_as(stored.scale).flatten(0, 1)
    rows = QuantizedTensor.of(codes, scale, zero_point, stored.format, 1, stored.block_size)
    return matrix_of(replace(constant, stored=rows))


def _moves_rows(model: Any, name: str, stack: Tensor) -> bool:
    """Tell whether splitting a stack only moves whole rows, so that each row of codes keeps its scales."""
    experts, outputs, _ = stack.shape
    columns = torch.arange(3)
    rows = torch.arange(experts * outputs).reshape(experts, outputs, 1) * len(columns)
    parts = list(taken_apart(model, name, rows + columns).values())
    if any(part.shape[1:] != columns.shape for part in parts):
        return False
    moved = torch.cat(parts)
    return torch.equal(moved[moved[:, 0].argsort()], (rows + columns).flatten(0, 1))


def name_patterns(names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    r"""Return regular expressions that match the names of experts' modules, with any number for the expert.

    A pattern ends before the name of the projection, which servers rename, unless a name in `others` begins the same
    way.

    >>> print(*name_patterns(["layers.0.experts.0.up", "layers.0.experts.1.up"]))
    ^layers[.]0[.]experts[.]\d+[.]
    >>> print(*name_patterns(["layers.0.experts.0.up"], ["layers.0.experts.0.down"]))
    ^layers[.]0[.]experts[.]\d+[.]up$
    """
    divided = {_cut(name)[0] for name in others}
    return list(
        dict.fromkeys(
            rf"^{literal(before)}[.]\d+[.]" + f"{literal(after)}$" * (before in divided)
            for before, after in map(_cut, names)
        )
    )


def common_paths(names: Iterable[str]) -> list[str]:
    """Return the distinct prefixes of the names of experts' modules, up to the number of the expert.

    >>> common_paths(["layers.0.experts.0.up", "layers.0.experts.1.down"])
    ['layers.0.experts']
    """
    return list(dict.fromkeys(before for before, _ in map(_cut, names)))


def literal(name: str) -> str:
    """Return a regular expression that matches `name` literally."""
    return "[.]".join(map(re.escape, name.split(".")))


def _cut(name: str) -> tuple[str, str]:
    """Return the parts of a name before and after the number of the expert."""
    parts = name.split(".")
    expert = max((i for i, part in enumerate(parts) if part.isdigit()), default=0)
    return ".".join(parts[:expert]), ".".join(parts[expert + 1 :])


__all__ = ["as_saved", "common_paths", "literal", "matrices", "name_patterns", "stacked_rows", "taken_apart"]
