"""What the flags say of single branches. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfit.errors import UsageError

BRANCHES = ("rgb", "infrared", "kinematics")
"""The networks in front of the fusion, by the names of their modules and of what they look at."""
PARTS = (*BRANCHES, "fusion")
"""What may have a precision of its own."""
FP32, BF16, FP16 = TYPES = ("fp32", "bf16", "fp16")


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchSettings:
    """What is told of single branches."""

    frozen: tuple[str, ...] = ()
    """Not trained: their embeddings are computed once."""
    freeze_from: Path | None = None
    """A checkpoint with the weights of the frozen branches; None for those of the seed."""
    autocast: str = FP32
    """The type of autocast, which is the name of its strategy; fp32 for none."""
    kept: tuple[str, ...] = ()
    """Parts that stay in float32 beside others that do not."""


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
    group.add_argument(
        "--precision",
        nargs="+",
        action="extend",
        metavar="BRANCH=TYPE",
        help=f"{', '.join(TYPES)} for one of {', '.join(PARTS)}, such as fusion=fp32 rgb=bf16; "
        "what is not named has that of --use-bf16 or --use-fp16, else fp32",
    )


def branch_settings(told: Mapping[str, Any]) -> BranchSettings:
    """Read the flags of `add_branch_arguments`, and what the whole model's precision is.

    Raises:
        UsageError: if flags contradict each other.
    """
    asked = told.get("freeze_branches") or ()
    freeze_from = told.get("freeze_from")
    if freeze_from is not None and not asked:
        msg = "--freeze-from has the weights of frozen branches; say which with --freeze-branches."
        raise UsageError(msg)
    frozen = tuple(name for name in BRANCHES if name in asked)
    autocast, kept = _precision(told, frozen)
    return BranchSettings(frozen=frozen, freeze_from=freeze_from, autocast=autocast, kept=kept)


def _precision(told: Mapping[str, Any], frozen: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return the type of autocast, and the parts that are kept out of it."""
    uses_fp16 = told.get("use_fp16") and not told.get("no_fp16")
    if told.get("plan") and told.get("precision"):
        msg = "--plan says what is kept in fp32 (bf16's keep); leave out --precision with it."
        raise UsageError(msg)
    usual = BF16 if told.get("use_bf16") else FP16 if uses_fp16 else FP32
    given = _types_of(told.get("precision") or ())
    for name in given:
        if name in frozen:
            msg = f"--precision {name}: a frozen branch is run once, in fp32. Leave one flag out."
            raise UsageError(msg)
    types = {name: given.get(name, usual) for name in PARTS if name not in frozen}
    short = set(types.values()) - {FP32}
    if len(short) > 1:
        msg = (
            "--precision: found both bf16 and fp16. A step has one short type, because fp16 scales "
            "its loss; take fp32 and one of the two."
        )
        raise UsageError(msg)
    if not short:
        if usual != FP32:
            msg = f"--precision leaves nothing in {usual}. Leave out --use-{usual}, or a part."
            raise UsageError(msg)
        return FP32, tuple(given)  # kept where --allow has the planner choose a short type
    return short.pop(), tuple(name for name, kind in types.items() if kind == FP32)


def _types_of(words: Sequence[str]) -> dict[str, str]:
    """Read words such as ``fusion=fp32``.

    Raises:
        UsageError: if there is no such part or type, or a part has two.
    """
    given: dict[str, str] = {}
    for word in words:
        name, _, kind = word.partition("=")
        if name not in PARTS or kind not in TYPES:
            msg = (
                f"--precision {word}: needed is BRANCH=TYPE with a branch of {', '.join(PARTS)} "
                f"and a type of {', '.join(TYPES)}, such as fusion=fp32."
            )
            raise UsageError(msg)
        if given.setdefault(name, kind) != kind:
            msg = f"--precision says {name}={given[name]} and {word}; leave one of them out."
            raise UsageError(msg)
    return given
