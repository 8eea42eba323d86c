"""What a rebuilt row of the collection is: something to set up, and the steps that were read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from accuracy.packages import CannotRebuild


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """A row of the collection as something to run."""

    setup: Callable[[], Callable[[], object]]
    num_steps: int = 2
    measured_from_step: int = 0
    notes: tuple[str, ...] = ()
    """What is assumed."""
    readings: tuple[PublishedStep, ...] = ()
    """What the description allows as well; each is recorded, and the interval spans them all."""


def refuse_compiled(fields: Mapping[str, Any]) -> None:
    """Refuse a row of compiled code: the compiler decides what is saved and fused.

    Raises:
        CannotRebuild: if the row says that the model was compiled, or may have been.
    """
    if fields.get("compile"):
        raise CannotRebuild(
            f"its model was compiled ({fields['compile']}), and what inductor keeps and fuses is "
            "not predicted"
        )
