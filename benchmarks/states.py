"""Models in every state, by every function and output: right, or refused with the model and the directory unchanged.

    python -m benchmarks.states [STATE …]

Each state changes a small model as users do: hooks, wrappers, adapters, tables built by the first call, tied,
parametrized, or offloaded weights. Checkpoints and GGUF files are made of a Llama in that state. For each state and
action the command prints `right`, or the error that names the cause, or `WRONG`. A result is right if it equals the
float model up to rounding, and a file or checkpoint if `verify`, which runs it in ONNX Runtime or transformers, says
`correct`. After each action, and after an error or Ctrl-C in the second batch, each parameter, buffer, attribute,
container, and hook of the model must be the same object with the same bits. A refused output must leave nothing, and
`check` must have refused it, too.
"""

from __future__ import annotations

import tempfile
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import quark_fx as qfx
from benchmarks.common import judged
from benchmarks.experiment import Option, experiment

_DTYPES = {"float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16}
_OF_LANGUAGE_MODELS = ("checkpoint", "gguf")
"""Actions on the Llama."""


class Model(nn.Module):
    """Two linears, called as those of the Llama that states change, a table, and containers."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("offset", torch.ones(32))
        self.seen: list[int] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.k_proj(torch.relu(self.q_proj(x) + self.offset))  # type: ignore[no-any-return]


class Lazy(Model):
    """Builds a table in the first call, and counts calls."""

    late: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x.shape))
        if "table" not in self.cache:
            self.cache["table"] = torch.arange(32.0) / 32
            self.register_buffer("late", torch.ones(32), persistent=False)
        return super().forward(x * self.late + self.cache["table"])


class Adapter(nn.Module):
    """A linear with two low-rank factors beside it, as PEFT puts in its place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
        self.merged = False

    def merge(self) -> nn.Linear:
        """Add the factors to the weight of the linear, and return it."""
        with torch.no_grad():
            self.base_layer.weight += self.lora_B.weight @ self.lora_A.weight
        self.merged = True
        return self.base_layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        return y if self.merged else y + self.lora_B(self.lora_A(x))


def _llama(*, lazy: bool = False, kind: Any = None) -> Any:
    import transformers

    torch.manual_seed(0)
    # A table of frequencies that is made anew for sequences longer than 8 tokens.
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0} if lazy else None
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=32,
        eos_token_id=1,
        pad_token_id=0,
        use_cache=False,
        max_position_embeddings=8 if lazy else 32,
        rope_parameters=rope,
    )
    return (kind or transformers.LlamaForCausalLM)(config)


def _unregistered() -> Any:
    import transformers

    class Doubled(transformers.LlamaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            result = super().forward(*args, **kwargs)
            result.logits = result.logits * 2
            return result

    return _llama(kind=Doubled)


Change = Callable[[Any, Any], Any]
"""Changes a model and the module of it that holds `q_proj` and `k_proj`; returns a model if it is another one."""


def _tie(model: Any, owner: Any) -> None:
    owner.k_proj.weight = owner.q_proj.weight


def _hook(model: Any, owner: Any) -> None:
    owner.q_proj.register_forward_hook(lambda module, args, output: output * 2)
    owner.k_proj.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def _patch(model: Any, owner: Any) -> None:
    forward = owner.q_proj.forward
    owner.q_proj.forward = lambda x: forward(x) * 2


def _adapt(model: Any, owner: Any) -> None:
    owner.q_proj = Adapter(owner.q_proj).eval()


def _merge_in_place(model: Any, owner: Any) -> None:
    _adapt(model, owner)
    owner.q_proj.merge()


def _merge(model: Any, owner: Any) -> None:
    owner.q_proj = Adapter(owner.q_proj).merge()


def _configure_generation(model: Any, owner: Any) -> None:
    if hasattr(model, "generation_config"):
        model.generation_config.temperature = 0.5  # without sampling, which save_pretrained refuses


STATES: dict[str, Change] = {
    "plain": lambda model, owner: None,
    "training": lambda model, owner: model.train(),
    "frozen": lambda model, owner: model.requires_grad_(False),
    "hooked": _hook,
    "patched": _patch,
    "lazy": lambda model, owner: None,
    "tied": _tie,
    "parametrized": lambda model, owner: weight_norm(owner.q_proj) and model.eval(),
    "adapter": _adapt,
    "adapter merged in place": _merge_in_place,
    "adapter merged": _merge,
    "compiled": lambda model, owner: torch.compile(model),
    "wrapped": lambda model, owner: nn.DataParallel(model),
    "traced": lambda model, owner: torch.jit.trace(model, batches_of("traced", model)[0], strict=False),
    "float64": lambda model, owner: model.double(),
    "float16": lambda model, owner: model.half(),
    "bfloat16": lambda model, owner: model.bfloat16(),
    "offloaded": lambda model, owner: owner.k_proj.to("meta") and None,
    "generation options": _configure_generation,
    "class of the user": lambda model, owner: None,
}


def made(state: str, *, language: bool) -> Any:
    """Return a model in a state: a Llama, or a `Model`."""
    if language:
        model = _unregistered() if state == "class of the user" else _llama(lazy=state == "lazy")
    else:
        model = Lazy() if state == "lazy" else Model()
    model.eval()
    owner = model.model.layers[0].self_attn if language else model
    changed = STATES[state](model, owner)
    return model if changed is None else changed


def batches_of(state: str, model: Any) -> list[Tensor]:
    """Return three batches for a model of a state: tokens for a Llama."""
    inside = getattr(model, "_orig_mod", getattr(model, "module", model))
    draws = [torch.Generator().manual_seed(seed) for seed in range(3)]
    if not isinstance(inside, Model | torch.jit.ScriptModule):
        return [torch.randint(2, 32, (2, 16), generator=draw) for draw in draws]
    return [torch.randn(4, 32, generator=draw).to(_DTYPES.get(state)) for draw in draws]


Action = Callable[[Any, list[Tensor], Path], Any]
"""Calls a function with a model, its batches, and an empty folder; returns outputs for the first batch, or `None`."""


def _quantized(model: Any, batches: Any) -> qfx.QuantizedModel:
    return qfx.quantize(model, "int8_weight_only", batches, progress=False)


def _saved(model: Any, batches: list[Tensor], folder: Path) -> Any:
    _quantized(model, batches).save(folder / "m")
    return qfx.load(folder / "m")(batches[0])


def _written(export: Callable[..., Any], kind: str, config: Any, suffix: str = "") -> Action:
    """Return what exports a model and verifies it, after `check` has told whether that works."""

    def act(model: Any, batches: list[Tensor], folder: Path) -> Any:
        try:
            qfx.check(model, config, batches, export=kind)
        except qfx.QuarkError as refused:
            foretold = str(refused)
        else:
            foretold = ""
        qmodel = qfx.quantize(model, config, batches, progress=False)
        try:
            path = export(qmodel, folder / f"m{suffix}")
        except qfx.QuarkError as error:
            if not foretold:
                raise ArithmeticError(f"check does not refuse what the export does: {error}") from error
            raise
        if foretold:
            raise ArithmeticError(f"check refuses what works: {foretold}")
        if not (verdict := qfx.verify(qmodel, path, batches[:1]).verdict).startswith("correct"):
            raise ArithmeticError(verdict)
        return qmodel(batches[0])

    return act


_BLOCKS = qfx.presets.W4A16_RTN.replace(weight=qfx.gguf_types.Q8_0)


def _trained(model: Any, batches: list[Tensor]) -> Tensor:
    y: Tensor = qfx.prepare_qat(_quantized(model, batches))(batches[0])
    y.sum().backward()
    return y


def _searched(model: Any, batches: list[Tensor], data: Any) -> Tensor:
    candidates, budget = ["int8_weight_only", "float"], qfx.Budget(bits=16)
    found = qfx.search(model, candidates, budget=budget, data=data, progress=False)
    return qfx.quantize(model, found.config, batches, progress=False)(batches[0])  # type: ignore[no-any-return]


def _stopped(batches: list[Tensor], error: BaseException) -> Iterator[Tensor]:
    yield batches[0]
    raise error


ACTIONS: dict[str, Action] = {
    "quantize": lambda model, batches, folder: _quantized(model, batches)(batches[0]),
    "eager": lambda model, batches, folder: _quantized(model, batches).eager()(batches[0]),
    "qat": lambda model, batches, folder: _trained(model, batches),
    "save": _saved,
    "onnx": _written(qfx.export.onnx, "qdq", "int8_weight_only", ".onnx"),
    "checkpoint": _written(qfx.export.huggingface, "compressed-tensors", qfx.presets.W8A8_DYNAMIC),
    "gguf": _written(qfx.export.gguf, "gguf", _BLOCKS, ".gguf"),
    "check": lambda model, batches, folder: qfx.check(model, "int8_weight_only", batches, export="qdq"),
    "analyze": lambda model, batches, folder: qfx.analyze(model, "int8_static", batches, progress=False),
    "search": lambda model, batches, folder: _searched(model, batches, batches),
    "error": lambda model, batches, folder: qfx.quantize(
        model, "int8_static", _stopped(batches, ZeroDivisionError()), progress=False
    ),
    "Ctrl-C": lambda model, batches, folder: qfx.quantize(
        model, "int8_static", _stopped(batches, KeyboardInterrupt()), progress=False
    ),
    "Ctrl-C in analyze": lambda model, batches, folder: qfx.analyze(
        model, "int8_static", _stopped(batches, KeyboardInterrupt()), progress=False
    ),
    "Ctrl-C in search": lambda model, batches, folder: _searched(
        model, batches, _stopped(batches, KeyboardInterrupt())
    ),
}

Contents = dict[str, tuple[Any, Tensor | None]]
"""Each object that a model holds by its path, and a copy of a tensor's values."""


def contents(model: Any) -> Contents:
    """Return what a model holds: it stays alive with the result, so that no identity is given again."""
    return dict(_contents(model, set(), "model"))


def _contents(item: Any, seen: set[int], path: str) -> Iterator[tuple[str, tuple[Any, Tensor | None]]]:
    bits = item.detach().clone() if isinstance(item, Tensor) and not item.is_meta else None
    yield path, (item, bits)
    if id(item) in seen:
        return
    seen.add(id(item))
    if isinstance(item, Tensor):
        yield f"{path}.requires_grad", (item.requires_grad, None)
        yield f"{path}.grad", (item.grad if item.is_leaf else None, None)
    elif isinstance(item, dict):
        for key, value in item.items():
            yield from _contents(value, seen, f"{path}[{key!r}]")
    elif isinstance(item, list | tuple | deque):
        for index, value in enumerate(item):
            yield from _contents(value, seen, f"{path}[{index}]")
    elif isinstance(item, set | frozenset):
        for value in item:
            yield f"{path}{{{value!r}}}", (value, None)
    elif _has_attributes(item):
        yield from _contents(item.__dict__, seen, path + ".__dict__")


def _has_attributes(item: Any) -> bool:
    """Tell whether an object may hold what belongs to the model: not a class, and of torch and Python modules only."""
    if isinstance(item, type | torch.jit.ScriptModule) or not isinstance(getattr(item, "__dict__", None), dict):
        return False
    return isinstance(item, nn.Module) or type(item).__module__.partition(".")[0] not in ("torch", "builtins")


def difference(before: Contents, after: Contents) -> str:
    """Return the first path at which two `contents` differ, empty if they are the same."""
    for path in {**before, **after}:
        if path not in before or path not in after:
            return path
        (one, bits), (other, other_bits) = before[path], after[path]
        if one is not other or (bits is not None and other_bits is not None and not torch.equal(bits, other_bits)):
            return path
    return ""


def outcome(state: str, action: str) -> str:
    """Return `right`, the error that a user reads, or `WRONG` and why."""
    language = action in _OF_LANGUAGE_MODELS
    try:
        model = made(state, language=language)
    except Exception as error:  # torch itself does not put this model into this state
        return f"not made: {type(error).__name__}"
    batches, before = batches_of(state, model), contents(model)
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(action="ignore"):
        folder = Path(place)
        try:
            found, said = ACTIONS[action](model, batches, folder), "right"
        except qfx.QuarkError as error:
            found, said = None, f"{type(error).__name__}: {' '.join(str(error).split())}"
            if list(folder.iterdir()):
                return f"WRONG: {said}, and files are left"
        except (KeyboardInterrupt, ZeroDivisionError):
            found, said = None, "right"
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
        if path := difference(before, contents(model)):
            return f"WRONG: {path} of the model changed"
    result: Any = None if isinstance(found, qfx.Analysis) else getattr(found, "logits", found)
    if result is not None:
        with torch.no_grad():
            real = made(state, language=language)(batches[0])
        real = getattr(real, "logits", real)
        if (distance := float((result.detach().double() - real).norm() / real.double().norm())) > 0.02:
            return f"WRONG: relative error {distance:.3f}"
    return said


@experiment()
def main(*states: Annotated[str, Option(", ".join(STATES), metavar="STATE")]) -> int:
    """Print one line for each state and action; return 1 if one is wrong."""
    counts: Counter[str] = Counter()
    for state in states or STATES:
        for action in ACTIONS:
            said = outcome(state, action)
            kind = said.partition(":")[0].lower()
            counts[kind if kind in ("right", "wrong", "not made") else "refused"] += 1
            print(f"{state:24}{action:18}{said[:200]}", flush=True)
    return judged(counts)


if __name__ == "__main__":
    main()
