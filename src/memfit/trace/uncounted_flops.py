"""Floating-point operations of operators that torch's own counter leaves out.

``torch.utils.flop_counter`` knows matrix products, convolutions and a GPU's attention. Attention on
the CPU takes the same arithmetic. Of recurrent layers the products with their weights are counted,
as those are nearly all: each weight once for every sample and every step in time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

_MULTIPLY_ADD = 2
"""Operations of a product of two numbers that is added to a sum."""
_BACKWARD = 2
"""Backward multiplies twice: for the gradient of the input and for that of the weights."""


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count scores and their sum of values, as torch does: a causal mask saves nothing."""
    return _pairs(query, key) * int(query.shape[-1] + value.shape[-1])


def _attention_backward(
    _gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    """Count the scores once more, and two products for each of forward's."""
    return _pairs(query, key) * int(3 * query.shape[-1] + 2 * value.shape[-1])


def _pairs(query: Any, key: Any) -> int:
    """Return twice the number of scores; heads of queries may share those of keys."""
    return _MULTIPLY_ADD * int(prod(query.shape[:-1])) * int(key.shape[-2])


def _layer(inputs: Any, first: Any, second: Any, *_: Any, **__: Any) -> int:
    """Count a layer whose weights are given one by one: those of the input, and the state's."""
    return _recurrent(inputs, (first, second))


def _layers(inputs: Any, weights: Sequence[Any], *_: Any, **__: Any) -> int:
    """Count layers whose weights, and biases among them, are given as a list."""
    return _recurrent(inputs, weights)


def _recurrent(inputs: Any, weights: Sequence[Any]) -> int:
    num_steps = int(prod(inputs.shape[:-1]))
    num_weights = sum(int(each.numel()) for each in weights if each.dim() > 1)
    return _MULTIPLY_ADD * num_steps * num_weights


def _twice(count: Callable[..., int]) -> Callable[..., int]:
    return lambda *args, **kwargs: _BACKWARD * count(*args, **kwargs)


_aten = torch.ops.aten
UNCOUNTED: Mapping[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    _aten.mkldnn_rnn_layer: _layer,
    _aten.mkldnn_rnn_layer_backward: _twice(_layer),
    _aten._cudnn_rnn: _layers,
    _aten._cudnn_rnn_backward: _twice(_layers),
}
"""By operator: how many operations a call with these arguments takes."""
