"""What cuDNN takes inside a convolution.

It is not computable: cuDNN picks an engine by heuristics of its own. What is most likely follows
from how engines work: tensor cores read channels last, so other layouts are turned around inside.
When they do was seen on convolutions that ran alone on a card, not on models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from memfit.kernels.cuda.card import Card
from memfit.kernels.cuda.convolution_choice import Convolution, Pass
from memfit.kernels.tensor_bytes import num_bytes
from memfit.units import KIB, MIB

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
# Winograd on 4 x 4 outputs of a 3 x 3 kernel: tiles of 6 x 6, so (6/4)^2 and (6/3)^2 the elements.
_WINOGRAD_IMAGE, _WINOGRAD_WEIGHT = 2.25, 4
# Winograd on 2 x 2 outputs turns 3 x 3 weights into 4 x 4.
_FUSED_WINOGRAD_WEIGHT = 16 / 9
_TURNED_AROUND = {
    Pass.FORWARD: Pass.INPUT_GRADIENT,
    Pass.INPUT_GRADIENT: Pass.FORWARD,
    Pass.WEIGHT_GRADIENT: Pass.WEIGHT_GRADIENT,
}


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
