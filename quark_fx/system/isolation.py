"""Isolation of calls from the modes of torch, from other threads, and from logging.

A call gives the same bits under autocast, `no_grad`, and `inference_mode`, with another default device, with float32
products in fewer bits (TF32, bfloat16), and while other threads make calls.
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
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_ONE_CALL = threading.RLock()
"""Lock of the thread whose call runs.

`torch.export`, fake tensors, `torch.onnx`, and the exporters of transformers store tracing modes in globals of the
process. They also switch oneDNN and the default dtype while they trace, which changes the results of other threads.
"""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppress warnings of runs that the user did not ask for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


_BACKENDS: Any = torch.backends

_PRODUCTS: tuple[tuple[Any, str, Any], ...] = (
    *((_BACKENDS.cudnn, "allow_tf32", False), (_BACKENDS.cuda.matmul, "fp32_precision", "ieee")),
    *((_BACKENDS.mkldnn.matmul, "fp32_precision", "ieee"), (_BACKENDS.mkldnn.conv, "fp32_precision", "ieee")),
    (_BACKENDS.mkldnn.rnn, "fp32_precision", "ieee"),
)
"""Module of torch that multiplies float32, name of the setting of its precision, and its value for all bits.

The default of cuDNN is TF32. Its older flag is set, which `torch.export` reads and wants to agree with newer ones.
"""


_CALLERS: ContextVar[Surroundings | None] = ContextVar("callers", default=None)


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch in one thread, and how the process multiplies float32.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: Kind of device, whether autocast is on for it, and its dtype, for each kind.
        device: Default device of new tensors; `None` if it was not set.
        precisions: Precision of float32 products, one for each entry of `_PRODUCTS`.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device | None
    precisions: tuple[Any, ...]

    @classmethod
    def current(cls) -> Surroundings:
        """Return the modes of this thread."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = {"cpu", accelerator.type if accelerator is not None else "cpu"}
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in sorted(kinds)),
            None if (device := torch.get_default_device()) == torch.device("cpu") else device,
            tuple(getattr(product, name) for product, name, _ in _PRODUCTS),
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set these modes, and restore the current ones at the end."""
        now = Surroundings.current()
        if now == self:  # entering a mode costs time
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
                stack.callback(_multiply, now.precisions)
                _multiply(self.precisions)
            stack.enter_context(torch.set_grad_enabled(self.grad))  # last: inference mode sets it, too
            yield

    def plain(self) -> Surroundings:
        """Return the modes of a new thread."""
        off = tuple((kind, False, dtype) for kind, _, dtype in self.autocast)
        return Surroundings(True, False, off, None, tuple(whole for _, _, whole in _PRODUCTS))

    def during(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`; these modes are set while a generator, which is code of the caller, computes the next one."""
        iterator, end = iter(items), object()
        while True:
            with self.restored():
                item = next(iterator, end)
            if item is end:
                return
            yield item


def _multiply(precisions: tuple[Any, ...]) -> None:
    for (product, name, _), precision in zip(_PRODUCTS, precisions, strict=True):
        setattr(product, name, precision)


def isolated(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, inference mode, default device, and TF32, one call at a time.

    Calls of other threads wait until it returns. The default dtype belongs to the whole process and stays.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        caller = Surroundings.current()
        token = _CALLERS.set(caller)
        try:
            with _ONE_CALL, caller.plain().restored():
                return function(*args, **kwargs)
        finally:
            _CALLERS.reset(token)

    return run


_INNER = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", str(contextlib.__file__))
"""Start of the paths of files whose frames `warn` skips."""


def warn(message: str) -> None:
    """Warn at the line of the caller's code: skip the frames of this package and of torch."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def as_called(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, computed under the modes of the caller of an `isolated` function."""
    caller = _CALLERS.get()
    return iter(items) if caller is None else caller.during(items)


class _OfThisThread(logging.Filter):
    """Drop the log records of one thread, up to and including errors."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or record.levelno > logging.ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the logs of this thread: torch prints whole graphs for errors that our messages explain in a line."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = {id(h): h for logger in loggers if isinstance(logger, logging.Logger) for h in logger.handlers}
    if logging.lastResort is not None:
        handlers[id(logging.lastResort)] = logging.lastResort
    # A handler without a stream prints nothing. Torch's trace handler must see one record: it then turns traces off.
    # Without it, torch composes a record for every comparison of sizes.
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
