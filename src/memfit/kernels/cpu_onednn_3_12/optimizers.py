"""What bitsandbytes' optimizers take and give back inside one update on the CPU.

Its CPU kernels are written with torch's own operators, out of dispatch's sight: states, gradient
and update pass through fp32 arrays as large as the parameter. The rules count, in values, what is
alive at the fullest moment (``_optimizer_update_8bit_blockwise_cpu`` and
``_optimizer_update_32bit_cpu`` in backends/cpu/ops.py, bitsandbytes 0.50.2) and agree with the
allocator's events but for a few bytes of single numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.kernels.registration import Operator
from memfit.kernels.rounding import ceil_div

_FP32 = 4
_BLOCK_VALUES = 256


def _eight_bit_update(*, g: torch.Tensor, state2: torch.Tensor | None) -> int:
    """States, scaled gradient, then for Adam the root and the denominator made of it."""
    num_values = g.numel()
    if state2 is not None:
        return _FP32 * num_values * (5 + _is_copied(g))
    # The fullest moment comes last: the state in 8 bits again, with the scales of its blocks.
    scales = _FP32 * ceil_div(num_values, _BLOCK_VALUES)
    return _FP32 * num_values * (2 + _is_copied(g)) + num_values + scales


def _thirty_two_bit_update(
    *, g: torch.Tensor, state2: torch.Tensor | None, weight_decay: float
) -> int:
    """Scaled gradient, then for Adam the denominator and what it divides or is made of."""
    num_values = g.numel()
    if state2 is not None:
        return _FP32 * num_values * (3 + _is_copied(g))
    return _FP32 * num_values * (1 + _is_copied(g) + (weight_decay > 0))


def _is_copied(tensor: torch.Tensor) -> bool:
    """Return whether parameter and gradient need copies in fp32."""
    return tensor.dtype is not torch.float32


OPERATORS: Mapping[str, Operator] = {
    "bitsandbytes.optimizer_update_8bit_blockwise": Operator(scratch=_eight_bit_update),
    "bitsandbytes.optimizer_update_32bit": Operator(scratch=_thirty_two_bit_update),
}
