"""A quantizer for the exporters of `transformers`, which write prefill and decode graphs with a KV cache.

The exporters trace the calls of `generate` and handle the cache. The model from `QuantizedModel.eager` contains the
codes and the rounding, so both graphs have the same codes, and names do not have to be matched.
Source: https://huggingface.co/docs/transformers/main/en/exporters (`ExportQuantizer`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from quark_fx.errors import ExportError
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.to_onnx.translation import translation_table
from quark_fx.targets import ONNX

if TYPE_CHECKING:
    import onnx_ir as ir

logger = logging.getLogger(__name__)

_OPSET = 21
"""First opset with 4-bit types and block-wise scales; torch's default is older."""


@dataclass(frozen=True)
class GenerationQuantizer:
    """An `ExportQuantizer` that writes a quantized model's graphs in one of the formats of `quark_fx.export.onnx`.

        config = OnnxConfig(dynamic=True, quantizer=GenerationQuantizer("matmul_nbits"))
        OnnxExporter().export_for_generation(qmodel.eager(), prompt, config)

    Args:
        format: `"qdq"`, `"qoperator"`, or `"matmul_nbits"`.
        accuracy_level: Option of `"matmul_nbits"`: 0 to 3 compute in float; 4 rounds activations to int8 and is faster.
        cache: Scales of an int8 KV cache, from `CacheScales.measure` or `CacheScales.of`; default: keys and values stay
            in float.

    Raises:
        ExportError: If ONNX Runtime does not have kernels for the format, the format does not have the option, or the
            installed `transformers` does not support quantizers in its exporters.
    """

    format: str = "qdq"
    accuracy_level: int | None = None
    cache: CacheScales | None = None

    quantizes_fx_graph: ClassVar[bool] = False
    calibration_dataset: ClassVar[None] = None
    """`None`, because the model is already calibrated."""

    def __post_init__(self) -> None:
        if self.cache is not None and not isinstance(self.cache, CacheScales):
            raise ExportError(f"cache must be a result of CacheScales.measure or CacheScales.of, not {self.cache!r}")
        _hook_into_transformers()
        self._chosen()

    def with_calibration(self, calibration_dataset: Any) -> GenerationQuantizer:
        """Return the quantizer itself, because the model is already calibrated."""
        return self

    def validate_environment(self, export_format: str) -> None:
        """Raise `ExportError` if the export is not to ONNX."""
        if export_format != "onnx":
            raise ExportError(f"GenerationQuantizer writes ONNX graphs, not {export_format}; use OnnxExporter")

    def quantize(self, model: ir.Model, sample_inputs: dict[str, Any], export_format: str) -> ir.Model:
        """Convert an exported graph, in which `DequantizeLinear` nodes compute the weights from codes, to the format.

        Args:
            model: Graph, changed in place and returned.
            sample_inputs: Inputs of the trace; not used.
            export_format: Name of the exporter's format; not used.

        Raises:
            ExportError: If nothing in the graph is quantized, or the format or the opset does not support the graph.
        """
        from quark_fx.export.generation.int8_cache import use_int8_cache
        from quark_fx.export.generation.traced_weights import PREPARATIONS, look_up_codes
        from quark_fx.export.to_onnx.formats import write_in_format
        from quark_fx.export.to_onnx.opset import ir_version, require_types

        if not any(node.op_type in ("DequantizeLinear", "DequantizeBlocks") for node in model.graph):
            raise ExportError(
                "this graph has no quantized weights: export `qmodel.eager()`, where `qmodel` is the result of "
                "quantize() for a configuration with integers or 8-bit floats"
            )
        for prepare in PREPARATIONS:
            prepare(model)
        chosen, options = self._chosen()
        parts = write_in_format(model, chosen, options, ONNX.onnx)
        look_up_codes(model)
        if self.cache is not None:
            use_int8_cache(model, self.cache)
        for part in parts:
            logger.info("%s (%s) keeps its QDQ pairs: %s", part.name, part.operator, part.reason)
        opset = model.opset_imports[""]
        require_types(model, opset)
        model.ir_version = ir_version(opset)
        return model

    def _chosen(self) -> Any:
        from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions, find_format

        if self.format in FORMATS and FORMATS[self.format].standard is not None:
            raise ExportError(f"ONNX Runtime has no kernels for format={self.format!r}; choose another format")
        return find_format(self.format, FormatOptions(accuracy_level=self.accuracy_level), ONNX)


@functools.cache
def _hook_into_transformers() -> None:
    """Register the quantizer, and the lowerings of this package's operators, with the exporters of `transformers`."""
    try:
        import onnx_ir  # noqa: F401
        from transformers.exporters.quantizers.base import ExportQuantizer
        from transformers.exporters.utils import register_patch
    except ImportError as error:
        raise ExportError(
            f"generation needs onnx_ir, and a transformers version whose exporters support quantizers ({error}): "
            "pip install -U 'quark_fx[onnx,hf]'"
        ) from error
    ExportQuantizer.register(GenerationQuantizer)
    register_patch("onnx", "torch.onnx.export")(_with_our_lowerings)


def _with_our_lowerings(export: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.onnx.export` to add the lowerings of this package's operators if a program contains any."""

    @functools.wraps(export)
    def patched(program: Any, *args: Any, **options: Any) -> Any:
        if _has_our_operators(program):
            options["custom_translation_table"] = {
                **translation_table(),
                **(options.get("custom_translation_table") or {}),
            }
            options["opset_version"] = options.get("opset_version") or _OPSET
            options.setdefault("verbose", False)  # by default, the export prints its steps
        return export(program, *args, **options)

    return patched


def _has_our_operators(program: Any) -> bool:
    calls = [n.target for n in program.graph.nodes] if isinstance(program, torch.export.ExportedProgram) else []
    return any(isinstance(call, torch._ops.OpOverload) and call.namespace == "quark_fx" for call in calls)


__all__ = ["GenerationQuantizer"]
