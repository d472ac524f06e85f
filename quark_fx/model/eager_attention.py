"""Modules that round keys and values of attention, either when they enter a cache, or when products read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, update_wrapper
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from quark_fx.errors import QuarkError
from quark_fx.model.rounded_attention import Size

_FACTORS: dict[Any, tuple[str, ...]] = {
    F.scaled_dot_product_attention: ("query", "key", "value"),
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), ("input", "other")),
    **dict.fromkeys((torch.bmm, Tensor.bmm, torch.mm, Tensor.mm), ("input", "mat2")),
    **dict.fromkeys((torch.baddbmm, Tensor.baddbmm), ("input", "batch1", "batch2")),
    torch.einsum: (),
}
"""Functions that multiply activations, with the names of the arguments that `quark_fx.graph.attention` lists."""


def wrap_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace the forward of a module with `run`, which gets the original forward as its first argument.

    With a pair of hooks, a keyboard interrupt would skip the second hook.
    """
    module.forward = update_wrapper(partial(run, module.forward), module.forward)


class RoundedArgument(nn.Module):
    """A module that rounds an argument of a product.

    Args:
        rounding: Module that rounds keys, values, or queries in the layout of a cache.
        position: Position of the argument in the call of the product.
        transposed: Whether the product reads the argument with its last two dimensions exchanged.
        cached: Whether the argument may come from a cache, already rounded.
        heads: Number of heads with separate scales; 0 if heads share scales. Each head may be repeated in the argument.
    """

    def __init__(self, rounding: nn.Module, position: int, transposed: bool, cached: bool, heads: int) -> None:
        super().__init__()
        self.rounding, self.position, self.transposed = rounding, position, transposed
        self.cached, self.heads = cached, heads

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        """Return `x` rounded; with `again`, without factors, which were applied when `x` entered the cache."""
        x = x.mT if self.transposed else x
        repeated = self.heads and x.shape[-3] != self.heads
        x_by_head = x.unflatten(-3, (self.heads, -1)).flatten(-3, -2) if repeated else x
        rounded: Tensor = self.rounding(x_by_head, again)
        rounded = rounded.reshape(x.shape)
        return rounded.mT if self.transposed else rounded


class AttentionRounding(nn.Module):
    """The rounding inside an attention module while its forward runs.

    Args:
        path: Path of the module.
        products: Rounded arguments of each product that its code calls, in order.
        entering: Modules that round keys and values when they enter a cache; `None` if the products round them.
        sizes: Numbers of heads and channels of keys, and of values, at capture; `None` for a dynamic size.
    """

    def __init__(
        self,
        path: str,
        products: Sequence[Sequence[RoundedArgument]],
        entering: tuple[nn.Module, nn.Module] | None,
        sizes: Sequence[Size],
    ) -> None:
        super().__init__()
        self.path, self.sizes = path or "the model", tuple(sizes)
        self.products = nn.ModuleList(nn.ModuleList(factors) for factors in products)
        self.entering = None if entering is None else nn.ModuleList(entering)
        self.trusts_cache = False
        """True if a call showed that the products read cached values that were rounded when they entered the cache."""

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward` with rounded keys and values."""
        call = _Call(self, [] if self.entering is None else _caches((*args, *kwargs.values())))
        with call:
            result = forward(*args, **kwargs)
        if call.count != len(self.products):
            raise QuarkError(
                f"{self.path} computed {call.count} products of activations, but the captured model has "
                f"{len(self.products)}, so quark_fx cannot tell which of them read keys and values; use the attention "
                "implementation that the model was quantized with, or call the quantized model itself"
            )
        self._require_rounded(call.read)
        return result

    def enter(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """Return keys and values rounded in the layout of a cache, `(batch, heads, tokens, channels)`.

        Raises:
            QuarkError: If their sizes differ from the calibrated ones.
        """
        result = []
        roundings: list[Any] = list(self.entering or ())
        for x, rounding, (heads, channels) in zip((keys, values), roundings, self.sizes, strict=True):
            per_head = getattr(rounding, "scale", None) is not None and rounding.scale.dim() > 2
            expected = (heads if per_head else None, channels)
            shape = (x.shape[-3] if x.dim() > 2 else 1, x.shape[-1])
            if any(size not in (None, actual) for size, actual in zip(expected, shape, strict=True)):
                self.refuse(
                    f"caches {shape[0]} heads of {shape[1]} channels, but the cache at capture had {heads} heads of "
                    f"{channels} channels"
                )
            result.append(rounding(x))
        return result

    def _require_rounded(self, read: Sequence[tuple[RoundedArgument, Tensor]]) -> None:
        """Check that rounding cached keys or values again does not change them.

        Raises:
            QuarkError: If they change by more than rounding errors in their dtype.
        """
        for factor, x in read:
            if torch.compiler.is_compiling() or isinstance(x, FakeTensor) or x.is_meta:
                return
            with torch.no_grad():
                change = (factor(x, again=True).double() - x.double()).abs()
            if bool((change > 4 * torch.finfo(x.dtype).eps * x.double().abs()).any()):
                self.refuse("changes its keys and values between reading them from the cache and multiplying by them")
        self.trusts_cache |= len(read) > 1

    def refuse(self, why: str) -> NoReturn:
        """Raise `QuarkError`, because keys and values cannot be rounded when they enter the cache.

        Args:
            why: Clause that follows the module's path in the message.
        """
        raise QuarkError(
            f"{self.path} {why}, so keys and values cannot be rounded where they enter the cache; quantize this "
            f"attention without kv_cache (Override(pattern={self.path!r}, kv_cache=None)), or run it without a cache "
            "(use_cache=False)"
        )


class _Call(TorchFunctionMode):
    """A mode during a call of an attention module; it rounds the arguments of products and the inputs of caches."""

    def __init__(self, owner: AttentionRounding, caches: list[Any]) -> None:
        super().__init__()
        self.owner, self.caches, self.count = owner, caches, 0
        self.read: list[tuple[RoundedArgument, Tensor]] = []  # values from a cache, until it is trusted
        self.replaced: list[tuple[Any, Any]] = []
        # Values in a cache were rounded when they entered it; values computed from them before a product count, too.
        self.held = WeakTensorKeyDictionary({x: None for cache in caches for x in _tensors(cache)})

    def __enter__(self) -> _Call:
        for cache in self.caches:
            self.replaced.append((cache, vars(cache).get("update")))
            cache.update = partial(self._update, cache.update)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for cache, update in self.replaced:
            if update is None:
                del cache.update
            else:
                cache.update = update

    def _update(self, update: Callable[..., Any], keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Write rounded keys and values to a cache."""
        with torch._C.DisableTorchFunction():
            keys, values = self.owner.enter(keys, values)
        self._hold((keys, values))
        result = update(keys, values, *args, **kwargs)
        self._hold(result)
        return result

    def _hold(self, values: Any) -> None:
        """Record values from a cache."""
        for value in _flat(values):
            self.held[value] = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        names = _FACTORS.get(func)
        if names is None:
            result = func(*args, **kwargs)
            if self.held and any(x in self.held for x in _flat((*args, *kwargs.values()))):
                self._hold(result)
            return result
        place, self.count = self.count, self.count + 1
        factors: Any = self.owner.products[place] if place < len(self.owner.products) else ()
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        changed = {
            names[f.position]: self._rounded(f, arguments[names[f.position]])
            for f in factors
            if f.position < len(names)
        }
        args = [changed.pop(name, value) for name, value in zip(names, args, strict=False)] + list(args[len(names) :])
        return func(*args, **{**kwargs, **changed})

    def _rounded(self, factor: RoundedArgument, x: Tensor) -> Tensor:
        """Return the value that a product reads in place of `x`."""
        if not factor.cached or x not in self.held:
            y: Tensor = factor(x)
            return y
        if not self.owner.trusts_cache:
            self.read.append((factor, x))
        return x


def _flat(values: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument or a result."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _flat(value)


def _caches(values: Sequence[Any]) -> list[Any]:
    """Return the caches among the arguments of a module, including nested ones, each once."""
    caches: dict[int, Any] = {}

    def add(values: Iterable[Any]) -> None:
        for value in values:
            is_cache = callable(getattr(value, "update", None)) and hasattr(value, "get_seq_length")
            if is_cache and not isinstance(value, type) and id(value) not in caches:
                caches[id(value)] = value
                add(vars(value).values())

    add(values)
    return list(caches.values())


def _tensors(cache: Any) -> Iterator[Tensor]:
    """Yield the tensors in a cache and its layers."""
    for owner in (cache, *getattr(cache, "layers", ())):
        yield from _flat(list(vars(owner).values()))


__all__ = ["AttentionRounding", "RoundedArgument", "wrap_forward"]
