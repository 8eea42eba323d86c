"""What a process occupies on a card, as the driver's management library (NVML) tells it.

NVML is called directly: it comes with every driver, so no package is needed, and asking it makes no
CUDA context. Source: NVML API reference, nvmlDeviceGetMemoryInfo and
nvmlDeviceGetComputeRunningProcesses, read 2026-11-21.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

_LIBRARIES = ("libnvidia-ml.so.1", "nvml.dll")
_SUCCESS = 0
_NOT_AVAILABLE = 2**64 - 1
_MOST_PROCESSES = 256
_TEXT_BYTES = 96


class _MemoryInfo(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """One reading of a card's memory."""

    card_bytes: int
    """What all processes and the driver hold on the card."""
    process_bytes: int | None
    """What this process holds; None where NVML does not see it, as in most containers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardProcess:
    """One process that holds memory of a card."""

    pid: int
    used_bytes: int | None
    """None where the driver does not tell."""


class ManagedCard:
    """One card, seen through NVML."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library = library
        self._handle = handle

    @classmethod
    def find(cls, uuid: str | None = None, library: Any = None) -> ManagedCard | None:
        """Find a card by its identifier, or the only card of the machine; None without NVML.

        Args:
            uuid: As torch or NVML writes it, with or without ``GPU-`` before it.
            library: NVML itself; by default the driver's.
        """
        library = library or _load_library()
        if library is None or library.nvmlInit_v2() != _SUCCESS:
            return None
        handle = ctypes.c_void_p()
        if uuid is not None:
            text = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            status = library.nvmlDeviceGetHandleByUUID(text.encode(), ctypes.byref(handle))
            return cls(library, handle) if status == _SUCCESS else None
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _SUCCESS or count.value != 1:
            return None
        status = library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(0), ctypes.byref(handle))
        return cls(library, handle) if status == _SUCCESS else None

    def occupancy(self) -> Occupancy | None:
        """Read what is occupied now; None where the driver refuses."""
        info = _MemoryInfo()
        if self._library.nvmlDeviceGetMemoryInfo(self._handle, ctypes.byref(info)) != _SUCCESS:
            return None
        return Occupancy(
            card_bytes=info.used,
            process_bytes=self._process_bytes(os.getpid()),
        )

    def driver_version(self) -> str | None:
        """Return the driver's version."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        status = self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(_TEXT_BYTES))
        return text.value.decode("ascii", "replace") if status == _SUCCESS else None

    def processes(self) -> tuple[CardProcess, ...]:
        """List the processes that compute on the card; none where NVML does not see them."""
        ask = getattr(self._library, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None:
            return ()
        count = ctypes.c_uint(_MOST_PROCESSES)
        found = (_ProcessInfo * _MOST_PROCESSES)()
        if ask(self._handle, ctypes.byref(count), found) != _SUCCESS:
            return ()
        return tuple(
            CardProcess(
                pid=each.pid,
                used_bytes=None if each.used_bytes == _NOT_AVAILABLE else int(each.used_bytes),
            )
            for each in found[: count.value]
        )

    def _process_bytes(self, pid: int) -> int | None:
        return next((each.used_bytes for each in self.processes() if each.pid == pid), None)


def _load_library() -> Any:
    """Load the driver's library; None where there is no driver."""
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None
