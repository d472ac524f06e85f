"""OpenVINO behind the few methods of an `onnxruntime.InferenceSession` that running a file takes."""

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
    """What OpenVINO ran for an operator: its `name`, its `kind`, and the implementation with the type it counts in."""

    name: str
    kind: str
    implementation: str

    @property
    def in_integers(self) -> bool:
        """Whether it multiplies or moves codes of 8 bits."""
        return self.implementation.lower().endswith(("_i8", "_u8"))


class OpenVinoSession:
    """A file compiled for the CPU, with float32 for what has no codes. One thread at a time may run it.

    Args:
        path: of an ONNX file.
        threads: of a run; default: as many as cores.
        profile: note what runs, for `kernels`, which takes time in every run.
        edit: changes the graph of an ONNX file first.

    Raises:
        ExportError: if OpenVINO is not installed.
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
        # By default a processor with bfloat16 computes floats in it, and activations of coded weights are rounded.
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
            # A graph in bytes has no directory to find external data in.
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
        """Return the outputs in order, called as in the file: OpenVINO may know one by several names."""
        return [Named(name) for name in self._outputs]

    def get_modelmeta(self) -> Metadata:
        """Return the metadata of an ONNX file."""
        return Metadata(self._metadata)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs called `names`, all of them for `None`, as arrays."""
        self._request.infer(dict(feeds))
        places = range(len(self._outputs)) if names is None else [self._outputs.index(name) for name in names]
        return [self._request.get_output_tensor(place).data.copy() for place in places]

    def kernels(self) -> list[Kernel]:
        """Return what the last run executed, empty without `profile`."""
        return [
            Kernel(one.node_name, one.node_type, one.exec_type)
            for one in self._request.profiling_info
            if one.status == one.Status.EXECUTED
        ]


def _sizes(shape: Any) -> tuple[int | None, ...] | None:
    """Return the sizes of a shape of OpenVINO, `None` if it does not say how many it has."""
    if shape.rank.is_dynamic:
        return None
    return tuple(None if size.is_dynamic else size.get_length() for size in shape)
