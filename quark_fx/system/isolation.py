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
from contextvars import ContextVar, copy_context
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


_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("mkldnn", "all")),
    *((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("conv", "rnn", "matmul")),
)
"""Backend and operator of each `fp32_precision` of `torch.backends`; a setting comes after those it inherits from.

The setter of `torch.backends.mkldnn.fp32_precision` changes that of `torch.backends` instead.
"""


@dataclass(frozen=True)
class Precisions:
    """Settings of the process for the precision of float32 products.

    Attributes:
        newer: Values of `_PRECISIONS`, `"none"` for an inherited one.
        matmul: Value of `torch.set_float32_matmul_precision`.
        cudnn: Value of `torch.backends.cudnn.allow_tf32`.
    """

    newer: tuple[str, ...]
    matmul: str
    cudnn: bool

    @classmethod
    def current(cls) -> Precisions:
        """Return the settings, also if older and newer ones disagree, for which torch's getters raise.

        A getter returns the inherited value, or compares older settings with newer ones. Each is therefore read after
        the settings it depends on are unset.
        """
        newer = []
        for place in _PRECISIONS:
            newer.append(torch._C._get_fp32_precision_getter(*place))
            torch._C._set_fp32_precision_setter(*place, "none")
        try:
            cudnn = torch._C._get_cudnn_allow_tf32()
        except RuntimeError:  # it is not "none", either
            cudnn = True
        current = cls(tuple(newer), torch.get_float32_matmul_precision(), cudnn)
        current.set()
        return current

    def set(self) -> None:
        """Make these the settings of the process."""
        torch.set_float32_matmul_precision(self.matmul)  # this and the next change newer settings, too
        torch._C._set_cudnn_allow_tf32(self.cudnn)
        for place, precision in zip(_PRECISIONS, self.newer, strict=True):
            torch._C._set_fp32_precision_setter(*place, precision)


_WHOLE = Precisions(("ieee", *["none"] * (len(_PRECISIONS) - 1)), "highest", False)
"""Settings for products of all bits; `torch.export` requires that older and newer ones agree."""


_CALLERS: ContextVar[Surroundings | None] = ContextVar("callers", default=None)


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch in one thread, and how the process multiplies float32.

    Attributes:
        grad: Whether gradients are recorded.
        inference: Whether inference mode is on.
        autocast: Kind of device, whether autocast is on for it, and its dtype, for each kind.
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
        """Return the modes of this thread."""
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
                stack.callback(now.precisions.set)
                self.precisions.set()
            stack.enter_context(torch.set_grad_enabled(self.grad))  # last: inference mode sets it, too
            yield

    def plain(self) -> Surroundings:
        """Return the modes of a new thread."""
        off = tuple((kind, False, dtype) for kind, _, dtype in self.autocast)
        return Surroundings(True, False, off, None, _WHOLE)

    def during(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`; these modes are set while a generator, which is code of the caller, computes the next one."""
        iterator, end = iter(items), object()
        while True:
            with self.restored():
                item = next(iterator, end)
            if item is end:
                return
            yield item


def isolated(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function without autocast, inference mode, default device, and TF32, one call at a time.

    It runs in a copy of the caller's context: variables of `contextvars` that the model's code sets stay as they were.
    Calls of other threads wait until it returns. The precision of float32 products belongs to the whole process: until
    then, other threads compute without TF32, too, and lose changes of these settings. The default dtype also belongs
    to the process, and stays.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _ONE_CALL:
            caller = Surroundings.current()  # within the lock: another call changes settings of the process
            token = _CALLERS.set(caller)
            try:
                with caller.plain().restored():
                    return copy_context().run(function, *args, **kwargs)
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
