"""What an export returns: the path of the file, and what ONNX Runtime will do with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark_fx.export.runtime.report import RuntimeReport, runtime_report

if TYPE_CHECKING:
    from quark_fx.export.runtime.trial import NotRun
    from quark_fx.export.to_onnx.edit import Kept

    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12 only the class of the platform can be derived from


class OnnxFile(_Path):
    """The path of an exported file, which can say what will run in integers.

    Attributes:
        kept: what the format left as `QuantizeLinear` / `DequantizeLinear` pairs, or a rule declined, and why.
        optimize: whether ONNX Runtime may fuse kernels: its CPU kernels do not implement all it fuses.
        not_run: Runtimes that did not run the file on one sample when it was written, and why.
    """

    kept: tuple[Kept, ...] = ()
    optimize: bool = True
    not_run: tuple[NotRun, ...] = ()

    def report(self) -> RuntimeReport:
        """Return the kernels ONNX Runtime's CPU provider runs this file with, and which runtimes did not run it.

        The report lists no kernels if ONNX Runtime did not load the file when it was written.

        Raises:
            ExportError: If ONNX Runtime, which loaded the file when it was written, is missing or fails now.
        """
        return runtime_report(self, kept=self.kept, optimize=self.optimize, not_run=self.not_run)
