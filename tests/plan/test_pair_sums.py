"""Codes that are exact where products are added in pairs in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from devices import on_devices
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from processors import needs_emulator, run_here, run_without_vnni
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.errors import ConfigError
from quark_fx.export.runtime.session import adds_pairs_in_16_bits
from quark_fx.numbers.formats import INT8, UINT8
from quark_fx.observers import Adjusted, MinMax, Percentile
from quark_fx.passes import GPTQ, AdaRound, AutoRound, FitScales
from quark_fx.plan.pair_sums import PairBound

STATIC = qfx.presets.INT8_STATIC
BOUND = PairBound(128, (0, 1), 1)


def sums_of_pairs(codes: Tensor) -> list[int]:
    """Return the products of each pair with activations of 255, added up, one after the other."""
    return [
        255 * (int(a) * (int(a) * s > 0) + int(b) * (int(b) * s > 0))
        for row in codes.tolist()
        for a, b in itertools.zip_longest(row[::2], row[1::2], fillvalue=0)
        for s in (1, -1)  # activations of 0 take products of the other sign away
    ]


rows = st.integers(1, 9).flatmap(
    lambda n: st.lists(st.lists(st.integers(-128, 127), min_size=n, max_size=n), min_size=1)
)


@given(rows)
def test_a_pair_is_exceeded_where_its_sum_leaves_16_bits(values: list[list[int]]) -> None:
    codes = torch.tensor(values, dtype=torch.int8)
    worst = np.array(sums_of_pairs(codes)).reshape(len(values), -1, 2)
    saturates = ((worst > 2**15 - 1) | (worst < -(2**15))).any(-1)
    assert BOUND.exceeded(codes).tolist() == saturates.tolist()


@given(rows)
def test_limited_codes_stay_in_16_bits_and_others_as_they_are(values: list[list[int]]) -> None:
    codes = torch.tensor(values, dtype=torch.int8)
    limited = BOUND.limited(codes)
    assert not BOUND.exceeded(limited).any()
    over = BOUND.exceeded(codes).repeat_interleave(2, 1)[:, : codes.shape[1]]
    assert torch.equal(limited[~over], codes[~over])
    assert limited.dtype == torch.int8
    assert torch.equal(limited, BOUND.lowered(codes))


@given(st.floats(-128, 127), st.floats(-128, 127))
def test_a_limited_pair_is_the_nearest_one(first: float, second: float) -> None:
    position = torch.tensor([[first, second]])
    codes = position.round().to(torch.int8)
    a, b = BOUND.limited(codes, position)[0].tolist()
    sides = [range(min(0, int(codes.min())), max(0, int(codes.max())) + 1)] * 2
    allowed = [p for p in itertools.product(*sides) if p[0] * p[1] <= 0 or abs(sum(p)) <= 128]
    nearest = min((p[0] - first) ** 2 + (p[1] - second) ** 2 for p in allowed)
    assert (a - first) ** 2 + (b - second) ** 2 == pytest.approx(nearest, abs=1e-3)


@pytest.mark.parametrize("shape", [(6, 4, 3, 3), (4, 3, 5), (2, 5, 2, 2, 2)])
def test_a_convolution_is_laid_out_by_kernel_position_then_channel(shape: tuple[int, ...]) -> None:
    weight = torch.arange(torch.Size(shape).numel()).reshape(shape)
    bound = PairBound(128, (0, *range(2, len(shape)), 1), len(shape) - 1)
    laid = bound.rows(weight)
    expected = [
        [int(weight[(o, c, *k)]) for k in itertools.product(*map(range, shape[2:])) for c in range(shape[1])]
        for o in range(shape[0])
    ]
    assert laid.tolist() == expected
    assert torch.equal(bound.restore(laid, weight), weight)


@on_devices
@given(seed=st.integers(0, 99), heavy=st.booleans())
def test_widening_has_the_smallest_expected_error(device: torch.device, seed: int, heavy: bool) -> None:
    position = tiny.rand(3, 64, seed=seed)
    position = (position.sign() * position.abs().sqrt() if heavy else position).to(device)
    position = position / position.abs().amax(1, keepdim=True) * 127
    first, second = position[:, ::2], position[:, 1::2]
    sums = torch.where(first * second > 0, (first + second).abs(), 0.0).double()

    def expected(ratio: Tensor) -> Tensor:
        return 64 * ratio**2 / 12 + (sums - 128 * ratio[..., None]).clamp(min=0).square().sum(-1) / 2

    found = BOUND.widening(position)
    assert (found >= 1).all()
    others = torch.linspace(1, 2, 101, dtype=torch.float64, device=device)
    assert (expected(found) <= expected(others[:, None].expand(-1, 3)) * (1 + 1e-6)).all()
    doubled = BOUND.widening(position, doubled=True)
    for power in (1.0, 2.0):
        assert (expected(doubled) <= expected(torch.full_like(doubled, power)) * (1 + 1e-6)).all()
    assert set(doubled.tolist()) <= {1.0, 2.0}


class Mixed(nn.Module):
    """One operator of every way to lay a weight out, with uniform weights, of which every eighth pair saturates."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.depthwise = nn.Conv2d(16, 16, 3, groups=16)
        self.doubled = nn.Conv2d(16, 32, 3, groups=16)
        self.grouped = nn.Conv2d(32, 20, 1, groups=4)
        self.head = nn.Linear(20, 10)
        self.matrix = nn.Parameter(torch.rand(10, 7) - 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = torch.relu(self.doubled(torch.relu(self.depthwise(x))))
        logits: Tensor = torch.relu(self.head(self.grouped(x).mean((2, 3)))) @ self.matrix
        return logits


def mixed() -> Mixed:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Mixed().eval()


def exact_nodes(file: Any) -> dict[str, bool]:
    return {node.name: not node.saturates for node in file.report().nodes if node.quantized}


CONFIGS: dict[str, tuple[QuantConfig, dict[str, Any]]] = {
    "static": (STATIC, {}),
    "static, integer operators": (STATIC, {"format": "qoperator"}),
    "static, per tensor": (STATIC.replace(weight=TensorSpec(format=INT8)), {}),
    "signed activations": (STATIC.replace(input=TensorSpec(format=INT8), output=TensorSpec(format=INT8)), {}),
    "zero points": (STATIC.replace(weight=STATIC.weight.replace(symmetry="asymmetric")), {}),  # type: ignore[union-attr]
    "dynamic": (qfx.presets.INT8_DYNAMIC, {}),
    "dynamic, integer operators": (qfx.presets.INT8_DYNAMIC, {"format": "qoperator"}),
    "reduced range": (
        STATIC.replace(
            weight=TensorSpec(format=INT8, granularity=Granularity.CHANNEL, reduce_range=True), target="onnx_vnni"
        ),
        {},
    ),
    "unsigned weights": (STATIC.replace(weight=TensorSpec(format=UINT8, granularity=Granularity.CHANNEL)), {}),
}
FREE = {name: CONFIGS[name] for name in ("static", "static, integer operators", "dynamic")}
DATA = tiny.images(4, 4)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of every configuration, and of some whose codes are free, by name."""
    folder, found = tmp_path_factory.mktemp("files"), {}
    for name, (config, options) in CONFIGS.items():
        qmodel = tiny.quantize(mixed(), config, DATA)
        found[name] = qmodel, qfx.export.onnx(qmodel, folder / f"{name}.onnx", **options)
    for name, (config, options) in FREE.items():
        qmodel = tiny.quantize(mixed(), config.replace(target=Target.ONNX_VNNI), DATA)
        found[f"{name}, free"] = qmodel, qfx.export.onnx(qmodel, folder / f"{name}, free.onnx", **options)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_default_is_exact_on_every_processor(files: dict[str, Any], name: str) -> None:
    _, file = files[name]
    exact = exact_nodes(file)
    assert exact
    assert all(exact.values()), str(file.report())


@pytest.mark.parametrize("name", FREE)
def test_the_report_names_what_saturates_from_the_codes_alone(files: dict[str, Any], name: str) -> None:
    _, file = files[f"{name}, free"]
    report = file.report()
    assert report.saturating
    assert not any("depthwise" in node.name for node in report.saturating)
    assert "of weights exceed 128" in str(report)


@needs_emulator
def test_files_compute_the_same_without_vnni(files: dict[str, Any], tmp_path: Path) -> None:
    feeds = {"x": DATA[0].numpy()}
    emulated = run_without_vnni({Path(file): feeds for _, file in files.values()}, tmp_path)
    for name, (qmodel, file) in files.items():
        (theirs,) = emulated[Path(file)]
        ours = qmodel(DATA[0])
        gap, step = (torch.from_numpy(theirs) - ours).abs().max(), (ours.max() - ours.min()) / 255
        if name.endswith("free"):
            assert gap > 2 * step, f"{name}: this file shows nothing"
        else:
            # Sums are exact; what is left is the order of float32 products behind them.
            assert gap < step / 100, name


@needs_emulator
def test_kernels_pair_neighbors_in_the_order_that_is_assumed(tmp_path: Path) -> None:
    work, expected = {}, {}
    for name, node, weight, feeds in kernels():
        file = tmp_path / f"{name}.onnx"
        onnx.save(node, file)
        work[file], expected[file] = feeds, weight
    (tmp_path / "arrays").mkdir()
    emulated = run_without_vnni(work, tmp_path / "arrays")
    for file, paired in expected.items():
        here, there = run_here(file, work[file])[0], emulated[file][0]
        saturated = (here.astype(np.int64) != there.astype(np.int64)).reshape(-1).tolist()
        if adds_pairs_in_16_bits():
            saturated = paired if np.array_equal(here, there) else saturated
        assert saturated == paired, file.stem


def kernels() -> Iterator[tuple[str, onnx.ModelProto, list[bool], dict[str, Any]]]:
    """Yield kernels that multiply activations of 255 by weights with two values of 127, and which outputs saturate."""
    places = list(itertools.combinations(range(8), 2))
    matrix = np.zeros((len(places), 8), np.int8)
    for row, place in enumerate(places):
        matrix[row, place] = 127
    neighbors = [b == a + 1 and a % 2 == 0 for a, b in places]
    nothing = [False] * len(places)
    one, point = np.float32(1), np.zeros((), np.uint8)
    for rows in (1, 5):  # a row of its own has another kernel
        a = np.full((rows, 8), 255, np.uint8)
        first = [p for p in neighbors for _ in "x"] * rows
        for signed in (True, False):
            w = matrix.T.copy() if signed else matrix.T.astype(np.uint8)
            over = first if signed else nothing * rows
            feeds = {"a": a}
            constants: dict[str, Any] = {"w": w}
            yield (
                f"MatMulInteger{rows}{signed}",
                model("MatMulInteger", "aw", a, constants, TensorProto.INT32),
                over,
                feeds,
            )
            constants |= {"s": one, "z": point, "t": one, "v": np.zeros((), w.dtype)}
            yield (
                f"MatMulIntegerToFloat{rows}{signed}",
                model("MatMulIntegerToFloat", "awstzv", a, constants, TensorProto.FLOAT, domain="com.microsoft"),
                over,
                feeds,
            )
    for kernel, channels in (((2, 1), 4), ((2, 2, 1), 2), ((2,), 4)):
        spatial = [k + 1 for k in kernel]
        taps = 8 // channels
        w = matrix.reshape(-1, taps, channels).transpose(0, 2, 1).reshape(-1, channels, *kernel).copy()
        x = np.full((1, channels, *spatial), 255, np.uint8)
        constants = {"w": w, "s": one, "z": point, "v": np.zeros((), np.int8), "y": np.float32(300)}
        conv = model("QLinearConv", "aszwsvyz", x, constants, TensorProto.UINT8)
        positions = int(np.prod([s - k + 1 for s, k in zip(spatial, kernel, strict=True)]))
        yield f"QLinearConv{len(kernel)}", conv, [p for p in neighbors for _ in range(positions)], {"a": x}
    x = np.full((1, 16, 3, 3), 255, np.uint8)
    constants = {
        "w": np.full((16, 1, 3, 3), 127, np.int8),
        "s": one,
        "z": point,
        "v": np.zeros((), np.int8),
        "y": np.float32(2000),
    }
    depthwise = model("QLinearConv", "aszwsvyz", x, constants, TensorProto.UINT8, group=16)
    yield "depthwise", depthwise, [False] * 16, {"a": x}


def model(
    kind: str, inputs: str, a: Any, constants: dict[str, Any], output: int, domain: str = "", **attributes: Any
) -> onnx.ModelProto:
    graph = helper.make_graph(
        [helper.make_node(kind, list(inputs), ["out"], domain=domain, **attributes)],
        "kernel",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, a.shape)],
        [helper.make_tensor_value_info("out", output, None)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "signed activations"])
def test_files_load_and_compute_the_same_with_precise_products(files: dict[str, Any], name: str) -> None:
    qmodel, file = files[name]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.x64quantprecision", "1")
    assert qfx.verify(qmodel, file, DATA, session_options=options).max_steps < 0.01


def test_verify_names_the_processor_where_it_saturates(files: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    qmodel, _ = files["static"]
    _, saturating = files["static, free"]  # codes of another model, which differ by several steps anywhere
    where = "quark_fx.export.runtime.verification.adds_pairs_in_16_bits"
    monkeypatch.setattr(where, lambda: False)
    found = qfx.verify(qmodel, saturating, [DATA[0] * 9])
    assert found.max_steps > 1
    assert not found.cause
    monkeypatch.setattr(where, lambda: True)
    found = qfx.verify(qmodel, saturating, [DATA[0] * 9])
    assert "adds pairs of 8-bit products in 16 bits" in found.cause
    assert found.cause in str(found)
    exact = qfx.verify(qmodel, files["static"][1], [DATA[0]])
    assert not exact.cause


@pytest.mark.parametrize("name", ["static", "static, free"])
def test_verify_names_the_processor_for_the_vendors_nodes_too(
    files: dict[str, Any], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = qfx.export.onnx(files[name][0], tmp_path / "model.onnx", format="vitis")
    other, _ = files["zero points"]  # codes of another model, which differ by several steps anywhere
    monkeypatch.setattr("quark_fx.export.runtime.verification.adds_pairs_in_16_bits", lambda: True)
    found = qfx.verify(other, file, [DATA[0] * 9])
    assert found.max_steps > 1
    assert ("adds pairs of 8-bit products in 16 bits" in found.cause) == (name == "static, free")


SOLVERS: list[Any] = [
    GPTQ(),
    FitScales(),
    AdaRound(iterations=3),
    AutoRound(iterations=3),
]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda p: type(p).__name__)
def test_what_learns_codes_keeps_the_bound(solver: Any, tmp_path: Path) -> None:
    config = STATIC.replace(passes=(*STATIC.passes, solver), output=None, bias=None)
    qmodel = tiny.quantize(mixed(), config, DATA)
    report = qfx.export.onnx(qmodel, tmp_path / "model.onnx").report()
    assert any(node.kernel == "MatMulIntegerToFloat" for node in report.nodes)
    assert not report.saturating


def test_a_tied_weight_fits_every_operator_that_reads_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 32)
            nn.init.uniform_(self.table.weight)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.table(ids) @ self.table.weight.T
            return logits

    qmodel = tiny.quantize(Tied().eval(), STATIC, [torch.arange(12).reshape(3, 4)])
    codes = [t for name, t in qmodel.graph_module.state_dict().items() if name.endswith("codes")]
    assert len(codes) == 1
    assert not BOUND.exceeded(codes[0]).any()


def test_readers_of_a_weight_in_two_orders_have_codes_of_their_own(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(32, 32, generator=torch.Generator().manual_seed(3)) + 0.1)

        def forward(self, x: Tensor) -> Tensor:
            product: Tensor = torch.relu(nn.functional.linear(x, self.weight)) @ self.weight
            return product

    qmodel = tiny.quantize(Twice().eval(), STATIC, [tiny.rand(8, 32)])
    assert not qfx.export.onnx(qmodel, tmp_path / "model.onnx").report().saturating


@pytest.mark.parametrize("observer", [Percentile(percentile=99.5), Adjusted(observer=MinMax(), ratio=0.05)])
def test_values_that_an_observer_clips_do_not_widen_scales(observer: Any) -> None:
    model = tiny.seeded(nn.Linear(512, 8))
    with torch.no_grad():
        model.weight[:, :2] = 50 * model.weight.abs().max()

    def scale(target: str) -> Tensor:
        assert STATIC.weight is not None
        config = STATIC.replace(weight=STATIC.weight.replace(observer=observer), target=target)
        qmodel = tiny.quantize(model, config, [tiny.rand(8, 512)])
        return tiny.constant(qmodel, tiny.calls(qmodel, "quark_fx.dequantize")[-1].args[1])

    assert (scale("onnx") < 2 * scale("onnx_vnni")).all()


def test_free_codes_lose_nothing_and_the_bound_less_than_seven_bits() -> None:
    def sqnr(config: QuantConfig) -> float:
        rows = tiny.quantize(tiny.cnn(), config, DATA).report().rows
        return float(np.mean([row.sqnr for row in rows]))

    assert STATIC.weight is not None
    reduced = STATIC.replace(weight=STATIC.weight.replace(reduce_range=True))
    free, bound, seven = (sqnr(c) for c in (STATIC.replace(target="onnx_vnni"), STATIC, reduced))
    assert free > bound > seven


@pytest.mark.parametrize(
    ("format", "limits"),
    [("int8", (-64, 64)), ("uint8", (0, 127)), ("int16", (-(2**14), 2**14)), ("uint16", (0, 2**15 - 1))],
)
def test_a_reduced_range_has_the_codes_of_other_tools(format: str, limits: tuple[int, int]) -> None:
    scheme = TensorSpec(format=format, reduce_range=True).scheme  # type: ignore[arg-type]
    assert (scheme.qmin, scheme.qmax) == limits
    assert scheme.middle == (0 if format.startswith("int") else (limits[1] + 1) // 2)


@pytest.mark.parametrize("options", [{"format": "int4"}, {"format": "fp8_e4m3"}, {"format": "uint8", "dynamic": True}])
def test_a_reduced_range_is_for_weights_of_8_or_16_bits(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="reduce_range"):
        TensorSpec(reduce_range=True, **options)


def test_activations_have_no_reduced_range() -> None:
    with pytest.raises(ConfigError, match="reduce_range is only for weights"):
        STATIC.replace(input=TensorSpec(format=UINT8, reduce_range=True))
