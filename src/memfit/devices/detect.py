"""What this machine has: Python, torch, memory and CUDA devices.

torch is imported inside the functions that ask it, so that the catalogue can be read without it.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

# A container is ended when it passes this limit, however much memory the host has.
# Source: Linux kernel, Documentation/admin-guide/cgroup-v2.rst, memory.max; cgroup-v1/memory.rst.
_CONTAINER_LIMIT_FILES = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_CONTAINER_USAGE_FILES = (
    Path("/sys/fs/cgroup/memory.current"),
    Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """One CUDA device of this machine, as the driver names it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This machine."""

    python_version: str
    torch_version: str | None
    torch_problem: str | None
    """Why torch cannot be imported; None when it can."""
    num_cpus: int
    memory_bytes: int | None
    """Memory that a process here may use; None where it cannot be read."""
    cuda_devices: tuple[CudaDevice, ...]


def host() -> Host:
    """Look at this machine; a torch that is missing or broken is reported, not raised."""
    torch, problem = _import_torch()
    found = host_without_torch(problem)
    if torch is None:
        return found
    return replace(found, torch_version=str(torch.__version__), cuda_devices=_cuda_devices(torch))


def host_without_torch(torch_problem: str | None) -> Host:
    """Look at this machine without importing torch."""
    return Host(
        python_version=platform.python_version(),
        torch_version=None,
        torch_problem=torch_problem,
        num_cpus=_num_cpus(),
        memory_bytes=host_memory_bytes(),
        cuda_devices=(),
    )


def host_memory_bytes() -> int | None:
    """Read how much memory a process here may use: the host's, or a container's smaller limit.

    Returns:
        Bytes, or None on systems that do not tell.
    """
    limits = [_physical_memory_bytes(), *map(_limit_bytes, _CONTAINER_LIMIT_FILES)]
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


def free_memory_bytes() -> int | None:
    """Read how much memory a process here could still take.

    Returns:
        Bytes, or None on systems that do not tell.
    """
    return min((free for free in (_free_bytes(), _container_free_bytes()) if free), default=None)


def _free_bytes() -> int | None:
    """Read what Linux estimates to be available without swapping; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return 1024 * int(kibibytes[0]) if kibibytes else None


def _container_free_bytes() -> int | None:
    """Subtract what a container uses from its limit; None without a limit."""
    free = []
    for limit_file, usage_file in zip(_CONTAINER_LIMIT_FILES, _CONTAINER_USAGE_FILES, strict=True):
        limit, usage = _limit_bytes(limit_file), _limit_bytes(usage_file)
        if limit is not None and usage is not None:
            free.append(max(1, limit - usage))
    return min(free, default=None)


def _physical_memory_bytes() -> int | None:
    """Read the memory of the machine; None where the system has no such setting (Windows)."""
    try:
        num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return num_bytes if num_bytes > 0 else None


def _limit_bytes(path: Path) -> int | None:
    """Read a container's memory limit; None when there is none (``max``) or no such file."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _num_cpus() -> int:
    """Count the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _import_torch() -> tuple[ModuleType | None, str | None]:
    """Import torch, or say in one line why it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        return None, " ".join(str(error).split())
    return torch, None


def _cuda_devices(torch: ModuleType) -> tuple[CudaDevice, ...]:
    """List the CUDA devices; reading their properties makes no CUDA context."""
    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return tuple(CudaDevice(name=p.name, memory_bytes=p.total_memory) for p in properties)
