"""Checkpoints that SGLang's own code reads without a GPU: the scheme of each layer, and where the weights go.

    python -m venv /tmp/sglang && /tmp/sglang/bin/pip install torch==2.13.0
    /tmp/sglang/bin/pip install --no-deps sglang sglang-kernel
    python -m benchmarks.in_sglang --sglang /tmp/sglang/bin/python [--only gptq] [--write]

SGLang's dependencies need CUDA: of them install what its imports ask for, but not torchvision. Checkpoints are those of
`benchmarks.in_vllm` and a few more, for `target="sglang"`; what it refuses is written for `target="torch"`. SGLang
parses `config.json`, builds the model on a CPU as for an NVIDIA GPU, chooses schemes and loads the weights (see
`benchmarks/peers/sglang_reading.py` for what is a stub there); no kernel repacks or multiplies. *Layers* are the
schemes of the linear layers, with the layers where they differ; *weights* counts parameters with a part that was not
filled, and tensors of the checkpoint that were not read. `--write` updates `results/sglang.md`.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import quark_fx as qfx
from benchmarks.common import environment, one_thread, peer_job, table
from benchmarks.experiment import Option, experiment
from benchmarks.in_vllm import (
    CT,
    REFUSED,
    Row,
    all_rows,
    first_line,
    int4_in_groups,
    quantized_for,
    shortened,
    write_checkpoint,
)
from quark_fx.presets import W4A16_RTN


def loaded(
    python: Path, folder: Path, names: Sequence[str], capability: Sequence[int] = (9, 0)
) -> list[Mapping[str, Any]]:
    """Let SGLang load checkpoints as for a GPU; return a result for each name of a folder in `folder`."""
    (folder / "group").unlink(missing_ok=True)
    peer_job(python, "sglang_reading", {"capability": capability, "checkpoints": names}, folder)
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


_END = W4A16_RTN.exclude
_WHOLE, _FUSED = (*_END, "*.self_attn.*"), (*_END, "*.self_attn.[qkv]_proj")


def rows_of(part: str) -> list[Row]:
    """Return the checkpoints whose form or model contains `part`, each once; `in_vllm` has some for each dtype."""
    int4 = int4_in_groups(128)
    more = [
        Row("llama", form, what, int4.replace(exclude=exclude))
        for form in (CT, "gptq", "awq")
        for what, exclude in (("int4, attention in float", _WHOLE), ("int4, query, key and value in float", _FUSED))
    ]
    three = W4A16_RTN.replace(weight=W4A16_RTN.weight.replace(format="int3"))  # type: ignore[union-attr]
    every = [*all_rows(), *more, *REFUSED, Row("llama", CT, "int3, groups of 128", three)]
    return list({(r.model, r.form, r.what): r for r in every if r.config and part in f"{r.model} {r.form}"}.values())


@dataclass(frozen=True)
class Lines:
    """The lines of a page: what SGLang reads, what it does not, and what `target="sglang"` refuses."""

    loaded: list[list[str]] = field(default_factory=list)
    without: list[list[str]] = field(default_factory=list)
    refused: list[list[str]] = field(default_factory=list)


def measure(python: Path, folder: Path, rows: Sequence[Row]) -> Lines:
    """Write the checkpoints and let SGLang read them."""
    said = [_written(row, folder / str(i)) for i, row in enumerate(rows)]
    lines = Lines()
    for row, why, found in zip(rows, said, loaded(python, folder, [str(i) for i in range(len(rows))]), strict=True):
        form, failed = [row.model, row.form, row.what], "error" in found
        if why:
            result = [shortened(found["error"]), "–"] if failed else [_cells(found)[0], _cells(found)[2]]
            lines.refused.append([*form, *result, shortened(why, 220)])
        elif failed:
            lines.without.append([*form, shortened(found["error"])])
        else:
            lines.loaded.append([*form, *_cells(found)])
    return lines


def _written(row: Row, folder: Path) -> str:
    """Write a checkpoint; return why `target="sglang"` refuses it, empty if it does not."""
    try:
        write_checkpoint(row, quantized_for(row, "sglang"), folder)
        return ""
    except qfx.QuarkError as error:
        write_checkpoint(row, quantized_for(row, "torch"), folder)
        return first_line(error)


HEADER = ("model", "checkpoint", "what", "layers", "head", "weights")


@experiment(page="sglang.md", own_environment=True)
def main(
    sglang: Annotated[Path, Option("the Python of its environment", metavar="PYTHON")],
    only: Annotated[str, "rows whose checkpoint or model contains this; no other tables"] = "",
) -> str | None:
    """Measure, and return the page."""
    with one_thread(), tempfile.TemporaryDirectory() as folder:
        lines = measure(sglang, Path(folder), rows_of(only))
    if only:
        print(_tables(lines))
        return None
    return page(lines, versions(sglang))


def versions(python: Path) -> str:
    """Return the versions of what the other environment has."""
    code = "from importlib.metadata import version as v; print(', '.join(f'{n} {v(n)}' for n in %r))"
    names = ("sglang", "sglang-kernel", "torch", "transformers", "compressed-tensors")
    done = subprocess.run([str(python), "-c", code % (names,)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _tables(lines: Lines) -> str:
    said = "SGLang says, or its layers"
    return f"""## What it reads

{table(HEADER, lines.loaded)}

## What it does not read

{table((*HEADER[:3], "SGLang says"), lines.without) if lines.without else "Nothing that the target writes."}

## What the target refuses

Written for `target="torch"`, and given to SGLang. Where it names layers, it raised no error: *not filled* parameters
keep what their memory held, and *not read* tensors are dropped.

{table((*HEADER[:3], said, "weights", 'target="sglang" says'), lines.refused)}"""


def page(lines: Lines, versions: str) -> str:
    """Return the page."""
    return f"""# In SGLang

What SGLang's own code makes of the checkpoints, as far as it runs without a GPU. It parses `config.json`,
builds the model on a CPU, chooses a scheme for each layer and loads the weights. **No kernel ran**: no weights were
repacked, no logits computed. SGLang chooses by the GPU, so the process answers for one of compute capability 9.0 that
is not there. In place of `sgl_kernel`, of one more kernel and of torchvision there are stubs that only satisfy imports.

`python -m benchmarks.in_sglang --sglang PYTHON --write` measures this; its docstring defines the columns.

{_tables(lines)}

In SGLang's environment: {versions}. In ours: {environment()}
"""


if __name__ == "__main__":
    main()
