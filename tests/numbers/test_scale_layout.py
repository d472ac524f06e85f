"""Which scale belongs to which element: as stored, as the matrices an operator multiplies by, and in the operators."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny import rand, seeded
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx import ops
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.graph.linear_map import LinearMap
from quark_fx.numbers import quantized_tensor
from quark_fx.numbers.formats import INT3, INT8
from quark_fx.numbers.layout import Columns, Layout
from quark_fx.numbers.qparams import QParams, Scheme
from quark_fx.passes import GPTQ, FitScales
from quark_fx.presets import W4A16_BEST, W4A16_RTN


def scale_of(index: tuple[int, ...], shape: tuple[int, ...], axis: int | None, block: int) -> tuple[int, ...]:
    """Return the index of the scale of an element, by the definition in `quark_fx.numbers.ops`."""
    if axis is None:
        return ()
    axis %= len(shape)
    if block == 0:
        return (index[axis],)
    along = 0 if block < 0 else index[axis] // block
    return (*index[:axis], along, *index[axis + 1 :])


@st.composite
def stored(draw: st.DrawFn) -> tuple[tuple[int, ...], int | None, int]:
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    axis = draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    return shape, axis, draw(st.sampled_from([0, -1, 1, 2, 3, 5, 7]))


def numbered(layout: Layout) -> Tensor:
    """Return scales that are all different, whole numbers from 1."""
    return torch.arange(1.0, 1 + torch.Size(layout.scale_shape).numel()).reshape(layout.scale_shape)


@given(stored(), st.integers(1, 40))
@settings(max_examples=150, deadline=None)
@example(((6, 4), -2, 2), 5)
@example(((6, 4), -2, 0), 5)
def test_every_element_has_the_scale_of_the_definition(
    case: tuple[tuple[int, ...], int | None, int], at_once: int
) -> None:
    shape, axis, block = case
    layout = Layout.of(shape, axis, block)
    scale = numbered(layout)
    expected = torch.empty(shape)
    for index in torch.cartesian_prod(*map(torch.arange, shape)).reshape(-1, len(shape)).tolist():
        expected[tuple(index)] = scale[scale_of(tuple(index), shape, axis, block)]
    assert torch.equal(layout.spread(scale).expand(shape), expected)
    codes, zero = torch.ones(shape, dtype=torch.int8), torch.zeros_like(scale, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_tensor, "AT_ONCE", at_once)  # a piece of a few rows, that ends within a block or not
        assert torch.equal(ops.dequantize(codes, scale, zero, "int16", axis, block), expected)
        found = ops.encode(6 * expected, QParams(scale, zero), Scheme(format=INT8), axis, block)
    assert bool((found == 6).all())
    assert bool((ops.quantize(6 * expected, scale, zero, "int8", axis, block) == 6).all())


@pytest.mark.parametrize(("axis", "block"), [(-2, 2), (-2, 0), (0, 3), (-1, 128), (1, 0)])
def test_a_large_tensor_has_the_values_of_its_rows(axis: int, block: int) -> None:
    layout = Layout.of((4096, 1024), axis, block)
    codes, scale = rand(4096, 1024).mul(40).to(torch.int8), rand(*layout.scale_shape, seed=1).abs() + 0.1
    zero = torch.zeros(layout.scale_shape, dtype=torch.int32)
    got = ops.dequantize(codes, scale, zero, "int8", axis, block)
    assert torch.equal(got, codes.float() * layout.spread(scale))


def test_pieces_cover_the_rows_and_cut_through_no_block() -> None:
    for rows, block, most in itertools.product((12, 100), (0, 2, 3, 7), (8, 30)):
        pieces = [piece for piece in Layout.of((rows, 4), 0, block).pieces(most) if isinstance(piece, slice)]
        ends = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == ends[:-1]
        assert ends[-2] < rows <= ends[-1]
        assert all(end % max(1, block) == 0 for end in ends)


def test_an_axis_beyond_the_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="axis 2 does not exist in a tensor with 2 dimensions"):
        Layout.of((2, 3), 2, 0)


@dataclass(frozen=True)
class Case:
    """A weight, how it multiplies, and the dimension its groups lie along."""

    shape: tuple[int, ...]
    mapping: LinearMap
    inputs: int


@st.composite
def multiplied(draw: st.DrawFn) -> Case:
    outputs, inputs, groups = (draw(st.integers(1, 7)) for _ in range(3))
    kind = draw(st.sampled_from(["linear", "turned", "stack", "turned stack", "conv"]))
    if kind == "conv":
        kernel = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
        return Case((groups * outputs, inputs, *kernel), LinearMap(groups, kernel), 1)
    matrix = (inputs, outputs) if "turned" in kind else (outputs, inputs)
    stacked = "stack" in kind
    mapping = LinearMap(groups if stacked else 1, transposed="turned" in kind, stacked=stacked)
    shape = (groups, *matrix) if stacked else matrix
    return Case(shape, mapping, len(shape) - (2 if "turned" in kind else 1))


@given(multiplied(), st.sampled_from([-1, 1, 2, 3, 16]))
@settings(max_examples=200, deadline=None)
@example(Case((4, 5, 3, 3), LinearMap(2, (3, 3)), 1), 2)
def test_both_views_agree_element_by_element(case: Case, block: int) -> None:
    layout = Layout.of(case.shape, case.inputs - len(case.shape), block)
    scale = numbered(layout)
    columns = layout.columns(case.mapping)
    assert columns is not None
    seen = layout.matrices(scale, case.mapping)
    assert torch.equal(seen, case.mapping.matrix(layout.spread(scale).expand(case.shape)))
    rows = seen.shape[:2]
    # A number per row and scale of `columns` goes to the stored scale that those columns have.
    by_number = torch.empty(*rows, columns.count)
    for number, members in enumerate(columns.members()):
        same = seen[..., members]
        assert bool((same == same[..., :1]).all())
        by_number[..., number] = same[..., 0]
    assert torch.equal(columns.spread(by_number), seen)
    assert torch.equal(layout.restore(by_number, case.mapping), scale)
    assert columns.count == len(seen[0, 0].unique())
    # Sums over what shares a scale, element by element.
    x = rand(*seen.shape)
    expected = torch.stack([x[..., columns.numbers == n].sum(-1) for n in range(columns.count)], -1)
    torch.testing.assert_close(columns.gather(x).sum(-1), expected)


@given(multiplied())
@settings(max_examples=60, deadline=None)
def test_a_scale_per_row_is_one_of_all_its_columns(case: Case) -> None:
    own = case.mapping.row_dims(len(case.shape))
    if case.mapping.stacked:  # a vector would be shared by the matrices
        vector = Layout.of(case.shape, own[1], 0)
        assert (vector.columns(case.mapping) is None) == (case.shape[0] > 1)
        return
    layout = Layout.of(case.shape, own[0], 0)
    columns = layout.columns(case.mapping)
    assert columns is not None
    assert columns.count == 1
    rows = rand(case.mapping.groups, case.shape[own[0]] // case.mapping.groups, 1)
    stored = layout.restore(rows, case.mapping)
    assert stored.shape == layout.scale_shape
    assert torch.equal(layout.matrices(stored, case.mapping), rows.expand(layout.matrices(stored, case.mapping).shape))


@pytest.mark.parametrize(("axis", "block"), [(None, 0), (1, 0), (0, 2)])
def test_scales_that_rows_share_have_no_columns(axis: int | None, block: int) -> None:
    assert Layout.of((4, 6), axis, block).columns(LinearMap()) is None


def test_contiguous_columns_are_slices() -> None:
    assert Columns.in_blocks(10, 4).members() == [slice(0, 4), slice(4, 8), slice(8, 10)]


GROUPS = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=16)


def wide(groups: int = 1) -> nn.Module:
    """A convolution whose channels and weights differ much in size."""
    conv = seeded(nn.Conv2d(40, 16, 3, bias=False, groups=groups))
    with torch.no_grad():
        conv.weight.mul_(rand(*conv.weight.shape, seed=1).abs() ** 3)
    return conv


def pictures(count: int, first: int = 0) -> list[Tensor]:
    return [rand(8, 40, 6, 6, seed=first + i) * torch.linspace(0.1, 3, 40).reshape(-1, 1, 1) for i in range(count)]


def blended(count: int, first: int = 0) -> list[Tensor]:
    """Pictures whose channels are correlated, as those of real ones are."""
    blend = rand(40, 10, seed=9) / 3 * torch.linspace(0.1, 3, 40).reshape(-1, 1)
    common = (rand(8, 10, 6, 6, seed=first + i) for i in range(count))
    return [
        torch.einsum("oc,ncij->noij", blend, c) + 0.3 * x for c, x in zip(common, pictures(count, first), strict=True)
    ]


def lost(
    model: nn.Module, passes: tuple[Any, ...], data: list[Tensor], learned: Callable[[int], list[Tensor]] = pictures
) -> float:
    config = QuantConfig(weight=GROUPS, passes=passes, target=Target.TORCH)
    qmodel = qfx.quantize(model, config, learned(6), progress=False)
    with torch.no_grad():
        return sum(float(F.mse_loss(qmodel(x), model(x))) for x in data)


@pytest.mark.parametrize("groups", [1, 2])
def test_fitted_group_scales_of_a_wide_kernel_lower_the_error_on_unseen_data(groups: int) -> None:
    """40 channels in groups of 16 at each of 9 places of the kernel: strided columns, and a short group."""
    model, unseen = wide(groups), pictures(3, first=100)
    assert lost(model, (FitScales(),), unseen) < 0.95 * lost(model, (), unseen)
    for feedback in (GPTQ(), GPTQ(fit_scales=True)):
        assert lost(model, (feedback,), blended(3, first=100), blended) < 0.8 * lost(model, (), blended(3, first=100))


@pytest.mark.parametrize("groups", [1, 2])
def test_what_feedback_learns_of_noise_is_dropped(groups: int) -> None:
    """768 rows of 360 independent inputs have correlations by chance, which others do not have."""
    model, unseen = wide(groups), pictures(3, first=100)
    for feedback in (GPTQ(), GPTQ(fit_scales=True)):
        assert lost(model, (feedback,), unseen) <= lost(model, (), unseen)


def test_the_preset_that_fits_scales_is_better_than_rounding_on_a_convolutional_network() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(40, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3), nn.Flatten()))
    unseen = pictures(3, first=100)
    errors = []
    for preset in (W4A16_RTN, W4A16_BEST):
        qmodel = qfx.quantize(model, preset.replace(group_size=32, exclude=()), pictures(6), progress=False)
        with torch.no_grad():
            errors.append(sum(float(F.mse_loss(qmodel(x), model(x))) for x in unseen))
    assert errors[1] < 0.7 * errors[0]
