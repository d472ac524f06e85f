"""An ONNX rule of one file: `x * sigmoid(a * x)` is one kernel of ONNX Runtime, `QuickGelu`."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchResult
from onnxscript.rewriter.pattern import RewriteRuleClassBase


class FuseQuickGelu(RewriteRuleClassBase):  # type: ignore[misc]
    """Replace `x * sigmoid(a * x)` with one node if `a` is a single number."""

    def pattern(self, op: Any, x: Any, factor: Any) -> Any:
        return op.Mul(x, op.Sigmoid(op.Mul(x, factor)))

    def check(self, context: Any, x: ir.Value, factor: ir.Value, **_: Any) -> MatchResult:
        number = ir.convenience.get_const_tensor(factor)
        if number is None:
            return MatchResult().fail("its factor is not a constant", factor)
        if number.size != 1:
            return MatchResult().fail(f"it has {number.size} factors, and the kernel takes one", factor)
        return MatchResult()

    def rewrite(self, op: Any, x: ir.Value, factor: ir.Value, **_: Any) -> ir.Value:
        number = ir.convenience.get_const_tensor(factor)
        assert number is not None
        return op.QuickGelu(x, alpha=float(number.numpy().item()), _domain="com.microsoft")


fuse_quick_gelu = FuseQuickGelu.rule()
