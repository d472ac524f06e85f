"""Cache tensors between blocks, within a budget: on the device, in pinned host memory, or on disk."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from quark_fx.errors import CalibrationError
from quark_fx.system import accelerator
from quark_fx.system.memory import is_shortage
from quark_fx.system.options import NonNegativeInt, checked


@checked
@dataclass(frozen=True, kw_only=True)
class CacheBudget:
    """Limits on the memory of cached activations.

    Args:
        device_bytes: Limit in bytes for the device that blocks run on, if it is not the CPU; `None` for half of the
            device's free memory.
        host_bytes: Limit in bytes for host memory; `None` for no limit.
        directory: Directory for tensors that exceed both limits; default: a temporary directory.

    Raises:
        ConfigError: For a budget that is negative or not an integer.
    """

    device_bytes: NonNegativeInt | None = None
    host_bytes: NonNegativeInt | None = None
    directory: str | Path | None = None


_DEVICE_SHARE = 0.5
"""Fraction of free device memory for activations, unless the budget sets a limit; blocks need the rest."""


class ActivationCache:
    """Cache of values by key. A tensor is stored in the first of device, host, and disk that has room.

    Copies between the device and the host use a separate stream, if the device has streams.

    Attributes:
        peak_host_bytes: Peak host memory of the cached tensors, in bytes.
        spilled_bytes: Bytes written to disk so far.
        offloaded_bytes: Bytes moved off the device by `offload` so far.
    """

    def __init__(
        self,
        budget: CacheBudget | None = None,
        device: torch.device | None = None,
        *,
        base: ActivationCache | None = None,
    ) -> None:
        """Create an empty cache.

        Args:
            budget: Budget of this cache and its base together.
            device: Device on which the cache returns tensors.
            base: Cache whose values can also be read through this cache, which never changes them.
        """
        self.budget = budget or CacheBudget()
        self.device = device or torch.device("cpu")
        if self.budget.device_bytes is None:
            share = int(_DEVICE_SHARE * accelerator.free_bytes(self.device))
            self.budget = replace(self.budget, device_bytes=share)
        self.peak_host_bytes = self.spilled_bytes = self.offloaded_bytes = 0
        self._base = base
        self._values: dict[Hashable, Any] = {}
        self._laid_out: dict[Hashable, tuple[torch.Size, tuple[int, ...]]] = {}
        self._used: dict[str, int] = {"device": 0, "host": 0} if base is None else dict(base._used)
        self._transfers = accelerator.Transfers(self.device) if accelerator.has_streams(self.device) else None
        self._arriving: dict[Hashable, accelerator.Arriving] = {}
        self._copies: dict[Hashable, tuple[Tensor, Tensor]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._files = 0

    def put(self, key: Hashable, value: Any) -> None:
        """Store `value` under `key`, replacing an earlier value.

        Raises:
            CalibrationError: If the value must go to disk and cannot be written.
        """
        self.drop(key)
        if not isinstance(value, Tensor):
            self._values[key] = value
            return
        value = value.detach()
        if value.untyped_storage().nbytes() != value.nbytes:
            # A view would keep its whole base alive, and elements that share memory cannot be restored.
            value = value.clone()
        place = self._place(value)
        if place != "disk":
            try:
                self._values[key] = value.to(self.device) if place == "device" else self._on_host(value)
            except RuntimeError as error:
                if place == "device" or not is_shortage(error) or isinstance(error, torch.OutOfMemoryError):
                    raise
                place = "disk"  # the host is out of memory
        if place == "disk":
            self._values[key] = self._write(value)
            self._laid_out[key] = value.shape, value.stride()
            return
        self._used[place] += value.nbytes  # only after the copy, because a copy that runs out of memory is repeated
        self.peak_host_bytes = max(self.peak_host_bytes, self._used["host"])

    def get(self, key: Hashable) -> Any:
        """Return the value of `key`; a tensor is returned on the device."""
        if self._base is not None and key not in self._values:
            return self._base.get(key)
        value = self._values[key]
        if isinstance(value, Path):
            # The choice of kernel, and so the bits, may depend on strides and on the alignment of memory.
            stored = load_file(value)["value"]
            value = torch.empty_strided(*self._laid_out[key], dtype=stored.dtype).copy_(stored)
        elif self._transfers is not None and isinstance(value, Tensor) and value.is_cpu:
            arriving = self._arriving.pop(key, None) or self._transfers.to_device(value)
            return self._transfers.received(arriving)
        return value.to(self.device) if isinstance(value, Tensor) else value

    def copy_of(self, key: Hashable, value: Tensor) -> Tensor:
        """Return `value` on the device; cache a copy from another device for the next call, if there is room.

        Args:
            key: Key of the copy. A cached copy of a different tensor is replaced. `drop_copies` drops all copies.
            value: Tensor, which must not change in place while its copy is cached.
        """
        if value.device == self.device:
            return value
        original, copy = self._copies.get(key, (None, value))
        if original is not value:
            self._forget_copy(key)
            copy = value.to(self.device)
            if self._used["device"] + copy.nbytes <= (self.budget.device_bytes or 0):
                self._used["device"] += copy.nbytes
                self._copies[key] = value, copy
        return copy

    def drop_copies(self) -> int:
        """Drop all copies that `copy_of` cached; return their size in bytes."""
        before = self._used["device"]
        for key in list(self._copies):
            self._forget_copy(key)
        return before - self._used["device"]

    def _forget_copy(self, key: Hashable) -> None:
        if (entry := self._copies.pop(key, None)) is not None:
            self._used["device"] -= entry[1].nbytes

    def prefetch(self, keys: Iterable[Hashable]) -> None:
        """Start copying values from the host to the device, so that the next `get` of each is fast."""
        for key in keys:
            value = self._values.get(key)
            if value is None and self._base is not None:
                self._base.prefetch([key])
            elif (
                self._transfers is not None and isinstance(value, Tensor) and value.is_cpu and key not in self._arriving
            ):
                self._arriving[key] = self._transfers.to_device(value)

    def _receive(self, *keys: Hashable) -> None:
        """Complete the copies of `keys` that `prefetch` started, and drop them."""
        for key in keys:
            if (arriving := self._arriving.pop(key, None)) is not None and self._transfers is not None:
                self._transfers.received(arriving)

    def rows(self, key: Hashable) -> int:
        """Return the size of dimension 0 of the value of `key`, without reading it; 0 for a scalar or a non-tensor."""
        if self._base is not None and key not in self._values:
            return self._base.rows(key)
        value = self._values[key]
        shape = self._laid_out[key][0] if isinstance(value, Path) else getattr(value, "shape", ())
        return shape[0] if shape else 0

    def drop(self, key: Hashable) -> None:
        """Remove `key`, if it is stored."""
        value = self._values.pop(key, None)
        self._laid_out.pop(key, None)
        self._receive(key)
        if isinstance(value, Path):
            value.unlink()
        elif isinstance(value, Tensor):
            place = "host" if value.is_cpu else "device"
            self._used[place] -= value.nbytes
            if self._transfers is not None and place == "host":
                self._transfers.drop(value)

    def offload(self) -> int:
        """Move all values off the device, to the host or to disk; later values go there too. Return the bytes moved."""
        before = self.offloaded_bytes
        self.drop_copies()
        self._receive(*self._arriving)
        self.budget = replace(self.budget, device_bytes=0)
        for key, value in list(self._values.items()):
            if isinstance(value, Tensor) and not value.is_cpu:
                try:
                    self.put(key, value)
                except BaseException:  # a later call must find the value
                    self._values[key] = value
                    self._used["device"] += value.nbytes
                    raise
                self.offloaded_bytes += value.nbytes
        return self.offloaded_bytes - before + (self._base.offload() if self._base is not None else 0)

    def limit_further(self, more: int) -> None:
        """Limit host memory to `more` bytes above its current use, or to the budget if that is lower."""
        limit = self._used["host"] + more
        budget = self.budget.host_bytes
        self.budget = replace(self.budget, host_bytes=limit if budget is None else min(limit, budget))

    def __contains__(self, key: Hashable) -> bool:
        return key in self._values or (self._base is not None and key in self._base)

    def close(self) -> None:
        """Drop all values, and delete the files."""
        self._values.clear()
        self._laid_out.clear()
        self._receive(*self._arriving)
        self._copies.clear()
        self._used = {"device": 0, "host": 0}
        if self._transfers is not None:
            self._transfers.settle()
        self._transfers = accelerator.Transfers(self.device) if self._transfers is not None else None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _place(self, value: Tensor) -> str:
        on_device = self.device.type != "cpu"
        if on_device and self._used["device"] + value.nbytes <= (self.budget.device_bytes or 0):
            return "device"
        limit = self.budget.host_bytes
        return "host" if limit is None or self._used["host"] + value.nbytes <= limit else "disk"

    def _on_host(self, value: Tensor) -> Tensor:
        if self._transfers is None:
            return value.cpu()
        return self._transfers.to_host(value.to(self.device))

    def _write(self, value: Tensor) -> Path:
        try:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="quark_fx-", dir=self.budget.directory)
            self._files += 1
            file = Path(self._folder.name) / f"{self._files}.safetensors"
            save_file({"value": value.cpu().contiguous()}, file)
        except (OSError, SafetensorError) as error:
            place = self.budget.directory or tempfile.gettempdir()
            raise CalibrationError(
                f"cannot write {value.nbytes / 2**20:.1f} MiB of cached activations to {place} ({error}; "
                f"{self.spilled_bytes / 2**20:.1f} MiB were written before); pass CacheBudget a `directory` with more "
                "free space, or more `host_bytes`, or pass fewer calibration batches"
            ) from error
        self.spilled_bytes += value.nbytes
        return file


__all__ = ["ActivationCache", "CacheBudget"]
