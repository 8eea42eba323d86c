"""Fake results lie in memory as real ones do, since that decides what is copied next."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from memfit.virtual.tensors import VirtualTensors

ONES = torch.ones(6, requires_grad=True)
CLASSES = torch.zeros(4, 8, 10, dtype=torch.int64)
ON_IMAGES = {
    "batch norm": lambda x: functional.batch_norm(
        x, torch.zeros(6), torch.ones(6), ONES, ONES, training=True
    ),
    "group norm": lambda x: functional.group_norm(x, 2, ONES, ONES),
    "layer norm": lambda x: functional.layer_norm(x, (10,)),
    "softmax": lambda x: x.softmax(1),
    "log-softmax": lambda x: x.log_softmax(1),
    "cross-entropy": lambda x: functional.cross_entropy(x, CLASSES, reduction="none"),
    "mse": lambda x: functional.mse_loss(x, torch.zeros(4, 6, 8, 10), reduction="none"),
    "smooth l1": lambda x: functional.smooth_l1_loss(x, torch.zeros(4, 6, 8, 10), reduction="none"),
    "padding": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"),
    "repeated border": lambda x: functional.pad(x, (1, 1, 1, 1), mode="replicate"),
    "roll": lambda x: x.roll(1, 2),
    "roll of all elements": lambda x: x.roll(1),
    "shuffle": lambda x: functional.channel_shuffle(x, 2),
    "glu": lambda x: functional.glu(x, 1),
    "convolution": lambda x: functional.conv2d(x, torch.randn(4, 6, 3, 3)),
    "pooling": lambda x: functional.max_pool2d(x, 2),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
}
FUNCTIONS = (
    *("elu", "gelu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "logsigmoid"),
    *("mish", "relu", "relu6", "selu", "silu", "softplus", "tanh"),
)
LAYOUTS = {
    "dense": lambda *shape: torch.randn(shape),
    "turned": lambda *shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2),
    "channels last": lambda *shape: torch.randn(shape).contiguous(
        memory_format=torch.channels_last
    ),
    "first two turned": lambda *shape: torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1),
}


class _Compared(TorchDispatchMode):
    """Runs each operator on fake tensors as well, and notes where its results lie otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self._fakes = VirtualTensors()
        self.others: list[str] = []

    def _fake(self, tensor):
        return self._fakes.from_tensor(tensor.detach())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        fakes = tree_map_only(torch.Tensor, self._fake, (args, kwargs or {}))
        real = func(*args, **kwargs or {})
        with self._fakes:
            fake = func(*fakes[0], **fakes[1])
        if _layouts(real) != _layouts(fake):
            self.others.append(f"{func}: {_layouts(real)}, not {_layouts(fake)}")
        return real


def _layouts(results):
    """Give size and stride of each dimension that has more than one element."""
    return [
        [pair for pair in zip(each.shape, each.stride(), strict=True) if pair[0] > 1]
        for each in tree_leaves(results)
        if isinstance(each, torch.Tensor)
    ]


def _compare(compared, call, leaf, gradient):
    with compared:
        result = call(leaf.requires_grad_())
    seed = LAYOUTS[gradient](*result.shape) if result.dim() == 4 else torch.ones_like(result)
    with compared:
        torch.autograd.backward(result, seed)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_IMAGES, *FUNCTIONS])
def test_results_and_gradients_lie_as_they_really_do(name):
    call = ON_IMAGES.get(name) or getattr(functional, name)
    for image, gradient in itertools.product(LAYOUTS, LAYOUTS):
        compared = _Compared()
        _compare(compared, call, LAYOUTS[image](4, 6, 8, 10), gradient)
        assert compared.others == [], (image, gradient)


@pytest.mark.parametrize("gradient", ["dense", "turned"])
def test_batch_norm_of_turned_sequences_is_dense(gradient):
    compared = _Compared()
    tokens = torch.randn(4, 8, 6).transpose(1, 2)
    result = _compare(compared, ON_IMAGES["batch norm"], tokens, gradient)
    assert compared.others == []
    assert result.is_contiguous()
