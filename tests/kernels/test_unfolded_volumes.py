"""What torch's own 3-D convolutions take is predicted exactly, on any processor.

They serve fp64, single small volumes, and types that oneDNN does not have on a processor.
"""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rules import cpu_scratch_bytes, taken_bytes

ATEN = torch.ops.aten
KERNELS = ((3, 1, 1), (1, 1, 0), (1, 2, 0), (2, 2, 0), (1, 1, 1))
"""Kernel, stride and padding; the second has volumes that are their own columns."""
WANTED = ([True, True, True], [False, True, True], [True, False, False], [True, False, True])


@pytest.mark.parametrize(("kernel", "stride", "padding"), KERNELS)
@pytest.mark.parametrize(("batch", "groups"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_columns_are_those_of_the_whole_batch(kernel, stride, padding, batch, groups):
    for num_in, num_out in ((4, 6), (8, 4)):
        volume = torch.randn(batch, num_in, 7, 10, 9, dtype=torch.float64)
        sides = (kernel,) * 3
        weight = torch.randn(num_out, num_in // groups, *sides, dtype=torch.float64)
        bias = torch.randn(num_out, dtype=torch.float64)
        settings = ([stride] * 3, [padding] * 3, [1] * 3, False, [0] * 3, groups)
        forward = (volume, weight, bias, *settings)
        out = ATEN.convolution(*forward)
        taken = taken_bytes(lambda forward=forward: ATEN.convolution(*forward))
        assert cpu_scratch_bytes("convolution", *forward, out=out) == taken
        for wanted in WANTED:
            backward = (torch.randn_like(out), volume, weight, [num_out], *settings, wanted)
            taken = taken_bytes(lambda backward=backward: ATEN.convolution_backward(*backward))
            assert cpu_scratch_bytes("convolution_backward", *backward) == taken
