"""Small random models, each made of a seed: operators with weights, and what networks put between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (registers the operator of experts)
from torch import Tensor, nn


def _spoil(layer: nn.Module, dice: random.Random) -> None:
    """Give a channel weights of nearly or exactly zero, or a bias far larger than its products."""
    with torch.no_grad():
        for p in layer.parameters():
            p[0] *= dice.choice([0.0, 1e-8, 50.0])


class RandomModel(nn.Module):
    """A model whose structure is settled by the example it is made with.

    Attributes:
        plan: what happens, in order; every step says which values it reads and what it calls.
    """

    def __init__(
        self, steps: list[tuple[tuple[int, ...], Callable[..., Any]]], layers: nn.ModuleList, outputs: Any
    ) -> None:
        super().__init__()
        self.steps, self.layers, self.outputs = steps, layers, outputs

    def forward(self, x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> Any:
        values: list[Any] = [x, y, z]
        for reads, step in self.steps:
            values.append(step(*(values[i] for i in reads)))
        if isinstance(self.outputs, dict):
            return {name: values[i] for name, i in self.outputs.items()}
        return tuple(values[i] for i in self.outputs) if len(self.outputs) > 1 else values[self.outputs[0]]


@dataclass(frozen=True)
class Case:
    """A model, the batches to calibrate and compare with, and how it was drawn.

    Attributes:
        model: in eval mode.
        batches: of sizes 4, 4 and 3.
        words: what it consists of.
    """

    model: nn.Module
    batches: list[tuple[Tensor, ...]]
    words: str


class _Builder:
    """Draws steps while it runs them on an example, so that shapes always fit."""

    def __init__(self, seed: int) -> None:
        self.dice, self.seed = random.Random(seed), seed
        self.layers = nn.ModuleList()
        self.steps: list[tuple[tuple[int, ...], Callable[..., Any]]] = []
        self.values: list[Tensor | None] = []
        self.words: list[str] = []

    def add(self, word: str, step: Callable[..., Any], *reads: int) -> int:
        with torch.no_grad():
            value = step(*(self.values[i] for i in reads))
        self.steps.append((reads, step))
        self.values.append(value)
        self.words.append(word)
        return len(self.values) - 1

    def layer(self, word: str, make: Callable[[], nn.Module], *reads: int) -> int:
        torch.manual_seed(self.seed * 1000 + len(self.layers))
        layer = make().eval()
        for module in layer.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_var is not None:
                assert module.running_mean is not None
                nn.init.uniform_(module.running_var, 0.5, 2)
                nn.init.normal_(module.running_mean)
        if self.dice.random() < 0.06:
            _spoil(layer, self.dice)
        self.layers.append(layer)
        return self.add(word, layer, *reads)

    def is_flat(self, i: int) -> bool:
        """Tell whether some channel or row hardly varies: a norm would make noise of how its values are rounded."""
        value = self.values[i]
        assert value is not None
        return bool(min(value.flatten(2 if value.dim() > 3 else 1).std(-1).min(), value.std(-1).min()) < 1e-2)

    def shape(self, i: int) -> tuple[int, ...]:
        value = self.values[i]
        assert value is not None
        return tuple(value.shape)


def _convolution(b: _Builder, i: int) -> int:
    rank, channels = len(b.shape(i)) - 2, b.shape(i)[1]
    smallest = min(b.shape(i)[2:])
    out = b.dice.choice([4, 6, 8])
    kind = b.dice.choice(["plain", "depthwise", "grouped", "dilated", "strided", "pointwise", "same", "reflect"])
    groups = channels if kind == "depthwise" else 2 if kind == "grouped" and channels % 2 == 0 else 1
    out = channels * b.dice.choice([1, 2]) if kind == "depthwise" else out
    kernel = 1 if kind == "pointwise" or smallest < 3 else b.dice.choice([2, 3])
    options: dict[str, Any] = {"bias": b.dice.random() < 0.7, "groups": groups}
    if kind == "dilated" and smallest >= 6:
        options["dilation"] = 2
    if kind == "strided" and smallest >= 4:
        options["stride"] = 2
    options["padding"] = "same" if kind == "same" else b.dice.choice([0, kernel // 2])
    if kind == "reflect" and kernel == 3:
        options |= {"padding": 1, "padding_mode": b.dice.choice(["reflect", "replicate", "circular"])}
    module = getattr(nn, f"Conv{rank}d")
    return b.layer(f"{kind} conv{rank}d", lambda: module(channels, out, kernel, **options), i)


def _transposed(b: _Builder, i: int) -> int:
    rank, channels = len(b.shape(i)) - 2, b.shape(i)[1]
    if max(b.shape(i)[2:]) > 16:
        return i
    groups = b.dice.choice([1, 2 if channels % 2 == 0 else 1])
    options = {"stride": b.dice.choice([1, 2]), "bias": b.dice.random() < 0.7, "groups": groups}
    module = getattr(nn, f"ConvTranspose{rank}d")
    out = b.dice.choice([4, 6])
    return b.layer(f"transposed{rank}d", lambda: module(channels, out, 2, **options), i)


def _linear(b: _Builder, i: int) -> int:
    features, bias = b.shape(i)[-1], b.dice.random() < 0.7
    out = b.dice.choice([4, 6, 8])
    return b.layer("linear", lambda: nn.Linear(features, out, bias=bias), i)


class _Product(nn.Module):
    """A product with a matrix that is a parameter."""

    def __init__(self, features: int, out: int, turned: bool, how: str) -> None:
        super().__init__()
        self.turned, self.how = turned, how
        self.weight = nn.Parameter(torch.randn(out, features) if turned else torch.randn(features, out))
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.t() if self.turned else self.weight
        if self.how == "product":
            return x @ weight
        rows = x.reshape(-1, x.shape[-1])
        rows = torch.mm(rows, weight) if self.how == "mm" else torch.addmm(self.bias, rows, weight)
        return rows.reshape(*x.shape[:-1], -1)


def _product(b: _Builder, i: int) -> int:
    features, out, turned = b.shape(i)[-1], b.dice.choice([4, 6]), b.dice.random() < 0.5
    how = b.dice.choice(["product", "mm", "addmm"])
    return b.layer(how, lambda: _Product(features, out, turned, how), i)


class _Experts(nn.Module):
    """A stack of matrices: all rows times each of them, or each row times the one that its place chooses."""

    def __init__(self, features: int, out: int, all_rows: bool) -> None:
        super().__init__()
        self.all_rows, self.weight = all_rows, nn.Parameter(torch.randn(3, features, out))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        if self.all_rows:
            rows = torch.bmm(rows.expand(3, -1, -1), self.weight).sum(0)
        else:
            ends = torch.arange(1, 4) * rows.shape[0] // 3
            rows = torch.ops.transformers.grouped_mm_fallback(rows, self.weight, ends)
        return rows.reshape(*x.shape[:-1], -1)


def _experts(b: _Builder, i: int) -> int:
    features, out, all_rows = b.shape(i)[-1], b.dice.choice([4, 8]), b.dice.random() < 0.5
    return b.layer("stack" if all_rows else "experts", lambda: _Experts(features, out, all_rows), i)


def _self_product(b: _Builder, i: int) -> int:
    return b.add("x @ x'", lambda x: x @ x.transpose(-1, -2), i)


class _Attention(nn.Module):
    """Attention in a kernel or spelled out."""

    def __init__(self, features: int, spelled: bool, causal: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.spelled, self.causal = spelled, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.spelled:
            y = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y)  # type: ignore[no-any-return]


def _attention(b: _Builder, i: int) -> int:
    features, spelled, causal = b.shape(i)[-1], b.dice.random() < 0.5, b.dice.random() < 0.5
    return b.layer("attention", lambda: _Attention(features, spelled, causal), i)


def _heads(b: _Builder, i: int) -> int:
    features = b.shape(i)[-1]
    if features % 2:
        return i
    layer = b.layer("heads", lambda: nn.MultiheadAttention(features, 2, batch_first=True), i, i, i)
    return b.add("first", lambda pair: pair[0], layer)


def _recurrent(b: _Builder, i: int) -> int:
    features, kind = b.shape(i)[-1], b.dice.choice([nn.LSTM, nn.GRU, nn.RNN])
    both = b.dice.random() < 0.3
    layer = b.layer(kind.__name__, lambda: kind(features, 4, batch_first=True, bidirectional=both), i)
    return b.add("first", lambda pair: pair[0], layer)


POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-0.5, 1.5),
    "gelu": F.gelu,
    "silu": F.silu,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "elu": F.elu,
    "softplus": F.softplus,
    "mish": F.mish,
    "abs": torch.abs,
    "square": lambda x: x * x,
    "times": lambda x: x * 0.7,
    "plus": lambda x: x + 1.5,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
    "dropout": lambda x: F.dropout(x, 0.5, False),
}


def _pointwise(b: _Builder, i: int) -> int:
    word = b.dice.choice(list(POINTWISE))
    return b.add(word, POINTWISE[word], i)


def _image_norm(b: _Builder, i: int) -> int:
    if b.is_flat(i):
        return i
    rank, channels = len(b.shape(i)) - 2, b.shape(i)[1]
    makes: list[tuple[str, Callable[[], nn.Module]]] = [
        ("batch norm", lambda: getattr(nn, f"BatchNorm{rank}d")(channels)),
        ("group norm", lambda: nn.GroupNorm(2 if channels % 2 == 0 else 1, channels)),
        ("instance norm", lambda: getattr(nn, f"InstanceNorm{rank}d")(channels, affine=True)),
        ("local response", lambda: nn.LocalResponseNorm(3)),
    ]
    word, make = b.dice.choice(makes)
    return b.layer(word, make, i)


def _row_norm(b: _Builder, i: int) -> int:
    if b.is_flat(i):
        return i
    features = b.shape(i)[-1]
    word, make = b.dice.choice([("layer norm", lambda: nn.LayerNorm(features)), ("rms", lambda: nn.RMSNorm(features))])
    return b.layer(word, make, i)


def _pool(b: _Builder, i: int) -> int:
    rank, smallest = len(b.shape(i)) - 2, min(b.shape(i)[2:])
    dice = b.dice
    if smallest < 4:
        return b.add("mean", lambda x: x.mean(-1, keepdim=True), i)
    kind = dice.choice(["max", "average", "adaptive", "global", "up", "divisor"])
    ceil, counted, padding, stride = dice.random() < 0.3, dice.random() < 0.5, dice.choice([0, 1]), dice.choice([1, 2])
    if kind == "max":
        pool = getattr(F, f"max_pool{rank}d")
        return b.add("max pool", lambda x: pool(x, 3, stride, padding, 1, ceil), i)
    if kind == "average":
        pool = getattr(F, f"avg_pool{rank}d")
        return b.add("average pool", lambda x: pool(x, 3, stride, padding, ceil, counted), i)
    if kind == "adaptive":
        pool, size = getattr(F, f"adaptive_avg_pool{rank}d"), dice.choice([2, 3])
        return b.add("adaptive pool", lambda x: pool(x, size), i)
    if kind == "up" and max(b.shape(i)[2:]) <= 16:
        mode = dice.choice(["nearest", {1: "linear", 2: "bilinear", 3: "trilinear"}[rank]])
        return b.add(f"upsample {mode}", lambda x: F.interpolate(x, scale_factor=2, mode=mode), i)
    if kind == "divisor" and rank > 1:
        pool = getattr(F, f"avg_pool{rank}d")
        return b.add("pool with a divisor", lambda x: pool(x, 2, stride, 0, ceil, counted, 3), i)
    return b.add("global mean", lambda x: x.mean(tuple(range(2, x.dim())), keepdim=True), i)


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.transpose(1, -1),
    "flip": lambda x: x.flip(-1),
    "roll": lambda x: x.roll(1, -1),
    "there and back": lambda x: x.transpose(1, -1).contiguous().transpose(1, -1),
    "unsqueeze": lambda x: x.unsqueeze(1).squeeze(1),
    "shape": lambda x: x.reshape(x.shape[0], -1).reshape(x.shape),
    "halves": lambda x: torch.cat(x.split((1, x.shape[1] - 1), 1)[::-1], 1),
    "slice": lambda x: x[:, : max(x.shape[1] // 2, 1)],
    "strided": lambda x: x[..., ::2],
    "repeat": lambda x: torch.cat((x, x), 1) if x.shape[1] <= 8 else x,
    "stack": lambda x: torch.stack((x, x * 2), 1).mean(1),
    "padding": lambda x: F.pad(x, (1, 1)),
    "index_select": lambda x: x.index_select(1, torch.arange(x.shape[1]).flip(0)),
    "select": lambda x: torch.stack((x.select(1, 0), x.select(1, -1)), 1),
    "narrow": lambda x: x.narrow(1, 0, max(x.shape[1] - 1, 1)),
    "unbind": lambda x: torch.cat([part.unsqueeze(1) for part in x.unbind(1)[::-1]], 1),
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "expand": lambda x: x.unsqueeze(1).expand(-1, 2, *x.shape[1:]).flatten(1, 2) if x.shape[1] <= 8 else x,
    "tiled": lambda x: x.repeat(1, 2, *[1] * (x.dim() - 2)) if x.shape[1] <= 8 else x,
    "permuted": lambda x: x.permute(0, *range(x.dim() - 1, 0, -1)),
    "pixel shuffle": lambda x: F.pixel_shuffle(x, 2),
    "channel shuffle": lambda x: F.channel_shuffle(x, 2),
}


def _move(b: _Builder, i: int) -> int:
    word = b.dice.choice(list(MOVES))
    return b.add(word, MOVES[word], i)


def _join(b: _Builder, i: int) -> int:
    """Add, multiply or concatenate with an earlier value of the same shape."""
    shape = b.shape(i)
    others = [j for j, v in enumerate(b.values) if isinstance(v, Tensor) and v.is_floating_point() and v.shape == shape]
    j = b.dice.choice(others)
    word = b.dice.choice(["add", "mul", "sub", "concat", "max"])
    joins: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "add": torch.add,
        "mul": torch.mul,
        "sub": torch.sub,
        "concat": lambda x, y: torch.cat((x, y), 1),
        "max": torch.maximum,
    }
    return i if word == "concat" and shape[1] > 12 else b.add(word, joins[word], i, j)


def _again(b: _Builder, i: int) -> int:
    """Apply an earlier layer once more, if it keeps the shape."""
    value = b.values[i]
    for layer in reversed(b.layers):
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            try:
                with torch.no_grad():
                    layer(value)
            except RuntimeError:
                continue
            return b.add("shared layer", layer, i)
    return i


_IMAGE: tuple[tuple[Callable[[_Builder, int], int], int], ...] = (
    (_convolution, 6),
    (_transposed, 1),
    (_pointwise, 4),
    (_image_norm, 2),
    (_pool, 2),
    (_move, 2),
    (_join, 3),
    (_again, 1),
)
_ROWS: tuple[tuple[Callable[[_Builder, int], int], int], ...] = (
    (_linear, 5),
    (_product, 2),
    (_experts, 1),
    (_pointwise, 4),
    (_row_norm, 2),
    (_move, 1),
    (_join, 3),
    (_again, 1),
)
_TOKENS = (*_ROWS, (_attention, 2), (_heads, 1), (_recurrent, 1), (_self_product, 1))


def _batches(shape: tuple[int, ...], seed: int, vocabulary: int) -> list[Tensor]:
    made = []
    for index, size in enumerate((4, 4, 3)):
        generator = torch.Generator().manual_seed(seed * 10 + index)
        if vocabulary:
            made.append(torch.randint(0, vocabulary, (size, *shape), generator=generator))
        else:
            made.append(torch.randn(size, *shape, generator=generator) * 2)
    return made


def random_model(seed: int) -> Case:
    """Return the model of a seed."""
    b = _Builder(seed)
    kind = b.dice.choice(["signal", "image", "image", "image", "volume", "rows", "tokens", "tokens", "ids"])
    shapes = {
        "signal": (4, 12),
        "image": (3, 10, 10),
        "volume": (2, 6, 6, 6),
        "rows": (8,),
        "tokens": (5, 8),
        "ids": (5,),
    }
    inputs = [_batches(shapes[kind], seed, 11 if kind == "ids" else 0)]
    if kind != "ids" and b.dice.random() < 0.3:
        inputs.append(_batches(shapes[kind], seed + 500_000, 0))  # may stay unused
    b.values = [*(x[0] for x in inputs), *[None] * (3 - len(inputs))]
    i = 0
    if kind == "ids":
        i = b.layer("embedding", lambda: nn.Embedding(11, 8), 0)
    steps = {"rows": _ROWS, "tokens": _TOKENS, "ids": _TOKENS}.get(kind, _IMAGE)
    outputs = []
    for _ in range(b.dice.randint(3, 9)):
        before = i
        draw = b.dice.choices([step for step, _ in steps], [weight for _, weight in steps])[0]
        try:
            i = draw(b, i)
        except (RuntimeError, ValueError, IndexError):
            continue  # it does not fit the shape that there is
        value = b.values[i]
        if not isinstance(value, Tensor) or value.numel() > 20_000 or not bool(value.isfinite().all()):
            i = before
        if b.dice.random() < 0.1:
            outputs.append(i)
    if kind in ("image", "signal", "volume") and b.dice.random() < 0.5:
        i = b.add("flatten", lambda x: x.flatten(1), i)
        i = _linear(b, i)
    outputs = list(dict.fromkeys([*outputs, i]))
    form: Any = {f"out{n}": j for n, j in enumerate(outputs)} if b.dice.random() < 0.2 else outputs
    model = RandomModel(b.steps, b.layers, form).eval()
    return Case(model, [tuple(x) for x in zip(*inputs, strict=True)], f"{kind}: {', '.join(b.words)}")
