"""Attention and encoder layers that torch runs as one operator, in evaluation without gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import num_bytes as bytes_of

_STATISTICS_BYTES = 2 * 4
"""Mean and reciprocal deviation of a row, which layer normalisation gives in fp32."""


def _attention(
    *, query: torch.Tensor, num_head: int, mask: torch.Tensor | None, need_weights: bool, out: Any
) -> Any:
    """Return the bytes besides outputs of ``_native_multi_head_attention``."""
    if query.is_nested:
        return NotImplemented
    peak_bytes = _attention_bytes(query, num_head, mask, need_weights=need_weights)
    returned = [each for each in out if isinstance(each, torch.Tensor)]
    return max(0, peak_bytes - sum(map(bytes_of, returned)))


def _attention_bytes(
    query: torch.Tensor, num_heads: int, mask: torch.Tensor | None, *, need_weights: bool = False
) -> int:
    """Return the peak of attention: projections twice, then scores beside them.

    A mask has the softmax write elsewhere, and becomes bool first. Scores that are wanted live on
    beside the context and its copy.

    Source: ``native_multi_head_attention_cpu`` and ``masked_softmax_cpu`` in
    aten/src/ATen/native/transformers/attention.cpp, and the allocator's events, torch 2.13.
    """
    rows, length, _ = query.shape
    input_bytes = bytes_of(query)
    score_bytes = rows * num_heads * length * length * query.element_size()
    at_softmax = 3 * input_bytes + score_bytes
    if mask is not None:
        at_softmax += score_bytes + (0 if mask.dtype is torch.bool else mask.numel())
    at_context = 5 * input_bytes + (score_bytes if need_weights else 0)
    return max(6 * input_bytes, at_softmax, at_context)


def _encoder_layer(
    *,
    src: torch.Tensor,
    num_heads: int,
    norm_first: bool,
    ffn_weight_1: torch.Tensor,
    mask: torch.Tensor | None,
) -> Any:
    """Return the bytes besides the output of ``_transformer_encoder_layer_fwd``.

    Source: ``transformer_encoder_layer_forward`` in
    aten/src/ATen/native/transformers/transformer.cpp, and the allocator's events, torch 2.13.
    """
    if src.is_nested:
        return NotImplemented
    rows, length, _ = src.shape
    input_bytes = bytes_of(src)
    hidden_bytes = rows * length * ffn_weight_1.shape[0] * src.element_size()
    in_stages = max(_attention_bytes(src, num_heads, mask), 2 * input_bytes + hidden_bytes)
    normalised_bytes = input_bytes if norm_first else 0
    at_norm = 3 * input_bytes + rows * length * _STATISTICS_BYTES
    return max(in_stages + normalised_bytes, at_norm) - input_bytes


OPERATORS: Mapping[str, Operator] = {
    "_native_multi_head_attention": Operator(scratch=_attention),
    "_transformer_encoder_layer_fwd": Operator(scratch=_encoder_layer),
}
