"""The weights of an ONNX file, in a torch network that runs the same layers in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor, nn


def with_weights(network: nn.Module, file: onnx.ModelProto, example: Tensor) -> nn.Module:
    """Copy weights into a network, in eval mode, in the order in which it runs its layers.

    Args:
        network: with a `Linear` for each matrix product that has a weight.
        file: its float32 initializers are all weights, but for scales of `Resize` and shapes `()` and `(1,)`.
        example: an input of the network.

    Raises:
        ValueError: if the numbers of weights differ, or the shapes of two.
    """
    tensors = list[Tensor]()

    def note(layer: nn.Module, _: Any) -> None:
        for tensor in (*layer.parameters(recurse=False), *layer.buffers(recurse=False)):
            if tensor.is_floating_point():  # the count of batches of a batch norm is not
                tensors.append(tensor.T if isinstance(layer, nn.Linear) and tensor.dim() == 2 else tensor)

    hooks = [layer.register_forward_pre_hook(note) for layer in network.modules()]
    with torch.no_grad():
        network.eval()(example)
        for hook in hooks:
            hook.remove()
        weights = list(_weights(file))
        if len(weights) != len(tensors):
            raise ValueError(f"the file has {len(weights)} weights, the network {len(tensors)}")
        for tensor, weight in zip(tensors, weights, strict=True):
            # Paddle adds the bias of a convolution as (1, channels, 1, 1).
            value = weight.flatten() if tensor.dim() == 1 else weight
            if value.shape != tensor.shape:
                raise ValueError(f"a weight of the file is {tuple(value.shape)}, the network's {tuple(tensor.shape)}")
            tensor.copy_(value)
    return network


def _weights(file: onnx.ModelProto) -> Iterator[Tensor]:
    stored = {one.name: numpy_helper.to_array(one) for one in file.graph.initializer}
    for node in file.graph.node:
        for name in node.input if node.op_type != "Resize" else ():
            if name in stored and stored[name].dtype == np.float32 and stored[name].shape not in ((), (1,)):
                yield torch.from_numpy(stored[name].copy())
