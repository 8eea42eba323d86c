"""What rules about CUDA kernels share: how they put their answer.

Kept apart from the rules so that each family of kernels can have its own file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from memfit.kernels.base import Scratch

EXACT = "exact"
TABLE = "table"
GUESS = "guess"

_INT_MAX = 2**31 - 1


def sure(source: str, blocks: Iterable[int] = ()) -> Scratch:
    """Make a figure that follows from the kernel's source alone."""
    asked = _asked_for(blocks)
    total = sum(asked)
    return Scratch(blocks=asked, low_bytes=total, high_bytes=total, certainty=EXACT, source=source)


def between(
    source: str,
    blocks: Iterable[int],
    *,
    low_bytes: int,
    high_bytes: int,
    certainty: str = TABLE,
) -> Scratch:
    """Make a figure with an interval, which is widened where it would leave the figure out."""
    asked = _asked_for(blocks)
    total = sum(asked)
    return Scratch(
        blocks=asked,
        low_bytes=min(low_bytes, total),
        high_bytes=max(high_bytes, total),
        certainty=certainty,
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What is alive inside an operator at one time.

    ``missing_output_bytes`` are outputs that the kernel has not asked for yet: they are counted
    with the operator from its start, so they leave room at this time.
    """

    blocks: tuple[int, ...]
    missing_output_bytes: int = 0

    def extra_blocks(self) -> tuple[int, ...]:
        """Return the requests on top of all outputs; those that fit in the room are left out."""
        room = self.missing_output_bytes
        extra = []
        for block in sorted(self.blocks):
            taken = min(room, block)
            room -= taken
            if block > taken:
                extra.append(block - taken)
        return tuple(extra)


def highest(moments: Iterable[Moment]) -> tuple[int, ...]:
    """Return the requests of the moment that needs most on top of the outputs."""
    return max((moment.extra_blocks() for moment in moments), key=sum, default=())


def num_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that is packed densely."""
    return tensor.numel() * tensor.element_size()


def copied_bytes(
    *tensors: torch.Tensor | None,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[int, ...]:
    """Return the copies that ``contiguous()`` makes: one for each tensor not laid out so."""
    return tuple(
        num_bytes(tensor)
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    )


def accumulate_width(dtype: torch.dtype) -> int:
    """Return the bytes of the type that CUDA kernels add up in: fp32 for 16-bit floats."""
    return max(4, dtype.itemsize) if dtype.is_floating_point else 8


def fits_32_bit(tensor: torch.Tensor) -> bool:
    """Return whether torch's iterator reaches every byte of a tensor with a 32-bit offset."""
    spans = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in spans)
    return (1 + last) * tensor.element_size() <= _INT_MAX and tensor.numel() <= _INT_MAX


def ceil_div(count: int, step: int) -> int:
    """Divide and round up."""
    return -(-count // step)


def last_power_of_two(count: int) -> int:
    """Return the largest power of two up to a count; 1 for nothing."""
    return 1 << (count.bit_length() - 1) if count > 0 else 1


def _asked_for(blocks: Iterable[int]) -> tuple[int, ...]:
    return tuple(block for block in blocks if block > 0)
