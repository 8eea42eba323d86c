"""Which kernel ``scaled_dot_product_attention`` would choose on a CUDA device.

PyTorch asks the backends in an order, each through a list of checks, and takes the first that
passes. The same checks are written here on shapes and flags alone. What changed from version to
version is the table ``_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.errors import RecordingError
from memfit.kernels.cuda.attention_question import CUDNN, EFFICIENT, FLASH, MATH, AttentionQuestion
from memfit.kernels.cuda.attention_scratch import ForwardBackwardScratch, attention_hidden_bytes

__all__ = [
    "AttentionQuestion",
    "ForwardBackwardScratch",
    "attention_hidden_bytes",
    "choose_attention",
    "efficient_alignment",
]

_HALF = frozenset({"float16", "bfloat16"})
_FUSED_CARDS = ((8, 0), (12, 1))
_EFFICIENT_CARDS = ((5, 0), (12, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rules:
    """What holds from one torch version on."""

    since: tuple[int, int]
    source: str
    prefers_cudnn: bool = False
    """cuDNN comes first on sm 9.x and 10.x: the wheel's cuDNN is newer than 9.15.0."""
    cudnn_rounds_dropout: bool = False
    """cuDNN takes only multiples of 1/16."""
    cudnn_takes_256: bool = False
    """cuDNN takes head dimensions up to 256 on sm 9.0 and 10.x."""
    cudnn_skips_decode: bool = False
    """cuDNN refuses a single query on sm 10.x and 11.x."""
    efficient_takes_gqa: bool = False
    broadcasts_one_head: bool = False
    """One key head serves all query heads without ``enable_gqa``."""
    takes_unbatched: bool = False
    """Inputs of three dimensions can use the fused kernels."""


_RULES = (
    _Rules(
        since=(2, 6),
        source="aten/src/ATen/Context.h, sdp_priority_order: flash, efficient, math, cudnn; "
        "https://github.com/pytorch/pytorch/pull/138522 took cuDNN out of the first place. 2.10 "
        "has the rule of 2.11, but its wheel for CUDA 12 an older cuDNN",
    ),
    _Rules(
        since=(2, 11),
        source="sdp_utils.cpp, check_prefer_cudnn_attention: sm 9.x and 10.x with cuDNN above "
        "9.15.0; the 2.11 wheel carries 9.19 (https://github.com/huggingface/transformers/"
        "pull/48163, https://github.com/sgl-project/sglang/pull/33655)",
        prefers_cudnn=True,
    ),
    _Rules(
        since=(2, 12),
        source="https://github.com/pytorch/pytorch/pull/174245, merged at the end of February "
        "2026, after the 2.11 branch by its date",
        prefers_cudnn=True,
        cudnn_rounds_dropout=True,
    ),
    _Rules(
        since=(2, 14),
        source="sdp_utils_cpp.h and kernel_backward.h of torch 2.14.1, whose messages in "
        "libtorch_cuda.so name the dropout, head dimension and decode checks; cuDNN 9.24.0 by its "
        "metadata; https://github.com/pytorch/pytorch/pull/191085",
        prefers_cudnn=True,
        cudnn_rounds_dropout=True,
        cudnn_takes_256=True,
        cudnn_skips_decode=True,
        efficient_takes_gqa=True,
        broadcasts_one_head=True,
        takes_unbatched=True,
    ),
)


def choose_attention(question: AttentionQuestion) -> str:
    """Choose the kernel: ``flash``, ``efficient``, ``cudnn`` or ``math``.

    Does not account for nested tensors, an order set by ``sdpa_kernel(..., set_priority=True)``,
    FlashAttention 3, deterministic algorithms, masks that do not broadcast, storage offsets that
    are not aligned, or a wheel with another cuDNN than its version ships.

    Raises:
        RecordingError: if every kernel is disabled or unfit, as PyTorch would.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp at pytorch 001f694a (after 2.13),
    sdp_utils_cpp.h of 2.13.0 and 2.14.1, read 2026-11-21; versions by ``_RULES``.
    """
    rules = _rules(question.torch_version)
    for backend in _order(question, rules):
        if _FITS[backend](question, rules):
            return backend
    enabled = [
        name for name in (FLASH, EFFICIENT, CUDNN, MATH) if getattr(question, f"{name}_enabled")
    ]
    raise RecordingError(
        f"no attention kernel fits: enabled are {', '.join(enabled) or 'none'}",
        "Enable SDPBackend.MATH, or another kernel that takes this dtype, mask and head dimension.",
    )


def _rules(torch_version: tuple[int, ...]) -> _Rules:
    """Return the newest rules that a version has reached, or the oldest there are."""
    reached = [rules for rules in _RULES if rules.since <= tuple(torch_version[:2])]
    return reached[-1] if reached else _RULES[0]


def _order(question: AttentionQuestion, rules: _Rules) -> tuple[str, ...]:
    """Return the order in which the backends are asked."""
    if rules.prefers_cudnn and question.capability[0] in {9, 10}:
        return CUDNN, FLASH, EFFICIENT, MATH
    return FLASH, EFFICIENT, MATH, CUDNN


def _fits_flash(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether FlashAttention 2 takes the call."""
    return (
        question.flash_enabled
        and not question.has_mask
        and question.dtype in _HALF
        and _is_between(question.capability, _FUSED_CARDS)
        and question.head_dim == question.value_head_dim <= 256
        and _flash_backward_fits(question)
        and not (question.is_causal and question.query_length != question.key_length)
        and _shapes_fit(question, rules, takes_gqa=True, ignores_stride_of_one=True)
    )


def _flash_backward_fits(question: AttentionQuestion) -> bool:
    """Return whether the backward has enough shared memory for the head dimension."""
    is_small_card = question.capability[0] == 12 or (8, 6) <= question.capability <= (8, 9)
    if not (question.requires_grad and is_small_card) or question.head_dim <= 192:
        return True
    return question.dropout == 0 and question.head_dim > 224


def _fits_efficient(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether the memory-efficient kernel takes the call."""
    dtypes = {"float16", "float32"} | ({"bfloat16"} if question.capability[0] >= 8 else set())
    alignment = efficient_alignment(question.capability, question.dtype)
    return (
        question.efficient_enabled
        and question.dtype in dtypes
        and _is_between(question.capability, _EFFICIENT_CARDS)
        and question.head_dim > 0
        and question.value_head_dim > 0
        and question.head_dim % alignment == 0
        and question.value_head_dim % alignment == 0
        and _shapes_fit(
            question, rules, takes_gqa=rules.efficient_takes_gqa, ignores_stride_of_one=False
        )
    )


def efficient_alignment(capability: tuple[int, int], dtype: str) -> int:
    """Return the multiple that head dimensions must be of for the memory-efficient kernel.

    Source: sdp_utils.cpp, minimum_gemm_alignment.
    """
    is_half = dtype in _HALF
    alignment = 4 if capability[0] >= 8 else 1
    if capability[0] >= 8 or (capability[0] == 7 and is_half):  # tensor cores load 128 bits
        alignment = max(alignment, 8 if is_half else 4)
    return alignment


def _fits_cudnn(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether cuDNN's attention takes the call."""
    return (
        question.cudnn_enabled
        and question.dtype in _HALF
        and _is_between(question.capability, _FUSED_CARDS)
        and not question.mask_requires_grad
        and _cudnn_dropout_fits(question, rules)
        and _cudnn_lengths_fit(question, rules)
        and _cudnn_heads_fit(question, rules)
        and _shapes_fit(question, rules, takes_gqa=True, ignores_stride_of_one=True)
    )


def _cudnn_dropout_fits(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether cuDNN can draw the dropout exactly."""
    return not rules.cudnn_rounds_dropout or (question.dropout * 16).is_integer()


def _cudnn_lengths_fit(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether cuDNN takes the sequence lengths."""
    if question.query_length == 1:
        is_decode_refused = rules.cudnn_skips_decode and question.capability[0] in {10, 11}
        if question.dropout != 0 or is_decode_refused:
            return False
    return question.key_length != 1


def _cudnn_heads_fit(question: AttentionQuestion, rules: _Rules) -> bool:
    """Return whether cuDNN takes the head dimensions, forward and backward."""
    head_dims = (question.head_dim, question.value_head_dim)
    if any(head_dim % 8 for head_dim in head_dims):
        return False
    if max(head_dims) <= 128:
        return True
    if question.capability != (9, 0) and question.capability[0] != 10:
        return False
    if head_dims == (192, 128):
        return True
    if not rules.cudnn_takes_256:
        return False
    return head_dims == (256, 256) or (max(head_dims) <= 256 and not question.requires_grad)


def _shapes_fit(
    question: AttentionQuestion, rules: _Rules, *, takes_gqa: bool, ignores_stride_of_one: bool
) -> bool:
    """Make the checks on shapes that all fused kernels share."""
    has_dims = question.num_dims == 4 or (question.num_dims == 3 and rules.takes_unbatched)
    has_stride = question.has_unit_stride or (ignores_stride_of_one and question.head_dim == 1)
    has_lengths = question.query_length > 0 and question.key_length > 0
    return has_dims and has_stride and has_lengths and _heads_fit(question, rules, takes_gqa)


def _heads_fit(question: AttentionQuestion, rules: _Rules, takes_gqa: bool) -> bool:
    """Return whether the numbers of heads go together."""
    if question.enable_gqa and takes_gqa:
        return question.key_heads > 0 and question.query_heads % question.key_heads == 0
    is_one_head = question.key_heads == 1 and question.query_heads > 0
    return question.query_heads == question.key_heads or (rules.broadcasts_one_head and is_one_head)


def _fits_math(question: AttentionQuestion, rules: _Rules) -> bool:  # noqa: ARG001
    """Return whether the decomposition may be used."""
    return question.math_enabled


def _is_between(
    capability: tuple[int, int], bounds: tuple[tuple[int, int], tuple[int, int]]
) -> bool:
    """Return whether a card lies in a range of compute capabilities, ends included."""
    return bounds[0] <= capability <= bounds[1]


_FITS: dict[str, Callable[[AttentionQuestion, _Rules], bool]] = {
    FLASH: _fits_flash,
    EFFICIENT: _fits_efficient,
    CUDNN: _fits_cudnn,
    MATH: _fits_math,
}
