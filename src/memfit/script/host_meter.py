"""Counts the bytes of tensors on the host while a card is the device."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from memfit.trace.lent_memory import memory_of


class HostMeter:
    """Follow the storages of tensors on the host, from the operator that returned them to the end.

    Limits: what NumPy and other libraries take, and memory of worker processes, is not seen.
    """

    def __init__(self) -> None:
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._current_bytes = 0
        self._peak_bytes = 0

    def meet(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage if it is new and lies on the host."""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return
        storage = memory_of(tensor)
        key = storage._cdata
        if key in self._alive:
            return
        num_bytes = storage.nbytes()
        self._alive[key] = (num_bytes, weakref.ref(storage, lambda _: self._died(key)))
        self._current_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def take_peak(self) -> int:
        """Return the highest sum since this was last asked."""
        peak, self._peak_bytes = self._peak_bytes, self._current_bytes
        return peak

    def _died(self, key: int) -> None:
        num_bytes, _ = self._alive.pop(key, (0, None))
        self._current_bytes -= num_bytes
