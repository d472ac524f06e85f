"""Graph to artefact, one file a target."""

from quark_fx.export.cache_scales import CacheScales
from quark_fx.export.generation import GenerationQuantizer
from quark_fx.export.onnx_generator import generator
from quark_fx.export.shared_weights import share_weights
from quark_fx.export.table import lowers
from quark_fx.export.to_gguf import gguf
from quark_fx.export.to_huggingface import huggingface
from quark_fx.export.to_onnx import onnx
from quark_fx.export.verification import Difference, Verification, verify

__all__ = [
    "CacheScales",
    "Difference",
    "GenerationQuantizer",
    "Verification",
    "generator",
    "gguf",
    "huggingface",
    "lowers",
    "onnx",
    "share_weights",
    "verify",
]
