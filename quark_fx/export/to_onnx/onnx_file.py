"""The result of an export: the path of the file, with a report of how ONNX Runtime runs it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quark_fx.export.runtime.report import RuntimeReport, runtime_report

if TYPE_CHECKING:
    from quark_fx.export.runtime.trial import NotRun
    from quark_fx.export.to_onnx.edit import Kept

    _Path = Path
else:
    _Path = type(Path())  # before Python 3.12, only the platform's class supports subclasses


class OnnxFile(_Path):
    """The path of an exported file, with a report of the operators that run in integers.

    Attributes:
        kept: Parts that the format left as `QuantizeLinear` / `DequantizeLinear` pairs, or a rule declined, and why.
        not_run: Runtimes that did not run the file on one sample when it was written, and why.
    """

    kept: tuple[Kept, ...] = ()
    not_run: tuple[NotRun, ...] = ()

    def report(self) -> RuntimeReport:
        """Return the kernels with which ONNX Runtime's CPU provider runs this file, and runtimes that did not run it.

        The report lists no kernels if ONNX Runtime did not load the file when it was written.

        Raises:
            ExportError: If ONNX Runtime, which loaded the file when it was written, is missing or fails now.
        """
        return runtime_report(self, kept=self.kept, not_run=self.not_run)
