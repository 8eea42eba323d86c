"""The workspaces of cuBLAS and cuBLASLt: how large, whose, and for how long.

A matrix product on a thread and stream takes cuBLAS's workspace of that pair the first time and
keeps it, in the caching allocator. The forward runs on the caller's thread and the backward on
autograd's device thread, each with a handle of its own, so that a training step holds two. What
changed from version to version is data (``data/workspaces.toml``).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from memfit.figures import Certainty
from memfit.kernels.cuda.card import as_version
from memfit.units import KIB

_CONFIG_PART = re.compile(r":([0-9]+):([0-9]+)")
_LT_DTYPES = frozenset({"float64", "float32", "float16", "bfloat16"})
_ALWAYS_LT = frozenset({"aten::_scaled_mm", "aten::_int_mm"})
_ADDMM = frozenset({"aten::addmm", "aten::_addmm_activation"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """One workspace: its buffer, and what it adds to a thread that already holds cuBLAS's."""

    num_bytes: int
    """The buffer, per thread and stream."""
    kept: bool
    """Whether the buffer stays after the call; if not it is a temporary of each call."""
    shared_with_cublas: bool
    """Whether the buffer is cuBLAS's own."""
    certainty: Certainty
    source: str

    @property
    def added_bytes(self) -> int:
        """Return what the buffer adds where cuBLAS's workspace is already held."""
        return 0 if self.shared_with_cublas else self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A matrix product as the dispatcher sees it, for the question which library runs it."""

    operator: str
    """``aten::addmm``, ``aten::mm``, ...; overload suffixes are ignored."""
    dtype: str = "float32"
    left_shape: Sequence[int] = ()
    right_shape: Sequence[int] = ()
    bias_shape: Sequence[int] = ()
    is_bias_contiguous: bool = True
    is_in_place: bool = False
    """Whether the result is the bias itself (``addmm_``)."""
    beta: float = 1.0


def cublas_workspace_bytes(
    capability: tuple[int, int], torch_version: tuple[int, ...], config: str | None = None
) -> int:
    """Return the bytes of cuBLAS's workspace per thread and stream.

    Args:
        capability: Compute capability, such as ``(7, 5)``.
        torch_version: Such as ``(2, 13)``.
        config: The value of ``CUBLAS_WORKSPACE_CONFIG``, such as ``:4096:2:16:8``, if it is set.
    """
    return cublas_workspace(capability, torch_version, config).num_bytes


def cublas_workspace(
    capability: tuple[int, int], torch_version: tuple[int, ...], config: str | None = None
) -> Workspace:
    """Describe cuBLAS's workspace per thread and stream.

    Source: ``data/workspaces.toml``, table ``cublas``.
    """
    rule = _rule("cublas", torch_version)
    is_large = any(_covers(entry, capability) for entry in rule["large_capabilities"])
    default_bytes: int = rule["large_bytes"] if is_large else rule["default_bytes"]
    configured = None if config is None else parse_workspace_config(config)
    return Workspace(
        num_bytes=default_bytes if configured is None else configured,
        kept=rule["kept"],
        shared_with_cublas=False,
        certainty=Certainty(rule["certainty"]),
        source=rule["source"],
    )


def lt_workspace_bytes(
    capability: tuple[int, int], torch_version: tuple[int, ...], *, config: str | None = None
) -> Workspace:
    """Describe cuBLASLt's workspace per thread and stream.

    Args:
        capability: Compute capability, such as ``(7, 5)``.
        torch_version: Such as ``(2, 13)``.
        config: The value of ``CUBLAS_WORKSPACE_CONFIG``, if it is set.

    Source: ``data/workspaces.toml``, table ``cublaslt``. Does not account for
    ``CUBLASLT_WORKSPACE_SIZE`` and ``TORCH_CUBLASLT_UNIFIED_WORKSPACE``, which are taken as unset.
    """
    rule = _rule("cublaslt", torch_version)
    cublas_bytes = cublas_workspace_bytes(capability, torch_version, config)
    own_bytes = cublas_bytes if rule["size"] == "cublas" else rule["default_kib"] * KIB
    return Workspace(
        num_bytes=cublas_bytes if rule["shared"] else own_bytes,
        kept=rule["kept"],
        shared_with_cublas=rule["shared"],
        certainty=Certainty(rule["certainty"]),
        source=rule["source"],
    )


def parse_workspace_config(config: str) -> int | None:
    """Read ``CUBLAS_WORKSPACE_CONFIG`` as bytes: the sum of SIZE KiB times COUNT over its parts.

    None where no part can be read; PyTorch then warns and takes its default.
    """
    parts = _CONFIG_PART.findall(config)
    return sum(int(size) * KIB * int(count) for size, count in parts) if parts else None


def uses_lt(torch_version: tuple[int, ...], product: Product) -> bool:
    """Return whether a matrix product goes through cuBLASLt rather than cuBLAS.

    A linear layer with a bias does in its forward; products without a bias (``mm``, ``bmm``), and
    so the backward of a linear layer, do not. Holds for the default backend, without
    ``DISABLE_ADDMM_CUDA_LT=1`` and TunableOp; the result is taken as row-major. It does not follow
    https://github.com/pytorch/pytorch/pull/170571, which lets through other values of ``beta``.

    Source: aten/src/ATen/native/cuda/Blas.cpp, isInputCompliesAddmmCudaLt, as quoted in
    https://github.com/pytorch/pytorch/pull/163955 and /166307, read 2026-11-21.
    """
    operator = product.operator.partition(".")[0].removesuffix("_")
    if operator in _ALWAYS_LT:
        return True
    if operator not in _ADDMM or product.beta != 1 or product.dtype not in _LT_DTYPES:
        return False
    is_new = torch_version[:2] >= (2, 10)
    checked = (*product.left_shape, *product.right_shape) if is_new else product.right_shape
    if product.is_in_place or any(length <= 1 for length in checked):
        return False
    if _is_fused_bias(product, allows_leading_ones=is_new):
        return True
    # Version 2.11 lets a whole matrix through where an activation is fused as well.
    has_activation = operator == "aten::_addmm_activation"
    return has_activation and torch_version[:2] >= (2, 11) and len(product.bias_shape) == 2


def _is_fused_bias(product: Product, *, allows_leading_ones: bool) -> bool:
    """Return whether the bias is one row that cuBLASLt can add by itself."""
    shape = tuple(product.bias_shape)
    if not shape or not product.is_bias_contiguous or shape[-1] != product.right_shape[-1]:
        return False
    return len(shape) == 1 or (allows_leading_ones and all(length == 1 for length in shape[:-1]))


def _covers(entry: str, capability: tuple[int, int]) -> bool:
    """Match ``9.0`` exactly and ``9`` for every 9.x."""
    wanted = as_version(entry)
    return capability[: len(wanted)] == wanted


def _rule(table: str, torch_version: tuple[int, ...]) -> Mapping[str, Any]:
    """Return the newest rule that a torch version has reached, or the oldest there is."""
    rules: list[dict[str, Any]] = _document()[table]
    reached = [rule for rule in rules if as_version(rule["since"]) <= tuple(torch_version[:2])]
    return reached[-1] if reached else rules[0]


@cache
def _document() -> Mapping[str, Any]:
    """Read the data file."""
    data = resources.files(__package__) / "data" / "workspaces.toml"
    return tomllib.loads(data.read_text(encoding="utf-8"))
