"""Arguments that several commands share: the job, the device, the budget and the plan."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memfit.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.strategies.plan import Plan


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    """Add the job, given as a file and a name in it."""
    text = "a memfit.Job in a Python file, whose own arguments come after --"
    parser.add_argument("job", metavar="FILE.py:NAME", help=text)


def add_device_argument(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """Add ``--device``, once or several times."""
    text = "where it would run: a name from `memfit devices`, or a TOML file of your own"
    if several:
        text += "; several, a pattern such as 'rtx-40*', or all, to compare them"
        parser.add_argument("--device", metavar="NAME", action="append", help=text)
    else:
        parser.add_argument("--device", metavar="NAME", default="cpu", help=text)


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what makes a placement of a device: how many ranks there are, and which one is meant."""
    parser.add_argument(
        "--ranks",
        metavar="N",
        type=int,
        help="predict one of N ranks, which the job shards over or wraps itself",
    )
    parser.add_argument(
        "--rank",
        metavar="R",
        type=int,
        default=0,
        help="the rank that is looked at (default 0, whose shards are the largest)",
    )
    parser.add_argument(
        "--devices-per-node", metavar="M", type=int, help="how many ranks share a machine"
    )


def add_rank_numbers(parser: argparse.ArgumentParser) -> None:
    """Add the numbers of ranks that a plan may be for."""
    parser.add_argument(
        "--ranks",
        metavar="N[,N...]",
        help="share the model and the effective batch over so many ranks, each on such a device; "
        "of several numbers that fit, --objective decides",
    )
    parser.add_argument(
        "--devices-per-node", metavar="M", type=int, help="how many ranks share a machine"
    )
    parser.add_argument(
        "--objective",
        choices=("cheapest", "fastest"),
        help="take the least ranks times seconds of a step (default), or the fewest seconds",
    )


def read_rank_numbers(args: argparse.Namespace) -> dict[str, list[int] | int | str | None]:
    """Return what a plan is told of ranks.

    Raises:
        UsageError: if they are no whole numbers of at least 1.
    """
    if args.ranks is None:
        if args.devices_per_node or args.objective:
            option = "--devices-per-node" if args.devices_per_node else "--objective"
            raise UsageError(f"{option} says something of ranks; say how many with --ranks N.")
        return {}
    words = args.ranks.split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise UsageError(
            f"--ranks takes whole numbers of at least 1, such as 4 or 1,2,4,8, not {args.ranks!r}."
        )
    numbers = [int(word) for word in words]
    found = {"ranks": numbers, "devices_per_node": args.devices_per_node}
    return found if args.objective is None else {**found, "objective": args.objective}


def read_ranks(args: argparse.Namespace) -> dict[str, int | None] | None:
    """Return the words of a placement besides its device; None where no ranks are asked for.

    Raises:
        UsageError: if ranks are described that are not counted, or there is no such rank.
    """
    from memfit.devices.placement import Placement

    if args.ranks is None:
        if args.rank or args.devices_per_node:
            option = "--rank" if args.rank else "--devices-per-node"
            raise UsageError(f"{option} says which of the ranks; say how many with --ranks N.")
        return None
    words = {
        "num_ranks": args.ranks,
        "rank": args.rank,
        "devices_per_node": args.devices_per_node,
    }
    Placement(**words)
    return words


def add_budget_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the budget and what it bounds."""
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="bytes that the step may take, such as 39GiB; by default the device's memory",
    )
    parser.add_argument(
        "--budget-of",
        choices=("allocated", "reserved", "process"),
        help="what the budget bounds: by default allocated on cpu, process on a GPU",
    )


def add_verbose_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--verbose``."""
    parser.add_argument(
        "--verbose", action="store_true", help="show every table, not only what fits one screen"
    )


def add_depth_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--depth``."""
    parser.add_argument(
        "--depth",
        metavar="N",
        type=int,
        help="unfold modules to this level of their names; by default the largest alone",
    )


def add_plan_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--plan``."""
    parser.add_argument("--plan", metavar="FILE", help="run the job under this plan (YAML)")


def load_plan(path: str | None) -> Plan | None:
    """Read the plan file, if one was given."""
    if path is None:
        return None
    from memfit.strategies.plan import Plan

    return Plan.load(path)


@contextmanager
def status(console: Console, text: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done where someone is watching; yields what changes the words."""
    if quiet or not console.is_terminal:
        yield lambda _text: None
        return
    with console.status(text) as shown:
        yield shown.update
