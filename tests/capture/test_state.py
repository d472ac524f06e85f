"""Models that write their buffers or switch tables by length are captured where a call depends on no earlier call."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import seeded_tables
import torch
import transformers
from seeded_models import rand, seeded
from torch import Tensor, nn

import quark_fx as qfx
from quark_fx.capture.capture import Captured
from quark_fx.capture.capture_errors import require_repeats
from quark_fx.capture.written_tensors import WrittenTensors


class Writes(nn.Module):
    """A model whose forward calls `write`, which may write the buffer."""

    seen: Tensor

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("seen", torch.arange(4.0))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(x, self.seen) * self.scale


def fill(x: Tensor, seen: Tensor) -> Tensor:
    seen.copy_(x[0])
    return x + seen


def fill_then_change(x: Tensor, seen: Tensor) -> Tensor:
    seen.zero_()
    seen[:2] = 3
    return x + seen


def count(x: Tensor, seen: Tensor) -> Tensor:
    seen.add_(1)
    seen[1:] += x[0, 1:]
    return x + 1


def read_then_count(x: Tensor, seen: Tensor) -> Tensor:
    y = x * seen[:1]
    seen += 1
    return y


def read_then_fill(x: Tensor, seen: Tensor) -> Tensor:
    y = x * seen
    seen.copy_(x[0])
    return y


def keep_then_count(x: Tensor, seen: Tensor) -> Tensor:
    kept = torch.zeros_like(seen)
    kept[:3].copy_(seen[1:])
    seen.add_(1)
    return x + kept


def count_then_read(x: Tensor, seen: Tensor) -> Tensor:
    seen.add_(1)
    return x + seen


def average(x: Tensor, seen: Tensor) -> Tensor:
    seen.copy_(0.9 * seen + 0.1 * x.mean(0))
    return x - seen


def fill_a_part(x: Tensor, seen: Tensor) -> Tensor:
    seen[:2].copy_(x[0, :2])
    return x + seen


def read_through_a_view(x: Tensor, seen: Tensor) -> Tensor:
    view = seen.view(2, 2)
    seen.add_(1)
    return x + view.sum()


@pytest.mark.parametrize("write", [fill, fill_then_change, count])
def test_writes_that_no_later_call_reads_are_captured(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    model, x = seeded(Writes(write)), rand(3, 4)
    captured = qfx.capture_graph(model, x)
    torch.testing.assert_close(model.seen, torch.arange(4.0), rtol=0, atol=0)
    for batch in (x, rand(5, 4) + 1):
        torch.testing.assert_close(captured.module(batch)[0], seeded(Writes(write))(batch), rtol=0, atol=0)


@pytest.mark.parametrize(
    "write",
    [count_then_read, read_then_count, read_then_fill, keep_then_count, average, fill_a_part, read_through_a_view],
)
def test_writes_that_a_later_call_reads_are_refused_with_a_remedy(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(qfx.CaptureError, match=r"overwrites the parameter or buffer seen.*seen = self\.seen \+ 1"):
        qfx.capture_graph(seeded(Writes(write)), rand(3, 4))
    assert qfx.capture_graph(seeded(Writes(lambda x, seen: x + (seen + 1))), rand(3, 4))  # the remedy


def test_a_buffer_under_two_names_is_no_scratch() -> None:
    model = seeded(Writes(lambda x, seen: x + seen))
    again = model.seen.view(4)
    model.register_buffer("again", again)
    model.write = lambda x, seen: x + model.get_buffer("again") + fill(x, seen)
    with pytest.raises(qfx.CaptureError, match="overwrites"):
        qfx.capture_graph(model, rand(3, 4))


class Positions(nn.Module):
    """Embed positions; sequences longer than eight compute a table from their length and keep it (dynamic NTK)."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)
        self.table = torch.arange(4.0)
        self.kept: int | Tensor = 8

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        length = torch.add(torch.max(input=positions), other=1)
        if length > self.kept:
            self.table, self.kept = torch.arange(4.0) / torch.maximum(length, torch.tensor(8)), length
        embedded: Tensor = self.out(x + (positions.unsqueeze(-1) * self.table).cos())
        return embedded


def refused(captured: Captured, batch: Any) -> bool:
    try:
        captured.signature.flatten((batch,), {})
    except qfx.QuarkError as error:
        return "another path" in str(error)
    return False


def test_a_branch_on_the_largest_position_limits_the_length() -> None:
    for length, accepted in ((6, [3, 8]), (12, [9, 12, 20])):
        model = seeded(Positions())
        before = dict(vars(model))
        captured = qfx.capture_graph(model, rand(2, length, 4))
        assert all(vars(model)[name] is value for name, value in before.items())
        for other in (3, 8, 9, 12, 20):
            batch = rand(2, other, 4)
            assert refused(captured, batch) == (other not in accepted)
            if other in accepted:  # of a model that has seen nothing longer
                torch.testing.assert_close(captured.module(batch)[0], seeded(Positions())(batch))


def test_a_branch_on_positions_that_are_given_is_refused() -> None:
    class Given(Positions):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2 if torch.max(positions) > 8 else x

    class Larger(Positions):
        def forward(self, x: Tensor, others: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2 if torch.max(torch.arange(x.shape[1]), others).max() > 8 else x

    class Named(Positions):
        def forward(self, x: Tensor, others: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2 if torch.max(torch.arange(x.shape[1]), other=others).max() > 8 else x

    class Written(Positions):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            positions = torch.arange(x.shape[1])
            positions.view(1, -1).add_(shift)
            return x * 2 if torch.max(positions) > 8 else x

    for made in (Given(), Larger(), Named(), Written()):
        with pytest.raises(qfx.CaptureError, match="depends on the values of a tensor"):
            qfx.capture_graph(seeded(made), (rand(2, 6, 4), torch.arange(6)))


def ids(length: int) -> Tensor:
    return torch.arange(2 * length).reshape(2, length) * 7 % 63 + 1


def language_model(name: str) -> Any:
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    shape |= {"num_hidden_layers": 1, "num_key_value_heads": 2, "eos_token_id": None}
    if name == "longrope":
        factors = {"short_factor": [1.0 + i for i in range(8)], "long_factor": [3.0 + i for i in range(8)]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
        config: Any = transformers.Phi3Config(**shape, max_position_embeddings=32, rope_parameters=rope | factors)
        return seeded(transformers.Phi3ForCausalLM(config))
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**shape, max_position_embeddings=8, rope_parameters=rope)
    return seeded(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize(("name", "example", "lengths"), [("longrope", 6, (3, 8, 9, 16)), ("dynamic", 12, (9, 12, 16))])
def test_rotary_tables_that_depend_on_the_length(name: str, example: int, lengths: tuple[int, ...]) -> None:
    model = language_model(name)
    held = {key: (tensor, tensor.clone()) for key, tensor in model.named_buffers()}
    captured = qfx.capture_graph(model, {"input_ids": ids(example)})
    for key, tensor in model.named_buffers():
        assert tensor is held[key][0]
        assert torch.equal(tensor, held[key][1])
    for length in lengths:
        batch = {"input_ids": ids(length)}
        flat = captured.signature.flatten((), batch)
        with torch.no_grad():
            expected = language_model(name)(**batch).logits
            torch.testing.assert_close(captured.module(*flat)[0], expected, rtol=0, atol=1e-5)


IN_FILE: dict[str, Any] = {}

LAST: Any = None


def keep_in_file(*seen: Any) -> None:
    global LAST
    LAST = IN_FILE["last"] = seen[-1]


def keep_by_helper(*seen: Any) -> None:
    keep_in_file(*seen)


def keep_in_argument(kept: list[Any], *seen: Any) -> None:
    kept.append(seen[-1])


def keep_in_default(*seen: Any, kept: list[Any] = []) -> None:  # noqa: B006 (the default is the state)
    kept.append(seen[-1])


def keep_in_itself(*seen: Any) -> None:
    vars(keep_in_itself)["last"] = seen[-1]


@dataclass
class Keeps:
    seen: list[Any] = field(default_factory=list)
    last: Any = None

    def hook(self, *seen: Any) -> None:
        self.last = seen[-1]
        self.seen.append(seen)


@dataclass(slots=True)
class KeepsInSlots:
    last: Any = None

    def __call__(self, *seen: Any) -> None:
        self.last = seen[-1]


def test_what_hooks_and_patched_forwards_hold_is_the_same_after_capture() -> None:
    by_name: dict[str, Any] = {}
    last = in_argument = None
    unset: Any

    def keep_in_closure(*seen: Any) -> None:
        nonlocal last, unset
        last = unset = by_name["last"] = seen[-1]

    def forward(x: Tensor) -> Tensor:
        by_name["input"] = x
        return x * 2

    in_argument, keeps, slots = list[Any](), Keeps(), KeepsInSlots()
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity()).eval()
    model[1].forward = forward
    hooks = (keep_by_helper, partial(keep_in_argument, in_argument), keep_in_default, keep_in_itself, keeps.hook)
    for hook in (*hooks, slots, keep_in_closure):
        model[0].register_forward_hook(hook)

    def held() -> list[Any]:
        alone = [LAST, last, keeps.last, slots.last, vars(keep_in_itself).get("last"), IN_FILE.get("last")]
        kept = (in_argument, (keep_in_default.__kwdefaults__ or {})["kept"], keeps.seen)
        return [*alone, *by_name.values(), *map(len, kept)]

    assert held() == [None] * 6 + [0] * 3
    qfx.capture_graph(model, rand(2, 4))
    assert held() == [None] * 6 + [0] * 3
    with pytest.raises(NameError):
        print(unset)
    x = rand(2, 4)
    model(x)
    before = held()
    assert all(isinstance(value, Tensor | int) for value in before)
    qfx.capture_graph(model, rand(2, 4))
    assert all(now is was for now, was in zip(held(), before, strict=True))
    assert unset is last


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        result: Tensor = self.linear(x if y is None else x + y)
        return result


def doubled(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(2 * x for x in args)


def doubled_with_keywords(_: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    return doubled(_, args), {name: 3 * x for name, x in kwargs.items()}


def increased(_: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
    return result + sum(x.sum(1, keepdim=True) for x in args)


@pytest.mark.parametrize("batch", [(rand(4, 16),), (rand(4, 16), rand(4, 16, seed=2)), {"x": rand(4, 16)}])
def test_hooks_of_the_model_see_positions_and_keywords_of_the_batch(batch: Any) -> None:
    args, kwargs = (batch, {}) if isinstance(batch, tuple) else ((), batch)
    model = seeded(Two())
    model.register_forward_pre_hook(doubled)
    model.register_forward_pre_hook(doubled_with_keywords, with_kwargs=True)
    model.register_forward_hook(increased)
    hooks = [*model._forward_pre_hooks], [*model._forward_pre_hooks_with_kwargs], [*model._forward_hooks]
    captured = qfx.capture_graph(model, batch)
    assert hooks == ([*model._forward_pre_hooks], [*model._forward_pre_hooks_with_kwargs], [*model._forward_hooks])
    leaves = captured.signature.leaves_of(batch)
    assert torch.allclose(captured.module(*leaves)[0], model(*args, **kwargs), atol=1e-5)


def test_objects_in_c_have_no_slots_to_restore() -> None:
    model = nn.Linear(4, 2).eval()
    vars(model)["pattern"] = re.compile(
        "a", re.ASCII | re.IGNORECASE
    )  # `flags` is read-only, and a new number at each read
    qfx.capture_graph(model, rand(2, 4))


def next_tokens(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return ((args[0] + 1) % 32, *args[1:])


def test_hooks_of_a_transformers_model_see_positions() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, vocab_size=32, use_cache=False)
    model = seeded(transformers.LlamaForCausalLM(config))
    model.register_forward_pre_hook(next_tokens)
    batch = (torch.arange(16).reshape(2, 8), torch.ones(2, 8, dtype=torch.int64))
    captured = qfx.capture_graph(model, batch)
    assert torch.allclose(captured.module(*captured.signature.leaves_of(batch))[0], model(*batch).logits, atol=1e-5)


_TABLES: dict[str, Tensor] = {}
_LAST: Tensor | None = None


@lru_cache
def table(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32)


def table_of_a_helper(size: int) -> Tensor:
    return table(size)


class KeepsInItsFile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def keep(self, x: Tensor) -> None:
        global _LAST
        _LAST = x

    @lru_cache  # noqa: B019 (models are written so)
    def own_table(self) -> Tensor:
        return torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        if "sizes" not in _TABLES:
            _TABLES["sizes"] = torch.arange(4.0)
        self.keep(x)
        result: Tensor = self.linear(x) + _TABLES["sizes"] + table_of_a_helper(4) + self.own_table()
        return result


def test_variables_and_caches_of_the_file_of_a_model_are_the_same_after_capture() -> None:
    model, x = seeded(KeepsInItsFile()), rand(2, 4)
    captured = qfx.capture_graph(model, x)
    assert (_TABLES, _LAST) == ({}, None)
    assert torch.allclose(captured.module(x)[0], model(x))
    tables = _TABLES["sizes"], table(4), model.own_table()
    assert all(type(one) is Tensor for one in tables)
    assert torch.allclose(qfx.capture_graph(model, x).module(x)[0], model(x))
    assert globals()["_LAST"] is x
    assert all(a is b for a, b in zip(tables, (_TABLES["sizes"], table(4), model.own_table()), strict=True))


_CALLS: list[int] = []


class Remembers(nn.Module):
    """A model whose forward calls `compute`, which may change attributes."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute
        self.step, self.flipped, self.last, self.table = 0, False, None, None
        self.history: list[Any] = []
        self.counts = np.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def by_step(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    result: Tensor = model.linear(x) * model.step
    return result


def by_history(model: Any, x: Tensor) -> Tensor:
    model.history.append(model.linear(x))
    return torch.stack(model.history).sum(0)


def by_flag(model: Any, x: Tensor) -> Tensor:
    model.flipped = not model.flipped
    result: Tensor = model.linear(-x if model.flipped else x)
    return result


def by_last_batch(model: Any, x: Tensor) -> Tensor:
    before = x if model.last is None else model.last
    model.last = x
    result: Tensor = model.linear(x - before)
    return result


def by_array(model: Any, x: Tensor) -> Tensor:
    model.counts[0] += 1
    result: Tensor = model.linear(x) * float(model.counts[0])
    return result


def by_file(model: Any, x: Tensor) -> Tensor:
    _CALLS.append(1)
    result: Tensor = model.linear(x) * len(_CALLS)
    return result


def by_small_step(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    result: Tensor = model.linear(x).bfloat16() * (1 + model.step / 32)
    return result


def by_step_next_to_a_mask(model: Any, x: Tensor) -> Tensor:
    return torch.cat([by_step(model, x), torch.full((99, 4), torch.finfo(x.dtype).min)])


def by_complex_step(model: Any, x: Tensor) -> Tensor:
    return torch.complex(x, by_step(model, x)).abs().float() + torch.view_as_real(x * (1 + 1j))[..., 0]


def by_every_third_call(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    result: Tensor = model.linear(x) * (2 if model.step % 3 == 0 else 1)
    return result


def by_count(model: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    model.step += 1
    return model.linear(x), torch.full((1,), 10**6 + model.step)


@pytest.mark.parametrize(
    ("compute", "name"),
    [
        (by_step, "step"),
        (by_small_step, "step"),
        (by_step_next_to_a_mask, "step"),
        (by_complex_step, "step"),
        (by_every_third_call, "step"),
        (by_count, "step"),
        (by_history, "history"),
        (by_flag, "flipped"),
        (by_last_batch, "last"),
        (by_array, "counts"),
        (by_file, "_CALLS"),
    ],
)
def test_python_state_of_earlier_calls_is_refused(compute: Callable[[Any, Tensor], Any], name: str) -> None:
    model = seeded(Remembers(compute))
    with pytest.raises(qfx.CaptureError, match=rf"forward changes {name} at each call"):
        qfx.capture_graph(model, rand(3, 4))
    held = (model.step, model.history, model.flipped, model.last, model.counts[0], _CALLS)
    assert held == (0, [], False, None, 0, [])


def halves() -> Iterator[float]:
    value = 0.0
    while True:
        yield value
        value += 0.5


_TURNS = itertools.count()

_DRAWS = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("held", "draw", "name"),
    [
        (itertools.count, next, "held"),
        (halves, next, "held"),
        (lambda: (float(i) for i in itertools.count()), next, "held"),
        (lambda: itertools.cycle([1.0, 2.0, 3.0]), next, "held"),
        (lambda: map(float, itertools.count()), next, "held"),
        (lambda: zip(range(50), itertools.count(), strict=False), lambda held: next(held)[1], "held"),
        (lambda: iter([0.0, 1.0] * 25), next, "held"),
        (lambda: iter(dict.fromkeys(range(50))), next, "held"),
        (lambda: iter(deque([0.0, 1.0] * 25)), next, "held"),
        (lambda: iter([0.0] + [1.0] * 50), next, "held"),
        (lambda: itertools.chain([0.0], itertools.repeat(1.0)), next, "held"),
        (lambda: (float(i > 0) for i in itertools.count()), next, "held"),
        (lambda: map(float, [0.0] + [1.0] * 50), lambda held: next(held, 1.0), "held"),
        (lambda: random.Random(0), lambda held: held.random(), "held"),
        (lambda: np.random.RandomState(0), lambda held: float(held.rand()), "held"),
        (list, lambda _: next(_TURNS), "_TURNS"),
        (list, lambda _: float(_DRAWS.random()), "_DRAWS"),
        (list, lambda _: random.random(), "random"),
        (list, lambda _: float(np.random.rand()), r"numpy\.random"),
    ],
)
def test_iterators_and_random_numbers_of_python_are_refused(
    held: Callable[[], Any], draw: Callable[[Any], float], name: str
) -> None:
    def compute(model: Any, x: Tensor) -> Tensor:
        result: Tensor = model.linear(x) + draw(model.held)
        return result

    model: Any = seeded(Remembers(compute))
    model.held = held()
    with pytest.raises(qfx.CaptureError, match=rf"returns different values .* forward changes {name} at each call"):
        qfx.capture_graph(model, rand(3, 4))
    if isinstance(model.held, random.Random):
        assert model.held.random() == held().random()


def counts_and_logs(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    model.history.append(x)
    result: Tensor = model.linear(x)
    return result


def counts_and_draws(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    result: Tensor = model.linear(x) + torch.randn_like(x)
    return result


def numbers_its_calls(model: Any, x: Tensor) -> Tensor:
    model.step = next(_TURNS)
    result: Tensor = model.linear(x)
    return result


def makes_a_table(model: Any, x: Tensor) -> Tensor:
    model.step += 1
    if model.table is None:
        model.table = torch.arange(4.0)
    result: Tensor = model.linear(x) + model.table
    return result


@pytest.mark.parametrize("compute", [counts_and_logs, counts_and_draws, numbers_its_calls, makes_a_table])
def test_python_state_that_outputs_do_not_depend_on_is_captured(compute: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = seeded(Remembers(compute)), rand(3, 4)
    before = torch.get_rng_state()
    captured = qfx.capture_graph(model, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert (model.step, model.history, model.table) == (0, [], None)
    if compute is not counts_and_draws:
        torch.testing.assert_close(captured.module(x)[0], model(x))


def test_a_counter_that_is_an_input_is_captured() -> None:
    class Counts(nn.Module):
        def forward(self, x: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
            return x * (step + 1), step + 1

    batch = (rand(3, 4), torch.tensor(0))
    assert torch.equal(qfx.capture_graph(Counts().eval(), batch).module(*batch)[0], batch[0])


def test_a_first_call_that_computes_something_else_is_refused() -> None:
    def warms_up(model: Any, x: Tensor) -> Tensor:
        scale = 1.0 if model.flipped else 1.3
        model.flipped = True
        result: Tensor = model.linear(x) * scale
        return result

    model = seeded(Remembers(warms_up))
    with pytest.raises(qfx.CaptureError, match="forward changes flipped at its first call"):
        qfx.capture_graph(model, rand(3, 4))
    with pytest.raises(qfx.CaptureError, match="forward changes flipped at its first call"):
        qfx.capture_graph(model.bfloat16(), rand(3, 4).bfloat16())


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_model_that_runs_only_once_is_refused_with_its_error(outputs: int) -> None:
    def once(model: Any, x: Tensor) -> Any:
        if model.flipped:
            raise ValueError("used up")
        model.flipped = True
        return (model.linear(x), x + 1)[:outputs]

    with pytest.raises(qfx.CaptureError, match=r"does not run twice on the same batch \(ValueError: used up\)"):
        qfx.capture_graph(seeded(Remembers(once)), rand(3, 4))


def test_a_shortage_of_memory_skips_the_comparison_of_calls() -> None:
    def is_short_later(model: Any, x: Tensor) -> Tensor:
        model.step += 1
        if model.step > 1:
            raise MemoryError
        result: Tensor = model.linear(x)
        return result

    assert qfx.capture_graph(seeded(Remembers(is_short_later)), rand(3, 4))


class Sorted(nn.Module):
    """A model that takes an increasing `index` only, and keeps a note of a call that did not finish."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.busy, self.calls = nn.Linear(4, 4), False, 0

    def forward(self, x: Tensor, index: Tensor) -> Tensor:
        self.calls += 1
        scale = 2.0 if self.busy else 1.0
        self.busy = True
        if not torch.compiler.is_compiling() and not bool((index.diff() > 0).all()):
            raise ValueError("index does not increase")
        self.busy = False
        result: Tensor = self.linear(x)[index] * scale
        return result


def test_a_model_that_refuses_the_flipped_batch_is_captured() -> None:
    model, batch = seeded(Sorted()), (rand(3, 4), torch.arange(3))
    torch.testing.assert_close(qfx.capture_graph(model, batch).module(*batch)[0], model(*batch))


@pytest.mark.parametrize("kind", ["fp8", "sparse"])
def test_inputs_that_torch_does_not_flip_stay(kind: str) -> None:
    def counts(model: Any, x: Tensor) -> Tensor:
        model.step += 1
        result: Tensor = model.linear(x.to_dense().float())
        return result

    x = rand(3, 4).to(torch.float8_e4m3fn) if kind == "fp8" else rand(3, 4).to_sparse()
    require_repeats(seeded(Remembers(counts)), (x,), {})
    with pytest.raises(qfx.CaptureError, match="forward changes step at each call"):
        require_repeats(seeded(Remembers(lambda model, x: by_step(model, x.to_dense().float()))), (x,), {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_the_first_call_fuses_may_round_otherwise(dtype: torch.dtype) -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.fused: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.fused is None:
                self.fused = (self.second.weight @ self.first.weight, self.second(self.first.bias))
                made: Tensor = self.second(self.first(x))
                return made.float()
            return nn.functional.linear(x, *self.fused).float()

    x = rand(4, 64).to(dtype)
    expected = seeded(Fused()).to(dtype)(x)
    captured = qfx.capture_graph(seeded(Fused()).to(dtype), x)
    bound = 8 * torch.finfo(dtype).eps * float(expected.abs().max().detach())
    torch.testing.assert_close(captured.module(x)[0], expected, rtol=0, atol=bound)


class Helper:
    """An object that is no module, and keeps its table in its class or in a variable of the file."""

    kept: ClassVar[dict[str, Tensor]] = {}
    last: Tensor | None = None

    def of_class(self) -> Tensor:
        if "table" not in type(self).kept:
            type(self).kept["table"] = torch.arange(4.0)
        return type(self).kept["table"]

    @classmethod
    def of_attribute(cls) -> Tensor:
        cls.last = torch.arange(4.0) if cls.last is None else cls.last
        return cls.last

    @staticmethod
    @lru_cache
    def of_cache() -> Tensor:
        return torch.arange(4.0)

    def __call__(self) -> Tensor:
        return _KEPT.setdefault(self, torch.arange(4.0))


_HELPER, _KEPT = Helper(), WeakKeyDictionary[Helper, Tensor]()


class UsesHelper(nn.Module):
    helper = Helper()

    def __init__(self, table: Callable[[Helper], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.table = table

    def forward(self, x: Tensor) -> Any:
        return self.linear(x + self.table(self.helper))


TABLES: dict[str, Callable[[Helper], Tensor]] = {
    "an object of the class of the model": lambda helper: helper.of_class(),
    "a class": lambda helper: Helper.of_attribute(),
    "a static method": lambda helper: helper.of_cache(),
    "a weak dictionary": lambda helper: helper(),
    "an object of the file": lambda helper: _HELPER.of_class(),
    "a function of another file": lambda helper: seeded_tables.table(),
    "a class of another file": lambda helper: seeded_tables.Tables.table(),
}


@pytest.mark.parametrize("place", TABLES)
def test_tables_that_other_objects_and_files_keep_are_real_after_capture(place: str) -> None:
    model, x = seeded(UsesHelper(TABLES[place])), rand(2, 4)
    captured = qfx.capture_graph(model, x)
    assert type(model.table(model.helper)) is Tensor
    assert torch.allclose(captured.module(x)[0], model(x))


class Initializes(nn.Module):
    """A model whose first call sets the parameter, and stores a table."""

    def __init__(self, initialize: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4)
        self.initialize, self.tables = initialize, list[Tensor]()

    def forward(self, x: Tensor) -> Any:
        if not self.tables:
            self.tables.append(torch.arange(4.0))
            with torch.no_grad():
                self.initialize(self.scale)
        return self.linear(x * self.scale + self.tables[0])


def assign(scale: Tensor) -> None:
    scale.data = torch.arange(4.0)


def write_through_data(scale: Tensor) -> None:
    scale.data.copy_(torch.arange(4.0))


@pytest.mark.parametrize("initialize", [assign, write_through_data, lambda scale: scale.add_(1)])
def test_a_parameter_that_the_first_call_sets_is_in_the_graph_and_the_model_unchanged(
    initialize: Callable[[Tensor], None],
) -> None:
    model, x = seeded(Initializes(initialize)), rand(2, 4)
    scale = model.scale.detach().clone()
    memory = model.scale.data_ptr()
    captured = qfx.capture_graph(model, x)
    assert torch.equal(model.scale, scale)
    assert model.scale.data_ptr() == memory
    assert not model.tables
    assert torch.allclose(captured.module(x)[0], model(x))


def test_an_assignment_to_the_data_of_a_buffer_at_each_call_is_refused() -> None:
    def assign_mean(x: Tensor, seen: Tensor) -> Tensor:
        seen.data = x.mean(0)
        return x + seen

    with pytest.raises(qfx.CaptureError, match=r"assigns to the `data` of .* assign the attribute itself"):
        qfx.capture_graph(seeded(Writes(assign_mean)), rand(2, 4))


def test_a_failed_call_leaves_the_parameters_that_it_wrote() -> None:
    def initialize(x: Tensor, seen: Tensor) -> Tensor:
        model.scale.data.copy_(x[0])
        return x + seen.sum().item() * x[: int(seen.max())]

    model = seeded(Writes(initialize))
    scale = model.scale.detach().clone()
    with pytest.raises(qfx.CaptureError):
        qfx.capture_graph(model, rand(2, 4))
    assert torch.equal(model.scale, scale)


def test_a_lazy_module_is_refused_before_its_first_call() -> None:
    with pytest.raises(qfx.CaptureError, match=r"first 0.weight, of lazy modules have no shape yet; run the"):
        qfx.capture_graph(nn.Sequential(nn.LazyLinear(4)).eval(), rand(2, 4))


@pytest.mark.parametrize("training", [False, True])
def test_batch_norms_write_to_their_statistics_only_in_training(training: bool) -> None:
    mean, variance, weight, bias = torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4)
    tensors = [mean, variance, weight, bias]
    before = [x.clone() for x in tensors]
    with WrittenTensors(tensors) as writes:
        nn.functional.batch_norm(torch.randn(8, 4) + 3, mean, variance, weight, bias, training)
    assert torch.equal(mean, before[0]) != training
    assert writes.happened() == training
    writes.restore()
    assert all(map(torch.equal, before, tensors))


def ramp() -> Tensor:
    return torch.arange(8.0) + 1


_table: ContextVar[Tensor | None] = ContextVar("_table", default=None)
_table_without_default: ContextVar[Tensor] = ContextVar("_table_without_default")


def of_context(_: Any) -> Tensor:
    if _table.get() is None:
        _table.set(ramp())
    return _table.get()  # type: ignore[return-value]


def of_context_without_default(_: Any) -> Tensor:
    try:
        return _table_without_default.get()
    except LookupError:
        _table_without_default.set(ramp())
    return _table_without_default.get()


def of_globals(_: Any) -> Tensor:
    return globals().setdefault("late_table", ramp())  # type: ignore[no-any-return]


def of_file(_: Any) -> Tensor:
    file = sys.modules[__name__]
    if not hasattr(file, "late_table"):
        vars(file)["late_table"] = ramp()
    return file.late_table  # type: ignore[no-any-return]


def of_cached_partial(model: Any) -> Tensor:
    return model.cached()  # type: ignore[no-any-return]


def of_generator(model: Any) -> Tensor:
    return next(model.tables)  # type: ignore[no-any-return]


def endless() -> Iterator[Tensor]:
    table = ramp()
    while True:
        yield table


class Keeping(nn.Module):
    """Multiply by a table that a function keeps somewhere."""

    def __init__(self, table: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), table
        self.cached, self.tables = lru_cache(partial(ramp)), endless()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.table(self)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "table", [of_context, of_context_without_default, of_globals, of_file, of_cached_partial, of_generator]
)
def test_tables_in_contexts_variables_and_generators_are_real_after_capture(table: Callable[[Any], Tensor]) -> None:
    model, x = seeded(Keeping(table)), rand(4, 8)
    captured = qfx.capture_graph(model, x)
    assert _table.get() is None
    assert _table_without_default not in copy_context()
    assert "late_table" not in globals()
    expected = model.layer(x) * ramp()
    torch.testing.assert_close(captured.module(x)[0], expected)
    assert torch.equal(copy_context().run(model, x), expected)
    globals().pop("late_table", None)


def test_a_table_by_a_size_that_varies_is_refused_with_a_way_out() -> None:
    class BySize(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[Any, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.tables.setdefault(x.shape[-1], torch.ones(()))

    with pytest.raises(qfx.CaptureError, match=r"indexed by a size.*int\(size\), or pass `dynamic_shapes`"):
        qfx.capture_graph(BySize().eval(), rand(4, 8))
