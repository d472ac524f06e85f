"""Shared captures for tests: capture takes most of the time to quantize a small network.

The fixture `captured_once` of `conftest.py` covers every session and call of `qfx.capture_graph` in a process. Models
of the same structure and code share a capture: it runs on fake tensors, which have no values. A graph that has
constants of its own, such as tables that the model computes, is shared by models and batches of equal values.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quark_fx.capture.capture import Captured, capture_graph
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import copy_graph

_LIMIT = 512
"""Number of captures that are kept."""


@dataclass(frozen=True)
class _Template:
    """A stored capture, from which copies are made.

    Attributes:
        captured: the capture of the first model, with its own constants.
        model_names: name in the model by name in the graph, for each parameter and buffer.
        code: the traced `forward` functions.
        issued: the warnings of the capture.
        digest: of all values of the model and the batch, for a graph that has constants of its own.
    """

    captured: Captured
    model_names: dict[str, str]
    code: list[Callable[..., Any]]
    issued: list[warnings.WarningMessage]
    digest: str | None

    @classmethod
    def made_of(cls, captured: Captured, arguments: Any, issued: list[warnings.WarningMessage]) -> _Template:
        model = arguments[0]
        graph, names = copy_graph(captured.module), {id(tensor): name for name, tensor in _tensors(model).items()}
        stored = stored_tensors(graph)
        model_names = {name: names[id(tensor)] for name, tensor in stored.items() if id(tensor) in names}
        _put(graph, {name: x.to("meta") if name in model_names else x.clone() for name, x in stored.items()})
        digest = _digest(*arguments, values=True) if stored.keys() - model_names.keys() else None
        return cls(replace(captured, module=graph), model_names, _code(model), issued, digest)

    def is_of(self, arguments: Any) -> bool:
        """Return whether a capture with these arguments holds the same constants."""
        return self.digest is None or self.digest == _digest(*arguments, values=True)

    def of(self, model: nn.Module) -> Captured:
        """Return a copy that reads the tensors of `model`, which has the same structure."""
        graph, tensors, names = copy_graph(self.captured.module), _tensors(model), self.model_names
        stored = stored_tensors(graph)
        _put(graph, {name: tensors[names[name]] if name in names else x.clone() for name, x in stored.items()})
        return replace(self.captured, module=graph, signature=copy.deepcopy(self.captured.signature))


class Captures:
    """A replacement for `capture_graph` that copies an earlier capture of a model with the same structure."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Template] = OrderedDict()

    def __call__(self, model: Any, example_batch: Any = None, *, dynamic_shapes: Any = None) -> Captured:
        """Return a new capture, or a copy of a stored one; either issues the warnings of the capture."""
        arguments = (model, example_batch, (dynamic_shapes, str(torch.get_default_dtype())))
        key = _digest(*arguments, values=False) if isinstance(model, nn.Module) else None
        template = None if key is None else self._known.get(key)
        if template is not None and template.code == _code(model) and template.is_of(arguments):
            captured, issued = template.of(model), template.issued
        else:
            with warnings.catch_warnings(record=True) as issued:
                warnings.simplefilter("always")
                captured = capture_graph(model, example_batch, dynamic_shapes=dynamic_shapes)
            if key is not None:
                self._known[key] = _Template.made_of(captured, arguments, issued)
                if len(self._known) > _LIMIT:
                    self._known.popitem(last=False)
        for one in issued:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        return captured


CAPTURES = Captures()
"""Captures of this process."""


def _code(model: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that a capture traces; some tests replace them."""
    return [type(module).forward for module in model.modules()]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; a shared tensor is listed under each of its names."""
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for pairs in named for name, tensor in pairs}


def _put(graph: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = graph.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = tensor  # type: ignore[assignment]


class _Pickler(pickle.Pickler):
    """Pickles each tensor as a digest of its layout, the index of its storage, and, if they are read, its values.

    The folder that a model was loaded from, and the files that it opens, are left out: each test has its own. So is
    what `generate` reads. Equal strings are written alike, whether or not they are one object.
    """

    def __init__(self, file: io.BytesIO, unread: Iterable[Tensor], folders: frozenset[str]) -> None:
        super().__init__(file)
        self._places: dict[tuple[int, Any], int] = {}
        self._unread = {id(tensor) for tensor in unread}
        self._folders = folders

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            if isinstance(obj, Path) or (isinstance(obj, str) and obj in self._folders):
                return "folder"
            if isinstance(obj, str):
                return f"text {obj}"
            return "generation" if type(obj).__name__ == "GenerationConfig" else None
        place = self._places.setdefault((obj.untyped_storage().data_ptr(), obj.storage_offset()), len(self._places))
        layout = (type(obj).__name__, obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad, str(obj.device))
        if id(obj) in self._unread:
            return str((layout, place))
        values = obj.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
        return str((layout, place, hashlib.sha256(values).hexdigest()))


def _digest(model: nn.Module, batch: Any, settings: Any, *, values: bool) -> str | None:
    """Return a digest of a model and a batch, with or without the values of tensors; `None` if they do not pickle."""
    tensors = [*_tensors(model).values(), *(leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))]
    unread = () if values else tensors
    configs = [getattr(module, "config", None) for module in model.modules()]
    folders = frozenset(str(path) for config in configs if (path := getattr(config, "name_or_path", None)))
    file = io.BytesIO()
    try:
        _Pickler(file, unread, folders).dump((model, batch, settings))
    except Exception:  # of any kind: local classes and functions, closed files, ...
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()
