"""ModelOpt's auto_quantize chooses formats for a language model; started by `benchmarks.searched`.

    modelopt/bin/python -m benchmarks.peers.auto_quantize job.json

The environment needs transformers and nvidia-modelopt, not quark_fx. A job is a JSON object; paths in it are relative
to its own folder.

    model     folder of a `transformers` checkpoint
    windows   file of token ids, a list of equally long lists
    options   formats, `{"bits": 4, "group_size": 64}` each
    targets   bits per weight, scales in 32 bits included

Beside the job a worker writes result.json: `chosen`, for each target what every operator gets (`null` for float);
`seconds` on the clock of the first choice, which scores all formats, for the others do not, and loads the model;
`version`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.worker import work


def _recipe(option: Mapping[str, int]) -> dict[str, Any]:
    """Return symmetric codes of the weights alone, as ModelOpt spells them."""
    codes = {"num_bits": option["bits"], "block_sizes": {-1: option["group_size"]}, "enable": True}
    return {
        "quant_cfg": [
            {"quantizer_name": "*weight_quantizer", "cfg": codes},
            {"quantizer_name": "*input_quantizer", "enable": False},
        ],
        "algorithm": "max",
        "effective_bits": option["bits"] + 32 / option["group_size"],
    }


def _loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    ids = batch["input_ids"]
    return torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def choose(path: Path) -> None:
    """Run a job."""
    import modelopt.torch.quantization as mtq  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    job = json.loads(path.read_text(encoding="utf-8"))
    windows = json.loads((path.parent / job["windows"]).read_text(encoding="utf-8"))
    batches = [{"input_ids": torch.tensor([window])} for window in windows]
    recipes = [_recipe(option) for option in job["options"]]
    chosen, seconds = list[dict[str, Any]](), list[float]()
    for target in job["targets"]:
        start = time.perf_counter()
        model: Any = AutoModelForCausalLM.from_pretrained(path.parent / job["model"], dtype=torch.float32).eval()
        found, _ = mtq.auto_quantize(
            model,
            constraints={"effective_bits": _with_head(model, target)},
            quantization_formats=recipes,
            data_loader=batches,
            forward_step=lambda model, batch: model(**batch),
            loss_func=_loss,
            disabled_layers=["*lm_head*", "*embed*"],
            num_calib_steps=len(batches),
            num_score_steps=len(batches),
            checkpoint=str(path.with_name("scores.pth")),
        )
        seconds.append(time.perf_counter() - start)
        chosen.append({name: _format(module) for name, module in found.named_modules() if _is_searched(name, module)})
    result = {"chosen": chosen, "seconds": seconds[0], "version": version("nvidia-modelopt")}
    path.with_name("result.json").write_text(json.dumps(result), encoding="utf-8")


def _with_head(model: torch.nn.Module, target: float) -> float:
    """Return a target for ModelOpt, which counts layers that it leaves in float, too, at 16 bits."""
    counts = {True: 0, False: 0}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            counts[_is_searched(name, module)] += module.weight.numel()
    return (target * counts[True] + 16 * counts[False]) / sum(counts.values())


def _is_searched(name: str, module: Any) -> bool:
    return isinstance(module, torch.nn.Linear) and not re.search("lm_head", name)


def _format(module: Any) -> dict[str, int] | None:
    quantizer = module.weight_quantizer
    if not quantizer.is_enabled:
        return None
    return {"bits": quantizer.num_bits, "group_size": quantizer.block_sizes[-1]}


if __name__ == "__main__":
    work(__doc__, choose)
