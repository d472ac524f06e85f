"""Runners: one interface to run a model in torch, in transformers, or in a runtime for files, such as ONNX Runtime."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quark_fx.errors import ExportError, QuarkError
from quark_fx.export.runtime.session import open_session
from quark_fx.graph.signature import split_batch
from quark_fx.system.registry import Registry

if TYPE_CHECKING:
    import onnx_ir as ir


class Runner(ABC):
    """A model in a runtime. Calling a runner runs a batch.

    Attributes:
        runtime: Name of the runtime.
    """

    runtime: ClassVar[str]

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """Return the model's result for a batch, which has the same form as a batch of calibration data."""


class TorchRunner(Runner):
    """A runner of a module in eval mode, or of a function with the arguments of one.

    Raises:
        QuarkError: If the model is not callable, or is a module in training mode.
    """

    runtime = "torch"

    def __init__(self, model: Any) -> None:
        if isinstance(model, nn.Module) and model.training:
            raise QuarkError(
                f"the {type(model).__name__} is in training mode, where results are random; call eval() first"
            )
        if not callable(model):
            raise QuarkError(f"expected a model, its path, or a function, not {type(model).__name__}")
        self.model = model

    def __call__(self, batch: Any) -> Any:
        args, kwargs = split_batch(batch)
        try:
            with torch.no_grad():
                return self.model(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:  # errors of modules about their inputs
            if not isinstance(self.model, nn.Module) or isinstance(error, QuarkError):
                raise
            raise QuarkError(f"the {type(self.model).__name__} does not run on a batch: {error}") from error


@dataclass(frozen=True)
class FileInput:
    """An input of a file.

    Attributes:
        name: Name of the input.
        shape: Sizes of its dimensions, with `None` for a size that varies; `None` if the rank is unknown.
    """

    name: str
    shape: tuple[int | None, ...] | None = None


class FileRunner(Runner):
    """A runner of a file with named inputs and outputs, on the CPU and with the arithmetic that the file specifies.

    Args:
        path: File to run.
        edit: Function that edits the graph of an ONNX file before the runtime loads it.

    Attributes:
        runtime: Name of the runtime, which is also the name of its Python package.
        title: Name of the runtime in messages.
        extra: Extra of quark_fx (`pip install 'quark_fx[...]'`) that installs the runtime. Subclasses do not inherit
            it; without an extra, messages name the package `runtime`.
        workarounds: Module that registers the workarounds for the runtime (`register_workaround`), imported when the
            first file for it is written; empty if there is none.
        path: Path of the file.
        inputs: Inputs of the file, in order.
        outputs: Names of the outputs, in order.
        metadata: Custom metadata of an ONNX file.
    """

    title: ClassVar[str]
    extra: ClassVar[str] = ""
    workarounds: ClassVar[str] = ""
    path: Path
    inputs: tuple[FileInput, ...]
    outputs: tuple[str, ...]
    metadata: Mapping[str, str]

    @abstractmethod
    def __init__(self, path: str | os.PathLike[str], *, edit: Callable[[ir.Model], None] | None = None) -> None: ...

    @classmethod
    def installation(cls) -> str:
        """Return the command that installs the runtime, as an extra of quark_fx or else as a package."""
        extra = vars(cls).get("extra")
        return f"pip install 'quark_fx[{extra}]'" if extra else f"pip install {cls.runtime}"

    @abstractmethod
    def run_arrays(self, feed: Mapping[str, np.ndarray]) -> list[Any]:
        """Return the output arrays, in order, for a mapping from names to input arrays."""

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a mapping from names to outputs, for a mapping from names to inputs.

        The runtime may raise any error.
        """
        feed = {name: v.numpy(force=True) if isinstance(v, Tensor) else np.asarray(v) for name, v in values.items()}
        arrays = self.run_arrays(feed)
        return {name: torch.from_numpy(np.asarray(array)) for name, array in zip(self.outputs, arrays, strict=True)}

    def run_in_order(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return a mapping from names to outputs, for inputs in the order of `inputs`.

        The runtime may raise any error.
        """
        return self.run({value.name: tensor for value, tensor in zip(self.inputs, tensors, strict=True)})

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return a mapping from names to outputs for a batch.

        The keys of keyword arguments are names of inputs; positional arguments are inputs in order.

        Raises:
            ExportError: If the file has other inputs than the batch, or does not run.
        """
        args, kwargs = split_batch(batch)
        names = [value.name for value in self.inputs]
        values = kwargs if kwargs else dict(zip(names, leaves := pytree.tree_leaves(args), strict=False))
        if set(values) != set(names) or (not kwargs and len(leaves) != len(names)):
            passed = ", ".join(map(str, kwargs)) if kwargs else f"{len(leaves)} by position"
            raise ExportError(f"{self.path} has the inputs {', '.join(names)}, but the batch has {passed}")
        try:
            return self.run(values)
        except Exception as error:  # any error of the runtime
            raise ExportError(
                f"{self.title} does not run {self.path}: {error}; pass batches with the sizes and types of its inputs"
            ) from error


RUNNERS: Registry[type[FileRunner], type[FileRunner]] = Registry("runtime")
"""Classes that run files, by the name of their runtime."""
_add = RUNNERS.add

RunnerType = TypeVar("RunnerType", bound="type[FileRunner]")


def register_runner(cls: RunnerType) -> RunnerType:
    """Register the class that runs files in a runtime, for `verify`, `evaluate`, and the check of exported files.

    The check runs for targets whose `onnx.runtime` is `cls.runtime`.

    Raises:
        ConfigError: If another class has registered a runner for the runtime.
    """
    _add(cls, cls.runtime)
    return cls


@register_runner
class OnnxRuntimeRunner(FileRunner):
    """A runner of an ONNX file in ONNX Runtime.

    Args:
        path: File to run. Vendors' quantizers in the file are replaced by standard ones.
        options: `onnxruntime.SessionOptions`; default: options that preserve the file's arithmetic.
        optimize: Whether ONNX Runtime may fuse integer kernels; `options` overrides it. Default: whether its CPU
            kernels implement the fusions (`may_optimize`).
        edit: Function that edits the graph before ONNX Runtime loads it.

    Raises:
        ExportError: If ONNX Runtime is not installed.
    """

    runtime, title, extra = "onnxruntime", "ONNX Runtime", "onnx"
    workarounds = "quark_fx.export.to_onnx.workarounds"

    def __init__(
        self,
        path: str | os.PathLike[str],
        options: Any = None,
        *,
        optimize: bool | None = None,
        edit: Callable[[ir.Model], None] | None = None,
    ) -> None:
        try:
            import onnxruntime  # noqa: F401
        except ImportError as error:
            raise ExportError("running an ONNX file needs onnxruntime: pip install 'quark_fx[onnx]'") from error
        self.path = Path(path)
        self._session = open_session(self.path, options, edit, optimize=optimize)
        self.inputs = tuple(FileInput(value.name, _fixed(value.shape)) for value in self._session.get_inputs())
        self.outputs = tuple(value.name for value in self._session.get_outputs())
        self.metadata = self._session.get_modelmeta().custom_metadata_map

    def run_arrays(self, feed: Mapping[str, np.ndarray]) -> list[Any]:
        arrays: list[Any] = self._session.run(self.outputs, feed)
        return arrays


def _fixed(shape: Sequence[Any]) -> tuple[int | None, ...] | None:
    """Return the sizes of an ONNX Runtime shape, or `None` if the shape is empty, which may mean an unknown rank."""
    return tuple(size if isinstance(size, int) else None for size in shape) or None


__all__ = [
    "RUNNERS",
    "FileInput",
    "FileRunner",
    "OnnxRuntimeRunner",
    "Runner",
    "TorchRunner",
    "register_runner",
]
