"""`fold_batch_norm` is exact wherever it folds, and `run_passes` holds passes to their promises."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import on_devices
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import Cnn, calls, constant, images, rand, seeded
from torch import Tensor, nn
from torch.fx import GraphModule

import quark_fx as qfx
from quark_fx.graph.nodes import get_attr, set_parameter, tensor_of
from quark_fx.graph.pass_manager import PASSES, Promise, graph_pass, pass_from_dict, pass_to_dict, run_passes
from quark_fx.passes import fold_batch_norm

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def capture(model: nn.Module, *inputs: Tensor) -> GraphModule:
    return qfx.capture_graph(model.eval(), inputs).module


def assert_folds_exactly(model: nn.Module, x: Tensor, expected: int) -> GraphModule:
    """Fold, and require equal outputs up to the rounding of sums of a few dozen float32 products."""
    gm = capture(model, x)
    folded, (record,) = run_passes(gm, [fold_batch_norm])
    assert record.rewrites == expected
    assert len(calls(folded, "aten.batch_norm")) == len(calls(gm, "aten.batch_norm")) - expected
    with torch.no_grad():
        a, b = model(x), folded(x)[0]
    assert a.dtype == b.dtype
    torch.testing.assert_close(b, a, rtol=0, atol=64 * torch.finfo(a.dtype).eps * max(1.0, float(a.abs().max())))
    return folded


layers = st.fixed_dictionaries(
    {
        "rank": st.integers(1, 3),
        "transposed": st.booleans(),
        "groups": st.sampled_from([1, 2, 4]),
        "out_per_group": st.integers(1, 2),
        "kernel": st.integers(1, 3),
        "stride": st.integers(1, 2),
        "dilation": st.integers(1, 2),
        "padding": st.integers(0, 1),
        "bias": st.booleans(),
        "affine": st.booleans(),
        "eps": st.sampled_from([1e-5, 1e-3, 0.5]),
        "seed": st.integers(0, 9),
    }
)


def convolution(case: dict[str, Any]) -> tuple[nn.Module, int, int]:
    channels, out = 4, case["groups"] * case["out_per_group"]
    family = (TRANSPOSED if case["transposed"] else CONV)[case["rank"]]
    layer = family(
        channels,
        out,
        case["kernel"],
        stride=case["stride"],
        padding=case["padding"],
        dilation=case["dilation"],
        groups=case["groups"],
        bias=case["bias"],
    )
    return layer, channels, out


@given(case=layers)
@settings(max_examples=25, deadline=None)
def test_a_norm_after_any_convolution_folds_exactly(case: dict[str, Any]) -> None:
    layer, channels, out = convolution(case)
    model = nn.Sequential(layer, NORM[case["rank"]](out, eps=case["eps"], affine=case["affine"]))
    x = rand(2, channels, *[6] * case["rank"], seed=case["seed"])
    assert_folds_exactly(seeded(model, case["seed"]), x, 1)


@given(case=layers)
@settings(max_examples=25, deadline=None)
def test_a_norm_before_a_convolution_folds_only_where_nothing_is_padded(case: dict[str, Any]) -> None:
    layer, channels, _ = convolution(case)
    model = nn.Sequential(NORM[case["rank"]](channels, eps=case["eps"], affine=case["affine"]), layer)
    x = rand(2, channels, *[6] * case["rank"], seed=case["seed"])
    assert_folds_exactly(seeded(model, case["seed"]), x, int(not case["padding"] and not case["transposed"]))


@on_devices
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_on_either_side_of_a_linear_folds_exactly(bias: bool, device: torch.device) -> None:
    x = rand(4, 6).to(device)
    assert_folds_exactly(
        seeded(nn.Sequential(nn.Linear(6, 5, bias=bias), nn.BatchNorm1d(5))).to(device),
        x,
        1,
    )
    assert_folds_exactly(seeded(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5, bias=bias))).to(device), x, 1)


def test_a_string_padding_is_padding() -> None:
    model = seeded(nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding="same")))
    assert_folds_exactly(model, rand(2, 2, 5, 5), 0)
    model = seeded(nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 3, padding="valid")))
    assert_folds_exactly(model, rand(2, 2, 5, 5), 1)


def test_a_norm_between_two_operators_goes_into_the_first() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)))
    folded = assert_folds_exactly(model, rand(2, 2, 5, 5), 1)
    second = calls(folded, "aten.conv2d")[1]
    torch.testing.assert_close(constant(folded, second.args[1]), model.get_parameter("2.weight"), rtol=0, atol=0)


def test_two_norms_in_a_row_both_fold() -> None:
    model = seeded(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)))
    assert_folds_exactly(model, rand(2, 2, 5, 5), 2)


class Around(nn.Module):
    """A convolution and a norm whose values a function combines."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_an_operator_whose_value_is_read_twice_keeps_its_norm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        out: Tensor = m.norm(y) + y.relu()
        return out

    assert_folds_exactly(seeded(Around(forward)), rand(2, 3, 4, 4), 0)


def test_a_norm_and_the_value_it_reads_fold_as_one_map() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.conv(x)
        out: Tensor = m.norm(y) + y
        return out

    model, x = seeded(Around(forward)), rand(2, 3, 4, 4)
    assert_folds_exactly(model, x, 1)
    qmodel = qfx.quantize(model, "int8_weight_only", [x], progress=False)
    torch.testing.assert_close(qmodel.eager()(x), qmodel(x), rtol=1e-5, atol=1e-5)


def test_a_norm_whose_value_is_read_twice_does_not_go_into_the_operator_after_it() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        out: Tensor = m.conv(y) + y
        return out

    assert_folds_exactly(seeded(Around(forward)), rand(2, 3, 4, 4), 0)


def test_an_operator_that_reads_the_norm_as_its_weight_is_left_alone() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)
            self.weight = nn.Parameter(torch.empty(2, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(self.weight, self.norm(x))

    assert_folds_exactly(seeded(Model()), rand(4, 3), 0)


def test_tied_weights_fold_apart() -> None:
    """One weight, two convolutions, each with its own norm: a shared fold would be wrong for one of them."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.first, self.second = nn.BatchNorm2d(3), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(self.conv(torch.relu(self.first(self.conv(x)))))
            return out

    folded = assert_folds_exactly(seeded(Model()), rand(2, 3, 4, 4), 2)
    a, b = (constant(folded, node.args[1]) for node in calls(folded, "aten.conv2d"))
    assert not torch.equal(a, b)


def test_a_convolution_used_with_and_without_its_norm_keeps_the_plain_weight_for_the_plain_use() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        out: Tensor = m.norm(m.conv(x)) + m.conv(x.sin())
        return out

    assert_folds_exactly(seeded(Around(forward)), rand(2, 3, 4, 4), 1)


def test_a_norm_over_another_dimension_than_the_features_stays() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5))  # (batch, 5, 6): dimension 1 is not the features
    assert_folds_exactly(seeded(model), rand(2, 5, 6), 0)


def test_a_norm_over_the_samples_of_an_unbatched_convolution_stays() -> None:
    model = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4))  # (3, 4) is one sample of length 4
    assert_folds_exactly(seeded(model), rand(3, 4), 0)


@pytest.mark.parametrize("scales", [{"beta": 0.5}, {"alpha": 2.0}])
def test_a_scaled_addmm_is_not_mistaken_for_a_linear(scales: dict[str, Any]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(6, 5)), nn.Parameter(torch.empty(5))
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.addmm(self.bias, x, self.weight, **scales))
            return out

    assert_folds_exactly(seeded(Model()), rand(4, 6), 0)


def test_an_addmm_is_a_linear() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(6, 5)), nn.Parameter(torch.empty(5))
            self.norm = nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.norm(torch.addmm(self.bias, x, self.weight))
            return out

    assert_folds_exactly(seeded(Model()), rand(4, 6), 1)


@pytest.mark.parametrize(
    ("tensor", "value", "words"),
    [
        ("running_var", -0.5, r"1\.running_var of .* is -0\.5 in channel 1, but a variance cannot be negative"),
        ("running_var", 0.0, r"1\.running_var of .* is 0 in channel 1"),
        ("running_var", float("inf"), r"1\.running_var of .* holds NaN or infinity"),
        ("running_mean", float("nan"), r"1\.running_mean of .* holds NaN or infinity"),
        ("weight", float("nan"), r"1\.weight of .* holds NaN or infinity"),
        ("bias", float("inf"), r"1\.bias of .* holds NaN or infinity"),
    ],
)
def test_a_norm_with_impossible_statistics_is_named(tensor: str, value: float, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, eps=0.0)).eval()
    getattr(model[1], tensor).data[1] = value
    with pytest.raises(qfx.CalibrationError, match=words):
        qfx.quantize(model, "int8_static", [rand(2, 3, 4, 4)], progress=False)


def test_a_norm_without_statistics_stays() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, track_running_stats=False))
    assert_folds_exactly(seeded(model), rand(2, 2, 4, 4), 0)


def test_a_lone_norm_stays() -> None:
    assert_folds_exactly(seeded(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU())), rand(2, 3, 4, 4), 0)


def test_folding_writes_into_no_parameter_of_the_model() -> None:
    model = seeded(Cnn())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    assert_folds_exactly(model, images(2)[0], 2)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


def graph() -> GraphModule:
    return capture(seeded(nn.Sequential(nn.Linear(3, 4), nn.ReLU())), rand(2, 3))


def drop_relu(gm: GraphModule) -> int:
    (node,) = calls(gm, "aten.relu")
    node.replace_all_uses_with(node.all_input_nodes[0])
    gm.graph.erase_node(node)
    return 1


def test_passes_run_on_a_copy_that_shares_tensors() -> None:
    gm = graph()
    text = str(gm.graph)
    copy, _ = run_passes(gm, [drop_relu])
    assert str(gm.graph) == text != str(copy.graph)
    for (name, a), (_, b) in zip(gm.named_parameters(), copy.named_parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr(), name


def test_a_constant_a_pass_adds_is_not_seen_by_the_original() -> None:
    def add_constant(gm: GraphModule) -> int:
        with gm.graph.inserting_before(next(iter(gm.graph.nodes))):
            get_attr(gm, "0.extra", torch.zeros(1))
        return 1

    gm = graph()
    copy, _ = run_passes(gm, [add_constant])
    assert hasattr(copy.get_submodule("0"), "extra")
    assert not hasattr(gm.get_submodule("0"), "extra")


def test_every_pass_is_recorded_with_its_count_and_time() -> None:
    def slow(gm: GraphModule) -> int:
        time.sleep(0.2)
        return 3

    _, records = run_passes(graph(), [slow, drop_relu])
    assert [(r.name, r.rewrites) for r in records] == [("slow", 3), ("drop_relu", 1)]
    assert records[0].seconds >= 0.2 > records[1].seconds


def test_a_pass_that_leaves_an_invalid_graph_is_named() -> None:
    def reorder_wrongly(gm: GraphModule) -> int:
        nodes = list(gm.graph.nodes)
        nodes[0].prepend(nodes[-2])  # the last call before everything it reads
        return 1

    with pytest.raises(qfx.PassError, match="reorder_wrongly left an invalid graph"):
        run_passes(graph(), [reorder_wrongly])


def no_relu(gm: GraphModule) -> None:
    for node in calls(gm, "aten.relu"):
        raise qfx.PassError(f"{node} is a relu")


def test_a_pass_that_breaks_its_promise_is_named() -> None:
    @graph_pass(ensures=(no_relu,))
    def do_nothing(gm: GraphModule) -> int:
        return 0

    with pytest.raises(qfx.PassError, match="relu is a relu") as caught:
        run_passes(graph(), [do_nothing])
    assert caught.value.__notes__ == ["in pass do_nothing"]


def test_a_pass_whose_requirement_is_unmet_does_not_run() -> None:
    ran = []

    @graph_pass(requires=(no_relu,))
    def never(gm: GraphModule) -> int:
        ran.append(gm)
        return 0

    with pytest.raises(qfx.PassError) as caught:
        run_passes(graph(), [never])
    assert caught.value.__notes__ == ["in pass never"]
    assert not ran


@pytest.mark.parametrize("exact", [True, False])
def test_verification_catches_a_pass_that_lies_about_being_exact(exact: bool) -> None:
    @graph_pass(exact=exact)
    def lying(gm: GraphModule) -> int:
        return drop_relu(gm)

    gm, x = graph(), rand(5, 3)
    assert len(run_passes(gm, [lying])[1]) == 1  # unverified, it goes through
    if not exact:
        assert len(run_passes(gm, [lying], verify_inputs=(x,))[1]) == 1
        return
    with pytest.raises(qfx.PassError, match="pass lying is declared exact, but it changed output 0"):
        run_passes(gm, [lying], verify_inputs=(x,))


def test_an_exact_pass_is_measured_against_what_it_was_given_not_against_the_original() -> None:
    @graph_pass(exact=False)
    def approximate(gm: GraphModule) -> int:
        return drop_relu(gm)

    _, records = run_passes(graph(), [approximate, fold_batch_norm], verify_inputs=(rand(5, 3),))
    assert len(records) == 2


def test_verification_through_quantize_reaches_the_passes() -> None:
    @graph_pass()
    def lying_too(gm: GraphModule) -> int:
        return drop_relu(gm)

    model = seeded(nn.Sequential(nn.Linear(3, 4), nn.ReLU()))
    config = qfx.presets.INT8_WEIGHT_ONLY.replace(passes=(lying_too,))
    with pytest.raises(qfx.PassError, match="lying_too"):
        qfx.quantize(model, config, [rand(4, 3)], verify=True, progress=False)
    qfx.quantize(model, config, [rand(4, 3)], progress=False)


def test_a_pass_with_options_survives_its_dict() -> None:
    @graph_pass()
    @dataclass(frozen=True)
    class Repeat:
        times: int = 2

        def __call__(self, gm: GraphModule) -> int:
            return self.times

    data = pass_to_dict(Repeat(5))
    assert data == {"name": "Repeat", "times": 5}
    assert pass_from_dict(data) == Repeat(5)
    _, (record,) = run_passes(graph(), [pass_from_dict(data)])
    assert (record.name, record.rewrites) == ("Repeat", 5)
    with pytest.raises(qfx.ConfigError, match="has no option often; it has times"):
        pass_from_dict({"name": "Repeat", "often": 3})


def test_verification_accepts_infinities_and_nan_that_were_there_before() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.masked_fill(x > 0, float("-inf")), torch.log(-x.abs() - 1)

    module = qfx.capture_graph(Masked().eval(), torch.randn(2, 3)).module

    @qfx.graph_pass()
    def nothing(gm: GraphModule) -> int:
        return 0

    _, records = run_passes(module, [nothing], verify_inputs=(torch.randn(2, 3),))
    assert records[0].rewrites == 0


def linear() -> tuple[nn.Module, Tensor]:
    return seeded(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), rand(2, 4)


def test_a_pass_does_not_take_the_name_of_another_module() -> None:
    known = PASSES["fold_batch_norm"]

    def fold_batch_norm(gm: GraphModule) -> int:
        return 0

    with pytest.raises(qfx.ConfigError, match=r"quark_fx\.passes\.fold_batch_norm.* already uses that name"):
        graph_pass()(fold_batch_norm)
    assert PASSES["fold_batch_norm"] is known


def test_a_pass_may_be_defined_anew_by_its_own_module() -> None:
    def define() -> Any:
        @graph_pass()
        def defined_twice(gm: GraphModule) -> int:
            return 0

        return defined_twice

    define()
    again = define()
    assert PASSES["defined_twice"] is again


def test_a_pass_without_options_needs_no_parentheses() -> None:
    @graph_pass
    def plain(gm: GraphModule) -> int:
        return 0

    try:
        assert PASSES["plain"] is plain
        assert plain.promise == Promise()
    finally:
        del PASSES["plain"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exact": "no"}, "exact of graph_pass must be True or False, not 'no'"),
        ({"targets": "dpu"}, r"targets of graph_pass must be a tuple .* a string, not 'dpu'; write targets=\('dpu',\)"),
        ({"ensures": len}, "ensures of graph_pass must be a tuple whose items are each a function"),
        ({"requries": ()}, "graph_pass has no argument requries; it has exact, .*; did you mean 'requires'"),
    ],
    ids=["bool", "string", "function", "name"],
)
def test_a_promise_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(qfx.ConfigError, match=message):
        graph_pass(**options)


def test_options_of_a_class_that_becomes_a_dataclass_too_late_are_refused() -> None:
    with pytest.raises(
        qfx.ConfigError, match=r"pass Late is a class with options; put @dataclass\(frozen=True\) below"
    ):

        @dataclass(frozen=True)
        @graph_pass()
        class Late:
            flag: bool = False

    assert "Late" not in PASSES


@pytest.mark.parametrize("returned", [None, "2", -1, 1.0, True, False])
def test_a_pass_that_does_not_count_is_named(returned: Any) -> None:
    def forgets(gm: GraphModule) -> Any:
        return returned

    model, x = linear()
    with pytest.raises(qfx.PassError, match=r"pass forgets returned .*; a pass must return the number of its rewrites"):
        run_passes(capture(model, x), [forgets])


def test_a_pass_that_takes_something_else_than_the_context_is_refused_with_the_configuration() -> None:
    @graph_pass()
    def wants(gm: GraphModule, ctx: Any) -> int:
        return 0

    with pytest.raises(qfx.ConfigError, match=r"pass wants\(.*ctx.*\) .*cannot be called .* called `context`"):
        qfx.presets.INT8_STATIC.replace(passes=(wants,))


def scale_in_place(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(2)


def flip_the_data(tensor: Tensor) -> None:
    tensor.data.copy_(tensor.data.flip(0).clone())


@pytest.mark.parametrize("write", [scale_in_place, flip_the_data])
def test_a_pass_that_writes_into_a_weight_of_the_caller_is_named(write: Callable[[Tensor], None]) -> None:
    def writes(gm: GraphModule) -> int:
        write(tensor_of(gm, "0.weight"))
        return 1

    model, x = linear()
    with pytest.raises(qfx.PassError, match=r"pass writes wrote into 0\.weight, which the caller's model also uses"):
        run_passes(capture(model, x), [writes])


def test_a_pass_that_stores_a_new_weight_is_not_taken_for_one_that_writes() -> None:
    def stores(gm: GraphModule) -> int:
        set_parameter(gm, "0.weight", tensor_of(gm, "0.weight") * 2)
        return 1

    model, x = linear()
    before = model[0].weight.detach().clone()  # type: ignore[index]
    after, (record,) = run_passes(capture(model, x), [stores])
    assert record.rewrites == 1
    assert torch.equal(tensor_of(after, "0.weight"), before * 2)
    assert torch.equal(model[0].weight, before)  # type: ignore[index]
