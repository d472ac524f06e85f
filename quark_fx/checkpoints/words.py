"""Functions that pack codes of up to 8 bits into the 32-bit words of checkpoints, and that unpack them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output channel, within a group of eight, that each nibble of a word holds."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack the last dimension into int32 words: code `i` starts at bit `i * bits`; the last word is padded with 0.

    Args:
        codes: Non-negative integers below `2 ** bits`, shape `(..., n)`.
        bits: Number of bits per code, from 1 to 8; a code may extend over two words.

    Returns:
        Words of shape `(..., ceil(n * bits / 32))`.
    """
    count = codes.shape[-1]
    words = -(-count * bits // 32)
    shifts = torch.arange(bits, device=codes.device)
    planes = ((codes.unsqueeze(-1).to(torch.uint8) >> shifts.to(torch.uint8)) & 1).flatten(-2)
    planes = nn.functional.pad(planes, (0, words * 32 - count * bits)).unflatten(-1, (words, 4, 8))
    weights = (1 << torch.arange(8, device=codes.device)).to(torch.uint8)
    packed: Tensor = (planes * weights).sum(-1, dtype=torch.uint8)
    return packed.view(torch.int32).squeeze(-1)


def pack_columns(codes: Tensor, bits: int) -> Tensor:
    """Pack the first dimension of a matrix like `pack`: from `(n, columns)` to `(ceil(n * bits / 32), columns)`."""
    return pack(codes.t().contiguous(), bits).t().contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Pack the last dimension, whose size is a multiple of 8, with 4 bits per code in the order of AWQ's kernels."""
    return pack(codes.unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2), 4)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` codes that `pack` put into the last dimension; uint8, shape `(..., count)`."""
    octets = words.contiguous().view(torch.uint8).unsqueeze(-1)
    if 8 % bits == 0:
        codes: Tensor = octets >> torch.arange(0, 8, bits, dtype=torch.uint8) & (1 << bits) - 1
        return codes.flatten(-2).narrow(-1, 0, count)
    planes = (octets >> torch.arange(8, dtype=torch.uint8) & 1).flatten(-2)
    places = planes[..., : count * bits].unflatten(-1, (count, bits))
    together: Tensor = (places << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)
    return together


def unpack_awq(words: Tensor) -> Tensor:
    """Return the codes that `pack_awq` put into the last dimension; uint8, eight per word."""
    nibbles = unpack(words, 4, 8 * words.shape[-1]).unflatten(-1, (-1, 8))
    ordered: Tensor = nibbles[..., sorted(range(8), key=_AWQ_ORDER.__getitem__)]
    return ordered.flatten(-2)


__all__ = ["pack", "pack_awq", "pack_columns", "unpack", "unpack_awq"]
