"""What a call must not take from its surroundings, and what it must not do to them.

A call gives the same bits under autocast, `no_grad` and `inference_mode`, with another default device, with products of
float32 in fewer bits (TF32, bfloat16), and while other threads make calls of their own.
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
"""Held by the thread whose call runs.

`torch.export`, fake tensors, `torch.onnx` and the exporters of transformers keep the modes they trace under in globals
of the process, and switch oneDNN and the default dtype meanwhile, which changes what other threads compute.
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
"""What multiplies float32, which it may do in fewer bits, and the setting by which it does not.

The default of cuDNN is TF32. Its older flag is set, which `torch.export` reads and wants to agree with newer ones.
"""


_CALLERS: ContextVar[Surroundings | None] = ContextVar("callers", default=None)


@dataclass(frozen=True)
class Surroundings:
    """The modes of torch that hold for one thread, and how the process multiplies float32.

    Attributes:
        grad: gradients are recorded.
        inference: tensors are made without what gradients need.
        autocast: per kind of device, whether operators choose their dtype, and which.
        device: where tensors are made by default; `None` where nobody chose.
        precisions: of products of float32, by `_PRODUCTS`.
    """

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    device: torch.device | None
    precisions: tuple[Any, ...]

    @classmethod
    def here(cls) -> Surroundings:
        """Return those of this thread, now."""
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
        """Let these hold meanwhile."""
        now = Surroundings.here()
        if now == self:  # no mode is entered that needs not be
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
        """Return those that a new thread starts with."""
        off = tuple((kind, False, dtype) for kind, _, dtype in self.autocast)
        return Surroundings(True, False, off, None, tuple(whole for _, _, whole in _PRODUCTS))

    def during(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`, each made while these hold: a generator's code is the caller's."""
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
    """Make a function run as in a new thread, without autocast, inference mode, default device and TF32, and alone.

    Calls of other threads wait until it returns. The default dtype belongs to the whole process and stays.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        here = Surroundings.here()
        token = _CALLERS.set(here)
        try:
            with _ONE_CALL, here.plain().restored():
                return function(*args, **kwargs)
        finally:
            _CALLERS.reset(token)

    return run


_INNER = (f"{Path(__file__).parents[1]}{os.sep}", f"{Path(torch.__file__).parent}{os.sep}", str(contextlib.__file__))
"""Where the code lies that runs between a caller's line and a warning."""


def warn(message: str) -> None:
    """Warn at the line of the caller's own code, however many calls of this package and of torch lie between."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def as_called(items: Iterable[Any]) -> Iterator[Any]:
    """Yield `items`, each made in the surroundings of the caller of an `isolated` function."""
    caller = _CALLERS.get()
    return iter(items) if caller is None else caller.during(items)


class _OfThisThread(logging.Filter):
    """Drop what one thread logs, up to errors."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return record.thread != self.thread or record.levelno > logging.ERROR


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what this thread logs: torch prints whole graphs about errors that are explained here in a line."""
    known = [logging.root, *list(logging.root.manager.loggerDict.values())]
    handlers = {id(h): h for logger in known if isinstance(logger, logging.Logger) for h in logger.handlers}
    if logging.lastResort is not None:
        handlers[id(logging.lastResort)] = logging.lastResort
    # A handler without a stream prints nothing. That of torch's traces finds out on its first record that nobody wants
    # them; kept from it, torch composes a record for every comparison of sizes.
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
