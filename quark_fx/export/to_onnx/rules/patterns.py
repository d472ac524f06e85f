"""Rules written as patterns of `onnxscript.rewriter`."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import MatchingTracer, MatchStatus, RewriteRule

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.edit import Kept, erase_unread
from quark_fx.export.to_onnx.rules.rule import OnnxRule


def apply_rule(rule: Any, model: ir.Model) -> tuple[Kept, ...]:
    """Run a rule of either kind on a model, in place; return the nodes it declined, and why.

    A pattern declines if its `check` fails.

    Raises:
        ExportError: If `rule` is not a rule.
    """
    if isinstance(rule, OnnxRule):
        return rule(model)
    if not isinstance(rule, RewriteRule):
        raise ExportError(
            f"{rule!r} is no rule of an ONNX file; decorate a function of a model and a node with onnx_rule, or give "
            "the `rule()` of an onnxscript pattern"
        )
    reasons = _Reasons()
    rule.apply_to_model(model, tracer=reasons)  # with a tracer, it matches without rewriting
    if rule.apply_to_model(model):
        erase_unread(model)
    return tuple(reasons.declined)


class _Reasons(MatchingTracer):  # type: ignore[misc]
    """Record the reason of every declined match; onnxscript's own tracer keeps only the best match."""

    def __init__(self) -> None:
        super().__init__()
        self.declined: list[Kept] = []

    def log(self, rule: Any, container: Any, node: ir.Node, match_result: Any, status: MatchStatus) -> None:
        if status is MatchStatus.CONDITION_FAILED:
            self.declined.append(Kept(str(node.name), node.op_type, match_result.reason, str(rule)))


__all__ = ["apply_rule"]
