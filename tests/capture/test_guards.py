"""Dimensions that the model's code fixes by converting a size computed from them to a number."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import quark_fx as qfx


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


def test_a_fixed_dimension_that_should_vary_is_refused() -> None:
    with pytest.raises(
        qfx.CaptureError, match="other sizes of dimension 2 of x, but the model's code converts a size computed from it"
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
