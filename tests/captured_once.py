"""Shared captures for tests: capture takes most of the time to quantize a small network, so equal models share one.

Tests call `quantize` from this module, or their file uses the fixture `captured_once` of `conftest.py`, which covers
every session in the file. Tests of `capture_graph` itself use neither.
"""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import tiny
import torch
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import session
from quark_fx.capture.capture import Captured, capture_graph
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import copy_graph

_LIMIT = 64
"""Number of captures that are kept."""


@dataclass(frozen=True)
class _Template:
    """A stored capture, from which copies are made.

    Attributes:
        captured: the capture of the first model, with its own constants.
        model_names: name in the model by name in the graph, for each parameter and buffer.
        code: the traced `forward` functions.
    """

    captured: Captured
    model_names: dict[str, str]
    code: list[Callable[..., Any]]

    @classmethod
    def made_of(cls, captured: Captured, model: nn.Module) -> _Template:
        graph, names = copy_graph(captured.module), {id(tensor): name for name, tensor in _tensors(model).items()}
        stored = stored_tensors(graph)
        model_names = {name: names[id(tensor)] for name, tensor in stored.items() if id(tensor) in names}
        _put(graph, {name: x.to("meta") if name in model_names else x.clone() for name, x in stored.items()})
        return cls(replace(captured, module=graph), model_names, _code(model))

    def of(self, model: nn.Module) -> Captured:
        """Return a copy that reads the tensors of `model`, an equal model."""
        graph, tensors, names = copy_graph(self.captured.module), _tensors(model), self.model_names
        stored = stored_tensors(graph)
        _put(graph, {name: tensors[names[name]] if name in names else x.clone() for name, x in stored.items()})
        return replace(self.captured, module=graph, signature=copy.deepcopy(self.captured.signature))


class Captures:
    """A replacement for `capture_graph` that copies an earlier capture of an equal model and batch."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Template] = OrderedDict()

    def __call__(self, model: Any, example_batch: Any = None, *, dynamic_shapes: Any = None) -> Captured:
        """Return a new capture, or a copy of a stored one."""
        settings = (dynamic_shapes, str(torch.get_default_dtype()))
        key = _digest((model, example_batch, settings)) if isinstance(model, nn.Module) else None
        template = None if key is None else self._known.get(key)
        if template is not None and template.code == _code(model):
            return template.of(model)
        captured = capture_graph(model, example_batch, dynamic_shapes=dynamic_shapes)
        if key is not None and not _warned(captured):
            self._known[key] = _Template.made_of(captured, model)
            if len(self._known) > _LIMIT:
                self._known.popitem(last=False)
        return captured


_captures = Captures()


def quantize(model: Any, config: Any, data: Iterable[Any] | None = None, **options: Any) -> qfx.QuantizedModel:
    """Call `tiny.quantize` with shared captures."""
    if vars(session)["capture_graph"] is not capture_graph:
        return tiny.quantize(model, config, data, **options)
    with mock.patch.object(session, "capture_graph", _captures):
        return tiny.quantize(model, config, data, **options)


def _code(model: nn.Module) -> list[Callable[..., Any]]:
    """Return the functions that a capture traces; some tests replace them."""
    return [type(module).forward for module in model.modules()]


def _warned(captured: Captured) -> bool:
    """Tell whether the capture may have issued a warning about a fixed batch size; a copy would not."""
    return any(shape and shape[0] is not None for shape in captured.signature.input_shapes)


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
    """Pickles each tensor as a digest of its values, its layout, and the index of its storage."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._places: dict[tuple[int, Any], int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return None
        place = self._places.setdefault((obj.untyped_storage().data_ptr(), obj.storage_offset()), len(self._places))
        values = obj.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().tobytes()
        layout = (type(obj).__name__, obj.dtype, tuple(obj.shape), obj.stride(), obj.requires_grad, str(obj.device))
        return str((layout, place, hashlib.sha256(values).hexdigest()))


def _digest(value: Any) -> str | None:
    """Return a digest of everything that a model and a batch hold; `None` if they cannot be pickled."""
    file = io.BytesIO()
    try:
        _Pickler(file).dump(value)
    except Exception:  # of any kind: local classes and functions, closed files, ...
        return None
    return hashlib.sha256(file.getvalue()).hexdigest()
