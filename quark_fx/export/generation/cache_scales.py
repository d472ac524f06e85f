"""Static scales of an int8 KV cache, per head and channel."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quark_fx.data.cache_names import CACHE_NAMES, returned_cache
from quark_fx.errors import CalibrationError, ExportError
from quark_fx.numbers.formats import INT8

if TYPE_CHECKING:
    import onnx_ir as ir


_SCALE = re.compile(r"(layers\.\d+\.(?:key|value)s)_scale")
"""Pattern of the names of the scales that `use_int8_cache` adds to a graph."""


@dataclass(frozen=True)
class CacheScales:
    """The scales of an int8 KV cache.

    Attributes:
        scales: Scales, float32, shape `(1, heads, 1, channels)`. Keys are the names of the keys or values of a layer in
            a cache of `transformers`, such as `layers.0.keys`.
    """

    scales: Mapping[str, Tensor]

    @classmethod
    def measure(cls, model: Any, batches: Iterable[Mapping[str, Tensor]]) -> CacheScales:
        """Return the scales for which code 127 represents the largest magnitude of each channel in `batches`.

        Args:
            model: Model of `transformers` that will be exported.
            batches: Keyword arguments of the model's `forward`, such as `input_ids`, one mapping per batch. Padding
                positions count as well.

        Raises:
            CalibrationError: If `batches` is empty, or values are not finite.
            ExportError: If the cache of the model does not consist of keys and values of rank 4.
        """
        from transformers.exporters.utils import get_leaf_tensors

        largest: dict[str, Tensor] = {}
        for batch in batches:
            with torch.no_grad():
                cache = returned_cache(model(**batch, use_cache=True, **_keeping_all(model)))
            for name, value in get_leaf_tensors(cache).items():
                if not value.dim():
                    continue  # a scalar is the window size of a layer
                if value.dim() != 4 or not value.is_floating_point():
                    raise ExportError(f"{name} is not a cache of keys or values: {value.dtype}, {tuple(value.shape)}")
                magnitudes = value.float().abs().amax((0, 2), keepdim=True)
                largest[name] = torch.maximum(largest.get(name, magnitudes), magnitudes)
        if not largest:
            raise CalibrationError("measuring the cache needs batches; pass at least one")
        if bad := [name for name, value in largest.items() if not value.isfinite().all()]:
            raise CalibrationError(f"the cache has NaN or infinite values in {', '.join(bad)}; check the batches")
        return cls({name: torch.where(value > 0, value, 127.0) / 127 for name, value in largest.items()})

    @classmethod
    def of(cls, model: Any) -> CacheScales:
        """Return the scales with which a quantized model rounds its keys and values.

        Args:
            model: Result of `eager()`, quantized with `kv_cache=TensorSpec(format=INT8, granularity="channel")`, or
                with `"head"`, so that all channels of a head have the same scale.

        Raises:
            ExportError: If the model does not round keys and values, or rounds them differently.
        """
        scales: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            rounding = getattr(module, "round_attention", None)
            sizes: Any = getattr(rounding, "sizes", ())
            entered = zip(getattr(rounding, "entering", None) or (), sizes, strict=False)
            for name, (entering, (_, channels)) in zip(("keys", "values"), entered, strict=False):
                layer = getattr(module, "layer_idx", None)
                if not _is_of_a_cache(entering):
                    raise ExportError(
                        f"{path} rounds its {name} differently from an int8 cache; set kv_cache=TensorSpec("
                        "format=INT8, granularity='channel'), symmetric and without rotated keys"
                    )
                if layer is None:
                    raise ExportError(f"{path} has no layer_idx, so its cache has no name; use CacheScales.measure")
                scales[f"layers.{layer}.{name}"] = entering.scale.expand(-1, -1, -1, channels or -1)
        if not scales:
            raise ExportError("the model does not round keys and values; set kv_cache, or use CacheScales.measure")
        return cls(scales)

    @classmethod
    def written(cls, program: ir.Model) -> CacheScales:
        """Read the scales from a graph that `GenerationQuantizer` wrote; the mapping is empty for a float cache."""
        from quark_fx.export.to_onnx.edit import array_of

        arrays = {_SCALE.fullmatch(name): array_of(value) for name, value in program.graph.initializers.items()}
        scales = {m[1]: torch.from_numpy(array.copy()) for m, array in arrays.items() if m and array is not None}
        return cls(scales)

    def cache(self, *, prompt_in_float: bool = True) -> Any:
        """Return a `DynamicCache` for a torch model that rounds keys and values with these scales and keeps all tokens.

        Args:
            prompt_in_float: Whether a prompt attends to its keys and values before rounding, like in a prefill graph.
        """
        from transformers import DynamicCache

        scales = self

        class Rounded(DynamicCache):  # type: ignore[misc]
            def update(self, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
                unrounded, name = prompt_in_float and not self.get_seq_length(layer), f"layers.{layer}."
                rounded = scales.round(f"{name}keys", keys), scales.round(f"{name}values", values)
                result = super().update(*rounded, layer, *args, **kwargs)
                return (keys, values) if unrounded else result

        return Rounded()

    def quantize(self, name: str, x: Tensor) -> Tensor:
        """Return the int8 codes of keys or values `x`, shape `(batch, heads, tokens, channels)`."""
        return (x / self.scales[name]).round().clamp(-128, 127).to(torch.int8)

    def round(self, name: str, x: Tensor) -> Tensor:
        """Return `x` rounded to the values that its codes represent, same shape."""
        return self.quantize(name, x) * self.scales[name]


def _keeping_all(model: Any) -> dict[str, Any]:
    """Return a cache that keeps all tokens, as a keyword argument of the model.

    The result is empty if the model does not have sliding layers, which would drop keys outside of their window.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    try:
        cache = DynamicCache(config=model.config)
    except (AttributeError, KeyError, ValueError):  # not a text decoder, or a model with its own cache class
        return {}
    sliding = [type(layer) is DynamicSlidingWindowLayer for layer in cache.layers]
    if not any(sliding):
        return {}
    cache.layers = [DynamicLayer() if cut else layer for cut, layer in zip(sliding, cache.layers, strict=True)]
    taken = inspect.signature(model.forward).parameters
    return {name: cache for name in CACHE_NAMES if name in taken}


def _is_of_a_cache(rounding: Any) -> bool:
    """Tell whether keys or values are rounded to int8, with a 4-D scale and without rotations or zero points."""
    if rounding.format != str(INT8) or rounding.scale is None or rounding.scale.dim() != 4 or len(rounding.factors):
        return False
    return rounding.zero_point is None or not bool(rounding.zero_point.any())


__all__ = ["CacheScales"]
