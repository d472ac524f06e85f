"""Recover from a shortage of device memory: move activations to the host, then halve pieces of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from quark_fx.engine.context import Context
from quark_fx.engine.ranks import apart
from quark_fx.graph.pass_manager import Change
from quark_fx.system import accelerator

T = TypeVar("T")

_HALVINGS = 7
"""Most halvings; pieces are then as small as on a processor, whose caches are smaller than the memory of a device."""


def with_room(context: Context, work: Callable[[], T]) -> T:
    """Return the result of `work`, which must not change anything; free device memory and retry if it runs out.

    First, activations move to the host and stay there; then pieces of weights are halved. The report notes both. The
    result does not change, so each rank recovers separately, and `work` must not contain a collective.

    Raises:
        OutOfMemoryError: If memory is still short after that.
    """
    while True:
        try:
            with accelerator.smaller_pieces(context.halvings), apart():
                return work()
        except torch.OutOfMemoryError as error:
            if context.halvings == _HALVINGS:
                raise torch.OutOfMemoryError(
                    f"{error}; activations are on the host and weights are rounded in the smallest pieces: give "
                    "`calibration_data` in batches of fewer or shorter samples, or a `device` with more memory"
                ) from error
        # Out of the handler, since the exception keeps the tensors of `work`.
        if moved := context.cache.offload():
            what = f"full; {moved / 2**20:.1f} MiB of activations moved to the host"
        else:
            context.halvings += 1
            what = f"full; weights are rounded in pieces of 1/{1 << context.halvings} the size"
        accelerator.return_unused(context.device)
        context.note(Change("device memory", what, changed=False))


__all__ = ["with_room"]
