"""Fake versions of operators where torch has none, needs values, or lays results out otherwise.

How a result lies in memory decides whether what comes next copies it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from memfit.kernels.registration import Operator, Operators
from memfit.virtual.known_values import value_of


def _values_of(tensor: object) -> list[int] | None:
    """Return the values of a tensor of whole numbers where they are known."""
    constant = tensor.constant if isinstance(tensor, FakeTensor) else tensor
    constant = value_of(tensor) if constant is None else constant
    if not isinstance(constant, torch.Tensor) or isinstance(constant, FakeTensor):
        return None
    with no_dispatch():
        values: list[int] = constant.tolist()
    return values


def _pack(
    *,
    input: torch.Tensor,  # noqa: A002 - its name in torch's schema
    lengths: torch.Tensor,
    batch_first: bool,
) -> Any:
    """Lay padded sequences out as ``pack_padded_sequence`` does, where their lengths are known."""
    known = _values_of(lengths)
    if known is None:
        return NotImplemented
    batch_sizes = [sum(length > step for length in known) for step in range(max(known))]
    rows = (input.transpose(0, 1) if batch_first else input).reshape(-1, *input.shape[2:])
    return rows[: sum(known)].clone(), torch.tensor(batch_sizes)


def _align(
    *, log_probs: torch.Tensor, targets: torch.Tensor, target_lengths: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the CTC losses and the table of probabilities, as wide as the longest target.

    Where lengths are unknown, the bound is what the targets have room for. Source:
    ``ctc_loss_allocate_outputs`` in aten/src/ATen/native/LossCTC.cpp.
    """
    num_rows = log_probs.shape[1] if log_probs.dim() > 2 else 1
    known = _values_of(target_lengths) if isinstance(target_lengths, torch.Tensor) else None
    lengths = list(target_lengths) if isinstance(target_lengths, (list, tuple)) else known
    longest = max(lengths) if lengths else targets.shape[-1]
    losses = log_probs.new_empty(num_rows)
    return losses, log_probs.new_empty(num_rows, log_probs.shape[0], 2 * longest + 1)


def _align_back(*, log_probs: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the CTC losses."""
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _dense_gradient(*, out: Any) -> Any:
    """Lay the first result out densely, whatever gradient or input comes in.

    Source: ``layer_norm_backward_cpu`` and its twin for CUDA, SoftMax.cpp, Loss.cpp and
    GatedLinearUnit.cpp in aten/src/ATen/native, torch 2.13, which ask for contiguous memory.
    """
    first, *others = out if isinstance(out, tuple) else (out,)
    if first is not None and not first.is_contiguous():
        first = torch.empty_like(first, memory_format=torch.contiguous_format)
    return (first, *others) if isinstance(out, tuple) else first


def _gradient_beside(*, grad_output: torch.Tensor, self: torch.Tensor) -> torch.Tensor:
    """Lay the result out as every operator on two tensors does that asks for nothing else.

    Torch's own fake computes it in several steps, whose last may follow the other tensor. Source:
    ``TensorIterator::borrowing_binary_op(grad_input, grad_output, self)`` in Activation.cpp.
    """
    return torch.add(grad_output, self)


def _gradient_beside_either(
    *, grad_output: torch.Tensor, self_or_result: torch.Tensor
) -> torch.Tensor:
    return torch.add(grad_output, self_or_result)


OWN_FAKES = Operators(
    {
        **dict.fromkeys(
            (
                "_log_softmax_backward_data",
                "glu_backward",
                "mse_loss_backward",
                "native_layer_norm_backward",
                "smooth_l1_loss_backward",
            ),
            Operator(fake=_dense_gradient),
        ),
        **dict.fromkeys(
            (
                "hardsigmoid_backward",
                "hardswish_backward",
                "hardtanh_backward",
                "softplus_backward",
            ),
            Operator(fake=_gradient_beside),
        ),
        "elu_backward": Operator(fake=_gradient_beside_either),
        "_pack_padded_sequence": Operator(fake=_pack),
        "_ctc_loss": Operator(fake=_align),
        "_ctc_loss_backward": Operator(fake=_align_back),
    }
)
