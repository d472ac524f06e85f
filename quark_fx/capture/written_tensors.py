"""Undo the writes of a forward to the tensors of its model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class WrittenTensors(TorchDispatchMode):
    """A mode that copies the tensors of a model before an operator writes to their memory.

    Args:
        tensors: Tensors of the model.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # An alias keeps the memory that a tensor has now: a forward may assign another tensor to `tensor.data`.
        self._aliases = [(x, x.data) for x in tensors if x.layout == torch.strided and not x.is_meta]
        self._by_memory: dict[int, list[Tensor]] = {}
        for _, alias in self._aliases:
            self._by_memory.setdefault(memory_of(alias), []).append(alias)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments = [*zip(func._schema.arguments, args, strict=False)]
        arguments += [(one, kwargs[one.name]) for one in func._schema.arguments if one.name in (kwargs or {})]
        written = [x for one, x in arguments if one.alias_info is not None and one.alias_info.is_write]
        named = {one.name: x for one, x in arguments}
        if named.get("training"):  # the schemas of batch norms do not declare writes to the statistics
            written += [named.get("running_mean"), named.get("running_var")]
        for x in pytree.tree_leaves(written):
            if isinstance(x, Tensor) and x.layout == torch.strided:
                alias = self._by_memory.pop(memory_of(x), [])
                self._copies += [(tensor, tensor.clone()) for tensor in alias]
        return func(*args, **(kwargs or {}))

    def happened(self) -> bool:
        """Tell whether an operator wrote to a tensor, or the memory of a tensor was replaced."""
        return bool(self._copies) or not all(tensor.is_set_to(alias) for tensor, alias in self._aliases)

    def keep(self, tensors: dict[str, Any]) -> None:
        """Replace tensors with copies if `restore` would change them."""
        changing = {memory_of(tensor) for tensor, alias in self._aliases if not tensor.is_set_to(alias)}
        changing |= {memory_of(alias) for alias, _ in self._copies}
        copies: dict[int, Tensor] = {}
        for name, x in tensors.items():
            if isinstance(x, Tensor) and x.layout == torch.strided and memory_of(x) in changing:
                copy = x.detach().clone()
                replacement = nn.Parameter(copy, x.requires_grad) if isinstance(x, nn.Parameter) else copy
                tensors[name] = copies.setdefault(id(x), replacement)

    def restore(self) -> None:
        """Restore the memory and the values of each tensor."""
        with torch.no_grad():
            for tensor, alias in self._aliases:
                if not tensor.is_set_to(alias):
                    tensor.data = alias
            for alias, copy in self._copies:
                alias.copy_(copy)


def memory_of(x: Tensor) -> int:
    """Return the identity of the memory of a tensor."""
    storage: Any = x.untyped_storage()
    return int(storage._cdata)


__all__ = ["WrittenTensors", "memory_of"]
