"""Which of oneDNN's kernels serves a convolution under AVX-512, and in which layouts it wants it.

Every function gives the kernels that may serve, most often one. The order of choice is that of
src/cpu/cpu_convolution_list.cpp of oneDNN 3.x. Blocks have 16 channels. Which kernel serves which
convolution was read off oneDNN's own log (``ONEDNN_VERBOSE=profile_exec``) beside the allocator's
events, over some thousands of shapes (torch 2.13.0+cpu, oneDNN 3.12, 2026-11-21).

Limits: processors with AMX use other kernels below fp32. Of grouped convolutions that are not
depthwise, the hungriest kernel is taken.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memfit.kernels.cpu_onednn_3_12.convolutions import avx512_scratchpads as scratchpads
from memfit.kernels.cpu_onednn_3_12.convolutions.avx512_scratchpads import BLOCK
from memfit.kernels.cpu_onednn_3_12.convolutions.layouts import Layouts
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution

_FP32 = 4
_HALF = BLOCK // 2
_QUARTER = BLOCK // 4
_FLAT = 4
_LONGEST_KERNEL = 14
_LARGE_KERNEL = 7**3
_LONGEST_DEPTHWISE_KERNEL = 3


def forward_layouts(shape: Convolution, num_threads: int, *, is_last: bool) -> list[Layouts]:
    """List the kernels that may compute the result."""
    return (_last_forward if is_last else _first_forward)(shape, num_threads)


def data_layouts(
    shape: Convolution, num_threads: int, *, is_last: bool, has_bias: bool
) -> list[Layouts]:
    """List the kernels that may compute the image's gradient, or add a bias to it in a copy."""
    if is_last:
        found = _last_data(shape, num_threads)
        is_copied = has_bias and (shape.is_depthwise or not shape.is_even)
        copied_bytes = shape.image_bytes() if is_copied else 0
        return [each.with_more(copied_bytes) for each in found]
    found = _first_data(shape, num_threads)
    more = scratchpads.ALIGNMENT_BYTES
    return [each.with_more(each.image + more) if has_bias else each for each in found]


def weight_layouts(shape: Convolution, num_threads: int, *, is_last: bool) -> list[Layouts]:
    """List the kernels that may compute the weight's gradient."""
    return (_last_weight if is_last else _first_weight)(shape, num_threads)


# --- Channels first ---


def _first_forward(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the result."""
    bias = scratchpads.padded_bias_bytes(shape)
    if shape.is_one_product:
        return [_one_product(shape, scratchpads.product_bytes(num_threads))]
    if shape.is_depthwise:
        return [_depthwise(shape, bias)]
    if shape.groups > 1:
        return _grouped_forward(shape, num_threads, bias)
    if shape.is_pointwise and shape.is_aligned:
        return [_blocked(shape, bias + scratchpads.pointwise_bytes(shape, num_threads))]
    if not shape.is_usual:
        return [_columns(shape, num_threads)]
    if shape.num_in < BLOCK:
        return [_flat(shape, bias)]
    return [_blocked(shape, bias)]


def _first_data(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the image's gradient."""
    if shape.is_one_product:
        return [_one_product(shape, scratchpads.product_gradient_bytes(shape))]
    if shape.is_depthwise:
        return [_depthwise_data(shape, num_threads)]
    if shape.groups > 1:
        return _grouped_data(shape, num_threads)
    if shape.is_strided and not shape.is_dilated:
        found = [_strided(shape, num_threads)]
        return found if math.prod(shape.kernel) < _LARGE_KERNEL else [*found, _blocked(shape)]
    if shape.is_pointwise and shape.is_aligned:
        return [_blocked(shape, scratchpads.pointwise_gradient_bytes(shape, num_threads))]
    if shape.is_strided or not shape.is_usual:
        return [_data_columns(shape, num_threads)]
    return [_blocked(shape)]


def _first_weight(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the weight's gradient."""
    if shape.is_one_product:
        return [_one_product(shape, scratchpads.product_gradient_bytes(shape))]
    columns = _weight_columns(shape, num_threads)
    if shape.is_depthwise:
        if not _is_short(shape):
            return [columns]
        return [_depthwise(shape, scratchpads.depthwise_weight_bytes(shape, num_threads))]
    if shape.groups > 1:
        return _grouped_weight(shape, num_threads)
    if shape.is_pointwise and shape.is_aligned:
        return [_blocked(shape, scratchpads.pointwise_weight_bytes(shape, num_threads))]
    if shape.is_gapped:
        return [columns]
    found = _dense_weight(shape, num_threads)
    is_usual = max(shape.kernel) <= _LONGEST_KERNEL and all(
        before <= reach // 2 for before, reach in zip(shape.padding, shape.reach, strict=True)
    )
    if not _is_flat_enough(shape) or (shape.is_dilated and shape.reach[-2] > shape.image[-2]):
        return [columns]
    return found if is_usual else [*found, columns]


def _is_flat_enough(shape: Convolution) -> bool:
    """Return whether the kernels for the weight's gradient take the depth of an image, if any."""
    if len(shape.kernel) < 3:
        return True
    depth = shape.image[0] + shape.padding[0]
    is_short = shape.padding[0] == 0 or shape.kernel[0] < depth
    is_narrow = any(shape.padding) and _FLAT <= shape.num_in < BLOCK and shape.width == _FP32
    return is_short and not shape.is_dilated and not is_narrow


def _dense_weight(shape: Convolution, num_threads: int) -> list[Layouts]:
    """Choose by the width of the image: it is read as it is, in blocks of 8 or in blocks of 16."""
    if shape.num_in >= BLOCK:
        return [_blocked(shape, scratchpads.weight_bytes(shape, num_threads, block_in=BLOCK))]
    is_flat = shape.num_in < _FLAT if shape.width == _FP32 else shape.num_out % BLOCK == 0
    if is_flat:
        block_in = shape.num_in
        return [_flat(shape, scratchpads.weight_bytes(shape, num_threads, block_in=block_in))]
    if shape.is_dilated or shape.width < _FP32:
        return [_weight_columns(shape, num_threads)]
    return [_halves(shape, num_threads)]


# --- Groups ---


def _group_block(shape: Convolution) -> int:
    """Return the largest block that a group's channels fill; 0 if there is none."""
    for block in (BLOCK, _HALF, _QUARTER):
        if shape.in_per_group % block == 0 == shape.out_per_group % block:
            return block
    return 0


def _grouped_forward(shape: Convolution, num_threads: int, bias: int) -> list[Layouts]:
    if _group_block(shape) and shape.is_usual:
        return [_as_they_are(shape)]
    if len(shape.kernel) == 3 and shape.in_per_group == 1 and not shape.is_dilated:
        return [replace(_as_they_are(shape), num_returns=2)]
    narrow = Layouts(weight=shape.weight_bytes(_HALF), result=shape.result_bytes(), scratchpad=bias)
    return [narrow, _columns(shape, num_threads)]


def _depthwise_data(shape: Convolution, num_threads: int) -> Layouts:
    if shape.is_dilated or not shape.is_usual:
        return _data_columns(shape, num_threads)
    if shape.width < _FP32 and shape.is_strided:
        return _strided(shape, num_threads)
    return _depthwise(shape)


def _grouped_data(shape: Convolution, num_threads: int) -> list[Layouts]:
    block = _group_block(shape)
    columns = _data_columns(shape, num_threads)
    if shape.is_strided and not shape.is_dilated:
        is_wide = shape.out_per_group > (BLOCK if block else _HALF)
        if is_wide or (not block and shape.width < _FP32):
            return [_strided(shape, num_threads), columns]
    return [_as_they_are(shape) if block and shape.is_usual else columns]


def _grouped_weight(shape: Convolution, num_threads: int) -> list[Layouts]:
    columns = _weight_columns(shape, num_threads)
    block = _group_block(shape)
    if block < (_HALF if shape.width == _FP32 else BLOCK) or not shape.is_usual:
        return [columns]
    num_bytes = scratchpads.weight_bytes(shape, num_threads, block_in=block)
    return [_as_they_are(shape, num_bytes)]


# --- Kinds of kernels ---


def _blocked(shape: Convolution, scratchpad: int = 0) -> Layouts:
    """All tensors in blocks of 16 channels."""
    return Layouts(
        image=shape.image_bytes(BLOCK),
        weight=shape.weight_bytes(BLOCK, BLOCK),
        result=shape.result_bytes(BLOCK),
        scratchpad=scratchpad,
    )


def _flat(shape: Convolution, scratchpad: int) -> Layouts:
    """A narrow image is read as it is."""
    return Layouts(
        weight=shape.weight_bytes(BLOCK, _FP32 // shape.width),
        result=shape.result_bytes(BLOCK),
        scratchpad=scratchpad,
    )


def _halves(shape: Convolution, num_threads: int) -> Layouts:
    """AVX2's kernel, with blocks of 8 channels."""
    return Layouts(
        image=shape.image_bytes(_HALF),
        weight=shape.weight_bytes(_HALF, _HALF),
        result=shape.result_bytes(_HALF),
        scratchpad=scratchpads.narrow_weight_bytes(shape, num_threads),
    )


def _depthwise(shape: Convolution, scratchpad: int = 0) -> Layouts:
    """Each channel alone, 16 at a time."""
    return Layouts(
        image=shape.image_bytes(BLOCK),
        weight=shape.depthwise_weight_bytes(BLOCK),
        result=shape.result_bytes(BLOCK),
        scratchpad=scratchpad,
    )


def _as_they_are(shape: Convolution, scratchpad: int = 0) -> Layouts:
    """Blocks that the channels of each group fill."""
    return Layouts(
        image=shape.image_bytes(),
        weight=shape.weight_bytes(),
        result=shape.result_bytes(),
        scratchpad=scratchpad,
    )


def _wide_block(num_channels: int) -> int:
    """Bound the block of channels, which oneDNN joins from up to four of 16."""
    return BLOCK if num_channels <= BLOCK else 2 * BLOCK


def _strided(shape: Convolution, num_threads: int) -> Layouts:
    """The gradient of a strided kernel: channels are last, so both gradients are turned."""
    is_turned = shape.num_in > 1 and math.prod(shape.image) > 1
    is_result_turned = shape.num_out > 1 and math.prod(shape.result) > 1
    return Layouts(
        image=shape.image_bytes(),
        weight=shape.weight_bytes(_FP32 // shape.width, _wide_block(shape.in_per_group)),
        result=shape.result_bytes() if is_result_turned else 0,
        scratchpad=scratchpads.strided_gradient_bytes(shape, num_threads),
        num_returns=2 if is_turned else 1,
    )


def _one_product(shape: Convolution, scratchpad: int) -> Layouts:
    """One matrix product: image and weight have their channels last."""
    return Layouts(
        image=shape.image_bytes(),
        weight=shape.weight_bytes(),
        result=shape.result_bytes(),
        scratchpad=scratchpad,
        num_returns=2,
    )


def _columns(shape: Convolution, num_threads: int) -> Layouts:
    """The image unfolded into columns; the result in torch's layout, but copied all the same."""
    columns = scratchpads.column_bytes(shape, num_threads)
    return Layouts(result=shape.result_bytes(), scratchpad=columns)


def _data_columns(shape: Convolution, num_threads: int) -> Layouts:
    """The gradients of columns, folded back."""
    columns = scratchpads.column_bytes(shape, num_threads, is_gradient=True)
    return Layouts(image=shape.image_bytes(), scratchpad=columns)


def _weight_columns(shape: Convolution, num_threads: int) -> Layouts:
    """The weight's gradient from columns."""
    sums = scratchpads.column_weight_bytes(shape, num_threads)
    return Layouts(weight=shape.weight_bytes(), scratchpad=sums)


def _is_short(shape: Convolution) -> bool:
    """Return whether the depthwise kernel for the weight's gradient takes a kernel."""
    is_left_over = shape.is_pointwise and not shape.is_aligned
    return (
        max(shape.kernel) <= _LONGEST_DEPTHWISE_KERNEL
        and not shape.is_dilated
        and not (math.prod(shape.kernel) == 1 and shape.is_strided)
        and not is_left_over
    )


# --- Channels last: images and results are used as they are ---


def _last_forward(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the result, channels last."""
    if shape.is_one_product:
        return [Layouts(scratchpad=scratchpads.product_bytes(num_threads))]
    if shape.is_depthwise:
        bias = scratchpads.padded_bias_bytes(shape)
        return [Layouts(weight=shape.depthwise_weight_bytes(BLOCK), scratchpad=bias)]
    block_in = BLOCK if shape.groups > 1 else _FP32 // shape.width
    products = scratchpads.batched_product_bytes(shape, num_threads)
    block = _wide_block(shape.out_per_group)
    return [Layouts(weight=shape.weight_bytes(block, block_in), scratchpad=products)]


def _last_data(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the image's gradient, channels last."""
    is_in_fp32 = shape.width == _FP32
    if shape.is_depthwise and not shape.is_dilated and (is_in_fp32 or not shape.is_strided):
        return [Layouts(weight=shape.depthwise_weight_bytes(BLOCK))]
    block_out = BLOCK if shape.groups > 1 else _FP32 // shape.width
    weight = shape.weight_bytes(block_out, _wide_block(shape.in_per_group))
    if not shape.is_strided:
        products = scratchpads.batched_product_bytes(shape, num_threads)
        return [Layouts(weight=weight, scratchpad=products + scratchpads.ALIGNMENT_BYTES)]
    if shape.is_pointwise and shape.is_dilated:
        used = scratchpads.pointwise_gradient_bytes(shape, num_threads)
        return [Layouts(weight=shape.weight_bytes(BLOCK, BLOCK), scratchpad=used)]
    if shape.is_dilated:
        columns = scratchpads.column_bytes(shape, num_threads, is_gradient=True)
        return [Layouts(weight=shape.weight_bytes(), scratchpad=columns)]
    bordered = scratchpads.strided_gradient_bytes(shape, num_threads)
    return [Layouts(weight=weight, scratchpad=bordered)]


def _last_weight(shape: Convolution, num_threads: int) -> list[Layouts]:
    """List the kernels that may compute the weight's gradient, channels last."""
    if shape.is_depthwise and _is_short(shape):
        sums = scratchpads.depthwise_weight_bytes(shape, num_threads)
        return [Layouts(weight=shape.depthwise_weight_bytes(BLOCK), scratchpad=sums, num_returns=2)]
    if shape.is_pointwise and shape.groups == 1:
        block_in, sums = BLOCK, scratchpads.pointwise_weight_bytes(shape, num_threads, is_last=True)
    else:
        block_in = BLOCK if shape.groups > 1 or shape.num_in >= BLOCK else shape.num_in
        sums = scratchpads.weight_bytes(shape, num_threads, block_in=block_in, is_last=True)
    weight = shape.weight_bytes(BLOCK, block_in)
    if shape.is_dilated and shape.is_strided and not shape.is_pointwise:
        columns = scratchpads.column_weight_bytes(shape, num_threads)
        return [Layouts(weight=shape.weight_bytes(), scratchpad=columns, num_returns=3)]
    return [Layouts(weight=weight, scratchpad=sums, num_returns=2)]
