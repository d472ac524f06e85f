"""The view of a weighted operator says what torch's operator does: each claim is tried against the operator itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import rand
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.graph.linear import Linear
from quark_fx.graph.nodes import is_parameter, parameter, set_parameter, target_name, tensor_of
from quark_fx.plan.pair_sums import pair_bound
from quark_fx.presets import INT8_STATIC

pytestmark = pytest.mark.filterwarnings("ignore:the model fixes dimension", "ignore:Using padding='same'")

Case = tuple[nn.Module, Tensor]
"""A module with one weighted operator, in float64, and its input."""


class Call(nn.Module):
    """One function of an input and parameters."""

    def __init__(self, function: Any, *parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.parameters_ = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x, *self.parameters_)
        return y


def convolution(groups: int, stride: int, padding: int, dilation: int, rank: int, *, transposed: bool) -> Case:
    names = {1: "Conv1d", 2: "Conv2d", 3: "Conv3d"}
    made = getattr(nn, names[rank].replace("Conv", "ConvTranspose") if transposed else names[rank])
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    kernel = (3, 2, 2)[:rank]
    return made(2 * groups, 3 * groups, kernel, **options), rand(2, 2 * groups, *(7,) * rank)


convolutions = st.builds(
    convolution,
    groups=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 1),
    dilation=st.integers(1, 2),
    rank=st.integers(1, 3),
    transposed=st.booleans(),
)

PRODUCTS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (F.linear, (4, 5), (2, 5)),
    "linear of three dimensions": (F.linear, (4, 5), (2, 3, 5)),
    "matmul": (lambda x, w: x @ w, (5, 4), (2, 3, 5)),
    "mm": (torch.mm, (5, 4), (2, 5)),
    "mm, weight turned": (lambda x, w: torch.mm(x, w.t()), (4, 5), (2, 5)),
    "bmm": (torch.bmm, (2, 5, 4), (2, 3, 5)),
    "bmm, weights turned": (lambda x, w: torch.bmm(x, w.transpose(1, 2)), (2, 4, 5), (2, 3, 5)),
    "addmm": (lambda x, w: torch.addmm(torch.zeros(4).double(), x, w), (5, 4), (2, 5)),
    "convolution, kernel in front": (lambda x, w: F.conv2d(x, w.permute(2, 3, 0, 1)), (3, 2, 4, 5), (2, 5, 7, 7)),
    "convolution, inputs in front": (lambda x, w: F.conv2d(x, w.transpose(0, 1)), (5, 4, 3, 2), (2, 5, 7, 7)),
}


@st.composite
def products(draw: Any) -> Case:
    function, weight, x = PRODUCTS[draw(st.sampled_from(sorted(PRODUCTS)))]
    return Call(function, rand(*weight, seed=2)), rand(*x)


cases = st.one_of(convolutions, products())


def view(case: Case) -> tuple[GraphModule, Linear]:
    """Return the captured graph of a module, and the view of its one operator."""
    gm = qfx.capture_graph(case[0].double().eval(), case[1].double()).module
    (found,) = [linear for node in gm.graph.nodes if (linear := Linear.of(node)) is not None]
    return gm, found


def run(gm: GraphModule, linear: Linear, x: Tensor, weight: Tensor | None = None) -> Tensor:
    """Return what the operator makes without its bias, with another weight if there is one."""
    name = str(linear.stored.node.target)
    old = tensor_of(gm, name)
    set_parameter(gm, name, old if weight is None else weight)
    if is_parameter(linear.bias):
        set_parameter(gm, str(linear.bias.target), torch.zeros_like(parameter(gm, linear.bias)))
    with torch.no_grad():
        (y,) = gm(x)
    set_parameter(gm, name, old)
    assert isinstance(y, Tensor)
    return y


def factors(count: int, seed: int) -> Tensor:
    return rand(count, seed=seed).double()


def along(values: Tensor, dim: int, rank: int) -> Tensor:
    return values.reshape([-1 if d == dim else 1 for d in range(rank)])


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)  # float64: sums of a few dozen products


@given(case=cases)
@settings(deadline=None, max_examples=40)
def test_what_channels_are_multiplied_by_or_gain_is_what_the_view_says(case: Case) -> None:
    """A factor per input or output channel belongs into the weight where the view lays it."""
    gm, linear = view(case)
    x = case[1].double()
    y = run(gm, linear, x)
    read, made = linear.channel_dim(x.dim()), linear.channel_dim(y.dim())
    s, t, shift = factors(x.shape[read], 3), factors(y.shape[made], 4), factors(x.shape[read], 5)
    weight = tensor_of(gm, str(linear.stored.node.target))
    assert_same(run(gm, linear, x, weight * linear.of_inputs(s)), run(gm, linear, x * along(s, read, x.dim())))
    assert_same(run(gm, linear, x, weight * linear.of_outputs(t)), y * along(t, made, y.dim()))
    found = linear.response(weight, shift)
    if found is None:
        assert linear.kind == "conv_transpose" or linear.stacked
    elif not linear.pads:
        moved = run(gm, linear, x + along(shift, read, x.dim())) - y
        expected = along(found.double(), made, y.dim()).expand_as(y)
        torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)  # the response is float32


@given(case=convolutions)
@settings(deadline=None, max_examples=15)
def test_the_geometry_is_what_the_module_was_made_with(case: Case) -> None:
    module: Any = case[0]
    _, linear = view(case)
    assert linear.groups == module.groups
    assert (linear.kernel, linear.stride, linear.dilation) == (module.kernel_size, module.stride, module.dilation)
    assert linear.padding == tuple((size, size) for size in module.padding)
    transposed = isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    assert (linear.kind == "conv_transpose") is linear.transposed is transposed
    assert linear.output_groups == (module.groups if transposed else 1)
    assert linear.shape[linear.output_axis] * linear.output_groups == module.out_channels
    channels = linear.shape[linear.input_axis] * (1 if transposed else module.groups)
    assert channels == module.in_channels


def test_padding_by_name_is_what_torch_pads() -> None:
    _, same = view((nn.Conv2d(2, 3, (4, 1), padding="same", dilation=(2, 1)), rand(2, 2, 9, 9)))
    assert (same.padding, same.pads) == (((3, 3), (0, 0)), True)
    _, odd = view((nn.Conv1d(2, 3, 4, padding="same"), rand(2, 2, 9)))
    assert odd.padding == ((1, 2),)
    _, single = view((nn.Conv1d(2, 3, 1, padding="same"), rand(2, 2, 9)))
    assert not single.pads
    _, valid = view((nn.Conv1d(2, 3, 4, padding="valid"), rand(2, 2, 9)))
    assert not valid.pads


TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "mT": lambda w: w.mT,
    "mH": lambda w: w.mH,
    "H": lambda w: w.H,
    "T": lambda w: w.T,
    "t": lambda w: w.t(),
    "adjoint": lambda w: w.adjoint(),
    "transpose": lambda w: w.transpose(-1, -2),
    "swapdims": lambda w: w.swapdims(0, 1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "movedim": lambda w: w.movedim(0, 1),
    "moveaxis": lambda w: torch.moveaxis(w, (0, 1), (1, 0)),
    "permute": lambda w: w.permute(1, 0),
}


@pytest.mark.parametrize("name", TURNS)
def test_a_weight_is_found_whatever_turns_it(name: str) -> None:
    turn = TURNS[name]
    _, linear = view((Call(lambda x, w: x @ turn(w), rand(4, 5)), rand(2, 3, 5)))
    assert (linear.shape, linear.output_axis, linear.input_axis) == ((4, 5), 0, 1)


NO_PRODUCTS: dict[str, Case] = {
    "two activations": (Call(lambda x: x @ x.mT), rand(2, 3, 3)),
    "a table": (Call(lambda x, w: F.embedding(x.long(), w), rand(4, 3)), torch.ones(2, 2)),
    "a sum": (Call(lambda x, w: x + w, rand(3, 3)), rand(3, 3)),
}


@pytest.mark.parametrize("what", NO_PRODUCTS)
def test_what_multiplies_no_activation_by_a_weight_has_no_view(what: str) -> None:
    module, x = NO_PRODUCTS[what]
    gm = qfx.capture_graph(module.eval(), x).module
    assert [Linear.of(node) for node in gm.graph.nodes] == [None] * len(gm.graph.nodes)


def test_the_view_at_a_converted_call_reads_the_codes_and_knows_no_stored_weight() -> None:
    model, x = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2)), rand(2, 4, 8, 8)
    _, before = view((model, x))
    quantized = qfx.quantize(model.float(), "int8_static", [x], progress=False)
    node = next(n for n in quantized.graph_module.graph.nodes if target_name(n) == "aten.conv2d.default")
    after = before.at(node)
    assert target_name(after.weight) == target_name(after.activation) == "quark_fx.dequantize.default"
    assert (after.groups, after.kernel, after.output_axis) == (2, (3, 3), 0)
    with pytest.raises(LookupError, match="does not read a stored weight"):
        _ = after.stored


def test_a_convolution_whose_weight_is_stored_otherwise_is_paired_as_its_kernel_lays_it_out() -> None:
    """The kernel adds pairs of input channels at one position, wherever the parameter has that dimension."""
    function, shape, x = PRODUCTS["convolution, kernel in front"]
    _, turned = view((Call(function, rand(*shape)), rand(*x)))
    _, plain = view((nn.Conv2d(5, 4, (3, 2)), rand(*x)))
    found, expected = (pair_bound(one.kind, one, INT8_STATIC.weight, INT8_STATIC.input) for one in (turned, plain))
    assert found is not None
    assert expected is not None
    codes = (60 * rand(*shape, seed=3)).round().clamp(-127, 127)
    assert found.exceeded(codes).any()
    assert torch.equal(found.exceeded(codes), expected.exceeded(codes.permute(2, 3, 0, 1)))
