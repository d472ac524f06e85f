"""What one file outside of the package adds: found by name, judged, reported, predicted, resumed, run by ranks."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from extensions.refit_scales import RefitScales
from extensions.tensorrt_like import TENSORRT_LIKE
from test_gptq import RTN, Attention, errors, ids, relative_error
from tiny import calls, cnn, images, quantize, seeded

import quark_fx as qfx
from quark_fx.config.target import StoredTarget
from quark_fx.export.to_onnx.edit import array_of
from quark_fx.passes import GPTQ
from quark_fx.solvers.hessian import Hessian
from quark_fx.solvers.quantized_matrix import QuantizedMatrix
from quark_fx.solvers.solver import Proposal, Solver, solver

EXTENSIONS = sorted((Path(__file__).parent / "extensions").glob("[!_]*.py"))


@pytest.mark.parametrize("file", EXTENSIONS, ids=lambda file: file.stem)
def test_an_extension_is_one_short_file(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 60


def test_refitted_scales_lower_the_error_on_unseen_data() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16, 16, 16)
    plain, refitted = (quantize(model, RTN.replace(passes=passes), data[:4]) for passes in ((), (RefitScales(),)))
    assert relative_error(refitted, model, data[4:]) < 0.9 * relative_error(plain, model, data[4:])
    found = errors(refitted)
    assert list(found) == ["into", "back", "gate", "lift", "down", "words"]
    assert all(after <= before for before, after in found.values())
    assert any(change.what == "scales" for change in refitted.report().passes[-1].changes)
    assert refitted.report().passes[-1].held_out


def test_it_keeps_the_codes_of_gptq() -> None:
    model, data = seeded(Attention()), ids(16, 16)
    one, both = (quantize(model, RTN.replace(passes=p), data) for p in ((GPTQ(),), (GPTQ(), RefitScales())))
    tensors, others = one.graph_module.state_dict(), both.graph_module.state_dict()
    assert all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_codes"))
    assert not all(torch.equal(tensors[name], others[name]) for name in tensors if name.endswith("_scale"))


def test_a_solver_is_found_by_name_and_its_needs_are_predicted() -> None:
    config = qfx.QuantConfig.from_dict(RTN.replace(passes=(RefitScales(damping=0.1),)).to_dict())
    assert config.passes == (RefitScales(damping=0.1),)
    model, data = seeded(Attention()), ids(16, 16)
    stages = [name for name, _, _ in qfx.predict(model, config, data).stages]
    assert "RefitScales" in stages
    assert not qfx.predict(model, config, data).unknown


@solver
@dataclass(frozen=True, kw_only=True)
class Spoil(Solver):
    """Halve every scale, which saturates every large weight."""

    def solve(self, weight: QuantizedMatrix, seen: Hessian) -> Proposal:
        assert weight.columns is not None
        return Proposal(weight.with_scales(torch.full((*weight.real.shape[:2], weight.columns.count), 0.5)))


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_worse_is_dropped(count: int) -> None:
    """Also where one sample is all there is to judge by."""
    model, data = seeded(Attention()), ids(*(count * [1]))
    plain, spoiled = (quantize(model, RTN.replace(passes=passes), data) for passes in ((), (Spoil(),)))
    tensors, others = (q.graph_module.state_dict() for q in (plain, spoiled))
    assert all(torch.equal(tensors[name], others[name]) for name in tensors)
    changes = [change.what for change in spoiled.report().passes[-1].changes if change.before is not None]
    data_of = {1: "the calibration data", 2: "validation data"}[count]
    assert changes == [f"left: no better on {data_of}"] * 6


# A target: tensorrt_like.

INT8_TENSORRT = """
target: tensorrt_like
weight: {format: int8, granularity: channel}
input: {format: int8}
output: {format: int8}
passes: [fold_batch_norm]
"""


def tensorrt() -> qfx.QuantConfig:
    return qfx.QuantConfig.from_yaml(INT8_TENSORRT)


def test_a_target_is_found_by_name_and_written_by_name() -> None:
    assert qfx.QuantConfig(target="tensorrt_like").target is TENSORRT_LIKE  # type: ignore[arg-type]
    assert tensorrt().target is TENSORRT_LIKE
    assert tensorrt().to_dict()["target"] == "tensorrt_like"
    assert qfx.QuantConfig.from_yaml(tensorrt().to_yaml()) == tensorrt()
    assert copy.deepcopy(tensorrt()) == pickle.loads(pickle.dumps(tensorrt())) == tensorrt()
    with pytest.raises(
        qfx.ConfigError, match=r"unknown target 'tensorrt'; choose one of onnx, .*; did you mean 'tensorrt_"
    ):
        qfx.QuantConfig(target="tensorrt")  # type: ignore[arg-type]


def test_its_files_have_symmetric_int8_and_float_biases(tmp_path: Path) -> None:
    """The same model for ONNX Runtime has uint8, int32 and zero points, so that each of them could be here."""
    data = images(8, 8)
    both = {}
    for name, config in (("ours", qfx.presets.INT8_STATIC), ("theirs", tensorrt())):
        qmodel = quantize(cnn(), config, data)
        both[name] = file = qfx.export.onnx(qmodel, tmp_path / f"{name}.onnx")
        assert qfx.verify(qmodel, file, data, per_node=True).max_steps <= 1
        assert all(not row.reason for row in qmodel.report().rows)
    assert codes_of(both["theirs"]) == {("int8", True)}
    assert codes_of(both["ours"]) >= {("int8", True), ("int32", True), ("uint8", False)}
    biases = [array_of(node.inputs[2]) for node in ir.load(both["theirs"]).graph if node.op_type in ("Conv", "Gemm")]
    assert [bias.dtype.name for bias in biases if bias is not None] == ["float32"] * 3


def codes_of(file: Path) -> set[tuple[str, bool]]:
    """Return the types of codes in a file, and whether their zero points are 0."""
    found = set()
    for node in ir.load(file).graph:
        if node.op_type == "DequantizeLinear":
            codes, points = node.inputs[0], array_of(node.inputs[2]) if len(node.inputs) > 2 else None
            kind = array_of(codes) if array_of(codes) is not None else points
            assert kind is not None
            found.add((kind.dtype.name, points is None or not points.any()))
    return found


def test_arithmetic_is_rounded_where_a_target_says() -> None:
    """The residual addition, but not the pool, which ONNX Runtime has an integer kernel for."""
    names = [str(node.args[0]) for node in calls(quantize(cnn(), tensorrt(), images(8)), "quark_fx.quantize.default")]
    assert "x" in names
    assert len(names) < len(calls(quantize(cnn(), qfx.presets.INT8_STATIC, images(8)), "quark_fx.quantize.default"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unsigned activations": ({"input": {"format": "uint8"}}, "int8, not uint8; set format='int8'"),
    "zero points": ({"input": {"format": "int8", "symmetry": "asymmetric"}}, "no zero points; set symmetry"),
    "scales of groups": (
        {"weight": {"format": "int8", "granularity": "group", "group_size": 16}},
        "per tensor or channel, not per group; set granularity",
    ),
    "ranges at run time": ({"input": {"format": "int8", "dynamic": True}, "output": None}, "drop dynamic=True"),
    "int32 biases": ({"bias": {"format": "int32"}}, "`bias`: TensorRT adds biases in float; set bias=None"),
    "an override": (
        {"overrides": [{"pattern": "head", "weight": {"format": "int4"}}]},
        r"not int4; set format='int8' \(override 'head'\)",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_target_refuses_is_an_error_that_names_the_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(qfx.ConfigError, match=message):
        qfx.QuantConfig.from_dict(tensorrt().to_dict() | changes)
    qfx.QuantConfig.from_dict(tensorrt().to_dict() | changes | {"target": "onnx"})


def test_a_target_reads_its_formats_and_opsets_only(tmp_path: Path) -> None:
    qmodel = quantize(cnn(), tensorrt(), images(8))
    with pytest.raises(qfx.ExportError, match=r"target='tensorrt_like' reads no format='qoperator'; choose one of qdq"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", format="qoperator")
    with pytest.raises(qfx.ExportError, match=r"opset 17 cannot be written for target='tensorrt_like'; use 21"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx", opset=17)


def test_a_file_that_a_target_does_not_read_is_not_written(tmp_path: Path) -> None:
    """Quantized for another target, whose codes it has."""
    config = qfx.presets.INT8_STATIC.replace()
    qmodel = quantize(cnn(), config, images(8))
    object.__setattr__(config, "target", TENSORRT_LIKE)
    with pytest.raises(qfx.ExportError, match=r"TensorRT does not read\n  codes of UINT8 at"):
        qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


def test_a_stored_model_runs_without_the_code_of_its_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(8)[0]
    made = quantize(cnn(), tensorrt(), [x])
    made.save(tmp_path / "model")
    assert qfx.load(tmp_path / "model").config == tensorrt()
    monkeypatch.delitem(qfx.targets.TARGETS, "tensorrt_like")
    loaded = qfx.load(tmp_path / "model")
    assert isinstance(loaded.config.target, StoredTarget)
    assert loaded.config.to_dict() == made.config.to_dict()
    assert torch.equal(loaded(x), made(x))
    loaded.save(tmp_path / "again")
    needed = "target 'tensorrt_like' is known from a stored model only; import the module that registers it"
    for use in (
        lambda: qfx.export.onnx(loaded, tmp_path / "model.onnx"),
        lambda: qfx.prepare_qat(loaded),
        lambda: quantize(cnn(), loaded.config, [x]),
    ):
        with pytest.raises(qfx.ConfigError, match=needed):
            use()
    replaced = loaded.config.replace(target="onnx")
    assert replaced.target is qfx.Target.ONNX
