"""The vendor's nodes for blocks: one a tensor, whose attributes say how torch rounds, or an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from test_block_formats import block_floating_point, microscaling, rows, shared_microexponents
from test_onnx_blocks import MODELS, Rounded, assert_same, every_binade, ragged, whole
from test_onnx_formats import Tied, ids
from tiny import quantize, rand, seeded, thinned
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.block_formats import (
    BFP16,
    MX4,
    MX6,
    MX9,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
)
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.export.runtime.session import open_session, session_options
from quark_fx.export.to_onnx.export_onnx import _lowered
from quark_fx.export.to_onnx.formats import FORMATS, FormatOptions
from quark_fx.graph.nodes import set_parameter
from quark_fx.numbers.formats import FP4_E2M1, FP8_E4M3, INT8, SM8
from quark_fx.numbers.scales import POWER_OF_TWO
from quark_fx.presets import XINT8
from quark_fx.vendors.amd.vitis import BLOCK_NODES

MX = {"rounding_mode": 2, "block_size": 32}
BFP = {"rounding_mode": 2, "sub_block_size": 2, "sub_block_shift_bits": 1, "convert_to_bfloat_before_bfp": 0}
RAISED = {**BFP, "bfp_method": "to_bfp", "bit_width": 16, "use_compiler_version_cpu_kernel": 1}
PRIME = {**BFP, "bfp_method": "to_bfp_prime", "block_size": 16}

NODES: dict[str, tuple[TensorSpec, str, dict[str, Any]]] = {
    **{
        f"{spec.format}": (spec.replace(scale="e8m0_floor"), "MX", {**MX, "element_dtype": f"{spec.format}"})
        for spec in (MXFP8_E5M2, MXFP8_E4M3, MXFP6_E3M2, MXFP6_E2M3, MXFP4, MXINT8)
    },
    "bfp16": (BFP16, "BFP", {**RAISED, "block_size": 8}),
    "mxint8 even": (MXINT8, "BFP", {**RAISED, "block_size": 32}),
    "saturating": (
        BFP16.replace(format=SM8, scale="e8m0_floor"),
        "BFP",
        {**BFP, "bfp_method": "to_bfp", "bit_width": 16, "block_size": 8},
    ),
    "mx9": (MX9, "BFP", {**PRIME, "bit_width": 16}),
    "mx6": (MX6, "BFP", {**PRIME, "bit_width": 13}),
    "mx4": (MX4, "BFP", {**PRIME, "bit_width": 11}),
}
"""What each format is written as, as the vendor's documentation describes the attributes."""
formats = pytest.mark.parametrize("name", NODES)
domains = pytest.mark.parametrize("domain", BLOCK_NODES)


def config(spec: TensorSpec, *, weight_only: bool = False) -> QuantConfig:
    """Return a configuration of one format for everything."""
    return QuantConfig(weight=spec, input=None if weight_only else spec.replace(dynamic=True), target=qfx.Target.TORCH)


def nodes(path: Path, domain: str = "com.amd.quark") -> list[tuple[str, dict[str, Any]]]:
    """Return operator and attributes of the vendor's nodes in a file."""

    def value(attribute: Any) -> Any:
        found = helper.get_attribute_value(attribute)
        return found.decode() if isinstance(found, bytes) else found

    graph = onnx.load(path).graph
    return [(n.op_type, {a.name: value(a) for a in n.attribute}) for n in graph.node if n.domain == domain]


def vendor_kernels(domain: str) -> list[type[OpRun]]:
    """Return kernels of the vendor's nodes, one value after the other in float64, from their description."""

    def blocks(row: list[float], attributes: dict[str, Any]) -> list[float]:
        size, bits = attributes["block_size"], attributes.get("bit_width", 16)
        if "element_dtype" in attributes:
            return microscaling(row, attributes["element_dtype"], "floor", size)
        if attributes["bfp_method"] == "to_bfp_prime":
            return shared_microexponents(row, bits - 9)
        return block_floating_point(row, raised=bool(attributes.get("use_compiler_version_cpu_kernel", 0)), size=size)

    def kernel(self: Any, x: Any, **attributes: Any) -> tuple[Any]:
        assert attributes["rounding_mode"] == 2
        moved = np.moveaxis(x, attributes["axis"], -1)
        flat = [blocks(row, attributes) for row in moved.reshape(-1, moved.shape[-1]).astype(np.float64).tolist()]
        return (np.moveaxis(np.array(flat, np.float32).reshape(moved.shape), -1, attributes["axis"]),)

    return [type(name, (OpRun,), {"op_domain": domain, "_run": kernel}) for name in BLOCK_NODES[domain].values()]


# One value -----------------------------------------------------------------------------------------------------------


def written(spec: TensorSpec, x: Tensor, axis: int, folder: Path, domain: str = "com.amd.quark") -> Path:
    """Write a graph that rounds `x`."""
    captured = qfx.capture_graph(Rounded(spec, axis).eval(), x, dynamic_shapes=({},))
    options = FormatOptions(domain=domain)
    path = folder / "rounded.onnx"
    ir.save(_lowered(captured.module, ["x"], ["y"], FORMATS["vitis"], options, 21, qfx.Target.ONNX.onnx)[0], path)
    return path


@domains
@formats
def test_one_node_says_how_a_value_is_rounded(name: str, domain: str, tmp_path: Path) -> None:
    spec, kind, attributes = NODES[name]
    path = written(spec, rand(2, 64, 3), 1, tmp_path, domain)
    assert nodes(path, domain) == [(BLOCK_NODES[domain][kind], {**attributes, "axis": 1})]
    assert len(onnx.load(path).graph.node) == 1


@formats
def test_the_reference_of_a_node_rounds_as_torch_does(name: str, tmp_path: Path) -> None:
    spec = NODES[name][0]
    for x in (rows(), every_binade()):
        session = open_session(written(spec, x, -1, tmp_path), session_options(optimize=True))
        assert_same(torch.from_numpy(session.run(None, {"x": x.numpy()})[0]), Rounded(spec, -1)(x))


@domains
@formats
def test_kernels_of_the_description_compute_what_torch_does(name: str, domain: str, tmp_path: Path) -> None:
    spec = NODES[name][0]
    for axis in (0, 1):
        x = rand(75, 40, seed=axis)
        evaluator = ReferenceEvaluator(
            onnx.load(written(spec, x, axis, tmp_path, domain)), new_ops=vendor_kernels(domain)
        )
        (got,) = list(evaluator.run(None, {"x": x.numpy()}))
        assert_same(torch.from_numpy(np.asarray(got)), Rounded(spec, axis)(x))


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "model"),
    thinned(
        NODES,
        MODELS,
        lambda name, model: model == "ragged" or name in ("bfp16", "mx9", "saturating", f"{MXFP4.format}"),
    ),
)
def test_models_agree_with_torch_value_by_value(name: str, model: str, tmp_path: Path) -> None:
    spec, kind, attributes = NODES[name]
    make, data = MODELS[model]
    qmodel = quantize(make(), config(spec), [data(4)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    onnx.checker.check_model(path, full_check=True)
    stored = onnx.load(path)
    assert not stored.functions
    assert {n.domain for n in stored.graph.node} == {"", "com.amd.quark"}
    assert not any("Quantize" in n.op_type for n in stored.graph.node if not n.domain)
    found = nodes(path)
    assert len(found) == (8 if model == "encoder" else 6)  # a weight and an activation for each operator
    for operator, own in found:
        assert (operator, own) == (BLOCK_NODES["com.amd.quark"][kind], {**attributes, "axis": own["axis"]})
    *values, output = qfx.verify(qmodel, path, [data(4), data(1), data(7)], per_node=True).differences
    assert [value.max_abs for value in values] == [0] * (len(found) // 2)
    assert output.steps <= 255 * 288 * 2**-24


@pytest.mark.parametrize("opset", [14, 17, 18, 20, 25])
def test_old_opsets_have_the_same_nodes(opset: int, tmp_path: Path) -> None:
    qmodel = quantize(ragged(), whole("mx9"), [rand(4, 70)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", opset=opset, external_data=True)
    assert {o.domain: o.version for o in onnx.load(path).opset_import} == {"": opset, "com.amd.quark": 1}
    *values, output = qfx.verify(qmodel, path, [rand(3, 70)], per_node=True).differences
    assert [value.max_abs for value in values] == [0, 0, 0]
    assert output.steps <= 255 * 70 * 2**-24


@pytest.mark.parametrize("weight_only", [False, True])
@formats
def test_weights_are_floats_that_their_node_rounds_to_their_values(
    name: str, weight_only: bool, tmp_path: Path
) -> None:
    spec = NODES[name][0]
    qmodel = quantize(ragged(), config(spec, weight_only=weight_only), [rand(4, 70)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    graph = onnx.load(path).graph
    weights = [t for t in graph.initializer if t.name.endswith(".weight")]
    assert [(t.data_type, sorted(t.dims)) for t in weights] == [
        (TensorProto.FLOAT, sizes) for sizes in ([33, 70], [17, 33], [5, 17])
    ]
    like = "int8" if weight_only and name == "mxint8 even" else name  # the weights are the same
    for operator, attributes in nodes(path):
        assert operator.startswith(NODES[like][1])
        assert attributes == {**NODES[like][2], "axis": attributes["axis"]}
    assert qfx.verify(qmodel, path, [rand(3, 70)]).max_steps <= 255 * 70 * 2**-24


@pytest.mark.parametrize("preset", ["bfp16", "mx9", "mx6", "mxint8"])
@pytest.mark.parametrize("format", ["qdq", "vitis"])
def test_a_table_in_blocks_is_dequantized_before_rows_are_looked_up(preset: str, format: str, tmp_path: Path) -> None:
    qmodel = quantize(seeded(Tied()), whole(preset), ids())
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format=format)
    found = qfx.verify(qmodel, path, ids(3), per_node=True)
    assert [value.max_abs for value in found.differences[:-1]] == [0]
    assert found.max_steps <= 255 * 40 * 2**-24
    tables = [t for t in onnx.load(path).graph.initializer if np.prod(t.dims) >= 20 * 40 or t.name.endswith("_sm5")]
    assert len(tables) == 1  # of embedding and head


def test_nodes_for_blocks_and_pairs_may_be_in_one_file(tmp_path: Path) -> None:
    power = TensorSpec(format=INT8, scale=POWER_OF_TWO)
    blocks = Override(pattern="2", weight=BFP16, input=BFP16.replace(dynamic=True))
    mixed = QuantConfig(weight=power, input=power, overrides=(blocks,), target=qfx.Target.TORCH)
    qmodel = quantize(ragged(), mixed, [rand(4, 70)])
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis", domain="com.vai.quantize")
    operators = [operator for operator, _ in nodes(path, "com.vai.quantize")]
    assert operators.count("BFPFixNeuron") == 2
    assert operators.count("VitisQuantizeLinear") == 2
    assert qfx.verify(qmodel, path, [rand(3, 70)], per_node=True).max_steps <= 1


def test_a_file_without_blocks_is_as_ever(tmp_path: Path) -> None:
    path = qfx.export.onnx(quantize(ragged(), XINT8, [rand(4, 70)]), tmp_path / "m.onnx", format="vitis")
    assert {operator for operator, _ in nodes(path)} == {"ExtendedQuantizeLinear", "ExtendedDequantizeLinear"}


# Refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "value", "weight"),
    [
        (NVFP4, "fp4_e2m1 in blocks of 16, fp8_e4m3 scales", "fp4_e2m1 in blocks of 16"),
        (MXFP8_E4M3, "fp8_e4m3 in blocks of 32, e8m0_even scales", None),
        (MXFP4.replace(scale="e8m0_ceil"), "fp4_e2m1 in blocks of 32, e8m0_ceil scales", None),
        (MXFP4.replace(scale="float32"), "fp4_e2m1 in blocks of 32, float32 scales", "fp4_e2m1 in blocks of 32"),
    ],
    ids=str,
)
def test_what_the_nodes_cannot_say_is_refused(spec: TensorSpec, value: str, weight: str | None, tmp_path: Path) -> None:
    qmodel = quantize(ragged(), config(spec), [rand(4, 70)])
    with pytest.raises(qfx.ExportError) as raised:
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    message = str(raised.value)
    assert message.count(f": {value}\n") == 3
    assert (f"\n  0.weight: {weight}, with values or scales that" in message) == (weight is not None)
    assert "Use the preset 'bfp16'" in message
    assert "scale='e8m0_floor' and observer=MinMax()" in message
    assert not list(tmp_path.iterdir())


def test_small_codes_without_blocks_are_refused(tmp_path: Path) -> None:
    weight = TensorSpec(format=FP4_E2M1, granularity=Granularity.CHANNEL)
    qmodel = quantize(ragged(), QuantConfig(weight=weight, target=qfx.Target.TORCH), [rand(4, 70)])
    with pytest.raises(qfx.ExportError, match=r"0\.weight: fp4_e2m1 without blocks"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")


def test_a_weight_that_its_node_would_round_again_is_refused(tmp_path: Path) -> None:
    """With 240 = 1.875 * 2**7 as the largest code, the node halves the scale, and 480 is more than E4M3 has."""
    spec = MXFP8_E4M3.replace(scale="e8m0_floor")
    qmodel = quantize(seeded(nn.Linear(64, 2)), config(spec, weight_only=True), [rand(2, 64)])
    gm = qmodel.graph_module
    name = next(
        str(n.target)
        for n in gm.graph.nodes
        if n.op == "get_attr" and gm.get_buffer(str(n.target)).dtype is FP8_E4M3.dtype
    )
    codes = gm.get_buffer(name).float()
    codes[0] = 240
    set_parameter(gm, name, codes.to(FP8_E4M3.dtype))
    with pytest.raises(qfx.ExportError, match="the node cannot reproduce"):
        qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    codes[0] = 224
    set_parameter(gm, name, codes.to(FP8_E4M3.dtype))
    path = qfx.export.onnx(qmodel, tmp_path / "m.onnx", format="vitis")
    assert qfx.verify(qmodel, path, [rand(2, 64)]).max_steps <= 255 * 64 * 2**-24


@pytest.mark.parametrize(
    ("name", "attribute", "value"), [("bfp16", "rounding_mode", 0), ("mx9", "sub_block_shift_bits", 2)]
)
def test_the_reference_does_not_run_other_attributes(name: str, attribute: str, value: int, tmp_path: Path) -> None:
    path = written(NODES[name][0], rand(2, 64), 1, tmp_path)
    model = onnx.load(path)
    next(a for a in model.graph.node[0].attribute if a.name == attribute).i = value
    onnx.save(model, path)
    with pytest.raises(qfx.ExportError, match="run the file with the vendor's library"):
        open_session(path, session_options(optimize=True))
