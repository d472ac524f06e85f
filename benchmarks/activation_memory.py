"""Memory of learning block by block: it does not grow with depth, and a budget sends activations to disk.

    python -m benchmarks.activation_memory [--write]

Each run is a process of its own that learns the codes of a chain of residual blocks on 128×128 images. Printed are the
most activations cached on the host, what went to disk, the process's peak memory, and whether the codes are those of
the run without a limit, bit for bit. `--write` updates `results/activation_memory.md`.
"""

from __future__ import annotations

import hashlib
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Annotated
from unittest import mock

import torch
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import table
from benchmarks.experiment import HIDDEN, experiment
from quark_fx import quantization
from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.graph.nodes import stored_tensors
from quark_fx.passes import AdaRound

RUNS: Sequence[tuple[int, int, int | None]] = (
    # blocks, images, MiB on the host
    (4, 64, None),
    (16, 64, None),
    (4, 192, None),
    (4, 192, 256),
)

_MIB = 1 << 20


class Block(nn.Module):
    """A residual block of little arithmetic and large activations."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.pointwise = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.pointwise(torch.relu(self.depthwise(x))))


def learn(blocks: int, images: int, host_mib: int | None) -> dict[str, object]:
    """Learn in this process, and return what it took."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore", UserWarning)
    model = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), *(Block(48) for _ in range(blocks))).eval()
    batches = [torch.randn(8, 3, 128, 128) for _ in range(images // 8)]
    caches: list[ActivationCache] = []

    def cache(*args: object) -> ActivationCache:
        caches.append(ActivationCache(*args))  # type: ignore[arg-type]
        return caches[-1]

    config = qfx.presets.INT8_STATIC.replace(passes=(AdaRound(iterations=0),))
    budget = qfx.CacheBudget(host_bytes=None if host_mib is None else host_mib * _MIB)
    start = time.perf_counter()
    with mock.patch.object(quantization, "ActivationCache", cache):
        qmodel = qfx.quantize(model, config, batches, progress=False, resources=qfx.Resources(cache=budget))
    tensors = stored_tensors(qmodel.graph_module)
    digest = hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors)))
    return {
        "host": caches[0].peak_host_bytes / _MIB,
        "disk": caches[0].spilled_bytes / _MIB,
        "process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "seconds": time.perf_counter() - start,
        "digest": digest.hexdigest(),
    }


@experiment(page="activation_memory.md")
def main(run: Annotated[str | None, HIDDEN] = None) -> str | None:
    """Measure, and return the page."""
    if run is not None:
        print(json.dumps(learn(*json.loads(run))))
        return None
    rows, digests = [], dict[tuple[int, int], str]()
    for one in RUNS:
        command = [sys.executable, "-m", "benchmarks.activation_memory", "--run", json.dumps(one)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        blocks, images, limit = one
        same = "" if limit is None else ("yes" if digests[blocks, images] == found["digest"] else "NO")
        digests.setdefault((blocks, images), found["digest"])
        cells = (f"{found[key]:.0f}" for key in ("host", "disk", "process", "seconds"))
        rows.append((blocks, images, "none" if limit is None else limit, *cells, same))
        print(*rows[-1], flush=True)
    header = ("blocks", "images", "limit, MiB", "cached, MiB", "to disk, MiB", "process, MiB", "s", "same bits")
    return f"""# Memory of learning block by block

Residual blocks of 48 channels on 128×128 images, int8, codes learned by coordinate descent. `cached` is the most
activations the host held at once, `to disk` all that was ever written there, `process` the peak memory of the process,
and `same bits` compares every tensor with the run without a limit. Reproduce with
`python -m benchmarks.activation_memory`.

{table(header, rows)}
"""


if __name__ == "__main__":
    main()
