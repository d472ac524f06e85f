"""Several processes that quantize one model: each has part of the data, and all get the result.

Every process makes the same calls (`torchrun --nproc-per-node N script.py`). Sums over the data are added up across
processes before use, so the result equals a single process's up to the order of summation; computations on the sums are
divided among the processes.
"""

from __future__ import annotations

import io
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from quark_fx.errors import ConfigError, QuarkError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a job, and the index of this one.

    Attributes:
        index: Index of this process, from 0.
        count: Number of processes.
        gpu: GPU for tensors that NCCL exchanges. Default: the current GPU.
    """

    index: int = 0
    count: int = 1
    gpu: torch.device | None = None

    @classmethod
    def current(cls, device: torch.device | None = None) -> Ranks:
        """Return the ranks of this process's job; without a process group, create one from torchrun's environment.

        Args:
            device: Device that blocks run on, with its index. Default: device of the model.

        Raises:
            QuarkError: If the processes cannot connect.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            try:
                dist.init_process_group()
            except (RuntimeError, ValueError) as error:
                raise QuarkError(
                    f"the ranks given by the environment variables could not connect: {error}; start them with torchrun"
                ) from error
        gpu = device if device is not None and device.type == "cuda" else None
        return cls(dist.get_rank(), dist.get_world_size(), gpu) if dist.is_initialized() else cls()

    @property
    def alone(self) -> bool:
        """True if there is one process."""
        return self.count == 1

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """Return this process's slice of `items`; the slices of all processes, concatenated in order, are `items`."""
        return items[len(items) * self.index // self.count : len(items) * (self.index + 1) // self.count]

    def owners(self, sizes: Sequence[float], loads: list[float]) -> list[int]:
        """Assign each piece of work to a process: the largest first, each to the process with the least work so far.

        Args:
            sizes: Work of each piece.
            loads: Work of each process so far; updated.
        """
        owners = [0] * len(sizes)
        for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
            owners[piece] = loads.index(min(loads))
            loads[owners[piece]] += sizes[piece]
        return owners

    def add(self, *tensors: Tensor) -> None:
        """Replace each tensor by its sum over the processes; the result is bit-identical on all."""
        if not self.alone:
            for tensor in tensors:
                self._collective(partial(dist.all_reduce, tensor))

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Replace the bytes of a contiguous tensor by the bytes of the same tensor in the process `source`."""
        if not self.alone and tensor.numel():
            self._collective(partial(dist.broadcast, tensor.view(-1).view(torch.uint8), source))

    @property
    def device(self) -> torch.device:
        """Device of tensors that processes exchange."""
        accelerated = not self.alone and dist.get_backend() == "nccl"
        if not accelerated:
            return torch.device("cpu")
        return self.gpu or torch.device("cuda", torch.cuda.current_device())

    def gather(self, value: T) -> list[T]:
        """Return the value of each process, in order.

        Tensors of other processes arrive contiguous and without gradients. Tensors from the CPU are on the CPU, others
        on the accelerator of this process's value, or on the CPU if this value uses none.
        """
        return list(self._each(value))

    def fold(self, value: T, merge: Callable[[T, T], T]) -> T:
        """Return the values of all processes, merged in order."""
        return reduce(merge, self._each(value))

    def _each(self, value: T) -> Iterator[T]:
        """Yield the value of each process, in order; every process has to take all of them."""
        if self.alone:
            yield value
            return
        sent = _Sent()
        sent.dump(value)
        message = torch.frombuffer(sent.file.getbuffer(), dtype=torch.uint8).to(self.device)
        lengths = torch.zeros(self.count, dtype=torch.int64, device=self.device)
        lengths[self.index] = len(message)
        self.add(lengths)
        for source, length in enumerate(lengths.tolist()):
            received = message if source == self.index else torch.empty(length, dtype=torch.uint8, device=self.device)
            self.broadcast(received, source)
            if source == self.index:
                for tensor in sent.tensors:
                    self.broadcast(tensor.to(self.device).contiguous(), source)
                yield value
            else:
                yield _Received(received.cpu().numpy().tobytes(), self, source, sent.accelerator).load()

    def require_same(self, values: Mapping[str, str]) -> None:
        """Raise `ConfigError` if the processes have different values; the message names the values."""
        by_rank = self.gather(dict(values))
        if differ := [what for what in values if len({other.get(what) for other in by_rank}) > 1]:
            raise ConfigError(
                f"the ranks must agree, but differ in {' and '.join(differ)}; pass the same model (set the same seed), "
                "configuration, and data to each rank (all batches, unshuffled; quantize divides them)"
            )

    def wait(self) -> None:
        """Wait for all processes."""
        self.gather(None)

    def first(self, work: Callable[[], T]) -> T:
        """Run `work` in the first process while the others wait; return its result, or raise, in all processes.

        Raises:
            QuarkError: If `work` raises it. If `work` raises another exception, the first process raises that one, and
                the others raise `QuarkError`.
        """
        outcome: Any = None
        if self.index == 0:
            try:
                outcome = work()
            except QuarkError as error:
                outcome = error
            except Exception as error:
                self.gather(QuarkError(f"rank 0 of {self.count} failed: {type(error).__name__}: {error}"))
                raise
        outcome = self.gather(outcome)[0]
        if isinstance(outcome, QuarkError):
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def raise_first(self, error: QuarkError | None) -> None:
        """Raise the error of the first process that has one, in all processes."""
        for failure in self.gather(error):
            if failure is not None:
                raise failure

    @contextmanager
    def telling_failures(self) -> Iterator[None]:
        """Within the context, report an exception to the other processes, which wait for this one."""
        try:
            yield
        except BaseException as error:
            if not self.alone:
                with suppress(RuntimeError):  # the process with the store is gone
                    message = f"rank {self.index} of {self.count} failed: {type(error).__name__}: {error}"
                    if not _store().check([_key()]):  # this process is the first to fail
                        _store().set(_key(), message)
                _DONE.update(collectives=0, failures=_DONE["failures"] + 1)
            raise

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Forbid collectives within the context, because this process may repeat its work without the others."""
        token = _APART.set(True)
        try:
            yield
        finally:
            _APART.reset(token)

    def _collective(self, begin: Callable[..., Any]) -> None:
        """Run a collective; raise if a process fails before it joins.

        Every process counts collectives and failures. A failure is reported under the current counts, so that it
        reaches the processes that wait at the same counts, but no later run.
        """
        if _APART.get():
            raise QuarkError(
                "a sum over ranks was started inside of `with_room`, which may repeat its work on this rank alone if "
                "memory runs out; compute the sum before or after `with_room`"
            )
        try:
            work, pause, asked = begin(async_op=True), _SHORTEST, time.monotonic()
            while not work.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST)
                if time.monotonic() - asked > _ASK_EVERY:
                    asked = time.monotonic()
                    if _store().check([_key()]):
                        raise QuarkError(_store().get(_key()).decode())
            work.wait()
            _DONE["collectives"] += 1
        except RuntimeError as error:
            raise QuarkError(
                f"rank {self.index} of {self.count} cannot reach the others ({str(error).splitlines()[0]}); if another "
                "rank stopped, see torchrun's output. Start the job again: checkpoint and output_dir keep finished "
                "blocks"
            ) from error


_Described = tuple[torch.dtype, tuple[int, ...], bool, bytes | None]
"""Dtype and shape of a tensor, whether it is on an accelerator, and its bytes, `None` if they follow in a broadcast."""

_SMALL = 1 << 15
"""Largest number of bytes of a tensor that is sent within the pickle; a broadcast can take a millisecond or two."""


class _Sent(pickle.Pickler):
    """Pickle of a value, and the large tensors of the value, which are broadcast after it without a copy.

    The pickle has the bytes of small tensors. Left to itself, it would hold the whole storage of each tensor.
    """

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.tensors: list[Tensor] = []
        self.accelerator = torch.device("cpu")
        """Device of the first tensor that is not on the CPU."""

    def persistent_id(self, value: Any) -> _Described | None:
        if not isinstance(value, Tensor):
            return None
        if self.accelerator.type == "cpu":
            self.accelerator = value.device
        tensor, content = value.detach().resolve_conj().resolve_neg(), None  # lazy views have no bytes of their own
        if tensor.nbytes <= _SMALL:
            content = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        else:
            self.tensors.append(tensor)
        return tensor.dtype, tuple(tensor.shape), tensor.device.type != "cpu", content


class _Received(pickle.Unpickler):
    """Another process's value, whose large tensors arrive while it is unpickled."""

    def __init__(self, pickled: bytes, ranks: Ranks, source: int, accelerator: torch.device) -> None:
        super().__init__(io.BytesIO(pickled))
        self.ranks, self.source, self.accelerator = ranks, source, accelerator

    def persistent_load(self, described: _Described) -> Tensor:
        dtype, shape, accelerated, content = described
        tensor = torch.empty(shape, dtype=dtype, device=self.ranks.device if content is None else "cpu")
        if content is None:
            self.ranks.broadcast(tensor, self.source)
        elif content:  # `frombuffer` refuses an empty buffer
            tensor.view(-1).view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return tensor.to(self.accelerator if accelerated else "cpu")


_APART: ContextVar[bool] = ContextVar("apart", default=False)

_SHORTEST, _LONGEST, _ASK_EVERY = 2e-5, 0.01, 0.5
"""Shortest and longest delay between checks of a collective, and delay between checks for failures, in seconds."""

_DONE = {"collectives": 0, "failures": 0}
"""Number of collectives since the last failure, and of failures, in this process."""


def _key() -> str:
    """Return the key under which processes report a failure at this point."""
    return f"quark_fx failure {_DONE['failures']} {_DONE['collectives']}"


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


ALONE = Ranks()
"""Ranks of a job with a single process."""

__all__ = ["ALONE", "Ranks"]
