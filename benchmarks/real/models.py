"""The models of the benchmark: where each is loaded, and which presets it is measured with."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

from benchmarks.real import craft, crnn, minilm, smollm2, speaker, whisper

VISION = ("int8_static", "int8_static_mse", "int8_dynamic", "int4_weight_only", "fp8_static", "xint8")
ENCODER = (*VISION, "w8a8_dynamic")
SPEECH = ("int8_static", "int8_static_mse", "int8_dynamic", "int4_weight_only", "w4a16_gptq", "w8a8_dynamic", "xint8")
LANGUAGE = (
    "w4a16_rtn",
    "w4a16_gptq",
    "w4a16_awq",
    "w4a16_best",
    "w4a16_best_asym",
    "w8a8_dynamic",
    "w4a4_dynamic",
    "fp8_dynamic",
    "nvfp4",
    "nvfp4_best",
    "mxfp4",
    "mxfp4_best",
)

ONNX = frozenset({*VISION, *SPEECH}) - {"w4a16_gptq", "w8a8_dynamic"}
"""Presets that are measured in the exported file, too."""


@dataclass(frozen=True)
class Entry:
    """A module with `load() -> RealModel`, whose docstring says what is judged, and presets by name."""

    module: ModuleType
    presets: tuple[str, ...]


MODELS = {
    "smollm2": Entry(smollm2, LANGUAGE),
    "minilm": Entry(minilm, ENCODER),
    "craft": Entry(craft, VISION),
    "crnn": Entry(crnn, VISION),
    "speaker": Entry(speaker, VISION),
    "whisper": Entry(whisper, SPEECH),
}
