"""Calibration batches: storage, the split into calibration and validation batches, and positions of padding."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quark_fx.engine.activation_cache import ActivationCache
from quark_fx.engine.ranks import ALONE, Ranks
from quark_fx.errors import CalibrationError, QuarkError
from quark_fx.graph.signature import BatchShape, batch_shape
from quark_fx.system import accelerator
from quark_fx.system.isolation import warn

_ONE_IN = 8
"""One sample in eight is validation data; one batch in eight, if batches cannot be divided."""


_MASK = "attention_mask"
"""Name, as in Hugging Face models, of the input that is 0 at padding and nonzero elsewhere; shape (batch, tokens)."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a batch that are not padding.

    Attributes:
        shape: Shape of the mask, (batch, tokens).
        rows: Indices of the positions that are not padding, in the flattened mask, int64.
    """

    shape: torch.Size
    rows: Tensor

    @classmethod
    def of(cls, mask: Any) -> Positions | None:
        """Return the nonzero positions of a mask, `None` if its shape is not (batch, tokens); waits for the device."""
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return None
        return cls(mask.shape, mask.flatten().nonzero().flatten())


def without_padding(x: Tensor, positions: Positions | None) -> Tensor:
    """Return the rows of `x` that are not padding, shape (rows, last dimension).

    Args:
        x: Tensor with at least one dimension.
        positions: Positions that are not padding. If their shape does not match `x`, all rows are returned.
    """
    rows = x.reshape(-1, x.shape[-1])
    # Rows of a flattened batch have the order of the mask; rows of other shapes may not.
    fits = positions is not None and (
        positions.shape == x.shape[:-1] or (x.dim() == 2 and positions.shape.numel() == len(rows))
    )
    return rows[positions.rows] if positions is not None and fits else rows


@dataclass
class CalibrationData:
    """Calibration batches of a run, divided into batches to learn from and batches to validate on.

    Attributes:
        cache: Storage of the batches, and of the run's activations.
        names: Names of the flat inputs, in order.
        ranks: Processes that share the batches.
        batches: Source of each batch: index of the user's batch, and slice of its samples; `None` for all samples.
        shapes: Shapes of each batch's flat inputs.
        first: Index of this rank's first batch among the batches of all ranks.
        unread: Flat inputs of batches that are read once and not stored.
        described: Text with the number of batches of all ranks and the shapes of the first; empty without data.
    """

    cache: ActivationCache
    names: tuple[str, ...] = ()
    ranks: Ranks = ALONE
    batches: list[tuple[int, slice | None]] = field(default_factory=list)
    shapes: list[BatchShape] = field(default_factory=list)
    first: int = 0
    unread: Iterable[list[Any]] = ()
    described: str = ""
    _kept: dict[tuple[int, int], Positions | None] = field(default_factory=dict)
    _given: int = 0
    _judging: int = 0

    def for_another_run(self) -> CalibrationData:
        """Return calibration data with the same batches, before `divide`, and a separate cache for activations."""
        cache = ActivationCache(self.cache.budget, self.cache.device, base=self.cache)
        return CalibrationData(cache, self.names, self.ranks, [*self.batches], [*self.shapes])

    def add_batches(self, batches: Iterable[Sequence[Any]], *, divisible: bool = False) -> None:
        """Store the flat inputs of calibration batches, and divide the batches (`divide`).

        Args:
            batches: Flat inputs of each batch.
            divisible: Same as in `divide`.

        Raises:
            CalibrationError: If a value is NaN. Infinities are allowed, because a mask may hold them.
        """
        self.keep_batches(batches)
        self.divide(divisible=divisible)

    def keep_batches(self, batches: Iterable[Sequence[Any]]) -> None:
        """Store the flat inputs of calibration batches, without dividing the batches.

        Raises:
            CalibrationError: If a value is NaN. Infinities are allowed, because a mask may hold them.
        """
        for index, leaves in enumerate(batches):
            self.cache.put(("batch", index, "length"), len(leaves))
            require_no_nan(leaves, self.names, f"calibration batch {index}")
            for position, leaf in enumerate(leaves):
                # A data loader may reuse the buffer for the next batch.
                self.cache.put(("batch", index, position), leaf.clone() if isinstance(leaf, Tensor) else leaf)
            self.batches.append((index, None))
            self.shapes.append(batch_shape(leaves))

    def divide(self, *, divisible: bool, learns: bool = False) -> None:
        """Divide the batches into batches to learn from and batches to validate on.

        Args:
            divisible: Whether dimension 0 of every tensor counts samples. If so, the last eighth of the samples is held
                out, and a batch with samples of both parts is split; otherwise, the last eighth of the batches is held
                out.
            learns: Whether a pass of the run learns from the data. If so, there is a warning if there is too little
                data to hold any out.

        Raises:
            CalibrationError: If the masks mark every position of all batches as padding.
        """
        self._judging = min(len(self.batches), max(1, len(self.batches) // _ONE_IN))
        if divisible:
            self._keep_validation_samples()
        by_batch = [self.kept_positions(batch) for batch in range(len(self.batches))]
        if by_batch and all(positions is not None and not len(positions.rows) for positions in by_batch):
            raise CalibrationError(
                f"{_MASK} masks every position of all calibration data; use 1 for each position with a token"
            )
        self._given = len(self.batches)
        if self.batches:
            self._describe(self.batches[-1][0] + 1, self.shapes[0])
        if learns and not self.has_validation:
            warn(
                "the calibration data is a single sample, or a batch that cannot be split, so passes are validated on "
                "the data that they learn from; pass more batches"
            )

    def _describe(self, count: int, shapes: BatchShape) -> None:
        inputs = [f"{name} of shape {tuple(shape)}" for name, shape in zip(self.names, shapes, strict=False) if shape]
        self.described = f"Batches: {count}; the first holds {', '.join(inputs)}"

    def _keep_validation_samples(self) -> None:
        """Hold out the last eighth of the samples for validation, however the samples are divided into batches."""
        sizes = [{shape[0] for shape in shapes if shape} for shapes in self.shapes]
        if any(len(lengths) != 1 for lengths in sizes):
            return
        counts = [lengths.pop() for lengths in sizes]
        if sum(counts) < 2:
            return
        samples = max(1, sum(counts) // _ONE_IN)
        self._judging = 0
        while samples >= counts[-1 - self._judging]:
            samples -= counts[-1 - self._judging]
            self._judging += 1
        if samples:  # a batch that belongs to both parts
            index = len(counts) - 1 - self._judging
            learned = counts[index] - samples
            self.batches[index : index + 1] = [(index, slice(0, learned)), (index, slice(learned, counts[index]))]
            whole = self.shapes[index]
            self.shapes[index : index + 1] = [
                tuple((count, *shape[1:]) if shape else () for shape in whole) for count in (learned, samples)
            ]
            self._judging += 1

    def keep_share(self) -> None:
        """Keep the batches of this rank, and drop the batches of other ranks.

        Raises:
            CalibrationError: If there are fewer batches than ranks.
        """
        if self.ranks.alone or not self.batches:
            return
        if self.ranks.count > len(self.batches):
            raise CalibrationError(
                f"{len(self.batches)} calibration batches cannot be shared by {self.ranks.count} ranks; pass at least "
                "one batch for each rank, or start fewer ranks"
            )
        every, self.batches = self.batches, list(self.ranks.share(self.batches))
        self.first = self.ranks.share(range(len(every)))[0]
        judging = self.ranks.share([index >= len(every) - self._judging for index in range(len(every))])
        self._judging = sum(judging)
        for batch in {batch for batch, _ in every} - {batch for batch, _ in self.batches}:
            for position in ("length", *range(self.cache.get(("batch", batch, "length")))):
                self.cache.drop(("batch", batch, position))

    def inputs(self, index: int) -> list[Any]:
        """Return the flat inputs of batch `index`, with tensors on the device.

        Raises:
            CalibrationError: If calibration data is missing.
        """
        self.require_batches()
        batch, part = self.batches[index]
        return [_part(leaf, part) for leaf in self._leaves(batch)]

    def require_batches(self) -> None:
        """Raise `CalibrationError` if calibration data is missing."""
        if not self.batches:
            raise CalibrationError("a pass of this configuration learns from data; pass calibration_data")

    def input(self, index: int, position: int) -> Any:
        """Return the flat input at `position` of batch `index`; a tensor is returned on the device."""
        return _part(self.cache.get(self.key_of_input(index, position)), self.batches[index][1])

    def key_of_input(self, index: int, position: int) -> Hashable:
        """Return the cache key of the flat input at `position` of the user's batch that contains batch `index`."""
        return "batch", self.batches[index][0], position

    def number_of(self, index: int) -> int:
        """Return the index of the user's batch that contains batch `index`."""
        return self.batches[index][0] if self.batches else index

    def first_sample_of(self, index: int) -> int:
        """Return the index, in the user's batch, of the first sample of batch `index`."""
        part = self.batches[index][1] if self.batches else None
        return 0 if part is None else part.start

    def kept_positions(self, batch: int) -> Positions | None:
        """Return the positions of a batch that are not padding, `None` without a mask of shape (batch, tokens).

        Each batch is looked up only once, because the lookup waits for the device.
        """
        if _MASK not in self.names:
            return None
        key = self.number_of(batch), self.first_sample_of(batch)
        if key not in self._kept:
            self._kept[key] = Positions.of(self.input(batch, self.names.index(_MASK)))
        return self._kept[key]

    def numbered(self, batches: Sequence[int]) -> tuple[dict[int, int], int]:
        """Return the index of each of `batches` among the batches of all ranks, and the number of all; collective."""
        counts = self.ranks.gather(len(batches))
        first = sum(counts[: self.ranks.index])
        return {batch: first + i for i, batch in enumerate(batches)}, sum(counts)

    def positions_in(self, leaves: Sequence[Any]) -> Positions | None:
        """Return the positions that are not padding in flat inputs, `None` without a mask of shape (batch, tokens)."""
        return Positions.of(leaves[self.names.index(_MASK)]) if _MASK in self.names else None

    def flat_batches(self, device: torch.device) -> Iterator[list[Any]]:
        """Yield the flat inputs of every batch, with tensors on `device`.

        Batches that are not stored (`unread`) can be read only once, and stay on their device.
        """
        if not self.batches:
            first: BatchShape | None = None
            for count, leaves in enumerate(self.unread, 1):
                first = batch_shape(leaves) if first is None else first
                self._describe(count, first)
                yield leaves
        for index in range(len(self.batches)):
            yield [leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in self.inputs(index)]

    def _leaves(self, batch: int) -> list[Any]:
        return [self.cache.get(("batch", batch, i)) for i in range(self.cache.get(("batch", batch, "length")))]

    @property
    def calibration(self) -> list[int]:
        """Indices of the batches to learn from."""
        return list(range(len(self.batches) - self._judging)) if self.has_validation else [0]

    @property
    def validation(self) -> list[int]:
        """Indices of the batches to validate on: the last eighth of the samples, or of indivisible batches."""
        return list(range(len(self.batches) - self._judging, len(self.batches)))

    @property
    def parts(self) -> list[list[int]]:
        """Indices of the batches to learn from, then, if there is validation data, of the batches to validate on."""
        return [self.calibration, self.validation] if self.has_validation else [self.calibration]

    @property
    def has_validation(self) -> bool:
        """True if there is validation data that passes do not learn from."""
        return self._given != 1

    @property
    def judged_on(self) -> str:
        """Name of the data that changes are validated on, for the report."""
        return "validation data" if self.has_validation else "the calibration data"

    def refusal(self, error: float) -> str:
        """Return the reason for rejecting a change, given the validation error with the change."""
        return refusal(self.judged_on, error)


def refusal(judged_on: str, error: float) -> str:
    """Return the reason for rejecting a change, given the name of the data and the error on it with the change."""
    return f"no better on {judged_on} ({error:.3g})"


def require_batches(data: Any, name: str, error: Callable[[str], Exception] = QuarkError) -> None:
    """Raise an error unless `data` is an iterable of batches; a single batch, such as a tensor, is not.

    Args:
        data: Batches as the user passed them.
        name: Name of the argument, for the message.
        error: Class of the error.
    """
    several = isinstance(data, Iterable) or hasattr(data, "__getitem__")  # some datasets have only __getitem__
    single = isinstance(data, Tensor | Mapping | str) or hasattr(data, "keys") or hasattr(data, "__array__")
    if single or not several:
        remedy = "call it and pass the result" if callable(data) else "wrap a single batch in a list"
        raise error(f"{name} must be an iterable of batches, not a single {type(data).__name__}; {remedy}")


def require_no_nan(leaves: Sequence[Any], names: Sequence[str], batch: str) -> None:
    """Raise `CalibrationError` if a flat input holds NaN; infinities are allowed, because a mask may hold them.

    Args:
        leaves: Flat inputs.
        names: Names of the flat inputs, empty if they have none.
        batch: Name of the batch, for the message.
    """
    for position, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            continue
        name = names[position] if names else position
        sample = first_sample(leaf.isnan())  # a deferred check must not keep the batch in memory
        accelerator.require(sample < 0, partial(_holds_nan, f"{batch}: input {name}", sample))


def _holds_nan(name: str, sample: Tensor) -> CalibrationError:
    return CalibrationError(f"{name} holds NaN in sample {int(sample)}; remove such samples")


def first_sample(marks: Tensor) -> Tensor:
    """Return the index of the first sample with a true value, or -1; shape (), on the device of `marks`."""
    if not marks.numel():
        return torch.full((), -1, device=marks.device)
    marked = marks.reshape(marks.shape[0] if marks.dim() else 1, -1).any(1)
    return torch.where(marked.any(), marked.int().argmax(), -1)


def _part(leaf: Any, part: slice | None) -> Any:
    return leaf if part is None or not isinstance(leaf, Tensor) or not leaf.dim() else leaf[part]


__all__ = ["CalibrationData", "Positions", "first_sample", "refusal", "require_no_nan", "without_padding"]
