"""A range that is measured at run time may be used in part, by the observer `Adjusted`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import mlp, quantize, rand, seeded, tokens
from torch import nn

import quark_fx as qfx
from quark_fx import Granularity, Symmetry, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import INT4, INT8, UINT8
from quark_fx.observers import Adjusted, Mse
from quark_fx.presets import NVFP4, W8A8_DYNAMIC

SHARE = Adjusted(ratio=0.75)


def measured(**fields: Any) -> TensorSpec:
    common: dict[str, Any] = {"format": INT8, "granularity": Granularity.TOKEN, "dynamic": True}
    return TensorSpec(**(common | fields))


SPECS = {
    "int8 per token": measured(observer=SHARE),
    "uint8 per tensor": measured(format=UINT8, granularity=Granularity.TENSOR, observer=SHARE),
    "int4 per token": measured(format=INT4, symmetry=Symmetry.SYMMETRIC_FULL, observer=SHARE),
    "uint8 per token": measured(format=UINT8, observer=SHARE),
}


@pytest.mark.parametrize("name", SPECS)
def test_it_is_the_same_everywhere(name: str, tmp_path: Path) -> None:
    spec, data = SPECS[name], tokens(4, 4)
    config = W8A8_DYNAMIC.replace(passes=(), exclude=(), input=spec)
    qmodel = quantize(mlp(), config, data)
    whole = quantize(mlp(), config.replace(input=spec.replace(observer=None)), data)
    with torch.no_grad():
        expected = qmodel(data[0])
        assert not torch.equal(expected, whole(data[0]))
        assert torch.equal(qmodel.eager()(data[0]), expected)
        qmodel.save(tmp_path / "stored")
        assert torch.equal(qfx.load(tmp_path / "stored")(data[0]), expected)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, file, data).max_steps <= 1


def test_kernels_read_the_scale_that_is_measured() -> None:
    model, x = seeded(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))), rand(8, 64)
    qmodel = quantize(model, W8A8_DYNAMIC.replace(passes=(), input=SPECS["int8 per token"]), [x])
    with torch.no_grad():
        compiled, expected = qmodel.compile()(x), qmodel(x)
    torch.testing.assert_close(compiled, expected, rtol=1e-3, atol=1e-3)


def test_other_observers_of_a_measured_range_are_refused_with_the_remedy() -> None:
    for observer in (Mse(), Adjusted(observer=Mse(), ratio=0.9), Adjusted(ratio=0.9, eps=1e-3)):
        with pytest.raises(
            ConfigError, match=r"or a fraction of them; drop the observer, or use Adjusted\(ratio=0.9\)"
        ):
            measured(observer=observer)
    assert NVFP4.input is not None
    with pytest.raises(ConfigError, match="always uses the full range at run time"):
        NVFP4.input.replace(observer=SHARE)


def test_what_cannot_hold_it_says_so(tmp_path: Path) -> None:
    model, x = seeded(nn.Sequential(nn.Linear(64, 64))), rand(8, 64)
    config = W8A8_DYNAMIC.replace(passes=(), exclude=(), input=SPECS["int8 per token"])
    for target, said in (("vllm", "vLLM"), ("sglang", "SGLang")):
        with pytest.raises(
            ConfigError, match=f"{said} always uses the whole range that it measures at run time; drop the observer"
        ):
            config.replace(target=target)
    asymmetric = config.replace(input=measured(symmetry=Symmetry.ASYMMETRIC, observer=SHARE))
    with pytest.raises(ConfigError, match="XNNPACK always uses the whole range at run time; drop the observer"):
        asymmetric.replace(target="executorch")
    with pytest.raises(qfx.QuarkError, match=r"measured at run time in part of the range \(drop the observer\)"):
        qfx.export.pt2e(quantize(model, asymmetric, [x]))
    groups = config.replace(
        target="torch", input=measured(granularity=Granularity.GROUP, group_size=32, observer=SHARE)
    )
    with pytest.raises(
        ConfigError, match="ONNX always uses the whole range of activations in groups; drop the observer"
    ):
        groups.replace(target="onnx")
    with pytest.raises(qfx.QuarkError, match=r"with part of the range of groups \(drop the observer\) at run time"):
        qfx.export.onnx(quantize(model, groups, [x]), tmp_path / "model.onnx")
