"""How much memory a training run may take, as flags say it. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from memfit.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """How much memory training may take, and by which means."""

    device: str | None
    budget_bytes: int | None
    budget_fraction: float | None
    """Of the predicted peak without any strategy."""
    allow: tuple[str, ...]
    require: tuple[str, ...]
    plan_file: Path | None

    @classmethod
    def from_flags(cls, args: argparse.Namespace, require: Sequence[str] = ()) -> Self:
        """Read the flags of `add_memory_flags`.

        Raises:
            UsageError: if flags contradict each other.
        """
        if args.no_gpu and args.device not in (None, "cpu"):
            msg = f"--no-gpu contradicts --device {args.device}; leave one of them out."
            raise UsageError(msg)
        if args.plan and (require or args.allow):
            msg = (
                "--plan says which strategies to use; leave out --allow and what asks for others "
                "with it."
            )
            raise UsageError(msg)
        return cls(
            device="cpu" if args.no_gpu else args.device,
            budget_bytes=args.budget,
            budget_fraction=args.budget_fraction,
            allow=tuple(dict.fromkeys([*args.allow, *require])),
            require=tuple(require),
            plan_file=args.plan,
        )
