"""What the flags say of single branches. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError

BRANCHES = ("rgb", "infrared", "kinematics")
"""The networks in front of the fusion, by the names of their modules and of what they look at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSettings:
    """What is told of single branches."""

    frozen: tuple[str, ...] = ()
    """Not trained: their embeddings are computed once."""
    freeze_from: Path | None = None
    """A checkpoint with the weights of the frozen branches; None for those of the seed."""


def add_branch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group("single branches")
    group.add_argument(
        "--freeze-branches",
        nargs="+",
        action="extend",
        choices=BRANCHES,
        metavar="BRANCH",
        help=f"do not train these of {', '.join(BRANCHES)}: their embeddings are computed once and "
        "kept in the run folder, and the rest is trained on them (another training problem)",
    )
    group.add_argument(
        "--freeze-from",
        type=Path,
        metavar="FILE",
        help="checkpoint whose weights the frozen branches have, such as another run's "
        "best_model.pt; default: untrained weights of --random-seed",
    )


def branch_settings(told: Mapping[str, Any]) -> BranchSettings:
    """Read the flags of `add_branch_arguments`.

    Raises:
        UsageError: if flags contradict each other.
    """
    asked = told.get("freeze_branches") or ()
    freeze_from = told.get("freeze_from")
    if freeze_from is not None and not asked:
        msg = "--freeze-from has the weights of frozen branches; say which with --freeze-branches."
        raise UsageError(msg)
    frozen = tuple(name for name in BRANCHES if name in asked)
    return BranchSettings(frozen=frozen, freeze_from=freeze_from)
