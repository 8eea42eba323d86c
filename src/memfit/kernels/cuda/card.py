"""The virtual card: what the recording of a step has to know of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeVar

Made = TypeVar("Made")

_LIKELY_MULTIPROCESSORS = 108
_THREADS_PER_MULTIPROCESSOR = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536}
_ALWAYS_COUNT = ("capability", "torch_version", "allow_tf32")
_KNOWS = "knows_multiprocessors"
_COUNT_WHERE_ASKED = frozenset(
    ("title", "memory_bytes", "num_multiprocessors", "cublas_workspace_bytes")
)
"""What a recording is bound to only where something has looked at it."""


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
    asked: set[str] = field(default_factory=set, compare=False, repr=False)
    """What the code on the card, or a kernel's rule, has looked at so far."""
    made_of_multiprocessors: list[tuple[Callable[[int], Any], Any]] = field(
        default_factory=list, compare=False, repr=False
    )
    """What rules have made of the number of multiprocessors: each rule, and what it gave."""

    if not TYPE_CHECKING:  # checkers look at the fields

        def __getattribute__(self, name: str) -> Any:
            """Note which facts are looked at."""
            if name in _COUNT_WHERE_ASKED:
                object.__getattribute__(self, "asked").add(name)
            return object.__getattribute__(self, name)

    def __getstate__(self) -> list[Any]:
        """Return what is pickled, without looking at it."""
        return [object.__getattribute__(self, each.name) for each in fields(self)]

    def by_multiprocessors(self, rule: Callable[[int], Made]) -> Made:
        """Return what a rule makes of the likely number of multiprocessors, and note both.

        Another card may have more of them and come to the same.
        """
        made = rule(self._multiprocessors())
        self.made_of_multiprocessors.append((rule, made))
        return made

    @property
    def knows_multiprocessors(self) -> bool:
        """Return whether their number is known."""
        self.asked.add(_KNOWS)
        return object.__getattribute__(self, "num_multiprocessors") is not None

    def answers_as(self, other: Card) -> bool:
        """Return whether another card would have answered alike whatever this one was asked."""
        get = object.__getattribute__
        names = (*_ALWAYS_COUNT, *(self.asked - {_KNOWS}))
        if any(get(self, name) != get(other, name) for name in names):
            return False
        is_known = [get(each, "num_multiprocessors") is not None for each in (self, other)]
        if _KNOWS in self.asked and is_known[0] != is_known[1]:
            return False
        number = other._multiprocessors()
        return number == self._multiprocessors() or all(
            rule(number) == made for rule, made in self.made_of_multiprocessors
        )

    def _multiprocessors(self) -> int:
        return object.__getattribute__(self, "num_multiprocessors") or _LIKELY_MULTIPROCESSORS

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
