"""``memfit plan``: the fastest way to fit a budget that keeps the results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from memfit.errors import NoPlanFitsError, UsageError

from .command import Command, add_json_argument
from .job_arguments import (
    add_budget_arguments,
    add_device_argument,
    add_job_argument,
    add_rank_numbers,
    add_verbose_argument,
    read_rank_numbers,
)
from .planning_progress import planning_progress

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.devices.spec import Device
    from memfit.job import BuildsTrainerError, Job
    from memfit.planner.cache.recording_cache import RecordingCache
    from memfit.planner.result.planning_result import PlanningResult

    from .kept_plan import KeptPlan
    from .planning_progress import PlanningProgress

_ASKED = (
    *("device", "budget", "budget_of", "host_memory", "disk"),
    *("allow", "require", "forbid", "measure", "thorough", "prove", "seconds"),
)
"""What `memfit.plan` is given by the same names."""
_KEPT = "{} recordings were kept from earlier calls; --no-cache makes all of them again."
_ANSWERED = "An earlier call has found this plan; --no-cache looks for it again."


class PlanCommand:
    """Find the fastest plan that fits a budget and keeps the results.

    The effective batch size never changes. Strategies that change results (bf16) are used only if
    they are allowed by name. The plan's peak comes from recording the step with the plan applied.
    Nothing is trained; NAME may be a transformers.Trainer or a Lightning (Trainer, module, data) as
    well, or a function that returns one. With --ranks the job's model and effective batch are
    shared over ranks, each on such a device with such a budget. Micro-batches are
    used where the recorded step proves that they keep the results; --prove tries on a real batch
    what could not be followed, and --measure runs a few steps. The exit code is 3 when no plan
    fits; the message names the smallest peak, and --html shows what was tried.
    """

    example = "memfit plan examples/transformer.py:job --budget 220MiB --save plan.yaml"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, the device, the budget and what may change."""
        add_job_argument(parser)
        add_device_argument(parser)
        add_rank_numbers(parser)
        add_budget_arguments(parser)
        choices = {
            "--allow": "allow a strategy that changes results, such as bf16, or a class of them, "
            "such as approximate",
            "--require": "a strategy that the plan must have",
            "--forbid": "a strategy that the plan may not have",
        }
        for flag, text in choices.items():
            again = f"{text}; may be repeated"
            parser.add_argument(flag, metavar="NAME", action="append", default=[], help=again)
        _add_room_arguments(parser)
        parser.add_argument("--save", metavar="FILE", help="write the plan as YAML")
        parser.add_argument(
            "--pareto", metavar="FILE.png", help="draw the trade of memory against time"
        )
        parser.add_argument("--html", metavar="FILE", help="write a page about the plan")
        add_verbose_argument(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Plan, show why, and save."""
        from memfit.devices.catalogue import load_device
        from memfit.planner.search.patience import Patience

        from .kept_plan import KeptPlan
        from .plan_output import check_can_write, form_of, output_of, write_what_was_tried

        Patience(args.seconds)  # refuses a bound on time that is none, needed or not
        device = load_device(args.device)
        kept, form = KeptPlan(args, device), form_of(args, console)
        with kept.used():
            output, note = kept.output(form), _ANSWERED
            if output is None:
                check_can_write(args)
                found = kept.result()
                try:
                    plan = _new_plan(args, console, device, kept) if found is None else found
                except NoPlanFitsError as error:
                    write_what_was_tried(error, args, console)
                    raise
                output = output_of(plan, args, console)
                kept.keep(plan, form, output)
                note = _num_kept(kept.cache) if found is None else _ANSWERED
        output.write(console)
        if note and not args.json:
            console.print(note, markup=False)
        return 0


COMMAND: Command = PlanCommand()


def _add_room_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what else there is besides the device's memory, and how hard to look for plans."""
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="how much of the host's memory may be taken beside a GPU; by default any amount",
    )
    parser.add_argument(
        "--disk",
        metavar="SIZE",
        help="how much may be written to disk; by default nothing",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time operators and the fastest plans by running a few steps here",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="search large models as far as small ones, which takes minutes",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help="take the fastest plan that is found within so many seconds, or the first that is "
        "found after them; Ctrl-C takes the fastest so far as well. With --measure six tenths are "
        "for the search, the rest for running plans",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="record in so many processes; by default in one for each free core, at most four",
    )
    parser.add_argument(
        "--no-cache",
        action="store_true",
        help="record everything again, and keep nothing for the next call",
    )
    parser.add_argument(
        "--prove",
        action=argparse.BooleanOptionalAction,
        help="try on a real batch, here, whether micro-batches keep the results where that could "
        "not be proved; by default where it takes seconds",
    )


def _new_plan(
    args: argparse.Namespace, console: Console, device: Device, kept: KeptPlan
) -> PlanningResult:
    """Look for a plan; where that is interrupted before one is found, take one that is known."""
    known = kept.fastest_fitting()
    try:
        with planning_progress(console, "importing the job", quiet=args.json) as seen:
            if known is not None:
                seen.known(known)
            return _searched(args, device, seen, kept.cache)
    except KeyboardInterrupt:
        fallback = None if known is None else kept.fallback()
        if fallback is None:
            raise
        return fallback


def _searched(
    args: argparse.Namespace, device: Device, seen: PlanningProgress, cache: RecordingCache | None
) -> PlanningResult:
    """Import the job, and look for a plan."""
    from memfit.planner.garbage import collecting_rarely

    with collecting_rarely():
        from memfit.job import BuildsTrainerError, load_job
        from memfit.planner import planning  # noqa: F401 - it takes a second
        from memfit.prediction.importing import imported_on

    try:
        with collecting_rarely():
            job = imported_on(device, load_job, args.job)
        return _plan(job, args, seen, cache)
    except BuildsTrainerError as found:
        return _plan_of_trainer(found, args, seen)


def _num_kept(cache: RecordingCache | None) -> str:
    """Say how much did not have to be recorded."""
    return _KEPT.format(cache.num_found) if cache is not None and cache.num_found else ""


def _plan(
    job: Job, args: argparse.Namespace, seen: PlanningProgress, cache: RecordingCache | None
) -> PlanningResult:
    """Plan, saying which plan is being recorded where someone is watching."""
    from memfit.planner.planning import plan
    from memfit.planner.search.aside import usable_processes

    wanted: dict[str, Any] = {name: getattr(args, name) for name in _ASKED}
    wanted |= read_rank_numbers(args)
    processes = usable_processes() if args.processes is None else args.processes
    return plan(
        job,
        **wanted,
        progress=seen.recording,
        on_better=seen.better,
        processes=processes,
        cache=cache,
    )


def _plan_of_trainer(
    found: BuildsTrainerError, args: argparse.Namespace, seen: PlanningProgress
) -> PlanningResult:
    """Plan for a framework's trainer; Lightning's comes with its module and data.

    Raises:
        BuildsTrainerError: if it is known by its name alone.
    """
    if found.trainer is None:
        raise found
    if args.ranks is not None:
        msg = (
            "--ranks plans a memfit.Job over ranks, and this is a framework's trainer, which "
            "starts its own. Leave --ranks out, or describe the step as a memfit.Job."
        )
        raise UsageError(msg)
    wanted: dict[str, Any] = {name: getattr(args, name) for name in _ASKED}
    wanted |= {"progress": seen.recording, "on_better": seen.better}
    seen.say("beginning the training")
    if isinstance(found.trainer, tuple):
        from memfit.integrations.lightning import plan as plan_fit

        return plan_fit(*found.trainer, **wanted)
    from memfit.integrations.transformers import plan as plan_training

    return plan_training(found.trainer, **wanted)
