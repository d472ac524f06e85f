"""Checkpoints that SGLang's own code reads without a GPU: the scheme of each layer, and where the weights go.

    python -m venv /tmp/sglang && /tmp/sglang/bin/pip install torch==2.13.0
    /tmp/sglang/bin/pip install --no-deps sglang sglang-kernel
    python -m benchmarks.in_sglang --sglang /tmp/sglang/bin/python [--only gptq] [--write]

SGLang's dependencies need CUDA: of them install what its imports ask for, but not torchvision. Checkpoints are those of
`benchmarks.in_vllm`. SGLang parses `config.json`, builds the model on a CPU as for an NVIDIA GPU, chooses schemes and
loads the weights (see `benchmarks/peers/sglang_reading.py` for what is a stub there); no kernel repacks or multiplies.
*Layers* are the schemes of the linear layers, with the layers where they differ; *weights* counts parameters
with a part that was not filled, and tensors of the checkpoint that were not read. `--write` updates `docs/sglang.md`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import quark_fx as qfx
from benchmarks.common import environment, one_thread, peer_job, publish, table
from benchmarks.in_vllm import REFUSED, Row, all_rows, quantized_for, shortened, write_checkpoint


def _read(python: Path, folder: Path, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return what SGLang makes of each checkpoint, given by the name of its folder in `folder`."""
    peer_job(python, "sglang_reading", {"checkpoints": names}, folder)
    return [json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def _cells(found: Mapping[str, Any]) -> list[str]:
    """Return the schemes of the layers and of the head, and what became of the weights."""
    layers = {name: scheme for name, scheme in found["layers"].items() if ".layers." in name}
    places: dict[str, set[str]] = {}
    for name, scheme in layers.items():
        places.setdefault(scheme, set()).add(name)
    kinds = {scheme: {name.rpartition(".")[2] for name in names} for scheme, names in places.items()}
    # What all layers of a kind have in common needs no index.
    said = [
        scheme if len(places) == 1 else f"{scheme}: {', '.join(sorted(_places(names, kinds, scheme)))}"
        for scheme, names in places.items()
    ]
    lost = [
        f"{what}: {len(found[key])}, as {found[key][0]}"
        for key, what in (("unfilled", "not filled"), ("unread", "not read"))
        if found[key]
    ]
    return ["; ".join(said), found["layers"].get("lm_head", "–"), "; ".join(lost) or "all"]


def _places(names: set[str], kinds: Mapping[str, set[str]], scheme: str) -> set[str]:
    """Return the last parts of names, after the index of the layer where another scheme has them too."""
    shared = {kind for other, found in kinds.items() if other != scheme for kind in found}
    return {name.partition(".layers.")[2] if (kind := name.rpartition(".")[2]) in shared else kind for name in names}


def measure(python: Path, folder: Path, rows: Sequence[Row]) -> tuple[list[list[str]], list[list[str]]]:
    """Return the lines of the checkpoints that SGLang reads, and of those that it does not."""
    for i, row in enumerate(rows):
        write_checkpoint(row, quantized_for(row, "vllm"), folder / str(i))
    loaded, without = list[list[str]](), list[list[str]]()
    for row, found in zip(rows, _read(python, folder, [str(i) for i in range(len(rows))]), strict=True):
        form = [row.model, row.form, row.what]
        if "error" in found:
            without.append([*form, shortened(found["error"])])
        else:
            loaded.append([*form, *_cells(found)])
        print((without if "error" in found else loaded)[-1], file=sys.stderr, flush=True)
    return loaded, without


def refused(python: Path, folder: Path) -> list[list[str]]:
    """Return a line for each checkpoint that `target="vllm"` refuses, with what SGLang makes of it."""
    ours = []
    for i, row in enumerate(REFUSED):
        write_checkpoint(row, quantized_for(row, "torch"), folder / f"refused-{i}")
        try:
            write_checkpoint(row, quantized_for(row, "vllm"), folder / f"refused-{i}-ours")
            ours.append("written")
        except qfx.QuarkError:
            ours.append("refused")
    results = _read(python, folder, [f"refused-{i}" for i in range(len(REFUSED))])
    lines = []
    for row, found, mine in zip(REFUSED, results, ours, strict=True):
        said = [shortened(found["error"]), "–"] if "error" in found else [_cells(found)[0], _cells(found)[2]]
        lines.append([row.form, row.what, *said, mine])
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    return lines


HEADER = ("model", "checkpoint", "what", "layers", "head", "weights")


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sglang", type=Path, required=True, metavar="PYTHON", help="the Python of its environment")
    parser.add_argument("--only", default="", help="rows whose checkpoint or model contains this; no other tables")
    parser.add_argument("--write", action="store_true", help="update docs/sglang.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    # The same checkpoint may be in `in_vllm` once for each dtype.
    rows = {(r.model, r.form, r.what): r for r in all_rows() if r.config and options.only in f"{r.model} {r.form}"}
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        loaded, without = measure(options.sglang, Path(folder), list(rows.values()))
        if options.only:
            publish("\n\n".join((table(HEADER, loaded), table((*HEADER[:3], "says"), without))), None)
            return
        lines = refused(options.sglang, Path(folder))
    publish(page(loaded, without, lines, _versions(options.sglang)), "sglang.md" if options.write else None)


def _versions(python: Path) -> str:
    """Return the versions of what the other environment has."""
    code = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r))"
    names = ("sglang", "sglang-kernel", "torch", "transformers", "compressed-tensors")
    done = subprocess.run([str(python), "-c", code % (names,)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def page(loaded: list[list[str]], without: list[list[str]], lines: list[list[str]], versions: str) -> str:
    """Return the page."""
    return f"""# In SGLang

What SGLang's own code makes of the checkpoints of `export.huggingface`, as far as it runs without a GPU. It parses
`config.json`, builds the model on a CPU, chooses a scheme for each layer and loads the weights. **No kernel ran**: no
weights were repacked, no logits computed. SGLang chooses by the GPU, so the process answers for one of compute
capability 9.0 that is not there. In place of `sgl_kernel`, of one more kernel and of torchvision there are stubs that
only satisfy imports.

`python -m benchmarks.in_sglang --sglang PYTHON --write` measures this; its docstring defines the columns. There is no
target for SGLang; the checkpoints are written with `target="vllm"` (see [In vLLM](vllm.md)).

## What it reads

*Not filled* and *not read* raise no error (what SGLang logs was not looked at): a parameter keeps what its memory held.
The entries of `ignore`, `modules_to_not_convert` and `dynamic` name query, key and value; SGLang looks for its fused
`qkv_proj` there unless the class of the model has a `packed_modules_mapping`.

{table(HEADER, loaded)}

## What it does not read

{table((*HEADER[:3], "SGLang says"), without)}

## What the target for vLLM refuses

Written without the target, and given to SGLang. Where it names layers, it raised no error.

{table(("checkpoint", "what", "SGLang says, or its layers", "weights", 'target="vllm"'), lines)}

In SGLang's environment: {versions}. In ours: {environment()}
"""


if __name__ == "__main__":
    main()
