"""vLLM reads checkpoints in a process of its own; started by `benchmarks.in_vllm`.

    vllm/bin/python -m benchmarks.peers.vllm_reading job.json

Its environment needs vLLM, not quark_fx. A job is a JSON object; checkpoints and results lie in its folder. Each result
is written as soon as it is known, so that a crash leaves the earlier ones.

    checkpoints  list of `{"name": …, "dtype": …}`; the folder has that name
    capability   compute capability of a GPU, major and minor: load the checkpoints as for it, and compute nothing
    windows      token ids whose log probabilities are asked for, `(windows, length)`
    prompts      token ids that are continued greedily, `(prompts, length)`
    generate     how many tokens; the token 0 is never chosen
    likeliest    how many log probabilities at a position
    rotating     whether to let vLLM rotate activations on a CPU, which it cannot by itself (default: no)
    cache        whether to write `cache.json`, what `cache_rounding` returns (default: no)

Results are `name.dtype.json`: `error`, or `kernels`, `logprobs` (pairs of token and log probability at each position of
each window but the first), `tokens`, and `seconds` that all prompts took together. With `capability`, they are
`error`, or `kernels` and what `benchmarks.peers.loading.loaded` returns. vLLM's own platform for NVIDIA GPUs then
chooses schemes, kernels, and the attention; torch answers for a GPU that is not there, and stubs take the place of
compiled CUDA code, of FlashInfer and of Humming, which vLLM requires on such GPUs.
"""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.loading import loaded, pretend, reason
from benchmarks.peers.worker import work

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def read(folder: Path, dtype: str, job: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint and return its result."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    if job.get("rotating"):
        _rotate_on_a_cpu()
    lengths = (*(len(row) + 1 for row in job["windows"]), *(len(row) + job["generate"] for row in job["prompts"]))
    model = LLM(
        model=str(folder),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=max(lengths),
        max_num_seqs=len(job["prompts"]),
        max_logprobs=job["likeliest"],
        enable_prefix_caching=False,
    )
    try:
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=job["likeliest"], detokenize=False)
        answers = model.generate([{"prompt_token_ids": row} for row in job["windows"]], asked, use_tqdm=False)
        greedy = SamplingParams(
            temperature=0, max_tokens=job["generate"], ignore_eos=True, logit_bias={0: -100.0}, detokenize=False
        )
        prompts = [{"prompt_token_ids": row} for row in job["prompts"]]
        model.generate(prompts, greedy, use_tqdm=False)
        start = time.perf_counter()
        continued = model.generate(prompts, greedy, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {
            "kernels": model.apply_model(_kernels)[0],
            "logprobs": [[_pairs(place) for place in answer.prompt_logprobs[1:]] for answer in answers],
            "tokens": [list(answer.outputs[0].token_ids) for answer in continued],
            "seconds": seconds,
        }
    finally:
        model.llm_engine.engine_core.shutdown()


def _rotate_on_a_cpu() -> None:
    """Give vLLM's transforms the `cpu_linear` that they lack, and clear its record of matrices it has divided.

    That record is kept by address, which may be that of another matrix in the next model.
    """
    import torch
    from vllm.model_executor.layers.quantization.compressed_tensors.transform.module import (  # type: ignore[import-not-found]
        HadamardTransform,
    )

    HadamardTransform.cpu_linear = staticmethod(torch.nn.functional.linear)
    HadamardTransform.scaled_data_ptrs.clear()


def cache_rounding() -> dict[str, float]:
    """Return the shares of keys that the CPU kernel of an FP8 cache stores as the nearest code, and toward zero."""
    import torch
    import vllm._custom_ops as ops  # type: ignore[import-not-found]

    keys = torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored, other = (torch.zeros(1, 2, 16, 64, dtype=torch.uint8) for _ in range(2))
    places = torch.arange(16)
    ops.cpu_attn_reshape_and_cache(
        keys, keys, stored, other, places, "vec", k_scale=2**-6, v_scale=2**-6, kv_cache_dtype="fp8_e4m3"
    )
    exact = keys.float() * 2**6
    nearest = exact.to(torch.float8_e4m3fn)
    # One code less is one step toward zero, whatever the sign.
    below = (nearest.view(torch.uint8) - 1).view(torch.float8_e4m3fn)
    inward = torch.where(nearest.float().abs() > exact.abs(), below.float(), nearest.float())
    # The kernel orders keys in a way of its own, which rounding keeps: the sorted ones are compared.
    found = stored.view(torch.float8_e4m3fn).float().flatten().sort().values
    wanted = {"nearest": nearest.float(), "toward zero": inward}
    return {name: float((found == codes.flatten().sort().values).float().mean()) for name, codes in wanted.items()}


STUBS = (
    *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "flashinfer", "flashinfer_cubin"),
    *("humming", "vllm.utils.humming"),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
)
"""Modules whose names are found, and do nothing."""

_DEFAULTS = ("prob_scale", *(f"{name}_{what}" for name in "qkv" for what in ("scale", "zero_point")))
"""Scales of caches and zero points, which are 1 and 0 where the checkpoint has none."""

_COMPILED = {
    "cutlass_scaled_mm_supports_fp8": 89,
    "cutlass_scaled_mm_supports_block_fp8": 90,
    "cutlass_scaled_mm_supports_fp4": 100,
    "cutlass_group_gemm_supported": 90,
}
"""Lowest compute capability, times 10, by query of the compiled code (vLLM's `csrc`, with CUDA 13)."""


def _join_alone(capability: Sequence[int], folder: Path) -> None:
    """Make vLLM choose as for a GPU, in a group of one process."""
    import torch

    pretend(capability, STUBS)
    library = torch.library.Library("_C", "FRAGMENT")
    for name, least in _COMPILED.items():
        library.define(f"{name}(int capability) -> bool")
        library.impl(name, lambda found, least=least: found >= least, "CompositeExplicitAutograd")
    library.define("silu_and_mul(Tensor! result, Tensor input) -> ()")  # layers ask for it, and do not call it
    import vllm.platforms as platforms  # type: ignore[import-not-found]
    from vllm.platforms.cuda import NonNvmlCudaPlatform  # type: ignore[import-not-found]

    platforms._current_platform = NonNvmlCudaPlatform()
    from vllm.config import VllmConfig, set_current_vllm_config  # type: ignore[import-not-found]
    from vllm.distributed import parallel_state  # type: ignore[import-not-found]

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=f"file://{folder / 'group'}"
        )
        parallel_state.initialize_model_parallel(backend="gloo")


def load(folder: Path, dtype: str) -> dict[str, Any]:
    """Build the model of a checkpoint as for a GPU, load its weights, and return the result."""
    import torch
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found]
    from vllm.model_executor.model_loader.utils import initialize_model  # type: ignore[import-not-found]

    arguments = EngineArgs(model=str(folder), dtype=dtype, skip_tokenizer_init=True, enforce_eager=True)
    config = arguments.create_engine_config()
    torch.set_default_dtype(config.model_config.dtype)
    try:
        model = initialize_model(vllm_config=config)
    finally:
        torch.set_default_dtype(torch.float32)
    return {"kernels": _kernels(model), **loaded(model, folder, _DEFAULTS)}


def _pairs(place: dict[int, Any]) -> list[tuple[int, float]]:
    return [(token, found.logprob) for token, found in place.items()]


def _kernels(model: Any) -> list[str]:
    """Return the names of the kernels that multiply by quantized weights."""
    names = set()
    for module in model.modules():
        for owner in (getattr(module, "scheme", None), getattr(module, "quant_method", None)):
            kernel = getattr(owner, "kernel", None) or getattr(owner, "fp8_linear", None)
            if kernel is not None:
                names.add(type(kernel).__name__)
    return sorted(names)


def run(path: Path) -> None:
    """Do the job of the JSON file at `path`."""
    job = json.loads(path.read_text(encoding="utf-8"))
    capability = job.get("capability")
    if capability:
        _join_alone(capability, path.parent)
    from vllm.distributed import cleanup_dist_env_and_memory

    if job.get("cache"):
        (path.parent / "cache.json").write_text(json.dumps(cache_rounding()), encoding="utf-8")
    for checkpoint in job["checkpoints"]:
        name, dtype = checkpoint["name"], checkpoint["dtype"]
        try:
            found = load(path.parent / name, dtype) if capability else read(path.parent / name, dtype, job)
        except Exception as error:  # whatever it does not read is a result
            found = {"error": reason(error)}
        gc.collect()
        if not capability:
            cleanup_dist_env_and_memory()
        partial = path.parent / f"{name}.{dtype}.partial"
        partial.write_text(json.dumps(found), encoding="utf-8")
        partial.replace(path.parent / f"{name}.{dtype}.json")


if __name__ == "__main__":
    work(__doc__, run)
