"""Products with parameters that are written as `einsum` are products with weights."""

from __future__ import annotations

import pytest
import torch
from tiny import quantize, rand
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.graph.nodes import target_name
from quark_fx.presets import INT8_WEIGHT_ONLY


class Written(nn.Module):
    """An equation of an input and a parameter, in either order."""

    def __init__(self, equation: str, shape: tuple[int, ...], first: bool) -> None:
        super().__init__()
        self.equation, self.first, self.weight = equation, first, nn.Parameter(rand(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, *((self.weight, x) if self.first else (x, self.weight)))


PRODUCTS = [
    ("bld,dhk->blhk", (8, 2, 4), (3, 5, 8), False),
    ("blhk,hkd->bld", (2, 4, 8), (3, 5, 2, 4), False),
    ("oi, bil -> bol", (6, 8), (3, 8, 5), True),
    ("blhd,hde->blhe", (2, 4, 6), (3, 5, 2, 4), False),
    ("...d,df->...f", (8, 4), (3, 5, 8), False),
    ("bi,ij", (8, 4), (3, 8), False),
    ("bld,d->bl", (8,), (3, 5, 8), False),
    ("nchw,oc->nohw", (6, 8), (2, 8, 3, 3), False),
]


@pytest.mark.parametrize(("equation", "shape", "given", "first"), PRODUCTS)
def test_a_product_with_a_parameter_is_a_product_with_a_weight(
    equation: str, shape: tuple[int, ...], given: tuple[int, ...], first: bool
) -> None:
    model, x = Written(equation, shape, first).eval(), rand(*given)
    gm = qfx.capture_graph(model, x).module
    torch.testing.assert_close(gm(x)[0], model(x))
    (row,) = quantize(model, INT8_WEIGHT_ONLY, [x]).report()
    assert (row.name, row.weight) == ("weight", "int8 channel")


@pytest.mark.parametrize(
    ("equation", "shape", "given", "first"),
    [
        ("bchw,c->bchw", (4,), (2, 4, 3, 5), False),
        ("c,b...c->b...c", (4,), (2, 3, 4), True),
        ("btc,ct->bct", (4, 3), (2, 3, 4), False),
        ("bc,c->bc", (4,), (2, 1), False),
    ],
)
def test_a_factor_per_channel_is_a_product_of_elements(
    equation: str, shape: tuple[int, ...], given: tuple[int, ...], first: bool
) -> None:
    model, x = Written(equation, shape, first).eval(), rand(*given)
    gm = qfx.capture_graph(model, x, dynamic_shapes={"x": {}}).module
    torch.testing.assert_close(gm(x)[0], model(x), rtol=0, atol=0)
    names = [target_name(node) for node in gm.graph.nodes]
    assert "aten.mul.Tensor" in names
    assert "aten.einsum.default" not in names


@pytest.mark.parametrize(
    ("equation", "shape", "given"),
    [("bi,oi->bio", (6, 8), (3, 8)), ("bii,io->bo", (8, 4), (3, 8, 8)), ("bi,io->b", (8, 4), (3, 8))],
)
def test_other_equations_stay(equation: str, shape: tuple[int, ...], given: tuple[int, ...]) -> None:
    model, x = Written(equation, shape, False).eval(), rand(*given)
    gm = qfx.capture_graph(model, x).module
    torch.testing.assert_close(gm(x)[0], model(x))
    assert "aten.einsum.default" in [target_name(node) for node in gm.graph.nodes]
    (row,) = quantize(model, INT8_WEIGHT_ONLY, [x]).report()
    assert "no quantization rule for aten.einsum.default" in row.reason
