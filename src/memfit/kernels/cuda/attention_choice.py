"""Which kernel ``scaled_dot_product_attention`` would choose on a CUDA device.

PyTorch asks the backends in an order, each through a list of checks, and takes the first that
passes. The same checks are written here on shapes and flags alone. What changed from version to
version is the table ``_RULES``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memfit.errors import RecordingError

FLASH = "flash"
EFFICIENT = "efficient"
CUDNN = "cudnn"
MATH = "math"

_HALF = frozenset({"float16", "bfloat16"})
_FUSED_CARDS = ((8, 0), (12, 1))
_EFFICIENT_CARDS = ((5, 0), (12, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of ``scaled_dot_product_attention``, as the choice of a kernel needs it.

    Queries are ``[batch, query_heads, query_length, head_dim]``, keys ``[batch, key_heads,
    key_length, head_dim]``, values ``[batch, key_heads, key_length, value_head_dim]``; ``dtype`` is
    that of all three, after autocast.
    """

    capability: tuple[int, int]
    torch_version: tuple[int, ...]
    dtype: str
    batch: int
    query_heads: int
    key_heads: int
    query_length: int
    key_length: int
    head_dim: int
    value_head_dim: int
    has_mask: bool = False
    mask_requires_grad: bool = False
    is_causal: bool = False
    dropout: float = 0.0
    enable_gqa: bool = False
    requires_grad: bool = True
    """Whether a gradient will be taken of queries, keys or values, with gradients enabled."""
    flash_enabled: bool = True
    efficient_enabled: bool = True
    cudnn_enabled: bool = True
    math_enabled: bool = True
    num_dims: int = 4
    """Dimensions of the queries; 3 where the batch dimension is absent."""
    has_unit_stride: bool = True
    """Whether the last dimension of queries, keys, values and mask has stride 1."""


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


def choose_attention(call: AttentionCall) -> str:
    """Choose the kernel: ``flash``, ``efficient``, ``cudnn`` or ``math``.

    Does not account for nested tensors, an order set by ``sdpa_kernel(..., set_priority=True)``,
    FlashAttention 3, deterministic algorithms, masks that do not broadcast, storage offsets that
    are not aligned, or a wheel with another cuDNN than its version ships.

    Raises:
        RecordingError: if every kernel is disabled or unfit, as PyTorch would.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp at pytorch 001f694a (after 2.13),
    sdp_utils_cpp.h of 2.13.0 and 2.14.1, read 2026-11-21; versions by ``_RULES``.
    """
    rules = _rules(call.torch_version)
    for backend in _order(call, rules):
        if _FITS[backend](call, rules):
            return backend
    enabled = [name for name in (FLASH, EFFICIENT, CUDNN, MATH) if getattr(call, f"{name}_enabled")]
    raise RecordingError(
        f"no attention kernel fits: enabled are {', '.join(enabled) or 'none'}",
        "Enable SDPBackend.MATH, or another kernel that takes this dtype, mask and head dimension.",
    )


def _rules(torch_version: tuple[int, ...]) -> _Rules:
    """Return the newest rules that a version has reached, or the oldest there are."""
    reached = [rules for rules in _RULES if rules.since <= tuple(torch_version[:2])]
    return reached[-1] if reached else _RULES[0]


def _order(call: AttentionCall, rules: _Rules) -> tuple[str, ...]:
    """Return the order in which the backends are asked."""
    if rules.prefers_cudnn and call.capability[0] in {9, 10}:
        return CUDNN, FLASH, EFFICIENT, MATH
    return FLASH, EFFICIENT, MATH, CUDNN


def _fits_flash(call: AttentionCall, rules: _Rules) -> bool:
    """Return whether FlashAttention 2 takes the call."""
    return (
        call.flash_enabled
        and not call.has_mask
        and call.dtype in _HALF
        and _is_between(call.capability, _FUSED_CARDS)
        and call.head_dim == call.value_head_dim <= 256
        and _flash_backward_fits(call)
        and not (call.is_causal and call.query_length != call.key_length)
        and _shapes_fit(call, rules, takes_gqa=True, ignores_stride_of_one=True)
    )


def _flash_backward_fits(call: AttentionCall) -> bool:
    """Return whether the backward has enough shared memory for the head dimension."""
    is_small_card = call.capability[0] == 12 or (8, 6) <= call.capability <= (8, 9)
    if not (call.requires_grad and is_small_card) or call.head_dim <= 192:
        return True
    return call.dropout == 0 and call.head_dim > 224


def _fits_efficient(call: AttentionCall, rules: _Rules) -> bool:
    """Return whether the memory-efficient kernel takes the call."""
    dtypes = {"float16", "float32"} | ({"bfloat16"} if call.capability[0] >= 8 else set())
    alignment = efficient_alignment(call.capability, call.dtype)
    return (
        call.efficient_enabled
        and call.dtype in dtypes
        and _is_between(call.capability, _EFFICIENT_CARDS)
        and call.head_dim > 0
        and call.value_head_dim > 0
        and call.head_dim % alignment == 0
        and call.value_head_dim % alignment == 0
        and _shapes_fit(
            call, rules, takes_gqa=rules.efficient_takes_gqa, ignores_stride_of_one=False
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


def _fits_cudnn(call: AttentionCall, rules: _Rules) -> bool:
    """Return whether cuDNN's attention takes the call."""
    return (
        call.cudnn_enabled
        and call.dtype in _HALF
        and _is_between(call.capability, _FUSED_CARDS)
        and not call.mask_requires_grad
        and (not rules.cudnn_rounds_dropout or (call.dropout * 16).is_integer())
        and _cudnn_lengths_fit(call, rules)
        and _cudnn_heads_fit(call, rules)
        and _shapes_fit(call, rules, takes_gqa=True, ignores_stride_of_one=True)
    )


def _cudnn_lengths_fit(call: AttentionCall, rules: _Rules) -> bool:
    """Return whether cuDNN takes the sequence lengths."""
    if call.query_length == 1:
        is_decode_refused = rules.cudnn_skips_decode and call.capability[0] in {10, 11}
        if call.dropout != 0 or is_decode_refused:
            return False
    return call.key_length != 1


def _cudnn_heads_fit(call: AttentionCall, rules: _Rules) -> bool:
    """Return whether cuDNN takes the head dimensions, forward and backward."""
    head_dims = (call.head_dim, call.value_head_dim)
    if any(head_dim % 8 for head_dim in head_dims):
        return False
    if max(head_dims) <= 128:
        return True
    if call.capability != (9, 0) and call.capability[0] != 10:
        return False
    if head_dims == (192, 128):
        return True
    if not rules.cudnn_takes_256:
        return False
    return head_dims == (256, 256) or (max(head_dims) <= 256 and not call.requires_grad)


def _shapes_fit(
    call: AttentionCall, rules: _Rules, *, takes_gqa: bool, ignores_stride_of_one: bool
) -> bool:
    """Make the checks on shapes that all fused kernels share."""
    has_dims = call.num_dims == 4 or (call.num_dims == 3 and rules.takes_unbatched)
    has_stride = call.has_unit_stride or (ignores_stride_of_one and call.head_dim == 1)
    has_lengths = call.query_length > 0 and call.key_length > 0
    return has_dims and has_stride and has_lengths and _heads_fit(call, rules, takes_gqa)


def _heads_fit(call: AttentionCall, rules: _Rules, takes_gqa: bool) -> bool:
    """Return whether the numbers of heads go together."""
    if call.enable_gqa and takes_gqa:
        return call.key_heads > 0 and call.query_heads % call.key_heads == 0
    is_one_head = call.key_heads == 1 and call.query_heads > 0
    return call.query_heads == call.key_heads or (rules.broadcasts_one_head and is_one_head)


def _fits_math(call: AttentionCall, rules: _Rules) -> bool:  # noqa: ARG001
    """Return whether the decomposition may be used."""
    return call.math_enabled


def _is_between(
    capability: tuple[int, int], bounds: tuple[tuple[int, int], tuple[int, int]]
) -> bool:
    """Return whether a card lies in a range of compute capabilities, ends included."""
    return bounds[0] <= capability <= bounds[1]


_FITS: dict[str, Callable[[AttentionCall, _Rules], bool]] = {
    FLASH: _fits_flash,
    EFFICIENT: _fits_efficient,
    CUDNN: _fits_cudnn,
    MATH: _fits_math,
}
