"""Modules that replace linear layers and embeddings: kernels for products, and embeddings that look up codes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from quark_fx.errors import QuarkError
from quark_fx.model.kernels.one_row import Computation
from quark_fx.model.kernels.product import Product
from quark_fx.numbers.quantized_tensor import QuantizedTensor


class KernelModule(nn.Module):
    """An inference module whose tensors are in the layout of a kernel, so their dtype and device are fixed.

    Attributes:
        dtype: Dtype of the computation.
    """

    dtype: torch.dtype
    weight: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        require_unchanged(fn, {(dtype, self.weight.device) for dtype in (torch.float32, self.dtype)}, *_CONVERTED)
        return self

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode.

        Raises:
            QuarkError: If `mode` is true.
        """
        if mode:
            raise QuarkError(
                "a model with kernels is for inference; to train it, call quark_fx.prepare_qat(qmodel), whose eager() "
                "has trainable parameters"
            )
        return super().train(False)

    def _save_to_state_dict(self, *_: Any) -> None:
        raise _no_state()

    def _load_from_state_dict(self, *_: Any) -> None:
        raise _no_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        clone = type(self).__new__(type(self))  # shares tensors, which never change
        vars(clone).update(vars(self))
        for name, value in vars(self).items():
            if isinstance(value, dict):
                vars(clone)[name] = dict(value)
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuarkError(
            "weights packed for kernels cannot be pickled; save the quantized model, load it at the destination, and "
            "call eager(kernels=True) there"
        )


class ShapeOnly(Tensor):
    """A tensor with only the shape, dtype, and device of a parameter; computing with it raises an error."""

    @classmethod
    def of(cls, parameter: Tensor, dtype: torch.dtype, device: torch.device) -> ShapeOnly:
        """Return the replacement for a parameter that a kernel reads in another form."""
        tensor: ShapeOnly = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=dtype, device=device)
        return tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise QuarkError(
            "the weights of a model with kernels are packed, and only its kernels can read them; use qmodel.eager() to "
            "read or change weights"
        )


Kinds = set[tuple[torch.dtype, torch.device]]


def keep_as_it_is(model: nn.Module) -> None:
    """Make a model with kernels reject a conversion to another dtype or device before any of its modules changes."""
    kernels = [m for m in model.modules() if isinstance(m, KernelModule)]
    kinds = {(dtype, m.weight.device) for m in kernels for dtype in (torch.float32, m.dtype)}
    vars(model)["_apply"] = partial(_apply_if_unchanged, model, kinds)


def _apply_if_unchanged(
    model: nn.Module, kinds: Kinds, fn: Callable[[Tensor], Tensor], recurse: bool = True
) -> nn.Module:
    require_unchanged(fn, kinds, *_CONVERTED)
    converted: nn.Module = type(model)._apply(model, fn, recurse)
    return converted


_CONVERTED = "a model with kernels", "call eager(kernels=True) again"


def require_unchanged(fn: Callable[[Tensor], Tensor], kinds: Kinds, what: str, again: str) -> None:
    """Raise `RuntimeError` if a conversion changes the dtype or device of tensors.

    Args:
        fn: Function given to `nn.Module._apply`.
        kinds: Dtypes and devices of the tensors.
        what: Description of the model, for the message.
        again: Next step after the conversion, for the message.

    Raises:
        RuntimeError: If `fn` changes a dtype or the device.
    """
    for dtype, device in kinds:
        before = torch.zeros((), dtype=dtype, device=device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise RuntimeError(
                f"{what} cannot change its dtypes or device; convert or move the model before quantizing it, and "
                f"{again}"
            )


class KernelLinear(KernelModule):
    """A linear layer with a quantized weight and the kernel that `compile()` would use.

    Attributes:
        weight: Tensor with only the shape and dtype of the weight.
        bias: Tensor with only the shape and dtype of the bias.
        rounds: Whether the module rounds its input.

    Args:
        product: Product of a quantized graph, in a module that computes nothing else.
        graph_module: Graph from `RowGraphs` that computes the product.
        module: The float layer.
    """

    def __init__(self, product: Product, graph_module: GraphModule, module: nn.Module) -> None:
        super().__init__()
        self.out_features, self.in_features = product.matrix().codes.shape
        self.dtype, self.rounds = product.dtype, product.rounded is not None
        weight, bias = (getattr(module, name) for name in ("weight", "bias"))
        device = product.weight.codes.device
        self.weight = ShapeOnly.of(weight, self.dtype, device)
        self.bias = None if bias is None else ShapeOnly.of(bias, self.dtype, device)
        self._computation, tensors = Computation.of(graph_module, self.in_features)
        self._count = len(tensors)
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"constant{i}", tensor, persistent=False)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the layer, `(..., outputs)`, for an input `(..., inputs)`.

        Raises:
            QuarkError: If the input differs from the layer in dtype or number of channels, or requires a gradient.
        """
        if x.dtype != self.dtype:
            raise QuarkError(
                f"this layer computes in {self.dtype}, but its input is {x.dtype}; convert the input first"
            )
        if x.shape[-1] != self.in_features:
            raise QuarkError(
                f"this layer reads rows of {self.in_features} values, but its input has rows of {x.shape[-1]}"
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise QuarkError(
                "kernels do not support gradients; call the model under torch.no_grad(), or use qmodel.eager()"
            )
        constants = [getattr(self, f"constant{i}") for i in range(self._count)]
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._computation(rows, *constants).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class CodeEmbedding(KernelModule):
    """An embedding that looks up codes and dequantizes the rows; a parametrization would dequantize the whole table.

    Args:
        table: Quantized table with a row per token, `(tokens, channels)`.
        dtype: Dtype of the result.
        module: The float embedding.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def __init__(self, table: QuantizedTensor, dtype: torch.dtype, module: nn.Embedding) -> None:
        super().__init__()
        self.dtype = dtype
        self.num_embeddings, self.embedding_dim = table.codes.shape
        self.padding_idx = module.padding_idx
        self.weight = ShapeOnly.of(module.weight, dtype, table.codes.device)
        self.register_buffer("codes", table.codes.detach().clone(), persistent=False)
        self.register_buffer("scale", table.scale.detach().clone(), persistent=False)
        self.register_buffer("zero_point", table.zero_point.detach().clone(), persistent=False)
        self._format, self._layout = table.format, (table.axis, table.block_size)
        shared = table.layout.flat and table.axis != 0
        self._by_row = tuple(p.numel() > 1 and not shared for p in (table.scale, table.zero_point))
        self.eval()

    @staticmethod
    def takes(table: QuantizedTensor) -> bool:
        """Tell whether rows can be dequantized one by one, which scales for blocks of several rows prevent."""
        return not (table.axis == 0 and table.layout.block > 1)

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows, `(*input.shape, channels)`, for the indices `input`, integers of any shape."""
        rows = input.reshape(-1)
        scale, zero_point = (
            parameter.index_select(0, rows) if by_row else parameter
            for parameter, by_row in zip((self.scale, self.zero_point), self._by_row, strict=True)
        )
        vectors = QuantizedTensor.of(self.codes.index_select(0, rows), scale, zero_point, self._format, *self._layout)
        return vectors.decoded().to(self.dtype).reshape(*input.shape, self.embedding_dim)


def _no_state() -> QuarkError:
    return QuarkError(
        "a model with kernels has no state_dict, because its weights are packed for the kernels; save the quantized "
        "model, or use the state_dict of qmodel.eager()"
    )


__all__ = ["CodeEmbedding", "KernelLinear", "KernelModule", "ShapeOnly", "keep_as_it_is", "require_unchanged"]
