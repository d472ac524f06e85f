"""What the workers read and write, and what they measure alike.

A job is a JSON object; paths in it are relative to its own folder.

    network     "module:function", called without arguments; "benchmarks.composed_digits:resnet"
    state       safetensors file of the network's state dict
    images      safetensors file of `calibration` and `held_out`, each `(count, channels, height, width)`
    output      folder to write to, made if missing
    batch       images a batch, default 32
    seed        of torch, default 0

and the options of its worker. In the output folder a worker writes

    result.json          figures
    float.safetensors    the float parameters that were quantized, by name: batch norms folded, channels rescaled
    rounded.safetensors  the same names; weights replaced by `scale * code`
    logits.safetensors   of the held-out images: `float`, of the network as it came, and `quantized`
"""

from __future__ import annotations

import importlib
import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.common import sqnr

MULTIPLIERS = (nn.Conv2d, nn.Linear)
"""The layers whose errors are reported."""


@dataclass(frozen=True)
class Job:
    """A job, its files read.

    Attributes:
        model: the float network in eval mode, with its state.
        calibration: images to calibrate on.
        held_out: images to judge by.
        batch: images a batch.
        output: an existing folder.
        options: the whole JSON object.
    """

    model: nn.Module
    calibration: Tensor
    held_out: Tensor
    batch: int
    output: Path
    options: Mapping[str, Any]

    def write(self, result: Mapping[str, Any], original: nn.Module, rounded: nn.Module, logits: Tensor) -> None:
        """Write what the module's docstring lists.

        Args:
            result: figures of the worker, to which errors, SQNR and peak memory are added.
            original: the float network that was quantized.
            rounded: the same network with rounded weights.
            logits: of the quantized network for the held-out images.
        """
        expected = batched(self.model, self.held_out, self.batch)
        figures = {
            **result,
            "options": self.options,
            "errors": layer_errors(original, rounded, self.held_out, self.batch),
            "logits_sqnr_db": sqnr(expected, logits),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        save_file({"float": expected, "quantized": logits}, self.output / "logits.safetensors")
        save_file(_parameters(original), self.output / "float.safetensors")
        save_file(_parameters(rounded), self.output / "rounded.safetensors")
        (self.output / "result.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")


def read(path: Path) -> Job:
    """Return the job described by the JSON file at `path`."""
    options = json.loads(path.read_text(encoding="utf-8"))
    module, _, function = options["network"].partition(":")
    model = getattr(importlib.import_module(module), function)()
    model.load_state_dict(load_file(path.parent / options["state"]))
    images = load_file(path.parent / options["images"])
    output = path.parent / options["output"]
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.get("seed", 0))
    batch = options.get("batch", 32)
    return Job(model.eval(), images["calibration"], images["held_out"], batch, output, options)


def batched(model: nn.Module, images: Tensor, batch: int) -> Tensor:
    """Return the logits of `images`, computed by `batch`."""
    with torch.no_grad():
        return torch.cat([model(part) for part in images.split(batch)])


def layer_errors(original: nn.Module, rounded: nn.Module, images: Tensor, batch: int) -> dict[str, float]:
    """Return by layer the mean squared error of its output, with rounded weights, for inputs of the float network."""
    squares: dict[str, float] = {}
    counts: dict[str, int] = {}
    partners = dict(rounded.named_modules())

    def compare(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        difference = (partners[name](*inputs) - output).double()
        squares[name] = squares.get(name, 0.0) + float(difference.square().sum())
        counts[name] = counts.get(name, 0) + difference.numel()

    handles = [
        module.register_forward_hook(lambda _, inputs, output, name=name: compare(name, inputs, output))
        for name, module in original.named_modules()
        if isinstance(module, MULTIPLIERS)
    ]
    batched(original, images, batch)
    for handle in handles:
        handle.remove()
    return {name: total / counts[name] for name, total in squares.items()}


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
