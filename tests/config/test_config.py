"""Configurations survive every spelling, and what contradicts itself is refused with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import quark_fx as qfx
from quark_fx.config.block_formats import MX9, MXFP4, MXINT8, NVFP4
from quark_fx.config.gguf_types import GGUF_TYPES
from quark_fx.config.quant_config import INHERIT, Granularity, Override, QuantConfig, Target, TensorSpec, matches
from quark_fx.errors import ConfigError
from quark_fx.graph.pass_manager import PASSES
from quark_fx.numbers.formats import (
    BF16,
    FORMATS,
    FP8_E4M3,
    FP16,
    INT4,
    INT8,
    INT16,
    INT32,
    SM8,
    UINT8,
    UINT32,
    Format,
)
from quark_fx.numbers.qparams import Symmetry
from quark_fx.numbers.scales import (
    E4M3_SCALES,
    E8M0_CEIL,
    E8M0_EVEN,
    E8M0_FLOOR,
    FLOAT16,
    FLOAT20,
    FLOAT32,
    HALVES,
    POWER_OF_TWO,
    QuantizedScale,
    scale_format,
)
from quark_fx.observers import (
    Entropy,
    MinMax,
    MovingAverage,
    Mse,
    NonOverflow,
    Percentile,
    Placeholder,
    PowerOfTwoMinMse,
)
from quark_fx.passes import (
    AbsorbHighBias,
    AdaRound,
    AlignShifts,
    CrossLayerEqualization,
    SplitLargePools,
    fold_batch_norm,
    fold_constants,
)
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, PRESETS, XINT8, preset


def round_trips(config: QuantConfig) -> list[QuantConfig]:
    data = config.to_dict()
    return [
        QuantConfig.from_dict(data),
        QuantConfig.from_dict(yaml.safe_load(yaml.safe_dump(data))),
        QuantConfig.from_yaml(config.to_yaml()),
    ]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_dict_and_its_yaml(name: str) -> None:
    assert round_trips(PRESETS[name]) == [PRESETS[name]] * 3


observers = st.one_of(
    st.builds(MinMax),
    st.builds(MovingAverage, constant=st.floats(0.01, 1)),
    st.builds(Percentile, percentile=st.floats(90, 99.999), bins=st.sampled_from([128, 2048])),
    st.builds(Entropy, stride=st.integers(1, 4)),
    st.builds(Mse, stride=st.integers(1, 4)),
)


@st.composite
def specs(draw: st.DrawFn, *, weight: bool = False, target: Target = Target.ONNX) -> TensorSpec:
    if target is Target.DPU:
        symmetry = draw(st.sampled_from([Symmetry.SYMMETRIC, Symmetry.SYMMETRIC_FULL]))
        narrow = draw(st.sampled_from([INT8, UINT8]))
        return TensorSpec(format=narrow, symmetry=symmetry, scale=POWER_OF_TWO)
    any_format, onnx = FORMATS.values(), target in (Target.ONNX, Target.ONNX_VNNI)
    if weight and not onnx and draw(st.booleans()):
        return draw(st.sampled_from(list(GGUF_TYPES.values())))
    held = [f for f in any_format if f.bits in (4, 8, 16) and str(f) not in ("sm8", "fp4_e2m1")]
    in_blocks = draw(st.booleans())
    if onnx and (weight or in_blocks):
        held += [f for f in any_format if str(f)[:2] == "sm" or str(f)[:3] in ("fp4", "fp6")]
    fmt = draw(st.sampled_from(held if onnx else [f for f in any_format if f != UINT32]))
    if fmt in (FP16, BF16):
        return TensorSpec(format=fmt)
    if in_blocks:
        return draw(block_specs(fmt, weight=weight))
    options: dict[str, Any] = {"format": fmt}
    if str(fmt)[:2] != "fp":
        signed = weight and str(fmt).startswith("int")
        symmetries = [Symmetry.ASYMMETRIC, Symmetry.SYMMETRIC, Symmetry.SYMMETRIC_FULL]
        symmetries += [Symmetry.SIGN_AWARE] * signed
        options["symmetry"] = draw(st.sampled_from([None, *symmetries]))
    options["scale"] = draw(st.sampled_from([FLOAT32, FLOAT16, POWER_OF_TWO]))
    if options["scale"] == POWER_OF_TWO and draw(st.booleans()):
        options["observer"] = draw(st.sampled_from([NonOverflow(), PowerOfTwoMinMse(mode="most_common")]))
    else:
        options["observer"] = draw(observers)
    if weight:
        options["granularity"] = draw(st.sampled_from(["tensor", "channel", "group"]))
        options["granularity"] = Granularity(options["granularity"])
        if options["granularity"] is Granularity.GROUP:
            options["group_size"] = draw(st.integers(1, 256))
        options["reduce_range"] = str(fmt)[:2] != "fp" and fmt.bits in (8, 16) and draw(st.booleans())
    return TensorSpec(**options)


@st.composite
def block_specs(draw: st.DrawFn, fmt: Format, *, weight: bool) -> TensorSpec:
    kind = draw(st.sampled_from([E8M0_FLOOR, E8M0_EVEN, E8M0_CEIL, E4M3_SCALES]))
    shared = kind.rule is not None and draw(st.booleans())
    return TensorSpec(
        format=fmt,
        granularity=Granularity.GROUP,
        group_size=draw(st.integers(1, 64)),
        scale=QuantizedScale(HALVES, draw(st.integers(1, 8)), kind) if shared else kind,
        symmetry=Symmetry.SYMMETRIC,
        dynamic=not weight,
    )


def biases(target: Target) -> st.SearchStrategy[TensorSpec | None]:
    return st.none() | (specs(target=target) if target is Target.DPU else st.just(TensorSpec(format=INT32)))


@st.composite
def configs(draw: st.DrawFn) -> QuantConfig:
    has_input, target = (
        draw(st.booleans()),
        draw(st.sampled_from([Target.ONNX, Target.ONNX_VNNI, Target.TORCH, Target.DPU])),
    )
    specified = draw(specs(target=target)) if has_input else None
    calibrated = specified is not None and not specified.is_cast and not specified.dynamic
    return QuantConfig(
        weight=draw(st.none() | specs(weight=True, target=target)),
        input=specified,
        output=draw(st.none() | specs(target=target).filter(lambda s: not s.dynamic)) if has_input else None,
        bias=draw(biases(target)) if calibrated else None,
        passes=(fold_batch_norm,) if draw(st.booleans()) else (),
        overrides=tuple(
            draw(
                st.lists(
                    st.builds(
                        Override,
                        pattern=st.text("abc.*:", min_size=1, max_size=5),
                        weight=st.sampled_from([INHERIT, None]) | specs(weight=True, target=target),
                    ),
                    max_size=2,
                )
            )
        ),
        exclude=tuple(draw(st.lists(st.text("abc.*", min_size=1, max_size=5), max_size=2))),
        target=target,
    )


@given(config=configs())
@settings(max_examples=60, deadline=None)
def test_every_configuration_survives_its_dict_and_its_yaml(config: QuantConfig) -> None:
    assert round_trips(config) == [config] * 3


def test_defaults_are_left_out_of_the_dict() -> None:
    assert QuantConfig(weight=TensorSpec(format=INT8)).to_dict() == {"weight": {"format": "int8"}}
    assert QuantConfig().to_dict() == {}


def test_an_override_to_float_is_not_an_inherited_one() -> None:
    off, same = Override(pattern="a", weight=None), Override(pattern="a")
    assert off.to_dict() == {"pattern": "a", "weight": None}
    assert same.to_dict() == {"pattern": "a"}
    assert Override.from_dict(off.to_dict()) == off != same == Override.from_dict(same.to_dict())


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(XINT8.to_yaml())
    assert QuantConfig.from_yaml(path) == XINT8


def spec(**options: Any) -> Callable[[], Any]:
    return lambda: TensorSpec(**options)


def config(**options: Any) -> Callable[[], Any]:
    return lambda: QuantConfig(**options)


ACTIVATION = TensorSpec(format=UINT8)
PER_CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
DYNAMIC = ACTIVATION.replace(dynamic=True)
SHIFTED = TensorSpec(format=INT8, scale=POWER_OF_TWO)
OLD_GROUPS = {"format": "sm8", "granularity": "group", "group_size": 16}
OLD_MX9 = {**OLD_GROUPS, "sub_group_size": 2, "scale_type": "e8m0_floor"}
GROUPS = TensorSpec(format=INT8, granularity=Granularity.GROUP, group_size=16)
REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "group without size": (spec(format=INT4, granularity=Granularity.GROUP), "give both or neither"),
    "size in words": (
        spec(format=INT4, granularity="group", group_size="32"),
        "must be an integer of at least 1 or None, not '32'",
    ),
    "half a size": (
        spec(format=INT4, granularity="group", group_size=1.5),
        "group_size of TensorSpec must be an integer .*, not 1.5",
    ),
    "size of truth": (spec(format=INT4, granularity="group", group_size=True), "group_size .* an integer"),
    "size without group": (spec(format=INT4, group_size=32), "give both or neither"),
    "size of zero": (
        spec(format=INT4, granularity=Granularity.GROUP, group_size=0),
        "an integer of at least 1 or None, not 0",
    ),
    "asymmetric float": (spec(format=FP8_E4M3, symmetry=Symmetry.ASYMMETRIC), "drop symmetry='asymmetric'"),
    "sign-aware unsigned": (spec(format=UINT8, symmetry=Symmetry.SIGN_AWARE), "for weights in signed integers"),
    "sign-aware dynamic": (spec(format=INT8, symmetry=Symmetry.SIGN_AWARE, dynamic=True), "for weights in signed"),
    "sign-aware activation": (
        config(weight=PER_CHANNEL, input=TensorSpec(format=INT8, symmetry=Symmetry.SIGN_AWARE)),
        "'sign_aware' is only for weights, because",
    ),
    "cast per channel": (spec(format=FP16, granularity=Granularity.CHANNEL), "drop granularity and scale"),
    "cast with a scale": (spec(format=BF16, scale=FLOAT16), "drop granularity and scale"),
    "cast with an observer": (spec(format=FP16, observer=MinMax()), "use the observer 'placeholder'"),
    "integers without an observer": (
        spec(format=INT8, observer=Placeholder()),
        "do not use the observer 'placeholder'",
    ),
    "power-of-two observer": (spec(format=INT8, observer=NonOverflow()), "set scale='power_of_two'"),
    "power-of-two mse": (spec(format=INT8, observer=PowerOfTwoMinMse()), "set scale='power_of_two'"),
    "static token": (spec(format=INT8, granularity=Granularity.TOKEN), "set dynamic=True"),
    "dynamic channel": (spec(format=INT8, granularity=Granularity.CHANNEL, dynamic=True), "per tensor, token or group"),
    "dynamic power of two": (
        spec(format=INT8, dynamic=True, scale=POWER_OF_TWO),
        "drop `scale`",
    ),
    "sub-groups of another size": (lambda: TensorSpec.from_dict({**OLD_MX9, "sub_group_size": 3}), "=3 must divide "),
    "sub-groups alone": (
        lambda: TensorSpec.from_dict({"format": "int8", "sub_group_size": 2}),
        "=2 must divide .*None",
    ),
    "groups of no scales": (
        lambda: QuantizedScale(HALVES, 0, E8M0_FLOOR),
        "group_size .* of at least 1 or None, not 0",
    ),
    "halves of float scales": (
        lambda: QuantizedScale(HALVES, 8, FLOAT32),
        r"\(HALVES, group_size=\.\.\., scale='e8m0_floor'\)",
    ),
    "e4m3 scales in groups": (
        lambda: QuantizedScale(FP8_E4M3, 2, FLOAT20),
        r"write QuantizedScale\('fp8_e4m3', scale='float20'\)",
    ),
    "integer scales of a tensor": (
        lambda: TensorSpec.from_dict({**OLD_GROUPS, "scale": "int8_float16"}),
        r"QuantizedScale\(format, group_size=\.\.\., scale='float16'\) .* its group_size counts scales",
    ),
    "earlier groups of float scales": (
        lambda: TensorSpec.from_dict({**OLD_MX9, "scale_type": "float16"}),
        "scales in float16 do not share a scale: drop sub_group_size=8",
    ),
    "earlier scales without a name": (
        lambda: TensorSpec.from_dict({"format": "int4", "scale_type": None}),
        "scale_type is the name of .* not None",
    ),
    "earlier scales in a list": (
        lambda: TensorSpec.from_dict({"format": "int4", "scale_type": ["x"]}),
        r"scale_type is the name of .* not \['x'\]",
    ),
    "a list as scales": (lambda: scale_format(["x"]), r"its name, or the fields .* not \['x'\]"),  # type: ignore[arg-type]
    "earlier and new scales": (
        lambda: TensorSpec.from_dict({"format": "int8", "scale_type": "float16", "scale": "float32"}),
        "pass either scale or scale_type, not both",
    ),
    "earlier groups of scales": (
        spec(format=INT4, granularity="group", group_size=64, sub_group_size=8),
        r"no field sub_group_size; .* group_size=n and scale=QuantizedScale\(format, group_size=m // n",
    ),
    "scales of scales": (spec(format=INT8, scale="float20"), "for the scales of a QuantizedScale; use 'float32'"),
    "scales without a format": (spec(format=INT8, scale="float21"), "choose one of float32, (?!.*float20,)"),
    "earlier field of a scheme": (
        lambda: qfx.Scheme(format=INT4, scale_type="float16"),  # type: ignore[call-arg]
        "Scheme has no field scale_type; .* did you mean 'scale'",
    ),
    "integer scales of many bits": (lambda: QuantizedScale(INT16, 8, FLOAT16), "integers of at most 8 bits"),
    "scales with other fields": (
        lambda: TensorSpec.from_dict({"format": "uint4", "scale": {"format": "uint6", "bits": 6}}),
        "QuantizedScale has no field bits",
    ),
    "halves without groups": (
        lambda: MX9.replace(granularity="tensor", group_size=None),
        "set granularity='group' and group_size",
    ),
    "dynamic integer scales": (lambda: GGUF_TYPES["Q6_K"].replace(dynamic=True), "scale='int8_float16' is for weights"),
    "block scales with zero points": (lambda: MXINT8.replace(symmetry="asymmetric"), "set symmetry='symmetric'"),
    "block scales with signs": (lambda: MXINT8.replace(symmetry="sign_aware"), "set symmetry='symmetric'"),
    "two levels without groups": (
        spec(format=INT8, scale=E4M3_SCALES, granularity=Granularity.CHANNEL),
        "set granularity='group' and group_size",
    ),
    "dynamic cast": (spec(format=FP16, dynamic=True), "drop dynamic=True"),
    "uint32": (spec(format=UINT32), "use uint16, or int32"),
    "dynamic weight": (config(weight=DYNAMIC), "drop dynamic=True from `weight`"),
    "activation per channel": (config(weight=PER_CHANNEL, input=PER_CHANNEL), "per tensor, token or group"),
    "activation per group": (config(weight=PER_CHANNEL, input=GROUPS), "set dynamic=True"),
    "scales of 8 bits per token for onnx": (
        config(input=MXINT8.replace(granularity="token", group_size=None, dynamic=True)),
        "ONNX computes 8-bit scales at run time only per group; .*target='torch'",
    ),
    "zero points of groups for onnx": (
        config(weight=PER_CHANNEL, input=GROUPS.replace(dynamic=True, symmetry="asymmetric")),
        "ONNX does not support zero points for activations in groups; .*target='torch'",
    ),
    "four-bit floats for onnx": (
        config(weight=MXFP4, input=TensorSpec(format=MXFP4.format)),
        "fp4_e2m1 has no ONNX type; .*target='torch'",
    ),
    "signs and magnitudes for onnx": (config(input=TensorSpec(format=SM8)), "sm8 has no ONNX type"),
    "output alone": (
        config(weight=PER_CHANNEL, output=ACTIVATION),
        "`output` is set without `input`.*; set `input`, or output=None",
    ),
    "dynamic output": (config(weight=PER_CHANNEL, input=ACTIVATION, output=DYNAMIC), "set output=None"),
    "activations of 32 bits for onnx": (
        config(input=TensorSpec(format=INT32, symmetry=Symmetry.ASYMMETRIC)),
        "int32 has no ONNX type; .*target='torch'",
    ),
    "bias without input": (config(bias=TensorSpec(format=INT32)), "set `input` to a static spec, or bias=None"),
    "bias with dynamic input": (config(input=DYNAMIC, bias=TensorSpec(format=INT32)), "bias=None"),
    "bias with cast input": (config(input=TensorSpec(format=FP16), bias=TensorSpec(format=INT32)), "bias=None"),
    "bias per channel": (config(input=ACTIVATION, bias=PER_CHANNEL), "per tensor"),
    "override dynamic weight": (
        config(weight=PER_CHANNEL, overrides=(Override(pattern="head", weight=DYNAMIC),)),
        r"drop dynamic=True from `weight` \(override 'head'\)",
    ),
    "override drops the input": (
        config(input=ACTIVATION, output=ACTIVATION, overrides=(Override(pattern="head", input=None),)),
        r"`output` is set without `input`.*\(override 'head'\)",
    ),
    "float scales for a dpu": (
        lambda: XINT8.replace(weight=TensorSpec(format=INT8)),
        "a DPU scales by bit shifts: use symmetric integers with scale='power_of_two'",
    ),
    "zero points for a dpu": (lambda: XINT8.replace(input=SHIFTED.replace(format=UINT8)), "symmetric integers"),
    "channels for a dpu": (lambda: XINT8.replace(weight=SHIFTED.replace(granularity="channel")), "per tensor"),
    "signed scales for a dpu": (lambda: XINT8.replace(weight=SHIFTED.replace(symmetry="sign_aware")), "symmetric"),
    "float scales of an override for a dpu": (
        lambda: XINT8.replace(overrides=(Override(pattern="head", weight=TensorSpec(format=INT8)),)),
        r"a DPU scales by bit shifts.*\(override 'head'\)",
    ),
    "an int32 bias for a dpu": (lambda: XINT8.replace(bias=TensorSpec(format=INT32)), "`bias`: a DPU scales by"),
    "shifts of another target": (
        lambda: XINT8.replace(target="onnx"),
        "pass AlignShifts is for target='dpu', not 'onnx'; set the target, or drop the pass",
    ),
    "shifts of float scales": (
        lambda: INT8_STATIC.replace(passes=(AlignShifts(),)),
        "pass AlignShifts is for target='dpu', not 'onnx'",
    ),
    "shifts of asymmetric scales": (
        lambda: INT8_STATIC.replace(passes=(AlignShifts(),), target="dpu"),
        "a DPU scales by bit shifts",
    ),
    "an unknown rule": (lambda: AlignShifts(rules=("concta",)), "unknown rule 'concta'; choose one of concat, pool"),
    "pools of nothing": (
        lambda: SplitLargePools(largest=0),
        "largest of SplitLargePools must be an integer of at least 1, not 0",
    ),
    "shifts after learning": (
        lambda: XINT8.replace(passes=(AdaRound(), AlignShifts())),
        "AlignShifts rewrites the calibrated graph and is listed after AdaRound",
    ),
    "group size without weight": (
        lambda: QuantConfig().replace(group_size=32),
        "needs a `weight` spec, which this configuration lacks",
    ),
    "unknown field": (
        lambda: INT8_STATIC.replace(wieght=None),
        "QuantConfig has no field wieght; it has weight, input",
    ),
    "unknown spec field": (lambda: ACTIVATION.replace(bits=8), "TensorSpec has no field bits; it has format"),
    "unknown key": (lambda: QuantConfig.from_dict({"weigth": {}}), "QuantConfig has no field weigth"),
    "unknown spec key": (lambda: TensorSpec.from_dict({"format": "int8", "bits": 8}), "TensorSpec has no field bits"),
    "no format": (lambda: TensorSpec.from_dict({"symmetry": "symmetric"}), "a tensor spec needs a format"),
    "unknown format": (lambda: TensorSpec.from_dict({"format": "nt8"}), "unknown number format 'nt8'; choose one of"),
    "unknown granularity": (
        lambda: TensorSpec.from_dict({"format": "int8", "granularity": "row"}),
        "unknown Granularity 'row'; choose one of tensor, channel, group, head, token",
    ),
    "unknown symmetry": (
        lambda: TensorSpec.from_dict({"format": "int8", "symmetry": "odd"}),
        "unknown Symmetry 'odd'; choose one of asymmetric",
    ),
    "unknown scale": (
        lambda: TensorSpec.from_dict({"format": "int8", "scale": "float8"}),
        "unknown scale format 'float8'; choose one of float32, .*, fp8_e4m3",
    ),
    "unknown target": (
        lambda: QuantConfig.from_dict({"target": "tpu"}),
        "unknown target 'tpu'; choose one of onnx, onnx_vnni, vllm, sglang, inductor, inductor_vnni, torch, dpu, "
        "executorch, openvino, tensorrt",
    ),
    "unknown observer": (
        lambda: TensorSpec.from_dict({"format": "int8", "observer": "minmix"}),
        "unknown observer 'minmix'; choose one of .*min_max",
    ),
    "unknown observer option": (
        lambda: TensorSpec.from_dict({"format": "int8", "observer": {"name": "percentile", "percent": 9}}),
        "observer 'percentile' has no option percent; it has .*percentile",
    ),
    "pass without parentheses": (
        config(passes=(fold_batch_norm, CrossLayerEqualization)),
        r"passes: CrossLayerEqualization is a class; write CrossLayerEqualization\(\)",
    ),
    "pass by its name": (
        config(passes=(fold_batch_norm, "AdaRound")),
        "passes of QuantConfig must be a tuple whose items are each a function, not .*'AdaRound'",
    ),
    "pass that is no list": (
        config(passes=fold_batch_norm),
        "passes of QuantConfig must be a tuple .*, not <function fold.*; write passes=",
    ),
    "override without parentheses": (
        config(overrides=(Override,)),
        "overrides of QuantConfig must be a tuple whose items are each an Override, not ",
    ),
    "passes in a string": (
        lambda: QuantConfig.from_dict({"passes": "AdaRound"}),
        r"passes is a list, not 'AdaRound'; write \['AdaRound'\]",
    ),
    "one override in a dict": (
        lambda: QuantConfig.from_dict({"overrides": {"pattern": "head"}}),
        "overrides is a list, not {'pattern': 'head'}",
    ),
    "pass that is a number": (
        lambda: QuantConfig.from_dict({"passes": [3]}),
        "a pass must be a name, or a mapping .*, not 3",
    ),
    "equalization before folding": (
        config(passes=(CrossLayerEqualization(), fold_constants, fold_batch_norm)),
        "CrossLayerEqualization is listed before fold_batch_norm, .*; list fold_batch_norm first",
    ),
    "absorption before folding": (
        config(passes=(AbsorbHighBias(), fold_batch_norm)),
        "AbsorbHighBias is listed before fold_batch_norm",
    ),
    "unknown pass": (
        lambda: QuantConfig.from_dict({"passes": ["fold_batchnorm"]}),
        "unknown pass 'fold_batchnorm'; choose one of .*fold_batch_norm",
    ),
    "unknown pass option": (
        lambda: QuantConfig.from_dict({"passes": [{"name": "fold_batch_norm", "hard": True}]}),
        "pass 'fold_batch_norm' has no option hard; it has none",
    ),
    "unknown override key": (
        lambda: QuantConfig.from_dict({"overrides": [{"pattern": "a", "wieght": None}]}),
        "Override has no field wieght",
    ),
    "fields that a target refuses, by name": (
        lambda: preset("int8_static").replace(target="tensorrt"),
        r"^`input`, `output`: TensorRT supports int8, and int4 for weights, not uint8; .*\n`bias`: TensorRT",
    ),
    "yaml that is no mapping": (lambda: QuantConfig.from_yaml("- a\n- b\n"), "a configuration is a mapping, not list"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_contradiction_is_refused_with_the_way_out(case: str) -> None:
    build, message = REFUSALS[case]
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_refusal_is_a_value_error_and_a_quark_error() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, qfx.QuarkError)


def test_an_unknown_preset_lists_the_nearest_and_all() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown preset 'int8_sttic'; choose one of .*int8_dynamic.*; did you mean 'int8_static'\?"
    ):
        preset("int8_sttic")
    with pytest.raises(ConfigError, match=r"unknown preset 'zzz'.*int8_static"):
        qfx.quantize(None, "zzz")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_found_in_any_case_and_is_a_constant_of_the_module(name: str) -> None:
    assert preset(name.upper()) is preset(name) is getattr(qfx.presets, name.upper())


def test_the_last_override_that_matches_wins_field_by_field() -> None:
    wide = TensorSpec(format=INT16)
    config = INT8_STATIC.replace(
        overrides=(
            Override(pattern="encoder.*", weight=TensorSpec(format=INT4), input=wide, output=wide),
            Override(pattern="op:linear", weight=None),
            Override(pattern="encoder.0", weight=TensorSpec(format=INT16)),
        )
    )
    assert config.specs_for("encoder.0", "linear").weight == TensorSpec(format=INT16)
    assert config.specs_for("encoder.1", "linear").weight is None
    assert config.specs_for("encoder.1", "conv").weight == TensorSpec(format=INT4)
    assert config.specs_for("encoder.1", "linear").input == wide  # inherited from the first
    assert config.specs_for("decoder", "conv") == INT8_STATIC.specs_for("decoder", "conv")


def test_patterns_are_globs_on_names_or_on_kinds() -> None:
    assert matches("encoder.*", "encoder.layer.0", "linear")
    assert not matches("encoder", "encoder.layer", "linear")
    assert matches("op:conv*", "anything", "conv_transpose")
    assert not matches("op:conv", "conv", "linear")
    assert not matches("Encoder.*", "encoder.0", "linear")  # names are case-sensitive
    config = QuantConfig(exclude=("a.*", "op:matmul"))
    assert config.exclusion("x", "matmul") == "excluded by 'op:matmul'"
    assert config.exclusion("x", "linear") == ""


def test_a_group_size_is_replaced_in_place() -> None:
    config = INT4_WEIGHT_ONLY.replace(group_size=64)
    assert config.weight == TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=64)
    assert config.overrides == INT4_WEIGHT_ONLY.overrides
    grouped = INT8_STATIC.replace(group_size=16, weight=TensorSpec(format=INT4))
    assert grouped.weight == TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16)
    assert INT4_WEIGHT_ONLY.weight is not None
    assert INT4_WEIGHT_ONLY.weight.group_size == 32  # the preset itself is untouched


def test_configurations_are_values() -> None:
    assert INT8_STATIC.replace() == INT8_STATIC
    assert hash(PER_CHANNEL) == hash(TensorSpec.from_dict(PER_CHANNEL.to_dict()))
    with pytest.raises(AttributeError):
        INT8_STATIC.weight = None  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"keyword arguments: write TensorSpec\(format=...\)"):
        TensorSpec(INT8)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (ACTIVATION, "uint8"),
        (DYNAMIC, "uint8 dynamic"),
        (PER_CHANNEL, "int8 channel"),
        (TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32), "int4 group 32"),
        (TensorSpec(format=INT8, scale=POWER_OF_TWO), "int8 pow2"),
    ],
)
def test_a_spec_is_printed_in_a_few_words(spec: TensorSpec, text: str) -> None:
    assert str(spec) == text


def test_symmetry_follows_the_sign_unless_given() -> None:
    assert TensorSpec(format=INT8).symmetry is Symmetry.SYMMETRIC
    assert TensorSpec(format=UINT8).symmetry is Symmetry.ASYMMETRIC
    assert TensorSpec(format=UINT8, symmetry=Symmetry.SYMMETRIC).symmetry is Symmetry.SYMMETRIC


def test_what_follows_from_the_format_follows_from_a_new_format() -> None:
    assert ACTIVATION.replace(format=INT8) == TensorSpec(format=INT8)
    assert ACTIVATION.replace(format=FP8_E4M3) == TensorSpec(format=FP8_E4M3)
    assert ACTIVATION.replace(format=FP16) == TensorSpec(format=FP16)
    assert TensorSpec(format=FP16).replace(format=INT8).observer == MinMax()
    chosen = TensorSpec(format=UINT8, symmetry=Symmetry.SYMMETRIC, observer=Percentile())
    assert chosen.replace(format=INT8).observer == Percentile()
    assert TensorSpec(format=INT8, symmetry=Symmetry.ASYMMETRIC).replace(format=INT16).symmetry is Symmetry.ASYMMETRIC


OLD_Q4_K = {"format": "uint4", "granularity": "group", "group_size": 256, "sub_group_size": 32, "symmetry": "offset"}
OLD_Q6_K = {"format": "int6", "granularity": "group", "group_size": 256, "sub_group_size": 16}


@pytest.mark.parametrize(
    ("old", "spec"),
    [
        ({**OLD_MX9, "dynamic": True}, MX9.replace(dynamic=True)),
        ({**OLD_Q4_K, "scale_type": "uint6_float16"}, GGUF_TYPES["Q4_K"]),
        ({**OLD_Q6_K, "symmetry": "sign_aware", "scale_type": "int8_float16"}, GGUF_TYPES["Q6_K"]),
        ({**OLD_GROUPS, "format": "fp4_e2m1", "scale_type": "fp8_e4m3"}, NVFP4),
        ({**OLD_GROUPS, "format": "int8", "group_size": 32, "scale_type": "e8m0_even"}, MXINT8),
        ({"format": "int8", "scale_type": "power_of_two", "sub_group_size": None}, SHIFTED),
        ({**OLD_GROUPS, "format": "int8", "group_size": 32, "scale_type": "float16"}, GGUF_TYPES["Q8_0"]),
    ],
    ids=str,
)
def test_specs_of_earlier_versions_are_read(old: dict[str, Any], spec: TensorSpec) -> None:
    assert TensorSpec.from_dict(old) == spec
    weight = QuantConfig.from_dict({"weight": old | {"dynamic": False}, "target": "torch"}).weight
    assert weight == spec.replace(dynamic=False)


def test_scales_are_written_as_names_or_fields() -> None:
    assert MXINT8.to_dict()["scale"] == "e8m0_even"
    assert NVFP4.to_dict()["scale"] == {"format": "fp8_e4m3", "scale": "float20"}
    assert MX9.to_dict()["scale"] == {"format": "half_or_one", "group_size": 8, "scale": "e8m0_floor"}
    with pytest.raises(ConfigError, match=r"no field scale_type.*scale"):
        MX9.replace(scale_type="float32")
    assert qfx.Scheme(format=INT4, scale="float16") == TensorSpec(format=INT4, scale="float16").scheme  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["AdaRound", "BlockAP"])
def test_an_option_that_became_a_constant_loads_with_its_value_alone(name: str) -> None:
    def config(patience: int) -> QuantConfig:
        return QuantConfig.from_dict({"passes": [{"name": name, "iterations": 3, "patience": patience}]})

    assert config(5) == QuantConfig(passes=(PASSES.make({"name": name, "iterations": 3}),))
    for call in (lambda: config(6), lambda: PASSES.find(name)(patience=5)):
        with pytest.raises(ConfigError, match=f"patience of {name} is fixed at 5; omit this field"):
            call()
