"""Make ``python -m memfit_workloads.trident`` the same as ``memfit train trident``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from memfit.cli.main import main

_OF_LAUNCHERS = ("--local_rank", "--local-rank")


def words_from(words: Sequence[str]) -> list[str]:
    """Leave out the rank that launchers add to the words; the environment has it too."""
    kept: list[str] = []
    is_value = False
    for word in words:
        if is_value:
            is_value = False
        elif word in _OF_LAUNCHERS:
            is_value = True
        elif word.partition("=")[0] not in _OF_LAUNCHERS:
            kept.append(word)
    return kept


if __name__ == "__main__":
    sys.exit(main(["train", "trident", *words_from(sys.argv[1:])]))
