"""Outputs and rearranged weights in the file are those of the graph, however the model spells them."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from tiny import quantize, rand
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.output_structures import require_right
from quark_fx.errors import ExportError
from quark_fx.export.to_onnx import rules
from quark_fx.export.to_onnx.edit import array_of
from quark_fx.export.to_onnx.export_onnx import CHOSEN_NAMES
from quark_fx.export.to_onnx.rules import onnx_rule


class Calls(nn.Module):
    """A linear, a parameter, and a buffer that a function combines."""

    def __init__(self, combine: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.combine = combine
        self.linear = nn.Linear(16, 16)
        self.weight = nn.Parameter(rand(*(shape or (4, 16))))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor) -> Any:
        return self.combine(self, x)


BATCHES = [rand(4, 16, seed=i) for i in range(2)]


def _twice(value: Tensor) -> dict[str, Tensor]:
    return {"a": value, "b": value}


OUTPUTS: dict[str, tuple[Callable[[Calls, Tensor], Any], list[str]]] = {
    "one value twice": (lambda m, x: _twice(m.linear(x)), ["a", "b"]),
    "one value twice in a tuple": (lambda m, x: (m.linear(x),) * 2, ["output_0", "output_1"]),
    "the input": (lambda m, x: (x, m.linear(x)), ["output_0", "output_1"]),
    "the input twice": (lambda m, x: {**_twice(x), "c": m.linear(x)}, ["a", "b", "c"]),
    "a parameter twice": (lambda m, x: {**_twice(m.weight), "c": m.linear(x)}, ["a", "b", "c"]),
    "a quantized weight": (lambda m, x: {"w": m.linear.weight, "y": m.linear(x)}, ["w", "y"]),
    "a buffer": (lambda m, x: (m.linear(x), m.table), ["output_0", "output_1"]),
    "a constant": (lambda m, x: (m.linear(x), torch.tensor(2.5)), ["output_0", "output_1"]),
    "no value": (lambda m, x: (m.linear(x), None), ["output_0"]),
    "views": (lambda m, x: (lambda y: {"a": y, "b": y.view(4, 16), "c": y.detach()})(m.linear(x)), ["a", "b", "c"]),
    "nested": (
        lambda m, x: (lambda y: {"a": {"b": y, "c": [y, y + 1]}, "d": (x, None)})(m.linear(x)),
        ["a.b", "a.c.0", "a.c.1", "d.0"],
    ),
}


@pytest.mark.parametrize("structure", OUTPUTS)
def test_a_file_has_the_outputs_of_the_model_under_their_names(structure: str, tmp_path: Path) -> None:
    combine, names = OUTPUTS[structure]
    session = qfx.Session(Calls(combine).eval(), BATCHES)
    for preset, formats in (("int8_static", ("qdq", "qoperator")), ("int8_weight_only", ("matmul_nbits",))):
        qmodel = quantize(session, preset)
        for format in formats:
            file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=format)
            assert [output.name for output in onnx.load(file).graph.output] == names
            verification = qfx.verify(qmodel, file, BATCHES)
            assert len(verification.differences) == len(names)
            assert verification.max_steps < 0.01  # float32 sums in another order


@pytest.mark.parametrize(
    ("structure", "one", "other"),
    [
        ("registered named tuple", "result", "input"),
        ("nested dict", "view of the result", "size"),
        ("list", "None", "constant"),
    ],
)
def test_a_structure_is_returned_and_its_tensors_are_the_outputs_of_the_file(
    structure: str, one: str, other: str
) -> None:
    """A sample of `python -m benchmarks.output_structures`."""
    require_right(structure, one, other)


def test_a_named_tuple_without_a_registration_is_refused_by_save(tmp_path: Path) -> None:
    pair = namedtuple("pair", ["one", "other"])
    qmodel = quantize(Calls(lambda m, x: pair(m.linear(x), x)).eval(), "int8_weight_only", BATCHES)
    with pytest.raises(qfx.QuarkError, match=r"cannot be stored.*_register_namedtuple\(.*pair, serialized_type_name="):
        qmodel.save(tmp_path / "model")


def test_names_that_were_chosen_at_export_are_compared(tmp_path: Path) -> None:
    qmodel = quantize(Calls(lambda m, x: (m.linear(x), x + 1)).eval(), "int8_weight_only", BATCHES)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", output_names=["first", "second"])
    assert [d.name for d in qfx.verify(qmodel, file, BATCHES).differences] == ["first", "second"]
    model = onnx.load(file)
    outputs = [*model.graph.output]
    del model.graph.output[:]
    model.graph.output.extend(reversed(outputs))
    onnx.save(model, file)
    with pytest.raises(ExportError, match="has the outputs second, first"):
        qfx.verify(qmodel, file, BATCHES)


def test_verify_refuses_a_name_that_two_outputs_share_and_names_that_nobody_chose(tmp_path: Path) -> None:
    def combine(m: Calls, x: Tensor) -> dict[str, Tensor]:
        return {"a": m.linear(x), "b": m.linear(x) + 1}

    qmodel = quantize(Calls(combine).eval(), "int8_weight_only", BATCHES)
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", output_names=["b", "a"])
    assert qfx.verify(qmodel, file, BATCHES).max_steps < 0.01
    model = onnx.load(file)
    chosen = next(p for p in model.metadata_props if p.key == CHOSEN_NAMES)
    for value, message in (("{", "damaged metadata"), ('["a", "b"]', "has the outputs b, a, but the model has a, b")):
        chosen.value = value
        onnx.save(model, file)
        with pytest.raises(ExportError, match=message):
            qfx.verify(qmodel, file, BATCHES)
    model.graph.output[0].CopyFrom(model.graph.output[1])
    onnx.save(model, file)
    with pytest.raises(ExportError, match=r"several outputs named|cannot be loaded"):
        qfx.verify(qmodel, file, BATCHES)


F = nn.functional
WEIGHTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "an order that moves nothing": (lambda w, x: x @ w.permute(0, 1), (16, 16)),
    "an axis exchanged with itself": (lambda w, x: F.linear(x, w.transpose(-1, -1)), (16, 16)),
    "negative axes": (lambda w, x: F.linear(x, w.transpose(0, -2)), (16, 16)),
    "twice": (lambda w, x: x @ w.t().t(), (16, 8)),
    "three times": (lambda w, x: x @ w.t().t().t(), (8, 16)),
    "a matrix": (lambda w, x: x @ w.mT, (8, 16)),
    "a stack": (lambda w, x: torch.bmm(x.expand(3, 4, 16), w.transpose(1, 2)), (3, 8, 16)),
    "a stack, all axes": (lambda w, x: torch.bmm(x.expand(16, 4, 16), w.permute(2, 0, 1)), (16, 16, 16)),
    "a kernel": (lambda w, x: F.conv2d(x.view(-1, 4, 4, 4), w.permute(1, 0, 2, 3)), (4, 6, 3, 3)),
    "a kernel, height and width": (lambda w, x: F.conv2d(x.view(-1, 4, 4, 4), w.transpose(2, 3)), (6, 4, 3, 2)),
    "a kernel as it is": (lambda w, x: F.conv2d(x.view(-1, 4, 4, 4), w.permute(0, 1, 2, 3)), (6, 4, 3, 3)),
}


@pytest.mark.parametrize("rearranged", WEIGHTS)
def test_a_weight_in_another_order_is_exported_in_that_order(rearranged: str, tmp_path: Path) -> None:
    use, shape = WEIGHTS[rearranged]
    matrix = len(shape) == 2
    formats = {
        "int8_static": ("qdq", "qoperator") if matrix else ("qdq",),
        "int8_dynamic": ("qdq",),
        "int4_weight_only": ("qdq", "matmul_nbits") if matrix else ("qdq",),
        "xint8": ("qdq", "vitis"),
    }
    session = qfx.Session(Calls(lambda m, x: use(m.weight, x), *shape).eval(), BATCHES)
    for preset, names in formats.items():
        qmodel = quantize(session, preset)
        for name in names:
            file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=name)
            assert qfx.verify(qmodel, file, BATCHES).max_steps < 1.001, (preset, name)  # ties may round either way


def test_codes_have_the_zero_points_of_their_kernels(tmp_path: Path) -> None:
    """One zero for all channels is spread for int8, and omitted in blocks, biases, and integer products."""

    def combine(m: Calls, x: Tensor) -> Tensor:
        y: Tensor = m.linear(x) @ m.weight.t()
        return y

    spread = {"int8_static": 2, "int8_weight_only": 2, "int4_weight_only": 0, "int8_dynamic": 0}
    batches = [[rand(*shape, seed=i) for i in range(2)] for shape in [(4, 16), (2, 4, 16)]]
    sessions = [qfx.Session(Calls(combine, 8, 16).eval(), data) for data in batches]
    for (preset, count), session in itertools.product(spread.items(), sessions):
        qmodel = quantize(session, preset)
        model = ir.load(qfx.export.onnx(qmodel, tmp_path / "model.onnx"))
        constants = set(model.graph.initializers.values())
        stored = [n for n in model.graph if n.op_type == "DequantizeLinear" and n.inputs[0] in constants]
        points = [array_of(n.inputs[2]) for n in stored if len(n.inputs) > 2]
        assert [point.shape for point in points if point is not None] == [(16,), (8,)][:count]
        assert not any(n.op_type == "Transpose" for n in model.graph)
        products = [n for n in model.graph if n.op_type in ("Gemm", "MatMul", "MatMulInteger")]
        assert len(products) == 2
        assert all(len(n.inputs) == 3 for n in products if n.op_type == "MatMulInteger")


PRODUCTS: dict[str, Callable[[Calls, Tensor], Tensor]] = {
    "linear": lambda m, x: m.linear(x),
    "two linears": lambda m, x: m.linear(m.linear(x).relu()),
    "a product and a sum": lambda m, x: 1 + x @ m.weight,
    "addmm": lambda m, x: torch.addmm(m.linear.bias, x.view(-1, 16), m.weight),
}


@pytest.mark.parametrize("shape", [(16,), (3, 16), (2, 3, 4, 16)], ids=len)
def test_signed_codes_of_every_rank_are_multiplied(shape: tuple[int, ...], tmp_path: Path) -> None:
    int8 = qfx.TensorSpec(format=qfx.formats.INT8)
    static = qfx.presets.INT8_STATIC.replace(input=int8, output=int8)
    signed = {"pow2": "xint8", "float scales": static, "bias in float": static.replace(bias=None)}
    batches = [rand(*shape, seed=i) for i in range(2)]
    for product, function in PRODUCTS.items():
        session = qfx.Session(Calls(function, 16, 16).eval(), batches, dynamic_shapes={"x": None})
        for name, config in signed.items():
            qmodel = quantize(session, config)
            for format in ("qdq", "vitis") if name == "bias in float" else ("qdq", "qoperator", "vitis"):
                file = qfx.export.onnx(qmodel, tmp_path / "model.onnx", format=format)
                assert qfx.verify(qmodel, file, batches).max_steps < 1.001, (product, name, format)


def test_every_format_reads_the_order_of_a_transposition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no earlier rule removed or stored it: one weight is read as it is and in another order."""
    earlier = [rule for rule in rules.TRANSLATED if rule.name not in ("drop_idle_transpose", "transpose_weight")]
    assert len(earlier) == len(rules.TRANSLATED) - 2
    monkeypatch.setattr(rules, "TRANSLATED", tuple(earlier))
    for order in ((0, 1), (1, 0)):
        one_scale = qfx.presets.INT8_STATIC.replace(weight=qfx.TensorSpec(format=qfx.formats.INT8))
        cases: list[tuple[Any, str, Callable[[Calls, Tensor], Tensor]]] = [
            (one_scale, "qoperator", lambda m, x: (x @ m.weight).relu()),
            ("int4_weight_only", "matmul_nbits", lambda m, x: m.linear(x).relu()),
        ]
        for preset, format, function in cases[: 2 if order == (0, 1) else 1]:  # scales then vary along the columns

            @onnx_rule("MatMul", "Gemm")
            def permute(model: ir.Model, node: ir.Node, order: tuple[int, ...] = order) -> bool:
                step = ir.node("Transpose", [node.inputs[1]], {"perm": list(order)})
                step.outputs[0].shape, step.outputs[0].type = node.inputs[1].shape, node.inputs[1].type
                model.graph.insert_before(node, [step])
                node.replace_input_with(1, step.outputs[0])
                return True

            monkeypatch.setattr(rules, "TRANSLATED", (*earlier, permute))
            given = quantize(Calls(function, 16, 16).eval(), preset, BATCHES)
            file = qfx.export.onnx(given, tmp_path / "model.onnx", format=format)
            steps = qfx.verify(given, file, BATCHES).max_steps
            assert steps < 1.001 if order == (0, 1) else steps > 20, (order, format)


MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda y: F.rrelu(y, 0.1, 0.3),
    "rrelu by default": F.rrelu,
    "cumprod": lambda y: y.cumprod(-1),
    "cumprod of channels": lambda y: y.cumprod(1),
    "cumprod of numbers": lambda y: (y > 0).cumprod(2) + y,
    "adaptive maxima": lambda y: F.adaptive_max_pool2d(y, (4, 3)),
    "adaptive maxima of some": lambda y: F.adaptive_max_pool2d(y, (None, 3)),  # type: ignore[arg-type]
    "adaptive maxima of a sequence": lambda y: F.adaptive_max_pool1d(y.flatten(2), 5),
    "adaptive maxima of a volume": lambda y: F.adaptive_max_pool3d(y.unsqueeze(2), (1, 3, 4)),
}


def test_operators_without_a_lowering_of_torch_are_spelled_in_others(tmp_path: Path) -> None:
    class Made(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.convolution, self.function = nn.Conv2d(3, 4, 1), function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(self.convolution(x))

    batches = [rand(2, 3, 7, 8)]
    for name, function in MADE.items():
        qmodel = quantize(Made(function).eval(), "int8_weight_only", batches)
        file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
        assert qfx.verify(qmodel, file, batches).max_steps < 0.01, name
    free: Any = {"x": {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}}
    qmodel = quantize(
        Made(lambda y: F.adaptive_max_pool2d(y, 1)).eval(), "int8_weight_only", batches, dynamic_shapes=free
    )
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    assert qfx.verify(qmodel, file, [rand(2, 3, 5, 9)]).max_steps < 0.01


class Decoder(nn.Module):
    """A layer as in the decoders of RT-DETR: attention, a projection of corners, norms, and heads."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)
        self.wide, self.narrow, self.boxes, self.scores = (
            nn.Linear(*sizes) for sizes in ((16, 32), (32, 16), (16, 4), (16, 3))
        )
        self.norm = nn.LayerNorm(16)
        self.places, self.shift = nn.Parameter(rand(4, 16, seed=1)), nn.Parameter(rand(16, seed=2))

    def forward(self, x: Tensor, corners: Tensor) -> tuple[Tensor, Tensor]:
        where = (corners @ self.places + self.shift).sigmoid()
        query = x + where
        y = self.norm(x + self.attend(query, query, x, need_weights=False)[0])
        y = self.norm(y + self.narrow(self.wide(y).relu()))
        return self.boxes(y).sigmoid(), self.scores(y)


@pytest.mark.parametrize("bias", [qfx.presets.INT8_STATIC.bias, None], ids=["bias", "float bias"])
@pytest.mark.parametrize("lead", [(2, 3), (5,)], ids=len)
def test_every_product_of_a_weight_in_codes_runs_in_integers(
    lead: tuple[int, ...], bias: qfx.TensorSpec | None, tmp_path: Path
) -> None:
    batches = [(rand(*lead, 16, seed=i), rand(*lead, 4, seed=9 + i)) for i in range(2)]
    config = qfx.presets.INT8_STATIC.replace(bias=bias)
    qmodel = quantize(Decoder().eval(), config, batches, dynamic_shapes={"x": None, "corners": None})
    file = qfx.export.onnx(qmodel, tmp_path / "model.onnx")
    stored = {tensor.name for tensor in onnx.load(file).graph.initializer}
    products = [node for node in onnx.load(file).graph.node if node.op_type in ("MatMul", "Gemm")]
    assert products
    assert not [node.input[1] for node in products if node.input[1] in stored]
    floats = [node.kernel for node in file.report().floating]
    assert {"Gemm", "FusedGemm"}.isdisjoint(floats)
    assert floats.count("MatMul") + floats.count("FusedMatMul") == 2  # of queries and keys, and with values
    assert qfx.verify(qmodel, file, batches).verdict == "correct"
