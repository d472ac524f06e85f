"""Files write and add at positions, join empty vectors, and divide integers as torch does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.errors import ExportError
from quark_fx.presets import INT8_STATIC


class Calculates(nn.Module):
    """A linear layer, and what a function makes of it and the other input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.function(self.linear(x), positions)


def written(y: Tensor, *indices: Tensor | slice) -> Tensor:
    """Return a copy of values with a row written to it."""
    y = y.clone()
    y[indices] = torch.arange(2.0)
    return y


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows that repeat": lambda y, i: y.index_put((i,), y[:2], accumulate=True),
    "rows of constants": lambda y, i: y.index_put((torch.tensor([0, -1, 0]),), y[:3], accumulate=True),
    "a scalar": lambda y, i: y.index_put((i,), torch.tensor(2.0), accumulate=True),
    "values": lambda y, i: y.index_put((i, i + 1), y[:2, 0], accumulate=True),
    "a table of positions": lambda y, i: y.index_put((i[:, None], i), y[:2, :2], accumulate=True),
    "last writes": lambda y, i: y.index_put((torch.tensor([2, 0]),), y[:2]),
    "a column": lambda y, i: written(y, slice(None), i),
    "a mask": lambda y, i: y.index_put((y > 0,), torch.tensor(1.0), accumulate=True),
    "apart": lambda y, i: written(y.view(2, 2, 4), torch.tensor([0, 1]), slice(None), torch.tensor([3, 0])),
    "in the middle": lambda y, i: written(y.view(2, 2, 2, 2), slice(None), torch.tensor([0, 1]), torch.tensor([1, 0])),
    "an empty vector": lambda y, i: torch.cat([y, torch.zeros(0), y], 1),
    "integers and an empty vector": lambda y, i: torch.cat([torch.zeros(0), i[None]]),
    "halves and an empty vector": lambda y, i: torch.cat([y.half(), torch.zeros(0), y.half()], 1),
    "quotients of integers": lambda y, i: torch.divide(i, 3),
    "quotients of two integers": lambda y, i: torch.divide(i, torch.tensor([2, -3])),
    "rounded integers": lambda y, i: torch.stack([i.round(), i.floor(), i.ceil(), i.trunc(), torch.relu(i - 2)]),
    "integers are numbers": lambda y, i: torch.stack([i.isnan(), i.isfinite(), i.isinf(), (i > 0).isfinite()]),
    "functions of integers": lambda y, i: torch.stack([torch.erf(i), torch.special.erf(i), torch.special.expm1(i)]),
    "large powers": lambda y, i: (i + 3037000498) ** 2 + (i - 2097152) ** 3,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_file_computes_what_torch_does(name: str, tmp_path: Path) -> None:
    batch = (rand(4, 4), torch.tensor([1, 1]))
    qmodel = quantize(seeded(Calculates(FUNCTIONS[name])), INT8_STATIC, [batch])
    session = onnxruntime.InferenceSession(qfx.export.onnx(qmodel, tmp_path / "m.onnx"))
    feeds = {value.name: leaf.numpy() for value, leaf in zip(session.get_inputs(), batch, strict=False)}
    (found,) = (torch.from_numpy(value) for value in session.run(None, feeds))
    torch.testing.assert_close(found, qmodel(*batch), rtol=1e-6, atol=1e-6)


def test_a_mask_next_to_other_indices_is_refused_with_the_line(tmp_path: Path) -> None:
    model = seeded(Calculates(lambda y, i: y.index_put((i, torch.tensor([True, True, False, False])), y[:2, 0])))
    qmodel = quantize(model, INT8_STATIC, [(rand(4, 4), torch.tensor([1, 1]))])
    with pytest.raises(ExportError, match=r"a mask next to other indices has no equivalent in ONNX; use torch\.where"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx")
