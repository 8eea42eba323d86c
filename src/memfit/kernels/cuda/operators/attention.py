"""``scaled_dot_product_attention``: the kernel that the card would take, and its scratch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from memfit.kernels.cuda.attention_choice import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    AttentionCall,
    choose_attention,
)
from memfit.kernels.cuda.attention_scratch import attention_scratch
from memfit.kernels.cuda.card import Card
from memfit.kernels.registration import Operator, Rule
from memfit.kernels.scratch import Scratch

_aten = torch.ops.aten
_FLASH_HEAD_MULTIPLE = 8
_EFFICIENT_MASK_MULTIPLE = 16


def _attention(
    *,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    card: Card,
) -> Any:
    """Take the attention kernel that the card would take."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return NotImplemented
    call = _described(
        card,
        (query, key, value),
        attn_mask,
        dropout=dropout_p,
        is_causal=is_causal,
        enable_gqa=enable_gqa,
    )
    chosen = choose_attention(call)
    mask = None if attn_mask is None else _as_numbers(attn_mask, query.dtype)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    if chosen == FLASH:
        return _flash(query, key, value, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
    if chosen == MATH:
        if mask is not None or is_causal:
            mask = None if is_causal else mask
            return _math_attention(query, key, value, mask, dropout=dropout_p, **options)
        return _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, **options
        )[0]
    bias = None if mask is None else _bias(mask, query, key)
    fused = getattr(_aten, f"_scaled_dot_product_{chosen}_attention")
    with_logsumexp = call.requires_grad
    return fused(query, key, value, bias, with_logsumexp, dropout_p, is_causal, scale=scale)[0]


def _described(
    card: Card,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionCall:
    """Describe a call of attention, and what the user has switched on."""
    query, key, value = tensors
    strided = tensors if mask is None else (*tensors, mask)
    backends = torch.backends.cuda
    return AttentionCall(
        capability=card.capability,
        torch_version=card.torch_version,
        dtype=str(query.dtype).removeprefix("torch."),
        batch=int(query.shape[0]),
        query_heads=int(query.shape[1]),
        key_heads=int(key.shape[1]),
        query_length=int(query.shape[2]),
        key_length=int(key.shape[2]),
        head_dim=int(query.shape[3]),
        value_head_dim=int(value.shape[3]),
        has_mask=mask is not None,
        mask_requires_grad=mask is not None and mask.requires_grad,
        is_causal=is_causal,
        dropout=dropout,
        enable_gqa=enable_gqa,
        has_unit_stride=all(tensor.stride(-1) == 1 for tensor in strided),
        requires_grad=torch.is_grad_enabled() and any(t.requires_grad for t in tensors),
        flash_enabled=backends.flash_sdp_enabled(),
        efficient_enabled=backends.mem_efficient_sdp_enabled(),
        cudnn_enabled=backends.cudnn_sdp_enabled(),
        math_enabled=backends.math_sdp_enabled(),
    )


def _fused(backend: str, *, is_backward: bool) -> Rule:
    """Return the rule of a fused kernel's forward or backward."""

    def scratch(
        *,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float,
        is_causal: bool,
        card: Card,
        attn_bias: torch.Tensor | None = None,
    ) -> Scratch:
        call = _described(
            card,
            (query, key, value),
            attn_bias,
            dropout=dropout_p,
            is_causal=is_causal,
            enable_gqa=False,
        )
        return attention_scratch(backend, call, is_backward=is_backward)

    return scratch


def _fused_operators() -> Mapping[str, Operator]:
    """Register forward and backward of each fused kernel."""
    return {
        f"_scaled_dot_product_{backend}_attention{suffix}": Operator(
            scratch=_fused(backend, is_backward=bool(suffix))
        )
        for backend in (FLASH, EFFICIENT, CUDNN)
        for suffix in ("", "_backward")
    }


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """Take flash attention, with heads padded to a multiple of 8 (``pad_last_dim``)."""
    head_dim = query.shape[-1]
    scale = head_dim**-0.5 if scale is None else scale
    missing = -head_dim % _FLASH_HEAD_MULTIPLE
    if missing:
        query, key, value = (
            torch.nn.functional.pad(tensor, (0, missing)) for tensor in (query, key, value)
        )
    out: torch.Tensor = _aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return out[..., :head_dim] if missing else out


def _math_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Compute attention step by step, adding the mask in place as torch does when unwatched.

    Without a mask the attention is causal. Names live as long as they do in C++.

    Source: ``_scaled_dot_product_attention_math`` in
    aten/src/ATen/native/transformers/attention.cpp, torch 2.13.
    """
    inputs = [value, key, query]
    is_half = query.dtype in {torch.float16, torch.bfloat16}
    if is_half and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        inputs = [tensor.float() for tensor in reversed(inputs)][::-1]
    factor = (query.shape[-1] ** -0.5 if scale is None else abs(scale)) ** 0.5
    scaled = inputs[2] * factor
    expanded = inputs[1::-1]
    if mask is None:
        shape = (query.shape[-2], key.shape[-2])
        mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
        mask = _as_numbers(mask, scaled.dtype)
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        expanded = [tensor.repeat_interleave(repeats, dim=-3) for tensor in expanded]
    weights = torch.matmul(scaled, expanded[0].transpose(-2, -1) * factor).add_(mask)
    weights = _aten._safe_softmax(weights, -1)
    if dropout > 0:
        weights = torch.dropout(weights, dropout, True)
    kept = weights.to(query.dtype)
    out = torch.matmul(weights, expanded[1]).to(query.dtype)
    del kept
    return out


def _as_numbers(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Turn a mask of bools into one of zeros and minus infinities.

    Source: ``convert_boolean_attn_mask`` in aten/src/ATen/native/transformers/attention.cpp.
    """
    if mask.dtype is not torch.bool:
        return mask
    lowest = torch.scalar_tensor(float("-inf"), dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, lowest)


def _bias(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Make a mask into a bias: rows are padded to a multiple of 16.

    Source: ``pad_bias`` in aten/src/ATen/native/transformers/attention.cpp.
    """
    length = mask.shape[-1]
    missing = -length % _EFFICIENT_MASK_MULTIPLE
    if missing:
        mask = torch.nn.functional.pad(mask, (0, missing))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


OPERATORS: Mapping[str, Operator] = {
    "scaled_dot_product_attention": Operator(choice=_attention),
    **_fused_operators(),
}
