"""Which convolutions oneDNN's kernels for AVX2 take.

Source: the functions named ``init_conf`` and ``init_jcp`` in src/cpu/x64 of oneDNN 3.12
(``jit_avx2_conv_kernel_f32.cpp``, ``jit_avx2_1x1_conv_kernel_f32.cpp``,
``jit_uni_1x1_conv_utils.hpp``, ``jit_uni_dw_conv_kernel_utils.cpp``, ``jit_brdgmm_dw_conv.cpp``,
``jit_brgemm_conv_bwd.cpp``, ``jit_brgemm_conv_bwd_utils.cpp``).

Limits: images, weights and results of 2 GiB or more, which none of them takes, are not looked for.
"""

from __future__ import annotations

from collections.abc import Iterator

from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution

BLOCK = 8
"""Channels of a block of oneDNN's layouts."""

VOLUME_DIMS = 3

_REGISTERS = 15
_POSITIONS, _DEPTHWISE_POSITIONS = 3, 4
_MOST_JOINED_BLOCKS = 4
_UNCERTAIN_BLOCKS = (7, 8)
_LEAST_SLACK, _MOST_SLACK = 1.06, 1.25
_LARGE_ROW = 7
_LONGEST_ROW = 13
_LONGEST_DEPTHWISE_ROW = 3
_LONGEST_SHORT_ROW = 3
_FLAT_GRADIENT = 3


def is_direct(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether the direct kernel computes the result."""
    is_large = shape.kernel[-1] > _LARGE_ROW and (
        any(shape.padding[-2:]) and max(shape.stride[-2:]) > 1
    )
    if is_large or not _is_covered(shape):
        return False
    return _fills_blocks(shape, flat=range(1, BLOCK), is_last=is_last) and _fits_rows(shape)


def is_direct_gradient(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether the direct kernel computes the image's gradient."""
    both = any(
        min(stride, dilation) > 1
        for stride, dilation in zip(shape.stride, shape.dilation, strict=True)
    )
    is_narrow = shape.in_per_group < BLOCK and shape.kernel[-1] > _LONGEST_SHORT_ROW
    if both or (is_narrow and shape.stride[-1] > 1) or not _is_covered(shape):
        return False
    if shape.stride[-1] != shape.stride[-2] or max((1, *shape.stride[:-2])) > 1:
        return False
    return _fills_blocks(shape, is_last=is_last) and _has_whole_tails(shape)


def is_direct_weight(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether the direct kernel computes the weight's gradient."""
    if shape.is_dilated or shape.kernel[-1] > _LONGEST_ROW or not _is_covered(shape):
        return False
    depths = [*shape.padding[:-2], *shape.padding_after[:-2]]
    if max(depths, default=0) > 0 or any(
        kernel > image for kernel, image in zip(shape.kernel[:-1], shape.image[:-1], strict=True)
    ):
        return False
    return _fills_blocks(shape, flat=(_FLAT_GRADIENT,), is_last=is_last)


def is_flat(shape: Convolution) -> bool:
    """Return whether an image is too narrow for blocks, and is read as it is."""
    return shape.num_in < BLOCK


def is_flat_weight(shape: Convolution) -> bool:
    """Return whether an image of colors is read as it is for the weight's gradient."""
    return shape.num_in == _FLAT_GRADIENT


def is_pointwise(shape: Convolution) -> bool:
    """Return whether the pointwise kernel takes a convolution; of volumes, without strides."""
    if shape.groups > 1 or not shape.is_pointwise:
        return False
    return shape.is_aligned and (len(shape.kernel) < 3 or not shape.is_strided)


def is_depthwise(shape: Convolution) -> bool:
    """Return whether the depthwise kernel computes the result."""
    if not shape.is_depthwise or not _is_covered(shape):
        return False
    unrolled = min(_DEPTHWISE_POSITIONS, shape.result[-1])
    return max(shape.padding[-1], _left_over(shape, unrolled)) <= unrolled


def is_depthwise_product(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether products of channels compute the result, which want them last."""
    if not _is_channelwise(shape) or shape.is_dilated:
        return False
    return is_last or len(shape.kernel) == VOLUME_DIMS


def is_product(shape: Convolution) -> bool:
    """Return whether matrix products take a convolution without strides, channels last."""
    return not _is_channelwise(shape)


def is_product_gradient(shape: Convolution) -> bool:
    """Return whether the image's gradient is such a convolution, with no padding below zero."""
    return is_product(shape) and not shape.is_strided and _is_covered(shape)


def _is_channelwise(shape: Convolution) -> bool:
    """Return whether each channel is convolved alone, in volumes too."""
    return 1 < shape.groups == shape.num_in == shape.num_out


def is_depthwise_gradient(shape: Convolution) -> bool:
    """Return whether the depthwise kernel computes the image's gradient."""
    return shape.is_depthwise and not shape.is_dilated


def is_depthwise_weight(shape: Convolution) -> bool:
    """Return whether the depthwise kernel computes the weight's gradient."""
    is_short = shape.stride[-1] <= shape.kernel[-1] <= _LONGEST_DEPTHWISE_ROW
    if not shape.is_depthwise or shape.is_dilated or not is_short:
        return False
    height, stride = shape.kernel[-2], shape.stride[-2]
    rows = (shape.padding[-2], max(0, shape.padding_after[-2]))
    return (
        all(
            max(before, after) <= kernel // 2
            for before, after, kernel in zip(
                shape.padding, shape.padding_after, shape.kernel, strict=True
            )
        )
        and shape.image[-2] >= height + -shape.padding[-2] % stride
        and all(each <= 1 or each % stride == 0 for each in rows)
    )


def is_strided_gradient(shape: Convolution) -> bool:
    """Return whether matrix products compute the image's gradient, with strides alone."""
    is_narrow = shape.groups > 1 and shape.out_per_group <= BLOCK
    return shape.is_strided and not shape.is_dilated and not is_narrow


def joined_block(num_channels: int) -> int:
    """Return the channels of a weight's block for products: up to four blocks, well filled.

    Of many channels oneDNN joins two to four blocks, by what it knows of caches; the hungriest of
    the ways that leave little empty is taken.
    """
    blocks = -(-num_channels // BLOCK)
    if blocks <= _MOST_JOINED_BLOCKS:
        return blocks * BLOCK
    padded = {joined: -(-blocks // joined) * joined for joined in (4, 3, 2)}
    slack = _LEAST_SLACK if blocks % _MOST_JOINED_BLOCKS == 0 else _MOST_SLACK
    if blocks > max(_UNCERTAIN_BLOCKS):
        close = [each for each in padded if padded[each] <= slack * blocks]
        return BLOCK * max(close, key=lambda joined: padded[joined])
    return BLOCK * min((4, 3), key=lambda joined: padded[joined])


def product_block(shape: Convolution, num_channels: int) -> int:
    """Return the same for kernels without strides.

    Of 7 or 8 blocks oneDNN joins three or four, by what it knows of caches; the hungrier is taken.
    """
    if not shape.is_pointwise and -(-num_channels // BLOCK) in _UNCERTAIN_BLOCKS:
        return 3 * BLOCK
    return joined_block(num_channels)


def _fills_blocks(shape: Convolution, flat: range | tuple[int, ...] = (), *, is_last: bool) -> bool:
    """Return whether the channels of each group fill blocks; those without groups are padded.

    Channels that are last need no blocks, but images so narrow that they are read as they are have
    to be narrow in all groups together too.
    """
    if shape.groups == 1:
        return True
    if is_last:
        return (shape.in_per_group in flat) == (shape.num_in in flat)
    if shape.out_per_group % BLOCK:
        return False
    return shape.in_per_group % BLOCK == 0 or shape.num_in in flat


def _is_covered(shape: Convolution) -> bool:
    """Return whether the kernel reaches the image from wherever it stands."""
    return all(
        max(before, after) < reach
        for before, after, reach in zip(
            shape.padding, shape.padding_after, shape.reach, strict=True
        )
    )


def _left_over(shape: Convolution, unrolled: int) -> int:
    """Return the padding that a row needs at its end, without the positions left over."""
    whole = shape.result[-1] - shape.result[-1] % unrolled
    last = (whole - 1) * shape.stride[-1] + shape.reach[-1]
    return max(0, last - shape.image[-1] - shape.padding[-1])


def _fits_rows(shape: Convolution) -> bool:
    """Return whether the positions that are computed at once reach over the padding."""
    row = shape.result[-1]
    unrolled = min(_POSITIONS, row)
    if shape.padding[-1] > unrolled:
        return False
    after = _left_over(shape, unrolled)
    if after <= unrolled * shape.stride[-1] or row // unrolled <= 1:
        return True
    unrolled = min(after // shape.stride[-1] + row % unrolled, row, _REGISTERS // 2)
    return unrolled >= max(shape.padding[-1], _left_over(shape, unrolled))


def _has_whole_tails(shape: Convolution) -> bool:
    """Return whether registers hold what a row of the image's gradient needs at its ends."""
    stride, row, reach = shape.stride[-1], shape.image[-1], shape.reach[-1]
    found = list(_unrollings(shape))
    if not found:
        return False
    best = max(found, key=lambda each: each[:2])
    unrolled = best[1]
    tail, after = row % unrolled, shape.padding_after[-1]
    overflow = max(0, int((reach - 1 - after - tail) / stride))
    if overflow * stride > unrolled:
        return False
    return row <= unrolled or (unrolled % stride == 0 and after + tail >= 0)


def _unrollings(shape: Convolution) -> Iterator[tuple[int, int]]:
    """Yield how many products each way to unroll a row has, and how many positions."""
    stride, row = shape.stride[-1], shape.image[-1]
    overflow = max(0, shape.reach[-1] - 1 - shape.padding[-1]) // stride
    blocks = -(-shape.in_per_group // BLOCK)
    for joined in range(1, 5):
        if blocks % joined:
            continue
        positions = stride
        while positions * joined + positions // stride <= _REGISTERS and positions < row + stride:
            unrolled = min(positions, row)
            if overflow * stride <= unrolled or unrolled == row:
                yield -(-unrolled // stride) * joined, unrolled
            positions += stride
