"""Calibration batches: where they are kept, which are held out for validation, and which positions are padding."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.errors import CalibrationError
from quark_fx.graph.signature import BatchShape, batch_shape
from quark_fx.system.isolation import warn

_ONE_IN = 8
"""One sample in eight is validation data; one batch in eight, where batches cannot be divided."""


_MASK = "attention_mask"
"""The input that says which positions are no padding, as Hugging Face models call it; shape (batch, tokens)."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a batch that count.

    Attributes:
        shape: of all positions, (batch, tokens).
        rows: numbers of those that count, int64, of the flattened positions.
    """

    shape: torch.Size
    rows: Tensor

    @classmethod
    def of(cls, mask: Any) -> Positions | None:
        """Return the positions that an attention mask keeps, or `None` if it is not (batch, tokens); waits for it."""
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        return cls(mask.shape, mask.flatten().nonzero().flatten())


def without_padding(x: Tensor, kept: Positions | None) -> Tensor:
    """Return the rows of `x`, shape (rows, last dimension), but for those at positions that are padding.

    Args:
        x: at least one dimension.
        kept: which positions count; of values with other positions all do.
    """
    rows = x.reshape(-1, x.shape[-1])
    # Flattened positions are in the order of the mask; those of any other shape may not be.
    fits = kept is not None and (kept.shape == x.shape[:-1] or (x.dim() == 2 and kept.shape.numel() == len(rows)))
    return rows[kept.rows] if kept is not None and fits else rows


@dataclass
class CalibrationData:
    """Calibration batches of a run, divided into those to learn from and those to judge by.

    Attributes:
        cache: Storage of the batches, and of activations of the run.
        names: Names of the flat inputs, in order.
        ranks: Processes that share the batches.
        batches: Place of each batch: its index as it was given, and a slice of its samples.
        shapes: Shapes of each batch's flat inputs.
        first: Number of the first batch among the batches of all ranks.
        unread: Flat inputs of batches that are read once and not kept.
    """

    cache: ActivationCache
    names: tuple[str, ...] = ()
    ranks: Ranks = ALONE
    batches: list[tuple[int, slice | None]] = field(default_factory=list)
    shapes: list[BatchShape] = field(default_factory=list)
    first: int = 0
    unread: Iterable[list[Any]] = ()
    _kept: dict[tuple[int, int], Positions | None] = field(default_factory=dict)
    _given: int = 0
    _judging: int = 0

    def for_another_run(self) -> CalibrationData:
        """Return the same batches, which are not divided yet, with a cache of their own for activations."""
        cache = ActivationCache(self.cache.budget, self.cache.device, base=self.cache)
        return CalibrationData(cache, self.names, self.ranks, [*self.batches], [*self.shapes])

    def add_batches(self, batches: Iterable[Sequence[Any]], *, divisible: bool = False) -> None:
        """Keep the flat inputs of calibration batches, and divide them (`divide`).

        Args:
            batches: the flat inputs of each.
            divisible: as for `divide`.

        Raises:
            CalibrationError: if a value is NaN; a mask may hold infinities.
        """
        self.keep_batches(batches)
        self.divide(divisible=divisible)

    def keep_batches(self, batches: Iterable[Sequence[Any]]) -> None:
        """Keep the flat inputs of calibration batches, which are whole as yet.

        Raises:
            CalibrationError: if a value is NaN; a mask may hold infinities.
        """
        for index, leaves in enumerate(batches):
            self.cache.put(("batch", index, "length"), len(leaves))
            require_no_nan(leaves, self.names, f"calibration batch {index}")
            for position, leaf in enumerate(leaves):
                # A loader may fill the same buffer again for the next batch.
                self.cache.put(("batch", index, position), leaf.clone() if isinstance(leaf, Tensor) else leaf)
            self.batches.append((index, None))
            self.shapes.append(batch_shape(leaves))

    def divide(self, *, divisible: bool, learns: bool = False) -> None:
        """Divide the batches into those to learn from and those to judge by.

        Args:
            divisible: dimension 0 of every tensor counts samples: the last eighth of these is held out, and a batch
                that belongs to both parts is divided.
            learns: A pass of the run learns from the data, so data that leaves nothing to judge by is worth a warning.

        Raises:
            CalibrationError: if a mask leaves nothing.
        """
        self._judging = min(len(self.batches), max(1, len(self.batches) // _ONE_IN))
        if divisible:
            self._keep_validation_samples()
        kept = [self.kept_positions(batch) for batch in range(len(self.batches))]
        if kept and all(positions is not None and not len(positions.rows) for positions in kept):
            raise CalibrationError(f"{_MASK} leaves out every position of all calibration data; 1 stands for a token")
        self._given = len(self.batches)
        if learns and not self.has_validation:
            warn(
                "the calibration data is one sample, or one batch that cannot be divided: what passes learn from it is "
                "judged on it, too; pass more batches"
            )

    def _keep_validation_samples(self) -> None:
        """Make the last eighth of the samples validation data, however they are divided into batches."""
        sizes = [{shape[0] for shape in shapes if shape} for shapes in self.shapes]
        if any(len(found) != 1 for found in sizes):
            return
        counts = [found.pop() for found in sizes]
        if sum(counts) < 2:
            return
        wanted = max(1, sum(counts) // _ONE_IN)
        self._judging = 0
        while wanted >= counts[-1 - self._judging]:
            wanted -= counts[-1 - self._judging]
            self._judging += 1
        if wanted:  # a batch that belongs to both
            index = len(counts) - 1 - self._judging
            learned = counts[index] - wanted
            self.batches[index : index + 1] = [(index, slice(0, learned)), (index, slice(learned, counts[index]))]
            whole = self.shapes[index]
            self.shapes[index : index + 1] = [
                tuple((count, *shape[1:]) if shape else () for shape in whole) for count in (learned, wanted)
            ]
            self._judging += 1

    def keep_share(self) -> None:
        """Keep the batches of this rank, and nothing of the others'.

        Raises:
            CalibrationError: if there are fewer batches than ranks.
        """
        if self.ranks.alone or not self.batches:
            return
        if self.ranks.count > len(self.batches):
            raise CalibrationError(
                f"{len(self.batches)} calibration batches cannot be shared by {self.ranks.count} ranks; pass at least "
                "one for each, or start fewer"
            )
        every, self.batches = self.batches, list(self.ranks.share(self.batches))
        self.first = self.ranks.share(range(len(every)))[0]
        judging = self.ranks.share([index >= len(every) - self._judging for index in range(len(every))])
        self._judging = sum(judging)
        for batch in {batch for batch, _ in every} - {batch for batch, _ in self.batches}:
            for position in ("length", *range(self.cache.get(("batch", batch, "length")))):
                self.cache.drop(("batch", batch, position))

    def inputs(self, index: int) -> list[Any]:
        """Return the flat inputs of batch `index`, tensors on the device.

        Raises:
            CalibrationError: if there is no calibration data.
        """
        self.require_batches()
        batch, part = self.batches[index]
        return [_part(leaf, part) for leaf in self._leaves(batch)]

    def require_batches(self) -> None:
        """Raise `CalibrationError` if there is no calibration data."""
        if not self.batches:
            raise CalibrationError("a pass of this configuration learns from data; pass calibration_data")

    def input(self, index: int, position: int) -> Any:
        """Return one of the flat inputs of batch `index`, a tensor on the device."""
        return _part(self.cache.get(self.key_of_input(index, position)), self.batches[index][1])

    def key_of_input(self, index: int, position: int) -> Hashable:
        """Return the key that the cache has the whole of one of the flat inputs of batch `index` by."""
        return "batch", self.batches[index][0], position

    def number_of(self, index: int) -> int:
        """Return which of the user's batches batch `index` is, or is a part of."""
        return self.batches[index][0] if self.batches else index

    def kept_positions(self, batch: int) -> Positions | None:
        """Return which positions of batch `batch` are no padding, or `None` if the data does not say.

        They are looked up once, as the device is waited for then.
        """
        if _MASK not in self.names:
            return None
        index, part = self.batches[batch]
        key = index, 0 if part is None else part.start
        if key not in self._kept:
            self._kept[key] = Positions.of(self.input(batch, self.names.index(_MASK)))
        return self._kept[key]

    def positions_in(self, leaves: Sequence[Any]) -> Positions | None:
        """Return which positions of flat inputs are not padding, or `None` if the data does not say."""
        return Positions.of(leaves[self.names.index(_MASK)]) if _MASK in self.names else None

    def flat_batches(self, device: torch.device) -> Iterator[list[Any]]:
        """Yield the flat inputs of every batch, tensors on `device`; once, if they are not kept."""
        if not self.batches:
            yield from self.unread
        for index in range(len(self.batches)):
            yield [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs(index)]

    def _leaves(self, batch: int) -> list[Any]:
        return [self.cache.get(("batch", batch, i)) for i in range(self.cache.get(("batch", batch, "length")))]

    @property
    def calibration(self) -> list[int]:
        """The batches to learn from."""
        return list(range(len(self.batches) - self._judging)) if self.has_validation else [0]

    @property
    def validation(self) -> list[int]:
        """The batches to judge by: the last eighth of the samples, or of the batches where these cannot be divided."""
        return list(range(len(self.batches) - self._judging, len(self.batches)))

    @property
    def has_validation(self) -> bool:
        """Whether there is data to judge by that is not learned from."""
        return self._given != 1

    @property
    def judged_on(self) -> str:
        """The data that changes are judged by, for the report."""
        return "validation data" if self.has_validation else "the calibration data"


def require_no_nan(leaves: Sequence[Any], names: Sequence[str], batch: str) -> None:
    """Raise `CalibrationError` if a flat input holds NaN; a mask may hold infinities.

    Args:
        leaves: the flat inputs.
        names: of these, empty if they have none.
        batch: which these are, for the message.
    """
    if (position := with_nan(leaves)) is not None:
        name = names[position] if names else position
        raise CalibrationError(f"{batch}: input {name} holds NaN; remove such samples")


def with_nan(leaves: Sequence[Any]) -> int | None:
    """Return the position of the first flat input that holds NaN, `None` if none does."""
    floats = ((i, x) for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point())
    return next((position for position, leaf in floats if bool(leaf.isnan().any())), None)


def _part(leaf: Any, part: slice | None) -> Any:
    return leaf if part is None or not isinstance(leaf, Tensor) or not leaf.dim() else leaf[part]


__all__ = ["CalibrationData", "Positions", "require_no_nan", "with_nan", "without_padding"]
