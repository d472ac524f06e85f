"""Scale every site of every model of `benchmarks.models` by random factors: the outputs stay what they were.

    python -m benchmarks.sites [--only bert,gpt2]

All sites of a model are scaled at once, by factors from 1/4 to 4, in float64. *Change* is the largest difference of an
output over its largest magnitude. *Scaled* counts weighted operators that read a site; the others have a reason.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.common import environment, estimate_batch_norm, table
from benchmarks.experiment import experiment
from benchmarks.models import MODELS, perturb
from quark_fx.capture.capture import capture_graph
from quark_fx.graph.signature import split_batch
from quark_fx.rescale.scale_sites import apply_scale, find_scale_sites


def row(name: str) -> tuple[str, ...]:
    """Return one row of the table."""
    torch.manual_seed(0)
    model, batches = MODELS[name]()
    perturb(model)
    if isinstance(batches[0], Tensor):
        estimate_batch_norm(model, batches[:2])
    model.eval()
    captured = capture_graph(model.double(), _double(batches[0]))
    args, kwargs = split_batch(_double(batches[1]))
    flat = captured.signature.flatten(args, kwargs)
    gm = captured.module
    with torch.no_grad():
        before = [y for y in gm(*flat) if isinstance(y, Tensor)]
        analysis = find_scale_sites(gm)
        generator = torch.Generator().manual_seed(0)
        for site in analysis.sites:
            apply_scale(gm, site, 4 ** (2 * torch.rand(site.channels, generator=generator, dtype=torch.float64) - 1))
        gm.recompile()
        after = [y for y in gm(*flat) if isinstance(y, Tensor)]
    change = max(float((b - a).abs().max() / a.abs().max()) for a, b in zip(before, after, strict=True))
    scaled = {found.reader for site in analysis.sites for found in site.inputs}
    return name, str(len(analysis.sites)), str(len(scaled)), str(len(analysis.reasons)), f"{change:.1e}"


def _double(batch: Any) -> Any:
    """Return a batch whose floating-point tensors are float64."""
    return pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, batch)


@experiment()
def main(
    only: Annotated[str | None, "models by part of their names, with commas between; default: all"] = None,
) -> None:
    """Print a row per model."""
    wanted = (only or "").lower().split(",")
    rows = []
    for name in MODELS:
        if any(part in name.lower() for part in wanted):
            rows.append(row(name))
            print(*rows[-1], flush=True)
    print(table(("model", "sites", "scaled", "not scaled", "change"), rows))
    print(environment())


if __name__ == "__main__":
    main()
