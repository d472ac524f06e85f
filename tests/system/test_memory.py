"""What a process keeps that nobody uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from quark_fx.system.memory import is_shortage

_PRODUCTS = """
import sys, torch
from quark_fx.system.memory import give_back_at_once, occupied
if "short" in sys.argv:
    give_back_at_once()
weight, before = torch.rand(256, 256, dtype=torch.bfloat16), occupied()
for rows in range(1, 401):
    torch.rand(rows, 256, dtype=torch.bfloat16) @ weight
print(occupied() - before >> 20)
"""


def kept(*arguments: str) -> int:
    """Return the MiB that products of 400 shapes leave in a process of their own."""
    command = [sys.executable, "-c", _PRODUCTS, *arguments]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_kernels_of_shapes_that_do_not_come_again_are_dropped_where_memory_is_short() -> None:
    if (usually := kept()) < 100:
        pytest.skip("no kernels are generated for these products here")
    assert kept("short") < usually / 3


def test_a_shortage_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as short:
        torch.empty(1 << 50, dtype=torch.uint8)
    with pytest.raises(RuntimeError) as other:
        torch.zeros(2, 3) @ torch.zeros(2, 3)
    assert is_shortage(short.value)
    assert is_shortage(torch.OutOfMemoryError())
    assert is_shortage(MemoryError())
    assert not is_shortage(other.value)
