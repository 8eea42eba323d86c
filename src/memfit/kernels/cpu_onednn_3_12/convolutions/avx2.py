"""Which of oneDNN's kernels serves a convolution under AVX2, and in which layouts it wants it.

The order of choice is that of src/cpu/cpu_convolution_list.cpp of oneDNN 3.12. Blocks have 8
channels, and all is in fp32: torch computes everything else with kernels of its own there. Read off
oneDNN's own log (``ONEDNN_VERBOSE=profile_exec``) beside the allocator's events, over some hundreds
of shapes (torch 2.13.0+cpu, oneDNN 3.12, 2026-11-25), and equal to them in nearly all.

Limits: oneDNN weighs what it knows of caches for a few sizes of a weight's blocks and for large
strided kernels; there these rules lie up to a twentieth above it.
"""

from __future__ import annotations

import math

from memfit.kernels.cpu_onednn_3_12.convolutions import avx2_choice as choice
from memfit.kernels.cpu_onednn_3_12.convolutions import avx2_scratchpads as scratchpads
from memfit.kernels.cpu_onednn_3_12.convolutions import columns
from memfit.kernels.cpu_onednn_3_12.convolutions.avx2_choice import BLOCK
from memfit.kernels.cpu_onednn_3_12.convolutions.layouts import Layouts
from memfit.kernels.cpu_onednn_3_12.convolutions.shape import Convolution


def forward_layouts(shape: Convolution, num_threads: int, *, is_last: bool) -> list[Layouts]:
    """List the kernels that may compute the result."""
    found = (_last_forward if is_last else _first_forward)(shape, num_threads)
    return [_nested(shape, found)]


def data_layouts(
    shape: Convolution, num_threads: int, *, is_last: bool, has_bias: bool
) -> list[Layouts]:
    """List the kernels that may compute the image's gradient, or add a bias to it in a copy."""
    found = (_last_data if is_last else _first_data)(shape, num_threads)
    found = _nested(shape, found)
    if has_bias and _copies_biased(shape, is_last=is_last):
        copied_bytes = found.image or shape.image_bytes()
        found = found.with_more(scratchpads.booked_bytes(copied_bytes))
    return [found]


def weight_layouts(shape: Convolution, num_threads: int, *, is_last: bool) -> list[Layouts]:
    """List the kernels that may compute the weight's gradient."""
    found = (_last_weight if is_last else _first_weight)(shape, num_threads)
    return [_nested(shape, found)]


def _nested(shape: Convolution, found: Layouts) -> Layouts:
    """Add what a transposed convolution asks for around the convolution that it consists of."""
    if not shape.is_transposed or not found.scratchpad:
        return found
    return found.with_more(scratchpads.ALIGNMENT_BYTES)


def _copies_biased(shape: Convolution, *, is_last: bool) -> bool:
    """Return whether a kernel leaves a transposed convolution's bias to oneDNN's general one."""
    if choice.is_strided_gradient(shape):
        return not shape.is_aligned_image
    return not is_last or not choice.is_product_gradient(shape)


# --- Channels first ---


def _first_forward(shape: Convolution, num_threads: int) -> Layouts:
    if choice.is_depthwise_product(shape, is_last=False):
        # Each channel alone, channels last, so image and result are turned.
        return Layouts(
            image=shape.image_bytes(),
            weight=shape.depthwise_weight_bytes(BLOCK),
            result=shape.result_bytes(),
            num_returns=2,
        )
    if choice.is_depthwise(shape):
        return _depthwise(shape, scratchpads.depthwise_bias_bytes(shape))
    bias = scratchpads.padded_bias_bytes(shape)
    if choice.is_pointwise(shape):
        return _blocked(shape, scratchpads.pointwise_bytes(shape, num_threads, is_last=False))
    if choice.is_direct(shape, is_last=False):
        return _flat(shape, bias) if choice.is_flat(shape) else _blocked(shape, bias)
    unfolded = columns.forward_bytes(shape, num_threads)
    return Layouts(result=shape.result_bytes(), scratchpad=unfolded)


def _first_data(shape: Convolution, num_threads: int) -> Layouts:
    if choice.is_strided_gradient(shape):
        return _strided(shape, num_threads)
    if choice.is_depthwise_gradient(shape):
        return _depthwise(shape)
    if choice.is_pointwise(shape):
        used = scratchpads.pointwise_gradient_bytes(shape, num_threads, is_last=False)
        return _blocked(shape, used)
    if choice.is_direct_gradient(shape, is_last=False):
        return _blocked(shape)
    unfolded = columns.gradient_bytes(shape, num_threads)
    return Layouts(image=shape.image_bytes(), scratchpad=unfolded)


def _first_weight(shape: Convolution, num_threads: int) -> Layouts:
    if choice.is_depthwise_weight(shape):
        sums = scratchpads.depthwise_weight_bytes(shape, num_threads, is_last=False)
        return _depthwise(shape, sums)
    if choice.is_pointwise(shape):
        sums = scratchpads.pointwise_weight_bytes(shape, num_threads, is_last=False)
        return _blocked(shape, sums)
    if choice.is_direct_weight(shape, is_last=False):
        is_flat = choice.is_flat_weight(shape)
        block_in = shape.num_in if is_flat else BLOCK
        sums = scratchpads.direct_weight_bytes(shape, num_threads, block_in)
        return _flat(shape, sums) if is_flat else _blocked(shape, sums)
    unfolded = columns.weight_bytes(shape, num_threads)
    return Layouts(weight=shape.weight_bytes(), scratchpad=unfolded)


# --- Kinds of kernels ---


def _blocked(shape: Convolution, scratchpad: int = 0) -> Layouts:
    """All tensors in blocks of 8 channels."""
    return Layouts(
        image=shape.image_bytes(BLOCK),
        weight=shape.weight_bytes(BLOCK, BLOCK),
        result=shape.result_bytes(BLOCK),
        scratchpad=scratchpad,
    )


def _flat(shape: Convolution, scratchpad: int) -> Layouts:
    """A narrow image is read as it is."""
    return Layouts(
        weight=shape.weight_bytes(BLOCK), result=shape.result_bytes(BLOCK), scratchpad=scratchpad
    )


def _depthwise(shape: Convolution, scratchpad: int = 0) -> Layouts:
    """Each channel alone, 8 at a time."""
    return Layouts(
        image=shape.image_bytes(BLOCK),
        weight=shape.depthwise_weight_bytes(BLOCK),
        result=shape.result_bytes(BLOCK),
        scratchpad=scratchpad,
    )


def _strided(shape: Convolution, num_threads: int) -> Layouts:
    """The gradient of a strided kernel: channels are last, so both gradients are turned."""
    is_turned = shape.num_in > 1 and math.prod(shape.image) > 1
    is_result_turned = shape.num_out > 1 and math.prod(shape.result) > 1
    return Layouts(
        image=shape.image_bytes(),
        weight=shape.weight_bytes(1, choice.joined_block(shape.in_per_group)),
        result=shape.result_bytes() if is_result_turned else 0,
        scratchpad=scratchpads.strided_gradient_bytes(shape, num_threads),
        num_returns=2 if is_turned else 1,
    )


# --- Channels last: images and results are used as they are ---


def _last_forward(shape: Convolution, num_threads: int) -> Layouts:
    is_product = choice.is_depthwise_product(shape, is_last=True)
    if is_product or choice.is_depthwise(shape):
        return Layouts(weight=shape.depthwise_weight_bytes(BLOCK))
    if choice.is_product(shape):
        products = scratchpads.batched_product_bytes(shape, num_threads)
        block = choice.product_block(shape, shape.out_per_group)
        return Layouts(weight=shape.weight_bytes(block), scratchpad=products)
    if choice.is_direct(shape, is_last=True):
        return Layouts(weight=shape.weight_bytes(BLOCK))
    unfolded = columns.last_forward_bytes(shape, num_threads)
    return Layouts(weight=shape.weight_bytes(), scratchpad=unfolded)


def _last_data(shape: Convolution, num_threads: int) -> Layouts:
    if choice.is_strided_gradient(shape):
        weight = shape.weight_bytes(1, choice.joined_block(shape.in_per_group))
        bordered = scratchpads.strided_gradient_bytes(shape, num_threads)
        return Layouts(weight=weight, scratchpad=bordered)
    if choice.is_product_gradient(shape):
        products = scratchpads.batched_product_bytes(shape, num_threads)
        nested = 0 if shape.is_transposed else scratchpads.ALIGNMENT_BYTES
        weight = shape.weight_bytes(1, choice.product_block(shape, shape.in_per_group))
        return Layouts(weight=weight, scratchpad=products + nested)
    if choice.is_depthwise_gradient(shape):
        return Layouts(weight=shape.depthwise_weight_bytes(BLOCK))
    if choice.is_pointwise(shape):
        used = scratchpads.pointwise_gradient_bytes(shape, num_threads, is_last=True)
        return Layouts(weight=shape.weight_bytes(BLOCK, BLOCK), scratchpad=used)
    if choice.is_direct_gradient(shape, is_last=True):
        return Layouts(weight=shape.weight_bytes(BLOCK, BLOCK))
    unfolded = columns.last_gradient_bytes(shape, num_threads)
    return Layouts(weight=shape.weight_bytes(), scratchpad=unfolded)


def _last_weight(shape: Convolution, num_threads: int) -> Layouts:
    if choice.is_depthwise_weight(shape):
        sums = scratchpads.depthwise_weight_bytes(shape, num_threads, is_last=True)
        return Layouts(weight=shape.depthwise_weight_bytes(BLOCK), scratchpad=sums, num_returns=2)
    weight = shape.weight_bytes(BLOCK, BLOCK)
    if choice.is_pointwise(shape):
        sums = scratchpads.pointwise_weight_bytes(shape, num_threads, is_last=True)
        return Layouts(weight=weight, scratchpad=sums, num_returns=2)
    if choice.is_direct_weight(shape, is_last=True):
        block_in = shape.in_per_group if shape.in_per_group == 3 else BLOCK
        sums = scratchpads.direct_weight_bytes(shape, num_threads, block_in)
        weight = shape.weight_bytes(BLOCK, block_in)
        return Layouts(weight=weight, scratchpad=sums, num_returns=2)
    unfolded = columns.last_weight_bytes(shape, num_threads)
    return Layouts(
        weight=shape.weight_bytes(), scratchpad=unfolded, num_returns=3 if unfolded else 2
    )
