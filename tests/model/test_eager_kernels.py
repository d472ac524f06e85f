"""`eager(kernels=True)`: torch's kernels compute what the simulated model does, or the report says why not."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Residual, quantize, rand, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import has_torch_function
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, TensorSpec
from quark_fx.model.kernels import integers, one_row, row_graphs
from quark_fx.model.kernels.in_place import _is_last
from quark_fx.model.kernels.lowering import KernelReport
from quark_fx.model.kernels.modules import CodeEmbedding, KernelLinear
from quark_fx.model.kernels.product import Product
from quark_fx.model.kernels.residual import CONVOLVE_ONTO
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8, INT16, UINT8
from quark_fx.numbers.qparams import Symmetry
from quark_fx.passes import SmoothQuant
from quark_fx.presets import INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY

CHANNEL = TensorSpec(format=INT8, granularity=Granularity.CHANNEL)
TOKEN = TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True)
GROUPS = TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=32)
STATIC = QuantConfig(weight=CHANNEL, input=TensorSpec(format=UINT8))
NARROW = CHANNEL.replace(reduce_range=True)
"""Sums of pairs of any 8-bit codes fit 16 bits, so that every x64 processor has kernels."""
PER_TOKEN = STATIC.replace(weight=NARROW, input=TOKEN)
LOOP, PRODUCT = "loop over codes", "aten._int_mm"

ROWS = rand(2, 3, 128)


@pytest.fixture
def compiler() -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++", "cl")):
        pytest.skip("Inductor needs a C++ compiler")


@pytest.fixture(autouse=True)
def _uncompiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as it is what is compiled elsewhere, which takes seconds."""
    if "compiler" not in request.fixturenames:
        monkeypatch.setattr(one_row, "finds_compiler", lambda: True)
        monkeypatch.setattr(row_graphs, "finds_compiler", lambda: True)
        monkeypatch.setattr(one_row, "_compile", lambda function, given: function)
        monkeypatch.setattr(one_row, "_COMPILED", {})
        monkeypatch.setattr(one_row.Computation, "_known", {})


@cache
def layer_session() -> qfx.Session:
    """Return what the quantizations of one layer share."""
    return qfx.Session(seeded(one_layer()), [ROWS, rand(2, 3, 128, seed=2)])


def of_layer(config: QuantConfig) -> tuple[nn.Module, Any, KernelReport]:
    """Return the simulated layer, the one with kernels and its report."""
    qmodel = quantize(layer_session(), config)
    kernels: Any = qmodel.eager(kernels=True)
    return qmodel.eager(), kernels, kernels.kernel_report


def both(model: nn.Module, config: QuantConfig, x: Tensor) -> tuple[nn.Module, Any, KernelReport]:
    """Return the simulated model, the one with kernels and its report."""
    qmodel = quantize(seeded(model).to(x.dtype), config, [x, rand(*x.shape, seed=2).to(x.dtype)])
    kernels: Any = qmodel.eager(kernels=True)
    return qmodel.eager(), kernels, kernels.kernel_report


def one_layer(inputs: int = 128, outputs: int = 32) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs))


def require_close(simulated: nn.Module, kernels: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        expected, got = simulated(x), kernels(x)
    # Both round at most 145 sums, none above the magnitudes of what is added, which are 16 of the largest result here.
    bound = 145 * 16 * 2**-24 * float(expected.abs().max()) if expected.numel() else 0
    torch.testing.assert_close(got, expected, rtol=0, atol=bound)


CASES: dict[str, tuple[str, QuantConfig]] = {
    "int8": (LOOP, INT8_WEIGHT_ONLY),
    "int4 in groups of 32": (LOOP, QuantConfig(weight=GROUPS)),
    "int4 in groups of 128": (LOOP, QuantConfig(weight=GROUPS.replace(group_size=128))),
    "int4 with zero points": (LOOP, QuantConfig(weight=GROUPS.replace(symmetry=Symmetry.ASYMMETRIC))),
    "static": (PRODUCT, STATIC),
    "static, signed": (PRODUCT, STATIC.replace(input=TensorSpec(format=INT8))),
    "static, int4": (PRODUCT, STATIC.replace(weight=NARROW, input=TensorSpec(format=INT4))),
    "dynamic": (PRODUCT, INT8_DYNAMIC),
    "dynamic by token": (PRODUCT, PER_TOKEN),
}


@pytest.mark.parametrize("name", CASES)
def test_a_layer_computes_what_the_simulated_one_does(name: str) -> None:
    kernel, config = CASES[name]
    simulated, kernels, report = of_layer(config)
    assert [row.kernel for row in report] == [kernel], str(report)
    assert isinstance(kernels[0], KernelLinear)
    for x in (ROWS, 3 * rand(5, 1, 128, seed=3), ROWS[:1, :1], rand(4, 128)):
        require_close(simulated, kernels, x)
    if name != "dynamic":  # nothing has no largest value
        require_close(simulated, kernels, ROWS[:, :0])


def test_layers_of_gpt2_are_linear() -> None:
    simulated, kernels, report = both(nn.Sequential(Conv1D(32, 128)), QuantConfig(weight=GROUPS), ROWS)
    assert [row.kernel for row in report] == [LOOP]
    require_close(simulated, kernels, ROWS)


@pytest.mark.parametrize("config", [QuantConfig(weight=GROUPS), INT8_WEIGHT_ONLY], ids=["int4", "int8"])
def test_bfloat16_models_have_the_kernels_of_torch(config: QuantConfig) -> None:
    simulated, kernels, report = both(one_layer(), config, ROWS.bfloat16())
    assert all(row.kernel.startswith("aten._weight_int") for row in report)
    for x in (ROWS.bfloat16(), ROWS[:1, :1].bfloat16()):
        with torch.no_grad():
            expected, got = simulated(x).float(), kernels(x).float()
        # Scale, weight, product and bias are rounded to 8 bits here or there.
        torch.testing.assert_close(got, expected, rtol=0, atol=2**-6 * float(expected.abs().max()))


REASONS: dict[str, QuantConfig] = {
    "its activation is int16": STATIC.replace(weight=NARROW, input=TensorSpec(format=INT16)),
    "its weight is fp8_e4m3": STATIC.replace(weight=CHANNEL.replace(format=FP8_E4M3)),
    "its weight has a scale for each group": STATIC.replace(weight=GROUPS),
    "its weight has zero points": STATIC.replace(weight=CHANNEL.replace(symmetry=Symmetry.ASYMMETRIC)),
    "there are kernels for integers": QuantConfig(weight=CHANNEL.replace(format=FP8_E4M3)),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_has_no_kernel_is_simulated_and_says_why_in_the_words_of_compile(reason: str) -> None:
    qmodel = quantize(layer_session(), REASONS[reason])
    kernels: Any = qmodel.eager(kernels=True)
    (row,), (other,) = kernels.kernel_report, qmodel.compile().report()
    assert reason in row.reason
    assert row == other
    assert reason in str(kernels.kernel_report)
    assert torch.equal(kernels(ROWS), qmodel.eager()(ROWS))


def test_each_operator_falls_back_alone() -> None:
    config = STATIC.replace(overrides=(Override(pattern="1", input=TensorSpec(format=INT16)),))
    simulated, kernels, report = both(nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)), config, ROWS)
    assert [row.kernel for row in report] == [PRODUCT, ""]
    require_close(simulated, kernels, ROWS)


def test_layers_of_one_shape_that_round_differently_have_a_graph_each() -> None:
    config = STATIC.replace(weight=NARROW, overrides=(Override(pattern="1", input=TensorSpec(format=INT4)),))
    simulated, kernels, report = both(nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128)), config, ROWS)
    assert [row.kernel for row in report] == [PRODUCT, PRODUCT]
    require_close(simulated, kernels, ROWS)


def test_other_dtypes_are_simulated() -> None:
    simulated, kernels, (row,) = both(one_layer(), INT8_WEIGHT_ONLY, ROWS.half())
    assert "computes in float16" in row.reason
    assert torch.equal(kernels(ROWS.half()), simulated(ROWS.half()))


def saturating() -> tuple[nn.Module, Tensor]:
    """Return a layer with weights all alike, and inputs: sums of pairs of their largest codes exceed 16 bits."""
    model = one_layer()
    with torch.no_grad():
        model[0].weight.fill_(1)  # type: ignore[index]
        model[0].bias.zero_()  # type: ignore[index]
    return model.eval(), ROWS.abs()


def test_sums_that_saturate_on_this_processor_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits of signed codes become eight on the way, because oneDNN adds 128 to them."""
    monkeypatch.setattr(integers, "adds_pairs", lambda packed=True: not packed)
    model, x = saturating()
    session = qfx.Session(model, [x])
    for activation in (TensorSpec(format=UINT8), TensorSpec(format=INT4)):
        qmodel = quantize(session, STATIC.replace(input=activation, target="onnx_vnni"))
        kernels: Any = qmodel.eager(kernels=True)
        (row,) = kernels.kernel_report
        assert "saturate" in row.reason
        assert torch.equal(kernels(x), qmodel.eager()(x))
    limited: Any = quantize(session, STATIC.replace(target="onnx")).eager(kernels=True)
    assert [row.kernel for row in limited.kernel_report] == [PRODUCT]


def test_this_processor_is_asked_whether_sums_saturate() -> None:
    """Largest codes on both sides: wrong sums, or a kernel that is refused."""
    model, x = saturating()
    qmodel = quantize(model, STATIC.replace(target="onnx_vnni"), [x])
    kernels: Any = qmodel.eager(kernels=True)
    assert [row.integer for row in kernels.kernel_report] == [integers.has_kernels() and not integers.adds_pairs(False)]
    require_close(qmodel.eager(), kernels, x)


def test_other_processors_have_no_integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    simulated, kernels, (row,) = of_layer(STATIC)
    assert "x64" in row.reason
    assert torch.equal(kernels(ROWS), simulated(ROWS))


def test_without_a_compiler_there_are_no_loops_over_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_row, "finds_compiler", lambda: False)
    monkeypatch.setattr(row_graphs, "finds_compiler", lambda: False)
    monkeypatch.setattr(one_row, "_compile", None)
    simulated, kernels, (row,) = of_layer(INT8_WEIGHT_ONLY)
    assert "C++ compiler" in row.reason
    assert torch.equal(kernels(ROWS), simulated(ROWS))
    simulated, kernels, (row,) = of_layer(STATIC)
    assert row.integer
    require_close(simulated, kernels, ROWS[:1, :1])


def test_weights_elsewhere_than_on_a_cpu_have_no_kernel() -> None:
    gm = quantize(layer_session(), STATIC).to("meta").graph_module
    (product,) = (product for node in gm.graph.nodes if (product := Product.of(gm, node)) is not None)
    graph, row = row_graphs.RowGraphs().of(product)
    assert graph is None
    assert row.reason == "its weight is on meta; there are kernels for CPUs and NVIDIA GPUs"


class Tied(nn.Module):
    """A table that is a weight, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(16, 32), nn.LayerNorm(32), nn.Linear(32, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.table(ids)))
        return y


def test_a_tied_weight_has_a_kernel_in_both_modules() -> None:
    ids = torch.tensor([[1, 2, 3]])
    qmodel = quantize(seeded(Tied()), INT8_WEIGHT_ONLY, [ids])
    kernels: Any = qmodel.eager(kernels=True)
    assert isinstance(kernels.table, CodeEmbedding)
    assert isinstance(kernels.head, KernelLinear)
    require_close(qmodel.eager(), kernels, ids)


class Shared(nn.Module):
    """Layers: one that is called twice, a subclass, one with hooks, and two and a table that are read elsewhere."""

    class Own(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.own, self.hooked = nn.Linear(32, 32), self.Own(32, 32), nn.Linear(32, 32)
        self.weight, self.bias, self.table = nn.Linear(32, 32), nn.Linear(32, 32), nn.Embedding(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.hooked(self.own(self.twice(self.twice(x))))
        y = F.linear(self.weight(y), self.weight.weight)
        y = torch.maximum(self.bias(y), self.bias.bias)
        return F.linear(torch.maximum(y, self.table(torch.zeros(1, dtype=torch.int64))), self.table.weight)


def test_layers_that_are_not_one_product_are_simulated() -> None:
    model = seeded(Shared())
    model.hooked.register_forward_hook(lambda module, args, result: 2 * result)
    x = rand(2, 3, 32)
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [x])
    kernels: Any = qmodel.eager(kernels=True)
    reasons = [row.reason for row in kernels.kernel_report]
    outside = "read outside of its module"
    expected = (
        "several places",
        "several places",
        "class Own",
        "hooks",
        outside,
        "class Shared",
        outside,
        "class Shared",
    )
    for reason, words in zip(reasons, expected, strict=True):
        assert words in reason
    assert torch.equal(kernels(x), qmodel.eager()(x))


def test_code_that_asks_for_a_weight_learns_its_shape_and_cannot_compute_with_it() -> None:
    _, kernels, _ = of_layer(INT8_WEIGHT_ONLY)
    layer = kernels[0]
    assert (layer.weight.shape, layer.weight.dtype, layer.weight.device.type) == ((32, 128), torch.float32, "cpu")
    # What nn.TransformerEncoderLayer asks before it multiplies by the weights of its layers itself.
    assert has_torch_function((layer.weight, layer.bias))
    with pytest.raises(qfx.QuarkError, match="only its kernels can read them"):
        F.linear(ROWS, layer.weight)


def test_convolutions_are_simulated() -> None:
    x = rand(2, 4, 6, 6)
    qmodel = quantize(seeded(Residual(4)), INT8_STATIC, [x])
    kernels: Any = qmodel.eager(kernels=True)
    assert not any(row.kernel for row in kernels.kernel_report)
    assert torch.equal(kernels(x), qmodel.eager()(x))


def test_recurrent_layers_are_simulated_and_listed() -> None:
    x = rand(3, 2, 8)
    qmodel = quantize(seeded(nn.Sequential(nn.GRU(8, 8))), INT8_DYNAMIC, [x])
    kernels: Any = qmodel.eager(kernels=True)
    assert [(row.name, row.reason) for row in kernels.kernel_report] == [
        ("0", "torch has no kernel for gru with quantized weights")
    ]
    assert torch.equal(kernels(x)[0], qmodel.eager()(x)[0])


class Gated(nn.Module):
    """Two layers that read what no norm makes, so that a pass has to multiply it at run time."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.sigmoid(x)
        return self.a(x) * self.b(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_a_pass_multiplies_by_is_multiplied_by_once(dynamic: bool) -> None:
    batches = [rand(64, 16, seed=i) * torch.logspace(-2, 2, 16) for i in range(4)]
    base = INT8_DYNAMIC if dynamic else INT8_STATIC
    qmodel = quantize(seeded(Gated()), base.replace(passes=(SmoothQuant(explicit=True),)), batches)
    assert [node for node in qmodel.graph_module.graph.nodes if node.meta.get("factor")]
    kernels: Any = qmodel.eager(kernels=True)
    assert all(row.kernel for row in kernels.kernel_report)
    require_close(qmodel.eager(), kernels, batches[0])


TABLES = {
    "rows": CHANNEL,
    "groups": GROUPS,
    "one scale": TensorSpec(format=INT8),
    "zero points": CHANNEL.replace(symmetry=Symmetry.ASYMMETRIC),
    "fp8": CHANNEL.replace(format=FP8_E4M3),
}


IDS = torch.randint(0, 40, (2, 7), generator=torch.Generator().manual_seed(1))


@cache
def table_session() -> qfx.Session:
    return qfx.Session(seeded(nn.Sequential(nn.Embedding(40, 64))), [IDS])


@pytest.mark.parametrize("name", TABLES)
def test_codes_that_are_looked_up_have_the_bits_of_the_whole_table(name: str) -> None:
    ids = IDS
    qmodel = quantize(table_session(), QuantConfig(weight=TABLES[name]))
    kernels: Any = qmodel.eager(kernels=True)
    assert isinstance(kernels[0], CodeEmbedding)
    for given in (ids, ids[0, 0].int(), ids[:, :0]):
        assert torch.equal(kernels(given), qmodel.eager()(given))
    with pytest.raises(IndexError):
        kernels(ids - 40)


# A language model that counts.

CONFIGS = {
    "int8": INT8_WEIGHT_ONLY,
    "int4": INT4_WEIGHT_ONLY,
    "dynamic": INT8_DYNAMIC,
    "static": INT8_STATIC,
    "int4 and its cache": INT4_WEIGHT_ONLY.replace(kv_cache=TOKEN),
}


@cache
def counting() -> tuple[LlamaForCausalLM, qfx.Session]:
    """Return a Llama that counts, and what its quantizations share.

    Its blocks add little to the embedding of a number, and its head has that at the next number.
    """
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(rand(32, 64))
        model.lm_head.weight.copy_(rand(32, 64).roll(1, 0))
    return model, qfx.Session(model, [{"input_ids": torch.arange(48).reshape(4, 12) % 32}])


@cache
def quantized(name: str) -> tuple[qfx.QuantizedModel, Any, Any]:
    """Return a quantized Llama, its simulated form and the one with kernels."""
    qmodel = quantize(counting()[1], CONFIGS[name])
    return qmodel, qmodel.eager(), qmodel.eager(kernels=True)


def generated(model: nn.Module, ids: Tensor, **options: object) -> Tensor:
    found: Tensor = model.generate(ids, max_new_tokens=8, do_sample=False, **options)  # type: ignore[operator]
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_language_model_generates_the_tokens_of_the_simulated_one(name: str) -> None:
    _, simulated, kernels = quantized(name)
    assert type(kernels) is LlamaForCausalLM
    expected = PRODUCT if CONFIGS[name].input is not None else LOOP
    assert {row.kernel for row in kernels.kernel_report} == {expected}
    assert len(kernels.kernel_report.rows) == 8
    one, several = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 28, 29], [3, 4, 5, 6]])
    options = {"attention_mask": (several != 0).long()}
    assert torch.equal(generated(kernels, one), generated(simulated, one))
    assert generated(kernels, one)[0, 3:].tolist() == list(range(8, 16))
    assert torch.equal(generated(kernels, several, **options), generated(simulated, several, **options))
    with torch.inference_mode():
        again = kernels(one).logits
        logits = simulated(one).logits
    # A sum in another order turns the value of an activation over to the next of 255 codes, here and there.
    bound = 2**-18 if CONFIGS[name].input is None and CONFIGS[name].kv_cache is None else 2**-5
    torch.testing.assert_close(again, logits, rtol=0, atol=bound * float(logits.abs().max()))


def test_a_loaded_model_takes_a_float_one(tmp_path: Path) -> None:
    qmodel, _, kernels = quantized("int4")
    qmodel.save(tmp_path)
    again = qfx.load(tmp_path).eager(counting()[0], kernels=True)
    assert kernels.kernel_report == again.kernel_report
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(kernels(ids).logits, again(ids).logits)


def test_layers_that_compute_alike_share_what_is_compiled() -> None:
    layers = [module for module in quantized("int4")[2].modules() if isinstance(module, KernelLinear)]
    shapes = {(layer.in_features, layer.out_features) for layer in layers}
    assert len({id(layer._computation) for layer in layers}) == len(shapes)


def test_torch_compile_traces_codes_and_kernels_without_a_break() -> None:
    model = nn.Sequential(nn.Embedding(40, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 16))
    config = INT8_WEIGHT_ONLY.replace(overrides=(Override(pattern="3", weight=NARROW, input=TOKEN),))
    kernels: Any = quantize(seeded(model), config, [IDS]).eager(kernels=True)
    assert [row.kernel for row in kernels.kernel_report] == [LOOP, PRODUCT]
    compiled = torch.compile(kernels, backend="eager", fullgraph=True)
    for given in (IDS, IDS[:1, :1]):
        assert torch.equal(compiled(given), kernels(given))  # type: ignore[no-untyped-call]


def test_it_is_for_inference() -> None:
    kernels = quantized("int4")[2]
    assert not any(p.requires_grad for p in kernels.parameters())
    with pytest.raises(qfx.QuarkError, match="is for inference; to train it"):
        kernels.train()
    assert not kernels.eval().training
    x = rand(1, 2, 64).requires_grad_()
    with pytest.raises(qfx.QuarkError, match="do not support gradients"):
        kernels(inputs_embeds=x)
    with torch.no_grad():
        kernels(inputs_embeds=x)
    with pytest.raises(qfx.QuarkError, match=r"computes in torch\.float32, but its input is torch\.float64"):
        kernels.lm_head(x.detach().double())
    with pytest.raises(qfx.QuarkError, match="reads rows of 64 values, but its input has rows of 1"):
        kernels.lm_head(x.detach()[..., :1])


def test_it_keeps_its_dtypes_and_stays_where_it_is() -> None:
    kernels = quantized("int4")[2]
    before = kernels(torch.tensor([[5]])).logits
    for convert in (kernels.half, kernels.bfloat16, kernels.double, lambda: kernels.to("meta")):
        with pytest.raises(RuntimeError, match="cannot change its dtypes or device"):
            convert()
    assert kernels.float().cpu() is kernels
    assert torch.equal(kernels(torch.tensor([[5]])).logits, before)
    halves = both(one_layer(), INT8_WEIGHT_ONLY, ROWS.bfloat16())[1]
    with pytest.raises(RuntimeError, match="cannot change its dtypes"):
        halves.float()


def test_a_refusal_leaves_what_comes_before_the_kernels_as_it_was() -> None:
    model = seeded(nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 64)))
    kernels: Any = quantize(model, INT8_WEIGHT_ONLY, [ROWS]).eager(kernels=True)
    expected = kernels(ROWS)
    for one in (kernels, copy.deepcopy(kernels)):
        with pytest.raises(RuntimeError, match="cannot change its dtypes"):
            one.half()
        assert torch.equal(one(ROWS), expected)


def test_models_of_two_dtypes_share_no_compiled_code() -> None:
    """Code for float32 rows would read bfloat16 ones as it reads its own."""
    group = QuantConfig(weight=CHANNEL.replace(granularity=Granularity.GROUP, group_size=32), target=qfx.Target.TORCH)
    made = []
    for dtype in (torch.float32, torch.bfloat16):
        model = seeded(nn.Sequential(nn.Linear(64, 48))).to(dtype)
        made.append(quantize(model, group, [rand(2, 64).to(dtype)]).eager(kernels=True))
    first, second = (model.get_submodule("0") for model in made)
    assert isinstance(first, KernelLinear)
    assert isinstance(second, KernelLinear)
    assert first._computation is not second._computation


def test_its_state_is_that_of_the_quantized_model(tmp_path: Path) -> None:
    _, simulated, kernels = quantized("int4")
    for call in (kernels.state_dict, lambda: kernels.load_state_dict(simulated.state_dict(), strict=False)):
        with pytest.raises(
            qfx.QuarkError,
            match="has no state_dict, because its weights are packed for the kernels; save the quantized model",
        ):
            call()
    with pytest.raises(qfx.QuarkError, match="cannot be pickled"):
        pickle.dumps(kernels)
    with pytest.raises(qfx.QuarkError, match=r"export\.huggingface"):
        kernels.save_pretrained(tmp_path)
    with pytest.raises(qfx.QuarkError, match="quantize the original float model"):
        qfx.Session(kernels, [{"input_ids": torch.tensor([[5]])}])


def test_copies_compute_the_same_and_the_quantized_model_stays_as_it_is() -> None:
    qmodel = quantize(layer_session(), STATIC)
    names, code, expected = set(qmodel.state_dict()), qmodel.graph_module.code, qmodel.eager()(ROWS)
    kernels: Any = qmodel.eager(kernels=True)
    again = copy.deepcopy(kernels)
    assert torch.equal(again(ROWS), kernels(ROWS))
    assert again.kernel_report == kernels.kernel_report
    assert (set(qmodel.state_dict()), qmodel.graph_module.code) == (names, code)
    before = kernels(ROWS)
    qmodel.load_state_dict({name: tensor * 2 + 1 for name, tensor in qmodel.state_dict().items()})
    assert not torch.equal(qmodel(ROWS), expected)
    assert torch.equal(kernels(ROWS), before)
    assert not any(parametrize.is_parametrized(module) for module in kernels.modules())


def test_what_is_compiled_computes_the_same(compiler: None) -> None:
    """The one test that waits for a compiler."""
    config = QuantConfig(weight=GROUPS, overrides=(Override(pattern="1", weight=NARROW, input=TOKEN),))
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    simulated, kernels, report = both(model, config, rand(2, 3, 32))
    assert [row.kernel for row in report] == [LOOP, PRODUCT]
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(kernels, [rand(1, 1, 64, seed=4)[..., ::2]] * 2):
            torch.testing.assert_close(found, simulated(rand(1, 1, 64, seed=4)[..., ::2]))
    for x in (rand(1, 1, 32), rand(2, 3, 32), rand(32, 1, seed=4).t()):
        require_close(simulated, kernels, x)


def test_code_is_compiled_for_each_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def compile_(function: Any, given: Any) -> Any:
        made.append(torch.get_num_threads())
        return function

    monkeypatch.setattr(one_row, "_compile", compile_)
    function, threads = one_row.Compiled(torch.neg), torch.get_num_threads()
    try:
        for number in (1, 2, 1):
            torch.set_num_threads(number)
            assert function(torch.ones(1)) == -1
    finally:
        torch.set_num_threads(threads)
    assert made == [1, 2]


@pytest.mark.parametrize("view", [False, True])
def test_a_convolution_writes_over_no_view(view: bool) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    onto = graph.call_function(torch.ops.aten.relu.default, (x,))
    onto = graph.call_function(torch.ops.aten.view.default, (onto, [4])) if view else onto
    reader = graph.call_function(CONVOLVE_ONTO, (x, *[None] * 5, onto))
    assert _is_last(onto, reader) is not view
