"""Programs in PT2E's operators: what they compute, how they are called, and what ExecuTorch makes of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Residual, cnn, images, mlp, quantize, rand, seeded, thinned, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, Symmetry, Target, TensorSpec
from quark_fx.errors import ConfigError, ExportError
from quark_fx.export.program import to_exported_program
from quark_fx.graph.nodes import DEQUANTIZE, QUANTIZE, target_name
from quark_fx.numbers.formats import INT4, INT8, INT16, UINT8, UINT16
from quark_fx.presets import FP8_STATIC, INT8_DYNAMIC, INT8_STATIC, MXFP4

ONE_CODE = 1 / 255
"""Of the range: PT2E measures the zero points of tokens by another rule, so codes may differ by one."""

needs_executorch = pytest.mark.skipif(
    importlib.util.find_spec("executorch") is None, reason="ExecuTorch is not installed"
)


def weight(**changes: Any) -> QuantConfig:
    return QuantConfig(weight=TensorSpec(**changes))


CONFIGS: dict[str, QuantConfig] = {
    "static": INT8_STATIC,
    "static in 16 bits": INT8_STATIC.replace(input=TensorSpec(format=UINT16), output=None, bias=None),
    "signed": INT8_STATIC.replace(input=TensorSpec(format=INT8), output=TensorSpec(format=INT8)),
    "dynamic": INT8_DYNAMIC,
    "token": INT8_DYNAMIC.replace(
        input=TensorSpec(format=UINT8, granularity=Granularity.TOKEN, dynamic=True), exclude=("op:conv",)
    ),
    "a scale for a weight": weight(format=INT8),
    "a zero point for a channel": weight(format=INT4, granularity=Granularity.CHANNEL, symmetry=Symmetry.ASYMMETRIC),
    "groups": weight(format=INT4, granularity=Granularity.GROUP, group_size=8),
    "groups with zero points": weight(
        format=INT4, granularity=Granularity.GROUP, group_size=8, symmetry=Symmetry.ASYMMETRIC
    ),
    "16-bit weights": weight(format=INT16, granularity=Granularity.CHANNEL),
}


def names(program: torch.export.ExportedProgram) -> set[str]:
    return {target_name(node) for node in program.graph.nodes}


# A CNN has convolutions and linears; tokens and groups are for linears alone.
@pytest.mark.parametrize(
    ("kind", "name"),
    thinned(("cnn", "mlp"), CONFIGS, lambda kind, name: kind == "cnn" or name in ("dynamic", "token", "groups")),
)
def test_a_program_computes_what_the_model_does(kind: str, name: str, tmp_path: Path) -> None:
    model, data = {"cnn": (cnn(), images()), "mlp": (mlp(), tokens())}[kind]
    qmodel = quantize(model, CONFIGS[name], data)
    program = qfx.export.pt2e(qmodel)
    assert not {QUANTIZE, DEQUANTIZE} & names(program)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    wide = torch.cat([data[0]] * 3)  # the batch size varies
    for made, batch in ((program, wide), (loaded, wide), (program.run_decompositions(), data[0])):
        want, found = qmodel(batch), made.module()(batch)
        apart = ONE_CODE * float(want.abs().max()) if name == "token" else 1e-5
        torch.testing.assert_close(found, want, rtol=1e-5, atol=apart)


def test_weights_are_stored_in_codes() -> None:
    program = qfx.export.pt2e(quantize(mlp(), CONFIGS["groups"], tokens()))
    stored = sum(tensor.nbytes for tensor in program.state_dict.values() if tensor.dtype == torch.int8)
    assert sum(parameter.numel() for parameter in mlp().parameters() if parameter.dim() > 1) == stored


class Tied(nn.Module):
    """A table that is also the head, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(11, 16), nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(torch.relu(self.layer(self.table(ids))))
        logits: Tensor = x @ self.table.weight.t()
        return logits


@pytest.mark.parametrize("name", ["a scale for a weight", "a zero point for a channel", "groups"])
def test_weights_that_several_operators_read_are_stored_once(name: str) -> None:
    ids = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(0))
    qmodel = quantize(seeded(Tied()), CONFIGS[name], [ids])
    program = qfx.export.pt2e(qmodel)
    torch.testing.assert_close(program.module()(ids), qmodel(ids), rtol=1e-5, atol=1e-5)
    assert sum(t.numel() for t in program.state_dict.values() if t.dtype == torch.int8) == (11 + 16) * 16


class Shapes(nn.Module):
    """Groups of a transposed matrix, of a stack of matrices and of a convolution, and a table of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.into = nn.Parameter(torch.randn(16, 24) / 4)
        self.stack = nn.Parameter(torch.randn(3, 24, 8) / 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.conv(self.table(ids).transpose(1, 2)).transpose(1, 2)
        out: Tensor = torch.bmm((x @ self.into).transpose(0, 1), self.stack)
        return out


@pytest.mark.parametrize("name", ["a scale for a weight", "a zero point for a channel", "groups"])
def test_weights_of_every_shape(name: str) -> None:
    ids = torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(0))
    qmodel = quantize(seeded(Shapes()), CONFIGS[name], [ids])
    program = qfx.export.pt2e(qmodel)
    torch.testing.assert_close(program.module()(ids), qmodel(ids), rtol=1e-5, atol=1e-5)
    assert sum(t.dtype == torch.int8 for t in program.state_dict.values()) >= 4


def test_activations_have_signed_codes_and_a_pair_for_each_reader() -> None:
    program = qfx.export.pt2e(quantize(seeded(Residual(3)), INT8_STATIC, images()))
    pairs = [node for node in program.graph.nodes if "quantize_per_tensor" in target_name(node)]
    assert {node.args[-1] for node in pairs} == {torch.int8}
    assert {node.args[3:5] for node in pairs} == {(-128, 127)}
    assert all(len(node.users) == 1 for node in pairs if "dequantize" in target_name(node))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor | None = None, mask: Tensor | None = None) -> dict[str, Any]:
        y = self.linear(x)
        y = y if scale is None else y * scale
        return {"y": y if mask is None else y * mask, "none": None}


def test_inputs_are_given_by_position_unless_parameters_are_left_out() -> None:
    x, scale, mask = rand(4, 8), rand(4, 1), rand(4, 8)
    for batch in ((x, scale), {"x": x, "scale": scale, "mask": mask}):
        qmodel = quantize(seeded(Named()), INT8_STATIC, [batch])
        given = batch.values() if isinstance(batch, dict) else batch
        want = qmodel(**batch) if isinstance(batch, dict) else qmodel(*batch)
        found = qfx.export.pt2e(qmodel).module()(*given)
        assert torch.equal(found["y"], want["y"])
        assert found["none"] is None
    inputs = {"x": x, "mask": mask}
    qmodel = quantize(seeded(Named()), INT8_STATIC, [inputs])
    assert torch.equal(qfx.export.pt2e(qmodel).module()(**inputs)["y"], qmodel(**inputs)["y"])


def test_the_model_is_left_alone_and_the_program_is_a_snapshot() -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    before = qmodel(images()[0])
    module = qfx.export.pt2e(qmodel).module()
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.zero_()
    assert torch.equal(qmodel(images()[0]), before)
    assert QUANTIZE in {target_name(node) for node in qmodel.graph_module.graph.nodes}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (FP8_STATIC, "codes in fp8_e4m3: quark_fx.quantize.default at .*seeded_models.py"),
        (MXFP4, "symmetric fp4_e2m1 measured at run time"),
        (weight(format=INT4, granularity=Granularity.GROUP, group_size=7), "groups of 7 that do not divide"),
    ],
)
def test_what_pt2e_cannot_say_is_listed(config: QuantConfig, what: str) -> None:
    with pytest.raises(
        ExportError, match=rf"PT2E has no operators for these roundings:\n(.*\n)*.*{what}(.*\n)*.*Use integers"
    ):
        qfx.export.pt2e(quantize(mlp(), config, tokens()))
    with pytest.raises(ExportError, match=r"an activation in torch.float64"):
        qfx.export.pt2e(quantize(cnn().double(), INT8_STATIC, [batch.double() for batch in images()]))
    with pytest.raises(ExportError, match="expected the result of quantize"):
        qfx.export.pt2e(mlp())  # type: ignore[arg-type]


def test_the_target_rounds_what_operators_make_and_refuses_what_has_no_kernel() -> None:
    config = INT8_STATIC.replace(target="executorch")
    graph = quantize(mlp(), config, tokens()).graph_module.graph
    linears = [node for node in graph.nodes if target_name(node) == "aten.linear.default"]
    assert linears
    assert all(_reaches_a_quantizer(node) for node in linears)
    with pytest.raises(ConfigError, match=r"XNNPACK's kernels support int8 and int4 weights .*not symmetric int16"):
        config.replace(weight=TensorSpec(format=INT16))
    with pytest.raises(ConfigError, match="with zero points; set symmetry='asymmetric'"):
        QuantConfig(
            weight=TensorSpec(format=INT8), input=TensorSpec(format=INT8, dynamic=True), target=Target.EXECUTORCH
        )


def _reaches_a_quantizer(node: torch.fx.Node) -> bool:
    (reader,) = node.users
    return target_name(reader) == QUANTIZE or _reaches_a_quantizer(reader)


@needs_executorch
@pytest.mark.parametrize("kind", ["cnn", "mlp"])
def test_executorch_computes_the_same_in_integers(kind: str) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.runtime import Runtime

    model, data = {"cnn": (cnn(), images()), "mlp": (mlp(), tokens())}[kind]
    shapes = {"x": {0: torch.export.Dim("batch", max=16)}} if kind == "cnn" else None
    qmodel = quantize(model, INT8_STATIC.replace(target="executorch"), data, dynamic_shapes=shapes)
    edge = to_edge_transform_and_lower(qfx.export.pt2e(qmodel), partitioner=[XnnpackPartitioner()])
    program = edge.to_executorch()
    left = {str(node.target) for node in program.exported_program().graph.nodes if node.op == "call_function"}
    assert not any("quantized_decomposed" in name or "conv" in name or "linear" in name for name in left)
    method = Runtime.get().load_program(program.buffer).load_method("forward")
    step = max(float(t.max()) for name, t in qmodel.graph_module.named_buffers() if name.endswith("scale"))
    larger = [torch.cat([data[0]] * 3)] if kind == "cnn" else []  # without a largest size, that of the example is it
    for batch in (data[0], data[0][:2], *larger):
        (found,) = method.execute((batch,))
        assert float((found - qmodel(batch)).abs().max()) <= step


def test_a_program_knows_the_range_of_each_size_that_varies() -> None:
    program = to_exported_program(quantize(mlp(), INT8_STATIC, tokens()).graph_module)
    places = [node for node in program.graph.nodes if node.op == "placeholder"]
    sizes = [size for node in places for size in node.meta["val"].shape if isinstance(size, torch.SymInt)]
    symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols}
    assert symbols
    assert symbols == program.range_constraints.keys()
