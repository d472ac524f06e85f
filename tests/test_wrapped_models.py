"""Models in forms that quantize cannot or need not read are unwrapped, or refused before calibration with a remedy."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, distributed, nn

import quark_fx as qfx
from quark_fx.presets import INT8_STATIC, INT8_WEIGHT_ONLY


def plain() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))


@contextmanager
def process_group() -> Iterator[None]:
    store: Any = vars(distributed)["HashStore"]
    distributed.init_process_group("gloo", store=store(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def batches() -> Iterator[Tensor]:
    """Yield a batch, and fail if calibration asks for another one."""
    yield rand(3, 8)
    raise AssertionError("calibration started")


def test_wrappers_give_the_codes_of_the_module_inside() -> None:
    expected = quantize(plain(), INT8_STATIC, [rand(3, 8)])
    with process_group():
        wrapped: list[nn.Module] = [
            torch.compile(plain()),  # type: ignore[list-item]
            nn.DataParallel(plain()),
            nn.parallel.DistributedDataParallel(plain()).eval(),
            torch.compile(nn.DataParallel(plain())),  # type: ignore[list-item]
        ]
        for model in wrapped:
            found = quantize(model, INT8_STATIC, [rand(3, 8)])
            assert found.state_dict().keys() == expected.state_dict().keys()
            torch.testing.assert_close(found(rand(3, 8)), expected(rand(3, 8)), rtol=0, atol=0)
        session = qfx.Session(wrapped[1], [rand(3, 8)])
        assert torch.equal(quantize(session, INT8_STATIC)(rand(3, 8)), expected(rand(3, 8)))
        assert expected.eager(wrapped[0])(rand(3, 8)).shape == expected(rand(3, 8)).shape


def test_torchscript_is_refused() -> None:
    traced = torch.jit.trace(plain(), rand(3, 8))
    part = nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.ReLU()).eval()
    for model in (traced, torch.jit.script(plain()), part):
        with pytest.raises(qfx.CaptureError, match=r"TorchScript module .* pass the original nn.Module"):
            qfx.quantize(model, INT8_STATIC, batches())


def test_weights_without_values_are_refused_with_remedies_that_work() -> None:
    accelerate = pytest.importorskip("accelerate")
    expected = quantize(plain(), INT8_STATIC, [rand(3, 8)])
    model = accelerate.cpu_offload(plain(), execution_device=torch.device("cpu"))
    with pytest.raises(qfx.CaptureError, match=r"meta device.*remove_hook_from_module"):
        qfx.quantize(model, INT8_STATIC, batches())
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    assert torch.equal(quantize(model, INT8_STATIC, [rand(3, 8)])(rand(3, 8)), expected(rand(3, 8)))


def test_hooks_of_the_process_are_refused() -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
    try:
        with pytest.raises(qfx.CaptureError, match=r"all modules of this process .* remove\(\)"):
            qfx.quantize(plain(), INT8_STATIC, batches())
    finally:
        handle.remove()
    assert quantize(plain(), INT8_STATIC, [rand(3, 8)])


def test_a_model_that_computes_with_codes_is_not_quantized_again() -> None:
    qmodel = quantize(plain(), INT8_STATIC, [rand(3, 8)])
    program = torch.export.export(qmodel, (rand(3, 8),))
    part = nn.Sequential(copy.deepcopy(qmodel), nn.ReLU()).eval()
    for model in (program, part, nn.DataParallel(qmodel).eval()):
        with pytest.raises(qfx.ConfigError, match="already quantized; quantize the original float model"):
            qfx.quantize(model, INT8_STATIC, batches())


@pytest.mark.parametrize(("name", "refused"), [("dequantize_affine", True), ("swizzle", False)])
def test_of_torchao_only_operators_on_codes_are_refused(name: str, refused: bool) -> None:
    library: Any = torch.library.Library("torchao", "FRAGMENT")
    library.define(f"{name}(Tensor x) -> Tensor")
    for place in ("CPU", "Meta"):
        library.impl(name, lambda x: x * 2, place)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Any:
            return self.linear(getattr(torch.ops.torchao, name)(x))

    try:
        wrong = pytest.raises(qfx.ConfigError, match="already quantized")
        with wrong if refused else contextlib.nullcontext():
            qmodel = qfx.quantize(Model().eval(), INT8_WEIGHT_ONLY, [rand(3, 8)], progress=False)
            assert qmodel.report().totals["quantized"] == 1
    finally:
        library._destroy()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
def test_an_operator_of_torchao_that_reads_codes_is_refused_whatever_its_name(dtype: torch.dtype) -> None:
    library: Any = torch.library.Library("torchao", "FRAGMENT")
    library.define("da8w4_linear_cpu(Tensor x, Tensor weight) -> Tensor")
    for place in ("CPU", "Meta"):
        library.impl("da8w4_linear_cpu", lambda x, weight: x @ weight.float().t(), place)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.register_buffer("codes", torch.ones(8, 8).to(dtype))

        def forward(self, x: Tensor) -> Any:
            return self.linear(torch.ops.torchao.da8w4_linear_cpu(x, self.codes))

    try:
        with pytest.raises(qfx.ConfigError, match="already quantized"):
            qfx.quantize(Model().eval(), INT8_WEIGHT_ONLY, [rand(3, 8)], progress=False)
    finally:
        library._destroy()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("m.onnx", "is an ONNX graph; pass the nn.Module"),
        ("m.tflite", "is a LiteRT graph; pass the nn.Module"),
        ("m.gguf", "cannot be read as a GGUF file"),
        ("m.pt2", r"pass torch.export.load\(path\)"),
        ("m.py", "pass the nn.Module that it creates"),
        ("m.engine", "is not a safetensors file"),
        ("m.safetensors", "is damaged or truncated"),
    ],
)
def test_other_files_are_named(tmp_path: Path, name: str, remedy: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"\x08" * 100)
    with pytest.raises(qfx.CheckpointError, match=remedy):
        qfx.quantize(path, INT8_STATIC, batches())


def test_an_exported_program_is_the_remedy_for_its_file(tmp_path: Path) -> None:
    torch.export.save(torch.export.export(seeded(nn.Linear(8, 4)), (rand(3, 8),)), tmp_path / "m.pt2")
    program: Any = torch.export.load(tmp_path / "m.pt2")
    assert quantize(program, INT8_STATIC, [rand(3, 8)])(rand(3, 8)).shape == (3, 4)
