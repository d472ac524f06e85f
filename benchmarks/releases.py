"""Published releases, rebuilt small: converted file to file, killed, resumed, and read by other libraries.

    python -m benchmarks.releases [--only kimi_k2 ...] [--kills 2] [--write]

The sources (`tests/release_sources.py`) have the tensor names, dtypes, and configurations of the releases, several
layers, and random weights. Their codes and values are those of other libraries or of published formulas. Each row
converts one source with one scheme, and counts

- *weights*: matrices that compressed-tensors decompresses to the values that `quantize` gives the decoded source, bit
  for bit, of all that the scheme rounds. NVFP4 is compared in bfloat16, and a tie can differ in the last bit:
  compressed-tensors divides by the global scale, and `quantize` multiplies by its reciprocal;
- *others*: other tensors that are equal to the source's, decoded where they were codes;
- *drafts*: those in draft (MTP) layers, byte for byte;
- *resumed*: conversions in another process, or two, ended by SIGKILL at random moments and repeated, whose
  directories have equal bytes; in parentheses, how many tensors were finished then;
- *loaded*: logits of transformers, from the directory, against a float model with the decompressed weights, which does
  not round activations. transformers 5.24 refuses experts with FP8 blocks of compressed-tensors ("no"), and leaves out
  the global scale of experts in NVFP4, so its logits are wrong; vLLM and SGLang have their own readers;
- *opened*: logits of `open_checkpoint` on the source, against a float model with the source's values.

`--write` updates `benchmarks/results/releases.md`.
"""

from __future__ import annotations

import filecmp
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import quark_fx as qfx
from benchmarks.common import sqnr, table
from benchmarks.experiment import experiment
from benchmarks.schemes import decompressed
from quark_fx.checkpoints.configuration import without_codes
from quark_fx.conversion import convert
from quark_fx.conversion.plan import Conversion
from quark_fx.plan.weights import quantize_tensor
from quark_fx.presets import W4A16_RTN

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from forked import processes
from release_sources import RELEASES, is_draft

TARGETS: Mapping[str, str | qfx.QuantConfig] = {
    "w4a16, groups of 32": W4A16_RTN.replace(group_size=32),
    "fp8_block": "fp8_block",
    "nvfp4a16": "nvfp4a16",
}
_IDS = torch.arange(24).reshape(2, 12)


def _converted(source: Path, target: str, output: Path, count: int = 1) -> Conversion:
    """Convert in many units and shards, as a large checkpoint is."""
    with mock.patch.multiple(convert, _UNIT=1, _SHARD=1 << 19):
        return convert.convert(source, TARGETS[target], output, processes=count, progress=False)


def _alone(*arguments: Any) -> None:
    os.setpgid(0, 0)
    _converted(*arguments)


def _resumed(source: Path, target: str, whole: Path, units: int, kills: int, rng: random.Random) -> str:
    """Return how many conversions have equal bytes after they were killed and repeated.

    One of the first target has two processes.
    """
    equal, counts = 0, []
    for number in range(kills):
        output = whole.with_name(f"{whole.name}-{number}")
        count = 2 if (number, target) == (1, next(iter(TARGETS))) else 1
        process = processes().Process(target=_alone, args=(source, target, output, count))
        process.start()
        log, moment = output.with_name(f"{output.name}.unfinished") / "done", rng.randrange(units)
        while process.is_alive() and not (log.exists() and len(log.read_text().split()) >= moment):
            time.sleep(0.002)
        with suppress(ProcessLookupError):  # it had ended
            os.killpg(process.pid or 0, signal.SIGKILL)  # with the processes that it started
        process.join()
        counts.append(len(log.read_text().split()) if log.exists() else units)
        if not output.exists():
            _converted(source, target, output)
        equal += _same(whole, output)
    return f"{equal} of {kills} ({', '.join(map(str, counts))})"


def _same(one: Path, other: Path) -> bool:
    names = [sorted(str(file.relative_to(folder)) for file in folder.rglob("*")) for folder in (one, other)]
    return names[0] == names[1] and filecmp.cmpfiles(one, other, names[0], shallow=False)[0] == names[0]


def _expected(conversion: Conversion, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the values that `quantize` gives matrices, by name."""
    matrices = {}
    for tensor in conversion.tensors:
        if tensor.weight is not None:
            group = [values[name] for name in (tensor.name, *tensor.shared)]
            amax = torch.stack([value.abs().amax().float() for value in group]).amax()
            matrices[tensor.name] = quantize_tensor(values[tensor.name], tensor.weight, amax=amax).dequantize()
    return matrices


def _float(folder: Path, source: Path, values: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the logits of a model with float weights."""
    folder.mkdir()
    exact = {name: value.float().contiguous() for name, value in values.items()}
    save_file(exact, folder / "model.safetensors", metadata={"format": "pt"})
    description = without_codes(json.loads((source / "config.json").read_text()))
    (folder / "config.json").write_text(json.dumps(description))
    return _logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype))


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(_IDS).logits.float()  # type: ignore[no-any-return]


def _compared(exact: Tensor, logits: Tensor) -> str:
    return "equal" if torch.equal(exact, logits) else f"{sqnr(exact, logits):.0f} dB"


def _rows(release: str, folder: Path, kills: int) -> list[list[str]]:
    """Return a row for each target of a release."""
    source, rows = folder / "source", []
    source.mkdir()
    values = RELEASES[release](source)
    opened = _compared(
        _float(folder / "float", source, values), _logits(qfx.open_checkpoint(source, dtype=torch.float32))
    )
    for index, target in enumerate(TARGETS):
        output = folder / str(index)
        conversion = _converted(source, target, output)
        matrices, units = (
            _expected(conversion, values),
            len({frozenset((t.name, *t.shared)) for t in conversion.tensors}),
        )
        tensors = {n: t for file in sorted(output.glob("*.safetensors")) for n, t in load_file(file).items()}
        weights = {f"{name}.weight": weight for name, weight in decompressed(output).items()}
        right = sum(torch.equal(weights[n], value.to(weights[n].dtype)) for n, value in matrices.items())
        others = {n: n in tensors and torch.equal(v.to(tensors[n].dtype), tensors[n]) for n, v in values.items()}
        others = {name: same for name, same in others.items() if name not in matrices}
        drafts = [same for name, same in others.items() if is_draft(name, release)]
        dtype = torch.bfloat16 if target == "nvfp4a16" else torch.float32  # transformers has its values in bfloat16
        exact = _float(folder / f"float-{index}", source, {**values, **weights}, dtype)
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=dtype)
        except RuntimeError:
            model = None
        resumed = _resumed(source, target, output, units, kills, random.Random(f"{release} {target}"))
        cells = [f"{right} of {len(matrices)}", f"{sum(others.values())} of {len(others)}"]
        cells += [f"{sum(drafts)} of {len(drafts)}" if drafts else "–", resumed]
        loaded = "no" if model is None else _compared(exact, _logits(model))
        rows.append([release, target, *cells, loaded, opened])
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    return rows


@experiment(page="releases.md")
def main(
    only: Annotated[Sequence[str], "functions of tests/release_sources.py"] = (),
    kills: Annotated[int, "conversions that are killed, of each row"] = 2,
) -> str:
    """Return the page."""
    transformers.logging.set_verbosity_error()
    rows = []
    for release, write in RELEASES.items():
        if not only or write.__name__ in only:
            with tempfile.TemporaryDirectory() as folder:
                rows += _rows(release, Path(folder), kills)
    header = ["source", "target", "weights", "others", "drafts", "resumed", "loaded", "opened"]
    intro = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].rpartition("\n\n")[0]
    command = "`python -m benchmarks.releases --write` measures this."
    return f"# Releases converted file to file\n\n{intro} {command}\n\n{table(header, rows)}"


if __name__ == "__main__":
    main()
