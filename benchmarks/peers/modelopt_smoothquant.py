"""SmoothQuant as NVIDIA ModelOpt does it; see `benchmarks/peers/job.py` for files.

    modelopt/bin/python -m benchmarks.peers.modelopt_smoothquant job.json

Weights int8 with a scale for each output channel, inputs of convolutions and linears int8 with one scale, both
symmetric and from largest magnitudes; nothing else is quantized. The smoothing factors stay at the inputs of linears
as a multiplication when the network runs. Option of the job beside the common ones:

    alpha    exponent of the inputs' magnitudes, 0 to 1 (ModelOpt's default is 1); null does not smooth

`rounded.safetensors` has weights that apply to inputs as they come: rounded, then multiplied by the smoothing factors.
Also written: `factors.safetensors`, what inputs are multiplied by, and the errors of layers whose inputs are quantized
too, as `errors_with_inputs`.
"""

from __future__ import annotations

import copy
from typing import Any

import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.common import timed
from benchmarks.peers import job as jobs
from benchmarks.peers.worker import work


def run(job: jobs.Job) -> None:
    """Do the job and write its results."""
    alpha, model = job.options["alpha"], copy.deepcopy(job.model)
    algorithm = "max" if alpha is None else {"method": "smoothquant", "alpha": alpha}
    config = {**mtq.INT8_SMOOTHQUANT_CFG, "algorithm": algorithm}
    seconds = timed(lambda: mtq.quantize(model, config, lambda m: jobs.batched(m, job.calibration, job.batch)))
    rounded, factors = _rounded(job.model, model)
    save_file(factors, job.output / "factors.safetensors")
    result = {
        "seconds": {"quantize": vars(seconds)},
        "errors_with_inputs": jobs.layer_errors(job.model, model, job.held_out, job.batch),
    }
    job.write(result, job.model, rounded, jobs.batched(model, job.held_out, job.batch))


def _rounded(original: nn.Module, quantized: nn.Module) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of `original` with the weights of `quantized`, and what inputs are multiplied by, by layer."""
    rounded, factors = copy.deepcopy(original), {}
    with torch.no_grad():
        for name, module in rounded.named_modules():
            if isinstance(module, jobs.MULTIPLIERS):
                partner: Any = quantized.get_submodule(name)
                weight, factor = partner.weight_quantizer(partner.weight), partner.input_quantizer.pre_quant_scale
                if factor is not None:
                    factors[name] = factor.detach().clone()
                    weight = weight * factor
                module.weight.copy_(weight)
    return rounded, factors


if __name__ == "__main__":
    work(__doc__, lambda path: run(jobs.read(path)))
