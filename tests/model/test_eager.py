"""The original model again, of its own class, computes what the quantized graph computes, or an error says why not."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from tiny import Residual, calls, images, quantize, rand, seeded, thinned, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import quark_fx as qfx
from quark_fx.config.quant_config import Granularity, Override, QuantConfig, Target, TensorSpec
from quark_fx.graph.nodes import target_name
from quark_fx.graph.pass_manager import pass_name
from quark_fx.model.correspondence import correspond
from quark_fx.model.eager import Rewritten
from quark_fx.numbers.formats import FP8_E4M3, INT4, INT8
from quark_fx.numbers.quantized_tensor import QuantizedTensor
from quark_fx.passes import AWQ, CrossLayerEqualization, SmoothQuant, harden_sigmoids
from quark_fx.presets import BF16, FP8_STATIC, INT4_WEIGHT_ONLY, INT8_DYNAMIC, INT8_STATIC, INT8_WEIGHT_ONLY, XINT8

PER_TOKEN = INT8_DYNAMIC.replace(input=TensorSpec(format=INT8, granularity=Granularity.TOKEN, dynamic=True))


class Layer(nn.Module):
    """A residual block with its own parameters under names no attribute syntax spells, and a stored product."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"in-0": nn.Linear(16, 24), "out_0": nn.Linear(24, 16)})
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(x)
        return x + self.parts["out_0"](torch.relu(self.parts["in-0"](h)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Embedding, two blocks, a head that may be tied to the embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(16, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def language(*, tied: bool = False) -> Language:
    return seeded(Language(tied=tied))


def require_same(qmodel: qfx.QuantizedModel, model: nn.Module, *batches: Any) -> None:
    """Equal to the bit: the same operators run on the same values."""
    for batch in batches:
        with torch.no_grad():
            torch.testing.assert_close(model(batch), qmodel(batch), rtol=0, atol=0)


def codes_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.state_dict().items() if name.endswith(".original") and p.dtype == torch.int8}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "config",
    [
        *(INT8_WEIGHT_ONLY, INT4_WEIGHT_ONLY, INT8_DYNAMIC, PER_TOKEN, INT8_STATIC, FP8_STATIC, BF16),
        INT8_STATIC.replace(passes=(*INT8_STATIC.passes, SmoothQuant(), CrossLayerEqualization())),
        INT4_WEIGHT_ONLY.replace(passes=(*INT4_WEIGHT_ONLY.passes, AWQ())),
    ],
    ids=["w8", "w4", "dynamic", "token", "static", "fp8", "bf16", "equalized", "awq"],
)
def test_the_model_computes_what_the_graph_computes(config: QuantConfig, tied: bool) -> None:
    model = language(tied=tied)
    qmodel = quantize(model, config, tokens())
    eager = qmodel.eager()
    assert type(eager) is Language
    assert not eager.training
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    assert all(p.shape == shapes[name] for name, p in eager.state_dict().items() if name in shapes)
    require_same(qmodel, eager, *tokens(4, 1, 6))


def test_the_state_holds_codes_and_the_float_weights_are_gone() -> None:
    model = language()
    eager = qfx.quantize(model, INT8_WEIGHT_ONLY, tokens(), progress=False).eager()
    assert len(codes_of(eager)) == 6
    assert not {
        name for name, p in eager.state_dict().items() if p.is_floating_point() and p.dim() > 1 and p.shape[1] > 1
    }
    assert {p.data_ptr() for p in eager.parameters()}.isdisjoint(p.data_ptr() for p in model.parameters())


def test_a_copy_computes_the_same_and_pickling_is_refused() -> None:
    qmodel = quantize(language(), INT8_DYNAMIC, tokens())
    for eager in (qmodel.eager(), qfx.prepare_qat(qmodel).eager()):
        require_same(qmodel, copy.deepcopy(eager), tokens()[0])
        with pytest.raises(qfx.QuarkError, match=r"qmodel\.save\(directory\).*load\(directory\)\.eager"):
            pickle.dumps(eager)


def test_it_is_its_own_whatever_happens_to_the_model_and_the_graph() -> None:
    model = language()
    qmodel = quantize(model, INT8_WEIGHT_ONLY, tokens())
    eager, expected = qmodel.eager(), qmodel(tokens()[0])
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    require_same(qmodel, qmodel.eager(), tokens()[0])
    for buffer in qmodel.buffers():
        buffer.zero_()
    torch.testing.assert_close(eager(tokens()[0]), expected, rtol=0, atol=0)


def test_a_copy_knows_its_module_and_a_loaded_model_takes_one(tmp_path: Path) -> None:
    qmodel = quantize(language(tied=True), INT8_STATIC, tokens())
    require_same(qmodel, copy.deepcopy(qmodel).eager(), tokens()[0])
    qmodel.save(tmp_path)
    loaded = qfx.load(tmp_path)
    with pytest.raises(qfx.QuarkError, match="float model of the same architecture"):
        loaded.eager()
    require_same(qmodel, loaded.eager(seeded(Language(tied=True), 7)), *tokens(4, 1))
    with pytest.raises(qfx.QuarkError):
        loaded.eager(nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 11)).eval())


def test_a_tied_weight_parts_where_its_readers_differ() -> None:
    for override in (
        Override(pattern="op:embedding", weight=None),
        Override(pattern="op:embedding", weight=TensorSpec(format=INT4, granularity=Granularity.CHANNEL)),
        Override(pattern="op:linear", weight=None),
    ):
        qmodel = quantize(language(tied=True), INT8_WEIGHT_ONLY.replace(overrides=(override,)), tokens())
        eager: Any = qmodel.eager()
        require_same(qmodel, eager, *tokens(4, 1))
        assert not torch.equal(eager.embed.weight, eager.head.weight)


class Unread(Language):
    """The tied weight has a third name, that of a module which nothing calls, as in BART and T5."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__(tied=True)
        self.shared = shared
        self.shared.weight = self.embed.weight


@pytest.mark.parametrize("trained", [False, True], ids=["fixed", "trained"])
def test_a_tied_weight_that_no_module_reads_is_what_it_is_in_one_of_its_class(trained: bool) -> None:
    for shared, name in ((nn.Embedding(11, 16), "embed"), (nn.Linear(16, 11, bias=False), "head")):
        qmodel = quantize(seeded(Unread(shared)), INT4_WEIGHT_ONLY, tokens())
        eager: Any = (qfx.prepare_qat(qmodel) if trained else qmodel).eager()
        require_same(qmodel, eager, *tokens(4, 1))
        assert torch.equal(eager.shared.weight, eager.get_submodule(name).weight)
        assert not torch.equal(eager.embed.weight, eager.head.weight)


def test_tied_codes_are_stored_once() -> None:
    eager: Any = quantize(language(tied=True), INT8_WEIGHT_ONLY, tokens()).eager()
    codes = [module.parametrizations.weight.original for module in (eager.embed, eager.head)]
    assert codes[0] is codes[1]


class Borrowed(nn.Module):
    """The head is the embedding's own parameter, read by the parent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.embed(ids)) @ self.embed.weight.t()  # type: ignore[no-any-return]


def test_a_parameter_that_cannot_be_two_things_is_refused() -> None:
    model = seeded(Borrowed())
    qmodel = quantize(model, INT8_WEIGHT_ONLY, tokens())
    require_same(qmodel, qmodel.eager(), *tokens(4, 1))
    for weight in (None, TensorSpec(format=INT8)):
        override = Override(pattern="op:embedding", weight=weight)
        qmodel = quantize(model, INT8_WEIGHT_ONLY.replace(overrides=(override,)), tokens())
        with pytest.raises(qfx.QuarkError, match=r"embed\.weight.*same specs"):
            qmodel.eager()


class Shared(nn.Module):
    """One module called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


def test_a_module_called_twice_has_one_weight_but_may_not_have_two_input_ranges() -> None:
    model = seeded(Shared())
    for config in (INT8_WEIGHT_ONLY, PER_TOKEN):
        qmodel = quantize(model, config, [rand(4, 8)])
        require_same(qmodel, qmodel.eager(), rand(3, 8))
    with pytest.raises(qfx.QuarkError, match=r"linear.*if all of its calls round it equally"):
        quantize(model, INT8_STATIC.replace(bias=None), [rand(4, 8)]).eager()


class Functional(nn.Module):
    """A product with a parameter of its own, beside a use of the input in float."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(x, self.matrix)


class StateSpace(nn.Module):
    """A projection cut in two, a function on the kernel of a convolution, and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(16, 32), nn.Linear(16, 16)
        self.conv = nn.Conv1d(16, 16, 4, groups=16, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        gate, x = self.into(x).chunk(2, dim=-1)
        kernel = self.conv.weight.squeeze(1)
        x = F.conv1d(x.mT, kernel.unsqueeze(1), self.conv.bias, padding=3, groups=16)[..., : x.shape[1]]
        result: Tensor = self.out(F.silu(x).mT * gate)
        return result


@pytest.mark.parametrize(
    "config", [INT8_DYNAMIC, INT8_STATIC, FP8_STATIC, BF16], ids=["dynamic", "static", "fp8", "bf16"]
)
def test_a_convolution_that_is_no_module_call_needs_no_module_to_round_for_it(config: QuantConfig) -> None:
    qmodel = quantize(seeded(nn.Sequential(StateSpace())), config, [rand(2, 9, 16)])
    require_same(qmodel, qmodel.eager(), rand(2, 9, 16, seed=2))


def test_rounding_what_a_module_also_reads_in_float_is_refused() -> None:
    model = nn.Sequential(seeded(Functional()), nn.Linear(8, 8)).eval()
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(4, 8)])
    require_same(qmodel, qmodel.eager(), rand(3, 8))
    with pytest.raises(
        qfx.QuarkError, match=r"aten\.linear.*test_eager\.py.*module 0.*only the single input of a module.*input=None"
    ):
        quantize(model, PER_TOKEN, [rand(4, 8)]).eager()


@pytest.mark.parametrize("pass_", [SmoothQuant(explicit=True), AWQ(explicit=True)], ids=["smooth", "awq"])
def test_a_multiplication_that_a_pass_inserted_is_done_where_modules_read(pass_: Any, tmp_path: Path) -> None:
    """One multiplication is read by two linear layers."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = x * torch.sigmoid(x)
            return self.out(torch.sigmoid(self.a(x) * self.b(x)))  # type: ignore[no-any-return]

    x = [rand(64, 16, seed=i) * torch.logspace(-2, 2, 16) for i in range(4)]
    base = INT8_STATIC if isinstance(pass_, SmoothQuant) else INT4_WEIGHT_ONLY
    qmodel = quantize(seeded(Pair()), base.replace(passes=(pass_,)), x)
    assert [n for n in qmodel.graph_module.graph.nodes if target_name(n) == "aten.mul.Tensor" and n.meta.get("factor")]
    require_same(qmodel, qmodel.eager(), x[0])
    qmodel.save(tmp_path)
    require_same(qmodel, qfx.load(tmp_path).eager(seeded(Pair(), 7)), x[0])


class Around(nn.Module):
    """A convolution, something without parameters, another convolution."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.a, self.act, self.b = nn.Conv2d(3, 4, 3), act, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.act(self.a(x)))  # type: ignore[no-any-return]


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


REWRITTEN: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "hardswish": lambda: nn.Hardswish(inplace=True),
    "hardsigmoid": nn.Hardsigmoid,
    "leaky_relu": lambda: nn.LeakyReLU(0.1),
    "avg_pool2d": lambda: nn.AvgPool2d(3),
    "adaptive_avg_pool2d": lambda: nn.AdaptiveAvgPool2d(1),
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "several": lambda: Apply(lambda x: torch.tanh(F.silu(x) * 2) + x),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_rewrite_stays_in_its_module(name: str, tmp_path: Path) -> None:
    model = seeded(Around(REWRITTEN[name]()))
    qmodel = quantize(model, XINT8, images())
    eager: Any = qmodel.eager()
    assert isinstance(eager.act, Rewritten) == (name not in ("relu", "relu6"))
    require_same(qmodel, eager, *images(4, 1))
    require_same(qmodel, copy.deepcopy(eager), images()[0])
    qmodel.save(tmp_path)
    require_same(qmodel, qfx.load(tmp_path).eager(seeded(Around(REWRITTEN[name]()), 7)), *images(4, 1))
    assert type(model.act) is type(REWRITTEN[name]())


def test_a_rewritten_module_is_exported_and_keeps_its_dtype() -> None:
    qmodel = quantize(seeded(Around(nn.SiLU())), XINT8, images())
    eager = qmodel.eager()
    names = [target_name(node) for node in torch.export.export(eager, (images()[0],)).graph.nodes]
    assert names.count("aten.sigmoid.default") == 1
    # input, convolution, sigmoid where there is none for a DPU: none, product, result
    assert names.count("quark_fx.quantize.default") == len(calls(qmodel, "quark_fx.quantize"))
    with pytest.raises(RuntimeError, match="before quantizing"):
        eager.act.half()


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "silu": (F.silu, "spell_out_swish"),
    "hardswish": (F.hardswish, "spell_out_swish"),
    "hardsigmoid": (F.hardsigmoid, "use_dpu_hard_sigmoids"),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.1), "use_dpu_slopes"),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3), "use_dpu_averages"),
}


class InLine(Around):
    """What is between the convolutions is called in their own module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(nn.Identity())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rewrite_that_has_no_module_is_refused_with_ways_out_that_work(name: str) -> None:
    function, made_by = FUNCTIONS[name]
    model = seeded(InLine(function))
    with pytest.raises(qfx.QuarkError, match=rf"pass {made_by} .*aten\.{name}.*test_eager\.py:\d+.*without {made_by}"):
        quantize(model, XINT8, images()).eager()
    for way_out, config in (
        (seeded(Around(Apply(function))), XINT8),  # "let a module that computes nothing else call it"
        (model, XINT8.replace(passes=tuple(p for p in XINT8.passes if pass_name(p) != made_by))),
    ):
        qmodel = quantize(way_out, config, images())
        require_same(qmodel, qmodel.eager(), *images(4, 1))


class Twice(Around):
    """One activation module, called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x))))  # type: ignore[no-any-return]


def test_a_rewritten_module_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    qmodel = quantize(seeded(Twice(nn.SiLU())), XINT8, images())
    with pytest.raises(qfx.QuarkError, match="give each of the 2 calls of module act a separate module"):
        qmodel.eager()
    qmodel.save(tmp_path)
    with pytest.raises(qfx.QuarkError, match=r"pass spell_out_swish.*each of the 2 calls"):
        qfx.load(tmp_path).eager(seeded(Twice(nn.SiLU())))
    apart = seeded(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 4, 1), nn.SiLU()))
    qmodel = quantize(apart, XINT8, images())
    require_same(qmodel, qmodel.eager(), *images(4, 1))


@pytest.mark.parametrize("config", [INT8_STATIC, XINT8], ids=["int8", "xint8"])
@pytest.mark.parametrize("act", [nn.SiLU, nn.ReLU, nn.Tanh])
def test_a_module_of_two_names_is_two(act: type[nn.Module], config: QuantConfig) -> None:
    shared = act()
    first, second = (nn.Sequential(nn.Conv2d(n, 4, 3), shared) for n in (3, 4))
    qmodel = quantize(seeded(nn.Sequential(first, second, nn.Conv2d(4, 4, 1))), config, images())
    require_same(qmodel, qmodel.eager(), *images(4, 1))


def test_a_weighted_module_of_two_names_is_one() -> None:
    class Named(Shared):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.layer

        def forward(self, x: Tensor) -> Tensor:
            return self.again(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]

    model = seeded(Named())
    for config in (INT8_WEIGHT_ONLY, PER_TOKEN):
        qmodel = quantize(model, config, [rand(4, 8)])
        require_same(qmodel, qmodel.eager(), rand(3, 8))
    with pytest.raises(qfx.QuarkError, match=r"linear.*if all of its calls round it equally"):
        quantize(model, INT8_STATIC.replace(bias=None), [rand(4, 8)]).eager()


def test_a_rewritten_module_that_returns_more_is_refused() -> None:
    class Pair(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.act(self.a(x))[0])  # type: ignore[no-any-return]

    qmodel = quantize(seeded(Pair(Apply(lambda x: (F.silu(x), None)))), XINT8, images())
    with pytest.raises(qfx.QuarkError, match=r"module act.*one tensor to one tensor.*aten\.mul"):
        qmodel.eager()


@pytest.mark.parametrize("config", [INT8_STATIC, XINT8], ids=["int8", "xint8"])
def test_a_convolutional_network_rounds_what_its_modules_make(config: QuantConfig) -> None:
    """Sums of a residual block read two activations: the modules before round them."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), Residual(4), Residual(4))
    model = seeded(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)))
    qmodel = quantize(model, config, images())
    eager = qmodel.eager()
    assert [name for name, _ in eager.named_modules() if name.endswith("round_output")]
    require_same(qmodel, eager, *images(4, 1))


def test_a_sum_among_several_results_is_refused() -> None:
    class Both(Around):
        def forward(self, x: Tensor) -> Any:
            y = self.act(self.a(x))
            return y + self.b(y), y

    with pytest.raises(qfx.QuarkError, match="or the single output of a module that is called once"):
        quantize(seeded(Both(nn.ReLU())), XINT8, images()).eager()


def test_a_result_that_is_also_read_in_float_is_not_rounded() -> None:
    model = seeded(nn.Sequential(nn.Tanh(), Functional(), nn.Linear(8, 8)))
    with pytest.raises(qfx.QuarkError, match=r"aten\.linear.*module 1.*the single output of a module"):
        quantize(model, INT8_STATIC, [rand(4, 8)]).eager()


def test_a_result_that_its_module_reads_itself_is_not_rounded_for_it() -> None:
    class Choice(Functional):
        def forward(self, x: Tensor) -> Any:
            y = torch.tanh(x)
            return y, F.linear(y, self.matrix).argmax(-1)

    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.choice, self.head = Choice(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Any:
            y, index = self.choice(x)
            return self.head(y), index

    with pytest.raises(qfx.QuarkError, match=r"aten\.linear.*module choice.*the single output of a module"):
        quantize(seeded(Chosen()), INT8_STATIC, [rand(4, 8)]).eager()


def test_a_module_that_makes_two_rounded_values_is_refused() -> None:
    class Sum(Around):
        def forward(self, x: Tensor) -> Tensor:
            y = self.act(self.a(x))
            return torch.relu(y + self.act(self.b(y)))

    with pytest.raises(qfx.QuarkError, match=r"aten\.add.*a module that is called once"):
        quantize(seeded(Sum(nn.ReLU())), XINT8, images()).eager()


def test_an_operator_in_the_place_of_another_is_a_rewrite() -> None:
    config = INT8_STATIC.replace(passes=(*INT8_STATIC.passes, harden_sigmoids))
    qmodel = quantize(seeded(Around(nn.Sigmoid())), config, images())
    require_same(qmodel, qmodel.eager(), *images(4, 1))


def test_a_module_of_which_one_call_is_rewritten_is_refused() -> None:
    """Of 2×2 values the average is exact, of 6×6 it is not."""

    class Pools(Around):
        swapped = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            both = [self.b(self.act(F.max_pool2d(y, 3))), self.b(self.act(y))]
            return both[self.swapped] + both[not self.swapped]  # type: ignore[no-any-return]

    for swapped in (False, True):
        model = seeded(Pools(nn.AdaptiveAvgPool2d(1)))
        model.swapped = swapped
        with pytest.raises(qfx.QuarkError, match="give each of the 2 calls of module act"):
            quantize(model, XINT8, images()).eager()


def test_a_split_is_no_module_of_one_result() -> None:
    class Split(Around):
        def forward(self, x: Tensor) -> Tensor:
            first, second = self.act(self.a(x))
            return self.b(torch.cat([second, first], 1))  # type: ignore[no-any-return]

    model = seeded(Split(Apply(lambda x: x.chunk(2, 1))))
    with pytest.raises(qfx.QuarkError, match=r"pass slice_splits.*without slice_splits"):
        quantize(model, XINT8, images()).eager()
    whole = XINT8.replace(passes=tuple(p for p in XINT8.passes if pass_name(p) != "slice_splits"))
    qmodel = quantize(model, whole, images())
    require_same(qmodel, qmodel.eager(), *images(4, 1))


def test_folded_batch_norms_disappear_into_convolutions_with_or_without_bias() -> None:
    layers = (nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model = seeded(nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 3)))
    for config in (INT8_WEIGHT_ONLY, INT8_DYNAMIC.replace(exclude=("op:conv",))):
        qmodel = quantize(model, config, images())
        require_same(qmodel, qmodel.eager(), *images(2, 1))
    assert isinstance(model[1], nn.BatchNorm2d)


class OffsetNorm(nn.Module):
    """A norm whose factor is `1 + weight`, which is folded to a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + self.weight)


def test_a_constant_that_was_folded_and_scaled_goes_back_to_its_parameter() -> None:
    model = seeded(nn.Sequential(OffsetNorm(), nn.Linear(16, 8)))
    x = [rand(64, 16, seed=i) * torch.logspace(-2, 2, 16) for i in range(4)]
    for passes in ((), (SmoothQuant(alphas=(0.5,)),)):
        qmodel = quantize(model, PER_TOKEN.replace(passes=(*PER_TOKEN.passes, *passes)), x)
        eager: Any = qmodel.eager()
        assert torch.equal(eager[0].weight, model[0].weight) == (not passes)  # type: ignore[arg-type]
        # `1 + (g - 1)` rounds once more than `g`, which may move a code by one step of a token.
        step = 2 * float(x[0].abs().max()) / 127 * float(eager[1].weight.abs().max())
        torch.testing.assert_close(eager(x[0]), qmodel(x[0]), rtol=0, atol=step if passes else 0)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_trained_parts_of_parameters_are_refused_until_they_are_converted() -> None:
    x = rand(2, 5, 8)
    trained = qfx.prepare_qat(quantize(seeded(Shares()), INT8_WEIGHT_ONLY, [x]))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)
    with pytest.raises(qfx.QuarkError, match=r"slices of attend.in_proj_weight.*convert\(\) first"):
        trained.eager()
    converted = trained.convert()
    require_same(converted, converted.eager(), rand(2, 5, 8, seed=3))


class Shares(nn.Module):
    """Products with parts of parameters, and one with a computed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.stack, self.gates = nn.Parameter(torch.zeros(2, 8, 8)), nn.Parameter(torch.zeros(16, 8))
        self.kernel = nn.Conv1d(8, 8, 1, bias=False)
        self.head = old_weight_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x, x + 1, x - 1, need_weights=False)[0]
        x = F.linear(F.linear(x, self.stack[1]), self.stack[0])
        a, b = self.gates.chunk(2)
        x = F.linear(x, a).sigmoid() * F.linear(x, b)
        x = F.linear(x, self.kernel.weight.flatten(1)) + self.kernel(x.mT).mT
        y: Tensor = self.head(x)
        return y


CHANNELS = INT8_WEIGHT_ONLY
GROUPS = QuantConfig(
    weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=4), passes=CHANNELS.passes
)
ONE_SCALE = CHANNELS.replace(weight=TensorSpec(format=INT8))


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("config", [CHANNELS, GROUPS, ONE_SCALE], ids=["channels", "groups", "one scale"])
def test_parts_of_parameters_and_computed_weights_have_their_codes_in_eager(
    config: QuantConfig, tmp_path: Path
) -> None:
    model, x = seeded(Shares()), rand(2, 5, 8)
    qmodel = quantize(model, config, [x])
    assert not any(row.reason for row in qmodel.report())
    eager: Any = qmodel.eager()
    require_same(qmodel, eager, rand(2, 5, 8, seed=3))
    for owner, name in ((eager.attend, "in_proj_weight"), (eager, "stack"), (eager, "gates"), (eager.kernel, "weight")):
        assert parametrize.is_parametrized(owner, name)
    assert all(p.dtype in (torch.int8, torch.float32) and not p.is_meta for p in eager.parameters())
    qmodel.save(tmp_path)
    require_same(qmodel, qfx.load(tmp_path).eager(seeded(Shares(), 5)), rand(2, 5, 8, seed=3))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: weight_norm(nn.Conv2d(3, 4, 3)), (2, 3, 5, 5)),
        (lambda: spectral_norm(nn.ConvTranspose1d(3, 4, 3)), (2, 3, 5)),
        (lambda: orthogonal(nn.Linear(6, 4), orthogonal_map="householder"), (2, 6)),
    ],
    ids=["weight norm", "spectral norm", "orthogonal"],
)
def test_a_parametrized_module_computes_with_codes_in_eager(make: Callable[[], nn.Module], shape: Any) -> None:
    model = seeded(nn.Sequential(make(), nn.ReLU()))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    qmodel = quantize(model, INT8_STATIC, [rand(*shape)])
    assert [row.weight for row in qmodel.report()] == ["int8 channel"]
    require_same(qmodel, qmodel.eager(), rand(*shape, seed=3))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_a_parametrized_module_stores_the_codes_of_its_weight(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = weight_norm(nn.Linear(6, 6)), old_weight_norm(nn.Linear(6, 6))
            self.c = prune.random_unstructured(nn.Conv1d(3, 6, 1), "weight", 0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.c(self.b(self.a(self.a(x).relu())).relu())
            return y

    model, x = seeded(Twice()), rand(2, 3, 6)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [x])
    eager: Any = qmodel.eager()
    require_same(qmodel, eager, rand(2, 3, 6, seed=3))
    names = {name for name in eager.state_dict() if name.startswith("b.")}
    assert names == {"b.bias", *(f"b.parametrizations.weight.{n}" for n in ("original", "0.scale", "0.zero_point"))}
    qmodel.save(tmp_path)
    require_same(qmodel, qfx.load(tmp_path).eager(seeded(Twice(), 5)), rand(2, 3, 6, seed=3))
    report: Any = qmodel.eager(kernels=True).kernel_report
    assert [row.reason for row in report if row.name == "b"] == [""], str(report)
    trained = qfx.prepare_qat(qmodel)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.1)
    torch.testing.assert_close(trained.eager()(x), trained(x))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_computed_weight_of_a_module_with_a_state_is_refused_with_the_remedy() -> None:
    model = seeded(nn.Sequential(weight_norm(nn.LSTM(6, 6), "weight_hh_l0")))
    qmodel = quantize(model, INT8_WEIGHT_ONLY, [rand(3, 2, 6)])
    with pytest.raises(qfx.QuarkError, match=r"computed from 0.parametrizations.*remove the parametrization"):
        qmodel.eager()


def test_stacked_experts_are_stored_as_codes() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ParameterList([torch.zeros(3, 8, 6)])

        def forward(self, x: Tensor) -> Tensor:
            return torch.bmm(x, self.stack[0])

    model = seeded(Experts())
    config = QuantConfig(weight=TensorSpec(format=INT4, granularity=Granularity.GROUP, group_size=4))
    qmodel = quantize(model, config, [rand(3, 5, 8)])
    eager: Any = qmodel.eager()
    require_same(qmodel, eager, rand(3, 5, 8, seed=3))
    assert parametrize.is_parametrized(eager.stack, "0")


def test_export_shows_the_operators_and_compile_runs_them() -> None:
    eager = quantize(language(), PER_TOKEN, tokens()).eager()
    x = tokens()[0]
    graph = torch.export.export(eager, (x,)).graph
    names = [target_name(node) for node in graph.nodes]
    assert names.count("quark_fx.dequantize.default") == 6 + 5
    assert names.count("quark_fx.quantize.default") == 5
    compiled = torch.compile(eager, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x))


class Fused(nn.BatchNorm2d):
    """A batch norm that does more than its operator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_of_a_batch_norm_that_does_more_the_rest_stays() -> None:
    qmodel = quantize(seeded(nn.Sequential(nn.Conv2d(3, 4, 3), Fused(4))), INT8_WEIGHT_ONLY, images())
    require_same(qmodel, qmodel.eager(), *images(4, 1))


class Locked(nn.Linear):
    """A module that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("locked")


def test_a_module_that_cannot_be_copied_quantizes_all_the_same() -> None:
    qmodel = quantize(Locked(4, 4).eval(), INT8_WEIGHT_ONLY, [rand(2, 4)])
    with pytest.raises(qfx.QuarkError, match="cannot be copied"):
        qmodel.eager()


def test_the_dtype_stays() -> None:
    eager = quantize(language(), PER_TOKEN, tokens()).eager()
    with pytest.raises(RuntimeError, match="before quantizing"):
        eager.half()


def test_float8_per_channel_on_another_target() -> None:
    config = QuantConfig(weight=TensorSpec(format=FP8_E4M3, granularity=Granularity.CHANNEL), target=Target.TORCH)
    qmodel = quantize(language(), config, tokens())
    require_same(qmodel, qmodel.eager(), tokens()[0])


def llama(**options: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, **options,
    )  # fmt: skip
    return seeded(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("config", [INT4_WEIGHT_ONLY, PER_TOKEN], ids=["w4", "w8a8"])
def test_a_language_model_generates(config: QuantConfig) -> None:
    model = llama(tie_word_embeddings=True)
    ids = torch.arange(1, 13).reshape(2, 6)
    qmodel = quantize(model, config, [{"input_ids": ids}])
    eager: Any = qmodel.eager()
    assert type(eager) is transformers.LlamaForCausalLM
    with torch.no_grad():
        torch.testing.assert_close(eager(input_ids=ids).logits, qmodel(input_ids=ids).logits, rtol=0, atol=0)
        # With a cache every step reads one token; without one the whole text, as the graph does.
        text = ids
        for _ in range(5):
            text = torch.cat([text, qmodel(input_ids=text).logits[:, -1:].argmax(-1)], 1)
        generated = eager.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0, eos_token_id=None)
    torch.testing.assert_close(generated, text)


def test_what_the_walk_finds_is_plain_data() -> None:
    qmodel = quantize(language(), INT8_STATIC, tokens())
    assert qmodel.source is not None
    found = correspond(qmodel.source, qmodel.graph_module, qmodel.kept)
    assert set(found.rounding.inputs) == {*(f"layers.{i}.parts.{p}" for i in (0, 1) for p in ("in-0", "out_0")), "head"}
    assert {
        str(c.stored.format)
        for name, c in found.constants.items()
        if name.endswith("weight") and isinstance(c.stored, QuantizedTensor)
    } == {"int8"}


def test_a_checkpoint_holds_no_rewritten_module(tmp_path: Path) -> None:
    ids = torch.arange(1, 13).reshape(2, 6)
    qmodel = quantize(llama(), XINT8, [{"input_ids": ids}])
    with torch.no_grad():
        torch.testing.assert_close(qmodel.eager()(input_ids=ids).logits, qmodel(input_ids=ids).logits, rtol=0, atol=0)
    with pytest.raises(qfx.ExportError, match=r"mlp\.act_fn: a pass rewrote"):
        qfx.export.huggingface(qmodel, tmp_path / "checkpoint")


class Reads(nn.Module):
    """A recurrent layer whose weights are made one piece of memory in each call, and a head."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.cells, self.head = layer(4, 6, 2, bidirectional=True, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Any:
        self.cells.flatten_parameters()
        return self.head(self.cells(x)[0])


@pytest.mark.parametrize(
    ("layer", "preset"),
    thinned(
        (nn.LSTM, nn.GRU, nn.RNN),
        ("int8_static", "int8_dynamic", "int4_weight_only", "fp16"),
        lambda layer, preset: layer is nn.LSTM or preset == "int4_weight_only",
    ),
)
def test_a_recurrent_layer_computes_with_its_codes(layer: Any, preset: str) -> None:
    x = rand(4, 5, 4)
    qmodel = quantize(seeded(Reads(layer)), preset, [x])
    model: Any = copy.deepcopy(qmodel.eager())
    with torch.no_grad():
        torch.testing.assert_close(model(x), qmodel(x), rtol=0, atol=0)
        assert all(value is None for value in model.cells._flat_weights), "no second copy in float"
        model.cells.parametrizations["weight_hh_l1"].original.zero_()
        assert not torch.equal(model(x), qmodel(x))


def test_a_recurrent_layer_trains_the_weights_that_it_computes_with() -> None:
    x = rand(4, 5, 4)
    qmodel = quantize(seeded(nn.Sequential(nn.LSTM(4, 6, batch_first=True))), "int8_weight_only", [x])
    trained = qfx.prepare_qat(qmodel)
    model = trained.eager()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x)[0] - 1).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(trained.convert()(x)[0], model(x)[0], rtol=0, atol=0)
    codes = [qmodel.graph_module, trained.convert().graph_module]
    first, second = (gm.get_buffer("0.weight_hh_l0_codes") for gm in codes)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("preset", ["fp16", "bf16"])
def test_rows_of_a_table_in_half_precision_are_rounded_by_what_reads_them(preset: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.last = nn.Embedding(11, 16), nn.Linear(16, 16)

        def forward(self, ids: Tensor) -> Tensor:
            rows = self.embed(ids)
            y: Tensor = self.last(self.last(rows)) + self.last(rows.reshape(-1, 16)).reshape(rows.shape)
            return y

    for model in (nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 8)), Chain()):
        qmodel = quantize(seeded(model), preset, tokens())
        require_same(qmodel, qmodel.eager(), *tokens(4, 1, 6))


class _Beside:
    """Holds a model, and calls a part of it."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, module: nn.Module, args: Any, y: Tensor) -> Any:
        return y + self.model[0](args[0])


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, module.weight, module.bias).tanh()


_model_of_the_file: Any = None


def _patched(how: str) -> nn.Module:
    model: Any = seeded(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))).eval()
    first, last, beside = model[0], model[1], _Beside(model)
    if how == "variable":
        forward = first.forward
        first.forward = lambda x: forward(x).tanh()
    elif how == "argument":
        first.forward = lambda x, forward=first.forward: forward(x).tanh()
    elif how == "the whole model":
        call = model.forward
        model.forward = lambda x: call(x).tanh()
    elif how == "object":
        last.register_forward_hook(lambda module, args, y: beside(module, args, y))
    elif how == "file":
        globals()["_model_of_the_file"] = model
        last.register_forward_hook(lambda module, args, y: y + _model_of_the_file[0](args[0]))
    elif how == "partial":
        first.forward = partial(_forward, first)
    else:
        first.forward = MethodType(_forward, first)
    return model  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["variable", "argument", "the whole model", "object", "file"])
def test_functions_that_hold_the_float_model_are_refused(how: str) -> None:
    with pytest.raises(qfx.QuarkError, match=r"forward.* of (0|1|the model) would still call.*types\.MethodType"):
        quantize(_patched(how), INT8_WEIGHT_ONLY, [rand(2, 8)]).eager()


@pytest.mark.parametrize("how", ["partial", "method"])
def test_forwards_bound_to_their_module_compute_with_its_codes(how: str) -> None:
    qmodel = quantize(_patched(how), INT8_WEIGHT_ONLY, [rand(2, 8)])
    torch.testing.assert_close(qmodel.eager()(rand(2, 8)), qmodel(rand(2, 8)))


class _Holds(nn.Module):
    """Has a module or parameter that it does not register."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.first, self.held = nn.Linear(8, 8), held

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return y @ self.held["p"] if isinstance(self.held, dict) else self.held[0](y)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["module", "parameter", "variable"])
def test_a_list_or_dict_is_copied_with_what_it_holds(how: str) -> None:
    """But not with the variables of functions that its modules have."""
    held: Any = (
        {"p": nn.Parameter(rand(8, 8))}
        if how == "parameter"
        else [_patched("variable").get_submodule("01"[how == "module"])]
    )
    config = INT8_WEIGHT_ONLY.replace(exclude=("lifted_tensor*",))
    qmodel = quantize(seeded(_Holds(held)).eval(), config, [rand(2, 8)])
    if how == "variable":
        with pytest.raises(qfx.QuarkError, match=r"held of the model would still call"):
            qmodel.eager()
    else:
        torch.testing.assert_close(qmodel.eager()(rand(2, 8)), qmodel(rand(2, 8)))


@pytest.mark.parametrize("place", ["0", "2", "", "1"])
@pytest.mark.parametrize("name", ["int8_static", "int8_weight_only"])
def test_a_hook_that_is_folded_into_an_operator_runs_once(place: str, name: str) -> None:
    """The piece that a module computes instead of its code includes its hooks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    model.get_submodule(place).register_forward_hook(lambda _, args, result: result * 1.5 + 0.25)
    x = rand(16, 8)
    qmodel = quantize(model, name, [x])
    assert torch.equal(qmodel.eager()(x), qmodel(x))
    assert (qmodel(x) - model(x)).abs().max() < 0.1


@pytest.mark.parametrize(("place", "lost"), [("0", 0), ("1", 1), ("2", 1), ("3", 0), ("", 0)])
def test_a_hook_of_a_module_that_a_pass_replaced_is_named(place: str, lost: int) -> None:
    """Batch norm 1 is folded, and SiLU 2 becomes a hard swish; the other modules run with their hooks."""
    model = seeded(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3)))
    seen: list[torch.Size] = []

    def save(module: nn.Module, args: Any, result: Tensor) -> None:
        seen.append(result.shape)

    model.get_submodule(place).register_forward_hook(save)
    qmodel = quantize(model, XINT8, images())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = qmodel.eager()
    seen.clear()
    result(images()[0])
    messages = [str(w.message) for w in caught if "drops the hooks" in str(w.message)]
    assert (len(seen), len(messages)) == (1 - lost, lost)
    assert all(f"save of {place}:" in message for message in messages)


class CalledTwice(nn.Module):
    """A sum of two calls of a convolution; conversion folds the factor of the second into its weight."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.conv(x)) + self.conv(x * 0.5)
        return y


class ReadsResult(nn.Module):
    """A convolution with the model's own weight, whose rounded input is the result of a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.weight = inner, nn.Parameter(rand(3, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.inner(x), self.weight)


TWICE: dict[str, Callable[[], nn.Module]] = {
    "whole model": lambda: CalledTwice(norm=False),
    "with a norm": lambda: CalledTwice(norm=True),
    "between": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), CalledTwice(norm=True), nn.ReLU(), nn.Conv2d(3, 3, 1)),
    "before softmax": lambda: nn.Sequential(CalledTwice(norm=False), nn.Softmax(-1)),
    "result rounded": lambda: ReadsResult(CalledTwice(norm=False)),
}


@pytest.mark.parametrize("config", [INT8_STATIC, INT8_DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", TWICE)
def test_a_replaced_module_rounds_what_its_submodules_would(name: str, config: QuantConfig) -> None:
    """Their hooks do not run, because a piece of the quantized graph computes the module."""
    x = rand(2, 3, 6, 6)
    qmodel = quantize(seeded(TWICE[name]()), config, [x])
    if name == "result rounded" and config is INT8_DYNAMIC:
        with pytest.raises(qfx.QuarkError, match="reads a rounded activation"):
            qmodel.eager()
        return
    eager = qmodel.eager()
    assert any(isinstance(module, Rewritten) for module in eager.modules())
    for batch in (x, 2 * rand(3, 3, 6, 6, seed=5)):
        with torch.no_grad():
            torch.testing.assert_close(eager(batch), qmodel(batch), rtol=0, atol=1e-5)
