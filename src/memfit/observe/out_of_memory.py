"""Tells running out of memory from other errors, by type first and then by what they say."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_TYPES = (torch.OutOfMemoryError, MemoryError)
_TEXTS = (
    "out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "defaultcpuallocator: can't allocate memory",
    "failed to allocate memory",
    "unable to allocate",
)
"""In lower case; of CUDA, HIP, XPU, MPS and NPU ("out of memory", with and without a full stop),
their libraries, NCCL, Triton and the CPU's allocator."""
_LOST_CONTEXT = (
    "cuda error: an illegal memory access",
    "cuda error: device-side assert",
    "cuda error: unspecified launch failure",
    "cuda error: misaligned address",
    "cuda error: an illegal instruction",
    "cuda error: uncorrectable ecc",
)
"""After these nothing more can be done on a card in the same process."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or what caused it, is a device or the host running out of memory.

    Not recognised: the host's out-of-memory killer, which gives a process no error at all.
    """
    if has_lost_context(error):
        return False
    return any(
        isinstance(each, _TYPES) or (isinstance(each, RuntimeError) and _says(each, _TEXTS))
        for each in chain_of(error)
    )


def has_lost_context(error: BaseException) -> bool:
    """Return whether an error leaves a CUDA context that nothing can be done in any more."""
    return any(isinstance(e, RuntimeError) and _says(e, _LOST_CONTEXT) for e in chain_of(error))


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    said = str(error).lower()
    return any(text in said for text in texts)


def chain_of(error: BaseException, *, also_handled: bool = False) -> Iterator[BaseException]:
    """Yield an error and what it was raised from; with ``also_handled``, or while handling."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or (current.__context__ if also_handled else None)
