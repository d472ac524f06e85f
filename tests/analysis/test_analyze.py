"""`analyze` finds what was spoiled, adds up to what is measured, and proposes what works."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from networks import MobileNet, ResidualCnn, VisionTransformer
from tiny import cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, TensorSpec
from quark_fx.analysis.analyze import analyze
from quark_fx.analysis.report import Analysis, Remedy, format_error
from quark_fx.analysis.switches import SwitchedGraph
from quark_fx.analysis.trials import METRICS, Trials, metric_of
from quark_fx.engine.block_walk import relative_error
from quark_fx.errors import CalibrationError, ConfigError, QuarkError
from quark_fx.numbers.formats import INT4
from quark_fx.presets import PRESETS, preset
from quark_fx.session import Session

FACTOR = 300.0
"""What one channel is scaled by: more than the steps of 8 bits."""


@dataclass(frozen=True)
class Spoiled:
    """A network one channel of which is large, the module that reads it, and batches."""

    model: nn.Module
    reader: str
    batches: list[Tensor]


class Autoencoder(nn.Sequential):
    """Convolutions down, a transposed one up."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.ReLU(),
            nn.ConvTranspose2d(12, 8, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 1, 3, padding=1),
        )


class Tokens(nn.Sequential):
    """An embedding and three linears; `(batch, sequence)` of token ids."""

    def __init__(self) -> None:
        super().__init__(
            nn.Embedding(11, 16), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 6)
        )


def digits(*sizes: int) -> list[Tensor]:
    return [rand(n, 1, 8, 8, seed=i) for i, n in enumerate(sizes or (16, 16))]


def moved(model: nn.Module, maker: str, reader: str, batches: list[Tensor]) -> Spoiled:
    """Scale channel 0 that a module makes, and undo it in the module that reads it."""
    made, read = model.get_submodule(maker), model.get_submodule(reader)
    before = model(batches[0])
    with torch.no_grad():
        for p in (made.weight, made.bias):
            p[0] *= FACTOR  # type: ignore[index, operator]
        column = read.weight[0] if isinstance(read, nn.ConvTranspose2d) else read.weight[:, 0]  # type: ignore[index]
        column /= FACTOR
    torch.testing.assert_close(model(batches[0]), before, rtol=1e-3, atol=1e-3)  # the function is kept
    return Spoiled(model, reader, batches)


SPOILED: dict[str, Callable[[], Spoiled]] = {
    "residual CNN": lambda: moved(seeded(ResidualCnn(16)), "stem.1", "down.0", digits()),
    "depthwise CNN": lambda: moved(seeded(MobileNet()), "4.layers.3", "5.0", digits()),
    "transformer": lambda: moved(seeded(VisionTransformer(32)), "layers.1.norm2", "layers.1.up", digits()),
    "autoencoder": lambda: moved(seeded(Autoencoder()), "2", "4", digits()),
    "token MLP": lambda: moved(seeded(Tokens()), "1", "3", tokens(16, 16)),
}


@cache
def analyzed(name: str) -> tuple[Spoiled, Analysis]:
    """Return a spoiled network and its analysis; tests leave both as they are."""
    spoiled = SPOILED[name]()
    return spoiled, analyze(spoiled.model, "int8_static", spoiled.batches)


@pytest.mark.parametrize("name", SPOILED)
def test_what_was_spoiled_is_first_and_its_gain_is_predicted_within_a_factor_of_two(name: str) -> None:
    spoiled, found = analyzed(name)
    assert found.rows[0].name == spoiled.reader, str(found)
    gained = found.rows[0].in_float
    assert gained is not None
    assert gained.measured is not None
    assert gained.measured / 2 <= gained.gain <= 2 * gained.measured
    assert found.rows[0].error / 2 <= found.rows[0].alone <= 2 * found.rows[0].error  # type: ignore[operator]
    assert gained.measured > 0.5 * found.error
    assert found.remedied < 0.5 * found.error


@pytest.mark.parametrize("name", ["residual CNN", "transformer"])
def test_the_proposed_configuration_makes_the_error_that_was_measured(name: str) -> None:
    spoiled, found = analyzed(name)
    pasted = qfx.QuantConfig.from_yaml(found.to_yaml())
    assert pasted == found.config
    for config, expected in (("int8_static", found.error), (pasted, found.remedied)):
        qmodel = quantize(spoiled.model, config, spoiled.batches)
        with torch.no_grad():
            errors = [relative_error([qmodel(x)], [spoiled.model(x)]) for x in torch.cat(spoiled.batches).split(8)]
        # Sums in another order, of another layout in memory, move a few values to a neighboring code.
        assert float(sum(errors)) / len(errors) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("name", ["int8_static", "int8_dynamic", "int4_weight_only", "fp8_static", "mxfp4", "xint8"])
@pytest.mark.parametrize("network", ["cnn", "mlp"])
def test_contributions_add_up_to_the_error_and_rank_what_is_measured(name: str, network: str) -> None:
    model, batches = {"cnn": (cnn(), images(8, 8)), "mlp": (mlp(), tokens(8, 8))}[network]
    found = analyze(model, name, batches, samples=16)
    assert sum(row.error for row in found) == pytest.approx(found.error, rel=1e-4)
    assert [row.error for row in found] == sorted((row.error for row in found), reverse=True)
    known = {row.name for row in quantize(model, name, batches).report() if not row.reason}
    assert found.rows[0].name in known
    first = found.rows[0]
    assert first.alone is not None
    assert first.alone > 0
    assert all(row.alone is None for row in found.rows[3:])


def test_an_error_that_is_one_weights_is_that_weights() -> None:
    config = preset("int8_weight_only").replace(exclude=("down", "embed"))
    found = analyze(mlp(), config, tokens(8, 8))
    assert [row.name for row in found] == ["up"]
    assert found.rows[0].alone == pytest.approx(found.error, rel=1e-4)
    assert found.rows[0].in_float is not None
    assert found.rows[0].in_float.measured == pytest.approx(found.error, rel=1e-4)


def test_only_culprits_are_proposed_to_be_left_in_float() -> None:
    config = preset("int8_weight_only").replace(exclude=("embed",))
    found = analyze(mlp(), config.replace(exclude=("down", "embed")), tokens(8, 8))
    assert found.rows[0].in_float is not None
    assert found.config.exclude == ("down", "embed")  # nothing would be quantized
    four_bits = qfx.Override(pattern="up", weight=qfx.TensorSpec(format="int2", granularity="channel"))  # type: ignore[arg-type]
    assert "up" in str(
        analyze(mlp(), config.replace(overrides=(four_bits,)), tokens(8, 8)).config.to_dict()["overrides"][1:]
    )


class Turned(nn.Module):
    """A product with a weight that is stored the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.transpose(0, 1)


def test_a_weight_that_is_transposed_first_counts_to_the_product() -> None:
    model = nn.Sequential(Turned(), nn.ReLU(), nn.Linear(6, 3)).eval()
    found = analyze(model, "int8_weight_only", [rand(8, 8), rand(8, 8, seed=3)])
    assert {row.kind for row in found} <= {"linear", "matmul", "mm"}
    assert {row.name for row in found} == {"0", "2"}


class Recurrent(nn.Module):
    """An LSTM, a GRU and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 12, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(24, 10, batch_first=True)
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0])  # type: ignore[no-any-return]


def test_all_weights_of_a_recurrent_layer_count_to_it() -> None:
    found = analyze(seeded(Recurrent()), "int8_dynamic", [rand(8, 6, 8, seed=i) for i in range(2)])
    assert {row.name: row.kind for row in found} == {"lstm": "lstm", "gru": "gru", "head": "linear"}
    assert sum(row.error for row in found) == pytest.approx(found.error, rel=1e-4)


def test_a_divergence_of_classes_is_attributed_alike() -> None:
    spoiled = SPOILED["transformer"]()
    found = analyze(spoiled.model, "int8_static", spoiled.batches, metric="kl", top=1)
    assert found.rows[0].name == spoiled.reader
    assert "nats" in str(found)
    x = torch.cat(spoiled.batches)
    logs = [f(x).log_softmax(-1) for f in (quantize(spoiled.model, "int8_static", spoiled.batches), spoiled.model)]
    kl = nn.functional.kl_div(logs[0], logs[1], log_target=True, reduction="batchmean")
    assert found.error == pytest.approx(float(kl.detach()), rel=0.05)


@pytest.mark.parametrize("name", [n for n in PRESETS if "gptq" not in n and "best" not in n])
def test_every_switch_off_is_float_and_every_switch_on_is_quantized(name: str) -> None:
    batches = images(4, 4)
    session = Session(cnn(), batches)
    context = session.context(preset(name))
    trials = Trials(session, context, METRICS["error"], [context.data.inputs(0)], ["calibration batch 0"])
    found = trials.convert(preset(name))
    graph = SwitchedGraph(found.float_graph, found.gm, found.plan)
    x, everything = batches[0], range(len(graph.rounded))
    assert torch.equal(graph.only(())(x)[0], found.float_graph(x)[0])
    torch.testing.assert_close(graph.only(everything)(x)[0], found.gm(x)[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(graph.run([x])[0].detach(), found.gm(x)[0], rtol=1e-6, atol=1e-6)
    alone = [graph.only({place}) for place in everything]
    without = [graph.only({*everything} - {place}) for place in (*everything, None)]  # the last one is the base again
    for base, variants in ((graph.only(()), alone), (graph.only(everything), without)):
        resumed = trials.compare(base, variants)
        assert resumed == pytest.approx([trials.compare(gm, [gm])[0] for gm in variants], rel=1e-5, abs=1e-12)
        assert len(set(resumed)) > 1 or len(resumed) < 2


def test_the_table_names_culprits_and_remedies() -> None:
    _, found = analyzed("autoencoder")
    text = str(found)
    assert text.index("error ") == 0
    (line,) = [line for line in text.splitlines() if line.startswith("4 ")]
    assert found.rows[0].remedies[0].what in line
    assert text.endswith(found.to_yaml().rstrip())
    assert max(map(len, text.splitlines())) <= 140
    many = replace(found, rows=found.rows * 1000)
    assert len(many.table().splitlines()) < 20
    assert f"{len(many) - 12} more" in many.table()
    assert len(many.table(rows=None).splitlines()) == len(many) + 2
    assert found.to_dict()["rows"][0]["remedies"][0]["what"] == found.rows[0].remedies[0].what


def test_only_a_preset_that_was_given_by_name_is_named() -> None:
    names = [analyze(mlp(), config, tokens(8, 8)).preset for config in ("fp8_static", preset("int8_static"))]
    assert names == ["fp8_static", ""]


def test_remedies_change_what_they_say() -> None:
    config = preset("int8_static")
    assert Remedy(what="", gain=0.0, exclude=("a", "b")).applied(config).exclude == ("a", "b")
    smooth = qfx.passes.SmoothQuant(only=("a",))
    gptq = config.replace(passes=(*config.passes, qfx.passes.AdaRound()))
    names = [
        getattr(p, "__name__", type(p).__name__)
        for p in Remedy(what="", gain=0.0, passes=(smooth,)).applied(gptq).passes
    ]
    assert names == ["fold_constants", "fold_batch_norm", "SmoothQuant", "AdaRound"]


def test_what_cannot_be_analyzed_is_refused() -> None:
    with pytest.raises(CalibrationError, match="real inputs"):
        analyze(cnn(), "int8_static", [])
    with pytest.raises(ConfigError, match="error, kl"):
        analyze(cnn(), "int8_static", images(), metric="mse")
    with pytest.raises(ConfigError, match="top must be an integer of at least 1"):
        analyze(cnn(), "int8_static", images(), top=0)
    with pytest.raises(ConfigError, match=r"unknown metric \['kl'\]"):
        analyze(cnn(), "int8_static", images(), metric=["kl"])  # type: ignore[arg-type]


class Then(nn.Module):
    """A convolutional network and a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.function = cnn(), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.network(x))


@pytest.mark.parametrize("metric", METRICS)
def test_outputs_that_nothing_can_be_compared_with_are_refused(metric: str) -> None:
    def refused(model: nn.Module, message: str, config: str = "int8_static", scale: float = 1.0) -> None:
        with pytest.raises(QuarkError, match=message):
            analyze(model.eval(), config, [images(2)[0], scale * images(2)[0]], metric=metric)

    refused(Then(lambda x: (x - 100).log()), "float model's output is not finite on calibration batch 0")
    refused(Then(torch.exp), "float model's output is not finite on calibration batch 1", scale=1e4)
    refused(Then(lambda x: x.argmax(-1)), "return logits instead")
    refused(Then(lambda x: x.argmax(-1, keepdim=True).float()), "return logits instead")
    refused(cnn(), "the quantized model's output, or its derivative, is not finite", "fp16", 1e7)


def test_nothing_quantized_has_no_error() -> None:
    found = analyze(cnn(), preset("int8_static").replace(exclude=("*",)), images())
    assert isinstance(found, Analysis)
    assert len(found) == 0
    assert found.error < 1e-12  # the rounding of folded batch norms
    assert str(found).count("0.0%") == 3


class Padded(nn.Module):
    """`Tokens` with a mask that says which are padding; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens()

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.tokens(ids)
        return logits


@pytest.mark.parametrize("metric", METRICS)
def test_what_is_made_of_padding_does_not_count(metric: str) -> None:
    """A padding token that makes large values and large errors changes nothing."""
    (ids,), mask = tokens(4), (torch.arange(5) < torch.tensor([[5], [4], [3], [1]])).long()
    model = seeded(Padded())
    with torch.no_grad():
        model.tokens.get_parameter("0.weight")[10] *= 100
    ids = ids.clamp_max(9)
    first, second = (
        analyze(model, "int8_weight_only", [(torch.where(mask > 0, ids, other), mask)] * 2, metric=metric)
        for other in (0, 10)
    )
    assert first == second
    assert first.error > 0


class Fused(nn.Module):
    """Two linears that read one value, and one that reads another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.down = nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.left(x) * self.right(x))
        return out


def test_what_a_server_fuses_is_changed_together() -> None:
    weight = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16)
    config = QuantConfig(weight=weight, target=qfx.Target.VLLM)
    found = analyze(seeded(Fused()), config, [rand(64, 32)])
    remedies = [r for row in found.rows if row.name in ("left", "right") for r in row.remedies]
    excluded = [{*r.exclude} for r in remedies if r.exclude]
    changed = [{o.pattern for o in r.overrides} for r in remedies if r.overrides]
    assert excluded
    assert changed
    assert all({"left", "right"} <= names for names in (*excluded, *changed))


def test_weights_with_offsets_have_remedies() -> None:
    config = QuantConfig(weight=qfx.gguf_types.Q4_1, target=qfx.Target.TORCH)
    found = analyze(seeded(Fused()), config, [rand(64, 32)])
    assert "uint8 weight" in [remedy.what for row in found.rows for remedy in row.remedies]


def test_batches_count_by_their_tokens() -> None:
    """Of two batches with as many samples, the one with more tokens counts more."""
    (ids,), model = tokens(4), seeded(Padded())
    masks = torch.ones_like(ids), (torch.arange(5) < 1).long().expand(4, -1)
    batches = [(ids, masks[0]), (ids.flip(0), masks[1])]
    both, long, short = (
        analyze(model, "int8_weight_only", data, metric="kl").error for data in (batches, batches[:1], batches[1:])
    )
    assert both == pytest.approx((20 * long + 4 * short) / 24)
    assert both != pytest.approx((long + short) / 2, rel=1e-2)


@pytest.mark.parametrize("metric", METRICS)
def test_samples_that_are_all_padding_are_dropped(metric: str) -> None:
    (ids,), model = tokens(4), seeded(Padded())
    whole, empty = (ids, torch.ones_like(ids)), (ids, torch.zeros_like(ids))
    alone, beside = (analyze(model, "int8_weight_only", data, metric=metric) for data in ([whole], [whole, empty]))
    assert alone == beside
    with pytest.raises(CalibrationError, match="the last of calibration batch 1, are all padding"):
        analyze(model, "int8_weight_only", [whole, empty], metric=metric, samples=4)


class Joint(nn.Module):
    """Boxes in pixels and scores in one output; what is spoiled makes the scores alone wrong."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
        self.body = nn.Sequential(first, nn.ReLU(), second, nn.ReLU())
        self.boxes, self.scores = nn.Conv2d(16, 4, 1), nn.Conv2d(16, 6, 1)
        with torch.no_grad():
            self.scores.weight[:, 0] *= 300
            second.weight[0] *= 0.003
            assert second.bias is not None
            second.bias[0] = 0.01

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return torch.cat([self.boxes(y).exp() * 160, self.scores(y).sigmoid()], 1)


def by_part(outputs: Sequence[Any], targets: Sequence[Any]) -> Tensor:
    (y,), (t,) = outputs, targets
    return sum(relative_error([y[:, part]], [t[:, part]]) for part in (slice(4), slice(4, 10))) / 2  # type: ignore[return-value]


def test_a_function_weights_the_parts_of_one_output() -> None:
    torch.manual_seed(0)
    model, batches = Joint().eval(), [torch.rand(4, 3, 32, 32) for _ in range(3)]
    plain = analyze(model, "int8_static", batches, progress=False)
    weighted = analyze(model, "int8_static", batches, metric=by_part, progress=False)
    assert weighted.metric == "by_part"
    assert "(by_part)" in str(weighted)
    assert math.isnan(weighted.sqnr)

    def scores(config: Any) -> float:
        qmodel = quantize(model, config, batches)
        with torch.no_grad():
            return float(relative_error([qmodel(batches[0])[:, 4:]], [model(batches[0])[:, 4:]]))

    assert scores(weighted.config) < 0.1 * scores(plain.config)
    found = qfx.search(
        model, ["int8_weight_only", "float"], budget=qfx.Budget(error=0.1), data=batches, metric=by_part, progress=False
    )
    assert found.metric == "by_part"
    metrics: Any = (
        (lambda outputs, targets: 0.5, "metric returned float; it must take two lists"),
        (lambda outputs, targets: outputs[0] - targets[0], r"metric returned Tensor of shape \(4, 10, 8, 8\)"),
        (
            lambda outputs, targets: (outputs[0].argmax(1) != targets[0].argmax(1)).float().mean(),
            "is not differentiable",
        ),
    )
    for metric, words in metrics:
        with pytest.raises(ConfigError, match=words):
            analyze(model, "int8_static", batches, metric=metric, progress=False)


def test_only_changes_that_were_measured_to_help_are_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled = SPOILED["autoencoder"]()
    found = analyze(spoiled.model, "int8_static", spoiled.batches, progress=False)
    assert found.remedied < 0.5 * found.error
    errors = Trials.error
    # Were every change to hurt, none would be proposed, whatever was estimated to help.
    monkeypatch.setattr(Trials, "error", lambda self, config: 1.003 * found.error)
    worse = analyze(spoiled.model, "int8_static", spoiled.batches, progress=False)
    assert worse.config == preset("int8_static")
    assert worse.remedied == worse.error
    assert any((r.measured or 0.0) < 0 for row in worse for r in row.remedies if not r.exclude)
    # If one of them hurts, the others stand.
    seen: list[qfx.QuantConfig] = []

    def first_hurts(self: Trials, config: qfx.QuantConfig) -> float:
        seen.append(config)
        return 2 * found.error if len(seen) == 1 else errors(self, config)

    monkeypatch.setattr(Trials, "error", first_hurts)
    other = analyze(spoiled.model, "int8_static", spoiled.batches, progress=False)
    assert other.config != seen[0]
    assert other.remedied < other.error


def test_advice_says_when_to_ask_again_and_what_16_bits_bring(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(16, 16), nn.Tanh()))).eval()
    batches = [rand(16, 16, seed=seed) for seed in range(2)]
    one = analyze(model, "int8_static", batches, top=1)
    assert "configurations measured" in capsys.readouterr().err
    assert any("more operators add at least 2%" in line for line in one.advice)
    every = analyze(model, "int8_static", batches, top=20, progress=False)
    assert not capsys.readouterr().err
    assert not any("more operator" in line for line in every.advice)
    config = qfx.QuantConfig(
        weight=qfx.TensorSpec(format="int16", granularity="channel"),  # type: ignore[arg-type]
        input=qfx.TensorSpec(format="uint8"),  # type: ignore[arg-type]
    ).replace(target="torch")
    found = analyze(model, config, batches, top=1, progress=False)
    (line,) = [line for line in found.advice if "16-bit activations everywhere" in line]
    assert line in " ".join(str(found).split("\n"))
    assert found.to_dict()["advice"] == [*found.advice]
    assert not any("16-bit" in line for line in analyze(model, "int8_weight_only", batches, progress=False).advice)


@pytest.mark.parametrize("name", METRICS)
def test_a_function_called_like_a_metric_has_another_unit(name: str) -> None:
    def own(outputs: Any, targets: Any) -> Tensor:
        return torch.zeros(())

    own.__name__ = name
    assert (called := metric_of(own)[0]) == f"{name}()"
    assert format_error(0.25, called) == f"0.25 ({name}())"
    assert format_error(0.25, name) == {"error": "0.25 of the outputs' square, 6.0 dB", "kl": "0.25 nats"}[name]


class Tabular(nn.Module):
    """Embeddings and numbers, concatenated: only the embeddings' channels can be rotated in place."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8) for n in (10, 20, 30))
        self.norm, self.first, self.last = nn.BatchNorm1d(5), nn.Linear(29, 32), nn.Linear(32, 3)

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        rows = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        y: Tensor = self.last(torch.relu(self.first(torch.cat([*rows, self.norm(numbers)], 1))))
        return y


class Translator(nn.Module):
    """One table for both inputs; the second input is looked up before the first in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        y: Tensor = self.head(self.decoder(self.table(target), self.encoder(self.table(source))))
        return y


@pytest.mark.parametrize(
    ("model", "batches"),
    [
        (Tabular, [(torch.randint(0, 10, (16, 3)), rand(16, 5)) for _ in range(2)]),
        (Translator, [(torch.randint(0, 50, (2, 7)), torch.randint(0, 50, (2, 5))) for _ in range(2)]),
    ],
)
def test_what_is_measured_of_each_proposal_is_what_it_gives(model: type[nn.Module], batches: list[Any]) -> None:
    analysis = analyze(seeded(model()), "int8_static", batches, progress=False)
    assert math.isfinite(analysis.error)
    assert analysis.error > 0
