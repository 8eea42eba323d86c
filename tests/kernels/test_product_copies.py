"""Operands of matrix products that BLAS cannot read where they lie are copied, to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.rules import cpu_scratch_bytes, taken_bytes
from torch import Tensor

ATEN = torch.ops.aten
BATCHES = [(), (3,)]
SIZES = [(6, 7, 8), (20, 20, 1), (1, 30, 40), (19, 21, 1), (64, 70, 80), (1, 1, 500)]


def layouts(batch: tuple[int, ...], num_rows: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    shape = (*batch, num_rows, width)
    wide = torch.ones(*batch, num_rows, 2 * width, dtype=dtype)
    return [
        torch.ones(shape, dtype=dtype),
        torch.ones(*batch, width, num_rows, dtype=dtype).mT,
        torch.ones((), dtype=dtype).expand(shape),
        torch.ones(num_rows, 1, dtype=dtype).expand(shape),
        wide[..., ::2],
        wide[..., :width],
    ]


def products(
    batch: tuple[int, ...], sizes: tuple[int, int, int], dtype: torch.dtype
) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    num_rows, depth, width = sizes
    added = torch.ones(*batch, num_rows, width, dtype=dtype)
    plain, with_sum = ("bmm", "baddbmm") if batch else ("mm", "addmm")
    for left in layouts(batch, num_rows, depth, dtype):
        for right in layouts(batch, depth, width, dtype):
            yield plain, (left, right)
            yield with_sum, (added, left, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("batch", BATCHES, ids=str)
def test_copies_of_operands_are_predicted_to_the_byte(batch, sizes, dtype):
    missed = []
    for name, arguments in products(batch, sizes, dtype):

        def call(name=name, arguments=arguments) -> object:
            return getattr(ATEN, name)(*arguments)

        predicted = cpu_scratch_bytes(name, *arguments, out=call())
        measured = taken_bytes(call)
        if predicted != measured:
            missed.append((name, [each.stride() for each in arguments], predicted, measured))
    assert missed == []
