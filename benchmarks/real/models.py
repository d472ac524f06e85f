"""The models of the benchmark: where each is loaded, and which presets and recipes it is measured with."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from benchmarks.real import craft, crnn, minilm, mtcnn, ppocr, ppocr_detector, smollm2, speaker, whisper
from quark_fx.config.quant_config import Granularity, QuantConfig, TensorSpec
from quark_fx.graph.pass_manager import GraphPass
from quark_fx.numbers.formats import INT4
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import GPTQ, CrossLayerEqualization, Rotate
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, INT8_STATIC_MSE, PRESETS, XINT8


def _then(config: QuantConfig, *passes: GraphPass) -> QuantConfig:
    return config.replace(passes=(*config.passes, *passes))


_ZERO_POINTS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32, symmetry=Symmetry.ASYMMETRIC)

_RECIPES = {
    "int8_static, Rotate()": _then(INT8_STATIC, Rotate()),
    "int8_static_mse, Rotate(), GPTQ()": _then(INT8_STATIC_MSE, Rotate(), GPTQ()),
    "xint8, Rotate()": _then(XINT8, Rotate()),
    "xint8, Rotate(), GPTQ()": _then(XINT8, Rotate(), GPTQ()),
    "int4_weight_only, asymmetric, GPTQ(asymmetry=0.5, fit_scales=True)": _then(
        INT4_WEIGHT_ONLY.replace(weight=_ZERO_POINTS), GPTQ(asymmetry=0.5, fit_scales=True)
    ),
}

_EQUALIZED = {
    "int8_static, CrossLayerEqualization()": _then(INT8_STATIC, CrossLayerEqualization()),
    "xint8, CrossLayerEqualization(), GPTQ()": _then(XINT8, CrossLayerEqualization(), GPTQ()),
}

CONFIGS: dict[str, QuantConfig] = PRESETS | _RECIPES | _EQUALIZED
"""Configurations by name: presets, and presets with more passes."""

VISION = ("int8_static", "int8_static_mse", "int8_dynamic", "int4_weight_only", "fp8_static", "xint8")
DEPTHWISE = (*VISION, *_EQUALIZED)
ENCODER = (*VISION, "w8a8_dynamic", *_RECIPES)
SPEECH = (
    *("int8_static", "int8_static_mse", "int8_dynamic", "int4_weight_only", "w4a16_gptq", "w8a8_dynamic", "xint8"),
    *_RECIPES,
)
LANGUAGE = (
    "w4a16_rtn",
    "w4a16_gptq",
    "w4a16_awq",
    "w4a16_best",
    "w4a16_best_asym",
    "w4a16_rotated",
    "w8a8_dynamic",
    "w4a4_dynamic",
    "fp8_dynamic",
    "nvfp4",
    "nvfp4_best",
    "mxfp4",
    "mxfp4_best",
)

ONNX = frozenset({*DEPTHWISE, *SPEECH}) - {"w4a16_gptq", "w8a8_dynamic"}
"""Those that are measured in the exported file, too."""


@dataclass(frozen=True)
class Entry:
    """A module with `load() -> RealModel`, whose docstring says what is judged, and names of `CONFIGS`."""

    module: ModuleType
    presets: tuple[str, ...]


MODELS = {
    "smollm2": Entry(smollm2, LANGUAGE),
    "minilm": Entry(minilm, ENCODER),
    "craft": Entry(craft, VISION),
    "crnn": Entry(crnn, VISION),
    "ppocr": Entry(ppocr, DEPTHWISE),
    "ppocr_detector": Entry(ppocr_detector, DEPTHWISE),
    "mtcnn": Entry(mtcnn, VISION),
    "speaker": Entry(speaker, VISION),
    "whisper": Entry(whisper, SPEECH),
}
