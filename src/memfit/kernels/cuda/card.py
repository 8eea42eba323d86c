"""The virtual card: what the recording of a step has to know of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

_LIKELY_MULTIPROCESSORS = 108
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The facts of a CUDA device, and of the torch on it, that kernels choose their way by.

    ``capability`` is the CUDA compute capability; ``torch_version`` is the torch that would run.
    """

    capability: tuple[int, int]
    torch_version: tuple[int, ...]
    num_multiprocessors: int | None = None
    """None where it is not known: what depends on it is then a guess."""
    title: str = ""
    memory_bytes: int = 0
    cublas_workspace_bytes: int | None = None
    """Measured on the card; None takes the rule for its capability and torch version."""
    allow_tf32: bool = True
    """``torch.backends.cudnn.allow_tf32``, on by default."""

    @property
    def likely_multiprocessors(self) -> int:
        """Return the number of multiprocessors; that of a large card where it is not known."""
        return self.num_multiprocessors or _LIKELY_MULTIPROCESSORS

    @property
    def threads_per_multiprocessor(self) -> int:
        """Return the threads that one multiprocessor keeps in flight.

        Source: CUDA C++ Programming Guide, technical specifications per compute capability.
        """
        if self.capability[0] == 12:
            return 1536
        return _THREADS_PER_MULTIPROCESSOR.get(self.capability, 2048)


def as_version(text: str) -> tuple[int, ...]:
    """Read a torch version or compute capability as data files write it: ``2.13`` is (2, 13)."""
    return tuple(int(part) for part in text.split("."))
