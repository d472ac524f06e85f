"""Runners: one interface for a model in torch, ONNX Runtime, OpenVINO, or transformers."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from quark_fx.errors import ExportError, QuarkError
from quark_fx.export.runtime.session import open_session
from quark_fx.graph.signature import split_batch

if TYPE_CHECKING:
    import onnx_ir as ir

Runtime = Literal["onnxruntime", "openvino", "transformers", "torch"]
"""Runtime of a file."""


class Runner(ABC):
    """A model in a runtime; a call runs a batch.

    Attributes:
        runtime: Name of the runtime.
    """

    runtime: ClassVar[Runtime]

    @abstractmethod
    def __call__(self, batch: Any) -> Any:
        """Return the result of the model for a batch in the form of calibration data."""


class TorchRunner(Runner):
    """A module in eval mode, or a function that is called like one.

    Raises:
        QuarkError: If the model is neither, or in training mode.
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
        name: Name.
        shape: Sizes, with `None` for sizes that vary; `None` if the rank is unknown.
    """

    name: str
    shape: tuple[int | None, ...] | None = None


class FileRunner(Runner):
    """A file with named inputs and outputs, run on the CPU with the arithmetic of the file.

    Attributes:
        title: Name of the runtime in messages.
        path: Path of the file.
        inputs: Inputs, in order.
        outputs: Names of the outputs, in order.
        metadata: Metadata of an ONNX file.
    """

    title: ClassVar[str]
    path: Path
    inputs: tuple[FileInput, ...]
    outputs: tuple[str, ...]
    metadata: Mapping[str, str]

    @abstractmethod
    def run_arrays(self, feed: Mapping[str, np.ndarray]) -> list[Any]:
        """Return the arrays of the outputs, in order, for named arrays of the inputs."""

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the named outputs for named inputs; the runtime may raise any error."""
        feed = {name: v.numpy(force=True) if isinstance(v, Tensor) else np.asarray(v) for name, v in values.items()}
        arrays = self.run_arrays(feed)
        return {name: torch.from_numpy(np.asarray(array)) for name, array in zip(self.outputs, arrays, strict=True)}

    def run_in_order(self, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return the named outputs for the inputs in order; the runtime may raise any error."""
        return self.run({value.name: tensor for value, tensor in zip(self.inputs, tensors, strict=True)})

    def __call__(self, batch: Any) -> dict[str, Tensor]:
        """Return the named outputs; keywords of a batch are names of inputs, other values go in order.

        Raises:
            ExportError: If the file has other inputs, or does not run.
        """
        args, kwargs = split_batch(batch)
        names = [value.name for value in self.inputs]
        values = kwargs if kwargs else dict(zip(names, leaves := pytree.tree_leaves(args), strict=False))
        if set(values) != set(names) or (not kwargs and len(leaves) != len(names)):
            passed = ", ".join(map(str, kwargs)) if kwargs else f"{len(leaves)} by position"
            raise ExportError(f"{self.path} has the inputs {', '.join(names)}; the batch has {passed}")
        try:
            return self.run(values)
        except Exception as error:  # any error of the runtime
            raise ExportError(
                f"{self.title} does not run {self.path}: {error}; pass batches of the sizes and types of its inputs"
            ) from error


class OnnxRuntimeRunner(FileRunner):
    """An ONNX file in ONNX Runtime.

    Args:
        path: File. Vendors' quantizers in it are replaced by standard ones.
        options: `onnxruntime.SessionOptions`; default: options that keep the file's arithmetic.
        optimize: Whether ONNX Runtime may fuse integer kernels, without `options`; default: if its CPU kernels
            implement these fusions.
        edit: Function that edits the graph first.

    Raises:
        ExportError: If ONNX Runtime is not installed.
    """

    runtime, title = "onnxruntime", "ONNX Runtime"

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


@dataclass(frozen=True)
class Kernel:
    """A kernel that OpenVINO ran: `name` and `kind` of the operator, and the implementation with its compute type."""

    name: str
    kind: str
    implementation: str

    @property
    def in_integers(self) -> bool:
        """Tell whether the kernel multiplies or moves 8-bit codes."""
        return self.implementation.lower().endswith(("_i8", "_u8"))


class OpenVinoRunner(FileRunner):
    """A file in OpenVINO, with float32 for values that are not codes. One thread at a time may run it.

    Args:
        path: ONNX file, or another file that OpenVINO reads.
        threads: Number of threads of a run; default: one per core.
        profile: Whether to record the kernels of each run, for `kernels`; this slows down every run.
        edit: Function that edits the graph of an ONNX file first.

    Raises:
        ExportError: If OpenVINO is not installed.
    """

    runtime, title = "openvino", "OpenVINO"

    def __init__(
        self,
        path: str | os.PathLike[str],
        threads: int | None = None,
        *,
        profile: bool = False,
        edit: Callable[[ir.Model], None] | None = None,
    ) -> None:
        try:
            import openvino
        except ImportError as error:
            raise ExportError("running a file in OpenVINO needs it: pip install 'quark_fx[openvino]'") from error
        # By default, OpenVINO computes floats in bfloat16 on processors with it, and rounds activations for quantized
        # weights.
        options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "PERF_COUNT": profile}
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        core, path = openvino.Core(), Path(path)
        model = None
        if path.suffix == ".onnx":
            import onnx_ir

            model = onnx_ir.load(path)
        if edit is None or model is None:
            source = core.read_model(path)
        else:
            edit(model)
            # A graph in bytes does not have a directory for external data.
            source = core.read_model(onnx_ir.to_proto(onnx_ir.external_data.load_to_model(model)).SerializeToString())
        compiled: Any = core.compile_model(source, "CPU", options)
        self.path = path
        self._request = compiled.create_infer_request()
        self.inputs = tuple(FileInput(port.any_name, _sizes(port.partial_shape)) for port in compiled.inputs)
        self.outputs = tuple(port.any_name for port in compiled.outputs)
        self.metadata = {}
        if model is not None:
            self.metadata = dict(model.metadata_props)
            names = tuple(str(value.name) for value in model.graph.outputs)  # OpenVINO may have several names for one
            self.outputs = names if len(names) == len(self.outputs) else self.outputs

    def run_arrays(self, feed: Mapping[str, np.ndarray]) -> list[Any]:
        self._request.infer(dict(feed))
        return [self._request.get_output_tensor(place).data.copy() for place in range(len(self.outputs))]

    def kernels(self) -> list[Kernel]:
        """Return the kernels of the last run; empty without `profile`."""
        return [
            Kernel(one.node_name, one.node_type, one.exec_type)
            for one in self._request.profiling_info
            if one.status == one.Status.EXECUTED
        ]


def _fixed(shape: Sequence[Any]) -> tuple[int | None, ...] | None:
    """Return the sizes of an ONNX Runtime shape; an empty one stands for an unknown rank too."""
    return tuple(size if isinstance(size, int) else None for size in shape) or None


def _sizes(shape: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of an OpenVINO shape; `None` if its rank is unknown."""
    if shape.rank.is_dynamic:
        return None
    return tuple(None if size.is_dynamic else size.get_length() for size in shape)


__all__ = [
    "FileInput",
    "FileRunner",
    "Kernel",
    "OnnxRuntimeRunner",
    "OpenVinoRunner",
    "Runner",
    "Runtime",
    "TorchRunner",
]
