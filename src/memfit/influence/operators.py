"""Turns an operator's saved inputs and output gradient into per-sample gradients.

An operator that is read here is one whose gradient by a parameter is written down as a formula of
what the graph has saved. All others are left to backward passes. Whatever is read is proved on the
samples at hand before it is used.

Shape suffixes: B samples, T terms, C channels, G groups, K entries of a kernel's window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .factors import Factor, Lookup, Outer, dense, outer
from .layouts import Layout
from .uses import Use

Made = Callable[[Tensor, Layout], Factor | None]
"""``(output gradient, its layout) -> factors``; None where that layout cannot be."""


def read(use: Use) -> Made | None:
    """Take from a use's node what its per-sample gradient needs, before backward frees it.

    Returns:
        What makes the gradient once that of the output is known; None if this is no operator that
        is read, or not by this input.
    """
    if use.position < 0:
        return None
    reader = _READERS.get(use.kind)
    if reader is None:
        # A function of one's own may bring a reading: ``per_sample_factor(node, use)``.
        own = getattr(type(use.node), "_forward_cls", None)
        offered = getattr(own, "per_sample_factor", None)
        reader = None if offered is None else partial(offered, use.node)
    return None if reader is None else reader(use)


def _addmm(use: Use) -> Made | None:
    """Read ``beta bias + alpha inputs @ weight``."""
    if use.position == 0 and not use.is_transposed:
        return partial(_broadcast, shape=use.shape, scale=float(use.node._saved_beta))
    if use.position != 2:
        return None
    inputs, scale = use.node._saved_mat1.detach(), float(use.node._saved_alpha)
    return partial(_product, inputs=inputs, is_transposed=use.is_transposed, scale=scale)


def _mm(use: Use) -> Made | None:
    """Read ``inputs @ weight``."""
    if use.position != 1:
        return None
    inputs = use.node._saved_self.detach()
    return partial(_product, inputs=inputs, is_transposed=use.is_transposed)


def _product(
    grad: Tensor, layout: Layout, *, inputs: Tensor, is_transposed: bool, scale: float = 1.0
) -> Factor | None:
    """Make factors of a matrix product: inputs (B T, I) and output gradients (B T, O)."""
    if layout.dim != 0:
        return None
    inputs_BTI = layout.by_sample(inputs)
    grad_BTO = layout.by_sample(grad)
    if scale != 1.0:
        grad_BTO = grad_BTO * scale
    return outer(grad_BTO, inputs_BTI) if is_transposed else outer(inputs_BTI, grad_BTO)


def _embedding(use: Use) -> Made | None:
    """Read ``weight[indices]``, where the row of the padding gets no gradient."""
    node = use.node
    if use.is_transposed or node._saved_scale_grad_by_freq:
        return None
    # The graph saves -1, which is none, as the largest unsigned number.
    padding = node._saved_padding_idx
    indices = node._saved_indices.detach()
    return partial(_looked_up, shape=use.shape, indices=indices, padding=padding)


def _index(use: Use) -> Made | None:
    """Read ``parameter[indices]`` with one tensor of whole numbers, in the first dimension."""
    given = use.node._saved_indices
    first = given[0] if given else None
    if use.is_transposed or first is None or any(each is not None for each in given[1:]):
        return None
    if first.dtype != torch.int64:
        return None
    return partial(_looked_up, shape=use.shape, indices=first)


def _looked_up(
    grad: Tensor,
    layout: Layout,
    *,
    shape: tuple[int, ...],
    indices: Tensor,
    padding: int | None = None,
) -> Factor | None:
    if layout.dim >= indices.dim():
        return None
    indices_BT = layout.by_sample(indices).reshape(layout.num_samples, -1)
    values_BTC = layout.by_sample(grad).reshape(*indices_BT.shape, -1)
    if padding is not None and 0 <= padding < shape[0]:
        values_BTC = values_BTC * (indices_BT != padding)[:, :, None]
    # Indices from the end count from the front as well.
    indices_BT = torch.where(indices_BT < 0, indices_BT + shape[0], indices_BT)
    return Lookup(indices=indices_BT, values=values_BTC, num_rows=shape[0])


def _add(use: Use) -> Made | None:
    """Read ``x + alpha parameter``, broadcast."""
    if use.is_transposed:
        return None
    scale = float(use.node._saved_alpha) if use.position == 1 else 1.0
    return partial(_broadcast, shape=use.shape, scale=scale)


def _sub(use: Use) -> Made | None:
    """Read ``x - alpha parameter``, broadcast."""
    if use.is_transposed:
        return None
    scale = -float(use.node._saved_alpha) if use.position == 1 else 1.0
    return partial(_broadcast, shape=use.shape, scale=scale)


def _mul(use: Use) -> Made | None:
    """Read ``x * parameter``, broadcast."""
    other = use.node._saved_other if use.position == 0 else use.node._saved_self
    if use.is_transposed or not isinstance(other, Tensor):
        return None
    return partial(_broadcast, shape=use.shape, other=other.detach())


def _layer_norm(use: Use) -> Made | None:
    """Read ``normalised * weight + bias``, normalised over the last dimensions."""
    node = use.node
    if use.position == 2:
        return partial(_broadcast, shape=use.shape)
    mean, scale = node._saved_result1.detach(), node._saved_result2.detach()
    normalised = (node._saved_input.detach() - mean) * scale
    return partial(_broadcast, shape=use.shape, other=normalised)


def _group_norm(use: Use) -> Made | None:
    """Read ``normalised * weight + bias`` by channel, normalised over groups of channels."""
    node = use.node
    shape = (*use.shape, *(1,) * (len(node._input_metadata[0].shape) - 2))
    if use.position == 2:
        return partial(_broadcast, shape=shape)
    given = node._saved_input.detach()
    grouped = given.reshape(node._saved_N, node._saved_group, -1)
    mean, scale = node._saved_result1.detach(), node._saved_result2.detach()
    normalised = ((grouped - mean[:, :, None]) * scale[:, :, None]).reshape(given.shape)
    return partial(_broadcast, shape=shape, other=normalised)


def _batch_norm(use: Use) -> Made | None:
    """Read ``normalised * weight + bias`` by channel, with running statistics."""
    node = use.node
    if node._saved_training:
        return None
    given = node._saved_input.detach()
    shape = (*use.shape, *(1,) * (given.dim() - 2))
    if use.position == 2:
        return partial(_broadcast, shape=shape)
    scale = (node._saved_running_var + node._saved_eps).rsqrt().reshape(shape)
    normalised = (given - node._saved_running_mean.reshape(shape)) * scale
    return partial(_broadcast, shape=shape, other=normalised)


def _broadcast(
    grad: Tensor,
    layout: Layout,
    *,
    shape: tuple[int, ...],
    other: Tensor | None = None,
    scale: float = 1.0,
) -> Factor | None:
    """Make the gradients of a parameter that was broadcast: the sums over where it was.

    Args:
        grad: the gradient of the output, of any shape.
        layout: where its samples lie.
        shape: the parameter's, which broadcasts to that of the output.
        other: what it was multiplied with; None if it was added.
        scale: by what it was multiplied besides.
    """
    own_dim = layout.dim - (grad.dim() - len(shape))
    if own_dim >= 0 and shape[own_dim] != 1:
        return None  # each sample has entries of its own, as a table beside the data would
    made = grad if other is None else grad * other
    num_missing = grad.dim() - len(shape)
    summed = [
        dim for dim in range(grad.dim()) if dim < num_missing or shape[dim - num_missing] == 1
    ]
    value = layout.by_sample(made)
    # In front lies the sample; the rest of its dimension stays where it was, and is summed over.
    value = value.sum(dim=[dim + 1 for dim in summed]) if summed else value
    if scale != 1.0:
        value = value * scale
    if shape and all(size == 1 for size in shape[1:]):
        return Outer(left=value.reshape(layout.num_samples, 1, shape[0]), right=None)
    return dense(value, shape)


def _convolution(use: Use) -> Made | None:
    """Read a convolution of any number of dimensions, groups and steps, transposed or not."""
    node = use.node
    if use.position == 2:
        num_dims = len(node._saved_stride)
        return partial(_broadcast, shape=(*use.shape, *(1,) * num_dims))
    if use.position != 1 or use.is_transposed:
        return None
    windows = partial(
        _windows,
        kernel=use.shape[2:],
        stride=node._saved_stride,
        padding=node._saved_padding,
        dilation=node._saved_dilation,
        num_groups=node._saved_groups,
    )
    inputs = node._saved_input.detach()
    # A transposed convolution is the gradient of one by its input, so the two change places.
    if node._saved_transposed:
        return partial(_transposed_kernel, shape=use.shape, windows=windows, inputs=inputs)
    return partial(_kernel, shape=use.shape, windows=windows, inputs=inputs)


def _transposed_kernel(grad: Tensor, layout: Layout, *, inputs: Tensor, **given: Any) -> Factor:
    return _kernel(inputs, layout, inputs=grad, **given)


def _kernel(
    grad: Tensor,
    layout: Layout,
    *,
    shape: tuple[int, ...],
    windows: Callable[..., Tensor],
    inputs: Tensor,
) -> Factor:
    """Make the gradients of a kernel from the windows that it saw: (N, R, ...) and (N, C, ...)."""
    windows_NGKT = windows(inputs, num_positions=grad.shape[2:])
    num_groups, num_positions = windows_NGKT.shape[1], windows_NGKT.shape[-1]
    grad_NGRT = grad.reshape(len(grad), num_groups, -1, num_positions)
    if num_groups == 1 and len(grad) == layout.num_samples:
        return outer(grad_NGRT[:, 0].mT, windows_NGKT[:, 0].mT)
    made = torch.matmul(grad_NGRT, windows_NGKT.mT)
    value = layout.by_sample(made).sum(dim=1)
    return dense(value.reshape(layout.num_samples, *shape), shape)


def _windows(
    seen: Tensor,
    *,
    num_groups: int,
    num_positions: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Copy the windows that a kernel sees: (N, C, ...) to (N, G, C / G K, T)."""
    around = [width for each in reversed(padding) for width in (each, each)]
    padded = F.pad(seen, around) if any(padding) else seen
    # An output padding lets the last windows reach further than the input.
    needed = [
        (positions - 1) * step + (size - 1) * gap + 1
        for positions, step, size, gap in zip(num_positions, stride, kernel, dilation, strict=True)
    ]
    missing = [max(0, n - have) for n, have in zip(needed, padded.shape[2:], strict=True)]
    if any(missing):
        padded = F.pad(padded, [width for each in reversed(missing) for width in (0, each)])
    padded = padded.contiguous()
    own = padded.stride()[2:]
    shape = (*padded.shape[:2], *kernel, *num_positions)
    between = [step * gap for step, gap in zip(own, dilation, strict=True)]
    apart = [each * step for each, step in zip(own, stride, strict=True)]
    view = padded.as_strided(shape, (*padded.stride()[:2], *between, *apart))
    num_channels = padded.shape[1] // num_groups
    num_numbers = num_channels * math.prod(kernel)
    return view.reshape(len(padded), num_groups, num_numbers, math.prod(num_positions))


_READERS: dict[str, Callable[[Use], Made | None]] = {
    "AddBackward": _add,
    "AddmmBackward": _addmm,
    "ConvolutionBackward": _convolution,
    "CudnnBatchNormBackward": _batch_norm,
    "EmbeddingBackward": _embedding,
    "IndexBackward": _index,
    "MmBackward": _mm,
    "MulBackward": _mul,
    "NativeBatchNormBackward": _batch_norm,
    "NativeGroupNormBackward": _group_norm,
    "NativeLayerNormBackward": _layer_norm,
    "SubBackward": _sub,
}
