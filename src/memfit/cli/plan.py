"""``memfit plan``: the fastest way to fit a budget that keeps the results."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from .command import Command, add_json_argument, write_json
from .job_arguments import add_budget_arguments, add_device_argument, add_job_argument

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.job import Job
    from memfit.strategies.plan import Plan


class PlanCommand:
    """Find the fastest plan that fits a budget and keeps the results.

    The effective batch size never changes. Strategies that change results (bf16) are used only if
    they are allowed by name. Every peak shown comes from recording the step with the plan applied;
    nothing is run. The exit code is 3 when no plan fits; the message names the smallest peak.
    """

    name = "plan"
    summary = "find the fastest exact way to fit a budget"
    example = "memfit plan examples/transformer.py:job --budget 220MiB --save plan.yaml"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, the device, the budget and what may change."""
        add_job_argument(parser)
        add_device_argument(parser)
        add_budget_arguments(parser)
        parser.add_argument(
            "--allow",
            metavar="NAME",
            action="append",
            default=[],
            help="allow a strategy that changes results, such as bf16, or a class of them, such "
            "as approximate; may be repeated",
        )
        parser.add_argument(
            "--require",
            metavar="NAME",
            action="append",
            default=[],
            help="a strategy that the plan must have; may be repeated",
        )
        parser.add_argument(
            "--forbid",
            metavar="NAME",
            action="append",
            default=[],
            help="a strategy that the plan may not have; may be repeated",
        )
        parser.add_argument("--save", metavar="FILE", help="write the plan as YAML")
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Plan, show why, and save."""
        from memfit.job import load_job

        job = load_job(args.job)
        plan = _plan(job, args, console)
        if args.save:
            plan.save(args.save)
        if args.json:
            write_json(_as_json(plan))
        else:
            _show(plan, console, args.save)
        return 0


COMMAND: Command = PlanCommand()


def _plan(job: Job, args: argparse.Namespace, console: Console) -> Plan:
    """Plan, saying which plan is being recorded where someone is watching."""
    from memfit.planner import plan

    wanted: dict[str, Any] = {
        "device": args.device,
        "budget": args.budget,
        "allow": args.allow,
        "require": args.require,
        "forbid": args.forbid,
        "budget_of": args.budget_of,
    }
    if args.json or not console.is_terminal:
        return plan(job, **wanted)
    with console.status("recording the step as it is") as shown:
        return plan(job, **wanted, progress=lambda text: shown.update(f"recording: {text}"))


def _as_json(plan: Plan) -> dict[str, Any]:
    """Give the plan, its prediction and everything that was considered."""
    from dataclasses import asdict

    prediction = plan.prediction
    assert prediction is not None, "the planner predicts what it plans"
    return {
        **plan.to_json(),
        **prediction.to_json(),
        "strategies": plan.to_json()["strategies"],
        "considered": [asdict(considered) for considered in plan.considered],
        "refused": [{"strategy": name, "reason": reason} for name, reason in plan.refused],
    }


def _show(plan: Plan, console: Console, saved_to: str | None) -> None:
    """Show the chosen plan, what it takes and what became of the others."""
    from memfit.reports.text import plan_table, prediction_table

    assert plan.prediction is not None, "the planner predicts what it plans"
    console.print(prediction_table(plan.prediction))
    console.print()
    console.print(plan_table(plan.considered))
    for name, reason in plan.refused:
        console.print(f"Not used: {name}: {reason}", markup=False)
    if saved_to:
        console.print(f"Saved as {saved_to}.", markup=False)
