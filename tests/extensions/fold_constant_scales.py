"""A float pass of one file: constants that an operator's input is multiplied by move into its weight."""

from __future__ import annotations

from torch.fx import GraphModule

from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, parameter, set_parameter, target_name
from quark_fx.graph.pass_manager import graph_pass


@graph_pass()
def fold_constant_scales(gm: GraphModule) -> int:
    """Rewrite `linear(x * c, w, b)` to `linear(x, w * c, b)` for a number `c`, and `linear(x / c, w, b)` likewise.

    Equal up to rounding, as both are `sum_i x_i c w_i`. Not where something else reads the product or the weight.
    """
    folded = 0
    for node in list(gm.graph.nodes):
        linear = Linear.of(node)
        while linear is not None and (factor := _factor(linear)) is not None:
            product = linear.activation
            set_parameter(gm, str(linear.weight.target), parameter(gm, linear.weight).detach() * factor)
            node.replace_input_with(product, product.args[0])
            gm.graph.erase_node(product)
            folded += 1
    return folded


def _factor(linear: Linear) -> float | None:
    """Return the number that what an operator reads was multiplied by, for this operator alone."""
    product, weight = linear.activation, linear.weight
    if len(product.users) > 1 or not is_parameter(weight) or len(weight.users) > 1:
        return None
    name, number = target_name(product), product.args[1] if len(product.args) == 2 else None
    if isinstance(number, bool) or not isinstance(number, int | float):
        return None
    if name in ("aten.mul.Tensor", "aten.mul.Scalar"):
        return float(number)
    return 1 / number if name in ("aten.div.Tensor", "aten.div.Scalar") and number else None
