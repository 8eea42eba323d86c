"""Faults inside of a process: operators that find no memory, clocks that jump, errors of a loss."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chaos_runs.stories import (
    OF_CLOCK,
    OF_ERROR,
    OF_MEMORY,
    OF_RANK,
    OF_STALL,
    Fault,
)

STALL_SECONDS = 0.5
_WORDS = {
    "cuda": "CUDA out of memory. Tried to allocate 20.00 MiB.",
    "cpu allocator": (
        "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 4096 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "cublas": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
}
_YEAR_SECONDS = 365.0 * 24 * 3600
_JUMPS = {
    "year back": -_YEAR_SECONDS,
    "year on": _YEAR_SECONDS,
    "hour back": -3600.0,
}


class MadeUpError(Exception):
    """Be an error of the user's own code."""


def out_of_memory(wording: str, where: str) -> BaseException:
    """Return an error as a library words it."""
    if wording == "python":
        return MemoryError(f"made up at {where}")
    if wording == "type":
        return torch.OutOfMemoryError(f"CUDA out of memory, made up at {where}")
    return RuntimeError(f"{_WORDS[wording]} (made up at {where})")


class AtOperators(TorchDispatchMode):
    """Have faults befall operators, by their number among all that run inside.

    Args:
        faults: by the number of an operator, from 1.
    """

    def __init__(self, faults: Mapping[int, Fault]) -> None:
        super().__init__()
        self._faults = faults
        self.seen = 0
        self.struck: list[str] = []
        """Where faults were met."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return func(*args, **(kwargs or {}))
        self.seen += 1
        fault = self._faults.get(self.seen)
        if fault is None:
            return func(*args, **(kwargs or {}))
        if fault.is_late:
            func(*args, **(kwargs or {}))
        self.struck.append(f"{fault.kind} at operator {self.seen}, {func}")
        befall(fault, str(func))
        return func(*args, **(kwargs or {}))


def befall(fault: Fault, where: str) -> None:
    """Have a fault happen here."""
    if fault.kind == OF_MEMORY:
        raise out_of_memory(fault.how, where)
    if fault.kind == OF_ERROR:
        raise MadeUpError(f"an error of the user's own, at {where}")
    if fault.kind == OF_RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    if fault.kind == OF_STALL:
        time.sleep(STALL_SECONDS)
    if fault.kind == OF_CLOCK:
        jump(fault.how)


AT_OPERATORS = {OF_MEMORY, OF_ERROR, OF_RANK, OF_STALL, OF_CLOCK}


def at_numbers(faults: Iterable[Fault], num_operators: int) -> dict[int, Fault]:
    """Say at which operator each fault happens."""
    return {
        1 + int(fault.at * num_operators): fault for fault in faults if fault.kind in AT_OPERATORS
    }


_CLOCKS: dict[str, Callable[[], Any]] = {
    name: getattr(time, name)
    for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter")
}


def jump(how: str) -> None:
    """Have clocks jump: the wall's in both directions, the others only on, as they do."""
    wall, steady = _CLOCKS["time"](), 0.0
    shift = _JUMPS.get(how, 0.0)
    if how == "to the epoch":
        shift = -wall
    if how == "to 2100":
        shift = 130 * _YEAR_SECONDS - wall
    if how == "asleep":
        shift = steady = 30_000.0
    if how == "still":
        held = {name: clock() for name, clock in _CLOCKS.items()}
        for name, value in held.items():
            setattr(time, name, lambda value=value: value)
        return
    for name, clock in _CLOCKS.items():
        seconds = shift if name.startswith("time") else steady
        step = int(seconds * 1e9) if name.endswith("_ns") else seconds
        setattr(time, name, lambda clock=clock, step=step: clock() + step)
