"""Graph to artefact, one file a target."""

from quark_fx.export.table import lowers
from quark_fx.export.to_gguf import gguf
from quark_fx.export.to_huggingface import huggingface
from quark_fx.export.to_onnx import onnx
from quark_fx.export.verification import Difference, Verification, verify

__all__ = ["Difference", "Verification", "gguf", "huggingface", "lowers", "onnx", "verify"]
