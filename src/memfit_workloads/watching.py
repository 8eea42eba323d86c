"""What is looked at while a system is trained, from flags. Imports no torch."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from memfit.listeners import StepListener


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """What is shown of a training, or that it is only planned."""

    dry_run: bool = False
    """Plan, say what was found, and train nothing."""
    find_leaks: bool = False
    tensorboard: Path | None = None
    wandb: bool = False

    @classmethod
    def from_flags(cls, args: argparse.Namespace) -> Self:
        """Read the flags of `add_watching_flags`."""
        return cls(
            dry_run=args.dry_run,
            find_leaks=args.find_leaks,
            tensorboard=args.tensorboard,
            wandb=args.wandb,
        )

    def listeners(self) -> list[StepListener]:
        """Open what listens to the steps.

        Raises:
            MissingExtraError: if a package for that is not installed.
        """
        from memfit.listeners import TensorBoardListener, WandbListener

        found: list[StepListener] = []
        if self.tensorboard is not None:
            found.append(TensorBoardListener(self.tensorboard))
        if self.wandb:
            found.append(WandbListener())
        return found


def add_watching_flags(group: Any) -> None:
    """Declare what is shown of a training."""
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="plan for --device, which need not be here, and train nothing",
    )
    group.add_argument(
        "--find-leaks", action="store_true", help="look for memory that keeps growing"
    )
    group.add_argument(
        "--tensorboard", type=Path, metavar="DIR", help="write every step there for TensorBoard"
    )
    group.add_argument("--wandb", action="store_true", help="log every step to Weights & Biases")
