"""An exported file is run once before it gets its name; its report says which runtimes did not run it, and why."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx_ir as ir
import pytest
import torch
from tiny import quantize, rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.errors import ExportError
from quark_fx.export.runtime import runners, trial
from quark_fx.export.to_onnx.edit import replace_node
from quark_fx.export.to_onnx.rules import onnx_rule
from quark_fx.graph.sample import made_up_sample, sample_of
from quark_fx.presets import INT8_STATIC
from quark_fx.system.memory import available
from quark_fx.vendors.intel.runner import OpenVinoRunner

AUTO = torch.export.Dim.AUTO


class Resized(nn.Module):
    """A resize between two convolutions."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        value: Tensor = self.last(nn.functional.interpolate(self.first(x).relu(), mode="bicubic", **self.options))
        return value


class ChannelsLast(nn.Module):
    """A resize of images whose channels come last, all in float."""

    def forward(self, x: Tensor) -> Tensor:
        resized = nn.functional.interpolate(x.permute(0, 3, 1, 2), size=(7, 13), mode="bicubic")
        return resized.permute(0, 2, 3, 1) * 1.5


IMAGES = [rand(3, 3, 11, 9)]


@onnx_rule("Einsum")
def let_transposes_pass(model: ir.Model, node: ir.Node) -> bool:
    """Remove what keeps ONNX Runtime from moving a transposition across a resize, so that the file fails."""
    value = node.inputs[0]
    assert value is not None
    replace_node(node, value)
    return True


@pytest.mark.parametrize("sizes", ["free", "fixed", "a free batch"])
def test_cubic_resizes_to_a_smaller_size_run_between_integer_convolutions(sizes: str, tmp_path: Path) -> None:
    free: Any = {"free": {"x": {0: AUTO, 2: AUTO, 3: AUTO}}, "fixed": {"x": None}, "a free batch": None}[sizes]
    cases: list[dict[str, Any]] = [{"size": (7, 13)}, {"size": (30, 30)}, {"scale_factor": 0.5, "align_corners": True}]
    for options in cases:
        model = seeded(Resized(**options))
        for preset, formats in (("int8_static", ("qdq", "qoperator", "vitis")), ("xint8", ("qoperator",))):
            qmodel = quantize(model, preset, IMAGES, dynamic_shapes=free)
            for format in formats:
                file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=format)
                assert qfx.verify(qmodel, file, IMAGES).max_steps <= 1, (options, preset, format)
                if (preset, format) == ("int8_static", "qdq"):
                    assert len(file.report().floating) == (
                        1 if options.get("size") == (30, 30) and sizes != "free" else 2
                    )


def test_a_cubic_resize_between_transpositions_runs_in_float_and_in_half(tmp_path: Path) -> None:
    for preset in ("int8_static", "fp16"):
        qmodel = quantize(ChannelsLast().eval(), preset, [rand(2, 11, 9, 3)])
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        assert qfx.verify(qmodel, file, [rand(2, 11, 9, 3)]).max_steps <= 1


@pytest.mark.parametrize("options", [{"size": (7, 13)}, {"scale_factor": 0.5}], ids=["as it runs", "as it loads"])
def test_a_file_that_fails_is_refused_with_the_users_line(options: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "model.onnx"
    for dynamic in (None, {"x": None}):  # ONNX Runtime looks at scales that it knows when it loads the file
        qmodel = quantize(seeded(Resized(**options)), "int8_static", IMAGES, dynamic_shapes=dynamic)
        with pytest.raises(ExportError, match=r"model\.onnx (fails|does not load) in ONNX Runtime") as raised:
            qfx.export.onnx(qmodel, place, rules=[let_transposes_pass])
        assert f"aten.upsample_bicubic2d.vec at %upsample_bicubic2d ({__file__}:" in str(raised.value)
        assert not list(tmp_path.iterdir())
    config = INT8_STATIC.replace(exclude=("last",))  # what the error advises
    qfx.export.onnx(quantize(seeded(Resized(**options)), config, IMAGES), place, rules=[let_transposes_pass])


def test_the_file_runs_once_on_the_first_samples_of_the_first_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    fed: list[Tensor] = []
    session = onnxruntime.InferenceSession

    def run(self: Any, names: Any, feeds: Any) -> Any:
        fed.extend(map(torch.from_numpy, feeds.values()))
        return original(self, names, feeds)

    original = session.run
    monkeypatch.setattr(session, "run", run)
    batches = [rand(8, 6, seed=1), rand(8, 6, seed=2)]
    qmodel = quantize(seeded(nn.Linear(6, 4)), "int8_static", batches)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert not file.not_run
    assert [torch.equal(value, batches[0][:2]) for value in fed] == [True]
    qmodel.save(tmp_path / "saved")
    loaded = qfx.load(tmp_path / "saved")
    assert loaded.sample is None  # a stored model holds no data
    assert not qfx.export.onnx(loaded, tmp_path / "model.onnx").not_run
    assert [tuple(value.shape) for value in fed] == [(2, 6), (8, 6)]


def test_a_sample_is_cut_only_where_all_inputs_share_a_free_batch_dimension() -> None:
    def shapes(model: nn.Module, *inputs: Tensor, **options: Any) -> list[tuple[int, ...]]:
        qmodel = quantize(model, "int8_static", [inputs], **options)
        gm = qmodel.graph_module
        assert [tuple(value.shape) for value in made_up_sample(gm)] == [tuple(value.shape) for value in inputs]
        return [tuple(value.shape) for value in sample_of(gm, qmodel.signature, inputs)]

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            total: Tensor = self.linear(x) + y
            return total

    model = Sum().eval()
    assert shapes(model, rand(8, 6), rand(8, 6)) == [(2, 6), (2, 6)]
    assert shapes(model, rand(8, 6), rand(8, 6), dynamic_shapes={"x": None, "y": None}) == [(8, 6), (8, 6)]
    assert shapes(model, rand(8, 6), rand(6), dynamic_shapes={"x": {0: AUTO}, "y": None}) == [(8, 6), (6,)]
    regrouped = nn.Sequential(nn.Linear(6, 6), nn.Unflatten(0, (-1, 4))).eval()
    assert shapes(regrouped, rand(8, 6)) == [(8, 6)]  # a batch is a multiple of 4
    assert shapes(model, rand(8, 5, 6), rand(5, 6)) in ([(8, 5, 6), (5, 6)], [(2, 5, 6), (5, 6)])


def test_a_loaded_model_that_takes_no_made_up_inputs_says_so(tmp_path: Path) -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 4)

        def forward(self, x: Tensor, parts: Tensor) -> Tensor:
            count: Tensor = self.linear(x) + torch.remainder(torch.full_like(parts, 12), parts)
            return count

    batch = (rand(4, 6), torch.tensor([2, 3, 4, 1]))
    qmodel = quantize(
        seeded(Divided()), "int8_static", [tuple(value[:, None] if value.dim() == 1 else value for value in batch)]
    )
    assert not qfx.export.onnx(qmodel, tmp_path / "model.onnx").not_run
    qmodel.save(tmp_path / "saved")
    file = qfx.export.onnx(qfx.load(tmp_path / "saved"), tmp_path / "model.onnx")
    assert "made-up inputs do not fit; run qfx.verify with a batch" in str(file.report())
    assert file.report().nodes


def test_the_report_says_why_a_file_was_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @onnx_rule("Relu")
    def make_custom(model: ir.Model, node: ir.Node) -> bool:
        node.domain = "my.kernels"
        return True

    def reasons(**options: Any) -> str:
        report = qfx.export.onnx(qmodel, tmp_path / "model.onnx", **options).report()
        assert report.bytes
        assert not report.nodes
        return "\n".join(map(str, report.not_run))

    message = "Opset 25 is under development. Current official support for domain ai.onnx is till opset 24."
    model = seeded(nn.Sequential(nn.Linear(6, 4), nn.ReLU()))
    qmodel = quantize(model, "int8_weight_only", [rand(4, 6)])
    assert "no operators of the domain my.kernels" in reasons(rules=[make_custom])
    for change, reason in (
        ((trial, "available", 1), "MiB of memory are free"),
        ((runners, "open_session", RuntimeError(message)), "does not read opset 25"),
    ):
        with patch.object(*change[:2], side_effect=[change[2]]):
            assert reason in reasons(opset=25), reason
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "onnxruntime", None)
        assert "not installed; pip install 'quark_fx" in reasons()
    config = INT8_STATIC.replace(target="openvino")
    qmodel = quantize(model, config, [rand(4, 6)])
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "openvino", None)
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert [str(one) for one in file.report().not_run] == [
        "not run in OpenVINO: it is not installed; pip install 'quark_fx[openvino]'"
    ]
    weight_only = qfx.presets.W4A16_GPTQ.replace(target="tensorrt", passes=())
    qmodel = quantize(seeded(nn.Linear(128, 4)), weight_only, [rand(4, 128)])
    assert "not run in tensorrt" in str(qfx.export.onnx(qmodel, tmp_path / "model.onnx").report())


def test_available_memory_is_no_more_than_a_limit_of_the_process() -> None:
    resource = pytest.importorskip("resource")
    free = available()
    assert free is not None
    assert free > 0
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = 1 << 28
    mapped = int(
        next(line for line in Path("/proc/self/status").read_text().splitlines() if "VmSize" in line).split()[1]
    )
    resource.setrlimit(resource.RLIMIT_AS, ((mapped << 10) + room, before[1]))
    try:
        assert 0 < (available() or 0) <= room + (1 << 24)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Several(nn.Sequential):
    """A sine behind other operators, and two outputs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value = (self[0](x) + 1.5).sin()
        return value.index_select(0, torch.tensor([0, 1])), value * 2


FIRST_LINE = Several.forward.__code__.co_firstlineno


@pytest.mark.parametrize("runtime", ["ONNX Runtime", "OpenVINO"])
@pytest.mark.parametrize("fault", ["unknown", "attribute", "shape"])
@pytest.mark.parametrize(("kind", "operator"), [("Sin", "sin"), ("Gather", "index_select"), ("Mul", "mul")])
def test_the_line_of_a_failing_node_is_named_and_no_other(
    kind: str, operator: str, fault: str, runtime: str, tmp_path: Path
) -> None:
    if runtime == "OpenVINO":
        pytest.importorskip("openvino")
    qmodel = quantize(seeded(Several(nn.Linear(8, 8))), INT8_STATIC, [rand(4, 8)])
    model = ir.load(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
    node = next(node for node in model.graph if node.op_type == kind)
    if fault == "attribute":
        node.attributes["axis"] = ir.AttrInt64("axis", 77)
    node.op_type = {"unknown": "Unknown", "shape": "Reshape"}.get(fault, kind)
    if fault == "shape":
        node.attributes.clear()
        model.graph.initializers["shape"] = shape = ir.Value(name="shape", const_value=ir.tensor([3, 7, 5]))
        node.resize_inputs(2)
        node.replace_input_with(1, shape)
    ir.save(model, path := tmp_path / "broken.onnx")
    run = partial(trial._in_runtime, OpenVinoRunner) if runtime == "OpenVINO" else trial._in_onnx_runtime
    if runtime == "OpenVINO" and fault == "attribute" and kind != "Gather":
        assert run(path, model, qmodel) is None  # it reads no attributes that an operator does not have
        return
    with pytest.raises(ExportError) as raised:
        run(path, model, qmodel)
    lines = [line for line in str(raised.value).splitlines() if line.startswith("  aten.")]
    number = FIRST_LINE + (1 if operator == "sin" else 2)
    assert [(line.split()[0].split(".")[1], line.rpartition(":")[2]) for line in lines] == [(operator, f"{number})")]
