"""Exports of quantized models to files, and `verify`, which compares a file with torch."""

from quark_fx.export.checkpoints.imatrix import imatrix
from quark_fx.export.checkpoints.to_gguf import gguf
from quark_fx.export.checkpoints.to_huggingface import huggingface
from quark_fx.export.generation.cache_scales import CacheScales
from quark_fx.export.generation.generator import generator
from quark_fx.export.generation.quantizer import GenerationQuantizer
from quark_fx.export.generation.shared_weights import share_weights
from quark_fx.export.generation.to_genai import genai
from quark_fx.export.runtime.verification import Difference, Verification, verify
from quark_fx.export.to_onnx.export_onnx import onnx
from quark_fx.export.to_onnx.translation import lowers
from quark_fx.export.to_pt2e import pt2e

__all__ = [
    "CacheScales",
    "Difference",
    "GenerationQuantizer",
    "Verification",
    "genai",
    "generator",
    "gguf",
    "huggingface",
    "imatrix",
    "lowers",
    "onnx",
    "pt2e",
    "share_weights",
    "verify",
]
