"""Keys and values are quantized as a cache holds them: what attention reads, the scales, the report, the errors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import calls, constant, quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT4, INT8, UINT4
from quark_fx.numbers.scales import CALIBRATED_E4M3_SCALES
from quark_fx.observers import Hqq
from quark_fx.quantization import needs_data

HEADS, GROUPS, CHANNELS = 2, 3, 4
WIDTH = HEADS * GROUPS * CHANNELS
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)

SPECS = {
    "int8": TensorSpec(format=INT8),
    "int8 per head": TensorSpec(format=INT8, granularity=Granularity.HEAD),
    "int8 per head and channel": TensorSpec(format=INT8, granularity=Granularity.CHANNEL),
    "uint4 per head and channel": TensorSpec(format=UINT4, granularity=Granularity.CHANNEL),
    "fp8": TensorSpec(format=FP8_E4M3),
    "fp8 per head": TensorSpec(format=FP8_E4M3, granularity=Granularity.HEAD),
    "fp8 per head and channel": TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL),
    "int8 per token": TOKEN,
    "uint4 per token": TOKEN.replace(format=UINT4),
    "fp8 per token": TOKEN.replace(format=FP8_E4M3),
    "int4 in groups": TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=2, dynamic=True),
}


class Attend(nn.Module):
    """Grouped queries, fused or spelled out."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.fused = fused
        self.q, self.k, self.v = (nn.Linear(WIDTH, n * CHANNELS) for n in (HEADS * GROUPS, HEADS, HEADS))
        self.o = nn.Linear(WIDTH, WIDTH)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(p(x).unflatten(-1, (-1, CHANNELS)).transpose(1, 2) for p in (self.q, self.k, self.v))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t[:, :, None].expand(-1, -1, GROUPS, -1, -1).flatten(1, 2) for t in (k, v))
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = (q @ k.transpose(2, 3) * CHANNELS**-0.5).softmax(-1) @ v
        result: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return result

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.projected(x))


class Fused(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attend(), Attend(fused=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(x + self.first(x))
        return result


def rounded(x: Tensor, spec: TensorSpec, seen: Tensor) -> Tensor:
    """Return `x`, shape (samples, heads, tokens, channels), rounded as a cache is."""
    ops = torch.ops.quark_fx
    if spec.dynamic:
        measured = spec.measurement(3)
        layout = measured[2:4]
        scale, zero_point = ops.dynamic_qparams(x, *measured)
    else:
        values, shape, layout = {
            Granularity.TENSOR: (seen.reshape(1, -1), [], (None, 0)),
            Granularity.HEAD: (seen.transpose(0, 1).flatten(1), [1, HEADS, 1, 1], (2, -1)),
            Granularity.CHANNEL: (seen.permute(1, 3, 0, 2).flatten(0, 1).flatten(1), [1, HEADS, 1, CHANNELS], (2, -1)),
        }[spec.granularity]
        assert spec.observer is not None
        found = spec.new_observer.observe(values).qparams(spec.scheme)
        scale, zero_point = found.scale.reshape(shape), found.zero_point.reshape(shape)
    result: Tensor = ops.fake_quantize(x, scale, zero_point, str(spec.format), *layout)
    return result


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_attention_reads_rounded_keys_and_values(spec: str, fused: bool, tmp_path: Path) -> None:
    model, batch, x = seeded(Attend(fused)), rand(2, 5, WIDTH), rand(3, 7, WIDTH, seed=2)
    qmodel = quantize(model, QuantConfig(kv_cache=SPECS[spec]), [batch])
    q, k, v = model.projected(x)
    _, seen_k, seen_v = model.projected(batch)
    expected = model.attend(q, rounded(k, SPECS[spec], seen_k), rounded(v, SPECS[spec], seen_v))
    torch.testing.assert_close(qmodel(x), expected, rtol=0, atol=0)
    assert not torch.equal(qmodel(x), model(x))
    qmodel.save(tmp_path / "saved")
    torch.testing.assert_close(qfx.load(tmp_path / "saved")(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_a_file_computes_what_the_graph_does(spec: str, tmp_path: Path) -> None:
    model, batch, x = seeded(Twice()), rand(2, 5, WIDTH), rand(3, 7, WIDTH, seed=2)
    qmodel = quantize(model, QuantConfig(kv_cache=SPECS[spec]), [batch])
    qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    # A hundredth of a step: nothing is rounded otherwise.
    assert qfx.verify(qmodel, tmp_path / "model.onnx", [x]).max_steps < 0.01


def test_there_is_a_scale_for_each_head_and_channel() -> None:
    model, batch = seeded(Attend()), rand(2, 5, WIDTH)
    spec = SPECS["int8 per head and channel"]
    qmodel = quantize(model, QuantConfig(kv_cache=spec), [batch])
    scales = [constant(qmodel, call.args[1]) for call in calls(qmodel, "quark_fx.quantize")]
    _, *read = model.projected(batch)
    for scale, values in zip(scales, read, strict=True):
        torch.testing.assert_close(scale, values.abs().amax((0, 2), keepdim=True) / 127)


def test_there_is_a_scale_for_each_head() -> None:
    model, batch = seeded(Attend()), rand(2, 5, WIDTH)
    batch[:, :, 0] *= 8  # heads with different ranges
    qmodel = quantize(model, QuantConfig(kv_cache=SPECS["fp8 per head"]), [batch])
    scales = [constant(qmodel, call.args[1]) for call in calls(qmodel, "quark_fx.quantize")]
    _, *read = model.projected(batch)
    for scale, values in zip(scales, read, strict=True):
        torch.testing.assert_close(scale, values.abs().amax((0, 2, 3), keepdim=True) / 448)
        assert scale[0, 0] != scale[0, 1]


NVFP4 = TensorSpec(
    format=FP4_E2M1, granularity=Granularity.GROUP, group_size=16, scale=CALIBRATED_E4M3_SCALES, dynamic=True
)


def in_nvfp4(x: Tensor, seen: Tensor) -> Tensor:
    """Round groups of 16 channels to FP4 at E4M3 scales, which are multiples of a scale that calibration found."""
    unit = seen.abs().max() / (6 * 448)
    groups = x.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6 / unit).to(torch.float8_e4m3fn).float() * unit
    rounded: Tensor = FP4_E2M1.round_(groups / scale) * scale
    return rounded.flatten(-2)


def test_a_cache_in_nvfp4_has_a_scale_for_16_channels_under_a_calibrated_one(tmp_path: Path) -> None:
    q, k, v, x, y, z = (rand(2, 3, 5, 32, seed=seed) for seed in range(6))
    qmodel = quantize(seeded(Fused()), QuantConfig(kv_cache=NVFP4), [(q, k, v)])
    expected = F.scaled_dot_product_attention(x, in_nvfp4(y, k), in_nvfp4(z, v))
    torch.testing.assert_close(qmodel(x, y, z), expected)
    qmodel.save(tmp_path / "saved")
    torch.testing.assert_close(qfx.load(tmp_path / "saved")(x, y, z), expected)


def test_every_attention_has_a_row_with_its_format_or_a_reason() -> None:
    spec, off = SPECS["int8"], Override(pattern="second", kv_cache=None)
    for config, reasons in (
        (QuantConfig(kv_cache=spec), ["", ""]),
        (QuantConfig(kv_cache=spec, exclude=("first",)), ["excluded by 'first'", ""]),
        (QuantConfig(kv_cache=spec, overrides=(off,)), ["", "the configuration keeps its keys and values in float"]),
        (QuantConfig(overrides=(Override(pattern="op:attention", kv_cache=spec),)), ["", ""]),
    ):
        report = quantize(seeded(Twice()), config, [rand(2, 5, WIDTH)]).report()
        rows = [row for row in report if row.kind == "attention"]
        assert [row.name for row in rows] == ["first", "second"]
        assert [row.reason for row in rows] == reasons
        assert [row.activation for row in rows] == ["" if reason else "int8" for reason in reasons]


def test_without_a_cache_to_quantize_there_are_no_rows_for_attentions() -> None:
    report = quantize(seeded(Twice()), "int8_dynamic", [rand(2, 5, WIDTH)]).report()
    assert "attention" not in {row.kind for row in report}


class Shared(nn.Module):
    """Queries and keys are one value, which the model returns as well."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q = self.p(x)
        return (q @ q.mT).softmax(-1) @ self.v(x), q


@pytest.mark.parametrize(
    ("model", "options", "why"),
    [
        (lambda: nn.Sequential(nn.Linear(WIDTH, 8)), {}, "no attention was found"),
        (Attend, {"exclude": ("op:attention",)}, "excluded by 'op:attention'"),
    ],
    ids=["no attention", "excluded"],
)
def test_a_cache_that_nothing_has_is_named(model: Any, options: dict[str, Any], why: str) -> None:
    config = QuantConfig(weight=TensorSpec(format=INT8), kv_cache=TOKEN, **options)
    with pytest.warns(UserWarning, match=f"kv_cache has no effect: {why}"):
        qfx.quantize(seeded(model()), config, [rand(2, 5, WIDTH)], progress=False)


def test_queries_stay_in_float_where_they_are_the_keys_and_a_returned_cache_is_rounded() -> None:
    model, x = seeded(Shared()), rand(2, 5, WIDTH)
    spec = SPECS["int8 per token"]
    y, returned = quantize(model, QuantConfig(kv_cache=spec), [x])(x)
    q = model.p(x)
    k, v = rounded(q[:, None], spec, q)[:, 0], rounded(model.v(x)[:, None], spec, q)[:, 0]
    torch.testing.assert_close(y, (q @ k.mT).softmax(-1) @ v, rtol=0, atol=0)
    torch.testing.assert_close(returned, k, rtol=0, atol=0)


class OfAnyWidth(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x + 1, x)


def test_heads_that_vary_in_number_have_one_scale_or_a_reason() -> None:
    x, sizes = rand(2, 3, 5, 4), ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    config = QuantConfig(kv_cache=SPECS["int8"])
    (row,) = qfx.quantize(OfAnyWidth().eval(), config, [x], dynamic_shapes=sizes, progress=False).report()
    assert row.activation == "int8"
    config = QuantConfig(kv_cache=SPECS["int8 per head and channel"])
    with pytest.warns(UserWarning, match="nothing was quantized"):
        (row,) = qfx.quantize(OfAnyWidth().eval(), config, [x], dynamic_shapes=sizes, progress=False).report()
    assert "the number of heads" in row.reason


class Latent(nn.Module):
    """Multi-head latent attention: the last channels of the keys are the same in all heads."""

    def __init__(self, joined: bool, *, copied: bool = False) -> None:
        super().__init__()
        self.q, self.up = nn.Linear(WIDTH, 48), nn.Linear(WIDTH, 64)
        self.joined, self.copied = joined, copied

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q, self.up))
        own, v = kv.split([8, 8], -1)
        shared = x[:, None, :, :4].expand(-1, 4, -1, -1)
        if self.copied:
            k = torch.cat([own, shared.clone()], -1).double().float()
        elif self.joined:
            k = torch.cat([own, shared], -1)
        else:
            k = torch.zeros_like(q)
            k[..., :8], k[..., 8:] = own, shared
        return F.scaled_dot_product_attention(q, k, v)


class Merged(nn.Module):
    """Heads that are samples, as in BLOOM."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1) for p in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


class Padded(nn.Module):
    """Tokens that all samples share are joined to the keys; the heads are separate."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.first = Attend(), nn.Parameter(torch.ones(1, 1, 1, CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.attend.projected(x)
        first = self.first.expand(x.shape[0], HEADS, -1, -1)
        return self.attend.attend(q, torch.cat([first, k], 2), torch.cat([first, v], 2))


@pytest.mark.parametrize(
    "model",
    [partial(Latent, True), partial(Latent, True, copied=True), partial(Latent, False), Merged],
    ids=["cat", "copies", "in place", "merged"],
)
def test_without_a_dimension_of_heads_there_is_a_reason(model: Callable[[], nn.Module]) -> None:
    config = QuantConfig(kv_cache=SPECS["fp8 per head"])
    why = "has no dimension that holds only heads" if model is Merged else "share channels, so a cache holds latents"
    with pytest.warns(UserWarning, match=why):
        rows = qfx.quantize(seeded(model()), config, [rand(2, 5, WIDTH)], progress=False).report()
    assert [why in row.reason for row in rows if row.kind == "attention"] == [True]


def test_shared_tokens_are_no_shared_channels() -> None:
    config = QuantConfig(kv_cache=SPECS["fp8 per head"])
    report = quantize(seeded(Padded()), config, [rand(2, 5, WIDTH)]).report()
    assert [row.activation for row in report if row.kind == "attention"] == ["fp8_e4m3 head"]


@pytest.mark.parametrize("field", ["weight", "input"])
def test_scales_per_head_are_for_caches(field: str) -> None:
    with pytest.raises(ConfigError, match="granularity='head' is for keys and values"):
        QuantConfig(weight=TensorSpec(format=INT8)).replace(**{field: SPECS["int8 per head"]})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"format": INT8, "dynamic": True}, "granularity='token' on `kv_cache`"),
        ({"format": INT8, "granularity": "head", "dynamic": True}, "per tensor, token or group, not per head"),
        ({"format": INT4, "granularity": "group", "group_size": 4}, "measured at run time; set dynamic=True"),
        ({"format": INT4, "symmetry": "sign_aware"}, "sign_aware' is only for weights"),
        ({"format": INT8, "reduce_range": True}, "reduce_range is only for weights"),
        ({"format": INT8, "observer": Hqq()}, "works only for weights"),
    ],
)
def test_what_no_cache_can_be_is_refused(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        QuantConfig(kv_cache=TensorSpec(**spec))
    if spec.get("granularity") != "head":  # refused as a spec
        with pytest.raises(ConfigError, match=r"\(override 'a'\)"):
            QuantConfig(overrides=(Override(pattern="a", kv_cache=TensorSpec(**spec)),))


def test_a_target_refuses_formats_of_a_cache() -> None:
    with pytest.raises(ConfigError, match="shift"):
        QuantConfig(kv_cache=SPECS["int8"], target=qfx.targets.DPU)


def test_the_spec_is_kept_as_text_and_found_in_overrides() -> None:
    spec = SPECS["int8 per head and channel"]
    config = QuantConfig(kv_cache=spec, overrides=(Override(pattern="first", kv_cache=SPECS["fp8"]),))
    assert QuantConfig.from_yaml(config.to_yaml()) == config
    assert config.specs_for("first", "attention").kv_cache == SPECS["fp8"]
    assert QuantConfig.from_dict({"preset": "w4a16_rtn", "kv_cache": spec.to_dict()}).kv_cache == spec


def test_data_are_needed_for_static_scales_alone() -> None:
    assert needs_data(QuantConfig(kv_cache=SPECS["fp8"]))
    assert not needs_data(QuantConfig(kv_cache=SPECS["fp8 per token"]))
