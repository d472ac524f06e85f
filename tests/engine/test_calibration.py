"""Calibration runs convolutions in the faster memory layout, and leaves the graph as it was."""

from __future__ import annotations

import pytest
import torch
from tiny import calls, constant, images, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.engine.calibration import fast_layout


class Flips(nn.Module):
    """A convolution whose result is read by its strides, or by its indices."""

    def __init__(self, by_strides: bool) -> None:
        super().__init__()
        self.conv, self.by_strides = nn.Conv2d(3, 4, 3), by_strides

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y.as_strided((4, 2), (2, 1)) if self.by_strides else y.flip(1)


@pytest.mark.parametrize("by_strides", [False, True])
def test_convolutions_run_channels_last_unless_strides_are_read(by_strides: bool) -> None:
    x = images()[0]
    gm = qfx.capture_graph(seeded(Flips(by_strides)), x).module
    (call,) = calls(gm, "aten.conv2d.default")

    def is_fast(tensor: Tensor) -> bool:
        return tensor.is_contiguous(memory_format=torch.channels_last)

    before = constant(gm, call.args[1])
    with fast_layout(gm) as lay_out:
        weight = constant(gm, call.args[1])
        assert is_fast(lay_out(x)) == is_fast(weight) == (not by_strides)
        assert torch.equal(weight, before)
    assert constant(gm, call.args[1]).data_ptr() == before.data_ptr()
    assert not is_fast(before)
