"""A pretend GPU for machines without one: a PyTorch device whose tensors lie on the CPU and behave as if they did not.

`with PretendGPU() as gpu:` makes the device `"pretend"` usable. Tensors on it do real arithmetic, and

- an operator that mixes them with tensors of the CPU raises what CUDA raises (those without dimensions may mix);
- each wait of the host for the device (`.item()`, `bool()`, `.tolist()`, `.cpu()`, `nonzero`, boolean indexing) is
  counted in `gpu.waits`, each copy from pageable memory to the device in `gpu.copies`, and each copy that does not make
  the host wait in `gpu.streamed`, by the line of the package that asked for it;
- results of a stream may be read on another stream, or by the host, only after a wait that orders the two; memory that
  is freed while another stream still reads or writes it is found, too. Either raises `RaceError`;
- memory is limited: above `gpu.total_bytes` an allocation raises `torch.OutOfMemoryError`.

`quark_fx.system.accelerator` is replaced meanwhile. The device becomes the current accelerator of the process for good,
so tests that use it run in separate processes: `pytest -p pretend_gpu -k pretend` runs tests of `on_devices` on it,
as `test_pretend_gpu.py` does.

Source:
    `torch.utils.backend_registration`, the experimental API beneath it; Fidge 1988 for vector clocks.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_products import PRODUCTS
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import quark_fx
from quark_fx.system import accelerator

_setup_privateuseone_for_python_backend("pretend")
DEVICE = torch.device("pretend:0")

_PACKAGE = str(Path(quark_fx.__file__).parent)
_HERE = __file__

_MOVING = {"_to_copy", "copy_"}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_WAITING = {
    *("_local_scalar_dense", "equal", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select"),
    *(
        "bincount",
        "_linalg_check_errors",
        "linalg_cholesky",
        "linalg_inv",
        "linalg_eigh",
        "_linalg_eigh",
        "_linalg_svd",
    ),
    *("_linalg_solve_ex", "linalg_solve"),
}
"""Operators for whose result, or its shape, CUDA makes the host wait."""

_ABSENT = {"histogram"}
"""Operators that CUDA does not have."""


def _histc(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Count integers, too, as CUDA does."""
    return torch.histc(x.float(), *args, **kwargs).to(x.dtype)


_REPLACED = {**PRODUCTS, "histc": _histc}
"""Operators that CUDA has and the CPU does not, or not for all types."""

Clock = dict[int, int]
"""For each stream, how much of its work is known to be done."""


class RaceError(AssertionError):
    """Two streams, or a stream and the host, use the same memory in an order that nothing ensures."""


class PretendStream:
    """A stream of the pretend GPU, with the parts of the interface of `torch.Stream` that the package uses."""

    def __init__(self) -> None:
        self.clock: Clock = {}
        self._before: list[PretendStream] = []

    def advance(self) -> int:
        """Begin one more piece of work; return its number."""
        self.clock[id(self)] = self.clock.get(id(self), 0) + 1
        return self.clock[id(self)]

    def record_event(self) -> Clock:
        """Return the work that is done once the work so far is."""
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        """Run later work after that of an event."""
        _merge(self.clock, event)

    def wait_stream(self, other: PretendStream) -> None:
        """Run later work after the work that another stream has now."""
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        """Let the host wait."""
        PretendGPU.now().wait(self)

    def __enter__(self) -> PretendStream:
        self._before.append(PretendGPU.now().stream)
        PretendGPU.now().stream = self
        return self

    def __exit__(self, *raised: object) -> None:
        PretendGPU.now().stream = self._before.pop()


_MAIN = PretendStream()
"""The stream that operators run on unless they are told otherwise, as long as the process lasts."""

_HOST: Clock = {}
"""The work that the host knows to be done."""

_USED: list[PretendStream] = []


class _Memory:
    """Who wrote and read a piece of memory, by stream: the number of the last piece of work."""

    def __init__(self, gpu: PretendGPU, size: int) -> None:
        self.gpu, self.size = gpu, size
        self.home = gpu.stream
        self.written: Clock = {}
        self.read: Clock = {}
        self.recorded: set[int] = set()

    def __del__(self) -> None:
        """Find work on other streams that new tensors in this memory would not wait for."""
        if self.recorded:  # it is free once these streams are known to be done with what they have now
            streams = [stream for stream in self.gpu.streams if id(stream) in self.recorded]
            self.gpu.deferred.append((self.size, [stream.record_event() for stream in streams]))
        else:
            self.gpu.used_bytes -= self.size
        for stream, number in [*self.written.items(), *self.read.items()]:
            if stream not in self.recorded and self.home.clock.get(stream, 0) < number:
                self.gpu.races.append("memory is freed while another stream still uses it; call record_stream")


class OnGPU(Tensor):
    """A tensor of the pretend GPU; `held` has its values."""

    held: Tensor
    memory: _Memory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGPU:
        """Wrap `held`."""
        made = Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
            requires_grad=held.requires_grad,
        )
        made.held = held
        made.memory = PretendGPU.now().memory_of(held)
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Show the values."""
        return f"OnGPU({self.held!r})"

    def tolist(self) -> Any:
        """Return the values, which waits."""
        PretendGPU.now().read_by_host(self)
        return self.held.tolist()

    def __getitem__(self, index: Any) -> Tensor:
        """Return a part; torch copies lists in the index to a device without dispatch, so they become tensors here."""
        parts: Tensor = super().__getitem__(_without_lists(index))
        return parts

    def __setitem__(self, index: Any, value: Any) -> None:
        """Change a part."""
        super().__setitem__(_without_lists(index), value)

    def new_tensor(self, data: Any, **options: Any) -> Tensor:  # type: ignore[override]
        """Return values of this type on this device, which torch copies there without dispatch, too."""
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device, **options})

    def numpy(self, *, force: bool = False) -> Any:
        """Raise the error of a GPU."""
        raise TypeError("can't convert pretend:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the stream has done its work so far."""
        self.memory.recorded.add(id(stream))

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the memory, for those who compare addresses."""
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        """Return where the values are."""
        return self.held.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the values, not the record of the memory."""
        if id(self) not in memo:
            made = self.detach().clone()
            is_parameter = isinstance(self, torch.nn.Parameter)
            needs = self.requires_grad
            memo[id(self)] = torch.nn.Parameter(made, needs) if is_parameter else made.requires_grad_(needs)
        copied: Tensor = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a copy on the CPU would be, with the device."""
        return _restored, (self.cpu(),)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on the device."""
        return PretendGPU.now().run(func, args, kwargs or {})


class PretendGPU(TorchDispatchMode):
    """The device while it is there.

    Attributes:
        waits, copies, streamed: see the module.
        total_bytes: Size of its memory.
        used_bytes: Bytes that tensors use.
        peak_bytes: Largest value of `used_bytes`.
        refused: Allocations that fail, each as the number of those larger than a kilobyte that come before it.
        stream: Stream that operators run on now.
        sync_debug_mode: Argument of `torch.cuda.set_sync_debug_mode`: `"warn"` or `"error"` for waits and copies that
            block.
        capability: Compute capability; it multiplies codes as CUDA does (`gpu_products.py`).
        deferred: Bytes that are free once the host knows events, because of `record_stream`.
        races: Races found where nothing could be raised; leaving the block raises the first of them.
    """

    _now: PretendGPU | None = None

    def __init__(self, total_bytes: int = 1 << 40) -> None:
        """Begin with no waits."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits, self.copies, self.streamed = Counter[str](), Counter[str](), Counter[str]()
        self.capability, self.sync_debug_mode = (9, 0), "default"
        self.total_bytes, self.used_bytes, self.peak_bytes, self.refused = total_bytes, 0, 0, list[int]()
        self.streams = [_MAIN]  # kept, so that no id is used twice
        self.stream = _MAIN
        self.host = _HOST
        self.races: list[str] = []
        self.deferred: list[tuple[int, list[Clock]]] = []
        self._memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._pinned: dict[int, Tensor] = {}
        self._pinned_memories: dict[int, _Memory] = {}

    @classmethod
    def now(cls) -> PretendGPU:
        """Return the one in use."""
        if cls._now is None:
            raise RuntimeError("a tensor of the pretend GPU outlived it")
        return cls._now

    def __enter__(self) -> PretendGPU:
        """Replace functions without dispatch: two of torch, and those of our module for devices."""
        self._real = torch.tensor, torch.as_tensor
        torch.tensor, torch.as_tensor = (_moved_after(make) for make in self._real)
        self._patches = patch.multiple(
            accelerator,
            new_generator=lambda device: torch.Generator(),
            has_streams=lambda device: device.type == DEVICE.type,
            new_stream=self.new_stream,
            current_stream=lambda device: self.stream,
            pinned_bytes=self.pinned_bytes,
            free_bytes=lambda device: self.total_bytes - self.used_bytes if device.type == DEVICE.type else 0,
            return_unused=lambda device: None,
            capability=lambda device: self.capability if device.type == DEVICE.type else None,
            cuda_version=lambda: (12, 9),
        )
        self._patches.start()
        # Otherwise `Module.to` would set the data of a parameter, which the values of a wrapper do not follow.
        torch.__future__.set_swap_module_params_on_conversion(True)
        PretendGPU._now = self
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """Put them back."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for stream in self.streams:
            _merge(_MAIN.clock, stream.clock)
        _merge(_HOST, _MAIN.clock)
        _USED.extend(self.streams)
        self._patches.stop()
        torch.__future__.set_swap_module_params_on_conversion(False)
        torch.tensor, torch.as_tensor = self._real
        PretendGPU._now = None
        if self.races and raised[0] is None:
            raise RaceError(self.races[0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator of either device."""
        return self.run(func, args, kwargs or {})

    def new_stream(self, device: torch.device) -> PretendStream:
        """Return another stream."""
        self.streams.append(PretendStream())
        return self.streams[-1]

    def pinned_bytes(self, count: int) -> Tensor:
        """Return host memory that the device reads and writes by itself."""
        with _disable_current_modes():
            made = torch.full((count,), 0x5A, dtype=torch.uint8)
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def memory_of(self, held: Tensor) -> _Memory:
        """Return the record of the memory of a tensor on the device."""
        key, size = held.untyped_storage().data_ptr(), held.untyped_storage().nbytes()
        known = self._memories.get(key) if key else None
        if known is None:
            if self.refused and size > 1024:
                self.refused[0] -= 1
            if self.used_bytes + size > self.total_bytes or (self.refused and self.refused[0] < 0):
                self.refused = self.refused[1:]
                raise torch.OutOfMemoryError(f"PRETEND out of memory. Tried to allocate {size} bytes")
            known = _Memory(self, size)
            known.written[id(self.stream)] = self.stream.clock.get(id(self.stream), 0)
            self.used_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
            if key:
                self._memories[key] = known
        return known

    def wait(self, stream: PretendStream) -> None:
        """Let the host wait for a stream."""
        self._tell_of_wait()
        self.waits[_caller()] += 1
        _merge(self.host, stream.clock)
        waiting = self.deferred
        self.deferred = [(size, events) for size, events in waiting if not all(map(self._is_known, events))]
        self.used_bytes -= sum(size for size, _ in waiting) - sum(size for size, _ in self.deferred)

    def _is_known(self, event: Clock) -> bool:
        return all(self.host.get(stream, 0) >= number for stream, number in event.items())

    def _tell_of_wait(self) -> None:
        if self.sync_debug_mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.sync_debug_mode == "warn":
            warnings.warn("called a synchronizing CUDA operation", stacklevel=2)

    def read_by_host(self, tensor: OnGPU) -> None:
        """Let the host wait for a tensor."""
        self._require_order(tensor.memory, self.stream.clock)
        self.wait(self.stream)

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run `func` where its tensors are."""
        asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        tensors = list[Tensor]()
        _add_tensors((args, kwargs), tensors)
        ours = [t for t in tensors if isinstance(t, OnGPU)]
        here = asked is not None and asked.type == DEVICE.type
        fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if not ours and (not here or fake):
            if not func.is_view:
                self._host_uses(tensors)
            return func(*args, **kwargs)
        operator = _Operator.of(func)
        name = operator.name
        if name in _ABSENT:
            raise NotImplementedError(f"Could not run '{func}' with arguments from the 'CUDA' backend")
        theirs = [t for t in tensors if not isinstance(t, OnGPU)]
        if name == "copy_":
            here = isinstance(args[0], OnGPU)
        elif name != "_to_copy" or asked is None:
            here = bool(ours) or here
        async_pinned = self._count(name, args, kwargs, ours, theirs, here=here)
        if name not in _MOVING | _INDEXING and ours and any(t.dim() for t in theirs):
            raise RuntimeError(
                f"Expected all tensors to be on the same device: {func} has some on pretend:0, some on cpu"
            )
        number = self.stream.advance()
        writes = {id(args[i]) for i in operator.places if i < len(args)}
        writes |= {id(kwargs[name]) for name in operator.names if name in kwargs}
        memories = [(t.memory, id(t) in writes) for t in ours] + [(m, id(t) in writes) for t, m in async_pinned]
        for memory, written in memories:
            self._require_order(memory, self.stream.clock, written=written)
            (memory.written if written else memory.read)[id(self.stream)] = number
        held_args, held_kwargs = _mapped(_on_cpu, (args, kwargs))
        if held_kwargs.get("pin_memory"):
            held_kwargs = {**held_kwargs, "pin_memory": False}
        with _disable_current_modes() if _has_modes() else nullcontext():
            out = _REPLACED.get(name, func)(*held_args, **held_kwargs)
        if not here:
            known = {id(t): t for t in theirs}
            return out if name != "copy_" else known.get(id(args[0]), out)
        if name == "_to_copy" and theirs and isinstance(out, Tensor) and any(out is t for t in theirs):
            out = out.clone()
        if operator.changes_view:
            with no_dispatch():  # the sizes and strides of the wrapper follow
                func(*args, **kwargs)
        known_held = {id(t.held): t for t in ours}
        return _mapped(
            lambda x: (known_held[id(x)] if id(x) in known_held else OnGPU(x)) if isinstance(x, Tensor) else x, out
        )

    def _count(
        self, name: str, args: Any, kwargs: Any, ours: list[OnGPU], theirs: list[Tensor], *, here: bool
    ) -> list[tuple[Tensor, _Memory]]:
        """Count a wait or a copy; return the pinned tensors that the device reads or writes by itself."""
        masks = name in _INDEXING and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
        waits = bool(ours) and (name in _WAITING or masks)
        if name not in _MOVING:
            if name in _INDEXING and any(t.dim() for t in theirs):
                self.copies[_caller()] += 1
            if waits:
                self.wait(self.stream)
            self._host_uses(theirs)
            return []
        arrives, leaves = here and bool(theirs), bool(ours) and not here
        # `copy_(self, src, non_blocking=False)`
        free = bool(kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        pinned = [(t, m) for t in theirs if (m := self._pinned_memory(t)) is not None]
        if free and (arrives or leaves) and len(pinned) == len(theirs) > 0:
            self.streamed[_caller()] += 1
            return pinned
        if arrives:
            self.copies[_caller()] += 1
            if not free:
                self._tell_of_wait()
        if leaves:
            self.wait(self.stream)
        self._host_uses(theirs)
        return []

    def _pinned_memory(self, tensor: Tensor) -> _Memory | None:
        if not self._pinned or not _has_storage(tensor):
            return None
        key = tensor.untyped_storage().data_ptr()
        if key not in self._pinned:
            return None
        # Tensors in a slab do not share bytes: each place has its order.
        place = tensor.data_ptr()
        if place not in self._pinned_memories:
            self._pinned_memories[place] = _Memory(self, 0)
        return self._pinned_memories[place]

    def _host_uses(self, tensors: list[Tensor]) -> None:
        """Raise `RaceError` if the host uses pinned memory that the device may not be done with."""
        for tensor in tensors if self._pinned else ():
            known = self._pinned_memories.get(tensor.data_ptr()) if _has_storage(tensor) else None
            if known is not None:
                self._require_order(known, self.host, written=True)

    def _require_order(self, memory: _Memory, clock: Clock, *, written: bool = False) -> None:
        """Raise `RaceError` if work on memory may not be done, by a clock; a write comes after reads, too."""
        for used in (memory.written, memory.read) if written else (memory.written,):
            for stream, number in used.items():
                if clock.get(stream, 0) < number:
                    raise RaceError("memory is used while another stream may still work on it; wait for an event")


@pytest.fixture(autouse=True)
def pretend_gpu() -> Iterator[PretendGPU]:
    """Make the device usable in each test of a process that loads this module as a plugin."""
    with PretendGPU() as gpu:
        yield gpu


@dataclass(frozen=True)
class _Operator:
    """Facts of an operator thin every call needs.

    Attributes:
        name: Name without namespace and overload.
        places: Positions of the arguments that it writes.
        names: Names of these.
        changes_view: Whether it changes sizes or strides of an argument.
    """

    name: str
    places: tuple[int, ...]
    names: tuple[str, ...]
    changes_view: bool

    @classmethod
    @cache
    def of(cls, func: Any) -> _Operator:
        """Read the schema of an operator."""
        writes = [(i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info and a.alias_info.is_write]
        places, names = zip(*writes, strict=True) if writes else ((), ())
        return cls(func.overloadpacket.__name__, places, names, torch.Tag.inplace_view in func.tags)


def _has_modes() -> bool:
    return bool(torch._C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch())


def _add_tensors(x: Any, tensors: list[Tensor]) -> None:
    """Append the tensors in nested arguments; torch's functions for that would take most of the time."""
    if isinstance(x, Tensor):
        tensors.append(x)
    elif isinstance(x, (tuple, list)):
        for part in x:
            _add_tensors(part, tensors)
    elif isinstance(x, dict):
        for part in x.values():
            _add_tensors(part, tensors)


def _mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Return nested arguments or results with each value changed."""
    if isinstance(x, (tuple, list)):
        return (list if isinstance(x, list) else tuple)([_mapped(change, part) for part in x])
    if isinstance(x, dict):
        return {name: _mapped(change, part) for name, part in x.items()}
    return change(x)


def _on_cpu(x: Any) -> Any:
    return x.held if isinstance(x, OnGPU) else torch.device("cpu") if isinstance(x, torch.device) else x


def _without_lists(index: Any) -> Any:
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    if not isinstance(index, list):
        return index
    return torch.tensor(index, dtype=None if index else torch.long)


def _restored(value: Tensor) -> Tensor:
    return value.to(DEVICE)


def _has_storage(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


def _moved_after(make: Any) -> Any:
    def made(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is not None and torch.device(device).type == DEVICE.type:
            needs = kwargs.pop("requires_grad", False)
            result: Tensor = make(data, *args, **kwargs).to(DEVICE)
            return result.requires_grad_(needs) if needs else result
        moved: Tensor = make(data, *args, device=device, **kwargs)
        return moved

    return made


def _caller() -> str:
    """Return the line of the package that runs, `"outside"` for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside"


__all__ = ["DEVICE", "PretendGPU", "PretendStream", "RaceError"]
