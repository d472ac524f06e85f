"""`graph_rule`: a graph pass written as the replacement of one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, overload

from torch.fx import GraphModule, Node

from quark_fx.engine.context import Context
from quark_fx.errors import ConfigError, Declined
from quark_fx.graph.nodes import target_name
from quark_fx.graph.pass_manager import Change, GraphPass, graph_pass
from quark_fx.plan.placement import module_name

Rewrite = Node | tuple[Node, str] | None


class _Decorator(Protocol):
    @overload
    def __call__(self, rule: type) -> Callable[..., GraphPass]: ...
    @overload
    def __call__(self, rule: Callable[[GraphModule, Node], Rewrite]) -> GraphPass: ...


def graph_rule(*targets: str, **promise: Any) -> _Decorator:
    """Register a pass that replaces operators one by one: `@graph_rule("aten.silu.default")`.

    The pass calls the rule, `rule(gm, node)`, for every call of one of the operators `targets`. The rule returns

    - the node that replaces `node`: an existing one, or the result of `quark_fx.graph.nodes.call`, which inserts new
      nodes after `node`;
    - `node` itself, if the rule has changed it in place;
    - None, if `node` stays as it is.

    If the rule returns a node and a text, `(node, "slope 0.1 → 0.102")`, the report shows the text; otherwise it shows
    both operators. If the rule raises `quark_fx.errors.Declined`, the node stays as it is, and the report shows the
    reason. The pass erases replaced nodes that nothing reads, and returns the number of rewritten nodes. If the
    decorator is on a dataclass of options, the rule is the method `__call__`.

    Args:
        targets: Names of operators; none for all operators.
        promise: Arguments of `graph_pass`.

    Raises:
        ConfigError: If a target is not a name: the decorator was written without parentheses, or with an operator.
    """
    if any(not isinstance(target, str) for target in targets):
        example = "@graph_rule('aten.silu.default')"
        raise ConfigError(f"graph_rule takes the names of operators, not {targets[0]!r}; write {example}")

    def decorate(rule: Any) -> Any:
        if isinstance(rule, type):
            method: Callable[..., Rewrite] = rule.__call__

            def call_all(self: Any, gm: GraphModule, context: Context | None = None) -> int:
                return _apply(targets, lambda gm, node: method(self, gm, node), gm, context)

            rule.__call__ = call_all  # type: ignore[method-assign]
            return graph_pass(**promise)(rule)

        def rewrite_all(gm: GraphModule, context: Context | None = None) -> int:
            return _apply(targets, rule, gm, context)

        for name in ("__module__", "__name__", "__qualname__", "__doc__"):
            setattr(rewrite_all, name, getattr(rule, name))
        return graph_pass(**promise)(rewrite_all)

    return decorate


def _apply(
    targets: tuple[str, ...],
    rule: Callable[[GraphModule, Node], Rewrite],
    gm: GraphModule,
    context: Context | None,
) -> int:
    """Apply a rule to all calls of `targets`; return the number of rewritten calls."""
    count = 0
    for node in list(gm.graph.nodes):
        if node._erased or node.op != "call_function" or (targets and target_name(node) not in targets):
            continue
        before, readers = target_name(node), set(node.users)
        try:
            with gm.graph.inserting_before(node.next):
                rewrite = rule(gm, node)
        except Declined as declined:
            _note(context, Change.skipped(module_name(node), declined.reason))
            continue
        if rewrite is None:
            continue
        result, what = rewrite if isinstance(rewrite, tuple) else (rewrite, "")
        _note(context, Change(module_name(node), what or f"{before} → {target_name(result)}"))
        if result is not node:  # the replacement may itself read the node
            node.replace_all_uses_with(result, delete_user_cb=readers.__contains__)
        if not node.users:
            gm.graph.erase_node(node)
        count += 1
    return count


def _note(context: Context | None, change: Change) -> None:
    if context is not None:
        context.note(change)


__all__ = ["graph_rule"]
