"""The document's memory monitor, for the CPU as well."""

from __future__ import annotations

import resource
import sys

import torch

from memfit.units import format_bytes


def log_memory_usage() -> str:
    """Say how much memory is held now, write it to standard error, and return the line.

    On a GPU: what tensors hold, and what the allocator keeps in its cache. On the CPU: the largest
    size that the process has reached.
    """
    if torch.cuda.is_available():
        allocated = format_bytes(torch.cuda.memory_allocated())
        cached = format_bytes(torch.cuda.memory_reserved())
        line = f"GPU Memory - Allocated: {allocated}, Cached: {cached}"
    else:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts in KiB, macOS in bytes.
        num_bytes = kibibytes if sys.platform == "darwin" else kibibytes * 1024
        line = f"Host memory - Highest: {format_bytes(num_bytes)}"
    sys.stderr.write(line + "\n")
    return line
