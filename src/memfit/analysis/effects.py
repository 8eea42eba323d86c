"""What a step changes besides gradients, parameters and optimizer states, as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class EffectKind(StrEnum):
    """How a step changes something that outlives it."""

    TENSOR = "tensor"
    """An operator writes to a tensor, or its shape, memory or flags change."""
    ATTRIBUTE = "attribute"
    """A name holds another plain value: a counter."""
    CONTAINER = "container"
    """A list, dict or the like holds other things."""
    BINDING = "binding"
    """A name means another object: a hidden state."""
    HOOK = "hook"
    """A hook comes or goes."""
    GENERATOR = "generator"
    """Random numbers are drawn."""


_SENTENCES: Mapping[EffectKind, str] = {
    EffectKind.TENSOR: "writes to {what}",
    EffectKind.ATTRIBUTE: "sets {what}",
    EffectKind.CONTAINER: "changes what {what} holds",
    EffectKind.BINDING: "sets {what} to another object",
    EffectKind.HOOK: "changes the hooks in {what}",
    EffectKind.GENERATOR: "draws random numbers from {what}",
}
GLOBAL_GENERATOR = "global generator"
"""The name of a library's generator that belongs to nobody; its owner is the library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One thing that every step changes."""

    owner: str
    """What holds it: ``model.encoder``, ``optimizer``, ``loss``, a module of code, ``torch``."""
    name: str
    kind: EffectKind
    source_line: str = ""
    """Where, as ``file.py:12``; empty where that is not known."""
    depends_on_batch: bool | None = None
    """Whether other samples, or more of them, would change it otherwise; None: not known."""
    is_restorable: bool = True
    """Whether it can be put back as it was."""
    detail: str = ""
    """What it was and what it became in the recorded step, where that is short."""

    @property
    def full_name(self) -> str:
        """Name owner and thing as one would write it."""
        if self.is_global_draw:
            return f"{self.owner}'s {self.name}"
        if not self.name or self.name.startswith(("[", " ")):
            return f"{self.owner}{self.name}"
        return f"{self.owner}.{self.name}"

    @property
    def is_tensor(self) -> bool:
        """Return whether it is a tensor that is written."""
        return self.kind is EffectKind.TENSOR

    @property
    def is_global_draw(self) -> bool:
        """Return whether random numbers come from a library's own generator."""
        return self.kind is EffectKind.GENERATOR and self.name == GLOBAL_GENERATOR

    def sentence(self) -> str:
        """Say it in one sentence."""
        done = _SENTENCES[self.kind].format(what=self.full_name)
        where = f" ({self.source_line})" if self.source_line else ""
        ends = []
        if self.depends_on_batch:
            ends.append("it depends on the batch")
        if not self.is_restorable:
            ends.append("it cannot be put back")
        end = f"; {' and '.join(ends)}" if ends else ""
        return f"The step {done}{where}{end}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Effects:
    """Everything that a step changes besides gradients, parameters and optimizer states."""

    effects: tuple[Effect, ...] = ()
    unseen: tuple[str, ...] = ()
    """Sentences about what can be reached and changed without being seen: files, iterators."""

    def __iter__(self) -> Iterator[Effect]:
        return iter(self.effects)

    def __len__(self) -> int:
        return len(self.effects)

    @property
    def draws(self) -> tuple[Effect, ...]:
        """Return the draws of random numbers."""
        return tuple(each for each in self.effects if each.kind is EffectKind.GENERATOR)

    @property
    def writes(self) -> tuple[Effect, ...]:
        """Return everything but the draws of random numbers."""
        return tuple(each for each in self.effects if each.kind is not EffectKind.GENERATOR)

    def of(self, owner: str) -> tuple[Effect, ...]:
        """Return the effects on one owner and on what lies below it.

        Args:
            owner: as in ``Effect.owner``, such as ``model.encoder``.
        """
        below = (f"{owner}.", f"{owner}[")
        return tuple(
            each for each in self.effects if each.owner == owner or each.owner.startswith(below)
        )

    def notes(self, most: int = 8) -> Sequence[str]:
        """Return what a step also changes, in clauses without a full stop; draws of torch left out.

        Args:
            most: how many are named.
        """
        told = [each for each in self.effects if not (each.is_global_draw and not each.detail)]
        found = [each.sentence().rstrip(".").replace("The step", "This step also", 1)
                 for each in told[:most]]  # fmt: skip
        if len(told) > most:
            found.append(f"This step also changes {len(told) - most} things more")
        return (*found, *(each.rstrip(".") for each in self.unseen[:most]))

    def sentences(self) -> Sequence[str]:
        """Say each in a sentence, then what could not be seen."""
        return (*(effect.sentence() for effect in self.effects), *self.unseen)
