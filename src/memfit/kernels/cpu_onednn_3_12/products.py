"""Panels and tiles that matrix products and attention take on the CPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from memfit.kernels.cpu_onednn_3_12.convolutions import has_avx512
from memfit.kernels.registration import Operator
from memfit.kernels.tensor_bytes import copied_bytes, num_bytes

_FP32 = 4
_DEEP = 512
_SMALL_PRODUCT = 400
_PANEL_BYTES = 82_752
_SMALL_PANEL_BYTES = 24_576
_DEEP_PANEL_BYTES = 131_904
_TURNED_PANEL_BYTES = 468_096
_TILE_BYTES = 66_176


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> int:
    """Copies of operands where torch multiplies through BLAS, else oneDNN's packed panels."""
    if out.element_size() >= _FP32 or not has_avx512():
        return sum(0 if _is_of_blas(each) else num_bytes(each) for each in (left, right))
    # Packed panels, per thread; more where the left one is turned. Typical of 25 products read off;
    # sizes differ by a factor of two either way with how oneDNN cuts a product up, and thousands of
    # inner entries take up to 1.2 MiB per thread.
    num_threads = torch.get_num_threads()
    if left.shape[-1] < _DEEP:
        return num_threads * _PANEL_BYTES
    if left.stride(-1) == 1:
        return num_threads * _DEEP_PANEL_BYTES
    # Few rows are not shared out among threads, so there the left one is packed once.
    num_packed = num_threads if left.shape[-2] >= _DEEP else 1
    return num_packed * _TURNED_PANEL_BYTES + (num_threads - num_packed) * _TILE_BYTES


def _is_of_blas(matrix: torch.Tensor) -> bool:
    """Return whether BLAS reads a matrix where it lies: by rows or by columns, without overlaps.

    Source: ``addmm_impl_cpu_`` in aten/src/ATen/native/LinearAlgebra.cpp, torch 2.13.
    """
    (num_rows, num_columns), (row, column) = matrix.shape[-2:], matrix.stride()[-2:]
    by_rows = column == 1 and row >= max(1, num_columns)
    return by_rows or (row == 1 and column >= max(1, num_rows))


def _mm(*, self: torch.Tensor, mat2: torch.Tensor, out: torch.Tensor) -> int:
    return _product(self, mat2, out)


def _addmm(*, mat1: torch.Tensor, mat2: torch.Tensor, out: torch.Tensor) -> int:
    return _product(mat1, mat2, out)


def _bmm(*, self: torch.Tensor, mat2: torch.Tensor) -> int:
    return _batched(self, mat2)


def _baddbmm(*, batch1: torch.Tensor, batch2: torch.Tensor) -> int:
    return _batched(batch1, batch2)


def _batched(left: torch.Tensor, right: torch.Tensor) -> int:
    """Copies of one matrix of operands that BLAS cannot read; small products do without it.

    Source: ``bmm_out_or_baddbmm_`` in aten/src/ATen/native/LinearAlgebra.cpp, torch 2.13.
    """
    num_products = left.shape[-2] * left.shape[-1] * right.shape[-1]
    is_packed_by_onednn = left.element_size() < _FP32 and has_avx512()
    if is_packed_by_onednn or num_products < _SMALL_PRODUCT:
        return 0
    copied = (each for each in (left, right) if not _is_of_blas(each))
    return sum(num_bytes(each) // max(1, len(each)) for each in copied)


def _attention(*, query: torch.Tensor, key: torch.Tensor) -> int:
    """One tile of scores, and its running maximum and sum, per thread.

    Source: cpu_flash_attention in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp, torch 2.13.
    """
    rows, columns = _tile(query.shape[2], key.shape[2])
    per_thread = (rows * columns + 2 * rows + rows * int(query.shape[3])) * _FP32
    if query.element_size() < _FP32:
        per_thread += rows * columns * query.element_size()  # the scores again, to multiply with
    return torch.get_num_threads() * per_thread


def _attention_backward(*, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> int:
    """Two tiles, of scores and of their gradients, per thread, and a dense copy of the gradient.

    Source: as for forward; the gradient is made contiguous with tokens before heads.
    """
    rows, columns = _tile(query.shape[2], key.shape[2])
    copied = sum(copied_bytes(grad_out.transpose(1, 2)))
    per_thread = 2 * rows * columns * _FP32
    if query.element_size() < _FP32:
        per_thread += 2 * rows * columns * query.element_size()
        per_thread += _SMALL_PANEL_BYTES if has_avx512() else 0
    return torch.get_num_threads() * per_thread + copied


def _tile(num_queries: int, num_keys: int) -> tuple[int, int]:
    """Return the tile that the attention kernel works on."""
    rows = 256 if num_queries >= 768 else 64 if num_queries >= 192 else 32
    return min(rows, num_queries), min(512, num_keys)


OPERATORS: Mapping[str, Operator] = {
    "baddbmm": Operator(scratch=_baddbmm),
    "bmm": Operator(scratch=_bmm),
    "mm": Operator(scratch=_mm),
    "addmm": Operator(scratch=_addmm),
    "_scaled_dot_product_flash_attention_for_cpu": Operator(scratch=_attention),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Operator(scratch=_attention_backward),
}
