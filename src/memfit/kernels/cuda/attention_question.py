"""The question that the choice of an attention kernel and its scratch are asked with."""

from __future__ import annotations

from dataclasses import dataclass

FLASH = "flash"
EFFICIENT = "efficient"
CUDNN = "cudnn"
MATH = "math"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionQuestion:
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
