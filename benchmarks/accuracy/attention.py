"""Attention as a row asks for it: the implementation, the pinned kernel, and the masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .packages import load_package
from .rows import Row

_VERSION = re.compile(r"(\d+)\.(\d+)")
_MASK_CHECKS = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa")
_LAYS_BIASES_OUT = (5, 20)
"""The transformers that first made position biases contiguous for SDPA (sdpa_attention.py).

Before, the bias of T5 lies with its heads innermost, which no kernel but that of plain operators
takes (check_last_dim_stride_equals_1_dense in aten/src/ATen/native/transformers/sdp_utils_cpp.h).
"""


def attention_implementation(row: Row) -> str | None:
    """Return the attention that a row asks of transformers; None for the library's choice."""
    asked = (row.attention or "").lower()
    if asked.startswith(("transformers default", "default")):
        return None
    if "eager" in asked:
        return "eager"
    # FlashAttention keeps what the flash kernel of SDPA keeps: the output and one sum per row.
    return "sdpa" if "sdpa" in asked or "flash" in asked else None


def pinned_backend(row: Row) -> SDPBackend | None:
    """Get the kernel that scaled dot product attention is pinned to; None where torch chooses."""
    asked = (row.attention or "").upper()
    for sign, backend in (
        ("EFFICIENT", SDPBackend.EFFICIENT_ATTENTION),
        ("FLASH", SDPBackend.FLASH_ATTENTION),
        ("MATH", SDPBackend.MATH),
    ):
        if sign in asked:
            return backend
    return None


def attended(row: Row, device: str, step: Callable[[], None]) -> Callable[[], None]:
    """Run a step with the attention kernel and the masks that the authors' run had.

    The CPU has no pinned kernels; there torch chooses.
    """
    backend = pinned_backend(row) if torch.device(device).type == "cuda" else None
    has_padding = any("attention_mask" in tensor.name for tensor in row.inputs)
    has_masks = row.model_library == "transformers"
    if backend is None and not has_masks:
        return step

    def attended_step() -> None:
        with ExitStack() as stack:
            if backend is not None:
                stack.enter_context(sdpa_kernel(backend))
                stack.enter_context(repeated_heads())
            if has_masks:
                stack.enter_context(masks_as_run(has_padding=has_padding))
                stack.enter_context(biases_as_run(row))
            step()

    return attended_step


@contextmanager
def repeated_heads() -> Iterator[None]:
    """Have attention repeat key and value heads before its kernel, which takes equal numbers."""
    usual = F.scaled_dot_product_attention

    def repeating(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        num_groups = query.size(-3) // key.size(-3)
        if num_groups > 1:
            key = key.repeat_interleave(num_groups, dim=-3)
            value = value.repeat_interleave(num_groups, dim=-3)
            kwargs.pop("enable_gqa", None)
        return usual(query, key, value, *args, **kwargs)

    with patch.object(F, "scaled_dot_product_attention", repeating):
        yield


@contextmanager
def masks_as_run(*, has_padding: bool) -> Iterator[None]:
    """Decide without values what transformers decides from the values of masks and positions.

    No row packs several texts into one sequence. A batch with a mask is padded somewhere, so its
    masks are built; without a mask there are none to build.
    """
    masks = load_package("transformers.masking_utils")
    with ExitStack() as stack:
        if hasattr(masks, "find_packed_sequence_indices"):
            packed = patch.object(masks, "find_packed_sequence_indices", _finds_none)
            stack.enter_context(packed)
        for name in _MASK_CHECKS if has_padding else ():
            if hasattr(masks, name):
                replacement = _unpadded_only(getattr(masks, name))
                stack.enter_context(patch.object(masks, name, replacement))
        yield


@contextmanager
def biases_as_run(row: Row) -> Iterator[None]:
    """Leave position biases as they lie where the row's transformers did."""
    version = _version_of(row, "transformers")
    module = load_package("transformers.integrations.sdpa_attention")
    create = getattr(module, "create_position_bias_mask", None)
    if create is None or version is None or version >= _LAYS_BIASES_OUT:
        yield
        return

    def as_it_lies(*args: Any, **kwargs: Any) -> Any:
        with patch.object(torch.Tensor, "contiguous", lambda tensor: tensor):
            return create(*args, **kwargs)

    with patch.object(module, "create_position_bias_mask", as_it_lies):
        yield


def _version_of(row: Row, library: str) -> tuple[int, int] | None:
    """Return the major and minor version of a library of a row; None where it is not recorded."""
    match = _VERSION.match(row.library_versions.get(library, ""))
    return (int(match[1]), int(match[2])) if match else None


def _finds_none(_position_ids: torch.Tensor) -> None:
    """Find no packed sequences."""


def _unpadded_only(ignores: Callable[..., bool]) -> Callable[..., bool]:
    def ignores_unpadded(padding_mask: Any = None, *args: Any, **kwargs: Any) -> bool:
        return padding_mask is None and ignores(padding_mask, *args, **kwargs)

    return ignores_unpadded
