"""What bitsandbytes takes and gives back on the CPU while it packs a weight into 4 bits.

The kernel is written with torch's own operators, out of dispatch's sight (``quantize_4bit`` in
backends/default/ops.py, bitsandbytes 0.50.2). Its fullest moment agrees with the allocator's events
to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.kernels.registration import Operator

_FP32 = 4
_HALF_BYTES = {"nf4": 19, "fp4": 47}
"""Alive beside the outputs, in half bytes for each value: scaled values in fp32, their codes in
int32 and uint8 and what is shifted, or for fp4 the int64 codes before and after they are sorted."""


def _pack(
    *,
    A: torch.Tensor,  # noqa: N803 - its name in the operator's schema
    quant_type: str,
) -> int:
    num_values = A.numel()
    copy_bytes = 0 if A.dtype is torch.float32 else _FP32 * num_values
    return copy_bytes + (num_values + num_values % 2) * _HALF_BYTES[quant_type] // 2


OPERATORS: Mapping[str, Operator] = {"bitsandbytes.quantize_4bit": Operator(scratch=_pack)}
