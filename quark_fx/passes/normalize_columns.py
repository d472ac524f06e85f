"""Scale the columns of weights to the same root mean square, which suits a rotation and error feedback after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from quark_fx.config.selection import Selective
from quark_fx.engine.context import Context
from quark_fx.engine.sizes import FLOAT32, Moment, Need, Sizes
from quark_fx.errors import Declined
from quark_fx.graph.pass_manager import Change, graph_pass
from quark_fx.rescale.components import Means
from quark_fx.rescale.planned_sites import READS_WHOLE, PlannedSite, planned_sites
from quark_fx.rescale.scale_sites import apply_scale

_SMALLEST = 1e-4
"""Smallest root mean square of a column that is distinguished, relative to the largest; zero columns count as this."""


@graph_pass(distributed=True)  # ranks have equal weights
@dataclass(frozen=True, kw_only=True)
class NormalizeColumns(Selective):
    """Divide every input channel of quantized weights by its root mean square, and multiply the input by it.

    Use it before `Rotate(streams=False)` and `GPTQ` if activations stay in float; it needs no data. After a rotation,
    all weights are rounded with steps proportional to the root mean square of all weights, and error feedback
    multiplies the squared steps by the geometric mean of the channels' conditional variances in the Hessian. Scales `s`
    change that mean by the geometric mean of `s**-2`, for any data. So the objective is the arithmetic mean of
    `(s w)**2` divided by the geometric mean of `s**2`, for root mean squares `w` of the columns. It is smallest at
    `s = 1 / w`. The report gives the factor by which the loss changes.

    Args:
        explicit: Whether to insert a multiplication if nothing before the site can absorb the scale.

    Source:
        Ours. Chee et al. 2023 (QuIP), theorem 1, for the loss of error feedback; Müller et al. 2025 (SINQ) scale
        columns and rows to the same size for rounding to nearest.
    """

    explicit: bool = False

    def __call__(self, gm: GraphModule, context: Context) -> int:
        """Scale the sites of `gm` with quantized readers; return the number of scaled sites."""
        changed = 0
        for site in planned_sites(gm, context, self, READS_WHOLE, explicit=self.explicit):
            try:
                squares = _mean_squares(gm, site)
            except Declined as declined:
                context.note(Change.skipped(site.name, declined.reason))
                continue
            scale = squares.clamp_min(float(squares.max()) * _SMALLEST**2).rsqrt()
            scale /= scale.log().mean().exp()
            before = float(squares.mean() / (squares * scale.square()).mean())
            apply_scale(gm, site.site, scale)
            said = f"scaled by {float(scale.min()):.2g} to {float(scale.max()):.2g}"
            context.note(Change(site.name, f"{said}; loss of error feedback multiplied by {1 / before:.3g}"))
            changed += 1
        return changed

    def needs(self, sizes: Sizes) -> Need:
        """Return the needs of a run: memory for the squares of a weight, and for the scaled weights."""
        squared = max((2 * FLOAT32 * m.values for m in sizes.matrices.values()), default=0)
        return Need((Moment(sizes.weight_bytes + squared),), held=sizes.weight_bytes)


def _mean_squares(gm: GraphModule, site: PlannedSite) -> Tensor:
    """Return the mean square of each component's weights over all readers, shape (components,).

    Raises:
        Declined: If the site cannot be scaled.
    """
    site.require_own_scales()
    means = Means.of_none(site.site.channels)
    for reader in site.readers:
        columns = reader.columns(gm)
        means.add(reader.scaled.labels.unsqueeze(1).expand_as(columns), columns.square())
    if float(means.means.max()) < torch.finfo(torch.float32).tiny / _SMALLEST**2:
        raise Declined("the weights of all its consumers are zero")
    return means.means


__all__ = ["NormalizeColumns"]
