"""Files for AMD's tools, run with the operator library of `amd-quark`, beside torch: equal, bit for bit?

    python -m venv /tmp/quark && /tmp/quark/bin/pip install amd-quark torch==2.13.0 onnxruntime==1.31.1
    python -m benchmarks.vitis_library --amd-quark /tmp/quark/bin/python [--write]

A file for each kind of codes and each of the two domains, of networks in which a difference is one of rounding and not
of the order of sums: `rounded` multiplies activations by one, so that its output is they, as the nodes round them;
`wide` has them from 2**-20 to 2**20; `weights` multiplies the rows of the identity by random weights, so that its
output is these; `cnn` has convolutions, whose sums are exact where scales are powers of two and codes have 8 bits. The
library is compiled at its first use, which needs a C++ compiler. `--write` writes `results/vitis_library.md`.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from torch import Tensor, nn

import quark_fx as qfx
from benchmarks.common import environment, table
from benchmarks.experiment import Option, experiment
from quark_fx import block_formats, formats
from quark_fx.config.quant_config import QuantConfig, TensorSpec
from quark_fx.presets import XINT8
from quark_fx.vendors.amd.formats import PREFIXES

WIDTH = 64
"""Channels of the matrices: two blocks of 32."""


@dataclass(frozen=True)
class Network:
    """A network, and what it is calibrated and run on."""

    build: Callable[[], nn.Module]
    data: Callable[[], Tensor]


def _eye() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH))
    return layer.eval()


def _wide() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(256, WIDTH, generator=generator) * torch.exp2(torch.linspace(-20, 20, 256))[:, None]


def _normal() -> Tensor:
    # The rows end at one number, so that a scale that covers them rounds one exactly.
    x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(0))
    return x.clamp(-1, 1)


def _random_weights() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH, bias=False).eval()


def _cnn() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU())
    return nn.Sequential(*body, nn.Conv2d(8, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 5)).eval()


def _pictures() -> Tensor:
    return torch.randn(8, 3, 14, 14, generator=torch.Generator().manual_seed(0))


NETWORKS = {
    "rounded": Network(_eye, _normal),
    "wide": Network(_eye, _wide),
    "weights": Network(_random_weights, lambda: torch.eye(WIDTH)),
    "cnn": Network(_cnn, _pictures),
}


def _both(weight: TensorSpec, input: TensorSpec | None = None) -> QuantConfig:
    return QuantConfig(weight=weight, input=input or weight)


def _shifts(weight: str, activation: str) -> QuantConfig:
    return _both(*(TensorSpec(format=fmt, scale="power_of_two") for fmt in (weight, activation)))  # type: ignore[arg-type]


def _channels(weight: str, activation: str) -> QuantConfig:
    return _both(TensorSpec(format=weight, granularity="channel"), TensorSpec(format=activation))  # type: ignore[arg-type]


def _blocks(spec: TensorSpec) -> QuantConfig:
    return _both(spec, spec.replace(dynamic=True))


_INTEGERS = ("rounded", "weights", "cnn")

CASES: dict[str, tuple[QuantConfig, tuple[str, ...]]] = {
    "`xint8`": (XINT8, ("cnn",)),
    **{
        f"{weight} × {activation}, shifts": (_shifts(weight, activation), _INTEGERS)
        for weight, activation in (
            *(("int8", "int8"), ("int8", "uint8"), ("uint8", "uint16"), ("int4", "int4"), ("int6", "uint7")),
            *(("int2", "int8"), ("uint4", "uint4")),
        )
    },
    **{
        f"{weight} × {activation}, float scales": (_channels(weight, activation), ("rounded", "weights"))
        for weight, activation in (("int8", "uint8"), ("int8", "int16"), ("int16", "uint16"), ("int32", "int32"))
    },
    "bf16": (_both(TensorSpec(format=formats.BF16)), ("wide", "weights")),
    # Its kernel saturates where a cast makes infinity.
    "fp16": (_both(TensorSpec(format=formats.FP16)), ("rounded", "weights")),
    **{name: (_blocks(getattr(block_formats, name)), ("wide", "weights")) for name in ("BFP16", "MX9", "MX6", "MX4")},
    "MXINT8": (_blocks(block_formats.MXINT8), ("wide", "weights")),
    **{
        f"{name}, `e8m0_floor`": (
            _blocks(getattr(block_formats, name).replace(scale="e8m0_floor")),
            ("wide", "weights"),
        )
        for name in ("MXFP8_E5M2", "MXFP8_E4M3", "MXFP6_E3M2", "MXFP6_E2M3", "MXFP4", "MXINT8")
    },
}
"""What is written: a configuration, and the networks that show it."""


@dataclass(frozen=True)
class Row:
    """One file beside torch.

    Attributes:
        case: key of `CASES`.
        network: key of `NETWORKS`.
        domain: of the nodes.
        values: in the output.
        other: how many of them differ from torch's.
        refused: the library's words, if it did not run the file.
    """

    case: str
    network: str
    domain: str
    values: int
    other: int = 0
    refused: str = ""


def write_files(folder: Path) -> dict[str, Row]:
    """Write every file with its input and what torch makes of it; return a row of each by the file's name."""
    rows: dict[str, Row] = {}
    for case, (config, networks) in CASES.items():
        for name in networks:
            network = NETWORKS[name]
            x = network.data()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                qmodel = qfx.quantize(network.build(), config, [x], progress=False)
            expected = qmodel.run_batch(x).numpy()
            for domain in PREFIXES:
                stem = f"{len(rows):03}"
                qfx.export.onnx(qmodel, folder / f"{stem}.onnx", format="vitis", domain=domain)
                np.save(folder / f"{stem}.x.npy", x.numpy())
                np.save(folder / f"{stem}.torch.npy", expected)
                rows[stem] = Row(case, name, domain, expected.size)
    return rows


def compared(folder: Path, stem: str, row: Row) -> Row:
    """Return the row of a file with what the library made of it."""
    refusal = folder / f"{stem}.txt"
    if refusal.exists():
        return replace(row, refused=refusal.read_text(encoding="utf-8").splitlines()[0])
    found, expected = (np.load(folder / f"{stem}.{kind}.npy") for kind in ("y", "torch"))
    return replace(row, other=int((found != expected).sum()))


def measure(python: str) -> list[Row]:
    """Return the rows of all files, run by an interpreter that has `amd-quark`."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = write_files(folder)
        # Its scripts, among them ninja, lie beside the interpreter.
        path = os.pathsep.join((str(Path(python).parent), os.environ.get("PATH", "")))
        command = [python, "-m", "benchmarks.peers.vitis_session", name]
        subprocess.run(command, cwd=root, check=True, env={**os.environ, "PATH": path}, stdout=subprocess.DEVNULL)
        return [compared(folder, stem, row) for stem, row in rows.items()]


def page(rows: list[Row], release: str) -> str:
    """Return the page."""
    equal = sum(not row.other and not row.refused for row in rows)
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row.case, row.network), {})[row.domain] = row
    cells = [
        (*key, next(iter(of.values())).values, *(of[domain].refused or of[domain].other for domain in PREFIXES))
        for key, of in found.items()
    ]
    header = ("codes of weights × activations", "network", "values", *(f"other, `{domain}`" for domain in PREFIXES))
    return f"""# Files for AMD's tools in AMD's own operators

`format="vitis"`, run by ONNX Runtime with the operator library of `amd-quark` {release} on a processor: {equal} of
{len(rows)} files load and make torch's output, every value equal bit for bit; the last columns count the values that
differ, [onnx.md](../../docs/onnx.md#the-vendors-nodes) says why. That is the arithmetic of the nodes; whether a
compiler for an NPU accepts a file is another question, which needs one.

`python -m benchmarks.vitis_library --amd-quark PYTHON --write` writes this page; its module says what the networks are.

{environment()}

{table(header, cells)}
"""


@experiment(page="vitis_library.md", own_environment=True)
def main(amd_quark: Annotated[str, Option("an interpreter that has amd-quark", metavar="PYTHON")]) -> str:
    """Measure, and return the page."""
    version = "from importlib.metadata import version; print(version('amd-quark'))"
    release = subprocess.run([amd_quark, "-c", version], capture_output=True, text=True, check=True).stdout
    return page(measure(amd_quark), release.strip())


if __name__ == "__main__":
    main()
