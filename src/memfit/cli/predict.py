"""``memfit predict``: what a step would take, without running it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from memfit.errors import NoPlanFitsError

from .command import Command, add_json_argument, write_json
from .job_arguments import (
    add_budget_arguments,
    add_device_argument,
    add_job_argument,
    add_plan_argument,
    load_plan,
    status,
)

if TYPE_CHECKING:
    from rich.console import Console

    from memfit.figures import Prediction


class PredictCommand:
    """Predict the peak memory and the time of one training step.

    Nothing is run and no GPU is needed: the step is recorded with shapes only. Figures for GPUs
    come from the CPU's operators for now and are marked as guesses. With a budget the exit code is
    3 when the step does not fit.
    """

    name = "predict"
    summary = "predict the peak memory of a step without running it"
    example = "memfit predict examples/transformer.py:job --device a100-40gb"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the job, devices, budget and plan."""
        add_job_argument(parser)
        add_device_argument(parser, several=True)
        add_budget_arguments(parser)
        add_plan_argument(parser)
        add_json_argument(parser)

    def run(self, args: argparse.Namespace, console: Console) -> int:
        """Record the step once, and judge it for every device."""
        from memfit.devices.catalogue import load_device
        from memfit.job import load_job
        from memfit.planner.planning import read_budget
        from memfit.prediction import evaluate, record
        from memfit.strategies.plan import Plan

        budget_bytes = read_budget(args.budget)
        devices = [load_device(name) for name in args.device or ["cpu"]]
        plan = load_plan(args.plan) or Plan()
        job = load_job(args.job)
        with status(console, "recording the step", quiet=args.json):
            recording = record(job, plan)
        predictions = [
            evaluate(
                job,
                recording,
                device,
                plan,
                budget_bytes=budget_bytes,
                budget_of=args.budget_of,
            )
            for device in devices
        ]
        _show(predictions, console, as_json=args.json)
        fits = any(prediction.fits is not False for prediction in predictions)
        return 0 if fits else NoPlanFitsError.exit_code


COMMAND: Command = PredictCommand()


def _show(predictions: list[Prediction], console: Console, *, as_json: bool) -> None:
    """Show one prediction in full, several as a comparison."""
    from memfit.reports.text import comparison_table, prediction_table

    if as_json:
        values = [prediction.to_json() for prediction in predictions]
        write_json(values[0] if len(values) == 1 else values)
    elif len(predictions) == 1:
        console.print(prediction_table(predictions[0]))
    else:
        console.print(comparison_table(predictions))
