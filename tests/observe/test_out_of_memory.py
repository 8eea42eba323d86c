"""Real wordings of running out of memory are known; sentences that speak of memory are not."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from memfit.observe.out_of_memory import is_out_of_memory, tells_out_of_memory

WORDINGS = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.56 GiB of",
    "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 7.79 GiB total capacity; 6.20 GiB",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other",
    "CUDA driver error: out of memory",
    "cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCCachingHostAllocator.cpp:278",
    "cudaErrorMemoryAllocation: out of memory",
    "parallel_for failed: cudaErrorMemoryAllocation: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cublas runtime error : resource allocation failed at ../src/THC/THCGeneral.cpp:228",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "CUDA error: CUSPARSE_STATUS_INSUFFICIENT_RESOURCES when calling `cusparseSpMM(handle, opa, opb)`",
    "cuFFT error: CUFFT_ALLOC_FAILED",
    (
        "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1333, unhandled cuda error, "
        "NCCL version 2.18.1\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 'out of memory'"
    ),
    (
        "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error (run with NCCL_DEBUG=INFO for "
        "details), NCCL version 2.27.5\nLast error:\nFailed to CUDA calloc async 608 bytes"
    ),
    (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you "
        "tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "[enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can't allocate memory: you tried",
    (
        "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried to "
        "allocate 137438953472 bytes."
    ),
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "not enough memory: you tried to allocate 35GB. Buy new RAM!",
    "std::bad_alloc",
    "HIP out of memory. Tried to allocate 2.00 GiB (GPU 0; 15.98 GiB total capacity",
    "HIP error: out of memory",
    "MPS backend out of memory (MPS allocated: 17.01 GB, other allocations: 1.02 GB, max allowed",
    "XPU out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 15.91 GiB",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity",
    "Triton Error [CUDA]: out of memory",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.",
    "unable to mmap 52428800 bytes from file </model.safetensors>: Cannot allocate memory (12)",
)


class OutOfResources(RuntimeError):  # noqa: N818 - its name
    """Stand in for Triton's: a kernel that is too large for shared memory."""


class XlaRuntimeError(RuntimeError):
    """Stand in for that of JAX."""


@pytest.mark.parametrize("text", WORDINGS)
def test_every_wording_of_a_library_is_known(text):
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(RuntimeError(f"OutOfMemoryError: {text}")), "as a wrapper writes it"
    wrapped = ValueError("the step failed")
    wrapped.__cause__ = RuntimeError(text)
    assert is_out_of_memory(wrapped)
    in_worker = (
        f"Caught RuntimeError in replica 1 on device 1.\nOriginal Traceback:\nRuntimeError: {text}"
    )
    assert is_out_of_memory(RuntimeError(in_worker))


def test_errors_of_their_own_type_are_known():
    for error in (
        torch.OutOfMemoryError("whatever it says"),
        MemoryError(),
        XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes"),
    ):
        assert is_out_of_memory(error)
    with pytest.raises(MemoryError) as caught:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ran out of memory of the past"),
        RuntimeError("ran out of memory of the past"),
        RuntimeError("out of memory"),
        RuntimeError("line 3 of the log: CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("tokens: ['CUDA', 'out', 'of', 'memory', '.']"),
        RuntimeError("the sentence 'CUDA error: out of memory' has no label"),
        RuntimeError("Expected all tensors to be on the same device"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598"),
        RuntimeError("NCCL error in: x.cpp:1, unhandled system error, connection refused"),
        OutOfResources("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
        OSError(28, "No space left on device"),
        KeyError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_it(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (
            "\n-- Process 1 terminated:\nTraceback:\ntorch.OutOfMemoryError: CUDA out of memory.",
            True,
        ),
        ("-- Process 0\nTraceback\nRuntimeError: CUDA error: out of memory\n", True),
        ("-- Process 0\nTraceback\nMemoryError\n", True),
        ("-- Process 0\nTraceback\nnumpy._core._exceptions._ArrayMemoryError: Unable to\n", True),
        ("-- Process 0\nTraceback\nValueError: CUDA out of memory. is what it said\n", False),
        ("-- Process 0\n  raise ValueError('CUDA out of memory.')\nValueError: x\n", False),
    ],
)
def test_the_traceback_of_another_process_is_read_by_its_last_line(text, is_one):
    assert tells_out_of_memory(text) is is_one
