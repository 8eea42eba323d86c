"""How the CPU's kernels lay out results, where torch's fake tensors say otherwise.

What comes next copies its operand or does not, by how that lies in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memfit.kernels.registration import Operator


def is_last(tensor: torch.Tensor) -> bool:
    """Return whether a batch of images has its channels last."""
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)


def laid_out_as(tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Lay a result out with channels last where a tensor has them so and not densely, else densely.

    Source: ``suggest_memory_format`` in c10/core/TensorImpl.h.
    """
    is_turned = is_last(tensor) and not tensor.is_contiguous()
    wanted = torch.channels_last if is_turned else torch.contiguous_format
    if result.is_contiguous(memory_format=wanted):
        return result
    return torch.empty_like(result, memory_format=wanted)


def _as_suggested(*, self: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return laid_out_as(self, out)


def _rolled(*, self: torch.Tensor, dims: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """Join two parts by ``cat``, where one dimension is rolled; others are left to torch.

    Source: ``roll`` in aten/src/ATen/native/TensorTransformations.cpp, torch 2.13.
    """
    return laid_out_as(self, out) if len(dims) == 1 else out


def _dense(*, out: Any) -> Any:
    """Lay all results out densely.

    Source: ``log_sigmoid_forward_cpu`` in aten/src/ATen/native/Activation.cpp, torch 2.13.
    """
    return tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in out)


OPERATORS: Mapping[str, Operator] = {
    **dict.fromkeys(
        ("channel_shuffle", "reflection_pad2d_backward", "replication_pad2d_backward"),
        Operator(fake=_as_suggested),
    ),
    "log_sigmoid_forward": Operator(fake=_dense),
    "roll": Operator(fake=_rolled),
}
