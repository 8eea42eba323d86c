"""Puts CUDA's choice of operators where the CPU's would be taken, while a step is recorded.

Composite operators ask the device which kernels to use, and C++ does not see the virtual card.
Each of them is replaced, for the card's tensors alone, at the CPU's autograd key. The replacement
is a registration with torch's dispatcher that ends with the recording; tensors elsewhere take the
path that torch gives them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._C import DispatchKey

from memfit.kernels.cuda.card import Card
from memfit.virtual.cuda.attention import AttentionQuestion, choose_attention
from memfit.virtual.cuda.autocast import VirtualAutocast
from memfit.virtual.cuda.placement import is_on_card
from memfit.virtual.cuda.recurrent import recurrent_operators

_KEY = "AutogradCPU"
_FLASH_HEAD_MULTIPLE = 8
_EFFICIENT_MASK_MULTIPLE = 16
_FUSED_RMS_NORM_SINCE = (2, 9)
_ATTENTION_OPTIONS = ("mask", "dropout", "is_causal")
_aten = torch.ops.aten


@contextmanager
def cuda_operators(card: Card, autocast: VirtualAutocast) -> Iterator[None]:
    """Register CUDA's choices for as long as the context lasts."""
    replacements: dict[str, Callable[..., Any]] = {
        "dropout": _dropout,
        "linear": _linear,
        "scaled_dot_product_attention": functools.partial(_attention, card),
        "softmax.int": functools.partial(_softmax, _aten._softmax),
        "log_softmax.int": functools.partial(_softmax, _aten._log_softmax),
        "one_hot": _one_hot,
        **recurrent_operators(),
    }
    if card.torch_version >= _FUSED_RMS_NORM_SINCE and hasattr(_aten, "_fused_rms_norm"):
        replacements["rms_norm"] = _rms_norm
    with torch.library._scoped_library("aten", "IMPL") as library:
        for name, replacement in replacements.items():
            library.impl(name, _on_card_only(name, replacement), _KEY)
        autocast.register(library)
        yield


def _on_card_only(name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Leave tensors that are not on the card to torch's own operator."""
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(_aten, packet), overload or "default")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_on_card(args[0]):
            out = replacement(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return operator._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)

    return kernel


def _linear(tensor: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    """Add the bias in place where torch does so when no dispatch mode is watching.

    Source: ``linear`` in aten/src/ATen/native/Linear.cpp; 2-D and contiguous inputs take ``addmm``.
    """
    if bias is None or tensor.dim() == 2 or tensor.is_contiguous():
        return NotImplemented
    return torch.matmul(tensor, weight.t()).add_(bias)


def _dropout(tensor: torch.Tensor, rate: float, train: bool) -> Any:
    """Take the fused kernel, which keeps a mask of bools.

    Source: ``is_fused_kernel_acceptable`` in aten/src/ATen/native/Dropout.cpp.
    """
    if not train or not 0 < rate < 1 or not tensor.numel():
        return NotImplemented
    return _aten.native_dropout(tensor, rate, train)[0]


def _softmax(kernel: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    """Take fp16 in and give fp32 without a copy, as the kernel on CUDA can.

    Source: ``softmax`` and ``log_softmax`` in aten/src/ATen/native/SoftMax.cpp.
    """
    if tensor.dtype is not torch.float16 or dtype is not torch.float32:
        return NotImplemented
    return kernel(tensor, dim, True)


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> Any:
    """Skip the look at the values, which CUDA leaves to its kernels.

    Source: ``one_hot`` in aten/src/ATen/native/Onehot.cpp.
    """
    if num_classes <= 0:
        return NotImplemented
    out = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


def _rms_norm(
    tensor: torch.Tensor,
    shape: list[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Take the fused kernel (aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``)."""
    if weight is not None and weight.dtype is not tensor.dtype:
        return NotImplemented
    return _FusedRmsNorm.apply(tensor, shape, weight, eps)


class _FusedRmsNorm(torch.autograd.Function):
    """The fused kernel and its gradient, which autograd takes apart for the CPU's dispatch keys.

    Source: ``_fused_rms_norm`` in tools/autograd/derivatives.yaml.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        shape: list[int],
        weight: torch.Tensor | None,
        eps: float | None,
    ) -> torch.Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            out, scale = _aten._fused_rms_norm(tensor, shape, weight, eps)
        ctx.shape = shape
        ctx.save_for_backward(tensor, weight, scale)
        return cast(torch.Tensor, out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tensor, weight, scale = ctx.saved_tensors
        is_wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        with torch._C._AutoDispatchBelowAutograd():
            grad_tensor, grad_weight = _aten._fused_rms_norm_backward(
                grad, tensor, ctx.shape, scale, weight, is_wanted
            )
        return grad_tensor, None, grad_weight, None


def _attention(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *rest: Any,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Take the attention kernel that the card would take.

    ``rest`` are the mask, the dropout rate and whether attention is causal, as far as given.
    """
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return NotImplemented
    given = dict(zip(_ATTENTION_OPTIONS, rest, strict=False))
    mask = given.get("mask")
    dropout, is_causal = given.get("dropout", 0.0), given.get("is_causal", False)
    question = question_of(
        card, query, key, value, mask, dropout=dropout, is_causal=is_causal, enable_gqa=enable_gqa
    )
    chosen = choose_attention(question)
    mask = None if mask is None else _as_numbers(mask, query.dtype)
    if chosen == "flash":
        return _flash(query, key, value, dropout=dropout, is_causal=is_causal, scale=scale)
    if chosen == "math":
        if mask is not None or is_causal:
            return _math_attention(
                query,
                key,
                value,
                None if is_causal else mask,
                dropout=dropout,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        return _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    bias = None if mask is None else _bias(mask, query, key)
    fused = (
        _aten._scaled_dot_product_cudnn_attention
        if chosen == "cudnn"
        else _aten._scaled_dot_product_efficient_attention
    )
    needs_logsumexp = question.requires_grad
    return fused(query, key, value, bias, needs_logsumexp, dropout, is_causal, scale=scale)[0]


def question_of(
    card: Card,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout: float,
    is_causal: bool,
    enable_gqa: bool,
) -> AttentionQuestion:
    """Describe a call of attention, and what the user has switched on."""
    tensors = (query, key, value)
    strided = tensors if mask is None else (*tensors, mask)
    backends = torch.backends.cuda
    return AttentionQuestion(
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


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
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
        query, key, value, dropout, is_causal, False, scale=scale
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
