"""What ``--table`` asks for, as data. Imports no torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

from memfit.errors import UsageError

RECORDED, LIVE = "recorded", "live"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSettings:
    """The table instead of a training run."""

    is_live: bool
    """Computed here instead of read."""


def table_settings(
    args: argparse.Namespace, add_arguments: Callable[[argparse.ArgumentParser], None]
) -> TableSettings | None:
    """Return what the table is told; None where a training run is asked for.

    Raises:
        UsageError: if flags of a training run are given as well: the table has sizes of its own.
    """
    if args.table is None:
        return None
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    for action in parser._actions:
        if action.dest != "table" and getattr(args, action.dest) != action.default:
            flag = max(action.option_strings, key=len)
            msg = (
                f"--table shows figures at sizes of its own and trains nothing, so {flag} does "
                "nothing beside it. Leave it out; --json may be given."
            )
            raise UsageError(msg)
    return TableSettings(is_live=args.table == LIVE)
