"""Settings from flags, and how much memory a training run may take. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from memfit.errors import UsageError

from .watching import WatchSettings

T = TypeVar("T")


def read_flags(kind: type[T], args: argparse.Namespace, **given: Any) -> T:
    """Make settings from the flags of the same names; ``given`` are those that no flag is.

    What has a default needs no flag.
    """
    wanted = [each for each in fields(kind) if each.name not in given]  # type: ignore[arg-type]  # settings are data classes
    names = [each.name for each in wanted if _is_needed(each) or hasattr(args, each.name)]
    return kind(**{name: getattr(args, name) for name in names}, **given)


def _is_needed(entry: Field[Any]) -> bool:
    return entry.default is MISSING and entry.default_factory is MISSING


def plain_values(value: Any) -> Any:
    """Return settings as plain JSON values."""
    if is_dataclass(value):
        return {each.name: plain_values(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


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
    forbid: tuple[str, ...] = ()
    """Names of strategies that the planner leaves out."""
    host_bytes: int | None = None
    """What a plan may take of the host beside a GPU; None sets no bound."""
    disk_bytes: int | None = None
    """What a plan may write to disk; None means nothing."""
    num_steps: int | None = None
    """How many the training has, which bounds what planning takes; None sets no bound."""

    @classmethod
    def from_flags(cls, args: argparse.Namespace, require: Sequence[str] = ()) -> Self:
        """Read the flags of `add_memory_flags`.

        Raises:
            UsageError: if flags contradict each other.
        """
        if args.no_gpu and args.device not in (None, "cpu"):
            msg = f"--no-gpu contradicts --device {args.device}; leave one of them out."
            raise UsageError(msg)
        if args.plan and (require or args.allow or args.require):
            msg = (
                "--plan says which strategies to use; leave out --allow, --require and what asks "
                "for others with it."
            )
            raise UsageError(msg)
        required = tuple(dict.fromkeys([*args.require, *require]))
        return cls(
            device="cpu" if args.no_gpu else args.device,
            budget_bytes=args.budget,
            budget_fraction=args.budget_fraction,
            allow=tuple(dict.fromkeys([*args.allow, *required])),
            require=required,
            plan_file=args.plan,
        )

    def budget_beside(self, plain_bytes: int) -> int | None:
        """Return the budget for a job whose plain step takes so much; None without one."""
        if self.budget_fraction is not None:
            return int(self.budget_fraction * plain_bytes)
        return self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemSettings:
    """What every training run is told."""

    memory_settings: MemorySettings
    overwrite: bool
    command: str
    """The command line that repeats the run."""
    watching: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings(SystemSettings):
    """What a run is told that trains in epochs."""

    checkpoint_frequency: int
    """In epochs."""
    resume: str | None
    """A checkpoint's path, ``auto``, or None."""
    num_epochs: int
    batch_size: int
    eval_every: int
    """In epochs."""
    early_stopping_patience: int | None
    random_seed: int
    max_steps: int | None = None
    """Where training ends, in the middle of an epoch too."""
    checkpoint_steps: int | None = None
    """Steps between checkpoints within an epoch; None writes them after epochs alone."""
