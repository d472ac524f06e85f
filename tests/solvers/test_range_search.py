"""Scales and offsets by least squares: exact where the weights lie on a grid, better than the range elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import quantize, rand
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import QuantConfig, Target, gguf_types
from quark_fx.graph.nodes import stored_tensors
from quark_fx.numbers.layout import Columns
from quark_fx.numbers.qparams import Scheme, Symmetry
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.passes import GPTQ, FitScales
from quark_fx.solvers.scale_search import fit_ranges


def lost(x: Tensor, scale: Tensor, offset: Tensor | None, scheme: Scheme, block: int) -> Tensor:
    """Return the squared error of each weight, rounded to nearest."""
    s = scale.repeat_interleave(block, -1)[..., : x.shape[-1]]
    o = torch.zeros_like(s) if offset is None else offset.repeat_interleave(block, -1)[..., : x.shape[-1]]
    codes = ((x - o) / s).round().clamp(scheme.qmin, scheme.qmax)
    return (codes * s + o - x).square()


def whole_range(x: Tensor, scheme: Scheme, block: int) -> tuple[Tensor, Tensor | None]:
    parts = x.unflatten(-1, (-1, block))
    if scheme.symmetry is Symmetry.OFFSET:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        return (high - low) / scheme.qmax, low
    return parts.gather(-1, parts.abs().argmax(-1, keepdim=True)).squeeze(-1) / scheme.qmin, None


@pytest.mark.parametrize("name", ["Q4_K", "Q2_K", "Q6_K", "Q3_K", "Q5_1"])
def test_inputs_that_matter_lose_less(name: str) -> None:
    spec = gguf_types.GGUF_TYPES[name]
    scheme, block = spec.scheme, spec.group_size or 0
    x, importance = rand(2, 9, 256), torch.rand(2, 256, generator=torch.Generator().manual_seed(0)) ** 4
    scale, offset = fit_ranges(x, importance, scheme, Columns.in_blocks(256, block))
    assert (offset is None) == (scheme.symmetry is Symmetry.SIGN_AWARE)
    weighted = (lost(x, scale, offset, scheme, block) * importance.unsqueeze(1)).unflatten(-1, (-1, block)).sum(-1)
    plain = (lost(x, *whole_range(x, scheme, block), scheme, block) * importance.unsqueeze(1)).unflatten(
        -1, (-1, block)
    )
    assert bool((weighted <= plain.sum(-1) * 1.001 + 1e-12).all())
    assert weighted.sum() < 0.75 * plain.sum()
    even = fit_ranges(x, torch.ones(2, 256), scheme, Columns.in_blocks(256, block))
    assert weighted.sum() < (lost(x, *even, scheme, block) * importance.unsqueeze(1)).sum()
    if spec.scale.multiples is not None and offset is not None:
        assert offset.max() <= 0


def test_weights_on_a_grid_are_found_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (1, 6, 128), generator=generator).float()
    codes[..., ::32], codes[..., 1::32] = 0, 15
    scale, offset = torch.rand(1, 6, 4, generator=generator) + 0.1, -torch.rand(1, 6, 4, generator=generator) - 0.1
    x = codes * scale.repeat_interleave(32, -1) + offset.repeat_interleave(32, -1)
    found = fit_ranges(x, torch.ones(1, 128), gguf_types.Q4_K.scheme, Columns.in_blocks(128, 32))
    assert found[1] is not None
    torch.testing.assert_close(found[0], scale, rtol=1e-4, atol=0)
    torch.testing.assert_close(found[1], offset, rtol=1e-4, atol=0)


def test_weights_and_inputs_of_zero_keep_scales_finite() -> None:
    x = rand(1, 4, 96)
    x[0, 0], x[0, 1, :32], x[0, 2] = 0, 1.0, 0.5
    for importance in (torch.zeros(1, 96), torch.cat([torch.zeros(1, 32), torch.ones(1, 64)], 1)):
        for spec in (gguf_types.Q4_K, gguf_types.Q6_K):
            scale, offset = fit_ranges(x, importance, spec.scheme, Columns.in_blocks(96, 32))
            assert bool((torch.isfinite(scale) & (scale != 0)).all())
            assert offset is None or bool(torch.isfinite(offset).all())
            assert lost(x, scale, offset, spec.scheme, 32)[0, [0, 2]].max() < 1e-4


def test_a_short_last_block_counts_its_own_weights_alone() -> None:
    x = rand(1, 3, 40)
    found = fit_ranges(x, torch.ones(1, 40), gguf_types.Q4_1.scheme, Columns.in_blocks(40, 32))
    last = fit_ranges(x[..., 32:], torch.ones(1, 8), gguf_types.Q4_1.scheme, Columns.in_blocks(8, 32))
    assert found[1] is not None
    assert last[1] is not None
    torch.testing.assert_close(found[0][..., 1:], last[0])
    torch.testing.assert_close(found[1][..., 1:], last[1])


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_1"])
def test_solvers_store_what_a_file_holds(name: str) -> None:
    """Scales that a pass changed are still whole numbers times a float16, and outputs are nearer."""
    torch.manual_seed(0)
    model, spec = nn.Sequential(nn.Linear(256, 24)).eval(), gguf_types.GGUF_TYPES[name]
    mixing = rand(256, 256, seed=4) * torch.rand(256) ** 3
    batches = [rand(48, 256, seed=seed) @ mixing for seed in range(12)]
    test = rand(64, 256, seed=99) @ mixing
    errors, weights = [], []
    for passes in ((), (FitScales(),), (GPTQ(fit_scales=True),)):
        qmodel = quantize(model, QuantConfig(weight=spec, passes=passes, target=Target.TORCH), batches)
        tensors = stored_tensors(qmodel.graph_module)
        codes, scale, zero_point = (tensors[f"0.weight_{part}"] for part in ("codes", "scale", "zero_point"))
        stored = QuantizedTensor.of(codes, scale, zero_point, spec.format, 1, spec.group_size or 0)
        kind = spec.scale
        if kind.multiples:
            kind.quantized(stored.scale)
            assert spec.symmetry is not Symmetry.OFFSET or kind.quantized(-stored.zero_point)
        else:
            assert torch.equal(stored.zero_point.half().float(), stored.zero_point)
        with torch.no_grad():
            errors.append(float((qmodel(test) - model(test)).square().mean()))
        weights.append(stored)
    plain, fitted, best = errors
    assert fitted < 0.95 * plain
    assert best < 0.8 * fitted
    assert not torch.equal(weights[0].scale, weights[1].scale)
    if spec.symmetry is Symmetry.OFFSET:
        assert not torch.equal(weights[0].zero_point, weights[1].zero_point)


def test_offsets_are_stored_and_loaded(tmp_path: Path) -> None:
    config = QuantConfig(weight=gguf_types.Q4_K, target=Target.TORCH)
    qmodel = quantize(nn.Linear(256, 4).eval(), config, [rand(4, 256)])
    qmodel.save(tmp_path / "saved")
    loaded = qfx.load(tmp_path / "saved")
    assert torch.equal(loaded(rand(4, 256)), qmodel(rand(4, 256)))
    assert loaded.config == config
