"""A runner of files in OpenVINO."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from quark_fx.errors import ExportError
from quark_fx.export.runtime.runners import FileInput, FileRunner, register_runner

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Kernel:
    """A kernel that OpenVINO ran.

    Attributes:
        name: Name of the operator.
        kind: Type of the operator.
        implementation: Name of the implementation, which ends with its compute type.
    """

    name: str
    kind: str
    implementation: str

    @property
    def in_integers(self) -> bool:
        """Tell whether the kernel multiplies or moves 8-bit codes."""
        return self.implementation.lower().endswith(("_i8", "_u8"))


@register_runner
class OpenVinoRunner(FileRunner):
    """A runner of a file in OpenVINO, which computes in float32 except on codes. Only one thread at a time may call it.

    Args:
        path: ONNX file, or another file that OpenVINO reads.
        threads: Number of threads of a run; default: one per core.
        profile: Whether to record the kernels of each run, for `kernels`; recording slows down every run.
        edit: Function that edits the graph of an ONNX file before OpenVINO loads it.

    Raises:
        ExportError: If OpenVINO is not installed.
    """

    runtime, title, extra = "openvino", "OpenVINO", "openvino"
    workarounds = "quark_fx.vendors.intel.workarounds"

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
            raise ExportError("OpenVINO is not installed; run pip install 'quark_fx[openvino]'") from error
        # By default, OpenVINO computes floats in bfloat16 on processors that support it, and quantizes activations at
        # run time if the weights are quantized.
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
            # A graph in memory does not have a directory for external data, so the data are loaded into it.
            source = core.read_model(onnx_ir.to_proto(onnx_ir.external_data.load_to_model(model)).SerializeToString())
        compiled: Any = core.compile_model(source, "CPU", options)
        self.path = path
        self._request = compiled.create_infer_request()
        self.inputs = tuple(FileInput(port.any_name, _sizes(port.partial_shape)) for port in compiled.inputs)
        self.outputs = tuple(port.any_name for port in compiled.outputs)
        self.metadata = {}
        if model is not None:
            self.metadata = dict(model.metadata_props)
            names = tuple(str(value.name) for value in model.graph.outputs)  # an OpenVINO output may have several names
            self.outputs = names if len(names) == len(self.outputs) else self.outputs

    def run_arrays(self, feed: Mapping[str, np.ndarray]) -> list[Any]:
        self._request.infer(dict(feed))
        return [self._request.get_output_tensor(place).data.copy() for place in range(len(self.outputs))]

    def kernels(self) -> list[Kernel]:
        """Return the kernels of the last run; empty if the runner was created without `profile`."""
        return [
            Kernel(one.node_name, one.node_type, one.exec_type)
            for one in self._request.profiling_info
            if one.status == one.Status.EXECUTED
        ]


def _sizes(shape: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of an OpenVINO shape; `None` if its rank is unknown."""
    if shape.rank.is_dynamic:
        return None
    return tuple(None if size.is_dynamic else size.get_length() for size in shape)


__all__ = ["Kernel", "OpenVinoRunner"]
