"""Dimensions that the model's code fixes by converting a size computed from them to a number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx.capture.capture import Captured
from quark_fx.capture.guards import _fixes, _place_of_pieces


class Computed(nn.Module):
    """A strided convolution, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv1d(3, 4, 3, 2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of the convolution."""
        return self.function(self.conv(x))


FIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda y: y.sum(-1) / int(y.shape[-1]),
    "a range": lambda y: y * torch.linspace(0, 1, y.shape[-1]).sum(),
    "of a pool": lambda y: F.max_pool1d(y, 2).sum(-1) / int(y.shape[-1] // 2),
    "a comparison": lambda y: y * 2 if y.shape[-1] == 24 else y,
}

FREE: dict[str, Callable[[Tensor], Tensor]] = {
    "the size": lambda y: y.sum(-1) / y.shape[-1],
    "pairs": lambda y: y.unflatten(-1, (y.shape[-1] // 2, 2)).sum(-1),
    "windows": lambda y: y.unflatten(-1, (-1, 4)).sum(-1),
}


def captured(function: Callable[[Tensor], Tensor]) -> tuple[nn.Module, qfx.QuantizedModel]:
    torch.manual_seed(0)
    model = Computed(function).eval()
    return model, qfx.quantize(model, "int8_dynamic", [torch.randn(2, 3, 48)], progress=False)


@pytest.mark.parametrize("name", FIXING)
def test_a_size_computed_from_a_dimension_fixes_it(name: str) -> None:
    """A graph with the number of the example would compute something else for another size."""
    model, qmodel = captured(FIXING[name])
    assert qmodel.signature.input_shapes == ((None, 3, 48),)
    x = torch.randn(5, 3, 48)
    assert (qmodel(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()
    with pytest.raises(qfx.QuarkError, match="dimension 2 to 48"):
        qmodel(torch.randn(2, 3, 96))


@pytest.mark.parametrize("name", FREE)
def test_a_size_that_stays_a_size_fixes_nothing(name: str) -> None:
    model, qmodel = captured(FREE[name])
    assert qmodel.signature.input_shapes == ((None, 3, None),)
    x = torch.randn(2, 3, 96)
    assert (qmodel(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()


@pytest.mark.parametrize("size", [48, 1024])
def test_a_condition_that_some_larger_sizes_meet_fixes_nothing(size: int) -> None:
    """With steps that grow with the size, no multiple of 16 above 1,024 would be tried."""
    symbol = sympy.Symbol("s", integer=True, positive=True)
    assert not _fixes(sympy.Eq(symbol % 16, 0), symbol, {symbol: size}, {})
    assert _fixes(sympy.Eq(symbol, size), symbol, {symbol: size}, {})


def test_a_fixed_dimension_that_should_vary_is_refused() -> None:
    with pytest.raises(
        qfx.CaptureError, match="other sizes of dimension 2 of x, but the model's code turns a size computed from it"
    ):
        qfx.quantize(
            Computed(FIXING["a number"]).eval(),
            "int8_dynamic",
            [torch.randn(2, 3, 48)],
            dynamic_shapes={"x": {0: Dim.AUTO, 2: Dim.AUTO}},
            progress=False,
        )


def test_a_product_of_sizes_that_becomes_a_number_fixes_both() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y.sum((2, 3)) / int(y.shape[2] * y.shape[3])

    dynamic = {"x": {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}}
    with pytest.raises(qfx.CaptureError, match="other sizes of dimension 2 of x, dimension 3 of x, but"):
        qfx.quantize(
            Image().eval(), "int8_dynamic", [torch.randn(2, 3, 16, 16)], dynamic_shapes=dynamic, progress=False
        )


def test_two_inputs_with_related_sizes_keep_them() -> None:
    """Their comparison is no comparison with a number."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 3, 2, 1)

        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            y: Tensor = self.conv(x)
            return y * gate if y.shape[-1] == gate.shape[-1] else y

    model = Gated().eval()
    qmodel = qfx.quantize(model, "int8_dynamic", [(torch.randn(2, 3, 48), torch.randn(2, 4, 24))], progress=False)
    assert qmodel.signature.input_shapes[0] == (None, 3, None)
    batch = torch.randn(2, 3, 96), torch.randn(2, 4, 48)
    assert (qmodel(*batch) - model(*batch)).abs().max() < 0.05 * model(*batch).abs().max()


def test_the_ratio_of_two_sizes_fixes_neither() -> None:
    """It stays when both grow, as the number of groups of a convolution with a kernel for each sample does."""

    class Related(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, style: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y * int(x.shape[0] // style.shape[0]) + style.mean(0)

    model, data = Related().eval(), [(torch.randn(3, 4), torch.randn(3, 4))]
    free = {"x": {0: Dim.AUTO}, "style": {0: Dim.AUTO}}
    qmodel = qfx.quantize(model, "int8_dynamic", data, dynamic_shapes=free, progress=False)
    batch = torch.randn(5, 4), torch.randn(5, 4)
    assert (qmodel(*batch) - model(*batch)).abs().max() < 0.05 * model(*batch).abs().max()


def test_a_batch_that_becomes_a_number_is_warned_about() -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x).unflatten(0, (-1, 2))
            return y.sum(0) / int(y.shape[0])

    with pytest.warns(UserWarning, match="fixes dimension 0 of input x at 4"):
        qmodel = qfx.quantize(Pairs().eval(), "int8_dynamic", [torch.randn(4, 4)], progress=False)
    assert qmodel.signature.input_shapes == ((4, 4),)


class Compared(nn.Module):
    """A convolution of images, and a function of its result and the images."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3, 2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        """Return the function of the convolution and the images."""
        return self.function(self.conv(x), x)


def test_a_number_of_pieces_that_changes_for_long_inputs_alone_is_a_condition() -> None:
    size = sympy.Symbol("s", integer=True, positive=True)
    frame = SimpleNamespace(name="split", filename=f"{Path(torch.__file__).parent}/_decomp/decompositions.py", lineno=1)
    for pieces, last, place in (
        (sympy.Eq((size - 1) // 160 + 1, 2), 1 << 40, "a call of split() or chunk()"),
        (sympy.Eq((size - 1) // 160 + 1, 2), 320, ""),
        (sympy.Eq((size + (size + 1) // 2 - 1) // ((size + 1) // 2), 2), 1 << 40, ""),  # chunk(2)
    ):
        guard = SimpleNamespace(expr=pieces, sloc=SimpleNamespace(framework_loc=frame))
        assert _place_of_pieces(guard, {size: SimpleNamespace(lower=161, upper=last)}) == place


def weighted(pieces: Sequence[Tensor]) -> Tensor:
    """Return a sum that depends on the number of pieces and their order."""
    return torch.stack([(i + 1) * piece.sum((2, 3)) for i, piece in enumerate(pieces)]).sum(0)


COMPARING: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "two sizes": lambda y, x: y * 2 if x.shape[2] > x.shape[3] else y,
    "two sizes of a result": lambda y, x: y * 2 if y.shape[2] > y.shape[3] else y,
    "equal sizes": lambda y, x: y * 2 if x.shape[2] == x.shape[3] else y,
    "a size and its half": lambda y, x: y * 2 if x.shape[2] == y.shape[3] else y,
    "a quotient": lambda y, x: y * int(x.shape[2] // x.shape[3]),
    "a remainder": lambda y, x: y * 2 if y.shape[2] % 3 == 0 else y,
    "another number": lambda y, x: y * 2 if x.shape[2] in (20, 40) else y,
    "a product": lambda y, x: y * 2 if x.shape[2] * x.shape[3] > 1000 else y,
    "a square": lambda y, x: y * 2 if x.shape[2] ** 2 > 1500 else y,
    "a root": lambda y, x: y * 2 if (x.shape[2] * x.shape[3]) ** 0.5 > 35 else y,
    "a ratio": lambda y, x: y * 2 if y.shape[2] / x.shape[3] > 0.6 else y,
    "a rounded number": lambda y, x: y * 2 if round(x.shape[2] / 7) == 14 else y,
    "the largest": lambda y, x: y * 2 if max(x.shape[2:]) > 40 else y,
    "elements": lambda y, x: y * 2 if y.numel() > 5000 else y,
    "the batch and a size": lambda y, x: y * 2 if x.shape[0] > x.shape[2] else y,
    "one sample": lambda y, x: y * 2 if x.shape[0] == 1 else y,
    "several samples": lambda y, x: y * 2 if x.shape[0] > 1 else y,
    "one row": lambda y, x: y * 2 if x.shape[2] == 1 else y,
    "one row of a result": lambda y, x: y * 2 if y.shape[2] == 1 else y,
    "a distance": lambda y, x: y * 2 if abs(x.shape[2] - 32) > 10 else y,
    "no whole windows": lambda y, x: y * 2 if x.shape[2] % 7 > 0 else y,
    "a small remainder": lambda y, x: y * 2 if x.shape[2] % 5 < 2 else y,
    "odd sizes": lambda y, x: y * 2 if x.shape[2] & 1 else y,
    "a quotient without a value for one row": lambda y, x: y * 2 if 100 / (x.shape[2] - 1) < 2.5 else y,
    "a root without a value for one row": lambda y, x: y * 2 if (x.shape[2] - 2) ** 0.5 > 6 else y,
    "the smaller of two": lambda y, x: y * 2 if min(x.shape[2:]) < 2 else y,
    "a product of one pixel": lambda y, x: y * 2 if x.shape[2] * x.shape[3] < 4 else y,
    "a sum with one sample": lambda y, x: y * 2 if x.shape[0] + x.shape[2] > 3 else y,
    "one sample or row": lambda y, x: y * 2 if 1 in (x.shape[0], x.shape[2]) else y,
    "pieces of a result": lambda y, x: weighted(y.chunk(5, 2)),
    "two pieces": lambda y, x: weighted(x.chunk(2, 2)),
    "pieces of the images": lambda y, x: weighted(x.chunk(7, 3)),
    "pieces of equal sizes": lambda y, x: weighted(y.tensor_split(3, 2)),
    "pieces of a given length": lambda y, x: weighted(y.split(9, 2)),
    "pieces of a computed length": lambda y, x: weighted(y.split((y.shape[3] + 2) // 3, 3)),
    "pieces as long as another size": lambda y, x: weighted(x.split(x.shape[3], 2)),
}

SHAPES = [
    (2, 48, 32),
    (2, 32, 32),
    (2, 32, 48),
    (2, 32, 64),
    (2, 96, 64),
    (64, 20, 20),
    (1, 32, 32),
    (2, 1, 32),
    (1, 1, 2),
    (2, 35, 14),
    (3, 40, 30),
]


def takes_right_values(captured: Captured, model: nn.Module, x: Tensor) -> bool:
    """Tell whether a graph takes an input; assert that its values are then right."""
    try:
        leaves = captured.signature.flatten((x,), {})
    except qfx.QuarkError as error:
        if "the captured path through" in str(error) or "the graph is valid from" in str(error):
            return False
        raise
    torch.testing.assert_close(captured.module(*leaves)[0], model(x))
    return True


@pytest.mark.parametrize("name", COMPARING)
def test_sizes_that_take_another_path_are_refused(name: str) -> None:
    """A graph has one path, and torch.export checks few of these conditions."""
    model = Compared(COMPARING[name]).eval()
    dynamic = {"x": dict.fromkeys((0, 2, 3), Dim.AUTO)}
    for n, height, width in SHAPES[:2]:
        example = torch.randn(n, 3, height, width)
        captured = qfx.capture_graph(model, example, dynamic_shapes=dynamic)
        assert takes_right_values(captured, model, example)
        taken = [takes_right_values(captured, model, torch.randn(n, 3, h, w)) for n, h, w in SHAPES]
        assert any(taken[2:])


def test_a_refusal_says_what_is_compared_and_where(tmp_path: Path) -> None:
    model = Compared(COMPARING["equal sizes"]).eval()
    dynamic = {"x": dict.fromkeys((0, 2, 3), Dim.AUTO)}
    images = [torch.randn(2, 3, 48, 32)]
    qmodel = qfx.quantize(model, "int8_dynamic", images, dynamic_shapes=dynamic, progress=False)
    qmodel.save(tmp_path / "model")
    line = COMPARING["equal sizes"].__code__.co_firstlineno
    for one in (qmodel, qfx.load(tmp_path / "model")):
        one(torch.randn(5, 3, 32, 48))
        with pytest.raises(qfx.QuarkError, match=rf"requires x.shape\[2\] != x.shape\[3\] at test_guards.py:{line};"):
            one(torch.randn(2, 3, 32, 32))
    with pytest.warns(UserWarning, match=r"the file agrees with the model only where x.shape\[2\] != x.shape\[3\]"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")


@pytest.mark.parametrize("function", [lambda y, x: y + 0 if x.shape[0] > 1 else y, lambda y, x: y.flatten(1)])
def test_one_sample_is_taken_where_it_makes_no_difference(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    model = Compared(function).eval()
    captured = qfx.capture_graph(model, torch.randn(4, 3, 8, 8))
    assert takes_right_values(captured, model, torch.randn(1, 3, 8, 8))
    assert not captured.signature.input_conditions


def test_an_example_of_one_sample_is_captured_as_it_is_where_it_makes_a_difference() -> None:
    model = Compared(COMPARING["one sample"]).eval()
    captured = qfx.capture_graph(model, torch.randn(1, 3, 8, 8))
    assert takes_right_values(captured, model, torch.randn(1, 3, 8, 8))
    with pytest.raises(qfx.QuarkError, match="dimension 0 to 1"):
        captured.signature.flatten((torch.randn(2, 3, 8, 8),), {})


def test_a_run_that_finds_out_about_one_sample_leaves_the_model_as_it_is() -> None:
    class Counting(Compared):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    model = Counting(COMPARING["one sample"]).eval()
    qfx.capture_graph(model, torch.randn(4, 3, 8, 8))
    assert model.calls == 0


class Keyed(nn.Module):
    """A gain for each number of steps that a table has."""

    def __init__(self, key: Callable[[int], str]) -> None:
        super().__init__()
        self.linear, self.gain, self.key = nn.Linear(4, 4), {"12": 3.0}, key

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y * self.gain.get(self.key(x.shape[1]), 1.0)


@pytest.mark.parametrize("key", [str, lambda size: f"{size}", lambda size: "%s" % size])  # noqa: UP031
def test_a_size_as_a_key_of_text_is_refused(key: Callable[[int], str]) -> None:
    with pytest.raises(qfx.CaptureError, match=r"as text at test_guards.py:\d+, .* write `str\(int\(size\)\)`"):
        qfx.capture_graph(Keyed(key).eval(), torch.randn(2, 12, 4))


def test_a_number_as_a_key_of_text_fixes_the_size() -> None:
    model = Keyed(lambda size: str(int(size))).eval()
    captured = qfx.capture_graph(model, torch.randn(2, 12, 4))
    assert captured.signature.input_shapes == ((None, 12, 4),)
    assert takes_right_values(captured, model, torch.randn(3, 12, 4))


def test_text_that_changes_nothing_is_no_problem() -> None:
    class Printing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            print(f"{x.shape[1]} steps")
            return super().forward(x)

    model = Printing(4, 4).eval()
    captured = qfx.capture_graph(model, torch.randn(2, 12, 4))
    assert takes_right_values(captured, model, torch.randn(3, 7, 4))


def test_the_export_of_a_file_names_limits_that_the_code_has(tmp_path: Path) -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y * 3 if x.shape[1] > 16 else y

    qmodel = qfx.quantize(Long().eval(), "int8_dynamic", [torch.randn(4, 12, 4)], progress=False)
    with pytest.raises(qfx.QuarkError, match="the graph is valid from 1 to 16"):
        qmodel(torch.randn(2, 20, 4))
    with pytest.warns(UserWarning, match=r"agrees with the model only where x.shape\[1\] <= 16"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")


def test_a_dimension_that_should_vary_and_does_not_is_warned_about() -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.places = nn.Linear(4, 4), nn.Parameter(torch.randn(12, 4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y + self.places

    free = {"x": {0: Dim.AUTO, 1: Dim.AUTO, 2: Dim.STATIC}}
    with pytest.warns(
        UserWarning, match="fixes dimension 1 of input x at 12, the size in the example; other"
    ) as warned:
        captured = qfx.capture_graph(Placed().eval(), torch.randn(2, 12, 4), dynamic_shapes=free)
    assert len([one for one in warned if "fixes dimension" in str(one.message)]) == 1
    assert captured.signature.input_shapes == ((None, 12, 4),)
