"""What an export returns: the path of the file, and what ONNX Runtime will do with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark_fx.export.runtime.report import RuntimeReport, runtime_report

if TYPE_CHECKING:
    from quark_fx.export.to_onnx.edit import Kept

    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12 only the class of the platform can be derived from


class OnnxFile(_Path):
    """The path of an exported file, which can say what will run in integers.

    Attributes:
        kept: what the format left as `QuantizeLinear` / `DequantizeLinear` pairs, or a rule declined, and why.
        optimize: whether ONNX Runtime may fuse kernels: its CPU kernels do not implement all it fuses.
    """

    kept: tuple[Kept, ...] = ()
    optimize: bool = True

    def report(self) -> RuntimeReport:
        """Return the kernels ONNX Runtime's CPU provider runs this file with.

        Raises:
            ExportError: if ONNX Runtime is not installed, or has no kernels for the format.
        """
        return runtime_report(self, kept=self.kept, optimize=self.optimize)
