"""Every argument of an operator is in the file: torch and ONNX Runtime agree over grids of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from tiny import all_but, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import QuantConfig

Variants = dict[str, Callable[..., Any]]


def grid(function: Callable[..., Any], **choices: tuple[Any, ...]) -> Variants:
    """Return a call of `function` for every combination of arguments, by what they are."""
    made: Variants = {}
    for values in itertools.product(*choices.values()):
        arguments = dict(zip(choices, values, strict=True))
        name = "_".join(f"{key}_{value}" for key, value in arguments.items())
        made[f"{function.__name__}_{name}"] = lambda *xs, arguments=arguments: function(*xs, **arguments)
    return made


def pools(rank: int) -> Variants:
    average, largest = getattr(F, f"avg_pool{rank}d"), getattr(F, f"max_pool{rank}d")
    both = {"stride": (2, 3) if rank > 1 else (2,), "padding": (0, 1), "ceil_mode": (False, True)}
    more: dict[str, tuple[Any, ...]] = {"divisor_override": (None, 1, 5)} if rank > 1 else {}
    return {
        **grid(average, kernel_size=(3,), count_include_pad=(False, True), **both, **more),
        **grid(largest, kernel_size=(3,), dilation=(1, 2), **both),
    }


def adaptive(rank: int, sizes: tuple[Any, ...]) -> Variants:
    return grid(getattr(F, f"adaptive_avg_pool{rank}d"), output_size=sizes)


def resizes() -> Variants:
    """Return bilinear calls with every argument, and fewer bicubic ones: torch traces them for half a second each."""
    aligned = {"align_corners": (False, True)}
    factors = {"scale_factor": (2, (1.5, 0.7)), "recompute_scale_factor": (None, True)}
    made: Variants = {}
    for how in ({"size": ((5, 17), (20, 22))}, factors):
        made |= grid(F.interpolate, mode=("bilinear",), **aligned, **how)
        made |= grid(F.interpolate, mode=("nearest", "nearest-exact", "area"), **how)
    made |= grid(F.interpolate, mode=("bicubic",), size=((5, 17),), **aligned)
    made |= grid(F.interpolate, mode=("bicubic",), scale_factor=((1.5, 0.7),), recompute_scale_factor=(None, True))
    return made | grid(F.interpolate, size=((5, 6),), mode=("bilinear", "bicubic"), antialias=(True,))


def pads() -> Variants:
    modes = ("constant", "reflect", "replicate", "circular")
    return {
        **grid(F.pad, pad=((1, 2, 3, 0),), mode=modes),
        **grid(F.pad, pad=((1, 2, 3, 0), (-1, 2, 1, -1)), value=(0.0, 1.5)),
    }


def samples() -> Variants:
    """Return calls with every argument, but of the bicubic ones, which torch traces for two seconds each, two."""
    padded = {"padding_mode": ("zeros", "border", "reflection"), "align_corners": (False, True)}
    return {
        **grid(F.grid_sample, mode=("bilinear", "nearest"), **padded),
        **grid(F.grid_sample, mode=("bicubic",), padding_mode=("zeros",), align_corners=(False,)),
        **grid(F.grid_sample, mode=("bicubic",), padding_mode=("reflection",), align_corners=(True,)),
    }


def bicubic_resizes() -> Variants:
    aligned = {"mode": ("bicubic",), "align_corners": (False, True)}
    factors = {"scale_factor": (2, (1.5, 0.7)), "recompute_scale_factor": (None, True)}
    return {**grid(F.interpolate, size=((5, 17), (20, 22)), **aligned), **grid(F.interpolate, **aligned, **factors)}


def bicubic_samples() -> Variants:
    modes = {"mode": ("bicubic",), "padding_mode": ("zeros", "border", "reflection")}
    return grid(F.grid_sample, align_corners=(False, True), **modes)


def softmaxes() -> Variants:
    dims = {"dim": (0, 1, -1)}
    return {**grid(F.softmax, **dims), **grid(F.log_softmax, **dims), **grid(F.normalize, p=(1.0, 2.0), **dims)}


def activations() -> Variants:
    return {
        **grid(F.gelu, approximate=("none", "tanh")),
        **grid(F.elu, alpha=(0.3, 1.0)),
        **grid(F.celu, alpha=(0.3,)),
        **grid(F.leaky_relu, negative_slope=(0.3,)),
        **grid(F.hardtanh, min_val=(-0.3,), max_val=(0.7,)),
        **grid(F.softplus, beta=(2.0,), threshold=(1.0,)),
        **grid(F.hardshrink, lambd=(0.3,)),
        **grid(F.softshrink, lambd=(0.3,)),
        **grid(F.threshold, threshold=(0.2,), value=(-5.0,)),
        **grid(F.glu, dim=(1, -1)),
    }


def reductions() -> Variants:
    along: dict[str, tuple[Any, ...]] = {"dim": (1, (0, 2), -1), "keepdim": (False, True)}
    one: dict[str, tuple[Any, ...]] = {"dim": (0, -1), "keepdim": (False, True)}
    return {
        **grid(torch.mean, **along),
        **grid(torch.sum, **along),
        **grid(torch.amax, **along),
        **grid(torch.var, correction=(0, 1, 2), **along),
        **grid(torch.std, correction=(0, 1), **along),
        **grid(torch.logsumexp, **along),
        **grid(torch.linalg.vector_norm, ord=(1, 2, 3, float("inf")), **along),
        **grid(torch.prod, **one),
        **grid(torch.argmax, **one),
        **grid(torch.cumsum, dim=(0, -1)),
    }


def arithmetic() -> Variants:
    def added(x: Tensor, **arguments: Any) -> Tensor:
        return torch.add(x, x * x, **arguments)

    def subtracted(x: Tensor, **arguments: Any) -> Tensor:
        return torch.sub(x, x * x, **arguments)

    def product_and_sum(x: Tensor, **arguments: Any) -> Tensor:
        return torch.addmm(x[0, 0, :, :5], x[0, 1], torch.ones(12, 5) / 5, **arguments)

    return {
        **grid(added, alpha=(0.3, 2)),
        **grid(subtracted, alpha=(0.3, 2)),
        **grid(torch.rsub, other=(2,), alpha=(0.5,)),
        **grid(torch.div, other=(0.3,), rounding_mode=(None, "floor", "trunc")),
        **grid(product_and_sum, alpha=(1, 0.3), beta=(0, 1, 0.5)),
        **grid(torch.clamp, min=(None, -0.1), max=(0.2,)),
        **grid(torch.round, decimals=(0, 1)),
    }


def moves() -> Variants:
    return {
        **grid(torch.roll, shifts=((1, -2),), dims=((2, 3),)),
        **grid(torch.flip, dims=((1,), (2, 3))),
        **grid(torch.tril, diagonal=(-1, 0, 2)),
        **grid(torch.repeat_interleave, repeats=(2,), dim=(1, 3)),
        **grid(F.unfold, kernel_size=(3,), dilation=(1, 2), padding=(0, 1), stride=(1, 2)),
        **grid(F.pixel_unshuffle, downscale_factor=(2,)),
        **grid(F.channel_shuffle, groups=(2,)),
        **grid(torch.diagonal, offset=(0, 1), dim1=(2,), dim2=(3,)),
        **grid(torch.squeeze, dim=(1, 2, -1)),
        **grid(torch.sort, dim=(1, -1), descending=(False, True)),
        **grid(torch.topk, k=(2,), dim=(1, -1), largest=(False, True)),
    }


IMAGE = (rand(2, 4, 10, 12),)
SIGNAL, VOLUME = (rand(2, 4, 13),), (rand(2, 4, 5, 6, 7),)
PLACES = torch.rand(2, 5, 6, 2, generator=torch.Generator().manual_seed(3)) * 2.4 - 1.2

FAMILIES: dict[str, tuple[Variants, tuple[Tensor, ...]]] = {
    "pools of signals": (pools(1), SIGNAL),
    "pools of images": (pools(2), (rand(2, 4, 9, 11),)),
    "pools of volumes": (pools(3), (rand(2, 4, 7, 8, 9),)),
    "adaptive pools of signals": (adaptive(1, (1, 4, 5, 13, 20)), SIGNAL),
    "adaptive pools of images": (adaptive(2, (1, (5, 4), (4, 5), (10, 1), (12, 13))), IMAGE),
    "adaptive pools of volumes": (adaptive(3, (1, (2, 3, 4), (5, 6, 7))), VOLUME),
    "resizes": (resizes(), IMAGE),
    "padding": (pads(), IMAGE),
    "samples": (samples(), (*IMAGE, PLACES)),
    "every bicubic resize": (bicubic_resizes(), IMAGE),
    "every bicubic sample": (bicubic_samples(), (*IMAGE, PLACES)),
    "softmax": (softmaxes(), IMAGE),
    "activations": (activations(), IMAGE),
    "reductions": (reductions(), IMAGE),
    "arithmetic": (arithmetic(), IMAGE),
    "moves": (moves(), IMAGE),
}

TRACED_SLOWLY = ("resizes", "samples")
"""Families that torch traces as hundreds of operators each, here with fixed sizes: arguments, not sizes, are at stake.
Files for sizes that vary are in `export/test_stable_functions.py`."""


class Together(nn.Module):
    """All variants of a family, each an output."""

    def __init__(self, variants: Variants) -> None:
        super().__init__()
        self.variants = variants

    def forward(self, *xs: Tensor) -> list[Any]:
        return [variant(*xs) for variant in self.variants.values()]


def agrees(
    model: nn.Module, xs: tuple[Tensor, ...], tmp_path: Path, config: Any = "int8_weight_only", **options: Any
) -> None:
    qmodel = quantize(model, config, [xs], **options)
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx", output_names=None)
    result = qfx.verify(qmodel, path, [xs])
    wrong = {difference.name: difference.steps for difference in result.differences if difference.steps > 0.01}
    assert not wrong


@pytest.mark.filterwarnings("ignore:nothing was quantized")
@pytest.mark.parametrize("family", all_but(FAMILIES, ("every bicubic resize", "every bicubic sample")))
def test_no_argument_is_left_out(family: str, tmp_path: Path) -> None:
    variants, xs = FAMILIES[family]
    sizes: Any = {"xs": tuple({} for _ in xs)} if family in TRACED_SLOWLY else None
    agrees(Together(variants).eval(), xs, tmp_path, QuantConfig(), dynamic_shapes=sizes)


FORWARD: tuple[dict[str, Any], ...] = (
    {"kernel_size": 3, "stride": 2, "padding": 1, "groups": 2},
    {"kernel_size": 2, "padding": "same"},
    {"kernel_size": 3, "padding": "same", "dilation": 2, "groups": 4},
    {"kernel_size": 3, "padding": "valid", "bias": False},
    *({"kernel_size": 3, "padding": 1, "padding_mode": mode} for mode in ("reflect", "replicate", "circular")),
)
TRANSPOSED: tuple[dict[str, Any], ...] = (
    {"kernel_size": 3, "stride": 2, "padding": 1, "output_padding": 1},
    {"kernel_size": 3, "stride": 2, "groups": 2, "dilation": 2},
    {"kernel_size": 2, "groups": 4, "bias": False},
)


class Each(nn.Module):
    """Modules that read one value, each an output."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.each = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [module(x) for module in self.each]


@pytest.mark.parametrize(("rank", "xs"), [(1, SIGNAL), (2, IMAGE), (3, VOLUME)])
def test_no_argument_of_a_convolution_is_left_out(rank: int, xs: tuple[Tensor, ...], tmp_path: Path) -> None:
    forward = [getattr(nn, f"Conv{rank}d")(4, 8, **arguments) for arguments in FORWARD]
    transposed = [getattr(nn, f"ConvTranspose{rank}d")(4, 8, **arguments) for arguments in TRANSPOSED]
    agrees(seeded(Each([*forward, *transposed])), xs, tmp_path)


class Attention(nn.Module):
    """Attention of a linear's values to themselves."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.linear, self.arguments = nn.Linear(8, 8), arguments

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.linear(x)
        return F.scaled_dot_product_attention(q, q + 1, q * 2, mask, **self.arguments)


SHAPES = {2: (5, 8), 3: (2, 5, 8), 4: (2, 3, 5, 8), 5: (2, 2, 3, 5, 8), 6: (2, 2, 1, 3, 5, 8)}


ATTENTIONS: tuple[dict[str, Any], ...] = ({}, {"is_causal": True}, {"scale": 0.3}, {"is_causal": True, "scale": 0.3})


@pytest.mark.parametrize("rank", SHAPES)
def test_attention_of_any_rank_is_exported(rank: int, tmp_path: Path) -> None:
    agrees(seeded(Each([Attention(**arguments) for arguments in ATTENTIONS])), (rand(*SHAPES[rank]),), tmp_path)


class EachWithItsMask(Each):
    """Attentions to one value, each with a mask."""

    def forward(self, x: Tensor, *masks: Tensor) -> list[Tensor]:
        return [module(x, mask) for module, mask in zip(self.each, masks, strict=True)]


@pytest.mark.parametrize("rank", SHAPES)
def test_attention_of_any_rank_takes_a_mask(rank: int, tmp_path: Path) -> None:
    """Floats and booleans, which forbid a row or not, and floats of every head."""
    floats = rand(5, 5)
    booleans = (floats > 0) | torch.eye(5, dtype=torch.bool)
    masks = [floats, floats.clone(), booleans, booleans.clone(), rand(*SHAPES[rank][:-1], 5)]
    masks[1][2], masks[3][2] = -torch.inf, False
    model = seeded(EachWithItsMask([Attention() for _ in masks]))
    agrees(model, (rand(*SHAPES[rank]), *masks), tmp_path)


class Masked(Attention):
    """Attention with a mask of its own."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, self.mask)


@pytest.mark.parametrize("rank", SHAPES)
def test_only_a_stored_mask_that_forbids_a_row_costs_a_selection(rank: int, tmp_path: Path) -> None:
    some, row = rand(5, 5), rand(5, 5)
    some[2, :4] = row[2] = -torch.inf
    agrees(seeded(Each([Masked(some), Masked(row)])), (rand(*SHAPES[rank]),), tmp_path)
    operators = [node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node]
    assert operators.count("Where") == 1


@pytest.mark.parametrize(("shape", "dim"), [((4, 8), -1), ((4, 8), 1), ((4, 1), -1), ((4, 1, 8), 1)])
def test_a_dimension_is_squeezed_where_its_size_is_one(shape: tuple[int, ...], dim: int, tmp_path: Path) -> None:
    class Squeeze(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(shape[-1], shape[-1])

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).squeeze(dim)  # type: ignore[no-any-return]

    agrees(seeded(Squeeze()), (rand(*shape),), tmp_path, "int8_static")


@pytest.mark.parametrize("size", [(3, 3), (4, 5), (8, 2)])
@pytest.mark.parametrize("preset", ["int8_static", "xint8"])
def test_an_adaptive_pool_may_have_windows_of_unequal_size(size: tuple[int, int], preset: str, tmp_path: Path) -> None:
    model = seeded(nn.Sequential(nn.Conv2d(4, 4, 1), nn.AdaptiveAvgPool2d(size), nn.Conv2d(4, 2, 1)))
    qmodel = quantize(model, preset, [IMAGE[0]])
    path = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert round(qfx.verify(qmodel, path, [IMAGE[0]]).max_steps, 3) <= 1


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...], str]] = {
    "antialiased corners": (
        lambda: Together(
            grid(F.interpolate, size=((5, 6),), mode=("bilinear",), antialias=(True,), align_corners=(True,))
        ),
        IMAGE,
        "antialias=True with align_corners=True",
    ),
    "projected LSTM": (lambda: nn.LSTM(8, 6, proj_size=3), (rand(3, 2, 8),), "LSTM with proj_size"),
}


@pytest.mark.filterwarnings("ignore:nothing was quantized")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_form_in_onnx_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, xs, words = REFUSED[name]
    qmodel = quantize(make().eval(), QuantConfig(), [xs])
    with pytest.raises(qfx.ExportError, match=words):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
