"""Memory of CUDA convolutions: the copies they make, columns, and cuDNN's workspace.

Torch's own kernels are followed exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.convolution_choice import Convolution, Kernel, Pass
from memfit.kernels.cuda.convolution_workspace import workspace_bytes
from memfit.kernels.cuda.operators.reductions import reduction_blocks
from memfit.kernels.registration import Operator
from memfit.kernels.scratch import Moment, Scratch, highest
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_CHOICE = "use_cudnn, use_cudnn_depthwise in aten/src/ATen/native/Convolution.cpp"
_SLOW = "aten/src/ATen/native/cuda/ConvolutionMM2d.cu"
_WORKSPACE = "run_single_conv in aten/src/ATen/native/cudnn/Conv_v8.cpp; cuDNN's engines"


def _forward(*, out: torch.Tensor, card: Card, **arguments: Any) -> Scratch:
    """Return copies into the kernel's layout, and cuDNN's workspace or the columns.

    A bias is added in place. Source: _convolution in aten/src/ATen/native/Convolution.cpp,
    cudnn_convolution in cudnn/ConvShared.cpp, ConvolutionMM2d.cu, main branch, read 2026-11-21.
    """
    conv = Convolution.of(out, arguments)
    kernel = conv.kernel(card)
    if kernel is Kernel.DEPTHWISE:
        return Scratch.exact(_CHOICE, copied_bytes(conv.image, conv.weight))
    if kernel is Kernel.UNFOLDED:
        return _unfolded_forward(conv)
    copies = copied_bytes(conv.image, conv.weight, memory_format=conv.memory_format)
    return _with_workspace(conv, [Pass.FORWARD], [Moment(blocks=copies)], card)


def _backward(
    *, grad_output: torch.Tensor, output_mask: Sequence[bool], card: Card, **arguments: Any
) -> Scratch:
    """Return copies, then the highest of both gradients' workspaces and the sum for the bias.

    The gradient of the input comes first, and both workspaces are given back before the next.

    Source: convolution_backward in aten/src/ATen/native/Convolution.cpp, cudnn_convolution_backward
    in cudnn/ConvShared.cpp, ConvolutionMM2d.cu, main branch, read 2026-11-21.
    """
    conv = Convolution.of(grad_output, arguments)
    kernel = conv.kernel(card)
    plain = kernel is not Kernel.CUDNN
    layout = torch.contiguous_format if plain else conv.memory_format
    copies = copied_bytes(grad_output, conv.image, conv.weight, memory_format=layout)
    dims = [0, *range(2, grad_output.dim())]
    bias = reduction_blocks(grad_output, dims, card) if output_mask[2] else ()
    if kernel is Kernel.DEPTHWISE:
        return Scratch.exact(_CHOICE, (*copies, *bias))
    if kernel is Kernel.UNFOLDED:
        return _unfolded_backward(conv, output_mask, copies, bias)
    passes = [p for p, asked in zip(list(Pass)[1:], output_mask, strict=False) if asked]
    return _with_workspace(
        conv, passes, [Moment(blocks=copies), Moment(blocks=(*copies, *bias))], card
    )


def _with_workspace(
    conv: Convolution, passes: Iterable[Pass], moments: list[Moment], card: Card
) -> Scratch:
    """Add the workspace of each pass to the copies of the first moment, and take the highest."""
    copies = moments[0].blocks
    low = max(sum(moment.blocks) for moment in moments)
    high = low
    for which in passes:
        likely, highest_bytes = workspace_bytes(conv, which, card)
        moments = [*moments, Moment(blocks=(*copies, likely))]
        high = max(high, sum(copies) + highest_bytes)
    return Scratch.between(
        _WORKSPACE,
        highest(moments),
        low_bytes=low,
        high_bytes=high,
        certainty=Certainty.GUESS,
    )


def _unfolded_forward(conv: Convolution) -> Scratch:
    """Return columns of one image; with groups, slices, and results that are put together."""
    copies = copied_bytes(conv.image, conv.weight)
    columns = conv.column_bytes if conv.needs_columns else 0
    if conv.groups == 1:
        return _unfolded(conv, Moment(blocks=(*copies, columns)))
    result = num_bytes(conv.result)
    inside = (*copies, result, num_bytes(conv.image) // conv.groups, columns)
    return _unfolded(
        conv,
        Moment(blocks=inside, missing_output_bytes=result),
        Moment(blocks=(*copies, result)),
    )


def _unfolded_backward(
    conv: Convolution, mask: Sequence[bool], copies: tuple[int, ...], bias: tuple[int, ...]
) -> Scratch:
    """Return columns, kept from one gradient to the next and made for 1 x 1 kernels too."""
    columns = conv.column_bytes if mask[0] or mask[1] else 0
    if conv.groups == 1:
        return _unfolded(conv, Moment(blocks=(*copies, columns, *(bias if mask[0] else ()))))
    grads = (num_bytes(conv.image) if mask[0] else 0) + (num_bytes(conv.weight) if mask[1] else 0)
    sliced = (num_bytes(conv.image) + num_bytes(conv.result)) // conv.groups
    inside = Moment(blocks=(*copies, grads, sliced, columns), missing_output_bytes=grads)
    return _unfolded(conv, inside, Moment(blocks=(*copies, grads)))


def _unfolded(conv: Convolution, *moments: Moment) -> Scratch:
    blocks = highest(moments)
    is_plain = conv.image.dim() == 4 and conv.groups == 1 and not conv.is_transposed
    if is_plain and all(d == 1 for d in conv.dilation):
        return Scratch.exact(_SLOW, blocks)
    return Scratch.between(_SLOW, blocks, low_bytes=0, high_bytes=2 * sum(blocks))


OPERATORS: Mapping[str, Operator] = {
    "convolution": Operator(scratch=_forward),
    "convolution_backward": Operator(scratch=_backward),
}
