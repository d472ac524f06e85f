"""quark_fx: a PyTorch-first quantization compiler.

>>> import torch, quark_fx as qfx
>>> model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
>>> qmodel = qfx.quantize(model, "int8_static", [torch.randn(16, 8)], progress=False)
>>> qmodel(torch.randn(3, 8)).shape
torch.Size([3, 4])
"""

import quark_fx.parity
import quark_fx.vendors  # noqa: F401  (both register entries)
from quark_fx import data, evaluation, export, observers, passes, presets, targets
from quark_fx.analysis.analyze import analyze
from quark_fx.analysis.report import Analysis
from quark_fx.capture.capture import capture_graph
from quark_fx.checkpoints.open_checkpoint import open_checkpoint
from quark_fx.config import block_formats, gguf_types
from quark_fx.config.quant_config import INHERIT, Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.conversion.convert import convert
from quark_fx.conversion.plan import Conversion
from quark_fx.engine.activation_cache import CacheBudget
from quark_fx.engine.prediction import Prediction
from quark_fx.engine.resources import Resources
from quark_fx.engine.rules import graph_rule
from quark_fx.errors import (
    CalibrationError,
    CaptureError,
    CheckpointError,
    ConfigError,
    ExportError,
    PassError,
    QuarkError,
)
from quark_fx.evaluation import evaluate
from quark_fx.export import verify
from quark_fx.graph.pass_manager import graph_pass, run_passes
from quark_fx.inspection.inspect import Inspection, inspect
from quark_fx.mixed_precision.budget import Budget
from quark_fx.mixed_precision.result import Search
from quark_fx.mixed_precision.search import search
from quark_fx.model.qat import prepare_qat
from quark_fx.model.quantized_model import QuantizedModel
from quark_fx.model.serialization import load
from quark_fx.numbers import formats, ops
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.scales import QuantizedScale
from quark_fx.quantization import check, predict, quantize
from quark_fx.session import Session

__version__ = "0.1.0"

__all__ = [
    "INHERIT",
    "Analysis",
    "Budget",
    "CacheBudget",
    "CalibrationError",
    "CaptureError",
    "CheckpointError",
    "ConfigError",
    "Conversion",
    "ExportError",
    "Granularity",
    "Inspection",
    "Override",
    "PassError",
    "Prediction",
    "QuantConfig",
    "QuantizedModel",
    "QuantizedScale",
    "QuarkError",
    "Resources",
    "Scheme",
    "Search",
    "Session",
    "Symmetry",
    "Target",
    "TensorSpec",
    "analyze",
    "block_formats",
    "capture_graph",
    "check",
    "convert",
    "data",
    "evaluate",
    "evaluation",
    "export",
    "formats",
    "gguf_types",
    "graph_pass",
    "graph_rule",
    "inspect",
    "load",
    "observers",
    "open_checkpoint",
    "ops",
    "passes",
    "predict",
    "prepare_qat",
    "presets",
    "quantize",
    "run_passes",
    "search",
    "targets",
    "verify",
]
