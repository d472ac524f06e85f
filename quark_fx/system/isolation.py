"""Isolation of calls from torch's modes, from other threads, and from logging.

The results of a call are equal, bit for bit, under autocast, `no_grad`, and `inference_mode`, with another default
device, with reduced precision of float32 products (TF32, bfloat16), and while other threads make calls.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_ONE_CALL = threading.RLock()
"""Lock that only the thread with the running call holds.

`torch.export`, fake tensors, `torch.onnx`, and the exporters of transformers store tracing modes in global variables.
They also change settings of oneDNN and the default dtype while they trace, which affects the results of other threads.
"""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress all warnings, for internal runs of a model that the user did not ask for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("conv", "rnn", "matmul")),
)
"""Backend and operator of each `fp32_precision` setting of `torch.backends`; settings follow those they inherit from.

The public setters are not used, because `torch.backends.mkldnn.fp32_precision` changes the setting of `torch.backends`.
"""


@dataclass(frozen=True)
class Precisions:
    """Settings for the precision of float32 products, which belong to the whole process.

    Attributes:
        newer: Values of the settings `_PRECISIONS`, in order; `"none"` for an inherited value.
        matmul: Value of `torch.set_float32_matmul_precision`.
        cudnn: Value of `torch.backends.cudnn.allow_tf32`.
    """

    newer: tuple[str, ...]
    matmul: str
    cudnn: bool

    @classmethod
    def current(cls) -> Precisions:
        """Return the current settings, even if older and newer ones disagree, so that torch's getters would raise.

        Torch's getters return inherited values, or compare older settings with newer ones. Therefore, each setting is
        read after the settings that it depends on are unset; at the end, all are restored.
        """
        newer = []
        for place in _PRECISIONS:
            newer.append(torch._C._get_fp32_precision_getter(*place))
            torch._C._set_fp32_precision_setter(*place, "none")
        try:
            cudnn = torch._C._get_cudnn_allow_tf32()
        except RuntimeError:  # the getter raises if this setting disagrees with the unset newer ones
            cudnn = True
        current = cls(tuple(newer), torch.get_float32_matmul_precision(), cudnn)
        current.set()
        return current

    def set(self) -> None:
        """Apply these settings to the process."""
        torch.set_float32_matmul_precision(self.matmul)  # this call and the next one change newer settings, too
        torch._C._set_cudnn_allow_tf32(self.cudnn)
        for place, precision in zip(_PRECISIONS, self.newer, strict=True):
            torch._C._set_fp32_precision_setter(*place, precision)


_WHOLE = Precisions(("ieee", *["none"] * (len(_PRECISIONS) - 1)), "highest", False)
"""Settings for products in full float32 precision; `torch.export` requires that older and newer settings agree."""


_CALLERS: ContextVar[Surroundings | None] = ContextVar("callers", default=None)


@dataclass(frozen=True)
class Surroundings:
    """Torch's modes in one thread, and the process's precision of float32 products.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: Device type, whether autocast is on for it, and autocast's dtype, for each device type.
        device: Default device of new tensors; `None` if it was not set.
        precisions: Precision of float32 products.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device | None
    precisions: Precisions

    @classmethod
    def current(cls) -> Surroundings:
        """Return the current modes of this thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
            None if (device := torch.get_default_device()) == torch.device("cpu") else device,
            Precisions.current(),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set these modes, and restore the current modes at the end."""
        now = Surroundings.current()
        if now == self:  # entering modes takes time
            yield
            return
        with ExitStack() as stack:
            if now.inference != self.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            for kind, enabled, dtype in self.autocast:
                if (kind, enabled, dtype) not in now.autocast:
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if now.device != self.device:
                stack.enter_context(self.device or torch.device("cpu"))
            if now.precisions != self.precisions:
                stack.callback(now.precisions.set)
                self.precisions.set()
            stack.enter_context(torch.set_grad_enabled(self.grad))  # last: inference mode sets it, too
            yield

    def plain(self) -> Surroundings:
        """Return the modes that a new thread starts with, and full float32 precision."""
        off = tuple((kind, False, dtype) for kind, _, dtype in self.autocast)
        return Surroundings(True, False, off, None, _WHOLE)

    def during(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`, with these modes set only while the iterator, which is the caller's code, computes an item."""
        iterator, end = iter(items), object()
        while True:
            with self.restored():
                item = next(iterator, end)
            if item is end:
                return
            yield item


def isolated(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function run without autocast, inference mode, a default device, and TF32, and one call at a time.

    The function runs in a copy of the caller's context: if the model's code sets variables of `contextvars`, the caller
    does not see the changes. Calls of other threads wait until it returns. The precision of float32 products belongs to
    the whole process: until the function returns, other threads also compute without TF32, and their changes of these
    settings are lost. The default dtype also belongs to the process; it does not change.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _ONE_CALL:
            caller = Surroundings.current()  # within the lock, because another call changes settings of the process
            token = _CALLERS.set(caller)
            try:
                with caller.plain().restored():
                    return copy_context().run(function, *args, **kwargs)
            finally:
                _CALLERS.reset(token)

    return run


_INNER = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", str(contextlib.__file__))
"""Prefixes of the paths of files whose stack frames `warn` skips."""


def warn(message: str) -> None:
    """Issue a warning at the line of the user's code, above the stack frames of this package and of torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def as_called(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, which are computed in the modes of the code that called the `isolated` function."""
    caller = _CALLERS.get()
    return iter(items) if caller is None else caller.during(items)


class _OfThisThread(logging.Filter):
    """Log filter that drops the records of one thread up to the level of errors."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or record.levelno > logging.ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs of this thread: torch logs whole graphs for errors that our messages explain in one line."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = {id(h): h for logger in loggers if isinstance(logger, logging.Logger) for h in logger.handlers}
    if logging.lastResort is not None:
        handlers[id(logging.lastResort)] = logging.lastResort
    # Skip handlers without a stream, which print nothing. One of them, torch's trace handler, must get a record, so
    # that it turns traces off; otherwise, torch would compose a record for every comparison of sizes.
    handlers = {key: h for key, h in handlers.items() if getattr(h, "stream", h) is not None}
    silence = _OfThisThread()
    for handler in handlers.values():
        handler.addFilter(silence)
    try:
        yield
    finally:
        for handler in handlers.values():
            handler.removeFilter(silence)


__all__ = ["Surroundings", "as_called", "isolated", "quiet"]
