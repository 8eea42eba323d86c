"""Tells running out of memory from other errors: by type, and by how a library begins its message.

Words alone prove nothing: a script may raise a sentence that speaks of memory. So a message counts
only of a ``RuntimeError``, which is what C++ raises, and only as its library writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_TYPES = (torch.OutOfMemoryError, MemoryError)
"""Of torch since 2.5, of numpy and CuPy, and of ``std::bad_alloc``, which pybind11 translates."""
_BEGINNINGS = (
    r"(CUDA|HIP|XPU|NPU|MLU|MUSA|HPU) out of memory\b",
    r"MPS backend out of memory\b",
    r"(CUDA|HIP|XPU|NPU)( driver)? error: (out of memory\b|CUDA_ERROR_OUT_OF_MEMORY)",
    r"cuda runtime error \(2\) ?: out of memory\b",
    r"Triton Error \[\w+\]: +(Code: 2, Messs?age: )?out of memory\b",
    r"([\w() ]{1,60}: )?(cuda|hip)ErrorMemoryAllocation\b",
    # Their libraries: "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`".
    (
        r"([\w ]{1,20} error ?: )?(CUBLAS|HIPBLAS|CUSOLVER|CUSPARSE|CUDNN|MIOPEN|NVRTC)_STATUS_"
        r"(ALLOC_FAILED|INSUFFICIENT_RESOURCES)\b"
    ),
    r"([\w ]{1,20} error ?: )?(CUDNN_STATUS_INTERNAL_ERROR|miopenStatusAllocFailed)",
    r"([\w ]{1,20} error ?: )?(CUFFT_ALLOC|HIPFFT_ALLOC|CURAND_STATUS_ALLOCATION)_FAILED\b",
    r"cublas runtime error ?: resource allocation failed\b",
    r"NCCL [Ee]rror[^\0]*?(out of memory|Cannot allocate memory|Failed to CUDA (m|c)alloc)",
    # The host's: "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't ...".
    r"\[enforce fail at alloc_cpu\.cpp",
    r"(\[enforce fail[^\]\n]*\][^\n]{0,80})?DefaultCPUAllocator: (can't allocate|not enough) mem",
    r"not enough memory: you tried to allocate\b",
    r"unable to mmap \d+ bytes from file [^\n]*: Cannot allocate memory",
    r"(failed|unable) to allocate (memory|\d)",
    r"std::bad_alloc\b",
    r"(level_zero backend|Native API) failed[^\n]*OUT_OF_(DEVICE_|HOST_)?(MEMORY|RESOURCES)",
    r"RESOURCE_EXHAUSTED: ",
)
"""Of CUDA, HIP, XPU, MPS and NPU, their libraries, NCCL, Triton, JAX and the CPU's allocator. Not
among them: Triton's ``OutOfResources``, which is a kernel too large for shared memory."""
_NAMED = r"(?:[\w.]+(?:Error|Exception): )?"
"""A library that wraps an error may put its type before its message."""
_OUT_OF_MEMORY = re.compile(rf"\s*{_NAMED}(?:{'|'.join(_BEGINNINGS)})")
_HANDED_ON = re.compile(
    rf"^(?:[\w.]*OutOfMemoryError\b|(?:[\w.]*\.)?_?(?:Array)?MemoryError\b"
    rf"|[\w.]*RuntimeError: (?:{'|'.join(_BEGINNINGS)}))",
    re.MULTILINE,
)
"""The line of an error in the text of a traceback."""
_TRACEBACK = re.compile(r"Caught \w+ in |\s*-- Process \d+ ")
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
    return any(isinstance(each, _TYPES) or _says_so(each) for each in chain_of(error))


def tells_out_of_memory(traceback: str) -> bool:
    """Return whether the text of another process's traceback ends with running out of memory."""
    return _HANDED_ON.search(traceback) is not None


def has_lost_context(error: BaseException) -> bool:
    """Return whether an error leaves a CUDA context that nothing can be done in any more."""
    return any(isinstance(e, RuntimeError) and _says(e, _LOST_CONTEXT) for e in chain_of(error))


def _says_so(error: BaseException) -> bool:
    """Test whether the message of an error from C++ is one of a library that lacks memory."""
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    if _TRACEBACK.match(said):  # handed on from a loader's worker, a replica or a child
        return tells_out_of_memory(said)
    return _OUT_OF_MEMORY.match(said) is not None


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
