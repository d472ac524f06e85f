"""OpenVINO with the methods of an `onnxruntime.InferenceSession` that running a file needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quark_fx.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Named:
    """An input or output of a file; the shape of an input has `None` for sizes that vary."""

    name: str
    shape: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Metadata:
    """The metadata of a file, by key."""

    custom_metadata_map: Mapping[str, str]


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


class OpenVinoSession:
    """A file compiled for the CPU, with float32 for values that are not codes. One thread at a time may run it.

    Args:
        path: ONNX file, or another file that OpenVINO reads.
        threads: Number of threads of a run; default: one per core.
        profile: Whether to record the kernels of each run, for `kernels`; this slows down every run.
        edit: Function that edits the graph of an ONNX file first.

    Raises:
        ExportError: If OpenVINO is not installed.
    """

    def __init__(
        self,
        path: Path,
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
        core = openvino.Core()
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
        self._compiled: Any = core.compile_model(source, "CPU", options)
        self._request = self._compiled.create_infer_request()
        self._outputs = [port.any_name for port in self._compiled.outputs]
        self._metadata: dict[str, str] = {}
        if model is not None:
            self._metadata = dict(model.metadata_props)
            named = [str(value.name) for value in model.graph.outputs]
            self._outputs = named if len(named) == len(self._outputs) else self._outputs

    def get_inputs(self) -> list[Named]:
        """Return the inputs in order."""
        return [Named(port.any_name, _sizes(port.partial_shape)) for port in self._compiled.inputs]

    def get_outputs(self) -> list[Named]:
        """Return the outputs in order, with their names in the file; OpenVINO may have several names for one."""
        return [Named(name) for name in self._outputs]

    def get_modelmeta(self) -> Metadata:
        """Return the metadata of an ONNX file."""
        return Metadata(self._metadata)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Return arrays of the outputs `names`, or of all if `None`."""
        self._request.infer(dict(feeds))
        places = range(len(self._outputs)) if names is None else [self._outputs.index(name) for name in names]
        return [self._request.get_output_tensor(place).data.copy() for place in places]

    def kernels(self) -> list[Kernel]:
        """Return the kernels of the last run; empty without `profile`."""
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
