"""GPTQ on graphs: what it reads, in which order, what it leaves alone and says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers
from devices import on_devices
from tiny import all_but, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch.nn import functional as F

import quark_fx as qfx
from quark_fx import Granularity, QuantConfig, Target, TensorSpec
from quark_fx.errors import CalibrationError, ConfigError
from quark_fx.graph.linear_map import LinearMap
from quark_fx.numbers.formats import INT3, INT4, INT8, INT16, UINT8, IntFormat
from quark_fx.passes import GPTQ, SmoothQuant
from quark_fx.presets import PRESETS, W4A16_GPTQ, W4A16_RTN
from quark_fx.solvers import hessian
from quark_fx.solvers.error_feedback import factor
from quark_fx.solvers.hessian import Hessian, _rows_by_group

WEIGHT = TensorSpec(format=INT3, granularity=Granularity.GROUP, group_size=16)
RTN = QuantConfig(weight=WEIGHT, target=Target.TORCH)


def with_gptq(config: QuantConfig = RTN, *passes: Any, **options: Any) -> QuantConfig:
    return config.replace(passes=(*config.passes, *passes, GPTQ(**options)))


class Attention(nn.Module):
    """Grouped-query attention and a gated unit, written by hand: nothing a library would know."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.look_up = nn.Embedding(50, width)
        self.into = nn.Linear(width, width + width // 2, bias=False)
        self.back = nn.Linear(width // 2, width, bias=False)
        self.gate, self.lift = nn.Linear(width, 3 * width), nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width)
        self.words = nn.Linear(width, 50, bias=False)

    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.look_up(ids)
        a, b, c = self.into(F.rms_norm(x, x.shape[-1:])).chunk(3, -1)
        x = x + self.back(F.scaled_dot_product_attention(a, b, c, is_causal=True))
        y = F.rms_norm(x, x.shape[-1:])
        if attention_mask is not None:
            y = y * attention_mask.unsqueeze(-1)
        out: Tensor = self.words(x + self.down(F.silu(self.gate(y)) * self.lift(y)))
        return out


def ids(*sizes: int, length: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 50, (n, length), generator=generator) for n in sizes or (8, 8)]


def relative_error(qmodel: qfx.QuantizedModel, model: nn.Module, data: Sequence[Any]) -> float:
    with torch.no_grad():
        pairs = [(qmodel.run_batch(batch), model(batch)) for batch in data]
    return sum(float((a - b).square().sum()) for a, b in pairs) / sum(float(b.square().sum()) for _, b in pairs)


def test_a_model_written_by_hand_loses_less_on_unseen_data() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16, 16)
    nearest = relative_error(quantize(model, RTN, data[:3]), model, data[3:])
    found = quantize(model, with_gptq(), data[:3])
    assert relative_error(found, model, data[3:]) < 0.8 * nearest
    record = found.report().passes[-1]
    assert list(errors(found)) == ["into", "back", "gate", "lift", "down", "words"]
    assert all(after < before for before, after in errors(found).values())
    assert [c.name for c in record.changes if "looked up" in c.what] == ["look_up"]


def errors(qmodel: qfx.QuantizedModel) -> dict[str, tuple[float, float]]:
    """Return the error before and after of each operator that the last pass learned."""
    changes = qmodel.report().passes[-1].changes
    return {c.name: (c.before, c.after) for c in changes if c.before is not None and c.after is not None}


@on_devices
def test_the_result_does_not_depend_on_how_data_is_divided(device: torch.device) -> None:
    model, data = seeded(Attention()).to(device), [batch.to(device) for batch in ids(8, 8)]
    one = quantize(model, with_gptq(), data)
    four = quantize(model, with_gptq(), [part for batch in data for part in batch.split(4)])
    same = [float((a == b).float().mean()) for a, b in zip(codes_of(one), codes_of(four), strict=True)]
    assert min(same) > 0.995


def codes_of(qmodel: qfx.QuantizedModel) -> list[Tensor]:
    gm = qmodel.graph_module
    return [getattr_path(gm, str(n.target)) for n in gm.graph.nodes if n.op == "get_attr" and "codes" in str(n.target)]


def getattr_path(module: Any, path: str) -> Any:
    for part in path.split("."):
        module = getattr(module, part)
    return module


def test_the_order_of_activation_leaves_no_trace() -> None:
    model, data = seeded(Attention()), ids(8)
    ordered, plain = (quantize(model, with_gptq(by_activation=flag), data) for flag in (True, False))
    assert [n.target for n in ordered.graph_module.graph.nodes] == [n.target for n in plain.graph_module.graph.nodes]
    assert any(not torch.equal(a, b) for a, b in zip(codes_of(ordered), codes_of(plain), strict=True))


def test_padding_does_not_count() -> None:
    model, batch = seeded(Attention()), ids(8)[0]
    mask = torch.ones_like(batch)
    mask[:, 15:] = 0
    garbage = torch.where(mask.bool(), batch, torch.randint(0, 50, batch.shape, generator=torch.Generator()))
    found = [quantize(model, with_gptq(), [{"ids": some, "attention_mask": mask}]) for some in (batch, garbage)]
    short = quantize(model, with_gptq(), [{"ids": batch[:, :15], "attention_mask": mask[:, :15]}])
    for a, b, c in zip(codes_of(found[0]), codes_of(found[1]), codes_of(short), strict=True):
        assert torch.equal(a, b)
        assert float((a == c).float().mean()) > 0.99


def test_operators_that_read_one_value_are_solved_together() -> None:
    """Their codes are those each has alone: rows are independent."""
    model, data = seeded(Attention()), ids(8)
    factored: list[int] = []

    def counted(h: Tensor, **options: Any) -> Any:
        factored.append(h.shape[-1])
        return factor(h, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quark_fx.solvers.hessian.factor", counted)
        together = quantize(model, with_gptq(), data)
        count = len(factored)
        alone = quantize(model, with_gptq(RTN.replace(exclude=("lift",))), data)
    # Each is factored for the calibration samples, and once more for all samples.
    assert count == len(factored) - count < 2 * len(together.report())
    tensors = [q.graph_module.state_dict()["gate.weight_codes"] for q in (together, alone)]
    assert torch.equal(*tensors)


def test_asymmetry_follows_the_float_model() -> None:
    model, data = seeded(Attention()), ids(16, 16, 16, 16)
    errors = [
        relative_error(quantize(model, with_gptq(asymmetry=share), data[:3]), model, data[3:]) for share in (0.0, 0.5)
    ]
    assert errors[1] < errors[0]


def test_sweeps_lose_less_on_unseen_data_than_error_feedback_alone() -> None:
    model, batches = seeded(Attention()), ids(*[8] * 8)

    def errors(sweeps: int) -> list[float]:
        (record,) = [r for r in quantize(model, with_gptq(sweeps=sweeps), batches).report().passes if r.name == "GPTQ"]
        return [change.after for change in record.changes if change.after is not None]

    pairs = [*zip(errors(0), errors(4), strict=True)]
    assert sum(after < before for before, after in pairs) >= len(pairs) - 1
    assert sum(after for _, after in pairs) < 0.97 * sum(before for before, _ in pairs)


def test_targets_scales_and_codes_share_the_factors_of_a_hessian(monkeypatch: pytest.MonkeyPatch) -> None:
    factored: list[Tensor] = []

    def counted(h: Tensor, **how: Any) -> Any:
        factored.append(h)
        return factor(h, **how)

    monkeypatch.setattr(hessian, "factor", counted)
    model, data, counts = seeded(nn.Sequential(nn.Linear(32, 8))), [rand(64, 32)] * 8, list[int]()
    options: tuple[dict[str, Any], ...] = ({}, {"fit_scales": True, "static_groups": False, "sweeps": 1})
    for more in options:
        factored.clear()
        quantize(model, with_gptq(asymmetry=0.5, **more), data)
        counts.append(len(factored))
    assert counts[0] == counts[1] > 0


def test_convolutions_and_quantized_activations_go_the_same_way() -> None:
    model, data = cnn(), images(32, 32)
    weight = TensorSpec(format=INT3, granularity=Granularity.CHANNEL)
    config = QuantConfig(
        weight=weight, input=TensorSpec(format=UINT8), passes=(qfx.passes.fold_batch_norm,), target=Target.TORCH
    )
    nearest, found = quantize(model, config, data[:1]), quantize(model, with_gptq(config), data[:1])
    assert relative_error(found, model, data[1:]) < relative_error(nearest, model, data[1:])


def test_a_list_of_two_passes_smooths_and_rounds() -> None:
    model, data = seeded(Attention()), ids(8, 8)
    with torch.no_grad():
        model.into.weight[:, 3] *= 30
    # Smoothing is for activations in codes.
    config = RTN.replace(input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True))
    records = {
        record.name: record for record in quantize(model, with_gptq(config, SmoothQuant()), data).report().passes
    }
    assert list(records)[-5:] == ["SmoothQuant", "insert_observers", "calibrate", "convert", "GPTQ"]
    assert records["SmoothQuant"].rewrites > 0
    assert records["GPTQ"].rewrites > 0


def test_a_width_that_the_group_does_not_divide_has_a_shorter_last_group() -> None:
    model = seeded(Attention(36))
    found = quantize(model, with_gptq(), ids(8))
    assert all(not row.reason for row in found.report())
    scales = getattr_path(found.graph_module, "into.weight_scale")
    assert scales.shape == (54, 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_are_solved_in_float32(dtype: torch.dtype) -> None:
    model, data = seeded(Attention()).to(dtype), ids(8, 8)
    nearest, found = (quantize(model, config, data[:1]) for config in (RTN, with_gptq()))
    assert relative_error(found, model, data[1:]) < relative_error(nearest, model, data[1:])


def test_a_tied_weight_is_left_and_said_so() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.a(x)))
            return out

    qmodel = quantize(seeded(Twice()), with_gptq(), [rand(64, 32)])
    changes = qmodel.report().passes[-1].changes
    assert {change.what for change in changes} == {"skipped: several operators read its weight"}


def test_values_that_are_not_finite_are_named() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(x).log())
            return out

    with pytest.raises(CalibrationError, match=r"second: .* not finite; check the calibration data"):
        quantize(seeded(Breaks()), with_gptq(), [rand(8, 16)])


@pytest.mark.parametrize("options", [{"damping": 0.0}, {"damping": 2.0}, {"asymmetry": -0.1}, {"asymmetry": 1.5}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} of GPTQ must be a number"):
        GPTQ(**options)


def test_without_data_it_says_so() -> None:
    program = torch.export.export(mlp(), (tokens()[0],))
    with pytest.raises(CalibrationError, match="learns from data"):
        qfx.quantize(program, with_gptq(), None, progress=False)


# Second moments.


def test_a_hessian_is_the_sum_over_rows() -> None:
    x, real = rand(2, 300, 520), rand(2, 300, 520, seed=2)
    moment = Hessian.empty(1, 520, torch.device("cpu"), shifted=True)
    for part, exact in zip(x, real, strict=True):
        moment.add(_rows_by_group(part, LinearMap()), _rows_by_group(exact, LinearMap()))
    moment.finish(routed=False)
    rows, exact = x.reshape(-1, 520), real.reshape(-1, 520)
    torch.testing.assert_close(moment.h[0], rows.T @ rows, rtol=1e-4, atol=1e-3)
    assert moment.shift is not None
    torch.testing.assert_close(moment.shift[0], (exact - rows).T @ rows, rtol=1e-4, atol=1e-3)
    assert moment.rows.tolist() == [600]


def test_experts_have_their_own_rows_and_borrow_where_they_are_few() -> None:
    x, ends = rand(40, 8), torch.tensor([30, 30, 40])
    mapping = LinearMap(3, stacked=True)
    moment = Hessian.empty(3, 8, torch.device("cpu"), shifted=False)
    moment.add(_rows_by_group(x, mapping, ends))
    moment.finish(routed=True)
    average = x.T @ x / 40 * 8
    assert moment.rows.tolist() == [30, 0, 10]
    torch.testing.assert_close(moment.h[1], average)
    torch.testing.assert_close(moment.h[2], x[30:].T @ x[30:] + average)


# Architectures from a library; none is named in the package.

SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
DEEP = {"num_hidden_layers": 2}
GATED = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
EXPERTS = GATED | {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED | DEEP)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GATED, head_dim=8)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GATED, head_dim=8)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GATED)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**GATED, pad_token_id=0)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=64, n_positions=64)
    ),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**SIZES, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32)
    ),
    "gpt neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES, intermediate_size=64)),
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**GATED | DEEP, num_local_experts=4)),
    "qwen3 moe": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**EXPERTS)),
}


@pytest.mark.parametrize("name", all_but(ARCHITECTURES, ["qwen3", "mistral", "phi3", "gpt neox"]))
def test_every_matrix_of_a_language_model_is_rounded(name: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ARCHITECTURES[name]().eval()
    data = [{"input_ids": batch} for batch in ids(16, 16)]
    group = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=16)
    qmodel = quantize(model, W4A16_GPTQ.replace(weight=group), data)
    rows = list(qmodel.report())
    kept = {row.name: row.reason for row in rows if row.reason}
    assert {row.kind for row in rows if row.reason} == {"embedding", "linear"}
    assert sum("op:head" in reason for reason in kept.values()) == 1
    assert set(errors(qmodel)) == {row.name for row in rows if not row.reason}
    assert all(after < before for before, after in errors(qmodel).values())
    assert sum("op:router" in reason for reason in kept.values()) == {"mixtral": 2, "qwen3 moe": 1}.get(name, 0)
    # Eligible: all that is multiplied but the head, and what sends tokens to experts.
    eligible = [row for row in rows if row.kind != "embedding" and not row.reason.endswith(("op:head'", "op:router'"))]
    assert all(not row.reason for row in eligible)


LARGEST_ERRORS = {
    "w4": 0.05,
    "fp": 0.006,
    "w8": 0.003,
    **dict.fromkeys(("mxfp8_e4m3", "mxfp6_e2m3"), 0.01),
    **dict.fromkeys(("mxfp8_e5m2", "mxfp6_e3m2", "mx6"), 0.03),
    "mxfp4": 0.13,
    "mxfp4_weight_only": 0.07,
    "mxfp4_best": 0.13,
    "nvfp4": 0.1,
    "nvfp4_best": 0.1,
    "nvfp4_weight_only": 0.05,
    "mx4": 0.3,
    **dict.fromkeys(("mxint8", "bfp16", "mx9"), 0.001),
}


@pytest.mark.parametrize("preset", [name for name, config in PRESETS.items() if config.exclude])
def test_every_preset_for_language_models_keeps_the_predictions(preset: str) -> None:
    model, data, config = seeded(Attention()), ids(16, 16), PRESETS[preset]
    if preset == "w4a4_dynamic":  # three quarters of the range are for hundreds of channels; here are 32
        assert config.input is not None
        config = config.replace(input=config.input.replace(observer=None))
    qmodel = quantize(model, config, data)
    assert {row.name for row in qmodel.report() if row.reason} == {"look_up", "words"}
    # Four bits keep about 14 dB of so small a network, E4M3 with its four significant bits 23, eight bits 25.
    # Activations of 4 bits double the error of weights of 4 bits; each significant bit less is a factor of four.
    assert relative_error(qmodel, model, data) < LARGEST_ERRORS.get(preset, LARGEST_ERRORS.get(preset[:2], 0))


def test_presets_leave_what_a_server_reads_in_float() -> None:
    assert W4A16_RTN.exclude == ("op:embedding", "op:head", "op:router", "op:depthwise")
    assert W4A16_GPTQ.weight == W4A16_RTN.weight


@pytest.mark.parametrize("preset", [qfx.presets.W4A16_AWQ, qfx.presets.W8A8_DYNAMIC, qfx.presets.W4A16_GPTQ])
def test_a_weight_that_is_not_a_number_is_named(preset: QuantConfig) -> None:
    model = seeded(Attention())
    with torch.no_grad():
        model.gate.weight[3, 5] = torch.nan
    with pytest.raises(CalibrationError, match=r"weight 'gate.weight' of .*(NaN or infinity|not finite)"):
        quantize(model, preset, ids(8, 8))


def test_a_head_that_is_squashed_is_a_head() -> None:
    """Some models bend what they return: `tanh(x / 30) * 30`."""

    class Bent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            bent: Tensor = torch.tanh(self.head(torch.relu(self.body(x))) / 30) * 30
            return bent

    rows = {
        row.name: row for row in quantize(seeded(Bent()), RTN.replace(exclude=("op:head",)), [rand(2, 16)]).report()
    }
    assert rows["head"].reason == "excluded by 'op:head'"
    assert not rows["body"].reason


def test_a_head_whose_rows_are_gathered_is_a_head() -> None:
    """The number of rows is a value of its own, which the reshape reads beside the head's."""

    class Gathered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            rows: Tensor = self.head(torch.relu(self.body(x))).reshape(x.shape[0] * x.shape[1], 8)
            return rows

    qmodel = quantize(seeded(Gathered()), RTN.replace(exclude=("op:head",)), [rand(2, 5, 16)])
    rows = {row.name: row for row in qmodel.report()}
    assert rows["head"].reason == "excluded by 'op:head'"
    assert not rows["body"].reason


class Transposed(nn.Module):
    """One product with a weight stored `(inputs, outputs)`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 24) / 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight
        return y


@pytest.mark.parametrize("format", [INT4, INT16])
@pytest.mark.parametrize("model", [lambda: nn.Linear(32, 24), Transposed])
def test_the_share_of_codes_that_moved_is_counted_by_codes(format: IntFormat, model: Callable[[], nn.Module]) -> None:
    spec = TensorSpec(format=format, granularity=Granularity.CHANNEL)
    config = QuantConfig(weight=spec, target=Target.TORCH)
    network, data = seeded(model()), [rand(64, 32) @ rand(32, 32)]
    nearest, learned = (quantize(network, c, data) for c in (config, with_gptq(config, damping=1e-4)))
    old, new = ([b for b in m.graph_module.buffers() if b.dim() == 2] for m in (nearest, learned))
    old, new = ([codes for codes in found if codes.dtype == format.dtype] for found in (old, new))
    shares = [f"{float((a != b).float().mean()):.1%} of the codes" for a, b in zip(old, new, strict=True)]
    assert [change.what for change in learned.report().passes[-1].changes] == shares
    assert shares[0] != "0.0% of the codes"


def test_learning_from_one_sample_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="passes are validated on the data that they learn from"):
        quantize(seeded(nn.Linear(8, 8)), with_gptq(), [rand(1, 8)])


def test_a_recurrent_layer_is_rounded_to_nearest_and_says_so() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cells(x)[0])

    qmodel = quantize(seeded(Reads()), QuantConfig(weight=TensorSpec(format=INT4), passes=(GPTQ(),)), [rand(16, 5, 8)])
    changes = {change.name: change.what for change in qmodel.report().passes[-1].changes}
    assert "rounded to nearest" in changes["cells"]
    assert "rounded to nearest" not in changes["head"]
