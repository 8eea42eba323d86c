"""Kernels that want dense operands copy others, and some keep sums per thread."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.rules import cpu_scratch_bytes, taken_bytes

ATEN = torch.ops.aten
SLACK_BYTES = 4096  # tables of an interpolation, numbers that become tensors
IMAGE = torch.randn(4, 8, 32, 32)
TURNED = torch.randn(4, 8, 32, 32).transpose(2, 3)
LAST = IMAGE.contiguous(memory_format=torch.channels_last)
TOKENS = torch.randn(8, 64, 128)
TURNED_TOKENS = torch.randn(8, 128, 64).transpose(1, 2)
ONES, ZEROS = torch.ones(8), torch.zeros(8)
MASK = torch.rand(8, 64, 128) > 0.5
INDICES = torch.zeros(8, 65, dtype=torch.int64)[:, :-1]
TABLE = torch.randn(50, 128)
STATISTICS = torch.zeros(8, 64, 1), torch.ones(8, 64, 1)
AFFINE = torch.ones(128), torch.zeros(128)
ALL = [True, True, True]


def norm_backward(gradient, image):
    return (gradient, image, ONES, ZEROS, ONES, ZEROS, ONES, True, 1e-5, ALL)


def layer_norm_backward(gradient):
    return (gradient, TOKENS, [128], *STATISTICS, *AFFINE, ALL)


CALLS = {
    "softmax of what is turned": ("_softmax", (TURNED, -1, False)),
    "log-softmax of what is dense": ("_log_softmax", (IMAGE, 1, False)),
    "gradients of softmax": ("_softmax_backward_data", (TURNED, LAST, 1, torch.float32)),
    "softmax with whole rows masked": ("_safe_softmax", (TOKENS, -1)),
    "batch norm": ("native_batch_norm_backward", norm_backward(IMAGE, IMAGE)),
    "batch norm of turned images": ("native_batch_norm_backward", norm_backward(TURNED, IMAGE)),
    "batch norm, channels last": ("native_batch_norm_backward", norm_backward(LAST, LAST)),
    "layer norm of what is turned": ("native_layer_norm", (TURNED_TOKENS, [128], *AFFINE, 1e-5)),
    "layer norm": ("native_layer_norm_backward", layer_norm_backward(TOKENS)),
    "layer norm, turned": ("native_layer_norm_backward", layer_norm_backward(TURNED_TOKENS)),
    "group norm": (
        "native_group_norm_backward",
        (IMAGE, IMAGE, torch.zeros(4, 2), torch.ones(4, 2), ONES, 4, 8, 1024, 2, ALL),
    ),
    "gelu of a turned gradient": ("gelu_backward", (TURNED_TOKENS, TOKENS)),
    "gelu": ("gelu_backward", (TOKENS, TOKENS)),
    "dropout": ("native_dropout", (TOKENS, 0.5, True)),
    "dropout, backward": ("native_dropout_backward", (TOKENS, MASK, 2.0)),
    "embedding of a slice": ("embedding", (TABLE, INDICES)),
    "embedding, backward": ("embedding_dense_backward", (TURNED_TOKENS, INDICES, 50, -1, False)),
    "sum of exponentials": ("logsumexp", (TOKENS, [-1])),
    "columns": ("im2col", (IMAGE, [3, 3], [1, 1], [1, 1], [1, 1])),
    "a small image enlarged": ("upsample_bilinear2d", (IMAGE, [64, 64], False)),
    "a large image enlarged": ("upsample_nearest2d", (IMAGE, [128, 128])),
    "an image enlarged, channels last": ("upsample_nearest2d", (LAST, [64, 64])),
    "pooling": ("max_pool2d_with_indices", (TURNED, [2, 2])),
    "pooling, channels last": ("max_pool2d_with_indices", (LAST, [2, 2])),
}


@pytest.mark.parametrize(("operator", "args"), CALLS.values(), ids=CALLS)
def test_what_a_kernel_copies_is_predicted(operator, args):
    call = getattr(ATEN, operator)
    predicted = cpu_scratch_bytes(operator, *args, out=call(*args))
    assert abs(predicted - taken_bytes(lambda: call(*args))) <= SLACK_BYTES
