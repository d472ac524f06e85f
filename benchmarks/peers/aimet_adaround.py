"""AdaRound, and optionally cross-layer equalization, as AIMET does them; see `benchmarks/peers/job.py` for files.

    aimet/bin/python -m benchmarks.peers.aimet_adaround job.json

Options of the job beside the common ones:

    iterations       of AdaRound for each layer; 0 rounds to nearest
    bits             of weights, default 4, symmetric
    per_channel      scales of weights, default true
    scheme           of weight scales, "min_max" or "tf_enhanced" (default, as in AIMET: the best SQNR of a search)
    activation_bits  null (default) leaves activations in float
    equalize         default false

`result.json` has the seconds of each phase, and for AdaRound what each layer took: `sampling`, running both networks up
to the layer, and `steps`, the optimization. Also written: `scales.safetensors`, the scales of weights by name, and
`nearest.safetensors`, the weights rounded to nearest with these scales, whose errors are `errors_of_nearest`.
"""

from __future__ import annotations

import copy
import inspect
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from aimet_torch.adaround.activation_sampler import ActivationSampler  # type: ignore[import-not-found]
from aimet_torch.adaround.adaround_optimizer import AdaroundOptimizer  # type: ignore[import-not-found]
from aimet_torch.adaround.adaround_weight import Adaround, AdaroundParameters  # type: ignore[import-not-found]
from aimet_torch.batch_norm_fold import fold_all_batch_norms  # type: ignore[import-not-found]
from aimet_torch.common.defs import QuantScheme  # type: ignore[import-not-found]
from aimet_torch.common.quantsim_config.config_utils import get_path_for_target_config  # type: ignore[import-not-found]
from aimet_torch.cross_layer_equalization import equalize_model  # type: ignore[import-not-found]
from aimet_torch.quantsim import QuantizationSimModel  # type: ignore[import-not-found]
from aimet_torch.utils import get_ordered_list_of_modules  # type: ignore[import-not-found]
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.common import Seconds
from benchmarks.peers import job as jobs
from benchmarks.peers.worker import work

PREFIX = "adaround"


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.phases: dict[str, Seconds] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add what runs meanwhile under `name`."""
        cpu, wall = time.process_time(), time.perf_counter()
        yield
        self.phases[name] = Seconds(time.process_time() - cpu, time.perf_counter() - wall)


@contextmanager
def calls_timed(owner: type, name: str) -> Iterator[list[float]]:
    """Yield a list to which every call of the method `owner.name` adds its CPU seconds."""
    times: list[float] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        try:
            return original(*args, **kwargs)
        finally:
            times.append(time.process_time() - start)

    # A class method is already bound to its class.
    with mock.patch.object(owner, name, staticmethod(call) if inspect.ismethod(original) else call):
        yield times


def run(job: jobs.Job) -> None:
    """Do the job and write its results."""
    iterations = job.options["iterations"]
    clock, model, dummy = Clock(), copy.deepcopy(job.model), job.calibration[:1]
    batches = list(job.calibration.split(job.batch))
    with clock.phase("equalize" if job.options.get("equalize") else "fold"):
        if job.options.get("equalize"):
            equalize_model(model, dummy_input=dummy)
        else:
            fold_all_batch_norms(model, None, dummy)
    sim = _simulation(job, model, dummy)
    nearest, scales = _rounded(model, sim)
    rounded = nearest
    layers: dict[str, dict[str, float]] = {}
    if iterations:
        with tempfile.TemporaryDirectory() as folder:
            with clock.phase("adaround"):
                soft, layers = _adaround(job, model, batches, Path(folder))
            # What AIMET returns lies between the codes, for lack of steps; the scales it saves tell where to round to.
            sim = _simulation(job, soft, dummy, Path(folder, f"{PREFIX}.encodings"))
        rounded, saved = _rounded(soft, sim)
        # Saved are ends of ranges, from which scales come back up to a rounding or two.
        if not all(torch.allclose(saved[name], scale, rtol=1e-6, atol=0) for name, scale in scales.items()):
            raise RuntimeError("AdaRound's scales are not those of rounding to nearest")
    if job.options.get("activation_bits"):
        with clock.phase("activations"):
            sim.compute_encodings(lambda simulated: jobs.batched(simulated, job.calibration, job.batch))
        logits = jobs.batched(sim.model, job.held_out, job.batch)
    else:
        logits = jobs.batched(rounded, job.held_out, job.batch)
    save_file(scales, job.output / "scales.safetensors")
    save_file({name: nearest.get_parameter(name).detach() for name in scales}, job.output / "nearest.safetensors")
    steps = sum(layer["steps"] for layer in layers.values())
    result = {
        "seconds": {name: vars(seconds) for name, seconds in clock.phases.items()},
        "seconds_per_step": steps / (iterations * len(layers)) if layers else None,
        "layers": layers,
        "errors_of_nearest": jobs.layer_errors(model, nearest, job.held_out, job.batch),
    }
    job.write(result, model, rounded, logits)


def _adaround(
    job: jobs.Job, model: nn.Module, batches: list[Tensor], folder: Path
) -> tuple[nn.Module, dict[str, dict[str, float]]]:
    """Return the network with AIMET's weights and the CPU seconds of each layer."""
    iterations = job.options["iterations"]
    parameters = AdaroundParameters(batches, len(batches), iterations, forward_fn=lambda network, x: network(x))
    dummy = batches[0][:1]
    with (
        calls_timed(AdaroundOptimizer, "adaround_module") as total,
        calls_timed(AdaroundOptimizer, "_optimize_rounding") as optimizing,
        calls_timed(ActivationSampler, "sample_acts") as sampling,
    ):
        soft = Adaround.apply_adaround(
            model,
            dummy,
            parameters,
            str(folder),
            PREFIX,
            default_param_bw=_bits(job),
            default_quant_scheme=_scheme(job),
            default_config_file=_config(job),
        )
    names = [name for name, module in get_ordered_list_of_modules(model, dummy) if isinstance(module, jobs.MULTIPLIERS)]
    # Before a layer's optimization one batch is sampled; at its start, one and then all.
    width = 2 + len(batches)
    if len(names) != len(total) or len(sampling) != width * len(names):
        raise RuntimeError(f"{len(names)} layers, {len(total)} optimized, {len(sampling)} samples of {width} each")
    layers = {}
    for i, name in enumerate(names):
        first, *inside = sampling[width * i : width * (i + 1)]
        layers[name] = {"total": total[i], "sampling": first + sum(inside), "steps": optimizing[i] - sum(inside)}
    return soft, layers


def _simulation(job: jobs.Job, model: nn.Module, dummy: Tensor, encodings: Path | None = None) -> Any:
    """Return AIMET's copy of `model` with quantizers, those of activations without ranges."""
    sim = QuantizationSimModel(
        model,
        dummy_input=dummy,
        quant_scheme=_scheme(job),
        default_param_bw=_bits(job),
        default_output_bw=job.options.get("activation_bits") or 8,
        config_file=_config(job),
    )
    if encodings is not None:
        sim.set_and_freeze_param_encodings(str(encodings))
    return sim


def _rounded(model: nn.Module, sim: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a copy of `model` with the weights as `sim` quantizes them, and their scales by name."""
    model, scales = copy.deepcopy(model), {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, jobs.MULTIPLIERS):
                quantizer = sim.model.get_submodule(name).param_quantizers["weight"]
                if not quantizer.is_initialized():
                    with quantizer.compute_encodings():
                        quantizer(module.weight)
                module.weight.copy_(quantizer(module.weight).dequantize())
                scales[f"{name}.weight"] = quantizer.get_scale().detach().clone()
    return model, scales


def _bits(job: jobs.Job) -> int:
    return int(job.options.get("bits", 4))


def _scheme(job: jobs.Job) -> Any:
    return QuantScheme.from_str(job.options.get("scheme", "tf_enhanced"))


def _config(job: jobs.Job) -> str:
    suffix = "_per_channel" if job.options.get("per_channel", True) else ""
    return str(get_path_for_target_config(f"default_config{suffix}"))


if __name__ == "__main__":
    work(__doc__, lambda path: run(jobs.read(path)))
