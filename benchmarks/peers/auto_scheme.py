"""auto-round's AutoScheme chooses formats for a language model; started by `benchmarks.searched`.

    ar/bin/python -m benchmarks.peers.auto_scheme job.json

The environment needs transformers and auto-round, not quark_fx. A job is a JSON object; paths in it are relative to its
own folder.

    model     folder of a `transformers` checkpoint with a tokenizer
    text      file of samples, JSON objects `{"text": ...}`, one a line
    length    tokens of a sample that are read
    samples   that are read
    options   formats, `{"bits": 4, "group_size": 64}` each
    targets   bits per weight, as AutoScheme counts them
    shared    by a name: groups of operators, parts of their names, that get the same format

Beside the job a worker writes result.json: `chosen`, for each name of `shared` and each target what every operator
gets; `seconds` on the clock of the first choice, which scores all formats, for the others do not, and loads the model;
`version`.
"""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.worker import work


def choose(path: Path) -> None:
    """Run a job."""
    from auto_round import AutoRound, AutoScheme  # type: ignore[import-not-found]
    from auto_round.schemes import QuantizationScheme  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    job = json.loads(path.read_text(encoding="utf-8"))
    folder, seconds = path.parent / job["model"], list[float]()
    chosen: dict[str, list[dict[str, Any]]] = {}
    options = [QuantizationScheme(**option, sym=True, data_type="int", act_bits=16) for option in job["options"]]
    read = {"nsamples": job["samples"], "seqlen": job["length"], "batch_size": 1, "device_map": "cpu"}
    read["dataset"] = str(path.parent / job["text"])
    for name, shared in job["shared"].items():
        chosen[name] = []
        for target in job["targets"]:
            start = time.perf_counter()
            scheme = AutoScheme(avg_bits=target, options=options, shared_layers=shared or None, **read)
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            chooser = AutoRound(model, tokenizer, scheme=scheme, iters=0, enable_torch_compile=False, **read)
            chooser.post_init()
            seconds.append(time.perf_counter() - start)
            layers = chooser.layer_config.items()
            chosen[name].append({layer: {key: own[key] for key in ("bits", "group_size")} for layer, own in layers})
    result = {"chosen": chosen, "seconds": seconds[0], "version": version("auto-round")}
    path.with_name("result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    work(__doc__, choose)
