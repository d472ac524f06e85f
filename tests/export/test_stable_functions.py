"""Functions of exp, log, powers, and variance are as accurate in the file as in torch, also for extreme inputs.

A sample of `python -m benchmarks.extreme_inputs`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from tiny import quantize
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.extreme_inputs import FUNCTIONS, Functions, differences, kinds_of
from quark_fx.errors import ExportError
from quark_fx.presets import INT8_STATIC

FLOAT = INT8_STATIC.replace(exclude=("*",))
INPUTS = kinds_of(torch.float32)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> onnxruntime.InferenceSession:
    qmodel = quantize(Functions(FUNCTIONS).eval(), FLOAT, [INPUTS["normal"]])
    return onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path_factory.mktemp("functions") / "model.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", INPUTS)
def test_a_file_is_as_accurate_as_torch(kind: str, session: onnxruntime.InferenceSession) -> None:
    assert not differences(FUNCTIONS, session, INPUTS[kind])


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "abs": torch.abs,
    "std of all": lambda x: x.std(),
    "std_mean": lambda x: torch.std_mean(x, (1,), correction=0)[0],
    "var": lambda x: x.var(-1),
}


def test_results_of_halves_are_halves(tmp_path: Path) -> None:
    x = INPUTS["normal"].half()
    file = qfx.export.onnx(quantize(Functions(HALVES).eval(), FLOAT, [x]), tmp_path / "model.onnx")
    assert not differences(HALVES, onnxruntime.InferenceSession(file), x)


BYTES: dict[str, Callable[[Tensor], Tensor]] = {
    "all": torch.all,
    "all along an axis": lambda x: torch.all(x, -1, keepdim=True),
    "any along axes": lambda x: torch.any(x, (0, 2)),
}

RESIZED: dict[str, Callable[[Tensor], Tensor]] = {
    f"{mode}, antialias={antialias}, {options}": functools.partial(
        F.interpolate, mode=mode, antialias=antialias, **options
    )
    for mode in ("bilinear", "bicubic")
    for antialias in (False, True)
    for options in (
        {"size": (7, 5)},
        {"size": (3, 4), "align_corners": True},
        {"scale_factor": (1.2, 1.6)},
    )
}


def test_results_of_bytes_are_bytes_and_rounded(tmp_path: Path) -> None:
    kinds = kinds_of(torch.uint8)
    file = qfx.export.onnx(quantize(Functions(BYTES).eval(), FLOAT, [kinds["small"]]), tmp_path / "model.onnx")
    for x in (*kinds.values(), torch.zeros_like(kinds["small"])):
        assert not differences(BYTES, onnxruntime.InferenceSession(file), x)


def test_interpolated_bytes_are_those_of_torch(tmp_path: Path) -> None:
    x = torch.randint(0, 256, (3, 2, 4, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    file = qfx.export.onnx(quantize(Functions(RESIZED).eval(), FLOAT, [x]), tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(file)
    for image in (x, x[:1].contiguous(), 255 - x):
        made = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        for (name, function), found in zip(RESIZED.items(), made, strict=True):
            assert torch.equal(torch.from_numpy(found), function(image)), name


@pytest.mark.parametrize(
    ("size", "name", "off", "right"),
    [
        ("height", "aten.upsample_bilinear2d 0", 1, True),
        ("height", "aten._upsample_bicubic2d_aa.vec 0", 1, True),
        ("height", "aten.upsample_bilinear2d 0", 2, False),
        (4, "aten.upsample_bilinear2d 0", 1, False),
        ("height", "aten.abs 0", 1, False),
    ],
)
def test_only_interpolated_bytes_of_sizes_that_vary_may_differ_by_one(
    size: int | str, name: str, off: int, right: bool
) -> None:
    x, function = kinds_of(torch.uint8)["small"], torch.abs
    made = [(function(x) + off).numpy()]
    file = SimpleNamespace(
        get_inputs=lambda: [SimpleNamespace(name="x", shape=[4, size, 6])],
        get_outputs=lambda: [SimpleNamespace(name=name)],
        run=lambda *_: made,
    )
    assert bool(differences({name: function}, cast(Any, file), x)) is not right


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.01), (torch.uint8, 1)])
def test_images_of_sizes_that_vary_are_interpolated_like_in_torch(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """Sizes times factors are fractions here; bytes are 0 and 255, where cubic weights leave the range.

    Bytes are interpolated as floats, so that half of the functions suffice: each pair of mode, filter, and size.
    """
    x = (255 * torch.randint(0, 2, (2, 1, 8, 6), generator=torch.Generator().manual_seed(0))).to(dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        f"{mode}, antialias={antialias}, {options}": functools.partial(
            F.interpolate, mode=mode, antialias=antialias, **options
        )
        for mode in ("bilinear", "bicubic")
        for antialias in (False, True)
        for options in ({"scale_factor": (1.3, 0.6)}, {"size": (7, 9)})
        if dtype.is_floating_point or (mode == "bicubic") == (antialias == ("size" in options))
    }
    sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
    qmodel = qfx.quantize(Functions(functions).eval(), FLOAT, [x], progress=False, dynamic_shapes={"x": sizes})
    session = onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    for image in (x, x[..., 1:]):
        results = session.run(None, {session.get_inputs()[0].name: image.numpy()})
        for (name, function), result in zip(functions.items(), results, strict=True):
            difference = torch.from_numpy(result).float() - function(image).float()
            assert difference.abs().max() <= tolerance, (name, image.shape)


ATTENTION: dict[str, Callable[[Tensor], Tensor]] = {
    "causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
    "rank 4, scale": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=0.5),
    "boolean mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril().bool()),
    "mask that forbids a row": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril(-1).bool()),
    "float mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.eye(4).to(x.dtype)),
}


def test_attention_in_float16_does_not_overflow(tmp_path: Path) -> None:
    x = kinds_of(torch.float16)["1e4"]
    file = qfx.export.onnx(quantize(Functions(ATTENTION).eval(), FLOAT, [x]), tmp_path / "model.onnx")
    assert not differences(ATTENTION, onnxruntime.InferenceSession(file), x)


def test_smoothed_labels_are_refused(tmp_path: Path) -> None:
    class Loss(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.cross_entropy(x, torch.tensor([0, 1, 5, 2]), label_smoothing=0.1)

    qmodel = quantize(Loss().eval(), FLOAT, [INPUTS["normal"][0]])
    with pytest.raises(ExportError, match="label_smoothing has no equivalent in ONNX; write the loss with log_softmax"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")


DIVISIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "floor, scalar": lambda x: torch.div(x, 7, rounding_mode="floor"),
    "trunc, scalar": lambda x: torch.div(x, -3, rounding_mode="trunc"),
    "floor": lambda x: torch.div(x, x.flip(0), rounding_mode="floor"),
    "trunc": lambda x: torch.div(x, x.flip(0), rounding_mode="trunc"),
    "floor_divide": lambda x: x // 7,
    "remainder": lambda x: x % 7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_quotients_that_round_up_to_an_integer_have_the_floor_below(dtype: torch.dtype, tmp_path: Path) -> None:
    a = torch.tensor([[1, 3, 0.7, -1, 6, -7.5, 1e4, 0, 2.0, -3]], dtype=dtype)
    b = torch.tensor([[0.1, 0.3, 0.1, 0.1, -0.2, 2.5, 0.1, 3, torch.inf, torch.inf]], dtype=dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "floor": lambda x: torch.div(x, b, rounding_mode="floor"),
        "//": lambda x: x // b,
        "// number": lambda x: x // 0.1,
        "number //": lambda x: 7.0 // x,
        "number %": lambda x: 7.0 % (x - 20),
        "% number": lambda x: x % 0.3,
        "integers // number": lambda x: x.long() // 0.1,
        "integers % number": lambda x: x.long() % 0.3,
        "number // integers": lambda x: 7.0 // (x.long() - 2),
        "fmod": lambda x: torch.fmod(x, 0.3),
    }
    file = qfx.export.onnx(quantize(Functions(functions).eval(), FLOAT, [a]), tmp_path / "model.onnx")
    results = onnxruntime.InferenceSession(file).run(None, {"x": a.numpy()})
    for function, result in zip(functions.values(), results, strict=True):
        assert torch.equal(torch.from_numpy(result), function(a))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8], ids=str)
def test_large_integers_are_divided_as_integers(dtype: torch.dtype, tmp_path: Path) -> None:
    x = kinds_of(dtype)["limits"]
    file = qfx.export.onnx(quantize(Functions(DIVISIONS).eval(), FLOAT, [x]), tmp_path / "model.onnx")
    assert not differences(DIVISIONS, onnxruntime.InferenceSession(file), x)
