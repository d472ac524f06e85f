"""Checks that readers of a checkpoint, who build the class from its configuration, would build the same model."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from quark_fx.errors import ExportError
from quark_fx.model.stored_weights import computed_leaves
from quark_fx.system.isolation import quiet

_LISTED = 6
_LIBRARIES = ("transformers", "transformers_modules")
"""Packages whose classes readers can import: transformers, and code from a repository that the checkpoint names."""

_IMMATERIAL = ("training", "inplace", "padding_idx")
"""Attributes of modules that do not change their results in eval mode."""


def require_reader(model: nn.Module) -> None:
    """Raise `ExportError` unless readers of a checkpoint can find the class of a model."""
    kind: Any = type(model)
    name = kind.__name__
    if hasattr(model, "merge_and_unload"):
        raise ExportError(
            f"{name} has adapters, which a checkpoint cannot store; quantize the model that "
            "model.merge_and_unload() returns"
        )
    transformers = importlib.import_module("transformers")
    if not isinstance(model, transformers.PreTrainedModel):
        raise ExportError(
            f"{name} is not a Transformers model, which checkpoints hold; use export.onnx (in check: export='qdq'), or "
            "qmodel.save(directory)"
        )
    if kind.__module__.partition(".")[0] in _LIBRARIES or kind._auto_class is not None:
        return
    config: Any = model.config
    if config.model_type not in transformers.CONFIG_MAPPING:  # no auto class reads it, so users call the class itself
        return
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    mappings = [value for key, value in vars(auto).items() if key.endswith("_MAPPING")]
    registered = [kinds for mapping in mappings for kinds in getattr(mapping, "_extra_content", {}).values()]
    if not any(kind is one or (isinstance(one, tuple) and kind in one) for one in registered):
        raise ExportError(
            f"readers of a checkpoint cannot find the class {kind.__module__}.{name}; register it "
            f"(AutoModelForCausalLM.register({type(model.config).__name__}, {name}, exist_ok=True), or "
            f"{name}.register_for_auto_class), or use qmodel.save(directory)"
        )


def require_plain(model: Any) -> None:
    """Raise `ExportError` unless the class, built from the configuration, has the modules and tensors of `model`."""
    name = type(model).__name__
    with quiet():
        try:
            with torch.device("meta"):  # as transformers does; real weights could exhaust memory
                built = type(model)(copy.deepcopy(model.config))
        except Exception as error:  # the model's code may raise any error
            raise ExportError(
                f"{name} cannot be built from its configuration by readers of a checkpoint: "
                f"{type(error).__name__}: {error}; use qmodel.save(directory)"
            ) from error
    if differences := list(_differences(model, built)):
        more = f"\n  and {len(differences) - _LISTED} more" * (len(differences) > _LISTED)
        raise ExportError(
            f"readers of a checkpoint build {name} from config.json, and this model differs:\n  "
            + "\n  ".join(differences[:_LISTED])
            + f"{more}\nUndo these changes and quantize again (merge adapters: model.merge_and_unload(); change the "
            "configuration instead of a module), or use qmodel.save or export.onnx, which store its computation"
        )


def _differences(model: nn.Module, built: nn.Module) -> Iterator[str]:
    """Yield the differences between the modules of a model and the modules of the model that a reader builds."""
    ours, theirs = (dict(m.named_modules(remove_duplicate=False)) for m in (model, built))
    # Skip parametrized modules: the export stores their computed weights, or raises an error elsewhere.
    parametrized = [name for names in (ours, theirs) for name, module in names.items() if computed_leaves(module)]
    for name, module in ours.items():
        if any(name == path or name.startswith(f"{path}.") for path in parametrized):
            continue
        where, other = name or "the model", theirs.get(name)
        parent = name.rpartition(".")[0]
        if other is None:
            if type(theirs.get(parent)) is type(ours[parent]):  # otherwise, the parent is reported
                yield f"{where}: an additional {type(module).__name__}"
        elif type(other) is not type(module):
            yield f"{where}: {_named(module)} instead of {_named(other)}"
        else:
            mine, other_tensors = _tensors(module), _tensors(other)
            for part in sorted(mine.keys() | other_tensors.keys()):
                if mine.get(part) != other_tensors.get(part):
                    yield f"{where}.{part}: shape {mine.get(part)} instead of {other_tensors.get(part)}"
            yield from (f"{where}.{table}: other values" for table in _other_tables(module, other, built))
            if name and not isinstance(module, nn.modules.dropout._DropoutNd):
                yield from (f"{where}.{difference}" for difference in _other_numbers(module, other))
    for name in sorted(theirs.keys() - ours.keys()):
        if name.rpartition(".")[0] in ours.keys() - set(parametrized):
            yield f"{name}: missing"


def _tensors(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters and buffers that a checkpoint stores for the module itself."""
    tensors = module._parameters | {
        k: t for k, t in module._buffers.items() if k not in module._non_persistent_buffers_set
    }
    return {name: tuple(tensor.shape) for name, tensor in tensors.items() if tensor is not None}


_UNSET = 77
"""Value that marks the elements of a buffer that `_init_weights` does not write."""

_BY_LENGTH = ("dynamic", "longrope")
"""Types of rotary embeddings whose tables depend on the length of the last batch."""


def _other_tables(module: nn.Module, other: nn.Module, built: Any) -> Iterator[str]:
    """Yield the names of non-persistent buffers whose values differ from the values that a reader computes.

    Args:
        module: Module of the exported model.
        other: Corresponding module of the model that a reader builds, on the meta device.
        built: Model that a reader builds; its `_init_weights` computes the non-persistent buffers.
    """
    names = [name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None]
    if not names or any(kind in str(vars(module).get("rope_type")) for kind in _BY_LENGTH):
        return
    computed = copy.deepcopy(other).to_empty(device="cpu", recurse=False)
    with torch.no_grad(), suppress(Exception):  # the model's code may raise any error
        for buffer in computed.buffers(recurse=False):
            buffer.fill_(_UNSET)
        built._init_weights(computed)
    for name in sorted(names):
        mine, theirs = module._buffers[name], computed._buffers.get(name)
        if mine is None or theirs is None or mine.is_meta or bool((theirs == _UNSET).all()):
            continue
        rounding = torch.finfo(mine.dtype).eps if mine.is_floating_point() else 0.0
        same = mine.shape == theirs.shape and torch.allclose(
            mine.cpu().double(), theirs.double(), rtol=rounding, atol=0
        )
        if not same:
            yield name


def _named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _other_numbers(module: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield the float attributes that differ, such as an epsilon.

    In classes derived from torch's modules, integers, strings, tuples, and `None` are also compared.
    """
    of_torch = any(kind.__module__.startswith("torch.nn.") and kind is not nn.Module for kind in type(module).__mro__)
    kinds = (float, int, str, tuple, type(None)) if of_torch else float
    for name, value in vars(other).items():
        mine = vars(module).get(name, value)
        compared = isinstance(value, kinds) and isinstance(mine, kinds) and not name.startswith("_")
        if compared and name not in _IMMATERIAL and mine != value:
            yield f"{name}: {mine!r} instead of {value!r}"


__all__ = ["require_plain", "require_reader"]
