"""Has torch take the same path for tensors of every layout, while a step is recorded.

A linear layer is one operator for contiguous inputs and two for others, and a batch of one sample
is contiguous where a larger one is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional as F

_FEWEST_DIMS = 3
_MATRIX_DIMS = 2


@contextmanager
def one_path() -> Iterator[None]:
    """Compute linear layers and products with one matrix in one way; the results are the same.

    Names that were imported from torch before are not reached.
    """
    matmul = _product_or(torch.Tensor.matmul)
    with ExitStack() as stack:
        stack.enter_context(patch.object(F, "linear", _linear_or(F.linear)))
        for owner in (torch, torch.Tensor):
            stack.enter_context(patch.object(owner, "matmul", matmul))
        stack.enter_context(patch.object(torch.Tensor, "__matmul__", matmul))
        yield


def _linear_or(usual: Callable[..., Any]) -> Callable[..., Any]:
    def linear(input: Any, weight: Any, bias: Any = None) -> Any:  # noqa: A002 - torch's own name
        if not _is_stack(input):
            return usual(input, weight, bias)
        rows = input.reshape(-1, input.shape[-1])
        out = rows.mm(weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
        return out.view(*input.shape[:-1], weight.shape[0])

    return linear


def _product_or(usual: Callable[..., Any]) -> Callable[..., Any]:
    def matmul(input: Any, other: Any, **options: Any) -> Any:  # noqa: A002 - torch's own name
        if options or not _is_stack(input) or not _is_matrix(other):
            return usual(input, other, **options)
        out = input.reshape(-1, input.shape[-1]).mm(other)
        return out.view(*input.shape[:-1], other.shape[1])

    return matmul


def _is_stack(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= _FEWEST_DIMS


def _is_matrix(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == _MATRIX_DIMS
