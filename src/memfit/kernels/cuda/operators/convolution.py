"""Memory of CUDA convolutions: which kernel torch picks, the copies it makes, and the workspace.

Torch's own kernels are followed exactly. cuDNN's workspace is not computable: cuDNN picks an
engine by heuristics of its own. What is most likely follows from how engines work, never from a
fit to measured models: tensor cores read channels last, so other layouts are turned around inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import torch

from memfit.figures import Certainty
from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.operators.reductions import reduction_blocks
from memfit.kernels.registration import Operator
from memfit.kernels.scratch import Moment, Scratch, highest
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes
from memfit.units import KIB, MIB

_CHOICE = "use_cudnn, use_cudnn_depthwise in aten/src/ATen/native/Convolution.cpp"
_SLOW = "aten/src/ATen/native/cuda/ConvolutionMM2d.cu"
_WORKSPACE = "run_single_conv in aten/src/ATen/native/cudnn/Conv_v8.cpp; cuDNN's engines"
_VECTOR_BYTES = 16
_SINGLE_BYTES = 4
_MEASURED_CAPABILITY = (9, 0)
_PIXELS_READ = 4
_MOST_PARTS = 14
_TILES_BYTES = 132 * 64 * KIB
_SHORTEST_SUM = 2000
_FEW_CHANNELS = 4
_FEWEST_TF32_CHANNELS = 32
_MANY_TF32_CHANNELS = 98
_FEWEST_CUDNN_DEPTHWISE = 32
# Winograd on 4 x 4 outputs of a 3 x 3 kernel: tiles of 6 x 6, so (6/4)^2 and (6/3)^2 the elements.
_WINOGRAD_IMAGE, _WINOGRAD_WEIGHT = 2.25, 4
# Winograd on 2 x 2 outputs turns 3 x 3 weights into 4 x 4.
_FUSED_WINOGRAD_WEIGHT = 16 / 9


class Kernel(StrEnum):
    """Name who computes a convolution."""

    CUDNN = "cudnn"
    DEPTHWISE = "depthwise"
    """Torch's own kernel for one input channel per group; it takes nothing inside."""
    UNFOLDED = "unfolded"
    """Torch's own matrix product over an image unfolded into columns, one image at a time."""


class Pass(StrEnum):
    """Name what a convolution computes."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input gradient"
    WEIGHT_GRADIENT = "weight gradient"


_TURNED_AROUND = {
    Pass.FORWARD: Pass.INPUT_GRADIENT,
    Pass.INPUT_GRADIENT: Pass.FORWARD,
    Pass.WEIGHT_GRADIENT: Pass.WEIGHT_GRADIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One convolution: image (N, C, ...), weight, result (N, K, ...) or its gradient, settings."""

    image: torch.Tensor
    weight: torch.Tensor
    result: torch.Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    groups: int

    @classmethod
    def of(cls, result: torch.Tensor, arguments: Mapping[str, Any]) -> Self:
        """Read a convolution, or its backward, off its arguments."""
        return cls(
            image=arguments["input"],
            weight=arguments["weight"],
            result=result,
            stride=arguments["stride"],
            padding=arguments["padding"],
            dilation=arguments["dilation"],
            is_transposed=arguments["transposed"],
            groups=arguments["groups"],
        )

    @property
    def kernel_size(self) -> tuple[int, ...]:
        """Return the extents of the kernel."""
        return tuple(self.weight.shape[2:])

    @property
    def memory_format(self) -> torch.memory_format:
        """Return the layout cuDNN is handed: channels last if image or weight is laid out so."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        last = formats.get(self.image.dim())
        if last is not None and any(_is_only(t, last) for t in (self.image, self.weight)):
            return last
        return torch.contiguous_format

    @property
    def is_depthwise(self) -> bool:
        """Return whether each group has one input channel (is_depthwise)."""
        channels = int(self.image.shape[1])
        return (
            not self.is_transposed
            and self.image.dim() in (4, 5)
            and channels == self.groups > 1
            and int(self.weight.shape[0]) % channels == 0
        )

    @property
    def column_bytes(self) -> int:
        """Return the bytes of one image of one group unfolded: a column per position."""
        spread = self.image if self.is_transposed else self.result
        rows = int(self.weight.shape[1]) * math.prod(self.kernel_size)
        return rows * math.prod(spread.shape[2:]) * self.image.element_size()

    @property
    def needs_columns(self) -> bool:
        """Return whether forward unfolds: an image is its own columns for a plain 1 x 1 kernel."""
        settings = (*self.kernel_size, *self.stride, *self.dilation)
        return self.is_transposed or any(s != 1 for s in settings) or any(self.padding)

    def kernel(self, card: Card) -> Kernel:
        """Say who computes it on a card.

        cuDNN is used for everything except: bf16 below compute capability 8.0 (so on T4 and V100),
        and one channel per group in plain layout unless it is fp16, with 32 channels or more.

        Source: ``use_cudnn``, ``use_cudnn_depthwise`` in aten/src/ATen/native/Convolution.cpp and
        ``supportsBFloat16ConvolutionWithCuDNNv8`` in aten/src/ATen/cuda/detail/CUDAHooks.cpp, main
        branch, read 2026-11-21. Of fp16's further conditions on sizes none is followed: both
        kernels take next to nothing.
        """
        is_bf16 = torch.bfloat16 in (self.image.dtype, self.weight.dtype)
        has_cudnn = not is_bf16 or card.capability[0] >= 8
        if self.is_depthwise:
            is_plain = self.memory_format == torch.contiguous_format
            return Kernel.DEPTHWISE if is_plain and not self._suits_cudnn() else Kernel.CUDNN
        return Kernel.CUDNN if has_cudnn else Kernel.UNFOLDED

    def _suits_cudnn(self) -> bool:
        return (
            self.image.dtype == self.weight.dtype == torch.float16
            and self.image.dim() == 4
            and all(d == 1 for d in self.dilation)
            and int(self.image.shape[1]) >= _FEWEST_CUDNN_DEPTHWISE
        )


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


def workspace_bytes(conv: Convolution, which: Pass, card: Card) -> tuple[int, int]:
    """Return the most likely workspace of cuDNN and a high one; both are guesses, the low end is 0.

    With tensor cores (fp16, bf16; fp32 as TF32 from compute capability 8.0): nothing for channels
    last, except for the gradient of weights, which is added up in fp32. In plain layout, what is
    read is turned to channels last, and a gradient of the input is turned back; from compute
    capability 9.0 on as ``_turned_workspace`` says, as measured. Before that it is taken that
    forward engines write plain layout themselves, and that kernels of 1 x 1, groups, and channels
    that do not fill 16 bytes have engines that read it.

    Without tensor cores: weights turned by Winograd for a 3 x 3 kernel of stride 1, a copy of the
    weights for their gradient, else nothing (implicit products keep a few indices).

    The high end is unfused Winograd, or every operand turned, twice. It is not a bound: with
    ``benchmark`` off torch takes the first engine of cuDNN's instant heuristics whose workspace
    can be allocated, however large (pytorch issues 49207 and 13412).

    Source: Conv_v8.cpp, main branch; cuDNN developer guide, algorithms and layouts of convolutions.
    """
    weight = num_bytes(conv.weight)
    summed = _summed_bytes(conv)
    turned = num_bytes(conv.image) + num_bytes(conv.result) + summed
    if conv.image.dtype == torch.float64:
        likely = 0
    elif _has_one_channel(conv) or not _has_tensor_cores(conv, card):
        likely = _plain_workspace(conv, which, weight)
    elif conv.memory_format != torch.contiguous_format:
        likely = summed if _is_turned(conv) and which is Pass.WEIGHT_GRADIENT else 0
    elif card.capability >= _MEASURED_CAPABILITY:
        likely = _turned_workspace(conv, which)
    elif not _is_turned(conv):
        likely = _plain_workspace(conv, which, weight)
    elif which is Pass.FORWARD:
        likely = num_bytes(conv.image) + weight
    else:
        likely = turned
    arrays = num_bytes(conv.image) + num_bytes(conv.result)
    winograd = _WINOGRAD_IMAGE * arrays + _WINOGRAD_WEIGHT * weight
    return likely, int(max(likely, 2 * turned, winograd if _suits_winograd(conv) else 0))


def _turned_workspace(conv: Convolution, which: Pass) -> int:
    """Return what tensor cores take for plain layout: operands turned to channels last.

    All three operands are turned, with channels filled up to 16 bytes, except:

    - 1 x 1 kernels are plain products. They take nothing, unless a stride or an odd number of
      pixels is in the way; the gradient of weights keeps a sum in fp32 for each image, or turns
      its operands where that takes less.
    - With fewer than 32 channels TF32 is not used.
    - Forward in half precision reads four channels or fewer as they are where the stride is 1.
    - Forward in TF32 writes plain layout itself for many channels and small weights.

    In TF32 long sums of the weights' gradient are split: a copy of it for each part, as many as
    there are multiprocessors for its tiles of 128 x 128, at most 14. In half precision some are
    split too, by up to 16 MiB, and none is counted.

    Source: 1,818 convolutions that benchmarks/record_workspaces.py ran on an H200 with cuDNN 9.19;
    the exceptions are seen there, and have no other source.
    """
    is_half = conv.image.element_size() < _SINGLE_BYTES
    if math.prod(conv.kernel_size) == 1 and not conv.is_transposed:
        return _product_workspace(conv, which)
    read, written = conv.image, conv.result
    if conv.is_transposed:
        # Torch has cuDNN compute forward as the gradient of an image, and that one as forward.
        read, written = written, read
        which = _TURNED_AROUND[which]
    channels, is_dense = int(read.shape[1]), conv.groups == 1
    if not is_half and is_dense and channels < _FEWEST_TF32_CHANNELS:
        return _plain_workspace(conv, which, num_bytes(conv.weight))
    turned = _filled(read) + _filled(written)
    if which is Pass.WEIGHT_GRADIENT:
        return turned + _summed_bytes(conv) + _split_bytes(conv)
    if which is Pass.INPUT_GRADIENT:
        return turned + _filled_weight(conv)
    if is_half and channels <= _FEW_CHANNELS and max(conv.stride) == 1:
        return 0
    writes_plain = (
        not is_half
        and is_dense
        and int(written.shape[1]) > _MANY_TF32_CHANNELS
        and num_bytes(conv.weight) <= MIB
    )
    return (_filled(read) if writes_plain else turned) + _filled_weight(conv)


def _split_bytes(conv: Convolution) -> int:
    """Return the bytes of the parts that a gradient of weights is summed in."""
    if conv.image.element_size() < _SINGLE_BYTES:
        return 0
    summed = _summed_bytes(conv)
    length = int(conv.result.shape[0]) * math.prod(conv.result.shape[2:])
    return min(_MOST_PARTS, _TILES_BYTES // summed, length // _SHORTEST_SUM) * summed


def _product_workspace(conv: Convolution, which: Pass) -> int:
    """Return what a 1 x 1 kernel takes, see ``_turned_workspace``."""
    num_pixels = math.prod(conv.image.shape[2:])
    is_product = max(conv.stride) == 1 and not any(conv.padding)
    if not is_product or (num_pixels > 1 and num_pixels % _PIXELS_READ):
        turned = _filled(conv.image) + _filled(conv.result)
        return turned + (_summed_bytes(conv) if which is Pass.WEIGHT_GRADIENT else 0)
    if which is not Pass.WEIGHT_GRADIENT:
        return 0
    if num_pixels % (_VECTOR_BYTES // conv.image.element_size()):
        return _filled(conv.image) + _filled(conv.result) if num_pixels > 1 else 0
    summed = conv.weight.numel() * _SINGLE_BYTES
    turned = _filled(conv.image) + _filled(conv.result) + summed
    return min(int(conv.image.shape[0]) * summed, turned)


def _summed_bytes(conv: Convolution) -> int:
    """Return the bytes of the weights in fp32 or more, as their gradient is added up."""
    return conv.weight.numel() * max(_SINGLE_BYTES, conv.weight.element_size())


def _filled(tensor: torch.Tensor, dims: Sequence[int] = (1,)) -> int:
    """Return the bytes of a tensor with the channels in some dimensions filled up to 16 bytes."""
    vector = _VECTOR_BYTES // tensor.element_size()
    sizes = [-(-n // vector) * vector if d in dims else n for d, n in enumerate(tensor.shape)]
    return math.prod(sizes) * tensor.element_size()


def _filled_weight(conv: Convolution) -> int:
    return _filled(conv.weight, dims=(0, 1))


def _plain_workspace(conv: Convolution, which: Pass, weight_bytes: int) -> int:
    if which is Pass.WEIGHT_GRADIENT:
        return weight_bytes
    return int(_FUSED_WINOGRAD_WEIGHT * weight_bytes) if _suits_winograd(conv) else 0


def _has_tensor_cores(conv: Convolution, card: Card) -> bool:
    if conv.image.dtype == torch.float32:
        return card.capability[0] >= 8 and card.allow_tf32
    return card.capability[0] >= 7


def _has_one_channel(conv: Convolution) -> bool:
    """Return whether each of several groups has one input channel, in any number of dimensions."""
    return conv.groups > 1 and not conv.is_transposed and int(conv.weight.shape[1]) == 1


def _is_turned(conv: Convolution) -> bool:
    """Return whether tensor cores are likely to be used through channels last.

    1 x 1 kernels are plain products, groups have engines of their own, and an image of three
    channels does not fill the 16 bytes that tensor cores read at once.
    """
    vector = _VECTOR_BYTES // conv.image.element_size()
    is_aligned = not (int(conv.image.shape[1]) % vector or int(conv.result.shape[1]) % vector)
    return conv.groups == 1 and math.prod(conv.kernel_size) > 1 and is_aligned


def _suits_winograd(conv: Convolution) -> bool:
    steps = (*conv.stride, *conv.dilation)
    return conv.kernel_size == (3, 3) and conv.groups == 1 and all(s == 1 for s in steps)


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


def _is_only(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    if tensor.dim() not in (4, 5) or tensor.is_contiguous():
        return False
    return tensor.is_contiguous(memory_format=layout)


OPERATORS: Mapping[str, Operator] = {
    "convolution": Operator(scratch=_forward),
    "convolution_backward": Operator(scratch=_backward),
}
