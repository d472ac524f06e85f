"""The rewrite of an ONNX graph: a function of one node, which may decline with a reason."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from quark_fx.errors import ExportError
from quark_fx.export.to_onnx.edit import DeclinedError, Kept, erase_unread

logger = logging.getLogger(__name__)

Rewrite = Callable[[ir.Model, ir.Node], bool]
"""Edits the graph around a node and returns whether it did. Raises `DeclinedError` if the node matches, but another
condition forbids the rewrite."""


@dataclass(frozen=True)
class OnnxRule:
    """A rewrite and its types of nodes. Calling it rewrites a model in place.

    Attributes:
        name: Name of the function.
        operators: Types of nodes to rewrite.
        rewrite: Function; see `Rewrite`.
        runtime: Runtime whose fault the rule works around; the rule runs only for targets with this
            `OnnxFiles.runtime`. Empty for rules that hold for all of ONNX.
    """

    name: str
    operators: tuple[str, ...]
    rewrite: Rewrite
    runtime: str = ""

    def __call__(self, model: ir.Model) -> tuple[Kept, ...]:
        """Rewrite every matching node of the main graph; return the nodes that the rule declined, and why."""
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
    """Turn a function of a model and a node into a rule: `@onnx_rule("Relu")`.

    Args:
        operators: Types of nodes that the function is called with.
        runtime: Runtime; see `OnnxRule`.

    Raises:
        ExportError: If no type is given.
    """
    if not operators or not all(isinstance(name, str) for name in operators):
        raise ExportError('onnx_rule takes the types of nodes that the rule is for; write @onnx_rule("Relu")')

    def make(rewrite: Rewrite) -> OnnxRule:
        return OnnxRule(rewrite.__name__, operators, rewrite, runtime)

    return make


__all__ = ["DeclinedError", "OnnxRule", "Rewrite", "onnx_rule"]
