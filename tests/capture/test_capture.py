"""Capture keeps the function, the names and the call; what it cannot capture it names."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import calls, cnn, images, mlp, quantize, rand, seeded, tokens
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import Mod, PythonMod

import quark_fx as qfx
from quark_fx.capture.capture import Captured, capture_graph
from quark_fx.capture.guards import _holds
from quark_fx.capture.symbolic_sizes import round_up


class Function(nn.Module):
    """A model that is one function; `weight` gives it a parameter."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4))
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight)


def call(captured: Captured, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return captured.signature.unflatten(captured.module(*captured.signature.flatten(args, kwargs)))


def assert_same(got: Any, expected: Any) -> None:
    assert pytree.tree_structure(got) == pytree.tree_structure(expected)
    for a, b in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def assert_captured(model: nn.Module, *example: Tensor, other: tuple[Tensor, ...] = ()) -> Captured:
    """Capture with `example`; the graph is functional and equals the model on `example` and on `other`."""
    captured = qfx.capture_graph(model, example)
    for node in calls(captured.module, ""):
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, node.format_node()
    for inputs in (example, other or example):
        # An in-place model may overwrite its input: each gets its own copy.
        with torch.no_grad():
            expected = model(*(x.clone() for x in inputs))
        assert_same(call(captured, *(x.clone() for x in inputs)), expected)
    return captured


def test_a_convolutional_network_is_captured() -> None:
    assert_captured(cnn(), images(4)[0], other=(images(7)[0],))


def test_a_token_model_is_captured_for_every_batch_size_and_length() -> None:
    captured = assert_captured(mlp(), tokens(4)[0], other=(torch.randint(0, 11, (3, 9)),))
    assert captured.signature.input_shapes == ((None, None),)


@pytest.mark.parametrize("sizes", [(1, 5), (4, 1), (1, 1)])
def test_a_dimension_of_one_stays_dynamic(sizes: tuple[int, int]) -> None:
    assert_captured(mlp(), torch.zeros(sizes, dtype=torch.long), other=(torch.randint(0, 11, (3, 9)),))


def test_a_batch_of_one_image_stays_dynamic() -> None:
    assert_captured(cnn(), images(1)[0], other=(images(6)[0],))


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "relu_": lambda x, w: (x @ w).relu_(),
    "functional_relu": lambda x, w: nn.functional.relu(x @ w, inplace=True) * 2,
    "add_": lambda x, w: (x @ w).add_(1).mul_(2),
    "iadd": lambda x, w: add_to(x @ w, x),
    "read_before": lambda x, w: read_before(x @ w),
    "read_after": lambda x, w: read_after(x @ w),
    "view_then_mutated": lambda x, w: view_then_mutated(x @ w),
    "mutated_through_view": lambda x, w: mutated_through_view(x @ w),
    "mutated_through_reshape": lambda x, w: mutated_through_reshape(x @ w),
    "slice_assigned": lambda x, w: slice_assigned(x @ w),
    "mask_filled": lambda x, w: (x @ w).masked_fill_(x > 0, -1.0),
    "index_assigned": lambda x, w: index_assigned(x @ w),
    "input_mutated": lambda x, w: x.add_(1) @ w,
    "input_mutated_then_read": lambda x, w: (x.mul_(2) @ w, x),
    "zeros_filled": lambda x, w: zeros_filled(x, w),
    "copy_": lambda x, w: torch.empty_like(x).copy_(x) @ w,
    "chunks_mutated": lambda x, w: chunks_mutated(x @ w),
    "transpose_mutated": lambda x, w: transpose_mutated(x @ w),
    "rows_substituted": lambda x, w: rows_substituted(x @ w),
    "view_of_view_read_later": lambda x, w: view_of_view_read_later(x @ w),
    "written_by_a_result": lambda x, w: (x @ w)[:, :2].mul_(2).add_(1)[0],
    "part_unbound": lambda x, w: part_unbound(x @ w),
    "split_unevenly": lambda x, w: split_unevenly(x @ w),
    "permuted_and_unsqueezed": lambda x, w: permuted_and_unsqueezed(x @ w),
    "diagonal_written": lambda x, w: diagonal_written(x @ w),
    "wider_operand": lambda x, w: wider_operand(x @ w),
    "copied_across_types": lambda x, w: copied_across_types(x @ w),
    "steps_written": lambda x, w: steps_written(x @ w),
    "renamed_in_place": lambda x, w: renamed_in_place(x @ w),
    "source_changed_after_the_copy": lambda x, w: source_changed_after_the_copy(x @ w),
    "overlapping_windows": lambda x, w: overlapping_windows(x @ w),
    "reshaped_copy_kept": lambda x, w: reshaped_copy_kept(x @ w),
    "expanded_then_written": lambda x, w: expanded_then_written(x @ w),
}

RETRACED = ("reshaped_copy_kept",)
"""Those of `IN_PLACE` that torch has to resolve: whether a reshape is a copy there depends on strides."""


def add_to(y: Tensor, x: Tensor) -> Tensor:
    y += x
    return y


def read_before(y: Tensor) -> Tensor:
    doubled = y * 2
    y.relu_()
    return y + doubled


def read_after(y: Tensor) -> tuple[Tensor, Tensor]:
    z = y.neg_()
    y.add_(1)
    return y * z, z


def view_then_mutated(y: Tensor) -> Tensor:
    flat = y.view(-1)
    y.mul_(3)
    return flat + 1


def mutated_through_view(y: Tensor) -> Tensor:
    y.view(-1).relu_()
    return y


def mutated_through_reshape(y: Tensor) -> Tensor:
    y.reshape(-1, 2, 2).clamp_(-0.1, 0.1)
    return y + 1


def slice_assigned(y: Tensor) -> Tensor:
    y[:, 1:3] = 0.5
    y[0] += 1
    return y


def index_assigned(y: Tensor) -> Tensor:
    y[:, torch.tensor([0, 2])] = 7.0
    return y


def zeros_filled(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[:, :2] = (x @ w)[:, 2:]
    return out


def chunks_mutated(y: Tensor) -> Tensor:
    a, b = y.chunk(2, dim=1)
    a.add_(b)
    return y


def transpose_mutated(y: Tensor) -> Tensor:
    y.t().sub_(1)
    return y


def rows_substituted(y: Tensor) -> Tensor:
    for i in range(1, 4):
        row = y[..., i, :i].clone() if y.dim() > 2 else y[:, :i].clone()
        y[:, i : i + 1] = y[:, i : i + 1] + row.sum(-1, keepdim=True)
    return y * 2


def view_of_view_read_later(y: Tensor) -> tuple[Tensor, Tensor]:
    columns = y.t()
    inner = columns[1:3]
    y[:, 1].neg_()
    inner[0].add_(1)
    return inner * 2, columns.sum(0)


def part_unbound(y: Tensor) -> Tensor:
    first, second, *_ = y.unbind(1)
    second.mul_(first)
    return y + second[:, None]


def split_unevenly(y: Tensor) -> tuple[Tensor, Tensor]:
    a, b = y.split([1, 3], dim=-1)
    b.relu_()
    y.add_(1)
    return a + b, y


def permuted_and_unsqueezed(y: Tensor) -> Tensor:
    y[None].permute(2, 0, 1)[:2].unsqueeze(-1).squeeze(1).mul_(3)
    y[None].movedim(0, 2).swapdims(0, 1).narrow(0, 1, 2).add_(y.sum())
    y.narrow(1, -2, 2).mul_(2)
    return y


def diagonal_written(y: Tensor) -> Tensor:
    y.diagonal().zero_()
    y.diagonal(1).fill_(2.0)
    return y


def wider_operand(y: Tensor) -> Tensor:
    y[:, :2].add_(y[:, 2:].double())
    return y / 3


def copied_across_types(y: Tensor) -> Tensor:
    z = torch.zeros_like(y)
    z.copy_(torch.arange(4, device=y.device))
    z[0] = y[0].double()
    return y + z


def steps_written(y: Tensor) -> Tensor:
    y[:, ::2] = y[:, 1::2]
    return y


def renamed_in_place(y: Tensor) -> tuple[Tensor, Tensor]:
    whole = y[:]
    y.unsqueeze_(0)
    y[0, :, 0].add_(1)
    return y.exp(), whole


def source_changed_after_the_copy(y: Tensor) -> tuple[Tensor, Tensor]:
    kept = torch.empty_like(y).copy_(y)
    y.mul_(0)
    return kept, y


def overlapping_windows(y: Tensor) -> Tensor:
    windows = y.unfold(1, 2, 1)
    y[:, 1] = 5.0
    return windows.sum(-1)


def reshaped_copy_kept(y: Tensor) -> tuple[Tensor, Tensor]:
    flat = y.t().reshape(-1)
    y.add_(1)
    return flat * 2, y


def expanded_then_written(y: Tensor) -> Tensor:
    wide = y[:, None].expand(-1, 2, -1)
    y.abs_()
    return wide * 2


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_operators_give_what_eager_gives(name: str) -> None:
    assert_captured(seeded(Function(IN_PLACE[name])), rand(3, 4), other=(rand(5, 4, seed=2),))


@pytest.mark.parametrize("name", [name for name in IN_PLACE if name not in RETRACED])
def test_writes_to_views_become_functional_without_a_retrace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", None)
    qfx.capture_graph(seeded(Function(IN_PLACE[name])), rand(3, 4))


def test_a_graph_has_one_name_for_each_operator() -> None:
    def aliases(x: Tensor, w: Tensor) -> Tensor:
        y = torch.multiply(x @ w, 2).subtract(1).divide(3).true_divide(2).negative().absolute()
        y = torch.concat([y.clip(0, 1), torch.concatenate([y.positive()])])
        return torch.row_stack([y, y[:1].broadcast_to(2, -1)])

    captured = assert_captured(seeded(Function(aliases)), rand(3, 4))
    names = [str(node.target) for node in captured.module.graph.nodes if node.op == "call_function"]
    assert [name.split(".")[1] for name in names] == [
        *("matmul", "mul", "sub", "div", "div", "neg", "abs", "clamp", "cat", "cat", "slice", "expand", "vstack")
    ]


class OverwritesItsBuffer(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[:2].add_(1)
        return x + self.seen


def test_a_write_to_a_view_of_a_buffer_is_refused() -> None:
    with pytest.raises(qfx.CaptureError, match=r"(writes to its buffer|overwrites the parameter or buffer) .*seen"):
        qfx.capture_graph(OverwritesItsBuffer().eval(), rand(3, 4))


def padded_to_chunks(x: Tensor, size: int) -> Tensor:
    """Sum over chunks of `size` tokens: the tokens are padded to whole chunks, which are then cut off again."""
    batch, tokens, _ = x.shape
    missing = (size - tokens % size) % size
    chunks = nn.functional.pad(x, (0, 0, 0, missing)).reshape(batch, -1, size, x.shape[-1])
    return (chunks + chunks.sum(2, keepdim=True)).reshape(batch, -1, x.shape[-1])[:, :tokens]


class Chunked(nn.Module):
    """Tokens in chunks of four; `scanned` walks the chunks one by one, `cut` cuts only what was padded."""

    def __init__(self, *, scanned: bool = False, cut: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(rand(4, 4))
        self.scanned, self.cut = scanned, cut

    def forward(self, x: Tensor) -> Tensor:
        y = padded_to_chunks(x @ self.weight, 4)
        if self.scanned:
            for _ in range((x.shape[1] + -x.shape[1] % 4) // 4):
                y = y * 2
        if self.cut:
            padded = x.shape[1] + (4 - x.shape[1] % 4) % 4
            whole = nn.functional.pad(y, (0, 0, 0, padded - x.shape[1]))
            y = (whole[:, : x.shape[1]] if padded > x.shape[1] else whole) + x
        return y


def test_sizes_padded_to_chunks_are_simple_expressions() -> None:
    captured = assert_captured(seeded(Chunked()), rand(2, 10, 4), other=(rand(3, 23, 4),))
    sizes = {str(d) for n in calls(captured.module, "") for d in getattr(n.meta.get("val"), "shape", ())}
    assert not any("Mod" in size or "%" in size for size in sizes), sizes


def test_a_walk_over_chunks_holds_for_the_lengths_of_as_many() -> None:
    captured = assert_captured(seeded(Chunked(scanned=True)), rand(2, 10, 4), other=(rand(3, 12, 4),))
    assert captured.signature.input_limits == (("x", 1, 9, 12),)
    with pytest.raises(qfx.QuarkError, match=r"from 9 to 12: .*; capture a batch of that size"):
        captured.signature.flatten((rand(2, 13, 4),), {})


class FewSamples(nn.Module):
    """Upsamples as diffusers do, which copies batches of 64 and more."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous() if x.shape[0] >= 64 else x
        y: Tensor = self.conv(nn.functional.interpolate(x, scale_factor=2.0))
        return y


@pytest.mark.parametrize("size", [1, 2])
def test_a_limit_of_the_batch_leaves_single_samples(size: int) -> None:
    captured = assert_captured(seeded(FewSamples()), rand(size, 3, 5, 5), other=(rand(1, 3, 5, 5),))
    assert captured.signature.input_limits == (("x", 0, 1, 63),)
    with pytest.raises(qfx.QuarkError, match="from 1 to 63"):
        captured.signature.flatten((rand(64, 3, 5, 5),), {})


def test_a_length_of_whole_chunks_is_not_taken_for_any_length() -> None:
    captured = assert_captured(seeded(Chunked(cut=True)), rand(2, 12, 4), other=(rand(3, 16, 4),))
    with pytest.raises(qfx.QuarkError, match=r"requires \(x.shape\[1\] % 4\) == 0;.*capture a batch of these shapes"):
        captured.signature.flatten((rand(2, 13, 4),), {})
    assert_captured(seeded(Chunked(cut=True)), rand(2, 11, 4), other=(rand(3, 17, 4),))


@given(st.integers(1, 40), st.integers(0, 99), st.integers(-3, 3), st.booleans())
def test_what_is_missing_to_whole_chunks_is_the_remainder(size: int, n: int, more: int, nested: bool) -> None:
    x = sympy.Symbol("x", integer=True, nonnegative=True)
    inner = Mod(x, sympy.Integer(size)) if nested and size > 1 else x
    found = round_up(more * size - inner, sympy.Integer(size))
    assert found is not None
    assert found.subs(x, n) == -n % size


@pytest.mark.parametrize("expression", ["x", "1 - x", "-2*x", "-x - y"])
def test_other_remainders_stay(expression: str) -> None:
    x = sympy.Symbol("x", integer=True, nonnegative=True)
    y = sympy.Symbol("y", integer=True)
    assert round_up(sympy.sympify(expression, locals={"x": x, "y": y}), sympy.Integer(8)) is None


def test_torch_is_left_as_it_was() -> None:
    before = [Mod.eval, PythonMod.eval, ShapeEnv._maybe_guard_rel]
    qfx.capture_graph(seeded(Chunked()), rand(2, 10, 4))
    assert [Mod.eval, PythonMod.eval, ShapeEnv._maybe_guard_rel] == before


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


STRUCTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda x, w: x @ w,
    "one_tuple": lambda x, w: (x @ w,),
    "list": lambda x, w: [x @ w, x],
    "dict": lambda x, w: {"logits": x @ w, "hidden": x + 1},
    "ordered_dict": lambda x, w: OrderedDict(z=x @ w, a=x + 1),
    "nested": lambda x, w: {"out": (x @ w, [x + 1, {"deep": x * 2}])},
    "same_tensor_twice": lambda x, w: (lambda y: (y, y))(x @ w),
    "with_none": lambda x, w: (x @ w, None),
    "with_number": lambda x, w: (x @ w, 3),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_outputs_keep_their_structure(name: str) -> None:
    model = seeded(Function(STRUCTURES[name]))
    x = rand(3, 4)
    got, expected = call(qfx.capture_graph(model, x), x), model(x)
    assert type(got) is type(expected)
    assert_same(got, expected)


def test_output_names_are_the_keys_that_lead_to_them() -> None:
    captured = qfx.capture_graph(seeded(Function(STRUCTURES["nested"])), rand(3, 4))
    assert captured.signature.output_names == ("out.0", "out.1.0", "out.1.1.deep")


def test_a_hugging_face_output_comes_back_as_itself() -> None:
    modeling_outputs = pytest.importorskip("transformers.modeling_outputs")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Any:
            return modeling_outputs.BaseModelOutput(last_hidden_state=self.linear(x), attentions=(x,))

    model, x = seeded(Model()), rand(3, 4)
    captured = qfx.capture_graph(model, x)
    got = call(captured, x)
    assert isinstance(got, modeling_outputs.BaseModelOutput)
    torch.testing.assert_close(got.last_hidden_state, model(x).last_hidden_state)
    assert captured.signature.output_names == ("last_hidden_state", "attentions.0")


class Two(nn.Module):
    """Two inputs, the second optional."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y if mask is None else y * mask


class Encoding(UserDict[str, Tensor]):
    """A mapping that is no `dict`, as a tokenizer returns."""


X, MASK = rand(3, 4), rand(3, 1, seed=5)


@pytest.mark.parametrize(
    "batch",
    [(X, MASK), [X, MASK], {"x": X, "mask": MASK}, {"mask": MASK, "x": X}, Encoding(x=X, mask=MASK)],
    ids=["tuple", "list", "dict", "reordered", "encoding"],
)
def test_a_batch_may_be_positions_or_keywords_and_so_may_a_call(batch: Any) -> None:
    model = seeded(Two())
    captured = qfx.capture_graph(model, batch)
    x, mask = rand(5, 4, seed=8), rand(5, 1, seed=9)
    expected = model(x, mask)
    for got in (call(captured, x, mask), call(captured, x, mask=mask), call(captured, mask=mask, x=x)):
        torch.testing.assert_close(got, expected)


def test_a_batch_encoding_is_a_batch() -> None:
    transformers = pytest.importorskip("transformers")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 4)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            out: Tensor = self.embed(input_ids) * attention_mask[..., None]
            return out

    model = seeded(Model())
    batch = transformers.BatchEncoding({"input_ids": tokens(3)[0], "attention_mask": torch.ones(3, 5)})
    captured = qfx.capture_graph(model, batch)
    torch.testing.assert_close(call(captured, **batch), model(**batch))


def test_an_input_left_out_of_the_first_batch_is_not_expected_later() -> None:
    model = seeded(Two())
    captured = qfx.capture_graph(model, X)
    torch.testing.assert_close(call(captured, X), model(X))
    with pytest.raises(qfx.QuarkError, match=r"captured with inputs x; this call adds mask"):
        call(captured, X, MASK)


def test_a_nested_input_keeps_its_structure() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
            out: Tensor = self.linear(pair[0]) + pair[1]["more"]
            return out

    model = seeded(Model())
    captured = qfx.capture_graph(model, {"pair": (X, {"more": X})})
    y = rand(6, 4, seed=4)
    torch.testing.assert_close(call(captured, (y, {"more": y * 2})), model((y, {"more": y * 2})))


def test_variadic_inputs_are_captured() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *xs: Tensor, **more: Tensor) -> Tensor:
            out: Tensor = self.linear(xs[0]) + xs[1]
            return out

    model = seeded(Model())
    captured = qfx.capture_graph(model, (X, X + 1))
    torch.testing.assert_close(call(captured, X + 2, X), model(X + 2, X))


def test_a_call_with_another_constant_than_the_captured_one_is_refused() -> None:
    """A number is baked into the graph: a call with another one must not be answered with the old."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor, negate: bool = False) -> Tensor:
            y: Tensor = self.linear(x)
            return -y if negate else y

    model = seeded(Model())
    captured = qfx.capture_graph(model, {"x": X, "negate": True})
    torch.testing.assert_close(call(captured, X, negate=True), model(X, negate=True))
    with pytest.raises(qfx.QuarkError, match="negate"):
        call(captured, X, negate=False)


def test_a_tensor_where_none_was_captured_is_refused() -> None:
    captured = qfx.capture_graph(seeded(Two()), {"x": X, "mask": None})
    torch.testing.assert_close(call(captured, X, None), seeded(Two())(X))
    with pytest.raises(qfx.QuarkError, match="mask"):
        call(captured, X, MASK)


@pytest.mark.parametrize("dynamic", [True, False])
def test_an_exported_program_is_taken_as_it_is(dynamic: bool) -> None:
    model, x = cnn(), images(3)[0]
    shapes = {"x": {0: torch.export.Dim("batch", min=2)}} if dynamic else None
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    captured = qfx.capture_graph(program)
    torch.testing.assert_close(call(captured, x), model(x))
    assert captured.signature.input_shapes == (((None if dynamic else 3), 3, 8, 8),)
    if not dynamic:
        with pytest.raises(qfx.QuarkError, match=r"shape \(5, 3, 8, 8\); the graph was captured for \(3, 3, 8, 8\)"):
            call(captured, images(5)[0])


def test_parameters_keep_their_names_and_tensors() -> None:
    model = cnn()
    captured = qfx.capture_graph(model, images(2)[0])
    state = model.state_dict(keep_vars=True)
    read = [str(node.target) for node in captured.module.graph.nodes if node.op == "get_attr"]
    assert set(read) <= set(state)
    assert {"stem.0.weight", "block.norm.running_var", "head.bias"} <= set(read)
    for name in read:
        owner, _, leaf = name.rpartition(".")
        assert getattr(captured.module.get_submodule(owner), leaf).data_ptr() == state[name].data_ptr()


def test_the_users_model_is_not_touched() -> None:
    model = cnn()
    ran: list[int] = []
    model.get_submodule("head").register_forward_hook(lambda *_: ran.append(1))
    model.requires_grad_(True)
    before = {name: (p, p.clone(), p.requires_grad) for name, p in model.state_dict(keep_vars=True).items()}
    modules = {name: (module, type(module), module.training) for name, module in model.named_modules()}
    hooks = dict(model.get_submodule("head")._forward_hooks)
    data = images(4, 4)
    expected = model(data[0])
    kept = [x.clone() for x in data]
    quantize(model, "int8_static", data)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    for name, (p, value, grad) in before.items():
        assert after[name] is p, name
        assert torch.equal(p, value), name
        assert p.requires_grad is grad, name
    assert {n: (m, type(m), m.training) for n, m in model.named_modules()} == modules
    assert dict(model.get_submodule("head")._forward_hooks) == hooks
    assert all(torch.equal(a, b) for a, b in zip(data, kept, strict=True))
    torch.testing.assert_close(model(data[0]), expected, rtol=0, atol=0)


def test_a_forward_decorated_with_no_grad_is_captured() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.linear(x)
            return out

    captured = assert_captured(seeded(Model()), rand(3, 4), other=(rand(5, 4),))
    assert len(calls(captured.module, "aten.linear")) == 1


def test_a_no_grad_block_inside_leaves_no_submodule_call() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad():
            y = x @ w
        return torch.relu(y)

    captured = assert_captured(seeded(Function(forward)), rand(3, 4))
    assert [node.op for node in captured.module.graph.nodes if node.op.startswith("call")] == ["call_function"] * 2


def test_dropout_copies_and_casts_to_the_same_type_are_gone() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        y = nn.functional.dropout((x @ w).contiguous().clone().float(), training=False)
        return y.to(x.dtype).detach()

    captured = assert_captured(seeded(Function(forward)), rand(3, 4))
    assert len(calls(captured.module, "")) == 1


def test_linear_convolution_and_attention_stay_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.linear = nn.Conv1d(4, 4, 1), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(self.conv(x).transpose(1, 2))
            return nn.functional.scaled_dot_product_attention(y, y, y)

    captured = assert_captured(seeded(Model()), rand(2, 4, 5))
    for name in ("aten.conv1d", "aten.linear", "aten.scaled_dot_product_attention"):
        assert len(calls(captured.module, name)) == 1


def test_dynamic_shapes_override_the_default() -> None:
    captured = qfx.capture_graph(cnn(), images(4)[0], dynamic_shapes={"x": None})
    assert captured.signature.input_shapes == ((4, 3, 8, 8),)
    free = qfx.capture_graph(
        cnn(), images(4)[0], dynamic_shapes={"x": {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}}
    )
    assert free.signature.input_shapes == ((None, 3, None, 8),)


def test_the_same_parameter_under_two_names_is_captured() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 4), nn.Linear(4, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.embed(ids))
            return out

    assert_captured(seeded(Tied()), tokens(3)[0])


class Short(nn.Module):
    """A depthwise convolution whose kernel is passed on as a matrix, as state-space layers do."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.between = nn.Conv1d(4, 4, 4, groups=4), between

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.between(self.conv.weight.squeeze(1)).unsqueeze(1)
        return nn.functional.conv1d(x, kernel, self.conv.bias, groups=4)


@pytest.mark.parametrize(
    ("between", "whole"),
    [(lambda w: w, True), (lambda w: w.flatten().view(4, 4), True), (lambda w: w.t(), False)],
    ids=["as it is", "flat", "transposed"],
)
def test_a_kernel_that_gets_its_own_shape_back_is_the_weight(between: Callable[[Tensor], Tensor], whole: bool) -> None:
    captured = assert_captured(seeded(Short(between)), rand(2, 4, 9))
    (conv,) = calls(captured.module, "aten.conv1d")
    assert isinstance(conv.args[1], torch.fx.Node)
    assert (conv.args[1].op == "get_attr") == whole


# Errors -----------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line the message has to name
            return x
        return -x


def test_data_dependent_control_flow_is_named_with_module_file_and_line(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(OrderedDict(first=nn.Linear(4, 4), decide=Inner())).eval()
    line = Inner.forward.__code__.co_firstlineno + 1
    with pytest.raises(qfx.CaptureError) as caught:
        qfx.capture_graph(model, rand(3, 4))
    message = str(caught.value)
    assert f"{__file__}:{line} in forward" in message
    assert "module decide" in message
    assert "torch.where" in message
    assert not any(capsys.readouterr()), "torch printed the graph"


def test_torch_does_not_warn_of_how_it_keeps_recurrent_parameters() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        qfx.capture_graph(nn.LSTM(4, 4).eval(), rand(3, 2, 4))
    assert not [str(w.message) for w in caught if "_flat_weights" in str(w.message)]


class Experts(nn.Module):
    """A stack of matrices of which each row chooses one."""

    def __init__(self, settable: bool) -> None:
        super().__init__()
        self.stack = nn.Parameter(rand(3, 4, 4))
        self.config = SimpleNamespace(_experts_implementation="eager")
        self._can_set_experts_implementation = lambda: settable

    def forward(self, x: Tensor) -> Tensor:
        out = x
        for expert in x[:, 0].long().clamp(0, 2).unique():
            out = out + x @ self.stack[int(expert)]
        return out


@pytest.mark.parametrize("settable", [True, False])
def test_experts_called_one_by_one_are_refused_with_a_way_that_there_is(settable: bool) -> None:
    with pytest.raises(qfx.CaptureError, match="experts are called one by one") as caught:
        qfx.capture_graph(Experts(settable).eval(), rand(3, 4))
    assert ("set_experts_implementation('grouped_mm')" in str(caught.value)) == settable


def test_what_experts_are_advised_is_said_of_lines_inside_of_them_alone() -> None:
    class Choosing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.sum() > 0 else x

    class Both(Experts):
        def __init__(self) -> None:
            super().__init__(settable=True)
            self.choosing = Choosing()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.choosing(x) @ self.stack[0]
            return found

    with pytest.raises(qfx.CaptureError, match=r"use torch\.where") as caught:
        qfx.capture_graph(Both().eval(), rand(3, 4))
    assert "experts" not in str(caught.value)


def test_an_exception_of_the_models_own_names_its_line() -> None:
    def forward(x: Tensor, w: Tensor) -> Tensor:
        raise RuntimeError("out of cheese")

    with pytest.raises(qfx.CaptureError, match="out of cheese") as caught:
        qfx.capture_graph(Function(forward).eval(), rand(3, 4))
    assert f"{__file__}:{forward.__code__.co_firstlineno + 1}" in str(caught.value)


@pytest.mark.parametrize("part", ["", "1"])
def test_train_mode_is_refused_by_name(part: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    model.get_submodule(part).train()
    with pytest.raises(qfx.CaptureError, match=r"first (\(the model\)|1) .*call model.eval\(\) first"):
        qfx.capture_graph(model, rand(3, 4))


def test_a_model_on_two_devices_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, bias=False)).eval()
    model[2].to("meta")
    with pytest.raises(qfx.CaptureError, match=r"first 2.weight, are on the meta device, without values: accelerate"):
        qfx.capture_graph(model, rand(3, 4))
    with FakeTensorMode():  # a tensor of another device, without that device
        model[2].weight = nn.Parameter(torch.empty(4, 4, device="cuda"))
    with pytest.raises(
        qfx.CaptureError, match=r"cpu \(4 tensors\), cuda:0 \(1 tensors\); the first tensor on cuda:0 is 2.weight"
    ):
        qfx.capture_graph(model, rand(3, 4))


def test_an_input_on_another_device_than_the_model_is_refused() -> None:
    with pytest.raises(qfx.CaptureError, match="is on meta, the model on cpu"):
        qfx.capture_graph(cnn(), images(2)[0].to("meta"))


def test_image_and_label_pairs_are_refused_with_the_remedy() -> None:
    with pytest.raises(qfx.CaptureError, match=r"for x, _ in loader"):
        qfx.capture_graph(cnn(), (images(2)[0], torch.tensor([0, 1])))
    with pytest.raises(qfx.QuarkError, match=r"for x, _ in loader"):
        quantize(cnn(), "int8_static", [(images(2)[0], torch.tensor([0, 1]))])


@pytest.mark.parametrize("batch", [(), {"y": X}, {"x": X, "nonsense": X}])
def test_a_batch_that_does_not_fit_forward_is_refused_with_its_parameters(batch: Any) -> None:
    with pytest.raises(qfx.CaptureError, match=r"does not fit `forward\(x.*mask"):
        qfx.capture_graph(seeded(Two()), batch)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((rand(4),), r"input x has shape \(4,\); the graph was captured for \(any, 4\)"),
        ((rand(2, 5),), r"input x has shape \(2, 5\); .*dynamic_shapes"),
        ((rand(2, 4).double(),), r"input x has dtype torch.float64; the model was captured with torch.float32"),
        (("text",), "input x is a str; the model was captured with a tensor there"),
        ((), "lacks x"),
        ((rand(2, 4), rand(2, 4)), "input"),
    ],
    ids=["rank", "size", "dtype", "type", "too few", "too many"],
)
def test_a_call_that_does_not_fit_is_refused(inputs: tuple[Any, ...], message: str) -> None:
    captured = qfx.capture_graph(seeded(nn.Linear(4, 3)).eval(), {"input": rand(3, 4)})
    with pytest.raises(
        qfx.QuarkError, match=message.replace("input x", "input input").replace("lacks x", "lacks input")
    ):
        call(captured, *inputs)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_an_input_without_values_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(qfx.CaptureError, match=r"is empty, shape \(\d, \d\)"):
        qfx.capture_graph(seeded(nn.Linear(4, 3)), torch.zeros(shape))


def test_a_forward_that_writes_to_a_buffer_is_refused_by_name() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps: Tensor
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.steps += 1
            return x * self.steps

    with pytest.raises(qfx.CaptureError, match="steps"):
        qfx.capture_graph(nn.Sequential(nn.Linear(4, 4), Counter()).eval(), rand(3, 4))


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(qfx.CaptureError, match=r"expected an nn.Module or an ExportedProgram, not function"):
        qfx.capture_graph(lambda x: x, rand(1))  # type: ignore[arg-type]


@dataclass
class Unregistered:
    value: Tensor


def test_an_unregistered_output_type_is_refused_with_a_capture_error() -> None:
    with pytest.raises(qfx.CaptureError, match="Unregistered"):
        qfx.capture_graph(seeded(Function(lambda x, w: Unregistered(x @ w))), rand(3, 4))


def test_a_shortage_of_memory_is_not_taken_for_data_of_another_dtype() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        qfx.capture_graph(Large().eval(), rand(2, 4).double())


class Loop(nn.Module):
    """A linear of one sample after another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        rows = []
        for i in range(x.shape[0]):
            rows.append(self.linear(x[i]))
        return torch.stack(rows) + y


class FixedByReshape(nn.Module):
    """A number in a reshape."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.reshape(3, -1)[:, :4] + y


def test_a_loop_over_the_batch_is_said_at_capture_with_its_line() -> None:
    line = inspect.getsourcelines(Loop.forward)[1] + 2
    with pytest.warns(UserWarning, match=rf"fixes dimension 0 of input x at 3.*test_capture\.py:{line}"):
        captured = qfx.capture_graph(Loop().eval(), (rand(3, 8), rand(3, 4)))
    assert captured.signature.input_shapes[0][0] == 3  # type: ignore[index]


def test_a_number_that_fixes_the_batch_is_said_at_capture() -> None:
    with pytest.warns(UserWarning, match="fixes dimension 0 of input x at 3"):
        qfx.capture_graph(FixedByReshape().eval(), (rand(3, 8), rand(3, 4)))


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_varies_is_not_said_to_be_fixed(batch: int) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("row", torch.ones(7, 8))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.linear(x) * mask @ self.row.mT  # type: ignore[no-any-return]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qfx.capture_graph(Masked().eval(), (rand(batch, 5, 8), rand(5, 8)))


def test_a_packed_sequence_is_refused_by_name() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cells = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Any:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]

    with pytest.raises(qfx.CaptureError, match="packed sequence depend on the lengths"):
        quantize(Packed().eval(), "int8_weight_only", [(rand(2, 3, 4), torch.tensor([3, 2]))])


def test_a_decoder_with_a_configuration_of_its_own_returns_no_cache_that_nobody_asked_for() -> None:
    t = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    model = t.T5ForConditionalGeneration(t.T5Config(vocab_size=32, **sizes)).eval()
    tokens = torch.arange(2, 18).reshape(2, 8)
    captured = qfx.capture_graph(model, {"input_ids": tokens, "decoder_input_ids": tokens})
    assert captured.signature.output_names == ("logits", "encoder_last_hidden_state")
    assert model.decoder.config.use_cache


class Audio(nn.Module):
    """Strided convolutions, then frames of whole quarters."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Sequential(nn.Conv1d(1, 4, 9, 4), nn.ReLU(), nn.Conv1d(4, 4, 5, 2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.convolve(x[:, None]).unflatten(-1, (-1, 4)).mean(-1)
        return y


def test_a_condition_without_a_value_at_a_size_does_not_hold_there() -> None:
    """Guards of strided convolutions have negative dividends at small sizes, where torch's functions assert."""
    captured = qfx.capture_graph(Audio().eval(), torch.randn(4, 85))
    assert captured.signature.output_names
    size = sympy.Symbol("size", integer=True, positive=True)
    convolved = sympy.Eq(Mod(size - 9, 4), 0)
    assert [n for n in range(1, 20) if _holds(convolved, {size: n})] == [5, 9, 13, 17]


def nested(levels: int) -> nn.Module:
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(levels):
        model = nn.Sequential(model)
    return model


def test_modules_that_are_nested_too_deep_are_refused_with_a_way_out() -> None:
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1000)  # Python's own; a library that an earlier test imported may have raised it
        assert capture_graph(nested(20).eval(), rand(2, 4))
        with pytest.raises(qfx.CaptureError, match=r"recursion limit of 1000: .*sys.setrecursionlimit\(20000\)"):
            capture_graph(nested(150).eval(), rand(2, 4))
        sys.setrecursionlimit(20_000)
        assert capture_graph(nested(150).eval(), rand(2, 4))
        with pytest.raises(qfx.CaptureError, match="nested in 300 numbered modules"):
            capture_graph(nested(300).eval(), rand(2, 4))
    finally:
        sys.setrecursionlimit(before)
