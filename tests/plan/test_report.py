"""The report: plain rows, totals that count every stored byte once, and a table that says why."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import calls, cnn, constant, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.engine.context import Context
from quark_fx.errors import ConfigError
from quark_fx.graph.nodes import stored_tensors
from quark_fx.graph.pass_manager import Change, PassRecord, graph_pass
from quark_fx.numbers.formats import INT3, parse_format
from quark_fx.passes import AWQ, GPTQ, AutoRound, BiasCorrection, FitScales
from quark_fx.plan.report import Report, Row
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_STATIC, INT8_WEIGHT_ONLY, PRESETS

FIELDS = [
    "name",
    "kind",
    "weight",
    "activation",
    "scale_min",
    "scale_max",
    "sqnr",
    "bytes_before",
    "bytes_after",
    "reason",
]


def test_rows_are_plain_data_with_the_same_columns() -> None:
    rows = quantize(mlp(), "int8_static", tokens()).report().to_rows()
    assert [r["name"] for r in rows] == ["embed", "up", "down"]
    for row in rows:
        assert set(FIELDS) <= set(row)
        assert all(value is None or isinstance(value, str | int | float) for value in row.values())
    json.dumps(rows)


def test_rows_make_a_data_frame() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(quantize(mlp(), "int8_static", tokens()).report().to_rows())
    assert frame.shape[0] == 3
    assert frame.set_index("name").loc["up", "weight"] == "int8 channel"


@pytest.mark.parametrize("preset", list(PRESETS))
def test_the_bytes_are_those_of_what_is_stored(preset: str) -> None:
    model = mlp()
    qmodel = quantize(model, preset, tokens())
    weights = {name: p for name, p in model.named_parameters() if p.dim() > 1}
    state = {str(n.target): constant(qmodel, n) for n in qmodel.graph_module.graph.nodes if n.op == "get_attr"}
    for row in qmodel.report():
        weight = weights[f"{row.name}.weight"]
        assert row.bytes_before == weight.numel() * 4
        bits = 32 if row.reason else parse_format(row.weight.split()[0]).bits
        scales = state.get(f"{row.name}.weight_scale", torch.empty(0)).numel()
        if "128x128" in row.weight:  # the graph repeats the scale of a block along its rows
            scales = math.prod(-(-size // 128) for size in weight.shape)
        stored = {"e8m0_even": scales, "e4m3 scales": scales + 4, "e8m0_floor": scales // 8 + weight.numel() // 16}
        kind = next((kind for kind in stored if kind in row.weight), "")
        points = state.get(f"{row.name}.weight_zero_point", torch.empty(0))
        packed = points.numel() * bits // 8 if points.any() else 0
        assert row.bytes_after == weight.numel() * bits // 8 + stored.get(kind, scales * 4) + packed
    totals = qmodel.report().totals
    assert totals["operators"] == 3
    assert totals["quantized"] == sum(not row.reason for row in qmodel.report())
    assert totals["bytes_before"] == sum(p.numel() * 4 for p in weights.values())
    assert totals["ratio"] == totals["bytes_after"] / totals["bytes_before"]


def test_scales_and_signal_to_noise_are_those_of_the_weight() -> None:
    model = seeded(nn.Linear(16, 4))
    (row,) = quantize(model, INT8_WEIGHT_ONLY, [rand(3, 16)]).report()
    assert isinstance(model.weight, Tensor)
    amax = model.weight.detach().abs().amax(1)
    assert row.scale_min == pytest.approx(float(amax.min()) / 127)
    assert row.scale_max == pytest.approx(float(amax.max()) / 127)
    scale = (amax / 127)[:, None]
    error = model.weight.detach() - (model.weight.detach() / scale).round() * scale
    expected = 10 * torch.log10(model.weight.detach().square().sum() / error.square().sum())
    assert row.sqnr == pytest.approx(float(expected), abs=1e-3)


def test_a_weight_left_in_float_keeps_its_bytes_and_its_reason() -> None:
    report = quantize(mlp(), INT8_STATIC.replace(exclude=("up",)), tokens()).report()
    row = next(r for r in report if r.name == "up")
    assert (row.weight, row.bytes_before, row.bytes_after) == ("", 32 * 48 * 4, 32 * 48 * 4)
    assert row.reason == "excluded by 'up'"
    assert report.totals["quantized"] == 2


class Tied(nn.Module):
    """An embedding whose table is also the output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.embed(ids)))
        return out


def test_a_tied_weight_counts_once() -> None:
    totals = quantize(seeded(Tied()), INT8_WEIGHT_ONLY, tokens()).report().totals
    assert totals["operators"] == 2
    assert totals["bytes_before"] == 11 * 32 * 4
    assert totals["bytes_after"] == 11 * 32 + 11 * 4


def test_a_tied_weight_in_two_formats_counts_once_before_and_twice_after() -> None:
    totals = quantize(seeded(Tied()), INT4_WEIGHT_ONLY, tokens()).report().totals
    assert totals["bytes_before"] == 11 * 32 * 4
    assert totals["bytes_after"] == (11 * 32 + 11 * 4) + (11 * 32 // 2 + 11 * 4)


def test_a_weight_has_one_row_per_use_that_differs(tmp_path: Path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(2, 2, 3), nn.ConvTranspose2d(2, 2, 3)
            self.linear, self.cell = nn.Linear(4, 4), nn.GRU(4, 4)
            self.embed, self.table = nn.Embedding(11, 4), nn.Parameter(torch.randn(4, 4))

        def forward(self, ids: Tensor, image: Tensor) -> Tensor:
            x = self.linear(torch.relu(self.linear(self.embed(ids)))).tanh()
            x, _ = self.cell(self.cell(x)[0])
            x = torch.relu(x @ self.table) @ self.table.T
            image = torch.relu(self.up(torch.relu(self.up(self.conv(torch.relu(self.conv(image)))))))
            out: Tensor = nn.functional.linear(x, self.embed.weight).sum() + image
            return out

    batch = torch.randint(0, 11, (2, 4)), rand(2, 2, 8, 8)
    qmodel = quantize(seeded(Shared()), INT8_STATIC, [batch])
    report = qmodel.report()
    uses = [(row.parameter, row.kind) for row in report]
    assert sorted(uses) == [
        *(("cell.weight_hh_l0", "gru"), ("cell.weight_ih_l0", "gru"), ("conv.weight", "conv")),
        *(("embed.weight", "embedding"), ("embed.weight", "linear"), ("linear.weight", "linear")),
        *(("table", "linear"), ("table", "linear"), ("up.weight", "conv_transpose")),
    ]
    assert len(report.operators().rows) == len(report.to_dict()["rows"]) == report.totals["operators"] == len(report)
    assert report.totals["bytes_before"] == 4 * sum(p.numel() for p in Shared().parameters() if p.dim() > 1)
    codes = [x for name, x in qmodel.graph_module.state_dict().items() if "codes" in name and x.dtype == torch.int8]
    assert sum(x.nbytes for x in codes) > report.totals["bytes_before"] // 4  # the table is stored twice
    scales = report.totals["bytes_after"] - sum(x.nbytes for x in codes)
    assert scales == 4 * (2 + 2 + 4 + 12 + 12 + 11 + 4 + 4)
    qmodel.save(tmp_path)
    assert [*qfx.load(tmp_path).report()] == [*report]


def test_two_weights_of_one_module_both_count() -> None:
    """A recurrent cell has two matrices of one size; so do the projections of attention with its own key width."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cell(x, x + 1)
            return out

    report = quantize(seeded(Recurrent()), INT8_WEIGHT_ONLY, [rand(3, 4)]).report()
    assert [row.parameter for row in report] == ["cell.weight_ih", "cell.weight_hh"]
    assert report.totals["bytes_before"] == 2 * 12 * 4 * 4
    assert [line.split()[0] for line in str(report).splitlines()[2:4]] == ["cell.weight_ih", "cell.weight_hh"]
    assert [row[0] for row in report.tables()[0].rows] == report.labels == ["cell.weight_ih", "cell.weight_hh"]


def test_the_table_holds_every_row_and_the_totals() -> None:
    report = quantize(cnn(), INT8_STATIC.replace(exclude=("head",)), images()).report()
    header, rule, *lines, summary = str(report).splitlines()
    assert header.split()[:3] == ["name", "op", "weight"]
    assert set(rule) == {"─", " "}
    assert [line.split()[0] for line in lines] == ["stem.0", "block.conv", "head"]
    assert lines[0].split()[1:5] == ["conv", "int8", "channel", "uint8"]
    assert lines[2].endswith("excluded by 'head'")
    assert summary.startswith("2 of 3 weighted operators quantized; weights ")
    assert all(line[header.index("op") :].startswith("conv ") for line in lines[:2])


def test_an_empty_report_is_printed_too() -> None:
    report = Report(())
    assert report.totals == {"operators": 0, "quantized": 0, "bytes_before": 0, "bytes_after": 0, "ratio": 1.0}
    assert "0 of 0" in str(report)


def test_a_report_is_iterable_and_plain_data() -> None:
    qmodel = quantize(cnn(), INT8_STATIC, images())
    report = qmodel.report()
    assert len(report) == len(list(report)) == 3
    assert all(isinstance(row, Row) for row in report)
    data = report.to_dict()
    assert data["totals"] == report.totals
    own = ["insert_observers", "calibrate", "convert"]
    assert [p["name"] for p in data["passes"]] == ["fold_constants", "fold_batch_norm", *own]
    assert [p["rewrites"] for p in data["passes"]] == [0, 2, 4, 4, 3]
    json.dumps(data)


def test_a_report_names_what_draws_random_numbers(tmp_path: Path) -> None:
    class Draws(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.cell = nn.Linear(8, 8), nn.LSTM(8, 8, 2, dropout=0.5)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            torch.rand_like(y)
            self.cell.training = True
            return {
                "noise": y + torch.rand_like(y),
                "mask": y * torch.bernoulli(torch.full_like(y, 0.5)),
                "slope": nn.functional.rrelu(y, training=True),
                "cell": self.cell(y[None])[0],
                "attention": nn.functional.scaled_dot_product_attention(y, y, y, dropout_p=0.3),
                "quiet": nn.functional.rrelu(y, training=False),
            }

    qmodel = quantize(seeded(Draws()), INT8_STATIC, [rand(4, 8)])
    report = qmodel.report()
    assert set(report.draws) == {"noise", "mask", "slope", "cell", "attention"}
    assert "aten.rand_like.default at %rand_like_1" in report.draws["noise"]
    assert all(line in str(report).splitlines() for line in report.random)
    assert len(report.random) == 5
    assert report.to_dict()["draws"] == report.draws
    qmodel.save(tmp_path)
    assert set(qfx.load(tmp_path).report().draws) == set(report.draws)


def test_a_model_without_weights_has_an_empty_report() -> None:
    qmodel = qfx.quantize(nn.ReLU().eval(), "int8_static", [rand(3, 4)], progress=False)
    assert len(qmodel.report()) == 0
    assert not calls(qmodel, "quark_fx")


def test_passes_that_changed_nothing_have_the_most_common_reason() -> None:
    def record(name: str, *changes: tuple[str, bool]) -> PassRecord:
        return PassRecord(name, 0, 1.0, tuple(Change(str(i), *change) for i, change in enumerate(changes)))

    report = Report(
        (),
        (
            record("AWQ", ("skipped: a", False), ("skipped: b", False), ("skipped: b", False)),
            record("GPTQ", ("skipped: a", False), ("rounded", True)),
            record("fold_constants"),
        ),
    )
    assert report.idle == {"AWQ": "skipped: b"}


def test_a_table_of_a_pass_that_did_not_run_is_refused() -> None:
    report = Report((), (PassRecord("SmoothQuant", 0, 1.0, ()),))
    assert report.pass_table("SmoothQuant").startswith("pass")
    with pytest.raises(
        ConfigError, match=r"no pass 'SmothQuant' ran; passes of this run: SmoothQuant.*mean 'SmoothQuant'"
    ):
        report.pass_table("SmothQuant")
    with pytest.raises(ConfigError, match="passes of this run: none"):
        Report(()).pass_table("GPTQ")


def test_a_long_reason_is_shortened_in_the_table_and_kept_in_full() -> None:
    reason = (
        "skipped: its input is made by aten.gelu.default at %gelu (/home/someone/model.py:7, module a.b), which is one"
    )
    change = Change("up", reason + " and so on" * 30, changed=False)
    report = Report((), (PassRecord("SmoothQuant", 0, 1.0, (change,)),))
    line = report.pass_table().splitlines()[-1]
    assert "skipped: its input is made by aten.gelu.default at %gelu, which is" in line
    assert "…" in line
    assert "/home" not in line
    assert len(max(report.pass_table().splitlines(), key=len)) < 130
    assert len(max(report.pass_table(full=True).splitlines(), key=len)) > 130
    assert report.passes[0].changes[0].what == change.what


def test_what_was_judged_on_the_data_it_was_learned_from_says_so() -> None:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, BiasCorrection()))
    with pytest.warns(UserWarning, match="validated on the data that they learn from; pass more batches"):
        one = quantize(mlp(), config, tokens(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        many = quantize(mlp(), config, tokens(4))
    assert not one.report().passes[-1].validated
    assert "on the data it was learned from" in str(one.report())
    assert "held-out" not in str(one.report())
    assert "on validation data" in str(many.report())
    assert PassRecord.from_dict(asdict(one.report().passes[-1])) == one.report().passes[-1]


@pytest.mark.parametrize("learns", [GPTQ(), FitScales(), AWQ(explicit=True)], ids=lambda p: type(p).__name__)
def test_the_report_says_what_judged_a_pass(learns: Any) -> None:
    """A pass of somebody else's that promises nothing is taken for one that holds no data out."""
    weight = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=16)
    config = QuantConfig(weight=weight, passes=(_noting, learns), target=Target.TORCH)
    report = quantize(mlp(), config, tokens(4, 4, 4)).report()
    assert [record.validated for record in report.passes if record.changes] == [False, True]
    lines = [line for line in str(report).splitlines() if "mean error" in line]
    assert len(lines) == 2
    assert [("on validation data" in line, "on the data it was learned from" in line) for line in lines] == [
        (False, True),
        (True, False),
    ]


@graph_pass(exact=False)
def _noting(gm: GraphModule, context: Context) -> int:
    """Note an error of nothing."""
    context.note(Change("nothing", "nothing", False, 0.5, 0.5))
    return 0


@pytest.mark.parametrize("learns", [FitScales(), GPTQ(fit_scales=True), AutoRound(iterations=5)], ids=str)
def test_scales_in_the_report_are_those_of_the_graph(learns: Any) -> None:
    weight = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=16)
    data = [rand(32, 32, seed=i) * torch.linspace(0.05, 3, 32) for i in range(4)]
    model = seeded(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)))
    config = QuantConfig(weight=weight, passes=(learns,), target=Target.TORCH)
    qmodel, plain = (quantize(model, c, data) for c in (config, config.replace(passes=())))
    stored = stored_tensors(qmodel.graph_module)
    for row, before in zip(qmodel.report(), plain.report(), strict=True):
        scale = stored[f"{row.name}.weight_scale"]
        assert (row.scale_min, row.scale_max) == (float(scale.min()), float(scale.max()))
        assert (row.scale_min, row.scale_max) != (before.scale_min, before.scale_max)


class Complex(nn.Module):
    """Two products of complex numbers, and one of real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rotate = nn.Linear(8, 16, dtype=torch.cfloat)
        self.table = nn.Parameter(torch.randn(16, 16, dtype=torch.cfloat))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head((self.rotate(x.to(torch.cfloat)) @ self.table).abs())
        return out


def test_weights_of_complex_numbers_are_in_the_report() -> None:
    report = quantize(Complex().eval(), INT8_WEIGHT_ONLY, [torch.randn(4, 8)]).report()
    rows = {row.name: row for row in report}
    assert rows.keys() == {"rotate", "table", "head"}
    assert rows["rotate"].reason == "complex numbers cannot be quantized"
    assert rows["table"].reason
    assert rows["rotate"].bytes_before == rows["rotate"].bytes_after == 8 * 16 * 8
    assert "1 of 3 weighted operators quantized" in str(report)


def test_calibration_alone_needs_no_second_sample() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantize(mlp(), INT8_STATIC, tokens(1))
