"""What a rewrite of an ONNX graph is: a function of one node, which may decline and then says why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.edit import DeclinedError, Kept, erase_unread

logger = logging.getLogger(__name__)

Rewrite = Callable[[ir.Model, ir.Node], bool]
"""Edits the graph around a node and returns whether it did; raises `DeclinedError` where its pattern is there, and
something else forbids the rewrite."""


@dataclass(frozen=True)
class OnnxRule:
    """A rewrite, and the nodes it looks at. Calling it rewrites a model in place.

    Attributes:
        name: of the function.
        operators: types of the nodes.
        rewrite: see `Rewrite`.
        runtime: whose mistakes it works around; empty for what holds in ONNX. It runs for targets of that
            `OnnxFiles.runtime`.
    """

    name: str
    operators: tuple[str, ...]
    rewrite: Rewrite
    runtime: str = ""

    def __call__(self, model: ir.Model) -> tuple[Kept, ...]:
        """Rewrite every node of the main graph that the rule is for; return those it declined, and why."""
        done, declined = 0, []
        for node in list(model.graph):
            if node.op_type not in self.operators or node.graph is None:
                continue
            try:
                rewrote = self.rewrite(model, node)
            except DeclinedError as reason:
                logger.debug("%s declines %s (%s): %s", self.name, node.name, node.op_type, reason)
                declined.append(Kept(str(node.name), node.op_type, str(reason), self.name))
                continue
            if not isinstance(rewrote, bool):
                raise ExportError(
                    f"rule {self.name} returned {rewrote!r} for {node.op_type} {node.name}; return True if it rewrote "
                    "the graph and False if not, or raise DeclinedError with a reason"
                )
            done += rewrote
        if done:
            erase_unread(model)
        return tuple(declined)


def onnx_rule(*operators: str, runtime: str = "") -> Callable[[Rewrite], OnnxRule]:
    """Make a rule of a function of a model and a node: `@onnx_rule("Relu")`.

    Args:
        operators: types of the nodes it is called with.
        runtime: see `OnnxRule`.

    Raises:
        ExportError: if no type is given.
    """
    if not operators or not all(isinstance(name, str) for name in operators):
        raise ExportError('onnx_rule takes the types of nodes that the rule is for; write @onnx_rule("Relu")')

    def make(rewrite: Rewrite) -> OnnxRule:
        return OnnxRule(rewrite.__name__, operators, rewrite, runtime)

    return make


__all__ = ["DeclinedError", "OnnxRule", "Rewrite", "onnx_rule"]
